"""Between our linear layers, kernels of ours let the next matmul start before they have ended, as in our own decoder.

    norm ─▶ our matmul of q, k, v ─▶ rotation ─▶ keys and values to the cache ─▶ attention ─▶ our matmul ─▶ norm …

Our matmuls begin with the weight, which no other kernel writes: a matmul that is launched while the kernel before it
still runs has its first tiles of weight in shared memory when its input is ready ("programmatic dependent launch",
`kernels/base/portable_dependent_launch.py`). vLLM's kernels give no sign that the next one may start, and with one
token a matmul of 7 to 30 µs then begins some 3 µs late, about its gain over Marlin.

    norms, SwiGLU    vLLM's classes `RMSNorm` and `SiluAndMul`, through its registry of replacements; ours round where
                     vLLM's kernels round
    rotations        classes of rotary embeddings that only differ in their angles, through the same registry. q and k
                     that a norm has written (Qwen3) are left to vLLM, where torch.compile makes one kernel of both
    cache writes     the function by which vLLM's FlashAttention backend writes a cache in 16 bit
    attention        the function that this backend calls, for decoding steps in CUDA graphs: one new token a sequence,
                     a cache in 16 bit. Outside of graphs vLLM's kernel stays, because the host starts it sooner

Until a linear layer has taken our kernels, and for other inputs than each kernel takes, they call vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backends import flash_attn

from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles, decode_tiles_for
from quant.kernels.attention.kv_pages import PAGE_SIZES, KVPages
from quant.kernels.base.custom_ops import register
from quant.vllm_plugin import linear_kernels
from quant.vllm_plugin.releases import check_arguments, check_classes, check_has_arguments, replace_function
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")
MOST_COLUMNS = 32768


def _kernel(name: str) -> Callable[..., Any]:
    """Returns a kernel of the decoder's step, whose file is imported when the kernel is called: it needs Triton."""

    def call(*arguments: Any) -> Any:
        from quant.kernels.attention import portable_decoder_step

        return getattr(portable_decoder_step, name)(*arguments)

    return call


# As custom ops, so that torch.compile takes each for one node of known shapes and does not trace into Triton.
register(
    "quant::add_rmsnorm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
    default=_kernel("add_rmsnorm"),
)
register(
    "quant::rmsnorm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    default=lambda x, weight, eps: _kernel("add_rmsnorm")(x, None, weight, eps)[0],
)
register(
    "quant::silu_times_up",  # training has a `quant::swiglu`, perhaps in the same process
    "(Tensor both) -> Tensor",
    lambda both: both.new_empty(both.shape[0], both.shape[1] // 2),
    default=_kernel("swiglu"),
)
register(
    "quant::rotate",
    "(Tensor positions, Tensor q, Tensor k, Tensor cache, int dim) -> (Tensor, Tensor)",
    lambda positions, q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    default=_kernel("rotate"),
)


def takes_rows(x: Tensor) -> bool:
    """Returns whether our kernels take these rows, in a model that has our linear layers."""
    return linear_kernels.has_our_layers() and x.dim() == 2 and x.dtype is torch.bfloat16 and x.is_contiguous()


class BlockscaleRMSNorm(RMSNorm):
    """`h / rms(h) · weight` and h, where `h = x + residual`; without a residual only the first."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        # `variance_size_override` norms by a part of the columns only, which our kernel does not.
        able = self.has_weight and self.variance_size_override is None and x.shape[-1] <= MOST_COLUMNS
        weight = self.weight
        if not (able and takes_rows(x) and weight.dtype is x.dtype and (residual is None or takes_rows(residual))):
            return super().forward(x, residual) if residual is not None else super().forward(x)
        if residual is None:
            return torch.ops.quant.rmsnorm(x, weight, self.variance_epsilon)
        return torch.ops.quant.add_rmsnorm(x, residual, weight, self.variance_epsilon)


class BlockscaleSiluAndMul(SiluAndMul):
    """`silu(gate) · up`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quant.silu_times_up(x) if takes_rows(x) else super().forward(x)


def takes_columns(x: Tensor, dim: int) -> bool:
    """Returns whether x is a part of a matmul's columns: rows of bfloat16 that lie further apart than they are long."""
    able = x.dim() == 2 and x.dtype is torch.bfloat16 and x.stride(1) == 1 and x.shape[1] % dim == 0
    return able and x.stride(0) > x.shape[1]


class BlockscaleRotation:
    """Goes before a class of vLLM's whose cosines and sines lie in `cos_sin_cache`."""

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
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


def takes_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, format: str) -> bool:
    """Returns whether our kernel writes these keys and values to a cache of this format, "auto" or by name."""
    rows = all(x.dim() == 3 and x.dtype is torch.bfloat16 and x.stride()[1:] == (x.shape[2], 1) for x in (k, v))
    pages = k_cache.dtype is torch.bfloat16 and k_cache.dim() == 4 and k_cache.stride(3) == 1
    alike = k.shape[1:] == v.shape[1:] == k_cache.shape[2:] and k_cache.stride() == v_cache.stride()
    return linear_kernels.has_our_layers() and format in ("auto", "bfloat16") and rows and pages and alike


# Arguments of FlashAttention that ours reads, and those that change nothing for one token a sequence and a cache in 16
# bit; calls with others stay with vLLM.
DIMS = (64, 128, 256)
NAMES = (
    "q", "k", "v", "out", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "window_size",
    "softcap", "block_table",
)  # fmt: skip
NEUTRAL = ("cu_seqlens_q", "scheduler_metadata", "fa_version", "q_descale", "k_descale", "v_descale", "num_splits")

_prepared: dict[Any, bool] = {}
"""By kind of call, whether our kernel computes it. Found outside of graphs: nothing is compiled during a capture."""


def takes_step(named: dict[str, Any]) -> bool:
    """Returns whether ours computes a call with these arguments: one new token of each sequence, over 16-bit pages."""
    if (
        named.get("max_seqlen_q") != 1
        or not linear_kernels.has_free_attention()
        or not all(name in named for name in NAMES)
    ):
        return False
    if any(value is not None for name, value in named.items() if name not in NAMES + NEUTRAL):
        return False
    q, k, v, out = (named[name] for name in ("q", "k", "v", "out"))
    table, lengths, window = named["block_table"], named["seqused_k"], named["window_size"]
    alike = k.dim() == 4 and k.shape == v.shape and k.stride() == v.stride() and k.stride(3) == 1
    pages = alike and k.shape[1] in PAGE_SIZES and k.shape[3] == q.shape[2] and k.shape[3] in DIMS
    rows = q.dtype is k.dtype is torch.bfloat16 and q.stride(2) == 1 and out is not None and out.is_contiguous()
    batch = table is not None and lengths is not None and len(q) == len(table) == len(lengths)
    return bool(pages and rows and batch and named["causal"] is True and (window is None or window[1] <= 0))


def tiles_for(q: Tensor, pages: KVPages, longest: int) -> DecodeTiles:
    """Returns the launch for one query `[sequences, heads, dim]` each; a graph serves all lengths up to `longest`.

    Where sequences and KV heads are fewer than SMs, each SM gets one program with 192 KiB of keys and values on the
    way: 23.8 µs for 16 sequences of 960 tokens in 8 KV heads, where FlashAttention 3 takes 29.6 and the rate of a copy
    allows 21.0 (H100). More programs of long reads would be displaced by the next kernel's, so they do not overlap.
    """
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs, group = len(q) * pages.kv_heads, q.shape[1] // pages.kv_heads
    if programs > sms or group > 16:
        return replace(decode_tiles_for(pages, group, programs, longest, sms), overlap=False)
    keys = 128 if pages.dim <= 128 else 64
    return DecodeTiles(8 if group <= 8 else 16, keys, 8, 3, min(sms // programs, -(-longest // keys)))


def attend(named: dict[str, Any]) -> None:
    """Computes such a call into `out`."""
    from quant.kernels.attention.portable_paged_attention import attend_pages

    q, k, v, window = named["q"], named["k"], named["v"], named["window_size"]
    # FlashAttention counts the tokens before the last, and takes -1 for all.
    seen = None if window is None or window[0] < 0 else window[0] + 1
    options = AttentionOptions(
        causal=True, window=seen, softcap=named["softcap"] or None, softmax_scale=named["softmax_scale"]
    )
    pages = KVPages(k.transpose(1, 2), v.transpose(1, 2), None, q.shape[2])
    tiles, out = tiles_for(q, pages, named["max_seqlen_k"]), named["out"].view(q.shape)[:, :, None]
    attend_pages(q[:, :, None], pages, named["block_table"], named["seqused_k"], options, tiles, out=out)


def _runs(named: dict[str, Any]) -> bool:
    """Computes a call for the first time, after the self-test; a line of the log says why, if it cannot."""
    reason = SelfTest(named["q"].device).decoding_failure()
    if not reason:
        try:
            attend(named)
        # As in a self-test: whatever goes wrong in a compiler or a driver leaves the layer to vLLM.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if reason:
        logger.warning_once("Blockscale: decoding over a cache in 16 bit stays with vLLM: %s", reason)
    return not reason


def install_norms() -> str:
    """Replaces the two classes wherever vLLM makes one, unless another plug-in has replaced them."""
    check_classes(BlockscaleRMSNorm, BlockscaleSiluAndMul)
    # `setdefault`: another plug-in that came first keeps its class.
    op_registry_oot.setdefault("RMSNorm", BlockscaleRMSNorm)
    op_registry_oot.setdefault("SiluAndMul", BlockscaleSiluAndMul)
    return "norms and SwiGLU between them"


def install_rotations() -> str:
    """Replaces the classes of rotary embeddings, and the function that writes the cache."""
    check_arguments(RotaryEmbedding.forward_native, "self", "positions", "query", "key")

    def wrap(write: Any) -> Any:
        def store(
            key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
            slot_mapping: Tensor, kv_cache_dtype: str, *arguments: Any, **named: Any,
        ) -> None:  # fmt: skip
            if takes_cache(key, value, key_cache, value_cache, kv_cache_dtype):
                from quant.kernels.attention.portable_decoder_step import store_rows

                store_rows(key, value, key_cache, value_cache, slot_mapping)
            else:
                write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, *arguments, **named)

        return store

    replace_function(flash_attn, "reshape_and_cache_flash", wrap)
    for name, cls in vars(rotary_embedding).items():
        is_rotation = isinstance(cls, type) and issubclass(cls, RotaryEmbedding)
        # Where a class rotates as its base does, only the angles in its cache are its own.
        if (
            is_rotation
            and cls.forward is CustomOp.forward
            and cls.forward_native is RotaryEmbedding.forward_native
            and cls.forward_cuda is RotaryEmbedding.forward_cuda
        ):
            op_registry_oot.setdefault(name, type(f"Blockscale{name}", (BlockscaleRotation, cls), {}))
    return "rotations and cache writes between them"


def install_decode_attention() -> str:
    """Replaces the function that vLLM's FlashAttention backend calls."""
    check_has_arguments(flash_attn.flash_attn_varlen_func, *NAMES)

    def wrap(theirs: Any) -> Any:
        def attention(*arguments: Any, **named: Any) -> Any:
            if not arguments and takes_step(named):
                q, k = named["q"], named["k"]
                kind = q.shape, q.stride(), k.shape[1:], k.stride(), str(named["window_size"]), named["softcap"]
                if kind not in _prepared and not torch.cuda.is_current_stream_capturing():
                    _prepared[kind] = _runs(named)  # vLLM's kernel writes the same output below
                elif _prepared.get(kind) and torch.cuda.is_current_stream_capturing():
                    attend(named)
                    return named["out"]
            return theirs(*arguments, **named)

        return attention

    replace_function(flash_attn, "flash_attn_varlen_func", wrap)
    return "decoding over a cache in 16 bit"
