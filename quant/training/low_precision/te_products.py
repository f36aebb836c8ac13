"""Transformer Engine computes the products of a layer, in FP8 on Hopper, in MXFP8 and NVFP4 on Blackwell.

A `te.Linear` multiplies, by the layer's own weight: the layer keeps its class, its parameters and its keys, and no
`_extra_state` comes into a state dict. Transformer Engine scales each weight by itself, whereas other backends scale
weights that a runtime merges by their common largest magnitude where a format has a scale of the whole tensor.

Delayed scaling moves its histories at the end of the outermost `te.autocast`, once for all layers that ran in it. So
the model's forward pass is one such context, which hooks of the model open and close. A layer that is called alone
opens one for itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from quant.base.errors import UserError
from quant.base.extras import require
from quant.formats.format import E4M3, E5M2
from quant.kernels.linear.ops import is_in_backward
from quant.training.low_precision.state import AmaxHistory, LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe

TRANSFORMER_ENGINE = {
    "fp8_delayed": "DelayedScaling",
    "fp8_tensorwise": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Transformer Engine's names of our recipes."""
_TOKENS = 32  # a multiple of which it multiplies in every recipe


class TEProducts:
    """The three products of a linear layer: `[..., in]` to `[..., out]`, with gradients.

    Args:
        recipe: a key of `TRANSFORMER_ENGINE`.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.recipe = recipe
        self._linear: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "_linear": None}  # a copy makes its own

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, state: LowPrecision, whole: torch.Tensor) -> torch.Tensor:
        """Computes the product of a layer in training; the largest magnitude of x is recorded if deployment needs it.

        `x` is `whole`, or this rank's shard of it, which Transformer Engine scales by itself.

        Raises:
            UserError: gradient checkpointing runs a layer with delayed scaling again, whose histories have moved on.
        """
        if self.recipe.history and is_in_backward():
            raise UserError(
                f"{state.name}: gradient checkpointing runs it again, and {self.recipe.name} by Transformer Engine "
                'would take other scales then; use fp8_tensorwise, or backend="emulated"'
            )
        rows = x.reshape(-1, x.shape[-1])
        missing = -len(rows) % _TOKENS
        with context(self.recipe):
            module = self._module(weight, state)
            # Rows of zeros change no sum and no largest magnitude.
            y: torch.Tensor = module(pad(rows, (0, 0, 0, missing)))[: len(rows)] if missing else module(rows)
        if self.recipe.input is not None and self.recipe.input.is_static and not self.recipe.history:
            # Current scaling measures the input in a kernel that keeps its result to itself.
            state.record_input(whole)
        return y.reshape(*x.shape[:-1], -1)

    def _module(self, weight: torch.Tensor, state: LowPrecision) -> Any:
        """Returns Transformer Engine's module, with this weight."""
        if self._linear is None:
            engine = require("transformer_engine.pytorch", "te")
            rows, columns = weight.shape
            self._linear = engine.Linear(columns, rows, bias=False, params_dtype=weight.dtype, device=weight.device)
            if self.recipe.history:
                self._linear.init_fp8_metadata(num_gemms=1)
                for name, history in state.amax.items():
                    state.amax[name] = _EngineHistory(self._linear, name, history)
        # FSDP2 shows the layer another tensor at each pass.
        self._linear._parameters["weight"] = weight
        return self._linear


class _EngineHistory(AmaxHistory):
    """The history of a tensor in Transformer Engine's delayed scaling, which records it.

    Args:
        module: Transformer Engine's.
        name: of the tensor: "x", "w" or "dy".
        history: amax of earlier steps; the module goes on with it.
    """

    def __init__(self, module: Any, name: str, history: AmaxHistory) -> None:
        self._module = module
        self._direction, self._index, self._largest = _POSITIONS[name]
        if not history.is_empty:
            self.values = history.values

    @property
    def values(self) -> torch.Tensor:
        """As `AmaxHistory` has it. The engine has its newest step last, zeros for none, and the step at work first."""
        history = self._state.amax_history[:, self._index]
        recorded = torch.cat([history[1:].flip(0), history[:1]])
        return torch.where(recorded > 0, recorded, -1.0)

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        state = self._state
        values = values.clamp(min=0.0).to(state.amax_history.device)
        state.amax_history[:, self._index] = torch.cat([values[-1:], values[:-1].flip(0)])
        if bool(values.amax() > 0):
            state.scale[self._index] = self._largest / values.amax()

    @property
    def _state(self) -> Any:
        return self._module.fp8_meta[self._direction]


_POSITIONS = {
    "x": ("scaling_fwd", 0, E4M3.max),
    "w": ("scaling_fwd", 1, E4M3.max),
    "dy": ("scaling_bwd", 0, E5M2.max),
}
"""Where Transformer Engine holds the history of a tensor, and the largest number of its format."""


def context(recipe: TrainingRecipe) -> Any:
    """Returns Transformer Engine's context for a recipe; one that does nothing if another is open."""
    manager = require("transformer_engine.pytorch.quantization", "te").FP8GlobalStateManager
    if manager.is_fp8_enabled():
        return nullcontext()
    return require("transformer_engine.pytorch", "te").autocast(enabled=True, recipe=_engines_recipe(recipe.name))


@lru_cache
def _engines_recipe(name: str) -> Any:
    return getattr(require("transformer_engine.common.recipe", "te"), TRANSFORMER_ENGINE[name])()


class ForwardContext:
    """Hooks that run a model's forward pass, in training, in one context of Transformer Engine."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.recipe = recipe
        self._open: list[Any] = []

    def start(self, model: nn.Module) -> None:
        """Hooks the model."""
        model.register_forward_pre_hook(self._enter)
        # The pass may end by an error, after which the context must not stay open.
        model.register_forward_hook(self._leave, always_call=True)

    @staticmethod
    def end(model: nn.Module) -> None:
        """Undoes `start`, also for a copy of the model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ForwardContext):
                    del hooks[key]
                    model._forward_hooks_always_called.pop(key, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, model: nn.Module, args: Any) -> None:
        if model.training:
            self._open.append(context(self.recipe))
            self._open[-1].__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
