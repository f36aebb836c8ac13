"""A request that cannot be met is refused before anything slow, in one line with the way out."""

import fcntl
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from plan_samples import planned
from safetensors.torch import save_file
from samples import BASE, GOLDENS, write_short_base
from torch import nn

import quant
from quant.base.errors import UserError
from quant.calibration.texts.sources import check_sources, packages_of_sources
from quant.cli.command import Command
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.verify import compare_with_source
from quant.recipes.layers import LayerKind, find_layers
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_check import check_plan_fits

transformers = pytest.importorskip("transformers", reason="the extra hf")

SIZES = {"num_hidden_layers": 1, "intermediate_size": 128}


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    save_file({"ids": torch.arange(64)}, tmp_path / "ids.safetensors")
    return tmp_path / "ids.safetensors"


def refused(out: Path, *arguments: object) -> str:
    given = [str(a) for a in (*arguments, "--out", out)]
    result = CliRunner().invoke(quantize_command, given)
    assert result.exit_code == 2 and not out.exists(), result.output
    # No bar: refused before the first slow step.
    assert re.fullmatch(r"\s*error: [^\n]+\n", result.stderr) and not result.stdout, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_models.bert_classifier, "gives [1, 2], and perplexity takes one prediction for each token"),
        (tiny_models.vit, "ViTForImageClassification cannot be evaluated on text: it does not run on token ids"),
        (tiny_models.t5, "encoder-decoder"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_first(make: type, message: str, tmp_path: Path, ids: Path) -> None:
    make().save_pretrained(tmp_path / "model")
    options = ("--eval", ids, "--eval-samples", 1, "--seqlen", 8)
    assert message in refused(tmp_path / "out", tmp_path / "model", "--format", "fp8_channel", *options)
    text = ("--text", str(ids), "--samples", "1", "--seqlen", "8")
    result = CliRunner().invoke(main, ["evaluate", str(tmp_path / "model"), *text])
    assert result.exit_code == 2 and message in result.stderr


def test_a_tokenizer_that_a_gguf_file_cannot_hold_is_seen_before_solving(tmp_path: Path, ids: Path) -> None:
    options = ("--format", "q8_0", "--calib", ids, "--calib-samples", 1, "--seqlen", 8)
    assert "llama.cpp has no tokenizer like this WordLevel one" in refused(tmp_path / "out.gguf", BASE, *options)


def test_a_model_of_images_is_not_calibrated_on_text(tmp_path: Path, ids: Path) -> None:
    tiny_models.vit().save_pretrained(tmp_path / "model")
    options = ("--calib", ids, "--calib-samples", 1, "--seqlen", 8)
    line = refused(tmp_path / "out", tmp_path / "model", "--format", "fp8", *options)
    assert "cannot be calibrated on text" in line and "choose a format that needs none, such as fp8_channel" in line


def test_images_calibrate_and_show_the_fusion_groups() -> None:
    """No `run`: the first image shows which layers share an input. Scales against the inputs themselves."""
    torch.manual_seed(0)
    model, images = tiny_models.vit(), torch.randn(3, 3, 32, 32)
    first = model.get_submodule("vit.layers.0.attention.q_proj")
    seen = []
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0].abs().max()))
    with torch.no_grad():
        model(images)
    handle.remove()
    plan = quant.quantize(model, "fp8", images).plan
    attention = "vit.layers.0.attention"
    assert plan.by_name[f"{attention}.v_proj"].group == f"{attention}.(q_proj|k_proj|v_proj)"
    scale = model.get_submodule(f"{attention}.q_proj").input_scale
    assert float(scale) == pytest.approx(float(seen[0]) / 448, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--solver", "gptq"), "solver gptq"),
        (("--kv-cache", "fp8"), "a KV cache in 8 bit (--kv-cache)"),
        (("--calib", __file__), "--calib"),
        (("--eval", __file__), "--eval"),
    ],
)
def test_a_state_dict_takes_no_option_that_needs_a_run(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    line = refused(tmp_path / "out", BASE / "model.safetensors", "--format", "nvfp4", *arguments)
    assert f"{named} takes a model that runs, and this is a bare state dict; pass --model-factory" in line


@pytest.mark.parametrize(
    ("arguments", "named"), [(("--guard", "0.1 fp8"), "guard"), (("--observer", "mse"), "observer")]
)
def test_a_state_dict_takes_no_plan_that_needs_a_run(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    model = BASE / "model.safetensors"
    plan = planned(model, tmp_path / "plan.json", "--format", "nvfp4", "--effort", "0", *arguments)
    line = refused(tmp_path / "out", model, "--plan", plan)
    assert re.search(rf"an? {named} takes a model that runs, and this is a bare state dict; pass --model-factory", line)


def test_a_plan_with_static_scales_is_not_for_a_state_dict(tmp_path: Path) -> None:
    model = quant.open_model(BASE, meta=True).model
    assert model is not None
    quant.make_plan(model, "nvfp4").save(tmp_path / "plan.json")
    line = refused(tmp_path / "out", BASE / "model.safetensors", "--plan", tmp_path / "plan.json")
    assert "self_attn.q_proj's static input scale takes a model that runs" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--format", "nvfp4", "--kv-cache", "fp9"),
            "--kv-cache fp9: checkpoints hold a KV cache in fp8, fp8_head or 16bit\n",
        ),
    ],
)
def test_options_that_would_do_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path / "out", BASE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "nvfp4", "--ctx", "100"), "--ctx means something to --fit only"),
        (("--bits", "5", "--batch", "4"), "--batch means something to --fit and --latency only"),
    ],
)
def test_options_of_plans_that_would_do_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["plan", "make", str(BASE), *arguments, "--out", str(tmp_path / "plan.json")])
    assert done.exit_code == 2 and message in done.stderr and not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("calib", [(), ("--calib", "absent.txt")])
def test_calibration_takes_at_least_one_row(calib: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [str(BASE), "--format", "fp8", "--calib-samples", "0", "--out", str(tmp_path / "out"), *calib]
    result = CliRunner().invoke(quantize_command, arguments)
    assert result.exit_code == 2 and "'--calib-samples': 0 is not in the range x>=1" in result.stderr


def test_a_kv_cache_in_16_bit_may_be_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        quantize_command, [str(BASE), "--format", "mxfp8", "--kv-cache", "16bit", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0 and Plan.load(tmp_path / "out" / "plan.json").kv_cache is None


def test_a_recipe_that_fits_nothing_says_why() -> None:
    odd = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 10))
    with pytest.raises(
        UserError, match=r"1 layer, 0 first: in = 40 is not a multiple of nvfp4's block of 16.*int8 take"
    ) as caught:
        quant.make_plan(odd, "nvfp4")
    advised = re.findall(r"int4a16_g\d+", str(caught.value))
    assert advised == ["int4a16_g64", "int4a16_g32"]
    for name in advised:
        wide = nn.Sequential(nn.Linear(int(name[9:]), 24))
        assert quant.make_plan(wide, name).quantized


def test_weights_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).to("meta")
    with pytest.raises(UserError, match=r"0: its weight is on the meta device.*make_plan plans without"):
        quant.quantize(model, "nvfp4a16")
    assert quant.make_plan(model, "nvfp4a16").effective_bits == 4.5 + 8 * 4 / 64**2


def test_a_plan_that_quantizes_a_shared_weight(tmp_path: Path) -> None:
    """Made for an untied model; this one's head would read the embedding's codes as numbers."""
    apart, tied = (tiny_models.llama(**SIZES, tie_word_embeddings=tie) for tie in (False, True))
    recipe = quant.Recipe("heads", "fp8_channel", "fp8_token", rules=(quant.Rule("model.embed_tokens", "fp8_channel"),))
    plan = quant.make_plan(apart, recipe)
    check_plan_fits(plan, find_layers(apart))
    with pytest.raises(UserError, match=r"model\.embed_tokens: its weight is also that of lm_head in the model"):
        quant.quantize(tied, plan)
    tied.save_pretrained(tmp_path / "model")
    plan.save(tmp_path / "plan.json")
    line = refused(tmp_path / "out", tmp_path / "model", "--plan", tmp_path / "plan.json")
    assert "model.embed_tokens: its weight is also that of lm_head in the model" in line


def test_an_embedding_is_set_by_its_format_alone(tmp_path: Path) -> None:
    model = quant.open_model(BASE, meta=True).model
    assert model is not None
    quant.make_plan(model, "nvfp4").save(tmp_path / "plan.json")
    options = ["--set", "model.embed_tokens=nvfp4", "--out", str(tmp_path / "edited.json")]
    result = CliRunner().invoke(main, ["plan", "edit", str(tmp_path / "plan.json"), *options])
    assert result.exit_code == 0, result.output
    edited = Plan.load(tmp_path / "edited.json").by_name["model.embed_tokens"]
    assert str(edited.weight) == "nvfp4" and edited.activation is None


def test_what_a_guard_changed_is_in_the_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = planned(BASE, tmp_path / "plan.json", "--format", "nvfp4a16", "--guard", "1e-6")
    result = CliRunner().invoke(quantize_command, [str(BASE), "--plan", str(plan), "--out", str(out)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "nothing is quantized" in said and "the guard '1e-6' gave 14 of 14 layers another format, 14 of them" in said


@pytest.mark.parametrize("guard", ["1e-6", "1e-6 fp8_channel"])
def test_a_guard_after_scales_were_folded(guard: str, tmp_path: Path) -> None:
    """Layers that stay in 16 bit, whose scales are in other tensors; of two attempts a note is said once."""
    write_short_base(tmp_path / "model")
    save_file({"ids": torch.arange(3, 35).reshape(2, 16)}, tmp_path / "ids.safetensors")
    plan = planned(
        tmp_path / "model", tmp_path / "plan.json", "--format", "nvfp4", "--solver", "awq:merge+gptq", "--guard", guard
    )
    arguments = [tmp_path / "model", "--plan", plan, "--calib", tmp_path / "ids.safetensors", "--out", tmp_path / "out"]
    options = ["--calib-samples", "2", "--seqlen", "16"]
    result = CliRunner().invoke(quantize_command, [*map(str, arguments), *options])
    assert result.exit_code == 0, result.output
    reasons = [each.reason for each in Plan.load(tmp_path / "out" / "plan.json").layers if "exceeds" in each.reason]
    assert [each.count("more text would do better") for each in reasons] == [int("fp8" in guard)] * 7
    differences = compare_with_source(tmp_path / "out", tmp_path / "model")
    assert differences and all("folds the input scales" in (each.reason or "") for each in differences)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_no_memory_is_one_line(library: str) -> None:
    """Asked of the allocators themselves, for more than there is; any other error of torch is a defect, and said so."""

    @click.command(cls=Command)
    @click.option("--fail", is_flag=True)
    def command(fail: bool) -> None:
        if fail:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        torch.empty(1 << 60, dtype=torch.uint8) if library == "torch" else np.empty(1 << 60, dtype=np.uint8)

    result = CliRunner().invoke(command)
    assert result.exit_code == 2 and re.fullmatch(r"error: out of memory: [^\n]+\n", result.stderr)
    result = CliRunner().invoke(command, ["--fail"])
    assert result.exit_code == 70
    assert re.fullmatch(
        r"error: this is a bug in Blockscale: run with --debug, and report what that prints \(RuntimeError at "
        r"test_refusals\.py:\d+: mat1 and mat2 shapes cannot be multiplied\)\n",
        result.stderr,
    )
    assert isinstance(CliRunner().invoke(command, ["--fail", "--debug"]).exception, RuntimeError)


@pytest.mark.parametrize("out", ["runs", "runs/model"])
def test_the_model_is_not_replaced_by_its_result(out: str, tmp_path: Path) -> None:
    """This holds even for a directory that an earlier run wrote."""
    llama().save_pretrained(tmp_path / "runs" / "model")
    for place in (tmp_path / "runs", tmp_path / "runs" / "model"):
        (place / "plan.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    options = ["--format", "mxfp8", "--out", str(tmp_path / out), "--overwrite"]
    result = CliRunner().invoke(quantize_command, [str(tmp_path / "runs" / "model"), *options])
    assert result.exit_code == 2 and "which it would replace; name another place" in result.stderr
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_no_output_lies_in_the_model_or_replaces_a_text(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    for file in ("plan.json", "text.txt"):
        (tmp_path / "run" / file).write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for out, more in (("model/out", []), ("run", ["--calib", str(tmp_path / "run" / "text.txt")])):
        options = ["--format", "mxfp8", "--out", str(tmp_path / out), "--overwrite", *more]
        result = CliRunner().invoke(quantize_command, [str(tmp_path / "model"), *options])
        assert result.exit_code == 2 and "; name a" in result.stderr
    for arguments in (
        ["sensitivity", "MODEL", "--out", "MODEL/config.json"],
        ["report", "MODEL", "--out", "MODEL/config.json"],
        ["plan", "edit", "RUN/plan.json", "--kv-cache", "keep", "--out", "RUN/plan.json", "--overwrite"],
    ):
        named = [a.replace("MODEL", str(tmp_path / "model")).replace("RUN", str(tmp_path / "run")) for a in arguments]
        result = CliRunner().invoke(main, named)
        assert result.exit_code == 2 and "; name a" in result.stderr, result.output
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def llama() -> nn.Module:
    model: nn.Module = tiny_models.llama(**SIZES)
    return model


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["some text"], r"a str without tensors; for texts, quant.calibration_rows\(data"),
        (torch.zeros(8, dtype=torch.int64), r"data is \[8\] in torch.int64; expected int64 ids \[rows, seqlen\]"),
        (torch.zeros(0, 8, dtype=torch.int64), r"data is \[0, 8\]"),
        (torch.zeros(2, 8, dtype=torch.int16), r"data is \[2, 8\] in torch.int16; expected int64 ids"),
    ],
)
def test_data_that_is_no_rows(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quant.quantize(llama(), "nvfp4", data)


def test_one_glob_needs_no_list() -> None:
    kept = quant.make_plan(llama(), "fp8_channel", exclude="*.mlp.*")
    assert not any(".mlp." in layer.name for layer in kept.quantized) and len(kept.quantized) == 4
    only = quant.make_plan(llama(), "fp8_channel", include="*.mlp.*")
    assert [layer.name.rpartition(".")[2] for layer in only.quantized] == ["gate_proj", "up_proj", "down_proj"]


def test_what_is_quantized_is_quantized_once_and_saved_with_its_plan(tmp_path: Path) -> None:
    result = quant.quantize(llama(), "fp8_channel")
    with pytest.raises(UserError, match="quantized already, by Blockscale; start from the original"):
        quant.quantize(result.model, "mxfp8")
    with pytest.raises(ValueError, match=r"self_attn.q_proj: the plan has it in fp8_channel, and the model holds no"):
        quant.save(llama(), result.plan, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device cuda: PyTorch sees no GPU here"):
        quant.quantize(llama(), "nvfp4", torch.zeros(1, 8, dtype=torch.int64), solver="gptq", device="cuda")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_warning_of_ours_is_one_line(quiet: bool) -> None:
    """And none with --quiet; what others warn of goes its way."""

    @click.command(cls=Command)
    @click.option("--quiet", is_flag=True)
    def command(quiet: bool) -> None:
        net = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
        quant.quantize(net, "fp8", -torch.ones(8, 64))
        warnings.warn("another's", stacklevel=1)

    with pytest.warns(UserWarning, match="another") as caught:
        said = CliRunner().invoke(command, ["--quiet"] if quiet else []).stderr
    ours = re.findall(r"(?m)^warning: 1: its input was zero in all calibration data, .+ such as fp8_token$", said)
    assert len(ours) == (not quiet) and said.count("zero") == (not quiet)
    assert [(str(each.message), each.filename) for each in caught] == [("another's", __file__)]


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", BASE, "--format", "fp8_channel"),
        ("export", GOLDENS / "compressed_tensors" / "NVFP4", "--to", "modelopt"),
        ("plan", "edit", "PLAN", "--kv-cache", "keep"),
        ("sensitivity", BASE),
    ],
)
def test_a_place_that_another_process_writes_to_is_refused(command: tuple[object, ...], tmp_path: Path) -> None:
    """A lock belongs to an open file, so that this process can stand for another one."""
    Plan(()).save(tmp_path / "PLAN")
    arguments = [str(tmp_path / "PLAN") if part == "PLAN" else str(part) for part in command]
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242")
        lock.flush()
        result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and not (tmp_path / "out").exists(), result.output
    assert result.stderr == f"error: {tmp_path / 'out'}: process 4242 is writing to it; wait for it, or stop it\n"


def test_a_reader_that_leaves_stops_nothing(tmp_path: Path) -> None:
    layers = tuple(LayerPlan(f"layers.{i}", LayerKind.LINEAR, (64, 64)) for i in range(2000))  # more than a pipe holds
    Plan(layers).save(tmp_path / "plan.json")
    edit = f"plan edit {tmp_path / 'plan.json'} --set 'layers.*=mxfp8' --json --out {tmp_path / 'new.json'}"
    script = f"set -o pipefail; {sys.executable} -m quant {edit} | head -c 10"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{\n "before', "")
    assert all(layer.weight is not None for layer in Plan.load(tmp_path / "new.json").layers)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_process_without_streams_works(closed: str, tmp_path: Path) -> None:
    Plan((LayerPlan("layer", LayerKind.LINEAR, (64, 64)),)).save(tmp_path / "plan.json")
    edit = f"plan edit {tmp_path / 'plan.json'} --set layer=mxfp8 --out {tmp_path / 'new.json'}"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m quant {edit} {closed}"], capture_output=True, check=False
    )
    assert done.returncode == 0 and b"Error" not in done.stderr
    assert str(Plan.load(tmp_path / "new.json").by_name["layer"].weight) == "mxfp8"


@pytest.mark.parametrize("option", ["out", "calib", "MODEL"])
def test_names_that_are_not_utf8_are_refused_first(option: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"m\xf6del")
    (tmp_path / name).mkdir()
    values = {"MODEL": str(BASE), "out": str(tmp_path / "out"), "calib": str(BASE), option: str(tmp_path / name)}
    arguments = [values["MODEL"], "--format", "fp8_channel", "--out", values["out"], "--calib", values["calib"]]
    result = CliRunner().invoke(main, ["quantize", *arguments])
    assert result.exit_code == 2 and "\\udcf6del: not UTF-8, in which plans and reports are written" in result.stderr


def test_names_in_files_do_not_command_the_terminal(tmp_path: Path) -> None:
    place = tmp_path / "a\x1b[2Jb"
    Plan((LayerPlan("c\x9b\x7f", LayerKind.LINEAR, (64, 64), reason="\x1b[31mred"),)).save(tmp_path / "plan.json")
    edit = ["plan", "edit", str(tmp_path / "plan.json"), "--set", "*=mxfp8", "--out"]
    for more in ([str(place)], [str(tmp_path / "b"), "--json"]):
        result = CliRunner().invoke(main, [*edit, *more])
        assert result.exit_code == 0 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.output), result.output
    assert json.loads(result.stdout)["layers"][0]["name"] == "c\x9b\x7f"


@pytest.mark.parametrize("seed", [2**70, -1])
def test_a_seed_has_63_bits(seed: int, tmp_path: Path) -> None:
    options = ["quantize", str(BASE), "--format", "fp8_channel", "--seed", str(seed), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2 and f"{seed} is not in the range 0<=x<=9223372036854775807" in result.stderr


def test_weights_that_a_format_takes_to_infinity_are_named(tmp_path: Path, ids: Path) -> None:
    """3e38 is a number of BF16; six times the power of two that MXFP4 needs for it is none of float32."""
    model = tiny_models.llama(dtype=torch.bfloat16, **SIZES)
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] = 3e38
    model.save_pretrained(tmp_path / "model")
    options = ["quantize", str(tmp_path / "model"), "--format", "mxfp4a16", "--out", str(tmp_path / "out"), "--quiet"]
    result = CliRunner().invoke(main, options)
    message = "model.layers.0.mlp.down_proj: weights of up to 3e+38 are infinite in mxfp4; keep the layer in 16 bit"
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert CliRunner().invoke(main, [*options, "--exclude", "*.down_proj"]).exit_code == 0


def test_a_source_that_cannot_be_read_is_refused_before_the_model_is_opened(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UserError, match=r"--calib .*empty\.csv: empty, it holds no text"):
        check_sources([f"mix+{tmp_path / 'empty.csv'}"], "--calib")
    with pytest.raises(UserError, match=r"--calib absent\.parquet: no such file"):
        check_sources(["absent.parquet"], "--calib")
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}')
    sources = [f"{tmp_path / 'chats.jsonl'}#text", "self", "hf:some/name"]
    check_sources(sources, "--calib")
    assert packages_of_sources(sources) == ["datasets"]
    # Neither objects in lines nor a folder of images takes a package to be found.
    assert packages_of_sources([*sources[:2], str(tmp_path), "mix"]) == []


def test_a_dry_run_refuses_a_model_without_text_as_the_run_does(tmp_path: Path) -> None:
    tiny_models.vit().save_pretrained(tmp_path / "vit")
    options = [str(tmp_path / "vit"), "--dry-run", "--format"]
    refused = CliRunner().invoke(quantize_command, [*options, "nvfp4"])
    assert refused.exit_code == 2 and "inputs have a static scale; pass calibration data" in refused.output
    # Without static scales, effort 1 takes the place of the default, in the plan that is shown too.
    shown = CliRunner().invoke(quantize_command, [*options, "nvfp4a16", "--effort", "2", "--json"])
    layers = json.loads(shown.stdout)["layers"]
    assert {layer["solver"] for layer in layers if layer["weight"] == "nvfp4"} == {"mse"}


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    script = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    script += "from quant.cli.main import main; main(['plan', 'show', 'plan.json'])"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: the working directory was deleted; change to one that exists, and run the command again\n"
    )
