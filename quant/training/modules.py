"""Layers in training hold a weight in full precision, and multiply by the values that it will have when packed.

`QATLinear`, `QATConv`, `QATExperts` and `QATEmbedding` stand where `QuantLinear` and its like will: with the same
formats, input scale, rotation, branch and bias. Their forward is the reference arithmetic of the packed layer with the
rounding of weight and input as differentiable ops (`kernels/training/`). Each keeps its block scales in one of three
ways:

    recomputed    measured from the weight at each forward, by the `max` rule; fused layers share their second level
    frozen        those that the layer started with
    learned       a parameter `block_step`, block scale times second level, rounded to the format's scale

`weight` is an ordinary parameter, so optimizers, DDP, FSDP and gradient checkpointing see an ordinary layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.errors import UserError
from quant.formats.format import Format
from quant.formats.number import E4M3, E8M0
from quant.formats.rounding import decode, decode_power_of_two, round_to
from quant.formats.tensor import BlockScaledTensor, choose_scale, quantize_with_scale
from quant.kernels.linear.conv import ConvGeometry, QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.expert_modules import QuantExperts
from quant.kernels.linear.expert_stack import ExpertStack
from quant.kernels.linear.modules import QuantLinear, RunTimeParts
from quant.kernels.linear.ops import autocast_dtype
from quant.kernels.training.input_rounding import round_input
from quant.kernels.training.weight_rounding import (
    as_stored_scale,
    group_amax,
    measured_global_scale,
    measured_scale,
    round_weight,
)
from quant.recipes.plan import Plan
from quant.training.fusion import Fusion

SCALES = ("recomputed", "frozen", "learned")
PLAN = "_qat_plan"  # attribute of a prepared model
_EXACT = ("block_scale", "global_scale", "input_scale")


class RoundedWeight(nn.Module):
    """A weight in full precision, and the scales that it is rounded by.

    Args:
        weight: trained; `matrix` is the `[..., out, in]` that formats see of it.
        start: the quantized weight that `weight` rounds to at the start.
        scales: one of `SCALES`.
        stored: dtype of the checkpoint, to which float scales are rounded.
        dtype: of the layer that this one stands for, when its weight is read.

    Attributes:
        block_step: learned scales. Layers that share a per-tensor scale share it: the first of them has it.
        fusion: the layers that share an input, and a second-level or per-tensor scale, with this one.
    """

    weight: nn.Parameter
    block_step: nn.Parameter | None
    block_scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    fusion: Fusion
    activation_format: Format | None = None

    def __init__(
        self, weight: nn.Parameter, start: BlockScaledTensor, scales: str, stored: torch.dtype, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.weight_format, self.scales, self.stored, self.dtype = start.format, scales, stored, dtype
        self.fusion = Fusion([self])
        values, second = decoded_scale(start), start.global_scale
        # LSQ (Esser et al., 2020) trains the rounding step, the product of both levels; the second level stays fixed.
        step = None
        if scales == "learned":
            step = values if second is None else values * second.float()[..., None, None]
        self.register_parameter("block_step", None if step is None else nn.Parameter(step.clone()))
        self.register_buffer("block_scale", values.clone() if scales == "frozen" else None)
        self.register_buffer("global_scale", None if second is None or scales == "recomputed" else second.clone())

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as formats see it, `[..., out, in]`."""
        return self.weight

    @property
    def step(self) -> nn.Parameter | None:
        """Learned scales: this layer's own, or those that the first of the fused layers has for all."""
        if self.block_step is None and self.scales == "learned":
            return self.fusion.members[0].block_step
        return self.block_step

    @property
    def measures_level(self) -> bool:
        """Whether the second-level or per-tensor scale is measured anew at each forward, from all fused layers."""
        return self.scales == "recomputed" and self.weight_format.is_static

    def trained(self) -> list[nn.Parameter]:
        """The weight, and its scales where they are learned."""
        return [self.weight, *([] if (step := self.step) is None else [step])]

    def current_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Block scale values, or None where rounding measures them, and the second level.

        A replica of nn.DataParallel takes shared scales from the original model, which is on another GPU.
        """
        format, weight = self.weight_format, self.matrix
        if (step := self.step) is not None:
            return _nearest_scale(step.to(weight.device), format, self.global_scale, self.stored), self.global_scale
        if not self.measures_level:
            return self.block_scale, self.global_scale
        # One amax for all fused layers: the runtime multiplies their stacked weights under one scale.
        with torch.no_grad():
            members = [each.matrix.detach().to(weight.device) for each in self.fusion.members]
            if format.global_scale:
                return None, measured_global_scale(members, format)
            amax = group_amax(members)
            return as_stored_scale(choose_scale(weight, format, "max", amax, None), format, self.stored), None

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the packed layer multiplies by, in `dtype`; it has gradients."""
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
        """Codes and scales of the weight as it is now."""
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
        step = None if self.block_step is None else self.block_step.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            if getattr(self, name).dtype != tensor.dtype:
                setattr(self, name, tensor.to(getattr(self, name).device))
        if self.block_step is not None and step is not None and self.block_step.dtype != step.dtype:
            self.block_step.data = step.to(self.block_step.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _prepared_with(self) -> str:
        """The settings that a saved state of this layer depends on."""
        facts = [str(self.weight_format), f"input {self.activation_format}", f"scales {self.scales}"]
        facts += [f"rotation {size}"] if (size := getattr(self, "hadamard", 0)) else []
        facts += [name for name in ("pre_scale", "lowrank_down") if getattr(self, name, None) is not None]
        return ", ".join(facts)

    def get_extra_state(self) -> torch.Tensor:
        """How the layer was prepared, as bytes, which safetensors can hold."""
        return torch.tensor(list(self._prepared_with().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Compares how the layer of the state was prepared.

        Raises:
            UserError: otherwise than this one.
        """
        saved, own = bytes(state.tolist()).decode(errors="replace"), self._prepared_with()
        if saved != own:
            raise UserError(
                f"the weights to load are of a model that was prepared otherwise: a layer in training has ({saved}) "
                f"there and ({own}) here; prepare this model with the same plan, solver and scales"
            )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.fusion.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{list(self.weight.shape)}, weight={self.weight_format}, scales={self.scales}"
        return text if self.activation_format is None else f"{text}, activation={self.activation_format}"


class QATLinear(RoundedWeight, nn.Linear):  # type: ignore[misc]
    """A linear layer in training.

    Args:
        weight: `[out, in]`.
        packed: the quantized layer that it starts from.
        bias: `[out]`, or None; the packed layer's, or the original layer's own parameter.
        scales, stored: see `RoundedWeight`.
    """

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, as the packed layer computes it."""
        parts, common = self.parts, self.fusion.common(self, x)
        if common.rounded is None:
            common.seen = parts.input(x)
            common.rounded = common.seen.to(_computed_dtype(x))
            if self.activation_format is not None:
                common.rounded = round_input(common.rounded, self.activation_format, self.input_scale)  # type: ignore[arg-type]
        # y = Q(W) · Q(H (x · s)) + bias + U (D · H (x · s)), with the factor s, the rotation H and the branch U D.
        if common.scales is None or not self.measures_level:
            common.scales = self.current_scales()
        rounded = common.rounded
        bias = None if self.bias is None else self.bias.to(rounded.dtype)
        y = functional.linear(rounded, self._round(self.weight, rounded.dtype, *common.scales), bias)
        branch = parts.branch(common.seen)  # type: ignore[arg-type]
        return y if branch is None else y + branch

    def packed(self) -> QuantLinear:
        """The packed layer."""
        return QuantLinear(
            self.packed_weight(), self.bias, self.activation_format, self.input_scale,  # type: ignore[arg-type]
            dtype=self.dtype, **vars(self.parts),
        )  # fmt: skip


class QATConv(RoundedWeight, ConvGeometry, nn.modules.conv._ConvNd):  # type: ignore[misc]
    """A convolution in training; arguments are those of `QATLinear`, with `weight` in the shape of the original one."""

    def __init__(
        self, weight: nn.Parameter, packed: QuantConv, bias: nn.Parameter | None, scales: str, stored: torch.dtype
    ) -> None:
        super().__init__(weight, packed.stored_weight, scales, stored, packed.dtype)
        self.take_geometry(packed)
        self.register_parameter("bias", bias)
        self.activation_format = packed.activation_format
        self.register_buffer("input_scale", packed.input_scale)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight `[out, in / groups · kernel]`."""
        return conv_matrix(self.weight, self.groups, self.transposed)

    def convolve(self, x: torch.Tensor, output_padding: Sequence[int]) -> torch.Tensor:
        """As the packed layer computes it."""
        x = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            samples = x.contiguous().flatten(1)
            x = round_input(samples, self.activation_format, self.input_scale).view(x.shape)  # type: ignore[arg-type]
        weight = conv_parameter(self.rounded(x.dtype), self.weight.shape, self.groups, self.transposed)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.convolution(
            x, weight, bias, self.stride, self.op_padding, self.dilation, self.transposed, output_padding, self.groups
        )

    def packed(self) -> QuantConv:
        """The packed convolution."""
        conv = QuantConv(self.packed_weight(), self, self.activation_format, self.input_scale)  # type: ignore[arg-type]
        conv.dtype = self.dtype
        return conv


class QATExperts(RoundedWeight, ExpertStack):
    """The weights `[experts, out, in]` of one projection in training. Arguments are those of `QATLinear`."""

    runs_grouped = False

    def __init__(self, weight: nn.Parameter, packed: QuantExperts, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed.dtype)
        self.activation_format, self.stacking = packed.activation_format, packed.stacking
        self.register_buffer("input_scale", packed.input_scale)
        self._matrices: Sequence[torch.Tensor] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While open, the experts are taken apart once, so that their gradients are put together once."""
        self._matrices = self.weight.unbind(0)
        try:
            yield
        finally:
            self._matrices = None

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """One expert as the parameter holds it, or several. Without rounded inputs, these are rounded values."""
        if self.activation_format is None and not (isinstance(index, torch.Tensor) and index.dim()):
            return self.stacking.hold(self.dense(int(index)))
        return super().__getitem__(index)

    def dense(self, index: int) -> torch.Tensor:
        """The rounded values `[out, in]` of one expert."""
        return self._one(index, self.dtype)

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """`[tokens, in]` to `[tokens, out]` through expert `index`."""
        operand = x.to(_computed_dtype(x))
        if self.activation_format is not None:
            operand = round_input(operand, self.activation_format, self.input_scale)  # type: ignore[arg-type]
        return functional.linear(operand, self._one(index, operand.dtype))

    def _one(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        scale, second = self.current_scales()
        matrix = (self.weight if self._matrices is None else self._matrices)[index]
        own = None if scale is None else scale[index]
        return self._round(matrix, dtype, own, None if second is None else second[index])

    def packed(self) -> QuantExperts:
        """The packed experts."""
        scale: Any = self.input_scale
        return QuantExperts(self.packed_weight(), self.activation_format, scale, self.dtype, self.stacking)


class QATEmbedding(RoundedWeight):
    """An embedding in training. Arguments are those of `QATLinear`."""

    def __init__(self, weight: nn.Parameter, packed: QuantEmbedding, scales: str, stored: torch.dtype) -> None:
        super().__init__(weight, packed.quantized_weight, scales, stored, packed._dtype.dtype)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = packed.padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., dim]`."""
        return functional.embedding(ids, self.rounded(self.dtype), self.padding_idx)

    def packed(self) -> QuantEmbedding:
        """The packed embedding."""
        return QuantEmbedding(self.packed_weight(), self.dtype, self.padding_idx)


def plan_in_training(model: nn.Module) -> Plan | None:
    """The plan of a prepared model, or of a quantized one of transformers."""
    return getattr(model, PLAN, None) or getattr(model, "quantization_plan", None)


def decoded_scale(weight: BlockScaledTensor) -> torch.Tensor:
    """Block scale values without the second level, float32."""
    return decode(weight.scale, weight.format.scale)


def _nearest_scale(
    step: torch.Tensor, format: Format, second: torch.Tensor | None, stored: torch.dtype
) -> torch.Tensor:
    """Block scales nearest to `step` divided by the second level; gradients pass straight through the rounding."""
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


def _computed_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which `quant::linear` multiplies `x`: autocast's where it is on."""
    return x.dtype if x.dtype is torch.float64 else autocast_dtype(x) or x.dtype
