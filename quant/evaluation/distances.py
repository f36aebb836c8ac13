"""Distances of a model from its baseline on one batch of token rows, summed over each row in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from quant.calibration.outputs.logits import Logits
from quant.calibration.placement import device_of
from quant.calibration.sensitivity.divergence import finite_sum, last_hidden
from quant.evaluation.examples import WorstPredictions
from quant.evaluation.outputs import DISTANCE, KL, SAME, embedded

_SOURCES = ("the model's logits", "the baseline's logits", "KL")
"""The tensor that a NaN in one of the first three sums comes from."""


def prediction_sums(
    logits: Sequence[Logits], batch: torch.Tensor, first_row: int, worst: WorstPredictions | None = None
) -> torch.Tensor:
    """Returns the sums of each row over its next-token predictions.

    Args:
        logits: the logits of the model, and of the baseline if there is one.
        batch: token ids, int64 `[rows, seqlen]`.
        first_row: number of its first row, for errors.
        worst: keeps the predictions with the largest KL.

    Returns:
        float64 `[rows, 4]`, with the columns of `quant.evaluation.outputs`: `NLL` and `BASE_NLL` (negative
        log-likelihood in nats), `KL` (nats) and `SAME` (positions at which both models' likeliest token is the same).
        Without a baseline all but the first are zero.

    Raises:
        ValueError: NaN or infinity, with the row and position named; models of different vocabularies.
    """
    # Position i predicts token i + 1, so the last position has no target.
    targets = batch[:, 1:].flatten()
    positions_per_row = batch.shape[1] - 1
    by_position = torch.zeros(4, len(targets), dtype=torch.float64, device="cpu")
    hidden = [each.hidden(batch.to(device_of(each.model))) for each in logits]
    # Slices of positions: the logits of 512 positions take 300 MB in FP32 at a vocabulary of 150k, for each model.
    for part in logits[0].parts(hidden[0]):
        logp = [each.logp(h[part]) for each, h in zip(logits, hidden, strict=True)]
        if len({x.shape[-1] for x in logp}) > 1:
            raise ValueError(f"model and baseline have different vocabularies: {[x.shape[-1] for x in logp]} tokens")
        # The two models may be on different devices: sums are taken on the model's.
        target = targets[part, None].to(logp[0].device)
        values = torch.zeros(4, len(target), dtype=torch.float64, device=target.device)
        for i, of_model in enumerate(logp):
            values[i] = -of_model.gather(1, target.to(of_model.device))[:, 0]
        if len(logp) == 2:
            # `_kl_` destroys the baseline's log-probabilities, so it comes last.
            values[SAME] = logp[0].argmax(dim=-1) == logp[1].argmax(dim=-1).to(target.device)
            values[KL] = _kl_(logp[1].to(target.device), logp[0])
        _check_finite(values, first_row * positions_per_row + part.start, positions_per_row)
        by_position[:, part] = values.cpu()
    if worst is not None and len(logits) == 2:
        worst.look(logits, hidden, batch, by_position[KL])
    return by_position.view(4, len(batch), positions_per_row).sum(dim=2).T


def _check_finite(values: torch.Tensor, first_position: int, positions_per_row: int) -> None:
    if bool(values.isfinite().all()):
        return
    bad = ~values.isfinite()
    row, position = divmod(first_position + int(bad.any(dim=0).nonzero()[0]), positions_per_row)
    source = _SOURCES[int(bad.any(dim=1).nonzero()[0])]
    raise ValueError(
        f"row {row}, position {position}: NaN or infinity in {source}; "
        "find the layer that makes it, or keep it in 16 bit"
    )


def _kl_(logp_base: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """Returns KL(base‖model) at each position, float32 `[positions]`, from log-probabilities `[positions, vocabulary]`.

    Overwrites `logp_base`: at this size, memory that the system must first hand out costs more than the arithmetic.
    """
    p = logp_base.exp()
    # A token that the baseline rules out (p = 0) adds zero, though its logarithms may differ by infinity.
    return logp_base.sub_(logp).masked_fill_(p == 0, 0).mul_(p).sum(dim=-1)


def embedding_sums(models: Sequence[nn.Module], batch: torch.Tensor, first_row: int) -> torch.Tensor:
    """Returns the sums of each row `[rows, 3]` over the last hidden states of a model and its baseline.

    Raises:
        NotFinite: NaN or infinity in an embedding, with the row named.
    """
    model_hidden, base_hidden = (last_hidden(each(batch.to(device_of(each)))).double().cpu() for each in models)
    sums = embedded(model_hidden, base_hidden, _row_name(first_row, 0))
    finite_sum(sums[:, DISTANCE], partial(_row_name, first_row), "an embedding")
    return sums


def _row_name(first_row: int, index: int) -> str:
    return f"row {first_row + index}"
