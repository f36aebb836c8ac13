"""Each layer in low-precision training has a `LowPrecision`: its recipe, and the largest magnitudes of recent steps.

The histories serve two purposes. Delayed scaling rounds a tensor by the largest magnitude of earlier steps, so that it
need not be read twice. And a deployed layer with a static input scale takes that scale from the inputs of training,
which makes calibration unnecessary.

A Trainer of transformers keeps them in `trainer_state.json`, as it does with the states of its callbacks: a compressed
safetensors file in base64, which it reads from whichever folder it resumes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from quant.base.errors import UserError
from quant.base.extras import require
from quant.kernels.linear.ops import is_in_backward
from quant.kernels.training.weight_rounding import group_amax
from quant.training.low_precision.training_recipe import TrainingRecipe

INPUT_HISTORY = 1024
"""Training steps whose largest input magnitude becomes the static input scale of the deployed layer."""


class AmaxHistory:
    """The largest magnitudes of a tensor in the last steps.

    Args:
        steps: how many steps are remembered.

    Attributes:
        values: float32 `[steps]`, newest first; -1 where no step has been recorded.
    """

    def __init__(self, steps: int) -> None:
        self.values = torch.full((steps,), -1.0, dtype=torch.float32)

    def record(self, amax: torch.Tensor) -> None:
        """Takes in the largest magnitude of a step; NaN and infinity count as zero, or they would stay for good."""
        amax = torch.nan_to_num(amax.detach().float(), 0.0, 0.0).reshape(1)
        # A new tensor and no index that moves: torch.compile would record a graph for each value of a Python number.
        self.values = torch.cat([amax, self.values.to(amax.device)[:-1]])

    def largest(self, otherwise: torch.Tensor) -> torch.Tensor:
        """Returns the largest remembered magnitude, float32 scalar, or `otherwise` before the first step."""
        amax = self.values.to(otherwise.device).amax()
        return torch.where(amax < 0, otherwise.float(), amax)

    @property
    def is_empty(self) -> bool:
        """Whether no step has been recorded."""
        return bool(self.values[0] < 0)


@dataclass(eq=False)
class LowPrecision:
    """Everything that a layer in low-precision training has in addition to its parameters.

    Attributes:
        name: of the layer in its model, for messages.
        recipe: how products are rounded.
        group: the layers that a runtime merges with this one, itself included: they share the scale of a whole weight.
        merges: whether native products compute the group as one.
        siblings: the same layer of every expert of a mixture that is a list of modules. A router may send an expert
            no token in training; its input is then scaled as theirs.
        rounds_forward: whether the forward product is rounded; a recipe's schedule turns it off in the end.
        amax: histories of x, w and dy, by those names. Only histories that the recipe or the deployed layer needs grow.
        weight_dtype: dtype of the weight in the last forward pass. FSDP2 with `param_dtype=bfloat16` shows the layer a
            rounded copy of the parameter, and the deployed codes must come from that copy.
        largest_input, largest_gradient: scalars, the largest magnitude of x and dy, or of their scales, in the passes
            since the last step of an optimizer: NaN or infinity if one of their numbers was; None where nobody looked.
        products: of another backend in place of the emulated ones: x, weight, this object, and x of all ranks, to y.
        deployed: the deployed layer for evaluation, with the tensors that it was made from; see `deployed_layer`.
    """

    name: str
    recipe: TrainingRecipe
    group: Sequence[Any] = ()  # LowPrecisionLinear
    merges: bool = True
    siblings: Sequence[Any] = ()
    rounds_forward: bool = True
    amax: dict[str, AmaxHistory] = field(default_factory=dict)
    weight_dtype: torch.dtype | None = None
    largest_input: torch.Tensor | None = None
    largest_gradient: torch.Tensor | None = None
    products: Callable[[torch.Tensor, torch.Tensor, LowPrecision, torch.Tensor], torch.Tensor] | None = None
    deployed: Any = None

    def __post_init__(self) -> None:
        steps = self.recipe.history or INPUT_HISTORY
        self.amax = {name: AmaxHistory(steps) for name in ("x", "w", "dy")}
        self._scaled_by: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    def __getstate__(self) -> dict[str, Any]:
        # The deployed layer is made again when it is needed; its weight is not ours to copy or write.
        return {**vars(self), "deployed": None, "largest_input": None, "largest_gradient": None}

    def scaled_by(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the largest magnitudes that x `[..., in]` and the weight are scaled by in this forward pass.

        None where a format has no scale of a whole tensor. The histories take in this step's magnitudes, except while
        gradient checkpointing runs the forward pass again: that must round as the first run did.
        """
        recipe = self.recipe
        # The histories have moved on since the first run, whose scales must come out again.
        if recipe.history and is_in_backward():
            return self._scaled_by
        of_x = of_w = None
        if recipe.input is not None and recipe.input.is_static:
            current = _largest_magnitude(x.detach()).float()
            # Of earlier steps, before this one is recorded.
            of_x = self.amax["x"].largest(current) if recipe.history else current
            self.record_input(current)
        if recipe.weight is not None and recipe.weight.is_static:
            of_w = self.weight_amax()
            if recipe.history:
                current, of_w = of_w, self.amax["w"].largest(of_w)
                self.amax["w"].record(current)
        if recipe.history:
            self._scaled_by = of_x, of_w
        return of_x, of_w

    def record_input(self, x: torch.Tensor) -> None:
        """Takes in the largest magnitude of an input, except while gradient checkpointing runs the forward again."""
        if not is_in_backward():
            self.amax["x"].record(_largest_magnitude(x.detach()))

    def weight_amax(self) -> torch.Tensor:
        """Returns the largest magnitude of the weights of the group, float32 scalar."""
        device = self.group[0].weight.device
        return group_amax([each.weight.detach().to(device) for each in self.group])

    def recorded_inputs(self) -> list[torch.Tensor]:
        """Returns the largest recorded input of each layer that shares the deployed input scale; of siblings if none.

        Merged layers read one input, but one of them may have been skipped in the last steps.
        """
        for layers in (self.group, self.siblings):
            histories = [layer.low_precision.amax["x"] for layer in layers]
            if recorded := [history.values.amax() for history in histories if not history.is_empty]:
                return recorded
        return []

    def note_weight(self, weight: torch.Tensor) -> None:
        """Notes the dtype that a weight trains in, and drops the layer deployed from earlier values."""
        self.deployed, self.weight_dtype = None, weight.dtype

    def note_input(self, x: torch.Tensor) -> None:
        """Notes whether x, or the scales of its blocks, are finite; compiled graphs leave no note.

        Nothing is read here, where it would stop the GPU at each layer: an optimizer's step reads all layers' together.
        """
        if not torch.compiler.is_compiling():
            self.largest_input = _larger(self.largest_input, x)

    def note_gradient(self, dy: torch.Tensor) -> None:
        """Notes whether dy, or the scales of its blocks, are finite, as `note_input` does.

        Raises:
            UserError: the backward pass is recorded for another one, for which rounded products have no gradients.
        """
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise UserError(
                    f"{self.name}: create_graph=True asks for gradients of gradients, which products in "
                    f"{self.recipe.name} do not have; train without it, or give the layer to exclude="
                )
            self.largest_gradient = _larger(self.largest_gradient, dy)

    def forget_notes(self) -> None:
        """Begins to take notes anew, after an optimizer's step."""
        self.largest_input = self.largest_gradient = None

    def gradient_scaled_by(self, dy: torch.Tensor) -> torch.Tensor | None:
        """Returns the largest magnitude that a recipe with a history scales dy by; records this step's."""
        if not self.recipe.history:
            return None
        current = dy.abs().amax().float()
        earlier = self.amax["dy"].largest(current)
        self.amax["dy"].record(current)
        return earlier


def _larger(earlier: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude so far; NaN stays, so that a middle micro-batch counts as the last does."""
    # Asking for finite numbers takes five kernels.
    largest = _largest_magnitude(x.detach())
    return largest if earlier is None else torch.maximum(largest, earlier.to(largest.device))


def _largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of a tensor, over all shards of a DTensor, by one kernel that reads it once."""
    return _of_all_ranks(torch.linalg.vector_norm(x, torch.inf))


def _of_all_ranks(amax: Any) -> torch.Tensor:
    """Returns the largest magnitude over all shards of a DTensor; for another tensor its own."""
    return amax.full_tensor() if hasattr(amax, "full_tensor") else amax  # type: ignore[no-any-return]


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, torch.Tensor]: ...
    def load_state_dict(self, state: dict[str, torch.Tensor], /) -> None: ...


def trainer_callback(report: _Stateful) -> Any:
    """Returns a callback by which a Trainer saves a report's state, and loads it when it resumes or takes the best."""
    callbacks = require("transformers.trainer_callback", "hf")
    from safetensors.torch import load, save

    class LowPrecisionHistories(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc, name-defined]
        def state(self) -> dict[str, Any]:
            compressed = zlib.compress(save(report.state_dict()), level=1)
            return {"args": {}, "attributes": {"histories": base64.b64encode(compressed).decode()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not state.global_step:
                return
            if saved is None:
                raise UserError(
                    f"the checkpoint of step {state.global_step} has no histories of low-precision training: it was "
                    "saved without report.trainer_callback(); leave the callback out, and histories begin anew"
                )
            self.load(state.global_step, saved)

        def on_train_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            # By now the Trainer has loaded the best weights, which were evaluated with the histories of their step.
            if not args.load_best_model_at_end or state.best_model_checkpoint is None:
                return
            file = Path(state.best_model_checkpoint) / "trainer_state.json"
            best = type(state).load_from_json(str(file)) if file.is_file() else None
            if best is not None and type(self).__name__ in best.stateful_callbacks:
                self.load(best.global_step, best.stateful_callbacks[type(self).__name__])

        def load(self, step: int, saved: Any) -> None:
            # A callback that a Trainer was given twice has a list, of one state twice.
            states = saved if isinstance(saved, list) else [saved]
            histories = {state["attributes"]["histories"] for state in states}
            if len(histories) > 1:
                raise UserError(
                    f"the checkpoint of step {step} has low-precision histories of {len(histories)} "
                    "reports: a Trainer trains one model, and takes report.trainer_callback() of that model's report"
                )
            report.load_state_dict(load(zlib.decompress(base64.b64decode(histories.pop()))))

    return LowPrecisionHistories()
