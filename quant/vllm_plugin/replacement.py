"""Our function takes the place of vLLM's, after a look at whether vLLM still calls it as we know it."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any


def replace_function(
    owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]], *, in_importers: bool = False
) -> None:
    """Puts `wrap(theirs)` in the place of a function of the module or class `owner`, once however often it is called.

    With `in_importers`, modules of vLLM that imported the function by name get ours too. TypeError, and nothing is
    replaced, unless ours can be called in every way in which theirs can: a release may begin to name its arguments.
    """
    theirs = getattr(owner, name)
    if getattr(theirs, "is_blockscale", False):
        return
    ours: Any = wrap(theirs)
    _check_calls(theirs, ours)
    ours = wraps(theirs)(ours)
    ours.is_blockscale = True
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    if in_importers:
        for module_name, module in list(sys.modules.items()):
            # `vars`, because `getattr` would import what a lazy module has not loaded.
            if module_name.startswith("vllm.") and vars(module).get(name) is theirs:
                setattr(module, name, ours)
    setattr(owner, name, staticmethod(ours) if is_static else ours)


def _check_calls(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    parameters = inspect.signature(theirs).parameters.values()
    by_place = [None for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    only_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    only_by_place = by_place[: len(by_place) + len(only_by_name) - len(by_name)]
    try:
        inspect.signature(ours).bind(*by_place, **dict.fromkeys(only_by_name))
        inspect.signature(ours).bind(*only_by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise TypeError(f"{theirs.__qualname__} of this vLLM cannot be replaced: {error}") from None


def check_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raises TypeError unless the function's first arguments have these names."""
    if (has := tuple(inspect.signature(function).parameters)[: len(names)]) != names:
        raise TypeError(f"{function.__qualname__} takes {', '.join(has)} instead of {', '.join(names)}")


def check_has_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raises TypeError unless the function has arguments of these names."""
    parameters = inspect.signature(function).parameters
    if missing := [name for name in names if name not in parameters]:
        raise TypeError(f"{function.__name__} takes no {missing[0]}")


def check_classes(*classes: type) -> None:
    """Raises TypeError where a class leaves a method abstract, or takes other arguments than vLLM's base class."""
    for cls in classes:
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise TypeError(f"{cls.__name__}.{missing[0]} is missing")
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("vllm."):
                continue
            for name, theirs in inspect.getmembers(base, inspect.isfunction):
                mine = inspect.getattr_static(cls, name)
                mine = getattr(mine, "__func__", mine)
                if name.startswith("__") or not inspect.isfunction(mine) or mine.__module__.startswith("vllm."):
                    continue
                parameters = inspect.signature(theirs).parameters.values()
                if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                    continue  # the base class hands on whatever it is called with
                positional = [None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
                named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
                try:
                    inspect.signature(mine).bind(*positional, **named)
                except TypeError as error:
                    raise TypeError(f"{cls.__name__}.{name}: {error}") from None
