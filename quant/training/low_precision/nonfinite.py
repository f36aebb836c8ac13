"""A `GradientWatch` looks at gradients before an optimizer's step, and stops training or skips the step.

Low precision makes NaN and infinity likelier, and one step with them loses a model. The weight gradients of converted
layers are read together, once a step, wherever they came from: eager or compiled passes, DDP, FSDP2. A loss scaler that
finds infinity itself calls no step, and nothing is done here.

The layer that is named is the one nearest to the loss among those whose own output gradient was not finite, for that is
where the backward pass came through first. Clipping spreads NaN to every gradient, so gradients alone would not tell.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quant.errors import UserError
from quant.training.low_precision.experts import LowPrecisionStack, trained_layers
from quant.training.low_precision.linear import LowPrecisionLinear

ACTIONS = ("stop", "skip")


class GradientWatch:
    """Watches the gradients of one model's layers in low-precision training.

    Args:
        action: one of `ACTIONS`.

    Raises:
        UserError: another action.
    """

    _watches: ClassVar[weakref.WeakKeyDictionary[nn.Module, GradientWatch]] = weakref.WeakKeyDictionary()
    _hook: ClassVar[Any] = None

    def __init__(self, action: str) -> None:
        if action not in ACTIONS:
            raise UserError(f"on_nonfinite={action!r}: unknown; known: {', '.join(ACTIONS)}")
        self.action = action

    def start(self, model: nn.Module) -> None:
        """Looks at the gradients of `model` before every step of any optimizer that trains it."""
        self._watches[model] = self
        # One hook for all models and optimizers: nothing leads from a parameter to the optimizers that hold it.
        if GradientWatch._hook is None:
            GradientWatch._hook = register_optimizer_step_pre_hook(_before_step)

    @classmethod
    def end(cls, model: nn.Module) -> None:
        """Undoes `start`."""
        cls._watches.pop(model, None)
        if not cls._watches and cls._hook is not None:
            cls._hook.remove()
            cls._hook = None

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Stops or skips where gradients of `optimizer` for layers of `model` are not finite.

        Raises:
            UserError: they are not, and the action is "stop".
        """
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        identities = {id(parameter) for parameter in held}
        layers = {
            name: layer
            for name, layer in trained_layers(model).items()
            if id(_parameter(layer)) in identities and _parameter(layer).grad is not None
        }
        name = _layer_without_finite_gradient(layers)
        if name is None:
            return
        line = f"{name}: its gradient holds NaN or infinity in {layers[name].low_precision.recipe.name}"
        if self.action == "stop":
            raise UserError(
                f"{line}; no weight was changed. Lower the learning rate or keep the layer in 16 bit with exclude=, or "
                'leave such steps out with on_nonfinite="skip"'
            )
        warnings.warn(f"{line}; this step is skipped", stacklevel=4)
        for parameter in held:  # an optimizer passes over parameters without a gradient
            parameter.grad = None


def _parameter(layer: LowPrecisionLinear | LowPrecisionStack) -> nn.Parameter:
    parameter: Any = layer.held if isinstance(layer, LowPrecisionStack) else layer.weight
    return parameter  # type: ignore[no-any-return]


def _layer_without_finite_gradient(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> str | None:
    """The layer at which NaN or infinity came into the gradients; None where all are finite."""
    if not layers:
        return None
    # The largest magnitude of a gradient is finite if and only if its numbers are. One read serves all layers.
    norms = [_norm(_parameter(layer).grad) for layer in layers.values()]
    total = torch.stack([norm.to(norms[0].device) for norm in norms])
    if bool(total.isfinite().all()):
        return None
    names = [name for name, norm in zip(layers, norms, strict=True) if not bool(norm.isfinite())]
    # Layers of a compiled graph leave no flag; then the gradients have to do.
    origins = [
        name for name in names
        if (flag := layers[name].low_precision.gradient_is_finite) is not None and not bool(flag)
    ]  # fmt: skip
    return (origins or names)[-1]


def _norm(gradient: Any) -> torch.Tensor:
    norm: Any = torch.linalg.vector_norm(gradient, torch.inf)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for model, watch in list(GradientWatch._watches.items()):
        watch.check(model, optimizer)
