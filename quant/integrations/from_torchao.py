"""`from_torchao` takes over a live model whose weights torchao has quantized (`quantize_`).

    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    plan = quant.from_torchao(model)           QuantLinear over the same codes and scales
    quant.save(model, plan, "out")             and every other exporter

torchao keeps a weight as a tensor of a class of its own. Its parts are taken as they are, under these formats:

    Float8Tensor              fp8, fp8_channel, fp8_block         inputs: each token, groups of 128, the tensor
    Int8Tensor                int8, int8_tensor                   inputs: each token, the tensor
    Int4Tensor                int4, int4_g64, int4_g32            inputs: each token in FP8
    IntxUnpackedToInt8Tensor  INT8 and INT4 without zero points
    NVFP4Tensor               nvfp4                               inputs: nvfp4
    MXTensor                  mxfp8, mxfp8_e5m2, mxfp4            inputs: the same

Everything is read by name: nothing here imports torchao.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.walk.collect import calibrate
from quant.formats.format import FORMATS, Format, get_format
from quant.formats.format import E4M3, INT4, INT8
from quant.formats.rounding import pack
from quant.formats.tensor import BlockScaledTensor
from quant.integrations.takeover import LayerFormats, Solved, install_takeover, plan_takeover, stand_in, ungrouped
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.plan import LayerPlan, Plan

# Rows and columns of block scales in a tile of cuBLAS' layout ("1D block scaling factors" in its manual).
_TILE = (128, 4)


@dataclass(frozen=True, eq=False)
class _Read:
    """A weight of torchao in our terms: formats, codes and scales, and the input scale that it carries."""

    weight: BlockScaledTensor
    activation: Format | None = None
    input_scale: torch.Tensor | None = None
    pre_scale: torch.Tensor | None = None


def from_torchao(
    model: nn.Module, data: torch.Tensor | None = None, *, run: Callable[[nn.Module], Any] | None = None
) -> Plan:
    """Replaces layers with weights of torchao by quantized modules over the same codes; changes the model in place.

    Args:
        model: the model as `quantize_` left it.
        data: calibration rows, as in `quant.quantize`, where torchao finds one scale for all inputs of a layer at run
            time (NVFP4, and FP8 with `PerTensor`): here and in checkpoints that scale is static.
        run: calls the model on any valid input, which is how fused layers are found; needed where the model does not
            run on token ids.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: no weight is of torchao; one is of a class or in a layout that cannot be taken over, or has zero
            points; `data` is missing. The model is then as it was.
    """
    # A tied weight under all its names: each layer is replaced, and none is left with torchao's tensor.
    parameters = {
        name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if _is_torchao_tensor(tensor)
    }
    if not parameters:
        raise UserError("no weight of the model is quantized by torchao; call quantize_(model, config) first")
    weights = {name.removesuffix(".weight"): _read(name, tensor) for name, tensor in parameters.items()}
    formats = {
        name: LayerFormats(read.weight.format, read.activation, f"as torchao quantized it ({type(tensor).__name__})")
        for (name, read), tensor in zip(weights.items(), parameters.values(), strict=True)
    }
    plain: dict[int, nn.Parameter] = {}
    with ExitStack() as stack:
        for name, tensor in parameters.items():
            plain_weight = stand_in(model, name, tensor.shape, tensor.dtype, stack, plain.get(id(tensor)))
            plain[id(tensor)] = plain_weight  # tied weights stay tied
        plan = plan_takeover(model, formats, toolkit="torchao", solver="rtn", run=run)
        plan = ungrouped(plan, lambda members: _differ([weights[member.name] for member in members]))
        for layer in plan.quantized:
            _check_shape(layer, weights[layer.name].weight)
        unscaled = [
            layer for layer in plan.quantized if layer.has_static_scale and weights[layer.name].input_scale is None
        ]
        # Before anything is replaced, so that the model is as it was if this fails.
        if unscaled and data is None:
            raise UserError(
                f"{unscaled[0].name}: torchao finds one scale for all of its inputs at run time, and here that is "
                "static; pass calibration rows: quant.from_torchao(model, data)"
            )
        stack.pop_all()
    # `pop` lets each read weight go once its module holds it: memory has no second copy of the whole model.
    plan = install_takeover(model, plan, lambda layer: _solved(weights.pop(layer.name)))
    if unscaled:
        scales = calibrate(model, plan, data)
        for layer in unscaled:
            module: Any = model.get_submodule(layer.name)
            module.input_scale = scales[layer.name].to(module.codes.device)
    return plan


def _is_torchao_tensor(tensor: torch.Tensor) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchao" for kind in type(tensor).__mro__)


def _solved(read: _Read) -> Solved:
    return read.weight, read.input_scale, RunTimeParts(read.pre_scale)


def _check_shape(layer: LayerPlan, weight: BlockScaledTensor) -> None:
    if layer.matrix != weight.shape or layer.transposed:
        raise UserError(
            f"{layer.name} {list(weight.shape)}: torchao quantized it along another axis than that of the inputs "
            f"(the layer is {list(layer.matrix)}); leave it in 16 bit with filter_fn"
        )


def _differ(members: list[_Read]) -> bool:
    """Returns whether the tensor scales of fused layers differ, since torchao computes one for each layer."""
    first = members[0]

    def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return a is b is None or (a is not None and b is not None and torch.equal(a, b))

    return not all(
        same(first.weight.global_scale, other.weight.global_scale)
        and same(first.input_scale, other.input_scale)
        and same(first.pre_scale, other.pre_scale)
        and (not first.weight.format.per_tensor or same(first.weight.scale, other.weight.scale))
        for other in members[1:]
    )


def _read(name: str, tensor: Any) -> _Read:
    kind = type(tensor).__name__
    if kind not in _READERS:
        raise UserError(
            f"{name}: a weight of torchao's class {kind}, which cannot be taken over; classes that can: "
            f"{', '.join(_READERS)}"
        )
    if not 2 <= tensor.dim() <= 3:
        raise UserError(f"{name} {list(tensor.shape)}: torchao's weights of two or three dimensions can be taken over")
    with torch.no_grad():
        return _READERS[kind](name.removesuffix(".weight"), tensor)


def _float8(name: str, tensor: Any) -> _Read:
    if tensor.qdata.dtype is not torch.float8_e4m3fn:
        raise UserError(f"{name}: FP8 in {tensor.qdata.dtype}; E4M3 (torch.float8_e4m3fn) can be taken over")
    format = _format(name, tensor, E4M3)
    kwargs = tensor.act_quant_kwargs
    if kwargs is None:
        return _Read(_weight(tensor.qdata, tensor.scale, format))
    # torchao's bounds clamp inputs before they are rounded. None of our kernels does this.
    clamps = (kwargs.hp_value_lb, kwargs.hp_value_ub)
    if kwargs.float8_dtype is not torch.float8_e4m3fn or clamps != (None, None):
        raise UserError(f"{name}: its inputs are in {kwargs.float8_dtype} or clamped; E4M3 without can be taken over")
    return _Read(_weight(tensor.qdata, tensor.scale, format), _inputs(name, kwargs.granularity, "fp8"))


def _int8(name: str, tensor: Any) -> _Read:
    _check_symmetric(name, tensor.zero_point)
    weight = _weight(tensor.qdata, tensor.scale, _format(name, tensor, INT8))
    kwargs, scale, pre_scale = tensor.act_quant_kwargs, tensor.act_quant_scale, _pre_scale(tensor)
    if kwargs is None:
        return _Read(weight, pre_scale=pre_scale)
    _check_symmetric(name, tensor.act_quant_zero_point)
    if kwargs.mapping_type.name != "SYMMETRIC":
        raise UserError(f"{name}: its inputs have zero points ({kwargs.mapping_type.name}); use MappingType.SYMMETRIC")
    activation = _inputs(name, kwargs.granularity, "int8")
    if scale is not None and (scale.numel() != 1 or not activation.per_tensor):
        raise UserError(
            f"{name}: its inputs have {scale.numel()} static scales; one, or one for each token at run time"
        )
    return _Read(weight, activation, None if scale is None else scale.float().reshape(()), pre_scale)


def _int4(name: str, tensor: Any) -> _Read:
    _check_symmetric(name, tensor.zero_point)
    # Scales are kept [groups, out], codes two to a byte.
    weight = _weight(tensor.qdata.view(torch.uint8), tensor.scale.transpose(-2, -1), _format(name, tensor, INT4))
    is_fp8 = tensor.activation_dtype is torch.float8_e4m3fn
    return _Read(weight, get_format("fp8_token") if is_fp8 else None, pre_scale=_pre_scale(tensor))


def _intx(name: str, tensor: Any) -> _Read:
    _check_symmetric(name, tensor.zero_point)
    number = {"torch.int8": INT8, "torch.int4": INT4}.get(str(tensor.target_dtype))
    if number is None:
        raise UserError(f"{name}: integers of {tensor.target_dtype}; int8 and int4 can be taken over")
    if tensor.activation_quantization is not None:
        raise UserError(
            f"{name}: its inputs are in {tensor.activation_quantization}, with zero points; quantize only weights"
        )
    # Codes are signed and a byte each; the low half of an INT4 code is its two's complement in four bits.
    codes = tensor.qdata if number is INT8 else pack(tensor.qdata.view(torch.uint8) & 0x0F, 4)
    return _Read(_weight(codes, tensor.scale, _format(name, tensor, number)))


def _nvfp4(name: str, tensor: Any) -> _Read:
    format = get_format("nvfp4")
    # Without a scale of the tensor (one-level NVFP4) the global scale is 1.
    second = tensor.per_tensor_scale
    if second is None:
        second = torch.ones((), device=tensor.device, dtype=torch.float32)
    # A scalar for a matrix, `[experts]` for a stack: torchao may hold one number for all experts.
    second = second.float().reshape(-1).expand(tensor.shape[:-2].numel()).reshape(tensor.shape[:-2])
    codes = _contiguous(name, tensor.qdata).view(torch.uint8)
    weight = BlockScaledTensor(codes, _block_scale(tensor, format), format, tuple(tensor.shape), second)
    if tensor.act_quant_kwargs is None:
        return _Read(weight)
    # None leaves the input's scale to calibration; torchao's one-level inputs have the scale 1.
    static = tensor.act_per_tensor_scale
    if static is None and not tensor.act_quant_kwargs.use_dynamic_per_tensor_scale:
        static = torch.ones((), device=tensor.device, dtype=torch.float32)
    return _Read(weight, format, None if static is None else static.float().reshape(()))


def _mx(name: str, tensor: Any) -> _Read:
    def format_of(dtype: Any, size: int) -> Format:
        names = {torch.float8_e4m3fn: "mxfp8", torch.float8_e5m2: "mxfp8_e5m2", torch.float4_e2m1fn_x2: "mxfp4"}
        if dtype not in names or size != 32:
            raise UserError(f"{name}: MX in {dtype} and blocks of {size}; here {', '.join(names.values())} have 32")
        return get_format(names[dtype])

    format = format_of(tensor.elem_dtype, tensor.block_size)
    codes = _contiguous(name, tensor.qdata)
    scale = _block_scale(tensor, format).view(torch.uint8)
    weight = BlockScaledTensor(codes, scale, format, tuple(tensor.shape))
    kwargs = tensor.act_quant_kwargs
    return _Read(weight, None if kwargs is None else format_of(kwargs.elem_dtype, kwargs.block_size))


_READERS: dict[str, Callable[[str, Any], _Read]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "Int4Tensor": _int4,
    "IntxUnpackedToInt8Tensor": _intx,
    "NVFP4Tensor": _nvfp4,
    "MXTensor": _mx,
}


def _format(name: str, tensor: Any, number: Any) -> Format:
    """Returns the weight format with a float scale for each of torchao's blocks."""
    shape, block = tuple(tensor.shape), tuple(tensor.block_size)
    # A format's block has 0 for a whole axis, torchao's has its size; a row is a row in both.
    rows, columns = (0 if size == whole else size for size, whole in zip(block[-2:], shape[-2:], strict=True))
    rows = 1 if block[-2] == 1 else rows
    for format in FORMATS.values():
        if format.element is number and format.scale.is_wide and format.block == (rows, columns):
            return format
    raise UserError(
        f"{name} {list(shape)}: no format here for {number.name} in blocks of {list(block)}; take a tensor, a row, "
        "FP8 in 128×128, or INT4 in groups of 128, 64 or 32"
    )


def _inputs(name: str, granularity: Any, kind: str) -> Format:
    """Returns the format of inputs with torchao's granularity: a scale for each token, each group or the tensor."""
    granularity_name = type(granularity).__name__
    sizes = getattr(granularity, "block_size", getattr(granularity, "group_size", None))
    size = sizes[-1] if isinstance(sizes, tuple | list) else sizes
    if granularity_name == "PerRow" and getattr(granularity, "dim", -1) == -1:
        return get_format(f"{kind}_token")
    if granularity_name == "PerTensor":
        return get_format("fp8" if kind == "fp8" else "int8_tensor")
    if granularity_name in ("PerBlock", "PerGroup") and size == 128 and kind == "fp8":
        return get_format("fp8_group")
    raise UserError(f"{name}: no format here for inputs in {kind} by {granularity}; take PerRow()")


def _weight(codes: torch.Tensor, scale: torch.Tensor, format: Format) -> BlockScaledTensor:
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // format.element.bits)
    return BlockScaledTensor(
        codes.contiguous(), scale.float().reshape(format.scale_shape(shape)).contiguous(), format, shape
    )


def _pre_scale(tensor: Any) -> torch.Tensor | None:
    """Returns the factor of the inputs, `[in]`."""
    return None if tensor.act_pre_scale is None else tensor.act_pre_scale.reshape(-1)


def _check_symmetric(name: str, zero_point: torch.Tensor | None) -> None:
    if zero_point is not None and bool((zero_point != 0).any()):
        raise UserError(
            f"{name}: torchao quantized it with zero points, which no format here has; quantize it with "
            "MappingType.SYMMETRIC"
        )


def _contiguous(name: str, codes: Any) -> Any:
    """Returns packed codes, whose last axis counts inputs."""
    if codes.stride(-1) != 1:
        raise UserError(f"{name}: torchao holds it transposed; take the model over before its weights are transposed")
    return codes.contiguous()


def _block_scale(tensor: Any, format: Format) -> Any:
    """Returns the block scales `[..., out, blocks]`, which torchao may hold in tiles, as cuBLAS reads them."""
    shape = format.scale_shape(tensor.shape)
    if not tensor.is_swizzled_scales:
        return tensor.scale.reshape(shape).contiguous()
    rows, columns = math.prod(shape[:-1]), shape[-1]
    high, wide = -(-rows // _TILE[0]), -(-columns // _TILE[1])
    tiles = tensor.scale.view(torch.uint8).reshape(high, wide, 32, 4, _TILE[1])
    # Row 32 i + j of a tile is row j of its fourth i.
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(high * _TILE[0], wide * _TILE[1])
    return plain[:rows, :columns].contiguous().view(tensor.scale.dtype).reshape(shape)
