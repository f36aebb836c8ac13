"""The layers that write to the residual stream are found in every family, and their correction restores the stream."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import DECODER, EXPERTS, build
from torch import nn

from quant.calibration.outputs.stream import Point, Stream, find_writers
from quant.recipes.blocks import Call, block_names, capture, output_of

IDS = torch.arange(24).remainder(50).view(2, 12)
HEADS = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPTJ = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}

# Builders of tiny models, and the two layers of a block that write, with the states that they are added to.
DIRECT: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "llama": (
        tiny_models.llama,
        {"self_attn.o_proj": [""], "mlp.down_proj": ["post_attention_layernorm"]},
    ),
    "opt": (tiny_models.opt, {"self_attn.out_proj": [""], "fc2": ["final_layer_norm"]}),
    "granite": (
        lambda: build("Granite", "ForCausalLM", {**DECODER, "residual_multiplier": 0.22}),
        {"self_attn.o_proj": [""], "mlp.down_proj": ["post_attention_layernorm"]},
    ),
    "falcon": (
        lambda: build("Falcon", "ForCausalLM", HEADS),
        {"self_attention.dense": [""], "mlp.dense_4h_to_h": ["", "self_attention"]},
    ),
    "gptj": (
        lambda: build("GPTJ", "ForCausalLM", GPTJ),
        {"attn.out_proj": [""], "mlp.fc_out": ["", "attn"]},
    ),
    "gptneox": (
        lambda: build("GPTNeoX", "ForCausalLM", DECODER),
        {"attention.dense": [""], "mlp.dense_4h_to_h": ["", "attention"]},
    ),
    "cohere": (
        lambda: build("Cohere", "ForCausalLM", DECODER),
        {"self_attn.o_proj": [""], "mlp.down_proj": ["", "self_attn"]},
    ),
    "bert": (
        tiny_models.bert,
        {"attention.output.dense": [""], "output.dense": ["attention"]},
    ),
    "t5": (
        tiny_models.t5,
        {"layer.0.SelfAttention.o": [""], "layer.1.DenseReluDense.wo": ["layer.0"]},
    ),
    "mamba": (
        lambda: build("Mamba", "ForCausalLM", {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}),
        {"mixer.out_proj": [""]},
    ),
}
NORMED = {
    "gemma2": (tiny_models.gemma2, "post_feedforward_layernorm"),
    "olmo2": (lambda **options: build("Olmo2", "ForCausalLM", DECODER, **options), "post_feedforward_layernorm"),
}


def _block(model: nn.Module) -> tuple[nn.Module, Call]:
    """The first block and its call."""
    name = block_names(model)[0]
    extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model.get_submodule(name), capture(model, [name], lambda: model(IDS, **extra))[name]


def _layers(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def _run(block: nn.Module, call: Call) -> torch.Tensor:
    with torch.no_grad():
        return output_of(block(*call.args, **call.kwargs))


@pytest.mark.parametrize("family", DIRECT)
def test_writers_are_found_and_their_correction_restores_the_stream(family: str) -> None:
    make, expected = DIRECT[family]
    block, call = _block(make())
    writers, result = find_writers(block, lambda: _run(block, call), _layers(block))
    original = _run(block, call)
    torch.testing.assert_close(output_of(result), original)
    assert {name: [point.module for point, _ in writer.terms] for name, writer in writers.items()} == expected
    # The stream in front of the block is off; the last writer's output makes up for all of it.
    last = list(expected)[-1]
    stream = Stream(writers)
    stream.begin([call.hidden])
    own: list[torch.Tensor] = []
    handle = block.get_submodule(last).register_forward_hook(lambda module, args, out: own.append(out.clone()))
    with stream.recording(block):
        _run(block, call)
    handle.remove()
    worse = call.with_hidden(
        call.hidden + 0.3 * torch.randn(call.hidden.shape, generator=torch.Generator().manual_seed(1))
    )

    def make_up(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        error = stream.error(last, 0)
        assert error is not None
        return own[0] + error.view_as(out)

    assert (_run(block, worse) - original).norm() > 0.1 * original.norm()
    handle = block.get_submodule(last).register_forward_hook(make_up)
    with stream.following(block):
        torch.testing.assert_close(_run(block, worse), original, rtol=1e-4, atol=1e-5)
    handle.remove()


@pytest.mark.parametrize("family", NORMED)
def test_writers_behind_a_norm_correct_most_of_the_error(family: str) -> None:
    make, norm = NORMED[family]
    model = make(gain=2)
    block, call = _block(model)
    writers, _ = find_writers(block, lambda: _run(block, call), _layers(block))
    assert set(writers) == {"self_attn.o_proj", "mlp.down_proj"}
    writer = writers["mlp.down_proj"]
    assert writer.norm == norm and writer.gain is not None
    stream = Stream(writers)
    stream.begin([call.hidden])
    own: list[torch.Tensor] = []
    handle = block.mlp.down_proj.register_forward_hook(lambda module, args, out: own.append(out.clone()))
    with stream.recording(block):
        original = _run(block, call)
    handle.remove()
    worse = call.with_hidden(call.hidden * (1 + 0.01 * torch.randn(call.hidden.shape)))

    def make_up(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        error = stream.error("mlp.down_proj", 0)
        assert error is not None
        return own[0] + error.view_as(out)

    uncorrected = block.mlp.down_proj.register_forward_hook(lambda module, args, out: own[0])
    before = (_run(block, worse) - original).norm()
    uncorrected.remove()
    handle = block.mlp.down_proj.register_forward_hook(make_up)
    with stream.following(block):
        after = (_run(block, worse) - original).norm()
    handle.remove()
    # The part along the output itself does not pass an RMSNorm: about one direction of 64.
    assert after < 0.35 * before


def test_experts_write_where_the_module_around_them_does() -> None:
    sizes = {**EXPERTS, "shared_expert_intermediate_size": 32}
    for model in (tiny_models.mixtral(), tiny_models.qwen3_moe(), build("Qwen2Moe", "ForCausalLM", sizes)):
        block, call = _block(model)
        writers, _ = find_writers(block, lambda: _run(block, call), ["self_attn.o_proj"], ["mlp.experts"])  # noqa: B023
        assert writers["mlp.experts"].terms == ((Point("post_attention_layernorm"), 1.0),)


def test_a_block_without_a_stream_has_no_writers() -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    writers, _ = find_writers(block, lambda: block(torch.randn(2, 5, 16)), ["0", "2"])
    assert writers == {}
