"""This benchmark trains a small model from scratch in BF16 and in each recipe, with the same start and the same data.

A byte-level Llama of 1.9 million parameters learns the text of benchmarks/data by AdamW, from FP32 weights under
autocast in BF16. Recipes are emulated, so the numbers are those of hardware that has the format; it runs on a CPU. Each
seed draws the start and the order of the rows. The loss is that of held-out text in eval mode, which is the loss of the
packed model.

Training amplifies any difference. So one row trains in BF16 again, from weights that are moved by 0.4 % at
random: its gap is the noise that a recipe's gap has to be compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _table import machine, show, versions
from torch.nn import functional

import quant
from quant.training.low_precision.recipe import RECIPES

_DATA = Path(__file__).parent / "data"
_LENGTH = 128  # tokens of a row
_MOVED = "BF16, from weights moved by 2⁻⁸"


@click.command(help=__doc__)
@click.option("--steps", default=60, show_default=True, help="Of each run, of four rows of 128 bytes.")
@click.option("--seeds", default=2, show_default=True, help="Runs of each recipe.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(steps: int, seeds: int, json_path: Path | None) -> None:
    rows = list(_compared(steps, seeds))
    note = (
        f"{steps * 4 * _LENGTH:,} tokens. Gap: mean over {seeds} seeds of the difference from BF16 of the same seed, "
        "and half of the range of these differences."
    )
    show("Training from scratch", machine() | versions(), rows, [note], json_path=json_path)


def _compared(steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each recipe: its losses, and their gap from those in BF16."""
    base: list[float] = []
    for name in ("BF16", _MOVED, *RECIPES):
        losses = [_trained(name, steps, seed) for seed in range(seeds)]
        base = base or losses
        gaps = [loss - bf16 for loss, bf16 in zip(losses, base, strict=True)]
        row: dict[str, Any] = {"recipe": name}
        row |= {f"loss, seed {seed}": f"{loss:.4f}" for seed, loss in enumerate(losses)}
        row["gap"] = "" if name == "BF16" else f"{statistics.fmean(gaps):+.4f} ± {(max(gaps) - min(gaps)) / 2:.4f}"
        click.echo(str(row), err=True)
        yield row


def _trained(name: str, steps: int, seed: int) -> float:
    """The loss of held-out text after training."""
    model = random_llama(2, hidden=256, vocabulary=256, positions=_LENGTH).float().requires_grad_(True)
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
    if name in RECIPES:
        quant.to_low_precision_training(model, name, backend="emulated")
    text, held_out = (_rows(_DATA / f"{part}.txt", device) for part in ("calibration", "evaluation"))
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        batch = text[order[[(4 * step + i) % len(order) for i in range(4)]]]
        _loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(_loss(model.eval(), held_out[:64]))


def _rows(file: Path, device: torch.device) -> torch.Tensor:
    """The bytes of a file in rows, int64 `[rows, _LENGTH]`."""
    ids = torch.tensor(list(file.read_bytes()), device=device)
    return ids[: len(ids) // _LENGTH * _LENGTH].view(-1, _LENGTH)


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


if __name__ == "__main__":
    main()
