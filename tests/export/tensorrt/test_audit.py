"""The audit tells what a built engine runs; every claim here is about an engine that TensorRT built in the test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from samples import BASE

import quant
from quant.cli.main import main
from quant.export.checkpoint.files.tensor_file import sha256_of
from quant.export.tensorrt.audit import audit, failures, planned_precision
from quant.export.tensorrt.build import BuildOptions, audit_built, export_engine
from quant.export.tensorrt.engine_file import _updated_inputs, read_engine
from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind
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
        LayerPlan(f"layers.{i}", LayerKind.LINEAR, (256, 256), FORMATS[w] if w else None, FORMATS[a] if a else None)
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
    gemms = [kernel for kernel in read_engine(engine.path).kernels if kernel.is_gemm]
    assert len({kernel.program for kernel in gemms}) == 2
    assert [kernel.inputs[1].type for kernel in gemms] == ["fp4", "fp4"]
    assert audit(engine.path, plan_of(("nvfp4", "nvfp4")))[0].passed


@pytest.mark.parametrize(
    ("quantized", "target"),
    [
        (True, "sm89"),
        (False, "sm120"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, "sm120"), (False, "sm89"))),
    ],
)
def test_fused_attention(graphs: Any, build: Callable[..., Any], quantized: bool, target: str) -> None:
    word = "fp8" if quantized else "half"
    engine = build(graphs.attention(quantized=quantized), target)
    plan = dataclasses.replace(plan_of(), attention=FORMATS["fp8"])
    (finding,) = audit_built(engine, plan)
    assert (finding.name, finding.planned, finding.found, finding.passed) == ("attention", "fp8", word, quantized)
    (kernel,) = [kernel for kernel in read_engine(engine.path).kernels if kernel.is_attention]
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
    assert words == ["fp4", "half, fp4 weights", "int8", "half, fp8 weights"]
    # Of a model in FP32 alone nothing is in half precision.
    assert [planned_precision(layer, "float") for layer in plan_of(("int4", None)).layers] == ["float, int4 weights"]


@pytest.mark.parametrize("content", [b"", b"no engine at all" * 100])
def test_what_is_no_engine(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.engine"):
        audit(path)


def test_an_engine_that_was_cut_short(graphs: Any, build: Callable[..., Any]) -> None:
    """Its programs come first, so its precisions could be listed."""
    engine = build(graphs.chain("fp8"), shapes=SHAPES).path
    data = engine.read_bytes()
    engine.write_bytes(data[:-200])
    with pytest.raises(ValueError, match=rf"the engine has {len(data)} bytes, and this file {len(data) - 200}: it was"):
        audit(engine)


def test_inputs_that_are_updated_in_place_are_known_by_their_positions() -> None:
    """As TensorRT-RTX 1.7 writes them: an updated input has the name of its output there, and all have a counter."""
    names = ("lengths", "past_key.0", "past_value.0")
    bindings = {name: (True, index) for index, name in enumerate(names)}
    bindings |= {"new_key.0": (False, 3), "new_value.0": (False, 4)}
    program = '  x\n  inputs={{ "lengths.1" "{}.1" "{}.1" "{{ForeignNode[a...b]}}_shapeInput.1" }}\n'
    right = _updated_inputs(bindings, program.format("new_key.0", "new_value.0"))
    assert right == {"past_key.0": "new_key.0", "past_value.0": "new_value.0"}
    wrong = _updated_inputs(bindings, program.format("new_value.0 [profile 1]", "new_key.0"))
    assert wrong == {"past_key.0": "new_value.0", "past_value.0": "new_key.0"}
    # Another order of inputs, and a program without the line, say nothing.
    assert _updated_inputs(bindings, program.format("past_value.0", "new_key.0")) == {}
    assert _updated_inputs(bindings, "") == {}


def test_command(graphs: Any, build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build(graphs.chain("fp8", "half"), shapes=SHAPES)
    plan_of(("fp8", "fp8"), ("fp8", "fp8")).save(tmp_path / "plan.json")
    command = ["check", str(engine.path), "--plan", str(tmp_path / "plan.json")]
    failed = CliRunner().invoke(main, [*command, "--quiet"])
    assert failed.exit_code == 2
    assert "not run as planned in the engine: layers.1: planned fp8, found half" in failed.stderr
    passed = CliRunner().invoke(main, [*command, "--json", "--allow-fallback"])
    assert passed.exit_code == 0
    assert [row["passed"] for row in json.loads(passed.stdout)] == [True, False]
    assert CliRunner().invoke(main, ["check", str(engine.path), "--quiet"]).exit_code == 0


def test_command_refuses_the_plan_of_another_engine(graphs: Any, build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build(graphs.chain("fp8"), shapes=SHAPES)
    plan_of(("fp8", "fp8")).save(tmp_path / "plan.json")
    receipt = {"plan": "0" * 64, "engine": {"sha256": sha256_of(engine.path), "target": "sm120", "backend": "other"}}
    Path(f"{engine.path}.json").write_text(json.dumps(receipt))
    result = CliRunner().invoke(main, ["check", str(engine.path), "--plan", str(tmp_path / "plan.json")])
    assert result.exit_code == 2
    assert "another plan" in result.stderr


@pytest.fixture
def module() -> Any:
    """Two linears that a plan has in FP8; the second was left as it is."""
    from torch import nn

    from quant.formats.tensor import quantize
    from quant.kernels.linear.quant_linear import QuantLinear

    scale = torch.tensor(0.02)
    held = quantize(torch.randn(64, 64, dtype=torch.float16), FORMATS["fp8"])
    first = QuantLinear(held, torch.zeros(64, dtype=torch.float16), FORMATS["fp8"], scale)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(64, 64, dtype=torch.float16))


def test_a_layer_that_was_never_quantized_fails(module: Any, tmp_path: Path) -> None:
    """Its nodes have its name, too; a layer that the graph lacks is not missed."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    from quant.export.onnx.decoder_graph import GraphInput

    names = ("0", "2", "pooler")
    plan = Plan(tuple(LayerPlan(name, LayerKind.LINEAR, (64, 64), FORMATS["fp8"], FORMATS["fp8"]) for name in names))
    inputs = {"x": GraphInput(torch.zeros(2, 4, 64, dtype=torch.float16), ("batch", 4, 64))}
    build, options = BuildOptions("sm89", "batch=1:2:4"), {"plan": plan, "inputs": inputs}
    with pytest.raises(ValueError, match=r"not run as planned in the engine: 2: planned fp8, found half\. Change"):
        export_engine(module, tmp_path / "m.engine", build, **options)
    assert not (tmp_path / "m.engine").exists()
    receipt = export_engine(module, tmp_path / "m.engine", build, allow_fallback=True, **options)
    assert [(row["name"], row["found"], row["passed"]) for row in receipt["audit"]] == [
        ("0", "fp8", True),
        ("2", "half", False),
        ("pooler", "not in the exported graph", True),
    ]
    assert receipt["engine"]["contents"]["layers"] == ["0", "2"]


def test_another_models_engine_fails(tmp_path: Path) -> None:
    """Formats and plan are the same; the codes are not."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    rows = torch.randint(0, 64, (2, 16))
    for seed, name in ((0, "ours"), (1, "theirs")):
        model = tiny_models.llama(seed=seed, num_hidden_layers=1, dtype=torch.float16)
        result = quant.quantize(model, "int8", rows)
        quant.save(result.model, result.plan, tmp_path / name)
        if name == "ours":
            engine = tmp_path / "ours.engine"
            build = BuildOptions("sm89", "batch=1:1:1,sequence=1:8:16")
            export_engine(result.model, engine, build, plan=result.plan)
    command = ["check", str(engine), "--quiet", "--plan"]
    assert CliRunner().invoke(main, [*command, str(tmp_path / "ours" / "plan.json")]).exit_code == 0
    # The checkpoint alone says what was planned, too.
    listed = CliRunner().invoke(main, ["check", str(engine), "--json", "--checkpoint", str(tmp_path / "ours")])
    planned = {row["planned"] for row in json.loads(listed.stdout) if row["name"].endswith("up_proj")}
    assert planned == {"int8"}
    failed = CliRunner().invoke(main, [*command, str(tmp_path / "theirs" / "plan.json")])
    assert failed.exit_code == 2
    assert "model.layers.0.self_attn.q_proj: planned as the checkpoint is exported, found other" in failed.stderr


def test_attention_is_not_dropped_without_a_word(tmp_path: Path) -> None:
    model = quant.open_model(BASE).model
    result = quant.quantize(model, "fp8", torch.randint(0, 256, (2, 16)))
    quant.save(result.model, dataclasses.replace(result.plan, attention=FORMATS["fp8"]), tmp_path / "out")
    command = ["export", str(tmp_path / "out"), "--to", "torch-tensorrt", "--out", str(tmp_path / "m.engine")]
    failed = CliRunner().invoke(main, [*command, "--target", "sm89"])
    assert failed.exit_code == 2 and not (tmp_path / "m.engine").exists()
    assert (
        "the plan has attention in fp8, and torch-tensorrt has no op for that: pass --attention none" in failed.stderr
    )
    # Past that check, only torch-tensorrt may be missing here.
    told = CliRunner().invoke(main, [*command, "--target", "sm89", "--attention", "none"])
    assert told.exit_code == 0 or "torch-tensorrt cannot be imported" in told.stderr
