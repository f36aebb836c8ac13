"""The codes of released checkpoints become numbers here: value = scale · (code − zero), in float32, then rounded once.

Integer codes lie in words of 32 bits, the first code in the lowest bits:

    GPTQ                 qweight [in·b/32, out], qzeros [groups, out·b/32], scales [groups, out], and g_idx [in],
                         the group of each input
    AWQ                  qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]; the nibbles of a word are
                         columns 0, 2, 4, 6, 1, 3, 5, 7
    compressed-tensors   weight_packed [out, in·b/32], weight_scale [out, groups], weight_zero_point [out·b/32, groups]

GPTQ's first version stores zeros less one, subtracted from whole words, and its writer (GPTQModel) adds them again in
the same way. Sources: the files `qlinear/torch.py` and `utils/model.py` of GPTQModel, `gemm.py` of AutoAWQ, and
`pack_quantized` of compressed-tensors.

Floating-point codes and their scales are a `BlockScaledTensor`, whose format is read off dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

import torch

from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.layouts import layout_of_tensors
from quant.formats.format import FORMATS, Format
from quant.formats.number import E2M1, E4M3, E5M2, E8M0, FP32, INT4, INT8

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
