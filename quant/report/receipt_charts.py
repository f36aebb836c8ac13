"""Charts of an export: the deviation of each layer at each stage, and the audit of the engine."""

from __future__ import annotations

from quant.report.report import Receipt
from quant.report.section import (
    Section,
    coloured,
    number,
)

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
            "kind": "dots",
            "log": True,
            "column": True,
            "x": "layers, in model order",
            "y": "relative deviation (logarithmic, exact agreement at the bottom)",
            "series": coloured(*ran.values()),
            "points": [(i, v, ran[key], f"E{i}") for i, stages in enumerate(deviations) for key, v in stages.items()],
            "ticks": [],
        }
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
