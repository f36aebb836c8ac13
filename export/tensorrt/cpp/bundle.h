// Kernels as a plugin carries them in an engine: the text that quant/export/tensorrt/plugin.py writes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace blockscale {

struct Parameter {
    std::string name;
    bool isPointer;  // otherwise an integer
};

struct KernelImage {
    std::string role;  // in the plugin: attend, write, split, whole, reduce
    std::string name;  // of the entry point
    std::string ptx;
    int arch;    // compute capability, 90 for Hopper
    int warps;   // of a block
    int shared;  // bytes of dynamic shared memory
    int rows;    // of the kernel's tile
    std::vector<Parameter> parameters;
};

// The kernels of a bundle; std::invalid_argument where the text is none, or is cut off.
std::vector<KernelImage> parseBundle(std::string_view text);

}  // namespace blockscale
