"""This benchmark trains LoRA adapters over a quantized model: tokens a second and memory, beside bitsandbytes' NF4.

The model is a Llama of the 8B shape with random weights, quantized by rounding; embeddings and head stay in BF16. A row
is a fresh process that trains rank-16 adapters on all linear layers of the decoder with AdamW, one row of tokens a step.
Ours and NF4 get their adapters from PEFT, the same loop and the same settings; gradient checkpointing is on unless
--keep-activations is given. `tokens/s` is from the median of the steps after the first five, `GB` the most that torch
allocated while training.
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
from _table import machine, show, versions, write_json

import quant
from quant.recipes.json_text import json_text

TITLE = "LoRA over a quantized model"
BASES = ("nvfp4a16", "fp8_channel", "int4a16", "nf4", "bf16")


def original(hidden: int, layers: int, tokens: int) -> Any:
    """A Llama with the proportions of Llama-3-8B, its weights random, in BF16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=max(hidden // 512, 1), head_dim=128,
        vocab_size=128256 * hidden // 4096, max_position_embeddings=tokens, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config).bfloat16()


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


def measure(base: str, hidden: int, layers: int, tokens: int, steps: int, rank: int, keep: bool) -> dict[str, Any]:
    """Trains adapters over one base; gives tokens/s, seconds of a step, GB and the last loss."""
    from peft import LoraConfig, get_peft_model

    model = original(hidden, layers, tokens)
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
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = loss.item()
        seconds.append(time.perf_counter() - started)
    step = statistics.median(seconds[5:] or seconds)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    return {"base": base, "tokens/s": tokens / step, "ms/step": 1e3 * step, "GB": peak, "loss": last}


@click.command(help=__doc__)
@click.option("--bases", default="nvfp4a16,nf4,bf16", show_default=True, help=f"Of {', '.join(BASES)}.")
@click.option("--hidden", default=4096, show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="In the one row of a step.")
@click.option("--steps", default=20, show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--keep-activations", "keep", is_flag=True, help="No gradient checkpointing.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--row", hidden=True, help="Measure one base here and print it as JSON.")
def main(
    bases: str, hidden: int, layers: int, tokens: int, steps: int, rank: int, keep: bool, json_path: Path | None,
    row: str | None,
) -> None:  # fmt: skip
    if row:
        print(json_text(measure(row, hidden, layers, tokens, steps, rank, keep)))
        return
    options = [f"--hidden={hidden}", f"--layers={layers}", f"--tokens={tokens}", f"--steps={steps}", f"--rank={rank}"]
    table: list[dict[str, Any]] = []
    notes = [f"{layers} layers of {hidden} x {hidden * 7 // 2}, rank {rank}, 1 x {tokens} tokens."]
    for base in bases.split(","):
        if base == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            notes.append("bitsandbytes is not installed here, so NF4 has no row.")
            continue
        command = [sys.executable, "-W", "ignore", __file__, *options, *(["--keep-activations"] if keep else [])]
        done = subprocess.run([*command, "--row", base], capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{base} failed:\n{done.stderr[-3000:]}")
        table.append(json.loads(done.stdout.splitlines()[-1]))
        click.echo(str(table[-1]), err=True)
    header = machine() | versions("transformers", "peft", "bitsandbytes")
    show(TITLE, header, table, notes)
    if json_path:
        write_json(json_path, TITLE, header, table, notes)


if __name__ == "__main__":
    main()
