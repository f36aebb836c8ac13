"""This benchmark measures the output error of single layers, solved alone, on text that no solver saw.

The second moment of a layer's inputs comes from WikiText-2, and the error from three other texts: WikiText-2's test
text, and Python's source and reference in the half of them that methods may be chosen by (`_texts`).

    error          ‖X (Q - W)ᵀ‖ / ‖X Wᵀ‖ · 1000
    correlation    Σ C_ij² over j ≠ i, the mean over inputs i, with C the correlations of the inputs: what feedback can
                   work with. Where it is small, an error in one column says little about any other, and all that
                   second-order rounding can gain comes from the choice of scales.

`gptq, own order` takes the columns from the first to the last, `gptq` the loudest blocks first. A solver that is given
other second moments than those of the whole model in sequence ends a little elsewhere, so the figures are for comparing
methods with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import torch
from _table import machine, show, versions
from _texts import SEQLEN, TOKENS, python_rows, reference_rows
from torch import Tensor, nn

import quant
from quant.calibration.solvers.gptq import Factor, block_order, factorize, gptq
from quant.calibration.solvers.local_hessian import local_hessian
from quant.calibration.solvers.registry import RoundToNearest
from quant.calibration.solvers.solve_group import shared_global_scale
from quant.calibration.statistics import MomentSum, diagonal_blocks
from quant.formats.format import Format, get_format

TITLE = "Output error of single layers"
LAYERS = "model.layers.3.self_attn.q_proj,model.layers.15.mlp.up_proj,model.layers.3.mlp.down_proj"


def inputs_of(model: nn.Module, names: list[str], rows: Tensor) -> dict[str, list[Tensor]]:
    """The inputs of each layer, a `[seqlen, in]` for each row."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def watch(name: str) -> None:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(lambda module, args: found[name].append(args[0][0].detach())))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    for name in names:
        watch(name)
    with torch.no_grad():
        for row in rows.split(1):
            model(row)
    for hook in hooks:
        hook.remove()
    return found


def solutions(weight: Tensor, moment: Tensor, format: Format) -> dict[str, Tensor]:
    """The values `[out, in]` that each method gives."""
    largest = shared_global_scale(weight.abs().amax(), format, "max") if format.global_scale else None
    second = shared_global_scale(weight.abs().amax(), format, "mse") if format.global_scale else None
    nearest = RoundToNearest("max")(weight, None, format, global_scale=largest, name="layer")
    searched = RoundToNearest("mse")(weight, None, format, global_scale=second, name="layer")
    own: Factor = factorize(moment)
    loud_first = factorize(moment, order=block_order(moment.diagonal(), format.block[1]))
    return {
        "rtn": nearest.dequantize(),
        "mse": searched.dequantize(),
        "local_hessian": local_hessian(weight, diagonal_blocks(moment, format.block[1]), format, second).dequantize(),
        "gptq, own order": gptq(weight, own, format, second).dequantize(),
        "gptq": gptq(weight, loud_first, format, second).dequantize(),
    }


def correlation(moment: Tensor) -> float:
    """Mean over inputs of the sum of squared correlations with all others."""
    power = moment.diagonal()
    return float((moment.square() / (power * power[:, None])).sum() / len(moment)) - 1


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--layers", default=LAYERS, show_default=True)
@click.option("--formats", default="nvfp4,mxfp4,int4", show_default=True, help="Formats with blocks within a row.")
@click.option("--calibration-rows", default=8, show_default=True)
@click.option("--rows", default=4, show_default=True, help="Rows of each text to measure on.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    model: str, layers: str, formats: str, calibration_rows: int, rows: int, json_path: Path | None
) -> None:  # fmt: skip
    names = layers.split(",")
    source = quant.open_model(model)
    tokenizer, module = source.load_tokenizer(), source.model.float().eval()
    calibration = quant.token_rows(f"{TOKENS}:calibration", None, samples=calibration_rows, seqlen=SEQLEN)
    texts: Mapping[str, Tensor] = {
        "WikiText-2": quant.token_rows(f"{TOKENS}:eval", None, samples=rows, seqlen=SEQLEN),
        "Python": python_rows(tokenizer, rows, "choose"),
        "reference": reference_rows(tokenizer, rows, "choose"),
    }
    seen = inputs_of(module, names, calibration)
    held_out = {text: inputs_of(module, names, ids) for text, ids in texts.items()}
    table = []
    for name in names:
        moments = MomentSum()
        for x in seen[name]:
            moments.add(x)
        moment, weight = moments.stats().second_moment, module.get_submodule(name).weight.detach()
        for format in map(get_format, formats.split(",")):
            for method, values in solutions(weight, moment, format).items():
                errors = {}
                for text, found in held_out.items():
                    x = torch.cat(found[name])
                    errors[text] = float(1000 * (x @ (values - weight).t()).norm() / (x @ weight.t()).norm())
                facts = {"layer": name, "correlation": correlation(moment), "format": format.name, "method": method}
                table.append({**facts, **errors})
                click.echo(str(table[-1]), err=True)
    header = machine() | versions("transformers")
    show(TITLE, header, table, json_path=json_path)


if __name__ == "__main__":
    main()
