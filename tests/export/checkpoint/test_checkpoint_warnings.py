"""The command, `quant.save` and `save_pretrained` say the same of a checkpoint that other runtimes misread."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch

import quant
from quant.run.request import Request
from quant.run.run import run

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

FEATURES = {
    "low-rank": (torch.bfloat16, "nvfp4a16", "lowrank:8+rtn", "a 16-bit low-rank branch at run time"),
    "float32": (torch.float32, "nvfp4", "rtn", "unpacks nvfp4 to bfloat16 and then fails on a model in float32"),
    "float16": (torch.float16, "nvfp4", "rtn", "unpacks nvfp4 to bfloat16 and then fails on a model in float16"),
    "mxfp6": (torch.bfloat16, "mxfp6a16", "rtn", "vLLM 0.26 to 0.33 does not load mxfp6"),
}


def warned(write: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write()
    return [str(each.message) for each in caught if each.category is UserWarning]


@pytest.mark.parametrize("feature", FEATURES)
def test_every_door_says_the_same(feature: str, tmp_path: Path) -> None:
    dtype, preset, solver, sentence = FEATURES[feature]
    tiny_models.llama(dtype=dtype, gain=4.0).save_pretrained(tmp_path / "source")
    ids = torch.randint(3, 60, (4, 16))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    done = quant.quantize(model, preset, ids, solver=solver)

    saved = warned(lambda: quant.save(done.model, done.plan, tmp_path / "saved"))
    pretrained = warned(lambda: done.model.save_pretrained(tmp_path / "pretrained"))
    request = Request(tmp_path / "source", recipe=preset, solver=solver, out=tmp_path / "command", device="cpu")
    report = run(request).report
    assert report is not None

    assert any(re.search(sentence, message) for message in saved), saved
    assert saved == pretrained
    # The loss of layers is a warning on the run, which in Python `quant.quantize` raises.
    assert [message for message in report.warnings if "lost most of the values" not in message] == saved


def test_lost_values_are_a_warning_in_python_as_in_the_report(tmp_path: Path) -> None:
    """Gate and up share a scale. FP8's least value is 2⁻⁹ · amax / 448, here 4e-6, so all of a gate of 1e-6 is lost."""
    model = tiny_models.llama(dtype=torch.bfloat16)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate_proj.weight.fill_(1e-6)
            block.mlp.up_proj.weight[0, 0] = 1.0
    model.save_pretrained(tmp_path / "source")
    report = run(Request(tmp_path / "source", recipe="fp8", solver="rtn", out=tmp_path / "out", device="cpu")).report
    assert report is not None
    (sentence,) = [message for message in report.warnings if "lost most of the values" in message]
    assert "2 layers" in sentence and "gate_proj (100%)" in sentence
    ids = torch.randint(3, 60, (4, 16))
    assert warned(lambda: quant.quantize(model, "fp8", ids, solver="rtn")) == [sentence]
