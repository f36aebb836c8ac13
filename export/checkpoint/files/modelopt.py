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
and `quant.export.checkpoint.files.write_tensors.write_tensors` stores the exact value in the file's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from quant.export.checkpoint.configs.modelopt_config import CONFIG_FILE as CONFIG_FILE
from quant.export.checkpoint.configs.modelopt_config import agrees as agrees
from quant.export.checkpoint.configs.modelopt_config import check_plan as check_plan
from quant.export.checkpoint.configs.modelopt_config import own_files as own_files
from quant.export.checkpoint.configs.modelopt_config import quantization_config as quantization_config
from quant.export.checkpoint.configs.modelopt_config import read_config as read_config
from quant.export.checkpoint.configs.modelopt_config import read_rotations as read_rotations
from quant.export.checkpoint.configs.modelopt_config import runtime_warnings as runtime_warnings
from quant.export.checkpoint.files.layout import ExpectedTensor
from quant.formats.format import Format, packed_width
from quant.formats.number import INT4
from quant.formats.packing import pack, unpack
from quant.formats.tensor import BlockScaledTensor

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
    weight: BlockScaledTensor,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
    activation: Format | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the tensors of one linear layer, by their names below the layer's; the inverse of `decompress`.

    `weight` is `[out, in]`, and `input_scale` its static activation scale, a scalar (for NVFP4 the global scale).
    All scales are float32 here; `dtype` and `activation` matter to the other layout only.
    """
    format, scale = weight.format, weight.scale
    if format.scale.is_wide:
        # Matrices that were cut from one may share their scale, and safetensors refuses tensors that share memory.
        scale = scale.to(torch.float32, copy=True)
        if format.per_tensor or (format.block[1] and scale.numel() == 1 and format.element is not INT4):
            scale = scale.reshape(())  # ModelOpt squeezes the scale of a matrix that is one block
        elif format.element is not INT4:
            scale = scale[:, None, :, None] if format.block[1] else scale.reshape(-1)
    tensors = {"weight": _pack_rows(weight) if format.element is INT4 else weight.codes, "weight_scale": scale}
    if weight.global_scale is not None:
        tensors["weight_scale_2"] = _float32_if_exact(weight.global_scale)
    if input_scale is not None:
        tensors["input_scale"] = _float32_if_exact(input_scale)
    return tensors


def _pack_rows(weight: BlockScaledTensor) -> torch.Tensor:
    """Returns INT4 codes, two rows to a byte."""
    # ours      [out, in / 2]    byte (r, c) = code (r, 2c)  | code (r, 2c + 1) << 4
    # theirs    [out / 2, in]    byte (r, c) = code (2r, c)  | code (2r + 1, c) << 4
    codes = unpack(weight.codes, 4, weight.shape[-1])
    return codes[0::2] | codes[1::2] << 4


def _unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Undoes `_pack_rows`: two columns to a byte."""
    return pack(torch.stack([packed & 0x0F, packed >> 4], dim=1).flatten(0, 1), 4)


def _float32_if_exact(scale: torch.Tensor) -> torch.Tensor:
    single = scale.reshape(()).to(torch.float32, copy=True)
    return single if bool(single == scale.reshape(())) else scale.reshape(())


def holds(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether a layer's tensors are named as only this layout does. With eight bits both layouts may agree."""
    return "weight_scale_2" in tensors or ("weight" in tensors and tensors["weight"].dtype is torch.uint8)


def decompress(tensors: Mapping[str, torch.Tensor], format: Format) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """Returns the weight and static activation scale of a layer; KeyError if a tensor of the format is missing."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    codes = _unpack_rows(codes) if format.element is INT4 else codes
    shape = (codes.shape[0], codes.shape[1] * 8 // format.element.bits)
    scale = (scale.float() if format.scale.is_wide else scale).reshape(format.scale_shape(shape))
    global_scale = tensors["weight_scale_2"].reshape(()) if format.global_scale else None
    input_scale = tensors["input_scale"].reshape(()) if "input_scale" in tensors else None
    return BlockScaledTensor(codes, scale, format, shape, global_scale), input_scale


def stored_kv_scale(name: str, scale: torch.Tensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """Returns the name and form on disk of a scale of the KV cache: `….k_scale` becomes `….k_proj.k_scale`, float32.

    Raises:
        ValueError: one scale a head, which the layout cannot hold.
    """
    if scale.numel() != 1:
        raise ValueError(
            f"{name}: {scale.numel()} scales of the KV cache, one a head, and ModelOpt's layout has one a tensor; "
            "quantize the model again with one"
        )
    # The scale stands at the projection whose output it scales: ….self_attn.k_proj.k_scale.
    match = _KV_SCALE.fullmatch(name)
    return f"{match[1]}.{match[2]}_proj.{match[2]}_scale" if match else name, scale.float().reshape(())


def kv_name_of_module(name: str) -> str:
    """Returns the name in the model of a scale of the KV cache; any other name stays."""
    match = _KV_SCALE_STORED.fullmatch(name)
    return f"{match[1]}.{match[2]}_scale" if match else name
