"""Headless Chromium shows the report: sizes, colours and hovering are as the browser has them.

The page sits in a frame, because browsers refuse windows as narrow as a phone. A script in it measures, and leaves
what it found in the page around it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from quant.calibration.allocation.goal import Uniform
from quant.recipes.plan import Plan
from quant.report.render import render_html
from quant.report.report import Report

Rich = tuple[Report, Plan]

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# What every probe uses; `measure` is the test's own and fills `seen`.
PROBE = """<script>
const errors = [];
addEventListener('error', e => errors.push(e.message));
addEventListener('securitypolicyviolation', e => errors.push(e.violatedDirective + ' ' + e.blockedURI));
addEventListener('load', () => setTimeout(() => {
  const tip = document.getElementById('tip'), seen = {};
  const box = e => { const b = e.getBoundingClientRect(); return {left: b.left, right: b.right, top: b.top,
    bottom: b.bottom, x: (b.left + b.right) / 2, y: (b.top + b.bottom) / 2, width: b.width, height: b.height}; };
  const style = e => getComputedStyle(e), all = (selector, e = document) => [...e.querySelectorAll(selector)];
  const section = title => all('section').find(s => s.querySelector('h2').textContent === title);
  const plot = title => section(title).querySelector('svg.plot');
  const at = (e, x, y, type = 'pointermove') => e.dispatchEvent(new PointerEvent(type,
    {bubbles: true, clientX: x, clientY: y, pointerType: 'mouse'}));
  const said = () => tip.hidden ? null : [tip.querySelector('b').textContent, tip.querySelector('span').textContent];
  // Labels of an axis: their values, and where they stand.
  const axis = (svg, name) => all(`[aria-label="${name}-axis tick label"] text`, svg).filter(t => t.textContent)
    .map(t => [box(t)[name], +t.textContent.replace('\\u2212', '-')]);
  // The points of a dot plot stand where their symbols are moved to.
  const dots = svg => all('[aria-label=dot]', svg)[0] ? all('path', all('[aria-label=dot]', svg)[0]).map(p => {
    const m = p.getScreenCTM(); return [m.e, m.f]; }) : [];
  MEASURE
  seen.width = innerWidth; seen.errors = errors;
  seen.requests = performance.getEntriesByType('resource').length;
  seen.dark = matchMedia('(prefers-color-scheme: dark)').matches;
  parent.document.body.dataset.probe = JSON.stringify(seen);
}, 30));
</script>"""


def look(html: str, measure: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What `measure` finds in `html` at that width, in that colour scheme."""
    assert CHROMIUM is not None
    page = html.replace("<style>", PROBE.replace("MEASURE", measure) + "<style>", 1)
    frame = f'<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{escape(page)}"></iframe>'
    path = folder / "frame.html"
    path.write_text(f'<!doctype html><meta name="color-scheme" content="light dark"><body>{frame}', encoding="utf-8")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags = [*quiet.split(), "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    # A headless browser has no pointer that hovers, unless told so.
    settings = f"--blink-settings=preferredColorScheme={0 if dark else 1},primaryHoverType=2,availableHoverTypes=2"
    command = [CHROMIUM, *flags, settings, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found.group(1)))
    assert (seen["errors"], seen["requests"], seen["dark"], seen["width"]) == ([], 0, dark, width)
    return seen


def read(pixel: float, axis: Sequence[tuple[float, float]], *, log: bool = False) -> float:
    """The value at a place, by the two outermost labels of its axis alone."""
    (p0, v0), (p1, v1) = axis[0], axis[-1]
    if log:
        v0, v1 = math.log(v0), math.log(v1)
    value = v0 + (pixel - p0) / (p1 - p0) * (v1 - v0)
    return math.exp(value) if log else value


def channels(colour: str) -> list[float]:
    """Linear red, green and blue of a computed rgb()."""
    numbers = [float(n) / 255 for n in re.findall(r"\d*\.?\d+", colour)][:3]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in numbers]


def luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels(colour), strict=True))


def contrast(pair: str) -> float:
    """WCAG contrast of "foreground|background"."""
    dim, bright = sorted(map(luminance, pair.split("|")))
    return (bright + 0.05) / (dim + 0.05)


VALUES = """
  for (const title of ['Size against loss', 'Error by layer', 'Export receipt']) {
    const svg = plot(title);
    seen[title] = {x: axis(svg, 'x'), y: axis(svg, 'y'), dots: dots(svg)};
  }
  const memory = section('Memory');
  seen.parts = all('[aria-label=bar] rect', memory).map(box);
  seen.sizes = all('[aria-label=bar] rect', section('Bytes by format')).map(box);
  const [first] = all('svg.plot', section('Sensitivity')), groups = all('[aria-label=cell]', first);
  seen.cells = all('rect', groups[0]).map(c => ({...box(c), colour: style(c).fill}));
  seen.rings = all('rect', groups[1]).map(box);
"""


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desktop-light", "phone-dark"])
def test_marks_are_where_the_values_are(rich_report: Rich, tmp_path: Path, width: int, dark: bool) -> None:
    """Pixels, read against the labels of the axes in pixels, give the values back."""
    report, plan = rich_report
    table, record, receipt = report.sensitivity, report.allocation, report.receipt
    assert table is not None and record is not None and receipt is not None
    seen = look(render_html(report, plan), VALUES, tmp_path, width, dark)

    found = seen["Size against loss"]
    losses = [(p.bits, p.kl_predicted) for p in record.curve]
    losses += [(p.bits, p.kl_measured) for p in record.curve if p.kl_measured is not None]
    losses += [(u.bits, u.kl) for u in record.uniform] + [(record.chosen.bits, record.chosen.kl_measured)]
    assert len(found["dots"]) == len(losses)
    for (x, y), (bits, loss) in zip(found["dots"], losses, strict=True):
        assert read(x, found["x"]) == pytest.approx(bits, abs=0.02)
        assert read(y, found["y"], log=True) == pytest.approx(loss, rel=0.04)

    found = seen["Error by layer"]
    shown = [layer for layer in report.layers if layer.format or len(layer.shape) > 1]
    assert len(found["dots"]) == len(shown)
    bottom = max(y for _, y in found["dots"])
    for (_, y), layer in zip(found["dots"], shown, strict=True):
        # 16 bit stands below everything that was measured.
        if layer.relative_error is None:
            assert y == bottom
        else:
            assert read(y, found["y"], log=True) == pytest.approx(layer.relative_error, rel=0.02) and y < bottom

    found = seen["Export receipt"]
    deviations = [value for m in receipt.layers for value in (m.fake_quant, m.checkpoint, m.onnx) if value is not None]
    bottom = max(y for _, y in found["dots"])
    for (_, y), value in zip(found["dots"], deviations, strict=True):
        if value:
            assert read(y, found["y"], log=True) == pytest.approx(value, rel=0.2) and y < bottom
        else:
            assert y == bottom

    # Widths of the bars are the bytes. Bars of sizes share one scale; both bars of memory are as long.
    sizes = [bar["width"] for bar in seen["sizes"]]
    assert sum(sizes[1::2]) / sum(sizes[::2]) == pytest.approx(report.bytes_after / report.bytes_before, abs=0.02)
    widths = [part["width"] for part in seen["parts"]]
    assert sum(widths[:4]) == pytest.approx(sum(widths[4:]), abs=4)
    assert report.kv_cache is not None
    assert widths[4] / sum(widths[4:]) == pytest.approx(plan.nbytes / (plan.nbytes + report.kv_cache.nbytes), abs=0.01)

    # Cells can be pointed at, their luminance follows the score, and rings are around what the plan chose.
    cells = seen["cells"]
    assert len(cells) == len(table.groups)
    assert min(cell["width"] for cell in cells) > 6 and min(cell["height"] for cell in cells) > 14
    nvfp4 = [group.scores["nvfp4"] for group in table.groups]
    ranked = [luminance(cell["colour"]) for _, cell in sorted(zip(nvfp4, cells, strict=True), key=lambda pair: pair[0])]
    assert ranked == sorted(ranked, reverse=not dark)
    chosen = [
        (round(cell["x"]), round(cell["y"]))
        for cell, group in zip(cells, table.groups, strict=True)
        if (weight := plan.by_name[group.layers[0]].weight) is not None and weight.name == "nvfp4"
    ]
    assert [(round(ring["x"]), round(ring["y"])) for ring in seen["rings"]] == chosen


HOVER = """
  const tips = seen.tips = [];
  const hover = (e, x, y, inside = true) => { at(e, x, y); const t = box(tip);
    tips.push([said(), !tip.hidden && t.left >= 0 && t.right <= innerWidth]); };
  const errorsPlot = plot('Error by layer');
  seen.layers = dots(errorsPlot).map(([x, y]) => { at(errorsPlot, x, y); return said()?.[0]; });
  const cell = all('[aria-label=cell] rect', section('Sensitivity'))[3];
  hover(cell, box(cell).x, box(cell).y);
  const part = all('[aria-label=bar] rect', section('Memory')).pop();
  hover(part, box(part).x, box(part).y);
  const pareto = plot('Size against loss'), [x, y] = dots(pareto).pop();
  hover(pareto, x, y);
  at(section('Size against loss').querySelector('.chart'), 0, 0, 'pointerleave');
  seen.left = tip.hidden;
  const [x1, y1] = dots(errorsPlot)[5];
  at(errorsPlot, x1, y1, 'pointerdown');
  at(errorsPlot, x1, y1);
  errorsPlot.dispatchEvent(new MouseEvent('click', {bubbles: true}));
  seen.found = all('tr.found').map(row => [row.cells[0].textContent, !!row.offsetParent]);
  section('Error by layer').querySelector('a').click();
  seen.worst = all('tr.found').map(row => [row.cells[0].textContent, !!row.offsetParent]);
  const filter = document.getElementById('filter');
  filter.value = 'LAYERS.7.'; filter.dispatchEvent(new Event('input'));
  const rows = all('details.plan tbody tr').filter(row => row.offsetParent);
  seen.filtered = rows.map(row => row.cells[0].textContent);
  filter.value = ''; filter.dispatchEvent(new Event('input'));
  seen.unfiltered = all('details.plan').every(group => !group.hidden);
"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_hovering_reads_the_rows(rich_report: Rich, tmp_path: Path, width: int) -> None:
    report, plan = rich_report
    table, record = report.sensitivity, report.allocation
    assert table is not None and record is not None and report.kv_cache is not None
    seen = look(render_html(report, plan), HOVER, tmp_path, width, False)
    shown = [layer.name for layer in report.layers if layer.format or len(layer.shape) > 1]
    if width > 1000:  # on a phone, marks of neighbours cover each other
        assert seen["layers"] == shown
    assert set(seen["layers"]) <= set(shown)
    (cell, part, chosen), inside = zip(*seen["tips"], strict=True)
    assert cell[0] == table.groups[3].name and f"nvfp4 {table.groups[3].scores['nvfp4']:.4g}" in cell[1]
    assert part[0].startswith("KV cache") and f"bytes {report.kv_cache.nbytes:,}" in part[1]
    assert chosen[0] == "chosen" and f"bits {record.chosen.bits:.3f}" in chosen[1]
    assert all(inside) and seen["left"]
    # A click and a link lead to the row and unfold its table.
    assert seen["found"] == [[seen["layers"][5], True]]
    worst = max((layer for layer in report.layers if layer.format), key=lambda layer: layer.relative_error or 0)
    assert seen["worst"] == [[worst.name, True]]
    assert sorted(seen["filtered"]) == sorted(layer.name for layer in report.layers if "layers.7." in layer.name)
    assert seen["unfiltered"]


SORT = """
  const tables = all('details.plan table'), names = ['SNR', 'bytes', 'shape', 'layer'];
  const order = table => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const press = name => { const heads = all('th', tables[0]);
    heads.find(head => head.textContent === name).querySelector('button').click(); };
  seen.before = tables.map(order);
  seen.sorted = {};
  for (const name of names) {
    press(name);
    const descending = tables.map(order);
    press(name);
    seen.sorted[name] = [descending, tables.map(order)];
    seen.marked = all('th[aria-sort=ascending]', tables[0]).map(head => head.textContent);
    press(name);
  }
  seen.after = tables.map(order);
"""


@needs_chromium
def test_headings_sort_all_tables_of_layers_by_value(make_report: Callable[..., Rich], tmp_path: Path) -> None:
    """One click puts the largest value first, the second the smallest, the third the order of the model."""
    report, plan = make_report(names=60)
    seen = look(render_html(report, plan), SORT, tmp_path, 1280, False)
    layers = {layer.name: layer for layer in report.layers}
    keys: dict[str, Callable[[str], Any]] = {
        "SNR": lambda name: round(layers[name].snr_db or math.inf, 2),  # as the page has it
        "bytes": lambda name: layers[name].nbytes,
        "shape": lambda name: math.prod(layers[name].shape),
        "layer": lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)],
    }
    assert seen["after"] == seen["before"] and len(seen["before"]) > 3 and seen["marked"] == ["layer"]
    for name, (descending, ascending) in seen["sorted"].items():
        for before, down, up in zip(seen["before"], descending, ascending, strict=True):
            if name == "SNR" and all(layers[each].format is None for each in before):
                assert down == up == before  # no such column
                continue
            values = [[keys[name](each) for each in each_order] for each_order in (down, up)]
            if name == "bytes":  # three digits are on the page
                values = [[float(f"{value:.3g}") for value in part] for part in values]
            assert values[0] == sorted(values[0], reverse=True) and values[1] == sorted(values[1]), (name, down)
            assert sorted(down) == sorted(up) == sorted(before)


LAYOUT = """
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  const widths = () => all('.chart').map(place =>
    [box(place).width, ...all('svg.plot', place).map(svg => svg.width.baseVal.value)]);
  seen.plots = widths();
  seen.scroll = document.documentElement.scrollWidth;
  seen.wide = all('section > *, section > details > *').filter(e =>
    box(e).right > innerWidth + 1 && style(e).position !== 'absolute').map(e => e.outerHTML.slice(0, 80));
  seen.outside = all('svg.plot text').filter(t => box(t).left < 0 || box(t).right > innerWidth).map(t => t.textContent);
  const apart = texts => texts.every((a, i) => texts.slice(0, i).every(b =>
    a.left > b.right || b.left > a.right || a.top > b.bottom || b.top > a.bottom));
  seen.apart = all('svg.plot').flatMap(svg => ['x-axis tick label', 'y-axis tick label', 'text'].map(name =>
    apart(all(`[aria-label="${name}"] text`, svg).filter(t => t.textContent).map(box))));
  const written = '.verdict, .soft, td, th, .axis, .chart h3, .tile p, .tile h2, dt, dd, a, .kicker, .warning, summary';
  seen.texts = [...new Set(all(written).map(e => style(e).color + '|' +
    style(e.closest('section, .tile, .warning, body')).backgroundColor))];
  seen.labels = [...new Set(all('svg.plot text, .plot-swatches').map(t => (t.matches('text') ? style(t).fill :
    style(t).color) + '|' + style(t.closest('section')).backgroundColor))];
  seen.fills = [...new Set(all('[aria-label=dot] path, [aria-label=bar] rect, .key').map(e =>
    style(e)[e.matches('.key') ? 'backgroundColor' : 'fill'] + '|' + style(e.closest('section')).backgroundColor))];
  seen.body = style(document.body).color + '|' + style(document.body).backgroundColor;
  const frame = parent.document.querySelector('iframe');
  // Under virtual time a browser may not get round to this event by itself.
  frame.style.width = '700px';
  dispatchEvent(new Event('resize'));
  seen.resized = widths();
  seen.narrow = document.documentElement.scrollWidth;
  frame.style.width = WIDTH;
"""


@needs_chromium
@pytest.mark.parametrize(
    ("width", "dark", "rich"),
    [
        (1280, False, True),
        (1280, True, True),
        (390, False, True),
        (390, True, True),
        (1280, True, False),
        (390, False, False),
    ],
    ids=["desktop-light", "desktop-dark", "phone-light", "phone-dark", "plain-desktop-dark", "plain-phone-light"],
)
def test_nothing_sticks_out_or_overlaps(
    rich_report: Rich, make_report: Callable[..., Rich], tmp_path: Path, width: int, dark: bool, rich: bool
) -> None:
    """Every table is unfolded; text and marks can be told from their ground; charts follow the width of the window."""
    report, plan = rich_report if rich else make_report(names=60)
    if report.allocation is not None:  # names of close points
        uniform = (Uniform("fp8", 8.0, 0.03), Uniform("mxfp8", 8.25, 0.031), Uniform("fp6", 6.25, 0.12))
        report = replace(report, allocation=replace(report.allocation, uniform=uniform))
    seen = look(render_html(report, plan), LAYOUT.replace("WIDTH", f"'{width}px'"), tmp_path, width, dark)
    assert seen["scroll"] <= width and seen["narrow"] <= 700 and seen["wide"] == [] and seen["outside"] == []
    assert all(seen["apart"]), seen["apart"]
    for place, *plots in [*seen["plots"], *seen["resized"]]:
        assert plots and all(plot == pytest.approx(place, abs=1) for plot in plots)
    assert seen["plots"][0][0] != seen["resized"][0][0]
    texts = [*seen["texts"], *seen["labels"]]
    assert len(texts) > 4 and all(contrast(pair) >= 4.5 for pair in texts), texts
    assert len(seen["fills"]) >= (7 if rich else 4) and all(contrast(pair) >= 3 for pair in seen["fills"]), seen[
        "fills"
    ]
    ink, ground = seen["body"].split("|")
    assert contrast(seen["body"]) >= 7 and (luminance(ground) < luminance(ink)) is dark
