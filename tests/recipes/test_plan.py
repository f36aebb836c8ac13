"""A plan is read as it was written, and what cannot be meant is refused with the layer's name."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quant.formats.format import FORMATS, FP8_HEAD, INPUT_FORMATS
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight

NVFP4, MXFP8, FP8 = FORMATS["nvfp4"], FORMATS["mxfp8"], FORMATS["fp8"]


def mixed_plan() -> Plan:
    """One layer of each fate: quantized with and without activations, kept, fused experts, tied."""
    return Plan(
        layers=(
            LayerPlan("embed", LayerKind.EMBEDDING, (100, 64), reason="embedding: …"),
            LayerPlan("a.q", LayerKind.LINEAR, (32, 64), NVFP4, NVFP4, "mse", "recipe x", group="a.(q|k)"),
            LayerPlan("a.k", LayerKind.LINEAR, (16, 64), NVFP4, NVFP4, "mse", "recipe x", group="a.(q|k)"),
            LayerPlan("a.down", LayerKind.LINEAR, (64, 96), MXFP8, None, score=0.25, cost=6336),
            LayerPlan("a.experts.up", LayerKind.EXPERTS, (4, 24, 64), NVFP4, group="a.experts"),
            LayerPlan("head", LayerKind.HEAD, (100, 64), tied_to="embed", reason="tied"),
        ),
        kv_cache=FP8,
        target="nvidia-sm90",
        provenance={"recipe": "x", "seed": 3},
    )


def edited(**changes: Any) -> dict[str, Any]:
    fields = mixed_plan().to_dict()
    fields["layers"][1].update(changes)
    return fields


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    plan = mixed_plan()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.layers[1].weight is NVFP4 and loaded.kv_cache is FP8 and loaded.attention is None
    assert loaded.provenance == {"recipe": "x", "seed": 3}
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_the_file_has_one_layer_a_line_to_edit(tmp_path: Path) -> None:
    mixed_plan().save(tmp_path / "plan.json")
    lines = [line for line in (tmp_path / "plan.json").read_text(encoding="utf-8").splitlines() if '"name"' in line]
    assert [json.loads(line.strip().rstrip(","))["name"] for line in lines] == [x.name for x in mixed_plan().layers]


def test_a_plan_without_layers_or_provenance_round_trips(tmp_path: Path) -> None:
    plan = Plan(())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_digest_is_of_the_decisions_only() -> None:
    plan = mixed_plan()
    assert plan.digest() == mixed_plan().digest() and re.fullmatch("[0-9a-f]{64}", plan.digest())
    assert dataclasses.replace(plan, provenance={"command": "another"}).digest() == plan.digest()
    changed = [
        dataclasses.replace(plan, kv_cache=None),
        dataclasses.replace(plan, guard="0.1 fp8 keep"),
        dataclasses.replace(plan, guard="0.2 fp8 keep"),
        dataclasses.replace(plan, observer="mse"),
        dataclasses.replace(plan, layers=plan.layers[:-1]),
        plan.replace_layers([dataclasses.replace(plan.layers[3], weight=FP8)]),
        plan.replace_layers([dataclasses.replace(plan.layers[1], solver="rtn")]),
        plan.replace_layers([dataclasses.replace(plan.layers[0], reason="other")]),
    ]
    assert len({plan.digest(), *(p.digest() for p in changed)}) == 9


def test_digest_survives_the_file_and_the_order_of_keys(tmp_path: Path) -> None:
    plan = mixed_plan()
    plan.save(tmp_path / "plan.json")
    fields = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    fields["layers"] = [dict(reversed(layer.items())) for layer in fields["layers"]]
    assert Plan.from_dict(dict(reversed(fields.items()))).digest() == plan.digest()


def test_sizes_are_those_counted_by_hand() -> None:
    """NVFP4: half a byte a weight, a byte per 16, 4 bytes a matrix. MXFP8: a byte a weight, a byte per 32."""
    expected = {
        "embed": 100 * 64 * 2,
        "a.q": 1024 + 128 + 4,
        "a.k": 512 + 64 + 4,
        "a.down": 6144 + 192,
        "a.experts.up": 4 * (768 + 96 + 4),
        "head": 0,
    }
    plan = mixed_plan()
    assert {layer.name: layer.nbytes for layer in plan.layers} == expected
    assert plan.nbytes == sum(expected.values()) == 24344
    quantized_weights = 2048 + 1024 + 6144 + 6144
    assert plan.effective_bits == 8 * (1156 + 580 + 6336 + 3472) / quantized_weights
    assert plan.by_name["a.q"].bits_per_weight == 8 * 1156 / 2048
    assert plan.by_name["embed"].bits_per_weight == 16
    assert bits_per_weight(plan.layers) == 8 * 24344 / (6400 + quantized_weights)
    assert bits_per_weight([]) == 16


def test_inputs_with_one_scale_or_a_global_scale_have_a_static_one() -> None:
    layer = LayerPlan("a", LayerKind.LINEAR, (32, 64), NVFP4)
    static = [dataclasses.replace(layer, activation=x).has_static_scale for x in (None, FP8, NVFP4, MXFP8)]
    assert static == [False, True, True, False]


def test_groups_come_in_model_order() -> None:
    plan = mixed_plan()
    assert {name: [m.name for m in members] for name, members in plan.groups().items()} == {
        "a.(q|k)": ["a.q", "a.k"],
        "a.experts": ["a.experts.up"],
    }


@pytest.mark.parametrize("version", [None, 1, 3, "2", True])
def test_another_schema_version_is_refused(version: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"schema_version is {version!r}; this release reads 2")):
        Plan.from_dict({**mixed_plan().to_dict(), "schema_version": version})


def test_a_guard_in_the_provenance_has_no_effect() -> None:
    plan = dataclasses.replace(mixed_plan(), provenance={"guard": "0.1 keep", "gaurd": 3, "observer": ["mse"]})
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert loaded == plan and (loaded.guard, loaded.observer) == (None, "absmax")
    assert loaded.digest() == mixed_plan().digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wieght": "fp8"}, "layer 'a.q': unknown field(s) wieght; known fields: name, kind, shape, weight"),
        ({"weight": "fp5"}, "layer 'a.q': unknown format 'fp5'; known formats: nvfp4, mxfp4"),
        ({"activation": "fp5"}, "layer 'a.q': unknown format 'fp5'"),
        ({"kind": "magic"}, "layer 'a.q': unknown kind 'magic'; known kinds: linear, experts"),
        ({"weight": "mxfp4"}, "fusion group 'a.(q|k)' mixes formats (a.q=mxfp4@nvfp4, a.k=nvfp4@nvfp4)"),
        ({"weight": None, "activation": None}, "fusion group 'a.(q|k)' mixes formats (a.q=16bit, a.k=nvfp4@nvfp4)"),
        ({"activation": None}, "fusion group 'a.(q|k)' mixes formats"),
        ({"solver": "rtn"}, "fusion group 'a.(q|k)' mixes solvers (a.q=rtn, a.k=mse); give its members one"),
        ({"name": "a.k"}, "names a layer twice: ['a.k']"),
    ],
)
def test_a_bad_layer_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.from_dict(edited(**changes))


@pytest.mark.parametrize("field", ["kind", "shape"])
def test_a_missing_field_is_named_with_its_layer(field: str) -> None:
    fields = mixed_plan().to_dict()
    del fields["layers"][3][field]
    with pytest.raises(ValueError, match=rf"layer 'a\.down': missing field\(s\) {field}"):
        Plan.from_dict(fields)


def test_a_layer_without_a_name_is_refused() -> None:
    fields = mixed_plan().to_dict()
    del fields["layers"][3]["name"]
    with pytest.raises(ValueError, match=r"\(no name\).*missing field\(s\) name"):
        Plan.from_dict(fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layer", [], "plan: unknown field(s) layer"),
        ("gaurd", "0.1 keep", "plan: unknown field(s) gaurd; known fields: layers, kv_cache, attention, guard"),
        ("guard", 0.1, "guard: expected text, not 0.1"),
        ("observer", None, "observer: expected text, not None"),
        ("kv_cache", "fp5", "unknown format 'fp5' of a KV cache; known formats: nvfp4, "),
        ("kv_cache", "nvfp4_four_over_six", "int4_g32, fp8_head, keep"),
        ("attention", "fp5", "unknown format 'fp5'"),
    ],
)
def test_a_bad_field_of_the_plan_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.from_dict({**mixed_plan().to_dict(), field: value})


def test_a_cache_in_a_format_of_inputs_is_refused_when_the_plan_is_made() -> None:
    for value in ("nvfp4_four_over_six", INPUT_FORMATS["nvfp4_four_over_six"]):
        with pytest.raises(ValueError, match="unknown format 'nvfp4_four_over_six' of a KV cache"):
            Plan(layers=(), kv_cache=value)
    assert Plan(layers=(), kv_cache="fp8_head").kv_cache is FP8_HEAD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"schema_version": 2}',
        '{"schema_version": 2, "layers": 3}',
        '{"schema_version": 2, "layers": [3]}',
        '{"schema_version": 2, "layers": [{"name": "a", "kind": "linear", "shape": 3}]}',
        '{"schema_version": 2, "layers": [{"name": "a", "kind": "linear", "shape": [1, 2], "weight": ["nvfp4"]}]}',
    ],
)
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json: not a valid plan: "):
        Plan.load(file)


def test_replace_layers_changes_those_and_no_other() -> None:
    plan = mixed_plan()
    new = dataclasses.replace(plan.layers[3], weight=None, reason="edited")
    replaced = plan.replace_layers([new])
    assert replaced.layers == (*plan.layers[:3], new, *plan.layers[4:])
    assert plan == mixed_plan()


def test_a_plan_shows_itself_in_one_line_and_as_a_table() -> None:
    plan = mixed_plan()
    text = repr(plan)
    assert "\n" not in text and len(text) < 200
    assert text.startswith("Plan(6 layers: 2 in 16bit, 2 in nvfp4@nvfp4, 1 in mxfp8, 1 in nvfp4; KV cache fp8; ")
    layer = LayerPlan("up", LayerKind.LINEAR, (64, 32), FORMATS["nvfp4"], FORMATS["nvfp4"], "gptq", "recipe nvfp4")
    assert repr(layer) == "LayerPlan(up: nvfp4@nvfp4, gptq; recipe nvfp4)"
    assert repr(LayerPlan("norm", LayerKind.NORM, (64,), reason="norm")) == "LayerPlan(norm: 16bit; norm)"
    table = dataclasses.replace(plan, layers=(*plan.layers, LayerPlan("b", LayerKind.LINEAR, (32, 64), reason="a<b")))
    assert table._repr_html_().count("<tr>") == 8 and "a&lt;b" in table._repr_html_()
