"""`Logits` computes the logits of a model for slices of positions, since the logits of whole rows do not fit in memory.

The logits of 512 positions of a vocabulary of 150k take 300 MB in FP32, and several such tensors are needed. So the
model runs on whole rows without its output head, and the head is applied to a slice of positions at a time. Some models
do more between the hidden states and the logits than apply a head and a soft cap. So the shortcut is compared with the
model's own forward on a few tokens, and if the two differ, the whole model computes the logits.
"""

from __future__ import annotations

import torch
from torch import nn

from quant.calibration.attention_names import text_config
from quant.calibration.texts.rows import trial_rows
from quant.recipes.blocks import output_of
from quant.recipes.module_replacement import forwarding

# 32 MB of FP32 logits on a CPU; more on a GPU, so that fewer kernels are launched. Some six such tensors exist at once
# where a loss has a gradient.
_SLICE_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 25}
# Each slice reads the whole head, so that larger ones save time. Without a gradient fewer such tensors exist at once,
# and twice as large ones take no more memory.
_SLICE_WITHOUT_GRADIENT = {"cuda": 1 << 26}


class Logits:
    """Logits of next tokens: of every position of a row but the last.

    Args:
        head: the model's last linear layer, whose outputs are logits; None runs the whole model for them.
    """

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        self.model, self.head = model, head
        self.split = None if head is not None else False
        self.vocabulary: int | None = None
        self.cap: float | None = getattr(text_config(getattr(model, "config", None)), "final_logit_softcapping", None)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the head `[positions, hidden]`, or logits `[positions, vocabulary]` otherwise."""
        self.decide(rows)
        return (self._before_head(rows) if self.split else logits_of(self.model, rows))[:, :-1].flatten(0, 1)

    def decide(self, rows: torch.Tensor) -> None:
        """Tests on a few tokens of `rows`, unless a test was made before, whether the head can be split off."""
        if self.split is None:
            self.split = self._can_split(trial_rows(rows))

    def parts(self, hidden: torch.Tensor, *, with_gradient: bool = True) -> list[slice]:
        """Returns the slices of positions, each with about as many logits as suit the device."""
        if self.vocabulary is None:
            with torch.no_grad():
                self.vocabulary = self.logits(hidden[:1]).shape[-1]
        device = hidden.device.type
        elements = _SLICE_ELEMENTS.get(device, _SLICE_ELEMENTS["cpu"])
        if not with_gradient:
            elements = _SLICE_WITHOUT_GRADIENT.get(device, elements)
        step = max(elements // self.vocabulary, 1)
        return [slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits `[positions, vocabulary]` from the result of `hidden`."""
        return self._head(hidden) if self.split else hidden

    def logp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities, float32."""
        return self.logits(hidden).float().log_softmax(dim=-1)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return self.capped(self.head(hidden))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the head's output after the model's soft cap, if it has one."""
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def _before_head(self, rows: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def stand_in(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            # One column: the model may still slice or scale its "logits" by position.
            return hidden[..., :1].detach()

        assert self.head is not None
        with forwarding(self.head, stand_in):
            self.model(rows)
        return seen[-1]

    def _can_split(self, rows: torch.Tensor) -> bool:
        with torch.no_grad():
            expected = logits_of(self.model, rows).float()
            split = self._head(self._before_head(rows)).float()
        # Rounding differs by far less than this even in BF16, a forgotten factor by more.
        same_shape = expected.shape == split.shape
        return same_shape and bool((expected - split).abs().max() <= 0.01 * expected.abs().max())


def logits_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a model for token ids, or the first of its outputs if it has no logits."""
    result = model(rows)
    return result.logits if hasattr(result, "logits") else output_of(result)
