"""A prepared model starts as the quantized model, trains, and is packed to what it was, bit for bit."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

pytest.importorskip("transformers", reason="the extra hf")

import architectures  # needs transformers

import quant
from quant.base.errors import UserError
from quant.export.checkpoint.convert import convert
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize, round_activation
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.rounding.hadamard import hadamard_transform
from quant.kernels.training.fake_rounding import round_input
from quant.training.qat_layers import SCALES, QATExperts, QATLinear, RoundedWeight

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
EDGES = torch.tensor([2.0, 4.0])  # of whose cells one half is narrower
# Recipe, solver, scales, and the dtype of the model.
STARTS = [
    ("nvfp4", "rtn", "recomputed", torch.float32),
    ("nvfp4", "rtn", "recomputed", torch.bfloat16),
    ("nvfp4", "awq+gptq", "frozen", torch.bfloat16),
    ("nvfp4", "gptq", "learned", torch.float32),
    ("nvfp4a16", "rotation:32+gptq", "frozen", torch.float32),
    ("nvfp4a16", "lowrank:4+gptq", "learned", torch.float32),
    ("mxfp4", "mse", "learned", torch.float32),
    ("mxfp8", "rtn", "recomputed", torch.float32),
    ("mxfp6a16", "rtn", "recomputed", torch.bfloat16),
    ("fp8", "rtn", "recomputed", torch.bfloat16),
    ("fp8", "gptq", "learned", torch.float32),
    ("fp8_channel", "mse", "learned", torch.bfloat16),
    ("fp8_block", "rtn", "recomputed", torch.bfloat16),
    ("int8", "rtn", "recomputed", torch.bfloat16),
    ("int4a16_g32", "gptq", "frozen", torch.bfloat16),
]


def small(**options: Any) -> Any:
    """One block of a llama whose layers take every format, its parameters trainable."""
    model = tiny_models.llama(num_hidden_layers=1, hidden_size=128, intermediate_size=256, **{"gain": 2.0, **options})
    return model.requires_grad_(True)


def logits(model: nn.Module, rows: torch.Tensor = ROWS) -> torch.Tensor:
    with torch.no_grad():
        return model(rows).logits  # type: ignore[no-any-return]


def train(model: nn.Module, steps: int = 3, rate: float = 3e-3) -> None:
    """A few steps towards predicting the next token."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ROWS, labels=ROWS).loss.backward()
        optimizer.step()


def layers_of(model: nn.Module) -> dict[str, RoundedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RoundedWeight)}


@pytest.mark.filterwarnings("ignore:.*Hadamard rotation:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "solver", "scales", "dtype"),
    # The slow ones combine what the others have one by one.
    quick_cases(STARTS, lambda *start: STARTS.index(start) not in (1, 7, 8, 9, 10, 12)),
    ids=str,
)
def test_starts_at_the_quantized_model_and_ends_as_what_was_trained(
    recipe: str, solver: str, scales: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = small(dtype=dtype)
    quantized = logits(quant.quantize(copy.deepcopy(model), recipe, ROWS, solver=solver).model)
    quant.prepare_qat(model, recipe, ROWS, solver=solver, scales=scales)
    assert torch.equal(logits(model), quantized)
    before = {name: module.weight.detach().clone() for name, module in layers_of(model).items()}
    train(model)
    trained = logits(model)
    assert not torch.equal(trained, quantized)
    assert all(not torch.equal(before[name], module.weight) for name, module in layers_of(model).items())
    plan = quant.pack(model)
    assert layers_of(model) == {}
    assert torch.equal(logits(model), trained)
    quant.save(model, plan, tmp_path / "out")
    assert torch.equal(logits(quant.load(tmp_path / "out")), trained)


def test_a_mixed_plan_of_a_checkpoint_trains_and_becomes_a_checkpoint_of_modelopt(tmp_path: Path) -> None:
    model = small(dtype=torch.bfloat16)
    recipe = quant.Recipe.from_dict(
        {"name": "mixed", "weight": "nvfp4", "activation": "nvfp4", "solver": "gptq",
         "rules": [{"match": "*down_proj", "weight": "fp8", "activation": "fp8"},
                   {"match": "*o_proj", "weight": "keep"}]}
    )  # fmt: skip
    quantized = quant.quantize(model, recipe, ROWS)
    quant.save(quantized.model, quantized.plan, tmp_path / "ptq")
    loaded = quant.load(tmp_path / "ptq")
    start = logits(loaded)
    quant.prepare_qat(loaded)
    assert {module.scales for module in layers_of(loaded).values()} == {"frozen"}
    assert torch.equal(logits(loaded), start)
    state = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    loaded.load_state_dict(state)
    train(loaded)
    trained = logits(loaded)
    plan = quant.pack(loaded)
    quant.save(loaded, plan, tmp_path / "qat")
    convert(tmp_path / "qat", tmp_path / "modelopt", "modelopt")
    assert torch.equal(logits(quant.load(tmp_path / "modelopt")), trained)
    assert not torch.equal(trained, start)


def reference(module: QATLinear, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x, of the weight, of the bias and of a learned step by an explicit straight-through graph."""
    format = module.weight_format
    with torch.no_grad():
        scale, second = module.current_scales()
        rounded = module.rounded(torch.float32).double()
    if scale is None:
        inside, slope = torch.ones_like(rounded), torch.zeros_like(rounded)
    else:
        step = scale.double() * (1.0 if second is None else second.double())
        rows, columns = format.block_shape(rounded.shape)
        step = step.repeat_interleave(rows, 0)[: len(rounded)].repeat_interleave(columns, 1)[:, : rounded.shape[1]]
        lowest, w = -8 if format.name.startswith("int4") else -format.element.max, module.weight.double()
        inside = ((w >= lowest * step) & (w <= format.element.max * step)).double()
        inside = torch.ones_like(inside) if module.scales == "recomputed" else inside
        slope = rounded / step - inside * module.weight.double() / step
    x64 = x.detach().double().requires_grad_()
    weight = module.weight.detach().double().requires_grad_()
    w = rounded + inside * (weight - weight.detach())
    wanted = [x64, weight]
    if module.range_shift is not None:
        # The step is start · exp(shift / range), with the range of an average block.
        learned = module.range_shift.detach().double().requires_grad_()
        start = module.start_step.double()
        rows, columns = format.block_shape(rounded.shape)
        each = start * (learned / (format.element.max * start.mean())).exp()
        each = each.repeat_interleave(rows, 0)[: len(w)].repeat_interleave(columns, 1)[:, : w.shape[1]]
        w = w + slope.detach() * (each - each.detach())
        wanted.append(learned)
    seen = x64 if module.pre_scale is None else x64 * module.pre_scale.double()
    seen = hadamard_transform(seen, module.hadamard) if module.hadamard else seen
    given = seen
    if module.activation_format is not None:
        found = round_activation(seen.detach().float(), module.activation_format, module.input_scale).double()
        passed = torch.ones_like(found)
        if module.input_scale is not None:
            number = module.activation_format
            limit = number.element.max * (number.scale.max if number.global_scale else 1) * float(module.input_scale)
            passed = (seen.detach().abs() <= limit).double()
        given = found + passed * (seen - seen.detach())
        if module.activation_format.block[0] == 1 and 0 < (columns := module.activation_format.block[1]) <= 32:
            # The scale of a short block follows its largest magnitude, unless it is the largest or smallest scale.
            amax = seen.unflatten(-1, (-1, columns)).abs().amax(dim=-1).repeat_interleave(columns, dim=-1)
            scaled = amax.detach() / (6.0 * float(module.input_scale)) if module.input_scale is not None else None
            follows = torch.ones_like(amax) if scaled is None else (scaled > 2.0**-9) & (scaled <= 448.0)
            given = given + follows * (found - seen.detach()) / amax.detach() * (amax - amax.detach())
    y = given @ w.T
    if module.lowrank_down is not None:
        y = y + seen @ module.lowrank_down.double().T @ module.lowrank_up.double().T
    if module.bias is not None:
        bias = module.bias.detach().double().requires_grad_()
        y = y + bias
        wanted.append(bias)
    return list(torch.autograd.grad(y, wanted, dy.double()))


GRADIENTS = [
    (weight, activation, scales, False)
    for weight, activation in (
        ("nvfp4", "nvfp4"), ("nvfp4", ""), ("mxfp4", "mxfp8"), ("mxfp6", ""), ("fp8", "fp8"),
        ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_group"), ("int8", "int8_token"), ("int4_g32", ""),
    )
    for scales in SCALES
]  # fmt: skip
COMPILED = [("nvfp4", "nvfp4", scales, True) for scales in SCALES]


@pytest.mark.parametrize(("weight", "activation", "scales", "compiled"), [*GRADIENTS, *COMPILED])
def test_gradients_are_those_of_an_explicit_straight_through_graph(
    weight: str, activation: str, scales: str, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    format = FORMATS[weight]
    given = nn.Parameter(torch.randn(128, 128, generator=generator))
    static = bool(activation) and FORMATS[activation].is_static
    packed = QuantLinear(
        quantize(0.8 * given.detach(), format), torch.randn(128, generator=generator),
        FORMATS[activation] if activation else None,
        torch.tensor(2e-4 if activation == "nvfp4" else 2e-3) if static else None,
        pre_scale=torch.rand(128, generator=generator) + 0.5, hadamard=32,
        lowrank=(torch.randn(4, 128, generator=generator), torch.randn(128, 4, generator=generator)),
    )  # fmt: skip
    assert packed.bias is not None
    module = QATLinear(given, packed, packed.bias.requires_grad_(), scales, torch.float32)
    x, dy = torch.randn(2, 5, 128, generator=generator).requires_grad_(), torch.randn(2, 5, 128, generator=generator)
    torch.compiler.reset()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    run(x).backward(dy)
    found = [x.grad, module.weight.grad, *([] if module.range_shift is None else [module.range_shift.grad])]
    for gradient, exact in zip([*found, module.bias.grad], reference(module, x, dy), strict=True):
        assert gradient is not None and gradient.dtype is torch.float32
        assert float((gradient.double() - exact).norm() / exact.norm()) < 1e-6
    if scales != "recomputed":
        assert 0 < int((module.weight.grad == 0).sum()) < 0.5 * module.weight.numel()


@pytest.mark.parametrize("activation", ["nvfp4", "mxfp4", "mxfp8"])
def test_the_gradient_of_a_short_block_scales_as_rounding_does(activation: str) -> None:
    """Euler's identity of functions that scale with their argument, block by block; ties and rows of zeros too."""
    x = torch.randn(7, 80, generator=torch.Generator().manual_seed(0))
    x[0, :16], x[1, 3], x[1, 4] = 0, 5.0, -5.0
    x, dy = x.requires_grad_(), torch.randn(7, 80, generator=torch.Generator().manual_seed(1))
    rounded = round_input(x, FORMATS[activation], torch.tensor(5e-3) if activation == "nvfp4" else None)
    rounded.backward(dy)
    assert x.grad is not None

    def summed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = nn.functional.pad(one.detach().double() * other.detach().double(), (0, 16))
        return product.unflatten(-1, (-1, FORMATS[activation].block[1])).sum(dim=-1)

    torch.testing.assert_close(summed(x, x.grad), summed(rounded, dy), rtol=1e-5, atol=1e-5)
    assert bool((x.grad != dy).any()) and bool((x.grad[0, :16] == dy[0, :16]).all())


@pytest.mark.filterwarnings("ignore:.*Hadamard rotation:UserWarning")
@pytest.mark.parametrize("solver", ["gptq", "awq+gptq", "rotation:32+gptq", "lowrank:4+gptq"])
def test_training_starts_as_near_to_the_original_as_the_codes_allow(solver: str) -> None:
    """Where the code is that of rounding to nearest, the start is the original, scaled, rotated, less its branch."""
    model = small()
    originals = {name: module.weight.detach().clone() for name, module in model.named_modules() if "proj" in name}
    norms = {name: module.weight.detach().clone() for name, module in model.named_modules() if "norm" in name}
    quant.prepare_qat(model, "nvfp4", ROWS, solver=solver)
    for name in ("q_proj", "k_proj"):  # the rows of v_proj may have taken the scale of o_proj
        name = f"model.layers.0.self_attn.{name}"
        module = layers_of(model)[name]
        assert isinstance(module, QATLinear)
        norm = "model.layers.0.input_layernorm"
        expected = originals[name] * (norms[norm] / model.get_submodule(norm).weight.detach())
        expected = hadamard_transform(expected, module.hadamard) if module.hadamard else expected
        if module.lowrank_down is not None:
            expected = expected - module.lowrank_up @ module.lowrank_down  # type: ignore[operator]
        scale, second = module.current_scales()
        assert scale is not None and second is not None
        step = (scale * second).repeat_interleave(16, dim=1)
        codes = (2 * module.rounded(torch.float32).detach() / step).round() / 2
        gap = torch.where(codes.abs() < 2, 0.5, torch.where(codes.abs() < 4, 1.0, 2.0))
        inner = ((expected / step - codes).abs() < 0.4 * gap) & (codes.abs() < 6) & ~torch.isin(codes.abs(), EDGES)
        assert float(inner.double().mean()) > 0.3
        torch.testing.assert_close((module.weight.detach() / step)[inner], (expected / step)[inner], rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*Hadamard rotation:UserWarning")
@pytest.mark.parametrize(
    "solver",
    quick_cases(
        ("rtn", "gptq", "awq+gptq", "rotation:32+gptq", "lowrank:4+gptq"),
        lambda solver: solver not in ("gptq", "rotation:32+gptq"),
    ),
)
def test_the_original_tells_a_checkpoint_what_was_rounded(solver: str, tmp_path: Path) -> None:
    """Nearly the start of a model that was quantized just now, though the scales that AWQ folded are in no file."""
    original = small()
    quantized = quant.quantize(copy.deepcopy(original), "nvfp4", ROWS, solver=solver)
    quant.save(quantized.model, quantized.plan, tmp_path / "ptq")
    direct = copy.deepcopy(original)
    quant.prepare_qat(direct, "nvfp4", ROWS, solver=solver, scales="frozen")
    loaded, blind = (quant.load(tmp_path / "ptq") for _ in range(2))
    quant.prepare_qat(loaded, original=original)
    quant.prepare_qat(blind)
    assert torch.equal(logits(loaded), logits(direct))
    for name, module in layers_of(loaded).items():
        scale, second = module.current_scales()
        assert scale is not None and second is not None
        step = (scale * second).repeat_interleave(16, dim=1)
        start, middle, wanted = (layers_of(each)[name].weight.detach() / step for each in (loaded, blind, direct))
        assert float((start - wanted).abs().mean()) < (
            1e-3 if solver == "rtn" else 0.05
        )  # corrections look like scales
        assert float((middle - wanted).abs().mean()) > 0.1


def test_other_weights_tell_a_checkpoint_nothing(tmp_path: Path) -> None:
    quantized = quant.quantize(small(), "nvfp4", ROWS, solver="gptq")
    quant.save(quantized.model, quantized.plan, tmp_path / "ptq")
    loaded, blind = (quant.load(tmp_path / "ptq") for _ in range(2))
    quant.prepare_qat(loaded, original=small(seed=1))
    quant.prepare_qat(blind)
    for name, module in layers_of(loaded).items():
        assert torch.equal(module.weight, layers_of(blind)[name].weight)
    with pytest.raises(quant.UserError, match="original= is for a model that is quantized already"):
        quant.prepare_qat(small(), "nvfp4", ROWS, original=small())


def test_a_compiled_model_trains_as_it_does_uncompiled() -> None:
    model = small()
    quant.prepare_qat(model, "nvfp4", ROWS)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager")
    for each in (model, compiled):
        each(ROWS, labels=ROWS).loss.backward()
    gradients = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        trained = compiled(ROWS).logits
    quant.pack(compiled)
    torch.testing.assert_close(logits(twin), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel, AveragedModel])
def test_wrapped_models_are_packed_and_saved_and_hooks_stay(wrap: Any, tmp_path: Path) -> None:
    model, calls = small(), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    quant.prepare_qat(model, "nvfp4a16")
    calls.clear()
    trained = logits(model)
    wrapped = wrap(model)
    model = wrapped.module if wrap is AveragedModel else model  # which is a copy
    quant.save(wrapped, quant.pack(wrapped), tmp_path / "out")
    assert torch.equal(logits(model), trained) and len(calls) == 2
    assert torch.equal(logits(quant.load(tmp_path / "out")), trained)


def test_scales_of_whole_tensors_are_measured_within_one_graph() -> None:
    model = small()
    quant.prepare_qat(model, "fp8", ROWS, scales="recomputed")
    expected = logits(model)
    model.model.compile(backend="aot_eager", fullgraph=True)  # raises where the graph would break
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = small()
    quant.prepare_qat(model, "nvfp4", ROWS)
    twin = copy.deepcopy(model).train()
    twin.gradient_checkpointing_enable()
    for each in (model, twin):
        each(ROWS, labels=ROWS).loss.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_fused_layers_go_on_sharing_one_second_level() -> None:
    model = small()
    plan = quant.prepare_qat(model, "nvfp4", ROWS, scales="recomputed")
    train(model)
    quant.pack(model)
    for members in plan.groups().values():
        scales = [model.get_submodule(member.name).global_scale for member in members]
        amax = max(float(model.get_submodule(m.name).dequantize().abs().max()) for m in members)
        assert len(members) > 1 and all(torch.equal(scale, scales[0]) for scale in scales)
        assert float(scales[0]) == pytest.approx(amax / (6 * 448), rel=0.1)


def test_fused_layers_train_one_scale_of_their_tensors() -> None:
    """Its gradient is the sum of what each layer has for it; it is one parameter under one name."""
    model = small()
    plan = quant.prepare_qat(model, "fp8", ROWS, scales="learned")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("range_shift")]
    assert len(names) == len(plan.groups()) + 2  # o_proj and down_proj are alone
    module: Any = model.model.layers[0].mlp
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    parts = []
    for layer in (module.gate_proj, module.up_proj):
        model.zero_grad()
        layer(x).square().sum().backward()
        parts.append(module.gate_proj.range_shift.grad.clone())
    assert all(part.any() for part in parts)
    model.zero_grad()
    (module.gate_proj(x).square().sum() + module.up_proj(x).square().sum()).backward()
    torch.testing.assert_close(module.gate_proj.range_shift.grad, parts[0] + parts[1])
    with torch.no_grad():
        module.gate_proj.range_shift.mul_(1.5)
    twin = small()
    quant.prepare_qat(twin, "fp8", ROWS, scales="learned")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits(twin), logits(model))
    quant.pack(twin)
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("scales", SCALES)
def test_copies_in_bf16_that_were_trained_are_packed(scales: str) -> None:
    """FSDP2 with a param_dtype shows a layer such copies; here functional_call does. A state carries their dtype."""
    model, twin = (small() for _ in range(2))
    for each in (model, twin):
        quant.prepare_qat(each, "nvfp4a16", ROWS, solver="mse" if scales != "recomputed" else "rtn", scales=scales)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    narrow = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, _, name=name: seen.update({name: layer.packed_weight().dequantize()})
        )
        for name, layer in layers_of(model).items()
    ]
    torch.func.functional_call(model, narrow, (ROWS,))
    for hook in hooks:
        hook.remove()
    masters = {name: layer.packed_weight().dequantize() for name, layer in layers_of(twin).items()}
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        with torch.no_grad():
            evaluated = each(ROWS).logits
        quant.pack(each)
        for name, values in seen.items():
            assert torch.equal(each.get_submodule(name).dequantize(), values), name
        assert torch.equal(logits(each), evaluated)
    assert any(not torch.equal(values, masters[name]) for name, values in seen.items())


def test_experts_and_embeddings_train(tmp_path: Path) -> None:
    model = tiny_models.qwen3_moe(num_hidden_layers=1, gain=2.0).requires_grad_(True)
    recipe = quant.Recipe.from_dict(
        {"name": "all", "weight": "mxfp8", "activation": "mxfp8", "solver": "rtn",
         "rules": [{"match": "*embed_tokens", "weight": "mxfp8", "activation": "keep"}]}
    )  # fmt: skip
    quantized = logits(quant.quantize(copy.deepcopy(model), recipe, ROWS).model)
    quant.prepare_qat(model, recipe, ROWS)
    kinds = {type(module).__name__ for module in layers_of(model).values()}
    assert kinds == {"QATLinear", "QATExperts", "QATEmbedding"}
    assert torch.equal(logits(model), quantized)
    train(model)
    trained = logits(model)
    assert not torch.equal(trained, quantized)
    assert all(module.weight.grad is not None for module in layers_of(model).values())
    quant.pack(model)
    assert torch.equal(logits(model), trained)


def test_gradients_of_experts_are_those_of_their_matrices() -> None:
    """Of one expert that is used, as a linear alone has it; zero of the others."""
    generator = torch.Generator().manual_seed(0)
    stack, x = torch.randn(3, 64, 64, generator=generator), torch.randn(5, 64, generator=generator)
    format = FORMATS["nvfp4"]
    module = QATExperts(nn.Parameter(stack.clone()), QuantExperts(quantize(stack, format), format), "frozen", x.dtype)
    alone = QuantLinear(quantize(stack[1], format), None, format)
    linear = QATLinear(nn.Parameter(stack[1].clone()), alone, None, "frozen", x.dtype)
    with module.opened():
        module(x, 1).square().sum().backward()
    linear(x).square().sum().backward()
    assert module.weight.grad is not None and linear.weight.grad is not None
    assert torch.equal(module.weight.grad[1], linear.weight.grad)
    assert not module.weight.grad[[0, 2]].any()


def test_an_optimizer_made_before_trains_the_weights() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    quant.prepare_qat(model, "nvfp4", ROWS, solver="gptq")
    before = {name: module.weight.detach().clone() for name, module in layers_of(model).items()}
    model(ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    assert all(not torch.equal(before[name], module.weight) for name, module in layers_of(model).items())


def test_an_optimizer_of_parameters_that_are_gone_is_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    quantized = quant.quantize(model, "nvfp4", ROWS)
    with pytest.raises(quant.UserError, match=r"an optimizer \(SGD\) holds 7 parameters .* after prepare_qat"):
        quant.prepare_qat(model, quantized.plan)
    del optimizer


def test_an_optimizer_that_would_not_train_the_model_is_refused() -> None:
    """It lacks learned scales, holds weights that are transposed now, or has state in another dtype."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        quant.UserError, match=r"\(SGD\) lacks 7 parameters that the model has since, its learned scales"
    ):
        quant.prepare_qat(model, "nvfp4a16", scales="learned")
    model = tiny_models.gpt2()
    optimizer = torch.optim.SGD([model.transformer.h[0].mlp.c_fc.weight], 0.1)
    with pytest.raises(quant.UserError, match=r"\(SGD\) holds 1 parameter that the model no longer has"):
        quant.prepare_qat(model, "nvfp4a16")
    model = small(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    with pytest.raises(
        quant.UserError, match=r"has made steps, and keeps what it knows of 7 parameters in another dtype"
    ):
        quant.prepare_qat(model, "nvfp4a16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)  # the model is prepared
    model(ROWS, labels=ROWS).loss.backward()
    optimizer.step()


def test_an_optimizer_may_hold_what_was_never_of_the_model() -> None:
    model, other = small(dtype=torch.bfloat16), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], 1e-3)
    model(ROWS, labels=ROWS).loss.backward()  # gradients in BF16 of weights that will be float32
    quant.prepare_qat(model, "nvfp4a16")
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    optimizer.zero_grad()
    model(ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


def test_after_scales_that_cannot_start_others_may() -> None:
    """Calibration is not lost: the model is quantized, and training starts there."""
    model = small()
    with pytest.raises(
        quant.UserError, match=r"use scales=.* The model is quantized by now: call prepare_qat\(model, "
    ):
        quant.prepare_qat(model, "nvfp4a16", ROWS, solver="gptq", scales="recomputed")
    twin = quant.quantize(small(), "nvfp4a16", ROWS, solver="gptq").model
    torch.testing.assert_close(model(ROWS).logits, twin(ROWS).logits, rtol=0, atol=0)
    quant.prepare_qat(model, scales="frozen")
    quant.pack(model)
    torch.testing.assert_close(model(ROWS).logits, twin(ROWS).logits, rtol=0, atol=0)


def test_padding_has_no_gradient_in_a_rounded_embedding() -> None:
    model = small(pad_token_id=0)
    quant.prepare_qat(model, "nvfp4a16", include=["model.embed_tokens"])
    ids = ROWS.clone()
    ids[:, :4] = 0
    model(ids, labels=ROWS).loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient[0].abs().sum() == 0 and gradient[1:].abs().sum() > 0
    quant.pack(model)
    assert model.model.embed_tokens.padding_idx == 0


def test_adapters_are_merged_before_a_model_is_packed() -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    model = small()
    quant.prepare_qat(model, "nvfp4a16")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(quant.UserError, match=r"q_proj\.base_layer: an adapter is on this layer; merge it first"):
        quant.pack(adapted)
    merged = adapted.merge_and_unload()
    expected = logits(merged)
    quant.pack(merged)
    assert torch.equal(logits(merged), expected)


def test_a_code_beyond_the_grid_is_told_with_its_original_too() -> None:
    """torchao writes -128 in INT8."""
    model = small()
    done = quant.quantize(model, "int8", ROWS, solver="rtn")
    layer = model.model.layers[0].mlp.up_proj
    layer.codes.view(torch.int8).view(-1)[0] = -128
    with pytest.raises(quant.UserError, match=r"up_proj: holds the code -128, as other toolkits write it"):
        quant.prepare_qat(model, done.plan, original=small())


def test_offloaded_layers_are_refused() -> None:
    model = small()
    done = quant.quantize(model, "nvfp4a16", ROWS, solver="rtn")
    model.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(quant.UserError, match=r"up_proj: its weight is offloaded, and training needs it in memory"):
        quant.prepare_qat(model, done.plan)


def test_what_is_not_finite_is_not_packed() -> None:
    model = small()
    quant.prepare_qat(model, "nvfp4a16", scales="learned")
    model.model.layers[0].mlp.up_proj.range_shift.data[0, 0] = torch.nan
    with pytest.raises(quant.UserError, match=r"up_proj: training made NaN or infinity of its range_shift"):
        quant.pack(model)


def test_refusals() -> None:
    with pytest.raises(quant.UserError, match=r"not in training: call quant\.prepare_qat"):
        quant.pack(small())
    model = small()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    with pytest.raises(quant.UserError, match=r"q_proj: its weight is frozen .* freeze layers after prepare_qat"):
        quant.prepare_qat(model, "nvfp4", ROWS)
    with torch.device("meta"):
        outline = small(gain=None)
    with pytest.raises(quant.UserError, match=r"q_proj: its weight is on the meta device; load the model"):
        quant.prepare_qat(outline, "nvfp4")
    model = small()
    with pytest.raises(quant.UserError, match="scales='learnt': unknown; known: recomputed, frozen, learned"):
        quant.prepare_qat(model, "nvfp4", ROWS, scales="learnt")
    with pytest.raises(quant.UserError, match=r"'recomputed' does not give the scales that mse chose.*'frozen'"):
        quant.prepare_qat(copy.deepcopy(model), "nvfp4a16", solver="mse", scales="recomputed")
    plan = replace(quant.make_plan(model, "nvfp4a16"), attention=FORMATS["fp8"])
    with pytest.raises(quant.UserError, match="attention in fp8, which has no gradient"):
        quant.prepare_qat(copy.deepcopy(model), plan)
    plan = quant.prepare_qat(model, "nvfp4a16")
    with pytest.raises(quant.UserError, match="prepared for QAT already"):
        quant.prepare_qat(model, "nvfp4a16")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(quant.UserError, match="up_proj: training made NaN or infinity"):
        quant.pack(model)
    quantized = quant.quantize(small(), "nvfp4a16")
    with pytest.raises(quant.UserError, match=r"quantized already, and a recipe is given"):
        quant.prepare_qat(quantized.model, "nvfp4a16")
    with pytest.raises(quant.UserError, match=r"the plan and the model disagree on whether it is quantized"):
        quant.prepare_qat(quantized.model, quant.make_plan(small(), "nvfp4a16", exclude=["*up_proj"]))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GptOssForCausalLM", "DbrxForCausalLM"])
def test_weights_that_are_stored_transposed_train(name: str) -> None:
    """Conv1D of GPT-2, experts `[in, out]` with rows of gate and up in turn, and experts in two dimensions."""
    rows = ROWS % 40
    model = architectures.build(name, torch.float32).requires_grad_(True)
    quantized = logits(quant.quantize(copy.deepcopy(model), "nvfp4a16", solver="rtn").model, rows)
    quant.prepare_qat(model, "nvfp4a16", solver="rtn")
    assert torch.equal(logits(model, rows), quantized)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model(rows).logits.square().mean().backward()
    optimizer.step()
    assert all(module.weight.grad.any() for module in layers_of(model).values())
    trained = logits(model, rows)
    assert not torch.equal(trained, quantized)
    quant.pack(model)
    assert torch.equal(logits(model, rows), trained)


class _Bypassing(nn.Module):
    """Multiplies by the weight of its first layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(functional.linear(self.embed(ids), self.first.weight).tanh())  # type: ignore[no-any-return]


def _steps(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """Makes two steps of training; returns the warnings."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train()(inputs).square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in caught]


BYPASSED = (
    "first: its weight has a gradient, and the layer was never called; code that multiplies by the weight itself "
    "trains it unrounded, and the packed model differs from the trained one: call the layer there, or start again "
    "with it in exclude="
)


def test_a_layer_that_is_multiplied_by_without_a_call_is_named() -> None:
    model = _Bypassing()
    quant.prepare_qat(model, "nvfp4a16")
    assert _steps(model, ROWS) == [BYPASSED]
    trained = model.eval()(ROWS)
    quant.pack(model)
    assert not torch.equal(model(ROWS), trained)
    model = _Bypassing()
    plan = quant.prepare_qat(model, "nvfp4a16", exclude="first")
    assert [layer.name for layer in plan.quantized] == ["second"]
    assert _steps(model, ROWS) == []
    trained = model.eval()(ROWS)
    quant.pack(model)
    assert torch.equal(model(ROWS), trained)


class _BypassingRows(nn.Module):
    """Takes rows of numbers, which nothing can stand in for, and never uses its last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.first, self.unused = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.start(x) @ self.first.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fp8_rowwise", "mxfp8", "qat", "quantized before"])
def test_a_layer_that_is_never_called_is_told_from_an_unused_one(method: str) -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def prepared(**options: Any) -> nn.Module:
        model = _BypassingRows()
        if method == "quantized before":
            plan = quant.quantize(model, "mxfp8", **options).plan
            quant.prepare_qat(model, plan)
        elif method == "qat":
            quant.prepare_qat(model, "mxfp8", **options)
        else:
            quant.to_low_precision_training(model, method, **options)
        return model

    assert _steps(prepared(), rows) == [BYPASSED]
    assert _steps(prepared(exclude="first"), rows) == []
    compiled = torch.compile(prepared(exclude="first"), backend="eager")
    assert _steps(compiled, rows) == []


def test_low_precision_leaves_such_a_layer_in_16_bit() -> None:
    model = _Bypassing().train()
    report = quant.to_low_precision_training(model, "mxfp8")
    assert report.converted == ("second",)
    assert "first first: its module multiplies by the weight itself" in str(report)
    model(ROWS).square().sum().backward()
    trained = model.eval()(ROWS)
    quant.pack(model)
    assert torch.equal(model(ROWS), trained)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "int8", "fp8_channel", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_float64_model_trains_and_keeps_its_weights(format: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64)).double()
    weight, before = net[0].weight, net[0].weight.detach().clone()
    x = torch.randn(16, 64, dtype=torch.float64)
    quant.prepare_qat(net, format, x, dtype=dtype)
    assert net[0].weight is weight and torch.equal(weight.detach(), before.to(dtype or torch.float64))
    net(x).square().mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    with torch.no_grad():
        outputs = net.eval()(x)
        quant.pack(net)
        assert torch.equal(net(x), outputs)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_gradients_that_are_not_finite_change_no_weight(action: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    plan = quant.prepare_qat(net, "mxfp8", on_nonfinite=action)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in net]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net(torch.randn(8, 64)).square().sum().backward()
    net[1].weight.grad[3] = torch.nan
    if action == "stop":
        for optimizer in optimizers:
            with pytest.raises(UserError, match=r"^1.weight: its gradient holds NaN or infinity; no weight"):
                optimizer.step()
    else:
        with pytest.warns(UserWarning, match=r"^1.weight: its gradient holds NaN or infinity; this step is skipped"):
            optimizers[0].step()
        optimizers[1].step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net.zero_grad()
    with torch.no_grad():
        net[0].weight[2] = torch.inf
    net(torch.randn(8, 64)).square().sum().backward()
    if action == "stop":
        with pytest.raises(UserError, match=r"^0: its weight holds NaN or infinity"):
            optimizers[1].step()
    with torch.no_grad():
        net[0].weight.copy_(before["0.weight"])
    assert quant.pack(net) == plan
    net[1].weight.grad = torch.full((64,), torch.inf)
    with pytest.warns(
        UserWarning, match="trains 1.weight, 1.bias, and not the 1 layer in codes, which have no gradient"
    ):
        optimizers[1].step()  # packed, the model is watched for NaN no longer


def test_a_weight_that_a_model_class_does_not_share_is_told_before_training() -> None:
    model = tiny_models.llama()
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    second.q_proj.weight = first.q_proj.weight
    message = r"layers.0.self_attn.q_proj.weight and model.layers.1.self_attn.q_proj.weight are one object"
    with pytest.warns(UserWarning, match=message):
        quant.to_low_precision_training(model.train(), "fp8_rowwise").undo()
    with pytest.warns(UserWarning, match=message):
        quant.prepare_qat(model, "mxfp8")
    second.q_proj.weight = nn.Parameter(first.q_proj.weight.detach().clone())
    tied = tiny_models.llama(tie_word_embeddings=True)
    with warnings.catch_warnings(action="error"):
        quant.to_low_precision_training(tied.train(), "fp8_rowwise")
