"""The paged KV cache writes what `quant.formats` rounds to, in the right place, and leaves shared pages alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from interpreter import interpreted

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import quantize
from quant.kernels.attention.kv_pages import encode_kv, first_scale, kv_format, round_kv, token_bytes, write_reference
from quant.kernels.attention.paged_attention import PagedKVCache

FORMAT_NAMES = (None, "fp8", "fp8_token", "nvfp4")


def cache_of(name: str | None, *, layers: int = 2, kv_heads: int = 2, dim: int = 32, **options: object) -> PagedKVCache:
    scales = {}
    if name in ("fp8", "nvfp4"):
        scales = {n: torch.rand(layers, kv_heads) * 0.01 + 0.005 for n in ("k_scale", "v_scale")}
        if name == "nvfp4":
            scales = {n: scale / 6 for n, scale in scales.items()}
    options = {"pages": 3, "page_size": 16, **scales, **options}
    return PagedKVCache(layers, kv_heads, dim, format=kv_format(name), **options)


def tokens(batch: int, kv_heads: int, new: int, dim: int) -> torch.Tensor:
    """Values of very different sizes, and a token of zeros."""
    x = torch.randn(batch, kv_heads, new, dim) * torch.logspace(-2, 0, new)[:, None]
    x[:, :, 0] = 0
    return x.to(torch.bfloat16)


def test_fp8_codes_are_those_of_ml_dtypes() -> None:
    x = tokens(1, 2, 40, 64).float()
    scale = torch.tensor([0.004, 0.011])
    for given in (scale, None):
        codes, found, _ = encode_kv(x, FORMATS["fp8" if given is not None else "fp8_token"], given)
        if given is None:
            amax = x.abs().amax(-1)
            expected_scale = torch.where(amax > 0, amax / 448, 1.0)
            torch.testing.assert_close(found, expected_scale, rtol=1e-7, atol=0)
            assert found is not None
            steps = x / found[..., None]
        else:
            steps = x / given[:, None, None]
        expected = steps.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected)


def test_nvfp4_takes_the_best_of_eight_scales_and_the_codes_that_it_gives() -> None:
    """By brute force in float64 with the number formats of ml_dtypes; blocks beyond the range of all eight, too."""
    x, scale = tokens(1, 2, 40, 64).float(), torch.tensor([2e-4, 5e-4])
    x[:, 1, 5] *= 1e6
    codes, _, stored = encode_kv(x, FORMATS["nvfp4"], scale)
    assert stored is not None
    steps = x[0].double().numpy().reshape(2, 40, 4, 16) / scale.double().numpy()[:, None, None, None]
    amax = np.abs(steps).max(-1)
    nearest = np.clip(amax.astype(np.float32) / 6, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    tried = np.clip(nearest.astype(int)[..., None] + np.arange(-2, 6), 1, 126).astype(np.uint8)
    scales = tried.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[..., None]
    rounded = np.clip(steps[..., None, :] / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales
    errors = np.square(rounded - steps[..., None, :]).sum(-1)
    chosen = stored[0].view(torch.uint8).numpy()
    assert (tried == chosen[..., None]).any(-1).all()
    error = np.where(tried == chosen[..., None], errors, np.inf).min(-1)
    assert (error <= 1.02 * errors.min(-1) + 1e-4 * np.square(amax)).all()
    assert error.sum() <= 1.0001 * errors.min(-1).sum()
    assert (chosen != nearest).mean() > 0.5

    step = torch.from_numpy(chosen).view(torch.float8_e4m3fn).float() * scale[:, None, None]
    quotient = (x[0].reshape(2, 40, 4, 16) / step[..., None]).clamp(-6, 6).numpy()
    expected = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(2, 40, 32, 2)
    np.testing.assert_array_equal(codes[0].numpy(), expected[..., 0] | expected[..., 1] << 4)
    values = quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * step[..., None].numpy()
    np.testing.assert_array_equal(round_kv(x, FORMATS["nvfp4"], scale)[0].numpy(), values.reshape(2, 40, 64))


def test_eight_scales_are_nearly_as_good_as_all() -> None:
    """On normal values: 0.6% above the best of all scales, and the `max` rule 37%."""
    x = torch.randn(1, 1, 2000, 64, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.02])
    error = float((round_kv(x, FORMATS["nvfp4"], scale) - x).square().sum())
    for rule, least, most in (("mse", 1.0, 1.01), ("max", 0.7, 0.75)):
        other = quantize(x[0], FORMATS["nvfp4"], rule=rule, global_scale=scale).dequantize()
        assert least <= error / float((other - x[0]).square().sum()) <= most, rule


def test_a_scale_may_be_given_for_values_alone() -> None:
    x = tokens(1, 2, 20, 32)
    given = torch.tensor([[0.02, 0.03]])
    cache = PagedKVCache(1, 2, 32, format=FORMATS["fp8"], v_scale=given)
    a = cache.add()
    for part in (x[:, :, :7], x[:, :, 7:]):
        cache.append(0, [a], part, part)
    k, v = cache.read(0, a)
    assert torch.equal(k, round_kv(x[0].float(), cache.format, first_scale(x[:, :, :7], cache.format)))
    assert torch.equal(v, round_kv(x[0].float(), cache.format, given[0]))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_reading_gives_what_was_rounded(name: str | None) -> None:
    """Three appends across page borders, in two layers, of two sequences of different lengths."""
    cache = cache_of(name)
    a, b = cache.add(), cache.add()
    written: dict[tuple[int, int], list[torch.Tensor]] = {}
    for sequences, new in (([a], 5), ([a, b], 30), ([b], 1), ([a, b], 1)):
        for layer in range(2):
            k, v = tokens(len(sequences), 2, new, 32), tokens(len(sequences), 2, new, 32)
            cache.append(layer, sequences, k, v)
            for row, sequence in enumerate(sequences):
                written.setdefault((layer, sequence), []).append(torch.stack([k[row], v[row]]))
    for (layer, sequence), parts in written.items():
        pages = cache.layer(layer)
        scales = [None if s is None or s.dim() == 3 else s for s in (pages.k_scale, pages.v_scale)]
        whole = torch.cat(parts, 2)
        assert cache.length(sequence, layer) == whole.shape[2]
        for got, x, scale in zip(cache.read(layer, sequence), whole, scales, strict=True):
            assert torch.equal(got, round_kv(x.float(), cache.format, scale))


def test_fork_shares_pages_until_one_writes() -> None:
    cache = cache_of("fp8_token", pages=8)
    a = cache.add()
    k, v = tokens(1, 2, 40, 32), tokens(1, 2, 40, 32)
    for layer in range(2):
        cache.append(layer, [a], k, v)
    before = [cache.read(layer, a) for layer in range(2)]
    b, c = cache.fork(a), cache.fork(a)
    assert cache.pages_of(a) == cache.pages_of(b) == cache.pages_of(c)
    new = tokens(3, 2, 2, 32)
    for layer in range(2):
        cache.append(layer, [a, b, c], new, -new)
    # Two full pages stay shared; of the third, two copies were made.
    assert cache.pages_of(a)[:2] == cache.pages_of(b)[:2] == cache.pages_of(c)[:2]
    assert len({cache.pages_of(s)[2] for s in (a, b, c)}) == 3
    for layer in range(2):
        for row, sequence in enumerate((a, b, c)):
            for got, old, x in zip(cache.read(layer, sequence), before[layer], (new, -new), strict=True):
                assert torch.equal(got[:, :40], old)
                assert torch.equal(got[:, 40:], round_kv(x[row].float(), cache.format, None))
    # All of the eight pages are free again, so that as many tokens as they hold need no further one.
    for sequence in (b, a, c):
        cache.drop(sequence)
    size, a = cache.nbytes, cache.add()
    full = tokens(1, 2, 8 * 16, 32)
    cache.append(0, [a], full, full)
    assert cache.nbytes == size and sorted(cache.pages_of(a)) == list(range(8))


def test_cropped_tokens_are_written_again() -> None:
    cache = cache_of("fp8_token", layers=1, pages=4)
    a = cache.add()
    k = tokens(1, 2, 50, 32)
    cache.append(0, [a], k, k)
    b = cache.fork(a)
    cache.crop(a, 10)
    assert cache.length(a) == 10 and len(cache.pages_of(a)) == 1 and cache.length(b) == 50
    cache.append(0, [a], -k, -k)
    expected = torch.cat([k[0, :, :10], -k[0]], 1).float()
    assert torch.equal(cache.read(0, a)[0], round_kv(expected, cache.format, None))
    assert torch.equal(cache.read(0, b)[0], round_kv(k[0].float(), cache.format, None))


@pytest.mark.parametrize(("name", "largest_value"), [("fp8", 448), ("nvfp4", 6 * 448)])
def test_a_scale_of_the_first_tokens_leaves_room(name: str, largest_value: int) -> None:
    """The same whether tokens come at once or one by one, and sixteen times larger ones do not saturate."""
    x = tokens(1, 2, 20, 32)
    x[:, :, 0] = torch.randn(1, 2, 32).to(torch.bfloat16)
    cache = PagedKVCache(1, 2, 32, format=FORMATS[name])
    a = cache.add()
    cache.append(0, [a], x[:, :, :1], x[:, :, :1])
    cache.append(0, [a], 15.9 * x[:, :, :1], x[:, :, 1:2])
    scale = first_scale(x[:, :, :1], FORMATS[name])
    torch.testing.assert_close(scale, x[0, :, 0].abs().amax(-1).float() * 16 / largest_value)
    got = cache.read(0, a)[0]
    assert torch.equal(got[:, :1], round_kv(x[0, :, :1].float(), cache.format, scale))
    largest = (15.9 * x[0, :, :1]).abs().amax(-1).float()
    torch.testing.assert_close(got[:, 1:2].abs().amax(-1), largest, rtol=0.07, atol=0)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("dim", "new"), [(32, 1), (96, 21), (128, 3)])
def test_kernel_writes_what_the_oracle_writes(name: str | None, dim: int, new: int) -> None:
    pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")
    from quant.kernels.attention.portable_paged_kv_cache import write_kv

    ours, theirs = cache_of(name, dim=dim, pages=8, layers=1), cache_of(name, dim=dim, pages=8, layers=1)
    ours._scales = theirs._scales
    table = torch.tensor([[5, 2, 7], [1, 0, 3]], dtype=torch.int32)
    first = torch.tensor([14, 3], dtype=torch.int32)
    k = torch.randn(2, new, 2, dim).to(torch.bfloat16).transpose(1, 2)  # strided, as projections leave it
    v = tokens(2, 2, new, dim)
    with interpreted():
        write_kv(ours.layer(0), table, first, k, v)
    write_reference(theirs.layer(0), table, first, k, v)
    for part, pool in ours._pools.items():
        assert torch.equal(pool.view(torch.uint8), theirs._pools[part].view(torch.uint8)), part
    assert bool(ours._pools["k"].view(torch.uint8).any())


def test_heads_may_lie_further_apart_than_31_bits_count() -> None:
    """A prompt of millions of tokens; of the memory between its heads, no page is touched."""
    pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")
    from quant.kernels.attention.portable_paged_kv_cache import write_kv

    far = 1 << 30
    memory = torch.empty(2 * far + 64, dtype=torch.bfloat16)
    k = memory.as_strided((1, 3, 2, 32), (3 * far, far, 32, 1)).copy_(torch.randn(1, 3, 2, 32))
    cache = cache_of(None, kv_heads=3, layers=1)
    with interpreted():
        write_kv(cache.layer(0), torch.tensor([[1]]), torch.tensor([5]), k, k)
    assert torch.equal(cache.layer(0).k[1, :, 5:7], k[0])


@pytest.mark.parametrize(("name", "count"), [(None, 6), ("fp8", 6), ("fp8_token", 6), ("nvfp4", 6), ("nvfp4", 130)])
def test_slots_are_written_as_by_the_oracle(name: str | None, count: int) -> None:
    pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")
    from quant.kernels.attention.portable_paged_kv_cache import write_kv_slots

    ours, theirs = cache_of(name, pages=9, layers=1), cache_of(name, pages=9, layers=1)
    ours._scales = theirs._scales
    slots = [-1, *torch.randperm(9 * 16)[: count - 1].tolist()]
    qkv = torch.randn(len(slots), 3, 2, 32).to(torch.bfloat16)  # strided, as a merged projection leaves it
    k, v = qkv[:, 1], qkv[:, 2]
    with interpreted():
        write_kv_slots(ours.layer(0), torch.tensor(slots), k, v)
    for token, slot in enumerate(slots):
        if slot >= 0:
            table, first = torch.tensor([[slot // 16]], dtype=torch.int32), torch.tensor([slot % 16], dtype=torch.int32)
            write_reference(theirs.layer(0), table, first, k[token, None, :, None], v[token, None, :, None])
    for part, pool in ours._pools.items():
        assert torch.equal(pool.view(torch.uint8), theirs._pools[part].view(torch.uint8)), part


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PagedKVCache(1, 2, 40), "head dimension 40; it must be a multiple of 16, at most 256"),
        (lambda: PagedKVCache(1, 2, 512), "head dimension 512"),
        (lambda: PagedKVCache(1, 2, 64, page_size=48), "pages of 48 tokens; known: 16, 32, 64"),
        (lambda: PagedKVCache(1, 2, 64, format=FORMATS["mxfp8"]), "no format mxfp8; known: fp8, fp8_token, nvfp4"),
        (
            lambda: PagedKVCache(1, 2, 64, format=FORMATS["fp8"], v_scale=torch.ones(2)),
            r"v_scale \[2\] must be \[layers, kv_heads\] = \[1, 2\], positive",
        ),
        (lambda: PagedKVCache(0, 2, 64), "0 layers"),
        (lambda: PagedKVCache(1, 2, 64, dtype=torch.float32), "torch.float32; a cache that is not quantized"),
        (lambda: kv_format("int3"), 'kv_cache="int3": unknown; known'),
        (
            lambda: PagedKVCache(
                1, 2, 64, format=FORMATS["nvfp4"], k_scale=torch.ones(1, 2), v_scale=torch.zeros(1, 2)
            ),
            r"v_scale \[1, 2\] must be \[layers, kv_heads\] = \[1, 2\], positive",
        ),
    ],
)
def test_bad_caches(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_appends_change_nothing() -> None:
    cache = cache_of("fp8_token", layers=1, pages=2)
    a = cache.add()
    x = tokens(1, 2, 20, 32)
    cache.append(0, [a], x, x)
    pages, size = cache.pages_of(a), cache.nbytes
    for sequences, k, v, message in (
        ([a], x[:, :1], x[:, :1], "2 KV heads"),
        ([a], x, x[:, :, :3], "KV cache: k"),
        ([a], x[:, :, :0], x[:, :, :0], "1 or more new tokens"),
        ([a, a], x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1), "one is named twice"),
        ([7], x, x, "no sequence 7"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(0, sequences, k, v)
        assert (cache.length(a), cache.pages_of(a), cache.nbytes) == (20, pages, size)
    assert torch.equal(cache.read(0, a)[0], round_kv(x[0].float(), cache.format, None))


def test_pages_are_made_when_all_are_taken() -> None:
    cache = cache_of("fp8_token", layers=1, pages=1)
    sequences = [cache.add() for _ in range(3)]
    x = tokens(3, 2, 100, 32)
    for start in range(0, 100, 25):
        cache.append(0, sequences, x[:, :, start : start + 25], x[:, :, start : start + 25])
    for row, sequence in enumerate(sequences):
        assert torch.equal(cache.read(0, sequence)[0], round_kv(x[row].float(), cache.format, None))


def test_bytes_are_counted() -> None:
    for name, expected in ((None, 256), ("fp8", 128), ("fp8_token", 132), ("nvfp4", 72)):
        cache = cache_of(name, dim=128, layers=3, pages=2)
        assert token_bytes(cache.format, 128) == expected
        assert cache.nbytes == 3 * 2 * 16 * 2 * 2 * expected


def test_formats_by_name() -> None:
    known: list[Format | None] = [kv_format(name) for name in ("fp8", "nvfp4", "keep", None)]
    assert known == [FORMATS["fp8"], FORMATS["nvfp4"], None, None]
