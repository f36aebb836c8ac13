"""The loss of distillation: a student learns the next-token probabilities of its teacher, without labels.

The teacher is a model in any precision, or a file of its likeliest tokens (`teacher_cache.py`). The loss is the forward
KL of next tokens (`kl.py`), and with `hidden` a share of the distance of hidden states, layer by layer:

    KL + hidden · mean over layers and positions of  |h_student − h_teacher|² / |h_teacher|²
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.evaluating import evaluating
from quant.calibration.placement import device_of
from quant.recipes.callers_model import inner_model
from quant.recipes.solver_names import parse_solver
from quant.training.kl import LogitTeacher, Teacher, chunked_kl, run_to_head
from quant.training.rounded_weight import PLAN
from quant.training.teacher_cache import CachedTeacher

_TINY = torch.finfo(torch.float32).tiny
AnyTeacher = nn.Module | CachedTeacher | str | os.PathLike[str]
Batch = torch.Tensor | Mapping[str, torch.Tensor]
"""Token ids, int64 `[rows, seqlen]`, or a model's inputs by name."""


def distillation_loss(
    student: nn.Module, teacher: AnyTeacher, batch: Batch | None, *, temperature: float = 1.0, hidden: float = 0.0
) -> torch.Tensor:
    """Returns the distillation loss of one batch, with gradients; arguments are as in `distill`."""
    inputs = _inputs(batch)
    ids = inputs["input_ids"]
    if teacher is student:
        raise UserError("the teacher is the student itself, and has nothing to teach it; pass a copy of the original")
    if not isinstance(teacher, nn.Module | CachedTeacher | str | os.PathLike):
        raise UserError(f"teacher is {teacher!r}; expected a model, or a file of cache_teacher")
    if hidden < 0:
        raise UserError(f"hidden is {hidden}; expected a weight of at least 0")
    if ids.dim() != 2:
        raise UserError(f"the batch has token ids {list(ids.shape)}; expected [rows, seqlen], such as ids[None]")
    if isinstance(teacher, str | os.PathLike):
        teacher = CachedTeacher.open(teacher)
    wants_hidden = hidden > 0
    _check_student(inner_model(student), wants_hidden)
    # Without logits: a whole batch's, `[rows · seqlen, vocabulary]` in float32, may take more memory than the
    # model. `chunked_kl` applies the head to a slice at a time.
    outputs, states, head = run_to_head(student, inputs, wants_hidden)
    targets: Teacher
    teacher_states: list[torch.Tensor] = []
    if isinstance(teacher, CachedTeacher):
        if wants_hidden:
            raise UserError("a cached teacher has no hidden states; pass the model, or hidden=0")
        mask = inputs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise UserError(
                "attention_mask: rows are padded on the left, and a cached teacher has read their padding as tokens; "
                "pad them on the right, or pass the teacher as a model"
            )
        targets = teacher.of(ids, temperature)
    else:
        with evaluating(teacher), torch.no_grad():
            device = device_of(teacher)
            moved = {name: value.to(device) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            head_inputs, teacher_states, teacher_head = run_to_head(teacher, moved, wants_hidden)
        targets = LogitTeacher(head_inputs.flatten(0, 1), teacher_head)
    if outputs.shape[:-1] != ids.shape:
        raise UserError(
            f"{type(inner_model(student)).__name__}: gives outputs {list(outputs.shape)} for token ids "
            f"{list(ids.shape)}; distillation is for causal language models, with logits at each token"
        )
    counted = _counted(inputs)
    loss = chunked_kl(outputs.flatten(0, 1), head, targets, temperature=temperature, mask=counted)
    if wants_hidden:
        loss = loss + hidden * _distance(states, teacher_states, counted).to(loss.device)
    return loss


def _inputs(batch: Batch | None) -> dict[str, Any]:
    if isinstance(batch, torch.Tensor):
        return {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise UserError(f"the batch is {batch!r}; expected token ids, or a model's inputs by name")
    if not isinstance(batch.get("input_ids"), torch.Tensor):
        raise UserError(
            f"the batch has no input_ids ({', '.join(batch) or 'it is empty'}); distillation reads token ids"
        )
    return dict(batch)


def _check_student(model: nn.Module, wants_hidden: bool) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__}: an encoder-decoder; distillation is for causal language models, so train it on "
            "its own loss"
        )
    plan = getattr(model, PLAN, None) or getattr(model, "quantization_plan", None)
    merged = [each.solver for each in plan.quantized if parse_solver(each.solver).merges_rotations] if plan else []
    if wants_hidden and merged:
        raise UserError(
            f"hidden: {merged[0]} rotated the student's hidden states, and the teacher's are as they were; pass "
            "hidden=0"
        )


def _counted(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns a mask of the positions that count, bool `[rows, seqlen]`; None for all."""
    mask = inputs.get("attention_mask")
    # A mask of four dimensions tells which positions attend to which, and not which of them are padding.
    if mask is not None and mask.dim() != 2:
        mask = None
    labels = inputs.get("labels")
    if labels is None:
        return None if mask is None else mask.bool()
    # Position i predicts token i + 1, so the label of the next token decides. After the last one none is known.
    counted = torch.zeros_like(labels, dtype=torch.bool)
    counted[:, :-1] = labels[:, 1:] != -100
    return counted if mask is None else counted & mask.bool()


def _distance(
    states: list[torch.Tensor], teacher_states: list[torch.Tensor], counted: torch.Tensor | None
) -> torch.Tensor:
    """Returns the mean squared distance of hidden states over layers and positions, relative to the teacher's.

    Relative at each position, because the first one of a row often has more than all others together.
    """
    shapes = [tuple(s.shape) for s in states], [tuple(t.shape) for t in teacher_states]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"hidden states differ: the student has {len(states)} layers of {states[0].shape[-1]}, the teacher "
            f"{len(teacher_states)} of {teacher_states[0].shape[-1]}; pass hidden=0"
        )
    layers = []
    for student_state, teacher_state in zip(states, teacher_states, strict=True):
        target = teacher_state.to(student_state.device).float()
        distances = (student_state.float() - target).square().sum(-1) / target.square().sum(-1).clamp_min(_TINY)
        if counted is not None:
            mask = counted.to(distances.device)
            distances = torch.where(mask, distances, 0).sum() / mask.sum().clamp_min(1)
        layers.append(distances.mean().to(states[0].device))
    return torch.stack(layers).mean()
