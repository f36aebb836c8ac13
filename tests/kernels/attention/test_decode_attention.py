"""Attention over a paged cache agrees with float64, as oracle and as interpreted kernel."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import interpreted
from slow_cases import quick_cases

from quant.kernels.attention import portable_paged_attention
from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles, decode_tiles_for
from quant.kernels.attention.kv_pages import KVPages, kv_format
from quant.kernels.attention.paged_attention import PagedKVCache, paged_attention, paged_reference

FORMAT_NAMES = (None, "fp8", "fp8_token", "nvfp4")
# P is rounded to FP16, or to BF16 over a cache in BF16; then the output to BF16.
TOLERANCE = {None: 2.0**-7, "fp8": 2.0**-8, "fp8_token": 2.0**-8, "nvfp4": 2.0**-8}


def filled(
    name: str | None, lengths: list[int], *, kv_heads: int = 2, dim: int = 64, page_size: int = 16, device: str = "cpu"
) -> tuple[KVPages, torch.Tensor, torch.Tensor]:
    """A cache whose sequences lie in pages in no order: pages, block table and lengths."""
    scales = {}
    if name in ("fp8", "nvfp4"):
        scales = {n: (torch.rand(1, kv_heads) + 0.5) / (100 if name == "fp8" else 600) for n in ("k_scale", "v_scale")}
    cache = PagedKVCache(
        1, kv_heads, dim, format=kv_format(name), page_size=page_size, pages=4, device=device, **scales
    )
    sequences = [cache.add() for _ in lengths]
    for start in range(0, max(lengths), 7 * page_size // 4):
        for sequence, length in zip(sequences, lengths, strict=True):
            new = min(length - start, 7 * page_size // 4)
            if new > 0:
                k, v = torch.randn(2, 1, kv_heads, new, dim, device=device).to(torch.bfloat16)
                # V of very different sizes, which scales of tokens follow.
                v = v * torch.logspace(-3, 0, new, device=device)[:, None].to(torch.bfloat16)
                cache.append(0, [sequence], k, v)
    table = cache.block_table(sequences)
    return cache.layer(0), table, torch.tensor(lengths, dtype=torch.int32, device=device)


def exact(
    q: torch.Tensor, pages: KVPages, table: torch.Tensor, lengths: torch.Tensor, *,
    softmax_scale: float, window: int | None = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """In float64, token by token of the definition, through the block table."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    size, group = pages.page_size, q.shape[1] // pages.kv_heads
    whole = pages.read(list(range(len(pages.k))), len(pages.k) * size)
    for b in range(q.shape[0]):
        length = int(lengths[b])
        slots = [int(table[b, t // size]) * size + t % size for t in range(length)]
        for h in range(q.shape[1]):
            k, v = (x[h // group, slots].double().cpu() for x in whole)
            for i in range(q.shape[2]):
                last = length - q.shape[2] + i
                first = 0 if window is None else max(0, last - window + 1)
                scores = (k[first : last + 1] @ q[b, h, i].double().cpu()) * softmax_scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, h, i] = scores.softmax(0) @ v[first : last + 1]
    return out


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected.cpu()).norm() / expected.norm())


def kernel(
    q: torch.Tensor, pages: KVPages, table: torch.Tensor, lengths: torch.Tensor, tiles: DecodeTiles,
    window: int | None = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")
    from quant.kernels.attention.portable_paged_attention import attend_pages

    with interpreted():
        options = AttentionOptions(window=window, softcap=softcap)
        return attend_pages(q, pages, table, lengths, options, tiles, asm=False)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}, {"softmax_scale": 0.3}], ids=str)
def test_oracle_against_float64(name: str | None, options: dict[str, float]) -> None:
    cache = filled(name, [37, 3, 64])
    q = torch.randn(3, 4, 3, 64)
    expected = exact(q, *cache, **{"softmax_scale": 0.125, **options})
    torch.testing.assert_close(paged_attention(q, *cache, **options).double(), expected, rtol=1e-4, atol=1e-5)


SIZES = [
    (64, 16, 1, 16, 3),
    (128, 2, 1, 64, 1),
    (96, 6, 2, 32, 2),
    (32, 4, 5, 16, 1),
    (192, 2, 1, 16, 2),
    (256, 4, 1, 32, 1),
]


@pytest.mark.parametrize(
    ("name", "dim", "heads", "new", "page_size", "splits"),
    quick_cases(
        ((name, *sizes) for name in FORMAT_NAMES for sizes in SIZES),
        lambda name, *sizes: (FORMAT_NAMES.index(name) + SIZES.index(sizes)) % 2 == 0,
    ),
)
def test_kernel_against_float64(name: str | None, dim: int, heads: int, new: int, page_size: int, splits: int) -> None:
    """Odd lengths, parts without a key, a group of one to eight heads."""
    cache = filled(name, [150, new, 65], dim=dim, page_size=page_size)
    q = torch.randn(3, heads, new, dim).to(torch.bfloat16)
    out = kernel(q, *cache, DecodeTiles(8, 32, 4, 3, splits))
    expected = exact(q, *cache, softmax_scale=1 / math.sqrt(dim))
    assert error(out, expected) < TOLERANCE[name]


def test_tokens_of_a_page_may_lie_apart() -> None:
    """As in vLLM, where the heads of a token are neighbours, and its keys and values."""
    pages, table, lengths = filled(None, [70, 33], page_size=16)
    both = torch.stack((pages.k, pages.v), 3).transpose(1, 2).contiguous()  # [pages, tokens, heads, 2, dim]
    apart = KVPages(*both.transpose(1, 2).unbind(3), None, pages.dim)
    q = torch.randn(2, 4, 1, pages.dim).to(torch.bfloat16)
    tiles = DecodeTiles(8, 32, 4, 3, 2)
    assert torch.equal(kernel(q, apart, table, lengths, tiles), kernel(q, pages, table, lengths, tiles))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sequence_without_tokens_gives_zeros(splits: int) -> None:
    """A server pads the batches of its CUDA graphs with such sequences."""
    pages, table, lengths = filled("nvfp4", [70, 1])
    lengths[1] = 0
    q = torch.randn(2, 4, 1, 64).to(torch.bfloat16)
    out = kernel(q, pages, table, lengths, DecodeTiles(8, 32, 4, 3, splits))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert error(out[:1], exact(q[:1], pages, table[:1], lengths[:1], softmax_scale=0.125)) < TOLERANCE["nvfp4"]


@pytest.mark.parametrize("name", ["fp8", "fp8_token", "nvfp4"])
def test_queries_in_float32_lose_what_fp16_does(name: str) -> None:
    """Three bits less than BF16: a float32 model gets sums and outputs as they are."""
    cache = filled(name, [150, 1, 65])
    q = torch.randn(3, 8, 1, 64)
    expected = exact(q, *cache, softmax_scale=0.125)
    for splits in (1, 2):
        out = kernel(q, *cache, DecodeTiles(8, 32, 4, 3, splits))
        assert out.dtype is torch.float32 and error(out, expected) < 4e-4


@pytest.mark.parametrize(
    ("name", "splits"),
    quick_cases(product(("fp8", "nvfp4"), (1, 2)), lambda name, splits: (name == "fp8") == (splits == 2)),
)
@pytest.mark.parametrize(("window", "softcap"), [(40, None), (None, 3.0), (1, 5.0)])
def test_kernel_with_a_window_and_a_cap(name: str, splits: int, window: int | None, softcap: float | None) -> None:
    cache = filled(name, [150, 4, 65])
    q = 2 * torch.randn(3, 8, 3, 64).to(torch.bfloat16)
    out = kernel(q, *cache, DecodeTiles(16, 32, 4, 3, splits), window, softcap)
    expected = exact(q, *cache, softmax_scale=0.125, window=window, softcap=softcap)
    assert error(out, expected) < TOLERANCE[name]


@pytest.mark.parametrize(
    ("name", "splits"),
    quick_cases(
        product(FORMAT_NAMES, (1, 3)), lambda name, splits: (FORMAT_NAMES.index(name) % 2 == 0) == (splits == 1)
    ),
)
def test_kernel_on_a_chunk_of_a_prompt(name: str | None, splits: int) -> None:
    """Forty new tokens over a cache of different lengths, in larger tiles."""
    cache = filled(name, [130, 40])
    q = torch.randn(2, 4, 40, 64).to(torch.bfloat16)
    tiles = decode_tiles_for(cache[0], 80, 4, 130, 132)
    assert (tiles.block_m, tiles.splits) == (64, 1)
    expected = exact(q, *cache, softmax_scale=0.125)
    assert error(kernel(q, *cache, replace(tiles, splits=splits)), expected) < TOLERANCE[name]


def test_a_prompt_in_chunks_is_the_prompt_at_once() -> None:
    """Token by token, in chunks, or at once: the same cache, the same attention."""
    x = torch.randn(3, 1, 2, 50, 64)
    q = torch.randn(1, 4, 50, 64)
    outputs = []
    for step in (50, 16, 1):
        cache = PagedKVCache(1, 2, 64, format=kv_format("fp8_token"), page_size=16)
        sequence = cache.add()
        parts = []
        for start in range(0, 50, step):
            here = slice(start, start + step)
            cache.append(0, [sequence], x[0][:, :, here], x[1][:, :, here])
            parts.append(cache.attend(0, [sequence], q[:, :, here]))
        outputs.append(torch.cat(parts, 2))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-5, atol=1e-6)


def test_what_lies_behind_the_end_of_a_sequence_is_not_read() -> None:
    """Pages hold NaN wherever nothing was written, and the block table names such a page behind the end."""
    pages, table, lengths = filled(None, [20, 33])
    for pool in (pages.k, pages.v):
        written = torch.zeros(pool.shape[0], pages.page_size, dtype=torch.bool)
        for row, length in enumerate(lengths.tolist()):
            for token in range(length):
                written[table[row, token // 16], token % 16] = True
        pool.masked_fill_(~written[:, None, :, None], math.nan)
    q = torch.randn(2, 4, 1, 64).to(torch.bfloat16)
    expected = paged_reference(q, pages, table, lengths, compute=torch.float64)
    assert bool(expected.isfinite().all())
    for splits in (1, 4):
        out = kernel(q, pages, table, lengths, DecodeTiles(16, 32, 4, 3, splits))
        assert error(out, expected.double()) < TOLERANCE[None]


def test_the_launch_fills_the_gpu_and_no_more() -> None:
    pages = filled("fp8", [16])[0]
    assert decode_tiles_for(pages, 8, 1, 64, 132).splits == 1
    # One short sequence: parts of two tiles, for there are more SMs than parts of four.
    assert decode_tiles_for(pages, 4, 8, 1024, 132).splits == 16
    few = decode_tiles_for(pages, 8, 8, 32768, 132)
    assert few.splits == 66 and decode_tiles_for(pages, 8, 128, 32768, 132).splits == 4
    assert decode_tiles_for(filled("nvfp4", [16])[0], 8, 128, 32768, 132).splits == 12
    assert decode_tiles_for(pages, 8, 4096, 32768, 132).splits == 1
    assert [decode_tiles_for(pages, rows, 8, 4096, 132).block_m for rows in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 64]
    # Eight tokens of four heads behind a long cache, and chunks of a prompt: 128 and 512 tokens.
    assert [decode_tiles_for(pages, rows, 8, 32768, 132).splits for rows in (32, 512, 2048)] == [33, 4, 1]


Q = torch.zeros(2, 4, 1, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 1, 64)}, "2 KV heads do not divide 3 heads"),
        ({"q": torch.zeros(2, 4, 1, 32)}, r"expected q \[batch, heads, new, 64\]"),
        ({"q": torch.zeros(2, 4, 0, 64)}, "none of them 0"),
        ({"q": torch.zeros(2, 4, 1, 64, dtype=torch.float64)}, "q is torch.float64"),
        ({"block_table": torch.tensor([[0, 99], [1, 2]], dtype=torch.int32)}, "row 0 names page 99; there are"),
        ({"block_table": torch.tensor([[0, 1], [-1, 2]], dtype=torch.int32)}, "row 1 names page -1"),
        ({"block_table": torch.tensor([[0, 1], [1, 2]])}, r"block_table is torch.int64 \[2, 2\], expected int32"),
        ({"block_table": torch.tensor([[0], [1]], dtype=torch.int32)}, "has room for 1 pages of 16"),
        ({"lengths": torch.tensor([20, 0], dtype=torch.int32)}, "a length is 0; 1 new tokens are counted in it"),
        ({"lengths": torch.tensor([20], dtype=torch.int32)}, r"lengths is torch.int32 \[1\]"),
        ({"q": torch.zeros(2, 4, 1, 64, device="meta")}, r"on different devices \(cpu, meta\)"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"softcap": -1.0}, "softcap -1.0 must be positive"),
        ({"softmax_scale": math.inf}, "softmax_scale inf must be positive"),
    ],
)
def test_bad_input_is_named_before_any_launch(change: dict[str, object], message: str) -> None:
    pages, table, lengths = filled("fp8_token", [20, 17])
    given = {"q": Q, "pages": pages, "block_table": table, "lengths": lengths, **change}
    with pytest.raises(ValueError, match=message):
        paged_attention(**given)


def test_pages_that_no_kernel_takes() -> None:
    pages, table, lengths = filled("fp8_token", [20, 17])
    with pytest.raises(ValueError, match="no format mxfp8"):
        paged_attention(Q, replace(pages, format=kv_format("fp8").__class__("mxfp8", *[None] * 3)), table, lengths)


def run_assembly(text: str, *operands: np.ndarray) -> np.ndarray:
    """Returns the pairs of E4M3 that `text` converts, from integer instructions on words `operands`, $1 and so on."""
    values = {f"${i + 1}": operand.astype(np.uint32) for i, operand in enumerate(operands)}

    def read(name: str) -> np.ndarray:
        return values[name] if name in values else np.uint32(int(name, 0))

    for line in re.sub(r"\.reg[^;]*;", "", text.strip("{} ")).split(";"):
        operation, *arguments = re.findall(r"[^\s,]+", line) or [""]
        if operation == "mov.b32":  # {a,b}, t
            values["a"], values["b"] = read(arguments[2]) & 0xFFFF, read(arguments[2]) >> 16
        elif operation.startswith("cvt"):
            return read(arguments[1])
        elif operation:
            target, first, *rest = arguments
            a, b = read(first), read(rest[0])
            if operation == "prmt.b32":
                a = sum((a >> 8 * (int(rest[1], 0) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
            elif operation == "lop3.b32":
                assert rest[2] == "0xEA"
                a = a & b | read(rest[1])
            else:
                a = {"shl.b32": a << b, "shr.b32": a >> b, "and.b32": a & b}[operation]
            values[target] = a
    raise AssertionError(f"nothing is converted: {text}")


def test_assembly_picks_the_columns_of_units() -> None:
    low = np.arange(1 << 16, dtype=np.uint32)
    units = low | (low[::-1] << 16)  # two units of 16 bits in a word
    halves = np.stack([units & 0xFFFF, units >> 16])
    for column, text in enumerate(portable_paged_attention._E2M1.value):
        pairs = torch.from_numpy(run_assembly(text, units).astype(np.uint16)).view(torch.float8_e4m3fn)
        code = halves >> 4 * column & 15
        e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * np.where(code & 8, -1, 1)
        np.testing.assert_array_equal(pairs.double().numpy().reshape(-1, 2).T, e2m1 * 2.0**-6)
        assert text.endswith(" mul.rn.f16x2 $0,t,$2; }")
    for column, text in enumerate(portable_paged_attention._E4M3.value):
        byte = halves >> 8 * column & 0xFF
        np.testing.assert_array_equal(run_assembly(text, units), byte[0] | byte[1] << 8)
        assert text.endswith(" cvt.rn.f16x2.e4m3x2 $0, a; }")


def test_assembly_of_triton_kernels_has_one_output() -> None:
    """Triton 3.8 runs assembly of several outputs once more for each layout in which one of them is needed."""
    found = 0
    for path in Path(portable_paged_attention.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.inline_asm_elementwise":
                constraints = ast.literal_eval(node.args[1])
                assert constraints.count("=") == 1, (path.name, constraints)
                found += 1
    assert found >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(
    ("dim", "heads", "new", "page_size"),
    [
        (64, 16, 1, 64), (64, 8, 3, 32), (64, 4, 70, 64), (128, 16, 1, 64), (128, 2, 1, 16), (128, 6, 5, 32),
        (96, 16, 1, 16), (192, 2, 3, 32), (256, 16, 1, 64), (256, 4, 70, 64),
    ],
)  # fmt: skip
def test_gpu_kernel_against_float64(name: str | None, dim: int, heads: int, new: int, page_size: int) -> None:
    cache = filled(name, [300, new, 128, 777], dim=dim, page_size=page_size, device="cuda")
    q = torch.randn(4, heads, new, dim, device="cuda").to(torch.bfloat16)
    for options in ({}, {"window": 50}, {"softcap": 4.0})[: 3 if (dim, new) == (64, 1) else 1]:
        out = paged_attention(q, *cache, **options)
        expected = paged_reference(q, *cache, compute=torch.float64, **options)
        assert bool(out.isfinite().all())
        assert error(out, expected.double()) < TOLERANCE[name]
    if name is not None:
        # Of 8 bits a BF16 output loses four times what FP16 operands do.
        expected = paged_reference(q.double(), *cache, compute=torch.float64)
        assert error(paged_attention(q.float(), *cache), expected) < 4e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("dim", "new"), [(64, 50), (96, 1), (96, 50), (128, 1), (256, 1), (256, 50)])
def test_gpu_writes_what_the_cpu_writes(name: str | None, dim: int, new: int) -> None:
    scale = torch.rand(1, 2) / (100 if name == "fp8" else 600) + 0.001 if name in ("fp8", "nvfp4") else None
    k, v = torch.randn(2, 1, 2, new, dim).to(torch.bfloat16)
    pools = []
    for device in ("cuda", "cpu"):
        cache = PagedKVCache(1, 2, dim, format=kv_format(name), k_scale=scale, v_scale=scale, device=device)
        cache.append(0, [cache.add()], k.to(device), v.to(device))
        pools.append({part: pool.cpu() for part, pool in cache._pools.items()})
    for part, pool in pools[0].items():
        assert torch.equal(pool.view(torch.uint8), pools[1][part].view(torch.uint8)), part


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles", [DecodeTiles(8, 128, 8, 3, 1), DecodeTiles(8, 128, 8, 3, 4), DecodeTiles(8, 32, 1, 3, 1)]
)
def test_gpu_reads_tokens_that_lie_apart(tiles: DecodeTiles) -> None:
    """Launches of vLLM's decoding steps, over blocks as vLLM lays them out."""
    from quant.kernels.attention.portable_paged_attention import attend_pages

    pages, table, lengths = filled(None, [700, 33], dim=128, page_size=16)
    both = torch.stack((pages.k, pages.v), 3).transpose(1, 2).contiguous().cuda()  # [pages, tokens, heads, 2, dim]
    apart = KVPages(*both.transpose(1, 2).unbind(3), None, pages.dim)
    q = torch.randn(2, 4, 1, 128).to(torch.bfloat16)
    out = attend_pages(q.cuda(), apart, table.cuda(), lengths.cuda(), AttentionOptions(causal=True), tiles)
    assert error(out, exact(q, pages, table, lengths, softmax_scale=1 / math.sqrt(128))) < TOLERANCE[None]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_sees_the_keys_that_the_kernel_before_writes(overlap: bool) -> None:
    """Kernels that start before the previous one has ended give what they give one at a time."""
    from quant.kernels.attention.portable_paged_attention import attend_pages
    from quant.kernels.attention.portable_paged_kv_cache import write_kv_slots

    pages, table, lengths = filled("nvfp4", [700, 33], dim=128, page_size=16, device="cuda")
    # The last token of each sequence is written anew before each attention.
    last = lengths.long() - 1
    slots = table.long().gather(1, last[:, None] // 16)[:, 0] * 16 + last % 16
    q, k = torch.randn(40, 2, 4, 1, 128, device="cuda").bfloat16(), torch.randn(40, 2, 2, 128, device="cuda").bfloat16()
    tiles, out = DecodeTiles(8, 32, 1, 3, 4, overlap=overlap), torch.empty_like(q)

    def step(i: int) -> None:
        write_kv_slots(pages, slots, k[i], k[i])
        attend_pages(q[i], pages, table, lengths, AttentionOptions(causal=True), tiles, out=out[i])

    for i in range(40):
        step(i)
        torch.cuda.synchronize()
    expected, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(40):
            step(i)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_kernels_of_a_step_wait_before_they_read_what_the_one_before_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")
    from compiler import compiled_for

    from quant.kernels.attention import portable_paged_attention, portable_paged_kv_cache

    for module in (portable_paged_attention, portable_paged_kv_cache):
        monkeypatch.setattr(module, "overlap_options", lambda x: {"overlap": True, "launch_pdl": True})
    pages, table, lengths = filled(None, [40])
    q, k = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with compiled_for(90) as compiled:
        for overlap in (True, False):
            tiles = DecodeTiles(8, 32, 1, 1, 2, overlap=overlap)
            portable_paged_attention.attend_pages(q, pages, table, lengths, AttentionOptions(causal=True), tiles)
        portable_paged_kv_cache.write_kv_slots(pages, torch.zeros(1, dtype=torch.int64), k, k)
    early, reduction, late, *_, write = (kernel.asm["ptx"].split("griddepcontrol.wait", 1) for kernel in compiled)
    assert len(late) == 1, "long reads start after the previous kernel, which leaves all SMs to them"
    for before, after in (early, reduction, write):
        assert "st.global" not in before and "st.global" in after and "mma" not in before
    assert "prefetch.global.L2" in early[0]
    # Attention that starts while SMs are busy is spread unevenly over them, so it waits for the end of the writes.
    assert ["launch_dependents" in "".join(parts) for parts in (early, reduction, write)] == [True, True, False]
