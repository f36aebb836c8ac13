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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quant.export.checkpoint.configs.compressed_tensors_config import agrees as agrees
from quant.export.checkpoint.configs.compressed_tensors_config import check_plan as check_plan
from quant.export.checkpoint.configs.compressed_tensors_config import quantization_config as quantization_config
from quant.export.checkpoint.configs.compressed_tensors_config import read_config as read_config
from quant.export.checkpoint.configs.compressed_tensors_config import read_rotations as read_rotations
from quant.export.checkpoint.files.known_failures import runtime_warnings as runtime_warnings
from quant.export.checkpoint.files.layout import ExpectedTensor
from quant.export.checkpoint.files.names import StoredNames
from quant.formats.format import Format, packed_width
from quant.formats.number import INT4
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import Plan


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
    weight: BlockScaledTensor,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype,
    activation: Format | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the tensors of one linear layer, by their names below the layer's; the inverse of `decompress`.

    Args:
        weight: `[out, in]`.
        input_scale: static activation scale, float32 scalar (for NVFP4 the global scale), or None.
        dtype: the model's dtype, in which float scales are stored if it represents them, as it does ours.
        activation: format that `input_scale` belongs to; by default the weight's.
    """
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


def stored_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a float scale in the model's dtype if that holds it without loss, else in float32."""
    # A copy: gate and up of an expert may share a scale, and safetensors refuses tensors that share memory.
    stored = scale.to(dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32, copy=True)
    return stored if torch.equal(stored.float(), scale.float()) else scale.to(torch.float32, copy=True)


def holds(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether a layer's tensors have names that only this layout uses.

    With eight bits the layouts may agree.
    """
    return not tensors.keys().isdisjoint(("weight_packed", "weight_global_scale", "input_global_scale"))


def decompress(tensors: Mapping[str, torch.Tensor], format: Format) -> tuple[BlockScaledTensor, torch.Tensor | None]:
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


def stored_kv_scale(name: str, scale: torch.Tensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """Returns the name and form on disk of a scale of the KV cache: one number, or one a head."""
    return name, stored_scale(scale if scale.dim() else scale.reshape(1), dtype)


def kv_name_of_module(name: str) -> str:
    """Returns the name in the model of a scale of the KV cache, which this layout keeps."""
    return name


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Returns the stored reciprocal of a scale: in float32 if that gives the scale back, else in float64."""
    # Two adjacent float32 numbers may have one float32 reciprocal, and then the way back is ambiguous. A float64 tensor
    # lets `write_tensors` keep the exact number in the file's metadata.
    exact = 1 / scale.double().reshape(1)
    single = exact.float()
    return single if bool(_inverse(single) == scale.reshape(())) else exact


def _inverse(reciprocal: torch.Tensor) -> torch.Tensor:
    """Returns the scale of a stored reciprocal: in float32 if that gives the reciprocal back, else in float64."""
    exact = 1 / reciprocal.double().reshape(())
    single = exact.float()
    return single if torch.equal((1 / single.double()).to(reciprocal.dtype), reciprocal.reshape(())) else exact


def own_files(plan: Plan, names: StoredNames | None = None) -> dict[str, dict[str, Any]]:
    """Returns an empty mapping: the layout has no config file besides config.json."""
    return {}
