"""The loop around an `EngineSession`: prompts of any lengths are read in chunks, then each step adds a token to a row.

A step feeds each row the tokens that its cache lacks. All rows have one width, so a short row is padded on its right;
a row that has no new token is fed its last one again, which writes the same key once more:

    cache of 8, width 4     row 0: 6 of 6 tokens are cached     feeds token 5        from position 5
                            row 1: 2 of 7                        feeds tokens 2 … 5   from position 2
    then                    row 1: 6 of 7, and 6 + 4 > 8         feeds tokens 4 … 6   from position 4

A step must end within the cache, so near its end the row starts further back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from quant.export.engines.engine_session import EngineSession
from quant.base.errors import UserError, counted


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draws among so many of the likeliest tokens; 0 is all.
        top_p: draws among the likeliest tokens that together have this probability.
        seed: the seed of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option, valid, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top-k", self.top_k >= 0, "0 or more"),
            ("top-p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not valid:
                raise UserError(f"--{option} is {getattr(self, option.replace('-', '_'))}; expected {expected}")


GREEDY = Sampling()


def generate_tokens(
    session: EngineSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stops: Collection[int] = (),
    chunk: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
) -> list[list[int]]:
    """Generates the tokens that follow each prompt, until one of `stops`, which is included, or `max_new_tokens`.

    Args:
        session: the exported model.
        prompts: token ids of each row.
        max_new_tokens: one limit for all rows, or one for each.
        sampling: how tokens are chosen: in all rows, from one stream of random numbers, or in each row from its own.
        stops: ids that end a row.
        chunk: tokens of a row that are read at once; None for all that the session takes.
        on_token: a function that is called with the row and the token, as soon as it is chosen. The row ends where it
            returns False.

    Raises:
        UserError: an empty prompt, or more tokens than the cache holds.
    """
    limits = check_lengths(session, prompts, max_new_tokens)
    rows, open_rows = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    choosers = [_chooser(sampling)] * len(rows) if isinstance(sampling, Sampling) else list(map(_chooser, sampling))
    session.begin(len(rows))
    logits = read(session, rows, chunk=chunk)
    while True:
        for row in sorted(open_rows):
            token = choosers[row](logits[row])
            rows[row].append(token)
            goes_on = on_token is None or on_token(row, token) is not False
            if not goes_on or token in stops or len(rows[row]) == len(prompts[row]) + limits[row]:
                open_rows.discard(row)
        if not open_rows:
            return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        logits = step(session, rows)


def check_lengths(session: EngineSession, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> list[int]:
    """Returns the new tokens of each row; UserError for prompts that are empty, too many, or too long for the cache."""
    limits = [new] * len(prompts) if isinstance(new, int) else list(new)
    if not prompts or len(prompts) > session.most_rows():
        raise UserError(f"{len(prompts)} prompts, and this file takes 1 to {session.most_rows()} rows")
    for prompt, limit in zip(prompts, limits, strict=True):
        if limit < 1:
            raise UserError(f"--max-new-tokens is {limit}; expected 1 or more")
        if not prompt:
            raise UserError("a prompt holds no token; give some text with --prompt")
        if len(prompt) + limit > session.capacity:
            raise UserError(
                f"a prompt has {counted(len(prompt), 'token')} and {limit} more are wanted, but the cache holds "
                f"{session.capacity}; shorten it, lower --max-new-tokens, or export with a larger --capacity"
            )
    return limits


def read(session: EngineSession, rows: Sequence[Sequence[int]], *, chunk: int | None = None) -> np.ndarray:
    """Reads whole prompts into an empty cache, and returns the logits of each row's last token."""
    cached = np.zeros(len(rows), np.int64)
    ends = np.array([len(row) for row in rows])
    logits: np.ndarray | None = None
    while (cached < ends).any():
        remaining = int((ends - cached).max())
        before = cached
        cached, computed = _feed(session, rows, cached, session.width(min(remaining, chunk or remaining)))
        # A row keeps the logits of the step that read its last token.
        logits = computed if logits is None else np.where((before < ends)[:, None], computed, logits)
    assert logits is not None
    return logits


def step(session: EngineSession, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Feeds the last token of each row, and returns its logits."""
    return _feed(session, rows, np.array([len(row) - 1 for row in rows]), session.width(1))[1]


def _feed(
    session: EngineSession, rows: Sequence[Sequence[int]], cached: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs one step, and returns how many tokens of each row are cached after it, and the last ones' logits."""
    ends = np.array([len(row) for row in rows])
    starts = np.minimum(np.minimum(cached, ends - 1), session.capacity - width)
    counts = np.minimum(ends - starts, width)
    ids = np.zeros((len(rows), width), np.int64)
    for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[index, :count] = row[start : start + count]
    return starts + counts, session.step(ids, starts, counts - 1)


def _chooser(sampling: Sampling) -> Callable[[np.ndarray], int]:
    """Returns a function that chooses a token from a row's logits."""
    if sampling.temperature == 0:
        return lambda logits: int(logits.argmax())
    random = np.random.default_rng(sampling.seed)

    def draw(logits: np.ndarray) -> int:
        p = probabilities(logits, sampling)
        return int(random.choice(len(p), p=p))

    return draw


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the probabilities `[vocabulary]` that tokens are drawn with, float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    # The smallest set of the likeliest tokens whose sum reaches top_p: a token is out if those before it reach it.
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()  # type: ignore[no-any-return]
