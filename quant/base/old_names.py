"""What names, commands, options and kinds of export are called since: the tables of `old_names.toml`."""

import importlib
import tomllib
import warnings
from pathlib import Path
from typing import Any

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ATTRIBUTES, COMMANDS, OPTIONS, RENAMED, KINDS = (
    _TABLES[kind] for kind in ("attributes", "commands", "options", "renamed", "kinds")
)
OF_PLANS: dict[str, str] = dict.fromkeys(_TABLES["of_plans"]["names"], _TABLES["of_plans"]["now"])


def attribute(name: str) -> Any:
    """Returns what took the place of `quant.name`; AttributeError says what does, or that there never was one."""
    if name not in ATTRIBUTES:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    new = ATTRIBUTES[name]
    if not (new.startswith("quant.") and new.replace(".", "").isidentifier()):
        raise AttributeError(f"quant.{name} is {new} since 0.3")
    warnings.warn(f"quant.{name} is {new} since 0.3", FutureWarning, stacklevel=3)
    module, _, last = new.rpartition(".")
    return getattr(importlib.import_module(module), last)
