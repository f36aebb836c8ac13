"""This file cuts rows of two kinds of text that every Python has with it: its library's source and its reference.

Neither is in a data set that toolkits calibrate on, nor among the samples that this package ships. The reference is the
prose that `help()` prints on topics of the language. Files and topics are drawn by a fixed seed. What is used to choose
a method must not measure it afterwards: `part` names the half of the files and topics that rows come from.
"""

from __future__ import annotations

import html
import random
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

import quant

Part = Literal["choose", "report"]
SEQLEN = 512
TOKENS = Path(__file__).parent / "data" / "smollm2_wikitext2_512.safetensors"  # of SmolLM2's vocabulary
_PAGES = {"calibration": "calibration.txt", "eval": "evaluation.txt"}  # the same texts, for other tokenizers
_CHARACTERS = 6000  # of a file, so that a few rows hold several


def python_rows(tokenizer: Any, rows: int, part: Part, seqlen: int = SEQLEN) -> torch.Tensor:
    """Rows of Python source, int64 `[rows, seqlen]`."""
    files = _drawn(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), part)
    texts = (file.read_text(encoding="utf-8", errors="ignore")[:_CHARACTERS] for file in files)
    return quant.calibration_rows(texts, tokenizer, samples=rows, seqlen=seqlen)


def reference_rows(tokenizer: Any, rows: int, part: Part, seqlen: int = SEQLEN) -> torch.Tensor:
    """Rows of prose on the language, int64 `[rows, seqlen]`."""
    from pydoc_data.topics import topics

    texts = (topics[name][:_CHARACTERS] for name in _drawn(sorted(topics), part))
    return quant.calibration_rows(texts, tokenizer, samples=rows, seqlen=seqlen)


def wikitext_rows(part: str, model: str, tokenizer: Any, rows: int, seqlen: int = SEQLEN) -> torch.Tensor:
    """Rows of WikiText-2, int64 `[rows, seqlen]`: `calibration` of its validation text, `eval` of its test text."""
    if model == "smollm2-135m":
        return quant.token_rows(f"{TOKENS}:{part}", None, samples=rows, seqlen=seqlen)
    return page_rows(TOKENS.with_name(_PAGES[part]), tokenizer, rows, seqlen)


def page_rows(file: Path, tokenizer: Any, rows: int, seqlen: int = SEQLEN) -> torch.Tensor:
    """The first rows of a text file, int64 `[rows, seqlen]`; tags of HTML are left out. A short file gives fewer."""
    content = file.read_text(encoding="utf-8")
    if file.suffix in (".html", ".htm"):
        # A page's head holds no sentences of its text.
        content = html.unescape(re.sub(r"\s*<[^>]+>\s*", "\n", content.partition("<body>")[2] or content))
    all_rows = quant.calibration_rows([content.strip()], tokenizer, samples=None, seqlen=seqlen)
    return all_rows[:rows].contiguous()


def _drawn(names: Iterable[Any], part: Part) -> list[Any]:
    """Half of the names in the order of a fixed draw."""
    shuffled = list(names)
    random.Random(1).shuffle(shuffled)
    half = len(shuffled) // 2
    return shuffled[:half] if part == "choose" else shuffled[half:]
