"""A tokenizer of transformers as metadata of a GGUF file, for llama.cpp's own tokenizers of the same kind.

    gpt2     byte-pair encoding over bytes: tokens, merges, and the name of the rule that splits a text before
    llama    SentencePiece's byte-pair encoding: tokens with scores; the pair of the highest score is merged first

llama.cpp knows each rule that splits texts by a name (`tokenizer.ggml.pre`). The rule is in `pre_tokenizer` of
tokenizer.json, from which the name follows; of a rule that is not in `_SPLITS` there is no name to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.base.errors import UserError
from quant.base.extras import require
from quant.base.json_files import json_text
from quant.models.gguf import gguf_reader

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_SPLITS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_WORD + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORD + r"\p{N}" + _REST,): "qwen2",
    (f"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|" + r"\p{N}" + _PATH,): "tekken",
    (f"{_FIRST}{_UPPER}*{_LOWER}+{_SHORT}|{_FIRST}{_UPPER}+{_LOWER}*{_SHORT}|" + r"\p{N}{1,3}" + _PATH,): "gpt-4o",
}
"""llama.cpp's names of rules that split a text, by the steps of `_steps`."""


def vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, by their keys; ids up to `size`, the rows of the embedding, get a token.

    Raises:
        UserError: llama.cpp has no tokenizer of this kind, or no name for the rule by which it splits texts.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{type(tokenizer).__name__}: no tokenizer.json, from which llama.cpp's vocabulary is made")
    described = json.loads(backend.to_str())
    model = described["model"]
    steps = _steps(described.get("pre_tokenizer"))
    over_bytes = any(step == "bytes" for step in steps) or "ByteLevel" in json_text(described.get("pre_tokenizer"))
    if model["type"] != "BPE" or not (over_bytes or model.get("byte_fallback")):
        raise UserError(f"llama.cpp has no tokenizer like this {model['type']} one ({type(tokenizer).__name__})")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    fields: dict[str, Any] = {}
    tokens, types = _tokens(described, size, over_bytes=over_bytes)
    if over_bytes:
        name = _SPLITS.get(steps)
        if name is None:
            raise UserError(f"llama.cpp has no name for the rule by which this tokenizer splits texts: {steps}")
        fields |= {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges}
    else:
        # SentencePiece merges the pair whose token has the highest score; merges are sorted by it.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(pair.replace(" ", ""), rank)
        unranked = {_NORMAL: 0.0}  # single characters; all other types are never merged
        scores = [-float(ranks.get(t, -unranked.get(k, -1000.0))) for t, k in zip(tokens, types, strict=True)]
        fields |= {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores}
        starts_with_space = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0] != "a"
        fields["add_space_prefix"] = starts_with_space
    ids = {
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }  # fmt: skip
    fields |= {f"{name}_token_id": number for name, number in ids.items() if number is not None}
    encoded = tokenizer.encode("a")
    fields["add_bos_token"] = ids["bos"] is not None and encoded[0] == ids["bos"]
    fields["add_eos_token"] = ids["eos"] is not None and encoded[-1] == ids["eos"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if tokenizer.chat_template:
        template = tokenizer.chat_template
        metadata["tokenizer.chat_template"] = template if isinstance(template, str) else template["default"]
    return metadata


def stored_vocabulary(path: Path) -> dict[str, Any]:
    """Returns the tokenizer's metadata of a GGUF file as they are.

    transformers reads some of them otherwise: of SmolLM2's file, not that digits are split.
    """
    require("gguf", "hf")
    fields = gguf_reader()(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


def _tokens(described: Mapping[str, Any], size: int, *, over_bytes: bool) -> tuple[list[str], list[int]]:
    """Returns the token of each id and its type; rows of the embedding beyond the vocabulary are unused."""
    vocabulary, unknown = described["model"]["vocab"], described["model"].get("unk_token")
    added = {entry["id"]: entry for entry in described.get("added_tokens", ())}
    by_id = {number: token for token, number in vocabulary.items()} | {i: e["content"] for i, e in added.items()}
    last = max(by_id, default=-1)
    if last >= size:
        raise UserError(f"the tokenizer has a token {last}, {by_id[last]!r}, and the embedding {size} rows")
    tokens, types = [], []
    for number in range(size):
        token, kind = by_id.get(number, f"[PAD{number}]"), _NORMAL
        if number not in by_id:
            kind = _UNUSED
        elif number in added:
            kind = _CONTROL if added[number]["special"] else _USER_DEFINED
        elif not over_bytes and len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        if token == unknown and not over_bytes:
            kind = _UNKNOWN
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _steps(splitter: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the steps of a pre-tokenizer: the pattern of each split, "digits", and "bytes" for GPT-2's pattern."""
    if splitter is None:
        return ()
    if splitter["type"] == "Sequence":
        return tuple(step for part in splitter["pretokenizers"] for step in _steps(part))
    if splitter["type"] == "Split":
        return (splitter["pattern"].get("Regex", str(splitter["pattern"])),)
    if splitter["type"] == "Digits":
        return ("digits" if splitter["individual_digits"] else "runs of digits",)
    if splitter["type"] == "ByteLevel":
        return ("bytes",) if splitter.get("use_regex", True) else ()
    return (splitter["type"],)
