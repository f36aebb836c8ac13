"""The sections of the report's page, in its order."""

from __future__ import annotations

from quant.recipes.plan import Plan
from quant.report.allocation_charts import heat_map, pareto, rounds, waterfall
from quant.report.example_sections import continuation, predictions, usage
from quant.report.charts import errors, memory, sizes, texts
from quant.report.receipt_charts import receipt
from quant.report.report import Report
from quant.report.section import (
    Section,
    format_colours,
)


def sections(report: Report, plan: Plan) -> list[Section]:
    """Returns the sections that the report has data for, in the page's order."""
    record, table = report.allocation, report.sensitivity
    page: list[Section | None] = [texts(report.evaluation)] if report.evaluation else []
    page += [predictions(report.examples), continuation(report.examples)] if report.examples else []
    page += [pareto(record), rounds(record)] if record else []
    page += [sizes(report, plan), memory(plan, report.kv_cache)]
    page += [heat_map(table, plan), waterfall(table, plan, record, format_colours(report))] if table else []
    page += [errors(report), usage(report, plan), *(receipt(report.receipt) if report.receipt else ())]
    return [section for section in page if section is not None]
