"""The graph that becomes an AOTInductor package equals the module to the bit, and the package computes it.

Packages for CPUs compute their linears by a C++ function; the graphs are those of packages for GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn

from quant.calibration.attention_scales import collect_attention_scales
from quant.export.aoti.op_bodies import BODIES, dequantize_in_graph
from quant.export.aoti.package import (
    METADATA,
    buffers_kept,
    cause_of,
    export_aoti,
    load_aoti,
    scales_as_matrices,
    share_input_scales,
)
from quant.export.onnx.trace import decomposed, trace_for_torch
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.attention.forward import fp8_attention
from quant.kernels.linear import quantized_module
from quant.kernels.linear.conv import QuantConv, weight_of_conv
from quant.kernels.linear.quant_linear import QuantLinear

# Weight format, activation format, and whether the input scale is static.
CASES = [
    ("fp8", "fp8", True),
    ("fp8", "fp8", False),
    ("fp8_channel", "fp8_token", False),
    ("fp8_block", "fp8_group", False),
    ("nvfp4", "nvfp4", True),
    ("nvfp4", None, False),
    ("mxfp8", "mxfp8", False),
    ("mxfp6", None, False),
    ("mxfp4", None, False),
    ("int8", "int8_token", False),
    ("int4", None, False),
]
# Weights or inputs of these are in other cases too; `test_weights_are_decoded_to_the_bit` has every format.
SLOW_CASES = [("fp8", "fp8", False), ("nvfp4", None, False), ("mxfp6", None, False), ("mxfp4", None, False)]
DIMS = {"x": {0: "batch", 1: "sequence"}}


class Gated(nn.Module):
    """Two projections of one input with equal scales, attention on request, and one projection back."""

    def __init__(self, weight: str, activation: str | None, static: bool, attends: bool = False) -> None:
        super().__init__()
        self.attends = attends

        def linear(out: int, features: int) -> QuantLinear:
            dense = torch.randn(out, features, dtype=torch.bfloat16) / features**0.5
            scale = torch.tensor(0.01) if static else None
            bias = torch.randn(out, dtype=torch.bfloat16)
            given = FORMATS[activation] if activation else None
            return QuantLinear(quantize(dense, FORMATS[weight]), bias, given, scale)

        self.gate, self.up, self.down = linear(128, 64), linear(128, 64), linear(64, 128)
        self.register_buffer("scales", torch.tensor([1.0, 1.0, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self.gate(x)) * self.up(x)
        if self.attends:
            q = h.unflatten(-1, (2, 64)).transpose(1, 2).to(torch.float8_e4m3fn)
            h = fp8_attention(q, q, q, self.scales, causal=True).transpose(1, 2).flatten(2)
        return self.down(h)


def lowered(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> torch.export.ExportedProgram:
    """The graph in the ops that Inductor compiles for a GPU."""
    with scales_as_matrices(model):
        program = trace_for_torch(model, inputs, **options)
    share_input_scales(program)
    return decomposed(program, BODIES)


def count(program: torch.export.ExportedProgram, target: str) -> int:
    return sum(target in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(("weight", "activation", "static"), quick_cases(CASES, lambda *case: case not in SLOW_CASES))
def test_graph_is_the_module(weight: str, activation: str | None, static: bool) -> None:
    """Traced on one shape, run on another; the module itself goes through the op and its oracle."""
    model = Gated(weight, activation, static)
    program = lowered(model, {"x": torch.randn(2, 40, 64, dtype=torch.bfloat16)}, dims=DIMS)
    assert count(program, "quant.") == 0
    for shape in ((2, 40, 64), (3, 17, 64)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        torch.testing.assert_close(program.module()(x=x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("weight", "activation", "static"),
    [
        ("int8", "int8_token", False),
        ("int8", "int8_tensor", True),
        ("fp8_channel", "fp8_token", False),
        ("fp8", None, False),
    ],
)
def test_graph_of_convolutions_is_the_module(weight: str, activation: str | None, static: bool) -> None:
    torch.manual_seed(0)
    convs = (nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2))
    given, scale = FORMATS[activation] if activation else None, torch.tensor(0.01) if static else None
    model = nn.Sequential(*(QuantConv(quantize(weight_of_conv(c), FORMATS[weight]), c, given, scale) for c in convs))
    program = lowered(model, {"input": torch.randn(2, 4, 9, 9)}, dims={"input": {0: "batch"}})
    assert count(program, "quant.") == 0
    for x in (torch.randn(2, 4, 9, 9), torch.randn(3, 4, 9, 9)):
        torch.testing.assert_close(program.module()(input=x), model(x), rtol=0, atol=0)


def test_graph_is_the_module_with_attention() -> None:
    model = Gated("fp8", "fp8", True, attends=True)
    program = lowered(model, {"x": torch.randn(2, 40, 64, dtype=torch.bfloat16)}, dims=DIMS)
    x = torch.randn(3, 17, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(program.module()(x=x), model(x), rtol=0, atol=0)


def test_an_input_that_layers_share_is_rounded_once() -> None:
    """gate and up have equal scales in tensors of their own; down has another."""
    model = Gated("fp8", "fp8", True)
    model.down.input_scale = torch.tensor(0.02)
    program = lowered(model, {"x": torch.randn(2, 8, 64, dtype=torch.bfloat16)})
    read = [n for n in program.graph.nodes if n.op == "placeholder" and "input_scale" in n.name and n.users]
    assert [n.name for n in read] == ["b_gate_input_scale", "b_down_input_scale"]
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(program.module()(x=x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith(("_token", "_group"))])
def test_weights_are_decoded_to_the_bit(name: str) -> None:
    weight = quantize(torch.randn(130, 256, dtype=torch.float32) * torch.logspace(-6, 3, 256), FORMATS[name])
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(dequantize_in_graph(weight, dtype), weight.dequantize(dtype), rtol=0, atol=0)


@pytest.fixture
def llama() -> nn.Module:
    """A block with grouped queries, every linear in it FP8."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes["num_hidden_layers"] = 1
    model = tiny_models.llama(**sizes, vocab_size=96, head_dim=64, max_position_embeddings=2048, dtype=torch.bfloat16)
    model.requires_grad_(False)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            weight = quantize(module.weight, FORMATS["fp8"])
            new = QuantLinear(weight, None, FORMATS["fp8"], torch.tensor(0.02))
            owner, _, last = name.rpartition(".")
            setattr(model.model.layers.get_submodule(owner), last, new)
    return model


@pytest.mark.parametrize("in_fp8", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_graph_of_a_transformers_model(llama: nn.Module, in_fp8: bool) -> None:
    """Logits of any number of tokens are those that the model itself gives, with attention in FP8 nearly."""
    ids, dims, options = torch.randint(96, (2, 64)), {"input_ids": {0: "batch", 1: "sequence"}}, {}
    if in_fp8:
        scales = collect_attention_scales(llama, ids, kv_format=FORMATS["fp8"], attention_format=FORMATS["fp8"])
        options = {"attention_scales": scales}
    program = lowered(llama, {"input_ids": ids}, dims=dims, ranges={"sequence": (2, 128)}, **options)
    assert count(program, "quant.") == count(program, "quant.fp8_attention") == int(in_fp8)
    # q, k, v and P lose 2.6e-2 each in E4M3, in a block whose small random weights leave them half of the output.
    least, most = (1e-4, 0.1) if in_fp8 else (0.0, 5e-3)
    with torch.no_grad():
        for shape in ((2, 64), (3, 17)):
            ids = torch.randint(96, shape)
            got, expected = program.module()(input_ids=ids).float(), llama(ids).logits.float()
            assert least <= float((got - expected).norm() / expected.norm()) < most


def test_graph_of_ranges_without_the_sizes_of_the_example(llama: nn.Module) -> None:
    """`--shapes sequence=1:8:8`, which a sliding window of eight tokens asks for; examples have 64."""
    dims = {"input_ids": {0: "batch", 1: "sequence"}}
    ranges = {"sequence": (1, 8), "batch": (4, 6)}
    program = lowered(llama, {"input_ids": torch.randint(96, (2, 64))}, dims=dims, ranges=ranges)
    ids = torch.randint(96, (5, 7))
    with torch.no_grad():
        got, expected = program.module()(input_ids=ids).float(), llama(ids).logits.float()
    assert float((got - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "activation", "attends"), [("fp8", "fp8", True), ("nvfp4", None, False)])
def test_package_computes_the_module(
    package: Callable[..., Path], tmp_path: Path, weight: str, activation: str | None, attends: bool
) -> None:
    """A compiler keeps more precision between ops, so inputs near a tie of E4M3 may round the other way."""
    if attends and torch.__version__.startswith("2.11."):
        pytest.skip("Inductor of torch 2.11 writes C++ with E4M3 tensors that does not compile")
    model = Gated(weight, activation, activation is not None, attends)
    example = torch.randn(2, 40, 64, dtype=torch.bfloat16)
    ranges = {"sequence": (1, 512)}
    path = package(model, tmp_path / "model.pt2", {"x": example}, dims=DIMS, ranges=ranges, device="cpu")
    x = torch.randn(3, 20, 64, dtype=torch.bfloat16)[:, :17]  # rows with gaps, which compiled code reads as if without
    got, expected = load_aoti(path)(x=x).float(), model(x).float()
    assert float((got - expected).norm() / expected.norm()) < (0.04 if activation else 0.01)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


def test_inputs_are_laid_out_as_compiled_code_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads past strides; a cache with gaps is refused, because a decoder's package would write into a copy."""
    received, metadata = [], dict[str, str]()

    class Package:
        def get_metadata(self) -> dict[str, str]:
            return metadata

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            received.append((args, kwargs))

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, **_: Package())
    x = torch.arange(24).reshape(4, 6)
    load_aoti("m.pt2")([x], mask=x[:2, :3])
    ((((whole,),), options),) = received
    assert whole is x and options["mask"].is_contiguous() and options["mask"].tolist() == [[0, 1, 2], [6, 7, 8]]
    metadata[METADATA] = "{}"
    with pytest.raises(ValueError, match=r"m\.pt2: an input \[4, 3\] of strides \[6, 1\] is not contiguous"):
        load_aoti("m.pt2")({"input_ids": x}, [x, x[:, :3]])


def test_garbage_is_searched_for_rarely_and_then_as_before() -> None:
    before, seen = gc.get_threshold(), []

    class Watched(nn.Module):
        main_input_name = property(lambda self: seen.append(gc.get_threshold()[0]))

    with pytest.raises(ValueError, match="Watched does not export"):
        export_aoti(Watched(), "m.pt2", {}, device="cpu")
    assert seen[0] > before[0] and gc.get_threshold() == before


@pytest.mark.parametrize(("weight", "activation", "static"), CASES[:3])
def test_graph_with_scaled_mm(monkeypatch: pytest.MonkeyPatch, weight: str, activation: str, static: bool) -> None:
    """What a GPU with FP8 tensor cores gets, through PyTorch's `_scaled_mm` for CPUs."""
    monkeypatch.setattr("quant.export.aoti.op_bodies.has_fp8_tensor_cores", lambda x: True)
    model, x = Gated(weight, activation, static), torch.randn(2, 40, 64, dtype=torch.bfloat16)
    program = lowered(model, {"x": x})
    assert count(program, "_scaled_mm") == 3
    if "channel" in weight and torch.__version__.startswith("2.11."):
        return  # whose `_scaled_mm` for CPUs takes one scale for each operand
    got, expected = program.module()(x=x).float(), model(x).float()
    assert float((got - expected).norm() / expected.norm()) < 0.04


class Linears(nn.Module):
    """A linear of every weight format, and of every pair with an input format; every other one has a bias."""

    def __init__(self, dtype: torch.dtype, features: int) -> None:
        super().__init__()
        self.cases = [(name, None, False) for name in FORMATS if not name.endswith(("_token", "_group"))] + CASES
        self.cases += [("nvfp4", "nvfp4", False), ("int8", "int8_tensor", True), ("int4", "int4_g32", False)]
        self.cases += [(name, name, False) for name in ("mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4")]
        self.layers = nn.ModuleList()
        for index, (weight, activation, static) in enumerate(self.cases):
            dense = torch.randn(72, features) * torch.logspace(-4, 2, features)
            bias = torch.randn(72, dtype=dtype) if index % 2 else None
            rounding = FORMATS[activation] if activation else None
            scale = torch.tensor(0.013) if static else None
            self.layers.append(QuantLinear(quantize(dense, FORMATS[weight]), bias, rounding, scale))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linears_of_a_cpu_package_are_the_oracle_to_the_bit(
    package: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Blocks of zeros, numbers near the smallest, infinity and NaN come out as eager PyTorch computes them."""
    torch.manual_seed(0)
    features = 256
    model = Linears(dtype, features)
    path = package(model, tmp_path / "m.pt2", {"x": torch.ones(2, 5, features, dtype=dtype)}, dims=DIMS, device="cpu")
    run = load_aoti(path)
    for shape in ((2, 5, features), (1, 1, features), (3, 40, features)):
        plain = torch.randn(shape) * torch.logspace(-5, 3, features)
        with_zeros, tiny, special = plain.clone(), plain * (1e-4 if dtype is torch.float16 else 1e-30), plain.clone()
        with_zeros[..., ::7] = with_zeros[0, 0] = 0
        special[0, 0, 3], special[-1, -1, 5] = torch.inf, torch.nan
        for x in (plain, with_zeros, tiny, special):
            for case, got, expected in zip(model.cases, run(x=x.to(dtype)), model(x.to(dtype)), strict=True):
                assert torch.equal(got.nan_to_num(12345.0), expected.nan_to_num(12345.0)), case


def test_bad_input(tmp_path: Path) -> None:
    model, x = Gated("fp8", "fp8", True), torch.randn(2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"ends in \.pt2"):
        export_aoti(model, tmp_path / "model.so", {"x": x})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device here"):
            export_aoti(model, tmp_path / "model.pt2", {"x": x}, device="cuda")

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(ValueError, match="Branches decides by values of its inputs, which a graph cannot"):
        export_aoti(Branches(), tmp_path / "model.pt2", {"x": x})
    options = {"cpp.cxx": ("/no/such/compiler",)}
    with pytest.raises(ValueError, match=r"did not compile it: .*\('/no/such/compiler',\); install g\+\+, or set CXX"):
        export_aoti(nn.Linear(8, 8), tmp_path / "m.pt2", {"input": torch.ones(1, 8)}, device="cpu", options=options)
    assert list(tmp_path.iterdir()) == []


def test_the_cause_is_the_last_exception_of_a_traceback() -> None:
    """As Inductor wraps the traceback of the process that compiles a kernel."""
    error = "triton.compiler.errors.CompilationError: at 3:11:\n    x = y\n        ^\nValueError('Cannot bitcast')"
    frames = 'Traceback (most recent call last):\n  File "/x.py", line 3, in f\n    y: int = g()\n'
    wrapped = RuntimeError(f"Failed to run autotuning code block: An exception:\n\nName=triton_3\n{frames}{error}\n")
    assert cause_of(wrapped) == (
        "triton.compiler.errors.CompilationError: at 3:11: x = y ^ ValueError('Cannot bitcast')"
    )
    compiler = (
        "C++ compile error\n\nCommand:\ng++ -O1 x.cpp\n\nOutput:\nx.cpp:4:2: error: 'at::X' has not been declared\n4 |"
    )
    assert cause_of(RuntimeError(compiler)) == "x.cpp:4:2: error: 'at::X' has not been declared 4 |"
    long = cause_of(RuntimeError("C++ compile error\n" + "x" * 5000 + "\nno such header"))
    assert long.startswith("C++ compile error") and long.endswith("no such header") and len(long) < 1000


@pytest.mark.parametrize("address", [id, lambda writeline: id(writeline.__self__)])
def test_arrays_are_declared_in_the_buffer_that_names_them(
    monkeypatch: pytest.MonkeyPatch, address: Callable[[Any], int]
) -> None:
    """As torch 2.11 and as later versions remember a buffer; a freed one gives its address to the next."""
    from torch._inductor.codegen.common import IndentedBuffer
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    class Wrapper(CppWrapperCpu):
        def __init__(self) -> None:
            self.arrays: dict[tuple[str, int], str] = {}

    def declare(self: Any, int_array: str, writeline: Callable[[str], None]) -> str:
        key = (int_array, address(writeline))
        if key not in self.arrays:
            self.arrays[key] = f"int_array_{len(self.arrays)}"
            writeline(f"const int64_t {self.arrays[key]}[] = {int_array};")
        return self.arrays[key]

    monkeypatch.setattr(CppWrapperCpu, "codegen_int_array_var", declare)
    wrapper = Wrapper()
    with buffers_kept():
        for _ in range(64):
            buffer = IndentedBuffer()
            for _ in range(2):
                array = wrapper.codegen_int_array_var("{2, 3}", buffer.writeline)
                assert buffer.getvalue() == f"const int64_t {array}[] = {{2, 3}};\n"
    assert CppWrapperCpu.codegen_int_array_var is declare


def test_a_compiler_with_a_static_cpp_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that this compiler makes would crash the process that loads it, so nothing is compiled."""
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *_, **__: pytest.fail("it compiles"))
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    (tmp_path / "out").mkdir()
    options = {"cpp.cxx": (str(compiler),)}
    with pytest.raises(ValueError, match=r"links libstdc\+\+ statically.*set CXX"):
        export_aoti(
            nn.Linear(8, 8), tmp_path / "out" / "m.pt2", {"input": torch.ones(1, 8)}, device="cpu", options=options
        )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.gpu
def test_gpu_package_with_fp8_matmul_and_attention(package: Callable[..., Path], tmp_path: Path) -> None:
    """On a GPU: `_scaled_mm` and our Triton kernel in the package, against the oracle on the CPU."""
    model = Gated("fp8", "fp8", True, attends=True)
    example = torch.randn(2, 40, 64, dtype=torch.bfloat16)
    x = torch.randn(3, 33, 64, dtype=torch.bfloat16)
    expected = model(x).float()
    path = package(model, tmp_path / "model.pt2", {"x": example}, dims=DIMS, device="cuda")
    got = load_aoti(path)(x=x.cuda()).float().cpu()
    assert float((got - expected).norm() / expected.norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_of_a_gpu_package_are_near_the_oracle(
    package: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Every format by tiles for few tokens and for many, and a convolution; the oracle runs on the CPU."""
    torch.manual_seed(0)
    model, conv = Linears(dtype, 256), nn.Conv2d(4, 8, 3)
    example = torch.randn(2, 5, 256, dtype=dtype)
    run = load_aoti(package(model, tmp_path / "m.pt2", {"x": example}, dims=DIMS, device="cuda"))
    for shape in ((2, 5, 256), (3, 40, 256)):
        x = torch.randn(shape, dtype=dtype)
        expected = model.cpu()(x)
        for case, got, right in zip(model.cases, run(x=x.cuda()), expected, strict=True):
            error = (got.cpu().double() - right.double()).norm() / right.double().norm()
            # A compiler keeps more precision between ops, so inputs near a tie may round the other way.
            assert float(error) < (0.06 if case[1] else 0.01), case
    conv = QuantConv(quantize(weight_of_conv(conv), FORMATS["int8"]), conv, FORMATS["int8_token"], None)
    layer = nn.Sequential(conv).to(dtype)
    image = torch.randn(2, 4, 9, 9, dtype=dtype)
    right = layer(image)
    got = load_aoti(package(layer, tmp_path / "c.pt2", {"input": image}, device="cuda"))(input=image.cuda())
    assert float((got.cpu().double() - right.double()).norm() / right.double().norm()) < 0.04


def test_weights_in_a_kernels_layout_are_restored_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ran on a Hopper GPU has them; this CPU is taken for one."""
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: True)
    model, x = Gated("nvfp4", None, False), torch.randn(2, 3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        assert model.up.codes.dtype is torch.int32
        assert torch.equal(lowered(model, {"x": x}, dims=DIMS).module()(x=x), expected)
        assert torch.equal(model(x), expected) and model.up.codes.dtype is torch.int32
