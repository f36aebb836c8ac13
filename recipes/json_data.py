"""Dataclasses that inherit from `JsonData` become JSON-ready dicts, and are read from them by their annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints


class JsonData:
    """Base of dataclasses whose fields are numbers, strings, mappings, tuples and lists, or such dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown or a missing field.
        """
        try:
            hints = get_type_hints(cls)
            return cls(**{name: _read(hints.get(name), value) for name, value in fields.items()})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{cls.__name__}: {error}") from None


def _read(kind: Any, value: Any) -> Any:
    """`value`, as `json` gives it, as an annotation has it."""
    if get_origin(kind) is UnionType:  # `X | None`
        return None if value is None else _read(get_args(kind)[0], value)
    if get_origin(kind) in (tuple, list):
        return get_origin(kind)(_read(get_args(kind)[0], item) for item in value)
    return kind.from_dict(value) if isinstance(kind, type) and issubclass(kind, JsonData) else value
