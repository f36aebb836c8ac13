// A stand-in for TensorRT's header of this name: only the declarations that our plugins use, so that a test can compile
// them where TensorRT is not installed. Names and signatures are those of TensorRT 10 and 11.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4, kFP4, kE8M0 };
enum class TensorFormat : int32_t { kLINEAR };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class PluginFieldType : int32_t { kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR };

struct Dims {
    int32_t nbDims;
    int64_t d[8];
};

class IDimensionExpr;
class IExprBuilder;

struct DimsExprs {
    int32_t nbDims;
    IDimensionExpr const* d[8];
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
    Dims opt;
};

struct PluginField {
    AsciiChar const* name;
    void const* data;
    PluginFieldType type;
    int32_t length;
    PluginField(AsciiChar const* name_ = nullptr, void const* data_ = nullptr,
        PluginFieldType type_ = PluginFieldType::kCHAR, int32_t length_ = 0) noexcept
        : name(name_), data(data_), type(type_), length(length_) {}
};

struct PluginFieldCollection {
    int32_t nbFields;
    PluginField const* fields;
};

class ILogger {
public:
    enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
    virtual ~ILogger() = default;
};

class ILoggerFinder {
public:
    virtual ILogger* findLogger() = 0;

protected:
    virtual ~ILoggerFinder() = default;
};

class IVersionedInterface {
public:
    virtual ~IVersionedInterface() noexcept = default;
};

class IPluginResourceContext;

class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
public:
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
        DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(
        DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(
        int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t)
        const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(
        PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    virtual IPluginV3* createPlugin(
        AsciiChar const* name, PluginFieldCollection const* fc, TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

}  // namespace nvinfer1
