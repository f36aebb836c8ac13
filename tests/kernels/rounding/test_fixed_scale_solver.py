"""GPTQ's windows under fixed scales, and blocks on a few grids: kernels agree with PyTorch; a CPU interprets them."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from functools import partial

from interpreter import interpreted

from quant.calibration.solvers.gptq import block_factors, round_block, round_with_feedback, solve_window
from quant.formats.format import E2M1, E4M3, INT4, INT6, INT8, Number
from quant.kernels.rounding.portable_solvers import feed_back_block, solve_fixed_window


def _check(device: str, element: Number, rows: int) -> None:
    # float64 values that both sides round to float32 alike; some are beyond the largest code.
    targets = torch.randn(128, rows) * torch.logspace(-3, 0.3, rows)
    steps = torch.rand(192, rows).add_(0.5).div_(element.max).mul_(3)
    mixing = torch.randn(4, 32, 32, dtype=torch.float64)
    _, uppers = block_factors(mixing @ mixing.mT / 32 + 0.1 * torch.eye(32))
    coupling = torch.randn(128, 128) * 0.02
    problem = [targets, coupling, uppers.float()]

    def both(values: torch.Tensor, improve: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        solve = partial(solve_window, partial(round_block, element, steps), None)
        kernel = partial(solve_fixed_window, element, steps.to(device))
        answers = []
        for run, tensors in ((solve, problem), (kernel, [t.to(device) for t in problem])):
            filled = values.clone().to(tensors[0].device)
            moves = run(*tensors, filled, None, 64, improve)
            answers.append((filled.cpu(), moves.cpu()))
        return answers

    (values, errors), (our_values, our_errors) = both(torch.zeros_like(targets), False)
    # A row in which one value lies between two codes may go another way from there.
    same = (values - our_values).abs().amax(0) < 1e-6
    assert same.float().mean() > 0.9
    torch.testing.assert_close(our_errors[:, same], errors[:, same], rtol=1e-3, atol=1e-4)
    start = values + steps[64:] * (torch.rand(128, rows) < 0.3)
    (values, _), (our_values, our_moves) = both(start, True)
    same = (values - our_values).abs().amax(0) < 1e-6
    assert same.float().mean() > 0.9
    torch.testing.assert_close(our_moves, our_values - start, rtol=0, atol=0)
    assert (our_values != start).any()


def _check_block(device: str, element: Number, shifted: bool, width: int, rows: int) -> None:
    mixing = torch.randn(1, width, width, dtype=torch.float64)
    _, (U,) = block_factors(mixing @ mixing.mT / width + 0.1 * torch.eye(width))
    block, U, grids = torch.randn(width, rows), U.float(), 3
    step = (torch.rand(grids, rows) + 0.5) * 3 / element.max
    step[0, :2] = -step[0, :2]  # Q4_0 has negative scales too
    step[1, 3] = 1e30  # as for a block whose step is zero
    shift = torch.rand(grids, rows) - 0.5 if shifted else None
    values, errors = round_with_feedback(block, U, step[None], element, shift)
    # Columns of U as GPTQ has them, and a block that is part of a window.
    on = [x.to(device) for x in (block, U.t().contiguous().t(), step)]
    ours = feed_back_block(*on, element, None if shift is None else shift.to(device))
    # Where a value lies between two codes, rounding may go another way, and so do the later inputs.
    same = ((values - ours[0].cpu()).abs() < 1e-5).all(0)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(ours[1].cpu()[:, same], errors[:, same], rtol=1e-3, atol=1e-4)
    # By definition: what is left of the target after the errors before it, over the diagonal.
    target = block[:, None] - torch.einsum("ij,icn->jcn", U.triu(1), ours[1].cpu())
    expected = (target - ours[0].cpu()) / U.diagonal()[:, None, None]
    torch.testing.assert_close(ours[1].cpu(), expected, rtol=1e-3, atol=1e-3)


BLOCKS = pytest.mark.parametrize(
    ("element", "shifted", "width"),
    [(INT4, False, 32), (INT4, True, 32), (INT6, False, 16), (E2M1, False, 32)],
    ids=str,
)


@BLOCKS
def test_blocks_interpreted(element: Number, shifted: bool, width: int) -> None:
    with interpreted():
        _check_block("cpu", element, shifted, width, 50)


@pytest.mark.gpu
@BLOCKS
def test_blocks_on_gpu(element: Number, shifted: bool, width: int) -> None:
    _check_block("cuda", element, shifted, width, 3000)
    _check_block("cuda", element, shifted, 4 * width, 70)


@pytest.mark.parametrize("element", [E4M3, INT8], ids=str)
def test_interpreted(element: Number) -> None:
    with interpreted():
        _check("cpu", element, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("element", [E4M3, INT8], ids=str)
def test_on_gpu(element: Number) -> None:
    _check("cuda", element, 3000)
