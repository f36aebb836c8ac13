"""A `Stacking` says how one parameter of a model holds the matrices of all experts.

    [experts, out, in]      most models
    [experts, in, out]      gpt-oss, Aria, Llama 4, which multiply with `x @ P[e]` or `bmm(x, P)`
    [experts * rows, cols]  DBRX, whose `w2` is [in, out] for each expert

Rows of gate and up may alternate, as in gpt-oss. Everywhere in this package a matrix is `[out, in]` with gate above up,
so that blocks lie along the axis of the dot product, and gate and up can be stored apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
