"""`QuantExperts` holds the quantized weights of all experts of one projection, and `experts_forward` runs them.

On a GPU all experts run in one grouped matmul a projection (`kernels/linear/experts.py`), elsewhere one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from quant.formats.format import Format
from quant.formats.stacking import Stacking
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.expert_stack import ExpertStack
from quant.kernels.linear.experts import grouped_experts_forward, grouped_linear
from quant.kernels.linear.ops import quantized_linear
from quant.kernels.linear.oracle import as_stored
from quant.kernels.linear.quantized_module import QuantizedModule


class QuantExperts(QuantizedModule, ExpertStack):
    """The quantized weights of all experts of one projection, in place of the parameter that stacks them.

    Args:
        weight: `[experts, out, in]`.
        activation: format the input is rounded to; None leaves it in 16 bit.
        input_scale: static scale of the activation format, float32 scalar, where the format has one.
        dtype: the dtype of dequantized values; `.to(dtype)` changes it.
        stacking: how the parameter holds the matrices; by default `[experts, out, in]`.
    """

    runs_grouped = True
    _dtype: torch.Tensor

    def __init__(
        self,
        weight: BlockScaledTensor,
        activation: Format | None = None,
        input_scale: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        stacking: Stacking | None = None,
    ) -> None:
        super().__init__(weight, activation, input_scale)
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype), persistent=False)
        self.stacking = stacking or Stacking(tuple(weight.shape), weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that indexing returns: the constructor's, until `.to(dtype)` changes it."""
        return self._dtype.dtype

    def _settle(self, x: torch.Tensor) -> None:
        if (self.codes.device, self.codes.dtype, x.dtype) != self._arranged:
            self.arrange(x.dtype)

    @property
    def multiplies_values(self) -> bool:
        """Whether inputs stay in 16 bit."""
        return self.activation_format is None

    def dense(self, index: int) -> torch.Tensor:
        """Returns the values `[out, in]` of one expert."""
        return as_stored(self.stored_weight.matrix(index)).dequantize(self.dtype)

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`."""
        self._settle(x)
        return quantized_linear(x, self.stored_weight.matrix(index), None, self.input_scale, self.activation_format)

    def every(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[experts, tokens, in]` to `[experts, tokens, out]`, each expert with its own tokens."""
        # Every expert has the same number of tokens, so offsets are its multiples.
        offsets = torch.arange(len(x) + 1, device=x.device, dtype=torch.int32) * x.shape[1]
        y: torch.Tensor = self.grouped(x.flatten(0, 1), offsets).unflatten(0, x.shape[:2])
        return y

    def grouped(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Maps `[tokens, in]`, sorted by expert, to `[tokens, out]`.

        Rows of expert e begin at `offsets[e]`.
        """
        self._settle(x)
        y = grouped_linear(x, self.stored_weight, offsets, self.input_scale, self.activation_format)
        return self.stacking.outputs(y)


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    observe: Callable[[str, int, torch.Tensor], None] | None = None,
    until: str | None = None,
    after: Callable[[str, int, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes the forward pass of a transformers experts module whose projections are `QuantExperts`.

    On a GPU all experts run in one grouped matmul a projection, elsewhere one at a time. Registered with transformers
    as the experts implementation "quant".

    Args:
        self: the experts module; its projections may also be plain parameters.
        hidden_states: `[tokens, hidden]`.
        top_k_index: expert of each token and slot, `[tokens, k]`; indices beyond the last expert are skipped.
        top_k_weights: routing weights, `[tokens, k]`.
        observe: a function that is called with (projection, expert, its input `[tokens, in]`) before each matmul, for
            calibration.
        until: the last projection to be observed; it is not run, nor are later ones, and the result is meaningless.
        after: a function that is called with (projection, expert, its output `[tokens, out]`) after each matmul; its
            result takes the output's place.

    Returns:
        `[tokens, hidden]`.
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    projections = (getattr(self, first), self.down_proj)
    grouped = all(getattr(projection, "runs_grouped", False) for projection in projections)
    if hidden_states.is_cuda and grouped and observe is None and after is None:
        return grouped_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    out = torch.zeros_like(hidden_states)

    def project(name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
        if observe is not None:
            observe(name, expert, x)
        y = _apply_expert(self, name, x, expert)
        return y if after is None else after(name, expert, y)

    # Stacks of plain parameters may keep the matrices of one forward pass; this is where the pass begins and ends.
    with ExitStack() as stack:
        for projection in projections:
            if isinstance(projection, ExpertStack):
                stack.enter_context(projection.opened())
        for expert, (token, slot) in tokens_by_expert(top_k_index).items():
            if expert >= self.num_experts:
                continue
            # Calibration of the first projection needs no products at all.
            if until == first and observe is not None:
                observe(first, expert, hidden_states[token])
                continue
            up = project(first, hidden_states[token], expert)
            up = self._apply_gate(up) if self.has_gate else self.act_fn(up)
            if until is not None and observe is not None:
                observe("down_proj", expert, up)
                continue
            down = project("down_proj", up, expert)
            if getattr(self, "has_post_expert_norm", False):
                down = self.post_expert_norm(down)
            out.index_add_(0, token, (down * top_k_weights[token, slot, None]).to(out.dtype))
    return out


def tokens_by_expert(top_k_index: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tokens that a router sent to each expert, in their order, and the slots in which they name it.

    Args:
        top_k_index: expert of each token and slot, `[tokens, k]`.
    """
    # One sort, so that a GPU is waited for once and not for each expert.
    experts, counts = top_k_index.unique(return_counts=True)
    order = top_k_index.flatten().argsort(stable=True)
    tokens, slots = (
        part.split(counts.tolist()) for part in (order // top_k_index.shape[1], order % top_k_index.shape[1])
    )
    return dict(zip(experts.tolist(), zip(tokens, slots, strict=True), strict=True))


def can_run_experts_one_by_one(module: nn.Module) -> bool:
    """Returns whether `experts_forward` can replace the forward of a transformers experts module."""
    return hasattr(module, "has_gate")


def _apply_expert(self: Any, name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Multiplies by one expert.

    A projection in 16 bit is a plain parameter, whose experts may still be in their files.
    """
    projection = getattr(self, name)
    if isinstance(projection, ExpertStack):
        y: torch.Tensor = projection(x, expert)
    else:
        weight = getattr(projection, "stored", projection)[expert].to(x.device, x.dtype)
        y = nn.functional.linear(x, weight.t() if getattr(self, "is_transposed", False) else weight)
    return y + getattr(self, f"{name}_bias")[expert].to(x.dtype) if getattr(self, "has_bias", False) else y
