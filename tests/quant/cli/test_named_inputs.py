"""--calib takes the inputs of models that take more than tokens: a file of named tensors, or a folder of images."""

import re
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
    assert done.exit_code == 2 and "takes no pictures; name tensors by the arguments of its forward: pix" in done.output
    save_file({"pictures": given["pixel_values"].clone()}, tmp_path / "inputs.safetensors")
    done = quantize(tmp_path / "model", tmp_path / "inputs.safetensors", tmp_path / "out")
    assert done.exit_code == 2 and "takes no pictures; name tensors by" in done.output


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


NET = """
import torch
from helper import WIDTH

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A classifier of the caller, in the current folder: its state dict, and the file of its factory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("WIDTH = 128")
    (tmp_path / "nets.py").write_text(NET)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    torch.save(model.state_dict(), "net.pt")
    return model


def test_a_classifier_of_the_caller_is_measured_by_its_classes(net: torch.nn.Module) -> None:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = net(inputs)
    labels = before.argmax(dim=1)
    labels[:8] = (labels[:8] + 1) % 10  # the model is right on 24 of 32
    save_file({"input": inputs, "labels": labels}, "data.safetensors")
    torch.save({"input": inputs}, "named.pt")
    torch.save(inputs, "alone.pt")
    found = {}
    for number, calib in enumerate(("data.safetensors", "named.pt", "alone.pt")):
        arguments = ("net.pt", "--model-factory", "nets.py:build" if number else "nets:build", "--format", "int4a16")
        data = ("--calib", calib, "--calib-samples", "32", "--eval", "data.safetensors", "--eval-samples", "32")
        done = CliRunner().invoke(main, ["quantize", *arguments, *data, "--solver", "gptq", "--out", f"o{number}"])
        assert done.exit_code == 0, done.output
        assert "accuracy" in done.stderr and "75.0% before" in done.stderr
        found[calib] = Path(f"o{number}/model.safetensors").read_bytes()
    assert len(set(found.values())) == 1  # one data set, by three ways
    with torch.no_grad():
        after = quant.load("o0", net)(inputs).float()
    result = quant.Report.load("o0/report.json").evaluation
    assert result is not None and result.baseline_accuracy == 0.75
    assert result.accuracy == pytest.approx(float((after.argmax(1) == labels).double().mean()), abs=1e-9)
    kl = torch.nn.functional.kl_div(after.log_softmax(1), before.log_softmax(1), log_target=True, reduction="batchmean")
    assert result.kl == pytest.approx(float(kl), rel=0.02) and result.kl > 1e-6


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nets:make", "nets has no function make"),
        ("gone.py:build", r"cannot import gone\.py \(no such file\); name a module"),
        ("gone:build", r"cannot import gone \(No module named 'gone'\); name a module that is in the current folder"),
        ("build", r"expected package\.module:function, or file\.py:function"),
    ],
)
def test_a_factory_that_cannot_be_called_is_refused(factory: str, message: str, net: torch.nn.Module) -> None:
    arguments = ["quantize", "net.pt", "--model-factory", factory, "--format", "fp8_channel", "--dry-run"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2 and re.search(message, refused.output), refused.output


def test_a_file_of_torch_save_that_holds_no_tensors_is_refused(net: torch.nn.Module) -> None:
    for name, content in (("list.pt", [1, 2]), ("x.pt", {"x": torch.zeros(4, 64)})):
        torch.save(content, name)
        arguments = ["quantize", "net.pt", "--model-factory", "nets:build", "--format", "fp8", "--calib", name]
        refused = CliRunner().invoke(main, [*arguments, "--out", "out"])
        assert refused.exit_code == 2 and re.search("arguments.*: input$", refused.output.strip()), refused.output
