"""The kernels that a server compiles at its start are those that Triton compiles for all numbers of tokens together."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from slow_cases import quick_cases
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, moved, quantize
from quant.kernels.base import hardware
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear import dispatch
from quant.kernels.linear.sm90_codes_gemm_many import grouped_gemm_many
from quant.kernels.linear.tiles import DENSE
from quant.recipes.gpus import GPUS
from quant.vllm_plugin.warm_up import compile_variants, distinct_lengths, experts_variants, linear_variants

MOST = 8192


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """This CPU is taken for an H100. The list gets the keys under which Triton would keep what it compiled."""
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    monkeypatch.setattr("quant.kernels.linear.sm90_codes_gemm_many.current", lambda index=0: GPUS["h100"])
    active = SimpleNamespace(
        get_current_device=lambda: -1,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", active)
    keys: list[Any] = []

    def note(self: Any, key: Any, *rest: Any) -> None:
        keys.append((self.fn.__name__, key))

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    return keys


def stored(format: str, *shape: int) -> BlockScaledTensor:
    """A weight of this shape, whose values are nowhere: in the layout of Hopper's kernels where there is one."""
    small = quantize(torch.ones(*shape[:-2], 64, 128), FORMATS[format])
    small = prepack(small) if format == "nvfp4" else small
    like = moved(small, "meta")
    last = small.codes.shape[-1] * shape[-1] // 128, small.scale.shape[-1] * shape[-1] // 128
    scale_rows = shape[-2] * small.scale.shape[-2] // 64
    codes = like.codes.new_empty(*shape[:-2], shape[-2], last[0])
    scale = like.scale.new_empty(*shape[:-2], scale_rows, max(last[1], 1))
    return BlockScaledTensor(codes, scale, small.format, shape, like.global_scale)


def rows_of(count: int, columns: int) -> torch.Tensor:
    return torch.empty(count, columns, dtype=torch.bfloat16, device="meta")


def agree(keys: list[Any], launch: Callable[[int], object], variants: dict[Any, Any], most: int) -> set[Any]:
    """Every number of tokens is launched, then every variant compiled: Triton's keys are the same."""
    keys.clear()
    for tokens in range(1, most + 1):
        launch(tokens)
    launched = set(keys)
    keys.clear()
    for variant in variants.values():
        variant()
    assert set(keys) == launched
    # None is compiled twice.
    assert len(keys) == len(launched)
    return launched


@pytest.mark.parametrize(
    ("shape", "count"),
    quick_cases(
        [((28672, 4096), 14), ((4096, 14336), 17), ((6144, 4096), 20), ((1536, 4096), 17), ((2048, 4096), 17)],
        lambda shape, count: shape in ((6144, 4096), (1536, 4096)),
    ),
)
def test_a_matrix_of_words(shape: tuple[int, int], count: int, compiled: list[Any]) -> None:
    """As many kernels as the table of `matmul_tiles.py` and the cuts of `deal` allow for 1 to 8,192 tokens."""
    weight = stored("nvfp4", *shape)
    variants = linear_variants(weight, None, distinct_lengths(MOST))
    found = agree(
        compiled,
        lambda tokens: dispatch.multiply_with(
            x := rows_of(tokens, shape[1]), weight, None, dispatch.choose_launch(weight, x)
        ),
        variants,
        MOST,
    )
    assert {name for name, _ in found} == {"sm90_codes_gemm_many", "sm90_nvfp4_gemm_few"}
    assert len(found) == count


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp8", "int4"])
def test_a_matrix_in_the_order_of_a_checkpoint(format: str, compiled: list[Any]) -> None:
    """The library takes numbers of tokens for which the weight is written in 16 bit."""
    weight, bias = stored(format, 1024, 2048), torch.empty(1024, dtype=torch.bfloat16, device="meta")

    def launch(tokens: int) -> None:
        x = rows_of(tokens, 2048)
        choice = dispatch.choose_launch(weight, x)
        if choice != DENSE:
            dispatch.multiply_with(x, weight, bias, choice)

    found = agree(compiled, launch, linear_variants(weight, bias, distinct_lengths(3000)), 3000)
    assert {name for name, _ in found} == {"sm90_codes_gemm_many", "codes_gemm_kernel"}


@pytest.mark.parametrize(("format", "experts"), [("nvfp4", 128), ("nvfp4", 6), ("fp8_channel", 16)])
def test_experts(format: str, experts: int, compiled: list[Any]) -> None:
    weight = stored(format, experts, 1536, 2048)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device="meta")
    found = agree(
        compiled,
        lambda rows: grouped_gemm_many(rows_of(rows, 2048), weight, offsets),
        experts_variants(weight, None, distinct_lengths(MOST)),
        MOST,
    )
    assert {name for name, _ in found} == {"sm90_codes_gemm_many"}
    assert len(found) > 2


@pytest.mark.parametrize("most", [1, 40, 64, 65, 2560, MOST])
def test_lengths_end_with_the_most(most: int) -> None:
    lengths = distinct_lengths(most)
    assert lengths[-1] == most and lengths == sorted(set(lengths)) and len(lengths) <= 64 + most // 16


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: every number of tokens is multiplied, and Triton compiles nothing more."""
    weight = moved(prepack(moved(quantize(torch.randn(1536, 1024), FORMATS["nvfp4"]), "cuda")), "cuda")
    compile_variants(linear_variants(weight, None, distinct_lengths(4096)), torch.device("cuda", 0), 4)
    late: list[str] = []
    real = JITFunction._do_compile

    def note(self: Any, *arguments: Any) -> Any:
        late.append(self.fn.__name__)
        return real(self, *arguments)

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    dense = weight_in_float64(weight)
    for tokens in (*range(1, 65), *range(65, 4097, 7)):
        y = dispatch.multiply_with(x[:tokens], weight, None, dispatch.choose_launch(weight, x[:tokens]))
        if tokens % 5 == 0:
            exact = x[:tokens].double() @ dense.T
            assert float((y.double() - exact).norm() / exact.norm()) < 2**-7
    assert late == []


def weight_in_float64(weight: BlockScaledTensor) -> torch.Tensor:
    from quant.kernels.base.weight_layout import restore

    return restore(weight).dequantize(torch.float64)
