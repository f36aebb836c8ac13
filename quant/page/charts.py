"""Charts of the report: inline SVG and HTML, each with the table of its values behind it.

Positions are percentages of the plot, so charts stretch with the page while text and marks keep their size; axis
labels are HTML beside them. What hovers over a mark is read from the row of the table that it names, so that every
value is on the page once, in text. Lines are single segments, because polylines take no percentages.

No chart depends on colour alone: series have marks of their own shape, heat is a ramp of one hue from light to dark
(or dark to light, in the dark), and chosen cells wear a ring.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from typing import Any

from quant.allocation_record import AllocationRecord, Budget
from quant.calibration.sensitivity.candidates import Candidate, parse_candidates
from quant.calibration.sensitivity.costs import memory_of
from quant.calibration.sensitivity.table import GroupScores, Sensitivity
from quant.errors import megabytes
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP
from quant.report import KVCache, Receipt


@dataclass(frozen=True)
class Axis:
    """Limits and ticks of one axis; places values on it.

    Attributes:
        low, high: ends.
        ticks: where labels stand.
        log: whether it is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` stands: 0 at the low end, 1 at the high one, and no further."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear(values: Sequence[float], *, least: float = 0.0, zero: bool = False) -> Axis:
    """An axis around `values` with about five round ticks.

    Args:
        values: at least one.
        least: the least span, so that noise does not fill the plot.
        zero: starts at zero if no value is below it.
    """
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    span = (max(high - low, least) or abs(high) or 1.0) * 1.15
    step = next(s for e in range(-9, 10) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if span / s <= 7)
    bottom, top = math.floor((low - 0.05 * span) / step), math.ceil((high + 0.05 * span) / step)
    if zero:
        bottom = max(bottom, 0) if low >= 0 else bottom
    return Axis(bottom * step, top * step, tuple(i * step for i in range(bottom, top + 1)))


def logarithmic(values: Sequence[float]) -> Axis:
    """An axis around the positive ones of `values`, with ticks at 1, 2 and 5 times powers of ten, at most seven."""
    positive = [v for v in values if v > 0] or [1.0]
    low, high = min(positive) / 1.3, max(positive) * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low < 5:
        return Axis(low, high, tuple(t for t in linear([low, high]).ticks if low <= t <= high), log=True)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in decades for f in factors if low <= f * 10.0**e <= high]
        if len(ticks) <= 7:
            break
    else:
        ticks = ticks[:: math.ceil(len(ticks) / 7)]
    return Axis(low, high, tuple(ticks), log=True)


def mark(css: str, x: float, y: float, row: str) -> str:
    """One mark at fractions `x` from the left and `y` from the top, whose values are in the table row `row`."""
    return (
        f'<use class="{css}" href="#mark-{css}" x="{100 * x:.2f}%" y="{100 * y:.2f}%" '
        f'data-i="{row}" data-x="{x:.4f}" data-y="{y:.4f}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str = "") -> str:
    """One segment between two points, in fractions of the plot."""
    ends = zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True)
    return f'<line class="{css}" {" ".join(f"{name}={100 * v:.2f}%" for name, v in ends)} />'


def plot(
    drawn: str,
    y: Axis,
    label: str,
    *,
    xticks: Iterable[tuple[float, Any]],
    above: str,
    below: str,
    by_column: bool = False,
) -> str:
    """A plot with its axes.

    Args:
        drawn: marks, lines and bars.
        y: vertical axis.
        label: what the plot shows, for those who do not see it.
        xticks: (fraction, text).
        above, below: what the axes show.
        by_column: the pointer finds marks by their column alone.
    """
    heights = [(f"{100 * (1 - y.at(t)):.2f}%", _tick(t)) for t in y.ticks]
    grid = "".join(f'<line x2="100%" y1="{height}" y2="{height}"/>' for height, _ in heights)
    ylabels = "".join(f'<span style="top:{height}">{text}</span>' for height, text in heights)
    xlabels = "".join(f'<span style="left:{100 * x:.2f}%">{escape(str(text))}</span>' for x, text in xticks)
    return (
        f"<p class=axis>{escape(above)}</p><div class=plot><div class=yaxis>{ylabels}</div><div class=field>"
        f'<svg class=canvas role=img{" data-by=column" if by_column else ""} aria-label="{escape(label)}">'
        f"<g class=grid>{grid}</g>{drawn}</svg></div><div class=xaxis>{xlabels}</div></div>"
        f"<p class='axis right'>{escape(below)}</p>"
    )


def _tick(value: float) -> str:
    """A round number, short enough for the margin."""
    if value and abs(value) < 0.01:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:g}"


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """Marks and what they stand for; `keys` are (CSS class, text)."""
    items = "".join(
        f'<li><svg class="{css}"><use href="#mark-{css}" x="8" y="{13 if css == "kept" else 8}"/></svg>{escape(n)}</li>'
        for css, n in keys
    )
    return f"<ul class=legend>{items}</ul>"


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]], *, folded: bool = True) -> str:
    """The values behind a chart: rows of (id, cells), the first cell a name. Folded away unless they are few."""
    rows = list(rows)
    wide = [i > 0 and any(len(str(cells[i])) > 30 for _, cells in rows) for i in range(len(head))]
    heads = "".join(f"<th scope=col{_long(wide[i])}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        f'<tr id="{row}"><td class=what>{_breakable(cells[0])}</td>'
        f"{''.join(f'<td{_long(wide[i])}>{escape(str(c))}</td>' for i, c in enumerate(cells) if i)}</tr>"
        for row, cells in rows
    )
    whole = f"<div class=scroll><table class=values><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<details class=data><summary>Values as a table</summary>{whole}</details>" if folded else whole


def _long(wide: bool) -> str:
    return " class=long" if wide else ""


def _breakable(name: object) -> str:
    return escape(str(name)).replace(".", ".<wbr>").replace("|", "|<wbr>")


def number(value: float | None) -> str:
    """Four significant digits, or a dash."""
    return "–" if value is None else f"{value:.4g}"


def budget_text(budget: Budget) -> str:
    """What was asked for: '4.8 bits', 'KL ≤ 0.05'."""
    texts: dict[str, Callable[[float], str]] = {
        "bits": lambda v: f"{v:g} bits",
        "bytes": lambda v: megabytes(v),
        "seconds": lambda v: f"{1000 * v:g} ms",
        "kl": lambda v: f"KL ≤ {v:g}",
        "perplexity": lambda v: f"perplexity +{v:.1%}",
    }
    return texts[budget.kind](budget.value) if budget.kind in texts else f"{budget.kind} {budget.value:g}"


# Allocation


def pareto(record: AllocationRecord) -> str:
    """Loss against size: the predicted curve, what was measured, the uniform formats and the chosen point."""
    chosen = record.chosen
    curve = [(p.bits, p.kl_predicted, p.kl_measured) for p in record.curve]
    sizes = [b for b, *_ in curve] + [u.bits for u in record.uniform] + [chosen.bits]
    low, high = min(sizes) - 0.6, max(sizes) + 0.4
    x = Axis(low, high, tuple(t for t in linear(sizes).ticks if low <= t <= high))
    losses = [v for _, predicted, measured in curve for v in (predicted, measured) if v is not None]
    y = logarithmic([*losses, *(u.kl for u in record.uniform), chosen.kl_measured, chosen.kl_predicted])

    def place(bits: float, loss: float) -> tuple[float, float]:
        return x.at(bits), 1 - y.at(loss)

    path = [place(bits, predicted) for bits, predicted, _ in curve if predicted > 0]
    lines = [line(*a, *b, css="curve c0") for a, b in pairwise(path)]
    if record.budget.kind == "bits" and low <= record.budget.value <= high:
        lines.append(line(x.at(record.budget.value), 0, x.at(record.budget.value), 1, css="limit"))
    elif record.budget.kind == "kl":
        lines.append(line(0, 1 - y.at(record.budget.value), 1, 1 - y.at(record.budget.value), css="limit"))
    drawn: list[str] = []
    rows: list[tuple[str, Sequence[Any]]] = []
    named = []
    for i, (bits, predicted, measured) in enumerate(curve):
        rows.append((f"P{i}", ("allocated", f"{bits:.3f}", number(predicted), number(measured))))
        if predicted > 0:
            drawn.append(mark("c0", *place(bits, predicted), f"P{i}"))
        if measured is not None and measured > 0:
            drawn.append(mark("c1", *place(bits, measured), f"P{i}"))
    for i, uniform in enumerate(sorted(record.uniform, key=lambda u: u.bits)):
        rows.append((f"U{i}", (f"all in {uniform.name}", f"{uniform.bits:.3f}", "–", number(uniform.kl))))
        if uniform.kl > 0:
            at = place(uniform.bits, uniform.kl)
            drawn.append(mark("c2", *at, f"U{i}"))
            named.append((uniform.name, *at))
    rows.append(("PX", ("chosen", f"{chosen.bits:.3f}", number(chosen.kl_predicted), number(chosen.kl_measured))))
    at = place(chosen.bits, chosen.kl_measured)
    drawn.append(mark("c3", *at, "PX"))
    named.append(("chosen", *at))
    keys = [("c0", "predicted: sum of the scores"), ("c1", "measured"), ("c2", "one format for all, measured")]
    text = (
        f"Asked for {budget_text(record.budget)}; chosen {chosen.bits:.3f} bits a weight, measured "
        f"{number(chosen.kl_measured)}. {_against_uniform(record)}"
    )
    return (
        f"<p>{escape(text)}</p>{legend([*keys, ('c3', 'chosen, measured')])}"
        + plot(
            "".join(lines + _labels(named) + drawn),
            y,
            "Loss against bits per weight: allocated, uniform and chosen",
            xticks=[(x.at(t), f"{t:g}") for t in x.ticks],
            above=f"{record.unit} (logarithmic), lower is better",
            below="bits per weight, scales and padding counted",
        )
        + table(("allocation", "bits", "predicted", "measured"), rows)
    )


def _labels(named: Sequence[tuple[str, float, float]]) -> list[str]:
    """Names beside points of a falling curve: above it, where it leaves room, but below where another name is."""
    above: list[tuple[float, float]] = []
    found = []
    for text, x, y in named:
        up = not any(abs(x - u) < 0.16 and abs(y - v) < 0.06 for u, v in above)
        if up:
            above.append((x, y))
        found.append(_label(text, x, y, up=up))
    return found


def _label(text: str, x: float, y: float, *, up: bool) -> str:
    anchor, dx = ("end", -9) if x > 0.6 else ("start", 9)
    return (
        f'<text x="{100 * x:.2f}%" y="{100 * y:.2f}%" dx="{dx}" dy="{-5 if up else 14}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _against_uniform(record: AllocationRecord) -> str:
    """The best single format that is no larger, beside the chosen allocation."""
    fitting = [u for u in record.uniform if u.bits <= record.chosen.bits + 1e-9 and u.kl > 0]
    if not fitting:
        return "No single format is as small."
    best = min(fitting, key=lambda u: u.kl)
    ratio = record.chosen.kl_measured / best.kl
    found = f"The best single format that is no larger, {best.name}, measures {number(best.kl)}"
    return f"{found}; the choice loses {ratio:.2f} of that."


def _by_parent(names: Sequence[str]) -> str:
    """Layer names without what all share, those of one module together: `5.self_attn.(q_proj, k_proj), 6.mlp.up`."""
    shared = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".") + "."
    parents: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.removeprefix(shared).rpartition(".")
        parents.setdefault(parent, []).append(last)
    together = {p: lasts[0] if len(lasts) == 1 else f"({', '.join(lasts)})" for p, lasts in parents.items()}
    return ", ".join(f"{parent}.{last}".lstrip(".") for parent, last in together.items())


def rounds(record: AllocationRecord) -> str:
    """What each turn of the loop expected and found."""
    if not record.rounds:
        return ""
    limit = [record.budget.value] if record.budget.kind == "kl" else []
    y = linear([v for r in record.rounds for v in (r.predicted, r.measured)] + limit, zero=True)
    drawn, rows, ticks = [], [], []
    before: float | None = None
    kept = next((i for i, r in enumerate(record.rounds) if r.measured == record.chosen.kl_measured), None)
    for i, turn in enumerate(record.rounds):
        x = (i + 0.5) / len(record.rounds)
        predicted, measured = 1 - y.at(turn.predicted), 1 - y.at(turn.measured)
        drawn += [line(x, predicted, x, measured, css="gap"), mark("c0", x, predicted, f"R{i}")]
        drawn.append(mark("c3" if i == kept else "c1", x, measured, f"R{i}"))
        off = f"{turn.measured / turn.predicted - 1:+.1%}" if turn.predicted > 0 else "–"
        change = "–" if before is None else f"{turn.measured - before:+.3g}"
        changed = f"{len(turn.changed)}: {_by_parent(turn.changed)}" if turn.changed else "–"
        name = f"round {i + 1}{', chosen' if i == kept else ''}"
        rows.append(
            (f"R{i}", (name, f"{turn.bits:.3f}", number(turn.predicted), number(turn.measured), off, change, changed))
        )
        if len(record.rounds) <= 10 or i % math.ceil(len(record.rounds) / 10) == 0:
            ticks.append((x, i + 1))
        before = turn.measured
    if limit:
        drawn.append(line(0, 1 - y.at(limit[0]), 1, 1 - y.at(limit[0]), css="limit"))
    chosen = record.chosen
    off = f", {chosen.kl_measured / chosen.kl_predicted - 1:+.1%} from it" if chosen.kl_predicted > 0 else ""
    which = f"round {kept + 1} of {len(record.rounds)}" if kept is not None else "none of these rounds"
    text = (
        "Scores of single groups are added up to predict what all of them do together; every round is then quantized "
        "for real and measured, and says what the next one should change. The plan holds the outcome of "
        f"{which}: the scores predict {number(chosen.kl_predicted)}, measured is {number(chosen.kl_measured)}{off}. "
        f"All rounds took {record.seconds:.1f} s."
    )
    return (
        f"<p>{escape(text)}</p>{legend([('c0', 'predicted'), ('c1', 'measured'), ('c3', 'measured, and chosen')])}"
        + plot(
            "".join(drawn),
            y,
            "Predicted and measured loss of each round",
            xticks=ticks,
            above=record.unit,
            below="round" + (", dashed: the limit asked for" if limit else ""),
            by_column=True,
        )
        + table(
            ("round", "bits", "predicted", "measured", "off by", "change", "layers changed"),
            rows,
            folded=len(rows) > 6,
        )
    )


# Sensitivity


def chosen_format(group: GroupScores, plan: Plan) -> str | None:
    """The column of the table that the plan chose for a group; None where it is not among them."""
    layer = plan.by_name.get(group.layers[0]) if group.layers else None
    if layer is None:
        return None
    if layer.weight is None:
        return KEEP if KEEP in group.scores else None
    formats = (layer.weight, layer.activation)
    names = [name for name in group.scores if name != KEEP]
    return next((c.name for c in _candidates(tuple(names)) if (c.weight, c.activation) == formats), None)


@cache
def _candidates(names: tuple[str, ...]) -> tuple[Candidate, ...]:
    return parse_candidates(names) if names else ()


def heat_map(sensitivity: Sensitivity, plan: Plan) -> str:
    """A panel for each format; a row for each place in a block, a column for each block."""
    formats = [name for name in sensitivity.formats if name != KEEP]
    scores = [group.scores[f] for group in sensitivity.groups for f in formats if group.scores.get(f, 0) > 0]
    if not scores:
        return ""
    low, high = math.log10(min(scores)), math.log10(max(scores))
    places = [_place(group.name) for group in sensitivity.groups]
    roles = list(dict.fromkeys(role for role, _ in places))
    blocks = sorted({block for _, block in places if block is not None})
    column = {block: i + 2 for i, block in enumerate(blocks)}
    panels = []
    for f in formats:
        cells = []
        for i, (group, (role, block)) in enumerate(zip(sensitivity.groups, places, strict=True)):
            score = group.scores.get(f)
            if score is None:
                continue
            heat = (math.log10(score) - low) / ((high - low) or 1.0) if score > 0 else 0.0
            ring = " class=chosen" if chosen_format(group, plan) == f else ""
            span = f"{column[block]}" if block is not None else f"2/{len(blocks) + 2}"
            cells.append(
                f'<i{ring} data-i="S{i}" data-value="{score:.6g}" '
                f'style="grid-area:{roles.index(role) + 1}/{span};--heat:{100 * heat:.1f}%"></i>'
            )
        names = "".join(
            f'<span style="grid-area:{i + 1}/1">{escape(_short(role))}</span>' for i, role in enumerate(roles)
        )
        count = sum(chosen_format(group, plan) == f for group in sensitivity.groups)
        panels.append(
            f"<h3>{escape(f)} <small>chosen for {count} of {len(sensitivity.groups)} groups</small></h3>"
            f'<div class=heat role=img aria-label="Score of every group in {escape(f)}; values in the table below" '
            f'style="grid-template-columns:auto repeat({max(len(blocks), 1)},minmax(2px,1fr))">'
            f"{names}{''.join(cells)}</div>"
        )
    head = ("group", "weights", *formats, "chosen")
    rows = [
        (
            f"S{i}",
            (
                group.name,
                f"{group.numel:,}",
                *(number(group.scores.get(f)) for f in formats),
                chosen_format(group, plan) or "–",
            ),
        )
        for i, group in enumerate(sensitivity.groups)
    ]
    worst = max(sensitivity.groups, key=lambda g: g.scores.get(formats[0], 0.0))
    text = (
        f"Method {sensitivity.method} over {sensitivity.rows} rows of {sensitivity.seqlen} tokens: {sensitivity.unit}. "
        f"Most sensitive to {formats[0]}: {worst.name}, {number(worst.scores.get(formats[0]))}."
    )
    blocks_text = f"left to right: blocks {blocks[0]} to {blocks[-1]}. " if len(blocks) > 1 else ""
    ramp = (
        f"<p class=scale><span>{10**low:.2g}</span><i></i><span>{10**high:.2g}</span>"
        f"<span>{blocks_text}Ringed: the plan’s choice.</span></p>"
    )
    return f"<p>{escape(text)}</p>{ramp}{''.join(panels)}{table(head, rows)}"


def _place(name: str) -> tuple[str, int | None]:
    """Role of a group in its block, and the block's number: its name with the first number taken out."""
    found = re.search(r"(?<=\.)\d+(?=\.|$)", name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}*{name[found.end() :]}", int(found.group())


def _short(role: str) -> str:
    """`model.layers.*.self_attn.(q_proj|k_proj)` -> `q/k`."""
    tail = re.search(r"\(.*\)$", role)
    last = tail.group()[1:-1] if tail else role.rpartition(".")[2]
    return "/".join(part.rpartition(".")[2].removesuffix("_proj") for part in last.split("|"))


def waterfall(
    sensitivity: Sensitivity, plan: Plan, record: AllocationRecord | None, colour: Callable[[str], str]
) -> str:
    """What each group adds to the predicted loss, in model order, up to the sum and what was measured."""
    steps = []
    for i, group in enumerate(sensitivity.groups):
        f = chosen_format(group, plan)
        if f is not None:
            steps.append((i, group, f, group.scores[f]))
    total = sum(score for *_, score in steps)
    if not steps or not any(score for *_, score in steps):
        return ""
    ends = [("sum of the scores", total, "sum")]
    if record is not None:
        ends.append(("measured together", record.chosen.kl_measured, "whole"))
    running, cumulative = 0.0, [0.0]
    for *_, score in steps:
        running += score
        cumulative.append(running)
    y = linear([*cumulative, *(value for _, value, _ in ends)], zero=True)
    # The last bars are wider than those of the groups, however many these are.
    width = 0.86 / len(steps)
    under, drawn, rows = [], [], []
    for k, (i, group, f, score) in enumerate(steps):
        rows.append((f"W{i}", (group.name, f, number(score), _share(score, total), number(cumulative[k + 1]))))
        under.append(
            f'<rect class=under x="{100 * k * width:.3f}%" width="{100 * width:.3f}%" '
            f'y="{100 * (1 - y.at(cumulative[k + 1])):.3f}%" height="{100 * y.at(cumulative[k + 1]):.3f}%"/>'
        )
        if score:
            drawn.append(_bar(colour(f), k * width, width, cumulative[k], cumulative[k + 1], y, f"W{i}", score))
    for k, (name, value, css) in enumerate(ends):
        rows.append((f"WX{k}", (name, "–", number(value), _share(value, total), number(value))))
        drawn.append(_bar(css, 0.88 + 0.065 * k, 0.05, 0.0, value, y, f"WX{k}", value))
    ranked = sorted(steps, key=lambda step: -step[3])
    few = next((n for n in range(1, len(ranked) + 1) if sum(s for *_, s in ranked[:n]) >= 0.5 * total), len(ranked))
    text = (
        f"{few} of {len(steps)} groups carry half of the predicted loss; most, {_share(ranked[0][3], total)}, is from "
        f"{ranked[0][1].name} in {ranked[0][2]}."
    )
    ticks = []
    first: dict[int, int] = {}
    for k, (_, group, _, _) in enumerate(steps):
        if (block := _place(group.name)[1]) is not None:
            first.setdefault(block, k)
    apart = next(s for e in range(9) for s in (10**e, 2 * 10**e, 5 * 10**e) if len(first) <= 7 * s)
    ticks = [((k + 0.5) * width, block) for block, k in first.items() if block % apart == 0]
    used = list(dict.fromkeys(f for _, _, f, score in steps if score))
    named = [*((colour(f), f) for f in used), *((css, name) for name, _, css in ends)]
    keys = "".join(f'<li><b class="key {css}"></b>{escape(name)}</li>' for css, name in named)
    return (
        f"<p>{escape(text)}</p><ul class=legend>{keys}</ul>"
        + plot(
            "".join(under + drawn),
            y,
            "Waterfall of predicted loss: each group starts where the one before it ends; then the sum and the "
            "measurement",
            xticks=ticks,
            above=record.unit if record else sensitivity.unit,
            below="block, in model order",
            by_column=True,
        )
        + table(("group", "format", "adds", "share", "up to here"), rows)
    )


def _bar(css: str, x: float, width: float, start: float, end: float, y: Axis, row: str, value: float) -> str:
    top, bottom = sorted((1 - y.at(start), 1 - y.at(end)))
    return (
        f'<rect class="{css}" x="{100 * x:.3f}%" width="{100 * width:.3f}%" y="{100 * top:.3f}%" '
        f'height="{100 * (bottom - top):.3f}%" data-i="{row}" data-x="{x + width / 2:.4f}" data-y="{top:.4f}" '
        f'data-value="{value:.6g}"/>'
    )


def _share(value: float, total: float) -> str:
    return f"{value / total:.1%}" if total else "–"


# Memory


def memory(plan: Plan, kv_cache: KVCache | None) -> str:
    """Where the bytes go: codes, scales, embeddings and the 16-bit rest; then beside the KV cache where it is known."""
    found = memory_of(plan)
    named = {
        "quantized codes": found.codes,
        "scales": found.scales,
        "embeddings and head": found.embeddings,
        "16-bit rest": found.rest,
    }
    parts = {name: size for name, size in named.items() if size}
    weights = found.total
    if not weights:
        return ""
    bars = _parts_bar("Weights", parts, 0)
    if kv_cache is not None:
        name = f"KV cache, {kv_cache.batch} × {kv_cache.context:,} tokens"
        both = {"all weights": weights, name: kv_cache.nbytes}
        bars += _parts_bar("With the KV cache", both, len(parts))
        parts |= both
    rows = "".join(
        f'<tr id="M{i}"><td class=what><b class="key c{min(i, 6)}"></b>{escape(name)}</td><td>{_size(size)}</td>'
        f"<td>{size:,}</td><td>{_times(size / weights)}</td></tr>"
        for i, (name, size) in enumerate(parts.items())
    )
    note = (
        "" if kv_cache else "<p class=reason>The KV cache and activations come on top; the server decides on them.</p>"
    )
    heads = "".join(f"<th scope=col>{head}</th>" for head in ("part", "size", "bytes", "of the weights"))
    return (
        f"{bars}<div class=scroll><table class='values memory'><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1%}" if ratio <= 1 else f"{ratio:.1f}\u00a0×"


def _parts_bar(title: str, parts: Mapping[str, int], first: int) -> str:
    total = sum(parts.values())
    drawn = "".join(
        f'<i class="c{min(first + i, 6)}" style="width:{100 * size / total:.3f}%" data-i="M{first + i}" '
        f'data-value="{size}"></i>'
        for i, size in enumerate(parts.values())
    )
    label = f"{title}: {', '.join(f'{name} {size / total:.0%}' for name, size in parts.items())}"
    return (
        f"<p class=barlabel>{escape(title)} <b>{_size(total)}</b></p>"
        f'<div class="bar parts" role=img aria-label="{escape(label)}">{drawn}</div>'
    )


def _size(nbytes: float) -> str:
    return megabytes(nbytes).replace(" ", "\u00a0")


# Export receipt

_STAGES = (("fake_quant", "PyTorch"), ("checkpoint", "checkpoint"), ("onnx", "ONNX"), ("engine", "engine"))


def receipt(record: Receipt) -> str:
    """Whether every stage of an export does what the model does, layer by layer."""
    failed = [layer.name for layer in record.layers if not layer.passed] + [
        a.name for a in record.audit if not a.passed
    ]
    verdict = (
        "<p class='verdict good'>✓ Passed</p>"
        if record.passed
        else f"<p class='verdict bad'>✗ Failed{f': {_names(failed)}' if failed else ''}</p>"
    )
    parts = [verdict]
    if record.layers:
        parts.append(_receipt_layers(record))
    if record.audit:
        # What failed comes first.
        audit = sorted(enumerate(record.audit), key=lambda item: item[1].passed)
        rows = [(f"A{i}", (a.name, "✓" if a.passed else "✗ failed", a.planned, a.found)) for i, a in audit]
        native = sum(a.passed for a in record.audit)
        parts.append(f"<h3>Engine audit</h3><p>{native} of {len(rows)} layers run in the engine as planned.</p>")
        parts.append(table(("layer", "verdict", "planned", "found"), rows, folded=native == len(rows) > 8))
    return "".join(parts)


def _receipt_layers(record: Receipt) -> str:
    ran = [(key, name) for key, name in _STAGES if any(getattr(m, key) is not None for m in record.layers)]
    values = [v for m in record.layers for key, _ in ran if (v := getattr(m, key)) is not None]
    if not values:
        return ""
    y = logarithmic(values)
    drawn, rows = [], []
    for i, layer in enumerate(record.layers):
        for k, (key, _) in enumerate(ran):
            value = getattr(layer, key)
            if value is not None:
                drawn.append(mark(f"c{k}", (i + 0.5) / len(record.layers), 1 - y.at(value), f"E{i}"))
        errors = [number(getattr(layer, key)) for key, _ in ran]
        rows.append((f"E{i}", (layer.name, "✓" if layer.passed else "✗ failed", *errors), layer.passed))
    rows.sort(key=lambda row: row[2])

    def largest(layer: Any) -> float:
        return max((v for key, _ in ran if (v := getattr(layer, key)) is not None), default=0.0)

    worst = max(record.layers, key=largest)
    exact = sum(largest(layer) == 0 for layer in record.layers)
    text = (
        "Each layer against what it should be, at every stage: the layer in PyTorch against the textbook in float64, "
        f"the stored weight and the exported nodes against the layer. {exact} of {len(record.layers)} agree exactly "
        f"at every stage; worst: {worst.name}, {number(largest(worst))}."
    )
    missing = [name for key, name in _STAGES if (key, name) not in ran]
    if missing:
        text += f" Not run: {', '.join(missing)}."
    return (
        f"<p>{escape(text)}</p>{legend([(f'c{k}', name) for k, (_, name) in enumerate(ran)])}"
        + plot(
            "".join(drawn),
            y,
            "Relative deviation of each layer at each stage of the export",
            xticks=[],
            above="relative deviation (logarithmic); what agrees exactly stands on the axis",
            below="layers, in model order",
            by_column=True,
        )
        + table(
            ("layer", "verdict", *(name for _, name in ran)),
            [row[:2] for row in rows],
            folded=all(m.passed for m in record.layers),
        )
    )


def _names(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return escape(", ".join(dict.fromkeys(names[:limit]))) + more


def format_colours(formats: Sequence[str], in_use: Mapping[str, str]) -> Callable[[str], str]:
    """CSS classes for format names: those of `in_use` where they have one, the next free ones for others."""
    classes = {KEEP: "kept"}
    free = [f"c{i}" for i in range(7) if f"c{i}" not in in_use.values()]
    for name in formats:
        bare = name.removesuffix("a16")
        if name not in classes:
            classes[name] = in_use.get(name) or in_use.get(bare) or (free.pop(0) if free else "c6")
    return lambda name: classes.get(name, "c6")


CSS = """
.values { white-space:nowrap } .values .what { white-space:normal; overflow-wrap:anywhere; min-width:130px }
.values th:not(:first-child, .long), .values td:not(:first-child, .long) { text-align:right }
.values .long { white-space:normal; overflow-wrap:anywhere; min-width:230px; padding-left:24px; text-align:left }
.data { border-top:0; padding:8px 0 0 } .data summary { color:var(--soft); font-size:13.5px }
.canvas text { fill:var(--ink); font-size:12.5px; paint-order:stroke; stroke:var(--card); stroke-width:3px }
.canvas rect { fill:currentColor; opacity:.85 } .canvas rect.on { opacity:1; stroke:var(--ink); stroke-width:1.5 }
.sum { color:var(--soft) } .whole { color:var(--ink) } .canvas .under { fill:var(--soft); opacity:.13 }
.curve { stroke:currentColor; stroke-width:2 } .gap { stroke:var(--soft); stroke-width:1.5 }
.limit { stroke:var(--ink); stroke-width:1.5; stroke-dasharray:5 4 }
.heat { display:grid; grid-auto-rows:20px; gap:1px; margin:2px 0 14px; font-size:12px; color:var(--soft) }
.heat span { padding-right:8px; align-self:center; white-space:nowrap }
.heat i { background:color-mix(in oklab, var(--hot) var(--heat), var(--cool)); border-radius:2px }
.heat .chosen { box-shadow:inset 0 0 0 2px var(--ring) } .heat i.on { outline:2px solid var(--ink); z-index:1 }
.scale { display:flex; flex-wrap:wrap; align-items:center; gap:4px 8px; font-size:12.5px; color:var(--soft);
 margin:10px 0 } .scale i { width:120px; height:12px; border-radius:3px;
 background:linear-gradient(in oklab 90deg, var(--cool), var(--hot)) } .scale span:last-child { flex:1 1 16em }
h3 small { font-weight:400; color:var(--soft) } section > h3 { margin-top:16px }
.verdict { font-weight:650; font-size:17px; margin-bottom:6px; overflow-wrap:anywhere } .good { color:var(--good) }
.bad { color:var(--bad) } .parts i { min-width:2px }
@media (max-width:640px) { .heat { grid-auto-rows:16px; font-size:11px } .heat span { padding-right:5px }
 .heat .chosen { box-shadow:inset 0 0 0 1.5px var(--ring) } .values { font-size:12.5px }
 .values .long { white-space:nowrap }
 .memory th:nth-child(3), .memory td:nth-child(3) { display:none } }
"""
