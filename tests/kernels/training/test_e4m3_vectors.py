"""The kernels that round rows and columns to E4M3 under powers of two, interpreted, give the codes of the reference."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.kernels.base.ptx import compile_kernel
from quant.kernels.training import grouped_fp8 as grouped_fp8
from quant.kernels.training import portable_grouped_fp8
from quant.kernels.training.portable_grouped_fp8 import (
    TILES,
    e4m3_columns,
    e4m3_columns_kernel,
    e4m3_rows,
    e4m3_rows_kernel,
)
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.training_recipe import RECIPES

ENDS = [16, 176, 192]


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, a row and a column of zeros, and numbers that are subnormal in E4M3."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(4).exp()
    x[0], x[:16, 3], x[1, 1] = 0, 0, 1e9
    x[2, :4] = torch.tensor([448.0, -450.0, 1.0, 2.0**-9])
    return x.to(dtype)


def expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as floats, and scales, by the oracle that each layer uses."""
    operand = round_operand(x, FORMATS["fp8_token"], RECIPES["fp8_rowwise"])
    return operand.elements, operand.factor[:, 0]


@pytest.fixture
def _tiles_of_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at once, so that a program reads several tiles of these small matrices."""
    monkeypatch.setattr(portable_grouped_fp8, "TILES", ((64, 32, 4), (64, 32, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_tiles_of_64_rows")
def test_codes_and_scales_are_those_of_the_oracle(dtype: torch.dtype) -> None:
    x, offsets = matrix(208, 144, dtype), torch.tensor(ENDS, dtype=torch.int32)
    with interpreted():
        rows, columns = e4m3_rows(x), e4m3_columns(x, offsets, False, None)
        stack = e4m3_columns(x[:192], torch.tensor([64, 128, 192], dtype=torch.int32), True, None)
    for operand in (rows, torch.ops.quant.e4m3_rows(x)):
        for part, oracle in zip(operand, expected(x), strict=True):
            assert torch.equal(part.float(), oracle)
    reference = torch.ops.quant.e4m3_columns(x, offsets, False, None)
    for codes, scale in (columns, reference):
        for expert, (begin, end) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            elements, factor = expected(x[begin:end].t())
            assert torch.equal(codes[:, begin:end].float(), elements) and torch.equal(scale[expert], factor)
    for expert in range(3):
        elements, factor = expected(x[64 * expert : 64 * expert + 64].t())
        assert torch.equal(stack[0][expert].float(), elements) and torch.equal(stack[1][expert], factor)


def test_columns_under_scales_that_are_given() -> None:
    x, offsets = torch.randn(64, 80), torch.tensor([32, 64], dtype=torch.int32)
    scale = torch.tensor([0.25, 0.5])[:, None].expand(2, 80).contiguous()
    with interpreted():
        codes, same = e4m3_columns(x, offsets, True, scale)
    assert torch.equal(same, scale) and same is not scale
    for got in (codes, torch.ops.quant.e4m3_columns(x, offsets, True, scale)[0]):
        assert torch.equal(got[0].float(), (x[:32] * 4).to(torch.float8_e4m3fn).float().t())
        assert torch.equal(got[1].float(), (x[32:] * 2).to(torch.float8_e4m3fn).float().t())


def test_a_number_that_is_not_finite_spoils_its_vector_alone() -> None:
    x, offsets = torch.ones(32, 48), torch.tensor([16, 32], dtype=torch.int32)
    x[3, 5], x[20, 40] = torch.nan, torch.inf
    with interpreted():
        results = [e4m3_rows(x), e4m3_columns(x, offsets, False, None)]
    for rows, columns in (
        results,
        [torch.ops.quant.e4m3_rows(x), torch.ops.quant.e4m3_columns(x, offsets, False, None)],
    ):
        assert rows[1].isnan().nonzero().flatten().tolist() == [3, 20]
        assert columns[1].isnan().nonzero().tolist() == [[0, 5], [1, 40]]
        assert rows[0].float().isnan().any(1).nonzero().flatten().tolist() == [3, 20]


def test_the_ops_are_what_compilers_are_told() -> None:
    offsets = torch.tensor([16, 32], dtype=torch.int32)
    x, ops = torch.randn(32, 48), torch.ops.quant
    checks = "test_autograd_registration", "test_faketensor"  # others compute in FP8, which a CPU does not
    torch.library.opcheck(ops.e4m3_rows.default, (x,), test_utils=checks)
    for arguments in ((x, offsets, False, None), (x, offsets, True, torch.ones(2, 48))):
        torch.library.opcheck(ops.e4m3_columns.default, arguments, test_utils=checks)
    rows, stack = ops.e4m3_rows(x), ops.e4m3_columns(x, offsets, True, None)
    turned = ops.e4m3_columns(x, offsets, False, None)
    product = stack[0].transpose(1, 2).contiguous(), torch.ones(2, 16)
    for operands in ((*rows, *product), (*turned, *turned)):
        arguments = *operands, offsets, False, torch.float32
        torch.library.opcheck(ops.e4m3_grouped_product.default, arguments, test_utils=checks)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("arch", [90, 120])
def test_compiles_without_scratch_memory(arch: int, tile: tuple[int, int, int]) -> None:
    pointers = {"x": "*bf16", "codes": "*fp8e4nv", "scale": "*fp32"}
    sizes = dict.fromkeys(("C", "row_stride"), "i32")
    rows = compile_kernel(e4m3_rows_kernel, pointers | sizes, {"columns": 4096}, arch=arch, num_warps=4, num_stages=1)
    pointers = {"x": "*bf16", "offsets": "*i32", "codes": "*fp8e4nv", "scale": "*fp32"}
    sizes |= dict.fromkeys(("expert_stride", "column_stride"), "i32")
    constants = {"measured": True, "rows": tile[0], "columns": tile[1]}
    options = {"arch": arch, "num_warps": tile[2], "num_stages": 1}
    columns = compile_kernel(e4m3_columns_kernel, pointers | sizes, constants, **options)
    assert assemble(rows).spilled == assemble(columns).spilled == 0


@pytest.mark.gpu
def test_on_a_gpu_codes_are_those_of_the_oracle() -> None:
    ops, offsets = torch.ops.quant, torch.tensor([16, 496, 512], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        x = matrix(544, 5008, dtype)
        stack = torch.tensor([272, 544], dtype=torch.int32)
        calls = (ops.e4m3_rows, ()), (ops.e4m3_columns, (offsets, False, None)), (ops.e4m3_columns, (stack, True, None))
        for op, arguments in calls:
            on_gpu = op(x.cuda(), *(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
            for part, reference in zip(on_gpu, op(x, *arguments), strict=True):
                # Columns beyond the last offset are not written.
                part, reference = (t[..., :512] if t.shape[-1] == 544 else t for t in (part.cpu(), reference))
                assert torch.equal(part.float(), reference.float())


@pytest.mark.gpu
def test_on_a_gpu_fp8_products_are_the_decoded_ones() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    ops = torch.ops.quant
    x, dy = torch.randn(384, 512).cuda(), torch.randn(384, 256).cuda()
    weight, offsets = torch.randn(3, 256, 512).cuda(), torch.tensor([16, 256, 384], dtype=torch.int32).cuda()
    codes, scale = ops.e4m3_rows(weight.flatten(0, 1))
    of_weight = codes.view(3, 256, 512), scale.view(3, 256)
    turned = ops.e4m3_columns(weight.flatten(0, 1), torch.tensor([256, 512, 768], dtype=torch.int32).cuda(), True, None)
    columns = ops.e4m3_columns(dy, offsets, False, None), ops.e4m3_columns(x, offsets, False, None)
    products = (ops.e4m3_rows(x), of_weight), (ops.e4m3_rows(dy), turned), columns
    for a, b in products:
        y, exact = (ops.e4m3_grouped_product(*a, *b, offsets, way, torch.bfloat16) for way in (False, True))
        assert float((y - exact).norm() / exact.norm()) < 2.0**-8
