"""The shell completes formats, solvers and files: `eval "$(_QUANTIZE_COMPLETE=bash_source quantize)"`.

click asks these functions while a user types, so nothing here imports torch. A list of several names, such as
`--formats nvfp4,fp8`, is completed at its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from quant.formats.format import FORMATS
from quant.recipes.recipe import presets
from quant.recipes.solver_names import METHODS
from quant.recipes.solver_names import OBSERVERS as _OBSERVERS
from quant.recipes.targets import TARGETS

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _one_of(names: Callable[[], Iterable[str]], *, separator: str = "", files: bool = False) -> Complete:
    """Returns the completion of an option that takes a name.

    Args:
        names: a function that gives the names.
        separator: the sign between the names of a list; empty for a single name.
        files: whether the option takes a file too.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, sign, last = incomplete.rpartition(separator) if separator else ("", "", incomplete)
        items = [CompletionItem(f"{head}{sign}{name}") for name in names() if name.startswith(last)]
        # The shell itself lists the files that begin with the text.
        return [*items, CompletionItem(incomplete, type="file")] if files else items

    return complete


PRESETS = _one_of(presets)
PRESET_LIST = _one_of(presets, separator=",")
FORMAT_NAMES = _one_of(lambda: (*FORMATS, "16bit"))
SOLVERS = _one_of(lambda: METHODS, separator="+")
OBSERVERS = _one_of(lambda: _OBSERVERS)
RUNTIMES = _one_of(lambda: TARGETS, files=True)
SOURCES = _one_of(lambda: ("mix", "self"), files=True)
MODELS = _one_of(lambda: ("smollm2-135m",), files=True)
