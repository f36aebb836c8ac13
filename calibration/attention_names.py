"""Lets one model attend through our own functions while a context is open; other models are not affected.

transformers looks the attention function of a layer up by the name in its config. Our functions are registered under
new names, the model's configs get these, and afterwards both are restored.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Watch = Callable[[nn.Module, Tensor, Tensor, Tensor], None]


@contextmanager
def names_registered(functions: Mapping[str, Callable[..., Any]], masks: Mapping[str, Any]) -> Iterator[None]:
    """Registers attention functions, and functions that make their masks, with transformers while open."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    added = []
    for interface, registered in ((AttentionInterface, functions), (AttentionMaskInterface, masks)):
        for name, function in registered.items():
            if name not in interface():
                added.append((interface, name))
            interface.register(name, function)
    try:
        yield
    finally:
        for interface, name in added:
            interface._global_mapping.pop(name, None)  # transformers has no opposite of `register`


@contextmanager
def implementations_kept(model: nn.Module) -> Iterator[list[tuple[Any, str]]]:
    """Yields every config of a transformers model with its attention's name, and restores the names afterwards."""
    before = [(config, config._attn_implementation) for config in model_configs(model)]
    try:
        yield before
    finally:
        for config, name in before:
            config._attn_implementation_internal = name  # the property would set the configs inside it, too


def model_configs(model: nn.Module) -> list[Any]:
    """Returns every config of the modules of a transformers model once, the configs inside them included."""
    held = {id(each): each for module in model.modules() for each in configs_of(getattr(module, "config", None))}
    return list(held.values())


def configs_of(config: Any) -> Iterator[Any]:
    """Yields a config of transformers, then the configs inside it; yields nothing for other objects."""
    if not hasattr(config, "_attn_implementation"):
        return
    yield config
    for name in config.sub_configs:
        yield from configs_of(getattr(config, name, None))


def text_config(config: Any) -> Any:
    """Returns the part of a transformers config that is about text; other configs, and None, are returned unchanged."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextmanager
def watching_attention(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Calls `watch(module, q, k, v)`, each `[batch, heads, tokens, head_dim]`, k after RoPE, before each attention."""
    with implementations_kept(model) as before:
        if not before:
            yield
            return
        from transformers.masking_utils import AttentionMaskInterface

        mask_interface = AttentionMaskInterface()
        used = {name: f"quant_watched_{name}" for _, name in before if name is not None}
        functions = {ours: _watched(theirs, watch) for theirs, ours in used.items()}
        masks = {ours: mask_interface[theirs] for theirs, ours in used.items() if theirs in mask_interface}
        with names_registered(functions, masks):
            for config, name in before:
                config._attn_implementation_internal = used.get(name)
            yield


def _watched(name: str, watch: Watch) -> Callable[..., Any]:
    def attend(module: nn.Module, query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        watch(module, query, key, value)
        # "eager" is a function of each modeling file, and so is the registry where a model overrides one name.
        home = inspect.unwrap(type(module).forward).__globals__
        own = home["ALL_ATTENTION_FUNCTIONS"].get_interface(name, home.get("eager_attention_forward"))
        return own(module, query, key, value, *arguments, **options)

    return attend
