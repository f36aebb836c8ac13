"""`--lm-head` quantizes the output head, whose inputs stay in 16 bit, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner

import quant
from quant.cli.quantize import quantize_command
from quant.kernels.linear.quant_linear import QuantLinear

pytest.importorskip("transformers")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(quantize_command, [str(a) for a in arguments])


def saved(folder: Path, **fields: Any) -> Path:
    tiny_models.llama(dtype=torch.bfloat16, vocab_size=128, **fields).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("include", [[], ["--include", "*.mlp.*"]])
def test_the_head_is_quantized_and_its_error_is_in_the_report(tmp_path: Path, include: list[str]) -> None:
    model, out = saved(tmp_path), tmp_path / "out"
    result = run(model, "--format", "nvfp4", "--lm-head", "fp8_channel", "--solver", "mse", "--out", out, *include)
    assert result.exit_code == 0, result.output
    loaded = quant.load(out)
    head = loaded.lm_head
    assert isinstance(head, QuantLinear)
    assert (head.weight_format.name, head.activation_format) == ("fp8_channel", None)
    original = quant.open_model(model).model.lm_head.weight.detach().float()
    error = float((head.dequantize() - original).norm() / original.norm())
    written = next(layer for layer in quant.Report.load(out / "report.json").layers if layer.name == "lm_head")
    assert 0 < error < 0.05 and written.relative_error == pytest.approx(error, rel=1e-3)
    with torch.no_grad():
        hidden = loaded.model(torch.arange(8)[None]).last_hidden_state
        expected = hidden.double() @ head.dequantize().double().T
        torch.testing.assert_close(loaded(torch.arange(8)[None]).logits.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"hidden_size": 48}, ("--format", "fp8", "--lm-head", "mxfp8"), "in = 48 is not a multiple of mxfp8's block"),
        ({}, ("--format", "nvfp4", "--lm-head", "nvfp5"), "--lm-head nvfp5: unknown format"),
        ({}, ("--bits", "5", "--lm-head", "nvfp4"), "a budget counts the layers inside the model"),
        ({}, ("--plan", "plan.json", "--lm-head", "nvfp4"), "--plan says everything already"),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, fields: dict[str, Any], arguments: tuple[str, ...], message: str
) -> None:
    result = run(saved(tmp_path, **fields), *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2 and message in result.stderr and not (tmp_path / "out").exists()


def test_a_head_that_stays_in_16_bit_says_why() -> None:
    model = tiny_models.llama(vocab_size=128)
    model.other = model.lm_head
    message = "lm_head stays in 16 bit: the model holds this module in several places, .*; leave that out"
    with pytest.raises(quant.UserError, match=message):
        quant.make_plan(model, "nvfp4", lm_head="fp8")
    plan = quant.make_plan(model, "nvfp4", lm_head="keep")
    assert next(layer.weight for layer in plan.layers if layer.name == "lm_head") is None
