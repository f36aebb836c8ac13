"""The kernel that rounds operands of NVFP4 training, interpreted, gives the values of `round_operand` bit for bit."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted
from safetensors.torch import load_file
from samples import ROOT
from slow_cases import quick_cases

from quant.formats.format import FORMATS
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.training.portable_fake_rounding import nvfp4_operand_kernel, round_nvfp4_operand
from quant.training.low_precision.operands import operand_of, round_operand, transform_tokens
from quant.training.low_precision.training_recipe import NVFP4_SQUARE, RECIPES

NVFP4 = RECIPES["nvfp4"]


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, a block of zeros and one whose scale is rounded to zero."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(2).exp()
    x[0, :16], x[1, 16:32] = 0, 1e-9
    return x.to(dtype)


def check(x: torch.Tensor, square: bool, amax: torch.Tensor, draws: torch.Tensor | None = None) -> None:
    format = NVFP4_SQUARE if square else FORMATS["nvfp4"]
    expected = round_operand(x, format, NVFP4, draws=draws, amax=amax)
    with interpreted():
        values, factor = round_nvfp4_operand(x, amax, square, draws)
    assert torch.equal(values.isnan(), expected.values.isnan())
    assert torch.equal(values.nan_to_num(), expected.values.bfloat16().nan_to_num())
    assert torch.equal(factor.nan_to_num(), expected.factor.nan_to_num())


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("shape", [(37, 144), (64, 40)], ids=str)
def test_values_are_those_of_the_oracle(shape: tuple[int, int], square: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = matrix(*shape, dtype)
        check(x, square, x.abs().amax())
        # Under the amax of a group of layers, and in a transposed layout.
        check(matrix(*shape[::-1], dtype).t(), square, 2 * x.abs().amax())


def test_values_are_those_of_transformer_engine() -> None:
    goldens = load_file(ROOT / "tests/data/goldens/training/operands.safetensors")
    for name in ("outliers", "ties", "zeros"):
        x = goldens[f"{name}.input"]
        check(x, False, x.abs().amax())
        check(x, True, x.abs().amax())


def test_stochastic_rounding_takes_the_draws() -> None:
    x = matrix(40, 144)
    check(x, False, x.abs().amax(), torch.rand(40, 144))
    # Numbers of the grid stay.
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 4).view(2, 16) * 448
    with interpreted():
        values, _ = round_nvfp4_operand(grid, grid.abs().amax(), False, torch.full((2, 16), 0.99))
    assert torch.equal(values.float(), grid)


def test_zeros_and_numbers_that_are_not_finite() -> None:
    check(torch.zeros(16, 32), False, torch.zeros(()))
    x = matrix(20, 48)
    x[3, 5], x[7, 40] = torch.nan, torch.inf
    check(x, False, torch.tensor(100.0))
    check(x, True, x.abs().amax())


def test_the_op_is_what_compilers_are_told() -> None:
    x = matrix(16, 32)
    for draws in (None, torch.rand(16, 32)):
        torch.library.opcheck(torch.ops.quant.nvfp4_operand.default, (x, x.abs().amax(), draws is None, draws))
    operand, expected = operand_of(x, NVFP4_SQUARE, NVFP4), round_operand(x, NVFP4_SQUARE, NVFP4)
    assert torch.equal(operand.values, expected.values) and torch.equal(operand.factor, expected.factor)


@pytest.mark.parametrize(
    ("arch", "square", "stochastic"),
    quick_cases(
        ((arch, square, not square) for arch in (89, 90, 120) for square in (True, False)),
        lambda arch, square, stochastic: square == (arch == 90),
    ),
)
def test_compiles_almost_without_scratch_memory(arch: int, square: bool, stochastic: bool) -> None:
    pointers = {"x": "*bf16", "whole": "*fp32", "draws": "*fp32", "out": "*bf16", "factor": "*fp32"}
    sizes = dict.fromkeys(("R", "C", "row_stride", "column_stride", "draws_stride"), "i32")
    constants = {"square": square, "stochastic": stochastic, "rows": 32, "columns": 128}
    compiled = compile_kernel(nvfp4_operand_kernel, pointers | sizes, constants, arch=arch, num_warps=4, num_stages=1)
    # For Ada, Triton 3.8 spills two registers, and 3.7 none.
    assert assemble(compiled).spilled <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_on_a_gpu_values_are_those_of_the_oracle(square: bool) -> None:
    op = torch.ops.quant.nvfp4_operand
    for dtype in (torch.float32, torch.bfloat16):
        for x in (matrix(200, 528, dtype), matrix(528, 200, dtype).t()):
            draws = None if square else torch.rand(x.shape)
            expected = op(x, x.abs().amax().float(), square, draws)
            on_gpu = x.cuda()
            got = op(on_gpu, on_gpu.abs().amax().float(), square, None if draws is None else draws.cuda())
            assert torch.equal(got[0].cpu().float(), expected[0]) and torch.equal(got[1].cpu(), expected[1])


@pytest.mark.gpu
def test_on_a_gpu_tokens_are_transformed_as_in_float32() -> None:
    x = matrix(96, 200, torch.bfloat16)
    got, expected = transform_tokens(x.cuda(), 16).cpu(), transform_tokens(x, 16)
    # Sums in another order: BF16 rounds a few of them to a neighbour.
    assert torch.allclose(got.float(), expected.float(), rtol=2.0**-7, atol=1e-6)
    assert float((got != expected).float().mean()) < 1e-3
