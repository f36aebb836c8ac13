"""Reads checkpoints of any layout: tensors, the weight and run-time parts of each layer, and the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.export.checkpoint.check import matrix_problems, value_problem
from quant.export.checkpoint.layouts import layout_of_config, layout_of_tensors
from quant.export.checkpoint.names import Rename, StoredNames, matrix_names
from quant.formats.json_files import parse_json
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.modules import RunTimeParts
from quant.recipes.fusion_groups import group_unseen
from quant.recipes.json_data import typed
from quant.recipes.layer_kind import LayerKind
from quant.recipes.layers import Layer
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.recipes.shared_inputs import group_experts

EXACT = "blockscale.float64"
"""Key in the metadata of a file: scales that float32 does not hold, in hexadecimal."""
BESIDE = ("pre_scale", "lowrank_down", "lowrank_up")
"""Suffixes of what stands beside a weight in 16 bit."""


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the tensors of a checkpoint."""
    return sorted(directory.glob("*.safetensors"))


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory, read from the memory-mapped shards when asked for.

    Scales that `write_tensors` found no float32 for are float64, as they were.

    Args:
        directory: with the files.
        rename: from a name on disk to the one that the tensor has here.
        meta: reads shapes and dtypes alone, and the values of single numbers, such as a tensor's scale.

    Raises:
        FileNotFoundError: the directory has no safetensors file.
        ValueError: one of them is damaged; the message names it.
    """

    def __init__(self, directory: Path, rename: Rename = str, *, meta: bool = False) -> None:
        self._meta = meta
        files = weight_files(directory)
        if not files:
            raise FileNotFoundError(f"{directory}: no .safetensors file")
        self._where: dict[str, tuple[Any, str, Path]] = {}
        self._exact: dict[str, float] = {}
        self._directory = directory
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot map an empty file
                raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from error
            for stored in handle.keys():  # noqa: SIM118
                name = rename(stored)
                if name in self._where:
                    other = self._where[name][2].name
                    raise ValueError(f"{file}: {stored} is in {other} too; remove the file that is not used")
                self._where[name] = (handle, stored, file)
            self._exact |= _exact_scales(handle, file)

    def __getitem__(self, name: str) -> torch.Tensor:
        handle, stored, _ = self._where[name]
        if self._meta and math.prod(shape := handle.get_slice(stored).get_shape()) > 1:
            return torch.empty(shape, dtype=handle.get_slice(stored)[:0].dtype, device="meta")
        tensor: torch.Tensor = handle.get_tensor(stored)
        if stored not in self._exact:
            return tensor
        return torch.full(tensor.shape, self._exact[stored], dtype=torch.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """What stands below each module: `weight` and `bias` of `model.norm`, for example."""
        return _below(self)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        handle, stored, _ = self._where[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self[name].dtype

    def is_mapped(self, name: str) -> bool:
        """Whether reading a tensor takes no memory."""
        return name in self._where

    def matrix(self, name: str, index: int) -> torch.Tensor:
        """One matrix of a stack."""
        return self[name][index]

    def stored_name(self, name: str) -> str:
        """The name that a tensor has in its file."""
        return self._where[name][1]

    def place(self, name: str) -> str:
        """The file that a tensor is in and its name there, for messages; the directory where there is none."""
        if name not in self._where:
            return f"{self._directory}: {name}"
        _, stored, file = self._where[name]
        return f"{file}: {stored}"


def _exact_scales(handle: Any, file: Path) -> dict[str, float]:
    """The scales of a file that float32 does not hold, by name."""
    try:
        kept = typed(dict[str, str], parse_json((handle.metadata() or {}).get(EXACT, "{}")), "scales")
        found = {name: float.fromhex(value) for name, value in kept.items()}
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{file}: damaged metadata {EXACT} ({error}); write or download it again") from None
    names = set(handle.keys())
    for name, value in found.items():
        if name not in names or not math.isclose(float(handle.get_tensor(name)), value, rel_tol=2**-23):
            raise ValueError(f"{file}: {name} is not what the metadata {EXACT} says; write or download it again")
    return found


def _below(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        found.setdefault(module, []).append(last)
    return found


def layer_tensor_names(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> list[str]:
    """Names of the tensors that belong to a quantized layer, other than its bias."""
    below = tensors.below if isinstance(tensors, TensorFiles) else _below(tensors)
    return [f"{name}.{own}" for name, _ in _matrices(layer) for own in below.get(name, ()) if own != "bias"]


def _matrices(layer: LayerPlan) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the matrices of a layer; a fused-expert projection has one or two for each expert."""
    if layer.kind != LayerKind.EXPERTS:
        return [(layer.name, layer.matrix)]
    names = [matrix_names(layer.name, expert) for expert in range(layer.shape[0])]
    shape = (layer.shape[1] // len(names[0]), layer.shape[2])
    return [(name, shape) for matrices in names for name in matrices]


def read_layer(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """One planned layer's weight and static input scale from a checkpoint's tensors, of either layout.

    Raises:
        ValueError: a tensor of the layer is missing, left over, or not as the plan has it (`checkpoint_check`); the
            message names the tensor and its file.
    """
    below = tensors.below if isinstance(tensors, TensorFiles) else _below(tensors)
    if plan.kind != LayerKind.EXPERTS:
        return _read_linear(tensors, below, plan.name, plan.matrix, plan)
    parts_of = len(matrix_names(plan.name, 0))
    matrices = iter(_matrices(plan))
    experts, input_scale = [], None
    for _ in range(plan.shape[0]):
        parts = []
        for name, shape in islice(matrices, parts_of):
            weight, own = _read_linear(tensors, below, name, shape, plan)
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
    tensors: Mapping[str, torch.Tensor],
    below: Mapping[str, list[str]],
    name: str,
    shape: tuple[int, ...],
    plan: LayerPlan,
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    beside = ("bias", *planned_beside(plan))
    local = {key: tensors[f"{name}.{key}"] for key in below.get(name, ()) if key not in beside}
    assert plan.weight is not None
    for key, problem in matrix_problems(local, plan.weight, plan.activation, shape):
        raise ValueError(f"{place(tensors, f'{name}.{key}')} {problem}; quantize the model again, or download it again")
    return layout_of_tensors(local).decompress(local, plan.weight)


def place(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    """How messages call a tensor: by its file and its name there, where it is in one."""
    return tensors.place(name) if isinstance(tensors, TensorFiles) else name


def planned_beside(plan: LayerPlan) -> list[str]:
    """Suffixes of what stands in 16 bit beside a layer's weight."""
    wanted = (plan.parts.pre_scale, plan.parts.rank, plan.parts.rank)
    return [name for name, there in zip(BESIDE, wanted, strict=True) if there]


def read_parts(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> RunTimeParts:
    """What a planned layer does at run time beside its matmul.

    Raises:
        ValueError: a tensor that the plan promises is missing, not finite, or has another rank; the message names it.
    """
    planned, needed = plan.parts, planned_beside(plan)
    for suffix in needed:
        name = f"{plan.name}.{suffix}"
        if name not in tensors:
            raise ValueError(f"{plan.name}: the checkpoint has no tensor {name}, which the plan names")
        if problem := value_problem(tensors[name]):
            raise ValueError(f"{place(tensors, name)} {problem}; quantize the model again, or download it again")
    pre_scale, down, up = (tensors[f"{plan.name}.{s}"] if s in needed else None for s in BESIDE)
    parts = RunTimeParts(pre_scale, planned.hadamard, None if down is None or up is None else (down, up))
    if plan.kind != LayerKind.EXPERTS:
        parts.check(plan.name, plan.matrix)
    if parts.rank != planned.rank:
        raise ValueError(f"{plan.name}: the checkpoint's branch has rank {parts.rank}, the plan's {planned.rank}")
    return parts


def plan_of_checkpoint(
    directory: Path,
    found: Sequence[Layer],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    names: StoredNames | None = None,
) -> Plan:
    """The plan of a checkpoint of either layout that came without one, as its config describes it.

    Layers that runtimes merge are in a fusion group if the checkpoint has one tensor scale for them.

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
        layout = layout_of_config(config)
        formats_of, kv_cache = layout.read_config(config, names, tensors)
        rotation_of = layout.read_rotations(config, names)
        for layer in group_unseen(group_experts(found)):
            # A config speaks of the matrices of one expert.
            matrix = matrix_names(layer.name, 0)[0] if layer.kind == LayerKind.EXPERTS else layer.name
            # A target such as "Linear" may mean any module, and other tools leave convolutions as they are.
            meant = layer.kind in (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.EXPERTS) or (
                layer.kind == LayerKind.CONV and f"{layer.name}.weight_scale" in tensors
            )
            chosen = formats_of(matrix) if meant else None
            weight, activation = chosen or (None, None)
            parts = Parts() if weight is None else Parts(hadamard=rotation_of(matrix))
            layers.append(
                LayerPlan(
                    layer.name,
                    layer.kind,
                    layer.shape,
                    weight,
                    activation,
                    reason=f"as {directory.name} was written",
                    group=layer.group if weight is not None else None,
                    tied_to=layer.tied_to if weight is None else None,
                    parts=parts,
                    transposed=layer.transposed,
                )
            )
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    plan = Plan(tuple(layers), kv_cache=kv_cache, provenance={"checkpoint": str(directory)})
    return plan.replace_layers(_ungrouped(plan, tensors))


def _ungrouped(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> list[LayerPlan]:
    """Members of groups that share too little for one: their formats, or a scale of all, differ in the checkpoint."""
    return [
        replace(member, group=None)
        for members in plan.groups().values()
        if len(members) == 1
        or len({(member.formats, member.parts) for member in members}) > 1
        or (members[0].kind == LayerKind.LINEAR and len({_scales_of_all(tensors, member) for member in members}) > 1)
        for member in members
    ]


def _scales_of_all(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> tuple[float, ...]:
    """Scales that a layer of either layout has for its whole weight and for its input."""
    names = ["weight_scale_2", "weight_global_scale", "input_global_scale", "input_scale"]
    if layer.weight is not None and layer.weight.per_tensor:
        names.append("weight_scale")
    found = [tensors[f"{layer.name}.{name}"] for name in names if f"{layer.name}.{name}" in tensors]
    return tuple(float(scale) for scale in found if scale.numel() == 1)
