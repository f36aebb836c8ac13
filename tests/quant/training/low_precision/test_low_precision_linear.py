"""Products and gradients of every recipe against float64, and all that a layer in low-precision training shares."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import tiny_models
import torch
from rounding_bounds import bounds_of_products
from slow_cases import quick_cases
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quant
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.state import packed_weight
from quant.training.low_precision.training_recipe import RECIPES, Schedule, TrainingRecipe

TOKENS, INPUTS, OUTPUTS = 128, 256, 128


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS, bias=bias)
        self.second = nn.Linear(OUTPUTS, INPUTS, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def _layer(recipe: str | TrainingRecipe, **options: object) -> nn.Linear:
    net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, **options))
    quant.to_low_precision_training(net, recipe)
    return net[0]


@pytest.mark.parametrize("name", RECIPES)
def test_products_lie_within_the_rounding_of_their_operands(name: str) -> None:
    recipe = RECIPES[name]
    layer = _layer(recipe, bias=False)
    x = (torch.randn(TOKENS, INPUTS) * torch.logspace(-1, 1, INPUTS)).requires_grad_()
    dy = torch.randn(TOKENS, OUTPUTS) * 1e-3
    y = layer(x)
    y.backward(dy)
    expected = bounds_of_products(recipe, x.detach(), layer.weight.detach(), dy)
    for product, got in (("y", y), ("dx", x.grad), ("dw", layer.weight.grad)):
        bound = expected[product]
        off = (got.double() - bound.values).abs()
        assert bool((off <= bound.error).all()), (product, float((off / bound.error).max()))
        is_rounded = product != "dw" or recipe.rounds_dw
        assert bool(off.norm() > 1e-3 * bound.values.norm()) == is_rounded, product


def test_gradients_of_nvfp4_have_the_exact_mean() -> None:
    layer = _layer("nvfp4", bias=False)
    x, dy = torch.randn(TOKENS, INPUTS).requires_grad_(), torch.randn(TOKENS, OUTPUTS)
    draws = []
    for _ in range(200):
        x.grad = None
        layer(x).backward(dy)
        draws.append(x.grad.double())
    stacked = torch.stack(draws)
    # The rounded weight is the same in each draw. A block scale that E4M3 rounds down lets the largest of its block
    # saturate; all else is unbiased.
    state = layer.low_precision
    operand = round_operand(dy, RECIPES["nvfp4"].gradient, RECIPES["nvfp4"])
    limit = (6 * operand.scale * operand.factor).repeat_interleave(16, 1)
    exact = dy.clamp(-limit, limit).double() @ packed_weight(layer.weight, state).dequantize().double()
    sigma = stacked.std(0) / len(draws) ** 0.5
    assert bool(((stacked.mean(0) - exact).abs() <= 5 * sigma + 1e-6).all())


def test_conversion_keeps_everything_that_a_model_holds() -> None:
    model = tiny_models.llama(tie_word_embeddings=True)
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = []
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda *_: calls.append(1))
    projection.mark = "mine"
    report = quant.to_low_precision_training(model, "mxfp8")
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(projection) is LowPrecisionLinear
    assert projection.mark == "mine"
    assert "lm_head" in report.in_16bit
    before = projection.weight.detach().clone()
    ids = torch.randint(0, 64, (2, 8))
    model.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    assert calls
    assert not torch.equal(projection.weight, before)
    trained = model.state_dict()
    to_plain_layers(model)
    assert type(projection) is nn.Linear
    assert not hasattr(projection, "low_precision")
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    plain = copy.deepcopy(model)
    plain.load_state_dict(trained)
    assert torch.equal(plain(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_rowwise", "nvfp4"])
def test_a_copied_and_a_pickled_model_train_alike(name: str) -> None:
    model = Net()
    quant.to_low_precision_training(model, replace(RECIPES[name], stochastic_gradients=False))
    x = torch.randn(16, INPUTS)
    model(x).sum().backward()
    model.eval()(x)  # the deployed layer is there, and not copied
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (model, *copies):
        each.train().zero_grad()
        each(2 * x).square().sum().backward()
    for each in copies:
        assert each.first.low_precision.recipe.input is model.first.low_precision.recipe.input
        assert torch.equal(each.first.weight.grad, model.first.weight.grad)
        assert torch.equal(each.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_rowwise", "nvfp4"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model = Net()
    quant.to_low_precision_training(model, name)
    twin = copy.deepcopy(model)
    for step in range(3):
        x = torch.randn(16, INPUTS) * (step + 1)
        gradients = []
        for each, again in ((model, False), (twin, True)):
            torch.manual_seed(step)
            each.zero_grad()
            y = checkpoint(each, x, use_reentrant=False) if again else each(x)
            y.square().sum().backward()
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(
        torch.equal(a.values, b.values)
        for a, b in zip(model.first.low_precision.amax.values(), twin.first.low_precision.amax.values(), strict=True)
    )


@pytest.mark.parametrize(
    "name",
    quick_cases(
        ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_wgrad_bf16", "mxfp8", "nvfp4"),
        lambda name: name in ("fp8_tensorwise", "nvfp4"),  # one scale and static ones; blocks, and random draws
    ),
)
def test_a_compiled_model_is_one_graph_with_the_same_numbers(name: str) -> None:
    model = Net()
    quant.to_low_precision_training(model, replace(RECIPES[name], stochastic_gradients=False))
    twin = copy.deepcopy(model)
    # Dynamo takes a format's largest number for a variable once it has seen two of them in one process.
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
        for step in range(3):
            x = torch.randn(16, INPUTS) * (step + 1)
            for each in (model, compiled):
                each.zero_grad()
                each(x).square().sum().backward()
            assert torch.equal(twin.first.weight.grad, model.first.weight.grad)
            assert torch.equal(twin.second.weight.grad, model.second.weight.grad)
    assert torch.equal(twin.first.low_precision.amax["x"].values, model.first.low_precision.amax["x"].values)


def test_compilers_see_one_op_for_each_operand_of_nvfp4() -> None:
    """The steps of its rounding, compiled for each size, took minutes for a model of a few layers."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    model = Net()
    quant.to_low_precision_training(model, "nvfp4")
    graphs: list[list[str]] = []

    def counted(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=counted), fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(32, INPUTS)).square().sum().backward()
    forward, backward = graphs  # none is compiled again as histories grow
    operands = [graph.count("quant.nvfp4_operand.default") for graph in graphs]
    assert operands == [4, 6]  # x and w; dy twice and x, and w where an input needs a gradient
    assert len(forward) <= 20 * 4 and len(backward) <= 20 * 6, (len(forward), len(backward))


def test_a_compiled_graph_breaks_at_delayed_scaling_and_has_the_same_numbers() -> None:
    model = Net()
    quant.to_low_precision_training(model, "fp8_delayed")
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager")
    for step in range(3):
        x = torch.randn(16, INPUTS) * (step + 1)
        for each in (model, compiled):
            each.zero_grad()
            each(x).square().sum().backward()
        assert torch.equal(twin.first.weight.grad, model.first.weight.grad)


def test_delayed_scaling_rounds_by_earlier_steps() -> None:
    layer = _layer("fp8_delayed", bias=False)
    small, large = torch.randn(32, INPUTS), 1000 * torch.randn(32, INPUTS)
    layer(small)
    clipped = layer(large).detach()  # the scale is that of the small input: what is beyond 448 steps of it saturates
    limit = small.abs().max()
    exact = large.clamp(-limit, limit).double() @ layer.weight.detach().double().t()
    assert float((clipped.double() - exact).norm() / exact.norm()) < 0.06
    fits = layer(large).detach()
    exact = large.double() @ layer.weight.detach().double().t()
    assert float((fits.double() - exact).norm() / exact.norm()) < 0.06


def test_autocast_rounds_the_weight_from_float32() -> None:
    layer = _layer("fp8_rowwise", bias=True)
    x = torch.randn(8, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    # As with a BF16 input and no autocast: the weight is never rounded to BF16 on its way to E4M3.
    wide = layer(x.bfloat16().float()) - layer.bias
    expected = wide.bfloat16() + layer.bias.bfloat16()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_changes_no_product(name: str) -> None:
    """Operands are multiplied in FP32 on a CPU, also where the backward pass runs within autocast."""
    net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
    quant.to_low_precision_training(net, replace(RECIPES[name], stochastic_gradients=False))
    twin = copy.deepcopy(net)
    x, dy = torch.randn(32, INPUTS).bfloat16(), torch.randn(32, OUTPUTS).bfloat16()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y = net(inputs[0])
    y.backward(dy)
    with torch.autocast("cpu", torch.bfloat16):
        within = twin(inputs[1])
        within.backward(dy)
    assert torch.equal(within, y)
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert torch.equal(twin[0].weight.grad, net[0].weight.grad)


def test_a_graph_that_must_not_break_names_the_recipe_that_breaks_it() -> None:
    net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    quant.to_low_precision_training(net, "fp8_delayed")
    with pytest.raises(
        Exception, match=r"delayed scaling changes a history .* compile without fullgraph=True, or train in"
    ):
        torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(16, INPUTS))


def test_the_schedule_ends_the_rounding_of_the_forward_product() -> None:
    recipe = replace(RECIPES["nvfp4"], schedule=Schedule(bf16_forward_from=0.9))
    net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    report = quant.to_low_precision_training(net, recipe)
    x = torch.randn(8, INPUTS)
    exact = functional.linear(x, net[0].weight, net[0].bias)
    report.at(0.5)
    assert not torch.allclose(net(x), exact, rtol=1e-3)
    report.at(0.95)
    assert torch.allclose(net(x), exact, atol=1e-6)
    with pytest.raises(quant.UserError, match=r"report.at\(7\): the share of training .* step / steps"):
        report.at(7)
    # Without a schedule the last step is rounded, too.
    plain = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    quant.to_low_precision_training(plain, "nvfp4").at(1.0)
    assert not torch.allclose(plain(x), functional.linear(x, plain[0].weight, plain[0].bias), rtol=1e-3)


def test_layers_of_a_fusion_group_share_the_scale_of_their_weights() -> None:
    model = tiny_models.llama()
    quant.to_low_precision_training(model, "nvfp4")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight[0, 0] = 7.0
    names = ("q_proj", "k_proj", "v_proj")
    layers = [getattr(attention, name) for name in names]
    assert all(float(layer.low_precision.weight_amax()) == 7.0 for layer in layers)
    assert float(attention.o_proj.low_precision.weight_amax()) < 1.0


def test_no_tokens_give_no_rows() -> None:
    layer = _layer("nvfp4")
    x = torch.randn(0, INPUTS, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, OUTPUTS)
    y.sum().backward()
    assert layer.low_precision.amax["x"].is_empty


def test_a_history_of_zeros_scales_by_the_present_magnitude() -> None:
    """A first batch of zeros leaves a record of zero, by which nothing can be scaled."""
    torch.manual_seed(0)
    delayed, present = (nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2))
    present.load_state_dict(delayed.state_dict())
    quant.to_low_precision_training(delayed, "fp8_delayed")
    quant.to_low_precision_training(present, "fp8_tensorwise")
    x = torch.randn(32, 64) * 1e-4
    (delayed(torch.zeros(32, 64)) * 0).sum().backward()
    delayed.zero_grad()
    outputs = [net(x) for net in (delayed, present)]
    for y in outputs:
        (y * 1e-4 * torch.arange(64)).sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(delayed[0].weight.grad, present[0].weight.grad)


def test_eval_mode_sees_rows_that_change_places_through_data() -> None:
    net = nn.Sequential(nn.Linear(256, 1024, bias=False))
    quant.to_low_precision_training(net, "fp8_rowwise")
    x = torch.randn(4, 256)
    with torch.no_grad():
        net(x)
        net.eval()
        before = net(x)
        weight = net[0].weight.data  # the norm stays as it is
        weight[5], weight[700] = weight[700].clone(), weight[5].clone()
        after = net(x)
    order = torch.arange(1024)
    order[5], order[700] = 700, 5
    assert torch.equal(after, before[:, order])
