"""`DistillOptions` says how `quant.distill_checkpoint` trains; the command `quant distill` has the same options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quant.base.errors import UserError


@dataclass(frozen=True)
class DistillOptions:
    """Data, loss and length of a training run.

    Attributes:
        data: training texts, as `--calib` of `quantize` takes them; none stands for "mix", half of it text that the
            teacher writes and half samples of this package. A cached teacher has its own rows.
        samples: rows of training text at most, used again as often as the steps need them.
        seqlen: tokens of a row.
        steps: optimizer steps.
        batch_size: rows of a step.
        lr: peak learning rate of AdamW; None is 1e-4, or 6e-5 where only weights are rounded, and 1e-3 for norms.
        temperature: divides the logits of teacher and student.
        hidden: weight of the distance of hidden states in the loss.
        train: "weights", all that are quantized; or "norms", which stays near the start: the weights of norms alone,
            with all codes and scales as they are.
        scales: "frozen" or "learned" block scales; norms are trained with frozen ones.
        eval_texts: texts that both checkpoints are measured on, before and after training.
        eval_samples: rows of each of them.
        cache_teacher: file to which the teacher's likeliest tokens are written first. The student is trained on the
            file, so teacher and student are never in memory together.
        top: tokens that the file keeps at each position.
        seed: the seed of the text that is written and of the order of the rows.
    """

    data: tuple[str, ...] = ()
    samples: int = 512
    seqlen: int = 512
    steps: int = 300
    batch_size: int = 8
    lr: float | None = None
    temperature: float = 1.0
    hidden: float = 0.0
    train: str = "weights"
    scales: str = "frozen"
    eval_texts: tuple[str | Path, ...] = ()
    eval_samples: int = 16
    cache_teacher: str | Path | None = None
    top: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in ("weights", "norms"):
            raise UserError(f"train is {self.train!r}; expected 'weights' or 'norms'")
        if self.train == "norms" and self.scales != "frozen":
            raise UserError(f"scales={self.scales!r}: norms are trained with the codes and scales as they are")
