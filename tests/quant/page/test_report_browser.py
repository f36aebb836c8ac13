"""The report in headless Chromium: sizes, colours and hovering as the browser has them, not as the HTML says.

The page sits in a frame, because browsers refuse windows as narrow as a phone. A script in it measures, and leaves
what it found in the page around it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from quant.recipes.plan import Plan
from quant.report import Report, render_html

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

PROBE = """<script>
const errors = []; addEventListener('error', e => errors.push(e.message));
addEventListener('load', () => setTimeout(() => {
  const tip = document.getElementById('tip'), seen = {};
  const box = e => e.getBoundingClientRect(), style = e => getComputedStyle(e);
  const section = title => [...document.querySelectorAll('section')].find(s => s.firstChild.textContent === title);
  const canvas = title => section(title).querySelector('.canvas');
  const at = (target, x, y, type = 'pointermove') =>
    target.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: x, clientY: y}));
  const said = () => tip.hidden ? null : [tip.querySelector('b').textContent, tip.querySelector('span').textContent];

  const falls = canvas('Where the loss comes from'), frame = box(falls);
  seen.bars = [...falls.querySelectorAll('rect[data-i]')].map(r => ({row: r.dataset.i, value: +r.dataset.value,
    top: (box(r).top - frame.top) / frame.height, bottom: (box(r).bottom - frame.top) / frame.height,
    left: (box(r).left - frame.left) / frame.width, right: (box(r).right - frame.left) / frame.width}));
  seen.ticks = [...falls.closest('.plot').querySelectorAll('.yaxis span')].map(s =>
    [(box(s).top + box(s).bottom) / 2 - frame.top, +s.textContent].map((v, i) => i ? v : v / frame.height));

  const cells = [...document.querySelectorAll('.heat i')];
  seen.cells = cells.map(c => ({row: c.dataset.i, value: +c.dataset.value, chosen: c.className,
    width: box(c).width, height: box(c).height, colour: style(c).backgroundColor, ring: style(c).boxShadow}));
  seen.parts = [...document.querySelectorAll('.parts')].map(bar => [...bar.children].map(i =>
    [i.dataset.i, +i.dataset.value, box(i).width / box(bar).width]));

  at(cells[3], box(cells[3]).left + 2, box(cells[3]).top + 2);
  seen.cellTip = said();
  const target = [...falls.querySelectorAll('rect[data-i]')].pop();
  at(falls, (box(target).left + box(target).right) / 2, frame.bottom - 3);
  seen.barTip = said();
  const t = box(tip); seen.tipInside = t.left >= 0 && t.right <= innerWidth;
  at(falls.parentElement, 0, 0, 'pointerleave');
  seen.left = tip.hidden;
  const pareto = canvas('Size against loss'), chosen = pareto.querySelector('[data-i=PX]'), p = box(pareto);
  at(pareto, p.left + chosen.dataset.x * p.width, p.top + chosen.dataset.y * p.height);
  seen.paretoTip = said();
  at(pareto.parentElement, 0, 0, 'pointerleave');
  seen.outside = [...document.querySelectorAll('.canvas text')].filter(e =>
    box(e).left < 0 || box(e).right > innerWidth).map(e => e.textContent);
  seen.labels = [...document.querySelectorAll('.xaxis')].some(axis => {
    const spans = [...axis.children].map(box).sort((a, b) => a.left - b.left);
    return spans.some((b, i) => i && b.left < spans[i - 1].right + 1);
  });

  document.querySelectorAll('details').forEach(d => { d.open = true; });
  seen.width = innerWidth; seen.scroll = document.documentElement.scrollWidth;
  seen.wide = [...document.querySelectorAll('section > *, section > details > *')].filter(e =>
    box(e).right > innerWidth + 1 && style(e).position !== 'absolute').map(e => e.outerHTML.slice(0, 80));
  const written = '.verdict, .reason, .why, .values td, .values th, .axis, h3 small, .tile p';
  seen.texts = [...document.querySelectorAll(written)]
    .slice(0, 4000).map(e => style(e).color + '|' + style(e.closest('section, .tile')).backgroundColor);
  seen.texts = [...new Set(seen.texts)];
  seen.fills = [...new Set([...document.querySelectorAll('.canvas use, .canvas rect[data-i], .parts i, .key')].map(e =>
    (e.matches('use') ? style(e).fill : e.matches('rect') ? style(e).fill : style(e).backgroundColor) + '|' +
    style(e.closest('section')).backgroundColor))];
  const filter = document.getElementById('filter');
  filter.value = 'layers.7.'; filter.dispatchEvent(new Event('input'));
  seen.found = [...document.querySelectorAll('details.plan tbody tr')].filter(r => r.offsetParent).length;
  seen.tables = [...document.querySelectorAll('details.data tbody tr')].filter(r => r.offsetParent).length;
  seen.errors = errors;
  seen.dark = matchMedia('(prefers-color-scheme: dark)').matches;
  parent.document.body.dataset.probe = JSON.stringify(seen);
}, 30));
</script>"""


def look(html: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What the probe finds in `html` at that width, in that colour scheme."""
    assert CHROMIUM is not None
    page = html.replace("<style>", f"{PROBE}<style>", 1)
    frame = f'<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{escape(page)}"></iframe>'
    path = folder / "frame.html"
    path.write_text(f'<!doctype html><meta name="color-scheme" content="light dark"><body>{frame}', encoding="utf-8")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags = [*quiet.split(), "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *flags, scheme, "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found.group(1)))
    return seen


def channels(colour: str) -> list[float]:
    """Linear red, green and blue of a computed colour: rgb(), or the oklab() that color-mix gives."""
    numbers = [float(n) for n in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", colour)][:3]
    if colour.startswith("oklab"):
        lightness, a, b = numbers
        l_, m_, s_ = (
            (lightness + x * a + y * b) ** 3
            for x, y in ((0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728), (-0.0894841775, -1.291485548))
        )
        return [
            4.0767416621 * l_ - 3.3077115913 * m_ + 0.2309699292 * s_,
            -1.2684380046 * l_ + 2.6097574011 * m_ - 0.3413193965 * s_,
            -0.0041960863 * l_ - 0.7034186147 * m_ + 1.707614701 * s_,
        ]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in numbers)]


def luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels(colour), strict=True))


def contrast(pair: str) -> float:
    """WCAG contrast of "foreground|background"."""
    dim, bright = sorted(map(luminance, pair.split("|")))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_charts_in_a_browser(rich_report: tuple[Report, Plan], tmp_path: Path, width: int, dark: bool) -> None:
    report, plan = rich_report
    table, record = report.sensitivity, report.allocation
    assert table is not None and record is not None
    seen = look(render_html(report, plan), tmp_path, width, dark)
    assert (seen["errors"], seen["dark"], seen["width"]) == ([], dark, width)

    # The bars of the waterfall, in pixels against the axis labels in pixels, are the scores.
    (y0, v0), (y1, v1) = seen["ticks"][0], seen["ticks"][-1]
    scores = {
        f"W{i}": group.scores[weight.name]
        for i, group in enumerate(table.groups)
        if (weight := plan.by_name[group.layers[0]].weight) is not None
    }
    scores |= {"WX0": sum(scores.values()), "WX1": record.chosen.kl_measured}
    assert {bar["row"] for bar in seen["bars"]} == scores.keys()
    pixel = (v1 - v0) / (y1 - y0) / 240  # no canvas is lower than 240 px
    for bar in seen["bars"]:
        height = (bar["bottom"] - bar["top"]) * (v0 - v1) / (y1 - y0)
        assert bar["value"] == pytest.approx(scores[bar["row"]], rel=1e-5)
        assert height == pytest.approx(scores[bar["row"]], abs=abs(pixel))
        assert 0 <= bar["left"] < bar["right"] <= 1.001

    # Cells are large enough to point at, their luminance follows the score, and chosen ones have a ring.
    assert len(seen["cells"]) == 2 * len(table.groups)
    assert min(cell["width"] for cell in seen["cells"]) > 6 and min(cell["height"] for cell in seen["cells"]) > 14
    ranked = [luminance(cell["colour"]) for cell in sorted(seen["cells"], key=lambda cell: cell["value"])]
    assert ranked == sorted(ranked, reverse=not dark)
    assert contrast(f"{'|'.join(c['colour'] for c in (seen['cells'][0], seen['cells'][-2]))}") > 2
    for cell in seen["cells"]:
        assert (cell["ring"] != "none") is (cell["chosen"].split(" ")[0] == "chosen")

    # Memory: widths on the screen are the bytes.
    for bar in seen["parts"]:
        total = sum(size for _, size, _ in bar)
        for _, size, share in bar:
            assert share == pytest.approx(size / total, abs=0.012)
    assert sum(size for _, size, _ in seen["parts"][0]) == plan.nbytes

    # Hovering reads the rows.
    assert seen["cellTip"][0] == table.groups[3].name
    assert f"nvfp4 {table.groups[3].scores['nvfp4']:.4g}" in seen["cellTip"][1]
    assert seen["barTip"][0] == "measured together" and f"{record.chosen.kl_measured:.4g}" in seen["barTip"][1]
    assert seen["paretoTip"][0] == "chosen" and f"bits {record.chosen.bits:.3f}" in seen["paretoTip"][1]
    assert seen["tipInside"] and seen["left"]

    # Nothing sticks out or overlaps, with every table unfolded; text and marks can be told from their ground.
    assert seen["scroll"] <= width and seen["wide"] == [] and seen["outside"] == []
    assert not seen["labels"]
    assert all(contrast(pair) >= 4.5 for pair in seen["texts"]), seen["texts"]
    assert len(seen["fills"]) >= 7 and all(contrast(pair) >= 3 for pair in seen["fills"]), seen["fills"]

    # The filter works on the plan and leaves the charts' tables alone.
    assert seen["found"] == sum("layers.7." in layer.name for layer in report.layers)
    assert seen["tables"] >= len(table.groups)
    assert math.isfinite(luminance(seen["cells"][0]["colour"]))
