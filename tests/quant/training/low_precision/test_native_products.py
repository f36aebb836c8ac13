"""The native backend computes as the emulated one does; here its ops run on a CPU, where they are plain PyTorch."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import replace

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.training.low_precision.conversion import to_plain_layers
from quant.training.low_precision.native import NativeProducts
from quant.training.low_precision.training_recipe import RECIPES, Arithmetic, TrainingRecipe

BLOCK, ROWS, ROWS_WGRAD_BF16 = (RECIPES[name] for name in ("fp8_block", "fp8_rowwise", "fp8_rowwise_wgrad_bf16"))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)
    for name in ("has_grouped_fp8", "has_triton"):
        monkeypatch.setattr(f"quant.training.low_precision.backends.{name}", lambda *_: True)


def trained(backend: str, recipe: TrainingRecipe = BLOCK, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 144, **options), nn.ReLU(), nn.Linear(144, 128, **options))
    quant.to_low_precision_training(net, recipe, backend=backend, include=["0"])
    return net.train()


def results(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    y = net(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize(
    "recipe",
    [BLOCK, replace(BLOCK, power_of_two_scales=False),
     replace(BLOCK, power_of_two_scales=False, arithmetic=Arithmetic.BLOCKSCALE), ROWS, ROWS_WGRAD_BF16],
    ids=["powers of two", "fp32", "ours", "rows", "rows, dw in 16 bit"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_products_are_the_emulated_ones(recipe: TrainingRecipe, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50, 256).to(dtype)
    # The first layer alone: another order of sums may turn the sign of a value, which ReLU makes a large difference.
    nets = [trained(backend, recipe, dtype=dtype)[:1] for backend in ("native", "emulated")]
    for own, emulated in zip(*(results(net, x) for net in nets), strict=True):
        # The same rounded operands, summed in another order. Products of rows have results in BF16, whatever the dtype.
        rtol = 2.0**-7 if dtype is torch.bfloat16 or recipe.input == ROWS.input else 1e-5
        torch.testing.assert_close(own, emulated, rtol=rtol, atol=float(emulated.abs().max()) * rtol / 16)


@pytest.mark.parametrize("recipe", [BLOCK, ROWS], ids=["blocks", "rows"])
def test_one_graph_compiles_and_autocast_keeps_float32_weights(recipe: TrainingRecipe) -> None:
    x = torch.randn(64, 256)
    with torch.autocast("cpu", torch.bfloat16):
        eager = results(trained("native", recipe, bias=False), x)
        # The graph breaks at products of rows.
        compile = functools.partial(torch.compile, fullgraph=recipe is BLOCK, backend="aot_eager")
        compiled = results(compile(trained("native", recipe, bias=False)), x)
        emulated = results(trained("emulated", recipe, bias=False), x)
    assert eager[2].dtype is torch.float32
    for one, two, three in zip(eager, compiled, emulated, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=2.0**-7, atol=float(three.abs().max()) * 2.0**-10)


def test_layers_that_read_one_input_round_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.llama(hidden_size=128, intermediate_size=128).bfloat16().train()
    report = quant.to_low_precision_training(model, "fp8_block")
    assert report.backend == "native"
    calls: list[tuple[int, ...]] = []
    quantize = NativeProducts.quantize

    def counted(self: NativeProducts, x: torch.Tensor, square: bool = False, **directions: bool) -> object:
        if not square:
            calls.append(tuple(x.shape))
        return quantize(self, x, square, **directions)

    monkeypatch.setattr(NativeProducts, "quantize", counted)
    rows = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        model(input_ids=rows)
    assert len(calls) == 3 * len(model.model.layers)  # of q, k and v; o; gate and up, whose MLP is one function


def test_weights_are_rounded_once_a_step_where_that_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """144 outputs: fewer than 160 tokens, more than 64. FSDP2 shows a whole weight only while its layer runs."""
    calls: list[tuple[bool, bool]] = []
    quantize = NativeProducts.quantize

    def counted(self: NativeProducts, x: torch.Tensor, square: bool = False, **directions: bool) -> object:
        if square:
            calls.append((directions.get("rows", True), directions.get("columns", True)))
        return quantize(self, x, square, **directions)

    monkeypatch.setattr(NativeProducts, "quantize", counted)
    x = torch.randn(160, 256)
    kept = results(trained("native", bias=False), x)
    assert calls == [(True, True)]
    calls.clear()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for one, two in zip(kept, results(trained("native", bias=False), x), strict=True):
        assert torch.equal(one, two)
    assert calls == [(True, False), (False, True)]
    monkeypatch.undo()
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: True)
    monkeypatch.setattr(NativeProducts, "quantize", counted)
    calls.clear()
    results(trained("native", bias=False), x[:64])
    assert calls == [(True, False), (False, True)]


def test_an_input_that_changes_in_place_or_dies_is_rounded_again() -> None:
    native = NativeProducts(BLOCK)
    x = torch.randn(128, 128)
    first = native.operands(x, True, None)
    assert native.operands(x, False, None)[0] is first[0]
    x.mul_(3)
    assert not torch.equal(native.operands(x, True, None)[1], first[1])
    del x
    assert native._latest is None


def test_gradients_of_frozen_layers_and_of_inputs_alone() -> None:
    net = trained("native", bias=False)
    net[0].weight.requires_grad_(False)
    x = torch.randn(32, 256, requires_grad=True)
    net(x).sum().backward()
    assert net[0].weight.grad is None and x.grad is not None
    net.zero_grad()
    net[0].weight.requires_grad_(True)
    net(x.detach()).sum().backward()
    assert net[0].weight.grad is not None


def test_a_gradient_that_is_not_finite_stops_the_step_by_the_layers_name() -> None:
    net = trained("native")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    y = net(torch.randn(32, 256))
    dy = torch.zeros_like(y)
    dy[3, 5] = torch.nan
    y.backward(dy)
    with pytest.raises(quant.UserError, match="0: its gradient holds NaN or infinity in fp8_block"):
        optimizer.step()


def test_copies_train_and_the_packed_model_has_the_trained_codes() -> None:
    net = trained("native")
    x = torch.randn(32, 256)
    first = results(net, x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        twin.zero_grad()
        for own, other in zip(first, results(twin, x), strict=True):
            assert torch.equal(own, other)
    y = net.eval()(x)
    quant.pack(net)
    assert torch.equal(net(x), y)


def test_the_report_names_layers_that_are_too_small_to_gain_time() -> None:
    layers = nn.Sequential(nn.Linear(4096, 512), nn.Linear(512, 4096), nn.Linear(2048, 2048))
    report = quant.to_low_precision_training(layers, "fp8_block", backend="native")
    # Harmonic means of 910, 910 and 2048.
    assert report.too_small == {"0": (512, 4096), "1": (4096, 512)}
    assert "no faster than in 16 bit: 2 layers, 0 first: [512, 4096] is too small to gain from FP8; exclude=" in str(
        report
    )
    to_plain_layers(layers)
    assert not quant.to_low_precision_training(layers, "fp8_block", backend="emulated").too_small


def test_recipes_and_machines_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(quant.UserError, match='backend "native" does not run mxfp8 here: it has fp8_block and'):
        quant.to_low_precision_training(nn.Sequential(nn.Linear(128, 128)), "mxfp8", backend="native")
    monkeypatch.setattr("quant.kernels.training.fp8_block.runs_on", lambda x: False)
    with pytest.raises(quant.UserError, match="does not run fp8_block here: a cpu has no FP8 products"):
        quant.to_low_precision_training(nn.Sequential(nn.Linear(128, 128)), "fp8_block", backend="native")


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("recipe", [BLOCK, ROWS, ROWS_WGRAD_BF16], ids=["blocks", "rows", "rows, dw in 16 bit"])
def test_on_hopper_products_are_the_emulated_ones(
    recipe: TrainingRecipe, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    x = torch.randn(3, 50, 256, device="cuda", dtype=torch.bfloat16)
    nets = [trained(backend, recipe, device="cuda", dtype=torch.bfloat16) for backend in ("native", "emulated")]
    nets[0] = torch.compile(nets[0], fullgraph=recipe is BLOCK) if compiles else nets[0]
    for own, emulated in zip(*(results(net, x) for net in nets), strict=True):
        assert float((own.double() - emulated.double()).norm() / emulated.double().norm()) < 2.0**-8


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_offloaded_activations_change_nothing(backend: str) -> None:
    x, net = torch.randn(32, 256), trained(backend)
    plain = results(net, x)
    net.zero_grad()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        offloaded = results(net, x)
    assert packed
    for own, other in zip(offloaded, plain, strict=True):
        assert torch.equal(own, other)
