"""`lowrank_branch` finds a low-rank branch in 16 bit beside the quantized weight: W ≈ Q + B A, as in SVDQuant.

The branch takes the directions in which the output is largest, and sees the input unrounded, so neither weight nor
activation rounding touches them; what is left for Q is smaller and flatter.

Which rank-r product is best depends on the inputs. With M = L Lᵀ their second moment, the mean squared output error
of leaving out R = W - B A is ‖R L‖², so by Eckart and Young the best branch comes from the largest singular values
of the whitened weight,

    W L = U S Vᵀ,    B = U_r √S_r,    A = √S_r V_rᵀ L⁻¹

and with W L in hand, B A = U_r U_rᵀ W: the branch is W projected onto its r strongest *output* directions, so L⁻¹ is
never needed, and a singular M does no harm. U comes from the eigenvectors of the smaller of W M Wᵀ and Lᵀ Wᵀ W L.

The branch is stored in the model's dtype, and Q is solved for what the *rounded* branch leaves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quant.calibration.solvers.gptq import corrected_weight, factorize
from quant.calibration.statistics import LayerStats

Branch = tuple[torch.Tensor, torch.Tensor]


def take_branches(
    weights: Mapping[str, torch.Tensor], stats: LayerStats, rank: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Branch]]:
    """What is left of weights with one input once a branch is taken off each, and the branches, by layer name.

    Args:
        weights: `[out, in]`.
        stats: of the input as the branch sees it, with its second moment; its drift is made up for by both together.
        rank: of the branches; at most the smaller side of each weight is taken.
        dtype: in which branches are stored.
    """
    assert stats.second_moment is not None
    factor = factorize(stats.second_moment)
    left, branches = {}, {}
    for name, weight in weights.items():
        wanted = corrected_weight(weight, stats.drift, factor)
        branches[name] = lowrank_branch(wanted, factor.moment, min(rank, *weight.shape), dtype, name)
        left[name] = residual_weight(wanted, branches[name])
    return left, branches


def lowrank_branch(
    weight: torch.Tensor, second_moment: torch.Tensor | None, rank: int, dtype: torch.dtype, name: str = "weight"
) -> Branch:
    """The best branch of rank `rank` under the norm of the inputs.

    Args:
        weight: `[out, in]`.
        second_moment: mean of x xᵀ, `[in, in]`; None weighs all inputs alike.
        rank: at least 1 and at most the smaller side of the weight.
        dtype: in which the branch is stored.
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
    moment = (
        torch.eye(columns, dtype=wide.dtype, device=wide.device) if second_moment is None else second_moment.double()
    )
    directions = _output_directions(wide, moment, rank)
    down = directions.t() @ wide
    # A direction is of unit length; half the size of its row of `down` moves over to it.
    size = down.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return (down / size[:, None]).to(dtype), (directions * size).to(dtype)


def residual_weight(weight: torch.Tensor, branch: Branch) -> torch.Tensor:
    """What a stored branch leaves of `weight`, in its dtype; the product is taken in float64."""
    down, up = branch
    return (weight.double() - up.double() @ down.double()).to(weight.dtype)


def _output_directions(weight: torch.Tensor, moment: torch.Tensor, rank: int) -> torch.Tensor:
    """Left singular vectors of W L that belong to its largest singular values, `[out, rank]`."""
    rows, columns = weight.shape
    if rows <= columns:
        directions: torch.Tensor = torch.linalg.eigh(weight @ moment @ weight.t())[1][:, -rank:].flip(1)
        return directions
    # More outputs than inputs: with M = L Lᵀ from its eigenvectors, Lᵀ Wᵀ W L is the smaller matrix.
    values, vectors = torch.linalg.eigh(moment)
    half = weight @ (vectors * values.clamp(min=0).sqrt())
    strongest = torch.linalg.eigh(half.t() @ half)[1][:, -rank:].flip(1)
    directions = torch.linalg.qr(half @ strongest)[0]
    return directions
