"""A `Fingerprint` recognises a model by its logits for fixed token ids.

`quantize` writes one into the report; `quant check` loads the checkpoint, runs the same ids and compares the logits.
"""

from dataclasses import dataclass

import torch
from torch import nn

from quant.base.json_files import JsonData
from quant.calibration.outputs.logits import run_probe

_PROMPT_TOKENS = 16
_KEPT_LOGITS = 8
# Logits agree if they differ by at most this share of their standard deviation.
_TOLERANCE = 0.25


@dataclass(frozen=True)
class Fingerprint(JsonData):
    """The largest logits of a model after fixed token ids."""

    columns: tuple[int, ...]
    logits: tuple[float, ...]
    deviation: float


def fingerprint(model: nn.Module) -> Fingerprint:
    """Returns the fingerprint of a model."""
    logits = _last_logits(model)
    values, columns = logits.topk(min(_KEPT_LOGITS, len(logits)))
    return Fingerprint(tuple(columns.tolist()), tuple(values.tolist()), float(logits.std(correction=0)))


def fingerprint_problem(model: nn.Module, expected: Fingerprint | None) -> str | None:
    """Returns why a model is not the one of `expected`, or that its logits hold NaN. None if neither.

    Machines sum in different orders, and rounding of inputs amplifies the differences. So logits count as the same
    within a quarter of their standard deviation. Without a fingerprint only NaN and infinity are looked for.
    """
    try:
        logits = _last_logits(model)
    except ValueError as error:
        return str(error)
    if expected is None:
        return None
    if max(expected.columns, default=0) >= len(logits):
        return f"the model has {len(logits):,} logits, and the fingerprint is of more"
    largest_difference = float(
        (logits[list(expected.columns)] - torch.tensor(expected.logits, dtype=torch.float32, device="cpu")).abs().max()
    )
    if largest_difference <= _TOLERANCE * expected.deviation:
        return None
    return (
        f"the logits of a forward pass are up to {largest_difference:.3g} away from those of the model that was "
        f"written, and their standard deviation is {expected.deviation:.3g}"
    )


def _last_logits(model: nn.Module) -> torch.Tensor:
    """Returns the logits at the last of the fixed token ids, float32 `[vocabulary]`."""
    try:
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # transformers' answer for a model that looks up no tokens
        embeddings = None
    vocabulary = getattr(embeddings, "num_embeddings", 0) or 16
    # Ids at even distances over the vocabulary, so that the prompt needs no tokenizer.
    ids = (torch.arange(_PROMPT_TOKENS, device="cpu") * vocabulary // _PROMPT_TOKENS)[None]
    try:
        logits = run_probe(model, ids)
    except ValueError as error:
        raise TypeError(str(error).removeprefix("it ")) from None
    # A classifier gives one row of logits for the whole prompt.
    last = logits[0, -1].float().cpu() if logits.dim() == 3 else logits.float().cpu().flatten()
    if not bool(last.isfinite().all()):
        raise ValueError("a forward pass gives NaN or infinity")
    return last
