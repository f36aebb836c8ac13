"""Solvers that need no data are the scale rules of `formats`, over fusion groups with one global scale."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from quant.calibration.solvers.awq import POWERS, Awq, channel_scale
from quant.calibration.solvers.interfaces import GroupInputs, shared_global_scale
from quant.calibration.solvers.lowrank import LossMetric
from quant.calibration.solvers.registry import SOLVERS, get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats
from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize

NVFP4 = FORMATS["nvfp4"]


def group() -> dict[str, torch.Tensor]:
    return {"a.q": torch.randn(32, 64), "a.k": torch.randn(16, 64) * 3, "a.v": torch.randn(16, 64) * 0.2}


@pytest.mark.parametrize(("solver", "largest"), [("rtn", 448), ("mse", 256), ("four_over_six", 256)])
def test_members_of_a_group_share_the_global_scale_of_the_largest(solver: str, largest: int) -> None:
    weights = group()
    solved = solve_group(weights, {}, NVFP4, get_solver(solver))
    amax = max(float(w.abs().max()) for w in weights.values())
    expected = np.float32(amax) / np.float32(6 * largest)
    for name, weight in solved.items():
        assert weight.global_scale is not None
        assert float(weight.global_scale) == pytest.approx(float(expected), rel=2.5e-7)
        assert torch.equal(weight.global_scale, solved["a.q"].global_scale)
        alone = quantize(weights[name], NVFP4, rule=SOLVERS[solver].rule, global_scale=weight.global_scale)
        assert torch.equal(weight.codes, alone.codes)
        assert torch.equal(weight.scale.view(torch.uint8), alone.scale.view(torch.uint8))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "fp8_channel", "fp8_block", "int8", "int4"])
def test_formats_without_a_global_scale_are_solved_apart(format: str) -> None:
    weights = {"q": torch.randn(32, 128), "k": torch.randn(16, 128) * 3}
    solved = solve_group(weights, {}, FORMATS[format], get_solver("rtn"))
    for name, weight in weights.items():
        assert solved[name].global_scale is None
        assert torch.equal(solved[name].dequantize(), quantize(weight, FORMATS[format]).dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("solver", ["rtn", "mse", "gptq"])
def test_members_of_a_group_share_a_per_tensor_scale(solver: str, dtype: torch.dtype) -> None:
    """What vLLM does to merged FP8 matrices, `requantize_with_max_scale`, then changes nothing.

    One scale costs next to nothing: E4M3 rounds relative to the value, over 15 binades.
    """
    inputs = torch.randn(256, 64)
    stats = LayerStats(256, inputs.t() @ inputs / 256)
    weights = {name: weight.to(dtype) for name, weight in group().items()}
    format = FORMATS["fp8"]
    solved = solve_group(weights, dict.fromkeys(weights, stats), format, get_solver(solver))
    largest = max(float(weight.scale) for weight in solved.values())
    for name, weight in weights.items():
        values = solved[name].dequantize().numpy()
        again = (values / np.float32(largest)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(again.view(np.uint8), solved[name].codes.view(torch.uint8).numpy())
        apart = solve_group({name: weight}, {name: stats}, format, get_solver(solver))[name]
        exact = weight.double()
        moment = (inputs.t() @ inputs).double() if solver == "gptq" else torch.eye(64, dtype=torch.float64)
        errors = [found.dequantize(torch.float64) - exact for found in (solved[name], apart)]
        shared, own = (float(((error @ moment) * error).sum()) ** 0.5 for error in errors)
        assert shared <= 1.02 * own


@pytest.mark.parametrize("solver", ["modelopt", "compressed_tensors"])
def test_peers_give_members_of_a_group_their_own_per_tensor_scales(solver: str) -> None:
    weights = group()
    solved = solve_group(weights, {}, FORMATS["fp8"], get_solver(solver))
    for name, weight in weights.items():
        assert float(solved[name].scale) == pytest.approx(float(weight.abs().max()) / 448, rel=1e-6)


def test_rounding_to_nearest_against_ml_dtypes() -> None:
    """MXFP8 by hand: the smallest power of two at which nothing saturates, elements cast by ml_dtypes."""
    weight = torch.randn(8, 64) * torch.logspace(-6, 6, 8)[:, None]
    solved = solve_group({"w": weight}, {}, FORMATS["mxfp8"], get_solver("rtn"))["w"]
    blocks = weight.numpy().reshape(8, 2, 32).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
    expected = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    np.testing.assert_array_equal(solved.dequantize(torch.float64).numpy(), expected.reshape(8, 64))


@pytest.mark.parametrize("rule", ["max", "mse"])
def test_the_shared_scale_survives_being_stored_as_its_reciprocal(rule: str) -> None:
    """compressed-tensors stores 1 / scale in float32, ModelOpt the scale: both give the same float32 back."""
    amax = torch.rand(20000) * torch.logspace(-20, 20, 20000)
    scale = shared_global_scale(amax, NVFP4, rule)
    stored = (1 / scale.double()).float()
    assert torch.equal((1 / stored.double()).float(), scale)
    exact = amax.double() / (6 * (448 if rule == "max" else 256))
    assert float(((scale.double() - exact) / exact).abs().max()) < 2.5 * 2.0**-24


def test_no_block_scale_of_a_group_overflows() -> None:
    """Rounding through the reciprocal may make the scale smaller by an ulp; amax / 6 / scale is then above 448."""
    for seed in range(200):
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
        solved = solve_group({"w": weight}, {}, NVFP4, get_solver("rtn"))["w"]
        step = solved.scale_values().repeat_interleave(16, -1)
        largest = weight.abs() == weight.abs().max()
        error = ((solved.dequantize() - weight).abs() / step)[largest]
        assert float(error.max()) < 0.26  # 6 · 448 / 448 to within the rounding of an E4M3 scale
        assert float(solved.scale.float().max()) == 448


def test_a_stack_of_experts_has_one_global_scale_each() -> None:
    stack = torch.randn(3, 16, 64) * torch.tensor([1.0, 7.0, 0.01]).view(3, 1, 1)
    solved = solve_group({"experts": stack}, {}, NVFP4, get_solver("rtn"))["experts"]
    for index in range(3):
        alone = solve_group({"w": stack[index]}, {}, NVFP4, get_solver("rtn"))["w"]
        assert torch.equal(solved.matrix(index).dequantize(), alone.dequantize())
        assert torch.equal(solved.global_scale[index], alone.global_scale)


def test_a_group_of_zeros() -> None:
    solved = solve_group({"a": torch.zeros(8, 32), "b": torch.zeros(8, 32)}, {}, NVFP4, get_solver("rtn"))
    assert all(torch.equal(w.dequantize(), torch.zeros(8, 32)) for w in solved.values())


def test_better_rules_have_smaller_errors() -> None:
    weight = torch.randn(64, 256)
    error = {
        name: float((solve_group({"w": weight}, {}, NVFP4, get_solver(name))["w"].dequantize() - weight).square().sum())
        for name in ("rtn", "four_over_six", "mse")
    }
    assert error["mse"] < error["four_over_six"] < error["rtn"]


@pytest.mark.parametrize(("solver", "format"), [("ocp", "nvfp4"), ("even", "fp8"), ("four_over_six", "mxfp4")])
def test_a_rule_that_a_format_has_not_is_an_error(solver: str, format: str) -> None:
    with pytest.raises(ValueError, match=rf"scale rule '{solver}' is defined for .*, not for {format}"):
        solve_group({"w": torch.randn(16, 64)}, {}, FORMATS[format], get_solver(solver))


def test_bad_weights_are_named() -> None:
    weights = group()
    weights["a.k"][0, 0] = torch.inf
    with pytest.raises(ValueError, match=re.escape("a.k [16, 64]: 1 NaN or infinite value(s)")):
        solve_group(weights, {}, NVFP4, get_solver("rtn"))


def test_an_unknown_solver_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown solver 'magic'; known solvers: rtn, mse, four_over_six"):
        get_solver("magic")


def test_awq_judges_by_the_loss_of_the_model_where_gradients_are_measured() -> None:
    """Lᵀ W has the squared error of W under A = L Lᵀ; an output that the model ignores does not count."""
    outer = torch.randn(12, 40)
    moment, weight, error = outer @ outer.t() / 40, torch.randn(12, 32), torch.randn(7, 32)
    expected = torch.einsum("to,op,tp->t", error @ weight.t(), moment, error @ weight.t())
    found = (error @ LossMetric([moment]).enter(weight).t()).square().sum(1)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    blocks = [moment[:8, :8], moment[8:, 8:]]
    expected = torch.einsum("to,op,tp->t", error @ weight.t(), torch.block_diag(*blocks), error @ weight.t())
    torch.testing.assert_close(
        (error @ LossMetric(blocks).enter(weight).t()).square().sum(1), expected, rtol=0.01, atol=0
    )
    # Where rounding made A indefinite, a larger diagonal helps; in the end every output counts by itself.
    for coupling, diagonal, remaining in ((1.05, 1.1, 1.05), (9.0, 1.0, 0.0)):
        metric = LossMetric([torch.tensor([[1.0, coupling], [coupling, 1.0]])])
        factor = metric.enter(torch.eye(2)).t()
        expected = torch.tensor([[diagonal, remaining], [remaining, diagonal]])
        torch.testing.assert_close(factor @ factor.t(), expected)
        torch.testing.assert_close(metric.leave(factor.t()), torch.eye(2))
    # Channels 0 to 15 are loud and matter to the ignored output alone.
    weight = torch.zeros(2, 32)
    weight[0, :16], weight[1, 16:] = 1, torch.rand(16) + 0.5
    sample = torch.randn(256, 32) * torch.logspace(0, 2, 32)
    inputs = GroupInputs(sample, sample.abs().mean(0), sample.abs().amax(0), [torch.diag(torch.tensor([0.0, 1.0]))])
    scale = Awq(inputs_alone=True)(weight, inputs, NVFP4, NVFP4, None)

    def loss(scale: torch.Tensor) -> float:
        off = fake_quantize(sample / scale, NVFP4) * scale - sample
        return float((off @ weight[1]).square().mean())

    others = [channel_scale(inputs.mean_abs, weight, power, 0.0, None) for power in POWERS]
    assert loss(scale) <= min(map(loss, others)) * 1.001
