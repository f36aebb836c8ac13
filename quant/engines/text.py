"""`generate_text` continues prompts with an exported model: the loop of tokens, with text at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.export.checkpoint.load import describe, is_checkpoint, no_checkpoint
from quant.export.checkpoint.open_checkpoint import outline
from quant.export.engines.decode_loop import GREEDY, Sampling, generate_tokens
from quant.export.engines.engine_session import EngineSession
from quant.base.errors import UserError
from quant.models.huggingface import load_tokenizer
from quant.generate.generate import end_tokens
from quant.runtime.text_stream import TextStream


@dataclass(frozen=True)
class EngineGeneration:
    """The texts that an exported model wrote.

    Attributes:
        prompts: the texts that were continued.
        texts: the texts that were added.
        prompt_tokens: ids of each prompt.
        tokens: ids that were added, an end-of-text token included.
        seconds: the time of generating, loading excluded.
        backend: library and device.
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    prompt_tokens: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    backend: str

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

    Args:
        session: the exported model.
        directory: the checkpoint that it was exported from, for its tokenizer and its end tokens.
        prompts: texts.
        max_new_tokens: at least 1.
        sampling: how tokens are chosen.
        on_text: a function that is called with each piece of the first text, as soon as no later token can change it.

    Raises:
        UserError: another checkpoint, an empty prompt, or more tokens than the cache holds.
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
        raise UserError(f"the file was exported from another plan than that of {directory}: their digests differ")
