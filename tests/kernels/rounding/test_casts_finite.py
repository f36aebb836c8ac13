"""No quantizer makes a number of NaN or infinity: what shares a scale with it decodes to NaN, and nothing else does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.attention import forward as attention
from quant.kernels.attention.kv_pages import decode_kv, kv_format, round_kv
from quant.kernels.attention.paged_attention import PagedKVCache
from quant.kernels.linear.quant_linear import quantized_linear
from quant.kernels.rounding import portable_casts

BAD = pytest.mark.parametrize("bad", [torch.nan, -torch.inf], ids=str)
GPU = pytest.mark.gpu
DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def known(format: Format, device: str = "cpu") -> dict[str, torch.Tensor]:
    number = torch.tensor(0.02, device=device)
    if format.block == (0, 0):
        return {"scale": number}
    return {"global_scale": number} if format.global_scale else {}


def lost_with(format: Format, shape: tuple[int, int], row: int, column: int) -> torch.Tensor:
    """Where NaN has to be if there is one at (row, column)."""
    lost = torch.zeros(shape, dtype=torch.bool)
    block = 1 if format.per_tensor else format.block[1] or shape[1]
    lost[row, column // block * block : (column // block + 1) * block] = True
    return lost


def cast(x: torch.Tensor, format: Format, device: str) -> BlockScaledTensor:
    if device == "cuda":
        return portable_casts.quantize(x.cuda(), format, **known(format, "cuda")).to("cpu")
    with interpreted():
        return portable_casts.quantize(x, format, **known(format))


@pytest.mark.parametrize("name", INPUT_FORMATS)
@BAD
def test_oracle(name: str, bad: float) -> None:
    """By the definition: `(0, 0)` under a static scale loses one value, every other format the block."""
    format, x = INPUT_FORMATS[name], torch.randn(3, 256)
    if format.block[0] > 1:
        return
    rounded = fake_quantize(x, format, **known(format))
    x[1, 40] = bad
    got, lost = fake_quantize(x, format, **known(format)), lost_with(format, (3, 256), 1, 40)
    assert torch.equal(got.isnan(), lost)
    assert torch.equal(got[~lost], rounded[~lost])
    if format.is_static:
        assert bool(fake_quantize(x, format).isnan().all())


@pytest.mark.parametrize("name", portable_casts.FORMATS_OUT)
@BAD
@DEVICE
def test_rows(name: str, bad: float, device: str) -> None:
    format, x = INPUT_FORMATS[name], torch.randn(3, 384).bfloat16()
    before = cast(x, format, device).dequantize()
    x[1, 140] = bad
    after = cast(x, format, device).dequantize()
    lost = lost_with(format, (3, 384), 1, 140)
    assert torch.equal(after.isnan(), lost)
    assert torch.equal(after[~lost], before[~lost])
    assert torch.equal(fake_quantize(x.float(), format, **known(format)).isnan(), lost)


@pytest.mark.parametrize("name", portable_casts.FORMATS_OUT)
@DEVICE
def test_measured_scales(name: str, device: str) -> None:
    """A scale that is measured over the whole tensor takes all of it along."""
    format, x = INPUT_FORMATS[name], torch.randn(4, 256).bfloat16()
    x[2, 7] = torch.inf
    if device == "cuda":
        got = portable_casts.quantize(x.cuda(), format).to("cpu")
    else:
        with interpreted():
            got = portable_casts.quantize(x, format)
    assert torch.equal(got.dequantize().isnan(), fake_quantize(x.float(), format).isnan())
    assert bool(got.dequantize()[2].isnan().any())


@pytest.mark.parametrize("name", ["fp8", "fp8_token", "nvfp4"])
@BAD
@DEVICE
def test_kv_cache(name: str, bad: float, device: str) -> None:
    given = torch.full((1, 2), 0.01) if name != "fp8_token" else None
    k, v = torch.randn(2, 1, 2, 5, 32).bfloat16()
    k[0, 1, 3, 20] = bad
    cache = PagedKVCache(1, 2, 32, format=kv_format(name), k_scale=given, v_scale=given, device=device)
    sequence = cache.add()
    if device == "cuda":
        cache.append(0, [sequence], k.cuda(), v.cuda())
    else:
        from quant.kernels.attention.portable_paged_kv_cache import write_kv

        with interpreted(), patch("quant.kernels.attention.paged_attention.write_reference", write_kv):
            cache.append(0, [sequence], k, v)
    got, other = (x.cpu() for x in cache.read(0, sequence))
    width = {"fp8": 1, "fp8_token": 32, "nvfp4": 16}[name]
    lost = torch.zeros(2, 5, 32, dtype=torch.bool)
    lost[1, 3, 20 // width * width : (20 // width + 1) * width] = True
    assert torch.equal(got.isnan(), lost)
    assert bool(other.isfinite().all())
    assert torch.equal(round_kv(k.float(), kv_format(name), None if given is None else given[0])[0].isnan(), lost)


@pytest.mark.parametrize("scales", ["block", "given"])
@pytest.mark.parametrize("hadamard", [False, True])
@BAD
@DEVICE
def test_operands_of_attention(scales: str, hadamard: bool, bad: float, device: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 64).bfloat16()
    k[0, 1, 150, 3] = bad
    v[0, 0, 20, 5] = bad
    options: dict[str, object] = {"hadamard": hadamard, "laid_out": False}
    if scales == "given":
        options["scales"] = tuple(torch.tensor(0.01, device=device) for _ in range(3))
    oracle = attention.quantize_attention(q, k, v, **options) if device == "cpu" else None
    if device == "cuda":
        got = attention.quantize_attention(*(x.cuda() for x in (q, k, v)), **options)
    else:
        from quant.kernels.attention import portable_fp8_operands as kernels

        with interpreted(), patch.object(attention, "_quantize", kernels.quantize_qkv):
            got = attention.quantize_attention(q, k, v, **options)
    reach = {"block": (slice(128, 200), slice(0, 128)), "given": (slice(150, 151), slice(20, 21))}
    for made in filter(None, (got, oracle)):
        for x, codes, scale, head, rows in (
            (k, made.k, made.options.k_scale, 1, reach[scales][0]),
            (v, made.v, made.options.v_scale, 0, reach[scales][1]),
        ):
            values = codes.cpu().float() * attention_scale(scale.cpu(), x.shape)
            lost = torch.zeros(x.shape, dtype=torch.bool)
            lost[0, head, rows] = True
            if scales == "given":
                one = torch.zeros_like(lost)
                one[(0, 1, 150, slice(None) if hadamard else 3) if x is k else (0, 0, 20, 5)] = True
                lost = one
            assert torch.equal(values.isnan(), lost)
        assert bool(made.q.cpu().float().isfinite().all())


def attention_scale(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    from quant.kernels.attention.attention_operands import scale_of_rows

    return scale_of_rows(scale, shape, None)


@GPU
@pytest.mark.parametrize("tokens", [1, 64, 600])
@pytest.mark.parametrize("activation", [None, *portable_casts.FORMATS_OUT])
@pytest.mark.parametrize("weight", ["nvfp4", "mxfp8", "fp8", "fp8_block", "int8"])
def test_linear_on_a_gpu(weight: str, activation: str | None, tokens: int) -> None:
    """A row of inputs that holds NaN gives a row of NaN, and the others are what they were."""
    held = quantize(torch.randn(512, 512, device="cuda").bfloat16(), FORMATS[weight])
    given = None if activation is None else INPUT_FORMATS[activation]
    static = given is not None and given.is_static
    scale = torch.tensor(0.02 if given is FORMATS["fp8"] else 0.003, device="cuda") if static else None
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    before = quantized_linear(x, held, None, scale, given)
    row = tokens // 2
    for bad in (torch.nan, torch.inf):
        x[row, 300] = bad
        after = quantized_linear(x, held, None, scale, given)
        if bad is torch.nan or given is not None:
            assert bool(after[row].isnan().all())
        else:
            assert not bool(after[row].isfinite().any())
        others = torch.arange(tokens, device="cuda") != row
        assert torch.equal(after[others], before[others])


@GPU
@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_on_a_gpu(dim: int, laid_out: bool) -> None:
    """A key that is NaN reaches every query that sees its block, and no other head."""
    for name in ("k", "v"):
        q, k, v = torch.randn(3, 1, 2, 600, dim, device="cuda").bfloat16()
        {"k": k, "v": v}[name][0, 1, 300, 5] = torch.nan
        for causal in (False, True):
            out = attention.quantize_attention(q, k, v, laid_out=laid_out).attend(causal=causal)
            assert bool(out[0, 0].isfinite().all())
            seen = out[0, 1, 301:] if causal else out[0, 1]
            assert bool((seen.isnan().all(-1) if name == "k" else seen.isnan().any(-1)).all())


@GPU
@pytest.mark.parametrize("name", [None, "fp8", "fp8_token", "nvfp4"])
def test_decode_attention_on_a_gpu(name: str | None) -> None:
    from quant.kernels.attention.paged_attention import paged_attention

    given = torch.full((1, 2), 0.01) if name in ("fp8", "nvfp4") else None
    cache = PagedKVCache(1, 2, 64, format=kv_format(name), k_scale=given, v_scale=given, device="cuda")
    sequence = cache.add()
    k, v = torch.randn(2, 1, 2, 300, 64, device="cuda").bfloat16()
    k[0, 1, 100, 9] = torch.nan
    cache.append(0, [sequence], k, v)
    q = torch.randn(1, 8, 1, 64, device="cuda").bfloat16()
    lengths = torch.tensor([300], dtype=torch.int32, device="cuda")
    out = paged_attention(q, cache.layer(0), cache.block_table([sequence]), lengths)
    assert bool(out[0, :4].isfinite().all())
    assert bool(out[0, 4:].isnan().all())


@GPU
def test_activations_of_calibration_on_a_gpu() -> None:
    from quant.kernels.rounding.portable_solvers import fake_quantize_nvfp4

    x, second = torch.randn(3, 256), torch.tensor(0.02)
    x[1, 40] = torch.nan
    got = fake_quantize_nvfp4(x.cuda(), second.cuda()).cpu()
    assert torch.equal(got.isnan(), fake_quantize(x, FORMATS["nvfp4"], global_scale=second).isnan())


def test_pages_decode_a_scale_that_is_nan() -> None:
    codes, blocks = torch.zeros(1, 2, 8, dtype=torch.uint8), torch.ones(1, 2, 1).to(torch.float8_e4m3fn)
    blocks[0, 1] = torch.nan
    values = decode_kv(codes, FORMATS["nvfp4"], torch.ones(1), blocks)
    assert torch.equal(values.isnan().any(-1), torch.tensor([[False, True]]))
