"""Layers in training that read the same input (q, k and v, or gate and up) share the rounded input and scales.

In a forward pass the first of them prepares and rounds the input and finds the global scale that all share; each
of the others takes both once. A result belongs to this very tensor and these very weights: another input, a weight that
changed, or a second call of the same layer starts again. Nothing is shared while torch.compile records, which finds
common expressions itself, or in replicas of nn.DataParallel.

Gradient checkpointing runs a part of the model again in the backward pass, and that part must save the same tensors
both times. A whole block does. But where each layer is a part by itself, the second run finds no results of another
layer. Each part has its own hooks on saved tensors, and layers share results only under the same hooks. A pass that its
last layer does not end is over when layers of another input start one, so that only one of all such passes in a model
keeps its tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from quant.kernels.linear.ops import autocast_dtype, is_traced

if TYPE_CHECKING:
    from quant.training.rounding.rounded_weight import RoundedWeight

# Of PyTorch 2.8 and later, and private: without it no layer knows in which part it runs, and nothing is shared.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Scales = tuple[torch.Tensor | None, torch.Tensor | None]


class Common:
    """Results that the layers of one pass share, as far as one of them has computed them.

    Attributes:
        scales: block scales, or None where rounding measures them, and the global scale.
        seen: the input after scaling and rotation at run time, as a low-rank branch takes it.
        rounded: `seen` rounded to the input format, as it multiplies the weights.
        members: the layers that take these results; none where a layer computes its own.
    """

    __slots__ = ("key", "members", "rounded", "scales", "seen", "served", "x")

    def __init__(
        self, x: torch.Tensor | None = None, key: tuple[Any, ...] = (), members: Sequence[RoundedWeight] = ()
    ) -> None:
        self.x, self.key, self.members = x, key, members
        self.served: set[int] = set()
        self.scales: Scales | None = None
        self.seen: torch.Tensor | None = None
        self.rounded: torch.Tensor | None = None


class Fusion:
    """The layers that share an input, and a global or per-tensor scale of their weights.

    Args:
        members: one or more members; a linear alone is its own group.
    """

    _latest: ClassVar[weakref.ref[Fusion] | None] = None  # the fusion that started a pass last, in any model

    def __init__(self, members: Sequence[RoundedWeight]) -> None:
        self.members = tuple(members)
        self._pass: Common | None = None
        self._is_alike: bool | None = None

    def common(self, member: RoundedWeight, x: torch.Tensor) -> Common:
        """Returns the results for `x` of members that ran before `member`; empty for the first of them."""
        if len(self.members) == 1 or _top_hooks is None or is_traced() or x.is_inference():
            return Common()
        if not self.is_alike or getattr(member, "_is_replica", False):  # replicas run at the same time
            return Common()
        # In-place changes raise a tensor's version, so a key is the values of the input and of all members' weights.
        weights = (each.version for each in self.members)
        key = (x._version, torch.is_grad_enabled(), autocast_dtype(x), _top_hooks(True), *weights)
        shared = self._pass
        if shared is None or shared.x is not x or shared.key != key or id(member) in shared.served:
            shared = self._start(Common(x, key, self.members))
        shared.served.add(id(member))
        if len(shared.served) == len(self.members):
            self._pass = None  # nothing is kept beyond the pass
        return shared

    def _start(self, common: Common) -> Common:
        other = None if Fusion._latest is None else Fusion._latest()
        if other is not None:
            other._pass = None
        Fusion._latest = weakref.ref(self)
        self._pass = common
        return common

    @property
    def is_alike(self) -> bool:
        """Whether all members round weights and inputs in the same way."""
        if self._is_alike is None:
            first, *other_settings = map(_settings, self.members)
            self._is_alike = all(all(map(_equal, first, other)) for other in other_settings)
        return self._is_alike

    def forget(self) -> None:
        """Marks the members to be compared again, because their tensors may have changed."""
        self._pass = self._is_alike = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a model has no part in a pass of it, whose tensors cannot be copied.
        return {"members": self.members, "_pass": None, "_is_alike": None}


def _settings(member: Any) -> tuple[Any, ...]:
    """Returns the settings by which a layer rounds its weight and its input."""
    names = ("weight_format", "scales", "stored", "activation_format", "hadamard", "pre_scale", "input_scale")
    return tuple(getattr(member, name, None) for name in names)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
