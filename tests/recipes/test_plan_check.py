"""A check of a plan names every problem, for every target, at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_samples import ATTENTION, NVFP4, block, layers_of, plan_of, where
from samples import ROOT

from quant.base.errors import UserError
from quant.calibration.solvers.registry import SOLVERS, TRANSFORMS
from quant.calibration.solvers.rotation import LARGEST_BLOCK
from quant.formats.format import FORMATS, get_format
from quant.recipes import solver_names
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.recipes.plan_check import Problem, check_plan_fits, read_plan, refuse, validate
from quant.recipes.solver_names import ROUNDINGS, STEPS, parse_solver
from quant.recipes.targets import NATIVE, STORAGE, TARGETS, get_gpu


def test_a_good_plan_has_no_problem() -> None:
    plan = plan_of(*block(0), *block(1))
    assert validate(plan, layers_of(plan), TARGETS["vllm"]) == []


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


def test_a_guard_and_an_observer_are_checked() -> None:
    (problem,) = validate(plan_of(*block(0), guard="0.1 fp5"))
    assert problem.where == "plan" and "guard '0.1 fp5': unknown format 'fp5'" in problem.what
    (problem,) = validate(plan_of(*block(0), observer="median"))
    assert problem.where == "plan" and problem.what.startswith("unknown observer 'median'; known observers: absmax")


@pytest.mark.parametrize(("key", "format"), [("kv_cache", "nvfp4"), ("kv_cache", "int8"), ("attention", "int4")])
def test_formats_of_run_time_that_no_checkpoint_holds_are_refused_before_the_run(key: str, format: str) -> None:
    plan = plan_of(*block(0), **{key: get_format(format)})
    assert where(validate(plan)) == ["plan"]
    with pytest.raises(UserError, match=f"plan: {key} is {format}, and checkpoints have it in fp8"):
        check_plan_fits(plan, layers_of(plan))


@pytest.mark.parametrize(("kind", "read_as"), [("embedding", "a table of rows"), ("experts", "matrices of experts")])
def test_another_kind_than_the_models_is_named(kind: str, read_as: str) -> None:
    plan = plan_of(*block(0))
    edited = replace(plan.layers[4], kind=LayerKind(kind), activation=None, weight=get_format("fp8"))
    (problem,) = validate(plan.replace_layers([edited]), layers_of(plan))
    assert problem.where == edited.name
    assert problem.what == f"is a matrix in the model and {read_as} in the plan"


def test_another_models_plan_names_missing_extra_and_reshaped() -> None:
    plan = plan_of(*block(0), *block(1))
    layers = [replace(m, shape=(64, 256)) if m.name == ATTENTION.format(0, "k") else m for m in layers_of(plan)]
    layers = [m for m in layers if "layers.1.mlp" not in m.name] + [Layer("extra", LayerKind.LINEAR, (4, 4))]
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
        ("vllm-modelopt", "mxfp4", "mxfp4", False),
        ("vllm-modelopt", "mxfp8", "mxfp8", True),
        ("vllm", "mxfp8", None, False),  # it would quantize the inputs all the same
        ("vllm", "fp8", "fp8_token", True),
        ("sglang", "fp8_block", None, False),
        ("sglang", "mxfp8", "mxfp8", False),
        ("sglang", "mxfp4", None, False),
        ("sglang", "int8", "int8_tensor", True),
        ("tensorrt-llm-compressed-tensors", "fp8", "fp8", False),
        ("tensorrt-llm-compressed-tensors", "mxfp8", "mxfp8", False),
        ("tensorrt-llm-compressed-tensors", "int8", "int8_token", False),  # it would take the codes for FP8
        ("tensorrt-llm-compressed-tensors", "nvfp4", None, False),
        ("tensorrt-llm-compressed-tensors", "int4", None, False),
        ("tensorrt-llm-compressed-tensors", "mxfp4", "mxfp4", True),
        ("tensorrt-llm", "nvfp4", None, False),
        ("tensorrt-llm", "fp8", "fp8", True),
        ("transformers", "mxfp6", None, True),
        ("tensorrt-rtx-sm120", "nvfp4", "nvfp4", True),
        ("tensorrt-rtx-sm120", "nvfp4", "fp8", False),  # its builder segfaults
        ("tensorrt-rtx-sm120", "fp8_block", "fp8_group", False),  # miscompiled without a word
        ("tensorrt-rtx-sm89", "nvfp4", "nvfp4", False),
        ("tensorrt-rtx-sm120", "mxfp8_e5m2", None, False),
        ("tensorrt-rtx-sm89", "int8", "int8_tensor", True),
        ("tensorrt-rtx-sm89", "int8", "int8_token", True),
        ("onnxruntime", "int4_g32", None, True),
        ("onnxruntime", "int8", "int8_tensor", True),
        ("onnxruntime", "fp8_channel", "fp8_token", True),
        ("onnxruntime", "nvfp4", None, False),
        ("onnxruntime-genai", "int8", "fp8", False),
    ],
)
def test_targets_accept_what_their_loaders_do(target: str, weight: str, activation: str | None, accepted: bool) -> None:
    plan = plan_of(*block(0, weight, activation))
    problems = validate(plan, layers_of(plan), TARGETS[target])
    assert (problems == []) is accepted
    assert accepted or set(where(problems)) == {m.name for m in plan.quantized}


@pytest.mark.parametrize(
    ("weight", "activation", "accepted"),
    [
        ("nvfp4", None, True),
        ("fp8", "fp8", True),
        ("fp8_channel", "fp8_token", True),
        ("fp8", "fp8_token", False),
        ("fp8_channel", "fp8", False),
        ("int8", "int8_token", False),  # "implemented only for NPU"
        ("mxfp4", None, False),
    ],
)
def test_sglang_takes_fewer_pairs_for_experts(weight: str, activation: str | None, accepted: bool) -> None:
    experts = replace(block(0, weight, activation)[0], kind="experts")
    problems = TARGETS["sglang"].problems(experts)
    assert (problems == []) is accepted and all("sglang" in problem for problem in problems)


def test_target_tables_are_sound() -> None:
    for target in TARGETS.values():
        keys = [(pair.weight, pair.activation) for pair in target.pairs]
        assert len(set(keys)) == len(keys), target.name
        assert target.source and target.description
        for formats, why in {**target.refused, **target.misread}.items():
            weight, _, activation = formats.partition("@")
            assert weight in FORMATS and (activation or "16bit") in (*FORMATS, "16bit") and "(" in why
            taken = {key for pair in target.pairs for key in (str(pair), pair.weight)}
            assert formats not in taken, f"{target.name} takes and refuses {formats}"
        for pair in target.pairs:
            assert pair.weight in FORMATS and (pair.activation is None or pair.activation in FORMATS)
            assert pair.runs in (NATIVE, STORAGE)
            assert pair.activation is not None or pair.runs == STORAGE, f"{target.name}: {pair} multiplies nothing low"
        assert set(target.kv_cache) <= {*FORMATS, "fp8_head"}
    with pytest.raises(
        ValueError, match=r"unknown target 'vlm'; known targets: vllm, vllm-modelopt, sglang.*; did you mean vllm"
    ):
        get_gpu("vlm")


def test_run_time_parts_heads_and_the_kv_cache() -> None:
    rotated = replace(block(0)[3], parts=Parts(hadamard=32))
    head = LayerPlan("score", LayerKind.HEAD, (512, 128), get_format("mxfp8"), get_format("mxfp8"))
    plan = plan_of(rotated, head, kv_cache=get_format("mxfp8"))
    found = {p.where: p.what for p in validate(plan, None, TARGETS["vllm"])}
    assert "hadamard" in found[rotated.name] and "kind 'head'" in found["score"]
    assert found["plan"] == "vllm cannot keep the KV cache in mxfp8; it has fp8, fp8_head, 16bit"
    # vLLM multiplies by a head in NVFP4 with its inputs in 16 bit.
    assert validate(plan_of(replace(head, weight=NVFP4, activation=None)), None, TARGETS["vllm"]) == []


def test_merged_siblings_must_agree_even_without_a_group() -> None:
    apart = block(0, group=False)
    vllm = TARGETS["vllm"]
    (problem,) = validate(plan_of(*apart), None, vllm)
    assert problem.where == "model.layers.0.self_attn.(q_proj|k_proj|v_proj)"
    assert "one tensor scale" in problem.what
    # FP8 has no global scale, so nothing has to be shared; formats still must agree.
    assert validate(plan_of(*block(0, "fp8_channel", "fp8_token", group=False)), None, vllm) == []
    mixed = [replace(apart[0], weight=None), *apart[1:]]
    (problem,) = validate(plan_of(*mixed), None, vllm)
    assert "q_proj=16bit" in problem.what and "k_proj=nvfp4" in problem.what


def test_blocks_of_merged_matrices_must_not_straddle() -> None:
    """vLLM lays the scales of q, k and v on each other: only the last may end in half a block of 128 rows."""
    plan = plan_of(*block(0, "fp8_block", "fp8_group"))
    found = validate(plan, None, TARGETS["vllm"])
    assert where(found) == [ATTENTION.format(0, "q"), ATTENTION.format(0, "k")]
    assert "out = 64 is not a multiple of 128" in found[0].what
    ragged = {m.name for m in plan.quantized if m.shape[-2] % 128}
    found = validate(plan, None, TARGETS["vllm-modelopt"])
    assert set(where(found)) == ragged and len(ragged) > 2 and "which vllm-modelopt requires" in found[0].what


def test_vllm_knows_four_formats_in_a_mixed_modelopt_checkpoint() -> None:
    """Layers in others are left in 16 bit there without a word, and their codes read as such."""
    modelopt = TARGETS["vllm-modelopt"]
    for weight, activation, known in (
        ("fp8", "fp8", True),
        ("mxfp8", "mxfp8", True),
        ("fp8_channel", "fp8_token", False),
    ):
        plan = plan_of(*block(0), *block(1, weight, activation))
        found = validate(plan, None, modelopt)
        assert (found == []) is known
        assert all("silently takes it for 16 bit" in problem.what for problem in found)
        assert set(where(found)) == (set() if known else {m.name for m in block(1) if m.weight is not None})
        assert validate(plan_of(*block(1, weight, activation)), None, modelopt) == []


def test_names_of_solvers_are_those_there_are() -> None:
    assert (tuple(SOLVERS), tuple(TRANSFORMS)) == (ROUNDINGS, solver_names.TRANSFORMS)
    assert STEPS["rotation"] == LARGEST_BLOCK
    with pytest.raises(ValueError, match="unknown solver 'mine'"):
        parse_solver("awq+mine")


def test_one_range_of_releases_is_meant_where_vllm_is() -> None:
    """In the targets, the failures that last, and the pages: that in which the plug-in's tests run."""
    releases = re.findall(r"\"(0\.\d+)\.\d+\"", (ROOT / "tests" / "vllm_releases.py").read_text())
    span = f"vLLM {releases[0]} to {releases[-1]}"
    assert all(TARGETS[name].description.startswith(f"{span}, ") for name in ("vllm", "vllm-modelopt"))
    texts = [file.read_text(encoding="utf-8") for file in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")]
    assert {found for text in texts for found in re.findall(r"vLLM 0\.\d+ to 0\.\d+", text)} == {span}
