"""Queries and keys turned alike, so that rounding either costs their scores little.

    C  = (mean k kᵀ)⁻¹ # (mean q qᵀ)            of a KV head; # is the geometric mean of two matrices
    q' = q · C^-½ · H,    k' = k · C^½ · H       H an orthonormal Hadamard matrix

Every score stays as it was, for C^-½ H and C^½ H are each other's inverse, transposed. C is what makes the second
moments of q' and k' equal, which is best: the error of a score is the rounding of one times the size of the other.
Were C diagonal, this would be the sharing out of each channel's magnitude that SmoothQuant does between a layer and
its input; as a matrix, it also uses that neighbouring channels, and the two that a rotary embedding turns into each
other, go together. H then spreads what stands out over the whole head, for a block's error grows with its largest
value.

The moments are those of the first tokens that there are. Few tokens say little about how channels go together, so
products of different channels count as if `PRIOR` more tokens had shown none.

Source of #: Pusz and Woronowicz, 1975. With A = L Lᵀ, A⁻¹ # B = L⁻ᵀ (Lᵀ B L)^½ L⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.kernels.hadamard import hadamard_transform

PRIOR = 64
"""Tokens without any correlation between channels that every mean is joined by."""
SAMPLED = 2048
"""Tokens that the moments are taken of, evenly spread, where there are more."""
_FLOOR = 2.0**-20
"""Least share of the mean that a channel's second moment counts as: a channel of zeros is neither lost nor blown up."""


@dataclass(frozen=True, eq=False)
class Turn:
    """What queries and keys are multiplied by: float32 `[kv_heads, dim, dim]`, inverse to each other but transposed."""

    of_q: torch.Tensor
    of_k: torch.Tensor

    def q(self, q: torch.Tensor) -> torch.Tensor:
        """q', from q `[batch, heads, tokens, dim]`."""
        grouped: torch.Tensor = q.float().unflatten(1, (len(self.of_q), -1)) @ self.of_q[:, None]
        return grouped.flatten(1, 2).to(q.dtype)

    def k(self, k: torch.Tensor) -> torch.Tensor:
        """k', from k `[batch, kv_heads, tokens, dim]`."""
        return (k.float() @ self.of_k).to(k.dtype)

    def back(self, k: torch.Tensor) -> torch.Tensor:
        """k from k'."""
        return (k.float() @ self.of_q.mT).to(k.dtype)


def turning(q: torch.Tensor, k: torch.Tensor) -> Turn:
    """The turn that suits q `[batch, heads, tokens, dim]` and k `[batch, kv_heads, tokens, dim]`."""
    # Decomposed on the CPU whatever the device: small matrices, and the GPU's solvers take several times as long.
    of_q, of_k = (_moment(x, k.shape[1]).cpu() for x in (q, k))
    lower = torch.linalg.cholesky(of_k)
    middle = _power(lower.mT @ of_q @ lower, 0.5)
    # L⁻ᵀ X L⁻¹ by two triangular systems.
    half = torch.linalg.solve_triangular(lower.mT, middle, upper=True)
    mean = torch.linalg.solve_triangular(lower.mT, half.mT, upper=True)
    rotation = hadamard_transform(torch.eye(k.shape[3], dtype=torch.float64))
    return Turn(*((_power(mean, exponent) @ rotation).float().to(k.device) for exponent in (-0.5, 0.5)))


def _moment(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Mean of x xᵀ over what a KV head sees, joined by the prior: float64 `[kv_heads, dim, dim]`, positive definite."""
    stride = -(-x.shape[0] * x.shape[2] // SAMPLED)
    rows = x[:, :, ::stride].float().unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 3)
    seen = rows.shape[1]
    product = (rows.mT @ rows).double() / seen
    product = torch.where(product.isfinite().all(), product, torch.zeros_like(product))
    channels = product.diagonal(dim1=-2, dim2=-1)
    least = channels.mean(-1, keepdim=True) * _FLOOR
    least = torch.where(least > 0, least, torch.ones_like(least))
    prior = torch.diag_embed(channels * PRIOR)
    mean: torch.Tensor = (product * seen + prior) / (seen + PRIOR) + torch.diag_embed(least.expand_as(channels))
    return mean


def _power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of symmetric matrices by their eigenvalues, those that rounding made negative or zero raised a little."""
    values, vectors = torch.linalg.eigh((x + x.mT) / 2)
    values = values.clamp(min=1e-14 * values.amax(-1, keepdim=True))
    raised: torch.Tensor = (vectors * values[:, None] ** exponent) @ vectors.mT
    return raised
