"""What differs on Windows, simulated: its file calls, its shell, its code pages and its editors."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from samples import BASE, TEXTS
from torch import nn

import quant
from quant.base import errors
from quant.base.atomic import replace_directory, write_atomically
from quant.base.errors import UserError
from quant.base.json_files import read_json
from quant.base.processor import peak_rss, trim_heap
from quant.calibration.texts.rows import token_rows
from quant.cli.command import PatientStream
from quant.cli.main import main
from quant.export.tensorrt.build import run_worker
from quant.models.files import shard_names
from quant.models.open_model import open_model
from quant.recipes.recipe import Recipe


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.platform`, with calls that fail as Windows' do: fsync of a read-only file, renaming over a directory."""
    # Before: on Windows transformers imports modules that are not here, and remembers that they failed.
    getattr(pytest.importorskip("transformers"), "LlamaForCausalLM")  # noqa: B009 -- imports its module
    monkeypatch.setattr("sys.platform", "win32")
    rename = Path.rename

    def fsync(handle: int) -> None:
        os.write(handle, b"")  # EBADF for a file that is open for reading

    def rename_over_nothing(self: Path, target: Path) -> Path:
        if Path(target).exists():
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename_over_nothing)


def test_files_are_synced_and_replaced(windows: None, tmp_path: Path) -> None:
    """github.com/huggingface/transformers/pull/28637: Windows opens no directory to bring its names to the disk."""
    for text in ("old", "new"):
        write_atomically(tmp_path / "file.txt", text)
    assert (tmp_path / "file.txt").read_text() == "new"


def test_directories_replace_each_other(windows: None, tmp_path: Path) -> None:
    """github.com/facebookresearch/fairseq/issues/4171: `os.rename` over a checkpoint that is there."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").write_text(name)
    replace_directory(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file.txt").read_text() == "new" and os.listdir(tmp_path) == ["old"]


def test_a_directory_whose_files_are_open_stays_and_is_named(
    windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """github.com/unslothai/unsloth-zoo/pull/190: a mapped file holds its place; the same again once it is closed."""
    arguments = ["quantize", str(BASE), "--format", "fp8_channel", "--out", str(tmp_path / "out"), "--overwrite"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    before = (tmp_path / "out").stat().st_ino
    rename = Path.rename

    def denied(self: Path, target: Path) -> Path:
        if self == tmp_path / "out":
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(self))
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", denied)
        refused = CliRunner().invoke(main, arguments)
    named = f"error: {tmp_path / 'out'} cannot be replaced: close what has its files open, and try again"
    assert refused.exit_code == 2 and named in refused.stderr
    assert (tmp_path / "out").stat().st_ino == before and (tmp_path / "out" / "plan.json").is_file()
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 0 and (tmp_path / "out").stat().st_ino != before


def test_a_cache_that_another_process_holds_open_costs_no_result(
    windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """github.com/cupy/cupy/pull/9483: nothing is put in the place of a file that another process reads."""
    replace = os.replace

    def denied(source: str | Path, target: str | Path) -> None:
        if Path(target).is_relative_to(tmp_path / "cache"):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        replace(source, target)

    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "replace", denied)
    options = ["--format", "fp8", "--calib", "self", "--calib-samples", "1", "--seqlen", "8", "--effort", "0"]
    done = CliRunner().invoke(main, ["quantize", str(BASE), *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_checkpoint_is_written_and_loaded(windows: None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    quantized = quant.quantize(model, "fp8_channel")
    for _ in range(2):
        quant.save(quantized.model, quantized.plan, tmp_path / "out", overwrite=True)
    again = quant.load(tmp_path / "out", nn.Sequential(nn.Linear(64, 64)))
    assert torch.equal(again(torch.ones(1, 64)), quantized.model(torch.ones(1, 64)))


def test_memory_is_given_back_where_ctypes_has_no_main_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_main_program(name: object, **_: object) -> None:
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr("ctypes.CDLL", no_main_program)
    trim_heap()


def test_peak_memory_is_unknown_without_the_module_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """github.com/KernelTuner/kernel_tuner/issues/156: an import of `resource`, for a figure of memory."""
    monkeypatch.setitem(__import__("sys").modules, "resource", None)
    assert peak_rss() is None
    import quant.export.tensorrt.worker  # noqa: F401


def test_commands_to_install_are_quoted_for_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    command = errors.install_command("hf,data")
    assert command.count('"') == 2 and "'" not in command and command.endswith('[hf,data]"')


@pytest.mark.parametrize("page", ["cp1252", "cp850", "ascii"])
def test_a_pipe_in_a_code_page_takes_every_line(page: str) -> None:
    """github.com/georgian-io/LLM-Finetuning-Toolkit/issues/175: a character that the code page has not."""
    written = io.BytesIO()
    text = io.TextIOWrapper(written, encoding=page, newline="")
    stream = PatientStream(text)
    stream.write("722 kB → 435 kB, ≥ 2×\n")
    stream.flush()
    assert written.getvalue().startswith(b"722 kB ? 435 kB, ? 2") and written.getvalue().endswith(b"\n")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_files_of_its_editors(ending: str, tmp_path: Path) -> None:
    """With a byte order mark and either end of lines they hold the same."""
    mark = b"\xef\xbb\xbf"
    recipe = 'name = "mine"\nweight = "nvfp4"\n'.replace("\n", ending).encode()
    (tmp_path / "recipe.toml").write_bytes(mark + recipe)
    assert Recipe.load(tmp_path / "recipe.toml").weight == "nvfp4"
    (tmp_path / "plan.json").write_bytes(mark + f'{{{ending}"a": 1}}'.encode())
    assert read_json(tmp_path / "plan.json", "a document", dict) == {"a": 1}
    tokenizer = open_model(TEXTS.parents[1] / "tests" / "data" / "goldens" / "base").load_tokenizer()
    text = (TEXTS / "calibration.txt").read_text(encoding="utf-8")
    (tmp_path / "plain.txt").write_text(text, encoding="utf-8", newline="\n")
    (tmp_path / "marked.txt").write_bytes(mark + text.replace("\n", ending).encode())
    rows = [token_rows(tmp_path / name, tokenizer, samples=4, seqlen=32) for name in ("plain.txt", "marked.txt")]
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", ["C:x.safetensors", r"C:\x.safetensors", r"\\host\x", r"a\..\..\x", r"\x"])
def test_shards_stay_inside_by_its_rules(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="outside its directory"):
        shard_names({"a": name, "b": "model-00001-of-00002.safetensors"}, tmp_path / "index.json")


def test_configs_are_read_as_utf_8_in_every_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """github.com/turboderp-org/exllamav2/pull/195: cp1252 for tokenizer.json. Every text file says its encoding."""
    import ast

    root = TEXTS.parents[1]
    silent = []
    for room in ("quant", "formats", "recipes", "kernels", "calibration", "export"):
        for file in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    texts = {"read_text": 0, "write_text": 1}
                    positional = texts.get(node.func.attr)
                    named = any(keyword.arg == "encoding" for keyword in node.keywords)
                    if positional is not None and not named and len(node.args) <= positional:
                        silent.append(f"{file.relative_to(root)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert silent == []
    assert json.dumps("é").isascii()


@pytest.fixture
def mapped_files_stay(windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No file is deleted, renamed or replaced while this process maps it or has it open; returns the refusals."""
    refused = []
    for name, original in [(name, getattr(os, name)) for name in ("unlink", "rmdir", "rename", "replace")]:

        def strict(path: str | Path, *more: Any, call: Callable[..., None] = original, **named: Any) -> None:
            for each in (path, *more[:1]):
                place = os.path.realpath(each)
                maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
                opened = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
                if any(file == place or file.startswith(place + os.sep) for file in (*maps, *opened)):
                    refused.append(place)
                    raise PermissionError(errno.EACCES, "The process cannot access the file", str(each))
            call(path, *more, **named)

        monkeypatch.setattr(os, name, strict)
    monkeypatch.setattr("shutil._use_fd_functions", False)
    return refused


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_steps_that_tensors_map_are_deleted_at_the_end(
    mapped_files_stay: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """github.com/safetensors/safetensors/issues/574: a file cannot be deleted while a tensor of it is alive."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda call, *args: at_exit.append(partial(call, *args)))
    monkeypatch.setattr("quant.calibration.walk.finished_layers._STATES_SHARE", 0)
    options = ["--calib", str(TEXTS / "calibration.txt"), "--calib-samples", "2", "--seqlen", "16"]
    arguments = ["quantize", str(BASE), "--format", "nvfp4", "--solver", "gptq", *options, "--out"]
    for more in ([], ["--overwrite"]):
        done = CliRunner().invoke(main, [*arguments, str(tmp_path / "out"), *more])
        assert done.exit_code == 0, done.output
        assert any(".out.partial" in place for place in mapped_files_stay)
        for call in at_exit:
            call()
        assert os.listdir(tmp_path) == ["out"]
        at_exit.clear()
        mapped_files_stay.clear()


@pytest.mark.parametrize("length", [160, 180, 250])
def test_paths_that_windows_does_not_take_are_refused_before_the_work(
    windows: None, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """github.com/huggingface/huggingface_hub/issues/3245: a path of 154 characters, and a temporary one beyond 259."""
    make, opened = os.mkdir, os.open

    def limited(call: Callable[..., Any]) -> Callable[..., Any]:
        def limit(path: str | Path, *more: Any, **named: Any) -> Any:
            if len(os.path.abspath(path)) > 259:
                raise FileNotFoundError(errno.ENOENT, "The system cannot find the path specified", str(path))
            return call(path, *more, **named)

        return limit

    monkeypatch.setattr(os, "mkdir", limited(make))
    monkeypatch.setattr(os, "open", limited(opened))
    out = tmp_path / ("n" * (length - len(str(tmp_path)) - 1))
    model = quant.quantize(nn.Sequential(nn.Linear(64, 64)), "fp8_channel")
    result = CliRunner().invoke(
        main, ["quantize", str(BASE), "--format", "fp8_channel", "--effort", "0", "--out", f"{out}"]
    )
    if length == 160:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2 and "give a shorter one" in result.stderr and "loading" not in result.stderr
    with pytest.raises(OSError, match="give a shorter one"):
        quant.save(model.model, model.plan, out)
    assert not list(tmp_path.iterdir())


def test_an_engine_is_built_by_a_process_with_no_handles_of_its_parent(
    windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter `pass_fds` of subprocess is for POSIX; a build on Windows ended in its assertion."""
    start = subprocess.Popen

    def popen(*arguments: Any, pass_fds: tuple[int, ...] = (), **options: Any) -> Any:
        assert not pass_fds, "pass_fds not supported on Windows."
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ValueError, match=r"out\.engine: none cannot build this graph: ModuleNotFoundError: No module"):
        run_worker({"backend": "none"}, Path(".out.engine.new.1a2b3c4d/model.onnx"), None, None)
