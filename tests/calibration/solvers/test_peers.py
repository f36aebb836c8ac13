"""The solvers of peers give what these tools wrote for the golden model, byte for byte, from plan to solved weight."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from samples import GOLDENS

from quant.calibration.solvers.registry import SOLVERS, get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor

FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"o_proj"}, {"down_proj"})


@cache
def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / name / "model.safetensors")


def groups() -> Iterator[dict[str, torch.Tensor]]:
    """Weights of the golden model, fusion group by fusion group."""
    weights = {n.removesuffix(".weight"): w for n, w in golden("base").items() if n.endswith("proj.weight")}
    parents = dict.fromkeys(name.rpartition(".")[0] for name in weights)
    for parent in parents:
        for members in FUSED:
            group = {f"{parent}.{m}": weights[f"{parent}.{m}"] for m in members if f"{parent}.{m}" in weights}
            if group:
                yield group


def solve(format: str, solver: str) -> dict[str, BlockScaledTensor]:
    solved = {}
    for group in groups():
        solved.update(solve_group(group, {}, FORMATS[format], get_solver(solver)))
    assert len(solved) == 14
    return solved


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_bytes(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert (ours.dtype, ours.numel()) == (theirs.dtype, theirs.numel()), what
    assert int((bytes_of(ours) != bytes_of(theirs)).sum()) == 0, what


MODELOPT = {
    "fp8": "fp8",
    "fp8pcpt": "fp8_channel",
    "nvfp4": "nvfp4",
    "w4a16": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
}


@pytest.mark.parametrize(("checkpoint", "format"), MODELOPT.items())
def test_modelopt(checkpoint: str, format: str) -> None:
    tensors = golden(f"modelopt/{checkpoint}")
    for name, weight in solve(format, "modelopt").items():
        assert_bytes(weight.scale, tensors[f"{name}.weight_scale"], f"{name}.weight_scale")
        assert_bytes(weight.codes, tensors[f"{name}.weight"], f"{name}.weight")
        if weight.global_scale is not None:
            assert_bytes(weight.global_scale, tensors[f"{name}.weight_scale_2"], f"{name}.weight_scale_2")


COMPRESSED_TENSORS = {
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4",
    "FP8": "fp8",
    "FP8_DYNAMIC": "fp8_channel",
    "FP8_BLOCK": "fp8_block",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}


@pytest.mark.parametrize(("checkpoint", "format"), COMPRESSED_TENSORS.items())
def test_compressed_tensors(checkpoint: str, format: str) -> None:
    tensors = golden(f"compressed_tensors/{checkpoint}")
    for name, weight in solve(format, "compressed_tensors").items():
        stored = tensors[f"{name}.weight_scale"]
        scale = weight.scale.to(stored.dtype)
        assert torch.equal(scale.float(), weight.scale.float()), f"{name}: the scale loses by being stored"
        assert_bytes(scale, stored, f"{name}.weight_scale")
        codes = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
        assert codes is not None
        assert_bytes(weight.codes, codes, f"{name}.weight")
        if weight.global_scale is not None:
            reciprocal = (1 / weight.global_scale.double()).float()
            assert_bytes(reciprocal, tensors[f"{name}.weight_global_scale"], f"{name}.weight_global_scale")


@pytest.mark.parametrize("solver", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_channel", "fp8_block"])
def test_a_peer_is_never_better_than_the_tensor_it_rounds_allows(solver: str, format: str) -> None:
    """Their rounding of quotients costs accuracy and saves none: squared error is at least ours with their scales."""
    from quant.formats.tensor import quantize_with_scale

    for group in groups():
        for name, theirs in solve_group(group, {}, FORMATS[format], SOLVERS[solver]).items():
            weight = group[name]
            scale = theirs.scale_values() / (1 if theirs.global_scale is None else theirs.global_scale.double())
            ours = quantize_with_scale(weight, theirs.format, scale.float(), theirs.global_scale)
            errors = [(q.dequantize(torch.float64) - weight.double()).square().sum() for q in (ours, theirs)]
            assert errors[0] <= errors[1] * (1 + 1e-12), name


@pytest.mark.parametrize("solver", ["modelopt", "compressed_tensors"])
def test_peers_refuse_nan_with_the_layer_and_the_count(solver: str) -> None:
    weight = torch.randn(16, 64)
    weight[2, :3] = torch.nan
    with pytest.raises(ValueError, match=r"some\.layer \[16, 64\]: 3 NaN or infinite"):
        solve_group({"some.layer": weight}, {}, FORMATS["nvfp4"], SOLVERS[solver])


@pytest.mark.parametrize("solver", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8"])
def test_experts_are_quantized_one_by_one(solver: str, format: str) -> None:
    stack = torch.randn(3, 32, 64).bfloat16() * torch.tensor([1.0, 4.0, 0.1]).bfloat16().view(3, 1, 1)
    together = solve_group({"experts": stack}, {}, FORMATS[format], SOLVERS[solver])["experts"]
    for index in range(3):
        alone = solve_group({"one": stack[index]}, {}, FORMATS[format], SOLVERS[solver])["one"]
        assert_bytes(together.matrix(index).codes, alone.codes, "codes")
        assert_bytes(together.matrix(index).scale, alone.scale, "scale")
        assert torch.equal(together.matrix(index).dequantize(), alone.dequantize())


@pytest.mark.parametrize("solver", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "fp8_channel"])
def test_a_weight_of_zeros_stays_zero(solver: str, format: str) -> None:
    solved = solve_group({"zero": torch.zeros(16, 64).bfloat16()}, {}, FORMATS[format], SOLVERS[solver])["zero"]
    assert torch.equal(solved.dequantize(), torch.zeros(16, 64))
