"""Whether a module only multiplies by its weight, so that a quantized module can take its place.

A subclass of `nn.Linear` may scale, round or gate its output, and a forward may have been patched on one instance.
Class and shapes do not show it, so values decide: a copy of the module with pseudo-random weights runs on pseudo-random
inputs, and its output is compared with `x Wᵀ + b`. The real weights take no part: on the meta device they have no
values, and an adapter that starts at zero would not show. Hooks are left out: they move to the module that replaces
the layer (`quant.recipes.blocks`). torch is imported inside of functions, because plans are read and edited without it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

OTHERWISE = "its class multiplies otherwise than a linear layer"
PATCHED = "its forward was replaced on this instance, and does more than its class"
NOT_PLAIN_CONV = "its class convolves otherwise than torch's convolutions"
_HOOKED = "a hook of accelerate, {}, changes its inputs or outputs"
# accelerate's hooks that only move tensors between devices.
_MOVING_HOOKS = {"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"}
_SIZES = (1e-2, 1.0, 1e2)  # of the tokens that a module is tried on: only large inputs show that they are clipped


def patched_forward(module: nn.Module) -> Any:
    """Returns the forward that was set on an instance; None if it is the class's, also behind a hook of accelerate."""
    forward = vars(module).get("_old_forward") if "_hf_hook" in vars(module) else vars(module).get("forward")
    # accelerate remembers the class's own method in the same way.
    own = type(module).forward
    return None if forward is None or getattr(forward, "__func__", None) is own else forward


def hook_obstacle(module: nn.Module) -> str | None:
    """Returns why a hook of accelerate on a module cannot move to another one; None if it can, or there is none."""
    hook = vars(module).get("_hf_hook")
    hooks = [] if hook is None else getattr(hook, "hooks", [hook])
    other = next((type(each).__name__ for each in hooks if type(each).__name__ not in _MOVING_HOOKS), None)
    return None if other is None else _HOOKED.format(other)


def linear_obstacle(linear: nn.Module, tried: dict[Any, bool]) -> str | None:
    """Returns why a module does not compute `x Wᵀ + b`; `tried` holds verdicts on modules that are alike."""
    from torch import nn

    if (obstacle := hook_obstacle(linear)) is not None:
        return obstacle
    patch = patched_forward(linear)
    own_call = type(linear).__call__ is not nn.Module.__call__
    if patch is None and not own_call and (type(linear).forward is nn.Linear.forward or is_conv1d(linear)):
        return None
    key = _alike(linear, patch)
    verdict = tried[key] if key in tried else _multiplies(linear)
    if key is not None:
        tried[key] = verdict
    return None if verdict else OTHERWISE if patch is None else PATCHED


def conv_obstacle(conv: nn.Module) -> str | None:
    """Returns why a convolution does more than torch's own class of it; None if it does not."""
    from torch import nn

    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    plain = next((kind for kind in kinds if isinstance(conv, kind)), None)
    # Functions of the class are compared by identity: a subclass that inherits all three is plain.
    names = ("forward", "_conv_forward", "__call__")
    if plain is None or any(getattr(type(conv), name, None) is not getattr(plain, name, None) for name in names):
        return NOT_PLAIN_CONV
    if patched_forward(conv) is not None or "_conv_forward" in vars(conv):
        return PATCHED
    return hook_obstacle(conv)


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether it is the `Conv1D` of transformers' GPT-2: a linear layer whose weight is stored `[in, out]`."""
    transformers = sys.modules.get("transformers.pytorch_utils")  # modules of accelerate need it
    return transformers is not None and type(module) is transformers.Conv1D


def _alike(linear: nn.Module, patch: Any) -> Any:
    """Returns a key for modules that compute alike for equal weights: class, shapes and attributes; None for none."""
    function = getattr(patch, "__func__", None)
    if linear._modules or (patch is not None and function is None):
        return None
    tensors = [(name, tuple(t.shape), t.dtype) for name, t in (*linear.named_parameters(), *linear.named_buffers())]
    attributes = [
        (name, value if isinstance(value, str | int | float) else id(value))
        for name, value in vars(linear).items()
        if not name.startswith("_") and name not in ("training", "forward")
    ]
    return type(linear), function, tuple(tensors), tuple(attributes)


def _multiplies(linear: nn.Module) -> bool:
    """Returns whether a linear layer gives `x Wᵀ + b`, and has no parameter besides W and b."""
    import torch

    state = dict(linear.named_parameters(remove_duplicate=False))
    if not {"weight"} <= state.keys() <= {"weight", "bias"} or state["weight"].dim() != 2:
        return False  # the others would be lost
    own = state["weight"].dtype
    # In float32 differences are seen that BF16 rounds away. A class that casts to its dtype is tried in that.
    for dtype in dict.fromkeys((torch.float32 if own.itemsize < 4 else own, own)):
        for shape in ((2, len(_SIZES)), (len(_SIZES),)):
            try:
                # transformers builds models within `torch.device("meta")`, where new tensors would have no values.
                with torch.device("cpu"):
                    return _multiplies_in(linear, dtype, shape)
            except Exception:  # the class's own code, which may fail in any way
                continue
    return False


def _multiplies_in(linear: nn.Module, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Returns whether outputs agree for an input `[*shape, in]`."""
    import torch

    twin, state = _with_values(linear, dtype)
    weight, bias = state["weight"], state.get("bias")
    weight = weight.t() if is_conv1d(linear) else weight
    x = _values((*shape, weight.shape[1]), dtype, scale=1.0) * torch.tensor(_SIZES, dtype=dtype)[:, None]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected, out = torch.nn.functional.linear(x, weight, bias), twin(x)
    if not isinstance(out, torch.Tensor) or out.shape != expected.shape:
        return False
    # Sums in another order differ by a few units in the last place; a forgotten factor or clip by far more.
    near = max(1e-5, 2 * torch.finfo(dtype).eps)
    difference = (out.double() - expected.double()).flatten(0, -2).norm(dim=-1)
    return bool((difference <= near * expected.double().flatten(0, -2).norm(dim=-1)).all())


def _with_values(linear: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns a copy of a module with other values, in evaluation mode and without hooks, and its parameters."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in linear.named_parameters(remove_duplicate=False):
        # Keeps outputs near 1, so that BF16 and FP16 neither overflow nor vanish.
        scale = parameter.shape[-1] ** -0.5
        state[name] = memo[id(parameter)] = nn.Parameter(_values(parameter.shape, dtype, scale), requires_grad=False)
    for buffer in linear.buffers():
        # Around 1, which suits a variance as well as a factor.
        floats = buffer.is_floating_point()
        memo[id(buffer)] = 1 + _values(buffer.shape, dtype, 0.25) if floats else torch.zeros_like(buffer, device="cpu")
    twin = copy.deepcopy(linear, memo)
    if "_hf_hook" in vars(twin):
        twin.forward = vars(twin)["_old_forward"]
    for module in twin.modules():
        module._compiled_call_impl = None
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin.eval(), state


def _values(shape: Sequence[int], dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Returns values that look random and take no time: one short row, repeated with a prime period."""
    import torch

    # A prime period never divides a row's length, so no two rows are alike.
    period, count = 65_537, torch.Size(shape).numel()
    numbers = torch.arange(min(period, count), dtype=torch.float64)
    base = torch.remainder(torch.sin(numbers + 1) * 43758.5453, 2) - 1  # in [-1, 1)
    return (base * scale).to(dtype).repeat(-(-count // max(len(base), 1)) if count else 1)[:count].view(*shape)
