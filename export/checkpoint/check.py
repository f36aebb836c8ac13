"""What a checkpoint holds is checked here as it is read, for files may be damaged, edited, or written by a faulty tool.

    codes               present, of the format's dtype and shape; FP8 without NaN (`checkpoint_scan`, or at first use)
    block scales        E4M3: neither negative nor NaN (zero is an empty block of other tools); E8M0: not NaN
    other scales        one number or the shape of the format, positive and finite
    anything else       not left over: a zero point, or an input scale of inputs that stay in 16 bit, changes results
    plan.json           says what config.json says

Scales are checked by their bits (`quant.formats.finite`), so that nothing is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quant.export.checkpoint import compressed_tensors as layout
from quant.export.checkpoint import modelopt
from quant.export.checkpoint.names import StoredNames, expert_names
from quant.formats.finite import is_finite, is_finite_or_mask, is_positive
from quant.formats.format import Format, packed_width
from quant.formats.number import E4M3, E8M0, INT4
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NUMBER = "one number"
# Dtypes and shape of a tensor; `_NUMBER` is any shape of one element.
_Expected = tuple[tuple[torch.dtype, ...], tuple[int, ...] | str]


def expected_tensors(
    format: Format, activation: Format | None, shape: tuple[int, ...], *, modelopt: bool
) -> dict[str, _Expected]:
    """What is stored for a matrix `[out, in]`, by name below the layer's, in either layout."""
    rows, columns = shape
    element, packed = format.element, format.element.bits < 8
    codes: _Expected = ((element.torch_dtype or torch.uint8,), (rows, packed_width(columns, element)))
    if format.element is INT4 and not modelopt:
        codes = ((torch.int32,), (rows, columns // 8))
    elif format.element is INT4:
        codes = ((torch.uint8,), (rows // 2, columns))
    scale = _FLOATS if format.scale.is_wide else (format.scale.torch_dtype,)
    found: dict[str, _Expected] = {
        "weight_packed" if packed and not modelopt else "weight": codes,
        "weight_scale": (scale, format.scale_shape(shape)),  # type: ignore[dict-item]
    }
    if format.element is INT4 and not modelopt:
        found["weight_shape"] = ((torch.int64, torch.int32), (2,))
    if format.global_scale:
        found["weight_scale_2" if modelopt else "weight_global_scale"] = (_FLOATS, _NUMBER)
    if activation is not None and activation.is_static:
        name = "input_global_scale" if activation.global_scale and not modelopt else "input_scale"
        found[name] = (_FLOATS, _NUMBER)
    return found


def matrix_problems(
    tensors: Mapping[str, torch.Tensor], format: Format, activation: Format | None, shape: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    """Each tensor of a matrix that is not as the plan has it, and what is wrong with it.

    Args:
        tensors: by their names below the layer's.
        format, activation, shape: of the matrix, as planned.
    """
    expected = expected_tensors(format, activation, shape, modelopt=modelopt.holds(tensors))
    inputs = activation or "16 bit"
    for name in expected.keys() - tensors.keys():
        yield name, f"is missing; {format} with inputs in {inputs} has it"
    for name in tensors.keys() - expected.keys():
        yield name, f"is left over; {format} with inputs in {inputs} has no such tensor"
    for name in expected.keys() & tensors.keys():
        (dtypes, wanted), tensor = expected[name], tensors[name]
        if tensor.dtype not in dtypes:
            yield name, f"is {_named(tensor.dtype)}; {format} has {' or '.join(map(_named, dtypes))}"
        elif problem := _shape_problem(name, tensor, wanted) or _value_problem(name, tensor, format, shape):
            yield name, problem


def _shape_problem(name: str, tensor: torch.Tensor, wanted: tuple[int, ...] | str) -> str | None:
    """Layouts differ in the axes of length one of scales; codes have the axes of the matrix."""
    if isinstance(wanted, str):
        return None if tensor.numel() == 1 else f"is {list(tensor.shape)}, expected {wanted}"
    given = tuple(tensor.shape)
    if given == wanted or ("scale" in name and [n for n in given if n != 1] == [n for n in wanted if n != 1]):
        return None
    return f"is {list(tensor.shape)}, expected {list(wanted)}"


def _value_problem(name: str, tensor: torch.Tensor, format: Format, shape: tuple[int, ...]) -> str | None:
    if tensor.is_meta:
        return None  # names and shapes alone are looked at
    if name == "weight_shape":
        return None if tensor.tolist() == list(shape) else f"says {tensor.tolist()}, expected {list(shape)}"
    if name in ("weight", "weight_packed"):
        return None  # of all codes, only those of FP8 may be NaN, and `value_problem` says that
    if name != "weight_scale" or format.scale.is_wide:
        return scale_problem(tensor)
    codes, number = tensor.view(torch.uint8), format.scale
    if not codes.numel() or int(codes.numpy().max()) <= number.max_code:
        return None
    if number is E8M0:
        return f"holds {int((codes > E8M0.max_code).sum()):,} scales that are NaN"
    wrong = codes & 0x7F > E4M3.max_code
    return f"holds {int(wrong.sum()):,} scales that are NaN and {int((~wrong & (codes > 0x7F)).sum()):,} below zero"


def scale_problem(scale: torch.Tensor) -> str | None:
    """What is wrong with float scales that are not all positive and finite."""
    if scale.dtype not in _FLOATS:
        return f"is {_named(scale.dtype)}, expected a float"
    if is_positive(scale):
        return None
    if scale.numel() == 1:
        return f"is {float(scale):g}; a scale is a finite number above zero"
    wrong = int((~((scale > 0) & scale.isfinite())).sum())
    return f"holds {wrong:,} scales that are not finite numbers above zero"


def value_problem(tensor: torch.Tensor, *, is_buffer: bool = False) -> str | None:
    """What is wrong with a float tensor; a buffer may be a mask, which holds -infinity."""
    if is_finite_or_mask(tensor) if is_buffer else is_finite(tensor):
        return None
    wide = tensor.float()
    if tensor.dtype.itemsize == 1:
        return f"holds {int((~wide.isfinite()).sum()):,} codes that are NaN or infinite"
    return f"holds {int(wide.isnan().sum()):,} values that are NaN and {int(wide.isinf().sum()):,} that are infinite"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_problems(
    plan: Plan, config: Mapping[str, Any] | None, names: StoredNames, tensors: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """What a plan says otherwise than the config of its checkpoint, which other runtimes go by.

    Args:
        plan: of the checkpoint.
        config: its `quantization_config`, or `quantization` of ModelOpt's own file; None where it has none.
        names: of the model's tensors on disk.
        tensors: of the checkpoint, by their names in the model.
    """
    if config is None:
        if plan.quantized:
            yield f"{plan.quantized[0].name}: in {plan.quantized[0].formats}, and the config has no quantization_config"
        return
    ours = config.get("quant_method") == "compressed-tensors"
    if config == (layout.quantization_config(plan, names) if ours else _modelopt_config(plan, names)):
        return
    formats_of, kv_cache = layout.read_config(config, names) if ours else modelopt.read_config(config, names, tensors)
    rotation_of = layout.read_rotations(config, names) if ours else _no_rotation
    for layer in plan.layers:
        if layer.weight is None and layer.kind not in (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.EXPERTS):
            continue
        is_stack = layer.kind == LayerKind.EXPERTS
        matrix = expert_names(layer.name, 1)[0].removesuffix(".weight") if is_stack else layer.name
        said = formats_of(matrix) or (None, None)
        if not _agree(layer, said, ours):
            asked = LayerPlan(layer.name, layer.kind, layer.shape, *said).formats
            yield f"{layer.name}: {layer.formats}, and the config says {asked}"
        elif layer.weight is not None and (block := rotation_of(matrix)) != layer.parts.hadamard:
            yield f"{layer.name}: a Hadamard rotation of {layer.parts.hadamard}, and the config says {block}"
    if _values(plan.kv_cache) != _values(kv_cache):
        yield f"kv_cache: {plan.kv_cache or '16 bit'}, and the config says {kv_cache or '16 bit'}"


def _no_rotation(matrix: str) -> int:
    """ModelOpt's layout has none."""
    return 0


def _modelopt_config(plan: Plan, names: StoredNames) -> Mapping[str, Any] | None:
    try:
        modelopt.check_plan(plan)
    except ValueError:
        return None
    return modelopt.configs(plan, names)[0]


def _agree(layer: LayerPlan, said: tuple[Format | None, Format | None], compressed_tensors: bool) -> bool:
    """Whether a config means what the plan says. It does not name formats, and ModelOpt's has one name for two."""
    weight, activation = said
    if not compressed_tensors and weight is not None and weight.has_square_blocks and weight == layer.weight:
        inputs = layer.activation
        return inputs is None or (inputs.is_fp8 and inputs.block == (1, weight.block[1]))
    return _values(layer.weight) == _values(weight) and _values(layer.activation) == _values(activation)


def _values(format: Format | None) -> object:
    """What decides the values of a format, beside its name."""
    return None if format is None else (format.element, format.scale, format.block, format.global_scale)
