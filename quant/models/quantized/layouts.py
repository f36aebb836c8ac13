"""Finding the parts of quantized tensors: which names in the files together hold one tensor of the original.

Each function takes the name of a tensor on disk. Where that is the first part of a quantized tensor, it returns the
original's name, its shape, the names of all parts, and the function of `unpacking` that decodes them; else None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from quant.base.errors import UserError, listed
from quant.models.quantized import unpacking
from quant.models.quantized_config import CODES, WAY_OUT, Quantization, QuantMethod
from quant.models.quantized.unpacking import Block, Parts

if TYPE_CHECKING:
    from quant.models.quantized_tensors import QuantizedTensors


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of the original checkpoint that the file holds as codes and scales.

    Attributes:
        shape: the shape of the original.
        parts: the names on disk of the parts, by role: weight, weight_scale, qzeros …
        decode: a function that computes the tensor, or one matrix of a stack, from its parts.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Parts, torch.dtype], torch.Tensor]


Found = tuple[str, Packed]
"""The name of an original tensor, and its parts."""


def _find_scaled(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `X` with `X_scale` or `X_scale_inv`, or `X_packed`; `X` may be stacked experts."""
    original = name.removesuffix("_packed")
    # DeepSeek's `weight_scale_inv` is not a reciprocal in spite of its name: codes are multiplied by it, as by
    # `weight_scale`.
    scale = next((f"{original}{s}" for s in ("_scale_inv", "_scale") if tensors.on_disk(f"{original}{s}")), None)
    if scale is None or tensors.stored_dtype(name) not in CODES:
        return None
    parts = {"weight_packed" if name != original else "weight": name, "weight_scale": scale}
    suffixes = ("_scale_2", "_global_scale", "_zero_point", "_g_idx")
    parts |= {f"weight{s}": f"{original}{s}" for s in suffixes if tensors.on_disk(f"{original}{s}")}
    if tensors.on_disk(f"{original.removesuffix('weight')}pre_quant_scale"):
        raise UserError(f"{quantization.path}: {original} is scaled for scaled inputs (pre_quant_scale); {WAY_OUT}")
    shape, scales = tensors.stored_shape(name), tensors.stored_shape(scale)
    if len(shape) < 2 or (tensors.stored_dtype(name) in ("I32", "U8") and not scales):
        raise UserError(
            f"{tensors.file_of(name)}: {name} {list(shape)} with {scale} {list(scales)} is not a quantized weight: its "
            "codes are a matrix, and packed ones have a scale for each group; download the checkpoint again"
        )
    # Words of 32 bits hold several codes, and a row may end in padding; `weight_shape` is the original's shape.
    if tensors.stored_dtype(name) == "I32":
        shape_name = f"{original}_shape"
        parts["weight_shape"] = shape_name
        words = shape[-1]
        shape = tuple(tensors.integers(shape_name)) if tensors.on_disk(shape_name) else shape
        _check_bits(unpacking.word_bits(words, shape[-1]), original, quantization)
        groups = [weights.get("group_size") for weights in quantization.groups]
        size = _group_size(shape[1], scales[-1], groups)
        decode: Any = partial(_pack_quantized, shape=shape, group_size=size)
        return original, Packed(shape, parts, decode)
    # ModelOpt packs INT4 along the outputs: a byte holds a code of each of two rows, so there are half as many rows of
    # bytes as rows of scales. All others pack along the inputs.
    if tensors.stored_dtype(name) == "U8" and len(scales) == 2 and scales[0] == 2 * shape[0]:  # ModelOpt's INT4
        shape = (scales[0], shape[1])
    elif tensors.stored_dtype(name) == "U8":
        shape = (*shape[:-1], _columns(shape[-1], scales[-1], "weight_packed" in parts))
    return original, Packed(shape, parts, partial(_scaled, blocks=quantization.blocks))


def _columns(nbytes: int, scales: int, packed: bool) -> int:
    """Returns how many codes a row of bytes holds: of 4 bits, or of 6, where 32 of them have a scale."""
    return nbytes * 8 // 6 if packed and nbytes == 24 * scales else 2 * nbytes


def _group_size(columns: int, groups: int, declared: Iterable[Any]) -> int:
    """Returns the inputs that share a scale; a last group may be short if the config names the size."""
    return next((size for size in declared if size and -(-columns // size) == groups), columns // groups)


def _scaled(parts: Parts, dtype: torch.dtype, blocks: Sequence[Block]) -> torch.Tensor:
    return unpacking.scaled(parts, blocks, dtype)


def _pack_quantized(parts: Parts, dtype: torch.dtype, shape: Sequence[int], group_size: int) -> torch.Tensor:
    return unpacking.pack_quantized(parts, shape, dtype, group_size)


def _find_mxfp4(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `X_blocks` `[experts, out, in/32, 16]` and `X_scales`."""
    original = name.removesuffix("_blocks")
    if name == original or not tensors.on_disk(f"{original}_scales"):
        return None
    experts, out, groups, octets = tensors.stored_shape(name)
    # 16 bytes are a block of 32 codes, so the inputs are 2 · groups · octets. gpt-oss has the original as `[experts,
    # in, out]`, and the blocks as `[experts, out, in]`.
    parts = {"blocks": name, "scales": f"{original}_scales"}
    return original, Packed((experts, 2 * groups * octets, out), parts, unpacking.mxfp4_experts)


def _find_words(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `qweight`, `qzeros` and `scales`, and perhaps `g_idx`, in the place of `weight`."""
    stem, _, last = name.rpartition(".")
    if last != "qweight":
        return None
    parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    parts = {part: stored for part, stored in parts.items() if tensors.on_disk(stored)}
    if missing := {"qzeros", "scales"} - set(parts):
        raise UserError(f"{quantization.path}: {name} has no {listed(sorted(missing))}; download the model again")
    out = tensors.stored_shape(parts["scales"])[1]
    bits = unpacking.word_bits(tensors.stored_shape(parts["qzeros"])[1], out)
    _check_bits(bits, name, quantization)
    # qweight has a code for each weight, whichever axis it is packed along.
    count = 32 // bits * prod(tensors.stored_shape(name)) // out
    if quantization.method == QuantMethod.AWQ:
        return f"{stem}.weight", Packed((out, count), parts, unpacking.awq)
    # GPTQ's first version stores zeros less one; configs without a version mean that one.
    less_one = str(quantization.config.get("checkpoint_format") or quantization.config.get("format")) != "gptq_v2"
    return f"{stem}.weight", Packed((out, count), parts, partial(unpacking.gptq, zeros_less_one=less_one))


def _check_bits(bits: int, name: str, quantization: Quantization) -> None:
    if bits not in (2, 4, 8):
        raise UserError(f"{quantization.path}: {name} has codes of {bits} bits; 2, 4 and 8 can be read: {WAY_OUT}")


FIND: dict[QuantMethod, Callable[[str, QuantizedTensors, Quantization], Found | None]] = {
    QuantMethod.FP8: _find_scaled,
    QuantMethod.FBGEMM_FP8: _find_scaled,
    QuantMethod.MXFP4: _find_mxfp4,
    QuantMethod.GPTQ: _find_words,
    QuantMethod.AWQ: _find_words,
    QuantMethod.COMPRESSED_TENSORS: _find_scaled,
    QuantMethod.MODELOPT: _find_scaled,
}
