"""`in_own_modes` keeps the modes of a caller's thread out of functions that read, measure or write a model."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_own_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs `function` outside its caller's `torch.autocast` and `torch.inference_mode`.

    Autocast would round the products of a solver, and no tensor made in inference mode can take part in training. A
    model that was itself made in that mode works in no other.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with ExitStack() as modes:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    modes.enter_context(torch.autocast(device, enabled=False))
            models = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
            parameters = (parameter for model in models for parameter in model.parameters() if not is_lazy(parameter))
            inference = any(parameter.is_inference() for parameter in parameters)
            if torch.is_inference_mode_enabled() != inference:
                modes.enter_context(torch.no_grad())  # which inference mode implies
                modes.enter_context(torch.inference_mode(inference))
            return function(*args, **kwargs)

    return run
