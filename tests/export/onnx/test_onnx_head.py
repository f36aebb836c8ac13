"""An output head in 16 bit becomes INT8 in a file for onnxruntime: by default of decoders in INT4 or INT8."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import tiny_models
import torch
from click.testing import CliRunner
from onnx_samples import relative_error, round_head

import quant
from quant.cli.main import main
from quant.export.checkpoint.load import load

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.engines.check_engine import check_engine, forced_run, reference_run  # noqa: E402 -- needs onnx
from quant.export.onnx.engine_session import OnnxruntimeSession  # noqa: E402 -- as above

ROWS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(3))
HEAD = "lm_head"


def quantized(format: str, **options: Any) -> Any:
    model = serving_samples.decoder("llama-64", num_hidden_layers=1, **options)
    return quant.quantize(model, format, ROWS, solver="rtn")


def test_a_tied_head_of_a_decoder_in_int4(tmp_path: Path) -> None:
    done = quantized("int4a16_g32", tie_word_embeddings=True)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    quant.save(done.model, done.plan, checkpoint)
    told = CliRunner().invoke(main, ["export", str(checkpoint), "--to", "onnx", "--capacity", "64", "--out", str(out)])
    assert told.exit_code == 0, told.output
    said = re.search(r"lm_head is in INT8 in groups of 32, ([\d.]+)% from", " ".join(told.output.split()))
    reference = load(checkpoint)
    exact = reference.get_output_embeddings().weight.detach().clone()
    round_head(reference)
    rounded = reference.get_output_embeddings().weight.detach()
    assert said is not None and abs(float(said[1]) / 100 - relative_error(rounded, exact)) < 1e-3
    file = onnx.load(out / "model.onnx")
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    codes, scale = (tensors[f"{HEAD}.{part}"] for part in ("codes", "scale"))
    assert codes.dtype == np.int8
    assert np.array_equal((codes * np.repeat(scale, 32, 0)).T, rounded.numpy())
    # The embedding stays as it is.
    assert any(np.array_equal(tensor, exact.numpy()) for tensor in tensors.values())
    prompts = [row.tolist() for row in ROWS]
    expected = reference_run(reference, prompts, 8)
    run = forced_run(OnnxruntimeSession(out / "model.onnx"), prompts, expected.tokens)
    # onnxruntime rounds inputs of INT4 and INT8 products to INT8 in groups.
    assert relative_error(torch.from_numpy(run.logits), torch.from_numpy(expected.logits)) < 2e-2
    assert check_engine(out / "model.onnx", checkpoint, new=8).passed


def test_a_checkpoint_without_a_plan(tmp_path: Path) -> None:
    """As of another tool: the file itself tells that its head was rounded, and the check rounds it again."""
    done = quantized("int4a16_g32")
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    quant.save(done.model, done.plan, checkpoint)
    (checkpoint / "plan.json").unlink()
    assert heads_of(quant.export_model(checkpoint, "onnx", out, capacity=64))
    told = CliRunner().invoke(main, ["check", str(out), "--source", str(checkpoint)])
    assert told.exit_code == 0, told.output
    assert " 0 of" not in told.output and "as the checkpoint is exported" in told.output


def heads_of(exported: quant.Exported) -> list[dict[str, Any]]:
    return [layer for layer in exported.layers if layer["name"] == HEAD]


@pytest.mark.parametrize(
    ("format", "head", "capacity", "is_rounded"),
    [
        ("int4a16_g32", "16bit", 64, False), ("fp8", "int8", 64, True), ("fp8", None, 64, False),
        ("int8_static", None, 64, True), ("int8", None, 0, False), ("int8", "int8", 0, True),
    ],
)  # fmt: skip
def test_which_heads_are_rounded(
    format: str, head: str | None, capacity: int, is_rounded: bool, tmp_path: Path
) -> None:
    done = quantized(format)
    exported = quant.export_model(done, "onnx", tmp_path / "out", capacity=capacity, lm_head=head)
    assert [layer["passed"] for layer in heads_of(exported)] == [True] * is_rounded
    assert any("lm_head is in INT8" in note for note in exported.record["notes"]) == is_rounded


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("llama", {"target": "tensorrt"}, 'target="tensorrt" does not take it'),
        ("llama", {"lm_head": "fp8"}, "expected one of int8, 16bit"),
        ("odd", {}, "its 48 inputs are no multiple of 32"),
        ("bert", {}, "this model has no output head in 16 bit"),
    ],
)
def test_what_is_refused(
    model: str, options: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is traced; a default that does not apply is no reason to refuse."""
    monkeypatch.setattr("quant.export.export_model.write_onnx", lambda *_, **__: pytest.fail("it was exported"))
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1} if model == "odd" else {}
    if model == "bert":
        done = quant.quantize(tiny_models.bert(), "fp8_channel", ROWS, solver="rtn")
    else:
        done = quantized("fp8_channel", **sizes)
    with pytest.raises(quant.UserError, match=reason):
        quant.export_model(done, "onnx", tmp_path / "out", **{"lm_head": "int8", **options})
    assert not (tmp_path / "out").exists()
