"""Weights are decoded here into wgmma's left operand, or to a matrix in memory: prepacked NVFP4, and stored codes.

Prepacked words (`kernels/base/weight_layout.py`): a thread holds four words of a tile, 32 codes, and the scales of
their two rows. Eleven integer instructions and four packed products turn a word into eight BF16 values, element times
block scale, exactly, times 2^-7. `decode` leaves each value with the thread that multiplies it.

    dequantize_prepacked  words, scales ─▶ BF16 [out, in]             2.6 bytes a weight (FP16 and FP32 too)
    prepacked_to_e4m3     words, scales ─▶ E4M3 [out, in], row scale  1.6 bytes, after one pass over the scales

A row's E4M3 scale comes from its largest block scale: no element exceeds 6 times that scale, so no value is clipped
and the values themselves need not be read first.

Codes in the checkpoint's order have 8 bits, or two of 4 lie in a byte. The instruction needs columns 2q, 2q + 1, 2q + 8
and 2q + 9 of two rows in a thread. TMA brings a tile of W as `[2, rows / 2, 64]`, even rows and then odd ones, and a
thread reads two neighbouring codes at a time:

    row    = 16·warp + 2·g + b           thread = (warp, g, q): g, q = 0..7, 0..3
    column = 16·s + 8·a + 2·q + h        one read holds both h

The instruction calls row (b, g) of a warp 8·b + g, as with prepacked NVFP4: two neighbours of a row of y are in one
thread. The rows of a read are neighbours in shared memory, and the swizzle puts them into different banks. Nothing is
exchanged between threads, and the weight stays as it is, because the kernels for few tokens read it in this order too.

    E4M3, E5M2   exponent and mantissa move to their places in a bfloat16, which is then 2^120 or 2^112 too small; one
                 product corrects that exactly, for subnormals too. A comparison, whose result is all ones or none,
                 gives infinities and NaN their bits.
    INT8         128 plus the low seven bits, less 128 or, where the code is negative, 256
    INT4         136 plus the code, less 136

INT8 takes 4 instructions a pair, E4M3 6 and E5M2 7, half of them for a unit that accepts one per warp every other
clock.

A scale of a tensor or a channel multiplies the finished sum. A power of two multiplies decoded values, exactly. The
float32 scale of a 128 × 128 block or an INT4 group is split into two bfloat16s; their products are added smaller first,
within 2^-8 of a unit in the last place of one rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.format import E2M1, E4M3, FORMATS
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.launch import cached_launch

# One word and the scales of its two rows to four words of two products: codes 0 and 1 are of the first row.
_PRODUCTS = gl.constexpr("""{
.reg .b32 t,u,v,p,q,c,d,e,f;
mov.b32 p,{$5,$5}; mov.b32 q,{$6,$6};
and.b32 c,$4,0x81C081C0;
shl.b32 t,$4,3; and.b32 d,t,0x81C081C0;
shl.b32 t,$4,6; and.b32 e,t,0x81C081C0;
shl.b32 t,$4,1; shr.b32 u,$4,3; shr.b32 v,$4,7;
and.b32 t,t,0x80008000; lop3.b32 t,u,0x01800180,t,0xEA; lop3.b32 f,v,0x00400040,t,0xEA;
mul.rn.bf16x2 $0,c,p; mul.rn.bf16x2 $1,d,p; mul.rn.bf16x2 $2,e,q; mul.rn.bf16x2 $3,f,q;
}""")
# Four scale bytes to four bfloat16, in the order of the bytes 0, 2, 1, 3.
_SCALES = gl.constexpr("""{
.reg .b32 t,u;
shl.b32 t,$4,4; lop3.b32 u,t,0x0FF00FF0,0x70007000,0xEA; mov.b32 {$0,$1},u;
shr.b32 t,$4,4; lop3.b32 u,t,0x0FF00FF0,0x70007000,0xEA; mov.b32 {$2,$3},u;
}""")
_HALVES = gl.constexpr("mov.b32 {$0,$1},$2;")
# The four words of a thread, $8 to $11, and the scale bytes of its two rows, $12 and $16, to eight words of E4M3, two
# for each: row 0 and row 1. A code becomes FP16 times 2^-14. A stored scale has the bits of FP16's exponent and
# mantissa, for 2^7 times the scale. Both products are exact.
_E4M3_WORD = """
shl.b32 t,${word},3; shl.b32 u,${word},6; shl.b32 v,${word},9;
and.b32 c,t,0x0E000E00; lop3.b32 c,${word},0x80008000,c,0xEA;
and.b32 d,u,0x0E000E00; lop3.b32 d,t,0x80008000,d,0xEA;
and.b32 e,v,0x0E000E00; lop3.b32 e,u,0x80008000,e,0xEA;
shl.b32 t,${word},1; shr.b32 u,${word},4; and.b32 u,u,0x02000200;
lop3.b32 f,${word},0x0C000C00,u,0xEA; lop3.b32 f,t,0x80008000,f,0xEA;
mul.rn.f16x2 c,c,p{s}; mul.rn.f16x2 d,d,p{s}; mul.rn.f16x2 e,e,q{s}; mul.rn.f16x2 f,f,q{s};
mul.rn.f16x2 c,c,k; mul.rn.f16x2 d,d,k; mul.rn.f16x2 e,e,k; mul.rn.f16x2 f,f,k;
cvt.rn.satfinite.e4m3x2.f16x2 x,c; cvt.rn.satfinite.e4m3x2.f16x2 y,d; mov.b32 ${low},{{x,y}};
cvt.rn.satfinite.e4m3x2.f16x2 x,e; cvt.rn.satfinite.e4m3x2.f16x2 y,f; mov.b32 ${high},{{x,y}};
"""
_E4M3_SCALES = """
shl.b32 t,${scales},7; and.b32 t,t,0x7F807F80; shr.b32 u,${scales},1; and.b32 u,u,0x7F807F80;
prmt.b32 {r}0,t,t,0x1010; prmt.b32 {r}1,t,t,0x3232; prmt.b32 {r}2,u,u,0x1010; prmt.b32 {r}3,u,u,0x3232;
"""
_TO_E4M3 = gl.constexpr(
    "{ .reg .b32 t,u,v,k,c,d,e,f,p<4>,q<4>; .reg .b16 x,y; mov.b32 k,0x4C004C00;"  # 2^4 twice
    + "".join(_E4M3_SCALES.format(scales=scales, r=r) for scales, r in ((12, "p"), (16, "q")))
    + "".join(_E4M3_WORD.format(word=8 + s, s=s, low=2 * s, high=2 * s + 1) for s in range(4))
    + "}"
)
DECODED = gl.constexpr(2.0**7)  # correction factor: decoded values must be multiplied by 2⁷
DECODED_E4M3 = gl.constexpr(2.0**3)  # the same for `decode_to_e4m3`: 6 · 448 · 2⁻³ is the largest value, of E4M3's 448


@gluon.jit
def _halves(pair):
    low, high = gl.inline_asm_elementwise(
        _HALVES, "=h,=h,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.join(low, high)


@gluon.jit
def decode(words, scales, warps: gl.constexpr):
    """Decodes int32 [32 · warps, 4] and [32 · warps, 2], a row a thread, to BF16 [16 · warps, 64], in place."""
    # Rows of the result are in the order of the instruction: row `(warp, b, g)` holds row 16 · warp + 2 · g + b of W.
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _SCALES, "=h,=h,=h,=h,r", [scales], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=1,
    )  # fmt: skip
    # The scales of both rows, a byte for each 16 columns s.
    scale = gl.join(gl.join(s0, s2), gl.join(s1, s3)).reshape([32 * warps, 2, 4]).permute([0, 2, 1])  # thread s b
    low, high = gl.split(scale)
    low = gl.convert_layout(low, words.type.layout, assert_trivial=True)
    high = gl.convert_layout(high, words.type.layout, assert_trivial=True)
    # Declared impure so that it stays before the wait for the product that it overlaps with.
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        _PRODUCTS, "=r,=r,=r,=r,r,h,h", [words, low, high], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    value = gl.join(gl.join(_halves(c0), _halves(c1)), gl.join(_halves(c2), _halves(c3)))  # thread s h a b
    # To rows (warp, b, g) and columns (s, a, q, h), the left operand of wgmma and mma.sync alike.
    value = value.reshape([warps, 8, 4, 4, 2, 2, 2])  # warp g q s h a b
    return value.permute([0, 6, 1, 3, 5, 2, 4]).reshape([16 * warps, 64])


@gluon.jit
def decode_to_e4m3(words, scales, warps: gl.constexpr):
    """Decodes as `decode`, to E4M3 with one rounding; columns are in the order of `sm90_e4m3_rows.py`."""
    # Values are W times 2^-3, without the global scale. Below 2^-6, a 1/57,000 of the largest possible value, E4M3 has
    # no relative precision.
    low, high = gl.split(scales)
    flat: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    low, _ = gl.broadcast(gl.convert_layout(low, flat, assert_trivial=True).expand_dims(1), words)
    high, _ = gl.broadcast(gl.convert_layout(high, flat, assert_trivial=True).expand_dims(1), words)
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        _TO_E4M3,
        # Outputs are written before the last inputs are read: "&" keeps their registers apart.
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, high],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv),
        is_pure=False,
        pack=4,
    )  # fmt: skip
    # A word's two rows b; words 2 t + u of a product t of 32 columns.
    first = gl.join(gl.join(r0, r1), gl.join(r2, r3))  # thread i b u
    value = gl.join(first, gl.join(gl.join(r4, r5), gl.join(r6, r7)))  # thread i b u t
    value = value.reshape([warps, 8, 4, 4, 2, 2, 2])  # warp g q i b u t
    return value.permute([0, 4, 1, 6, 5, 2, 3]).reshape([16 * warps, 64])


@gluon.jit
def _tiles(words, scales, K, tiles: gl.constexpr):
    """Decodes `tiles` neighbours along K to BF16 [64 · tiles, 64], one below the other, in the row order of W."""
    words_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    scales_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    first = (gl.program_id(1) * (K // 64) + gl.program_id(0) * tiles).to(gl.int64)
    # Tile of the program, then thread: 512 words and 64 scales a tile, as in `sm90_gemm_pipeline.load_words`.
    thread = gl.arange(0, 128 * tiles, gl.SliceLayout(1, words_layout))
    word = gl.load(words + first * 512 + (thread[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, words_layout))[None]))
    thread = gl.arange(0, 128 * tiles, gl.SliceLayout(1, scales_layout))
    pair = gl.arange(0, 2, gl.SliceLayout(0, scales_layout))
    scale = gl.load(scales + first * 64 + (thread[:, None] // 4 * 2 + pair[None]))
    value = decode(word, scale, 4 * tiles)
    return value.reshape([4 * tiles, 2, 8, 64]).permute([0, 2, 1, 3]).reshape([64 * tiles, 64])


@gluon.jit
def sm90_nvfp4_dequantize(words, scales, global_scale, out, K, tiles: gl.constexpr):
    """Decodes 64 rows by 64 · tiles columns of W to the dtype of `out`."""
    # Through shared memory to rows of 64 columns, so that a thread stores 16 bytes.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = _tiles(words, scales, K, tiles).to(gl.float32) * (gl.load(global_scale).to(gl.float32) * DECODED)
    value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    row = gl.arange(0, 64 * tiles, gl.SliceLayout(1, layout))
    column = (gl.program_id(0) * tiles + row // 64)[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None]
    n = gl.program_id(1) * 64 + row % 64
    gl.store(out + (n.to(gl.int64)[:, None] * K + column), value)


@gluon.jit
def sm90_nvfp4_to_e4m3(words, scales, unit, out, K, tiles: gl.constexpr):
    """Decodes 64 rows by 64 · tiles columns of W to E4M3; `unit` is the scale of each row without the global scale."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    value = _tiles(words, scales, K, tiles)
    inner: gl.constexpr = value.type.layout
    row = gl.arange(0, 64 * tiles, gl.SliceLayout(1, inner))
    factor = DECODED / gl.load(unit + gl.program_id(1) * 64 + row % 64)
    value = gl.convert_layout((value.to(gl.float32) * factor[:, None]).to(gl.float8e4nv), layout)
    row = gl.arange(0, 64 * tiles, gl.SliceLayout(1, layout))
    column = (gl.program_id(0) * tiles + row // 64)[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None]
    n = gl.program_id(1) * 64 + row % 64
    gl.store(out + (n.to(gl.int64)[:, None] * K + column), value)


@triton.jit
def nvfp4_row_scales_kernel(scales, global_scale, unit, scale, K, largest: tl.constexpr, tiles: tl.constexpr):
    """Computes for each row of W `unit`, 6 / 448 of its largest block scale, and `scale`, that times the global."""
    # A word holds the four scale bytes of a row in a tile, and bytes compare as the scales that they stand for.
    n = tl.arange(0, 64)
    step = tl.arange(0, tiles)
    top = tl.zeros((64,), tl.int32)
    for first in range(0, K // 64, tiles):
        tile = tl.program_id(0) * (K // 64) + first + step
        inside = (first + step < K // 64)[None, :]
        word = tl.load(scales + tile.to(tl.int64)[None, :] * 64 + n[:, None], mask=inside, other=0)
        for byte in tl.static_range(4):
            top = tl.maximum(top, tl.max((word >> (8 * byte)) & 0xFF, axis=1))
    # s · 2^119 as a bfloat16 has these eight bits below 0b0111; a row of zeros gets the unit 1.
    bits = ((top << 4) | 0x7000) << 16
    value = tl.where(top > 0, bits.to(tl.float32, bitcast=True) * 1.504632769052528e-36 * largest, 1.0)
    tl.store(unit + tl.program_id(0) * 64 + n, value)
    tl.store(scale + tl.program_id(0) * 64 + n, value * tl.load(global_scale).to(tl.float32))


def dequantize_prepacked(weight: BlockScaledTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns `[out, in]` of a prepacked weight in `dtype`, each value rounded once."""
    N, K = weight.shape
    out = torch.empty(N, K, dtype=dtype, device=weight.codes.device)
    tiles = _tiles_of(K)
    launch = cached_launch(sm90_nvfp4_dequantize, (K // 64 // tiles, N // 64), tiles=tiles, num_warps=4)
    launch(weight.codes, weight.scale, weight.global_scale, out, K)
    return out


def prepacked_to_e4m3(weight: BlockScaledTensor) -> tuple[Tensor, Tensor]:
    """Returns a prepacked weight as E4M3 with one scale a row: `[out, in]` and float32 `[out]`."""
    # The second rounding moves a value by up to one part in 16: E4M3 has three bits of mantissa, where the product of
    # an E2M1 element and an E4M3 scale has five.
    N, K = weight.shape
    out = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=weight.codes.device)
    unit, scale = row_scales(weight)
    tiles = _tiles_of(K)
    sm90_nvfp4_to_e4m3[K // 64 // tiles, N // 64](
        weight.codes, weight.scale, unit, out, K, tiles=tiles, num_warps=4, enable_fp_fusion=True
    )
    return out, scale


def row_scales(weight: BlockScaledTensor) -> tuple[Tensor, Tensor]:
    """Returns E4M3 scales of the rows of a prepacked weight without and with the global scale, `[out]` each."""
    N, K = weight.shape
    unit, scale = torch.empty(2, N, dtype=torch.float32, device=weight.codes.device).unbind(0)
    nvfp4_row_scales_kernel[(N // 64,)](
        weight.scale, weight.global_scale, unit, scale, K, E2M1.max / E4M3.max, 64, num_warps=4, enable_fp_fusion=True
    )
    return unit, scale


def _tiles_of(K: int) -> int:
    """Returns the number of tiles along K of one program: up to four, as many as divide them."""
    return next(tiles for tiles in (4, 2, 1) if K // 64 % tiles == 0)


# Two codes, the low 16 bits of $1, to two bfloat16, v. The byte above a code repeats its sign. t is all ones where a
# code is larger than the largest number.
_FP8 = """{
.reg .b32 v,t,c;
prmt.b32 v,$1,0,0x9180; shl.b32 v,v,%s; and.b32 v,v,%s;
abs.bf16x2 t,v; mov.b32 c,%s; set.gt.u32.bf16x2 t,t,c; mov.b32 c,%s; %s
"""
_DECODED = {
    # All ones are a NaN, which a sum keeps, and no ones are the zero.
    "e4m3": _FP8 % ("4", "0x87F087F0", "0x07E007E0", "0x7B807B80", "fma.rn.bf16x2 v,v,c,t;"),
    # The exponent gets the three ones that it lacks: an infinity, or a NaN.
    "e5m2": _FP8
    % ("5", "0x8FE08FE0", "0x0F600F60", "0x77807780", "and.b32 t,t,0x70007000; or.b32 v,v,t; mul.rn.bf16x2 v,v,c;"),
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
    """Returns where a format's scales go: into the "sum", or into decoded values as "one" bfloat16 or "two"."""
    # All functions here take the name of a format, or another name for codes that are decoded elsewhere.
    if form not in FORMATS or not FORMATS[form].block[1]:
        return "sum"
    return "one" if FORMATS[form].scale.bits == 8 else "two"


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
    """Returns where the block scales of 16 · warps rows from `n` on begin; rows beyond the end take the last row's."""
    # Nothing, here and below, where scales go into the sum.
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
    """Returns 64 columns of 16 · warps rows from row `first` of a tile `[2, rows / 2, 32 pairs]`, as left operand."""
    # `scale` is the result of `load_scales`; it is unused where scales go into the sum.
    groups: gl.constexpr = _groups(form)
    text: gl.constexpr = assembly(form)
    pairs: gl.constexpr = pairs_layout(warps, groups)
    codes = tile.slice(first // 2, 8 * warps, dim=1).load(tile_layout(warps)).to(gl.int32)
    codes = gl.convert_layout(codes.reshape([2, 8 * warps, groups, 32 // groups]), pairs, assert_trivial=True)
    # Said to have effects so that it keeps its place: before the wait for the product that it overlaps with.
    if scaling(form) == "sum":
        value = gl.inline_asm_elementwise(text, "=r,r", [codes], dtype=gl.int32, is_pure=False, pack=1)
    elif scaling(form) == "one":
        # Two codes of E8M0, in 32 bits: Triton 3.9 shifts 16 bits by 16 otherwise, and LLVM drops such a value.
        scale = scale.to(gl.int32)
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
    """Returns the descriptor of the tile that is fetched at once."""
    # The tile has 64 columns of the rows, even rows before odd ones, by pairs of codes.
    # Experts follow one another as one tall matrix.
    pairs = code_pairs(weight).flatten(0, -2)
    (N, pitch), nbytes = pairs.shape, pairs.itemsize
    # A row of the tile is 32 pairs of one or two bytes, and the swizzle is as wide.
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32 * nbytes, element_bitwidth=8 * nbytes, rank=3)
    return TensorDescriptor(pairs, [2, N // 2, pitch], [pitch, 2 * pitch, 1], [2, rows // 2, 32], layout)


def code_pairs(weight: BlockScaledTensor) -> Tensor:
    """Returns the codes `[…, out, in / 2]` by pairs of neighbours in a row: a byte of two of 4 bits, or int16."""
    return weight.codes if weight.format.element.bits == 4 else weight.codes.view(torch.int16)
