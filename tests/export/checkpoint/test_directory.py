"""At every moment in which a process can die, a full old or a full new directory is under its name."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from children import in_child
from click.testing import CliRunner
from slow_cases import quick_cases

from quant.base import atomic
from quant.cli.command import Command
from quant.export.checkpoint.files.directory import finish_directory, new_directory

OLD, NEW = {"plan.json": "old", "old.txt": "old"}, {"plan.json": "new", "new.txt": "new"}


def contents(directory: Path) -> dict[str, str] | None:
    return {file.name: file.read_text() for file in directory.iterdir()} if directory.is_dir() else None


def fill(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def strike(at: int, after: bool, blow: Callable[[], None]) -> Callable[[], None]:
    """Makes the `at`-th step that changes the disk strike, before or after its work; returns the end of that."""
    steps = [(os, "fsync"), (Path, "rename"), (os, "replace"), (shutil, "rmtree"), (atomic, "_exchange")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in steps]
    count = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            mine = count
            if mine == at and not after:
                blow()
            result = original(*arguments, **options)
            if mine == at and after:
                blow()
            return result

        return step

    for owner, name, original in originals:
        setattr(owner, name, wrapped(original))

    def end() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return end


def write(target: Path, work: Path | None) -> None:
    with new_directory(target, overwrite=True, work=work) as directory:
        fill(directory, NEW)


@pytest.mark.parametrize(
    ("existing", "resumable", "exchange", "after"),
    quick_cases(
        product((False, True), repeat=4),  # every pair of the first three is among the quick cases
        lambda existing, resumable, exchange, after: not after and (existing + resumable + exchange) % 2 == 0,
    ),
)
def test_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, resumable: bool, exchange: bool, after: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda new, path: False)
    seen, at = set(), 0
    while True:
        at += 1
        place = tmp_path / str(at)
        target, work = place / "out", place / "work" if resumable else None
        place.mkdir()
        for directory, files in ((target, OLD if existing else {}), (work, {})):
            if directory is not None and (files or directory is work):
                fill(directory, files)

        def run(target: Path = target, work: Path | None = work, at: int = at) -> None:
            strike(at, after, lambda: os.kill(os.getpid(), signal.SIGKILL))
            write(target, work)

        status = in_child(run)
        held = contents(target)
        if exchange:
            assert held in ((OLD, NEW) if existing else (None, NEW)), at
        seen.add("new" if held == NEW else "old")
        if work is not None:
            finish_directory(work, target)
            if (work / "complete").exists():
                assert contents(target) == NEW, at
        atomic.recover(target)
        assert contents(target) in ((OLD, NEW) if existing else (None, NEW)), at
        write(target, work)
        assert contents(target) == NEW
        assert sorted(each.name for each in place.iterdir()) == sorted({"out"} | ({"work"} if resumable else set()))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert at > 5 and seen == {"old", "new"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("exchange", [False, True])
def test_stopped_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, error: BaseException
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda new, path: False)

    def blow() -> None:
        raise error

    stopped, at = True, 0
    while stopped:
        at += 1
        target = tmp_path / str(at) / "out"
        target.parent.mkdir()
        fill(target, OLD)
        end = strike(at, False, blow)
        try:
            write(target, None)
            stopped = False
        except (OSError, KeyboardInterrupt) as raised:
            stopped = error in (raised, raised.__cause__)  # a full disk is told with the way out
        finally:
            end()
        assert contents(target) in (OLD, NEW), at
    assert at > 3


def test_what_dead_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    target = tmp_path / "out"
    in_child(lambda: strike(1, False, lambda: os.kill(os.getpid(), signal.SIGKILL)) and write(target, None))
    left, lock = sorted(tmp_path.iterdir(), key=lambda each: each.is_file())
    assert left.name.startswith(".out.new.") and contents(left) == NEW and lock.name == ".out.lock"
    (tmp_path / ".out.new.but mine").mkdir()
    with new_directory(target, overwrite=False) as first:
        fill(first, OLD)
        assert not left.exists()
        write(target, None)
        assert contents(first) == OLD
        shutil.rmtree(target)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".out.new.but mine", "out"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_arrives_in_a_destructor_ends_the_command_too(tmp_path: Path) -> None:
    class Destroyed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    @click.command(cls=Command)
    @click.option("--out", type=click.Path(path_type=Path))
    def command(out: Path) -> None:
        Destroyed()  # Python drops what its destructor raises
        with new_directory(out, overwrite=True) as directory:
            fill(directory, NEW)

    target = tmp_path / "out"
    result = CliRunner().invoke(command, ["--out", str(target)])
    assert result.exit_code == 143
    assert result.output.splitlines()[-1] == f"error: stopped by SIGTERM after {target} was written"
    assert contents(target) == NEW


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; a process that a shell has started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_ends_a_command_in_one_line(
    tmp_path: Path, number: signal.Signals, code: int, late: bool, interruptible: None
) -> None:
    target = tmp_path / "out"
    fill(target, OLD)

    @click.command(cls=Command)
    @click.option("--out", type=click.Path(path_type=Path))
    def command(out: Path) -> None:
        with new_directory(out, overwrite=True) as directory:
            fill(directory, NEW)
            if not late:
                os.kill(os.getpid(), number)
                time.sleep(5)
        os.kill(os.getpid(), number)
        time.sleep(5)

    result = CliRunner().invoke(command, ["--out", str(target)])
    said = f"{'after' if late else 'before'} {target} was written"
    assert (result.exit_code, result.output) == (code, f"error: stopped by {number.name} {said}\n")
    assert contents(target) == (NEW if late else OLD)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
