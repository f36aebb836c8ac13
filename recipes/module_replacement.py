"""A module that replaces another one takes over its hooks: steering, recording, devices, adapters.

The dictionaries of hooks are shared, not copied: a handle that the caller holds removes its hook from the module that
has replaced the original by then, and the hooks keep their order.

A module that stays in the model also takes over everything else that users or libraries have put on the original:
attributes (`_is_hf_initialized`, a mark for an optimizer's groups), buffers, parameters, submodules.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from quant.base.mapped import value_of

if TYPE_CHECKING:
    import torch
    from torch import nn


# Layers and tensors that take the place of a model's own while it runs, and leave it as it was.
#
# A `Substitute` takes the place of a layer that is measured or solved. Modeling code reads more of a layer than its
# weight: its width (`self.proj.in_features`), or a mark that somebody set.
#
# `run_with` runs a module with other tensors. PyTorch's `functional_call` exchanges a tensor once for each of its
# names. Where a module is held in several places (two blocks with one MLP), it takes the new tensor for the original
# one the second time, and leaves it in the module (torch 2.11 to 2.15). So tensors have one name here, in the first
# place of their module.


class Substitute(nn.Module):
    """A module from which all attributes can be read that it lacks and that the layer in its place has."""

    def read_from(self, replaced: nn.Module) -> None:
        """Reads attributes from `replaced` from here on; PyTorch registers no parameter of a name that can be read."""
        # Past nn.Module.__setattr__: as a submodule the layer would appear in the state of the model.
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            replaced = vars(self).get("_replaced")
            if replaced is None:
                raise
            return getattr(replaced, name)


def other_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns `change(tensor)` for the parameters and buffers of a model, by name, where that is not None.

    A tensor of several modules is changed once, and has a name in each of them.

    Args:
        model: the model.
        change: gets a parameter or a buffer.
    """
    changed: dict[int, torch.Tensor | None] = {}
    named = {}
    for path, module in model.named_modules():  # each module once
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            other = changed[id(tensor)]
            if other is not None:
                named[f"{path}.{name}".lstrip(".")] = other
    return named


def run_with(module: nn.Module, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `module` with `tensors` of `other_tensors` in place of its own."""
    return functional_call(module, dict(tensors), args, kwargs, tie_weights=False)


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
)  # fmt: skip
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def has_hooks(module: nn.Module) -> bool:
    """Returns whether anything happens to the inputs or outputs of a module around its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks or "_hf_hook" in vars(module))


def take_hooks(new: Any, old: nn.Module) -> None:
    """Gives `new` the hooks of `old`: torch's, and the one that accelerate wraps around a forward."""
    for name in _HOOKS:
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))
    hook: Any = vars(old).get("_hf_hook")
    wrapper = vars(old).get("forward")
    # Without accelerate the forward is the class's own, and the hooks above are all.
    if hook is None or not isinstance(wrapper, functools.partial):
        return
    # accelerate binds a function of the module, and reads hook and forward from the module's attributes. Its own
    # `add_hook_to_module` would move the weights, which are where they should be.
    new._hf_hook, new._old_forward = hook, new.forward
    new.forward = functools.update_wrapper(functools.partial(wrapper.func, new), new.forward)


def _take_state_hooks(new: Any, old: nn.Module) -> None:
    """Gives `new` the hooks that run when the state of `old` is written or loaded."""
    for name in _STATE_HOOKS:
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))
    # Hooks before loading hold the module that they were registered on, by a weak reference.
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "module", None) is not None:
            hook.module = weakref.ref(new)


_OWN = "_names_of_its_class"  # attribute of a replacement: the names that its constructor gave it
# `stands_for` belongs to a linear layer that represents a `Conv1D` while its weight is solved.
_NEVER = {"forward", "_hf_hook", "_old_forward", "_compiled_call_impl", "stands_for"}


def take_over(new: Any, old: nn.Module | None) -> None:
    """Gives `new`, just made to replace `old`, its hooks and all that was put on it; parameters stay the same objects.

    Args:
        new: the replacement; names that it has of its own are not overwritten, for its class gives them a meaning.
        old: a module of torch, or one that has replaced another itself; None for a parameter, which has none of these.
    """
    own = {*vars(new), *new._parameters, *new._buffers, *new._modules, "weight", "bias"}
    setattr(new, _OWN, frozenset({*own, _OWN}))
    if old is None:
        return
    take_hooks(new, old)
    _take_state_hooks(new, old)
    before = vars(old).get(_OWN, ())
    if not before and type(old).__module__.startswith("quant."):
        return  # a stand-in during calibration: all its attributes are its own

    from torch import nn  # here, so that reading a recipe needs no torch

    of_torch = {*vars(nn.Module()), *_NEVER}

    def added_names(names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in before and name not in own and not hasattr(type(new), name)]

    for name in added_names(vars(old)):
        if name not in of_torch:
            setattr(new, name, vars(old)[name])
    for name in added_names(old._parameters):
        new.register_parameter(name, old._parameters[name])
    for name in added_names(old._buffers):
        new.register_buffer(name, old._buffers[name], name not in old._non_persistent_buffers_set)
    for name in added_names(old._modules):
        new.add_module(name, old._modules[name])


@contextmanager
def forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Makes `module` run `forward` while open, then restores its own, from its class or set on the instance."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


# Whether a module only multiplies by its weight, so that a quantized module can take its place.
#
# A subclass of `nn.Linear` may scale, round or gate its output, and a forward may have been patched on one instance.
# Class and shapes do not show it, so values decide: a copy of the module with pseudo-random weights runs on pseudo-random
# inputs, and its output is compared with `x Wᵀ + b`. The real weights take no part: on the meta device they have no
# values, and an adapter that starts at zero would not show. Hooks are left out: they move to the module that replaces the
# layer (`quant.recipes.module_replacement`).


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
    """Returns why a linear layer, or a `Conv1D` of GPT-2, does not compute `x Wᵀ + b`; None if it does.

    Args:
        linear: a module of any class with a weight of two dimensions.
        tried: verdicts on modules that are alike, which this adds to.
    """
    from torch import nn

    if (obstacle := hook_obstacle(linear)) is not None:
        return obstacle
    patch = patched_forward(linear)
    own_call = type(linear).__call__ is not nn.Module.__call__
    if patch is None and not own_call and (type(linear).forward is nn.Linear.forward or is_conv1d(linear)):
        return None
    key = _alike(linear, patch)
    verdict = tried.get(key) if key is not None else None
    if verdict is None:
        verdict = _multiplies(linear)
        if key is not None:
            tried[key] = verdict
    if verdict:
        return None
    return OTHERWISE if patch is None else PATCHED


def conv_obstacle(conv: nn.Module) -> str | None:
    """Returns why a convolution does more than torch's own class of it; None if it does not."""
    from torch import nn

    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    plain = next((kind for kind in kinds if isinstance(conv, kind)), None)
    # Functions of the class are compared by identity: a subclass that inherits all three is plain.
    own = [getattr(type(conv), name, None) for name in ("forward", "_conv_forward", "__call__")]
    if plain is None or own != [getattr(plain, name, None) for name in ("forward", "_conv_forward", "__call__")]:
        return NOT_PLAIN_CONV
    if patched_forward(conv) is not None or "_conv_forward" in vars(conv):
        return PATCHED
    return hook_obstacle(conv)


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether it is the `Conv1D` of transformers' GPT-2: a linear layer whose weight is stored `[in, out]`."""
    transformers = sys.modules.get("transformers.pytorch_utils")  # modules of accelerate need it
    return transformers is not None and type(module) is transformers.Conv1D


def _alike(linear: nn.Module, patch: Any) -> Any:
    """Returns a key for modules that compute alike for equal weights: class, shapes and attributes.

    None for no such key.
    """
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
    sizes = torch.tensor(_SIZES, dtype=dtype)
    x = _values((*shape, weight.shape[1]), dtype, scale=1.0) * sizes[:, None]
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
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return twin.eval(), state


def _values(shape: Sequence[int], dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Returns values that look random and take no time: one short row, repeated with a prime period."""
    import torch

    # A prime period never divides a row's length, so no two rows are alike.
    period, count = 65_537, torch.Size(shape).numel()
    numbers = torch.arange(min(period, count), dtype=torch.float64)
    base = torch.remainder(torch.sin(numbers + 1) * 43758.5453, 2) - 1  # in [-1, 1)
    return (base * scale).to(dtype).repeat(-(-count // max(len(base), 1)) if count else 1)[:count].view(*shape)


# GPT-2's `Conv1D` is a linear layer whose weight is stored `[in, out]`; solvers work on an `nn.Linear` in its place.
#
# The linear layer's weight is a view of the same memory, so nothing is copied, and a change of one is a change of both.


@contextmanager
def as_linears(model: nn.Module) -> Iterator[None]:
    """Replaces the `Conv1D` modules of `model` by linear layers while open, then restores the remaining ones."""
    for path, module in list(model.named_modules()):
        if is_conv1d(module):
            _put(model, path, _linear(module))
    try:
        yield
    finally:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and hasattr(module, "stands_for"):
                original: Any = module.stands_for[0]  # type: ignore[index]
                # A solver may have replaced the weight by one in new memory, so the view of the start no longer holds.
                original.weight.data, original.bias = module.weight.data.t(), module.bias
                _put(model, path, original)


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module.weight, nn.Parameter)
    weight, trained = value_of(module.weight), module.weight.requires_grad
    module.weight = nn.Parameter(weight, requires_grad=trained)
    # The constructor would fill a matrix with random numbers, which takes seconds for a large layer and is thrown away.
    with torch.device("meta"):
        linear = nn.Linear(*weight.shape)
    linear.weight, linear.bias = nn.Parameter(weight.t(), requires_grad=trained), module.bias  # type: ignore[assignment]
    linear.stands_for = (module,)  # type: ignore[assignment]  # in a tuple, or it would be a submodule
    take_hooks(linear, module)
    return linear.train(module.training)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
