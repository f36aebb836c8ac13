"""Each chart of the report is shaped here into data: what it draws, the sentences above it, the table of its values.

Nothing is drawn here: `report.js` draws a chart by its `kind`, with Observable Plot. Every point, bar and cell names a
row of a table, and the text that hovers over it is read from that row, so each value is on the page once, as text.

Series have the colours c0 to c6, and `kept` for 16 bit. No chart depends on colour alone: each colour has a symbol of
its own, heat is a ramp of one hue, and chosen cells have a ring.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from quant.allocation.record import AllocationRecord, Budget
from quant.calibration.sensitivity.candidates import Candidate, parse_candidates
from quant.calibration.sensitivity.costs import memory_of
from quant.calibration.sensitivity.table import GroupScores, Sensitivity
from quant.errors import megabytes
from quant.evaluation.record import Evaluation
from quant.execution.layer_result import LayerResult
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP
from quant.report.report import KVCache, Receipt, Report, verified_text

_COLOURS = [f"c{i}" for i in range(7)]  # series after these share the last one
_STAGES = {"fake_quant": "PyTorch", "checkpoint": "checkpoint", "onnx": "ONNX", "engine": "engine"}


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        title: heading.
        text: sentences above the chart.
        link: row and text of a link after `text`.
        chart: the data that `report.js` draws, with its `kind` and the captions `x` and `y` of its axes.
        head: column names of the table.
        rows: (id, cells) of the table.
        verdict: whether a check passed; None where nothing was checked.
    """

    title: str
    text: str = ""
    link: tuple[str, str] | None = None
    chart: Mapping[str, Any] | None = None
    head: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[str]]] = ()
    verdict: bool | None = None


def sections(report: Report, plan: Plan) -> list[Section]:
    """The sections that the report has data for, in the page's order."""
    record, table = report.allocation, report.sensitivity
    found: list[Section | None] = [texts(report.evaluation)] if report.evaluation else []
    found += [pareto(record), rounds(record)] if record else []
    found += [sizes(report, plan), memory(plan, report.kv_cache)]
    found += [heat_map(table, plan), waterfall(table, plan, record, format_colours(report))] if table else []
    found += [errors(report), *(receipt(report.receipt) if report.receipt else ())]
    return [section for section in found if section is not None]


def texts(evaluation: Evaluation) -> Section | None:
    """The figures on every text side by side; None where there is one text, which the tiles show."""
    if not evaluation.others:
        return None
    text = (
        "A solver that works from data fits its calibration text, and loses some of that on text of another kind. "
        "The interval holds the mean of all such text with a confidence of 95% (Student’s t over rows)."
    )
    lost = "1 − cosine" if evaluation.cosine is not None else "KL, nats"
    head = ("text", "rows", "perplexity before", "perplexity", lost, "interval", "top-1")
    rows = []
    for i, each in enumerate(evaluation.texts):
        interval = "–" if each.interval is None else f"{number(each.interval[0])} – {number(each.interval[1])}"
        figures = (number(each.baseline_perplexity), number(each.perplexity), number(each.loss), interval)
        top1 = "–" if each.top1 is None else f"{each.top1:.1%}"
        rows.append((f"Q{i}", (each.text or "–", str(each.rows or "–"), *figures, top1)))
    return Section("Loss on each text", text, None, None, head, rows)


def format_colours(report: Report) -> dict[str | None, str]:
    """Colours of the weight formats in use, fewest bits first; then `kept` for None, which is 16 bit."""
    bits = {layer.format: layer.bits for layer in report.layers if layer.format is not None}
    colours: dict[str | None, str] = {}
    colours.update(_colours(sorted(bits, key=lambda name: (bits[name], name))))
    return {**colours, None: "kept"}


def number(value: float | None) -> str:
    """Four significant digits, or a dash."""
    return "–" if value is None else f"{value:.4g}"


def budget_text(budget: Budget) -> str:
    """The budget in words: '4.8 bits', 'KL ≤ 0.05'."""
    texts = {
        "bits": f"{budget.value:g} bits",
        "bytes": megabytes(budget.value),
        "seconds": f"{1000 * budget.value:g} ms",
        "kl": f"KL ≤ {budget.value:g}",
        "perplexity": f"perplexity +{budget.value:.1%}",
    }
    return texts.get(budget.kind, f"{budget.kind} {budget.value:g}")


def pareto(record: AllocationRecord) -> Section:
    """Loss against size: the predicted curve, the measured points, the uniform formats and the chosen point."""
    chosen, budget = record.chosen, record.budget
    single, best = "one format for all, measured", "chosen, measured"
    found: list[tuple[str, str, float, float | None, float | None, str]] = [
        (f"P{i}", "allocated", p.bits, p.kl_predicted, p.kl_measured, "measured") for i, p in enumerate(record.curve)
    ]
    uniform = sorted(record.uniform, key=lambda u: u.bits)
    found += [(f"U{i}", f"all in {u.name}", u.bits, None, u.kl, single) for i, u in enumerate(uniform)]
    found.append(("PX", "chosen", chosen.bits, chosen.kl_predicted, chosen.kl_measured, best))
    fitting = [u for u in uniform if u.bits <= chosen.bits + 1e-9 and u.kl > 0]
    text = f"Asked for {budget_text(budget)}; chosen {chosen.bits:.3f} bits a weight, measured "
    text += f"{number(chosen.kl_measured)}. "
    if fitting:
        rival = min(fitting, key=lambda u: u.kl)
        text += f"The best single format that is no larger, {rival.name}, measures {number(rival.kl)}; the chosen "
        text += f"allocation has {chosen.kl_measured / rival.kl:.2f} of that loss."
    else:
        text += "No single format is as small."
    text += "".join(f" Verified: {verified_text(record, each)}." for each in record.verified)
    chart = {
        "kind": "dots",
        "log": True,
        "x": "bits per weight, scales and padding counted",
        "y": f"{record.unit} (logarithmic, zero at the bottom), lower is better",
        "series": _series("predicted", "measured", single, best),
        "points": [(p.bits, p.kl_predicted, "predicted", f"P{i}") for i, p in enumerate(record.curve)]
        + [(bits, measured, series, row) for row, _, bits, _, measured, series in found if measured is not None],
        "labels": sorted([*((u.bits, u.kl, u.name) for u in uniform), (chosen.bits, chosen.kl_measured, "chosen")]),
        "curve": [(p.bits, p.kl_predicted) for p in record.curve if p.kl_predicted > 0],
        "limit": {"bits": {"x": budget.value}, "kl": {"y": budget.value}}.get(budget.kind),
    }
    rows = [(row, (name, f"{bits:.3f}", number(p), number(m))) for row, name, bits, p, m, _ in found]
    return Section("Size against loss", text, None, chart, ("allocation", "bits", "predicted", "measured"), rows)


def rounds(record: AllocationRecord) -> Section | None:
    """The prediction and the measurement of every round of the allocation loop."""
    chosen, turns, rows = record.chosen, record.rounds, []
    if not turns:
        return None
    kept = next((i for i, turn in enumerate(turns) if turn.measured == chosen.kl_measured), None)
    for i, turn in enumerate(turns):
        cells = (f"{turn.bits:.3f}", number(turn.predicted), number(turn.measured), _off(turn.measured, turn.predicted))
        change = f"{turn.measured - turns[i - 1].measured:+.3g}" if i else "–"
        changed = f"{len(turn.changed)}: {_by_parent(turn.changed)}" if turn.changed else "–"
        rows.append((f"R{i}", (f"round {i + 1}{', chosen' if i == kept else ''}", *cells, change, changed)))
    limit = {"y": record.budget.value} if record.budget.kind == "kl" else None
    series = {"predicted": "c0", "measured": "c1", "measured, and chosen": "c3"}
    names = ["measured, and chosen" if i == kept else "measured" for i in range(len(turns))]
    chart = {
        "kind": "dots",
        "zero": True,
        "column": True,
        "x": "round" + (", dashed: the limit asked for" if limit else ""),
        "y": record.unit,
        "series": [*series.items()],
        "points": [(i, turn.predicted, "predicted", f"R{i}") for i, turn in enumerate(turns)]
        + [(i, turn.measured, names[i], f"R{i}") for i, turn in enumerate(turns)],
        "gaps": [(i, turn.predicted, turn.measured) for i, turn in enumerate(turns)],
        "ticks": [(i, i + 1) for i in range(len(turns))],
        "limit": limit,
    }
    off = f", {_off(chosen.kl_measured, chosen.kl_predicted)} from it" if chosen.kl_predicted > 0 else ""
    which = f"round {kept + 1} of {len(turns)}" if kept is not None else "none of these rounds"
    text = (
        "The loss of an allocation is predicted as the sum of its groups’ scores. Every round quantizes the model, "
        f"measures it and corrects the next prediction. The plan holds the outcome of {which}: the scores predict "
        f"{number(chosen.kl_predicted)}, measured is {number(chosen.kl_measured)}{off}. All rounds took "
        f"{record.seconds:.1f} s."
    )
    head = ("round", "bits", "predicted", "measured", "off by", "change", "layers changed")
    return Section("Predicted and achieved", text, None, chart, head, rows)


def _by_parent(names: Sequence[str]) -> str:
    """Layer names without their common start, grouped by module: `5.self_attn.(q_proj, k_proj), 6.mlp.up`."""
    shared = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".") + "."
    parents: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.removeprefix(shared).rpartition(".")
        parents.setdefault(parent, []).append(last)
    together = {p: lasts[0] if len(lasts) == 1 else f"({', '.join(lasts)})" for p, lasts in parents.items()}
    return ", ".join(f"{parent}.{last}".lstrip(".") for parent, last in together.items())


def sizes(report: Report, plan: Plan) -> Section:
    """Bytes by format, before and after on one scale."""
    colours, order = format_colours(report), list(format_colours(report))
    groups: dict[tuple[str | None, str], list[LayerResult]] = {}
    for layer in report.layers:
        planned = plan.by_name.get(layer.name)
        if planned is None or planned.tied_to is None:
            kind = "" if layer.format else f"{layer.bits:g} bit, {planned.kind if planned else 'other'}"
            groups.setdefault((layer.format, kind), []).append(layer)
    bars = {"before": f"Before {megabytes(report.bytes_before)}", "after": f"After {megabytes(report.bytes_after)}"}
    parts, rows, series = [], [], {}
    for i, (format, kind) in enumerate(sorted(groups, key=lambda key: (order.index(key[0]), key[1]))):
        members, name = groups[format, kind], format or kind
        weights = sum(math.prod(layer.shape) for layer in members)
        before = sum(2 * math.prod(layer.shape) if layer.format else layer.nbytes for layer in members if layer.nbytes)
        size = {"before": before, "after": sum(layer.nbytes for layer in members)}
        parts += [(bar, size[bar], name, f"B{i}") for bar in bars]
        series[name] = colours[format]
        cells = (f"{weights:,}", f"{8 * size['after'] / weights:.3f}", *(megabytes(size[bar]) for bar in bars))
        share = f"{size['after'] / max(report.bytes_after, 1):.1%}"
        rows.append((f"B{i}", (name, str(len(members)), *cells, share)))
    chart = {"kind": "bars", "bars": [*bars.items()], "series": [*series.items()], "parts": parts}
    head = ("format", "layers", "weights", "bits", "before", "after", "share")
    return Section("Bytes by format", chart=chart, head=head, rows=rows)


def memory(plan: Plan, kv_cache: KVCache | None) -> Section | None:
    """What the weights consist of in bytes, and their size beside the KV cache where its size is known."""
    found = memory_of(plan)
    if not found.total:
        return None
    sizes = {"quantized codes": found.codes, "scales": found.scales}
    sizes |= {"embeddings and head": found.embeddings, "16-bit rest": found.rest}
    parts = [("weights", size, name) for name, size in sizes.items() if size]
    bars = {"weights": f"Weights {megabytes(found.total)}"}
    text = "The KV cache and activations take memory as well; the server decides how much."
    if kv_cache is not None:
        cache_name = f"KV cache, {kv_cache.batch} × {kv_cache.context:,} tokens"
        parts += [("both", found.total, "all weights"), ("both", kv_cache.nbytes, cache_name)]
        bars["both"] = f"With the KV cache {megabytes(found.total + kv_cache.nbytes)}"
        text = "Both bars are drawn at full width; their totals differ."
    ratios = [size / found.total for _, size, _ in parts]
    rows = [
        (f"M{i}", (name, megabytes(size), f"{size:,}", f"{ratio:.1%}" if ratio <= 1 else f"{ratio:.1f} ×"))
        for i, ((_, size, name), ratio) in enumerate(zip(parts, ratios, strict=True))
    ]
    chart = {
        "kind": "bars",
        "whole": True,
        "bars": [*bars.items()],
        "series": _series(*(name for *_, name in parts)),
        "parts": [(*part, f"M{i}") for i, part in enumerate(parts)],
    }
    return Section("Memory", text, None, chart, ("part", "size", "bytes", "of the weights"), rows)


def chosen_format(group: GroupScores, plan: Plan) -> str | None:
    """The column of the table that the plan chose for a group; None if no column matches the plan."""
    layer = plan.by_name.get(group.layers[0]) if group.layers else None
    if layer is None:
        return None
    if layer.weight is None:
        return KEEP if KEEP in group.scores else None
    formats = (layer.weight, layer.activation)
    columns = _candidates(tuple(name for name in group.scores if name != KEEP))
    return next((column.name for column in columns if (column.weight, column.activation) == formats), None)


@cache
def _candidates(names: tuple[str, ...]) -> tuple[Candidate, ...]:
    return parse_candidates(names) if names else ()


def heat_map(table: Sensitivity, plan: Plan) -> Section | None:
    """A panel for each format, with a row for each place in a block and a column for each block."""
    formats = [name for name in table.formats if name != KEEP]
    cells, rows = [], []
    for i, group in enumerate(table.groups):
        role, block = _place(group.name)
        best = chosen_format(group, plan)
        scores = (number(group.scores.get(f)) for f in formats)
        rows.append((f"S{i}", (group.name, f"{group.numel:,}", *scores, best or "–")))
        cells += [(f, role, block, group.scores[f], f == best, f"S{i}") for f in formats if f in group.scores]
    if not any(score > 0 for _, _, _, score, *_ in cells):
        return None
    counts = {f: sum(best for name, *_, best, _ in cells if name == f) for f in formats}
    worst = max(table.groups, key=lambda group: group.scores.get(formats[0], 0.0))
    text = (
        f"Method {table.method} over {table.rows} rows of {table.seqlen} tokens: {table.unit}. Most sensitive to "
        f"{formats[0]}: {worst.name}, {number(worst.scores.get(formats[0]))}. A ring marks the plan’s choice."
    )
    panels = [(f, f"{f}, chosen for {count} of {len(table.groups)} groups") for f, count in counts.items()]
    roles = {role: _short(role) for _, role, *_ in cells}
    chart = {"kind": "heat", "x": "block", "roles": [*roles.items()], "panels": panels, "cells": cells}
    return Section("Sensitivity", text, None, chart, ("group", "weights", *formats, "chosen"), rows)


def waterfall(
    table: Sensitivity, plan: Plan, record: AllocationRecord | None, colours: Mapping[str | None, str]
) -> Section | None:
    """What each group adds to the predicted loss, in model order, then the sum and the measurement."""
    chosen = [(i, group, f) for i, group in enumerate(table.groups) if (f := chosen_format(group, plan)) is not None]
    scores = [group.scores[f] for _, group, f in chosen]
    if not any(scores):
        return None
    n, sums = len(chosen), list(accumulate(scores, initial=0.0))
    steps: list[tuple[float, float, float, float, str, str]] = []
    rows, series = [], {}
    for k, (i, group, f) in enumerate(chosen):
        rows.append((f"W{i}", (group.name, f, number(scores[k]), _share(scores[k], sums[n]), number(sums[k + 1]))))
        steps.append((k, k + 1, sums[k], sums[k + 1], f, f"W{i}"))
        if scores[k]:
            weight = plan.by_name[group.layers[0]].weight
            series[f] = colours.get(weight.name if weight else None, _COLOURS[-1])
    ends = [("sum of the scores", "soft", sums[n])]
    if record is not None:
        ends.append(("measured together", "ink", record.chosen.kl_measured))
    for k, (name, colour, value) in enumerate(ends):
        rows.append((f"WX{k}", (name, "–", number(value), _share(value, sums[n]), number(value))))
        # These bars are wider than those of the groups, however many groups there are.
        steps.append((n * (1.03 + 0.075 * k), n * (1.085 + 0.075 * k), 0.0, value, name, f"WX{k}"))
        series[name] = colour
    ranked = sorted(zip(scores, chosen, strict=True), key=lambda item: -item[0])
    few = next((k for k in range(1, n) if sum(score for score, _ in ranked[:k]) >= 0.5 * sums[n]), n)
    score, (_, group, f) = ranked[0]
    text = f"{few} of {n} groups carry half of the predicted loss. The largest part, {_share(score, sums[n])}, is from "
    chart = {
        "kind": "waterfall",
        "x": "block, in model order",
        "y": record.unit if record else table.unit,
        "series": [*series.items()],
        "steps": steps,
        "groups": n,
        "ticks": [(k + 0.5, block) for k, block in _block_starts(group.name for _, group, _ in chosen)],
    }
    head = ("group", "format", "adds", "share", "up to here")
    return Section("Where the loss comes from", f"{text}{group.name} in {f}.", None, chart, head, rows)


def errors(report: Report) -> Section | None:
    """Signal to quantization noise of each layer, in model order."""
    shown = [(f"L{i}", m) for i, m in enumerate(report.layers) if m.format or len(m.shape) > 1]
    measured = [(m.snr_db, row, m.name) for row, m in shown if m.snr_db is not None]
    if not measured:
        return None
    # Where all layers share a format, its colour would say nothing: colours then stand for roles.
    formats = [name for name in format_colours(report) if name is not None]
    series = {row: m.name.rpartition(".")[2] if len(formats) == 1 else m.format for row, m in shown if m.format}
    names = list(dict.fromkeys(series.values())) if len(formats) == 1 else formats
    if len(names) > len(_COLOURS):
        series = {row: name if name in names[: len(_COLOURS) - 1] else "other" for row, name in series.items()}
        names = [*names[: len(_COLOURS) - 1], "other"]
    kept = {"16 bit, no error": "kept"} if len(series) < len(shown) else {}
    worst, row, name = min(measured, key=lambda item: item[0])
    middle, best = statistics.median(snr for snr, *_ in measured), max(measured)[0]
    blocks = _block_starts(m.name for _, m in shown)
    chart = {
        "kind": "dots",
        "pad": 0.5,  # dB, so that small differences do not fill the plot
        "x": f"{'block' if blocks else 'layers'}, in model order",
        "y": "signal to quantization noise (dB), higher is better",
        "series": [*{**_colours(names), **kept}.items()],
        # A layer in 16 bit stands at the bottom, one without any error at the top.
        "points": [
            (i, (math.inf if m.snr_db is None else m.snr_db) if m.format else None, series.get(row, *kept), row)
            for i, (row, m) in enumerate(shown)
        ],
        "ticks": blocks,
    }
    text = "10 dB is an error of 32% of the weight’s norm, 20 dB of 10%, 30 dB of 3.2%. Median "
    text += f"{middle:.1f} dB, best {best:.1f} dB, worst {worst:.1f} dB:"
    return Section("Error by layer", text, (row, name), chart)


def receipt(record: Receipt) -> list[Section]:
    """Whether each stage of an export computes what the model does, layer by layer; then the audit of the engine."""
    names = [m.name for m in record.layers if not m.passed] + [entry.name for entry in record.audit if not entry.passed]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    text = f"These layers failed: {', '.join(dict.fromkeys(names[:6]))}{more}. " if names else ""
    ran = {key: name for key, name in _STAGES.items() if any(getattr(m, key) is not None for m in record.layers)}
    chart, rows = None, []
    if ran:
        deviations = [{key: v for key in ran if (v := getattr(m, key)) is not None} for m in record.layers]
        largest = [max(stages.values(), default=0.0) for stages in deviations]
        for i, layer in enumerate(record.layers):
            cells = (number(deviations[i].get(key)) for key in ran)
            rows.append((f"E{i}", (layer.name, _verdict(layer.passed), *cells)))
        worst = max(range(len(rows)), key=largest.__getitem__)
        text += (
            "The layer in PyTorch is compared with the textbook in float64; the stored weight and the exported nodes "
            f"are compared with the layer. {largest.count(0)} of {len(rows)} layers agree exactly at every stage. The "
            f"largest deviation is {number(largest[worst])}, in {record.layers[worst].name}."
        )
        if missing := [name for key, name in _STAGES.items() if key not in ran]:
            text += f" Not run: {', '.join(missing)}."
        chart = {
            "kind": "dots",
            "log": True,
            "column": True,
            "x": "layers, in model order",
            "y": "relative deviation (logarithmic, exact agreement at the bottom)",
            "series": _series(*ran.values()),
            "points": [(i, v, ran[key], f"E{i}") for i, stages in enumerate(deviations) for key, v in stages.items()],
            "ticks": [],
        }
    rows.sort(key=lambda row: row[1][1] == _verdict(True))  # failures first
    found = [Section("Export receipt", text, None, chart, ("layer", "verdict", *ran.values()), rows, record.passed)]
    if audit := sorted(enumerate(record.audit), key=lambda item: item[1].passed):
        native = sum(entry.passed for _, entry in audit)
        text = f"{native} of {len(audit)} layers run in the engine as planned."
        rows = [(f"A{i}", (a.name, _verdict(a.passed), a.planned, a.found)) for i, a in audit]
        head = ("layer", "verdict", "planned", "found")
        found.append(Section("Engine audit", text, head=head, rows=rows, verdict=native == len(audit)))
    return found


def _series(*names: str) -> list[tuple[str, str]]:
    return [*_colours(names).items()]


def _colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, the last colour for all names after it."""
    return {name: _COLOURS[min(i, len(_COLOURS) - 1)] for i, name in enumerate(names)}


def _place(name: str) -> tuple[str, int | None]:
    """Role of a group in its block, and the block's number: the name with its first number replaced by a star."""
    found = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
    return (f"{name[: found.start()]}*{name[found.end() :]}", int(found.group())) if found else (name, None)


def _short(role: str) -> str:
    """`model.layers.*.self_attn.(q_proj|k_proj)` -> `q/k`."""
    tail = re.search(r"\(.*\)$", role)
    last = tail.group()[1:-1] if tail else role.rpartition(".")[2]
    return "/".join(part.rpartition(".")[2].removesuffix("_proj") for part in last.split("|"))


def _block_starts(names: Iterable[str]) -> list[tuple[int, int]]:
    """Where each block of the model begins, as (position, block number)."""
    first: dict[int, int] = {}
    for position, name in enumerate(names):
        if (block := _place(name)[1]) is not None:
            first.setdefault(block, position)
    return [(position, block) for block, position in first.items()]


def _verdict(passed: bool) -> str:
    return "✓" if passed else "✗ failed"


def _off(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.1%}" if predicted > 0 else "–"


def _share(value: float, total: float) -> str:
    return f"{value / total:.1%}" if total else "–"
