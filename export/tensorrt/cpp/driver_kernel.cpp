#include "driver_kernel.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>

namespace blockscale {
namespace {

// The driver's functions by name. The library is opened here, so that a plugin loads on machines without a GPU too.
struct Driver {
    decltype(&::cuCtxGetCurrent) ctxGetCurrent;
    decltype(&::cuCtxGetDevice) ctxGetDevice;
    decltype(&::cuDeviceGetAttribute) deviceGetAttribute;
    decltype(&::cuModuleLoadDataEx) moduleLoadDataEx;
    decltype(&::cuModuleUnload) moduleUnload;
    decltype(&::cuModuleGetFunction) moduleGetFunction;
    decltype(&::cuFuncSetAttribute) funcSetAttribute;
    decltype(&::cuLaunchKernel) launchKernel;
    decltype(&::cuMemAlloc) memAlloc;
    decltype(&::cuMemFree) memFree;
    decltype(&::cuMemcpyHtoD) memcpyHtoD;
    decltype(&::cuGetErrorString) getErrorString;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            throw std::runtime_error("no CUDA driver on this machine (libcuda.so.1)");
        }
        auto const find = [library](auto& function, char const* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr) {
                throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; install a newer one");
            }
        };
        find(ctxGetCurrent, "cuCtxGetCurrent");
        find(ctxGetDevice, "cuCtxGetDevice");
        find(deviceGetAttribute, "cuDeviceGetAttribute");
        find(moduleLoadDataEx, "cuModuleLoadDataEx");
        find(moduleUnload, "cuModuleUnload");
        find(moduleGetFunction, "cuModuleGetFunction");
        find(funcSetAttribute, "cuFuncSetAttribute");
        find(launchKernel, "cuLaunchKernel");
        find(memAlloc, "cuMemAlloc_v2");
        find(memFree, "cuMemFree_v2");
        find(memcpyHtoD, "cuMemcpyHtoD_v2");
        find(getErrorString, "cuGetErrorString");
    }
};

Driver const& driver() {
    static Driver const functions;
    return functions;
}

void check(CUresult status, std::string const& action, std::string const& log = "") {
    if (status != CUDA_SUCCESS) {
        char const* text = nullptr;
        driver().getErrorString(status, &text);
        throw std::runtime_error(action + ": " + (text == nullptr ? "unknown CUDA error" : text) + (log.empty() ? "" : "; " + log));
    }
}

}  // namespace

Device currentDevice() {
    CUdevice device = 0;
    check(driver().ctxGetDevice(&device), "no CUDA context is current");
    std::array<int, 3> values{};
    std::array<CUdevice_attribute, 3> const attributes{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    };
    for (std::size_t i = 0; i < values.size(); ++i) {
        check(driver().deviceGetAttribute(&values[i], attributes[i], device), "reading the GPU's compute capability");
    }
    return {10 * values[0] + values[1], values[2]};
}

LoadedKernels::LoadedKernels(std::vector<KernelImage> const& images, Device device) : mDevice(device) {
    std::string known;
    for (auto const& image : images) {
        if (image.arch != device.arch) {
            known += (known.empty() ? "" : ", ") + std::to_string(image.arch);
            continue;
        }
        // The log of the PTX compiler; a size is passed in the pointer itself.
        std::array<char, 8192> log{};
        std::array<CUjit_option, 2> options{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size())};
        Entry entry{&image, nullptr, nullptr};
        check(driver().moduleLoadDataEx(&entry.module, image.ptx.c_str(), options.size(), options.data(), values.data()),
            image.name, log.data());
        mEntries.push_back(entry);
        check(driver().moduleGetFunction(&mEntries.back().function, entry.module, image.name.c_str()), image.name);
        // More than 48 KiB of dynamic shared memory must be asked for.
        check(driver().funcSetAttribute(
                  mEntries.back().function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.shared),
            image.name + ": " + std::to_string(image.shared) + " bytes of shared memory");
    }
    if (mEntries.empty()) {
        throw std::runtime_error("the engine has kernels for compute capability " + known + ", and this GPU has "
            + std::to_string(device.arch) + ": build the engine for it");
    }
}

LoadedKernels::~LoadedKernels() {
    // Failures are ignored: the context may be gone already.
    for (auto const& entry : mEntries) {
        driver().moduleUnload(entry.module);
    }
    if (mNumbers != 0) {
        driver().memFree(mNumbers);
    }
}

void const* LoadedKernels::countingNumbers(int count) {
    if (count > mCount) {
        // A power of two at least, so that growing batches allocate rarely. Earlier numbers may still be read.
        int size = 64;
        while (size < count) {
            size *= 2;
        }
        std::vector<int> numbers(size);
        std::iota(numbers.begin(), numbers.end(), 0);
        CUdeviceptr memory = 0;
        check(driver().memAlloc(&memory, numbers.size() * sizeof(int)), "allocating the table of pages");
        check(driver().memcpyHtoD(memory, numbers.data(), numbers.size() * sizeof(int)), "copying the table of pages");
        if (mNumbers != 0) {
            check(driver().memFree(mNumbers), "freeing the table of pages");  // waits for kernels that read it
        }
        mNumbers = memory;
        mCount = size;
    }
    return reinterpret_cast<void const*>(mNumbers);
}

std::vector<int> LoadedKernels::rowsOf(std::string_view role) const {
    std::vector<int> rows;
    for (auto const& entry : mEntries) {
        if (entry.image->role == role) {
            rows.push_back(entry.image->rows);
        }
    }
    std::sort(rows.begin(), rows.end());
    return rows;
}

void LoadedKernels::launch(
    std::string_view role, int rows, Grid grid, std::vector<Argument> const& arguments, CUstream stream) const {
    auto const entry = std::find_if(mEntries.begin(), mEntries.end(),
        [&](Entry const& other) { return other.image->role == role && other.image->rows == rows; });
    if (entry == mEntries.end()) {
        throw std::runtime_error("the engine has no kernel " + std::string(role) + " with tiles of " + std::to_string(rows));
    }
    auto const& image = *entry->image;
    // The driver takes a pointer to each value; a 32-bit integer is the low half of its cell on these machines.
    std::vector<std::uint64_t> cells;
    for (auto const& parameter : image.parameters) {
        auto const argument = std::find_if(arguments.begin(), arguments.end(),
            [&](Argument const& other) { return other.name == parameter.name; });
        if (argument == arguments.end()) {
            throw std::runtime_error(image.name + ": no value for its parameter " + parameter.name);
        }
        cells.push_back(argument->value);
    }
    std::vector<void*> pointers;
    for (auto& cell : cells) {
        pointers.push_back(&cell);
    }
    check(driver().launchKernel(entry->function, grid.x, grid.y, grid.z, 32 * image.warps, 1, 1, image.shared, stream,
              pointers.data(), nullptr),
        image.name + ": launch");
}

LoadedKernels& KernelCache::loaded() {
    CUcontext context = nullptr;
    check(driver().ctxGetCurrent(&context), "no CUDA context is current");
    std::lock_guard<std::mutex> const lock(mMutex);
    auto& kernels = mLoaded[context];
    if (kernels == nullptr) {
        kernels = std::make_unique<LoadedKernels>(mImages, currentDevice());
    }
    return *kernels;
}

}  // namespace blockscale
