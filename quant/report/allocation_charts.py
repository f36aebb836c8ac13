"""Charts of an allocation: loss against size, rounds of the loop, sensitivity, and the parts of the loss."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

from quant.base.errors import megabytes
from quant.calibration.allocation.goal import AllocationRecord, Budget, BudgetKind
from quant.calibration.sensitivity.table import Candidate, GroupScores, Sensitivity, parse_candidates
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP
from quant.report.section import COLOURS, Section, block_starts, coloured, number, percentage, role_and_block
from quant.report.summary import verified_text


def pareto(record: AllocationRecord) -> Section:
    """Charts loss against size: the predicted curve, the measured points, the uniform formats and the chosen point."""
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
        "series": coloured("predicted", "measured", single, best),
        "points": [(p.bits, p.kl_predicted, "predicted", f"P{i}") for i, p in enumerate(record.curve)]
        + [(bits, measured, series, row) for row, _, bits, _, measured, series in points if measured is not None],
        "labels": sorted([*((u.bits, u.kl, u.name) for u in uniform), (chosen.bits, chosen.kl_measured, "chosen")]),
        "curve": [(p.bits, p.kl_predicted) for p in record.curve if p.kl_predicted > 0],
        # A line across the chart; budgets in bytes and seconds have no axis here.
        "limit": {BudgetKind.BITS: {"x": budget.value}, BudgetKind.KL: {"y": budget.value}}.get(budget.kind),
    }
    rows = [(row, (name, f"{bits:.3f}", number(p), number(m))) for row, name, bits, p, m, _ in points]
    return Section("Size against loss", text, None, chart, ("allocation", "bits", "predicted", "measured"), rows)


def budget_text(budget: Budget) -> str:
    """Returns the budget in words: '4.8 bits', 'KL ≤ 0.05'."""
    return {
        BudgetKind.BITS: f"{budget.value:g} bits",
        BudgetKind.BYTES: megabytes(budget.value),
        BudgetKind.SECONDS: f"{1000 * budget.value:g} ms",
        BudgetKind.KL: f"KL ≤ {budget.value:g}",
        BudgetKind.PERPLEXITY: f"perplexity +{budget.value:.1%}",
    }[budget.kind]


def rounds(record: AllocationRecord) -> Section | None:
    """Charts the prediction and the measurement of every round of the allocation loop."""
    chosen, turns, rows = record.chosen, record.rounds, []
    if not turns:
        return None
    # The plan holds the round with the chosen loss; none, if a solver from data or a single format came after them.
    chosen_round = next((i for i, turn in enumerate(turns) if turn.measured == chosen.kl_measured), None)
    for i, turn in enumerate(turns):
        cells = (f"{turn.bits:.3f}", number(turn.predicted), number(turn.measured), _off(turn.measured, turn.predicted))
        change = f"{turn.measured - turns[i - 1].measured:+.3g}" if i else "–"
        changed = f"{len(turn.changed)}: {_by_parent(turn.changed)}" if turn.changed else "–"
        rows.append((f"R{i}", (f"round {i + 1}{', chosen' if i == chosen_round else ''}", *cells, change, changed)))
    limit = {"y": record.budget.value} if record.budget.kind == BudgetKind.KL else None
    series = {"predicted": "c0", "measured": "c1", "measured, and chosen": "c3"}
    names = ["measured, and chosen" if i == chosen_round else "measured" for i in range(len(turns))]
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
    which = f"round {chosen_round + 1} of {len(turns)}" if chosen_round is not None else "none of these rounds"
    text = (
        "The loss of an allocation is predicted as the sum of its groups’ scores. Every round quantizes the model, "
        f"measures it and corrects the next prediction. The plan holds the outcome of {which}: the scores predict "
        f"{number(chosen.kl_predicted)}, measured is {number(chosen.kl_measured)}{off}. All rounds took "
        f"{record.seconds:.1f} s."
    )
    head = ("round", "bits", "predicted", "measured", "off by", "change", "layers changed")
    return Section("Predicted and achieved", text, None, chart, head, rows)


def _off(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.1%}" if predicted > 0 else "–"


def _by_parent(names: Sequence[str]) -> str:
    """Returns layer names without their common start, grouped by module: `5.self_attn.(q_proj, k_proj), 6.mlp.up`."""
    shared = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".") + "."
    parents: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.removeprefix(shared).rpartition(".")
        parents.setdefault(parent, []).append(last)
    together = {p: lasts[0] if len(lasts) == 1 else f"({', '.join(lasts)})" for p, lasts in parents.items()}
    return ", ".join(f"{parent}.{last}".lstrip(".") for parent, last in together.items())


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


def waterfall(
    table: Sensitivity, plan: Plan, record: AllocationRecord | None, colours: Mapping[str | None, str]
) -> Section | None:
    """Charts each group's part of the predicted loss, in model order, then the sum and the measurement."""
    chosen = [(i, group, f) for i, group in enumerate(table.groups) if (f := chosen_format(group, plan)) is not None]
    scores = [group.scores[f] for _, group, f in chosen]
    if not any(scores):
        return None
    # n + 1 sums: bar k goes from sums[k] to sums[k + 1].
    n, sums = len(chosen), list(accumulate(scores, initial=0.0))
    steps: list[tuple[float, float, float, float, str, str]] = []
    rows, series = [], {}
    for k, (i, group, f) in enumerate(chosen):
        rows.append((f"W{i}", (group.name, f, number(scores[k]), percentage(scores[k], sums[n]), number(sums[k + 1]))))
        steps.append((k, k + 1, sums[k], sums[k + 1], f, f"W{i}"))
        if scores[k]:
            weight = plan.by_name[group.layers[0]].weight
            series[f] = colours.get(weight.name if weight else None, COLOURS[-1])
    ends = [("sum of the scores", "soft", sums[n])]
    if record is not None:
        ends.append(("measured together", "ink", record.chosen.kl_measured))
    for k, (name, colour, value) in enumerate(ends):
        rows.append((f"WX{k}", (name, "–", number(value), percentage(value, sums[n]), number(value))))
        # The bars of both sums are wider than the bars of groups, however many groups there are.
        steps.append((n * (1.03 + 0.075 * k), n * (1.085 + 0.075 * k), 0.0, value, name, f"WX{k}"))
        series[name] = colour
    ranked = sorted(zip(scores, chosen, strict=True), key=lambda item: -item[0])
    # The fewest groups that together make up half of the sum.
    few = next((k for k in range(1, n) if sum(score for score, _ in ranked[:k]) >= 0.5 * sums[n]), n)
    score, (_, group, f) = ranked[0]
    text = f"{few} of {n} groups carry half of the predicted loss. "
    text += f"The largest part, {percentage(score, sums[n])}, is from {group.name} in {f}."
    chart = {
        "kind": "waterfall",
        "x": "block, in model order",
        "y": record.unit if record else table.unit,
        "series": [*series.items()],
        "steps": steps,
        "groups": n,
        "ticks": [(k + 0.5, block) for k, block in block_starts(group.name for _, group, _ in chosen)],
    }
    head = ("group", "format", "adds", "share", "up to here")
    return Section("Where the loss comes from", text, None, chart, head, rows)


def chosen_format(group: GroupScores, plan: Plan) -> str | None:
    """Returns the column of the table that the plan chose for a group; None if no column matches the plan."""
    layer = plan.by_name.get(group.layers[0]) if group.layers else None
    if layer is None:
        return None
    if layer.weight is None:
        return KEEP if KEEP in group.scores else None
    # Columns are names that the user wrote, the plan holds formats: compare the formats.
    formats = (layer.weight, layer.activation)
    columns = _candidates(tuple(name for name in group.scores if name != KEEP))
    return next((column.name for column in columns if (column.weight, column.activation) == formats), None)


@cache
def _candidates(names: tuple[str, ...]) -> tuple[Candidate, ...]:
    return parse_candidates(names) if names else ()
