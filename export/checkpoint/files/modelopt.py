"""The "unified" layout of ModelOpt: tensor names and two config files that TensorRT-LLM, SGLang and vLLM read.

    nvfp4         weight u8 [o, i/2], weight_scale e4m3 [o, i/16], weight_scale_2 f32 [], input_scale f32 [] for W4A4
    mxfp4         weight u8 [o, i/2], weight_scale u8 [o, i/32]
    mxfp8         weight e4m3, weight_scale u8 [o, i/32]
    fp8           weight e4m3, weight_scale f32 [], input_scale f32 []
    fp8_channel   weight e4m3, weight_scale f32 [o]
    fp8_block     weight e4m3, weight_scale f32 [o/128, 1, i/128, 1]; a single block's is []
    int4          weight u8 [o/2, i], row 2k in the low half of a byte and row 2k + 1 in the high; weight_scale f32
                  [o, i/g] for groups of 128, 64 or 32
    KV cache      self_attn.{k,v}_proj.{k,v}_scale f32 []

A global scale is the factor itself, amax / 2688, and in compressed-tensors its reciprocal. Adjacent float32
numbers may share a reciprocal, so one layout cannot always hold the other's scale: `compress` then gives it in float64,
and `quant.export.checkpoint.files.tensors.write_tensors` stores the exact value in the file's metadata.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant.base.errors import known_names, option
from quant.base.json_files import typed
from quant.export.checkpoint.files.layout import MODELOPT, ExpectedTensor, same_values
from quant.export.checkpoint.files.names import FormatsOf, StoredNames, expert_names
from quant.formats.format import FORMATS, INT4, Format, packed_width
from quant.formats.rounding import pack, unpack
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

# The layout's two config files say less than a plan. `fp8_pb_wo` is a format of weights: runtimes round inputs in
# groups of 128 or keep them in 16 bit. `mxfp4` is read as weights and inputs in MXFP4, as `MXFP4_DEFAULT_CFG` makes it.
# INT4 is called `W4A16_AWQ` whether or not inputs were scaled; a `pre_quant_scale` is stored next to a weight only
# where no layer before it absorbed it.
CONFIG_FILE = "hf_quant_config.json"
# vLLM and SGLang know the layout by this name; the version is the release whose output this reproduces.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

# `quant_algo` by the formats of weight and inputs. Where two pairs have one name, the first pair is read.
_ALGORITHMS = {
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4", None): "W4A16_NVFP4",
    ("fp8", "fp8"): "FP8",
    ("fp8_channel", "fp8_token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8_block", None): "fp8_pb_wo",
    ("fp8_block", "fp8_group"): "fp8_pb_wo",
    ("mxfp8", "mxfp8"): "MXFP8",
    ("mxfp4", "mxfp4"): "mxfp4",
    ("int4", None): "W4A16_AWQ",
    ("int4_g64", None): "W4A16_AWQ",
    ("int4_g32", None): "W4A16_AWQ",
}
_TABLES = dict[str, dict[str, Any]] | None
_KV_CACHES = {"fp8": "FP8", "nvfp4": "NVFP4"}
# Algorithms that state their group size, and algorithms that config.json describes by a group of `config_groups`:
# ModelOpt describes three of them where the whole model is in one, and three more in a mixture.
_GROUPED = ("NVFP4", "W4A16_NVFP4", "MXFP8", "W4A16_AWQ")
_DESCRIBED = ("FP8", "NVFP4", "W4A16_NVFP4")
_DESCRIBED_IN_MIXED = (*_DESCRIBED, "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "W4A16_AWQ")
# Fields that ModelOpt writes for every INT4 weight, besides the group size.
_AWQ = {"has_zero_point": False, "pre_quant_scale": True}


def check_plan(plan: Plan) -> None:
    """Raises ValueError if the layout cannot express the plan; the message names the way out."""
    if plan.kv_cache is not None and plan.kv_cache.name not in _KV_CACHES:
        raise ValueError(
            f"ModelOpt's layout cannot store a KV cache in {plan.kv_cache}; quantize again with "
            f"{option('kv_cache', 'fp8')}"
        )
    if not plan.quantized:
        raise ValueError("the plan leaves every layer in 16 bit, which ModelOpt's layout has no name for")
    for layer in plan.quantized:
        if layer.kind in (LayerKind.EMBEDDING, LayerKind.CONV):
            noun = "convolution" if layer.kind == LayerKind.CONV else "embedding"
            raise ValueError(
                f"{layer.name}: ModelOpt's layout has no {noun} in {layer.weight}; keep it in 16 bit when the model "
                "is quantized, or deploy the compressed-tensors checkpoint"
            )
        _algorithm(layer)
        if layer.weight is not None and layer.weight.element is INT4 and layer.shape[-2] % 2:
            raise ValueError(
                f"{layer.name}: ModelOpt's layout packs INT4 in pairs of rows, and {layer.shape[-2]} is odd; keep the "
                "layer in 16 bit, or deploy the compressed-tensors checkpoint"
            )
        parts = {
            "a pre_scale that no layer took up": layer.parts.pre_scale,
            "a Hadamard rotation of its input": layer.parts.hadamard,
            "a low-rank branch": layer.parts.rank,
            "residual channels": layer.parts.residual,
        }
        for part in (name for name, size in parts.items() if size):
            raise ValueError(
                f"{layer.name}: ModelOpt's layout cannot hold {part} with {layer.weight}; quantize the model again "
                "without it, or deploy the compressed-tensors checkpoint"
            )


def _algorithm(layer: LayerPlan) -> str:
    pair = _pair(layer.weight, layer.activation)
    if pair not in _ALGORITHMS:
        pairs = ", ".join(f"{weight} with {inputs or '16-bit'} inputs" for weight, inputs in _ALGORITHMS)
        raise ValueError(
            f"{layer.name}: ModelOpt's layout has no name for {pair[0]} with {pair[1] or '16-bit'} inputs; it has "
            f"{pairs}: quantize the layer in one of them, or deploy the compressed-tensors checkpoint"
        )
    return _ALGORITHMS[pair]


def quantization_config(plan: Plan, names: StoredNames | None = None) -> dict[str, Any]:
    """Returns `quantization_config` for config.json, of a plan that `check_plan` has passed."""
    return _configs(plan, names or StoredNames())[0]


def own_files(plan: Plan, names: StoredNames | None = None) -> dict[str, dict[str, Any]]:
    """Returns `hf_quant_config.json`, which TensorRT-LLM reads."""
    return {CONFIG_FILE: _configs(plan, names or StoredNames())[1]}


# A model in one pair of formats; config.json first:
#
# {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
#  "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": {…},
#                                "weights": {"num_bits": 4, "type": "float", "group_size": 16, …}}}}
# {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": null,
#                   "exclude_modules": ["lm_head"]}}
#
# A mixture lists its layers, and excludes nothing:
#
# {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers":
#      {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
#       "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}}}}


def _configs(plan: Plan, names: StoredNames) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `quantization_config` for config.json, and the contents of `hf_quant_config.json`.

    Runtimes go by the names of tensors on disk.
    """
    layers: dict[str, dict[str, Any]] = {}
    for layer in plan.quantized:
        algorithm = _algorithm(layer)
        grouped = {"group_size": layer.weight_format.block[1]} if algorithm in _GROUPED else {}
        described = {"quant_algo": algorithm, **grouped, **(_AWQ if layer.weight_format.element is INT4 else {})}
        layers |= dict.fromkeys(_matrices(layer, names), described)
    kv_cache = _KV_CACHES[plan.kv_cache.name] if plan.kv_cache else None
    # The different descriptions among the layers, in order of their first layer.
    kinds = list({tuple(layer.items()): layer for layer in layers.values()}.values())
    quantization: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": kv_cache}
    config: dict[str, Any] = {"ignore": [], "producer": dict(PRODUCER), "quant_method": MODELOPT}
    if len(kinds) > 1:
        quantization["quantized_layers"] = config["quantized_layers"] = layers
        config["config_groups"] = {
            f"group_{index}": {
                **_group(kind, _DESCRIBED_IN_MIXED),
                "targets": sorted(name for name, layer in layers.items() if layer == kind),
            }
            for index, kind in enumerate(kinds)
        }
    else:
        quantization |= {**kinds[0], "exclude_modules": excluded_modules(plan, names)}
        config["ignore"] = quantization["exclude_modules"]
        if kinds[0]["quant_algo"] in _DESCRIBED:
            config["config_groups"] = {"group_0": {**_group(kinds[0], _DESCRIBED), "targets": ["Linear"]}}
    config["quant_algo"] = quantization["quant_algo"]
    if plan.kv_cache is not None:
        # ModelOpt writes the arguments of FP8, and the name of NVFP4.
        config["kv_cache_scheme"] = _arguments(plan.kv_cache) if kv_cache == "FP8" else kv_cache
    return config, {"producer": dict(PRODUCER), "quantization": quantization}


def _group(kind: Mapping[str, Any], described: Iterable[str]) -> dict[str, Any]:
    algorithm = kind["quant_algo"]
    if algorithm not in described:
        return {"quant_algo": algorithm}
    weight, activation = formats_of(algorithm, kind.get("group_size"))
    group = {"weights": _arguments(weight)}
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        # Without it ModelOpt would take the arguments of "FP8", which has one scale a tensor.
        group["weights"]["strategy"] = "channel"
    if activation is not None:
        group["input_activations"] = _arguments(activation)
    return group


def _arguments(format: Format) -> dict[str, Any]:
    grouped = {} if format.scale.is_wide and format.element is not INT4 else {"group_size": format.block[1]}
    kind = "int" if format.element.is_integer else "float"
    return {"dynamic": False, "num_bits": format.element.bits, "type": kind, **grouped}


def excluded_modules(plan: Plan, names: StoredNames) -> list[str]:
    """Returns the modules that stay in 16 bit. Experts are named by their module, as a prefix."""
    excluded = {*names.carried_modules, *(f"{tree}.*" for tree in names.carried_trees)}
    for layer in plan.layers:
        if layer.weight is not None or layer.kind == LayerKind.NORM:
            continue
        if layer.kind == LayerKind.EXPERTS:
            excluded.add(_matrices(layer, names)[0].rsplit(".", 2)[0] + "*")
        else:
            excluded.update({layer.name, *_matrices(layer, names)})
    return sorted(excluded)


def _matrices(layer: LayerPlan, names: StoredNames) -> list[str]:
    is_fused = layer.kind == LayerKind.EXPERTS
    weights = expert_names(layer.name, layer.shape[0]) if is_fused else [f"{layer.name}.weight"]
    return [names.stored(name).removesuffix(".weight") for name in weights]


def formats_of(algorithm: str, group_size: int | None = None) -> tuple[Format, Format | None]:
    """Returns the formats of weight and inputs of a `quant_algo`; ValueError if it, or its group size, is unknown."""
    for (weight, activation), name in _ALGORITHMS.items():
        format = FORMATS[weight]
        if name.casefold() == algorithm.casefold() and (
            group_size is None or name not in _GROUPED or group_size == format.block[1]
        ):
            return format, None if activation is None else FORMATS[activation]
    groups = f" with groups of {group_size}" if group_size else ""
    algorithms = ", ".join(dict.fromkeys(_ALGORITHMS.values()))
    raise ValueError(f"quant_algo {algorithm!r}{groups} is not supported; known: {algorithms}")


def read_config(
    config: Mapping[str, Any], names: StoredNames, tensors: Container[str] = ()
) -> tuple[FormatsOf, Format | None]:
    """Returns the formats of matrices with a scale among `tensors`, and of the KV cache.

    The function raises ValueError for a quantized matrix that the config does not name.
    """
    named = {
        names.of_model(f"{name}.weight").removesuffix(".weight"): _formats_in(fields)
        for name, fields in (typed(_TABLES, config.get("quantized_layers"), "quantized_layers") or {}).items()
    }
    every = None if named else _formats_in(config)

    def formats_of_matrix(matrix: str, of_class: str) -> tuple[Format, Format | None] | None:
        if f"{matrix}.weight_scale" not in tensors:
            return None
        if every is None and matrix not in named:
            raise ValueError(f"{matrix} has a weight_scale, and quantized_layers does not name it")
        return every or named[matrix]

    return formats_of_matrix, _kv_format(config)


def read_rotations(config: Mapping[str, Any], names: StoredNames) -> Callable[[str], int]:
    """Returns a function that is 0 for all names: the layout has no rotations at run time."""
    return lambda matrix: 0


def agrees(layer: LayerPlan, weight: Format | None, activation: Format | None) -> bool:
    """Returns whether config and plan have the same formats, or the same `quant_algo`: `fp8_pb_wo` names no inputs."""
    if not same_values(layer.weight, weight):
        return False
    planned, configured = _pair(layer.weight, layer.activation), _pair(weight, activation)
    shared = planned in _ALGORITHMS and _ALGORITHMS[planned] == _ALGORITHMS.get(configured)
    return shared or same_values(layer.activation, activation)


def _pair(weight: Format | None, activation: Format | None) -> tuple[str, str | None]:
    return str(weight), None if activation is None else activation.name


def _formats_in(config: Mapping[str, Any]) -> tuple[Format, Format | None]:
    # config.json has the group size inside `config_groups`, and hf_quant_config.json next to the algorithm.
    size = config.get("group_size")
    for name, group in (typed(_TABLES, config.get("config_groups"), "config_groups") or {}).items():
        size = size or typed(dict[str, Any], group.get("weights", {}), f"{name}.weights").get("group_size")
    return formats_of(str(config.get("quant_algo")), typed(int | None, size, "group_size"))


def _kv_format(config: Mapping[str, Any]) -> Format | None:
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    for name, stored in _KV_CACHES.items():
        if scheme in (stored, _arguments(FORMATS[name])):
            return FORMATS[name]
    raise ValueError(f"a KV cache in {scheme} is not supported; {known_names(scheme, _KV_CACHES.values())}")


_KV_SCALE = re.compile(r"(.+)\.([kv])_scale")
_KV_SCALE_STORED = re.compile(r"(.+)\.([kv])_proj\.\2_scale")


def expected_tensors(format: Format, activation: Format | None, shape: tuple[int, ...]) -> dict[str, ExpectedTensor]:
    """Returns the tensors that are stored for a matrix `[out, in]`, by their names below the layer's."""
    (rows, columns), element = shape, format.element
    scale_dtypes = () if format.scale.is_wide else (format.scale.torch_dtype or torch.uint8,)
    codes_shape = (rows // 2, columns) if element is INT4 else (rows, packed_width(columns, element))
    tensors = {
        "weight": ExpectedTensor(codes_shape, (element.torch_dtype or torch.uint8,)),
        "weight_scale": ExpectedTensor(format.scale_shape(shape), scale_dtypes),
    }
    if format.global_scale:
        tensors["weight_scale_2"] = ExpectedTensor(None)
    if activation is not None and activation.is_static:
        tensors["input_scale"] = ExpectedTensor(None)
    return tensors


def compress(
    weight: BlockScaledTensor, input_scale: Tensor | None, dtype: torch.dtype, activation: Format | None = None
) -> dict[str, Tensor]:
    """Returns the tensors of one linear layer; all scales are float32, and `dtype` and `activation` do not matter."""
    format, scale = weight.format, weight.scale
    if format.scale.is_wide:
        # Matrices that were cut from one may share their scale, and safetensors refuses tensors that share memory.
        scale = scale.to(torch.float32, copy=True)
        if format.per_tensor or (format.block[1] and scale.numel() == 1 and format.element is not INT4):
            scale = scale.reshape(())  # ModelOpt squeezes the scale of a matrix that is one block
        elif format.element is not INT4:
            scale = scale[:, None, :, None] if format.block[1] else scale.reshape(-1)
    codes = weight.codes
    if format.element is INT4:
        # ours      [out, in / 2]    byte (r, c) = code (r, 2c)  | code (r, 2c + 1) << 4
        # theirs    [out / 2, in]    byte (r, c) = code (2r, c)  | code (2r + 1, c) << 4
        codes = unpack(codes, 4, weight.shape[-1])
        codes = codes[0::2] | codes[1::2] << 4
    tensors = {"weight": codes, "weight_scale": scale}
    if weight.global_scale is not None:
        tensors["weight_scale_2"] = _float32_if_exact(weight.global_scale)
    if input_scale is not None:
        tensors["input_scale"] = _float32_if_exact(input_scale)
    return tensors


def _float32_if_exact(scale: Tensor) -> Tensor:
    single = scale.reshape(()).to(torch.float32, copy=True)
    return single if bool(single == scale.reshape(())) else scale.reshape(())


def holds(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether a layer's tensors are named as only this layout does. With eight bits both layouts may agree."""
    return "weight_scale_2" in tensors or ("weight" in tensors and tensors["weight"].dtype is torch.uint8)


def decompress(tensors: Mapping[str, Tensor], format: Format) -> tuple[BlockScaledTensor, Tensor | None]:
    """Returns the weight and static activation scale of a layer; KeyError if a tensor of the format is missing."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    if format.element is INT4:
        codes = pack(torch.stack([codes & 0x0F, codes >> 4], dim=1).flatten(0, 1), 4)
    shape = (codes.shape[0], codes.shape[1] * 8 // format.element.bits)
    scale = (scale.float() if format.scale.is_wide else scale).reshape(format.scale_shape(shape))
    global_scale = tensors["weight_scale_2"].reshape(()) if format.global_scale else None
    input_scale = tensors["input_scale"].reshape(()) if "input_scale" in tensors else None
    return BlockScaledTensor(codes, scale, format, shape, global_scale), input_scale


def stored_kv_scale(name: str, scale: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    """Returns `….k_proj.k_scale`, float32, for `….k_scale`.

    ValueError for one scale a head, which the layout cannot hold.
    """
    if scale.numel() != 1:
        raise ValueError(
            f"{name}: {scale.numel()} scales of the KV cache, one a head, and ModelOpt's layout has one a tensor; "
            "quantize the model again with one"
        )
    match = _KV_SCALE.fullmatch(name)
    return f"{match[1]}.{match[2]}_proj.{match[2]}_scale" if match else name, scale.float().reshape(())


def kv_name_of_module(name: str) -> str:
    """Returns the name in the model of a scale of the KV cache; any other name stays."""
    match = _KV_SCALE_STORED.fullmatch(name)
    return f"{match[1]}.{match[2]}_scale" if match else name
