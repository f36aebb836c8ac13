"""The process of a command: SIGTERM ends it like Ctrl-C, a reader may leave early, and a warning is one line.

A reader that closes the pipe, as in `quant … --json | head`, loses the rest of the text, and nothing else changes.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import click

from quant.base.errors import printable


@atexit.register
def _end_without_collection() -> None:
    """Freezes all objects: otherwise Python looks for garbage among those of torch and transformers, for a second.

    Triton 3.9, whose classes are made by nanobind, reports each of its objects that is not collected as a leak, in
    hundreds of lines.
    """
    triton = sys.modules.get("triton._C.libtriton")
    if triton is None or type(triton.ir.builder).__module__ != "nanobind":
        gc.freeze()


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. It ends like Ctrl-C, so that code that cleans up after Ctrl-C runs."""


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated`; later ones do not disturb the cleaning up.

    Python drops an exception that is raised in a destructor or in the callback of a weak reference. If that happens to
    `Terminated`, it is raised again at the end: a command that got the signal never ends as if it had not.
    """
    # Python delivers signals to the main thread and refuses handlers from any other.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        # A second signal during the clean-up would leave half-deleted directories.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
        if stopped:
            raise Terminated
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def patient(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Keeps writes to standard output or error from failing while open: text without a reader or stream is dropped."""
    own: TextIO | None = getattr(sys, name)
    # Python has no stream where the process was started without its descriptor (`>&-`). The null device takes that
    # number, which the next file would get.
    with open(os.devnull, "w") if own is None else nullcontext(own) as shown:
        stream = cast(TextIO, PatientStream(shown))
        with redirect_stdout(stream) if name == "stdout" else redirect_stderr(stream):
            try:
                yield
            finally:
                stream.flush()


class PatientStream:
    """A text stream whose reader may leave before the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text, which is dropped without a reader."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flushes the stream; text without a reader is dropped."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what its buffer still holds goes there at the end
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def warnings_in_one_line(*, quiet: bool) -> Iterator[None]:
    """Prints warnings of this package without file and line, which do not help users; leaves others to Python."""
    # The folder of the package: `filename` is the place that raised the warning, given its stacklevel.
    ours = str(Path(__file__).parents[1])
    with warnings.catch_warnings():
        # pytest and notebooks replace this function; theirs is called for warnings of other packages.
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *line: Any, **options: Any) -> None:
            if not filename.startswith(ours):
                usual(printable(str(message)), category, filename, *line, **options)
            elif not quiet:
                click.echo(printable(f"warning: {message}"), err=True)

        warnings.showwarning = show
        yield
