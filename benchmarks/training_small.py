"""This benchmark trains a small model from scratch in BF16 and in each recipe, with the same start and the same data.

A byte-level Llama of 1.9 million parameters learns the text of benchmarks/data by AdamW, from FP32 weights under
autocast in BF16. Recipes are emulated, so the numbers are those of hardware that has the format; it runs on a CPU. Each
seed draws the start and the order of the rows. The loss is that of held-out text in eval mode, which is the loss of the
packed model.

`--minutes` trains 54 million parameters on one GPU instead, on the Python files below the folders of `--text`, by the
backend that "auto" takes there. One process for each recipe keeps the GPU busy together; all take as many steps as fit
into the time, the same number each.

Training amplifies any difference. So one row trains in BF16 again, from weights that are moved by 0.4 % at
random: its gap is the noise that a recipe's gap has to be compared with.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _table import machine, show, versions
from torch.nn import functional

import quant
from quant.training.low_precision.training_recipe import RECIPES

_DATA = Path(__file__).parent / "data"
_MOVED = "BF16, from weights moved by 2⁻⁸"
_NAMES = ("BF16", _MOVED, *RECIPES)


@dataclass(frozen=True)
class _Shape:
    """Sizes of a model and of its steps.

    Attributes:
        layers, hidden: of the model.
        rows, length: rows of a step, and bytes of a row.
        rate: largest learning rate.
    """

    layers: int
    hidden: int
    rows: int
    length: int
    rate: float


_SMALL = _Shape(2, 256, 4, 128, 2e-3)
_LARGE = _Shape(4, 1024, 16, 512, 6e-4)


@click.command(help=__doc__)
@click.option("--steps", default=60, show_default=True, help="Of each run, of four rows of 128 bytes.")
@click.option("--seeds", default=2, show_default=True, help="Runs of each recipe.")
@click.option("--minutes", type=float, help="Train the larger model, all recipes and seeds within this time.")
@click.option("--text", multiple=True, type=click.Path(path_type=Path), help="Folders; [default: standard library]")
@click.option("--hidden", type=int, help="Another width of the larger model, for a trial.")
@click.option("--only", multiple=True, type=click.Choice(_NAMES), help="Rows of the table beside BF16.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    steps: int,
    seeds: int,
    minutes: float | None,
    text: tuple[Path, ...],
    hidden: int | None,
    only: tuple[str, ...],
    json_path: Path | None,
) -> None:
    names = [name for name in _NAMES if not only or name in ("BF16", *only)]
    if minutes is None:
        rows = list(_in_turn(names, steps, seeds))
        tokens = steps * _SMALL.rows * _SMALL.length
    else:
        shape = _LARGE if hidden is None else _Shape(_LARGE.layers, hidden, 2, 128, _LARGE.rate)
        folders = text or (Path(sysconfig.get_paths()["stdlib"]),)
        rows, steps = _side_by_side(names, shape, folders, seeds, 60 * minutes)
        tokens = steps * shape.rows * shape.length
    note = (
        f"{tokens:,} tokens in {steps} steps. Gap: mean over {seeds} seeds of the difference from BF16 of the same "
        "seed, and half of the range of these differences."
    )
    header = machine() | versions("torchao", "transformer-engine", "triton")
    show("Training from scratch", header, rows, [note], json_path=json_path)


def _in_turn(names: Sequence[str], steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each recipe: its losses, and their gap from those in BF16."""
    text, held_out = (_rows((_DATA / f"{part}.txt").read_bytes(), _SMALL) for part in ("calibration", "evaluation"))
    base: list[float] = []
    for name in names:
        losses = []
        for seed in range(seeds):
            training = _Training(name, _SMALL, seed, text, "emulated")
            training.take(steps, steps)
            losses.append(training.loss_of(held_out[:64]))
        base = base or losses
        yield _row(name, losses, base)


def _row(name: str, losses: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    gaps = [loss - bf16 for loss, bf16 in zip(losses, base, strict=True)]
    row: dict[str, Any] = {"recipe": name}
    row |= {f"loss, seed {seed}": f"{loss:.4f}" for seed, loss in enumerate(losses)}
    row["gap"] = "" if name == "BF16" else f"{statistics.fmean(gaps):+.4f} ± {(max(gaps) - min(gaps)) / 2:.4f}"
    click.echo(str(row), err=True)
    return row


class _Training:
    """A model in training.

    Args:
        name: one of `_NAMES`.
        shape: of the model and its steps.
        seed: of its start, of the order of rows, and of stochastic rounding.
        text: uint8 `[rows, length]`.
        backend: of the recipe.
    """

    def __init__(self, name: str, shape: _Shape, seed: int, text: torch.Tensor, backend: str) -> None:
        self.model = model = random_llama(shape.layers, hidden=shape.hidden, vocabulary=256, positions=shape.length)
        model.float().requires_grad_(True).train()
        self.name, self.shape, self.text = name, shape, text
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        if name == _MOVED:
            for parameter in model.parameters():
                signs = torch.randint(0, 2, parameter.shape, device=device, generator=generator) * 2 - 1
                parameter.data.mul_(1 + signs * 2.0**-8)
        torch.manual_seed(seed)  # of stochastic rounding
        self.backend = "BF16"
        if name in RECIPES:
            self.backend = quant.to_low_precision_training(model, name, backend=backend).backend
        self.order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=shape.rate, weight_decay=0.1)

    def take(self, steps: int, of_all: int) -> None:
        """Takes `steps` steps from the first; the learning rate falls as in a run of `of_all` steps."""
        each = self.shape.rows
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, self.shape.rate, total_steps=of_all, pct_start=0.1
        )
        self.model.train()
        for step in range(steps):
            batch = self.text[self.order[[(each * step + i) % len(self.order) for i in range(each)]]]
            self._loss(batch).backward()
            self.optimizer.step()
            schedule.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def loss_of(self, held_out: torch.Tensor) -> float:
        """The mean loss of rows in eval mode."""
        self.model.eval()
        # In eval mode graphs break at each layer, and compiling the pieces takes longer than running them.
        with torch.compiler.set_stance("force_eager"):
            return statistics.fmean(float(self._loss(batch)) for batch in held_out.split(32))

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(next(self.model.parameters()).device).long()
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = self.model(batch).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def _rows(text: bytes, shape: _Shape) -> torch.Tensor:
    """The bytes of a text in rows, uint8 `[rows, length]`."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return ids[: len(ids) // shape.length * shape.length].view(-1, shape.length)


def _side_by_side(
    names: Sequence[str], shape: _Shape, folders: Sequence[Path], seeds: int, seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """A row for each recipe, and the number of steps, which all recipes take at once in a process each."""
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")
    results, lock, steps, go = context.Queue(), context.Lock(), context.Value("i", 0), context.Event()
    workers = {
        name: context.Process(target=_worker, args=(name, shape, folders, seeds, results, lock, steps, go), daemon=True)
        for name in names
    }
    for worker in workers.values():
        worker.start()
    # Compiling takes a while; a recipe that is not ready by half of the time is left out.
    timed = dict(_received(results, workers, begun + seconds / 2))
    if "BF16" not in timed:
        raise click.ClickException("BF16 was not ready by half of the time, and recipes are compared with it")
    left = seconds - (time.monotonic() - begun)
    # Side by side, steps overlap and take some three quarters of their time alone; the rest is left for evaluation.
    steps.value = max(10, int(left / seeds / sum(ms / 1e3 for ms, _ in timed.values())))
    for name, worker in workers.items():
        if name not in timed:
            click.echo(f"{name} is left out: it was not ready in time", err=True)
            worker.terminate()
    click.echo(f"{steps.value} steps; ms of a step alone: {timed}", err=True)
    go.set()
    losses: dict[str, list[float]] = {name: [] for name in timed}
    while unfinished := {name: workers[name] for name, values in losses.items() if len(values) < seeds}:
        if not (received := dict(_received(results, unfinished, begun + seconds, first=True))):
            break
        for name, loss in received.items():
            losses[name].append(loss)
            click.echo(f"{time.monotonic() - begun:.0f} s: {name}, {len(losses[name])}. seed: {loss:.4f}", err=True)
    for worker in workers.values():
        worker.terminate()
    rows = []
    for name in (name for name in names if name in losses):
        values = losses[name]
        if values and len(values) == len(losses["BF16"]):
            ms, backend = timed[name]
            rows.append(_row(name, values, losses["BF16"]) | {"backend": backend, "ms of a step": f"{ms:.0f}"})
    return rows, steps.value


def _received(results: Any, workers: dict[str, Any], until: float, first: bool = False) -> Iterator[tuple[str, Any]]:
    """What each worker sends, by its name, once; `first` stops at the first one."""
    missing = set(workers)
    while missing and time.monotonic() < until:
        try:
            name, value = results.get(timeout=1)
        except queue.Empty:
            missing = {name for name in missing if workers[name].is_alive()}
            continue
        missing.discard(name)
        yield name, value
        if first:
            return


def _worker(
    name: str, shape: _Shape, folders: Sequence[Path], seeds: int, results: Any, lock: Any, steps: Any, go: Any
) -> None:
    """Trains in one recipe: sends the time of a step, waits for the number of steps, and sends a loss for each seed."""
    text, held_out = _python_text(folders, shape)
    backend = "auto"
    try:
        training = _warm(name, shape, text, backend)
    except Exception as error:  # a library of another version; the numbers are the same when emulated
        click.echo(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}; emulated", err=True)
        backend = "emulated"
        training = _warm(name, shape, text, backend)
    with lock:
        begun = time.monotonic()
        training.take(5, 100)
        _wait()
        results.put((name, (200 * (time.monotonic() - begun), training.backend)))
    go.wait()
    for seed in range(seeds):
        training = _compiled(_Training(name, shape, seed, text, backend))
        training.take(steps.value, steps.value)
        results.put((name, training.loss_of(held_out)))
    time.sleep(5)  # until the queue is read


def _warm(name: str, shape: _Shape, text: torch.Tensor, backend: str) -> _Training:
    training = _compiled(_Training(name, shape, 0, text, backend))
    training.take(5, 100)
    training.loss_of(text[:2])
    _wait()
    return training


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compiled(training: _Training) -> _Training:
    # Graphs break at the layers of Transformer Engine, and of delayed scaling, whose backward pass changes a history.
    # NVFP4 is rounded by kernels of its own, and its layers, which have histories, are graphs of their own: compiling
    # them takes longer than these runs gain by it.
    if torch.cuda.is_available() and training.backend != "te" and training.name not in ("fp8_delayed", "nvfp4"):
        torch.compiler.reset()
        # Each layer holds histories of its own, and may be a graph of its own.
        torch._dynamo.config.recompile_limit = 64
        for layer in training.model.model.layers:
            layer.compile()
    return training


def _python_text(folders: Sequence[Path], shape: _Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of Python files for training, and of one file of fifty to hold out: at most 256 rows."""
    training, held_out = [], []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(folder)
            if "site-packages" in path.parts:  # inside the folder of the standard library
                continue
            digest = hashlib.sha256(str(path).encode()).digest()
            (held_out if digest[0] < 5 else training).append(file.read_bytes())
    of_rows = _rows(b"".join(held_out), shape)
    spread = torch.linspace(0, len(of_rows) - 1, min(256, len(of_rows))).long()
    return _rows(b"".join(training), shape), of_rows[spread]


if __name__ == "__main__":
    main()
