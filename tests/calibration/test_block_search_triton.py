"""The GPU's search for NVFP4 scales against the one in PyTorch: on a CPU through Triton's interpreter."""

import pytest
import torch

from quant.calibration.block_search import search_block
from quant.calibration.gptq import block_factors
from quant.formats.format import FORMATS

pytest.importorskip("triton")

NVFP4 = FORMATS["nvfp4"]


def _problem(columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    block = torch.randn(16, columns, dtype=torch.float64) * torch.logspace(-3, 0, columns, dtype=torch.float64)
    block[:, 0] = 0
    mixing = torch.randn(16, 16, dtype=torch.float64)
    _, uppers = block_factors((mixing @ mixing.t() + 0.1 * torch.eye(16))[None])
    return block.float().to(device), uppers[0].float().to(device), torch.tensor(0.002, device=device)


def _check(columns: int, device: str) -> None:
    from quant.calibration.block_search_triton import search_nvfp4_block

    block, upper, second = _problem(columns, device)
    values, scales = search_nvfp4_block(block, upper, second)
    wanted, wanted_scales = search_block(block.cpu(), upper.cpu(), NVFP4, second.cpu(), 16)

    def loss(q: torch.Tensor) -> torch.Tensor:
        error = torch.linalg.solve_triangular(upper.cpu().double().t(), (block.cpu() - q.cpu()).double(), upper=False)
        return error.square().sum(0)

    torch.testing.assert_close(loss(values), loss(wanted), rtol=1e-5, atol=0)
    same = scales.cpu() == wanted_scales
    assert same.float().mean() > 0.97  # two scales may be as good as each other
    torch.testing.assert_close(values.cpu()[:, same], wanted[:, same], rtol=1e-6, atol=0)


def test_every_block_gets_the_scale_and_values_of_the_search_in_pytorch() -> None:
    from quant.kernels.interpreter import interpreted

    with interpreted():
        _check(70, "cpu")


@pytest.mark.gpu
def test_the_compiled_kernel_too() -> None:
    _check(5000, "cuda")
