"""Layers are found by what modules are and what they read, never by what they are called."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from plan_samples import watched_layers
from torch import nn

from quant.recipes.groups import group_experts
from quant.recipes.layers import Layer, LayerKind, find_layers, layers_of_state_dict, stacking_of
from quant.recipes.plan_make import make_plan

IDS = torch.zeros(1, 4, dtype=torch.long)


def on_meta(make: Callable[..., Any], **fields: Any) -> Any:
    with torch.device("meta"):
        return make(dtype=torch.bfloat16, **fields)


def llama(**fields: Any) -> Any:
    return on_meta(tiny_models.llama, **{"num_key_value_heads": 4, **fields})


def qwen_moe() -> Any:
    return on_meta(tiny_models.qwen3_moe, hidden_size=32, head_dim=8, moe_intermediate_size=16, num_hidden_layers=1)


class Odd(nn.Module):
    """Three linears, two of which read the same tensor; names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.zebra, self.apple, self.mid = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.kernel = nn.Conv1d(2, 2, 3)
        self.scores = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.mid(self.zebra(y)).sum() + self.apple(y).sum()


def groups(layers: list[Layer]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for layer in layers:
        if layer.group is not None:
            found.setdefault(layer.group, set()).add(layer.name)
    return found


def test_a_llama_has_every_weight_once_and_in_order() -> None:
    layers = {layer.name: layer for layer in find_layers(llama(num_key_value_heads=2))}
    block = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert [name.rpartition(".")[2] for name in layers if ".0." in name] == [
        *block,
        "gate_proj",
        "up_proj",
        "down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    assert layers["model.layers.1.self_attn.k_proj"].shape == (32, 64)
    assert layers["model.layers.1.mlp.down_proj"].shape == (64, 96)
    kinds = {name: layer.kind for name, layer in layers.items() if ".layers." not in name}
    assert kinds == {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    assert all(layer.tied_to is None and layer.group is None for layer in layers.values())


def test_groups_of_a_llama_read_the_same_input() -> None:
    model = llama()
    found = groups(watched_layers(model, lambda m: m(IDS.to("meta"))))
    assert found == {
        name: {f"model.layers.{i}.{block}.{member}" for member in members}
        for i in range(2)
        for block, members in (("self_attn", ["q_proj", "k_proj", "v_proj"]), ("mlp", ["gate_proj", "up_proj"]))
        for name in [f"model.layers.{i}.{block}.({'|'.join(members)})"]
    }


def test_groups_of_a_real_run_are_those_of_a_run_on_meta() -> None:
    meta = llama()
    real = tiny_models.llama(num_key_value_heads=4)
    on_cpu = watched_layers(real, lambda m: m(IDS))
    assert on_cpu == watched_layers(meta, lambda m: m(IDS.to("meta")))
    assert make_plan(real, "nvfp4").groups().keys() == make_plan(meta, "nvfp4").groups().keys() == groups(on_cpu).keys()


def test_groups_of_an_encoder() -> None:
    model = on_meta(tiny_models.bert_classifier, num_hidden_layers=1)
    attention = "bert.encoder.layer.0.attention"
    plan = make_plan(model, "nvfp4a16")
    assert [{m.name for m in members} for members in plan.groups().values()] == [
        {f"{attention}.self.{part}" for part in ("query", "key", "value")}
    ]
    assert {layer.name for layer in plan.quantized} == {
        *(f"{attention}.self.{part}" for part in ("query", "key", "value")),
        f"{attention}.output.dense",
        "bert.encoder.layer.0.intermediate.dense",
        "bert.encoder.layer.0.output.dense",
        "bert.pooler.dense",
    }


def test_names_say_nothing_and_inputs_everything() -> None:
    model = Odd()
    layers = watched_layers(model, lambda m: m(torch.zeros(2, 8)))
    assert groups(layers) == {"(zebra|apple)": {"zebra", "apple"}}
    assert {layer.name: layer.kind for layer in layers} == {
        "zebra": "linear",
        "apple": "linear",
        "mid": "linear",
        "norm": "norm",
        "kernel": "conv",
    }


def test_decoder_blocks_that_read_one_encoder_are_no_group() -> None:
    plan = make_plan(tiny_models.t5(num_layers=2), "nvfp4")
    across = {name for name in plan.groups() if "EncDecAttention" in name}
    assert across >= {f"decoder.block.{block}.layer.1.EncDecAttention.(k|v)" for block in (0, 1)}
    assert all(len(members) < 4 for members in plan.groups().values())


def test_equal_inputs_that_are_not_the_same_tensor_are_no_group() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x.clone()) + self.b(x.clone())

    model = Copies()
    assert groups(watched_layers(model, lambda m: m(torch.zeros(1, 8)))) == {}


def test_a_layer_called_twice_on_one_input_is_not_its_own_group() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.a(x)

    model = Twice()
    assert groups(watched_layers(model, lambda m: m(torch.zeros(1, 8)))) == {}


def test_looking_for_groups_moves_no_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched_layers(model, lambda m: m(torch.ones(1, 4)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True]


def test_looking_for_groups_leaves_no_hook_behind_even_when_the_model_fails() -> None:
    model = Odd()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        watched_layers(model, lambda m: m(torch.zeros(2, 5)))
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_tied_head_names_its_embedding() -> None:
    layers = {layer.name: layer for layer in find_layers(llama(tie_word_embeddings=True))}
    assert layers["lm_head"].tied_to == "model.embed_tokens" and layers["lm_head"].kind == LayerKind.HEAD
    plan = make_plan(llama(tie_word_embeddings=True), "nvfp4a16")
    assert plan.by_name["lm_head"].nbytes == 0
    assert plan.by_name["model.embed_tokens"].nbytes == 64 * 64 * 2


def test_tied_linears_are_both_kept_and_counted_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    plan = make_plan(model, "nvfp4a16").by_name
    assert [layer.weight is None for layer in plan.values()] == [True, True, False]
    assert plan["a"].reason == "its weight is also that of b"
    assert plan["b"].reason == "tied to a, which is stored once and in 16 bit"
    assert [layer.nbytes for layer in plan.values()] == [2048, 0, 32 * 18 + 4]


def test_fused_experts_are_layers_of_their_own() -> None:
    layers = {layer.name: layer for layer in group_experts(find_layers(qwen_moe()))}
    experts = "model.layers.0.mlp.experts"
    assert {name: layer.shape for name, layer in layers.items() if layer.kind == LayerKind.EXPERTS} == {
        f"{experts}.gate_up_proj": (4, 32, 32),
        f"{experts}.down_proj": (4, 32, 16),
    }
    assert {layer.group for layer in layers.values() if layer.kind == LayerKind.EXPERTS} == {experts}
    assert layers["model.layers.0.mlp.gate"].kind == LayerKind.OTHER


def test_the_plan_keeps_the_group_of_experts_beside_those_of_linears() -> None:
    plan = make_plan(qwen_moe(), "nvfp4a16")
    assert [sorted(m.name.rpartition(".")[2] for m in members) for members in plan.groups().values()] == [
        ["k_proj", "q_proj", "v_proj"],
        ["down_proj", "gate_up_proj"],
    ]
    # down_proj's 16 inputs do not divide into MX blocks of 32, and its group is kept with it.
    kept = make_plan(qwen_moe(), "mxfp8").by_name
    assert "in = 16 is not a multiple" in kept["model.layers.0.mlp.experts.down_proj"].reason
    assert "fused with" in kept["model.layers.0.mlp.experts.gate_up_proj"].reason


def test_transposed_experts_are_planned_along_their_inputs() -> None:
    class Experts(nn.Module):
        is_transposed = True

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 48, 40))

    layer = make_plan(nn.Sequential(nn.Linear(64, 64), Experts()), "nvfp4a16").by_name["1.gate_up_proj"]
    assert layer.shape == (2, 40, 48) and str(layer.weight) == "nvfp4"


def test_transposed_experts_of_a_bare_state_dict_are_kept() -> None:
    shapes = {"experts.gate_up_proj": (2, 64, 96), "experts.down_proj": (2, 48, 64), "up.weight": (64, 64)}
    plan = make_plan(shapes, "nvfp4a16")
    assert [layer.weight is None for layer in plan.layers] == [True, True, False]
    assert "[experts, in, out]" in plan.layers[0].reason


def test_a_root_that_is_a_layer_itself() -> None:
    assert find_layers(nn.Linear(8, 4)) == [Layer("", LayerKind.LINEAR, (4, 8))]


def test_layers_of_a_bare_state_dict_by_name_and_shape() -> None:
    shapes = {
        "embed_tokens.weight": (100, 8),
        "wte.weight": (100, 8),
        "h.0.q.weight": (8, 8),
        "h.0.q.bias": (8,),
        "h.0.norm.weight": (8,),
        "h.0.conv.weight": (8, 8, 3, 3),
        "h.0.experts.down_proj": (2, 8, 8),
        "h.0.some.buffer": (2, 8, 8),
        "lm_head.weight": (100, 8),
    }
    assert {layer.name: layer.kind for layer in layers_of_state_dict(shapes)} == {
        "embed_tokens": "embedding",
        "wte": "embedding",
        "h.0.q": "linear",
        "h.0.norm": "norm",
        "h.0.conv": "conv",
        "h.0.experts.down_proj": "experts",
        "h.0.some.buffer": "parameter",
        "lm_head": "head",
    }


def kinds(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.kind for layer in find_layers(model)}


@pytest.mark.parametrize(
    "make", [tiny_models.llama, tiny_models.qwen3_moe, tiny_models.vit, tiny_models.bert_classifier, tiny_models.gpt2]
)
def test_every_matrix_is_found(make: Callable[..., Any]) -> None:
    """A plan holds what `find_layers` finds."""
    model = on_meta(make)
    found = kinds(model)
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        assert parameter.dim() < 2 or (found[path] if path != name else found[name] in ("experts", "parameter")), name


class Attention(nn.Module):
    """nn.MultiheadAttention packs three projections into one parameter, and never calls its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.attention = nn.Embedding(8, 32), nn.Linear(32, 32), nn.MultiheadAttention(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.up(self.embed(ids))
        return self.attention(x, x, x, need_weights=False)[0]


def test_what_multihead_attention_multiplies_by_is_kept_with_its_reason() -> None:
    plan = make_plan(Attention(), "fp8_channel")
    assert [layer.name for layer in plan.quantized] == ["up"]
    assert "packed projections" in plan.by_name["attention.in_proj_weight"].reason
    assert "without calling" in plan.by_name["attention.out_proj"].reason


class Grouped(nn.Linear):
    """Four matrices side by side, as DeepSeek-V4 has them: a linear layer by its class alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...gi,goi->...go", x, self.weight.view(4, -1, self.in_features))


def test_a_layer_in_two_places_is_kept() -> None:
    """A quantized module would stand in one of them, and the other would go on with the weight in 16 bit."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.again, self.last = self.first, nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.again(self.first(x)))  # type: ignore[no-any-return]

    plan = make_plan(Twice(), "nvfp4a16", run=lambda model: model(torch.randn(2, 64)))
    assert [str(layer.weight) for layer in plan.layers] == ["None", "nvfp4"]
    assert "holds this module in several places" in plan.layers[0].reason
    shared = nn.Linear(64, 64)
    blocks = nn.Sequential(block := nn.Sequential(shared), block)  # the block is in two places, and its layer in one
    plan = make_plan(blocks, "nvfp4a16", run=lambda model: model(torch.randn(2, 64)))
    assert [str(layer.weight) for layer in plan.layers] == ["nvfp4"]


def test_a_linear_layer_that_multiplies_otherwise_is_kept() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Grouped(32, 64))
    assert [layer.obstacle is None for layer in find_layers(model)] == [True, False]


class Experts(nn.Module):
    """Fused experts without a mark; `transposed` stores them for `bmm`."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        shapes = ((4, 32, 96), (4, 48, 32)) if transposed else ((4, 96, 32), (4, 32, 48))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(shape)) for shape in shapes)


@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_tell_how_experts_are_stored(transposed: bool) -> None:
    module = Experts(transposed)
    for marked in (None, not transposed):
        module.is_transposed = marked  # type: ignore[assignment]
        found = {name: stacking_of(module, name) for name in ("gate_up_proj", "down_proj")}
        assert all(stacking is not None and stacking.transposed == transposed for stacking in found.values())
        assert {n: s.weight_shape for n, s in found.items() if s} == {
            "gate_up_proj": (4, 96, 32), "down_proj": (4, 32, 48)
        }  # fmt: skip


class Routed(nn.Module):
    """A block of experts whose router and shared expert read one input; no name says which is the router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.chooser = nn.Embedding(8, 32), nn.Sequential(nn.Linear(32, 4))
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.up, self.side = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        share = self.chooser(x).softmax(-1)
        mixed = sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return mixed + (self.up(x) * self.side(x)).unflatten(-1, (2, 32)).sum(-2)


def test_a_router_is_found_by_what_it_is_and_is_fused_with_nothing() -> None:
    model = nn.Module()
    model.block = Routed()
    plan = make_plan(model, "nvfp4a16", run=lambda m: m.block(IDS))
    assert plan.by_name["block.chooser.0"].reason.startswith("router")
    assert plan.by_name["block.chooser.0"].weight is None and plan.by_name["block.chooser.0"].group is None
    assert {layer.name for layer in plan.quantized} == {
        "block.up", "block.side", *(f"block.experts.{i}" for i in range(4))
    }  # fmt: skip
    (members,) = plan.groups().values()
    assert "block.chooser.0" not in {member.name for member in members}


@pytest.mark.parametrize(
    "name", ["classifier", "score", "lm_head", "fc", "head.fc", "classifier.1", "cls.predictions.transform.dense"]
)
def test_heads_have_one_rule_in_modules_and_in_state_dicts(name: str) -> None:
    model: nn.Module = nn.Linear(32, 32)
    for part in reversed(name.split(".")):
        outer = nn.Module()
        outer.add_module(part, model)
        model = outer
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert kinds(model) == {name: "head"}
    assert {layer.name: layer.kind for layer in layers_of_state_dict(shapes)} == {name: "head"}


def test_a_bare_gpt2_has_the_layers_of_its_module() -> None:
    model = on_meta(tiny_models.gpt2)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = [layer for layer in find_layers(model) if layer.kind == LayerKind.LINEAR]
    assert found == [layer for layer in layers_of_state_dict(shapes) if layer.kind == LayerKind.LINEAR]
    assert [(layer.name.rpartition(".")[2], layer.shape) for layer in found[:4]] == [
        ("c_attn", (192, 64)), ("c_proj", (64, 64)), ("c_fc", (256, 64)), ("c_proj", (64, 256)),
    ]  # fmt: skip
    assert len(found) == 8 and all(layer.transposed for layer in found)


def test_convolutions_are_matrices_of_output_channels() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    model = nn.ModuleDict(
        {
            "plain": nn.Conv2d(6, 8, (3, 5), groups=2),
            "transposed": nn.ConvTranspose1d(6, 8, 3, groups=2),
            "own": Own(6, 8, 3),
        }
    )
    plain, transposed, own = find_layers(model)
    assert (plain.shape, plain.matrix, plain.transposed, plain.obstacle) == ((8, 3, 3, 5), (8, 45), False, None)
    assert (transposed.shape, transposed.matrix, transposed.transposed) == ((8, 3, 3), (8, 9), True)
    assert own.obstacle is not None and "otherwise" in own.obstacle


def test_a_part_of_several_blocks_is_kept() -> None:
    """The second block would find layers in it that the first one had quantized already."""

    class Block(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.proj, self.mlp = nn.Linear(64, 64), mlp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.proj(x))  # type: ignore[no-any-return]

    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    blocks = nn.ModuleList([Block(mlp), Block(mlp)])
    kept = {layer.name: layer.obstacle for layer in find_layers(blocks) if layer.obstacle}
    assert list(kept) == ["0.mlp.0"]
    # Two names of the blocks themselves: what is replaced in one place is replaced in the other.
    twice = nn.ModuleDict({"llm": blocks, "wrapper": nn.ModuleDict({"llm": blocks})})
    assert [layer.name for layer in find_layers(twice) if not layer.obstacle] == ["llm.0.proj", "llm.1.proj"]
