"""`quant check` finds everything that was changed in a checkpoint, one line each, and nothing in a sound one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from samples import BASE, GOLDENS

import quant
from quant.cli.main import main
from quant.export.checkpoint.files.tensor_file import sha256_of

Q = "model.layers.1.self_attn.q_proj"


def verify(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["check", str(directory), *options])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `quantize --eval` writes it, so the report holds hashes, the plan's digest and a fingerprint."""
    folder = tmp_path_factory.mktemp("verify")
    save_file({"ids": torch.randint(0, 256, (600,))}, folder / "ids.safetensors")
    text = str(folder / "ids.safetensors")
    options = ["--calib-samples", "2", "--eval", text, "--eval-samples", "1", "--seqlen", "32"]
    arguments = ["quantize", str(BASE), "--format", "nvfp4", "--calib", text, *options, "--out", str(folder / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return folder / "out"


def edit(directory: Path, file: str, change: Callable[[Any], object]) -> None:
    fields = json.loads((directory / file).read_text())
    change(fields)
    (directory / file).write_text(json.dumps(fields))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes tensors, and the report's hash with them."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if (directory / "report.json").is_file():
        found = sha256_of(directory / "model.safetensors")
        edit(directory, "report.json", lambda report: report["files"].update({"model.safetensors": found}))


def test_what_quantize_writes_is_sound(saved: Path) -> None:
    result = verify(saved, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "passed": True,
        "findings": [],
        "checked": ["files", "plan", "tensors", "fusion groups", "forward pass"],
        "skipped": {},
        "explained": [],
        "runtime": None,
    }


@pytest.mark.parametrize(
    "golden", ["compressed_tensors/FP8", "compressed_tensors/NVFP4", "modelopt/nvfp4", "modelopt/mixed"]
)
def test_what_peers_write_is_sound(golden: str) -> None:
    result = verify(GOLDENS / golden)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert "files: not checked, there is no report.json" in result.stderr
    assert "0 findings in tensors, fusion groups, forward pass" in result.stderr


def flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.weight_packed"][0, 0] ^= 1


def test_one_changed_bit(saved: Path, tmp_path: Path) -> None:
    out = shutil.copytree(saved, tmp_path / "out")
    rewrite(out, flip)
    assert verify(out).exit_code == 0  # such as a report that was changed with it
    edit(out, "report.json", lambda report: report["files"].update({"model.safetensors": "0" * 64}))
    result = verify(out)
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"files: {out / 'model.safetensors'}: is not what was written: its SHA-256 is not that in report.json"
    ]


def edited_plan(fields: Any) -> None:
    for layer in fields["layers"]:
        if ".0.self_attn." in layer["name"] and layer["weight"] is not None:
            layer["activation"] = None


def other_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.weight_global_scale"] *= 2


def other_inputs(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("input_global_scale"):
            tensors[name] *= 1e6  # every value saturates


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            lambda d: (d / "other.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}"),
            ["files: .*other.safetensors: is not in"],
        ),
        (lambda d: edit(d, "report.json", lambda r: r["files"].update({"../x": ""})), ["files: .*x: is missing"]),
        (
            lambda d: edit(d, "plan.json", edited_plan),
            [
                "plan: .*plan.json: is not the plan that was executed",
                *[rf"plan: .*layers\.0\.self_attn\.{p}_proj: nvfp4, and the config says nvfp4@nvfp4" for p in "qkvo"],
                *[rf"tensors: .*layers\.0\.self_attn\.{p}_proj\.input_global_scale is left over" for p in "qkvo"],
            ],
        ),
        (
            lambda d: edit(d, "plan.json", lambda p: p.update(attention="fp8")),
            ["plan: .*plan.json: is not the plan that was executed"],
        ),
        (
            lambda d: rewrite(d, other_scale),
            [rf"fusion groups: model.layers.1.self_attn.{p}_proj: the tensor scale of its weight is" for p in "kv"],
        ),
        (
            lambda d: rewrite(d, lambda t: t["model.norm.weight"].fill_(torch.nan)),
            ["tensors: .*model.norm.weight holds 128 values that are NaN"],
        ),
        (
            lambda d: rewrite(d, lambda t: t["lm_head.weight"].neg_()),
            ["forward pass: .*the logits of a forward pass are up to"],
        ),
        (lambda d: rewrite(d, other_inputs), ["forward pass: .*the logits of a forward pass are up to"]),
        (
            lambda d: rewrite(d, lambda t: t["model.norm.weight"].fill_(3e38)),
            ["forward pass: .*a forward pass gives NaN or infinity"],
        ),
    ],
    ids=["file", "listed", "activation", "attention", "group", "nan", "head", "inputs", "overflow"],
)
def test_every_change_is_a_line(
    change: Callable[[Path], object], lines: list[str], saved: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(saved, tmp_path / "out")
    change(out)
    result = verify(out)
    assert result.exit_code == 2, result.output
    found = result.stdout.splitlines()
    assert len(found) == len(lines), result.stdout
    assert all(any(re.match(line, other) for other in found) for line in lines), result.stdout
    findings = quant.verify(out).findings
    assert [f"{each.check}: {each.what}" for each in findings] == found


def test_modelopts_own_config_is_compared_too(saved: Path, tmp_path: Path) -> None:
    quant.convert(saved, tmp_path / "out", "modelopt")
    assert verify(tmp_path / "out").exit_code == 0
    edit(tmp_path / "out", "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="W4A16_NVFP4"))
    result = verify(tmp_path / "out")
    assert result.exit_code == 2
    assert "q_proj: nvfp4@nvfp4, and the config says nvfp4 (hf_quant_config.json)" in result.stdout


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:50])


@pytest.mark.parametrize(
    ("name", "change"),
    [("tokenizer.json", cut), ("tokenizer_config.json", longer), ("config.json", longer),
     ("tokenizer.json", Path.unlink), ("config.json", Path.unlink)],
)  # fmt: skip
def test_a_file_besides_the_weights(saved: Path, tmp_path: Path, name: str, change: Callable[[Path], object]) -> None:
    """What a server reads has its SHA-256 in the report; a change that is meant is put there by its owner."""
    out = shutil.copytree(saved, tmp_path / "out")
    (out / "README.md").write_text("Mine.")
    change(out / name)
    if not (out / name).exists():
        assert f"files: {out / name}: is missing, and report.json lists it" in verify(out).stdout.splitlines()
        return
    finding = (
        f"files: {out / name}: is not what was written: its SHA-256 is not that in report.json; restore it, or put its "
        "new SHA-256 there if the change is yours"
    )
    assert verify(out).stdout.splitlines() == [finding]
    edit(out, "report.json", lambda report: report["files"].update({name: sha256_of(out / name)}))
    assert verify(out).exit_code == 0


@pytest.mark.parametrize("written", ["saved", "converted"])
def test_a_checkpoint_without_a_report(saved: Path, tmp_path: Path, written: str) -> None:
    """`quant.save` and `quant.convert` write the hashes of their files where sha256sum reads them too."""
    out = tmp_path / "out"
    if written == "converted":
        quant.convert(saved, out, "modelopt")
    else:
        quant.save(quant.load(saved), None, out)
    assert quant.verify(out).findings == () and "files" in quant.verify(out).checked
    sums = out / "SHA256SUMS"
    names = ["config.json", "model.safetensors", "plan.json"]
    assert [line.split()[1] for line in sums.read_text().splitlines()] == names
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", sums.name], cwd=out, check=True)
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    finding = f"{out / 'model.safetensors'}: is not what was written: its SHA-256 is not that in SHA256SUMS"
    assert finding in [each.what for each in quant.verify(out).findings]
    sums.write_text(f"{'0' * 63} model.safetensors\n")
    assert f"{sums}: line 1 is no SHA-256" in quant.verify(out).findings[0].what


def test_a_plain_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    result = quant.quantize(model, "fp8_channel")
    quant.save(result.model, result.plan, tmp_path / "out")
    again = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    found = quant.verify(tmp_path / "out", again)
    assert found.findings == () and found.checked == ("files", "plan", "tensors", "fusion groups")
    assert "Sequential does not run on token ids" in found.skipped["forward pass"]


def test_a_state_dict_without_its_module_is_checked_as_far_as_it_can_be(tmp_path: Path) -> None:
    """What cannot be checked without a module is one sentence with the way out, and no finding."""
    save_file({"up.weight": torch.randn(32, 64), "down.weight": torch.randn(64, 32)}, tmp_path / "sd.safetensors")
    arguments = ["quantize", tmp_path / "sd.safetensors", "--format", "mxfp8", "--out", tmp_path / "out"]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    result = verify(tmp_path / "out")
    assert result.exit_code == 0 and not result.stdout
    assert re.search(r"^forward pass: not checked, .*--model-factory", result.stderr, re.M)
    assert "0 findings in files, plan, tensors, fusion groups\n" in result.stderr
    edit(tmp_path / "out", "plan.json", lambda plan: plan["layers"][0].update(weight="fp8_channel"))
    changed = verify(tmp_path / "out")
    assert changed.exit_code == 2 and "is not the plan that was executed" in changed.stdout


@pytest.mark.parametrize("widths", [{}, {"kdim": 32, "vdim": 32}])
def test_what_multiplies_by_its_own_weight_stays_in_16_bit_in_a_state_dict(
    widths: dict[str, int], tmp_path: Path
) -> None:
    """Names alone show what nn.MultiheadAttention, LSTM, Bilinear and computed weights do; `quant.load` reads it."""
    torch.manual_seed(0)

    def build() -> torch.nn.Module:
        model = torch.nn.Module()
        model.attention = torch.nn.MultiheadAttention(64, 4, **widths)
        model.up = torch.nn.Linear(64, 128)
        model.lstm, model.pair = torch.nn.LSTM(64, 32), torch.nn.Bilinear(64, 64, 32)
        model.norm = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64))
        model.old_norm = torch.nn.utils.weight_norm(torch.nn.Linear(64, 64))
        return model

    torch.save(build().state_dict(), tmp_path / "sd.pt")
    arguments = ["quantize", tmp_path / "sd.pt", "--format", "int8", "--effort", 0, "--out", tmp_path / "out"]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    plan = quant.Plan.load(tmp_path / "out" / "plan.json")
    assert [layer.name for layer in plan.quantized] == ["up"]
    assert "nn.MultiheadAttention" in plan.by_name["attention.out_proj"].reason
    assert verify(tmp_path / "out").exit_code == 0
    loaded = quant.load(tmp_path / "out", build())
    weight = torch.load(tmp_path / "sd.pt")["up.weight"]
    assert (loaded.up.weight - weight).norm() < 0.02 * weight.norm()
    # A directory in which it is quantized, as earlier versions wrote it.
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for part in ("weight", "weight_scale"):
        tensors[f"attention.out_proj.{part}"] = tensors[f"up.{part}"][:64].clone()
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    layers = [replace(e, weight=plan.by_name["up"].weight) if "out_proj" in e.name else e for e in plan.layers]
    replace(plan, layers=tuple(layers)).save(tmp_path / "out" / "plan.json")
    found = verify(tmp_path / "out")
    assert found.exit_code == 2 and "out_proj: nn.MultiheadAttention multiplies by it" in found.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": {"a": 1}}', "[" * 100_000])
def test_a_report_that_is_none(text: str, saved: Path, tmp_path: Path) -> None:
    out = shutil.copytree(saved, tmp_path / "out")
    (out / "report.json").write_text(text)
    result = verify(out)
    assert result.exit_code == 2 and f"files: {out / 'report.json'}: not a valid report" in result.stdout


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    result = verify(BASE)
    assert result.exit_code == 2 and "no quantized checkpoint" in result.stderr
