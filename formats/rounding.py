"""`encode` and `round_to` round to a number's grid: to nearest, ties to even, saturating. They are the oracle.

For a float format the grid around a value with exponent e is a ruler of step 2^(e - mantissa), where e is
the value's own exponent, but never below the smallest normal's. Dividing by the step (a power of
two, so the division is exact) and rounding to an integer q places the value on the ruler, and then

    code = (e - e_min) · 2^mantissa + q

with no special cases: a subnormal has e = e_min and its code is q itself; a normal's implicit one is the
carry from q into the exponent field; and a value that rounds up into the next binade carries by itself.
Saturation is a minimum with the largest code. The number of float passes does not depend on the format.

`pack` and `unpack` convert 4- and 6-bit codes to and from bytes, along the last axis.

    4 bit: two codes a byte, the even index in the low nibble.
    6 bit: four codes in three bytes, little-endian: the bytes hold a 24-bit word with code j at bit 6·j.

A row whose length does not fill the last byte (or the last three bytes) is padded with zero codes; only the bytes that
hold at least one bit of a real code are kept, so `n` codes take ceil(n · bits / 8) bytes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import Number


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes `[..., n]`, uint8, the bits above the low `bits` clear, into bytes `[..., ceil(n · bits / 8)]`."""
    n = codes.shape[-1]
    if bits == 4:
        if n % 2:
            codes = pad(codes, (0, 1))
        # Two neighbouring codes are one little-endian 16-bit word: 0x0h0l becomes 0xhl in its low byte.
        pairs = codes.contiguous().view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    _require_six(bits)
    four = pad(codes, (0, -n % 4)).unflatten(-1, (-1, 4)).int()
    word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
    packed = torch.stack([word & 0xFF, word >> 8 & 0xFF, word >> 16], dim=-1).to(torch.uint8)
    return packed.flatten(-2)[..., : -(-n * 6 // 8)].contiguous()


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Returns codes `[..., n]`, uint8, from the bytes that `pack` made."""
    if bits == 4:
        return torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)[..., :n]
    _require_six(bits)
    three = pad(packed, (0, -packed.shape[-1] % 3)).unflatten(-1, (-1, 3)).int()
    word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    codes = torch.stack([word & 0x3F, word >> 6 & 0x3F, word >> 12 & 0x3F, word >> 18], dim=-1).to(torch.uint8)
    return codes.flatten(-2)[..., :n]


def _require_six(bits: int) -> None:
    if bits != 6:
        raise ValueError(f"codes of {bits} bits are stored one to a byte; only 4- and 6-bit codes are packed")


_FP32_MANTISSA, _FP32_BIAS = 23, 127


def encode(x: Tensor, number: Number) -> Tensor:
    """Returns the codes of the values of `number` that are nearest to `x`.

    The maths is in float32 (FP64 is rounded to FP32 first); `number` is not a wide dtype. The codes have the dtype
    `number.torch_dtype` where there is one (float8, int8; uint8 for E8M0), else uint8 with the code in the low bits.
    Values beyond min or max, infinities included, become min or max. NaN stays NaN in FP8 and E8M0, whose NaN also
    stands for infinity; other numbers have no code for it, and any comes out. -0.0 keeps its sign.
    """
    x = x.float()
    if number.torch_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.clamp(-number.max, number.max).to(number.torch_dtype)
    if number.is_integer:
        code = x.round().clamp_(number.min, number.max).to(torch.int8)
        return code if number.torch_dtype is torch.int8 else code.view(torch.uint8).bitwise_and_(0x0F)
    if not number.signed:
        return encode_power_of_two(x)
    # A float32 is sign (bit 31), exponent field (bits 30 to 23) and mantissa (22 to 0).
    bits = x.contiguous().view(torch.int32)
    code = _magnitude_code(bits & 0x7FFFFFFF, number).to(torch.uint8)
    sign = (bits < 0).to(torch.uint8).mul_(1 << (number.bits - 1))
    return code.bitwise_or_(sign)


def _magnitude_code(bits: Tensor, number: Number) -> Tensor:
    """Returns the codes, int32, of non-negative float32 values with these bit patterns (int32, overwritten)."""
    e_min = 1 - number.bias
    magnitude = bits.view(torch.float32)
    # Below the smallest normal the ruler gets no finer: subnormals of the target share the step at e_min.
    exponent = (bits >> _FP32_MANTISSA).clamp_(min=e_min + _FP32_BIAS)
    # 1/step, built from its exponent bits; at most 2^(mantissa - e_min), so it never overflows.
    inverse_step = ((2 * _FP32_BIAS + number.mantissa - exponent).clamp_(min=1) << _FP32_MANTISSA).view(torch.float32)
    q = torch.mul(magnitude, inverse_step).round_().clamp_(max=2.0 ** (number.mantissa + 1)).to(torch.int32)
    # A sum, not an OR: a q of 2^(mantissa + 1) carries into the exponent field, which is the next binade.
    code = exponent.sub_(e_min + _FP32_BIAS).bitwise_left_shift_(number.mantissa).add_(q)
    return code.clamp_(max=number.max_code)


def encode_power_of_two(x: Tensor) -> Tensor:
    """Returns E8M0 codes, uint8, of non-negative `x`: the nearest exponent not below x (rounding up).

    Scales are rounded up so that no element of the block saturates. Zero gets the smallest scale; NaN and infinity get
    NaN, code 255.
    """
    # x = mantissa · 2^exponent with mantissa in [0.5, 1): a power of two has the mantissa 0.5, and is 2^(exponent - 1).
    mantissa, exponent = torch.frexp(x.float().clamp(max=2.0**_FP32_BIAS))
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = torch.where(x == 0, torch.full_like(exponent, -_FP32_BIAS), exponent)
    code = exponent.clamp_(-_FP32_BIAS, _FP32_BIAS).add_(_FP32_BIAS)
    return code.masked_fill_(~x.isfinite(), 255).to(torch.uint8)


def decode(codes: Tensor, number: Number) -> Tensor:
    """Returns the values of `codes`, float32, same shape. The inverse of `encode`; also reads wide scale dtypes."""
    if codes.dtype.is_floating_point or codes.dtype is torch.int8:
        return codes.float()
    if not number.signed:
        return decode_power_of_two(codes)
    return number.values().to(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_power_of_two(codes: Tensor) -> Tensor:
    """Returns 2^(code - 127), float32, from E8M0 codes (uint8). Exact: code 0 is a float32 subnormal, 255 is NaN."""
    # Both exponents have the bias 127, so a code is the exponent field; field 0 would be zero, where E8M0 has 2^-127.
    bits = codes.int() << _FP32_MANTISSA
    bits = torch.where(codes == 0, 1 << (_FP32_MANTISSA - 1), bits)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def round_to(x: Tensor, number: Number) -> Tensor:
    """Returns `x` rounded to the grid of `number`: `decode(encode(x))`, float32, without materialising codes."""
    x = x.float()
    if number.torch_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.clamp(-number.max, number.max).to(number.torch_dtype).float()
    if number.is_wide:
        assert number.torch_dtype is not None
        return x.to(number.torch_dtype).float()
    if number.is_integer:
        return x.round().clamp_(number.min, number.max)
    if not number.signed:
        return decode_power_of_two(encode_power_of_two(x))
    magnitude = x.abs()
    # The power of two below each value: clearing the mantissa bits leaves it.
    step = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    step.clamp_(min=number.min_normal, max=2.0**number.max_exponent).mul_(2.0**-number.mantissa)
    magnitude.div_(step).round_().mul_(step).clamp_(max=number.max)
    return magnitude.copysign_(x)
