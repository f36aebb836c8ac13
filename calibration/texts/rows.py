"""`token_rows` and `calibration_rows` give the rows of tokens that calibration and evaluation feed to a model.

`token_rows` tokenizes a whole text at once and cuts it into consecutive rows of the same length, without padding or
separators; the remainder at the end is dropped. A row may begin in the middle of a sentence. The same file gives the
same rows everywhere, so that perplexities can be compared. Where the tokenizer begins every text with a
start token (BOS), every row begins with it: a model that always saw one predicts badly without. Token ids in a tensor
or a safetensors file are cut as they are.

`calibration_rows` also takes every other source of calibration text:

    text.txt  ids.safetensors  tensor      token_rows
    data.jsonl  folder/  hf:org/name       records of a data set                   `read_records`
    a data loader, a list of texts, …      batches and documents
    self, or None                          text that the model itself writes       quant.calibration.texts.self_written

Batches and documents are, in a list or one by one:

    "a text"                                     tokenized
    [{"role": "user", "content": …}, …]          through the tokenizer's chat template; ShareGPT's from/value too
    {"input_ids": …, "attention_mask": …}        a training script's batch; padding is left out by the mask
    {"messages": …} {"text": …} …                a record of a data set: its column of chats or of text
    tensor [tokens] or [documents, tokens]       ids
    (inputs, targets)                            the inputs

Packed documents follow one another and are cut every `seqlen` tokens. An end-of-text token closes each text, as in
pretraining; ids and chats have their own. An unpacked row is the beginning of one document, and documents shorter than
`seqlen` are left out, since padding would add tokens to every statistic that the model never sees.

Records are read with the `datasets` package; JSON takes none:

    notes.jsonl                    a .json, .jsonl, .csv, .tsv or .parquet file, perhaps compressed (.jsonl.gz)
    notes.jsonl#body               the column named body
    hf:org/name                    a data set of the hub, or a folder of such files, or of `Dataset.save_to_disk`
    hf:org/name:config:split#body  with its configuration, split and column; config may be empty: hf:org/name::test

Everything is streamed: from a data set of terabytes, only as much is fetched as the rows need. Shuffling is then
approximate: of the order of the shards, and within a window of `SHUFFLE_WINDOW` records.
"""

import bz2
import gzip
import json
import lzma
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quant.base.errors import check_installed, listed, not_utf8, read_utf8, unlogged, warn
from quant.base.torch_modes import in_own_modes
from quant.calibration.attention_names import text_config
from quant.calibration.session import Session
from quant.calibration.texts.self_written import generate_rows

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
        split = corpus.split
        if not split and len(opened) == 1:
            split = next(iter(opened))
        elif not split and "train" in opened:
            split = "train"
        if split not in opened:
            problem = f"no split {split!r}" if split else "several splits, none of them called train"
            raise ValueError(
                f"{corpus.path}: {problem}; name one of {', '.join(opened)} as hf:NAME:CONFIG:SPLIT (CONFIG may be "
                "empty)"
            )
        opened = opened[split]
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
        raise not_utf8(path, error) from None
    except json.JSONDecodeError as error:
        more = error.msg == "Extra data"
        why = "more follows a first value" if more else f"not JSON ({error.msg} at character {error.colno})"
        why += "; give one object in each line, or one list of objects"
        raise ValueError(f"{path}, line {number + error.lineno - 1}: {why}") from None
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
    try:
        with unlogged("datasets"):  # it logs errors itself before it raises
            yield
    except ConnectionError as error:
        raise ValueError(
            f"{corpus.path}: the data set cannot be reached ({_one_line(error)}). Without a network, pass a local file "
            "in its place: a .txt, .jsonl, .csv or .parquet, or a folder that `hf download --repo-type dataset` filled"
        ) from error
    except Exception as error:  # readers of several formats and a network client, with no common class of errors
        reason = _one_line(error)
        if "column names don't match" in reason:  # of two files; `datasets` prints the schemas of both
            reason = "its files have different columns; name one of them, or a folder of files with the same"
        raise ValueError(f"{corpus.path}: cannot be read as a data set: {reason}") from error


def _open(datasets: Any, corpus: Corpus) -> Any:
    if corpus.reader:
        options = {"sep": "\t"} if ".tsv" in corpus.path.lower() else {}
        return datasets.load_dataset(corpus.reader, data_files=corpus.path, streaming=True, **options)
    saved = Path(corpus.path)
    # `save_to_disk` leaves state.json for a data set and dataset_dict.json for one with splits.
    if (saved / "state.json").is_file():
        return datasets.load_from_disk(corpus.path).to_iterable_dataset()
    if (saved / "dataset_dict.json").is_file():
        return {split: part.to_iterable_dataset() for split, part in datasets.load_from_disk(corpus.path).items()}
    # A .json file beside others is often about them.
    kinds = sorted({file.suffix for file in saved.rglob("*")} & {".txt", ".jsonl", ".csv", ".tsv", ".parquet"})
    if len(kinds) > 1:
        warn(f"{saved}: has {listed(kinds)} files, of which one kind is read; name a file, or a folder of one kind")
    return datasets.load_dataset(corpus.path, corpus.config, streaming=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_CHATS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # ShareGPT's names

Document = tuple[Tensor, bool]
"""int64 `[tokens]`, and whether it still needs an end-of-text token."""


def read_documents(items: Iterable[Any], tokenizer: Any | None, name: str, column: str | None) -> Iterator[Document]:
    """Yields the documents in `items`, in order, from `column` of records; documents without a token are left out."""
    for item in items:
        yield from (each for each in _documents(item, tokenizer, name, column) if len(each[0]))


def _documents(item: Any, tokenizer: Any, name: str, column: str | None) -> Iterator[Document]:
    if item is None:  # an empty cell
        return
    is_chat = isinstance(item, Sequence) and bool(item)
    is_chat = is_chat and all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in item)
    if tokenizer is None and (is_chat or isinstance(item, str)):
        raise ValueError(f"{name}: a text needs the model's tokenizer; without one, give token ids")
    if isinstance(item, str):
        # verbose=False: a document may well be longer than the model's context, and is about to be cut.
        yield _ids(tokenizer(item, verbose=False)["input_ids"], name), True
    elif isinstance(item, Mapping):
        if column is None and "input_ids" in item:
            yield from _id_documents(item["input_ids"], item.get("attention_mask"), name)
        else:
            yield from _documents(item[_choose_column(item, column, name)], tokenizer, name, column)
    elif isinstance(item, Tensor | np.ndarray):
        yield from _id_documents(item, None, name)
    elif not isinstance(item, Sequence):
        raise ValueError(
            f"{name}: cannot take tokens from {type(item).__name__}; give texts, chats, token ids or dicts of input_ids"
        )
    elif is_chat:  # before ids: both are lists
        yield chat_ids(item, tokenizer, name), False
    elif item and all(isinstance(i, int | np.integer) for i in item):
        yield _ids(item, name), False
    else:
        # (inputs, targets), which torch's own collation turns into a list of two batches.
        pair = bool(item) and isinstance(item[0], Tensor) and (isinstance(item, tuple) or item[0].dim() == 2)
        for part in item[:1] if pair else item:
            yield from _documents(part, tokenizer, name, column)


def _choose_column(record: Mapping[str, Any], column: str | None, name: str) -> str:
    """Returns the column of `record` that holds its document: the chats, else `text`, else the only one of text."""
    if column is None:
        texts = [key for key, value in record.items() if isinstance(value, str)]
        usual = [key for key in (*_CHATS, "text") if record.get(key) is not None]
        empty = next((key for key in (*_CHATS, "text") if key in record), None) if not texts else None
        column = next(iter(usual), texts[0] if len(texts) == 1 else empty)
    if column is None or column not in record:
        problem = f"no column {column!r}" if column else "no column of text that stands out"
        raise ValueError(
            f"{name}: {problem}; its columns are {', '.join(record)}. Name one, as in data.jsonl#text or column="
        )
    return column


def _id_documents(ids: Any, mask: Any | None, name: str) -> Iterator[Document]:
    """Yields ids `[tokens]` or `[documents, tokens]`, as tensor, array or ragged lists, without masked tokens."""
    nested = ids.ndim == 2 if isinstance(ids, Tensor | np.ndarray) else bool(ids) and np.ndim(ids[0]) > 0
    rows, masks = (ids, mask) if nested else ([ids], [mask])
    for i, row in enumerate(rows):
        document = _ids(row, name)
        shown = None if masks is None else masks[i]
        yield (document if shown is None else document[torch.as_tensor(shown).bool().cpu()]), False


def _ids(values: Any, name: str, dims: tuple[int, ...] = (1,)) -> Tensor:
    ids = torch.as_tensor(values).cpu()
    integer = not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool)
    if ids.dim() not in dims or not (integer or ids.numel() == 0):
        raise ValueError(
            f"{name}: expected token ids, integers [tokens] or [documents, tokens]; found {ids.dtype} {list(ids.shape)}"
        )
    return ids.long()


def chat_ids(turns: Sequence[Mapping[str, Any]], tokenizer: Any, name: str, *, ask: bool = False) -> Tensor:
    """Returns the token ids of a chat through the tokenizer's template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{name}: its chats need a chat template, which the model's tokenizer does not have; "
            "name a column of text with #COLUMN, or set tokenizer.chat_template"
        )
    messages = [
        turn if "role" in turn else {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value", "")}
        for turn in turns
    ]
    try:
        options = {"add_generation_prompt": True} if ask else {}
        return _ids(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options), name)
    except Exception as error:  # a template is a program of the model's author, and fails as it likes
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: the tokenizer's chat template refuses a chat: {why}") from error


def start_token(tokenizer: Any | None) -> int | None:
    """Returns the start token (BOS) with which the tokenizer begins every text; None where it begins with none."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if tokenizer is None or bos is None:
        return None
    # Tokenizers may name a start token that they do not write, as GPT-2's does: try a text.
    ids = tokenizer("a", verbose=False)["input_ids"]
    return int(bos) if len(ids) > 1 and int(ids[0]) == bos else None


def cut_rows(ids: Tensor, seqlen: int, start: int | None = None) -> Tensor:
    """Returns the rows of `seqlen` tokens from documents `[documents, tokens]`, which no row crosses.

    With a start token, every row begins with it, and one that a document begins with already is not doubled.
    """
    if start is None:
        return ids[:, : ids.shape[1] // seqlen * seqlen].reshape(-1, seqlen)
    if seqlen == 1:
        raise ValueError(f"seqlen=1: every row begins with token {start} and would hold nothing else; raise seqlen")
    # Rows are cut one token shorter and the start token is put before each.
    if bool((ids[:, 0] == start).all()):
        ids = ids[:, 1:]
    rows = cut_rows(ids, seqlen - 1)
    return torch.cat([rows.new_full((len(rows), 1), start), rows], dim=1)


def pack_rows(
    documents: Iterable[Document], end: int | None, samples: int | None, seqlen: int, name: str, start: int | None
) -> Tensor:
    """Returns rows cut every `seqlen` tokens from the chain of all documents, texts closed by the token `end`."""
    parts: list[Tensor] = []
    tokens, count, texts = 0, 0, False
    for ids, is_open in documents:
        texts |= is_open
        # Some tokenizers close texts themselves.
        if is_open and end is not None and int(ids[-1]) != end:
            ids = torch.cat([ids, torch.tensor([end], device="cpu")])
        parts.append(ids)
        tokens, count = tokens + len(ids), count + 1
        if samples is not None and tokens >= samples * seqlen:  # a stream of terabytes is read no further
            break
    if not count:
        raise ValueError(f"{name}: empty, it holds no text and no token")
    rows = cut_rows(torch.cat(parts)[None], seqlen, start if texts else None)
    _check_length(rows, samples or 1, seqlen, f"{name}: too short: {count} document(s) with {tokens}", 1, tokens)
    return rows[:samples]


def _check_length(rows: Tensor, needed: int, seqlen: int, named: str, documents: int, tokens: int) -> None:
    """Raises ValueError, with the ways out, where `documents` of so many `tokens` gave fewer rows than needed."""
    shorter = tokens // -(-needed // documents)
    ways = [f"samples to {len(rows)}"] * (len(rows) > 0) + [f"seqlen to {shorter}"] * (shorter > 1)
    if len(rows) < needed:
        raise ValueError(
            f"{named} tokens give {len(rows)} rows of {seqlen}; {needed} row(s) need {needed * seqlen} tokens. Give a "
            f"longer text{', or lower ' * bool(ways)}{' or '.join(ways)}"
        )


def whole_rows(documents: Iterable[Document], samples: int | None, seqlen: int, name: str) -> Tensor:
    """Returns the beginning of every document that has `seqlen` tokens."""
    rows: list[Tensor] = []
    count = longest = 0
    for ids, _ in documents:
        count, longest = count + 1, max(longest, len(ids))
        if len(ids) >= seqlen:
            rows.append(ids[:seqlen])
        if len(rows) == samples:
            break
    if not count:
        raise ValueError(f"{name}: empty, it holds no text and no token")
    if len(rows) < (samples or 1):
        raise ValueError(
            f"{name}: {len(rows)} of {count} document(s) have {seqlen} tokens (the longest has {longest}); "
            f"{samples or 1} are needed. Pack them (pack=True), or lower samples or seqlen"
        )
    return torch.stack(rows)


Text = str | Path | Tensor

FEW = 16
"""Tokens of a row that are enough to try a model on."""


@in_own_modes
def calibration_rows(
    source: Text | Iterable[Any] | None, tokenizer: Any | None = None, *, samples: int | None, seqlen: int,
    seed: int = 0, model: nn.Module | None = None, progress: Callable[[int, int], None] | None = None,
    shuffle: bool = False, pack: bool = True, config: str | None = None, split: str | None = None,
    column: str | None = None,
) -> Tensor:  # fmt: skip
    """Returns calibration rows from any source.

    Args:
        source: None or `"self"` for text that `model` writes; a text, a token or a data set file, a folder of these,
            `"hf:NAME[:CONFIG][:SPLIT][#COLUMN]"`; a tensor of token ids; or an iterable of texts, chats, records or
            batches, such as the training script's data loader, which is read only as far as the rows need.
        tokenizer: a Hugging Face tokenizer; None will do for token ids.
        samples: number of rows; None takes all of them, and is not for `"self"`.
        seqlen: tokens in a row.
        seed: the seed of the shuffling and of the model's draws.
        model: writes the text of `"self"`.
        progress: a function that is called as `progress(tokens done, tokens in all)` while the model writes.
        shuffle: draws rows from a whole text, and documents of other sources within a window, instead of the first.
        pack: cuts the chain of all documents; False takes the beginning of every document that is long enough. A
            text or token file is cut by `token_rows` either way.
        config, split, column: parts of a data set's name; they override the parts in the source's name.

    Returns:
        int64 `[samples, seqlen]`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the source cannot be used; the message names the reason and the way out.
    """
    _check_size(samples, seqlen)
    if source is None or (isinstance(source, str) and source == "self"):
        if model is None or samples is None:
            raise ValueError("self: text that a model writes itself needs the model and a number of samples")
        session = Session(progress=progress and (lambda stage, done, total: progress(done, total)), seed=seed)
        return generate_rows(model, tokenizer, samples=samples, seqlen=seqlen, session=session)
    corpus = parse_corpus(str(source)) if isinstance(source, str | Path) else None
    if corpus is None and isinstance(source, str | Path | Tensor):
        if isinstance(source, str) and re.fullmatch(r"[\w-]+/[\w-]+", source) and not Path(source).exists():
            raise FileNotFoundError(f"{source}: no such text file; a data set of the Hugging Face hub is hf:{source}")
        return token_rows(source, tokenizer, samples=samples, seqlen=seqlen, seed=seed if shuffle else None)
    if corpus is not None:
        named = {"config": config, "split": split, "column": column}
        corpus = replace(corpus, **{key: value for key, value in named.items() if value is not None})
        name, records = str(source), read_records(corpus, seed=seed if shuffle else None)
        documents = read_documents(records, tokenizer, name, corpus.column)
    else:
        name = f"calibration data ({type(source).__name__})"
        if not isinstance(source, Iterable):
            raise ValueError(f"{name}: give a file, a data set, token ids or an iterable of texts or batches")
        # Iterating over a single batch would give the names of its fields.
        items = [source] if isinstance(source, Mapping | np.ndarray) else source
        documents = read_documents(items, tokenizer, name, column)
        documents = shuffled(documents, seed) if shuffle else documents
    if pack:
        end = getattr(tokenizer, "eos_token_id", None)
        rows = pack_rows(documents, end, samples, seqlen, name, start_token(tokenizer))
    else:
        rows = whole_rows(documents, samples, seqlen, name)
    if tokenizer is not None:
        _check_vocabulary(rows, len(tokenizer), name)
    return rows


def token_rows(
    text: Text, tokenizer: Any | None, *, samples: int | None, seqlen: int, seed: int | None = None
) -> Tensor:
    """Returns the rows of token ids from a text file or from ids that exist already.

    Args:
        text: a UTF-8 text file, whose rows begin with BOS where the tokenizer's texts do; a `.safetensors` file of
            token ids, with `:NAME` after it where it holds several tensors; or a tensor of token ids, `[tokens]` or
            `[documents, tokens]` (no row crosses documents).
        tokenizer: a Hugging Face tokenizer; None will do for ids, which are then not checked against a vocabulary.
        samples: number of rows; None takes all of them.
        seqlen: tokens in a row.
        seed: None takes the first rows; a number draws rows from the whole text, the same ones for the same seed.

    Returns:
        int64 `[samples, seqlen]`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is empty, not UTF-8 or not token ids; it gives fewer rows than `samples`; an id lies
            outside the tokenizer's vocabulary.
    """
    _check_size(samples, seqlen)
    name = "token tensor" if isinstance(text, Tensor) else str(text)
    ids, start = _read_ids(text, tokenizer, name)
    if tokenizer is not None:
        _check_vocabulary(ids, len(tokenizer), name)
    rows = cut_rows(ids, seqlen, start)
    tokens = " × ".join(str(n) for n in ids.shape if n != 1) or "1"
    _check_length(rows, samples or 1, seqlen, f"{name}: too short: {tokens}", *ids.shape)
    if seed is not None:
        # A generator of its own: the global one would make rows depend on what ran before.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")
        return rows[order[:samples]].clone()
    return rows[:samples].clone()


def _read_ids(text: Text, tokenizer: Any | None, name: str) -> tuple[Tensor, int | None]:
    """Returns token ids as int64 `[documents, tokens]`, and the start token that every row of them is to have."""
    start = None
    if isinstance(text, Tensor):
        ids = text
    elif ".safetensors" in Path(name).suffix:
        ids = _read_safetensors(name)
    else:
        ids = _tokenize(Path(text), tokenizer)
        start = start_token(tokenizer)
    ids = _ids(ids, name, (1, 2))
    if ids.numel() == 0:
        raise ValueError(f"{name}: empty, it holds no token")
    return ids.reshape(-1, ids.shape[-1]), start


def _read_safetensors(name: str) -> Tensor:
    stem, _, key = name.removesuffix(".safetensors").partition(".safetensors:")
    path = f"{stem}.safetensors"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            key = names[0] if not key and len(names) == 1 else key
            if key not in names:
                held = ", ".join(names) or "none"
                raise ValueError(f"{path}: name one of its tensors as {path}:NAME; it holds {held}")
            return file.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file: {error}") from None


def _tokenize(path: Path, tokenizer: Any | None) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such text file")
    text = read_utf8(path)
    if not text.strip():
        raise ValueError(f"{path}: empty, it holds no text")
    if tokenizer is None:
        raise ValueError(f"{path}: a text needs the model's tokenizer; without one, give a .safetensors of token ids")
    # verbose=False: the whole text is longer than the model's context, and is about to be cut.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64, device="cpu")


def _check_vocabulary(ids: Tensor, size: int, name: str, owner: str = "tokenizer") -> None:
    low, high = (int(n) for n in torch.aminmax(ids))
    # An id beyond the embedding would be an index error on a CPU and an asynchronous device assert on a GPU.
    if low < 0 or high >= size:
        bad = high if high >= size else low
        raise ValueError(
            f"{name}: token id {bad} is outside the {owner}'s vocabulary of {size}; "
            "the ids were made with another tokenizer"
        )


def trial_rows(rows: Tensor) -> Tensor:
    """Returns a small part of the calibration rows for trial runs: the first tokens, or a whole input."""
    if not rows.is_floating_point():
        return rows[:1, :FEW]
    # Vectors are one token each; images and sequences have many.
    return rows[:FEW] if rows.dim() == 2 else rows[:1]


def check_ids(rows: Tensor, model: nn.Module) -> None:
    """Raises ValueError where `rows` holds token ids that `model` has no embedding for, or more than its positions."""
    if isinstance(rows, Tensor) and rows.dim() == 2 and not rows.is_floating_point():
        check_positions(rows.shape[1], getattr(model, "config", None), type(model).__name__)
    find = getattr(model, "get_input_embeddings", None)
    try:
        weight = getattr(find() if callable(find) else None, "weight", None)
    except (NotImplementedError, AttributeError):  # transformers' answer for a model that looks up no tokens
        weight = None
    if isinstance(weight, Tensor) and rows.numel() and not rows.is_floating_point():
        _check_vocabulary(rows, len(weight), "calibration rows", "model")


def check_positions(tokens: int, config: Any, owner: str) -> None:
    """Raises ValueError for rows of more `tokens` than the positions in a transformers `config`.

    A table of positions ends there. Rotary positions go on, and statistics would be of inputs that no training saw.
    """
    positions = getattr(text_config(config), "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < tokens:
        raise ValueError(
            f"rows of {tokens} tokens are longer than the {positions} positions of {owner}; "
            f"use a seqlen of at most {positions}"
        )


def _check_size(samples: int | None, seqlen: int) -> None:
    if seqlen < 1 or (samples is not None and samples < 1):
        raise ValueError(f"samples={samples} and seqlen={seqlen} must be at least 1")
    # torch's sizes are int64: refuse before an allocation overflows.
    if (samples or 1) * seqlen >= 2**62:
        raise ValueError(f"samples={samples} and seqlen={seqlen}: more tokens than there are numbers for")
