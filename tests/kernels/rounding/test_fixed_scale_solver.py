"""GPTQ's windows under fixed scales: the kernel agrees with PyTorch; a CPU interprets it."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from functools import partial

from interpreter import interpreted

from quant.calibration.solvers.gptq import block_factors, round_block, solve_window
from quant.formats.format import E4M3, INT8, Number
from quant.kernels.rounding.portable_solvers import solve_fixed_window


def _check(device: str, element: Number, rows: int) -> None:
    # float64 values that both sides round to float32 alike; some are beyond the largest code.
    targets = torch.randn(128, rows) * torch.logspace(-3, 0.3, rows)
    steps = torch.rand(192, rows).add_(0.5).div_(element.max).mul_(3)
    mixing = torch.randn(4, 32, 32, dtype=torch.float64)
    _, uppers = block_factors(mixing @ mixing.mT / 32 + 0.1 * torch.eye(32))
    coupling = torch.randn(128, 128) * 0.02
    problem = [targets, coupling, uppers.float()]

    def both(values: torch.Tensor, improve: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        solve = partial(solve_window, partial(round_block, element, steps))
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


@pytest.mark.parametrize("element", [E4M3, INT8], ids=str)
def test_interpreted(element: Number) -> None:
    with interpreted():
        _check("cpu", element, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("element", [E4M3, INT8], ids=str)
def test_on_gpu(element: Number) -> None:
    _check("cuda", element, 3000)
