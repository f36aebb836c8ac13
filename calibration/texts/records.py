"""Records of data sets, on disk and on the Hugging Face hub, read with the `datasets` package.

    notes.jsonl                    a .json, .jsonl, .csv, .tsv or .parquet file, perhaps compressed (.jsonl.gz)
    notes.jsonl#body               the column named body
    hf:org/name                    a data set of the hub, or a folder of such files, or of `Dataset.save_to_disk`
    hf:org/name:config:split#body  with its configuration, split and column; config may be empty: hf:org/name::test

Everything is streamed: from a data set of terabytes, only as much is fetched as the rows need. Shuffling is then
approximate: of the order of the shards, and within a window of `SHUFFLE_WINDOW` records.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.base.extras import install_command

SHUFFLE_WINDOW = 1024

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}


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
    """Raises ValueError for an empty file, or a source whose package is missing; it opens nothing."""
    corpus = parse_corpus(spec)
    if corpus is None or Path(corpus.path).is_dir():  # a folder may hold images, which take no such package
        return
    if corpus.reader and Path(corpus.path).is_file() and not Path(corpus.path).stat().st_size:
        raise ValueError(f"{corpus.path}: empty, it holds no text")
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(_missing_package(corpus))


def _missing_package(corpus: Corpus) -> str:
    return (
        f"{corpus.path}: reading it needs the package `datasets`: {install_command('data')}; "
        "a plain UTF-8 text file needs nothing"
    )


def read_records(corpus: Corpus, *, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the records in order, or shuffled by `seed`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(_missing_package(corpus)) from error
    if corpus.reader:
        if not Path(corpus.path).is_file():
            raise FileNotFoundError(f"{corpus.path}: no such file")
        if not Path(corpus.path).stat().st_size:
            raise ValueError(f"{corpus.path}: empty, it holds no text")
    with _explained(corpus):
        records = _open(datasets, corpus)
    if isinstance(records, dict):
        records = records[_choose_split(corpus, list(records))]
    with _explained(corpus):
        # Images and sounds stay the bytes of their files: callers that need them decode them.
        for name, feature in (records.features or {}).items():
            if isinstance(feature, datasets.Image | datasets.Audio):
                records = records.cast_column(name, type(feature)(decode=False))
        yield from records if seed is None else records.shuffle(seed=seed, buffer_size=SHUFFLE_WINDOW)


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
