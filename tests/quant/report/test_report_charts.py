"""The charts hand their script, and show in their tables, the records that they are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from quant.calibration.allocation.goal import Budget, BudgetKind
from quant.calibration.sensitivity.table import GroupScores, Sensitivity
from quant.formats.format import get_format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.report import charts
from quant.report import charts as receipt_charts
from quant.report.charts import Section, block_starts
from quant.report.report import Receipt, Report

Rich = tuple[Report, Plan]
Make = Callable[..., Rich]


def chart(section: Section | None) -> Any:
    assert section is not None and section.chart is not None
    return section.chart


def cells(section: Section | None, row: str) -> list[str]:
    """Texts of the row of that id."""
    assert section is not None
    return list(dict(section.rows)[row])


def points(section: Section | None) -> dict[tuple[str, str], tuple[float, float | None]]:
    """(x, y) of every point by series and row; each series has a colour of its own and each row exists."""
    drawn = chart(section)
    assert section is not None
    assert not section.rows or {row for *_, row in drawn["points"]} <= dict(section.rows).keys()
    assert {series for *_, series, _ in drawn["points"]} <= dict(drawn["series"]).keys()
    assert len(set(dict(drawn["series"]).values())) == len(drawn["series"])
    return {(series, row): (x, y) for x, y, series, row in drawn["points"]}


def test_the_pareto_curve_is_what_the_records_say(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    section = charts.pareto(record)
    expected = {("sum of the scores", f"P{i}"): (p.bits, p.kl_predicted) for i, p in enumerate(record.curve)}
    expected |= {("measured", f"P{i}"): (p.bits, p.kl_measured) for i, p in enumerate(record.curve) if p.kl_measured}
    expected |= {("one format for all, measured", f"U{i}"): (u.bits, u.kl) for i, u in enumerate(record.uniform)}
    expected["chosen, measured", "PX"] = (record.chosen.bits, record.chosen.kl_measured)
    assert points(section) == expected
    assert chart(section)["curve"] == [(p.bits, p.kl_predicted) for p in record.curve]
    assert [name for *_, name in chart(section)["labels"]] == ["nvfp4", "chosen", "fp8"]
    assert float(cells(section, "PX")[3]) == pytest.approx(record.chosen.kl_measured, rel=1e-3)
    ratio = record.chosen.kl_measured / record.uniform[0].kl
    assert f"nvfp4, measures {record.uniform[0].kl:.4g}; the chosen allocation has {ratio:.2f} of that" in section.text
    assert chart(section)["limit"] == {"x": 6.0}
    assert chart(charts.pareto(replace(record, budget=Budget(BudgetKind.KL, 0.1))))["limit"] == {"y": 0.1}
    assert chart(charts.pareto(replace(record, budget=Budget(BudgetKind.BYTES, 1e9))))["limit"] is None
    assert "No single format is as small." in charts.pareto(replace(record, uniform=record.uniform[1:])).text
    # A format that changes nothing is the best one, and nothing is divided by its loss.
    lossless = replace(record, uniform=(replace(record.uniform[0], name="bf16", bits=1.0, kl=0.0), *record.uniform))
    assert "no larger, bf16, measures 0." in charts.pareto(lossless).text


def test_a_loss_of_zero_is_in_the_table_and_not_on_the_curve(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    last = replace(record.curve[-1], bits=16.0, kl_predicted=0.0, kl_measured=None)
    section = charts.pareto(replace(record, curve=(*record.curve, last)))
    assert cells(section, f"P{len(record.curve)}") == ["allocated", "16.000", "0", "–"]
    assert len(chart(section)["curve"]) == len(record.curve)


def test_rounds_show_what_was_expected_and_found(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    section = charts.rounds(record)
    for i, turn in enumerate(record.rounds):
        name = f"round {i + 1}" + (", chosen" if turn.measured == record.chosen.kl_measured else "")
        off = f"{100 * (turn.measured / turn.predicted - 1):+.1f}%"
        figures = [f"{turn.bits:.3f}", f"{turn.predicted:.4g}", f"{turn.measured:.4g}", off]
        assert cells(section, f"R{i}") == [name, *figures, str(len(turn.changed) or "–")]
    assert [cells(section, row)[0] for row in ("R0", "R1")] == ["round 1", "round 2, chosen"]
    assert charts.rounds(replace(record, rounds=())) is None


def test_the_heat_map_holds_the_scores_and_the_plan(rich_report: Rich) -> None:
    report, plan = rich_report
    table = report.sensitivity
    assert table is not None
    section = charts.heat_map(table, plan)
    drawn = chart(section)["cells"]
    assert len(drawn) == 2 * len(table.groups)
    for format, role, block, score, chosen, row in drawn:
        group = table.groups[int(row[1:])]
        planned = plan.by_name[group.layers[0]].weight
        assert score == group.scores[format]
        assert chosen is (planned is not None and planned.name == format)
        assert group.name == role.replace("*", str(block))
    assert [short for _, short in chart(section)["roles"]] == ["q/k/v", "o", "gate/up", "down"]
    first = table.groups[0]
    scores = [f"{first.scores[f]:.4g}" for f in ("nvfp4", "fp8")]
    assert cells(section, "S0") == [first.name, f"{first.numel:,}", *scores, "keep"]
    assert dict(chart(section)["panels"])["fp8"] == "fp8, chosen for 30 of 120 groups"


def test_groups_without_a_block_and_negative_scores() -> None:
    """KL of a tiny model can come out below zero by noise; a head has no block."""
    groups = (
        GroupScores("0.up", ("0.up",), 64, {"nvfp4": -1e-6, "keep": 0.0}, {}, {}),
        GroupScores("head", ("head",), 64, {"nvfp4": 0.5, "keep": 0.0}, {}, {}),
    )
    table = Sensitivity("kl", ("nvfp4", "keep"), "nats", 1, 8, groups)
    plan = Plan(tuple(LayerPlan(g.name, LayerKind.LINEAR, (8, 16), *2 * [get_format("nvfp4")]) for g in groups))
    assert [cell[1:4] for cell in chart(charts.heat_map(table, plan))["cells"]] == [
        ("*.up", 0, -1e-6),
        ("head", None, 0.5),
    ]


@pytest.mark.parametrize(
    ("weight", "activation", "columns", "expected"),
    [
        ("nvfp4", None, ("nvfp4", "nvfp4a16", "keep"), "nvfp4a16"),
        ("nvfp4", "nvfp4", ("nvfp4", "nvfp4a16", "keep"), "nvfp4"),
        ("fp8_channel", "fp8_token", ("fp8_channel", "keep"), "fp8_channel"),
        ("int4", None, ("int4a16", "keep"), "int4a16"),
        (None, None, ("nvfp4", "keep"), "keep"),
        ("fp8", "fp8_token", ("fp8", "fp8@fp8_token", "keep"), "fp8@fp8_token"),
        ("mxfp6", None, ("nvfp4", "keep"), None),
    ],
)
def test_the_chosen_column(weight: str | None, activation: str | None, columns: tuple[str, ...], expected: str) -> None:
    formats = [get_format(name) if name else None for name in (weight, activation)]
    plan = Plan((LayerPlan("a", LayerKind.LINEAR, (8, 32), *formats),))
    assert charts.chosen_format(GroupScores("a", ("a",), 1, dict.fromkeys(columns, 0.1), {}, {}), plan) == expected


def test_memory_adds_up_to_the_plan(rich_report: Rich) -> None:
    report, plan = rich_report
    branch = LayerPlan("x", LayerKind.LINEAR, (64, 128), get_format("nvfp4"), parts=Parts(pre_scale=True, rank=4))
    plan = replace(plan, layers=(*plan.layers, branch))
    section = charts.memory(plan, report.kv_cache)
    sizes = {name: size for _, size, name, _ in chart(section)["parts"]}
    for i, name in enumerate(sizes):
        assert cells(section, f"M{i}")[0] == name and cells(section, f"M{i}")[2] == f"{sizes[name]:,}"
    codes = sum(m.numel * m.weight.element.bits // 8 for m in plan.quantized if m.weight)
    assert sizes["quantized codes"] == codes
    assert sizes["scales"] == sum(m.nbytes for m in plan.quantized) - codes
    assert sizes["embeddings and head"] == 2 * 49152 * 576  # the tied head is stored once
    assert sizes["16-bit rest"] == sum(
        2 * m.numel for m in plan.layers if not m.weight and m.kind in (LayerKind.LINEAR, LayerKind.NORM)
    )
    assert sizes["all weights"] == plan.nbytes
    assert sizes["KV cache, 8 × 32,768 tokens"] == 30 * 2 * 192 * 262_144  # layers × (K and V) × bytes × tokens
    assert [bar for bar, *_ in chart(section)["parts"]] == ["weights"] * 4 + ["both"] * 2
    alone = charts.memory(plan, None)
    assert alone is not None and "KV cache" in alone.text and charts.memory(Plan(()), None) is None


@pytest.mark.parametrize("formats", [(), ("nvfp4",), ("nvfp4", "mxfp8")])
def test_sizes_add_up(make_report: Make, formats: tuple[str, ...]) -> None:
    report, plan = make_report(formats=formats)
    section = charts.sizes(report, plan)
    for bar, total in (("before", report.bytes_before), ("after", report.bytes_after)):
        assert sum(size for when, size, *_ in chart(section)["parts"] if when == bar) == total
    colours = dict(chart(section)["series"])
    assert [colours[name] for name in formats] == [f"c{i}" for i in range(len(formats))]
    # One grey, whose parts the rows name.
    assert list(colours.items())[len(formats) :] == [("not quantized", "kept")]
    names = {cells[0] for _, cells in section.rows}
    assert {"16 bit, embedding", "16 bit, norm"} <= names
    assert sum(int(cells[1]) for _, cells in section.rows) == len(report.layers) - 1  # the tied head is no row's


def test_errors_are_those_of_the_layers(make_report: Make) -> None:
    report, _ = make_report()
    exact = replace(report.layers[3], snr_db=None, relative_error=0.0)
    report = replace(report, layers=[*report.layers[:3], exact, *report.layers[4:]])
    section = charts.errors(report)
    shown = {f"L{i}": layer for i, layer in enumerate(report.layers) if layer.format or len(layer.shape) > 1}
    seen = {row: (y, series) for (series, row), (_, y) in points(section).items()}
    assert list(seen) == list(shown)
    for row, layer in shown.items():
        assert seen[row][1] == (layer.format or "16 bit, no error")
        # 16 bit stands at the bottom, as do layers without an error.
        assert seen[row][0] == (layer.relative_error if layer.format else 0.0)
    assert dict(chart(section)["series"]) == {
        **{"nvfp4": "c0", "mxfp8": "c1", "fp8_channel": "c2"},
        "16 bit, no error": "kept",
    }
    worst = max((layer for layer in report.layers if layer.format), key=lambda layer: layer.relative_error or 0)
    assert section is not None and section.link == (f"L{report.layers.index(worst)}", worst.name)
    assert "weight" in chart(section)["y"] and "since outputs are compared on tokens" in section.text
    # Where outputs were measured, the chart shows their errors, and no point for a layer without one.
    first, *others = (i for i, layer in enumerate(report.layers) if layer.format)
    layers = [replace(m, output_error=0.01 * i if i in others else None) for i, m in enumerate(report.layers)]
    section = charts.errors(replace(report, layers=layers))
    seen = {row: (y, series) for (series, row), (_, y) in points(section).items()}
    assert f"L{first}" not in seen and all(seen[f"L{i}"][0] == 0.01 * i for i in others)
    assert section is not None and "output" in chart(section)["y"] and section.link[0] == f"L{max(others)}"  # type: ignore[index]
    assert charts.errors(make_report(formats=())[0]) is None


def test_roles_have_colours_where_there_is_one_format(make_report: Make) -> None:
    report, _ = make_report(names=30, formats=("nvfp4",))
    names = [f"m.{i}.role{i % 9}" for i in range(len(report.layers))]
    layers = [replace(layer, name=name) for layer, name in zip(report.layers, names, strict=True)]
    series = {row: s for (s, row) in points(charts.errors(replace(report, layers=layers)))}
    roles = list(dict.fromkeys(name[-5:] for name, layer in zip(names, layers, strict=True) if layer.format))
    for i, layer in enumerate(layers):
        if layer.format:
            role = layer.name[-5:]
            assert series[f"L{i}"] == (role if roles.index(role) < 6 else "other")  # nine roles share seven colours


def test_the_receipt_puts_failures_first(rich_report: Rich) -> None:
    record = rich_report[0].receipt
    assert record is not None
    section, audit = receipt_charts.receipt(record)
    bad = record.layers[5]
    assert section.verdict is False and f"These layers failed: {bad.name}. " in section.text
    assert section.rows[0][0] == "E5" and len(dict(section.rows)) == len(record.layers)
    deviations = [f"{v:.4g}" for v in (bad.fake_quant, bad.checkpoint, bad.onnx) if v is not None]
    assert cells(section, "E5") == [bad.name, "✗ failed", *deviations]
    assert cells(audit, "A5")[1:] == ["✗ failed", record.audit[5].planned, "half GEMM"] and audit.rows[0][0] == "A5"
    assert audit.text.startswith(f"{len(record.audit) - 1} of {len(record.audit)} checks passed: ")
    assert "Not run: engine." in section.text and audit.verdict is False
    stages = {"PyTorch": "fake_quant", "checkpoint": "checkpoint", "ONNX": "onnx"}
    assert points(section) == {
        (name, f"E{i}"): (i, getattr(layer, key))
        for i, layer in enumerate(record.layers)
        for name, key in stages.items()
    }
    assert cells(section, "E0")[3] == "0"
    assert f"0 of {len(record.layers)} layers agree exactly" in section.text
    exact = replace(record.layers[0], fake_quant=0.0, onnx=0.0)
    good = Receipt((exact, *(replace(m, passed=True) for m in record.layers[:2])), (), True)
    (section,) = receipt_charts.receipt(good)
    assert section.verdict is True and "failed" not in str(section) and "1 of 3 layers agree exactly" in section.text
    (section,) = receipt_charts.receipt(Receipt((), (), False))
    assert section.verdict is False and section.chart is None and not section.rows


def test_blocks_begin_where_their_first_layer_is() -> None:
    def starts(names: Iterable[str]) -> list[tuple[int, int]]:
        return block_starts(names)

    assert starts(["embed", "layers.0.a", "layers.0.b", "layers.1.a.2", "head"]) == [(1, 0), (3, 1)]
    assert starts(["0.weight", "conv2d", "1"]) == [(0, 0), (2, 1)]
