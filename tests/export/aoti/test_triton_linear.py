"""Linears of packages for GPUs: launches of our kernels, interpreted here and compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from compiler import compiled_for
from interpreter import interpreted

from quant.export.aoti.op_bodies import FEW, TritonLinear, dequantize, round_input
from quant.export.onnx.trace import decomposed, trace_for_torch
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize, round_activation
from quant.kernels.linear.oracle import reference_linear
from quant.kernels.linear.quant_linear import LINEAR, QuantLinear


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches happen instead of becoming nodes of a graph."""
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)


def linear(weight: str, activation: str | None, static: bool, bias: bool = True) -> QuantLinear:
    dense = torch.randn(48, 128) * torch.logspace(-2, 1, 128)
    rounding = FORMATS[activation] if activation else None
    scale = torch.tensor(0.013) if static else None
    return QuantLinear(quantize(dense, FORMATS[weight]), torch.randn(48) if bias else None, rounding, scale)


def arguments(layer: QuantLinear, x: torch.Tensor) -> tuple[object, ...]:
    weight, rounding = layer.stored_weight, layer.activation_format
    name = rounding.name if rounding else ""
    scales = (weight.scale, weight.global_scale)
    return x, weight.codes, *scales, layer.bias, layer.input_scale, weight.format.name, name


@pytest.mark.parametrize(
    ("weight", "activation", "static"),
    [("nvfp4", None, False), ("nvfp4", "nvfp4", True), ("mxfp6", "mxfp8", False), ("int4", "int8_token", False)],
)
@pytest.mark.parametrize("tokens", [5, FEW + 3])
def test_a_linear_is_the_oracles(at_once: None, weight: str, activation: str | None, static: bool, tokens: int) -> None:
    """Tiles for few tokens and for many, of which one grid is empty."""
    layer, x = linear(weight, activation, static), torch.randn(1, tokens, 128, dtype=torch.bfloat16)
    with interpreted(), torch.no_grad():
        got = TritonLinear()(*arguments(layer, x)).double()
    expected = reference_linear(
        x.double() if activation is None else round_activation(x, FORMATS[activation], layer.input_scale).double(),
        layer.stored_weight, None if layer.bias is None else layer.bias.double(), None, None,
    )  # fmt: skip
    # Weights and the result are rounded to BF16 once each.
    assert float((got - expected).norm() / expected.norm()) < 2.0**-8


@pytest.mark.parametrize(
    ("activation", "static"),
    [("nvfp4", True), ("nvfp4", False), ("mxfp8", False), ("fp8", True), ("fp8", False), ("int8_token", False)],
)
def test_inputs_are_rounded_as_the_oracle_rounds_them(at_once: None, activation: str, static: bool) -> None:
    format, x = FORMATS[activation], torch.randn(2, 3, 128, dtype=torch.bfloat16) * torch.logspace(-4, 3, 128)
    scale, x = torch.tensor(0.02) if static else None, x.to(torch.bfloat16)
    with interpreted():
        assert torch.equal(round_input(x, format, scale), round_activation(x, format, scale))


@pytest.mark.parametrize("name", ["nvfp4", "int4", "fp8_block", "mxfp6"])
def test_weights_are_decoded_for_convolutions_and_fp32(at_once: None, name: str) -> None:
    weight = quantize(torch.randn(33, 256), FORMATS[name])
    with interpreted():
        torch.testing.assert_close(dequantize(weight, torch.float32), weight.dequantize(), rtol=2**-22, atol=0)


class Shared(nn.Module):
    """Two layers that read one input, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear("nvfp4", "nvfp4", False, bias=False), linear("nvfp4", "nvfp4", False, bias=False)
        self.c = QuantLinear(quantize(torch.randn(16, 48), FORMATS["nvfp4"]), None, FORMATS["nvfp4"], None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) * self.b(x))


def test_a_graph_has_launches_for_its_linears_and_rounds_a_shared_input_once() -> None:
    x = torch.randn(2, 5, 128, dtype=torch.bfloat16)
    program = trace_for_torch(Shared(), {"x": x}, dims={"x": {0: "batch", 1: "sequence"}})
    with compiled_for(90):
        program = decomposed(program, {LINEAR: TritonLinear()})
    targets = [str(node.target) for node in program.graph.nodes]
    assert not any(target.startswith("quant.") for target in targets)
    # Two launches a linear; a cast to codes and back for each of the two inputs.
    assert sum("triton_kernel_wrapper" in target for target in targets) == 3 * 2 + 2 * 2


class Written(Shared):
    """An input that is written in place between two layers, and read again inside of branches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = self.a(x)
        x[0].mul_(2)
        y = y * self.b(x)
        return y + torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


def test_an_input_that_was_written_in_place_is_rounded_again() -> None:
    program = trace_for_torch(Written(), {"x": torch.randn(2, 5, 128, dtype=torch.bfloat16)})
    with compiled_for(90):
        program = decomposed(program, {LINEAR: TritonLinear()})
    graphs = {name: module.graph for name, module in program.graph_module.named_modules() if hasattr(module, "graph")}
    launches = {name: sum("triton_kernel" in str(n.target) for n in graph.nodes) for name, graph in graphs.items()}
    # A cast to codes and back, and two launches, for each of the layers.
    assert launches == {"": 8, "true_graph_0": 4, "false_graph_0": 4}
