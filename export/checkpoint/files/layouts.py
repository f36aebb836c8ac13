"""`LAYOUTS` lists the layouts of checkpoints, by which the tensors and the plan of a checkpoint are checked.

Files may be damaged, edited, or of a faulty tool, and so are checked while they are read:

    codes               present, of the format's dtype and shape; FP8 without NaN (`suspect_problems`, or at first use)
    block scales        E4M3: neither negative nor NaN (zero is an empty block of other tools); E8M0: not NaN
    other scales        one number or the shape of the format, positive and finite
    any other tensor    refused: a zero point, or an input scale of inputs that stay in 16 bit, changes results
    plan.json           agrees with config.json

Scales are checked by their bits (`quant.formats.finite`), so that nothing is converted.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from quant.export.checkpoint.files import compressed_tensors, modelopt
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, MODELOPT, ExpectedTensor, Layout, same_values
from quant.export.checkpoint.files.names import StoredNames, matrix_names
from quant.formats.finite import is_finite, is_positive
from quant.formats.format import E4M3, E8M0, Format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

# mypy checks each module against the protocol here.
LAYOUTS: dict[str, Layout] = {MODELOPT: modelopt, COMPRESSED_TENSORS: compressed_tensors}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def layout_of_config(config: Mapping[str, Any]) -> Layout:
    """Returns the layout that a config describes; the table in ModelOpt's own file does not name its method."""
    return LAYOUTS.get(str(config.get("quant_method")), LAYOUTS[MODELOPT])


def layout_of_tensors(tensors: Mapping[str, Tensor]) -> Layout:
    """Returns the layout of one layer's tensors, given by their names below the layer's."""
    return next((layout for layout in LAYOUTS.values() if layout.holds(tensors)), LAYOUTS[COMPRESSED_TENSORS])


def matrix_problems(
    tensors: Mapping[str, Tensor], format: Format, activation: Format | None, shape: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    """Yields each tensor of a matrix that differs from the plan, by its name below the layer's, and how it differs."""
    expected = layout_of_tensors(tensors).expected_tensors(format, activation, shape)
    inputs = activation or "16 bit"
    for name in expected.keys() - tensors.keys():
        yield name, f"is missing; {format} with inputs in {inputs} has it"
    for name in tensors.keys() - expected.keys():
        yield name, f"is left over; {format} with inputs in {inputs} has no such tensor"
    for name in expected.keys() & tensors.keys():
        tensor, dtypes = tensors[name], expected[name].dtypes or _FLOATS
        if tensor.dtype not in dtypes:
            yield name, f"is {dtype_name(tensor.dtype)}; {format} has {' or '.join(map(dtype_name, dtypes))}"
        elif problem := _shape_problem(name, tensor, expected[name]) or _value_problem(name, tensor, format, shape):
            yield name, problem


def _shape_problem(name: str, tensor: Tensor, expected: ExpectedTensor) -> str | None:
    """Compares shapes: layouts differ in the axes of length one of scales, and codes have the axes of the matrix."""
    shape = tuple(tensor.shape)
    if expected.shape is None:
        return None if tensor.numel() == 1 else f"is {list(shape)}, expected one number"
    axes, expected_axes = ([size for size in sizes if size != 1] for sizes in (shape, expected.shape))
    if shape == expected.shape or ("scale" in name and axes == expected_axes):
        return None
    return f"is {list(shape)}, expected {list(expected.shape)}"


def _value_problem(name: str, tensor: Tensor, format: Format, shape: tuple[int, ...]) -> str | None:
    if tensor.is_meta:
        return None  # the caller looks only at names and shapes
    if name == "weight_shape":
        return None if tensor.tolist() == list(shape) else f"says {tensor.tolist()}, expected {list(shape)}"
    if name in ("weight", "weight_packed"):
        return None  # only FP8 has codes that are NaN, and `value_problem` finds them
    if name != "weight_scale" or format.scale.is_wide:
        return scale_problem(tensor)
    # E4M3 without its sign bit has NaN at 0x7F; with the sign bit a code is above 0x7F. E8M0 has NaN at 0xFF.
    codes, number = tensor.view(torch.uint8), format.scale
    if not codes.numel() or int(codes.numpy().max()) <= number.max_code:
        return None
    if number is E8M0:
        return f"holds {int((codes > E8M0.max_code).sum()):,} scales that are NaN"
    wrong = codes & 0x7F > E4M3.max_code
    return f"holds {int(wrong.sum()):,} scales that are NaN and {int((~wrong & (codes > 0x7F)).sum()):,} below zero"


def scale_problem(scale: Tensor) -> str | None:
    """Returns the fault of float scales that are not all positive and finite."""
    if scale.dtype not in _FLOATS:
        return f"is {dtype_name(scale.dtype)}, expected a float"
    if is_positive(scale):
        return None
    if scale.numel() == 1:
        return f"is {float(scale):g}; a scale is a finite number above zero"
    return f"holds {int((~((scale > 0) & scale.isfinite())).sum()):,} scales that are not finite numbers above zero"


def value_problem(tensor: Tensor, *, is_buffer: bool = False) -> str | None:
    """Returns the fault of a float tensor that holds NaN or infinity; a buffer may be a mask, which holds -infinity."""
    if is_finite(tensor, is_mask=is_buffer):
        return None
    wide = tensor.float()
    if tensor.dtype.itemsize == 1:
        return f"holds {int((~wide.isfinite()).sum()):,} codes that are NaN or infinite"
    return f"holds {int(wide.isnan().sum()):,} values that are NaN and {int(wide.isinf().sum()):,} that are infinite"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module: `float16`."""
    return str(dtype).removeprefix("torch.")


def plan_problems(
    plan: Plan, config: Mapping[str, Any] | None, names: StoredNames, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yields the differences between a plan and its checkpoint's config, which other runtimes read.

    None is no config.
    """
    if config is None:
        if plan.quantized:
            yield f"{plan.quantized[0].name}: in {plan.quantized[0].formats}, and the config has no quantization_config"
        return
    # Most checkpoints were written by this version: writing the plan again gives the same config.
    layout = layout_of_config(config)
    with suppress(ValueError):  # the layout cannot hold the plan
        layout.check_plan(plan)
        # `Trial.heeded` has added the field.
        if {k: v for k, v in config.items() if k != "dequantize"} == layout.quantization_config(plan, names):
            return
    formats_of, kv_cache = layout.read_config(config, names, tensors)
    rotation_of = layout.read_rotations(config, names)
    for layer in plan.layers:
        if layer.weight is None and layer.kind not in (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.EXPERTS):
            continue
        matrix = matrix_names(layer.name, 0)[0] if layer.kind == LayerKind.EXPERTS else layer.name
        weight, activation = formats_of(matrix, "Linear") or (None, None)
        if not layout.agrees(layer, weight, activation):
            configured = LayerPlan(layer.name, layer.kind, layer.shape, weight, activation).formats
            yield f"{layer.name}: {layer.formats}, and the config says {configured}"
        elif layer.weight is not None and (block := rotation_of(matrix)) != layer.parts.hadamard:
            yield f"{layer.name}: a Hadamard rotation of {layer.parts.hadamard}, and the config says {block}"
    if not same_values(plan.kv_cache, kv_cache):
        yield f"kv_cache: {plan.kv_cache or '16 bit'}, and the config says {kv_cache or '16 bit'}"
