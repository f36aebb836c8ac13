"""These tests cover what is refused before a build, what a build leaves behind, and what the engine holds."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quant.export.onnx.dynamic_shapes import Input, parse_profile
from quant.export.tensorrt import gpu_targets
from quant.export.tensorrt.audit import audit
from quant.export.tensorrt.build import (
    BuildOptions,
    build_engine,
    check_graph,
    check_tensors,
    export_engine,
    run_worker,
    summary,
)
from quant.export.tensorrt.engine_file import read_engine
from quant.export.tensorrt.gpu_targets import choose_common_library, choose_library, resolve_target, resolve_targets
from quant.run.api import quantize

SHAPES = "tokens=1:16:64"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that packages are installed and a GPU is here."""

    def pretend(*packages: str, gpu: tuple[int, int] | None = None) -> None:
        spec = importlib.machinery.ModuleSpec("found", None)
        monkeypatch.setattr(gpu_targets, "local_capability", lambda: gpu)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name in packages else None)

    return pretend


@pytest.mark.parametrize(
    ("name", "sm"), [("sm120", "sm120"), ("RTX5090", "sm120"), ("h100", "sm90"), ("b200", "sm100"), ("l40s", "sm89")]
)
def test_targets(name: str, sm: str) -> None:
    assert resolve_target(name).sm == sm


def test_local_target_is_the_gpu_here(machine: Callable[..., None]) -> None:
    machine(gpu=(9, 0))
    assert resolve_target("local").sm == "sm90"
    machine()
    with pytest.raises(ValueError, match="no CUDA GPU; name the target: sm75"):
        resolve_target("local")


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match=r"unknown target 'sm42'; known targets: .*rtx5090.*local"):
        resolve_target("sm42")


@pytest.mark.parametrize(
    ("target", "packages", "gpu", "chosen"),
    [
        ("sm120", ("tensorrt_rtx",), None, "tensorrt_rtx"),
        ("sm120", ("tensorrt_rtx", "tensorrt"), None, "tensorrt_rtx"),
        ("sm120", ("tensorrt_rtx", "tensorrt"), (12, 0), "tensorrt"),
        ("h100", ("tensorrt_rtx", "tensorrt"), (9, 0), "tensorrt"),
    ],
)
def test_backend(machine: Callable[..., None], target: str, packages: Any, gpu: Any, chosen: str) -> None:
    machine(*packages, gpu=gpu)
    assert choose_library(resolve_target(target)).module == chosen


@pytest.mark.parametrize(
    ("target", "packages", "message"),
    [
        ("sm120", (), r"TensorRT-RTX can build it on any machine: pip install -e '.*\[tensorrt-rtx\]'; TensorRT"),
        (
            "h100",
            ("tensorrt_rtx", "tensorrt"),
            r"no engine for h100 \(sm90\); TensorRT-RTX builds for sm75.* alone; .*",
        ),
        ("b200", (), r"run it on a machine with b200 \(sm100\) \(pip install -e '.*\[tensorrt\]'\)"),
    ],
)
def test_no_backend(machine: Callable[..., None], target: str, packages: Any, message: str) -> None:
    machine(*packages)
    with pytest.raises(ValueError, match=message):
        choose_library(resolve_target(target))


def test_a_kernel_that_needs_long_sequences_moves_the_default_and_refuses_less(
    graphs: Any, machine: Callable[..., None]
) -> None:
    machine("tensorrt_rtx")
    inputs, floors = [Input("input_ids", ("batch", "sequence"))], {"sequence": 32}
    assert parse_profile("", inputs, floors)["input_ids"][0] == (1, 32)
    with pytest.raises(ValueError, match=r"sequence starts at 31, and .* needs at least 32"):
        parse_profile("sequence=31:64:128", inputs, floors)
    with pytest.raises(ValueError, match=r"attention .*fixed sequence of 16"):
        build_engine(graphs.attention(16), graphs.folder / "x.engine", BuildOptions("sm120"))


@pytest.mark.parametrize(
    ("kinds", "target", "message"),
    [
        (("fp8", "fp8_block"), "sm120", r"layers.1/MatMul .*miscompiles FLOAT8E4M3FN weights in blocks"),
        (("int8_block",), "sm89", "miscompiles INT8 weights in blocks"),
        (("int8", "nvfp4"), "sm89", r"layers.1/.*: sm89 has no FP4; use fp8 or int4 for it, or target sm120"),
        (("fp8",), "sm86", "sm86 has no FP8; use int8 or int4"),
    ],
)
def test_refused_before_a_build(
    graphs: Any, machine: Callable[..., None], kinds: Any, target: str, message: str
) -> None:
    machine("tensorrt_rtx")
    with pytest.raises(ValueError, match=message):
        build_engine(graphs.chain(*kinds), graphs.folder / "x.engine", BuildOptions(target, SHAPES))
    assert [p.name for p in graphs.folder.iterdir()] == ["chain.onnx"]


@pytest.mark.parametrize(
    ("format", "dtype", "target", "message"),
    [
        (
            "nvfp4",
            torch.float16,
            "sm120,a100",
            r"^0: a100 \(sm80\) has no FP8; use int8 or int4 for it",
        ),
        ("nvfp4", torch.float16, "l40s", r"^0: l40s \(sm89\) has no FP4; use fp8 or int4 for it, or target sm120"),
        ("int4@16bit", torch.float16, "t4", r"^0: t4 \(sm75\) has no INT4; use int8 for it, or target sm80 or later"),
        ("fp8", torch.float16, "t4", r"has no FP8; use int8 for it, or target sm89 or later"),
        ("int8", torch.bfloat16, "t4", r"^0.bias: t4 \(sm75\) has no BF16; pass dtype=.fp16., or target sm80 or later"),
        ("int8", torch.float16, "t4", ""),
    ],
)
def test_what_the_target_lacks_is_refused_before_an_export(
    format: str, dtype: torch.dtype, target: str, message: str
) -> None:
    quantized = quantize(mlp().to(dtype), format, torch.ones(1, 256, dtype=dtype))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        for each in resolve_targets(target):
            check_tensors(quantized.model, quantized.plan, each)


def test_one_query_with_few_heads_has_no_kernel(graphs: Any) -> None:
    import onnx

    path = graphs.attention(1, keys="keys", quantized=False)
    check_graph(onnx.load(path), resolve_target("sm120"))  # with 4 heads
    model = onnx.load(path)
    next(value for value in model.graph.input if value.name == "q").type.tensor_type.shape.dim[1].dim_value = 2
    with pytest.raises(
        ValueError, match=r"attention .*one query with 2 heads; it has from 4 on; let PyTorch or vLLM decode"
    ):
        check_graph(model, resolve_target("sm120"))


def test_fp8_attention_of_one_query_takes_any_number_of_keys(graphs: Any, build: Callable[..., Any]) -> None:
    engine = build(graphs.attention(1, keys="keys"), shapes="keys=1:64:128")
    (finding,) = audit(engine.path, attention="fp8", attention_nodes=engine.contents["attention_nodes"])
    assert (finding.found, finding.passed) == ("fp8", True)
    with pytest.raises(ValueError, match="keys starts at 31"):
        build(graphs.attention("queries", keys="keys"), shapes="keys=31:64:128")


def test_a_fixed_sequence_is_padded_or_attends_in_16_bit(graphs: Any, build: Callable[..., Any]) -> None:
    """Both ways out of the refusal."""
    for sequence, found in ((32, "fp8"), (16, "half")):
        engine = build(graphs.attention(sequence, quantized=found == "fp8"))
        (finding,) = audit(engine.path, attention=found, attention_nodes=engine.contents["attention_nodes"])
        assert (finding.found, finding.passed) == (found, True)
    with pytest.raises(ValueError, match="16; TensorRT fuses it for one query, or from 32 on: pad the sequence, or ex"):
        build(graphs.attention(16))


def test_files_that_are_no_model(tmp_path: Path, machine: Callable[..., None]) -> None:
    pytest.importorskip("onnx", reason="needs the extra [onnx]")
    machine("tensorrt_rtx")
    with pytest.raises(FileNotFoundError, match=r"none\.onnx"):
        build_engine(tmp_path / "none.onnx", tmp_path / "x.engine", BuildOptions("sm120"))
    (tmp_path / "bad.onnx").write_bytes(b"\x00not protobuf")
    with pytest.raises(ValueError, match=r"bad\.onnx: not an ONNX file"):
        build_engine(tmp_path / "bad.onnx", tmp_path / "x.engine", BuildOptions("sm120"))


def test_a_build_and_what_it_says(graphs: Any, build: Callable[..., Any]) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = build(graphs.chain("nvfp4"), "rtx5090", SHAPES, progress=lambda *step: seen.append(step))
    assert (engine.target, engine.profiles) == ("sm120", ["x=1x256:16x256:64x256"])
    assert "needs no GPU" in engine.reason
    assert sorted(path.name for path in graphs.folder.iterdir()) == ["chain.engine", "chain.onnx"]
    done = [done for _, done, _ in seen]
    assert done == sorted(done) and len(done) > 5
    assert seen[-1] == ("building engine", 100, 100)


def test_a_graph_that_tensorrt_refuses_is_an_error_with_its_node(graphs: Any, build: Callable[..., Any]) -> None:
    path = graphs.chain("half")
    model = graphs.onnx.load(path)
    model.graph.node[0].op_type = "NotAnOperator"
    graphs.onnx.save(model, path)
    (graphs.folder / "chain.engine").write_bytes(b"an older engine")
    with pytest.raises(ValueError, match=r"chain\.onnx: tensorrt_rtx cannot build this graph.*layers\.0/MatMul"):
        build(path, shapes=SHAPES)
    assert (graphs.folder / "chain.engine").read_bytes() == b"an older engine"


def test_weights_beside_the_file(graphs: Any, build: Callable[..., Any]) -> None:
    path = graphs.chain("fp8")
    inside = build(path, shapes=SHAPES).path.read_bytes()
    model = graphs.onnx.load(path)
    codes = next(t.raw_data for t in model.graph.initializer if len(t.raw_data) == 256 * 256)
    outside = graphs.folder / "outside.onnx"
    graphs.onnx.save(model, outside, save_as_external_data=True, location="outside.data", size_threshold=1024)
    assert (graphs.folder / "outside.data").stat().st_size >= 256 * 256
    assert codes in inside and codes in build(outside, shapes=SHAPES).path.read_bytes()
    (graphs.folder / "outside.data").unlink()
    with pytest.raises(ValueError, match=r"outside\.data are missing"):
        build(outside, shapes=SHAPES)


BUILDER = """
import os, signal
class _Any:
    def __init__(self, *args): pass
    def __getattr__(self, name): return _Any()
    def __call__(self, *args, **kwargs): return _Any()
class ILogger(_Any): pass
class IProgressMonitor(_Any): pass
class IStreamWriter(_Any): pass
class ProfilingVerbosity: DETAILED = 2
__version__ = "0.fake"
class OnnxParser:
    def __init__(self, network, logger): self.logger = logger
    def parse(self, data, path):
        self.logger.log(4, "Parsing node: layers.0/MatMul [MatMul]")
        return True
class Builder:
    def __init__(self, logger): self.logger = logger
    def create_network(self, flags): return _Network()
    def create_builder_config(self): return _Config()
    def create_optimization_profile(self): return _Any()
    def build_serialized_network_to_stream(self, network, config, writer):
        BODY
class _Network: num_layers = 3
class _Config(_Any):
    pass
"""


def fake_builder(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    (folder / "fake").mkdir(exist_ok=True)
    (folder / "fake" / f"{name}.py").write_text(BUILDER.replace("BODY", body) + more)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
    monkeypatch.syspath_prepend(folder / "fake")


def test_a_builder_that_dies_is_an_error(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'self.logger.log(3, "Compiling fusion 7"); os.kill(os.getpid(), signal.SIGSEGV)'
    target = "class ComputeCapability: SM120 = 120"
    fake_builder(graphs.folder, "tensorrt_rtx", body, monkeypatch, target)
    with pytest.raises(
        ValueError, match=r"chain\.onnx: tensorrt_rtx died .*SIGSEGV, at node layers\.0/MatMul"
    ) as error:
        build_engine(graphs.chain("half"), graphs.folder / "x.engine", BuildOptions("sm120", SHAPES))
    assert str(error.value).endswith("the last it said: Compiling fusion 7")
    assert not (graphs.folder / "x.engine").exists()


def test_the_other_tensorrt_takes_the_gpu_here(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builder(graphs.folder, "tensorrt", 'return writer.write(b"engine")', monkeypatch)
    monkeypatch.setattr(gpu_targets, "local_capability", lambda: (9, 0))
    engine = build_engine(graphs.chain("half"), graphs.folder / "x.engine", BuildOptions("h100", SHAPES))
    assert engine.path.read_bytes() == b"engine"
    assert engine.backend == "tensorrt 0.fake"


def test_the_installed_backend_may_not_know_the_target(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builder(graphs.folder, "tensorrt_rtx", "pass", monkeypatch, "class ComputeCapability: SM89 = 89")
    with pytest.raises(ValueError, match=r"tensorrt_rtx 0\.fake builds for sm89, not for sm120"):
        build_engine(graphs.chain("half"), graphs.folder / "x.engine", BuildOptions("sm120", SHAPES))


@pytest.mark.parametrize(
    ("target", "backend", "features", "message"),
    [
        ("sm89,sm90", None, (), r"no engine for sm90; TensorRT-RTX builds for sm75.* alone"),
        ("sm89,sm120", "tensorrt", (), 'TensorRT builds for one GPU; backend="tensorrt_rtx" builds one'),
        ("sm120", None, ("refit",), "engines for refit on machines with a GPU alone; leave refit out"),
    ],
)
def test_features_that_nothing_builds(
    machine: Callable[..., None], target: str, backend: str | None, features: tuple[str, ...], message: str
) -> None:
    machine("tensorrt_rtx", "tensorrt")
    with pytest.raises(ValueError, match=message):
        choose_common_library(resolve_targets(target), backend, features)


@pytest.mark.slow
def test_one_engine_for_several_gpus_and_with_features(graphs: Any, build: Callable[..., Any]) -> None:
    """One program is for all of them, and is audited as any other."""
    features = ("weight-streaming", "version-compatible")
    engine = build(graphs.chain("fp8", "int8"), "sm89,sm120", SHAPES, features=features)
    assert engine.target == "sm89,sm120"
    text = engine.path.read_bytes()
    assert b"accelerators={sm89 sm120 }" in text and b"version_compatible=1" in text
    gemms = [kernel for kernel in read_engine(engine.path).kernels if kernel.is_gemm]
    assert [kernel.inputs[1].type for kernel in gemms] == ["fp8", "int8"]
    with pytest.raises(ValueError, match="sm89 has no FP4"):
        build(graphs.chain("nvfp4"), "sm120,sm89", SHAPES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128, bias=False)).half().eval()


def exported(folder: Path, format: str, **options: Any) -> dict[str, Any]:
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    from quant.export.onnx.decoder_graph import GraphInput

    x = torch.randn(8, 256, dtype=torch.float16)
    done = quantize(mlp(), format, x, run=lambda model: model(x))
    inputs = {"x": GraphInput(x, ("tokens", 256))}
    return export_engine(
        done.model,
        folder / "mlp.engine",
        BuildOptions("sm120", SHAPES),
        plan=done.plan,
        inputs=inputs,
        **options,
    )


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "nvfp4a16"])
def test_export_ends_in_an_engine_that_does_what_the_plan_says(tmp_path: Path, format: str) -> None:
    receipt = exported(tmp_path, format)
    word = {"nvfp4": "fp4", "fp8": "fp8", "nvfp4a16": "half, fp4 weights"}[format]
    assert receipt["passed"]
    assert [(row["name"], row["planned"], row["found"]) for row in receipt["audit"]] == [
        ("0", word, word),
        ("2", word, word),
    ]
    said = summary(receipt)
    assert "needs no GPU" in said[0]
    assert said[1:] == ["shapes x=1x256:16x256:64x256", f"runs in {word}: 2"]
    assert json.loads((tmp_path / "mlp.engine.json").read_text()) == receipt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.engine", "mlp.engine.json"]
    assert receipt["engine"]["bytes"] == (tmp_path / "mlp.engine").stat().st_size


def test_a_format_without_a_gemm_is_said_before_the_build(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"2 layers in mxfp8 are stored in 8 bit and multiplied in half precision"):
        receipt = exported(tmp_path, "mxfp8")
    assert receipt["passed"]
    assert {(row["planned"], row["found"]) for row in receipt["audit"]} == {("half, fp8 weights", "half, fp8 weights")}


def test_the_worker_imports_nothing_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("quant", "json"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").write_text(f"open({str(tmp_path / 'flag')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ValueError, match="cannot build this graph: ModuleNotFoundError: No module named 'none'"):
        run_worker({"backend": "none"}, Path("model.onnx"), None, None)
    assert not (tmp_path / "flag").exists()


def test_the_worker_needs_no_torch() -> None:
    import subprocess

    code = "import sys, quant.export.tensorrt.worker; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
