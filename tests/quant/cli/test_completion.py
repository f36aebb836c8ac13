"""The shell completes commands, formats, solvers and files, as click's own completion is asked by bash."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from quant.cli.main import COMMANDS, main
from quant.cli.quantize import quantize_command
from quant.formats.format import FORMATS
from quant.recipes.recipe import presets
from quant.recipes.solver_names import ROUNDINGS


def completed(command: click.Command, *arguments: str) -> tuple[list[str], bool]:
    """Returns the words for the last argument, and whether the shell adds files."""
    *before, incomplete = arguments
    items = ShellComplete(command, {}, "quant", "_QUANT_COMPLETE").get_completions(before, incomplete)
    return [item.value for item in items if item.type == "plain"], any(item.type == "file" for item in items)


def test_commands_and_names_are_completed() -> None:
    assert completed(main, "") == (list(COMMANDS), False)
    assert completed(main, "se") == (["sensitivity"], False)
    assert completed(main, "plan", "v") == (["validate"], False)
    words = [name for name in presets() if name.startswith("nv")]
    assert len(words) > 1
    assert completed(main, "quantize", "m", "--format", "nv") == (words, True)
    assert completed(quantize_command, "m", "--format", "nv") == (words, True)
    # Of a list, its last name is completed.
    assert completed(quantize_command, "m", "--format", "fp8,nv") == ([f"fp8,{word}" for word in words], True)
    assert completed(quantize_command, "m", "--solver", "awq+gp") == (["awq+gptq", "awq+gptq_plain"], False)
    # A part is offered only where it may stand, and a name once.
    awq = ["smoothquant", "rotation", "lowrank", "residual", *ROUNDINGS, "autoround"]
    assert set(completed(quantize_command, "m", "--solver", "awq+")[0]) == {f"awq+{part}" for part in awq}
    assert completed(quantize_command, "m", "--solver", "gptq+") == (["gptq+autoround"], False)
    assert "fp8,fp8" not in completed(quantize_command, "m", "--format", "fp8,f")[0]
    assert completed(quantize_command, "m", "--lm-head", "") == ([*FORMATS, "16bit"], False)
    assert completed(main, "plan", "make", "m", "--observer", "p") == (["percentile"], False)


@pytest.mark.parametrize(
    "arguments",
    [("quantize", "dir/"), ("quantize", "m", "--format", "r"), ("quantize", "m", "--calib", "t"),
     ("evaluate", "m", "--text", "t"), ("plan", "show", "p"), ("report", "d"), ("inspect", "d"), ("generate", "d")],
)  # fmt: skip
def test_files_are_left_to_the_shell(arguments: tuple[str, ...]) -> None:
    words, files = completed(main, *arguments)
    assert files and words == []


def test_completing_imports_no_torch() -> None:
    """Whoever presses Tab waits for it."""
    script = (
        "import sys; from click.shell_completion import ShellComplete; from quant.cli.main import main; "
        "ShellComplete(main, {}, 'quant', 'X').get_completions(['quantize', 'm', '--solver'], 'g'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
