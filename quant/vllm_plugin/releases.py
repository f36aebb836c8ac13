"""The differences between releases of vLLM, 0.26 to 0.33, as far as the plug-in meets them.

No version is compared: a release is known by the names, arguments and fields that it has.

    part of vLLM                                  since   how it is told
    choice of NVFP4 without input scales          all     `init_nvfp4_linear_kernel(use_a16=True)`, which asks no list
    the same in ModelOpt's layout                 < 0.27  modelopt.py constructs the Marlin class itself
    `--linear-backend` per format                 0.30    `_get_linear_backend` takes `quantization`
    `--linear-backend` that names no class        0.28    every class is asked, and ours refuse by themselves
    experts with a limited activation             0.28    `activation()` reads the limit from `activation_config`
    bytes of a page of the KV cache               0.28    the backend says them in `customize_spec`
    views `[blocks, heads, tokens, bytes]`        0.29    the backend names layouts; before, it shaped the buffer itself
    lengths on the host of chunked local          < 0.33  in a field of their own, `_seq_lens_cpu`; the bounds are those
      attention                                           of whole sequences
    `has_g_idx` of INT4 layers                    < 0.33  a field of the layer's config

`replace_function` puts ours in the place of vLLM's, after a look at whether vLLM still calls it as we know it.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any


def replace_function(
    owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]], *, in_importers: bool = False
) -> None:
    """Puts `wrap(theirs)` in the place of a function of the module or class `owner`, once however often it is called.

    With `in_importers`, modules of vLLM that imported the function by name get ours too. TypeError, and nothing is
    replaced, unless ours can be called in every way in which theirs can: a release may begin to name its arguments.
    """
    theirs = getattr(owner, name)
    if getattr(theirs, "is_blockscale", False):
        return
    ours: Any = wrap(theirs)
    _check_calls(theirs, ours)
    ours = wraps(theirs)(ours)
    ours.is_blockscale = True
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    if in_importers:
        for module_name, module in list(sys.modules.items()):
            # `vars`, because `getattr` would import what a lazy module has not loaded.
            if module_name.startswith("vllm.") and vars(module).get(name) is theirs:
                setattr(module, name, ours)
    setattr(owner, name, staticmethod(ours) if is_static else ours)


def _check_calls(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    parameters = inspect.signature(theirs).parameters.values()
    by_place = [None for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    only_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    only_by_place = by_place[: len(by_place) + len(only_by_name) - len(by_name)]
    try:
        inspect.signature(ours).bind(*by_place, **dict.fromkeys(only_by_name))
        inspect.signature(ours).bind(*only_by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise TypeError(f"{theirs.__qualname__} of this vLLM cannot be replaced: {error}") from None


def check_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raises TypeError unless the function's first arguments have these names."""
    if (has := tuple(inspect.signature(function).parameters)[: len(names)]) != names:
        raise TypeError(f"{function.__qualname__} takes {', '.join(has)} instead of {', '.join(names)}")


def check_has_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raises TypeError unless the function has arguments of these names."""
    parameters = inspect.signature(function).parameters
    if missing := [name for name in names if name not in parameters]:
        raise TypeError(f"{function.__name__} takes no {missing[0]}")


def check_classes(*classes: type) -> None:
    """Raises TypeError where a class leaves a method abstract, or takes other arguments than vLLM's base class."""
    for cls in classes:
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise TypeError(f"{cls.__name__}.{missing[0]} is missing")
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("vllm."):
                continue
            for name, theirs in inspect.getmembers(base, inspect.isfunction):
                mine = inspect.getattr_static(cls, name)
                mine = getattr(mine, "__func__", mine)
                if name.startswith("__") or not inspect.isfunction(mine) or mine.__module__.startswith("vllm."):
                    continue
                parameters = inspect.signature(theirs).parameters.values()
                if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                    continue  # the base class hands on whatever it is called with
                positional = [None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
                named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
                try:
                    inspect.signature(mine).bind(*positional, **named)
                except TypeError as error:
                    raise TypeError(f"{cls.__name__}.{name}: {error}") from None


def user_attention_backends() -> set[str]:
    """Returns the names in `--attention-backend`; empty if it was left out, or if vLLM is not loading a model."""
    attention = _config_part("attention_config")
    named = [getattr(attention, "backend", None), *(getattr(attention, "backend_per_kind", None) or {}).values()]
    return {str(getattr(backend, "name", backend)) for backend in named if backend is not None}


def tensor_parallel_size() -> int:
    """Returns on how many GPUs vLLM spreads the layers of the model that it is loading."""
    return int(getattr(_config_part("parallel_config"), "tensor_parallel_size", 1))


def loads_placeholders() -> bool:
    """Returns whether vLLM makes weights up, for others to be loaded into their memory (`--load-format dummy`)."""
    return getattr(_config_part("load_config"), "load_format", None) == "dummy"


def _config_part(name: str) -> Any:
    """Returns a part of the config of the model that vLLM is loading; None if it loads none."""
    from vllm.config import get_current_vllm_config_or_none

    return getattr(get_current_vllm_config_or_none(), name, None)


def is_free_to_choose(quantization: str, class_name: str) -> bool:
    """Returns whether the user left the kernel of layers of a kind ("nvfp4_w4a16", "mxfp4", …) to vLLM."""
    from vllm import envs
    from vllm.model_executor.kernels import linear

    if envs.VLLM_BATCH_INVARIANT or class_name in envs.VLLM_DISABLED_KERNELS:
        return False
    chosen = linear._get_linear_backend
    takes_kind = "quantization" in inspect.signature(chosen).parameters
    return str(chosen(quantization=quantization) if takes_kind else chosen()) == "auto"


def limits_activations() -> bool:
    """Returns whether the base class of experts applies a limit of SwiGLU by itself."""
    from vllm.model_executor.layers.fused_moe import activation

    return hasattr(activation, "ApplyMoEActivationConfig")


def activation_limit(experts: Any) -> float | None:
    """Returns the limit of SwiGLU that vLLM's `activation()` would apply for these experts, None if there is none."""
    config = getattr(experts, "moe_config", None)
    limit = getattr(experts.quant_config, "gemm1_clamp_limit", None)
    return getattr(config, "swiglu_limit", None) if limit is None else limit


def spec_with_cell_bytes(spec: Any, cell_bytes: int) -> Any:
    """Returns `spec` of a layer's cache with this number of bytes for a token's key and value in one head."""
    # Before 0.28 vLLM counts the bytes of NVFP4 by itself, and they are the same.
    names = {field.name for field in fields(spec)}
    return replace(spec, state_content_bytes=cell_bytes) if "state_content_bytes" in names else spec


def contiguous_block_layouts() -> tuple[Any, ...]:
    """Returns vLLM's layouts in which a block of one layer is one piece of memory; those with compact layers first."""
    from vllm.v1 import kv_cache_interface

    layouts = getattr(kv_cache_interface, "KVCacheLayout", ())
    return tuple(layout for layout in layouts if layout.is_block_contiguous and layout.is_block_compact)


def lengths_on_host(common: Any) -> Any:
    """Returns the lengths of a step's sequences as the host knows them, int32 `[sequences]`.

    Chunked local attention cuts sequences into pieces, and up to 0.29 hands on the bounds of the whole ones.
    """
    lengths = getattr(common, "_seq_lens_cpu", None)
    return common.seq_lens_cpu_upper_bound if lengths is None else lengths
