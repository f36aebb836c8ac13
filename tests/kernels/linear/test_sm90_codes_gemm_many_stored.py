"""Hopper's kernel takes the checkpoint's order for many tokens: its PTX is read here, its values tested on a GPU."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base import hardware
from quant.kernels.base.hardware import current
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import dispatch, sm90_codes_gemm_many, tiles
from quant.kernels.linear.quant_linear import quantized_linear
from quant.kernels.linear.tiles import STORED_FORMATS, STORED_UNITS, prefill_tiles
from quant.recipes.gpus import GPUS


@pytest.mark.parametrize(
    ("form", "size", "split", "experts"),
    [
        pytest.param("fp8", (256, 1), True, 0, marks=pytest.mark.slow),
        ("fp8_channel", (192, 1), False, 0),
        pytest.param("fp8_block", (256, 1), True, 0, marks=pytest.mark.slow),
        ("mxfp8", (256, 1), False, 0),
        ("int8", (64, 1), True, 0),
        ("int4", (128, 1), True, 0),
        ("fp8_channel", (128, 1), False, 128),
        ("fp8_block", (16, 1), False, 8),
    ],
)
def test_weights_go_from_registers_into_wgmma(
    compile_matmul: Callable[..., CompiledKernel], form: str, size: tuple[int, int], split: bool, experts: int
) -> None:
    from triton.experimental.gluon import language as gl

    format = FORMATS[form]
    choice = prefill_tiles(*size, GPUS["h100"], format, groups=1 if experts else None)
    wide = 1 << choice.block_m.bit_length() - 1
    tail = choice.block_m - wide

    def tile_of(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

    nbytes = format.element.bits // 4
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32 * nbytes, element_bitwidth=8 * nbytes, rank=3)
    codes = f"tensordesc<{'u8' if nbytes == 1 else 'i16'}[2, {64 * choice.halves}, 32],{layout!r}>"
    scale = "*i16" if format.scale.bits == 8 else "*fp32"
    types = {"y_map": tile_of(wide, 128), "offsets": "*i32", "w_map": codes, "s_map": codes, "block_scale": scale}
    types |= {"x_tail_map": tile_of(tail or wide, 64), "y_tail_map": tile_of(tail or wide, 128)}
    constants = sm90_codes_gemm_many.constants_of(choice, form, experts=experts, split=split, has_bias=split)
    options = {"num_warps": 8, "maxnreg": 168}
    kernel = compile_matmul(
        sm90_codes_gemm_many.sm90_codes_gemm_many, wide, choice.depth, types, {"constants": constants}, options
    )
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    # Two tiles of 64 columns in a turn of the loop: operands in flight and in the making are in different registers.
    assert len(products) == 8 * (2 if tail else 1) and set(products) == {"{"}
    assert kernel.shared <= 227 << 10
    assert assemble(kernel).spilled == 0


@pytest.mark.parametrize("form", STORED_FORMATS)
@pytest.mark.parametrize("tokens", [33, 65, 256, 700, 2048])
def test_many_tokens_go_to_hoppers_kernel(form: str, tokens: int) -> None:
    format, h100 = FORMATS[form], GPUS["h100"]
    for shape in ((28672, 4096), (4096, 14336), (1024, 1024)):
        choice = tiles.guess(format, tokens, shape, h100, prepacked=False)
        assert isinstance(choice, tiles.PrefillTiles) and choice.step in (128, 64 * choice.depth)
        without = tiles.guess(format, tokens, shape, h100, prepacked=False, stored=False)
        assert without == tiles.guess(format, tokens, shape, replace(h100, capability=(8, 9)), prepacked=False)
        assert not isinstance(without, tiles.PrefillTiles)
    # Rows that TMA cannot address, or y's.
    for shape in ((4096, 4104 + 4), (4097, 4096)):
        assert not isinstance(tiles.guess(format, tokens, shape, h100, prepacked=False), tiles.PrefillTiles)


def test_what_the_kernel_cannot_multiply_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    weight, x = quantize(torch.randn(256, 512), FORMATS["fp8_channel"]), torch.randn(100, 512).bfloat16()
    assert isinstance(dispatch.choose_launch(weight, x), tiles.PrefillTiles)
    assert dispatch.choose_launch(weight, x.half()) is tiles.DENSE
    memory = torch.empty(256 * 512 + 8, dtype=torch.uint8)[8:]
    shifted = replace(weight, codes=memory.view(256, 512).view(torch.float8_e4m3fn))
    shifted.codes.copy_(weight.codes)
    chosen = dispatch.choose_launch(weight, x)
    assert dispatch.choose_launch(shifted, x) is (tiles.DENSE if shifted.codes.data_ptr() % 16 else chosen)


def weight_of_all_codes(form: str, rows: int, columns: int) -> BlockScaledTensor:
    """Every number that codes can say, by scales of different sizes."""
    format = FORMATS[form]
    weight = quantize(torch.randn(rows, columns, device="cuda"), format)
    codes = torch.randint(0, 256, (rows, columns * format.element.bits // 8), dtype=torch.uint8, device="cuda")
    if format.element.torch_dtype is not None and format.element.torch_dtype.is_floating_point:
        codes[~codes.view(format.element.torch_dtype).float().isfinite()] = 0x23
    factors = torch.randint(1, 4, weight.scale.shape, device="cuda")
    scale = (
        weight.scale.view(torch.uint8) + factors.to(torch.uint8) if format.scale.bits == 8 else weight.scale * factors
    )
    return replace(weight, codes=codes.view(weight.codes.dtype), scale=scale.to(weight.scale.dtype))


ON_GPU = [("fp8", (64, 1)), ("fp8_channel", (128, 1)), ("mxfp8_e5m2", (128, 1)), ("int4", (64, 1))]
ON_GPU += [(form, (256, 1)) for form in ("fp8_channel", "fp8_block", "mxfp8", "int8", "int4")]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "size"), ON_GPU)
def test_agrees_with_float64_on_a_gpu(form: str, size: tuple[int, int]) -> None:
    """Whole tiles and cut ones, ends of all axes; what memory held before does not show."""
    if not current().has_wgmma:
        pytest.skip("the kernel is Hopper's")
    ragged = 1600 if form.startswith("mx") else 1632
    for rows, columns, tokens, programs in (
        (448, ragged, 333, 7),
        (72, 64, 5, 132),
        (1024, 2048, 2500, 33),
        (456, 4096, 2000, 9),
        (256, 2048, 257, 132),
    ):
        weight = weight_of_all_codes(form, rows, columns)
        choice = replace(prefill_tiles(*size, current(), weight.format), programs=programs)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        dense = weight.dequantize(torch.float64)
        exact, magnitude = x.double() @ dense.T + bias.double(), x.double().abs() @ dense.abs().T
        # Products of a code and a float32 scale are rounded; the others are exact.
        unit = 2**-8 * 1.01 if form in ("int4", "fp8_block") else 2**-13
        first = None
        for _ in range(3):
            torch.full((tokens, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
            y = dispatch.multiply_with(x, weight, bias, choice)
            assert bool(((y.double() - exact).abs() <= magnitude * unit + exact.abs() * 2**-8).all())
            assert first is None or torch.equal(y, first)
            first = y


def test_every_tile_is_compared_on_a_gpu() -> None:
    assert {size for _, size in ON_GPU} == set(STORED_UNITS)
    assert {form for form, _ in ON_GPU} == set(STORED_FORMATS)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "code"), [("fp8_channel", 0x7F), ("fp8_block", 0xFF), ("mxfp8_e5m2", 0x7C)])
def test_a_code_that_is_no_number_shows_on_a_gpu(form: str, code: int) -> None:
    """Also one that was written past autograd, and in a graph that was captured before."""
    if not current().has_wgmma:
        pytest.skip("the kernel is Hopper's")
    weight = quantize(torch.randn(256, 512, device="cuda"), FORMATS[form])
    x = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16).abs()
    assert isinstance(dispatch.choose_launch(weight, x), tiles.PrefillTiles)
    assert bool(quantized_linear(x, weight).isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized_linear(x, weight)
    spoilt = weight.codes.clone()
    spoilt.view(torch.uint8)[5, 7] = code
    weight.codes.data.copy_(spoilt)
    graph.replay()
    for y in (quantized_linear(x, weight), captured):
        column = y[:, 5]
        assert bool(column.isposinf().all() if code == 0x7C else column.isnan().all())
        assert bool(y[:, :5].isfinite().all()) and bool(y[:, 6:].isfinite().all())
