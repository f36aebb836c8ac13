"""An engine is compared with its checkpoint, exported and built again; the rows say what was compared and what not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.export.checkpoint.load import describe
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.tensorrt import build as builder
from quant.export.tensorrt.audit import UNPLANNED, AuditRow, failures
from quant.export.tensorrt.engine_file import read_engine

pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")

from quant.export.tensorrt.rebuild import audit_with_checkpoint

SAME = AuditRow("the graph", "as the checkpoint is exported", "as the checkpoint is exported", True)
INPUTS = {"x": "fp16:rows,64"}


def perceptron(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), activation or nn.GELU(), nn.Linear(96, 64)
    return nn.Sequential(*layers).eval().half()


@pytest.fixture(scope="module")
def done() -> Any:
    return quant.quantize(perceptron(), "fp8", torch.randn(5, 64).half())


@pytest.fixture(scope="module")
def checkpoint(done: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    quant.save(done.model, done.plan, directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.engine"
    quant.export_model(checkpoint, "tensorrt", path, module=perceptron(), inputs=INPUTS, target="sm120")
    return path


def check(engine: Path, checkpoint: Path, **options: Any) -> list[AuditRow]:
    """The findings about the graph and the engine, which follow those about precision."""
    rows = audit_with_checkpoint(engine, quant.load(checkpoint, perceptron()), describe(checkpoint)[0], **options)
    return [row for row in rows if row.planned not in ("fp8", "16 bit")]


def test_an_engine_with_inputs_is_built_again_byte_for_byte(engine: Path, checkpoint: Path) -> None:
    built = "as the checkpoint is built"
    assert check(engine, checkpoint) == [SAME, AuditRow("the engine", built, f"{built}, byte for byte", True)]


def test_what_was_not_compared_is_said(engine: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "not built again and not compared: "
    assert check(engine, checkpoint, rebuild=False) == [
        SAME, AuditRow("the engine", UNPLANNED, f"{said}as was asked", True)
    ]  # fmt: skip
    installed = importlib.metadata.version
    own = installed("tensorrt_rtx")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: installed(name) + ".9" * (name == "tensorrt_rtx"))
        (_, row) = check(engine, checkpoint)
        assert row.found == f"{said}tensorrt_rtx {own} built it, and {own}.9 is installed here" and row.passed
        with pytest.raises(UserError, match=r"cannot be built again: .* is installed here; leave --rebuild out"):
            check(engine, checkpoint, rebuild=True)
    # Another version of torch may trace another graph: nobody can say whether this is a right engine.
    other = quant.load(checkpoint, perceptron())
    other.get_submodule("0").bias.data += 1
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: installed(name) + ".9" * (name == "torch"))
        (row,) = failures(audit_with_checkpoint(engine, other, describe(checkpoint)[0]))
        assert f"to compare it, use torch=={installed('torch')}, which exported it" in row


def test_an_engine_that_says_it_is_of_the_right_graph(
    engine: Path, done: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests are those of the right graph: only building it again tells."""
    digests, described = read_engine(engine).record["contents"]["graph"], builder.describe_graph
    inputs = {"x": GraphInput(torch.zeros(2, 64).half(), ("rows", 64))}
    wrong, path = quant.load(checkpoint, perceptron(nn.ReLU())), tmp_path / "wrong.engine"
    with monkeypatch.context() as patch:
        patch.setattr(builder, "describe_graph", lambda *given: {**described(*given), "graph": digests})
        builder.export_engine(wrong, path, builder.BuildOptions("sm120"), plan=done.plan, inputs=inputs)
    assert failures(check(path, checkpoint, rebuild=False)) == []
    assert "1/Relu" in "".join(failures(check(path, checkpoint)))


def test_a_changed_constant(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    data, table = bytearray(engine.read_bytes()), read_engine(engine).table
    assert table is not None
    data[table + 8] ^= 1
    (tmp_path / "tiny.engine").write_bytes(data)
    assert failures(check(tmp_path / "tiny.engine", checkpoint))[0].endswith("found other constants")


def test_an_engine_is_the_file_that_its_receipt_describes(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Most bits of an engine with a KV cache belong to no kernel, whose parts are compared."""
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "tiny.engine").write_bytes(data)
    shutil.copy(engine.with_name("tiny.engine.json"), tmp_path)
    failed = CliRunner().invoke(main, ["check", str(tmp_path / "tiny.engine"), "--plan", str(checkpoint)])
    said = "tiny.engine is not the file that tiny.engine.json describes: their SHA-256 differ; export it again"
    assert failed.exit_code == 2 and said in failed.stderr
    (tmp_path / "tiny.engine").write_bytes(engine.read_bytes())
    right = CliRunner().invoke(main, ["check", str(tmp_path / "tiny.engine"), "--quiet"])
    assert right.exit_code == 0, right.output


def test_a_foreign_engine(checkpoint: Path, graphs: Any, build: Callable[..., Any]) -> None:
    foreign = build(graphs.chain("fp8"), shapes="tokens=1:16:64").path
    with pytest.raises(UserError, match="it does not say how it was exported"):
        check(foreign, checkpoint)


def test_a_plan_alone_expects_every_layer(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Without a checkpoint nobody can say that no output depends on a layer, whatever the engine says."""
    plan = describe(checkpoint)[0]
    missing = dataclasses.replace(plan.layers[0], name="3")
    dataclasses.replace(plan, layers=(*plan.layers, missing)).save(tmp_path / "plan.json")
    (tmp_path / "tiny.engine").write_bytes(engine.read_bytes())  # without its receipt
    command = ["check", str(tmp_path / "tiny.engine"), "--plan", str(tmp_path / "plan.json"), "--quiet"]
    failed = CliRunner().invoke(main, command)
    assert failed.exit_code == 2 and "3: planned fp8, found no GEMM of its name in the engine" in failed.stderr


def test_a_record_that_is_too_long_for_a_name_is_read_from_the_receipt(tmp_path: Path) -> None:
    """TensorRT drops a network's name of more than 4,096 characters, which a model of 30 blocks needs."""

    def deep() -> nn.Module:
        torch.manual_seed(0)
        # One name of a real model's length for each layer.
        return nn.Sequential(
            OrderedDict((f"encoder_layers_{i}_projection", nn.Linear(64, 64)) for i in range(64))
        ).half()

    checkpoint, engine = tmp_path / "deep", tmp_path / "deep.engine"
    done = quant.quantize(deep(), "fp8", torch.randn(5, 64).half())
    quant.save(done.model, done.plan, checkpoint)
    quant.export_model(checkpoint, "tensorrt", engine, module=deep(), inputs=INPUTS, target="sm120")
    plan, right = describe(checkpoint)[0], quant.load(checkpoint, deep())
    assert failures(audit_with_checkpoint(engine, right, plan, rebuild=False)) == []
    wrong = quant.load(checkpoint, deep())
    wrong.get_submodule("encoder_layers_63_projection").bias.data += 1
    (found,) = failures(audit_with_checkpoint(engine, wrong, plan, rebuild=False))
    assert found == "encoder_layers_63_projection: planned as the checkpoint is exported, found other numbers"
    receipt = engine.with_name("deep.engine.json")
    fields = json.loads(receipt.read_text())
    fields["engine"]["contents"]["layers"].pop()
    for text in (json.dumps(fields), None):
        receipt.write_text(text) if text else receipt.unlink()
        with pytest.raises(UserError, match=r"deep\.engine\.json, which says how it was exported, is missing or an"):
            audit_with_checkpoint(engine, right, plan)
