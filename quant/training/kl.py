"""Forward KL between a teacher's and a student's next tokens, over slices of positions.

    loss = mean over positions of  T² · sum over the vocabulary of  p · (log p − log q),    p, q = softmax(logits / T)

The logits of 8,192 positions over 128,000 tokens take 4 GB in FP32, and a graph through log_softmax keeps several such
tensors. `ChunkedKL` computes a slice's logits, its loss and its gradient

    dL/dz = T / positions · (q − p)

in the forward pass, takes that back through the student's head at once, and forgets the logits. It keeps the gradient
of the head's input `[positions, hidden]`, and of the head's parameters (as the fused losses of Liger-Kernel do).
The backward pass multiplies them by a number.

That number has T² / positions and the gradient of the loss. In a slice, 1 / positions would make FP16 zeros of most
gradients, which no GradScaler brings back. A power of two takes its place: it keeps both the smallest elements and sums
over the slice within FP16. Sums over slices are float32.

A teacher that was cached gives the log-probabilities of its k likeliest tokens at each position. All others are one
outcome, of the probability that is left: the KL of that coarser choice is a lower bound of the KL of the tokens, and
its gradient does not change the student's proportions among the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from quant.base.errors import UserError
from quant.calibration.attention_names import text_config
from quant.recipes.blocks import forwarding, output_of
from quant.recipes.callers_model import inner_model
from quant.recipes.layers import output_head

# FP32 logits of a slice, 32 MB on a CPU and 256 MB on a GPU.
_SLICE_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
# The factor of a slice's gradients times its positions. Of a sum of (q − p) · hidden it leaves a mean, times 4096 at
# most, and (q − p) of 1 / vocabulary comes to about the smallest normal number of FP16 in the slices of a GPU.
_SLICE_SUM = 1 << 12
# Rounding error of 1 − Σ p in float32: a smaller remainder counts as no probability at all.
_NOTHING = 1e-6

Head = Callable[[torch.Tensor], torch.Tensor]
"""A function from inputs of the output head, `[positions, hidden]`, to their logits `[positions, vocabulary]`."""


@dataclass(frozen=True, eq=False)
class LogitTeacher:
    """A teacher whose logits are computed as they are needed, from inputs of its head, `[positions, hidden]`."""

    hidden: torch.Tensor
    head: Head

    def gradient(self, logits: torch.Tensor, part: slice, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
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

    tokens: torch.Tensor  # int `[positions, k]`
    logp: torch.Tensor  # their log-probabilities at the temperature, float32 `[positions, k]`
    name: str  # of the model in messages
    vocabulary: int  # tokens that the teacher knows

    def gradient(self, logits: torch.Tensor, part: slice, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
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
        ctx: Any,
        hidden: torch.Tensor,
        head: Head,
        teacher: Teacher,
        temperature: float,
        weights: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
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
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        # With a dimension, because a number without one would be rounded to the dtype of the tensor first.
        factor = (gradient * ctx.factor).reshape(1)
        of_hidden = _product(saved[0], factor, saved.pop(0).dtype) if ctx.has_hidden else None
        of_parameters = [None if dtype is None else _product(saved.pop(0), factor, dtype) for dtype in ctx.dtypes]
        return of_hidden, None, None, None, None, *of_parameters


def chunked_kl(
    hidden: torch.Tensor, head: Head, teacher: Teacher, *, temperature: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
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


def _product(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Returns the logits, in the model's own operations."""
        logits = products if self.times == 1 else products * self.times
        logits = logits if self.over == 1 else logits / self.over
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class LogitHead:
    """An output head and the operations after it: `[positions, hidden]` to the model's logits."""

    head: nn.Module
    tail: Tail

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x))

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Returns the parameters of the head."""
        return tuple(self.head.parameters())


_TAILS: WeakKeyDictionary[nn.Module, Tail | None] = WeakKeyDictionary()
"""The tails of models seen before; a model with None is run whole, with its own logits."""


def run_to_head(
    model: nn.Module, inputs: Mapping[str, Any], wants_hidden: bool
) -> tuple[torch.Tensor, list[torch.Tensor], Head]:
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

    def states(result: Any) -> list[torch.Tensor]:
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
) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], Any]:
    """Runs a model with a head that remembers its inputs; with `compares`, also the products of a few positions."""
    original_forward = head.forward
    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    used = [p for p in head.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]

    def remember(x: torch.Tensor) -> torch.Tensor:
        if compares:
            products: torch.Tensor = original_forward(x[:1, :_COMPARED] if x.dim() > 2 else x[:_COMPARED])
            seen.append((x, products.detach()))
            return products
        seen.append((x, None))
        # DDP may trace which parameters the outputs depend on, and takes all others for unused: the head is used.
        return x[..., :1] + sum(0 * p.flatten()[:1].sum() for p in used)

    with forwarding(head, remember):
        result = call()
    return seen, result


@torch.no_grad()
def _find_tail(products: torch.Tensor, logits: torch.Tensor, config: Any) -> Tail | None:
    """Returns the tail that turns `products` into `logits`, among the tails that a config names; None if none does."""
    if products.shape != logits.shape:
        return None
    logits = logits.to(products.device)
    tails = [Tail(*each) for each in product(_named(config, _TIMES, 1.0), _named(config, _OVER, 1.0),
                                             _named(config, _CAPS, None))]  # fmt: skip
    distances = [float((tail(products).double() - logits.double()).abs().max()) for tail in tails]
    nearest = min(range(len(tails)), key=lambda index: distances[index])
    # A model that computes in other dtypes on the way rounds differently; a missed factor differs by more.
    rounding = 2 * max(torch.finfo(each.dtype).eps for each in (products, logits))
    return tails[nearest] if distances[nearest] <= rounding * float(logits.abs().max()) else None


def _named(config: Any, names: tuple[str, ...], none: float | None) -> list[Any]:
    """Returns the numbers that a config has under `names`, and `none` as the last one."""
    values = [getattr(config, name, None) for name in names]
    return [*(float(value) for value in values if isinstance(value, int | float) and value), none]


def _logits(result: Any, named: bool = False) -> torch.Tensor:
    """Returns the logits in a model's output; a transformers model without a head has none."""
    if hasattr(result, "logits"):
        return result.logits
    if named and isinstance(result, Mapping):
        raise UserError(f"{type(result).__name__}: the model gives no logits; distillation is for language models")
    return output_of(result)
