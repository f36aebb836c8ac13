"""Text to token rows: what calibration and evaluation feed to a model.

A text is tokenized whole, in one go, and cut into consecutive rows of the same length. Nothing is padded, no
separator and no extra start token is put in, and what is left at the end is dropped. So a row may begin in the
middle of a sentence, every position counts, and the same file gives the same rows everywhere: a perplexity means
something only together with such a cut.

Token ids that were made elsewhere come in as a tensor or a safetensors file and are cut in the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

Text = str | Path | torch.Tensor


def token_rows(
    text: Text,
    tokenizer: Any | None,
    *,
    samples: int | None,
    seqlen: int,
    seed: int | None = None,
) -> torch.Tensor:
    """Rows of token ids from a text file or from ids that exist already.

    Args:
        text: a UTF-8 text file; a `.safetensors` file of token ids, with `:NAME` after it where it holds several
            tensors; or a tensor of token ids, `[tokens]` or `[documents, tokens]` (no row crosses documents).
        tokenizer: a Hugging Face tokenizer; None will do for ids, which are then not checked against a vocabulary.
        samples: number of rows; None takes all that there are.
        seqlen: tokens in a row.
        seed: None takes the first rows; a number draws rows from the whole text, the same ones for the same seed.

    Returns:
        int64 `[samples, seqlen]`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is empty, not UTF-8 or not token ids; it gives fewer rows than `samples`; an id lies
            outside the tokenizer's vocabulary.
    """
    if seqlen < 1 or (samples is not None and samples < 1):
        raise ValueError(f"samples={samples} and seqlen={seqlen} must be at least 1")
    name = "token tensor" if isinstance(text, torch.Tensor) else str(text)
    ids = _read_ids(text, tokenizer, name)
    if tokenizer is not None:
        _check_vocabulary(ids, len(tokenizer), name)
    usable = ids.shape[1] // seqlen
    rows = ids[:, : usable * seqlen].reshape(-1, seqlen)
    wanted = samples or 1
    if len(rows) < wanted:
        tokens = " × ".join(str(n) for n in ids.shape if n != 1) or "1"
        raise ValueError(
            f"{name}: too short: {tokens} tokens give {len(rows)} rows of {seqlen}; "
            f"{wanted} row(s) need {wanted * seqlen} tokens. Give a longer text, or lower samples or seqlen"
        )
    if seed is not None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        return rows[order[:samples]].clone()
    return rows[:samples].clone()


def _read_ids(text: Text, tokenizer: Any | None, name: str) -> torch.Tensor:
    """Token ids as int64 `[documents, tokens]`."""
    if isinstance(text, torch.Tensor):
        ids = text
    elif ".safetensors" in Path(name).suffix:
        ids = _read_safetensors(name)
    else:
        ids = _tokenize(Path(text), tokenizer)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool or ids.dim() not in (1, 2):
        raise ValueError(
            f"{name}: expected token ids, integers [tokens] or [documents, tokens]; found {ids.dtype} {list(ids.shape)}"
        )
    if ids.numel() == 0:
        raise ValueError(f"{name}: empty, it holds no token")
    return ids.long().reshape(-1, ids.shape[-1])


def _read_safetensors(name: str) -> torch.Tensor:
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


def _tokenize(path: Path, tokenizer: Any | None) -> torch.Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such text file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"{path}: empty, it holds no text")
    if tokenizer is None:
        raise ValueError(f"{path}: a text needs the model's tokenizer; without one, give a .safetensors of token ids")
    # verbose=False: the whole text is longer than the model's context, and is about to be cut.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def _check_vocabulary(ids: torch.Tensor, size: int, name: str) -> None:
    low, high = (int(n) for n in torch.aminmax(ids))
    if low < 0 or high >= size:
        bad = high if high >= size else low
        raise ValueError(
            f"{name}: token id {bad} is outside the tokenizer's vocabulary of {size}; "
            "the ids were made with another tokenizer"
        )
