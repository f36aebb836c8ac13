"""`quant distill` trains a checkpoint, and reports it beside the one that it started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import quant
from quant.cli.quantize import quantize_command
from quant.cli.training.distill import distill_command

pytest.importorskip("transformers")


def run(command: Any, *arguments: object) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its rows of tokens, and its checkpoint in NVFP4."""
    folder = tmp_path_factory.mktemp("distill")
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0).save_pretrained(folder / "model")
    rows = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))
    save_file({"rows": rows}, folder / "rows.safetensors")
    result = run(quantize_command, folder / "model", "--format", "nvfp4a16", "--solver", "rtn", "--out", folder / "ptq")
    assert result.exit_code == 0, result.output
    return folder


OPTIONS = ("--steps", 12, "--batch-size", 4, "--seqlen", 24, "--samples", 8, "--lr", 3e-4, "--device", "cpu")


def test_a_checkpoint_comes_nearer_to_its_original(made: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", made / "rows.safetensors"
    result = run(
        distill_command, made / "ptq", "--teacher", made / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--scales", "learned", "--out", out, *OPTIONS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = quant.Report.load(out / "report.json")
    trained = report.distillation
    assert trained is not None and trained.before is not None and report.evaluation is not None
    rows = quant.token_rows(text, None, samples=8, seqlen=24)
    original = quant.open_model(made / "model").model
    for folder, figures in ((made / "ptq", trained.before), (out, report.evaluation)):
        assert quant.evaluate(quant.load(folder), rows, original).kl == pytest.approx(figures.kl, rel=1e-3)
    assert report.evaluation.kl < 0.8 * trained.before.kl
    assert trained.losses[-1] < trained.losses[0] and len(trained.losses) == 6
    assert "12 steps of 4 × 24 tokens" in result.output
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert quant.verify(out).findings == ()


def test_from_a_cached_teacher(made: Path, tmp_path: Path) -> None:
    rows = quant.token_rows(made / "rows.safetensors", None, samples=8, seqlen=24)
    quant.cache_teacher(quant.open_model(made / "model").model, rows, tmp_path / "teacher", k=16)
    result = run(distill_command, made / "ptq", "--teacher", tmp_path / "teacher", "--out", tmp_path / "out", *OPTIONS)
    assert result.exit_code == 0, result.output
    losses = quant.Report.load(tmp_path / "out" / "report.json").distillation.losses
    assert losses[-1] < losses[0]


def test_refusals(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(distill_command, made / "model", "--teacher", made / "model", "--out", out)
    assert result.exit_code == 2 and "no quantized checkpoint; make one with `quantize" in result.output
    result = run(distill_command, made / "ptq", "--teacher", made / "model", "--out", made / "ptq")
    assert result.exit_code == 2 and "ptq" in result.output
    tiny_models.llama(vocab_size=80).save_pretrained(tmp_path / "other")
    data = made / "rows.safetensors"
    result = run(distill_command, made / "ptq", "--teacher", tmp_path / "other", "--data", data, "--out", out, *OPTIONS)
    assert result.exit_code == 2 and "the teacher's vocabulary has 80 tokens and the student's 64" in result.output
    assert not out.exists()
