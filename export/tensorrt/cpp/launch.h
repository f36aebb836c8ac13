// How the plugins' kernels are launched; nothing here knows TensorRT, so tests call it directly.
#pragma once

#include <cstddef>

#include "driver_kernel.h"

namespace blockscale {

// Dense FP8 attention: the node QuantFp8Attention (quant/export/tensorrt/plugin.py).
struct DenseAttention {
    int batch, heads, kvHeads, queries, keys;
    void const *q, *k, *v, *scales;
    void* out;
};
void attend(LoadedKernels& kernels, DenseAttention const& call, CUstream stream);

// Attention over a quantized cache: the node QuantCacheAttention (quant/export/tensorrt/cache_plugin.py).
struct CacheAttention {
    int batch, heads, kvHeads, fresh, dim, capacity;  // `fresh` new tokens
    bool isNvfp4;
    void const *q, *k, *v;
    void *kCache, *vCache;
    void *kBlocks, *vBlocks;  // block scales of NVFP4; null for FP8
    void const *kScale, *vScale, *past, *lengths;
    void* out;
    void* workspace;
};

// Bytes of the workspace of a call with these sizes, on a GPU of any size.
std::size_t workspaceBytes(CacheAttention const& call);

void attend(LoadedKernels& kernels, CacheAttention const& call, CUstream stream);

}  // namespace blockscale
