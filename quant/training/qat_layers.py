"""Layers in training hold a weight in full precision, and multiply by the values that it will have when packed.

Block scales are kept in one of three ways:

    recomputed    measured from the weight at each forward, by the `max` rule; fused layers share their global scale
    frozen        the scales that the layer started with
    learned       trained, by the parameter `range_shift`

`weight` is an ordinary parameter, so optimizers, DDP, FSDP and gradient checkpointing see an ordinary layer. FSDP2 with
a `param_dtype`, which Trainers set for BF16, shows the layer a narrow copy of it. The loss is computed from that copy,
so the layer remembers its dtype (`trained_in`), and afterwards rounds the weight to it first: in training, evaluation
and packing.

`QATLinear`, `QATConv`, `QATExperts` and `QATEmbedding` take the places of `QuantLinear` and the other quantized
layers, with the same formats, input scale, rotation, branch and bias. Their forward is the reference arithmetic of
the packed layer with the rounding of weight and input as differentiable ops (`kernels/training/`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.base.errors import UserError
from quant.formats.format import E4M3, E8M0, Format
from quant.formats.rounding import decode, decode_power_of_two, round_to
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale
from quant.kernels.base.custom_ops import autocast_dtype, is_in_backward, is_traced
from quant.kernels.linear.conv import ConvGeometry, QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import ExpertStack, QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.kernels.training.fake_rounding import (
    as_stored_scale,
    group_amax,
    measured_global_scale,
    measured_scale,
    round_input,
    round_weight,
)
from quant.recipes.blocks import are_equal, take_over

SCALES = ("recomputed", "frozen", "learned")
PLAN = "_qat_plan"  # attribute of a prepared model
_EXACT = ("block_scale", "global_scale", "input_scale", "start_step")

# Layers that read the same input (q, k and v, or gate and up) share the rounded input and scales.
#
# In a forward pass the first of them prepares and rounds the input and finds the global scale that all share; each
# of the others takes both once. A result belongs to this very tensor and these very weights: another input, a weight
# that changed, or a second call of the same layer starts again. Nothing is shared while torch.compile records, which
# finds common expressions itself, or in replicas of nn.DataParallel.
#
# Gradient checkpointing runs a part of the model again in the backward pass, and that part must save the same tensors
# both times. A whole block does. But where each layer is a part by itself, the second run finds no results of another
# layer. Each part has its own hooks on saved tensors, and layers share results only under the same hooks. A pass that
# its last layer does not end is over when layers of another input start one, so that only one of all such passes in a
# model keeps its tensors.

# Of PyTorch 2.8 and later, and private: without it no layer knows in which part it runs, and nothing is shared.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@dataclass(eq=False)
class Common:
    """Results that the layers of one pass share, as far as one of them has computed them."""

    x: Tensor | None = None
    key: tuple[Any, ...] = ()
    members: Sequence[RoundedWeight] = ()  # none where a layer computes its own
    served: set[int] = field(default_factory=set)
    scales: tuple[Tensor | None, Tensor | None] | None = None  # as `current_scales` returns them
    seen: Tensor | None = None  # the input after scaling and rotation, as a low-rank branch takes it
    rounded: Tensor | None = None  # `seen` in the input format


class Fusion:
    """The layers that share an input, and a global or per-tensor scale of their weights; a linear may be alone."""

    _latest: ClassVar[weakref.ref[Fusion] | None] = None  # the fusion that started a pass last, in any model

    def __init__(self, members: Sequence[RoundedWeight]) -> None:
        self.members = tuple(members)
        self._pass: Common | None = None
        self._is_alike: bool | None = None

    def common(self, member: RoundedWeight, x: Tensor) -> Common:
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
            if (other := None if Fusion._latest is None else Fusion._latest()) is not None:
                other._pass = None
            Fusion._latest = weakref.ref(self)
            self._pass = shared = Common(x, key, self.members)
        shared.served.add(id(member))
        if len(shared.served) == len(self.members):
            self._pass = None  # nothing is kept beyond the pass
        return shared

    @property
    def is_alike(self) -> bool:
        """Whether all members round weights and inputs in the same way."""
        if self._is_alike is None:
            names = ("weight_format", "scales", "stored", "activation_format", "hadamard", "pre_scale", "input_scale")
            first, *others = ([getattr(member, name, None) for name in names] for member in self.members)
            self._is_alike = all(all(map(are_equal, first, other)) for other in others)
        return self._is_alike

    def forget(self) -> None:
        """Marks the members to be compared again, because their tensors may have changed."""
        self._pass = self._is_alike = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a model has no part in a pass of it, whose tensors cannot be copied.
        return {"members": self.members, "_pass": None, "_is_alike": None}


# A static input scale comes from calibration, and training changes the inputs of every layer. Inputs beyond the range
# are clipped and get no gradient, so a range that is too small is a lasting error. In the first passes that
# `prepare_qat(track_inputs=)` sets, the scale grows to the largest input so far:
#
#     scale <- max(scale, amax(x) / (largest code * largest block scale))
#
# It never shrinks: floating-point codes lose nothing by a range twice as large. In the same passes, and in every 16th
# pass after them, inputs beyond the range are counted, and `pack` warns of layers that clipped many. Compiled layers do
# neither, because a graph has no Python counter.

_EVERY = 16


@dataclass(eq=False)
class InputRange:
    """The inputs of a layer in training, as far as they concern its static scale."""

    follows: int = 0  # training passes in which the scale grows with the inputs
    passes: int = 0  # training passes so far
    seen: int = 0  # inputs that were looked at
    clipped: Tensor | None = None  # how many of them were beyond the range; None before the first
    is_called: bool = False  # whether a forward pass has reached the layer

    @property
    def share(self) -> float:
        """The share of inputs beyond the range."""
        return float(self.clipped) / self.seen if self.clipped is not None else 0.0


@torch.no_grad()
def watch_input(layers: Sequence[RoundedWeight], x: Tensor) -> None:
    """Lets the static input scales of layers, which are equal, follow `x`, and counts the values beyond them.

    The first of the layers counts. x is the input as it is rounded, `[..., in]`.
    """
    first = layers[0]
    # A pass inside of a backward pass is a repetition by gradient checkpointing, which must round as the first one did.
    if not first.training or first.input_scale is None or not x.numel() or is_traced() or is_in_backward():
        return
    format, inputs = first.activation_format, first.inputs
    assert format is not None
    passes = inputs.passes + 1
    for layer in layers:
        layer.inputs.passes = passes
    if passes > inputs.follows and passes % _EVERY != 1:
        return
    largest = format.element.max * (format.scale.max if format.global_scale else 1)
    magnitude = x.abs()
    if passes <= inputs.follows:
        reached = magnitude.amax().float() / largest
        for layer in layers:
            # A new tensor: the backward pass of an earlier forward may still need the old one as it was.
            assert layer.input_scale is not None
            layer.input_scale = torch.maximum(layer.input_scale, reached.to(layer.input_scale.device))
    beyond = (magnitude > largest * first.input_scale).sum()
    inputs.seen += x.numel()
    inputs.clipped = beyond if inputs.clipped is None else inputs.clipped.to(beyond.device) + beyond


# LSQ (Esser et al., 2020) trains the rounding step s of each block: block scale times global scale. The step itself is
# a poor parameter. AdamW moves each parameter by about the learning rate, which may be many times an FP8 step; weight
# decay draws steps to zero, where whole blocks vanish; and an update may make one negative. The parameter here is d
# with
#
#     s = s0 exp(d / r)        r = largest code * mean of s0
#
# so scales stay positive, and weight decay draws them to s0, the scales that the solver chose. To first order the range
# of an average block, largest code * s, grows by d: an update moves it as far as it moves the weights of the block.

# exp of 30 is 1e13, beyond every range of scales; without a limit a diverging parameter would give infinity and NaN.
_LARGEST = 30.0


def learned_step(start: Tensor, shift: Tensor, format: Format) -> Tensor:
    """Returns the trained steps s, float32, from s0 (`start`) and d (`shift`), of one shape."""
    reach = (format.element.max * start.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return start * (shift.float() / reach).clamp(-_LARGEST, _LARGEST).exp()


def nearest_scale(step: Tensor, format: Format, second: Tensor | None, stored: torch.dtype) -> Tensor:
    """Returns block scales nearest to `step` divided by the global scale; gradients pass through the rounding."""
    exact = step if second is None else step / second.float()[..., None, None]
    with torch.no_grad():
        # The smallest scale of each format takes the place of zero, by which nothing could be divided. E8M0's codes are
        # exponents plus 127.
        if format.scale is E4M3:
            nearest = round_to(exact.clamp(min=E4M3.min_subnormal), E4M3)
        elif format.scale is E8M0:
            exponent = exact.clamp(min=2.0**-127).log2().round()
            nearest = decode_power_of_two((exponent.clamp(-127, 127) + 127).to(torch.uint8))
        else:
            tiny = torch.finfo(torch.float32).tiny
            nearest = as_stored_scale(round_to(exact.clamp(min=tiny), format.scale), format, stored)
    return nearest + (exact - exact.detach())  # the value of `nearest`, the gradient of `exact`


class _Gathered(torch.autograd.Function):
    """A sharded parameter as a whole tensor; its gradient is the mean over all ranks, as FSDP2's gradients are."""

    @staticmethod
    def forward(ctx: Any, sharded: Any) -> Tensor:
        ctx.mesh, ctx.placements = sharded.device_mesh, sharded.placements
        return sharded.full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial

        each = [Partial("sum")] * ctx.mesh.ndim
        whole: Any = DTensor.from_local(gradient / ctx.mesh.size(), ctx.mesh, each, run_check=False)
        # FSDP2 adds its own gradient of this parameter on another stream, and autograd would not wait for that.
        if gradient.is_cuda:
            torch.cuda.synchronize(gradient.device)
        return whole.redistribute(placements=ctx.placements)


class Adapter(Protocol):
    """A trained matrix that is added to a frozen weight before rounding."""

    @property
    def version(self) -> tuple[int, ...]:
        """Grows with each change of its parameters in place."""
        ...

    def added(self) -> Tensor | None:
        """Returns the matrix to add, in the shape of the weight; None while it is off, or merged."""
        ...


class RoundedWeight(nn.Module):
    """A weight in full precision, and the scales that it is rounded by.

    Args:
        weight: trained; `matrix` is the `[..., out, in]` that formats see of it.
        start: the quantized weight that `weight` rounds to at the start.
        scales: one of `SCALES`.
        stored: dtype of the checkpoint, to which float scales are rounded.
        dtype: the dtype of the weight's values in the layer that this one replaces.
    """

    weight: nn.Parameter
    # The parameter of learned scales. Layers that share a per-tensor scale share it: the first of them has it, with
    # `start_step`, block scales times global scale at the start.
    range_shift: nn.Parameter | None
    start_step: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    activation_format: Format | None = None
    input_scale: Tensor | None
    adapter: Adapter | None = None

    def __init__(
        self, weight: nn.Parameter, start: BlockScaledTensor, scales: str, stored: torch.dtype, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.weight_format, self.scales, self.stored, self.dtype = start.format, scales, stored, dtype
        self.fusion, self.inputs = Fusion([self]), InputRange()
        # Of the weight in a forward pass, and of the parameter between them.
        self.trained_in = self.dtype_at_rest = weight.dtype
        values, second = decode(start.scale, start.format.scale), start.global_scale
        # The rounding step is trained, the product of both levels; the global scale stays fixed.
        step = None
        if scales == "learned":
            step = values.clone() if second is None else values * second.float()[..., None, None]
        self.register_buffer("input_scale", None)
        self.register_buffer("start_step", step)
        self.register_parameter("range_shift", None if step is None else nn.Parameter(torch.zeros_like(step)))
        self.register_buffer("block_scale", values.clone() if scales == "frozen" else None)
        self.register_buffer("global_scale", None if second is None or scales == "recomputed" else second.clone())

    @property
    def trained_weight(self) -> Tensor:
        """The weight that is rounded to the format, in the parameter's shape: with its adapter, in `trained_in`."""
        weight, added = self.weight, None if self.adapter is None else self.adapter.added()
        if added is not None:
            weight = (weight + added).to(weight.dtype)  # type: ignore[assignment]
        return weight if weight.dtype == self.trained_in else weight.to(self.trained_in)

    @property
    def matrix(self) -> Tensor:
        """The weight as formats see it, `[..., out, in]`."""
        return self.trained_weight

    @property
    def shift(self) -> nn.Parameter | None:
        """The parameter of learned scales: this layer's own, or the first fused layer's."""
        if self.range_shift is None and self.scales == "learned":
            return self.fusion.members[0].range_shift
        return self.range_shift

    def step(self) -> Tensor | None:
        """Returns learned block scales times global scale; None for scales that are not learned.

        A replica of nn.DataParallel takes shared scales from the original model, which is on another GPU.
        """
        shift, owner = self.shift, self if self.range_shift is not None else self.fusion.members[0]
        if shift is None:
            return None
        # FSDP2 may keep the parameter of another layer sharded while this one runs.
        whole = _Gathered.apply(shift) if hasattr(shift, "full_tensor") else shift  # type: ignore[no-untyped-call]
        # Only FSDP2 shows a weight in another dtype than it has at rest.
        if self.trained_in != owner.dtype_at_rest:
            whole = whole.to(self.trained_in)
        assert owner.start_step is not None
        return learned_step(owner.start_step, whole, self.weight_format).to(self.weight.device)

    def remember_dtype(self) -> None:
        """Makes all fused layers round their weights to the dtype that this one's has as a forward pass begins."""
        self.inputs.is_called, dtype = True, self.weight.dtype
        if dtype != self.trained_in and dtype in (torch.float16, torch.bfloat16):
            for member in (self, *self.fusion.members):
                member.trained_in = dtype

    @property
    def version(self) -> tuple[int, ...]:
        """Grows with each change of the weight in place."""
        return (self.weight._version, *(() if self.adapter is None else self.adapter.version))

    @property
    def measures_level(self) -> bool:
        """Whether the global or per-tensor scale is measured again at each forward, from all fused layers."""
        return self.scales == "recomputed" and self.weight_format.is_static

    def trained(self) -> list[nn.Parameter]:
        """Returns the weight, and its scales where they are learned."""
        return [self.weight, *([] if (shift := self.shift) is None else [shift])]

    def current_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns block scale values, or None where rounding measures them, and the global scale."""
        format, device = self.weight_format, self.weight.device
        if (step := self.step()) is not None:
            return nearest_scale(step, format, self.global_scale, self.stored), self.global_scale
        if not self.measures_level:
            return self.block_scale, self.global_scale
        # One amax for all fused layers: the runtime multiplies their stacked weights under one scale.
        with torch.no_grad():
            members = [each.matrix.detach().to(device) for each in self.fusion.members]
            if format.global_scale:
                return None, measured_global_scale(members, format)
            amax = group_amax(members)
            return as_stored_scale(choose_scale(self.matrix, format, "max", amax, None), format, self.stored), None

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight that the packed layer multiplies by, in `dtype`; it has gradients."""
        return self._round(self.matrix, dtype, *self.current_scales())

    def _round(self, weight: Tensor, dtype: torch.dtype, scale: Tensor | None, second: Tensor | None) -> Tensor:
        clips = self.scales != "recomputed"
        format, stored = self.weight_format, self.stored
        return round_weight(weight, format, dtype, scale=scale, global_scale=second, stored=stored, clips=clips)

    @torch.no_grad()
    def packed_weight(self) -> BlockScaledTensor:
        """Returns the codes and scales of the weight as it is now."""
        scale, second = self.current_scales()
        weight, format = self.matrix.detach(), self.weight_format
        if scale is None:
            scale = measured_scale(weight, format, "max", second, self.stored)
        return quantize_with_scale(weight, format, scale.detach(), second)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundedWeight:
        self.fusion.forget()
        # `model.to(bfloat16)` would round scales to BF16, and the weight would round to other codes than before: scales
        # move between devices and keep their dtype.
        before = {name: tensor for name in _EXACT if (tensor := getattr(self, name, None)) is not None}
        shift, dtype = None if self.range_shift is None else self.range_shift.data, self.weight.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            if getattr(self, name).dtype != tensor.dtype:
                setattr(self, name, tensor.to(getattr(self, name).device))
        if self.range_shift is not None and shift is not None and self.range_shift.dtype != shift.dtype:
            self.range_shift.data = shift.to(self.range_shift.device)
        if self.weight.dtype != dtype:
            self.trained_in = self.dtype_at_rest = self.weight.dtype
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _prepared_with(self) -> str:
        """Returns the settings that a saved state of this layer depends on."""
        facts = [str(self.weight_format), f"input {self.activation_format}", f"scales {self.scales}"]
        facts += [f"rotation {size}"] if (size := getattr(self, "hadamard", 0)) else []
        facts += [name for name in ("pre_scale", "lowrank_down") if getattr(self, name, None) is not None]
        return ", ".join(facts)

    def get_extra_state(self) -> Tensor:
        """Returns how the layer was prepared and trained, as bytes, which safetensors can hold.

        Their number is the same before and after training, as torch.distributed.checkpoint requires.
        """
        dtype = str(self.trained_in).removeprefix("torch.")
        text = f"{self._prepared_with()}\n{dtype:8}\n{self.inputs.passes:12}"
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Goes on as the layer of the state was trained; UserError if that one was prepared differently."""
        text, own = bytes(state.tolist()).decode(errors="replace"), self._prepared_with()
        saved, *trained = text.split("\n")
        if saved != own:
            raise UserError(
                f"the weights to load are of a model that was prepared differently: a layer in training has ({saved}) "
                f"there and ({own}) here; prepare this model with the same plan, solver and scales"
            )
        if len(trained) == 2:
            self.trained_in, self.inputs.passes = getattr(torch, trained[0].strip()), int(trained[1])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.fusion.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{list(self.weight.shape)}, weight={self.weight_format}, scales={self.scales}"
        return text if self.activation_format is None else f"{text}, activation={self.activation_format}"


class QATLinear(RoundedWeight, nn.Linear):  # type: ignore[misc]
    """A linear layer in training, from the quantized one; for `scales` and `stored` see `RoundedWeight`."""

    def __init__(
        self, weight: nn.Parameter, packed: QuantLinear, bias: nn.Parameter | None, scales: str, stored: torch.dtype
    ) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self.activation_format, self.hadamard = packed.activation_format, packed.hadamard
        for name in ("input_scale", "pre_scale", "lowrank_down", "lowrank_up"):
            self.register_buffer(name, getattr(packed, name))

    @property
    def parts(self) -> RunTimeParts:
        """The run-time work in addition to the matmul."""
        lowrank = None if self.lowrank_down is None else (self.lowrank_down, self.lowrank_up)
        return RunTimeParts(self.pre_scale, self.hadamard, lowrank)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`, as the packed layer computes it."""
        x = input
        if hasattr(x, "to_local"):
            raise UserError("QAT layers take no DTensor (tensor parallelism); wrap the model in DDP or FSDP2")
        self.remember_dtype()
        parts, common = self.parts, self.fusion.common(self, x)
        if common.rounded is None:
            common.seen = parts.input(x)
            common.rounded = common.seen.to(_computed_dtype(x))
            if self.activation_format is not None:
                watch_input([self, *(each for each in common.members if each is not self)], common.rounded)
                common.rounded = round_input(common.rounded, self.activation_format, self.input_scale)
        # y = Q(W) · Q(H (x · s)) + bias + U (D · H (x · s)), with the factor s, the rotation H and the branch U D.
        if common.scales is None or not self.measures_level:
            common.scales = self.current_scales()
        rounded = common.rounded
        bias = None if self.bias is None else self.bias.to(rounded.dtype)
        y = functional.linear(rounded, self._round(self.matrix, rounded.dtype, *common.scales), bias)
        branch = parts.branch(common.seen)  # type: ignore[arg-type]
        return y if branch is None else y + branch

    def packed(self) -> QuantLinear:
        options = {"dtype": self.dtype, **vars(self.parts)}
        return QuantLinear(self.packed_weight(), self.bias, self.activation_format, self.input_scale, **options)


class QATConv(RoundedWeight, ConvGeometry, nn.modules.conv._ConvNd):  # type: ignore[misc]
    """A convolution in training, with `weight` in the shape of the original one."""

    def __init__(
        self, weight: nn.Parameter, packed: QuantConv, bias: nn.Parameter | None, scales: str, stored: torch.dtype
    ) -> None:
        super().__init__(weight, packed.stored_weight, scales, stored, packed.dtype)
        self.take_geometry(packed)
        self.register_parameter("bias", bias)
        self.activation_format = packed.activation_format
        self.register_buffer("input_scale", packed.input_scale)

    @property
    def matrix(self) -> Tensor:
        """The weight `[out, in / groups · kernel]`."""
        return conv_matrix(self.trained_weight, self.groups, self.transposed)

    def convolve(self, x: Tensor, output_padding: Sequence[int]) -> Tensor:
        self.remember_dtype()
        x = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            samples = x.contiguous().flatten(1)
            watch_input([self], samples)
            x = round_input(samples, self.activation_format, self.input_scale).view(x.shape)
        weight = conv_parameter(self.rounded(x.dtype), self.weight.shape, self.groups, self.transposed)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.convolution(
            x, weight, bias, self.stride, self.op_padding, self.dilation, self.transposed, output_padding, self.groups
        )

    def packed(self) -> QuantConv:
        conv = QuantConv(self.packed_weight(), self, self.activation_format, self.input_scale)
        conv.dtype = self.dtype
        return conv


class QATExperts(RoundedWeight, ExpertStack):
    """The weights `[experts, out, in]` of one projection in training."""

    runs_grouped = False

    def __init__(self, weight: nn.Parameter, packed: QuantExperts, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.activation_format, self.stacking = packed.activation_format, packed.stacking
        self.register_buffer("input_scale", packed.input_scale)
        self._matrices: Sequence[Tensor] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Takes the experts apart once while open, so that their gradients are put together once."""
        self.remember_dtype()
        self._matrices = self.trained_weight.unbind(0)
        try:
            yield
        finally:
            self._matrices = None

    @property
    def multiplies_values(self) -> bool:
        return self.activation_format is None

    def dense(self, index: int) -> Tensor:
        """Returns the rounded values `[out, in]` of one expert."""
        return self._one(index, self.dtype)

    def product(self, x: Tensor, index: int) -> Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`."""
        operand = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            watch_input([self], operand)
            operand = round_input(operand, self.activation_format, self.input_scale)
        return functional.linear(operand, self._one(index, operand.dtype))

    def _one(self, index: int, dtype: torch.dtype) -> Tensor:
        self.remember_dtype()
        scale, second = self.current_scales()
        matrix = (self.trained_weight if self._matrices is None else self._matrices)[index]
        own = None if scale is None else scale[index]
        return self._round(matrix, dtype, own, None if second is None else second[index])

    def packed(self) -> QuantExperts:
        scale: Any = self.input_scale
        return QuantExperts(self.packed_weight(), self.activation_format, scale, self.dtype, self.stacking)


class QATEmbedding(RoundedWeight):
    """An embedding in training."""

    def __init__(self, weight: nn.Parameter, packed: QuantEmbedding, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = packed.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[...]` to `[..., dim]`."""
        self.remember_dtype()
        return functional.embedding(input, self.rounded(self.dtype), self.padding_idx)

    def packed(self) -> QuantEmbedding:
        return QuantEmbedding(self.packed_weight(), self.dtype, self.padding_idx)


def _computed_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which `quant::linear` multiplies `x`: autocast's where it is on."""
    return x.dtype if x.dtype is torch.float64 else autocast_dtype(x) or x.dtype


Packed = QuantLinear | QuantConv | QuantExperts | QuantEmbedding
"""The quantized layers."""


def put_layer(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces a layer of a model, whose hooks, mode and users' attributes the new one has."""
    parent, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    take_over(module, old)
    module.train(old.training)
    setattr(model.get_submodule(parent), last, module)
