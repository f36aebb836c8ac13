"""This benchmark times layers of Llama-3-8B's shape in low-precision training, and compares gradients.

`linears` runs q/k/v (as one), o, gate and up (as one) and down, forward and backward, as one module: in BF16, by our
recipes (on the tensor cores of this GPU, and emulated), and by torchao and Transformer Engine alone where they are
installed. A recipe and the library that computes it are timed in turn, a few steps each, because a GPU's clock drifts.
The optimizer is left out, for it is the same in all rows. It needs a GPU.

`layers` runs four whole decoder layers, forward and backward, compiled, with the peak of memory. BF16 and the recipes
take turns, in rounds, once the card is warm: on one that was idle the first steps are faster.

`sizes` runs square layers of several widths, forward and backward, recorded in a CUDA graph so that the host does not
count: those below some width are faster in BF16.

`experts` runs blocks of fused experts, forward and backward: by the grouped products of transformers in BF16, and by
ours in recipes, with the peak of memory; then the same compiled.

`attention` runs attention of Llama-3-8B's shape, causal, forward and backward, in BF16 by PyTorch and in FP8.

`operands` compares the kernels that make FP8 operands with a copy of a matrix, by the bytes that they read and write.

`gradients` compares the gradient of a whole model with FP32's, by recipe and with parts of NVFP4's recipe left out. A
single draw has noise and bias; the mean of many draws has the bias alone. It runs on a CPU.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _plot import bars
from _table import machine, show, versions
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import quant
from quant.kernels.training.fp8_attention import fp8_training_attention
from quant.training.low_precision.backends import TORCHAO, TRANSFORMER_ENGINE
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.training_recipe import RECIPES, TrainingRecipe

_EXPERTS = (
    {"num_experts": 128, "moe_intermediate_size": 768, "hidden_size": 2048, "num_experts_per_tok": 8},
    {"num_experts": 8, "moe_intermediate_size": 7168, "hidden_size": 4096, "num_experts_per_tok": 2},
)
_SIZES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}


@click.command(help=__doc__)
@click.argument(
    "part",
    type=click.Choice(["linears", "layers", "sizes", "experts", "attention", "operands", "gradients"]),
    default="gradients",
)
@click.option("--tokens", default=8192, show_default=True, help="Of a step.")
@click.option("--steps", default=20, show_default=True, help="That are timed.")
@click.option("--rounds", default=8, show_default=True, help="Of `steps` steps of each row of `layers`.")
@click.option("--draws", default=12, show_default=True, help="Whose gradients `gradients` averages.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw `gradients` here, as .svg or .png.")
def main(
    part: str, tokens: int, steps: int, rounds: int, draws: int, json_path: Path | None, plot: Path | None
) -> None:
    header = machine() | versions("torchao", "transformer-engine", "triton")
    if part != "gradients" and not torch.cuda.is_available():
        raise click.UsageError(f"{part} needs a CUDA device; gradients runs on a CPU")
    if part == "linears":
        rows = list(_timed(tokens, steps))
        note = f"Linear layers of one Llama-3-8B block, {tokens} tokens, forward and backward; ms, median of {steps}."
        show("Linear layers in low-precision training", header, rows, [note], json_path=json_path)
    elif part == "layers":
        rows = _whole_layers(tokens, steps, rounds)
        note = (
            f"Four Llama-3-8B layers, {tokens} tokens in rows of 2,048, compiled, on a warm card; ms and × BF16 are "
            f"medians of {rounds} rounds, each the median of {steps} steps."
        )
        show("Whole layers in low-precision training", header, rows, [note], json_path=json_path)
    elif part == "sizes":
        rows = [_square(width, tokens, steps) for width in (512, 1024, 1536, 2048, 4096)]
        note = f"Square layers, {tokens} tokens, forward and backward, compiled and recorded; ms, median of {steps}."
        show("Widths of layers in low-precision training", header, rows, [note], json_path=json_path)
    elif part == "experts":
        rows = [row for sizes in _EXPERTS for row in _experts(sizes, tokens, steps)]
        note = (
            f"Fused experts with their router, {tokens} tokens, BF16 weights, forward and backward; ms, median of "
            f"{steps}. The peak is of blocks that are not compiled."
        )
        show("Fused experts in low-precision training", header, rows, [note], json_path=json_path)
    elif part == "attention":
        rows = [_attention(length, tokens, steps) for length in (2048, 8192)]
        note = f"32 heads of 128, 8 KV heads, {tokens} tokens in rows, causal; ms, median of {steps}."
        show("Attention in low-precision training", header, rows, [note], json_path=json_path)
    elif part == "operands":
        rows = list(_operands(tokens))
        show("Kernels that make FP8 operands", header, rows, [f"{tokens} x 14336, BF16."], json_path=json_path)
    else:
        rows = list(_compared(draws))
        note = f"Relative distance from the gradient of FP32, of one draw and of the mean of {draws} draws."
        show("Gradients of low-precision training", header, rows, [note], json_path=json_path)
        if plot is not None:
            errors = {"mean": f"bias: error of the mean of {draws} draws", "noise": "noise: deviation of a draw"}
            bars(plot, rows, label="recipe", values=errors, x="relative to the gradient of FP32")


class _Block(nn.Module):
    """The linear layers of a block, one after another on inputs of their own."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: make(*size) for name, size in _SIZES.items()})

    def forward(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [layer(inputs[name]) for name, layer in self.layers.items()]


@dataclass(frozen=True)
class _Way:
    """A way in which the block can be trained.

    Attributes:
        name: in the table.
        make: makes the block.
        context: of the forward pass.
        compiles: whether the block is compiled.
    """

    name: str
    make: Callable[[], nn.Module]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiles: bool = True


def _timed(tokens: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each way in which the block can be trained here."""
    inputs = {
        name: torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, (columns, _) in _SIZES.items()
    }
    gradients = [torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16) for _, rows in _SIZES.values()]
    first: float | None = None
    for ways in _ways():
        torch.compiler.reset()
        runs = {}
        for way in ways:
            try:
                block = way.make()
                step = _step(torch.compile(block) if way.compiles else block, inputs, gradients, way.context)
                step()
            except Exception as error:  # a peer's kernels may refuse this GPU; the other rows are measured all the same
                click.echo(f"{way.name}: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
                continue
            runs[way.name] = step
        times = _medians(runs, steps)
        peer = next((ms for name, ms in times.items() if not name.startswith(("ours", "BF16"))), None)
        for name, ms in times.items():
            first = ms if first is None else first
            of_peer = ms / peer if peer is not None and name.startswith("ours") else None
            yield _told({"linears": name, "ms": ms, "× BF16": first / ms, "time / the library's": of_peer})
        del runs


def _whole_layers(tokens: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """A row for BF16 and for recipes that "auto" runs on tensor cores, which take turns."""
    ids = torch.randint(0, 1024, (tokens // 2048, 2048), device="cuda")
    # The layers of all models have the same code, which is compiled for each recipe.
    torch._dynamo.config.recompile_limit = 64
    runs, peaks = {}, {}
    for name in ("BF16", "fp8_block", "fp8_tensorwise"):
        of_other_models = torch.cuda.memory_allocated()
        model = random_llama(4, vocabulary=1024).requires_grad_(True).train()
        if name != "BF16":
            click.echo(str(quant.to_low_precision_training(model, name)), err=True)
        for layer in model.model.layers:
            layer.compile()

        def step(model: Any = model) -> None:
            model(ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)

        step()  # which compiles
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[name] = (torch.cuda.max_memory_allocated() - of_other_models) / 1e9
        runs[name] = step
    _rounds(runs, steps, 2)  # some seconds, in which the card becomes warm
    times = _rounds(runs, steps, rounds)
    rows = []
    for name, own in times.items():
        ratios = [bf16 / ms for bf16, ms in zip(times["BF16"], own, strict=True)]
        rows.append(
            {
                "layers": name,
                "ms": statistics.median(own),
                "lowest, highest": f"{min(own):.1f}, {max(own):.1f}",
                "× BF16": statistics.median(ratios),
                "lowest, highest ×": f"{min(ratios):.2f}, {max(ratios):.2f}",
                "peak GB": peaks[name],
            }
        )
    return [_told(row) for row in rows]


def _square(width: int, tokens: int, steps: int) -> dict[str, Any]:
    """The times of a layer `[width, width]`."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy, row = torch.randn_like(x), {"width": width}
    torch._dynamo.config.recompile_limit = 64
    for name in ("BF16", "fp8_block"):
        net = nn.Sequential(nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16)).train()
        if name != "BF16":
            quant.to_low_precision_training(net, name)
        run = torch.compile(net, dynamic=False)

        def step(run: Any = run, weight: torch.Tensor = net[0].weight) -> None:
            torch.autograd.grad(run(x), (x, weight), dy)

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # which compiles
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        row[name] = _median(graph.replay, steps)
    row["× BF16"] = row["BF16"] / row["fp8_block"]
    return _told(row)


def _experts(sizes: dict[str, int], tokens: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for BF16 and each recipe with grouped products, for a block of experts as Qwen3 has them."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {"num_hidden_layers": 1, "vocab_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = Qwen3MoeConfig(**options, **sizes, head_dim=128, intermediate_size=sizes["moe_intermediate_size"])
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).bfloat16().train()
        x = torch.randn(1, tokens, sizes["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)
    block = model.model.layers[0].mlp

    def step(run: Any = block) -> None:
        y = run(x)
        torch.autograd.backward(y[0] if isinstance(y, tuple) else y, dy)
        x.grad = None
        block.zero_grad(set_to_none=True)

    label = "{num_experts} x {moe_intermediate_size} of {hidden_size}, {num_experts_per_tok} a token".format(**sizes)
    bf16 = compiled_bf16 = 0.0
    for name in ("BF16", "fp8_rowwise", "fp8_block", "mxfp8"):
        if name == "BF16":
            model.set_experts_implementation("grouped_mm")
        else:
            click.echo(str(quant.to_low_precision_training(model, name, include=["*.experts.*"])), err=True)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() / 1e9
        ms = _median(step, steps)
        torch.compiler.reset()
        compiled = torch.compile(block)
        compiled_ms = _median(lambda run=compiled: step(run), steps)  # type: ignore[misc]
        bf16, compiled_bf16 = bf16 or ms, compiled_bf16 or compiled_ms
        row = {"experts": label, "products": name, "ms": ms, "× BF16": bf16 / ms, "compiled, ms": compiled_ms}
        yield _told(row | {"× compiled BF16": compiled_bf16 / compiled_ms, "peak GB": peak})
        if name != "BF16":
            to_plain_layers(model)


def _attention(length: int, tokens: int, steps: int) -> dict[str, Any]:
    """The times of attention in rows of a length."""
    shapes = [(tokens // length, heads, length, 128) for heads in (32, 8, 8)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    dout = torch.randn_like(q)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "BF16": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "FP8": lambda: fp8_training_attention(q, k, v, causal=True, window=None, softmax_scale=128**-0.5),
    }
    row: dict[str, Any] = {"length": length}
    for name, run in ways.items():
        row[f"{name}, forward"] = _median(run, steps)
        row[f"{name}, with backward"] = _median(
            lambda run=run: torch.autograd.grad(run(), (q, k, v), dout),  # type: ignore[misc]
            steps,
        )
    row["× BF16"] = row["BF16, with backward"] / row["FP8, with backward"]
    return _told(row)


def _operands(tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel: its time, and its share of the bandwidth of a copy."""
    ops, rule = torch.ops.quant, "power_of_two"
    x, gate, up = (torch.randn(tokens, 14336, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    copy_of_x, weight = torch.empty_like(x), torch.randn(14336, device="cuda", dtype=torch.bfloat16)
    statistics_of = torch.compile(lambda x: torch.rsqrt(x.float().square().mean(1) + 1e-5))
    rstd, swiglu_gradients = statistics_of(x), ops.fp8_block_swiglu_gradients

    def normed(rstd: torch.Tensor) -> Any:
        return ops.fp8_block_rms_norm(x, rstd, weight, torch.bfloat16, torch.bfloat16, rule, True)

    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (4, lambda: copy_of_x.copy_(x)),
        "1×128, both directions": (4, lambda: ops.fp8_block_operands(x, rule, False, True, True)),
        "128×128, both directions": (4, lambda: ops.fp8_block_operands(x, rule, True, True, True)),
        "128×128, one direction": (3, lambda: ops.fp8_block_operands(x, rule, True, True, False)),
        "RMSNorm, both directions": (4, lambda: normed(rstd)),
        "RMSNorm with its mean of squares": (6, lambda: normed(statistics_of(x))),  # which reads x once more
        "SwiGLU, both directions": (6, lambda: ops.fp8_block_swiglu(gate, up, rule, True, True)),
        "SwiGLU, one direction": (5, lambda: ops.fp8_block_swiglu(gate, up, rule, True, False)),
        "gradients of SwiGLU, both directions": (10, lambda: swiglu_gradients(x, gate, up, rule, True, False)),
        "gradients of SwiGLU, and its columns": (11, lambda: swiglu_gradients(x, gate, up, rule, True, True)),
    }
    copied = 0.0
    for name, (width, run) in ways.items():
        ms = _median(run, 20)
        rate = width * x.numel() / ms / 1e6
        copied = copied or rate
        yield _told({"kernel": name, "ms": ms, "GB/s": rate, "of a copy": rate / copied})


def _told(row: dict[str, Any]) -> dict[str, Any]:
    click.echo(str(row), err=True)
    return row


def _ways() -> Iterator[list[_Way]]:
    """Ways in groups that are timed in turn: recipes on tensor cores beside their library, then emulated ones."""

    def ours(recipe: str, backend: str) -> _Way:
        def make() -> nn.Module:
            block = _plain().train()
            click.echo(str(quant.to_low_precision_training(block, recipe, backend=backend)), err=True)
            return block

        # Transformer Engine's modules and the histories of delayed scaling break graphs.
        return _Way(f"ours, {recipe}, {backend}", make, compiles=backend != "te" and not RECIPES[recipe].history)

    engines, torchaos = _transformer_engine(), _torchao()
    yield [_Way("BF16, compiled", _plain)]
    for recipe, way in engines.items():
        yield [*([ours("fp8_block", "native")] if recipe == "fp8_block" else []), ours(recipe, "te"), way]
    if not engines:
        yield [ours("fp8_block", "native")]
    for recipe, way in torchaos.items():
        yield [*([ours(recipe, "native")] if "rowwise" in recipe else []), ours(recipe, "torchao"), way]
    if not torchaos:
        yield [ours("fp8_rowwise", "native")]
    for name in RECIPES:
        yield [ours(name, "emulated")]


def _plain() -> nn.Module:
    return _Block(lambda i, o: nn.Linear(i, o, bias=False, device="cuda", dtype=torch.bfloat16))


def _torchao() -> dict[str, _Way]:
    """torchao's own modules, by our recipe."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return {}

    def make(recipe: str) -> nn.Module:
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(_plain(), config=config)  # type: ignore[no-any-return]

    return {name: _Way(f"torchao, {theirs}", partial(make, theirs)) for name, theirs in TORCHAO.items()}


def _transformer_engine() -> dict[str, _Way]:
    """Transformer Engine's own modules, by our recipe, of those that Hopper runs."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
    except ImportError:
        return {}

    def make() -> nn.Module:
        return _Block(lambda i, o: te.Linear(i, o, bias=False, params_dtype=torch.bfloat16, device="cuda"))

    def context(name: str) -> AbstractContextManager[Any]:
        return te.autocast(enabled=True, recipe=getattr(recipes, name)())  # type: ignore[no-any-return]

    return {
        name: _Way(f"Transformer Engine, {theirs}", make, partial(context, theirs), compiles=False)
        for name, theirs in TRANSFORMER_ENGINE.items()
        if name.startswith("fp8")
    }


def _step(
    run: Any,
    inputs: dict[str, torch.Tensor],
    gradients: list[torch.Tensor],
    context: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], None]:
    def step() -> None:
        with context():
            outputs = run(inputs)
        torch.autograd.backward(outputs, gradients)
        for parameter in run.parameters():
            parameter.grad = None
        for tensor in inputs.values():
            tensor.grad = None

    return step


def _medians(runs: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Milliseconds of a step of each run, the median of four rounds in which the runs take turns."""
    times = _rounds(runs, max(steps // 4, 1), 4)
    return {name: statistics.median(of_rounds) for name, of_rounds in times.items()}


def _rounds(runs: dict[str, Callable[[], None]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each run in each round, the median of some steps; the runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, step in runs.items():
            times[name].append(_median(step, steps))
        click.echo(", ".join(f"{name} {own[-1]:.2f}" for name, own in times.items()), err=True)
    return times


def _median(step: Callable[[], Any], steps: int) -> float:
    return statistics.median(_times(step, steps))


def _times(step: Callable[[], Any], steps: int) -> list[float]:
    """Milliseconds of steps by CUDA events, after five that are not timed; the host does not wait between steps."""
    for _ in range(5):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


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
            "noise": float((torch.stack(drawn) - mean).norm() / max(len(drawn) - 1, 1) ** 0.5 / exact.norm()),
            "cosine": float(torch.cosine_similarity(drawn[0], exact, dim=0)),
            "slope": float(mean @ exact / exact.square().sum()),
        }
        yield _told(row)


if __name__ == "__main__":
    main()
