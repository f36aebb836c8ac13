"""`add_companions` completes the directory of a checkpoint: the processor's files, the model's code, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quant.formats.atomic import write_atomically
from quant.models.files import copy_along
from quant.models.open import Source
from quant.recipes.plan import Plan
from quant.report.render import render_html
from quant.report.report import Report, peak_rss

# Servers prepare images and sounds with these files; quantizing changes nothing in them.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def add_companions(source: Source, report: Report, plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
    """Adds the files that go with a checkpoint before it appears under its name.

    Args:
        source: the original model, whose processor files and Python files are copied.
        report: completed with the sizes and `hashes` of the weight files, then written as JSON and HTML.
        plan: that was executed.
        directory: of the unfinished checkpoint.
        hashes: SHA-256 of each weight file, by name.
    """
    home = source.path if source.path is not None and source.path.is_dir() else None
    code = home.glob("*.py") if home is not None and getattr(source.config, "auto_map", None) else ()
    for name in (*_PROCESSOR_FILES, *(file.name for file in code)):
        if home is not None and (home / name).is_file() and not (directory / name).exists():
            copy_along(home / name, directory / name, home)
    report.files = dict(hashes)
    report.bytes_after = sum((directory / name).stat().st_size for name in hashes)
    report.peak_rss_bytes = peak_rss()
    report.save(directory / "report.json")
    write_atomically(directory / "report.html", render_html(report, plan))
