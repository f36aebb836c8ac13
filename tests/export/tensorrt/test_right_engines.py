"""Right engines pass `quant check ENGINE --checkpoint DIR`, with any dtypes of source and engine, inputs and caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import serving_samples
import tiny_models
import torch
from click.testing import CliRunner
from engine_samples import drawn

import quant
from quant.cli.main import main

pytestmark = pytest.mark.slow
pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHE: dict[str, Any] = {"capacity": 256}

CASES = [
    *[("resnet", "int8", source, {"dtype": dtype}) for source in ("fp32", "fp16") for dtype in ("fp16", "bf16", None)],
    ("resnet", "int8_static", "fp32", {"dtype": "fp16"}),
    ("resnet", "fp8", "fp32", {"dtype": "fp16"}),
    ("resnet", "fp8", "fp16", {"dtype": "bf16"}),
    ("bert", "fp8", "bf16", {}),
    ("bert", "nvfp4", "fp32", {"dtype": "bf16"}),
    ("vit", "int8_static", "fp16", {}),
    ("vit", "fp8", "fp32", {"dtype": "fp16"}),
    ("llama-64", "nvfp4", "fp32", {"dtype": "bf16", **CACHE}),
    ("llama-64", "int4a16", "fp16", {"capacity": 0, "target": "sm89"}),
    ("llama-64", "fp8", "fp16", {"inputs": {"input_ids": "int64:batch,sequence"}}),
    ("llama-64", "fp8", "bf16", {"kv_cache": "nvfp4", "data": IDS, **CACHE}),
    ("qwen3", "fp8", "fp16", CACHE),
    ("gemma3", "int8", "fp16", CACHE),
    ("mistral", "mxfp8", "bf16", {"target": "sm89,sm120", **CACHE}),
    ("bert", "int8", "fp16", {"dtype": "fp32"}),
    ("bert", "int4a16_g32", "bf16", {"dtype": "fp16"}),
    ("vit", "nvfp4", "bf16", {}),
    ("vit", "fp8_channel", "bf16", {"dtype": "fp32"}),
    ("llama-64", "int8_static", "fp32", CACHE),
    ("llama-64", "fp8@16bit", "bf16", {"dtype": "fp16", **CACHE}),
    ("llama-64", "nvfp4a16", "fp16", {"kv_cache": "fp8", "data": IDS, **CACHE}),
    ("qwen3", "int4a16", "bf16", CACHE),
    ("qwen3", "nvfp4", "fp32", {"dtype": "fp16", **CACHE}),
    ("gemma3", "fp8", "bf16", {"capacity": 0, "shapes": "sequence=1:16:32"}),
    ("gemma3", "int8_static", "fp32", {"dtype": "bf16", **CACHE}),
    ("resnet", "int8", "bf16", {"inputs": {"pixel_values": "bf16:batch,3,32,32"}}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "recipe", "source", "options"), CASES, ids=lambda case: str(case))
def test_a_right_engine_passes(tmp_path: Path, kind: str, recipe: str, source: str, options: dict[str, Any]) -> None:
    dtype, layers = DTYPES[source], {}
    if kind in serving_samples.DECODERS:
        model, x = serving_samples.decoder(kind, dtype=dtype), IDS
    else:
        model, x = drawn(getattr(tiny_models, kind)(gain=4.0)).to(dtype), torch.randn(2, 3, 32, 32, dtype=dtype)
        x = IDS if kind == "bert" else x
        layers = {"exclude": ["*embedder*", "*shortcut*"]} if kind == "resnet" else {}
    done = quant.quantize(model, recipe, x, run=lambda model: model(x), solver="rtn", **layers)
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    options = {"target": "sm120", **options}
    engine = quant.export_model(tmp_path / "checkpoint", "tensorrt", tmp_path / "model.engine", **options).path
    command = ["check", str(engine), "--checkpoint", str(tmp_path / "checkpoint"), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert all(row["passed"] for row in rows) and rows[-1]["found"].startswith("as the checkpoint is built")
