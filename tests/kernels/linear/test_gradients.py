"""Gradients of quantized layers equal an explicit straight-through reference in float64.

y = (x' + stop(round(x') − x')) Wᵀ + (x' Aᵀ) Bᵀ + bias,    x' = hadamard(x · pre_scale)
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn

from quant.base.errors import UserError
from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize, round_activation
from quant.kernels.linear import oracle
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import QuantExperts, experts_forward
from quant.kernels.linear.quant_linear import QuantLinear, quantized_linear
from quant.kernels.rounding.hadamard import hadamard_transform

OUT, IN, TOKENS = 128, 192, 9
# Each weight format by itself, and each activation format with a weight that a preset gives it.
CASES = [(name, "") for name in FORMATS] + [
    ("nvfp4", "nvfp4"),
    ("nvfp4", "fp8"),
    ("nvfp4", "fp8_token"),
    ("mxfp4", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("mxfp6", "mxfp8"),
    ("fp8", "fp8"),
    ("fp8_channel", "fp8_token"),
    ("fp8_block", "fp8_group"),
    ("int8", "int8_token"),
    ("int4", "fp8_token"),
]


PAIRED = {format for format, activation in CASES if activation}


def weight_in(format: str, *shape: int, device: str = "cpu") -> BlockScaledTensor:
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(*(shape or (OUT, IN)), generator=generator).to(device), FORMATS[format])


def inputs(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def reference(module: QuantLinear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the bias."""
    given, parts = x.detach().double().requires_grad_(), module.parts
    seen = given if parts.pre_scale is None else given * parts.pre_scale.double()
    seen = hadamard_transform(seen, parts.hadamard) if parts.hadamard else seen
    rounded = seen
    if module.activation_format is not None:
        found = round_activation(seen.detach().to(x.dtype), module.activation_format, module.input_scale).double()
        rounded = seen + (found - seen).detach()
    bias = torch.zeros(OUT, dtype=torch.float64, device=x.device, requires_grad=True)
    y = rounded @ module.dequantize(torch.float64).T + bias
    if parts.lowrank is not None:
        down, up = parts.lowrank
        y = y + seen @ down.double().T @ up.double().T
    return torch.autograd.grad(y, (given, bias), dy.double())


def close(found: torch.Tensor | None, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert found is not None and found.dtype is dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps


def check(module: QuantLinear, x: torch.Tensor, *, compiled: bool = False) -> None:
    assert module.bias is not None
    module.bias.requires_grad_()
    dy = inputs(*x.shape[:-1], OUT, dtype=x.dtype, device=str(x.device), seed=2)
    x = x.detach().requires_grad_()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    y = run(x)
    y.backward(dy)
    exact, exact_bias = reference(module, x, dy)
    close(x.grad, exact, x.dtype)
    close(module.bias.grad, exact_bias, x.dtype)
    assert all(buffer is None or buffer.grad is None for buffer in module._buffers.values())
    module.bias.grad = None


def linear(format: str, activation: str, dtype: torch.dtype, device: str = "cpu", **parts: Any) -> QuantLinear:
    form = FORMATS[activation] if activation else None
    static = torch.tensor(0.01, device=device) if form is not None and form.is_static else None
    bias = inputs(OUT, dtype=dtype, device=device)
    return QuantLinear(weight_in(format, device=device), bias, form, static, **parts)


@pytest.mark.parametrize(("format", "activation"), CASES)
def test_linear(format: str, activation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = linear(format, activation, dtype)
        for shape in ((TOKENS, IN), (2, 3, IN), (IN,)):
            check(module, inputs(*shape, dtype=dtype))


@pytest.mark.parametrize(
    # Every format of weights, and of inputs, once; a graph sees one op of all.
    ("format", "activation"),
    quick_cases(CASES, lambda format, activation: activation or format not in PAIRED),
)
def test_compiled(format: str, activation: str) -> None:
    torch._dynamo.reset()
    check(linear(format, activation, torch.float32), inputs(TOKENS, IN), compiled=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("format", "activation"), [("nvfp4", "nvfp4"), ("fp8_channel", "fp8_token"), ("int4", "")])
def test_run_time_parts(format: str, activation: str, compiled: bool) -> None:
    torch._dynamo.reset()
    parts = {
        "pre_scale": inputs(IN, seed=3).exp(),
        "hadamard": 64,
        "lowrank": (inputs(4, IN, seed=4), inputs(OUT, 4, seed=5)),
    }
    check(linear(format, activation, torch.float32, **parts), inputs(TOKENS, IN), compiled=compiled)


def test_two_layers_and_what_is_in_front_train() -> None:
    """A chain: the gradient of a plain weight in front is the one of the straight-through model, and no zero."""
    torch._dynamo.reset()
    front, x = nn.Linear(IN, IN), inputs(TOKENS, IN)
    back = linear("fp8", "fp8", torch.float32)
    model = nn.Sequential(front, nn.SiLU(), back)
    for run in (model, torch.compile(model, backend="aot_eager")):
        front.weight.grad = None
        run(x).square().sum().backward()
        hidden = nn.functional.silu(front(x)).detach().requires_grad_()
        exact, _ = reference(back, hidden, 2 * back(hidden).detach())
        (expected,) = torch.autograd.grad(nn.functional.silu(front(x)), front.weight, exact.float())
        torch.testing.assert_close(front.weight.grad, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp6", "fp8_block"])
def test_numeric_gradient_of_a_weight_only_layer(format: str) -> None:
    weight, x = weight_in(format, 32, 128), inputs(3, 128, dtype=torch.float64).requires_grad_()
    bias = inputs(32, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: quantized_linear(x, weight, b), (x, bias))


def test_a_large_weight_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_SLICE_ELEMENTS", 20 * IN)
    for format in FORMATS:
        for dtype in (torch.float32, torch.bfloat16):
            check(linear(format, "", dtype), inputs(TOKENS, IN, dtype=dtype))


def test_only_what_needs_a_gradient_gets_one() -> None:
    module = linear("mxfp8", "mxfp8", torch.float32)
    assert module.bias is not None
    x = inputs(TOKENS, IN)
    assert not module(x).requires_grad
    module.bias.requires_grad_()
    module(x).sum().backward()
    assert x.grad is None and torch.equal(module.bias.grad, torch.full((OUT,), float(TOKENS)))
    with torch.no_grad():
        assert not module(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_decides_the_dtype(device: str, compiled: bool) -> None:
    """As for `nn.Linear`: FP32 in, BF16 out, and an FP32 gradient; the same eager and compiled."""
    module = QuantLinear(quantize(torch.randn(64, 128), FORMATS["nvfp4"]), torch.randn(64)).to(device)
    x = torch.randn(3, 128, device=device, requires_grad=True)
    torch._dynamo.reset()
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with torch.autocast(device, dtype=torch.bfloat16):
        y = call(x)
    dense = module.dequantize(torch.bfloat16)
    expected = torch.nn.functional.linear(x.detach().bfloat16(), dense, module.bias.bfloat16())
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-4)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    torch.testing.assert_close(x.grad, (torch.ones_like(y) @ dense).float(), rtol=2**-6, atol=2**-4)


def test_a_second_derivative_is_refused() -> None:
    """At the first one: PyTorch's mark cuts the graph, and a Hessian then lacks the terms that pass through here."""
    x, layer = inputs(TOKENS, IN).requires_grad_(), linear("nvfp4", "nvfp4", torch.float32)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert plain.norm() > 0
    with pytest.raises(UserError, match=r"create_graph=True asks for gradients of gradients, .*; train without it"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(UserError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.functional.hessian(lambda x: layer(x).square().sum(), x)


@pytest.mark.parametrize(("format", "activation"), CASES)
def test_a_forward_derivative_is_refused(format: str, activation: str) -> None:
    """Below autograd the tangent got lost: `torch.func.jvp` gave zeros. Reverse mode has the matrix itself."""
    x, layer = inputs(1, IN)[0], linear(format, activation, torch.float32)
    for call in (lambda: torch.func.jvp(layer, (x,), (x,)), lambda: torch.func.jacfwd(layer)(x)):
        with pytest.raises(UserError, match=r"quant.linear.* has no forward-mode derivative; take .*\.jacobian"):
            call()
    with pytest.raises(UserError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.functional.jvp(layer, x, x)  # by two backward passes
    for call in (torch.func.jacrev(layer), torch.func.grad(lambda x: layer(x).sum())):
        with pytest.raises(UserError, match=r"quant.linear.* takes no part in torch\.func; take .*\.jacobian"):
            call(x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x), layer.dequantize())
    # A tangent that does not pass through the layer is right.
    _, tangent = torch.func.jvp(lambda y: 2 * y + layer(x), (torch.zeros(OUT),), (torch.ones(OUT),))
    assert torch.equal(tangent, torch.full((OUT,), 2.0))


@pytest.mark.parametrize(("format", "activation"), CASES)
def test_experts(format: str, activation: str) -> None:
    """Grouped and one at a time: rows of each expert as those of a linear of its own; rows of none have zeros."""
    stack = weight_in(format, 3, OUT, IN)
    form = FORMATS[activation] if activation else None
    static = torch.tensor(0.01) if form is not None and form.is_static else None
    module = QuantExperts(stack, form, static)
    bounds = [0, 4, 4, 7]
    x, offsets = inputs(TOKENS, IN).requires_grad_(), torch.tensor(bounds, dtype=torch.int32)
    dy = inputs(TOKENS, OUT, seed=2)
    module.grouped(x, offsets).backward(dy)
    exact = torch.zeros(TOKENS, IN, dtype=torch.float64)
    for expert in range(3):
        rows = slice(bounds[expert], bounds[expert + 1])
        exact[rows] = dy[rows].double() @ stack.matrix(expert).dequantize(torch.float64)
    close(x.grad, exact, torch.float32)
    x.grad = None
    module(x, 1).backward(dy)
    close(x.grad, dy.double() @ stack.matrix(1).dequantize(torch.float64), torch.float32)


def test_grouped_experts_compile() -> None:
    torch._dynamo.reset()
    module = QuantExperts(weight_in("nvfp4", 3, OUT, IN), FORMATS["nvfp4"], torch.tensor(0.01))
    offsets, dy, found = torch.tensor([0, 4, 4, 9], dtype=torch.int32), inputs(TOKENS, OUT, seed=2), []
    for run in (module.grouped, torch.compile(module.grouped, backend="aot_eager", fullgraph=True)):
        x = inputs(TOKENS, IN).requires_grad_()
        run(x, offsets).backward(dy)
        found.append(x.grad)
    assert found[0] is not None and torch.equal(found[0], found[1]) and float(found[0].norm()) > 1


def test_an_embedding_has_no_gradient_and_stops_none() -> None:
    table, head = QuantEmbedding(weight_in("fp8", 50, IN)), linear("nvfp4", "nvfp4", torch.float32)
    rows = table(torch.tensor([3, 7]))
    assert not rows.requires_grad
    shift = torch.zeros(IN, requires_grad=True)
    head(rows + shift).sum().backward()
    close(shift.grad, head.dequantize(torch.float64).sum(0) * 2, torch.float32)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("format", "activation"), CASES)
def test_linear_on_a_gpu(format: str, activation: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout that the GPU's kernels take, whole and in slices."""
    torch._dynamo.reset()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        module = linear(format, activation, dtype, "cuda")
        for tokens in (1, TOKENS, 300):
            check(module, inputs(tokens, IN, dtype=dtype, device="cuda"), compiled=compiled)
        if not compiled:
            with monkeypatch.context() as patch:
                patch.setattr(oracle, "_GPU_SLICE_ELEMENTS", 20 * IN)
                check(module, inputs(TOKENS, IN, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "activation"), CASES)
def test_experts_on_a_gpu(format: str, activation: str) -> None:
    stack = weight_in(format, 3, OUT, IN, device="cuda")
    form = FORMATS[activation] if activation else None
    static = torch.tensor(0.01, device="cuda") if form is not None and form.is_static else None
    module, bounds = QuantExperts(stack, form, static), [0, 4, 4, 7]
    x = inputs(TOKENS, IN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    dy = inputs(TOKENS, OUT, dtype=torch.bfloat16, device="cuda", seed=2)
    module.grouped(x, torch.tensor(bounds, dtype=torch.int32, device="cuda"))[:7].backward(dy[:7])
    exact = torch.zeros(TOKENS, IN, dtype=torch.float64, device="cuda")
    for expert in range(3):
        rows = slice(bounds[expert], bounds[expert + 1])
        exact[rows] = dy[rows].double() @ stack.matrix(expert).dequantize(torch.float64)
    close(x.grad, exact, torch.bfloat16)


def test_a_mixture_of_experts_trains() -> None:
    """Through `experts_forward`: the gradient of the hidden states is that of a model of plain parameters."""
    fields = {"num_hidden_layers": 1, "num_experts": 5, "experts_implementation": "eager"}
    plain = tiny_models.qwen3_moe(**fields).model.layers[0].mlp.experts
    args = (*(inputs(12, 5).softmax(-1).topk(2)),)
    weights = {name: quantize(inputs(*p.shape, seed=6) * 0.2, FORMATS["nvfp4"]) for name, p in plain.named_parameters()}
    gradients = []
    for quantized in (False, True):
        for name, weight in weights.items():
            if quantized:
                delattr(plain, name)
                setattr(plain, name, QuantExperts(weight))
            else:
                getattr(plain, name).data.copy_(weight.dequantize())
        hidden = inputs(12, 64, seed=7).requires_grad_()
        out = experts_forward(plain, hidden, args[1], args[0]) if quantized else plain(hidden, args[1], args[0])
        out.sum().backward()
        gradients.append(hidden.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
