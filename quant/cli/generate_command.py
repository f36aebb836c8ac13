"""The command `quant generate` continues a prompt with a model, or with a file that was exported from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.base.errors import UserError
from quant.cli import command as cli
from quant.cli.completion import MODELS
from quant.cli.console import listener, status
from quant.models.files import find_checkpoint, is_export

if TYPE_CHECKING:
    from quant.export.onnx.engine_session import EngineSession


_OF_MODELS, _OF_ENGINES = ("device", "dtype", "attention", "kv_cache"), ("temperature", "top_k", "top_p", "seed")


@click.command("generate", cls=cli.Command)
@click.argument("model", shell_complete=MODELS)
@click.option("--prompt", "prompts", required=True, multiple=True, help="Text to continue. Repeatable with --engine.")
@click.option("--max-new-tokens", default=64, help="Maximum number of tokens to add.")
@cli.DEVICE
@click.option("--dtype", help="bfloat16, float16 or float32, for what is not quantized.  [default: the model's]")
@cli.ATTENTION
@cli.KV_CACHE
@click.option("--engine", type=cli.PATH, metavar="FILE", help="Run this file, which was exported "
              "from the checkpoint MODEL: an ONNX file in onnxruntime, an engine in TensorRT, or a .pt2 of "
              "AOTInductor, which is code and needs --trust-remote-code.")  # fmt: skip
@click.option("--temperature", default=0.0, help="With --engine: 0 takes the likeliest token.")
@click.option("--top-k", default=0, help="With --engine: number of tokens to draw among; 0 is all.")
@click.option("--top-p", default=1.0, help="With --engine: draw among tokens of this probability.")
@cli.SEED
@cli.TRUST_CODE
@cli.REVISION
@cli.QUIET
@cli.JSON
def generate_command(
    model: str, prompts: Sequence[str], engine: Path | None, unsafe_load: bool, quiet: bool, as_json: bool, **given: Any
) -> None:
    """Continue a prompt with MODEL, quantized or not, by greedy decoding, which is repeatable.

    On a GPU our kernels multiply by the quantized weights; on a CPU their PyTorch reference does. With --engine, the
    exported file runs in the place of MODEL: several prompts at once, and sampling, if requested. An ONNX file runs on
    a GPU if onnxruntime has its CUDA provider (onnxruntime-gpu).
    """
    prompts = tuple(map(_decoded, prompts))
    in_onnxruntime = engine is not None and (engine.is_dir() or engine.suffix == ".onnx")
    context = click.get_current_context()
    for name in _OF_MODELS[in_onnxruntime:] if engine is not None else _OF_ENGINES:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            why = "--engine runs a file which is as it was exported; leave it out"
            if engine is None:
                why = "MODEL runs by greedy decoding; pass --engine FILE to draw tokens"
            raise UserError(f"--{name.replace('_', '-')}: {why}")
    if engine is not None:
        from quant.export.engines.check_engine import open_session

        with status(f"loading {engine}", quiet or as_json):
            session = open_session(engine, unsafe_load=unsafe_load, device=given["device"])
        _run_session(session, model, prompts, given, quiet=quiet, as_json=as_json)
        return
    if is_export(Path(model)):
        raise UserError(f"{model} is an export; name the checkpoint it was made from, and it with --engine {model}")
    if len(prompts) > 1:
        raise UserError(f"{len(prompts)} prompts: MODEL takes one, and an exported file several (--engine)")
    options = {name: given[name] for name in ("max_new_tokens", *_OF_MODELS)}
    _run_model(model, prompts[0], options, unsafe_load=unsafe_load, quiet=quiet, as_json=as_json)


def _decoded(prompt: str) -> str:
    """Returns a prompt as UTF-8, which Python keeps as bytes where the locale is another; UserError for other bytes."""
    try:
        return prompt if prompt.isascii() else prompt.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt {prompt!r}: not UTF-8 ({error.reason}); write it in UTF-8") from None


def _run_session(
    session: EngineSession, model: str, prompts: Sequence[str], choices: dict[str, Any], *, quiet: bool, as_json: bool
) -> None:
    from quant.export.engines.check_engine import Sampling, generate_text

    chosen, new = Sampling(**{name: choices[name] for name in _OF_ENGINES}), choices["max_new_tokens"]
    # Pieces of several texts would be mixed up, so those are printed whole.
    single = len(prompts) == 1 and not as_json
    with _line(prompts[0]) if single else nullcontext() as on_text:
        written = generate_text(session, find_checkpoint(model), prompts, new, sampling=chosen, on_text=on_text)
    if as_json:
        cli.print_json({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second})
        return
    if not single:
        for prompt, text in zip(prompts, written.texts, strict=True):
            cli.echo(prompt + text)
    if not quiet:
        count = sum(map(len, written.tokens))
        rate = f"{count} tokens in {written.seconds:.2f} s, {written.tokens_per_second:.1f} a second"
        cli.echo(f"{rate}, on {written.backend}", err=True)


def _run_model(
    model: str, prompt: str, options: dict[str, Any], *, unsafe_load: bool, quiet: bool, as_json: bool
) -> None:
    """Continues a prompt with a model, and prints the text; `options` are keywords of `generate`."""
    from quant.export.checkpoint.load import open_runnable
    from quant.generate.generate import generate
    from quant.run.job import announce_source

    terminal = listener(quiet or as_json)
    with terminal.step(f"loading {model}"):
        source, module = open_runnable(model, unsafe_load=unsafe_load, has_factory=False)
    announce_source(terminal, source)
    if not source.is_causal_lm:
        raise UserError(f"{model} ({type(module).__name__}) is not a causal language model; it cannot continue text")
    options |= cli.attention_options(source.path, options["attention"], options["kv_cache"])
    # JSON has the text whole; without it, pieces appear as they are decoded.
    with nullcontext() if as_json else _line(prompt) as on_text:
        written = generate(module, source.load_tokenizer(), prompt, **options, on_text=on_text)
    if as_json:
        cli.print_json({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second})
    elif not quiet:
        rate = f"{len(written.tokens)} tokens in {written.seconds:.2f} s, {written.tokens_per_second:.1f} a second"
        cli.echo(f"{rate}, on {written.device}: {written.kernels}, {written.decoder}", err=True)
        if written.kv_cache_bytes is not None or written.attention != "16bit":
            size = f" ({written.kv_cache_bytes:,} bytes of pages)" if written.kv_cache_bytes is not None else ""
            cli.echo(f"attention in {written.attention}, KV cache in {written.kv_cache}{size}", err=True)


@contextmanager
def _line(prompt: str) -> Iterator[Callable[[str], None]]:
    """Prints `prompt` and each new piece of text as it arrives; the line is ended even after an error."""
    begun = False

    def show(piece: str) -> None:
        nonlocal begun
        # The prompt waits for the first piece: no error before it leaves half a line, nor does Ctrl-C within `echo`.
        text, begun = piece if begun else prompt + piece, True
        cli.echo(text, newline=False)

    try:
        yield show
        if not begun:
            show("")
    finally:
        if begun:
            cli.echo("")
