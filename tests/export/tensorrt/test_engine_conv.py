"""Engines run convolutions in the precision that they were planned in, and the audit says where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quant
from quant.recipes.layers import LayerKind

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")

from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.export_onnx import write_onnx
from quant.export.tensorrt.audit import audit, failures
from quant.export.tensorrt.build import BuildOptions, build_engine


class Convs(nn.Module):
    """A plain convolution, a transposed one, a depthwise one, and one that stays in 16 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.up = nn.Conv2d(16, 32, 3, padding=1), nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.depthwise, self.kept = nn.Conv2d(32, 32, 3, groups=32, padding=1), nn.Conv2d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(torch.relu(self.depthwise(torch.relu(self.up(torch.relu(self.plain(x)))))))


@pytest.mark.parametrize(
    ("weight", "activation", "found"),
    [("int8", "int8_tensor", "int8"), ("fp8_channel", "fp8_token", "fp8"), ("int8", "keep", "half, int8 weights")],
)
def test_the_audit_finds_convolutions_by_name(tmp_path: Path, weight: str, activation: str, found: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 8, 8, dtype=torch.float16)
    recipe = quant.Recipe("x", weight=weight, activation=activation).with_rules(
        quant.Rule("*", weight, activation), quant.Rule("kept", "keep")
    )
    done = quant.quantize(Convs().half(), recipe, [x], run=lambda m: m(x))
    write_onnx(done.model, tmp_path / "m.onnx", inputs={"x": GraphInput(x, ("batch", 16, 8, 8))})
    built = build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", BuildOptions("sm120"))
    findings = audit(built.path, done.plan, exported=built.contents["layers"])
    half = f"half, {found.split()[-2] if activation == 'keep' else found} weights"
    assert {f.name: f.found for f in findings} == {"plain": found, "up": half, "depthwise": found, "kept": "half"}
    fallbacks = [] if activation == "keep" else [f"up: planned {found}, found {half}"]
    assert failures(findings) == fallbacks
    # A convolution that was planned in 8 bit and never quantized is found too.
    kept = done.plan.replace_layers(
        [quant.LayerPlan("kept", LayerKind.CONV, (16, 32, 1, 1), done.plan.quantized[0].weight)]
    )
    assert any(
        text.startswith("kept: planned")
        for text in failures(audit(built.path, kept, exported=built.contents["layers"]))
    )
