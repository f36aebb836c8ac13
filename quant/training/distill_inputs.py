"""`DistillInputs` holds the teacher of a student, in memory or in a file, and the training rows that both read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.listener import Listener, StageProgress, reporter
from quant.calibration.session import Session
from quant.checkpoints.runnable import open_runnable
from quant.base.errors import UserError
from quant.calibration.texts.sources import Rows, read_calibration, tokenizer_if_any
from quant.models.open_model import Source
from quant.training.distill_options import DistillOptions
from quant.training.teacher_cache import CachedTeacher, cache_teacher, is_cached_teacher

_SHARED = 0.99  # of the smaller vocabulary; a fine-tuned model adds a token or two


@dataclass(frozen=True)
class DistillInputs:
    """A teacher and its training rows.

    Attributes:
        teacher: a model that needs no gradients, or a file of its likeliest tokens.
        rows: token ids, int64 `[rows, seqlen]`.
        data: the names of the training texts, for the report.
        tokenizer: the teacher's; None where it has none or was cached before.
    """

    teacher: nn.Module | CachedTeacher
    rows: torch.Tensor
    data: str
    tokenizer: Any

    @property
    def model(self) -> nn.Module | None:
        """The teacher, where it is a model in memory."""
        return self.teacher if isinstance(self.teacher, nn.Module) else None


def prepare_distill_inputs(name: str, options: DistillOptions, session: Session, listener: Listener) -> DistillInputs:
    """Opens a teacher on the session's device, reads the training rows, and caches the teacher if `options` say so.

    Raises:
        UserError: the teacher cannot be opened, or there are fewer rows than a batch takes.
    """
    if is_cached_teacher(name):
        with listener.step(f"loading {name}"):
            cached = CachedTeacher.open(name)
        if options.data:
            raise UserError("--data: a cached teacher knows only its own rows; leave the option out")
        return DistillInputs(cached, cached.rows, "its cache", None)
    with listener.step(f"loading {name}"):
        source, model = open_runnable(name)
        # Frozen and in evaluation mode for good: dropout in a teacher would make another teacher of every step.
        model.requires_grad_(False).eval().to(session.device)
    # Data is read while the teacher is in memory: it writes the text of "mix" and "self".
    data, tokenizer = ", ".join(options.data) or "mix", tokenizer_if_any(source)
    with listener.stages() as progress:
        rows = _training_rows(source, options, session, progress, listener)
        if options.cache_teacher is None:
            return DistillInputs(model, rows, data, tokenizer)
        cache_teacher(
            model, rows, options.cache_teacher, k=options.top, temperature=options.temperature,
            progress=reporter(progress, "cache"),
        )  # fmt: skip
    return DistillInputs(cached := CachedTeacher.open(options.cache_teacher), cached.rows, data, tokenizer)


def check_cache(file: Path, teacher: str, out: Path, hidden: float) -> None:
    """Checks that a teacher can be cached in `file`.

    Raises:
        UserError: the file would replace something, or a cached teacher cannot teach this.
    """
    if is_cached_teacher(teacher):
        raise UserError(f"--cache-teacher: {teacher} is a cached teacher already; leave the option out")
    if file.exists():
        raise UserError(f"--cache-teacher {file}: is there already; pass it as --teacher, or name another file")
    if out.resolve() in (file.resolve(), *file.resolve().parents):
        raise UserError(f"--cache-teacher {file}: lies in --out, whose files belong to the checkpoint; name another")
    if hidden:
        raise UserError("--hidden: a cached teacher has no hidden states; leave out --cache-teacher, or --hidden")


def check_tokenizers(teacher: str, directory: Path, of_teacher: Any, of_student: Any) -> None:
    """Checks that token ids mean the same words to the student and to its teacher; None is no tokenizer.

    Raises:
        UserError: more than a hundredth of the smaller vocabulary differs.
    """
    if not hasattr(of_teacher, "get_vocab") or not hasattr(of_student, "get_vocab"):
        return
    smaller, larger = sorted((of_teacher.get_vocab(), of_student.get_vocab()), key=len)
    if sum(larger.get(token) == token_id for token, token_id in smaller.items()) < _SHARED * len(smaller):
        raise UserError(
            f"{teacher}: its tokenizer is another than that of {directory}, so token ids mean other words to it; "
            "take a teacher of the same family"
        )


def _training_rows(
    source: Source, options: DistillOptions, session: Session, progress: StageProgress, listener: Listener
) -> torch.Tensor:
    """Returns the rows of training text; no more are read than the steps use."""
    samples = min(options.samples, options.steps * options.batch_size)
    source_rows = Rows(options.data, samples, options.seqlen, session.seed, at_most=True)
    rows, _ = read_calibration(source, source_rows, replace(session, progress=progress), listener=listener)
    if not isinstance(rows, torch.Tensor):
        raise UserError("--data: distillation reads rows of token ids; give text, or token ids in safetensors")
    if len(rows) < options.batch_size:
        raise UserError(
            f"--batch-size {options.batch_size}: there are {len(rows)} rows of {rows.shape[1]} tokens to train on; "
            "lower it, raise --samples, or give a longer --data"
        )
    return rows
