"""`UserError` is an error that the user can solve; the functions here write counts, sizes and lists in messages."""

import difflib
import html
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar


def known_names(name: object, choices: Iterable[str], nouns: str = "", *, more: str = "") -> str:
    """Returns the end of an error about an unknown name: `known formats: nvfp4, mxfp4, fp8; did you mean nvfp4?`.

    Without `nouns` the list begins with `known:`; `more` is text directly behind it.
    """
    choices = list(choices)
    suggestion = did_you_mean(name, choices) if isinstance(name, str) else ""
    return f"{f'known {nouns}' if nouns else 'known'}: {', '.join(choices)}{more}{suggestion}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of a message that suggests a name: one that begins with `name`, or else the nearest one."""
    choices, name = list(choices), name.lower()
    longer = [each for each in choices if name and each.startswith(name)]
    # The shortest one first: "nvfp4" means the preset of that name, and not nvfp4a16.
    near = sorted(longer, key=len) or difflib.get_close_matches(name, choices, 1)
    return f"; did you mean {near[0]}?" if near else ""


# Control characters but tab and newline, and what reorders the text after it.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


_IN_COMMAND = ContextVar("_IN_COMMAND", default=False)
# Fields and parameters that are not called like their option.
_OPTIONS = {"formats": "--format", "unsafe_load": "--trust-remote-code"}
_PARAMETERS = {
    "calib": "data", "input": "inputs", "engine_feature": "features", "format": "recipe", "eval": "eval_texts",
}  # fmt: skip


class UserError(ValueError):
    """An input from the user cannot be used; the message names it in one line, with the way out.

    The command line prints it without a traceback and ends with exit code 2.
    """


@contextmanager
def in_command() -> Iterator[None]:
    """Makes `option` spell options as a command takes them while open."""
    before = _IN_COMMAND.set(True)
    try:
        yield
    finally:
        _IN_COMMAND.reset(before)


def option(name: str, value: object = None) -> str:
    """Spells an option and its value in a message: `--kv-cache fp8` in a command, and `kv_cache="fp8"` in Python."""
    if _IN_COMMAND.get():
        words = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
        return words if value is None or value is True else f"{words} {value}"
    parameter = _PARAMETERS.get(name, name)
    text = "" if value is None else str(value)
    if name == "input" and text.count(":") == 2:
        key, _, dims = text.partition(":")
        return f'{parameter}={{"{key}": "{dims}"}}'
    is_literal = re.fullmatch(r"(True|nan|inf|-?[\d.]+|['\"].*)?", text)
    return f"{parameter}={text}" if is_literal else f'{parameter}="{text}"'


# Packages whose frames lie between a call of the user and the place that warns.
_BETWEEN = {"quant", "contextlib", "functools", "torch"}


def warn(message: str) -> None:
    """Warns the user; the line that Python names with it is the first one outside this package and its helpers.

    A fixed `stacklevel` would name a line of ours wherever a call has one more frame than its author knew of. A command
    prints warnings that come from this package without a line.
    """
    level, frame = 2, sys._getframe(1)
    while not _IN_COMMAND.get() and frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def printable(text: str) -> str:
    r"""Shows control characters as `\x1b`, so that names in files cannot command the terminal."""
    return text.translate(_ESCAPED)


def counted(n: int, noun: str) -> str:
    """Returns `1 layer`, `2 layers`: how messages count."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def loss_text(value: float) -> str:
    """Returns a loss in nats with four decimals, or with three significant digits where these would hide it."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


def megabytes(nbytes: float) -> str:
    """Returns bytes in decimal units with three to four digits: '86.5 MB', '1.23 GB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if (value := nbytes / size) >= 1:
            digits = (value < 10) + (value < 100)  # behind the point
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def in_words(seconds: float) -> str:
    """Returns a rough time as a person would say it: 20 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds, -1 if seconds >= 20 else None)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def steps_in_words(steps: Mapping[str, float]) -> str:
    """Returns `3 min: 40 s to write text, 2 min to solve`, from the seconds of each step; no step of none."""
    seconds = {step: max(1.0, needed) for step, needed in steps.items() if needed}
    each = ", ".join(f"{in_words(needed)} to {step}" for step, needed in seconds.items())
    return f"{in_words(sum(seconds.values()))}: {each}"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Returns `a, b and 3 more`: the first `limit` of `names`, and the number of the rest."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a small table for notebooks as HTML, with every cell escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
