"""Pipelines of diffusers: `quantize PIPELINE --out DIR`, and both ways of loading what it writes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

pytest.importorskip("diffusers", reason="the extra diffusion")

from tiny_denoisers import PIPELINES, SMALL, noise_of, tiny_calls, tiny_image, tiny_pipeline

import quant
from quant.calibration.statistics import static_input_scale
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.formats.format import FORMATS
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import fake_quantize, round_activation
from quant.models import pipelines
from quant.run.pipeline import _Prompts

pytestmark = pytest.mark.filterwarnings("ignore:.*of the weights are not quantized", "ignore:.*float32")
# The convolutions of a UNet are quantized in formats of whole rows.
_KINDS = [("SD3", "nvfp4"), ("SDXL", "fp8_channel")]
_KINDS += [pytest.param(kind, "nvfp4", marks=pytest.mark.slow) for kind in PIPELINES if kind != "SD3"]  # type: ignore[misc]
_STEPS = ("--call", "num_inference_steps=3", "--device", "cpu")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a red fox\n\ntwo red cat\na fox in a cat\n")
    return file


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a tiny pipeline, written once."""
    home = tmp_path_factory.mktemp("pipelines")
    return lambda kind: home / kind if (home / kind).exists() else tiny_pipeline(kind, home / kind)


def _quantize(*arguments: str | Path) -> Any:
    return CliRunner().invoke(quantize_command, [str(each) for each in arguments])


@pytest.mark.parametrize(("kind", "format"), _KINDS)
def test_both_ways_of_loading_make_the_images_of_the_model_in_memory(
    kind: str, format: str, pipeline: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    name, out = "unet" if kind == "SDXL" else "transformer", tmp_path / "out"
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline(kind), dtype=torch.bfloat16)
    ignored = type(getattr(pipe, name))._keys_to_ignore_on_load_unexpected
    before = tiny_image(pipe)
    solved = quant.quantize(getattr(pipe, name), format, forward_loop=lambda model: tiny_image(pipe), solver="gptq")
    expected = tiny_image(pipe)
    assert not np.array_equal(before, expected)
    shutil.copytree(pipeline(kind), out, ignore=lambda _, names: {name} & set(names))
    quant.save(solved.model, solved.plan, out / name)
    assert np.array_equal(tiny_image(quant.load_pipeline(out)), expected)
    said: list[str] = []
    monkeypatch.setattr(diffusers.models.modeling_utils.logger, "warning", said.append)
    theirs = diffusers.DiffusionPipeline.from_pretrained(out, dtype=torch.bfloat16)
    assert np.array_equal(tiny_image(theirs), expected) and said == []  # no word on tensors that it does not use
    assert type(getattr(theirs, name))._keys_to_ignore_on_load_unexpected == ignored


def test_the_command_writes_the_pipeline_again(pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    import diffusers

    source, out = pipeline("SD3"), tmp_path / "out"
    result = _quantize(source, "--format", "fp8_channel", "--solver", "rtn", "--calib", prompts, *_STEPS, "--out", out)
    assert result.exit_code == 0, result.output
    pipe = diffusers.DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16)
    quant.quantize(pipe.transformer, "fp8_channel", solver="rtn")
    loaded = quant.load_pipeline(out)
    assert np.array_equal(tiny_image(loaded), tiny_image(pipe))
    # The rest is what it was, byte for byte.
    for file in (each for each in source.rglob("*") if each.is_file() and each.parent.name != "transformer"):
        assert (out / file.relative_to(source)).read_bytes() == file.read_bytes()

    # Who gives the pipeline where a checkpoint is wanted is told the component's directory, which serves.
    with pytest.raises(quant.UserError, match="one of its components: ") as refused:
        quant.load(out)
    assert quant.verify(str(refused.value).rpartition(": ")[2]).findings == ()
    with pytest.raises(quant.UserError, match="make one with ") as refused:
        quant.load(source / "transformer")
    advice = f"`quantize {source} --components transformer --format nvfp4 --out DIR`"
    assert advice in str(refused.value)
    assert _quantize(*advice.strip("`").split()[1:-2], "--dry-run").exit_code == 0
    result = CliRunner().invoke(main, ["report", str(out)])
    assert result.output == f"error: {out}: no report.json; pass one of its parts: {out}/transformer\n"
    assert CliRunner().invoke(main, ["report", f"{out}/transformer"]).exit_code == 0
    # Inputs that are measured as they come were calibrated on nothing.
    assert json.loads((out / "denoising.json").read_text())["prompts"]["calibration"] == 0

    # A pipeline saves itself by diffusers' method, and a quantized one is not quantized again.
    loaded.save_pretrained(tmp_path / "again")
    assert np.array_equal(tiny_image(quant.load_pipeline(tmp_path / "again")), tiny_image(pipe))
    result = _quantize(out, "--format", "fp8", "--calib", prompts, "--out", tmp_path / "twice")
    assert result.exit_code and "is quantized already (denoising.json)" in result.output
    options = ("--format", "fp8", "--calib", prompts, *_STEPS, "--out", out)
    assert "pass --overwrite" in _quantize(source, *options).output
    assert _quantize(source, *options, "--overwrite").exit_code == 0


def test_the_loss_is_measured_by_timestep_on_held_out_prompts(
    pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = _quantize(pipeline("SD3"), "--format", "nvfp4", "--calib", prompts, *_STEPS, "--out", out)
    assert result.exit_code == 0, result.output
    recorded = json.loads((out / "denoising.json").read_text())
    errors = recorded["components"]["transformer"]
    *timesteps, last = errors
    assert last == "all" and len(timesteps) == 3 and recorded["prompts"]["held_out"] == ["a fox in a cat"]
    assert "PSNR" in result.output and f"{errors['all']:.2%}" in result.output

    # The same from outside: the original denoises the held-out prompt, the quantized one on its calls.
    import diffusers

    original = diffusers.DiffusionPipeline.from_pretrained(pipeline("SD3"), dtype=torch.bfloat16)
    quantized = quant.load(out / "transformer")
    original.set_progress_bar_config(disable=True)
    sums: dict[str, list[float]] = {}

    def compare(module: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        difference = quantized(*args, **kwargs)[0].float() - result[0].float()
        pair = sums.setdefault(f"{float(kwargs['timestep'][0]):.4g}", [0.0, 0.0])
        pair[0] += float(difference.square().sum())
        pair[1] += float(result[0].float().square().sum())

    original.transformer.register_forward_hook(compare, with_kwargs=True)
    generator = torch.Generator().manual_seed(2)  # the seed 0 and the prompt's number
    original(prompt="a fox in a cat", num_inference_steps=3, generator=generator, output_type="latent")
    assert {key: (wrong / whole) ** 0.5 for key, (wrong, whole) in sums.items()} == pytest.approx(
        {key: errors[key] for key in timesteps}, rel=1e-3
    )


def test_formats_are_chosen_within_a_budget_by_what_the_prediction_loses(
    pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "out"
    file.write_text('a red fox\n{"prompt": "two red cat", "height": 32, "width": 16}\na fox in a cat\n')
    result = _quantize(pipeline("SD3"), "--bits", "6", "--calib", file, *_STEPS, "--out", out)
    assert result.exit_code == 0, result.output
    plan = quant.Plan.load(out / "transformer/plan.json")
    open_layers = [layer for layer in plan.layers if layer.score is not None]
    chosen = {str(layer.weight) for layer in open_layers}
    assert {"nvfp4", "fp8_channel"} <= chosen <= {"nvfp4", "fp8_channel", "None"}
    assert 5.5 < 8 * sum(layer.nbytes for layer in open_layers) / sum(layer.numel for layer in open_layers) <= 6
    recorded = json.loads((out / "denoising.json").read_text())

    # The error of a block from outside: its weights rounded in the model, its inputs before each layer.
    import diffusers

    model = diffusers.SD3Transformer2DModel.from_pretrained(
        pipeline("SD3"), subfolder="transformer", dtype=torch.bfloat16
    )
    seen: list[Any] = []
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline("SD3"), transformer=model, dtype=torch.bfloat16)
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    for number, (prompt, more) in enumerate((("a red fox", {}), ("two red cat", {"height": 32, "width": 16}))):
        generator = torch.Generator().manual_seed(number)
        pipe(prompt=prompt, generator=generator, num_inference_steps=3, output_type="latent", **more)
    hook.remove()
    # The last call at each timestep.
    calls = {f"{float(kwargs['timestep'][0]):.4g}": (args, kwargs) for args, kwargs in seen}
    exact = {time: noise_of(model, kwargs) for time, (_, kwargs) in calls.items()}
    block = recorded["sensitivity"]["transformer"]["transformer_blocks.2"]
    assert set(block) == set(exact)
    nvfp4 = FORMATS["nvfp4"]
    members = [layer for layer in open_layers if layer.name.startswith("transformer_blocks.2.")]
    layers = {layer.name: model.get_submodule(layer.name) for layer in members}
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0]))
        for name, layer in layers.items()
    ]
    for _, kwargs in calls.values():
        noise_of(model, kwargs)
    for hook in hooks:
        hook.remove()
    scales = {name: static_input_scale(torch.stack([x.abs().amax() for x in xs]).amax(), nvfp4, torch.bfloat16)
              for name, xs in inputs.items()}  # fmt: skip
    shared = {}
    for each in members:
        group = [
            layers[other.name].weight for other in members if (other.group or other.name) == (each.group or each.name)
        ]
        shared[each.name] = global_scale_of(torch.stack([w.abs().amax().float() for w in group]).amax(), nvfp4)
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(fake_quantize(layer.weight.float(), nvfp4, global_scale=shared[name]))
            layer.register_forward_pre_hook(lambda _, args, scale=scales[name]: round_activation(args[0], nvfp4, scale))
    noise = {time: noise_of(model, kwargs) for time, (_, kwargs) in calls.items()}
    expected = {time: float((noise[time] - y).norm() / y.norm()) for time, y in exact.items()}
    assert expected == pytest.approx(block, rel=1e-3)

    # A limit on the error: what is chosen keeps it, rounded to nearest, and one format smaller does not.
    result = _quantize(pipeline("SD3"), "--max-error", "0.03", "--calib", file, *_STEPS, "--out", tmp_path / "limited")
    assert result.exit_code == 0, result.output
    limited = quant.Plan.load(tmp_path / "limited/transformer/plan.json")
    assert {str(layer.weight) for layer in limited.layers if layer.score is not None} >= {"nvfp4", "fp8_channel"}
    errors = {}
    for name, chosen in (("limited", limited), ("nvfp4", "nvfp4")):
        rounded = diffusers.SD3Transformer2DModel.from_pretrained(
            pipeline("SD3"), subfolder="transformer", dtype=torch.bfloat16
        )
        if isinstance(chosen, quant.Plan):
            chosen = chosen.replace_layers(dataclasses.replace(layer, solver="rtn") for layer in chosen.quantized)
            quant.quantize(rounded, chosen, [kwargs for _, kwargs in calls.values()])
        else:
            quant.quantize(rounded, chosen, [kwargs for _, kwargs in calls.values()], solver="rtn")
        noise = {time: noise_of(rounded, kwargs) for time, (_, kwargs) in calls.items()}
        errors[name] = np.mean([float((noise[time] - y).norm() / y.norm()) for time, y in exact.items()])
    assert 0.02 < errors["limited"] <= 0.03 < errors["nvfp4"]

    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and 'type="range"' in page and "Sensitivity of transformer" in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Flux.2", "Wan", "Z-Image"])
def test_the_command_takes_other_pipelines(kind: str, pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """A processor for a tokenizer, videos, and a denoiser that takes lists of images."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out"
    file.write_text("".join(json.dumps({"prompt": text, **SMALL[kind]}) + "\n" for text in ("a red fox", "two cat")))
    options = ("--format", "nvfp4", "--effort", "2", "--calib", file, *_STEPS)
    result = _quantize(pipeline(kind), *options, "--out", out)
    assert result.exit_code == 0, result.output
    assert {layer.solver for layer in quant.Plan.load(out / "transformer/plan.json").quantized} == {"lowrank:32+gptq"}
    assert np.isfinite(tiny_image(quant.load_pipeline(out))).all()


@pytest.mark.slow
def test_text_encoders_are_quantized_on_request(pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = _quantize(
        pipeline("Flux"), "--format", "fp8", "--components", "transformer,text_encoder_2", "--calib", prompts, *_STEPS,
        "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    pipe = quant.load_pipeline(out)
    assert pipe.text_encoder_2.quantization_plan.quantized and pipe.transformer.quantization_plan.quantized
    assert np.isfinite(tiny_image(pipe)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["SD3", "Flux", "SDXL"])
def test_a_pipeline_on_a_gpu(
    kind: str, pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    name, out = "unet" if kind == "SDXL" else "transformer", tmp_path / "out"
    result = _quantize(
        pipeline(kind), "--format", "fp8_channel", "--calib", prompts, "--call", "num_inference_steps=3", "--out", out
    )
    assert result.exit_code == 0, result.output
    pipe, on_cpu = quant.load_pipeline(out, device="cuda"), quant.load_pipeline(out)
    image = tiny_image(pipe)
    theirs = diffusers.DiffusionPipeline.from_pretrained(out, dtype=torch.bfloat16).to("cuda")
    assert np.array_equal(tiny_image(theirs), image)

    # Each layer on what it gets on a CPU, where the same values are rounded: sums differ by their order alone. Whole
    # models of random weights amplify that, the UNet to a tenth of its prediction.
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for layer in getattr(on_cpu, name).quantization_plan.quantized:
        module = getattr(on_cpu, name).get_submodule(layer.name)
        module.register_forward_hook(lambda _, args, y, name=layer.name: seen.append((name, args[0], y)))
    tiny_image(on_cpu)
    for layer_name, x, y in seen:
        ours = getattr(pipe, name).get_submodule(layer_name)(x.cuda()).cpu()
        assert float((ours - y).float().norm() / y.float().norm()) < 2**-7, layer_name
    if kind == "SDXL":
        return

    # Eager PyTorch rounds 1000 t to BF16 in Flux, and a compiler leaves it as it is unless it is told otherwise.
    monkeypatch.setattr("torch._inductor.config.emulate_precision_casts", True)
    pipe.transformer = torch.compile(pipe.transformer, mode="reduce-overhead")
    for _ in range(2):  # the second replays a CUDA graph at each step
        assert np.abs(tiny_image(pipe) - image).mean() < 0.03


@pytest.mark.parametrize("load", [quant.load_pipeline, quant.load])
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_read(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda: PyTorch sees no GPU here; leave it out, or pass cpu"):
        load(tmp_path, device="cuda")


def test_a_budget_refuses_a_text_encoder_before_weights_are_read(
    pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "open_pipeline", lambda path: pytest.fail("read"))
    components = ("--components", "transformer,text_encoder", "--calib", prompts)
    result = _quantize(pipeline("SD3"), "--bits", "6", *components, *_STEPS, "--out", tmp_path / "out")
    way_out = "leave it out of --components"
    assert result.output == f"error: text_encoder predicts no noise by which formats are chosen; {way_out}\n"


def test_a_dry_run_prints_the_plan_and_writes_nothing(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    result = _quantize(pipeline("SD3"), "--format", "nvfp4", "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "transformer_blocks.0.attn" in result.output and not (tmp_path / "out").exists()


def test_bad_input_is_one_line_with_the_way_out(pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    source = pipeline("SD3")
    long, single, unknown, broken, untold = (tmp_path / f"{name}.txt" for name in ("long", "one", "num", "cut", "no"))
    unknown.write_text('a red fox\n{"prompt": "a cat", "num_frames": 5}\n')
    broken.write_text('{"prompt": "a cat"\na red fox\n')
    untold.write_text('a red fox\n{"height": 16}\n')
    long.write_text(f"a red fox\n{'a cat in ' * 200}\n")
    steps_of = tmp_path / "steps.txt"
    steps_of.write_text('a red fox\n{"prompt": "a cat", "num_inference_steps": 5000}\n')
    sheet, array, latin, given = (tmp_path / name for name in ("prompts.CSV", "list.txt", "latin.txt", "given.txt"))
    sheet.write_text("prompt,height\na red fox,16\na cat,16\n")
    array.write_text('[\n"a red fox",\n"a cat"\n]\n')
    latin.write_text("a red fox\na k\u00e4tzchen\n", encoding="latin-1")
    given.write_text('a red fox\n{"prompt": "a cat", "output_type": "pil"}\n')
    single.write_text("a red fox\n")
    sizes = tmp_path / "sizes.txt"
    sizes.write_text('a red fox\n{"prompt": "a cat", "height": "16"}\n')
    copies = {name: tmp_path / name for name in ("lora", "quantized", "vae_only", "emptied", "weightless", "newer")}
    for copy in copies.values():
        shutil.copytree(source, copy)
    save_file({"transformer.proj_out.lora_A.weight": torch.zeros(4, 64)}, copies["lora"] / "style.safetensors")
    shutil.rmtree(copies["emptied"] / "scheduler")
    next((copies["weightless"] / "transformer").glob("*.safetensors")).unlink()
    fields = json.loads((copies["quantized"] / "transformer/config.json").read_text())
    fields["quantization_config"] = {"quant_method": "bitsandbytes"}
    (copies["quantized"] / "transformer/config.json").write_text(json.dumps(fields))
    index = json.loads((copies["vae_only"] / "model_index.json").read_text())
    renamed = {**index, "_class_name": "StableDiffusion9Pipeline"}
    (copies["newer"] / "model_index.json").write_text(json.dumps(renamed))
    (copies["vae_only"] / "model_index.json").write_text(
        json.dumps({key: value for key, value in index.items() if key != "transformer"})
    )
    calib = ("--calib", prompts)
    for model, options, expected in (
        (copies["vae_only"], calib, "no transformer and no unet"),
        (copies["quantized"], calib, "is quantized already (bitsandbytes)"),
        (copies["lora"], calib, "weight_name='style.safetensors'); pipe.fuse_lora()"),
        (copies["newer"], calib, "has no pipeline StableDiffusion9Pipeline; a newer one may have: pip install"),
        (copies["emptied"], calib, "is not there, though model_index.json names it; give the whole pipeline"),
        (
            copies["weightless"],
            calib,
            "has no weights (*.safetensors), though model_index.json names it; give the whole",
        ),
        (source, (*calib, "--components", "decoder"), "has no component decoder"),
        (source, (*calib, "--components", "scheduler"), "no model that is quantized; name one of text_encoder"),
        (source, (*calib, "--components", "vae"), "no model that is quantized; name one of text_encoder"),
        (source, ("--calib", long), "the tokenizer cuts it after"),
        (source, ("--calib", single), "give two or more"),
        (source, ("--calib", "self"), "one file with a prompt in each line"),
        *(
            (source, (*calib, "--call", f"num_inference_steps={steps}"), "has 1000 timesteps; give a whole number from")
            for steps in ("2000", "0", "2.5", "two")
        ),
        (
            source,
            (*calib, "--call", "steps=2"),
            "write NAME=VALUE, of an argument that StableDiffusion3Pipeline takes: ",
        ),
        (
            source,
            (*calib, "--call", "height"),
            "write NAME=VALUE, of an argument that StableDiffusion3Pipeline takes: ",
        ),
        (
            source,
            (*calib, "--call", "guidance_scale=3,5"),
            "error: --call guidance_scale=3,5: StableDiffusion3Pipeline takes float there, and no text",
        ),
        (source, (*calib, "--call", "height=16", "--call", "height=32"), "--call height is given twice; leave one out"),
        (source, ("--calib", sizes), "sizes.txt: prompt 2: height=16: StableDiffusion3Pipeline takes int | None there"),
        (source, (*calib, "--components", ","), "model_index.json: has no component ''; it has "),
        (source, (*calib, "--max-error", "0"), "error: --max-error 0: give a finite number above zero"),
        (source, (*calib, "--max-error", "nan"), "error: --max-error nan: give a finite number above zero"),
        (
            source,
            (*calib, "--max-kl", "0.1"),
            "error: --max-kl is for other models; a pipeline of diffusers has --bits and --max-error",
        ),
        (source, (*calib, "--eval", prompts), "means nothing to a pipeline"),
        (source, (*calib, "--restart"), "--restart: means nothing to a pipeline"),
        (source, (*calib, "--seqlen", "64"), "--seqlen: means nothing to a pipeline"),
        (source, (*calib, "--bits", "3"), "the smallest feasible value"),
        (
            source,
            (*calib, "--bits", "6", "--max-error", "1e-6"),
            "--max-error 1e-06: even the least lossy choice within the budgets measures",
        ),
        (source, ("--calib", unknown), "gives num_frames, which StableDiffusion3Pipeline does not take"),
        (source, ("--calib", broken), "is no JSON object"),
        (source, ("--calib", untold), "has no text; write"),
        (source, ("--calib", steps_of), "prompt 2: num_inference_steps=5000: FlowMatchEulerDiscreteScheduler has 1000"),
        (source, ("--calib", sheet), "prompts.CSV: a table or list; give a prompt in each line, or {"),
        (source, ("--calib", array), "list.txt: a table or list; give a prompt in each line"),
        (source, ("--calib", latin), "latin.txt: not UTF-8 text (invalid continuation byte at byte 13)"),
        (source, ("--calib", given), "gives output_type, which StableDiffusion3Pipeline does not take"),
        (source, (*calib, "--call", "output_type=pil"), "--call output_type=pil: write NAME=VALUE, of an argument"),
        (source / "transformer", (), "give the directory of its pipeline"),
    ):
        out, steps = tmp_path / "out", () if "--call" in options or model.name == "transformer" else _STEPS
        format = () if {"--bits", "--max-error"} & set(options) else ("--format", "nvfp4")
        result = _quantize(model, *format, *options, *steps, "--out", out)
        lines = result.output.strip().splitlines()
        assert result.exit_code and expected in lines[-1] and lines[-1].startswith("error: "), result.output
        assert not out.exists() and not list(tmp_path.glob(".*")), expected
    # The way out is one for a pipeline, which is written to a directory.
    result = _quantize(source, "--format", "q4_0", *calib, *_STEPS, "--out", tmp_path / "out")
    assert result.output.strip().endswith("only GGUF files hold q4_0: take another format, such as fp8_channel")
    assert pipelines.models_to_quantize(source, "transformer, transformer") == ["transformer"]


def test_a_pipeline_with_a_quantized_component(prompts: Path, tmp_path: Path) -> None:
    """Quantized by us, the file that says so is named; by another tool, the other components are quantized."""
    source = tiny_pipeline("SD3", tmp_path / "source")
    encoder = pipelines.open_pipeline(source).text_encoder
    quant.quantize(encoder, "fp8_channel", solver="rtn")
    shutil.rmtree(source / "text_encoder")
    quant.save(encoder, None, source / "text_encoder")
    arguments = (source, "--format", "fp8_channel", "--calib", prompts, *_STEPS, "--out", tmp_path / "out")
    plan = source / "text_encoder" / "plan.json"
    says = f"error: {source}: is quantized already ({plan.relative_to(source)}); give the original pipeline\n"
    assert _quantize(*arguments).output == says
    plan.unlink()
    result = _quantize(*arguments, "--components", "text_encoder")
    assert "(compressed-tensors); give the pipeline in 16 bit, or name other components with --comp" in result.output
    assert _quantize(*arguments, "--components", "transformer").exit_code == 0
    assert (tmp_path / "out" / "denoising.json").is_file()


def test_weights_in_a_variant_are_told_from_the_plain_ones(
    pipeline: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    source = tmp_path / "source"
    diffusers.DiffusionPipeline.from_pretrained(pipeline("SD3"), dtype=torch.float16).save_pretrained(
        source, variant="fp16"
    )
    with pytest.raises(
        quant.UserError, match="has the weights of the variant fp16, and there are no plain ones"
    ) as refused:
        pipelines.models_to_quantize(source, None)
    monkeypatch.chdir(tmp_path)
    eval(str(refused.value).partition("without it: ")[2], {"diffusers": diffusers, "torch": torch})  # as it advises
    assert pipelines.models_to_quantize(tmp_path / "plain", None) == ["transformer"]
    assert pipelines.open_pipeline(tmp_path / "plain").vae.dtype == torch.float16
    # Of several, diffusers reads the plain ones, here in the minority.
    diffusers.DiffusionPipeline.from_pretrained(pipeline("SD3"), dtype=torch.float32).save_pretrained(source)
    for file in list(source.glob("*/*.fp16.safetensors")):
        shutil.copy(file, str(file).replace("fp16", "ema"))
    opened = pipelines.open_pipeline(source)
    assert opened.vae.dtype == opened.transformer.dtype == opened.text_encoder.dtype == torch.float32


@dataclasses.dataclass
class _Words:
    """A tokenizer whose tokens are words."""

    model_max_length: int

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=text.split())


def test_a_prompt_is_as_long_as_its_call_says() -> None:
    class Flux:
        def __init__(self) -> None:
            self.components = {"tokenizer": _Words(77), "tokenizer_2": _Words(512)}

        def __call__(self, prompt: str, max_sequence_length: int = 512) -> None: ...

    long = _Prompts([(0, {"prompt": "a " * 300})], [], "prompts.txt")
    long.check(Flux(), {})
    long.check(Flux(), {"max_sequence_length": 400})
    with pytest.raises(quant.UserError, match="prompt 1 has 300 tokens, and the tokenizer cuts it after 256"):
        long.check(Flux(), {"max_sequence_length": 256})
    # CLIP's tokenizer is not cut by it.
    _Prompts([(0, {"prompt": "a " * 60})], [], "prompts.txt").check(Flux(), {"max_sequence_length": 32})


@pytest.mark.parametrize(
    "name",
    ["a.lora_A.weight", "lora_unet_a.lora_down.weight", "a.processor.to_q_lora.down.weight", "a.lora.down.weight"],
)
def test_a_lora_is_known_by_its_tensors(name: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(4, 64)}, tmp_path / "style.safetensors")
    save_file({"down_blocks.0.weight": torch.zeros(4, 64)}, tmp_path / "model.safetensors")
    assert pipelines._loras(tmp_path) == [tmp_path / "style.safetensors"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_lora_is_merged_by_the_advice_of_the_refusal(
    saved: bool, pipeline: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    import diffusers

    name, factors = "transformer_blocks.0.attn.to_q", (torch.randn(4, 64), torch.randn(64, 4))
    lora = {f"transformer.{name}.lora_{part}.weight": each for part, each in zip("AB", factors, strict=True)}
    shutil.copytree(pipeline("SD3"), tmp_path / "base")
    save_file(lora, tmp_path / "base/style.safetensors")
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    weight = pipe.transformer.get_submodule(name).weight.float()
    if saved:  # with the adapters in the file of the weights
        pipe.load_lora_weights(tmp_path / "base", weight_name="style.safetensors")
        pipe.save_pretrained(tmp_path / "saved")
    with pytest.raises(quant.UserError, match="a LoRA that ") as refused:
        pipelines.models_to_quantize(tmp_path / ("saved" if saved else "base"), None)
    monkeypatch.chdir(tmp_path)
    if saved:
        assert "call pipe.fuse_lora() and pipe.unload_lora_weights()" in str(refused.value)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        pipe.save_pretrained("merged")
    else:
        exec(str(refused.value).partition("move it away: ")[2], {"diffusers": diffusers, "torch": torch})
    merged = diffusers.DiffusionPipeline.from_pretrained("merged", dtype=torch.bfloat16).transformer
    torch.testing.assert_close(
        merged.get_submodule(name).weight.float(), weight + factors[1] @ factors[0], rtol=2**-6, atol=2**-6
    )
    assert pipelines.models_to_quantize(Path("merged"), None) == ["transformer"]


def _quantized_in_place(directory: Path) -> None:
    pipe = pipelines.open_pipeline(directory)
    quant.quantize(pipe.transformer, "fp8_channel", solver="rtn")
    shutil.rmtree(directory / "transformer")
    quant.save(pipe.transformer, None, directory / "transformer")


@pytest.mark.parametrize("kind", ["Wan", "Qwen-Image"])
def test_a_compiled_denoiser_is_one_graph_on_its_device(kind: str, tmp_path: Path) -> None:
    """A CUDA graph is not captured where a tensor comes from the CPU. The device "meta" stands for a GPU here."""
    _quantized_in_place(tiny_pipeline(kind, tmp_path / "tiny"))
    seen: list[set[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append({each.device.type for each in inputs if isinstance(each, torch.Tensor) and each.dim()})
        return graph.forward

    model = quant.load_pipeline(tmp_path / "tiny", device="meta").transformer
    call = {**tiny_calls(kind, 1)[0], "encoder_hidden_states_mask": None}
    call = {name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in call.items()}
    call = {name: call[name] for name in inspect.signature(model.forward).parameters if name in call}
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(**call)
    assert seen == [{"meta"}]


@pytest.mark.parametrize(
    ("kind", "guidance"),
    [
        ("Wan", {"guidance_scale": 4.0}),
        pytest.param("Qwen-Image", {"true_cfg_scale": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_guidance_needs_a_copy_of_what_a_cuda_graph_returns(
    kind: str, guidance: dict[str, float], tmp_path: Path
) -> None:
    """The hook of docs/diffusion.md: a replay writes into the memory of the replay before, as this backend does."""
    _quantized_in_place(tiny_pipeline(kind, tmp_path / "tiny"))

    def backend(graph: Any, _: Any) -> Any:
        held: list[torch.Tensor] = []

        def run(*args: Any) -> list[torch.Tensor]:
            outputs = graph(*args)
            held[:] = held or [torch.empty_like(each) for each in outputs]
            return [own.copy_(new) for own, new in zip(held, outputs, strict=True)]

        return run

    pipe = quant.load_pipeline(tmp_path / "tiny")
    original, call = pipe.transformer, {**guidance, "negative_prompt": "two fox"}
    image = tiny_image(pipe, **call)
    pipe.transformer = torch.compile(original, backend=backend)
    assert not np.array_equal(tiny_image(pipe, **call), image)
    pipe.transformer.register_forward_hook(lambda module, args, output: (output[0].clone(),))
    assert np.array_equal(tiny_image(pipe, **call), image)


def test_a_run_that_fails_when_all_is_solved_leaves_nothing(
    pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*images: Any) -> dict[str, Any]:
        assert list(tmp_path.glob("*/transformer/plan.json"))  # in the temporary directory
        raise OSError("no space left on device")

    monkeypatch.setattr("quant.run.pipeline.image_figures", fail)
    options = ("--format", "fp8_channel", "--solver", "rtn", "--calib", prompts, *_STEPS)
    result = _quantize(pipeline("SD3"), *options, "--out", tmp_path / "out")
    assert result.exit_code and "no space left" in result.output
    assert not list(tmp_path.iterdir())


def test_options_of_pipelines_are_refused_for_other_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options in (("--format", "nvfp4", "--call", "num_inference_steps=4"), ("--max-error", "0.1")):
        result = _quantize(tmp_path, *options, "--out", tmp_path / "out")
        assert f"{options[-2]}: is for a pipeline of diffusers" in result.output


def test_a_plan_of_a_pipeline_is_refused_with_the_way_out(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    options = ("--max-kl", "0.1", "--out", tmp_path / "plan.json")
    result = CliRunner().invoke(main, ["plan", "make", str(pipeline("SD3")), *map(str, options)])
    assert result.exit_code and "--bits 6 or --max-error 0.05 chooses their formats" in result.output


def test_a_pipeline_is_no_file(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    result = _quantize(pipeline("SD3"), "--format", "fp8_channel", "--solver", "rtn", "--out", tmp_path / "pipe.gguf")
    assert result.exit_code and result.stderr.endswith(".gguf: a pipeline is written to a directory; name one\n")


def test_a_pipeline_is_no_model_and_its_way_out_depends_on_what_it_is(
    pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    for quantized, way_out in (
        (False, "and quant.quantize a module of it"),
        (True, "quantized already, which quant.lo"),
    ):
        shutil.copytree(pipeline("SD3"), directory := tmp_path / str(quantized))
        if quantized:
            (directory / "denoising.json").write_text("{}")
        with pytest.raises(quant.UserError, match=rf"a pipeline of diffusers \(model_index\.json\): .*{way_out}"):
            quant.open_model(directory)


def test_load_pipeline_says_what_a_directory_is(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(quant.UserError, match="no component is quantized; make such a pipeline with"):
        quant.load_pipeline(pipeline("SD3"))
    with pytest.raises(quant.UserError, match="no pipeline of diffusers"):
        quant.load_pipeline(tmp_path)


def test_a_pipeline_that_wants_an_image_is_told_the_one_of_text_alone(
    pipeline: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    import diffusers

    source = tmp_path / "image to image"
    diffusers.StableDiffusion3Img2ImgPipeline.from_pretrained(pipeline("SD3"), dtype=torch.bfloat16).save_pretrained(
        source
    )
    options = ("--format", "fp8_channel", "--solver", "rtn", "--calib", prompts, *_STEPS, "--out", tmp_path / "out")
    refused = _quantize(source, *options)
    way_out = "give the pipeline of text alone: diffusers.AutoPipelineForText2Image.from_pipe(pipe).save_pretrained("
    assert refused.exit_code and way_out in refused.output and not (tmp_path / "out").exists()
    pipe = diffusers.DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16)
    diffusers.AutoPipelineForText2Image.from_pipe(pipe).save_pretrained(tmp_path / "text")
    assert _quantize(tmp_path / "text", *options).exit_code == 0
