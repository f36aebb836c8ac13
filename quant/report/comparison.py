"""`compare_html` puts two runs side by side: their totals, their loss on each text, and every layer that differs.

Both are directories that `quantize` wrote, of the same model; a layer that one of them lacks has dashes there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.base.errors import UserError, megabytes
from quant.calibration.layer_result import LayerResult
from quant.evaluation.evaluation import Evaluation
from quant.recipes.plan import Plan
from quant.report.charts import Section, block_starts, coloured, number, short_name
from quant.report.render import render_page
from quant.report.report import Report, read_run

Pair = tuple[LayerResult | None, LayerResult | None]


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One of the runs: its name on the page, its report and its plan."""

    name: str
    report: Report
    plan: Plan


def read_runs(first: Path, second: Path) -> tuple[ComparedRun, ComparedRun]:
    """Reads two runs, named after their directories; UserError where a file is missing, or no layer is in both."""
    directories = (first, second)
    names = [directory.resolve().name for directory in directories]
    if names[0] == names[1]:
        names = [str(directory) for directory in directories]
    a, b = (ComparedRun(name, *read_run(directory)) for name, directory in zip(names, directories, strict=True))
    if not {layer.name for layer in a.report.layers} & {layer.name for layer in b.report.layers}:
        raise UserError(f"{first} and {second} have no layer in common; compare two runs of one model")
    return a, b


def compare_html(a: ComparedRun, b: ComparedRun) -> str:
    """Makes the page that compares two runs."""
    # In the order of the first run; layers of the second run alone come last.
    unpaired = {layer.name: layer for layer in b.report.layers}
    pairs: list[Pair] = [(layer, unpaired.pop(layer.name, None)) for layer in a.report.layers]
    pairs += [(None, layer) for layer in unpaired.values()]
    changed = [pair for pair in pairs if _formats(pair[0]) != _formats(pair[1])]
    same = [pair for pair in pairs if _formats(pair[0]) == _formats(pair[1])]
    # Where one run measured no outputs, errors of weights are compared.
    of_outputs = all(any(run[side] and run[side].output_error is not None for run in pairs) for side in (0, 1))  # type: ignore[union-attr]
    ids = {_name(pair): f"{prefix}{i}" for prefix, part in (("K", changed), ("N", same)) for i, pair in enumerate(part)}
    rows = [(f"G{i}", row) for i, row in enumerate(totals(a, b))]
    sections = [
        Section("Totals", head=("", a.name, b.name, "difference"), rows=rows, folded=False),
        _errors(a, b, pairs, ids, of_outputs),
        _layers(f"Layers whose formats differ: {len(changed)} of {len(pairs)}", a, b, changed, ids, of_outputs),
        _layers(f"Layers with the same formats: {len(same)}", a, b, same, ids, of_outputs),
    ]
    models = dict.fromkeys(short_name(run.report.model) for run in (a, b))
    return render_page(
        "sections.html.j2",
        kicker="Comparison of two runs",
        title=f"{a.name} and {b.name}",
        subtitle=" and ".join(models),
        sections=[section for section in sections if section is not None],
        links=(),
        tiles=(),
        pairs=(),
    )


def totals(a: ComparedRun, b: ComparedRun) -> list[tuple[str, str, str, str]]:
    """Returns sizes and figures of both runs: label, value of the first, of the second, and the change."""
    x, y = a.report, b.report
    bits = [report.effective_bits for report in (x, y)]
    rows = [
        ("weights", megabytes(x.bytes_after), megabytes(y.bytes_after), _ratio(x.bytes_after, y.bytes_after)),
        ("bits a quantized weight", f"{bits[0]:.3f}", f"{bits[1]:.3f}", f"{bits[1] - bits[0]:+z.3f}"),
    ]
    formats = [[_formats(layer) for layer in report.layers] for report in (x, y)]
    for name in sorted({name for each in formats for name in each}):
        before, after = (each.count(name) for each in formats)
        rows.append((f"layers in {name}", str(before), str(after), f"{after - before:+d}"))
    texts = [{each.text: each for each in run.evaluation.texts} if run.evaluation else {} for run in (x, y)]
    for text in {**texts[0], **texts[1]}:
        rows += _figures(text, texts[0].get(text), texts[1].get(text))
    for stage in dict.fromkeys([*x.seconds, *y.seconds]):
        times = [run.seconds.get(stage) for run in (x, y)]
        cells = ["–" if time is None else f"{time:.1f} s" for time in times]
        rows.append((f"time to {stage}", cells[0], cells[1], _ratio(*times)))
    return rows


def _figures(text: str | None, a: Evaluation | None, b: Evaluation | None) -> list[tuple[str, str, str, str]]:
    where = "" if text is None else f" on {short_name(text)}"
    figures: dict[str, Callable[[Evaluation], float | None]] = {
        "KL": lambda each: each.kl,
        "1 − cosine": lambda each: each.cosine,
        "perplexity": lambda each: each.perplexity,
        "top-1 agreement": lambda each: each.top1,
    }
    rows = []
    for label, figure in figures.items():
        before, after = (None if each is None else figure(each) for each in (a, b))
        if before is None and after is None:
            continue
        is_share = label == "top-1 agreement"
        cells = [number(v) if v is None or not is_share else f"{v:.1%}" for v in (before, after)]
        if before is None or after is None or a is None or b is None:
            change = "–"
        elif a.tokens != b.tokens:
            change = "on other rows"  # figures of different rows cannot be told apart from a difference of the runs
        else:
            change = f"{100 * (after - before):+z.1f} points" if is_share else _ratio(before, after)
        rows.append((f"{label}{where}", cells[0], cells[1], change))
        if label in ("KL", "1 − cosine"):
            ends = [None if each is None else each.interval for each in (a, b)]
            intervals = ["–" if each is None else "–".join(map(number, each)) for each in ends]
            rows.append(("95% interval", intervals[0], intervals[1], ""))
    return rows


def _ratio(before: float | None, after: float | None) -> str:
    return "–" if not before or after is None else f"{after / before - 1:+z.1%}"


def _formats(layer: LayerResult | None) -> str:
    if layer is None:
        return "–"
    return "16 bit" if layer.format is None else f"{layer.format}@{layer.activation or '16bit'}"


def _error(layer: LayerResult | None, of_outputs: bool) -> float | None:
    if layer is None:
        return None
    return layer.output_error if of_outputs else layer.relative_error


def _errors(
    a: ComparedRun, b: ComparedRun, pairs: Sequence[Pair], ids: Mapping[str, str], of_outputs: bool
) -> Section | None:
    shown = [pair for pair in pairs if any(_error(side, of_outputs) is not None for side in pair)]
    if not shown:
        return None
    blocks = block_starts(_name(pair) for pair in shown)
    chart = {
        "kind": "dots",
        "log": True,
        "column": True,
        "x": f"{'block' if blocks else 'layers'}, in model order",
        "y": f"relative error of the {'output' if of_outputs else 'weight'} (logarithmic), lower is better",
        "series": coloured(a.name, b.name),
        "points": [
            (i, error, run.name, ids[_name(pair)])
            for i, pair in enumerate(shown)
            for run, side in zip((a, b), pair, strict=True)
            if (error := _error(side, of_outputs)) is not None
        ],
        "ticks": blocks,
    }
    text = "The errors of both runs, layer by layer."
    if not of_outputs:
        has_outputs = any(layer is not None and layer.output_error is not None for pair in pairs for layer in pair)
        which = "Only one of them measured outputs on evaluation text"
        if not has_outputs:
            which = "Outputs were not measured in both"
        text += f" {which}, so these are the errors of the weights by themselves."
    return Section("Error by layer", text, None, chart)


def _layers(
    title: str, a: ComparedRun, b: ComparedRun, pairs: Sequence[Pair], ids: Mapping[str, str], of_outputs: bool
) -> Section | None:
    if not pairs:
        return None
    error = "output error" if of_outputs else "weight error"
    head = ["layer"]
    for what in ("formats", "bits", "bytes", error):
        head += [f"{what}, {a.name}", f"{what}, {b.name}"]
    rows = []
    for pair in pairs:
        cells = [_name(pair)]
        cells += [_formats(side) for side in pair]
        cells += ["–" if side is None else f"{side.bits:.3f}" for side in pair]
        cells += ["–" if side is None else megabytes(side.nbytes) for side in pair]
        cells += ["–" if (value := _error(side, of_outputs)) is None else f"{value:.2%}" for side in pair]
        rows.append((ids[cells[0]], tuple(cells)))
    return Section(title, head=head, rows=rows, folded=all(_formats(x) == _formats(y) for x, y in pairs))


def _name(pair: Pair) -> str:
    layer = pair[0] or pair[1]
    assert layer is not None
    return layer.name
