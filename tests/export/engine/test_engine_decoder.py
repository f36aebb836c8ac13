"""Decoders become engines: attention has its module's name, and a decoding step runs over a BF16 or FP8 cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from quant.api.quantize import quantize
from quant.calibration.kv_cache import collect_attention_scales, kv_scale_tensors
from quant.execution.install import install_kv_scales
from quant.export.engine.build import BuildOptions, export_engine
from quant.formats.format import FORMATS
from quant.recipes.plan import Plan

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

FP8 = FORMATS["fp8"]


@pytest.fixture
def decoder() -> tuple[Any, Plan, torch.Tensor]:
    """Two blocks in NVFP4, in BF16."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 96, "head_dim": 64}
    model = tiny_models.llama(**sizes, max_position_embeddings=2048, dtype=torch.bfloat16)
    tokens = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    return model, quantize(model, "nvfp4", tokens).plan, tokens


def attentions(receipt: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["found"] for row in receipt["audit"] if row["name"].endswith("self_attn")}


def test_attention_has_the_name_of_its_module(tmp_path: Path, decoder: tuple[Any, Plan, torch.Tensor]) -> None:
    model, plan, tokens = decoder
    scales = collect_attention_scales(model, tokens, kv_format=FP8, attention_format=FP8)
    receipt = export_engine(
        model,
        tmp_path / "model.engine",
        BuildOptions("sm120", "sequence=32:32:64"),
        plan=replace(plan, attention=FP8),
        attention_scales=scales,
    )
    assert attentions(receipt) == {f"model.layers.{i}.self_attn": "fp8" for i in range(2)}
    assert sum(row["found"] == "fp4" for row in receipt["audit"]) == len(plan.quantized) == 14


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_one_decoding_step(tmp_path: Path, decoder: tuple[Any, Plan, torch.Tensor], cache: str) -> None:
    model, plan, tokens = decoder
    if cache == "fp8":
        plan = replace(plan, kv_cache=FP8)
        scales = collect_attention_scales(model, tokens, kv_format=FP8, attention_format=None)
        install_kv_scales(model, kv_scale_tensors(scales, torch.bfloat16))
    receipt = export_engine(
        model, tmp_path / "model.engine", BuildOptions("sm120", "past=1:64:128"), plan=plan, cache="in"
    )
    assert receipt["passed"]
    assert sum(row["found"] == "fp4" for row in receipt["audit"]) == 14
    (profile,) = receipt["engine"]["profiles"]
    assert "past_value.1=1x2x1x64:1x2x64x64:4x2x128x64" in profile
