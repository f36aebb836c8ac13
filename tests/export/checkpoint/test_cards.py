"""Every line of a model card that is code or a command is executed on the checkpoint that carries it.

What the card has transformers load gives the tokens of a plain `generate`, and the logits of `quant.load`. What it
says that transformers does not load stops there.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import quant
from quant.cli.main import main
from quant.run.request import Request
from quant.run.run import run

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import build, difference, first_calls, inputs, result  # noqa: E402 -- needs transformers

HALF, WIDE = torch.bfloat16, torch.float32
QUICK = [
    ("GPT2LMHeadModel", "nvfp4a16", HALF), ("T5ForConditionalGeneration", "nvfp4a16", HALF),
    ("BartForConditionalGeneration", "fp8_channel", WIDE), ("LlamaForCausalLM", "nvfp4a16", WIDE),
    ("Qwen3ForCausalLM", "int8", WIDE),
]  # fmt: skip
_SLOW = {
    ("nvfp4a16", HALF): """
        LlamaForCausalLM FalconForCausalLM RecurrentGemmaForCausalLM WhisperForConditionalGeneration CLIPModel
        Qwen2_5_VLForConditionalGeneration Gemma3ForConditionalGeneration MixtralForCausalLM
        Llama4ForConditionalGeneration ResNetForImageClassification ViTForImageClassification Wav2Vec2ForCTC
        GraniteMoeForCausalLM
        """,
    ("fp8_channel", WIDE): """
        GPT2LMHeadModel T5ForConditionalGeneration WhisperForConditionalGeneration CLIPModel
        Qwen2_5_VLForConditionalGeneration Gemma3ForConditionalGeneration Lfm2MoeForCausalLM OPTForCausalLM
        ResNetForImageClassification BertForSequenceClassification
        """,
    ("int8", WIDE): "GPT2LMHeadModel MarianMTModel LlavaForConditionalGeneration Qwen3ForCausalLM SiglipModel",
    ("int4a16_g32", HALF): "BartForConditionalGeneration BlipForConditionalGeneration Phi3ForCausalLM",
    ("mxfp4a16", HALF): "M2M100ForConditionalGeneration Mamba2ForCausalLM ModernBertForMaskedLM",
    ("mxfp8", HALF): "T5ForConditionalGeneration GemmaForCausalLM",
    ("mxfp6a16", WIDE): "Pop2PianoForConditionalGeneration",
}  # fmt: skip
SLOW = [(name, *key) for key, names in _SLOW.items() for name in names.split()]


def execute(line_block: str, language: str, directory: Path, variables: dict[str, Any]) -> None:
    """Runs a block of a card; vLLM is not installed here."""
    code = line_block.replace("DIR", str(directory))
    if language == "python":
        exec(code, variables)
        return
    for line in code.splitlines():
        command, *arguments = shlex.split(line.removeprefix("$ "))
        assert command in ("quant", "vllm"), line
        if command == "quant":
            done = CliRunner().invoke(main, arguments)
            # A class that takes no token ids has no forward pass there.
            assert done.exit_code == 0, done.output


def _calls(model: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
    for name, arguments in calls:
        getattr(model, name)(**arguments)


def check_card(name: str, format: str, dtype: torch.dtype, folder: Path) -> str:
    """Returns what the card says of transformers: "runs", or the reason why it does not."""
    model = build(name, dtype)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(model).items()}
    calls = first_calls(model, given)
    model.save_pretrained(folder / "model")
    try:
        run(Request(str(folder / "model"), format, solver="rtn", out=folder / "out"))
    except ValueError as error:
        return f"refused: {error}"
    card = (folder / "out" / "README.md").read_text()
    ours = quant.load(folder / "out")
    _calls(ours, calls)
    right, recommended = result(ours, given), False
    for language, block in re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL):
        variables: dict[str, Any] = {}
        execute(block, language, folder / "out", variables)
        if language != "python":
            continue
        theirs = variables["model"].eval()
        _calls(theirs, calls)
        # Block formats are unpacked to BF16, also for a model in float32, and INT8 inputs have a scale of amax / 127.5
        # in compressed-tensors, and of amax / 127 in `quant.load` and vLLM.
        limit = 0.01 if dtype == WIDE and format == "fp8_channel" else 0.05
        assert difference(result(theirs, given), right) <= limit, block
        recommended |= "from_pretrained" in block
    if recommended:
        assert "Not with transformers" not in card
        return "runs"
    reason = re.search(r"Not with transformers alone: (.*)\.\n", card)
    assert reason is not None, card
    if "does not load this checkpoint" in reason[1]:
        with pytest.raises((RuntimeError, AttributeError, KeyError, ValueError)):
            _calls(type(model).from_pretrained(folder / "out").eval(), calls)
    if "dequantize=True" in reason[1]:
        config = transformers.CompressedTensorsConfig(dequantize=True)
        unpacked = type(model).from_pretrained(folder / "out", quantization_config=config).eval()
        _calls(unpacked, calls)
        assert difference(result(unpacked, given), right) <= 0.3
    return reason[1]


def checked(name: str, format: str, dtype: torch.dtype, folder: Path) -> str:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return check_card(name, format, dtype, folder)


SAYS = ("Conv1D", "runs", "generate() calls the encoder before", "runs", "runs")


@pytest.mark.parametrize(("case", "says"), [*zip(QUICK, SAYS, strict=True)])
def test_a_card_of_each_kind(case: tuple[str, str, torch.dtype], says: str, tmp_path: Path) -> None:
    assert says in checked(*case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=["-".join(case[:2]) for case in SLOW])
def test_cards_of_many_kinds(case: tuple[str, str, torch.dtype], tmp_path: Path) -> None:
    assert checked(*case, tmp_path)
