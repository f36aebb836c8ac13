"""The sequences of one step of vLLM, as the attention over NVFP4 pages (`attention.py`) takes them.

vLLM's scheduler puts sequences with one new token first. `Builder` sorts the others by their new tokens:

    up to `few` behind earlier ones    drafts to be verified; sequences with equally many are one launch
    more, or a prompt's first          chunks of prompts, for FlashAttention

Lengths are read on the host, where they are known without waiting for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from quant.vllm_plugin import releases

FEW = 16
"""New tokens of a sequence up to which paged attention takes them; with longer drafts, it takes these too."""
SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's names for caches of attention to all tokens, to a window, and to a chunk of the context."""


@dataclass
class Batch(AttentionMetadata):
    """The sequences of one step: decoding sequences first, then those with several new tokens.

    Attributes:
        slots: slot of each token, `[tokens]`; negative for padding.
        table: int32 `[sequences, most pages]`.
        lengths: int32 `[sequences]`, the new tokens included.
        tokens: how many there are without padding.
        decodes: sequences with one new token, which come first.
        longest: an upper bound of `lengths`.
        verified: by new tokens of a sequence, the sequences that have so many behind earlier ones: int64 `[sequences]`,
            and their tokens, int64 `[sequences, new]`.
        chunks: (sequence, first token, token after the last, length) of each chunk of a prompt, on the host.
        starts: int32 `[chunks + 1]`: the first token of each chunk, counted from the first chunk's.
        ends: int32 `[chunks, 2, 2]`: 0 and the new tokens of each chunk, and 0 and all tokens of its sequence.
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    tokens: int
    decodes: int
    longest: int
    verified: list[tuple[torch.Tensor, torch.Tensor]]
    chunks: list[tuple[int, int, int, int]]
    starts: torch.Tensor
    ends: torch.Tensor


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
        # A captured graph pads the batch with sequences of no token.
        decodes = min(decodes, common.num_actual_tokens)  # without sequences that only pad a batch
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
        copied = partial(torch.Tensor.to, device=common.query_start_loc.device, non_blocking=True)
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


def rows_and_tokens(new: int, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an entry of `Batch.verified`, on the host, for sequences with `new` tokens, each with its first token."""
    index = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return index[:, 0], index[:, 1:] + torch.arange(new, device="cpu")


def chunk_starts(chunks: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """Returns `Batch.starts` of some chunks, on the host."""
    starts = [0]
    for _, first, last, _ in chunks:
        starts.append(starts[-1] + last - first)
    return torch.tensor(starts, dtype=torch.int32, device="cpu")


def chunk_ends(chunks: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """Returns `Batch.ends` of some chunks, on the host."""
    ends = [[[0, stop - first], [0, length]] for _, first, stop, length in chunks]
    return torch.tensor(ends, dtype=torch.int32, device="cpu")
