"""A misspelled name is refused in one message that has the right one, and Ctrl-C ends a command by its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from click.testing import CliRunner

import quant
from quant.cli import console
from quant.cli.main import main
from quant.evaluation.tasks import read_task
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import near_glob

NAMES = ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("*.q_prog", "*.q_proj"),
        ("model.layer.0.*", "model.layers.0.*"),
        ("*down_porj", "*down_proj"),
        ("lm-head", "lm_head"),
        ("model.layers.9.*", None),  # another number is no spelling
        ("down_proj", "*.down_proj"),
        ("q_prog", "*.q_proj"),
        ("blk.*", None),
    ],
)
def test_a_misspelled_glob_is_told_with_the_nearest_that_matches(glob: str, meant: str | None) -> None:
    assert near_glob(glob, NAMES) == (f"; did you mean {meant}?" if meant else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("misspelled")
    model = tiny_models.llama()
    model.save_pretrained(folder / "model")
    make_plan(model, "nvfp4a16").save(folder / "plan.json")
    (folder / "text.txt").write_text("one two three")
    return folder


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("quantize {}/model --format nvfp4a16 --exclude model.layer.0.* --out x", "model.layers.0.*"),
        ("plan edit {}/plan.json --set *.q_prj=fp8 --out x", "*.q_proj"),
        ("quantize {}/model --format nvfp4 --calib mxi --out x", "mix"),
        ("quantize {}/model --format nvfp4 --calib {}/text.tx --out x", "{}/text.txt"),
        ("quantize {}/modl --format nvfp4a16 --out x", "{}/model"),
        ("quantize smolm2-135m --format nvfp4a16 --out x", "smollm2-135m"),
        ("quantize {}/model --format nvfp4 --solver awq:mrege+gptq --out x", "merge"),
        ("plan make {}/model --max-kl 0.1 --eval {}/text.tx --out x", "{}/text.txt"),
        ("plan make {}/model --min-task {}/tex.txt>=0.9 --out x", "{}/text.txt"),
        ("plan make {}/model --bits 5 --method fischer --out x", "fisher"),
        ("plan show {}/plna.json", "{}/plan.json"),
        ("inspect {}/modl", "{}/model"),
        ("export {}/model --to onx", "onnx"),
    ],
)
def test_a_misspelled_name_is_told_with_the_right_one(command: str, meant: str, folder: Path) -> None:
    done = CliRunner().invoke(main, [word.replace("{}", str(folder)) for word in command.split()])
    last = done.stderr.splitlines()[-1]
    assert done.exit_code == 2 and last.lower().startswith("error: ")
    assert last.endswith(f"; did you mean {meant.replace('{}', str(folder))}?"), done.stderr


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("—match", "; did you mean --match?"),
        ("–-match=*", "; did you mean --match?"),
        ("-match", "; did you mean --match?"),
        ("\\", "; in a pasted command the backslash has to be the last character of its line"),
        (" ", "; in a pasted command the backslash has to be the last character of its line"),
        ("more", "Got unexpected extra argument (more)"),
        ("match", "Got unexpected extra argument (match)"),  # as in `--out out`, a value with the name of an option
    ],
)
def test_what_pasting_changed_is_told(argument: str, hint: str, folder: Path) -> None:
    done = CliRunner().invoke(main, ["plan", "show", str(folder / "plan.json"), argument])
    assert done.exit_code == 2 and done.stderr.endswith(f"{hint}\n"), done.stderr


def test_a_task_of_lm_eval_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`quant evaluate --tasks .*/arc_easy` runs tasks of lm-eval"):
        read_task(tmp_path / "arc_easy")


def test_ctrl_c_in_code_from_text_ends_by_the_exit_code() -> None:
    """Python notes a KeyboardInterrupt inside `exec` of text, as of a namedtuple, and would kill itself by SIGINT."""
    code = "import click\nfrom quant.cli.command import Command\n@click.command(cls=Command)\n"
    code += "def stop():\n    exec('raise KeyboardInterrupt')\nstop([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: stopped by SIGINT\n")


@pytest.mark.parametrize(
    "moment", ["click", "quant.base.errors", "quant.cli.inspect_command", "quant.cli.command:parse"]
)
def test_ctrl_c_while_a_program_starts(moment: str) -> None:
    """At the first import, among others, while a command is imported, and while its options are read."""
    code = f"""
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
moment, _, parsing = {moment!r}.partition(":")
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == moment and not parsing:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
if parsing:
    from quant.cli.command import Command
    Command.parse_args = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["quant", "formats"]
from quant.__main__ import quant
quant()
"""
    for rank, said in (("0", "error: stopped by SIGINT\n"), ("1", "")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "RANK": rank}
        )
        assert (done.returncode, done.stderr) == (130, said)


def test_a_tilde_is_the_home_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash expands --out ~/DIR and leaves --out=~/DIR, which wrote a folder named ~; Python expands none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(folder)
    (tmp_path / "model").symlink_to(folder / "model")
    command = "quantize --format fp8_channel --effort 0 --out=~/out ~/model"
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    model = quant.load("~/out")
    quant.save(model, model.quantization_plan, "~/again")
    quant.convert("~/again", "~/converted", "modelopt")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "again", "converted"}
    assert not (folder / "~").exists()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["quantize", "", "--format", "fp8", "--out", "x"], "'MODEL' is empty, as a variable that is not set"),
        (["quantize", "m", "--format", "fp8", "--out", ""], "'--out' is empty, as a variable that is not set"),
        (["quantize", "m", "--bits", "nvfp4"], "'nvfp4' is not a valid float; the name of a format is for --format"),
    ],
)
def test_a_value_that_is_empty_or_of_another_option(command: list[str], told: str) -> None:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and done.output.rstrip().endswith(told), done.output


def test_no_columns_at_all_are_eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [CliRunner().invoke(main, ["formats"], env={"COLUMNS": columns}).output for columns in ("0", "80")]
    assert "nvfp4a16" in shown[0] and shown[0] == shown[1]
    monkeypatch.setenv("COLUMNS", "0")
    assert console._Console(stderr=True).width == 80
