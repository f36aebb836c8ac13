"""The shell completes formats, solvers and files: `eval "$(_QUANTIZE_COMPLETE=bash_source quantize)"`.

click asks these functions while a user types, so nothing here imports torch. A list of several names, such as
`--format nvfp4,fp8`, is completed at its last one, by names that may follow.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from quant.formats.format import FORMATS
from quant.recipes.gpus import GENERATIONS, GPUS
from quant.recipes.recipe import presets
from quant.recipes.solver_names import METHODS, parse_solver
from quant.recipes.solver_names import OBSERVERS as _OBSERVERS
from quant.recipes.targets import TARGETS

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _one_of(
    names: Callable[[], Iterable[str]], *, between: str = "", allowed: Callable[[str], bool] = bool, files: bool = False
) -> Complete:
    """Returns the completion of an option that takes a name, or several with a sign `between`, or a file too."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, sign, last = incomplete.rpartition(between) if between else ("", "", incomplete)
        values = [f"{head}{sign}{name}" for name in names() if name.startswith(last)]
        items = [CompletionItem(value) for value in values if allowed(value)]
        # The shell itself lists the files that begin with the text.
        return [*items, CompletionItem(incomplete, type="file")] if files else items

    return complete


def _is_solver(name: str) -> bool:
    with suppress(ValueError):
        return bool(parse_solver(name))
    return False


PRESET_LIST = _one_of(
    presets, between=",", allowed=lambda value: len(value.split(",")) == len({*value.split(",")}), files=True
)
FORMAT_NAMES = _one_of(lambda: (*FORMATS, "16bit"))
SOLVERS = _one_of(lambda: METHODS, between="+", allowed=_is_solver)
OBSERVERS = _one_of(lambda: _OBSERVERS)
TARGET_NAMES = _one_of(lambda: (*TARGETS, *GPUS, *GENERATIONS, "local"), files=True)
SOURCES = _one_of(lambda: ("mix", "self"), files=True)
MODELS = _one_of(lambda: ("smollm2-135m",), files=True)
