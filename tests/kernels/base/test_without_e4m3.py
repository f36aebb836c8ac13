"""Kernels of formats with E4M3 run where Triton has no such type: on NVIDIA GPUs before Ada (compute capability 8.9).

They take codes and scales as bytes there. Launches are compiled for A100 (8.0) and RTX 30 (8.6) as the doors make them,
and interpreted they agree with the oracle, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import triton
import triton.language as tl
from compiler import compiled_for
from interpreter import interpreted
from slow_cases import quick_cases

from quant.formats.format import FORMATS, INPUT_FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize, round_activation
from quant.kernels.attention.attention_operands import AttentionOptions, DecodeTiles
from quant.kernels.attention.kv_pages import KVPages, write_reference
from quant.kernels.attention.portable_paged_attention import attend_pages
from quant.kernels.attention.portable_paged_kv_cache import read_nvfp4_kv, write_kv, write_kv_slots
from quant.kernels.base import hardware
from quant.kernels.base.portable_small_floats import decode_e4m3, encode_e4m3
from quant.kernels.linear import dispatch, portable_codes_gemm
from quant.kernels.linear.experts import _on_gpu as experts_on_gpu
from quant.kernels.rounding import portable_casts
from quant.kernels.training import portable_fake_rounding
from quant.recipes.gpus import GPUS

SHARED = {80: 163 << 10, 86: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""
TABLE, FIRST = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([14], dtype=torch.int32)


@contextmanager
def before_ada() -> Iterator[None]:
    """Tensors of the CPU count as tensors of an A100."""
    dispatch._products.clear()
    with (
        patch.object(hardware, "current", lambda index=0: GPUS["a100"]),
        patch("quant.kernels.linear.experts.current", lambda index=0: GPUS["a100"]),
        patch.object(hardware, "lacks_e4m3", lambda x: True),
    ):
        yield
    dispatch._products.clear()


def pages_of(name: str) -> KVPages:
    """Three pages of 16 tokens, two heads of 32."""
    scale = torch.tensor([0.01, 0.02])
    if name == "nvfp4":
        codes = [torch.zeros(3, 2, 16, 16, dtype=torch.uint8) for _ in range(2)]
        blocks = [torch.zeros(3, 2, 16, 2).to(torch.float8_e4m3fn) for _ in range(2)]
        return KVPages(*codes, FORMATS[name], 32, scale, scale, *blocks)
    codes = [torch.zeros(3, 2, 16, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.zeros(3, 2, 16) if name == "fp8_token" else scale for _ in range(2)]
    return KVPages(*codes, FORMATS[name], 32, *scales)


def filled_pages(name: str) -> KVPages:
    pages, generator = pages_of(name), torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 32, 32, generator=generator).bfloat16() for _ in range(2))
    write_reference(pages, TABLE, torch.zeros(1, dtype=torch.int32), k, v)
    return pages


def linear(weight: BlockScaledTensor, activation: str, x: torch.Tensor) -> torch.Tensor:
    static = torch.tensor(0.01) if INPUT_FORMATS.get(activation, FORMATS["nvfp4"]).global_scale and activation else None
    return dispatch.linear_on_gpu(
        x, weight.codes, weight.scale, weight.global_scale, None, static, weight.format.name, activation
    )


def attend(name: str, q: torch.Tensor, *, splits: int = 1, asm: bool = False) -> torch.Tensor:
    tiles = DecodeTiles(block_m=16, block_n=16, warps=4, stages=2, splits=splits)
    lengths = torch.tensor([20], dtype=torch.int32)
    return attend_pages(q, filled_pages(name), TABLE, lengths, AttentionOptions(causal=True), tiles, asm)


def few(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def weight_of(name: str, *shape: int) -> BlockScaledTensor:
    return quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(2)), FORMATS[name])


WEIGHTS = ("nvfp4", "fp8", "fp8_channel", "fp8_block", "mxfp8")
LAUNCHES: dict[str, Callable[[], Any]] = {
    **{f"linear {name} {tokens}": lambda name=name, tokens=tokens:
       linear(weight_of(name, 64, 256), "", few(tokens, 256))
       for name in WEIGHTS for tokens in (1, 64, 300)},
    **{f"linear {name} by {rounding}": lambda name=name, rounding=rounding:
       linear(weight_of(name, 64, 256), rounding, few(3, 256))
       for name, rounding in (("nvfp4", "nvfp4"), ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_group"),
                              ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_four_over_six"))},
    **{f"experts {name}": lambda name=name: experts_on_gpu(
        few(4, 256), weight_of(name, 2, 64, 256), torch.tensor([0, 1, 4], dtype=torch.int32), None, None, None)
       for name in ("nvfp4", "fp8_block")},
    **{f"embedding {name}": lambda name=name: portable_codes_gemm.look_up(
        torch.tensor([3, 1]), weight_of(name, 8, 256), torch.bfloat16) for name in ("nvfp4", "fp8_channel")},
    **{f"write {name}": lambda name=name: write_kv(pages_of(name), TABLE, FIRST, few(1, 2, 3, 32), few(1, 2, 3, 32))
       for name in ("nvfp4", "fp8", "fp8_token")},
    "write slots": lambda: write_kv_slots(pages_of("nvfp4"), torch.tensor([3, -1]), few(2, 2, 32), few(2, 2, 32)),
    "read": lambda: read_nvfp4_kv(
        torch.zeros(1, 2, 16, 16, dtype=torch.uint8), torch.zeros(1, 2, 16, 2).to(torch.float8_e4m3fn),
        torch.ones(1, 2), torch.bfloat16),
    **{f"attend {name} {splits}": lambda name=name, splits=splits: attend(
        name, few(1, 4, 1, 32), splits=splits, asm=True)
       for name in ("nvfp4", "fp8", "fp8_token") for splits in (1, 2)},
    "train": lambda: portable_fake_rounding.round_weight(
        few(32, 256), FORMATS["nvfp4"], torch.bfloat16, None, torch.tensor(0.01)),
}  # fmt: skip
QUICK = {(86, "linear fp8 64"), (86, "attend fp8 1"), *((80, case) for case in (
    "linear nvfp4 1", "linear fp8_block 300", "linear nvfp4 by nvfp4", "linear fp8_channel by fp8_token",
    "experts nvfp4", "embedding fp8_channel", "write nvfp4", "write slots", "read", "attend nvfp4 1", "train",
))}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "case"),
    quick_cases(
        product(SHARED, LAUNCHES),
        lambda arch, case: (arch, case) in QUICK,
    ),
)
def test_doors_launch_kernels_that_compile(arch: int, case: str) -> None:
    with before_ada(), compiled_for(arch) as kernels:
        LAUNCHES[case]()
    assert kernels
    for kernel in kernels:
        assert f".target sm_{arch}" in kernel.asm["ptx"] and kernel.metadata.shared <= SHARED[arch]
        assert kernel.asm["cubin"]


@triton.jit
def _decode(codes, out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), decode_e4m3(tl.load(codes + tl.arange(0, n))))


@triton.jit
def _encode(x, out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), encode_e4m3(tl.load(x + tl.arange(0, n))))


def test_every_code_is_decoded() -> None:
    codes, out = torch.arange(256).to(torch.uint8), torch.empty(256)
    with interpreted():
        _decode[(1,)](codes, out, 256)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal(out.signbit() & out.isfinite(), expected.signbit() & expected.isfinite())


def test_values_on_and_around_every_tie_are_encoded() -> None:
    grid = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    near = [ties.nextafter(torch.tensor(end)) for end in (0.0, 1e9)]
    # PyTorch makes NaN of values far beyond 448; kernels saturate.
    x = torch.cat([grid, ties, *near, torch.tensor([1e-40, 1e-30, 448.1, 470.0, 1e9, torch.inf])])
    x = torch.cat([x, -x])
    wide = torch.cat([x, torch.full((2048 - len(x),), torch.nan)])
    out = torch.empty(2048, dtype=torch.uint8)
    with interpreted():
        _encode[(1,)](wide, out, 2048)
    assert torch.equal(out[: len(x)], x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert bool((out[len(x) :] == 0x7F).all())


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_multiplied_as_with_the_type(name: str) -> None:
    weight, x = weight_of(name, 64, 256), few(3, 256)
    dispatch._products.clear()
    with interpreted(), patch.object(hardware, "current", lambda index=0: GPUS["a100"]):
        expected = linear(weight, "", x)
    with interpreted(), before_ada():
        assert torch.equal(linear(weight, "", x), expected)
        assert torch.equal(dispatch.dequantize(weight, torch.bfloat16), weight.dequantize(torch.bfloat16))
        rows = portable_codes_gemm.look_up(torch.tensor([3, 1]), weight, torch.bfloat16)
        assert torch.equal(rows, weight.dequantize(torch.bfloat16)[[3, 1]])
    torch.testing.assert_close(expected.double(), x.double() @ weight.dequantize(torch.float64).T, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("name", [name for name in portable_casts.FORMATS_OUT if name != "nvfp4_four_over_six"])
def test_inputs_are_rounded_as_by_the_oracle(name: str) -> None:
    x, format = few(3, 256) * 3, INPUT_FORMATS[name]
    x[1, :128], x[2, 0] = 0, 1e-30
    static = torch.tensor(0.02) if format.global_scale or format.per_tensor else None
    keyword = {"global_scale" if format.global_scale else "scale": static} if static is not None else {}
    with interpreted(), before_ada():
        codes = portable_casts.quantize(x, format, **keyword)
    assert torch.equal(codes.dequantize(torch.bfloat16), round_activation(x, format, static))
    with interpreted():
        expected = portable_casts.quantize(x, format, **keyword)
    for ours, theirs in ((codes.codes, expected.codes), (codes.scale, expected.scale)):
        assert ours.dtype is theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "fp8_token"])
def test_caches_are_written_and_read_as_by_the_oracle(name: str) -> None:
    ours, theirs, k, v = pages_of(name), pages_of(name), few(1, 2, 3, 32), few(1, 2, 3, 32) * 2
    with interpreted(), before_ada():
        write_kv(ours, TABLE, FIRST, k, v)
    write_reference(theirs, TABLE, FIRST, k, v)
    for part in ("k", "v", "k_blocks", "v_blocks", "k_scale", "v_scale"):
        mine, other = getattr(ours, part), getattr(theirs, part)
        assert other is None or torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), part
    q = few(1, 4, 1, 32)
    with interpreted():
        expected = attend(name, q)
        with before_ada():
            assert torch.equal(attend(name, q), expected)


def test_weights_in_training_are_rounded_as_with_the_type() -> None:
    weight, second = few(32, 256), torch.tensor(0.01)
    rounded = []
    for context in (interpreted, before_ada):
        with interpreted(), context():
            rounded.append(portable_fake_rounding.round_weight(weight, FORMATS["nvfp4"], torch.bfloat16, None, second))
    assert torch.equal(*rounded)


def test_the_type_came_with_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    for name, lacks in (("a100", True), ("l40s", False), ("h100", False)):
        monkeypatch.setattr(hardware, "current", lambda index, name=name: GPUS[name])
        assert hardware.lacks_e4m3(x) == lacks
    assert not hardware.lacks_e4m3(torch.zeros(1))
