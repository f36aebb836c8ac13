"""Decoders become engines: attention has its module's name, and one engine reads prompts and decodes."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving_samples
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from quant.base.errors import UserError
from quant.calibration.attention_scales import collect_attention_scales
from quant.cli.main import main
from quant.export.checkpoint.save import save
from quant.export.export_model import export_model
from quant.export.onnx.export_onnx import write_onnx
from quant.export.tensorrt.build import BuildOptions, export_engine
from quant.formats.format import FORMATS
from quant.recipes.plan import Plan
from quant.run.api import quantize

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.engines.check_engine import open_session  # noqa: E402 -- needs onnx

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


@pytest.mark.parametrize(
    ("kind", "blocks", "format", "target", "dtype", "attention"),
    [
        ("llama-64", 1, "fp8", "sm89", torch.float16, True),
        pytest.param("llama-64", 1, "nvfp4", "sm120", torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param("llama-256", 2, "int4a16", "sm89", torch.float16, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, "fp8", "sm120", torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param("mistral", 2, "nvfp4", "sm120", torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, "fp8", "sm89", torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_one_engine_reads_prompts_and_decodes(
    tmp_path: Path, kind: str, blocks: int, format: str, target: str, dtype: torch.dtype, attention: bool
) -> None:
    model = serving_samples.decoder(kind, num_hidden_layers=blocks, dtype=dtype)
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    plan, options = quantize(model, format, tokens, solver="rtn").plan, {}
    if attention:
        scales = collect_attention_scales(model, tokens, kv_format=FP8, attention_format=FP8)
        plan, options = replace(plan, attention=FP8), {"attention_scales": scales}
    engine = tmp_path / "model.engine"
    receipt = export_engine(model, engine, BuildOptions(target), plan=plan, capacity=256, **options)
    planned = [row for row in receipt["audit"] if row["planned"] not in ("–", "16 bit")]
    assert len(planned) == len(plan.quantized) + (blocks if attention else 0) and all(row["passed"] for row in planned)
    assert set(attentions(receipt).values()) == {"fp8" if attention else "half"}
    decode, prefill = receipt["engine"]["profiles"]
    assert decode.startswith("input_ids=1x1:8x1:32x1,lengths=1:8:32,")
    assert prefill.startswith(f"input_ids=1x{32 if attention else 1}:1x128:8x256,")
    # Each attention is compiled twice: for one query, and for many.
    program = engine.read_bytes()
    assert program.count(b"name=_gemv_mha_v1") == program.count(b"name=_gemm_mha_v2") == blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "format", "dtype"), [(2, "fp8", "float16"), (1, "fp8", "bfloat16"), (1, "int4a16_g32", "float32")]
)
def test_few_heads_and_fp32_build(heads: int, format: str, dtype: str, tmp_path: Path) -> None:
    """Under four heads, Myelin's raw error; INT4 in FP32, "planned half, found float"."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = tiny_models.llama(**sizes, dtype=getattr(torch, dtype))
    done = quantize(model, format, torch.zeros(2, 24, dtype=torch.long), solver="rtn")
    exported = export_model(done, "tensorrt", tmp_path / "model.engine", target="sm89", capacity=64)
    precision = {"fp8": "fp8", "int4a16_g32": "float, int4 weights"}[format]
    assert {row["found"] for row in exported.audit if row["planned"] == precision} == {precision}


def test_profiles_that_the_cache_does_not_take(tmp_path: Path) -> None:
    model = serving_samples.decoder("llama-64", num_hidden_layers=1, dtype=torch.float16)
    path = write_onnx(model, tmp_path / "m.onnx", capacity=256)
    for shapes, words in (
        ("sequence=1:128:512", r"a sequence of 512 does not fit into a KV cache of 256 \(capacity=\)"),
        ("past=1:2:3", r"no input or dimension 'past'"),
    ):
        with pytest.raises(ValueError, match=words):
            export_engine(path, tmp_path / "m.engine", BuildOptions("sm89", shapes))


@pytest.mark.slow
@pytest.mark.filterwarnings("default:the KV cache in nvfp4 is a node")
def test_the_command_builds_an_engine_over_an_nvfp4_cache(
    tmp_path: Path, decoder: tuple[Any, Plan, torch.Tensor]
) -> None:
    """Scales are measured on --calib; the small loop in Python refuses the engine."""
    model, plan, tokens = decoder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tiny model, on its layout for vLLM
        save(model, plan, tmp_path / "ckpt")
    save_file({"ids": tokens.flatten()}, tmp_path / "ids.safetensors")
    arguments = ["export", tmp_path / "ckpt", "--to", "tensorrt", "--out", tmp_path / "model.engine", "--capacity", 256]
    arguments += ["--kv-cache", "nvfp4", "--calib", tmp_path / "ids.safetensors", "--seqlen", 32]
    arguments += ["--calib-samples", 4, "--target", "sm120"]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "the KV cache in nvfp4 is a node of our plugin" in " ".join(result.stderr.split())
    receipt = json.loads((tmp_path / "model.engine.json").read_text())
    assert receipt["passed"] and receipt["engine"]["kv_cache"] == "nvfp4"
    with pytest.raises(UserError, match="its KV cache is in nvfp4, by our plugin, which runs in C"):
        open_session(tmp_path / "model.engine")
