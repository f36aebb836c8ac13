"""This benchmark divides bytes between weights and KV cache: the cache in one format, or `--kv-bits auto`.

For each size, weights in NVFP4 and FP8 and the cache of one row of CTX tokens fit into it. Losses are KL(base‖model) of
both together, weights rounded to nearest, on rows that took no part in the choice.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import click
from _table import machine, show, versions
from safetensors.torch import load_file

import quant
from quant.calibration.allocation.allocate import allocate
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.measure_choices import Counts
from quant.calibration.sensitivity.knapsack import Infeasible
from quant.calibration.session import Session
from quant.evaluation.evaluate import evaluate
from quant.generate.quantized_attention import quantized_attention
from quant.models.open_model import open_model
from quant.recipes.plan import KV_LAYERS
from quant.run.decide import choose_kv_layers

TITLE = "Weights and KV cache within one size"
TOKENS = Path(__file__).parent / "data" / "smollm2_wikitext2_512.safetensors"


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--fit", default="165,185", show_default=True, help="Sizes in MB.")
@click.option("--ctx", default=4096, show_default=True)
@click.option("--seqlen", default=512, show_default=True)
@click.option("--rows", default=4, show_default=True, help="Rows to choose on, and rows to measure on.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(model: str, fit: str, ctx: int, seqlen: int, rows: int, json_path: Path | None) -> None:
    source: Any = open_model(model)
    original, tokens = source.model, load_file(TOKENS)
    calibration, held_out = (tokens[name][:, :seqlen].long() for name in ("calibration", "eval"))
    calibration, held_out = calibration[: 2 * rows], held_out[:rows]
    choices = choose_kv_layers(original, calibration, None, Session())
    every = {choice.layers: choice.loss for choice in choices}
    single = {(name,) * len(choices[0].layers): choices[0].record["single_formats"][name] for name in KV_LAYERS}
    counts, table, scores = Counts(score_rows=rows, check_rows=rows), [], Path("kv-budget.sensitivity.json")
    for size in map(float, fit.split(",")):
        for name, mixes in (("auto", every), *((layers[0], {layers: loss}) for layers, loss in single.items())):
            try:
                found = allocate(
                    original, calibration, Goal(fit=size * 1e6, context=ctx), counts=counts, kv_mixes=mixes,
                    formats="nvfp4a16,fp8a16", path=scores,
                )  # fmt: skip
            except Infeasible:
                continue
            plan = found.plan
            weights = quant.quantize(copy.deepcopy(original), plan).model
            with quantized_attention(weights, kv_cache=",".join(plan.kv_layers)):
                loss = evaluate(weights, held_out, original).kl
            memory = plan.provenance["allocation"]["memory"]["kv_cache"] / 1e6
            in_layers = {kind: plan.kv_layers.count(kind) for kind in KV_LAYERS if kind in plan.kv_layers}
            table.append({"MB": size, "cache": name, "layers": str(in_layers), "cache MB": memory,
                          "weight bits": found.record.chosen.bits, "KL": loss})  # fmt: skip
            print(table[-1], flush=True)
    show(TITLE, {**machine(1), **versions("transformers")}, table, json_path=json_path)


if __name__ == "__main__":
    main()
