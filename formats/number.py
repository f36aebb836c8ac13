"""A `Number` defines the bits of one element, or of one scale.

A small float is a sign bit, `exponent` bits and `mantissa` bits. With exponent field E, mantissa field M:

    E > 0:  ±2^(E - bias) · (1 + M / 2^mantissa)      normal
    E = 0:  ±2^(1 - bias) · (M / 2^mantissa)          subnormal, zero included

An integer is the same thing with no exponent field: the codes of `int4` and `int8` are two's complement. INT4 uses all
of them, -8..7, because the sixteenth code lowers the error of a layer by 5%; INT8 uses the symmetric range -127..127.
E8M0 is a bare power of two, with no sign and no zero. Everything else about a number (its bits, its grid, its largest
code) follows from these few fields and is computed here once.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; NVIDIA's NVFP4 description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

# Plans name formats, and reading a plan should not take the seconds that importing torch does.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Number:
    """A number format, by its fields.

    Attributes:
        name: the name as `FORMATS`, plans and reports print it.
        exponent: exponent bits; 0 for an integer.
        mantissa: mantissa bits; for an integer, the bits below the sign.
        bias: exponent bias.
        max: largest finite value that is used.
        dtype_name: torch's name of the dtype that holds one code, or None where codes are packed several to a byte.
        signed: False only for E8M0.
        lowest: smallest finite value that is used, where that is not -max.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    max: float
    dtype_name: str | None
    signed: bool = True
    lowest: float | None = None

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
        """Returns the value of every code: float32 of shape [2**bits], NaN where the code means none.

        Raises:
            ValueError: the number is a wide dtype, whose codes are not enumerated.
        """
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
INT8 = Number("int8", 0, 7, 0, 127.0, "int8")
FP16 = Number("fp16", 5, 10, 15, 65504.0, "float16")
BF16 = Number("bf16", 8, 7, 127, (2 - 2**-7) * 2.0**127, "bfloat16")
FP32 = Number("fp32", 8, 23, 127, (2 - 2**-23) * 2.0**127, "float32")

NUMBERS = {n.name: n for n in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT4, INT8, FP16, BF16, FP32)}
