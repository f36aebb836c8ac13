"""Documents of token ids: read from texts, chats, records and tensors, and cut into rows.

    "a text"                                     tokenized
    [{"role": "user", "content": …}, …]          through the tokenizer's chat template; ShareGPT's from/value too
    {"input_ids": …, "attention_mask": …}        a training script's batch; padding is left out by the mask
    {"messages": …} {"text": …} …                a record of a data set: its column of chats or of text
    tensor [tokens] or [documents, tokens]       ids
    (inputs, targets)                            the inputs
    a list of any of these                       a batch

Packed documents follow one another and are cut every `seqlen` tokens. An end-of-text token closes each text, as in
pretraining; ids and chats have their own. An unpacked row is the beginning of one document, and documents shorter than
`seqlen` are left out, since padding would add tokens to every statistic that the model never sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quant.calibration.texts.records import SHUFFLE_WINDOW

_CHATS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # ShareGPT's names

Document = tuple[torch.Tensor, bool]
"""int64 `[tokens]`, and whether it still needs an end-of-text token."""


def read_documents(items: Iterable[Any], tokenizer: Any | None, name: str, column: str | None) -> Iterator[Document]:
    """Yields the documents in `items`, in order; documents without a token are left out.

    Args:
        tokenizer: a Hugging Face tokenizer; None will do for ids.
        column: the column of records; None takes the chats, else `text`, else the only column of text.
    """
    for item in items:
        for ids, is_open in _documents(item, tokenizer, name, column):
            if len(ids):
                yield ids, is_open


def _documents(item: Any, tokenizer: Any | None, name: str, column: str | None) -> Iterator[Document]:
    if item is None:  # an empty cell
        return
    if isinstance(item, str):
        # verbose=False: a document may well be longer than the model's context, and is about to be cut.
        yield _ids(_need(tokenizer, name)(item, verbose=False)["input_ids"], name), True
    elif isinstance(item, Mapping):
        if column is None and "input_ids" in item:
            yield from _id_documents(item["input_ids"], item.get("attention_mask"), name)
        else:
            chosen = item[choose_column(item, column, name)]
            yield from _documents(chosen, tokenizer, name, column)
    elif isinstance(item, torch.Tensor | np.ndarray):
        yield from _id_documents(item, None, name)
    elif not isinstance(item, Sequence):
        raise ValueError(
            f"{name}: cannot take tokens from {type(item).__name__}; give texts, chats, token ids or dicts of input_ids"
        )
    elif _is_chat(item):  # before ids: both are lists
        yield chat_ids(item, _need(tokenizer, name), name), False
    elif item and all(isinstance(i, int | np.integer) for i in item):
        yield _ids(item, name), False
    else:
        # (inputs, targets), which torch's own collation turns into a list of two batches.
        pair = bool(item) and isinstance(item[0], torch.Tensor) and (isinstance(item, tuple) or item[0].dim() == 2)
        for part in item[:1] if pair else item:
            yield from _documents(part, tokenizer, name, column)


def choose_column(record: Mapping[str, Any], column: str | None, name: str) -> str:
    """Returns the column of `record` that holds its document."""
    if column is None:
        texts = [key for key, value in record.items() if isinstance(value, str)]
        usual = [key for key in (*_CHATS, "text") if record.get(key) is not None]
        column = next(iter(usual), texts[0] if len(texts) == 1 else None)
    if column is None or column not in record:
        problem = f"no column {column!r}" if column else "no column of text that stands out"
        columns = ", ".join(record)
        raise ValueError(f"{name}: {problem}; its columns are {columns}. Name one, as in data.jsonl#text")
    return column


def _need(tokenizer: Any | None, name: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{name}: a text needs the model's tokenizer; without one, give token ids")
    return tokenizer


def _id_documents(ids: Any, mask: Any | None, name: str) -> Iterator[Document]:
    """Yields ids `[tokens]` or `[documents, tokens]`, as tensor, array or ragged lists, without masked tokens."""
    nested = ids.ndim == 2 if isinstance(ids, torch.Tensor | np.ndarray) else bool(ids) and not _is_number(ids[0])
    rows, masks = (ids, mask) if nested else ([ids], [mask])
    for i, row in enumerate(rows):
        document = _ids(row, name)
        shown = None if masks is None else masks[i]
        yield (document if shown is None else document[torch.as_tensor(shown).bool().cpu()]), False


def _ids(values: Any, name: str) -> torch.Tensor:
    ids = torch.as_tensor(values).cpu()
    integer = not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool)
    if ids.dim() != 1 or not (integer or ids.numel() == 0):
        raise ValueError(
            f"{name}: expected token ids, integers [tokens] or [documents, tokens]; found {ids.dtype} {list(ids.shape)}"
        )
    return ids.long()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _is_chat(item: Sequence[Any]) -> bool:
    return bool(item) and all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in item)


def chat_ids(turns: Sequence[Mapping[str, Any]], tokenizer: Any, name: str, *, ask: bool = False) -> torch.Tensor:
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


def shuffled(documents: Iterable[Document], seed: int) -> Iterator[Document]:
    """Yields the documents in a random order, each drawn from the next `SHUFFLE_WINDOW` ones."""
    generator = random.Random(seed)
    window: list[Document] = []
    for document in documents:
        if len(window) == SHUFFLE_WINDOW:
            i = generator.randrange(SHUFFLE_WINDOW)
            window[i], document = document, window[i]
            yield document
        else:
            window.append(document)
    generator.shuffle(window)
    yield from window


def start_token(tokenizer: Any | None) -> int | None:
    """Returns the start token (BOS) with which the tokenizer begins every text; None where it begins with none."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if tokenizer is None or bos is None:
        return None
    # Tokenizers may name a start token that they do not write, as GPT-2's does: try a text.
    ids = tokenizer("a", verbose=False)["input_ids"]
    return int(bos) if len(ids) > 1 and int(ids[0]) == bos else None


def cut_rows(ids: torch.Tensor, seqlen: int, start: int | None = None) -> torch.Tensor:
    """Returns the rows of `seqlen` tokens from documents `[documents, tokens]`.

    No row crosses documents, remainders are dropped.

    With a start token, every row begins with it, and one that a document begins with already is not doubled.
    """
    if start is None:
        usable = ids.shape[1] // seqlen
        return ids[:, : usable * seqlen].reshape(-1, seqlen)
    if seqlen == 1:
        raise ValueError(f"seqlen=1: every row begins with token {start} and would hold nothing else; raise seqlen")
    # Rows are cut one token shorter and the start token is put before each.
    if bool((ids[:, 0] == start).all()):
        ids = ids[:, 1:]
    rows = cut_rows(ids, seqlen - 1)
    return torch.cat([rows.new_full((len(rows), 1), start), rows], dim=1)


def pack_rows(
    documents: Iterable[Document],
    end: int | None,
    samples: int | None,
    seqlen: int,
    name: str,
    start: int | None = None,
) -> torch.Tensor:
    """Returns rows cut every `seqlen` tokens from the chain of all documents; no more are read than the rows need.

    Args:
        end: id of the token that closes a text; None puts in none.
        samples: number of rows; None takes all of them.
    """
    parts: list[torch.Tensor] = []
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
    _check_any(count, name)
    rows, needed = cut_rows(torch.cat(parts)[None], seqlen, start if texts else None), samples or 1
    if len(rows) < needed:
        raise ValueError(
            f"{name}: too short: {count} document(s) with {tokens} tokens give {len(rows)} rows of {seqlen}; "
            f"{needed} row(s) need {needed * seqlen} tokens. Give more text, or lower samples or seqlen"
        )
    return rows[:samples]


def whole_rows(documents: Iterable[Document], samples: int | None, seqlen: int, name: str) -> torch.Tensor:
    """Returns the beginning of every document that has `seqlen` tokens."""
    rows: list[torch.Tensor] = []
    count = longest = 0
    for ids, _ in documents:
        count, longest = count + 1, max(longest, len(ids))
        if len(ids) >= seqlen:
            rows.append(ids[:seqlen])
        if len(rows) == samples:
            break
    _check_any(count, name)
    if len(rows) < (samples or 1):
        raise ValueError(
            f"{name}: {len(rows)} of {count} document(s) have {seqlen} tokens (the longest has {longest}); "
            f"{samples or 1} are needed. Pack them (pack=True), or lower samples or seqlen"
        )
    return torch.stack(rows)


def _check_any(count: int, name: str) -> None:
    if not count:
        raise ValueError(f"{name}: empty, it holds no text and no token")
