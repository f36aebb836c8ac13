"""Records of data sets, on disk and on the Hugging Face hub, read with the `datasets` package; JSON takes none.

    notes.jsonl                    a .json, .jsonl, .csv, .tsv or .parquet file, perhaps compressed (.jsonl.gz)
    notes.jsonl#body               the column named body
    hf:org/name                    a data set of the hub, or a folder of such files, or of `Dataset.save_to_disk`
    hf:org/name:config:split#body  with its configuration, split and column; config may be empty: hf:org/name::test

Everything is streamed: from a data set of terabytes, only as much is fetched as the rows need. Shuffling is then
approximate: of the order of the shards, and within a window of `SHUFFLE_WINDOW` records.
"""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quant.base.extras import check_installed

SHUFFLE_WINDOW = 1024
T = TypeVar("T")

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
# Python's own modules open the first three; zstandard comes with `datasets`.
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_COMPRESSED = {*_OPENERS, ".zst"}


@dataclass(frozen=True)
class Corpus:
    """Where records come from."""

    path: str
    reader: str | None = None  # "json", "csv" or "parquet" for a file; None for a folder and for the hub
    config: str | None = None  # parts of it; None takes the only one, or the usual one
    split: str | None = None
    column: str | None = None


def parse_corpus(spec: str) -> Corpus | None:
    """Returns the corpus that a string names (see the module); None for anything else, such as a text file."""
    if spec.startswith("hf:"):
        parts, _, column = spec[3:].partition("#")
        name, config, split = [*parts.split(":", 2), "", ""][:3]
        if not name:
            raise ValueError(f"{spec}: name the data set as hf:NAME[:CONFIG][:SPLIT][#COLUMN]")
        return Corpus(name, None, config or None, split or None, column or None)
    # A file name may hold a #; it begins the column only where no such file exists.
    path, column = (spec, "") if Path(spec).exists() else (spec.partition("#")[0], spec.partition("#")[2])
    if Path(path).is_dir():
        return Corpus(path, column=column or None)
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    reader = _READERS.get(suffixes[-1]) if suffixes else None
    return Corpus(path, reader, column=column or None) if reader else None


def check_corpus(spec: str) -> None:
    """Raises ValueError for an empty file; it opens nothing."""
    corpus = parse_corpus(spec)
    if corpus is not None and corpus.reader and Path(corpus.path).is_file() and not Path(corpus.path).stat().st_size:
        raise ValueError(f"{corpus.path}: empty, it holds no text")


def packages_of(spec: str) -> list[str]:
    """Returns the optional packages that read a source."""
    corpus = parse_corpus(spec)
    # A folder may hold images or sounds, which take no such package.
    is_plain = corpus is None or _is_json(corpus) or Path(corpus.path).is_dir()
    return [] if is_plain else ["datasets"]


def _is_json(corpus: Corpus) -> bool:
    return corpus.reader == "json" and not corpus.path.lower().endswith(".zst")


def read_records(corpus: Corpus, *, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the records in order, or shuffled by `seed`."""
    if corpus.reader:
        if not Path(corpus.path).is_file():
            raise FileNotFoundError(f"{corpus.path}: no such file")
        check_corpus(corpus.path)
    if _is_json(corpus):
        records = _json_records(Path(corpus.path))
        yield from records if seed is None else shuffled(records, seed)
        return
    check_installed(["datasets"], f"{corpus.path}: reading it")
    import datasets

    with _explained(corpus):
        opened = _open(datasets, corpus)
    if isinstance(opened, dict):
        opened = opened[_choose_split(corpus, list(opened))]
    with _explained(corpus):
        # Images and sounds stay the bytes of their files: callers that need them decode them.
        for name, feature in (opened.features or {}).items():
            if isinstance(feature, datasets.Image | datasets.Audio):
                opened = opened.cast_column(name, type(feature)(decode=False))
        yield from opened if seed is None else opened.shuffle(seed=seed, buffer_size=SHUFFLE_WINDOW)


def _json_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON file: one in each line, or all in one list."""
    number = 0
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.lstrip().startswith("["):
                    yield from _objects(json.loads(line + file.read()), path, "the list")
                elif line.strip():
                    yield from _objects([json.loads(line.strip())], path, f"line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number + error.lineno - 1}: not JSON ({error.msg} at character {error.colno}); give one "
            "object in each line, or one list of objects"
        ) from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path}: cannot be read as a data set: {_one_line(error)}") from error


def _objects(values: list[Any], path: Path, where: str) -> Iterator[dict[str, Any]]:
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}: {where} holds {type(value).__name__} where an object such as "
                '{"text": "…"} or {"messages": […]} belongs'
            )
        yield value


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yields the items in a random order, each drawn from the next `SHUFFLE_WINDOW` ones."""
    generator = random.Random(seed)
    window: list[T] = []
    for item in items:
        if len(window) == SHUFFLE_WINDOW:
            i = generator.randrange(SHUFFLE_WINDOW)
            window[i], item = item, window[i]
            yield item
        else:
            window.append(item)
    generator.shuffle(window)
    yield from window


@contextmanager
def _explained(corpus: Corpus) -> Iterator[None]:
    """Turns errors inside `datasets` into one line, and keeps the package from logging them again."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # datasets logs errors itself before it raises
    try:
        yield
    except ConnectionError as error:
        raise ValueError(
            f"{corpus.path}: the data set cannot be reached ({_one_line(error)}). Without a network, pass a local file "
            "in its place: a .txt, .jsonl, .csv or .parquet, or a folder that `hf download --repo-type dataset` filled"
        ) from error
    except Exception as error:  # readers of several formats and a network client, with no common class of errors
        raise ValueError(f"{corpus.path}: cannot be read as a data set: {_one_line(error)}") from error
    finally:
        logger.setLevel(level)


def _open(datasets: Any, corpus: Corpus) -> Any:
    """Returns an iterable of records, or a dict of them by split."""
    if corpus.reader:
        options = {"sep": "\t"} if ".tsv" in corpus.path.lower() else {}
        return datasets.load_dataset(corpus.reader, data_files=corpus.path, streaming=True, **options)
    saved = Path(corpus.path)
    # `save_to_disk` leaves state.json for a data set and dataset_dict.json for one with splits.
    if (saved / "state.json").is_file():
        return datasets.load_from_disk(corpus.path).to_iterable_dataset()
    if (saved / "dataset_dict.json").is_file():
        return {split: part.to_iterable_dataset() for split, part in datasets.load_from_disk(corpus.path).items()}
    return datasets.load_dataset(corpus.path, corpus.config, streaming=True)


def _choose_split(corpus: Corpus, splits: list[str]) -> str:
    split = corpus.split
    if not split and len(splits) == 1:
        split = splits[0]
    elif not split and "train" in splits:
        split = "train"
    if split not in splits:
        problem = f"no split {split!r}" if split else "several splits, none of them called train"
        raise ValueError(
            f"{corpus.path}: {problem}; name one of {', '.join(splits)} as hf:NAME:CONFIG:SPLIT (CONFIG may be empty)"
        )
    return split


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
