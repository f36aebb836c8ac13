"""`quant bench` asks for a model and prints rates; on a GPU, no data sheet contradicts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from samples import BASE

from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.kernels.base import hardware
from quant.kernels.linear import tuning
from quant.recipes.gpus import GPUS


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench()
    assert result.exit_code == 2 and "MODEL" in result.stderr
    assert "--tokens 0,1: expected numbers of 1 or more" in bench("model", "--tokens", "0,1").stderr
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    hardware.current.cache_clear()
    assert bench(BASE).stderr == "error: there is no GPU cuda:0 on this machine; PyTorch sees 0\n"


def test_a_model_without_quantized_linears_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    assert "has no quantized linear; bench a checkpoint that `quantize` wrote" in bench(BASE).stderr


def test_every_shape_of_a_model_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The measurement itself replaced: its arguments are the model's weights, and what it gives is printed."""
    pytest.importorskip("transformers", reason="the [hf] extra installs it")
    out = tmp_path / "q"
    made = CliRunner().invoke(quantize_command, [str(BASE), "--format", "mxfp8", "--out", str(out), "--quiet"])
    assert made.exit_code == 0, made.output

    def time(weights: Any, tokens: Any, progress: Any) -> list[dict[str, Any]]:
        first = weights[0]
        row = {"format": first.format.name, "out": first.shape[0], "in": first.shape[1], "tokens": tokens[0]}
        rates = {"microseconds": 12.5, "bytes_per_second": 2e12, "flops": 3e12, "times_16_bit": 1.5}
        return [{**row, **rates, "choice": "dense"}]

    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    monkeypatch.setattr(tuning, "time_as_called", time)
    line = bench(out, "--tokens", "16", "--quiet").stdout.splitlines()[1]
    assert line.startswith("  mxfp8 [") and line.endswith(
        "], 16 tokens: 12.5 µs, 2.00 TB/s, 3.0 TFLOP/s, 1.50 × 16 bit (dense)"
    )


@pytest.mark.gpu
def test_matmuls_of_this_gpu() -> None:
    from quant.formats.format import FORMATS
    from quant.formats.tensor import quantize

    weights = [quantize(torch.randn(512, 1024), FORMATS[name]) for name in ("nvfp4", "mxfp8")]
    rows = tuning.time_as_called(weights, [1, 100])
    assert [(row["format"], row["tokens"]) for row in rows] == [
        ("nvfp4", 1), ("nvfp4", 100), ("mxfp8", 1), ("mxfp8", 100)
    ]  # fmt: skip
    gpu = hardware.current()
    for row in rows:
        assert 0 < row["microseconds"] < 1e5 and row["times_16_bit"] > 0
        assert not gpu.known or row["flops"] < gpu.tflops["bf16"] * 1e12
