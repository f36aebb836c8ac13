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

Where the gradients at the outputs were measured (`kfac`), an error counts by the loss of the whole model, tr(A E N Eᵀ)
for Σ over N = diag(n): all of the above then holds for Lᵀ W in place of W, with A = L Lᵀ.

The branch is stored in the model's dtype, and Q is solved for the residual of the *rounded* branch. Afterwards Q is
fixed, and `refit_branches` fits the branch to W - Q: it takes up the largest part of the rounding errors as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from quant.calibration.solvers.gptq import corrected_weight, factorize
from quant.calibration.statistics import LayerStats
from quant.formats.scaling import nonzero

# Added to the diagonal of A, as a fraction of its mean: the first one with which A has a Cholesky factor.
_OUTPUT_DAMPING = (0.001, 0.01, 0.1, 1.0)


class LossMetric:
    """A factor of A, by which weights are taken into the metric of the loss and back.

    A comes as diagonal blocks `[k, k]` whose sizes add up to the outputs of the weight; none stand for A = 1.
    """

    def __init__(self, blocks: Sequence[Tensor], damping: float = _OUTPUT_DAMPING[0]) -> None:
        self.sizes = [len(block) for block in blocks]
        self.factors = [_factor(block.float(), damping) for block in blocks]

    def enter(self, weight: Tensor) -> Tensor:
        """Returns Lᵀ W of `[out, n]`, in the dtype of W."""
        if not self.sizes:
            return weight
        return torch.cat([factor.to(rows).t() @ rows for factor, rows in self._parts(weight)])

    def leave(self, weight: Tensor) -> Tensor:
        """Returns L⁻ᵀ W of `[out, n]`: `enter` undone."""
        if not self.sizes:
            return weight
        solved = [
            torch.linalg.solve_triangular(factor.to(rows).t(), rows, upper=True) for factor, rows in self._parts(weight)
        ]
        return torch.cat(solved)

    def _parts(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.factors, weight.split(self.sizes), strict=True))


def blocks_between(blocks: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Returns the diagonal blocks of A for some neighbouring outputs, cut where they reach beyond these."""
    ends = list(accumulate(len(block) for block in blocks))
    spans = [(max(start - end + len(b), 0), min(stop - end, 0) + len(b)) for end, b in zip(ends, blocks, strict=True)]
    return [block[a:b, a:b] for (a, b), block in zip(spans, blocks, strict=True) if a < b]


def _factor(block: Tensor, least: float) -> Tensor:
    """Returns the lower L with L Lᵀ = A, damped, of a float32 block `[k, k]` of A."""
    mean = nonzero(block.diagonal().mean())
    for damping in (step for step in _OUTPUT_DAMPING if step >= least):
        damped = block.clone()
        damped.diagonal().add_(damping * mean)
        lower: Tensor
        lower, info = torch.linalg.cholesky_ex(damped)
        # Rounding gives A negative eigenvalues where a few outputs have gradients far above the others'.
        if int(info) == 0:
            return lower
    # Each output by itself; 1e-6 of the mean keeps it invertible.
    return block.diagonal().clamp(min=1e-6 * float(mean)).sqrt().diag()


Branch = tuple[Tensor, Tensor]
_PLAIN = LossMetric(())


def take_branches(
    weights: Mapping[str, Tensor], stats: LayerStats, rank: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Branch], LayerStats]:
    """Takes a branch off each of several weights `[out, in]` that read one input.

    Residual and branch together make up for the input's drift, and for the stream's error. Returns the residuals and
    the branches, by layer name, and statistics without the drift to solve the residuals with.
    """
    noise = stats.matrix.diagonal() if stats.noise is None else stats.noise
    corrects = stats.drift is not None or stats.residual is not None
    factor = factorize(stats.matrix) if corrects else None
    residuals, branches = {}, {}
    for name, metric in _metrics(weights, stats).items():
        weight = weights[name]
        corrected = weight if factor is None else corrected_weight(weight, stats.drift, factor, stats.residual)
        branches[name] = lowrank_branch(corrected, noise, min(rank, *weight.shape), dtype, metric)
        residuals[name] = residual_weight(corrected, branches[name])
    return residuals, branches, replace(stats, drift=None, residual=None)


def refit_branches(
    residuals: Mapping[str, Tensor], rounded: Mapping[str, Tensor], branches: Mapping[str, Branch], stats: LayerStats
) -> tuple[dict[str, Tensor], dict[str, Branch]]:
    """Fits the branches to the errors of the rounded weights.

    `residuals` are the weights `[out, in]` less their branches. Returns the weights less the new branches, and these
    branches, which leave the least loss next to the rounded weights.
    """
    # Now it is the error of the output that counts, under the second moment of the input: X = R Rᵀ.
    moment = factorize(stats.matrix).H.double()
    power = torch.linalg.cholesky_ex(moment)[0]
    targets, refitted = {}, {}
    for name, metric in _metrics(residuals, stats).items():
        down, up = branches[name]
        weight = residuals[name].double() + up.double() @ down.double()
        weighted = metric.enter(weight - rounded[name].double())
        directions = _output_directions(weighted @ power, len(down))
        refitted[name] = _balanced(directions.t() @ weighted, metric.leave(directions), down.dtype)
        targets[name] = residual_weight(weight, refitted[name]).to(residuals[name].dtype)
    return targets, refitted


def _metrics(weights: Mapping[str, Tensor], stats: LayerStats) -> dict[str, LossMetric]:
    """Returns the metric of each of several weights, whose outputs follow each other in the statistics."""
    total = sum(len(weight) for weight in weights.values())
    blocks = [] if stats.outputs is None else stats.outputs.blocks_of(total)
    metrics, start = {}, 0
    for name, weight in weights.items():
        metrics[name] = LossMetric(blocks_between(blocks, start, start + len(weight)), damping=0.01)
        start += len(weight)
    return metrics


def lowrank_branch(weight: Tensor, noise: Tensor, rank: int, dtype: torch.dtype, metric: LossMetric = _PLAIN) -> Branch:
    """Returns the branch of `[out, in]` that leaves the least noise, whose power by input is `noise` `[in]`.

    It is (down `[rank, in]`, up `[out, rank]`) in `dtype`, of columns and rows of equal norm, so that neither overflows
    a narrow dtype.
    """
    wide = metric.enter(weight.double())
    directions = _output_directions(wide * noise.double().sqrt(), rank)
    # A = U_rᵀ Lᵀ W and B = L⁻ᵀ U_r: B A = L⁻ᵀ U_r U_rᵀ Lᵀ W.
    return _balanced(directions.t() @ wide, metric.leave(directions), dtype)


def _balanced(down: Tensor, up: Tensor, dtype: torch.dtype) -> Branch:
    """Returns the same product from rows of `down` and columns of `up` of equal norm."""
    tiny = torch.finfo(torch.float32).tiny
    size = (down.norm(dim=1).clamp(min=tiny) / up.norm(dim=0).clamp(min=tiny)).sqrt()
    return (down / size[:, None]).to(dtype), (up * size).to(dtype)


def residual_weight(weight: Tensor, branch: Branch) -> Tensor:
    """Returns `weight` less the product of its stored branch, in its dtype; the product is taken in float64."""
    down, up = branch
    return (weight.double() - up.double() @ down.double()).to(weight.dtype)


def _output_directions(weighted: Tensor, rank: int) -> Tensor:
    """Returns the left singular vectors of W L that belong to its largest singular values, `[out, rank]`."""
    rows, columns = weighted.shape
    if rows <= columns:
        return torch.linalg.eigh(weighted @ weighted.t())[1][:, -rank:].flip(1)
    # The smaller Gram matrix gives right singular vectors V_r; W L V_r = U_r S_r, whose span QR keeps.
    strongest = torch.linalg.eigh(weighted.t() @ weighted)[1][:, -rank:].flip(1)
    return torch.linalg.qr(weighted @ strongest)[0]
