"""Calibration inputs of any kind give what the same inputs give as one tensor, and reach models of several inputs."""

import copy
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from torch.utils.data import DataLoader

import quant
from quant.base.errors import UserError
from quant.calibration.inputs import Inputs, inputs_of, recorded, taking_inputs
from quant.calibration.walk.collect import calibrate

ROWS = torch.randint(3, 60, (6, 16), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    return tiny_models.llama(gain=3, dtype=torch.bfloat16)  # type: ignore[no-any-return]


def state(done: quant.Quantized) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in done.model.state_dict().items()}


def as_loader() -> Any:
    return DataLoader([{"input_ids": row} for row in ROWS], batch_size=2)


SAME = {
    "names": {"data": {"input_ids": ROWS}},
    "dicts": {"data": [{"input_ids": row[None]} for row in ROWS]},
    "tuples": {"data": [(row[None],) for row in ROWS]},
    "tensors": {"data": [row[None] for row in ROWS]},
    "generator": {"data": (row[None] for row in ROWS)},
    "loop": {"forward_loop": lambda model: [model(row[None]) for row in ROWS]},
    "a function": {"data": lambda model: [model(row[None]) for row in ROWS]},
}


@pytest.mark.parametrize("kind", SAME)
def test_static_scales_are_those_of_the_rows(kind: str) -> None:
    expected = state(quant.quantize(llama(), "nvfp4", ROWS))
    found = state(quant.quantize(llama(), "nvfp4", **SAME[kind]))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("kind", ["names", "loop"])
def test_gptq_solves_the_same_problem(kind: str) -> None:
    expected = state(quant.quantize(llama(), "nvfp4a16", ROWS, solver="gptq"))
    given = SAME[kind] if kind != "loop" else {"forward_loop": lambda model: [model(row[None]) for row in ROWS]}
    found = state(quant.quantize(llama(), "nvfp4a16", solver="gptq", **given))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_loader_gives_its_batches() -> None:
    model = llama()
    inputs = inputs_of(as_loader(), model)
    assert [call[1]["input_ids"].shape for call in inputs.calls] == [(2, 16)] * 3
    assert torch.equal(torch.cat([call[1]["input_ids"] for call in inputs.calls]), ROWS)
    quant.quantize(model, "nvfp4", as_loader())


def test_a_loader_of_inputs_and_labels_is_told_from_one_of_inputs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    loader = [(torch.randn(2, 8), torch.zeros(2)) for _ in range(3)]
    with pytest.raises(
        ValueError, match=r"Sequential takes \(input\), and the first item does not fit .*take only the inputs"
    ):
        inputs_of(loader, model)
    assert len(inputs_of([inputs for inputs, labels in loader], model)) == 3


def test_batches_join_calls_of_one_shape_alone() -> None:
    calls = [((), {"x": torch.full((1, n), float(n))}) for n in (2, 2, 3, 3, 3)]
    batches = Inputs(calls).split(2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [tuple(batch.arguments()[1]["x"].shape) for batch in batches] == [(2, 2), (2, 3), (1, 3)]


def test_what_has_no_rows_of_its_own_is_not_joined() -> None:
    """One row of positions for all rows of a call, a number, an array: each call runs by itself, as it came."""
    for extra in ({"p": torch.arange(6)[None]}, {"p": torch.tensor(3.0)}, {"p": np.arange(2)}):
        calls = [((), {"x": torch.full((2, 6), float(n)), **copy.deepcopy(extra)}) for n in range(3)]
        assert [len(batch) for batch in Inputs(calls).split(4)] == [1, 1, 1]
    swapped = [((torch.ones(1, 6), None), {}), ((None, torch.ones(1, 6)), {})]
    assert [len(batch) for batch in Inputs(swapped).split(4)] == [1, 1]


@pytest.mark.parametrize("data", [{"input_ids": ROWS}, [{"input_ids": ROWS}], [(row[None],) for row in ROWS]])
def test_scales_alone_take_the_same_data(data: Any) -> None:
    model = llama()
    plan = quant.make_plan(model, "fp8")
    expected, found = calibrate(model, plan, ROWS), calibrate(model, plan, data)
    assert found.keys() == expected.keys() and all(found[name] == expected[name] for name in expected)


def test_positions_of_all_rows_change_no_solution() -> None:
    found = []
    for extra in ({}, {"position_ids": torch.arange(ROWS.shape[1])[None]}):
        data = [{"input_ids": rows, **extra} for rows in ROWS.split(3)]
        found.append(quant.quantize(tiny_models.llama(), "fp8", data, solver="gptq").model.state_dict())
    assert all(torch.equal(found[1][name], expected) for name, expected in found[0].items())


def whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16,
             "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    model = tiny_models.build("Whisper", "ForConditionalGeneration", sizes)
    return model, {"input_features": torch.randn(4, 16, 32), "decoder_input_ids": ROWS[:4, :6]}


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    return tiny_models.t5(), {"input_ids": ROWS[:4], "decoder_input_ids": ROWS[:4, :6]}


def clip() -> tuple[Any, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    text = transformers.CLIPTextConfig(**tiny_models.WIDTHS, **tiny_models.BLOCKS, eos_token_id=2)
    vision = transformers.CLIPVisionConfig(**tiny_models.IMAGES)
    sizes = {"text_config": text, "vision_config": vision, "projection_dim": 64}
    images = torch.randn(4, 3, 32, 32)
    return tiny_models.build("CLIP", "Model", sizes), {"input_ids": ROWS[:4], "pixel_values": images}


@pytest.mark.parametrize("make", [whisper, t5, clip])
@pytest.mark.parametrize(("recipe", "solver"), [("nvfp4", None), ("fp8_channel", "gptq")])
def test_models_of_several_inputs_are_calibrated(make: Any, recipe: str, solver: str | None) -> None:
    model, given = make()
    with torch.no_grad():
        before = model(**given)[0]
    result = quant.quantize(model, recipe, given, solver=solver)
    with torch.no_grad():
        after = result.model(**given)[0]
    cosine = torch.nn.functional.cosine_similarity(after.flatten(1), before.flatten(1)).mean()
    assert cosine > (0.999 if recipe == "fp8_channel" else 0.95)
    assert "fusion_groups" not in result.plan.provenance  # found on the first of the inputs
    assert any(len(members) == 3 for members in result.plan.groups().values())


@pytest.mark.parametrize("solver", ["gptq", "gptq+autoround:5"])
def test_modules_that_read_the_weight_of_a_layer_are_walked_through(solver: str) -> None:
    """T5 casts to the dtype of `wo.weight`, also when `wo` is solved and the blocks behind it are not."""
    _, given = t5()
    losses = {}
    for name in ("rtn", solver):
        model = tiny_models.t5(num_layers=2, gain=3)
        with torch.no_grad():
            before = model(**given)[0]
            after = quant.quantize(model, "nvfp4a16", given, solver=name).model(**given)[0]
        losses[name] = float((after - before).norm())
    assert losses[solver] < losses["rtn"]


def test_the_hook_is_gone_afterwards() -> None:
    model = llama()
    with taking_inputs(model):
        assert model(Inputs([((ROWS[:1],), {})])).logits.shape[:2] == (1, 16)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": []}, "empty"),
        ({"data": ["a text"]}, "calibration_rows"),
        ({"data": "a text"}, "data is a str"),
        ({"data": {"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}}, "different numbers of rows"),
        ({"forward_loop": lambda model: None}, "never called"),
        ({"forward_loop": lambda model: None, "data": ROWS}, "one of them"),
    ],
)
def test_what_is_no_input_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        quant.quantize(llama(), "nvfp4", **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", ["nvfp4", "fp8", "int8_static", "fp8_channel", "mxfp8", "nvfp4a16"])
@pytest.mark.parametrize("effort", [0, 1, 2])
def test_without_data_a_static_scale_is_all_that_is_missed(preset: str, effort: int) -> None:
    """What docs/calibration.md says: effort 1 takes the place of 2, but nothing can give a static scale."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    if preset in ("nvfp4", "fp8", "int8_static"):
        with pytest.raises(UserError, match=r"^0: \S+ inputs have a static scale; pass calibration data"):
            quant.quantize(model, preset, effort=effort)
    else:
        plan = quant.quantize(model, preset, effort=effort).plan
        assert {layer.solver for layer in plan.quantized} == {"rtn" if effort == 0 else "mse"}


def test_a_loop_that_generates_is_refused_with_the_way_out() -> None:
    """Recorded calls are run again, and a token that generate passes stands for none of those in its cache."""
    model = llama()
    model.generation_config.eos_token_id = None

    def generate(module: Any) -> None:
        module.generate(ROWS, max_new_tokens=3, do_sample=False)

    with pytest.raises(ValueError, match=r"KV cache, as model.generate does.*call the model itself on whole texts"):
        quant.quantize(model, "nvfp4", generate)
    assert not model._forward_pre_hooks

    def without_cache(module: Any) -> None:
        module.generate(ROWS, max_new_tokens=3, do_sample=False, use_cache=False)

    assert len(recorded(model, without_cache)) == 3


def test_a_budget_takes_one_tensor() -> None:
    with pytest.raises(UserError, match="one tensor"):
        quant.quantize(llama(), data={"input_ids": ROWS, "attention_mask": torch.ones_like(ROWS)}, bits=6)


def test_token_ids_without_an_axis_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16 token ids without an axis of rows; give \[row\[None\] for row in rows\]"):
        quant.quantize(llama(), "nvfp4", list(ROWS))


@pytest.mark.parametrize("model", [tiny_models.llama, tiny_models.gpt2], ids=["rotary", "table"])
@pytest.mark.parametrize("options", [{"recipe": "nvfp4"}, {"recipe": "nvfp4a16", "solver": "gptq"}, {"bits": 6.0}])
def test_rows_are_not_longer_than_the_positions(model: Any, options: dict[str, Any]) -> None:
    rows = torch.randint(3, 60, (4, 65), generator=torch.Generator().manual_seed(0))
    short = model(max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"rows of 65 tokens are longer than the 64 positions of \w+; use a"):
        quant.quantize(short, data=rows, **options)
