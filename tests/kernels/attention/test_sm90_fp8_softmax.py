"""A small interpreter of its instructions runs the softmax in PTX for one warp."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from quant.kernels.attention.sm90_fp8_softmax import softmax

LANES = 32
Array = np.ndarray


def f32(x: Array) -> Array:
    return x.view(np.float32)


def u32(x: Array) -> Array:
    return np.asarray(x, np.float32).view(np.uint32)


def codes(low: Array, high: Array) -> Array:
    """cvt.rn.satfinite.e4m3x2.f32."""
    with np.errstate(invalid="ignore"):
        low, high = (np.where(np.isnan(x), x, np.clip(x, -448, 448)) for x in (low, high))
    pair = [x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32) for x in (low, high)]
    return pair[0] | pair[1] << 8


def fused(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)


FLOATS: dict[str, Callable[..., Array]] = {
    "fma.rn.f32": fused,
    "fma.rn.sat.f32": lambda *x: np.clip(fused(*x), 0, 1),
    "mul.rn.f32": np.multiply,
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "max.f32": np.fmax,
    "ex2.approx.ftz.f32": np.exp2,
}
WORDS: dict[str, Callable[..., Array]] = {
    "add.u32": np.add,
    "add.s32": np.add,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": np.left_shift,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: codes(f32(low), f32(high)),
    "mov.b32": lambda *x: x[0] if len(x) == 1 else x[0] | x[1] << 16,
    "mov.f32": lambda x: x,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.b32": lambda a, b: a != b,
    "setp.ne.and.b32": lambda a, b, also: (a != b) & also,
    "selp.f32": lambda a, b, which: np.where(which, a, b),
    "vote.sync.any.pred": lambda x, _: np.full(LANES, x.any()),
    "shfl.sync.bfly.b32": lambda x, step, *_: x[np.arange(LANES) ^ int(step[0])],
}


def run(program: str, given: list[Array]) -> dict[int, Array]:
    """What the program leaves in its outputs; `given`: operands from number 64 on, float32 `[32]` each."""
    state: dict[str, Array] = {f"${64 + i}": u32(x) for i, x in enumerate(given)}

    def value(name: str) -> Array:
        if name in state:
            return state[name]
        bits = int(name[2:], 16) if name.startswith("0f") else int(name, 0) & 0xFFFFFFFF
        return np.full(LANES, bits, np.uint32)

    body = re.sub(r"\.reg[^;]*;", "", program.strip("{ }"))
    lines = [line.strip() for line in re.sub(r"([A-Z]+:)", r";\1;", body).split(";") if line.strip()]
    at, steps = 0, 0
    while at < len(lines):
        line, at, steps = lines[at], at + 1, steps + 1
        assert steps < 4 * len(lines), "it does not end"
        jump = re.fullmatch(r"(?:@!(\w+) )?bra (\w+)", line)
        if jump:
            if jump[1] is None or not state[jump[1]].any():
                at = lines.index(f"{jump[2]}:")
        elif not line.endswith(":"):
            name, _, rest = line.partition(" ")
            out, *operands = (x.strip(" {}") for x in rest.split(","))
            values = [value(x) for x in operands]
            with np.errstate(over="ignore", invalid="ignore"):
                if name in FLOATS:
                    state[out] = u32(FLOATS[name](*map(f32, values)))
                else:
                    state[out] = WORDS[name](*values)
    return {int(name[1:]): x for name, x in state.items() if re.fullmatch(r"\$\d+", name) and int(name[1:]) < 64}


def tile(first: bool, scores: Array, reference: Array, factor: float, bias: float) -> tuple[Array, Array, Array, Array]:
    """Of a warp's scores `[16, 128]` and reference `[16]`: values of the codes; sums, reference and decay of rows."""
    lane = np.arange(LANES)
    rows = [lane // 4, lane // 4 + 8]
    column = [8 * (i // 4) + 2 * (lane % 4) + i % 2 for i in range(64)]
    row = [rows[i >> 1 & 1] for i in range(64)]
    given = [scores[row[i], column[i]] for i in range(64)] + [reference[row[i]] for i in range(64)]
    given += [np.full(LANES, x, np.float32) for x in (factor, bias) for _ in range(64)]
    out = run(softmax(first), given)
    p = np.zeros((16, 128), np.float32)
    numbers = np.zeros((3, 16), np.float32)
    for j in (0, 1):
        for i in range(0, 64, 8):
            for byte, number in enumerate((i + 2 * j, i + 2 * j + 1, i + 2 * j + 4, i + 2 * j + 5)):
                code = (out[i + 2 * j] >> (8 * byte) & 255).astype(np.uint8)
                p[rows[j], column[number]] = code.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.add.at(numbers[0], rows[j], f32(out[1 + 2 * j]))
        for k in (1, 2):
            of_quad = f32(out[1 + 8 * k + 2 * j]).reshape(8, 4)
            assert (of_quad == of_quad[:, :1]).all()
            numbers[k, rows[j][::4]] = of_quad[:, 0]
    return p, numbers[0], numbers[1], numbers[2]


def check(first: bool, scores: Array, before: Array, factor: float, bias: float, moved: Array) -> None:
    p, total, reference, decay = tile(first, scores, before, factor, bias)
    x = scores.astype(np.float64) * factor + bias
    assert ((reference != before) == moved).all()
    np.testing.assert_allclose(reference[moved], x.max(1)[moved] + 3, rtol=1e-6, atol=1e-5)
    exact = np.exp2(x - reference[:, None] + 8)
    assert exact.max() < 448 and p.max() < 448
    # One rounding to three bits, of a power that is right to its last bits.
    assert (abs(p - exact) <= exact * (2.0**-4 + 1e-5) + 2.0**-10).all()
    rounded = exact.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (p != rounded).mean() < 1e-2
    np.testing.assert_allclose(total, exact.sum(1), rtol=1e-5)
    if not first:
        np.testing.assert_allclose(decay, np.exp2(before.astype(np.float64) - reference), rtol=2e-5, atol=1e-38)


def test_a_tile_within_the_reference() -> None:
    scores = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    check(False, scores, scores.max(1) * 1.5 + 0.25 + 1, 1.5, 0.25, np.zeros(16, bool))


def test_rows_that_outgrow_it_are_shifted_and_others_stay() -> None:
    scores = np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)
    before = scores.max(1) * 0.5 - 1 + 2
    moved = np.arange(16) % 3 == 0
    before[moved] -= np.linspace(3, 100, moved.sum(), dtype=np.float32)
    check(False, scores, before, 0.5, -1.0, moved)


def test_the_first_tile_finds_its_reference() -> None:
    scores = np.random.default_rng(2).standard_normal((16, 128)).astype(np.float32) * 20
    check(True, scores, np.full(16, -1e30, np.float32), 0.7, 2.0, np.ones(16, bool))


@pytest.mark.parametrize("first", [False, True])
def test_what_a_mask_hides(first: bool) -> None:
    scores = np.random.default_rng(3).standard_normal((16, 128)).astype(np.float32)
    scores[:, 100:] = -np.inf
    scores[5] = -np.inf
    before = np.full(16, -1e30, np.float32)
    p, total, reference, decay = tile(first, scores, before, 2.0, 0.0)
    hidden = np.arange(16) == 5
    assert (p[hidden] == 0).all() and (total[hidden] == 0).all() and (reference[hidden] == before[hidden]).all()
    assert (p[:, 100:] == 0).all() and np.isfinite(decay).all()
    assert (p.max(1)[~hidden] == 32).all()
    np.testing.assert_allclose(total, np.exp2(2.0 * scores - (reference[:, None] - 8)).sum(1), rtol=1e-5)


def test_each_score_may_be_the_one_that_outgrows() -> None:
    for column in range(128):
        scores = np.zeros((16, 128), np.float32)
        scores[column % 16, column] = 8.8
        p, _, reference, _ = tile(False, scores, np.full(16, 8.0, np.float32), 1.0, 0.0)
        assert reference[column % 16] == np.float32(8.8) + 3
        assert (np.delete(reference, column % 16) == 8).all()
        assert p[column % 16, column] == 32


@pytest.mark.parametrize("first", [False, True])
def test_no_number_does_not_hang(first: bool) -> None:
    scores = np.zeros((16, 128), np.float32)
    scores[3, 77] = np.nan
    p, total, _, _ = tile(first, scores, np.zeros(16, np.float32), 1.0, 0.0)
    assert np.isnan(p[3, 77]) and np.isnan(total[3])
    assert np.isfinite(np.delete(p, 3, 0)).all()
