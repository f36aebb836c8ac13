"""`DistillTrainer` is a Trainer of transformers whose loss is distillation."""

from __future__ import annotations

from transformers import Trainer

from quant.training.distill import DistillMixin


class DistillTrainer(DistillMixin, Trainer):  # type: ignore[misc]
    """Trains a student, prepared by `prepare_qat` or not, towards a teacher's next-token probabilities.

        trainer = quant.DistillTrainer(model=model, teacher=teacher, args=…, train_dataset=…)

    Args:
        teacher: a model with the same vocabulary, in 16 bit or quantized; or a file of `quant.cache_teacher`.
        temperature: divides the logits of both.
        hidden: weight of the hidden states' distance.
        All other arguments are the Trainer's.
    """
