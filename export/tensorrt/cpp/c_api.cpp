// Calls for tests and for programs without TensorRT: the plugins' launches as C functions. Each returns null, or an
// error's text, which lives until the thread's next call.
#include <string>

#include "launch.h"

#define BLOCKSCALE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
thread_local std::string lastError;

template <typename Call>
char const* guarded(Call&& call) {
    try {
        call();
        return nullptr;
    } catch (std::exception const& error) {
        lastError = error.what();
        return lastError.c_str();
    }
}
}  // namespace

BLOCKSCALE_EXPORT char const* blockscale_open(char const* text, std::size_t length, blockscale::KernelCache** cache) {
    return guarded([&] { *cache = new blockscale::KernelCache(std::string_view(text, length)); });
}

BLOCKSCALE_EXPORT void blockscale_close(blockscale::KernelCache* cache) { delete cache; }

BLOCKSCALE_EXPORT char const* blockscale_attend_dense(
    blockscale::KernelCache* cache, blockscale::DenseAttention const* call, CUstream stream) {
    return guarded([&] { blockscale::attend(cache->loaded(), *call, stream); });
}

BLOCKSCALE_EXPORT char const* blockscale_attend_cache(
    blockscale::KernelCache* cache, blockscale::CacheAttention const* call, CUstream stream) {
    return guarded([&] { blockscale::attend(cache->loaded(), *call, stream); });
}

BLOCKSCALE_EXPORT std::size_t blockscale_cache_workspace(blockscale::CacheAttention const* call) {
    return blockscale::workspaceBytes(*call);
}
