"""Transformers and UNets of diffusers: quantized in memory by plain rounding and GPTQ, saved, and loaded bit by bit."""

from __future__ import annotations

import copy
import json
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

pytest.importorskip("diffusers", reason="the extra diffusion")

from tiny_denoisers import FAMILIES, noise_of, tiny_calls, tiny_denoiser

import quant
from quant.cli.export_command import export_command
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.trace import nested

# Two streams by keyword and by position, and a mixed dtype; the others are slow.
_QUICK = ("Flux.1", "HunyuanVideo", "Wan")
_EACH = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def _error(model: nn.Module, original: nn.Module, calls: list[dict[str, Any]]) -> float:
    """Returns the relative error of the predicted noise over all calls."""
    pairs = [(noise_of(model, call), noise_of(original, call)) for call in calls]
    wrong, whole = (
        sum(float(x.square().sum()) for x in xs) for xs in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return (wrong / whole) ** 0.5


@pytest.mark.filterwarnings("ignore:.*of the weights are not quantized")
@pytest.mark.parametrize("family", _EACH)
def test_gptq_loses_less_than_rounding_and_a_saved_model_is_the_same(family: str, tmp_path: Path) -> None:
    original = tiny_denoiser(family)
    calls, held_out = tiny_calls(family, 4), tiny_calls(family, 2, seed=7)
    rounded = quant.quantize(copy.deepcopy(original), "nvfp4", calls, solver="rtn")
    solved = quant.quantize(copy.deepcopy(original), "nvfp4", calls, solver="gptq")
    plain, gptq = (_error(each.model, original, held_out) for each in (rounded, solved))
    assert gptq < 0.95 * plain < 0.4
    assert _error(solved.model, solved.model, held_out) == 0

    quant.save(solved.model, solved.plan, tmp_path / "saved")
    loaded = quant.load(tmp_path / "saved")
    for (name, ours), (_, theirs) in zip(
        sorted(solved.model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
    ):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (ours, theirs))), name
    assert _error(loaded, solved.model, held_out) == 0


@pytest.mark.filterwarnings("ignore:.*of the weights are not quantized")
@pytest.mark.parametrize("family", ["Z-Image", pytest.param("SDXL", marks=pytest.mark.slow)])
def test_kfac_rounds_for_the_noise(family: str) -> None:
    """Z-Image gives a list of images, and blocks of a UNet share the text that they attend to."""
    original, calls, held_out = tiny_denoiser(family), tiny_calls(family, 4), tiny_calls(family, 2, seed=7)
    solved = {
        solver: quant.quantize(copy.deepcopy(original), "nvfp4a16", calls, solver=solver) for solver in ("gptq", "kfac")
    }
    assert not [layer.name for layer in solved["kfac"].plan.quantized if "no gradient (" in layer.reason]
    gptq, kfac = (_error(each.model, original, held_out) for each in solved.values())
    assert gptq != kfac < 1.1 * gptq


def test_what_runs_once_or_modulates_stays_in_16_bit_unless_it_is_included() -> None:
    model, calls = tiny_denoiser("Flux.1"), tiny_calls("Flux.1", 1)
    plan = quant.quantize(copy.deepcopy(model), "fp8", calls, solver="rtn").plan
    kept = {layer.name: layer.reason for layer in plan.layers if layer.weight is None}
    assert kept["x_embedder"].startswith("embedding or final projection")
    assert kept["proj_out"] == kept["x_embedder"]
    assert kept["transformer_blocks.0.norm1.linear"].startswith("modulation")
    assert all(
        name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in plan.by_name.keys() - kept
    )
    outside = quant.make_plan(model, "fp8", include=["proj_out"])
    assert [layer.name for layer in outside.quantized] == ["proj_out"]
    only = quant.quantize(model, "fp8", calls, solver="rtn", include=["*.norm1.linear"]).plan
    assert [layer.name for layer in only.quantized] == [f"transformer_blocks.{i}.norm1.linear" for i in range(2)]


def test_a_forward_loop_calibrates_as_the_calls_that_it_makes() -> None:
    calls = tiny_calls("PixArt", 2)
    models = [tiny_denoiser("PixArt") for _ in range(2)]
    quant.quantize(models[0], "fp8", calls, solver="gptq")
    quant.quantize(models[1], "fp8", forward_loop=lambda model: [model(**call) for call in calls], solver="gptq")
    assert _error(*models, tiny_calls("PixArt", 1, seed=7)) == 0


def test_adapters_are_merged_by_the_advice_of_the_refusal() -> None:
    peft = pytest.importorskip("peft", reason="adapters")
    model, calls = tiny_denoiser("Flux.1"), tiny_calls("Flux.1", 1)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))  # type: ignore[operator]
    with pytest.raises(quant.UserError, match="has an adapter of PEFT") as refused:
        quant.quantize(model, "fp8_channel", calls, solver="rtn")
    adapted = noise_of(model, calls[0])
    exec(str(refused.value).partition("merge them first (")[2].partition("),")[0], {"model": model})
    # The sum of both weights is rounded to BF16.
    assert (noise_of(model, calls[0]) - adapted).norm() < 0.02 * adapted.norm()
    assert quant.quantize(model, "fp8_channel", calls, solver="rtn").plan.quantized


def test_calls_keep_their_timesteps_and_dtypes() -> None:
    """999 is 1000 in bfloat16, and another point of the trajectory."""
    seen = []
    model = tiny_denoiser("Stable Diffusion 3.5")
    calls = [{**call, "timestep": torch.tensor([999.0])} for call in tiny_calls("Stable Diffusion 3.5", 1)]
    model.time_text_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    quant.quantize(model, "nvfp4", calls, solver="gptq")
    assert {float(time) for time in seen} == {999.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_predicts_what_pytorch_predicts(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx")
    model = tiny_denoiser("Stable Diffusion 3.5", torch.float32)
    solved = quant.quantize(model, "int8", solver="rtn")
    quant.save(solved.model, solved.plan, tmp_path / "saved")
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 64), "timestep": torch.tensor([600.0]),
    }  # fmt: skip
    named = [f"--input={name}:fp32:{','.join(map(str, x.shape))}" for name, x in inputs.items()]
    options = ["--to=onnx", "--target=onnxruntime", f"--out={tmp_path / 'onnx'}", *named]
    result = CliRunner().invoke(export_command, [str(tmp_path / "saved"), *options])
    assert result.exit_code == 0, result.output
    session = onnxruntime.InferenceSession(tmp_path / "onnx/model.onnx", providers=["CPUExecutionProvider"])
    y = torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])
    exact = noise_of(solved.model, {**inputs, "return_dict": False})
    # Sums in another order round some inputs to the neighbouring code, one part in 127 of the largest.
    assert float((y - exact).norm() / exact.norm()) < 0.02


_SIZES = ("--shapes=height=8:8:16,width=8:12:16",)
_ENGINES = {
    "Stable Diffusion 3.5": (
        "hidden_states:1,4,height,width", "encoder_hidden_states:1,6,32", "pooled_projections:1,64", "timestep:1",
    ),
    "Flux.1": (
        "hidden_states:1,tokens,16", "encoder_hidden_states:1,6,32", "pooled_projections:1,32", "timestep:1",
        "img_ids:tokens,3", "txt_ids:6,3", "guidance:1",
    ),
    "SDXL": (
        "sample:1,4,height,width", "timestep:1", "encoder_hidden_states:1,6,32",
        "added_cond_kwargs.text_embeds:1,32", "added_cond_kwargs.time_ids:1,6",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", _ENGINES)
def test_an_engine_takes_the_sizes_of_its_profile(family: str, tmp_path: Path) -> None:
    """The audit reads from the engine that each layer, and each convolution of a UNet, runs in FP8."""
    pytest.importorskip("tensorrt_rtx", reason="the extra tensorrt")
    solved = quant.quantize(
        tiny_denoiser(family, torch.float32), "fp8", tiny_calls(family, 1, torch.float32), solver="rtn"
    )
    quant.save(solved.model, solved.plan, tmp_path / "saved")
    inputs = [f"--input={name}:fp16:{dims}" for name, dims in (each.split(":") for each in _ENGINES[family])]
    sizes = ("--shapes=tokens=16:32:64",) if family == "Flux.1" else _SIZES
    options = ["--to=tensorrt", "--target=sm120", "--dtype=fp16", f"--out={tmp_path / 'model.engine'}", "--json"]
    if family == "Stable Diffusion 3.5":
        large = CliRunner().invoke(
            export_command, [str(tmp_path / "saved"), *options, *inputs, "--shapes=height=8:8:64,width=8:12:16"]
        )
        assert "takes a height of 8 to 17: pass --shapes height=8:17:17" in large.output and large.exit_code == 2
    result = CliRunner().invoke(export_command, [str(tmp_path / "saved"), *options, *inputs, *sizes])
    assert result.exit_code == 0, result.output
    audit = json.loads(result.stdout)["audit"]
    assert all(row["passed"] for row in audit)
    assert len(solved.plan.quantized) == {"SDXL": 69, "Flux.1": 34}.get(family, 37) <= len(audit)


@pytest.mark.filterwarnings("ignore")
def test_an_input_of_a_wrong_size_is_one_line_that_names_the_layer(tmp_path: Path) -> None:
    printed = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(printed)
    dims = {"sample": (1, 4, 8, 8), "timestep": (1,), "encoder_hidden_states": (1, 6, 48)}  # 32 are right
    dims |= {"added_cond_kwargs.text_embeds": (1, 32), "added_cond_kwargs.time_ids": (1, 6)}
    inputs = {name: GraphInput(torch.zeros(each), each) for name, each in dims.items()}
    with pytest.raises(ValueError, match=r"attn2\.to_k does not export: .*\[6, 48\]"):
        write_onnx(tiny_denoiser("SDXL", torch.float32), tmp_path / "unet.onnx", inputs=inputs)
    assert not printed.buffer and not logger.disabled
    logger.removeHandler(printed)


@pytest.mark.filterwarnings("ignore")
def test_a_file_computes_images_of_every_size_of_its_range(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx")
    model = tiny_denoiser("SDXL", torch.float32)
    dims = {"sample": (1, 4, "height", "width"), "timestep": (1,), "encoder_hidden_states": (1, 6, 32)}
    dims |= {"added_cond_kwargs.text_embeds": (1, 32), "added_cond_kwargs.time_ids": (1, 6)}
    inputs = {
        name: GraphInput(torch.zeros([x if isinstance(x, int) else 2 for x in each]), each)
        for name, each in dims.items()
    }
    write_onnx(model, tmp_path / "unet.onnx", inputs=inputs, shapes="height=8:8:16,width=8:12:16")
    session = onnxruntime.InferenceSession(tmp_path / "unet.onnx", providers=["CPUExecutionProvider"])
    for size in ((8, 8), (16, 12)):
        call = {name: torch.randn([x if isinstance(x, int) else 1 for x in each]) for name, each in dims.items()}
        call |= {"sample": torch.randn(1, 4, *size), "timestep": torch.tensor([600.0])}
        y = torch.from_numpy(session.run(None, {name: x.numpy() for name, x in call.items()})[0])
        exact = noise_of(model, {**nested(call), "return_dict": False})
        assert y.shape == exact.shape and float((y - exact).norm() / exact.norm()) < 1e-4
