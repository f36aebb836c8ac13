"""`check_tokens` compares a tokenizer that transformers made of a GGUF file with the metadata of that file.

transformers builds such a tokenizer from parts, by rules that change from version to version. One that starts no text
with its first token, or that has the vocabulary of another model, raises no error: calibration and evaluation then run
on garbage. The file itself has the right values:

    tokenizer.ggml.tokens, .token_type         the token of each id, and which of them are control tokens
    tokenizer.ggml.merges                      pairs of a byte-pair encoding, the first to be merged first
    tokenizer.ggml.add_bos_token, add_eos_…    whether a text gets these tokens; without the key, llama.cpp's defaults

A text is encoded and decoded besides, where the vocabulary can spell any text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from quant.base.errors import UserError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # llama.cpp's types of tokens; the others are never matched
_BEGIN_BY_DEFAULT = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Kinds of pre-tokenization with which llama.cpp puts BOS before a text if `add_bos_token` is missing."""
_TEXT = "Hello world, it is 1999:\n  def naïve(café):\n\treturn '日本語' + \"🙂\""


def check_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Gives a tokenizer its file's flags for BOS and EOS, and refuses it where it still disagrees with the file.

    Args:
        tokenizer: a tokenizer of transformers, made of the file.
        fields: the fields of the file, `gguf.GGUFReader(…).fields`.

    Raises:
        UserError: the message names the first difference.
    """

    def metadata(key: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    model, tokens = metadata("model"), metadata("tokens", ())
    types = metadata("token_type") or [_NORMAL] * len(tokens)
    problems = [
        *_vocabulary_problems(tokenizer, tokens, types),
        *_merge_problems(tokenizer, metadata("merges") if model == "gpt2" else None),
    ]
    # transformers follows the reference of Gemma 4, whose chat template writes BOS, and not its file.
    if model != "gemma4":
        by_default = model == "llama" or metadata("pre") in _BEGIN_BY_DEFAULT
        for name, default in {"bos": by_default, "eos": False}.items():
            adds, token = bool(metadata(f"add_{name}_token", default)), metadata(f"{name}_token_id")
            problems += _edge_problems(tokenizer, name, token, adds=adds)
    if model in ("gpt2", "llama", "gemma4") and _spells_any_text(tokens, model):
        problems += _round_trip_problems(tokenizer)
    if problems:
        raise UserError(problems[0])


def _vocabulary_problems(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> Iterator[str]:
    """Yields the ids that have another token in the tokenizer than in the file.

    Several ids may have one token: any will do.
    """
    matched = [i for i, kind in enumerate(types) if kind in (_NORMAL, _CONTROL, _USER_DEFINED, _BYTE)]
    read = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    ids: dict[bytes, int] = {}
    for token in tokens:
        key = _spelling(token)
        ids[key] = ids.get(key, 0) + 1
    for i in matched:
        # T5's files call its sentinels, <extra_id_0> and so on, [PAD32000].
        if tokens[i].startswith("[PAD") or ids[_spelling(tokens[i])] > 1:
            continue
        if read[i] is None or _spelling(read[i]) != _spelling(tokens[i]):
            yield f"token {i} is {tokens[i]!r} in the file, and {read[i]!r} as it is read"
            return


def _merge_problems(tokenizer: Any, merges: Sequence[str] | None) -> Iterator[str]:
    """Yields the first pair that is merged in another order than the file says."""
    if not merges:
        return
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    read = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    if len(read) != len(merges):
        yield f"the file has {len(merges):,} merges, and {len(read):,} are read"
        return
    for i, (ours, theirs) in enumerate(zip(merges, read, strict=True)):
        if ours != theirs:
            yield f"merge {i} is {ours!r} in the file, and {theirs!r} as it is read"
            return


def _edge_problems(tokenizer: Any, name: str, token: int | None, *, adds: bool) -> Iterator[str]:
    """Yields a problem if BOS or EOS is not added as the file says, after the tokenizer was set up for it."""
    if token is None or _adds(tokenizer, name, token) == adds:
        return
    if hasattr(tokenizer, f"add_{name}_token"):
        # A property of fast tokenizers, which changes what surrounds a text; it is saved with the tokenizer.
        setattr(tokenizer, f"add_{name}_token", adds)
    if _adds(tokenizer, name, token) != adds:
        verb = "adds no" if adds else "adds"
        yield f"it {verb} {name.upper()} (token {token}) to a text, against the file's add_{name}_token"


def _adds(tokenizer: Any, name: str, token: int) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0 if name == "bos" else -1] == token


def _spells_any_text(tokens: Sequence[str], model: str) -> bool:
    """Returns whether each byte has a token, in the byte alphabet or as <0x41>."""
    names = set(tokens)
    return names.issuperset(_alphabet() if model == "gpt2" else [f"<0x{byte:02X}>" for byte in range(256)])


def _round_trip_problems(tokenizer: Any) -> Iterator[str]:
    ids = tokenizer(_TEXT)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if text.strip() != _TEXT:
        yield f"{_TEXT!r} is {text!r} after it was encoded and decoded"


def _spelling(token: str) -> bytes:
    """Returns the bytes that a token stands for: transformers spells some tokens in another alphabet than the file."""
    alphabet = _alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.replace("\u2581", " ").encode("utf-8", "surrogateescape")


@cache
def _alphabet() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's byte alphabet, which spells bytes by printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}
