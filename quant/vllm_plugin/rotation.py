"""Rotations and writes to the KV cache between our layers start before the previous kernel has ended.

    our matmul of q, k, v ─▶ rotation ─▶ keys and values to the cache ─▶ vLLM's attention

With one token each takes vLLM about 3 µs a layer, most of it the start of a kernel. So vLLM's classes of rotary
embeddings that only differ in their angles are replaced by these subclasses, through vLLM's own registry, and so is the
function by which its FlashAttention backend writes a cache in 16 bit.

q and k that a norm has written (Qwen3) are left to vLLM, where torch.compile makes one kernel of norm and rotation. So
are rotations of a part of a head, pairs of neighbouring columns, and caches in other formats.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backends import flash_attn

from quant.kernels.base.custom_ops import register
from quant.vllm_plugin import linear_kernels, releases


def _rotate(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from quant.kernels.attention.portable_decoder_step import rotate

    return rotate(positions, q, k, cache, dim)


def _like_both(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *arguments: object) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape)


# One node for torch.compile, as in `overlap.py`.
register(
    "quant::rotate",
    "(Tensor positions, Tensor q, Tensor k, Tensor cache, int dim) -> (Tensor, Tensor)",
    _like_both,
    default=_rotate,
)


def takes_columns(x: torch.Tensor, dim: int) -> bool:
    """Returns whether x is a part of a matmul's columns: rows of bfloat16 that lie further apart than they are long."""
    able = x.dim() == 2 and x.dtype is torch.bfloat16 and x.stride(1) == 1 and x.shape[1] % dim == 0
    return able and x.stride(0) > x.shape[1]


class BlockscaleRotation:
    """Goes before a class of vLLM's whose cosines and sines lie in `cos_sin_cache`."""

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        cache, dim = self.cos_sin_cache, self.head_size
        if (
            key is not None
            and linear_kernels.has_our_layers()
            and self.is_neox_style
            and self.rotary_dim == dim == cache.shape[1]
            and positions.dim() == 1
            and (cache.dtype, cache.device) == (query.dtype, query.device)
            and takes_columns(query, dim)
            and takes_columns(key, dim)
        ):
            return torch.ops.quant.rotate(positions, query, key, cache, dim)
        return super().forward(positions, query, key)  # type: ignore[misc]


def takes_cache(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, format: str) -> bool:
    """Returns whether our kernel writes these keys and values to a cache of this format, "auto" or by name."""
    rows = all(x.dim() == 3 and x.dtype is torch.bfloat16 and x.stride()[1:] == (x.shape[2], 1) for x in (k, v))
    pages = k_cache.dtype is torch.bfloat16 and k_cache.dim() == 4 and k_cache.stride(3) == 1
    alike = k.shape[1:] == v.shape[1:] == k_cache.shape[2:] and k_cache.stride() == v_cache.stride()
    return linear_kernels.has_our_layers() and format in ("auto", "bfloat16") and rows and pages and alike


def install() -> str:
    """Replaces the classes and the function, once however often it is called.

    Raises:
        AttributeError, ImportError, TypeError: this vLLM lacks a name, or has other arguments; nothing was changed.
    """
    write = flash_attn.reshape_and_cache_flash
    if getattr(write, "is_blockscale", False):
        return "rotations and cache writes between them"
    releases.check_arguments(RotaryEmbedding.forward_native, "self", "positions", "query", "key")
    releases.check_arguments(write, "key", "value", "key_cache", "value_cache", "slot_mapping")

    @wraps(write)
    def store(
        k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
        format: str, *scales: Any,
    ) -> None:  # fmt: skip
        if takes_cache(k, v, k_cache, v_cache, format):
            from quant.kernels.attention.portable_decoder_step import store_rows

            store_rows(k, v, k_cache, v_cache, slots)
        else:
            write(k, v, k_cache, v_cache, slots, format, *scales)

    store.is_blockscale = True  # type: ignore[attr-defined]
    flash_attn.reshape_and_cache_flash = store
    for name, cls in vars(rotary_embedding).items():
        if isinstance(cls, type) and issubclass(cls, RotaryEmbedding) and _only_angles_differ(cls):
            # `setdefault`: another plug-in that came first keeps its class.
            op_registry_oot.setdefault(name, type(f"Blockscale{name}", (BlockscaleRotation, cls), {}))
    return "rotations and cache writes between them"


def _only_angles_differ(cls: type) -> bool:
    """Returns whether a class rotates as its base does, so that only the angles in its cache are its own."""
    forward = cls.forward is CustomOp.forward  # type: ignore[attr-defined]
    return forward and all(
        getattr(cls, name) is getattr(RotaryEmbedding, name) for name in ("forward_native", "forward_cuda")
    )
