"""A decoder's package reads prompts and decodes: its graph and its compiled code write the tokens of the model."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import torch
from click.testing import CliRunner
from samples import BASE
from serving_samples import CAPACITY, NEW

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.evaluation.evaluate import inputs_moved
from quant.export.aoti import package
from quant.export.aoti.package import (
    DECODER_BODIES,
    METADATA,
    AotiSession,
    decoder_program,
    scales_as_matrices,
    siblings_merged,
)
from quant.export.engines.check_engine import forced_run, generate_tokens, reference_run
from quant.export.onnx.trace import decomposed
from quant.kernels.linear import quantized_module

pytest.importorskip("transformers", reason="needs the extra hf")

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))


class GraphSession:
    """A session over the graph that the package is compiled from, which PyTorch runs op by op."""

    backend, dtype, plan, recurrent = "graph", "float32", "", False

    def __init__(self, model: Any, capacity: int) -> None:
        program, self._shapes = decoder_program(model, capacity)
        program = decomposed(program, DECODER_BODIES)
        self._run, self.capacity = program.module(), capacity

    def most_rows(self) -> int:
        return 8

    def begin(self, rows: int) -> None:
        """The cache holds large random numbers, which no token may see."""
        generator = torch.Generator().manual_seed(3)
        self.caches = [
            50 * torch.randn(rows, heads, self.capacity, dim, generator=generator).to(dtype)
            for heads, dim, dtype in self._shapes
        ]

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": ids, "lengths": lengths, "last": last}
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        with torch.no_grad():
            logits = self._run(tensors, self.caches)
        result: np.ndarray = logits.float().numpy()
        return result


def quantized(kind: str, format: str, **sizes: int) -> Any:
    model = serving_samples.decoder(kind, **sizes)
    quant.quantize(model, format, ROWS, solver="rtn")
    return model


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("llama-64", "nvfp4a16"),
        pytest.param("gemma3", "int4a16", marks=pytest.mark.slow),
        pytest.param("mistral", "mxfp6a16", marks=pytest.mark.slow),
    ],
)
def test_the_graph_writes_the_models_tokens(kind: str, format: str) -> None:
    """Rows of three lengths, whole and in chunks, over a cache that held other numbers."""
    model = quantized(kind, format)
    rows = serving_samples.prompts()
    expected = serving_samples.greedy_tokens(model, rows, 5)
    session = GraphSession(model, CAPACITY)
    assert generate_tokens(session, rows, 5) == expected
    assert generate_tokens(session, rows, 5, chunk=64) == expected


@pytest.mark.parametrize("format", ["nvfp4a16", "mxfp4a16", "mxfp6a16"])
def test_weights_in_a_kernels_layout_are_restored(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on a Hopper GPU has them, and siblings that were merged; this CPU is taken for one."""
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: True)
    model = serving_samples.decoder("llama-64", num_hidden_layers=1)
    quant.quantize(model, format, ROWS[:1], solver="rtn")
    with torch.no_grad():
        model.to(torch.bfloat16)(torch.tensor([[1, 2, 3]]))
    assert model.model.layers[0].mlp.down_proj.codes.dtype in (torch.int32, torch.float8_e4m3fn)
    stored = model.model.layers[0].mlp.down_proj.weight_format
    with siblings_merged(model), scales_as_matrices(model):  # as for a GPU
        program, _ = decoder_program(model, 64)
    codes = {name: x for name, x in program.state_dict.items() if name.endswith(".codes")}
    assert len(codes) == 4
    for name, x in codes.items():
        assert x.dtype is torch.uint8
        columns = x.shape[1] * 8 // stored.element.bits
        assert program.state_dict[name.replace(".codes", ".scale")].shape == (len(x), columns // stored.block[1])


@pytest.mark.parametrize(("format", "products"), [("nvfp4a16", 4), ("fp8", 7)])
def test_siblings_become_one_product(format: str, products: int) -> None:
    """As for a GPU. Weights in FP8 have a scale of their own each, so they stay apart."""
    model = quantized("llama-64", format, num_hidden_layers=1)
    names = [name for name, _ in model.named_modules()]
    expected = model(ROWS).logits
    with siblings_merged(model):
        program, _ = decoder_program(model, CAPACITY)
        assert torch.equal(model(ROWS).logits, expected)
    linears = [node for node in program.graph.nodes if node.target is torch.ops.quant.linear.default]
    assert len(linears) == products
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(model(ROWS).logits, expected)


def test_only_the_new_tokens_are_written() -> None:
    session = GraphSession(quantized("llama-64", "int4a16", num_hidden_layers=1), 64)
    session.begin(2)
    before = [cache.clone() for cache in session.caches]
    session.step(np.array([[1, 2, 3], [4, 5, 6]]), np.array([10, 20]), np.array([2, 2]))
    for cache, old in zip(session.caches, before, strict=True):
        changed = (cache != old).all(-1)  # [rows, kv_heads, tokens]
        expected = torch.zeros_like(changed)
        expected[0, :, 10:13] = expected[1, :, 20:23] = True
        assert torch.equal(changed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "format"), [("llama-64", "nvfp4"), ("qwen3", "fp8"), ("gemma3", "int4a16")])
def test_the_package_writes_the_models_tokens(
    tmp_path: Path, decoder_package: Callable[..., Path], kind: str, format: str
) -> None:
    """Equal tokens in 16-bit inputs; where inputs are rounded, another order of sums may round one the other way."""
    model = quantized(kind, format)
    session = AotiSession(decoder_package(model, tmp_path / "model.pt2", CAPACITY), unsafe_load=True)
    assert (session.capacity, session.dtype) == (CAPACITY, "float32")
    rows = serving_samples.prompts()
    if format == "int4a16":
        expected = serving_samples.greedy_tokens(model, rows)
        assert generate_tokens(session, rows, NEW) == expected
        assert generate_tokens(session, rows, NEW, chunk=64) == expected
        return
    reference = reference_run(model, rows, NEW)
    for chunk in (None, 64):
        run = forced_run(session, rows, reference.tokens, chunk=chunk)
        assert (run.tokens == reference.tokens).mean() > 0.95
        assert np.linalg.norm(run.logits - reference.logits) < 0.05 * np.linalg.norm(reference.logits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "format"),
    [("llama-64", "nvfp4"), ("llama-128", "nvfp4a16"), ("qwen3", "fp8"), ("gemma3", "int4a16"), ("mistral", "mxfp8")],
)
def test_a_gpu_package_writes_the_models_tokens(
    tmp_path: Path, decoder_package: Callable[..., Path], kind: str, format: str
) -> None:
    """Rows of three lengths, whole and in chunks, differ as roundings of BF16 do, which flip codes of inputs."""
    model = quantized(kind, format).to("cuda", torch.bfloat16)
    session = AotiSession(decoder_package(model, tmp_path / "model.pt2", CAPACITY), unsafe_load=True)
    rows = serving_samples.prompts()
    reference = reference_run(model, rows, NEW)
    with inputs_moved(model, torch.bfloat16):
        moved = reference_run(model, rows, NEW, reference.tokens)
    noise = np.linalg.norm(moved.logits - reference.logits)
    for chunk in (None, 64):
        run = forced_run(session, rows, reference.tokens, chunk=chunk)
        assert np.linalg.norm(run.logits - reference.logits) < 2 * noise < np.linalg.norm(reference.logits)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("aoti") / "checkpoint"
    arguments = [str(BASE), "--format", "int4a16", "--effort", "0", "--out", str(out), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    return out


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.slow
def test_the_commands(checkpoint: Path, tmp_path: Path) -> None:
    """Two prompts together, and the comparison with the checkpoint; without --trust-remote-code no code is loaded."""
    package = tmp_path / "model.pt2"
    exported = run("export", checkpoint, "--to", "aoti", "--capacity", 96, "--dtype", "fp32", "--out", package)
    if "links libstdc++ statically" in exported.stderr:
        pytest.skip(exported.stderr)
    assert exported.exit_code == 0, exported.output
    arguments = ["generate", checkpoint, "--engine", package, "--max-new-tokens", 8, "--prompt", "The", "--json"]
    written = json.loads(run(*arguments, "--prompt", "a b c d e f", "--trust-remote-code").stdout)
    model = quant.load(checkpoint).to(torch.float32)
    for tokens, expected in zip(
        written["tokens"], serving_samples.greedy_tokens(model, written["prompt_tokens"], 8), strict=True
    ):
        assert tokens == expected[: len(tokens)] and (len(tokens) == 8 or tokens[-1] == 0)
    checked = run("check", package, "--source", checkpoint, "--max-new-tokens", 16, "--trust-remote-code", "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["agreeing"] >= 46, checked.output
    refused = run(*arguments)
    assert refused.exit_code == 2 and "is compiled code, which runs when it is loaded" in refused.stderr


ENTRIES = {
    "AOTI_PLATFORM": "linux", "AOTI_MACHINE": "x86_64", "AOTI_CPU_ISA": "AVX512", "AOTI_DEVICE_KEY": "cpu",
    "AOTI_COMPUTE_CAPABILITY": "",
}  # fmt: skip
DESCRIPTION = {"capacity": 64, "caches": [[2, 16]], "dtype": "float32", "plan": "", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("entries", "description", "words"),
    [
        ({}, {"torch": "2.4.1"}, "was compiled by torch 2.4.1, and torch 2.13.0 is installed; export it again"),
        ({"AOTI_PLATFORM": "win32"}, {}, "was compiled for win32 x86_64, and this is linux x86_64"),
        ({}, {}, "was compiled for a processor with AVX512, which this one lacks"),
        ({"AOTI_DEVICE_KEY": "cuda"}, {}, "was compiled for a GPU, and this machine has none"),
        ({"AOTI_CPU_ISA": "INVALID_VEC_ISA"}, {}, "is compiled code, which runs when it is loaded; if you trust it"),
        ({}, {"capacity": "many"}, "no package of a decoder with a KV cache; export one with"),
        ({}, {"caches": [[2]]}, "no package of a decoder with a KV cache"),
        ({}, {"dtype": "no_such_dtype"}, "no package of a decoder with a KV cache"),
    ],
)
def test_packages_that_do_not_fit_are_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], description: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(package, "load_aoti", lambda path: pytest.fail("loaded"))
    monkeypatch.setattr(package.torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(package.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(package.sys, "platform", "linux")
    monkeypatch.setattr(package.platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(package._INSTRUCTIONS, "AVX512", lambda: False)
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        fields = {**ENTRIES, **entries, METADATA: json.dumps({**DESCRIPTION, **description})}
        archive.writestr("model/data/aotinductor/model/c.wrapper_metadata.json", json.dumps(fields))
    with pytest.raises(UserError, match=words) as caught:
        AotiSession(path)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_package(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"none")
    with pytest.raises(UserError, match=r"model\.pt2: no package of AOTInductor"):
        AotiSession(tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(UserError, match="no package of a decoder with a KV cache"):
        AotiSession(tmp_path / "other.pt2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capacity", 4], "--capacity 4: a cache holds 8 tokens or more"),
        (["--capacity", 100_000], "has positions for"),
    ],
)
def test_capacities_that_do_not_fit(checkpoint: Path, tmp_path: Path, arguments: list[Any], words: str) -> None:
    result = run("export", checkpoint, "--to", "aoti", "--out", tmp_path / "m.pt2", *arguments)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["aoti", "onnx"])
def test_a_capacity_that_memory_does_not_hold(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("quant.export.onnx.serving.memory_left", lambda: 10_000)
    out = tmp_path / ("m.pt2" if kind == "aoti" else "m")
    result = run("export", checkpoint, "--to", kind, "--dtype", "fp32", "--out", out, "--capacity", 64)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "--capacity 64: two rows of the KV cache" in result.stderr and "lower it" in result.stderr
    assert list(tmp_path.iterdir()) == []
