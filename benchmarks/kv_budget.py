"""This benchmark divides bytes between weights and KV cache: the cache in one format, or `--kv-bits auto`.

For each size, weights in NVFP4 and FP8 and the cache of one row of CTX tokens fit into it. Losses are KL(base‖model) of
both together, weights rounded to nearest, on rows that took no part in the choice.

With --kv-bits the weights stay in 16 bit: the choice of formats by layer is held against one format for all layers, and
against the same formats in layers drawn at random, on rows of WikiText-2, Python and prose.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import click
import torch
from _table import machine, show, versions
from _texts import page_rows, python_rows, reference_rows
from torch.nn.functional import kl_div

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
DATA = Path(__file__).parent / "data"


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--fit", default="165,185", show_default=True, help="Sizes in MB.")
@click.option("--ctx", default=4096, show_default=True)
@click.option("--seqlen", default=512, show_default=True)
@click.option("--rows", default=4, show_default=True, help="Rows to choose on, and rows to measure on.")
@click.option("--kv-bits", type=float, help="Compare caches of this many bits a value, with weights in 16 bit.")
@click.option("--draws", default=3, show_default=True, help="Random orders of layers, with --kv-bits.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    model: str, fit: str, ctx: int, seqlen: int, rows: int, kv_bits: float | None, draws: int, json_path: Path | None
) -> None:  # fmt: skip
    source: Any = open_model(model)
    original, tokenizer = source.model, source.load_tokenizer()
    calibration = page_rows(DATA / "calibration.txt", tokenizer, 2 * rows, 512)[:, :seqlen]
    held_out = page_rows(DATA / "evaluation.txt", tokenizer, rows, 512)[:, :seqlen]
    facts = {**machine(1), **versions("transformers")}
    if kv_bits is not None:
        texts = {"WikiText": held_out}
        texts |= {"Python": python_rows(tokenizer, rows, "report", seqlen)}
        texts |= {"prose": reference_rows(tokenizer, rows, "report", seqlen)}
        chosen = choose_kv_layers(original, calibration[:rows], kv_bits, Session())[0]
        table = by_layer(original, chosen.layers, texts, draws)
        show(f"KV cache by layer in {kv_bits:g} bits a value", facts, table, json_path=json_path)
        return
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
    show(TITLE, facts, table, json_path=json_path)


def by_layer(model: Any, chosen: tuple[str, ...], texts: dict[str, Any], draws: int) -> list[dict[str, Any]]:
    """Losses of the choice, of one format for all layers, and of the chosen formats in random orders."""
    caches = {"chosen": chosen, **{name: (name,) * len(chosen) for name in dict.fromkeys(chosen)}}
    for seed in range(draws):
        caches[f"random {seed}"] = tuple(random.Random(seed).sample(chosen, len(chosen)))
    model = model.float()

    @torch.no_grad()
    def predictions(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(row).logits.log_softmax(-1) for row in rows.split(1)])

    table, reference = [], {text: predictions(rows) for text, rows in texts.items()}
    for name, layers in caches.items():
        with quantized_attention(model, kv_cache=",".join(layers)):
            losses = {
                text: float(kl_div(predictions(texts[text]), base, reduction="none", log_target=True).sum(-1).mean())
                for text, base in reference.items()
            }
        table.append({"cache": name, **losses, "layers": "".join(layer[0] for layer in layers)})
        print(table[-1], flush=True)
    return table


if __name__ == "__main__":
    main()
