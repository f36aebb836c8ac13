"""Examples of a loss: the predictions that moved most, a text before and after, and the error of each layer's output.

A mean over thousands of tokens says how much was lost, and not where. While `evaluate` compares two models,
`WorstPredictions` keeps the positions with the largest KL(base‖model); `continuations` has both models continue a
prompt by their likeliest tokens, and `output_errors` compares the outputs of their layers on one row,

    error of a layer = ‖y_q − y‖ / ‖y‖

where y_q is the layer's output in the quantized model, whose inputs differ already by the layers before it. A solver
such as gptq moves weights away from their originals to bring these outputs closer, so the error of the weights alone
would call it worse than rounding to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.base.json_files import JsonData
from quant.calibration.outputs.logits import Logits, logits_of
from quant.calibration.placement import device_of
from quant.calibration.ranks import gathered
from quant.recipes.blocks import output_of

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to text."""
_CONTEXT = 24  # tokens that are shown before a prediction
_POSITIONS = 64  # of a row, whose layer outputs are compared


@dataclass(frozen=True)
class Prediction(JsonData):
    """One prediction of the next token, by the original model and by the quantized one."""

    text: str | None
    context: str
    token: str
    kl: float  # KL(base‖model) in nats
    before: float
    after: float
    likeliest_before: str
    likeliest_after: str


@dataclass(frozen=True)
class Continuation(JsonData):
    """A prompt and the likeliest tokens that the original and the quantized model continue it with."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Examples(JsonData):
    """Examples of a loss, for readers."""

    predictions: tuple[Prediction, ...] = ()
    # one text before and after; None for a model that is too large to write one in seconds
    continuation: Continuation | None = None


class WorstPredictions:
    """Keeps the predictions with the largest KL while `evaluate` runs."""

    def __init__(self, count: int, decode: Decode) -> None:
        self.count, self.decode = count, decode
        self.text: str | None = None  # name of the text that is evaluated now
        self._kept: list[Prediction] = []

    def look(
        self, logits: Sequence[Logits], hidden: Sequence[torch.Tensor], batch: torch.Tensor, kl: torch.Tensor
    ) -> None:
        """Adds the worst predictions of a batch.

        Args:
            batch: token ids `[rows, seqlen]`.
            kl: the divergence of each prediction, `[rows · (seqlen − 1)]`, row after row.
        """
        per_row = batch.shape[1] - 1
        values, positions = kl.topk(min(self.count, len(kl)))
        # Probabilities of these few positions, from hidden states that are at hand: no model runs again.
        after, before = (
            each.logp(states[positions.to(states.device)]).exp().cpu()
            for each, states in zip(logits, hidden, strict=True)
        )
        for index, position in enumerate(positions.tolist()):
            row, column = divmod(position, per_row)
            ids, target = batch[row].tolist(), int(batch[row, column + 1])
            self._kept.append(
                Prediction(
                    self.text,
                    self.decode(ids[max(0, column + 1 - _CONTEXT) : column + 1]),
                    self.decode([target]),
                    float(values[index]),
                    float(before[index, target]),
                    float(after[index, target]),
                    self.decode([int(before[index].argmax())]),
                    self.decode([int(after[index].argmax())]),
                )
            )
        self._kept = self._largest(self._kept)

    def of_all_ranks(self) -> tuple[Prediction, ...]:
        """Returns the worst predictions of all ranks, which have to call this together; the largest KL first."""
        return tuple(self._largest(each for part in gathered(self._kept) for each in part))

    def _largest(self, predictions: Iterable[Prediction]) -> list[Prediction]:
        return sorted(predictions, key=lambda each: -each.kl)[: self.count]


def continuations(
    model: nn.Module, baseline: nn.Module, prompt: Sequence[int], decode: Decode, *, tokens: int
) -> Continuation:
    """Returns `prompt` and its continuations by both models with their likeliest tokens."""
    before, after = (_continued(each, prompt, tokens) for each in (baseline, model))
    return Continuation(decode(prompt), decode(before), decode(after))


def _continued(model: nn.Module, prompt: Sequence[int], tokens: int) -> list[int]:
    # Without a KV cache, which models that are prepared for measuring do not have: texts are short.
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(logits_of(model, torch.tensor([ids], device=device_of(model)))[0, -1].argmax()))
    return ids[len(prompt) :]


def output_errors(model: nn.Module, baseline: nn.Module, row: torch.Tensor, names: Iterable[str]) -> dict[str, float]:
    """Returns the relative error of the outputs of layers on one row, by name.

    Layers that are no module of both models, such as experts that are fused in one of them, and outputs of zeros have
    no entry. Of each output 64 positions are compared, so that outputs of a large model fit into memory.

    Args:
        row: the token ids `[seqlen]` of the row.
    """
    modules = [dict(each.named_modules()) for each in (model, baseline)]
    names = [name for name in names if all(name in each for each in modules)]
    after, before = (_outputs(each, row, names) for each in (model, baseline))
    errors = {}
    for name in names:
        if name in after and name in before and after[name].shape == before[name].shape:
            norm = float(before[name].double().norm())
            if norm:
                errors[name] = float((after[name].double() - before[name].double()).norm()) / norm
    return errors


def _outputs(model: nn.Module, row: torch.Tensor, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Returns samples of the outputs of modules, at the same positions in every model."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = output_of(output)
            flat = values.reshape(-1, values.shape[-1])
            outputs[name] = flat[:: max(len(flat) // _POSITIONS, 1)].float().cpu()

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        model(row[None].to(device_of(model)))
    return outputs
