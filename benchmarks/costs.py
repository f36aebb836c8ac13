"""This script computes what it costs to quantize an 8B, a 70B and a DeepSeek-V3, from runs that `scale.py` measured.

Only some of these runs fit a session, so the others are computed from what one block cost. Starting the process takes
what it took; loading and writing take time for each byte, and rounding to nearest for each byte of a block. The time of
GPTQ follows the arithmetic of a block: three forward passes, second moments of the inputs, their factorization, and the
solver. For a weight `[out, in]`, seen by T tokens, these are

    6 T out in  +  T in²  +  4/3 in³  +  3 out in²        operations

and in the experts of a mixture, T is the share of the tokens that a router sends to each. The memory of GPTQ is what
`--memory` is checked against (`block_bytes`); that of rounding is the measured one, and the codes of a larger group.
Files are taken to be in the page cache: where they are not, reading them from the disk can take longer than all else.

    python benchmarks/costs.py                                      from the runs in benchmarks/data
    python benchmarks/scale.py --json scale.json; python benchmarks/costs.py --h100 scale.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from _table import show
from scale import HEAD, VOCABULARY
from torch import nn

from quant.calibration.walk.block_memory import block_bytes
from quant.formats.format import FORMATS
from quant.recipes.plan import LayerPlan

TITLE = "What quantizing to NVFP4 weights costs"
DATA = Path(__file__).parent / "data"
FORMAT = FORMATS["nvfp4"]


@dataclass(frozen=True)
class Group:
    """Weights that read one input, as one matrix.

    Attributes:
        rows, columns: of the matrix.
        experts: how many such matrices there are, each with inputs of its own; 0 for a dense layer.
        share: part of the tokens that reach each.
    """

    rows: int
    columns: int
    experts: int = 0
    share: float = 1.0

    @property
    def numel(self) -> int:
        return self.rows * self.columns * max(self.experts, 1)

    def operations(self, tokens: int) -> float:
        """Of GPTQ; see the module docstring."""
        out, size, seen = self.rows, self.columns, tokens * self.share
        one = 6 * seen * out * size + seen * size**2 + 4 / 3 * size**3 + 3 * out * size**2
        return max(self.experts, 1) * one


@dataclass(frozen=True)
class Model:
    """The shape of a model: kinds of blocks with how often they come, and what stays in 16 bit."""

    name: str
    blocks: tuple[tuple[int, tuple[Group, ...]], ...]
    kept: int

    @property
    def solved(self) -> int:
        """Weights that are quantized."""
        return sum(count * group.numel for count, groups in self.blocks for group in groups)

    @property
    def nbytes(self) -> int:
        """In BF16."""
        return 2 * (self.solved + self.kept)

    def operations(self, tokens: int) -> float:
        return sum(count * group.operations(tokens) for count, groups in self.blocks for group in groups)

    def block_bytes(self, tokens: int) -> int:
        """Of the block that takes the most memory to solve with GPTQ in float32."""
        return max(
            block_bytes(_module(groups), list(_layers(groups)), tokens, torch.float32) for _, groups in self.blocks
        )

    def codes(self) -> int:
        """Bytes of the codes of the largest group."""
        return max(FORMAT.nbytes((g.numel // g.columns, g.columns)) for _, groups in self.blocks for g in groups)


def llama(name: str, layers: int, hidden: int, inner: int, keys: int, vocabulary: int) -> Model:
    """A dense model with grouped-query attention."""
    groups = Group(hidden + 2 * keys, hidden), Group(hidden, hidden), Group(2 * inner, hidden), Group(hidden, inner)
    return Model(name, ((layers, groups),), 2 * vocabulary * hidden)


def deepseek_v3() -> Model:
    """Latent attention; three dense blocks, then 58 with 256 experts, of which a token takes 8, and a shared one."""
    hidden, inner, experts = 7168, 2048, 256
    attention = Group(1536 + 576, hidden), Group(24576, 1536), Group(32768, 512), Group(hidden, 16384)
    dense = Group(2 * 18432, hidden), Group(hidden, 18432)
    shared = Group(2 * inner, hidden), Group(hidden, inner)
    routed = Group(2 * inner, hidden, experts, 8 / experts), Group(hidden, inner, experts, 8 / experts)
    return Model("DeepSeek-V3", ((3, attention + dense), (58, attention + shared + routed)), 2 * 129280 * hidden)


MODELS = (
    llama("8B", 32, 4096, 14336, 1024, VOCABULARY),
    llama("70B", 80, 8192, 28672, 1024, VOCABULARY),
    deepseek_v3(),
)


def _layers(groups: tuple[Group, ...]) -> Iterator[LayerPlan]:
    for index, group in enumerate(groups):
        shape = (group.rows, group.columns)
        kind, shape = ("experts", (group.experts, *shape)) if group.experts else ("linear", shape)
        yield LayerPlan(f"block.{index}", kind, shape, FORMAT, None, "gptq")


def _module(groups: tuple[Group, ...]) -> nn.Module:
    """The dense weights of a block; experts stay in their files."""
    weights = (torch.empty(g.rows, g.columns, device="meta") for g in groups if not g.experts)
    return nn.ParameterList(nn.Parameter(weight) for weight in weights)


@dataclass(frozen=True)
class MeasuredRun:
    """A run of `scale.py`: the model, its tokens, seconds by stage, and the bytes of memory of the process."""

    model: Model
    tokens: int
    start: float
    stages: dict[str, float]
    memory: float

    @classmethod
    def read(cls, row: dict[str, Any]) -> MeasuredRun:
        """Reads a row of its table."""
        stages = {name: float(seconds) for name, seconds in re.findall(r"(\w+) ([\d.]+)", row["stages"])}
        rows, _, seqlen = row["run"].rpartition(" ")[2].partition("×")
        tokens = int(rows) * int(seqlen) if seqlen else 0
        model = _written(row["layers"], row["GB of BF16"])
        return cls(model, tokens, row["seconds"] - sum(stages.values()), stages, row["memory GiB"] * 2**30)


def _written(layers: int, gigabytes: float) -> Model:
    """The model that `scale.py` writes with so many layers and bytes."""
    for hidden in range(512, 16385, 512):
        keys = max(hidden // HEAD // 4, 1) * HEAD
        model = llama(f"{hidden} wide", layers, hidden, hidden * 7 // 2, keys, VOCABULARY * hidden // 4096)
        if abs(model.nbytes / 1e9 / gigabytes - 1) < 0.001:
            return model
    raise click.ClickException(f"{layers} layers and {gigabytes} GB: no model that scale.py writes")


def read_runs(file: Path) -> tuple[MeasuredRun, MeasuredRun]:
    """The runs with `rtn` and `gptq` of a table of `scale.py`, the ones with the most layers and tokens."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    found = []
    for solver in ("rtn", "gptq"):
        runs = [MeasuredRun.read(row) for row in rows if row["run"].split()[0] == solver and row.get("GPUs", 1) == 1]
        if not runs:
            raise click.ClickException(f"{file}: no run with {solver}; take the table of scale.py --solvers rtn,gptq")
        found.append(max(runs, key=lambda run: (run.model.nbytes, run.tokens)))
    return found[0], found[1]


def cost(model: Model, rtn: MeasuredRun, gptq: MeasuredRun, solver: str, tokens: int) -> tuple[float, float]:
    """Seconds and bytes of the process, of `model` on the machine of two runs; the GPU's memory is not counted."""
    run = rtn if solver == "rtn" else gptq
    moved = sum(seconds for stage, seconds in run.stages.items() if stage != "solve") / run.model.nbytes
    if solver == "rtn":
        share = model.solved / run.model.solved
    else:
        share = model.operations(tokens) / run.model.operations(run.tokens)
    seconds = run.start + moved * model.nbytes + run.stages["solve"] * share
    return seconds, run.memory + max(2 * (model.codes() - run.model.codes()), 0)  # a group is written as one is solved


def duration(seconds: float) -> str:
    """Two digits: "24 s", "13 min", "5.1 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.{1 if seconds < 36000 else 0}f} h"


def table(h100: Path, cpu: Path, tokens: int) -> list[dict[str, object]]:
    """A row for each model and solver."""
    on_gpu, on_cpu = read_runs(h100), read_runs(cpu)
    rows: list[dict[str, object]] = []
    for model in MODELS:
        for solver in ("rtn", "gptq"):
            gpu_seconds, gpu_host = cost(model, *on_gpu, solver, tokens)
            seconds, memory = cost(model, *on_cpu, solver, tokens)
            block = model.block_bytes(tokens)
            rows.append(
                {
                    "model, in BF16": f"{model.name}, {model.nbytes / 1e9:,.0f} GB",
                    "solver": f"`{solver}`",
                    "one H100": duration(gpu_seconds),
                    "GPU memory": "" if solver == "rtn" else f"{block / 1e9:.0f} GB",
                    "host memory": f"{gpu_host / 1e9:.1f} GB",
                    "two CPU cores": duration(seconds),
                    "memory": f"{memory / 1e9:.1f} GB" if solver == "rtn" else f"{block / 1e9:.0f} GB",
                }
            )
    return rows


@click.command(help=__doc__)
@click.option("--h100", type=click.Path(path_type=Path), default=DATA / "scale_h100.json", help="Runs on the GPU.")
@click.option("--cpu", type=click.Path(path_type=Path), default=DATA / "scale_cpu.json", help="Runs on two cores.")
@click.option("--rows", default="32x512", show_default=True, help="Calibration rows and tokens.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(h100: Path, cpu: Path, rows: str, json_path: Path | None) -> None:
    samples, seqlen = map(int, rows.split("x"))
    found = table(h100, cpu, samples * seqlen)
    machines = [json.loads(file.read_text(encoding="utf-8"))["header"] for file in (h100, cpu)]
    header = {"H100": machines[0]["gpu"] + ", " + machines[0]["cpu"], "two cores": machines[1]["cpu"]}
    notes = [f"GPTQ on {samples}×{seqlen} tokens. What was not measured is computed from the cost of one block."]
    show(TITLE, header, found, notes, json_path=json_path)


if __name__ == "__main__":
    main()
