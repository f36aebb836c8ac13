"""Decoding steps in CUDA graphs attend to a cache in 16 bit by our kernel, between our own kernels.

    rotation ─▶ keys and values to the cache ─▶ attention ─▶ our matmul

Replaced is the function that vLLM's FlashAttention backend calls: ours takes the calls with one new token a sequence,
and hands on all others, such as prompts, drafts to verify, and caches in FP8. Outside of graphs vLLM's kernel stays,
because the host starts it sooner, and an attention backend that the user named stays as it is.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends import flash_attn

from quant.kernels.attention.attention_operands import AttentionOptions
from quant.kernels.attention.attention_operands import DecodeTiles, decode_tiles_for
from quant.kernels.attention.kv_pages import PAGE_SIZES, KVPages
from quant.vllm_plugin import linear_kernels
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")

DIMS = (64, 128, 256)
NAMES = (
    "q", "k", "v", "out", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "window_size",
    "softcap", "block_table",
)  # fmt: skip
"""Arguments that ours reads."""
NEUTRAL = ("cu_seqlens_q", "scheduler_metadata", "fa_version", "q_descale", "k_descale", "v_descale", "num_splits")
"""Arguments that change nothing for one token a sequence and a cache in 16 bit; calls with others stay with vLLM."""

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


def tiles_for(q: torch.Tensor, pages: KVPages, longest: int) -> DecodeTiles:
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


def install() -> str:
    """Replaces the function, once however often it is called.

    Raises:
        AttributeError, ImportError, TypeError: this vLLM lacks the name, or an argument; nothing was changed.
    """
    theirs = flash_attn.flash_attn_varlen_func
    if getattr(theirs, "is_blockscale", False):
        return "decoding over a cache in 16 bit"
    parameters = inspect.signature(theirs).parameters
    if missing := [name for name in NAMES if name not in parameters]:
        raise TypeError(f"flash_attn_varlen_func takes no {missing[0]}")

    @wraps(theirs)
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

    attention.is_blockscale = True  # type: ignore[attr-defined]
    flash_attn.flash_attn_varlen_func = attention
    return "decoding over a cache in 16 bit"


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
