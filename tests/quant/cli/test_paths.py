"""Paths as users write them: with a dash first, in a loop, under ~, bound to others, or without permission."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from samples import write_short_base

from quant.base.errors import quoted
from quant.cli.main import main
from quant.models.files import check_links, read_fields, safetensors_file
from quant.run.request import AllocationRequest

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions, links and shells")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, words)
    return result.exit_code, result.output


@contextmanager
def without_rights() -> Iterator[None]:
    """Opens files as a user whom they do not belong to; root opens every file."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@posix
def test_a_file_that_may_not_be_read_is_not_called_damaged() -> None:
    """The words were "a truncated or damaged one (No such file or directory); download it again"."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own belongs to one user alone
        home = Path(folder)
        home.chmod(0o755)
        save_file({"weight": torch.zeros(2)}, home / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            (home / name).write_text("{}")
        for name, read in (
            ("model.safetensors", lambda: safetensors_file(home / "model.safetensors")),
            ("config.json", lambda: read_fields(home / "config.json")),
            # Copied when the model is solved; its permission is looked at before.
            ("tokenizer.json", lambda: check_links(home)),
        ):
            read()
            (home / name).chmod(0)
            with without_rights(), pytest.raises(PermissionError, match=re.escape(str(home / name))):
                read()
            (home / name).chmod(0o644)


@posix
def test_a_directory_whose_name_begins_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that a run ends with take it for a directory, not for an option."""
    write_short_base(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code, output = run("quantize", "model", "--format", "int8", "--effort", "0", "--out", "-int8")
    assert code == 0, output
    lines = dict(re.findall(r"^(try it|measure|serve|report): +(.*)$", output, re.M))
    assert all("./-int8" in line for line in lines.values()) and len(lines) == 4, lines
    program, *words = shlex.split(lines["try it"])
    code, output = run(*words, "--max-new-tokens", "1")
    assert program == "quant" and code == 0, output
    Path("text.txt").write_text(" ".join(str(i % 60 + 3) for i in range(64)))
    program, *words = shlex.split(lines["measure"].replace("FILE", "text.txt"))
    code, output = run(*words, "--samples", "1", "--seqlen", "16")
    assert program == "quant" and code == 0, output


@posix
@pytest.mark.parametrize("name", ["-x", "--out", "a b", "it's", '"', "$HOME", "new\nline", "*", "ü", "\\"])
def test_a_shell_reads_the_name_that_was_meant(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("content")
    done = subprocess.run(f"cat {quoted(name)}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "content"


@posix
def test_links_in_a_loop(tmp_path: Path) -> None:
    """It ended as a bug of Blockscale."""
    tiny_models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    code, output = run("quantize", str(tmp_path / "model"), "--format", "int8", "--out", str(tmp_path / "one"))
    assert code == 2 and len(output.splitlines()) == 1 and str(tmp_path / "one") in output, output


def test_texts_under_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves the ~ of --eval=~/FILE as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_short_base(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(str(i % 60 + 3) for i in range(64)))
    rows = ("--seqlen", "16", "--eval-samples", "1")
    code, output = run("quantize", "~/model", "--format", "int8", "--effort", "0", "--eval=~/text.txt", *rows,
                       "--out", "~/stored")  # fmt: skip
    assert code == 0 and (tmp_path / "stored").is_dir(), output
    code, output = run("evaluate", "~/stored", "--text=~/text.txt", "--baseline=~/model", "--seqlen", "16",
                       "--samples", "1")  # fmt: skip
    assert code == 0 and "KL" in output, output
    for calib in ("~/text.txt", "mix+~/text.txt"):
        code, output = run("quantize", "~/model", "--format", "int8", f"--calib={calib}", "--calib-samples", "2",
                           "--seqlen", "16", "--out", "~/stored", "--overwrite")  # fmt: skip
        assert code == 0, output
    code, output = run("evaluate", "~/stored", "--task=~/none.jsonl")
    assert code == 2 and str(tmp_path / "none.jsonl") in output, output
    assert AllocationRequest(min_task="~/none.jsonl>=0.9").task == (tmp_path / "none.jsonl", 0.9)


def test_the_address_of_a_model() -> None:
    """The name that the message says is one on the hub: nothing else is missing."""
    for address in (
        "https://huggingface.co/org/name-1.5",
        "https://hf.co/org/name-1.5/tree/main",
        "hf://org/name-1.5/",
    ):
        code, output = run("quantize", address, "--format", "int8", "--out", "out")
        assert code == 2 and output.endswith(
            f"{address}: a model on the Hugging Face hub is named without the address: org/name-1.5\n"
        ), output


@pytest.mark.skipif(sys.platform != "linux", reason="bound directories are of Linux")
def test_a_directory_that_is_bound_to_another_of_its_disk(tmp_path: Path) -> None:
    """`docker run -v` binds such; it was refused after the whole run, by the number of an error."""
    script = (
        "import sys; from pathlib import Path; from quant.export.checkpoint.files.directory import check_destination\n"
        "check_destination(Path(sys.argv[1]), overwrite=True)"
    )
    for name in ("out", "its \\ out"):
        (tmp_path / name).mkdir()
        bound = 'mount --bind "$0" "$0" || exit 77; exec "$1" -c "$2" "$0"'
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", bound, str(tmp_path / name), sys.executable]
        try:
            done = subprocess.run([*command, script], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("unshare, of util-linux, is not there")
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"nothing can be bound here: {done.stderr}")
        assert f"{name} is a mount point, which cannot be replaced whole; name a directory in it" in done.stderr
