// The nodes QuantFp8Attention and QuantCacheAttention as plugins of TensorRT and TensorRT-RTX.
//
// An engine that our exporter built carries the kernels of its nodes as a bundle of PTX in the plugins' fields. A program
// that loads such an engine first registers these plugins:
//
//     runtime->getPluginRegistry().loadLibrary("libblockscale_plugins.so");
//     auto* engine = runtime->deserializeCudaEngine(data, size);
//
// Nothing is compiled but by the driver, and no Python, Triton or CUDA runtime is needed.
#include <NvInferRuntime.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch.h"

namespace {

using namespace nvinfer1;

constexpr char const* kVersion = "1";
constexpr char const* kNamespace = "quant";
constexpr char const* kKernels = "kernels";

ILoggerFinder* loggerFinder = nullptr;

// TensorRT takes no exceptions: a message for its log, and a status.
int32_t failed(char const* node, std::exception const& error) {
    if (loggerFinder != nullptr && loggerFinder->findLogger() != nullptr) {
        loggerFinder->findLogger()->log(ILogger::Severity::kERROR, (std::string(node) + ": " + error.what()).c_str());
    }
    return 1;
}

// A node's attributes and its kernels, as the engine stores them.
struct Settings {
    int32_t causal = 0;
    int32_t outputType = 16;  // ONNX's number: 16 is BF16, 10 is FP16
    float softmaxScale = 0.0F;
    std::string format = "fp8";
    std::shared_ptr<blockscale::KernelCache> kernels;

    explicit Settings(PluginFieldCollection const* fields) {
        for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
            auto const& field = fields->fields[i];
            std::string const name = field.name;
            if (field.data == nullptr) {
                continue;
            }
            std::string_view const text(static_cast<char const*>(field.data), field.length);
            if (name == "causal") {
                std::memcpy(&causal, field.data, sizeof causal);
            } else if (name == "output_type") {
                std::memcpy(&outputType, field.data, sizeof outputType);
            } else if (name == "softmax_scale") {
                std::memcpy(&softmaxScale, field.data, sizeof softmaxScale);
            } else if (name == "format") {
                format = std::string(text);
            } else if (name == kKernels) {
                kernels = std::make_shared<blockscale::KernelCache>(text);
            }
        }
    }

    bool isNvfp4() const { return format == "nvfp4"; }
};

// The parts of IPluginV3 that both nodes share. A node says how many tensors it has, of which types and shapes, and runs.
class Plugin : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
public:
    Plugin(char const* name, Settings settings) : mName(name), mSettings(std::move(settings)) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    AsciiChar const* getPluginName() const noexcept override { return mName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

    bool supportsFormatCombination(
        int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t) noexcept override {
        auto const& described = tensors[position].desc;
        return described.format == TensorFormat::kLINEAR && described.type == expectedType(position, inputs, tensors[0].desc.type);
    }

    int32_t configurePlugin(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override {
        if (mSettings.kernels == nullptr) {
            return failed(mName, std::runtime_error("the node has no kernels; build its engine with `quant export`"));
        }
        return 0;
    }

    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
        // PTX is compiled here and not in `enqueue`, which may be captured into a CUDA graph.
        return guarded([this] { mSettings.kernels->loaded(); });
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        mFields.clear();
        mFields.emplace_back("causal", &mSettings.causal, PluginFieldType::kINT32, 1);
        mFields.emplace_back("output_type", &mSettings.outputType, PluginFieldType::kINT32, 1);
        mFields.emplace_back("softmax_scale", &mSettings.softmaxScale, PluginFieldType::kFLOAT32, 1);
        auto const& format = mSettings.format;
        mFields.emplace_back("format", format.data(), PluginFieldType::kCHAR, static_cast<int32_t>(format.size()));
        if (mSettings.kernels != nullptr) {
            auto const& text = mSettings.kernels->text();
            mFields.emplace_back(kKernels, text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(text.size()));
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
        return &mCollection;
    }

protected:
    virtual DataType expectedType(int32_t position, int32_t inputs, DataType first) const = 0;

    int32_t guarded(std::function<void()> const& action) noexcept {
        try {
            if (mSettings.kernels == nullptr) {
                throw std::runtime_error("the engine carries no kernels for this node; build it with `quant export`");
            }
            action();
            return 0;
        } catch (std::exception const& error) {
            return failed(mName, error);
        }
    }

    char const* mName;
    Settings mSettings;

private:
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection{};
};

int size(Dims const& dims, int axis) { return static_cast<int>(dims.d[axis]); }

// q, k, v, scales -> out; see quant/export/tensorrt/plugin.py.
class DensePlugin final : public Plugin {
public:
    using Plugin::Plugin;

    IPluginV3* clone() noexcept override { return new DensePlugin(mName, mSettings); }
    int32_t getNbOutputs() const noexcept override { return 1; }

    int32_t getOutputDataTypes(DataType* outputs, int32_t, DataType const*, int32_t) const noexcept override {
        outputs[0] = outputType();
        return 0;
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
        IExprBuilder&) noexcept override {
        outputs[0] = inputs[0];
        return 0;
    }

    int32_t enqueue(PluginTensorDesc const* inputs, PluginTensorDesc const*, void const* const* in, void* const* out,
        void*, cudaStream_t stream) noexcept override {
        auto const &q = inputs[0].dims, &k = inputs[1].dims;
        blockscale::DenseAttention const call{
            size(q, 0), size(q, 1), size(k, 1), size(q, 2), size(k, 2), in[0], in[1], in[2], in[3], out[0]};
        return guarded([&] { attend(mSettings.kernels->loaded(), call, reinterpret_cast<CUstream>(stream)); });
    }

private:
    DataType outputType() const { return mSettings.outputType == 10 ? DataType::kHALF : DataType::kBF16; }

    DataType expectedType(int32_t position, int32_t, DataType) const override {
        return position < 3 ? DataType::kFP8 : position == 3 ? DataType::kFLOAT : outputType();
    }
};

// q, k, v, caches, scales, past, lengths -> out, caches; see quant/export/tensorrt/cache_plugin.py.
class CachePlugin final : public Plugin {
public:
    using Plugin::Plugin;

    IPluginV3* clone() noexcept override { return new CachePlugin(mName, mSettings); }
    int32_t getNbOutputs() const noexcept override { return 1 + caches(); }

    int32_t getOutputDataTypes(DataType* outputs, int32_t count, DataType const* inputs, int32_t) const noexcept override {
        outputs[0] = inputs[0];
        std::copy_n(inputs + 3, count - 1, outputs + 1);
        return 0;
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs,
        int32_t count, IExprBuilder&) noexcept override {
        outputs[0] = inputs[0];
        std::copy_n(inputs + 3, count - 1, outputs + 1);
        return 0;
    }

    // Outputs of caches are the inputs at the same addresses. They are not declared as aliases, which TensorRT's
    // compiler refuses between other layers: the caller binds them so, and `enqueue` checks it.
    int32_t enqueue(PluginTensorDesc const* inputs, PluginTensorDesc const*, void const* const* in, void* const* out,
        void* workspace, cudaStream_t stream) noexcept override {
        return guarded([&] {
            for (int i = 0; i < caches(); ++i) {
                if (in[3 + i] != out[1 + i]) {
                    throw std::runtime_error("a cache's output must have the address of its input: bind both to it");
                }
            }
            auto call = describe([inputs](int i) -> Dims const& { return inputs[i].dims; });
            bool const hasBlocks = mSettings.isNvfp4();
            void const* const* scales = in + 3 + caches();
            call.q = in[0], call.k = in[1], call.v = in[2];
            call.kCache = out[1], call.vCache = out[2];
            call.kBlocks = hasBlocks ? out[3] : nullptr, call.vBlocks = hasBlocks ? out[4] : nullptr;
            call.kScale = scales[0], call.vScale = scales[1], call.past = scales[2], call.lengths = scales[3];
            call.out = out[0], call.workspace = workspace;
            attend(mSettings.kernels->loaded(), call, reinterpret_cast<CUstream>(stream));
        });
    }

    size_t getWorkspaceSize(
        DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        return blockscale::workspaceBytes(describe([inputs](int i) -> Dims const& { return inputs[i].max; }));
    }

private:
    int32_t caches() const { return mSettings.isNvfp4() ? 4 : 2; }

    template <typename DimsOf>
    blockscale::CacheAttention describe(DimsOf dimsOf) const {
        blockscale::CacheAttention call{};
        auto const &q = dimsOf(0), &k = dimsOf(1), &cache = dimsOf(3);
        call.batch = size(q, 0), call.heads = size(q, 1), call.fresh = size(q, 2), call.dim = size(q, 3);
        call.kvHeads = size(k, 1), call.capacity = size(cache, 2), call.isNvfp4 = mSettings.isNvfp4();
        return call;
    }

    DataType expectedType(int32_t position, int32_t inputs, DataType first) const override {
        // An output has the type of the input that it continues: out that of q, caches their own.
        int32_t const tensor = position < inputs ? position : position == inputs ? 0 : position - inputs + 2;
        if (tensor < 3) {
            bool const is16Bit = first == DataType::kBF16 || first == DataType::kHALF;
            return is16Bit ? first : DataType::kBF16;
        }
        // Bytes of two E2M1 codes are called FP8, too: TensorRT-RTX 1.7 builds no graph of INT8 and FP8.
        if (tensor < 3 + caches()) {
            return DataType::kFP8;
        }
        return tensor < 5 + caches() ? DataType::kFLOAT : DataType::kINT32;
    }
};

template <typename Node>
class Creator final : public IPluginCreatorV3One {
public:
    explicit Creator(char const* name) : mName(name) {
        mFields.emplace_back("causal", nullptr, PluginFieldType::kINT32, 1);
        mFields.emplace_back("output_type", nullptr, PluginFieldType::kINT32, 1);
        mFields.emplace_back("softmax_scale", nullptr, PluginFieldType::kFLOAT32, 1);
        mFields.emplace_back("format", nullptr, PluginFieldType::kCHAR, 1);
        mFields.emplace_back(kKernels, nullptr, PluginFieldType::kCHAR, 1);
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    IPluginV3* createPlugin(
        AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override {
        try {
            return new Node(mName, Settings(fields));
        } catch (std::exception const& error) {
            failed(mName, error);
            return nullptr;
        }
    }

    PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    AsciiChar const* getPluginName() const noexcept override { return mName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    char const* mName;
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection{};
};

}  // namespace

#define BLOCKSCALE_EXPORT extern "C" __attribute__((visibility("default")))

// TensorRT's registry calls these when it loads the library.
BLOCKSCALE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static Creator<DensePlugin> dense("QuantFp8Attention");
    static Creator<CachePlugin> cache("QuantCacheAttention");
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&dense, &cache};
    count = 2;
    return creators;
}

BLOCKSCALE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { loggerFinder = finder; }
