"""The loop around an `EngineSession`: prompts of any lengths are read in chunks, then each step adds a token to a row.

A step feeds each row the tokens that its cache lacks. All rows have one width, so a short row is padded on its right;
a row that has no new token is fed its last one again, which writes the same key once more:

    cache of 8, width 4     row 0: 6 of 6 tokens are cached     feeds token 5        from position 5
                            row 1: 2 of 7                        feeds tokens 2 … 5   from position 2
    then                    row 1: 6 of 7, and 6 + 4 > 8         feeds tokens 4 … 6   from position 4

A step must end within the cache, so near its end the row starts further back.

A recurrent layer has a state without positions, which no token may change twice. Rows of a hybrid are read so that all
of them end in the same step, and a shorter one waits by feeding its first token from position 0, where its state is
reset. Steps of any width run in onnxruntime, so none starts further back.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quant.base.errors import UserError, counted, option
from quant.export.aoti.package import AotiSession
from quant.export.checkpoint.load import describe, is_checkpoint, no_checkpoint
from quant.export.checkpoint.open_checkpoint import outline
from quant.export.onnx.engine_session import EngineSession, OnnxruntimeSession
from quant.export.tensorrt.tensorrt_session import TensorrtSession
from quant.generate.generate import TextStream, end_tokens
from quant.models.huggingface import load_tokenizer

ONNX_FILE, PACKAGE_ENDING = "model.onnx", ".pt2"


def open_session(path: str | Path, *, unsafe_load: bool = False) -> EngineSession:
    """Opens a session of an ONNX file, a directory with `model.onnx`, an engine, or a package of AOTInductor.

    A package is compiled code, which runs when it is loaded: only `unsafe_load` loads one. Raises UserError for a file
    that cannot be loaded here, or is no serving graph.
    """
    path = Path(path)
    if path.suffix == PACKAGE_ENDING and path.is_file():
        return AotiSession(path, unsafe_load=unsafe_load)
    if is_engine(path):
        return TensorrtSession(path)
    return OnnxruntimeSession(path / ONNX_FILE if path.is_dir() else path)


def is_engine(path: Path) -> bool:
    """Returns whether a file is an engine of TensorRT; UserError if there is no such file."""
    if (path / ONNX_FILE).is_file():
        return False
    if not path.is_file():
        raise UserError(f"{path}: no such file; name an ONNX file, engine or package that `quant export` wrote")
    return path.suffix not in (".onnx", PACKAGE_ENDING)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = 0.0  # divides the logits; 0 takes the likeliest token
    top_k: int = 0  # draws among so many of the likeliest tokens; 0 is all
    top_p: float = 1.0  # draws among the likeliest tokens that together have this probability
    seed: int = 0  # the seed of the draws

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not valid:
                raise UserError(f"{option(name)} is {getattr(self, name)}; expected {expected}")


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

    `sampling` draws for all rows from one stream of random numbers, or for each row from its own. `chunk` tokens of a
    row are read at once, or as many as the session takes. A row ends where `on_token`, which gets the row and each
    token as soon as it is chosen, returns False.
    """
    limits = check_lengths(session, prompts, max_new_tokens)
    rows, open_rows = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    each = [sampling] * len(rows) if isinstance(sampling, Sampling) else list(sampling)
    streams = [np.random.default_rng(one.seed) for one in each]
    streams = [streams[0]] * len(rows) if isinstance(sampling, Sampling) else streams
    session.begin(len(rows))
    logits = read(session, rows, chunk=chunk)
    while True:
        for row in sorted(open_rows):
            if each[row].temperature == 0:
                token = int(logits[row].argmax())
            else:
                p = probabilities(logits[row], each[row])
                token = int(streams[row].choice(len(p), p=p))
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
                f"{session.capacity}; shorten it, lower --max-new-tokens, or export with a larger {option('capacity')}"
            )
    return limits


def read(session: EngineSession, rows: Sequence[Sequence[int]], *, chunk: int | None = None) -> np.ndarray:
    """Reads whole prompts into an empty cache, and returns the logits of each row's last token."""
    cached = np.zeros(len(rows), np.int64)
    ends = np.array([len(row) for row in rows])
    logits: np.ndarray | None = None
    while (cached < ends).any():
        remaining = int((ends - cached).max())
        before, width = cached, session.width(min(remaining, chunk or remaining))
        # Rows with states end together: short ones wait, which the step that begins them undoes.
        until = np.maximum(ends - remaining + width, 0) if session.recurrent else ends
        cached, computed = _feed(session, rows, cached, np.minimum(until, ends), width)
        # A row keeps the logits of the step that read its last token.
        logits = computed if logits is None else np.where((before < ends)[:, None], computed, logits)
    assert logits is not None
    return logits


def step(session: EngineSession, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Feeds the last token of each row, and returns its logits."""
    ends = np.array([len(row) for row in rows])
    return _feed(session, rows, ends - 1, ends, session.width(1))[1]


def _feed(
    session: EngineSession, rows: Sequence[Sequence[int]], cached: np.ndarray, ends: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs one step up to token `ends` of each row; returns how many are cached after it, and the last ones' logits."""
    waiting = ends == 0
    starts = np.maximum(np.minimum(np.minimum(cached, ends - 1), session.capacity - width), 0)
    counts = np.minimum(np.maximum(ends, 1) - starts, width)
    ids = np.zeros((len(rows), width), np.int64)
    for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[index, :count] = row[start : start + count]
    return np.where(waiting, 0, starts + counts), session.step(ids, starts, counts - 1)


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


@dataclass(frozen=True)
class EngineGeneration:
    """The texts that an exported model wrote."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]  # that were added
    prompt_tokens: tuple[tuple[int, ...], ...]  # ids of each prompt
    tokens: tuple[tuple[int, ...], ...]  # ids that were added, an end-of-text token included
    seconds: float  # the time of generating, loading excluded
    backend: str  # library and device

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows added a second, reading the prompts included."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0


def generate_text(
    session: EngineSession,
    directory: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    on_text: Callable[[str], object] | None = None,
) -> EngineGeneration:
    """Continues each prompt, all of them together, until a token that ends the text or `max_new_tokens`.

    `directory` is the checkpoint that the model was exported from. `on_text` gets each piece of the first text, as soon
    as no later token can change it.
    """
    check_plan(session, directory)
    tokenizer = load_tokenizer(directory)
    ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    streams = [TextStream(tokenizer, None if row else on_text) for row in range(len(ids))]
    started = time.perf_counter()
    tokens = generate_tokens(
        session,
        ids,
        max_new_tokens,
        sampling=sampling,
        stops=end_tokens(outline(directory)),
        on_token=lambda row, token: streams[row].add([token]),
    )
    return EngineGeneration(
        tuple(prompts),
        tuple(stream.finish() for stream in streams),
        tuple(map(tuple, ids)),
        tuple(map(tuple, tokens)),
        time.perf_counter() - started,
        session.backend,
    )


def check_plan(session: EngineSession, directory: Path) -> None:
    """Raises UserError for a checkpoint that the file was not exported from."""
    if not is_checkpoint(directory):
        raise no_checkpoint(directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json; name the checkpoint that the file was exported from")
    if session.plan and session.plan != describe(directory)[0].digest():
        raise UserError(f"the file was exported from another plan than that of {directory}; name its own checkpoint")
