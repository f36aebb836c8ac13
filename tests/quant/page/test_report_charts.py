"""Charts of the report: what is drawn, read back from the page, is the data it was drawn from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from quant.allocation_record import Budget, Uniform
from quant.calibration.sensitivity.table import GroupScores, Sensitivity
from quant.cli.main import main
from quant.formats.format import get_format
from quant.page import charts
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.report import KVCache, Receipt, Report, kv_cache_of, render_html, summary

Rich = tuple[Report, Plan]


def ticks(html: str, side: str) -> list[tuple[float, float]]:
    """(percent, value) of the labels of one axis: "top" or "left"."""
    return [(float(p), float(v)) for p, v in re.findall(rf'<span style="{side}:([-\d.]+)%">([-\de.]+)</span>', html)]


def read(percent: float, axis: list[tuple[float, float]], *, log: bool = False) -> float:
    """The value at a place, by its two outermost labels alone."""
    (p0, v0), (p1, v1) = axis[0], axis[-1]
    if log:
        v0, v1 = math.log(v0), math.log(v1)
    value = v0 + (percent - p0) / (p1 - p0) * (v1 - v0)
    return math.exp(value) if log else value


def marks(html: str) -> list[tuple[str, str, float, float]]:
    """(class, row, left, top) of every mark that can be hovered."""
    found = re.findall(r'<use class="(\w+)" href="#mark-\w+" x="([-\d.]+)%" y="([-\d.]+)%" data-i="(\w+)"', html)
    return [(css, row, float(x), float(y)) for css, x, y, row in found]


def cells(html: str, row: str) -> list[str]:
    """Texts of the row of that id."""
    found = re.search(rf'<tr id="{row}">(.*?)</tr>', html)
    assert found is not None
    return [unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", found.group(1))]


@pytest.mark.parametrize("values", [[0.0, 1.0], [3.2, 3.21], [-5.0, 120.0], [1e-7, 4e-7], [7.0]])
def test_linear_axes_hold_their_values_and_are_round(values: list[float]) -> None:
    axis = charts.linear(values)
    assert axis.low <= min(values) and axis.high >= max(values)
    assert 2 <= len(axis.ticks) <= 9
    for value in (*values, axis.ticks[1]):
        assert axis.at(value) == pytest.approx((value - axis.low) / (axis.high - axis.low))
    step = axis.ticks[1] - axis.ticks[0]
    assert f"{step:.0e}"[0] in "125"
    assert charts.linear([0.3, 0.7], zero=True).low == 0


@pytest.mark.parametrize("values", [[0.001, 2.0], [0.2, 0.21], [1e-6, 1e6], [0.05]])
def test_logarithmic_axes(values: list[float]) -> None:
    axis = charts.logarithmic(values)
    assert 1 <= len(axis.ticks) <= 7
    for value in values:
        expected = math.log(value / axis.low) / math.log(axis.high / axis.low)
        assert 0 < axis.at(value) < 1 and axis.at(value) == pytest.approx(expected)
    assert axis.at(0.0) == 0


def test_the_pareto_curve_is_where_the_records_say(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    html = charts.pareto(record)
    x, y = ticks(html, "left"), ticks(html, "top")
    seen = {(css, row): (read(left, x), read(top, y, log=True)) for css, row, left, top in marks(html)}
    expected = {("c0", f"P{i}"): (p.bits, p.kl_predicted) for i, p in enumerate(record.curve)}
    expected |= {("c1", f"P{i}"): (p.bits, p.kl_measured) for i, p in enumerate(record.curve) if p.kl_measured}
    expected |= {("c2", f"U{i}"): (u.bits, u.kl) for i, u in enumerate(record.uniform)}
    expected[("c3", "PX")] = (record.chosen.bits, record.chosen.kl_measured)
    assert seen.keys() == expected.keys()
    for key, (bits, loss) in expected.items():
        assert seen[key][0] == pytest.approx(bits, abs=0.002)
        assert seen[key][1] == pytest.approx(loss, rel=0.003)
    assert cells(html, "PX")[0] == "chosen" and float(cells(html, "PX")[3]) == pytest.approx(
        record.chosen.kl_measured, rel=1e-3
    )
    ratio = record.chosen.kl_measured / record.uniform[0].kl
    assert f"nvfp4, measures {record.uniform[0].kl:.4g}; the choice loses {ratio:.2f} of that" in html
    limit = re.search(r'<line class="limit" x1=([\d.]+)%', html)
    assert limit is not None and read(float(limit.group(1)), x) == pytest.approx(6.0, abs=0.01)


def test_names_of_close_points_do_not_cover_each_other(rich_report: Rich) -> None:
    """The second of two at one place goes below the curve; what is far away goes above it again."""
    record = rich_report[0].allocation
    assert record is not None
    uniform = (Uniform("fp8", 8.0, 0.03), Uniform("mxfp8", 8.25, 0.031), Uniform("fp6", 6.25, 0.12))
    html = charts.pareto(replace(record, uniform=uniform))
    sides = {name: float(dy) for dy, name in re.findall(r'<text [^>]* dy="(-?\d+)"[^>]*>([^<]+)</text>', html)}
    assert {name: dy < 0 for name, dy in sides.items()} == {"fp8": True, "mxfp8": False, "fp6": True, "chosen": True}


def test_a_loss_of_zero_is_in_the_table_and_not_on_the_logarithmic_axis(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    last = replace(record.curve[-1], bits=16.0, kl_predicted=0.0, kl_measured=None)
    html = charts.pareto(replace(record, curve=(*record.curve, last), budget=Budget("kl", 0.1)))
    row = f"P{len(record.curve)}"
    assert cells(html, row) == ["allocated", "16.000", "0", "–"]
    assert row not in {found for _, found, *_ in marks(html)}
    limit = re.search(r'<line class="limit" x1=0.00% y1=([\d.]+)%', html)
    assert limit is not None
    assert read(float(limit.group(1)), ticks(html, "top"), log=True) == pytest.approx(0.1, rel=0.003)


def test_rounds_show_what_was_expected_and_found(rich_report: Rich) -> None:
    record = rich_report[0].allocation
    assert record is not None
    html = charts.rounds(record)
    y = ticks(html, "top")
    seen = {(css, row): read(top, y) for css, row, _, top in marks(html)}
    for i, turn in enumerate(record.rounds):
        assert seen["c0", f"R{i}"] == pytest.approx(turn.predicted, abs=1e-3)
        css = "c3" if turn.measured == record.chosen.kl_measured else "c1"
        assert seen[css, f"R{i}"] == pytest.approx(turn.measured, abs=1e-3)
        assert cells(html, f"R{i}")[4] == f"{100 * (turn.measured / turn.predicted - 1):+.1f}%"
    assert [cells(html, row)[0] for row in ("R0", "R1")] == ["round 1", "round 2, chosen"]
    assert "round 2 of 2" in html and f"measured is {record.chosen.kl_measured:.4g}, +12.0% from it" in html
    worse = replace(record.rounds[1], measured=9.0)  # tried after it, and turned down
    assert "outcome of round 2 of 3" in charts.rounds(replace(record, rounds=(*record.rounds, worse)))
    assert cells(html, "R1")[6] == "2: 3.mlp.down_proj, 9.mlp.down_proj"
    names = [f"model.layers.{name}" for name in ("5.self_attn.q_proj", "5.self_attn.k_proj", "17.mlp.up_proj")]
    several = replace(record, rounds=(replace(record.rounds[0], changed=tuple(names)),))
    assert cells(charts.rounds(several), "R0")[6] == "3: 5.self_attn.(q_proj, k_proj), 17.mlp.up_proj"


def test_heat_follows_the_scores_and_rings_follow_the_plan(rich_report: Rich) -> None:
    report, plan = rich_report
    table = report.sensitivity
    assert table is not None
    html = charts.heat_map(table, plan)
    found = re.findall(
        r'<i( class=chosen)? data-i="S(\d+)" data-value="([^"]+)" style="grid-area:(\d+)/(\d+);--heat:([\d.]+)%', html
    )
    assert len(found) == 2 * len(table.groups)
    for position, (ring, i, value, row, column, heat) in enumerate(found):
        group = table.groups[int(i)]
        format = "nvfp4" if position < len(table.groups) else "fp8"
        assert float(value) == pytest.approx(group.scores[format], rel=1e-5)
        planned = plan.by_name[group.layers[0]].weight
        assert bool(ring) is (planned is not None and planned.name == format)
        assert int(column) - 2 == int(group.name.split(".")[2])
        assert int(row) == 1 + ["self_attn.(", "o_proj", "mlp.(", "down"].index(
            next(k for k in ("self_attn.(", "o_proj", "mlp.(", "down") if k in group.name)
        )
        low, high = min(float(f[2]) for f in found), max(float(f[2]) for f in found)
        expected = 100 * math.log(float(value) / low) / math.log(high / low)
        assert float(heat) == pytest.approx(expected, abs=0.06)
    first = table.groups[0]
    expected_row = [
        first.name,
        f"{first.numel:,}",
        f"{first.scores['nvfp4']:.4g}",
        f"{first.scores['fp8']:.4g}",
        "keep",
    ]
    assert cells(html, "S0") == expected_row


def test_groups_without_a_block_and_negative_scores() -> None:
    """KL of a tiny model can come out below zero by noise; a head has no block."""
    groups = (
        GroupScores("blocks.0.up", ("blocks.0.up",), 64, {"nvfp4": -1e-6, "keep": 0.0}, {}, {}),
        GroupScores("head", ("head",), 64, {"nvfp4": 0.5, "keep": 0.0}, {}, {}),
    )
    table = Sensitivity("kl", ("nvfp4", "keep"), "nats", 1, 8, groups)
    plan = Plan(tuple(LayerPlan(g.name, "linear", (8, 16), *2 * [get_format("nvfp4")]) for g in groups))
    html = charts.heat_map(table, plan)
    assert "grid-area:2/2/3" in html  # over all columns
    bars = charts.waterfall(table, plan, None, lambda f: "c0")
    assert [cells(bars, row)[2] for row in ("W0", "W1", "WX0")] == ["-1e-06", "0.5", "0.5"]


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
    plan = Plan((LayerPlan("a", "linear", (8, 32), *formats),))
    assert charts.chosen_format(GroupScores("a", ("a",), 1, dict.fromkeys(columns, 0.1), {}, {}), plan) == expected


def test_the_waterfall_adds_up(rich_report: Rich) -> None:
    """Each bar starts where the last one ended; the last ends at the sum, and all can be read off the axis."""
    report, plan = rich_report
    table, record = report.sensitivity, report.allocation
    assert table is not None and record is not None
    html = charts.waterfall(table, plan, record, lambda f: "c0")
    y = ticks(html, "top")
    found = re.findall(
        r'<rect class="\w+" x="([\d.]+)%" width="[\d.]+%" y="([\d.]+)%" height="([\d.]+)%" data-i="(\w+)"', html
    )
    bars = {row: (float(x), float(top), float(top) + float(height)) for x, top, height, row in found}
    total, last_x = 0.0, -1.0
    for i, group in enumerate(table.groups):
        weight = plan.by_name[group.layers[0]].weight
        if weight is None:
            assert f"W{i}" not in bars  # 16 bit adds nothing
            continue
        x, top, bottom = bars[f"W{i}"]
        assert x > last_x
        assert read(bottom, y) == pytest.approx(total, abs=1e-4)
        total += group.scores[weight.name]
        assert read(top, y) == pytest.approx(total, abs=1e-4)
        assert float(cells(html, f"W{i}")[4]) == pytest.approx(total, rel=1e-3)
        last_x = x
    assert read(bars["WX0"][1], y) == pytest.approx(total, abs=1e-4)
    assert read(bars["WX1"][1], y) == pytest.approx(record.chosen.kl_measured, abs=1e-4)


def test_memory_adds_up_to_the_plan(rich_report: Rich) -> None:
    report, plan = rich_report
    branch = LayerPlan("x", "linear", (64, 128), get_format("nvfp4"), parts=Parts(pre_scale=True, rank=4))
    plan = replace(plan, layers=(*plan.layers, branch))
    html = charts.memory(plan, report.kv_cache)
    sizes = {cells(html, f"M{i}")[0]: int(cells(html, f"M{i}")[2].replace(",", "")) for i in range(6)}
    codes = sum(m.numel * m.weight.element.bits // 8 for m in plan.quantized if m.weight)
    assert sizes["quantized codes"] == codes
    assert sizes["scales"] == sum(m.nbytes for m in plan.quantized) - codes
    assert sizes["embeddings and head"] == 2 * 49152 * 576  # the tied head is stored once
    assert sizes["16-bit rest"] == sum(
        2 * m.numel for m in plan.layers if not m.weight and m.kind in ("linear", "norm")
    )
    assert sizes["all weights"] == plan.nbytes
    assert sizes["KV cache, 8 × 32,768 tokens"] == 30 * 2 * 192 * 262_144  # layers × (K and V) × bytes × tokens
    first, second = (
        [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
        for bar in re.findall(r'<div class="bar parts"[^>]*>(.*?)</div>', html)
    )
    assert sum(first) == pytest.approx(100, abs=0.01) and sum(second) == pytest.approx(100, abs=0.01)
    assert second[0] == pytest.approx(100 * plan.nbytes / (plan.nbytes + 3_019_898_880), abs=0.01)
    assert "KV cache" in charts.memory(plan, None) and charts.memory(Plan(()), None) == ""


def test_the_cache_is_that_of_the_goal() -> None:
    from transformers import BertConfig, LlamaConfig

    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    goal = {"allocation": {"goal": {"context": 1000, "batch": 4}}}
    found = kv_cache_of(config, Plan((), provenance=goal))
    assert found == KVCache(3 * 2 * (2 * 8) * 2 * 4000, 1000, 4)  # layers × (K and V) × heads × width × bytes × tokens
    halved = kv_cache_of(config, Plan((), kv_cache=get_format("fp8")))
    assert halved is not None and (halved.context, halved.batch) == (4096, 1)
    assert halved.nbytes == pytest.approx(found.nbytes * 4096 / 4000 / 2, rel=1e-3)
    assert kv_cache_of(BertConfig(), Plan(())) is None and kv_cache_of(None, Plan(())) is None


def test_the_receipt_puts_failures_first(rich_report: Rich) -> None:
    record = rich_report[0].receipt
    assert record is not None
    html = charts.receipt(record)
    bad = record.layers[5]
    assert f"✗ Failed: {bad.name}" in html
    rows = re.findall(r'<tr id="E(\d+)">', html)
    assert rows[0] == "5" and sorted(map(int, rows)) == list(range(len(record.layers)))
    assert cells(html, "E5") == [
        bad.name,
        "✗ failed",
        *(f"{v:.4g}" for v in (bad.fake_quant, bad.checkpoint, bad.onnx) if v is not None),
    ]
    assert cells(html, "A5")[1:] == ["✗ failed", record.audit[5].planned, "half GEMM"]
    assert f"{len(record.audit) - 1} of {len(record.audit)} layers run in the engine as planned" in html
    assert "Not run: engine." in html and "<details class=data>" not in html  # nothing to unfold before a failure shows
    y = ticks(html, "top")
    for css, row, _, top in marks(html):
        stage = {"c0": "fake_quant", "c1": "checkpoint", "c2": "onnx"}[css]
        value = getattr(record.layers[int(row[1:])], stage)
        # What agrees exactly stands on the axis: zero has no place on a logarithmic one.
        assert top == 100 if value == 0 else read(top, y, log=True) == pytest.approx(value, rel=0.01)
    good = Receipt(tuple(replace(m, passed=True) for m in record.layers[:3]), (), True)
    assert "✓ Passed" in charts.receipt(good) and "failed" not in charts.receipt(good)
    assert "✗ Failed</p>" in charts.receipt(Receipt((), (), False))


def test_parts_survive_the_file(rich_report: Rich, tmp_path: Path) -> None:
    report = rich_report[0]
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    fields = json.loads((tmp_path / "report.json").read_text())
    assert fields["allocation"]["chosen"]["bits"] == report.allocation.chosen.bits  # type: ignore[union-attr]
    assert len(fields["sensitivity"]["groups"]) == 120
    assert fields["receipt"]["layers"][5]["passed"] is False
    plain = replace(report, sensitivity=None, allocation=None, receipt=None, kv_cache=None).to_dict()
    assert {"sensitivity", "allocation", "receipt", "kv_cache"}.isdisjoint(plain)
    for change in (
        {"allocation": {"bits": 3}},
        {"receipt": {"layers": [{"name": "x"}], "passed": True}},
        {"kv_cache": {"x": 1}},
    ):
        (tmp_path / "bad.json").write_text(json.dumps({**fields, **change}))
        with pytest.raises(ValueError, match=r"bad\.json: not a valid report"):
            Report.load(tmp_path / "bad.json")


def test_sections_follow_from_the_data(rich_report: Rich) -> None:
    report, plan = rich_report

    def titles(report: Report) -> list[str]:
        return re.findall(r"<section><h2>(.*?)</h2>", render_html(report, plan))

    assert titles(report) == [
        "Size against loss",
        "Predicted and achieved",
        "Bytes by format",
        "Memory",
        "Sensitivity",
        "Where the loss comes from",
        "Error by layer",
        "Export receipt",
        "Plan: every layer, and why",
        "Reproduce",
    ]
    plain = replace(report, sensitivity=None, allocation=None, receipt=None, kv_cache=None)
    assert titles(plain) == ["Bytes by format", "Memory", "Error by layer", "Plan: every layer, and why", "Reproduce"]
    html = render_html(report, plan)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    rows = re.findall(r'data-i="(\w+)"', html)
    assert {row if row[0].isalpha() else f"L{row}" for row in rows} <= set(ids)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)


def test_names_are_escaped_everywhere(rich_report: Rich) -> None:
    report, plan = rich_report
    assert report.sensitivity is not None and report.receipt is not None and report.allocation is not None
    evil = '<script>alert("x")</script>'
    group = replace(report.sensitivity.groups[0], name=f"m.0.{evil}")
    changed = replace(
        report,
        sensitivity=replace(report.sensitivity, groups=(group, *report.sensitivity.groups[1:]), unit=evil),
        receipt=Receipt((replace(report.receipt.layers[0], name=evil, passed=False),), (), False),
        allocation=replace(report.allocation, unit=evil, uniform=(replace(report.allocation.uniform[0], name=evil),)),
    )
    html = render_html(changed, plan)
    assert evil not in html and html.count("<script>") == 1
    assert html.count("&lt;script&gt;") >= 6


def test_own_reasons_stand_in_the_rows(rich_report: Rich) -> None:
    report, plan = rich_report
    html = render_html(report, plan)
    index, layer = next((i, m) for i, m in enumerate(report.layers) if m.format)
    row = re.search(rf'<tr id="L{index}" .*?<td class=why>{re.escape(layer.reason)}</td></tr>', html)
    assert row is not None
    kept = next(i for i, m in enumerate(report.layers) if not m.format and "_proj" in m.name)
    assert re.search(rf'<tr id="L{kept}" .*?<td class=why>keep: ', html)
    # One part for each format, one for what was scored and kept, and one for each reason of all others.
    others = {layer.reason for layer in report.layers if plan.by_name[layer.name].score is None}
    assert html.count("<details class=plan") == 3 + len(others)


def test_the_terminal_says_the_same(rich_report: Rich) -> None:
    report = rich_report[0]
    assert report.allocation is not None and report.receipt is not None
    rows = dict(summary(report))
    chosen = report.allocation.chosen
    assert rows["allocation"].startswith(f"{chosen.bits:.3f} bits")
    assert f"{chosen.kl_measured:.4g} measured after 2 rounds" in rows["allocation"]
    assert rows["export receipt"] == f"FAILED, 2 of {2 * len(report.receipt.layers)} checks failed"
    passed = replace(report, receipt=Receipt((report.receipt.layers[0],), (), True))
    assert dict(summary(passed))["export receipt"] == "passed, 1 check"


def test_the_command_takes_a_receipt_up(rich_report: Rich, tmp_path: Path) -> None:
    report, plan = rich_report
    assert report.receipt is not None
    replace(report, receipt=None).save(tmp_path / "report.json")
    plan.save(tmp_path / "plan.json")
    # As `quant export` writes it: with more in the file than a report shows.
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps({**report.receipt.to_dict(), "plan": plan.digest(), "engine": {"bytes": 1}}))
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--receipt", str(file)])
    assert done.exit_code == 0, done.output
    assert Report.load(tmp_path / "report.json") == report
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_html(report, plan)
    before = (tmp_path / "report.json").read_bytes()
    for change, message in (
        ({"plan": "00"}, "the receipt of another plan"),
        ({"layers": [{**report.receipt.to_dict()["layers"][0], "name": "x"}]}, "the receipt of another plan"),
        ({"layers": [{"name": "x"}]}, "not a receipt"),
    ):
        file.write_text(json.dumps({**report.receipt.to_dict(), **change}))
        done = CliRunner().invoke(main, ["report", str(tmp_path), "--receipt", str(file)])
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "report.json").read_bytes() == before
    missing = CliRunner().invoke(main, ["report", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "no report.json" in missing.stderr
