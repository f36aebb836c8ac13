"""`compare` sums up, for each row of a call, how far the outputs of two models are apart, for models of any kind.

    logits of next tokens   KL(base‖model) over the vocabulary where a token follows, and the likelihood of that token
    other logits            KL(base‖model) over the last dimension: of the class, or of each frame or position; where
                            rows have labels, whether the likeliest class is right
    embeddings              1 − cosine similarity of a row's mean embedding, and the squared error of all its values

Tokens that stand for pieces of an image or a sound are not predicted, so they are not counted. If an output has a
position for each token of the mask, padding on either side is not counted, neither as a prediction nor as a target.
Sums are kept in float64, so that batches and ranks add up.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from quant.base.errors import option
from quant.calibration.texts.media_inputs import DECODER
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.recipes.blocks import output_of, removing
from quant.recipes.layers import output_head


@contextmanager
def inputs_moved(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Moves the inputs of linear layers by at most one rounding of the dtype, at random, while the block runs.

    The sums of other kernels end in such differences: each result is as right as the other. Where inputs are rounded to
    few bits, the last bit of a sum can turn one code into another.
    """
    epsilon, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)

    def move(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *further = args
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
        return ((x * (1 + epsilon * (2 * uniform - 1))).to(x.dtype), *further)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | QuantizedModule)]
    with removing([layer.register_forward_pre_hook(move) for layer in layers]):
        yield


# Names in a config of the ids of tokens that stand for pieces of images and sounds.
_MEDIA_TOKENS = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)$")
# Columns of the sums over predictions, and of those over embeddings.
NLL, BASE_NLL, KL, SAME, PREDICTIONS, TARGETS, LABELLED, RIGHT, BASE_RIGHT = range(9)
DISTANCE, ERROR, SQUARE = range(3)
_SLICE_ELEMENTS = 1 << 23  # of logits that are widened at once

Sums = dict[str, torch.Tensor]
"""Float64 sums of each row by output: `[rows, 9]` of `logits`, as `NLL` … name them, `[rows, 3]` of embeddings."""


def compare(model: nn.Module, call: Mapping[str, Any], result: Any, base: Any | None, call_name: str) -> Sums:
    """Returns the sums of the rows of one call; without the original model's output, only the likelihood of texts."""
    with torch.no_grad():
        logits = _logits(result)
        if logits is not None:
            return {"logits": _predictions(model, call, logits, None if base is None else _logits(base), call_name)}
        if base is None:
            raise ValueError(
                f"{type(model).__name__} gives no logits: its outputs can only be compared; name a {option('baseline')}"
            )
        base_embeddings = _embeddings(base)
        return {
            name: _finite(
                embedded(
                    embeddings.double().cpu(),
                    base_embeddings[name].double().cpu(),
                    f"{call_name}, {name}",
                    _unpadded(call, embeddings.shape[:-1]),
                ),
                f"{call_name}: NaN or infinity in {name}",
            )
            for name, embeddings in _embeddings(result).items()
        }


def _logits(result: Any) -> torch.Tensor | None:
    """Returns logits `[rows, classes]` or `[rows, positions, classes]`; None for a model without logits."""
    logits = getattr(result, "logits", None)
    if logits is None and isinstance(result, torch.Tensor) and result.dim() == 2:
        logits = result  # of a classifier outside transformers
    return logits if isinstance(logits, torch.Tensor) and logits.dim() in (2, 3) else None


def _embeddings(result: Any) -> dict[str, torch.Tensor]:
    """Returns the embeddings of a model, `[rows, …]`: outputs named `…_embeds`, or its last hidden state."""
    if isinstance(result, Mapping):
        named = {k: v for k, v in result.items() if k.endswith("_embeds") and isinstance(v, torch.Tensor)}
        if named:
            return named
        if isinstance(result.get("last_hidden_state"), torch.Tensor):
            return {"last_hidden_state": result["last_hidden_state"]}
    return {"output": output_of(result)}


def _predictions(
    model: nn.Module, call: Mapping[str, Any], logits: torch.Tensor, base: torch.Tensor | None, call_name: str
) -> torch.Tensor:
    targets, counted = _targets(model, call, logits)
    if targets is not None:
        logits, base = logits[:, :-1], None if base is None else base[:, :-1]
    flat = logits[counted] if counted is not None else logits.flatten(0, -2)
    # The row of each position, in the shape of the positions.
    numbers = torch.arange(len(logits), device="cpu").view(-1, *[1] * (logits.dim() - 2)).expand(logits.shape[:-1])
    row_of = numbers[counted.cpu()] if counted is not None else numbers.flatten()
    flat_base = None
    if base is not None:
        flat_base = base[counted.to(base.device)] if counted is not None else base.flatten(0, -2)
        if flat_base.shape != flat.shape:
            raise ValueError(f"{call_name}: the models give logits {list(flat.shape)} and {list(flat_base.shape)}")
    # One label for each row of logits over classes; labels of texts are tokens, which `targets` has.
    labels = call.get("labels")
    is_class = isinstance(labels, torch.Tensor) and logits.dim() == 2 and labels.shape == logits.shape[:1]
    classes = labels.cpu() if isinstance(labels, torch.Tensor) and is_class and not labels.is_floating_point() else None
    target_ids = None if targets is None or counted is None else targets[counted].cpu()[:, None]
    step = max(_SLICE_ELEMENTS // flat.shape[-1], 1)
    row_sums = torch.zeros(len(logits), 9, dtype=torch.float64, device="cpu")
    for part in (slice(start, start + step) for start in range(0, len(flat), step)):
        logp = flat[part].double().cpu().log_softmax(dim=-1)
        sums = torch.zeros(len(logp), 9, dtype=torch.float64, device="cpu")
        sums[:, PREDICTIONS] = 1
        if target_ids is not None:
            sums[:, TARGETS] = 1
            sums[:, NLL] = -logp.gather(1, target_ids[part])[:, 0]
        if flat_base is not None:
            base_logp = flat_base[part].double().cpu().log_softmax(dim=-1)
            p = base_logp.exp()
            sums[:, KL] = (p * (base_logp - logp)).masked_fill(p == 0, 0).sum(dim=-1)
            sums[:, SAME] = (base_logp.argmax(dim=-1) == logp.argmax(dim=-1)).double()
            if target_ids is not None:
                sums[:, BASE_NLL] = -base_logp.gather(1, target_ids[part])[:, 0]
        if classes is not None:
            sums[:, LABELLED] = 1
            sums[:, RIGHT] = (logp.argmax(dim=-1) == classes[part]).double()
            if flat_base is not None:
                sums[:, BASE_RIGHT] = (base_logp.argmax(dim=-1) == classes[part]).double()
        # Positions of one slice may belong to several rows.
        row_sums.index_add_(0, row_of[part], sums)
    return _finite(row_sums, f"{call_name}: NaN or infinity in the logits")


def _targets(
    model: nn.Module, call: Mapping[str, Any], logits: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the next token of each position, and the positions that count, bool: both `[rows, positions - 1]`.

    For logits that are not over next tokens, the first is None, and the second is of all positions, or None if all
    of them count.
    """
    ids = call.get(DECODER if DECODER in call else "input_ids")
    unpadded = _unpadded(call, logits.shape[:-1])
    unpadded = None if unpadded is None else unpadded.to(logits.device)
    # Only a head over the vocabulary is the model's output embeddings; heads of classifiers and of spans are not.
    if ids is None or logits.dim() != 3 or logits.shape[1] != ids.shape[1] or output_head(model) is None:
        return None, unpadded
    targets = ids[:, 1:].to(logits.device)
    # Padding on the left is not context, so its prediction of the first token measures nothing about the model.
    counted = torch.ones_like(targets, dtype=torch.bool) if unpadded is None else unpadded[:, 1:] & unpadded[:, :-1]
    config = getattr(model, "config", None)
    for name in filter(_MEDIA_TOKENS.match, () if config is None else dir(config)):
        if isinstance(token := getattr(config, name, None), int):
            counted &= targets != token
    return targets, counted


def _unpadded(call: Mapping[str, Any], positions: tuple[int, ...]) -> torch.Tensor | None:
    """Returns the positions `[rows, tokens]` of an output that are not padding, bool; None without such a mask."""
    mask = call.get("decoder_attention_mask" if DECODER in call else "attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.shape == positions else None


def embedded(values: torch.Tensor, base: torch.Tensor, name: str, unpadded: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the sums `[rows, 3]` of embeddings of two models, float64: columns `DISTANCE`, `ERROR` and `SQUARE`.

    Embeddings are float64 `[rows, …]`; of `[rows, tokens, hidden]` only `unpadded` tokens count, bool `[rows, tokens]`.
    """
    if values.shape != base.shape:
        raise ValueError(f"{name}: the models give {list(values.shape)} and {list(base.shape)}")
    if unpadded is not None:
        # Zeros shorten the mean over all tokens but do not turn it, and the cosine is blind to length.
        values, base = (x.masked_fill(~unpadded.cpu()[..., None], 0) for x in (values, base))
    # The mean over tokens stands for a row; an image's features [rows, channels, height, width] are one vector.
    first, second = (x.mean(dim=1) if x.dim() == 3 else x.flatten(1) for x in (values, base))
    distance = 1 - cosine_similarity(first, second, dim=-1)
    error, square = (x.square().flatten(1).sum(dim=1) for x in (values - base, base))
    return torch.stack([distance, error, square], dim=1)


def _finite(sums: torch.Tensor, problem: str) -> torch.Tensor:
    if not bool(sums.isfinite().all()):
        raise ValueError(f"{problem}; find the layer that makes it, or keep it in 16 bit")
    return sums
