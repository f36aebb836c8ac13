"""JSON files are read and written here; every mistake in one from others becomes an error of one line that names it.

Python's reader accepts documents that break the code behind it: lists nested up to the end of the stack, and halves
of characters that no file and no terminal can hold. They are refused. Its writer has the words NaN and Infinity, which
the standard does not have and other readers refuse; here they become null.

Dataclasses that inherit from `JsonData` become JSON-ready dicts, and are read from them by their annotations. Anybody
may have edited a file, so every value is compared with the annotation of its field. This is not done by pydantic or
msgspec, because the core of this package installs nothing beyond torch, numpy, safetensors, click, rich and jinja2.
"""

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from quant.base.atomic import write_atomically
from quant.base.errors import known_names

_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_hints = cache(get_type_hints)
_LARGEST = 2**63  # of whole numbers, which other programs keep in 64 bits


class JsonData:
    """Base of dataclasses of numbers, strings, `StrEnum`, mappings, tuples, lists, and other such dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready fields."""
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Undoes `to_dict`; ValueError, which names the field, for one that is unknown, missing or of another type."""
        check_fields(fields, cls, cls.__name__)
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
        return cls(**{name: typed(hints[name], value, name) for name, value in fields.items()})


def check_fields(fields: Any, cls: type, where: str, more: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError, which begins with `where`, for fields that are neither a dataclass's nor names in `more`."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: expected an object with fields, not {reprlib.repr(fields)}")
    own = {field.name: field for field in dataclasses.fields(cls)}
    names = [*own, *(more or ())]
    if unknown := sorted(set(fields) - set(names)):
        raise ValueError(f"{where}: unknown field(s) {', '.join(unknown)}; {known_names(unknown[0], names, 'fields')}")
    needed = {n for n, f in own.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(needed - set(fields)):
        raise ValueError(f"{where}: missing field(s) {', '.join(missing)}")


def typed(kind: Any, value: Any, where: str) -> Any:
    """Returns `value` in the type of its annotation: objects become dataclasses; a ValueError begins with `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:  # `X | None`
        assert len(arguments) == 2 and arguments[1] is NoneType
        return None if value is None else typed(arguments[0], value, where)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: expected a list, not {reprlib.repr(value)}")
        return origin(typed(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected an object, not {reprlib.repr(value)}")
        return {key: typed(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if issubclass(kind, JsonData):
        try:
            return kind.from_dict(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise ValueError(f"{where}: expected one of {', '.join(kind)}, not {reprlib.repr(value)}")
        return kind(value)
    # JSON has one kind of number, so 1 is a float too; in Python True is an int, which no file means by a number.
    if not isinstance(value, int | float if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: expected {_NAMES[kind]}, not {reprlib.repr(value)}")
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError(f"{where}: {reprlib.repr(value)} does not fit 64 bits")
    return value


def json_text(value: Any, **options: Any) -> str:
    """Returns dicts, lists, tuples, strings and numbers as JSON; `options` go to `json.dumps`."""
    return json.dumps(finite(value), allow_nan=False, **options)


def write_json(path: str | Path, value: Any, **options: Any) -> None:
    """Writes `value` as JSON that people can read, whole or not at all; arguments as for `json_text`."""
    write_atomically(path, json_text(value, indent=1, **options) + "\n")


def text_as_in_source(value: Any, **options: Any) -> str:
    """Returns `value` as JSON in which NaN and Infinity stay bare words, for files of a model that has them.

    JSON has no such words, but Mamba-2's released config.json has `"time_step_limit": [0.0, Infinity]`, and its readers
    know it. Only documents that were read from a model's own files are written by this.
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
    """Returns the object that `make` makes of a JSON file of a `kind`, such as "a plan"; ValueError names the file."""
    content = Path(path).read_bytes()
    try:
        return make(parse_json(content))
    except ValueError as error:
        raise ValueError(f"{path}: not {kind}: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """Returns a JSON document; ValueError if it is none, or nested too deeply."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")  # editors of Windows begin a file with a byte order mark
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
    level: list[Any] = [[document]]
    for _ in range(DEPTH + 2):
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in children for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {DEPTH} deep")
