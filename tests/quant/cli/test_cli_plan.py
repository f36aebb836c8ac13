"""The commands of `quant plan` make, show, compare, edit and check plans."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import FP8C, TOKEN, where
from samples import BASE

from quant.base.errors import megabytes
from quant.cli.main import main
from quant.cli.plan_command import plan_group
from quant.export.tensorrt.gpu_targets import resolve_target
from quant.formats.format import FORMATS
from quant.recipes.plan import Plan
from quant.recipes.plan_check import Problem
from quant.recipes.targets import TARGETS


def quant(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def plan_file(golden: Plan, tmp_path: Path) -> Path:
    golden.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("name", plan_group.commands)
def test_every_command_of_the_group_has_help(name: str) -> None:
    result = quant("plan", name, "--help")
    assert result.exit_code == 0 and result.output.startswith(f"Usage: quant plan {name} "), result.output


def test_make_writes_the_plan_of_quantize(tmp_path: Path) -> None:
    """From shapes alone; an existing file stays."""
    file, options = tmp_path / "plan.json", ("--format", "nvfp4a16", "--exclude", "*.down_proj")
    made = quant("plan", "make", BASE, *options, "--guard", "0.1 keep", "--out", file)
    assert made.exit_code == 0 and f"written to {file}" in made.stderr.replace("\n", ""), made.output
    expected = json.loads(quant("quantize", BASE, *options, "--dry-run", "--json").stdout)
    plan = json.loads(file.read_text())
    assert plan["layers"] == expected["layers"] and plan["guard"] == "0.1 keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]
    again = quant("plan", "make", BASE, *options, "--out", file)
    assert again.exit_code == 2 and "exists already; pass --overwrite to replace it" in again.stderr
    assert quant("plan", "make", BASE, *options, "--out", file, "--overwrite", "--quiet").exit_code == 0
    assert json.loads(file.read_text())["guard"] is None


def test_show_has_reason_and_cost_of_every_layer(plan_file: Path, golden: Plan) -> None:
    scored = golden.replace_layers(replace(m, score=0.0123) for m in golden.quantized[:1])
    scored.save(plan_file)
    text = quant("plan", "show", plan_file).stdout
    for layer in golden.quantized:
        line = next(row for row in text.splitlines() if row.lstrip().startswith(f"{layer.name} "))
        assert f"{layer.nbytes:,}" in line and layer.reason in line
    assert "0.0123" in text and "layers kept in 16 bit, model.layers.0.input_layernorm first: norm" in text
    assert f"16 bit become {megabytes(golden.nbytes)}" in text
    rows = json.loads(quant("plan", "show", plan_file, "--json", "--match", "*.mlp.*", "--sort", "bytes").stdout)[
        "layers"
    ]
    assert len(rows) == 6 and all("mlp" in row["name"] for row in rows)
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    assert "no layer of" in quant("plan", "show", plan_file, "--match", "x").stderr


def test_edit_and_diff_round_trip(plan_file: Path, golden: Plan, tmp_path: Path) -> None:
    out = tmp_path / "edited.json"
    options = ("--set", "*.down_proj=fp8_channel", "--kv-cache", "fp8", "--guard", "0.1 keep", "--observer", "mse")
    result = quant("plan", "edit", plan_file, *options, "--out", out)
    assert result.exit_code == 0, result.output
    edited = Plan.load(out)
    assert (edited.kv_cache, edited.guard, edited.observer) == (FORMATS["fp8"], "0.1 keep", "mse")
    assert [m.name for m in edited.layers if m.weight == FP8C] == [m.name for m in golden.layers if "down" in m.name]
    assert all(m.activation == TOKEN for m in edited.layers if m.weight == FP8C)
    shown = json.loads(quant("plan", "diff", plan_file, out, "--json").stdout)
    assert [c["name"] for c in shown["layers"]] == [m.name for m in edited.layers if m.weight == FP8C]
    first = shown["layers"][0]
    assert (first["before"]["weight"], first["after"]["weight"]) == ("nvfp4", "fp8_channel")
    assert shown["after"]["bytes"] - shown["before"]["bytes"] == sum(
        c["after"]["bytes"] - c["before"]["bytes"] for c in shown["layers"]
    )
    text = quant("plan", "diff", plan_file, out).stdout
    assert "2 layers: nvfp4@nvfp4 → fp8_channel@fp8_token" in text and "KV cache: 16 bit → fp8" in text
    assert "guard: none → 0.1 keep\nobserver: absmax → mse" in text
    assert "no layer changes" in quant("plan", "diff", plan_file, plan_file).stdout


def test_edit_refuses_in_one_line_and_writes_nothing(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "edited.json"
    for options, message in (
        (("--set", "*.q_proj=keep"), "--whole-groups"),
        (("--set", "*.q_proj=nvfp5"), "unknown format"),
        (("--observer", "median"), "unknown observer 'median'"),
        (("--guard", "0.1 fp5"), "guard '0.1 fp5': unknown format 'fp5'"),
        ((), "nothing to change"),
    ):
        result = quant("plan", "edit", plan_file, *options, "--out", out)
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
        assert message in result.stderr and not out.exists()
    out.write_text("mine")
    result = quant("plan", "edit", plan_file, "--set", "*.down_proj=keep", "--out", out)
    assert result.exit_code == 2 and "--overwrite" in result.stderr and out.read_text() == "mine"
    assert quant("plan", "edit", plan_file, "--set", "*.down_proj=keep", "--out", out, "--overwrite").exit_code == 0


def test_validate_exits_with_what_it_found(plan_file: Path, golden: Plan, tmp_path: Path) -> None:
    good = quant("plan", "validate", plan_file, "--model", BASE, "--target", "vllm")
    assert good.exit_code == 0 and "no problem" in good.stdout
    bad = quant("plan", "validate", plan_file, "--target", "sglang", "--json")
    assert bad.exit_code == 0 and json.loads(bad.stdout) == []
    bad = quant("plan", "validate", plan_file, "--target", "tensorrt-rtx-sm89", "--json")
    assert bad.exit_code == 1 and set(where([Problem(**p) for p in json.loads(bad.stdout)])) == {
        m.name for m in golden.quantized
    }
    text = quant("plan", "validate", plan_file, "--target", "tensorrt-rtx-sm89").stdout
    assert all(m.name in text for m in golden.quantized) and "14 problems in 14 places" in text
    replace(golden, target="tensorrt-rtx-sm89").save(tmp_path / "own.json")
    own = quant("plan", "validate", tmp_path / "own.json")
    assert own.exit_code == 1 and "14 problems in 14 places, with target tensorrt-rtx-sm89" in own.stdout
    unknown = quant("plan", "validate", plan_file, "--target", "vlm")
    assert unknown.exit_code == 2 and "known targets: vllm" in unknown.stderr
    nothing = quant("plan", "validate", tmp_path / "none.json")
    assert nothing.exit_code == 2 and "none.json: cannot be read" in nothing.stderr
    shutil.copy(BASE / "config.json", tmp_path / "other.json")
    assert "not a plan" in quant("plan", "validate", tmp_path / "other.json").stderr


def test_validating_takes_no_torch(plan_file: Path) -> None:
    """What makes it answer at once: importing torch takes seconds."""
    code = (
        "import sys; from quant.cli.main import main\n"
        f"try: main(['plan', 'validate', {str(plan_file)!r}, '--target', 'vllm'])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_targets_are_listed() -> None:
    listed = json.loads(quant("plan", "targets", "--json").stdout)
    assert set(listed) == set(TARGETS)
    text = quant("plan", "targets").stdout
    assert all(f"{name}: " in text for name in TARGETS)


def test_a_gpu_is_named_as_for_export(plan_file: Path) -> None:
    """`quant export --target rtx5090` and `tensorrt-rtx-sm120` are one GPU, and so they are here."""
    found = [quant("plan", "validate", plan_file, "--target", name) for name in ("rtx5090", "tensorrt-rtx-sm120")]
    assert found[0].stdout == found[1].stdout and "target tensorrt-rtx-sm120" in found[0].stdout
    assert resolve_target("tensorrt-rtx-sm120") == resolve_target("sm120")
    for command in (("plan", "validate", plan_file), ("doctor",)):
        runtimes = [quant(*command, "--target", name) for name in ("vllm", "vLLM")]
        assert runtimes[0].stdout == runtimes[1].stdout != ""
    # A GPU that no runtime is named after checks the plan by itself, and says what it multiplies.
    other = quant("plan", "validate", plan_file, "--target", "b200")
    assert other.exit_code == 0 and "b200 (sm100) multiplies int8, fp8, mxfp8" in other.stdout
    refused = quant("plan", "validate", plan_file, "--target", "rtx5900")
    assert refused.exit_code == 2 and "unknown target 'rtx5900'" in refused.stderr
