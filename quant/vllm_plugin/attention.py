"""This attention backend keeps vLLM's KV cache in NVFP4 on Hopper GPUs: `vllm serve … --kv-cache-dtype nvfp4`.

vLLM plans such a cache (head_dim / 2 + head_dim / 16 bytes for a key or a value) and has a backend for it on Blackwell
alone. Ours reads and writes the pages with the kernels of `quant.kernels.attention.decode`.

    decoding, one token a sequence    paged attention straight over the codes; CUDA graphs capture it
    first chunk of a prompt           FlashAttention over keys and values in 16 bit, which are then in the cache too
    later chunks, cached prefixes     the earlier keys and values dequantized, FlashAttention over them and the new ones

A block of vLLM's cache is a page. The cache of a layer is one buffer, of which keys, values and their block scales take
a part each; page i is the i-th of every part, so prefix caching, which shares pages by number, works as ever. KV
connectors, offloading and models that keep the states of Mamba layers in the same buffers read a block as one piece of
memory; they are refused.

A layer that shares the cache of an earlier one (Gemma 3n) reads keys and values there, under that layer's scales.

The second-level scales come from the checkpoint's `k_scale` and `v_scale`. These are made for an FP8 cache, amax / 448,
and NVFP4 needs amax / 2688. Without them the scale is 1 / 6, with which keys and values may be as large as 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from quant.formats.format import FORMATS
from quant.kernels.attention_operands import AttentionOptions
from quant.kernels.attention_tiles import decode_tiles_for
from quant.kernels.kv_pages import PAGE_SIZES, KVPages, token_bytes

logger = init_logger("vllm.blockscale")
NVFP4 = FORMATS["nvfp4"]


def pages_of(
    cache: torch.Tensor, kv_heads: int, page_size: int, dim: int, scales: tuple[torch.Tensor, torch.Tensor]
) -> KVPages:
    """The pages in a layer's buffer, `[blocks, …]` uint8 and contiguous, under scales of keys and of values."""
    if not cache.is_contiguous():
        raise ValueError(
            f"NVFP4 KV cache: vLLM gave a buffer {list(cache.shape)} with strides {cache.stride()}, as for models that "
            "mix kinds of cache; our attention takes contiguous ones, so leave out --kv-cache-dtype nvfp4"
        )
    count, lead = len(cache), (len(cache), kv_heads, page_size)
    codes, blocks = count * kv_heads * page_size * dim // 2, count * kv_heads * page_size * dim // 16
    # [codes of K | codes of V | block scales of K | block scales of V], each for all blocks of vLLM's cache
    k, v, k_blocks, v_blocks = cache.view(-1).split([codes, codes, blocks, blocks])
    return KVPages(
        k.view(*lead, -1), v.view(*lead, -1), NVFP4, dim, *scales,
        k_blocks.view(torch.float8_e4m3fn).view(*lead, -1), v_blocks.view(torch.float8_e4m3fn).view(*lead, -1),
    )  # fmt: skip


@dataclass
class Batch(AttentionMetadata):
    """The sequences of one step: decoding sequences first, then chunks of prompts.

    Attributes:
        slots: slot of each token, `[tokens]`; negative for padding.
        table: int32 `[sequences, most pages]`.
        lengths: int32 `[sequences]`, the new tokens included.
        tokens: how many there are without padding.
        decodes: sequences with one new token, which come first.
        longest: an upper bound of `lengths`.
        chunks: (sequence, first token, token after the last, length) of each chunk, on the host.
        starts: int32 `[chunks + 1]`: the first token of each chunk, counted from the first chunk's.
        ends: int32 `[chunks, 2, 2]`: 0 and the new tokens of each chunk, and 0 and all tokens of its sequence.
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    tokens: int
    decodes: int
    longest: int
    chunks: list[tuple[int, int, int, int]]
    starts: torch.Tensor
    ends: torch.Tensor


class Builder(AttentionMetadataBuilder[Batch]):
    """Makes a `Batch` from the sequences that vLLM's scheduler has chosen."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if reason := cache_refusal(vllm_config):
            raise ValueError(f"NVFP4 KV cache: {reason}; leave out --kv-cache-dtype nvfp4")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        common = common_attn_metadata
        decodes, _, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        # A captured graph pads the batch with sequences of no token.
        decodes = min(decodes, common.num_actual_tokens)  # without sequences that only pad a batch
        chunks = []
        if tokens < common.num_actual_tokens:
            at, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
            # Lengths on the host: reading them from the GPU would wait for it.
            assert lengths is not None
            rows = range(decodes, common.num_reqs)
            chunks = [(row, at[row], at[row + 1], int(lengths[row])) for row in rows if at[row + 1] > at[row]]
        return Batch(
            common.slot_mapping, common.block_table_tensor, common.seq_lens, common.num_actual_tokens, decodes,
            common.max_seq_len, chunks, common.query_start_loc[decodes:] - tokens if chunks else common.query_start_loc,
            chunk_ends(chunks, common.query_start_loc.device),
        )  # fmt: skip


def cache_refusal(config: Any) -> str:
    """The reason why blocks of the cache have to be whole pieces of memory, as ours are not; empty if they need not."""
    if getattr(config.model_config, "is_hybrid", False):
        return "the model keeps states of Mamba layers in the buffers of its KV cache"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector (kv_transfer_config) moves blocks of the cache"
    if getattr(config.cache_config, "kv_offloading_size", None):
        return "blocks of the cache are offloaded (kv_offloading_size)"
    return ""


def chunk_ends(chunks: list[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    """`Batch.ends` of some chunks."""
    ends = [[[0, stop - first], [0, length]] for _, first, stop, length in chunks]
    return torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True)


class BlockscaleNvFp4Attention(AttentionImpl[Batch]):
    """Attention of one layer over NVFP4 pages."""

    supports_quant_query_input = False
    supports_dcp = False
    _at: ClassVar[WeakValueDictionary[int, BlockscaleNvFp4Attention]] = WeakValueDictionary()
    """A layer for each buffer's address: groups of layers, as full and sliding attention, may take blocks of one."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "nvfp4",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **ignored: Any,
    ) -> None:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        if alibi_slopes is not None:
            raise NotImplementedError(
                "an NVFP4 KV cache has no attention with ALiBi slopes: leave out --kv-cache-dtype"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.shares_with = kv_sharing_target_layer_name
        # FlashAttention counts the tokens before the last, and takes -1 and 0 for "without".
        window = [-1, -1] if sliding_window is None else [sliding_window - 1, 0]
        self.flash = partial(
            flash_attn_varlen_func, softmax_scale=scale, causal=True, window_size=window,
            softcap=logits_soft_cap or 0.0, fa_version=get_flash_attn_version(head_size=head_size),
        )  # fmt: skip
        self.options = AttentionOptions(
            causal=True, window=sliding_window, softcap=logits_soft_cap or None, softmax_scale=scale
        )
        self._pages: dict[tuple[int, int], KVPages] = {}

    def pages(self, layer: Any, cache: torch.Tensor) -> KVPages:
        """The pages in the buffer that vLLM has bound to the layer.

        Raises:
            ValueError: layers of other shapes keep their blocks in the same buffer.
        """
        key = (cache.data_ptr(), len(cache))
        if key not in self._pages:
            self._pages = {key: self._make_pages(layer, cache)}
            logger.info_once("Blockscale: attention reads and writes an NVFP4 KV cache with our kernels")
        return self._pages[key]

    def _make_pages(self, layer: Any, cache: torch.Tensor) -> KVPages:
        if self.shares_with is not None:
            target = get_forward_context().no_compile_layers[self.shares_with]
            return target.impl.pages(target, cache)  # type: ignore[no-any-return]
        self.shape = cache.shape
        # vLLM may bind layers of different groups to one buffer.
        other = self._at.setdefault(cache.data_ptr(), self)
        if other.shape != cache.shape:
            raise ValueError(
                f"NVFP4 KV cache: layers with caches {list(other.shape)} and {list(cache.shape)} have one buffer, and "
                "would divide it in different ways; leave out --kv-cache-dtype nvfp4"
            )
        # Of the FP8 scale amax / 448 to NVFP4's amax / 2688.
        k, v = (
            (scale.to(cache.device).float() / 6).reshape(-1).expand(self.num_kv_heads).contiguous()
            for scale in (layer._k_scale, layer._v_scale)
        )
        return pages_of(cache, self.num_kv_heads, cache.shape[2], self.head_size, (k, v))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Batch | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[tokens, heads, dim]`, into `output`; query alike, key and value `[tokens, kv_heads, dim]`."""
        from quant.kernels.portable.attention.paged_attention import attend_pages
        from quant.kernels.portable.attention.paged_kv_cache import write_kv_slots

        assert output is not None
        out = output.view(-1, self.num_heads, self.head_size)
        if attn_metadata is None:
            return output.fill_(0)
        batch, pages = attn_metadata, self.pages(layer, kv_cache)
        query, key, value = query[: batch.tokens], key[: batch.tokens], value[: batch.tokens]
        if self.shares_with is None:
            write_kv_slots(pages, batch.slots[: batch.tokens], key, value)
        if batch.decodes:
            # [decodes, heads, 1, dim]: one new token a sequence.
            q = query[: batch.decodes, :, None]
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            rows = self.num_heads // self.num_kv_heads
            tiles = decode_tiles_for(pages, rows, batch.decodes * self.num_kv_heads, batch.longest, sms)
            table, lengths = batch.table[: batch.decodes], batch.lengths[: batch.decodes]
            out[: batch.decodes].copy_(attend_pages(q, pages, table, lengths, self.options, tiles)[:, :, 0])
        if batch.chunks:
            self._attend_to_chunks(batch, pages, query, key, value, out)
        return output

    def _attend_to_chunks(
        self, batch: Batch, pages: KVPages, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        start, stop = batch.chunks[0][1], batch.chunks[-1][2]
        longest = max(last - first for _, first, last, _ in batch.chunks)
        # Prompts from their start need no cache: FlashAttention reads the keys and values of this step in 16 bit.
        if self.shares_with is None and all(last - first == length for _, first, last, length in batch.chunks):
            out[start:stop] = self.flash(
                q[start:stop], k[start:stop], v[start:stop], cu_seqlens_q=batch.starts, cu_seqlens_k=batch.starts,
                max_seqlen_q=longest, max_seqlen_k=longest,
            )  # fmt: skip
            return
        for (row, first, last, length), ends in zip(batch.chunks, batch.ends, strict=True):
            if self.shares_with is not None:  # the layer's own keys and values are nobody's
                both = values_of(pages, batch.table[row], length, q.dtype)
            else:
                earlier = values_of(pages, batch.table[row], length - (last - first), q.dtype)
                both = [torch.cat([x, new[first:last]]) for x, new in zip(earlier, (k, v), strict=True)]
            out[first:last] = self.flash(
                q[first:last], *both, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=last - first,
                max_seqlen_k=length,
            )  # fmt: skip


def values_of(pages: KVPages, table: torch.Tensor, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values `[length, kv_heads, dim]` of the first tokens in the pages that `table` names."""
    from quant.kernels.portable.attention.paged_kv_cache import read_nvfp4_kv

    # Rows of the block table end in entries of no meaning; only pages up to `length` are read.
    used = table[: -(-length // pages.page_size)].long()

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return x[used].transpose(0, 1).flatten(1, 2)[None, :, :length].contiguous()

    both = []
    for codes, blocks, scale in ((pages.k, pages.k_blocks, pages.k_scale), (pages.v, pages.v_blocks, pages.v_scale)):
        assert blocks is not None and scale is not None
        # As bytes, because not every indexing kernel takes FP8.
        steps = gathered(blocks.view(torch.uint8)).view(torch.float8_e4m3fn)
        both.append(read_nvfp4_kv(gathered(codes), steps, scale[None], dtype)[0].transpose(0, 1))
    return both


class BlockscaleNvFp4AttentionBackend(AttentionBackend):
    """Registered as vLLM's backend "CUSTOM"."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["nvfp4"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return list(PAGE_SIZES)

    @staticmethod
    def get_impl_cls() -> type[BlockscaleNvFp4Attention]:
        return BlockscaleNvFp4Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "nvfp4"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * token_bytes(NVFP4, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in (64, 128, 256)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return bool(kv_cache_dtype == "nvfp4")

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


def install() -> None:
    """Registers the backend and puts it first in vLLM's order for NVFP4 caches, once however often it is called."""
    from vllm.platforms import cuda
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    theirs = cuda._get_backend_priorities
    if getattr(theirs, "is_blockscale", False):
        return
    path = f"{__name__}.{BlockscaleNvFp4AttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)

    def priorities(
        use_mla: bool, device_capability: Any, num_heads: int | None = None, kv_cache_dtype: Any = None, *arguments: Any
    ) -> list[Any]:
        backends = theirs(use_mla, device_capability, num_heads, kv_cache_dtype, *arguments)
        return [AttentionBackendEnum.CUSTOM, *backends] if kv_cache_dtype == "nvfp4" and not use_mla else backends

    priorities.is_blockscale = True  # type: ignore[attr-defined]
    cuda._get_backend_priorities = priorities
