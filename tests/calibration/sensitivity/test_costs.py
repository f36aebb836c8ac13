"""These tests compare bytes with the tensors that are stored, cache bytes with a real cache, and times by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch

from quant.calibration.sensitivity.costs import (
    LatencyTable,
    get_timing,
    group_bytes,
    kv_cache_bytes,
    memory_of,
    parse_quantity,
)
from quant.calibration.sensitivity.table import KEPT, parse_candidates
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.recipes.blocks import cache_of
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4a16", "mxfp8", "fp8", "fp8_channel", "int4a16", "mxfp6a16"])
@pytest.mark.parametrize("shape", [(48, 128), (33, 96), (2, 16, 64)])
def test_bytes_are_those_of_the_tensors(name: str, shape: tuple[int, ...]) -> None:
    candidate = parse_candidates(name)[0]
    layer = LayerPlan("l", LayerKind.EXPERTS if len(shape) == 3 else LayerKind.LINEAR, shape)
    stored = quantize(torch.randn(shape), candidate.weight)
    scale_bytes = stored.scale.numel() * candidate.weight.scale.bits // 8
    expected = stored.codes.nbytes + scale_bytes
    expected += 0 if stored.global_scale is None else stored.global_scale.nbytes
    assert group_bytes([layer], candidate) == expected
    assert group_bytes([layer], KEPT) == torch.zeros(shape, dtype=torch.bfloat16).nbytes


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_cache_is_what_a_model_holds(heads: int) -> None:
    model = tiny_models.llama(num_hidden_layers=3, num_key_value_heads=heads, dtype=torch.bfloat16)
    cache = cache_of(model(torch.zeros(2, 11, dtype=torch.long), use_cache=True))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(model.config, 11, 2) == held
    fp8 = kv_cache_bytes(model.config, 11, 2, FORMATS["fp8"])
    assert fp8 == held // 2 + 3 * 2 * 4  # one FP32 scale for the keys and one for the values of each layer


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_cache_of_layers_that_differ(name: str, shared: int) -> None:
    """Heads of 32 in full attention and of 16 elsewhere; the last layers reuse the keys and values of others."""
    sizes = {
        **tiny_models.DECODER, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": shared,
    }  # fmt: skip
    own = {"global_head_dim": 32} if name == "Gemma4" else {
        "laurel_rank": 16, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4
    }  # fmt: skip
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}TextConfig")(**sizes, **own)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    cache = cache_of(model(torch.zeros(2, 11, dtype=torch.long), use_cache=True))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)
    config.architectures = [type(model).__name__]
    assert kv_cache_bytes(config, 11, 2) == held


def test_cache_of_windows_latents_and_encoders() -> None:
    base = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    decoder = {**base, "architectures": ["XForCausalLM"]}
    full = kv_cache_bytes(SimpleNamespace(**decoder), 1000, 3)
    assert full == 4 * 2 * 3 * 1000 * 2 * 16 * 2
    kinds = ["sliding_attention", "full_attention", "linear_attention", "sliding_attention"]
    mixed = SimpleNamespace(**decoder, layer_types=kinds, sliding_window=100)
    assert kv_cache_bytes(mixed, 1000, 3) == (100 + 1000 + 100) * 3 * 2 * 2 * 16 * 2
    latent = SimpleNamespace(**decoder, kv_lora_rank=512, qk_rope_head_dim=64)
    assert kv_cache_bytes(latent, 1000, 3) == 4 * 3 * 1000 * (512 + 64) * 2
    assert kv_cache_bytes(SimpleNamespace(**base, architectures=["BertModel"]), 1000, 3) == 0
    assert kv_cache_bytes(None, 1000, 3) == 0


def test_memory_adds_up_to_the_plan() -> None:
    layers = (
        LayerPlan("embed", LayerKind.EMBEDDING, (50, 32)),
        LayerPlan("a", LayerKind.LINEAR, (48, 64), FORMATS["nvfp4"]),
        LayerPlan("b", LayerKind.LINEAR, (48, 64)),
        LayerPlan("norm", LayerKind.NORM, (32,)),
        LayerPlan("head", LayerKind.HEAD, (50, 32), tied_to="embed"),
    )
    plan = Plan(layers)
    memory = memory_of(plan, unplanned=10, kv_cache=1000, tokens=5)
    assert (memory.codes, memory.scales) == (48 * 32, 48 * 4 + 4)
    assert memory.embeddings == 50 * 32 * 2
    assert memory.rest == 48 * 64 * 2 + 64 + 10
    assert memory.total == plan.nbytes + 10 + 1000


def test_roofline_is_bound_by_memory_or_by_arithmetic() -> None:
    h100 = get_timing("h100")
    kept = LayerPlan("l", LayerKind.LINEAR, (4096, 4096))
    fp8 = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["fp8"], FORMATS["fp8"])
    assert h100.linear(kept, 1) == pytest.approx(2 * 4096**2 / 3.35e12)
    assert h100.linear(fp8, 1) == pytest.approx((4096**2 + 4) / 3.35e12)
    assert h100.linear(kept, 8192) == pytest.approx(2 * 8192 * 4096**2 / 989e12)
    assert h100.linear(fp8, 8192) == pytest.approx(2 * 8192 * 4096**2 / 1979e12)
    w4a4 = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["nvfp4"], FORMATS["nvfp4"])
    w4a16 = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["nvfp4"])
    # No FP4 units on Hopper: the codes are widened to FP8, with 16-bit inputs to 16 bit.
    assert h100.linear(w4a4, 8192) == h100.linear(fp8, 8192)
    assert h100.linear(w4a16, 8192) == h100.linear(kept, 8192)
    assert get_timing("b200").linear(w4a4, 8192) == pytest.approx(2 * 8192 * 4096**2 / 9000e12)
    # Integers have a rate of their own, which Blackwell Ultra gave up; MXFP6 runs as FP8 does.
    w8a8 = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["int8"], FORMATS["int8_token"])
    assert get_timing("a100").linear(w8a8, 8192) == pytest.approx(2 * 8192 * 4096**2 / 624e12)
    assert get_timing("b300").linear(w8a8, 8192) == pytest.approx(2 * 8192 * 4096**2 / 150e12)
    w6a6 = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["mxfp6"], FORMATS["mxfp6"])
    assert get_timing("rtxpro6000").linear(w6a6, 8192) == pytest.approx(2 * 8192 * 4096**2 / 1007.6e12)


def test_latency_table(tmp_path: Path) -> None:
    row = {"weight": "nvfp4", "activation": None, "out": 8, "in": 16}
    times = [{**row, "tokens": 1, "seconds": 1e-6}, {**row, "tokens": 9, "seconds": 5e-6}]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"name": "mine", "bandwidth": 1e9, "times": times}))
    table = get_timing(str(path))
    layer = LayerPlan("l", LayerKind.LINEAR, (8, 16), FORMATS["nvfp4"])
    assert isinstance(table, LatencyTable) and table.measured
    assert table.linear(layer, 5) == pytest.approx(3e-6)
    assert table.linear(layer, 18) == pytest.approx(10e-6)
    assert table.read(500) == 500e-9
    with pytest.raises(ValueError, match=r"l \[8, 16\]: table 'mine' has no time for 16 bit with inputs in 16 bit"):
        table.linear(LayerPlan("l", LayerKind.LINEAR, (8, 16)), 1)
    for bandwidth, seconds in ((math.nan, 1e-6), (1e9, math.inf), (1e9, 0.0)):
        times = [{**row, "tokens": 1, "seconds": seconds}]
        path.write_text(json.dumps({"name": "mine", "bandwidth": bandwidth, "times": times}))
        with pytest.raises(ValueError, match=r"gpu\.json: not a table .* must be finite and above zero"):
            get_timing(str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"gpu\.json: not a table of kernel times"):
        get_timing(str(path))
    with pytest.raises(ValueError, match=r"unknown target 'h1000'; known targets: .*; did you mean h100"):
        get_timing("h1000")


def test_timing_of_a_power_mode_and_of_a_generation() -> None:
    layer = LayerPlan("l", LayerKind.LINEAR, (4096, 4096), FORMATS["int8"], FORMATS["int8_token"])
    full, slow = (get_timing("orin", power).linear(layer, 8192) for power in (None, 30))
    assert slow / full == pytest.approx((16 * 1300) / (8 * 612))
    assert get_timing("orin", 30).name == "orin at 30 W"
    with pytest.raises(
        ValueError, match=r"target sm89: the rates of sm89 are not known; name a GPU \(l40s, l4, rtx4090\)"
    ):
        get_timing("sm89")
    with pytest.raises(ValueError, match="target vllm is a runtime; name a GPU: t4"):
        get_timing("vllm")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("24GB", "size", 24e9), ("1.5 GiB", "size", 1.5 * 2**30), ("500mb", "size", 5e8), ("32k", "count", 32768),
        ("4096", "count", 4096), ("12ms", "time", 0.012), ("0.5s", "time", 0.5), ("1%", "ratio", 0.01),
        ("0.02", "ratio", 0.02), ("8G", "size", 8e9), ("500m", "size", 5e8), ("2Gi", "size", 2**31),
        ("1tb", "size", 1e12),
    ],
)  # fmt: skip
def test_quantities(text: str, kind: str, value: float) -> None:
    assert parse_quantity(text, kind) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("24", "time"), ("x", "size"), ("-1GB", "size"), ("0", "count"), ("1kg", "size"), ("1e400GB", "size")],
)
def test_bad_quantities(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_quantity(text, kind)


def test_candidates_by_name() -> None:
    names = {c.name: (str(c.weight), str(c.activation)) for c in parse_candidates("nvfp4, fp8a16,nvfp4@fp8,keep")}
    assert names == {
        "nvfp4": ("nvfp4", "nvfp4"), "fp8a16": ("fp8", "None"), "nvfp4@fp8": ("nvfp4", "fp8"), "keep": ("None", "None"),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown format 'nvfp5'; known formats: .*nvfp4"):
        parse_candidates("nvfp5")
    with pytest.raises(ValueError, match="'nvfp4' and 'nvfp4@nvfp4' are the same"):
        parse_candidates(["nvfp4", "nvfp4@nvfp4"])
    with pytest.raises(ValueError, match="no formats to choose from"):
        parse_candidates("keep")


@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "FalconMamba", "Rwkv"])
def test_a_model_without_attention_heads_has_no_cache(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"])
    assert kv_cache_bytes(config, 4096, 1) == 0
