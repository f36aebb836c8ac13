"""`SwitchableLayer` computes a layer in the format that its `SwitchableModel` is set to.

Calls of a run may be kept in a `CallCache`: inputs and outputs of all layers, exactly. Later runs on the same tokens
then multiply only the differences, in BF16, which is several times as fast (see `fast_matmul`).

For gradients, a layer is one node of autograd that saves only its input. In the backward pass it shows
input and output gradient to `observe`, so that scores need neither the output nor the graph afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from quant.calibration.outputs.substitutes import Substitute
from quant.formats.stacking import Stacking
from quant.kernels.linear.expert_stack import ExpertStack
from quant.recipes.plan import LayerPlan

if TYPE_CHECKING:
    from quant.calibration.sensitivity.switchable_model import SwitchableModel


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """Input and output gradient of one call of a layer, from a backward pass.

    Attributes:
        x: the input of the layer, `[..., in]`.
        gradient: ∂L/∂Y, `[..., out]`.
        back: gradient · W with the weight as it is now, `[..., in]`.
        index: the expert, or None.
    """

    x: torch.Tensor
    gradient: torch.Tensor
    back: torch.Tensor
    index: int | None


Observe = Callable[["SwitchableLayer", LayerGradient], None]


@dataclass(frozen=True, eq=False)
class CachedCall:
    """One call of a layer in a cached run.

    Attributes:
        candidate: the layer's format then.
        x: the rounded input of the layer.
        y: the output of the layer.
    """

    candidate: str
    x: torch.Tensor
    y: torch.Tensor


class CallCache:
    """Calls of all layers in one run, as far as they fit into `budget`.

    Attributes:
        budget: bytes that may still be added.
        writing: whether calls are added; otherwise they are looked up.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.calls: dict[str, CachedCall] = {}
        self.held: set[int] = set()
        self.writing = True

    def keep(self, name: str, call: CachedCall) -> None:
        """Adds a call unless the budget is used up; layers with the same input share its memory."""
        new = {t.data_ptr(): t.nbytes for t in (call.x, call.y) if t.data_ptr() not in self.held}
        if sum(new.values()) <= self.budget:
            self.budget -= sum(new.values())
            self.held |= new.keys()
            self.calls[name] = call


class SwitchableLayer(Substitute):
    """A linear, or one projection of a fused-experts module, in the format that its model is set to."""

    owner: SwitchableModel
    original: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, owner: SwitchableModel, plan: LayerPlan, group: str, weight: torch.Tensor, bias: Any) -> None:
        nn.Module.__init__(self)
        self.plan, self.group = plan, group
        # Past nn.Module.__setattr__: as a submodule or parameter each would appear in the state of the model.
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "original", weight)
        object.__setattr__(self, "bias", bias)

    def forward(self, input: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """Maps `[..., in]` to `[..., out]`; `index` is the expert's."""
        if torch.is_grad_enabled():
            return _Probe.apply(input, self.owner.anchor, self, index)  # type: ignore[no-any-return, no-untyped-call]
        return self.compute(input, index)

    def compute(self, x: torch.Tensor, index: int | None) -> torch.Tensor:
        """Returns the output in the present format."""
        owner = self.owner
        candidate = owner.current(self.group)
        unrounded, x = x, owner.round_input(self.group, x, candidate)
        branch = owner.weights.branch_output(self, candidate, unrounded, x)
        # The number of tokens of an expert differs from run to run, and a branch needs the unrounded input, which a
        # cached call does not hold.
        cache = owner.cache if index is None and branch is None else None
        if cache is not None and not cache.writing:
            cached = cache.calls.get(self.plan.name)
            if cached is not None and cached.candidate == candidate.name and cached.x.shape == x.shape:
                # y' = y + (x' − x) Wᵀ: rounding to BF16 is relative to the difference, not to the output.
                weight = owner.weights.narrow(self, candidate)
                return cached.y + linear((x - cached.x).to(weight.dtype), weight).to(x.dtype)
        y = linear(x, owner.weights.dense(self, candidate, index).to(x.dtype), self.bias)
        y = y if branch is None else y + branch
        if cache is not None and cache.writing:
            cache.keep(self.plan.name, CachedCall(candidate.name, x, y))
        return y


class SwitchableExperts(SwitchableLayer, ExpertStack):
    """One projection of all experts; `stacking` describes its layout in the parameter."""

    def __init__(
        self, owner: SwitchableModel, plan: LayerPlan, group: str, weight: torch.Tensor, stacking: Stacking
    ) -> None:
        super().__init__(owner, plan, group, weight, None)
        self.stacking = stacking

    def dense(self, index: int) -> torch.Tensor:
        """Returns the values `[out, in]` of one expert in the present format."""
        return self.owner.weights.dense(self, self.owner.current(self.group), index)

    def forward(self, input: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]`, in the order of the parameter's rows."""
        return self.stacking.outputs(super().forward(input, index))


class _Probe(torch.autograd.Function):
    """y = layer(x), with a backward that shows x and dL/dy to the model's observer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: SwitchableLayer, index: int | None
    ) -> torch.Tensor:
        # Only x: the weight is dequantized again in the backward pass, or comes from the cache of dense weights.
        ctx.save_for_backward(x)
        ctx.layer, ctx.index = layer, index
        return layer.compute(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        (gradient,) = gradients
        weight = layer.owner.weights.dense(layer, layer.owner.current(layer.group), ctx.index)
        # ∂L/∂x = ∂L/∂Y · W. No gradient of a weight is computed: nothing is trained.
        back = gradient @ weight.to(gradient.dtype)
        if layer.owner.observe is not None:
            layer.owner.observe(layer, LayerGradient(x, gradient, back, ctx.index))
        return back if ctx.needs_input_grad[0] else None, None, None, None


def same_tensor(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Returns whether two tensors share memory and shape.

    In a recomputed block every use of a tensor is another object.
    """
    return a is b or (a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape)
