"""The kernels that make FP8 operands compile to wide loads and stores; `test_fp8_block.py` has their values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from compiler import compiled_for

from quant.kernels.training.fp8_block_layout import RULES
from quant.kernels.training.sm90_fp8_block import RMSNorm, sm90_fp8_block_operands, sm90_fp8_block_swiglu_gradients

X = torch.zeros(256, 512, dtype=torch.bfloat16)


def ptx_of(kernels: list[object], tiles: int = 0) -> str:
    kernel = kernels[0]
    # Only input tiles and the largest magnitudes of blocks go through shared memory, and no codes.
    assert kernel.metadata.shared <= 4096 + 2 * 128 * 128 * tiles  # type: ignore[attr-defined]
    return kernel.asm["ptx"]  # type: ignore[attr-defined, no-any-return]


NORM = RMSNorm(torch.zeros(256), X[0], torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{}, {"square": True}, {"up": X}, {"norm": NORM}], ids=["plain", "square", "swiglu", "norm"]
)
def test_operands_are_read_by_sixteen_bytes_and_written_by_eight(options: dict[str, object]) -> None:
    with compiled_for(90) as kernels:
        sm90_fp8_block_operands(X, "power_of_two", **options)
    ptx = ptx_of(kernels)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v2.b32" in ptx
    assert "st.global.b8" not in ptx and "st.global.b16" not in ptx


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_swiglu_compile_under_every_rule(rule: str) -> None:
    with compiled_for(90) as kernels:
        sm90_fp8_block_swiglu_gradients(X, X, X, rule, product=True)
    assert ptx_of(kernels, tiles=6).count("cvt.rn.satfinite.e4m3x2.f32") >= 5
