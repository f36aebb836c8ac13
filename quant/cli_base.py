"""What the commands share: how they fail, and the options that most of them take.

An expected error (`ValueError`, `OSError`) is one line on standard error and exit code 2; `--debug` shows the
traceback behind it.
"""

from __future__ import annotations

from typing import Any

import click

QUIET = click.option("--quiet", is_flag=True, help="Print errors only.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


class Command(click.Command):
    """A command whose expected errors end in one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            click.echo(f"error: {message}", err=True)
            ctx.exit(2)


class Toolbox(click.Group):
    """A group of such commands."""

    command_class = Command
