"""A module that replaces another one takes over its hooks: steering, recording, devices, adapters.

The dictionaries of hooks are shared, not copied: a handle that the caller holds removes its hook from the module that
has replaced the original by then, and the hooks keep their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
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


@contextmanager
def forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, `module` runs `forward`; then it has its forward again, from its class or set on the instance."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
