"""The report: errors against float64, the JSON round trip, and the page in a parser and in a real browser."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quant import layer_result as result_module
from quant.errors import megabytes
from quant.evaluation import Evaluation
from quant.formats.format import FORMATS, get_format
from quant.formats.tensor import quantize
from quant.layer_result import LayerResult, layer_result
from quant.recipes.plan import LayerPlan, Plan
from quant.report import Report, peak_rss, print_summary, render_html

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
EVIL = 'model.layers.0.<script>alert("x")</script>&amp;'


def make(names: int = 24, formats: tuple[str, ...] = ("nvfp4", "mxfp8", "fp8_channel")) -> tuple[Report, Plan]:
    """A report over real quantizations of small random weights."""
    generator = torch.Generator().manual_seed(0)
    layers = [LayerPlan("model.embed_tokens", "embedding", (64, 32), reason="embeddings are looked up")]
    for i in range(names):
        weight = get_format(formats[i % len(formats)]) if formats else None
        name = f"model.layers.{i // 2}.mlp.{'up' if i % 2 else 'down'}_proj" if i else EVIL
        layers.append(LayerPlan(name, "linear", (48, 64), weight, reason='it\'s <b>"cheap"</b>'))
        layers.append(LayerPlan(f"model.layers.{i}.norm", "norm", (64,), reason="norms have no matmul"))
    layers.append(LayerPlan("lm_head", "head", (64, 32), reason="tied", tied_to="model.embed_tokens"))
    plan = Plan(tuple(layers), provenance={"recipe": "mixed <i>", "seed": 0, "command": "quantize again"})
    results = []
    for layer in layers:
        weight = torch.randn(layer.shape, generator=generator)
        results.append(layer_result(layer, weight, quantize(weight, layer.weight) if layer.weight else None))
    report = Report(
        model="tiny <model>",
        layers=results,
        bytes_before=sum(2 * layer.numel for layer in layers if layer.tied_to is None),
        bytes_after=plan.nbytes,
        effective_bits=plan.effective_bits,
        evaluation=Evaluation(23.1516, 0.2206, 0.762, 8176, 61.3, 18.683),
        plan_digest=plan.digest(),
        command="quantize tiny --format nvfp4 --include '<b>*' && true",
        versions={"torch": "2.13.0"},
        seconds={"quantize": 3.2},
        peak_rss_bytes=1_466_000_000,
        files={"model-00001-of-00002.safetensors": "a3" * 32, "config<1>.json": "7b" * 32},
        warnings=["<u>mind</u> the gap"],
    )
    return report, plan


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(130, 96), (3, 40, 128), (2, 16)])
@pytest.mark.parametrize("chunk", [1, 128 * 100, 1 << 20])
def test_errors_match_float64(name: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any length, partial blocks and experts: the same as on whole tensors in float64."""
    monkeypatch.setattr(result_module, "_CHUNK_ELEMENTS", chunk)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize(weight, get_format(name))
    plan_layer = LayerPlan("layer", "linear", shape, get_format(name), get_format("fp8_token"), "mse", "why")
    w, rounded = weight.double(), quantized.dequantize().double()
    noise = (w - rounded).square().sum().item()
    result = layer_result(plan_layer, weight, quantized)
    assert noise > 0
    assert result.snr_db == pytest.approx(10 * math.log10(w.square().sum().item() / noise), abs=1e-9)
    assert result.relative_error == pytest.approx((w - rounded).norm().item() / w.norm().item(), rel=1e-9)
    assert result.relative_error == pytest.approx(10 ** (-(result.snr_db or 0) / 20), rel=1e-9)
    assert (result.format, result.activation, result.solver, result.reason) == (name, "fp8_token", "mse", "why")
    assert result.nbytes == quantized.nbytes
    assert result.bits == 8 * quantized.nbytes / math.prod(shape)


def test_no_error_to_speak_of() -> None:
    exact = torch.tensor([[6.0, -3.0, 0.5, 0.0] * 4])
    layer = LayerPlan("layer", "linear", (1, 16), get_format("nvfp4"))
    result = layer_result(layer, exact, quantize(exact, get_format("nvfp4")))
    assert (result.snr_db, result.relative_error) == (None, 0.0)
    zero = torch.zeros(1, 16)
    result = layer_result(layer, zero, quantize(zero, get_format("nvfp4")))
    assert (result.snr_db, result.relative_error) == (None, 0.0)
    kept = layer_result(LayerPlan("norm", "norm", (64,), reason="why"), torch.ones(64), None)
    assert kept == LayerResult("norm", None, None, (64,), 16.0, 128, None, None, None, "why")
    with pytest.raises(ValueError, match=r"layer: weight \[2, 8\] and its quantized form \[1, 16\] differ"):
        layer_result(layer, torch.zeros(2, 8), quantize(zero, get_format("nvfp4")))


def test_round_trip(tmp_path: Path) -> None:
    for report in (make()[0], dataclasses.replace(make()[0], evaluation=None, peak_rss_bytes=None)):
        report.save(tmp_path / "report.json")
        text = (tmp_path / "report.json").read_text(encoding="utf-8")
        assert Report.load(tmp_path / "report.json") == report
        assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["schema_version"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "report schema_version is 2; this release reads 1"),
        ({"extra": 1}, "'extra'"),
        ({"layers": [{"name": "x"}]}, "shape"),
        ({"evaluation": {"perplexity": 1}}, "evaluation: .*missing"),
    ],
)
def test_bad_reports_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**make()[0].to_dict(), **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"report\.json: not a valid report: .*{message}"):
        Report.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not a valid report"):
        Report.load(path)


class Page(HTMLParser):
    """Texts by class of table cell, tags, ids, and everything that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.names: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "background"):
                self.links.append(value or "")
        if tag == "td":
            self.open.append((tag, dict(attrs).get("class") or ""))
            if self.open[-1][1] == "name":
                self.names.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1][1] == "name":
            self.names[-1] += data


def test_page_is_complete_escaped_and_offline() -> None:
    report, plan = make()
    html = render_html(report, plan)
    page = Page(html)
    assert sorted(page.names) == sorted([*(layer.name for layer in report.layers), *report.files])
    assert page.tags.count("script") == 1
    assert "<u>mind" not in html
    assert "<i>" not in html
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)
    for text in (report.command, *report.files.values(), report.plan_digest, "mixed <i>", "23.15", "0.2206", "76.2%"):
        assert text in page.text
    assert "quantize again" not in page.text  # the report's own command is the one to show
    marks = re.findall(r'<use class="(\w+)" href="#mark-\w+" x="([\d.]+)%" y="([\d.]+)%" data-i="(\d+)"', html)
    drawn = [layer for layer in report.layers if layer.format or len(layer.shape) > 1]
    assert [report.layers[int(i)].name for *_, i in marks] == [layer.name for layer in drawn]


def test_marks_stand_where_the_values_are() -> None:
    """Heights of the marks read against the axis labels give the SNRs back."""
    report, plan = make()
    html = render_html(report, plan)
    axis = [
        (float(top), float(value)) for top, value in re.findall(r'<span style="top:([\d.]+)%">([-\d.]+)</span>', html)
    ]
    (top0, value0), (top1, value1) = axis[0], axis[-1]
    marks = re.findall(r'<use class="c\d" [^>]* y="([\d.]+)%" data-i="(\d+)"', html)
    assert len(marks) == 24
    for y, i in marks:
        value = value0 + (float(y) - top0) / (top1 - top0) * (value1 - value0)
        assert value == pytest.approx(report.layers[int(i)].snr_db, abs=0.01)


@pytest.mark.parametrize("formats", [(), ("nvfp4",), ("nvfp4", "mxfp8")])
def test_bars_add_up(formats: tuple[str, ...]) -> None:
    report, plan = make(formats=formats)
    html = render_html(dataclasses.replace(report, evaluation=None), plan)
    assert "not measured" in html
    before, after = (
        sum(float(width) for width in re.findall(r"width:([\d.]+)%", bar))
        for bar in re.findall(r"<div class=bar>(.*?)</div>", html)
    )
    assert before == pytest.approx(100, abs=0.01)
    assert after == pytest.approx(100 * report.bytes_after / report.bytes_before, abs=0.01)


# Runs in the page: hovers over every mark, filters, and says what it saw to the page around it.
PROBE = """<script>
const errors = []; addEventListener('error', e => errors.push(e.message));
addEventListener('load', () => setTimeout(() => {
  const field = document.querySelector('.field'), box = document.querySelector('.canvas').getBoundingClientRect();
  const tip = document.getElementById('tip'), hovered = [];
  let inside = true, astray = 0;
  for (const mark of document.querySelectorAll('.canvas use')) {
    field.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,
      clientX: box.left + mark.dataset.x * box.width, clientY: box.top + mark.dataset.y * box.height}));
    const m = mark.getBoundingClientRect();
    astray = Math.max(astray, Math.abs((m.left + m.right) / 2 - box.left - mark.dataset.x * box.width),
      Math.abs((m.top + m.bottom) / 2 - box.top - mark.dataset.y * box.height));
    hovered.push(tip.hidden ? null : tip.querySelector('b').textContent);
    const t = tip.getBoundingClientRect();
    inside = inside && t.left >= 0 && t.right <= innerWidth;
  }
  field.dispatchEvent(new PointerEvent('pointerleave'));
  const filter = document.getElementById('filter');
  filter.value = 'LAYERS.3.'; filter.dispatchEvent(new Event('input'));
  const rows = [...document.querySelectorAll('details[open] tbody tr')].filter(tr => tr.offsetParent);
  const found = rows.map(tr => tr.cells[0].textContent);
  filter.value = ''; filter.dispatchEvent(new Event('input'));
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  const labels = [...document.querySelectorAll('.xaxis span')].map(s => s.getBoundingClientRect());
  parent.document.body.dataset.probe = JSON.stringify({
    errors, hovered, found, inside, astray, left: tip.hidden,
    width: innerWidth, scroll: document.documentElement.scrollWidth,
    overlap: labels.some((b, i) => i && b.left < labels[i - 1].right + 2),
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    background: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  });
}, 30));
</script>"""


def luminance(colour: str) -> float:
    """WCAG relative luminance of a CSS rgb() or of #rrggbb."""
    parts = (
        [int(n, 16) for n in re.findall("[0-9a-f]{2}", colour)]
        if colour[0] == "#"
        else map(int, re.findall(r"\d+", colour))
    )
    channels = [n / 255 for n in list(parts)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


def test_colours_can_be_told_from_the_card() -> None:
    """WCAG: 3:1 for graphics, 4.5:1 for text, in both schemes."""
    schemes = re.findall(r":root \{(.*?)\}", render_html(*make()), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+):(#\w+)", scheme))
        colours = {k: v if len(v) == 7 else "#" + "".join(2 * c for c in v[1:]) for k, v in colours.items()}
        marks = [colours[f"c{i}"] for i in range(7)]
        assert len(set(marks)) == 7
        assert all(contrast(colour, colours["card"]) >= 3 for colour in [*marks, colours["kept"]])
        texts = [(text, ground) for text in ("ink", "soft", "link") for ground in ("card", "bg")]
        assert all(contrast(colours[text], colours[ground]) >= 4.5 for text, ground in [*texts, ("ink", "warn")])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH to look at the page with")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    """Scripts run without an error, hovering finds every layer, and nothing sticks out at either width.

    The page sits in a frame: browsers refuse windows as narrow as a phone.
    """
    assert CHROMIUM is not None
    report, plan = make(names=60)
    html = render_html(report, plan).replace("<style>", f"{PROBE}<style>", 1)
    frame = f'<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{escape(html)}"></iframe>'
    path = tmp_path / "frame.html"
    path.write_text(f'<!doctype html><meta name="color-scheme" content="light dark"><body>{frame}', encoding="utf-8")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags = [*quiet.split(), "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *flags, scheme, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    seen = json.loads(unescape(found.group(1)))
    assert seen["errors"] == []
    assert seen["dark"] is dark
    assert seen["width"] == width
    assert seen["scroll"] <= width
    assert seen["inside"]
    assert seen["astray"] < 6  # pixels: the ticks of 16-bit layers stand on the axis, not across it
    assert seen["left"]
    assert not seen["overlap"]
    drawn = [layer.name for layer in report.layers if layer.format or len(layer.shape) > 1]
    assert seen["hovered"] == drawn
    assert sorted(seen["found"]) == sorted(layer.name for layer in report.layers if "layers.3." in layer.name)
    assert (luminance(seen["background"]) < luminance(seen["ink"])) is dark
    assert contrast(seen["background"], seen["ink"]) >= 7


def test_summary_in_the_terminal() -> None:
    report, _ = make()
    stream = StringIO()
    print_summary(dataclasses.replace(report, model="[red]model"), Console(file=stream, width=100))
    text = stream.getvalue()
    for part in ("[red]model", "23.15, 18.68 before (+23.9%)", "0.2206 nats", "76.2%", "quantize 3.2 s", "1.47 GB"):
        assert part in text
    assert "warning: <u>mind</u> the gap" in text
    assert f"{report.effective_bits:.3f} per quantized weight" in text
    assert "nvfp4" in text
    assert "8 layers" in text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (86_540_000, "86.5 MB"), (123e9, "123 GB")]
)
def test_megabytes(nbytes: float, text: str) -> None:
    assert megabytes(nbytes) == text


def test_peak_memory_of_this_process() -> None:
    status = Path("/proc/self/status")
    if status.exists():
        high_water = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024  # type: ignore[index]
        assert peak_rss() == pytest.approx(high_water, rel=0.05)
