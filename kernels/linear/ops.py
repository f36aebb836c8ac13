"""The custom op of a quantized linear: one for all formats, which are arguments by name.

    quant::linear(x, codes, scale, global_scale?, bias?, input_scale?, weight_format, activation) -> y

The op is the seam between worlds: eager PyTorch, torch.compile, torch.export, ONNX and TensorRT all see the same
node, and each has its own translation of it. `quant::grouped_linear` (experts.py) and `quant::embedding`
(embedding.py) are its siblings. On a GPU, `kernels/linear/dispatch.py` picks a kernel. The body below is
the oracle: it rounds the input to the activation format, dequantizes the weight exactly and calls a plain matmul. It
runs anywhere.

On a CPU, dequantizing costs more than a one-token matmul, so the oracle keeps dequantized weights while they fit in
2 GiB (`set_weight_cache`, or in bytes the environment variable `BLOCKSCALE_CPU_CACHE`); a weight beyond that is
dequantized in slices of rows at every call. First come, first kept: a decoder uses its layers in turn, and turning the
cache over would then miss every time.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.attention.forward import has_fp8_tensor_cores
from quant.kernels.layout import is_prepacked, restore
from quant.kernels.linear import dispatch
from quant.kernels.linear.fp8_gemm import fp8_linear_fused, takes

LINEAR = "quant::linear"
_SLICE_ELEMENTS = 1 << 23


def quantized_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    activation: Format | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` through the custom op.

    Args:
        x: `[..., in]`, FP16, BF16 or FP32.
        weight: `[out, in]`.
        bias: `[out]`, dtype of `x`.
        input_scale: static scale of the activation format, float32 scalar; None measures each input.
        activation: format that `x` is rounded to first; None leaves it.

    Returns:
        `[..., out]`, dtype of `x`.

    Raises:
        ValueError: `x` and `weight` disagree on the number of input features.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"input {list(x.shape)} does not fit a weight of shape {list(weight.shape)} [out, in]")
    return torch.ops.quant.linear(  # type: ignore[no-any-return]
        x,
        weight.codes,
        weight.scale,
        weight.global_scale,
        bias,
        input_scale,
        weight.format.name,
        activation.name if activation else "",
    )


def set_weight_cache(nbytes: int) -> None:
    """Lets linears on a CPU keep at most `nbytes` of dequantized weights between calls, and drops what is kept now.

    Without a call it is what the environment variable `BLOCKSCALE_CPU_CACHE` says, else 2 GiB. 0 keeps none: memory
    is then that of the codes, and each call dequantizes again.

    Raises:
        ValueError: `nbytes` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"weight cache of {nbytes} bytes; expected 0, which keeps none, or more")
    _cache.clear()
    _cache.budget = nbytes


@dataclass(frozen=True)
class _Entry:
    """A dequantized weight and what it was made of: the scales, and how often each tensor was written to."""

    dense: torch.Tensor
    versions: tuple[int, ...]
    scales: tuple[weakref.ref[torch.Tensor], ...]

    def is_of(self, codes: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether `dense` still is the weight that `codes` and `scales` say, in `dtype`."""
        return (
            self.dense.dtype is dtype
            and self.versions == _versions(codes, scales)
            and len(self.scales) == len(scales)
            and all(ref() is scale for ref, scale in zip(self.scales, scales, strict=True))
        )


def _versions(codes: torch.Tensor, scales: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return codes._version, *(scale._version for scale in scales)


class _Cache:
    """Dequantized weights by identity of their codes, freed with them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries = WeakIdKeyDictionary()

    def clear(self) -> None:
        self.entries = WeakIdKeyDictionary()

    def get(self, weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The weight in `dtype`, or None where it does not fit."""
        codes = weight.codes
        scales = [weight.scale] if weight.global_scale is None else [weight.scale, weight.global_scale]
        if codes.device.type != "cpu" or codes._base is not None or any(t.is_inference() for t in (codes, *scales)):
            return None
        entry = self.entries.get(codes)
        if entry is None or not entry.is_of(codes, scales, dtype):
            self.entries.pop(codes, None)
            held = sum(entry.dense.nbytes for entry in self.entries.values())
            if held + math.prod(weight.shape) * dtype.itemsize > self.budget:
                return None
            refs = tuple(weakref.ref(scale) for scale in scales)
            entry = _Entry(weight.dequantize(dtype), _versions(codes, scales), refs)
            self.entries[codes] = entry
        return entry.dense  # type: ignore[no-any-return]


def _budget(text: str | None) -> int:
    """What the environment variable says, in bytes."""
    if text is None:
        return 2 << 30
    if not text.isdecimal():
        raise ValueError(f"BLOCKSCALE_CPU_CACHE={text!r}: expected a number of bytes; 0 keeps no dequantized weights")
    return int(text)


_cache = _Cache(_budget(os.environ.get("BLOCKSCALE_CPU_CACHE")))


def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    weight_format: str,
    activation: str,
) -> torch.Tensor:
    format = FORMATS[weight_format]
    weight = BlockScaledTensor(codes, scale, format, (codes.shape[0], x.shape[-1]), global_scale)
    if x.is_cuda and takes(format, activation, weight.shape, x.dtype) and has_fp8_tensor_cores(x.device):
        return fp8_linear_fused(x, codes, scale, bias, input_scale, activation)
    if x.is_cuda:
        y = dispatch.linear(x, weight, bias, input_scale, activation)
        if y is not None:
            return y
    if is_prepacked(weight):
        weight = restore(weight)
        codes, scale = weight.codes, weight.scale
    if activation:
        x = round_activation(x, FORMATS[activation], input_scale)
    dense = _cache.get(weight, x.dtype)
    if dense is not None:
        return linear(x, dense, bias)
    out = x.new_empty(*x.shape[:-1], codes.shape[0])
    block_rows = format.block_shape(weight.shape)[0]
    rows = max(_SLICE_ELEMENTS // x.shape[-1] // block_rows, 1) * block_rows
    for start in range(0, codes.shape[0], rows):
        stop = min(start + rows, codes.shape[0])
        part = scale if format.per_tensor else scale[start // block_rows : -(-stop // block_rows)]
        piece = replace(weight, codes=codes[start:stop], scale=part, shape=(stop - start, x.shape[-1]))
        out[..., start:stop] = linear(x, piece.dequantize(x.dtype), None if bias is None else bias[start:stop])
    return out


def _fake(x: torch.Tensor, codes: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


torch.library.define(
    LINEAR,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? bias, Tensor? input_scale, "
    "str weight_format, str activation) -> Tensor",
)
torch.library.impl(LINEAR, "default", _linear)
torch.library.register_fake(LINEAR, _fake)
