"""Our bytes are those of ModelOpt and llm-compressor for the same tiny model (tests/data/goldens)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from samples import GOLDENS

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, quantize, quantize_with_scale

NVFP4 = FORMATS["nvfp4"]
# Layers that a runtime runs as one matrix, and whose second-level scale is therefore shared.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@cache
def checkpoint(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / name / "model.safetensors")


def layers() -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in checkpoint("base").items():
        if name.endswith("proj.weight"):
            yield name.removesuffix(".weight"), weight


def group_amax(name: str) -> torch.Tensor:
    parent, _, leaf = name.rpartition(".")
    members = next((group for group in FUSED if leaf in group), (leaf,))
    weights = [checkpoint("base")[f"{parent}.{member}.weight"] for member in members]
    return torch.stack([weight.float().abs().amax() for weight in weights]).amax()


def assert_bytes(ours: torch.Tensor, golden: torch.Tensor, what: str) -> None:
    assert (ours.dtype, ours.numel()) == (golden.dtype, golden.numel()), what
    differ = int((ours.reshape(-1).view(torch.uint8) != golden.reshape(-1).view(torch.uint8)).sum())
    assert differ == 0, f"{what}: {differ} bytes differ"


@pytest.mark.parametrize(
    ("golden", "format", "largest"),
    # Over blocks of 32 ModelOpt maps the group's amax to a block scale of 448 / 6, not of 448.
    [("w4a16", NVFP4, 2688), ("nvfp4", NVFP4, 2688), ("w4a8nvfp4", replace(NVFP4, block=(1, 32)), 448)],
    ids=["w4a16", "nvfp4", "w4a8nvfp4"],
)
def test_modelopt_nvfp4(golden: str, format: Format, largest: int) -> None:
    tensors = checkpoint(f"modelopt/{golden}")
    for name, weight in layers():
        global_scale = group_amax(name) / largest
        assert_bytes(global_scale, tensors[f"{name}.weight_scale_2"], f"{name}.weight_scale_2")
        quantized = quantize(weight, format, global_scale=global_scale)
        assert_bytes(quantized.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        assert_bytes(quantized.codes, tensors[f"{name}.weight"], f"{name}.weight")


def test_modelopt_mxfp8() -> None:
    tensors = checkpoint("modelopt/mxfp8")
    for name, weight in layers():
        quantized = quantize(weight, FORMATS["mxfp8"])
        assert_bytes(quantized.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        assert_bytes(quantized.codes, tensors[f"{name}.weight"], f"{name}.weight")


def test_modelopt_mxfp4() -> None:
    """Equal scales and elements, except that ModelOpt rounds ties towards zero here, and ours go to even.

    Dividing a BF16 weight by a power of two is exact, so ties are common: 0.75, 1.75 and 3.5 differ.
    """
    tensors = checkpoint("modelopt/mxfp4")
    for name, weight in layers():
        quantized = quantize(weight, FORMATS["mxfp4"])
        assert_bytes(quantized.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        quotient = weight.float() / quantized.scale_values().repeat_interleave(32, dim=-1)
        towards_zero = quotient * torch.where(torch.isin(quotient.abs(), torch.tensor([0.75, 1.75, 3.5])), 0.99, 1.0)
        nudged = quantize_with_scale(towards_zero, FORMATS["mxfp4"], torch.ones(quantized.scale.shape))
        assert_bytes(nudged.codes, tensors[f"{name}.weight"], f"{name}.weight")


@pytest.mark.parametrize(("golden", "format"), [("MXFP4", "mxfp4"), ("MXFP8", "mxfp8")])
def test_compressed_tensors_mx(golden: str, format: str) -> None:
    tensors = checkpoint(f"compressed_tensors/{golden}")
    packed = "weight_packed" if format == "mxfp4" else "weight"
    for name, weight in layers():
        quantized = quantize(weight, FORMATS[format], rule="even")
        assert_bytes(quantized.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        assert_bytes(quantized.codes, tensors[f"{name}.{packed}"], f"{name}.{packed}")


@pytest.mark.parametrize("golden", ["NVFP4", "NVFP4A16"])
def test_compressed_tensors_nvfp4(golden: str) -> None:
    """With its scales our codes are its codes.

    The solver `compressed_tensors` makes those scales too, see test_checkpoint_roundtrip.py.
    """
    tensors = checkpoint(f"compressed_tensors/{golden}")
    for name, weight in layers():
        scale, reciprocal = tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_global_scale"]
        quantized = quantize_with_scale(weight, NVFP4, scale.float(), 1 / reciprocal.double().reshape(()))
        assert_bytes(quantized.scale, scale, f"{name}.weight_scale")
        assert_bytes(quantized.codes, tensors[f"{name}.weight_packed"], f"{name}.weight_packed")


@pytest.mark.parametrize(("golden", "format"), [("fp8pcpt", "fp8_channel"), ("fp8blk", "fp8_block")])
def test_modelopt_fp8_by_channel_and_block(golden: str, format: str) -> None:
    """Byte-equal, with the float32 scales that ModelOpt writes; one block's scale is shared over q, k and v."""
    tensors = checkpoint(f"modelopt/{golden}")
    for name, weight in layers():
        quantized = quantize(weight.float(), FORMATS[format])
        if quantized.scale.numel() == 1:
            quantized = quantize_with_scale(weight, FORMATS[format], (group_amax(name) / 448).reshape(1, 1))
        assert_bytes(quantized.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        assert_bytes(quantized.codes, tensors[f"{name}.weight"], f"{name}.weight")


def codes_of_bfloat16_quotient(weight: torch.Tensor, format: Format, scale: torch.Tensor) -> torch.Tensor:
    """Our rounding of w / scale after that quotient was rounded to BF16, which is what both tools round."""
    rows, columns = format.block_shape(weight.shape)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    quotient = (weight.double() / spread.double()).to(torch.float32).bfloat16()
    return quantize_with_scale(quotient.float(), format, torch.ones_like(scale)).codes


def squared_error(quantized: BlockScaledTensor, codes: torch.Tensor, weight: torch.Tensor) -> float:
    values = replace(quantized, codes=codes).dequantize(torch.float64)
    return float((values - weight.double()).square().sum())


@pytest.mark.parametrize(
    ("golden", "format", "stored"),
    [
        ("modelopt/fp8", "fp8", torch.float32),
        ("compressed_tensors/FP8", "fp8", torch.bfloat16),
        ("compressed_tensors/FP8_DYNAMIC", "fp8_channel", torch.bfloat16),
        ("compressed_tensors/FP8_BLOCK", "fp8_block", torch.bfloat16),
    ],
)
def test_fp8_whose_quotient_the_tool_rounds_to_bfloat16_first(golden: str, format: str, stored: torch.dtype) -> None:
    tensors = checkpoint(golden)
    differ = total = 0
    for name, weight in layers():
        # A float32 weight keeps a float32 scale; that of a BF16 weight is rounded to BF16, as it will be stored.
        quantized = quantize(weight.to(stored), FORMATS[format])
        assert_bytes(quantized.scale.to(stored), tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        theirs = tensors[f"{name}.weight"]
        twice_rounded = codes_of_bfloat16_quotient(weight, FORMATS[format], quantized.scale)
        assert_bytes(twice_rounded, theirs, f"{name}.weight")
        assert squared_error(quantized, quantized.codes, weight) <= squared_error(quantized, theirs, weight)
        # Where the codes differ, the quotient lay within a BF16 rounding of a tie: the codes are neighbours.
        apart = (quantized.codes.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
        assert int(apart.max()) <= 1
        differ += int((apart > 0).sum())
        total += weight.numel()
    assert 0.01 < differ / total < 0.07
