"""A pair of inverse matrices multiplies queries and keys so that rounding either costs their scores little.

    A = mean k kᵀ = L Lᵀ,    B = mean q qᵀ,    M = Lᵀ B L           of a KV head
    k' = k · L⁻ᵀ M^¼ · H,    q' = q · L M^-¼ · H                    H an orthonormal Hadamard matrix

Every score stays the same, since each matrix is the other's inverse, transposed. Before H, the second moments of q'
and k' are both M^½. Equal moments are optimal: the error of a score is the rounding of one operand times the size of
the other. With diagonal moments this would be SmoothQuant's sharing of each channel's magnitude between a layer and
its input; full matrices also exploit the correlation of neighbouring channels and of the two channels that a rotary
embedding mixes. H then spreads outliers over the whole head: errors grow with the sum of the squared second moments
of the channels, which is least where all are equal.

The eigenvectors of M would make them equal exactly, instead of leaving a tenth more error. But where eigenvalues are
close, eigenvectors turn by thirty times the change of the moments, and a GPU and a CPU, whose sums differ, would round
different numbers. L and powers of M turn by half of it.

Keys are first centred by a constant vector c. This shifts all scores of a query alike, which softmax ignores:

    c = Σ p k / Σ p                        p: the attention that every query gives every key

This c leaves the least to round in the keys that matter: above all the first token's, which takes most of the
attention in many heads and whose key is far from the others. Centring costs SmolLM2 a sixth less KL of rounding, where
the plain mean would cost it more. A soft cap sees such shifts, so there c is zero.

Moments and means come from the first tokens. A few tokens say little about correlations between channels, so products
of different channels count as if `PRIOR` more tokens had shown none.

Source: (L⁻ᵀ M^¼)(L⁻ᵀ M^¼)ᵀ is the geometric mean of A⁻¹ and B (Pusz and Woronowicz, 1975).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.formats.scaling import nonzero
from quant.kernels.rounding.hadamard import hadamard_transform, on_each_device

PRIOR = 64
"""Tokens without correlation between channels that are added to every mean."""
SAMPLED = 2048
"""Tokens, evenly spread, from which moments are computed at most."""
_QUERIES = 512
"""Queries, at most, whose attention weighs keys."""
_ITERATIONS = 28
"""Enough for eigenvalues in a ratio of 1e9; the ratios of SmolLM2's heads are 2e3 to 1e8."""
_FLOOR = 2.0**-20
"""Least second moment of a channel, as a share of the mean: a channel of zeros is neither lost nor blown up."""


@dataclass(frozen=True, eq=False)
class Turn:
    """The factors of queries and keys, float32 `[kv_heads, dim, dim]`, each the transposed inverse of the other.

    `center` is subtracted from keys first, float32 `[kv_heads, 1, dim]`.
    """

    of_q: Tensor
    of_k: Tensor
    center: Tensor

    def q(self, q: Tensor) -> Tensor:
        """Returns q', from q `[batch, heads, tokens, dim]`."""
        grouped: Tensor = q.float().unflatten(1, (len(self.of_q), -1)) @ self.of_q[:, None]
        return grouped.flatten(1, 2).to(q.dtype)

    def k(self, k: Tensor) -> Tensor:
        """Returns k', from k `[batch, kv_heads, tokens, dim]`."""
        return ((k.float() - self.center) @ self.of_k).to(k.dtype)

    def back(self, k: Tensor) -> Tensor:
        """Returns k from k'."""
        return (k.float() @ self.of_q.mT + self.center).to(k.dtype)


def turning(q: Tensor, k: Tensor, *, softmax_scale: float | None = None, softcap: float | None = None) -> Turn:
    """Returns the rotation that suits q `[batch, heads, tokens, dim]` and k `[batch, kv_heads, tokens, dim]`."""
    center = torch.zeros_like(k[0, :, :1], dtype=torch.float32)
    if softcap is None:
        center = _center(q, k, k.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    # A = of_k, B = of_q, L = lower and M = product of the module docstring.
    of_q, of_k = _moment(q, k.shape[1]), _moment(k.float() - center, k.shape[1])
    lower: Tensor = torch.linalg.cholesky_ex(of_k).L
    product = lower.mT @ of_q @ lower
    # Symmetric up to rounding, and both methods of finding M^-¼ and M^¼ need it to be so exactly.
    product = (product + product.mT) / 2
    if k.is_cuda:
        inverse, root = _by_products(product)
    else:
        values, vectors = torch.linalg.eigh(product)
        # Eigenvalues that rounding made negative or zero are raised slightly.
        values = values.clamp(min=1e-14 * values.amax(-1, keepdim=True))[:, None]
        inverse, root = ((vectors * values**exponent) @ vectors.mT for exponent in (-0.25, 0.25))
    rotation = _rotation(k, k.shape[3])
    # L⁻ᵀ M^¼ H by substitution, which is more exact than an inverse of L.
    turned_k = torch.linalg.solve_triangular(lower.mT, root @ rotation, upper=True)
    return Turn((lower @ inverse @ rotation).float(), turned_k.float(), center)


@on_each_device
def _rotation(dim: int) -> Tensor:
    return hadamard_transform(torch.eye(dim, dtype=torch.float64, device="cpu"))


def _center(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Returns the mean of the keys, weighted by causal attention, float32 `[kv_heads, 1, dim]`."""
    # At most `SAMPLED` keys over the whole batch, evenly spread.
    stride = -(-k.shape[0] * k.shape[2] // SAMPLED)
    keys = k[:, :, ::stride].float()
    rows = torch.arange(0, q.shape[2], max(stride, -(-k.shape[0] * k.shape[2] // _QUERIES)), device=q.device)
    queries = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
    scores = queries @ keys[:, :, None].mT * softmax_scale
    positions = torch.arange(0, k.shape[2], stride, device=q.device)
    weight = scores.masked_fill(positions > rows[:, None], -torch.inf).softmax(-1).sum((2, 3))[..., None]
    mean: Tensor = ((weight * keys).sum(2) / weight.sum(2)).mean(0)[:, None]
    return torch.where(mean.isfinite().all(), mean, torch.zeros_like(mean))


def _by_products(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x^-¼ and x^¼ from products: a GPU's eigendecomposition synchronizes and is slower than a CPU's.

    Newton's method for x^-¼, whose iterates commute with x (Guo and Higham, 2006): with y = x / |x|,

        t = (5 - y) / 4,    r ← r · t,    y ← t⁴ · y

    An eigenvalue of y grows 2.4-fold a step until it is close to 1; then the number of correct digits doubles. One
    that needs more than `_ITERATIONS` steps stays below 1, which balances its channel less well; x^¼ is the inverse of
    the result, so scores stay exact.
    """
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    # The largest row sum bounds the eigenvalues, so y has them in (0, 1], where Newton's method converges.
    size = x.abs().sum(-1).amax(-1)[:, None, None]
    residual, root = x / size, identity.expand_as(x)
    for _ in range(_ITERATIONS):
        step = torch.add(1.25 * identity, residual, alpha=-0.25)
        squared = step @ step
        root, residual = root @ step, squared @ (squared @ residual)
    inverse = root * size**-0.25
    return inverse, torch.linalg.inv_ex(inverse).inverse


def _moment(x: Tensor, kv_heads: int) -> Tensor:
    """Returns the mean of x xᵀ over the rows of a KV head, plus the prior: positive definite, float64."""
    stride = -(-x.shape[0] * x.shape[2] // SAMPLED)
    rows = x[:, :, ::stride].float().unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 3)
    seen = rows.shape[1]
    product = (rows.mT @ rows).double() / seen
    # A model whose activations overflow keeps its scores: moments of zero give a rotation by only H.
    product = torch.where(product.isfinite().all(), product, torch.zeros_like(product))
    channels = product.diagonal(dim1=-2, dim2=-1)
    least = nonzero(channels.mean(-1, keepdim=True) * _FLOOR)
    # The prior has the measured variance of each channel and no correlation.
    prior = torch.diag_embed(channels * PRIOR)
    return (product * seen + prior) / (seen + PRIOR) + torch.diag_embed(least.expand_as(channels))
