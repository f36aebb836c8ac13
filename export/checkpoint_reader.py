"""Checkpoints of either layout are read here: tensors, the weight and run-time parts of each layer, and the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.export import compressed_tensors as layout
from quant.export import modelopt
from quant.export.names import EXPERT_PARTS, Rename, StoredNames, expert_names
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.modules import RunTimeParts
from quant.recipes.layers import Layer
from quant.recipes.plan import LayerPlan, Plan

EXACT = "blockscale.float64"
"""Key in the metadata of a file: scales that float32 does not hold, in hexadecimal."""
BESIDE = ("pre_scale", "lowrank_down", "lowrank_up")
"""Suffixes of what stands beside a weight in 16 bit."""


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory, read from the memory-mapped shards when asked for.

    Scales that `write_tensors` found no float32 for are float64, as they were.

    Args:
        directory: with the files.
        rename: from a name on disk to the one that the tensor has here.

    Raises:
        FileNotFoundError: the directory has no safetensors file.
        ValueError: one of them is damaged; the message names it.
    """

    def __init__(self, directory: Path, rename: Rename = str) -> None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{directory}: no .safetensors file")
        self._where: dict[str, tuple[Any, str]] = {}
        self._exact: dict[str, str] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot map an empty file
                raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from error
            self._where |= {rename(name): (handle, name) for name in handle.keys()}  # noqa: SIM118
            self._exact |= json.loads((handle.metadata() or {}).get(EXACT, "{}"))

    def __getitem__(self, name: str) -> torch.Tensor:
        handle, stored = self._where[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        if stored not in self._exact:
            return tensor
        return torch.full(tensor.shape, float.fromhex(self._exact[stored]), dtype=torch.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def layer_tensor_names(names: Iterable[str], layer: LayerPlan) -> list[str]:
    """Those of `names` that belong to a quantized layer, other than its bias."""
    if layer.kind != "experts":
        own = re.compile(rf"{re.escape(layer.name)}\.(?!bias$)[a-z_0-9]+")
    else:
        stem, _, last = layer.name.rpartition(".")
        own = re.compile(rf"{re.escape(stem)}\.\d+\.({'|'.join(EXPERT_PARTS.get(last, (last,)))})\..+")
    return [name for name in names if own.fullmatch(name)]


def read_layer(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """One planned layer's weight and static input scale from a checkpoint's tensors, of either layout.

    Raises:
        ValueError: a tensor of the layer is missing; the message names both.
    """
    if plan.kind != "experts":
        return _read_linear(tensors, plan.name, plan.weight)
    stem, _, last = plan.name.rpartition(".")
    experts, input_scale = [], None
    for index in range(plan.shape[0]):
        parts = []
        for part in EXPERT_PARTS.get(last, (last,)):
            name = f"{stem}.{index}.{part}"
            weight, own = _read_linear(tensors, name, plan.weight)
            if own is not None and input_scale is not None and not torch.equal(own, input_scale):
                raise ValueError(
                    f"{name}: its input scale is {float(own):g} and another expert's {float(input_scale):g}; "
                    "experts run in one matmul here, and share one"
                )
            input_scale = own
            parts.append(weight)
        experts.append(join_rows(parts))
    global_scale = None
    if experts[0].global_scale is not None:
        global_scale = torch.stack([e.global_scale for e in experts if e.global_scale is not None])
    codes, scale = torch.stack([e.codes for e in experts]), torch.stack([e.scale for e in experts])
    return BlockScaledTensor(codes, scale, experts[0].format, tuple(plan.shape), global_scale), input_scale


def join_rows(weights: list[BlockScaledTensor]) -> BlockScaledTensor:
    """The inverse of `split_rows`."""
    first = weights[0]
    if len(weights) == 1:
        return first
    shared = [w.scale if w.format.per_tensor else w.global_scale for w in weights]
    if shared[0] is not None and not all(s is not None and torch.equal(s, shared[0]) for s in shared):
        raise ValueError(f"cannot join {len(weights)} matrices of {first.format}: their per-matrix scales differ")
    scale = first.scale if first.format.per_tensor else torch.cat([w.scale for w in weights])
    rows = sum(w.shape[0] for w in weights)
    codes = torch.cat([w.codes for w in weights])
    return BlockScaledTensor(codes, scale, first.format, (rows, first.shape[1]), first.global_scale)


def _read_linear(
    tensors: Mapping[str, torch.Tensor], name: str, format: Any
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    local = {key: tensors[f"{name}.{key}"] for key in _NAMES if f"{name}.{key}" in tensors}
    decompress = modelopt.decompress if modelopt.holds(local) else layout.decompress
    try:
        return decompress(local, format)
    except KeyError as error:
        raise ValueError(f"{name}: the checkpoint has no tensor {name}.{error.args[0]} for format {format}") from None


def read_parts(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> RunTimeParts:
    """What a planned layer does at run time beside its matmul.

    Raises:
        ValueError: a tensor that the plan promises is missing, or has another rank; the message names it.
    """
    planned = plan.parts
    needed = [
        name for name, wanted in zip(BESIDE, (planned.pre_scale, planned.rank, planned.rank), strict=True) if wanted
    ]
    for suffix in needed:
        if f"{plan.name}.{suffix}" not in tensors:
            raise ValueError(f"{plan.name}: the checkpoint has no tensor {plan.name}.{suffix}, which the plan names")
    pre_scale, down, up = (tensors[f"{plan.name}.{s}"] if s in needed else None for s in BESIDE)
    parts = RunTimeParts(pre_scale, planned.hadamard, None if down is None or up is None else (down, up))
    if plan.kind != "experts":
        parts.check(plan.name, plan.shape)
    if parts.rank != planned.rank:
        raise ValueError(f"{plan.name}: the checkpoint's branch has rank {parts.rank}, the plan's {planned.rank}")
    return parts


_NAMES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
)


def plan_of_checkpoint(
    directory: Path,
    found: Iterable[Layer],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    names: StoredNames | None = None,
) -> Plan:
    """The plan of a checkpoint of either layout that came without one, as its config describes it.

    Args:
        directory: for error messages.
        found: the model's layers; linear ones, the head and experts may be quantized.
        config: the `quantization_config`, or `quantization` of ModelOpt's `hf_quant_config.json`.
        tensors: of the checkpoint, under the model's names.
        names: of the model's tensors on disk, which the config may go by.

    Raises:
        ValueError: the config asks for what is not supported, or does not fit the tensors.
    """
    names = names or StoredNames()
    layers = []
    try:
        if config.get("quant_method") == "compressed-tensors":
            formats_of, kv_cache = layout.read_config(config, names)
        else:
            formats_of, kv_cache = modelopt.read_config(config, names, tensors)
        for layer in found:
            # A config speaks of the matrices of one expert.
            experts = layer.kind == "experts"
            matrix = expert_names(layer.name, 1)[0].removesuffix(".weight") if experts else layer.name
            chosen = formats_of(matrix) if layer.kind in ("linear", "head", "experts") else None
            weight, activation = chosen or (None, None)
            reason = f"as {directory.name} was written"
            layers.append(LayerPlan(layer.name, layer.kind, layer.shape, weight, activation, reason=reason))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    return Plan(tuple(layers), kv_cache=kv_cache, provenance={"checkpoint": str(directory)})
