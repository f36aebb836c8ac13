"""Compiled models quantize outputs of RMSNorms from the norms' inputs, with the numbers of norm and rounding apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny_models
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from slow_cases import quick_cases
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import quant
from quant.training.low_precision import native_fusions
from quant.training.low_precision.conversion import to_plain_layers

ROWS = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)
    torch.compiler.reset()  # the modules of these tests have the same code, which is compiled only a few times


def compiled(model: Any) -> tuple[Any, list[torch.fx.GraphModule]]:
    """The model compiled in one graph, and its graphs, forward and backward, once it has run."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph)  # type: ignore[no-any-return]

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(model, fullgraph=True, backend=backend), graphs


def calls(graph: torch.fx.GraphModule, name: str) -> list[torch.fx.Node]:
    """The nodes that call an op."""
    return [node for node in graph.graph.nodes if node.op == "call_function" and name in str(node.target)]


def test_a_compiled_block_has_the_numbers_of_the_plain_norms_and_writes_none() -> None:
    model = tiny_models.llama(hidden_size=128, intermediate_size=256, gain=2.0, num_hidden_layers=1).bfloat16().train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    plain = copy.deepcopy(model)
    native_fusions.restore_forwards(plain)
    model.model.layers[0], graphs = compiled(model.model.layers[0])
    both = []
    for each in (model, plain):
        loss = each(input_ids=ROWS, labels=ROWS).loss
        loss.backward()
        both.append([loss.detach(), *(p.grad for p in each.parameters())])
    for own, other in zip(*both, strict=True):
        assert torch.equal(own, other)
    # q, k and v share one call, gate and up another. No norm's output is computed: its weight goes nowhere else.
    forward = graphs[0]
    assert len(calls(forward, "fp8_block_rms_norm")) == 2
    weights = [node for node in forward.graph.nodes if node.op == "placeholder" and node.meta["val"].shape == (128,)]
    products = calls(forward, "aten.mul.Tensor")
    assert len(weights) == 2 and not any(weight in product.args for weight in weights for product in products)


class _GemmaNorm(nn.Module):
    """RMSNorm as Gemma computes it, with weights around 0, rounded once."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(columns)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (values * (1.0 + self.weight.float())).type_as(x)


class _Branch(nn.Module):
    """A norm, a layer that trains in FP8, and one that does not where `also` is set."""

    def __init__(self, norm: nn.Module, also: bool = False) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(128, 128, bias=False)
        self.router = nn.Linear(128, 3) if also else None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x + 1)
        z = self.linear(y)
        return z if self.router is None else z * self.router(y).softmax(-1)[..., :1]


NORMS = {
    "gemma": _GemmaNorm,
    "torch": lambda columns: nn.RMSNorm(columns, eps=1e-5),
    "torch, epsilon of the dtype": nn.RMSNorm,
}


@pytest.mark.parametrize(
    ("name", "also"),
    quick_cases(product(NORMS, (False, True)), lambda name, also: also == (name != "torch, epsilon of the dtype")),
)
def test_norms_of_other_libraries_and_outputs_that_others_read(name: str, also: bool) -> None:
    torch.manual_seed(0)
    model = _Branch(NORMS[name](128), also).train()
    model = model.bfloat16() if name == "gemma" else model
    dtype = torch.bfloat16 if name == "gemma" else torch.float32
    quant.to_low_precision_training(model, "fp8_block", backend="native", include="linear")
    fused, graphs = compiled(model)
    x = torch.randn(30, 128).to(dtype)
    both = []
    for module in (fused, model):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = module(leaf)
        y.float().square().sum().backward()
        both.append([y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())])
    assert len(calls(graphs[0], "fp8_block_rms_norm")) == 1
    for own, other in zip(*both, strict=True):
        # Operations of PyTorch's own norm may add in another order, and one code of E4M3 then differs.
        torch.testing.assert_close(own, other, rtol=2.0**-5, atol=float(other.detach().abs().max()) * 2.0**-7)
    assert torch.equal(both[0][0], both[1][0]) or name != "gemma"


def test_a_norm_in_float32_before_layers_under_autocast() -> None:
    model = _Branch(nn.RMSNorm(128, eps=1e-5)).train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    fused, graphs = compiled(model)
    x = torch.randn(30, 128)
    with torch.autocast("cpu", torch.bfloat16):
        own, other = fused(x), model(x)
    assert own.dtype is torch.bfloat16 and len(calls(graphs[0], "fp8_block_rms_norm")) == 1
    torch.testing.assert_close(own, other, rtol=2.0**-5, atol=float(other.detach().abs().max()) * 2.0**-7)


def test_gradients_of_the_norm_are_float64s() -> None:
    torch.manual_seed(0)
    model = _Branch(nn.RMSNorm(128, eps=1e-5)).train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    fused, _ = compiled(model)
    x = torch.randn(256, 128, requires_grad=True)
    y = fused(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    # The gradient that the layer gives the norm has FP8's rounding; from there on everything is exact.
    seen = torch.randn(256, 128, requires_grad=True)
    d_norm = torch.autograd.grad(model.linear(seen), seen, dy)[0].double()
    exact, weight = x.detach().double().requires_grad_(), model.norm.weight.detach().double().requires_grad_()
    values = (exact + 1) * torch.rsqrt((exact + 1).square().mean(-1, keepdim=True) + 1e-5) * weight
    expected = torch.autograd.grad(values, (exact, weight), d_norm)
    for own, other in zip((x.grad, model.norm.weight.grad), expected, strict=True):
        assert own is not None
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


def test_outputs_that_are_replaced_or_hooked_are_quantized_from_their_values() -> None:
    class Doubled(_Branch):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.norm(x)
            y *= 2
            return self.linear(y)

    hooked = _Branch(nn.RMSNorm(128)).train()
    hooked.norm.register_forward_hook(lambda module, args, y: y.mul_(2))
    for model in (Doubled(nn.RMSNorm(128)).train(), hooked):
        quant.to_low_precision_training(model, "fp8_block", backend="native")
        fused, graphs = compiled(model)
        x = torch.randn(30, 128)
        torch.testing.assert_close(fused(x), model(x))
        assert not calls(graphs[0], "fp8_block_rms_norm")


def test_only_rms_norms_are_traced_and_the_way_back_is_plain() -> None:
    class Halved(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(x)

    norms: list[nn.Module] = [
        nn.LayerNorm(128),
        nn.LayerNorm(128, bias=False),
        Halved(128),
        nn.RMSNorm(128, elementwise_affine=False),
    ]
    model = nn.Sequential(*norms, nn.RMSNorm(128), nn.Linear(128, 128, bias=False)).train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    assert ["forward" in vars(module) for module in model] == [False] * 4 + [True, False]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model[4]))):
        norm = twin if isinstance(twin, nn.RMSNorm) else twin[4]
        assert vars(norm)["forward"].args[0] is norm
    to_plain_layers(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_formula_is_tried_on_the_cpu_whichever_device_is_the_default() -> None:
    model = nn.Sequential(nn.RMSNorm(128))
    with torch.device("meta"):
        native_fusions.trace_rms_norms(model)
    assert "forward" in vars(model[0])
