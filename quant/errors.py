"""The errors that are the user's to solve."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot be used; the message is one line that says what, and the way out.

    The command line prints it without a traceback and ends with exit code 2.
    """


def counted(n: int, noun: str) -> str:
    """`1 layer`, `2 layers`: how messages count."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
