"""`quant generate`: text from a model, quantized or not, and how fast it came; `quant tune`: its matmuls, made fast."""

from __future__ import annotations

import dataclasses
import json

import click

from quant.cli.base import ATTENTION, DEBUG, JSON, KV_CACHE, QUIET, Command, attention_options
from quant.errors import UserError


@click.command("generate", cls=Command)
@click.argument("model")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Tokens to add at most.")
@click.option("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one.")
@click.option(
    "--dtype", metavar="DTYPE", help="Of what is not quantized: bfloat16, float16 or float32; by default the model's."
)
@ATTENTION
@KV_CACHE
@QUIET
@JSON
@DEBUG
def generate_command(
    model: str,
    prompt: str,
    max_new_tokens: int,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    kv_cache: str | None,
    quiet: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Continue a prompt with MODEL, a checkpoint of ours or any model that `quantize` takes: greedy, repeatable.

    On a GPU the kernels multiply by the quantized weights, on a CPU their PyTorch reference does.
    """
    from quant.cli.console import status
    from quant.cli.pipeline import open_any
    from quant.runtime.generate import generate

    with status(f"loading {model}", quiet or as_json):
        source = open_any(model)
    if not source.is_causal_lm:
        raise UserError(f"{model} ({type(source.model).__name__}) is no causal language model; it cannot continue text")
    assert source.model is not None
    how = attention_options(model, attention, kv_cache)
    written = generate(source.model, source.load_tokenizer(), prompt, max_new_tokens, device=device, dtype=dtype, **how)
    if as_json:
        click.echo(
            json.dumps({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second}, indent=1)
        )
        return
    click.echo(prompt + written.text)
    if not quiet:
        rate = f"{len(written.tokens)} tokens in {written.seconds:.2f} s, {written.tokens_per_second:.1f} a second"
        click.echo(f"{rate}, on {written.device}: {written.kernels}", err=True)
        if written.kv_cache_bytes is not None or written.attention != "16bit":
            size = f" ({written.kv_cache_bytes:,} bytes of pages)" if written.kv_cache_bytes is not None else ""
            click.echo(f"attention in {written.attention}, KV cache in {written.kv_cache}{size}", err=True)


@click.command("tune", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,64,256", show_default=True, help="Numbers of rows to tune for.")
@QUIET
@JSON
@DEBUG
def tune_command(model: str, tokens: str, quiet: bool, as_json: bool, debug: bool) -> None:
    """Measure the launches of every quantized matmul of MODEL on this GPU, and keep the fastest.

    The table is kept in ~/.cache/blockscale ($BLOCKSCALE_CACHE) and used from then on. Results that differ from
    float64 are dropped and named.
    """
    from quant.cli.console import bar
    from quant.cli.pipeline import open_any
    from quant.kernels.hardware import current
    from quant.kernels.linear.tuning import shapes_of, tune_shapes

    gpu = current()
    sizes = read_numbers(tokens, "--tokens")
    source = open_any(model)
    assert source.model is not None
    weights = shapes_of(source.model)
    if not weights:
        raise UserError(f"{model} has no quantized linear; tune a checkpoint that `quantize` wrote")
    with bar("tune", quiet or as_json) as advance:
        entries, dropped, path = tune_shapes(weights, sizes, gpu, progress=advance)
    if as_json:
        click.echo(json.dumps({"file": str(path), "entries": entries, "dropped": dropped}, indent=1))
        return
    for name, entry in entries.items():
        click.echo(f"{name}: {entry['microseconds']:.1f} µs, {entry['choice']}")
    for name, why in dropped.items():
        click.echo(f"dropped {name}: {why}", err=True)
    if not quiet:
        click.echo(f"written to {path}", err=True)


def read_numbers(text: str, option: str) -> list[int]:
    """Positive numbers from "1,16,64", sorted; UserError names the option."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UserError(f"{option} {text}: expected numbers of 1 or more, separated by commas, such as 1,16,64")
    return numbers
