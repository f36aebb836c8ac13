"""The report as one HTML file: no request leaves it, it reads in light and dark, on a desk and on a phone.

Each section is a function from a `View` to HTML, and `SECTIONS` is the page; a section without data is left out.
The charts are in `quant.page.charts`. The script only adds hovering, a filter and a copy button: without it the page
still says everything. A layer is written once, as a row of the table, and what hovers over its mark is read from that
row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from quant.errors import megabytes
from quant.page import charts
from quant.recipes.plan import LayerPlan, Plan
from quant.report import LayerResult, Report

_COLOURS = 7  # distinct colours and marks; what comes after them shares the last


@dataclass(frozen=True)
class View:
    """A report and its plan, with what several sections look up."""

    report: Report
    plan: Plan

    @cached_property
    def index(self) -> dict[str, int]:
        """Row number of each layer."""
        return {layer.name: i for i, layer in enumerate(self.report.layers)}

    @cached_property
    def formats(self) -> list[str]:
        """Weight formats in use, fewest bits first: the order of their colours."""
        bits: dict[str, float] = {}
        for layer in self.report.layers:
            if layer.format is not None:
                bits.setdefault(layer.format, layer.bits)
        return sorted(bits, key=lambda name: (bits[name], name))

    @cached_property
    def by_role(self) -> bool:
        """Whether colours tell the layer's role: where all share a format, its colour would tell nothing."""
        return len(self.formats) < 2

    @cached_property
    def series(self) -> list[str]:
        """What colours stand for in the error plot: formats, or roles in order of appearance."""
        if not self.by_role:
            return self.formats
        return list(dict.fromkeys(_role(layer.name) for layer in self.report.layers if layer.format))

    def rank(self, format: str | None) -> int:
        """Position of a format among those in use, 16 bit last."""
        return len(self.formats) if format is None else self.formats.index(format)

    def kind(self, layer: LayerResult) -> str:
        """The plan's kind of a layer."""
        planned = self.plan.by_name.get(layer.name)
        return planned.kind if planned else "other"

    def planned(self, layer: LayerResult) -> LayerPlan | None:
        """The plan's entry for a layer."""
        return self.plan.by_name.get(layer.name)


def render(report: Report, plan: Plan) -> str:
    """The whole page.

    Args:
        report: results.
        plan: the plan that was executed; layers it lacks are shown with what the report knows.
    """
    view = View(report, plan)
    body = "\n".join(section(view) for section in SECTIONS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{escape(report.model)} · quantization report</title>\n"
        f"<style>{_CSS}{charts.CSS}</style>\n</head>\n<body>\n"
        f'{_MARKS}\n<main>\n{body}\n</main>\n<div id="tip" role="status" hidden></div>\n'
        f"<script>{_JS}</script>\n</body>\n</html>\n"
    )


def _headline(view: View) -> str:
    report, evaluation = view.report, view.report.evaluation
    tiles = [
        _tile(
            "Smaller by",
            f"{report.ratio:.2f}×",
            f"{_size(report.bytes_before)} → {_size(report.bytes_after)}",
        ),
        _tile("Effective bits", f"{report.effective_bits:.3f}", "per quantized weight, scales and padding counted"),
    ]
    if evaluation is None:
        tiles.append(_tile("Quality", "not measured", "give a text to evaluate on"))
    else:
        if evaluation.perplexity is not None:
            base = evaluation.baseline_perplexity
            change = "" if base is None else f"{base:.2f} before, {100 * (evaluation.perplexity / base - 1):+.1f}%"
            tiles.append(_tile("Perplexity", f"{evaluation.perplexity:.2f}", change or "no baseline measured"))
        if evaluation.cosine is not None:
            tiles.append(_tile("Embeddings", f"{evaluation.cosine:.5f}", "1 − cosine to the model before"))
        if evaluation.kl is not None:
            tiles.append(_tile("KL divergence", f"{evaluation.kl:.4f}", "nats per token, from the model before"))
        if evaluation.top1 is not None:
            note = f"same likeliest token, over {evaluation.tokens:,} positions"
            tiles.append(_tile("Top-1 agreement", f"{100 * evaluation.top1:.1f}%", note))
    if (record := report.allocation) is not None:
        predicted, measured = charts.number(record.chosen.kl_predicted), charts.number(record.chosen.kl_measured)
        text = f"loss {predicted} predicted, {measured} measured"
        tiles.insert(0, _tile("Asked for", charts.budget_text(record.budget), text))
    formats = ", ".join(view.formats) or "nothing quantized"
    count = sum(layer.format is not None for layer in report.layers)
    warnings = "".join(f'<p class="warning"><b>Warning.</b> {escape(text)}</p>' for text in report.warnings)
    return (
        f"<header><p class=kicker>Quantization report</p><h1>{escape(report.model)}</h1>"
        f"<p class=lead>{count} of {len(report.layers)} layers in {escape(formats)}, the rest in 16 bit.</p></header>"
        f"{warnings}<div class=tiles>{''.join(tiles)}</div>"
    )


def _tile(label: str, value: str, note: str) -> str:
    return f"<div class=tile><h2>{escape(label)}</h2><p class=value>{escape(value)}</p><p>{escape(note)}</p></div>"


def _sizes(view: View) -> str:
    """Bytes by format, before and after on one scale."""
    groups: dict[tuple[str | None, str], list[LayerResult]] = {}
    for layer in view.report.layers:
        planned = view.planned(layer)
        if planned is None or planned.tied_to is None:
            groups.setdefault((layer.format, "" if layer.format else view.kind(layer)), []).append(layer)
    order = sorted(groups, key=lambda key: (view.rank(key[0]), key[1]))
    total = sum(_before(layer) for layer in view.report.layers if layer.nbytes) or 1
    bars: dict[str, list[str]] = {"before": [], "after": []}
    rows = []
    for format, kind in order:
        members = groups[format, kind]
        css = _colour(view.formats, format)
        name = format or f"16 bit, {kind}"
        sizes = {"before": sum(map(_before, members)), "after": sum(layer.nbytes for layer in members)}
        for when, size in sizes.items():
            title = f"{escape(name)}: {_size(size)}"
            bars[when].append(f'<i class="{css}" style="width:{100 * size / total:.3f}%" title="{title}"></i>')
        weights = sum(math.prod(layer.shape) for layer in members)
        share = sizes["after"] / max(view.report.bytes_after, 1)
        rows.append(
            f'<tr><td><b class="key {css}"></b>{escape(name)}</td><td>{len(members)}</td>'
            f"<td>{_count(weights)}</td><td>{8 * sizes['after'] / weights:.3f}</td>"
            f"<td>{_size(sizes['before'])}</td><td>{_size(sizes['after'])}</td><td>{share:.1%}</td></tr>"
        )
    drawn = "".join(
        f"<p class=barlabel>{when.capitalize()} <b>{_size(size)}</b></p><div class=bar>{''.join(bars[when])}</div>"
        for when, size in (("before", view.report.bytes_before), ("after", view.report.bytes_after))
    )
    head = ("format", "layers", "weights", "bits", "before", "after", "share")
    return _section(
        "Bytes by format",
        f"{drawn}<div class=scroll><table class=numbers><thead><tr>{_cells(head, 'th')}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _errors(view: View) -> str:
    """SNR of each layer, in model order; layers in 16 bit are ticks on the axis."""
    shown = [layer for layer in view.report.layers if layer.format or len(layer.shape) > 1]
    measured = [layer.snr_db for layer in shown if layer.snr_db is not None]
    if not measured:
        return ""
    y = charts.linear(measured, least=1.0)
    marks = []
    for position, layer in enumerate(shown):
        exact = layer.format is not None and layer.snr_db is None
        top = 0.0 if exact else 1.0 if layer.snr_db is None else 1 - y.at(layer.snr_db)
        series = _role(layer.name) if view.by_role else layer.format
        css = _colour(view.series, series if layer.format else None)
        marks.append(charts.mark(css, (position + 0.5) / len(shown), top, str(view.index[layer.name])))
    blocks = _block_starts(shown)
    keys = [(f"c{i}", name) for i, name in enumerate(view.series[:_COLOURS])]
    if len(view.series) > _COLOURS:
        keys[-1] = (keys[-1][0], "other")
    if any(layer.format is None for layer in shown):
        keys.append(("kept", "16 bit, no error"))
    worst = min((layer for layer in shown if layer.snr_db is not None), key=lambda layer: layer.snr_db or 0.0)
    summary = (
        f"Median {statistics.median(measured):.1f} dB, best {max(measured):.1f} dB, "
        f'<a href="#L{view.index[worst.name]}">worst {min(measured):.1f} dB</a>. '
        "10 dB is an error of 32%, 20 dB of 10%, 30 dB of 3.2% of the weight’s norm. "
    )
    return _section(
        "Error by layer",
        f"<p>{summary}</p>{charts.legend(keys)}"
        + charts.plot(
            "".join(marks),
            y,
            "Signal to quantization noise of each layer in dB, in model order",
            xticks=[((i + 0.5) / len(shown), block) for i, block in blocks],
            above="signal to quantization noise (dB), higher is better",
            below=f"{'block' if blocks else 'layers'}, in model order",
        ),
    )


def _allocation(view: View) -> str:
    record = view.report.allocation
    if record is None:
        return ""
    parts = (("Size against loss", charts.pareto(record)), ("Predicted and achieved", charts.rounds(record)))
    return "".join(_section(title, content) for title, content in parts if content)


def _memory(view: View) -> str:
    content = charts.memory(view.plan, view.report.kv_cache)
    return _section("Memory", content) if content else ""


def _sensitivity(view: View) -> str:
    table = view.report.sensitivity
    if table is None:
        return ""
    in_use = {name: f"c{min(i, _COLOURS - 1)}" for i, name in enumerate(view.formats)}
    colour = charts.format_colours(table.formats, in_use)
    parts = (
        ("Sensitivity", charts.heat_map(table, view.plan)),
        ("Where the loss comes from", charts.waterfall(table, view.plan, view.report.allocation, colour)),
    )
    return "".join(_section(title, content) for title, content in parts if content)


def _receipt(view: View) -> str:
    record = view.report.receipt
    return _section("Export receipt", charts.receipt(record)) if record is not None else ""


def _layers(view: View) -> str:
    """Every layer once, grouped by what it became and why."""
    # What an allocator scored has a sentence of its own for every layer: those stand in the rows, not above each.
    groups: dict[tuple[str | None, str | None, str | None], list[LayerResult]] = {}
    for layer in view.report.layers:
        planned = view.planned(layer)
        reason = layer.reason if planned is None or planned.score is None else None
        groups.setdefault((layer.format, layer.activation, reason), []).append(layer)
    parts = []
    for (format, activation, reason), members in sorted(groups.items(), key=lambda item: view.rank(item[0][0])):
        inputs = f", inputs {activation}" if activation else ", inputs 16 bit" if format else ""
        size = _size(sum(layer.nbytes for layer in members))
        each = reason is None
        rows = "".join(_layer_row(view, layer, each) for layer in members)
        columns = ["layer", "shape", "bits", "bytes"]
        columns += [*(("SNR", "error", "solver") if format else ()), *(("why",) if each else ())]
        why = "each for a reason of its own" if each else reason or "no reason given"
        parts.append(
            f"<details class=plan{' open' if len(view.report.layers) <= 40 else ''}><summary>"
            f'<b class="key {_colour(view.formats, format)}"></b>'
            f"<span><b>{escape(format or '16 bit')}</b>{escape(inputs)} · "
            f"{len(members)} layer{'s' if len(members) > 1 else ''} · {size}<br>"
            f"<span class=reason>{escape(why)}</span></span></summary>"
            f"<table class='layers{' each' if each else ''}'><thead><tr>{_cells(columns, 'th')}</tr></thead>"
            f"<tbody>{rows}</tbody></table></details>"
        )
    extra = [
        (label, str(value))
        for label, value in (
            ("KV cache", view.plan.kv_cache),
            ("attention", view.plan.attention),
            ("target", view.plan.target),
        )
        if value
    ]
    return _section(
        "Plan: every layer, and why",
        f"{_facts(extra)}<input id=filter type=search placeholder='Filter layers by name' "
        f"aria-label='Filter layers by name'>{''.join(parts)}",
    )


def _layer_row(view: View, layer: LayerResult, with_reason: bool) -> str:
    planned = view.planned(layer)
    tied = f" (tied to {planned.tied_to})" if planned and planned.tied_to else ""
    cells = [" × ".join(map(str, layer.shape)), f"{layer.bits:.3f}", _size(layer.nbytes) + tied]
    if layer.format:
        cells.append("exact" if layer.snr_db is None else f"{layer.snr_db:.2f} dB")
        cells.append("–" if layer.relative_error is None else f"{layer.relative_error:.2%}")
        cells.append(layer.solver or "–")
    why = f"<td class=why>{escape(layer.reason or '–')}</td>" if with_reason else ""
    return (
        f'<tr id="L{view.index[layer.name]}" data-format="{escape(layer.format or "16 bit")}">'
        f"<td class=name>{escape(layer.name).replace('.', '.<wbr>')}</td>{_cells(cells)}{why}</tr>"
    )


def _reproduce(view: View) -> str:
    report = view.report
    command = ""
    if report.command:
        text = f"<pre><code>{escape(report.command)}</code></pre>"
        command = f"<div class=command>{text}<button type=button hidden>Copy</button></div>"
    # The command and the versions stand beside it already.
    provenance = [
        (key, value if isinstance(value, str) else repr(value))
        for key, value in view.plan.provenance.items()
        if value is not None and key not in ("command", "versions")
    ]
    seconds = [(stage, f"{value:.1f} s") for stage, value in report.seconds.items()]
    if report.peak_rss_bytes is not None:
        seconds.append(("peak memory", _size(report.peak_rss_bytes)))
    parts = [
        ("Time and memory", seconds),
        ("Versions", list(report.versions.items())),
        ("Plan", [*provenance, *([("SHA-256", report.plan_digest)] if report.plan_digest else [])]),
    ]
    columns = "".join(f"<div><h3>{title}</h3>{_facts(facts)}</div>" for title, facts in parts if facts)
    return _section("Reproduce", f"{command}<div class=columns>{columns}</div>")


def _files(view: View) -> str:
    if not view.report.files:
        return ""
    rows = "".join(
        f"<tr><td class=name>{escape(name)}</td><td class=hash>{escape(digest)}</td></tr>"
        for name, digest in view.report.files.items()
    )
    return _section(
        "Files",
        f"<table class=files><thead><tr><th>file</th><th>SHA-256</th></tr></thead><tbody>{rows}</tbody></table>",
    )


SECTIONS: tuple[Callable[[View], str], ...] = (
    _headline,
    _allocation,
    _sizes,
    _memory,
    _sensitivity,
    _errors,
    _receipt,
    _layers,
    _reproduce,
    _files,
)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    if not facts:
        return ""
    return f"<dl>{''.join(f'<dt>{escape(label)}</dt><dd>{escape(value)}</dd>' for label, value in facts)}</dl>"


def _cells(values: Iterable[Any], tag: str = "td") -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in values)


def _colour(series: Sequence[str], name: str | None) -> str:
    """CSS class of a series; "kept" for 16 bit."""
    return "kept" if name is None else f"c{min(series.index(name), _COLOURS - 1)}"


def _role(name: str) -> str:
    return name.rpartition(".")[2]


def _before(layer: LayerResult) -> int:
    """Bytes of the layer in 16 bit; none for a weight stored with another layer."""
    return 2 * math.prod(layer.shape) if layer.nbytes else 0


def _size(nbytes: float) -> str:
    return megabytes(nbytes).replace(" ", "\u00a0")


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)


def _block_starts(layers: Sequence[LayerResult]) -> list[tuple[int, int]]:
    """Where each block of the model begins, as (position, block number); at most eight, evenly apart."""
    first: dict[int, int] = {}
    for position, layer in enumerate(layers):
        number = next((int(part) for part in layer.name.split(".") if part.isdigit()), None)
        if number is not None:
            first.setdefault(number, position)
    step = next(s for e in range(9) for s in (10**e, 2 * 10**e, 5 * 10**e) if len(first) <= 8 * s)
    return [(position, number) for number, position in first.items() if number % step == 0]


# Colours keep at least 3:1 contrast with the card in either scheme. No mark depends on its colour alone: each series
# has a shape of its own too, and the bars stand in the order of the table below them.
_CSS = """
:root { --bg:#f6f7f9; --card:#fff; --ink:#16202c; --soft:#55606e; --line:#dfe3e8; --link:#0b5cad; --warn:#fff4d6;
 --good:#0b6e3f; --bad:#b3261e; --cool:#e9eff6; --hot:#08316b; --ring:#e07000;
 --c0:#0068b5; --c1:#c8500a; --c2:#007a5a; --c3:#a83c86; --c4:#6b5b00; --c5:#3b3f9e; --c6:#0d8299; --kept:#8a939f }
@media (prefers-color-scheme: dark) { :root { --bg:#0f141a; --card:#182029; --ink:#e8edf3; --soft:#a3aebb;
 --line:#2d3844; --link:#7ab8f5; --warn:#3c3212;
 --good:#5fd08f; --bad:#ff8a80; --cool:#232e3a; --hot:#9fd0ff; --ring:#ff9d3c;
 --c0:#57a9f2; --c1:#f58b4b; --c2:#3fc79a; --c3:#e58ac8; --c4:#d9c34a; --c5:#a3a7ff; --c6:#5fd0e6; --kept:#7d8896 } }
* { box-sizing:border-box } [hidden] { display:none !important }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
 "Liberation Sans",sans-serif; -webkit-text-size-adjust:100% }
main { max-width:1080px; margin:0 auto; padding:32px 24px 64px }
h1,h2,h3,p,ul,dl,pre { margin:0 } h1 { font-size:30px; line-height:1.2; overflow-wrap:anywhere }
h2 { font-size:18px; margin-bottom:14px } h3 { font-size:14px; margin-bottom:6px } a { color:var(--link) }
.kicker { color:var(--soft); font-size:13px; letter-spacing:.06em; text-transform:uppercase }
.lead { color:var(--soft); margin-top:6px; overflow-wrap:anywhere }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(152px,1fr)); gap:12px; margin:22px 0 16px }
.tile, section { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:16px 18px }
.tile h2 { font-size:13px; font-weight:500; color:var(--soft); margin:0 }
.tile .value { font-size:28px; font-weight:650; line-height:1.3; font-variant-numeric:tabular-nums }
.tile p:last-child { font-size:13px; color:var(--soft) }
section { margin-top:16px; padding:20px 22px }
.warning { background:var(--warn); border-radius:10px; padding:10px 14px; margin-top:14px; overflow-wrap:anywhere }
.c0 { color:var(--c0) } .c1 { color:var(--c1) } .c2 { color:var(--c2) } .c3 { color:var(--c3) }
.c4 { color:var(--c4) } .c5 { color:var(--c5) } .c6 { color:var(--c6) } .kept { color:var(--kept) }
.key { display:inline-block; width:11px; height:11px; border-radius:3px; background:currentColor; margin-right:8px;
 flex:none }
.barlabel { font-size:13px; color:var(--soft); margin:6px 0 3px } .barlabel b { color:var(--ink) }
.bar { display:flex; height:26px; border-radius:5px; overflow:hidden; background:var(--bg) }
.bar i { background:currentColor; box-shadow:inset -1px 0 var(--card) }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums }
th { text-align:left; font-weight:500; color:var(--soft); white-space:nowrap }
th,td { padding:5px 12px 5px 0; border-bottom:1px solid var(--line); vertical-align:top }
th:last-child, td:last-child { padding-right:0 } tbody tr:last-child td { border-bottom:0 }
.scroll { overflow-x:auto; margin-top:14px }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align:right; white-space:nowrap }
.name, .hash { overflow-wrap:anywhere } .hash, pre, code { font-family:ui-monospace,"SF Mono",Menlo,Consolas,
 "Liberation Mono",monospace; font-size:12.5px }
.legend { list-style:none; padding:0; display:flex; flex-wrap:wrap; gap:4px 18px; margin:12px 0; font-size:13.5px }
.legend li { display:flex; align-items:center; gap:6px } .legend svg { width:16px; height:16px; overflow:visible }
.axis { font-size:12.5px; color:var(--soft) } .right { text-align:right }
.plot { display:grid; grid-template-columns:34px 1fr; margin-top:14px }
.yaxis, .xaxis, .field { position:relative; font-size:12px; color:var(--soft) }
.yaxis span { white-space:nowrap; position:absolute; right:8px; transform:translateY(-50%) }
.xaxis { grid-column:2; height:22px } .xaxis span { position:absolute; top:4px; transform:translateX(-50%) }
.canvas { display:block; width:100%; height:300px; overflow:visible; touch-action:pan-y }
.grid line { stroke:var(--line); stroke-width:1 }
use { fill:currentColor; opacity:.85 } use.on { opacity:1; stroke:var(--ink); stroke-width:2 }
details { border-top:1px solid var(--line); padding:10px 0 }
summary { cursor:pointer; display:flex; align-items:baseline }
summary::before { content:"▸"; color:var(--soft); width:18px; flex:none }
summary::-webkit-details-marker { display:none } details[open] > summary::before { content:"▾" }
summary > span { overflow-wrap:anywhere; min-width:0 } .reason { color:var(--soft); font-size:13.5px }
@media (min-width:900px) { .layers td:not(.name):not(.why) { white-space:nowrap } }
details table { margin-top:10px } .why { color:var(--soft); min-width:200px }
tr:target td, tr.found td { background:color-mix(in srgb, var(--c0) 18%, transparent) }
#filter { font:inherit; color:inherit; background:var(--bg); border:1px solid var(--line); border-radius:8px;
 padding:7px 11px; width:100%; max-width:340px; margin-bottom:12px }
dl { display:grid; grid-template-columns:auto 1fr; gap:3px 14px; font-size:13.5px; margin-bottom:10px }
dt { color:var(--soft) } dd { margin:0; overflow-wrap:anywhere; min-width:0 }
.columns { display:grid; grid-template-columns:repeat(auto-fit,minmax(250px,1fr)); gap:18px 28px }
.command { position:relative; margin-bottom:18px } pre { background:var(--bg); border:1px solid var(--line);
 border-radius:8px; padding:12px 14px; white-space:pre-wrap; overflow-wrap:anywhere }
button { position:absolute; top:7px; right:7px; font:inherit; font-size:12.5px; color:inherit; background:var(--card);
 border:1px solid var(--line); border-radius:6px; padding:3px 10px; cursor:pointer }
.command:has(button:not([hidden])) pre { padding-right:76px }
#tip { position:fixed; z-index:1; max-width:min(360px,calc(100vw - 16px)); background:var(--ink); color:var(--bg);
 border-radius:8px; padding:8px 12px; font-size:13px; pointer-events:none; overflow-wrap:anywhere }
#tip span { display:block; opacity:.85 }
@media (max-width:640px) { main { padding:20px 12px 40px } h1 { font-size:24px } section { padding:16px 14px }
 .tiles { grid-template-columns:repeat(2,minmax(0,1fr)); gap:10px } .tile { padding:12px 13px }
 .tile:last-child:nth-child(odd) { grid-column:span 2 } .tile .value { font-size:23px }
 .canvas { height:240px } [id^=mark-] { transform:scale(.75) }
 .layers th:nth-child(2), .layers td:nth-child(2), .layers th:nth-child(4),
 .layers td:nth-child(4), .layers th:nth-child(6), .layers td:nth-child(6), .layers th:nth-child(7),
 .layers td:nth-child(7) { display:none } .layers td:nth-child(5) { white-space:nowrap }
 .numbers th:nth-child(2), .numbers td:nth-child(2), .numbers th:nth-child(3), .numbers td:nth-child(3),
 .numbers th:nth-child(4), .numbers td:nth-child(4) { display:none }
 .each thead { display:none } .each tr { display:grid; grid-template-columns:1fr auto auto; gap:2px 12px;
 border-bottom:1px solid var(--line); padding:6px 0 } .each td, .layers.each td.why { display:block; border:0;
 padding:0 } .layers.each td.why { grid-column:1/-1; white-space:normal }
 .files thead { display:none } .files tr, .files td { display:block; padding-right:0 } .files td.name { border:0 }
 .files .hash { font-size:11px; color:var(--soft); padding-top:0 } }
"""

_MARKS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<circle id="mark-c0" r="4"/><path id="mark-c1" d="M-4-4H4V4H-4Z"/><path id="mark-c2" d="M0-5 5 4H-5Z"/>
<path id="mark-c3" d="M0-5.5 5.5 0 0 5.5-5.5 0Z"/><path id="mark-c4" d="M0 5 5-4H-5Z"/>
<path id="mark-c5" d="M-1.5-5h3v3.500h3.500v3h-3.500v3.500h-3v-3.500h-3.500v-3h3.500Z"/>
<path id="mark-c6" d="M-5-3-3-5 0-2 3-5 5-3 2 0 5 3 3 5 0 2-3 5-5 3-2 0Z"/><path id="mark-kept" d="M-1-9H1V0H-1Z"/>
</defs></svg>"""

_JS = """
'use strict';
const tip = document.getElementById('tip');
const row = i => document.getElementById(/^\\d/.test(i) ? 'L' + i : i);
let current = null;
function reveal(i) {
  const tr = row(i);
  document.querySelectorAll('tr.found').forEach(t => t.classList.remove('found'));
  if (tr.closest('details')) tr.closest('details').open = true;
  tr.hidden = false; tr.classList.add('found');
  tr.scrollIntoView({block: 'center'});
}
function describe(i) {
  const tr = row(i), heads = tr.closest('table').querySelectorAll('th');
  const line = (tag, text) => { const e = document.createElement(tag); e.textContent = text; return e; };
  const facts = [...tr.cells].slice(1).map((td, k) => heads[k + 1].textContent + ' ' + td.textContent);
  const texts = [tr.dataset.format, ...facts].filter(Boolean);
  tip.replaceChildren(line('b', tr.cells[0].textContent), line('span', texts.join(' · ')));
}
function leave() { tip.hidden = true; if (current) current.classList.remove('on'); current = null; }
function show(found, x, y) {
  if (found !== current) {
    leave();
    current = found;
    if (found) { found.classList.add('on'); describe(found.dataset.i); }
  }
  if (!found) return;
  tip.hidden = false;
  tip.style.left = Math.max(8, Math.min(x - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = (y - tip.offsetHeight - 12 > 8 ? y - tip.offsetHeight - 12 : y + 14) + 'px';
}
addEventListener('scroll', leave, {passive: true});
for (const canvas of document.querySelectorAll('.canvas')) {
  const marks = [...canvas.querySelectorAll('[data-i]')], wide = canvas.dataset.by ? 0.02 : 1;
  const find = e => {
    const box = canvas.getBoundingClientRect();
    let best = null, least = 40 * 40;
    for (const mark of marks) {
      const dx = box.left + mark.dataset.x * box.width - e.clientX;
      const dy = (box.top + mark.dataset.y * box.height - e.clientY) * wide;
      if (dx * dx + dy * dy < least) { least = dx * dx + dy * dy; best = mark; }
    }
    show(best, best && box.left + best.dataset.x * box.width, best && box.top + best.dataset.y * box.height);
  };
  const field = canvas.parentElement;
  field.addEventListener('pointermove', find);
  field.addEventListener('pointerdown', find);
  field.addEventListener('pointerleave', leave);
  field.addEventListener('click', () => {
    if (current && matchMedia('(hover:hover)').matches) reveal(current.dataset.i);
  });
}
for (const area of document.querySelectorAll('.heat, .parts')) {
  const find = e => {
    const cell = e.target.closest('[data-i]'), box = cell && cell.getBoundingClientRect();
    show(cell, box && (box.left + box.right) / 2, box && box.top);
  };
  area.addEventListener('pointermove', find);
  area.addEventListener('pointerdown', find);
  area.addEventListener('pointerleave', leave);
}
document.querySelectorAll('a[href^="#L"]').forEach(a => a.addEventListener('click', e => {
  e.preventDefault(); reveal(a.getAttribute('href').slice(2));
}));
const filter = document.getElementById('filter'), groups = [...document.querySelectorAll('details.plan')];
const opened = groups.map(g => g.open);
filter.addEventListener('input', () => {
  const wanted = filter.value.trim().toLowerCase();
  groups.forEach((g, k) => {
    let hits = 0;
    for (const tr of g.querySelectorAll('tbody tr')) {
      tr.hidden = !tr.cells[0].textContent.toLowerCase().includes(wanted);
      if (!tr.hidden) hits++;
    }
    g.hidden = !hits;
    g.open = wanted ? hits > 0 : opened[k];
  });
});
document.querySelectorAll('.command button').forEach(button => {
  if (!navigator.clipboard) return;
  button.hidden = false;
  button.addEventListener('click', () => navigator.clipboard.writeText(button.previousElementSibling.textContent)
    .then(() => { button.textContent = 'Copied'; setTimeout(() => { button.textContent = 'Copy'; }, 1500); }));
});
"""
