"""UserError is the error that a user can solve; `counted` is how messages count."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot be used; the message is one line that says what, and the way out.

    The command line prints it without a traceback and ends with exit code 2.
    """


def counted(n: int, noun: str) -> str:
    """`1 layer`, `2 layers`: how messages count."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def megabytes(nbytes: float) -> str:
    """Decimal units, three to four digits: '86.5 MB', '1.23 GB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            value = nbytes / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{nbytes:.0f} B"
