"""TensorRT's operators in numpy equal the formats' oracle, which rounds by bit patterns and not by `ml_dtypes`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx_samples import plugin_attention, quantized_attention

from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.attention.reference import fp8_attention_reference

pytest.importorskip("onnx", reason="needs the extra onnx")

from quant.export.onnx.compare_with_torch import dequantize_blocks, quantize_mxfp8, quantize_nvfp4

VALUES = arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32))


@given(VALUES, st.floats(2.0**-20, 4.0, width=32))
def test_nvfp4_is_the_oracle_to_the_bit(x: np.ndarray, second: float) -> None:
    codes, scale = quantize_nvfp4(x, np.float32(second))
    step = scale.astype(np.float32) * np.float32(second)
    values = codes.astype(np.float32) * np.repeat(step, 16, -1)
    expected = fake_quantize(torch.from_numpy(x), FORMATS["nvfp4"], global_scale=torch.tensor(second))
    np.testing.assert_array_equal(values, expected.numpy())


@given(VALUES)
def test_mxfp8_is_the_oracle_to_the_bit(x: np.ndarray) -> None:
    codes, scale = quantize_mxfp8(x)
    expected = fake_quantize(torch.from_numpy(x), FORMATS["mxfp8"])
    values = dequantize_blocks(codes, np.ldexp(np.float32(1), scale.astype(np.int32) - 127), (1, 32))
    np.testing.assert_array_equal(values, expected.numpy())


def test_mxfp8_exponents_are_rounded_up() -> None:
    x = np.zeros((4, 32), dtype=np.float32)
    x[0, 0], x[1, 0], x[2, 0] = 448.0, 449.0, 2.0**-140
    assert quantize_mxfp8(x)[1][:, 0].tolist() == [127, 128, 0, 0]


def test_blocks_of_two_axes_with_short_ends() -> None:
    weight = quantize(torch.randn(200, 300), FORMATS["fp8_block"])
    codes = weight.codes.view(torch.uint8).numpy().view(_e4m3())
    values = dequantize_blocks(codes, weight.scale.numpy(), (128, 128))
    np.testing.assert_array_equal(values, weight.dequantize().numpy())


def _e4m3() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_rounding_is_softmax_attention(causal: bool) -> None:
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
    )
    # A scale of 2^-20 leaves of the probabilities what E4M3 has room for; here they are multiples of it already.
    found = quantized_attention(q.numpy(), k.numpy(), v.numpy(), None, np.float32(1 / 448), 0.25, causal)
    # E4M3 has three bits of mantissa: half a unit in the last place is 2^-4, and the errors of a row average out.
    assert np.linalg.norm(found - expected.numpy()) / np.linalg.norm(expected.numpy()) < 2.0**-4


def test_attention_with_one_key_is_its_value() -> None:
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    found = quantized_attention(q.numpy(), k.numpy(), v.numpy(), None, np.float32(1 / 448), 0.25, True)
    np.testing.assert_allclose(found, v.numpy(), rtol=1e-6)


def test_a_mask_hides_keys() -> None:
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    mask = np.ones((1, 1, 5, 5), dtype=bool)
    mask[..., 3:] = False
    found = quantized_attention(q.numpy(), k.numpy(), v.numpy(), mask, np.float32(1 / 448), 0.25, False)
    short = quantized_attention(
        q.numpy(), k[:, :, :3].numpy(), v[:, :, :3].numpy(), None, np.float32(1 / 448), 0.25, False
    )
    np.testing.assert_array_equal(found, short)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plugin_is_its_kernel_s_oracle(causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 40, 64).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    scales = torch.tensor([0.5, 0.25, 2.0])
    expected = fp8_attention_reference(q, k, v, scales, causal=causal, dtype=torch.float16)
    codes = [x.view(torch.uint8).numpy().view(_e4m3()) for x in (q, k, v)]
    (found,) = plugin_attention(*codes, scales.numpy(), causal=int(causal), softmax_scale=0.0, output_type=10)
    # Sums in another order: one unit of FP16, and here and there a probability rounds the other way.
    difference = np.linalg.norm(found.astype(np.float64) - expected.double().numpy())
    assert difference / np.linalg.norm(expected.double().numpy()) < 2e-3
