"""This benchmark quantizes one large weight: it measures seconds, extra memory and error, in ModelOpt as well.

Each case runs in a fresh process with a BF16 weight in memory. A small weight warms up imports and threads, the
first full run gives the memory (growth of the peak RSS, less the output itself), and all full runs give the median
time. A case runs right after its peers, so that a machine that other work slows down slows all of them.

ModelOpt's FP8-scale sweep (`NVFP4MSECalibrator`, which tries all 126 E4M3 scales a block) finds scales only, while
ours also rounds and packs. On a CPU ModelOpt calls it with a Triton fake quantization and stops; the calibrator
itself runs when it is given one, and is measured with two: ModelOpt's own PyTorch rounding (the cast of
`NVFP4QTensor`), and ours; the faster of the two is the peer. The sweep takes a slice of the rows, since the whole
weight would take it minutes; our own run over the same slice is the one compared.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from _table import machine, show, versions

from quant.base.errors import install_command
from quant.base.json_files import json_text
from quant.formats.format import E2M1, FORMATS
from quant.formats.rounding import round_to
from quant.formats.tensor import quantize

BLOCK = FORMATS["nvfp4"].block[1]
TITLE = "Quantizing one BF16 weight on a CPU"

# Runs one case: the bytes of its output, and a function that gives the dequantized weight, to be called untimed.
Outcome = tuple[int, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One line of the table. It is compared with the fastest of `peers`; `sliced` takes the slice of rows."""

    run: Callable[[torch.Tensor], Outcome]
    peers: tuple[str, ...] = ()
    sliced: bool = False
    modelopt: bool = False


def ours(weight: torch.Tensor, *, format: str, rule: str) -> Outcome:
    quantized = quantize(weight, FORMATS[format], rule=rule)
    return quantized.nbytes, quantized.dequantize


def modelopt_max(weight: torch.Tensor) -> Outcome:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scale, second = NVFP4QTensor.quantize(weight, BLOCK)

    def dequantize() -> torch.Tensor:
        return packed.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: BLOCK})

    return packed._quantized_data.nbytes + scale.nbytes + second.nbytes, dequantize


def modelopt_sweep(
    weight: torch.Tensor, *, fake_quantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Outcome:
    from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator

    blocks = weight.view(-1, BLOCK)
    amax = blocks.abs().amax(dim=-1).float()
    calibrator = NVFP4MSECalibrator(amax, amax.amax(), axis=0, quant_func=fake_quantize)
    calibrator.collect(blocks)
    best = calibrator.compute_amax()
    return best.nbytes, lambda: fake_quantize(blocks.float(), best).view_as(weight)


def modelopt_rounding(blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Fake quantization of `[blocks, 16]` by the cast and the value table of ModelOpt's NVFP4 tensor."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    step = (amax / E2M1.max).unsqueeze(-1)
    codes = NVFP4QTensor._cast_fp4(blocks / step)
    return NVFP4QTensor.get_e2m1_values(blocks.device)[codes.int()] * step


def our_rounding(blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The same by `round_to`."""
    step = (amax / E2M1.max).unsqueeze(-1)
    return round_to(blocks / step, E2M1).mul_(step)


SWEEPS = ("ModelOpt nvfp4 sweep, its rounding", "ModelOpt nvfp4 sweep, our rounding")
CASES = {
    "ModelOpt nvfp4 max": Case(modelopt_max, modelopt=True),
    "nvfp4 max": Case(partial(ours, format="nvfp4", rule="max"), peers=("ModelOpt nvfp4 max",)),
    SWEEPS[0]: Case(partial(modelopt_sweep, fake_quantize=modelopt_rounding), sliced=True, modelopt=True),
    SWEEPS[1]: Case(partial(modelopt_sweep, fake_quantize=our_rounding), sliced=True, modelopt=True),
    "nvfp4 mse, slice": Case(partial(ours, format="nvfp4", rule="mse"), peers=SWEEPS, sliced=True),
    "nvfp4 mse": Case(partial(ours, format="nvfp4", rule="mse")),
    "nvfp4 four_over_six": Case(partial(ours, format="nvfp4", rule="four_over_six")),
    "mxfp4 max": Case(partial(ours, format="mxfp4", rule="max")),
    "mxfp8 max": Case(partial(ours, format="mxfp8", rule="max")),
    "fp8 max": Case(partial(ours, format="fp8", rule="max")),
}


def random_weight(rows: int, columns: int) -> torch.Tensor:
    """BF16 normal values, made row by row so that no float32 copy raises the peak before the measurement."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    for row in weight:
        row.copy_(torch.randn(columns, generator=generator).mul_(0.02))
    return weight


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(case: Case, rows: int, columns: int, repeats: int) -> dict[str, float]:
    """Seconds, extra bytes and relative squared error of one case, in this process."""
    weight = random_weight(rows, columns)
    case.run(weight[:1].clone())
    before = peak_rss()
    seconds, extra = [], 0
    for i in range(repeats):
        start = time.perf_counter()
        output_bytes, dequantize = case.run(weight)
        seconds.append(time.perf_counter() - start)
        if i == 0:
            extra = max(peak_rss() - before - output_bytes, 0)
    error = power = 0.0
    for values, expected in zip(dequantize().split(64), weight.split(64), strict=True):
        error += float((values.float() - expected.float()).square().sum(dtype=torch.float64))
        power += float(expected.float().square().sum(dtype=torch.float64))
    return {"seconds": statistics.median(seconds), "extra": extra, "error": error / power}


def measure_in_fresh_process(name: str, options: list[str]) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--case", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"case {name!r} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table_row(name: str, shape: tuple[int, int], results: dict[str, dict[str, float]]) -> dict[str, object]:
    case, result = CASES[name], results[name]
    peers = [results[peer]["seconds"] for peer in case.peers if peer in results]
    return {
        "case": name,
        "weight": f"{shape[0]}×{shape[1]}",
        "seconds": result["seconds"],
        "of ModelOpt": result["seconds"] / min(peers) if peers else None,
        "M weights/s": shape[0] * shape[1] / result["seconds"] / 1e6,
        "extra MB": result["extra"] / 1e6,
        "squared error %": 100 * result["error"],
    }


@click.command(help=__doc__)
@click.option("--rows", default=4096, show_default=True, help="Rows of the weight.")
@click.option("--columns", default=14336, show_default=True, help="Columns of the weight, a multiple of 16.")
@click.option("--sweep-rows", default=64, show_default=True, help="Rows of the slice that the sweep takes.")
@click.option("--repeats", default=3, show_default=True, help="Timed runs of each case; the median is printed.")
@click.option("--threads", default=2, show_default=True, help="CPU threads of torch.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--case", "only", type=click.Choice(list(CASES)), hidden=True, help="Measure one case here, print JSON.")
def main(
    rows: int, columns: int, sweep_rows: int, repeats: int, threads: int, json_path: Path | None, only: str | None
) -> None:
    torch.set_num_threads(threads)
    if only:
        case = CASES[only]
        print(json_text(measure(case, sweep_rows if case.sliced else rows, columns, repeats)))
        return
    notes = ["Extra memory: growth of the peak RSS beyond input and output. The weight is normal, in BF16."]
    has_modelopt = importlib.util.find_spec("modelopt") is not None
    if not has_modelopt:
        notes.append(f"ModelOpt is not installed, so there is no peer here: {install_command('modelopt')}.")
    options = [
        f"--{key}={value}"
        for key, value in {
            "rows": rows, "columns": columns, "sweep-rows": sweep_rows, "repeats": repeats, "threads": threads
        }.items()
    ]  # fmt: skip
    names = [name for name, case in CASES.items() if has_modelopt or not case.modelopt]
    results = {}
    for name in names:
        click.echo(f"measuring {name} …", err=True)
        results[name] = measure_in_fresh_process(name, options)
    table = [table_row(name, (sweep_rows if CASES[name].sliced else rows, columns), results) for name in names]
    header = machine(threads) | versions("nvidia-modelopt")
    show(TITLE, header, table, notes, json_path=json_path)


if __name__ == "__main__":
    main()
