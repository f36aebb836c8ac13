"""Text is told as it is written: no piece is taken back, none holds half a character, and joined they are the text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from click.testing import CliRunner
from samples import BASE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quant.cli import command
from quant.cli.main import main
from quant.generate import generate as generation
from quant.generate.generate import TextStream, generate


def by_bytes() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    held = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    held.pre_tokenizer, held.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=held)


def told(tokenizer: transformers.PreTrainedTokenizerFast, tokens: list[int], at_once: int = 1) -> list[str]:
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    for start in range(0, len(tokens), at_once):
        stream.add(tokens[start : start + at_once])
    assert stream.finish() == tokenizer.decode(tokens, skip_special_tokens=True) == "".join(pieces)
    assert stream.tokens == tokens
    return pieces


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_no_piece_holds_part_of_a_character(at_once: int) -> None:
    tokenizer = by_bytes()
    text = "a naïve 猫 and a 🦔, twice 🦔🦔"
    pieces = told(tokenizer, tokenizer(text)["input_ids"], at_once)
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    if at_once == 1:
        assert pieces == list(text)
    # Bytes that never become a character are told in the end.
    assert told(tokenizer, tokenizer("x")["input_ids"] + tokenizer("é")["input_ids"][:1]) == ["x", "\ufffd"]


def test_spaces_that_a_tokenizer_takes_back_are_not_told() -> None:
    text = "we do n't know . it ' s late , is it ?"
    vocabulary = {word: i for i, word in enumerate(sorted(set(text.split())))}
    held = Tokenizer(models.WordPiece(vocabulary, unk_token="we"))
    held.pre_tokenizer, held.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=held, clean_up_tokenization_spaces=True)
    pieces = told(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(pieces) == "we don't know. it's late, is it?" and len(pieces) == 8


def test_a_long_text_is_decoded_anew_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls = by_bytes(), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: calls.append(len(ids)) or decode(ids, **options))
    tokens = tokenizer("a word " * 500)["input_ids"]
    told(tokenizer, tokens)
    gaps = [b - a for a, b in pairwise(calls[:-2])]
    assert set(gaps[:254]) == {1} and max(gaps) == len(tokens) // 256 + 1 and sum(gaps) > len(tokens) - 20


def test_pieces_come_while_the_model_writes() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    events: list[str] = []
    model.model.register_forward_hook(lambda *_: events.append(""))
    written = generate(model, tokenizer, "12 200 45 7 99", 12, device="cpu", on_text=events.append)
    assert "".join(events) == written.text and written.text
    assert events.index(next(filter(None, events))) < len(events) - 5  # a piece, then more forward passes
    assert generate(model, tokenizer, "12 200 45 7 99", 12, device="cpu").tokens == written.tokens


def test_a_stopped_command_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def check(model: object, ids: object, logits: torch.Tensor) -> torch.Tensor:
        steps.append(logits)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(generation, "_check_logits", check)
    arguments = ["generate", str(BASE), "--prompt", "12 200 45 7 99", "--device", "cpu", "--max-new-tokens", "30"]
    stopped = CliRunner().invoke(main, arguments)
    assert stopped.exit_code == 130 and stopped.stderr.endswith("error: stopped by SIGINT\n")
    assert stopped.stdout.startswith("12 200 45 7 9972 72") and stopped.stdout.count("\n") == 1
    assert stopped.stdout.endswith("\n")


def test_a_command_stopped_behind_its_first_text_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the pipe may stop the command before the function that wrote has returned."""
    echo = command.echo

    def stopped(text: str, *, err: bool = False, newline: bool = True) -> None:
        echo(text, err=err, newline=newline)
        if not newline:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "echo", stopped)
    arguments = ["generate", str(BASE), "--prompt", "12 200 45 7 99", "--device", "cpu"]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 130 and run.stderr.endswith("error: stopped by SIGINT\n")
    assert run.stdout.startswith("12 200 45 7 99") and run.stdout.endswith("\n") and run.stdout.count("\n") == 1


@pytest.mark.slow
def test_a_pipe_gets_text_as_it_comes() -> None:
    """Its reader stops the command behind the first text."""
    command = [sys.executable, "-m", "quant", "generate", str(BASE), "--prompt", "12 200 45 7 99", "--device", "cpu"]
    running = subprocess.Popen([*command, "--max-new-tokens", "120"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    first = os.read(running.stdout.fileno(), 4096)
    running.send_signal(signal.SIGINT)
    rest, error = running.communicate(timeout=60)
    assert first.startswith(b"12 200 45 7 99") and not first.endswith(b"\n")
    assert (first + rest).endswith(b"\n") and (first + rest).count(b"\n") == 1
    assert running.returncode == 130 and error == b"error: stopped by SIGINT\n"
