"""`LayerStats` holds the few sums over calibration tokens that every solver works from.

With x the input a layer really gets (earlier layers quantized, itself rounded where activations are quantized) and
r the input it had in the original model, over n tokens:

    second_moment = Σ x xᵀ / n          the curvature of the layer's output error
    drift         = Σ (r - x) xᵀ / n    how the input went wrong, as far as x can still tell

A rounded weight Q of an original W is judged by Σ ‖Q x - W r‖². Completing the square, that is a constant plus
the trace of (Q - W*) M (Q - W*)ᵀ, with M the second moment and the corrected weight W* = W (M + drift) M⁻¹. So the
whole past is in two matrices [in, in], and no token needs to be kept (Qronos and GPTAQ use the same correction).

**Shrinkage.** `MomentSpread` measures how far a second moment can be trusted; `shrink` removes the part that cannot.

A second moment M over a few rows of text is exact for those rows and an estimate for every other text. Its
off-diagonal entries are the worse part: a layer with thousands of inputs has millions of pairs, and most of their
products are chance. A solver that feeds errors back along them (GPTQ) fits that chance. Shrinking towards the diagonal,

    M_λ = (1 - λ) M + λ diag(M),

is the classical remedy, and the λ with the smallest expected squared error has a closed form (Ledoit and Wolf, 2004;
Schäfer and Strimmer, 2005, for this target, on the scale of correlations so that loud channels do not dominate):

    λ* = Σ Var(C_ij) / Σ C_ij²   over i ≠ j,   C_ij = M_ij / √(M_ii M_jj).

Tokens of one text are not independent draws, so Var comes from the spread between pieces of text, the calibration rows,
not between tokens. With P_r = X_rᵀ X_r of the n_r tokens of piece r, n = Σ n_r, and C_r = P_r / n_r scaled as C is,

    Var(C_ij) = Σ (n_r / n)² (C_r - C)²_ij / (1 - Σ (n_r / n)²),

which needs three running sums a pair: of P_r², n_r P_r and P_r. They are kept for a sample of the channels, because λ
is a ratio of sums over pairs. Pieces from different kinds of text differ more, and λ grows by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.base.errors import warn
from quant.calibration.fast_matmul import RightOperand, add_product, default_matmul, has_pairs, left_operand
from quant.calibration.ranks import Exchange, dealt, rank_and_world
from quant.formats.format import Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.kernels.linear.quant_linear import rounded_input

# Channels whose pairs are watched.
CHANNELS = 128
# λ = STRENGTH · λ*. A solver that inverts M loses more by its chance entries than the squared error of M says, and the
# texts that a model will meet differ more than calibration rows do. The held-out loss is flat around this value.
STRENGTH = 2.0
# Rows of a second moment that are added up together: on a CPU, and of how many strips on a GPU, of so many at least.
_STRIP, _STRIPS, _LEAST_GPU = 512, 8, 1024


class MomentSpread:
    """Running sums over pieces of text for pairs of a sample of channels of inputs `[..., in]`."""

    def __init__(self, like: Tensor) -> None:
        self.columns, device = like.shape[-1], like.device
        self.channels = (
            torch.linspace(0, self.columns - 1, min(CHANNELS, self.columns), device=device, dtype=torch.float32)
            .round()
            .long()
        )
        self.tokens = self.squared_tokens = 0
        # Σ P_r, Σ n_r P_r and Σ P_r².
        self.sums = torch.zeros(3, len(self.channels), len(self.channels), device=device, dtype=torch.float32)

    def add(self, x: Tensor, rows: int) -> None:
        """Adds a batch of inputs, `[tokens, in]`, of which each of `rows` equal parts is a piece of text."""
        pieces = x[:, self.channels].float().unflatten(0, (rows, len(x) // rows))
        length = pieces.shape[1]
        products = pieces.mT @ pieces
        total = products.sum(0)
        self.sums += torch.stack([total, length * total, products.square().sum(0)])
        self.tokens += len(x)
        self.squared_tokens += rows * length**2

    def shrinkage(self) -> Tensor:
        """Returns λ in 0..1, float32 scalar.

        One piece has no spread. Then λ is the value for independent tokens with independent channels, columns /
        (columns + tokens).
        """
        products, weighted, squares = self.sums
        evenness = self.squared_tokens / self.tokens**2
        # All tokens in one piece: Σ n_r² = (Σ n_r)².
        if evenness == 1:
            return products.new_full((), self.columns / (self.columns + self.tokens))
        mean = products / self.tokens
        # Σ n_r² (P_r / n_r - mean)², written out.
        spread = squares - 2 * mean * weighted + self.squared_tokens * mean.square()
        variance = spread / self.tokens**2 / (1 - evenness)
        power = mean.diagonal()
        scale = 1 / (power * power[:, None]).clamp(min=torch.finfo(torch.float32).tiny)
        scale.fill_diagonal_(0)
        noise_share = torch.sum(variance * scale) / torch.sum(mean.square() * scale)
        return (STRENGTH * noise_share).nan_to_num(1.0).clamp(0, 1)


def shrink(moment: Tensor, strength: Tensor) -> Tensor:
    """Returns (1 - λ) M + λ diag(M), in place; M `[in, in]`, or blocks of one, `[blocks, k, k]`."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    original = diagonal.clone()
    moment *= 1 - strength
    diagonal.copy_(original)
    return moment


@dataclass(eq=False)
class LayerStats:
    """Statistics of the input of one layer, or of all layers of a fusion group, which share their input."""

    tokens: int
    # mean of x xᵀ, float32 or float64 `[in, in]`; None where only its blocks were kept
    second_moment: Tensor | None = None
    drift: Tensor | None = None  # mean of (r - x) xᵀ, `[in, in]`, or None where x is the original input
    # diagonal blocks of the second moment, `[in / k, k, k]`, where only they were kept
    block_moments: Tensor | None = None
    mean: Tensor | None = None  # the mean of x, `[in]`
    mean_drift: Tensor | None = None  # the mean of r - x, `[in]`; None where x is the original input
    noise: Tensor | None = None  # mean squared rounding error of x, `[in]`; None where it was not measured
    # mean of s xᵀ, `[out, in]`, with s the share of the residual stream's error that the layer makes up for; None where
    # it writes to no stream
    residual: Tensor | None = None
    mean_residual: Tensor | None = None  # the mean of s, `[out]`; None without `residual`
    # second moment of the gradients at the layers' outputs, one after the other, or its diagonal blocks; None where it
    # was not measured
    outputs: "LayerStats | None" = None

    @property
    def matrix(self) -> Tensor:
        """The second moment as one matrix `[in, in]`; where only blocks were kept, with zeros outside of them."""
        if self.second_moment is not None:
            return self.second_moment
        assert self.block_moments is not None
        return torch.block_diag(*self.block_moments)

    def blocks(self, width: int) -> Tensor:
        """Returns the diagonal blocks of the second moment, `[in / width, width, width]`."""
        if self.block_moments is not None and self.block_moments.shape[-1] == width:
            return self.block_moments
        return diagonal_blocks(self.matrix, width)

    def blocks_of(self, size: int) -> list[Tensor]:
        """Returns the second moment as diagonal blocks, `[k, k]` each, whose sizes add up to `size`."""
        if self.block_moments is None:
            return [self.matrix]
        width = self.block_moments.shape[-1]
        # The last block is padded by zeros.
        return [block[: size - i * width, : size - i * width] for i, block in enumerate(self.block_moments)]

    def of_outputs(self, start: int, stop: int) -> "LayerStats":
        """Returns the same statistics for some neighbouring outputs of the layers that share the input."""
        cut = slice(start, stop)
        residual, outputs = None if self.residual is None else self.residual[cut], self.outputs
        if outputs is not None:
            # As one matrix, so that any cut will do.
            outputs = replace(outputs, second_moment=outputs.matrix[cut, cut], block_moments=None)
        return replace(self, residual=residual, outputs=outputs)


def diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """Returns the diagonal blocks of a square matrix, `[blocks, width, width]`; of several, with one dimension more.

    A short last one is completed by an identity.
    """
    if matrix.dim() > 2:
        return torch.stack([diagonal_blocks(each, width) for each in matrix])
    # Padding up to the next multiple; an identity there stays invertible and couples with nothing.
    short = -len(matrix) % width
    if short:
        matrix = torch.block_diag(matrix, torch.eye(short, dtype=matrix.dtype, device=matrix.device))
    count = len(matrix) // width
    # Block (i, i) for each i: `diagonal` puts i last, and the permutation puts it first.
    return matrix.reshape(count, width, count, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def pooled_stats(
    parts: Sequence[LayerStats], tokens: int | None = None, before: LayerStats | None = None
) -> LayerStats | None:
    """Returns the statistics of all tokens together, without the drift; `tokens` counts all that are pooled."""
    tokens = sum(stats.tokens for stats in parts) if tokens is None else tokens
    start = before or LayerStats(0)
    second, blocks, noise = start.second_moment, start.block_moments, start.noise
    for stats in parts:
        # Means are weighted by tokens: the result is the mean over all tokens.
        second = _plus(second, stats.second_moment, stats.tokens / tokens)
        blocks = _plus(blocks, stats.block_moments, stats.tokens / tokens)
        noise = _plus(noise, stats.noise, stats.tokens / tokens)
    return before if second is None and blocks is None else LayerStats(tokens, second, None, blocks, noise=noise)


def _plus(total: Tensor | None, tensor: Tensor | None, share: float) -> Tensor | None:
    return add_up(total, None if tensor is None else tensor * share)


class MomentSum:
    """Adds up second moments, or their diagonal blocks of a width, batch by batch.

    Products are taken in the dtype of the inputs, sums in float32. Where inputs are rounded under one scale for all,
    `unit`, a float32 scalar, they are multiples of it with at most eight bits: BF16 holds them, and where pairs of BF16
    are multiplied one exact product takes the place of three. Sums are then in units of it.
    """

    def __init__(self, width: int | None = None, unit: Tensor | None = None) -> None:
        self.width, self.unit = width, unit
        self.tokens = 0
        self.second: Tensor | None = None
        self.cross: Tensor | None = None
        self.residual: Tensor | None = None
        self.push: Tensor | None = None
        self.first: Tensor | None = None
        self.shift: Tensor | None = None
        self.noise: Tensor | None = None
        self.spread: MomentSpread | None = None

    def add(
        self, x: Tensor, drift: Tensor | None = None, rows: int = 1, noise: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds one batch.

        Args:
            x: inputs of the layer, `[tokens, in]`.
            drift: inputs of the layer in the original model, less `x`, `[tokens, in]`; None if that is zero.
            noise: sum over the tokens of the squared rounding errors of `x`, `[in]`; None if nobody asks.
            residual: errors that the layer's output makes up for, `[tokens, out]`; None if there are none.
        """
        self.add_spread(x, rows)
        drift, residual = (None if t is None else t.to(x) for t in (drift, residual))
        self.add_means(x, total_of(drift), noise, total_of(residual))
        self.add_products(x, drift, residual)

    def add_products(
        self, x: Tensor, drift: Tensor | None = None, residual: Tensor | None = None, *, shared: bool = False
    ) -> None:
        """Adds one batch to the second moments only; where `shared`, this rank adds up some rows, until `gather`.

        Where pairs are multiplied, `drift` and `residual` may be in BF16, to which they are rounded here.
        """
        if self.width is not None:
            # [tokens, in] -> [blocks, tokens, width]: one batched product for all diagonal blocks.
            x = pad(x, (0, -x.shape[1] % self.width)).unflatten(1, (-1, self.width)).transpose(0, 1)
            with default_matmul():
                blocks = x.mT @ x
            self.second = blocks.float() if self.second is None else self.second.add_(blocks)
            return
        columns, pairs, rank = x.shape[1], has_pairs(x), rank_and_world()[0]
        if self.second is None:
            self.second = torch.zeros(columns, columns, dtype=torch.float32, device=x.device)
        # Differences may be rounded to BF16: see `fast_matmul`.
        narrow = x.bfloat16() if pairs else x
        if not pairs:
            self.unit = None
        if self.unit is None:
            left, right = left_operand(x.t()), RightOperand(x).stacked
        else:
            narrow = (x / self.unit).bfloat16()
            left, right = narrow.t(), narrow
        # From the diagonal on: the part below is its mirror image, which `stats` adds.
        for rows, owner in _strips(columns, x.device, triangular=True):
            if owner == rank or not shared:
                _add_product(self.second[rows, rows.start :], left[rows], right[:, rows.start :], pairs)
        # D = Σ (r - x) xᵀ, not symmetric.
        for name, errors in (("cross", drift), ("residual", residual)):
            if errors is None:
                continue
            if getattr(self, name) is None:
                setattr(self, name, self.second.new_zeros(errors.shape[1], columns))
            total, left = getattr(self, name), (errors.bfloat16() if pairs else errors).t()
            for rows, owner in _strips(len(total), x.device):
                if owner == rank or not shared:
                    _add_product(total[rows], left[rows], narrow, pairs)

    def gather(self, exchange: Exchange) -> None:
        """Takes the rows of matrices that other ranks have added up."""
        if self.width is not None:
            return
        for matrix in (self.second, self.cross, self.residual):
            if matrix is None:
                continue
            triangular = matrix is self.second
            strips = _strips(len(matrix), matrix.device, triangular)
            parts = [matrix[rows, rows.start :] if triangular else matrix[rows] for rows, _ in strips]
            owners = [owner for _, owner in strips]
            turns = [(owner, [(p.shape, p.dtype)], [p]) for p, owner in zip(parts, owners, strict=True)]
            for part, (received,) in zip(parts, exchange.in_turn(turns), strict=True):
                if received is not None:
                    part.copy_(received)

    def add_means(
        self, x: Tensor, shift: Tensor | None = None, noise: Tensor | None = None, push: Tensor | None = None
    ) -> None:
        """Adds one batch to the sums over tokens only: of inputs, `shift` of drifts, noise and `push` of residuals."""
        self.tokens += len(x)
        self.first = add_up(self.first, total_of(x))
        self.shift = add_up(self.shift, shift)
        self.noise = add_up(self.noise, noise)
        self.push = add_up(self.push, push)

    def add_spread(self, x: Tensor, rows: int) -> None:
        """Adds one batch only to the spread between rows, which decides the shrinkage."""
        self.spread = self.spread or MomentSpread(x)
        self.spread.add(x, rows)

    def stats(self) -> LayerStats | None:
        """Returns the means, second moment and drift shrunk towards their diagonals; None if no token came.

        Second moments are None where another rank has them.
        """
        if not self.tokens:
            return None
        sums = {"mean": self.first, "mean_drift": self.shift, "noise": self.noise, "mean_residual": self.push}
        means: dict[str, Any] = {name: None if total is None else total / self.tokens for name, total in sums.items()}
        if self.second is None or self.spread is None:
            return LayerStats(self.tokens, **means)
        # M and the drift come from the same tokens, so that one λ fits both.
        strength = self.spread.shrinkage()
        if self.width is not None:
            return LayerStats(self.tokens, block_moments=shrink(self.second / self.tokens, strength), **means)
        unit = 1 if self.unit is None else self.unit
        second = self.second / (self.tokens / unit**2)
        for rows, _ in _strips(len(second), second.device, triangular=True):
            second[rows.stop :, rows] = second[rows, rows.stop :].t()
        second = shrink(second, strength)
        drift = None if self.cross is None else shrink(self.cross / (self.tokens / unit), strength)
        # Outputs and inputs are different channels, so that no entry is more certain than the others.
        residual = None if self.residual is None else self.residual * ((1 - strength) * unit / self.tokens)
        return LayerStats(self.tokens, second, drift, residual=residual, **means)


def total_of(x: Tensor | None) -> Tensor | None:
    """Returns the sum over tokens, in float32: of 100,000 it would stop growing in BF16, at 256 times a summand."""
    return None if x is None else x.sum(0, dtype=torch.float32)


def add_up(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Returns the sum, where None counts as zero."""
    if total is None or part is None:
        return part if total is None else total
    return total + part


def rows_of(x: Tensor) -> int:
    """Returns the calibration rows in a layer's input; 1 behind a router, which gathers tokens of all rows."""
    return len(x) if x.dim() == 3 else 1


def _strips(size: int, device: torch.device, triangular: bool = False) -> list[tuple[slice, int]]:
    """Returns strips of a matrix's rows, and the rank that adds up each of them where ranks share the matrix.

    One rank takes the same strips, because a product of other sizes may add up in another order.
    """
    width = max(-(-size // _STRIPS // 128) * 128, _LEAST_GPU) if device.type == "cuda" else _STRIP
    starts = range(0, size, width)
    owners = dealt([size - start if triangular else 1 for start in starts])
    return [(slice(start, min(start + width, size)), owner) for start, owner in zip(starts, owners, strict=True)]


def _add_product(total: Tensor, left: Tensor, right: Tensor, pairs: bool) -> None:
    if pairs:
        add_product(total, left, right)
    else:
        total += left @ right


def static_input_scale(amax: Tensor, activation: Format, dtype: torch.dtype, name: str | None = None) -> Tensor | None:
    """Returns the static scale of inputs whose largest magnitude is `amax`, both float32 scalars.

    None for formats that measure theirs.
    """
    if name and activation.is_static and bool(amax == 0):
        warn(
            f"{name}: its input was zero in all calibration data, so its static input scale is arbitrary; calibrate on "
            "data that reaches it, or keep it in 16 bit or in a format that measures each input, such as fp8_token"
        )
    if activation.global_scale:
        # Checkpoints hold the reciprocal: two divisions give the scale that a loader computes from it.
        return 1 / (1 / global_scale_of(amax, activation))
    if not activation.per_tensor:
        return None
    scale = scale_of(amax, activation.element.max)
    if dtype not in (torch.bfloat16, torch.float16):
        return scale
    info = torch.finfo(dtype)  # no scale may become 0: FP16 ends at 6e-8, which inputs of 3e-5 would need
    return scale.clamp(min=info.tiny * info.eps).to(dtype).float()


def round_activation(x: Tensor, activation: Format | None, input_scale: Tensor | None) -> Tensor:
    """Returns an input as the matmul sees it; None leaves it."""
    if activation is None:
        return x
    return rounded_input(x, activation, input_scale)
