"""KV-cache and attention scales are compared with a Llama written out in float64, with hooks, and with goldens."""

import json
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import BASE, GOLDENS

from quant.calibration.attention_names import watching_attention
from quant.calibration.attention_scales import AttentionScales, collect_attention_scales, kv_scale_tensors
from quant.calibration.session import Session
from quant.formats.format import E4M3, FORMATS, Format
from quant.formats.rounding import round_to

transformers = pytest.importorskip("transformers")

FP8, NVFP4 = FORMATS["fp8"], FORMATS["nvfp4"]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
MODULES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    return loaded.eval()


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(1))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rope(x: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + half) of [tokens, heads, head_dim] turned by token · 10000^(-i / half), as complex numbers."""
    half = HEAD_DIM // 2
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def forward(weights: dict[str, torch.Tensor], row: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """q, k and v of each layer, [tokens, heads, head_dim], from a plain forward pass in float64."""
    x = weights["model.embed_tokens.weight"][row]
    found = []
    for index in range(2):
        w = {key.split(f"layers.{index}.")[1]: value for key, value in weights.items() if f"layers.{index}." in key}
        h = norm(x, w["input_layernorm.weight"])
        q, k, v = ((h @ w[f"self_attn.{name}_proj.weight"].T).view(len(row), -1, HEAD_DIM) for name in ("q", "k", "v"))
        q, k = rope(q), rope(k)
        found.append({"q": q, "k": k, "v": v})
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(row), len(row)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate, up = (h @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return found


@pytest.fixture(scope="module")
def expected(rows: torch.Tensor) -> list[dict[str, np.ndarray]]:
    """Per layer: q, k, v of all rows, [rows · tokens, heads, head_dim]."""
    weights = {name: t.double() for name, t in load_file(BASE / "model.safetensors").items()}
    layers = [forward(weights, row) for row in rows]
    return [{key: torch.cat([row[i][key] for row in layers]).numpy() for key in "qkv"} for i in range(2)]


def test_fp8_scales_of_a_tensor(model: torch.nn.Module, rows: torch.Tensor, expected: list) -> None:
    done: list[tuple[str, int, int]] = []
    session = Session(progress=lambda *step: done.append(step))
    scales = collect_attention_scales(model, rows, kv_format=FP8, attention_format=FP8, session=session)
    assert list(scales) == MODULES
    assert done == [("calibrate", row, 3) for row in (1, 2, 3)]
    for found, layer in zip(scales.values(), expected, strict=True):
        for operand in "qkv":
            scale = getattr(found, operand)
            assert (scale.shape, scale.dtype) == ((), torch.float32)
            assert float(scale) == pytest.approx(np.abs(layer[operand]).max() / 448, rel=1e-5)
        assert float(found.p) == pytest.approx(1 / 448)


def test_scales_of_heads(model: torch.nn.Module, rows: torch.Tensor, expected: list) -> None:
    scales = collect_attention_scales(model, rows, kv_format=FP8, attention_format=FP8, granularity="head")
    for found, layer in zip(scales.values(), expected, strict=True):
        for operand in "qkv":
            amax = np.abs(layer[operand]).max((0, 2)).reshape(KV_HEADS, -1).max(1)
            np.testing.assert_allclose(getattr(found, operand).numpy(), amax / 448, rtol=1e-5)
        assert found.p.shape == ()


def test_nvfp4_cache_under_fp8_attention(model: torch.nn.Module, rows: torch.Tensor, expected: list) -> None:
    scales = collect_attention_scales(model, rows, kv_format=NVFP4, attention_format=FP8)
    for found, layer in zip(scales.values(), expected, strict=True):
        assert float(found.k) == pytest.approx(np.abs(layer["k"]).max() / 2688, rel=1e-5)
        assert float(found.v) == pytest.approx(np.abs(layer["v"]).max() / 2688, rel=1e-5)
        assert float(found.q) == pytest.approx(np.abs(layer["q"]).max() / 448, rel=1e-5)


def test_only_a_cache(model: torch.nn.Module, rows: torch.Tensor, expected: list) -> None:
    scales = collect_attention_scales(model, rows, kv_format=FP8, attention_format=None)
    for found, layer in zip(scales.values(), expected, strict=True):
        assert float(found.k) == pytest.approx(np.abs(layer["k"]).max() / 448, rel=1e-5)
        assert (found.q, found.p) == (None, None)
        assert set(found.amax) == {"k", "v"}


def test_only_attention(model: torch.nn.Module, rows: torch.Tensor) -> None:
    both = collect_attention_scales(model, rows, kv_format=FP8, attention_format=FP8)
    only = collect_attention_scales(model, rows, kv_format=None, attention_format=FP8)
    for name, found in only.items():
        assert (found.k, found.v) == (None, None)
        assert all(found.amax[operand] == both[name].amax[operand] for operand in "qkv")


def test_a_scale_of_p_wastes_no_code_and_saturates_none(model: torch.nn.Module, rows: torch.Tensor) -> None:
    found = collect_attention_scales(model, rows[:1], kv_format=None, attention_format=FP8)[MODULES[0]]
    p = torch.rand(20, 30).mul(8).softmax(-1)
    p[0] = torch.eye(30)[0]  # the first token sees only itself
    rounded = round_to(p / found.p, E4M3) * found.p
    assert float(rounded.max()) == pytest.approx(1.0)
    assert bool(((rounded - p).abs() <= p / 16 + found.p * 2**-10).all())


# Any model's attention, and nothing of the model changed


def tiny(name: str, attention: str) -> torch.nn.Module:
    make = {
        "gpt2": tiny_models.gpt2,
        "gemma2": partial(tiny_models.gemma2, attn_logit_softcapping=0.05, sliding_window=8),
        "qwen3": tiny_models.qwen3,
        "opt": tiny_models.opt,
    }[name]
    model: torch.nn.Module = make(attn_implementation=attention)
    return model


@pytest.mark.parametrize(
    ("name", "attention"),
    # Gemma 2 caps its scores, which only its own eager attention does.
    [("gpt2", "eager"), ("gpt2", "sdpa"), ("gemma2", "eager"), ("qwen3", "sdpa"), ("opt", "eager"), ("opt", "sdpa")],
)
def test_the_models_own_attention_still_runs(name: str, attention: str) -> None:
    model = tiny(name, attention)
    row = torch.randint(64, (1, 20))
    plain = model(row).logits
    with watching_attention(model, lambda *args: None):
        watched = model(row).logits
    assert torch.equal(watched, plain)
    scales = collect_attention_scales(model, row, kv_format=FP8, attention_format=FP8, granularity="head")
    assert len(scales) == 2
    assert torch.equal(model(row).logits, plain)


def test_a_fused_projection_without_rope() -> None:
    model, row = tiny("gpt2", "sdpa"), torch.randint(64, (1, 20))
    seen = []
    hook = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    scales = collect_attention_scales(model, row, kv_format=FP8, attention_format=FP8, granularity="head")
    hook.remove()
    heads = seen[0][0].view(20, 3, 4, 16).abs().amax((0, 3)) / 448
    found = scales["transformer.h.1.attn"]
    torch.testing.assert_close(torch.stack([found.q, found.k, found.v]), heads, rtol=1e-6, atol=0)


def test_an_error_leaves_transformers_as_it_was(rows: torch.Tensor) -> None:
    interface = transformers.modeling_utils.AttentionInterface
    before, model = interface.get_interface, tiny("qwen3", "sdpa")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.self_attn v: \d+ NaN or infinite .* calibration batch 0"):
        collect_attention_scales(model, rows[:1, :8] % 64, kv_format=FP8, attention_format=None)
    assert interface.get_interface is before


def test_a_model_without_attention_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="Embedding: no attention was seen on 3 calibration row"):
        collect_attention_scales(torch.nn.Embedding(256, 4), rows, kv_format=FP8, attention_format=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": FORMATS["mxfp8"], "attention_format": None}, "mxfp8 finds its scales at run time"),
        ({"kv_format": FP8, "attention_format": None, "granularity": "row"}, "unknown granularity 'row'"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str, model: torch.nn.Module, rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        collect_attention_scales(model, rows, **options)


# Checkpoints


def test_tensors_are_named_and_typed_as_in_the_golden(
    model: torch.nn.Module, rows: torch.Tensor, expected: list
) -> None:
    golden = GOLDENS / "compressed_tensors" / "FP8"
    scales = collect_attention_scales(model, rows, kv_format=FP8, attention_format=None)
    found = kv_scale_tensors(scales, torch.bfloat16)
    with safe_open(golden / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.endswith((".k_scale", ".v_scale"))]  # noqa: SIM118
        assert sorted(found) == sorted(names)
        for name in names:
            peer = file.get_tensor(name)
            assert (found[name].dtype, found[name].shape) == (peer.dtype, peer.shape)
            layer, operand = int(name.split(".")[2]), name.split("_")[-2][-1]
            amax = torch.tensor(np.abs(expected[layer][operand]).max() / 448)
            torch.testing.assert_close(found[name].reshape(()), amax.to(peer.dtype), rtol=1e-5, atol=0)
            # The golden's batch was another one: same kind of text, so the same order of magnitude.
            assert 0.5 < float(found[name]) / float(peer) < 2
    assert json.loads((golden / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]


def test_scales_of_heads_load_into_compressed_tensors(model: torch.nn.Module, rows: torch.Tensor) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    peer = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)
    config = quantization.QuantizationConfig(
        config_groups={}, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True}
    )
    quantization.apply_quantization_config(peer, config)
    scales = collect_attention_scales(model, rows, kv_format=FP8, attention_format=None, granularity="head")
    tensors = kv_scale_tensors(scales, torch.bfloat16)
    parameters = {n: p for n, p in peer.named_parameters() if n.endswith((".k_scale", ".v_scale"))}
    if not parameters:
        pytest.skip("this compressed-tensors does not find the attention of this transformers (0.20 and 5.24)")
    assert {n: (p.shape, p.dtype) for n, p in parameters.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    amax = scales[MODULES[0]].amax["k"]
    assert torch.equal(tensors[f"{MODULES[0]}.k_scale"].flatten(), (amax / 448).bfloat16())


def scales_of(**fields: object) -> dict[str, AttentionScales]:
    amax = {"k": torch.tensor(1.0), "v": torch.tensor(1e-6)}
    values = {"k": None, "v": None, "q": None, "p": None, "amax": amax, "kv_format": FP8, "attention_format": None}
    return {"layer.attn": AttentionScales(**(values | fields))}


def test_a_chosen_dtype_and_no_scale_of_zero() -> None:
    tensors = kv_scale_tensors(scales_of(), torch.float16)
    assert tensors["layer.attn.k_scale"].tolist() == [float(np.float16(1 / 448))]
    assert tensors["layer.attn.v_scale"].tolist() == [2.0**-24]
    zero = kv_scale_tensors(scales_of(amax={"k": torch.tensor(0.0), "v": torch.tensor(0.0)}), torch.float32)
    assert zero["layer.attn.k_scale"] == 1


@pytest.mark.parametrize(("format", "kept"), [(None, "16 bit"), (NVFP4, "nvfp4")])
def test_caches_that_no_checkpoint_can_express_are_refused(format: Format | None, kept: str) -> None:
    with pytest.raises(ValueError, match=rf"^layer\.attn: checkpoints hold .* KV cache in fp8, not {kept}; use fp8"):
        kv_scale_tensors(scales_of(kv_format=format), torch.float32)
