"""A tensor that holds NaN or infinity is named before anything is computed with it, and nothing is written of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import BASE
from torch import nn

import quant
from quant.base.errors import UserError
from quant.cli.main import main

NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def spoilt(folder: Path, name: str, value: float) -> Path:
    """The base model with one value of a tensor replaced."""
    out = shutil.copytree(BASE, folder / "model")
    tensors = load_file(out / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", [NORM, HEAD, EMBEDDING, UP])
def test_of_a_model(name: str, value: float, tmp_path: Path) -> None:
    source = spoilt(tmp_path, name, value)
    arguments = [
        "quantize",
        str(source),
        "--format",
        "nvfp4a16",
        "--exclude",
        "lm_head",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert name.removesuffix(".weight") in result.stderr and "NaN" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 or "error: " in result.stderr.strip().splitlines()[-1]


def test_of_a_state_dict(tmp_path: Path) -> None:
    tensors = {"up.weight": torch.randn(32, 64), "norm.weight": torch.ones(64), "down.weight": torch.randn(64, 32)}
    tensors["norm.weight"][5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    arguments = ["quantize", str(tmp_path / "model.safetensors"), "--format", "int8", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "norm.weight [64] holds 1 values that are NaN and 0 that are infinite" in result.stderr


class Masked(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32)
        self.register_buffer("mask", torch.triu(torch.full((8, 8), value), 1))


def test_a_mask_may_hold_minus_infinity(tmp_path: Path) -> None:
    result = quant.quantize(Masked(-torch.inf), "fp8_channel")
    quant.save(result.model, result.plan, tmp_path / "out")
    assert torch.equal(quant.load(tmp_path / "out", Masked(0.0)).mask, result.model.mask)
    for value in (torch.nan, torch.inf):
        with pytest.raises(UserError, match=r"mask \[8, 8\] holds"):
            quant.quantize(Masked(value), "fp8_channel")


@pytest.mark.parametrize("name", ["0.codes", "1.weight"])
def test_nothing_is_written_of_it(name: str, tmp_path: Path) -> None:
    """As a solver, or a training loop of the caller's, could leave it."""
    result = quant.quantize(nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)), "fp8_channel")
    tensor = result.model.get_submodule(name[0]).state_dict()[name[2:]]
    tensor.view(torch.int8 if tensor.dtype.itemsize == 1 else torch.int32)[..., 2] = -1  # NaN
    with pytest.raises(ValueError, match=r"holds .* NaN .*; nothing was written"):
        quant.save(result.model, result.plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def generate(model: Path, *options: str) -> tuple[int, str, str]:
    arguments = ["generate", str(model), "--prompt", "ab", "--max-new-tokens", "2", *options]
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", [NORM, HEAD, UP])
def test_no_text_comes_of_nan(name: str, tmp_path: Path) -> None:
    code, text, error = generate(spoilt(tmp_path, name, torch.nan))
    assert (code, text) == (2, "")
    assert f"{name} [" in error and "holds 1 values that are NaN" in error


def test_no_text_comes_of_overflow(tmp_path: Path) -> None:
    source = spoilt(tmp_path, NORM, 1.0)
    tensors = load_file(source / "model.safetensors")
    tensors[NORM].fill_(3e38)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, text, error = generate(source)
    assert (code, text) == (2, "")
    assert "gives NaN or infinite logits behind token" in error and "overflows" in error
    assert generate(BASE)[0] == 0


def test_a_budget_names_the_tensor_and_not_the_loss(tmp_path: Path) -> None:
    model = quant.open_model(spoilt(tmp_path, HEAD, torch.inf)).model
    with pytest.raises(UserError, match=r"^lm_head\.weight .* 1 that are infinite; repair the model"):
        quant.quantize(model, bits=6, data=torch.arange(64).view(4, 16))
