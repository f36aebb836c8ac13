"""Rotated heads and rows in their slots equal float64 on the columns of one matmul's output, in place and in pages."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.kernels.attention.portable_decoder_step import rotate, store_rows


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (2, 1, 128), (3, 2, 80)])
def test_heads_are_turned_by_the_angles_of_their_position(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim).bfloat16()
    q, k, _ = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    angles = torch.randn(16, dim // 2)
    cache = torch.cat((angles.cos(), angles.sin()), 1).bfloat16()
    positions = torch.tensor([3, 15, 0, 3])
    with interpreted():
        turned = rotate(positions, q, k, cache, dim)
    # A pair of columns is a complex number.
    factor = torch.complex(*cache.double()[positions, None].chunk(2, -1))
    for x, y in zip((q, k), turned, strict=True):
        pairs = torch.complex(*x.double().view(4, -1, dim).chunk(2, -1)) * factor
        expected = torch.cat((pairs.real, pairs.imag), -1).view(x.shape)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-9)


def test_rows_go_to_their_slots_and_to_no_other() -> None:
    torch.manual_seed(0)
    heads, dim, page = 3, 48, 4
    k, v = torch.randn(5, heads, dim).bfloat16(), torch.randn(5, 2 * heads * dim).bfloat16()
    v = v[:, heads * dim :].unflatten(1, (heads, dim))
    # vLLM's pages: [pages, heads, page, dim of keys and of values], seen as [pages, page, heads, dim].
    pages = torch.full((3, heads, page, 2 * dim), 7.0).bfloat16()
    k_cache, v_cache = pages.transpose(1, 2).split(dim, dim=-1)
    slots = torch.tensor([9, -1, 0, 7])  # the fifth token has none: it pads a CUDA graph's batch
    with interpreted():
        store_rows(k, v, k_cache, v_cache, slots)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.full((3 * page, heads, dim), 7.0).bfloat16()
        expected[[9, 0, 7]] = rows[[0, 2, 3]]
        assert torch.equal(cache.reshape(3 * page, heads, dim), expected)


@pytest.mark.gpu
def test_a_gpu_rotates_and_stores_alike() -> None:
    """Many tokens, launched one after the other with overlap, as a server launches them."""
    torch.manual_seed(0)
    heads, kv_heads, dim, page, tokens = 32, 8, 128, 16, 1000
    for _ in range(20):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        angles = torch.randn(64, dim // 2, device="cuda")
        cache = torch.cat((angles.cos(), angles.sin()), 1).bfloat16()
        positions, slots = (
            torch.randint(64, (tokens,), device="cuda"),
            torch.randperm(64 * page, device="cuda")[:tokens],
        )
        pages = torch.zeros(64, kv_heads, page, 2 * dim, device="cuda").bfloat16()
        k_cache, v_cache = pages.transpose(1, 2).split(dim, dim=-1)
        turned_q, turned_k = rotate(positions, q, k, cache, dim)
        store_rows(turned_k.view(-1, kv_heads, dim), v.unflatten(1, (kv_heads, dim)), k_cache, v_cache, slots)
        factor = torch.complex(*cache.double()[positions, None].chunk(2, -1))
        pairs = torch.complex(*q.double().view(tokens, -1, dim).chunk(2, -1)) * factor
        expected = torch.cat((pairs.real, pairs.imag), -1).view(q.shape)
        torch.testing.assert_close(turned_q.double(), expected, rtol=2**-8, atol=2**-8)
        where = slots // page, slots % page
        assert torch.equal(k_cache[where].flatten(1), turned_k) and torch.equal(v_cache[where].flatten(1), v)
