"""`DistillTrainer` is a Trainer of transformers whose loss is distillation; `DistillMixin` makes one of any other."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from quant.base.errors import UserError
from quant.training.distillation_loss import AnyTeacher, CachedTeacher, distillation_loss


class DistillMixin:
    """Makes distillation the loss of a Trainer of transformers or TRL; it comes first among the base classes.

        class Distillation(DistillMixin, trl.SFTTrainer): …

    Args:
        teacher, temperature, hidden: as `quant.distill` takes them, in addition to the Trainer's own arguments.
    """

    def __init__(
        self, *args: Any, teacher: AnyTeacher, temperature: float = 1.0, hidden: float = 0.0, **options: Any
    ) -> None:
        if options.get("compute_metrics") is not None:
            raise UserError(
                "compute_metrics: distillation keeps no logits of whole rows; leave it out, and measure the trained "
                "model with quant.evaluate"
            )
        super().__init__(*args, **options)
        self.teacher = CachedTeacher.open(teacher) if isinstance(teacher, str | os.PathLike) else teacher
        self.temperature, self.hidden = temperature, hidden
        # The loss is a mean: a Trainer is to divide it by the number of batches whose gradients are added up.
        self.model_accepts_loss_kwargs = False
        if isinstance(self.teacher, nn.Module):
            # A Trainer moves only its own model.
            device = self.args.device  # type: ignore[attr-defined]
            self.teacher.requires_grad_(False).to(device)

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, **options: Any
    ) -> Any:
        """Returns the distillation loss, which a Trainer takes in the place of the model's own."""
        loss = distillation_loss(model, self.teacher, inputs, temperature=self.temperature, hidden=self.hidden)
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Returns the loss without keeping logits."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        return loss.detach(), None, None


class DistillTrainer(DistillMixin, Trainer):  # type: ignore[misc]
    """Trains a student, prepared by `prepare_qat` or not, towards a teacher's next-token probabilities.

        trainer = quant.DistillTrainer(model=model, teacher=teacher, args=…, train_dataset=…)

    Args:
        teacher: a model with the same vocabulary, in 16 bit or quantized; or a file of `cache_teacher`.
        temperature: divides the logits of both.
        hidden: weight of the hidden states' distance.
        All other arguments are the Trainer's.
    """
