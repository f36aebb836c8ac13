"""Checkpoints that are released quantized are dequantized as they are read, one tensor at a time.

    quant_method         codes and scales of a tensor X                    decoded by
    fp8, fbgemm_fp8      X, X_scale_inv or X_scale                         `unpacking.scaled`
    mxfp4                X_blocks, X_scales (stacked experts of gpt-oss)   `unpacking.mxfp4_experts`
    gptq                 qweight, qzeros, scales, g_idx                    `unpacking.gptq`
    awq                  qweight, qzeros, scales                           `unpacking.awq`
    compressed-tensors   X or X_packed, X_scale, X_global_scale, …         `unpacking.scaled`, `.pack_quantized`
    modelopt             X, X_scale, X_scale_2                             `unpacking.scaled`

`QuantizedTensors` has the names, shapes and dtype of the original checkpoint. Tensors without scales are given as they
are, so what the source left in 16 bit stays so. Scales of inputs and of the KV cache are left out.

Codes are never cast to numbers: where scales stand in a file and no config says how to apply them, and where FP8
weights have no scales, the file is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quant.errors import UserError, listed
from quant.export.checkpoint import modelopt
from quant.formats.mapped import in_memory
from quant.models import unpacking
from quant.models.configs import read_fields
from quant.models.files import safetensors_file
from quant.models.unpacking import Block, Parts
from quant.recipes.json_data import typed
from quant.recipes.plan import PLAN_FILE

_FP8 = ("F8_E4M3", "F8_E5M2")
_CODES = (*_FP8, "U8", "I8", "I32")
SAFETENSORS_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint8: "U8", torch.int8: "I8",
    torch.int32: "I32",
}  # fmt: skip
"""What safetensors call the dtypes that codes have."""
# What stands beside a layer's weight for its inputs, its outputs and the KV cache.
_RUN_TIME = (
    "input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
    "q_scale", "k_scale", "v_scale", "prob_output_scale",
)  # fmt: skip
_SCALES = ("_scale_inv", "_scale", "_scales", "_blocks", "_scale_2", "_global_scale", "_zero_point", "_packed")
_INTEGER_PARTS = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_2", "SCB")
_LAYOUTS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
# Where a config says which of its method's layouts it is.
_LAYOUT_KEYS = {
    "gptq": ("checkpoint_format", "format"),
    "awq": ("version", "format"),
    "compressed-tensors": ("format",),
}
_FIELDS: dict[str, Any] = {
    "bits": int | None, "config_groups": dict[str, dict[str, Any]] | None, "group_size": int | None,
    "sparsity_config": dict[str, Any] | None, "weight_block_size": list[int] | None,
}  # fmt: skip
_WAY_OUT = "quantize the original model"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as its config says.

    Attributes:
        path: its directory.
        method: `quant_method`.
        config: the `quantization_config`.
    """

    path: Path
    method: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        """The format, for plans and the terminal."""
        config = self.config
        group = config.get("group_size")
        if self.method in ("gptq", "awq"):
            groups = f"groups of {group}" if group and group > 0 else "one group"
            return f"{self.method.upper()} INT{config.get('bits', 4)} in {groups}"
        if self.method in ("fp8", "fbgemm_fp8"):
            block = config.get("weight_block_size")
            return f"FP8 in blocks of {block[0]}x{block[1]}" if block else "FP8"
        if self.method == "compressed-tensors":
            return f"compressed-tensors {config.get('format', '')}".strip()
        return f"ModelOpt {config.get('quant_algo')}" if self.method == "modelopt" else self.method.upper()

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The `weights` of compressed-tensors' groups."""
        return [group.get("weights") or {} for group in (self.config.get("config_groups") or {}).values()]

    @property
    def blocks(self) -> list[Block]:
        """Blocks of weights that share a scale, as far as the config names some."""
        found = [self.config.get("weight_block_size") or (128, 128)]
        for weights in self.groups:
            size = weights.get("group_size")
            found += [weights["block_structure"]] if weights.get("block_structure") else [(1, size)] if size else []
        return [(int(rows), int(columns)) for rows, columns in found]


IN_TRAINING = "blockscale-qat"
"""The `quant_method` of a directory that a model in training was saved to."""
AFTER_TRAINING = (
    "it holds the weights of a model in training, and no quantized ones: prepare the original model as it was then, "
    "load these weights into it (a Trainer resumes from them; safetensors.torch.load_model reads a file of them), and "
    "pack it with quant.convert_qat"
)


def quantization_of(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """How the checkpoint in a directory is quantized; None where its config says nothing of that.

    Args:
        path: the directory.
        config: the contents of its config.json.

    Raises:
        UserError: it is quantized in a way that nothing here decodes, or by this toolkit.
    """
    places = (config, *(part for part in config.values() if isinstance(part, dict)))
    keys = ("quantization_config", "compression_config")
    found = next((place[key] for place in places for key in keys if isinstance(place.get(key), dict)), None)
    if found is None and (path / modelopt.CONFIG_FILE).is_file():
        inside = read_fields(path / modelopt.CONFIG_FILE).get("quantization")
        found = {"quant_method": "modelopt", **(inside if isinstance(inside, dict) else {})}
    if found is None:
        return None
    try:
        _check_types(found)
    except ValueError as error:
        raise UserError(f"{path}: its quantization_config says {error}; download the model again") from None
    method = str(found.get("quant_method") or "modelopt").lower()
    if (path / PLAN_FILE).is_file():
        raise UserError(f"{path}: already quantized by this toolkit, as its {PLAN_FILE} says; {_WAY_OUT}")
    quantization = Quantization(path, method, found)
    if why := _why_not(quantization):
        raise UserError(f"{path}: already quantized, {why}")
    return quantization


def _check_types(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of another type than those that are read here."""
    for key, kind in _FIELDS.items():
        typed(kind, config.get(key), key)
    for name, group in (config.get("config_groups") or {}).items():
        weights = typed(dict[str, Any] | None, group.get("weights"), f"{name}.weights") or {}
        for key, kind in (("group_size", int | None), ("block_structure", list[int] | None)):
            typed(kind, weights.get(key), f"{name}.{key}")
        _check_block(weights.get("block_structure"), weights.get("group_size"), name)
    _check_block(config.get("weight_block_size"), None, "weight_block_size")


def _check_block(block: list[int] | None, size: int | None, name: str) -> None:
    if (block is not None and (len(block) != 2 or min(block) < 1)) or (size is not None and size < -1):
        raise ValueError(f"{name}: {block or size} is no size of a block")


def _why_not(found: Quantization) -> str | None:
    """Why nothing here decodes a checkpoint, and the way out."""
    config, method = found.config, found.method
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        return (
            f"by bitsandbytes, whose codes only that package decodes; {_WAY_OUT}, or load this one with transformers, "
            "then model.dequantize() and model.save_pretrained(DIR), and pass DIR"
        )
    if method == IN_TRAINING:
        return f"by a recipe that is still in training; {AFTER_TRAINING}"
    if method not in _FIND:
        return f"by {method}, which cannot be read here; {_WAY_OUT}, or one in {', '.join(_FIND)}"
    layout = next((str(config[key]).lower() for key in _LAYOUT_KEYS.get(method, ()) if config.get(key)), "")
    if method == "gptq" and layout not in ("", "gptq", "gptq_v2"):
        return f"by GPTQ in the layout {layout!r}; the layouts gptq and gptq_v2 can be read: {_WAY_OUT}"
    if method == "awq" and (layout not in ("", "gemm") or config.get("bits", 4) != 4):
        return f"by AWQ in {config.get('bits')} bits and the layout {layout!r}; 4 bits in gemm can be read: {_WAY_OUT}"
    if method != "compressed-tensors":
        return None
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense" or layout not in ("", *_LAYOUTS):
        return f"in the compressed-tensors layout {layout}, which cannot be read here; {_WAY_OUT}"
    if config.get("transform_config"):
        return f"and its weights are rotated or scaled (transform_config), for which their inputs must be; {_WAY_OUT}"
    return None


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of the original checkpoint that the file holds as codes and scales.

    Attributes:
        shape: of the original.
        parts: names on disk of its parts, by what they are.
        decode: gives the tensor, or one matrix of a stack, from its parts.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Parts, torch.dtype], torch.Tensor]


class QuantizedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a quantized checkpoint under the original's names, dequantized when asked for.

    Args:
        shards: the safetensors files.
        quantization: as the config says.
        dtype: of what is dequantized; everything else keeps its own.

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
            if (found := _FIND[quantization.method](name, self, quantization)) is not None:
                self.packed[found[0]] = found[1]
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
        out = torch.empty(shape, dtype=self.dtype)
        for index in range(shape[0]):
            out[index] = self.matrix(name, index)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for that."""
        return self.packed[name].shape if name in self.packed else self.stored_shape(name)

    def matrix(self, name: str, index: int | None = None) -> torch.Tensor:
        """A packed matrix, or one of a packed stack."""
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
        """The file that holds a tensor."""
        return self._home[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is on disk."""
        return tuple(self._files[self._home[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor on disk, as safetensors call it."""
        return str(self._files[self._home[name]].get_slice(name).get_dtype())

    def on_disk(self, name: str) -> bool:
        """Whether a tensor of this name is in the files."""
        return name in self._home

    def integers(self, name: str) -> list[int]:
        """A small tensor of integers."""
        return [int(value) for value in self._read(name).tolist()]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._plain, *self.packed])

    def __len__(self) -> int:
        return len(self._plain) + len(self.packed)

    def deferred(self) -> dict[str, Any]:
        """All tensors as transformers' loader takes them: each is read when it is indexed with `...`."""
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
    tensors: QuantizedTensors
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensors[self.name][index]


Found = tuple[str, Packed]
"""The name of an original tensor, and its parts."""


def _find_scaled(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """`X` with `X_scale` or `X_scale_inv`, or `X_packed`; `X` may be stacked experts."""
    original = name.removesuffix("_packed")
    scale = next((f"{original}{s}" for s in ("_scale_inv", "_scale") if tensors.on_disk(f"{original}{s}")), None)
    if scale is None or tensors.stored_dtype(name) not in _CODES:
        return None
    parts = {"weight_packed" if name != original else "weight": name, "weight_scale": scale}
    suffixes = ("_scale_2", "_global_scale", "_zero_point", "_g_idx")
    parts |= {f"weight{s}": f"{original}{s}" for s in suffixes if tensors.on_disk(f"{original}{s}")}
    if tensors.on_disk(f"{original.removesuffix('weight')}pre_quant_scale"):
        raise UserError(f"{quantization.path}: {original} is scaled for scaled inputs (pre_quant_scale); {_WAY_OUT}")
    shape, scales = tensors.stored_shape(name), tensors.stored_shape(scale)
    if len(shape) < 2 or (tensors.stored_dtype(name) in ("I32", "U8") and not scales):
        raise UserError(
            f"{tensors.file_of(name)}: {name} {list(shape)} with {scale} {list(scales)} is no quantized weight: its "
            "codes are a matrix, and packed ones have a scale for each group; download the checkpoint again"
        )
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
    if tensors.stored_dtype(name) == "U8" and len(scales) == 2 and scales[0] == 2 * shape[0]:  # ModelOpt's INT4
        shape = (scales[0], shape[1])
    elif tensors.stored_dtype(name) == "U8":
        shape = (*shape[:-1], _columns(shape[-1], scales[-1], "weight_packed" in parts))
    return original, Packed(shape, parts, partial(_scaled, blocks=quantization.blocks))


def _columns(nbytes: int, scales: int, packed: bool) -> int:
    """How many codes a row of bytes holds: of 4 bits, or of 6, where 32 of them have a scale."""
    return nbytes * 8 // 6 if packed and nbytes == 24 * scales else 2 * nbytes


def _group_size(columns: int, groups: int, declared: Iterable[Any]) -> int:
    """Inputs that share a scale; a last group may be short if the config names the size."""
    return next((size for size in declared if size and -(-columns // size) == groups), columns // groups)


def _scaled(parts: Parts, dtype: torch.dtype, blocks: Sequence[Block]) -> torch.Tensor:
    return unpacking.scaled(parts, blocks, dtype)


def _pack_quantized(parts: Parts, dtype: torch.dtype, shape: Sequence[int], group_size: int) -> torch.Tensor:
    return unpacking.pack_quantized(parts, shape, dtype, group_size)


def _find_mxfp4(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """`X_blocks` `[experts, out, in/32, 16]` and `X_scales`."""
    original = name.removesuffix("_blocks")
    if name == original or not tensors.on_disk(f"{original}_scales"):
        return None
    experts, out, groups, octets = tensors.stored_shape(name)
    parts = {"blocks": name, "scales": f"{original}_scales"}
    return original, Packed((experts, 2 * groups * octets, out), parts, unpacking.mxfp4_experts)


def _find_words(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """`qweight`, `qzeros` and `scales`, and perhaps `g_idx`, in the place of `weight`."""
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
    count = 32 // bits * prod(tensors.stored_shape(name)) // out
    if quantization.method == "awq":
        return f"{stem}.weight", Packed((out, count), parts, unpacking.awq)
    less_one = str(quantization.config.get("checkpoint_format") or quantization.config.get("format")) != "gptq_v2"
    return f"{stem}.weight", Packed((out, count), parts, partial(unpacking.gptq, zeros_less_one=less_one))


def _check_bits(bits: int, name: str, quantization: Quantization) -> None:
    if bits not in (2, 4, 8):
        raise UserError(f"{quantization.path}: {name} has codes of {bits} bits; 2, 4 and 8 can be read: {_WAY_OUT}")


_FIND: dict[str, Callable[[str, QuantizedTensors, Quantization], Found | None]] = {
    "fp8": _find_scaled,
    "fbgemm_fp8": _find_scaled,
    "mxfp4": _find_mxfp4,
    "gptq": _find_words,
    "awq": _find_words,
    "compressed-tensors": _find_scaled,
    "modelopt": _find_scaled,
}


def refuse_packed(
    file: Path,
    dtypes: Mapping[str, str],
    names: Iterable[str] | None = None,
    why: str = ", and no quantization_config says how",
) -> None:
    """Refuses tensors that are codes or scales, for which there is nothing that says what they mean.

    Args:
        file: holds them.
        dtypes: of the tensors to look at, as safetensors call them.
        names: all tensors of the file; by default those of `dtypes`.
        why: follows what is wrong, in the message.

    Raises:
        UserError: there is one; the message names it and the file.
    """
    names = dtypes if names is None else names
    advice = f"give the model's directory with its config.json, or {_WAY_OUT}"
    for name in dtypes:
        suffix = next((s for s in _SCALES if name.endswith(s) and name.removesuffix(s) in names), None)
        blocks = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in names
        if suffix or blocks or name.endswith("_scale_inv") or name.rpartition(".")[2] in _INTEGER_PARTS:
            raise UserError(f"{file}: {name} belongs to a quantized weight{why}; {advice}")
    for name, dtype in dtypes.items():
        if dtype in _FP8:
            raise UserError(f"{file}: {name} is in FP8 and has no scale{why}; {advice}")
        if dtype in _CODES and name.endswith(".weight"):
            raise UserError(f"{file}: {name} holds integers ({dtype}){why}; {advice}")
