"""Calibration text that is too short is an error before the weights of the model are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_processors
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from quant.cli.main import main
from quant.run import run

pytest.importorskip("transformers", reason="the extra hf")
WORDS = "words in a row, "


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each model that a run opens is one without weights; a tiny decoder lies in `model`."""
    tokenizer = tiny_processors._byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_models.llama(vocab_size=len(tokenizer), max_position_embeddings=32).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    is_meta: list[bool] = []
    open_model = run.open_model

    def recorded(*args: Any, **options: Any) -> Any:
        is_meta.append(options["meta"])
        return open_model(*args, **options)

    monkeypatch.setattr(run, "open_model", recorded)
    return is_meta


def quantize(*options: str, samples: int = 4, seqlen: int = 32) -> str:
    rows = [f"--calib-samples={samples}", f"--seqlen={seqlen}", "--device=cpu", "--out=out", "--quiet"]
    return CliRunner().invoke(main, ["quantize", "model", *rows, *options]).output


@pytest.mark.parametrize(
    "options", [("--format", "nvfp4a16", "--solver", "gptq"), ("--format", "fp8", "--effort", "0"), ("--bits", "5")]
)
def test_a_short_text_is_refused_before_weights_are_read(options: tuple[str, ...], opened: list[bool]) -> None:
    Path("text.txt").write_text(WORDS * 7)
    message = "text.txt: too short: 113 tokens give 3 rows of 32; 4 row(s) need 128 tokens. Give a longer text"
    assert message in quantize(*options, "--calib", "text.txt")
    assert opened == [True]


def test_a_text_that_suffices_or_is_not_needed_is_no_error(opened: list[bool]) -> None:
    Path("text.txt").write_text(WORDS * 9)
    Path("long.txt").write_text(WORDS * 200)
    weights_alone, static = ("--format", "nvfp4a16", "--effort", "0"), ("--format", "fp8", "--effort", "0")
    for options, shape, is_meta in (
        ((*static, "--calib", "text.txt"), {}, [True, False]),
        ((*static, "--calib", "text.txt"), {"samples": 8}, [True]),
        ((*static, "--calib", "long.txt"), {}, [False]),
        # Nothing reads the text where weights alone are rounded to nearest.
        ((*weights_alone, "--calib", "text.txt"), {"samples": 8}, [True, False]),
        # Rows that the model writes some of have at most its context.
        ((*static, "--calib", "mix+text.txt"), {"seqlen": 64}, [True, False]),
    ):
        opened.clear()
        output = quantize(*options, "--overwrite", **shape)
        assert opened == is_meta, output
        assert ("too short" in output) == (is_meta == [True])


def test_token_ids_are_counted_when_they_are_read(opened: list[bool]) -> None:
    save_file({"ids": torch.arange(100)}, "ids.safetensors")
    assert "too short: 100 tokens give 3 rows" in quantize("--format", "fp8", "--calib", "ids.safetensors")
    assert opened == [False]


@pytest.mark.parametrize("options", [("--format", "nvfp4a16", "--solver", "gptq"), ("--bits", "5")])
def test_rows_of_a_file_end_at_the_context(options: tuple[str, ...], opened: list[bool]) -> None:
    Path("text.txt").write_text(WORDS * 9)  # 145 tokens: four rows of 32
    arguments = ["model", *options, "--calib", "text.txt", "--calib-samples", "4", "--device", "cpu", "--out", "out"]
    output = CliRunner().invoke(main, ["quantize", *arguments]).output
    assert "rows have 32 tokens, the context of this model, and not --seqlen 512" in output
    [calibration] = json.loads(Path("out/plan.json").read_text())["provenance"]["calibration"]
    assert (calibration["rows"], calibration["seqlen"]) == (4, 32)
