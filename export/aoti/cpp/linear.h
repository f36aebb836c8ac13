// quant::linear in packages for CPUs: y = round(x) · dequantize(weight)ᵀ + bias, as the oracle computes it.
//
//     codes, scales  ->  dense matrix in the dtype of x      a table of the element's values, times the block's step
//     x              ->  rounded x in its own dtype          the scale rule `max`, the grid of the element
//     both           ->  PyTorch's own matrix product        so sums are in the order that eager PyTorch has
//
// Inductor calls one C function at every linear, so a package compiles this file once, whatever its number of layers.
// `cpp_linear.py` writes the numbers, their values and the table `kFormats` into the place marked below. Only PyTorch's
// C interface for packages is used.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

namespace blockscale {
namespace {

// `quant.formats.format.Number`: the grid that values are rounded to, and the value of each code of up to 8 bits.
struct Number {
    int bits;
    bool integer;
    float inverse_steps;  // 2^-mantissa
    float min_normal, top_power, min, max;  // top_power: 2^max_exponent
    float const* values;
};

// `quant.formats.format.Format`; 0 rows or columns of a block are the whole axis.
struct Format {
    char const* name;
    Number const* element;
    Number const* scale;
    int64_t block_rows, block_columns;
    bool global_scale;
};

// @tables@

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr int64_t kParallel = 1 << 15;  // elements from which threads are worth starting

inline uint32_t bitsOf(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float floatOf(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline void require(AOTITorchError error, char const* call) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("a quantized linear: ") + call + " failed");
}

// ---- Rounding ------------------------------------------------------------------------------------------------------

inline float roundFloat(float x, Number const& number) {
    float const magnitude = floatOf(bitsOf(x) & 0x7FFFFFFFu);
    // The power of two below the value: clearing the mantissa bits leaves it. It is the ruler's step · 2^mantissa.
    float power = floatOf(bitsOf(x) & kInfinity);
    power = power < number.min_normal ? number.min_normal : power;
    power = power > number.top_power ? number.top_power : power;
    float const step = power * number.inverse_steps;
    float const rounded = std::nearbyint(magnitude / step) * step;
    // Comparisons are written so that NaN passes through.
    return std::copysign(rounded > number.max ? number.max : rounded, x);
}

inline float roundInteger(float x, Number const& number) {
    float const rounded = std::nearbyint(x);
    float const low = rounded < number.min ? number.min : rounded;
    return low > number.max ? number.max : low;
}

// The smallest power of two that is not below x; NaN for NaN and infinity. E8M0 has no zero: it becomes 2^-127.
inline float powerAbove(float x) {
    uint32_t const bits = bitsOf(x);
    if ((bits & kInfinity) == kInfinity) return NAN;
    uint32_t const field = bits >> 23, fraction = bits & 0x7FFFFFu;
    if (field == 0) return floatOf(fraction > 0x400000u ? 0x800000u : 0x400000u);
    return floatOf(std::min(field + (fraction != 0), 254u) << 23);
}

inline float bf16(float x) { return static_cast<float>(c10::BFloat16(x)); }

inline float nonzero(float scale) { return scale == 0.0f ? 1.0f : scale; }

// The block's scale by the rule `max`; `amax` is NaN where the block holds NaN or infinity.
inline float scaleOf(float amax, Format const& format, float global) {
    float const largest = format.element->max;
    Number const& scale = *format.scale;
    if (scale.bits == 32) return nonzero(amax / largest);
    if (scale.bits == 16) return nonzero(bf16(amax / largest));
    if (scale.values[0] != 0.0f) return powerAbove(amax / largest);  // E8M0 is the only number without a zero
    float const least = scale.min_normal * scale.inverse_steps;
    float const exact = amax / (largest * global);
    return roundFloat(exact < least ? least : exact, scale);
}

// Bits of floats without their sign sort like magnitudes, infinity above numbers and NaN above infinity.
template <typename T>
inline uint32_t amaxBits(T const* x, int64_t count) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) {
        uint32_t const bits = bitsOf(static_cast<float>(x[i])) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

inline float finiteOrNan(uint32_t bits) { return bits >= kInfinity ? NAN : floatOf(bits); }

template <typename T>
inline void roundRun(T const* x, T* out, int64_t count, Number const& element, float step) {
    if (element.integer) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            out[i] = static_cast<T>(roundInteger(static_cast<float>(x[i]) / step, element) * step);
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<T>(roundFloat(static_cast<float>(x[i]) / step, element) * step);
    }
}

// Rounds x `[rows, columns]` to `format`. `fixed` is a layer's static scale, or its global scale where the format has
// one; null measures it.
template <typename T>
void roundInput(T const* x, T* out, int64_t rows, int64_t columns, Format const& format, float const* fixed) {
    Number const& element = *format.element;
    if (fixed && !format.global_scale) {
#pragma omp parallel for if (rows * columns > kParallel)
        for (int64_t row = 0; row < rows; ++row) {
            T* const written = out + row * columns;
            roundRun(x + row * columns, written, columns, element, *fixed);
            // A saturating grid would hide infinity.
            for (int64_t i = 0; i < columns; ++i) {
                if (std::isinf(static_cast<float>(x[row * columns + i]))) written[i] = static_cast<T>(NAN);
            }
        }
        return;
    }
    float global = 1.0f;
    if (format.global_scale) {
        global = fixed ? *fixed
                       : nonzero(finiteOrNan(amaxBits(x, rows * columns)) / (element.max * format.scale->max));
    }
    int64_t const height = format.block_rows ? format.block_rows : rows;
    int64_t const width = format.block_columns ? format.block_columns : columns;
#pragma omp parallel for if (rows * columns > kParallel)
    for (int64_t top = 0; top < rows; top += height) {
        int64_t const bottom = std::min(top + height, rows);
        for (int64_t left = 0; left < columns; left += width) {
            int64_t const count = std::min(width, columns - left);
            uint32_t amax = 0;
            for (int64_t row = top; row < bottom; ++row) amax = std::max(amax, amaxBits(x + row * columns + left, count));
            float const step = scaleOf(finiteOrNan(amax), format, global) * global;
            for (int64_t row = top; row < bottom; ++row) {
                roundRun(x + row * columns + left, out + row * columns + left, count, element, step);
            }
        }
    }
}

// ---- Weights -------------------------------------------------------------------------------------------------------

// Block scales as they are stored: floats, E4M3 or E8M0.
struct Scales {
    void const* data;
    int32_t dtype;
    Number const* number;

    float operator[](int64_t index) const {
        if (dtype == aoti_torch_dtype_float32()) return static_cast<float const*>(data)[index];
        if (dtype == aoti_torch_dtype_bfloat16()) return static_cast<c10::BFloat16 const*>(data)[index];
        if (dtype == aoti_torch_dtype_float16()) return static_cast<c10::Half const*>(data)[index];
        return number->values[static_cast<uint8_t const*>(data)[index]];
    }
};

// Decodes the columns `[first, last)` of a row of codes.
template <typename T>
void decodeRun(
    uint8_t const* codes, int64_t bytes, T* out, int64_t first, int64_t last, Number const& element, float const* pairs,
    float step) {
    if (element.bits == 8) {
        for (int64_t i = first; i < last; ++i) out[i] = static_cast<T>(element.values[codes[i]] * step);
        return;
    }
    if (element.bits == 6) {  // four codes in three bytes, the first in the lowest bits
        for (int64_t i = first; i < last; ++i) {
            int64_t const byte = i * 6 / 8;
            int const word = codes[byte] | (byte + 1 < bytes ? codes[byte + 1] << 8 : 0);
            out[i] = static_cast<T>(element.values[word >> (i * 6 % 8) & 0x3F] * step);
        }
        return;
    }
    int64_t i = first;
    if (i % 2 == 1 && i < last) {
        out[i] = static_cast<T>(pairs[2 * codes[i / 2] + 1] * step);
        ++i;
    }
    for (; i + 1 < last; i += 2) {
        float const* const pair = pairs + 2 * codes[i / 2];
        out[i] = static_cast<T>(pair[0] * step);
        out[i + 1] = static_cast<T>(pair[1] * step);
    }
    if (i < last) out[i] = static_cast<T>(pairs[2 * codes[i / 2]] * step);
}

// Dequantizes a weight `[rows, columns]`: element · step, where the step is one rounded product of both scales.
template <typename T>
void dequantize(
    uint8_t const* codes, int64_t bytes, Scales const& scales, float const* global, T* out, int64_t rows,
    int64_t columns, Format const& format) {
    Number const& element = *format.element;
    std::vector<float> pairs;  // both values of each byte, the low half first
    if (element.bits == 4) {
        for (int byte = 0; byte < 256; ++byte) {
            pairs.push_back(element.values[byte & 15]);
            pairs.push_back(element.values[byte >> 4]);
        }
    }
    int64_t const height = format.block_rows ? format.block_rows : rows;
    int64_t const width = format.block_columns ? format.block_columns : columns;
    int64_t const across = (columns + width - 1) / width;
#pragma omp parallel for if (rows * columns > kParallel)
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t block = 0; block < across; ++block) {
            float step = scales[row / height * across + block];
            if (global) step = static_cast<float>(static_cast<double>(step) * static_cast<double>(*global));
            decodeRun(
                codes + row * bytes, bytes, out + row * columns, block * width, std::min((block + 1) * width, columns),
                element, pairs.data(), step);
        }
    }
}

// ---- The operation -------------------------------------------------------------------------------------------------

// A tensor that this file has made, freed at the end of its scope.
class Owned {
   public:
    Owned() = default;
    Owned(Owned const&) = delete;
    Owned& operator=(Owned const&) = delete;
    ~Owned() {
        if (handle) aoti_torch_delete_tensor_object(handle);
    }
    AtenTensorHandle handle = nullptr;
};

inline std::vector<int64_t> sizesOf(AtenTensorHandle tensor) {
    int64_t dims;
    int64_t* sizes;
    require(aoti_torch_get_dim(tensor, &dims), "the number of dimensions");
    require(aoti_torch_get_sizes(tensor, &sizes), "the shape");
    return std::vector<int64_t>(sizes, sizes + dims);
}

inline int32_t dtypeOf(AtenTensorHandle tensor) {
    int32_t dtype;
    require(aoti_torch_get_dtype(tensor, &dtype), "the dtype");
    return dtype;
}

template <typename T>
T* dataOf(AtenTensorHandle tensor) {
    void* data;
    require(aoti_torch_get_data_ptr(tensor, &data), "the data");
    return static_cast<T*>(data);
}

inline void allocate(std::vector<int64_t> const& sizes, int32_t dtype, Owned& tensor) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    require(
        aoti_torch_empty_strided(
            static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
            &tensor.handle),
        "an allocation");
}

inline void view(AtenTensorHandle tensor, int64_t rows, int64_t columns, bool transposed, Owned& matrix) {
    int64_t const sizes[2] = {transposed ? columns : rows, transposed ? rows : columns};
    int64_t const strides[2] = {transposed ? 1 : columns, transposed ? columns : 1};
    int64_t offset;
    require(aoti_torch_get_storage_offset(tensor, &offset), "the offset");
    require(aoti_torch__reinterpret_tensor(tensor, 2, sizes, strides, offset, &matrix.handle), "a view");
}

inline Format const& formatOf(char const* name) {
    for (Format const& format : kFormats) {
        if (std::strcmp(format.name, name) == 0) return format;
    }
    throw std::runtime_error(std::string("a quantized linear: unknown format ") + name);
}

template <typename T>
void compute(
    AtenTensorHandle input, int64_t tokens, AtenTensorHandle codes, AtenTensorHandle scale, AtenTensorHandle* global,
    AtenTensorHandle* bias, AtenTensorHandle* input_scale, char const* weight_format, char const* activation,
    AtenTensorHandle out) {
    int32_t const dtype = dtypeOf(input);
    auto const shape = sizesOf(codes);
    int64_t const rows = shape[0], columns = sizesOf(input).back();
    Owned rounded, dense, x, weight, y;
    if (*activation) {
        allocate({tokens, columns}, dtype, rounded);
        float const* const fixed = input_scale ? dataOf<float>(*input_scale) : nullptr;
        roundInput(dataOf<T>(input), dataOf<T>(rounded.handle), tokens, columns, formatOf(activation), fixed);
    }
    Format const& format = formatOf(weight_format);
    allocate({rows, columns}, dtype, dense);
    dequantize(
        dataOf<uint8_t>(codes), shape[1], Scales{dataOf<void>(scale), dtypeOf(scale), format.scale},
        global ? dataOf<float>(*global) : nullptr, dataOf<T>(dense.handle), rows, columns, format);
    view(*activation ? rounded.handle : input, tokens, columns, false, x);
    view(dense.handle, rows, columns, true, weight);
    view(out, tokens, rows, false, y);
    if (bias) {
        require(aoti_torch_cpu_addmm_out(y.handle, *bias, x.handle, weight.handle, 1.0, 1.0), "addmm");
    } else {
        require(aoti_torch_cpu_mm_out(y.handle, x.handle, weight.handle), "mm");
    }
}

}  // namespace
}  // namespace blockscale

extern "C" AOTITorchError aoti_torch_cpu_linear(
    AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale, AtenTensorHandle* global_scale,
    AtenTensorHandle* bias, AtenTensorHandle* input_scale, char const* weight_format, char const* activation,
    AtenTensorHandle* result) {
    using namespace blockscale;
    int32_t const dtype = dtypeOf(x);
    auto shape = sizesOf(x);
    bool contiguous;
    require(aoti_torch_is_contiguous(x, &contiguous), "the layout");
    Owned copied;
    if (!contiguous) {
        allocate(shape, dtype, copied);
        require(aoti_torch_copy_(copied.handle, x, 0), "a copy");
        x = copied.handle;
    }
    int64_t tokens = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) tokens *= shape[i];
    shape.back() = sizesOf(codes)[0];
    Owned out;
    allocate(shape, dtype, out);
    if (dtype == aoti_torch_dtype_float32()) {
        compute<float>(x, tokens, codes, scale, global_scale, bias, input_scale, weight_format, activation, out.handle);
    } else if (dtype == aoti_torch_dtype_bfloat16()) {
        compute<c10::BFloat16>(
            x, tokens, codes, scale, global_scale, bias, input_scale, weight_format, activation, out.handle);
    } else if (dtype == aoti_torch_dtype_float16()) {
        compute<c10::Half>(
            x, tokens, codes, scale, global_scale, bias, input_scale, weight_format, activation, out.handle);
    } else {
        throw std::runtime_error("a quantized linear: its input is not in FP32, BF16 or FP16");
    }
    *result = out.handle;
    out.handle = nullptr;
    return AOTI_TORCH_SUCCESS;
}
