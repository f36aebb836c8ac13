"""Refusals of exports, plans and caches that no other test causes, and the way out that each one names."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from samples import ROOT, write_short_base

import quant
from quant.cli.main import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*takes the file for token ids alone:UserWarning", "ignore:.*keeps the KV cache of this:UserWarning",
    "ignore:.*is a node of our plugin:UserWarning", "ignore:.*does not load this file:UserWarning",
    "ignore:the inputs of 7 layers:UserWarning", "ignore:.*does not run on a processor:UserWarning",
)  # fmt: skip
transformers = pytest.importorskip("transformers", reason="the extra hf")

DATA = "--calib {case}/ids.safetensors --calib-samples 2 --seqlen 16"
PLAN = f"plan make {{case}}/model --bits 9 {DATA} --out {{out}}"
DISTILL = "distill {case}/stored --teacher {case}/model --steps 1 --data {case}/ids.safetensors --seqlen 16 "
DISTILL += "--batch-size 2 --out {out}"
EXPORT = "export {case}/stored --to onnx --out {out}"
GENERATE = "generate {case}/stored --prompt hi --max-new-tokens 2"
SHARE = "plan edit {case}/plan.json --out {out} --set *.q_proj=fp8_channel"
FACTORY = "--model-factory test_advice_of_exports:small"
INPUTS = "--input input_ids:int64:1,sequence"
WIDE = "evaluate {case}/wide --text {case}/ids.safetensors --samples 1 --seqlen 16"


def small() -> Any:
    """The module of the directory `bare`."""
    return tiny_models.llama(num_hidden_layers=1)


def with_tokenizer(model: Any, directory: Path, base: Path) -> None:
    model.save_pretrained(directory)
    for file in base.glob("token*"):
        shutil.copy(file, directory)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and checkpoints that commands name."""
    case = tmp_path_factory.mktemp("exports")
    write_short_base(case / "model")
    shutil.copytree(case / "model", case / "plain", ignore=shutil.ignore_patterns("token*"))
    save_file({"ids": torch.arange(3, 131).reshape(4, 32) % 60}, case / "ids.safetensors")
    save_file({k: v.contiguous() for k, v in small().state_dict().items()}, case / "state.safetensors")
    vocabulary = json.loads((case / "model" / "config.json").read_text())["vocab_size"]
    for name, width in (("wide320", 320), ("odd24", 24), ("held64", 64)):
        model = tiny_models.llama(num_hidden_layers=1, head_dim=width, vocab_size=vocabulary)
        with_tokenizer(model, case / name, case / "model")
    bloom = tiny_models.build("Bloom", "ForCausalLM", tiny_models.DECODER, vocab_size=vocabulary)
    with_tokenizer(bloom, case / "bloom", case / "model")
    tiny_models.bert().save_pretrained(case / "bert")
    cache = f"--kv-cache fp8 {DATA} --effort 0"
    for command in (
        "quantize {case}/model --format fp8_channel --out {case}/stored",
        "quantize {case}/plain --format int4_g32@16bit --effort 0 --out {case}/eight",
        "quantize {case}/state.safetensors --format fp8_channel --out {case}/bare",
        "plan make {case}/model --format nvfp4 --out {case}/plan.json",
        f"quantize {{case}}/wide320 --format fp8_channel {cache} --out {{case}}/wide",
        f"quantize {{case}}/held64 --format fp8_channel {cache} --out {{case}}/scaled",
    ):
        followed(case, command, case / "out")
    (case / "taken.gguf").touch()
    tensors = load_file(case / "scaled" / "model.safetensors")
    for part in "kv":
        name = f"model.layers.0.self_attn.{part}_scale"
        tensors[name] = tensors[name].expand(3).clone()
    save_file(tensors, case / "scaled" / "model.safetensors", {"format": "pt"})
    return case


def run(case: Path, command: str, out: Path) -> Result:
    words = [word.format(case=case, out=out) for word in command.split()]
    return CliRunner().invoke(main, words)


def followed(case: Path, command: str, out: Path) -> str:
    result = run(case, command, out)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.stderr


# A command without its last option, which is refused; the words of the refusal; and what follows them.
COMMANDS = {
    "the power of a runtime": (PLAN, "--target vllm --power 30W", "--power 30W needs a GPU: --target orin\n",
        "--target orin --power 30W"),
    "a power that a GPU lacks": (PLAN, "--target orin --power 33W", "33W: orin has modes of 15 W, 30 W, 50 W\n",
        "--target orin --power 15W"),
    "a power of a GPU without modes": (PLAN, "--target thor --power 33W",
        "no power mode of thor is known here, but of orin; leave it out\n", "--target thor"),
    "a target that is none": (PLAN, "--target orim", "did you mean orin", "--target orin"),
    "part of a fusion group": (SHARE, "", "Include model.layers.0.self_attn.k_proj, model.",
        "--set *.k_proj=fp8_channel --set *.v_proj=fp8_channel"),
    "part of a fusion group, whole": (SHARE, "", "too, or pass --whole-groups\n", "--whole-groups"),
    "a head of an encoder": ("plan make {case}/bert --format fp8_channel --out {out}", "--lm-head fp8_channel",
        "this model has no output head; leave that out", ""),
    "a teacher in the checkpoint": (DISTILL, "--cache-teacher {out}/teacher",
        "lies in --out, whose files belong to the checkpoint; name another\n", "--cache-teacher {out}.teacher"),
    "a rate that is too large": (DISTILL, "--lr 1", "so nothing was written; lower --lr (it was 1)\n", "--lr 1e-9"),
    "a module without a config": ("check {case}/bare", "", "name its module with --model-factory", FACTORY),
    "arguments that are no JSON": ("check {case}/stored", "--engine {{", "such as '{\"seed\": 1}' (", "--engine {{}}"),
    "arguments that are no object": ("check {case}/stored", "--engine []",
        "--engine: no JSON object of arguments, such as '{\"seed\": 1}' (expected an object, not [])\n",
        '--engine {{"seed":1}}'),
    "draws of a model": (GENERATE, "--temperature 1", "MODEL runs by greedy decoding; pass --engine FILE",
        "--engine {case}/onnx --temperature 1"),
    "a dtype of a file": (GENERATE + " --engine {case}/onnx", "--dtype fp16", "as it was exported; leave it out", ""),
    "no token to draw": (GENERATE + " --engine {case}/onnx --temperature 1", "--top-p 0",
        "--top-p is 0.0; expected above 0 and at most 1\n", "--top-p 1"),
    "a negative temperature": (GENERATE + " --engine {case}/onnx", "--temperature -1",
        "--temperature is -1.0; expected 0 or more\n", "--temperature 0"),
    "heads that no kernel holds": (WIDE, "", "it has heads of 320, and quantized attention and KV caches take at most "
        "256; take --attention 16bit and --kv-cache 16bit\n", "--attention 16bit --kv-cache 16bit"),
    "a cache of such heads": ("generate {case}/wide --prompt hi --max-new-tokens 2", "",
        "it must be a multiple of 16, at most 256; take --kv-cache 16bit\n", "--kv-cache 16bit"),
    "an attention of its own": ("generate {case}/bloom --prompt hi --max-new-tokens 2", "--kv-cache fp8",
        "BloomForCausalLM: found attention of 0 of 2 layers; generate with --kv-cache 16bit\n", "--kv-cache 16bit"),
    "a file that is there": ("export {case}/eight --to gguf", "--out {case}/taken.gguf", "or choose another --out\n",
        "--out {out}.gguf"),
    "an option of another kind": ("export {case}/stored --to modelopt --out {out}", "--capacity 32",
        "--to modelopt has no use for --capacity; it is for --to onnx, --to tensorrt, --to aoti\n", ""),
    "a source that is not quantized": ("check {case}/onnx --max-new-tokens 2", "--source {case}/model",
        "is not quantized: name the checkpoint that ", "--source {case}/stored"),
}  # fmt: skip
EXPORTS = {
    "a head for TensorRT": (EXPORT, "--target tensorrt --lm-head int8", "tensorrt does not take it; leave it out\n",
        "--target tensorrt"),
    "a capacity for genai": (EXPORT + " --genai", "--capacity 32", "its inputs are fixed; leave --capacity out\n", ""),
    "inputs for genai": (EXPORT + " --genai", INPUTS, "its inputs are fixed; leave --input out\n", ""),
    "two shapes": (EXPORT, "--shapes sequence=1:8", "has 2 shapes; write MIN:OPT:MAX, or one\n", "--shapes sequence=8"),
    "a dimension of two numbers": (EXPORT, "--shapes sequence=1x8", "is one dimension; write sequence=1:128:512\n",
        "--capacity 0 --shapes sequence=1:32:64"),
    "a shape of one number": (EXPORT, "--shapes input_ids=8", "input_ids [batch, sequence] has 2 dimension(s)\n",
        "--shapes input_ids=1x8"),
    "a fixed dimension": (EXPORT + " --capacity 0 " + INPUTS, "--shapes input_ids=2x8",
        "input_ids [1, sequence] is fixed at 1, not 2:2:2\n", "--shapes input_ids=1x8"),
    "scales of another model": ("export {case}/scaled --to onnx --target tensorrt --capacity 64 --out {out}",
        "--dtype fp16 --kv-cache fp8", "scales of K and V for 2 KV heads; quantize again, or pass --kv-cache 16bit\n",
        "--kv-cache 16bit"),
}  # fmt: skip


def check_advice(case: Path, row: tuple[str, str, str, str], out: Path) -> None:
    command, wrong, says, right = row
    result = run(case, f"{command} {wrong}", out)
    # `quant check` says why it makes no forward pass, and succeeds.
    assert result.exit_code == (0 if FACTORY in right else 2) and says in result.stderr, result.output
    told = followed(case, f"{command} {right}", out)
    assert says not in told


@pytest.mark.parametrize("name", [name for name in COMMANDS if "{case}/onnx" not in "".join(COMMANDS[name])])
def test_the_way_out_of_a_refused_command_works(name: str, case: Path, tmp_path: Path) -> None:
    check_advice(case, COMMANDS[name], tmp_path / "out")


@pytest.fixture(scope="module")
def exported(case: Path) -> Path:
    followed(case, EXPORT, case / "onnx")
    return case


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if "{case}/onnx" in "".join(COMMANDS[name])])
def test_the_way_out_of_a_refused_file_works(name: str, exported: Path, tmp_path: Path) -> None:
    check_advice(exported, COMMANDS[name], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_the_way_out_of_a_refused_export_works(name: str, case: Path, tmp_path: Path) -> None:
    check_advice(case, EXPORTS[name], tmp_path / "out")


@pytest.mark.parametrize(("width", "measures"), [(320, "--kv-cache 16bit"), (24, ""), (64, None)])
def test_the_lines_to_use_a_checkpoint_work_whatever_its_heads(
    width: int, measures: str | None, case: Path, tmp_path: Path
) -> None:
    """Heads that no kernel holds at all, that only the cache does not hold, and usual ones."""
    model = next(case.glob(f"*{width}"))
    command = f"quantize {model} --format fp8_channel --kv-cache fp8 {DATA} --effort 0 --out {{out}}"
    told = followed(case, command, tmp_path / "out")
    flag = "" if measures is None else "--kv-cache 16bit"
    generate = re.search(r"try it:   quant (generate \S+) --prompt \"[^\"]*\" ?(.*)\n", told)
    evaluate = re.search(r"measure:  quant (evaluate .*)\n", told)
    assert generate is not None and evaluate is not None and generate[2] == flag, told
    assert evaluate[1].endswith("--kv-cache 16bit") == (measures == "--kv-cache 16bit")
    followed(case, f"{generate[1]} --prompt hi --max-new-tokens 2 {generate[2]}", tmp_path)
    data = evaluate[1].replace("FILE", f"{case}/ids.safetensors")
    followed(case, f"{data} --samples 1 --seqlen 16", tmp_path)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert ("--kv-cache 16bit" in page) == bool(flag)


def test_a_check_names_no_option_that_it_lacks(case: Path, tmp_path: Path) -> None:
    told = followed(case, "check {case}/wide", tmp_path)
    why = "LlamaForCausalLM has heads of 320, and quantized attention and KV caches take at most 256"
    assert f"forward pass: not checked, {why}\n" in told


@pytest.mark.slow
def test_scales_of_a_cache_are_passed_as_advised(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx")
    from quant.calibration.attention_scales import collect_attention_scales
    from quant.export.onnx.export_onnx import write_onnx
    from quant.formats.format import FORMATS

    model = tiny_models.llama(num_hidden_layers=1, head_dim=64, dtype=torch.float16).eval()
    options = {"capacity": 64, "kv_cache": FORMATS["nvfp4"]}
    with pytest.raises(ValueError, match="pass attention_scales of collect_attention_scales"):
        write_onnx(model, tmp_path / "model.onnx", **options)
    rows = torch.arange(3, 35).reshape(2, 16)
    scales = collect_attention_scales(model, rows, kv_format=FORMATS["nvfp4"], attention_format=None)
    write_onnx(model, tmp_path / "model.onnx", attention_scales=scales, **options)
    assert (tmp_path / "model.onnx").is_file()


def test_names_that_a_refused_call_lists_work(tmp_path: Path) -> None:
    from quant.generate.generate import cast_unquantized
    from quant.generate.quantized_attention import quantized_attention

    model, ids = small().eval(), torch.arange(3, 19)[None]
    with pytest.raises(quant.UserError, match=r'dtype="half": unknown; known: .*float16'):
        cast_unquantized(model, "half")
    cast_unquantized(model, "float16")
    assert model.dtype == torch.float16
    model = model.float()
    with pytest.raises(quant.UserError, match='attention="int8": unknown; known: fp8, 16bit'):
        quantized_attention(model, attention="int8").__enter__()
    with torch.no_grad(), quantized_attention(model, attention="fp8"):
        assert model(ids).logits.isfinite().all()


@pytest.mark.slow
def test_engines_are_built_and_checked_as_advised(case: Path, tmp_path: Path) -> None:
    """FP8 attention of TensorRT has a smallest sequence; and a file that is no engine is exported as `check` says."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    followed(case, f"plan make {{case}}/held64 --format fp8 --attention fp8 {DATA} --out {{out}}", tmp_path / "a.json")
    followed(case, f"quantize {{case}}/held64 --plan {tmp_path}/a.json {DATA} --out {{out}}", tmp_path / "stored")
    export = f"export {tmp_path}/stored --to tensorrt --target sm120 --dtype fp16 {DATA} --out {{out}} --shapes "
    for capacity, shapes, says in (
        (64, "sequence=8:16:48", "needs one token or at least 32: start it there, or export with --attention none"),
        (0, "sequence=8:48:64", "needs at least 32: start it there, or export with --attention none"),
    ):
        engine = tmp_path / f"{capacity}.engine"
        refused = run(case, f"{export}{shapes} --capacity {capacity}", engine)
        assert refused.exit_code == 2 and says in refused.stderr, refused.output
        started = shapes.replace("=8:16", "=32:40").replace("=8:", "=32:")
        followed(case, f"{export}{started} --capacity {capacity}", engine)
    without = export.replace(DATA, "--attention none")
    followed(case, f"{without}{shapes} --capacity 0", tmp_path / "none.engine")
    export = f"export {tmp_path}/stored --to onnx --target onnxruntime --out {{out}}"
    refused = run(case, export, tmp_path / "onnx")
    assert refused.exit_code == 2 and refused.stderr.endswith(" run it (--to tensorrt), or pass --attention none\n")
    followed(case, f"{export} --attention none", tmp_path / "onnx")
    (tmp_path / "other.engine").write_bytes(bytes(range(64)))
    refused = run(case, "check {out}", tmp_path / "other.engine")
    assert refused.exit_code == 2 and "no compiled program found in it; `quant check` reads" in refused.stderr
    followed(case, "check {out}", tmp_path / "none.engine")


def test_the_extra_that_is_named_has_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.export.onnx import limits

    monkeypatch.setattr(limits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package `onnxruntime`: pip install .*\[onnx\]"):
        limits.loaded(Path("model.onnx"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any(re.match(r"onnxruntime\b(?!-)", package) for package in extras["onnx"])
