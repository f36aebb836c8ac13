"""`quant check` and `quant generate --engine` run an exported file, and refuse what does not belong together."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from samples import write_short_base
from serving_samples import greedy_tokens

import quant
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.engines.check_engine import open_session
from quant.recipes.plan import Plan

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the directory of its ONNX file."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, out = folder / "checkpoint", folder / "onnx"
    base = write_short_base(folder / "base")
    arguments = [str(base), "--format", "fp8_channel", "--effort", "0", "--out", str(checkpoint), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    result = run("export", checkpoint, "--to", "onnx", "--out", out, "--capacity", 96, "--dtype", "fp32", "--quiet")
    assert result.exit_code == 0, result.output
    return checkpoint, out


def test_an_onnx_file_is_compared_with_its_checkpoint(files: tuple[Path, Path]) -> None:
    checkpoint, out = files
    result = run("check", out, "--source", checkpoint, "--max-new-tokens", 16, "--json")
    assert result.exit_code == 0, result.output
    checked = json.loads(result.stdout)
    assert checked["passed"] and checked["prompts"] == [5, 80, 80] and checked["steps"] == 16
    assert checked["agreeing"] >= 46 and checked["error"] < 0.05 and checked["kl"] < 1e-3
    printed = run("check", out / "model.onnx", "--source", checkpoint, "--max-new-tokens", 4)
    assert "12 of 12 the same" in printed.stdout and "passed" in printed.stdout


def test_weights_that_are_not_the_checkpoints_fail(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The rows of the embedding are in another order."""
    checkpoint, out = files
    model = onnx.load(out / "model.onnx")
    embedding = next(tensor for tensor in model.graph.initializer if "embed_tokens" in tensor.name)
    rows = onnx.numpy_helper.to_array(embedding)
    embedding.CopyFrom(onnx.numpy_helper.from_array(rows[::-1].copy(), embedding.name))
    onnx.save(model, tmp_path / "model.onnx")
    result = run("check", tmp_path / "model.onnx", "--source", checkpoint, "--max-new-tokens", 8)
    assert result.exit_code == 2 and "failed" in result.stdout
    assert result.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/model.onnx does not compute what")


def test_texts_of_several_prompts(files: tuple[Path, Path]) -> None:
    checkpoint, out = files
    prompts = ["The", "a b c d e f"]
    arguments = ["generate", checkpoint, "--engine", out, "--max-new-tokens", 8]
    result = run(*arguments, "--prompt", prompts[0], "--prompt", prompts[1], "--json")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    model = quant.load(checkpoint).to(torch.float32)
    expected = greedy_tokens(model, written["prompt_tokens"], 8)
    ends = [tokens.index(0) + 1 if 0 in tokens else 8 for tokens in expected]
    assert [row[:end] for row, end in zip(written["tokens"], ends, strict=True)] == [
        row[:end] for row, end in zip(expected, ends, strict=True)
    ]
    single = run(*arguments, "--prompt", prompts[1])
    assert single.stdout == f"{prompts[1]}{written['texts'][1]}\n"
    both = run(*arguments, "--prompt", prompts[0], "--prompt", prompts[1])
    assert both.stdout.splitlines()[0] == f"{prompts[0]}{written['texts'][0]}".splitlines()[0]
    drawn = [run(*arguments, "--prompt", "The", "--temperature", 5, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "DIR", "--prompt", "a", "--prompt", "b"], "2 prompts: MODEL takes one"),
        (["generate", "DIR", "--prompt", "a", "--top-k", "3"], "--top-k: MODEL runs by greedy decoding"),
        (
            ["generate", "DIR", "--engine", "OUT", "--prompt", "a", "--dtype", "float16"],
            "--dtype: --engine runs a file",
        ),
        (["generate", "DIR", "--engine", "OUT", "--prompt", "a", "--max-new-tokens", "96"], "the cache holds 96"),
        (["generate", "OUT", "--engine", "OUT", "--prompt", "a"], "is an export; name the checkpoint"),
        (["generate", "DIR", "--engine", "DIR", "--prompt", "a"], "no such file; name an ONNX file, engine or"),
        (["check", "DIR/plan.json", "--source", "DIR"], "is a file of a checkpoint; name its directory"),
        (["check", "OUT/receipt.json"], "no directory of a checkpoint; `quant plan show` shows a plan"),
        (["check", "OUT", "--source", "OUT"], "is an export; name the checkpoint"),
    ],
)
def test_mistakes(files: tuple[Path, Path], arguments: list[str], words: str) -> None:
    checkpoint, out = files
    result = run(*(str(a).replace("DIR", str(checkpoint)).replace("OUT", str(out)) for a in arguments))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("length", "last", "words"),
    [(0, -1, "row 1: last is -1, and the step has tokens 0 to 2"), (0, 3, "row 1: last is 3"),
     (94, 2, "row 1: lengths is 94; with 3 tokens of a step the cache of 96 takes 0 to 93"), (-1, 2, "lengths is -1")],
)  # fmt: skip
def test_a_step_that_the_graph_would_compute_wrongly(
    files: tuple[Path, Path], length: int, last: int, words: str
) -> None:
    session = open_session(files[1])
    session.begin(2)
    with pytest.raises(quant.UserError, match=words):
        session.step(np.zeros((2, 3), np.int64), np.array([0, length]), np.array([2, last]))


def test_the_runtime_of_a_file_is_an_option(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The same layers in other nodes; both files run in onnxruntime."""
    kinds = {}
    for target in ("onnxruntime", "tensorrt"):
        out = tmp_path / target
        arguments = ["--to", "onnx", "--target", target, "--out", out, "--capacity", 96, "--dtype", "fp32", "--quiet"]
        assert run("export", files[0], *arguments).exit_code == 0
        kinds[target] = [node.op_type for node in onnx.load(out / "model.onnx", load_external_data=False).graph.node]
        checked = run("check", out, "--source", files[0], "--max-new-tokens", 4, "--json")
        assert json.loads(checked.stdout)["passed"], checked.output
    assert "RMSNormalization" in kinds["onnxruntime"] and "GroupQueryAttention" in kinds["onnxruntime"]
    assert "Reciprocal" in kinds["tensorrt"] and "Softmax" in kinds["tensorrt"]
    wrong = run("export", files[0], "--to", "onnx", "--target", "sm89", "--out", tmp_path / "wrong")
    assert wrong.exit_code == 2 and "an ONNX file is for onnxruntime or tensorrt" in wrong.stderr


def test_a_file_of_another_plan(files: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, out = files
    other = shutil.copytree(checkpoint, tmp_path / "other")
    plan = Plan.load(other / "plan.json")
    first = plan.layers[0]
    plan.replace_layers([type(first)(**{**vars(first), "reason": "x"}), *plan.layers[1:]]).save(other / "plan.json")
    for command in (("generate", other, "--engine", out, "--prompt", "a"), ("check", out, "--source", other)):
        result = run(*command)
        assert result.exit_code == 2 and "was exported from another plan than that of" in result.stderr, result.output


def with_metadata(out: Path, folder: Path, changes: dict[str, str | None]) -> Path:
    """The ONNX file with other values of some keys of its metadata; None removes one."""
    model = onnx.load(out / "model.onnx")
    metadata = {entry.key: entry.value for entry in model.metadata_props} | changes
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {key: value for key, value in metadata.items() if value is not None})
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("export", None, "lacks blockscale.export; export it again"),
        ("attention", None, "lacks blockscale.attention; export it again"),
        ("attention", "fp8", "blockscale.attention is 'fp8', none of native, plugin, none; export it again"),
        ("export", '{"dtypes": [', "blockscale.export is damaged (Expecting value"),
        ("export", "[1]", "blockscale.export is damaged (expected an object with fields, not [1])"),
        ("head", ..., "blockscale.export is damaged (missing field(s) head); export it again"),
        ("versions", [1], "blockscale.export is damaged (versions: expected an object, not [1])"),
        ("kv_cache", "fp9", "blockscale.export is damaged (KeyError: 'fp9')"),
        ("inputs", {"x": ["int64"]}, "blockscale.export is damaged (not enough values to unpack"),
        ("capacity", -4, "blockscale.export does not fit the checkpoint: --capacity -4"),
    ],
)
def test_metadata_that_were_damaged(
    files: tuple[Path, Path], tmp_path: Path, key: str, change: Any, words: str
) -> None:
    if key in ("export", "attention"):
        changes = {f"blockscale.{key}": change}
    else:
        metadata = onnx.load(files[1] / "model.onnx", load_external_data=False).metadata_props
        record = json.loads(next(entry.value for entry in metadata if entry.key == "blockscale.export"))
        record = {name: value for name, value in {**record, key: change}.items() if value is not ...}
        changes = {"blockscale.export": json.dumps(record)}
    path = with_metadata(files[1], tmp_path, changes)
    result = run("check", path, "--source", files[0])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"{path}: its metadata {words}" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention", "none"), ("capacity", "64"), ("capacity", None), ("plan", None)],
)
def test_metadata_that_the_export_does_not_write(
    files: tuple[Path, Path], tmp_path: Path, key: str, value: str | None
) -> None:
    """The graph of a model without FP8 attention is the same, whatever the file says about its attention."""
    path = with_metadata(files[1], tmp_path, {f"blockscale.{key}": value})
    result = run("check", path, "--source", files[0], "--json")
    (row,) = [row for row in json.loads(result.stdout)["audit"] if not row["passed"]]
    assert result.exit_code == 2 and row["name"] == f"blockscale.{key}"
    assert row["found"] == ("another value" if value else "not in the file's metadata")


def test_sources_that_are_not_quantized(files: tuple[Path, Path], tmp_path: Path) -> None:
    base = files[0].with_name("base")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for target in (files[1], files[1] / "model.onnx", tmp_path / "m.gguf"):
        result = run("check", target, "--source", base)
        said = f"error: --source {base} is not quantized: name the checkpoint that {target} was exported from\n"
        assert (result.exit_code, result.stderr) == (2, said)


def test_an_adapter_is_no_checkpoint(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out works: the adapter is merged, quantized and exported."""
    peft = pytest.importorskip("peft", reason="the extra training")
    base = files[0].with_name("base")
    model = quant.open_model(str(base)).model
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path=str(base))
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    refused = run("export", tmp_path / "adapter", "--to", "modelopt")
    assert refused.exit_code == 2 and refused.stderr.startswith(f"error: {tmp_path}/adapter: an adapter of PEFT")
    monkeypatch.chdir(tmp_path)
    merge = refused.stderr.partition("into its base: ")[2].partition(", copy the")[0]
    exec(merge, {"peft": peft, "quant": quant})
    for file in base.glob("tokenizer*"):
        shutil.copy(file, "merged")
    _, program, *command = refused.stderr.split("`")[0:1] + refused.stderr.split("`")[1].split()
    assert program == "quantize"
    assert CliRunner().invoke(quantize_command, [*command, "--quiet"]).exit_code == 0
    assert run("export", "DIR", "--to", "modelopt").exit_code == 0


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path]) -> Path:
    """An engine of the checkpoint, and its receipt."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")
    path = files[0].with_name("model.engine")
    arguments = ["export", files[0], "--to", "tensorrt", "--target", "sm89", "--out", path, "--quiet"]
    result = run(*arguments, "--capacity", 96, "--dtype", "fp16")
    assert result.exit_code == 0, result.output
    return path


def test_an_engine_on_a_machine_without_its_gpu(files: tuple[Path, Path], engine: Path, tmp_path: Path) -> None:
    checked = run("check", engine, "--source", files[0])
    assert checked.exit_code == 0, checked.output
    for words in ("for sm89", "whole", "as the checkpoint is built", "not run"):
        assert words in checked.stdout
    refused = run("generate", files[0], "--engine", engine, "--prompt", "a")
    assert refused.exit_code == 2 and "runs on a GPU of sm89, and this machine has no GPU" in refused.stderr
    damaged = Path(shutil.copy(engine, tmp_path))
    shutil.copy(f"{engine}.json", tmp_path)
    damaged.write_bytes(engine.read_bytes()[:-1] + b"x")
    said = f"error: {damaged} is not the file that model.engine.json describes: their SHA-256 differ; export it again\n"
    for options in (["--source", files[0]], ["--checkpoint", files[0]], []):
        result = run("check", damaged, *options)
        assert (result.exit_code, result.stderr) == (2, said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda receipt: receipt.pop("engine"), "not a receipt of an engine: engine: expected an object, not None"),
        (lambda receipt: receipt["engine"].pop("sha256"), "sha256: expected text, not None; export the engine again"),
        (lambda receipt: receipt["engine"].update(target=5), "target: expected text, not 5; export the engine again"),
        (
            lambda receipt: receipt["engine"].update(profiles=3),
            "profiles: expected a list, not 3; export the engine again",
        ),
        (lambda receipt: receipt["engine"].update(target="sm120"), "built for sm89 by tensorrt_rtx"),
        (
            lambda receipt: receipt["engine"].update(backend="tensorrt 10.1"),
            "and its receipt says otherwise; export it",
        ),
        (lambda receipt: receipt.update(plan="0" * 64), "was built from another plan than that of"),
    ],
)
def test_a_receipt_that_was_changed(
    files: tuple[Path, Path], engine: Path, tmp_path: Path, change: Any, words: str
) -> None:
    receipt = json.loads(Path(f"{engine}.json").read_text())
    change(receipt)
    path = shutil.copy(engine, tmp_path)
    Path(f"{path}.json").write_text(json.dumps(receipt))
    result = run("check", path, "--source", files[0])
    assert (result.exit_code, result.stdout) == (2, "") and str(path) in result.stderr, result.output
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("command", ["check", "generate"])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.onnx.data", cut, "model.onnx.data: ends before"),
        ("model.onnx.data", Path.unlink, "model.onnx: its weights model.onnx.data are missing; the two files belong"),
        ("model.onnx", cut, "model.onnx: not an ONNX file, or a damaged one ("),
        (
            "model.onnx",
            lambda path: path.write_bytes(b""),
            "model.onnx: not an ONNX file, or one without a graph; copy",
        ),
    ],
)
def test_a_damaged_onnx_file(
    files: tuple[Path, Path], tmp_path: Path, command: str, name: str, change: Any, words: str
) -> None:
    """onnxruntime's own messages name neither the damage nor the file of weights."""
    model = onnx.load(files[1] / "model.onnx")
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    change(tmp_path / name)
    options = ["--source", files[0]] if command == "check" else ["--engine", tmp_path, "--prompt", "a"]
    result = run(command, tmp_path if command == "check" else files[0], *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"{tmp_path}/{words}" in result.stderr and len(result.stderr.splitlines()) == 1


def limited(kilobytes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a process that writes no larger file, as on a full disk."""
    program = f'ulimit -f {kilobytes}; exec {shlex.quote(sys.executable)} -m quant "$@"'
    return subprocess.run(["bash", "-c", program, "quant", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs ulimit")
def test_a_disk_that_is_full(files: tuple[Path, Path], engine: Path, tmp_path: Path) -> None:
    """Nothing half is left, and what was there stays; the bindings of TensorRT drop errors of writing."""
    checkpoint, wanted = files[0], "cannot be written: File too large; make room, and run the same command again"
    out, kept = tmp_path / "out", Path(shutil.copy(engine, tmp_path))
    shutil.copy(f"{engine}.json", tmp_path)
    cache = ["--capacity", 64, "--dtype", "fp16", "--quiet"]
    failed = limited(200, "export", checkpoint, "--to", "onnx", "--out", out, *cache)
    assert failed.returncode == 2 and failed.stderr == f"error: {out} {wanted}\n"
    again = ["export", checkpoint, "--to", "tensorrt", "--target", "sm89", "--out", kept, "--overwrite", *cache]
    failed = limited(3000, *again)
    assert failed.returncode == 2 and failed.stderr.startswith(f"error: {kept}: tensorrt_rtx cannot build this graph: ")
    assert failed.stderr.endswith(f"the engine {wanted}\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.engine", "model.engine.json"]
    assert run("check", kept, "--source", checkpoint, "--no-rebuild").exit_code == 0
    checked = limited(200, "check", files[1], "--source", checkpoint)
    assert checked.returncode == 2 and checked.stderr.endswith(f"model.onnx {wanted}\n")


def test_the_tensorrt_session_calls_what_the_bindings_have() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx", reason="needs the extra tensorrt-rtx")
    called = {
        trt.Runtime: ["deserialize_cuda_engine"],
        trt.ICudaEngine: [
            "num_io_tensors", "get_tensor_name", "get_tensor_mode", "get_tensor_shape", "get_tensor_dtype",
            "get_tensor_profile_shape", "num_optimization_profiles", "create_execution_context",
        ],
        trt.IExecutionContext: [
            "set_optimization_profile_async", "set_input_shape", "set_tensor_address", "get_tensor_shape",
            "execute_async_v3",
        ],
    }  # fmt: skip
    assert [name for owner, names in called.items() for name in names if not hasattr(owner, name)] == []


def test_steps_go_to_the_profile_that_takes_them() -> None:
    """Decoding has a profile of its own; what no profile takes is refused or cut."""
    from quant.export.tensorrt.tensorrt_session import TensorrtSession

    session = object.__new__(TensorrtSession)
    session._path, session._rows = Path("m.engine"), 4
    # Smallest and largest [batch, sequence]: one token of up to 32 rows, and 32 to 128 tokens of up to 8 rows.
    session._profiles = [((1, 1), (32, 1)), ((1, 32), (8, 128))]
    chosen: list[int] = []

    class Engine:
        def create_execution_context(self) -> Any:
            return type(
                "Context", (), {"set_optimization_profile_async": lambda _, index, stream: chosen.append(index)}
            )()

    session._engine, session._contexts = Engine(), {}
    session._stream = type("Stream", (), {"cuda_stream": 0, "synchronize": lambda _: None})()
    assert session.most_rows() == 8
    assert [session.width(tokens) for tokens in (1, 2, 40, 500)] == [1, 32, 40, 128]
    for shape in ((4, 1), (4, 32), (1, 128), (32, 1)):
        session._context(shape)
    assert chosen == [0, 1]
    with pytest.raises(quant.UserError, match=r"no profile takes a step of \[16, 64\] tokens"):
        session._context((16, 64))
    session._rows = 64
    with pytest.raises(quant.UserError, match=r"no profile of this engine takes 64 rows"):
        session.width(1)
