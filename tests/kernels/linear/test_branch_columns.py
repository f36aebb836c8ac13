"""A low-rank branch as columns of an FP8 product is as exact as one in BF16; the kernel gives the oracle's codes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from quant.formats.format import FORMATS, INPUT_FORMATS
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base import weight_layout
from quant.kernels.linear import quantized_module
from quant.kernels.linear.branch_columns import branch_linear, widened
from quant.kernels.linear.quant_linear import QuantLinear

TOKEN = INPUT_FORMATS["fp8_token"]


def case(size: float = 1.0, rank: int = 16, device: str = "cpu") -> tuple[Tensor, BlockScaledTensor, Tensor, Tensor]:
    """x with an outlier channel, a zero row and a tiny one; rows of the weight differ; a branch of `size`."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 208, generator=generator), torch.randn(224, 208, generator=generator)
    x[:, 7] *= 30
    x[3], x[5] = 0, x[5] * 1e-5
    w *= torch.rand(224, 1, generator=generator) * 3 + 0.1
    u, s, v = torch.linalg.svd(w)
    up = (u[:, :rank] * s[:rank].sqrt()).bfloat16().contiguous()
    down = (size * s[:rank].sqrt()[:, None] * v[:rank]).bfloat16().contiguous()
    residual = w - up.float() @ down.float() / size
    weight = quantize(residual.to(device), FORMATS["fp8_channel"])
    return x.bfloat16().to(device), weight, down.to(device), up.to(device)


def check_product(size: float, device: str) -> None:
    """Compares with float64 of the rounded parts, in units of the branch: BF16 errs by 2.5e-3 there."""
    x, weight, down, up = case(size, device=device)
    wide, unit = widened(weight, up)
    h = x @ down.t()
    codes, scale = torch.ops.quant.branch_columns(x, h, unit)
    y = (codes.double() * scale.double()) @ (wide.codes.double() * weight.scale.double()).t()
    branch = h.double() @ up.double().t()
    exact = fake_quantize(x.float(), TOKEN).double() @ weight.dequantize(torch.float64).t() + branch
    assert (y - exact).norm() < 1.2e-3 * branch.norm() + 1e-5 * exact.norm()
    # Rounded to BF16 by the library, which sums in fewer bits on a GPU.
    product = branch_linear(x, wide, None, down, unit)
    assert (product.double() - exact).norm() < 4e-3 * exact.norm()
    row = (product.double() - exact)[5].norm() / exact[5].norm()
    assert row < 6e-3


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_branch_keeps_its_digits(size: float) -> None:
    check_product(size, "cpu")


def test_codes_of_x_are_those_of_plain_rounding() -> None:
    x, weight, down, up = case()
    codes, scale = torch.ops.quant.branch_columns(x, x @ down.t(), widened(weight, up)[1])
    plain = quantize(x.float(), TOKEN)
    factor = scale / plain.scale
    assert torch.equal(factor.log2(), factor.log2().round().clamp(min=0)) and factor.amax() > 1
    left, right = codes[:, : x.shape[1]].float() * scale, plain.dequantize()
    # Below 2^-6 of the larger scale, codes are multiples of 2^-9.
    assert torch.equal(left[right.abs() > scale / 64], right[right.abs() > scale / 64])
    assert ((left - right).abs() <= scale / 500).all()


def test_nan_and_infinity_stay_visible() -> None:
    x, weight, down, up = case()
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    codes, scale = torch.ops.quant.branch_columns(x, x @ down.t(), widened(weight, up)[1])
    assert scale[:2].isnan().all() and scale[2:].isfinite().all() and codes[2:].float().isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_kernel_gives_the_codes_of_the_oracle(size: float) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    from quant.kernels.rounding.portable_branch import branch_rows_to_codes

    x, weight, down, up = case(size)
    x[0, 0], x[1, 1], x[2] = float("nan"), float("inf"), x[2] * 1e-35
    h, unit = x @ down.t(), widened(weight, up)[1]
    expected, scale = torch.ops.quant.branch_columns(x, h, unit)
    with interpreted():
        found, own = branch_rows_to_codes(x, h, unit)
    assert torch.equal(own.nan_to_num(-1.0), scale.nan_to_num(-1.0))
    # Zeros may differ in their signs.
    assert torch.equal(found[2:].float(), expected[2:].float())


@pytest.mark.parametrize("arch", [90, 120])
def test_ptx(arch: int) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from assembler import assemble

    from quant.kernels.base.ptx import compile_kernel
    from quant.kernels.rounding.portable_branch import branch_rows_to_codes_kernel

    types = {"x": "*bf16", "h": "*bf16", "unit": "*fp32", "codes": "*fp8e4nv", "scale": "*fp32", "K": "i32"}
    constants = {"largest": 448.0, "rank": 32, "width": 4096}
    compiled = compile_kernel(
        branch_rows_to_codes_kernel, types, constants, arch=arch, num_warps=4, num_stages=1, multiples=("K",)
    )
    assert "ld.global.v4.b32" in compiled.ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert assemble(compiled).spilled == 0


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: True)


def layer() -> tuple[QuantLinear, Tensor]:
    x, weight, down, up = case()
    bias = torch.linspace(-1, 1, 224).bfloat16()
    return QuantLinear(weight, bias, TOKEN, lowrank=(down, up), dtype=torch.bfloat16), x.view(2, 35, 208)


def test_layer_multiplies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = layer()
    expected, saved = plain(x), {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    as_on_hopper(monkeypatch)
    wide, _ = layer()
    found = wide(x)
    assert wide.codes.shape == (224, 208 + 4 * 16)
    assert 0 < (found - expected).float().norm() < 5e-3 * expected.float().norm()
    # Everything else sees the weight as it was.
    assert wide.state_dict().keys() == saved.keys()
    for name, tensor in wide.state_dict().items():
        assert torch.equal(tensor.float(), saved[name].float()) and tensor.is_contiguous()
    assert torch.equal(wide.weight, plain.weight)
    # Compiled, copied, loaded again.
    compiled = torch.compile(wide, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), found)
    assert torch.equal(copy.deepcopy(wide)(x), found)
    other, _ = layer()
    other(x)
    saved["lowrank_up"] = saved["lowrank_up"] * 4
    other.load_state_dict(saved)
    more = (other(x).float() - found.float()) / 3
    branch = plain.parts.branch(x)
    assert branch is not None
    assert (more - branch.float()).norm() < 1e-2 * branch.float().norm()


def test_other_inputs_take_the_layer_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = layer()
    expected = plain(x)
    in_float32 = layer()[0].to(torch.float32)(x.float())
    as_on_hopper(monkeypatch)
    wide, _ = layer()
    wide(x)
    grown = x.clone().requires_grad_()
    y = wide(grown)
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert grown.grad is not None
    gradient = torch.ones(70, 224).double() @ plain.weight.double()
    assert (grown.grad.view(70, 208).double() - gradient).norm() < 1e-2 * gradient.norm()
    assert torch.equal(wide.to(torch.float32)(x.float()), in_float32)
    assert wide.codes.shape == (224, 208)
    with torch.autocast("cpu", torch.bfloat16):
        fresh, _ = layer()
        assert torch.equal(fresh(x.float()), fresh(x)) and fresh.codes.shape == (224, 272)
    quantized_module.restore_layout(fresh)
    assert not weight_layout.is_prepacked(fresh.stored_weight)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for size in (1e-3, 1.0, 1e3):
        check_product(size, "cuda")
    x, weight, down, up = case(device="cuda")
    h, unit = x @ down.t(), widened(weight, up)[1]
    found = torch.ops.quant.branch_columns(x, h, unit)
    for ours, expected in zip(found, torch.ops.quant.branch_columns(x.cpu(), h.cpu(), unit.cpu()), strict=True):
        assert torch.equal(ours.cpu().float(), expected.float())
