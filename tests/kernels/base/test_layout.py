"""Prepacked weights are undone bit for bit, and laid out as the Hopper kernel reads them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from quant.formats.format import E2M1, E4M3, FORMATS
from quant.formats.rounding import pack, unpack
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.weight_layout import as_computed, is_prepacked, prepack, prepack_refusal, restore
from quant.kernels.linear.quant_linear import quantized_linear


def all_pairs(rows: int = 128, columns: int = 2048) -> BlockScaledTensor:
    """Every element code at every usable scale, at every place of a tile."""
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = (torch.arange(rows * columns // 16).view(rows, -1) % E4M3.max_code + 1).to(torch.uint8)
    scale = scale[:, torch.randperm(columns // 16)].contiguous().view(torch.float8_e4m3fn)
    return BlockScaledTensor(pack(codes, 4), scale, FORMATS["nvfp4"], (rows, columns), torch.tensor(0.37))


def decode_as_the_kernel(weight: BlockScaledTensor) -> torch.Tensor:
    """`sm90_decode_nvfp4.decode` in PyTorch: masks, shifts and one BF16 product, each value put in its place."""
    rows, columns = weight.shape
    tiles = (rows // 64, columns // 64)
    words = (weight.codes.long() & 0xFFFFFFFF).view(*tiles, 128, 4)
    mask = 0x81C081C0
    shifted = [words & mask, words << 3 & mask, words << 6 & mask]
    shifted.append((words << 1 & 0x80008000) | (words >> 3 & 0x01800180) | (words >> 7 & 0x00400040))

    def bf16(bits: torch.Tensor) -> torch.Tensor:
        return bits.to(torch.int16).view(torch.bfloat16)  # the low 16 bits

    value = torch.stack([torch.stack([bf16(w & 0xFFFF), bf16(w >> 16 & 0xFFFF)], -1) for w in shifted], -1)
    packed = (weight.scale.long() & 0xFFFFFFFF).view(*tiles, 32, 2)
    even, odd = (packed << 4 & 0x0FF00FF0) | 0x70007000, (packed >> 4 & 0x0FF00FF0) | 0x70007000
    scale = torch.stack([bf16(even & 0xFFFF), bf16(even >> 16), bf16(odd & 0xFFFF), bf16(odd >> 16)], -1)
    scale = scale.repeat_interleave(4, dim=2)  # thread of a tile, b, s
    dense = torch.empty(rows, columns, dtype=torch.bfloat16)
    view = dense.view(tiles[0], 64, tiles[1], 64)
    thread = torch.arange(128)
    warp, g, q = thread // 32, thread // 4 % 8, thread % 4
    for s in range(4):
        for half in range(2):
            for code in range(4):
                a, b = code % 2, code // 2
                product = value[:, :, thread, s, half, code] * scale[:, :, thread, b, s]
                view[:, 16 * warp + 2 * g + b, :, 16 * s + 8 * a + 2 * q + half] = product.permute(2, 0, 1)
    return dense.double() * 2.0**7


def test_the_kernels_arithmetic_gives_every_code_at_every_scale_exactly() -> None:
    weight = all_pairs()
    exact = weight.element_values().double() * weight.scale.double().repeat_interleave(16, dim=1)
    assert torch.equal(decode_as_the_kernel(prepack(weight)), exact)
    used = set(
        zip(
            weight.element_values().flatten().tolist(),
            weight.scale.float().repeat_interleave(16, 1).flatten().tolist(),
            strict=True,
        )
    )
    assert len(used) >= 15 * E4M3.max_code  # ±0 count once
    assert len(E2M1.values()) == 16


@pytest.mark.parametrize("shape", [(64, 128), (128, 384), (1088, 256)])
def test_restored_bit_for_bit(shape: tuple[int, int]) -> None:
    weight = quantize(torch.randn(shape), FORMATS["nvfp4"])
    packed = prepack(weight)
    assert is_prepacked(packed) and not is_prepacked(weight)
    assert packed.codes.nbytes == weight.codes.nbytes and packed.scale.nbytes == weight.scale.nbytes
    back = restore(packed)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert back.scale.dtype is weight.scale.dtype and back.shape == weight.shape


def test_mxfp4_takes_the_form_of_nvfp4() -> None:
    """Every element at every one of the 30 exponents that fit, decoded exactly, and put back bit for bit."""
    codes = torch.randint(0, 16, (128, 1920), dtype=torch.uint8)
    scale = (torch.arange(128 * 60).view(128, 60) % 30 + 101).to(torch.uint8)[:, torch.randperm(60)].contiguous()
    weight = BlockScaledTensor(pack(codes, 4), scale, FORMATS["mxfp4"], (128, 1920))
    packed = prepack(weight)
    assert packed.global_scale is not None
    assert torch.equal(decode_as_the_kernel(packed) * packed.global_scale.double(), weight.dequantize(torch.float64))
    back = restore(packed)
    assert torch.equal(back.codes, weight.codes) and torch.equal(back.scale, scale) and back.global_scale is None


@pytest.mark.parametrize("name", ["mxfp6", "mxfp6_e3m2"])
def test_mxfp6_is_mxfp8_with_few_values(name: str) -> None:
    weight = quantize(torch.randn(37, 96) * torch.logspace(-4, 4, 37)[:, None], FORMATS[name])
    weight = replace(weight, codes=pack(torch.randint(0, 64, (37, 96), dtype=torch.uint8), 6))
    wide = prepack(weight)
    assert is_prepacked(wide) and not is_prepacked(as_computed(wide))
    as_ocp = wide.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    kind = ml_dtypes.float6_e2m3fn if name == "mxfp6" else ml_dtypes.float6_e3m2fn
    assert np.array_equal(as_ocp, unpack(weight.codes, 6, 96).numpy().view(kind).astype(np.float64))
    assert torch.equal(as_computed(wide).dequantize(torch.float64), weight.dequantize(torch.float64))
    back = restore(wide)
    assert torch.equal(back.codes, weight.codes) and back.format == weight.format
    x = torch.randn(3, 96)
    assert torch.equal(quantized_linear(x, wide), quantized_linear(x, weight))


def test_a_zero_scale_keeps_its_zero_codes() -> None:
    weight = all_pairs()
    weight.scale.view(torch.uint8)[5, 3] = 0
    weight.codes[5, 24:32] = 0
    back = restore(prepack(weight))
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert not decode_as_the_kernel(prepack(weight))[5, 48:64].any()


def test_what_has_no_layout_says_why() -> None:
    weight = all_pairs()
    weight.scale.view(torch.uint8)[5, 3] = 0
    with pytest.raises(ValueError, match=r"\[128, 2048\] cannot be prepacked: a block whose scale is zero has codes"):
        prepack(weight)
    weight.scale.view(torch.uint8)[5, 3] = 0x80 | 3
    assert prepack_refusal(weight) == "a block scale is negative or NaN"
    assert "not a multiple of [64, 64]" in prepack_refusal(quantize(torch.randn(64, 160), FORMATS["nvfp4"]))
    assert prepack_refusal(quantize(torch.randn(64, 128), FORMATS["mxfp8"])) == "mxfp8 has no kernel layout"
    far = quantize(torch.randn(64, 128) * 2.0 ** torch.arange(64)[:, None], FORMATS["mxfp4"])
    assert "are more than 2^29 apart" in prepack_refusal(far)
    stack = quantize(torch.stack([torch.randn(64, 128), far.dequantize()]), FORMATS["mxfp4"])
    assert "block scales of expert 1 from 2^" in prepack_refusal(stack)
    assert (
        prepack_refusal(quantize(torch.randn(2, 64, 64), FORMATS["mxfp6"])) == "experts in mxfp6 have no kernel layout"
    )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_experts_are_laid_out_one_by_one(name: str) -> None:
    """Each as it would be by itself, with a global scale of its own."""
    # Experts further apart than the scales of one matrix may be.
    weight = quantize(torch.randn(3, 128, 192) * torch.tensor([1.0, 2.0**30, 0.2])[:, None, None], FORMATS[name])
    packed, back = prepack(weight), restore(prepack(weight))
    assert packed.global_scale is not None and packed.global_scale.shape == (3,)
    for expert in range(3):
        alone = prepack(weight.matrix(expert))
        assert torch.equal(packed.matrix(expert).codes, alone.codes)
        assert torch.equal(packed.matrix(expert).scale, alone.scale)
        assert torch.equal(packed.global_scale[expert], alone.global_scale)
    assert torch.equal(back.codes, weight.codes) and back.shape == weight.shape
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))


def test_row_scales_hold_the_largest_value_of_a_row() -> None:
    """The E4M3 scale of a row: 6 times its largest block scale becomes 448, whatever the codes are."""
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    from quant.kernels.linear.sm90_decode import row_scales

    weight = all_pairs(128, 4160)
    stored = weight.scale.view(torch.uint8)
    stored[5], weight.codes[5] = 0, 0
    stored[6], stored[6, 100] = 1, 2  # a subnormal scale is the largest
    with interpreted():
        unit, scale = row_scales(prepack(weight))
    largest = weight.scale.float().amax(1)
    expected = torch.where(largest > 0, largest * 6 / 448, torch.ones_like(largest))
    torch.testing.assert_close(unit, expected, rtol=2**-22, atol=0)
    torch.testing.assert_close(scale, unit * 0.37, rtol=2**-22, atol=0)
    assert bool((weight.dequantize(torch.float32).abs().amax(1) <= 448.001 * scale).all())
