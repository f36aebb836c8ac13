"""`UserError` is an error that the user can solve; the functions here write counts, sizes and lists in messages."""

from __future__ import annotations

from collections.abc import Iterable

# Control characters but tab and newline, and what reorders the text after it.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


class UserError(ValueError):
    """An input from the user cannot be used; the message names it in one line, with the way out.

    The command line prints it without a traceback and ends with exit code 2.
    """


def printable(text: str) -> str:
    r"""Shows control characters as `\x1b`, so that names in files cannot command the terminal."""
    return text.translate(_ESCAPED)


def counted(n: int, noun: str) -> str:
    """Returns `1 layer`, `2 layers`: how messages count."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def megabytes(nbytes: float) -> str:
    """Returns bytes in decimal units with three to four digits: '86.5 MB', '1.23 GB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            value = nbytes / size
            # Digits behind the point: two below 10, one below 100.
            digits = (value < 10) + (value < 100)
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Returns `a, b and 3 more`: the first `limit` of `names`, and the number of the rest."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
