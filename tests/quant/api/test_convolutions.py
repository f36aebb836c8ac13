"""Convolutions and GPT-2's `Conv1D`: quantized, written, loaded, with the values that their rounded weights give."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import quant
from quant.base.errors import UserError
from quant.calibration.walk.solve import solve_plan
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.files import modelopt
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.conv import QuantConv
from quant.models.open_model import open_model
from quant.recipes.blocks import as_linears
from quant.recipes.layers import LayerKind
from quant.recipes.plan import edit, parse_setting

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
LEAVES_OUT_TRANSFORMERS = pytest.mark.filterwarnings("ignore:.*needs? quant.load.*:UserWarning")
TRANSFORMERS_IN_FLOAT32 = pytest.mark.filterwarnings("ignore:transformers unpacks:UserWarning")


def with_rounded_weights(model: nn.Module, plan: quant.Plan) -> nn.Module:
    """A copy of an unquantized model, its planned weights rounded as matrices of rows of output channels."""
    twin = copy.deepcopy(model)
    for layer in plan.quantized:
        weight: Any = twin.get_submodule(layer.name).weight
        matrix = weight.detach().t() if layer.kind == LayerKind.LINEAR else weight.detach().flatten(1)
        assert layer.weight is not None
        found = quantize(matrix.contiguous(), layer.weight).dequantize()
        weight.data = found.t() if layer.kind == LayerKind.LINEAR else found.view(weight.shape)
    return twin


@LEAVES_OUT_TRANSFORMERS
@pytest.mark.parametrize(
    ("format", "kept"),
    [
        ("int8", ["classifier.1"]),
        ("fp8_channel", ["resnet.embedder.embedder.convolution", "classifier.1"]),
    ],
)
def test_a_resnet_from_the_command_line(tmp_path: Path, format: str, kept: list[str]) -> None:
    original = tiny_models.resnet()
    original.save_pretrained(tmp_path / "in")
    command = [str(tmp_path / "in"), "--format", format, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(quantize_command, command)
    assert result.exit_code == 0, result.output
    model = quant.load(tmp_path / "out")
    plan = quant.Plan.load(tmp_path / "out" / "plan.json")
    convs = {layer.name: layer for layer in plan.layers if layer.kind == LayerKind.CONV}
    assert len(convs) == 6 and convs.keys() | {"classifier.1"} == {
        name for name, module in original.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)
    }
    assert [m.name for m in plan.layers if m.weight is None and m.kind != LayerKind.NORM] == kept
    # With inputs in 16 bit, the logits are those of the model with rounded weights.
    for module in model.modules():
        if isinstance(module, QuantConv):
            assert module.activation_format is FORMATS["int8_token" if format == "int8" else "fp8_token"]
            module.activation_format = None
    with torch.no_grad():
        expected = with_rounded_weights(original, plan)(IMAGES).logits
        assert torch.allclose(model(IMAGES).logits, expected, atol=1e-5 * float(expected.abs().max()))


@LEAVES_OUT_TRANSFORMERS
def test_the_shape_of_resnet_50(tmp_path: Path) -> None:
    """Bottlenecks, strides and shortcuts at their real sizes: 53 convolutions, 23.5 million weights in them."""
    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64}
    model = tiny_models.resnet(**sizes, layer_type="bottleneck", num_labels=1000)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images).logits
        done = quant.quantize(model, "int8_static", [images])
        convs = [layer for layer in done.plan.quantized if layer.kind == LayerKind.CONV]
        assert len(convs) == 53 and sum(layer.numel for layer in convs) == 23_454_912
        found = done.model(images).logits
        assert float((found - expected).norm() / expected.norm()) < 0.05
        quant.save(done.model, done.plan, tmp_path / "out")
        assert torch.equal(quant.load(tmp_path / "out")(images).logits, found)


@LEAVES_OUT_TRANSFORMERS
@pytest.mark.parametrize(("format", "layers", "largest"), [("fp8", 5, 448), ("int8_static", 6, 127)])
def test_static_input_scales_are_calibrated_and_kept(tmp_path: Path, format: str, layers: int, largest: int) -> None:
    seen: dict[str, float] = {}
    original = tiny_models.resnet()
    for name, module in original.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda _, x, name=name: seen.update({name: float(x[0].detach().abs().max())})
            )
    original(IMAGES)
    done = quant.quantize(tiny_models.resnet(), format, [IMAGES])
    assert len(done.plan.quantized) == layers
    for layer in done.plan.quantized:
        module = done.model.get_submodule(layer.name)
        assert float(module.input_scale) == pytest.approx(seen[layer.name] / largest, rel=1e-6)
    quant.save(done.model, done.plan, tmp_path / "out")
    loaded = quant.load(tmp_path / "out")
    for name, tensor in done.model.state_dict().items():
        held = loaded.state_dict()[name]
        assert held.dtype is tensor.dtype and torch.equal(held, tensor), name
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES).logits, done.model(IMAGES).logits)


def test_an_observer_chooses_the_scales_of_convolutions() -> None:
    seen: list[torch.Tensor] = []
    original = tiny_models.resnet()
    name = "resnet.encoder.stages.1.layers.0.layer.0.convolution"
    original.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().abs().flatten()))
    original(IMAGES)
    done = quant.quantize(tiny_models.resnet(), "int8_static", [IMAGES], observer="percentile")
    exact = torch.quantile(seen[0], 0.9999) / 127
    assert float(done.model.get_submodule(name).input_scale) == pytest.approx(float(exact), rel=0.01)
    assert exact < 0.99 * seen[0].max() / 127


class Convs(nn.Module):
    """Convolutions of every dimension, transposed ones with groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(4, 8, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.three = nn.Conv3d(1, 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.out = nn.ConvTranspose1d(8, 4, 2, bias=False)
        self.lin = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(self.one(self.lin(x)))[..., :4]
        z = self.up(self.two(y[:, None]))
        return self.three(z[:, None]).sum((1, 2))


def test_a_module_of_any_convolutions_is_written_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convs(), torch.randn(2, 4, 8)
    blank = copy.deepcopy(model)
    done = quant.quantize(model, "int8", run=lambda m: m(x))
    assert [layer.name for layer in done.plan.quantized] == ["one", "two", "three", "up", "out", "lin"]
    quant.save(done.model, done.plan, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in files.items() if "weight" in name} == {
        "one.weight": (8, 12), "one.weight_scale": (8, 1), "two.weight": (4, 9), "two.weight_scale": (4, 1),
        "three.weight": (2, 27), "three.weight_scale": (2, 1), "up.weight": (6, 8), "up.weight_scale": (6, 1),
        "out.weight": (4, 16), "out.weight_scale": (4, 1), "lin.weight": (4, 8), "lin.weight_scale": (4, 1),
    }  # fmt: skip
    loaded = quant.load(tmp_path / "out", blank)
    with torch.no_grad():
        assert torch.equal(loaded(x), done.model(x))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_block", "int4"])
def test_block_formats_leave_convolutions_in_16_bit(format: str) -> None:
    layer = quant.make_plan(Convs(), "int8", run=lambda m: m(torch.randn(2, 4, 8))).by_name["two"]
    model = nn.Sequential(nn.Conv2d(128, 128, 1), nn.Flatten(), nn.Linear(128, 16))
    plan = quant.make_plan(model, format if format != "int4" else "int4a16", run=lambda m: m(torch.randn(1, 128, 1, 1)))
    assert layer.weight is FORMATS["int8"] and plan.by_name["2"].weight is FORMATS[format]
    conv = plan.by_name["0"]
    assert conv.weight is None and f"no runtime convolves in blocks, as {format} has them" in conv.reason


@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"padding": 2, "dilation": 2, "stride": 2}, {"padding_mode": "reflect", "padding": 1}],
)
@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8"])
def test_gptq_solves_a_convolution_as_a_linear_layer_of_its_windows(format: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 3, **options)
    images = [torch.randn(2, 16, 1, 9).cumsum(1) + torch.randn(2, 16, 9, 9) for _ in range(4)]
    windows = [_windows(conv, x) for x in images]
    original = conv.weight.detach().double().flatten(1)
    solved = {
        solver: quant.quantize(nn.Sequential(copy.deepcopy(conv)), format, images, solver=solver)
        for solver in ("gptq", "kfac", "rtn")
    }
    assert {layer.solver for layer in solved["kfac"].plan.quantized} == {"gptq"}
    weights = {
        name: each.model[0].quantized_weight.dequantize(torch.float64)  # type: ignore[index]
        for name, each in solved.items()
    }
    assert torch.equal(weights["gptq"], weights["kfac"])
    error = {
        name: float(sum((x.double() @ (weight - original).t()).square().sum() for x in windows))
        for name, weight in weights.items()
    }
    assert error["gptq"] < 0.7 * error["rtn"]


def _windows(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Returns what a convolution multiplies, `[windows, in · kernel]`, by the convolution itself."""
    count = conv.weight[0].numel()
    taps = nn.Conv2d(16, count, 3, conv.stride, conv.padding, conv.dilation, bias=False, padding_mode=conv.padding_mode)
    taps.weight.data = torch.eye(count).view(count, *conv.weight.shape[1:])
    with torch.no_grad():
        return taps(x).flatten(2).mT.flatten(0, 1)  # type: ignore[no-any-return]


def test_a_solver_of_second_moments_leaves_convolutions_of_one_dimension_to_mse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 8))
    weight = model[0].weight.detach().clone().flatten(1)
    done = quant.quantize(model, "int8", [torch.randn(4, 4, 8)], solver="gptq")
    conv = done.plan.by_name["0"]
    assert conv.solver == "mse" and "gptq takes what stands in blocks" in conv.reason
    assert done.plan.by_name["1"].solver == "gptq"
    expected = quantize(weight, FORMATS["int8"], rule="mse")
    assert torch.equal(done.model[0].quantized_weight.codes, expected.codes)  # type: ignore[index]


def test_bare_tensors_of_convolutions_stay_and_say_why(tmp_path: Path) -> None:
    tensors = {"conv.weight": torch.randn(16, 16, 3, 3), "proj.weight": torch.randn(16, 16)}
    plan = quant.make_plan({name: tuple(t.shape) for name, t in tensors.items()}, "int8")
    assert [layer.name for layer in plan.quantized] == ["proj"]
    assert "quantize the module" in plan.by_name["conv"].reason


def test_a_budget_is_for_linear_layers() -> None:
    with pytest.raises(UserError, match="has only convolutions: quantize it in one format"):
        quant.quantize(tiny_models.resnet(), data=IMAGES, bits=8.0, formats=["int8"])


@LEAVES_OUT_TRANSFORMERS
@pytest.mark.parametrize("format", ["fp8_channel", "int8", "nvfp4a16", "mxfp8", "int4a16_g32", "fp8_block"])
def test_gpt2_is_quantized_as_the_linear_layers_that_it_has(tmp_path: Path, format: str) -> None:
    original = tiny_models.gpt2(gain=3.0)
    done = quant.quantize(tiny_models.gpt2(gain=3.0), format)
    names = [layer.name for layer in done.plan.quantized]
    assert len(names) == (2 if format == "fp8_block" else 8) and all(layer.transposed for layer in done.plan.quantized)
    quant.save(done.model, done.plan, tmp_path / "out")
    loaded = quant.load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, done.model(IDS).logits)
        for name in names:
            loaded.get_submodule(name).activation_format = None
        expected = with_rounded_weights(original, done.plan)(IDS).logits
        assert torch.allclose(loaded(IDS).logits, expected, atol=1e-4 * float(expected.abs().max()))


@LEAVES_OUT_TRANSFORMERS
def test_a_bare_gpt2_gets_the_codes_of_its_module(tmp_path: Path) -> None:
    model = tiny_models.gpt2(gain=3.0)
    torch.save(model.state_dict(), tmp_path / "in.pt")
    command = [str(tmp_path / "in.pt"), "--format", "nvfp4a16", "--out", str(tmp_path / "bare")]
    assert CliRunner().invoke(quantize_command, command).exit_code == 0
    done = quant.quantize(model, "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "module")
    bare, module = (load_file(tmp_path / name / "model.safetensors") for name in ("bare", "module"))
    packed = [name for name in module if name.endswith(("weight_packed", "weight_scale"))]
    assert len(packed) == 16 and all(torch.equal(bare[n], module[n]) for n in packed)


@LEAVES_OUT_TRANSFORMERS
def test_layers_of_gpt2_that_stay_keep_their_weight_as_it_was(tmp_path: Path) -> None:
    model = tiny_models.gpt2(gain=3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = quant.quantize(model, "nvfp4a16", IDS.repeat(2, 1), solver="gptq", exclude=["*.1.*"])
    kept = done.model.get_submodule("transformer.h.1.attn.c_proj")
    assert type(kept).__name__ == "Conv1D" and len(done.plan.quantized) == 4
    quant.save(done.model, done.plan, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    same = [name for name in files if ".h.1." in name]
    assert len(same) == 12 and all(torch.equal(files[name], before[name]) for name in same)
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "out")(IDS).logits, done.model(IDS).logits)


def test_data_help_conv1d_as_they_help_linear_layers() -> None:
    rows = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(2))
    original = tiny_models.gpt2(gain=3.0)
    logits = {}
    with torch.no_grad():
        for solver in ("rtn", "awq+gptq"):
            done = quant.quantize(tiny_models.gpt2(gain=3.0), "nvfp4a16", rows, solver=solver)
            logits[solver] = done.model(rows).logits
        exact = original(rows).logits
    errors = {solver: float((found - exact).norm()) for solver, found in logits.items()}
    assert errors["awq+gptq"] < 0.9 * errors["rtn"]


def test_a_budget_measures_conv1d_and_leaves_the_model_as_it_was() -> None:
    model = tiny_models.gpt2(gain=3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = quant.quantize(model, data=IDS.repeat(4, 1), bits=6.0, formats=["nvfp4", "fp8_channel"])
    assert {str(layer.weight) for layer in done.plan.quantized} == {"nvfp4", "fp8_channel"}
    assert all(torch.equal(done.model.state_dict()[n], t) for n, t in before.items() if n in done.model.state_dict())


def test_linears_stand_for_conv1d_and_give_way_with_what_changed() -> None:
    model = tiny_models.gpt2()
    exact = model(IDS).logits
    original = model.transformer.h[0].mlp.c_fc
    with as_linears(model):
        linear = model.transformer.h[0].mlp.c_fc
        assert type(linear) is nn.Linear and linear.weight.data_ptr() == original.weight.data_ptr()
        assert torch.allclose(model(IDS).logits, exact, atol=1e-6)
        linear.weight.data = 2 * linear.weight.data
        other = copy.deepcopy(model)
    assert model.transformer.h[0].mlp.c_fc is original
    with as_linears(other):
        pass
    assert type(other.transformer.h[0].mlp.c_fc) is type(original)
    assert torch.equal(other(IDS).logits, model(IDS).logits) and not torch.equal(model(IDS).logits, exact)


def test_a_directory_of_gpt2_is_planned_from_its_shapes_alone(tmp_path: Path) -> None:
    tiny_models.gpt2().save_pretrained(tmp_path)
    assert len(quant.make_plan(open_model(tmp_path, meta=True).model, "nvfp4a16").quantized) == 8


@LEAVES_OUT_TRANSFORMERS
@pytest.mark.parametrize("asked", [False, True])
def test_a_convnext_is_mostly_linear_layers_and_its_convolutions_are_asked_for(tmp_path: Path, asked: bool) -> None:
    sizes = {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "image_size": 32, "num_labels": 5}
    original = tiny_models.build("ConvNext", "ForImageClassification", sizes)
    include = ["*", "*.dwconv", "*.downsampling_layer*", "*.patch_embeddings"] if asked else ()
    done = quant.quantize(copy.deepcopy(original), "int8", include=include)
    kinds = [layer.kind for layer in done.plan.quantized]
    assert (kinds.count("linear"), kinds.count("conv")) == (4, 4 if asked else 0)
    kept = [layer for layer in done.plan.layers if layer.kind == LayerKind.CONV and layer.weight is None]
    assert all("linear layers hold most of the weights" in layer.reason for layer in kept)
    quant.save(done.model, done.plan, tmp_path / "out")
    with torch.no_grad():
        logits = done.model(IMAGES).logits
        assert torch.equal(quant.load(tmp_path / "out")(IMAGES).logits, logits)
        exact = original(IMAGES).logits
    assert float((logits - exact).norm() / exact.norm()) < 0.05


class UNet(nn.Module):
    """Two resolutions with a residual convolution each, attention between, and a way up beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.middle, self.qkv, self.out = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.join = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(64, 32, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(4, 32), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = torch.relu(self.first(x))
        low = torch.relu(self.down(high))
        low = low + self.middle(low)
        tokens = low.flatten(2).mT
        attended = nn.functional.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, -1))
        low = low + self.out(attended).mT.view_as(low)
        joined = self.join(torch.cat([high, self.up(low)], 1))
        return self.last(torch.relu(self.norm(joined)))


@pytest.mark.parametrize("format", ["int8_static", "fp8"])
def test_a_unet_is_calibrated_written_and_evaluated(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    model, images = UNet(), [torch.randn(2, 4, 16, 16) for _ in range(4)]
    blank = copy.deepcopy(model)
    with torch.no_grad():
        exact = model(images[0])
    done = quant.quantize(model, format, images, run=lambda m: m(images[0]))
    kept = {layer.name for layer in done.plan.layers if layer.weight is None}
    # In FP8, the convolutions of four channels have no kernel.
    assert kept == ({"norm"} if format == "int8_static" else {"norm", "first", "last"})
    quant.save(done.model, done.plan, tmp_path / "out")
    with torch.no_grad():
        found = quant.load(tmp_path / "out", blank)(images[0])
        assert torch.equal(found, done.model(images[0]))
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.06


def test_a_dit_keeps_the_convolution_that_makes_its_tokens() -> None:
    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm = nn.Conv2d(4, 64, 2, stride=2), nn.LayerNorm(64)
            self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
            self.up, self.down, self.modulation = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 384)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x).flatten(2).mT
            shift, scale, gate, *_ = self.modulation(x.mean(1, keepdim=True)).chunk(6, -1)
            h = self.norm(x) * (1 + scale) + shift
            x = x + gate * self.proj(nn.functional.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1)))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    x = torch.randn(1, 4, 16, 16)
    for format in ("int8", "fp8_channel", "nvfp4"):
        plan = quant.make_plan(DiT(), format, run=lambda m: m(x))
        assert [layer.name for layer in plan.quantized] == ["qkv", "proj", "up", "down", "modulation"]
        assert plan.by_name["patches"].reason.startswith("convolution, and linear layers hold most of the weights")
    assert quant.make_plan(DiT(), "int8", include=["*", "patches"], run=lambda m: m(x)).by_name["patches"].weight


def test_edits_pass_over_convolutions_beside_linear_layers() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3), "linear": nn.Linear(64, 64)})
    plan = quant.make_plan(model, "int8", run=lambda m: m["linear"](torch.randn(1, 64)))
    assert plan.by_name["conv"].weight is None
    all_layers = edit(plan, [parse_setting("*=fp8_channel")])
    assert (all_layers.by_name["conv"].formats, all_layers.by_name["linear"].weight) == (
        "16bit",
        FORMATS["fp8_channel"],
    )
    asked = edit(plan, [parse_setting("conv=int8")])
    assert asked.by_name["conv"].weight is FORMATS["int8"]
    with pytest.raises(UserError, match="no runtime convolves in blocks, as nvfp4 has them"):
        edit(plan, [parse_setting("conv=nvfp4")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "conv"}, "lin: is a matrix in the model and a convolution in the plan"),
        ({"transposed": True}, "lin: is a matrix in the model and a matrix stored with its inputs first in the plan"),
    ],
)
def test_a_plan_that_reads_a_weight_otherwise_is_refused(change: dict[str, Any], message: str) -> None:
    model, x = Convs(), torch.randn(2, 4, 8)
    plan = quant.make_plan(model, "int8", run=lambda m: m(x))
    changed = plan.replace_layers([dataclasses.replace(plan.by_name["lin"], **change)])
    with pytest.raises(UserError, match=message):
        solve_plan(model, changed)


def test_the_layout_of_modelopt_has_no_convolutions() -> None:
    plan = quant.make_plan(tiny_models.resnet(), "fp8_channel")
    with pytest.raises(ValueError, match=r"convolution: ModelOpt's layout has no convolution in fp8_channel"):
        modelopt.check_plan(plan)
