"""JSON for files and for `--json`: a float that is NaN or infinite becomes null.

Python would write it as the word NaN or Infinity, which the standard does not have and other readers refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.base.atomic import write_atomically


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
