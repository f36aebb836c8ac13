"""This benchmark measures the output error that rounding a layer's inputs to NVFP4 leaves, on text that nobody saw.

    error   Σ ‖W (x_q - x)‖² / Σ ‖W x‖² · 1000, for the layers that share an input; weights stay in 16 bit

The columns are what costs nothing at run time where the modules around take it up: the order of the channels, and their
scales. The largest value of a block is met exactly but for the rounding of the block's scale, so a loud channel alone
among quiet ones costs little, and sixteen loud ones together cost as much as any sixteen.

    own / sorted / spread   channels in their own order, by their power, or one of the loudest for each block
    learned                 from AWQ's scales, each channel's is multiplied by 0.7 to 1.4 as long as the error on 1,024
                            calibration tokens falls
    rank 32, …              a branch in 16 bit sees the inputs unrounded, and rounding only meets the rest: chosen by
                            the output that it takes over (as SVDQuant), by the noise, and with AWQ looking at the rest

Inputs are those of the original model: on rows of WikiText-2 for calibration; on WikiText-2's test text and on Python's
source for the error, in the half of it that methods may be chosen by (`_texts`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import torch
from _table import machine, show, versions
from _texts import SEQLEN, TOKENS, python_rows
from layer_error import inputs_of
from torch import Tensor

import quant
from quant.calibration.solvers.awq import Awq
from quant.calibration.solvers.interfaces import GroupInputs
from quant.calibration.solvers.lowrank import lowrank_branch, residual_weight
from quant.formats.format import get_format
from quant.formats.tensor import round_activation

TITLE = "Output error of rounded inputs"
NVFP4 = get_format("nvfp4")
BLOCK = NVFP4.block[1]
GROUPS = ("self_attn.q_proj|self_attn.k_proj|self_attn.v_proj", "mlp.gate_proj|mlp.up_proj", "mlp.down_proj")
RANK = 32


def noise_of(x: Tensor, scale: Tensor) -> Tensor:
    """What rounding `x / scale` changes in it, `[tokens, in]`."""
    return round_activation(x / scale, NVFP4, None) - x / scale


def error(weight: Tensor, x: Tensor, scale: Tensor, rest: Tensor | None = None) -> float:
    """The benchmark's error; `rest` is what a branch leaves of the scaled weight, `[out, in]`."""
    met = weight * scale if rest is None else rest
    return float(1000 * (noise_of(x, scale) @ met.t()).square().sum() / (x @ weight.t()).square().sum())


def awq(weight: Tensor, x: Tensor, rank: int = 0) -> Tensor:
    """AWQ's scale before GPTQ, `[in]`."""
    inputs = GroupInputs(x[::4], x.abs().mean(0), x.abs().amax(0))
    return replace(Awq(), inputs_alone=True, rank=rank)(weight, inputs, NVFP4, NVFP4, None)


def orders(power: Tensor) -> dict[str, Tensor]:
    """Channels in the order in which they fill the blocks."""
    ranked = power.argsort(descending=True)
    own = torch.arange(len(power))
    return {"own": own, "sorted": ranked, "spread": ranked.view(BLOCK, -1).t().flatten()}


def learned(weight: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Coordinate descent on the scales of all blocks at once: noise is hardly correlated between channels."""
    x, found = x[:: max(len(x) // 1024, 1)], scale.clone()
    size = weight.square().sum(0)

    def losses(scale: Tensor) -> Tensor:
        return (noise_of(x, scale).square().mean(0) * scale.square() * size).view(-1, BLOCK).sum(1)

    least = losses(found)
    for channel in range(BLOCK):
        for factor in (0.7, 0.87, 1.15, 1.4):
            trial = found.clone()
            trial[channel::BLOCK] *= factor
            now = losses(trial)
            better = now < least
            found = torch.where(better.repeat_interleave(BLOCK), trial, found)
            least = torch.where(better, now, least)
    return found


def rests(weight: Tensor, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """What branches chosen in two ways leave of the scaled weight, `[out, in]`."""
    scaled, noise = weight * scale, noise_of(x, scale).square().mean(0)
    output = (x @ weight.t()).double()
    top = torch.linalg.eigh(output.t() @ output)[1][:, -RANK:].to(scaled)
    branch = lowrank_branch(scaled, noise, RANK, scaled.dtype)
    return {"by output": scaled - top @ (top.t() @ scaled), "by noise": residual_weight(scaled, branch)}


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--blocks", default="4,14,24", show_default=True)
@click.option("--calibration-rows", default=8, show_default=True)
@click.option("--rows", default=3, show_default=True, help="Rows of each text to measure on.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(model: str, blocks: str, calibration_rows: int, rows: int, json_path: Path | None) -> None:
    source = quant.open_model(model)
    tokenizer, module = source.load_tokenizer(), source.model.float().eval()
    texts = {
        "": quant.token_rows(f"{TOKENS}:calibration", None, samples=calibration_rows, seqlen=SEQLEN),
        "WikiText-2": quant.token_rows(f"{TOKENS}:eval", None, samples=rows, seqlen=SEQLEN),
        "Python": python_rows(tokenizer, rows, "choose"),
    }
    groups = [[f"model.layers.{b}.{part}" for part in g.split("|")] for b in blocks.split(",") for g in GROUPS]
    seen = {text: inputs_of(module, [names[0] for names in groups], ids) for text, ids in texts.items()}
    table: list[dict[str, object]] = []
    for names in groups:
        weight = torch.cat([module.get_submodule(name).weight.detach() for name in names])
        inputs = {text: torch.cat(found[names[0]]) for text, found in seen.items()}
        x = inputs.pop("")
        one, scale, again = torch.ones(len(x[0])), awq(weight, x), awq(weight, x, RANK)
        left = rests(weight, x, scale)
        better = learned(weight, x, scale)
        for text, given in inputs.items():
            row: dict[str, object] = {"layer": names[0], "text": text}
            for order, places in orders(x.square().mean(0)).items():
                part = weight[:, places]
                row[order] = error(part, given[:, places], one)
                row[f"{order}, AWQ"] = error(part, given[:, places], awq(part, x[:, places]))
            row["learned"] = error(weight, given, better)
            row |= {f"rank {RANK}, {how}": error(weight, given, scale, rest) for how, rest in left.items()}
            row["AWQ of the rest"] = error(weight, given, again, rests(weight, x, again)["by noise"])
            table.append(row)
            click.echo(str(row), err=True)
    header = machine() | versions("transformers")
    show(TITLE, header, table, json_path=json_path)


if __name__ == "__main__":
    main()
