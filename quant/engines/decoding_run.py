"""Runs of one set of prompts and tokens, by the model in PyTorch and by an exported decoder; both keep all logits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quant.recipes.blocks import cache_argument, cache_of
from quant.export.engines.decode_loop import read, step
from quant.export.engines.engine_session import EngineSession


@dataclass(frozen=True)
class DecodingRun:
    """The tokens that a model wrote, or was fed, after some prompts.

    Attributes:
        logits: `[rows, steps, vocabulary]`, float32; step 0 follows the prompt.
        prefill_seconds: the time that reading the prompts took.
        step_seconds: the median time of a decoding step of all rows; of the reference, of one row.
    """

    logits: np.ndarray
    prefill_seconds: float
    step_seconds: float

    @property
    def tokens(self) -> np.ndarray:
        """The likeliest token of each step, `[rows, steps]`."""
        likeliest: np.ndarray = self.logits.argmax(-1)
        return likeliest


def reference_run(
    model: Any, prompts: Sequence[Sequence[int]], new: int, tokens: np.ndarray | None = None
) -> DecodingRun:
    """Runs the model itself, one row after the other, with transformers' cache.

    Args:
        model: a decoder of transformers.
        prompts: token ids of each row.
        new: steps after each prompt.
        tokens: the tokens that it is fed, `[rows, steps]`; by default its own likeliest ones.
    """
    device = next(model.parameters()).device
    rows, prefill, steps = [], 0.0, []
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            ids, cache, logits = torch.tensor([list(prompt)], device=device), None, []
            for index in range(new):
                started = time.perf_counter()
                seen = model(ids, use_cache=True, **cache_argument(model, cache))
                logits.append(seen.logits[0, -1].float().cpu())
                seconds = time.perf_counter() - started
                if cache is None:
                    prefill += seconds
                else:
                    steps.append(seconds)
                cache = cache_of(seen)
                token = logits[-1].argmax() if tokens is None else torch.tensor(tokens[row, index], device="cpu")
                ids = token.reshape(1, 1).to(device)
            rows.append(torch.stack(logits))
    return DecodingRun(torch.stack(rows).numpy(), prefill, float(np.median(steps)) if steps else 0.0)


def forced_run(
    session: EngineSession, prompts: Sequence[Sequence[int]], tokens: np.ndarray, *, chunk: int | None = None
) -> DecodingRun:
    """Runs the engine on prompts and then feeds it `tokens` `[rows, steps]`, and returns its logits."""
    rows = [list(prompt) for prompt in prompts]
    session.begin(len(rows))
    started = time.perf_counter()
    logits = [read(session, rows, chunk=chunk)]
    prefill, steps = time.perf_counter() - started, []
    for column in tokens.T[:-1]:
        for row, token in zip(rows, column, strict=True):
            row.append(int(token))
        started = time.perf_counter()
        logits.append(step(session, rows))
        steps.append(time.perf_counter() - started)
    return DecodingRun(np.stack(logits, 1), prefill, float(np.median(steps)) if steps else 0.0)
