"""`quant::linear` is the custom op of a quantized linear, for all formats: their names are arguments.

    quant::linear(x, codes, scale, global_scale?, bias?, input_scale?, weight_format, activation) -> y

The op is the seam between worlds: eager PyTorch, torch.compile, torch.export, ONNX and TensorRT all see the same
node, and each has its own translation of it. `quant::grouped_linear` (experts.py) and `quant::embedding`
(embedding.py) are its siblings. On a GPU `kernels/linear/dispatch.py` runs it, on other devices
`kernels/linear/oracle.py`.

The gradient of the input is dX = dY · W with W dequantized; it passes straight through the rounding of the input. The
bias has a gradient, codes and scales have none. The backward pass needs no copy of the input.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear import dispatch, oracle
from quant.kernels.linear.oracle import row_slices

LINEAR = "quant::linear"
_GRADIENT = "quant::linear_input_gradient"


class LinearCall(NamedTuple):
    """The arguments of `quant::linear`. `linear_on_gpu` spells them out, since making a tuple takes time."""

    x: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    weight_format: str
    activation: str

    @property
    def weight(self) -> BlockScaledTensor:
        """`[out, in]`."""
        shape = (self.codes.shape[0], self.x.shape[-1])
        return BlockScaledTensor(self.codes, self.scale, FORMATS[self.weight_format], shape, self.global_scale)

    @property
    def rounding(self) -> Format | None:
        """The format that `x` is rounded to first."""
        return INPUT_FORMATS[self.activation] if self.activation else None


def quantized_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    activation: Format | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias` through the custom op.

    Args:
        x: `[..., in]`, FP16, BF16 or FP32.
        weight: `[out, in]`.
        bias: `[out]`, dtype of `x`.
        input_scale: static scale of the activation format, float32 scalar; None measures each input.
        activation: format that `x` is rounded to first; None leaves it.

    Returns:
        `[..., out]`, dtype of `x`.

    Raises:
        ValueError: `x` and `weight` disagree on the number of input features.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"input {list(x.shape)} does not fit a weight of shape {list(weight.shape)} [out, in]")
    return torch.ops.quant.linear(  # type: ignore[no-any-return]
        x,
        weight.codes,
        weight.scale,
        weight.global_scale,
        bias,
        input_scale,
        weight.format.name,
        activation.name if activation else "",
    )


def dense(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[out, in]` of a weight in either layout, in `dtype`: by a kernel on a GPU."""
    if weight.codes.is_cuda and dispatch.can_dequantize(dtype):
        return dispatch.dequantize(weight, dtype)
    return oracle.as_stored(weight).dequantize(dtype)


def input_gradient(gradient: torch.Tensor, weight: BlockScaledTensor) -> torch.Tensor:
    """Returns dY · W, `[..., in]`.

    A large weight is dequantized in slices of rows, whose products are added in float32.
    """
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


def _reference(*arguments: Any) -> torch.Tensor:
    """Computes the op `quant::linear` on a device without kernels."""
    call = LinearCall(*arguments)
    return oracle.reference_linear(call.x, call.weight, call.bias, call.input_scale, call.rounding)


def _gradient(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    weight_format: str,
    columns: int,
) -> torch.Tensor:
    weight = BlockScaledTensor(codes, scale, FORMATS[weight_format], (codes.shape[0], columns), global_scale)
    with torch.cuda.device_of(gradient):
        return input_gradient(gradient, weight)


class _Linear(torch.autograd.Function):
    """`quant::linear` where the input or the bias needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> torch.Tensor:
        x, codes, scale, global_scale, bias, _, ctx.weight_format, _ = args
        ctx.columns, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype
        ctx.save_for_backward(codes, scale, global_scale)
        return below_autograd(torch.ops.quant.linear.default, keyset, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, for_x, _, _, _, for_bias, *_ = ctx.needs_input_grad
        x = bias = None
        if for_x:
            x = torch.ops.quant.linear_input_gradient(gradient, *ctx.saved_tensors, ctx.weight_format, ctx.columns)
        if for_bias:
            bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return None, x, None, None, None, bias, None, None, None


def is_traced() -> bool:
    """Returns whether torch.compile, or a mode, such as for fake tensors, records the ops that run."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward pass, so that a forward pass repeats one for checkpointing."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def runs_eagerly(x: torch.Tensor) -> bool:
    """Returns whether x is on a GPU and nothing records its ops: a direct call then saves 100 to 200 µs."""
    return x.is_cuda and type(x) in (torch.Tensor, torch.nn.Parameter) and has_triton() and not is_traced()


def below_autograd(op: Any, keyset: Any, *args: Any) -> torch.Tensor:
    """Computes the op below autograd, as for tensors that need no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return op._handle.redispatch_boxed(keyset & torch._C._after_autograd_keyset, *args)  # type: ignore[no-any-return]


def _with_gradients(keyset: Any, *args: Any) -> torch.Tensor:
    x, bias = args[0], args[4]
    # An op whose inputs need no gradient records nothing, so generation pays for one Python call only.
    # `torch.library.register_autograd` does the same, in five calls of Python where this is one.
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Linear.apply(keyset, *args)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _REDISPATCH(keyset & torch._C._after_autograd_keyset, *args)  # type: ignore[no-any-return]


def _fake(x: torch.Tensor, codes: torch.Tensor, *arguments: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _fake_gradient(gradient: torch.Tensor, codes: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], arguments[-1])


def register(
    name: str, schema: str, fake: Any, *, autograd: Any = None, in_autocast: bool = True, **bodies: Any
) -> None:
    """Defines an op with a body for each device ("default" is any other), and how it computes gradients.

    Under autocast, an op that has gradients takes its first argument, and its bias, in autocast's dtype; without
    `in_autocast` it takes them as they are.
    """
    torch.library.define(name, schema)
    for device, body in bodies.items():
        torch.library.impl(name, device, body)
    torch.library.register_fake(name, fake)
    if autograd is not None:
        short = name.removeprefix("quant::")
        _LIBRARY.impl(short, autograd, "Autograd", with_keyset=True)
        for kind in ("cpu", "cuda") if in_autocast else ():
            _LIBRARY.impl(short, _in_autocast(getattr(torch.ops.quant, short).default, kind), f"Autocast{kind.upper()}")


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast computes on the kind of device that `x` is on; None where it is off."""
    # `torch.amp.is_autocast_available`, which knows every kind, breaks the graphs of torch.compile before torch 2.13.
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: torch.Tensor) -> Any:
    """Turns autocast off for ops on the device of `x` while open, in less time than `torch.autocast` takes."""
    keys = _AUTOCAST_KEYS.get(x.device.type)
    return nullcontext() if keys is None else torch._C._ExcludeDispatchKeyGuard(keys)


_AUTOCAST_KEYS = {
    device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))
    for device in ("cpu", "cuda", "xpu", "mps", "hpu")
    if hasattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
}


def _in_autocast(op: Any, kind: str) -> Any:
    """Returns `op` as autocast calls it on a kind of device: its first argument and its bias are cast."""
    positions = [i for i, argument in enumerate(op._schema.arguments) if i == 0 or argument.name == "bias"]

    def cast(*args: Any) -> torch.Tensor:
        arguments, dtype = list(args), torch.get_autocast_dtype(kind)
        for position in positions:
            tensor = arguments[position]
            if tensor is not None and tensor.dtype is not torch.float64:
                arguments[position] = tensor.to(dtype)
        with without_autocast(arguments[0]):
            return op(*arguments)  # type: ignore[no-any-return]

    return cast


_LIBRARY = torch.library.Library("quant", "FRAGMENT")
register(
    LINEAR,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? bias, Tensor? input_scale, "
    "str weight_format, str activation) -> Tensor",
    _fake,
    autograd=_with_gradients,
    default=_reference,
    cuda=dispatch.linear_on_gpu,
)
register(
    _GRADIENT,
    "(Tensor gradient, Tensor codes, Tensor scale, Tensor? global_scale, str weight_format, int columns) -> Tensor",
    _fake_gradient,
    default=_gradient,
)
# Looked up once: attribute access on `torch.ops` enters Python functions at every call.
_REDISPATCH = torch.ops.quant.linear.default._handle.redispatch_boxed
