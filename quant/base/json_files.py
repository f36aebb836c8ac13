"""JSON files from others are read here; every mistake in one becomes an error of one line that names the file.

Python's reader accepts documents that break the code behind it: lists nested up to the end of the stack, and halves
of characters that no file and no terminal can hold. They are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quant.base.atomic import write_atomically

# JSON for files and for `--json`: a float that is NaN or infinite becomes null.
#
# Python would write it as the word NaN or Infinity, which the standard does not have and other readers refuse.


def json_text(value: Any, **options: Any) -> str:
    """Returns `value` as JSON.

    Args:
        value: a value of dicts, lists, tuples, strings and numbers.
        options: options of `json.dumps`.
    """
    return json.dumps(finite(value), allow_nan=False, **options)


def write_json(path: str | Path, value: Any, **options: Any) -> None:
    """Writes `value` as JSON that people can read, whole or not at all; arguments as for `json_text`."""
    write_atomically(path, json_text(value, indent=1, **options) + "\n")


def text_as_in_source(value: Any, **options: Any) -> str:
    """Returns `value` as JSON in which NaN and Infinity stay bare words, for files of a model that has them.

    JSON has no such words, but Mamba-2's released config.json has `"time_step_limit": [0.0, Infinity]`, and its readers
    know it. Only documents that were read from a model's own files are written by this.

    Args:
        value: the value as it was read.
        options: options of `json.dumps`.
    """
    return json.dumps(value, allow_nan=True, **options)


def finite(value: Any, instead: str | None = None) -> Any:
    """Returns a copy of `value` with `instead` for every float that is NaN or infinite, and lists for tuples."""
    if isinstance(value, Mapping):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, instead) for item in value]
    return instead if isinstance(value, float) and not math.isfinite(value) else value


T = TypeVar("T")

DEPTH = 100
"""How deeply lists and objects may be nested."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON writes it, and as Python shows one that has no other half


def read_json(path: str | Path, kind: str, make: Callable[[Any], T]) -> T:
    """Returns the object that `make` makes of a JSON file.

    Args:
        path: the file.
        kind: the kind of file, such as "a plan", for errors.
        make: a function of the document; its ValueError is raised again with the name of the file.

    Raises:
        ValueError: the file is not UTF-8, no JSON, nested too deeply, or refused by `make`; the message names it.
        OSError: it cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        return make(parse_json(content))
    except ValueError as error:
        raise ValueError(f"{path}: not {kind}: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """Returns a JSON document; ValueError if it is none, or nested too deeply."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    check_depth(document)
    if _HALF.search(text) and _HALF.search(str([document]).replace("\\\\", "")):
        raise ValueError("half of a character, as in \\ud800")
    return document


def check_depth(document: Any) -> None:
    """Raises ValueError where lists and objects are nested more than `DEPTH` deep, too deep for recursive readers."""
    level: list[Any] = [document]
    for _ in range(DEPTH + 1):
        level = [item for each in level for item in _items(each) if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {DEPTH} deep")


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
