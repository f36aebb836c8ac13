"""Transformers models become graphs; the reference evaluator runs the files, and the model itself is the peer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from onnx_samples import attention_operators, relative_error
from torch import nn

from quant.api.quantize import quantize
from quant.calibration.blocks import cache_argument
from quant.calibration.kv_cache import collect_attention_scales, kv_scale_tensors
from quant.execution.install import install_kv_scales
from quant.formats.format import FORMATS
from quant.plan.make import make_plan
from quant.recipes.plan import Plan

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.onnx_graph.decoder import Attention, Graph, attending, kv_scales_of, operand_scales  # noqa: E402
from quant.export.onnx_graph.export import export_onnx  # noqa: E402
from quant.export.onnx_graph.reference import evaluator  # noqa: E402
from quant.export.onnx_graph.verify import check_file, to_numpy  # noqa: E402

FP8 = FORMATS["fp8"]


def llama(dtype: torch.dtype, layers: int = 1) -> Any:
    sizes = {"vocab_size": 96, "head_dim": 64, "max_position_embeddings": 128}
    return tiny_models.llama(**sizes, num_hidden_layers=layers, dtype=dtype)


@pytest.fixture(scope="module")
def decoder() -> tuple[Any, Plan]:
    """FP8 weights and 16-bit inputs, in FP32: no rounding at run time that could go two ways."""
    model = llama(torch.float32, layers=2)
    plan = quantize(model, Plan(_weight_only(model))).plan
    return model, plan


def _weight_only(model: nn.Module) -> tuple[Any, ...]:
    return tuple(replace(layer, activation=None) for layer in make_plan(model, "fp8").layers)


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))


def run(path: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = onnx.load(path)
    names = [value.name for value in model.graph.output]
    found = evaluator(model, attention_operators()).run(None, {name: to_numpy(x) for name, x in inputs.items()})
    return {name: torch.from_numpy(np.asarray(y, dtype=np.float32)) for name, y in zip(names, found, strict=True)}


def test_prefill_and_decoding_go_on_where_the_other_stopped(decoder: tuple[Any, Plan], tmp_path: Path) -> None:
    model, plan = decoder
    tokens = ids(3, 12)
    with torch.no_grad():
        expected = model(tokens).logits
    prefill = export_onnx(model, tmp_path / "prefill.onnx", plan=plan, cache="out")
    decode = export_onnx(model, tmp_path / "decode.onnx", plan=plan, cache="in")
    for path in (prefill, decode):
        check_file(path)
    out = run(prefill, {"input_ids": tokens[:, :10]})
    assert relative_error(out["logits"], expected[:, :10]) < 1e-5
    cache = {name: x for name, x in out.items() if name != "logits"}
    with torch.no_grad():  # exporting has left the model as it was, its own attention included
        assert torch.equal(model(tokens).logits, expected)
    assert list(cache) == ["new_key.0", "new_value.0", "new_key.1", "new_value.1"]
    for position in (10, 11):
        past = {name.replace("new_", "past_"): x for name, x in cache.items()}
        out = run(decode, {"input_ids": tokens[:, position : position + 1], **past})
        assert relative_error(out["logits"][:, 0], expected[:, position]) < 1e-5
        cache = {name: torch.cat([cache[name], out[name]], dim=2) for name in cache}


def test_an_fp8_cache_is_rounded_with_the_calibrated_scales(tmp_path: Path) -> None:
    model = llama(torch.float32)
    scales = collect_attention_scales(model, ids(2, 16), kv_format=FP8, attention_format=None)
    install_kv_scales(model, kv_scale_tensors(scales, torch.float32))
    plan = Plan((), kv_cache=FP8)
    decode = export_onnx(model, tmp_path / "decode.onnx", plan=plan, cache="in")
    prefill = export_onnx(model, tmp_path / "prefill.onnx", plan=plan, cache="out")
    types = {value.name: value.type.tensor_type.elem_type for value in onnx.load(decode).graph.input}
    assert types["past_key.0"] == onnx.TensorProto.FLOAT8E4M3FN
    tokens = ids(2, 9)
    first = run(prefill, {"input_ids": tokens[:, :8]})
    k_scale, _ = kv_scales_of(model)["model.layers.0.self_attn"]
    keys = _keys(model, tokens[:, :8])
    rounded = (keys / k_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert relative_error(first["new_key.0"], rounded.float()) < 1e-3
    past = {name.replace("new_", "past_"): x.to(torch.float8_e4m3fn) for name, x in first.items() if name != "logits"}
    found = run(decode, {"input_ids": tokens[:, 8:], **past})["logits"]
    attention = Attention({m: n for n, m in model.named_modules()}, kv_scales=kv_scales_of(model))
    with attending(model, attention, masked=False), torch.no_grad():
        expected = Graph(model, attention, cache=True)({"input_ids": tokens[:, 8:]}, list(past.values()))[0]
    assert relative_error(found, expected) < 1e-5
    with torch.no_grad():
        plain = model(tokens).logits[:, 8:]
    assert 1e-4 < relative_error(found, plain) < 0.1


def _keys(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, **cache_argument(model, cache), use_cache=True)
    return cache.layers[0].keys


@pytest.mark.parametrize(
    ("kind", "operator"), [("native", "TRT_QuantizedAttention"), ("plugin", "QuantFp8Attention"), ("none", "Attention")]
)
def test_fp8_attention(tmp_path: Path, kind: str, operator: str) -> None:
    model = llama(torch.float16)
    scales = collect_attention_scales(model, ids(2, 32), kv_format=FP8, attention_format=FP8)
    path = tmp_path / "m.onnx"
    export_onnx(model, path, plan=Plan((), attention=FP8), attention=kind, attention_scales=scales)
    check_file(path)
    (node,) = (node for node in onnx.load(path).graph.node if node.op_type == operator)
    assert {entry.value for entry in node.metadata_props} == {"model.layers.0.self_attn"}
    tokens = ids(2, 32)
    found = run(path, {"input_ids": tokens})["logits"]
    attention = Attention(
        {m: n for n, m in model.named_modules()}, kind=kind, scales={} if kind == "none" else operand_scales(scales)
    )
    with attending(model, attention, masked=False), torch.no_grad():
        (expected,) = Graph(model, attention)({"input_ids": tokens}, [])
        plain = model(tokens, use_cache=False).logits
    assert torch.equal(plain, expected)  # the model itself, while its attention is ours
    with torch.no_grad():
        original = model(tokens).logits
    assert relative_error(found, expected) < 5e-3
    assert relative_error(found, original) < (5e-3 if kind == "none" else 0.05)


def test_fp8_attention_needs_scales(decoder: tuple[Any, Plan], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attention in fp8, and no scales were given; pass .*--calib"):
        export_onnx(decoder[0], tmp_path / "m.onnx", plan=Plan((), attention=FP8))
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_ignores_padding(tmp_path: Path) -> None:
    model = tiny_models.bert(vocab_size=96)
    plan = quantize(model, Plan(_weight_only(model))).plan
    path = export_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).last_hidden_state
    kinds = torch.zeros_like(tokens)
    found = run(path, {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds})["last_hidden_state"]
    assert relative_error(found[0], expected[0]) < 1e-5
    assert relative_error(found[1, :5], expected[1, :5]) < 1e-5


def test_an_image_model(tmp_path: Path) -> None:
    model = tiny_models.vit()
    plan = quantize(model, Plan(_weight_only(model)), run=lambda m: m(torch.zeros(1, 3, 32, 32))).plan
    path = export_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(images).logits
    assert relative_error(run(path, {"pixel_values": images})["logits"], expected) < 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "in"}, "does not generate text, so it has no KV cache"),
        ({"attention": "flash"}, "unknown attention 'flash'; known: native, plugin, none"),
    ],
)
def test_refused_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        export_onnx(tiny_models.bert(), tmp_path / "m.onnx", **options)


def test_a_sliding_window_limits_the_sequence(tmp_path: Path) -> None:
    model = tiny_models.mistral(vocab_size=96, num_hidden_layers=1, sliding_window=64)
    with pytest.raises(ValueError, match=r"window slides over 64 tokens.*--shapes sequence=1:64:64"):
        export_onnx(model, tmp_path / "m.onnx")
    path = export_onnx(model, tmp_path / "m.onnx", shapes="sequence=1:64:64")
    tokens = ids(2, 64)
    with torch.no_grad():
        expected = model(tokens).logits
    assert relative_error(run(path, {"input_ids": tokens})["logits"], expected) < 1e-5


def test_a_module_needs_examples_of_its_inputs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear is no transformers model; pass inputs="):
        export_onnx(nn.Linear(4, 4), tmp_path / "m.onnx")
