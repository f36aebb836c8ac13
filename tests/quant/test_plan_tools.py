"""Editing, comparing and validating plans: sizes against counting by hand, and every mistake named at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from samples import BASE

from quant.calibration.solvers.rotation import LARGEST_BLOCK
from quant.calibration.solvers.solver import SOLVERS, TRANSFORMS
from quant.cli.main import main
from quant.errors import UserError, megabytes
from quant.formats.format import FORMATS, get_format
from quant.models.open import open_model
from quant.models.shapes import stored_layers
from quant.plan_check import Problem, check_solver, read_plan, refuse, validate
from quant.plan_diff import diff, totals
from quant.plan_edit import edit, input_of, parse_setting, set_kv_cache
from quant.planning import make_plan
from quant.recipes import solver_names
from quant.recipes.layers import Layer, find_layers
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.recipes.recipe import presets
from quant.recipes.solver_names import ROUNDINGS, STEPS
from quant.recipes.targets import NATIVE, STORAGE, TARGETS, get_target

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")

NVFP4, FP8C, TOKEN = get_format("nvfp4"), get_format("fp8_channel"), get_format("fp8_token")
ATTENTION = "model.layers.{}.self_attn.{}_proj"


def block(i: int, weight: str | None = "nvfp4", activation: str | None = None, group: bool = True) -> list[LayerPlan]:
    """q, k, v in one group, and down, of one block."""
    formats = (get_format(weight) if weight else None, get_format(activation) if activation else None)
    name = f"model.layers.{i}.self_attn.(q_proj|k_proj|v_proj)" if group else None
    qkv = [LayerPlan(ATTENTION.format(i, p), "linear", (64, 128), *formats, group=name) for p in "qkv"]
    return [*qkv, LayerPlan(f"model.layers.{i}.mlp.down_proj", "linear", (128, 256), *formats)]


def plan_of(*layers: LayerPlan, **fields: Any) -> Plan:
    embedding = LayerPlan("model.embed_tokens", "embedding", (512, 128), reason="looked up")
    head = LayerPlan("lm_head", "head", (512, 128), tied_to="model.embed_tokens", reason="head")
    norm = LayerPlan("model.norm", "norm", (128,), reason="norm")
    return Plan((embedding, *layers, norm, head), **fields)


def layers_of(plan: Plan) -> list[Layer]:
    return [Layer(m.name, m.kind, m.shape, m.group, m.tied_to) for m in plan.layers]


def where(problems: list[Problem]) -> list[str]:
    return [problem.where for problem in problems]


def quant(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


# Settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*.down_proj=mxfp8", ("*.down_proj", "mxfp8", None, None, False)),
        ("*=fp8_channel@fp8_token", ("*", "fp8_channel", None, "fp8_token", True)),
        ("a.b=nvfp4:awq+gptq@keep", ("a.b", "nvfp4", "awq+gptq", None, True)),
        ("a=nvfp4:rotation:64+gptq", ("a", "nvfp4", "rotation:64+gptq", None, False)),
        ("[a=b].*=keep", ("[a=b].*", None, None, None, False)),
        ("*=16bit", ("*", None, None, None, False)),
    ],
)
def test_settings_are_read(text: str, expected: tuple[Any, ...]) -> None:
    s = parse_setting(text)
    names = (s.weight.name if s.weight else None, s.activation.name if s.activation else None)
    assert (s.glob, names[0], s.solver, names[1], s.input_given) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("down_proj", "expected GLOB=FORMAT"),
        ("=nvfp4", "expected GLOB=FORMAT"),
        ("*=nvfp5", "unknown format 'nvfp5'; known formats: nvfp4"),
        ("*=nvfp4@int3", "unknown format 'int3'"),
        ("*=nvfp4:magic", "unknown solver 'magic'"),
        ("*=keep:rtn", "neither a solver nor an input format"),
        ("*=keep@fp8", "neither a solver nor an input format"),
    ],
)
def test_bad_settings_quote_themselves(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_setting(text)
    assert text in str(caught.value) and message in str(caught.value)


# Editing


def test_an_edit_changes_what_it_names_and_nothing_else() -> None:
    old = plan_of(*block(0), *block(1), provenance={"seed": 3})
    new = edit(old, [parse_setting("*.1.*.down_proj=fp8_channel:mse"), parse_setting("*.0.self_attn.*=keep")])
    changed = {f"model.layers.0.self_attn.{p}_proj" for p in "qkv"} | {"model.layers.1.mlp.down_proj"}
    assert {m.name for m in new.layers if m != old.by_name[m.name]} == changed
    down = new.by_name["model.layers.1.mlp.down_proj"]
    # Weight-only stays weight-only: no layer of this plan quantizes its inputs.
    assert (down.weight, down.activation, down.solver) == (FP8C, None, "mse")
    assert down.reason == "set by hand: *.1.*.down_proj=fp8_channel:mse"
    assert down.nbytes == 128 * 256 + 4 * 128
    assert old.by_name[down.name].nbytes == 128 * 256 // 2 + 128 * 256 // 16 + 4
    assert new.provenance == {"seed": 3, "edits": ["*.1.*.down_proj=fp8_channel:mse", "*.0.self_attn.*=keep"]}
    assert Plan.from_dict(json.loads(json.dumps(new.to_dict()))) == new


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("fp8_channel", "fp8_token"),
        ("fp8_block", "fp8_group"),
        ("mxfp8", "mxfp8"),
        ("int8", "int8_token"),
        ("int4", None),
    ],
)
def test_inputs_follow_the_weight_where_the_plan_quantizes_inputs(weight: str, expected: str | None) -> None:
    # The pairs that presets ship with, read from their files.
    assert expected in {r.activation for r in presets().values() if r.weight == weight} | {None}
    found = input_of(get_format(weight))
    assert (found.name if found else None) == expected
    old = plan_of(*block(0, "nvfp4", "nvfp4"), LayerPlan("kept", "linear", (128, 256)))
    for name in ("model.layers.0.mlp.down_proj", "kept"):
        layer = edit(old, [parse_setting(f"{name}={weight}")]).by_name[name]
        assert (layer.activation.name if layer.activation else None) == expected
    said = edit(old, [parse_setting(f"kept={weight}@keep")]).by_name["kept"]
    assert said.activation is None


def test_the_same_format_leaves_the_input_alone() -> None:
    old = plan_of(*block(0, "fp8_channel", "fp8"))
    new = edit(old, [parse_setting("*.down_proj=fp8_channel:gptq")]).by_name["model.layers.0.mlp.down_proj"]
    assert (new.activation, new.solver) == (FORMATS["fp8"], "gptq")
    assert edit(old, [parse_setting("*.down_proj=fp8_channel")]) is old


def test_what_the_old_format_left_behind_goes() -> None:
    layer = replace(block(0)[3], score=0.3, cost=10, parts=Parts(True, 32, 8))
    new = edit(plan_of(layer), [parse_setting("*down_proj=mxfp8")]).by_name[layer.name]
    assert (new.score, new.parts) == (None, Parts())
    assert new.cost == new.nbytes == 128 * 256 * 33 // 32


def test_a_split_group_is_refused_with_what_to_include() -> None:
    old = plan_of(*block(0), *block(1))
    with pytest.raises(UserError) as caught:
        edit(old, [parse_setting("*.0.*q_proj=keep")])
    message = str(caught.value)
    assert "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj" in message
    assert "layers.1" not in message and "--whole-groups" in message
    whole = edit(old, [parse_setting("*.0.*q_proj=keep")], whole_groups=True)
    assert [m.name for m in whole.layers if m.weight is None and m.kind == "linear"] == [
        ATTENTION.format(0, p) for p in "qkv"
    ]
    # Of many blocks, one name for each place in a block.
    many = plan_of(*(layer for i in range(30) for layer in block(i)))
    with pytest.raises(
        UserError, match=r"30 fusion groups.*Include model\.layers\.\*\.self_attn\.k_proj, model"
    ) as many_:
        edit(many, [parse_setting("*q_proj=keep")])
    assert len(str(many_.value)) < 400
    # A group told two things.
    with pytest.raises(UserError, match="splits fusion group"):
        edit(old, [parse_setting("*.0.*[qk]_proj=keep"), parse_setting("*.0.*v_proj=mxfp8")])


def test_solvers_of_a_group_must_agree_too() -> None:
    with pytest.raises(UserError, match="splits fusion group"):
        edit(plan_of(*block(0)), [parse_setting("*q_proj=nvfp4:mse")])


def test_edits_that_do_not_fit_name_every_layer() -> None:
    odd = [LayerPlan(f"odd.{i}", "linear", (64, 48)) for i in range(3)]
    with pytest.raises(UserError) as caught:
        edit(plan_of(*odd), [parse_setting("odd.*=mxfp8")])
    assert "3 layers: odd.0, odd.1, odd.2: in = 48 is not a multiple of mxfp8's block of 32" in str(caught.value)
    assert edit(plan_of(*odd), [parse_setting("odd.*=nvfp4")]).by_name["odd.0"].weight == NVFP4


def test_globs_pass_over_norms_and_refuse_only_norms() -> None:
    old = plan_of(*block(0))
    new = edit(old, [parse_setting("*=mxfp8")])
    assert new.by_name["model.norm"].weight is None and new.by_name["lm_head"].weight is None
    with pytest.raises(UserError, match=r"only layers of kind norm \(model\.norm\)"):
        edit(old, [parse_setting("*norm=mxfp8")])
    with pytest.raises(UserError, match=r"matches no layer; this plan's are called model\.embed_tokens"):
        edit(old, [parse_setting("blk.*=mxfp8")])
    with pytest.raises(UserError, match=r"tied to model\.embed_tokens"):
        edit(old, [parse_setting("lm_head=mxfp8")])


def test_kv_cache() -> None:
    assert set_kv_cache(plan_of(), "fp8").kv_cache == FORMATS["fp8"]
    assert set_kv_cache(plan_of(kv_cache=FORMATS["fp8"]), "keep").kv_cache is None
    with pytest.raises(UserError, match="--kv-cache fp9: unknown format 'fp9'"):
        set_kv_cache(plan_of(), "fp9")


# Comparing


def test_diff_counts_decisions_and_not_words() -> None:
    old = plan_of(*block(0), *block(1))
    words = old.replace_layers(replace(m, reason="other words", score=1.0, cost=5) for m in old.layers)
    assert diff(old, words) == []
    new = edit(old, [parse_setting("*down_proj=fp8_channel"), parse_setting("*.0.self_attn.*=nvfp4:mse")])
    kinds = [(change.name, change.kind) for change in diff(old, new)]
    assert kinds == [
        *((ATTENTION.format(0, p), "nvfp4, solver rtn → mse") for p in "qkv"),
        ("model.layers.0.mlp.down_proj", "nvfp4 → fp8_channel"),
        ("model.layers.1.mlp.down_proj", "nvfp4 → fp8_channel"),
    ]
    fewer = replace(old, layers=old.layers[:-1])
    assert [(c.name, c.kind) for c in diff(old, fewer)] == [("lm_head", "removed")]
    assert [(c.name, c.kind) for c in diff(fewer, old)] == [("lm_head", "added")]


def test_totals_count_by_hand() -> None:
    plan = plan_of(*block(0), LayerPlan("kept", "linear", (128, 256)), kv_cache=FORMATS["fp8"])
    quantized = 3 * (64 * 128 * 9 // 16 + 4) + 128 * 256 * 9 // 16 + 4
    weights = 3 * 64 * 128 + 128 * 256
    kept = 2 * 128 * 256
    found = totals(plan)
    assert found["bytes"] == quantized + kept + 2 * 512 * 128 + 2 * 128
    assert found["effective_bits"] == pytest.approx(8 * quantized / weights)
    assert found["bits_linear"] == pytest.approx(8 * (quantized + kept) / (weights + 128 * 256))
    assert (found["quantized"], found["kv_cache"], found["attention"]) == (4, "fp8", None)


# Validating


def test_a_good_plan_has_no_problem() -> None:
    plan = plan_of(*block(0), *block(1))
    assert validate(plan, layers_of(plan), get_target("vllm")) == []


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    """A file with ten mistakes: `Plan.load` finds the first, validate all of them."""
    plan = plan_of(*block(0), *block(1))
    fields = plan.to_dict()
    layers = {layer["name"]: layer for layer in fields["layers"]}
    layers[ATTENTION.format(0, "q")]["weight"] = "mxfp8"
    layers["model.layers.0.mlp.down_proj"]["solver"] = "magic"
    layers["model.layers.1.mlp.down_proj"]["weight"] = "nvfp5"
    layers["model.norm"]["weight"] = "nvfp4"
    layers["model.embed_tokens"]["wieght"] = "nvfp4"
    layers["lm_head"].update(weight="mxfp8")
    fields["layers"] += [
        {"name": "odd", "kind": "linear", "shape": [8, 40], "weight": "nvfp4", "activation": None},
        {"name": "backwards", "kind": "linear", "shape": [64, 64], "weight": None, "activation": "fp8"},
        dict(layers[ATTENTION.format(1, "q")]),
    ]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="not a valid plan"):
        Plan.load(path)
    read, unread = read_plan(path)
    found = unread + validate(read)
    assert set(where(found)) == {
        "model.layers.0.self_attn.(q_proj|k_proj|v_proj)",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.norm",
        "model.embed_tokens",
        "lm_head",
        "odd",
        "backwards",
        ATTENTION.format(1, "q"),
    }
    texts = {problem.where: problem.what for problem in found}
    assert "unknown format 'nvfp5'" in texts["model.layers.1.mlp.down_proj"]
    assert "unknown solver 'magic'" in texts["model.layers.0.mlp.down_proj"]
    assert "unknown field(s) wieght" in texts["model.embed_tokens"]
    assert "in = 40 is not a multiple of nvfp4's block of 16" in texts["odd"]
    assert texts[ATTENTION.format(1, "q")] == "has 2 entries"
    assert "q_proj=mxfp8" in texts["model.layers.0.self_attn.(q_proj|k_proj|v_proj)"]
    assert "no kernel" in texts["backwards"]


def test_another_models_plan_names_missing_extra_and_reshaped() -> None:
    plan = plan_of(*block(0), *block(1))
    layers = [replace(m, shape=(64, 256)) if m.name == ATTENTION.format(0, "k") else m for m in layers_of(plan)]
    layers = [m for m in layers if "layers.1.mlp" not in m.name] + [Layer("extra", "linear", (4, 4))]
    found = {problem.where: problem.what for problem in validate(plan, layers)}
    assert found == {
        ATTENTION.format(0, "k"): "is [64, 256] in the model and [64, 128] in the plan",
        "model.layers.1.mlp.down_proj": "is not in the model",
        "extra": "is in the model and not in the plan",
    }


def test_refusing_names_every_problem_and_every_place() -> None:
    plan = plan_of(*block(0), *block(1), target="vllm")
    layers = layers_of(plan)
    refuse(plan, [], layers)
    refuse(replace(plan, target="h100"), [], layers)  # a GPU runs what its runtime runs
    down = "model.layers.1.mlp.down_proj"
    bad = plan.replace_layers([replace(plan.by_name[down], solver="magic")])
    unread = [Problem("model.norm", "unknown field(s) wieght", "mend the entry")]
    with pytest.raises(UserError) as caught:
        refuse(bad, unread, [m for m in layers if m.name != "lm_head"])
    message = str(caught.value)
    assert message.startswith("the plan does not fit this model, 3 problems: model.norm: unknown field(s) wieght (mend")
    assert "; lm_head: is not in the model (" in message
    assert f"; {down}: unknown solver 'magic'" in message
    many = plan_of(*(m for i in range(12) for m in block(i, "mxfp6")), target="vllm")
    with pytest.raises(UserError) as caught:
        refuse(many, [], layers_of(many))
    assert "model.layers.*.mlp.down_proj (12 layers)" in str(caught.value) and "layers.3" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "weight", "activation", "accepted"),
    [
        ("vllm", "nvfp4", "nvfp4", True),
        ("vllm", "nvfp4", "fp8", False),  # vLLM raises: NVFP4 weights take NVFP4 inputs, or none
        ("vllm", "mxfp6", None, False),
        ("vllm", "mxfp8", None, False),  # it would quantize the inputs all the same
        ("vllm", "fp8", "fp8_token", True),
        ("sglang", "fp8_block", None, False),
        ("tensorrt-llm", "nvfp4", None, False),
        ("tensorrt-llm", "fp8", "fp8", True),
        ("transformers", "mxfp6", None, True),
        ("tensorrt-rtx-sm120", "nvfp4", "nvfp4", True),
        ("tensorrt-rtx-sm120", "nvfp4", "fp8", False),  # its builder segfaults
        ("tensorrt-rtx-sm120", "fp8_block", "fp8_group", False),  # miscompiled without a word
        ("tensorrt-rtx-sm89", "nvfp4", "nvfp4", False),
        ("tensorrt-rtx-sm120", "mxfp8_e5m2", None, False),
    ],
)
def test_targets_accept_what_their_loaders_do(target: str, weight: str, activation: str | None, accepted: bool) -> None:
    plan = plan_of(*block(0, weight, activation))
    problems = validate(plan, layers_of(plan), get_target(target))
    assert (problems == []) is accepted
    assert accepted or set(where(problems)) == {m.name for m in plan.quantized}


def test_target_tables_are_sound() -> None:
    for target in TARGETS.values():
        keys = [(pair.weight, pair.activation) for pair in target.pairs]
        assert len(set(keys)) == len(keys), target.name
        assert target.source and target.description
        for pair in target.pairs:
            assert pair.weight in FORMATS and (pair.activation is None or pair.activation in FORMATS)
            assert pair.runs in (NATIVE, STORAGE)
            assert pair.activation is not None or pair.runs == STORAGE, f"{target.name}: {pair} multiplies nothing low"
        assert set(target.kv_cache) <= set(FORMATS)
    with pytest.raises(ValueError, match="unknown target 'vlm'; known targets: vllm, sglang"):
        get_target("vlm")


def test_run_time_parts_heads_and_the_kv_cache() -> None:
    rotated = replace(block(0)[3], parts=Parts(hadamard=32))
    head = LayerPlan("score", "head", (512, 128), NVFP4)
    plan = plan_of(rotated, head, kv_cache=get_format("mxfp8"))
    found = {p.where: p.what for p in validate(plan, None, get_target("vllm"))}
    assert "hadamard" in found[rotated.name] and "kind 'head'" in found["score"]
    assert found["plan"] == "vllm cannot keep the KV cache in mxfp8; it has fp8, 16bit"


def test_merged_siblings_must_agree_even_without_a_group() -> None:
    apart = block(0, group=False)
    vllm = get_target("vllm")
    (problem,) = validate(plan_of(*apart), None, vllm)
    assert problem.where == "model.layers.0.self_attn.(q_proj|k_proj|v_proj)"
    assert "one global scale" in problem.what
    # FP8 has no global scale, so nothing has to be shared; formats still must agree.
    assert validate(plan_of(*block(0, "fp8_channel", "fp8_token", group=False)), None, vllm) == []
    mixed = [replace(apart[0], weight=None), *apart[1:]]
    (problem,) = validate(plan_of(*mixed), None, vllm)
    assert "q_proj=16bit" in problem.what and "k_proj=nvfp4" in problem.what


def test_blocks_of_merged_matrices_must_not_straddle() -> None:
    """vLLM lays the scales of q, k and v on each other: only the last may end in half a block of 128 rows."""
    plan = plan_of(*block(0, "fp8_block", "fp8_group"))
    found = validate(plan, None, get_target("vllm"))
    assert where(found) == [ATTENTION.format(0, "q"), ATTENTION.format(0, "k")]
    assert "out = 64 is not a multiple of 128" in found[0].what


# The golden model, on disk


@pytest.fixture(scope="module")
def golden() -> Plan:
    model = open_model(BASE, meta=True).model
    assert model is not None
    return make_plan(model, "nvfp4")


def test_headers_settle_a_plan_in_no_time(golden: Plan) -> None:
    started = time.perf_counter()
    layers = stored_layers(str(BASE), golden)
    assert validate(golden, layers, get_target("vllm")) == []
    assert time.perf_counter() - started < 1


def test_headers_and_the_built_model_agree(golden: Plan) -> None:
    fast = stored_layers(str(BASE), golden)
    built = find_layers(open_model(BASE, meta=True).model)
    assert [(m.name, m.shape) for m in fast] == [(m.name, m.shape) for m in built]


def test_headers_do_not_settle_a_plan_of_another_model(golden: Plan) -> None:
    renamed = replace(golden, layers=tuple(replace(m, name=f"x.{m.name}", tied_to=None) for m in golden.layers))
    assert stored_layers(str(BASE), renamed) is None
    found = validate(renamed, open_model(BASE, meta=True).layers)
    assert {p.where for p in found if p.what == "is not in the model"} == set(renamed.by_name)
    assert {p.where for p in found if "not in the plan" in p.what} == set(golden.by_name)


# A GGUF file


def gguf_of(golden: Plan, path: Path, blocks: int = 2) -> None:
    """A GGUF file as another library writes it: metadata of every kind, and the golden model's shapes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(64)
    writer.add_bool("some.flag", True)
    writer.add_float32("some.float", 0.5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ä" * 40])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks)
    for layer in golden.layers:
        if layer.tied_to is None:
            writer.add_tensor(f"{names.get_name(layer.name)}.weight", np.zeros(layer.shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_header_gives_shapes_by_the_models_names(golden: Plan, tmp_path: Path) -> None:
    gguf_of(golden, tmp_path / "m.gguf")
    layers = stored_layers(str(tmp_path / "m.gguf"), golden)
    assert [(m.name, m.shape) for m in layers] == [(m.name, m.shape) for m in golden.layers]


def test_damaged_gguf_headers_go_to_the_loader(golden: Plan, tmp_path: Path) -> None:
    gguf_of(golden, tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:200])
    assert stored_layers(str(tmp_path / "m.gguf"), golden) is None
    with pytest.raises(UserError, match=r"m\.gguf: a truncated or damaged GGUF file"):
        open_model(tmp_path / "m.gguf", meta=True)


# The commands


@pytest.fixture
def plan_file(golden: Plan, tmp_path: Path) -> Path:
    golden.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_show_has_reason_and_cost_of_every_layer(plan_file: Path, golden: Plan) -> None:
    scored = golden.replace_layers(replace(m, score=0.0123) for m in golden.quantized[:1])
    scored.save(plan_file)
    text = quant("plan", "show", plan_file).stdout
    for layer in golden.quantized:
        line = next(row for row in text.splitlines() if row.lstrip().startswith(f"{layer.name} "))
        assert f"{layer.nbytes:,}" in line and layer.reason in line
    assert "0.0123" in text and "layers kept in 16 bit: norm" in text
    assert f"16 bit become {megabytes(golden.nbytes)}" in text
    rows = json.loads(quant("plan", "show", plan_file, "--json", "--match", "*.mlp.*", "--sort", "bytes").stdout)[
        "layers"
    ]
    assert len(rows) == 6 and all("mlp" in row["name"] for row in rows)
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    assert "no layer of" in quant("plan", "show", plan_file, "--match", "x").stderr


def test_edit_and_diff_round_trip(plan_file: Path, golden: Plan, tmp_path: Path) -> None:
    out = tmp_path / "edited.json"
    result = quant("plan", "edit", plan_file, "--set", "*.down_proj=fp8_channel", "--kv-cache", "fp8", "--out", out)
    assert result.exit_code == 0, result.output
    edited = Plan.load(out)
    assert edited.kv_cache == FORMATS["fp8"]
    assert [m.name for m in edited.layers if m.weight == FP8C] == [m.name for m in golden.layers if "down" in m.name]
    assert all(m.activation == TOKEN for m in edited.layers if m.weight == FP8C)
    shown = json.loads(quant("plan", "diff", plan_file, out, "--json").stdout)
    assert [c["name"] for c in shown["layers"]] == [m.name for m in edited.layers if m.weight == FP8C]
    first = shown["layers"][0]
    assert (first["before"]["weight"], first["after"]["weight"]) == ("nvfp4", "fp8_channel")
    assert shown["after"]["bytes"] - shown["before"]["bytes"] == sum(
        c["after"]["bytes"] - c["before"]["bytes"] for c in shown["layers"]
    )
    text = quant("plan", "diff", plan_file, out).stdout
    assert "2 layers: nvfp4@nvfp4 → fp8_channel@fp8_token" in text and "KV cache: 16 bit → fp8" in text
    assert "no layer changes" in quant("plan", "diff", plan_file, plan_file).stdout


def test_edit_refuses_in_one_line_and_writes_nothing(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "edited.json"
    for options, message in (
        (("--set", "*.q_proj=keep"), "--whole-groups"),
        (("--set", "*.q_proj=nvfp5"), "unknown format"),
        ((), "nothing to change"),
    ):
        result = quant("plan", "edit", plan_file, *options, "--out", out)
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
        assert message in result.stderr and not out.exists()
    out.write_text("mine")
    result = quant("plan", "edit", plan_file, "--set", "*.down_proj=keep", "--out", out)
    assert result.exit_code == 2 and "--overwrite" in result.stderr and out.read_text() == "mine"
    assert quant("plan", "edit", plan_file, "--set", "*.down_proj=keep", "--out", out, "--overwrite").exit_code == 0


def test_validate_exits_with_what_it_found(plan_file: Path, golden: Plan, tmp_path: Path) -> None:
    good = quant("plan", "validate", plan_file, "--model", BASE, "--target", "vllm")
    assert good.exit_code == 0 and "no problem" in good.stdout
    bad = quant("plan", "validate", plan_file, "--target", "sglang", "--json")
    assert bad.exit_code == 0 and json.loads(bad.stdout) == []
    bad = quant("plan", "validate", plan_file, "--target", "tensorrt-rtx-sm89", "--json")
    assert bad.exit_code == 1 and set(where([Problem(**p) for p in json.loads(bad.stdout)])) == {
        m.name for m in golden.quantized
    }
    text = quant("plan", "validate", plan_file, "--target", "tensorrt-rtx-sm89").stdout
    assert all(m.name in text for m in golden.quantized) and "14 problems in 14 places" in text
    replace(golden, target="tensorrt-rtx-sm89").save(tmp_path / "own.json")
    own = quant("plan", "validate", tmp_path / "own.json")
    assert own.exit_code == 1 and "14 problems in 14 places, with target tensorrt-rtx-sm89" in own.stdout
    unknown = quant("plan", "validate", plan_file, "--target", "vlm")
    assert unknown.exit_code == 2 and "known targets: vllm" in unknown.stderr
    nothing = quant("plan", "validate", tmp_path / "none.json")
    assert nothing.exit_code == 2 and "none.json: cannot be read" in nothing.stderr
    shutil.copy(BASE / "config.json", tmp_path / "other.json")
    assert "not a plan" in quant("plan", "validate", tmp_path / "other.json").stderr


def test_validating_takes_no_torch(plan_file: Path) -> None:
    """What makes it answer at once: importing torch takes seconds."""
    code = (
        "import sys; from quant.cli.main import main\n"
        f"try: main(['plan', 'validate', {str(plan_file)!r}, '--model', {str(BASE)!r}, '--target', 'vllm'])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_names_of_solvers_are_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tuple(SOLVERS), tuple(TRANSFORMS)) == (ROUNDINGS, solver_names.TRANSFORMS)
    assert STEPS["rotation"] == LARGEST_BLOCK
    with pytest.raises(ValueError, match="unknown solver 'mine'"):
        check_solver("awq+mine")
    monkeypatch.setitem(SOLVERS, "mine", SOLVERS["mse"])
    check_solver("awq+mine")


def test_targets_are_listed() -> None:
    listed = json.loads(quant("plan", "targets", "--json").stdout)
    assert set(listed) == set(TARGETS)
    text = quant("plan", "targets").stdout
    assert all(f"{name}: " in text for name in TARGETS)
