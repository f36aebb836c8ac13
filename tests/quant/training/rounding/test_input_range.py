"""Static input scales follow the first inputs of training if asked to, and clipped inputs are counted."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.training.qat_layers import QATLinear

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))


def prepared(recipe: str, **options: Any) -> Any:
    model = tiny_models.llama(num_hidden_layers=1, gain=2.0).requires_grad_(True)
    quant.prepare_qat(model, recipe, ROWS, **options)
    return model.train()


def grown(model: Any, factor: float) -> Any:
    """The model after training has made the inputs of its attention larger."""
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(factor)
    return model


@pytest.mark.parametrize(("recipe", "largest"), [("fp8", 448.0), ("nvfp4", 6.0 * 448.0)])
def test_tracked_scales_reach_the_largest_input(recipe: str, largest: float) -> None:
    model = grown(prepared(recipe, track_inputs=2), 3.0)
    layers = [getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    before = layers[0].input_scale.clone()
    seen: list[torch.Tensor] = []
    layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for rows in (ROWS, ROWS.flip(1)):
        # Two forward passes before the backward passes: the first one's scale is still needed.
        loss = model(rows, labels=rows).loss + model(rows, labels=rows).loss
        loss.backward()
    amax = max(float(x.abs().max()) for x in seen[:2])
    assert amax / largest > 2 * float(before)
    for layer in layers:
        assert float(layer.input_scale) == pytest.approx(amax / largest, rel=1e-6)
    fixed = layers[0].input_scale.clone()
    grown(model, 10.0)(ROWS)
    assert torch.equal(layers[0].input_scale, fixed)  # only the first passes are followed
    assert all(layer.inputs.share == 0.0 for layer in layers)
    with torch.no_grad():
        expected = model.eval()(ROWS).logits
    quant.pack(model)
    with torch.no_grad():
        assert torch.equal(model(ROWS).logits, expected)


def test_clipped_inputs_are_counted_and_told() -> None:
    model = grown(prepared("fp8"), 3.0)
    layer: QATLinear = model.model.layers[0].self_attn.q_proj
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for _ in range(17):
        model(ROWS)
    beyond = (seen[0].double().abs() > 448 * float(layer.input_scale)).double().mean()  # type: ignore[arg-type]
    assert layer.inputs.share == pytest.approx(float(beyond), rel=1e-3) and layer.inputs.seen == 2 * seen[0].numel()
    model.eval()(ROWS)
    assert layer.inputs.passes == 17
    text = r"q_proj: .*% of its inputs in training were beyond the range.*track_inputs=100"
    with pytest.warns(UserWarning, match=text):
        quant.pack(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untouched = prepared("fp8")
        untouched(ROWS)
        quant.pack(untouched)


def test_a_pass_that_checkpointing_repeats_is_one_pass() -> None:
    model = grown(prepared("fp8", track_inputs=1), 3.0)
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (model, plain):
        each(ROWS, labels=ROWS).loss.backward()
    layer, twin = (each.model.layers[0].self_attn.q_proj for each in (model, plain))
    assert layer.inputs.passes == twin.inputs.passes == 1
    assert torch.equal(layer.input_scale, twin.input_scale) and torch.equal(layer.weight.grad, twin.weight.grad)


def test_passes_go_on_where_a_checkpoint_ended_and_states_keep_their_size() -> None:
    model = grown(prepared("fp8", track_inputs=2), 3.0)
    before = model.state_dict()
    for _ in range(2):
        model(ROWS)
    twin = prepared("fp8", track_inputs=2)
    # As torch.distributed.checkpoint reads a state: into tensors of the same sizes.
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    twin.load_state_dict(model.state_dict())
    grown(twin, 10.0)(ROWS)
    layer, other = (each.model.layers[0].self_attn.q_proj for each in (model, twin))
    assert torch.equal(layer.input_scale, other.input_scale)


def test_a_compiled_model_follows_nothing_and_says_so() -> None:
    model = prepared("fp8", track_inputs=5)
    with pytest.warns(UserWarning, match=r"track_inputs=5: no static input scale has followed an input"):
        quant.pack(model)


@pytest.mark.parametrize("value", [-1, 2.5, True, "10"])
def test_a_number_of_passes_is_asked_for(value: Any) -> None:
    with pytest.raises(quant.UserError, match=r"track_inputs=.*: give a number of forward passes"):
        prepared("fp8", track_inputs=value)
