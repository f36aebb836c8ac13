"""`quant::linear` is the custom op of a quantized linear, and `QuantLinear` is `nn.Linear` over it.

    quant::linear(x, codes, scale, global_scale?, bias?, input_scale?, weight_format, activation) -> y

One op serves all formats, whose names are arguments. On a GPU `kernels/linear/dispatch.py` runs it, on other devices
`kernels/linear/oracle.py`. The gradient of the input is dX = dY · W with W dequantized; it passes straight through the
rounding of the input. The bias has a gradient, codes and scales have none. The backward pass needs no copy of x.

Some solvers leave work for run time. A linear does it to its input x in this order, before the matmul:

    x' = hadamard(x · pre_scale)                a scale that no neighbour could absorb, then a blockwise rotation
    x' = [x', (x' - round(x'))[channels]]       residual channels: rounding errors of k channels, behind the others
    y  = round(x') Wqᵀ + (x' Aᵀ) Bᵀ + bias      a low-rank branch in 16 bit takes x' unrounded (SVDQuant); on Hopper
                                                it may be columns of the product (`branch_columns.py`)

Residual channels (ARCQuant, arXiv 2601.07475) leave the matmul as it is, but for k more columns: Wq is `[out, in + k]`
and holds the columns of these channels a second time. Both parts of the input have the same scale of a whole tensor,
and `in` is a multiple of a block, so that rounding the longer input rounds its first part as before.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.base.errors import UserError
from quant.formats.format import INPUT_FORMATS, WEIGHT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.base.custom_ops import autocast_dtype, below_autograd, first_order, register
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear import dispatch, oracle
from quant.kernels.linear.branch_columns import branch_linear, takes_branch, widened
from quant.kernels.linear.oracle import row_slices
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.kernels.rounding.hadamard import hadamard_block, hadamard_transform

LINEAR = "quant::linear"


class LinearCall(NamedTuple):
    """The arguments of `quant::linear`. `linear_on_gpu` spells them out, since making a tuple takes time."""

    x: Tensor
    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    weight_format: str
    activation: str

    @property
    def weight(self) -> BlockScaledTensor:
        """`[out, in]`."""
        shape = (self.codes.shape[0], self.x.shape[-1])
        return BlockScaledTensor(self.codes, self.scale, WEIGHT_FORMATS[self.weight_format], shape, self.global_scale)

    @property
    def rounding(self) -> Format | None:
        """The format that `x` is rounded to first."""
        return INPUT_FORMATS[self.activation] if self.activation else None


def quantized_linear(
    x: Tensor,
    weight: BlockScaledTensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    activation: Format | None = None,
) -> Tensor:
    """Returns `x @ weight.T + bias` through the custom op: `[..., in]` to `[..., out]`, in the dtype of `x`."""
    # `input_scale` is the static scale of the activation format, a float32 scalar; None measures each input.
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"input {list(x.shape)} does not fit a weight of shape {list(weight.shape)} [out, in]")
    rounding = activation.name if activation else ""
    return torch.ops.quant.linear(
        x, weight.codes, weight.scale, weight.global_scale, bias, input_scale, weight.format.name, rounding
    )


def rounded_input(x: Tensor, activation: Format, input_scale: Tensor | None) -> Tensor:
    """Returns an input as the matmul sees it, in its dtype: by a kernel on a GPU, where there is one."""
    if x.is_cuda and activation.is_nvfp4 and x.shape[-1] % activation.block[1] == 0 and x.numel():
        from quant.kernels.rounding.portable_solvers import fake_quantize_nvfp4

        return fake_quantize_nvfp4(x, input_scale, activation)
    return round_activation(x, activation, input_scale)


def refuse_residual(model: nn.Module, runtime: str) -> None:
    """Raises UserError for the first layer with residual channels: `runtime` has no step that widens its input."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.channels is not None:
            raise UserError(
                f"{name}: its solver gave it {len(module.channels)} residual channels, which {runtime} has no step "
                "for; run the checkpoint with quant.load, or quantize again with a solver without residual"
            )


def dense(weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns `[out, in]` of a weight in either layout, in `dtype`: by a kernel on a GPU."""
    in_kernel = weight.codes.is_cuda and has_triton() and not weight.format.gguf
    if in_kernel and dtype in (torch.float16, torch.bfloat16, torch.float32):
        return dispatch.dequantize(weight, dtype)
    return oracle.as_stored(weight).dequantize(dtype)


def input_gradient(gradient: Tensor, weight: BlockScaledTensor) -> Tensor:
    """Returns dY · W, `[..., in]`."""
    # A large weight is dequantized in slices of rows, whose products are added in float32.
    rows = gradient.reshape(-1, weight.shape[0])
    pieces = list(row_slices(weight))
    if len(pieces) == 1:
        return (rows @ dense(weight, rows.dtype)).view(*gradient.shape[:-1], weight.shape[1])
    # 16-bit partial sums would lose the small ones; one rounding at the end is as exact as one product.
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(len(rows), weight.shape[1], dtype=wide, device=rows.device)
    for part, piece in pieces:
        total += rows[:, part] @ dense(piece, rows.dtype)
    return total.to(gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])


def _reference(*arguments: Any) -> Tensor:
    call = LinearCall(*arguments)
    return oracle.reference_linear(call.x, call.weight, call.bias, call.input_scale, call.rounding)


def _gradient(
    gradient: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, weight_format: str, columns: int
) -> Tensor:
    weight = BlockScaledTensor(codes, scale, WEIGHT_FORMATS[weight_format], (codes.shape[0], columns), global_scale)
    return input_gradient(gradient, weight)


class _Linear(torch.autograd.Function):
    """`quant::linear` where the input or the bias needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        x, codes, scale, global_scale, bias, _, ctx.weight_format, _ = args
        ctx.columns, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype
        ctx.save_for_backward(codes, scale, global_scale)
        return below_autograd(torch.ops.quant.linear.default, keyset, *args)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, for_x, _, _, _, for_bias, *_ = ctx.needs_input_grad
        x = bias = None
        if for_x:
            x = torch.ops.quant.linear_input_gradient(gradient, *ctx.saved_tensors, ctx.weight_format, ctx.columns)
        if for_bias:
            bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return None, x, None, None, None, bias, None, None, None


register(
    LINEAR,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? bias, Tensor? input_scale, "
    "str weight_format, str activation) -> Tensor",
    lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]),
    default=_reference,
    cuda=dispatch.linear_on_gpu,
    autograd=_Linear,
    gradients_of=(0, 4),
)
register(
    "quant::linear_input_gradient",
    "(Tensor gradient, Tensor codes, Tensor scale, Tensor? global_scale, str weight_format, int columns) -> Tensor",
    lambda gradient, *arguments: gradient.new_empty(*gradient.shape[:-1], arguments[-1]),
    default=_gradient,
)


register(
    "quant::input_error",
    "(Tensor x, Tensor channels, Tensor? input_scale, str activation) -> Tensor",
    lambda x, channels, *_: x.new_empty(*x.shape[:-1], len(channels)),
    default=lambda x, channels, scale, activation: (
        x - rounded_input(x, INPUT_FORMATS[activation], scale)
    ).index_select(-1, channels),
)


@dataclass(frozen=True, eq=False)
class RunTimeParts:
    """The work of a quantized linear at run time in addition to its matmul; by default there is none."""

    pre_scale: Tensor | None = None  # multiplies the input, `[in]`, in the model's dtype
    hadamard: int = 0  # block of the rotation that follows, a power of two; 0 for none
    # (down `[rank, in]`, up `[out, rank]`) in the model's dtype: a branch that is added to the matmul.
    lowrank: tuple[Tensor, Tensor] | None = None
    channels: Tensor | None = None  # residual channels, int32 `[k]`, whose columns the weight has twice

    def __bool__(self) -> bool:
        return self.pre_scale is not None or self.hadamard > 0 or bool(self.rank or self.residual)

    @property
    def rank(self) -> int:
        """Rank of the branch, 0 without one."""
        return 0 if self.lowrank is None else self.lowrank[0].shape[0]

    @property
    def residual(self) -> int:
        """Number of residual channels, 0 without any."""
        return 0 if self.channels is None else len(self.channels)

    def widened(self, x: Tensor, activation: Format | None, input_scale: Tensor | None) -> Tensor:
        """Returns `[..., in + k]` for a result of `input`: with the rounding errors of the residual channels behind it.

        The rounding passes a gradient straight through, so its error has none.
        """
        if self.channels is None or activation is None:
            return x
        error = torch.ops.quant.input_error(x.detach(), self.channels, input_scale, activation.name)
        return torch.cat((x, error), dim=-1)

    def input(self, x: Tensor) -> Tensor:
        """Returns `[..., in]` as the weight and the branch see it, in the dtype of `x`."""
        if self.pre_scale is not None:
            x = x * self.pre_scale.to(x.dtype)
        return hadamard_transform(x, self.hadamard) if self.hadamard else x

    def branch(self, x: Tensor) -> Tensor | None:
        """Returns the branch's share of the output, `[..., out]`, for an input that `input` returned."""
        if self.lowrank is None:
            return None
        down, up = self.lowrank
        return nn.functional.linear(nn.functional.linear(x, down.to(x.dtype)), up.to(x.dtype))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError where a part does not fit a weight of `shape` `[out, in]`."""
        rows, columns = shape[0], shape[1] - self.residual
        if self.channels is not None and not (
            self.channels.dtype is torch.int32
            and (self.channels.is_meta or len(set(self.channels.tolist()) & set(range(columns))) == self.residual)
        ):
            raise ValueError(f"{name}: residual channels must be different int32 numbers from 0 to {columns - 1}")
        if self.pre_scale is not None and self.pre_scale.shape != (columns,):
            raise ValueError(f"{name} {list(shape)}: pre_scale is {list(self.pre_scale.shape)}, expected [{columns}]")
        block = self.hadamard
        if block < 0 or block & (block - 1) or (block and columns % block):
            raise ValueError(
                f"{name} {list(shape)}: Hadamard block {block} must be a power of two that divides {columns}; "
                f"the largest is {hadamard_block(columns)}, 0 is none"
            )
        if self.lowrank is not None:
            down, up = self.lowrank
            if down.shape != (self.rank, columns) or up.shape != (rows, self.rank):
                raise ValueError(
                    f"{name} {list(shape)}: low-rank branch of {list(down.shape)} and {list(up.shape)}, "
                    f"expected [rank, {columns}] and [{rows}, rank]"
                )


class QuantLinear(QuantizedModule):
    """A linear layer over a quantized weight.

    Args:
        weight: `[out, in]`.
        bias: `[out]`, or None.
        activation: format the input is rounded to; None leaves it in 16 bit.
        input_scale: static scale of the activation format, float32 scalar, where the format has one.
        pre_scale, hadamard, lowrank, channels: see `RunTimeParts`.
        dtype: the dtype of `weight` for code that reads it; `.to(dtype)` changes it.

    Raises:
        ValueError: one of them does not fit the weight.
    """

    bias: nn.Parameter | None
    pre_scale: Tensor | None
    lowrank_down: Tensor | None
    lowrank_up: Tensor | None
    channels: Tensor | None

    def __init__(
        self, weight: BlockScaledTensor, bias: Tensor | None = None, activation: Format | None = None,
        input_scale: Tensor | None = None, *, pre_scale: Tensor | None = None, hadamard: int = 0,
        lowrank: tuple[Tensor, Tensor] | None = None, channels: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        given = RunTimeParts(pre_scale, hadamard, lowrank, channels)
        given.check("QuantLinear", weight.shape)
        # Parts are buffers of their own, so that `.to` moves and casts them with the module.
        down, up = lowrank or (None, None)
        parts = {"pre_scale": pre_scale, "lowrank_down": down, "lowrank_up": up, "channels": channels}
        super().__init__(weight, activation, input_scale, dtype, **parts)
        self.out_features, self.in_features = weight.shape[0], weight.shape[1] - given.residual
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.hadamard = hadamard

    def packed(self, weight: BlockScaledTensor) -> BlockScaledTensor | None:
        if self.lowrank_up is None or not takes_branch(weight, self.activation_format, self.parts):
            return super().packed(weight)
        weight, unit = widened(weight, self.lowrank_up)
        held = self._buffers.get("branch_unit")
        # In the same memory, which captured graphs read.
        self.register_buffer("branch_unit", unit if held is None else held.copy_(unit), persistent=False)
        return weight

    @property
    def weight(self) -> Tensor:
        """The matrix `[out, in]` that the layer multiplies its input by, dequantized again for each access."""
        # Modeling code reads the weight of some layers, for its dtype or to multiply by it without calling the layer;
        # the input is then not rounded to the activation format.
        # The order undoes `forward` from the right: branch, rotation, pre-scale.
        weight = self.dequantize()[:, : self.in_features]
        if self.lowrank_down is not None and self.lowrank_up is not None:
            weight += self.lowrank_up.float() @ self.lowrank_down.float()
        if self.hadamard:  # a symmetric matrix that is its own inverse: (x H) Wᵀ = x (W H)ᵀ
            weight = hadamard_transform(weight, self.hadamard)
        if self.pre_scale is not None:
            weight = weight * self.pre_scale.float()
        return weight.to(self.dtype)

    @property
    def parts(self) -> RunTimeParts:
        """The run-time work in addition to the matmul, sharing the module's buffers."""
        lowrank = None
        if self.lowrank_down is not None and self.lowrank_up is not None:
            lowrank = (self.lowrank_down, self.lowrank_up)
        return RunTimeParts(self.pre_scale, self.hadamard, lowrank, self.channels)

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`, in the dtype of `input`, which is named as in `nn.Linear`."""
        x = input
        # Reading a buffer as an attribute is one more Python call before the launch.
        buffers = self._buffers
        codes = buffers["codes"]
        assert codes is not None
        if (codes.device, codes.dtype, x.dtype) != self._arranged:
            self.arrange(x.dtype)
            codes = self.codes
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"input {list(x.shape)} does not fit a weight of {[self.out_features, self.in_features]} [out, in]"
            )
        # Most layers have no work at run time; `RunTimeParts` would be made for nothing at each call.
        parts = None
        activation = self.activation_format
        has_buffers = (
            buffers["pre_scale"] is not None or buffers["lowrank_down"] is not None or buffers["channels"] is not None
        )
        if self.hadamard or has_buffers:
            parts = self.parts
            x = parts.input(x)
            unit, down = buffers.get("branch_unit"), buffers["lowrank_down"]
            if unit is not None and down is not None and codes.shape[1] > self.in_features:
                computed = autocast_dtype(x) or x.dtype
                if computed is torch.bfloat16 and not (torch.is_grad_enabled() and x.requires_grad):
                    return branch_linear(x.to(computed), self.stored_weight, self._parameters["bias"], down, unit)
                codes = codes[:, : self.in_features].contiguous()
        wide = x if parts is None else parts.widened(x, activation, buffers["input_scale"])
        # Compilers see one op: left to inductor, the rounding of wide rows took longer, up to 4% of blocks of Flux.
        y: Tensor = torch.ops.quant.linear.default(
            wide, codes, buffers["scale"], buffers["global_scale"], self._parameters["bias"],
            buffers["input_scale"], self.weight_format.name, "" if activation is None else activation.name,
        )  # fmt: skip
        branch = None if parts is None else parts.branch(x)
        return y if branch is None else y + branch

    def extra_repr(self) -> str:
        words = [super().extra_repr()]
        if self.pre_scale is not None:
            words.append("pre_scale")
        if self.hadamard:
            words.append(f"hadamard={self.hadamard}")
        if self.lowrank_down is not None:
            words.append(f"rank={self.parts.rank}")
        if self.channels is not None:
            words.append(f"residual={self.parts.residual}")
        return ", ".join(words)
