"""Packages that are compiled for a GPU and run there: convolutions, a ResNet, and attention in FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import serving_samples
import tiny_models
import torch
from torch import nn

import quant
from quant.calibration.attention_scales import collect_attention_scales
from quant.export.aoti.package import load_aoti
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv, weight_of_conv

pytestmark = pytest.mark.gpu
CONVOLUTIONS = [
    ("fp8", "fp8", True),
    ("fp8_channel", "fp8_token", False),
    ("fp8", None, False),
    ("int8", "int8_tensor", True),
    ("int8", "int8_token", False),
    ("int8", None, False),
]


class Convolutions(nn.Module):
    """A strided, a grouped, a dilated and a transposed convolution after each other, in every pair of formats."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList()
        for weight, activation, static in CONVOLUTIONS:
            plain = [
                nn.Conv2d(4, 16, 3, stride=2, padding=1),
                nn.Conv2d(16, 16, 3, padding="same", groups=4, bias=False),
                nn.Conv2d(16, 8, 3, padding=2, dilation=2, padding_mode="reflect"),
                nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2, output_padding=1),
            ]
            rounding, scale = FORMATS[activation] if activation else None, torch.tensor(0.01) if static else None
            self.paths.append(
                nn.Sequential(
                    *(
                        QuantConv(quantize(weight_of_conv(conv), FORMATS[weight]), conv, rounding, scale)
                        for conv in plain
                    )
                )
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(path(x) for path in self.paths)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().double() - expected.cpu().double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convolutions(package: Callable[..., Path], tmp_path: Path, dtype: torch.dtype) -> None:
    """Compiled for two images, run on three; the reference is eager PyTorch on the CPU."""
    torch.manual_seed(0)
    model, images = Convolutions().to(dtype), torch.randn(3, 4, 20, 20).to(dtype)
    expected = [y.detach() for y in model(images)]
    path = package(model, tmp_path / "m.pt2", {"x": images[:2]}, dims={"x": {0: "batch"}}, device="cuda")
    for case, got, right in zip(CONVOLUTIONS, load_aoti(path)(x=images.cuda()), expected, strict=True):
        # cuDNN may multiply FP32 in TF32, and rounded inputs near a tie round the other way.
        assert error(got, right) < (0.05 if case[1] else 0.02), case


@pytest.mark.parametrize("recipe", ["fp8", "int8_static"])
def test_a_resnet(package: Callable[..., Path], tmp_path: Path, recipe: str) -> None:
    model, images = tiny_models.resnet(gain=4.0).requires_grad_(False), torch.randn(8, 3, 64, 64)
    model = quant.quantize(model, recipe, [images]).model.eval()
    assert any(isinstance(module, QuantConv) for module in model.modules())
    expected = model(images).logits
    example = {"pixel_values": images[:2]}
    path = package(model, tmp_path / "m.pt2", example, dims={"pixel_values": {0: "batch"}}, device="cuda")
    with torch.no_grad():
        eager = error(model(images.cuda()).logits, expected)
    assert error(load_aoti(path)(pixel_values=images.cuda()), expected) < max(0.02, 3 * eager)


@pytest.mark.parametrize(("kind", "format"), [("llama-64", "fp8"), ("llama-128", "nvfp4a16")])
def test_attention_in_fp8(package: Callable[..., Path], tmp_path: Path, kind: str, format: str) -> None:
    """One pass of a decoder, whose attention rounds queries, keys, values and probabilities to E4M3."""
    ids, fp8 = torch.randint(0, 64, (4, 64)), FORMATS["fp8"]
    model = quant.quantize(serving_samples.decoder(kind), format, ids, solver="rtn").model.to(torch.bfloat16)
    scales = collect_attention_scales(model, ids, kv_format=fp8, attention_format=fp8)
    options = {"dims": {"input_ids": {0: "batch", 1: "sequence"}}, "ranges": {"sequence": (2, 128)}, "device": "cuda"}
    path = package(model, tmp_path / "model.pt2", {"input_ids": ids}, attention_scales=scales, **options)
    ids = ids.cuda()[:3, :50]  # rows with gaps, which `load_aoti` closes
    with torch.no_grad():
        in_16_bit = model(ids, use_cache=False).logits
    # E4M3 moves a value by 2.6 % on average; rounded inputs of linears move by BF16's order of sums as well.
    assert 0.01 < error(load_aoti(path)(input_ids=ids), in_16_bit) < 0.25
