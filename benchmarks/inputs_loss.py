"""This benchmark measures what rounded inputs alone cost a language model whose weights stay as they are.

    KL     KL(base‖model), nats, the mean over the first tokens of rows of WikiText-2, Python's source and its reference
    bits   of a weight in NVFP4, with the columns that residual channels add

The model is quantized by each solver, and each of its layers then multiplies the inputs, rounded and widened as the
layer has them, by the original weight. `--kinds` rounds the inputs of some layers alone: `q_proj,k_proj,v_proj`. Input
scales and rotations change weights and are not for this, but residual channels are: a solver that does not solve, as
`residual+rtn`, chooses the same ones as `residual+gptq`, and `residual+kfac` chooses by gradients.
"""

from __future__ import annotations

import copy
from functools import partial

import click
import torch
from _table import machine, show, versions
from _texts import SEQLEN, TOKENS, python_rows, reference_rows
from torch import Tensor, nn
from torch.nn import functional

import quant
from quant.calibration.walk.transform import widened_weight
from quant.kernels.linear.quant_linear import QuantLinear, rounded_input
from quant.recipes.recipe import Recipe
from quant.recipes.solver_names import parse_solver

TITLE = "Loss by rounded inputs alone"


def with_weight(layer: QuantLinear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Returns the output of the layer with `weight` `[out, in]` in place of its own."""
    wide = layer.parts.widened(x, layer.activation_format, layer.input_scale)
    rounded = rounded_input(wide, layer.activation_format, layer.input_scale)
    return functional.linear(rounded, widened_weight(weight, layer.channels), bias)


def with_original_weights(quantized: nn.Module, original: nn.Module, kinds: list[str]) -> None:
    """Lets the quantized layers of `kinds`, all without any, round inputs alone, and puts back the others."""
    for name, layer in list(quantized.named_modules()):
        if not isinstance(layer, QuantLinear):
            continue
        linear = original.get_submodule(name)
        if kinds and name.rpartition(".")[2] not in kinds:
            quantized.set_submodule(name, linear)
        else:
            layer.forward = partial(with_weight, layer, linear.weight, linear.bias)  # type: ignore[method-assign]


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--solvers", default="rtn,residual:64+rtn,residual+rtn,residual+kfac", show_default=True)
@click.option("--activation", default="nvfp4", show_default=True, help="Or nvfp4_four_over_six.")
@click.option("--kinds", default="", help="Last parts of the names of layers whose inputs are rounded.  [default: all]")
@click.option("--calibration-rows", default=8, show_default=True)
@click.option("--rows", default=2, show_default=True, help="Rows of each text to measure on.")
@click.option("--tokens", "length", default=256, show_default=True, help="Tokens of each row.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@torch.no_grad()
def main(
    model: str, solvers: str, activation: str, kinds: str, calibration_rows: int, rows: int, length: int, device: str
) -> None:
    source = quant.open_model(model)
    tokenizer, original = source.load_tokenizer(), source.model.float().eval().to(device)
    smollm2 = quant.open_model("smollm2-135m").load_tokenizer()
    wikitext = {}
    for part in ("calibration", "eval"):
        ids = quant.token_rows(f"{TOKENS}:{part}", None, samples=16, seqlen=SEQLEN)
        text = [smollm2.decode(row.tolist()) for row in ids]
        wikitext[part] = quant.calibration_rows(text, tokenizer, samples=max(rows, calibration_rows), seqlen=SEQLEN)
    texts = {
        "WikiText-2": wikitext["eval"][:rows],
        "Python": python_rows(tokenizer, rows, "choose"),
        "reference": reference_rows(tokenizer, rows, "choose"),
    }
    table: list[dict[str, object]] = []
    for solver in solvers.split(","):
        spec = parse_solver(solver)
        if spec.transforms or spec.rotation or spec.merged or spec.rank:
            raise click.UsageError(
                f"{solver}: it changes weights before they are rounded; name residual and a rounding"
            )
        quantized = copy.deepcopy(original)
        plan = quant.make_plan(quantized, Recipe("inputs", "nvfp4", activation), solver=solver)
        done = quant.quantize(quantized, plan, wikitext["calibration"][:calibration_rows].to(device), device=device)
        layers = done.plan.quantized
        bits = sum(layer.bits_per_weight * layer.numel for layer in layers) / sum(layer.numel for layer in layers)
        with_original_weights(done.model, original, kinds.split(",") if kinds else [])
        row: dict[str, object] = {"solver": solver, "bits": bits}
        for name, ids in texts.items():
            before, after = (
                [m(each[None, :length].to(device)).logits[0] for each in ids] for m in (original, done.model)
            )
            p, q = (torch.cat(logits).float().log_softmax(-1) for logits in (before, after))
            row[f"KL {name}"] = float((p.exp() * (p - q)).sum(-1).mean())
        table.append(row)
        click.echo(str(row), err=True)
    kept = f", of {kinds} alone" if kinds else ""
    note = f"{model}, inputs in {activation}{kept}; {calibration_rows} rows of WikiText-2 for calibration."
    show(TITLE, machine() | versions("transformers"), table, [note])


if __name__ == "__main__":
    main()
