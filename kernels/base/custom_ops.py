"""`register` defines every custom op: its schema, fake, bodies and gradients stand in one place.

The op is the seam between worlds: eager PyTorch, torch.compile, torch.export, ONNX and TensorRT see one node, and each
has its own translation of it. This file also says what of PyTorch's machinery is at work around a call: tracing, a
backward pass, autocast.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quant.base.errors import UserError
from quant.kernels.base.hardware import has_triton
from quant.kernels.base.launch import on_its_gpu

_LIBRARY = torch.library.Library("quant", "FRAGMENT")
_AUTOCAST_KEYS = {
    device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))
    for device in ("cpu", "cuda", "xpu", "mps", "hpu")
    if hasattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
}


def register(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    *,
    default: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    where: Callable[[Tensor], bool] | None = None,
    autograd: Any = None,
    gradients_of: Sequence[int] = (0,),
    in_autocast: bool = True,
) -> None:
    """Defines an op with a body for any device, and perhaps one for GPUs.

    Args:
        name: with its namespace, "quant::linear".
        schema: in PyTorch's notation.
        fake: shapes and dtypes of the results.
        default: the oracle, on devices without a body of their own; on a GPU, the first tensor's is the current one.
        cuda: the body on a GPU.
        where: tells by the first tensor where `cuda` runs, which then is called on that tensor's GPU; elsewhere the
            default body runs there, too. None always calls `cuda`, which sees to the GPU itself.
        autograd: an `autograd.Function` over (keyset, *arguments), which calls `below_autograd`.
        gradients_of: positions of the arguments that may need a gradient.
        in_autocast: whether an op with gradients takes its first argument, and its bias, in autocast's dtype.
    """
    torch.library.define(name, schema)
    torch.library.impl(name, "default", on_its_gpu(default))
    if cuda is not None:

        def on_gpu(first: Any, *arguments: Any) -> Any:
            is_able = where is None or where(first if isinstance(first, Tensor) else first[0])
            return (cuda if is_able else default)(first, *arguments)

        torch.library.impl(name, "cuda", cuda if where is None else on_its_gpu(on_gpu))
    torch.library.register_fake(name, fake)
    if autograd is not None:
        short = name.removeprefix("quant::")
        op = getattr(torch.ops.quant, short).default
        _LIBRARY.impl(short, _with_gradients(op, autograd, gradients_of), "Autograd", with_keyset=True)
        for kind in ("cpu", "cuda") if in_autocast else ():
            _LIBRARY.impl(short, _in_autocast(op, kind), f"Autocast{kind.upper()}")


def _with_gradients(op: Any, function: Any, positions: Sequence[int]) -> Callable[..., Any]:
    """Returns the op's autograd body; `torch.library.register_autograd`'s is five calls of Python where this is one."""
    # Looked up once: attribute access on `torch.ops` enters Python functions at every call.
    redispatch = op._handle.redispatch_boxed

    def body(keyset: Any, *args: Any) -> Any:
        # An op whose inputs need no gradient records nothing, so generation pays for one Python call only.
        if torch.is_grad_enabled():
            for position in positions:
                if args[position] is not None and args[position].requires_grad:
                    if torch._C._are_functorch_transforms_active():
                        raise UserError(f"{op} takes no part in torch.func; take torch.autograd.functional.jacobian")
                    return function.apply(keyset, *args)
        # Below autograd a dual tensor would lose its tangent, which then counts as zero.
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(args[i]).tangent is not None for i in positions if args[i] is not None
        ):
            raise UserError(f"{op} has no forward-mode derivative; take torch.autograd.functional.jacobian")
        with torch._C._AutoDispatchBelowAutograd():
            return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return body


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backward pass refuse `create_graph=True`: after `once_differentiable`, Hessians lack its terms."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError("create_graph=True asks for gradients of gradients, which rounding lacks; train without it")
        return backward(ctx, *gradients)

    return checked


def below_autograd(op: Any, keyset: Any, *args: Any) -> Tensor:
    """Computes the op below autograd, as for tensors that need no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return op._handle.redispatch_boxed(keyset & torch._C._after_autograd_keyset, *args)


def _in_autocast(op: Any, kind: str) -> Callable[..., Any]:
    """Returns `op` as autocast calls it on a kind of device: its first argument and its bias are cast."""
    positions = [i for i, argument in enumerate(op._schema.arguments) if i == 0 or argument.name == "bias"]

    def cast(*args: Any) -> Any:
        arguments, dtype = list(args), torch.get_autocast_dtype(kind)
        for position in positions:
            tensor = arguments[position]
            if tensor is not None and tensor.dtype is not torch.float64:
                arguments[position] = tensor.to(dtype)
        with without_autocast(arguments[0]):
            return op(*arguments)

    return cast


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast computes on the kind of device that `x` is on; None where it is off."""
    # `torch.amp.is_autocast_available`, which knows every kind, breaks the graphs of torch.compile before torch 2.13.
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> Any:
    """Turns autocast off for ops on the device of `x` while open, in less time than `torch.autocast` takes."""
    keys = _AUTOCAST_KEYS.get(x.device.type)
    return nullcontext() if keys is None else torch._C._ExcludeDispatchKeyGuard(keys)


def is_traced() -> bool:
    """Returns whether torch.compile, or a mode, such as for fake tensors, records the ops that run."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward pass, so that a forward pass repeats one for checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def runs_eagerly(x: Tensor) -> bool:
    """Returns whether x is on a GPU and nothing records its ops: a direct call then saves 100 to 200 µs."""
    return x.is_cuda and type(x) in (Tensor, torch.nn.Parameter) and has_triton() and not is_traced()
