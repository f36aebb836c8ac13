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
`weight_packed` of INT4 has eight codes in a word.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from operator import or_
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any

import torch
from torch import Tensor

from quant.base.json_files import typed
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, ExpectedTensor, same_values
from quant.export.checkpoint.files.names import FormatsOf, StoredNames
from quant.formats.format import E8M0, FORMATS, FP8_HEAD, INPUT_FORMATS, INT4, Format, packed_width
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

# Patterns of other tools' checkpoints, `re:…` in `targets` and `ignore`, are matched in bounded time: a checkpoint may
# come from anybody, and Python's `re` takes exponentially long for `(a+)+b`. `re` parses the pattern; each part then
# maps the *set* of positions where it may begin to those where it can end, an integer with one bit a position. Groups
# that repeat, and look-aheads, are worked out once for each position. google-re2 has the same guarantee, but no
# look-ahead, and published checkpoints have them: `re:^(?!.*experts).*$` keeps everything but the experts in 16 bit.
LONGEST = 1000
"""Characters of a pattern."""
Matcher = Callable[[str, int], int]
"""From a name and a set of positions to the set of positions at which the part can end."""


def matches(pattern: str, name: str) -> bool:
    """Returns whether a regular expression matches at the start of `name`, as `re.match` says.

    Raises:
        ValueError: too long, no regular expression, or with parts that take more than the positions (back references,
            look-behinds, flags, possessive repetitions).
    """
    try:
        return _compiled(pattern)(name, 1) != 0
    except RecursionError:
        raise ValueError(f"config.json: the pattern {pattern[:50]!r}… is nested too deeply; write it flat") from None


@lru_cache
def _compiled(pattern: str) -> Matcher:
    if len(pattern) > LONGEST:
        raise ValueError(
            f"config.json: the pattern {pattern[:50]!r}… has {len(pattern):,} characters; at most {LONGEST:,} are read"
        )
    try:
        tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"config.json: the pattern {pattern!r} is not a regular expression ({error})") from None
    if tree.state.flags != re.UNICODE:
        raise ValueError(f"config.json: the pattern {pattern!r} has flags, which are not read; write it without")
    return _sequence(tree, pattern)


def _sequence(tree: Any, pattern: str) -> Matcher:
    parts = [_part(str(op), argument, tree[index : index + 1], pattern) for index, (op, argument) in enumerate(tree)]
    return lambda name, starts: reduce(lambda reached, part: part(name, reached) if reached else 0, parts, starts)


def _part(op: str, argument: Any, tree: Any, pattern: str) -> Matcher:
    """Returns one operation of `re`, the only one in `tree`."""
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
        # Characters move each position where one stands by one; anchors keep those where they hold.
        is_at, move = _compiler.compile(tree).finditer, int(op != "AT")
        where = lru_cache(4096)(lambda name: sum(1 << match.start() for match in is_at(name)))
        return lambda name, starts: (starts & where(name)) << move
    if op == "SUBPATTERN" and argument[1:3] == (0, 0):
        return _sequence(argument[3], pattern)
    if op == "BRANCH":
        branches = [_sequence(branch, pattern) for branch in argument[1]]
        return lambda name, starts: reduce(or_, (branch(name, starts) for branch in branches))
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, part = argument
        return _repeated(_sequence(part, pattern), least, most)
    if op in ("ASSERT", "ASSERT_NOT") and argument[0] == 1:  # a look-ahead
        ahead = _sequence(argument[1], pattern)
        return _from_each(lambda name, start: start if bool(ahead(name, start)) == (op == "ASSERT") else 0)
    raise ValueError(f"config.json: the pattern {pattern!r} has a part that is not read, {op}; write it without")


def _from_each(from_one: Matcher) -> Matcher:
    """Returns a part that is worked out once for each position: sets of them would take exponentially many."""
    cached = lru_cache(4096)(from_one)

    def ends(name: str, starts: int) -> int:
        reached = 0
        while starts:
            reached |= cached(name, starts & -starts)
            starts &= starts - 1
        return reached

    return ends


def _repeated(part: Matcher, least: int, most: int) -> Matcher:
    def from_one(name: str, start: int) -> int:
        reached = start if not least else 0
        level, count = start, 0
        while level and count < most:
            following = part(name, level)
            count += 1
            if count > least:
                following &= ~reached  # positions that were reached before lead nowhere new
            elif following == level:  # the part can stay where it is, and so any number of times
                count = max(count, least)
            if count >= least:
                reached |= following
            level = following
        return reached

    return _from_each(from_one)


# The `quantization_config` follows. Its argument blocks are computed from `Format`; only the layout's own names are
# spelled out here. The layout's version: the release of compressed-tensors whose output this reproduces.
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
# Layouts that may hold the same integers, in words or in bytes.
_OF_INTEGERS = {"pack-quantized": 32, "int-quantized": 8, "naive-quantized": 8, "float-quantized": 8}
_NOT_RUN = "not supported as it is; quant.open_model dequantizes such weights, and `quantize` quantizes them again"
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
    """Returns whether readers of the config round inputs so: it cannot distinguish E5M2 from E4M3."""
    with suppress(ValueError):
        read = activation_format_of(_activation_arguments(activation))
        return read is not None and read.has_codes_of(activation) and read.input_rule == activation.input_rule
    return False


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
    hold as a linear: vLLM's routers are, and a group that targets the class would quantize them. A layer with another
    name on disk is listed under both: transformers goes by its modules, servers by the files.
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
            "weights": _arguments(weight),
        }
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(dict.fromkeys((*ignored, *names.carried_modules, *map(_inside, names.carried_trees)))),
        "kv_cache_scheme": _arguments(plan.kv_cache, observer=None) if plan.kv_cache else None,
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
    return f"re:{re.escape(module)}\\..*"


def _activation_arguments(format: Format) -> dict[str, Any]:
    # dynamic    True: scales are computed at run time; False: all are in the file, found by the observer;
    #            "local": block scales are computed at run time, and the global scale is in the file
    if format.global_scale:
        arguments = _arguments(format, dynamic="local", observer="static_minmax")
        return arguments if format.input_rule == "max" else arguments | {_RULE: format.input_rule}
    if format.per_tensor:
        return _arguments(format, observer="static_minmax")
    return _arguments(format, dynamic=True, observer=None)


def _arguments(
    format: Format, *, dynamic: bool | str = False, observer: str | None = "memoryless_minmax"
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
        strategy = "token" if dynamic else "channel"
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
    known = [(FORMATS[name], _arguments(FORMATS[name])) for name in _FORMAT_NAMES]
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
    return _described("weights", arguments, known, keys)


def activation_format_of(arguments: Mapping[str, Any] | None) -> Format | None:
    """Returns the format that an `input_activations` block describes, None for 16 bit; ValueError if none fits."""
    known = [(INPUT_FORMATS[name], _activation_arguments(INPUT_FORMATS[name])) for name in _INPUTS]
    keys = ("num_bits", "type", "strategy", "group_size", "dynamic", "symmetric", _RULE)
    return None if arguments is None else _described("inputs", arguments, known, keys)


def _described(kind: str, arguments: Mapping[str, Any], known: Iterable[tuple[Format, Any]], keys: Any) -> Format:
    # compressed-tensors has these defaults.
    stated = {key: arguments.get(key, {"dynamic": False, "symmetric": True}.get(key)) for key in keys}
    for format, ours in known:
        if stated == {key: ours.get(key) for key in keys}:
            return format
    raise ValueError(f"quantization_config has {kind} {stated}: {_NOT_RUN}")


def read_config(
    config: Mapping[str, Any], names: StoredNames, tensors: Container[str] = ()
) -> tuple[FormatsOf, Format | None]:
    """Returns the formats of matrices and of the KV cache; the config names each matrix, so `tensors` are not asked."""
    formats_by_target: dict[str, tuple[Format, Format | None]] = {}
    for name, group in typed(_GROUPS, config.get("config_groups"), "config_groups").items():
        if group.get("weights") is None or group.get("output_activations") is not None:
            raise ValueError(f"{name} of quantization_config rounds inputs without weights, or outputs: {_NOT_RUN}")
        weights = typed(dict[str, Any], group.get("weights"), f"{name}.weights")
        inputs = typed(dict[str, Any] | None, group.get("input_activations"), f"{name}.input_activations")
        pair = weight_format_of(weights), activation_format_of(inputs)
        layout = group.get("format") or config.get("format")
        if layout in _OF_INTEGERS and _OF_INTEGERS[layout] != _OF_INTEGERS.get(_FORMAT_NAMES[pair[0].name]):
            raise ValueError(f"{name} of quantization_config has {pair[0]} in the layout {layout}: {_NOT_RUN}")
        formats_by_target |= dict.fromkeys(typed(list[str], group.get("targets"), f"{name}.targets"), pair)
    ignored = typed(list[str] | None, config.get("ignore"), "ignore") or []

    # `ignore` wins; then names, patterns in the order of the alphabet, classes (`match_targets` of compressed-tensors).
    def formats_of(matrix: str, of_class: str) -> tuple[Format, Format | None] | None:
        called = names.both(matrix)
        if any(_matches(name, pattern, of_class) for pattern in ignored for name in called):
            return None
        targets = [t for t in formats_by_target if any(_matches(name, t, of_class) for name in called)]
        first = min(targets, key=lambda t: (t not in called, not t.startswith("re:"), t), default=None)
        return None if first is None else formats_by_target[first]

    scheme = typed(dict[str, Any] | None, config.get("kv_cache_scheme"), "kv_cache_scheme")
    known = [(format, _arguments(format)) for format in (FORMATS["fp8"], FP8_HEAD)]
    keys = ("num_bits", "type", "strategy", "dynamic", "symmetric")
    return formats_of, _described("a KV cache", scheme, known, keys) if scheme else None


def read_rotations(config: Mapping[str, Any], names: StoredNames) -> Callable[[str], int]:
    """Returns a function from a matrix's name to the block of its input's Hadamard rotation; ValueError for others."""
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
    """Returns whether config and plan have the same formats; configs have only a format's arguments, and no name."""
    return same_values(layer.weight, weight) and same_values(layer.activation, activation)


def _matches(name: str, target: str, of_class: str = "Linear") -> bool:
    """Returns whether an entry of `targets` or `ignore` means a layer: by a pattern, its class, or its name."""
    return matches(target[3:], name) if target.startswith("re:") else target in (of_class, name)


def expected_tensors(format: Format, activation: Format | None, shape: tuple[int, ...]) -> dict[str, ExpectedTensor]:
    """Returns the tensors that are stored for a matrix `[out, in]`, by their names below the layer's."""
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
    weight: BlockScaledTensor, input_scale: Tensor | None, dtype: torch.dtype, activation: Format | None = None
) -> dict[str, Tensor]:
    """Returns the tensors of one linear layer; float scales in `dtype` if that represents them, as it does ours."""
    # A weight is read as code · block scale / weight_global_scale. Our global scale is a factor, and is stored as
    # its reciprocal; so is the scale of an NVFP4 input.
    format, tensors = weight.format, {}
    scale = weight.scale
    if format.scale.is_wide:
        scale = stored_scale(scale, dtype)
        if format.per_tensor:
            scale = scale.reshape(1)  # one number in a tensor of rank one, as the peer writes it
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


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a float scale in the model's dtype if that holds it without loss, else in float32."""
    # A copy: gate and up of an expert may share a scale, and safetensors refuses tensors that share memory.
    stored = scale.to(dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32, copy=True)
    return stored if torch.equal(stored.float(), scale.float()) else scale.to(torch.float32, copy=True)


def holds(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether a layer's tensors have names that only this layout uses."""
    return not tensors.keys().isdisjoint(("weight_packed", "weight_global_scale", "input_global_scale"))


def decompress(tensors: Mapping[str, Tensor], format: Format) -> tuple[BlockScaledTensor, Tensor | None]:
    """Returns the weight and static activation scale of a layer; KeyError if a tensor of the format is missing."""
    # A matrix `[out, in]` has codes of [out, in · bits / 8] bytes, INT4 of [out, in / 8] words.
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


def stored_kv_scale(name: str, scale: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    """Returns the name and form on disk of a scale of the KV cache: one number, or one a head."""
    return name, stored_scale(scale if scale.dim() else scale.reshape(1), dtype)


def _reciprocal(scale: Tensor) -> Tensor:
    """Returns the stored reciprocal of a scale: in float32 if that gives the scale back, else in float64."""
    # Two adjacent float32 numbers may have one float32 reciprocal, and then the way back is ambiguous. A float64 tensor
    # lets `write_tensors` keep the exact number in the file's metadata.
    exact = 1 / scale.double().reshape(1)
    single = exact.float()
    return single if bool(_inverse(single) == scale.reshape(())) else exact


def _inverse(reciprocal: Tensor) -> Tensor:
    """Returns the scale of a stored reciprocal: in float32 if that gives the reciprocal back, else in float64."""
    exact = 1 / reciprocal.double().reshape(())
    single = exact.float()
    return single if torch.equal((1 / single.double()).to(reciprocal.dtype), reciprocal.reshape(())) else exact


def own_files(plan: Plan, names: StoredNames | None = None) -> dict[str, dict[str, Any]]:
    """Returns an empty mapping: the layout has no config file besides config.json."""
    return {}
