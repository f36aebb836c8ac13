"""A rotation turns a layer's input together with its weight: W x = (W H)(H x), H orthonormal and symmetric.

A block Hadamard spreads an outlier over its block and makes weights nearly Gaussian, which a grid with one
scale for sixteen values rounds best. It costs log2(block) additions a value at run time where it stays online
(`QuantLinear.hadamard`), and nothing where the module that produces the input can take it over:

    value → output projection   H acts within a head, attention mixes tokens and not channels, so rows of the value
                                projection take the rotation that columns of the output projection undo
    residual stream             every writer rotates its output, every reader its input, and RMS norms do not notice
                                once their weights are merged into the readers (QuaRot, Ashkboos et al., 2024)

Neither is looked up by model names: candidates are found by watching a forward pass, and kept only if the output stays
the same.

Rotation suits second-order rounding of weights. It does not suit plain rounding in small blocks, nor inputs rounded
to 4 bits, whose few large channels it spreads over their neighbours: it is a choice per layer, never a default.
"""

from __future__ import annotations

import torch

from quant.kernels.linear.quant_linear import RunTimeParts
from quant.kernels.rounding.hadamard import hadamard_block, hadamard_transform

LARGEST_BLOCK = 128


def rotation_block(columns: int, largest: int = LARGEST_BLOCK) -> int:
    """Returns the largest power of two that divides `columns`, at most `largest`.

    0 where that is 1 and nothing would turn.
    """
    block = min(hadamard_block(columns), largest)
    return block if block > 1 else 0


def rotate_weight(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Returns W Hᵀ for a weight `[..., out, in]`, in blocks along its inputs; 0 leaves it. float64 stays float64."""
    return hadamard_transform(weight, block) if block else weight


def matrix_of(weight: torch.Tensor, parts: RunTimeParts) -> torch.Tensor:
    """Returns the matrix `[out, in]` by which a layer multiplies its input: its weight with the operations of run time.

    Args:
        weight: dense, `[out, in]`, as it was rounded: scaled, rotated and without its branch.
        parts: the parts of the layer.

    Returns:
        In the dtype of `weight`; `weight` itself where there are no parts.
    """
    if parts.lowrank is not None:
        down, up = (part.to(weight.dtype) for part in parts.lowrank)
        weight = weight + up @ down
    # H is its own inverse, so rotating the rounded weight again undoes the rotation.
    weight = rotate_weight(weight, parts.hadamard)
    return weight if parts.pre_scale is None else weight * parts.pre_scale.to(weight.dtype)
