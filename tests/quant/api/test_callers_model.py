"""The model that a caller passes is the one that is quantized: its modes, hooks and forwards stay as they were."""

import copy
import types

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn.utils import prune

from quant.evaluation.evaluate import evaluate
from quant.generate.generate import generate
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import find_layers
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize
from quant.training.qat import pack, prepare_qat

ROWS = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """Dropout before the second linear, a BatchNorm behind it: neither may act while the model is quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.norm(self.b(self.drop(torch.tanh(self.a(x)))))))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize(("recipe", "effort"), [("nvfp4", 2), ("int8_static", 0)])
def test_a_model_in_training_is_quantized_as_in_evaluation_and_keeps_its_modes(recipe: str, effort: int) -> None:
    model = Noisy().train()
    model.a.eval()  # a layer that the caller froze
    before, expected = modes(model), quantize(Noisy().eval(), recipe, ROWS, effort=effort).model
    buffers = copy.deepcopy(dict(model.norm.named_buffers()))
    result = quantize(model, recipe, ROWS, effort=effort).model
    assert modes(result) == before
    state = result.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.norm.named_buffers())


def test_a_forward_loop_runs_in_evaluation_mode() -> None:
    seen = []

    def loop(model: nn.Module) -> None:
        seen.append(model.training or model.drop.training)
        model(ROWS)

    assert quantize(Noisy().train(), "int8_static", forward_loop=loop, effort=0).model.training
    assert seen == [False]


def test_a_plan_that_fails_gives_the_modes_back() -> None:
    model = Noisy().train()
    model.norm.eval()
    before = modes(model)
    rows = ROWS.clone()
    rows[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="calibration row 0"):
        quantize(model, "int8_static", rows, effort=0)
    assert modes(model) == before


@pytest.mark.parametrize("use", ["evaluate", "quantize", "make_plan"])
def test_dropout_of_a_model_in_training_draws_nothing_from_the_callers_generator(use: str) -> None:
    rows = torch.randint(0, 64, (12, 16), generator=torch.Generator().manual_seed(0))
    model, original = tiny_models.opt().train(), tiny_models.opt().train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    if use == "evaluate":
        evaluate(model, rows, original)
    elif use == "quantize":
        quantize(model, "nvfp4", rows)  # tries transforms
    else:
        make_plan(model, "nvfp4")
    assert torch.equal(torch.rand(3), expected) and model.training and model.model.decoder.layers[1].training


def test_an_observer_without_a_static_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r'^observer="mse": no input has a static scale to choose; leave it out$'):
        quantize(Noisy(), "fp8_channel", ROWS, observer="mse")
    quantize(Noisy(), "fp8_channel", ROWS, observer="absmax", effort=0)  # the default does no harm
    assert quantize(Noisy(), "fp8", ROWS, observer="mse", effort=0).plan.observer == "mse"


def test_training_under_the_rounding_keeps_modes() -> None:
    model = Noisy().train()
    model.b.eval()
    before = modes(model)
    prepare_qat(model, "int8_static", ROWS)
    assert {name: module.training for name, module in model.named_modules() if name in before} == before


class Net(nn.Module):
    """Three linears in a row; the middle one is the test's."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.out = nn.Linear(64, 64), middle, nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Product(nn.Linear):
    """Writes the product of a linear layer out, as Falcon's class does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + (0 if self.bias is None else self.bias)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.5


class Clipped(nn.Linear):
    """As a linear layer for inputs of ordinary size."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.clamp(-20, 20))


class ZeroAdapter(nn.Linear):
    """As a linear layer until its adapter is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 32, bias=False), nn.Linear(32, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.up(self.down(input))


class Called(nn.Linear):
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().__call__(input))


class Frozen(nn.Conv2d):
    def _conv_forward(self, *args: torch.Tensor) -> torch.Tensor:
        return super()._conv_forward(*args) * 2


def patched(linear: nn.Linear, factor: float) -> nn.Linear:
    """A linear layer with a forward of its own on the instance."""

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * factor

    linear.forward = types.MethodType(forward, linear)
    return linear


def off(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of an output."""
    return float(((output - expected).norm() / expected.norm()).detach())


def reason(model: nn.Module, name: str) -> str | None:
    """Why a layer of a model cannot be quantized."""
    return next(layer.obstacle for layer in find_layers(model) if layer.name == name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_tell_which_classes_multiply_as_a_linear_layer(dtype: torch.dtype) -> None:
    for build in (Product, nn.Linear, lambda *sizes: patched(nn.Linear(*sizes), 1.0)):
        assert reason(Net(build(64, 64)).to(dtype), "b") is None
        assert reason(Net(build(64, 64)).to("meta", dtype), "b") is None
    for build in (Scaled, Clipped, ZeroAdapter, Called):
        assert "multiplies otherwise" in str(reason(Net(build(64, 64)).to(dtype), "b"))
        assert "multiplies otherwise" in str(reason(Net(build(64, 64)).to("meta", dtype), "b"))
    assert "replaced on this instance" in str(reason(Net(patched(nn.Linear(64, 64), 4)), "b"))


def test_patched_convolutions_embeddings_and_heads_stay_as_they_are() -> None:
    conv, table, head = nn.Conv2d(4, 4, 3), nn.Embedding(8, 8), Scaled(8, 8)
    conv.forward = lambda x: x
    table.forward = lambda ids: ids
    model = nn.ModuleDict({"conv": conv, "own": Frozen(4, 4, 3), "table": table, "lm_head": head})
    reasons = {layer.name: layer.obstacle for layer in find_layers(model)}
    assert "replaced on this instance" in str(reasons["conv"]) and "replaced on this instance" in str(reasons["table"])
    assert "convolves otherwise" in str(reasons["own"]) and "multiplies otherwise" in str(reasons["lm_head"])


@pytest.mark.parametrize(("recipe", "effort"), [("int8", 0), ("int8", 2), ("int8_static", 0), ("int8_static", 2)])
@pytest.mark.parametrize("build", [nn.Linear, Scaled, ZeroAdapter])
def test_a_subclass_computes_what_it_computed(build: type[nn.Linear], recipe: str, effort: int) -> None:
    model = Net(build(64, 64)).eval()
    expected = model(ROWS)
    result = quantize(model, recipe, ROWS, effort=effort).model
    assert off(result(ROWS), expected) < 0.03
    assert isinstance(result.b, QuantLinear) == (build is nn.Linear)


def hooked(model: Net, order: list[str]) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks before and behind the middle linear that change values, with and without keywords, one of them in place."""

    def double(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        order.append("double")
        return (args[0] * 2,)

    def shift(module: nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, object]) -> object:
        order.append("shift")
        return (args[0] + 0.5,), kwargs

    def triple(module: nn.Module, args: object, output: torch.Tensor) -> None:
        order.append("triple")
        output.mul_(3)

    return [
        model.b.register_forward_pre_hook(double),
        model.b.register_forward_pre_hook(shift, with_kwargs=True),
        model.b.register_forward_hook(triple),
    ]


@pytest.mark.parametrize("solver", ["rtn", "gptq", "awq+gptq", "gptq+autoround", "lowrank:8+gptq"])
@pytest.mark.parametrize("recipe", ["int8", "int8_static"])
def test_hooks_stay_with_their_order_while_solving_and_after(recipe: str, solver: str) -> None:
    model, order = Net(nn.Linear(64, 64)).eval(), list[str]()
    handles = hooked(model, order)
    expected = model(ROWS)
    result = quantize(model, recipe, ROWS, solver=solver).model
    order.clear()
    assert off(result(ROWS), expected) < 0.03
    assert order == ["double", "shift", "triple"]
    for handle in handles:
        handle.remove()
    assert not result.b._forward_hooks and not result.b._forward_pre_hooks


def test_hooks_on_a_transposed_layer_stay() -> None:
    model = tiny_models.gpt2().eval()
    ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: output * 3)
    expected = model(ids).logits
    result = quantize(model, "int8", ids, effort=2).model
    assert off(result(ids).logits, expected) < 0.05


def test_hooks_stay_through_training_under_the_rounding() -> None:
    model, order = Net(nn.Linear(64, 64)), list[str]()
    hooked(model, order)
    prepare_qat(model, "int8", ROWS)
    order.clear()
    model(ROWS)
    assert order == ["double", "shift", "triple"]
    pack(model)
    model(ROWS)
    assert order == ["double", "shift", "triple"] * 2


def test_hooks_of_accelerate_that_move_tensors_stay_and_others_keep_the_layer_in_16_bit() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubling(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: torch.Tensor, **kwargs: object) -> object:
            return tuple(x * 2 for x in args), kwargs

    model = Net(nn.Linear(64, 64)).eval()
    hooks.add_hook_to_module(model.b, hooks.AlignDevicesHook("cpu", io_same_device=True))
    hooks.add_hook_to_module(model.c, Doubling())
    expected = model(ROWS)
    result = quantize(model, "int8_static", ROWS, effort=2)
    assert "a hook of accelerate, Doubling," in result.plan.by_name["c"].reason
    assert isinstance(model.b, QuantLinear) and isinstance(model.b._hf_hook, hooks.AlignDevicesHook)
    assert off(model(ROWS), expected) < 0.03
    assert model.b._hf_hook.input_device == torch.device("cpu")  # the hook ran
    hooks.remove_hook_from_module(model.b)
    assert off(model(ROWS), expected) < 0.03


def test_a_weight_that_is_computed_stays_in_16_bit_with_the_way_out() -> None:
    model = Net(nn.Linear(64, 64)).eval()
    nn.utils.parametrizations.weight_norm(model.b)
    prune.l1_unstructured(model.c, "weight", 0.5)
    expected = model(ROWS)
    result = quantize(model, "int8_static", ROWS, solver="gptq")
    assert off(result.model(ROWS), expected) < 0.03
    for name in ("b.parametrizations.weight.original0", "b.parametrizations.weight.original1", "c.weight_orig"):
        assert "make the weight permanent before" in result.plan.by_name[name].reason
    nn.utils.parametrize.remove_parametrizations(model.b, "weight")
    assert make_plan(Net(model.b), "int8").by_name["b"].weight is not None


def test_generating_gives_the_modes_back() -> None:
    class Tokenizer:
        eos_token_id = pad_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [3, 4, 5]}

        def decode(self, ids: list[int], **options: object) -> str:
            return " ".join(map(str, ids))

    model = tiny_models.llama().train()
    model.model.layers[0].eval()
    before = modes(model)
    generate(model, Tokenizer(), "text", 3, device="cpu")
    assert modes(model) == before
