"""Residual channels: the layer is its formula, the right channels are taken, and a checkpoint keeps them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tiny_models import llama
from torch import nn

import quant
from quant.base.errors import UserError
from quant.export.checkpoint.save import save
from quant.export.onnx.limits import check_model
from quant.formats.format import get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.solver_names import parse_solver
from quant.recipes.targets import TARGETS

NVFP4 = get_format("nvfp4")
ROWS = torch.randint(0, 64, (8, 48), generator=torch.Generator().manual_seed(0))


def nvfp4(x: np.ndarray, second: float) -> np.ndarray:
    """Rounds to NVFP4 by ml_dtypes, `[tokens, in]`, under a global scale."""
    blocks = x.reshape(len(x), -1, 16).astype(np.float32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(6) / np.float32(second)).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * np.float32(second)
    codes = np.clip(blocks / step, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float64) * step).reshape(x.shape)


def loud(tokens: int, columns: int, channels: list[int]) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
    x[:, channels] *= 30
    return x


def test_a_layer_multiplies_rounded_inputs_and_their_rounded_errors() -> None:
    channels = torch.tensor([*range(3, 33, 2), 40], dtype=torch.int32)
    dense = torch.randn(24, 64 + 16)
    weight, x = quantize(dense, NVFP4), loud(5, 64, [3, 40])
    second = torch.tensor(30 * 4 / (6 * 448))
    layer = QuantLinear(weight, None, NVFP4, second, channels=channels)
    assert (layer.in_features, layer.out_features, layer.weight.shape) == (64, 24, (24, 64))
    w = weight.dequantize().double().numpy()
    q = nvfp4(x.numpy(), float(second))
    error = nvfp4((x.numpy() - q.astype(np.float32))[:, channels.numpy()], float(second))
    expected = q @ w[:, :64].T + error @ w[:, 64:].T
    np.testing.assert_allclose(layer(x).double().numpy(), expected, rtol=1e-5, atol=1e-4)
    # Gradients pass both roundings straight through: the input moves q, and not its error.
    x.requires_grad_(True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize()[:, :64].sum(0).expand(5, 64))
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    "channels",
    [torch.tensor([0, 64]), torch.tensor([1, 1]).int(), torch.tensor([0, 48]).int(), torch.tensor([-1]).int()],
)
def test_channels_must_be_inputs(channels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="residual channels must be different int32 numbers from 0 to 47"):
        QuantLinear(quantize(torch.randn(8, 48 + len(channels)), NVFP4), channels=channels)


class Net(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], len(weight), bias=False)
        self.linear.weight.data = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_the_channels_that_cost_most_are_taken_and_gptq_solves_both_copies() -> None:
    x = loud(512, 256, list(range(5, 64, 4)))
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(2))
    weight[:, 32:48] = 0  # loud, and nobody hears them
    exact = x @ weight.T

    def error(solver: str) -> tuple[float, QuantLinear, Any]:
        done = quant.quantize(Net(weight.clone()), "nvfp4", x, solver=solver)
        return float((done.model(x) - exact).norm() / exact.norm()), done.model.linear, done.plan.layers[0]

    without, _, plain = error("gptq")
    less, layer, planned = error("residual:16+gptq")
    errors = nvfp4(x.numpy(), float(layer.input_scale)) - x.double().numpy()
    costs = (errors**2).mean(0) * (weight.double().numpy() ** 2).sum(0)
    assert layer.channels.tolist() == sorted(np.argsort(-costs)[:16].tolist())
    assert not set(layer.channels.tolist()) & set(range(32, 48))
    assert less < 0.75 * without
    assert plain.bits_per_weight == pytest.approx(4.5 + 32 / plain.numel)
    stored = quantize(torch.zeros(96, 272), NVFP4)
    nbytes = stored.codes.nbytes + stored.scale.nbytes + 4 + 16 * 4
    assert planned.nbytes == nbytes and planned.bits_per_weight == pytest.approx(8 * nbytes / (96 * 256))


class Pair(nn.Module):
    """Two layers of one input, whose outputs follow each other."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(512, len(weight), bias=False) for weight in (first, second))
        self.first.weight.data, self.second.weight.data = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x * x.abs())], dim=-1)


@pytest.mark.parametrize("rounding", ["gptq", "kfac"])
def test_without_a_number_a_block_spends_its_bits_where_they_gain_most(rounding: str) -> None:
    x = loud(512, 512, list(range(5, 500, 9)))
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(rows, 512, generator=generator) for rows in (16, 112)]
    done = quant.quantize(Pair(*weights), "nvfp4", x, solver=f"residual+{rounding}")
    layers = [done.model.first, done.model.second]
    budget = sum(weight.numel() for weight in weights) * 0.3 / 4.5
    spent = [0 if layer.channels is None else layer.channels.numel() * layer.out_features for layer in layers]
    assert budget - 16 * 16 < sum(spent) <= budget
    if rounding == "kfac":  # its gradients are drawn, so that the choice is not repeated here
        return
    gains, orders = [], []
    for inputs, weight, layer in zip((x, x * x.abs()), weights, layers, strict=True):
        errors = inputs.double().numpy() - nvfp4(inputs.numpy(), float(layer.input_scale))
        size = (weight.double().numpy() ** 2).sum(0)
        order = np.argsort(-(errors**2).mean(0) * size)
        left = errors[:, order] - nvfp4(errors[:, order].astype(np.float32), float(layer.input_scale))
        taken = ((errors[:, order] ** 2 - left**2).mean(0) * size[order]).reshape(-1, 16).sum(1)
        share = np.minimum.accumulate(taken) / ((errors**2).mean(0) * size).sum()
        gains += [(-gain * weight.numel() ** 0.75 / len(weight), len(orders), 16 * len(weight)) for gain in share]
        orders.append(order)
    counts = [0, 0]
    for _, index, added in sorted(gains, key=lambda gain: gain[0]):
        if added <= budget:
            budget, counts[index] = budget - added, counts[index] + 16
    assert all(counts) and counts[0] > counts[1]
    for layer, order, count in zip(layers, orders, counts, strict=True):
        assert layer.channels.tolist() == sorted(order[:count].tolist())


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    base = llama(gain=6)
    done = quant.quantize(copy.deepcopy(base), "nvfp4", ROWS, solver="residual:16+gptq")
    with pytest.warns(UserWarning, match="residual channels at run time: load the checkpoint with quant.load"):
        save(done.model, done.plan, tmp_path / "out")
    loaded = quant.load(tmp_path / "out")
    assert torch.equal(loaded(ROWS).logits, done.model(ROWS).logits)
    assert loaded.quantization_plan.quantized[0].parts.residual == 16
    state = done.model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.float(), state[name].float()), name
    with pytest.raises(ValueError, match="training has no step"):
        quant.prepare_qat(loaded)


def test_other_runtimes_refuse_by_name() -> None:
    done = quant.quantize(llama(num_hidden_layers=1), "nvfp4", ROWS, solver="residual:16+gptq")
    with pytest.raises(UserError, match=r"q_proj: its solver gave it 16 residual channels, which ONNX.* quant.load"):
        check_model(done.model)
    layer = done.plan.quantized[0]
    for name in ("vllm", "tensorrt-llm", "sglang"):
        target = TARGETS[name]
        assert any("residual channels of the input" in clause for clause in target.problems(layer)), name
        assert not target.problems(dataclasses.replace(layer, parts=type(layer.parts)()))


def test_names_and_formats_that_do_not_go_together() -> None:
    assert parse_solver("awq:merge+residual:32+gptq").residual == 32
    assert parse_solver("residual").residual < 0 and parse_solver("residual").rounding == "gptq"
    for wrong in ("residual:24", "lowrank:8+residual:16", "residual:16+gptq+autoround"):
        with pytest.raises(ValueError, match="residual channels are a multiple of 16, and stand without"):
            parse_solver(wrong)
    with pytest.raises(ValueError, match=r"q_proj: solver .* this layer has nvfp4@fp8; take 'awq\+gptq' for it"):
        quant.quantize(llama(num_hidden_layers=1), "nvfp4@fp8", ROWS, solver="awq+residual:16+gptq")


def test_a_guard_leaves_them_out_of_another_format() -> None:
    done = quant.quantize(llama(gain=6), "nvfp4", ROWS, solver="residual:16+gptq", guard="0.001 fp8_channel")
    assert {layer.weight.name for layer in done.plan.quantized if layer.weight} == {"fp8_channel"}
    assert {layer.solver for layer in done.plan.quantized} == {"gptq"}
    assert not any(layer.parts.residual for layer in done.plan.quantized)


def test_a_budget_counts_their_bits() -> None:
    options: dict[str, Any] = {"formats": "nvfp4", "solver": "residual:16+gptq"}
    done = quant.quantize(llama(), data=ROWS, bits=7, **options)
    chosen = [layer for layer in done.plan.quantized if layer.weight is not None]
    assert chosen and all(layer.parts.residual == 16 and layer.cost == layer.nbytes for layer in chosen)
    with pytest.raises(ValueError, match=r"a budget counts bits before any layer is solved.*residual:32"):
        quant.quantize(llama(), data=ROWS, bits=7, **{**options, "solver": "residual+gptq"})
    # 4.5 bits hold the weights, and not the repeated columns.
    with pytest.raises(ValueError, match="bits"):
        quant.quantize(llama(), data=ROWS, bits=5, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_gpu_computes_as_the_oracle(tokens: int) -> None:
    channels = torch.arange(5, 5 + 32 * 6, 6).int()
    x = loud(tokens, 256, channels.tolist()).bfloat16()
    second = x.float().abs().max() / (6 * 448)
    layer = QuantLinear(quantize(torch.randn(384, 288), NVFP4), None, NVFP4, second, channels=channels)
    expected = layer(x).double()
    got = copy.deepcopy(layer).cuda()(x.cuda()).double().cpu()
    assert float((got - expected).norm() / expected.norm()) < 2**-7  # outputs are rounded to BF16
