"""The layout of compressed-tensors: tensor names and the `quantization_config` that vLLM and transformers read.

    nvfp4          weight_packed u8, weight_scale e4m3, weight_global_scale f32 [1] (the *reciprocal*),
                   input_global_scale f32 [1] (likewise) for W4A4
    mxfp4, mxfp6   weight_packed u8, weight_scale u8
    mxfp8          weight e4m3, weight_scale u8
    fp8 family     weight e4m3, weight_scale in the model's dtype, input_scale [1] if static; in float32 if the
                   model's dtype would round them, as scales of another toolkit
    int8           weight i8, weight_scale in the model's dtype
    int4           weight_packed i32 (codes offset by 8), weight_scale in the model's dtype, weight_shape i64 [2]

Codes below eight bits lie two to a byte, the even column in the low half; MXFP6 has four codes in three bytes, and
`weight_packed` of INT4 has eight codes in a word. The config's argument blocks are computed from `Format`; only the
layout's own names are spelled out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from quant.export.checkpoint.compressed_tensors_warnings import runtime_warnings as runtime_warnings
from quant.export.checkpoint.layout import COMPRESSED_TENSORS, ExpectedTensor, same_values
from quant.export.checkpoint.names import FormatsOf, StoredNames
from quant.export.checkpoint.patterns import matches
from quant.formats.format import FORMATS, Format, packed_width
from quant.formats.number import E8M0, INT4
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.json_data import typed
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan

# The layout's version: the release of compressed-tensors whose output this reproduces.
VERSION = "0.19.0"

_FORMAT_NAMES = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp6": "mxfp6-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "fp8": "float-quantized",
    "fp8_channel": "float-quantized",
    "fp8_block": "float-quantized",
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "int4_g64": "pack-quantized",
    "int4_g32": "pack-quantized",
}
# In no runtime a linear layer. Others may be one there: routers, the convolutions of Mamba.
_NEVER_LINEAR = (LayerKind.NORM, LayerKind.EMBEDDING, LayerKind.PARAMETER)
_GROUPS = dict[str, dict[str, Any]]
_INPUTS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_token", "fp8_group", "int8_token", "int8_tensor")


def check_plan(plan: Plan) -> None:
    """Raises ValueError if the layout has no name for a format of the plan."""
    if plan.kv_cache is not None and plan.kv_cache.name != "fp8":
        raise ValueError(
            f"the compressed-tensors layout cannot store a KV cache in {plan.kv_cache}; it has fp8, so quantize "
            "again with that"
        )
    for layer in plan.quantized:
        if layer.weight is not None and layer.weight.name not in _FORMAT_NAMES:
            raise ValueError(
                f"{layer.name}: the compressed-tensors layout cannot store {layer.weight}; it has "
                f"{', '.join(_FORMAT_NAMES)}"
            )
        if layer.activation is not None and not _can_name(layer.activation):
            raise ValueError(
                f"{layer.name}: the compressed-tensors layout cannot name inputs in {layer.activation}, and others "
                f"would round them otherwise; it has {', '.join(_INPUTS)}"
            )


def _can_name(activation: Format) -> bool:
    """Whether readers of the config round inputs as `activation` does: the config cannot tell E5M2 from E4M3."""
    try:
        read = activation_format_of(_activation_arguments(activation))
    except ValueError:
        return False
    assert read is not None
    return (read.element, read.scale, read.block) == (activation.element, activation.scale, activation.block)


def expected_tensors(format: Format, activation: Format | None, shape: tuple[int, ...]) -> dict[str, ExpectedTensor]:
    """The tensors that are stored for a matrix `[out, in]`, by their names below the layer's."""
    (rows, columns), element = shape, format.element
    scale_dtypes = () if format.scale.is_wide else (format.scale.torch_dtype or torch.uint8,)
    tensors = {"weight_scale": ExpectedTensor(format.scale_shape(shape), scale_dtypes)}
    if element is INT4:
        tensors["weight_packed"] = ExpectedTensor((rows, columns // 8), (torch.int32,))
        tensors["weight_shape"] = ExpectedTensor((2,), (torch.int64, torch.int32))
    else:
        name = "weight_packed" if element.bits < 8 else "weight"
        tensors[name] = ExpectedTensor((rows, packed_width(columns, element)), (element.torch_dtype or torch.uint8,))
    if format.global_scale:
        tensors["weight_global_scale"] = ExpectedTensor(None)
    if activation is not None and activation.is_static:
        tensors["input_global_scale" if activation.global_scale else "input_scale"] = ExpectedTensor(None)
    return tensors


def compress(
    weight: BlockScaledTensor,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype,
    activation: Format | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of one linear layer, by their names below the layer's; the inverse of `decompress`.

    Args:
        weight: `[out, in]`.
        input_scale: static activation scale, float32 scalar (for NVFP4 the second-level scale), or None.
        dtype: the model's dtype, in which float scales are stored if it represents them, as it does ours.
        activation: format that `input_scale` belongs to; by default the weight's.
    """
    format, tensors = weight.format, {}
    scale = weight.scale
    if format.scale.is_wide:
        scale = stored_scale(scale, dtype)
        if format.per_tensor:
            scale = scale.reshape(1)
    if format.element is INT4:
        # Two's complement becomes an offset of 8: the sign bit of both codes in a byte is flipped.
        tensors["weight_packed"] = (weight.codes ^ 0x88).view(torch.int32)
        tensors["weight_shape"] = torch.tensor(weight.shape)
    elif format.element.bits < 8:
        tensors["weight_packed"] = weight.codes
    else:
        tensors["weight"] = weight.codes
    tensors["weight_scale"] = scale
    if weight.global_scale is not None:
        tensors["weight_global_scale"] = _reciprocal(weight.global_scale)
    if input_scale is not None and (activation or format).global_scale:
        tensors["input_global_scale"] = _reciprocal(input_scale)
    elif input_scale is not None:
        tensors["input_scale"] = stored_scale(input_scale.reshape(1), dtype)
    return tensors


def stored_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float scale in the model's dtype if that holds it without loss, else in float32."""
    # A copy: gate and up of an expert may share theirs, and no two tensors of a file may share memory.
    stored = scale.to(dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32, copy=True)
    return stored if torch.equal(stored.float(), scale.float()) else scale.to(torch.float32, copy=True)


def holds(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a layer's tensors are named as in this layout alone. With eight bits the layouts may agree."""
    return not tensors.keys().isdisjoint(("weight_packed", "weight_global_scale", "input_global_scale"))


def decompress(tensors: Mapping[str, torch.Tensor], format: Format) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """The weight and static activation scale of a layer; KeyError if a tensor of the format is missing."""
    codes = tensors["weight_packed" if format.element.bits < 8 else "weight"]
    if format.element is INT4:
        codes = codes.view(torch.uint8) ^ 0x88
    shape = (codes.shape[0], codes.shape[1] * 8 // format.element.bits if format.element.bits < 8 else codes.shape[1])
    scale = tensors["weight_scale"]
    scale = (scale.float() if format.scale.is_wide else scale).reshape(format.scale_shape(shape))
    global_scale = _inverse(tensors["weight_global_scale"]) if format.global_scale else None
    input_scale = None
    if "input_global_scale" in tensors:
        input_scale = _inverse(tensors["input_global_scale"])
    elif "input_scale" in tensors:
        input_scale = tensors["input_scale"].float().reshape(())
    return BlockScaledTensor(codes, scale, format, shape, global_scale), input_scale


def stored_kv_scale(name: str, scale: torch.Tensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """The name and form on disk of a scale of the KV cache: one number, or one a head."""
    return name, stored_scale(scale if scale.dim() else scale.reshape(1), dtype)


def kv_name_of_module(name: str) -> str:
    """The name in the model of a scale of the KV cache, which this layout keeps."""
    return name


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """The stored reciprocal of a scale: in float32 if that gives the scale back, else in float64."""
    exact = 1 / scale.double().reshape(1)
    single = exact.float()
    return single if bool(_inverse(single) == scale.reshape(())) else exact


def _inverse(reciprocal: torch.Tensor) -> torch.Tensor:
    """The scale of a stored reciprocal: in float32 if that gives the reciprocal back, else in float64."""
    exact = 1 / reciprocal.double().reshape(())
    single = exact.float()
    return single if torch.equal((1 / single.double()).to(reciprocal.dtype), reciprocal.reshape(())) else exact


def quantization_config(plan: Plan, names: StoredNames | None = None) -> dict[str, Any]:
    """`quantization_config` for config.json, with one group per pair of formats.

    A group that holds every quantized linear targets the class, as peers write it; other groups list their layers.
    `ignore` lists every module in 16 bit that a runtime may hold as a linear: vLLM's routers are, and a group that
    targets the class would quantize them. A layer with another name on disk is listed under both: transformers goes
    by its modules, servers by the files.
    """
    names = names or StoredNames()
    pairs: dict[tuple[Format, Format | None], list[LayerPlan]] = {}
    for layer in plan.quantized:
        assert layer.weight is not None
        pairs.setdefault((layer.weight, layer.activation), []).append(layer)
    formats = {_FORMAT_NAMES[weight.name] for weight, _ in pairs}
    groups = {}
    # "Linear" would leave embeddings in 16 bit.
    embeddings = [layer for layer in plan.quantized if layer.kind == LayerKind.EMBEDDING]
    for index, ((weight, activation), layers) in enumerate(pairs.items()):
        groups[f"group_{index}"] = {
            "format": _FORMAT_NAMES[weight.name],
            "input_activations": _activation_arguments(activation) if activation else None,
            "output_activations": None,
            "targets": ["Linear"] if len(pairs) == 1 and not embeddings else _targets(layers, names),
            "weights": _weight_arguments(weight),
        }
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": _targets([m for m in plan.layers if m.weight is None and m.kind not in _NEVER_LINEAR], names),
        "kv_cache_scheme": _arguments(plan.kv_cache, dynamic=False, observer=None) if plan.kv_cache else None,
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": _transform_config(plan, names),
        "version": VERSION,
    }


def own_files(plan: Plan, names: StoredNames | None = None) -> dict[str, dict[str, Any]]:
    """The layout has no config file beside config.json."""
    return {}


def _transform_config(plan: Plan, names: StoredNames) -> dict[str, Any]:
    """Rotations of inputs, one scheme per block size. The weights in the files are rotated already."""
    blocks: dict[int, list[LayerPlan]] = {}
    for layer in plan.quantized:
        if layer.parts.hadamard:
            blocks.setdefault(layer.parts.hadamard, []).append(layer)
    schemes = {
        f"hadamard_{block}": {
            "type": "hadamard",
            "apply": [{"targets": _targets(layers, names), "location": "input", "inverse": False, "ignore": []}],
            "randomize": False,
            "requires_grad": False,
            "head_dim": block,
            "precision": "torch.float32",
        }
        for block, layers in blocks.items()
    }
    return {"config_groups": schemes} if schemes else {}


def _targets(layers: Sequence[LayerPlan], names: StoredNames) -> list[str]:
    targets: list[str] = []
    for layer in layers:
        if layer.kind != LayerKind.EXPERTS:
            targets += names.both(layer.name)
            continue
        # The name of one of its experts, without the number and the part.
        stems = (name.rsplit(".", 2)[0] for name in names.both(f"{layer.name.rpartition('.')[0]}.0.down_proj"))
        targets += [f"re:{re.escape(stem)}\\..*" for stem in stems]
    return list(dict.fromkeys(targets))


def _weight_arguments(format: Format) -> dict[str, Any]:
    return _arguments(format, dynamic=False, observer="memoryless_minmax")


def _activation_arguments(format: Format) -> dict[str, Any]:
    if format.global_scale:
        return _arguments(format, dynamic="local", observer="static_minmax")
    if format.per_tensor:
        return _arguments(format, dynamic=False, observer="static_minmax")
    return _arguments(format, dynamic=True, observer=None, rows_are_tokens=True)


def _arguments(
    format: Format, *, dynamic: bool | str, observer: str | None, rows_are_tokens: bool = False
) -> dict[str, Any]:
    rows, columns = format.block
    if format.global_scale:
        strategy = "tensor_group"
    elif format.per_tensor:
        strategy = "tensor"
    elif columns == 0:
        strategy = "token" if rows_are_tokens else "channel"
    else:
        strategy = "group" if rows == 1 else "block"
    scale_dtype = None
    if not format.scale.is_wide:
        scale_dtype = "torch.uint8" if format.scale is E8M0 else "torch.float8_e4m3fn"
    return {
        "actorder": None,
        "block_structure": [rows, columns] if strategy == "block" else None,
        "dynamic": dynamic,
        "group_size": columns if strategy in ("group", "tensor_group") else None,
        "num_bits": format.element.bits,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": scale_dtype,
        "strategy": strategy,
        "symmetric": True,
        "type": "int" if format.element.is_integer else "float",
        "zp_dtype": None,
    }


def weight_format_of(arguments: Mapping[str, Any]) -> Format:
    """The format that a config's `weights` block describes; ValueError, with its request, if none fits."""
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
    for name in _FORMAT_NAMES:
        ours = _weight_arguments(FORMATS[name])
        if all(arguments.get(k) == ours[k] for k in keys):
            return FORMATS[name]
    raise ValueError(f"quantization_config asks for weights { ({k: arguments.get(k) for k in keys}) }: not supported")


def activation_format_of(arguments: Mapping[str, Any] | None) -> Format | None:
    """The format that an `input_activations` block describes, None for 16 bit; ValueError if none fits."""
    if arguments is None:
        return None
    keys = ("num_bits", "type", "strategy", "group_size")
    for name in _INPUTS:
        ours = _activation_arguments(FORMATS[name])
        if all(arguments.get(k) == ours[k] for k in keys):
            return FORMATS[name]
    raise ValueError(f"quantization_config asks for inputs { ({k: arguments.get(k) for k in keys}) }: not supported")


def read_config(
    config: Mapping[str, Any], names: StoredNames, tensors: Container[str] = ()
) -> tuple[FormatsOf, Format | None]:
    """The formats that a `quantization_config` gives to matrices, and the format of the KV cache.

    The config names every quantized matrix, so that `tensors` are not asked.

    Raises:
        ValueError: a scheme that is not supported.
    """
    groups = []
    for name, group in typed(_GROUPS, config.get("config_groups"), "config_groups").items():
        weights = typed(dict[str, Any], group.get("weights"), f"{name}.weights")
        inputs = typed(dict[str, Any] | None, group.get("input_activations"), f"{name}.input_activations")
        targets = typed(list[str], group.get("targets"), f"{name}.targets")
        groups.append((targets, (weight_format_of(weights), activation_format_of(inputs))))
    ignored = typed(list[str] | None, config.get("ignore"), "ignore") or []

    def formats_of(matrix: str) -> tuple[Format, Format | None] | None:
        called = names.both(matrix)
        if any(_matches(name, pattern) for pattern in ignored for name in called):
            return None
        return next((pair for targets, pair in groups if any(_matches(n, t) for t in targets for n in called)), None)

    return formats_of, FORMATS["fp8"] if config.get("kv_cache_scheme") else None


def read_rotations(config: Mapping[str, Any], names: StoredNames) -> Callable[[str], int]:
    """From a matrix's name to the block of the Hadamard rotation that its input goes through at run time; 0 for none.

    Raises:
        ValueError: another transform of inputs. The weights in the files are transformed already.
    """
    blocks: list[tuple[int, list[str], list[str]]] = []
    transform = typed(dict[str, Any] | None, config.get("transform_config"), "transform_config") or {}
    for scheme in (typed(_GROUPS | None, transform.get("config_groups"), "transform_config") or {}).values():
        for use in typed(list[dict[str, Any]], scheme.get("apply"), "transform_config: apply"):
            location = typed(str, use.get("location"), "transform_config: location")
            if location.startswith("weight"):
                continue
            plain = scheme.get("type") == "hadamard" and not scheme.get("randomize") and not use.get("inverse")
            if not (plain and location == "input" and isinstance(scheme.get("head_dim"), int)):
                transform_of = {key: scheme.get(key) for key in ("type", "randomize", "head_dim")}
                raise ValueError(f"transform_config asks for {transform_of} at {location!r}: not supported")
            targets = typed(list[str], use.get("targets"), "transform_config: targets")
            ignored = typed(list[str] | None, use.get("ignore"), "transform_config: ignore") or []
            blocks.append((scheme["head_dim"], targets, ignored))

    def rotation_of(matrix: str) -> int:
        called = names.both(matrix) if blocks else []
        for block, targets, ignored in blocks:
            if any(_matches(n, t) for t in targets for n in called):
                return 0 if any(_matches(n, t) for t in ignored for n in called) else block
        return 0

    return rotation_of


def agrees(layer: LayerPlan, weight: Format | None, activation: Format | None) -> bool:
    """Whether the config's formats are those of the plan; configs have no name for a format, only its arguments."""
    return same_values(layer.weight, weight) and same_values(layer.activation, activation)


def _matches(name: str, target: str) -> bool:
    """Whether a layer is meant by an entry of `targets` or `ignore`: a pattern, the class, or the layer's name."""
    if target.startswith("re:"):
        return matches(target[3:], name)
    return target in ("Linear", name)
