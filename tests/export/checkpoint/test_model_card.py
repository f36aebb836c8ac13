"""Checkpoints have a model card of their own, and keep the source's; each line of it is held against the checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner

import quant
from quant.base.errors import loss_text
from quant.cli.main import main
from quant.export.checkpoint.convert import _loss
from quant.export.checkpoint.verify import compare_with_source
from quant.models.files import hub_name

yaml = pytest.importorskip("yaml", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

SOURCE = """---
license: other
license_name: tiny-licence
language: [en, de]
tags: ["text: odd", chat]
base_model: someone/before
---
# Tiny
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cards") / "tiny"
    tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "README.md").write_text(SOURCE)
    return directory


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def card(directory: Path) -> tuple[dict[str, Any], str]:
    _, head, body = (directory / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_command_writes_a_card_and_keeps_the_sources(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("quantize", model, "--format", "fp8_channel", "--effort", 0, "--out", out)
    assert (out / "README.source.md").read_text() == SOURCE
    head, body = card(out)
    assert head == {
        "library_name": "transformers", "license": "other", "license_name": "tiny-licence", "language": ["en", "de"],
        "tags": ["text: odd", "chat", "blockscale", "compressed-tensors", "fp8_channel"],
    }  # fmt: skip
    assert body.count("someone/before") == 0 and "# tiny, quantized" in body and str(tmp_path) not in body
    plan = quant.Plan.load(out / "plan.json")
    row = next(line for line in body.splitlines() if line.startswith("| fp8_channel@fp8_token |"))
    assert row.split("|")[2].strip() == str(len(plan.quantized))
    assert "$ vllm serve DIR" in body and "LlamaForCausalLM.from_pretrained" in body and "Measured loss" not in body
    # The comparison explains the one file that is another, and the run has no warning of it.
    (difference,) = compare_with_source(out, model)
    assert difference.name == "README.md" and "README.source.md" in (difference.reason or "")
    run("check", out, "--source", model)
    assert not [text for text in json.loads((out / "report.json").read_text())["warnings"] if "README" in text]
    # In another layout, the lines of its runtimes; the source's card is still there.
    quant.convert(out, tmp_path / "modelopt", "modelopt")
    head, body = card(tmp_path / "modelopt")
    assert head["tags"] == ["text: odd", "chat", "blockscale", "modelopt", "fp8_channel"] and head["license"] == "other"
    assert "# tiny, quantized" in body and "from_pretrained" not in body
    assert (tmp_path / "modelopt/README.source.md").read_text() == SOURCE


def test_a_saved_model_has_the_name_of_its_base_on_the_hub(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "models--some--tiny--model/snapshots" / ("0" * 40)
    home.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", model, home], check=True)
    assert (hub_name(home), hub_name(model)) == ("some/tiny--model", None)
    done = quant.quantize(tiny_models.llama(num_hidden_layers=1, dtype=torch.bfloat16), "mxfp6a16", effort=0)
    quant.save(done.model, done.plan, tmp_path / "saved", source=home)
    head, body = card(tmp_path / "saved")
    assert (head["base_model"], head["base_model_relation"]) == ("some/tiny--model", "quantized")
    # vLLM has no kernel for 6 bits: the card has the reason in place of the command.
    assert "vllm serve" not in body and "vLLM does not serve it: " in body
    # Saved again over a card of the user's, which stays; one of ours is replaced.
    (tmp_path / "own").mkdir()
    (tmp_path / "own/README.md").write_text("mine")
    for folder in ("own", "saved"):
        done.model.save_pretrained(tmp_path / folder)  # type: ignore[operator]
    assert (tmp_path / "own/README.md").read_text() == "mine" and "quantized" in card(tmp_path / "saved")[1]


def test_a_loss_is_in_the_card_without_paths(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    text = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.randint(3, 60, (2, 16))}, text)
    run(
        "quantize", model, "--format", "nvfp4a16", "--effort", 0, "--out", tmp_path / "out", "--eval", text,
        "--eval-samples", 2, "--seqlen", 16,
    )  # fmt: skip
    kl = json.loads((tmp_path / "out/report.json").read_text())["evaluation"]["kl"]
    _, body = card(tmp_path / "out")
    assert f"| ids.safetensors | {loss_text(kl)} |" in body and str(tmp_path) not in body
    # A small loss keeps its digits.
    small = next(row for row in _loss({"evaluation": {"text": "a.txt", "kl": 3.2e-5}}) if "a.txt" in row)
    assert small == "| a.txt | 3.2e-05 | – | – | – |"
