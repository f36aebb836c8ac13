"""The `quantization_config` of compressed-tensors: written from a plan, and read back as formats and rotations.

The argument blocks are computed from `Format`; only the layout's own names are spelled out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, same_values
from quant.export.checkpoint.files.names import FormatsOf, StoredNames
from quant.export.checkpoint.patterns import matches
from quant.formats.format import FORMATS, FP8_HEAD, INPUT_FORMATS, Format
from quant.formats.number import E8M0
from quant.base.json_data import typed
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
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")
_GROUPS = dict[str, dict[str, Any]]
_INPUTS = (
    "nvfp4", "nvfp4_four_over_six", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_token", "fp8_group", "int8_token",
    "int8_tensor",
)  # fmt: skip
# A field of our own, which other readers refuse: they would scale the blocks of inputs otherwise.
_RULE = "scale_rule"


def check_plan(plan: Plan) -> None:
    """Raises ValueError if the layout has no name for a format of the plan."""
    if plan.kv_cache not in (None, FORMATS["fp8"], FP8_HEAD):
        raise ValueError(
            f"the compressed-tensors layout cannot store a KV cache in {plan.kv_cache}; it has fp8 and fp8_head, so "
            "quantize again with one of them"
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
    """Returns whether readers of the config round inputs as `activation` does.

    The config cannot distinguish E5M2 from E4M3.
    """
    try:
        read = activation_format_of(_activation_arguments(activation))
    except ValueError:
        return False
    assert read is not None
    return read.has_codes_of(activation) and read.input_rule == activation.input_rule


# {"config_groups": {"group_0": {"format": "nvfp4-pack-quantized",
#                                "targets": ["Linear"],               a class, names of modules, or "re:PATTERN"
#                                "weights": {"num_bits": 4, "strategy": "tensor_group", …},
#                                "input_activations": {…}}},          null for inputs in 16 bit
#  "format": "nvfp4-pack-quantized",                                  of all groups, or "mixed-precision"
#  "ignore": ["lm_head"],                                             as "targets"; stays in 16 bit
#  "kv_cache_scheme": null,                                           or the arguments of FP8
#  "quant_method": "compressed-tensors", "quantization_status": "compressed",
#  "transform_config": {}, …}                                         rotations of inputs


def quantization_config(plan: Plan, names: StoredNames | None = None) -> dict[str, Any]:
    """Returns `quantization_config` for config.json, with one group per pair of formats.

    A group that holds every quantized linear targets the class, as peers write it, and an output head by name, which is
    not a linear layer in vLLM; other groups list their layers. `ignore` lists every module in 16 bit that a runtime may
    hold as a linear: vLLM's routers are, and a group that
    targets the class would quantize them. A layer with another name on disk is listed under both: transformers goes
    by its modules, servers by the files.
    """
    names = names or StoredNames()
    pairs: dict[tuple[Format, Format | None], list[LayerPlan]] = {}
    for layer in plan.quantized:
        pairs.setdefault((layer.weight_format, layer.activation), []).append(layer)
    formats = {_FORMAT_NAMES[weight.name] for weight, _ in pairs}
    ignored = _targets([m for m in plan.layers if m.weight is None and m.kind not in _NEVER_LINEAR], names)
    groups = {}
    # "Linear" would leave embeddings in 16 bit.
    embeddings = [layer for layer in plan.quantized if layer.kind == LayerKind.EMBEDDING]
    of_class = ["Linear", *_targets([layer for layer in plan.quantized if layer.kind == LayerKind.HEAD], names)]
    for index, ((weight, activation), layers) in enumerate(pairs.items()):
        groups[f"group_{index}"] = {
            "format": _FORMAT_NAMES[weight.name],
            "input_activations": _activation_arguments(activation) if activation else None,
            "output_activations": None,
            "targets": of_class if len(pairs) == 1 and not embeddings else _targets(layers, names),
            "weights": _weight_arguments(weight),
        }
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(dict.fromkeys((*ignored, *names.carried_modules, *map(_inside, names.carried_trees)))),
        "kv_cache_scheme": _arguments(plan.kv_cache, dynamic=False, observer=None) if plan.kv_cache else None,
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": _transform_config(plan, names),
        "version": VERSION,
    }


def _transform_config(plan: Plan, names: StoredNames) -> dict[str, Any]:
    """Returns the rotations of inputs, one scheme per block size. The weights in the files are rotated already."""
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
        # Runtimes name experts one by one, `….experts.3.down_proj`: the pattern is the name without number and part.
        experts = layer.name.rpartition(".")[0]
        stems = [name.rsplit(".", 2)[0] for name in names.both(f"{experts}.0.down_proj")]
        targets += map(_inside, stems)
        # vLLM calls the modules of a model for images otherwise than the files do (`language_model.model.…` for
        # `model.language_model.…`). It renames plain entries, but no patterns, and asks for the first expert.
        if "language_model" in stems[0].split("."):
            targets += [name for part in _FIRST_EXPERT for name in names.both(f"{experts}.{part}")]
    return list(dict.fromkeys(targets))


def _inside(module: str) -> str:
    """Returns the pattern of everything inside a module."""
    return f"re:{re.escape(module)}\\..*"


def _weight_arguments(format: Format) -> dict[str, Any]:
    return _arguments(format, dynamic=False, observer="memoryless_minmax")


def _activation_arguments(format: Format) -> dict[str, Any]:
    # dynamic    True: scales are computed at run time; False: all are in the file, found by the observer;
    #            "local": block scales are computed at run time, and the global scale is in the file
    if format.global_scale:
        arguments = _arguments(format, dynamic="local", observer="static_minmax")
        return arguments if format.input_rule == "max" else arguments | {_RULE: format.input_rule}
    if format.per_tensor:
        return _arguments(format, dynamic=False, observer="static_minmax")
    return _arguments(format, dynamic=True, observer=None, rows_are_tokens=True)


def _arguments(
    format: Format, *, dynamic: bool | str, observer: str | None, rows_are_tokens: bool = False
) -> dict[str, Any]:
    # strategy        block (rows, columns), 0 for a whole axis         scales
    # tensor          (0, 0)                                            one
    # attn_head       (0, 0), of a KV cache                             one a KV head
    # channel, token  (1, 0)                                            one a row of a weight, or a token of an input
    # group           (1, n)                                            one for n columns of a row
    # tensor_group    (1, n) with a global scale                  the same, and one for the tensor
    # block           (m, n)                                            one for m rows and n columns
    rows, columns = format.block
    if format is FP8_HEAD:
        strategy = "attn_head"
    elif format.global_scale:
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
    """Returns the format that a config's `weights` block describes; ValueError, with its request, if none fits."""
    # Other arguments say how scales were found, and not how they are read. The order of columns that `actorder` may
    # ask for comes as a tensor `weight_g_idx`, which `check` refuses.
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
    for name in _FORMAT_NAMES:
        ours = _weight_arguments(FORMATS[name])
        if all(arguments.get(k) == ours[k] for k in keys):
            return FORMATS[name]
    raise ValueError(f"quantization_config has weights { ({k: arguments.get(k) for k in keys}) }: not supported")


def activation_format_of(arguments: Mapping[str, Any] | None) -> Format | None:
    """Returns the format that an `input_activations` block describes, None for 16 bit; ValueError if none fits."""
    if arguments is None:
        return None
    keys = ("num_bits", "type", "strategy", "group_size", _RULE)
    for name in _INPUTS:
        ours = _activation_arguments(INPUT_FORMATS[name])
        if all(arguments.get(k) == ours.get(k) for k in keys):
            return INPUT_FORMATS[name]
    raise ValueError(f"quantization_config has inputs { ({k: arguments.get(k) for k in keys}) }: not supported")


def read_config(
    config: Mapping[str, Any], names: StoredNames, tensors: Container[str] = ()
) -> tuple[FormatsOf, Format | None]:
    """Returns the formats that a `quantization_config` gives to matrices, and the format of the KV cache.

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

    # `ignore` wins over targets; then the first group counts that has a target of the matrix.
    def formats_of(matrix: str) -> tuple[Format, Format | None] | None:
        called = names.both(matrix)
        if any(_matches(name, pattern) for pattern in ignored for name in called):
            return None
        return next((pair for targets, pair in groups if any(_matches(n, t) for t in targets for n in called)), None)

    scheme = typed(dict[str, Any] | None, config.get("kv_cache_scheme"), "kv_cache_scheme")
    by_head = scheme is not None and scheme.get("strategy") == "attn_head"
    return formats_of, (FP8_HEAD if by_head else FORMATS["fp8"]) if scheme else None


def read_rotations(config: Mapping[str, Any], names: StoredNames) -> Callable[[str], int]:
    """Returns a function from a matrix's name to the block of its input's Hadamard rotation at run time; 0 for none.

    Raises:
        ValueError: another transform of inputs. The weights in the files are transformed already.
    """
    # {"config_groups": {"hadamard_32": {"type": "hadamard", "head_dim": 32, "randomize": false,
    #      "apply": [{"location": "input", "inverse": false, "targets": […], "ignore": []}]}}}
    blocks: list[tuple[int, list[str], list[str]]] = []
    transform = typed(dict[str, Any] | None, config.get("transform_config"), "transform_config") or {}
    for scheme in (typed(_GROUPS | None, transform.get("config_groups"), "transform_config") or {}).values():
        for use in typed(list[dict[str, Any]], scheme.get("apply"), "transform_config: apply"):
            location = typed(str, use.get("location"), "transform_config: location")
            if location.startswith("weight"):
                continue  # the stored weight is rotated already
            plain = scheme.get("type") == "hadamard" and not scheme.get("randomize") and not use.get("inverse")
            if not (plain and location == "input" and isinstance(scheme.get("head_dim"), int)):
                transform_of = {key: scheme.get(key) for key in ("type", "randomize", "head_dim")}
                raise ValueError(f"transform_config has {transform_of} at {location!r}: not supported")
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
    """Returns whether config and plan have the same formats.

    Configs have no name for a format, only its arguments.
    """
    return same_values(layer.weight, weight) and same_values(layer.activation, activation)


def _matches(name: str, target: str) -> bool:
    """Returns whether an entry of `targets` or `ignore` means a layer: by a pattern, its class, or its name."""
    if target.startswith("re:"):
        return matches(target[3:], name)
    return target in ("Linear", name)
