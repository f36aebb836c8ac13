"""The page is complete, escaped and offline, has the sections that its data allows, and names its command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import quant.report
from quant.cli.main import main
from quant.recipes.plan import Plan
from quant.report.charts import sizes
from quant.report.render import render_html
from quant.report.report import Receipt, Report

Rich = tuple[Report, Plan]
Make = Callable[..., Rich]
FOLDER = Path(quant.report.__path__[0])


class Page(HTMLParser):
    """Cells by table row, titles of sections, tags, ids, scripts, and everything that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: dict[str, list[str]] = {}
        self.headings: list[str] = []
        self.scripts: list[tuple[str, list[str]]] = []
        self.tags: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._into: list[str] | None = None  # where text belongs besides `text`
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("src", "href", "srcset", "action", "data") if name in given]
        if tag == "tr" and "id" in given:
            self.rows[given["id"]] = []
        elif tag == "td":
            self._into = self.rows[self.ids[-1]]
        elif tag == "script":
            self.scripts.append((given.get("type", ""), []))
            self._into = self.scripts[-1][1]
        elif tag == "h2" and self.tags[-1][0] == "section":
            self._into = self.headings
        if tag in ("td", "script", "h2") and self._into is not None:
            self._into.append("")
        self.tags.append((tag, given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "script", "h2"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data
        if self.tags and self.tags[-1][0] != "script":
            self.text += data

    @property
    def charts(self) -> list[dict[str, Any]]:
        return [json.loads(text, parse_constant=pytest.fail) for type, (text,) in self.scripts if type]

    @property
    def running(self) -> list[str]:
        return [text for type, (text,) in self.scripts if not type]


def test_page_is_complete_escaped_and_offline(make_report: Make) -> None:
    report, plan = make_report()
    html = render_html(report, plan)
    page = Page(html)
    names = {id: cells[0] for id, cells in page.rows.items()}
    assert [names[f"L{i}"] for i in range(len(report.layers))] == [layer.name for layer in report.layers]
    assert [page.rows[f"F{i}"] for i in range(2)] == [list(entry) for entry in report.files.items()]
    assert "<u>mind" not in html and "<i>" not in html
    assert len(set(page.ids)) == len(page.ids)
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for text in (
        report.command,
        report.plan_digest,
        *report.warnings,
        *report.notes,
        "mixed <i>",
        "23.15",
        "0.2206",
        "76.2%",
    ):
        assert text in page.text
    assert "quantize again" not in page.text  # the report's own command is the one to show
    # Three scripts run: two libraries exactly as they are shipped, and the page's own. No other text loads anything.
    libraries = [(FOLDER / "vendor" / name).read_text() for name in ("d3.min.js", "plot.umd.min.js")]
    assert page.running == [*libraries, (FOLDER / "report.js").read_text()]
    assert "default-src 'none'" in html
    for library in libraries:
        html = html.replace(library, "")
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)


def test_the_origin_of_a_plan_is_shown_in_words(make_report: Make) -> None:
    report, plan = make_report()
    origin = {
        "effort": {"level": 1, "solver": "mse", "asked": 2, "why": "no text"},
        "allocation": {"formats": ["nvfp4", "fp8"], "goal": {"bits": 5.4, "batch": 1}, "bits": 5.375651041666667},
    }
    text = Page(render_html(report, replace(plan, provenance=origin))).text
    assert "1 (mse) instead of 2: no text" in text
    assert "formats (nvfp4, fp8), goal (bits 5.4, batch 1), bits 5.37565" in text
    assert "{" not in text[text.index("Reproduce") :]


def test_sections_follow_from_the_data(rich_report: Rich) -> None:
    report, plan = rich_report
    page = Page(render_html(report, plan))
    assert page.headings == [
        "Size against loss",
        "Predicted and achieved",
        "Bytes by format",
        "Memory",
        "Sensitivity",
        "Error by layer",
        "Use it",
        "Export receipt",
        "Engine audit",
        "Plan: every layer, and why",
        "Reproduce",
    ]
    assert len(set(page.ids)) == len(page.ids)
    # Whatever can be pointed at names a row of a table.
    rows = [mark[-1] for drawn in page.charts for key in ("points", "parts", "cells") for mark in drawn.get(key, ())]
    assert len(rows) > 1000 and set(rows) <= page.rows.keys()
    assert [drawn["kind"] for drawn in page.charts] == [
        "dots",
        *["bars"] * 2,
        "heat",
        *["dots"] * 2,
    ]
    plain = replace(report, sensitivity=None, allocation=None, receipt=None, kv_cache=None, evaluation=None)
    page = Page(render_html(plain, plan))
    assert page.headings == ["Bytes by format", "Memory", "Error by layer", "Plan: every layer, and why", "Reproduce"]
    assert "not measured" in page.text
    empty = replace(plain, layers=[], versions={}, seconds={}, command="", plan_digest="", peak_rss_bytes=None)
    assert Page(render_html(empty, Plan(()))).headings == ["Bytes by format", "Plan: every layer, and why", "Reproduce"]


def test_why_errors_are_those_of_weights_is_told(make_report: Make) -> None:
    report, plan = make_report()
    report = replace(report, layers=[replace(layer, output_error=None) for layer in report.layers])
    assert report.evaluation is not None
    told = "since outputs are compared on tokens, unless merged scales or rotations change those of other layers"
    assert told in Page(render_html(report, plan)).text
    unmeasured = Page(render_html(replace(report, evaluation=None), plan)).text
    assert "since no evaluation text was given on which outputs could be compared" in unmeasured
    assert told not in unmeasured


def test_shares_of_the_bytes_are_a_hundred_percent(make_report: Make) -> None:
    """Files have headers besides, a fiftieth of a tiny model's."""
    report, plan = make_report()
    rows = sizes(replace(report, bytes_after=2 * report.bytes_after), plan).rows
    assert sum(float(cells[-1].rstrip("%")) for _, cells in rows) == pytest.approx(100, abs=0.3)


def test_names_are_escaped_everywhere(rich_report: Rich) -> None:
    report, plan = rich_report
    assert report.sensitivity is not None and report.receipt is not None and report.allocation is not None
    evil = '</script><script>alert("x")</script><!--'
    group = replace(report.sensitivity.groups[0], name=f"m.0.{evil}")
    changed = replace(
        report,
        model=evil,
        sensitivity=replace(report.sensitivity, groups=(group, *report.sensitivity.groups[1:]), unit=evil),
        receipt=Receipt((replace(report.receipt.layers[0], name=evil, passed=False),), (), False),
        allocation=replace(report.allocation, unit=evil, uniform=(replace(report.allocation.uniform[0], name=evil),)),
    )
    html = render_html(changed, plan)
    page = Page(html)
    assert evil not in html and "alert(" not in "".join(page.running)
    assert len(page.scripts) == len(Page(render_html(report, plan)).scripts)
    assert page.text.count(evil) >= 8
    assert page.charts[0]["labels"][0][2] == evil and evil in page.charts[0]["y"]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_deviation_without_a_number_stands_at_the_top(rich_report: Rich, value: float) -> None:
    report, plan = rich_report
    assert report.receipt is not None
    broken = Receipt((replace(report.receipt.layers[0], onnx=value, passed=False),), (), False)
    drawn = Page(render_html(replace(report, receipt=broken), plan)).charts
    assert [point[1] for point in drawn[-1]["points"]] == [1e-7, 0.0, "top"]


def test_own_reasons_stand_in_the_rows(rich_report: Rich) -> None:
    report, plan = rich_report
    page = Page(render_html(report, plan))
    index, layer = next((i, m) for i, m in enumerate(report.layers) if m.format)
    assert page.rows[f"L{index}"][-1] == layer.reason
    kept = next(i for i, m in enumerate(report.layers) if not m.format and "_proj" in m.name)
    assert page.rows[f"L{kept}"][-1].startswith("keep: ")
    # One part for each format, one for what was scored and kept, and one for each reason of all others.
    others = {layer.reason for layer in report.layers if plan.by_name[layer.name].score is None}
    assert page.tags.count(("details", "plan")) == 3 + len(others)


def luminance(colour: str) -> float:
    """WCAG relative luminance of #rrggbb."""
    channels = [int(n, 16) / 255 for n in re.findall("[0-9a-f]{2}", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


def test_colours_can_be_told_from_the_card() -> None:
    """WCAG: 3:1 for graphics, 4.5:1 for text, in both schemes."""
    schemes = re.findall(r":root \{(.*?)\}", (FOLDER / "report.css").read_text(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+):(#\w+)", scheme))
        colours = {k: v if len(v) == 7 else "#" + "".join(2 * c for c in v[1:]) for k, v in colours.items()}
        marks = [colours[f"c{i}"] for i in range(7)]
        assert len(set(marks)) == 7
        assert all(contrast(colour, colours["card"]) >= 3 for colour in [*marks, colours["kept"]])
        texts = [(text, ground) for text in ("ink", "soft", "link") for ground in ("card", "bg")]
        assert all(contrast(colours[text], colours[ground]) >= 4.5 for text, ground in [*texts, ("ink", "warn")])


def test_the_command_takes_a_receipt_up(rich_report: Rich, tmp_path: Path) -> None:
    report, plan = rich_report
    assert report.receipt is not None
    replace(report, receipt=None).save(tmp_path / "report.json")
    plan.save(tmp_path / "plan.json")
    # As `quant export` writes it: with more in the file than a report shows.
    file = tmp_path / "receipt.json"
    written: dict[str, Any] = {**report.receipt.to_dict(), "plan": plan.digest(), "engine": {"bytes": 1}}
    file.write_text(json.dumps(written))
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
