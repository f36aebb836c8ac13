"""What plans say of layers that stay in 16 bit though they were asked for, and of inputs that nothing measures."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import quant
from quant.base.errors import UserError
from quant.calibration.walk.solve import solve_state_dict
from quant.cli.quantize import quantize_command
from quant.recipes.plan_check import NOT_RUN, coverage_warnings
from quant.recipes.plan_make import make_plan


def test_a_layer_asked_for_says_first_why_it_is_not_quantized() -> None:
    model = tiny_models.llama(tie_word_embeddings=True)
    with pytest.raises(
        UserError, match=r"layers: 1 layer, model\.embed_tokens first: its weight is also that of lm_head;"
    ):
        make_plan(model, "fp8_channel", include=["*embed_tokens"])
    with pytest.raises(UserError, match=r"layers: 2 layers, model\.layers\.0\.input_layernorm first: "):
        make_plan(model, "fp8_channel", include=["*input_layernorm"])


def test_inputs_of_a_layer_that_is_never_called_are_not_promised_a_scale() -> None:
    """Mamba multiplies by the weight of dt_proj itself: calibration of its inputs would end in an error."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 16, "time_step_rank": 16}
    model = tiny_models.build("Mamba", "ForCausalLM", sizes)
    layer = make_plan(model, "nvfp4").by_name["backbone.layers.0.mixer.dt_proj"]
    assert layer.weight is None and "no scale of inputs in nvfp4 can be measured" in layer.reason
    assert make_plan(model, "nvfp4a16").by_name[layer.name].weight is not None
    assert make_plan(model, "nvfp4").by_name["backbone.layers.0.mixer.x_proj"].weight is not None


def test_inputs_of_a_convolution_that_its_mixer_reads_stay_in_16_bit() -> None:
    """LFM2 convolves by the weight itself: the plan has no format for inputs that nothing would round."""
    model = tiny_models.build("Lfm2", "ForCausalLM", {**tiny_models.DECODER, "layer_types": ["conv", "full_attention"]})
    name, tokens = "model.layers.0.conv.conv", torch.arange(12)[None]
    layer = make_plan(model, "int8", include=["*", "*.conv.conv"]).by_name[name]
    assert str(layer.weight) == "int8" and layer.activation is None
    assert "inputs in 16 bit, because its module multiplies by the weight itself" in layer.reason
    refused = make_plan(model, "int8_static", include=["*", "*.conv.conv"]).by_name[name]
    assert refused.weight is None and "no scale of inputs in int8_tensor can be measured" in refused.reason
    done = quant.quantize(copy.deepcopy(model), "int8", solver="rtn", include=["*.conv.conv"])
    conv = model.get_submodule(name)
    conv.weight.data = done.model.get_submodule(name).weight.detach().view_as(conv.weight)
    with torch.no_grad():
        assert torch.equal(done.model(tokens).logits, model(tokens).logits)


def test_a_pass_over_shapes_leaves_no_tensor_in_the_model() -> None:
    """Longrope keeps the frequencies that it makes in a pass, and those of one over shapes have no values."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    model = tiny_models.llama(rope_parameters={**rope, "rope_theta": 1e4, "original_max_position_embeddings": 16})
    rows = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        done = quant.quantize(copy.deepcopy(model), "fp8", rows, solver="rtn")
        error = torch.linalg.vector_norm(done.model(rows).logits - (exact := model(rows).logits))
    assert 0 < error < 0.1 * torch.linalg.vector_norm(exact)


def test_an_unknown_solver_is_refused_before_the_model_runs() -> None:
    def run(model: torch.nn.Module) -> None:
        raise AssertionError("the model ran")

    with pytest.raises(ValueError, match="unknown solver 'magic'"):
        make_plan(tiny_models.llama(), "nvfp4", solver="magic", run=run)


def test_inputs_that_nothing_can_measure_are_said() -> None:
    plan = make_plan({"net.up.weight": (64, 32)}, "nvfp4")
    assert coverage_warnings(plan) == []
    layer = replace(plan.layers[0], activation=None, reason=f"recipe nvfp4; weight only: {NOT_RUN}")
    (said,) = coverage_warnings(plan.replace_layers([layer]))
    assert said.startswith("the inputs of 1 layer, net.up first, stay in 16 bit") and "model_factory=" in said


def test_the_terminal_says_that_inputs_of_a_state_dict_stay_in_16_bit(tmp_path: Path) -> None:
    weights = {name: tensor.contiguous() for name, tensor in tiny_models.llama().state_dict().items()}
    save_file(weights, tmp_path / "bare.safetensors")
    arguments = [str(tmp_path / "bare.safetensors"), "--out", str(tmp_path / "out"), "--format"]
    said = CliRunner().invoke(quantize_command, [*arguments, "nvfp4"])
    assert said.exit_code == 0 and "the inputs of 14 layers" in " ".join(said.output.split())
    assert "fusion groups" not in said.output
    weight_only = CliRunner().invoke(quantize_command, [*arguments, "nvfp4a16", "--overwrite"])
    assert weight_only.exit_code == 0 and "the inputs of" not in " ".join(weight_only.output.split())


def test_layers_of_a_state_dict_share_the_scale_of_the_run_model() -> None:
    """Groups by name, solved together: the same global scales as from the module, whose run shows them."""
    model = tiny_models.llama(gain=3.0)
    tensors = model.state_dict()
    plan = make_plan({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "nvfp4a16")
    solved, results = solve_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plan)
    assert (
        len(plan.groups()) == 4
        and len(results) == len(plan.layers)
        and solved.keys() == {x.name for x in plan.quantized}
    )
    truth = quant.quantize(model, "nvfp4a16", solver="rtn").model
    for name, weight in solved.items():
        assert torch.equal(weight.dequantize(), truth.get_submodule(name).quantized_weight.dequantize())


def test_a_plan_leaves_a_model_as_it_was_that_holds_a_module_twice() -> None:
    model = tiny_models.llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    plan = make_plan(model, "nvfp4a16")
    assert plan.by_name["model.layers.0.mlp.up_proj"].weight is None
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_an_exact_name_is_no_glob() -> None:
    shapes = {"up[0].weight": (64, 64), "up0.weight": (64, 64)}
    plan = make_plan(shapes, "nvfp4a16", exclude=["up[0]"])
    assert [layer.name for layer in plan.quantized] == ["up0"]
    assert plan.by_name["up[0]"].reason == "excluded by up[0]"
    assert [layer.name for layer in make_plan(shapes, "nvfp4a16", include=["up[0]"]).quantized] == ["up[0]"]
