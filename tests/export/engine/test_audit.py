"""The audit tells what a built engine runs; every claim here is about an engine that TensorRT built in the test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quant.cli.main import main
from quant.export.engine.audit import audit, failures, planned_precision, read_kernels
from quant.export.engine.build import audit_built
from quant.formats.format import FORMATS
from quant.recipes.plan import LayerPlan, Plan

SHAPES = "tokens=1:16:64"
FOUND = {
    "nvfp4": "fp4",
    "fp8": "fp8",
    "int8": "int8",
    "half": "half",
    "nvfp4_a16": "half, fp4 weights",
    "fp8_a16": "half, fp8 weights",
    "int8_a16": "half, int8 weights",
    "int4_a16": "half, int4 weights",
}


def plan_of(*formats: tuple[str | None, str | None]) -> Plan:
    layers = [
        LayerPlan(f"layers.{i}", "linear", (256, 256), FORMATS[w] if w else None, FORMATS[a] if a else None)
        for i, (w, a) in enumerate(formats)
    ]
    return Plan(tuple(layers))


def found_in(engine: Any) -> dict[str, str]:
    return {finding.name: finding.found for finding in audit(engine.path)}


def test_every_precision_is_told_apart(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain(*FOUND), shapes=SHAPES)
    assert found_in(engine) == {f"layers.{i}": word for i, word in enumerate(FOUND.values())}


@pytest.mark.parametrize(
    ("kind", "target"), [("fp8", "sm89"), ("int8", "sm89"), ("int8", "sm80"), ("int4_a16", "sm86")]
)
def test_older_targets(graphs: Any, build: Callable[..., Any], kind: str, target: str) -> None:
    assert set(found_in(build(graphs.chain(kind, kind), target, SHAPES)).values()) == {FOUND[kind]}


def test_a_plan_that_was_followed_passes(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain("nvfp4", "fp8", "nvfp4_a16", "half"), shapes=SHAPES)
    plan = plan_of(("nvfp4", "nvfp4"), ("fp8", "fp8"), ("nvfp4", None), (None, None))
    findings = audit(engine.path, plan)
    assert failures(findings) == []
    assert [(f.name, f.planned, f.found) for f in findings] == [
        ("layers.0", "fp4", "fp4"),
        ("layers.1", "fp8", "fp8"),
        ("layers.2", "half, fp4 weights", "half, fp4 weights"),
        ("layers.3", "16 bit", "half"),
    ]


def test_a_layer_left_in_half_precision_fails_by_name(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain("fp8", "half", "fp8_a16"), shapes=SHAPES)
    plan = plan_of(*[("fp8", "fp8")] * 4)
    assert failures(audit(engine.path, plan)) == [
        "layers.1: planned fp8, found half",
        "layers.2: planned fp8, found half, fp8 weights",
        "layers.3: planned fp8, found no GEMM of its name in the engine",
    ]


def test_a_layer_that_was_not_exported_is_not_missed(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain("fp8"), shapes=SHAPES)
    findings = audit(engine.path, plan_of(("fp8", "fp8"), ("fp8", "fp8")), exported=["layers.0"])
    assert [(f.found, f.passed) for f in findings] == [("fp8", True), ("not in the exported graph", True)]


def test_each_profile_has_a_program_and_each_is_audited(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain("nvfp4"), shapes=["tokens=1:1:1", "tokens=2:64:512"])
    gemms = [kernel for kernel in read_kernels(engine.path) if kernel.is_gemm]
    assert len({kernel.program for kernel in gemms}) == 2
    assert [kernel.inputs[1].type for kernel in gemms] == ["fp4", "fp4"]
    assert audit(engine.path, plan_of(("nvfp4", "nvfp4")))[0].passed


@pytest.mark.parametrize(("quantized", "word"), [(True, "fp8"), (False, "half")])
@pytest.mark.parametrize("target", ["sm89", "sm120"])
def test_fused_attention(graphs: Any, build: Callable[..., Any], quantized: bool, word: str, target: str) -> None:
    engine = build(graphs.attention(quantized=quantized), target)
    plan = dataclasses.replace(plan_of(), attention=FORMATS["fp8"])
    (finding,) = audit_built(engine, plan)
    assert (finding.name, finding.planned, finding.found, finding.passed) == ("attention", "fp8", word, quantized)
    (kernel,) = [kernel for kernel in read_kernels(engine.path) if kernel.is_attention]
    assert kernel.name == "_gemm_mha_v2"
    assert [operand.type for operand in kernel.inputs[:3]] == [word] * 3


def test_attention_in_our_plugin(graphs: Any, build: Callable[..., Any]) -> None:
    pytest.importorskip("triton", reason="compiles the plugin's kernel")
    engine = build(graphs.attention(plugin=True))
    (finding,) = audit_built(engine, dataclasses.replace(plan_of(), attention=FORMATS["fp8"]), "plugin")
    assert (finding.name, finding.found, finding.passed) == ("attention", "fp8", True)
    assert engine.path.read_bytes().count(b".target sm_120a") >= 1


def test_attention_that_was_not_fused_is_missed(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.chain("fp8"), shapes=SHAPES)
    finding = audit(engine.path, attention="fp8", attention_nodes=["attention"])[-1]
    assert (finding.name, finding.found, finding.passed) == ("attention", "not fused", False)


def test_planned_precision() -> None:
    words = [
        planned_precision(layer)
        for layer in plan_of(("nvfp4", "nvfp4"), ("nvfp4", None), ("int8", "int8_token"), ("mxfp8", "mxfp8")).layers
    ]
    assert words == ["fp4", "half, fp4 weights", "int8", "fp8"]


@pytest.mark.parametrize("content", [b"", b"no engine at all" * 100])
def test_what_is_no_engine(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.engine"):
        audit(path)


def test_command(graphs: Any, build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build(graphs.chain("fp8", "half"), shapes=SHAPES)
    plan_of(("fp8", "fp8"), ("fp8", "fp8")).save(tmp_path / "plan.json")
    command = ["audit", str(engine.path), "--plan", str(tmp_path / "plan.json")]
    failed = CliRunner().invoke(main, [*command, "--quiet"])
    assert failed.exit_code == 2
    assert "not run as planned in the engine: layers.1: planned fp8, found half" in failed.stderr
    passed = CliRunner().invoke(main, [*command, "--json", "--allow-fallback"])
    assert passed.exit_code == 0
    assert [row["passed"] for row in json.loads(passed.stdout)] == [True, False]
    assert CliRunner().invoke(main, ["audit", str(engine.path), "--quiet"]).exit_code == 0


def test_command_refuses_the_plan_of_another_engine(graphs: Any, build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build(graphs.chain("fp8"), shapes=SHAPES)
    plan_of(("fp8", "fp8")).save(tmp_path / "plan.json")
    Path(f"{engine.path}.json").write_text(json.dumps({"plan": "0" * 64}))
    result = CliRunner().invoke(main, ["audit", str(engine.path), "--plan", str(tmp_path / "plan.json")])
    assert result.exit_code == 2
    assert "another plan" in result.stderr
