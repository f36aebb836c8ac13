// Kernels are loaded and launched through the CUDA driver, whose library is opened at run time.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "bundle.h"

namespace blockscale {

// A value for a kernel's parameter of this name: an address, or an integer.
struct Argument {
    std::string_view name;
    std::uint64_t value;
};

inline Argument address(std::string_view name, void const* pointer) {
    return {name, reinterpret_cast<std::uint64_t>(pointer)};
}

inline Argument integer(std::string_view name, std::int64_t value) {
    return {name, static_cast<std::uint64_t>(value)};
}

struct Grid {
    unsigned x, y, z;
};

// Facts of the current device. std::runtime_error where there is no driver or no context.
struct Device {
    int arch;            // compute capability, 90 for Hopper
    int multiprocessors;
};
Device currentDevice();

// The kernels of a bundle for one GPU, in the CUDA context that was current when they were loaded.
class LoadedKernels {
public:
    // Loads the kernels of `images` for the current device; std::runtime_error names the architectures there are.
    LoadedKernels(std::vector<KernelImage> const& images, Device device);
    ~LoadedKernels();
    LoadedKernels(LoadedKernels const&) = delete;
    LoadedKernels& operator=(LoadedKernels const&) = delete;

    Device device() const { return mDevice; }

    // Numbers 0, 1, 2, … in the GPU's memory, at least `count` of them: the pages of dense caches.
    void const* countingNumbers(int count);

    // Rows of the tiles of the kernels that have this role, ascending.
    std::vector<int> rowsOf(std::string_view role) const;

    // Launches the kernel of this role and tile; every parameter must be among `arguments`.
    void launch(std::string_view role, int rows, Grid grid, std::vector<Argument> const& arguments, CUstream stream) const;

private:
    struct Entry {
        KernelImage const* image;
        CUmodule module;
        CUfunction function;
    };
    Device mDevice;
    std::vector<Entry> mEntries;
    CUdeviceptr mNumbers = 0;
    int mCount = 0;
};

// One set of loaded kernels for each CUDA context, shared by the copies of a plugin.
class KernelCache {
public:
    explicit KernelCache(std::string_view bundle) : mText(bundle), mImages(parseBundle(bundle)) {}

    std::string const& text() const { return mText; }
    LoadedKernels& loaded();

private:
    std::string mText;
    std::vector<KernelImage> mImages;
    std::mutex mMutex;
    std::map<CUcontext, std::unique_ptr<LoadedKernels>> mLoaded;
};

}  // namespace blockscale
