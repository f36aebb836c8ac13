"""The silent traps of TensorRT Edge-LLM's exporter are refused, and its ONNX file is compared with the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from samples import BASE

from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.packages import edge_llm
from quant.formats.format import FORMATS
from quant.plan.make import make_plan
from quant.recipes.plan import Plan

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.mark.parametrize(
    ("build", "format", "words"),
    [
        (lambda: serving_samples.decoder("gemma3"), "fp8", r"windows slide over 32 tokens, and .* ignores that"),
        (lambda: tiny_models.mistral(sliding_window=8), "fp8", r"windows slide over 8 tokens"),
        (lambda: tiny_models.llama(), "fp8_channel", r"model\.layers\.0\..* has no fp8_channel@fp8_token; it has fp8@"),
    ],
)
def test_what_the_exporter_misreads(build: Any, format: str, words: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=words):
        edge_llm.check_edge_llm(model, make_plan(model, format))


def test_inputs_of_nvfp4_are_rounded() -> None:
    model = tiny_models.llama()
    plan = make_plan(model, "nvfp4")
    edge_llm.check_edge_llm(model, plan)
    plan = plan.replace_layers([replace(layer, activation=None) for layer in plan.layers])
    with pytest.raises(ValueError, match=r"model\.layers\.0\..*: its inputs are in 16 bit, and .* rounds those"):
        edge_llm.check_edge_llm(model, plan)


def _graph(path: Path, initializers: dict[str, np.ndarray], *kinds: str) -> None:
    helper = onnx.helper
    nodes = [helper.make_node(kind, ["x"], [f"y{index}"]) for index, kind in enumerate(kinds)]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in initializers.items()]
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], constants)), path)


def test_the_exported_graph_has_the_codes_and_the_roundings(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    codes = {name: generator.integers(0, 255, (8, 16), np.uint8) for name in ("q", "k", "o")}
    save_file({f"{n}.weight": torch.from_numpy(x) for n, x in codes.items()}, tmp_path / "model.safetensors")
    layer = make_plan(tiny_models.llama(), "fp8").quantized[0]
    plan = Plan(tuple(replace(layer, name=name) for name in codes))
    out = tmp_path / "onnx"
    right = {"qk": np.concatenate([codes["q"], codes["k"]]), "o": codes["o"]}
    _graph(out / "m.onnx", right, "QuantizeLinear")
    assert edge_llm.check_exported(tmp_path, out, plan) == {"codes_found": 3, "codes_in_another_layout": 0}
    _graph(out / "m.onnx", {**right, "o": codes["o"][::-1].copy()}, "QuantizeLinear")
    with pytest.raises(ValueError, match=r"o\.weight and 0 more are not in the exported graph"):
        edge_llm.check_exported(tmp_path, out, plan)
    _graph(out / "m.onnx", right, "Identity")
    with pytest.raises(ValueError, match=r"does not round inputs, and the plan rounds those of 3 layers"):
        edge_llm.check_exported(tmp_path, out, plan)
    alone = Plan(tuple(replace(layer, name=name, weight=FORMATS["nvfp4"], activation=None) for name in codes))
    _graph(out / "m.onnx", right, "TRT_FP4DynamicQuantize")
    with pytest.raises(ValueError, match=r"the exported graph rounds inputs, and the plan rounds those of 0 layers"):
        edge_llm.check_exported(tmp_path, out, alone)


@pytest.mark.filterwarnings("default:the exporter is not installed here")
def test_the_directory_without_the_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.api.export.has_exporter", lambda: False)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    arguments = [str(BASE), "--format", "mxfp8", "--effort", "0", "--out", str(checkpoint), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    result = CliRunner().invoke(main, ["export", str(checkpoint), "--to", "edge-llm", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"run: tensorrt-edgellm-export {out}/checkpoint {out}/onnx" in result.stderr
    assert (out / "checkpoint" / "hf_quant_config.json").is_file()
