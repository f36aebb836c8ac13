"""GPTQ's window for NVFP4 on a GPU agrees with the one in PyTorch; on a CPU its kernel is interpreted."""

from functools import partial

import pytest
import torch

from quant.calibration.solvers.block_search import search_block
from quant.calibration.solvers.gptq import _solve_window, block_factors
from quant.formats.format import FORMATS
from quant.formats.number import E4M3

pytest.importorskip("triton")

NVFP4 = FORMATS["nvfp4"]
SECOND = 0.002


def _problem(blocks: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = torch.randn(16 * blocks, columns, dtype=torch.float64)
    wanted *= torch.logspace(-3, 0, columns, dtype=torch.float64)
    wanted[:16, 0] = 0
    mixing = torch.randn(blocks, 16, 16, dtype=torch.float64)
    _, uppers = block_factors(mixing @ mixing.mT + 0.1 * torch.eye(16))
    coupling = torch.randn(16 * blocks, 16 * blocks, dtype=torch.float64) * 0.05
    return wanted.float(), coupling.float(), uppers.float()


def _losses(off: torch.Tensor, uppers: torch.Tensor) -> torch.Tensor:
    """Σ e² of each block and row, in float64."""
    errors = torch.linalg.solve_triangular(uppers.double().mT, off.double().unflatten(0, (-1, 16)), upper=False)
    return errors.square().sum(1)


def _check(columns: int, device: str) -> None:
    from quant.kernels.portable.nvfp4_solvers import search_nvfp4_blocks, solve_nvfp4_window

    wanted, coupling, uppers = _problem(3, columns)
    second = torch.tensor(SECOND)
    gpu = [t.to(device) for t in (second, wanted, coupling, uppers)]
    solve = partial(_solve_window, lambda block, start, u: search_block(block, u, NVFP4, second, 16))

    def both(found: list[torch.Tensor], improve: bool) -> list[list[torch.Tensor]]:
        answers = []
        for run, tensors in ((solve, (wanted, coupling, uppers)), (partial(solve_nvfp4_window, gpu[0]), gpu[1:])):
            values, scales = (t.clone().to(tensors[0].device) for t in found)
            moves = run(*tensors, values, scales, 0, improve)
            answers.append([t.cpu() for t in (values, scales, moves)])
        return answers

    # The first pass: values, scales and errors. A row in which two scales are as good may go another way.
    empty = [torch.zeros_like(wanted), torch.zeros(3, columns)]
    (values, scales, errors), (our_values, our_scales, our_errors) = both(empty, False)
    same = (scales == our_scales).all(0)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(our_values[:, same], values[:, same], rtol=1e-6, atol=0)
    torch.testing.assert_close(our_errors[:, same], errors[:, same], rtol=1e-3, atol=1e-5)
    by_errors = errors[:16].double().square().sum(0)[None]
    torch.testing.assert_close(_losses(wanted[:16] - our_values[:16], uppers[:1]), by_errors, rtol=1e-4, atol=1e-12)
    # Descent: what is there stays where it is better, and the moves say what changed.
    start = [values + 0.3 * torch.randn_like(values) * (torch.rand(columns) < 0.5), scales]
    (values, scales, _), (our_values, our_scales, our_moves) = both(start, True)
    same = (scales == our_scales).all(0)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(our_values[:, same], values[:, same], rtol=1e-6, atol=0)
    torch.testing.assert_close(our_moves, our_values - start[0], rtol=0, atol=0)
    assert (our_values == start[0]).all(0).any(), "no row was kept"
    assert set(our_scales.flatten().tolist()) <= set(E4M3.grid().tolist())
    # Blocks on their own.
    alone, alone_scales = search_nvfp4_blocks(gpu[1], gpu[3], gpu[0])
    for block in range(3):
        here = slice(16 * block, 16 * block + 16)
        best, _, _ = search_block(wanted[here], uppers[block], NVFP4, second, 16)
        ours = _losses(wanted[here] - alone[here].cpu(), uppers[block : block + 1])
        torch.testing.assert_close(ours, _losses(wanted[here] - best, uppers[block : block + 1]), rtol=1e-5, atol=1e-12)
    assert alone_scales.shape == (3, columns)


def test_a_window_is_solved_as_in_pytorch() -> None:
    from interpreter import interpreted

    with interpreted():
        _check(70, "cpu")


@pytest.mark.gpu
def test_the_compiled_kernel_too() -> None:
    _check(5000, "cuda")
