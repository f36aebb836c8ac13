"""`TokenProducts` estimates the change of a loss by formats, to first and second order, in one backward pass.

With Y = x Wᵀ and, in a format, Y_q = x_q W_qᵀ, a token's term is

    ∂L/∂Y · (Y_q − Y) = (∂L/∂Y · (W_q − W)) · x_q + (∂L/∂Y · W) · (x_q − x)

and for a branch (see `switchable_model`) ∂L/∂Y · ((x − x_q) (B A)ᵀ) besides, so neither output is ever formed: a format
costs one more product with the output gradient, while the backward pass is at that layer anyway. Members of a group are
added up before any square, because their errors reach the loss together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.linalg import vecdot

from quant.calibration.sensitivity.divergence import finite_sum
from quant.calibration.sensitivity.switchable_model import (
    LayerGradient,
    SwitchableLayer,
    SwitchableModel,
    recomputed,
    same_tensor,
)
from quant.calibration.sensitivity.table import KEPT, Candidate
from quant.calibration.sensitivity.work_units import Result

# Inputs of all layers of a batch that autograd may hold; above this, blocks are recomputed in the backward pass.
_ACTIVATION_BYTES = 2 << 30

Allowed = Mapping[str, Sequence[Candidate]]
"""The formats that each fusion group may take."""


class TokenProducts:
    """∂L/∂Y · (Y_q − Y) of each token, by group and format, summed over the members of the group.

    Members of a group share their input and follow each other in a backward pass. So a layer with another input begins
    a new call, and the sums over tokens of the call before are complete.
    """

    def __init__(self, switchable: SwitchableModel, allowed: Allowed) -> None:
        self.switchable, self.allowed = switchable, allowed
        self.group = ""
        self.input: torch.Tensor | None = None
        self.products: dict[str, torch.Tensor] = {}
        self.square: Result = {}
        self.linear: Result = {}

    def observe(self, layer: SwitchableLayer, call: LayerGradient) -> None:
        """Adds one call of a layer."""
        group, switchable = layer.group, self.switchable
        if self.group != group or not same_tensor(self.input, call.x):
            self._flush()
            self.group, self.input = group, call.x
        now = switchable.current(group)
        x_now = switchable.round_input(group, call.x, now)
        for candidate in {c.name: c for c in (*self.allowed[group], KEPT)}.values():
            if candidate.name == now.name:
                continue
            x = switchable.round_input(group, call.x, candidate)
            # (∂L/∂Y · W) · (x_q − x), with the weight and input of the present format in the place of W and x.
            product = vecdot(call.back, x - x_now)
            change = switchable.weights.difference(layer, candidate, now, call.index)
            if change is not None:
                # (∂L/∂Y · (W_q − W)) · x_q
                product = product + vecdot((call.gradient.to(change.dtype) @ change).to(x.dtype), x)
            # The branch of the new format is added, the branch of the present format subtracted.
            for each, rounded, sign in ((candidate, x, 1), (now, x_now, -1)):
                unrounded = switchable.weights.branch_output(layer, each, call.x, rounded)
                if unrounded is not None:
                    product = product + sign * vecdot(call.gradient, unrounded)
            self.products[candidate.name] = self.products.get(candidate.name, 0.0) + product.flatten()

    def squares(self) -> Result:
        """Returns the sum over tokens of the squared products."""
        self._flush()
        return self.square

    def sums(self) -> Result:
        """Returns the sum over tokens of the products: the change of the loss, to first order."""
        self._flush()
        return self.linear

    def _flush(self) -> None:
        for name, product in self.products.items():
            name_token = partial("{}, token {}".format, f"{self.group} in {name}")
            for sums, value in ((self.square, product.square()), (self.linear, product)):
                by_format = sums.setdefault(self.group, {})
                by_format[name] = by_format.get(name, 0.0) + finite_sum(value, name_token, "its score")
        self.products, self.input = {}, None
        self.switchable.forget_inputs()


@contextmanager
def observed(switchable: SwitchableModel, observe: Callable[..., None], tokens: int) -> Iterator[None]:
    """Shows every layer's input and output gradient to `observe` in backward passes over `tokens` tokens, while open.

    If the activations of all blocks are too large for autograd to keep, it keeps the blocks' inputs and runs each
    block again in the backward pass.
    """
    # Bytes of one token's inputs and outputs in all layers.
    features = sum(sum(layer.plan.shape[-2:]) * layer.original.dtype.itemsize for layer in switchable.layers.values())
    names = switchable.blocks if 2 * tokens * features > _ACTIVATION_BYTES else []
    switchable.observe = observe
    try:
        with recomputed(switchable.model, names):
            yield
    finally:
        switchable.observe = None
