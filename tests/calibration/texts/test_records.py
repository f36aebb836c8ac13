"""Data sets are read from disk, as json, csv and pyarrow write them; the errors say why one cannot be had."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from quant.calibration.texts.rows import Corpus, calibration_rows, parse_corpus

TEXTS = ["abc", "defgh", "ijklmno"]
# a b c ⊥ d e f g h ⊥ i j k l m n o ⊥, in rows of 6
PACKED = [[0, 1, 2, 26, 3, 4], [5, 6, 7, 26, 8, 9], [10, 11, 12, 13, 14, 26]]


class Letters:
    eos_token_id = 26
    chat_template = "letters"

    def __len__(self) -> int:
        return 27

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text if letter.isalpha()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> list[int]:
        return [i for message in messages for i in self(message["role"][0] + message["content"])["input_ids"]]


def rows(source: Any, seqlen: int = 6, **options: Any) -> list[list[int]]:
    found: list[list[int]] = calibration_rows(
        source, Letters(), samples=options.pop("samples", None), seqlen=seqlen, **options
    ).tolist()
    return found


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, cut off from the network."""
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_spec_strings(tmp_path: Path) -> None:
    assert parse_corpus("hf:org/name") == Corpus("org/name")
    assert parse_corpus("hf:name:config") == Corpus("name", config="config")
    assert parse_corpus("hf:org/name::test#body") == Corpus("org/name", split="test", column="body")
    assert parse_corpus("hf:name:config:train[:9]") == Corpus("name", config="config", split="train[:9]")
    assert parse_corpus("a/b.jsonl.gz#x") == Corpus("a/b.jsonl.gz", "json", column="x")
    assert parse_corpus("b.PARQUET") == Corpus("b.PARQUET", "parquet")
    assert parse_corpus(str(tmp_path)) == Corpus(str(tmp_path))
    (tmp_path / "odd#name.csv").touch()
    assert parse_corpus(f"{tmp_path}/odd#name.csv") == Corpus(f"{tmp_path}/odd#name.csv", "csv")
    for other in ("text.txt", "ids.safetensors", "ids.safetensors:one", "README", "book.txt.gz"):
        assert parse_corpus(other) is None
    with pytest.raises(ValueError, match=r"name the data set as hf:NAME\[:CONFIG\]"):
        parse_corpus("hf:#text")


def test_files_of_every_kind(tmp_path: Path, datasets: Any) -> None:
    records = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]
    jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerows([["text", "n"], *([record["text"], record["n"]] for record in records)])
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS, "n": [0, 1, 2]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "b.jsonl.gz", "a.csv", "a.tsv", "a.parquet"):
        assert rows(tmp_path / name) == PACKED, name
        assert rows(f"{tmp_path / name}#text", pack=False) == [[8, 9, 10, 11, 12, 13]], name


def test_folders_and_splits(tmp_path: Path, datasets: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"text": text} for text in TEXTS])
    jsonl(folder / "test.jsonl", [{"text": "zyxwvu"}])
    assert rows(folder) == rows(f"hf:{folder}::train") == rows(str(folder), split="train") == PACKED
    assert rows(f"hf:{folder}::test#text") == rows(folder, split="test") == [[25, 24, 23, 22, 21, 20]]
    with pytest.raises(ValueError, match=r"no split 'dev'; name one of (train, test|test, train) as hf:NAME:CONFIG"):
        rows(folder, split="dev")
    (folder / "train.jsonl").rename(folder / "validation.jsonl")
    with pytest.raises(ValueError, match="several splits, none of them called train; name one of "):
        rows(folder)
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"only": saved}).save_to_disk(tmp_path / "saved_dict")
    assert rows(tmp_path / "saved") == rows(tmp_path / "saved_dict") == rows(saved) == PACKED


def test_a_folder_of_several_kinds_says_that_one_is_read(tmp_path: Path, datasets: Any) -> None:
    (folder := tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        jsonl(folder / f"{name}.jsonl", [{"text": text} for text in TEXTS])
    (folder / "about.json").write_text("{}")
    (folder / "c.txt").write_text("zyxwvu")
    says = r"has \.jsonl, \.txt files, of which one kind is read; name a file, or a folder of one kind"
    with pytest.warns(UserWarning, match=says):
        assert rows(folder, pack=False) == 2 * rows(folder / "a.jsonl", pack=False)
    (folder / "c.txt").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows(folder)


def test_chats(tmp_path: Path, datasets: Any) -> None:
    chat = [{"role": "user", "content": "bc"}, {"role": "assistant", "content": "d"}]
    path = jsonl(tmp_path / "chats.jsonl", [{"id": "one", "messages": chat}] * 2)
    assert rows(path, seqlen=5) == [[20, 1, 2, 0, 3]] * 2


def test_shuffling(tmp_path: Path, datasets: Any) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    path = jsonl(tmp_path / "letters.jsonl", [{"text": letter * 2} for letter in letters])
    order = {seed: [row[0] for row in rows(path, seqlen=3, shuffle=True, seed=seed)] for seed in (0, 1)}
    assert sorted(order[0]) == sorted(order[1]) == list(range(26))
    assert order[0] != order[1] and order[0] != list(range(26))
    assert [row[0] for row in rows(path, seqlen=3, shuffle=True, seed=1, samples=9)] == order[1][:9]
    assert [row[0] for row in rows(path, seqlen=3, seed=1)] == list(range(26))


def test_bad_files(tmp_path: Path, datasets: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        rows(tmp_path / "none.jsonl")
    (tmp_path / "latin.csv").write_bytes(b"text\nab\xff\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for name in ("latin.csv", "cut.parquet"):
        with pytest.raises(ValueError, match=rf"{name}: cannot be read as a data set: \S"):
            rows(tmp_path / name)
    with pytest.raises(ValueError, match=r"latin.csv.*utf-8.* byte 0xff"):
        rows(tmp_path / "latin.csv")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / "mixed" / "b.jsonl").write_text('{"wide": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"mixed: cannot .*: its files have different columns; name one of them, or a"):
        rows(tmp_path / "mixed")
    assert len(rows(tmp_path / "mixed" / "a.jsonl", seqlen=3)) == 1
    (tmp_path / "empty.json").touch()
    with pytest.raises(ValueError, match=r"empty\.json: empty, it holds no text"):
        rows(tmp_path / "empty.json")
    path = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(
        ValueError, match=r"pairs.jsonl: no column of text .* its columns are prompt, answer\. Name one"
    ):
        rows(path)
    with pytest.raises(ValueError, match=r"1 document\(s\) with 2 tokens give 0 rows of 6"):
        rows(f"{path}#answer")


def test_no_network(datasets: Any) -> None:
    with pytest.raises(
        ValueError, match=r"org/none: the data set cannot be reached \(.*\)\. Without a network, pass a local"
    ):
        rows("hf:org/none")
    with pytest.raises(FileNotFoundError, match="a data set of the Hugging Face hub is hf:org/none"):
        rows("org/none")


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("text\nabc\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"a\.csv: reading it needs the package `datasets`, .*\[data\]'"):
        rows(tmp_path / "a.csv")


@pytest.mark.parametrize("layout", ["lines", "list", "gzip"])
def test_chats_in_json_take_no_package(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those that the package `datasets` reads from the same file."""
    reader = pytest.importorskip("datasets")
    monkeypatch.setattr(reader.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    path = tmp_path / {"lines": "a.jsonl", "list": "a.json", "gzip": "a.jsonl.gz"}[layout]
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    if layout == "gzip":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines if layout == "lines" else json.dumps(chats, indent=1))
    records = reader.load_dataset("json", data_files=str(path), streaming=True)["train"]
    expected = rows(list(records))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert rows(path, shuffle=False) == expected and sum(map(sum, expected)) > 0


def test_a_file_that_is_not_json_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: not JSON \(Expecting value at character"):
        rows(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n"abc"\n')
    with pytest.raises(ValueError, match=r"b\.jsonl: line 2 holds str where an object"):
        rows(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 999)[:40])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz: cannot be read as a data set: "):
        rows(tmp_path / "c.jsonl.gz")
