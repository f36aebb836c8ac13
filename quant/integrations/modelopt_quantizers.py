"""ModelOpt's quantizers, read: the formats they simulate, and the codes and scales that ModelOpt's export writes.

A `TensorQuantizer` has its format in fields, and the results of calibration in buffers:

    num_bits      (2, 1), (4, 3) … exponent and mantissa bits of a float; 8, 4 an integer
    block_sizes   {-1: 16, "scale_bits": (4, 3), "type": "dynamic"}; None where `axis` says which elements share a scale
    axis          None: the whole tensor; 0: each row; all axes but the last one of an input: each token
    _amax         largest magnitudes of the tensor, its rows or its blocks
    _global_amax  of the tensor, where `_amax` holds maxima of blocks after a search (MSE, four-over-six, local Hessian)

Everything is read by name: nothing here imports ModelOpt, and states that were recorded elsewhere do as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.solvers.peers import quantize_like_modelopt, round_like_modelopt
from quant.formats.format import FORMATS, Format
from quant.formats.format import E4M3, E8M0, INT4, Number
from quant.formats.rounding import pack
from quant.formats.rounding import round_to
from quant.formats.scaling import divided, nonzero
from quant.formats.tensor import BlockScaledTensor

_CLASSES = {"TensorQuantizer", "SequentialQuantizer"}
_HEADROOM = 256.0  # block scales of four-over-six end there instead of at 448


def is_quantizer(module: nn.Module) -> bool:
    """Returns whether a module is one of ModelOpt's quantizers."""
    return any(kind.__name__ in _CLASSES for kind in type(module).__mro__)


def is_enabled(quantizer: nn.Module) -> bool:
    """Returns whether a quantizer rounds."""
    parts = list(quantizer.children()) if _is_sequence(quantizer) else [quantizer]
    return any(getattr(part, "is_enabled", False) for part in parts)


def _is_sequence(quantizer: nn.Module) -> bool:
    return isinstance(quantizer, nn.Sequential)


def format_of(quantizer: Any, name: str, *, inputs: bool = False) -> Format:
    """Returns the format that a quantizer simulates.

    Args:
        quantizer: the quantizer of a weight, or of inputs.
        name: the name of the layer, for errors.
        inputs: the inputs that are meant.

    Raises:
        UserError: the format is not supported, or comes with an unsupported addition; the message names the setting.
    """
    what = "inputs" if inputs else "weight"
    if _is_sequence(quantizer):
        raise UserError(
            f"{name}: ModelOpt rounds its {what} in several formats, one after the other (SequentialQuantizer), as "
            "W4A8_AWQ does, and a layer has one here; quantize it in one, such as INT4_AWQ_CFG"
        )
    _check_extras(quantizer, name, what)
    block = _block(quantizer, inputs)
    fitting = [
        format
        for format in FORMATS.values()
        if format.block == block and _is_element(format.element, quantizer) and _has_scale(format, quantizer)
    ]
    if not fitting:
        raise UserError(
            f"{name}: no format here for its {what} in ModelOpt's {described(quantizer)}; quantize it with one of "
            "NVFP4, FP8, MXFP8, MXFP4, INT8 or INT4 in groups of 128, or leave it out with an entry "
            f"{{'quantizer_name': '{name}*', 'enable': False}} of quant_cfg"
        )
    # Where two formats differ only in name, the one for inputs comes last in FORMATS.
    format = fitting[-1 if inputs else 0]
    if inputs:
        _check_inputs(quantizer, format, name)
    return format


def described(quantizer: Any) -> str:
    """Returns the fields that say the format."""
    blocks = quantizer.block_sizes
    return f"num_bits={quantizer.num_bits}, " + (f"block_sizes={dict(blocks)}" if blocks else f"axis={quantizer.axis}")


def _check_extras(quantizer: Any, name: str, what: str) -> None:
    # A flag, a dict or a config object, by the release of ModelOpt.
    rotate = getattr(quantizer, "_rotate", False)
    rotates = rotate.get("enable", False) if isinstance(rotate, dict) else getattr(rotate, "enable", rotate)
    problems = {
        "rotate": bool(rotates),
        "bias (affine quantization)": bool(getattr(quantizer, "_bias", None)),
        "unsigned": bool(getattr(quantizer, "_unsigned", False)),
        f"backend={getattr(quantizer, 'backend', None)!r}": getattr(quantizer, "backend", None) is not None,
        "LSQ (learned amax)": bool(getattr(quantizer, "_lsq", False)),
    }
    for problem in (problem for problem, is_set in problems.items() if is_set):
        raise UserError(
            f"{name}: the ModelOpt quantizer of its {what} has {problem}, which is not supported; quantize the layer "
            "without it"
        )


def _is_element(number: Number, quantizer: Any) -> bool:
    bits = quantizer.num_bits
    if isinstance(bits, int):
        return number.is_integer and number.bits == bits
    return not number.is_integer and (number.exponent, number.mantissa) == tuple(bits)


def _has_scale(format: Format, quantizer: Any) -> bool:
    """Returns whether a format has the block scales of a quantizer, where they are coded (E4M3 and E8M0)."""
    bits = (quantizer.block_sizes or {}).get("scale_bits")
    if bits is None:
        return format.scale.is_wide
    return bits == (format.scale.exponent, format.scale.mantissa) and format.global_scale == (format.scale is E4M3)


def _block(quantizer: Any, inputs: bool) -> tuple[int, int] | None:
    """Returns the (rows, columns) that share a scale, 0 for the whole axis, as formats say it.

    None for another division.
    """
    sizes = {axis: size for axis, size in (quantizer.block_sizes or {}).items() if isinstance(axis, int)}
    # A block of None on the last axis is the whole row.
    if sizes == {-1: None}:
        return 1, 0
    if sizes:
        if set(sizes) == {-1}:
            return 1, sizes[-1]
        return (sizes[-2], sizes[-1]) if set(sizes) == {-1, -2} else None
    axis = quantizer.axis
    if axis is None:
        return 0, 0
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    is_rows = axes == tuple(range(len(axes))) if inputs else axes == (0,)
    return (1, 0) if is_rows else None


def _check_inputs(quantizer: Any, format: Format, name: str) -> None:
    """Raises UserError where inputs have no scale that calibration found, and need one, or the other way round."""
    is_static = not getattr(quantizer, "_dynamic", False) and (quantizer.block_sizes or {}).get("type") != "dynamic"
    if format.is_static:
        if getattr(quantizer, "_dynamic", False):
            raise UserError(
                f"{name}: the tensor scale of its inputs is found at run time in ModelOpt ('type': 'dynamic'), and by "
                "calibration here: set 'type': 'static', and give mtq.quantize a forward_loop"
            )
        if _amax(quantizer) is None and not getattr(quantizer, "_use_constant_amax", False):
            raise UserError(
                f"{name}: the ModelOpt quantizer of its inputs has no amax; calibrate it: mtq.quantize(model, config, "
                "forward_loop)"
            )
        if format.global_scale and is_static:
            raise UserError(f"{name}: its inputs have static block scales in ModelOpt; those here are dynamic")
    elif is_static:
        raise UserError(
            f"{name}: its inputs have static scales in ModelOpt ({described(quantizer)}); those of {format} are found "
            "at run time here: set 'type': 'dynamic'"
        )


def _amax(quantizer: Any) -> torch.Tensor | None:
    amax = getattr(quantizer, "_amax", None)
    return None if amax is None else amax.detach().float()


def tensor_amax(quantizer: Any) -> torch.Tensor | None:
    """Returns the largest magnitude of the tensor, float32 scalar, where the format has one scale for all of it.

    Of inputs that calibration never saw (zero or NaN) it is the largest element, as ModelOpt's export has it.
    """
    # With this setting ModelOpt calibrates nothing and takes FP8's largest value, which makes the scale 1.
    if getattr(quantizer, "_use_constant_amax", False):
        return torch.tensor(E4M3.max)
    amax = getattr(quantizer, "_global_amax", None)
    amax = _amax(quantizer) if amax is None else amax.detach().float()
    return amax.reshape(()) if amax is not None and amax.numel() == 1 else None


def input_scale_of(amax: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the static input scale, float32 scalar, as ModelOpt's export makes it of the largest magnitude."""
    amax = torch.where((amax == 0) | amax.isnan(), format.element.max, amax)
    # NVFP4 divides by 6 · 448, so that the largest block scale of the input is E4M3's largest; FP8 divides by 448.
    return divided(amax, format.element.max * (E4M3.max if format.global_scale else 1.0))


def weight_of(quantizer: Any, weight: torch.Tensor, format: Format, amax: torch.Tensor | None) -> BlockScaledTensor:
    """Returns the codes and scales that ModelOpt's export writes of a weight.

    Args:
        quantizer: the quantizer of the weight.
        weight: the matrix `[out, in]`, in the model's dtype.
        format: the format as `format_of` gives it.
        amax: largest magnitude of the fusion group, where its members have one scale each, or a global scale.
    """
    amax = None if amax is None else amax.to(weight.device)
    if format.global_scale:
        assert amax is not None
        if getattr(quantizer, "_global_amax", None) is None:
            return quantize_like_modelopt(weight, format, amax)
        return _with_block_amax(quantizer, weight, format, amax)
    largest = _amax(quantizer) if amax is None else amax
    # MX scales follow only from the blocks of the weight; without amax ModelOpt's export measures the weight itself.
    if format.scale is E8M0 or largest is None:
        return quantize_like_modelopt(weight, format, None)
    scale = nonzero(divided(largest, format.element.max)).reshape(format.scale_shape(weight.shape))
    return round_like_modelopt(weight, format, scale.to(weight.device))


def _with_block_amax(quantizer: Any, weight: torch.Tensor, format: Format, amax: torch.Tensor) -> BlockScaledTensor:
    """Returns NVFP4 under searched block scales, as `get_weights_scaling_factor_from_quantizer` of `NVFP4QTensor`."""
    blocks = _amax(quantizer)
    assert blocks is not None
    # scale · second = step, with second = amax / (element.max · largest); four-over-six keeps room for blocks that are
    # scaled to 4 instead of 6, whose scale is 1.5 times as large.
    largest = _HEADROOM if quantizer.block_sizes.get("four_over_six") else E4M3.max
    step = nonzero(divided(blocks.to(weight.device), format.element.max)).reshape(format.scale_shape(weight.shape))
    scale = (step * largest / divided(amax, format.element.max)).clamp_(E4M3.min_subnormal, E4M3.max)
    return round_like_modelopt(weight, format, round_to(scale, E4M3), divided(amax, format.element.max * largest))


def is_compressed(weight: Any) -> bool:
    """Returns whether a parameter holds the codes of a weight, as `mtq.compress` leaves it."""
    return type(weight).__name__ == "QTensorWrapper"


def check_compressed(quantizer: Any, format: Format, name: str) -> None:
    """Raises UserError where a compressed weight has scales in tiles, as TensorRT-LLM gives it."""
    if format.global_scale and quantizer._scale.dtype is not torch.float8_e4m3fn:
        raise UserError(
            f"{name}: compressed by TensorRT-LLM, with scales in tiles; take the model over before mtq.compress"
        )


def compressed_weight(quantizer: Any, packed: Any, format: Format) -> BlockScaledTensor:
    """Returns the codes and scales of a weight that `mtq.compress` has packed, as they are.

    Args:
        quantizer: the quantizer of the weight, which keeps its scales.
        packed: the parameter.
        format: the format as `format_of` gives it.
    """
    shape, data, scale = tuple(packed.metadata["shape"]), packed.data, quantizer._scale.detach()
    if format.element is INT4:
        # Two to a byte, the first in the high half, as numbers from 0 to 15; the scale is a factor of the weight.
        codes = torch.stack([data >> 4, data & 0x0F], dim=-1).reshape(shape)
        data, scale = pack((codes - 8) & 0x0F, 4), 1 / scale.float()
    codes = data.view(format.element.torch_dtype or torch.uint8).reshape(format.codes_shape(shape))
    scale = (scale.float() if format.scale.is_wide else scale).reshape(format.scale_shape(shape))
    second = quantizer._double_scale.detach().float().reshape(()) if format.global_scale else None
    return BlockScaledTensor(codes.contiguous(), scale.contiguous(), format, shape, second)
