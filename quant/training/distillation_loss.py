"""The loss of distillation: a student learns the next-token probabilities of its teacher, without labels.

The teacher is a model in any precision, or a file of its likeliest tokens. The loss is the forward KL of next tokens,
and with `hidden` a share of the distance of hidden states, layer by layer:

    KL + hidden · mean over layers and positions of  |h_student − h_teacher|² / |h_teacher|²

A teacher's likeliest tokens are kept in a file (`cache_teacher`), so that a student trains without it in memory:

    rows       int32 [rows, seqlen]       the token ids that the teacher read
    tokens     int32 [rows, seqlen, k]    its k likeliest next tokens at each position
    logp       float32, of that shape     their log-probabilities at the temperature that the file's metadata names

A row of 512 tokens takes 262 kB at k = 64.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quant.base.atomic import claimed
from quant.base.errors import UserError
from quant.calibration.attention_names import text_config
from quant.calibration.evaluating import evaluating
from quant.calibration.outputs.logits import logits_of
from quant.calibration.session import device_of
from quant.kernels.base.custom_ops import first_order
from quant.recipes.blocks import forwarding, output_of
from quant.recipes.callers_model import inner_model
from quant.recipes.layers import output_head
from quant.recipes.solver_names import parse_solver
from quant.training.qat_layers import PLAN

# In the metadata of the file, by which `is_cached_teacher` recognises it among safetensors files.
_KIND = "blockscale teacher"


def cache_teacher(
    teacher: nn.Module, rows: Tensor, path: str | Path, *, k: int = 64, temperature: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
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
    rows: Tensor  # token ids, int64 `[rows, seqlen]`
    temperature: float  # of its log-probabilities
    vocabulary: int  # tokens that the teacher knows
    _tokens: Tensor
    _logp: Tensor
    _index: dict[str, int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "CachedTeacher":
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
            (rows.dim(), tokens.dim()) != (2, 3)
            or not tokens.shape == logp.shape == (*rows.shape, tokens.shape[-1])
            or {rows.dtype, tokens.dtype} != {torch.int32}
            or logp.dtype is not torch.float32
            or metadata.get("rows") != _digest(rows)
        ):
            raise UserError(f"{path}: its tensors are not as cache_teacher wrote them; write it again")
        rows = rows.long()
        # Batches are looked up by the rows' contents, so a Trainer may shuffle them.
        index = {_digest(row): index for index, row in enumerate(rows)}
        return cls(path, rows, temperature, vocabulary, tokens, logp, index)

    def of(self, batch: Tensor, temperature: float) -> "TopTeacher":
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
        if bool(((tokens < 0) | (tokens >= self.vocabulary)).any()) or not bool((logp <= 0).all()):
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


def _digest(rows: Tensor) -> str:
    # int32 in any case: rows come as int64 from the caller and as int32 from the file, and must have one digest.
    return hashlib.sha256(rows.cpu().int().contiguous().numpy().tobytes()).hexdigest()


_TINY = torch.finfo(torch.float32).tiny
AnyTeacher = nn.Module | CachedTeacher | str | os.PathLike[str]
Batch = Tensor | Mapping[str, Tensor]
"""Token ids, int64 `[rows, seqlen]`, or a model's inputs by name."""


def distillation_loss(
    student: nn.Module, teacher: AnyTeacher, batch: Batch | None, *, temperature: float = 1.0, hidden: float = 0.0
) -> Tensor:
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
    teacher_states: list[Tensor] = []
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
            moved = {name: value.to(device) for name, value in inputs.items() if isinstance(value, Tensor)}
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
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise UserError(f"the batch is {batch!r}; expected token ids, or a model's inputs by name")
    if not isinstance(batch.get("input_ids"), Tensor):
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


def _counted(inputs: Mapping[str, Any]) -> Tensor | None:
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


def _distance(states: list[Tensor], teacher_states: list[Tensor], counted: Tensor | None) -> Tensor:
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


# Forward KL between a teacher's and a student's next tokens, over slices of positions.
#
#     loss = mean over positions of  T² · sum over the vocabulary of  p · (log p − log q),    p, q = softmax(logits / T)
#
# The logits of 8,192 positions over 128,000 tokens take 4 GB in FP32, and a graph through log_softmax keeps several
# such tensors. `ChunkedKL` computes a slice's logits, its loss and its gradient
#
#     dL/dz = T / positions · (q − p)
#
# in the forward pass, takes that back through the student's head at once, and forgets the logits. It keeps the gradient
# of the head's input `[positions, hidden]`, and of the head's parameters (as the fused losses of Liger-Kernel do).
# The backward pass multiplies them by a number.
#
# That number has T² / positions and the gradient of the loss. In a slice, 1 / positions would make FP16 zeros of most
# gradients, which no GradScaler brings back. A power of two takes its place: it keeps both the smallest elements and
# sums over the slice within FP16. Sums over slices are float32.
#
# A teacher that was cached gives the log-probabilities of its k likeliest tokens at each position. All others are one
# outcome, of the probability that is left: the KL of that coarser choice is a lower bound of the KL of the tokens, and
# its gradient does not change the student's proportions among the others.

# FP32 logits of a slice, 32 MB on a CPU and 256 MB on a GPU.
_SLICE_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
# The factor of a slice's gradients times its positions. Of a sum of (q − p) · hidden it leaves a mean, times 4096 at
# most, and (q − p) of 1 / vocabulary comes to about the smallest normal number of FP16 in the slices of a GPU.
_SLICE_SUM = 1 << 12
# Rounding error of 1 − Σ p in float32: a smaller remainder counts as no probability at all.
_NOTHING = 1e-6

Head = Callable[[Tensor], Tensor]
"""A function from inputs of the output head, `[positions, hidden]`, to their logits `[positions, vocabulary]`."""


@dataclass(frozen=True, eq=False)
class LogitTeacher:
    """A teacher whose logits are computed as they are needed, from inputs of its head, `[positions, hidden]`."""

    hidden: Tensor
    head: Head

    def gradient(self, logits: Tensor, part: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns KL at each position of a slice, and its gradient by the student's logits, both without the factor T².

        The student's `logits`, float32 `[positions, vocabulary]`, are overwritten.
        """
        teacher_logits = self.head(self.hidden[part].to(logits.device)).float()
        if teacher_logits.shape != logits.shape:
            raise UserError(
                f"the teacher's vocabulary has {teacher_logits.shape[-1]:,} tokens and the student's "
                f"{logits.shape[-1]:,}; take a teacher of the same family, whose tokens are the same"
            )
        logp = (teacher_logits / temperature).log_softmax(dim=-1)
        logq = logits.div_(temperature).log_softmax(dim=-1)
        p = logp.exp()
        # A token that the teacher rules out (p = 0) counts nothing, though its logarithms may differ by infinity.
        loss = (logp.sub_(logq).masked_fill_(p == 0, 0).mul_(p)).sum(dim=-1)
        return loss, logq.exp_().sub_(p).div_(temperature)


@dataclass(frozen=True, eq=False)
class TopTeacher:
    """A teacher whose likeliest tokens are known."""

    tokens: Tensor  # int `[positions, k]`
    logp: Tensor  # their log-probabilities at the temperature, float32 `[positions, k]`
    name: str  # of the model in messages
    vocabulary: int  # tokens that the teacher knows

    def gradient(self, logits: Tensor, part: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns the same as `LogitTeacher.gradient`."""
        tokens, logp = self.tokens[part].to(logits.device).long(), self.logp[part].to(logits.device).float()
        if self.vocabulary != logits.shape[-1]:
            raise UserError(
                f"{self.name} knows {self.vocabulary:,} tokens and the student's vocabulary has {logits.shape[-1]:,}; "
                "cache a teacher of the same family"
            )
        logq = logits.div_(temperature).log_softmax(dim=-1)
        p, top_logq = logp.exp(), logq.gather(-1, tokens)
        tiny = torch.finfo(torch.float32).tiny
        rest_p = 1 - p.sum(dim=-1)
        rest_p = rest_p.masked_fill(rest_p < _NOTHING, 0)
        q = logq.exp_()
        # A sum over the other tokens, not 1 - the sum over `tokens`: that is rounding where the student is sure.
        rest_q = q.scatter(-1, tokens, 0.0).sum(dim=-1).clamp(min=tiny)
        loss = (p * (logp - top_logq).masked_fill(p == 0, 0)).sum(dim=-1) + torch.where(
            rest_p > 0, rest_p * (rest_p.clamp(min=tiny) / rest_q).log(), 0
        )
        # Gradient by the logits / T: q − p at the k tokens, and q − q · rest_p / rest_q at all others, whose shares
        # of the rest are the student's own.
        scaled = q * (1 - rest_p / rest_q)[:, None]
        scaled.scatter_(-1, tokens, q.gather(-1, tokens) - p)
        return loss, scaled.div_(temperature)


Teacher = LogitTeacher | TopTeacher


class ChunkedKL(torch.autograd.Function):
    """Mean KL over positions as a scalar; gradients of the head's input and parameters are found on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, teacher: Teacher, temperature: float, weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        learned = [parameter for parameter in parameters if parameter.requires_grad]
        totals = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in learned]
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        total = hidden.new_full((), len(hidden), dtype=torch.float32) if weights is None else weights.sum()
        factor = torch.where(total > 0, temperature**2 / total, 0)
        # Gradients of the head's parameters are summed in FP32 over slices; the input's gradient needs no sum.
        step = 1
        if len(hidden):
            with torch.no_grad():
                vocabulary = head(hidden[:1]).shape[-1]
            step = max(_SLICE_ELEMENTS.get(hidden.device.type, _SLICE_ELEMENTS["cpu"]) // vocabulary, 1)
        slices = [slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step)]
        # Of a slice's gradients: the more positions add up, the smaller.
        power = 2.0 ** math.floor(math.log2(_SLICE_SUM / slices[0].stop)) if slices else 1.0
        for part in slices:
            states = hidden[part].detach().requires_grad_(hidden.requires_grad)
            with torch.enable_grad():
                logits = head(states)
            each, slope = teacher.gradient(logits.detach().to(torch.float32, copy=True), part, temperature)
            each = each.double()
            if weights is not None:  # positions that do not count may hold anything, NaN too
                each = torch.where(weights[part] > 0, each * weights[part], 0)
                slope.mul_(weights[part, None]).masked_fill_(weights[part, None] == 0, 0)
            loss += each.sum()
            sources = [*([states] if of_hidden is not None else []), *learned]
            if sources:
                slope = slope.mul_(power).to(logits.dtype)
                gradients = list(torch.autograd.grad(logits, sources, slope, allow_unused=True))
                if of_hidden is not None:
                    of_hidden[part] = gradients.pop(0)
                for total, gradient in zip(totals, gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        ctx.save_for_backward(*([] if of_hidden is None else [of_hidden]), *totals)
        ctx.has_hidden, ctx.factor = of_hidden is not None, factor / power
        ctx.dtypes = [parameter.dtype if parameter.requires_grad else None for parameter in parameters]
        return (loss * factor).float()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        # With a dimension, because a number without one would be rounded to the dtype of the tensor first.
        factor = (gradient * ctx.factor).reshape(1)
        of_hidden = _product(saved[0], factor, saved.pop(0).dtype) if ctx.has_hidden else None
        of_parameters = [None if dtype is None else _product(saved.pop(0), factor, dtype) for dtype in ctx.dtypes]
        return of_hidden, None, None, None, None, *of_parameters


def chunked_kl(
    hidden: Tensor, head: Head, teacher: Teacher, *, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Returns the mean forward KL from a teacher's to the student's next tokens, times T².

    Only the logits of one slice are in memory at a time. The result, a float32 scalar, has gradients of `hidden`, the
    inputs `[positions, hidden]` of the student's head, and of the head's parameters if it is a module or a `LogitHead`.
    The factor T² keeps the gradients' size (Hinton et al., 2015). `mask` has the positions that count, bool or weights;
    None counts all, and without any the loss is 0.
    """
    if temperature <= 0:
        raise UserError(f"temperature is {temperature}; expected a number above 0")
    parameters = tuple(head.parameters()) if isinstance(head, nn.Module | LogitHead) else ()
    weights = None if mask is None else mask.flatten().to(hidden.device, torch.float32)
    return ChunkedKL.apply(hidden, head, teacher, temperature, weights, *parameters)  # type: ignore[no-untyped-call]


def _product(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor · factor`, computed in float32 and rounded once; no tensor in float32 is kept on the way."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


# Distillation applies a model's output head to a slice of positions at a time. Models change its products on the way to
# logits: Gemma caps them softly, Granite divides them, Cohere multiplies them.
#
#     logits = cap · tanh(y · times / over / cap),    y = head(hidden)
#
# `run_to_head` runs the whole model, wrappers and hooks included, with a head that remembers its input. At a model's
# first run that head multiplies a few positions, and the model's logits of them are compared with the operations that
# its config names. A model that does something else (Chameleon rules the tokens of images out) is run whole.

# Fields of configs in transformers 5.24, by what they do to the products of the head.
_TIMES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_OVER = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_COMPARED = 8  # positions


@dataclass(frozen=True)
class Tail:
    """The operations that a model applies to the products of its head."""

    times: float = 1.0
    over: float = 1.0
    cap: float | None = None  # limit of the soft cap after them

    def __call__(self, products: Tensor) -> Tensor:
        """Returns the logits, in the model's own operations."""
        logits = products if self.times == 1 else products * self.times
        logits = logits if self.over == 1 else logits / self.over
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class LogitHead:
    """An output head and the operations after it: `[positions, hidden]` to the model's logits."""

    head: nn.Module
    tail: Tail

    def __call__(self, x: Tensor) -> Tensor:
        return self.tail(self.head(x))

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Returns the parameters of the head."""
        return tuple(self.head.parameters())


_TAILS: WeakKeyDictionary[nn.Module, Tail | None] = WeakKeyDictionary()
"""The tails of models seen before; a model with None is run whole, with its own logits."""


def run_to_head(model: nn.Module, inputs: Mapping[str, Any], wants_hidden: bool) -> tuple[Tensor, list[Tensor], Head]:
    """Returns the head's inputs `[rows, seqlen, hidden]`, the hidden states, and the map from inputs to logits.

    For a model that is run whole, the inputs are its logits `[rows, seqlen, vocabulary]`, and the map is the identity.
    """
    inner = inner_model(model)
    # Replicas on other GPUs would share the state of a replaced head, and its weight.
    is_spread = isinstance(model, nn.DataParallel) and len(model.device_ids) > 1
    head = None if is_spread else output_head(inner)
    arguments = {name: value for name, value in inputs.items() if name not in ("labels", "num_items_in_batch")}
    named = hasattr(inner, "config")
    if named:
        arguments |= {"use_cache": False, **({"output_hidden_states": True} if wants_hidden else {})}
    elif wants_hidden:
        raise UserError(f"{type(inner).__name__}: hidden states are those of a transformers model; pass hidden=0")

    def call() -> Any:
        return model(**arguments) if named else model(arguments["input_ids"])

    def states(result: Any) -> list[Tensor]:
        return list(result.hidden_states[1:]) if wants_hidden else []

    if head is not None and _TAILS.get(inner, Tail()) is not None:
        is_new = inner not in _TAILS
        seen, result = _without_head(call, head, compares=is_new)
        if is_new:
            products = seen[0][1] if len(seen) == 1 else None
            config = text_config(getattr(inner, "config", None))
            _TAILS[inner] = None if products is None else _find_tail(products, _logits(result), config)
        tail = _TAILS[inner]
        if tail is not None and len(seen) == 1:
            return seen[0][0], states(result), LogitHead(head, tail)
    result = call()
    return _logits(result, named), states(result), lambda logits: logits


def _without_head(
    call: Callable[[], Any], head: nn.Module, compares: bool
) -> tuple[list[tuple[Tensor, Tensor | None]], Any]:
    """Runs a model with a head that remembers its inputs; with `compares`, also the products of a few positions."""
    original_forward = head.forward
    seen: list[tuple[Tensor, Tensor | None]] = []
    used = [p for p in head.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]

    def remember(x: Tensor) -> Tensor:
        if compares:
            products: Tensor = original_forward(x[:1, :_COMPARED] if x.dim() > 2 else x[:_COMPARED])
            seen.append((x, products.detach()))
            return products
        seen.append((x, None))
        # DDP may trace which parameters the outputs depend on, and takes all others for unused: the head is used.
        return x[..., :1] + sum(0 * p.flatten()[:1].sum() for p in used)

    with forwarding(head, remember):
        result = call()
    return seen, result


@torch.no_grad()
def _find_tail(products: Tensor, logits: Tensor, config: Any) -> Tail | None:
    """Returns the tail that turns `products` into `logits`, among the tails that a config names; None if none does."""
    if products.shape != logits.shape:
        return None
    logits = logits.to(products.device)
    tails = [
        Tail(*each)
        for each in product(_named(config, _TIMES, 1.0), _named(config, _OVER, 1.0), _named(config, _CAPS, None))
    ]
    distances = [float((tail(products).double() - logits.double()).abs().max()) for tail in tails]
    nearest = min(range(len(tails)), key=lambda index: distances[index])
    # A model that computes in other dtypes on the way rounds differently; a missed factor differs by more.
    rounding = 2 * max(torch.finfo(each.dtype).eps for each in (products, logits))
    return tails[nearest] if distances[nearest] <= rounding * float(logits.abs().max()) else None


def _named(config: Any, names: tuple[str, ...], none: float | None) -> list[Any]:
    """Returns the numbers that a config has under `names`, and `none` as the last one."""
    values = [getattr(config, name, None) for name in names]
    return [*(float(value) for value in values if isinstance(value, int | float) and value), none]


def _logits(result: Any, named: bool = False) -> Tensor:
    """Returns the logits in a model's output; a transformers model without a head has none."""
    if hasattr(result, "logits"):
        return result.logits
    if named and isinstance(result, Mapping):
        raise UserError(f"{type(result).__name__}: the model gives no logits; distillation is for language models")
    return output_of(result)
