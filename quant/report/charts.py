"""Charts of an allocation (size, rounds, sensitivity), and of the model (loss, bytes, memory, errors, export).

A `Section` is one section of the report's page: sentences, the data of a chart, and the table of its values.
`report.js` draws a chart by its `kind`, with Observable Plot. Every point, bar and cell names a row of a table, and the
text that hovers over it is read from that row, so each value is on the page once, as text.

Series have the colours c0 to c6, and `kept` for 16 bit. No chart depends on colour alone: each colour has a symbol of
its own, heat is a ramp of one hue, and chosen cells have a ring.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.base.errors import megabytes
from quant.calibration.allocation.goal import AllocationRecord, Budget, BudgetKind
from quant.calibration.layer_result import LayerResult
from quant.calibration.sensitivity.costs import memory_of
from quant.calibration.sensitivity.table import GroupScores, Sensitivity, parse_candidates
from quant.evaluation.evaluation import Evaluation, Examples
from quant.recipes.plan import Plan
from quant.recipes.plan_check import first_problem
from quant.recipes.recipe import KEEP
from quant.report.summary import cache_flag, verified_text

if TYPE_CHECKING:
    from quant.report.report import KVCache, Receipt, Report


COLOURS = [f"c{i}" for i in range(7)]  # further series share the last one


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    title: str
    text: str = ""  # sentences above the chart
    link: tuple[str, str] | None = None  # row and text of a link after `text`
    # What `report.js` draws, with its `kind` and the captions `x` and `y` of its axes.
    chart: Mapping[str, Any] | None = None
    head: Sequence[str] = ()  # names of the columns
    rows: Sequence[tuple[str, Sequence[str]]] = ()  # id and cells
    verdict: bool | None = None  # whether a check passed; None where nothing was checked
    folded: bool | None = None  # None folds a table of more than eight rows


def number(value: float | None) -> str:
    """Formats a number with four significant digits, or as a dash."""
    return "–" if value is None else f"{value:.4g}"


def short_name(name: str | None) -> str:
    """Returns the name of a model or text without its folders, which a page that is passed on need not tell."""
    if name is None:
        return "–"
    # A model of the hub, org/name, is no path; neither are the sources hf:org/name.
    is_path = name.startswith(("/", "~", ".")) or "\\" in name or name.count("/") > 1 or Path(name).suffix != ""
    return (re.split(r"[/\\]", name.rstrip("/\\"))[-1] or name) if is_path else name


def format_colours(report: Report) -> dict[str | None, str]:
    """Returns the colours of the weight formats in use, fewest bits first; then `kept` for None, which is 16 bit."""
    # Ties by name: the colour of a format must not depend on the order of layers.
    bits = {layer.format: layer.bits for layer in report.layers if layer.format is not None}
    colours: dict[str | None, str] = {}
    colours.update(colours_of(sorted(bits, key=lambda name: (bits[name], name))))
    return {**colours, None: "kept"}


def coloured(*names: str) -> list[tuple[str, str]]:
    """Pairs of name and colour, as `report.js` takes them."""
    return [*colours_of(names).items()]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each name, the last colour for all names after it."""
    return {name: COLOURS[min(i, len(COLOURS) - 1)] for i, name in enumerate(names)}


def role_and_block(name: str) -> tuple[str, int | None]:
    """Splits a group's name into its role, with the first number replaced by a star, and that number, its block."""
    # The first number alone: `layers.3.experts.7` is expert 7 in each of the blocks.
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
    return (f"{name[: match.start()]}*{name[match.end() :]}", int(match.group())) if match else (name, None)


def block_starts(names: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the first position of each block of the model in a list of layer names, as (position, block number)."""
    first: dict[int, int] = {}
    for position, name in enumerate(names):
        if (block := role_and_block(name)[1]) is not None:
            first.setdefault(block, position)
    return [(position, block) for block, position in first.items()]


# What the scores alone say of an allocation; a round predicts it times what the rounds before have measured.
_SUM = "sum of the scores"
_candidates = cache(parse_candidates)


def pareto(record: AllocationRecord) -> Section:
    """Charts loss against size: sums of scores as a curve, the measured points, single formats and the chosen point."""
    chosen, budget = record.chosen, record.budget
    single, best = "one format for all, measured", "chosen, measured"
    points: list[tuple[str, str, float, float | None, float | None, str]] = [
        (f"P{i}", "allocated", p.bits, p.kl_predicted, p.kl_measured, "measured") for i, p in enumerate(record.curve)
    ]
    uniform = sorted(record.uniform, key=lambda u: u.bits)
    points += [(f"U{i}", f"all in {u.name}", u.bits, None, u.kl, single) for i, u in enumerate(uniform)]
    # Row ids are anchors in the page: the chart's points refer to rows of the table by them.
    points.append(("PX", "chosen", chosen.bits, chosen.kl_predicted, chosen.kl_measured, best))
    fitting = [u for u in uniform if u.bits <= chosen.bits + 1e-9]
    text = f"Asked for {budget_text(budget)}; chosen {chosen.bits:.3f} bits a weight, measured "
    text += f"{number(chosen.kl_measured)}. "
    if record.measured_with:
        text += f"Losses are those of {record.measured_with}; the solvers of the plan lose less. "
    if fitting:
        rival = min(fitting, key=lambda u: u.kl)
        text += f"The best single format that is no larger, {rival.name}, measures {number(rival.kl)}"
        # A format that changes nothing has a loss of zero, or below it by rounding: no share of it says anything.
        ratio = f"; the chosen allocation has {chosen.kl_measured / rival.kl:.2f} of that loss" if rival.kl > 0 else ""
        text += f"{ratio}."
    else:
        text += "No single format is as small."
    text += "".join(f" Verified: {verified_text(record, each)}." for each in record.verified)
    chart = {
        "kind": "dots",
        "log": True,
        "x": "bits per weight, scales and padding counted",
        "y": f"{record.unit} (logarithmic, zero at the bottom), lower is better",
        "series": coloured(_SUM, "measured", single, best),
        "points": [(p.bits, p.kl_predicted, _SUM, f"P{i}") for i, p in enumerate(record.curve)]
        + [(bits, measured, series, row) for row, _, bits, _, measured, series in points if measured is not None],
        "labels": sorted([*((u.bits, u.kl, u.name) for u in uniform), (chosen.bits, chosen.kl_measured, "chosen")]),
        "curve": [(p.bits, p.kl_predicted) for p in record.curve if p.kl_predicted > 0],
        # A line across the chart; budgets in bytes and seconds have no axis here.
        "limit": {BudgetKind.BITS: {"x": budget.value}, BudgetKind.KL: {"y": budget.value}}.get(budget.kind),
    }
    rows = [(row, (name, f"{bits:.3f}", number(p), number(m))) for row, name, bits, p, m, _ in points]
    return Section("Size against loss", text, None, chart, ("allocation", "bits", _SUM, "measured"), rows)


def budget_text(budget: Budget) -> str:
    """Returns the budget in words: '4.8 bits', 'KL ≤ 0.05'."""
    return {
        BudgetKind.BITS: f"{budget.value:g} bits",
        BudgetKind.BYTES: megabytes(budget.value),
        BudgetKind.SECONDS: f"{1000 * budget.value:g} ms",
        BudgetKind.KL: f"KL ≤ {budget.value:g}",
        BudgetKind.PERPLEXITY: f"perplexity +{budget.value:.1%}",
        BudgetKind.TASK: f"right answers ≥ {budget.value:.1%} of the original's",
    }[budget.kind]


def rounds(record: AllocationRecord) -> Section | None:
    """Returns the prediction and the measurement of every round of the allocation loop."""
    rows = []
    for i, turn in enumerate(record.rounds):
        # The plan holds this round, unless a solver from data or a single format came after it.
        name = f"round {i + 1}{', chosen' if turn.measured == record.chosen.kl_measured else ''}"
        off = f"{turn.measured / turn.predicted - 1:+z.1%}" if turn.predicted > 0 else "–"
        figures = (f"{turn.bits:.3f}", number(turn.predicted), number(turn.measured), off)
        rows.append((f"R{i}", (name, *figures, str(len(turn.changed) or "–"))))
    text = (
        "The first prediction is the sum of the groups’ scores. Every round quantizes the model, measures it and "
        f"corrects the next prediction. All rounds took {record.seconds:.1f} s."
    )
    head = ("round", "bits", "predicted", "measured", "off by", "layers changed")
    return Section("Predicted and achieved", text, head=head, rows=rows) if rows else None


def heat_map(table: Sensitivity, plan: Plan) -> Section | None:
    """Draws a panel for each format, with a row for each place in a block and a column for each block."""
    formats = [name for name in table.formats if name != KEEP]
    cells, rows = [], []
    for i, group in enumerate(table.groups):
        role, block = role_and_block(group.name)
        # The plan may have been edited by hand since: it, and not the record, says which format was chosen.
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


def _short(role: str) -> str:
    """Shortens `model.layers.*.self_attn.(q_proj|k_proj)` to `q/k`."""
    tail = re.search(r"\(.*\)$", role)
    last = tail.group()[1:-1] if tail else role.rpartition(".")[2]
    return "/".join(part.rpartition(".")[2].removesuffix("_proj") for part in last.split("|"))


def chosen_format(group: GroupScores, plan: Plan) -> str | None:
    """Returns the column of the table that the plan chose for a group; None if no column matches the plan."""
    layer = plan.by_name.get(group.layers[0]) if group.layers else None
    if layer is None:
        return None
    if layer.weight is None:
        return KEEP if KEEP in group.scores else None
    # Columns are names that the user wrote, the plan holds formats: compare the formats.
    formats = (layer.weight, layer.activation)
    names = tuple(name for name in group.scores if name != KEEP)
    columns = _candidates(names) if names else ()
    return next((column.name for column in columns if (column.weight, column.activation) == formats), None)


def predictions(examples: Examples) -> Section | None:
    """Returns the predictions with the largest KL, in their context."""
    if not examples.predictions:
        return None
    several = len({each.text for each in examples.predictions}) > 1
    rows = []
    for i, each in enumerate(examples.predictions):
        cells = [f"…{_visible(each.context.lstrip(' '))}", number(each.kl), _visible(each.token)]
        cells += [f"{each.before:.2%}", f"{each.after:.2%}"]
        cells += [_visible(each.likeliest_before), _visible(each.likeliest_after)]
        rows.append((f"T{i}", (*cells, short_name(each.text)) if several else tuple(cells)))
    text = (
        "The next tokens whose prediction changed most, by KL. Before and after are the probabilities that the "
        "original and the quantized model give to the token that follows in the text."
    )
    head = ("context", "KL", "next token", "before", "after", "likeliest before", "likeliest after")
    return Section("Worst predictions", text, None, None, (*head, "text") if several else head, rows)


def continuation(examples: Examples) -> Section | None:
    """Returns a text that both models wrote."""
    if (written := examples.continuation) is None:
        return None
    same = written.before == written.after
    text = "Both models continue the beginning of the evaluation text by their likeliest tokens"
    text += ", and write the same." if same else "."
    rows = [("prompt", written.prompt), ("original", written.before), ("quantized", written.after)]
    cells = [(f"C{i}", (name, words)) for i, (name, words) in enumerate(rows)]
    return Section("Text before and after", text, None, None, ("model", "words"), cells)


def usage(report: Report, plan: Plan) -> Section | None:
    """Returns commands for the directory that the page lies in; None for a model that writes no text."""
    if report.kv_cache is None:
        return None
    trust = " --trust-remote-code" if "--trust-remote-code" in report.command else ""
    rows = [("try it", f'quant generate . --prompt "The capital of France is"{cache_flag(report, plan)}{trust}')]
    conv1d = next((f"{layer.name}: its weight is a Conv1D's" for layer in plan.quantized if layer.transposed), None)
    problem = conv1d or first_problem(plan, "vllm")
    if problem is None:
        cache = " --kv-cache-dtype fp8" if plan.kv_cache is not None else ""
        rows.append(("serve", f"vllm serve .{cache}{trust}"))
    rows.append(("check the files", f"quant check .{trust}"))
    text = "Commands for the directory of this page."
    if problem is not None:
        text += f" vLLM does not serve this plan: {problem}."
    return Section("Use it", text, None, None, ("purpose", "command"), [(f"D{i}", row) for i, row in enumerate(rows)])


def _visible(text: str) -> str:
    """Returns a token whose line breaks, tabs and leading blanks can be seen: the token " the" is not "the"."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    blanks = len(shown) - len(shown.lstrip(" "))
    return "␣" * blanks + shown[blanks:] or "∅"


_STAGES = {"fake_quant": "PyTorch", "checkpoint": "checkpoint", "onnx": "ONNX", "engine": "engine"}


def receipt(record: Receipt) -> list[Section]:
    """Charts deviations of each stage of an export from the model, layer by layer; then the audit of the engine."""
    names = [m.name for m in record.layers if not m.passed] + [entry.name for entry in record.audit if not entry.passed]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    # Failures go first; a reader should not have to look for them in a table of hundreds of layers.
    text = f"These layers failed: {', '.join(dict.fromkeys(names[:6]))}{more}. " if names else ""
    ran = {key: name for key, name in _STAGES.items() if any(getattr(m, key) is not None for m in record.layers)}
    # Stages that were not run have no column.
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
            "kind": "dots", "log": True, "column": True, "x": "layers, in model order",
            "y": "relative deviation (logarithmic, exact agreement at the bottom)", "series": coloured(*ran.values()),
            "points": [(i, v, ran[key], f"E{i}") for i, stages in enumerate(deviations) for key, v in stages.items()],
            "ticks": [],
        }  # fmt: skip
    rows.sort(key=lambda row: row[1][1] == _verdict(True))  # failures first
    charts = [Section("Export receipt", text, None, chart, ("layer", "verdict", *ran.values()), rows, record.passed)]
    if audit := sorted(enumerate(record.audit), key=lambda item: item[1].passed):
        native = sum(entry.passed for _, entry in audit)
        text = f"{native} of {len(audit)} checks passed: the precision in which a layer runs, and its tensors."
        rows = [(f"A{i}", (a.name, _verdict(a.passed), a.planned, a.found)) for i, a in audit]
        head = ("layer", "verdict", "planned", "found")
        charts.append(Section("Engine audit", text, head=head, rows=rows, verdict=native == len(audit)))
    return charts


def _verdict(passed: bool) -> str:
    return "✓" if passed else "✗ failed"


def texts(evaluation: Evaluation) -> Section | None:
    """Charts the figures on every text side by side; None where there is one text, which the tiles show."""
    if not evaluation.others:
        return None
    text = (
        "A solver that works from data fits its calibration text, and loses some of that on text of another kind. "
        "The interval holds the mean of all such text with a confidence of 95% (Student’s t over rows)."
    )
    lost = "1 − cosine" if evaluation.cosine is not None else "KL, nats"
    # The loss comes first, so that a phone shows it without scrolling.
    head = ("text", lost, "interval", "perplexity before", "perplexity", "top-1", "rows")
    rows = []
    for i, each in enumerate(evaluation.texts):
        interval = "–" if each.interval is None else f"{number(each.interval[0])} – {number(each.interval[1])}"
        figures = (number(each.loss), interval, number(each.baseline_perplexity), number(each.perplexity))
        top1 = "–" if each.top1 is None else f"{each.top1:.1%}"
        rows.append((f"Q{i}", (short_name(each.text), *figures, top1, str(each.rows or "–"))))
    return Section("Loss on each text", text, None, None, head, rows)


def sizes(report: Report, plan: Plan) -> Section:
    """Charts bytes by format, before and after on one scale."""
    # Fewest bits first, 16 bit last, in every chart.
    colours, order = format_colours(report), list(format_colours(report))
    groups: dict[tuple[str | None, str], list[LayerResult]] = {}
    for layer in report.layers:
        planned = plan.by_name.get(layer.name)
        # A tied weight is in the files once, under the name of its owner.
        if planned is None or planned.tied_to is None:
            kind = "" if layer.format else f"{layer.bits:g} bit, {planned.kind if planned else 'other'}"
            groups.setdefault((layer.format, kind), []).append(layer)
    bars = {"before": f"Before {megabytes(report.bytes_before)}", "after": f"After {megabytes(report.bytes_after)}"}
    # Files have headers besides, so the shares are those of the weights.
    parts, rows, series, total = [], [], {}, sum(layer.nbytes for each in groups.values() for layer in each)
    for i, (format, kind) in enumerate(sorted(groups, key=lambda key: (order.index(key[0]), key[1]))):
        members, name = groups[format, kind], format or kind
        weights = sum(math.prod(layer.shape) for layer in members)
        # Quantized weights had 2 bytes each; a tied layer has no bytes and is counted where its weight is.
        before = sum(2 * math.prod(layer.shape) if layer.format else layer.nbytes for layer in members if layer.nbytes)
        size = {"before": before, "after": sum(layer.nbytes for layer in members)}
        parts += [(bar, size[bar], format or "not quantized", f"B{i}") for bar in bars]
        series[format or "not quantized"] = colours[format]
        cells = (f"{weights:,}", f"{8 * size['after'] / weights:.3f}", *(megabytes(size[bar]) for bar in bars))
        share = f"{size['after'] / max(total, 1):.1%}"
        rows.append((f"B{i}", (name, str(len(members)), *cells, share)))
    chart = {"kind": "bars", "bars": [*bars.items()], "series": [*series.items()], "parts": parts}
    head = ("format", "layers", "weights", "bits", "before", "after", "share")
    return Section("Bytes by format", chart=chart, head=head, rows=rows)


def memory(plan: Plan, kv_cache: KVCache | None) -> Section | None:
    """Charts the bytes of the weights by part, and their size compared with the KV cache if its size is known."""
    weights = memory_of(plan)
    if not weights.total:
        return None
    sizes = {"quantized codes": weights.codes, "scales": weights.scales}
    sizes |= {"embeddings and head": weights.embeddings, "16-bit rest": weights.rest}
    parts = [("weights", size, name) for name, size in sizes.items() if size]
    bars = {"weights": f"Weights {megabytes(weights.total)}"}
    text = "Activations, and a KV cache if the model has one, take memory as well."
    # A second bar, since a long context's cache may be many times as large as the weights.
    if kv_cache is not None:
        cache_name = f"KV cache, {kv_cache.batch} × {kv_cache.context:,} tokens"
        parts += [("both", weights.total, "all weights"), ("both", kv_cache.nbytes, cache_name)]
        bars["both"] = f"With the KV cache {megabytes(weights.total + kv_cache.nbytes)}"
        text = "Both bars are drawn at full width; their totals differ."
    ratios = [size / weights.total for _, size, _ in parts]
    rows = [
        (f"M{i}", (name, megabytes(size), f"{size:,}", f"{ratio:.1%}" if ratio <= 1 else f"{ratio:.1f} ×"))
        for i, ((_, size, name), ratio) in enumerate(zip(parts, ratios, strict=True))
    ]
    chart = {
        "kind": "bars", "whole": True, "bars": [*bars.items()], "series": coloured(*(name for *_, name in parts)),
        "parts": [(*part, f"M{i}") for i, part in enumerate(parts)],
    }  # fmt: skip
    return Section("Memory", text, None, chart, ("part", "size", "bytes", "of the weights"), rows)


def errors(report: Report) -> Section | None:
    """Charts the relative error of each layer in model order, of its output where that was measured, or its weight."""
    shown = [(f"L{i}", m) for i, m in enumerate(report.layers) if m.format or len(m.shape) > 1]
    of_outputs = any(m.output_error is not None for _, m in shown)
    error = {row: m.output_error if of_outputs else m.relative_error for row, m in shown if m.format}
    measured = [(value, row, m.name) for row, m in shown if (value := error.get(row)) is not None]
    if not measured:
        return None
    # Where all layers share a format, colours stand for roles instead.
    formats = [name for name in format_colours(report) if name is not None]
    series = {row: m.name.rpartition(".")[2] if len(formats) == 1 else m.format for row, m in shown if m.format}
    names = list(dict.fromkeys(series.values())) if len(formats) == 1 else formats
    if len(names) > len(COLOURS):
        series = {row: name if name in names[: len(COLOURS) - 1] else "other" for row, name in series.items()}
        names = [*names[: len(COLOURS) - 1], "other"]
    in_16_bit = {"16 bit, no error": "kept"} if len(series) < len(shown) else {}
    worst, row, name = max(measured, key=lambda item: item[0])
    values = [value for value, *_ in measured]
    blocks = block_starts(m.name for _, m in shown)
    chart = {
        "kind": "dots",
        "log": True,
        "x": f"{'block' if blocks else 'layers'}, in model order",
        "y": f"relative error of the {'output' if of_outputs else 'weight'} (logarithmic, zero below), lower is better",
        "series": [*{**colours_of(names), **in_16_bit}.items()],
        # A layer without a measured error has no point; one in 16 bit stands at the bottom.
        "points": [
            (i, error[row] if m.format else 0.0, series.get(row, *in_16_bit), row)
            for i, (row, m) in enumerate(shown)
            if not m.format or error[row] is not None
        ],
        "ticks": blocks,
    }
    if of_outputs:
        text = (
            "The output of each layer on a row of the evaluation text, compared with the same layer of the original "
            "model. Its inputs differ too, by the layers before it."
        )
    else:
        why = "no evaluation text was given on which outputs could be compared"
        if report.evaluation is not None:
            why = "outputs are compared on tokens, unless merged scales or rotations change those of other layers"
        text = (
            f"The error of each weight by itself, since {why}. Solvers that work from text move weights on purpose, "
            "and have larger errors here than rounding."
        )
    text += f" Median {statistics.median(values):.2%}, best {min(values):.2%}, worst {worst:.2%}:"
    return Section("Error by layer", text, (row, name), chart)
