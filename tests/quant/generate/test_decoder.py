"""A decoder's step gives the tokens and logits of transformers, for every family, format and window that it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import tiny_models
from interpreter import interpreted
from slow_cases import quick_cases

import quant
from quant.generate import fused_decoder as decoders
from quant.generate import generate as generation
from quant.generate.fused_decoder import Decoder, decoder_refusal, merge_rows
from quant.generate.quantized_attention import quantized_attention
from quant.generate.quantized_kv_cache import QuantizedKVCache
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.blocks import cache_argument, cache_of

IDS = torch.randint(3, 64, (1, 21), generator=torch.Generator().manual_seed(0))


def tiny(family: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    sizes = {**tiny_models.DECODER, "head_dim": 16, "max_position_embeddings": 256}
    text = {"config_family": "Gemma3Text"} if family == "Gemma3" else {}
    model = tiny_models.build(family, "ForCausalLM", sizes, gain=3.0, dtype=dtype, **text, **fields)
    if family == "Gemma2":
        model.set_attn_implementation("eager")  # the default of transformers 5.17 leaves the soft cap out
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
    return model


def by_transformers(
    model: nn.Module, ids: torch.Tensor, count: int, cache: Any = None
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens that follow `ids`, and the logits of each but the first."""
    tokens, logits = [], []
    with torch.no_grad():
        seen = model(ids, **cache_argument(model, cache), use_cache=True)
        for _ in range(count):
            tokens.append(int(seen.logits[0, -1].argmax()))
            seen = model(torch.tensor([tokens[-1:]]), **cache_argument(model, cache_of(seen)))
            logits.append(seen.logits[0])
    return tokens, logits


def check(model: Any, count: int = 10, close: float = 0.03) -> Decoder:
    """Every token of transformers is taken in, whatever is chosen here, so that a tie does not part the two."""
    tokens, expected = by_transformers(model, IDS, count)
    decoder = Decoder(model, IDS.shape[1] + count)
    with torch.no_grad(), interpreted():
        decoder.begin(cache_of(model(IDS, use_cache=True)), tokens[0])
        for position, logits in enumerate(expected):
            decoder.token.fill_(tokens[position])
            found = decoder.step()
            error = float((found.float() - logits.float()).norm() / logits.float().norm())
            assert error < close and decoder.agrees(found, logits), position
            assert int(decoder.written[IDS.shape[1] + 1 + position]) == int(found.argmax())
    assert bool(decoder.finite)
    return decoder


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 16}),
        pytest.param("Qwen2", {}, marks=pytest.mark.slow),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Qwen3", {}),
        pytest.param("Gemma", {}, marks=pytest.mark.slow),
        ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0}),
        ("Gemma3", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
    ids=["llama", "llama3-rope", "biases", "mistral-window", "qwen2", "qwen2-some-windows", "qwen3", "gemma", "gemma2",
         "gemma3"],
)  # fmt: skip
def test_logits_are_those_of_transformers(family: str, fields: dict[str, Any]) -> None:
    check(tiny(family, **fields))


PRESETS = ("nvfp4a16", "nvfp4", "mxfp4a16", "int4a16", "fp8", "fp8_channel", "fp8_block")


@pytest.mark.parametrize(
    "preset", quick_cases(PRESETS, lambda preset: preset in ("nvfp4", "int4a16", "fp8", "fp8_block"))
)
def test_quantized_layers_are_merged_or_run_side_by_side(preset: str) -> None:
    model = tiny("Qwen2", dtype=torch.float16, hidden_size=128, intermediate_size=256)
    quant.quantize(model, preset)
    # What last bits do to inputs that are rounded: computing in float32 changes the logits of nvfp4 by up to 47%.
    decoder = check(model, 6, {"nvfp4": 0.5, "fp8": 0.15, "fp8_channel": 0.15, "fp8_block": 0.15}.get(preset, 0.03))
    merged = isinstance(decoder.layers[0].qkv, QuantLinear)
    assert merged is (preset not in ("fp8", "fp8_block"))  # one scale a matrix, and one for 128 rows


@pytest.mark.parametrize(
    ("family", "attention", "kv_cache", "close"),
    [
        ("Llama", "16bit", "fp8", 0.05),
        ("Llama", "fp8", "nvfp4", 0.05),
        ("Gemma2", "16bit", "nvfp4", 0.05),
        ("Qwen3", "fp8", "fp8", 0.05),
    ],
)
def test_quantized_caches_are_written_on(family: str, attention: str, kv_cache: str, close: float) -> None:
    """Against `QuantizedKVCache` under transformers, which attends by the oracle over pages of its own."""
    windows = {"sliding_window": 16, "attn_logit_softcapping": 2.0} if family == "Gemma2" else {}
    model, count = tiny(family, **windows), 4
    with torch.no_grad(), quantized_attention(model, attention=attention, kv_cache=kv_cache):
        cache = QuantizedKVCache(model, kv_cache, page_size=16)
        tokens, expected = by_transformers(model, IDS, count, cache)
        decoder = Decoder(model, IDS.shape[1] + count, has_quantized_cache=True)
        held = QuantizedKVCache(model, kv_cache, page_size=16)
        model(IDS, **cache_argument(model, held))
        with interpreted():
            decoder.begin(held, tokens[0])
            for position, logits in enumerate(expected):
                decoder.token.fill_(tokens[position])
                found = decoder.step()
                error = float((found.float() - logits.float()).norm() / logits.float().norm())
                assert error < close and decoder.agrees(found, logits), (position, error)
    for ours, theirs in zip(held.layers, cache.layers, strict=True):
        ours._pages._lengths[0][0] = theirs.length  # the decoder writes pages, and keeps its own count
        for a, b in zip(ours.read(torch.float32), theirs.read(torch.float32), strict=True):
            assert float((a - b).norm() / b.norm()) < 0.1


def test_generate_writes_on_a_quantized_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    monkeypatch.setattr(generation, "decoder_refusal", lambda model: "")
    monkeypatch.setattr(Decoder, "capture", lambda decoder: None)
    monkeypatch.setattr(decoders, "_LOOK", 4)
    with torch.no_grad(), quantized_attention(model, kv_cache="fp8"), interpreted():
        caches = [QuantizedKVCache(model, "fp8", page_size=16) for _ in range(2)]
        tokens, _ = by_transformers(model, IDS, 2, caches[0])
        model.generation_config.eos_token_id = tokens[1]
        found: list[int] = []
        # There are five pages of 16 at first, and room for 121 tokens takes eight.
        assert generation._decode(model, IDS, 100, found.extend, caches[1]) == ""
    assert found == tokens and len(set(tokens)) > 1
    assert caches[0].nbytes == 5 * 16 * 2 * 2 * 2 * 16  # K and V of two layers and two heads of 16
    assert caches[1].nbytes >= 8 * 16 * 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("preset", "prepacked"), [("nvfp4a16", False), ("nvfp4a16", True), ("mxfp4a16", True), ("mxfp6a16", True)]
)
def test_merged_members_share_memory_and_give_the_same(preset: str, prepacked: bool) -> None:
    """Rows that are laid out for a kernel are merged as they lie there, or in the layout of a checkpoint."""
    model = tiny("Llama", intermediate_size=128)
    quant.quantize(model, preset)
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 64).bfloat16()
    before = [mlp.gate_proj(x), mlp.up_proj(x)]
    if prepacked:
        for member in (mlp.gate_proj, mlp.up_proj):
            member.take(prepack(member.quantized_weight))
    merged = merge_rows([mlp.gate_proj, mlp.up_proj], torch.bfloat16)
    assert merged is not None and torch.equal(merged(x), torch.cat(before, -1))
    assert [torch.equal(mlp.gate_proj(x), before[0]), torch.equal(mlp.up_proj(x), before[1])] == [True, True]
    for member in (mlp.gate_proj, mlp.up_proj):
        assert member.codes.untyped_storage().data_ptr() == merged.codes.untyped_storage().data_ptr()
    if preset == "nvfp4a16":
        other = copy.deepcopy(mlp.up_proj)
        other.global_scale *= 2
        assert merge_rows([mlp.gate_proj, other], torch.bfloat16) is None
    assert merge_rows([mlp.gate_proj, nn.Linear(64, 8)], torch.bfloat16) is None


def test_generate_takes_the_decoder_until_a_token_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama", dtype=torch.float16)
    tokens, _ = by_transformers(model, IDS, 30)
    monkeypatch.setattr(generation, "decoder_refusal", lambda model: "")
    monkeypatch.setattr(Decoder, "capture", lambda decoder: None)
    end = tokens[24]
    with torch.no_grad(), interpreted():
        for count, ends in ((1, None), (2, None), (3, None), (30, None), (30, end), (30, [end, 63]), (30, tokens[0])):
            model.generation_config.eos_token_id = ends
            found: list[list[int]] = []
            assert generation._decode(model, IDS, count, found.append) == ""
            stop = len(tokens) if ends is None else tokens.index(ends if isinstance(ends, int) else end) + 1
            assert [token for some in found for token in some] == tokens[: min(count, stop)]
            assert len(found) == (2 if min(count, stop) > decoders._LOOK else 1)  # told while it writes


def test_a_layer_that_computes_something_else_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama", dtype=torch.float16)
    monkeypatch.setattr(generation, "decoder_refusal", lambda model: "")
    model.model.layers[1].self_attn.scaling *= 3  # which transformers uses as well: still the same
    with torch.no_grad(), interpreted():
        assert generation._decode(model, IDS, 2, list) == ""
        forward = model.model.layers[1].mlp.forward
        model.model.layers[1].mlp.forward = lambda x: 3 * forward(x)
        told: list[int] = []
        assert generation._decode(model, IDS, 2, told.extend) == "the logits of its first token would be others"
        assert not told


def test_nan_in_later_logits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama", dtype=torch.float16)
    monkeypatch.setattr(generation, "decoder_refusal", lambda model: "")

    def spoil(decoder: Decoder) -> None:
        decoder.layers[0].pages.v[0, 0, 0, 0] = torch.nan

    monkeypatch.setattr(Decoder, "capture", spoil)
    with torch.no_grad(), interpreted(), pytest.raises(ValueError, match="gives NaN or infinite logits behind token"):
        generation._decode(model, IDS, 5, list)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: None, "the model is on cpu"),
        (lambda model: setattr(model.config, "hidden_act", "gelu"), "its MLP is gated by gelu"),
        (lambda model: setattr(model.generation_config, "repetition_penalty", 1.2), "sets repetition_penalty"),
        (lambda model: model.float(), "the model is in torch.float32"),
    ],
)
def test_the_reason_why_not(change: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    change(model)
    if reason != "the model is on cpu":
        monkeypatch.setattr(decoders, "_device", lambda model: torch.device("cuda"))
    assert reason in decoder_refusal(model)


def test_other_families_and_adapters_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_device", lambda model: torch.device("cuda"))
    assert decoder_refusal(tiny("Llama")) == ""
    assert decoder_refusal(tiny_models.opt(dtype=torch.bfloat16)).startswith("OPTForCausalLM is none of")
    model = tiny("Llama")
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert decoder_refusal(model) == "model.layers.0.mlp.up_proj is a Linear, perhaps with hooks"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("preset", [None, "nvfp4a16", "fp8_channel"])
def test_a_graph_gives_the_tokens_of_transformers(family: str, preset: str | None) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    model = tiny(family, **sizes)
    model.generation_config.eos_token_id = None  # its random weights may choose any token
    if preset is not None:
        quant.quantize(model, preset)
    model = model.cuda()
    ids = IDS.cuda()
    tokens: list[int] = []
    with torch.no_grad():
        assert generation._decode(model, ids, 60, tokens.extend) == "" and len(tokens) == 60
        logits = model(torch.cat([ids, torch.tensor([tokens], device="cuda")], 1)).logits[0, ids.shape[1] - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    # Inputs rounded to FP8 differ where those in BF16 did by their last bit.
    gap, least = (logits.amax(1) - chosen).float() / logits.float().std(1), 0.3 if preset == "fp8_channel" else 0.1
    assert float(gap.max()) <= least, gap
