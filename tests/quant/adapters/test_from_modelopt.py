"""Models of ModelOpt are taken over with the codes and scales of ModelOpt's own export, byte for byte.

States and exports of a small module were recorded with nvidia-modelopt 0.47.0 (`python tests/live_toolkits.py`) and are
replayed here. Where the package is installed, the record is made anew and compared, and whole checkpoints with it.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import live_toolkits as live
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from torch import nn

import quant
from quant.export.checkpoint.files import modelopt as layout
from quant.formats.format import FORMATS
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.embedding import QuantEmbedding

FORMATS_OF = {
    "NVFP4_DEFAULT_CFG": "nvfp4@nvfp4",
    "W4A16_NVFP4_CFG": "nvfp4",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG": "nvfp4@nvfp4",
    "NVFP4_FOUR_OVER_SIX_CFG": "nvfp4@nvfp4",
    "NVFP4_AWQ_LITE_CFG": "nvfp4@nvfp4",
    "NVFP4_SVDQUANT_DEFAULT_CFG": "nvfp4@nvfp4",
    "FP8_DEFAULT_CFG": "fp8@fp8",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_channel@fp8_token",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "fp8_block",
    "MXFP8_DEFAULT_CFG": "mxfp8@mxfp8",
    "MXFP4_DEFAULT_CFG": "mxfp4@mxfp4",
    "INT8_DEFAULT_CFG": "int8@int8_tensor",
    "INT8_WEIGHT_ONLY_CFG": "int8",
    "INT8_SMOOTHQUANT_CFG": "int8@int8_tensor",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": "int4",
    "INT4_AWQ_CFG": "int4",
}
SCALED = [config for config in FORMATS_OF if "AWQ" in config or "SMOOTH" in config or "SVD" in config]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_exported(net: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The layers of `net` hold what ModelOpt's export made of them."""
    for name in live.LAYERS:
        linear: Any = net.get_submodule(name)
        ours = layout.compress(linear.quantized_weight, linear.input_scale)
        theirs = {
            key.removeprefix(f"{name}."): tensor for key, tensor in expected.items() if key.startswith(f"{name}.")
        }
        assert ours.keys() == theirs.keys(), name
        for key, tensor in theirs.items():
            assert (ours[key].dtype, ours[key].numel()) == (tensor.dtype, tensor.numel()), f"{name}.{key}"
            wrong = int((bytes_of(ours[key]) != bytes_of(tensor)).sum())
            assert wrong == 0, f"{name}.{key}: {wrong} bytes differ"


@pytest.mark.parametrize("config", live.MODELOPT)
def test_codes_and_scales_are_those_of_modelopts_export(config: str) -> None:
    net = live.replayed_modelopt(config)
    plan = quant.from_modelopt(net, run=live.run)
    assert {layer.formats for layer in plan.quantized} == {FORMATS_OF[config]}
    assert_exported(net, live.expected("modelopt", config))
    assert [type(net.get_submodule(name)) for name in live.LAYERS] == [quant.QuantLinear] * 3


@pytest.mark.parametrize("config", live.COMPRESSED)
def test_compressed_weights_decode_to_what_modelopt_decodes_them_to(config: str) -> None:
    net = live.replayed_modelopt(f"compressed {config}")
    plan = quant.from_modelopt(net, run=live.run)
    assert {layer.formats for layer in plan.quantized} == {FORMATS_OF[config]}
    # Tensor scales were made before anything was fused, and codes with them.
    assert bool(plan.groups()) == (config not in SCALED and not config.startswith(("NVFP4", "FP8_DEFAULT")))
    for name, values in live.expected("modelopt", f"compressed {config}").items():
        assert torch.equal(net.get_submodule(name).dequantize(torch.bfloat16), values), name


@pytest.mark.parametrize("config", live.MODELOPT)
def test_fused_layers_share_their_scales_or_are_no_group(config: str) -> None:
    """ModelOpt's export gives q and k one second level in NVFP4, leaves FP8 as it is, and AWQ's inputs differ."""
    net = live.replayed_modelopt(config)
    plan = quant.from_modelopt(net, run=live.run)
    q, k = (net.get_submodule(name).quantized_weight for name in live.FUSED)
    shared = config not in SCALED and config != "FP8_DEFAULT_CFG"
    assert list(plan.groups()) == (["(q|k)"] if shared else [])
    if q.global_scale is not None:
        assert torch.equal(q.global_scale, k.global_scale) == shared


def test_fused_layers_take_the_largest_magnitude() -> None:
    net: Any = live.replayed_modelopt("NVFP4_DEFAULT_CFG")
    net.k.weight_quantizer._amax = net.q.weight_quantizer._amax * 2
    net.k.input_quantizer._amax = net.q.input_quantizer._amax * 2
    expected = {
        name: float(getattr(net.k, f"{name}_quantizer")._amax.float() / (6 * 448)) for name in ("weight", "input")
    }
    quant.from_modelopt(net, run=live.run)
    for layer in (net.q, net.k):
        assert float(layer.global_scale) == expected["weight"]
        assert float(layer.input_scale) == expected["input"]


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_beyond_a_searched_amax(bits: int) -> None:
    """AWQ's clipping chooses one below the largest weight; ModelOpt's export then uses the lowest code."""
    linear = nn.Linear(128, 4)
    amax = linear.weight.detach().abs().amax(1, keepdim=True) / 2
    where: dict[str, Any] = {"axis": 0} if bits == 8 else {"block_sizes": [[-1, 128]]}
    linear.add_module("weight_quantizer", _quantizer(_amax(amax), num_bits=bits, **where))
    largest = 2 ** (bits - 1) - 1
    codes = (linear.weight.detach() / (amax / largest)).round().clamp(-largest - 1, largest)
    model = nn.ModuleDict({"linear": linear})
    quant.from_modelopt(model)
    assert int(codes.min()) == -largest - 1
    assert torch.equal(model["linear"].quantized_weight.element_values(), codes)


@pytest.mark.parametrize("config", SCALED)
def test_what_awq_smoothquant_and_svdquant_do_at_run_time(config: str) -> None:
    """Recorded with the state: the factor of the inputs, and the branch, which gets them unrounded."""
    net = live.replayed_modelopt(config)
    tensors = live.record("modelopt")[config][1]
    plan = quant.from_modelopt(net, run=live.run)
    for name in live.LAYERS:
        x = live.inputs().flip(-1) if name == "o" else live.inputs()
        linear: Any = net.get_submodule(name)
        factor = tensors[f"state.{name}.input_quantizer._pre_quant_scale"].reshape(-1)
        assert torch.equal(linear.pre_scale, factor)
        down = tensors.get(f"state.{name}.weight_quantizer._svdquant_lora_a")
        up = tensors.get(f"state.{name}.weight_quantizer._svdquant_lora_b")
        assert plan.by_name[name].parts.rank == (0 if down is None else len(down))
        scaled = (x * factor).double()
        reference = scaled @ linear.dequantize().double().T
        if down is not None and up is not None:
            reference += scaled @ down.double().T @ up.double().T
        if linear.bias is not None:
            reference += linear.bias.double()
        # Inputs are rounded to four or eight bits, or not at all.
        limit = {"nvfp4": 0.15, "int8_tensor": 0.02}.get(str(linear.activation_format), 0.005)
        assert (linear(x).double() - reference).norm() < limit * reference.norm()


def test_the_model_saves_loads_and_converts_back(tmp_path: Path) -> None:
    net = live.replayed_modelopt("NVFP4_DEFAULT_CFG")
    plan = quant.from_modelopt(net, run=live.run)
    before = live.run(net)
    quant.save(net, plan, tmp_path / "out")
    loaded = quant.load(tmp_path / "out", live.Net())
    assert torch.equal(live.run(loaded), before)
    assert quant.from_modelopt(live.replayed_modelopt("NVFP4_DEFAULT_CFG"), run=live.run).digest() == plan.digest()


def test_nothing_of_modelopt_is_left() -> None:
    net = live.replayed_modelopt("MXFP8_DEFAULT_CFG")
    net.extra = live.QuantLinear(4, 4)  # type: ignore[assignment]  # of which no quantizer is enabled
    net.extra.add_module("weight_quantizer", _quantizer(is_enabled=False))
    net._modelopt_state = [("quantize", {})]  # type: ignore[assignment]
    for name in ("q", "extra"):  # as AWQ leaves them
        net.get_submodule(name).forward = MethodType(live.QuantLinear.forward, net.get_submodule(name))  # type: ignore
    plan = quant.from_modelopt(net, run=live.run)
    assert list(plan.groups()) == ["(q|k)"] and "forward" not in vars(net.extra)
    assert type(net.extra) is nn.Linear and not list(net.extra.children())
    assert not hasattr(net, "_modelopt_state")
    assert plan.by_name["extra"].weight is None and "ModelOpt" in plan.by_name["extra"].reason


def _quantizer(tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> live.TensorQuantizer:
    own: dict[str, Any] = {
        "num_bits": 8, "block_sizes": None, "axis": None, "is_enabled": True, "_dynamic": False, "_fake_quant": True,
        "_rotate": False, "_unsigned": False, "_bias": None, "backend": None, "_use_constant_amax": False,
    }  # fmt: skip
    assert fields.keys() <= own.keys()
    return live.TensorQuantizer({**own, **fields}, tensors or {})


def _amax(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"_amax": values}


def test_convolutions_and_embeddings() -> None:
    """Codes against torch's own arithmetic: INT8 with a scale for each output channel or row."""
    torch.manual_seed(0)
    conv, table = nn.Conv2d(3, 4, 3), nn.Embedding(6, 8)
    for module in (conv, table):
        amax = module.weight.detach().abs().amax(tuple(range(1, module.weight.dim())), keepdim=True)
        module.add_module("weight_quantizer", _quantizer(_amax(amax), axis=0))
    conv.add_module("input_quantizer", _quantizer(_amax(torch.tensor(2.0))))
    model = nn.ModuleDict({"conv": conv, "table": table})
    weights = {name: module.weight.detach().clone() for name, module in model.items()}
    plan = quant.from_modelopt(model)
    assert {layer.name: layer.formats for layer in plan.quantized} == {"conv": "int8@int8_tensor", "table": "int8"}
    assert isinstance(model["conv"], QuantConv) and isinstance(model["table"], QuantEmbedding)
    assert float(model["conv"].input_scale) == float(torch.tensor(2.0) / 127)
    for name, weight in weights.items():
        rows = weight.flatten(1)
        codes = (rows / (rows.abs().amax(1, keepdim=True) / 127)).round().to(torch.int8)
        assert torch.equal(model[name].quantized_weight.codes.flatten(1), codes), name


def test_experts_have_a_scale_each() -> None:
    """FP8: ModelOpt's quotient is rounded to BF16, then to E4M3, by torch's casts here."""
    model = tiny_models.mixtral(dtype=torch.bfloat16)
    inputs_amax = torch.tensor(3.0)
    expected = {}
    for name, module in list(model.named_modules()):
        if not name.endswith("experts"):
            continue
        for part in ("gate_up_proj", "down_proj"):
            stack = getattr(module, part).detach()
            amax = stack.abs().amax((1, 2))
            quantizers = [_quantizer(_amax(each), num_bits=[4, 3]) for each in amax]
            module.add_module(f"{part}_weight_quantizers", nn.ModuleList(quantizers))
            module.add_module(f"{part}_input_quantizer", _quantizer(_amax(inputs_amax), num_bits=[4, 3]))
            scale = (amax.float() / 448)[:, None, None]
            expected[f"{name}.{part}"] = scale, (stack.float() / scale).to(torch.bfloat16).to(torch.float8_e4m3fn)
    plan = quant.from_modelopt(model)
    assert {layer.name for layer in plan.quantized} == expected.keys()
    assert list(plan.groups()) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for name, (scale, codes) in expected.items():
        module = model.get_submodule(name)
        assert torch.equal(module.quantized_weight.scale, scale)
        assert torch.equal(module.quantized_weight.codes.view(torch.uint8), codes.view(torch.uint8))
        assert float(module.input_scale) == float(inputs_amax / 448)
    ids = torch.arange(6)[None]
    assert model(ids).logits.isfinite().all()
    assert not [name for name, _ in model.named_modules() if "quantizer" in name]


def test_experts_with_one_quantizer() -> None:
    """As ModelOpt has them in Llama 4 and gpt-oss: one scale for the stack, or an error."""
    model = tiny_models.mixtral(dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    amax = experts.down_proj.detach().abs().amax()
    experts.add_module("down_proj_weight_quantizer", _quantizer(_amax(amax), num_bits=8, axis=0))
    with pytest.raises(quant.UserError, match=r"experts\.down_proj: ModelOpt has one quantizer for all of its experts"):
        quant.from_modelopt(model)
    experts.down_proj_weight_quantizer.num_bits, experts.down_proj_weight_quantizer.axis = (4, 3), None
    quant.from_modelopt(model)
    scale = model.model.layers[0].mlp.experts.down_proj.quantized_weight.scale
    assert scale.flatten().tolist() == [float(amax.float() / 448)] * 4


def test_the_kv_cache_gets_modelopts_scales() -> None:
    model = tiny_models.llama(dtype=torch.bfloat16)
    for index, layer in enumerate(model.model.layers):
        _quantize(layer.mlp.down_proj, num_bits=[4, 3])
        for operand, amax in (("k", 3.0), ("v", 5.0)):
            quantizer = _quantizer(_amax(torch.tensor(amax + index)), num_bits=[4, 3])
            layer.self_attn.add_module(f"{operand}_bmm_quantizer", quantizer)
    plan = quant.from_modelopt(model)
    assert plan.kv_cache is FORMATS["fp8"]
    scales = {name: float(tensor) for name, tensor in model.named_buffers() if name.endswith(("k_scale", "v_scale"))}
    expected = {
        f"model.layers.{index}.self_attn.{operand}_scale": float(torch.tensor(amax + index) / 448)
        for index in (0, 1)
        for operand, amax in (("k", 3.0), ("v", 5.0))
    }
    assert scales == expected


def _quantize(linear: Any, **fields: Any) -> None:
    linear.add_module("weight_quantizer", _quantizer(_amax(linear.weight.detach().abs().amax()), **fields))


def test_conv1d_which_modelopt_transposes() -> None:
    model = tiny_models.gpt2(dtype=torch.bfloat16)
    layer = model.transformer.h[0].mlp.c_fc
    kind = type("QuantConv1D", (live.DynamicModule, type(layer)), {})
    original = layer.weight.detach().clone()
    layer.__class__ = kind
    layer.weight = nn.Parameter(original.t().contiguous())
    _quantize(layer, num_bits=[4, 3])
    plan = quant.from_modelopt(model)
    assert plan.by_name["transformer.h.0.mlp.c_fc"].transposed
    error = layer_error(model.transformer.h[0].mlp.c_fc.dequantize(), original.t())
    assert error < 2**-4  # half a unit in the last place of E4M3


def layer_error(ours: torch.Tensor, original: torch.Tensor) -> float:
    return float((ours - original.float()).norm() / original.float().norm())


E4M3_INPUTS = {"num_bits": [4, 3]}
BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "six bits": (
        lambda net: setattr(net.o.weight_quantizer, "num_bits", 6),
        r"o: no format here .*num_bits=6, axis=None",
    ),
    "blocks": (lambda net: setattr(net.o.weight_quantizer, "block_sizes", {-1: 48}), r"block_sizes=\{-1: 48\}"),
    "NF4": (
        lambda net: (
            setattr(net.o.weight_quantizer, "num_bits", 4),
            setattr(net.o.weight_quantizer, "block_sizes", {-1: 64, "scale_bits": 8, "scale_block_sizes": {-1: 256}}),
        ),
        "o: no format here .* 'scale_bits': 8",
    ),
    "a second level that is not calibrated": (
        lambda net: net.o.add_module(
            "weight_quantizer",
            _quantizer(
                num_bits=[2, 1], block_sizes=[[-1, 16], ["type", "dynamic"], ["scale_bits", [4, 3]]], is_enabled=True
            ),
        ),
        "o: the ModelOpt quantizer of its weight has no amax of the whole",
    ),
    "a cache by token": (
        lambda net: [
            net.o.add_module(f"{operand}_bmm_quantizer", _quantizer(num_bits=[4, 3], axis=[0, 1], _dynamic=True))
            for operand in "kv"
        ],
        "the KV cache is in fp8_token in ModelOpt",
    ),
    "axis": (lambda net: setattr(net.o.weight_quantizer, "axis", 1), "axis=1"),
    "sequence": (
        lambda net: setattr(net.o, "weight_quantizer", type("SequentialQuantizer", (nn.Sequential,), {})(_quantizer())),
        "o: ModelOpt rounds its weight in several formats",
    ),
    "rotation": (lambda net: setattr(net.o.weight_quantizer, "_rotate", {"enable": True}), "o: .* has rotate"),
    "affine": (lambda net: setattr(net.o.input_quantizer, "_bias", {-1: None}), r"its inputs has bias \(affine"),
    "backend": (lambda net: setattr(net.o.input_quantizer, "backend", "mine"), "has backend='mine'"),
    "unsigned": (lambda net: setattr(net.o.input_quantizer, "_unsigned", True), "has unsigned"),
    "not calibrated": (lambda net: delattr(net.o.input_quantizer, "_amax"), "o: .* has no amax; calibrate it"),
    "one scale at run time": (lambda net: setattr(net.o.input_quantizer, "_dynamic", True), "set 'type': 'static'"),
    "static scales of tokens": (lambda net: setattr(net.o.input_quantizer, "axis", (0, 1)), "set 'type': 'dynamic'"),
    "not finite": (lambda net: net.o.weight.data.__setitem__((0, 0), torch.inf), r"o \[16, 128\] .*infin"),
    "outputs": (
        lambda net: net.o.add_module("output_quantizer", _quantizer()),
        r"disable_quantizer\(model, 'o.output_",
    ),
    "half a cache": (lambda net: net.o.add_module("k_bmm_quantizer", _quantizer(**E4M3_INPUTS)), "keys or its values"),
    "no layer": (
        lambda net: net.add_module("norm", _with_quantizer(nn.LayerNorm(8))),
        "norm: quantized by ModelOpt, and|plan does not fit",
    ),
    "a shape that the format cannot have": (
        lambda net: net.add_module("odd", _with_quantizer(nn.Linear(100, 4), block_sizes=[[-1, 32]], num_bits=4)),
        "in = 100 is not a multiple",
    ),
}


def _with_quantizer(module: Any, **fields: Any) -> Any:
    if "block_sizes" in fields:
        module.add_module("weight_quantizer", _quantizer({}, **fields))
    else:
        _quantize(module, **fields)
    return module


def test_compressed_weights_that_cannot_be_taken_over() -> None:
    net: Any = live.replayed_modelopt("compressed NVFP4_DEFAULT_CFG")
    net.o.weight_quantizer._scale = torch.zeros(512, dtype=torch.uint8)  # in tiles
    with pytest.raises(quant.UserError, match="o: compressed by TensorRT-LLM"):
        quant.from_modelopt(net, run=live.run)
    assert type(net.o) is live.QuantLinear
    model = tiny_models.mixtral(dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    packed = live.QTensorWrapper(experts.down_proj.data, requires_grad=False)
    packed.metadata = {"shape": packed.shape, "dtype": packed.dtype}
    experts.down_proj = packed
    experts.add_module("down_proj_weight_quantizer", _quantizer(_amax(torch.tensor(1.0)), num_bits=[4, 3]))
    with pytest.raises(quant.UserError, match=r"experts\.down_proj: experts that ModelOpt has compressed"):
        quant.from_modelopt(model)


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_taken_over_is_named_and_the_model_stays(case: str) -> None:
    change, message = BAD[case]
    net = live.replayed_modelopt("FP8_DEFAULT_CFG")
    change(net)
    before = {name: type(module) for name, module in net.named_modules()}
    weights = copy.deepcopy(net.state_dict())
    with pytest.raises(quant.UserError, match=message) as raised:
        quant.from_modelopt(net, run=live.run)
    assert "\n" not in str(raised.value)
    assert {name: type(module) for name, module in net.named_modules()} == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(("enabled", "why"), [(None, "it has no quantizers"), (False, "all its weight quantizers are")])
def test_a_model_that_is_not_quantized(enabled: bool | None, why: str) -> None:
    net = live.Net() if enabled is None else live.replayed_modelopt("FP8_DEFAULT_CFG")
    for module in net.modules():
        if isinstance(module, live.TensorQuantizer):
            module.is_enabled = False
    with pytest.raises(quant.UserError, match=why):
        quant.from_modelopt(net, run=live.run)


def test_rounded_inputs_of_norms_are_left_out_with_a_word() -> None:
    """ModelOpt's defaults simulate them, and its export drops them."""
    net = live.replayed_modelopt("FP8_DEFAULT_CFG")
    net.add_module("norm", nn.LayerNorm(8))
    net.norm.add_module("input_quantizer", _quantizer(_amax(torch.tensor(1.0))))
    with pytest.warns(
        UserWarning, match=re.escape("inputs of 1 module without a quantized weight (norm.input_quantizer)")
    ):
        plan = quant.from_modelopt(net, run=live.run)
    assert len(plan.quantized) == 3 and not list(net.norm.children())


def real() -> Any:
    """The real package."""
    return pytest.importorskip("modelopt.torch.quantization", reason="the extra modelopt")


@pytest.mark.parametrize("config", live.MODELOPT)
def test_the_record_is_what_modelopt_makes(config: str) -> None:
    real()
    net = live.modelopt_net(config)
    exported = copy.deepcopy(net)
    fields, tensors = live.modelopt_state(net)
    recorded_fields, recorded = live.record("modelopt")[config]
    assert fields.keys() == recorded_fields.keys()
    for name, own in fields.items():
        assert live.listed(own) == recorded_fields[name], name
    state = {name.removeprefix("state."): t for name, t in recorded.items() if name.startswith("state.")}
    assert tensors.keys() == state.keys()
    expected = live.modelopt_export(exported)
    if config != "NVFP4_SVDQUANT_DEFAULT_CFG":  # whose singular vectors another machine may have otherwise
        assert all(torch.equal(tensors[name], state[name]) for name in state)
        theirs = live.expected("modelopt", config)
        assert all(torch.equal(bytes_of(expected[name]), bytes_of(theirs[name])) for name in theirs)
    quant.from_modelopt(net, run=live.run)
    assert_exported(net, expected)


@pytest.mark.parametrize("config", live.COMPRESSED)
def test_the_record_of_compressed_weights_is_what_modelopt_makes(config: str) -> None:
    real()
    net = live.modelopt_net(config, compressed=True)
    tensors, values, before = live.modelopt_state(net)[1], live.decoded(net), live.run(net)
    recorded = live.record("modelopt")[f"compressed {config}"][1]
    assert all(torch.equal(bytes_of(tensor), bytes_of(recorded[f"state.{name}"])) for name, tensor in tensors.items())
    quant.from_modelopt(net, run=live.run)
    assert all(torch.equal(net.get_submodule(name).dequantize(torch.bfloat16), value) for name, value in values.items())
    # In MXFP4 and FP8 inputs are simulated with other quotients than those of the format.
    assert (live.run(net).double() - before.double()).norm() < 1e-3 * before.double().norm()


# Configurations whose simulation divides as their export does; others differ where a weight is between two codes.
EXACT = {
    "NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "NVFP4_FOUR_OVER_SIX_CFG",
    "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG", "MXFP8_DEFAULT_CFG",
}  # fmt: skip


@pytest.mark.parametrize("config", live.MODELOPT)
def test_weights_are_those_that_modelopt_simulates(config: str) -> None:
    """Of the layer that is fused with none: bit for bit, or a step off in few places."""
    real()
    net = live.modelopt_net(config)
    layer: Any = net.get_submodule("o")
    simulated = layer.weight_quantizer(layer.weight).detach()
    quant.from_modelopt(net, run=live.run)
    ours = net.get_submodule("o").dequantize(torch.bfloat16)
    if config in EXACT:
        assert torch.equal(ours, simulated)
    assert (ours != simulated).float().mean() < 0.12
    assert (ours.float() - simulated.float()).abs().max() <= simulated.float().abs().max() / 6


@pytest.mark.parametrize("family", ["llama", "mixtral", "opt"])
@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
@pytest.mark.filterwarnings("ignore:ModelOpt also simulates:UserWarning")
def test_a_saved_model_is_the_checkpoint_that_modelopt_exports(family: str, config: str, tmp_path: Path) -> None:
    """Every tensor of `export_hf_checkpoint`, byte for byte; the KV cache's scales too."""
    mtq = real()
    from modelopt.torch.export import export_hf_checkpoint

    live.modelopt_on_cpu()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    settings = copy.deepcopy(getattr(mtq, config))
    settings["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    models = []
    for _ in range(2):
        model = getattr(tiny_models, family)(gain=4.0, dtype=torch.bfloat16)
        mtq.quantize(model, settings, lambda model: model(ids))
        models.append(model)
    plan = quant.from_modelopt(models[0])
    quant.save(models[0], plan, tmp_path / "saved")
    quant.convert(tmp_path / "saved", tmp_path / "ours", "modelopt")
    export_hf_checkpoint(models[1], export_dir=tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bytes_of(ours[name]), bytes_of(tensor)), name
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "ours")(ids).logits, models[0](ids).logits)
