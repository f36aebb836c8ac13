"""A `Quantization` is how a released checkpoint is quantized, as its config says.

    quant_method         codes and scales of a tensor X
    fp8, fbgemm_fp8      X, X_scale_inv or X_scale
    mxfp4                X_blocks, X_scales (stacked experts of gpt-oss)
    gptq                 qweight, qzeros, scales, g_idx
    awq                  qweight, qzeros, scales
    compressed-tensors   X or X_packed, X_scale, X_global_scale, …
    modelopt             X, X_scale, X_scale_2

Codes are never cast to numbers: where scales stand in a file and no config says how to apply them, and where FP8
weights have no scales, the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Any

import torch

from quant.base.errors import UserError
from quant.base.json_files import typed
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.layouts import layout_of_tensors
from quant.formats.format import E2M1, E4M3, E5M2, E8M0, FORMATS, FP32, INT4, INT8, Format
from quant.models.configs import read_fields
from quant.recipes.plan import PLAN_FILE

# The codes of released checkpoints become numbers here: value = scale · (code − zero), in float32, then rounded once.
#
# Integer codes lie in words of 32 bits, the first code in the lowest bits:
#
#     GPTQ                 qweight [in·b/32, out], qzeros [groups, out·b/32], scales [groups, out], and g_idx [in],
#                          the group of each input
#     AWQ                  qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]; the nibbles of a word are
#                          columns 0, 2, 4, 6, 1, 3, 5, 7
#     compressed-tensors   weight_packed [out, in·b/32], weight_scale [out, groups], weight_zero_point [out·b/32,
#     groups]
#
# GPTQ's first version stores zeros less one, subtracted from whole words, and its writer (GPTQModel) adds them again in
# the same way. Sources: the files `qlinear/torch.py` and `utils/model.py` of GPTQModel, `gemm.py` of AutoAWQ, and
# `pack_quantized` of compressed-tensors.
#
# Floating-point codes and their scales are a `BlockScaledTensor`, whose format is read off dtypes and shapes.


Parts = Mapping[str, torch.Tensor]
Block = tuple[int, int]

_ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.int8: INT8}
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_CHUNK_ELEMENTS = 1 << 20


def scaled(parts: Parts, blocks: Iterable[Block], dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix of floating-point or INT8 codes with scales, under compressed-tensors' or ModelOpt's names.

    Args:
        parts: `weight` or `weight_packed`, `weight_scale`, and perhaps `weight_global_scale`, `weight_scale_2` or
            `weight_zero_point`.
        blocks: (rows, columns) that the config says share a scale; 0 is the whole axis.
        dtype: the dtype of the result.

    Raises:
        ValueError: the scales fit none of the blocks.
    """
    codes, scale = parts["weight_packed" if "weight_packed" in parts else "weight"], parts["weight_scale"]
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.float()
    parts = {**parts, "weight_scale": scale}
    if "weight_zero_point" in parts:
        rows, columns = codes.shape
        grid = _grid(scale.shape, (rows, columns))
        zero = parts["weight_zero_point"].reshape(grid).expand(rows, -1)
        groups = torch.arange(columns, device="cpu") // ceil(columns / grid[1])
        return _affine(codes, zero, scale.reshape(grid).expand(rows, -1), groups, dtype)
    format = _format_of(codes, scale, "weight_scale_2" in parts or "weight_global_scale" in parts, blocks)
    return layout_of_tensors(parts).decompress(parts, format)[0].dequantize(dtype)


def _format_of(codes: torch.Tensor, scale: torch.Tensor, second: bool, blocks: Iterable[Block]) -> Format:
    """Returns the format of a matrix, judging by its codes and scales."""
    if codes.dtype == torch.uint8 and scale.dim() == 2 and scale.shape[0] == 2 * codes.shape[0]:  # ModelOpt's INT4
        return Format("source", INT4, FP32, (1, codes.shape[1] // scale.shape[1]))
    # Scales of one byte are E4M3 (NVFP4) or exponents (MX, in E8M0 or uint8).
    number = E4M3 if scale.dtype == torch.float8_e4m3fn else E8M0
    if scale.dtype.itemsize > 1:
        number = FP32
    if codes.dtype != torch.uint8:
        shape = (codes.shape[0], codes.shape[1])
        grid = _grid(scale.shape, shape)
        if number is E8M0:
            blocks = [(1, 32), *blocks]
        return Format("source", _ELEMENTS[codes.dtype], number, _block(shape, grid, blocks))
    if not second and 3 * 8 * scale.shape[-1] == codes.shape[-1]:  # 32 codes of 6 bits
        return FORMATS["mxfp6"]
    return Format("source", E2M1, number, (1, 2 * codes.shape[-1] // scale.shape[-1]), global_scale=second)


def _grid(scale: Sequence[int], shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the rows and columns of scales: `[]`, `[1]`, `[out]`, `[out, 1]`, or blocks in 2 or 4 dimensions."""
    sizes = list(scale)
    if len(sizes) == 4:
        return sizes[0], sizes[2]
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    if sizes == [shape[0]]:
        return shape[0], 1
    return (1, 1) if sizes in ([], [1]) else (0, 0)


def _block(shape: tuple[int, int], grid: tuple[int, int], declared: Iterable[Block]) -> Block:
    """Returns the block for which a matrix of `shape` has `grid` scales; a last block may be short."""
    blocks = ((0, 0), (1, 0), *declared)
    for rows, columns in blocks:
        if grid == (ceil(shape[0] / (rows or shape[0])), ceil(shape[1] / (columns or shape[1]))):
            return rows, columns
    raise ValueError(f"{list(grid)} scales for {list(shape)} weights fit none of the blocks {list(blocks)}")


def mxfp4_experts(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix `[in, out]` of a gpt-oss expert from `blocks [out, in/32, 16]` and `scales [out, in/32]`."""
    matrix = {"weight": parts["blocks"].flatten(-2), "weight_scale": parts["scales"]}
    return modelopt.decompress(matrix, FORMATS["mxfp4"])[0].dequantize(dtype).t().contiguous()


def gptq(parts: Parts, dtype: torch.dtype, zeros_less_one: bool) -> torch.Tensor:
    """Returns a matrix `[out, in]` in GPTQ's layout; `zeros_less_one` is the layout's first version."""
    bits = 32 * parts["qzeros"].shape[1] // parts["scales"].shape[1]
    words = parts["qzeros"]
    if zeros_less_one:
        words = words + sum(1 << shift for shift in range(0, 31, bits))
    # qweight packs along inputs, qzeros along outputs.
    zero = unpack_words(words, bits).flatten(-2)
    codes = unpack_words(parts["qweight"], bits).transpose(0, 1).flatten(1)
    groups = parts.get("g_idx")
    if groups is None:
        groups = torch.arange(codes.shape[1], device="cpu") // ceil(codes.shape[1] / len(zero))
    return _affine(codes, zero.t(), parts["scales"].t(), groups.long(), dtype)


def awq(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix `[out, in]` in AWQ's layout for "gemm"."""
    order = torch.tensor(_AWQ_COLUMNS, device="cpu").argsort()
    codes, zero = (unpack_words(parts[name], 4)[..., order].flatten(-2).t() for name in ("qweight", "qzeros"))
    groups = torch.arange(codes.shape[1], device="cpu") // ceil(codes.shape[1] / zero.shape[1])
    return _affine(codes, zero, parts["scales"].t(), groups, dtype)


def pack_quantized(parts: Parts, shape: Sequence[int], dtype: torch.dtype, group_size: int) -> torch.Tensor:
    """Returns a matrix of `shape` `[out, in]` in compressed-tensors' layout of integers."""
    (rows, columns), packed, scale = shape, parts["weight_packed"], parts["weight_scale"]
    bits = word_bits(packed.shape[1], columns)
    codes = unpack_words(packed, bits).flatten(-2)[:, :columns]
    if "weight_zero_point" in parts:
        zero = unpack_words(parts["weight_zero_point"], bits).transpose(1, 2).flatten(0, 1)[:rows]
    else:
        # Symmetric codes are stored with an offset of half their range.
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8, device="cpu")
    groups = parts.get("weight_g_idx")
    if groups is None:
        groups = torch.arange(columns, device="cpu") // (group_size if scale.shape[1] > 1 else columns)
    return _affine(codes, zero.expand(rows, -1), scale.expand(rows, -1), groups.long(), dtype)


def word_bits(words: int, codes: int) -> int:
    """Returns the bits of a code where `codes` of them fill `words` words of 32 bits."""
    return 32 * words // codes


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes in int32 words `[…]`, lowest bits first: uint8 `[…, 32 / bits]`."""
    # Byte by byte, which needs no int32 shifts: 2, 4 and 8 bits divide a byte, and words are little-endian.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    codes: torch.Tensor = (octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)


def _affine(
    codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns `scale · (code − zero)`.

    Codes are `[out, in]`, zeros and scales `[out, groups]`, and `group` names the group of each input.
    """
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device="cpu")
    # Chunks of rows bound the temporaries in float32 to 4 MB each.
    step = max(_CHUNK_ELEMENTS // columns, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        centred = codes[part].float().sub_(zero[part].float()[:, groups])
        out[part] = centred.mul_(scale[part].float()[:, groups])
    return out


_FP8 = ("F8_E4M3", "F8_E5M2")
CODES = (*_FP8, "U8", "I8", "I32")
"""Dtypes of codes, as safetensors call them."""
_SCALES = ("_scale_inv", "_scale", "_scales", "_blocks", "_scale_2", "_global_scale", "_zero_point", "_packed")
_INTEGER_PARTS = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_2", "SCB")
_LAYOUTS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
# Where a config says which of its method's layouts it is.
_LAYOUT_KEYS = {
    "gptq": ("checkpoint_format", "format"),
    "awq": ("version", "format"),
    "compressed-tensors": ("format",),
}
_FIELDS: dict[str, Any] = {
    "bits": int | None, "config_groups": dict[str, dict[str, Any]] | None, "group_size": int | None,
    "sparsity_config": dict[str, Any] | None, "weight_block_size": list[int] | None,
}  # fmt: skip
WAY_OUT = "quantize the original model"


class QuantMethod(StrEnum):
    """The `quant_method`s whose codes can be decoded."""

    FP8 = "fp8"
    FBGEMM_FP8 = "fbgemm_fp8"
    MXFP4 = "mxfp4"
    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as its config says.

    Attributes:
        path: the directory of the model.
        method: `quant_method`.
        config: the `quantization_config`.
    """

    path: Path
    method: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        """Returns the format, for plans and the terminal."""
        config = self.config
        group = config.get("group_size")
        if self.method in (QuantMethod.GPTQ, QuantMethod.AWQ):
            groups = f"groups of {group}" if group and group > 0 else "one group"
            return f"{self.method.upper()} INT{config.get('bits', 4)} in {groups}"
        if self.method in (QuantMethod.FP8, QuantMethod.FBGEMM_FP8):
            block = config.get("weight_block_size")
            return f"FP8 in blocks of {block[0]}x{block[1]}" if block else "FP8"
        if self.method == QuantMethod.COMPRESSED_TENSORS:
            return f"compressed-tensors {config.get('format', '')}".strip()
        return f"ModelOpt {config.get('quant_algo')}" if self.method == QuantMethod.MODELOPT else self.method.upper()

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The `weights` of compressed-tensors' groups."""
        return [group.get("weights") or {} for group in (self.config.get("config_groups") or {}).values()]

    @property
    def blocks(self) -> list[Block]:
        """Blocks of weights that share a scale, as far as the config names some."""
        blocks = [self.config.get("weight_block_size") or (128, 128)]
        for weights in self.groups:
            if weights.get("block_structure"):
                blocks.append(weights["block_structure"])
            elif weights.get("group_size"):
                blocks.append((1, weights["group_size"]))
        return [(int(rows), int(columns)) for rows, columns in blocks]


AFTER_TRAINING = (
    "it holds the weights of a model in training, and no quantized ones: prepare the original model as it was then, "
    "load these weights into it (a Trainer resumes from them; safetensors.torch.load_model reads a file of them), and "
    "pack it with quant.convert_qat"
)
_IN_TRAINING = "blockscale-qat: "
IN_TRAINING = {"quant_method": "fp8", "activation_scheme": _IN_TRAINING + AFTER_TRAINING}
"""The `quantization_config` of a directory that a model in training was saved to.

transformers ignores a `quant_method` that it does not know and loads the weights as a model in 16 bit, although they
may be rotated or scaled. It knows this method, as vLLM does. Both refuse the unknown activation scheme with a message
that shows it, and the scheme's name says what to do.
"""


def is_in_training(fields: Mapping[str, Any]) -> bool:
    """Returns whether a `quantization_config` describes a model in training."""
    return str(fields.get("activation_scheme")).startswith(_IN_TRAINING)


def quantization_of(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns how the checkpoint in a directory is quantized; None where its config says nothing of that.

    Args:
        path: the directory.
        config: the contents of its config.json.

    Raises:
        UserError: it is quantized in a way that nothing here decodes, or by this toolkit.
    """
    # Multimodal models may have the table in the config of a part, such as `text_config`.
    sections = (config, *(part for part in config.values() if isinstance(part, dict)))
    keys = ("quantization_config", "compression_config")
    fields = next((section[key] for section in sections for key in keys if isinstance(section.get(key), dict)), None)
    if fields is None and (path / modelopt.CONFIG_FILE).is_file():
        inside = read_fields(path / modelopt.CONFIG_FILE).get("quantization")
        fields = {"quant_method": QuantMethod.MODELOPT.value, **(inside if isinstance(inside, dict) else {})}
    if fields is None:
        return None
    try:
        _check_types(fields)
    except ValueError as error:
        raise UserError(f"{path}: its quantization_config says {error}; download the model again") from None
    # Exports of ModelOpt may name a `quant_algo` and no `quant_method`.
    method = str(fields.get("quant_method") or QuantMethod.MODELOPT).lower()
    if (path / PLAN_FILE).is_file():
        raise UserError(f"{path}: already quantized by this toolkit, as its {PLAN_FILE} says; {WAY_OUT}")
    quantization = Quantization(path, method, fields)
    if refusal := _why_not(quantization):
        raise UserError(f"{path}: already quantized, {refusal}")
    return quantization


def _check_types(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of an unexpected type."""
    for key, kind in _FIELDS.items():
        typed(kind, config.get(key), key)
    for name, group in (config.get("config_groups") or {}).items():
        weights = typed(dict[str, Any] | None, group.get("weights"), f"{name}.weights") or {}
        for key, kind in (("group_size", int | None), ("block_structure", list[int] | None)):
            typed(kind, weights.get(key), f"{name}.{key}")
        _check_block(weights.get("block_structure"), weights.get("group_size"), name)
    _check_block(config.get("weight_block_size"), None, "weight_block_size")


def _check_block(block: list[int] | None, size: int | None, name: str) -> None:
    if (block is not None and (len(block) != 2 or min(block) < 1)) or (size is not None and size < -1):
        raise ValueError(f"{name}: {block or size} is not the size of a block")


def _why_not(quantization: Quantization) -> str | None:
    """Returns why nothing here decodes a checkpoint, and the way out."""
    config, method = quantization.config, quantization.method
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        return (
            f"by bitsandbytes, whose codes only that package decodes; {WAY_OUT}, or load this one with transformers, "
            "then model.dequantize() and model.save_pretrained(DIR), and pass DIR"
        )
    if is_in_training(config):
        return f"by a recipe that is still in training; {AFTER_TRAINING}"
    if method not in list(QuantMethod):
        return f"by {method}, which cannot be read here; {WAY_OUT}, or one in {', '.join(QuantMethod)}"
    layout = next((str(config[key]).lower() for key in _LAYOUT_KEYS.get(method, ()) if config.get(key)), "")
    if method == QuantMethod.GPTQ and layout not in ("", "gptq", "gptq_v2"):
        return f"by GPTQ in the layout {layout!r}; the layouts gptq and gptq_v2 can be read: {WAY_OUT}"
    if method == QuantMethod.AWQ and (layout not in ("", "gemm") or config.get("bits", 4) != 4):
        return f"by AWQ in {config.get('bits')} bits and the layout {layout!r}; 4 bits in gemm can be read: {WAY_OUT}"
    if method != QuantMethod.COMPRESSED_TENSORS:
        return None
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense" or layout not in ("", *_LAYOUTS):
        return f"in the compressed-tensors layout {layout}, which cannot be read here; {WAY_OUT}"
    if config.get("transform_config"):
        # An original in 16 bit cannot hold the transform of the inputs, and without it the weights are of another
        # model.
        return f"and its weights are rotated or scaled (transform_config), which their inputs must be, too; {WAY_OUT}"
    return None


def refuse_packed(
    file: Path,
    dtypes: Mapping[str, str],
    names: Iterable[str] | None = None,
    clause: str = ", and no quantization_config says how",
) -> None:
    """Refuses tensors that are codes or scales, where no config says how to decode them.

    Args:
        file: the file that holds them.
        dtypes: the dtypes of the tensors to look at, as safetensors call them.
        names: the names of all tensors in the file; by default the keys of `dtypes`.
        clause: the second clause of the message.

    Raises:
        UserError: there is one; the message names it and the file.
    """
    names = dtypes if names is None else names
    advice = f"give the model's directory with its config.json, or {WAY_OUT}"
    for name in dtypes:
        # A name proves little by itself: models have parameters called `…_scale` and `…_blocks` that are not quantized.
        # A suffix counts where the tensor that it belongs to is in the file too.
        suffix = next((s for s in _SCALES if name.endswith(s) and name.removesuffix(s) in names), None)
        blocks = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in names
        if suffix or blocks or name.endswith("_scale_inv") or name.rpartition(".")[2] in _INTEGER_PARTS:
            raise UserError(f"{file}: {name} belongs to a quantized weight{clause}; {advice}")
    for name, dtype in dtypes.items():
        if dtype in _FP8:
            raise UserError(f"{file}: {name} is in FP8 and has no scale{clause}; {advice}")
        if dtype in CODES and name.endswith(".weight"):
            raise UserError(f"{file}: {name} holds integers ({dtype}){clause}; {advice}")
