"""New tokens attend to a paged KV cache: one a sequence in decoding, or several as a chunk of a prompt.

    out = paged_attention(q, cache.layer(3), block_table, lengths)        q [batch, heads, new, dim]

The new tokens are the last ones of their sequences and are already in the cache: token i of `new` sees the keys up to
position lengths − new + i. One new token is decoding; several are a chunk of a prompt behind earlier ones.

A CPU runs the oracle, which gathers the pages, dequantizes them exactly and attends in float32. A GPU runs the Triton
kernel of `quant.kernels.attention.portable_paged_attention`, which reads the codes directly.
"""

from __future__ import annotations

from typing import Unpack

import torch

from quant.formats.format import FORMATS
from quant.kernels.attention.attention_operands import AttentionOptions, ScoreKeywords, check_devices
from quant.kernels.attention.attention_tiles import DecodeTiles, decode_tiles_for
from quant.kernels.attention.kv_pages import PAGE_SIZES, KVPages, check_kv_format, token_bytes
from quant.kernels.attention.reference import reference

# A block of vLLM's KV cache is one of our pages: one piece of memory, which holds keys and values with their scales.
#
#     block b of a layer   [ codes of K | codes of V | block scales of K | block scales of V ]
#
# Each part is `[kv_heads, tokens, ·]`. Blocks may lie any distance apart, since vLLM lays several layers, or groups of
# layers of other shapes, into one allocation. What vLLM does with a block (shares it between sequences, overlays it
# with the states of a Mamba layer, copies it) works without knowledge of its parts.
#
# No function here imports vLLM.


NVFP4 = FORMATS["nvfp4"]


def cell_bytes(dim: int) -> int:
    """Returns the bytes of a token's key and value in one head."""
    return 2 * token_bytes(NVFP4, dim)


def pages_of(
    cache: torch.Tensor, kv_heads: int, page_size: int, dim: int, scales: tuple[torch.Tensor, torch.Tensor]
) -> KVPages:
    """Returns the pages in a layer's cache, uint8 `[blocks, kv_heads, page_size, cell]`, with their scales.

    Raises:
        ValueError: a block is not one piece of memory.
    """
    cell = cell_bytes(dim)
    expected = (len(cache), kv_heads, page_size, cell)
    if cache.shape != expected or not cache[:1].is_contiguous():
        raise ValueError(
            f"NVFP4 KV cache: vLLM gave a buffer {list(cache.shape)} with strides {cache.stride()}, where blocks of "
            f"{list(expected[1:])} contiguous bytes were expected; leave out --kv-cache-dtype nvfp4"
        )
    tokens, offset = kv_heads * page_size, 0
    parts = []
    for width in (dim // 2, dim // 2, dim // 16, dim // 16):
        strides = (cache.stride(0), page_size * width, width, 1)
        shape = (len(cache), kv_heads, page_size, width)
        parts.append(cache.as_strided(shape, strides, cache.storage_offset() + offset))
        offset += tokens * width
    k, v, k_blocks, v_blocks = parts
    e4m3 = torch.float8_e4m3fn
    return KVPages(k, v, NVFP4, dim, *scales, k_blocks.view(e4m3), v_blocks.view(e4m3))


def paged_attention(
    q: torch.Tensor,
    pages: KVPages,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_length: int | None = None,
    shortest: int | None = None,
    tiles: DecodeTiles | None = None,
    **keywords: Unpack[ScoreKeywords],
) -> torch.Tensor:
    """Returns softmax(cap(q kᵀ · softmax_scale) + mask) v over the keys and values in `pages`.

    Args:
        q: `[batch, heads, new, dim]`, BF16, FP16 or FP32; `pages.kv_heads` divides `heads`. A GPU's tensor cores take
            it in FP16, or in the dtype of an unquantized cache; sums and an output of FP32 stay FP32.
        pages: a layer's pages.
        block_table: int32 `[batch, most pages]`: the pages of each sequence in order.
        lengths: int32 `[batch]`: tokens of each sequence, the new ones included.
        max_length, shortest: the largest and the smallest of `lengths`, from a caller that vouches for them and for
            the block table. None has both checked, which waits for a GPU.
        tiles: the launch; None takes `decode_tiles_for`.
        keywords: window, softcap, softmax_scale: see `AttentionOptions`.

    Returns:
        `[batch, heads, new, dim]` in the dtype of q.

    Raises:
        ValueError: operands that do not fit each other, a page that does not exist, a length below `new`.
    """
    where = f"paged attention q {list(q.shape)} over {pages.format or '16 bit'} pages {list(pages.k.shape)}"
    options = AttentionOptions(causal=True, **keywords)
    options.check(where)
    _check(where, q, pages, block_table, lengths)
    # Reading lengths waits for the GPU. Serving loops know them and vouch for them.
    if max_length is None or shortest is None:
        shortest, max_length = _checked_lengths(where, pages, block_table, lengths)
    if shortest < max(1, q.shape[2]):
        raise ValueError(f"{where}: a length is {shortest}; {q.shape[2]} new tokens are counted in it")
    if max_length > block_table.shape[1] * pages.page_size:
        raise ValueError(
            f"{where}: a length is {max_length}, but the block table {list(block_table.shape)} has room for "
            f"{block_table.shape[1]} pages of {pages.page_size}"
        )
    if q.device.type != "cuda":
        return paged_reference(q, pages, block_table, lengths, **keywords)
    from quant.kernels.attention.portable_paged_attention import attend_pages

    if tiles is None:
        # Query heads that share a KV head are rows of one tile: its keys are then read once.
        rows, programs = q.shape[2] * (q.shape[1] // pages.kv_heads), q.shape[0] * pages.kv_heads
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        tiles = decode_tiles_for(pages, rows, programs, max_length, sms)
    return attend_pages(q, pages, block_table, lengths, options, tiles)


def _check(where: str, q: torch.Tensor, pages: KVPages, block_table: torch.Tensor, lengths: torch.Tensor) -> None:
    check_kv_format(pages.format, pages.dim)
    if q.dim() != 4 or q.shape[3] != pages.dim or not q.numel():
        raise ValueError(f"{where}: expected q [batch, heads, new, {pages.dim}], none of them 0")
    if q.shape[1] % pages.kv_heads:
        raise ValueError(f"{where}: {pages.kv_heads} KV heads do not divide {q.shape[1]} heads")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{where}: q is {q.dtype}; expected bfloat16, float16 or float32")
    if pages.page_size not in PAGE_SIZES:
        raise ValueError(f"{where}: pages of {pages.page_size} tokens; known: {', '.join(map(str, PAGE_SIZES))}")
    for name, tensor, dims in (("block_table", block_table, 2), ("lengths", lengths, 1)):
        if tensor.dtype != torch.int32 or tensor.dim() != dims or len(tensor) != q.shape[0]:
            shape = "[batch, most pages]" if dims == 2 else "[batch]"
            raise ValueError(f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, expected int32 {shape}")
    check_devices(where, q, pages.k, pages.v, block_table, lengths)


def _checked_lengths(where: str, pages: KVPages, block_table: torch.Tensor, lengths: torch.Tensor) -> tuple[int, int]:
    """Returns the smallest and the largest length, once every page that they reach is known to exist."""
    counts, table = lengths.tolist(), block_table.tolist()
    for row, (count, entries) in enumerate(zip(counts, table, strict=True)):
        # Only pages that the length reaches are read; the rest of a row may hold anything.
        wrong = [page for page in entries[: -(-count // pages.page_size)] if not 0 <= page < len(pages.k)]
        if wrong:
            raise ValueError(f"{where}: block table row {row} names page {wrong[0]}; there are {len(pages.k)}")
    return min(counts), max(counts)


def paged_reference(
    q: torch.Tensor,
    pages: KVPages,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
    **keywords: Unpack[ScoreKeywords],
) -> torch.Tensor:
    """Returns the oracle: each sequence's pages gathered and dequantized, then plain attention in `compute`."""
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        k, v = pages.read(block_table[row, : -(-length // pages.page_size)], length)
        # Probabilities stay unrounded: queries are in 16 bit here, and the kernel multiplies by values in 16 bit.
        attended, _ = reference(
            q[row, None], k[None], v[None], causal=True, dtype=q.dtype, compute=compute, round_p=False, **keywords
        )
        out[row] = attended[0]
    return out
