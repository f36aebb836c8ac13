"""Codes in the checkpoint's order, of 8 bits or two of 4 in a byte, are decoded here into wgmma's left operand.

The instruction needs columns 2q, 2q + 1, 2q + 8 and 2q + 9 of two rows in a thread. TMA brings a tile of W as `[2, rows
/ 2, 64]`, even rows and then odd ones, and a thread reads two neighbouring codes at a time:

    row    = 16·warp + 2·g + b           thread = (warp, g, q): g, q = 0..7, 0..3
    column = 16·s + 8·a + 2·q + h        one read holds both h

The instruction calls row (b, g) of a warp 8·b + g, as with prepacked NVFP4: two neighbours of a row of y are in one
thread. The rows of a read are neighbours in shared memory, and the swizzle puts them into different banks. Nothing is
exchanged between threads, and the weight stays as it is, because the kernels for few tokens read it in this order too.

    E4M3, E5M2   exponent and mantissa move to their places in a bfloat16, which is then 2^120 or 2^112 too small; one
                 product corrects that exactly, for subnormals too. Weights with NaN or infinity never come here.
    INT8         128 plus the low seven bits, less 128 or, where the code is negative, 256
    INT4         136 plus the code, less 136

These are 4 instructions a pair, half of them for a unit that accepts one per warp every other clock.

A scale of a tensor or a channel multiplies the finished sum. A power of two multiplies decoded values, exactly. The
float32 scale of a 128 × 128 block or an INT4 group is split into two bfloat16s; their products are added smaller first,
within 2^-8 of a unit in the last place of one rounding.
"""

from __future__ import annotations

import weakref

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.sm90_decode_nvfp4 import _halves

# Two codes, the low 16 bits of $1, to two bfloat16, v. The byte above a code repeats its sign.
_FP8 = """{
.reg .b32 v,t;
prmt.b32 v,$1,0,0x9180; shl.b32 v,v,%s; and.b32 v,v,%s;
mov.b32 t,%s; mul.rn.bf16x2 v,v,t;
"""
_DECODED = {
    "e4m3": _FP8 % ("4", "0x87F087F0", "0x7B807B80"),
    "e5m2": _FP8 % ("5", "0x8FE08FE0", "0x77807780"),
    "int8": """{
.reg .b32 v,t;
prmt.b32 t,$1,0x43434343,0x4140; and.b32 v,t,0xFF7FFF7F; and.b32 t,t,0xFF80FF80; sub.rn.bf16x2 v,v,t;
""",
    "int4": """{
.reg .b32 v,t;
shl.b32 t,$1,12; and.b32 t,t,0x000F0000; and.b32 v,$1,0x0000000F; or.b32 v,v,t; xor.b32 v,v,0x43084308;
mov.b32 t,0x43084308; sub.rn.bf16x2 v,v,t;
""",
}
# By the kind of scale, how v becomes $0; $2 and $3 are one bfloat16 twice.
_SCALED = {
    "sum": "mov.b32 $0,v;\n}",
    "one": "mul.rn.bf16x2 $0,v,$2;\n}",
    "two": "mul.rn.bf16x2 t,v,$3; fma.rn.bf16x2 $0,v,$2,t;\n}",
}


@gluon.constexpr_function
def scaling(form):
    """Returns where a format's scales go: into the "sum", or into decoded values as "one" bfloat16 or "two".

    All functions here take the name of a format, or another name for codes that are decoded elsewhere.
    """
    if form not in FORMATS:
        return "sum"
    format = FORMATS[form]
    if not format.block[1]:
        return "sum"
    return "one" if format.scale.bits == 8 else "two"


@gluon.constexpr_function
def whole_scale(form):
    """Returns whether all of a matrix has one scale."""
    return form in FORMATS and FORMATS[form].per_tensor


@gluon.constexpr_function
def scales_by_row(form):
    """Returns whether each row of the sum has a scale of its own."""
    return form in FORMATS and FORMATS[form].per_row


@gluon.constexpr_function
def tile_bytes(form):
    """Returns the bytes of a tile of 64 rows by 64 columns."""
    return 64 * 8 * FORMATS[form].element.bits


@gluon.constexpr_function
def assembly(form):
    """Returns PTX of a pair of codes of a format."""
    return _DECODED[FORMATS[form].element.name] + _SCALED[scaling(form)]


@gluon.constexpr_function
def _groups(form):
    """Returns the number of scales that a row has in 64 columns."""
    return max(64 // (FORMATS[form].block[1] or 64), 1)


@gluon.constexpr_function
def _block(form):
    return FORMATS[form].block


@gluon.constexpr_function
def pairs_layout(warps, groups):
    """Returns a thread's pairs of codes in `[2, 8 · warps, groups, 32 / groups]`."""
    # Bits of a pair's index: 1 and 2 are q, 4 is a, 8 and 16 are s; `groups` splits off the highest ones.
    inner = 32 // groups
    q, a_s = ([[0, 0, pair // inner, pair % inner] for pair in pairs] for pairs in ((1, 2), (4, 8, 16)))
    rows = [[0, 1 << i, 0, 0] for i in range(warps.bit_length() + 2)]
    return gl.DistributedLinearLayout(
        [[1, 0, 0, 0], *a_s], [*q, *rows[:3]], rows[3:], [], [2, 8 * warps, groups, inner]
    )


@gluon.constexpr_function
def tile_layout(warps):
    """Returns the layout of `pairs_layout` without groups: pairs in `[2, 8 · warps, 32]`."""
    whole = pairs_layout(warps, 1)
    bases = [
        [[b, row, pair] for b, row, _, pair in part] for part in (whole.reg_bases, whole.lane_bases, whole.warp_bases)
    ]
    return gl.DistributedLinearLayout(*bases, [], [2, 8 * warps, 32])


@gluon.jit
def scale_rows(scale, stride, n, N, form: gl.constexpr, warps: gl.constexpr):
    """Returns where the block scales of 16 · warps rows from `n` on begin; rows beyond the end take the last row's.

    Nothing, here and below, where scales go into the sum.
    """
    if scaling(form) == "sum":
        return 0
    else:
        layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, pairs_layout(warps, _groups(form))))
        rows: gl.constexpr = _block(form)[0]
        b = gl.arange(0, 2, gl.SliceLayout(1, layout))
        i = gl.arange(0, 8 * warps, gl.SliceLayout(0, layout))
        # Row 2·i + b of W, in the order of the tile: even rows, then odd ones.
        row = gl.minimum(n + 2 * i[None, :] + b[:, None], N - 1) // rows
        return scale + row.to(gl.int64) * stride


@gluon.jit
def scales_of_matrix(N, stride, form: gl.constexpr):
    """Returns the number of stored scales of a matrix of N rows, which an expert's follow in a stack."""
    rows: gl.constexpr = _block(form)[0]
    return stride * ((N + rows - 1) // rows if rows else 1)


@gluon.jit
def load_scales(rows, stride, step, form: gl.constexpr):
    """Loads the stored scales of 64 columns, from `scale_rows`, a step early; beyond the end, the last ones."""
    if scaling(form) == "sum":
        return 0
    else:
        columns: gl.constexpr = _block(form)[1]
        return gl.load(rows + gl.minimum(step if columns <= 64 else step * 64 // columns, stride - 1))


@gluon.jit
def _twice(half):
    return half | (half << 16)


@gluon.jit
def _power_twice(code):
    """Returns E8M0 as a bfloat16, twice. Code 0 is a subnormal, 255 NaN."""
    half = gl.maximum(code << 7, 0x40)
    return _twice(gl.where(code == 255, 0x7FC0, half))


@gluon.jit
def _bits_twice(value):
    return _twice(value.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)


@gluon.jit
def codes_operand(tile, scale, first: gl.constexpr, form: gl.constexpr, warps: gl.constexpr, layout: gl.constexpr):
    """Returns 64 columns of 16 · warps rows from row `first` of a tile `[2, rows / 2, 32 pairs]`, as left operand.

    `scale` is the result of `load_scales`; it is unused where scales go into the sum.
    """
    groups: gl.constexpr = _groups(form)
    text: gl.constexpr = assembly(form)
    pairs: gl.constexpr = pairs_layout(warps, groups)
    codes = tile.slice(first // 2, 8 * warps, dim=1).load(tile_layout(warps)).to(gl.int32)
    codes = gl.convert_layout(codes.reshape([2, 8 * warps, groups, 32 // groups]), pairs, assert_trivial=True)
    # Said to have effects so that it keeps its place: before the wait for the product that it overlaps with.
    if scaling(form) == "sum":
        value = gl.inline_asm_elementwise(text, "=r,r", [codes], dtype=gl.int32, is_pure=False, pack=1)
    elif scaling(form) == "one":
        # Two codes of E8M0.
        scale = gl.join(_power_twice(scale & 0xFF), _power_twice((scale >> 8) & 0xFF))
        scale = gl.convert_layout(scale, gl.SliceLayout(3, pairs), assert_trivial=True).expand_dims(3)
        scale, codes = gl.broadcast(scale, codes)
        value = gl.inline_asm_elementwise(text, "=r,r,r", [codes, scale], dtype=gl.int32, is_pure=False, pack=1)
    else:
        # scale = high + low up to 2^-17 of it; code · low is added first, then code · high in an FMA.
        high = scale.to(gl.bfloat16)
        low = _bits_twice((scale - high.to(gl.float32)).to(gl.bfloat16)).expand_dims(2).expand_dims(3)
        high, _ = gl.broadcast(_bits_twice(high).expand_dims(2).expand_dims(3), codes)
        low, codes = gl.broadcast(low, codes)
        value = gl.inline_asm_elementwise(text, "=r,r,r,r", [codes, high, low], dtype=gl.int32, is_pure=False, pack=1)
    # From [b, warp, g] to the instruction's rows (warp, b, g).
    value = value.reshape([2, warps, 8, 32]).permute([1, 0, 2, 3]).reshape([16 * warps, 32])
    return gl.convert_layout(_halves(value).reshape([16 * warps, 64]), layout, assert_trivial=True)


def codes_descriptor(weight: BlockScaledTensor, rows: int) -> TensorDescriptor:
    """Returns the descriptor of the tile that is fetched at once.

    The tile has 64 columns of the rows, even rows before odd ones, by pairs of codes.
    """
    # Experts follow one another as one tall matrix.
    pairs = code_pairs(weight).flatten(0, -2)
    (N, pitch), nbytes = pairs.shape, pairs.itemsize
    # A row of the tile is 32 pairs of one or two bytes, and the swizzle is as wide.
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32 * nbytes, element_bitwidth=8 * nbytes, rank=3)
    return TensorDescriptor(pairs, [2, N // 2, pitch], [pitch, 2 * pitch, 1], [2, rows // 2, 32], layout)


def code_pairs(weight: BlockScaledTensor) -> torch.Tensor:
    """Returns the codes `[…, out, in / 2]` by pairs of neighbours in a row: a byte of two of 4 bits, or int16."""
    return weight.codes if weight.format.element.bits == 4 else weight.codes.view(torch.int16)


def stored_scales(weight: BlockScaledTensor) -> torch.Tensor:
    """Returns block scales as the kernel reads them: E8M0 scales in pairs, for 64 columns."""
    return weight.scale.view(torch.int16) if weight.format.scale.bits == 8 else weight.scale


def numbers_only(weight: BlockScaledTensor) -> bool:
    """Returns whether no code is an infinity or a NaN, which are not decoded as such.

    Waits for the GPU, once for each weight. While a graph is captured nothing can wait: it is False for a new weight.
    """
    codes, least = weight.codes, _NO_NUMBER.get(weight.format.element.name)
    if least is None:
        return True
    version = 0 if codes.is_inference() else codes._version
    # An expert's part of a stack is a new view at each call, so the result is kept with the stack.
    owner = codes if codes._base is None else codes._base
    entry = _results.get(id(owner))
    if entry is None or entry[0]() is not owner:
        number = id(owner)
        entry = _results[number] = (weakref.ref(owner, lambda _: _results.pop(number, None)), {})
    results, key = entry[1], (codes.data_ptr(), version)
    if key not in results:
        if codes.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        parts = codes.view(torch.uint8).flatten(0, -2).split(_ROWS_AT_ONCE)
        results[key] = all(int((part & 0x7F).amax()) < least for part in parts)
    return results[key]


# The least code without its sign that is an infinity or a NaN.
_NO_NUMBER = {"e4m3": 0x7F, "e5m2": 0x7C}
_ROWS_AT_ONCE = 4096
_results: dict[int, tuple[weakref.ref[torch.Tensor], dict[tuple[int, int], bool]]] = {}
"""By id of the codes: a weak reference to them, and by address and version whether all codes are numbers."""
