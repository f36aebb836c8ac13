"""This attention backend keeps vLLM's KV cache in NVFP4 on Hopper GPUs: `vllm serve … --kv-cache-dtype nvfp4`.

vLLM plans such a cache (head_dim / 2 + head_dim / 16 bytes for a key or a value) and has a backend for it only on
Blackwell. Ours reads and writes the pages with the kernels of `quant.kernels.attention.paged_attention`.

    decoding, one token a sequence    paged attention straight over the codes; CUDA graphs capture it
    a few tokens (speculation)        the same, one launch for the sequences with equally many tokens
    first chunk of a prompt           FlashAttention over keys and values in 16 bit, which are then in the cache too
    later chunks, cached prefixes     the earlier keys and values dequantized, FlashAttention over them and the new ones

A block of vLLM's cache is a page, in the layout of `kernels/attention/paged_attention.py`. KV connectors cut blocks by
heads or tokens, which that layout does not allow; they are refused before weights are loaded.

A layer that shares the cache of an earlier one (Gemma 3n) reads keys and values there, under that layer's scales.

The global scales come from the checkpoint's `k_scale` and `v_scale`, one a tensor or one a KV head. These are
made for an FP8 cache, amax / 448, and NVFP4 needs amax / 2688. Without them the scale is 1 / 6, with which keys and
values may be as large as 448.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
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

from quant.kernels.attention.attention_operands import AttentionOptions, decode_tiles_for
from quant.kernels.attention.kv_pages import PAGE_SIZES, KVPages
from quant.kernels.attention.paged_attention import cell_bytes, pages_of
from quant.vllm_plugin import releases
from quant.vllm_plugin.releases import check_classes, check_has_arguments, replace_function
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")

# vLLM's scheduler puts sequences with one new token first. `Builder` sorts the others by their new tokens:
#
#     up to `few` behind earlier ones    drafts to be verified; sequences with equally many are one launch
#     more, or a prompt's first          chunks of prompts, for FlashAttention
#
# Lengths are read on the host, where they are known without waiting for the GPU.

FEW = 16
"""New tokens of a sequence up to which paged attention takes them; with longer drafts, it takes these too."""
SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's names for caches of attention to all tokens, to a window, and to a chunk of the context."""


@dataclass
class Batch(AttentionMetadata):
    """The sequences of one step: decoding sequences first, then those with several new tokens."""

    slots: Tensor  # slot of each token, `[tokens]`; negative for padding
    table: Tensor  # int32 `[sequences, most pages]`
    lengths: Tensor  # int32 `[sequences]`, the new tokens included
    tokens: int  # how many there are without padding
    decodes: int  # sequences with one new token, which come first
    longest: int  # an upper bound of `lengths`
    # By new tokens of a sequence, the sequences that have so many behind earlier ones: int64 `[sequences]`, and their
    # tokens, int64 `[sequences, new]`.
    verified: list[tuple[Tensor, Tensor]]
    chunks: list[tuple[int, int, int, int]]  # (sequence, first token, token after the last, length) of prompts' chunks
    starts: Tensor  # int32 `[chunks + 1]`: the first token of each chunk, counted from the first chunk's
    ends: Tensor  # int32 `[chunks, 2, 2]`: 0 and the new tokens of each chunk, and 0 and all of its sequence's


class Builder(AttentionMetadataBuilder[Batch]):
    """Makes a `Batch` from the sequences that vLLM's scheduler has chosen."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    few: int = FEW
    """Most new tokens of a sequence behind earlier ones that paged attention takes."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if reason := spec_refusal(self.kv_cache_spec):
            raise NotImplementedError(f"NVFP4 KV cache: {reason}; leave out --kv-cache-dtype")
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        # A chunk for FlashAttention needs its length on the host, where that of a sequence with drafts is not exact.
        drafts = getattr(self.vllm_config.speculative_config, "num_speculative_tokens", None) or 0
        self.few = max(FEW, 1 + 2 * drafts)  # drafting in parallel adds as many tokens to those that are verified

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("an NVFP4 KV cache has causal attention only: leave out --kv-cache-dtype")
        decodes, _, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        decodes = min(decodes, common.num_actual_tokens)  # a captured graph pads a batch with sequences of no token
        verified: dict[int, list[tuple[int, int]]] = {}
        chunks: list[tuple[int, int, int, int]] = []
        if tokens < common.num_actual_tokens:
            at, lengths = common.query_start_loc_cpu.tolist(), releases.lengths_on_host(common)
            # Reading lengths from the GPU would wait for it. These are exact for prompts; for a sequence whose drafts
            # are verified they count drafts that may have been refused.
            assert lengths is not None
            for row in range(decodes, common.num_reqs):
                first, last, length = at[row], at[row + 1], int(lengths[row])
                if 0 < last - first <= self.few and length > last - first:
                    verified.setdefault(last - first, []).append((row, first))
                elif last > first:
                    chunks.append((row, first, last, length))
        copied = partial(Tensor.to, device=common.query_start_loc.device, non_blocking=True)
        few = [rows_and_tokens(new, rows) for new, rows in verified.items()]
        return Batch(
            common.slot_mapping, common.block_table_tensor, common.seq_lens, common.num_actual_tokens, decodes,
            common.max_seq_len, [(copied(rows), copied(members)) for rows, members in few], chunks,
            copied(chunk_starts(chunks)), copied(chunk_ends(chunks)),
        )  # fmt: skip


def spec_refusal(spec: Any) -> str:
    """Returns why layers with such a cache cannot have it in NVFP4, empty if they can.

    vLLM has kinds of attention whose masks only some backends know; it tells them apart by the class of the spec.
    """
    if type(spec).__name__ not in SPECS:
        return f"layers with a {type(spec).__name__} attend under a mask of their own, which our kernels do not have"
    dims = spec.head_size, getattr(spec, "head_size_v", spec.head_size)
    return "" if dims[0] == dims[1] else f"keys of {dims[0]} columns have values of {dims[1]}"


def rows_and_tokens(new: int, rows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns an entry of `Batch.verified`, on the host, for sequences with `new` tokens, each with its first token."""
    index = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return index[:, 0], index[:, 1:] + torch.arange(new, device="cpu")


def chunk_starts(chunks: list[tuple[int, int, int, int]]) -> Tensor:
    """Returns `Batch.starts` of some chunks, on the host."""
    starts = [0]
    for _, first, last, _ in chunks:
        starts.append(starts[-1] + last - first)
    return torch.tensor(starts, dtype=torch.int32, device="cpu")


def chunk_ends(chunks: list[tuple[int, int, int, int]]) -> Tensor:
    """Returns `Batch.ends` of some chunks, on the host."""
    ends = [[[0, stop - first], [0, length]] for _, first, stop, length in chunks]
    return torch.tensor(ends, dtype=torch.int32, device="cpu")


def cache_refusal(config: Any) -> str:
    """Returns the reason why a cache in NVFP4 cannot serve under these settings; empty if it can."""
    if getattr(config, "kv_transfer_config", None) is not None or getattr(
        config.cache_config, "kv_offloading_size", None
    ):
        return "a KV connector (kv_transfer_config or kv_offloading_size) moves parts of blocks, whose order it assumes"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "kv_sharing_fast_prefill leaves tokens out of a step on the GPU, and they are counted on the host"
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "enable_dbo", False):
        return "enable_dbo cuts a step into two, which was never run over such a cache"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}, which spreads a sequence over GPUs"
    return ""


class BlockscaleNvFp4Attention(AttentionImpl[Batch]):
    """Attention of one layer over NVFP4 pages."""

    supports_quant_query_input = False
    supports_dcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "nvfp4",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, **others: Any,
    ) -> None:  # fmt: skip
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        unknown = [name for name, value in others.items() if value is not None and value is not False]
        if alibi_slopes is not None or unknown:
            kind = unknown[0] if unknown else "ALiBi slopes"
            raise NotImplementedError(f"an NVFP4 KV cache has no attention with {kind}: leave out --kv-cache-dtype")
        # Here and not in the builder, which vLLM makes after it has loaded the weights.
        config = get_current_vllm_config_or_none()
        reason = "" if config is None else cache_refusal(config)
        if not reason and torch.cuda.is_available():
            reason = SelfTest.on_current_gpu().attention_failure()
        if reason:
            raise ValueError(f"NVFP4 KV cache: {reason}; leave out --kv-cache-dtype {kv_cache_dtype}")
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
        self._layer: Any = None
        self._scales: tuple[Tensor, Tensor] | None = None
        self._pages: dict[tuple[int, int, int], KVPages] = {}

    def scales(self, layer: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the global scales of keys and of values, float32 `[kv_heads]`, where `like` is.

        They are made in the first forward pass, by which vLLM measures its memory. Made while a CUDA graph is
        captured, they would exist only once that graph was replayed.
        """
        if self._scales is None:
            self._layer, self._scales = layer, self._scales_of(layer, like.device)
        return self._scales

    def _scales_of(self, layer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        scales = []
        # A forward pass is in inference mode, whose tensors a reload, which is not, could not write.
        with torch.inference_mode(False), torch.no_grad():
            for name in ("_k_scale", "_v_scale"):
                scale, on_host = getattr(layer, name), getattr(layer, f"{name}_float")
                # After a sleep of level 2 vLLM restores its tensor only if the checkpoint has scales; the host's number
                # stays.
                one = torch.tensor([on_host], dtype=torch.float32, device="cpu")
                each = one if scale.numel() == 1 else scale.detach().float().reshape(-1)
                # From the FP8 scale amax / 448 to NVFP4's amax / 2688.
                scales.append((each.to(device) / 6).expand(self.num_kv_heads).contiguous())
        return scales[0], scales[1]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Follows a reload of the layer's scales, in the memory that captured CUDA graphs read."""
        if self._scales is not None:
            for scale, loaded in zip(self._scales, self._scales_of(self._layer, self._scales[0].device), strict=True):
                scale.copy_(loaded)

    def compile_steps(self, layer: Any, dtype: torch.dtype) -> None:
        """Attends to one key in each way that a step with few tokens may, and writes none, so that none has to compile.

        How many parts keys are split into depends on the batch and on the longest sequence, and which kernels run
        depends on the power of two above. vLLM's start meets few of them. The results are dropped.
        """
        from quant.kernels.attention.portable_paged_attention import attend_pages
        from quant.kernels.attention.portable_paged_kv_cache import write_kv_slots

        if self.shares_with is not None:
            return  # as the layer whose cache it reads
        cache = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
        pages, group = self.pages(layer, cache), self.num_heads // self.num_kv_heads
        q = torch.zeros(1, self.num_heads, 1, self.head_size, dtype=dtype, device=cache.device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=cache.device)
        one, splits_of = torch.ones_like(table[0]), (1, 2, 4, 8, 16, 32, 64, 128)
        # Drafts, and the few tokens of a prompt that are not in the prefix cache, have larger tiles.
        tiles_of = {decode_tiles_for(pages, group * new, self.num_kv_heads, 1, 1) for new in range(1, FEW + 1)}
        for tiles, splits, overlap in product(tiles_of, splits_of, (True, False)):
            attend_pages(q, pages, table, one, self.options, replace(tiles, splits=splits, overlap=overlap))
        # Few tokens and many are written by two kernels; a slot below 0 is nowhere.
        for tokens in (1, 256):
            rows = q.new_zeros(tokens, self.num_kv_heads, self.head_size)
            write_kv_slots(pages, torch.full((tokens,), -1, dtype=torch.int64, device=cache.device), rows, rows)
        values_of(pages, table[0], 1, dtype)

    def pages(self, layer: Any, cache: Tensor) -> KVPages:
        """Returns the pages in the buffer that vLLM has bound to the layer."""
        key = (cache.data_ptr(), len(cache), cache.stride(0))
        if key not in self._pages:
            if self.shares_with is None:
                scales = self.scales(layer, cache)
                pages = pages_of(cache, self.num_kv_heads, cache.shape[2], self.head_size, scales)
            else:
                target = get_forward_context().no_compile_layers[self.shares_with]
                pages = target.impl.pages(target, cache)
            self._pages = {key: pages}
            logger.info_once("Blockscale: attention reads and writes an NVFP4 KV cache with our kernels")
        return self._pages[key]

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Batch | None,
        output: Tensor | None = None, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns `[tokens, heads, dim]`, into `output`; query alike, key and value `[tokens, kv_heads, dim]`."""
        from quant.kernels.attention.portable_paged_kv_cache import write_kv_slots

        assert output is not None
        out = output.view(-1, self.num_heads, self.head_size)
        if attn_metadata is None:
            self.scales(layer, output)
            return output.fill_(0)
        batch, pages = attn_metadata, self.pages(layer, kv_cache)
        query, key, value = query[: batch.tokens], key[: batch.tokens], value[: batch.tokens]
        if self.shares_with is None:
            write_kv_slots(pages, batch.slots[: batch.tokens], key, value)
        if batch.decodes:
            table, lengths = batch.table[: batch.decodes], batch.lengths[: batch.decodes]
            # [decodes, heads, 1, dim]: one new token a sequence, written in place.
            self._attend(
                query[: batch.decodes, :, None], pages, table, lengths, batch.longest, out[: batch.decodes, :, None]
            )
        for rows, tokens in batch.verified:
            q, table, lengths = query[tokens].transpose(1, 2), batch.table[rows], batch.lengths[rows]
            out[tokens] = self._attend(q, pages, table, lengths, batch.longest).transpose(1, 2)
        if batch.chunks:
            self._attend_to_chunks(batch, pages, query, key, value, out)
        return output

    def _attend(
        self, q: Tensor, pages: KVPages, table: Tensor, lengths: Tensor, longest: int, out: Tensor | None = None
    ) -> Tensor:
        """Returns the paged attention of q `[sequences, heads, new, dim]`, each sequence's last tokens."""
        from quant.kernels.attention.portable_paged_attention import attend_pages

        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        rows = q.shape[2] * (self.num_heads // self.num_kv_heads)
        tiles = decode_tiles_for(pages, rows, len(q) * self.num_kv_heads, longest, sms)
        return attend_pages(q, pages, table, lengths, self.options, tiles, out=out)

    def _attend_to_chunks(self, batch: Batch, pages: KVPages, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        start, stop = batch.chunks[0][1], batch.chunks[-1][2]
        longest = max(last - first for _, first, last, _ in batch.chunks)
        is_run = sum(last - first for _, first, last, _ in batch.chunks) == stop - start
        # Prompts from their start need no cache: FlashAttention reads the keys and values of this step in 16 bit.
        if self.shares_with is None and is_run and all(last - first == n for _, first, last, n in batch.chunks):
            out[start:stop] = self.flash(
                q[start:stop], k[start:stop], v[start:stop], cu_seqlens_q=batch.starts, cu_seqlens_k=batch.starts,
                max_seqlen_q=longest, max_seqlen_k=longest,
            )  # fmt: skip
            return
        for (row, first, last, length), ends in zip(batch.chunks, batch.ends, strict=True):
            new = last - first
            if self.shares_with is not None:  # nobody reads the layer's own keys and values
                both = values_of(pages, batch.table[row], length, q.dtype)
            else:
                both = [k[first:last], v[first:last]]
                if earlier := length - new:
                    cached = values_of(pages, batch.table[row], earlier, q.dtype)
                    both = [torch.cat(pair) for pair in zip(cached, both, strict=True)]
            out[first:last] = self.flash(
                q[first:last], *both, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=new, max_seqlen_k=length
            )


def values_of(pages: KVPages, table: Tensor, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns keys and values `[length, kv_heads, dim]` of the first tokens in the pages that `table` names."""
    from quant.kernels.attention.portable_paged_kv_cache import read_nvfp4_kv

    # Rows of the block table end in meaningless entries; only pages up to `length` are read.
    used = table[: -(-length // pages.page_size)].long()

    def gathered(x: Tensor) -> Tensor:
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
    # vLLM's 4over6 chooses between two scales of a block; our rounding tries both, and six more, under either name.
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["nvfp4", "nvfp4_4over6"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
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
        # vLLM 0.28 and older ask for this shape, later ones for the spec and the layouts below.
        return num_blocks, num_kv_heads, block_size, cell_bytes(head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return releases.spec_with_cell_bytes(spec, cell_bytes(spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return releases.contiguous_block_layouts()

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the builder reads the number of new tokens on the host

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in (64, 128, 256)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


def install_attention_backend() -> str:
    """Puts the backend first in vLLM's order for NVFP4 caches; an error says what vLLM lacks, and changes nothing."""
    from vllm.platforms import cuda
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    check_classes(BlockscaleNvFp4AttentionBackend, BlockscaleNvFp4Attention, Builder)
    check_has_arguments(cuda._get_backend_priorities, "use_mla", "kv_cache_dtype")
    signature = inspect.signature(cuda._get_backend_priorities)
    path = f"{__name__}.{BlockscaleNvFp4AttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)

    def wrap(theirs: Any) -> Any:
        # Later releases added arguments, which are handed on.
        def priorities(*arguments: Any, **named: Any) -> list[Any]:
            backends: list[Any] = theirs(*arguments, **named)
            given = signature.bind(*arguments, **named).arguments
            dtypes = BlockscaleNvFp4AttentionBackend.supported_kv_cache_dtypes
            ours = given.get("kv_cache_dtype") in dtypes and not given["use_mla"]
            return [AttentionBackendEnum.CUSTOM, *backends] if ours else backends

        return priorities

    replace_function(cuda, "_get_backend_priorities", wrap)
    return "NVFP4 KV caches"
