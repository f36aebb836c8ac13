"""This benchmark measures what shrinking second moments is worth, on text of the calibration's kind and on another.

SmolLM2-135M is calibrated on rows of WikiText-2 and compared with the original on WikiText-2's test text and on Python
source: the files of the standard library that this Python came with, drawn by a fixed seed and cut after 6,000
characters. STRENGTH is the factor on the estimate of `quant.calibration.statistics`; 0 turns the shrinkage off.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from _table import machine, show, versions
from _texts import SEQLEN, TOKENS, python_rows

import quant
from quant.calibration import statistics
from quant.evaluation.evaluate import evaluate
from quant.recipes.recipe import Recipe

TITLE = "Shrinkage of second moments"


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--solver", default="gptq", show_default=True)
@click.option("--weight", default="nvfp4", show_default=True)
@click.option("--activation", default="keep", show_default=True)
@click.option("--calibration-rows", default=8, show_default=True)
@click.option("--rows", default=8, show_default=True, help="Rows to evaluate on, of each text.")
@click.option("--strengths", default="0,1,2", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    model: str, solver: str, weight: str, activation: str, calibration_rows: int, rows: int, strengths: str,
    json_path: Path | None,
) -> None:  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = quant.open_model(model)
    tokenizer, original = source.load_tokenizer(), source.model.to(device)
    calibration = quant.token_rows(f"{TOKENS}:calibration", None, samples=calibration_rows, seqlen=SEQLEN)
    texts = {
        "WikiText-2": quant.token_rows(f"{TOKENS}:eval", None, samples=rows, seqlen=SEQLEN),
        "Python source": python_rows(tokenizer, rows, "choose"),
    }
    table = []
    for strength in map(float, strengths.split(",")):
        statistics.STRENGTH = strength
        quantized = quant.open_model(model).model.to(device)
        plan = quant.make_plan(quantized, Recipe("benchmark", weight, activation), solver=solver)
        start = time.perf_counter()
        quant.quantize(quantized, plan, calibration, device=device)
        seconds = time.perf_counter() - start
        losses = {f"KL {name}": evaluate(quantized, ids, original).kl for name, ids in texts.items()}
        table.append({"strength": strength, **losses, "s": seconds})
        click.echo(str(table[-1]), err=True)
    note = f"{solver} to {weight}, inputs {activation}; {calibration_rows} rows of WikiText-2 for calibration."
    header = machine() | versions("transformers")
    show(TITLE, header, table, [note], json_path=json_path)


if __name__ == "__main__":
    main()
