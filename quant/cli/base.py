"""What the commands share: how they fail, and the options that most of them take.

An expected error (`ValueError`, `OSError`, no memory) is one line on standard error and exit code 2; `--debug` shows
the traceback behind it. A warning of ours is one line, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

QUIET = click.option("--quiet", is_flag=True, help="Print errors only.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
ATTENTION = click.option(
    "--attention", metavar="FORMAT", help="What attention's operands are in: fp8 or 16bit; by default as the plan says."
)
KV_CACHE = click.option(
    "--kv-cache", metavar="FORMAT", help="Format of the KV cache: fp8, nvfp4 or 16bit; by default as the plan says."
)


def attention_options(model: str, attention: str | None, kv_cache: str | None) -> dict[str, str | None]:
    """Both options, each where it was not given as the plan of the checkpoint `model` has it, if there is one."""
    file = Path(model) / "plan.json"
    if file.is_file() and None in (attention, kv_cache):
        from quant.recipes.plan import Plan

        planned = Plan.load(file).run_time
        attention, kv_cache = attention or planned["attention"], kv_cache or planned["kv_cache"]
    return {"attention": attention, "kv_cache": kv_cache}


class Command(click.Command):
    """A command whose expected errors end in one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            with _warnings_in_one_line(quiet=bool(ctx.params.get("quiet"))):
                return super().invoke(ctx)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            memory = _is_out_of_memory(error)
            if ctx.params.get("debug") or (isinstance(error, RuntimeError) and not memory):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            if memory:
                message = f"out of memory: {message}; nothing was written. It takes a machine with more, or fewer rows"
            click.echo(f"error: {message}", err=True)
            ctx.exit(2)


@contextmanager
def _warnings_in_one_line(*, quiet: bool) -> Iterator[None]:
    """Warnings of this package without file and line, which say nothing to users; others as Python has them."""
    ours = str(Path(__file__).parents[1])
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
            if not filename.startswith(ours):
                usual(message, category, filename, *rest, **more)
            elif not quiet:
                click.echo(f"warning: {message}", err=True)

        warnings.showwarning = show
        yield


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch, on a CPU or a GPU, found no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )


class Toolbox(click.Group):
    """A group of such commands."""

    command_class = Command
