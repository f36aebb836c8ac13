"""Reads checkpoints of any layout: the tensors in their files, and the weight and run-time parts of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.base.json_files import typed
from quant.base.json_files import parse_json
from quant.export.checkpoint.files.layouts import layout_of_tensors
from quant.export.checkpoint.files.names import Rename, matrix_names
from quant.export.checkpoint.files.tensor_checks import matrix_problems, value_problem
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan

EXACT = "blockscale.float64"
"""Key in the metadata of a file: scales that float32 does not hold, in hexadecimal."""
CARRIED = "blockscale.carried"
"""Key in the metadata of a file: names of the tensors that the source has and the model's class ignores."""
HEADS = "blockscale.prediction_heads"
"""Key in the metadata of the first file: shapes of the quantized layers of prediction heads, by their names."""
RUN_TIME_PARTS = ("pre_scale", "lowrank_down", "lowrank_up")
"""Suffixes of the 16-bit tensors of a layer's run-time parts: the scale of its input, and its low-rank branch."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that hold the tensors of a checkpoint."""
    return sorted(directory.glob("*.safetensors"))


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory, read from the memory-mapped shards on access.

    A scale that float32 does not hold comes back in float64, from the metadata that `write_tensors` gave its file.

    Args:
        directory: the directory with the files.
        rename: a function from a tensor's name on disk to its name in the result.
        meta: whether tensors are on the meta device, read from the headers; single numbers, such as a scale, have
            values.
        files: the files of the directory that are read; None for all.

    Attributes:
        carried: names of the tensors that the model's class ignores.

    Raises:
        FileNotFoundError: the directory has no safetensors file.
        ValueError: one of them is damaged; the message names it.
    """

    def __init__(
        self, directory: Path, rename: Rename = str, *, meta: bool = False, files: Sequence[Path] | None = None
    ) -> None:
        self._meta = meta
        self.carried: set[str] = set()
        files = weight_files(directory) if files is None else files
        if not files:
            raise FileNotFoundError(f"{directory}: no .safetensors file")
        self._where: dict[str, tuple[Any, str, Path]] = {}
        self._exact: dict[str, float] = {}
        self._directory = directory
        for file in files:
            handle = _opened(file)
            for stored in handle.keys():  # noqa: SIM118
                name = rename(stored)
                if name in self._where:
                    other = self._where[name][2].name
                    raise ValueError(f"{file}: {stored} is in {other} too; remove the file that is not used")
                self._where[name] = (handle, stored, file)
            self._exact |= _exact_scales(handle, file)
            self.carried |= {rename(name) for name in _carried_names(handle, file)}

    def __getitem__(self, name: str) -> torch.Tensor:
        handle, stored, _ = self._where[name]
        if self._meta and math.prod(shape := (part := handle.get_slice(stored)).get_shape()) > 1:
            # A dtype that this PyTorch does not have ends in safetensors' own error.
            dtype = _DTYPES.get(part.get_dtype()) or part[:0].dtype
            return torch.empty(shape, dtype=dtype, device="meta")
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
        """The tensors below each module: `weight` and `bias` of `model.norm`, for example."""
        return _by_module(self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        handle, stored, _ = self._where[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self[name].dtype

    def is_mapped(self, name: str) -> bool:
        """Returns whether reading a tensor takes no memory."""
        return name in self._where

    def matrix(self, name: str, index: int) -> torch.Tensor:
        """Returns one matrix of a stack."""
        return self[name][index]

    def stored_name(self, name: str) -> str:
        """Returns the name that a tensor has in its file."""
        return self._where[name][1]

    def place(self, name: str) -> str:
        """Returns the file that a tensor is in and its name there, for messages; the directory where there is none."""
        if name not in self._where:
            return f"{self._directory}: {name}"
        _, stored, file = self._where[name]
        return f"{file}: {stored}"


def carried_shapes(directory: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Returns the tensors in a checkpoint that its model's class ignores, and the names of all others.

    Returns:
        Shapes by names on disk, and names on disk.
    """
    files = TensorFiles(directory, meta=True)
    shapes = {name: files.shape(name) for name in files if name in files.carried}
    return shapes, [name for name in files if name not in shapes]


def head_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns the shapes `[out, in]` of a checkpoint's quantized layers that the model's class ignores, by their names.

    Raises:
        ValueError: damaged metadata; the message names the file.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for file in weight_files(directory):
        text = (_opened(file).metadata() or {}).get(HEADS, "{}")
        try:
            fields = typed(dict[str, list[int]], parse_json(text), "shapes")
            if any(size < 1 for shape in fields.values() for size in shape):
                raise ValueError("sizes are whole numbers from 1")
            shapes |= {name: (rows, columns) for name, (rows, columns) in fields.items()}
        except ValueError as error:
            raise ValueError(f"{file}: damaged metadata {HEADS} ({error}); write or download it again") from None
    return shapes


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, RuntimeError) as error:
        # torch raises RuntimeError where it cannot map an empty file.
        raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from error


def _carried_names(handle: Any, file: Path) -> list[str]:
    """Returns the names in the metadata of a file, which it holds."""
    try:
        names = typed(list[str], parse_json((handle.metadata() or {}).get(CARRIED, "[]")), "names")
    except ValueError as error:
        raise ValueError(f"{file}: damaged metadata {CARRIED} ({error}); write or download it again") from None
    return [name for name in names if name in handle.keys()]  # noqa: SIM118


def _exact_scales(handle: Any, file: Path) -> dict[str, float]:
    """Returns the scales of a file that float32 does not hold, by name."""
    try:
        texts = typed(dict[str, str], parse_json((handle.metadata() or {}).get(EXACT, "{}")), "scales")
        scales = {name: float.fromhex(text) for name, text in texts.items()}
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{file}: damaged metadata {EXACT} ({error}); write or download it again") from None
    names = set(handle.keys())
    for name, value in scales.items():
        # The tensor itself holds the nearest float32.
        if name not in names or not math.isclose(float(handle.get_tensor(name)), value, rel_tol=2**-23):
            raise ValueError(f"{file}: {name} is not what the metadata {EXACT} says; write or download it again")
    return scales


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the last parts of tensors' names, by the module before them."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        by_module.setdefault(module, []).append(last)
    return by_module


def layer_tensor_names(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> list[str]:
    """Returns the names of the tensors that belong to a quantized layer, other than its bias."""
    below = tensors.below if isinstance(tensors, TensorFiles) else _by_module(tensors)
    return [f"{name}.{own}" for name, _ in _matrices(layer) for own in below.get(name, ()) if own != "bias"]


def _matrices(layer: LayerPlan) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names and shapes of the matrices of a layer.

    A fused-expert projection has one or two for each expert.
    """
    if layer.kind != LayerKind.EXPERTS:
        return [(layer.name, layer.matrix)]
    names = [matrix_names(layer.name, expert) for expert in range(layer.shape[0])]
    shape = (layer.shape[1] // len(names[0]), layer.shape[2])
    return [(name, shape) for matrices in names for name in matrices]


def read_layer(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """Reads a planned layer's weight and static input scale from a checkpoint's tensors, in any layout.

    Raises:
        ValueError: a tensor of the layer is missing, left over, or not as the plan has it (`check`); the message names
            the tensor and its file.
    """
    below = tensors.below if isinstance(tensors, TensorFiles) else _by_module(tensors)
    if plan.kind != LayerKind.EXPERTS:
        return _read_linear(tensors, below, plan.name, plan.matrix, plan)
    matrices_of_expert = len(matrix_names(plan.name, 0))
    matrices = iter(_matrices(plan))
    experts, input_scale = [], None
    for _ in range(plan.shape[0]):
        parts = []
        for name, shape in islice(matrices, matrices_of_expert):
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
    # [experts] of [out, in]  ->  [experts, out, in]
    codes, scale = torch.stack([e.codes for e in experts]), torch.stack([e.scale for e in experts])
    return BlockScaledTensor(codes, scale, experts[0].format, tuple(plan.shape), global_scale), input_scale


def join_rows(weights: list[BlockScaledTensor]) -> BlockScaledTensor:
    """Undoes `split_rows`."""
    # Gate and up become the rows of one matrix, which has one global scale.
    first = weights[0]
    if len(weights) == 1:
        return first
    shared = [w.scale if w.format.per_tensor else w.global_scale for w in weights]
    if shared[0] is not None and not all(s is not None and torch.equal(s, shared[0]) for s in shared):
        raise ValueError(f"cannot join {len(weights)} matrices of {first.format}: their per-matrix scales differ")
    scale = first.scale if first.format.per_tensor else _joined([w.scale for w in weights])
    rows = sum(w.shape[0] for w in weights)
    codes = _joined([w.codes for w in weights])
    return BlockScaledTensor(codes, scale, first.format, (rows, first.shape[1]), first.global_scale)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows; of tensors on the meta device the shape alone, because PyTorch computes it in Python."""
    if not parts[0].is_meta:
        return torch.cat(parts)
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])


def _read_linear(
    tensors: Mapping[str, torch.Tensor],
    below: Mapping[str, list[str]],
    name: str,
    shape: tuple[int, ...],
    plan: LayerPlan,
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    outside = ("bias", *planned_parts(plan))
    local = {key: tensors[f"{name}.{key}"] for key in below.get(name, ()) if key not in outside}
    for key, problem in matrix_problems(local, plan.weight_format, plan.activation, shape):
        raise ValueError(f"{place(tensors, f'{name}.{key}')} {problem}; quantize the model again, or download it again")
    return layout_of_tensors(local).decompress(local, plan.weight_format)


def place(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    """Returns how messages call a tensor: by its file and its name there, where it is in one."""
    return tensors.place(name) if isinstance(tensors, TensorFiles) else name


def planned_parts(plan: LayerPlan) -> list[str]:
    """Returns the names in `RUN_TIME_PARTS` that a layer has by its plan."""
    sizes = (plan.parts.pre_scale, plan.parts.rank, plan.parts.rank)
    return [name for name, size in zip(RUN_TIME_PARTS, sizes, strict=True) if size]


def read_parts(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> RunTimeParts:
    """Reads the run-time parts of a planned layer: scale and rotation of its input, and its low-rank branch.

    Raises:
        ValueError: a tensor that the plan promises is missing, not finite, or has another rank; the message names it.
    """
    planned, suffixes = plan.parts, planned_parts(plan)
    for suffix in suffixes:
        name = f"{plan.name}.{suffix}"
        if name not in tensors:
            raise ValueError(f"{plan.name}: the checkpoint has no tensor {name}, which the plan names")
        if problem := value_problem(tensors[name]):
            raise ValueError(f"{place(tensors, name)} {problem}; quantize the model again, or download it again")
    pre_scale, down, up = (tensors[f"{plan.name}.{s}"] if s in suffixes else None for s in RUN_TIME_PARTS)
    parts = RunTimeParts(pre_scale, planned.hadamard, None if down is None or up is None else (down, up))
    if plan.kind != LayerKind.EXPERTS:
        parts.check(plan.name, plan.matrix)
    if parts.rank != planned.rank:
        raise ValueError(f"{plan.name}: the checkpoint's branch has rank {parts.rank}, the plan's {planned.rank}")
    return parts
