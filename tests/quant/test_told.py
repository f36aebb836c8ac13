"""What a user has to know of a finished run: most weights left in 16 bit, and layers that became zero."""

from dataclasses import replace

import pytest
import tiny_models
import torch

import quant
from quant.calibration.layer_result import LayerResult, loss_warnings
from quant.recipes.plan_check import coverage_warnings


def test_more_than_half_in_16_bit_is_told_with_the_reasons() -> None:
    plan = quant.make_plan(tiny_models.llama(), "fp8_channel", include=["*.o_proj"])
    (line,) = coverage_warnings(plan)
    kept = sum(layer.numel for layer in plan.layers if layer.weight is None)
    total = sum(layer.numel for layer in plan.layers)
    assert line.startswith(f"{kept / total:.0%} of the weights are not quantized (")
    assert "model.layers.0.self_attn.q_proj first" in line and "matches no glob of include" in line and "\n" not in line


def test_a_model_mostly_quantized_has_nothing_to_tell() -> None:
    assert coverage_warnings(quant.make_plan(tiny_models.llama(num_hidden_layers=4), "fp8_channel")) == []


def test_a_fused_layer_that_becomes_zero_is_told() -> None:
    """NVFP4 gives fused layers one tensor scale; values 1e-8 of the largest are below its smallest block scale."""
    model = tiny_models.llama()
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(1e-8)
    with pytest.warns(UserWarning, match="lost most of the values") as raised:
        done = quant.quantize(model, "nvfp4a16")
    assert not done.model.model.layers[1].self_attn.k_proj.dequantize().any()
    (line,) = loss_warnings(done.layers)
    assert [str(each.message) for each in raised] == [line]
    assert line.startswith("1 layer lost most of the values") and "model.layers.1.self_attn.k_proj (100%)" in line
    assert loss_warnings(quant.quantize(tiny_models.llama(), "nvfp4a16").layers) == []


def test_a_weight_that_a_solver_moved_is_not_lost() -> None:
    """Solvers that work from text move weights on purpose; rounding alone does not, however large its error is."""
    result = LayerResult("a", "nvfp4", None, (16, 16), 4.5, 144, 1.0, 0.9, "mse", "recipe nvfp4")
    rounded, moved = loss_warnings([result, replace(result, name="b", solver="awq:merge+gptq")])
    assert rounded.startswith("1 layer lost most of the values, by relative error: a (90%)")
    assert moved.startswith(
        "1 layer moved far from the weight, by relative error: b (90%). Either awq:merge+gptq moved"
    )


def test_zero_weights_lose_nothing() -> None:
    model = tiny_models.llama()
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    assert loss_warnings(quant.quantize(model, "nvfp4a16").layers) == []


def test_a_warning_names_the_line_of_the_caller() -> None:
    """Through any number of frames of the package, whose own lines help nobody."""
    from quant.base.errors import in_command, warn

    frames: dict[str, object] = {"__name__": "quant.somewhere", "warn": warn}
    exec("def inner():\n    warn('deep')\ndef outer():\n    inner()", frames)
    for depth in ("inner", "outer"):
        with pytest.warns(UserWarning, match="deep") as caught:
            frames[depth]()  # type: ignore[operator]
        assert caught[0].filename == __file__
    with in_command(), pytest.warns(UserWarning, match="deep") as caught:
        frames["outer"]()  # type: ignore[operator]
    assert caught[0].filename == "<string>"  # of the package, as the command expects of its warnings
