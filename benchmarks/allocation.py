"""This benchmark compares our allocation of formats with ModelOpt's `auto_quantize`, at exactly counted bits.

Every row gets the same model, text and formats: NVFP4 and FP8 per tensor, each with its inputs (W4A4, W8A8) or
weights alone (W4A16, W8A16), and 16 bit. Bits are those of the formats that the finished model really has, every
scale counted, over all linear layers but the output head; both toolkits are counted by the same code. `rtn` rows
round the weights to nearest with the plain `max` rule for scales in both toolkits, so that they differ in the choice
of formats alone: `scores` is the knapsack over scores, `search` what is chosen after measuring. The other rows are
ours with the solver that is best for these formats, and each format for all layers.

    × ModelOpt    KL of a row over that of `auto_quantize` at the same budget
    solve         seconds of the knapsack at 1,000 groups and 6 formats
    score         seconds of scoring every group in three formats by each method

Each row runs in a fresh process. On a CPU, ModelOpt's GPU kernels are replaced by our roundings (see `_peers.py`),
its scores and its search unchanged; it then gets 4 rows of text, for its passes take several times as long as ours.

All rows take about two hours of one core. They can be run in parts, and ModelOpt's rows in another environment: --json
is written after every row, and --from takes the rows of such a file and says so.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _peers import auto_quantize, exact_bits, modelopt_on_cpu
from _table import machine, show, versions, write_json
from _texts import TOKENS
from torch import nn

import quant
from quant.base.json_files import json_text
from quant.calibration.allocation.allocate import allocate, score
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.measure_choices import Counts
from quant.calibration.sensitivity.knapsack import KnapsackProblem, smallest, solve
from quant.evaluation.evaluate import evaluate
from quant.models.open_model import open_model

TITLE = "Allocation: KL at a budget of bits"
SETTINGS = {"w4a4": "nvfp4,fp8", "w4a16": "nvfp4a16,fp8a16"}
BITS = (4.8, 6.0)
SOLVERS = {"w4a4": ("rtn", "awq+gptq"), "w4a16": ("rtn", "gptq")}
PEER = "ModelOpt auto_quantize, gradient"


def row_names() -> list[str]:
    """`SETTING BITS TOOLKIT CONFIGURATION` of every row of the first table."""
    names = []
    for setting, formats in SETTINGS.items():
        four, eight = formats.split(",")
        names += [f"{setting} – Blockscale uniform {f} {s}" for f in (four, eight) for s in SOLVERS[setting]]
        for bits in BITS:
            names.append(f"{setting} {bits} Blockscale rtn, scores")
            names += [f"{setting} {bits} Blockscale {solver}, search" for solver in SOLVERS[setting]]
            names.append(f"{setting} {bits} {PEER}")
    return names


def rows_of(name: str, count: int) -> torch.Tensor:
    """Token rows of the benchmark's text."""
    return quant.token_rows(f"{TOKENS}:{name}", None, samples=count, seqlen=512)


def measure(name: str, model_name: str, device: str) -> dict[str, Any]:
    """One row, in this process."""
    setting, bits, toolkit, configuration = name.split(maxsplit=3)
    model = _open(model_name, device)
    calibration = rows_of("calibration", 32)
    predicted = None
    start = time.perf_counter()
    if toolkit == "ModelOpt":
        if device == "cpu":
            modelopt_on_cpu()
        exact = auto_quantize(model, calibration, float(bits), weights_only=setting == "w4a16")
    elif configuration.startswith("uniform"):
        _, format_name, solver = configuration.split()
        format_name = format_name.removesuffix("a16")
        activation = "keep" if setting == "w4a16" else format_name
        quant.quantize(model, quant.Recipe("uniform", format_name, activation, solver), calibration.to(device))
        exact = exact_bits(model)
    else:
        solver, how = configuration.split(", ")
        counts = Counts(measurements=0) if how == "scores" else Counts()
        found = allocate(
            model, calibration, Goal(bits=float(bits)), formats=SETTINGS[setting], solver=solver, counts=counts
        )
        predicted = found.record.chosen.kl_predicted
        model = (found.quantized or quant.quantize(model, found.plan, calibration.to(device))).model
        exact = exact_bits(model)
    seconds = time.perf_counter() - start
    gc.collect()
    result = evaluate(model, rows_of("eval", 16), _open(model_name, device), batch_size=4)
    return {
        "bits, exact": exact, "KL": result.kl, "KL predicted": predicted, "perplexity": result.perplexity,
        "top-1": result.top1, "s": seconds,
    }  # fmt: skip


def _open(name: str, device: str) -> nn.Module:
    model = open_model(name).model
    assert model is not None
    return model.to(device)


def timings(model_name: str) -> Iterator[dict[str, Any]]:
    """Seconds of scoring by each method, and of one solve."""
    for method, count in (("output", 8), ("fisher", 8), ("kl", 2)):
        start = time.perf_counter()
        table = score(_open(model_name, "cpu"), rows_of("calibration", count), formats="nvfp4,mxfp8,fp8", method=method)
        what = f"score by {method}: {len(table.groups)} groups × 3 formats, {count} × 512 tokens"
        yield {"what": what, "s": time.perf_counter() - start}
    rng = np.random.default_rng(0)
    bits = np.array([4.25, 4.5, 6.25, 8.0, 8.25, 16.0])
    numel = rng.integers(1, 64, (1000, 1)) * 2**18
    scores = numel * rng.lognormal(0, 1.5, (1000, 1)) * 2.0 ** (-2 * bits) * rng.lognormal(0, 0.2, (1000, 6))
    names = tuple(map(str, range(1000)))
    problem = KnapsackProblem(names, tuple("abcdef"), scores, {"bytes": np.round(numel * bits / 8)})
    for part in (1.13, 1.5):
        start = time.perf_counter()
        solve(problem, {"bytes": part * smallest(problem, "bytes")})
        yield {"what": f"solve 1,000 groups × 6 formats at {4.25 * part:.2f} bits", "s": time.perf_counter() - start}


def measure_in_fresh_process(name: str, model_name: str, device: str) -> dict[str, Any]:
    """One row from a process of its own, or {"error": the last line of what it said}."""
    command = [sys.executable, "-W", "ignore", __file__, "--device", device, "--model", model_name, "--row", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": said[-1] if said else f"exit status {done.returncode}"}


def rows_in(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a table that was written with --json, by name, marked as from an earlier run."""
    table = json.loads(path.read_text(encoding="utf-8"))
    of = {formats: setting for setting, formats in SETTINGS.items()}
    said = f"earlier run: {table['header']['cpu']}, {table['header'].get('gpu', 'no GPU')}"
    shown = ("formats", "budget", "configuration", "× ModelOpt")
    found = {}
    for row in table["rows"]:
        if "error" not in row:
            name = f"{of[row['formats']]} {row['budget']} {row['configuration']}"
            found[name] = {key: value for key, value in row.items() if key not in shown}
            found[name]["from"] = said if row["from"] == "this run" else row["from"]
    return found


def beside_the_peer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their KL over that of ModelOpt at the same formats and budget."""
    peers = {(row["formats"], row["budget"]): row.get("KL") for row in rows if row["configuration"] == PEER}
    found = []
    for row in rows:
        peer, loss = peers.get((row["formats"], row["budget"])), row.get("KL")
        ratio = {"× ModelOpt": loss / peer if peer and loss and row["configuration"] != PEER else None}
        place = list(row).index("KL") + 1 if loss else len(row)
        found.append(dict([*list(row.items())[:place], *ratio.items(), *list(row.items())[place:]]))
    return found


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True, help="What to quantize.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only rows whose name matches; may be repeated.")
@click.option("--list", "list_only", is_flag=True, help="Print the names of the rows and stop.")
@click.option("--times", is_flag=True, help="Only the table of times.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--from", "earlier", multiple=True, type=click.Path(path_type=Path), help="Take rows that this JSON has.")
@click.option("--row", hidden=True)
def main(
    device: str,
    model: str,
    only: tuple[str, ...],
    list_only: bool,
    times: bool,
    json_path: Path | None,
    earlier: tuple[Path, ...],
    row: str | None,
) -> None:
    if row is not None:
        print(json_text(measure(row, model, device)))
        return
    known = {name: row for path in earlier if path.exists() for name, row in rows_in(path).items()}
    names = [name for name in row_names() if not only or any(fnmatchcase(name, glob) for glob in only)]
    if importlib.util.find_spec("modelopt") is None:
        names = [name for name in names if PEER not in name or name in known]
    if list_only:
        print("\n".join(names))
        return
    header = {**machine(), **versions("nvidia-modelopt", "scipy", "transformers")}
    if not times:
        rows: list[dict[str, Any]] = []
        for name in names:
            setting, bits, configuration = name.split(maxsplit=2)
            result = known.get(name) or {**measure_in_fresh_process(name, model, device), "from": "this run"}
            rows.append({"formats": SETTINGS[setting], "budget": bits, "configuration": configuration, **result})
            click.echo(f"{name}: {result}", err=True)
            if json_path is not None:
                write_json(json_path, TITLE, header, beside_the_peer(rows))
        show(TITLE, header, beside_the_peer(rows))
    if times or not only:
        show("Times", header, list(timings(model)))


if __name__ == "__main__":
    main()
