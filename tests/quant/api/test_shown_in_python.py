"""Python users see short forms of results, errors that name parameters, and plans that are checked as files are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner

import quant
from quant.cli.main import main
from quant.formats.format import get_format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return quant.make_plan(tiny_models.llama(), "nvfp4a16")  # type: ignore[no-any-return]


def test_errors_name_parameters_in_python_and_options_in_commands(plan: Plan, tmp_path: Any) -> None:
    with pytest.raises(quant.UserError, match=r"^set='\*\.q_proj=fp9'"):
        plan.set("*.q_proj", "fp9")
    with pytest.raises(quant.UserError, match=r"or pass whole_groups=True$"):
        plan.set("*.q_proj", "fp8_channel")
    with pytest.raises(ValueError, match=r"name a baseline=$"):
        quant.evaluate(torch.nn.Linear(4, 4), torch.zeros(2, 4, 4))
    with pytest.raises(quant.UserError, match=r'^to="onx": no such kind'):
        quant.export_model(tmp_path, "onx")
    # A command in backticks stays as it is typed in a terminal.
    with pytest.raises(quant.UserError, match=r"`quantize MODEL --format nvfp4 --out DIR`$"):
        quant.export_model(tmp_path, "onnx")
    plan.save(tmp_path / "plan.json")
    command = ["plan", "edit", str(tmp_path / "plan.json"), "--set", "*.q_proj=fp8_channel", "--out", "x.json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "pass --whole-groups" in " ".join(result.output.split())


def test_results_print_in_one_line_and_as_a_table() -> None:
    model, rows = tiny_models.llama(), torch.randint(3, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    done = quant.quantize(model, "nvfp4a16", solver="rtn")
    worst = max((layer for layer in done.layers if layer.format), key=lambda layer: layer.relative_error or 0)
    text = repr(done)
    assert text.startswith(f"Quantized({type(model).__name__}; Plan(") and "\n" not in text and len(text) < 300
    assert f"{worst.relative_error:.2%} in {worst.name}" in text
    html = done._repr_html_()
    assert html.count("<tr>") == len(done.layers) + 1 and f"<td>{worst.relative_error:.2%}</td>" in html
    measured = quant.evaluate(done.model, rows, tiny_models.llama())
    assert re.fullmatch(
        r"Evaluation\(KL [\d.e-]+ nats \(95% over 3 rows: .*–.*\), perplexity [\d.]+, [\d.]+ before \([+-][\d.]+%\), "
        r"top-1 agreement [\d.]+%, predictions 45\)",
        repr(measured),
    )
    both = replace(measured, text="/a/<b>.txt", others=(replace(measured, text="c.txt", kl=None, top1=None),))
    assert repr(both).count("perplexity") == 2 and "<b>.txt: KL" in repr(both) and "; c.txt: perplexity" in repr(both)
    assert "/a/&lt;b&gt;.txt" in both._repr_html_() and both._repr_html_().count("<tr>") == 3


def test_a_plan_built_in_python_takes_names_and_is_checked() -> None:
    layer = LayerPlan("a", "linear", [64, 32], "nvfp4", "16bit")  # type: ignore[arg-type]
    assert (layer.kind, layer.shape) == (LayerKind.LINEAR, (64, 32))
    assert layer.weight is get_format("nvfp4") and layer.activation is None
    assert Plan([layer], kv_cache="fp8").kv_cache is get_format("fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan layer 'a': weight: unknown format 'nvfp5'"):
        replace(layer, weight="nvfp5")
    with pytest.raises(ValueError, match=r"plan layer 'a': activation: 8 is no format"):
        replace(layer, activation=8)
    with pytest.raises(ValueError, match=r"names a layer twice: \['a'\]"):
        Plan((layer, layer))
