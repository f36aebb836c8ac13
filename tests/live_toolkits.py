"""A small module that ModelOpt and torchao quantize in every way that is taken over, and the record of what they made.

`python tests/live_toolkits.py` runs the real packages (nvidia-modelopt 0.47, torchao 0.18) and writes
`tests/data/goldens/live/*.safetensors`: for each configuration the state of the live module, and what the toolkit
itself makes of it: the tensors of ModelOpt's export, the weights that torchao dequantizes. Tests replay the record
where the packages are not installed, in stand-ins that have the fields and class names of the real objects.

ModelOpt's NVFP4 and MX kernels need a GPU; `benchmarks/_peers.py` replaces their simulation on a CPU. Its export, which
makes the codes, is ModelOpt's own.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import GOLDENS, ROOT
from torch import nn

LIVE = GOLDENS / "live"
LAYERS = ("q", "k", "o")
FUSED = ("q", "k")
IN, OUT = 128, 16

MODELOPT = (
    "NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "NVFP4_FOUR_OVER_SIX_CFG",
    "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG", "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "INT8_DEFAULT_CFG",
    "INT8_WEIGHT_ONLY_CFG", "INT8_SMOOTHQUANT_CFG", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT4_AWQ_CFG",
)  # fmt: skip
# Those of the above that `mtq.compress` packs: not the exports but the weights that ModelOpt decodes are recorded.
COMPRESSED = (
    "NVFP4_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG", "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "INT8_WEIGHT_ONLY_CFG",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
)  # fmt: skip
_QUANTIZER_FIELDS = (
    "num_bits", "block_sizes", "axis", "is_enabled", "_dynamic", "_fake_quant", "_rotate", "_unsigned", "_bias",
    "backend", "_use_constant_amax",
)  # fmt: skip
_QUANTIZER_BUFFERS = (
    "_amax", "_global_amax", "_pre_quant_scale", "_svdquant_lora_a", "_svdquant_lora_b", "_scale", "_double_scale",
)  # fmt: skip


class Net(nn.Module):
    """Two layers that read one input, and one that reads another; all `[16, 128]` in BF16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in LAYERS:
            layer = nn.Linear(IN, OUT, bias=name == "o")
            # Magnitudes over some binades, a block of zeros, and values that lie between two codes.
            layer.weight.data = torch.randn(OUT, IN) * torch.rand(OUT, 1).mul(4).exp2()
            layer.weight.data[3, :32] = 0.0
            layer.weight.data[:, 64:] = layer.weight.data[:, 64:].mul(4).round().div(4)
            setattr(self, name, layer.to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.q(x) * self.k(x) + self.o(x.flip(-1))
        return y


def inputs() -> torch.Tensor:
    """BF16 `[4, 8, 128]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, IN, generator=generator).to(torch.bfloat16)


def run(model: nn.Module) -> Any:
    """Calls `Net`."""
    return model(inputs())


def modelopt_on_cpu() -> None:
    """Lets the real ModelOpt simulate NVFP4 and MX without a GPU."""
    sys.path.append(str(ROOT / "benchmarks"))
    from _peers import modelopt_on_cpu

    modelopt_on_cpu()


def modelopt_net(config: str, *, compressed: bool = False) -> Net:
    """`Net`, quantized by the real ModelOpt, and perhaps compressed."""
    import modelopt.torch.quantization as mtq

    modelopt_on_cpu()
    net = Net()
    mtq.quantize(net, copy.deepcopy(getattr(mtq, config)), run)
    if compressed:
        mtq.compress(net)
    return net


def modelopt_export(net: nn.Module) -> dict[str, torch.Tensor]:
    """What ModelOpt's export makes of the layers of a quantized `Net`, which it changes.

    Layers with a factor of their inputs are exported as they are: `export_hf_checkpoint` first quantizes them again.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    layers: dict[str, Any] = {name: net.get_submodule(name) for name in LAYERS}
    is_fp8 = layers["q"].weight_quantizer.is_fp8
    if not is_fp8 and layers["q"].input_quantizer.pre_quant_scale is None:
        preprocess_linear_fusion([layers[name] for name in FUSED])
    found = {}
    for name, layer in layers.items():
        _export_quantized_weight(layer, torch.bfloat16)
        state = {"weight": layer.weight, **dict(layer.named_buffers(recurse=False))}
        found |= {f"{name}.{key}": tensor.detach().contiguous() for key, tensor in state.items()}
    return found


def modelopt_state(net: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fields and buffers of the quantizers of `Net`, by name, and the weights that ModelOpt changed or packed."""
    fields: dict[str, Any] = {}
    tensors = {}
    plain = Net().state_dict()
    for name in LAYERS:
        weight: Any = net.get_submodule(name).weight
        if hasattr(weight, "metadata"):
            tensors[f"{name}.weight"] = weight.data.clone()
        elif not torch.equal(weight, plain[f"{name}.weight"]):
            tensors[f"{name}.weight"] = weight.detach().clone()
    for name, module in net.named_modules():
        if not hasattr(module, "num_bits"):
            continue
        own = {field: getattr(module, field, None) for field in _QUANTIZER_FIELDS}
        own["block_sizes"] = None if own["block_sizes"] is None else list(dict(own["block_sizes"]).items())
        own["_rotate"] = bool(getattr(own["_rotate"], "enable", own["_rotate"]))
        fields[name] = {"class": type(module).__name__, **own}
        # Copies, for the export gives fused layers one amax in place.
        found = {b: getattr(module, b).detach().clone() for b in _QUANTIZER_BUFFERS if hasattr(module, b)}
        tensors |= {f"{name}.{buffer}": tensor for buffer, tensor in found.items()}
    return fields, tensors


def decoded(net: Net) -> dict[str, torch.Tensor]:
    """The weights of a compressed `Net` as ModelOpt decodes them, by layer."""
    layers: dict[str, Any] = {name: net.get_submodule(name) for name in LAYERS}
    return {name: layer.weight_quantizer(layer.weight).detach() for name, layer in layers.items()}


class TensorQuantizer(nn.Module):
    """Stands for ModelOpt's class of this name."""

    def __init__(self, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name in _QUANTIZER_FIELDS:
            setattr(self, name, _tuples(fields[name]))
        if self.block_sizes is not None:
            self.block_sizes = {key: _tuples(value) for key, value in fields["block_sizes"]}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def pre_quant_scale(self) -> torch.Tensor | None:
        return getattr(self, "_pre_quant_scale", None)

    @property
    def svdquant_lora_a(self) -> torch.Tensor | None:
        return getattr(self, "_svdquant_lora_a", None)

    @property
    def svdquant_lora_b(self) -> torch.Tensor | None:
        return getattr(self, "_svdquant_lora_b", None)


class QTensorWrapper(nn.Parameter):
    """Stands for ModelOpt's class of this name."""

    metadata: dict[str, Any]


class DynamicModule(nn.Module):
    """Stands for ModelOpt's class of this name, which it makes a base of a module's class."""

    def get_original_cls_by_level(self, level: int) -> type[nn.Module]:
        assert level == 0
        return type(self).__mro__[2]


class QuantLinear(DynamicModule, nn.Linear):
    """Stands for the class that ModelOpt gives to `nn.Linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a stand-in does not run")


def listed(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def replayed_modelopt(config: str) -> Net:
    """`Net` in the state that was recorded."""
    net = Net()
    fields, tensors = record("modelopt")[config]
    for name in LAYERS:
        changed = tensors.get(f"state.{name}.weight")
        if changed is not None and config.startswith("compressed"):
            packed = QTensorWrapper(changed.clone(), requires_grad=False)
            packed.metadata = {"shape": torch.Size((OUT, IN)), "dtype": torch.bfloat16}
            net.get_submodule(name).weight = packed
        elif changed is not None:
            net.get_submodule(name).weight.data = changed.clone()  # type: ignore[union-attr]
    for name, own in fields.items():
        layer, _, child = name.partition(".")
        module = net.get_submodule(layer)
        module.__class__ = QuantLinear
        buffers = {n.removeprefix(f"state.{name}."): t for n, t in tensors.items() if n.startswith(f"state.{name}.")}
        module.add_module(child, TensorQuantizer(own, buffers))
    return net


def expected(toolkit: str, config: str) -> dict[str, torch.Tensor]:
    """What the toolkit itself made of `Net`."""
    tensors = record(toolkit)[config][1]
    return {n.removeprefix("expected."): t for n, t in tensors.items() if n.startswith("expected.")}


@cache
def record(toolkit: str) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Recorded fields and tensors by configuration."""
    found: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    with safe_open(LIVE / f"{toolkit}.safetensors", "pt") as file:
        for config, fields in json.loads(file.metadata()["fields"]).items():
            own = {n.partition("/")[2]: file.get_tensor(n) for n in file.keys() if n.startswith(f"{config}/")}  # noqa: SIM118
            found[config] = fields, own
    return found


def torchao_weights() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Makes a weight of the real torchao of a plain one, by configuration.

    Where a config of `quantize_` asks for a GPU, the function that it calls is called here.
    """
    from torchao import quantization as ao
    from torchao.prototype.mx_formats.inference_workflow import MXTensor, NVFP4Tensor
    from torchao.prototype.mx_formats.mx_tensor import QuantizeTensorToMXKwargs, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs, per_tensor_amax_to_scale
    from torchao.quantization.granularity import PerAxis, PerGroup, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import (
        Float8Tensor,
        Int4Tensor,
        Int8Tensor,
        QuantizeTensorToFloat8Kwargs,
    )
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

    def configured(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def make(weight: torch.Tensor) -> torch.Tensor:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight)
            ao.quantize_(linear, config)
            return linear.weight.data

        return make

    def float8(granularity: Any, inputs: Any = None) -> Callable[[torch.Tensor], torch.Tensor]:
        kwargs = None if inputs is None else QuantizeTensorToFloat8Kwargs(granularity=inputs)
        return lambda w: Float8Tensor.from_hp(w, granularity=granularity, act_quant_kwargs=kwargs)

    def mx(dtype: torch.dtype, swizzled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        kwargs = QuantizeTensorToMXKwargs(elem_dtype=dtype, scaling_mode=ScaleCalculationMode.RCEIL)
        return lambda w: MXTensor.to_mx(
            w, dtype, scaling_mode=ScaleCalculationMode.RCEIL, act_quant_kwargs=kwargs, is_swizzled_scales=swizzled
        )

    def nvfp4(w: torch.Tensor) -> torch.Tensor:
        return NVFP4Tensor.to_nvfp4(
            w,
            per_tensor_scale=per_tensor_amax_to_scale(w.abs().amax()),
            act_per_tensor_scale=torch.tensor(0.0015),
            is_swizzled_scales=True,
            act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=False),
        )

    def int4(w: torch.Tensor) -> torch.Tensor:
        # `from_hp` needs mslk's kernel, which is not on a CPU: codes and scales in its layout.
        groups = w.float().unflatten(-1, (-1, 32))
        scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6).to(torch.bfloat16)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(-2)
        packed = (codes[:, 1::2] << 4) | (codes[:, ::2] & 0xF)
        across = scale.t().contiguous()
        return Int4Tensor(packed, across, torch.zeros_like(across), [1, 32], w.shape)

    def int8_static(w: torch.Tensor) -> torch.Tensor:
        return Int8Tensor.from_hp(
            w,
            PerRow(),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(granularity=PerTensor()),
            act_quant_scale=torch.tensor([[0.03]]),
        )

    intx = ao.IntxWeightOnlyConfig
    return {
        "float8_weight_only": configured(ao.Float8WeightOnlyConfig()),
        "float8_rows": float8(PerRow(), PerRow()),
        "float8_tensor": float8(PerTensor(), PerTensor()),
        "int8_weight_only": configured(ao.Int8WeightOnlyConfig()),
        "int8_dynamic": configured(ao.Int8DynamicActivationInt8WeightConfig()),
        "int8_static": int8_static,
        "int4": int4,
        "intx_int4": configured(intx(weight_dtype=torch.int4, granularity=PerGroup(32))),
        "intx_int8": configured(intx(weight_dtype=torch.int8, granularity=PerAxis(0))),
        "nvfp4_weight_only": configured(_nvfp4_weight_only()),
        "nvfp4_static": nvfp4,
        "mxfp8": mx(torch.float8_e4m3fn, swizzled=True),
        "mxfp8_e5m2": mx(torch.float8_e5m2, swizzled=False),
        "mxfp4": mx(torch.float4_e2m1fn_x2, swizzled=True),
    }


def _nvfp4_weight_only() -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


def with_weights(make: Callable[[str, torch.Tensor], torch.Tensor]) -> Net:
    """`Net` whose weights are those that `make` gives for a layer's name and weight."""
    net = Net()
    for name in LAYERS:
        layer = net.get_submodule(name)
        # Not through nn.Parameter, which would ask a stand-in to detach itself.
        layer._parameters["weight"] = make(name, layer.weight.data)  # type: ignore[assignment, union-attr, arg-type]
    return net


def torchao_state(weight: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fields and tensors of a weight of torchao."""
    names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", [])]
    others = [*weight.tensor_attribute_names, *getattr(weight, "optional_tensor_attribute_names", [])]
    tensors = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
    fields: dict[str, Any] = {name: None for name in names if name not in tensors}
    fields |= {name: _plain(getattr(weight, name)) for name in others}
    fields |= {"class": type(weight).__name__, "shape": list(weight.shape), "dtype": str(weight.dtype)}
    return fields, tensors


def _plain(value: Any) -> Any:
    """A value as JSON, which `_object` reads."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if hasattr(value, "__dataclass_fields__"):
        return {"class": type(value).__name__, **{name: _plain(getattr(value, name)) for name in vars(value)}}
    if hasattr(value, "name") and hasattr(value, "value"):
        return {"enum": value.name}
    return list(value) if isinstance(value, tuple | list) else value


def _object(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"].removeprefix("torch."))
    if "enum" in value:
        return SimpleNamespace(name=value["enum"])
    own = {name: _object(part) for name, part in value.items() if name != "class"}
    return type(value["class"], (SimpleNamespace,), {})(**own)


def replayed_torchao(config: str) -> Net:
    """`Net` with stand-ins for the weights that were recorded."""
    fields, tensors = record("torchao")[config]
    return with_weights(lambda name, _: _stand_in(fields[name], tensors, f"state.{name}."))


def _stand_in(fields: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    kind: Any = type(fields["class"], (torch.Tensor,), {"__module__": "torchao.recorded", "__torch_dispatch__": _none})
    dtype = getattr(torch, fields["dtype"].removeprefix("torch."))
    made = torch.Tensor._make_wrapper_subclass(kind, fields["shape"], dtype=dtype)
    for name, value in fields.items():
        if name not in ("class", "shape", "dtype"):
            setattr(made, name, _object(value))
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            setattr(made, name.removeprefix(prefix), tensor)
    return made


def _none(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a stand-in holds no values")


def _write(toolkit: str, made: Iterator[tuple[str, Any, dict[str, torch.Tensor]]]) -> None:
    fields, tensors = {}, {}
    for config, own, found in made:
        fields[config] = own
        tensors |= {f"{config}/{name}": tensor.clone().contiguous() for name, tensor in found.items()}
    LIVE.mkdir(exist_ok=True)
    save_file(tensors, LIVE / f"{toolkit}.safetensors", {"fields": json.dumps(fields)})


def _modelopt_record() -> Iterator[tuple[str, Any, dict[str, torch.Tensor]]]:
    for config in MODELOPT:
        net = modelopt_net(config)
        fields, tensors = modelopt_state(net)
        found = {f"state.{name}": tensor for name, tensor in tensors.items()}
        yield config, fields, found | {f"expected.{n}": t for n, t in modelopt_export(net).items()}
    for config in COMPRESSED:
        net = modelopt_net(config, compressed=True)
        fields, tensors = modelopt_state(net)
        found = {f"state.{name}": tensor for name, tensor in tensors.items()}
        yield f"compressed {config}", fields, found | {f"expected.{n}": t for n, t in decoded(net).items()}


def _torchao_record() -> Iterator[tuple[str, Any, dict[str, torch.Tensor]]]:
    for config, make in torchao_weights().items():
        fields: dict[str, Any] = {}
        found: dict[str, torch.Tensor] = {}
        plain = Net()
        for name in LAYERS:
            weight: Any = make(plain.get_submodule(name).weight.data)  # type: ignore[arg-type, union-attr]
            fields[name], tensors = torchao_state(weight)
            found |= {f"state.{name}.{key}": tensor for key, tensor in tensors.items()}
            if config != "int4":  # which only mslk's kernel decodes
                found[f"expected.{name}"] = weight.dequantize().to(torch.bfloat16)
        yield config, fields, found


if __name__ == "__main__":
    _write("modelopt", _modelopt_record())
    _write("torchao", _torchao_record())
    print(*(f"{file.name} {file.stat().st_size}" for file in sorted(Path(LIVE).iterdir())))
