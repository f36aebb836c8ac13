"""Weights are laid out for Hopper's kernels when a model is loaded, and restored bit for bit when it is saved.

On Hopper a warpgroup multiplies 64 rows of W by 16 columns at a time, and its threads hold W in registers in a fixed
pattern. NVFP4 codes are stored here in exactly the order in which these threads need them: a thread reads 16 bytes,
its share of a tile of 64 × 64, and no thread exchanges data with another.

    row    = 64·tile + 16·warp + 2·g + b          thread = (warp, g, q): g, q = 0..7, 0..3
    column = 64·step of K + 16·s + 8·a + 2·q + h   word s of a thread, half h, code a + 2·b of that half

A half word holds four codes, so that one shift and one mask turn a code into a bfloat16 that is 2^126 too small:
sign at bit 15, magnitude at bits 8 to 6. The fourth code has the bits that the shifted three leave over:

    bit     15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    code    0s  3s  30  1s  32  31  2s  02  01  00  12  11  10  22  21  20

A block scale, positive and E4M3, is stored as the eight bits by which s · 2^119 differs from other such bfloat16s:
a shift and an OR decode two at once. A zero scale is stored as zero, and its codes must then be zero too.

MXFP4 takes the same form: each power of two is stored twice, for its 32 codes, as an exponent relative to the largest
of the matrix, which becomes the global scale. Its scales may span 2^29 within a matrix.

All MXFP6 numbers are E4M3 numbers. MXFP6 codes become E4M3 codes, a byte each, and the weight is multiplied as MXFP8
is (`as_computed`). This takes a third more memory, and a small part of the time that unpacking six bits takes.

A stack of experts is laid out as one tall matrix, so that each expert's part equals the layout of that expert; each has
a global scale of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from quant.formats.format import E2M1, E4M3, FORMATS, Format, Number
from quant.formats.rounding import pack, unpack
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current, has_triton

TILE = 64
# Bit of the half word that holds bit 0, 1, 2 (magnitude) and 3 (sign) of its codes 0 to 3.
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))
# Codes of a half word come from rows 2g and 2g + 1, columns 2q and 2q + 8: (b, a) runs over them, a fastest. The
# instruction calls these rows g and g + 8; this way round, two outputs of a thread are neighbours in memory.
_SPLIT_CODES = (4, 8, 2, -1, 4, 2, 4, 2)  # warp g b | tile of K, s, a, q, h
_TO_WORDS = (0, 4, 1, 2, 7, 5, 8, 3, 6)  # tile, tile of K, warp, g, q, s, h | b, a
_TO_SCALES = (0, 4, 1, 2, 3, 5)  # tile, tile of K, warp, g, b | s
_SCALE_ORDER = (0, 2, 1, 3)
# Rows that are repacked together: the temporaries of a chunk take some dozens of megabytes.
_ROWS_AT_ONCE = 1024
# MXFP4: the widest range of exponents that fits the five bits of a stored scale, where zero is reserved; and the code
# of the E8M0 scale that would be stored as zero, minus the exponent of the global scale.
_SPAN = 29
_BASE = 105


def prefers_prepacked(codes: Tensor) -> bool:
    """Returns whether the kernels for the GPU of `codes` are fastest with weights in this layout, as on Hopper."""
    return codes.is_cuda and has_triton() and current(codes.device.index or 0).has_wgmma


def is_prepacked(weight: BlockScaledTensor) -> bool:
    """Returns whether the codes are in a layout of this module, not in a checkpoint's."""
    return weight.codes.dtype is torch.int32 or _is_widened(weight) or has_branch_columns(weight)


def has_branch_columns(weight: BlockScaledTensor) -> bool:
    """Returns whether a low-rank branch stands behind the codes (`kernels/linear/branch_columns.py`)."""
    return weight.codes.dtype is torch.float8_e4m3fn and weight.codes.shape[-1] > weight.shape[-1]


def as_computed(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Returns `weight`; where it is MXFP6 with codes widened to E4M3, the same bytes as an MXFP8 weight."""
    return replace(weight, format=FORMATS["mxfp8"]) if _is_widened(weight) else weight


def becomes_e4m3(format: Format) -> bool:
    """Returns whether `prepack` widens codes to E4M3, as of MXFP6; these also serve inputs that are not BF16."""
    return format.element.bits == 6


def _is_widened(weight: BlockScaledTensor) -> bool:
    return becomes_e4m3(weight.format) and weight.codes.dtype is torch.float8_e4m3fn


def prepack_refusal(weight: BlockScaledTensor) -> str:
    """Returns the reason why `prepack` would refuse `weight`, empty if it would not."""
    format = weight.format
    if not (format.element is E2M1 or becomes_e4m3(format)):
        return f"{format} has no kernel layout"
    rows, columns = weight.shape[-2:]
    if becomes_e4m3(format):
        return f"experts in {format} have no kernel layout" if len(weight.shape) > 2 else ""
    if not 2 <= len(weight.shape) <= 3 or rows % TILE or columns % TILE:
        return f"the shape {list(weight.shape)} is not a multiple of [{TILE}, {TILE}]"
    stored = weight.scale.view(torch.uint8)
    if format.has_power_of_two_scales:
        least, most = stored.int().amin((-2, -1)), stored.int().amax((-2, -1))
        refused = ((most == 255) | (most - least > _SPAN) | (most < _SPAN + 1)).flatten().nonzero().flatten()
        if len(refused):
            bounds = [int(bound.flatten()[refused[0]]) - 127 for bound in (least, most)]
            of = f" of expert {int(refused[0])}" if len(weight.shape) > 2 else ""
            return f"block scales{of} from 2^{bounds[0]} to 2^{bounds[1]} are more than 2^{_SPAN} apart, tiny or NaN"
        return ""
    table = _scale_table().to(weight.codes.device)
    if bool((table[stored.int()] < 0).any()):
        return "a block scale is negative or NaN"
    empty = stored == 0
    if bool(empty.any()) and bool(weight.codes.view(*stored.shape, -1)[empty].any()):
        return "a block whose scale is zero has codes that are not"
    return ""


def prepack(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Returns `weight` in the layout of the Hopper kernel: the same bytes in another order, as int32; MXFP6 as E4M3."""
    # NVFP4 and MXFP4 are `[out, in]` or `[experts, out, in]`, multiples of 64; MXFP6 `[out, in]` of any size.
    # ValueError says why another weight has no such layout.
    if reason := prepack_refusal(weight):
        raise ValueError(f"weight {list(weight.shape)} cannot be prepacked: {reason}")
    if becomes_e4m3(weight.format):
        # MXFP6 has its codes in E4M3.
        rows, columns = weight.shape
        wide = torch.empty(rows, columns, dtype=torch.uint8, device=weight.codes.device)
        table = _e4m3_codes(weight.format.element).to(wide.device)
        for part in _row_slices(rows):
            wide[part] = table[unpack(weight.codes[part], 6, columns).int()]
        return replace(weight, codes=wide.view(torch.float8_e4m3fn))
    rows, columns = _tall(weight)
    flat = weight.codes.reshape(rows, -1)
    words = torch.empty(rows, columns // 8, dtype=torch.int32, device=weight.codes.device)
    for part in _row_slices(rows):
        # One axis for each bit group of a row and a column, as the docstring numbers them, then moved to words.
        codes = unpack(flat[part], 4, columns).view(-1, *_fill(_SPLIT_CODES, columns))
        four = codes.permute(_TO_WORDS).reshape(-1, 4).int()
        # Bit by bit, after the table above: 16 passes, once for each loaded weight.
        half = torch.zeros(four.shape[0], dtype=torch.int32, device=four.device)
        for code, places in zip(four.unbind(1), _PLACES, strict=True):
            for bit, target in enumerate(places):
                half |= (code >> bit & 1) << target
        words[part] = half.to(torch.int16).view(torch.int32).view(-1, columns // 8)
    global_scale = weight.global_scale
    if weight.format.has_power_of_two_scales:
        # The largest exponent becomes the code 30 of 31; a scale 2^29 below it becomes 1, and 0 stays free.
        exponents = weight.scale.view(torch.uint8).int()
        base = exponents.amax((-2, -1), keepdim=True) - _SPAN - 1
        stored = ((exponents - base) << 3).to(torch.uint8).repeat_interleave(2, -1)
        exponent = base[..., 0, 0] - _BASE
        global_scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    else:
        stored = _scale_table().to(words.device)[weight.scale.view(torch.uint8).int()].to(torch.uint8)
    stored = stored.view(-1, 4, 8, 2, columns // TILE, 4).permute(_TO_SCALES)[..., list(_SCALE_ORDER)]
    lead = weight.shape[:-1]
    scale = stored.contiguous().view(torch.int32).view(*lead, columns // TILE)
    return replace(weight, codes=words.view(*lead, columns // 8), scale=scale, global_scale=global_scale)


def restore(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Undoes `prepack`, bit for bit."""
    if has_branch_columns(weight):
        return replace(weight, codes=weight.codes[..., : weight.shape[-1]].contiguous())
    if _is_widened(weight):
        table = _e4m3_codes(weight.format.element)
        back = torch.zeros(256, dtype=torch.uint8, device="cpu")
        back[table.int()] = torch.arange(len(table), dtype=torch.uint8, device="cpu")
        back, wide = back.to(weight.codes.device), weight.codes.view(torch.uint8)
        parts = [pack(back[wide[part].int()], 6) for part in _row_slices(weight.shape[0])]
        return replace(weight, codes=torch.cat(parts))
    rows, columns = _tall(weight)
    lead, words = weight.shape[:-1], weight.codes.reshape(rows, -1)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.codes.device)
    for part in _row_slices(rows):
        half = words[part].contiguous().view(torch.int16).int().view(-1)
        four = torch.zeros(half.shape[0], 4, dtype=torch.uint8, device=half.device)
        for code, places in enumerate(_PLACES):
            for bit, target in enumerate(places):
                four[:, code] |= ((half >> target & 1) << bit).to(torch.uint8)
        shape = (four.shape[0] * 4 // (TILE * columns), *_fill(_SPLIT_CODES, columns))
        permuted = four.view([shape[i] for i in _TO_WORDS])
        codes = permuted.permute(_inverse(_TO_WORDS)).reshape(-1, columns)
        packed[part] = pack(codes.contiguous(), 4)
    stored = weight.scale.contiguous().view(torch.uint8).view(-1, columns // TILE, 4, 8, 2, 4)[..., list(_SCALE_ORDER)]
    stored = stored.permute(_inverse(_TO_SCALES)).reshape(rows, columns // 16)
    if weight.format.has_power_of_two_scales:
        assert weight.global_scale is not None
        base = (torch.frexp(weight.global_scale).exponent - 1 + _BASE)[..., None, None]
        scale = ((stored[:, ::2].int().view(*lead, columns // 32) >> 3) + base).to(torch.uint8)
        return replace(weight, codes=packed.view(*lead, columns // 2), scale=scale, global_scale=None)
    table = _scale_table()
    # The table maps E4M3 codes to stored bytes, one to one, so its inverse restores them bit for bit.
    inverse = torch.zeros(256, dtype=torch.uint8, device="cpu")
    has_code = table >= 0
    inverse[table[has_code]] = has_code.nonzero().flatten().to(torch.uint8)
    scale = inverse.to(stored.device)[stored.int()].view(torch.float8_e4m3fn)
    return replace(weight, codes=packed.view(*lead, columns // 2), scale=scale.view(*lead, columns // 16))


@cache
def _scale_table() -> Tensor:
    """Returns the stored byte of each E4M3 code, int32 `[256]`; -1 for negative codes and NaN, which have none."""
    # s · 2^119 as a bfloat16: bits 11 to 4 hold all that differs, exponent and three bits of mantissa.
    values = E4M3.values()
    bits = (values.double() * 2.0**119).to(torch.bfloat16).view(torch.int16).int()
    table = torch.where(values > 0, bits >> 4 & 0xFF, -1)
    table[0] = 0
    return table


@cache
def _e4m3_codes(element: Number) -> Tensor:
    """Returns the E4M3 code of each number of `element`, by its code: uint8."""
    values = element.values()
    codes = values.to(torch.float8_e4m3fn)
    assert torch.equal(codes.to(values.dtype), values)
    return codes.view(torch.uint8)


def _tall(weight: BlockScaledTensor) -> tuple[int, int]:
    """Returns how many rows all matrices of a stack have, and how many columns."""
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _fill(split: tuple[int, ...], columns: int) -> tuple[int, ...]:
    return tuple(columns // TILE if size < 0 else size for size in split)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _row_slices(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, rows))
