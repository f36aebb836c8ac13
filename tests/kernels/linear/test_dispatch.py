"""These tests run what a GPU call does before and around its kernel, on CPU tensors through the interpreter."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.formats.format import FORMATS, INPUT_FORMATS
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base import hardware
from quant.kernels.base.weight_layout import prepack, restore
from quant.kernels.linear import dispatch, rounded_products, tiles
from quant.kernels.linear.rounded_products import aligned_rows, round_rows
from quant.recipes.gpus import GPUS


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An L40S, for which no table is shipped; its launches are interpreted."""
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["l40s"])
    monkeypatch.setattr(rounded_products, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_products", {})
    with interpreted():
        yield


def linear(
    x: torch.Tensor, weight: BlockScaledTensor, bias: torch.Tensor | None = None, activation: str = ""
) -> torch.Tensor:
    return dispatch.linear_on_gpu(
        x, weight.codes, weight.scale, weight.global_scale, bias, None, weight.format.name, activation
    )


def close(y: torch.Tensor, x: torch.Tensor, weight: BlockScaledTensor) -> None:
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert float((y.double() - exact).norm() / exact.norm()) < 2**-8


def test_one_row_of_a_wider_matrix_gets_a_stride_that_kernels_take() -> None:
    """PyTorch calls a single row contiguous, whatever its stride."""
    wide = torch.randn(4, 1027).bfloat16()
    for rows in (wide[:1, :1024], wide[2:3, :1024], wide[:3, :1024]):
        taken = aligned_rows(rows)
        assert torch.equal(taken, rows)
        assert taken.stride(0) * 2 % 16 == 0 and taken.data_ptr() % 16 == 0


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_block", "int4"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_both_ways_to_multiply(format: str, tokens: int) -> None:
    weight, x = quantize(torch.randn(96, 256), FORMATS[format]), torch.randn(2, tokens, 256).bfloat16()
    kind = tiles.Dense if tokens > 32 else tiles.Tiles
    assert isinstance(dispatch.choose_launch(weight, x.view(-1, 256)), kind)
    y = linear(x, weight)
    assert y.shape == (2, tokens, 96) and y.dtype is torch.bfloat16
    close(y, x, weight)


def test_rows_of_any_layout() -> None:
    weight, wide = quantize(torch.randn(64, 128), FORMATS["mxfp4"]), torch.randn(20, 300).bfloat16()
    for x in (wide[:, 3:131], wide[::3, 8:136], wide[:1, :128].expand(5, 128), wide.T[:128].T, wide[:0, :128]):
        y = linear(x, weight)
        assert y.shape == (len(x), 64)
        if len(x):
            close(y, x, weight)


def test_an_activation_format_rounds_x_first() -> None:
    weight, x = quantize(torch.randn(64, 128), FORMATS["nvfp4"]), torch.randn(9, 128).bfloat16()
    y = linear(x, weight, activation="nvfp4")
    close(y, fake_quantize(x, FORMATS["nvfp4"]), weight)
    assert not torch.equal(y, linear(x, weight))


@pytest.mark.parametrize("activation", ["nvfp4", "mxfp8", "fp8", "fp8_token"])
def test_rows_apart_are_not_taken_for_rows_side_by_side(activation: str) -> None:
    """What was decided for one layout of x does not serve another of the same shape."""
    weight, wide = quantize(torch.randn(64, 128), FORMATS["nvfp4"]), torch.randn(32, 400).bfloat16()
    apart = wide[:, 8:136]
    side_by_side = apart.contiguous()
    expected = linear(side_by_side, weight, activation=activation)
    assert torch.equal(linear(apart, weight, activation=activation), expected)
    assert torch.equal(linear(side_by_side, weight, activation=activation), expected)


def test_nothing_is_kept_of_a_call() -> None:
    """The decisions that are remembered hold no tensor: a freed model frees its memory."""
    weight, x = quantize(torch.randn(64, 128), FORMATS["nvfp4"]), torch.randn(9, 128).bfloat16()
    bias = torch.randn(64)
    held = [weakref.ref(t) for t in (weight.codes, weight.scale, weight.global_scale, x, bias)]
    for activation in ("", "nvfp4", "mxfp8", "fp8_token"):
        linear(x, weight, bias, activation)
    del weight, x, bias
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


ROUNDED = [name for name, f in INPUT_FORMATS.items() if f.element.name != "int4"]
# Only a scale for the whole tensor can be static.
STATIC = [name for name in ROUNDED if INPUT_FORMATS[name].is_static]


@pytest.mark.parametrize(("format", "static"), [*((f, False) for f in ROUNDED), *((f, True) for f in STATIC)])
def test_rounding_is_that_of_the_oracle(format: str, static: bool) -> None:
    form = INPUT_FORMATS[format]
    scale = torch.tensor(0.02) if static else None
    for columns in (256, 200):
        x = torch.randn(6, columns).bfloat16()
        known = {"global_scale" if form.global_scale else "scale": scale}
        assert torch.equal(round_rows(x, form, scale), fake_quantize(x, form, **known))


def test_fp32_is_left_to_the_oracle() -> None:
    weight = quantize(torch.randn(64, 128), FORMATS["nvfp4"])
    x = torch.randn(3, 128)
    assert torch.equal(linear(x, weight), x @ weight.dequantize().T)


def test_mistakes_are_named_before_a_launch() -> None:
    weight, x = quantize(torch.randn(64, 128), FORMATS["nvfp4"]), torch.randn(3, 128).bfloat16()

    def with_(codes: torch.Tensor = weight.codes, scale: torch.Tensor = weight.scale) -> BlockScaledTensor:
        return BlockScaledTensor(codes, scale, weight.format, weight.shape, weight.global_scale)

    what = r"linear_nvfp4 with a weight of \[64, 128\]: "
    with pytest.raises(ValueError, match=what + r"bias has shape \[63\], expected \[64\]"):
        linear(x, weight, torch.zeros(63))
    with pytest.raises(ValueError, match=what + r"codes has shape \[64, 63\], expected \[64, 64\]"):
        linear(x, with_(codes=weight.codes[:, :63].contiguous()))
    with pytest.raises(ValueError, match=what + r"codes is not contiguous \(strides \(128, 2\)\)"):
        linear(x, with_(codes=torch.zeros(64, 128, dtype=torch.uint8)[:, ::2]))
    with pytest.raises(ValueError, match=what + "scale is on meta, x on cpu"):
        linear(x, with_(scale=weight.scale.to("meta")))
    with pytest.raises(ValueError, match=what + r"codes is torch\.int8, expected torch\.uint8"):
        linear(x, with_(codes=weight.codes.to(torch.int8)))
    with pytest.raises(ValueError, match=what + "global_scale is missing"):
        linear(x, BlockScaledTensor(weight.codes, weight.scale, weight.format, weight.shape))
    with pytest.raises(ValueError, match=what + r"scale has shape \[64, 8\], expected \[64, 2\]"):
        linear(x, with_(codes=prepack(weight).codes))


def test_prepacked_weights_go_to_hoppers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    weight = prepack(quantize(torch.randn(256, 1024), FORMATS["nvfp4"]))
    few, many = torch.randn(9, 1024).bfloat16(), torch.randn(4096, 1024).bfloat16()
    assert isinstance(dispatch.choose_launch(weight, few), tiles.GluonTiles)
    assert isinstance(dispatch.choose_launch(weight, many), tiles.PrefillTiles)
    # Those kernels multiply in BF16 only; other inputs get the weight dequantized.
    assert dispatch.choose_launch(weight, few.half()) is tiles.DENSE
    # (Gluon has no interpreter: the kernel that dequantizes is tested on a GPU.)
    monkeypatch.setattr(dispatch, "dequantize", lambda weight, dtype: restore(weight).dequantize(dtype))
    close(linear(few.half(), weight), few, restore(weight))


@pytest.mark.parametrize(("tokens", "used"), [(70, True), (9, False)])
def test_fp8_blocks_by_fp8_groups(monkeypatch: pytest.MonkeyPatch, tokens: int, used: bool) -> None:
    """With many tokens codes meet codes, with few the weight is decoded; the product is the same."""
    calls = []
    native = rounded_products.multiply_codes
    monkeypatch.setattr(
        rounded_products, "multiply_codes", lambda *args, **options: calls.append(args) or native(*args, **options)
    )
    monkeypatch.setattr(torch.Tensor, "to", _stay_on_cpu(torch.Tensor.to))
    weight, x = quantize(torch.randn(200, 256), FORMATS["fp8_block"]), torch.randn(tokens, 256).bfloat16()
    y = linear(x, weight, activation="fp8_group")
    assert len(calls) == (2 if used else 0)  # the first is the check
    close(y, fake_quantize(x.float(), FORMATS["fp8_group"]), weight)


def test_a_block_scaled_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first product that differs from float64 ends in a warning, and the weight is dequantized as elsewhere."""
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["b200"])
    weight, x = quantize(torch.randn(64, 128), FORMATS["mxfp8"]), torch.randn(9, 128).bfloat16()
    monkeypatch.setattr(
        rounded_products, "multiply_codes", lambda x, weight, *_, **__: x.new_zeros(len(x), weight.shape[0])
    )
    monkeypatch.setattr(torch.Tensor, "to", _stay_on_cpu(torch.Tensor.to))
    with pytest.warns(UserWarning, match=r"kernel for mxfp8 by mxfp8 is wrong on this GPU \(error 1\.0e\+00\)"):
        y = linear(x, weight, activation="mxfp8")
    close(y, fake_quantize(x, FORMATS["mxfp8"]), weight)


def _stay_on_cpu(to):
    def moved(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return (
            tensor if args and isinstance(args[0], str) and args[0].startswith("cuda") else to(tensor, *args, **options)
        )

    return moved
