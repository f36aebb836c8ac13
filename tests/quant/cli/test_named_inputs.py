"""--calib takes the inputs of models that take more than tokens: a file of named tensors, or a folder of images."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quant
from quant.cli.main import main

transformers = pytest.importorskip("transformers", reason="the extra hf")


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (4, 12))
    return tiny_models.t5(dtype=torch.bfloat16), {"input_ids": ids, "decoder_input_ids": ids[:, :5].clone()}


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    return tiny_models.vit(dtype=torch.bfloat16), {"pixel_values": torch.randn(4, 3, 32, 32)}


def quantize(directory: Path, calib: Path, out: Path, *options: str) -> Any:
    arguments = [directory, "--format", "nvfp4", "--calib", calib, "--out", out, "--device", "cpu", *options]
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


@pytest.mark.parametrize("make", [t5, vit])
def test_named_tensors_calibrate_as_in_python(make: Any, tmp_path: Path) -> None:
    model, given = make()
    model.save_pretrained(tmp_path / "model")
    save_file(given, tmp_path / "inputs.safetensors")
    done = quantize(tmp_path / "model", tmp_path / "inputs.safetensors", tmp_path / "out", "--calib-samples", "4")
    assert done.exit_code == 0, done.output
    expected = quant.quantize(model, "nvfp4", given)
    quant.save(expected.model, expected.plan, tmp_path / "expected")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in given.items()}
    with torch.no_grad():
        before = type(model).from_pretrained(tmp_path / "model")(**inputs)[0].float().flatten(1)
        after = quant.load(tmp_path / "out")(**inputs)[0].float().flatten(1)
    assert torch.nn.functional.cosine_similarity(after, before).mean() > 0.95


def test_arguments_that_the_model_does_not_take_are_named(tmp_path: Path) -> None:
    model, given = vit()
    model.save_pretrained(tmp_path / "model")
    save_file({**given, "pictures": given["pixel_values"].clone()}, tmp_path / "inputs.safetensors")
    done = quantize(tmp_path / "model", tmp_path / "inputs.safetensors", tmp_path / "out")
    assert done.exit_code == 2 and "takes no pictures" in done.output


def test_too_few_inputs_are_refused(tmp_path: Path) -> None:
    model, given = vit()
    model.save_pretrained(tmp_path / "model")
    save_file(given, tmp_path / "inputs.safetensors")
    done = quantize(tmp_path / "model", tmp_path / "inputs.safetensors", tmp_path / "out", "--calib-samples", "5")
    assert done.exit_code == 2 and "holds 4 inputs, and 5 are needed" in done.output


def test_images_go_through_the_processor(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow, for images")
    model, _ = vit()
    model.save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        image.effect_noise((48, 40), 50 + number).convert("RGB").save(tmp_path / "photos" / f"{number}.png")
    done = quantize(tmp_path / "model", tmp_path / "photos", tmp_path / "out", "--calib-samples", "3")
    assert done.exit_code == 0, done.output
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
    files = sorted((tmp_path / "photos").iterdir())
    pixels = [processor(images=image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"] for file in files]
    expected = quant.quantize(model, "nvfp4", {"pixel_values": torch.cat(pixels)})
    quant.save(expected.model, expected.plan, tmp_path / "expected")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
