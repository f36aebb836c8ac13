"""Whatever the architecture: everything of a source that is not quantized is in its checkpoint, in both layouts."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_cases import quick_cases

pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

from architectures import ARCHITECTURES, DTYPES, LOGIT_LIMIT, QUICK, build, difference, inputs, result

import quant
from quant.base.errors import UserError
from quant.export.checkpoint.convert import convert
from quant.export.checkpoint.load import load
from quant.export.checkpoint.verify import compare_with_source
from quant.models.huggingface import patch_forward
from quant.run.request import Request
from quant.run.run import run

FILES = {"LICENSE": "free", "1_Pooling/config.json": "{}", "parser.py": "raise SystemExit"}
TEN = (
    "LlamaForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "FalconForCausalLM", "Mamba2ForCausalLM",
    "T5ForConditionalGeneration", "BertForSequenceClassification", "ViTForImageClassification", "MixtralForCausalLM",
    "WhisperForConditionalGeneration",
)  # fmt: skip
OTHERS = sorted({*QUICK, *ARCHITECTURES[::3]} - {*TEN})
CODES = re.compile(r"\.(weight_packed|weight_scale|weight_scale_2|weight_global_scale)$")


def source(name: str, dtype: torch.dtype, directory: Path) -> Any:
    """A model in a directory whose norms and biases are wider than the model, with a head that its class ignores."""
    model = build(name, dtype)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    if dtype is torch.bfloat16:
        tensors |= {n: t.float() * (1 + 2**-12) for n, t in tensors.items() if t.dim() == 1 and t.is_floating_point()}
    tensors |= {"mtp.fc.weight": torch.randn(64, 32).to(dtype), "mtp.norm.weight": torch.randn(64)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for file, text in FILES.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(text)
    config = json.loads((directory / "config.json").read_text())
    config |= {"own_key": {"nested": [1, None]}, "torch_dtype": config.pop("dtype")}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("format", ["fp8_channel", "int4a16_g32"])
def test_what_transformers_keeps_in_float32_is_loaded_so(format: str, tmp_path: Path) -> None:
    """T5's `wo` in float16, which overflows there (huggingface/transformers#20287), quantized or not."""
    name = "T5ForConditionalGeneration"
    from transformers import T5ForConditionalGeneration

    build(name, torch.float16).save_pretrained(tmp_path / "model")
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float16).eval()
    wo = [name for name, _ in model.named_modules() if name.endswith("DenseReluDense.wo")]
    assert all(model.get_submodule(name).weight.dtype == torch.float32 for name in wo)
    done = quant.quantize(model, format, solver="rtn", exclude=["encoder.*.wo"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quant.save(done.model, done.plan, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert len(wo) == 4 and all(loaded.get_submodule(name).weight.dtype == torch.float32 for name in wo)
    call = inputs(model)
    with torch.no_grad():
        assert torch.equal(loaded(**call).logits, done.model(**call).logits)


def holds(fields: Any, source: Any) -> bool:
    """Whether every key of the source is there with its value; a class may add keys of its own to its parts.

    `tie_word_embeddings` becomes false where the head differs from the embedding.
    """
    if isinstance(source, dict) and isinstance(fields, dict):
        differs = {"tie_word_embeddings"} & {key for key, value in source.items() if value is True}
        return all(key in fields and (key in differs or holds(fields[key], value)) for key, value in source.items())
    return bool(fields == source)


def check(home: Path, out: Path) -> None:
    # Tensors that transformers joins from several, as queries, keys and values, have the names of its modules.
    renamed = {each.name for each in compare_with_source(out, home) if "as part of another tensor" in str(each.reason)}
    assert not any("mtp" in name for name in renamed)
    tensors, written = load_file(home / "model.safetensors"), load_file(out / "model.safetensors")
    modules = {CODES.sub("", name) for name in written if CODES.search(name)}
    stacks = {re.sub(r"\.\d+(\.\w+)?$", "", name) for name in modules}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if (last == "weight" and stem in modules) or (name not in written and {stem, name} & (modules | stacks)):
            continue
        if name in renamed:
            continue
        assert name in written, f"{name} is missing"
        if written[name].numel() or not tensor.numel():  # an empty one stops transformers at quantized experts
            assert written[name].dtype == tensor.dtype, f"{name}: {written[name].dtype} for {tensor.dtype}"
            assert torch.equal(written[name], tensor), f"{name} has other values"
    config, fields = (json.loads((folder / "config.json").read_text()) for folder in (home, out))
    assert "mtp.fc" in (fields["quantization_config"].get("ignore") or ["mtp.fc"])
    assert holds(fields, config)
    assert all((out / file).read_text() == text for file, text in FILES.items())


def held_against_its_source(name: str, format: str, folder: Path) -> str:
    """Quantizes one architecture in both layouts; returns why it was refused, if it was."""
    dtype = DTYPES[format]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model = source(name, dtype, folder / "model")
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(model).items()}
        try:
            report = run(Request(str(folder / "model"), format, solver="rtn", out=folder / "out")).report
        except UserError as error:
            if "our bug" in str(error):
                raise
            return str(error)
        check(folder / "model", folder / "out")
        ours = result(load(folder / "out"), given)
        assert ours.isfinite().all()
        assert report is not None
        # transformers loads the quantized layers of some classes wrongly or not at all, and the report says so.
        if not any("transformers" in line and "does not run" not in line for line in report.warnings):
            peer = patch_forward(type(model).from_pretrained(folder / "out", dtype=dtype)).eval()
            assert difference(result(peer, given), ours) <= LOGIT_LIMIT[format]
        try:
            convert(folder / "out", folder / "modelopt", "modelopt")
        except (UserError, ValueError) as error:
            return str(error)
        check(folder / "model", folder / "modelopt")
    return ""


# The others are kinds of layer that one of these six has, too.
@pytest.mark.parametrize(
    "name", quick_cases(TEN, lambda name: not name.startswith(("Bert", "Falcon", "Qwen2Moe", "Whisper")))
)
def test_ten_architectures(name: str, tmp_path: Path) -> None:
    assert held_against_its_source(name, "nvfp4a16", tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_sixty_others(name: str, format: str, tmp_path: Path) -> None:
    assert len(OTHERS) >= 60
    held_against_its_source(name, format, tmp_path)
