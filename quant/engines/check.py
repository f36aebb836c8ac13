"""`check_engine` runs an exported decoder next to the checkpoint that it was made from, and compares and times both.

    reference    quant.load of the checkpoint, in the engine's dtype: reads each prompt and adds the likeliest tokens
    engine       reads all prompts together, then is fed the reference's tokens and gives its own logits after each

Both see the same tokens at every step, so one early difference does not make all later steps differ. A step agrees if
both have the same likeliest token. Where inputs are quantized, sums that were added in another order round to other
codes now and then, and two tokens that are nearly as likely may change places: the check passes if such steps are few
and the mean KL divergence is small. An engine of other weights is off by nats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.calibration.blocks import cache_argument, cache_of
from quant.engines.loop import check_lengths, read, step
from quant.engines.session import Session

MOST_KL, LEAST_AGREEMENT = 0.02, 0.9
"""Limits of a check that passes: mean KL divergence in nats, and the share of steps that agree."""


@dataclass(frozen=True)
class Run:
    """What a model wrote, or was fed, after some prompts.

    Attributes:
        logits: `[rows, steps, vocabulary]`, float32; step 0 follows the prompt.
        prefill_seconds: of reading the prompts.
        step_seconds: the median decoding step; of the reference, of one row.
    """

    logits: np.ndarray
    prefill_seconds: float
    step_seconds: float

    @property
    def tokens(self) -> np.ndarray:
        """The likeliest token of each step, `[rows, steps]`."""
        likeliest: np.ndarray = self.logits.argmax(-1)
        return likeliest


@dataclass(frozen=True)
class EngineCheck:
    """The comparison.

    Attributes:
        backend: library and device that ran the engine; empty if it could not be run here.
        dtype: in which both ran.
        prompts: tokens of each row's prompt.
        steps: tokens that were compared in each row.
        agreeing: steps of all rows whose likeliest tokens are the same.
        first_difference: row and step of the first that is not; None if all are.
        kl: mean KL divergence from the reference, in nats.
        error: relative difference of all logits, in the Frobenius norm.
        engine_ms: prefill of all rows, and a decoding step of all rows.
        reference_ms: prefill of all rows, one after the other, and a decoding step of one row.
        facts: name and finding of everything that was checked without running it.
        passed: None if it could not be run here.
    """

    backend: str = ""
    dtype: str = ""
    prompts: list[int] = field(default_factory=list)
    steps: int = 0
    agreeing: int = 0
    first_difference: tuple[int, int] | None = None
    kl: float = 0.0
    error: float = 0.0
    engine_ms: tuple[float, float] = (0.0, 0.0)
    reference_ms: tuple[float, float] = (0.0, 0.0)
    facts: list[tuple[str, str]] = field(default_factory=list)
    passed: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def compare(model: nn.Module, session: Session, prompts: Sequence[Sequence[int]], new: int = 64) -> EngineCheck:
    """Runs both on some prompts.

    Args:
        model: the reference, in the session's dtype and on its own device.
        session: of the engine.
        prompts: token ids of each row.
        new: tokens that follow each.

    Raises:
        UserError: a prompt does not fit into the engine.
    """
    check_lengths(session, prompts, new)
    expected = reference_run(model, prompts, new)
    run = forced_run(session, prompts, expected.tokens)
    same = run.tokens == expected.tokens
    differing = np.argwhere(~same)
    kl = _mean_kl(expected.logits, run.logits)
    difference = np.linalg.norm((run.logits - expected.logits).astype(np.float64))
    return EngineCheck(
        backend=session.backend,
        dtype=session.dtype,
        prompts=[len(prompt) for prompt in prompts],
        steps=new,
        agreeing=int(same.sum()),
        first_difference=(int(differing[0][0]), int(differing[0][1])) if len(differing) else None,
        kl=kl,
        error=float(difference / np.linalg.norm(expected.logits.astype(np.float64))),
        engine_ms=(1e3 * run.prefill_seconds, 1e3 * run.step_seconds),
        reference_ms=(1e3 * expected.prefill_seconds, 1e3 * expected.step_seconds),
        # NaN fails: no comparison with it is true.
        passed=bool(kl <= MOST_KL and same.mean() >= LEAST_AGREEMENT),
    )


def reference_run(model: Any, prompts: Sequence[Sequence[int]], new: int) -> Run:
    """The likeliest tokens by the model itself, one row after the other, with transformers' cache."""
    device = next(model.parameters()).device
    rows, prefill, steps = [], 0.0, []
    with torch.no_grad():
        for prompt in prompts:
            ids, cache, logits = torch.tensor([list(prompt)], device=device), None, []
            for _ in range(new):
                started = time.perf_counter()
                seen = model(ids, use_cache=True, **cache_argument(model, cache))
                logits.append(seen.logits[0, -1].float().cpu())
                seconds = time.perf_counter() - started
                if cache is None:
                    prefill += seconds
                else:
                    steps.append(seconds)
                cache = cache_of(seen)
                ids = logits[-1].argmax().reshape(1, 1).to(device)
            rows.append(torch.stack(logits))
    return Run(torch.stack(rows).numpy(), prefill, float(np.median(steps)) if steps else 0.0)


def forced_run(
    session: Session, prompts: Sequence[Sequence[int]], tokens: np.ndarray, *, chunk: int | None = None
) -> Run:
    """The engine's logits while it is fed `tokens` `[rows, steps]` after the prompts."""
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
    return Run(np.stack(logits, 1), prefill, float(np.median(steps)) if steps else 0.0)


def _mean_kl(expected: np.ndarray, computed: np.ndarray) -> float:
    """Mean divergence of the computed distributions from the expected ones."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, computed))
    return float((p.exp() * (p - q)).sum(-1).mean())
