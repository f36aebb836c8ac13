"""Weights of torchao are taken over with their codes and scales, and decode to what torchao decodes them to.

Weights of a small module were recorded with torchao 0.18.0 (`python tests/live_toolkits.py`) and are replayed here in
stand-ins. Where the package is installed, the record is made anew and compared.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import live_toolkits as live
import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.formats.tensor import round_activation

FORMATS_OF = {
    "float8_weight_only": "fp8_channel",
    "float8_rows": "fp8_channel@fp8_token",
    "float8_tensor": "fp8@fp8",
    "int8_weight_only": "int8",
    "int8_dynamic": "int8@int8_token",
    "int8_static": "int8@int8_tensor",
    "int4": "int4_g32",
    "intx_int4": "int4_g32",
    "intx_int8": "int8",
    "nvfp4_weight_only": "nvfp4",
    "nvfp4_static": "nvfp4@nvfp4",
    "mxfp8": "mxfp8@mxfp8",
    "mxfp8_e5m2": "mxfp8_e5m2@mxfp8_e5m2",
    "mxfp4": "mxfp4@mxfp4",
}


def state(config: str, name: str) -> dict[str, torch.Tensor]:
    """Recorded tensors of the weight of a layer."""
    tensors = live.record("torchao")[config][1]
    return {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"state.{name}.")}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def taken(config: str) -> tuple[Any, quant.Plan]:
    net = live.replayed_torchao(config)
    return net, quant.from_torchao(net, live.inputs() if config == "float8_tensor" else None, run=live.run)


@pytest.mark.parametrize("config", FORMATS_OF)
def test_weights_decode_to_what_torchao_decodes_them_to(config: str) -> None:
    net, plan = taken(config)
    assert {layer.formats for layer in plan.quantized} == {FORMATS_OF[config]}
    for name, values in live.expected("torchao", config).items():
        assert torch.equal(net.get_submodule(name).dequantize(torch.bfloat16), values), name


@pytest.mark.parametrize("config", FORMATS_OF)
def test_codes_are_torchaos_bytes(config: str) -> None:
    net, _ = taken(config)
    for name in live.LAYERS:
        theirs, ours = state(config, name)["qdata"], net.get_submodule(name).quantized_weight.codes
        if config == "intx_int4":  # a byte for each code there
            theirs = (theirs[:, ::2] & 0x0F) | (theirs[:, 1::2] << 4)
        assert torch.equal(bytes_of(ours), bytes_of(theirs)), name


def test_int4_tensors() -> None:
    """Which only a kernel of mslk decodes: codes two to a byte, low half first, times scales of `[groups, out]`."""
    net, _ = taken("int4")
    for name in live.LAYERS:
        tensors = state("int4", name)
        codes = torch.stack([tensors["qdata"] << 4 >> 4, tensors["qdata"] >> 4], dim=-1).flatten(-2)
        values = codes.float() * tensors["scale"].float().T.repeat_interleave(32, 1)
        assert int(codes.min()) < 0 < int(codes.max())
        assert torch.equal(net.get_submodule(name).dequantize(), values)


def test_static_scales_of_inputs_are_taken_over() -> None:
    for config, scale in (("int8_static", 0.03), ("nvfp4_static", 0.0015)):
        net, _ = taken(config)
        assert [float(net.get_submodule(name).input_scale) for name in live.LAYERS] == [float(torch.tensor(scale))] * 3


def test_scales_of_whole_inputs_are_measured() -> None:
    """torchao finds them at run time; in FP8 they are the largest magnitude of the layer's input over 448."""
    net = live.replayed_torchao("float8_tensor")
    with pytest.raises(quant.UserError, match=r"q: torchao finds one scale .* quant.from_torchao\(model, data\)"):
        quant.from_torchao(net, run=live.run)
    rows = live.inputs()
    quant.from_torchao(net, rows, run=live.run)
    expected = float(rows.float().abs().amax() / 448)
    assert [float(net.get_submodule(name).input_scale) for name in live.LAYERS] == [
        pytest.approx(expected, rel=2**-8)
    ] * 3


@pytest.mark.parametrize("config", ["int8_dynamic", "int8_static", "intx_int8", "intx_int4"])
def test_the_lowest_code_is_multiplied_too(config: str) -> None:
    """Torchao uses -8, as we do, and may use -128, which codes made here never are."""
    net, _ = taken(config)
    layer: Any = net.get_submodule("q")
    if layer.codes.dtype is torch.int8:
        layer.codes = layer.codes.index_fill(1, torch.tensor(5), -128)
    assert int(layer.quantized_weight.element_values().min()) == (-128 if layer.codes.dtype is torch.int8 else -8)
    x = live.inputs()
    rounded = x if layer.activation_format is None else round_activation(x, layer.activation_format, layer.input_scale)
    reference = rounded.double() @ layer.dequantize().double().T
    assert (layer(x).double() - reference).norm() < 2**-8 * reference.norm()


def test_training_starts_from_what_was_taken_over_but_from_the_lowest_code_of_int8() -> None:
    for config in ("nvfp4_static", "intx_int4"):
        net, plan = taken(config)
        before = live.run(net)
        quant.prepare_qat(net, plan)
        assert torch.equal(live.run(net), before)
    net, plan = taken("intx_int8")
    layer: Any = net.get_submodule("q")
    layer.codes = layer.codes.index_fill(1, torch.tensor(5), -128)
    with pytest.raises(
        quant.UserError, match="q: holds the code -128, as other toolkits write it, and training rounds to ±127"
    ):
        quant.prepare_qat(net, plan)


@pytest.mark.parametrize(
    ("config", "shared"),
    [("float8_rows", True), ("int4", True), ("float8_tensor", False), ("nvfp4_weight_only", False)],
)
def test_layers_with_tensor_scales_of_their_own_are_fused_with_none(config: str, shared: bool) -> None:
    _, plan = taken(config)
    assert list(plan.groups()) == (["(q|k)"] if shared else [])


@pytest.mark.parametrize("config", ["nvfp4_static", "intx_int4", "mxfp8", "int8_dynamic"])
def test_the_model_saves_and_loads(config: str, tmp_path: Path) -> None:
    net, plan = taken(config)
    before = live.run(net)
    quant.save(net, plan, tmp_path / "out")
    assert torch.equal(live.run(quant.load(tmp_path / "out", live.Net())), before)


def _stands(net: Any, **fields: Any) -> None:
    for key, value in fields.items():
        setattr(net.o._parameters["weight"], key, value)


PER_ROW = type("PerRow", (SimpleNamespace,), {})(dim=-1)
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "zero points": ("int8_weight_only", {"zero_point": torch.ones(16, 1)}, "o: torchao quantized it with zero points"),
    "zero points of inputs": (
        "int8_dynamic",
        {"act_quant_kwargs": SimpleNamespace(granularity=PER_ROW, mapping_type=SimpleNamespace(name="ASYMMETRIC"))},
        r"o: its inputs have zero points \(ASYMMETRIC\)",
    ),
    "groups": (
        "int8_weight_only",
        {"block_size": (1, 32)},
        r"o \[16, 128\]: no format here for int8 in blocks of \[1, 32",
    ),
    "five bits": ("intx_int4", {"target_dtype": "torch.int5"}, "o: integers of torch.int5"),
    "asymmetric inputs": ("intx_int8", {"activation_quantization": "int8_asym_per_token"}, "quantize only weights"),
    "columns": (
        "float8_rows",
        {
            "act_quant_kwargs": SimpleNamespace(
                float8_dtype=torch.float8_e4m3fn, hp_value_lb=None, hp_value_ub=None, granularity="PerAxis(0)"
            )
        },
        r"o: no format here for inputs in fp8 by PerAxis\(0\)",
    ),
    "clamped": (
        "float8_rows",
        {
            "act_quant_kwargs": SimpleNamespace(
                float8_dtype=torch.float8_e4m3fn, hp_value_lb=None, hp_value_ub=1.0, granularity=PER_ROW
            )
        },
        "or clamped",
    ),
    "E5M2": (
        "float8_weight_only",
        {"qdata": torch.zeros(16, 128, dtype=torch.float8_e5m2)},
        "o: FP8 in torch.float8_e5m2",
    ),
    "MX of 16": ("mxfp8", {"block_size": 16}, "o: MX in torch.float8_e4m3fn and blocks of 16"),
    "transposed": (
        "mxfp8",
        {"qdata": torch.zeros(16, 128, dtype=torch.float8_e4m3fn).T},
        "o: torchao holds it transposed",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_taken_over_is_named_and_the_model_stays(case: str) -> None:
    config, fields, message = BAD[case]
    net: Any = live.replayed_torchao(config)
    _stands(net, **fields)
    before = {name: net.get_submodule(name)._parameters["weight"] for name in live.LAYERS}
    with pytest.raises(quant.UserError, match=message) as raised:
        quant.from_torchao(net, run=live.run)
    assert "\n" not in str(raised.value)
    assert all(net.get_submodule(name)._parameters["weight"] is tensor for name, tensor in before.items())


def test_an_unknown_class_and_a_model_without() -> None:
    net: Any = live.replayed_torchao("int4")
    type(net.o._parameters["weight"]).__name__ = "Int4PreshuffledTensor"
    with pytest.raises(quant.UserError, match=r"o\.weight: a weight of torchao's class Int4PreshuffledTensor"):
        quant.from_torchao(net, run=live.run)
    with pytest.raises(quant.UserError, match="no weight of the model is quantized by torchao"):
        quant.from_torchao(live.Net())


def test_a_plan_that_does_not_fit_puts_torchaos_weights_back() -> None:
    """A tied head is stored once, and in 16 bit."""
    net: Any = live.replayed_torchao("int4")
    net.other = nn.Linear(live.IN, live.OUT)
    net.other._parameters["weight"] = net.o._parameters["weight"]
    before = net.o._parameters["weight"]
    with pytest.raises(quant.UserError, match="the plan does not fit"):
        quant.from_torchao(net, run=live.run)
    assert net.o._parameters["weight"] is before and net.other._parameters["weight"] is before


def real() -> Any:
    """The real package."""
    return pytest.importorskip("torchao.quantization", reason="torchao, which no extra installs")


@pytest.mark.parametrize("config", FORMATS_OF)
def test_the_record_is_what_torchao_makes(config: str) -> None:
    real()
    make = live.torchao_weights()[config]
    net = live.with_weights(lambda name, weight: nn.Parameter(make(weight), requires_grad=False))
    expected = {}
    for name in live.LAYERS:
        weight: Any = net.get_submodule(name).weight
        fields, tensors = live.torchao_state(weight.data)
        recorded = state(config, name)
        assert live.listed(fields) == live.record("torchao")[config][0][name]
        assert tensors.keys() == recorded.keys()
        assert all(torch.equal(bytes_of(tensors[key]), bytes_of(recorded[key])) for key in recorded)
        if config != "int4":
            expected[name] = weight.dequantize().to(torch.bfloat16)
    quant.from_torchao(net, live.inputs(), run=live.run)
    for name, values in expected.items():
        assert torch.equal(net.get_submodule(name).dequantize(torch.bfloat16), values), name


def test_blocks_of_fp8() -> None:
    real()
    from torchao.quantization.granularity import PerBlock
    from torchao.quantization.quantize_.workflows import Float8Tensor, QuantizeTensorToFloat8Kwargs

    torch.manual_seed(0)
    linear = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    made = Float8Tensor.from_hp(
        linear.weight.data,
        granularity=PerBlock((128, 128)),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerBlock((1, 128))),
    )
    linear.weight = nn.Parameter(made, requires_grad=False)
    values = made.dequantize(torch.float32)
    model = nn.ModuleDict({"linear": linear})
    plan = quant.from_torchao(model, run=lambda model: model["linear"](torch.zeros(1, 256, dtype=torch.bfloat16)))
    assert plan.by_name["linear"].formats == "fp8_block@fp8_group"
    assert torch.equal(model["linear"].dequantize(), values)


def test_experts() -> None:
    """Stacks of matrices in NVFP4, whose block scales torchao keeps in tiles of all experts together."""
    real()
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    model = tiny_models.mixtral(dtype=torch.bfloat16, gain=4.0)
    values = {}
    for name, module in model.named_modules():
        if not name.endswith("experts"):
            continue
        for part in ("gate_up_proj", "down_proj"):
            stack = getattr(module, part).data
            scale = per_tensor_amax_to_scale(stack.abs().amax((1, 2))).view(-1, 1, 1)
            made = NVFP4Tensor.to_nvfp4(stack, per_tensor_scale=scale, is_swizzled_scales=part == "gate_up_proj")
            values[f"{name}.{part}"] = made.dequantize(torch.float32)
            setattr(module, part, nn.Parameter(made, requires_grad=False))
    plan = quant.from_torchao(model)
    assert {layer.name for layer in plan.quantized} == values.keys()
    assert all(torch.equal(model.get_submodule(name).dequantize(), tensor) for name, tensor in values.items())
    assert model(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_runs_as_before_and_converts(tied: bool, tmp_path: Path) -> None:
    """Weight-only, where torchao multiplies by the weights that it decodes, and so it is here; it unties the head."""
    ao = real()
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    model = tiny_models.llama(dtype=torch.bfloat16, gain=4.0, tie_word_embeddings=tied)
    ao.quantize_(model, NVFP4WeightOnlyConfig())
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(ids).logits
        plan = quant.from_torchao(model)
        assert torch.equal(model(ids).logits, theirs)
        quant.save(model, plan, tmp_path / "saved")
        quant.convert(tmp_path / "saved", tmp_path / "modelopt", "modelopt")
        assert torch.equal(quant.load(tmp_path / "modelopt")(ids).logits, theirs)
