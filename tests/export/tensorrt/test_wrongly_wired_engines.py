"""Accidents of exporters and of hands: engines of models that were put together wrongly, and engines of other sizes.

Those that have another number or lack a block fail the audit. Those whose kernels compute something else with all the
right numbers are found by building the engine again: `quant check --rebuild`.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serving_samples
import tiny_models
import torch
from engine_samples import SHAPES, drawn, written_graph
from torch import nn

import quant
from quant.export.tensorrt.audit import audit, failures
from quant.export.tensorrt.build import BuildOptions, build_engine
from quant.formats.format import FORMATS

pytestmark = pytest.mark.slow
pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
pytest.importorskip("onnx", reason="needs the extra [onnx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")

from quant.export.tensorrt.rebuild import rebuilt_findings  # noqa: E402 -- needs onnx


@pytest.fixture(scope="module")
def right() -> Any:
    model = drawn(tiny_models.llama(gain=4.0, attention_bias=True, dtype=torch.float16))
    return quant.quantize(model, "nvfp4", torch.randint(0, 64, (2, 16)))


def built(folder: Path, model: nn.Module, right: Any, shapes: str | None = SHAPES, **options: Any) -> Path:
    """The engine of a model, exported by the plan of the right one; a wrong model's graph is another one."""
    path = written_graph(folder, model, right, shapes=shapes, **options)
    return build_engine(path, folder / "model.engine", BuildOptions("sm120", shapes)).path


def rewired(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def leave_out_the_last_block(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def store_norms_as_gemma(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.data += 1


def take_sigmoid_for_silu(model: Any) -> None:
    rewired(model.model.layers[0].mlp.act_fn, lambda self, x: torch.sigmoid(x))


def take_the_neighbours_input_scale(model: Any) -> None:
    first, second = (layer.self_attn.o_proj.input_scale for layer in model.model.layers)
    first.copy_(second)


def exchange_nibbles(model: Any) -> None:
    codes = model.model.layers[1].mlp.up_proj.codes
    codes.copy_(codes >> 4 | codes << 4)


def mirror_blocks_along_the_inputs(model: Any) -> None:
    scale = model.model.layers[1].mlp.down_proj.scale.view(torch.uint8)
    scale.copy_(scale.flip(1))


def tie_the_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def shift_the_vocabulary(model: Any) -> None:
    model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight.roll(1, 0))


def exchange_biases(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj.bias, attention.v_proj.bias = attention.v_proj.bias, attention.k_proj.bias


def exchange_k_and_v(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


NUMBERS = [
    leave_out_the_last_block, store_norms_as_gemma, take_sigmoid_for_silu, take_the_neighbours_input_scale,
    exchange_nibbles, mirror_blocks_along_the_inputs, tie_the_head, shift_the_vocabulary, exchange_biases,
    exchange_k_and_v,
]  # fmt: skip


@pytest.mark.parametrize("change", NUMBERS, ids=lambda change: change.__name__)
def test_the_audit_finds_other_numbers(tmp_path: Path, right: Any, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right.model)
    with torch.no_grad():
        change(wrong)
    assert failures(audit(built(tmp_path, wrong, right), right.plan, model=right.model))


def exchange_gate_and_up(model: Any) -> None:
    rewired(model.model.layers[0].mlp, lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)))


def leave_out_a_residual(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        y: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states + attended))
        return y

    rewired(model.model.layers[0], forward)


def begin_positions_at_one(model: Any) -> None:
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids + 1)


def turn_the_other_way(model: Any) -> None:
    forward = model.model.rotary_emb.forward

    def backwards(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = forward(x, position_ids)
        return cosine, -sine

    model.model.rotary_emb.forward = backwards


def take_the_mean_from_a_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda x: forward(x - x.mean(-1, keepdim=True))


def see_the_future(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def exchange_heads(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    forward = attention.o_proj.forward
    attention.o_proj.forward = lambda x: forward(x.unflatten(-1, (-1, attention.head_dim)).flip(-2).flatten(-2))


def turn_neighbours(model: Any) -> None:
    forward = model.model.rotary_emb.forward

    def interleaved(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = (table.chunk(2, -1)[0] for table in forward(x, position_ids))
        return tuple(half.repeat_interleave(2, -1) for half in halves)

    model.model.rotary_emb.forward = interleaved


WIRING = [
    exchange_gate_and_up, leave_out_a_residual, begin_positions_at_one, turn_the_other_way, take_the_mean_from_a_norm,
    see_the_future, exchange_heads, turn_neighbours,
]  # fmt: skip


@pytest.mark.parametrize("change", WIRING, ids=lambda change: change.__name__)
def test_a_rebuild_finds_other_wiring(tmp_path: Path, right: Any, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right.model)
    change(wrong)
    findings = rebuilt_findings(built(tmp_path, wrong, right), copy.deepcopy(right.model), right.plan)
    assert findings and not any(finding.passed for finding in findings)


def test_the_right_engine_is_built_again_byte_for_byte(tmp_path: Path, right: Any) -> None:
    (finding,) = rebuilt_findings(built(tmp_path, right.model, right), copy.deepcopy(right.model), right.plan)
    assert finding.passed and "byte for byte" in finding.found


@pytest.mark.parametrize("wrong", ["of the next layer", "exchanged", "of V twice"])
def test_scales_of_a_cache(tmp_path: Path, wrong: str) -> None:
    """The plugin's node has the scales of K and of V as two constants, in this order."""
    model = serving_samples.decoder("llama-64", dtype=torch.float16)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_buffer("k_scale", torch.tensor([0.5 + index], dtype=torch.float16))
        layer.self_attn.register_buffer("v_scale", torch.tensor([0.25 + index], dtype=torch.float16))
    right = quant.quantize(model, "fp8", torch.randint(0, 64, (2, 16)), solver="rtn")
    options = {"capacity": 256, "shapes": None, "kv_cache": FORMATS["fp8"]}
    other = copy.deepcopy(right.model)
    first, second = (layer.self_attn for layer in other.model.layers)
    if wrong == "of the next layer":
        first.k_scale, first.v_scale = second.k_scale, second.v_scale
    else:
        first.k_scale, first.v_scale = first.v_scale, first.k_scale if wrong == "exchanged" else first.v_scale
    assert failures(audit(built(tmp_path, right.model, right, **options), right.plan, model=right.model)) == []
    found = failures(audit(built(tmp_path, other, right, **options), right.plan, model=right.model))
    names = "k_scale" if wrong == "of V twice" else "k_scale, v_scale"
    assert found == [f"model.layers.0.self_attn: planned as in the checkpoint, found other {names}"]


@pytest.mark.parametrize("other", ["past_value.0", "past_key.1"])
def test_caches_that_are_exchanged(tmp_path: Path, other: str) -> None:
    """All kernels are those of the right engine: only the places of its inputs tell."""
    right = quant.quantize(
        serving_samples.decoder("llama-64", dtype=torch.float16), "fp8", torch.randint(0, 64, (2, 16)), solver="rtn"
    )
    names = {"past_key.0": other, other: "past_key.0"}

    def exchange(model: Any) -> None:
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)

    options = {"capacity": 64, "shapes": None}
    path = written_graph(tmp_path, right.model, right, exchange, **options)
    engine = build_engine(path, tmp_path / "model.engine", BuildOptions("sm120", None)).path
    output = other.replace("past", "new")
    assert f"past_key.0: planned updated in place as new_key.0, found as {output}" in failures(
        audit(engine, right.plan, model=right.model)
    )
    findings = rebuilt_findings(engine, copy.deepcopy(right.model), right.plan)
    assert any(finding.name == "inputs" and not finding.passed for finding in findings)


def test_another_window_and_the_logits_of_another_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A serving graph: its window and its last token are numbers in a mask and in an index, and no tensors."""
    from quant.export.onnx import serving

    model = serving_samples.decoder("mistral", dtype=torch.float16)
    right = quant.quantize(model, "fp8", torch.randint(0, 64, (2, 16)), solver="rtn")
    options = {"capacity": 256, "shapes": None}
    narrow = copy.deepcopy(right.model)
    narrow.config.sliding_window = 63  # Mistral's attention reads it there
    assert right.model.config.sliding_window == 64
    engines = [built(tmp_path, narrow, right, **options)]
    chosen = serving.last_token_only
    with monkeypatch.context() as patch:
        patch.setattr(serving, "last_token_only", lambda model, last: chosen(model, last - 1))
        (tmp_path / "last").mkdir()
        engines.append(built(tmp_path / "last", right.model, right, wrong=True, **options))
    for engine in engines:
        findings = rebuilt_findings(engine, copy.deepcopy(right.model), right.plan)
        assert not any(finding.passed for finding in findings)
