"""`lowrank_branch` finds a low-rank branch in 16 bit next to the quantized weight: W ≈ Q + B A, as in SVDQuant.

The branch sees the input unrounded, so neither weight nor activation rounding touches it; the residual that is left
for Q is smaller and flatter.

Q still gives the output of the residual R = W - B A. So the size of that output does not count, but the noise that R
lets through does. Rounding of the inputs adds noise of power n_j to input j, hardly correlated between inputs, and the
output noise is Σ n_j ‖R_j‖² over the columns of R. Rounding of R itself adds errors in proportion to its weights: the
same sum, with the power of input j for n_j. With L = diag(√n) that is ‖R L‖², so by Eckart and Young the best branch
comes from the largest singular values of the weighted weight,

    W L = U S Vᵀ,    B = U_r √S_r,    A = √S_r V_rᵀ L⁻¹

and with W L in hand, B A = U_r U_rᵀ W: the branch is W projected onto its r noisiest *output* directions, so L⁻¹ is
never needed, and an input without noise does no harm. U comes from the eigenvectors of the smaller of W L Lᵀ Wᵀ and
Lᵀ Wᵀ W L.

The branch is stored in the model's dtype, and Q is solved for the residual of the *rounded* branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quant.calibration.solvers.factor import corrected_weight, factorize
from quant.calibration.statistics import LayerStats

Branch = tuple[torch.Tensor, torch.Tensor]


def take_branches(
    weights: Mapping[str, torch.Tensor], stats: LayerStats, rank: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Branch], LayerStats]:
    """Takes a branch off each of several weights that read one input.

    Args:
        weights: `[out, in]`.
        stats: the statistics of the input; residual and branch together make up for its drift, and for the stream's
            error.
        rank: the rank of the branches; at most the smaller side of each weight is taken.
        dtype: the dtype in which branches are stored.

    Returns:
        The residuals and the branches, by layer name, and statistics without the drift to solve the residuals with.
    """
    noise = stats.matrix.diagonal() if stats.noise is None else stats.noise
    corrects = stats.drift is not None or stats.residual is not None
    factor = factorize(stats.matrix) if corrects else None
    residuals, branches = {}, {}
    for name, weight in weights.items():
        corrected = weight if factor is None else corrected_weight(weight, stats.drift, factor, stats.residual)
        branches[name] = lowrank_branch(corrected, noise, min(rank, *weight.shape), dtype, name)
        residuals[name] = residual_weight(corrected, branches[name])
    return residuals, branches, replace(stats, drift=None, residual=None)


def lowrank_branch(
    weight: torch.Tensor, noise: torch.Tensor, rank: int, dtype: torch.dtype, name: str = "weight"
) -> Branch:
    """Returns the branch of rank `rank` that leaves the least noise.

    Args:
        weight: `[out, in]`.
        noise: power of the noise of each input, in any unit, `[in]`.
        rank: the rank of the branch, from 1 to the smaller side of the weight.
        dtype: the dtype in which the branch is stored.
        name: how errors call the layer.

    Returns:
        (down `[rank, in]`, up `[out, rank]`) in `dtype`, of columns and rows of equal norm, so that neither
        overflows a narrow dtype.

    Raises:
        ValueError: the rank does not fit the weight.
    """
    rows, columns = weight.shape
    if not 0 < rank <= min(rows, columns):
        raise ValueError(
            f"{name} {list(weight.shape)}: low-rank branch of rank {rank}; it must be 1 to {min(rows, columns)}"
        )
    wide = weight.double()
    directions = _output_directions(wide * noise.double().sqrt(), rank)
    # A = U_rᵀ W and B = U_r: B A = U_r U_rᵀ W.
    down = directions.t() @ wide
    # A direction is of unit length; half the size of its row of `down` moves over to it.
    size = down.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return (down / size[:, None]).to(dtype), (directions * size).to(dtype)


def residual_weight(weight: torch.Tensor, branch: Branch) -> torch.Tensor:
    """Returns `weight` less the product of its stored branch, in its dtype; the product is taken in float64."""
    down, up = branch
    return (weight.double() - up.double() @ down.double()).to(weight.dtype)


def _output_directions(weighted: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the left singular vectors of W L that belong to its largest singular values, `[out, rank]`."""
    rows, columns = weighted.shape
    if rows <= columns:
        directions: torch.Tensor = torch.linalg.eigh(weighted @ weighted.t())[1][:, -rank:].flip(1)
        return directions
    # The smaller Gram matrix gives right singular vectors V_r; W L V_r = U_r S_r, whose span QR keeps.
    strongest = torch.linalg.eigh(weighted.t() @ weighted)[1][:, -rank:].flip(1)
    directions = torch.linalg.qr(weighted @ strongest)[0]
    return directions
