"""This benchmark times a training step under the deployed rounding, next to the same step in BF16.

The model is some decoder layers of Llama-3-8B's shape with random weights, a step is a forward and a backward pass over
one batch, compiled. Rows differ in what the layers multiply by: BF16 weights, or weights (and inputs) rounded to NVFP4
with scales recomputed, frozen or learned. The optimizer is left out, for it is the same in all rows.

`ms` is the median of the steps after the first five; `× BF16` compares with the first row.
"""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _table import machine, show, versions
from torch import nn

import quant

TITLE = "A training step"
_VOCABULARY = 1024  # a small head: the decoder is timed


@click.command(help=__doc__)
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=4096, show_default=True)
@click.option("--tokens", default=8192, show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="Of the weights in training.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(layers: int, hidden: int, tokens: int, steps: int, dtype: str, json_path: Path | None) -> None:
    original = random_llama(layers, hidden=hidden, vocabulary=_VOCABULARY, positions=tokens).requires_grad_(True)
    ids = torch.randint(0, _VOCABULARY, (1, tokens), device=original.device)
    rows: list[dict[str, Any]] = []

    def add(name: str, model: nn.Module) -> None:
        seconds, peak = _time(model, ids, steps)
        first = rows[0]["ms"] / 1e3 if rows else seconds
        rows.append({"weights": name, "ms": 1e3 * seconds, "× BF16": seconds / first, "peak GB": peak})
        click.echo(str(rows[-1]), err=True)

    add("BF16", copy.deepcopy(original))
    wide = original.dtype if dtype == "bfloat16" else torch.float32
    for preset in ("nvfp4", "nvfp4a16"):
        for scales in ("recomputed", "frozen", "learned"):
            model = copy.deepcopy(original)
            quant.prepare_qat(model, preset, ids[:, :128], solver="rtn", scales=scales, dtype=wide)
            add(f"{preset}, {scales} scales, {dtype} weights", model)
            del model
    header = machine() | versions("transformers", "triton")
    note = f"{layers} layers of {hidden} x {hidden * 7 // 2}, {tokens} tokens."
    show(TITLE, header, rows, [note], json_path=json_path)


def _time(model: Any, ids: torch.Tensor, steps: int) -> tuple[float, float | None]:
    """Seconds of a step, and peak memory in GB on a GPU."""
    on_gpu = ids.is_cuda
    if on_gpu:
        model.model.compile()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    return statistics.median(seconds[5:] or seconds), peak


if __name__ == "__main__":
    main()
