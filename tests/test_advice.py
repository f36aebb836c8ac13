"""Every way out that a refusal names is taken, on the case that was refused, and works.

A row of `COMMANDS` is a command that is refused, the words of its message that say what to do, and the arguments that
follow them: `add` and `drop` change the refused command, `instead` replaces it. Options that the message names are
those of the change. A row of `CALLS` is the same for Python.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import BASE, ROOT, TEXTS, write_short_base
from torch import nn

import quant
from quant.base import old_names
from quant.base.errors import in_command, option
from quant.calibration.session import find_device
from quant.cli.main import main
from quant.export.checkpoint.files import compressed_tensors
from quant.export.engines.check_engine import generate_tokens, open_session
from quant.export.onnx import engine_session
from quant.generate.quantized_attention import quantized_attention
from quant.generate.quantized_kv_cache import QuantizedKVCache
from quant.recipes.blocks import cache_argument
from quant.training.distillation_loss import cache_teacher

transformers = pytest.importorskip("transformers", reason="the extra hf")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")


@dataclass(frozen=True)
class Row:
    """A refused command, what its message says, and the command that follows it."""

    refused: str
    says: str
    add: str = ""
    drop: str = ""
    instead: str = ""

    @property
    def advised(self) -> str:
        assert self.drop in self.refused
        return self.instead or f"{self.refused.replace(self.drop, '')} {self.add}"


def two_blocks() -> nn.Module:
    """The module of `state.safetensors`."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small models and files that commands name; each command writes to a place of its own."""
    case = tmp_path_factory.mktemp("advice")
    write_short_base(case / "model")
    torch.manual_seed(0)
    state = two_blocks().state_dict()
    save_file(state, case / "state.safetensors")
    torch.save(two_blocks(), case / "whole.pt")
    torch.export.save(torch.export.export(two_blocks(), (torch.zeros(2, 64),)), case / "program.pt2")
    save_file({"ids": torch.arange(3, 73)}, case / "short.safetensors")
    # In BF16, with one weight that FP16 does not hold.
    shutil.copytree(case / "model", case / "large")
    large = {name: tensor.bfloat16() for name, tensor in load_file(case / "model" / "model.safetensors").items()}
    large["model.norm.weight"][0] = 1e5
    save_file(large, case / "large" / "model.safetensors", {"format": "pt"})
    (case / "parts").mkdir()
    shutil.copytree(case / "model", case / "parts" / "checkpoint-500")
    shutil.copytree(case / "model", case / "parts" / "checkpoint-1000")
    (case / "one").mkdir()
    save_file(state, case / "one" / "weights.safetensors")
    save_file({"ids": torch.arange(3, 131).reshape(4, 32)}, case / "ids.safetensors")
    run(case, "quantize {model} --format fp8_channel --out {case}/stored")
    run(case, "plan make {model} --format nvfp4 --out {case}/plan.json")
    run(case, "export {stored} --to onnx --out {case}/onnx")
    run(
        case,
        f"distill {{stored}} --teacher {{model}} --cache-teacher {{case}}/cached --steps 1 --data {{ids}} {TRAINED}",
    )
    run(case, "quantize {model} --format fp8 --kv-cache fp8_head --calib {ids} --calib-samples 2 --seqlen 16 "
        "--effort 0 --out {case}/heads")  # fmt: skip
    save_file({"input": torch.randn(4, 64)}, case / "x.safetensors")
    torch.save({"x": IDS}, case / "x.pt")
    torch.save({"input_ids": IDS}, case / "named.pt")
    save_file({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, case / "named.safetensors")
    # Its tokenizer is one that llama.cpp does not have.
    shutil.copytree(case / "model", case / "bare", ignore=shutil.ignore_patterns("token*"))
    run(case, "quantize {case}/bare --format q8_0 --effort 0 --out {case}/model.gguf")
    # A tokenizer of bytes, without a merge.
    shutil.copytree(case / "bare", case / "merges")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.save(str(case / "merges" / "tokenizer.json"))
    shutil.copytree(case / "stored", case / "taken")
    # Its heads have 24 values.
    tiny_models.llama(num_hidden_layers=1, head_dim=24).save_pretrained(case / "odd")
    save_file({"ids": torch.arange(128).reshape(4, 32) % 60 + 3}, case / "odd.safetensors")
    tiny_models.t5().save_pretrained(case / "t5")
    bloom().save_pretrained(case / "bloom")
    tiny_models.llama(num_hidden_layers=1, head_dim=320).save_pretrained(case / "wide")
    tiny_models.bert().save_pretrained(case / "bert")
    tiny_models.bert_classifier(num_labels=1).save_pretrained(case / "reward")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 64)}, case / "lora.safetensors")
    save_file({"input_ids": IDS, "decoder_input_ids": IDS[:, :8].clone()}, case / "t5.safetensors")
    (case / "columns.jsonl").write_text('{"said": "a b c", "heard": "d e"}\n' * 64)
    # No width is one of whole blocks of 32.
    tiny_models.llama(hidden_size=48, intermediate_size=96, num_hidden_layers=1).save_pretrained(case / "narrow")
    return case


_NUMBERS = itertools.count()


def run(case: Path, command: str) -> str:
    """Runs a command that succeeds, and returns what it says."""
    result = invoke(case, command)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return str(result.stderr)


def invoke(case: Path, command: str) -> Any:
    places = {
        "case": case, "model": case / "model", "stored": case / "stored", "plan": case / "plan.json",
        "state": case / "state.safetensors", "ids": case / "ids.safetensors", "text": TEXTS / "calibration.txt",
        "out": case / f"out{next(_NUMBERS)}",
    }  # fmt: skip
    words = [word.format(**places).replace("␣", " ") for word in command.split()]
    return CliRunner().invoke(main, words)


TRAINED = "--seqlen 32 --batch-size 2 --out {out}"
FACTORY = "--model-factory test_advice:two_blocks"
Q, SMALL = "quantize {model} --out {out} ", "--calib-samples 2 --seqlen 16"
MAKE = f"plan make {{model}} --out {{out}} --calib {{ids}} {SMALL} "
EXPORT = "export {stored} --out {out} "
BLOOM = "evaluate {case}/bloom --text {case}/odd.safetensors --samples 1 --seqlen 16 "
INPUTS = "--input input_ids:int64:batch,sequence"

COMMANDS = [
    # quantize: what and where to
    Row("quantize {model} --format fp8_channel --out {case}/taken", "pass --overwrite", add="--overwrite"),
    Row("quantize {model} --format fp8_channel", "a .gguf file with --out", add="--out {out}"),
    Row("quantize {model} --format fp8_channel", "or pass --dry-run", add="--dry-run"),
    Row(
        "quantize {model} --format fp8_channel --out {model}/q",
        "name a place outside it",
        instead="quantize {model} --format fp8_channel --out {out}",
    ),
    Row(Q, "exactly one of --format", add="--format fp8_channel"),
    Row(Q + "--format fp8_channel,nvfp4a16", "to choose from within a limit", add="--bits 9"),
    Row(Q + "--format nvfp4a1", "did you mean nvfp4a16?", drop="--format nvfp4a1", add="--format nvfp4a16"),
    Row(
        Q + "--format fp8_token", "write WEIGHT@INPUT", drop="--format fp8_token", add="--format fp8_channel@fp8_token"
    ),
    Row(
        Q + "--format fp8_channel --solver gptk",
        "did you mean gptq?",
        drop="--solver gptk",
        add=f"--solver gptq --calib {{ids}} {SMALL}",
    ),
    Row("plan make {model} --out {out} --format fp8_channel --ctx 100", "leave it out", drop="--ctx 100"),
    Row(
        Q + "--format fp8_channel --ctx 100",
        "`quant plan make MODEL … --out plan.json`",
        instead="plan make {model} --format fp8_channel --out {out}",
    ),
    Row(Q + "--plan {plan} --exclude *", "--plan says everything already", drop="--exclude *"),
    Row(
        Q + "--format fp8_channel --kv-cache fp9 --calib {ids} " + SMALL,
        "in fp8, fp8_head or 16bit",
        drop="--kv-cache fp9",
        add="--kv-cache fp8",
    ),
    Row(Q + "--format fp8_channel --device cuda", "or pass cpu", drop="--device cuda", add="--device cpu"),
    Row(
        "evaluate {model} --text {text} --samples 2 --seqlen 16 --revision main", "leave it out", drop="--revision main"
    ),
    Row(Q + f"--format fp8_channel {FACTORY}", "test_advice:two_blocks", drop=FACTORY),
    # quantize: calibration
    Row(
        Q + "--format fp8 --calib {case}/short.safetensors --calib-samples 99 --seqlen 16",
        "or lower samples to",
        drop="--calib-samples 99",
        add="--calib-samples #samples␣to␣",
    ),
    Row(
        Q + "--format fp8 --calib {case}/short.safetensors --calib-samples 3 --seqlen 128",
        "or lower seqlen to",
        drop="--seqlen 128",
        add="--seqlen #seqlen␣to␣",
    ),
    Row(
        Q + "--format fp8 --calib {case}/absent.txt " + SMALL,
        "no such file",
        drop="--calib {case}/absent.txt",
        add="--calib {text}",
    ),
    # quantize: files
    Row(
        "quantize {state} --format nvfp4 --solver gptq --out {out} --calib {ids} " + SMALL,
        "pass --model-factory",
        instead="quantize {state} --format fp8_channel --out {out} " + FACTORY,
    ),
    Row("quantize {state} --format nvfp4 --calib {text} --out {out}", "or leave it out", drop="--calib {text}"),
    Row(
        "quantize {case}/whole.pt --format fp8_channel --out {out}",
        "pass --trust-remote-code",
        add="--trust-remote-code",
    ),
    Row(
        "quantize {case}/program.pt2 --format fp8_channel --out {out}",
        "pass --trust-remote-code",
        add="--trust-remote-code",
    ),
    Row(
        "quantize {case}/program.pt2 --format fp8_channel --out {out}",
        "as safetensors and pass that with --model-f",
        instead=f"quantize {{state}} --format fp8_channel --out {{out}} {FACTORY}",
    ),
    Row(
        "quantize {case}/parts --format fp8_channel --out {out}",
        "parts/checkpoint-1000",
        instead="quantize {case}/parts/checkpoint-1000 --format fp8_channel --out {out}",
    ),
    Row(
        "quantize {case}/one --format fp8_channel --out {out}",
        "to open a file in it, pass",
        instead="quantize {case}/one/weights.safetensors --format fp8_channel --out {out}",
    ),
    Row(
        "quantize {case}/absent.safetensors --format fp8_channel --out {out}",
        "smollm2-135m",
        instead="quantize {state} --format fp8_channel --out {out}",
    ),
    # formats and solvers
    Row(
        "quantize {case}/bare --format q4k_m --effort 0 --out {out}.gguf",
        "did you mean q4_k_m?",
        drop="--format q4k_m",
        add="--format q4_k_m",
    ),
    Row(
        Q + "--format q8_0 --effort 0",
        "only GGUF files hold q8_0: name one, --out ",
        instead="quantize {case}/bare --format q8_0 --effort 0 --out {out}.gguf",
    ),
    Row(
        Q + "--format int8_token --effort 0",
        "such as int8@int8_token",
        drop="--format int8_token",
        add="--format int8@int8_token",
    ),
    Row(
        Q + f"--format nvfp4a16 --solver awq+residual --calib {{ids}} {SMALL}",
        "take 'awq+gptq'",
        drop="--solver awq+residual",
        add="--solver awq+gptq",
    ),
    Row(
        Q + f"--format nvfp4 --solver residual:33 --calib {{ids}} {SMALL}",
        "or residual:32",
        drop="--solver residual:33",
        add="--solver residual:32",
    ),
    # calibration and evaluation data
    Row(
        Q + f"--format fp8 --calib {{case}}/columns.jsonl {SMALL}",
        "as in data.jsonl#text",
        drop="--calib {case}/columns.jsonl",
        add="--calib {case}/columns.jsonl#said",
    ),
    Row(
        Q + "--format fp8_channel --effort 0 --eval mix",
        "name a file of text",
        drop="--eval mix",
        add="--eval {text} --eval-samples 2 --seqlen 16",
    ),
    Row(
        f"quantize {{case}}/t5 --out {{out}} --format fp8 --calib {{case}}/odd.safetensors {SMALL}",
        "a .safetensors file of its inputs by name",
        drop="--calib {case}/odd.safetensors",
        add="--calib {case}/t5.safetensors",
    ),
    Row(
        "evaluate {case}/t5 --text {case}/odd.safetensors --samples 2 --seqlen 8",
        "inputs by name, with decoder_input_ids, as .safetensors",
        instead="evaluate {case}/t5 --data {case}/t5.safetensors --samples 2",
    ),
    Row(
        "evaluate {case}/t5 --text {text} --samples 2 --seqlen 16",
        "alone: it wrote the decoder's text itself; name a --baseline",
        add="--baseline {case}/t5",
    ),
    Row(
        f"distill {{stored}} --teacher {{model}} --steps 1 --data {{case}}/named.safetensors {TRAINED}",
        "or token ids alone in safetensors",
        drop="--data {case}/named.safetensors",
        add="--data {ids}",
    ),
    Row(
        "evaluate {case}/reward --text {case}/odd.safetensors --samples 2 --seqlen 8 --baseline {case}/reward",
        "give inputs by name, as .safetensors",
        instead="evaluate {case}/reward --data {case}/named.safetensors --samples 2 --baseline {case}/reward",
    ),
    # files that are no checkpoint
    Row(
        "export {case}/model.gguf --to onnx --out {out}",
        "`quant evaluate` measures it",
        instead="evaluate {case}/model.gguf --text {case}/odd.safetensors --samples 1 --seqlen 16",
    ),
    Row("export {plan} --to onnx --out {out}", "`quant plan show` shows a plan", instead="plan show {plan}"),
    # budgets
    Row(MAKE + "--bits 5 --kv-bits 2", "value is 4.5", drop="--kv-bits 2", add="--kv-bits #value␣is␣"),
    Row(MAKE + "--bits 2", "value with these formats is", drop="--bits 2", add="--bits #formats␣is␣"),
    Row(MAKE + "--fit 1kB", "value is", drop="--fit 1kB", add="--fit #value␣is␣"),
    Row(
        MAKE + "--target h100 --latency 0.00001us",
        "value is",
        drop="--latency 0.00001us",
        add="--latency #value␣is␣#ms",
    ),
    Row(MAKE + "--latency 1ms", "needs the GPU or a table", add="--target h100"),
    Row(MAKE + "--max-kl 5", "give 3 or more", drop="--calib-samples 2", add="--calib-samples 3"),
    Row(
        f"plan make {{case}}/odd --out {{out}} --calib {{case}}/odd.safetensors {SMALL} --bits 5 --kv-bits 6",
        "take --kv-cache fp8",
        drop="--kv-bits 6",
        add="--kv-cache fp8",
    ),
    # plans
    Row(
        "plan make {model} --format nvfp4 --out {plan}",
        "pass --overwrite",
        instead="plan make {model} --format nvfp4 --out {case}/plan.json --overwrite",
    ),
    Row("plan edit {plan} --out {out}", "give --set 'GLOB=FORMAT'", add="--set *.down_proj=fp8_channel"),
    Row("plan edit {plan} --out {out}", "--kv-cache FORMAT", add="--kv-cache fp8"),
    Row(
        "plan edit {plan} --set *.down_proj=fp8_token --out {out}",
        "the compressed-tensors layout cannot store fp8_token; it has nvfp4, mxfp4, mxfp6, mxfp8, fp8, fp8_channel,",
        drop="--set *.down_proj=fp8_token",
        add="--set *.down_proj=fp8_channel",
    ),
    Row("plan edit {plan} --out {out}", "--guard", add="--guard 0.1␣fp8␣keep"),
    Row("plan edit {plan} --out {out}", "--observer", add="--observer mse"),
    Row(
        "quantize {model} --format fp8_channel --exclude down_proj --out {out}",
        "did you mean *.down_proj?",
        drop="--exclude down_proj",
        add="--exclude *.down_proj",
    ),
    Row(
        "quantize {case}/model/config.json --format fp8_channel --out {out}",
        "name the directory of the model",
        instead="quantize {model} --format fp8_channel --out {out}",
    ),
    Row("inspect {plan}", "`quant plan show` shows a plan", instead="plan show {plan}"),
    Row(
        "inspect {case}/model.gguf",
        "`quant evaluate` measures it",
        instead="evaluate {case}/model.gguf --text {ids} --samples 2 --seqlen 16",
    ),
    Row(
        f"distill {{stored}} --teacher {{case}}/narrow --data {{ids}} --steps 1 {TRAINED}",
        "is outside the model's vocabulary of 64",
        drop="--teacher {case}/narrow",
        add="--teacher {model}",
    ),
    Row("check {stored} --engine [1] --source {model}", "no JSON object", drop="--engine [1]", add="--engine {{}}"),
    Row(
        BLOOM + "--attention fp8",
        "cannot be replaced; take --attention 16bit\n",
        drop="--attention fp8",
        add="--attention 16bit",
    ),
    Row(
        BLOOM + "--kv-cache fp8",
        "cannot be replaced; take --kv-cache 16bit\n",
        drop="--kv-cache fp8",
        add="--kv-cache 16bit",
    ),
    Row(
        BLOOM + "--kv-cache fp8 --attention fp8",
        "take --attention 16bit and --kv-cache 16bit\n",
        drop="--kv-cache fp8 --attention fp8",
        add="--kv-cache 16bit --attention 16bit",
    ),
    Row(
        "evaluate {case}/wide --kv-cache fp8 --text {case}/odd.safetensors --samples 1 --seqlen 16",
        "at most 256; take --attention 16bit and --kv-cache 16bit",
        drop="--kv-cache fp8",
        add="--kv-cache 16bit --attention 16bit",
    ),
    Row(
        "evaluate {case}/odd --kv-cache nvfp4 --text {case}/odd.safetensors --samples 1 --seqlen 16",
        "heads of 24 values: not in NVFP4; take --kv-cache fp8",
        drop="--kv-cache nvfp4",
        add="--kv-cache fp8",
    ),
    Row(
        f"plan make {{case}}/bert --bits 9 --kv-bits 6 --calib {{case}}/odd.safetensors {SMALL} --out {{out}}",
        "a KV cache in every layer; leave it out",
        drop="--kv-bits 6",
    ),
    Row(
        "quantize {case}/lora.safetensors --format fp8_channel --out {out}",
        "save that by save_pretrained, and pass its directory",
        instead="quantize {model} --format fp8_channel --out {out}",
    ),
    Row(
        "plan show {plan} --match *.q_prog",
        "did you mean *.q_proj?",
        drop="--match *.q_prog",
        add="--match *.q_proj",
    ),
    Row(
        MAKE + "--bits 6 --format nvfp4,fp8 --pin *.q_proj=fp8 --forbid *.q_proj=fp8",
        "(q_proj|k_proj|v_proj) cannot take any such format; it can take fp8",
        drop="--forbid *.q_proj=fp8",
    ),
    Row(
        f"quantize {{model}} --out {{out}} --format q4_k_s --solver rtn+autoround --calib {{ids}} {SMALL}",
        "only GGUF files hold",
        instead="quantize {case}/bare --format q4_k_s --solver rtn --effort 0 --out {out}.gguf",
    ),
    Row(
        "generate {case}/onnx --prompt hi --max-new-tokens 2",
        "name the checkpoint it was made from, and it with --engine",
        instead="generate {stored} --engine {case}/onnx --prompt hi --max-new-tokens 2",
    ),
    Row(
        EXPORT + "--to onnx --capacity 0 --input ids:int64:batch,sequence",
        "known: input_ids,",
        drop="--input ids:int64:batch,sequence",
        add=INPUTS,
    ),
    Row(
        Q + f"--format fp8 --calib {{case}}/named.safetensors --calib {{text}} {SMALL}",
        "a text; give one of them",
        drop="--calib {text}",
    ),
    Row(
        Q + f"--format fp8 --calib {{case}}/x.pt {SMALL}",
        "takes no x; name tensors by the arguments of its forward: input_ids,",
        drop="--calib {case}/x.pt",
        add="--calib {case}/named.pt",
    ),
    Row(
        "quantize {state} --format fp8_channel --out {out} --model-factory test_advice:two_block",
        "test_advice has no function two_block; did you mean two_blocks?",
        drop="--model-factory test_advice:two_block",
        add=FACTORY,
    ),
    Row(
        f"distill {{stored}} --teacher {{model}} --steps 1 --data {{case}}/named.safetensors {TRAINED}",
        "give text, or token ids alone in safetensors",
        drop="--data {case}/named.safetensors",
        add="--data {ids}",
    ),
    Row(
        f"distill {{stored}} --teacher {{model}} --steps 1 --data {{case}}/named.safetensors {TRAINED}",
        "give text, or",
        drop="--data {case}/named.safetensors",
        add="--data {text}",
    ),
    Row(
        "plan edit {plan} --set *.down_proj=fp8_channel --out {case}/taken/plan.json",
        "pass --overwrite",
        add="--overwrite",
    ),
    Row("plan edit {plan} --set *.q_proj=mxfp8 --out {out}", "pass --whole-groups", add="--whole-groups"),
    Row(
        "plan edit {plan} --set *.down_proj --out {out}",
        "'*.down_proj=fp8_channel'",
        drop="--set *.down_proj",
        add="--set *.down_proj=fp8_channel",
    ),
    Row(
        "plan edit {plan} --guard fp8 --out {out}",
        "as in '0.1 fp8 keep'",
        drop="--guard fp8",
        add="--guard 0.1␣fp8␣keep",
    ),
    Row(
        "plan edit {plan} --set *.q_proj=fp9 --whole-groups --out {out}",
        "keep; did you mean fp8?",
        drop="--set *.q_proj=fp9",
        add="--set *.q_proj=fp8",
    ),
    Row("inspect {stored}/model.safetensors", "name its directory", instead="inspect {stored}"),
    Row("plan show {model}", "or a directory of `quantize --out`", instead="plan show {stored}"),
    Row(Q + "--plan {model}", "or a directory of `quantize --out`", drop="--plan {model}", add="--plan {stored}"),
    Row(Q + "--format fp8_channel --resume", "the same command by itself", drop="--resume"),
    Row("check {stored} --max-new-tokens 4", "leave it out", drop="--max-new-tokens 4"),
    Row("doctor --power 30W", "name it: --target orin", add="--target orin"),
    Row("doctor --target orin --power 31W", "has modes of 15 W, 30 W", drop="--power 31W", add="--power 30W"),
    Row("check {stored}/model.safetensors", "a file of a checkpoint; name its directory", instead="check {stored}"),
    # evaluate and generate
    Row("evaluate {model} --samples 2 --seqlen 16", "--text", add="--text {text}"),
    Row("evaluate {model} --text {text} --shots 3 --samples 2 --seqlen 16", "leave them out", drop="--shots 3"),
    Row(
        "evaluate {model} --text {case}/short.safetensors --samples 99 --seqlen 8",
        "or lower samples to",
        drop="--samples 99",
        add="--samples #samples␣to␣",
    ),
    Row(
        "generate {model} --prompt a --max-new-tokens 9999",
        "lower --max-new-tokens",
        drop="--max-new-tokens 9999",
        add="--max-new-tokens 2",
    ),
    Row(
        "generate {model} --prompt a --max-new-tokens 2 --dtype fp23",
        "known: bfloat16, float16, float32",
        drop="--dtype fp23",
        add="--dtype float32",
    ),
    Row(
        "generate {model} --prompt a --max-new-tokens 2 --kv-cache fp9",
        "did you mean fp8?",
        drop="--kv-cache fp9",
        add="--kv-cache fp8",
    ),
    Row(
        "generate {model} --prompt a --max-new-tokens 2 --attention fp9",
        "16bit",
        drop="--attention fp9",
        add="--attention 16bit",
    ),
    Row(
        "generate {case}/large --prompt a --max-new-tokens 2 --dtype float16",
        "take BF16 or FP32 for --dtype",
        drop="--dtype float16",
        add="--dtype bfloat16",
    ),
    # checkpoints
    Row(
        "inspect {model}",
        "/model --format nvfp4 --out DIR`",
        instead="quantize {model} --format nvfp4 --out {out} --calib {ids} " + SMALL,
    ),
    Row(
        "report {stored} {stored} --receipt {plan} --out {out}", "leave it out to compare two", drop="--receipt {plan}"
    ),
    Row(
        "export {model} --to onnx --out {out}",
        "/model --format nvfp4 --out DIR`",
        instead="quantize {model} --format nvfp4 --out {out} --effort 0 --calib {ids} " + SMALL,
    ),
    Row(
        "check {case}/model.gguf",
        "`quant evaluate ",
        instead="evaluate {case}/model.gguf --text {ids} --samples 2 --seqlen 16 --baseline {model}",
    ),
    Row(
        "quantize {case}/merges --format q8_0 --effort 0 --out {out}.gguf",
        "a copy of the model without the tokenizer's files",
        instead="quantize {case}/bare --format q8_0 --effort 0 --out {out}.gguf",
    ),
    # exports that are refused before anything is traced
    Row(EXPORT + "--to modelop", "'compressed-tensors'", drop="--to modelop", add="--to compressed-tensors"),
    Row(EXPORT + "--to compressed-tensors --genai", "has no use for --genai", drop="--genai"),
    Row("export {stored} --to compressed-tensors --out {case}/taken", "pass --overwrite", add="--overwrite"),
    # training, checkpoints and GGUF
    Row(
        "distill {stored} --teacher {model} --steps 1 --batch-size 2 --seqlen 16 --samples 2 --data {text} --out {out} "
        "--train norms --scales learned",
        "--scales learned: norms are trained with frozen scales; leave it out",
        drop="--scales learned",
    ),
    Row("check {stored} --source {state}", "leave out --source", drop="--source {state}"),
    Row(
        "quantize {model} --format fp8_channel --out {case}/one",
        "so it is not ours to delete",
        drop="--out {case}/one",
        add="--out {out}",
    ),
    Row(
        "quantize {case}/bare --format fp8_channel --effort 0 --out {out}.gguf",
        "one of --format nvfp4a16, mxfp4a16, int4a16_g32 and q4_k_m",
        drop="--format fp8_channel",
        add="--format q4_k_m",
    ),
    Row(
        "quantize {model} --format q8_0 --effort 0 --out {out}.gguf",
        "like this WordLevel one (TokenizersBackend); a copy of the model without the tokenizer's files",
        instead="quantize {case}/bare --format q8_0 --effort 0 --out {out}.gguf",
    ),
    Row(
        "quantize {case}/narrow --format int8 --effort 0 --out {out}.gguf",
        "or quantize with --format q8_0",
        drop="--format int8",
        add="--format q8_0",
    ),
    Row(
        "check {case}/one --rebuild",
        "make one with `quantize MODEL --format nvfp4 --out DIR`",
        instead="quantize {model} --format nvfp4 --effort 0 --out {out}",
    ),
    Row(
        "evaluate {case}/onnx --text {text} --seqlen 32 --samples 2",
        "it is an export; name the model",
        drop="{case}/onnx",
        instead="evaluate {stored} --text {text} --seqlen 32 --samples 2",
    ),
    Row(
        "export {case}/onnx --to onnx --out {out}",
        "name the checkpoint that it was made from",
        instead="export {stored} --to onnx --out {out}",
    ),
    Row("check {case}/onnx", "name the checkpoint that it was exported from with --source", add="--source {stored}"),
    Row(
        "distill {stored} --teacher {case}/cached --steps 1 --out {out}",
        "--batch-size 8: there are 2 rows of 32 tokens to train on; lower it",
        add="--batch-size 2",
    ),
    Row("check {stored} --rebuild", "means nothing here: ", drop="--rebuild"),
    Row(
        "quantize {model} --format fp8 --calib {text} --calib {ids} --calib-samples 1 --seqlen 32 --out {out}",
        "names 2 sources, and each gives a row",
        drop="--calib-samples 1",
        add="--calib-samples 2",
    ),
    Row(
        "quantize {model} --format fp8_channel --effort 0 --device cuda:3 --out {out}",
        "leave it out, or pass cpu",
        drop="--device cuda:3",
        add="--device cpu",
    ),
    Row(
        "evaluate {stored} --text {text} --seqlen 32 --samples 2 --batch-size 0",
        "expected 1 or more rows",
        drop="--batch-size 0",
        add="--batch-size 1",
    ),
    Row(
        "distill {stored} --teacher {case}/cached --data {text} --steps 1 --batch-size 2 --out {out}",
        "leave the option out",
        drop="--data {text}",
    ),
    Row(
        "distill {stored} --teacher {model} --data {text} --steps 1 --batch-size 1 --seqlen 32 --lr 1 --out {out}",
        "nothing was written; lower --lr",
        drop="--lr 1 ",
        add="--lr 1e-5",
    ),
    Row(
        "distill {stored} --teacher {model} --data {text} --steps 1 --batch-size 1 --seqlen 32 --lr 1e30 --out {out}",
        "above 0 and at most 1, or leave it out",
        drop="--lr 1e30",
    ),
    Row(
        f"distill {{stored}} --teacher {{model}} --data {{ids}} --steps 1 --top 8 {TRAINED}",
        "give --cache-teacher FILE too, or",
        add="--cache-teacher {case}/eight.safetensors",
    ),
    Row(
        f"distill {{stored}} --teacher {{model}} --data {{ids}} --steps 1 --top 9 {TRAINED}",
        "too, or leave it out",
        drop="--top 9",
    ),
    Row("plan show {plan} --match nope", "no layer of ", drop="nope", instead="plan show {plan} --match *.down_proj"),
    Row(
        "plan make {model} --bits 17 --out {out} --calib {ids} --calib-samples 2 --seqlen 16",
        "a weight that is not quantized has 16; give fewer",
        drop="--bits 17",
        add="--bits 6",
    ),
    Row(
        "plan edit {plan} --out {out}",
        "nothing to change: give --set 'GLOB=FORMAT'",
        add="--set *.down_proj=fp8_channel",
    ),
    Row(
        "quantize {model} --format fp8_channel --effort 0 --out {case}/" + "n" * 250,
        "give a shorter one",
        drop="{case}/" + "n" * 250,
        add="{out}",
    ),
    Row(
        "generate {stored} --prompt x --max-new-tokens 0",
        "expected 1 or more",
        drop="--max-new-tokens 0",
        add="--max-new-tokens 1",
    ),
    # generation
    Row(
        "generate {case}/onnx --prompt a --max-new-tokens 1",
        "name the checkpoint it was made from, and it with --engine",
        drop="{case}/onnx",
        instead="generate {stored} --engine {case}/onnx --prompt a --max-new-tokens 1",
    ),
    Row(
        "generate {stored} --prompt a --max-new-tokens 99999",
        "shorten the prompt or lower --max-new-tokens",
        drop="--max-new-tokens 99999",
        add="--max-new-tokens 1",
    ),
    Row(
        "generate {stored} --prompt a --max-new-tokens 1 --kv-cache fp8,fp8",
        "2 formats for 1 layers; give one for each",
        drop="--kv-cache fp8,fp8",
        add="--kv-cache fp8",
    ),
    Row(
        "generate {stored} --prompt a --max-new-tokens 1 --kv-cache fp9",
        "16bit; did you mean fp8?",
        drop="--kv-cache fp9",
        add="--kv-cache fp8",
    ),
    # inputs of models, budgets
    Row(
        "quantize {case}/t5 --format fp8 --calib {case}/t5.safetensors --out {out}",
        "holds 2 inputs, and 32 are needed; give more, or ask for 2 by --calib-samples",
        add="--calib-samples 2",
    ),
    Row(
        "quantize {state} --bits 6 --out {out}",
        "an allocation measures; pass --model-factory",
        instead="quantize {state} --bits 6 --calib {case}/x.safetensors --calib-samples 2 --out {out} " + FACTORY,
    ),
    Row(MAKE + "--latency 1ms --power 15W", "needs a GPU: --target orin", add="--target orin"),
    Row(
        "export {case}/heads --to modelopt --out {out}",
        "quantize again with --kv-cache fp8",
        instead="quantize {model} --format fp8 --kv-cache fp8 --effort 0 --calib {ids} --out {out} " + SMALL,
    ),
]


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: f"{row.refused} → {row.says}")
def test_what_a_refused_command_advises_works(row: Row, case: Path) -> None:
    follow(row, case)


def follow(row: Row, case: Path) -> None:
    result = invoke(case, row.refused)
    assert result.exit_code == 2 and row.says in result.stderr, f"{row.refused}: {result.output}"
    named = [word for word in row.add.split() if word.startswith("--") and not row.instead]
    known = (
        "--calib",
        "--calib-samples",
        "--seqlen",
        "--set",
        "--format",
        "--solver",
        "--samples",
        "--text",
        "--eval-samples",
    )
    assert all(word in result.stderr or word in (*known, *row.drop.split()) for word in named), result.stderr
    # `#samples to ` stands for the number that the message has behind these words; a second # ends them.
    words = re.compile(r"#(\w+␣[^\s#]*)#?")
    number = lambda m: re.search(rf"{m[1].replace('␣', ' ')}([\d.,]*\d)", result.stderr)[1].replace(",", "")  # noqa: E731
    advised = words.sub(number, row.advised)
    run(case, advised)


EXPORTS = [
    Row(EXPORT + "--to onnx --capacity 3", "0 exports without one", drop="--capacity 3", add="--capacity 0"),
    Row(EXPORT + "--to onnx --capacity 99999", "lower it", drop="--capacity 99999", add="--capacity 32"),
    Row(EXPORT + "--to onnx --capacity 32 --shapes sequence", "is not NAME=MIN:OPT:MAX", drop="--shapes sequence",
        add="--shapes sequence=1:8:16"),
    Row(EXPORT + "--to onnx --capacity 32 --shapes sequence=8:4:1", "MIN:OPT:MAX, ascending",
        drop="--shapes sequence=8:4:1", add="--shapes sequence=1:4:8"),
    Row(EXPORT + "--to onnx --capacity 32 --shapes sequence=1:8:64", "does not fit into a KV cache of 32",
        drop="--shapes sequence=1:8:64", add="--shapes sequence=1:8:32"),
    Row(EXPORT + "--to onnx --input input_ids", "expected NAME:DTYPE:DIMS", drop="--input input_ids", add=INPUTS),
    Row(EXPORT + f"--to onnx {INPUTS} {INPUTS}", "each input has one dtype and one shape", drop=f" {INPUTS}"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", EXPORTS, ids=lambda row: f"{row.refused} → {row.says}")
def test_what_a_refused_export_advises_works(row: Row, case: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx")
    follow(row, case)


def long_rope() -> Any:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return tiny_models.build(
        "Phi3", "ForCausalLM", {**tiny_models.DECODER, "original_max_position_embeddings": 16, "pad_token_id": 0},
        rope_scaling=rope, gain=4,
    )  # fmt: skip


def dynamic_rope() -> Any:
    return tiny_models.llama(max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, gain=4)


def falcon(alibi: bool) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tiny_models.build("Falcon", "ForCausalLM", sizes, alibi=alibi)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "says", "options"),
    [
        (long_rope, "pass --capacity 0", "--capacity 0"),
        (dynamic_rope, "pass --capacity 0", "--capacity 0"),
        (lambda: falcon(False), "as in --input input_ids:int64:batch,sequence", INPUTS),
        (lambda: falcon(True), "as in --input input_ids:int64:batch,sequence", INPUTS),
        (tiny_models.t5, "without --capacity and --genai it exports as one pass", ""),
    ],
    ids=["longrope", "dynamic", "falcon", "falcon-alibi", "t5"],
)
def test_models_that_no_cache_holds_export_as_advised(
    make: Callable[[], Any], says: str, options: str, case: Path, tmp_path: Path
) -> None:
    """Logits on both sides of the switch of frequencies, against PyTorch, and the frequencies of the model stay."""
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx")
    model = make().eval()
    model.save_pretrained(tmp_path / "model")
    run(case, f"quantize {tmp_path / 'model'} --format int8 --out {tmp_path / 'stored'} --quiet")
    command = f"export {tmp_path / 'stored'} --to onnx --out {tmp_path / 'out'}"
    refused = invoke(case, f"{command} --capacity 16" if not options else command)
    assert refused.exit_code == 2 and says in refused.stderr, refused.output
    run(case, f"{command} {options}")
    session = runtime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for tokens in (8, 40):
        errors = []
        for x in torch.randint(3, 60, (4, 2, tokens)):
            inputs = {name: torch.ones_like(x) if "mask" in name else x for name in names}
            expected = quant.load(tmp_path / "stored")(**inputs).logits.detach()
            (logits, *_) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
            errors.append(float((torch.from_numpy(logits) - expected).norm() / expected.norm()))
        # An input on the edge between two INT8 codes moves its draw by some thousandths; other frequencies move all.
        assert min(errors) < 1e-5 and max(errors) < 0.02, (tokens, errors)


LINEARS: Callable[[], Any] = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # noqa: E731
X = torch.linspace(-1, 1, 256).reshape(4, 64)


def prepared(model: nn.Module | None = None) -> nn.Module:
    model = LINEARS() if model is None else model
    quant.prepare_qat(model, "fp8_channel")
    return model


def tokens() -> Any:
    return tiny_models.llama(num_hidden_layers=1)


IDS = torch.arange(3, 35).reshape(2, 16)
# What is refused, the words of the message, and the call that they name.
CALLS: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "a path for a module": (
        lambda: quant.prepare_qat(str(BASE), "fp8_channel"),
        rf"open it with quant\.open_model\('{BASE}'\)\.model",
        lambda: quant.prepare_qat(quant.open_model(str(BASE)).model, "fp8_channel"),
    ),
    "a result for a module": (
        lambda: quant.prepare_qat(quant.quantize(LINEARS(), "fp8_channel"), None),
        r"pass its \.model",
        lambda: quant.prepare_qat((quantized := quant.quantize(LINEARS(), "fp8_channel")).model, quantized.plan),
    ),
    "no recipe": (
        lambda: quant.prepare_qat(LINEARS()),
        "name a recipe, such as 'nvfp4'",
        lambda: quant.prepare_qat(LINEARS(), "nvfp4", data=X),
    ),
    "prepared twice": (
        lambda: quant.prepare_qat(prepared(), "fp8_channel"),
        r"or pack it with quant\.pack\(model\)",
        lambda: quant.pack(prepared()),
    ),
    "packed before training": (
        lambda: quant.pack(LINEARS()),
        r"call quant\.prepare_qat or quant\.to_low_precision_training",
        lambda: quant.pack(prepared()),
    ),
    "packed before training, and not to be trained": (
        lambda: quant.pack(LINEARS()),
        r"quant\.quantize packs a model without training",
        lambda: quant.quantize(LINEARS(), "fp8_channel"),
    ),
    "in QAT already": (
        lambda: quant.to_low_precision_training(prepared(), "fp8_rowwise"),
        r"quantized already, by quant\.prepare_qat; pack it with quant\.pack\(model\); start from the original one",
        lambda: quant.to_low_precision_training(LINEARS(), "fp8_rowwise", backend="emulated"),
    ),
    "scales": (
        lambda: quant.prepare_qat(LINEARS(), "fp8_channel", scales="learnt"),
        "did you mean learned",
        lambda: quant.prepare_qat(LINEARS(), "fp8_channel", scales="learned"),
    ),
    "track_inputs": (
        lambda: quant.prepare_qat(LINEARS(), "fp8_channel", track_inputs=-1),
        "such as 100, or 0 for none",
        lambda: [quant.prepare_qat(LINEARS(), "fp8_channel", track_inputs=passes) for passes in (100, 0)],
    ),
    "a 16-bit model with an original": (
        lambda: quant.prepare_qat(LINEARS(), "fp8_channel", original=LINEARS()),
        "leave it out",
        lambda: quant.prepare_qat(LINEARS(), "fp8_channel"),
    ),
    "data twice": (
        lambda: quant.quantize(LINEARS(), "fp8", X, forward_loop=lambda model: model(X)),
        "pass one of them",
        lambda: quant.quantize(LINEARS(), "fp8", forward_loop=lambda model: model(X)),
    ),
    "a path for data": (
        lambda: quant.quantize(LINEARS(), "fp8", str(TEXTS / "calibration.txt")),
        "data is a str; give a tensor, named tensors, an iterable of calls of the model, or a function",
        lambda: [quant.quantize(LINEARS(), "fp8", data) for data in (X, [X], {"input": X})],
    ),
    "named tensors of different lengths": (
        lambda: quant.quantize(tiny_models.t5(), "fp8", {"input_ids": IDS, "decoder_input_ids": IDS[:1]}),
        r"different numbers of rows \(input_ids 2, decoder_input_ids 1\); give each as many",
        lambda: quant.quantize(tiny_models.t5(), "fp8", {"input_ids": IDS[:1], "decoder_input_ids": IDS[:1]}),
    ),
    "labels for a mask": (
        lambda: quant.quantize(tokens(), "fp8", [(IDS, IDS)]),
        r"pass only x, as in data=\(x for x, y in loader\)",
        lambda: quant.quantize(tokens(), "fp8", data=(x for x, y in [(IDS, IDS)])),
    ),
    "generate for a loop": (
        lambda: quant.quantize(tokens(), "fp8", forward_loop=lambda model: model.generate(IDS, max_new_tokens=2)),
        r"call the model itself on whole texts, model\(input_ids\)",
        lambda: quant.quantize(tokens(), "fp8", forward_loop=lambda model: model(IDS)),
    ),
    "a model without values": (
        lambda: quant.quantize(nn.Sequential(nn.Linear(64, 64, device="meta")), "fp8_channel"),
        "load the model first. quant.make_plan plans without",
        lambda: quant.make_plan(nn.Sequential(nn.Linear(64, 64, device="meta")), "fp8_channel"),
    ),
    "a head that is not there": (
        lambda: quant.quantize(LINEARS(), "fp8_channel", lm_head="fp8"),
        "this model has no output head; leave that out",
        lambda: quant.quantize(LINEARS(), "fp8_channel"),
    ),
    "batches of no row": (
        lambda: quant.evaluate(tokens(), IDS, batch_size=0),
        "batch_size is 0; expected 1 or more rows",
        lambda: quant.evaluate(tokens(), IDS, batch_size=1),
    ),
    "a cache without attention": (
        lambda: quant.quantize(LINEARS(), "fp8_channel", kv_cache="fp8"),
        'only attention that goes through their AttentionInterface can be quantized; take kv_cache="16bit"',
        lambda: quant.quantize(LINEARS(), "fp8_channel", kv_cache="16bit"),
    ),
    "attention of a plain module, deployed": (
        lambda: quant.quantize(LINEARS(), "fp8_channel", attention="fp8"),
        'only attention that goes through their AttentionInterface can be quantized; take attention="16bit"',
        lambda: quant.quantize(LINEARS(), "fp8_channel", attention="16bit"),
    ),
    "a cache of an encoder": (
        lambda: quant.quantize(tiny_models.bert(), "fp8_channel", data=IDS, kv_cache="fp8"),
        'keeps no keys and values from token to token; take kv_cache="16bit"',
        lambda: quant.quantize(tiny_models.bert(), "fp8_channel", data=IDS, kv_cache="16bit", attention="fp8"),
    ),
    "attention of a plain module": (
        lambda: quant.to_low_precision_training(LINEARS(), "fp8_rowwise", backend="emulated", attention="fp8"),
        "leave it out, and attention trains in 16 bit",
        lambda: quant.to_low_precision_training(LINEARS(), "fp8_rowwise", backend="emulated"),
    ),
    "a list of recipes": (
        lambda: quant.quantize(LINEARS(), ["fp8_channel"]),  # type: ignore[arg-type]
        "a name such as 'nvfp4', a recipe or a plan",
        lambda: quant.quantize(LINEARS(), "fp8_channel"),
    ),
    "one text for an encoder-decoder": (
        lambda: quant.quantize(tiny_models.t5(), "nvfp4", IDS),
        "exactly one of input_ids or inputs_embeds; its forward takes input_ids, attention_mask, decoder_input_ids,",
        lambda: quant.quantize(tiny_models.t5(), "nvfp4", {"input_ids": IDS, "decoder_input_ids": IDS}),
    ),
    "a budget for an encoder-decoder": (
        lambda: quant.quantize(tiny_models.t5(), bits=6, data={"input_ids": IDS, "decoder_input_ids": IDS}),
        "quantize with recipe=, and measure with quant evaluate",
        lambda: quant.quantize(tiny_models.t5(), "fp8", {"input_ids": IDS, "decoder_input_ids": IDS}),
    ),
    "ids for a classifier of images": (
        lambda: quant.quantize(tiny_models.vit(), bits=6, data=IDS),
        r"expected 4, got 2\); its forward takes pixel_values,",
        lambda: quant.quantize(tiny_models.vit(), bits=6, data=torch.randn(4, 3, 32, 32)),
    ),
    "ids without rows": (
        lambda: quant.quantize(tokens(), "fp8", list(IDS)),
        r"give \[row\[None\] for row in rows\]",
        lambda: quant.quantize(tokens(), "fp8", [row[None] for row in IDS]),
    ),
    "ids without rows, as one tensor": (
        lambda: quant.quantize(tokens(), "fp8", list(IDS)),
        r"or one tensor \[rows, seqlen\]",
        lambda: quant.quantize(tokens(), "fp8", IDS),
    ),
    "pairs of a loader": (
        lambda: quant.quantize(LINEARS(), "fp8", [(X, torch.zeros(4))]),
        r"take only the inputs: \[inputs for inputs, labels in loader\]",
        lambda: quant.quantize(LINEARS(), "fp8", [inputs for inputs, _ in [(X, torch.zeros(4))]]),
    ),
    "texts for a model": (
        lambda: quant.quantize(tokens(), "fp8", ["some text of words"]),
        r"quant\.calibration_rows\(data, tokenizer, samples=32, seqlen=512\)",
        lambda: quant.quantize(
            quant.open_model(BASE).model,
            "fp8",
            quant.calibration_rows(
                [(TEXTS / "calibration.txt").read_text(encoding="utf-8")] * 9,
                quant.open_model(BASE).load_tokenizer(),
                samples=32,
                seqlen=512 // 8,
            ),
        ),
    ),
    "a text to evaluate": (
        lambda: quant.evaluate(tokens(), "a text"),
        r"quant\.token_rows\(FILE, tokenizer, samples=16, seqlen=512\)",
        lambda: quant.evaluate(
            quant.open_model(BASE).model,
            quant.token_rows(TEXTS / "calibration.txt", quant.open_model(BASE).load_tokenizer(), samples=16, seqlen=64),
        ),
    ),
    "names of tensors": (
        lambda: quant.quantize(LINEARS(), "fp8", {"x": X}),
        r"takes \(input\), .* name tensors by these arguments",
        lambda: quant.quantize(LINEARS(), "fp8", {"input": X}),
    ),
    "a head within a budget": (
        lambda: quant.quantize(tokens(), data=IDS, bits=5, lm_head="fp8"),
        r"call plan\.set\('lm_head', 'fp8'\) and quantize again with that plan",
        lambda: quant.quantize(
            tokens(), quant.quantize(tokens(), data=IDS, bits=5, effort=0).plan.set("lm_head", "fp8"), IDS
        ),
    ),
    "no data for a solver": (
        lambda: quant.quantize(LINEARS(), "int8", solver="gptq"),
        "pass calibration data: .* or data= in Python",
        lambda: quant.quantize(LINEARS(), "int8", data=X, solver="gptq"),
    ),
    "a module in another dtype": (
        lambda: quant.open_model(LINEARS(), dtype="bfloat16"),
        r"cast it with model\.to\(torch\.bfloat16\)",
        lambda: quant.open_model(LINEARS().to(torch.bfloat16), dtype="bfloat16"),
    ),
    "weights on the meta device": (
        lambda: quant.quantize(LINEARS().to("meta"), "fp8_channel"),
        r"quant\.make_plan plans without",
        lambda: quant.make_plan(LINEARS().to("meta"), "fp8_channel"),
    ),
    "widths that do not divide": (
        lambda: quant.make_plan(nn.Sequential(nn.Linear(40, 24)), "nvfp4"),
        "int8 take",
        lambda: quant.make_plan(nn.Sequential(nn.Linear(40, 24)), "int8"),
    ),
    "a teacher that is the student": (
        lambda: quant.distill(model := tokens(), model, {"input_ids": IDS}),
        "pass a copy of the original",
        lambda: quant.distill(model := tokens(), copy.deepcopy(model), {"input_ids": IDS}),
    ),
}


def in_low_precision(model: nn.Module, recipe: Any = "fp8_rowwise", **options: Any) -> Any:
    """The report of a model that trains in low precision, on any machine."""
    return quant.to_low_precision_training(model.train(), recipe, backend="emulated", **options)


def step(model: Any, x: torch.Tensor = X) -> nn.Module:
    """The model, trained by one step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    out = model.train()(x)
    getattr(out, "logits", out).sum().backward()
    optimizer.step()
    return model  # type: ignore[no-any-return]


def converted(recipe: str, trained: bool = True) -> nn.Module:
    in_low_precision(model := LINEARS(), recipe)
    return step(model) if trained else model


def diverged(on_nonfinite: str) -> None:
    in_low_precision(model := LINEARS(), on_nonfinite=on_nonfinite)
    with pytest.warns(UserWarning, match="this step is skipped") if on_nonfinite == "skip" else nullcontext():
        step(model, X * torch.inf)


def continued(recipe: str, **options: Any) -> None:
    """A model that goes on with the histories of one that trained by `fp8_delayed`."""
    earlier = in_low_precision(model := LINEARS(), "fp8_delayed")
    step(model)
    in_low_precision(LINEARS(), recipe, **options).load_state_dict(earlier.state_dict())


def student() -> Any:
    model = tokens()
    quant.prepare_qat(model, "fp8_channel")
    return model


def with_dropout(trained: float) -> Any:
    """What `from_pretrained(DIR, attention_dropout=0)` gives, or its modules drop as the config says."""
    return tiny_models.llama(num_hidden_layers=1, attention_dropout=trained)


PLACES = tempfile.TemporaryDirectory(prefix="advice-")


def place() -> Path:
    return Path(PLACES.name) / str(next(_NUMBERS))


def cached(temperature: float = 1.0) -> Path:
    cache_teacher(tokens(), IDS, file := place(), k=8, temperature=temperature)
    return file


def saved(model: Any, plan: Any = None, **options: Any) -> None:
    quant.save(model, plan, place(), **options)


def module_checkpoint() -> Path:
    made = quant.quantize(LINEARS(), "fp8_channel")
    quant.save(made.model, made.plan, folder := place())
    return folder


def without_plan() -> tuple[nn.Module, Any]:
    made = quant.quantize(LINEARS(), "fp8_channel")
    return made.model, made.plan


class WithState(nn.Sequential):
    """A module that adds a state of its own to its state dict."""

    def __init__(self, state: Any = "text") -> None:
        super().__init__(nn.Linear(64, 64))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def saved_of(model: nn.Module) -> None:
    made = quant.quantize(model, "fp8_channel")
    quant.save(made.model, made.plan, place())


def quantized(**options: Any) -> Any:
    return quant.quantize(tokens(), "fp8_channel", **options)


# Of training, distillation, checkpoints and caches.
CALLS |= {
    "a layout without config.json": (
        lambda: quant.convert(module_checkpoint(), place(), "modelopt"),
        r"no config\.json, and so one for quant\.load\(directory, model\)",
        lambda: quant.load(module_checkpoint(), LINEARS()),
    ),
    "a plan with include": (
        lambda: quant.prepare_qat(LINEARS(), quant.make_plan(LINEARS(), "fp8_channel"), exclude=["0"]),
        r"give solver, include and exclude to quant\.make_plan instead",
        lambda: quant.prepare_qat(LINEARS(), quant.make_plan(LINEARS(), "fp8_channel", exclude=["0"])),
    ),
    "a frozen weight": (
        lambda: quant.prepare_qat(LINEARS().requires_grad_(False), "fp8_channel"),
        r"freeze layers after prepare_qat, from model\.requires_grad_\(True\)",
        lambda: quant.prepare_qat(LINEARS().requires_grad_(False).requires_grad_(True), "fp8_channel"),
    ),
    "scales that a solver chose": (
        lambda: quant.prepare_qat((q := quant.quantize(LINEARS(), "nvfp4", X)).model, q.plan, scales="recomputed"),
        "use scales='frozen' or 'learned'",
        lambda: [
            quant.prepare_qat((q := quant.quantize(LINEARS(), "nvfp4", X)).model, q.plan, scales=scales)
            for scales in ("frozen", "learned")
        ],
    ),
    "converted twice": (
        lambda: in_low_precision(converted("fp8_rowwise")),
        r"call undo\(\) of what to_low_precision_training returned first",
        lambda: (in_low_precision(model := LINEARS()).undo(), in_low_precision(model, "mxfp8")),
    ),
    "no report": (
        lambda: quant.training_report(LINEARS()),
        r"quant\.to_low_precision_training\(model, recipe\) returns the report",
        lambda: quant.training_report(converted("fp8_rowwise")),
    ),
    "widths of a training recipe": (
        lambda: in_low_precision(nn.Sequential(nn.Linear(64, 48)), "fp8_block"),
        "its inputs of 128; fp8_rowwise takes multiples of 16",
        lambda: in_low_precision(nn.Sequential(nn.Linear(64, 48)), "fp8_rowwise"),
    ),
    "a static scale without a step": (
        lambda: quant.pack(converted("fp8_tensorwise", trained=False)),
        "run a few steps in training mode first",
        lambda: quant.pack(converted("fp8_tensorwise")),
    ),
    "infinite inputs": (
        lambda: diverged("stop"),
        r"changed by this step of SGD: leave such steps out with on_nonfinite=\"skip\"",
        lambda: diverged("skip"),
    ),
    "histories of another recipe": (
        lambda: continued("fp8_rowwise"),
        r'convert it with quant\.to_low_precision_training\(model, "fp8_delayed"\)',
        lambda: continued("fp8_delayed"),
    ),
    "histories of other layers": (
        lambda: continued("fp8_delayed", exclude=["0"]),
        "convert the model as it was when they were saved",
        lambda: continued("fp8_delayed"),
    ),
    "attention dropout": (
        lambda: in_low_precision(with_dropout(0.1), attention="fp8"),
        "load the model with attention_dropout=0, which its modules read",
        lambda: (in_low_precision(model := with_dropout(0.0), attention="fp8"), step(model, IDS)),
    ),
    "attention dropout, left to 16 bit": (
        lambda: in_low_precision(with_dropout(0.1), attention="fp8"),
        'leave out attention="fp8"',
        lambda: (in_low_precision(model := with_dropout(0.1)), step(model, IDS)),
    ),
    "a cached teacher with hidden states": (
        lambda: quant.distill(student(), cached(), IDS, hidden=0.5),
        "pass the model, or hidden=0",
        lambda: (quant.distill(student(), tokens(), IDS, hidden=0.5), quant.distill(student(), cached(), IDS)),
    ),
    "another temperature": (
        lambda: quant.distill(student(), cached(), IDS, temperature=2.0),
        "train at that, or cache again",
        lambda: quant.distill(student(), cached(temperature=2.0), IDS, temperature=2.0),
    ),
    "a file that is no teacher": (
        lambda: quant.distill(student(), BASE / "model.safetensors", IDS),
        r"it holds none; write one with quant\.training\.distillation_loss\.cache_teacher",
        lambda: quant.distill(student(), cached(), IDS),
    ),
    "ids of one row": (
        lambda: quant.distill(student(), tokens(), IDS[0]),
        r"such as ids\[None\]",
        lambda: quant.distill(student(), tokens(), IDS[0][None]),
    ),
    "a model without a plan": (
        lambda: saved(tokens()),
        r"pass the \.plan of what quant\.quantize gave",
        lambda: saved((result := quantized()).model, plan=result.plan),
    ),
    "a model in training": (
        lambda: saved(student()),
        r"one in training is packed first, by quant\.pack",
        lambda: (quant.pack(model := student()), saved(model)),
    ),
    "a plan of another call": (
        lambda: saved(tokens(), plan=quant.make_plan(tokens(), "fp8_channel")),
        "give the model and the plan that one call of quantize returned",
        lambda: saved((result := quantized()).model, plan=result.plan),
    ),
    "a tokenizer of another kind": (
        lambda: saved(quantized().model, tokenizer="tokenizer.json"),
        "leave it out",
        lambda: saved(quantized().model),
    ),
    "a variant": (
        lambda: quantized().model.save_pretrained(place(), variant="fp16"),
        "has one form on disk; leave it out",
        lambda: quantized().model.save_pretrained(place()),
    ),
    "quantized without its plan": (
        lambda: quant.prepare_qat(without_plan()[0], None),
        r"pass its plan, which quant\.quantize returned with it",
        lambda: quant.prepare_qat(*without_plan()),
    ),
    "no logits to measure": (
        lambda: quant.evaluate(LINEARS(), torch.randn(4, 2, 64)),
        "its outputs can only be compared; name a baseline=",
        lambda: quant.evaluate(LINEARS(), torch.randn(4, 2, 64), baseline=LINEARS()),
    ),
    "attention of an unknown format": (
        lambda: quant.quantize(tokens(), "fp8_channel", attention="fp9"),
        "attention runs in fp8, or in 16bit",
        lambda: quant.quantize(tokens(), "fp8_channel", attention="fp8"),
    ),
    "a state that is no tensor": (
        lambda: saved_of(WithState()),
        "return a tensor from get_extra_state, or leave the method out",
        lambda: [saved_of(each) for each in (WithState(torch.ones(2)), LINEARS())],
    ),
    "a size of shards": (
        lambda: quantized().model.save_pretrained(place(), max_shard_size="2 gigs"),
        "or one such as '2GB'",
        lambda: quantized().model.save_pretrained(place(), max_shard_size="2GB"),
    ),
}


def with_autoround(solver: str) -> Any:
    return quant.quantize(tokens(), "q4_k_s", IDS, solver=solver)


def with_heads_of(dim: int, **options: Any) -> None:
    """Quantizes attention with heads of a size, and runs it."""
    model = tiny_models.llama(num_hidden_layers=1, head_dim=dim)
    quant.quantize(model, "fp8_channel", IDS, **options).model(IDS)


def unigram() -> nn.Module:
    """A language model that is none of transformers."""
    return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))


def bloom() -> Any:
    """A model whose attention is its own."""
    return tiny_models.build("Bloom", "ForCausalLM", {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4})


CALLS |= {
    "roundings of llama.cpp's formats to train": (
        lambda: with_autoround("mse+autoround"),
        r"self_attn\.\w+: solver 'mse\+autoround' trains roundings, and not those of q\w+; take mse",
        lambda: with_autoround("mse"),
    ),
    "hidden states of a plain module": (
        lambda: quant.distill(prepared(unigram()), unigram(), IDS, hidden=0.5),
        "hidden states are those of a transformers model; pass hidden=0",
        lambda: quant.distill(prepared(unigram()), unigram(), IDS, hidden=0),
    ),
    "attention of its own, in training": (
        lambda: in_low_precision(bloom(), attention="fp8"),
        'BloomForCausalLM: its attention is its own and cannot be replaced; leave out attention="fp8"',
        lambda: step(converted_of(bloom()), IDS),
    ),
    "parentheses in a pattern": (
        lambda: compressed_tensors.matches(f"re:{'(' * 490}x{')' * 490}", "x"),
        r"config\.json: the pattern '(re:)?\(+'… is nested too deeply; write it flat",
        lambda: compressed_tensors.matches("re:x", "x"),
    ),
    "tokens to crop": (
        lambda: cropped(4),
        r"crop\(4\): give the number of tokens to remove as a negative one",
        lambda: cropped(-4),
    ),
    "a model without values": (
        lambda: quant.apply_plan(tokens().to("meta"), quant.make_plan(tokens().to("meta"), "fp8_channel")),
        "weight is on the meta device, without values; load the model first. quant.make_plan plans without$",
        lambda: quant.apply_plan(tokens(), quant.make_plan(tokens().to("meta"), "fp8_channel")),
    ),
    "a GPU of another number": (
        lambda: with_gpus(2, "cuda:9"),
        r"PyTorch sees cuda:0 \(NVIDIA H200\), cuda:1 \(NVIDIA H200\) here; pass one of these, or cpu",
        lambda: [with_gpus(2, device) for device in ("cuda:1", "cpu")],
    ),
    "a GPU of a number that is not there": (
        lambda: quant.quantize(LINEARS(), "fp8_channel", device="cuda:9"),
        "leave it out, or pass cpu",
        lambda: [quant.quantize(LINEARS(), "fp8_channel", **device) for device in ({}, {"device": "cpu"})],
    ),
}


def cropped(tokens_to_remove: int) -> None:
    model = tokens().eval()
    cache = QuantizedKVCache(model, "fp8")
    with torch.no_grad(), quantized_attention(model, kv_cache="fp8"):
        model(IDS, **cache_argument(model, cache))
    cache.crop(tokens_to_remove)
    assert cache.get_seq_length() == 12


def with_gpus(count: int, device: str) -> torch.device | None:
    """The device of a name on a machine with so many H200s."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "device_count", lambda: count)
        patched.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        return find_device(device)


def converted_of(model: nn.Module) -> nn.Module:
    in_low_precision(model)
    return model


@pytest.mark.parametrize("case_name", CALLS)
def test_what_a_refused_call_advises_works(case_name: str) -> None:
    refused, says, advised = CALLS[case_name]
    with pytest.raises(ValueError, match=says):
        refused()
    advised()


def replaced(file: str, **fields: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file in a directory."""

    def change(directory: Path) -> None:
        document = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**document, **fields}))

    return change


def with_nan(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def in_gptq(directory: Path, zeros: bool) -> None:
    """A layer as GPTQ's files have it, or without its zeros."""
    replaced("config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})(directory)
    tensors, name, rows, columns = (
        load_file(directory / "model.safetensors"),
        "model.layers.0.self_attn.q_proj",
        128,
        128,
    )
    tensors.pop(f"{name}.weight", None)
    tensors |= {
        f"{name}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{name}.scales": torch.ones(columns // 32, rows, dtype=torch.float16),
    }
    tensors.pop(f"{name}.qzeros", None)
    if zeros:
        tensors[f"{name}.qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def with_broken_sums(directory: Path) -> None:
    file = directory / "SHA256SUMS"
    file.write_text("x" + file.read_text())


def with_bad_metadata(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", "blockscale.prediction_heads": '{"mtp.0": [0, 64]}'})


# The directory, what damages it, a command, and what it says: to restore or download the file again.
DAMAGED: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "NaN": ("model", with_nan, "generate {0} --prompt hi --max-new-tokens 2", "repair the model, or download it again"),
    "length": (
        "model",
        replaced("tokenizer_config.json", model_max_length="many"),
        "generate {0} --prompt hi --max-new-tokens 2",
        "tokenizer_config.json: model_max_length is not a number but a str; download it again",
    ),
    "block": (
        "model",
        replaced("config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [0, 1]}),
        "quantize {0} --format fp8_channel --out {{out}}",
        "weight_block_size: [0, 1] is not the size of a block; download the model again",
    ),
    "zeros": (
        "gptq",
        lambda directory: in_gptq(directory, zeros=False),
        "quantize {0} --format fp8_channel --out {{out}}",
        "self_attn.q_proj.qweight has no qzeros; download the model again",
    ),
    "sums": (
        "modelopt",
        with_broken_sums,
        "check {0}",
        "SHA256SUMS: line 1 is no SHA-256 with a file's name; restore it",
    ),
    "metadata": (
        "stored",
        with_bad_metadata,
        "check {0}",
        "damaged metadata blockscale.prediction_heads (sizes are whole numbers from 1); write or download it again",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_and_the_right_one_works(name: str, case: Path, tmp_path: Path) -> None:
    source, damage, command, says = DAMAGED[name]
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    if source == "modelopt":
        run(case, f"export {{stored}} --to modelopt --out {whole}")
    else:
        shutil.copytree(case / ("model" if source == "gptq" else source), whole)
    if source == "gptq":
        in_gptq(whole, zeros=True)
    shutil.copytree(whole, damaged)
    damage(damaged)
    result = invoke(case, command.format(damaged))
    assert result.exit_code == 2 and says in result.output
    if name == "sums":  # the other way out
        (damaged / "SHA256SUMS").unlink()
        run(case, command.format(damaged))
    shutil.rmtree(damaged)
    shutil.copytree(whole, damaged)
    run(case, command.format(damaged))


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    "command",
    [
        f"distill {{stored}} --teacher {{model}} --steps 2 --data {{ids}} {TRAINED}",
        MAKE + "--bits 6",
        f"evaluate {{stored}} --baseline {{model}} --text {{ids}} {SMALL.replace('calib-', '')}",
        EXPORT + "--to onnx",
    ],
    ids=lambda command: command.split()[0],
)
def test_an_interrupted_command_leaves_nothing_and_works_again(
    command: str, call: int, case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a forward pass of the model, the first or the third."""
    command = command.replace("{out}", str(tmp_path / "out"))
    original = transformers.LlamaForCausalLM.forward
    counted = itertools.count(1)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if next(counted) == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    (tmp_path / "temporary").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(transformers.LlamaForCausalLM, "forward", forward)
        patched.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        stopped = invoke(case, command)
    where = f" before {tmp_path / 'out'} was written" if "--out" in command else ""
    assert (stopped.exit_code, stopped.stderr.splitlines()[-1]) == (130, f"error: stopped by SIGINT{where}")
    assert [*tmp_path.iterdir()] == [tmp_path / "temporary"] and not [*(tmp_path / "temporary").iterdir()]
    if call == 1:
        run(case, command)


def test_a_run_whose_start_is_damaged_begins_anew(case: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "run.json").write_text("{}")
    command = f"quantize {{model}} --format fp8_channel --out {tmp_path}/out"
    result = invoke(case, command)
    assert result.exit_code == 2 and "run.json: not the start of a run" in result.stderr, result.output
    assert result.stderr.endswith("; pass --restart to begin anew\n")
    run(case, f"{command} --restart")
    assert not partial.exists()


def test_a_program_that_cannot_be_read_is_exported_again(case: Path, tmp_path: Path) -> None:
    """An archive whose graph is another document; and a module whose class is gone, saved as a state dict."""
    with zipfile.ZipFile(case / "program.pt2") as whole, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as damaged:
        for name in whole.namelist():
            damaged.writestr(name, b"{}" if name.endswith("model.json") else whole.read(name))
    command = f"quantize {tmp_path}/bad.pt2 --format fp8_channel --trust-remote-code --out {{out}}"
    result = invoke(case, command)
    assert result.exit_code == 2 and "; export it again with this torch" in result.stderr, result.output
    program = torch.export.export(two_blocks(), (torch.zeros(2, 64),))
    torch.export.save(program, tmp_path / "bad.pt2")
    run(case, command)
    gone = types.ModuleType("gone")
    gone.Gone = type("Gone", (nn.Sequential,), {"__module__": "gone"})  # type: ignore[attr-defined]
    sys.modules["gone"] = gone
    model = gone.Gone(*two_blocks())
    torch.save(model, tmp_path / "gone.pt")
    del sys.modules["gone"]
    command = f"quantize {tmp_path}/gone.pt --format fp8_channel --trust-remote-code --out {{out}}"
    result = invoke(case, command)
    assert result.exit_code == 2 and "; save model.state_dict() instead" in result.stderr, result.output
    torch.save(model.state_dict(), tmp_path / "gone.pt")
    run(case, command)


def test_a_checkout_without_links_is_mended_by_the_commands_of_its_message(tmp_path: Path) -> None:
    """As git and archives write it on Windows: the links are text files."""
    (tmp_path / "quant").mkdir()
    for name in ("__init__.py", "__init__.pyi"):
        shutil.copy(ROOT / "quant" / name, tmp_path / "quant")
    for room in ("formats", "kernels", "recipes", "calibration", "export"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "file.py").touch()
        (tmp_path / "quant" / room).symlink_to(f"../{room}")
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]

    def git(*arguments: str) -> None:
        subprocess.run([*own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def imported() -> subprocess.CompletedProcess[str]:
        code = [sys.executable, "-c", "import quant.formats.file"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)

    for arguments in (("init",), ("add", "."), ("commit", "-m", "all"), ("config", "core.symlinks", "false")):
        git(*arguments)
    for room in ("formats", "kernels", "recipes", "calibration", "export"):
        (tmp_path / "quant" / room).unlink()
    git("checkout", "--", ".")
    refused = imported()
    assert refused.returncode and "in a clone, run `git" in refused.stderr, refused.stderr
    for command in re.findall("`git ([^`]*)`", refused.stderr):
        git(*command.split())
    assert imported().returncode == 0


def latent(directory: Path, case: Path) -> Path:
    """A model whose cache keeps latent vectors, whose keys are wider than its values."""
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "head_dim": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    return with_tokenizer(tiny_models.build("DeepseekV3", "ForCausalLM", sizes), directory, case)


def hybrid(directory: Path, case: Path) -> Path:
    """A model whose layers keep states beside keys and values."""
    return with_tokenizer(tiny_models.build("FalconH1", "ForCausalLM", tiny_models.DECODER), directory, case)


def with_tokenizer(model: Any, directory: Path, case: Path) -> Path:
    model.save_pretrained(directory)
    for file in (case / "model").glob("token*"):
        shutil.copy(file, directory)
    return directory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (latent, "differ in shape; such a cache stays in 16 bit (--kv-cache 16bit)"),
        (hybrid, "have no quantized cache; generate with --kv-cache 16bit"),
    ],
)
def test_caches_that_stay_in_16_bit(make: Callable[[Path, Path], Path], says: str, case: Path, tmp_path: Path) -> None:
    command = f"generate {make(tmp_path / 'model', case)} --prompt hi --max-new-tokens 2 --kv-cache"
    result = invoke(case, f"{command} fp8")
    assert result.exit_code == 2 and says in result.stderr, result.output
    run(case, f"{command} 16bit")


def test_attention_in_fp8_is_exported_as_advised(case: Path, tmp_path: Path) -> None:
    run(case, f"plan make {{model}} --format fp8 --attention fp8 --calib {{ids}} {SMALL} --out {tmp_path}/plan.json")
    run(case, f"quantize {{model}} --plan {tmp_path}/plan.json --calib {{ids}} {SMALL} --out {tmp_path}/stored")
    for options, says in (
        (
            "--to aoti --out {out}.pt2",
            "which a package with a KV cache does not: pass --attention none, or --capacity 0",
        ),
        ("--to torch-tensorrt --target sm120 --out {out}", "torch-tensorrt has no op for that: pass --attention none"),
        ("--to onnx --kv-cache nvfp4 --out {out}", "the plan has attention in fp8; pass --attention none with it"),
        ("--to onnx --genai --out {out}", "no provider of onnxruntime has attention in FP8; pass --attention none"),
    ):
        result = invoke(case, f"export {tmp_path}/stored {options}")
        assert result.exit_code == 2 and says in result.stderr, result.output
    run(case, f"export {tmp_path}/stored --to onnx --genai --attention none --out {{out}}")


def test_the_line_to_try_latent_attention_works(case: Path, tmp_path: Path) -> None:
    data = f"--calib {{case}}/odd.safetensors {SMALL} --effort 0"
    told = run(
        case,
        f"quantize {latent(tmp_path / 'latent', case)} --format fp8_channel --kv-cache fp8 {data} --out {tmp_path}/out",
    )
    advised = re.search(r"try it:   quant (generate \S+) --prompt \".*\"(.*)\n", told)
    assert advised is not None, told
    run(case, f"{advised[1]} --prompt hi --max-new-tokens 2{advised[2]}")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"quant generate \. --prompt .{10,60} --kv-cache 16bit", page)


def test_merge_lora_takes_the_plan_that_it_asks_for() -> None:
    """The model without its plan, and the plan of another one; then the right plan."""
    peft = pytest.importorskip("peft", reason="the extra peft")

    def adapted() -> tuple[Any, Any]:
        made = quantized()
        config = quant.lora(peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]), made.model)
        model = peft.get_peft_model(made.model, config)
        del model.get_base_model().quantization_plan
        return model, made.plan

    model, plan = adapted()
    with pytest.raises(ValueError, match=r"pass the one that it was quantized by: merge_lora\(model, data, plan\)"):
        quant.merge_lora(model)
    with pytest.raises(ValueError, match=r"the plan does not quantize .*o_proj.*; pass the plan of this model"):
        quant.merge_lora(model, None, quant.make_plan(LINEARS(), "fp8_channel"))
    merged = quant.merge_lora(model, None, plan).model
    expected = quantized().model  # adapters of peft begin at zero
    assert torch.equal(merged(IDS).logits, expected(IDS).logits)


def test_what_a_decoder_refuses_to_read(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(case / "onnx")

    def generated(rows: int = 1, tokens: int = 1, new: int = 1) -> list[list[int]]:
        return generate_tokens(session, [[3] * tokens] * rows, new)

    for arguments, says in (
        ({"tokens": 0}, "a prompt holds no token; give some text with prompt="),
        ({"rows": 0}, "0 prompts, and this file takes 1 to "),
        ({"new": 0}, "max_new_tokens= is 0; expected 1 or more"),
        ({"tokens": 128}, "shorten it, lower max_new_tokens="),
    ):
        with pytest.raises(ValueError, match=says):
            generated(**arguments)
    assert len(generated(tokens=127)[0]) == 1
    row = sum(math.prod(cache.shape[1:]) * 4 for cache in session._session.get_inputs() if "past" in cache.name)
    monkeypatch.setattr(engine_session, "memory_left", lambda: 3 * row)
    with pytest.raises(
        ValueError, match=r"the KV cache of 4 rows .*; run fewer rows, or export with a smaller capacity="
    ):
        generated(rows=4)
    assert len(generated(rows=3)) == 3


def test_adapters_are_merged_as_advised(case: Path, tmp_path: Path) -> None:
    """By its folder, its file, and a folder that has the base's config too; a state dict with adapters says another."""
    peft = pytest.importorskip("peft", reason="the extra peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(case / "model")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "unmerged.safetensors")
    shutil.copytree(tmp_path / "adapter", tmp_path / "trained")
    shutil.copy(case / "model" / "config.json", tmp_path / "trained")
    places = [tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "trained"]
    for place in places:
        result = invoke(case, f"quantize {place} --format fp8_channel --out {{out}}")
        assert result.exit_code == 2 and "merge it into its base" in result.stderr, result.output
        call = re.search(r"peft\.PeftModel\..*save_pretrained\('merged'\)", result.stderr)
        assert call is not None
        exec(call[0].replace("'merged'", repr(str(tmp_path / "merged"))), {"peft": peft, "quant": quant})
        run(case, f"quantize {tmp_path / 'merged'} --format fp8_channel --out {{out}}")
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    result = invoke(case, f"quantize {tmp_path}/unmerged.safetensors --format fp8_channel --out {{out}}")
    assert result.exit_code == 2 and "model.merge_and_unload().state_dict()" in result.stderr, result.output
    save_file(dict(merged), tmp_path / "merged.safetensors")
    run(case, f"quantize {tmp_path}/merged.safetensors --format fp8_channel --out {{out}}")


def test_a_plan_with_a_cache_for_an_encoder_is_edited(case: Path, tmp_path: Path) -> None:
    tiny_models.bert().save_pretrained(tmp_path / "bert")
    run(case, f"plan make {tmp_path}/bert --format fp8_channel --out {tmp_path}/made.json")
    run(case, f"plan edit {tmp_path}/made.json --kv-cache fp8 --out {tmp_path}/cache.json")
    quantizes = f"quantize {tmp_path}/bert --calib {{ids}} {SMALL} --out {{out}} --plan {tmp_path}"
    result = invoke(case, f"{quantizes}/cache.json")
    advised = re.search(r"take `quant (plan edit .* --kv-cache 16bit --out) FILE`", result.stderr)
    assert result.exit_code == 2 and advised is not None, result.output
    run(case, f"{advised[1]} {tmp_path}/edited.json")
    run(case, f"{quantizes}/edited.json")


@pytest.mark.parametrize("family", ["llama", "mixtral", "bert", "vit", "t5", "gpt2"])
@pytest.mark.parametrize("meta", [False, True])
def test_a_config_without_sizes_builds_no_default_model(family: str, meta: bool, tmp_path: Path) -> None:
    getattr(tiny_models, family)().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: fields[key] for key in ("model_type", "architectures")}))
    with pytest.raises(ValueError, match=r"config\.json: \w+ would have [\d,]+ parameters, and its weights are"):
        quant.open_model(tmp_path, meta=meta)


def test_every_option_that_a_message_names_is_an_option() -> None:
    """Of our commands, or of another program in `others`."""
    options = {
        name for command in _commands(main) for each in command.params for name in (*each.opts, *each.secondary_opts)
    }
    others = {
        "--kv-cache-dtype", "--local-dir", "--no-deps", "--nproc-per-node", "--repo-type", "--check", "--merge",
        "--allow-requantize", *old_names.OPTIONS, *old_names.OF_PLANS, *old_names.RENAMED, "--help", "--help-all",
    }  # fmt: skip
    strange = []
    rooms = ("quant", "formats", "recipes", "kernels", "calibration", "export")
    for file in (file for room in rooms for file in (ROOT / room).rglob("*.py") if "vllm" not in str(file)):
        text = file.read_text(encoding="utf-8")
        named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}
        with in_command():
            named |= {option(name) for name in re.findall(r"option\(['\"](\w+)['\"]", text)}
        strange += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(named - options - others)]
    assert not strange


def _commands(group: click.Command) -> Iterator[click.Command]:
    if not isinstance(group, click.Group):
        yield group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        yield from _commands(group.get_command(context, name) or group)
