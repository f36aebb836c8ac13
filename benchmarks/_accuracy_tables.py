"""The tables of losses in README.md and docs/benchmarks.md: their lines, from rows that accuracy.py has measured.

A line names one or several rows; values of several stand beside each other. A row that a run lacks has no line, and
`result_tables.py` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from _accuracy_rows import AS_KFAC, KFAC_ROWS, SETTINGS

Row = Mapping[str, Any]
Lines = list[list[str]]

LANGUAGES = ("Finnish", "Hungarian", "Indonesian", "Tamil")
# Titles of columns by the names of the texts.
TITLES = {"WikiText-2": "WikiText-2", "Python": "Python", "reference": "prose about Python"}
DOMAINS = tuple(TITLES)


@dataclass(frozen=True)
class Line:
    """A line of a table: what its first cell says, with {kfac} for a number, its rows, and whether it is bold."""

    method: str
    rows: tuple[str, ...]
    bold: bool = False


def line(method: str, *rows: str, bold: bool = False) -> Line:
    return Line(method, rows, bold)


def both(method: str, row: str, *, more: str = "the same, {kfac} rows") -> tuple[Line, Line]:
    """A peer on as many rows as `gptq`, and on as many as `kfac`."""
    return line(method, row), line(more, row + AS_KFAC)


# llm-compressor's best settings, by setting of ours.
OBSERVERS = {
    setting: tuple(
        line(f"llm-compressor GPTQ, `nvfp4_{name}`", f"{setting} llm-compressor GPTQ, {name}")
        for name in ("expanded_imatrix", "expanded_mse")
    )
    for setting in ("nvfp4a16", "nvfp4")
}
WEIGHTS = (
    line("`gptq`, the default", "nvfp4a16 Blockscale gptq", bold=True),
    line("`kfac`, effort 3, {kfac} rows", "nvfp4a16 Blockscale kfac"),
    line("`rotation:64+gptq`, inputs rotated at run time", "nvfp4a16 Blockscale rotation:64+gptq"),
    line("`local_hessian`", "nvfp4a16 Blockscale local_hessian"),
    line("no text given: `gptq` / `local_hessian` on 32×512 tokens that the model wrote",
         "nvfp4a16 Blockscale gptq, no text", "nvfp4a16 Blockscale local_hessian, no text"),
    *both("ModelOpt local Hessian", "nvfp4a16 ModelOpt local Hessian"),
    *OBSERVERS["nvfp4a16"],
    *both("llm-compressor GPTQ", "nvfp4a16 llm-compressor GPTQ"),
    line("ModelOpt AWQ lite, inputs scaled at run time", "nvfp4a16 ModelOpt AWQ lite"),
    line("ModelOpt MSE with a sweep of FP8 scales", "nvfp4a16 ModelOpt MSE FP8 sweep"),
    line("ModelOpt GPTQ", "nvfp4a16 ModelOpt GPTQ"),
    line("ModelOpt four-over-six", "nvfp4a16 ModelOpt four-over-six"),
    line("to nearest: ModelOpt W4A16_NVFP4 / torchao NVFP4WeightOnly / llm-compressor NVFP4A16",
         "nvfp4a16 ModelOpt W4A16_NVFP4", "nvfp4a16 torchao NVFP4WeightOnly", "nvfp4a16 llm-compressor NVFP4A16"),
)  # fmt: skip
INPUTS = (
    line("`awq:merge+gptq`, the default", "nvfp4 Blockscale awq:merge+gptq", bold=True),
    line("`awq:merge+kfac`, effort 3, {kfac} rows", "nvfp4 Blockscale awq:merge+kfac"),
    line("`awq+gptq`, some inputs scaled at run time", "nvfp4 Blockscale awq+gptq"),
    line("inputs in `nvfp4_four_over_six`: `awq:merge+gptq`", "four_over_six Blockscale awq:merge+gptq"),
    line("the same: `awq:merge+kfac`, {kfac} rows", "four_over_six Blockscale awq:merge+kfac"),
    *both("ModelOpt AWQ lite, inputs scaled at run time", "nvfp4 ModelOpt AWQ lite"),
    *both("ModelOpt local Hessian", "nvfp4 ModelOpt local Hessian"),
    *OBSERVERS["nvfp4"],
    *both("llm-compressor GPTQ", "nvfp4 llm-compressor GPTQ"),
    line("ModelOpt MSE with a sweep of FP8 scales", "nvfp4 ModelOpt MSE FP8 sweep"),
    line("ModelOpt GPTQ", "nvfp4 ModelOpt GPTQ"),
    line("ModelOpt four-over-six", "nvfp4 ModelOpt four-over-six"),
    line("to nearest: ModelOpt NVFP4_DEFAULT / llm-compressor NVFP4",
         "nvfp4 ModelOpt NVFP4_DEFAULT", "nvfp4 llm-compressor NVFP4"),
    line("`awq:merge+residual:64+gptq`", "nvfp4 Blockscale awq:merge+residual:64+gptq", bold=True),
    line("`awq:merge+residual:64+kfac`, {kfac} rows", "nvfp4 Blockscale awq:merge+residual:64+kfac"),
    line("`awq+lowrank:32+gptq`", "nvfp4 Blockscale awq+lowrank:32+gptq", bold=True),
    line("`awq+lowrank:32+kfac`, {kfac} rows", "nvfp4 Blockscale awq+lowrank:32+kfac"),
    *both("ModelOpt SVDQuant, rank 32", "nvfp4 ModelOpt SVDQuant"),
)  # fmt: skip
EIGHT_BITS = (
    line("FP8 W8A8 per channel and token: `gptq`, the default", "fp8_channel Blockscale gptq", bold=True),
    line("the same, `awq:merge+kfac`, effort 3, {kfac} rows", "fp8_channel Blockscale awq:merge+kfac"),
    line(
        "the same, `awq:merge+rotation:learned+kfac`, {kfac} rows; the head takes 57 MB more",
        "fp8_channel Blockscale awq:merge+rotation:learned+kfac",
    ),
    line("the same, `rtn`", "fp8_channel Blockscale rtn"),
    line("ModelOpt FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel ModelOpt FP8_PER_CHANNEL_PER_TOKEN"),
    line("llm-compressor FP8_DYNAMIC", "fp8_channel llm-compressor FP8_DYNAMIC"),
    line("FP8 W8A8, static: `gptq`, the default", "fp8 Blockscale gptq", bold=True),
    line("the same, `awq:merge+kfac`, effort 3, {kfac} rows", "fp8 Blockscale awq:merge+kfac"),
    line(
        "the same, `awq:merge+rotation:learned+kfac`, {kfac} rows; the head takes 57 MB more",
        "fp8 Blockscale awq:merge+rotation:learned+kfac",
    ),
    line("the same, `rtn`", "fp8 Blockscale rtn"),
    *both("ModelOpt FP8_DEFAULT", "fp8 ModelOpt FP8_DEFAULT"),
    line("MXFP8 W8A8: `gptq`, the default", "mxfp8 Blockscale gptq", bold=True),
    line("the same, `rtn`", "mxfp8 Blockscale rtn"),
    line("ModelOpt MXFP8_DEFAULT", "mxfp8 ModelOpt MXFP8_DEFAULT"),
)
OTHER_WEIGHTS = (
    line("INT4 in groups of 64: `gptq`", "int4a16_g64 Blockscale gptq", bold=True),
    line("ModelOpt INT4_AWQ, inputs scaled at run time", "int4a16_g64 ModelOpt INT4_AWQ"),
    line("ModelOpt INT4, to nearest", "int4a16_g64 ModelOpt INT4_BLOCKWISE_WEIGHT_ONLY"),
    line("NVFP4 and FP8 weights, `--bits 4.8`, `gptq`", "mixeda16 Blockscale gptq", bold=True),
    line("the same, `kfac`, {kfac} rows", "mixeda16 Blockscale kfac"),
    *both("ModelOpt `auto_quantize`", "mixeda16 ModelOpt auto_quantize"),
    line("the same with inputs, `--bits 4.8`, `awq:merge+gptq`", "mixed Blockscale awq:merge+gptq", bold=True),
    line("the same, `awq:merge+kfac`, {kfac} rows", "mixed Blockscale awq:merge+kfac"),
    *both("ModelOpt `auto_quantize`", "mixed ModelOpt auto_quantize"),
)
OTHER_LANGUAGES = (
    line("NVFP4 weights: `gptq`", "nvfp4a16 Blockscale gptq", bold=True),
    line("`kfac`, {kfac} rows", "nvfp4a16 Blockscale kfac"),
    line("`gptq`, no text given", "nvfp4a16 Blockscale gptq, no text"),
    line("`local_hessian`", "nvfp4a16 Blockscale local_hessian"),
    *both("ModelOpt local Hessian", "nvfp4a16 ModelOpt local Hessian"),
    *OBSERVERS["nvfp4a16"],
    *both("llm-compressor GPTQ", "nvfp4a16 llm-compressor GPTQ"),
    line("NVFP4 weights and inputs: `awq:merge+gptq`", "nvfp4 Blockscale awq:merge+gptq", bold=True),
    line("`awq:merge+kfac`, {kfac} rows", "nvfp4 Blockscale awq:merge+kfac"),
    line("inputs in `nvfp4_four_over_six`, `awq:merge+kfac`, {kfac} rows", "four_over_six Blockscale awq:merge+kfac"),
    *both("ModelOpt AWQ lite, inputs scaled at run time", "nvfp4 ModelOpt AWQ lite"),
    *OBSERVERS["nvfp4"],
    *both("llm-compressor GPTQ", "nvfp4 llm-compressor GPTQ"),
    line("with 64 residual channels: `awq:merge+residual:64+gptq`", "nvfp4 Blockscale awq:merge+residual:64+gptq"),
    line("with a branch of rank 32: `awq+lowrank:32+gptq`", "nvfp4 Blockscale awq+lowrank:32+gptq", bold=True),
    line("`awq+lowrank:32+kfac`, {kfac} rows", "nvfp4 Blockscale awq+lowrank:32+kfac"),
    *both("ModelOpt SVDQuant, rank 32", "nvfp4 ModelOpt SVDQuant"),
    line("FP8, static: `gptq`", "fp8 Blockscale gptq", bold=True),
    line("`awq:merge+kfac`, {kfac} rows", "fp8 Blockscale awq:merge+kfac"),
    line("`awq:merge+rotation:learned+kfac`, {kfac} rows", "fp8 Blockscale awq:merge+rotation:learned+kfac"),
    line("`rtn`", "fp8 Blockscale rtn"),
    *both("ModelOpt FP8_DEFAULT", "fp8 ModelOpt FP8_DEFAULT"),
    line("FP8 per channel and token: `gptq`", "fp8_channel Blockscale gptq", bold=True),
    line("`awq:merge+kfac`, {kfac} rows", "fp8_channel Blockscale awq:merge+kfac"),
    line("`awq:merge+rotation:learned+kfac`, {kfac} rows", "fp8_channel Blockscale awq:merge+rotation:learned+kfac"),
    line("`rtn`", "fp8_channel Blockscale rtn"),
    line("ModelOpt FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel ModelOpt FP8_PER_CHANNEL_PER_TOKEN"),
    line("llm-compressor FP8_DYNAMIC", "fp8_channel llm-compressor FP8_DYNAMIC"),
)
# By title: the columns, and the lines.
TABLES: dict[str, tuple[tuple[str, ...], tuple[Line, ...]]] = {
    "NVFP4 weight-only, 4.5 bits": ((*DOMAINS, "s"), WEIGHTS),
    "NVFP4 weights and inputs": (("bits", *DOMAINS, "s"), INPUTS),
    "8 bits": (DOMAINS, EIGHT_BITS),
    "other weights": (("bits", *DOMAINS, "s"), OTHER_WEIGHTS),
    "languages that the mixture does not hold": (LANGUAGES, OTHER_LANGUAGES),
}
# Our rows that a ratio is claimed for, README's first.
HEADLINE = (
    line("NVFP4 weights", "nvfp4a16 Blockscale gptq"),
    line("NVFP4 weights and inputs", "nvfp4 Blockscale awq:merge+gptq"),
    line("with a branch of rank 32", "nvfp4 Blockscale awq+lowrank:32+gptq"),
    line("FP8 weights, inputs per token", "fp8_channel Blockscale gptq"),
    line("INT4 weights, groups of 64", "int4a16_g64 Blockscale gptq"),
    line("4.8 bits, NVFP4 and FP8 weights", "mixeda16 Blockscale gptq"),
)
RATIOS = (
    line("NVFP4 weights, `gptq`", "nvfp4a16 Blockscale gptq"),
    line("`kfac`", "nvfp4a16 Blockscale kfac"),
    line("NVFP4 weights and inputs, `awq:merge+gptq`", "nvfp4 Blockscale awq:merge+gptq"),
    line("`awq:merge+kfac`", "nvfp4 Blockscale awq:merge+kfac"),
    line("with 64 residual channels, `awq:merge+residual:64+gptq`", "nvfp4 Blockscale awq:merge+residual:64+gptq"),
    line("`awq:merge+residual:64+kfac`", "nvfp4 Blockscale awq:merge+residual:64+kfac"),
    line("with a branch of rank 32, `awq+lowrank:32+gptq`", "nvfp4 Blockscale awq+lowrank:32+gptq"),
    line("`awq+lowrank:32+kfac`", "nvfp4 Blockscale awq+lowrank:32+kfac"),
    line("FP8 per channel and token, `gptq`", "fp8_channel Blockscale gptq"),
    line("`awq:merge+kfac`", "fp8_channel Blockscale awq:merge+kfac"),
    line("`awq:merge+rotation:learned+kfac`", "fp8_channel Blockscale awq:merge+rotation:learned+kfac"),
    line("FP8 static, `gptq`", "fp8 Blockscale gptq"),
    line("`awq:merge+kfac`", "fp8 Blockscale awq:merge+kfac"),
    line("`awq:merge+rotation:learned+kfac`", "fp8 Blockscale awq:merge+rotation:learned+kfac"),
    line("MXFP8, `gptq`", "mxfp8 Blockscale gptq"),
    line("INT4, `gptq`", "int4a16_g64 Blockscale gptq"),
    line("4.8 bits, weights, `gptq`", "mixeda16 Blockscale gptq"),
    line("`kfac`", "mixeda16 Blockscale kfac"),
    line("4.8 bits, weights and inputs, `awq:merge+gptq`", "mixed Blockscale awq:merge+gptq"),
    line("`awq:merge+kfac`", "mixed Blockscale awq:merge+kfac"),
)


class Measured:
    """The rows of a run by name, of which those that failed are left out.

    Attributes:
        kfac_rows: calibration rows of `kfac`, as the notes of the run say.
    """

    def __init__(self, run: Row) -> None:
        noted = re.search(r"kfac (\d+) rows", " ".join(run.get("notes", ())))
        self.kfac_rows = int(noted[1]) if noted else KFAC_ROWS
        keys = {setting.title: key for key, setting in SETTINGS.items()}
        rows = {f"{keys[row['setting']]} {row['configuration']}": row for row in run["rows"]}
        self.rows: dict[str, Row] = {name: row for name, row in rows.items() if row["KL"] is not None}

    def missing(self) -> list[str]:
        """Names of rows that a table would have."""
        lines = [entry for _, entries in TABLES.values() for entry in entries]
        return [row for row in dict.fromkeys(row for entry in lines for row in entry.rows) if row not in self.rows]

    def loss(self, name: str, text: str) -> float:
        value: float = self.rows[name]["KL" if text == DOMAINS[0] else f"KL {text}"]
        return value

    def peers(self, name: str) -> list[str]:
        """Other toolkits' rows at the same bits: for `kfac` on either number of rows, for other solvers on theirs."""
        setting, branch = name.split()[0], "lowrank" in name
        return [
            row for row in self.rows
            if row.split()[0] == setting and row.split()[1] != "Blockscale" and ("SVDQuant" in row) == branch
            and ("kfac" in name or not row.endswith(AS_KFAC))
        ]  # fmt: skip

    def is_comparable(self, name: str) -> bool:
        return name in self.rows and bool(self.peers(name))

    def best_peer(self, name: str) -> str:
        """The peer's row with the least loss on the three kinds of text together."""
        return min(self.peers(name), key=lambda row: sum(self.loss(row, text) for text in DOMAINS))

    def cell(self, name: str, column: str) -> str:
        row = self.rows[name]
        if column == "s":
            return f"{row['s']:.0f}"
        return f"{row['bits']:.3g}" if column == "bits" else f"{self.loss(name, column):.3f}"


def loss_table(title: str, measured: Measured) -> Lines:
    """The cells of one of `TABLES`, its title first."""
    columns, entries = TABLES[title]
    cells = [[title, *(TITLES.get(column, column) for column in columns)], ["---", *("---:" for _ in columns)]]
    for entry in entries:
        rows = [row for row in entry.rows if row in measured.rows]
        if not rows:
            continue
        values = [" / ".join(measured.cell(row, column) for row in rows) for column in columns]
        is_loss = [column not in ("s", "bits") for column in columns]
        bold = [f"**{value}**" if entry.bold and loss else value for value, loss in zip(values, is_loss, strict=True)]
        method = entry.method.format(kfac=measured.kfac_rows)
        cells.append([f"**{method}**" if entry.bold else method, *bold])
    return cells


def ratio_table(measured: Measured) -> Lines:
    """Our losses relative to the least that another toolkit has on each text."""
    texts = (*DOMAINS, *LANGUAGES)
    cells = [["loss relative to the best peer", *(TITLES.get(text, text) for text in texts), "best peer"]]
    cells.append(["---", *("---:" for _ in texts), "---"])
    for entry in RATIOS:
        (name,) = entry.rows
        if not measured.is_comparable(name):
            continue
        best = {text: min(measured.loss(row, text) for row in measured.peers(name)) for text in texts}
        ratios = [f"{measured.loss(name, text) / best[text]:.2f}" for text in texts]
        cells.append([entry.method, *ratios, spelled(measured.best_peer(name), measured.kfac_rows)])
    return cells


def size_table(models: Mapping[str, Measured]) -> Lines:
    """Losses of ours and of the best peer in models of different sizes, by their names, where all were measured."""
    cells = [
        ["at both sizes", "model", "Blockscale", "best peer", "KL", "ratio"],
        ["---", "---", "---:", "---", "---:", "---:"],
    ]
    for entry in RATIOS:
        (name,) = entry.rows
        if not all(measured.is_comparable(name) for measured in models.values()):
            continue
        for model, measured in models.items():
            peer = measured.best_peer(name)
            best = [min(measured.loss(row, text) for row in measured.peers(name)) for text in DOMAINS]
            ratios = [measured.loss(name, text) / loss for text, loss in zip(DOMAINS, best, strict=True)]
            ours, theirs = (" / ".join(measured.cell(row, text) for text in DOMAINS) for row in (name, peer))
            method = entry.method + (f" ({measured.cell(name, 'bits')} bits)" if "residual" in name else "")
            ratio = " / ".join(f"{each:.2f}" for each in ratios)
            cells.append([method, model, f"**{ours}**", spelled(peer, measured.kfac_rows), theirs, ratio])
    return cells


def headline(measured: Measured) -> list[tuple[str, str, str]]:
    """README's settings, each with our row and the best peer's."""
    named = [(entry.method, entry.rows[0]) for entry in HEADLINE]
    return [(setting, ours, measured.best_peer(ours)) for setting, ours in named if measured.is_comparable(ours)]


def headline_table(measured: Measured) -> Lines:
    """The cells of README's table."""
    cells = [["", "Blockscale", "KL", "best peer", "KL"], ["---", "---", "---:", "---", "---:"]]
    for setting, ours, peer in headline(measured):
        losses = [" / ".join(measured.cell(row, text) for text in DOMAINS) for row in (ours, peer)]
        cells.append([setting, f"`{_options(ours)}`", f"**{losses[0]}**", spelled(peer, measured.kfac_rows), losses[1]])
    return cells


def _options(name: str) -> str:
    solver = name.split()[-1]
    choice = SETTINGS[name.split()[0]].choice
    return f"--bits 4.8 --format {choice} --solver {solver}" if choice else solver


def spelled(name: str, kfac_rows: int) -> str:
    """A peer's row in words; `kfac_rows` as in `Measured`."""
    return name.split(maxsplit=1)[1].replace(AS_KFAC, f", {kfac_rows} rows")
