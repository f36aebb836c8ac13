"""Settings that edit a plan are read, followed or refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from plan_samples import ATTENTION, FP8C, NVFP4, block, plan_of
from samples import ROOT

import quant
from quant.base.errors import UserError
from quant.formats.format import FORMATS, get_format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import (
    LayerPlan,
    Parts,
    Plan,
    edit,
    input_of,
    parse_setting,
    set_guard_and_observer,
    set_kv_cache,
)
from quant.recipes.recipe import presets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*.down_proj=mxfp8", ("*.down_proj", "mxfp8", None, None, False)),
        ("*=fp8_channel@fp8_token", ("*", "fp8_channel", None, "fp8_token", True)),
        ("a.b=nvfp4:awq+gptq@keep", ("a.b", "nvfp4", "awq+gptq", None, True)),
        ("a=nvfp4:rotation:64+gptq", ("a", "nvfp4", "rotation:64+gptq", None, False)),
        ("*=nvfp4a16", ("*", "nvfp4", None, None, True)),
        ("*=fp8a16:mse", ("*", "fp8", "mse", None, True)),
        ("*=int4a16_g64", ("*", "int4_g64", None, None, True)),
        ("*=int8_static", ("*", "int8", None, "int8_tensor", True)),
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
        ("*=nvfp4a16@fp8", "nvfp4a16 has an input format already; write nvfp4@fp8"),
        ("*=nvfp5a16", "unknown format 'nvfp5a16'"),
        ("*=nvfp4:magic", "unknown solver 'magic'"),
        ("*=keep:rtn", "neither a solver nor an input format"),
        ("*=keep@fp8", "neither a solver nor an input format"),
    ],
)
def test_bad_settings_quote_themselves(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_setting(text)
    assert text in str(caught.value) and message in str(caught.value)


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


def test_guard_and_observer_are_set_and_taken_away() -> None:
    plan = set_guard_and_observer(plan_of(*block(0)), "0.1 fp8 keep", "mse")
    assert (plan.guard, plan.observer) == ("0.1 fp8 keep", "mse")
    assert set_guard_and_observer(plan) == plan
    assert set_guard_and_observer(plan, "", "absmax") == plan_of(*block(0))
    with pytest.raises(ValueError, match=r"guard '-1': write a positive limit"):
        set_guard_and_observer(plan, "-1")
    with pytest.raises(ValueError, match="unknown observer 'median'; known observers: absmax, percentile"):
        set_guard_and_observer(plan, observer="median")


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
    old = plan_of(*block(0, "nvfp4", "nvfp4"), LayerPlan("kept", LayerKind.LINEAR, (128, 256)))
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
    assert "layers.1" not in message and "whole_groups=True" in message
    whole = edit(old, [parse_setting("*.0.*q_proj=keep")], whole_groups=True)
    assert [m.name for m in whole.layers if m.weight is None and m.kind == LayerKind.LINEAR] == [
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
    odd = [LayerPlan(f"odd.{i}", LayerKind.LINEAR, (64, 48)) for i in range(3)]
    with pytest.raises(UserError) as caught:
        edit(plan_of(*odd), [parse_setting("odd.*=mxfp8")])
    assert "3 layers: odd.0, odd.1, odd.2: in = 48 is not a multiple of mxfp8's block of 32" in str(caught.value)
    assert edit(plan_of(*odd), [parse_setting("odd.*=nvfp4")]).by_name["odd.0"].weight == NVFP4
    with pytest.raises(UserError, match="in = 48 is not a multiple of q4_k's block of 256"):
        edit(plan_of(*odd), [parse_setting("odd.*=q4_k")])


def test_globs_pass_over_norms_and_refuse_only_norms() -> None:
    old = plan_of(*block(0))
    new = edit(old, [parse_setting("*=mxfp8")])
    assert new.by_name["model.norm"].weight is None and new.by_name["lm_head"].weight is None
    with pytest.raises(UserError, match=r"only layers of kind norm \(model\.norm\)"):
        edit(old, [parse_setting("*norm=mxfp8")])
    with pytest.raises(UserError, match=r"matches no layer; this plan's are called model\.embed_tokens"):
        edit(old, [parse_setting("blk.*=mxfp8")])
    head = edit(old, [parse_setting("lm_head=mxfp8")]).by_name["lm_head"]
    assert head.weight is not None and head.weight.name == "mxfp8" and head.tied_to is None


def test_kv_cache() -> None:
    assert set_kv_cache(plan_of(), "fp8").kv_cache == FORMATS["fp8"]
    assert set_kv_cache(plan_of(kv_cache=FORMATS["fp8"]), "keep").kv_cache is None
    for name in ("fp9", "mxfp4", "int8_tensor", "nvfp4"):  # which `quantize --plan` would refuse to store
        with pytest.raises(
            UserError, match=f'kv_cache="{name}": checkpoints hold a KV cache in fp8, fp8_head or 16bit'
        ):
            set_kv_cache(plan_of(), name)


def test_a_plan_is_edited_by_its_own_method() -> None:
    plan = plan_of(*block(0))
    both = edit(plan, [parse_setting("*.down_proj=mxfp8"), parse_setting("*.q_proj=keep")], whole_groups=True)
    assert plan.set("*.down_proj", "mxfp8").set("*.q_proj", "keep", whole_groups=True) == both != plan
    assert plan.set("*.down_proj", FORMATS["mxfp8"]) == edit(plan, [parse_setting("*.down_proj=mxfp8")])
    with pytest.raises(UserError, match=r"^set='\*\.down_proj=nvfp5': unknown format"):
        plan.set("*.down_proj", "nvfp5")
    with pytest.raises(UserError, match=r"or pass whole_groups=True$"):
        plan.set("*.q_proj", "mxfp8")


@pytest.mark.parametrize("origin", ["import quant; plan = quant.Plan(())", "import pickle; plan = pickle.loads({})"])
def test_any_plan_has_its_method(origin: str) -> None:
    """No command and no other public name has been used in this process, to which a worker may send a plan."""
    code = origin.format(pickle.dumps(Plan(()))) + "; plan.set('*', 'fp8')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "UserError: set='*=fp8': the glob matches no layer; this plan has none" in done.stderr


def test_an_exact_name_is_no_glob() -> None:
    """Read as a glob, `up[0]` is another layer's name: `up0`."""
    plan = quant.make_plan({"up[0].weight": (64, 64), "up0.weight": (64, 64)}, "nvfp4a16")
    formats = {layer.name: layer.weight and layer.weight.name for layer in plan.set("up[0]", "fp8_channel").layers}
    assert formats == {"up[0]": "fp8_channel", "up0": "nvfp4"}
    assert plan.set("up[01]", "keep").by_name["up0"].weight is None
