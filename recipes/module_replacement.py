"""A module or tensor that takes the place of a model's own, for good or while it runs, keeps what users put on it.

A module that replaces another one takes over its hooks: steering, recording, devices, adapters. The dictionaries of
hooks are shared, not copied: a handle that the caller holds removes its hook from the module that has replaced the
original by then, and the hooks keep their order. A module that stays in the model also takes over everything else that
users or libraries have put on the original: attributes (`_is_hf_initialized`, a mark for an optimizer's groups),
buffers, parameters, submodules.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quant.base.processor import value_of
from quant.recipes.plain_layers import is_conv1d


class Substitute(nn.Module):
    """A module in the place of a layer that is measured or solved; it has the attributes of that layer, too.

    Modeling code reads more of a layer than its weight: its width (`self.proj.in_features`), or a mark.
    """

    def read_from(self, replaced: nn.Module) -> None:
        """Reads attributes from `replaced` from here on; PyTorch registers no parameter of a name that can be read."""
        # Past nn.Module.__setattr__: as a submodule the layer would appear in the state of the model.
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (replaced := vars(self).get("_replaced")) is None:
                raise
            return getattr(replaced, name)


def other_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns `change(tensor)` for the parameters and buffers of a model, by name, where that is not None.

    A tensor of several modules is changed once, and has a name in each of them. A module that is held in several places
    (two blocks with one MLP) has one name, the first: PyTorch's `functional_call` exchanges a tensor once for each of
    its names, takes the new one for the original the second time, and leaves it in the module (torch 2.11 to 2.15).
    """
    changed: dict[int, torch.Tensor | None] = {}
    named = {}
    for path, module in model.named_modules():  # each module once
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            if (other := changed[id(tensor)]) is not None:
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


_OWN = "_names_of_its_class"  # attribute of a replacement: the names that its constructor gave it
# `stands_for` belongs to a linear layer that represents a `Conv1D` while its weight is solved.
_NEVER = {"forward", "_hf_hook", "_old_forward", "_compiled_call_impl", "stands_for"}


def take_over(new: Any, old: nn.Module | None) -> None:
    """Gives `new`, just made to replace `old`, its hooks and all that was put on it; parameters stay the same objects.

    Names that `new` has of its own are not overwritten, for its class gives them a meaning.
    """
    own = {*vars(new), *new._parameters, *new._buffers, *new._modules, "weight", "bias"}
    setattr(new, _OWN, frozenset({*own, _OWN}))
    if old is None:
        return
    take_hooks(new, old)
    for name in _STATE_HOOKS:  # that run when the state is written or loaded
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))
    # Hooks before loading hold the module that they were registered on, by a weak reference.
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "module", None) is not None:
            hook.module = weakref.ref(new)
    before = vars(old).get(_OWN, ())
    if not before and type(old).__module__.startswith("quant."):
        return  # a stand-in during calibration: all its attributes are its own

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
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Gives objects other attributes, each an object, a name and a value, while open."""
    changes = list(changes)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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


@contextmanager
def as_linears(model: nn.Module) -> Iterator[None]:
    """Replaces the `Conv1D` modules of `model` by linear layers while open, then restores the remaining ones.

    GPT-2 stores the weight `[in, out]`. The weight of the linear layer is a view of the same memory, so nothing is
    copied, and a change of one is a change of both.
    """
    for path, module in list(model.named_modules()):
        if is_conv1d(module):
            assert isinstance(module.weight, nn.Parameter)
            weight, trained = value_of(module.weight), module.weight.requires_grad
            module.weight = nn.Parameter(weight, requires_grad=trained)
            # The constructor would fill a matrix with random numbers, which takes seconds for a large layer.
            with torch.device("meta"):
                linear = nn.Linear(*weight.shape)
            linear.weight, linear.bias = nn.Parameter(weight.t(), requires_grad=trained), module.bias
            linear.stands_for = (module,)  # type: ignore[assignment]  # in a tuple, or it would be a submodule
            take_hooks(linear, module)
            model.set_submodule(path, linear.train(module.training))
    try:
        yield
    finally:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and hasattr(module, "stands_for"):
                original: Any = module.stands_for[0]  # type: ignore[index]
                # A solver may have replaced the weight by one in new memory, so the view of the start no longer holds.
                original.weight.data, original.bias = module.weight.data.t(), module.bias
                model.set_submodule(path, original)
