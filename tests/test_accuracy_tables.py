"""The tables of losses in the documents have rows that the benchmark measures, and ratios to the best peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from samples import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from _accuracy_rows import AS_KFAC, BARS, BEST_PEERS, KFAC_ROWS, ROWS, SETTINGS, chosen, expected_seconds
from _accuracy_tables import DOMAINS, HEADLINE, LANGUAGES, RATIOS, TABLES, Measured, headline, loss_table, ratio_table
from _peers import llmcompressor_configurations, modelopt_configurations, torchao_configurations
from accuracy import measured_rows

PEERS = [*modelopt_configurations(), *llmcompressor_configurations(), *torchao_configurations()]
PEERS += [f"{setting} ModelOpt auto_quantize" for setting in ("mixed", "mixeda16")]


def test_bars_are_the_rows_of_the_tables() -> None:
    measured = chosen(["bars"], [*BARS, *PEERS, *(name + AS_KFAC for name in BEST_PEERS)])
    assert set(BEST_PEERS) <= set(PEERS)
    lines = [line for _, lines in TABLES.values() for line in lines]
    rows = {row for line in lines for row in line.rows}
    # Some peers take minutes on as many rows as `kfac` gets: their lines are those of a run that measured them.
    assert set(measured) == {
        row for row in rows if not row.endswith(AS_KFAC) or row.removesuffix(AS_KFAC) in BEST_PEERS
    }
    assert {row for line in (*HEADLINE, *RATIOS) for row in line.rows} <= set(BARS)


def test_the_longest_rows_come_first() -> None:
    longest = max(BARS, key=expected_seconds)
    assert longest == "mixed Blockscale awq:merge+kfac"
    peer = "nvfp4a16 llm-compressor GPTQ"
    assert expected_seconds(peer + AS_KFAC) == KFAC_ROWS // ROWS * expected_seconds(peer) > 0


def run(**losses: float | None) -> dict[str, Any]:
    """A run with a row for each name, whose loss is the same on all texts."""
    rows = []
    for name, loss in losses.items():
        setting, _, configuration = name.partition(" ")
        texts = {f"KL {text}": loss for text in (*DOMAINS[1:], *LANGUAGES)}
        rows.append({"setting": SETTINGS[setting].title, "configuration": configuration, "KL": loss, **texts, "s": 3.2})
    return {"rows": rows}


def test_ratios_are_to_the_best_peer_on_as_many_rows_or_fewer() -> None:
    ours, kfac, peer = "nvfp4 Blockscale awq:merge+gptq", "nvfp4 Blockscale awq:merge+kfac", "nvfp4 ModelOpt AWQ lite"
    losses: dict[str, float | None] = {
        ours: 0.3, kfac: 0.1, peer: 0.5, peer + AS_KFAC: 0.4, "nvfp4 llm-compressor GPTQ": 0.6,
        # A branch takes more bits, and other weights and inputs are another setting.
        "nvfp4 ModelOpt SVDQuant": 0.01, "nvfp4a16 ModelOpt AWQ lite": 0.02, "nvfp4 ModelOpt GPTQ": None,
    }  # fmt: skip
    measured = Measured(run(**losses))
    cells = {row[0]: row[1:] for row in ratio_table(measured)[2:]}
    assert cells == {
        "NVFP4 weights and inputs, `awq:merge+gptq`": ["0.60"] * 7 + ["ModelOpt AWQ lite"],
        "`awq:merge+kfac`": ["0.25"] * 7 + ["ModelOpt AWQ lite, 512 rows"],
    }
    assert "nvfp4 ModelOpt GPTQ" in measured.missing()
    assert headline(measured) == [("NVFP4 weights and inputs", ours, peer)]
    title = "languages that the mixture does not hold"
    assert ["`awq:merge+kfac`, 512 rows", *["0.100"] * 4] in loss_table(title, measured)


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    rows = [
        {"setting": "NVFP4 W4A4", "configuration": "Blockscale rtn", "KL": 0.4},
        {
            "setting": "NVFP4 W4A4",
            "configuration": "ModelOpt GPTQ",
            "KL": None,
            "extra at run time": "failed",
        },
    ]
    table, texts, made_of = tmp_path / "table.json", tmp_path / "texts.safetensors", "128 rows"
    assert measured_rows(table, texts, made_of) == []
    table.write_text(json.dumps({"rows": rows, "notes": ["smollm2 on cuda: methods got 128 rows. 12 at a time"]}))
    assert measured_rows(table, texts, made_of) == rows[:1]
    with pytest.raises(click.UsageError, match="of other text"):
        measured_rows(table, texts, "32 rows")
    with pytest.raises(click.UsageError, match="--texts"):
        measured_rows(table, None, made_of)
