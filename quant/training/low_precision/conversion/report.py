"""`LowPrecisionTraining` reports what low-precision training changed, and keeps its state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted
from quant.training.low_precision.fused_experts_training import trained_layers
from quant.training.low_precision.nonfinite import GradientWatch, nonfinite_line
from quant.training.low_precision.training_recipe import TrainingRecipe
from quant.training.low_precision.state import LowPrecision, trainer_callback

_RECIPE = "recipe"  # key of the name in a report's state


@dataclass(frozen=True, eq=False)
class LowPrecisionTraining:
    """The changes that `to_low_precision_training` made.

    Attributes:
        recipe: that the layers follow.
        backend: that computes the products: "emulated", "native", "torchao" or "te".
        note: how this machine runs the recipe, for the log.
        converted: names of the layers whose products are rounded.
        in_16bit: layers that stay as they were, with the reason, by name.
        model: that was converted.
        attention: how attention is computed; None where it was left as it was.
        too_small: converted layers that are too small to gain time, with the sizes of their weights.
    """

    recipe: TrainingRecipe
    backend: str
    note: str
    converted: tuple[str, ...]
    in_16bit: Mapping[str, str]
    model: nn.Module
    attention: str | None = None
    too_small: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def at(self, share: float) -> None:
        """Says how far training is, as a share of all steps; the recipe's schedule may end the forward's rounding.

        Raises:
            UserError: the share is not between 0 and 1, as the number of a step is not.
        """
        if not 0 <= share <= 1:
            raise UserError(f"report.at({share!r}): the share of training that is done is from 0 to 1: step / steps")
        begin = self.recipe.schedule.bf16_forward_from
        for state in self._states().values():
            state.rounds_forward = share < begin or begin == 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the histories of largest magnitudes for a checkpoint; the model's own keys stay as in plain layers.

        And the recipe's name in bytes, for plain weights show none.
        """
        name_of_recipe = torch.tensor(list(self.recipe.name.encode()), dtype=torch.uint8)
        return {_RECIPE: name_of_recipe} | {
            f"{name}.amax.{operand}": history.values.clone()
            for name, state in self._states().items()
            for operand, history in state.amax.items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on with the histories of a checkpoint.

        Raises:
            UserError: they are of other layers or of another recipe.
        """
        saved = state.get(_RECIPE)
        name_of_recipe = self.recipe.name if saved is None else bytes(saved.tolist()).decode(errors="replace")
        if name_of_recipe != self.recipe.name:
            raise UserError(
                f"the checkpoint was trained in {name_of_recipe}, and this model trains in {self.recipe.name}: convert "
                f'it with quant.to_low_precision_training(model, "{name_of_recipe}"), or leave out the state of the '
                "report to go on in another recipe"
            )
        state = {name: values for name, values in state.items() if name != _RECIPE}
        own = {name: values for name, values in self.state_dict().items() if name != _RECIPE}
        if differing := sorted(own.keys() ^ state.keys()):
            raise UserError(
                f"{differing[0]}: the histories and the model disagree on the layers that train in low precision "
                f"({counted(len(differing), 'difference')}); convert the model as it was when they were saved"
            )
        for name, values in state.items():
            if values.shape != own[name].shape:
                raise UserError(
                    f"{name}: the histories remember {len(values)} steps, and {self.recipe.name} {len(own[name])}: "
                    "convert the model with a recipe of that history"
                )
        for name, layer in self._states().items():
            for operand, history in layer.amax.items():
                history.values = state[f"{name}.amax.{operand}"].clone()
        GradientWatch.resumed(self.model)

    def trainer_callback(self) -> Any:
        """Returns a callback for transformers' Trainer, whose checkpoints then have the histories, too.

        `Trainer(model, arguments, callbacks=[report.trainer_callback()])` saves them. It loads them when it resumes,
        and at the end with the best checkpoint, if it loads that (`load_best_model_at_end`).
        """
        return trainer_callback(self)

    def nonfinite(self) -> str | None:
        """Says where NaN or infinity came into the present gradients; None where all are finite.

        For training with a loss scaler, which leaves such steps out without a word.
        """
        return nonfinite_line(self.model, trained_layers(self.model))

    def _states(self) -> dict[str, LowPrecision]:
        layers = trained_layers(self.model)
        return {name: layers[name].low_precision for name in self.converted if name in layers}

    def __str__(self) -> str:
        """Returns a line for the log, and one for each reason."""
        lines = [f"{counted(len(self.converted), 'layer')} in {self.recipe.name}: {self.note}"]
        lines += [] if self.attention is None else [f"attention: {self.attention}"]
        if self.too_small:
            name, size = next(iter(self.too_small.items()))
            lines.append(
                f"no faster than in 16 bit: {counted(len(self.too_small), 'layer')}, {name} first: {list(size)} is too "
                "small to gain from FP8; exclude= leaves such layers in 16 bit, in the deployed model, too"
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.in_16bit.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"in 16 bit: {counted(len(n), 'layer')}, {n[0]} first: {reason}" for reason, n in reasons.items()]
        return "\n".join(lines)
