"""New tokens attend to a paged KV cache: one a sequence in decoding, or several as a chunk of a prompt.

    out = paged_attention(q, cache.layer(3), block_table, lengths)        q [batch, heads, new, dim]

The new tokens are the last ones of their sequences and are already in the cache: token i of `new` sees the keys up to
position lengths − new + i. One new token is decoding; several are a chunk of a prompt behind earlier ones.

A CPU runs the oracle, which gathers the pages, dequantizes them exactly and attends in float32. A GPU runs the Triton
kernel of `quant.kernels.attention.portable_paged_attention`, which reads the codes directly.

`PagedKVCache` holds the pages, and stores shared prompts once:

    cache = PagedKVCache(layers=32, kv_heads=8, dim=128, format=FORMATS["fp8_token"], pages=4096)
    a = cache.add()
    cache.append(layer, [a], k, v)                  # k, v [1, kv_heads, new, dim], rounded as they are written
    b = cache.fork(a)                               # shares every page; the first to write gets a copy
    out = cache.attend(layer, [a, b], q)            # q [2, heads, new, dim], over all cached tokens

A page spans all layers and KV heads, so a sequence is a list of pages (its row of the block table) and growing moves no
data. A page counts its owners; one with several owners is copied before it is written.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from quant.formats.format import FORMATS, Format
from quant.kernels.attention.attention_operands import (
    AttentionOptions,
    DecodeTiles,
    ScoreKeywords,
    check_devices,
    decode_tiles_for,
)
from quant.kernels.attention.kv_pages import (
    PAGE_SIZES,
    KVPages,
    check_kv_format,
    first_scale,
    token_bytes,
    write_reference,
)
from quant.kernels.attention.reference import reference

# A block of vLLM's KV cache is one of our pages, one piece of memory, and blocks may lie any distance apart:
#
#     block b   [ codes of K | codes of V | block scales of K | block scales of V ]   each `[kv_heads, tokens, ·]`
#
# So whatever vLLM does with a block (shares it, copies it, overlays it with a Mamba state) needs no knowledge of parts.
NVFP4 = FORMATS["nvfp4"]


def cell_bytes(dim: int) -> int:
    """Returns the bytes of a token's key and value in one head."""
    return 2 * token_bytes(NVFP4, dim)


def pages_of(cache: Tensor, kv_heads: int, page_size: int, dim: int, scales: tuple[Tensor, Tensor]) -> KVPages:
    """Returns the pages in a layer's cache, uint8 `[blocks, kv_heads, page_size, cell]`, with their scales."""
    expected = (len(cache), kv_heads, page_size, cell_bytes(dim))
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
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    lengths: Tensor,
    *,
    max_length: int | None = None,
    shortest: int | None = None,
    tiles: DecodeTiles | None = None,
    **keywords: Unpack[ScoreKeywords],
) -> Tensor:
    """Returns softmax(cap(q kᵀ · softmax_scale) + mask) v over the keys and values in `pages`, in the dtype of q.

    Args:
        q: `[batch, heads, new, dim]`, BF16, FP16 or FP32; `pages.kv_heads` divides `heads`. A GPU's tensor cores take
            it in FP16, or in the dtype of an unquantized cache; sums and an output of FP32 stay FP32.
        block_table: int32 `[batch, most pages]`: the pages of each sequence in order.
        lengths: int32 `[batch]`: tokens of each sequence, the new ones included.
        max_length, shortest: the largest and the smallest of `lengths`, from a caller that vouches for them and for
            the block table. None has both checked, which waits for a GPU.
    """
    where = f"paged attention q {list(q.shape)} over {pages.format or '16 bit'} pages {list(pages.k.shape)}"
    options = AttentionOptions(causal=True, **keywords)
    options.check(where)
    _check(where, q, pages, block_table, lengths)
    # Reading lengths waits for the GPU. Serving loops know them and vouch for them.
    if max_length is None or shortest is None:
        counts = lengths.tolist()
        for row, (count, entries) in enumerate(zip(counts, block_table.tolist(), strict=True)):
            # Only pages that the length reaches are read; the rest of a row may hold anything.
            wrong = [page for page in entries[: -(-count // pages.page_size)] if not 0 <= page < len(pages.k)]
            if wrong:
                raise ValueError(f"{where}: block table row {row} names page {wrong[0]}; there are {len(pages.k)}")
        shortest, max_length = min(counts), max(counts)
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


def _check(where: str, q: Tensor, pages: KVPages, block_table: Tensor, lengths: Tensor) -> None:
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


def paged_reference(
    q: Tensor, pages: KVPages, block_table: Tensor, lengths: Tensor, *, compute: torch.dtype = torch.float32,
    **keywords: Unpack[ScoreKeywords],
) -> Tensor:  # fmt: skip
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


class PagedKVCache:
    """Keys and values of many sequences and all layers.

    `pages` is their number at first; more are added when all are taken. Scales are calibrated, float32 `[layers,
    kv_heads]`; None takes them from the first tokens. `dtype` is of an unquantized cache.
    """

    def __init__(
        self, layers: int, kv_heads: int, dim: int, *, format: Format | None = None, pages: int = 64,
        page_size: int = 64, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        check_kv_format(format, dim)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"KV cache: pages of {page_size} tokens; known: {', '.join(map(str, PAGE_SIZES))}")
        if min(layers, kv_heads, pages) < 1:
            raise ValueError(f"KV cache: {layers} layers, {kv_heads} KV heads, {pages} pages; each must be at least 1")
        self.layers, self.kv_heads, self.dim = layers, kv_heads, dim
        self.format, self.page_size = format, page_size
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self._scales = self._checked_scales(k_scale, v_scale)
        # By layer, the tensors whose scale its first tokens will set.
        self._unscaled = [[name for name, x in (("k", k_scale), ("v", v_scale)) if x is None] for _ in range(layers)]
        size = (layers, pages, kv_heads, page_size)
        self._pools = {
            name: torch.zeros(*size, *width, dtype=kind, device=self.device)
            for name, (width, kind) in self._tensors(dtype).items()
        }
        # `pop()` takes the last, so pages are handed out in order from 0.
        self._free = list(range(pages - 1, -1, -1))
        # Page i has as many owners as sequences list it; it is written only with one owner.
        self._owners = [0] * pages
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, list[int]] = {}
        self._version = self._next = 0
        self._table: tuple[tuple[int, ...], int, Tensor] | None = None
        self._counts: tuple[tuple[int, ...], Tensor] | None = None

    def _checked_scales(self, k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, Tensor] | None:
        named_scales = {"k_scale": k_scale, "v_scale": v_scale}
        if self.format is None or self.format.per_row:  # FP8 with a scale for each token measures them
            if named := [name for name, scale in named_scales.items() if scale is not None]:
                raise ValueError(f"KV cache in {self.format or '16 bit'}: {', '.join(named)} given, but it has none")
            return None
        shape, scales = (self.layers, self.kv_heads), {}
        for name, scale in named_scales.items():
            scale = torch.ones(shape, dtype=torch.float32) if scale is None else scale
            if tuple(scale.shape) != shape or not bool((scale > 0).all() and scale.isfinite().all()):
                raise ValueError(
                    f"KV cache: {name} {list(scale.shape)} must be [layers, kv_heads] = {list(shape)}, positive"
                )
            scales[name] = scale.to(self.device, torch.float32).clone()
        return scales

    def _tensors(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the width and dtype, for a token of a head, of each tensor by name."""
        if self.format is None:
            if dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(f"KV cache: {dtype}; a cache that is not quantized is in bfloat16 or float16")
            return dict.fromkeys(("k", "v"), ((self.dim,), dtype))
        if self.format.global_scale:
            codes, blocks = ((self.dim // 2,), torch.uint8), ((self.dim // 16,), torch.float8_e4m3fn)
            return {"k": codes, "v": codes, "k_blocks": blocks, "v_blocks": blocks}
        codes = ((self.dim,), torch.float8_e4m3fn)
        if self.format.per_tensor:
            return {"k": codes, "v": codes}
        return {"k": codes, "v": codes, "k_scale": ((), torch.float32), "v_scale": ((), torch.float32)}

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(pool.nbytes for pool in self._pools.values())

    def add(self) -> int:
        """Returns a new, empty sequence."""
        return self._register([], [0] * self.layers)

    def fork(self, sequence: int) -> int:
        """Returns a new sequence that begins as `sequence` does and shares its pages until one of them writes."""
        pages = self._of(sequence)
        for page in pages:
            self._owners[page] += 1
        return self._register(list(pages), list(self._lengths[sequence]))

    def drop(self, sequence: int) -> None:
        """Forgets a sequence; its pages are free once no other owns them."""
        for page in self._of(sequence):
            self._release(page)
        del self._pages[sequence], self._lengths[sequence]

    def crop(self, sequence: int, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        pages = self._of(sequence)
        self._lengths[sequence] = [min(seen, length) for seen in self._lengths[sequence]]
        keep = -(-length // self.page_size)
        for page in pages[keep:]:
            self._release(page)
        del pages[keep:]
        self._version += 1

    def length(self, sequence: int, layer: int = 0) -> int:
        """Returns the number of tokens written so far."""
        self._of(sequence)
        return self._lengths[sequence][layer]

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """Returns the pages of a sequence, in order."""
        return tuple(self._of(sequence))

    def layer(self, layer: int) -> KVPages:
        """Returns the pages of one layer, as attention takes them."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"KV cache: layer {layer} of {self.layers}")
        parts = {name: pool[layer] for name, pool in self._pools.items()}
        if self._scales is not None:
            parts |= {name: scale[layer] for name, scale in self._scales.items()}
        return KVPages(parts.pop("k"), parts.pop("v"), self.format, self.dim, **parts)

    def append(self, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Appends new tokens to sequences, a layer at a time."""
        # k, v: `[len(sequences), kv_heads, new, dim]`, K after RoPE; any floating dtype and strides.
        pages = self.layer(layer)
        expected = (len(sequences), self.kv_heads, k.shape[2] if k.dim() == 4 else 0, self.dim)
        if tuple(k.shape) != expected or v.shape != k.shape or not expected[2]:
            raise ValueError(
                f"KV cache: k {list(k.shape)}, v {list(v.shape)}; expected [{len(sequences)} sequences, "
                f"{self.kv_heads} KV heads, 1 or more new tokens, {self.dim}]"
            )
        if k.device != self.device or v.device != self.device:
            raise ValueError(f"KV cache on {self.device}: k is on {k.device}, v on {v.device}")
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"KV cache: sequences {list(sequences)}: one is named twice")
        if self._scales is not None:
            for name in self._unscaled[layer]:
                scale = first_scale(k if name == "k" else v, self.format)
                assert scale is not None
                self._scales[f"{name}_scale"][layer] = scale
            self._unscaled[layer] = []
        starts = [self.length(sequence, layer) for sequence in sequences]
        self._reserve(sequences, starts, k.shape[2])
        pages = self.layer(layer)
        table, first = self.block_table(sequences), self._tensor_of(starts)
        if self.device.type == "cuda":
            from quant.kernels.attention.portable_paged_kv_cache import write_kv

            write_kv(pages, table, first, k, v)
        else:
            write_reference(pages, table, first, k, v)
        for sequence, start in zip(sequences, starts, strict=True):
            self._lengths[sequence][layer] = start + k.shape[2]

    def reserve(self, sequences: Sequence[int], room: int) -> None:
        """Gives sequences pages for `room` tokens each, including tokens that are already written."""
        starts = [self.length(sequence) for sequence in sequences]
        for sequence, start in zip(sequences, starts, strict=True):
            self._reserve([sequence], [start], max(room - start, 0))

    def attend(self, layer: int, sequences: Sequence[int], q: Tensor, **keywords: Unpack[ScoreKeywords]) -> Tensor:
        """Returns the causal attention of the newest tokens over all cached tokens: see `paged_attention`."""
        counts = [self.length(sequence, layer) for sequence in sequences]
        return paged_attention(
            q, self.layer(layer), self.block_table(sequences), self._tensor_of(counts),
            max_length=max(counts, default=0), shortest=min(counts, default=0), **keywords,
        )  # fmt: skip

    def read(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Returns K and V of a sequence, dequantized: float32 `[kv_heads, length, dim]`."""
        return self.layer(layer).read(self._of(sequence), self.length(sequence, layer))

    def block_table(self, sequences: Sequence[int]) -> Tensor:
        """Returns the pages by sequence, int32 `[len(sequences), most pages]`, filled up with page 0."""
        key = tuple(sequences)
        if self._table is None or self._table[:2] != (key, self._version):
            rows = [self._of(sequence) for sequence in sequences]
            width = max(1, *map(len, rows))
            table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
            self._table = (key, self._version, table.to(self.device))
        return self._table[2]

    def _tensor_of(self, counts: Sequence[int]) -> Tensor:
        """Returns counts on the device; all layers of a step have the same."""
        key = tuple(counts)
        if self._counts is None or self._counts[0] != key:
            self._counts = (key, torch.tensor(key, dtype=torch.int32).to(self.device))
        return self._counts[1]

    def _register(self, pages: list[int], lengths: list[int]) -> int:
        sequence = self._next
        self._next += 1
        self._pages[sequence], self._lengths[sequence] = pages, lengths
        return sequence

    def _of(self, sequence: int) -> list[int]:
        try:
            return self._pages[sequence]
        except KeyError:
            raise ValueError(f"KV cache: no sequence {sequence}; there are {list(self._pages)}") from None

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    def _reserve(self, sequences: Sequence[int], starts: Sequence[int], new: int) -> None:
        """Gives each sequence pages of its own for the tokens to be written, or raises before any change."""
        missing_pages, needed = [], 0
        for sequence, start in zip(sequences, starts, strict=True):
            pages = self._of(sequence)
            touched = range(start // self.page_size, -(-(start + new) // self.page_size))
            # A page with another owner is copied before it is written; one beyond the end is new.
            missing = [i for i in touched if i >= len(pages) or self._owners[pages[i]] > 1]
            missing_pages.append((pages, missing))
            needed += len(missing)
        # Counted for all sequences first, so that a full cache changes nothing.
        if needed > len(self._free):
            have = len(self._owners)
            more = max(needed - len(self._free), have)
            for name, pool in self._pools.items():
                bigger = pool.new_zeros(self.layers, have + more, *pool.shape[2:])
                bigger[:, :have] = pool
                self._pools[name] = bigger
            self._owners += [0] * more
            self._free = list(range(have + more - 1, have - 1, -1)) + self._free
        for pages, missing in missing_pages:
            for index in missing:
                # Once its other owners have taken copies, a page is this sequence's own.
                if index < len(pages) and self._owners[pages[index]] == 1:
                    continue
                page = self._free.pop()
                self._owners[page] = 1
                if index == len(pages):
                    pages.append(page)
                else:
                    for pool in self._pools.values():
                        pool[:, page] = pool[:, pages[index]]
                    self._owners[pages[index]] -= 1
                    pages[index] = page
                self._version += 1
