"""The command line has two programs: `quantize` does the main job, and `quant` is the toolbox with all commands.

Commands parse their options, call one public function and print its result. The toolbox knows its commands by name and
summary only, and imports the file of a command when that command runs. Commands that need torch, which takes seconds to
import, import it in their body, so that no `--help` waits for it.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from quant import __version__

COMMANDS = {
    "quantize": ("quant.cli.quantize:quantize_command", "Quantize a model and write a checkpoint."),
    "plan": ("quant.cli.plan_command:plan_group", "Make, show, compare, edit and check plan files."),
    "sensitivity": ("quant.cli.sensitivity_command:sensitivity_command", "Score what each layer loses in each format."),
    "distill": ("quant.cli.distill_command:distill_command", "Train a quantized checkpoint by distillation."),
    "inspect": ("quant.cli.inspect_command:inspect_command", "List the layers of a quantized checkpoint."),
    "report": ("quant.cli.inspect_command:report_command", "Write the HTML report of a checkpoint again."),
    "evaluate": ("quant.cli.evaluate_command:evaluate_command", "Measure perplexity, and KL to a baseline."),
    "generate": ("quant.cli.generate_command:generate_command", "Continue a prompt."),
    "export": ("quant.cli.export_command:export_command", "Export to ONNX, TensorRT, AOTInductor or another layout."),
    "check": ("quant.cli.check_command:check_command", "Check a checkpoint, or a file that was exported from one."),
    "bench": ("quant.cli.doctor_command:bench_command", "Time the quantized matmuls of a model on this GPU."),
    "tune": ("quant.cli.doctor_command:tune_command", "Find and keep the fastest kernel launches for a model."),
    "formats": ("quant.cli.inspect_command:formats_command", "List presets and number formats."),
    "solvers": ("quant.cli.inspect_command:solvers_command", "List the solvers, with what each needs and costs."),
    "doctor": (
        "quant.cli.doctor_command:doctor_command",
        "Show what this machine has: torch, GPUs, optional packages.",
    ),
}
"""Every command of the toolbox: where it is defined, and its summary."""


class LazyGroup(click.Group):
    """A group that imports a command when it is run: the pattern "lazily loading subcommands" of click's manual."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        # click would sort by name; the table is in the order of a user's work.
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            from quant.base import old_names
            from quant.base.errors import did_you_mean

            if new := old_names.COMMANDS.get(cmd_name):
                click.echo(f"error: quant {cmd_name} is `quant {new}` since 0.3; options are the same", err=True)
                ctx.exit(2)
            if not ctx.resilient_parsing and (meant := did_you_mean(cmd_name, self.lazy)):
                ctx.fail(f"No such command {cmd_name!r}{meant}")
            return None
        module, _, name = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        # The table repeats names, and this notices when the two disagree.
        assert isinstance(command, click.Command) and command.name == cmd_name
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click itself would import every command for its summary.
        names = [name for name in self.lazy if name.startswith(incomplete)]
        return [CompletionItem(n, help=self.lazy[n][1]) for n in names] or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.lazy.items()])


@click.group("quant", cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """The Blockscale toolbox."""
