"""The base of the layers in training: a weight in full precision, and the scales that it is rounded by.

Block scales are kept in one of three ways:

    recomputed    measured from the weight at each forward, by the `max` rule; fused layers share their global scale
    frozen        the scales that the layer started with
    learned       trained, by the parameter `range_shift` (`learned_scales.py`)

`weight` is an ordinary parameter, so optimizers, DDP, FSDP and gradient checkpointing see an ordinary layer. FSDP2 with
a `param_dtype`, which Trainers set for BF16, shows the layer a narrow copy of it. The loss is computed from that copy,
so the layer remembers its dtype (`trained_in`), and afterwards rounds the weight to it first: in training, evaluation
and packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from quant.base.errors import UserError
from quant.formats.format import Format
from quant.formats.format import E4M3, E8M0
from quant.formats.rounding import decode, decode_power_of_two, round_to
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale
from quant.kernels.training.weight_rounding import (
    as_stored_scale,
    group_amax,
    measured_global_scale,
    measured_scale,
    round_weight,
)
from quant.recipes.plan import Plan
from quant.training.rounding.fusion import Fusion
from quant.training.rounding.input_range import InputRange

# Learned block scales have a parameter in units of weights, for which an optimizer's usual settings are right.
#
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


def learned_step(start: torch.Tensor, shift: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the trained steps, float32: `start` where `shift` is zero.

    Args:
        start: the steps that training starts with, s0.
        shift: the parameter d, of the same shape.
        format: the format of the weight.
    """
    reach = (format.element.max * start.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return start * (shift.float() / reach).clamp(-_LARGEST, _LARGEST).exp()


def nearest_scale(step: torch.Tensor, format: Format, second: torch.Tensor | None, stored: torch.dtype) -> torch.Tensor:
    """Returns block scales nearest to `step` divided by the global scale.

    Gradients pass straight through the rounding.
    """
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


def whole_shift(shift: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns the parameter of another layer, which FSDP2 may keep sharded while this one runs.

    Args:
        shift: a tensor or a DTensor.
        dtype: the dtype to which FSDP2 casts the parameters of a layer that runs; None keeps them.
    """
    if not hasattr(shift, "full_tensor"):
        return shift
    whole: torch.Tensor = _Gathered.apply(shift)  # type: ignore[no-untyped-call]
    return whole if dtype is None else whole.to(dtype)


class _Gathered(torch.autograd.Function):
    """A sharded parameter as a whole tensor; its gradient is the mean over all ranks, as FSDP2's gradients are."""

    @staticmethod
    def forward(ctx: Any, sharded: Any) -> torch.Tensor:
        ctx.mesh, ctx.placements = sharded.device_mesh, sharded.placements
        return sharded.full_tensor()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial

        each = [Partial("sum")] * ctx.mesh.ndim
        whole: Any = DTensor.from_local(gradient / ctx.mesh.size(), ctx.mesh, each, run_check=False)
        # FSDP2 adds its own gradient of this parameter on another stream, and autograd would not wait for that.
        if gradient.is_cuda:
            torch.cuda.synchronize(gradient.device)
        return whole.redistribute(placements=ctx.placements)  # type: ignore[no-any-return]


SCALES = ("recomputed", "frozen", "learned")
PLAN = "_qat_plan"  # attribute of a prepared model
_EXACT = ("block_scale", "global_scale", "input_scale", "start_step")
_NARROW = (torch.float16, torch.bfloat16)


class Adapter(Protocol):
    """A trained matrix that is added to a frozen weight before rounding."""

    @property
    def version(self) -> tuple[int, ...]:
        """Grows with each change of its parameters in place."""
        ...

    def added(self) -> torch.Tensor | None:
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

    Attributes:
        range_shift: the parameter of learned scales. Layers that share a per-tensor scale share it: the first of them
            has it, with `start_step`.
        start_step: block scales times global scale at the start, which `range_shift` changes.
        fusion: the layers that share an input, and a global or per-tensor scale, with this one.
        trained_in: dtype that the weight has in the forward pass, which may be narrower than the parameter's.
        dtype_at_rest: the dtype of the parameter between forward passes.
        adapter: the adapter that is added to the weight before it is rounded.
        inputs: counts of inputs beyond a static input scale.
    """

    weight: nn.Parameter
    range_shift: nn.Parameter | None
    start_step: torch.Tensor | None
    block_scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    fusion: Fusion
    activation_format: Format | None = None
    input_scale: torch.Tensor | None
    adapter: Adapter | None = None

    def __init__(
        self, weight: nn.Parameter, start: BlockScaledTensor, scales: str, stored: torch.dtype, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.weight_format, self.scales, self.stored, self.dtype = start.format, scales, stored, dtype
        self.fusion, self.inputs = Fusion([self]), InputRange()
        self.trained_in = self.dtype_at_rest = weight.dtype
        values, second = decoded_scale(start), start.global_scale
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
    def trained_weight(self) -> torch.Tensor:
        """The weight that is rounded to the format, in the parameter's shape: with its adapter, in `trained_in`."""
        weight, added = self.weight, None if self.adapter is None else self.adapter.added()
        if added is not None:
            weight = (weight + added).to(weight.dtype)  # type: ignore[assignment]
        return weight if weight.dtype == self.trained_in else weight.to(self.trained_in)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as formats see it, `[..., out, in]`."""
        return self.trained_weight

    @property
    def shift(self) -> nn.Parameter | None:
        """The parameter of learned scales: this layer's own, or the first fused layer's."""
        if self.range_shift is None and self.scales == "learned":
            return self.fusion.members[0].range_shift
        return self.range_shift

    def step(self) -> torch.Tensor | None:
        """Returns learned block scales times global scale; None for scales that are not learned.

        A replica of nn.DataParallel takes shared scales from the original model, which is on another GPU.
        """
        shift, owner = self.shift, self if self.range_shift is not None else self.fusion.members[0]
        if shift is None:
            return None
        # Only FSDP2 shows a weight in another dtype than it has at rest.
        narrowed = self.trained_in if self.trained_in != owner.dtype_at_rest else None
        whole = whole_shift(shift, narrowed)
        if narrowed is not None:
            whole = whole.to(narrowed)
        assert owner.start_step is not None
        return learned_step(owner.start_step, whole, self.weight_format).to(self.weight.device)

    def remember_dtype(self) -> None:
        """Makes all fused layers round their weights to the dtype that this one's has in a forward pass."""
        dtype = self.weight.dtype
        if dtype != self.trained_in and dtype in _NARROW:
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

    def current_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
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

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight that the packed layer multiplies by, in `dtype`; it has gradients."""
        return self._round(self.matrix, dtype, *self.current_scales())

    def _round(
        self, weight: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, second: torch.Tensor | None
    ) -> torch.Tensor:
        return round_weight(
            weight, self.weight_format, dtype, scale=scale, global_scale=second, stored=self.stored,
            clips=self.scales != "recomputed",
        )  # fmt: skip

    @torch.no_grad()
    def packed_weight(self) -> BlockScaledTensor:
        """Returns the codes and scales of the weight as it is now."""
        scale, second = self.current_scales()
        weight, format = self.matrix.detach(), self.weight_format
        if scale is None:
            scale = measured_scale(weight, format, "max", second, self.stored)
        return quantize_with_scale(weight, format, scale.detach(), second)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoundedWeight:
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

    def get_extra_state(self) -> torch.Tensor:
        """Returns how the layer was prepared and trained, as bytes, which safetensors can hold.

        Their number is the same before and after training, as torch.distributed.checkpoint requires.
        """
        dtype = str(self.trained_in).removeprefix("torch.")
        text = f"{self._prepared_with()}\n{dtype:8}\n{self.inputs.passes:12}"
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Compares how the layer of the state was prepared, and goes on as that was trained.

        Raises:
            UserError: that layer was prepared differently from this one.
        """
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


def plan_in_training(model: nn.Module) -> Plan | None:
    """Returns the plan of a prepared model, or of a quantized one of transformers."""
    return getattr(model, PLAN, None) or getattr(model, "quantization_plan", None)


def decoded_scale(weight: BlockScaledTensor) -> torch.Tensor:
    """Returns block scale values without the global scale, float32."""
    return decode(weight.scale, weight.format.scale)
