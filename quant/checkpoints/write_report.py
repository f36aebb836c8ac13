"""`write_report` completes the directory of a checkpoint with its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quant.base.atomic import write_atomically
from quant.recipes.plan import Plan
from quant.report.render import render_html
from quant.report.report import Report, peak_rss


def write_report(report: Report, plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
    """Writes the report of a checkpoint before it appears under its name.

    Args:
        report: completed with the sizes and `hashes` of the weight files, then written as JSON and HTML.
        plan: the plan that was executed.
        directory: the directory of the unfinished checkpoint.
        hashes: SHA-256 of each weight file, by name.
    """
    report.files = dict(hashes)
    # Sizes on disk replace the plan's estimate; they include the headers of the files.
    report.bytes_after = sum((directory / name).stat().st_size for name in hashes)
    report.peak_rss_bytes = peak_rss()
    # `verify` reads report.json (hashes, plan digest, fingerprint), and so does the next training run that starts here
    # (`training.run_report`). report.html is only for people.
    report.save(directory / "report.json")
    write_atomically(directory / "report.html", render_html(report, plan))
