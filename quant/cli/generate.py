"""The command `quant generate` continues a prompt with a model, quantized or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import click

from quant.cli.base import (
    ATTENTION,
    DEVICE,
    JSON,
    KV_CACHE,
    QUIET,
    REVISION,
    TRUST,
    Command,
    attention_options,
    echo,
    print_json,
)
from quant.cli.console import listener
from quant.errors import UserError


@click.command("generate", cls=Command)
@click.argument("model")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Maximum number of tokens to add.")
@DEVICE
@click.option("--dtype", help="bfloat16, float16 or float32, for what is not quantized.  [default: the model's]")
@ATTENTION
@KV_CACHE
@TRUST
@REVISION
@QUIET
@JSON
def generate_command(
    model: str,
    prompt: str,
    max_new_tokens: int,
    device: str,
    dtype: str | None,
    attention: str | None,
    kv_cache: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Continue a prompt with MODEL, quantized or not, by greedy decoding, which is repeatable.

    On a GPU our kernels multiply by the quantized weights; on a CPU their PyTorch reference does.
    """
    from quant.checkpoints.runnable import open_runnable
    from quant.execution.announcements import announce_source
    from quant.runtime.generate import generate

    hears = listener(quiet or as_json)
    with hears.step(f"loading {model}"):
        source, module = open_runnable(model)
    announce_source(hears, source)
    if not source.is_causal_lm:
        raise UserError(f"{model} ({type(module).__name__}) is no causal language model; it cannot continue text")
    how = attention_options(source.path, attention, kv_cache)
    # JSON has the text whole; without it, pieces appear as they are decoded.
    with nullcontext() if as_json else _line(prompt) as on_text:
        written = generate(
            module, source.load_tokenizer(), prompt, max_new_tokens, device=device, dtype=dtype, on_text=on_text, **how
        )
    if as_json:
        print_json({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second})
    elif not quiet:
        rate = f"{len(written.tokens)} tokens in {written.seconds:.2f} s, {written.tokens_per_second:.1f} a second"
        echo(f"{rate}, on {written.device}: {written.kernels}, {written.decoder}", err=True)
        if written.kv_cache_bytes is not None or written.attention != "16bit":
            size = f" ({written.kv_cache_bytes:,} bytes of pages)" if written.kv_cache_bytes is not None else ""
            echo(f"attention in {written.attention}, KV cache in {written.kv_cache}{size}", err=True)


@contextmanager
def _line(prompt: str) -> Iterator[Callable[[str], None]]:
    """Prints `prompt` and each new piece of text as it arrives; the line is ended even after an error."""
    begun = False

    def show(piece: str) -> None:
        nonlocal begun
        # The prompt waits for the first piece, so that an error before it leaves no half line.
        echo(piece if begun else prompt + piece, newline=False)
        begun = True

    try:
        yield show
        if not begun:
            show("")
    finally:
        if begun:
            echo("")
