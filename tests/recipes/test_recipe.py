"""The last rule that matches wins, the house keeps what it keeps, and every reason is in the plan."""

import re
from pathlib import Path

import pytest
from samples import BASE

from quant.calibration.sensitivity.table import parse_candidates
from quant.formats.format import FORMATS
from quant.models.open_model import open_model
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan, resolve
from quant.recipes.recipe import KEEP, Recipe, Rule, get_recipe, presets
from quant.recipes.solver_names import parse_solver

PRESETS = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4a16": ("nvfp4", None),
    "mxfp4": ("mxfp4", "mxfp4"),
    "mxfp4a16": ("mxfp4", None),
    "mxfp6a16": ("mxfp6", None),
    "mxfp8": ("mxfp8", "mxfp8"),
    "fp8": ("fp8", "fp8"),
    "fp8_channel": ("fp8_channel", "fp8_token"),
    "fp8_block": ("fp8_block", "fp8_group"),
    "int8": ("int8", "int8_token"),
    "int8_static": ("int8", "int8_tensor"),
    "int4a16": ("int4", None),
    "int4a16_g64": ("int4_g64", None),
    "int4a16_g32": ("int4_g32", None),
}
LAYERS = (
    Layer("embed", LayerKind.EMBEDDING, (100, 64)),
    Layer("0.attn.q", LayerKind.LINEAR, (64, 64), group="0.attn.(q|k)"),
    Layer("0.attn.k", LayerKind.LINEAR, (32, 64), group="0.attn.(q|k)"),
    Layer("0.attn.o", LayerKind.LINEAR, (64, 64)),
    Layer("0.mlp.gate", LayerKind.OTHER, (4, 64)),
    Layer("0.mlp.experts.up", LayerKind.EXPERTS, (4, 32, 64)),
    Layer("0.norm", LayerKind.NORM, (64,)),
    Layer("visual.proj", LayerKind.LINEAR, (64, 64)),
    Layer("conv", LayerKind.CONV, (8, 64, 3, 3)),
    Layer("1.odd", LayerKind.LINEAR, (64, 40)),
    Layer("head", LayerKind.HEAD, (100, 64), tied_to="embed"),
)
NVFP4 = Recipe("x", weight="nvfp4", activation="nvfp4")


def formats(plan: Plan) -> dict[str, str | None]:
    return {layer.name: layer.weight.name if layer.weight else None for layer in plan.layers}


@pytest.fixture(scope="module")
def base():
    return open_model(BASE, meta=True).model


def test_the_house_keeps_with_reasons() -> None:
    plan = resolve(LAYERS, NVFP4)
    assert [layer.name for layer in plan.quantized] == ["0.attn.q", "0.attn.k", "0.attn.o", "0.mlp.experts.up"]
    for name, word in {
        "embed": "embedding",
        "head": "head",
        "0.norm": "norm",
        "conv": "convolution",
        "visual.proj": "vision",
        "0.mlp.gate": "router",
        "1.odd": "in = 40 is not a multiple of nvfp4's block of 16",
    }.items():
        layer = plan.by_name[name]
        assert layer.weight is None and layer.activation is None
        assert word in layer.reason
    assert all("recipe x" in layer.reason for layer in plan.quantized)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("model.layers.3.mlp.gate", True),
        ("model.layers.3.mlp.gate_proj", False),
        ("model.layers.3.mlp.shared_expert_gate", True),
        ("model.layers.3.block_sparse_moe.router.weight_gate", True),
        ("model.visual.blocks.0.mlp.fc1", True),
        ("model.vision_tower.encoder.fc1", True),
        ("vision_model.fc", True),
        ("image_encoder.fc", True),
        ("model.multi_modal_projector.linear_1", True),
        ("model.mm_projector.0", True),
        ("model.connector.proj", True),
        ("model.merger.mlp.0.linear_1", True),
        ("model.aligner.fc1", True),
        ("model.embed_audio.embedding_projection", True),
        ("audio_tower.layers.0.fc1", True),
        ("model.layers.3.self_attn.v_proj", False),
    ],
)
def test_routers_and_vision_towers_are_known_by_name(name: str, kept: bool) -> None:
    plan = resolve(
        [Layer(name, LayerKind.LINEAR, (64, 64)), Layer("model.layers.3.mlp.up_proj", LayerKind.LINEAR, (128, 64))],
        NVFP4,
    )
    assert (plan.layers[0].weight is None) is kept


def test_the_last_rule_that_matches_wins() -> None:
    rules = (
        Rule("0.*", "mxfp8", "mxfp8"),
        Rule("*.attn.*", "fp8", KEEP, solver="mse"),
        Rule("0.attn.o", KEEP, reason="because"),
        Rule("*attn.[qk]", "mxfp4"),
    )
    plan = resolve(LAYERS, NVFP4.with_rules(*rules))
    q, o, experts = plan.by_name["0.attn.q"], plan.by_name["0.attn.o"], plan.by_name["0.mlp.experts.up"]
    # The fourth rule says only the weight: activation and solver are what the second said.
    assert (q.weight, q.activation, q.solver, q.reason) == (FORMATS["mxfp4"], None, "mse", "rule '*attn.[qk]'")
    assert (o.weight, o.activation, o.reason) == (None, None, "because")
    assert (experts.weight, experts.activation, experts.solver) == (FORMATS["mxfp8"], FORMATS["mxfp8"], "rtn")
    reverse = resolve(LAYERS, NVFP4.with_rules(*reversed(rules)))
    assert formats(reverse)["0.attn.o"] == formats(reverse)["0.attn.q"] == "mxfp8"


def test_globs_are_case_sensitive_and_cross_dots() -> None:
    layers = [Layer("A.b.Proj", LayerKind.LINEAR, (64, 64)), Layer("a.b.proj", LayerKind.LINEAR, (64, 64))]
    assert formats(resolve(layers, NVFP4.with_rules(Rule("a*proj", KEEP)))) == {"A.b.Proj": "nvfp4", "a.b.proj": None}


def test_a_rule_may_bring_back_what_the_house_keeps() -> None:
    plan = resolve(LAYERS, NVFP4.with_rules(Rule("visual.*", "mxfp8"), Rule("0.mlp.gate", "mxfp8")))
    visual = plan.by_name["visual.proj"]
    # The activation is the recipe's again, unless the rule names one.
    assert (visual.weight, visual.activation) == (FORMATS["mxfp8"], FORMATS["nvfp4"])
    gate = plan.by_name["0.mlp.gate"]
    assert gate.weight is None and "kind 'other'" in gate.reason


def test_an_embedding_is_quantized_by_a_rule_of_its_own_and_by_no_other() -> None:
    layers = [*LAYERS[:-1], Layer("head", LayerKind.HEAD, (100, 64))]
    assert resolve(layers, NVFP4.with_rules(Rule("*", "mxfp8"))).by_name["embed"].weight is None
    table = resolve(layers, NVFP4.with_rules(Rule("embed*", "fp8_channel"))).by_name["embed"]
    assert (table.weight, table.activation) == (FORMATS["fp8_channel"], None) and "embed*" in table.reason
    tied = resolve(LAYERS, NVFP4.with_rules(Rule("embed", "fp8_channel"))).by_name["embed"]
    assert tied.weight is None and tied.reason == "its weight is also that of head"


def test_a_tied_head_is_quantized_apart_by_a_rule_of_its_own_and_by_no_other() -> None:
    broad = resolve(LAYERS, NVFP4.with_rules(Rule("*", "mxfp8"))).by_name["head"]
    assert broad.weight is None and broad.tied_to == "embed" and broad.nbytes == 0
    plan = resolve(LAYERS, NVFP4.with_rules(Rule("head", "mxfp8")))
    assert plan.by_name["head"].weight == FORMATS["mxfp8"] and plan.by_name["head"].tied_to is None
    assert "no longer shares the weight of embed" in plan.by_name["head"].reason
    assert plan.by_name["head"].nbytes == 100 * 64 * 33 // 32 and plan.by_name["embed"].weight is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("0.norm", "kind 'norm'"),
        ("conv", "convolution: no runtime convolves in blocks, as nvfp4 has them"),
        ("1.odd", "in = 40 is not a multiple of nvfp4's block of 16"),
    ],
)
def test_what_cannot_be_quantized_is_kept_whatever_the_rules_say(name: str, reason: str) -> None:
    layer = resolve(LAYERS, NVFP4.with_rules(Rule(name, "nvfp4"))).by_name[name]
    assert layer.weight is None and layer.activation is None and reason in layer.reason


def convs(*shapes: tuple[int, ...], linear: int = 0) -> list[Layer]:
    layers = [Layer(f"conv{i}", LayerKind.CONV, shape) for i, shape in enumerate(shapes)]
    return layers + [Layer("linear", LayerKind.LINEAR, (linear, 1))] * bool(linear)


def test_convolutions_that_hold_most_of_the_weights_are_quantized() -> None:
    recipe = Recipe("x", weight="int8", activation="int8_token")
    weights = 16 * 3 * 9 + 32 * 16
    for linear, quantized in ((0, True), (weights, True), (weights + 1, False)):
        plan = resolve(convs((16, 3, 3, 3), (32, 16, 1, 1), linear=linear), recipe)
        for layer in plan.layers[:2]:
            assert (layer.weight is FORMATS["int8"], layer.activation is FORMATS["int8_token"]) == (quantized,) * 2
            assert quantized or "linear layers hold most of the weights" in layer.reason
    asked = resolve(convs((16, 3, 3, 3), (32, 16, 1, 1), linear=2000), recipe, only=["*", "conv1"])
    assert formats(asked) == {"conv0": None, "conv1": "int8", "linear": "int8"}


@pytest.mark.parametrize(
    ("shape", "has_kernel"),
    [
        ((64, 32, 3, 3), True),
        ((64, 3, 7, 7), False),  # a first convolution
        ((64, 1, 3, 3), False),  # depthwise
        ((8, 32, 1, 1), False),
        ((24, 32, 1, 1), False),  # 24 and 32 differ modulo 16, so that no padding makes both fit
        ((24, 40, 1, 1), True),
        ((32, 32, 7, 7), False),
    ],
)
def test_fp8_takes_the_convolutions_that_tensorrt_has_kernels_for(shape: tuple[int, ...], has_kernel: bool) -> None:
    layers = convs(shape)
    fp8 = resolve(layers, Recipe("x", weight="fp8_channel", activation="fp8_token")).layers[0]
    assert (fp8.weight is not None) is has_kernel and (has_kernel or "kept out of FP8" in fp8.reason)
    # Without inputs in FP8 there is no FP8 kernel, and INT8 has no such limits.
    assert resolve(layers, Recipe("x", weight="fp8_channel")).quantized
    assert resolve(layers, Recipe("x", weight="int8", activation="int8_token")).quantized
    assert resolve(layers, Recipe("x", weight="fp8_channel", activation="fp8_token"), only=["conv0"]).quantized


def test_the_size_of_a_convolution_counts_a_scale_for_each_output_channel() -> None:
    plan = resolve(convs((64, 32, 3, 3)), Recipe("x", weight="int8"))
    assert plan.nbytes == 64 * 32 * 9 + 4 * 64
    assert Plan.from_dict(plan.to_dict()) == plan and "transposed" not in plan.to_dict()["layers"][0]


def test_an_untied_head_may_be_quantized() -> None:
    head = Layer("head", LayerKind.HEAD, (100, 64))
    assert formats(resolve([head], NVFP4)) == {"head": None}
    assert formats(resolve([head], NVFP4.with_rules(Rule("head", "mxfp8")))) == {"head": "mxfp8"}


def test_the_activation_must_divide_too() -> None:
    layer = Layer("a", LayerKind.LINEAR, (64, 48))
    kept = resolve([layer], Recipe("x", weight="nvfp4", activation="mxfp4")).layers[0]
    assert kept.weight is None and kept.reason == "in = 48 is not a multiple of mxfp4's block of 32"
    assert formats(resolve([layer], Recipe("x", weight="nvfp4"))) == {"a": "nvfp4"}


def test_an_obstacle_of_the_layer_is_its_reason() -> None:
    layer = Layer("e.up", LayerKind.EXPERTS, (2, 64, 64), obstacle="stored the wrong way round")
    assert resolve([layer], NVFP4).layers[0].reason == "stored the wrong way round"


def test_a_fusion_group_is_kept_whole() -> None:
    plan = resolve(LAYERS, NVFP4.with_rules(Rule("0.attn.k", KEEP, reason="sensitive")))
    q, k = plan.by_name["0.attn.q"], plan.by_name["0.attn.k"]
    assert (q.weight, q.activation, k.weight, k.reason) == (None, None, None, "sensitive")
    assert q.reason == "fused with 0.attn.k, which stays in 16 bit (sensitive)"
    Plan.from_dict(plan.to_dict())


def test_gate_and_up_of_experts_are_cut_between_blocks() -> None:
    """They are stored apart, so each half of the rows must hold whole blocks; one linear of that name is not cut."""
    recipe = Recipe("x", weight="fp8_block", activation="fp8_group")
    for rows, kind, fits in (
        (256, LayerKind.EXPERTS, True),
        (128, LayerKind.EXPERTS, False),
        (128, LayerKind.LINEAR, True),
    ):
        shape = (4, rows, 128) if kind == LayerKind.EXPERTS else (rows, 128)
        layers = (Layer("mlp.gate_up_proj", kind, shape), Layer("other", LayerKind.LINEAR, (128, 128)))
        assert (resolve(layers, recipe).by_name["mlp.gate_up_proj"].weight is not None) is fits


def test_guard_and_observer_are_in_the_plan() -> None:
    plan = resolve(LAYERS, Recipe("x", weight="nvfp4", observer="mse", guard="0.1 keep"))
    assert (plan.observer, plan.guard) == ("mse", "0.1 keep")
    plan = resolve(LAYERS, Recipe("x", weight="nvfp4"))
    assert (plan.observer, plan.guard) == ("absmax", None)


def test_rules_that_split_a_fusion_group_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("fusion group '0.attn.(q|k)' mixes formats")):
        resolve(LAYERS, NVFP4.with_rules(Rule("0.attn.k", "mxfp8", "mxfp8")))
    with pytest.raises(ValueError, match=re.escape("mixes solvers (0.attn.q=rtn, 0.attn.k=mse); give its members one")):
        resolve(LAYERS, NVFP4.with_rules(Rule("0.attn.k", solver="mse")))
    # Layers that stay in 16 bit are not solved.
    resolve(LAYERS, NVFP4.with_rules(Rule("0.attn.*", KEEP), Rule("0.attn.k", solver="mse")))


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"glob 'model\.\*' matches no layer; .* are called embed, 0\.attn\.q"):
        resolve(LAYERS, NVFP4.with_rules(Rule("model.*", KEEP)))


def test_presets_are_those_of_the_ecosystem() -> None:
    assert set(presets()) == set(PRESETS)
    assert all(r.name == name and r.description for name, r in presets().items())
    with pytest.raises(ValueError, match=r"unknown format 'nvfp5'; known formats: fp8, fp8_block, .*nvfp4a16"):
        get_recipe("nvfp5")
    for name, meant in (("nvfp5", "nvfp4"), ("mxfp6_a16", "mxfp6a16"), ("fp8-block", "fp8_block"), ("NVFP4", "nvfp4")):
        with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
            get_recipe(name)
    with pytest.raises(ValueError, match=r"WEIGHT@INPUT such as nvfp4@fp8$"):
        get_recipe("zzz")


@pytest.mark.parametrize(
    ("name", "weight", "activation"),
    [
        ("fp8a16", "fp8", KEEP), ("mxfp8a16", "mxfp8", KEEP), ("nvfp4@fp8", "nvfp4", "fp8"),
        ("int4@16bit", "int4", KEEP), ("int8@keep", "int8", KEEP),
        ("nvfp4@nvfp4_four_over_six", "nvfp4", "nvfp4_four_over_six"),
    ],
)  # fmt: skip
def test_names_of_candidates_are_recipes(base, name: str, weight: str, activation: str) -> None:
    recipe = get_recipe(name)
    assert recipe == Recipe(name, weight, activation)
    (candidate, _) = parse_candidates(name)
    layer = make_plan(base, name).by_name["model.layers.0.mlp.up_proj"]
    assert (layer.weight, layer.activation) == (candidate.weight, candidate.activation)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4+lowrank:32", "give the format nvfp4, and the solver lowrank:32"),
        ("keep", "'keep' leaves all layers in 16 bit; it is for single layers"),
        ("fp8_token", "write WEIGHT@INPUT, such as fp8_channel@fp8_token"),
        ("nvfp4_four_over_six", "WEIGHT@INPUT, such as nvfp4@nvfp4_four_over_six"),
        ("nvfp4a16a16", "unknown format 'nvfp4a16a16'; .*did you mean nvfp4a16"),
        ("nvfp4@", "unknown format ''"),
        ("nvfp5@fp8", "unknown format 'nvfp5'; .*did you mean nvfp4"),
    ],
)
def test_other_names_of_formats_say_what_to_write(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_recipe(name)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_on_a_llama(base, preset: str) -> None:
    plan = make_plan(base, preset)
    weight, activation = PRESETS[preset]
    for layer in plan.layers:
        expected = weight if layer.name.endswith("_proj") else None
        assert (layer.weight.name if layer.weight else None) == expected, layer
        assert (layer.activation.name if layer.activation else None) == (activation if expected else None), layer
        assert layer.reason
    assert len(plan.quantized) == 14
    assert len(plan.layers) == 1 + 14 + 5 + 1
    assert Plan.from_dict(plan.to_dict()) == plan


def test_include_and_exclude(base) -> None:
    attention = make_plan(base, "nvfp4a16", include=["*self_attn*"])
    assert [n for n, f in formats(attention).items() if f] == [n for n in formats(attention) if "self_attn" in n]
    assert attention.by_name["model.layers.0.mlp.up_proj"].reason == "matches no glob of include"
    assert attention.by_name["model.layers.0.self_attn.q_proj"].reason == "recipe nvfp4a16"
    both = make_plan(base, "nvfp4", include=["*self_attn*", "*.1.mlp*"], exclude=["*o_proj"])
    assert sum(f is not None for f in formats(both).values()) == 6 + 3
    o_proj = both.by_name["model.layers.0.self_attn.o_proj"]
    assert o_proj.reason == "excluded by *o_proj" and o_proj.activation is None
    assert all(layer.activation is FORMATS["nvfp4"] for layer in both.quantized)


def test_include_only_ever_narrows(base) -> None:
    """Neither what the house keeps nor the formats of a recipe's rules are changed by it."""
    assert make_plan(base, "nvfp4", include=["*"]) == make_plan(base, "nvfp4")
    recipe = NVFP4.with_rules(Rule("*down_proj", "mxfp8", "mxfp8"), Rule("*o_proj", KEEP, reason="sensitive"))
    narrowed = make_plan(base, recipe, include=["*.0.*"])
    full = make_plan(base, recipe)
    assert [x for x in narrowed.layers if ".1." not in x.name] == [x for x in full.layers if ".1." not in x.name]
    assert {x.weight for x in narrowed.layers if ".1." in x.name} == {None}
    with pytest.raises(ValueError, match="glob 'nope' matches no layer"):
        make_plan(base, recipe, include=["*.0.*", "nope"])


def test_excluding_everything_or_nothing_is_an_error(base) -> None:
    with pytest.raises(ValueError, match="quantizes none of this model's 21 layers"):
        make_plan(base, "nvfp4a16", exclude=["*"])
    with pytest.raises(ValueError, match="glob 'nope' matches no layer"):
        make_plan(base, "nvfp4a16", exclude=["nope"])


def test_the_solver_asked_for_replaces_those_of_the_rules(base) -> None:
    recipe = Recipe("x", weight="nvfp4", solver="rtn").with_rules(Rule("*mlp*", solver="mse"))
    assert {x.solver for x in make_plan(base, recipe).quantized} == {"rtn", "mse"}
    assert {x.solver for x in make_plan(base, recipe, solver="four_over_six").quantized} == {"four_over_six"}
    for name, meant in (("gtpq", "gptq"), ("AWQ+gptq", "awq"), ("awq+autoruond", "autoround")):
        with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
            parse_solver(name)
    with pytest.raises(ValueError, match="unknown solver 'magic'; known solvers: rtn, mse"):
        make_plan(base, recipe, solver="magic")


TOML = """
description = "mixed"
weight = "nvfp4"
solver = "mse"
kv_cache = "fp8"
[[rules]]
match = "*down_proj"
weight = "mxfp8"
activation = "mxfp8"
reason = "outliers"
[[rules]]
match = "lm_head"
weight = "fp8_channel"
"""


def test_a_toml_recipe(tmp_path: Path, base) -> None:
    (tmp_path / "mine.toml").write_text(TOML)
    recipe = Recipe.load(tmp_path / "mine.toml")
    assert recipe == Recipe(
        "mine",
        weight="nvfp4",
        solver="mse",
        kv_cache="fp8",
        description="mixed",
        rules=(Rule("*down_proj", "mxfp8", "mxfp8", reason="outliers"), Rule("lm_head", "fp8_channel")),
    )
    plan = make_plan(base, recipe)
    assert plan.kv_cache is FORMATS["fp8"]
    assert plan.by_name["model.layers.1.mlp.down_proj"].reason == "outliers"
    assert plan.by_name["lm_head"].weight is FORMATS["fp8_channel"]
    assert plan.by_name["model.layers.1.mlp.up_proj"].solver == "mse"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('weights = "nvfp4"', "unknown key(s) weights; known keys: name, weight, activation"),
        ('weight = "nvfp5"', "unknown format 'nvfp5'; known formats: nvfp4"),
        ('weight = "nvfp4"\nkv_cache = "x"', "unknown format 'x'"),
        ('[[rules]]\nmatch = "*"\nformat = "fp8"', "rule 1: unknown key(s) format; known keys: match, weight"),
        ('[[rules]]\nmatch = "a"\n[[rules]]\nweight = "fp8"', "rule 2: no `match` glob"),
        ('[[rules]]\nmatch = "*"\nweight = "fp9"', "unknown format 'fp9'"),
        ("weight = ", "not a TOML recipe"),
        ("\udcff", "not a TOML recipe"),
    ],
)
def test_a_bad_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Recipe.load(file)
    assert "bad.toml" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["weight = 4", 'rules = "x"', "rules = [3]", 'weight = ["fp8"]', "[[rules]]\nmatch = 3"]
)
def test_a_value_of_the_wrong_type_is_an_error_of_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml"):
        Recipe.load(file)


def tower(size: int) -> list[Layer]:
    return [
        Layer("vision_model.layers.0.fc1", LayerKind.LINEAR, (size, 64)),
        Layer("language_model.fc1", LayerKind.LINEAR, (64, 64)),
    ]


@pytest.mark.parametrize(("size", "only", "quantized"), [
    (32, (), {"language_model.fc1"}),
    (128, (), {"vision_model.layers.0.fc1", "language_model.fc1"}),
    (32, ("*vision*",), {"vision_model.layers.0.fc1"}),
    (32, ("*vision*", "language*"), {"vision_model.layers.0.fc1", "language_model.fc1"}),
    (32, ("*fc1",), {"language_model.fc1"}),
])  # fmt: skip
def test_a_vision_tower_is_small_or_asked_for(size: int, only: tuple[str, ...], quantized: set[str]) -> None:
    plan = resolve(tower(size), get_recipe("fp8_channel"), only=only)
    assert {layer.name for layer in plan.quantized} == quantized


def pair(size: int) -> list[Layer]:
    """The towers of a CLIP, of images and of texts."""
    texts = [Layer("text_model.encoder.layers.0.mlp.fc1", LayerKind.LINEAR, (64, 64))]
    return [Layer("vision_model.encoder.layers.0.mlp.fc1", LayerKind.LINEAR, (size, 64)), *texts]


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_tower_beside_an_encoder_of_texts_is_the_model(size: int) -> None:
    plan = resolve(pair(size), get_recipe("fp8_channel"))
    assert {layer.reason for layer in plan.layers} == {"recipe fp8_channel"} and len(plan.quantized) == 2


EMBEDDINGS = [
    Layer("model.embed_tokens", LayerKind.EMBEDDING, (128, 64)),
    Layer("model.layers.0.fc1", LayerKind.LINEAR, (64, 64)),
    Layer("model.norm", LayerKind.NORM, (64,)),
    Layer("lm_head", LayerKind.HEAD, (128, 64)),
]


@pytest.mark.parametrize(("only", "quantized"), [
    ((), {"model.layers.0.fc1"}),
    (("*",), {"model.layers.0.fc1"}),
    (("model.*",), {"model.layers.0.fc1"}),
    (("*embed*",), {"model.embed_tokens"}),
    (("lm_head", "model.layers*"), {"lm_head", "model.layers.0.fc1"}),
    (("*embed*", "lm_head"), {"lm_head", "model.embed_tokens"}),
])  # fmt: skip
def test_embeddings_and_heads_are_asked_for_by_globs_of_their_own(only: tuple[str, ...], quantized: set[str]) -> None:
    plan = resolve(EMBEDDINGS, NVFP4, only=only)
    assert {layer.name for layer in plan.quantized} == quantized
    embedding = plan.by_name["model.embed_tokens"]
    assert embedding.activation is None and (embedding.weight is None or embedding.reason == "included by *embed*")


def test_a_shared_embedding_is_not_quantized_though_it_is_asked_for() -> None:
    layers = [*EMBEDDINGS[:3], Layer("lm_head", LayerKind.HEAD, (128, 64), tied_to="model.embed_tokens")]
    plan = resolve(layers, NVFP4, only=("*embed*", "*fc1"))
    assert plan.by_name["model.embed_tokens"].reason == "its weight is also that of lm_head"
