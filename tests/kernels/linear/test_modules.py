"""The buffers of `QuantLinear` and `QuantExperts` are never rounded, and experts compute as in transformers."""

import copy
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.linear.experts import QuantExperts, experts_forward
from quant.kernels.linear.quant_linear import QuantLinear

BUFFERS = ("codes", "scale", "global_scale", "input_scale")


def linear(format: str = "nvfp4", activation: str | None = None, bias: bool = True) -> QuantLinear:
    weight = quantize(torch.randn(48, 256), FORMATS[format])
    form = FORMATS[activation] if activation else None
    return QuantLinear(weight, torch.randn(48) if bias else None, form, torch.tensor(0.1) if form else None)


def exact(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(module, name).clone() for name in BUFFERS if getattr(module, name) is not None}


def assert_same(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        now = getattr(module, name)
        assert now.dtype is tensor.dtype, name
        assert torch.equal(now.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("format", FORMATS)
def test_casts_change_the_bias_and_never_the_weight(format: str) -> None:
    module = nn.Sequential(linear(format, "fp8"))
    before = exact(module[0])
    values = module[0].dequantize(torch.float64)
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double):
        cast(module)
        assert_same(module[0], before)
    for dtype in (torch.bfloat16, torch.float16):
        module.to(dtype)
        assert_same(module[0], before)
        assert module[0].bias.dtype is dtype
    module.to("cpu", torch.float32)
    assert_same(module[0], before)
    assert torch.equal(module[0].dequantize(torch.float64), values)


def test_moving_to_a_device_moves_everything() -> None:
    module = linear("nvfp4", "nvfp4").to("meta", torch.bfloat16)
    dtypes = {name: getattr(module, name).dtype for name in BUFFERS}
    assert all(getattr(module, name).is_meta for name in BUFFERS)
    assert dtypes == {
        "codes": torch.uint8,
        "scale": torch.float8_e4m3fn,
        "global_scale": torch.float32,
        "input_scale": torch.float32,
    }


def test_the_input_decides_the_dtype() -> None:
    module = linear(bias=False)
    reference = module.dequantize(torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 256).to(dtype)
        y = module(x)
        assert y.dtype is dtype
        error = (y.double() - x.double() @ reference.T).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * float((x.double().abs() @ reference.abs().T).max())


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_round_trips(format: str) -> None:
    first, second = linear(format, "fp8"), linear(format, "fp8")
    x = torch.randn(2, 256)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert_same(second, exact(first))
    assert torch.equal(first(x), second(x))
    expected = {"codes", "scale", "input_scale", "bias"} | ({"global_scale"} if format == "nvfp4" else set())
    assert set(first.state_dict()) == expected


def test_a_deep_copy_owns_its_data() -> None:
    first = linear("nvfp4", "nvfp4")
    second = copy.deepcopy(first)
    assert_same(second, exact(first))
    assert (second.weight_format, second.activation_format) == (first.weight_format, first.activation_format)
    x = torch.randn(2, 256)
    assert torch.equal(first(x), second(x))
    before = exact(first)
    second.codes.zero_()
    assert_same(first, before)


def test_nothing_of_it_trains() -> None:
    assert not any(p.requires_grad for p in linear().parameters())


def test_its_repr_says_what_it_is() -> None:
    assert repr(linear("nvfp4")) == "QuantLinear([48, 256], weight=nvfp4, activation=16 bit)"


# Experts


@pytest.fixture(scope="module")
def experts() -> Any:
    """The first experts module of a tiny Qwen3-MoE, and its float32 parameters."""
    fields = {"num_hidden_layers": 1, "num_experts": 5, "experts_implementation": "eager"}
    module = tiny_models.qwen3_moe(**fields, attn_implementation="eager").model.layers[0].mlp.experts
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2).requires_grad_(False)
    return module


def routing(tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 64, generator=generator)
    weights, index = torch.rand(tokens, 5, generator=generator).topk(2)
    return hidden, index, weights


def quantized(experts: Any, format: str, activation: str | None = None) -> tuple[Any, Any]:
    """A copy with `QuantExperts` in place, and one whose parameters hold the dequantized values."""
    with_modules, with_values = copy.deepcopy(experts), copy.deepcopy(experts)
    for name in ("gate_up_proj", "down_proj"):
        weight = quantize(getattr(experts, name).data, FORMATS[format])
        getattr(with_values, name).data.copy_(weight.dequantize())
        delattr(with_modules, name)
        setattr(with_modules, name, QuantExperts(weight, FORMATS[activation] if activation else None))
    return with_modules, with_values


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8"])
def test_experts_equal_those_of_transformers_over_the_dequantized_weights(experts: Any, format: str) -> None:
    ours, theirs = quantized(experts, format)
    args = routing()
    expected = theirs.double()(args[0].double(), args[1], args[2].double())
    assert float(expected.abs().max()) > 0.5
    torch.testing.assert_close(experts_forward(ours, *args).double(), expected, rtol=0, atol=2e-5)


def test_experts_that_are_plain_parameters_give_the_same(experts: Any) -> None:
    args = routing()
    torch.testing.assert_close(experts_forward(experts, *args), experts(*args), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "activation"), [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8_channel", "fp8_token")]
)
def test_inputs_of_experts_are_rounded_expert_by_expert(experts: Any, format: str, activation: str) -> None:
    """Against a loop over tokens in float64: each token's input is rounded, projected, gated, rounded, projected."""
    ours, values = quantized(experts, format, activation)
    hidden, index, weights = routing()
    form = FORMATS[activation]

    expected = torch.zeros_like(hidden, dtype=torch.float64)
    gate_up, down = values.gate_up_proj.double(), values.down_proj.double()
    for expert in range(5):
        token, slot = torch.where(index == expert)
        x = fake_quantize(hidden[token], form).double()
        gate, up = (x @ gate_up[expert].T).chunk(2, dim=-1)
        inner = fake_quantize((torch.nn.functional.silu(gate) * up).float(), form).double()
        expected.index_add_(0, token, inner @ down[expert].T * weights[token, slot, None].double())
    got = experts_forward(ours, hidden, index, weights).double()
    assert float((got - experts_forward(values, hidden, index, weights)).abs().max()) > 1e-3
    # A rounding of the inner value may fall to the other side of a tie.
    assert float((got - expected).norm() / expected.norm()) < 2e-3


def test_an_index_beyond_the_last_expert_is_skipped(experts: Any) -> None:
    hidden, index, weights = routing()
    beyond = index.clone()
    beyond[3, 1] = 5
    masked = weights.clone()
    masked[3, 1] = 0
    torch.testing.assert_close(
        experts_forward(experts, hidden, beyond, weights), experts_forward(experts, hidden, index, masked)
    )


def test_indexing_gives_dequantized_experts(experts: Any) -> None:
    ours, values = quantized(experts, "nvfp4")
    module = ours.gate_up_proj
    assert module.dtype is torch.float32
    for index in (0, 4, torch.tensor(2)):
        assert torch.equal(module[index], values.gate_up_proj[index])
    assert torch.equal(module[torch.tensor([4, 0, 4])], values.gate_up_proj[[4, 0, 4]])
    module.to(torch.bfloat16)
    assert torch.equal(module[1], values.gate_up_proj[1].bfloat16())
    assert module.dtype is torch.bfloat16 and "dtype" not in module.state_dict()


def test_transformers_own_loop_runs_over_the_module_by_indexing(experts: Any) -> None:
    ours, values = quantized(experts, "mxfp8")
    args = routing()
    torch.testing.assert_close(ours(*args), values(*args), rtol=0, atol=1e-5)


def test_observe_sees_every_input_of_every_expert(experts: Any) -> None:
    hidden, index, weights = routing()
    seen: dict[tuple[str, int], torch.Tensor] = {}
    experts_forward(experts, hidden, index, weights, observe=lambda name, e, x: seen.update({(name, e): x}))
    assert set(seen) == {(name, e) for name in ("gate_up_proj", "down_proj") for e in index.unique().tolist()}
    for expert in index.unique().tolist():
        token = torch.where(index == expert)[0]
        assert torch.equal(seen["gate_up_proj", expert], hidden[token])
        gate, up = (hidden[token] @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        torch.testing.assert_close(seen["down_proj", expert], torch.nn.functional.silu(gate) * up)
