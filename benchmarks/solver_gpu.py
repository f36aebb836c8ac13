"""This benchmark measures solvers on one GPU: the loss of a small model, and the time that large layers take.

First table: KL(base‖quantized) and perplexity of a small causal model after each solver, with the seconds of the
quantization alone. The quantized model is run in FP32 over dequantized weights and rounded inputs, so no kernel of
ours takes part in what is measured. Second table: a few decoder layers of Llama-3-8B's shape with random weights,
kept on the CPU and streamed through the GPU one at a time; seconds for all 32 layers are extrapolated from them and
the table says so.

Rows are printed as soon as they are measured. At the deadline the row that is being measured is given up, and the
tables of what there is are printed.
"""

from __future__ import annotations

import copy
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import torch
from _table import machine, show, versions, write_json
from _texts import TOKENS
from safetensors import safe_open
from torch import nn

import quant
from quant.calibration.statistics import round_activation
from quant.evaluation.evaluate import evaluate
from quant.kernels.linear.quant_linear import QuantLinear

# Recipe and solver: the quick ones first, for a budget of seconds may cut the list.
CONFIGURATIONS = (
    ("nvfp4a16", "gptq"),
    ("nvfp4a16", "local_hessian"),
    ("nvfp4a16", "rotation:64+gptq"),
    ("nvfp4", "awq+gptq"),
    ("nvfp4", "awq+lowrank:32+gptq"),
    ("fp8", "gptq"),
    ("fp8_channel", "gptq"),
    ("mxfp8", "gptq"),
    ("nvfp4", "awq+gptq+autoround"),
    ("nvfp4a16", "gptq+autoround"),
    ("nvfp4a16", "awq+gptq"),
    ("nvfp4a16", "mse"),
    ("fp8", "rtn"),
    ("fp8_channel", "rtn"),
    ("mxfp8", "rtn"),
    ("nvfp4a16", "rotation:64+gptq+autoround"),
    ("nvfp4", "awq+lowrank:32+gptq+autoround"),
)
LLAMA_LAYERS = 32
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


class Reference(nn.Module):
    """A quantized linear over dequantized weights, in the arithmetic of the formats alone."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.layer.parts
        x = parts.input(x)
        rounded = round_activation(x, self.layer.activation_format, self.layer.input_scale)
        y = nn.functional.linear(rounded, self.weight.to(x.dtype), self.layer.bias)
        branch = parts.branch(x)
        return y if branch is None else y + branch


def as_reference(model: nn.Module) -> nn.Module:
    """`model` with every quantized linear replaced."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Reference(module))
    return model


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Deadline(BaseException):
    """The time is over."""


def at_deadline(*_: Any) -> None:
    raise Deadline


def losses(model: str, tokens: Path, device: str, only: Sequence[str]) -> Iterator[dict[str, object]]:
    """Rows of the first table."""
    base = quant.open_model(model).model
    assert base is not None
    base = base.to(device)
    with safe_open(tokens, framework="pt") as file:
        seqlen = int(file.get_slice("eval").get_shape()[1])
    rows = quant.token_rows(f"{tokens}:calibration", None, samples=32, seqlen=seqlen).to(device)
    text = quant.token_rows(f"{tokens}:eval", None, samples=16, seqlen=seqlen).to(device)
    # Loads libraries and compiles the kernels, which is no part of any row.
    for recipe, solver in (("nvfp4a16", "gptq"), ("nvfp4", "awq+gptq+autoround:2")):
        quant.quantize(copy.deepcopy(base), recipe, rows[:4], solver=solver, include=["*layers.0.*"])
    for recipe, solver in CONFIGURATIONS:
        if only and not any(fnmatchcase(f"{recipe} {solver}", glob) for glob in only):
            continue
        quantized = copy.deepcopy(base)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        plan = quant.quantize(quantized, recipe, rows, solver=solver).plan
        synchronize()
        seconds = time.perf_counter() - started
        peak = peak_gib()
        found = evaluate(as_reference(quantized), text, base, batch_size=4)
        yield {
            "recipe": recipe, "solver": solver, "KL": found.kl, "perplexity": found.perplexity, "s": seconds,
            "bits": plan.effective_bits, "GiB on the GPU": peak,
        }  # fmt: skip


def peak_gib() -> float:
    """Peak of allocated GPU memory since the last reset, 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def large_layers(device: str, layers: int, samples: int) -> Iterator[dict[str, object]]:
    """Rows of the second table."""
    for solver in ("mse", "gptq"):
        # Loads libraries and compiles the kernels, which happens once for any number of layers.
        small = random_llama(device, LLAMA | {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1024})
        warm_up = torch.randint(0, LLAMA["vocab_size"], (2, 512))
        quant.quantize(small, "nvfp4a16", warm_up, solver=solver, device=device)
        model = random_llama(device, LLAMA | {"num_hidden_layers": layers})
        rows = torch.randint(0, LLAMA["vocab_size"], (samples, 512))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        if solver == "mse":
            # Needs no inputs: each block goes to the GPU, is quantized there and comes back.
            for index, block in enumerate(model.model.layers):
                block.to(device)
                quant.quantize(model, "nvfp4a16", solver=solver, include=[f"model.layers.{index}.*"])
                block.cpu()
        else:
            report = reporter(solver, started)
            quant.quantize(model, "nvfp4a16", rows, solver=solver, device=device, progress=report)
        synchronize()
        seconds = (time.perf_counter() - started) / layers
        yield {
            "solver": solver, "layers measured": layers, "s a layer": seconds,
            f"s for {LLAMA_LAYERS} layers (extrapolated)": seconds * LLAMA_LAYERS,
            "tokens": 0 if solver == "mse" else rows.numel(), "GiB on the GPU": peak_gib(),
        }  # fmt: skip
        del model
        gc.collect()


def reporter(solver: str, started: float) -> Callable[[str, int, int], None]:
    """Prints how far a quantization is."""

    def report(stage: str, done: int, total: int) -> None:
        print(f"{solver}: {stage} {done}/{total} after {time.perf_counter() - started:.1f} s", flush=True)

    return report


def random_llama(device: str, shape: dict[str, Any]) -> nn.Module:
    """A model with random weights: matrices made on `device` and kept on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    rotary = type(model.model.rotary_emb)(model.config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(torch.randn(parameter.shape, device=device) * 0.02)
        else:
            parameter.data.fill_(1)
    return model


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True, help="Alias, directory or file of a causal LM.")
@click.option("--tokens", default=TOKENS, type=click.Path(path_type=Path, exists=True), help="`calibration`, `eval`.")
@click.option("--layers", default=2, show_default=True, help="Decoder layers of Llama-3-8B's shape to measure.")
@click.option("--samples", default=32, show_default=True, help="Rows of 512 tokens for GPTQ on them.")
@click.option("--deadline", default=140.0, show_default=True, help="Seconds after which no more is measured.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only rows of the first table: `fp8 gptq`. Repeatable.")
@click.option("--large/--no-large", default=True, help="Whether to make the second table.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the first table here.")
def main(
    model: str, tokens: Path, layers: int, samples: int, deadline: float, only: tuple[str, ...], large: bool,
    json_path: Path | None,
) -> None:  # fmt: skip
    if not torch.cuda.is_available():
        click.echo("no CUDA device here: benchmarks/accuracy.py measures the same losses on a CPU")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    signal.signal(signal.SIGALRM, at_deadline)
    signal.setitimer(signal.ITIMER_REAL, deadline)
    slow: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    try:
        tables = [(slow, large_layers("cuda", layers, samples))] if large else []
        for table, found in [*tables, (rows, losses(model, tokens, "cuda", only))]:
            for row in found:
                print(row, flush=True)
                table.append(row)
    except Deadline:
        print(f"stopped after {deadline:g} s", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    header = machine() | versions("transformers")
    if slow:
        show("Layers of Llama-3-8B's shape, streamed", header, slow)
    if rows:
        show("Loss by solver", header, rows, ["32 x 512 tokens for calibration; KL over 8,176 predictions."])
    if json_path:
        write_json(json_path, "Loss by solver", header, rows)


if __name__ == "__main__":
    main()
