"""The mixture is read back through a tokenizer of bytes: every piece of a sample stands in its file word for word."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quant.calibration.session import Session
from quant.calibration.texts.mixture import SHARES, mixture_rows, sample_texts, turns
from quant.calibration.texts.self_written import generate_rows

BOS, EOS, TURN = 256, 257, 258
ROOT = Path(__file__).parents[3]


class Bytes:
    """A token a byte, BOS before every text; messages of a chat stand between turn marks."""

    bos_token_id, eos_token_id, all_special_ids = BOS, EOS, (BOS, EOS, TURN)
    chat_template: str | None = "bytes"

    def __len__(self) -> int:
        return 259

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [BOS, *text.encode()]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False, **options: object
    ) -> list[int]:
        turns = [i for m in messages for i in (TURN, *f"{m['role']} {m['content']}".encode())]
        return [BOS, *turns, *([TURN, *b"assistant "] if add_generation_prompt else [])]


class Upwards(nn.Module):
    """Always says the next byte: text that it writes is known from its first token."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(259, 259)
        self.table.weight.data = 50.0 * torch.eye(259).roll(1, dims=1)
        self.config = SimpleNamespace(bos_token_id=BOS, eos_token_id=EOS, **config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def mixed(samples: int = 16, seqlen: int = 512, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    options = {"model": Upwards(), "tokenizer": Bytes()} | options
    session = Session(seed=options.pop("seed", 0))
    model, tokenizer = options.pop("model"), options.pop("tokenizer")
    return mixture_rows(model, tokenizer, session, samples=samples, seqlen=seqlen, **options)


def pieces_of(rows: torch.Tensor) -> list[bytes]:
    """What stands between ends of text, with a turn mark as a NUL; the last piece may be cut off."""
    assert rows[:, 0].eq(BOS).all() and not rows[:, 1:].eq(BOS).any()
    chain = [0 if i == TURN else i for i in rows[:, 1:].flatten().tolist()]
    found, piece = [], bytearray()
    for token in chain:
        if token == EOS:
            found.append(bytes(piece))
            piece.clear()
        else:
            piece.append(token)
    return found


def part_of(piece: bytes) -> str:
    files = {name: "\n%\n".join(sample_texts(name)).encode() for name in SHARES if name not in ("own text", "dialogue")}
    chats = [m for document in sample_texts("dialogue") for m in turns(document)]
    files["dialogue"] = b"".join(f"\0{m['role']} {m['content']}".encode() for m in chats)
    return next((name for name, content in files.items() if piece in content), "own text")


def test_pieces_stand_in_their_files_and_shares_are_kept() -> None:
    rows, record = mixed(32)
    assert rows.shape == (32, 512) and rows.dtype == torch.int64
    parts = [part_of(piece) for piece in pieces_of(rows)]
    counts = {name: parts.count(name) / len(parts) for name in SHARES}
    assert all(abs(counts[name] - share) < 0.03 for name, share in SHARES.items()), counts
    assert abs(record["tokens"]["own text"] / (32 * 511) - 0.5) < 0.05
    early = [part_of(piece) for piece in pieces_of(rows[:8])]
    assert set(early) == set(SHARES) and abs(early.count("own text") / len(early) - 0.5) < 0.1


def test_own_text_goes_on_from_its_openings() -> None:
    rows, _ = mixed(32)
    own = [piece for piece in pieces_of(rows) if part_of(piece) == "own text"]
    questions = [f"\0user {turns(d)[0]['content']}\0assistant ".encode() for d in sample_texts("dialogue")]
    asked = [piece for piece in own if piece.startswith(tuple(questions))]
    assert len(asked) == len(own) // 4
    for piece in asked:
        written = piece.removeprefix(next(q for q in questions if piece.startswith(q)))
        assert written[:2] == b'!"'  # behind the space that the question ends with


def test_seeds() -> None:
    rows, record = mixed(4, 128)
    again, same = mixed(4, 128)
    assert torch.equal(rows, again) and record == same
    other, another = mixed(4, 128, seed=1)
    assert not torch.equal(rows, other) and another["sha256"] != record["sha256"]


def test_samples_stand_in_where_the_model_does_not_write() -> None:
    class Silent(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise TypeError("pixels, please")

    silent = Silent()
    silent.table = nn.Embedding(259, 8)
    rows, record = mixed(8, model=silent)
    assert rows.shape == (8, 512) and "own text" not in record["tokens"] and "pixels" in record["no_own_text"]
    told, why = mixed(8, model=Upwards(), why_not="too large")
    assert torch.equal(told, rows) and why["no_own_text"] == "too large"
    everything, _ = mixed(10_000, model=None)
    assert 150 < len(everything) < 10_000  # as many rows as the samples give, in bytes
    with pytest.raises(TypeError, match="pixels"):
        mixed(8, model=silent, tokenizer=None)
    with pytest.raises(ValueError, match="no calibration text"):
        mixed(8, model=None, tokenizer=None)


def test_samples_of_another_tokenizer_are_refused() -> None:
    """A model with fewer embeddings than the tokenizer has tokens: a GPU would end the process at the look-up."""
    model = Upwards()
    model.get_input_embeddings = lambda: nn.Embedding(100, 8)  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"token id \d+ is outside the model's vocabulary of 100; the ids were made with"
    ):
        mixed(8, model=model)


def test_own_text_alone() -> None:
    for options in ({"tokenizer": None}, {"own_only": True}):
        rows, record = mixed(3, 40, **options)
        assert rows.shape == (3, 40) and list(record["tokens"]) == ["own text"]
        assert all(part_of(piece) == "own text" for piece in pieces_of(rows))


def test_openings_and_temperatures_of_rows() -> None:
    model = Upwards()
    model.table.weight.data = torch.randn(259, 259, generator=torch.Generator().manual_seed(3))
    rows = generate_rows(model, samples=4, seqlen=12, openings=[[7, 8, 9], []], temperatures=[1e-4, 1.0])
    assert rows[:, 0].tolist() == [BOS] * 4 and rows[0, 1:4].tolist() == [7, 8, 9]
    table = model.table.weight.detach().clone()
    table[:, [BOS, EOS]] = -torch.inf
    likeliest = table.argmax(-1)
    for row in (0, 2):  # cold rows: each token is the likeliest one after the token before
        assert torch.equal(rows[row, 4:], likeliest[rows[row, 3:-1]])
    assert not torch.equal(rows[1, 1:], likeliest[rows[1, :-1]])
    assert torch.equal(rows[1], generate_rows(model, samples=2, seqlen=12)[1])


def test_samples_hold_nothing_of_the_texts_for_evaluation() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    samples = set().union(*(runs(text) for name in SHARES if name != "own text" for text in sample_texts(name)))
    for name in ("evaluation", "calibration"):
        assert not samples & runs((ROOT / "benchmarks" / "data" / f"{name}.txt").read_text(encoding="utf-8"))
