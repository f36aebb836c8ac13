"""Texts are replaced whole, what dead processes left is removed, and one process at a time writes to a place."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from children import in_child

from quant.base import atomic
from quant.base.atomic import claimed, write_atomically


def in_child_without(action: Callable[[], None]) -> int:
    """As `in_child`, in a process that does not know what its parent claimed."""
    return in_child(lambda: (atomic._CLAIMED.clear(), action()))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_text_is_replaced_with_the_usual_permissions(tmp_path: Path) -> None:
    place = tmp_path / "below" / "text"
    for text in ("one", "zwei ✓"):
        write_atomically(place, text)
        assert place.read_text(encoding="utf-8") == text
    (tmp_path / "usual").touch()
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)
    assert os.listdir(place.parent) == ["text"]


def test_what_a_killed_process_left_of_a_text_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "text"
    monkeypatch.setattr(atomic, "put_file", lambda *_: kill())
    assert in_child(lambda: write_atomically(place, "lost")) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "lost"
    monkeypatch.undo()
    write_atomically(place, "kept")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("text", "kept")]


def test_a_claim_keeps_other_processes_out_and_not_its_own(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet" / "out"

    def claim() -> None:
        with claimed(place):
            pass

    def refused() -> None:
        with pytest.raises(OSError, match=rf"out: process {os.getppid()} is writing to it; wait for it, or stop it"):
            claim()

    with claimed(place):
        claim()
        assert in_child_without(refused) == 0
    assert in_child(claim) == 0
    assert not list(tmp_path.iterdir())


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    def die() -> None:
        with claimed(tmp_path / "out"):
            kill()

    assert in_child(die) == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == [".out.lock"]
    with claimed(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_text() == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_the_destination(tmp_path: Path) -> None:
    said = rf"^{tmp_path}/out cannot be written: No space left on device; make room, and run the same command again$"
    with pytest.raises(OSError, match=said), claimed(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name, and not by the temporary one: on a full disk, and in a directory that is only read."""
    place = tmp_path / "page.html"
    for number, way_out in ((errno.ENOSPC, "; make room, and run the same command again"), (errno.EROFS, "")):
        error = OSError(number, os.strerror(number), f"{tmp_path}/.page.html.new.12345678")

        def fail(*_: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(Path, "write_bytes", fail)
        with pytest.raises(OSError, match=rf"^{place} cannot be written: {os.strerror(number)}{way_out}$"):
            write_atomically(place, "text")
        assert list(tmp_path.iterdir()) == []
