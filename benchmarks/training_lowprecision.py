"""This benchmark times the linear layers of a Llama-3-8B block in low-precision training, and compares gradients.

`linears` runs q/k/v (as one), o, gate and up (as one) and down, forward and backward, as one module: in BF16, by our
recipes (compiled, by the backend that "auto" takes here, and emulated), and by torchao and Transformer Engine alone
where they are installed. The optimizer is left out, for it is the same in all rows. It needs a GPU.

`gradients` compares the gradient of a whole model with FP32's, by recipe and with parts of NVFP4's recipe left out. A
single draw has noise and bias; the mean of many draws has the bias alone. It runs on a CPU.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _table import machine, show, versions
from torch import nn

import quant
from quant.training.low_precision.backends import TORCHAO
from quant.training.low_precision.recipe import RECIPES, TrainingRecipe

_SIZES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
_TRANSFORMER_ENGINE = {
    "fp8_delayed": "DelayedScaling",
    "fp8_tensorwise": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
}
_Context = Callable[[], AbstractContextManager[Any]]


@click.command(help=__doc__)
@click.argument("part", type=click.Choice(["linears", "gradients"]), default="gradients")
@click.option("--tokens", default=8192, show_default=True, help="Of a step of `linears`.")
@click.option("--steps", default=20, show_default=True, help="That `linears` times.")
@click.option("--draws", default=12, show_default=True, help="Whose gradients `gradients` averages.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(part: str, tokens: int, steps: int, draws: int, json_path: Path | None) -> None:
    header = machine() | versions("torchao", "transformer-engine", "triton")
    if part == "linears":
        if not torch.cuda.is_available():
            raise click.UsageError("linears needs a CUDA device; gradients runs on a CPU")
        rows = list(_timed(tokens, steps))
        note = f"Linear layers of one Llama-3-8B block, {tokens} tokens, forward and backward; ms, median of {steps}."
        show("Linear layers in low-precision training", header, rows, [note], json_path=json_path)
    else:
        rows = list(_compared(draws))
        note = f"Relative distance from the gradient of FP32, of one draw and of the mean of {draws} draws."
        show("Gradients of low-precision training", header, rows, [note], json_path=json_path)


class _Block(nn.Module):
    """The linear layers of a block, one after another on inputs of their own."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: make(*size) for name, size in _SIZES.items()})

    def forward(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [layer(inputs[name]) for name, layer in self.layers.items()]


def _timed(tokens: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each way in which the block can be trained here."""
    inputs = {
        name: torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, (columns, _) in _SIZES.items()
    }
    gradients = [torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16) for _, rows in _SIZES.values()]
    first: float | None = None
    for name, make, context, compiles in _ways():
        torch.compiler.reset()
        try:
            block = make()
            run = torch.compile(block) if compiles else block
            ms = _time(run, inputs, gradients, context, steps)
        except Exception as error:  # a peer's kernels may refuse this GPU; the other rows are measured all the same
            click.echo(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
            continue
        first = ms if first is None else first
        row = {"linears": name, "ms": ms, "× BF16": first / ms}
        click.echo(str(row), err=True)
        yield row
        del block, run


def _ways() -> Iterator[tuple[str, Callable[[], nn.Module], _Context, bool]]:
    """Name, block, context of the forward pass, and whether it is compiled."""

    def plain() -> nn.Module:
        return _Block(lambda i, o: nn.Linear(i, o, bias=False, device="cuda", dtype=torch.bfloat16))

    def ours(recipe: str, backend: str) -> nn.Module:
        block = plain().train()
        click.echo(str(quant.to_low_precision_training(block, recipe, backend=backend)), err=True)
        return block

    yield "BF16, compiled", plain, nullcontext, True
    for name in RECIPES:
        compiles = not RECIPES[name].history
        yield f"ours, {name}, auto", lambda name=name: ours(name, "auto"), nullcontext, compiles  # type: ignore[misc]
        yield f"ours, {name}, emulated", lambda name=name: ours(name, "emulated"), nullcontext, compiles  # type: ignore[misc]
    yield from _torchao(plain)
    yield from _transformer_engine()


def _torchao(plain: Callable[[], nn.Module]) -> Iterator[tuple[str, Callable[[], nn.Module], _Context, bool]]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return

    def make(recipe: str) -> nn.Module:
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(plain(), config=config)  # type: ignore[no-any-return]

    for recipe in TORCHAO.values():
        yield f"torchao, {recipe}", lambda recipe=recipe: make(recipe), nullcontext, True  # type: ignore[misc]


def _transformer_engine() -> Iterator[tuple[str, Callable[[], nn.Module], _Context, bool]]:
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
    except ImportError:
        return

    def make() -> nn.Module:
        return _Block(lambda i, o: te.Linear(i, o, bias=False, params_dtype=torch.bfloat16, device="cuda"))

    for name in _TRANSFORMER_ENGINE.values():
        recipe = getattr(recipes, name)()
        yield f"Transformer Engine, {name}", make, lambda r=recipe: te.autocast(enabled=True, recipe=r), False  # type: ignore[misc]


def _time(
    run: Any, inputs: dict[str, torch.Tensor], gradients: list[torch.Tensor], context: _Context, steps: int
) -> float:
    """Milliseconds of a step, the median by CUDA events."""

    def step() -> None:
        with context():
            outputs = run(inputs)
        torch.autograd.backward(outputs, gradients)
        for parameter in run.parameters():
            parameter.grad = None
        for tensor in inputs.values():
            tensor.grad = None

    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _ablations() -> dict[str, TrainingRecipe]:
    """NVFP4's recipe with one of its parts left out."""
    nvfp4 = RECIPES["nvfp4"]
    return {
        "nvfp4 without the Hadamard transform": replace(nvfp4, hadamard=0),
        "nvfp4 without stochastic rounding": replace(nvfp4, stochastic_gradients=False),
        "nvfp4 with 1×16 weights": replace(nvfp4, weight=nvfp4.input),
        "nvfp4 with 4-or-6 blocks": replace(nvfp4, four_over_six=True),
    }


def _compared(draws: int) -> Iterator[dict[str, Any]]:
    """A row for each recipe: distances of a whole model's gradient from FP32's."""
    original = random_llama(2, hidden=256, vocabulary=256, positions=256).float().requires_grad_(True)
    # Real text, some steps into training: gradients of a random model on random tokens have no structure to lose.
    text = (Path(__file__).parent / "data/calibration.txt").read_bytes()[: 64 * 257]
    rows = torch.tensor(list(text), device=original.device)[: len(text) // 257 * 257].view(-1, 257)[:, :256]
    optimizer = torch.optim.AdamW(original.parameters(), lr=2e-3)
    for step in range(40):
        batch = rows[4 * step % 60 : 4 * step % 60 + 4]
        original(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = rows[-4:]
    names = [name for name, module in original.named_modules() if isinstance(module, nn.Linear) and "layers" in name]

    def gradient(model: Any) -> torch.Tensor:
        model.zero_grad()
        model(batch, labels=batch).loss.backward()
        return torch.cat([model.get_submodule(name).weight.grad.flatten() for name in names])

    exact = gradient(original)
    for name, recipe in {**RECIPES, **_ablations()}.items():
        model = copy.deepcopy(original).train()
        quant.to_low_precision_training(model, recipe, backend="emulated")
        drawn = [gradient(model) for _ in range(draws if recipe.stochastic_gradients else 1)]
        mean = torch.stack(drawn).mean(0)
        row = {
            "recipe": name,
            "one draw": float((drawn[0] - exact).norm() / exact.norm()),
            "mean": float((mean - exact).norm() / exact.norm()),
            "cosine": float(torch.cosine_similarity(drawn[0], exact, dim=0)),
            "slope": float(mean @ exact / exact.square().sum()),
        }
        click.echo(str(row), err=True)
        yield row


if __name__ == "__main__":
    main()
