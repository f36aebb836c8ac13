"""The commands print and write what they should, and every mistake is one line with exit code 2."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_models
import tiny_processors
import torch
from click.testing import CliRunner, Result
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from samples import BASE, TEXTS

from quant.base import old_names
from quant.base.errors import loss_text
from quant.calibration.walk import walk
from quant.cli import console
from quant.cli.main import COMMANDS, main
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.models.open_model import open_model
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import presets
from quant.report.report import Report
from quant.report.summary import summary
from quant.run.run import solving_steps

pytest.importorskip("transformers")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def run(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def quantize_base(out: Path, *arguments: object) -> Result:
    return run(quantize_command, BASE, "--out", out, "--quiet", *arguments)


def tree(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*")}


def refused(result: Result) -> str:
    """The one line of a refused command."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the golden model that a test may damage."""
    return Path(shutil.copytree(BASE, tmp_path / "model"))


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def put_nans(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, :5] = torch.nan


# The main job


def test_quantize_writes_what_its_report_says(tmp_path: Path) -> None:
    result = run(quantize_command, BASE, "--format", "nvfp4a16", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    report = json.loads(result.stdout)
    out = tmp_path / "out"
    assert json.loads((out / "report.json").read_text()) == report
    assert {p.name for p in out.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "plan.json",
        "report.html",
        "report.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    plan = Plan.load(out / "plan.json")
    assert len(plan.quantized) == 14 and report["plan_digest"] == plan.digest()
    # As `plan show` counts, but for the four bytes that a static scale of inputs would take.
    assert report["bytes_after"] == sum(x.nbytes for x in load_file(out / "model.safetensors").values()) == plan.nbytes
    assert plan.provenance["recipe"] == "nvfp4a16" and plan.provenance["seed"] == 0
    # SNR of one layer, in float64 from the weight and the file.
    name = "model.layers.0.mlp.down_proj"
    weight = load_file(BASE / "model.safetensors")[f"{name}.weight"].double()
    error = load(out).get_submodule(name).dequantize(torch.float64) - weight
    expected = 10 * float(torch.log10(weight.square().sum() / error.square().sum()))
    assert next(x["snr_db"] for x in report["layers"] if x["name"] == name) == pytest.approx(expected, abs=1e-3)


def test_processors_of_images_and_sounds_come_along(model: Path, tmp_path: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json", "notes.json"):
        (model / name).write_text(f'{{"of": "{name}"}}')
    result = run(quantize_command, model, "--format", "mxfp8", "--out", tmp_path / "out", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"of": "preprocessor_config.json"}'
    assert (tmp_path / "out" / "processor_config.json").exists() and (tmp_path / "out" / "notes.json").exists()


def test_quantize_says_where_it_wrote_on_stderr_only(tmp_path: Path) -> None:
    result = run(quantize_command, BASE, "--format", "mxfp8", "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.stdout == ""
    assert "written to" in result.stderr
    quiet = run(quantize_command, BASE, "--format", "mxfp8", "--out", tmp_path / "quiet", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_a_calibration_text_gives_static_scales(tmp_path: Path) -> None:
    text = tmp_path / "ids.safetensors"
    save_file({"ids": torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))}, text)
    options = ("--format", "fp8", "--calib", text, "--calib-samples", 2, "--seqlen", 16)
    assert quantize_base(tmp_path / "out", *options).exit_code == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {n: t for n, t in tensors.items() if n.endswith(".input_scale")}
    assert len(scales) == 14 and all(t.shape == (1,) for t in scales.values())
    caught: list[torch.Tensor] = []
    model = open_model(BASE).model
    down = model.get_submodule("model.layers.1.mlp.down_proj")
    down.register_forward_pre_hook(lambda module, args: caught.append(args[0].abs().amax().float()))
    with torch.no_grad():
        for row in load_file(text)["ids"]:
            model(row[None])
    expected = (torch.stack(caught).amax() / 448).bfloat16()
    assert torch.equal(scales["model.layers.1.mlp.down_proj.input_scale"][0], expected)
    # Layers that read one input share its scale.
    attention = "model.layers.0.self_attn."
    assert len({float(scales[f"{attention}{p}_proj.input_scale"]) for p in "qkv"}) == 1


def test_rows_that_the_context_cuts_are_said(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    options = ("--format", "fp8", "--effort", "0", "--calib", "self", "--calib-samples", "2")
    done = run(quantize_command, model, *options, "--seqlen", "30", "--out", tmp_path / "cut")
    assert done.exit_code == 0, done.output
    assert "rows have 24 tokens, the context of this model, and not --seqlen 30\n" in done.stderr
    (record,) = Plan.load(tmp_path / "cut" / "plan.json").provenance["calibration"]
    assert record["seqlen"] == 24
    whole = run(quantize_command, model, *options, "--seqlen", "24", "--out", tmp_path / "whole")
    assert whole.exit_code == 0 and "--seqlen" not in whole.stderr


def test_a_stopped_run_says_that_the_same_command_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = (quantize_command, model, "--format", "mxfp8", "--effort", "0", "--out", out, "--quiet")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quant.run.run.open_model", stop)
        assert run(*arguments).stderr == f"error: stopped by SIGINT before {out} was written\n"  # nothing is kept
    kept = "finished layers are kept, and the same command continues after them"
    for option, more in ((), ""), (("--restart",), " without --restart"):
        with monkeypatch.context() as patched:
            patched.setattr("quant.run.run.write_model", stop)
            stopped = run(*arguments, *option)
        assert stopped.exit_code == 130
        assert stopped.stderr == f"error: stopped by SIGINT before {out} was written; {kept}{more}\n"
    other = run(quantize_command, model, "--format", "fp8_channel", *arguments[4:])
    advised = re.search("in which the plan digest was another; `quantize (.*)` continues it; pass --rest", other.stderr)
    assert other.exit_code == 2 and advised is not None, other.stderr
    assert shlex.split(advised[1]) == [*map(str, arguments[1:])]  # the command that follows
    damaged, *_ = sorted(tmp_path.glob(".out.partial/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    goes_on = run(*arguments[:-1])
    solved, layers = map(int, re.findall(r"continuing .*: (\d+) of (\d+) layers are solved", goes_on.stderr)[0])
    assert goes_on.exit_code == 0 and 0 <= solved < layers == len(Plan.load(out / "plan.json").quantized)
    with monkeypatch.context() as patched:
        patched.setattr("quant.run.run.write_model", stop)
        assert run(*arguments, "--overwrite").exit_code == 130
    goes_on = run(*arguments[:-1], "--overwrite")
    said = f"continuing the run that was stopped: {layers} of {layers} layers are solved, in {tmp_path}/.out.partial\n"
    assert goes_on.exit_code == 0 and said in goes_on.stderr


def test_other_options_take_up_nothing_of_a_run_that_was_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that changes the result is refused with both ways out; those that do not continue, to the same bits."""
    begun = {
        "--format": "nvfp4", "--solver": "gptq", "--seed": "0", "--calib": str(TEXTS / "calibration.txt"),
        "--calib-samples": "4", "--seqlen": "32", "--out": str(tmp_path / "out"),
    }  # fmt: skip

    def command(**changes: str) -> list[Any]:
        options = begun | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return [quantize_command, model, "--quiet", *(word for pair in options.items() for word in pair)]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quant.run.run.write_model", stop)
        assert run(*command()).exit_code == 130
    for changes, difference in (
        ({"format": "mxfp8"}, "in which the plan digest was another"),
        ({"solver": "mse"}, "in which the plan digest was another"),
        ({"seed": "1"}, "in which the seed was 0, and is 1 now"),
        ({"calib": str(TEXTS / "evaluation.txt")}, "with another calibration text"),
        ({"calib_samples": "5"}, "with another calibration text"),
        ({"seqlen": "16"}, "with another calibration text"),
    ):
        refused = run(*command(**changes))
        assert refused.exit_code == 2 and f"unfinished run {difference}; `quantize" in refused.stderr, refused.stderr
        assert refused.stderr.endswith("continues it; pass --restart to begin anew\n")
    fresh = {"seed": "1", "out": str(tmp_path / "fresh")}
    for arguments in (command(**fresh), [*command(seed="1", out=str(tmp_path / "elsewhere"))]):
        done = run(*[word for word in arguments if word != "--quiet"])
        assert done.exit_code == 0 and "continuing" not in done.stderr  # another --out
    goes_on = run(*[word for word in command(eval=str(TEXTS / "evaluation.txt"), memory="8GB") if word != "--quiet"])
    assert goes_on.exit_code == 0 and "continuing the run that was stopped: 14 of 14 layers" in goes_on.stderr
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "fresh", "elsewhere")}
    assert weights["fresh"] == weights["elsewhere"]
    again = run(*command(out=str(tmp_path / "whole")))
    assert again.exit_code == 0 and (tmp_path / "whole" / "model.safetensors").read_bytes() == weights["out"]


def test_a_continued_run_announces_the_time_that_is_left(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first of two blocks is kept, and the same command again: half of the time, and the same bits."""
    texts = ("--calib", TEXTS / "calibration.txt", "--calib-samples", "4", "--seqlen", "32")
    arguments = (quantize_command, model, "--format", "nvfp4", "--solver", "gptq", *texts)
    solve_block = walk.solve_block
    blocks = []

    def stop(*args: Any, **options: Any) -> Any:
        blocks.append(1)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return solve_block(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(walk, "solve_block", stop)
        stopped = run(*arguments, "--out", tmp_path / "out")
    assert stopped.exit_code == 130 and "the same command continues" in stopped.stderr
    text = TEXTS / "calibration.txt"
    (tmp_path / "calibration.txt").write_text(text.read_text(encoding="utf-8")[999:], encoding="utf-8")
    other = run(
        *(tmp_path / "calibration.txt" if each == text else each for each in arguments), "--out", tmp_path / "out"
    )
    assert other.exit_code == 2 and "calibration text" in other.stderr
    assert "continuing" not in other.stderr.partition("error:")[0]  # a run that is refused does not continue
    monkeypatch.setattr("quant.run.job.steps_in_words", lambda steps: f"{steps['solve']:.9f} s to solve")
    continued, whole = (run(*arguments, "--out", tmp_path / out) for out in ("out", "whole"))
    assert "14 layers are solved" in continued.stderr
    left, all_of_it = (float(re.search(r"([\d.]+) s to solve", done.stderr)[1]) for done in (continued, whole))
    assert left == pytest.approx(all_of_it / 2, rel=1e-3)
    first, second = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "whole"))
    assert first == second


def test_a_disk_without_room_is_seen_before_anything_is_solved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    arguments = (quantize_command, model, "--format", "mxfp8", "--effort", "0", "--out")
    assert run(*arguments, tmp_path / "whole").exit_code == 0
    monkeypatch.setattr(
        "quant.export.checkpoint.files.directory.shutil.disk_usage", lambda _: usage._replace(free=1000)
    )
    monkeypatch.setattr("quant.run.run.solve_plan", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr("quant.training.distill.prepare_distill_inputs", lambda *_: pytest.fail("too late"))
    distill = (main, "distill", tmp_path / "whole", "--teacher", model, "--out")
    monkeypatch.setattr("quant.export.export_model._opened", lambda *_: pytest.fail("too late"))
    exports = [(main, "export", tmp_path / "whole", "--to", kind, "--out") for kind in ("onnx", "aoti", "modelopt")]
    for command in (arguments, distill, *exports):
        refused = run(*command, tmp_path / "out")
        assert refused.exit_code == 2 and re.search(
            r"takes at least [\d.]+ kB, and its disk has 1\.00 kB left", refused.stderr
        )
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_limit_of_memory_that_is_exceeded_already_is_refused(model: Path, tmp_path: Path) -> None:
    options = ("--format", "mxfp8", "--effort", "0", "--memory", "10MB", "--out", tmp_path / "out")
    refused = run(quantize_command, model, *options)
    taken = re.search(r"--memory 10MB: Python, PyTorch and the open model take ([\d.]+) ([MG])B before", refused.stderr)
    assert refused.exit_code == 2 and taken is not None and float(taken[1]) * {"M": 1, "G": 1000}[taken[2]] > 100
    assert run(quantize_command, model, *options, "--memory", "64GB").exit_code == 2  # one value
    done = run(quantize_command, model, *options[:-3], "64GB", *options[-2:])
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(("dtype", "label"), [(torch.float32, "32 bit"), (torch.bfloat16, "16 bit")])
@pytest.mark.parametrize("bare", [False, True])
def test_layers_that_stay_have_the_size_of_their_tensors(
    bare: bool, dtype: torch.dtype, label: str, model: Path, tmp_path: Path
) -> None:
    """Against the bytes of the tensors in the file."""
    weights = model / "model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    given, out = weights if bare else model, tmp_path / "out"
    assert run(quantize_command, given, "--format", "mxfp8", "--effort", "0", "--out", out).exit_code == 0
    report, stored = Report.load(out / "report.json"), load_file(out / "model.safetensors")
    kept = [layer for layer in report.layers if layer.format is None and layer.nbytes]
    assert kept and all(layer.nbytes == stored[f"{layer.name}.weight"].nbytes for layer in kept)
    assert all(layer.bits == 8 * dtype.itemsize for layer in kept)
    assert {label, "mxfp8"} <= dict(summary(report)).keys()
    assert f">{label}, embedding<" in (out / "report.html").read_text()


def test_a_tied_head_is_counted_with_its_embedding(tmp_path: Path) -> None:
    tiny_models.llama(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", "--format", "mxfp8", "--effort", "0", "--out", tmp_path / "out")
    assert run(quantize_command, *arguments).exit_code == 0
    report = Report.load(tmp_path / "out" / "report.json")
    (head,) = (layer for layer in report.layers if layer.name == "lm_head")
    assert (head.bits, head.nbytes) == (32, 0) and "16 bit" not in dict(summary(report))


def test_dry_run_prints_the_plan_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    change_weights(model, put_nans)  # which nobody looks at
    result = run(quantize_command, model, "--format", "nvfp4", "--dry-run", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    plan = Plan.from_dict(json.loads(result.stdout))
    assert plan.layers == make_plan(open_model(BASE).model, "nvfp4").layers
    table = run(quantize_command, model, "--format", "nvfp4", "--dry-run", "--out", tmp_path / "out")
    assert table.exit_code == 0
    assert f"14 quantized at {plan.effective_bits:.4f} bits a weight" in table.stdout
    assert tree(tmp_path) == before


def test_an_edited_plan_changes_exactly_that_layer(tmp_path: Path) -> None:
    assert quantize_base(tmp_path / "first", "--format", "nvfp4a16").exit_code == 0
    plan = json.loads((tmp_path / "first" / "plan.json").read_text())
    name = "model.layers.0.mlp.down_proj"
    next(x for x in plan["layers"] if x["name"] == name).update(weight="mxfp8", reason="by hand")
    (tmp_path / "edited.json").write_text(json.dumps(plan))
    assert quantize_base(tmp_path / "second", "--plan", tmp_path / "edited.json").exit_code == 0
    first, second = (load_file(tmp_path / d / "model.safetensors") for d in ("first", "second"))
    assert {n for n in first.keys() ^ second.keys() if not n.startswith(name)} == set()
    assert f"{name}.weight_packed" in first and second[f"{name}.weight"].dtype is torch.float8_e4m3fn
    for other in first.keys() & second.keys() - {f"{name}.weight_scale"}:
        a, b = first[other], second[other]
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), other
    assert Plan.load(tmp_path / "second" / "plan.json").by_name[name].reason == "by hand"


def test_a_recipe_file_and_globs(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('weight = "mxfp8"\n[[rules]]\nmatch = "*mlp*"\nweight = "nvfp4"\n')
    options = ("--format", tmp_path / "r.toml", "--exclude", "*.1.*", "--dry-run", "--json")
    plan = Plan.from_dict(json.loads(run(quantize_command, BASE, *options).stdout))
    old = run(quantize_command, BASE, "--recipe", *options[1:])
    assert old.stdout == run(quantize_command, BASE, *options).stdout
    assert old.stderr == "warning: --recipe is --format since 0.4\n"
    expected = {
        f"model.layers.0.{'self_attn' if p[0] in 'qkvo' else 'mlp'}.{p}": "mxfp8" if p[0] in "qkvo" else "nvfp4"
        for p in PROJECTIONS
    }
    assert {x.name: x.weight.name for x in plan.quantized if x.weight} == expected


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert quantize_base(tmp_path / out, "--format", "nvfp4a16", "--seed", 7).exit_code == 0
    a, b = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b"))
    assert a == b


def test_a_bare_state_dict_is_quantized_weight_only(tmp_path: Path) -> None:
    weights = {"net.up.weight": torch.randn(64, 32), "net.up.bias": torch.randn(64), "net.norm.weight": torch.ones(32)}
    save_file(weights, tmp_path / "bare.safetensors")
    result = run(
        quantize_command, tmp_path / "bare.safetensors", "--format", "nvfp4", "--out", tmp_path / "out", "--quiet"
    )
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {
        *(f"net.up.{n}" for n in ("weight_packed", "weight_scale", "weight_global_scale", "bias")),
        "net.norm.weight",
    }
    expected = quantize(weights["net.up.weight"], FORMATS["nvfp4"])
    assert torch.equal(tensors["net.up.weight_packed"], expected.codes)
    assert torch.equal(tensors["net.up.bias"], weights["net.up.bias"])
    layer = Plan.load(tmp_path / "out" / "plan.json").by_name["net.up"]
    assert layer.activation is None and "weight only" in layer.reason
    assert not (tmp_path / "out" / "config.json").exists()


# Mistakes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        (b"", "the file is empty"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "truncated or damaged"),
        (b"hello, world, this is a text", "unknown file type"),
        (b"PK\x03\x04 not really a zip", "archive"),
    ],
    ids=["missing", "empty", "truncated", "magic", "zip"],
)
@pytest.mark.parametrize("dry", [False, True])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes | None, message: str, dry: bool) -> None:
    file = tmp_path / "model.bin"
    if content is not None:
        file.write_bytes(content)
    before = tree(tmp_path)
    options = ["--dry-run"] if dry else ["--out", tmp_path / "out"]
    line = refused(run(quantize_command, file, "--format", "nvfp4a16", *options))
    assert message in line and str(file) in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize("keep", [8, 100, 5000, -1])
def test_truncated_weights(model: Path, tmp_path: Path, keep: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    before = tree(tmp_path)
    assert str(weights) in refused(run(quantize_command, model, "--format", "nvfp4a16", "--out", tmp_path / "out"))
    assert tree(tmp_path) == before


def test_a_directory_without_config(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in refused(run(quantize_command, model, "--format", "nvfp4a16", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_nan_weights_name_the_layer_and_the_count(model: Path, tmp_path: Path) -> None:
    change_weights(model, put_nans)
    before = tree(tmp_path)
    line = refused(run(quantize_command, model, "--format", "nvfp4a16", "--out", tmp_path / "out", "--quiet"))
    assert "model.layers.1.mlp.up_proj [256, 128]: 5 NaN" in line
    assert tree(tmp_path) == before
    excluded = ("--exclude", "*1.mlp*", "--out", tmp_path / "out", "--quiet")
    line = refused(run(quantize_command, model, "--format", "nvfp4a16", *excluded))
    assert "model.layers.1.mlp.up_proj.weight [256, 128] holds 5 values that are NaN" in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "nvfp5"), "unknown format 'nvfp5'; known formats: " + ", ".join(presets())),
        (("--format", "nvfp4a16", "--solver", "magic"), "unknown solver 'magic'; known solvers: rtn"),
        (("--format", "nvfp4a16", "--exclude", "nothing*"), "glob 'nothing*' matches no layer"),
        (("--format", "nvfp4a16", "--include", "nothing*"), "glob 'nothing*' matches no layer"),
        (("--format", "nvfp4a16", "--exclude", "*"), "quantizes none"),
        (("--format", "fp8", "--calib", "{tmp}/absent.txt"), "absent.txt"),
        (("--format", "nvfp4a16", "--eval", "{tmp}/absent.txt"), "absent.txt"),
        (("--format", "{tmp}/absent.toml"), "absent.toml"),
        (("--plan", "{tmp}/absent.json"), "absent.json"),
        (("--format", "{tmp}/key.toml"), "unknown key(s) wieght; known keys: name, weight"),
        (("--plan", "{tmp}/key.toml"), "not a plan"),
        ((), "exactly one of --format and --plan"),
        (("--format", "mxfp8", "--plan", "x"), "exactly one of --format and --plan"),
        (("--plan", "x", "--exclude", "*"), "--plan says everything already"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "key.toml").write_text('wieght = "nvfp4"\n')
    before = tree(tmp_path)
    options = tuple(o.replace("{tmp}", str(tmp_path)) for o in options)
    assert message in refused(quantize_base(tmp_path / "out", *options))
    assert tree(tmp_path) == before


def test_no_destination() -> None:
    line = refused(run(quantize_command, BASE, "--format", "nvfp4a16"))
    assert line.startswith("error: name a directory or a .gguf file with --out, or pass --dry-run")


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    plan = make_plan(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvfp4a16", run=lambda m: m(torch.zeros(1, 32)))
    plan.save(tmp_path / "plan.json")
    line = refused(quantize_base(tmp_path / "out", "--plan", tmp_path / "plan.json"))
    assert "0: is not in the model" in line and "model.layers.*.mlp.up_proj" in line
    assert not (tmp_path / "out").exists()


def test_a_plan_with_mistakes_in_two_layers(tmp_path: Path) -> None:
    """Both are named, the one that cannot be read and the one that no solver knows, before any text is read."""
    assert quantize_base(tmp_path / "out", "--format", "nvfp4a16").exit_code == 0
    file = tmp_path / "out" / "plan.json"
    fields = json.loads(file.read_text())
    first, second = [layer for layer in fields["layers"] if layer["weight"]][:2]
    first["weight"], second["solver"] = "nvfp5", "magic"
    file.write_text(json.dumps(fields))
    line = refused(quantize_base(tmp_path / "again", "--plan", file, "--calib", BASE / "config.json"))
    assert f"{first['name']}: unknown format 'nvfp5'" in line and f"{second['name']}: unknown solver 'magic'" in line


def test_a_destination_that_is_not_empty(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("old")
    before = tree(tmp_path)
    # Of a directory that --overwrite would not replace the option is no way out.
    for option in ((), ("--overwrite",)):
        assert "holds precious.txt and no plan.json" in refused(quantize_base(out, "--format", "nvfp4a16", *option))
        assert tree(tmp_path) == before
    (out / "plan.json").write_text("old")
    assert "is not empty; pass --overwrite" in refused(quantize_base(out, "--format", "nvfp4a16"))
    assert quantize_base(out, "--format", "nvfp4a16", "--overwrite").exit_code == 0
    assert not (out / "precious.txt").exists() and (out / "plan.json").read_text() != "old"


def test_what_is_quantized_already(tmp_path: Path) -> None:
    assert quantize_base(tmp_path / "out", "--format", "nvfp4a16").exit_code == 0
    line = refused(run(quantize_command, tmp_path / "out", "--format", "fp8_channel", "--out", tmp_path / "again"))
    assert "already quantized" in line and not (tmp_path / "again").exists()


FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
from quant.cli.quantize import quantize_command
quantize_command()
"""


def test_no_space_left(tmp_path: Path) -> None:
    """A process whose files cannot grow beyond 20 kB, as on a full disk."""
    arguments = [str(BASE), "--format", "nvfp4a16", "--effort", "0", "--out", str(tmp_path / "deep" / "out"), "--quiet"]
    done = subprocess.run([sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(r"error: .*cannot be written: .*File too large.*\n", done.stderr), done.stderr
    assert "make room, and run the same command again" in done.stderr
    assert not (tmp_path / "deep" / "out").exists()
    assert run(quantize_command, *arguments).exit_code == 0
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]


# The toolbox


def test_inspect_reads_what_was_written(tmp_path: Path) -> None:
    assert quantize_base(tmp_path / "out", "--format", "nvfp4a16").exit_code == 0
    result = run(main, "inspect", tmp_path / "out", "--json")
    content = json.loads(result.stdout)
    assert Plan.from_dict(content["plan"]) == Plan.load(tmp_path / "out" / "plan.json")
    assert content["report"] == json.loads((tmp_path / "out" / "report.json").read_text())
    table = run(main, "inspect", tmp_path / "out")
    assert table.exit_code == 0 and "14 quantized at 4.5" in table.stdout
    # One reason for all stands below the table, which has room for the numbers; several keep their column.
    assert "14 layers, model.layers.0.self_attn.q_proj first: recipe nvfp4a16" in table.stdout
    mixed = Plan.load(tmp_path / "out" / "plan.json")
    mixed = mixed.replace_layers(replace(m, reason=f"reason {i}") for i, m in enumerate(mixed.quantized))
    mixed.save(tmp_path / "out" / "plan.json")
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["inspect", str(tmp_path / "out")]).stdout
    assert all(len(line) <= 80 for line in narrow.splitlines() if "no room" not in line)
    assert all(re.search(rf"{m.name} .*{m.reason}", narrow) for m in mixed.quantized)
    assert "no plan.json" in refused(run(main, "inspect", BASE))
    # What looks like markup to rich is text all the same.
    plan = Plan.load(tmp_path / "out" / "plan.json")
    plan.replace_layers([replace(plan.by_name["lm_head"], reason="[experts, in, out] [bold]")]).save(
        tmp_path / "out" / "plan.json"
    )
    assert "kept in 16 bit, lm_head: [experts, in, out] [bold]" in run(main, "inspect", tmp_path / "out").stdout


def test_evaluate_against_arithmetic_of_its_own(tmp_path: Path) -> None:
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    assert quantize_base(tmp_path / "out", "--format", "mxfp4a16").exit_code == 0
    options = ("--text", tmp_path / "ids.safetensors", "--samples", 3, "--seqlen", 24, "--json")
    result = run(main, "evaluate", tmp_path / "out", "--baseline", BASE, *options)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    with torch.no_grad():
        logs = [
            m.float()(ids).logits.double().log_softmax(-1)[:, :-1]
            for m in (load(tmp_path / "out"), open_model(BASE).model)
        ]
    expected = [float(torch.exp(-log.gather(-1, ids[:, 1:, None]).mean())) for log in logs]
    kl = float((logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean())
    assert found["perplexity"] == pytest.approx(expected[0], rel=1e-5)
    assert found["baseline_perplexity"] == pytest.approx(expected[1], rel=1e-5)
    assert found["kl"] == pytest.approx(kl, rel=1e-3) and found["kl"] > 1e-3
    assert found["top1"] == pytest.approx(float((logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean()), abs=0.03)
    assert found["tokens"] == 3 * 23
    itself = json.loads(run(main, "evaluate", BASE, "--baseline", BASE, *options).stdout)
    assert itself["kl"] == pytest.approx(0, abs=1e-9) and itself["top1"] == 1


def test_an_unrelated_baseline_is_refused(tmp_path: Path) -> None:
    """Its vocabulary has the same size, so that a KL would come out, of tokens that mean other bytes."""
    pytest.importorskip("tokenizers", reason="the extra hf")
    for name, special in (("model", ["<pad>", "</s>", "<a>"]), ("other", ["<a>", "<pad>", "</s>"])):
        tokenizer = tiny_processors._byte_tokenizer(special, "$A </s>")
        if name == "other":
            words = json.loads(tokenizer.backend_tokenizer.to_str())
            shifted = {token: (number + 1) % len(tokenizer) for token, number in words["model"]["vocab"].items()}
            words["model"]["vocab"] = shifted
            tokenizer.save_pretrained(tmp_path / name)
            (tmp_path / name / "tokenizer.json").write_text(json.dumps({**words, "post_processor": None}))
        else:
            tokenizer.save_pretrained(tmp_path / name)
        tiny_models.llama(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text("A text of some length, again and again. " * 40)
    options = ("--text", tmp_path / "text.txt", "--samples", 2, "--seqlen", 32)
    refused = run(main, "evaluate", tmp_path / "model", "--baseline", tmp_path / "other", *options)
    assert refused.exit_code == 2 and "its tokenizer is another than that of" in refused.stderr
    assert run(main, "evaluate", tmp_path / "model", "--baseline", tmp_path / "model", *options).exit_code == 0


def test_each_of_two_texts_has_a_row(tmp_path: Path) -> None:
    texts = {
        name: torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")
    }
    save_file(texts, tmp_path / "ids.safetensors")
    names = [f"{tmp_path / 'ids.safetensors'}:{name}" for name in texts]
    given = ("--format", "mxfp4a16", "--eval-samples", 3, "--seqlen", 24, "--eval", names[0], "--eval", names[1])
    done = quantize_base(tmp_path / "out", *given)
    assert done.exit_code == 0, done.stderr
    options = ("--baseline", BASE, "--samples", 3, "--seqlen", 24)
    alone = [
        json.loads(run(main, "evaluate", tmp_path / "out", "--text", name, *options, "--json").stdout) for name in names
    ]
    reported = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]
    for figures, name, found in zip((reported, *reported["others"]), names, alone, strict=True):
        assert figures["text"] == name and figures["kl"] == pytest.approx(found["kl"], rel=1e-3) and found["kl"] > 1e-3
    told = dict(summary(Report.load(tmp_path / "out" / "report.json")))
    for name, found in zip(texts, alone, strict=True):
        row = told[f"on ids.safetensors:{name}"]
        assert row.startswith(f"KL {loss_text(found['kl'])} nats (95% over 3 rows: ") and ", perplexity " in row
    assert "Loss on each text" in (tmp_path / "out" / "report.html").read_text()
    printed = run(main, "evaluate", tmp_path / "out", "--text", names[0], "--text", names[1], *options).stdout
    head, *rows = (line.split() for line in printed.splitlines() if "KL(baseline" in line or "ids.safetensors" in line)
    assert head[:2] == ["text", "KL(baseline‖model),"]
    for row, name, found in zip(rows, names, alone, strict=True):
        assert row[:2] == [name, loss_text(found["kl"])]


def test_a_cache_of_the_plan_counts_in_its_own_evaluation(tmp_path: Path) -> None:
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    (tmp_path / "recipe.toml").write_text('weight = "mxfp4"\nkv_cache = "fp8"\n')
    text = ("--eval", tmp_path / "ids.safetensors", "--eval-samples", 3, "--seqlen", 24)
    given = ("--format", tmp_path / "recipe.toml", "--calib", tmp_path / "ids.safetensors", "--calib-samples", 3)
    result = quantize_base(tmp_path / "out", *given, *text)
    assert result.exit_code == 0, result.stderr
    reported = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]["kl"]
    again = ("--baseline", BASE, "--text", tmp_path / "ids.safetensors", "--samples", 3, "--seqlen", 24, "--json")
    with_cache = json.loads(run(main, "evaluate", tmp_path / "out", *again).stdout)["kl"]
    without = json.loads(run(main, "evaluate", tmp_path / "out", *again, "--kv-cache", "16bit").stdout)["kl"]
    assert reported == pytest.approx(with_cache, rel=1e-3)
    assert abs(without - with_cache) > 0.01 * without


def test_evaluate_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "bare.safetensors")
    save_file({"ids": torch.zeros(1, 8, dtype=torch.long)}, tmp_path / "ids.safetensors")
    text = ("--text", tmp_path / "ids.safetensors")
    assert "cannot be run" in refused(run(main, "evaluate", tmp_path / "bare.safetensors", *text))
    assert "no such file" in refused(run(main, "evaluate", tmp_path / "absent", *text))
    assert "absent" in refused(run(main, "evaluate", BASE, "--text", tmp_path / "absent.txt"))


def test_formats_lists_presets_and_numbers() -> None:
    tables = json.loads(run(main, "formats", "--json").stdout)
    assert set(tables["presets"]) == set(presets()) and set(tables["formats"]) == set(FORMATS)
    assert tables["formats"]["nvfp4"]["bits_per_weight"] == 4.5
    assert tables["formats"]["mxfp6"]["bits_per_weight"] == 6.25
    printed = run(main, "formats").stdout
    assert all(name in printed for name in (*presets(), *FORMATS))


def test_doctor_tells_what_is_here() -> None:
    findings = json.loads(run(main, "doctor", "--json").stdout)
    assert findings["versions"]["torch"] == torch.__version__
    assert len(findings["gpus"]) == torch.cuda.device_count()
    assert findings["packages"]["transformers"]["installed"] is True
    missing = [n for n, p in findings["packages"].items() if not p["installed"] and p["extra"]]
    printed = run(main, "doctor").stdout
    assert torch.__version__ in printed
    assert ("extras are installed by, for example: pip install -e" in printed) == bool(missing)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run(quantize_command, tmp_path / "absent", "--format", "mxfp8", "--dry-run", "--debug")
    assert isinstance(result.exception, ValueError) and result.stderr == ""


@pytest.mark.parametrize("command", [("formats",), ("inspect", "DIR"), ("plan", "show", "DIR"), ("--help",)])
def test_what_only_reads_does_not_wait_for_torch(command: tuple[str, ...], tmp_path: Path) -> None:
    """torch takes seconds to import."""
    make_plan(open_model(BASE, meta=True).model, "nvfp4").save(tmp_path / "plan.json")
    arguments = [str(tmp_path) if part == "DIR" else part for part in command]
    program = (
        "import sys; from click.testing import CliRunner; from quant.cli.main import main; "
        f"found = CliRunner().invoke(main, {arguments!r}); assert found.exit_code == 0, found.output; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_toolbox_imports_a_command_when_it_is_asked_for() -> None:
    """`--help` lists every command with its summary from the table, and imports the file of none."""
    program = (
        "import sys; from click.testing import CliRunner; from quant.cli.main import COMMANDS, main; "
        "text = ' '.join(CliRunner().invoke(main, ['--help']).output.split()); "
        "assert all(f'{name} {summary}' in text for name, (_, summary) in COMMANDS.items()), text; "
        "assert [name for name in sys.modules if name.startswith('quant.')] == ['quant.cli', 'quant.cli.main']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there(name: str) -> None:
    result = run(main, name, "--help")
    assert result.exit_code == 0 and result.output.startswith(f"Usage: quant {name} "), result.output


def test_quantize_has_thirty_options_which_help_shows_by_purpose() -> None:
    text = run(quantize_command, "--help").output
    assert "\n    quantize Qwen/Qwen3-0.6B --bits 4.8 --out qwen3-mixed\n" in text
    options = {option.opts[-1] for option in quantize_command.params if isinstance(option, click.Option)}
    assert len(options - {"--debug", "--version"}) <= 30
    assert all(f"\n  {name}" in text for name in options)
    assert text.index("Formats:") < text.index("Rounding:") < text.index("Output:") < text.index("--device ")


@pytest.mark.parametrize("name", sorted({**old_names.OPTIONS, **old_names.OF_PLANS}))
def test_an_option_that_was_moved_names_its_place(name: str) -> None:
    result = run(quantize_command, "model", f"{name}=1", "--out", "out")
    place = "an option of `quant plan make|.* since 0\\.3|no option"
    assert result.exit_code == 2 and re.fullmatch(rf"error: {name} is ({place}).*\n", result.output)


def test_another_command_says_nothing_of_the_options_of_plans() -> None:
    result = run(main, "inspect", "model", "--target", "h100")
    assert result.exit_code == 2 and "No such option '--target'." in result.output


def test_a_plan_has_no_resume_either() -> None:
    result = run(main, "plan", "make", "model", "--resume", "--fit", "1GB", "--out", "plan.json")
    assert result.exit_code == 2 and result.output.startswith("error: --resume is no option: the same command")


@pytest.mark.parametrize("name", sorted(old_names.COMMANDS))
def test_a_command_that_was_renamed_names_the_new_one(name: str) -> None:
    result = run(main, name, "file")
    assert result.exit_code == 2 and re.fullmatch(
        rf"error: quant {name} is `quant check .*; options are the same\n", result.output
    )


def test_the_package_runs_as_a_module() -> None:
    """As under `torchrun -m quant`."""
    arguments = [sys.executable, "-m", "quant", "quantize", "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: quant quantize [OPTIONS] MODEL")
    assert "No such command 'quantise'; did you mean quantize?" in run(main, "quantise").output
    assert "No such command 'xyz'." in run(main, "xyz").output


def test_progress_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while a single step takes long, and with the work of the last minute as its speed."""
    clock = [0.0]
    monkeypatch.setattr(console, "_SECONDS_A_LINE", 0.02)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])

    def lines(wanted: str) -> list[str]:
        found: list[str] = []
        for _ in range(500):
            time.sleep(0.02)
            found += capsys.readouterr().err.splitlines()
            if sum(wanted in line for line in found) > 1:
                break
        return [line for line in found if wanted in line]

    with console.stages(quiet=False) as advance:
        advance.expect("solve", ["layers.0", "layers.0", "layers.1", "layers.2"], [100, 300, 1000, 50], "tokens")
        first = lines("0/4")
        clock[0] = 20
        advance("solve", 2, 4)
        second = lines("2/4")
        clock[0] = 120
        advance("solve", 3, 4)
        third = lines("3/4")
        advance("solve", 4, 4)
        advance("evaluate", 1, 2)
    last = capsys.readouterr().err.splitlines()[-2:]
    assert len(first) > 1 and len(second) > 1 and len(third) > 1
    assert re.fullmatch(r"quantizing 0/4, 0 s; layers.0, [\d.]+ .B of memory", first[0])
    assert re.match(r"quantizing 2/4, \d+ s.*; layers.1, 20 tokens/s, [\d.]+ .B of memory", second[0])
    assert re.match(r"quantizing 3/4, \d+ s.*; layers.2, 10 tokens/s, ", third[0])
    assert re.match(r"quantizing 4/4, \d+ s; ", last[0]) and re.match(r"evaluating 1/2, \d+ s; ", last[1])


def test_a_stage_that_has_ended_keeps_its_time_and_stands_before_the_next() -> None:
    clock, ended = [0.0], list[str]()
    found = console.Stages(Progress(get_time=lambda: clock[0], disable=True), ended.append)
    found("text", 0, 8)
    clock[0] = 44
    found("text", 8, 8)
    found("solve", 0, 4)
    assert len(ended) == 1 and re.match(r"\S.* 8/8, 44 s; ", ended[0])
    clock[0] = 189
    found("solve", 4, 4)
    found.end()
    assert len(ended) == 2 and re.match(r"quantizing 4/4, 145 s; ", ended[1])


def test_the_time_that_is_left_waits_for_a_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block imports and compiles; an estimate from it alone would be wrong by any factor."""
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    found = console.Stages(Progress(get_time=lambda: clock[0], disable=True))
    found.expect("solve", list("abcd"), [10.0, 10.0, 10.0, 30.0], "tokens")
    clock[0] = 1
    found("solve", 1, 4)
    assert "left" not in str(found.line())
    clock[0] = 20
    found("solve", 2, 4)
    assert "20 s, 40 s left" in str(found.line())  # by work: 40 tokens remain, at one a second


def test_the_work_of_solving() -> None:
    """Calibrated layers share the tokens by their weights; others are megabytes of the stored dtype."""
    model = open_model(BASE).model
    rows = torch.zeros(3, 10, dtype=torch.int64)
    for solver, unit, amount in (("gptq", "tokens", 30.0), ("rtn", "MB", None)):
        plan = make_plan(model, "nvfp4", solver=solver)
        names, amounts, found = solving_steps(model, plan, rows)
        assert found == unit and names == ["model.layers.0"] * 7 + ["model.layers.1"] * 7
        assert sum(amounts) == pytest.approx(amount or sum(2 * layer.numel for layer in plan.quantized) / 1e6)
        assert amounts[4] / amounts[0] == pytest.approx(plan.quantized[4].numel / plan.quantized[0].numel)
