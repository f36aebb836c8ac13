"""This PTX computes a tile's softmax for Hopper's FP8 attention, powers first and the largest score only if needed.

A wgmma leaves a thread two rows of a tile of scores, r and r + 8, and two neighbours of each 8 columns: its numbers are
(r, c) (r, c + 1) (r + 8, c) (r + 8, c + 1), and so on for the next 8 columns.

Searching for the largest score first would take a sixth of the loop and idle the 2^x units. So the program uses the
reference of the previous tile,

    P = e4m3(2^(s · factor + bias − reference + 8)),

and afterwards checks whether any code is 448, the largest: only then can a power have exceeded E4M3. A warp with such
a code finds the largest scores of its rows, sets the reference of each affected row so that its largest power becomes
2^5, and starts again. From 2^5 a row has 3.75 octaves to grow, so a second restart is rare; and codes reach down to
2^-9, so less is lost below than rounding takes above. The first tile of a row has no reference yet, and finds it first.
"""

import struct
from collections.abc import Iterator

NUMBERS = 64  # scores of a thread, in a tile of 64 queries and 128 keys
START = 8.0  # log2 of the power of a score that equals the reference
ROOM = 3.0  # octaves below `START` at which a row with a new reference begins
OPERANDS = ",".join(["=&r"] * NUMBERS + ["f"] * 4 * NUMBERS)
"""Constraints of the operands of `softmax` for inline assembly."""

_ROWS = [[number for number in range(NUMBERS) if number >> 1 & 1 == row] for row in (0, 1)]


def softmax(first: bool) -> str:
    """Returns the program for a tile; `first` says whether it is the first of its rows."""
    # Operands, `NUMBERS` each: out (int32), scores, reference, factor, bias. In out, number 8 i + 2 j is word i of row
    # j: the codes of two neighbours in each of two groups of 8 columns. Number 1 + 2 j is the sum of row j, 9 + 2 j its
    # new reference, 17 + 2 j the decay of earlier sums.
    lines = [
        f".reg .f32 p<{NUMBERS}>, shift<2>, top<2>, new<2>, decay<2>, sum<2>, more<2>, t;",
        ".reg .b32 any<2>, n; .reg .b16 a, c; .reg .pred untried, over, over<2>; setp.eq.u32 untried, 0, 0;",
    ]
    for j in (0, 1):
        lines.append(f"mov.f32 new{j}, {_operand('reference', 2 * j)}; mov.f32 decay{j}, {_hex(1.0)};")
    # `untried` guards against a second restart: after one, the largest power is 2^5 by construction.
    if first:
        lines += [*_references(first), *_powers(), *_words()]
    else:
        lines += ["AGAIN:", *_powers(), *_words(), "or.b32 n, any0, any1; and.b32 n, n, 0x80808080;"]
        lines.append("setp.ne.and.b32 over, n, 0, untried; vote.sync.any.pred over, over, -1; @!over bra DONE;")
        lines += ["setp.ne.u32 untried, 0, 0;", *_references(first), "bra AGAIN; DONE:"]
    for first_number, name in ((1, "sum"), (9, "new"), (17, "decay")):
        lines += [f"mov.b32 {_operand('out', first_number + 2 * j)}, {name}{j};" for j in (0, 1)]
    return "{ " + "\n".join(lines) + " }"


def _powers() -> Iterator[str]:
    """Yields the powers 2^x of all scores, and their sums."""
    factor, bias = _operand("factor"), _operand("bias")
    for j, numbers in enumerate(_ROWS):
        yield f"add.rn.f32 t, {bias}, {_hex(START)}; sub.rn.f32 shift{j}, t, new{j};"
        for i in numbers:
            yield f"fma.rn.f32 t, {_operand('scores', i)}, {factor}, shift{j}; ex2.approx.ftz.f32 p{i}, t;"
    # Two sums for each row: additions to one sum would wait for each other.
    for j, numbers in enumerate(_ROWS):
        yield f"mov.f32 sum{j}, p{numbers[0]}; mov.f32 more{j}, p{numbers[1]};"
        for i in numbers[2:]:
            part = "more" if i & 1 else "sum"
            yield f"add.rn.f32 {part}{j}, {part}{j}, p{i};"
        yield f"add.rn.f32 sum{j}, sum{j}, more{j};"


def _words() -> Iterator[str]:
    """Yields the codes, and `any`: the highest bit of a byte in it is set for a code of 448 (0x7E) or NaN (0x7F)."""
    for i in range(0, NUMBERS, 8):
        for j in (0, 1):
            at = i + 2 * j
            word = _operand("out", at)
            yield f"cvt.rn.satfinite.e4m3x2.f32 a, p{at + 1}, p{at};"
            yield f"cvt.rn.satfinite.e4m3x2.f32 c, p{at + 5}, p{at + 4};"
            yield f"mov.b32 {word}, {{a, c}}; add.u32 n, {word}, 0x02020202;"
            yield f"or.b32 any{j}, any{j}, n;" if i else f"mov.b32 any{j}, n;"


def _references(first: bool) -> Iterator[str]:
    """Yields the reference of rows that have outgrown theirs or, in the first tile, of all rows that see a key."""
    for j, numbers in enumerate(_ROWS):
        yield f"mov.f32 top{j}, {_operand('scores', numbers[0])};"
        yield from (f"max.f32 top{j}, top{j}, {_operand('scores', i)};" for i in numbers[1:])
        # The four threads of a row are neighbours.
        yield from (f"shfl.sync.bfly.b32 t, top{j}, {lane}, 31, -1; max.f32 top{j}, top{j}, t;" for lane in (1, 2))
        yield f"fma.rn.f32 t, top{j}, {_operand('factor')}, {_operand('bias')}; add.rn.f32 t, t, {_hex(ROOM)};"
        if first:
            yield f"max.f32 new{j}, new{j}, t;"
            continue
        yield from (f"shfl.sync.bfly.b32 n, any{j}, {lane}, 31, -1; or.b32 any{j}, any{j}, n;" for lane in (1, 2))
        yield f"and.b32 any{j}, any{j}, 0x80808080; setp.ne.b32 over{j}, any{j}, 0;"
        yield f"selp.f32 new{j}, t, new{j}, over{j};"
        yield f"sub.rn.f32 t, {_operand('reference', 2 * j)}, new{j}; ex2.approx.ftz.f32 decay{j}, t;"


def _operand(name: str, number: int = 0) -> str:
    return f"${('out', 'scores', 'reference', 'factor', 'bias').index(name) * NUMBERS + number}"


def _hex(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()
