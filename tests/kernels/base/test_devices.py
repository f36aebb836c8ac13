"""Kernels are launched on the GPU of their tensors, which need not be the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import quant.kernels.attention.forward
import quant.kernels.training.fake_rounding
import quant.kernels.training.fp8_block  # noqa: F401 -- they register their ops
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base.launch import CachedLaunch, on_its_gpu
from quant.kernels.linear.quant_linear import quantized_linear


class Elsewhere(Tensor):
    """A tensor that says it is on GPU 1."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is the current GPU, and the tensors on whose GPU calls were made."""
    state: list[Any] = [0]

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        before, state[0] = state[0], max(x.get_device(), 0)
        state.append(x)
        yield
        state[0] = before

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return state


def test_cached_launches_enter_the_gpu_of_their_first_tensor(entered: list[Any]) -> None:
    launched = []

    class Kernel:
        arg_names = ("x", "n")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: launched.append(entered[0])

    launch = CachedLaunch(Kernel(), (1,), {})
    launch._device = lambda: entered[0]
    launch(torch.zeros(4), 3)
    launch(torch.zeros(4).as_subclass(Elsewhere), 3)
    launch(torch.zeros(4), 3)
    assert launched == [0, 1, 0] and entered[0] == 0


def test_functions_enter_it_too(entered: list[Any]) -> None:
    x = torch.zeros(2).as_subclass(Elsewhere)

    @on_its_gpu
    def current(name: object, tensors: object = None) -> int:
        return entered[0]

    assert [current(x), current("a", x), current("a", [x]), current("a", torch.zeros(1))] == [1, 1, 1, 0]


def test_every_op_enters_it(entered: list[Any]) -> None:
    """Also those of which no kernel is registered for CUDA, such as attention."""
    q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
    arguments: dict[str, tuple[Any, ...]] = {
        "attend_in_fp8": (q, q, q, None),
        "attention": (q, q, q, None, None, None, True, None, None, 0.1, None, None, 8, torch.bfloat16, False, False),
        "input_error": (torch.randn(3, 32), torch.tensor([1], dtype=torch.int32), None, "nvfp4"),
        "round_input": (torch.randn(3, 32), None, "mxfp8"),
        "fp8_block_stacked": ([torch.randn(128, 128)], "divided", True, False),
    }
    for name, values in arguments.items():
        before = len(entered)
        getattr(torch.ops.quant, name).default(*values)
        first = values[0][0] if isinstance(values[0], list) else values[0]
        assert any(x.data_ptr() == first.data_ptr() for x in entered[before:]), name


@pytest.mark.gpu
def test_on_a_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from quant.kernels.attention.forward import attention, quantize_attention
    from quant.kernels.attention.paged_attention import PagedKVCache
    from quant.kernels.rounding.portable_solvers import fake_quantize_nvfp4

    q = torch.randn(2, 4, 130, 64, dtype=torch.bfloat16)
    weight = quantize(torch.randn(256, 64), FORMATS["nvfp4"])

    def run(gpu: str) -> list[Tensor]:
        x = q.to(gpu)
        cache = PagedKVCache(1, 4, 64, format=FORMATS["nvfp4"], device=gpu)
        sequences = [cache.add(), cache.add()]
        cache.append(0, sequences, x, x)
        results = [
            attention(x, x, x, causal=True), quantize_attention(x, x, x).attend(), cache.attend(0, sequences, x),
            fake_quantize_nvfp4(x, None), quantized_linear(x, weight.to(gpu)),
        ]  # fmt: skip
        return [y.cpu() for y in results]

    for first, second in zip(run("cuda:0"), run("cuda:1"), strict=True):
        assert torch.equal(first, second)
