"""The commands `quant generate` and `check-engine` run a model, or a file that was exported from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.cli.base import (
    ATTENTION,
    DEVICE,
    JSON,
    KV_CACHE,
    QUIET,
    REVISION,
    SEED,
    TRUST,
    UNSAFE,
    Command,
    attention_options,
    echo,
    print_json,
)
from quant.cli.terminal.completion import MODELS
from quant.cli.terminal.console import listener, status
from quant.cli.terminal.tables import print_table
from quant.errors import UserError
from quant.models.files import find_checkpoint

if TYPE_CHECKING:
    from quant.engines.check import EngineCheck
    from quant.engines.session import EngineSession


@click.command("generate", cls=Command)
@click.argument("model", shell_complete=MODELS)
@click.option("--prompt", "prompts", required=True, multiple=True, help="Text to continue. Repeatable with --engine.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Maximum number of tokens to add.")
@DEVICE
@click.option("--dtype", help="bfloat16, float16 or float32, for what is not quantized.  [default: the model's]")
@ATTENTION
@KV_CACHE
@click.option(
    "--engine",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run this file, which was exported from the checkpoint MODEL: an ONNX file in onnxruntime, an engine in "
    "TensorRT, or a .pt2 of AOTInductor, which is code and needs --unsafe-load.",
)
@click.option("--temperature", default=0.0, show_default=True, help="With --engine: 0 takes the likeliest token.")
@click.option("--top-k", default=0, show_default=True, help="With --engine: number of tokens to draw among; 0 is all.")
@click.option("--top-p", default=1.0, show_default=True, help="With --engine: draw among tokens of this probability.")
@SEED
@UNSAFE
@TRUST
@REVISION
@QUIET
@JSON
def generate_command(
    model: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    engine: Path | None,
    unsafe_load: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Continue a prompt with MODEL, quantized or not, by greedy decoding, which is repeatable.

    On a GPU our kernels multiply by the quantized weights; on a CPU their PyTorch reference does. With --engine, the
    exported file runs in the place of MODEL: several prompts at once, and sampling, if requested.
    """
    _check_options(engine is not None)
    if engine is not None:
        from quant.engines.open import open_session

        sampling = {name: choices[name] for name in ("temperature", "top_k", "top_p", "seed")}
        with status(f"loading {engine}", quiet or as_json):
            session = open_session(engine, unsafe_load=unsafe_load)
        _run_session(session, model, prompts, max_new_tokens, sampling, quiet=quiet, as_json=as_json)
        return
    if len(prompts) > 1:
        raise UserError(f"{len(prompts)} prompts: MODEL takes one, and an exported file several (--engine)")
    options = {name: choices[name] for name in ("device", "dtype", "attention", "kv_cache")}
    _run_model(model, prompts[0], max_new_tokens, options, quiet=quiet, as_json=as_json)


def _check_options(has_engine: bool) -> None:
    """Raises UserError for options of the other kind of run."""
    context = click.get_current_context()
    foreign = ("device", "dtype", "attention", "kv_cache") if has_engine else ("temperature", "top_k", "top_p", "seed")
    for name in foreign:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            clause = (
                "which is as it was exported" if has_engine else "by greedy decoding; pass --engine FILE to draw tokens"
            )
            runs = "--engine runs a file" if has_engine else "MODEL runs"
            raise UserError(f"--{name.replace('_', '-')}: {runs} {clause}")


def _run_session(
    session: EngineSession,
    model: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    sampling: dict[str, Any],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Continues prompts with an exported file, and prints the texts."""
    from quant.engines.loop import Sampling
    from quant.engines.text import generate_text

    chosen = Sampling(**sampling)
    # Pieces of several texts would be mixed up, so those are printed whole.
    single = len(prompts) == 1 and not as_json
    with _line(prompts[0]) if single else nullcontext() as on_text:
        written = generate_text(
            session, find_checkpoint(model), prompts, max_new_tokens, sampling=chosen, on_text=on_text
        )
    if as_json:
        print_json({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second})
        return
    if not single:
        for prompt, text in zip(prompts, written.texts, strict=True):
            echo(prompt + text)
    if not quiet:
        count = sum(map(len, written.tokens))
        rate = f"{count} tokens in {written.seconds:.2f} s, {written.tokens_per_second:.1f} a second"
        echo(f"{rate}, on {written.backend}", err=True)


def _run_model(
    model: str,
    prompt: str,
    max_new_tokens: int,
    options: dict[str, Any],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Continues a prompt with a model, and prints the text; `options` are keywords of `generate`."""
    from quant.checkpoints.runnable import open_runnable
    from quant.execution.announcements import announce_source
    from quant.runtime.generate import generate

    terminal = listener(quiet or as_json)
    with terminal.step(f"loading {model}"):
        source, module = open_runnable(model)
    announce_source(terminal, source)
    if not source.is_causal_lm:
        raise UserError(f"{model} ({type(module).__name__}) is not a causal language model; it cannot continue text")
    options |= attention_options(source.path, options["attention"], options["kv_cache"])
    # JSON has the text whole; without it, pieces appear as they are decoded.
    with nullcontext() if as_json else _line(prompt) as on_text:
        written = generate(module, source.load_tokenizer(), prompt, max_new_tokens, **options, on_text=on_text)
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


@click.command("check-engine", cls=Command)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--source", required=True, metavar="DIRECTORY", help="Checkpoint that ENGINE was exported from.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens compared in each row."
)
@DEVICE
@UNSAFE
@TRUST
@QUIET
@JSON
def check_engine_command(
    engine: Path, source: str, max_new_tokens: int, device: str, unsafe_load: bool, quiet: bool, as_json: bool
) -> None:
    """Load ENGINE, let it read prompts and decode, and compare its tokens, logits and times with `quant.load`.

    ENGINE is an ONNX file, a directory of `quant export --to onnx`, a .pt2 of AOTInductor, or an engine. An engine
    needs the GPU that it was built for. Without it, everything that its file shows is checked: that it is whole, and of
    this plan, the precision of each layer, and the codes that it holds. A difference ends the command with exit code 2.
    """
    from quant.engines.check import check_engine

    with status(f"checking {engine}", quiet or as_json):
        checked = check_engine(
            engine, find_checkpoint(source), new=max_new_tokens, device=device, unsafe_load=unsafe_load
        )
    if as_json:
        print_json(checked.to_dict())
    elif not quiet:
        _print_check(checked)
    if checked.passed is False:
        raise UserError(f"{engine} does not compute what {source} computes; see the table")


def _print_check(checked: EngineCheck) -> None:
    from quant.engines.check import noise_limits

    rows = list(checked.facts)
    if checked.backend:
        total = checked.steps * len(checked.prompts)
        first = checked.first_difference
        where = "" if first is None else f"; the first other one: row {first[0] + 1}, token {first[1] + 1}"
        rows += [
            ("runs on", f"{checked.backend}, in {checked.dtype}"),
            ("prompts", f"{', '.join(map(str, checked.prompts))} tokens"),
            ("likeliest tokens", f"{checked.agreeing} of {total} the same{where}"),
            ("logits", f"relative difference {checked.error:.1e}, mean KL {checked.kl:.1e} nats"),
        ]
        if checked.noise_kl is not None and checked.noise_agreeing is not None:
            most_kl, least_agreement = noise_limits(checked.noise_kl, checked.noise_agreeing / total)
            # Inputs in few bits turn the last bit of a sum into another code, so the reference is no exact one.
            rows += [
                (
                    "quant.load itself",
                    f"{checked.noise_agreeing} of {total} likeliest tokens the same, mean KL {checked.noise_kl:.1e} "
                    "nats, if inputs of layers move by one rounding",
                ),
                ("limits", f"{least_agreement:.0%} of the tokens the same, mean KL {most_kl:.1e} nats"),
            ]
        for index, part in enumerate(("prefill", "decoding step")):
            engine, reference = checked.engine_ms[index], checked.reference_ms[index]
            timed = "all rows" if index == 0 else "one row"
            rows.append((part, f"{engine:.1f} ms for all rows; quant.load: {reference:.1f} ms for {timed}"))
    rows.append(("result", {True: "passed", False: "failed", None: "not run on this machine"}[checked.passed]))
    print_table({"!check": [name for name, _ in rows], "result": [finding for _, finding in rows]})
