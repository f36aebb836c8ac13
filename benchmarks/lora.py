"""This benchmark trains LoRA adapters over a quantized model: tokens a second and memory, beside bitsandbytes' NF4.

The model is a Llama of the 8B shape with random weights, quantized by rounding; embeddings and head stay in BF16. A row
is a fresh process that trains rank-16 adapters on all linear layers of the decoder with AdamW, one row of tokens a
step. Ours and NF4 get their adapters from PEFT, the same loop and the same settings. Gradient checkpointing is on
unless --keep-activations is given; logits are made 512 tokens at a time, for all rows, unless --whole-logits is given.
`tokens/s` is from the median of the steps after the first five, `GB` the most that torch allocated while training.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from _llama import random_llama
from _table import machine, show, versions
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import quant
from quant.base.json_files import json_text

TITLE = "LoRA over a quantized model"
CHUNK = 512  # tokens whose logits are held at a time
BASES = ("nvfp4a16", "fp8_channel", "int4a16", "nf4", "bf16")


def to_nf4(model: Any) -> None:
    """Puts bitsandbytes' NF4 linear layers in the place of those of the decoder, double quantization on."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            weight = module.weight.data
            layer = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                compress_statistics=True,
            )  # fmt: skip
            layer.weight = bnb.nn.Params4bit(
                weight.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.to(weight.device))
            module.weight = None


def loss_of(model: Any, ids: torch.Tensor, whole: bool) -> torch.Tensor:
    """The mean cross entropy of the next tokens."""
    if whole:
        return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    def part(state: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.lm_head(state).float(), wanted, reduction="sum")

    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1].split(CHUNK)
    parts = (checkpoint(part, *each, use_reentrant=False) for each in zip(states, ids[0, 1:].split(CHUNK), strict=True))
    return torch.stack(list(parts)).sum() / (ids.shape[1] - 1)


def measure(
    base: str,
    hidden: int,
    layers: int,
    tokens: int,
    steps: int,
    rank: int,
    keep: bool,
    whole: bool,
    compiled: bool,
    profile: bool,
) -> dict[str, Any]:
    """Trains adapters over one base; gives tokens/s, seconds of a step, GB and the last loss."""
    from peft import LoraConfig, get_peft_model

    model = random_llama(layers, hidden=hidden, positions=tokens)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    if base == "nf4":
        to_nf4(model)
    elif base != "bf16":
        quant.quantize(model, base, effort=0)
        config = quant.lora(config, model)
    if not keep:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model = get_peft_model(model, config).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=learned[0].device)
    on_gpu = ids.is_cuda
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inner = model.get_base_model()
    if compiled:
        for layer in inner.model.layers:
            layer.compile()

    def step() -> float:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(inner, ids, whole)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        last = step()
        seconds.append(time.perf_counter() - started)
    each = statistics.median(seconds[5:] or seconds)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    if profile:
        with torch.profiler.profile() as profiler:
            step()
        for order in ("self_cpu_time_total", *(["self_cuda_time_total"] if on_gpu else [])):
            print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60), file=sys.stderr)
    return {"base": base, "tokens/s": tokens / each, "ms/step": 1e3 * each, "GB": peak, "loss": last}


@click.command(help=__doc__)
@click.option("--bases", default="nvfp4a16,nf4,bf16", show_default=True, help=f"Of {', '.join(BASES)}.")
@click.option("--hidden", default=4096, show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="In the one row of a step.")
@click.option("--steps", default=20, show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--keep-activations", "keep", is_flag=True, help="No gradient checkpointing.")
@click.option("--whole-logits", "whole", is_flag=True, help="All logits at once, as transformers' own loss has them.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the layers of the decoder.")
@click.option("--profile", is_flag=True, help="Also print where a step spends its time.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--row", hidden=True, help="Measure one base here and print it as JSON.")
def main(
    bases: str, hidden: int, layers: int, tokens: int, steps: int, rank: int, keep: bool, whole: bool, compiled: bool,
    profile: bool, json_path: Path | None, row: str | None,
) -> None:  # fmt: skip
    if row:
        print(json_text(measure(row, hidden, layers, tokens, steps, rank, keep, whole, compiled, profile)))
        return
    if not torch.cuda.is_available() and hidden * layers > 1 << 14:
        click.echo("this size needs a CUDA device; --hidden 512 --layers 2 tries the benchmark on a CPU")
        return
    options = [f"--hidden={hidden}", f"--layers={layers}", f"--tokens={tokens}", f"--steps={steps}", f"--rank={rank}"]
    flags = {"--keep-activations": keep, "--whole-logits": whole, "--compile": compiled, "--profile": profile}
    options += [flag for flag, given in flags.items() if given]
    table: list[dict[str, Any]] = []
    notes = [f"{layers} layers of {hidden} x {hidden * 7 // 2}, rank {rank}, 1 x {tokens} tokens."]
    for base in bases.split(","):
        if base == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            notes.append("bitsandbytes is not installed here, so NF4 has no row.")
            continue
        command = [sys.executable, "-W", "ignore", __file__, *options, "--row", base]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{base} failed:\n{done.stderr[-3000:]}")
        if profile:
            click.echo(done.stderr, err=True)
        table.append(json.loads(done.stdout.splitlines()[-1]))
        click.echo(str(table[-1]), err=True)
    header = machine() | versions("transformers", "peft", "bitsandbytes")
    show(TITLE, header, table, notes, json_path=json_path)


if __name__ == "__main__":
    main()
