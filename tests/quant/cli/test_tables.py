"""Tables of figures at every width: a column is whole or left out and named, and texts may stand below each other."""

from __future__ import annotations

import io

import pytest

from quant.calibration.sensitivity.table import UNITS, GroupScores, Sensitivity
from quant.cli import console, evaluate_command, sensitivity_command
from quant.cli import console as tables
from quant.evaluation.evaluation import Evaluation

WIDTHS = [60, 80, 120, 200]


def on_page(width: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    shown = console._Console(markup=False, width=width, file=text)
    for module in (tables, evaluate_command):
        monkeypatch.setattr(module, "page", lambda: shown)
    return text


@pytest.mark.parametrize("width", WIDTHS)
def test_scores_are_whole_or_their_format_is_named(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = ("nvfp4", "mxfp8", "fp8_channel", "int4a16_g32", "keep")
    groups = tuple(
        GroupScores(
            f"model.layers.{block}.self_attn.(q_proj|k_proj|v_proj)", ("a",), 1_234_567,
            {name: 10.0**-i * (1 + block) for i, name in enumerate(formats[:-1])}, {}, {},
        )
        for block in range(2)
    )  # fmt: skip
    page = on_page(width, monkeypatch)
    sensitivity_command.print_scores(Sensitivity("kl", formats, UNITS["kl"], 8, 512, groups, "00", 1.0))
    text = page.getvalue()
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    header = next(line.split() for line in lines if line.split()[:1] == ["group"])
    row = next(line.split() for line in lines if "2.00e+00" in line)
    figures = {"weights": "1,234,567"} | {name: f"{score:.2e}" for name, score in groups[1].scores.items()}
    shown = {name: figure for name, figure in figures.items() if figure in row}
    assert shown.keys() == set(header) - {"group"} and "nvfp4" in shown and (width < 80 or "int4a16_g32" in shown)
    named = " ".join(text.split()).partition("columns for: ")[2].partition(";")[0]
    assert set(named.split(", ")) - {""} == figures.keys() - shown.keys()


@pytest.mark.parametrize("width", WIDTHS)
def test_each_text_has_a_row(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        Evaluation(
            20.5 + i, 0.1877 + i, 0.831, 8176, 61.3, 18.683,
            rows=16, interval=(0.1712 + i, 0.2042 + i), text=f"texts/text_{i}.txt",
        )
        for i in range(2)
    ]  # fmt: skip
    page = on_page(width, monkeypatch)
    evaluate_command._print_evaluation(Evaluation(**{**vars(texts[0]), "others": (texts[1],)}))
    text = page.getvalue()
    assert all(len(line) <= width for line in text.splitlines() if "no room" not in line)
    for each in texts:
        assert each.interval is not None and each.kl is not None
        low, high = each.interval
        row = next(line for line in text.splitlines() if f"{each.kl:.4f}" in line)
        assert width < 80 or f"{each.kl:.4f} (95% over 16 rows: {low:.4f}–{high:.4f})" in row
        assert width < 80 or (f"{each.text}" in row and f"{each.perplexity:.3f}" in row)
        assert width < 200 or all(figure in row for figure in ("18.683", "83.1%", "8,176", "61.3"))


def test_control_characters_and_brackets_of_names_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    page = on_page(80, monkeypatch)
    tables.print_table({"!layer": ["a[bold]\x1b[2Jb"]}, title="of [red]m")
    assert "a[bold]\\x1b[2Jb" in page.getvalue() and "of [red]m" in page.getvalue()
