"""Wrappers are looked through; models with adapters or quantized layers, and data without rows, are refused at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.base.errors import UserError
from quant.evaluation.evaluate import evaluate
from quant.export.checkpoint.load import load
from quant.export.checkpoint.save import save
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize
from quant.training.low_precision.conversion import to_low_precision_training
from quant.training.qat import prepare_qat

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


def llama() -> Any:
    return tiny_models.llama(tie_word_embeddings=False).eval()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_quantized_measured_and_saved_as_the_one_inside(wrap: Any, tmp_path: Path) -> None:
    expected = quantize(llama(), "nvfp4a16", IDS, effort=0).model(IDS).logits
    original = llama()
    model = wrap(llama())
    assert evaluate(model, IDS).loss == evaluate(llama(), IDS).loss
    result = quantize(model, "nvfp4a16", IDS, effort=0)
    assert type(result.model) is type(original)
    assert torch.equal(result.model(IDS).logits, expected)
    save(wrap(result.model), result.plan, tmp_path / "q")
    assert torch.equal(load(tmp_path / "q")(IDS).logits, expected)


def test_a_module_that_was_compiled_in_place_is_quantized_uncompiled_and_stays_compiled() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls.append(len(inputs))
        return graph.forward

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    model.compile(backend=backend)
    rows = torch.randn(4, 3, 64)
    expected = quantize(nn.Sequential(*model), "int8_static", rows, effort=0).model(rows)
    assert not calls
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    model.compile(backend=backend)
    result = quantize(model, "int8_static", rows, effort=0).model
    assert not calls and result._compiled_call_impl is not None
    assert expected.shape == result(rows).shape and calls


def test_a_compiled_module_inside_is_refused() -> None:
    model = llama()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    with pytest.raises(UserError, match=r"model.layers.0: torch.compile has wrapped it.*\._orig_mod"):
        quantize(model, "nvfp4a16", IDS, effort=0)


TAKERS: list[Callable[[nn.Module], Any]] = [
    lambda m: quantize(m, "fp8_channel"), lambda m: make_plan(m, "fp8_channel"), lambda m: prepare_qat(m, "int8"),
    to_low_precision_training,
]  # fmt: skip


@pytest.mark.parametrize("take", TAKERS)
def test_a_module_of_torch_jit_is_refused_and_the_one_that_it_was_made_of_is_taken(take: Any) -> None:
    inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    for compiled in (torch.jit.script(inner), torch.jit.trace(inner, torch.zeros(2, 64))):
        with pytest.raises(UserError, match=r"^1: torch\.jit has compiled it.* takes the module that was scripted"):
            take(nn.Sequential(nn.Linear(64, 64), compiled))
    with pytest.raises(UserError, match=r"^the model: torch\.jit has compiled it"):
        take(torch.jit.script(inner))
    take(nn.Sequential(nn.Linear(64, 64), inner))


@pytest.mark.parametrize("take", TAKERS)
def test_a_lazy_layer_is_taken_after_the_first_call(take: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64)).eval()
    with pytest.raises(UserError, match=r"^1: a LazyLinear, whose weight has no shape before its first input; call"):
        take(model)
    model(torch.zeros(2, 64))
    take(model)


@pytest.mark.parametrize("take", TAKERS[:-1])
def test_adapters_are_refused_before_they_are_taken_for_weights(take: Callable[[nn.Module], Any]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"q_proj: has an adapter of PEFT, as 2 layers.*merge_and_unload"):
        take(model)
    with pytest.raises(UserError, match=r"q_proj: has an adapter of PEFT"):
        take(model.get_base_model())  # the layers are in it too
    assert quantize(model.merge_and_unload(), "fp8_channel").plan.quantized


def test_a_prompt_of_peft_is_refused() -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match=r"PeftModelForCausalLM: pass model\.get_base_model"):
        quantize(peft.get_peft_model(llama(), prompt), "fp8_channel")


class Int8Weight(nn.Linear):
    """As bitsandbytes and others hold weights."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)


class Packed(nn.Module):
    """As GPTQ holds weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))


def ours() -> nn.Module:
    return quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "int8", include=["0"], effort=0).model[0]


def in_training() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    prepare_qat(model, "int8", include=["0"])
    return model[0]


def of_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model[0]


@pytest.mark.parametrize(
    ("build", "by"),
    [
        (ours, "Blockscale"),
        (in_training, "quant.prepare_qat"),
        (Int8Weight, "Int8Weight"),
        (Packed, "Packed"),
        (of_torchao, "torchao"),
    ],
)
def test_a_partly_quantized_model_is_refused(build: Callable[[], nn.Module], by: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), build())
    for take in (quantize, make_plan):
        with pytest.raises(UserError, match=rf"1: .* quantized already, by .*{by}"):
            take(model, "int8")
    assert type(model[0]) is nn.Linear


def test_empty_batches_count_as_none() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))

    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    full = quantize(model(), "int8_static", [rows[:2], rows[2:]], effort=2).model
    result = quantize(model(), "int8_static", [rows[:2], rows[:0], rows[2:]], effort=2).model
    loop = quantize(model(), "int8_static", forward_loop=lambda m: [m(rows[:2]), m(rows[:0]), m(rows[2:])]).model
    assert all(torch.equal(tensor, result.state_dict()[name]) for name, tensor in full.state_dict().items())
    assert torch.equal(result[0].input_scale, loop[0].input_scale)
    for data in (rows[:0], torch.empty(4, 0, 64), [rows[:0]], {"input": rows[:0]}, torch.empty(2, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"empty|data is \["):
            quantize(model(), "int8_static", data, effort=0)
