"""`quant check --source` names everything in which a checkpoint differs from its source outside the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS

from quant.cli.check_command import check_command
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.verify import compare_with_source, verify

pytest.importorskip("transformers", reason="needs the extra hf")


def quantized(model: Path, out: Path, *options: object) -> Path:
    arguments = (model, "--format", "fp8_channel", *options, "--out", out)
    result = CliRunner().invoke(quantize_command, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(folder / "model")
    (folder / "model" / "LICENSE").write_text("free")
    return folder / "model", quantized(folder / "model", folder / "out")


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads((directory / "config.json").read_text())
    edit(fields)
    (directory / "config.json").write_text(json.dumps(fields))


NORM = "model.layers.0.input_layernorm.weight"
GATE, UP = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")


def give_gates_codes(tensors: dict[str, torch.Tensor]) -> None:
    """The codes and scales of one layer in the place of its neighbour's, which has the same shape."""
    tensors |= {name.replace(GATE, UP): tensors[name].clone() for name in list(tensors) if name.startswith(GATE)}


FAULTS: dict[str, Callable[[Path], Any]] = {
    f"{NORM} is float32, and bfloat16 in the source":
        lambda out: edit_tensors(out, lambda t: t.update({NORM: t[NORM].float()})),
    f"{NORM} has other values than in the source": lambda out: edit_tensors(out, lambda t: t[NORM].add_(1)),
    f"{NORM} is missing": lambda out: edit_tensors(out, lambda t: t.pop(NORM)),
    f"{UP} has the codes of another weight: few signs are those of the source":
        lambda out: edit_tensors(out, give_gates_codes),
    "rms_norm_eps is 0.5 in config.json, and 1e-06 in the source":
        lambda out: edit_config(out, lambda c: c.update(rms_norm_eps=0.5)),
    "head_dim is missing from config.json": lambda out: edit_config(out, lambda c: c.pop("head_dim")),
    "LICENSE is missing": lambda out: (out / "LICENSE").unlink(),
    "LICENSE is not the file of the source": lambda out: (out / "LICENSE").write_text("paid"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_difference_is_named(pair: tuple[Path, Path], tmp_path: Path, fault: str) -> None:
    model, whole = pair
    assert compare_with_source(whole, model) == []
    out = shutil.copytree(whole, tmp_path / "out")
    FAULTS[fault](out)
    assert [(str(each), each.reason) for each in compare_with_source(out, model)] == [(fault, None)]


def test_the_command_ends_with_2_for_a_fault_and_tells_reasons(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, whole = pair
    result = CliRunner().invoke(check_command, [str(whole), "--source", str(model)])
    assert result.exit_code == 0 and "source" in result.stderr, result.output
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "LICENSE").unlink()
    result = CliRunner().invoke(check_command, [str(out), "--source", str(model)])
    assert result.exit_code == 2 and "source: LICENSE is missing" in result.stdout


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_source_in_one_file_is_refused_with_the_way_out(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, checkpoint = pair
    file = Path(shutil.copy(source / "model.safetensors", tmp_path / name))
    result = CliRunner().invoke(check_command, [str(checkpoint), "--source", str(file)])
    assert result.exit_code == 2
    kind = file.suffix[1:].upper()
    assert f"{name} is a single {kind} file: a checkpoint is compared with a directory" in result.stderr
    assert "leave out --source, which checks the checkpoint alone" in result.stderr


@pytest.mark.parametrize("solver", ["gptq", "awq+gptq", "rotation:merge+rtn", "rotation:learned+rtn", "awq:merge+rtn"])
def test_tensors_that_a_solver_changes_are_explained(tmp_path: Path, solver: str) -> None:
    """The run itself stops at a difference that nothing explains; here it ends, and the report has the reasons."""
    model = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16, attention_bias=True).save_pretrained(model)
    text = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.randint(3, 60, (4, 32))}, text)
    out = quantized(model, tmp_path / "out", "--solver", solver, "--calib", text, "--calib-samples", 4, "--seqlen", 32)
    differences = compare_with_source(out, model)
    assert differences and all(each.reason and solver in each.reason for each in differences)
    tensors, written = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {
        n for n, t in tensors.items() if n in written and written[n].dtype == t.dtype and not t.equal(written[n])
    }
    assert {each.name for each in differences} == changed
    # One note for each step that changes tensors, however many they are; a warning would call for a reaction.
    report = json.loads((out / "report.json").read_text())
    steps = {each.reason for each in differences}
    assert sorted(note.rpartition(": ")[2] for note in report["notes"]) == sorted(map(str, steps)), report["notes"]
    assert len(steps) <= 2 and not any("source" in warning for warning in report["warnings"])
    assert verify(out, source=model).findings == ()


@pytest.mark.parametrize("layout", ["compressed_tensors/NVFP4", "modelopt/fp8"])
def test_checkpoints_of_other_tools(layout: str) -> None:
    differences = compare_with_source(GOLDENS / layout, BASE)
    assert not [each for each in differences if each.part == "tensors" and each.reason is None]


def test_a_checkpoint_names_its_class_where_the_source_has_null(tmp_path: Path) -> None:
    tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", lambda fields: fields.update(architectures=None))
    out = quantized(tmp_path / "model", tmp_path / "out", "--effort", "0")
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert compare_with_source(out, tmp_path / "model") == []


def test_experts_in_16_bit_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """Llama 4 with `--exclude '*.experts.*'` ended after all work in "this is our bug, so please report it"."""
    architectures.build("Llama4ForCausalLM", torch.bfloat16).save_pretrained(tmp_path / "model")
    out = quantized(tmp_path / "model", tmp_path / "out", "--exclude", "*.experts.*", "--effort", "0")
    reasons = {each.name: each.reason for each in compare_with_source(out, tmp_path / "model")}
    experts = "model.layers.0.feed_forward.experts"
    assert reasons[f"{experts}.gate_up_proj"] == "experts are stored one by one, as servers read them"
    # The source multiplies by `x @ P[e]`, and has gate and up beside each other.
    stacked = load_file(tmp_path / "model/model.safetensors")[f"{experts}.gate_up_proj"]
    written = load_file(out / "model.safetensors")
    assert torch.equal(written[f"{experts}.2.up_proj.weight"], stacked[2, :, stacked.shape[2] // 2 :].t())
    edit_tensors(out, lambda t: t[f"{experts}.1.down_proj.weight"].add_(1))
    edit_tensors(out, lambda t: t.pop(f"{experts}.3.gate_proj.weight"))
    faults = [str(each) for each in compare_with_source(out, tmp_path / "model") if each.reason is None]
    assert faults == [
        f"{experts}.1.down_proj.weight has other values than in the source",
        f"{experts}.3.gate_proj.weight is missing",
    ]
