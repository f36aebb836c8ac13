"""`MomentSpread` measures how far a second moment can be trusted, and `shrink` removes the part that cannot.

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

from __future__ import annotations

import torch

# Channels whose pairs are watched.
CHANNELS = 128
# λ = STRENGTH · λ*. A solver that inverts M loses more by its chance entries than the squared error of M says, and the
# texts that a model will meet differ more than calibration rows do. The held-out loss is flat around this value.
STRENGTH = 2.0


class MomentSpread:
    """Running sums over pieces of text for pairs of a sample of channels of inputs `[..., in]`."""

    def __init__(self, like: torch.Tensor) -> None:
        self.columns, device = like.shape[-1], like.device
        self.channels = (
            torch.linspace(0, self.columns - 1, min(CHANNELS, self.columns), device=device, dtype=torch.float32)
            .round()
            .long()
        )
        self.tokens = self.squared_tokens = 0
        # Σ P_r, Σ n_r P_r and Σ P_r².
        self.sums = torch.zeros(3, len(self.channels), len(self.channels), device=device, dtype=torch.float32)

    def add(self, x: torch.Tensor, rows: int) -> None:
        """Adds a batch of inputs, `[tokens, in]`, of which each of `rows` equal parts is a piece of text."""
        pieces = x[:, self.channels].float().unflatten(0, (rows, len(x) // rows))
        length = pieces.shape[1]
        products = pieces.mT @ pieces
        total = products.sum(0)
        self.sums += torch.stack([total, length * total, products.square().sum(0)])
        self.tokens += len(x)
        self.squared_tokens += rows * length**2

    def shrinkage(self) -> torch.Tensor:
        """Returns λ in 0..1, float32 scalar.

        One piece has no spread. Then λ is the value for independent tokens with independent channels, columns /
        (columns + tokens).
        """
        products, weighted, squares = self.sums
        evenness = self.squared_tokens / self.tokens**2
        # All tokens in one piece: Σ n_r² = (Σ n_r)².
        if evenness == 1:
            rate: torch.Tensor = products.new_full((), self.columns / (self.columns + self.tokens))
            return rate
        mean = products / self.tokens
        # Σ n_r² (P_r / n_r - mean)², written out.
        spread = squares - 2 * mean * weighted + self.squared_tokens * mean.square()
        variance = spread / self.tokens**2 / (1 - evenness)
        power = mean.diagonal()
        scale = 1 / (power * power[:, None]).clamp(min=torch.finfo(torch.float32).tiny)
        scale.fill_diagonal_(0)
        noise_share = torch.sum(variance * scale) / torch.sum(mean.square() * scale)
        return (STRENGTH * noise_share).nan_to_num(1.0).clamp(0, 1)


def shrink(moment: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Returns (1 - λ) M + λ diag(M), in place; M `[in, in]`, or blocks of one, `[blocks, k, k]`."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    original = diagonal.clone()
    moment *= 1 - strength
    diagonal.copy_(original)
    return moment
