"""What is known of a layer's inputs: the few sums over calibration tokens that every solver works from.

With x the input a layer really gets (earlier layers quantized, itself rounded where activations are quantized) and
r the input it had in the original model, over n tokens:

    second_moment = Σ x xᵀ / n          the curvature of the layer's output error
    drift         = Σ (r - x) xᵀ / n    how the input went wrong, as far as x can still tell

A rounded weight Q of an original W is judged by Σ ‖Q x - W r‖². Completing the square, that is a constant plus
the trace of (Q - W*) M (Q - W*)ᵀ, with M the second moment and the corrected weight W* = W (M + drift) M⁻¹. So the
whole past is in two matrices [in, in], and no token needs to be kept (Qronos and GPTAQ use the same correction).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class LayerStats:
    """Statistics of the input of one layer, or of all layers of a fusion group, which share their input.

    Attributes:
        second_moment: mean of x xᵀ, float32 or float64 `[in, in]`.
        tokens: how many tokens it was taken over; 0 for an expert that none reached.
        drift: mean of (r - x) xᵀ, of the shape of `second_moment`, or None where x is the original input.
    """

    second_moment: torch.Tensor
    tokens: int
    drift: torch.Tensor | None = None


class MomentSum:
    """Adds up second moments batch by batch. Products are taken in the dtype of the inputs, sums in `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.tokens = 0
        self.second: torch.Tensor | None = None
        self.cross: torch.Tensor | None = None

    def add(self, x: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Takes in one batch.

        Args:
            x: `[tokens, in]`, what the layer gets.
            reference: `[tokens, in]`, what it got in the original model; None if that is `x`.
        """
        if self.second is None:
            self.second = torch.zeros(x.shape[1], x.shape[1], dtype=self.dtype, device=x.device)
            self.cross = None if reference is None else torch.zeros_like(self.second)
        self.tokens += len(x)
        _add_symmetric(self.second, x.to(self.dtype) if self.dtype is torch.float64 else x)
        if reference is not None:
            assert self.cross is not None
            self.cross += (reference - x).t() @ x

    def stats(self) -> LayerStats:
        """The means."""
        assert self.second is not None
        drift = None if self.cross is None else self.cross / self.tokens
        return LayerStats(self.second / self.tokens, self.tokens, drift)


def _add_symmetric(total: torch.Tensor, x: torch.Tensor, width: int = 512) -> None:
    """`total += xᵀ x`, computing only the blocks on and above the diagonal where there are several."""
    columns = range(0, x.shape[1], width)
    for start in columns:
        strip = x[:, start : start + width].t() @ x[:, start:]
        total[start : start + width, start:] += strip
        if start + width < x.shape[1]:
            total[start + width :, start : start + width] += strip[:, width:].t()
