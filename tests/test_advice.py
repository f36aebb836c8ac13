"""Every way out that a refusal names is taken, on the case that was refused, and works.

A row of `COMMANDS` is a command that is refused, the words of its message that say what to do, and the arguments that
follow them: `add` and `drop` change the refused command, `instead` replaces it. Options that the message names are
those of the change. A row of `CALLS` is the same for Python.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from samples import TEXTS, write_short_base
from torch import nn

from quant.cli.main import main

transformers = pytest.importorskip("transformers", reason="the extra hf")


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
    (case / "short.txt").write_text((TEXTS / "calibration.txt").read_text(encoding="utf-8")[:200], encoding="utf-8")
    (case / "parts").mkdir()
    shutil.copytree(case / "model", case / "parts" / "checkpoint-500")
    shutil.copytree(case / "model", case / "parts" / "checkpoint-1000")
    (case / "one").mkdir()
    save_file(state, case / "one" / "weights.safetensors")
    save_file({"ids": torch.arange(3, 131).reshape(4, 32)}, case / "ids.safetensors")
    run(case, "quantize {model} --format fp8_channel --out {case}/stored")
    run(case, "plan make {model} --format nvfp4 --out {case}/plan.json")
    shutil.copytree(case / "stored", case / "taken")
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


FACTORY = "--model-factory test_advice:two_blocks"
Q, SMALL = "quantize {model} --out {out} ", "--calib-samples 2 --seqlen 16"
EXPORT = "export {stored} --out {out} "
INPUTS = "--input input_ids:int64:batch,sequence"

COMMANDS = [
    # quantize: what and where to
    Row("quantize {model} --format fp8_channel --out {case}/taken", "pass --overwrite", add="--overwrite"),
    Row("quantize {model} --format fp8_channel", "--out DIR", add="--out {out}"),
    Row("quantize {model} --format fp8_channel", "or pass --dry-run", add="--dry-run"),
    Row(
        "quantize {model} --format fp8_channel --out {model}/q",
        "name a place outside it",
        instead="quantize {model} --format fp8_channel --out {out}",
    ),
    Row(Q, "exactly one of --format", add="--format fp8_channel"),
    Row(Q + "--format fp8_channel --recipe nvfp4a16", "exactly one of --format, --recipe", drop="--recipe nvfp4a16"),
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
        "in fp8, fp8_head, or in 16bit",
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
        Q + "--format fp8 --calib {case}/short.txt --calib-samples 99 --seqlen 16",
        "or lower samples to",
        drop="--calib-samples 99",
        add="--calib-samples @samples␣to␣",
    ),
    Row(
        Q + "--format fp8 --calib {case}/short.txt --calib-samples 3 --seqlen 128",
        "or lower seqlen to",
        drop="--seqlen 128",
        add="--seqlen @seqlen␣to␣",
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
    Row("quantize {case}/whole.pt --format fp8_channel --out {out}", "pass --unsafe-load", add="--unsafe-load"),
    Row("quantize {case}/program.pt2 --format fp8_channel --out {out}", "pass --unsafe-load", add="--unsafe-load"),
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
    # plans
    Row(
        "plan make {model} --format nvfp4 --out {plan}",
        "pass --overwrite",
        instead="plan make {model} --format nvfp4 --out {case}/plan.json --overwrite",
    ),
    Row("plan edit {plan} --out {out}", "give --set 'GLOB=FORMAT'", add="--set *.down_proj=fp8_channel"),
    Row("plan edit {plan} --out {out}", "--kv-cache FORMAT", add="--kv-cache fp8"),
    Row("plan edit {plan} --out {out}", "--guard", add="--guard 0.1␣fp8␣keep"),
    Row("plan edit {plan} --out {out}", "--observer", add="--observer mse"),
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
    # evaluate and generate
    Row("evaluate {model} --samples 2 --seqlen 16", "--text", add="--text {text}"),
    Row("evaluate {model} --text {text} --shots 3 --samples 2 --seqlen 16", "leave them out", drop="--shots 3"),
    Row(
        "evaluate {model} --text {case}/short.txt --samples 99 --seqlen 8",
        "or lower samples to",
        drop="--samples 99",
        add="--samples @samples␣to␣",
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
    # checkpoints
    Row(
        "inspect {model}",
        "`quantize MODEL --format nvfp4 --out DIR`",
        instead="quantize {model} --format nvfp4 --out {out} --calib {ids} " + SMALL,
    ),
    Row(
        "report {stored} {stored} --receipt {plan} --out {out}", "leave it out to compare two", drop="--receipt {plan}"
    ),
    Row(
        "export {model} --to onnx --out {out}",
        "`quantize MODEL --format nvfp4 --out DIR`",
        instead="quantize {model} --format nvfp4 --out {out} --effort 0 --calib {ids} " + SMALL,
    ),
    # exports that are refused before anything is traced
    Row(EXPORT + "--to modelop", "'compressed-tensors'", drop="--to modelop", add="--to compressed-tensors"),
    Row(EXPORT + "--to compressed-tensors --genai", "has no use for --genai", drop="--genai"),
    Row("export {stored} --to compressed-tensors --out {case}/taken", "pass --overwrite", add="--overwrite"),
]


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: f"{row.refused} → {row.says}")
def test_what_a_refused_command_advises_works(row: Row, case: Path) -> None:
    follow(row, case)


def follow(row: Row, case: Path) -> None:
    result = invoke(case, row.refused)
    assert result.exit_code == 2 and row.says in result.stderr, f"{row.refused}: {result.output}"
    named = [word for word in row.add.split() if word.startswith("--") and not row.instead]
    known = ("--calib", "--calib-samples", "--seqlen", "--set", "--format", "--solver", "--samples", "--text")
    assert all(word in result.stderr or word in (*known, *row.drop.split()) for word in named), result.stderr
    # `@samples to ` stands for the number that the message has behind these words.
    advised = re.sub(r"@(\S+)", lambda m: re.search(rf"{m[1].replace('␣', ' ')}(\d+)", result.stderr)[1], row.advised)
    run(case, advised)
