"""Charts of the quantized model: loss on each text, bytes by format, memory, and the error of each layer."""

from __future__ import annotations

import math
import statistics

from quant.calibration.sensitivity.costs import memory_of
from quant.base.errors import megabytes
from quant.evaluation.evaluation import Evaluation
from quant.calibration.layer_result import LayerResult
from quant.recipes.plan import Plan
from quant.report.report import KVCache, Report
from quant.report.section import (
    COLOURS,
    Section,
    block_starts,
    coloured,
    colours_of,
    format_colours,
    number,
    short_name,
)


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
    parts, rows, series = [], [], {}
    for i, (format, kind) in enumerate(sorted(groups, key=lambda key: (order.index(key[0]), key[1]))):
        members, name = groups[format, kind], format or kind
        weights = sum(math.prod(layer.shape) for layer in members)
        # Quantized weights had 2 bytes each; a tied layer has no bytes and is counted where its weight is.
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
    """Charts the bytes of the weights by part, and their size compared with the KV cache if its size is known."""
    weights = memory_of(plan)
    if not weights.total:
        return None
    sizes = {"quantized codes": weights.codes, "scales": weights.scales}
    sizes |= {"embeddings and head": weights.embeddings, "16-bit rest": weights.rest}
    parts = [("weights", size, name) for name, size in sizes.items() if size]
    bars = {"weights": f"Weights {megabytes(weights.total)}"}
    text = "The KV cache and activations take memory as well; the server decides how much."
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
        "kind": "bars",
        "whole": True,
        "bars": [*bars.items()],
        "series": coloured(*(name for *_, name in parts)),
        "parts": [(*part, f"M{i}") for i, part in enumerate(parts)],
    }
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
        text = (
            "The error of each weight by itself, since no evaluation text was given on which outputs could be "
            "compared. Solvers that work from text move weights on purpose, and have larger errors here than rounding."
        )
    text += f" Median {statistics.median(values):.2%}, best {min(values):.2%}, worst {worst:.2%}:"
    return Section("Error by layer", text, (row, name), chart)
