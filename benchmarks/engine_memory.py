"""This benchmark measures the memory that an export needs in addition to a model of several gigabytes.

    python benchmarks/engine_memory.py [--gigabytes 2.5] [--format fp8] [--no-checks] [--target sm120] [--json FILE]

The model is a chain of wide linears with random codes, made in the format at once and never in 16 bit. While it is
exported, a thread adds up the memory of this process and of the builder's, twenty times a second:

    extra      resident memory that is no file, above what the model takes: what the machine must have free
    + files    with pages of mapped files, which the system may drop at any time

The last column of the first row is the limit: 1.2 times the model. Nothing needs a GPU.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from _table import machine, show, versions
from torch import nn

from quant.export.onnx.compare_with_torch import check_file, verify
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.export_onnx import write_onnx
from quant.export.tensorrt.build import BuildOptions, export_engine
from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quant_linear import QuantLinear

TITLE = "Memory of an export"
LIMIT = 1.2
WIDTH = 12288


class Memory:
    """The most memory that this process and its children held at a time, above what was there at the start."""

    def __init__(self) -> None:
        self.start = _resident()
        self.peak = (0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            own, files = _resident()
            self.peak = (
                max(self.peak[0], own - self.start[0]),
                max(self.peak[1], own + files - sum(self.start)),
            )


def _resident() -> tuple[int, int]:
    """Bytes of this process and its children that are no file, and those that are."""
    own = files = 0
    for pid in (os.getpid(), *_children(os.getpid())):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        own += _bytes(fields, "RssAnon") + _bytes(fields, "RssShmem")
        files += _bytes(fields, "RssFile")
    return own, files


def _bytes(fields: dict[str, str], name: str) -> int:
    return 1024 * int(fields.get(name, "0").split()[0])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            found += [child, *_children(child)]
    return found


def build(gigabytes: float, format: Format) -> tuple[nn.Sequential, int]:
    """The model, and the bytes of its weights."""
    weight_bytes = format.nbytes((WIDTH, WIDTH))
    layers = max(round(gigabytes * 1e9 / weight_bytes), 1)
    model = nn.Sequential()
    for _ in range(layers):
        codes = torch.randint(0, 120, format.codes_shape((WIDTH, WIDTH)), dtype=torch.uint8)
        scale = torch.full(format.scale_shape((WIDTH, WIDTH)), 0.01)
        dtype = format.element.torch_dtype or torch.uint8
        second = torch.tensor(0.01) if format.global_scale else None
        stored = scale if format.scale.is_wide else torch.ones_like(scale).to(torch.float8_e4m3fn)
        weight = BlockScaledTensor(codes.view(dtype), stored, format, (WIDTH, WIDTH), second)
        model.append(QuantLinear(weight, None, format, torch.tensor(0.02)))
    return model, sum(x.nbytes for x in model.buffers())


def measured(step: Callable[[], Any]) -> tuple[tuple[int, int], float]:
    """Peak memory and seconds of one step."""
    started = time.perf_counter()
    with Memory() as memory:
        step()
    return memory.peak, time.perf_counter() - started


@click.command()
@click.option("--gigabytes", default=2.5, show_default=True, help="Bytes of weights in the model.")
@click.option("--format", "name", type=click.Choice(["fp8", "nvfp4"]), default="fp8", show_default=True)
@click.option("--checks/--no-checks", default=True, show_default=True, help="Compare every layer with PyTorch, too.")
@click.option("--target", default="sm120", show_default=True, help="GPU of the engine.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table there as well.")
def main(gigabytes: float, name: str, checks: bool, target: str, json_file: Path | None) -> None:
    model, size = build(gigabytes, FORMATS[name])
    inputs = {"x": GraphInput(torch.zeros(2, WIDTH, dtype=torch.float16), ("tokens", WIDTH))}
    shapes = "tokens=1:16:16"
    with tempfile.TemporaryDirectory() as folder:
        path, engine = Path(folder, "model.onnx"), Path(folder, "model.engine")
        steps: dict[str, Callable[[], Any]] = {
            "ONNX file": lambda: write_onnx(model, path, inputs=inputs, shapes=shapes),
            "checks of every layer": lambda: (check_file(path), verify(model, path)),
            "engine, audit, codes found": lambda: export_engine(path, engine, BuildOptions(target, shapes)),
        }
        if not checks:
            del steps["checks of every layer"]
        rows = []
        for step, run in steps.items():
            (own, both), seconds = measured(run)
            print(f"-- {step}: {seconds:.0f} s", flush=True)
            rows.append(
                {
                    "step": step,
                    "seconds": seconds,
                    "extra GB": own / 1e9,
                    "+ files GB": both / 1e9,
                    "extra / model": own / size,
                    "limit": LIMIT,
                }
            )
    header = {
        **machine(),
        **versions("onnx", "tensorrt-rtx"),
        "model": f"{size / 1e9:.2f} GB {name}, {len(model)} layers",
    }
    show(TITLE, header, rows, json_path=json_file)


if __name__ == "__main__":
    main()
