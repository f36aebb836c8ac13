"""Progress of long steps: what a caller is told, and how a step reports its own part of it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""


def reporter(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    """`progress` for one stage, called as `report(done, total)`; None without one."""
    return (lambda done, total: progress(stage, done, total)) if progress else None
