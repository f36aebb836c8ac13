"""Lowering gives torch-tensorrt's quantize ops: the tests check their arguments and what the graph computes.

The ops belong to ModelOpt. Where it is not installed, the test declares them with ModelOpt's schemas. Their bodies
here are what TensorRT's documentation says of QuantizeLinear and of two-level block quantization, written plainly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from quant.export.tensorrt.torch_tensorrt import lower, lowered_program, require_ops
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv, weight_of_conv
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts

_QUANTIZE = "(Tensor input, Tensor amax, int num_bits, int exponent_bits, bool unsigned, bool narrow_range) -> Tensor"
_BLOCK = (
    "(Tensor input, int block_size, Tensor amax, int num_bits, int exponent_bits, int scale_num_bits, "
    "int scale_exponent_bits) -> Tensor"
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_op(x: torch.Tensor, amax: torch.Tensor, *bits: int) -> torch.Tensor:
    assert bits == (8, 4, False, False)
    scale = amax / 448
    return ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def block_op(x: torch.Tensor, block: int, amax: torch.Tensor, *bits: int) -> torch.Tensor:
    assert (block, *bits) == (16, 4, 2, 8, 4)
    blocks, second = x.float().unflatten(-1, (-1, 16)), amax / (6 * 448)
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * second)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    scaled = blocks / (scale * second)
    # Nearest of the eight magnitudes; ties go to the one whose code is even.
    distance = (scaled.abs().clamp(max=6.0)[..., None] - E2M1).abs() + torch.tensor([0, 1e-6] * 4)
    values = E2M1[distance.argmin(-1)].copysign(scaled)
    return (values * scale * second).flatten(-2).to(x.dtype)


@pytest.fixture(autouse=True)
def ops() -> Iterator[None]:
    try:
        require_ops()
    except ValueError:
        with torch.library._scoped_library("tensorrt", "DEF") as library:
            library.define("quantize_op" + _QUANTIZE)
            library.define("dynamic_block_quantize_op" + _BLOCK)
            for name in ("quantize_op", "dynamic_block_quantize_op"):
                torch.library.register_fake(f"tensorrt::{name}", lambda x, *_: torch.empty_like(x), lib=library)
            yield
    else:
        yield


def run(program: torch.export.ExportedProgram, x: torch.Tensor) -> torch.Tensor:
    """The graph's output, with the two ops as they are above."""
    bodies = {"quantize_op": quantize_op, "dynamic_block_quantize_op": block_op}

    class Run(torch.fx.Interpreter):
        def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            namespace, _, name = str(target).partition(".")
            body = bodies[name.partition(".")[0]] if namespace == "tensorrt" else target
            return body(*args, **kwargs)

    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    out = Run(module).run(x)
    assert isinstance(out, torch.Tensor)
    return out


def model_in(name: str, activation: str | None, static: bool, **parts: object) -> nn.Module:
    weight = quantize(torch.randn(48, 64, dtype=torch.bfloat16), FORMATS[name])
    given = FORMATS[activation] if activation else None
    scale = torch.tensor(0.01 if name == "fp8" else 0.002) if static else None
    linear = QuantLinear(weight, torch.randn(48, dtype=torch.bfloat16), given, scale, **parts)
    return nn.Sequential(linear, nn.ReLU())


@pytest.mark.parametrize(
    ("name", "activation", "static"),
    [
        ("fp8", "fp8", True),
        ("fp8", "fp8", False),
        ("fp8", None, False),
        ("nvfp4", "nvfp4", True),
        ("nvfp4", None, False),
    ],
)
def test_lowered_graph_computes_the_layer(name: str, activation: str | None, static: bool) -> None:
    model, x = model_in(name, activation, static), torch.randn(5, 64, dtype=torch.bfloat16)
    before = list(model.modules())
    program = lowered_program(model, {"input": x})
    assert list(model.modules()) == before
    got, expected = run(program, x).float(), model(x).float()
    # The op's weight is rounded to BF16 twice where ours is rounded once.
    assert float((got - expected).norm() / expected.norm()) < 2**-8
    op = "quantize_op" if name == "fp8" else "dynamic_block_quantize_op"
    nodes = [n for n in program.graph.nodes if str(n.target) == f"tensorrt.{op}.default"]
    owners = [list(n.meta["nn_module_stack"].values())[-1][0].rpartition(".")[2] for n in nodes]
    assert owners == (["input_quantizer", "weight_quantizer"] if activation else ["weight_quantizer"])


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_amax_is_the_scale_of_the_checkpoint(name: str) -> None:
    model = model_in(name, name, True)
    linear = model[0]
    program = lowered_program(model, {"input": torch.randn(5, 64, dtype=torch.bfloat16)})
    amax = {key: float(value) for key, value in program.state_dict.items() if key.endswith("amax")}
    weight = linear.scale if name == "fp8" else linear.global_scale
    largest = 448 if name == "fp8" else 6 * 448
    assert amax["0.weight_quantizer.amax"] == pytest.approx(float(weight) * largest, rel=1e-6)
    assert amax["0.input_quantizer.amax"] == pytest.approx(float(linear.input_scale) * largest, rel=1e-6)
    assert linear.weight_shape == (48, 64)


def test_what_runs_beside_the_matmul_stays() -> None:
    parts = {
        "pre_scale": torch.rand(64, dtype=torch.bfloat16) + 0.5,
        "hadamard": 64,
        "lowrank": (torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(48, 4, dtype=torch.bfloat16)),
    }
    assert RunTimeParts(**parts)
    model, x = model_in("fp8", "fp8", True, **parts), torch.randn(5, 64, dtype=torch.bfloat16)
    got, expected = run(lowered_program(model, {"input": x}), x).float(), model(x).float()
    assert float((got - expected).norm() / expected.norm()) < 2**-7


def test_searched_block_scales_are_refused_and_not_changed() -> None:
    weight = quantize(torch.randn(48, 64), FORMATS["nvfp4"], rule="four_over_six")
    model = nn.Sequential(QuantLinear(weight))
    with pytest.raises(
        ValueError, match=r"0 \[48, 64\]: torch-tensorrt finds NVFP4 block scales anew, and \d+ of 3072"
    ):
        lowered_program(model, {"input": torch.randn(2, 64)})


@pytest.mark.parametrize(
    ("weight", "activation", "named"), [("fp8_channel", "fp8_token", "fp8_channel, fp8_token"), ("int8", None, "int8")]
)
def test_formats_without_an_op(tmp_path: Path, weight: str, activation: str | None, named: str) -> None:
    quantized = quantize(torch.randn(48, 64), FORMATS[weight])
    model = nn.Sequential(QuantLinear(quantized, None, FORMATS[activation] if activation else None))
    with pytest.raises(
        ValueError, match=rf"0 \[48, 64\]: torch-tensorrt has no op for {named}, only for fp8 and nvfp4"
    ):
        lower(model, tmp_path / "model.pt2", {"input": torch.randn(2, 64)})
    assert list(tmp_path.iterdir()) == []


def test_fused_experts_are_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = QuantExperts(quantize(torch.randn(2, 16, 32), FORMATS["fp8"]))

    with pytest.raises(ValueError, match="up_proj: torch-tensorrt has no op for fused experts"):
        lowered_program(Experts(), {"x": torch.randn(2, 32)})


def test_program_is_written_and_read(tmp_path: Path) -> None:
    model, x = model_in("fp8", "fp8", True), torch.randn(5, 64, dtype=torch.bfloat16)
    path = lower(model, tmp_path / "model.pt2", {"input": x})
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    again = run(torch.export.load(path), x)
    torch.testing.assert_close(again, run(lowered_program(model, {"input": x}), x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_becomes_one_of_quantizers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    conv = kind(8, 16, 3, stride=2, padding=1).bfloat16()
    weight = quantize(weight_of_conv(conv), FORMATS["fp8"])
    model = nn.Sequential(QuantConv(weight, conv, FORMATS["fp8"], torch.tensor(0.01)), nn.ReLU())
    x = torch.randn(2, 8, 7, 7, dtype=torch.bfloat16)
    program = lowered_program(model, {"input": x})
    assert isinstance(model[0], QuantConv) and not [name for name in program.state_dict if "codes" in name]
    got, expected = run(program, x).float(), model(x).float()
    assert got.shape == expected.shape and float((got - expected).norm() / expected.norm()) < 2**-8
    nodes = [n for n in program.graph.nodes if str(n.target) == "tensorrt.quantize_op.default"]
    owners = [list(n.meta["nn_module_stack"].values())[-1][0].rpartition(".")[2] for n in nodes]
    assert owners == ["input_quantizer", "weight_quantizer"]


def test_a_convolution_with_a_scale_for_each_channel_is_refused() -> None:
    conv = nn.Conv2d(8, 16, 3)
    model = nn.Sequential(QuantConv(quantize(weight_of_conv(conv), FORMATS["int8"]), conv))
    with pytest.raises(ValueError, match=r"^0 \[16, 72\]: torch-tensorrt has no op for int8"):
        lowered_program(model, {"input": torch.randn(2, 8, 7, 7)})
