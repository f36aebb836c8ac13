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
from quant.cli.quantize_command import quantize_command
from quant.export.packages import edge_llm
from quant.formats.format import FORMATS
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.mark.parametrize(
    ("build", "format", "words"),
    [
        (lambda: serving_samples.decoder("gemma3"), "fp8", r"windows slide over 32 tokens, and .* ignores that"),
        (lambda: tiny_models.mistral(sliding_window=8), "fp8", r"windows slide over 8 tokens"),
        (
            lambda: tiny_models.qwen3_moe(),
            "fp8",
            r"experts\..*: .* has no fp8@fp8 for experts; it has int4@16bit, nvfp4@",
        ),
        (lambda: tiny_models.mixtral(), "nvfp4", r"experts, qwen3_moe is tried .*, and this is mixtral; serve its"),
        (lambda: tiny_models.t5(), "fp8", r"T5\w+: TensorRT Edge-LLM runs decoders, and this model is none"),
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
    with pytest.raises(ValueError, match=r"the exported graph lacks o\.weight; this"):
        edge_llm.check_exported(tmp_path, out, plan)
    _graph(out / "m.onnx", right, "Identity")
    with pytest.raises(ValueError, match=r"does not round inputs, and the plan rounds those of 3 layers"):
        edge_llm.check_exported(tmp_path, out, plan)
    alone = Plan(tuple(replace(layer, name=name, weight=FORMATS["nvfp4"], activation=None) for name in codes))
    _graph(out / "m.onnx", right, "TRT_FP4DynamicQuantize")
    with pytest.raises(ValueError, match=r"the exported graph rounds inputs, and the plan rounds those of 0 layers"):
        edge_llm.check_exported(tmp_path, out, alone)


@pytest.mark.parametrize("layout", ["turns", "one after the other"])
def test_experts_are_compared_as_the_plugin_reads_them(tmp_path: Path, layout: str) -> None:
    """The layouts as tensorrt_edgellm 0.11 wrote them for a tiny Qwen3-MoE, whose file passes, built here by loops."""
    experts, inter, hidden = 3, 128, 64
    generator = np.random.default_rng(0)
    stack = "model.layers.0.mlp.experts"
    tensors: dict[str, np.ndarray] = {}
    for expert in range(experts):
        shared = generator.random(1, np.float32)
        for matrix, rows, columns in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
            name = f"{stack}.{expert}.{matrix}_proj.weight"
            tensors[name] = generator.integers(0, 255, (rows, columns // 2), np.uint8)
            tensors[f"{name}_scale"] = generator.integers(0, 126, (rows, columns // 16), np.uint8)
            tensors[f"{name}_scale_2"] = shared.copy() if matrix != "down" else generator.random(1, np.float32)
    stored = {name: torch.from_numpy(x) for name, x in tensors.items()}
    stored |= {n: x.view(torch.float8_e4m3fn) for n, x in stored.items() if n.endswith("_scale")}
    save_file({n: x[0] if n.endswith("_scale_2") else x for n, x in stored.items()}, tmp_path / "model.safetensors")
    layers = make_plan(tiny_models.qwen3_moe(), "nvfp4").quantized
    plan = Plan(tuple(layer for layer in layers if layer.name.startswith(stack)))

    def of(expert: int, matrix: str, part: str = "") -> np.ndarray:
        return tensors[f"{stack}.{expert}.{matrix}_proj.weight{part}"]

    def merged(expert: int, part: str, first: str, second: str) -> np.ndarray:
        turn = 64 if layout == "turns" else inter
        starts = range(0, inter, turn)
        return np.concatenate([of(expert, m, part)[s : s + turn] for s in starts for m in (first, second)])

    def tiled(scales: np.ndarray) -> np.ndarray:
        rows, blocks = scales.shape
        tiles = np.zeros((-(-rows // 128), -(-blocks // 4), 32, 4, 4), np.uint8)
        for row in range(rows):
            for block in range(blocks):
                tiles[row // 128, block // 4, row % 32, row % 128 // 32, block % 4] = scales[row, block]
        return tiles

    def initializers(first: str, second: str) -> dict[str, np.ndarray]:
        every = range(experts)
        return {
            "fc1": np.stack([merged(e, "", first, second) for e in every]),
            "fc1_scale": np.stack([tiled(merged(e, "_scale", first, second)) for e in every]),
            "fc1_alpha": np.concatenate([of(e, "gate", "_scale_2") for e in every]),
            "fc2": np.stack([of(e, "down") for e in every]),
            "fc2_scale": np.stack([tiled(of(e, "down", "_scale")) for e in every]),
            "fc2_alpha": np.concatenate([of(e, "down", "_scale_2") for e in every]),
        }

    out, node = tmp_path / "onnx", "TRT_FP4DynamicQuantize"
    _graph(out / "m.onnx", initializers("up", "gate"), node)
    found = {"codes_found": 3 * experts, "codes_in_another_layout": 0}
    assert edge_llm.check_exported(tmp_path, out, plan) == found
    assert "drops the input scales of NVFP4 experts" in edge_llm.expert_note(plan)[0]
    _graph(out / "m.onnx", initializers("gate", "up"), node)
    with pytest.raises(ValueError, match=rf"lacks {stack}: the codes of gate and up and 1 more, as"):
        edge_llm.check_exported(tmp_path, out, plan)
    rescaled = initializers("up", "gate")
    rescaled["fc1_alpha"] = rescaled["fc1_alpha"] * 2
    _graph(out / "m.onnx", rescaled, node)
    with pytest.raises(ValueError, match=rf"lacks {stack}: the global scales of gate and up, as"):
        edge_llm.check_exported(tmp_path, out, plan)
    # The exporter may only rescale a gate and an up whose scales differ.
    for expert in range(experts):
        stored[f"{stack}.{expert}.up_proj.weight_scale_2"] += 1
    save_file({n: x[0] if n.endswith("_scale_2") else x for n, x in stored.items()}, tmp_path / "model.safetensors")
    assert edge_llm.check_exported(tmp_path, out, plan) == found


@pytest.mark.filterwarnings("default:the exporter is not installed here")
def test_the_directory_without_the_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.export.exporters.has_exporter", lambda: False)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    arguments = [str(BASE), "--format", "mxfp8", "--effort", "0", "--out", str(checkpoint), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    result = CliRunner().invoke(main, ["export", str(checkpoint), "--to", "edge-llm", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"run: tensorrt-edgellm-export {out}/checkpoint {out}/onnx" in result.stderr
    assert (out / "checkpoint" / "hf_quant_config.json").is_file()
