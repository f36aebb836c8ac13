"""The loss of distillation: a student learns the next-token probabilities of its teacher, without labels.

The teacher is a model in any precision, or a file of its likeliest tokens. The loss is the forward KL of next tokens
(`kl.py`), and with `hidden` a share of the distance of hidden states, layer by layer:

    KL + hidden · mean over layers and positions of  |h_student − h_teacher|² / |h_teacher|²

A teacher's likeliest tokens are kept in a file (`cache_teacher`), so that a student trains without it in memory:

    rows       int32 [rows, seqlen]       the token ids that the teacher read
    tokens     int32 [rows, seqlen, k]    its k likeliest next tokens at each position
    logp       float32, of that shape     their log-probabilities at the temperature that the file's metadata names

A row of 512 tokens takes 262 kB at k = 64.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quant.base.atomic import claimed
from quant.base.errors import UserError
from quant.calibration.evaluating import evaluating
from quant.calibration.outputs.logits import logits_of
from quant.calibration.session import device_of
from quant.recipes.callers_model import inner_model
from quant.recipes.solver_names import parse_solver
from quant.training.kl import LogitTeacher, Teacher, TopTeacher, chunked_kl, run_to_head
from quant.training.qat_layers import PLAN

# In the metadata of the file, by which `is_cached_teacher` recognises it among safetensors files.
_KIND = "blockscale teacher"


def cache_teacher(
    teacher: nn.Module,
    rows: torch.Tensor,
    path: str | Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the teacher's `k` likeliest next tokens at each position of `rows`.

    Args:
        teacher: a causal language model in any precision.
        rows: token ids, int64 `[rows, seqlen]`; where they are padded, on the right.
        path: file to write; it appears when it is whole.
        k: tokens a position.
        temperature: the temperature that the student will be trained with.
        progress: a function that is called with (rows done, rows in all).

    Raises:
        UserError: `k` is below 1 or beyond the vocabulary, or the temperature is not above 0.
    """
    if temperature <= 0:
        raise UserError(f"temperature is {temperature}; expected a number above 0")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens, logps, vocabulary = [], [], 0
    with evaluating(teacher):
        for index, row in enumerate(rows, 1):
            with torch.no_grad():
                logits = logits_of(teacher, row[None].to(device_of(teacher)))[0].float()
            if not 0 < k <= logits.shape[-1]:
                raise UserError(f"k is {k}; expected 1 to {logits.shape[-1]:,}, the teacher's vocabulary")
            vocabulary = logits.shape[-1]
            # At the temperature of training: probabilities of the tokens that are dropped cannot be recomputed later.
            top, which = (logits / temperature).log_softmax(dim=-1).topk(k)
            tokens.append(which.int().cpu())
            logps.append(top.cpu())
            if progress is not None:
                progress(index, len(rows))
    tensors = {"rows": rows.int().contiguous(), "tokens": torch.stack(tokens), "logp": torch.stack(logps)}
    metadata = {
        "kind": _KIND, "temperature": repr(float(temperature)), "rows": _digest(rows), "vocabulary": str(vocabulary)
    }  # fmt: skip
    with claimed(path):
        temporary = path.with_name(f".{path.name}.partial")
        save_file(tensors, temporary, metadata)
        # A rename on one file system is atomic: every reader of `path` sees the old file or the whole new one.
        temporary.replace(path)


@dataclass(frozen=True, eq=False)
class CachedTeacher:
    """The teacher of a file that `cache_teacher` wrote; its tensors are mapped, and read row by row."""

    path: Path
    rows: torch.Tensor  # token ids, int64 `[rows, seqlen]`
    temperature: float  # of its log-probabilities
    vocabulary: int  # tokens that the teacher knows
    _tokens: torch.Tensor
    _logp: torch.Tensor
    _index: dict[str, int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CachedTeacher:
        """Opens a file; UserError if it is not one of `cache_teacher`."""
        path = Path(path)
        if path.is_dir():
            raise UserError(
                f"{path}: a directory, and no file of cache_teacher; pass its model: open_model({str(path)!r}).model"
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != _KIND:
                    raise ValueError("it holds none; write one with quant.training.distillation_loss.cache_teacher")
                tensors = {name: file.get_tensor(name) for name in ("rows", "tokens", "logp")}
                temperature, vocabulary = float(metadata["temperature"]), int(metadata["vocabulary"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a cached teacher: {error}") from None
        rows, tokens, logp = tensors.values()
        if (
            (rows.dim(), tokens.dim()) != (2, 3) or not tokens.shape == logp.shape == (*rows.shape, tokens.shape[-1])
            or {rows.dtype, tokens.dtype} != {torch.int32} or logp.dtype is not torch.float32
            or metadata.get("rows") != _digest(rows)
        ):  # fmt: skip
            raise UserError(f"{path}: its tensors are not as cache_teacher wrote them; write it again")
        rows = rows.long()
        # Batches are looked up by the rows' contents, so a Trainer may shuffle them.
        index = {_digest(row): index for index, row in enumerate(rows)}
        return cls(path, rows, temperature, vocabulary, tokens, logp, index)

    def of(self, batch: torch.Tensor, temperature: float) -> TopTeacher:
        """Returns the teacher's next tokens for a batch of its rows, int64 `[n, seqlen]`, in any order.

        Raises:
            UserError: another temperature, a row that the teacher has not read, or a damaged file.
        """
        if temperature != self.temperature:
            raise UserError(
                f"{self.path}: cached at temperature {self.temperature:g}, and {temperature:g} is requested; train at "
                "that, or cache again"
            )
        indices = [self._index.get(_digest(row)) for row in batch.cpu()]
        if None in indices:
            raise UserError(
                f"{self.path}: row {indices.index(None)} of the batch is not among the {len(self.rows)} rows that the "
                "teacher has read; train on the rows of the cache, cut and padded as they are"
            )
        index = torch.tensor(indices, device="cpu")
        tokens, logp = self._tokens[index].flatten(0, 1), self._logp[index].flatten(0, 1)
        if bool((tokens < 0).any()) or not bool((logp <= 0).all()):
            raise UserError(f"{self.path}: holds tokens or probabilities that no teacher gives; write it again")
        return TopTeacher(tokens, logp, f"{self.path}: the cached teacher", self.vocabulary)


def is_cached_teacher(path: str | Path) -> bool:
    """Returns whether `path` is a file that `cache_teacher` wrote."""
    if not Path(path).is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("kind") == _KIND
    except (OSError, SafetensorError):
        return False


def _digest(rows: torch.Tensor) -> str:
    # int32 in any case: rows come as int64 from the caller and as int32 from the file, and must have one digest.
    return hashlib.sha256(rows.cpu().int().contiguous().numpy().tobytes()).hexdigest()


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
