"""`saved_report` reads the report of a checkpoint as it lies there, without torch, which takes seconds to import."""

from pathlib import Path
from typing import Any

from quant.base.json_files import read_json, typed


def saved_report(directory: Path) -> dict[str, Any] | None:
    """Returns the fields of report.json in `directory`; None without one.

    Raises:
        ValueError: not JSON, or its layers have no name and SNR, which `quant inspect` shows.
    """
    file = directory / "report.json"
    return read_json(file, "a valid report", _checked) if file.is_file() else None


def _checked(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = typed(dict[str, Any], document, "report")
    for index, layer in enumerate(typed(list[dict[str, Any]], fields.get("layers"), "layers")):
        typed(str, layer.get("name"), f"layers[{index}].name")
        typed(float | None, layer.get("snr_db"), f"layers[{index}].snr_db")
    return fields
