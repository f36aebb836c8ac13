"""Checkpoints that were released quantized are dequantized while they are read, one tensor at a time.

`QuantizedTensors` has the names, shapes and dtype of the original checkpoint. Tensors without scales are returned
unchanged, so layers that the source left in 16 bit stay so. Scales of inputs and of the KV cache are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quant.base.errors import UserError, listed
from quant.base.mapped import in_memory
from quant.models import quantized_config
from quant.models.files import safetensors_file
from quant.models.quantized_config import CODES, WAY_OUT, Block, Parts, Quantization, QuantMethod, refuse_packed

# Tensors of a quantized layer for its inputs, its outputs and the KV cache; the values of its weight do not need them.
_RUN_TIME = (
    "input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale",
)  # fmt: skip


class QuantizedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a quantized checkpoint under the original's names, dequantized on access.

    Args:
        shards: the safetensors files.
        quantization: the quantization that the config describes.
        dtype: the dtype of dequantized tensors; others keep their own.

    Raises:
        UserError: codes without scales, or scales without codes; the message names the tensor and its file.
    """

    def __init__(self, shards: Sequence[Path], quantization: Quantization, dtype: torch.dtype) -> None:
        if wrong := [shard for shard in shards if shard.suffix != ".safetensors"]:
            raise UserError(f"{wrong[0]}: a quantized checkpoint as a pickle; get it as safetensors")
        self.dtype = dtype
        self._files = {shard: safetensors_file(shard, "pt") for shard in shards}
        self._home = {name: shard for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self.packed: dict[str, Packed] = {}
        for name in self._home:
            if (tensor := FIND[QuantMethod(quantization.method)](name, self, quantization)) is not None:
                self.packed[tensor[0]] = tensor[1]
        used = {part for packed in self.packed.values() for part in packed.parts.values()}
        self._plain = [n for n in self._home if n not in used and n.rpartition(".")[2] not in _RUN_TIME]
        for shard, file in self._files.items():
            plain = {name: self.stored_dtype(name) for name in self._plain if self._home[name] is shard}
            refuse_packed(shard, plain, set(file.keys()), f", though the config says {quantization}")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.packed:
            return self._read(name)
        shape = self.packed[name].shape
        if len(shape) == 2:
            return self.matrix(name)
        # Matrix by matrix: decoding goes through float32, of which only one expert's is in memory, not the whole
        # stack's.
        out = torch.empty(shape, dtype=self.dtype)
        for index in range(shape[0]):
            out[index] = self.matrix(name, index)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading its values."""
        return self.packed[name].shape if name in self.packed else self.stored_shape(name)

    def matrix(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns a packed matrix, or one of a packed stack."""
        packed = self.packed[name]
        parts = {part: self._read(on_disk, index) for part, on_disk in packed.parts.items()}
        try:
            return packed.decode({part: in_memory(tensor) for part, tensor in parts.items()}, self.dtype)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            file = self._home[next(iter(packed.parts.values()))]
            raise UserError(f"{file}: {name} cannot be dequantized: {error}; download the model again") from error

    def _read(self, name: str, index: int | None = None) -> torch.Tensor:
        file = self._files[self._home[name]]
        tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    def file_of(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._home[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor as it is on disk."""
        return tuple(self._files[self._home[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Returns the dtype of a tensor on disk, as safetensors names it."""
        return str(self._files[self._home[name]].get_slice(name).get_dtype())

    def on_disk(self, name: str) -> bool:
        """Returns whether a tensor of this name is in the files."""
        return name in self._home

    def integers(self, name: str) -> list[int]:
        """Returns a small tensor of integers."""
        return [int(value) for value in self._read(name).tolist()]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._plain, *self.packed])

    def __len__(self) -> int:
        return len(self._plain) + len(self.packed)

    def deferred(self) -> dict[str, Any]:
        """Returns all tensors as transformers' loader takes them: each is read when it is indexed with `...`."""
        return {name: _Deferred(self, name) for name in self}


class Renamed:
    """The tensors of a quantized checkpoint under the names that they have in a model; see `stored_weights.Files`."""

    def __init__(self, tensors: QuantizedTensors, rename: Callable[[str], str]) -> None:
        self.tensors = tensors
        self.names = {rename(name): name for name in tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype if not self.is_mapped(name) else self[name].dtype

    def is_mapped(self, name: str) -> bool:
        return self.names[name] not in self.tensors.packed

    def matrix(self, name: str, index: int) -> torch.Tensor:
        return self.tensors.matrix(self.names[name], index)


@dataclass(frozen=True)
class _Deferred:
    # transformers' loader takes lazy tensors of safetensors, of which it uses only indexing.
    tensors: QuantizedTensors
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensors[self.name][index]


# Finding the parts of quantized tensors: which names in the files together hold one tensor of the original.
#
# Each function takes the name of a tensor on disk. Where that is the first part of a quantized tensor, it returns the
# original's name, its shape, the names of all parts, and the function of `unpacking` that decodes them; else None.


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
        _check_bits(quantized_config.word_bits(words, shape[-1]), original, quantization)
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
    return quantized_config.scaled(parts, blocks, dtype)


def _pack_quantized(parts: Parts, dtype: torch.dtype, shape: Sequence[int], group_size: int) -> torch.Tensor:
    return quantized_config.pack_quantized(parts, shape, dtype, group_size)


def _find_mxfp4(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `X_blocks` `[experts, out, in/32, 16]` and `X_scales`."""
    original = name.removesuffix("_blocks")
    if name == original or not tensors.on_disk(f"{original}_scales"):
        return None
    experts, out, groups, octets = tensors.stored_shape(name)
    # 16 bytes are a block of 32 codes, so the inputs are 2 · groups · octets. gpt-oss has the original as `[experts,
    # in, out]`, and the blocks as `[experts, out, in]`.
    parts = {"blocks": name, "scales": f"{original}_scales"}
    return original, Packed((experts, 2 * groups * octets, out), parts, quantized_config.mxfp4_experts)


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
    bits = quantized_config.word_bits(tensors.stored_shape(parts["qzeros"])[1], out)
    _check_bits(bits, name, quantization)
    # qweight has a code for each weight, whichever axis it is packed along.
    count = 32 // bits * prod(tensors.stored_shape(name)) // out
    if quantization.method == QuantMethod.AWQ:
        return f"{stem}.weight", Packed((out, count), parts, quantized_config.awq)
    # GPTQ's first version stores zeros less one; configs without a version mean that one.
    less_one = str(quantization.config.get("checkpoint_format") or quantization.config.get("format")) != "gptq_v2"
    return f"{stem}.weight", Packed((out, count), parts, partial(quantized_config.gptq, zeros_less_one=less_one))


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
