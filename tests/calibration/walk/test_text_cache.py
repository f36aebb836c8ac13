"""Text that a model wrote is read again by later runs, and only by those that would have written the same."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import BASE

from quant.base.listener import Listener
from quant.calibration.session import Session
from quant.calibration.texts import mixture, sources
from quant.calibration.texts.sources import Rows, must_write, read_calibration
from quant.models.open_model import open_model

ROWS = Rows(("self",), samples=2, seqlen=8)


class _Messages(Listener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The number of rows of each text that a model wrote, while the cache is in `tmp_path`."""
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path / "cache"))
    counts: list[int] = []
    generate = mixture.generate_rows

    def counted(*args: object, **options: object) -> torch.Tensor:
        rows = generate(*args, **options)  # type: ignore[arg-type]
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(mixture, "generate_rows", counted)
    return counts


def _copy(folder: Path) -> Path:
    return Path(shutil.copytree(BASE, folder))


def _read(model: Path, rows: Rows = ROWS) -> tuple[torch.Tensor, object, list[str]]:
    listener = _Messages()
    data, records = read_calibration(open_model(str(model)), rows, Session(), listener=listener)
    assert isinstance(data, torch.Tensor)
    return data, records, listener.texts


def test_a_second_run_reads_the_rows_of_the_first(written: list[int], tmp_path: Path) -> None:
    assert must_write(open_model(str(BASE)), ROWS, Session())
    first, records, messages = _read(BASE)
    assert written and not messages
    assert not must_write(open_model(str(BASE)), ROWS, Session())
    count = len(written)
    again, same_records, (message,) = _read(BASE)
    assert len(written) == count
    assert torch.equal(again, first) and same_records == records
    (file,) = (tmp_path / "cache" / "texts").iterdir()
    assert str(file) in message and "BLOCKSCALE_CACHE=off" in message


def test_another_text_is_written(written: list[int], tmp_path: Path) -> None:
    model = _copy(tmp_path / "model")
    _read(model)
    for rows in (replace(ROWS, seed=1), replace(ROWS, samples=3), replace(ROWS, seqlen=9)):
        count = len(written)
        _read(model, rows)
        assert len(written) > count, rows
    count = len(written)
    # One weight of a copy differs: its file has the same size and the same header.
    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    _read(model)
    assert len(written) > count
    count = len(written)
    (model / "generation_config.json").write_text('{"bos_token_id": 3}')  # special tokens are never drawn
    _read(model)
    assert len(written) > count


def test_rows_beyond_the_context_and_another_processor(
    written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is cut to the model's context, and machines that share a home may add in another order."""
    source = open_model(str(BASE))
    context = source.config.max_position_embeddings
    short = Rows(("self",), samples=1, seqlen=context)
    first, _, _ = _read(BASE, short)
    assert first.shape == (1, context)
    longer = replace(short, seqlen=2 * context)
    assert not must_write(source, longer, Session())
    count = len(written)
    again, _, _ = _read(BASE, longer)
    assert len(written) == count and torch.equal(again, first)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "of another machine")
    assert must_write(source, short, Session())


def test_a_module_and_a_factory_are_not_cached(written: list[int], tmp_path: Path) -> None:
    source = open_model(str(BASE))
    assert sources.TextCache.of(open_model(source.module), Session(), {}) is None

    class OwnClass(type(source.module)):  # type: ignore[misc] -- a class of the model's own Python files
        pass

    source.module.__class__ = OwnClass
    assert sources.TextCache.of(source, Session(), {}) is None


def test_a_damaged_file_is_written_again(written: list[int], tmp_path: Path) -> None:
    first, _, _ = _read(BASE)
    (file,) = (tmp_path / "cache" / "texts").iterdir()
    content = bytearray(file.read_bytes())
    content[-8] ^= 1  # one token
    for damaged in (bytes(content), content[:40], b""):
        file.write_bytes(damaged)
        count = len(written)
        again, _, _ = _read(BASE)
        assert len(written) > count and torch.equal(again, first)


def test_the_cache_is_bounded_and_may_be_off_or_unwritable(
    written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MOST_FILES", 1)
    _read(BASE)
    _read(BASE, replace(ROWS, seed=1))
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 1
    monkeypatch.setenv(sources.VARIABLE, "off")
    count = len(written)
    _read(BASE)
    assert len(written) > count
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path / "file"))  # no directory can be made there
    count = len(written)
    _read(BASE)
    assert len(written) > count


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(sources.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = sources.TextCache.of(open_model(str(BASE), meta=True), Session(), {})
    assert cache is not None and cache.path.is_relative_to(tmp_path / "blockscale")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache = sources.TextCache.of(open_model(str(BASE), meta=True), Session(), {})
    assert cache is not None and cache.path.is_relative_to(tmp_path / "home" / ".cache" / "blockscale")
