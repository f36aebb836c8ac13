"""`render_html` makes one HTML file of a report: it makes no request, and reads well in light, dark and on a phone.

`report.html.j2` is the page, `report.css` its looks and `report.js` its charts; Jinja2 escapes every text that comes
from a model. d3 and Observable Plot draw the charts. They are in `vendor/` and go into the page whole, so that it works
offline; without JavaScript the tables still say everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.base.errors import counted, loss_text, megabytes
from quant.base.json_files import finite, json_text
from quant.calibration.layer_result import LayerResult
from quant.recipes.plan import Plan
from quant.recipes.solver_names import DEFAULT_OBSERVER
from quant.report import charts
from quant.report.charts import Section, format_colours, short_name
from quant.report.summary import choice_loss

if TYPE_CHECKING:
    from jinja2 import Template

    from quant.report.report import Report


def sections(report: Report, plan: Plan) -> list[Section]:
    """Returns the sections that the report has data for, in the page's order."""
    record, table = report.allocation, report.sensitivity
    page: list[Section | None] = [charts.texts(report.evaluation)] if report.evaluation else []
    page += [charts.predictions(report.examples), charts.continuation(report.examples)] if report.examples else []
    page += [charts.pareto(record), charts.rounds(record)] if record else []
    page += [charts.sizes(report, plan), charts.memory(plan, report.kv_cache)]
    page += [charts.heat_map(table, plan)] if table else []
    page += [charts.errors(report), charts.usage(report, plan)]
    page += charts.receipt(report.receipt) if report.receipt else []
    return [section for section in page if section is not None]


_FOLDER = Path(__file__).parent
_ERRORS = ("SNR", "weight error", "output error", "solver")  # columns of quantized layers
_PARTS = ("report.css", "vendor/d3.min.js", "vendor/plot.umd.min.js", "report.js")


def render_html(report: Report, plan: Plan) -> str:
    """Returns the whole page; of layers that the plan lacks, the facts in the report are shown."""
    return render_page(
        "report.html.j2",
        report=report,
        model=short_name(report.model),
        tiles=_tiles(report),
        sections=sections(report, plan),
        groups=_layers(report, plan),
        facts=_facts(report, plan),
        formats=[name for name in format_colours(report) if name],
        settings={
            label: value
            for label, value in (("kv_cache", plan.kv_text), ("attention", plan.attention), ("target", plan.target))
            if value
        },
        files=[(f"F{i}", entry) for i, entry in enumerate(report.files.items())],
    )


def render_page(template: str, **fields: Any) -> str:
    """Renders a page with its looks and scripts in it; `fields` are the template's."""
    from markupsafe import Markup

    # Parts that are trusted; everything else that the template writes is escaped.
    parts = {name: Markup((_FOLDER / name).read_text(encoding="utf-8")) for name in _PARTS}
    return _template(template).render(parts=parts, **fields)


@cache
def _template(name: str) -> Template:
    # Imported here: commands that only read a report's JSON do not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        # A misspelt field is an error in tests, and not an empty cell on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    # Long layer names may be broken after dots and bars, so that tables fit a phone.
    environment.filters["breakable"] = lambda name: Markup(re.sub(r"([.|])", r"\1<wbr>", str(escape(name))))
    # A point at "top" stands at the upper end of its axis.
    environment.filters["finite"] = partial(finite, instead="top")
    return environment.get_template(name)


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    size = f"{megabytes(report.bytes_before)} → {megabytes(report.bytes_after)}"
    tiles = [
        ("Smaller by", f"{report.ratio:.2f}×", size),
        ("Effective bits", f"{report.effective_bits:.3f}", "per quantized weight, scales and padding counted"),
    ]
    if (record := report.allocation) is not None:
        tiles.insert(0, ("Asked for", charts.budget_text(record.budget), choice_loss(record)))
    if (evaluation := report.evaluation) is None:
        # Only a model that writes text has the size of a KV cache.
        why = "no text was evaluated" if report.kv_cache is None else "give a text to evaluate on"
        return [*tiles, ("Quality", "not measured", why)]
    count, worst = len(evaluation.texts), evaluation.worst
    of = f"on {short_name(worst.text)}, the worst of {count} texts" if count > 1 else ""
    interval = worst.interval_text.strip(" ()")
    if worst.perplexity is not None:
        base = worst.baseline_perplexity
        change = f"{base:.2f} before, {100 * (worst.perplexity / base - 1):+z.1f}%" if base else "no baseline measured"
        tiles.append(("Perplexity", f"{worst.perplexity:.2f}", _note(change, of)))
    if worst.cosine is not None:
        tiles.append(("Embeddings", loss_text(worst.cosine), _note("1 − cosine to the model before", interval, of)))
    if worst.kl is not None:
        note = _note("nats per prediction, from the model before", interval, of)
        tiles.append(("KL divergence", loss_text(worst.kl), note))
    if worst.top1 is not None:
        note = _note(f"same likeliest token, over {worst.tokens:,} positions", of)
        tiles.append(("Top-1 agreement", f"{100 * worst.top1:.1f}%", note))
    if worst.accuracy is not None:
        before = "" if worst.baseline_accuracy is None else f"{worst.baseline_accuracy:.1%} before"
        tiles.append(("Accuracy", f"{worst.accuracy:.1%}", _note(before, of)))
    return tiles


def _note(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _layers(report: Report, plan: Plan) -> list[dict[str, Any]]:
    """Returns tables of layers; layers with the same formats for the same reason share one."""
    colours = format_colours(report)
    groups: dict[tuple[str | None, str | None, str | None, float | None], list[tuple[str, LayerResult]]] = {}
    for i, layer in enumerate(report.layers):
        planned = plan.by_name.get(layer.name)
        # A layer that an allocator scored has a reason of its own, which is shown in its row.
        reason = layer.reason if planned is None or planned.score is None else None
        bits = None if layer.format else layer.bits
        groups.setdefault((layer.format, layer.activation, reason, bits), []).append((f"L{i}", layer))
    order = list(colours)  # formats with the fewest bits first, 16 bit last
    tables = []
    for format, activation, reason, bits in sorted(groups, key=lambda key: order.index(key[0])):
        members = groups[format, activation, reason, bits]
        head = ["layer", "shape", "bits", "bytes", *(_ERRORS if format else ())]
        inputs = f", inputs {activation or '16 bit'}" if format or activation else ""
        total = megabytes(sum(layer.nbytes for _, layer in members))
        tables.append(
            {
                "colour": colours[format],
                "title": format or f"{bits:g} bit",
                "facts": f"{inputs} · {counted(len(members), 'layer')} · {total}",
                "reason": "each for a reason of its own" if reason is None else reason or "no reason given",
                "head": head if reason is not None else [*head, "why"],
                "rows": [(row, _cells(layer, plan, with_reason=reason is None)) for row, layer in members],
            }
        )
    return tables


def _cells(layer: LayerResult, plan: Plan, *, with_reason: bool) -> list[str]:
    planned = plan.by_name.get(layer.name)
    tied = f" (tied to {planned.tied_to})" if planned and planned.tied_to else ""
    cells = [layer.name, " × ".join(map(str, layer.shape)), f"{layer.bits:.3f}", megabytes(layer.nbytes) + tied]
    if layer.format:
        cells.append("exact" if layer.snr_db is None else f"{layer.snr_db:.2f} dB")
        for error in (layer.relative_error, layer.output_error):
            cells.append("–" if error is None else f"{error:.2%}")
        cells.append(layer.solver or "–")
    return [*cells, layer.reason or "–"] if with_reason else cells


def _facts(report: Report, plan: Plan) -> dict[str, dict[str, str]]:
    seconds = {stage: f"{value:.1f} s" for stage, value in report.seconds.items()}
    if report.peak_rss_bytes is not None:
        seconds["peak memory"] = megabytes(report.peak_rss_bytes)
    # The page shows the report's own command and versions.
    executed = {"guard": plan.guard, "observer": None if plan.observer == DEFAULT_OBSERVER else plan.observer}
    provenance = {
        key: value
        for key, value in {**plan.provenance, **executed}.items()
        if value is not None and key not in ("command", "versions")
    }
    origin = {key: _in_words(key, value) for key, value in provenance.items()}
    digest = {"SHA-256": report.plan_digest} if report.plan_digest else {}
    return {"Time and memory": seconds, "Versions": report.versions, "Plan": {**origin, **digest}}


def _in_words(key: str, value: Any) -> str:
    if key == "calibration" and isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return "; ".join(_calibration_text(each) for each in value)
    if key == "model":
        return short_name(str(value))
    if key == "effort" and isinstance(value, Mapping) and {"level", "solver"} <= value.keys():
        lowered = f" instead of {value['asked']}: {value.get('why', '')}" if "asked" in value else ""
        return f"{value['level']} ({value['solver']}){lowered}"
    return _as_text(value)


def _as_text(value: Any) -> str:
    """Returns a value of JSON as a reader would write it: `bits 5.4, context 4096` for an object."""
    if isinstance(value, Mapping):
        parts = {str(key).replace("_", " "): _as_text(each) for key, each in value.items()}
        return ", ".join(f"{key} {f'({text})' if ', ' in text else text}" for key, text in parts.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_as_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json_text(value, ensure_ascii=False)


def _calibration_text(record: Mapping[str, Any]) -> str:
    """Describes one source of calibration data: its name, its size, and the kinds of text in a mixture."""
    words = [short_name(str(record.get("source", "data")))]
    if "rows" in record:
        words.append(f"{record['rows']} rows" + (f" of {record['seqlen']} tokens" if "seqlen" in record else ""))
    if isinstance(tokens := record.get("tokens"), Mapping):
        words.append("tokens by kind: " + ", ".join(f"{kind} {count:,}" for kind, count in tokens.items()))
    words += [f"{key} {value}" for key, value in record.items() if key not in ("source", "rows", "seqlen", "tokens")]
    return ", ".join(words)
