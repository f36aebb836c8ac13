"""Refusals of the Python API that no other test causes, each on the case that causes it, and its way out taken."""

from __future__ import annotations

import io
import json
import os
import sys
import wave
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import quant
from quant.calibration.inputs import Inputs
from quant.calibration.texts.media_inputs import read_sound
from quant.calibration.texts.self_written import generate_rows
from quant.calibration.walk.step_store import DirectoryStore
from quant.cli.main import main
from quant.evaluation.tasks import predict, read_task
from quant.export.checkpoint.files.compressed_tensors import matches
from quant.export.tensorrt.tensorrt_session import read_receipt
from quant.formats.format import FORMATS
from quant.generate.quantized_kv_cache import QuantizedKVCache
from quant.kernels.attention.forward import attention
from quant.kernels.linear.oracle import set_weight_cache
from quant.models.files import copy_along
from quant.training.train_loop import train_only_norms, train_only_rounded

transformers = pytest.importorskip("transformers", reason="the extra hf")

IDS = torch.arange(3, 51).reshape(3, 16)
Case = tuple[Callable[[], object], str, Callable[[], object]]


def llama(**options: Any) -> Any:
    return tiny_models.llama(num_hidden_layers=1, gain=2, **options).eval()


def packed(**options: Any) -> quant.Quantized:
    return quant.quantize(llama(), "int8", effort=0, **options)


def masked(value: int) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS[:1], "attention_mask": torch.full((1, 16), value)}


def sound(samples: int, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.arange(samples, dtype="<i2").tobytes())
    return file.getvalue()


class Words:
    """A tokenizer of five words."""

    bos_token_id = None
    words = ("a", "b", "c", "d", "e")

    def __len__(self) -> int:
        return 64

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + self.words.index(word) for word in text.split()]}


def rows_of(items: Any, **options: Any) -> torch.Tensor:
    return quant.calibration_rows(items, options.pop("tokenizer", None), **{"samples": 1, "seqlen": 4, **options})


def written_by_hand(answers: str, tmp: Path) -> Path:
    file = tmp / f"task{answers}.jsonl"
    lines = [json.dumps({"prompt": "a b", "choices": ["c", "d"], "answer": int(each)}) for each in answers]
    file.write_text("\n".join(lines))
    return file


def qat_of(scales: str) -> object:
    done = quant.quantize(llama(), "nvfp4a16", solver="mse")
    return quant.prepare_qat(done.model, done.plan, scales=scales)


def adapter(config: str, prepare: bool = False, **options: Any) -> object:
    peft = pytest.importorskip("peft", reason="the extra training")
    model = llama()
    if prepare:
        quant.prepare_qat(model, "int8")
    else:
        model = quant.quantize(model, "int8", effort=0).model
    config = getattr(peft, config)(r=4, target_modules=["q_proj"], **options)
    return peft.get_peft_model(model, quant.lora(config, model))


def low_precision(recipe: Any, **options: Any) -> Any:
    return quant.to_low_precision_training(tiny_models.llama().train(), recipe, **options)


def soft_capped(**options: Any) -> object:
    return quant.to_low_precision_training(tiny_models.gemma2().train(), "mxfp8", **options)


def trained_by(optimizer_first: bool) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if optimizer_first else None
    quant.prepare_qat(model, "nvfp4a16", scales="learned")
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def attended(q: torch.Tensor, **scales: Any) -> torch.Tensor:
    return attention(q, q, q, **scales)


def cache_of(use: bool) -> object:
    model = llama(head_dim=64)
    cache = QuantizedKVCache(model, "fp8")
    if use:
        with torch.no_grad():
            model(IDS[:1], past_key_values=cache, use_cache=True)
    return cache.layers[0].pages


E4M3 = torch.ones(1, 2, 64, 64).to(torch.float8_e4m3fn)
CALLS: dict[str, Case] = {
    "a mask that hides all": (
        lambda: quant.quantize(llama(), "int8", masked(0), solver="gptq"), "it is 1 where a token counts",
        lambda: quant.quantize(llama(), "int8", masked(1), solver="gptq"),
    ),
    "rows of another tokenizer": (
        lambda: quant.evaluate(llama(), IDS + 60), "the rows were made with another tokenizer",
        lambda: quant.evaluate(llama(), IDS),
    ),
    "a format twice": (
        lambda: quant.allocate(llama(), IDS, quant.Goal(bits=9), formats="nvfp4,int8,nvfp4"), "name each once",
        lambda: quant.allocate(llama(), IDS, quant.Goal(bits=9), formats="nvfp4,int8"),
    ),
    "an empty sound": (
        lambda: read_sound(sound(0), "a.wav", 16000), r"a\.wav: holds no sound; replace it, or remove it",
        lambda: read_sound(sound(400), "a.wav", 16000),
    ),
    "a text without a tokenizer": (
        lambda: rows_of(["a b c d e"]), "without one, give token ids",
        lambda: rows_of([[3, 4, 5, 6, 7]]),
    ),
    "things that are no texts": (
        lambda: rows_of([1.5], tokenizer=Words()), "give texts, chats, token ids or dicts of input_ids",
        lambda: rows_of(["a b c d e"], tokenizer=Words()),
    ),
    "tokens in floating point": (
        lambda: rows_of([torch.ones(8)]), r"expected token ids, integers \[tokens\]",
        lambda: rows_of([torch.ones(8, dtype=torch.int64)]),
    ),
    "documents that are too short": (
        lambda: rows_of([[3, 4, 5]] * 4, pack=False), r"Pack them \(pack=True\), or lower samples or seqlen",
        lambda: (rows_of([[3, 4, 5]] * 4), rows_of([[3, 4, 5]] * 4, pack=False, seqlen=3)),
    ),
    "texts beyond the positions": (
        lambda: generate_rows(llama(max_position_embeddings=16), None, samples=1, seqlen=32), "lower seqlen",
        lambda: generate_rows(llama(max_position_embeddings=16), None, samples=1, seqlen=16),
    ),
    "learned roundings of experts": (
        lambda: quant.quantize(tiny_models.qwen3_moe().eval(), "int4a16_g32", IDS, solver="autoround:2"),
        "these are fused experts; use 'gptq' for the model, or exclude them",
        lambda: quant.quantize(
            tiny_models.qwen3_moe().eval(), "int4a16_g32", IDS, solver="autoround:2", exclude=["*experts*"]
        ),
    ),
    "flags of a pattern": (
        lambda: matches("(?i)A.*", "abc"), "has flags, which are not read; write it without",
        lambda: matches("[Aa].*", "abc") or pytest.fail("matches"),
    ),
    "a cache below zero": (
        lambda: set_weight_cache(-1), "expected 0, which keeps none, or more",
        lambda: set_weight_cache(2 << 30),
    ),
    "two dtypes of attention": (
        lambda: attention(E4M3.half(), E4M3.bfloat16(), E4M3.bfloat16()), "expected one dtype of float8_e4m3fn, bf",
        lambda: attended(E4M3.bfloat16()),
    ),
    "codes without scales": (
        lambda: attended(E4M3), r"E4M3 operands need q_scale, k_scale, v_scale; torch\.ones\(1\) where codes are v",
        lambda: attended(E4M3, **{f"{x}_scale": torch.ones(1) for x in "qkv"}),
    ),
    "an IA3 in QAT": (
        lambda: quant.lora(ia3_config(), prepared()), "take a LoraConfig, or use PEFT without quant",
        lambda: adapter("LoraConfig", prepare=True),
    ),
    "an adapter in 16 bit": (
        lambda: quant.lora(lora_config(), llama()), "no quantized linears or experts; quantize it first",
        lambda: quant.lora(lora_config(), packed().model),
    ),
    "adapters that change the weights": (
        lambda: adapter("LoraConfig", init_lora_weights="pissa"), "leave it True, or take 'gaussian', 'orthogonal' or",
        lambda: [adapter("LoraConfig", init_lora_weights=each) for each in (True, "gaussian", "orthogonal")],
    ),
    "inputs twice": (
        lambda: quant.quantize(llama(), "int8_static", IDS, forward_loop=lambda m: m(IDS)), "pass one of them",
        lambda: quant.quantize(llama(), "int8_static", forward_loop=lambda m: m(IDS)),
    ),
    "inputs of one token": (
        lambda: quant.evaluate(llama(), Inputs([((), {"input_ids": IDS[:1, :1]})])), "give longer texts, to a decoder",
        lambda: quant.evaluate(llama(), Inputs([((), {"input_ids": IDS[:1]})])),
    ),
    "an empty cache": (
        lambda: cache_of(use=False), "run the model on the prompt first",
        lambda: cache_of(use=True),
    ),
    "a cache that moves": (
        lambda: QuantizedKVCache(llama(head_dim=64), "fp8").layers[0].offload(), "generate without offloading",
        lambda: cache_of(use=True),
    ),
    "a path for a model's distillation": (
        lambda: quant.distill(llama(), llama(), IDS, out="out"), "gives the loss of a batch, with temperature= and",
        lambda: quant.distill(llama(), llama(), IDS, temperature=2.0),
    ),
    "another attention in training": (
        lambda: low_precision("mxfp8", attention="fp4"), "unknown attention 'fp4' in training; .*fp8",
        lambda: low_precision("mxfp8", attention="fp8"),
    ),
    "a soft cap in training": (
        lambda: soft_capped(attention="fp8"), r'trains no soft cap; leave out attention="fp8"',
        lambda: soft_capped(),
    ),
    "another backend": (
        lambda: low_precision("mxfp8", backend="emulate"), "unknown backend 'emulate'; .*emulated",
        lambda: low_precision("mxfp8", backend="emulated"),
    ),
    "a model without norms": (
        lambda: train_only_norms(nn.Linear(64, 64)), "train the quantized weights instead",
        lambda: trained_weights(),
    ),
    "an optimizer from before": (
        lambda: trained_by(optimizer_first=True), "make the optimizer anew, after prepare_qat",
        lambda: trained_by(optimizer_first=False),
    ),
    "scales that were searched": (
        lambda: qat_of("recomputed"), "use scales='frozen' or 'learned'",
        lambda: (qat_of("frozen"), qat_of("learned")),
    ),
    "attention of QAT": (
        lambda: quant.prepare_qat(llama(), with_attention(llama())), r"train with a plan without \(attention=None\)",
        lambda: quant.prepare_qat(llama(), replace(with_attention(llama()), attention=None)),
    ),
    "a format for norms": (
        lambda: quant.make_plan(llama(), "int8").set("*norm*", "int8"), "formats are for linear layers",
        lambda: quant.make_plan(llama(), "int8").set("*mlp*", "nvfp4a16"),
    ),
    "half a group": (
        lambda: quant.make_plan(llama(), "int8").set("*q_proj", "nvfp4a16"),
        r"Include model\.layers\.0\.self_attn\.k_proj, .*v_proj too, or pass whole_groups=True",
        lambda: quant.make_plan(llama(), "int8").set("*q_proj", "nvfp4a16", whole_groups=True),
    ),
    "an example that does not run": (
        lambda: quant.make_plan(nn.Sequential(nn.Linear(64, 64)), "int8", run=lambda m: m(torch.ones(2, 3))),
        "the model failed on the given example input: .*; its forward takes input",
        lambda: quant.make_plan(nn.Sequential(nn.Linear(64, 64)), "int8", run=lambda m: m(torch.ones(2, 64))),
    ),
}  # fmt: skip


def prepared() -> Any:
    model = llama()
    quant.prepare_qat(model, "int8")
    return model


def ia3_config() -> Any:
    peft = pytest.importorskip("peft", reason="the extra training")
    return peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])


def lora_config() -> Any:
    return pytest.importorskip("peft", reason="the extra training").LoraConfig(r=4, target_modules=["q_proj"])


def trained_weights() -> None:
    model = llama()
    quant.prepare_qat(model, "int8")
    train_only_rounded(model)
    assert any(parameter.requires_grad for parameter in model.parameters())


def with_attention(model: nn.Module) -> quant.Plan:
    return replace(quant.make_plan(model, "int8"), attention=FORMATS["fp8"])


@pytest.mark.parametrize("name", CALLS)
def test_the_way_out_of_a_refused_call_works(name: str) -> None:
    refused, says, advised = CALLS[name]
    with pytest.raises(ValueError, match=says):
        refused()
    advised()


def test_a_sound_at_another_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio.functional", None)
    with pytest.raises(ValueError, match=r"give files at that rate, such as by ffmpeg -i IN\.wav -ar 16000 OUT\.wav"):
        read_sound(sound(400, 8000), "a.wav", 16000)
    assert len(read_sound(sound(400), "a.wav", 16000)) == 400


def test_a_task_with_one_answer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every answer is 1; .*: give questions with different answers"):
        read_task(written_by_hand("111", tmp_path))
    questions = read_task(written_by_hand("101", tmp_path))
    assert len(predict(llama(), Words(), questions)) == 3


def test_an_engine_without_its_receipt(tmp_path: Path) -> None:
    engine, receipt = tmp_path / "a.engine", tmp_path / "a.engine.json"
    with pytest.raises(ValueError, match=rf"its receipt {receipt.name} is missing; keep both files of `quant export`"):
        read_receipt(engine)
    receipt.write_text(json.dumps({"engine": {"sha256": "0", "target": "sm90", "backend": "tensorrt"}}))
    assert read_receipt(engine)["engine"]["target"] == "sm90"


def test_a_pipe_among_a_models_files(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("Windows has no named pipes")
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "pipe")
    (tmp_path / "model" / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="no regular file, so it cannot be copied along; remove it"):
        copy_along(tmp_path / "model", tmp_path / "one", tmp_path / "model")
    (tmp_path / "model" / "pipe").unlink()
    copy_along(tmp_path / "model", tmp_path / "two", tmp_path / "model")
    assert (tmp_path / "two" / "notes.txt").read_text() == "x"


def test_files_that_hold_no_state_dict(tmp_path: Path) -> None:
    """A TorchScript archive, a compressed one, a file of no kind: each way out ends in a model that is read."""
    module = nn.Sequential(nn.Linear(64, 64))
    script, whole, squeezed = tmp_path / "script.pt", tmp_path / "whole.pt", tmp_path / "squeezed.pt"
    torch.jit.save(torch.jit.trace(module, torch.ones(1, 64)), script)
    torch.save(module.state_dict(), whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    (tmp_path / "text.pt").write_text("nothing of the kind")
    for file, says in (
        (script, r"save the original model's state_dict\(\) with torch\.save"),
        (squeezed, r"is compressed, .*; save the state_dict\(\) again with torch\.save"),
        (tmp_path / "text.pt", r"unknown file type \(it starts with b'nothing '\); expected .*safetensors"),
    ):
        with pytest.raises(ValueError, match=says):
            quant.open_model(str(file))
    save_file(module.state_dict(), tmp_path / "whole.safetensors")
    for file in (whole, tmp_path / "whole.safetensors"):
        found = quant.open_model(str(file)).state_dict
        assert found is not None and torch.equal(found["0.weight"], module[0].weight)


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    with pytest.raises(
        ValueError, match=r"no class for \['OwnForCausalLM'\]; upgrade it, or build the module yourself"
    ):
        quant.open_model(str(tmp_path))
    own = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert len(quant.quantize(own, "int8", effort=0).plan.quantized) == 7


def test_runs_of_two_models_are_not_compared(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "a")
    tiny_models.bert().save_pretrained(tmp_path / "b")
    for name, model in (("one", "a"), ("two", "a"), ("other", "b")):
        done = CliRunner().invoke(
            main,
            ["quantize", str(tmp_path / model), "--format", "int8", "--effort", "0", "--out", str(tmp_path / name)],
        )
        assert done.exit_code == 0, done.output
    ask = ["report", str(tmp_path / "one")]
    refused = CliRunner().invoke(main, [*ask, str(tmp_path / "other"), "--out", str(tmp_path / "page.html")])
    assert refused.exit_code == 2 and "no layer in common; compare two runs of one model" in refused.stderr
    done = CliRunner().invoke(main, [*ask, str(tmp_path / "two"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    (tmp_path / "two" / "report.json").unlink()
    refused = CliRunner().invoke(main, ["report", str(tmp_path / "two")])
    assert refused.exit_code == 2 and "no report.json; pass a directory that `quantize --out` wrote" in refused.stderr


def test_a_rank_that_does_not_see_the_first_ones_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where --out is on a disk of one machine; on a shared one the rank reads what the first has begun."""
    with monkeypatch.context() as patched:
        patched.setattr("quant.calibration.walk.step_store.rank_and_world", lambda: (1, 2))
        with pytest.raises(ValueError, match="give an out= on a file system that all machines share"):
            DirectoryStore(tmp_path / "local" / "out", {"the seed": 0})
    with DirectoryStore(tmp_path / "shared", {"the seed": 0}), monkeypatch.context() as patched:
        patched.setattr("quant.calibration.walk.step_store.rank_and_world", lambda: (1, 2))
        with DirectoryStore(tmp_path / "shared", {"the seed": 0}) as second:
            assert second.rank == 1 and not second.is_complete


@pytest.mark.parametrize(
    ("refused", "says", "advised"),
    [
        ("doctor --power 30W", "name it: --target orin", "doctor --power 30W --target orin"),
        (
            "evaluate {model} --text {ids} --shots 2", "are for --tasks; leave them out",
            "evaluate {model} --text {ids} --samples 1 --seqlen 8",
        ),
    ],
)  # fmt: skip
def test_the_way_out_of_a_refused_command_works(refused: str, says: str, advised: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    fill = {"model": tmp_path / "model", "ids": tmp_path / "ids.safetensors"}
    result = CliRunner().invoke(main, [word.format(**fill) for word in refused.split()])
    assert result.exit_code == 2 and says in result.stderr, result.output
    result = CliRunner().invoke(main, [word.format(**fill) for word in advised.split()])
    assert result.exit_code == 0, result.output
