"""Groups of layers that were not called, against those of a run that calls them."""

from typing import Any

import pytest
import tiny_models
import torch
from plan_samples import watched_layers
from torch import nn

import quant
from quant.recipes.groups import group_unseen
from quant.recipes.layers import Layer, LayerKind, find_layers
from quant.recipes.plan import Plan
from quant.recipes.plan_check import BY_NAME, NOT_SEEN, fusion_warnings
from quant.recipes.plan_make import make_plan

IDS = torch.zeros(1, 2, dtype=torch.long)


def groups_of(layers: Any) -> set[frozenset[str]]:
    found: dict[str, set[str]] = {}
    for layer in layers:
        if layer.group is not None and layer.kind == LayerKind.LINEAR:
            found.setdefault(layer.group, set()).add(layer.name)
    return {frozenset(names) for names in found.values()}


class Expert(nn.Module):
    """Names by which nothing is merged, so that only a sibling tells."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.down = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.one(x) * self.two(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A token goes to the expert of its own number, so two tokens leave most experts alone."""

    def __init__(self, layers: int = 2, count: int = 8) -> None:
        super().__init__()
        self.embed, self.count = nn.Embedding(count, 64), count
        self.layers = nn.ModuleList(nn.ModuleList(Expert() for _ in range(count)) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for experts in self.layers:
            x = torch.stack([experts[int(i)](row) for i, row in zip(ids[0], x[0], strict=True)])[None]
        return x


class Attending(nn.Module):
    """Two stages of two blocks, as in a UNet, which all read the same text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.stages = nn.ModuleList(nn.ModuleList(Expert() for _ in range(2)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return sum(block(x) for stage in self.stages for block in stage)  # type: ignore[return-value]


def test_blocks_of_one_stage_that_read_one_tensor_are_groups_of_their_own() -> None:
    blocks = [f"stages.{stage}.{block}" for stage in range(2) for block in range(2)]
    assert groups_of(make_plan(Attending(), "nvfp4a16").layers) == {frozenset((f"{b}.one", f"{b}.two")) for b in blocks}


def test_experts_without_tokens_are_grouped_as_those_with() -> None:
    model = Experts()
    plan = make_plan(model, "nvfp4a16")
    everyone = torch.arange(model.count)[None]
    truth = watched_layers(model, lambda m: m(everyone))
    assert len(groups_of(truth)) == 16 and groups_of(plan.layers) == groups_of(truth)
    assert plan.provenance.keys().isdisjoint({BY_NAME, NOT_SEEN, "fusion_groups"})


def test_a_sibling_shows_groups_that_span_experts() -> None:
    """Every expert reads one tensor: all are one group, in the layer that was called and in the one that was not."""
    names = [f"layers.{i}.experts.{e}.{part}" for i in range(2) for e in range(3) for part in ("a", "b")]
    layers = [
        Layer(
            name,
            LayerKind.LINEAR,
            (8, 8),
            group="seen" if ".0.exp" in name else None,
            input_dims=3 if ".0.exp" in name else None,
        )
        for name in names
    ]
    assert groups_of(group_unseen(layers)) == {frozenset(names[:6]), frozenset(names[6:])}


@pytest.mark.parametrize("head", ["Siglip", "CLIP"])
def test_a_tower_without_images_is_grouped_as_one_with(head: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**{**tiny_models.DECODER, "hidden_size": 256, "intermediate_size": 512})
    vision = getattr(transformers, f"{head}VisionConfig")(**tiny_models.IMAGES)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    plan = make_plan(model, "nvfp4a16", include=["*vision_tower*"])
    images = torch.zeros(1, 3, vision.image_size, vision.image_size)
    truth = watched_layers(model, lambda m: m.model.vision_tower(images))
    towers = {names for names in groups_of(truth) if all("vision_tower" in name for name in names)}
    quantized = {layer.name for layer in plan.quantized}
    planned = {names for names in groups_of(plan.layers) if names <= quantized}
    assert towers and planned == towers
    (named,) = plan.provenance[BY_NAME]
    assert ".layers.*.self_attn.(" in named and fusion_warnings(plan) == []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.weight"):
                parameter.mul_(3)
    quant.quantize(model, plan)
    for names in towers:
        assert len({float(model.get_submodule(name).global_scale) for name in names}) == 1


@pytest.mark.parametrize("build", ["t5", "bart", "perceiver", "sam"])
def test_no_group_by_name_has_two_inputs(build: str) -> None:
    """Cross-attention of four kinds; the truth is a run that calls every layer."""
    model, run = across(build)
    layers = find_layers(model)
    truth = watched_layers(model, run)
    group = {layer.name: layer.group for layer in truth}
    named = groups_of(group_unseen(layers, model))
    assert all(len({group[name] for name in names} - {None}) == 1 for names in named), named
    assert all(None not in {group[name] for name in names} for names in named)
    assert bool(named) == (build != "sam")


def across(build: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    sizes = {"vocab_size": 32, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    if build == "t5":
        return tiny_models.t5(num_layers=1), lambda m: m(IDS, decoder_input_ids=IDS)
    if build == "bart":
        return transformers.BartModel(transformers.BartConfig(**sizes, **heads)), lambda m: m(
            IDS, decoder_input_ids=IDS
        )
    if build == "perceiver":
        from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverAttention

        text = {"hidden_size": 32, "resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 1}
        config = transformers.models.idefics2.configuration_idefics2.Idefics2PerceiverConfig(**text)
        model = nn.ModuleDict({"self_attn": Idefics2PerceiverAttention(config, layer_idx=0)})
        latents, context = torch.zeros(1, 2, 32), torch.zeros(1, 3, 32)
        return model, lambda m: m["self_attn"](latents, context, None)
    from transformers.models.sam.modeling_sam import SamAttention

    config = transformers.SamMaskDecoderConfig(hidden_size=32, num_attention_heads=2)
    model = nn.ModuleDict({"self_attn": SamAttention(config, downsample_rate=1)})
    return model, lambda m: m["self_attn"](*(torch.zeros(1, 1, 2, 32) for _ in range(3)))


class Late(nn.Module):
    """Fails behind its layers, as Llama 4 does in transformers 5.24, or between two of the last block."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.embed, self.at = nn.Embedding(8, 64), at
        self.layers = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if number == self.at:
                layer.one(x)
                raise RuntimeError("here")
            x = layer(x)
        raise RuntimeError("at the end")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_pass_that_fails_keeps_what_was_seen(at: int) -> None:
    plan = make_plan(Late(at), "nvfp4a16")
    assert groups_of(plan.layers) == {frozenset({f"layers.{i}.one", f"layers.{i}.two"}) for i in range(3)}
    assert fusion_warnings(plan) == [] and "fusion_groups" not in plan.provenance


def test_layers_of_which_nothing_is_known_are_said() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.used, self.unused = nn.Embedding(8, 64), Expert(), Expert()
            self.chain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.used(self.embed(ids))  # type: ignore[no-any-return]

    plan = make_plan(Aside(), "nvfp4a16")
    assert plan.provenance[NOT_SEEN] == ["unused.one", "unused.two"]
    (said,) = fusion_warnings(plan)
    assert said.startswith("2 layers, unused.one first: no run has called them") and "share one" in said
    assert fusion_warnings(make_plan(Aside(), "mxfp8")) == []
    assert fusion_warnings(Plan.from_dict(plan.to_dict())) == [said]
    with pytest.raises(ValueError, match="layers_not_called"):
        Plan.from_dict({**plan.to_dict(), "provenance": {NOT_SEEN: 3}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_fused_experts_on_the_meta_device(dtype: torch.dtype) -> None:
    """torch's grouped matmul takes BF16 alone on meta; the truth is a run with values."""
    real = tiny_models.qwen3_moe()
    with torch.device("meta"):
        meta = tiny_models.qwen3_moe(dtype=dtype)
    truth = groups_of(watched_layers(real, lambda m: m(IDS)))
    plan = make_plan(meta, "nvfp4a16")
    quantized = {layer.name for layer in plan.quantized}
    assert groups_of(plan.layers) == {names for names in truth if names <= quantized} and truth
    assert "fusion_groups" not in plan.provenance and BY_NAME not in plan.provenance
    assert all(parameter.dtype == dtype for parameter in meta.parameters())
