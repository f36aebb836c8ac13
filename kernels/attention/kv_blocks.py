"""A block of vLLM's KV cache is one of our pages: one piece of memory, which holds keys and values with their scales.

    block b of a layer   [ codes of K | codes of V | block scales of K | block scales of V ]

Each part is `[kv_heads, tokens, ·]`. Blocks may lie any distance apart, since vLLM lays several layers, or groups of
layers of other shapes, into one allocation. What vLLM does with a block (shares it between sequences, overlays it with
the states of a Mamba layer, copies it) works without knowledge of its parts.

No function here imports vLLM.
"""

from __future__ import annotations

import torch

from quant.formats.format import FORMATS
from quant.kernels.attention.kv_pages import KVPages, token_bytes

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
