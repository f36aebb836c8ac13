"""An NVFP4 KV cache in vLLM's buffers equals the oracle's pages: written by slots, decoded, and read in chunks.

The tests run against the real vLLM (its Python files are enough). FlashAttention and the decoding kernel, which need a
GPU, are replaced by references in float32; the kernels that write and read pages are interpreted.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm", reason="make vllm-test unpacks the Python files of vLLM's releases")
pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.kernels.attention import portable_paged_kv_cache
from quant.kernels.attention.attention_operands import decode_tiles_for
from quant.kernels.attention.kv_pages import round_kv
from quant.kernels.attention.paged_attention import NVFP4, paged_reference, pages_of
from quant.vllm_plugin.nvfp4_attention import (
    FEW,
    Batch,
    BlockscaleNvFp4Attention,
    BlockscaleNvFp4AttentionBackend,
    Builder,
    cache_refusal,
    chunk_ends,
    chunk_starts,
    rows_and_tokens,
)

HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 4, 2, 64, 16, 12


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """FlashAttention over sequences one after the other, causal, aligned at their ends."""
    out = torch.empty_like(q)
    at_q, at_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    for i in range(len(at_q) - 1):
        rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
        x, y, z = (t.transpose(0, 1).float() for t in (q[rows], k[keys], v[keys]))
        seen = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool).tril(y.shape[1] - x.shape[1])
        out[rows] = torch.nn.functional.scaled_dot_product_attention(
            x, y, z, attn_mask=seen, enable_gqa=True, scale=DIM**-0.5
        ).transpose(0, 1)
    return out


def decode(
    q: torch.Tensor, pages: Any, table: torch.Tensor, lengths: torch.Tensor, *launch: Any, out: torch.Tensor | None
) -> torch.Tensor:
    y = paged_reference(q, pages, table, lengths)
    # The kernel writes `out` as if it were contiguous.
    assert out is None or out.is_contiguous()
    return y if out is None else out.copy_(y)


class Layer:
    """One layer's attention and vLLM's buffer for its cache, on the CPU."""

    def __init__(self, cache: torch.Tensor, shares_with: str | None = None, scales: tuple[float, float] = (0.6, 0.3)):
        self.impl = BlockscaleNvFp4Attention.__new__(BlockscaleNvFp4Attention)
        self.impl.num_heads, self.impl.num_kv_heads, self.impl.head_size = HEADS, KV_HEADS, DIM
        self.impl.shares_with, self.impl._pages, self.impl.flash, self.impl.options = shares_with, {}, flash, None
        self.impl._scales = None
        self._k_scale, self._v_scale = map(torch.tensor, scales)
        self._k_scale_float, self._v_scale_float = scales
        self.cache = cache

    def __call__(self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(q), HEADS * DIM), float("nan"), dtype=q.dtype)
        properties = SimpleNamespace(multi_processor_count=132)
        with (
            patch("quant.kernels.attention.portable_paged_attention.attend_pages", decode),
            patch("torch.cuda.get_device_properties", lambda device: properties),
            interpreted(),
        ):
            self.impl.forward(self, q, k, v, self.cache, batch, out)
        return out.view(-1, HEADS, DIM)


def buffer(blocks: int = BLOCKS, page: int = PAGE, apart: int = 0) -> torch.Tensor:
    """A layer's cache of random bytes, its blocks so many bytes apart."""
    shape = BlockscaleNvFp4AttentionBackend.get_kv_cache_shape(blocks, page, KV_HEADS, DIM)
    block = shape[1] * shape[2] * shape[3]
    raw = torch.randint(0, 255, (blocks * (block + apart),), dtype=torch.uint8)
    return raw.as_strided(shape, (block + apart, shape[2] * shape[3], shape[3], 1))


@pytest.fixture(params=[0, 256], ids=["dense", "apart"])
def attention(request: pytest.FixtureRequest) -> Layer:
    return Layer(buffer(apart=request.param))


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(count, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def test_a_page_takes_the_bytes_that_vllm_plans() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode("nvfp4"),
    )  # fmt: skip
    spec = BlockscaleNvFp4AttentionBackend.customize_spec(spec)
    shape = BlockscaleNvFp4AttentionBackend.get_kv_cache_shape(BLOCKS, PAGE, KV_HEADS, DIM, "nvfp4")
    assert torch.Size(shape).numel() == BLOCKS * spec.page_size_bytes


def test_views_of_vllms_layouts_are_pages() -> None:
    """Since 0.29 vLLM cuts views out of one allocation; several layers lie between a block and the next."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "create_kv_cache_views"):
        pytest.skip("this release shapes a buffer for each layer")
    from inspect import signature

    backend = BlockscaleNvFp4AttentionBackend
    spec = backend.customize_spec(
        interface.FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.uint8,
            kv_quant_mode=interface.get_kv_quant_mode("nvfp4"),
        )
    )  # fmt: skip
    layouts = backend.supported_kv_cache_layouts()
    assert [layout.name for layout in layouts] == ["LBHNC", "BLHNC"]
    scale = torch.ones(KV_HEADS)
    for layout in layouts:
        raw = torch.zeros(3 * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        strides = interface.compute_layout_strides(spec, BLOCKS, 3, layout)
        fields = signature(interface.KVCacheTensor).parameters
        known = {"size": len(raw), "offset": 0, "layer_stride": strides[0], "block_stride": strides[1]}
        tensor = interface.KVCacheTensor(
            layers=["a", "b", "c"], **{name: value for name, value in known.items() if name in fields}
        )
        views = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, tensor)
        for number, view in enumerate(views):
            pages = pages_of(view, KV_HEADS, PAGE, DIM, (scale, scale))
            for part in (pages.k, pages.v, pages.k_blocks, pages.v_blocks):
                part.view(torch.uint8).fill_(number + 1)
        assert [int(view.view(torch.uint8).min()) for view in views] == [1, 2, 3]
        assert [int(view.view(torch.uint8).max()) for view in views] == [1, 2, 3]


def test_prompts_chunks_and_decoding_see_what_the_cache_holds(attention: Any) -> None:
    torch.manual_seed(0)
    table = torch.tensor([[3, 7, 1], [0, 5, 2], [9, 4, 8]], dtype=torch.int32)
    history: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {0: [], 1: [], 2: []}

    def run(counts: dict[int, int], padding: int = 0) -> None:
        """One step: so many new tokens of each sequence, decoding ones first; compared with attention in float32."""
        order = sorted(counts, key=lambda s: counts[s])
        q, k, v = tokens(sum(counts.values()) + padding)
        slots, verified, chunks, at, decodes, lengths = [], [], [], 0, 0, []
        before = {s: sum(len(part[0]) for part in history[s]) for s in order}
        for row, s in enumerate(order):
            length = before[s] + counts[s]
            places = range(before[s], length)
            slots += [int(table[s, p // PAGE]) * PAGE + p % PAGE for p in places]
            lengths.append(length)
            if counts[s] == 1:
                decodes += 1
            elif before[s] > 0 and counts[s] <= FEW:
                verified.append(rows_and_tokens(counts[s], [(row, at)]))
            else:
                chunks.append((row, at, at + counts[s], length))
            at += counts[s]
        batch = Batch(
            torch.tensor(slots + [-1] * padding), table[order], torch.tensor(lengths, dtype=torch.int32), at, decodes,
            max(lengths), verified, chunks, chunk_starts(chunks), chunk_ends(chunks),
        )  # fmt: skip
        y = attention(batch, q, k, v)
        first_only = chunks and all(length == stop - first for _, first, stop, length in chunks)
        at = 0
        for s in order:
            new = slice(at, at + counts[s])
            history[s].append((k[new], v[new]))
            is_decode = counts[s] == 1 or (before[s] > 0 and counts[s] <= FEW)
            parts = [list(pair) for pair in history[s]]
            for index, pair in enumerate(parts):
                if is_decode or index < len(parts) - 1:
                    parts[index] = [
                        round_kv(x.transpose(0, 1).float(), NVFP4, torch.full((KV_HEADS,), amax / 6)).transpose(0, 1)
                        for x, amax in zip(pair, (0.6, 0.3), strict=True)
                    ]
            assert not (first_only and len(parts) > 1 and not is_decode)
            keys, values = (torch.cat([part[i].float() for part in parts]) for i in (0, 1))
            ends = [torch.tensor([0, n]) for n in (counts[s], len(keys))]
            expected = flash(q[new].float(), keys, values, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
            torch.testing.assert_close(y[new].float(), expected, rtol=2**-6, atol=2**-7)
            at += counts[s]

    run({0: 5, 1: 17})  # first chunks only
    run({0: 1, 1: 12, 2: 17})  # decoding, a few tokens at once, and a first chunk
    run({0: 1, 1: 1, 2: 1}, padding=3)  # decoding in a padded batch
    run({0: 30, 1: 1})  # a later chunk over a cached prefix
    run({1: 2, 2: 3})


def test_a_batch_is_read_from_vllms_metadata() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    # Two that decode, the first chunk of a prompt, a later one, and two whose drafts are verified.
    starts = torch.tensor([0, 1, 2, 7, 27, 30, 33], dtype=torch.int32)
    lengths = torch.tensor([9, 30, 5, 40, 12, 14], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=6, num_actual_tokens=33,
        max_query_len=20, max_seq_len=40, block_table_tensor=torch.zeros(6, 3, dtype=torch.int32),
        slot_mapping=torch.arange(33), seq_lens_cpu_upper_bound=lengths + torch.tensor([0, 0, 0, 0, 2, 2]),
    )  # fmt: skip
    builder = Builder.__new__(Builder)
    builder.reorder_batch_threshold = 1
    batch = builder.build(0, common)
    assert (batch.decodes, batch.tokens, batch.longest) == (2, 33, 40)
    assert batch.chunks == [(2, 2, 7, 5), (3, 7, 27, 40)]
    assert batch.starts.tolist() == [0, 5, 25]
    assert batch.ends.tolist() == [[[0, 5], [0, 5]], [[0, 20], [0, 40]]]
    [(rows, tokens)] = batch.verified
    assert rows.tolist() == [4, 5] and tokens.tolist() == [[27, 28, 29], [30, 31, 32]]


def common_metadata(starts: list[int], lengths: list[int], **given: Any) -> Any:
    """What vLLM says of a step's sequences; a block of the table is named after its place."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    at, count, pages = torch.tensor(starts, dtype=torch.int32), len(lengths), -(-max(lengths) // PAGE)
    on_gpu = torch.tensor(lengths, dtype=torch.int32)
    fields = {
        "query_start_loc": at, "query_start_loc_cpu": at, "seq_lens": on_gpu, "num_reqs": count,
        "num_actual_tokens": starts[-1], "max_query_len": int(at.diff().max()), "max_seq_len": max(lengths),
        "block_table_tensor": torch.arange(count * pages, dtype=torch.int32).view(count, pages),
        "slot_mapping": torch.arange(starts[-1]), "seq_lens_cpu_upper_bound": on_gpu.clone(),
    }  # fmt: skip
    return CommonAttentionMetadata(**fields | given)


def built_by(backend: type = BlockscaleNvFp4AttentionBackend, drafts: int = 0) -> Any:
    """The backend's builder, made by its own constructor."""
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    config = SimpleNamespace(
        speculative_config=speculative, parallel_config=SimpleNamespace(decode_context_parallel_size=1)
    )
    return backend.get_builder_cls()(spec_of("ChunkedLocalAttentionSpec"), ["layer"], config, torch.device("cpu"))


def spec_of(kind: str, **changes: Any) -> Any:
    """vLLM's description of a layer's cache, by the name of its class."""
    from vllm.v1 import kv_cache_interface

    further = {"SlidingWindowSpec": {"sliding_window": 8}, "ChunkedLocalAttentionSpec": {"attention_chunk_size": 32},
               "SinkFullAttentionSpec": {"sink_len": PAGE}}  # fmt: skip
    fields = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.uint8}
    return getattr(kv_cache_interface, kind)(**fields | further.get(kind, {}) | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("FullAttentionSpec", {}, ""),
        ("SlidingWindowSpec", {}, ""),
        ("ChunkedLocalAttentionSpec", {}, ""),
        ("SinkFullAttentionSpec", {}, "layers with a SinkFullAttentionSpec"),
        ("FullAttentionSpec", {"head_size_v": 128}, "keys of 64 columns have values of 128"),
    ],
)
def test_only_masks_that_our_kernels_have_are_taken(kind: str, changes: dict[str, int], reason: str) -> None:
    """Sinks and other masks are known to vLLM's backends; ours would attend to the wrong keys, without a word."""
    arguments = spec_of(kind, **changes), ["layer"], built_by().vllm_config, torch.device("cpu")
    if not reason:
        Builder(*arguments)
        return
    with pytest.raises(NotImplementedError, match=f"^NVFP4 KV cache: {reason}"):
        Builder(*arguments)


def test_an_argument_of_attention_that_it_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.vllm_plugin.nvfp4_attention.get_current_vllm_config_or_none", lambda: None)
    monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.get_flash_attn_version", lambda **named: 3)
    monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func", flash, raising=False)
    BlockscaleNvFp4Attention(HEADS, DIM, 1.0, KV_HEADS, sinks=None)
    with pytest.raises(NotImplementedError, match="no attention with sinks: leave out --kv-cache-dtype"):
        BlockscaleNvFp4Attention(HEADS, DIM, 1.0, KV_HEADS, sinks=torch.zeros(HEADS))


def test_drafts_of_any_length_are_read_under_the_lengths_that_the_gpu_knows() -> None:
    """The host counts refused drafts; FlashAttention over its lengths would see keys that are not there."""
    common = common_metadata([0, 1, 22], [9, 41])
    assert built_by().build(0, common).chunks == [(1, 1, 22, 41)]
    batch = built_by(drafts=20).build(0, common)
    [(rows, tokens)] = batch.verified
    assert not batch.chunks and rows.tolist() == [1] and tokens.tolist() == [list(range(1, 22))]
    with pytest.raises(NotImplementedError, match="causal"):
        built_by().build(0, common_metadata([0, 1, 22], [9, 41], causal=False))


def test_chunked_local_attention_has_the_lengths_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 attends within chunks of its context, which vLLM makes sequences of their own."""
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False, raising=False)

    local = built_by(create_chunked_local_attention_backend(BlockscaleNvFp4AttentionBackend, 32))
    # A sequence that decodes in its third chunk, and a chunk of a prompt from its token 20 to 80.
    batch = local.build(0, common_metadata([0, 1, 61], [70, 80]))
    pieces = [(row, first, last, length) for row, first, last, length in batch.chunks]
    assert batch.decodes == 1 and batch.lengths.tolist() == [6, 32, 32, 16]
    verified = [(int(row), *(tokens[i] for i in (0, -1))) for rows, of in batch.verified for row, tokens in
                zip(rows, of.tolist(), strict=True)]  # fmt: skip
    # 12 tokens behind 20, a whole chunk, and the first half of another.
    assert verified == [(1, 1, 12)] and pieces == [(2, 13, 45, 32), (3, 45, 61, 16)]


def test_nvfp4_caches_choose_it_and_others_do_not() -> None:
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from quant.vllm_plugin.nvfp4_attention import install_attention_backend

    install_attention_backend()
    install_attention_backend()
    hopper, custom = DeviceCapability(9, 0), AttentionBackendEnum.CUSTOM
    assert custom.get_class() is BlockscaleNvFp4AttentionBackend
    chosen = cuda._get_backend_priorities(False, hopper, 32, "nvfp4", False)
    assert chosen[0] is custom and chosen.count(custom) == 1
    by_name = {"use_mla": False, "device_capability": hopper, "num_heads": 32}  # as vLLM itself calls it
    assert cuda._get_backend_priorities(**by_name, kv_cache_dtype="nvfp4") == chosen
    assert custom not in cuda._get_backend_priorities(**by_name, kv_cache_dtype="fp8")
    assert custom not in cuda._get_backend_priorities(True, hopper, 32, "nvfp4")


def test_a_layer_that_shares_a_cache_sees_the_keys_of_the_layer_that_writes_it() -> None:
    """Under that layer's scales, in its first chunk, in a later one and in decoding, whatever keys it was given."""
    torch.manual_seed(0)
    cache = buffer()
    owner, sharer = Layer(cache), Layer(cache, "owner", scales=(1.0, 1.0))
    context = SimpleNamespace(no_compile_layers={"owner": owner})
    table = torch.tensor([[3, 7, 1]], dtype=torch.int32)
    at = 0
    for count in (5, 20, 1):
        stop = at + count
        slots = torch.tensor([int(table[0, p // PAGE]) * PAGE + p % PAGE for p in range(at, stop)])
        chunks = [] if count == 1 else [(0, 0, count, stop)]
        lengths = torch.tensor([stop], dtype=torch.int32)
        decodes = 1 if count == 1 else 0
        batch = Batch(slots, table, lengths, count, decodes, stop, [], chunks, chunk_starts(chunks), chunk_ends(chunks))
        q, k, v = tokens(count)
        owner(batch, q, k, v)
        held = cache.clone()
        with patch("quant.vllm_plugin.nvfp4_attention.get_forward_context", lambda: context):
            found = [sharer(batch, q, *tokens(count)[1:]) for _ in range(2)]
        assert torch.equal(cache, held) and torch.equal(*found)
        keys, values = (
            x.transpose(0, 1) for x in owner.impl.pages(owner, cache).read(table[0, : -(-stop // PAGE)].long(), stop)
        )
        ends = [torch.tensor([0, n]) for n in (count, stop)]
        expected = flash(q.float(), keys, values, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        torch.testing.assert_close(found[0].float(), expected, rtol=2**-6, atol=2**-7)
        at = stop


def test_layers_of_other_shapes_share_an_allocation() -> None:
    """As full and sliding attention may: a block belongs to one of them, and none writes beyond its block."""
    raw = buffer(8, 32)
    wide, narrow = Layer(raw), Layer(raw.view(-1).view(buffer(16, 16).shape))
    wide_pages, narrow_pages = wide.impl.pages(wide, wide.cache), narrow.impl.pages(narrow, narrow.cache)
    raw.zero_()
    narrow_pages.k[6:8], narrow_pages.v[6:8] = 255, 255
    narrow_pages.k_blocks.view(torch.uint8)[6:8], narrow_pages.v_blocks.view(torch.uint8)[6:8] = 255, 255
    held = wide_pages.k.view(torch.uint8).flatten(1).amax(1)
    assert held.tolist() == [0, 0, 0, 255, 0, 0, 0, 0]


def test_every_way_of_a_decoding_step_is_compiled_before() -> None:
    """Kernels differ by whether keys are split, by the power of two above the parts, and by what they overlap."""
    layer, ways = Layer(buffer()), set()
    layer.kv_cache = layer.cache  # type: ignore[attr-defined]

    def way(tiles: Any) -> tuple[Any, ...]:
        return replace(tiles, splits=1 << (tiles.splits - 1).bit_length()), tiles.splits > 1

    def note(q: torch.Tensor, pages: Any, table: Any, lengths: torch.Tensor, options: Any, tiles: Any) -> None:
        assert q.shape == (1, HEADS, 1, DIM) and lengths.tolist() == [1] and int(table[0, 0]) == 0
        ways.add(way(tiles))

    written, write, before = [], portable_paged_kv_cache.write_kv_slots, layer.cache.clone()

    def note_write(pages: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        written.append(len(k))
        write(pages, slots, k, v)

    with (
        patch("quant.kernels.attention.portable_paged_attention.attend_pages", note),
        patch.object(portable_paged_kv_cache, "write_kv_slots", note_write),
        interpreted(),
    ):
        layer.impl.compile_steps(layer, torch.bfloat16)
    # One kernel writes up to 128 tokens, and another more; neither has written here.
    assert min(written) <= 128 < max(written) and torch.equal(layer.cache, before)
    pages = layer.impl.pages(layer, layer.cache)
    # One new token, or up to 16: drafts to be verified, and the rest of a prompt behind the prefix cache.
    for sequences, new in [(n, 1) for n in range(1, 257)] + [(n, new) for n in (1, 9, 256) for new in range(2, 17)]:
        for longest in (*range(1, 200), *range(200, 140000, 997)):
            tiles = decode_tiles_for(pages, HEADS // KV_HEADS * new, sequences * KV_HEADS, longest, 132)
            assert way(tiles) in ways, (sequences, new, longest)


def test_a_block_that_is_not_one_piece_is_refused() -> None:
    tokens_first = buffer().transpose(1, 2).contiguous().transpose(1, 2)
    layer = Layer(tokens_first)
    with pytest.raises(ValueError, match=r"where blocks of \[2, 16, 72\] contiguous bytes were expected; leave out"):
        layer.impl.pages(layer, layer.cache)


@pytest.mark.parametrize(
    ("cache", "connector", "parallel", "reason"),
    [
        ({}, object(), {}, "kv_transfer_config"),
        ({"kv_offloading_size": 4.0}, None, {}, "kv_offloading_size"),
        ({"kv_sharing_fast_prefill": True}, None, {}, "kv_sharing_fast_prefill"),
        ({}, None, {"enable_dbo": True}, "enable_dbo"),
        ({}, None, {"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({}, None, {}, ""),
    ],
)
def test_settings_that_a_cache_in_nvfp4_cannot_serve_are_refused_before_weights_are_loaded(
    cache: dict[str, Any], connector: object, parallel: dict[str, Any], reason: str
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache), kv_transfer_config=connector, parallel_config=SimpleNamespace(**parallel)
    )
    assert reason in cache_refusal(config) and bool(reason) == bool(cache_refusal(config))
    with (
        patch("quant.vllm_plugin.nvfp4_attention.get_current_vllm_config_or_none", lambda: config),
        patch("vllm.v1.attention.backends.fa_utils.get_flash_attn_version", lambda **named: 3),
        patch("vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func", flash, create=True),
    ):
        if not reason:
            BlockscaleNvFp4Attention(HEADS, DIM, 1.0, KV_HEADS)
            return
        with pytest.raises(ValueError, match=rf"^NVFP4 KV cache: .*{reason}.*; leave out --kv-cache-dtype nvfp4$"):
            BlockscaleNvFp4Attention(HEADS, DIM, 1.0, KV_HEADS)


def test_scales_of_a_checkpoint_without_any_survive_a_sleep() -> None:
    """vLLM holds them in memory that it gives away, and a reload brings none; the number on the host stays."""
    layer = Layer(torch.zeros(1))
    k, v = layer.impl.scales(layer, torch.zeros(1))
    expected = [torch.full((KV_HEADS,), scale) / 6 for scale in (0.6, 0.3)]
    layer._k_scale.fill_(float("nan"))
    layer._v_scale.fill_(3e38)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_scales_of_each_head_go_through_vllms_own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of `--kv-cache fp8_head`: vLLM takes its scheme and tensors, and our cache takes vLLM's scales."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as theirs

    from quant.export.checkpoint.files.compressed_tensors import quantization_config
    from quant.formats.format import FP8_HEAD
    from quant.recipes.plan import Plan

    monkeypatch.setattr(theirs, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(theirs, "get_tensor_model_parallel_world_size", lambda: 1)
    scheme = quantization_config(Plan((), kv_cache=FP8_HEAD))["kv_cache_scheme"]
    config = SimpleNamespace(kv_cache_scheme=scheme, total_num_heads=HEADS, total_num_kv_heads=KV_HEADS)
    method = theirs.CompressedTensorsKVCacheMethod(config)
    layer = torch.nn.Module()
    layer.num_kv_heads = KV_HEADS
    layer._k_scale_cpu, layer._v_scale_cpu = torch.ones(()), torch.ones(())
    method.create_weights(layer)
    stored = {"k": torch.tensor([0.6, 0.9]).bfloat16(), "v": torch.tensor([0.3, 0.1]).bfloat16()}
    for name, scale in stored.items():
        parameter = getattr(layer, f"{name}_scale")
        parameter.weight_loader(parameter, scale.view(-1, 1, 1))
    method.process_weights_after_loading(layer)
    assert torch.equal(layer._k_scale.detach(), stored["k"].float()) and layer._v_scale_float == float(
        stored["v"].max()
    )
    ours = Layer(torch.zeros(1))
    with torch.inference_mode():  # the first forward pass, where vLLM measures its memory
        k, v = ours.impl.scales(layer, torch.zeros(1))
    assert torch.equal(k, stored["k"].float() / 6) and torch.equal(v, stored["v"].float() / 6)
    # Weights that are loaded anew bring other scales, which go into the memory that CUDA graphs read.
    layer._k_scale.data.mul_(2)
    ours.impl.process_weights_after_loading(torch.bfloat16)
    assert ours.impl.scales(layer, torch.zeros(1))[0] is k and torch.equal(k, stored["k"].float() / 3)
