"""A `Format` says how a whole weight is stored. A format is data; nothing here is written twice elsewhere.

    w = element · block_scale · global_scale

A block is `block = (rows, columns)` of the last two axes of a `[..., out, in]` weight, where 0 means the whole
axis: `(1, 16)` is NVFP4's run of sixteen inputs, `(128, 128)` DeepSeek's square, `(1, 0)` one output channel,
`(0, 0)` the whole matrix. Leading axes (the experts of a fused MoE parameter) are independent matrices.

The same descriptor serves activations `[..., tokens, in]`: a row is then a token, so `fp8_token` is the format
of one scale a token, and `fp8_group` the format of DeepSeek's 1×128 groups.

A `Number` defines the bits of one element, or of one scale. A small float is a sign bit, `exponent` bits and `mantissa`
bits. With exponent field E, mantissa field M:

    E > 0:  ±2^(E - bias) · (1 + M / 2^mantissa)      normal
    E = 0:  ±2^(1 - bias) · (M / 2^mantissa)          subnormal, zero included

An integer is the same thing with no exponent field: the codes of `int4` and `int8` are two's complement. INT4 uses all
of them, -8..7, because the sixteenth code lowers the error of a layer by 5%. INT8 weights use the symmetric range
-127..127; inputs with a static scale saturate at -128, as QuantizeLinear of onnxruntime and TensorRT and the inputs of
compressed-tensors and ModelOpt do.
E8M0 is a bare power of two, with no sign and no zero. Everything else about a number (its bits, its grid, its largest
code) follows from these few fields and is computed here once.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; NVIDIA's NVFP4 description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from quant.base.errors import known_names

# Plans name formats, and reading a plan should not take the seconds that importing torch does.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Number:
    """A number format, by its fields."""

    name: str  # as `FORMATS`, plans and reports print it
    exponent: int  # bits; 0 for an integer
    mantissa: int  # bits; for an integer, the bits below the sign
    bias: int
    max: float  # largest finite value that is used
    dtype_name: str | None  # torch's name of the dtype that holds one code; None for codes packed several to a byte
    signed: bool = True  # False only for E8M0
    lowest: float | None = None  # smallest finite value that is used, where that is not -max

    @property
    def min(self) -> float:
        """Smallest finite value that is used."""
        return -self.max if self.lowest is None else self.lowest

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype that holds one code, or None where codes are packed several to a byte."""
        import torch

        return None if self.dtype_name is None else getattr(torch, self.dtype_name)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return int(self.signed) + self.exponent + self.mantissa

    @property
    def is_integer(self) -> bool:
        return self.exponent == 0

    @property
    def is_wide(self) -> bool:
        """Whether this is a native arithmetic dtype (FP16, BF16, FP32), used for scales and never packed."""
        return self.bits > 8

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return 1.0 if self.is_integer else 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; for E8M0, which has no subnormals, 2^-bias."""
        if not self.signed:
            return 2.0**-self.bias
        return self.min_normal if self.is_integer else self.min_normal * 2.0**-self.mantissa

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): "emax" in the OCP MX text."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """Code of `max`, sign bit clear. Positive codes grow with the value, so this is the last that is used."""
        if not self.signed:
            return (1 << self.bits) - 2
        if self.is_integer:
            return int(self.max)
        fraction = self.max / 2.0**self.max_exponent - 1
        return ((self.max_exponent + self.bias) << self.mantissa) + round(fraction * (1 << self.mantissa))

    def grid(self) -> torch.Tensor:
        """Returns all representable non-negative values in rising order, float32 `[max_code + 1]`."""
        return self.values()[: self.max_code + 1]

    def values(self) -> torch.Tensor:
        """Returns the value of every code of a number that is not wide: float32 `[2**bits]`, NaN for a code of none."""
        if self.is_wide:
            raise ValueError(f"{self.name} has 2^{self.bits} codes; they are not enumerated")
        return _values(self)


@cache
def _values(number: Number) -> torch.Tensor:
    import torch

    code = torch.arange(1 << number.bits, dtype=torch.int64, device="cpu")
    if not number.signed:
        value = torch.exp2((code - number.bias).double())
        value[-1] = torch.nan
        return value.float()
    if number.is_integer:
        return torch.where(code < 1 << (number.bits - 1), code, code - (1 << number.bits)).float()
    field = (code >> number.mantissa) & ((1 << number.exponent) - 1)
    fraction = (code & ((1 << number.mantissa) - 1)).double() / 2**number.mantissa
    magnitude = torch.exp2((field.clamp(min=1) - number.bias).double()) * (fraction + (field > 0))
    beyond = (code & ((1 << (number.bits - 1)) - 1)) > number.max_code
    magnitude[beyond] = torch.nan
    if number is E5M2:  # the only element format here that also has infinities
        magnitude[(field == 31) & (fraction == 0)] = torch.inf
    return torch.where(code >> (number.bits - 1) == 1, -magnitude, magnitude).float()


E2M1 = Number("e2m1", 2, 1, 1, 6.0, None)
E2M3 = Number("e2m3", 2, 3, 1, 7.5, None)
E3M2 = Number("e3m2", 3, 2, 3, 28.0, None)
E4M3 = Number("e4m3", 4, 3, 7, 448.0, "float8_e4m3fn")
E5M2 = Number("e5m2", 5, 2, 15, 57344.0, "float8_e5m2")
# Stored as uint8, the dtype in which both checkpoint layouts write it.
E8M0 = Number("e8m0", 8, 0, 127, 2.0**127, "uint8", signed=False)
INT4 = Number("int4", 0, 3, 0, 7.0, None, lowest=-8.0)
# Of five and six bits, which only llama.cpp's files have; a code takes a byte in memory.
INT5 = Number("int5", 0, 4, 0, 15.0, "int8", lowest=-16.0)
INT6 = Number("int6", 0, 5, 0, 31.0, "int8", lowest=-32.0)
INT8 = Number("int8", 0, 7, 0, 127.0, "int8")
STATIC_INT8 = replace(INT8, lowest=-128.0)
"""INT8 of inputs whose static scale, the calibrated amax / 127, leaves the code -128 for values beyond that range."""
UINT6 = Number("uint6", 0, 6, 0, 63.0, "uint8", signed=False)  # scales and minima of a superblock
FP16 = Number("fp16", 5, 10, 15, 65504.0, "float16")
BF16 = Number("bf16", 8, 7, 127, (2 - 2**-7) * 2.0**127, "bfloat16")
FP32 = Number("fp32", 8, 23, 127, (2 - 2**-23) * 2.0**127, "float32")

NUMBERS = {n.name: n for n in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT4, INT8, FP16, BF16, FP32)}


@dataclass(frozen=True)
class Format:
    """An element number, a scale number, the block that shares a scale, and whether a global scale exists.

    Attributes:
        name: key in `FORMATS`.
        element: number of one weight.
        scale: number of one block scale.
        block: (rows, columns) that share a scale; 0 is the whole axis.
        global_scale: whether one FP32 scale per matrix multiplies all block scales.
        input_rule: key of `SCALE_RULES`, by which block scales of an input are chosen when the model runs.
        gguf: ggml's name, of a format that only GGUF files hold; codes and scales have its numbers.
        superblock: inputs whose block scales are codes under a scale of their own in FP16; 0 for none. See
            `formats/superblocks.py`.
        minimum: whether a block has a minimum, which is subtracted, besides its scale.
    """

    name: str
    element: Number
    scale: Number
    block: tuple[int, int]
    global_scale: bool = False
    input_rule: str = "max"
    gguf: str = ""
    superblock: int = 0
    minimum: bool = False

    def __str__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: object) -> Format:
        return self  # numbers are told apart by identity, in a copied model too

    def __reduce__(self) -> Any:
        if self is FP8_HEAD:
            return (cache_format, (self.name,))
        is_registered = self in (INPUT_FORMATS.get(self.name), GGUF_FORMATS.get(self.name))
        return (get_format, (self.name,)) if is_registered else (Format, tuple(vars(self).values()))

    @property
    def per_tensor(self) -> bool:
        """Whether one block scale serves a whole matrix."""
        return self.block == (0, 0)

    @property
    def per_row(self) -> bool:
        """Whether each row has one scale: an output channel of a weight, a token of an activation."""
        return self.block == (1, 0)

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether block scales are E8M0, as in the MX formats."""
        return self.scale is E8M0

    @property
    def has_square_blocks(self) -> bool:
        """Whether a block spans several rows and several columns, as DeepSeek's squares of 128 × 128 do."""
        return self.block[0] > 1 and self.block[1] > 1

    @property
    def is_nvfp4(self) -> bool:
        """Whether it is laid out as NVFP4: runs of 16 E2M1 codes, E4M3 block scales, one FP32 scale a matrix."""
        return self.element is E2M1 and self.scale is E4M3 and self.block == (1, 16) and self.global_scale

    @property
    def has_packed_scales(self) -> bool:
        """Whether scales are stored as llama.cpp's bytes of several numbers, which `superblocks` decodes."""
        return self.superblock > 0 or self.minimum

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a superblock, or of a block where there is none, where they are packed."""
        numbers = 2 if self.minimum else 1
        if not self.superblock:
            return numbers * self.scale.bits // 8
        return numbers * (2 + self.superblock // self.block[1] * self.scale.bits // 8)

    def has_codes_of(self, other: Format) -> bool:
        """Returns whether codes and scales of both mean the same values, so that tensor cores take either."""
        return replace(self, name=other.name, input_rule=other.input_rule) == other

    @property
    def is_fp8(self) -> bool:
        """Whether elements are E4M3 with scales in FP32, whichever block shares one: no MX format."""
        return self.element is E4M3 and self.scale is FP32

    @property
    def is_static(self) -> bool:
        """Whether one scale serves a whole tensor: fused weights share it, and calibration measures an activation's."""
        return self.global_scale or self.per_tensor

    def block_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns block (rows, columns) for a tensor of `shape`, whole axes filled in. A 1-D tensor is one row."""
        rows, columns = _matrix(shape)
        return self.block[0] or max(rows, 1), self.block[1] or max(columns, 1)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the block scales of a tensor of `shape`; a short last block has a scale of its own."""
        rows, columns = _matrix(shape)
        block_rows, block_columns = self.block_shape(shape)
        if self.has_packed_scales:
            return (*shape[:-1], columns // (self.superblock or block_columns) * self.scale_bytes)
        return (*shape[:-2], math.ceil(rows / block_rows), math.ceil(columns / block_columns))

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the stored codes of a tensor of `shape`; packed codes count bytes in the last axis."""
        return (*shape[:-1], packed_width(shape[-1], self.element))

    @property
    def takes_short_blocks(self) -> bool:
        """Whether runtimes read a short last block along the reduction axis, as they do of FP8 weights in squares."""
        return self.has_square_blocks and self.element.bits == 8

    def divides(self, shape: Sequence[int]) -> bool:
        """Returns whether `shape` has no short last block along the reduction axis and no half-used byte."""
        columns = shape[-1]
        return columns % (self.superblock or self.block_shape(shape)[1]) == 0 and columns * self.element.bits % 8 == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes that a tensor of `shape` takes in this format: codes, block scales and global scales."""
        if self.gguf:  # which packs all codes in the file
            return round(math.prod(shape) * self.bits_per_weight() / 8)
        codes = math.prod(self.codes_shape(shape))
        scales = math.prod(self.scale_shape(shape)) * self.scale.bits // 8
        return codes + scales + (4 * math.prod(shape[:-2]) if self.global_scale else 0)

    def bits_per_weight(self, shape: Sequence[int] | None = None) -> float:
        """Returns bits per weight with every scale and pad counted; without a shape, the limit for large matrices."""
        if shape is not None:
            return 8 * self.nbytes(shape) / math.prod(shape)
        rows, columns = self.block
        if self.has_packed_scales:
            return self.element.bits + 8 * self.scale_bytes / (self.superblock or columns)
        return self.element.bits + (self.scale.bits / (rows * columns) if rows and columns else 0)


def packed_width(columns: int, number: Number) -> int:
    """Returns the bytes per row of `columns` codes: 4- and 6-bit codes are packed, all others take a byte each."""
    is_packed = number.bits in (4, 6) and number.dtype_name is None
    return math.ceil(columns * number.bits / 8) if is_packed else columns


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[-2] if len(shape) > 1 else 1), shape[-1]


# `fp8_channel` and `fp8_token`, and `int8` and `int8_token`, differ only in name: the rows of a weight are output
# channels, the rows of an input tokens.
_ALL = (
    Format("nvfp4", E2M1, E4M3, (1, 16), global_scale=True),
    Format("mxfp4", E2M1, E8M0, (1, 32)),
    Format("mxfp6", E2M3, E8M0, (1, 32)),
    Format("mxfp6_e3m2", E3M2, E8M0, (1, 32)),
    Format("mxfp8", E4M3, E8M0, (1, 32)),
    Format("mxfp8_e5m2", E5M2, E8M0, (1, 32)),
    Format("fp8", E4M3, FP32, (0, 0)),
    Format("fp8_channel", E4M3, FP32, (1, 0)),
    Format("fp8_block", E4M3, FP32, (128, 128)),
    Format("fp8_token", E4M3, FP32, (1, 0)),
    Format("fp8_group", E4M3, FP32, (1, 128)),
    Format("int8", INT8, FP32, (1, 0)),
    Format("int8_token", INT8, FP32, (1, 0)),
    Format("int8_tensor", STATIC_INT8, FP32, (0, 0)),
    Format("int4", INT4, BF16, (1, 128)),
    Format("int4_g64", INT4, BF16, (1, 64)),
    Format("int4_g32", INT4, BF16, (1, 32)),
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
# Laid out as another format, from which only the choice of scales at run time differs, so that no weight has them.
_OF_INPUTS = (replace(FORMATS["nvfp4"], name="nvfp4_four_over_six", input_rule="four_over_six"),)
INPUT_FORMATS: dict[str, Format] = FORMATS | {f.name: f for f in _OF_INPUTS}
"""Formats that inputs of layers may have."""
GGUF_FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("q4_0", INT4, FP16, (1, 32), gguf="Q4_0"),
        Format("q5_0", INT5, FP16, (1, 32), gguf="Q5_0"),
        Format("q5_1", INT5, FP16, (1, 32), gguf="Q5_1", minimum=True),
        Format("q8_0", INT8, FP16, (1, 32), gguf="Q8_0"),
        Format("q4_k", INT4, UINT6, (1, 32), gguf="Q4_K", superblock=256, minimum=True),
        Format("q5_k", INT5, UINT6, (1, 32), gguf="Q5_K", superblock=256, minimum=True),
        Format("q6_k", INT6, INT8, (1, 16), gguf="Q6_K", superblock=256),
    )
}
"""Formats of weights that only GGUF files hold (`quant.export.gguf`)."""
FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
WEIGHT_FORMATS = FORMATS | GGUF_FORMATS
# FP8 in codes and at run time; only a checkpoint tells a scale for each KV head from one for the tensor.
FP8_HEAD = replace(FORMATS["fp8"], name="fp8_head")
"""FP8 for a KV cache whose keys and values have a scale for each KV head."""


def get_format(name: str) -> Format:
    """Returns the format called `name`; ValueError, which lists the known ones, for an unknown name."""
    try:
        return GGUF_FORMATS.get(name) or INPUT_FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown format {name!r}; {known_names(name, INPUT_FORMATS, 'formats')}") from None


def fitting(format: Format, width: int) -> Format:
    """Returns `format`, or the one that llama.cpp takes where rows of `width` are no whole superblocks."""
    return GGUF_FORMATS[FALLBACKS[format.name]] if format.superblock and width % format.superblock else format


def cache_format(name: str | None) -> Format | None:
    """Returns the format of a KV cache that a user names, or None where the name stands for 16 bit."""
    if is_16bit(name):
        return None
    formats = FORMATS | {FP8_HEAD.name: FP8_HEAD}
    if name not in formats:
        raise ValueError(f"unknown format {name!r} of a KV cache; {known_names(name, [*formats, 'keep'], 'formats')}")
    return formats[str(name)]


def is_16bit(name: str | None) -> bool:
    """Returns whether `name` means 16 bit, which is not a format."""
    return name is None or name in ("keep", "16bit", "bf16", "fp16")


def parse_format(name: str | None) -> Format | None:
    """Returns the format that a user names, or None where the name stands for 16 bit."""
    if is_16bit(name):
        return None
    if name not in GGUF_FORMATS and name not in INPUT_FORMATS:
        known = known_names(name, [*INPUT_FORMATS, "keep"], "formats")
        raise ValueError(f"unknown format {name!r}; {known}")
    return get_format(str(name))
