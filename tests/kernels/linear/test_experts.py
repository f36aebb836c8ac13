"""Grouped experts equal one expert at a time, on a CPU through the oracle, on a GPU in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.linear import experts
from quant.kernels.linear.experts import QuantExperts, experts_forward

EXPERTS, HIDDEN, INNER = 6, 256, 128


class Experts(nn.Module):
    """What transformers' experts modules offer to `experts_forward`."""

    has_gate = True
    num_experts = EXPERTS

    def __init__(self, format: str, activation: str | None, device: str) -> None:
        super().__init__()
        form = FORMATS[activation] if activation else None
        up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device) * 0.1
        down = torch.randn(EXPERTS, HIDDEN, INNER, device=device) * 0.1
        self.gate_up_proj = QuantExperts(quantize(up, FORMATS[format]), form)
        self.down_proj = QuantExperts(quantize(down, FORMATS[format]), form)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


def routing(tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, HIDDEN, device=device).to(dtype)
    weights, index = torch.rand(tokens, EXPERTS - 1, device=device).topk(3)  # the last expert gets no token
    return hidden, index, weights.to(dtype)


def by_tokens(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One token at a time in float64; inputs rounded to the activation format, inner values to the dtype."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    up, down = (p.dequantize(torch.float64) for p in (module.gate_up_proj, module.down_proj))
    form = module.down_proj.activation_format

    def seen(x: torch.Tensor) -> torch.Tensor:
        return (fake_quantize(x[None].float(), form)[0] if form else x).double()

    for token, choices in enumerate(index.tolist()):
        for slot, expert in enumerate(choices):
            if expert < EXPERTS:
                both = (up[expert] @ seen(hidden[token])).to(hidden.dtype)
                inner = module._apply_gate(both)
                out[token] += weights[token, slot].double() * (down[expert] @ seen(inner))
    return out


def test_a_bmm_by_the_transpose_runs_each_expert_with_rounded_inputs() -> None:
    """Inkling's shared experts multiply by `P.transpose(1, 2)`; nothing else may see that, with inputs unrounded."""
    stack = QuantExperts(quantize(torch.randn(EXPERTS, INNER, HIDDEN), FORMATS["fp8_channel"]), FORMATS["fp8_token"])
    x = torch.randn(EXPERTS, 5, HIDDEN)
    inputs = torch.stack([fake_quantize(rows, FORMATS["fp8_token"]) for rows in x]).double()
    expected = torch.bmm(inputs, stack.dequantize(torch.float64).transpose(1, 2))
    torch.testing.assert_close(torch.bmm(x, stack.transpose(1, 2)).double(), expected, rtol=1e-5, atol=1e-4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="take no part in matmul"):
        torch.matmul(x, stack.transpose(-2, -1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="transposed by"):
        stack.transpose(0, 1)


def test_slots_are_sorted_and_counted() -> None:
    index = torch.tensor([[4, 0], [1, 4], [7, 0], [4, 1]])
    order, offsets = experts.sort_by_expert(index, 5)
    assert order.tolist() == [1, 5, 2, 7, 0, 3, 6, 4]  # stable: slots of one expert stay in order
    assert offsets.tolist() == [0, 2, 4, 4, 4, 7] and offsets.dtype is torch.int32


@pytest.mark.parametrize(("format", "activation"), [("nvfp4", None), ("fp8_channel", "fp8_token"), ("mxfp8", "mxfp8")])
def test_is_one_expert_at_a_time(format: str, activation: str | None) -> None:
    module, args = Experts(format, activation, "cpu"), routing(11, "cpu", torch.float32)
    y = experts.grouped_experts_forward(module, *args)
    assert float((y.double() - by_tokens(module, *args)).norm() / y.norm()) < 2e-3
    torch.testing.assert_close(y, experts_forward(module, *args), rtol=0, atol=1e-5)


def test_slots_beyond_the_last_expert_count_nothing() -> None:
    module, (hidden, index, weights) = Experts("mxfp8", None, "cpu"), routing(7, "cpu", torch.float32)
    index[2, 1] = index[5, 0] = EXPERTS
    y = experts.grouped_experts_forward(module, hidden, index, weights)
    assert float((y.double() - by_tokens(module, hidden, index, weights)).norm() / y.norm()) < 1e-4


def test_the_op_is_traced_with_its_shape() -> None:
    weight = quantize(torch.randn(3, 32, 64), FORMATS["nvfp4"])
    x, offsets = torch.randn(5, 64), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    arguments = (x, weight.codes, weight.scale, weight.global_scale, None, offsets, "nvfp4", "", None)
    torch.library.opcheck(torch.ops.quant.grouped_linear.default, arguments, test_utils="test_faketensor")
    dense = weight.dequantize(torch.float64)
    expected = torch.cat([x[:2].double() @ dense[0].T, x[2:].double() @ dense[2].T])
    y = experts.grouped_linear(x, weight, offsets)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    bias = torch.randn(3, 32)
    expected += bias.double()[[0, 0, 2, 2, 2]]
    torch.testing.assert_close(
        experts.grouped_linear(x, weight, offsets, bias=bias).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_mistakes_name_the_argument() -> None:
    weight, x = quantize(torch.randn(3, 32, 64), FORMATS["nvfp4"]), torch.zeros(5, 64)
    with pytest.raises(ValueError, match=r"x \[5, 32\] does not fit experts of \[3, 32, 64\]"):
        experts.grouped_linear(x[:, :32], weight, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offsets is \[3\] torch\.int32, expected \[4\] int32"):
        experts.grouped_linear(x, weight, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bias is \[32\], expected \[3, 32\], contiguous"):
        experts.grouped_linear(x, weight, torch.zeros(4, dtype=torch.int32), bias=torch.zeros(32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "activation"),
    [("nvfp4", None), ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_group"), ("mxfp8", "mxfp8"), ("int8", None)],
)
@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_on_a_gpu(format: str, activation: str | None, tokens: int) -> None:
    module = Experts(format, activation, "cuda")
    hidden, index, weights = routing(tokens, "cuda", torch.bfloat16)
    index[0, 1] = EXPERTS
    y = experts_forward(module, hidden, index, weights)
    expected = by_tokens(module, hidden, index, weights)
    # A last bit of an inner value moves some of its 8-bit codes to a neighbour, 6% away.
    assert float((y.double() - expected).norm() / expected.norm()) < (4e-2 if activation else 1e-2)


@pytest.mark.gpu
def test_a_graph_follows_the_router() -> None:
    module = Experts("nvfp4", None, "cuda")
    hidden, index, weights = routing(4, "cuda", torch.bfloat16)
    experts_forward(module, hidden, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts_forward(module, hidden, index, weights)
    for _ in range(3):
        new = routing(4, "cuda", torch.bfloat16)
        for old, value in zip((hidden, index, weights), new, strict=True):
            old.copy_(value)
        graph.replay()
        expected = by_tokens(module, hidden, index, weights)
        assert float((y.double() - expected).norm() / expected.norm()) < 1e-2
