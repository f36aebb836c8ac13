"""`generate_rows` lets the model write its own calibration text: no data set, no network, its own distribution.

    position    0        1         2        …
    input      BOS       t1        t2
    logits     ↓         ↓         ↓
    drawn      t1        t2        t3                 t ~ softmax(logits), temperature 1

A language model is a distribution over texts, close to its training data, and drawing from it token by token needs no
data set. LLM-QAT (Liu et al., arXiv 2305.17888) trains on such text; "Self-calibration" (Williams et al.,
NAACL 2025, arXiv 2410.17170) calibrates quantizers and pruners with it and finds it on a par with real text. At
temperature 1 second moments over these rows estimate the expectation under the model itself; at lower temperatures
the text is more like the model's answers in use. A row may have an opening, from which the model goes on.

A row without a start token and an opening begins at a random token. After that token the most likely continuation is
taken for a few positions before drawing begins, LLM-QAT's remedy: one random token says little, and drawing directly
after it would begin in nonsense.

Special tokens are never drawn. One in the middle (an end of text, a chat turn) would start a new document, and a
model that ends early would fill the rest of the row with padding.

All rows grow together, one forward pass a position over the key-value cache, some at a time so that the cache stays
bounded: `ROWS_AT_ONCE`, and on a GPU as many as a part of its memory holds. Each row is drawn with its own stream of
uniform numbers, through the inverse of the cumulative distribution: asking for more rows does not change the first
ones, except that a model's matrix products round a little differently for a larger batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import option
from quant.calibration.evaluating import evaluating
from quant.calibration.session import Session, device_of
from quant.recipes.blocks import cache_argument, cache_of, position_argument

_ALONE = Session()
ROWS_AT_ONCE = 64
_MOST_AT_ONCE = 1024  # on a GPU, where the cache of these rows may take an eighth of the memory
_LIKELIEST = 4  # positions after a random first token; LLM-QAT takes 3 to 5
_DRAWN, _LIKELY = -1, -2  # in place of the ids of tokens that are still to be chosen


def _no_text(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot write its own calibration text; pass some with {option('calib')}"


def generate_rows(
    model: nn.Module, tokenizer: Any | None = None, *, samples: int, seqlen: int,
    openings: Sequence[Sequence[int]] = ((),), temperatures: Sequence[float] = (1.0,), session: Session = _ALONE,
) -> Tensor:  # fmt: skip
    """Returns the rows of tokens drawn from a causal language model, int64 `[samples, seqlen]` on the CPU.

    It is transformers', or maps ids `[rows, tokens]` to logits `[rows, tokens, vocabulary]`; one that returns no
    key-value cache is run on the whole prefix at every position. The tokenizer, or else the config, names the special
    tokens and the true size of the vocabulary.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{_no_text(model)}: it is an encoder with a decoder")
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < seqlen:
        raise ValueError(f"seqlen={seqlen}: {type(model).__name__} has {limit} positions; lower seqlen")
    start, allowed = first_token(model, tokenizer), _drawable(model, tokenizer)
    rows = torch.empty(samples, seqlen, dtype=torch.int64, device="cpu")
    with torch.inference_mode(), evaluating(model), _plain_attention(model):
        at_once = _rows_at_once(model, seqlen)
        for first in range(0, samples, at_once):
            part = rows[first : first + at_once]
            numbers = range(first, first + len(part))
            # A multiplicative hash: neighbouring seeds and rows get streams that do not overlap, whatever the other
            # rows are.
            seeds = ((session.seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03) % 2**63 for i in numbers)
            drawn = partial(torch.rand, seqlen, dtype=torch.float32, device="cpu")
            uniform = torch.stack([drawn(generator=torch.Generator().manual_seed(seed)) for seed in seeds])
            template = _template([openings[i % len(openings)] for i in numbers], start, seqlen)
            heat = torch.tensor(
                [temperatures[i % len(temperatures)] for i in numbers], dtype=torch.float32, device="cpu"
            )
            for position in _fill(model, part, uniform, template, heat, allowed):
                session.report("generate", first * seqlen + len(part) * (position + 1), samples * seqlen)
    return rows


def _rows_at_once(model: nn.Module, seqlen: int) -> int:
    """Returns how many rows are generated together: as many as the memory for their cache allows, if that is known."""
    config: Any = getattr(model, "config", None)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    device = device_of(model)
    if device.type != "cuda" or not isinstance(layers, int) or not isinstance(width, int):
        return ROWS_AT_ONCE
    # transformers raises an error for a field in which layers differ (Gemma 4).
    differing = getattr(config, "per_layer_attributes", None) or ()
    names = ("num_attention_heads", "num_key_value_heads")
    heads, shared = (None if name in differing else getattr(config, name, None) for name in names)
    if isinstance(heads, int) and isinstance(shared, int) and 0 < shared < heads:
        width = width * shared // heads
    row_bytes = 2 * layers * width * seqlen * next(model.parameters()).element_size()
    cache_bytes = torch.cuda.get_device_properties(device).total_memory // 8
    return min(max(cache_bytes // max(row_bytes, 1), ROWS_AT_ONCE), _MOST_AT_ONCE)


def _template(openings: Sequence[Sequence[int]], start: int | None, seqlen: int) -> Tensor:
    """Returns how each token is chosen, int64 `[rows, seqlen]`: an id is itself, `_LIKELY` argmax, `_DRAWN` a draw."""
    template = torch.full((len(openings), seqlen), _DRAWN, device="cpu")
    for row, opening in zip(template, openings, strict=True):
        if start is None and not len(opening):
            row[1 : 1 + _LIKELIEST] = _LIKELY
            continue
        ids = [*([] if start is None else [start]), *opening][:seqlen]
        row[: len(ids)] = torch.tensor(ids, device="cpu")
    return template


def _fill(
    model: nn.Module, rows: Tensor, uniform: Tensor, template: Tensor, temperatures: Tensor, allowed: Tensor
) -> Iterator[int]:
    """Writes `rows`, int64 `[rows, seqlen]`, position by position; yields every position as soon as it is written.

    Numbers in [0, 1) decide each drawn token, `[rows, seqlen]`; tokens that may be drawn are bool `[vocabulary]`.
    """
    first = _draw(torch.where(allowed, 0.0, -torch.inf).expand(len(rows), -1), uniform[:, 0]).cpu()
    rows[:, 0] = torch.where(template[:, 0] == _DRAWN, first, template[:, 0])
    yield 0
    cache: Any = None
    opening: Tensor | None = None
    divisor = temperatures[:, None].to(allowed.device)
    for position in range(1, rows.shape[1]):
        logits, cache = _step(model, rows[:, :position].to(allowed.device), cache)
        if cache is None:  # every step sees the whole prefix again, so the first position's logits can be compared
            at_start = logits[:, 0]
            opening = at_start if opening is None else opening
            # A tenth is far above the rounding that a batch's shape changes, and far below the effect of a next token.
            if float((opening - at_start).float().norm()) > 0.1 * float(opening.float().norm()):
                raise ValueError(f"{_no_text(model)}: what it says at a position depends on later tokens")
        last = logits[:, -1, : len(allowed)].float()
        if not bool(torch.isfinite(last).all()):
            raise ValueError(f"{type(model).__name__} gives NaN or infinite logits at position {position - 1}")
        last = last.masked_fill(~allowed[: last.shape[1]], -torch.inf)
        column = template[:, position]
        drawn = _draw(last / divisor, uniform[:, position]).cpu()
        if bool((column == _LIKELY).any()):
            drawn = torch.where(column == _LIKELY, last.argmax(dim=-1).cpu(), drawn)
        rows[:, position] = torch.where(column < 0, drawn, column)
        yield position


def _draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Returns one token a row: the first whose cumulative probability exceeds that row's uniform number in [0, 1).

    Logits are float32 `[rows, vocabulary]`, -inf where a token must not come.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding may carry u·total up to total itself, past the last token.
    target = torch.minimum(uniform[:, None].to(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _step(model: Any, prefix: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Returns the logits of the positions that are new, and the cache, None where the model keeps none."""
    if hasattr(model, "prepare_inputs_for_generation"):
        new = prefix if cache is None else prefix[:, -1:]
        positions = position_argument(model, new, prefix.shape[1] - new.shape[1])
        output = model(input_ids=new, use_cache=True, **positions, **cache_argument(model, cache))
    else:
        output = model(prefix)
    logits: Any = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != len(prefix):
        raise ValueError(f"{_no_text(model)}: it does not give logits [rows, tokens, vocabulary]")
    return logits, cache_of(output)


def first_token(model: nn.Module, tokenizer: Any | None) -> int | None:
    """Returns the start token (BOS) of a model's text; None where neither tokenizer nor configs name one."""
    for source in (tokenizer, getattr(model, "generation_config", None), getattr(model, "config", None)):
        token = getattr(source, "bos_token_id", None)
        if isinstance(token, int):
            return token
    return None


def _drawable(model: nn.Module, tokenizer: Any | None) -> Tensor:
    """Returns bool `[vocabulary]`, on the device of the embedding: tokens that may stand in the middle of a text."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise ValueError(f"{_no_text(model)}: it has no embedding of token ids")
    allowed = torch.ones(embedding.num_embeddings, dtype=torch.bool, device="cpu")
    if tokenizer is not None:
        allowed[len(tokenizer) :] = False  # rows that only pad the embedding to a round size
    special = set(getattr(tokenizer, "all_special_ids", ()))
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(source, key, None)
            special.update(ids if isinstance(ids, list) else [ids])
    allowed[[i for i in special if isinstance(i, int) and 0 <= i < len(allowed)]] = False
    if not bool(allowed.any()):
        raise ValueError(f"{_no_text(model)}: every token of its vocabulary is special")
    return allowed.to(embedding.weight.device)


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Eager attention while open, on a CPU: torch's fused kernel takes twice as long for one query a row."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    on_cpu = next(model.parameters()).device.type == "cpu"
    if before != "sdpa" or not on_cpu or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
