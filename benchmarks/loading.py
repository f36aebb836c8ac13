"""This benchmark times `quant.load` of a checkpoint of one gigabyte, from the page cache to a model on the CPU.

    python benchmarks/loading.py                       nvfp4 and fp8, this tree
    python benchmarks/loading.py --against ../before   and another checkout, such as a git worktree of an older commit
    python benchmarks/loading.py --gigabytes 4 --json loading.json

Each tree loads in a process of its own, in turns with the other. A row has wall-clock time, the median and the least of
all loads, and the median of processor time. The checkpoint is that of a Llama with random codes. Loading maps the files
and reads what it checks: all scales and all tensors in 16 bit. FP8 codes, which may be NaN, are read when their layer
is first used; `read` is the time in which one core finds the largest byte of all files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _table import machine, show_all, versions

import quant
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.install import install_weight

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 5632, 32000
CHILD = """
import json, sys, time
import quant
directory, rounds = sys.argv[1], int(sys.argv[2])
times = []
for _ in range(rounds + 1):
    start = time.perf_counter(), time.process_time()
    model = quant.load(directory)
    times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    del model
print(json.dumps(times[1:]))
"""


def make(preset: str, gigabytes: float, directory: Path) -> None:
    """Writes a checkpoint with random codes, and scales of the size that weights have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def model_of(layers: int) -> Any:
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, vocab_size=VOCABULARY, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=16, dtype=torch.bfloat16, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)

    one, two = (quant.make_plan(model_of(layers), preset).nbytes for layers in (1, 2))
    model = model_of(max(1, round((gigabytes * 1e9 - one) / (two - one)) + 1))
    plan = quant.make_plan(model, preset)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parent, _, last = name.rpartition(".")
        values = torch.full(tensor.shape, 0.5, dtype=tensor.dtype)
        module = model.get_submodule(parent)
        new = torch.nn.Parameter(values, requires_grad=False) if last in module._parameters else values
        setattr(module, last, new)
    for layer in plan.quantized:
        format = layer.weight
        assert format is not None
        codes = torch.randint(0, 120, format.codes_shape(layer.shape), dtype=torch.uint8)
        scale = torch.full(format.scale_shape(layer.shape), 0.5)
        if not format.scale.is_wide:
            scale = scale.to(format.scale.torch_dtype)
        second = torch.tensor(0.01) if format.global_scale else None
        stored = codes.view(format.element.torch_dtype or torch.uint8)
        given = torch.tensor(0.01) if layer.has_static_scale else None
        install_weight(model, layer, BlockScaledTensor(stored, scale, format, layer.shape, second), given)
    quant.save(model, plan, directory)


def seconds(tree: Path, directory: Path, rounds: int) -> list[tuple[float, float]]:
    """Wall-clock and processor times of `quant.load` in one process of a checkout; the first is left out."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), str(rounds)],
        capture_output=True, text=True, check=True, env=environment, cwd=directory,
    )  # fmt: skip
    found: list[tuple[float, float]] = json.loads(done.stdout)
    return found


def reading(directory: Path) -> float:
    """Seconds in which one core finds the largest byte of all weight files."""
    start = time.perf_counter()
    for file in directory.glob("*.safetensors"):
        np.memmap(file, np.uint8, "r").max()
    return time.perf_counter() - start


def measure(preset: str, gigabytes: float, trees: dict[str, Path], rounds: int, turns: int) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "checkpoint")
        make(preset, gigabytes, directory)
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        read = statistics.median(reading(directory) for _ in range(3))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
        for _ in range(turns):
            for name, tree in trees.items():
                times[name] += seconds(tree, directory, rounds)
    row: dict[str, Any] = {"preset": preset, "GB": size * 1e-9, "read s": read}
    for name, found in times.items():
        wall, processor = zip(*found, strict=True)
        row |= {f"{name} s": statistics.median(wall), f"{name} least s": min(wall)}
        row[f"{name} cpu s"] = statistics.median(processor)
    if len(trees) == 2:
        for which in ("s", "least s", "cpu s"):
            row[f"here / before, {which}"] = row[f"here {which}"] / row[f"before {which}"]
    return row


def main() -> None:
    """Parses the options, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="nvfp4,fp8")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5, help="loads in one process")
    parser.add_argument("--turns", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    trees = {"before": options.against.resolve()} if options.against else {}
    trees["here"] = Path(__file__).resolve().parents[1]
    rows = [
        measure(preset, options.gigabytes, trees, options.rounds, options.turns)
        for preset in options.presets.split(",")
    ]
    header = {**machine(torch.get_num_threads()), **versions("torch", "transformers", "safetensors")}
    show_all("Loading", header, {"Seconds of quant.load": rows}, options.json)


if __name__ == "__main__":
    main()
