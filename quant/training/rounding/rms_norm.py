"""A compiled model quantizes the output of an RMSNorm from the input of the norm, in the native backend.

    x ─▶ rstd = 1 / √(mean of squares + eps) ─▶ y = x · rstd · weight ─▶ q, k, v
    x, rstd, weight ────────────────────────────────────────────────▶ codes of y, both directions

The norm keeps its class and computes y as it always did; in a compiled graph y also carries the tensors that it was
computed from. A linear layer that trains natively makes its operands from these, so that nothing reads the values of y,
and the compiler leaves them out: it computes rstd with the addition before the norm, and y is never written. The
gradient goes through y as before. Where something else reads y too, a router or a layer in 16 bit, the compiler writes
it. Between norm and layer y may be replaced (`y = 2 * y`, `y *= 2`), and then is quantized as any other input; a method
that changes its values in place (`y.mul_(2)`) would not be seen.

Without a compiler y is written in any case, and is quantized as any other input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

# A module that keeps its class, its parameters and its hooks gets another `forward`, and later its own again.


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether something replaced the `forward` of this module alone, not of its class."""
    return "forward" in vars(module)


def replace_forward(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
    """Has a module compute `function(module, *arguments, ...)` when it is called."""
    # An entry of the instance, which copies and pickles of the module keep.
    vars(module)["forward"] = partial(function, module, *arguments)


def restore_forwards(model: nn.Module, function: Callable[..., Any]) -> None:
    """Undoes `replace_forward` by `function` in all modules of a model."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is function:
            del vars(module)["forward"]


_ORIGIN = "_quant_rms_norm"  # attribute of a norm's output: its `NormInput`


class NormInput(NamedTuple):
    """The tensors that an RMSNorm's output was computed from, and the dtypes that it was rounded to.

    Attributes:
        x: `[..., columns]`, the input of the norm.
        factor: `[columns]`, by which normalized values are multiplied.
        eps: the number that is added to the mean of squares.
        normalized: dtype of the normalized values before they are multiplied; float32 rounds nothing.
        dtype: the dtype of the output.
    """

    x: torch.Tensor
    factor: torch.Tensor
    eps: float
    normalized: torch.dtype
    dtype: torch.dtype

    def operands(self, rule: str, columns: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the output in FP8 blocks, for sums over its columns and, with `columns`, over its rows."""
        rows = self.x.reshape(-1, self.x.shape[-1])
        # As models write it: the compiler then finds that the gradient needs the same numbers.
        rstd = torch.rsqrt(self.x.float().pow(2).mean(-1, keepdim=True) + self.eps).reshape(-1)
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
        operands = torch.ops.quant.fp8_block_rms_norm(
            rows, rstd, self.factor, self.normalized, self.dtype, rule, columns
        )
        return operands


class _Formula(NamedTuple):
    """How a class computes its norm: (offset + weight) · x / √(mean of squares + eps)."""

    offset: float
    eps: float | None  # None is the epsilon of the input's dtype
    rounds_normalized: bool


def trace_rms_norms(model: nn.Module) -> None:
    """Has the outputs of a model's RMSNorms carry their origin in compiled graphs."""
    for module in model.modules():
        formula = None if has_own_forward(module) else _formula(module)
        if formula is not None:
            replace_forward(module, _forward, formula)


def restore_rms_norms(model: nn.Module) -> None:
    """Undoes `trace_rms_norms`."""
    restore_forwards(model, _forward)


def origin_of(x: torch.Tensor) -> NormInput | None:
    """Returns the origin of a tensor that is the output of an RMSNorm in a compiled graph; None of another tensor."""
    return getattr(x, _ORIGIN, None) if torch.compiler.is_compiling() else None


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a tensor, as autocast does before a linear layer; the output of an RMSNorm keeps its origin."""
    if x.dtype is dtype:
        return x
    y, origin = x.to(dtype), origin_of(x)
    # An output that is not float32 would be rounded twice here: it is quantized from its values.
    if origin is not None and origin.dtype is torch.float32:
        setattr(y, _ORIGIN, origin._replace(dtype=dtype))
    return y


def _forward(module: Any, formula: _Formula, *arguments: Any, **keywords: Any) -> Any:
    """Computes the norm as its class does, and notes its origin in a compiled graph."""
    y = type(module).forward(module, *arguments, **keywords)
    is_alone = len(arguments) == 1 and not keywords
    # A hook may change y in place, and shards of a DTensor are not rows.
    if torch.compiler.is_compiling() and is_alone and not module._forward_hooks and not hasattr(y, "full_tensor"):
        (x,), weight = arguments, module.weight
        factor = weight if not formula.offset else formula.offset + weight.float()
        eps = torch.finfo(x.dtype).eps if formula.eps is None else formula.eps
        normalized = x.dtype if formula.rounds_normalized else torch.float32
        setattr(y, _ORIGIN, NormInput(x, factor, eps, normalized, y.dtype))
    return y


def _formula(module: nn.Module) -> _Formula | None:
    """Returns the formula of an RMSNorm, tried on a small copy of the module; None for another module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or sum(p is not None for p in module._parameters.values()) > 1:
        return None
    if module._modules or module._buffers:
        return None
    # On the CPU, whichever device is the default.
    columns, generator = 64, torch.Generator("cpu").manual_seed(0)
    twin = copy.copy(module)
    vars(twin).update(normalized_shape=(columns,), _parameters={})

    def values(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
        # Small rows, in which eps counts.
        size = torch.tensor([[1.0], [1e-3], [30.0], [0.0]], device="cpu")
        x, w = (torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32) for rows in (4, 1))
        x, w = (x * size).to(dtype), w[0].to(dtype)
        vars(twin)["_parameters"] = {"weight": nn.Parameter(w, requires_grad=False)}
        try:
            y = type(module).forward(twin, x)
        except Exception:  # a forward pass that needs more than these is another one
            return x, w, None
        return x, w, y

    x, w, y = values(torch.float32)
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    own = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if own is not None and not isinstance(own, float):
        return None
    for offset in (0.0, 1.0):
        expected = _normalized(x, own) * (offset + w)
        if torch.allclose(y, expected, rtol=1e-5, atol=1e-7):
            x, w, y = values(torch.bfloat16)
            twice = (_normalized(x, own).bfloat16() * (offset + w.float())).bfloat16()
            return _Formula(offset, own, torch.equal(y, twice)) if isinstance(y, torch.Tensor) else None
    return None


def _normalized(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
