"""Work that is shared among threads by rows gives the bits that one thread gives, and leaves PyTorch as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quant.base.parallel import in_parts
from quant.calibration.solvers import gptq, row_parallel
from quant.calibration.solvers.registry import get_solver
from quant.calibration.statistics import LayerStats
from quant.formats import tensor
from quant.formats.format import FORMATS
from quant.formats.scaling import global_scale_of

ON_CPU = torch.empty(0)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("size", "parts", "wanted"),
    [(1000, 3.9, [384, 384, 232]), (1000, 5, [256, 256, 256, 232]), (100, 9, [64, 36]), (70, 0.2, [70]), (0, 4, [])],
)
def test_parts_cover_all_rows_once(size: int, parts: float, wanted: list[int]) -> None:
    for available in (3, 1):
        torch.set_num_threads(available)
        found: list[tuple[int, int]] = []
        counts = set()

        def work(start: int, stop: int, found: Any = found, counts: Any = counts) -> None:
            found.append((start, stop))
            counts.add(torch.get_num_threads())

        in_parts(work, ON_CPU, size, parts)
        assert [row for start, stop in sorted(found) for row in range(start, stop)] == list(range(size))
        assert [stop - start for start, stop in sorted(found)] == wanted
        assert counts <= {1} and torch.get_num_threads() == available


def test_parts_run_side_by_side() -> None:
    """Each waits for the two others, which none could do that runs after them."""
    meeting = threading.Barrier(3, timeout=20)
    in_parts(lambda start, stop: meeting.wait(), ON_CPU, 192, 3)


@pytest.mark.parametrize("row", [0, 999])
def test_an_error_in_any_part_is_raised_and_the_threads_are_given_back(row: int) -> None:
    def work(start: int, stop: int) -> None:
        if start <= row < stop:
            raise ValueError(f"row {row}")

    with pytest.raises(ValueError, match=f"row {row}"):
        in_parts(work, ON_CPU, 1000, 3)
    assert torch.get_num_threads() == 3


def test_parts_are_in_the_modes_of_their_caller() -> None:
    modes = set()
    for grad in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with grad():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            in_parts(lambda *_: modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled())), ON_CPU, 999, 3)
        assert modes == {before}
        modes.clear()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_block", "fp8", "int4"])
@pytest.mark.parametrize("solver", ["mse", "gptq", "local_hessian"])
def test_neither_threads_nor_parts_change_a_bit(name: str, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "_PART_ELEMENTS", 1000)
    monkeypatch.setattr(gptq, "search_threads", lambda rows, inputs: 3)
    monkeypatch.setattr(row_parallel, "search_threads", lambda rows, inputs: 3)
    format = FORMATS[name]
    if solver == "local_hessian" and (format.block[0] != 1 or not 0 < format.block[1] <= 32):
        pytest.skip("local_hessian is for blocks within a row")
    torch.manual_seed(0)
    weight, x = torch.randn(200, 144), torch.randn(300, 144)
    second = global_scale_of(weight.abs().amax(), format, "mse") if format.global_scale else None
    stats = LayerStats(300, x.T @ x / 300)

    def solve() -> tensor.BlockScaledTensor:
        return get_solver(solver)(weight, stats, format, global_scale=second, name="layer")

    shared = solve()
    torch.set_num_threads(1)
    alone = solve()
    monkeypatch.undo()  # one part
    whole = solve()
    for other in (alone, whole):
        assert torch.equal(shared.codes.view(torch.uint8), other.codes.view(torch.uint8))
        assert torch.equal(shared.scale.view(torch.uint8), other.scale.view(torch.uint8))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_block", "fp8", "int4", "int8"])
def test_parts_of_a_dequantized_weight_may_begin_within_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 rows and of a whole matrix, chunks of 7 rows, and the values by their definition."""
    torch.manual_seed(0)
    quantized = tensor.quantize(torch.randn(2, 300, 128), FORMATS[name])
    height, width = quantized.format.block_shape(quantized.shape)
    scales = quantized.scale_values().repeat_interleave(height, -2)[:, :300].repeat_interleave(width, -1)[..., :128]
    expected = quantized.element_values() * scales
    assert torch.equal(quantized.dequantize(), expected)
    monkeypatch.setattr(tensor, "_PART_ELEMENTS", 1000)
    monkeypatch.setattr(tensor, "_CHUNK_ELEMENTS", 7 * 128)
    assert torch.equal(quantized.dequantize(), expected)
