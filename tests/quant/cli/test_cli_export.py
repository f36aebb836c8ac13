"""`quant export` writes and prints what it should, and its mistakes are one line with exit code 2."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from samples import BASE, TEXTS, write_short_base

from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.export_model import EXPORTERS
from quant.export.kinds import KINDS
from quant.recipes.plan import Plan

pytest.importorskip("transformers", reason="needs the extra hf")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

TEXT = TEXTS / "calibration.txt"


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    out = folder / "model-nvfp4a16"
    arguments = [str(write_short_base(folder / "base")), "--format", "nvfp4a16", "--effort", "0", "--out", str(out)]
    assert CliRunner().invoke(quantize_command, [*arguments, "--quiet"]).exit_code == 0
    return out


@pytest.fixture(scope="module")
def deployed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of the checkpoint's ONNX file, and the JSON that the command printed."""
    out = tmp_path_factory.mktemp("deployed") / "deployed"
    result = export(checkpoint, "--to", "onnx", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    return out, result.stdout


@pytest.fixture
def exported_before(deployed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of the checkpoint copies the graph of `deployed`, instead of tracing the model for seconds."""

    def copy(model: Any, path: Path, **options: Any) -> Path:
        return Path(shutil.copyfile(deployed[0] / "model.onnx", path))

    monkeypatch.setattr("quant.export.export_model.write_onnx", copy)


def test_every_kind_has_an_exporter() -> None:
    assert KINDS.keys() == EXPORTERS.keys()


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_before_the_model_is_loaded(
    package: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it then fails
    monkeypatch.setattr("quant.export.export_model.write_onnx", lambda *_: pytest.fail("too late"))
    result = export(checkpoint, "--to", "onnx", "--out", tmp_path / "deployed")
    assert result.exit_code == 2 and f"needs the package `{package}`, which" in result.stderr
    assert "onnx" in result.stderr.rpartition("pip install")[2] and not (tmp_path / "deployed").exists()


def test_one_message_names_all_packages_of_an_engine(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxscript", "tensorrt_rtx", "tensorrt"):
        monkeypatch.setitem(sys.modules, package, None)
    result = export(checkpoint, "--to", "tensorrt", "--target", "sm120", "--out", tmp_path / "a.engine")
    assert result.exit_code == 2 and "the packages `onnx` and `onnxscript` and `tensorrt_rtx`, which" in result.stderr
    assert result.stderr.rstrip().endswith("[onnx,tensorrt-rtx]'")


def test_onnx_files_and_their_receipt(checkpoint: Path, deployed: tuple[Path, str]) -> None:
    out, printed = deployed
    found = json.loads(printed)
    assert sorted(file.name for file in out.iterdir()) == ["model.onnx", "plan.json", "receipt.json"]
    plan = Plan.load(out / "plan.json")
    assert plan.digest() == Plan.load(checkpoint / "plan.json").digest()
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["passed"] and found["passed"]
    assert [layer["name"] for layer in receipt["layers"]] == [layer.name for layer in plan.quantized]
    assert all(layer["checkpoint"] == 0.0 for layer in receipt["layers"])
    assert json.loads((checkpoint / "report.json").read_text())["receipt"]["layers"] == receipt["layers"]
    assert "Export receipt" in (checkpoint / "report.html").read_text()
    metadata = {entry.key: entry.value for entry in onnx.load(out / "model.onnx").metadata_props}
    assert metadata["blockscale.plan"] == plan.digest() and metadata["blockscale.capacity"] == "128"
    taken = export(checkpoint, "--to", "onnx", "--out", out)
    assert taken.exit_code == 2 and "is not empty; pass --overwrite" in taken.stderr


@pytest.mark.usefixtures("exported_before")
def test_it_says_what_it_compared(checkpoint: Path, tmp_path: Path) -> None:
    result = export(checkpoint, "--to", "onnx", "--out", tmp_path / "deployed")
    assert result.exit_code == 0, result.output
    assert "7 layers compared with PyTorch; " in result.stderr
    assert "MB  model.onnx" in result.stderr


@pytest.mark.usefixtures("exported_before")
def test_a_difference_is_not_written(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.export.onnx import compare_with_torch

    original = compare_with_torch.quantized_linear

    def another(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return original(x, *rest) * 1.01

    monkeypatch.setattr(compare_with_torch, "quantized_linear", another)
    result = export(checkpoint, "--to", "onnx", "--out", tmp_path / "deployed")
    assert result.exit_code == 2
    assert "differ from PyTorch; the worst is model.layers." in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((BASE, "--to", "onnx"), f"make one with `quantize {BASE} --format nvfp4 --out DIR`"),
        (("CHECKPOINT", "--to", "tensorrt", "--out", "OUT/e"), "name it with --target, such as sm120"),
        (
            ("CHECKPOINT", "--to", "tensorrt", "--out", "OUT/e", "--target", "sm42"),
            "unknown target 'sm42'; known targets",
        ),
        (
            ("CHECKPOINT", "--to", "tensorrt", "--out", BASE, "--target", "sm120"),
            "is a directory; name a file with --out",
        ),
        (("CHECKPOINT", "--to", "aoti", "--out", BASE / "config.json"), "config.json exists; pass --overwrite"),
        (("CHECKPOINT", "--to", "aoti", "--out", "OUT/e"), "an AOTInductor package ends in .pt2"),
        (
            ("CHECKPOINT", "--to", "aoti", "--target", "h100"),
            "no use for --target; it is for --to onnx, --to tensorrt, --to torch-tensorrt",
        ),
        (
            ("CHECKPOINT", "--to", "torch-tensorrt", "--shapes", "batch=1:1:2"),
            "--to torch-tensorrt has no use for --shapes",
        ),
        (("CHECKPOINT", "--to", "onnx", "--out", "OUT", "--shapes", "width=1:2:3"), "no input or dimension 'width'"),
        (("CHECKPOINT", "--to", "onnx", "--out", "OUT", "--input", "x:fp7:2"), "expected NAME:DTYPE:DIMS"),
    ],
)
def test_mistakes(checkpoint: Path, tmp_path: Path, arguments: tuple[Any, ...], words: str) -> None:
    places = {"CHECKPOINT": str(checkpoint), "OUT": str(tmp_path / "out"), "OUT/e": str(tmp_path / "e")}
    result = export(*(places.get(str(a), a) for a in arguments))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["", "..", "inner/out.pt2", "../link", "../link/out.pt2", "../../weights"])
def test_an_export_never_touches_its_checkpoint(checkpoint: Path, tmp_path: Path, kind: str, place: str) -> None:
    """`--out CHECKPOINT --overwrite` replaced the checkpoint by its ONNX file, with exit code 0."""
    source = shutil.copytree(checkpoint, tmp_path / "runs" / "source")
    shutil.move(source / "model.safetensors", tmp_path / "weights")
    (source / "model.safetensors").symlink_to(tmp_path / "weights")
    (source / "../link").symlink_to(source)
    shutil.copy(source / "plan.json", source.parent)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    target = ("--target", "sm120") if kind == "tensorrt" else ()
    result = export(source, "--to", kind, "--out", source / place, "--overwrite", *target)
    assert result.exit_code == 2 and "name a" in result.stderr, result.output
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_fp8_attention_of_an_edited_plan(checkpoint: Path, tmp_path: Path) -> None:
    edited = Path(shutil.copytree(checkpoint, tmp_path / "edited"))
    fields = json.loads((edited / "plan.json").read_text())
    (edited / "plan.json").write_text(json.dumps({**fields, "attention": "fp8"}))
    calibration = ["--calib", TEXT, "--calib-samples", 2, "--seqlen", 32]
    result = export(edited, "--to", "onnx", "--out", tmp_path / "out", "--quiet", *calibration)
    assert result.exit_code == 2
    assert "model.layers.0.self_attn: native FP8 attention takes heads of 64, 128" in result.stderr
    assert "pass --attention none" in result.stderr
    assert not (tmp_path / "out").exists()
    # Before calibration: the plug-in of a quantized cache attends in 16 bit, and other graphs have no place for it.
    for options, says in (
        (("--kv-cache", "fp8"), "the plan has attention in fp8; pass --attention none"),
        (("--kv-cache", "fp8", "--capacity", 0), "--kv-cache fp8 is for a decoder's serving graph; leave --capacity 0"),
        (("--genai",), "no provider of onnxruntime has attention in FP8; pass --attention none"),
    ):
        result = export(edited, "--to", "onnx", "--out", tmp_path / "out", *options)
        assert result.exit_code == 2 and says in result.stderr and "calibrating" not in result.stderr
    assert export(edited, "--to", "onnx", "--out", tmp_path / "out", "--quiet", "--attention", "none").exit_code == 0


def test_a_module_of_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "perceptron.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from quant.export.checkpoint.save import save
    from quant.run.api import quantize

    model = importlib.import_module("perceptron").make().eval()
    plan = quantize(model, "nvfp4a16", run=lambda m: m(torch.zeros(1, 64))).plan
    save(model, plan, tmp_path / "checkpoint")
    result = export(
        tmp_path / "checkpoint", "--to", "onnx", "--out", tmp_path / "out", "--json",
        "--model-factory", "perceptron:make", "--input", "x:fp32:rows,64",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (value,) = onnx.load(tmp_path / "out" / "model.onnx").graph.input
    assert [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] == ["rows", 64]
