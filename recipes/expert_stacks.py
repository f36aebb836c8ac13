"""`stacking_of` says how a parameter of a model holds the matrices of all experts, and `expert_matrices` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


# A `Stacking` says how one parameter of a model holds the matrices of all experts.
#
#     [experts, out, in]      most models
#     [experts, in, out]      gpt-oss, Aria, Llama 4, which multiply with `x @ P[e]` or `bmm(x, P)`
#     [experts * rows, cols]  DBRX, whose `w2` is [in, out] for each expert
#
# Rows of gate and up may alternate, as in gpt-oss. Everywhere in this package a matrix is `[out, in]` with gate above
# up, so that blocks lie along the axis of the dot product, and gate and up can be stored apart.


@dataclass(frozen=True)
class Stacking:
    """How a parameter holds the matrices of experts.

    Attributes:
        shape: the shape of the parameter.
        experts: their number.
        transposed: each matrix is `[in, out]` there.
        interleaved: rows of gate and up alternate there.
    """

    shape: tuple[int, ...]
    experts: int
    transposed: bool = False
    interleaved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is `[experts, out, in]`."""
        return len(self.shape) == 3 and not self.transposed and not self.interleaved

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """`[experts, out, in]`."""
        rows, columns = self.shape[-2] // (self.experts if len(self.shape) == 2 else 1), self.shape[-1]
        return (self.experts, columns, rows) if self.transposed else (self.experts, rows, columns)

    def read(self, stored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns `matrices` for a parameter that is read from its file, one expert at a time."""
        return stored if self.is_plain else ReadMatrices(self, stored)

    def matrices(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the parameter as `[experts, out, in]`: a view, unless rows are interleaved."""
        stack = parameter.unflatten(0, (self.experts, -1)) if parameter.dim() == 2 else parameter
        stack = stack.transpose(1, 2) if self.transposed else stack
        return stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.interleaved else stack

    def parameter(self, matrices: torch.Tensor) -> torch.Tensor:
        """Undoes `matrices`."""
        import torch

        return torch.stack([self.hold(matrix) for matrix in matrices]).reshape(self.shape)

    def matrix(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns the matrix `[out, in]` of one expert, from its part of the parameter."""
        rows = stored.t() if self.transposed else stored
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.interleaved else rows

    def hold(self, matrix: torch.Tensor) -> torch.Tensor:
        """Undoes `matrix`."""
        rows = matrix.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self.interleaved else matrix
        return rows.t() if self.transposed else rows

    def outputs(self, y: torch.Tensor) -> torch.Tensor:
        """Returns the outputs `[..., out]` of a matrix in the order of the parameter's rows."""
        return y.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.interleaved else y


class ReadMatrices(Sequence[Any]):
    """The matrices `[out, in]` of a parameter that is read one expert at a time.

    Args:
        stacking: the stacking of the parameter.
        stored: a function that returns the part of the parameter that belongs to an expert, by index.
    """

    is_meta = False

    def __init__(self, stacking: Stacking, stored: Sequence[torch.Tensor]) -> None:
        import torch

        self.stacking, self.stored, self.shape = stacking, stored, torch.Size(stacking.weight_shape)

    def __len__(self) -> int:
        return self.stacking.experts

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.stacking.matrix(self.stored[index])

    def dim(self) -> int:
        """Returns the number of dimensions, as a tensor's `dim`."""
        return len(self.shape)


EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3")


def stacking_of_experts(module: nn.Module, name: str) -> Stacking:
    """Returns how the parameter `name` holds the matrices of experts; ValueError where it holds something else."""
    stacking = stacking_of(module, name)
    if stacking is None:
        raise ValueError(f"{type(module).__name__}.{name}: holds no matrices of experts")
    return stacking


def stacking_of(module: nn.Module, name: str) -> Stacking | None:
    """Returns how the parameter `name` of a module holds the matrices of experts; None where it holds something else.

    Two parameters together show whether matrices are transposed:

        gate_up_proj [experts, 2 * width, in], down_proj [experts, in, width]     plain
        gate_up_proj [experts, in, 2 * width], down_proj [experts, width, in]     transposed

    Where one is missing, an attribute that transformers sets on the module shows it. JetMoE calls each parameter
    `weight`; DBRX has its matrices in two dimensions, and multiplies by `w2` without transposing it.
    """
    parameter: Any = getattr(module, name)
    shape = tuple(parameter.shape)
    count = getattr(module, "moe_num_experts", None)
    # DBRX: [experts · ffn, hidden] in two dimensions. `v1` is its name for the up projection.
    if len(shape) == 2 and name in ("w1", "v1", "w2") and count and shape[0] == count * module.ffn_hidden_size:
        return Stacking(shape, count, transposed=name == "w2")
    # JetMoE: only sizes that the module repeats distinguish its experts from any other three-dimensional parameter.
    if name == "weight" and len(shape) == 3:
        sizes = tuple(getattr(module, size, None) for size in ("num_experts", "output_size", "input_size"))
        return Stacking(shape, shape[0]) if shape == sizes else None
    if len(shape) != 3 or name not in EXPERT_NAMES:
        return None
    pair = [
        tuple(getattr(module, part).shape) if hasattr(module, part) else () for part in ("gate_up_proj", "down_proj")
    ]
    transposed = are_transposed(*pair) if all(pair) else bool(getattr(module, "is_transposed", False))
    # GPT-OSS has the rows of gate and up alternate; elsewhere all of gate come before all of up.
    interleaved = name == "gate_up_proj" and not getattr(module, "is_concatenated", True)
    return Stacking(shape, shape[0], transposed, interleaved)


def expert_matrices(model: nn.Module, name: str, held: Any = None) -> Any:
    """Returns the matrices `[experts, out, in]` of a parameter, or a sequence that reads them one by one from its file.

    Args:
        model: the model that holds it.
        name: the name of the parameter.
        held: the parameter's values where they are elsewhere, on another device for example.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    stacking = stacking_of_experts(module, last)
    if held is None:
        parameter = module.get_parameter(last)
        stored = getattr(parameter, "stored", None)
        if stored is not None:
            return stacking.read(stored)
        held = parameter.detach()
    return stacking.matrices(held)


def are_transposed(fused: Sequence[int], down: Sequence[int]) -> bool:
    """Returns whether `gate_up_proj` and `down_proj` of these shapes are `[experts, in, out]`."""
    # gate_up [experts, a, b] and down [experts, c, d]: transposed where a = d (hidden) and b = 2 c (twice the width).
    return len(fused) == len(down) == 3 and tuple(fused[1:]) == (down[2], 2 * down[1])
