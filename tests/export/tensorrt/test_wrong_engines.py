"""Engines of wrong models, of models that are wired wrongly, and of wrong graphs: each is found, by each of two checks.

Each case changes one thing in a copy of a quantized model, or in its ONNX file, and builds an engine from that. The
digests in the engine tell it from the right model's graph on any machine; and without them its programs, constants and
inputs tell it from the engine that the right model becomes.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import serving_samples
import tiny_models
import torch
from engine_samples import SHAPES, drawn, written_graph
from torch import nn

import quant
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.translate import LAYER_KEY, MODULE_KEY
from quant.export.tensorrt.audit import failures
from quant.export.tensorrt.build import BuildOptions, build_engine
from quant.export.tensorrt.engine_file import Engine, read_engine
from quant.formats.format import FORMATS

pytestmark = pytest.mark.slow
pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
onnx = pytest.importorskip("onnx", reason="needs the extra [onnx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")

from quant.export.tensorrt.rebuild import audit_with_checkpoint, differences  # noqa: E402 -- needs onnx

IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.1.self_attn"
SERVING: dict[str, Any] = {"capacity": 256, "shapes": None}
_engines: dict[str, Engine] = {}


@cache
def right(kind: str) -> Any:
    """The quantized model that an engine should be of."""
    if kind == "llama":
        model = drawn(tiny_models.llama(gain=4.0, attention_bias=True, dtype=torch.float16))
        return quant.quantize(model, "nvfp4", IDS)
    if kind in ("bert", "resnet"):
        x = IDS if kind == "bert" else torch.randn(2, 3, 32, 32, dtype=torch.float16)
        model = drawn(getattr(tiny_models, kind)(gain=4.0)).half()
        return quant.quantize(model, "fp8" if kind == "bert" else "int8", x, run=lambda model: model(x))
    model = serving_samples.decoder(kind.removesuffix(" with scales"), dtype=torch.float16)
    for index, layer in enumerate(model.model.layers if kind.endswith("scales") else ()):
        layer.self_attn.register_buffer("k_scale", torch.tensor([0.5 + index], dtype=torch.float16))
        layer.self_attn.register_buffer("v_scale", torch.tensor([0.25 + index], dtype=torch.float16))
    return quant.quantize(model, "fp8", IDS, solver="rtn")


def options_of(kind: str) -> dict[str, Any]:
    if kind.endswith("scales"):
        return {**SERVING, "kv_cache": FORMATS["fp8"]}
    return {"shapes": SHAPES} if kind == "llama" else {"shapes": None} if kind in ("bert", "resnet") else SERVING


def engine_of(path: Path, kind: str) -> Engine:
    built = build_engine(path, path.with_suffix(".engine"), BuildOptions("sm120", options_of(kind)["shapes"]))
    return read_engine(built.path)


def found(
    folder: Path, kind: str, wrong: nn.Module | None = None, change: Callable[[Any], None] | None = None, **options: Any
) -> list[str]:
    """What the digests say of an engine of `wrong`, or of the right model's file after `change`."""
    done = right(kind)
    if kind not in _engines:
        (folder / "built").mkdir()
        path = write_onnx(done.model, folder / "built" / "model.onnx", plan=done.plan, **options_of(kind))
        _engines[kind] = engine_of(path, kind)
    path = written_graph(folder, wrong or done.model, done, change, **options_of(kind), **options)
    engine = engine_of(path, kind)
    assert differences(engine, _engines[kind])
    rows = audit_with_checkpoint(engine.path, copy.deepcopy(done.model), done.plan, rebuild=False)
    assert "not built again" in rows[-1].found or not rows[-1].passed
    return failures(rows)


def rewired(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


# Other numbers.


def mirror_scales(model: Any) -> None:
    scale = model.get_submodule(f"{MLP}.up_proj").scale
    scale.copy_(scale.flip(0))


def exchange_axes_of_scales(model: Any) -> None:
    scale = model.get_submodule(f"{MLP}.down_proj").scale
    scale.copy_(scale.T.reshape(scale.shape).clone())


def scale_input(model: Any) -> None:
    model.get_submodule(f"{ATTENTION}.o_proj").input_scale *= 64


def scale_weight(model: Any) -> None:
    model.get_submodule(f"{MLP}.gate_proj").global_scale *= 2


def exchange_mlps(model: Any) -> None:
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def exchange_q_and_k(model: Any) -> None:
    # The first rows of q, whose matrix is the larger one, and those of k.
    q, k = (model.get_submodule(f"{ATTENTION}.{name}_proj").codes for name in "qk")
    rows = q[: len(k)].clone()
    q[: len(k)].copy_(k)
    k.copy_(rows)


def replace_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def shift_the_vocabulary(model: Any) -> None:
    model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight.roll(1, 0))


def mirror_norm(model: Any) -> None:
    weight = model.model.layers[1].input_layernorm.weight
    weight.data = weight.flip(0)


def exchange_norms(model: Any) -> None:
    block = model.model.layers[0]
    block.input_layernorm, block.post_attention_layernorm = block.post_attention_layernorm, block.input_layernorm


def exchange_nibbles(model: Any) -> None:
    codes = model.get_submodule(f"{MLP}.down_proj").codes
    codes.copy_(codes >> 4 | codes << 4)


def transpose_codes(model: Any) -> None:
    codes = model.get_submodule(f"{ATTENTION}.o_proj").codes
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(1).T.contiguous()
    codes.copy_(wide[:, 0::2] | wide[:, 1::2] << 4)


def change_a_single_code(model: Any) -> None:
    model.get_submodule(f"{MLP}.up_proj").codes[3, 5] ^= 1


def exchange_biases(model: Any) -> None:
    attention = model.get_submodule(ATTENTION)
    attention.k_proj.bias, attention.v_proj.bias = attention.v_proj.bias, attention.k_proj.bias


def change_theta(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def change_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 1.1e-6


def exchange_scales_of_blocks(model: Any) -> None:
    scales = [model.get_submodule(f"model.layers.{index}.mlp.up_proj").scale for index in (0, 1)]
    kept = scales[0].clone()
    scales[0].copy_(scales[1])
    scales[1].copy_(kept)


def take_the_bias_of_another_block(model: Any) -> None:
    model.get_submodule(f"{ATTENTION}.v_proj").bias = model.get_submodule("model.layers.0.self_attn.v_proj").bias


def take_an_older_head(model: Any) -> None:
    """It was untied before a last step of training."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1e-3 * torch.randn_like(model.lm_head.weight))


NUMBERS = {
    exchange_scales_of_blocks: f"{MLP}.up_proj",
    take_the_bias_of_another_block: f"{ATTENTION}.v_proj",
    take_an_older_head: "lm_head",
    mirror_scales: f"{MLP}.up_proj",
    exchange_axes_of_scales: f"{MLP}.down_proj",
    scale_input: f"{ATTENTION}.o_proj",
    scale_weight: f"{MLP}.gate_proj",
    exchange_mlps: f"{MLP}.gate_proj",
    exchange_q_and_k: f"{ATTENTION}.q_proj",
    replace_head: "lm_head",
    shift_the_vocabulary: "model.embed_tokens",
    mirror_norm: "model.layers.1.input_layernorm",
    exchange_norms: "model.layers.0.input_layernorm",
    exchange_nibbles: f"{MLP}.down_proj",
    transpose_codes: f"{ATTENTION}.o_proj",
    change_a_single_code: f"{MLP}.up_proj",
    exchange_biases: f"{ATTENTION}.v_proj",
    change_theta: "model.rotary_emb",
    change_epsilon: "model.norm",
}


@pytest.mark.parametrize("change", NUMBERS, ids=lambda change: change.__name__)
def test_other_numbers(tmp_path: Path, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right("llama").model)
    with torch.no_grad():
        change(wrong)
    texts = found(tmp_path, "llama", wrong)
    assert f"{NUMBERS[change]}: planned as the checkpoint is exported, found other numbers" in texts


# Parts that are missing, or too many.


def leave_out_the_last_block(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def leave_out_the_final_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


def leave_out_an_mlp(model: Any) -> None:
    rewired(model.model.layers[0].mlp, lambda self, x: torch.zeros_like(x))


def leave_out_a_residual(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        y: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states + attended))
        return y

    rewired(model.model.layers[0], forward)


def drop_bias(model: Any) -> None:
    model.get_submodule(f"{ATTENTION}.v_proj").bias = None


def add_bias(model: Any) -> None:
    model.get_submodule(f"{MLP}.up_proj").bias = nn.Parameter(torch.randn(96, dtype=torch.float16))


# The right numbers, connected in another way.


def take_sigmoid_for_silu(model: Any) -> None:
    rewired(model.model.layers[0].mlp.act_fn, lambda self, x: torch.sigmoid(x))


def exchange_gate_and_up(model: Any) -> None:
    rewired(model.model.layers[0].mlp, lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)))


def begin_positions_at_one(model: Any) -> None:
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids + 1)


def turn_the_other_way(model: Any) -> None:
    forward = model.model.rotary_emb.forward

    def backwards(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = forward(x, position_ids)
        return cosine, -sine

    model.model.rotary_emb.forward = backwards


def turn_neighbours(model: Any) -> None:
    forward = model.model.rotary_emb.forward

    def interleaved(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = (table.chunk(2, -1)[0] for table in forward(x, position_ids))
        return tuple(half.repeat_interleave(2, -1) for half in halves)

    model.model.rotary_emb.forward = interleaved


def take_the_mean_from_a_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda x: forward(x - x.mean(-1, keepdim=True))


def change_scaling(model: Any) -> None:
    model.get_submodule(ATTENTION).scaling *= 2


def see_the_future(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def exchange_heads(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    forward = attention.o_proj.forward
    attention.o_proj.forward = lambda x: forward(x.unflatten(-1, (-1, attention.head_dim)).flip(-2).flatten(-2))


def group_heads_in_another_way(model: Any) -> None:
    attention = model.get_submodule(ATTENTION)
    forward = attention.q_proj.forward
    # Queries 0, 2 share the first key in place of 0, 1.
    attention.q_proj.forward = lambda x: forward(x).unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)


def halve_the_logits(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) / 2


def turn_half_of_a_head(model: Any) -> None:
    forward = model.model.rotary_emb.forward

    def half(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = forward(x, position_ids)
        turned = torch.arange(cosine.shape[-1]) % (cosine.shape[-1] // 2) < cosine.shape[-1] // 4
        return torch.where(turned, cosine, 1), torch.where(turned, sine, 0)

    model.model.rotary_emb.forward = half


def forget_scaling(model: Any) -> None:
    model.get_submodule(ATTENTION).scaling = 1.0


def take_a_residual_after_the_norm(model: Any) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        x = normed + self.self_attn(hidden_states=normed, **options)[0]
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y

    rewired(model.model.layers[1], forward)


WIRING = [
    turn_half_of_a_head, forget_scaling, take_a_residual_after_the_norm,
    leave_out_the_last_block, leave_out_the_final_norm, leave_out_an_mlp, leave_out_a_residual, drop_bias, add_bias,
    take_sigmoid_for_silu, exchange_gate_and_up, begin_positions_at_one, turn_the_other_way, turn_neighbours,
    take_the_mean_from_a_norm, change_scaling, see_the_future, exchange_heads, group_heads_in_another_way,
    halve_the_logits,
]  # fmt: skip


@pytest.mark.parametrize("change", WIRING, ids=lambda change: change.__name__)
def test_other_wiring(tmp_path: Path, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right("llama").model)
    change(wrong)
    assert found(tmp_path, "llama", wrong)


def drop_q_norm(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm = nn.Identity()


def exchange_gemmas_norms(model: Any) -> None:
    block = model.model.layers[0]
    first, second = block.post_attention_layernorm, block.pre_feedforward_layernorm
    block.post_attention_layernorm, block.pre_feedforward_layernorm = second, first


def narrow_a_window(model: Any) -> None:
    model.config.sliding_window = 63  # Mistral's attention reads it there, 64 in the right model


def forget_the_factor_of_embeddings(model: Any) -> None:
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)


def pool_the_last_token(model: Any) -> None:
    pooler = model.pooler
    forward = pooler.forward
    pooler.forward = lambda hidden: forward(hidden.flip(1))


def drop_a_relu(model: Any) -> None:
    model.resnet.encoder.stages[1].layers[0].layer[0].activation = nn.Identity()


def mirror_a_kernel(model: Any) -> None:
    convolution = model.resnet.encoder.stages[1].layers[0].layer[0].convolution
    convolution.codes.copy_(convolution.codes.flip(-1))


def negate_a_mean(model: Any) -> None:
    model.resnet.encoder.stages[0].layers[0].layer[1].normalization.running_mean.neg_()


def exchange_scales_of_a_cache(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_scale, attention.v_scale = attention.v_scale, attention.k_scale


def take_the_next_layers_scales(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_scale, first.v_scale = second.k_scale, second.v_scale


def exchange_q_and_k_norms(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def take_the_exact_gelu(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()  # Gemma's is the approximation by tanh


def exchange_windows(model: Any) -> None:
    """The layer with a window takes the whole cache."""
    sliding = next(layer.self_attn for layer in model.model.layers if layer.self_attn.sliding_window is not None)
    sliding.sliding_window = None
    sliding.is_sliding = False


def swap_kv_heads(model: Any) -> None:
    """Queries attend to the keys of the other head; values stay."""
    rows = model.model.layers[0].self_attn.k_proj.codes
    rows.view(torch.uint8).copy_(rows.view(torch.uint8).roll(len(rows) // 2, 0))


def drop_the_bias_of_a_norm(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm.bias.zero_()


def begin_positions_of_bert_at_one(model: Any) -> None:
    model.embeddings.position_embeddings.weight.copy_(model.embeddings.position_embeddings.weight.roll(-1, 0))


def exchange_token_types(model: Any) -> None:
    model.embeddings.token_type_embeddings.weight.copy_(model.embeddings.token_type_embeddings.weight.flip(0))


def leave_out_the_tanh_of_the_pooler(model: Any) -> None:
    model.pooler.activation = nn.Identity()


def widen_the_epsilon_of_a_batch_norm(model: Any) -> None:
    model.resnet.encoder.stages[0].layers[0].layer[0].normalization.eps = 1e-3


OTHER_MODELS = [
    ("qwen3", exchange_q_and_k_norms),
    ("gemma3", take_the_exact_gelu),
    ("gemma3", exchange_windows),
    ("llama-64", swap_kv_heads),
    ("bert", drop_the_bias_of_a_norm),
    ("bert", begin_positions_of_bert_at_one),
    ("bert", exchange_token_types),
    ("bert", leave_out_the_tanh_of_the_pooler),
    ("resnet", widen_the_epsilon_of_a_batch_norm),
    ("qwen3", drop_q_norm),
    ("gemma3", exchange_gemmas_norms),
    ("gemma3", forget_the_factor_of_embeddings),
    ("mistral", narrow_a_window),
    ("bert", pool_the_last_token),
    ("resnet", drop_a_relu),
    ("resnet", mirror_a_kernel),
    ("resnet", negate_a_mean),
    ("llama-64 with scales", exchange_scales_of_a_cache),
    ("llama-64 with scales", take_the_next_layers_scales),
]


@pytest.mark.parametrize(("kind", "change"), OTHER_MODELS, ids=lambda case: getattr(case, "__name__", case))
def test_other_models(tmp_path: Path, kind: str, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right(kind).model)
    with torch.no_grad():
        change(wrong)
    assert found(tmp_path, kind, wrong)


# Changed graphs.


def add_an_unread_input(model: Any) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.INT32, ["batch"]))


def write_one_place_further(model: Any) -> None:
    """Each new token goes to the place behind its own in the cache."""
    one = onnx.numpy_helper.from_array(torch.tensor([1]).numpy(), "one_more")
    model.graph.initializer.append(one)
    scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
    add = onnx.helper.make_node("Add", [scatters[0].input[2], "one_more"], ["places"])
    model.graph.node.insert(list(model.graph.node).index(scatters[0]), add)
    for node in scatters:
        node.input[2] = "places"


def hide_the_token_itself(model: Any) -> None:
    """A token sees the keys before its own."""
    compared = [node for node in model.graph.node if node.op_type == "LessOrEqual"]
    assert compared
    for node in compared:
        node.op_type = "Less"


def exchange_inputs(first: str, second: str) -> Callable[[Any], None]:
    names = {first: second, second: first}

    def exchange(model: Any) -> None:
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)

    return exchange


def keep_keys_before_rope(model: Any) -> None:
    """The cache of a block gets keys that were not turned."""
    makers = {name: node for node in model.graph.node for name in node.output}
    scatter = next(node for node in model.graph.node if node.op_type == "TensorScatter")
    node = makers[scatter.input[1]]
    while node.op_type != "Add":
        node = makers[node.input[0]]
    direct = next(makers[name] for name in node.input if makers[name].op_type == "Mul")
    scatter.input[1] = next(name for name in direct.input if makers[name].op_type == "Transpose")


@pytest.mark.parametrize(
    "change",
    [
        keep_keys_before_rope,
        write_one_place_further,
        hide_the_token_itself,
        add_an_unread_input,
        exchange_inputs("past_key.0", "past_value.0"),
        exchange_inputs("past_key.0", "past_key.1"),
        exchange_inputs("lengths", "last"),
    ],
    ids=[
        "keys before RoPE", "cache index", "mask", "unread input", "keys and values", "keys of layers",
        "lengths and last",
    ],
)  # fmt: skip
def test_other_graphs(tmp_path: Path, change: Callable[[Any], None]) -> None:
    assert found(tmp_path, "llama-64", change=change)


def test_blocks_that_were_exchanged_with_their_names(tmp_path: Path) -> None:
    """Every layer has its own weights: only the order tells."""
    wrong = copy.deepcopy(right("llama").model)
    wrong.model.layers = nn.ModuleList(reversed(wrong.model.layers))
    other = {"0": "1", "1": "0"}

    def exchange(name: str) -> str:
        head, list_, tail = name.partition("model.layers.")
        return head + list_ + other[tail[0]] + tail[1:] if list_ else name

    def rename(model: Any) -> None:
        for node in model.graph.node:
            for entry in node.metadata_props:
                if entry.key in (LAYER_KEY, MODULE_KEY):
                    entry.value = exchange(entry.value)

    assert "model.layers.0.input_layernorm: planned as the checkpoint is exported, found other nodes" in found(
        tmp_path, "llama", wrong, rename
    )


def test_the_logits_of_another_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.export.onnx import serving

    chosen, done = serving.last_token_only, right("llama-64")
    with monkeypatch.context() as patch:
        patch.setattr(serving, "last_token_only", lambda model, last: chosen(model, last - 1))
        path = write_onnx(done.model, tmp_path / "model.onnx", plan=done.plan, **SERVING)
    engine = engine_of(path, "llama-64")
    assert failures(audit_with_checkpoint(engine.path, copy.deepcopy(done.model), done.plan))
