"""Kernels that no other test compiles pass Triton and its assembler as they are launched, for each kind of launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from compiler import compiled_for
from slow_cases import quick_cases

from quant.formats.format import FORMATS, INPUT_FORMATS, WEIGHT_FORMATS
from quant.formats.tensor import quantize
from quant.kernels.attention import portable_fp8_operands, portable_paged_attention, portable_paged_kv_cache
from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles
from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import portable_codes_gemm, portable_grouped_gemm, sm90_decode
from quant.kernels.rounding import portable_solvers
from quant.kernels.rounding import portable_solvers as fixed_scale_solver
from quant.kernels.training import portable_fake_rounding

SHARED_LIMIT = 227 << 10


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def pages_of(name: str | None, dim: int) -> KVPages:
    """Four pages of 64 tokens and two heads."""
    shape, scale = (4, 2, 64), torch.ones(2)
    if name is None:
        return KVPages(half(*shape, dim), half(*shape, dim), None, dim)
    if name == "nvfp4":
        codes = [torch.zeros(*shape, dim // 2, dtype=torch.uint8) for _ in range(2)]
        blocks = [torch.zeros(*shape, dim // 16).to(torch.float8_e4m3fn) for _ in range(2)]
        return KVPages(*codes, FORMATS[name], dim, scale, scale, *blocks)
    codes = [torch.zeros(*shape, dim).to(torch.float8_e4m3fn) for _ in range(2)]
    scale = torch.ones(shape) if name == "fp8_token" else scale
    return KVPages(*codes, FORMATS[name], dim, scale, scale.clone())


def write(name: str | None, new: int) -> None:
    table, first = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    portable_paged_kv_cache.write_kv(pages_of(name, 128), table, first, half(1, 2, new, 128), half(1, 2, new, 128))


def write_slots(name: str | None) -> None:
    slots = torch.zeros(3, dtype=torch.int64)
    portable_paged_kv_cache.write_kv_slots(pages_of(name, 128), slots, half(3, 2, 128), half(3, 2, 128))


def read() -> None:
    codes, blocks = torch.zeros(1, 2, 64, 64, dtype=torch.uint8), torch.zeros(1, 2, 64, 8).to(torch.float8_e4m3fn)
    portable_paged_kv_cache.read_nvfp4_kv(codes, blocks, torch.ones(1, 2), torch.bfloat16)


def decode(name: str | None, splits: int) -> None:
    q, lengths = half(1, 8, 1, 128), torch.ones(1, dtype=torch.int32)
    tiles = DecodeTiles(block_m=16, block_n=64, warps=4, stages=2, splits=splits)
    options = AttentionOptions(causal=True)
    portable_paged_attention.attend_pages(
        q, pages_of(name, 128), torch.zeros(1, 4, dtype=torch.int32), lengths, options, tiles
    )


def solve(improve: bool) -> None:
    wanted, blocks = torch.zeros(32, 8), torch.zeros(2, 16, 16)
    tensors = (wanted, torch.zeros(32, 32), blocks, wanted.clone(), torch.zeros(2, 8))
    portable_solvers.solve_nvfp4_window(torch.tensor(1.0), *tensors, 0, improve)


def solve_fixed(name: str, improve: bool, width: int = fixed_scale_solver.FIXED_WIDTH) -> None:
    """The compiler takes a second for 8 inputs of a block, whose steps it unrolls, and ten for all 32."""
    wanted, blocks = torch.zeros(2 * width, 40), torch.zeros(2, width, width)
    tensors = (wanted, torch.zeros(2 * width, 2 * width), blocks, wanted.clone(), None)
    element, steps = FORMATS[name].element, torch.ones(2 * width, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_scale_solver, "FIXED_WIDTH", width)
        fixed_scale_solver.solve_fixed_window(element, steps, *tensors, 0, improve)


def solve_block(name: str, shifted: bool) -> None:
    block, step, shift = torch.zeros(32, 48), torch.ones(4, 48), torch.ones(4, 48) if shifted else None
    portable_solvers.feed_back_block(block, torch.eye(32), step, WEIGHT_FORMATS[name].element, shift)


def learn() -> None:
    latent, step = torch.zeros(8, 32), torch.ones(8, 2)
    portable_solvers.learned_values(latent, step, step)
    portable_solvers.learned_gradient(latent, step, step, half(8, 32))


def mask(name: str, dtype: torch.dtype) -> None:
    weight, format = torch.zeros(128, 256, dtype=dtype), FORMATS[name]
    second = torch.tensor(1.0) if format.global_scale else None
    portable_fake_rounding.masked_gradient(
        half(128, 256), weight, format, torch.ones(format.scale_shape((128, 256))), second
    )


def experts() -> None:
    rows, _, places = portable_grouped_gemm.route(half(9, 256), torch.zeros(9, 2, dtype=torch.int64), 4)
    portable_grouped_gemm.route(half(2000, 256), torch.zeros(2000, 2, dtype=torch.int64), 4)  # more than FEW_SLOTS
    local = torch.zeros(8, dtype=torch.int32)
    portable_grouped_gemm.route(half(9, 256), torch.zeros(9, 2, dtype=torch.int64), 4, local)
    portable_grouped_gemm.route(half(2000, 256), torch.zeros(2000, 2, dtype=torch.int64), 4, local)
    portable_grouped_gemm.weigh(rows, places, torch.zeros(9, 2), half(9, 256))
    portable_grouped_gemm.weigh(rows, places, None, half(9, 256))


def prepacked() -> None:
    weight = prepack(quantize(torch.randn(64, 256), FORMATS["nvfp4"]))
    sm90_decode.dequantize_prepacked(weight)
    sm90_decode.prepacked_to_e4m3(weight)


FIXED = (("fp8", False), ("int8", True))
CASES: dict[str, Callable[[], Any]] = {
    **{f"write {name} {new}": partial(write, name, new) for name in ("fp8", "nvfp4") for new in (1, 70)},
    **{f"write slots {name}": partial(write_slots, name) for name in ("fp8", "nvfp4")},
    "read": read,
    **{f"decode {name}": partial(decode, name, 1) for name in (None, "fp8", "nvfp4")},
    "decode in parts": partial(decode, None, 4),
    **{f"solve {improve}": partial(solve, improve) for improve in (False, True)},
    **{f"solve {name} {improve}": partial(solve_fixed, name, improve) for name, improve in FIXED},
    **{f"solve {name} {improve} by 8": partial(solve_fixed, name, improve, 8) for name, improve in FIXED},
    **{f"solve block {name}": partial(solve_block, name, name == "q4_k") for name in ("q4_0", "q4_k", "mxfp4")},
    "learn": learn,
    **{f"fake {name} {x.dtype}": partial(
        portable_solvers.fake_quantize_nvfp4, x, torch.tensor(1.0), INPUT_FORMATS[name])
       for name in ("nvfp4", "nvfp4_four_over_six") for x in (torch.zeros(4, 32), half(4, 32))},
    **{f"mask {name}": partial(mask, name, torch.float32) for name in ("nvfp4", "fp8_block", "int8")},
    "experts": experts,
    "lay out v": lambda: portable_fp8_operands.lay_out_v(half(1, 2, 130, 128).to(torch.float8_e4m3fn), None),
    "decode blocks": lambda: portable_fp8_operands.decode_blocks(
        half(1, 2, 130, 96).to(torch.float8_e4m3fn), torch.ones(1, 2, 2), torch.bfloat16
    ),
    "prepacked": prepacked,
    **{f"dequantize {name}": partial(
        portable_codes_gemm.dequantize_codes, quantize(torch.randn(64, 256), FORMATS[name]), torch.bfloat16)
       for name in ("mxfp6", "int4", "fp8_block")},
}  # fmt: skip


@pytest.mark.parametrize("name", quick_cases(CASES, lambda name: name not in {f"solve {f} {i}" for f, i in FIXED}))
def test_a_hopper_gpu_gets_code(name: str) -> None:
    with compiled_for(90) as kernels:
        CASES[name]()
    assert kernels
    for kernel in kernels:
        assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED_LIMIT
        assert ".target sm_90a" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "arch"),
    [("fake nvfp4 torch.float32", 90), ("fake nvfp4 torch.float32", 100), ("decode in parts", 90),
     ("dequantize fp8_block", 100)],
)  # fmt: skip
def test_code_does_not_depend_on_tritons_default_of_fusion(
    name: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    if not hasattr(knobs.language, "default_fp_fusion"):
        pytest.skip("this Triton has no such default")
    texts = []
    for default in (True, False):
        monkeypatch.setattr(knobs.language, "default_fp_fusion", default)
        with compiled_for(arch) as kernels:
            CASES[name]()
        texts.append([kernel.asm["ptx"] for kernel in kernels])
    assert texts[0] == texts[1] and texts[0]
