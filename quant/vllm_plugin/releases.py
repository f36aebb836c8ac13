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
"""

import inspect
from dataclasses import fields, replace
from typing import Any


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
