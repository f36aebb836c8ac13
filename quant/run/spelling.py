"""Messages about a request name an option as the user wrote it: `--lm-head` in a command, `lm_head=` in Python."""

from __future__ import annotations

from collections.abc import Callable

Spelling = Callable[[str], str]
"""Spells the name of a field of a request."""

# Fields whose option does not repeat their name; the command has --recipe FILE and --format NAME.
_OPTIONS = {"recipe": "--format", "recipe_file": "--recipe", "plan_file": "--plan", "eval_texts": "--eval"}


def as_option(field: str) -> str:
    """Returns the option of the command `quantize`."""
    return _OPTIONS.get(field) or f"--{field.replace('_', '-')}"


def as_parameter(field: str) -> str:
    """Returns the parameter of `quant.quantize`."""
    return f"{field}="
