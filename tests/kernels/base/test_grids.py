"""A GPU takes at most 65,535 programs along the second and third axis of a grid; tokens may be more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from triton.runtime.jit import JITFunction

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.attention import portable_decoder_step, portable_paged_attention
from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles
from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.linear import dispatch, portable_codes_gemm, portable_grouped_gemm
from quant.kernels.linear import portable_grouped_gemm as expert_rows
from quant.kernels.linear.tiles import guess
from quant.kernels.rounding import portable_casts
from quant.recipes.gpus import GPUS

TOKENS, LIMIT = 140_000, 65_535


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def look_up() -> None:
    portable_codes_gemm.look_up(
        torch.zeros(TOKENS, dtype=torch.int64), quantize(torch.ones(4, 32), FORMATS["fp8_channel"]), torch.bfloat16
    )


def weigh() -> None:
    places = torch.zeros(TOKENS, 2, dtype=torch.int32)
    expert_rows.weigh(half(2 * TOKENS, 32), places, None, half(TOKENS, 32))


def route() -> None:
    expert_rows.route(half(TOKENS, 32), torch.zeros(TOKENS, 2, dtype=torch.int64), 4)


def grouped() -> None:
    weight = quantize(torch.ones(4, 64, 32), FORMATS["mxfp4"])
    portable_grouped_gemm.grouped_codes_gemm(half(TOKENS, 32), weight, torch.zeros(5, dtype=torch.int32))


def linear() -> None:
    weight, x = quantize(torch.ones(64, 32), FORMATS["fp8_channel"]), half(TOKENS, 32)
    tiles = guess(weight.format, TOKENS, (64, 32), GPUS["l40s"], False)
    dispatch.multiply_with(x, weight, None, tiles)


def dequantize() -> None:
    rows = 16 * LIMIT + 17  # sixteen to a program
    codes = torch.zeros(rows, 16, dtype=torch.float8_e4m3fn)
    weight = BlockScaledTensor(codes, torch.ones(rows, 1), FORMATS["fp8_token"], (rows, 16))
    portable_codes_gemm.dequantize_codes(weight, torch.bfloat16)


def attend() -> None:
    pages = KVPages(half(1, 2, 16, 16), half(1, 2, 16, 16), None, 16)
    q, tiles = (
        half(1, 2, 8 * LIMIT + 8, 16),
        DecodeTiles(block_m=16, block_n=16, warps=1, stages=1, splits=1, overlap=False),
    )
    one = torch.zeros(1, dtype=torch.int32)
    portable_paged_attention.attend_pages(q, pages, one[None], one, AttentionOptions(), tiles)


CASES: dict[str, Callable[[], Any]] = {
    "look_up": look_up,
    "dequantize": dequantize,
    "swiglu": lambda: portable_decoder_step.swiglu(half(TOKENS, 64)),
    "add_rmsnorm": lambda: portable_decoder_step.add_rmsnorm(half(TOKENS, 32), None, half(32), 1e-5),
    "quantize": lambda: portable_casts.quantize(half(TOKENS, 32), FORMATS["fp8_token"]),
    "weigh": weigh,
    "attend": attend,
    "route": route,
    "grouped": grouped,
    "linear": linear,
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_tokens_are_along_the_first_axis(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []
    monkeypatch.setattr(JITFunction, "run", lambda *args, grid, **rest: grids.append((*grid, 1, 1)[:3]))
    call()
    assert grids and all(max(grid[1:]) <= LIMIT and grid[0] < 2**31 for grid in grids)
