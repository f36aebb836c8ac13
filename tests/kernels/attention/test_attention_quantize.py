"""The quantize-and-lay-out pass agrees with float64 as oracle, and with the oracle as interpreted kernel."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch
from interpreter import interpreted

from quant.kernels.attention import forward as module
from quant.kernels.attention.attention_operands import DIMS, restore_v, scale_of_rows
from quant.kernels.attention.forward import AttentionOperands, quantize_attention
from quant.kernels.rounding.hadamard import random_sign_rotation

pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")


def operands(dim: int, batch: int = 2, tokens: int = 200, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """Q of 4 heads, K and V of 2; heads lie between tokens, as models leave them."""
    return tuple(torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2) for heads in (4, 2, 2))


def values(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    return codes.double() * scale_of_rows(scale.double(), codes.shape, None)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def test_codes_and_scales_of_blocks() -> None:
    """Against ml_dtypes, block by block."""
    q, k, v = operands(64, tokens=150)
    made = quantize_attention(q, k, v, laid_out=False)
    for x, codes, scale in (
        (q, made.q, made.options.q_scale),
        (k, made.k, made.options.k_scale),
        (v, made.v, made.options.v_scale),
    ):
        assert scale.shape == (*x.shape[:2], 2)
        for block, rows in enumerate((slice(0, 128), slice(128, 150))):
            part = x[1, 1, rows].float().numpy()
            step = np.float32(np.abs(part).max()) / np.float32(448)
            assert float(scale[1, 1, block]) == step
            expected = (part * (np.float32(1) / step)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert np.array_equal(codes[1, 1, rows].view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthonormal_and_spreads(dim: int) -> None:
    eye = random_sign_rotation(torch.eye(dim)).double()
    torch.testing.assert_close(eye @ eye.mT, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-6)
    mixed = 2 * (dim // 2 & -(dim // 2))  # a pair of halves, and a power of two in each
    assert torch.equal((eye.abs() > 1e-6).sum(0), torch.full((dim,), mixed))
    torch.testing.assert_close(eye[eye.abs() > 1e-6].abs(), torch.full((dim * mixed,), mixed**-0.5).double())


def test_rotation_leaves_the_softmax() -> None:
    q, k, v = operands(128)
    made = quantize_attention(q, k, v, hadamard=True, laid_out=False)
    got = scores(values(made.q, made.options.q_scale), values(made.k, made.options.k_scale))
    off = (got - scores(q, k)).norm() / scores(q, k).norm()
    assert float(off) < 0.04  # 2.6e-2 for each of two operands


def test_blocks_and_rotation_help_where_values_lie_out() -> None:
    """The FlashAttention-3 paper's outliers; it reports 2.4e-2 and 9.1e-3."""
    torch.manual_seed(0)
    shape = (1, 2, 2048, 128)
    q, k, v = ((torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 1e-3)).bfloat16() for _ in range(3))
    last = slice(-256, None)
    exact = (scores(q[:, :, last], k) / math.sqrt(128)).softmax(-1) @ v.double()

    def error(**options: Any) -> float:
        out = quantize_attention(q, k, v, **options).attend()[:, :, last].double()
        return float((out - exact).norm() / exact.norm())

    whole = tuple(x.float().abs().amax() / 448 for x in (q, k, v))
    assert error(hadamard=True) < 0.5 * error(scales=whole)


CASES: dict[str, dict[str, Any]] = {
    "block, laid out": {"dim": 64, "laid_out": True},
    "rotated, 96": {"dim": 96, "hadamard": True},
    "rotated, 192": {"dim": 192, "hadamard": True, "laid_out": True},
    "rotated, 128": {"dim": 128, "hadamard": True, "laid_out": True},
    "given scales": {"dim": 64, "scales": tuple(torch.tensor(x) for x in (0.01, 0.012, 0.003)), "laid_out": True},
    "scales of heads": {"dim": 64, "scales": tuple(torch.rand(2, heads) / 50 + 0.01 for heads in (4, 2, 2))},
    "fp16": {"dim": 64, "dtype": torch.float16, "hadamard": True},
}


def made_both_ways(name: str, device: str) -> tuple[AttentionOperands, AttentionOperands]:
    """By the oracle, and by the kernel: on a GPU, or interpreted."""
    options = {"laid_out": False, **CASES[name]}
    q, k, v = operands(options.pop("dim"), 2, 300, options.pop("dtype", torch.bfloat16))
    expected = quantize_attention(q, k, v, **options)
    if device == "cuda":
        if "scales" in options:
            options["scales"] = tuple(x.cuda() for x in options["scales"])
        return expected, quantize_attention(*(x.cuda() for x in (q, k, v)), **options)
    from quant.kernels.attention import portable_fp8_operands as kernels

    with interpreted(), patch.object(module, "_quantize", kernels.quantize_qkv):
        return expected, quantize_attention(q, k, v, **options)


def check(expected: AttentionOperands, got: AttentionOperands, differing: float) -> None:
    """Sums are taken in another order by the rotation: a few codes may be the next ones."""
    for name in "qkv":
        codes = [getattr(made, name).view(torch.uint8).cpu() for made in (expected, got)]
        if name == "v" and expected.options.v_laid_out:
            codes = [restore_v(x, expected.k.shape[2]) for x in codes]
        assert float((codes[0] != codes[1]).float().mean()) <= differing
        scale, other = (getattr(made.options, f"{name}_scale").cpu() for made in (expected, got))
        used = scale_of_rows(scale, codes[0].shape, None), scale_of_rows(other, codes[0].shape, None)
        torch.testing.assert_close(used[1], used[0], rtol=1e-5, atol=0)
        # A step of E4M3 is at most an eighth of the value, or 2^-9.
        near, far = (x.view(torch.float8_e4m3fn).float() for x in codes)
        torch.testing.assert_close(far, near, rtol=0.13, atol=2.0**-9)


@pytest.mark.parametrize("name", CASES)
def test_kernel_against_the_oracle(name: str) -> None:
    expected, got = made_both_ways(name, "cpu")
    check(expected, got, 1e-3 if CASES[name].get("hadamard") else 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_kernel_against_the_oracle(name: str) -> None:
    expected, got = made_both_ways(name, "cuda")
    check(expected, got, 5e-3)
    causal = got.attend(causal=True).double().cpu()
    reference = expected.attend(causal=True).double()
    assert float((causal - reference).norm() / reference.norm()) < 0.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [64, 128])
def test_values_of_zero_leave_the_others_their_precision(dim: int, device: str) -> None:
    """Hopper's kernel puts V's scale into P's exponent: a scale of 1 for zeros would push the others down."""
    q, k, v = (x.to(device) for x in operands(dim, tokens=400))
    v[:, :, :128] = 0
    quantized = quantize_attention(q, k, v)
    assert bool((quantized.options.v_scale[..., 0] < 1e-20).all())
    weight = (scores(q, k) / math.sqrt(dim)).softmax(-1)
    expected = weight @ v.double().repeat_interleave(2, 1)
    assert float((quantized.attend().double() - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 3, 4, 64).bfloat16(), "v": torch.zeros(1, 3, 4, 64).bfloat16()}, "3 KV heads do not"),
        ({"q": torch.zeros(1, 4, 4, 64)}, "expected all bfloat16 or all float16"),
        ({"v": torch.zeros(1, 2, 5, 64).bfloat16()}, "expected q .batch, heads, seq_q, dim"),
        ({"k": torch.zeros(1, 2, 0, 64).bfloat16(), "v": torch.zeros(1, 2, 0, 64).bfloat16()}, "no keys"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"q": torch.zeros(1, 4, 4, 64).bfloat16()}
    given |= {name: torch.zeros(1, 2, 4, 64).bfloat16() for name in "kv"} | change
    with pytest.raises(ValueError, match=message):
        quantize_attention(**given)
