"""Dataclasses that inherit from `JsonData` become JSON-ready dicts, and are read from them by their annotations.

Anybody may have edited a file, so every value is compared with the annotation of its field: a number in the place of a
text is refused here, with the name of the field, before other code trips over it.

This is not done by pydantic or msgspec, because the core of this package installs nothing beyond torch, numpy,
safetensors, click, rich and jinja2.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from quant.base.errors import known_names

_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_LARGEST = 2**63  # of whole numbers, which other programs keep in 64 bits


class JsonData:
    """Base of dataclasses of numbers, strings, `StrEnum`, mappings, tuples, lists, and other such dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready fields."""
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Undoes `to_dict`.

        Raises:
            ValueError: an unknown or a missing field, or a value of another type; the message names the field.
        """
        check_fields(fields, cls, cls.__name__)
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
        return cls(**{name: typed(hints[name], value, name) for name, value in fields.items()})


def check_fields(fields: Any, cls: type, where: str, more: Mapping[str, Any] | None = None) -> None:
    """Checks the names of a dataclass's fields.

    Args:
        fields: the fields as `json` gives them.
        cls: the dataclass.
        where: begins the message of an error.
        more: further names that are allowed.

    Raises:
        ValueError: no object, an unknown or a missing field.
    """
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
    """Returns `value` in the type of its annotation: lists become tuples, and objects become dataclasses.

    Args:
        kind: the annotation.
        value: the value as `json` gives it.
        where: the field's name, which begins the message of an error.

    Raises:
        ValueError: it has another type, or is a whole number beyond 64 bits.
    """
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


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)
