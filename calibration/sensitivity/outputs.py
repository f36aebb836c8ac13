"""`compare` sums up how far the outputs of two models are apart for each row of a call, whatever they are outputs of.

    logits of next tokens   KL(base‖model) over the vocabulary where a token follows, and the likelihood of that token
    other logits            KL(base‖model) over the last dimension: of the class, or of each frame or position
    embeddings              1 − cosine similarity of what stands for a row, and the squared error of all of it

Places in a text that stand for an image or a sound follow nothing and are predicted by nobody; they are not counted.
Nor is padding, on either side, where an output has a position for each token of the mask: neither what it predicts nor
what is predicted of it. Sums are kept in float64, so that batches and ranks add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from quant.calibration.blocks import output_of
from quant.calibration.texts.prepare import DECODER
from quant.recipes.layers import output_head

_STAND_INS = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)$")
# Sums over predictions, and over embeddings.
NLL, BASE_NLL, KL, SAME, PREDICTIONS, TARGETS = range(6)
DISTANCE, ERROR, SQUARE = range(3)
_SLICE_ELEMENTS = 1 << 23  # of logits that are widened at once

Sums = dict[str, torch.Tensor]
"""Float64 sums of each row by output: `[rows, 6]` of `logits`, as `NLL` … name them, `[rows, 3]` of embeddings."""


def compare(model: nn.Module, call: Mapping[str, Any], result: Any, base: Any | None, place: str) -> Sums:
    """The sums of the rows of one call.

    Args:
        model: that gave `result`.
        call: the named arguments of the call.
        result: what the model gave.
        base: what the original gave; None counts the likelihood of texts alone.
        place: of the call, for errors.

    Raises:
        ValueError: NaN or infinity in an output; there is nothing to compare.
    """
    with torch.no_grad():
        logits = _logits(result)
        if logits is not None:
            return {"logits": _predictions(model, call, logits, None if base is None else _logits(base), place)}
        if base is None:
            raise ValueError(
                f"{type(model).__name__} gives no logits: its outputs can only be compared; name a --baseline"
            )
        others = _embeddings(base)
        return {
            name: _finite(
                embedded(
                    found.double().cpu(),
                    others[name].double().cpu(),
                    f"{place}, {name}",
                    _shown(call, found.shape[:-1]),
                ),
                f"{place}: NaN or infinity in {name}",
            )
            for name, found in _embeddings(result).items()
        }


def _logits(result: Any) -> torch.Tensor | None:
    """Logits `[rows, classes]` or `[rows, positions, classes]`; None for a model that gives something else."""
    logits = getattr(result, "logits", None)
    if logits is None and isinstance(result, torch.Tensor) and result.dim() == 2:
        logits = result  # of a classifier that is no model of transformers
    return logits if isinstance(logits, torch.Tensor) and logits.dim() in (2, 3) else None


def _embeddings(result: Any) -> dict[str, torch.Tensor]:
    """The embeddings of a model, `[rows, …]`: those that it calls so, or else its last hidden state."""
    if isinstance(result, Mapping):
        named = {k: v for k, v in result.items() if k.endswith("_embeds") and isinstance(v, torch.Tensor)}
        if named:
            return named
        if isinstance(result.get("last_hidden_state"), torch.Tensor):
            return {"last_hidden_state": result["last_hidden_state"]}
    return {"output": output_of(result)}


def _predictions(
    model: nn.Module, call: Mapping[str, Any], logits: torch.Tensor, base: torch.Tensor | None, place: str
) -> torch.Tensor:
    targets, counted = _targets(model, call, logits)
    if targets is not None:
        logits, base = logits[:, :-1], None if base is None else base[:, :-1]
    flat = logits[counted] if counted is not None else logits.flatten(0, -2)
    numbers = torch.arange(len(logits)).view(-1, *[1] * (logits.dim() - 2)).expand(logits.shape[:-1])
    of_row = numbers[counted.cpu()] if counted is not None else numbers.flatten()
    other = None
    if base is not None:
        other = base[counted.to(base.device)] if counted is not None else base.flatten(0, -2)
        if other.shape != flat.shape:
            raise ValueError(f"{place}: the models give logits {list(flat.shape)} and {list(other.shape)}")
    wanted = None if targets is None or counted is None else targets[counted].cpu()[:, None]
    step = max(_SLICE_ELEMENTS // flat.shape[-1], 1)
    found = torch.zeros(len(logits), 6, dtype=torch.float64)
    for part in (slice(start, start + step) for start in range(0, len(flat), step)):
        logp = flat[part].double().cpu().log_softmax(dim=-1)
        sums = torch.zeros(len(logp), 6, dtype=torch.float64)
        sums[:, PREDICTIONS] = 1
        if wanted is not None:
            sums[:, TARGETS] = 1
            sums[:, NLL] = -logp.gather(1, wanted[part])[:, 0]
        if other is not None:
            base_logp = other[part].double().cpu().log_softmax(dim=-1)
            p = base_logp.exp()
            sums[:, KL] = (p * (base_logp - logp)).masked_fill(p == 0, 0).sum(dim=-1)
            sums[:, SAME] = (base_logp.argmax(dim=-1) == logp.argmax(dim=-1)).double()
            if wanted is not None:
                sums[:, BASE_NLL] = -base_logp.gather(1, wanted[part])[:, 0]
        found.index_add_(0, of_row[part], sums)
    return _finite(found, f"{place}: NaN or infinity in the logits")


def _targets(
    model: nn.Module, call: Mapping[str, Any], logits: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tokens that follow each position `[rows, positions - 1]`, None for other logits; and which positions count.

    Where all do, that is None for other logits.
    """
    ids = call.get(DECODER if DECODER in call else "input_ids")
    shown = _shown(call, logits.shape[:-1])
    shown = None if shown is None else shown.to(logits.device)
    # A head over the vocabulary: those of classifiers and of start and end positions are not the output embeddings.
    if ids is None or logits.dim() != 3 or logits.shape[1] != ids.shape[1] or output_head(model) is None:
        return None, shown
    targets = ids[:, 1:].to(logits.device)
    # Padding on the left predicts the first token, which is nothing that the model was asked.
    counted = torch.ones_like(targets, dtype=torch.bool) if shown is None else shown[:, 1:] & shown[:, :-1]
    for token in _stand_ins(getattr(model, "config", None)):
        counted &= targets != token
    return targets, counted


def _shown(call: Mapping[str, Any], positions: tuple[int, ...]) -> torch.Tensor | None:
    """Which `positions`, `[rows, tokens]`, of an output are no padding, bool; None where no mask has this shape."""
    mask = call.get("decoder_attention_mask" if DECODER in call else "attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.shape == positions else None


def _stand_ins(config: Any) -> Iterable[int]:
    """Tokens that stand for pieces of images and sounds."""
    for name in dir(config) if config is not None else ():
        if _STAND_INS.match(name) and isinstance(value := getattr(config, name, None), int):
            yield value


def embedded(found: torch.Tensor, base: torch.Tensor, place: str, shown: torch.Tensor | None = None) -> torch.Tensor:
    """The sums `[rows, 3]` of embeddings `[rows, …]` of two models, float64.

    Of embeddings `[rows, tokens, hidden]` those tokens count that are in `shown`, bool `[rows, tokens]`; None is all.
    """
    if found.shape != base.shape:
        raise ValueError(f"{place}: the models give {list(found.shape)} and {list(base.shape)}")
    if shown is not None:
        # A mean over zeros too is shorter, which its cosine does not see.
        found, base = (x.masked_fill(~shown.cpu()[..., None], 0) for x in (found, base))
    # The tokens of a row stand for it together; an image's features [rows, channels, height, width] are one vector.
    first, second = (x.mean(dim=1) if x.dim() == 3 else x.flatten(1) for x in (found, base))
    distance = 1 - cosine_similarity(first, second, dim=-1)
    error, square = (x.square().flatten(1).sum(dim=1) for x in (found - base, base))
    return torch.stack([distance, error, square], dim=1)


def _finite(sums: torch.Tensor, what: str) -> torch.Tensor:
    if not bool(sums.isfinite().all()):
        raise ValueError(f"{what}; find the layer that makes it, or keep it in 16 bit")
    return sums
