"""A kernel that is launched again goes past Triton only where Triton would find the same compiled kernel."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from quant.kernels.base.launch import BoundedTable, CachedLaunch


class Compiled(CompiledKernel):
    """A compiled kernel that notes how it is launched, without Triton."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.calls.append(("past Triton", grid, arguments))


class Kernel:
    """A kernel `(x, count, even, block)` whose last two parameters are constants."""

    arg_names = ("x", "count", "even", "block")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            self.calls.append(("by Triton", grid, arguments, constants))
            return Compiled(self.calls)

        return run

    def ways(self) -> list[str]:
        return [call[0] for call in self.calls]


def test_like_arguments_go_past_triton_with_the_constants_in_their_order() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = CachedLaunch(kernel, (5,), {"block": 16, "even": True, "num_warps": 4})
    for other in (x, torch.ones(64), x[32:]):
        launch(other, 3)
    options = {"block": 16, "even": True, "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.calls[0] == ("by Triton", (5,), (x, 3), options)
    assert kernel.ways() == ["by Triton", "past Triton", "past Triton"]
    _, grid, arguments = kernel.calls[2]
    assert grid == (5, 1, 1) and arguments[1:] == (3, True, 16) and arguments[0].data_ptr() == x[32:].data_ptr()


def test_other_integers_dtypes_and_missing_tensors_are_other_kernels() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = CachedLaunch(kernel, (1, 2), {"even": False, "block": 16})
    for arguments in ((x, 3), (x, 1), (None, 1), (x.half(), 1), (x, 3), (None, 1), (x.half(), 1)):
        launch(*arguments)
    assert kernel.ways() == ["by Triton"] * 4 + ["past Triton"] * 3


def test_unaligned_pointers_are_always_left_to_triton() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = CachedLaunch(kernel, (1,), {"even": False, "block": 16})
    for tensor in (x, x[1:], x, x[1:], x[2:]):
        launch(tensor, 3)
    assert kernel.ways() == ["by Triton", "by Triton", "past Triton", "by Triton", "by Triton"]


def test_one_thread_compiles_and_others_wait() -> None:
    compiling, seen = [0], []

    class Slow(Kernel):
        def __getitem__(self, grid: Any) -> Any:
            run = super().__getitem__(grid)

            def slow(*arguments: Any, **constants: Any) -> Compiled:
                compiling[0] += 1
                seen.append(compiling[0])
                time.sleep(0.02)
                compiling[0] -= 1
                return run(*arguments, **constants)

            return slow

    kernel, x = Slow(), torch.zeros(64)
    threads = [Thread(target=CachedLaunch(kernel, (n,), {"even": True, "block": 16}), args=(x, 3)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


@triton.jit
def double_kernel(x, y, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(y + at, value * 2, mask=at < count)


@pytest.mark.gpu
def test_values_on_a_gpu() -> None:
    launch = CachedLaunch(double_kernel, (4,), {"block": 256, "num_warps": 4})
    x = torch.randn(2048, device="cuda")
    for start, count in ((0, 1000), (0, 1000), (1, 1000), (3, 1), (4, 1024), (0, 1000), (1, 999), (4, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            y = torch.zeros(1024, device="cuda", dtype=dtype)
            launch(x[start:], y, count)
            assert torch.equal(y[:count], (2 * x[start : start + count]).to(dtype)) and not y[count:].any()


def test_a_full_table_starts_again() -> None:
    table = BoundedTable[str](2)
    for key in (1, 2, 3):
        table[key] = str(key)
    assert table == {3: "3"}
