"""Hopper's attention kernel is warp-specialised and persistent, in FP8 or 16 bit, and written in Gluon.

One producer warp copies tiles into shared memory (TMA); each of two or three consumer warpgroups owns 64 queries:

    producer     Q ─▶ [groups · 64, dim]      K, V ─▶ `stages` pairs of tiles of `block_kv` keys
    consumer i   S = Q_i Kᵀ                   wgmma, FP32 in registers
                 P = 2^(S · scale − m + 8)    m: the reference of the row
                 O = O · decay + P V          wgmma, P from registers; FP8 in two levels

In step j a consumer issues S(j) = Q K(j)ᵀ and P V(j − 1), and computes P(j) from S(j). A stage therefore holds K(j)
and V(j − 1), the tiles that a step needs and frees.

The tensor cores and the 2^x units take about the same time, so speed depends on both being busy at once. Other
arithmetic counts twice, because it shares the register file with the tensor cores. So in FP8 P(j) uses the previous
reference, without a search for the largest score; `quant.kernels.attention.sm90_fp8_softmax` says why that is safe. In
16 bit m is the largest score so far, within 0.75.

P V(j − 1) runs while P(j) is computed. ptxas would move the powers of two behind the wait for the products, since no
dependency ties them; `_fence` ends the basic block between them. With FP8 and heads of 64 (short products of three
consumers) or 256 (no registers) a consumer waits for P V(j − 1), then for S(j), before it computes powers.

The tensor cores add products of FP8 to 13 bits below the largest of them and of the sum so far, and truncate: one sum
over 4,608 keys loses 4.5% of a V whose mean is half its deviation, one over 33k keys a quarter. So the sum begins anew
every `promote` tiles (every tile without overlap), and `total`, in FP32 registers, takes up the last one. Heads of 256
leave no registers for two sums of that width: there half the columns are multiplied and added, then the other half.

Keys pass from last to first, so that the tiles that a mask crosses come first and the long loop has no mask (a window
also masks some at its end). V's scale goes into the exponent of P: the decay is then 1 wherever the reference stays,
and warps whose rows all have a decay of 1 skip the multiplication of O.

P leaves the first wgmma in the accumulator's layout, where a thread holds 2 neighbours of every 8 columns; FP8 operands
need 4 of every 16. So the columns of P are taken in another order, at no cost, and V's keys are stored in that order:
`attention_operands.lay_out_v` stores V as `[dim, keys]`, since FP8 operands of wgmma must be K-major. 16-bit operands
need neither.

Programs are persistent, one on each SM, and draw tiles of queries from a counter: heads in groups whose K and V fit
into the L2 cache, causal tiles of a group from long to short. Where memory allows, the next tile of queries is fetched
while the last keys of this one pass, so a consumer that has finished starts on it at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quant.kernels.attention.attention_operands import SCALE_BLOCK, AttentionOptions
from quant.kernels.attention.sm90_fp8_softmax import OPERANDS, softmax
from quant.kernels.base.sm90_gluon import async_load


# A wgmma leaves thread (warp, g, q) of a warpgroup rows 16·warp + g and 16·warp + g + 8, columns 8·i + 2·q and
# 8·i + 2·q + 1 of its 64 rows (g = 0..7, q = 0..3, i: octets). The linear layouts below name these coordinates, so that
# P and the scales of rows can be taken apart and joined without moving between threads.
@dataclass(frozen=True)
class HopperTiles:
    """The tiles and the pipeline of a launch."""

    groups: int  # warpgroups of 64 queries
    block_kv: int  # keys of a tile
    stages: int  # pairs of tiles of K and V in flight
    registers: int = 240  # the number of registers of a thread of a consumer
    queries: int = 2  # tiles of queries in flight
    overlap: bool = True  # whether the powers of a step are computed while the tensor cores work on its products
    promote: int = 0  # where they overlap: tiles of keys that the tensor cores add up; 0 is all of them
    parts: int = 1  # where they do not: parts of V's columns that are multiplied one after the other

    @property
    def at_launch(self) -> int:
        """Registers of a thread before the producer gives its registers away."""
        return 65536 // (128 * (self.groups + 1)) // 8 * 8


# Registers of a thread bound `groups`: 3 of 160 or 2 of 240, next to a producer of 24. Shared memory bounds `stages`.
TILES = {
    (64, 1): HopperTiles(3, 128, 8, 160, overlap=False),
    (128, 1): HopperTiles(2, 128, 4, promote=2),
    (256, 1): HopperTiles(2, 128, 3, queries=1, overlap=False, parts=2),
    (64, 2): HopperTiles(2, 128, 4),
    (128, 2): HopperTiles(2, 128, 3, queries=1),
    (256, 2): HopperTiles(2, 64, 2, queries=1),
}
"""By head dimension, to the next power of two, and bytes of an element."""


def _constant(function: Callable[[Any], Any]) -> Any:
    """Returns a property that compiled code sees as a constant."""
    return property(lambda self: gl.constexpr(function(self)))


def _words(keys: int, fp8: bool) -> gl.DistributedLinearLayout:
    """Returns the layout of a wgmma's product for P as [64, words, 4, pairs of a word, 2], a word in a register."""
    # A word is four codes of E4M3 or two of 16 bits: one register, innermost.
    size = 2 if fp8 else 1
    word = [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]][:size]
    columns = [[0, 1 << i, 0, 0, 0] for i in range((keys // 8 // size).bit_length() - 1)]
    lanes = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    warps = [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]]
    # Then rows r and r + 8, then the words along the keys.
    registers = [*word, [8, 0, 0, 0, 0], *columns]
    if not fp8:
        registers, lanes, warps = ([[*x[:3], x[4]] for x in part] for part in (registers, lanes, warps))
    shape = [64, keys // 16, 4, 2, 2] if fp8 else [64, keys // 8, 4, 2]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


def _octets(columns: int) -> gl.DistributedLinearLayout:
    """Returns the layout of a wgmma's product as [64, columns / 8, 4, 2]."""
    # A register: pair of columns, row r or r + 8, octet. A lane: one of 4 pairs, one of 8 rows. A warp: 16 rows.
    octets = [[0, 1 << i, 0, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 0, 1], [8, 0, 0, 0], *octets], lanes, warps, [], [64, columns // 8, 4, 2])


@dataclass(frozen=True)
class Kind:
    """The compile-time properties of a launch, a constant of every function below."""

    tiles: HopperTiles
    dim: int
    fp8: bool
    causal: bool
    windowed: bool
    capped: bool
    packed: bool
    with_lse: bool

    groups = _constant(lambda self: self.tiles.groups)
    block_q = _constant(lambda self: 64 * self.tiles.groups)
    block_kv = _constant(lambda self: self.tiles.block_kv)
    stages = _constant(lambda self: self.tiles.stages)
    queries = _constant(lambda self: self.tiles.queries)
    promote = _constant(lambda self: self.tiles.promote)
    parts = _constant(lambda self: self.tiles.parts)
    columns = _constant(lambda self: (1 << (self.dim - 1).bit_length()) // self.tiles.parts)
    scores = _constant(lambda self: self.product(self.tiles.block_kv))
    output = _constant(lambda self: self.product(self.columns.value))
    left = _constant(lambda self: gl.DotOperandLayout(0, self.output.value, 4 if self.fp8 else 2))
    words = _constant(lambda self: _words(self.tiles.block_kv, self.fp8))
    octets = _constant(lambda self: _octets(self.tiles.block_kv))
    output_octets = _constant(lambda self: _octets(self.columns.value))
    quad = _constant(lambda self: gl.SliceLayout(1, gl.SliceLayout(3, self.octets.value)))
    row = _constant(lambda self: gl.SliceLayout(1, self.scores.value))
    column = _constant(lambda self: gl.SliceLayout(0, self.scores.value))
    output_row = _constant(lambda self: gl.SliceLayout(1, self.output.value))
    output_column = _constant(lambda self: gl.SliceLayout(0, self.output.value))

    def product(self, columns: int) -> gl.NVMMADistributedLayout:
        """Returns the layout of the 64 rows that a wgmma's product has in a warpgroup."""
        # An instruction takes 32 bytes of K: 32 columns of FP8, 16 of 16 bits.
        shape = [16, columns, 32 if self.fp8 else 16]
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)


class Buffers(NamedTuple):
    """Shared memory: Q `[queries · groups, 64, width]`, and `stages` tiles of K and of V."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """Who waits for whom."""

    # q_full, q_empty: a buffer of queries was filled by TMA; all consumers are done with it.
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # full, empty: the same for a stage of K and V
    empty: gl.shared_memory_descriptor
    # ticket_full, ticket_empty: the producer wrote the number of the next tile; all consumers read it.
    ticket_full: gl.shared_memory_descriptor
    ticket_empty: gl.shared_memory_descriptor


class Sequences(NamedTuple):
    """How the tiles of queries are numbered."""

    cu_q: gl.tensor  # cu_q, cu_kv: first query and key of each packed sequence, or None
    cu_kv: gl.tensor
    heads: gl.tensor  # the number of heads of Q
    seq_q: gl.tensor  # seq_q, seq_kv: lengths, where sequences are not packed
    seq_kv: gl.tensor
    blocks: gl.tensor  # tiles of queries of the longest sequence
    group: gl.tensor  # heads that are processed together, so that their K and V stay in L2


class Tokens(NamedTuple):
    """Tokens of a head of Q, K and V in memory; heads of Q, and how many of them share a KV head."""

    q: gl.tensor
    kv: gl.tensor
    v: gl.tensor
    heads: gl.tensor
    ratio: gl.tensor


class Scales(NamedTuple):
    """Scales of Q, K and V, and their strides along batch, head and block; a stride of 0 repeats one."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_block: gl.tensor
    k_batch: gl.tensor
    k_head: gl.tensor
    k_block: gl.tensor
    v_batch: gl.tensor
    v_head: gl.tensor
    v_block: gl.tensor


class KeyScales(NamedTuple):
    """Scales of the keys and values of one head of one sequence, and their strides along blocks."""

    k: gl.tensor
    v: gl.tensor
    k_block: gl.tensor
    v_block: gl.tensor


class Consumed(NamedTuple):
    """The arguments of a consumer; `total` is the number of tiles of queries."""

    out: gl.tensor
    lse: gl.tensor
    scales: Scales
    ticket: gl.shared_memory_descriptor
    buffers: Buffers
    barriers: Barriers
    sequences: Sequences
    tokens: Tokens
    window: gl.tensor
    total: gl.tensor
    log2_scale: gl.tensor
    cap: gl.tensor


class Produced(NamedTuple):
    """The arguments of the producer: tensor maps, and `counter`, from which programs draw tiles."""

    q_map: gl.tensor
    k_map: gl.tensor
    v_map: gl.tensor
    buffers: Buffers
    barriers: Barriers
    sequences: Sequences
    tokens: Tokens
    window: gl.tensor
    total: gl.tensor
    counter: gl.tensor
    ticket: gl.shared_memory_descriptor


class Mask(NamedTuple):
    """By row: the key at which it stands, and the last key that it sees; and the window, in keys."""

    diagonal: gl.tensor
    last: gl.tensor
    window: gl.tensor


class State(NamedTuple):
    """A consumer's softmax between two tiles of keys."""

    total: tuple[gl.tensor, ...]  # O so far without `partial`, by parts of its columns, float32 [64, columns] each
    partial: gl.tensor  # the tensor cores' sum of P V, [64, columns], not yet multiplied by `decay`
    since: gl.tensor  # the product of the decays since `total` took up a sum
    words: gl.tensor  # P of the last tile, in the dtype of V
    reference: gl.tensor  # m of each row
    row_sum: gl.tensor  # the sum of each thread's columns, [64, 4]
    decay: gl.tensor  # 2^(old reference − new reference)


SCALE_ROWS = gl.constexpr(SCALE_BLOCK)
_RESIDENT = 24 << 20  # bytes of K and V that stay in the L2 cache


_SOFTMAX = gl.constexpr(softmax(first=False))
_SOFTMAX_OF_FIRST = gl.constexpr(softmax(first=True))
_SOFTMAX_LIKE = gl.constexpr(OPERANDS)

# 32 numbers times their factors (the first and the third stand for all), skipped where all of a warp's are 1.
_DECAY = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $64, 0f3F800000; setp.neu.f32 q, $66, 0f3F800000; or.pred p, p, q;"
    "vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE;"
    + "".join(f"mul.f32 ${i}, ${i}, ${64 + i};" for i in range(32))
    + "DONE: }"
)
_DECAY_LIKE = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))

_WORD_OF_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_WORD_OF_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# A loop that ends at once: ptxas moves nothing past it, and cannot know that the clock never has that value.
_FENCE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; AGAIN: mov.u32 t, %clock; setp.eq.u32 p, t, 0x12345671; @p bra AGAIN;"
    "mov.u32 $0, $1; }"
)
_ZERO = gl.constexpr("mov.u32 $0, %nsmid; shr.u32 $0, $0, 20;")


@gluon.jit
def _fence(x):
    gl.inline_asm_elementwise(_FENCE, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _tile(index, sequences, kind: gl.constexpr):
    """Returns where tile `index` is: block, head, batch, first query and key, lengths, and first scale blocks."""
    group = sequences.group
    seq_q = sequences.seq_q
    seq_kv = sequences.seq_kv
    # `group` heads side by side, then their next block of queries: programs at work at one time share K and V in L2.
    within = index % (group * sequences.blocks)
    block = within // group
    if kind.causal:
        # Blocks with the most keys first, so that short ones fill the end of the launch.
        block = sequences.blocks - 1 - block
    item = index // (group * sequences.blocks) * group + within % group
    head = item % sequences.heads
    batch = item // sequences.heads
    start_q = 0
    start_kv = 0
    scale_q = 0
    scale_kv = 0
    sequence = batch
    if kind.packed:
        start_q = gl.load(sequences.cu_q + sequence)
        start_kv = gl.load(sequences.cu_kv + sequence)
        seq_q = gl.load(sequences.cu_q + sequence + 1) - start_q
        seq_kv = gl.load(sequences.cu_kv + sequence + 1) - start_kv
        scale_q = start_q // SCALE_ROWS + sequence
        scale_kv = start_kv // SCALE_ROWS + sequence
        batch = 0
    return block, head, batch, start_q, start_kv, seq_q, seq_kv, scale_q, scale_kv


@gluon.jit
def _bounds(first, seq_q, seq_kv, window, kind: gl.constexpr):
    """Returns the tiles of keys that queries [first, first + block_q) see: begin, begin and end without a mask, end."""
    diagonal = first + seq_kv - seq_q  # the key at which the first query stands
    begin = 0
    whole_begin = 0
    whole_end = seq_kv
    end = seq_kv
    if kind.causal:
        end = gl.minimum(end, diagonal + kind.block_q)
        whole_end = gl.minimum(whole_end, diagonal + 1)
    if kind.windowed:
        begin = gl.maximum(diagonal - window + 1, 0)
        whole_begin = gl.maximum(diagonal + kind.block_q - window, 0)
        if not kind.causal:
            end = gl.minimum(end, diagonal + kind.block_q + window - 1)
            whole_end = gl.minimum(whole_end, diagonal + window)
    begin = begin // kind.block_kv
    end = gl.maximum((end + kind.block_kv - 1) // kind.block_kv, begin)
    if first >= seq_q:
        end = begin
    whole_begin = gl.minimum((whole_begin + kind.block_kv - 1) // kind.block_kv, end)
    whole_end = gl.maximum(gl.maximum(whole_end, 0) // kind.block_kv, whole_begin)
    return begin, whole_begin, gl.minimum(whole_end, end), end


@gluon.jit
def _produce(arguments, kind: gl.constexpr):
    """The producer warp: copies the tiles of the consumers, each as soon as its buffer is free."""
    q_map = arguments.q_map
    k_map = arguments.k_map
    barriers = arguments.barriers
    full = barriers.full
    tokens = arguments.tokens
    ratio = tokens.ratio
    groups: gl.constexpr = kind.groups
    # Stages and buffers of queries that were filled so far, and tickets taken: a slot and a phase follow from each.
    count = 0
    queries = 0
    tickets = 0
    index = gl.program_id(0)
    while index < arguments.total:
        # Taken before this tile is fetched: the answer takes a microsecond, and arrives during the fetch.
        following = gl.atomic_add(arguments.counter, 1, sem="relaxed") + gl.num_programs(0)
        block, head, batch, start_q, start_kv, seq_q, seq_kv, _, scale_kv = _tile(index, arguments.sequences, kind)
        begin, _, _, end = _bounds(block * kind.block_q, seq_q, seq_kv, arguments.window, kind)
        if end > begin:
            turn = queries % kind.queries
            mbarrier.wait(barriers.q_empty.index(turn), ((queries // kind.queries) & 1) ^ 1)
            # One barrier for the queries of all consumers: they start together.
            mbarrier.expect(barriers.q_full.index(turn), groups * q_map.block_type.nbytes)
            row = (batch * tokens.heads + head) * tokens.q + start_q + block * kind.block_q
            for i in gl.static_range(groups):
                async_load(
                    q_map, [row + 64 * i, 0], barriers.q_full.index(turn), arguments.buffers.q.index(turn * groups + i)
                )
            kv_head = batch * (tokens.heads // ratio) + head // ratio
            tiles = end - begin
            # Stage i holds K of tile i and V of tile i − 1, counted from the last key: the tiles that one step needs.
            for i in range(0, tiles + 1):
                slot = count % kind.stages
                mbarrier.wait(barriers.empty.index(slot), ((count // kind.stages) & 1) ^ 1)
                has_k = i < tiles
                has_v = i > 0
                mbarrier.expect(full.index(slot), 2 * k_map.block_type.nbytes, pred=has_k & has_v)
                mbarrier.expect(full.index(slot), k_map.block_type.nbytes, pred=has_k != has_v)
                # Keys pass from last to first.
                key = start_kv + (end - 1 - i) * kind.block_kv
                async_load(
                    k_map, [kv_head * tokens.kv + key, 0], full.index(slot), arguments.buffers.k.index(slot), pred=has_k
                )
                tile = end - i
                if kind.fp8:
                    # Laid out: [dim, keys], where each sequence begins at a multiple of the scale block.
                    at = [kv_head * kind.dim, scale_kv * SCALE_ROWS + tile * kind.block_kv]
                else:
                    at = [kv_head * tokens.v + start_kv + tile * kind.block_kv, 0]
                async_load(arguments.v_map, at, full.index(slot), arguments.buffers.v.index(slot), pred=has_v)
                count += 1
            queries += 1
        mbarrier.wait(barriers.ticket_empty, (tickets & 1) ^ 1)
        arguments.ticket.store(gl.full([1], following, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(barriers.ticket_full, count=1)
        index = following
        tickets += 1


@gluon.jit
def _seen(scores, factor, cap, key, mask, masked: gl.constexpr, kind: gl.constexpr):
    """Returns scores, capped and masked, and the factor that is left to multiply them by."""
    if kind.capped:
        # cap · tanh(s / cap) with s in units of log2(e); tanh(x) = 1 − 2 / (e^2x + 1).
        scores = cap - (2.0 * cap) / (gl.exp2(scores * (factor * (2.8853900817779268 / cap))) + 1.0)
        factor = 1.0
    if masked:
        visible = key[None, :] <= mask.last[:, None]
        if kind.windowed:
            visible = visible & (key[None, :] > mask.diagonal[:, None] - mask.window)
        scores = gl.where(visible, scores, float("-inf"))
    return scores, factor


@gluon.jit
def _powers(scores, factor, row_max):
    """Returns P of a tile, the maximum subtracted from its rows, and their decay. `factor` is positive."""
    # The reference follows the largest score only where it grows by more than 0.75: most tiles then need no decay.
    top = gl.max(scores, 1) * factor
    new_max = gl.where(top > row_max + 0.75, top, row_max)
    p = gl.exp2(scores * factor + (8.0 - new_max)[:, None])
    return p, new_max, gl.exp2(row_max - new_max)


@gluon.jit
def _spread(x, octets: gl.constexpr, to: gl.constexpr, columns: gl.constexpr):
    """Spreads [64, 4], one number for each row of each thread, to [64, columns]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, octets)))
    # Columns of a thread share its number: a broadcast along octets and pairs, without a shuffle.
    wide, _ = gl.broadcast(x[:, None, :][:, :, :, None], gl.zeros([64, columns // 8, 4, 2], gl.float32, octets))
    return gl.convert_layout(wide.reshape([64, columns]), to)


@gluon.jit
def _fp8_softmax(scores, factor, bias, reference, first: gl.constexpr, kind: gl.constexpr):
    """Returns P of a tile as words, the sums of each thread's part of its rows, their reference, and their decay."""
    # One instruction block for all 64 scores of a thread; its 64 results are codes, sums, references and decays.
    wide = _spread(reference, kind.octets, kind.scores, kind.block_kv)
    code: gl.constexpr = _SOFTMAX_OF_FIRST if first else _SOFTMAX
    out = gl.inline_asm_elementwise(code, _SOFTMAX_LIKE, [scores, wide, factor, bias], gl.int32, False, 64)
    even, odd = gl.split(out.reshape([64, kind.block_kv // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]))
    # Results 8 i + 2 j are words of codes; 1 + 2 j, 9 + 2 j and 17 + 2 j the sum, reference and decay of row j.
    words, _ = gl.split(even)
    numbers, _ = gl.split(odd)
    even, odd = gl.split(numbers.reshape([64, 2, 2, 2, 4]).permute([0, 4, 1, 2, 3]))
    row_sum, decay = gl.split(even)
    row_sum, _ = gl.split(row_sum)
    decay, _ = gl.split(decay)
    reference, _ = gl.split(odd)
    reference, _ = gl.split(reference)
    return words, _number(row_sum, kind), _number(reference, kind), _number(decay, kind)


@gluon.jit
def _number(word, kind: gl.constexpr):
    return gl.convert_layout(word.to(gl.float32, bitcast=True), kind.quad)


@gluon.jit
def _sums(p, kind: gl.constexpr):
    """Returns the sum of each row over the columns that a thread holds, [64, 4]."""
    return gl.sum(gl.sum(p.reshape([64, kind.block_kv // 8, 4, 2]), 3), 1)


@gluon.jit
def _columns_of(decay, kind: gl.constexpr):
    """Spreads the decays of rows to the columns of a sum."""
    if kind.fp8:
        return _spread(decay, kind.output_octets, kind.output, kind.columns)
    else:
        zeros = gl.zeros([64, kind.columns], gl.float32, kind.output)
        wide, _ = gl.broadcast(gl.convert_layout(decay, kind.output_row)[:, None], zeros)
        return wide


@gluon.jit
def _decayed(output, decay, kind: gl.constexpr):
    wide = _columns_of(decay, kind)
    return gl.inline_asm_elementwise(_DECAY, _DECAY_LIKE, [output, wide], gl.float32, True, 32)


@gluon.jit
def _add_parts(total, left, v_buffer, slot, decay, kind: gl.constexpr):
    """Returns total · decay + P V of a tile, a part of the columns after the other."""
    wide = _columns_of(decay, kind)
    partial = gl.zeros([64, kind.columns], gl.float32, kind.output)
    for i in gl.static_range(kind.parts):
        v = v_buffer.index(slot).slice(i * kind.columns, kind.columns, dim=0).permute((1, 0))
        # In the registers of the last part: its sum is taken up before they are written.
        partial = warpgroup_mma_wait(0, deps=[warpgroup_mma(left, v, partial, use_acc=False, is_async=True)])
        total = total[1:] + (total[0] * wide + partial,)  # noqa: RUF005
        if kind.parts > 1:
            _fence(slot)
    return total


@gluon.jit
def _rounded(p, v_buffer, kind: gl.constexpr):
    """Returns P in the 16 bits of V, in place, as words of two columns."""
    a, b = gl.split(p.reshape([64, kind.block_kv // 8, 4, 2]))
    word: gl.constexpr = _WORD_OF_BF16 if v_buffer.dtype == gl.bfloat16 else _WORD_OF_FP16
    return gl.inline_asm_elementwise(word, "=r,f,f", [a, b], gl.int32, True, 1)


@gluon.jit
def _left(words, zero, v_buffer, kind: gl.constexpr):
    # Where steps overlap, the registers of the words are written while the previous product reads its own; without an
    # operation in between, ptxas would merge the two and wait. `zero` is a zero that the compiler cannot know.
    operation: gl.constexpr = "xor.b32 $0, $1, " if kind.tiles.overlap else "mov.b32 $0, $1; //"
    if kind.fp8:
        words = gl.convert_layout(
            gl.join(gl.join(words, words), gl.join(words, words)), kind.words, assert_trivial=True
        )
        p = gl.inline_asm_elementwise(operation + "$5;", "=r,r,r,r,r,r,r,r,r", [words, zero], v_buffer.dtype, False, 4)
    else:
        words = gl.convert_layout(gl.join(words, words), kind.words, assert_trivial=True)
        p = gl.inline_asm_elementwise(operation + "$3;", "=r,r,r,r,r", [words, zero], v_buffer.dtype, False, 2)
    return gl.convert_layout(p.reshape([64, kind.block_kv]), kind.left, assert_trivial=True)


@gluon.jit
def _value(v_buffer, slot, kind: gl.constexpr):
    return v_buffer.index(slot).permute((1, 0)) if kind.fp8 else v_buffer.index(slot)


@gluon.jit
def _scales_of(tile, log2_scale, scales, kind: gl.constexpr):
    """Returns the factor of a tile's scores; log2 of the unit of its values, and one over that unit."""
    factor = log2_scale
    bias = 0.0
    weight = 1.0
    if kind.fp8:
        block = tile * kind.block_kv // SCALE_ROWS
        # V's scale as a power of two in the exponent of P: a product with O's unit is then no work of its own.
        factor = log2_scale * gl.load(scales.k + block * scales.k_block)
        unit = gl.maximum(gl.load(scales.v + block * scales.v_block), 1e-30)
        bias = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [unit], gl.float32, True, 1)
        weight = gl.exp2(-bias)
    return factor, bias, weight


@gluon.jit
def _scores(q_tile, k_buffer, slot, kind: gl.constexpr):
    # `use_acc=False`: the zeros are never read.
    zeros = gl.zeros([64, kind.block_kv], gl.float32, kind.scores)
    return warpgroup_mma(q_tile, k_buffer.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _steps(
    low, high, end, count, state, q_tile, buffers, barriers, scales, log2_scale, cap, mask, zero,
    masked: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Adds tiles low ≤ i < high, counted from the last one; step i computes P V of tile i − 1."""
    # wait full[slot] ─▶ issue S = Q K(i)ᵀ ─▶ issue O += P(i − 1) V(i − 1) ─▶ wait for S ─▶ P(i) ─▶ wait for O
    #                                                                                └─▶ arrive on empty[slot]
    total, partial, since, words, row_max, row_sum, decay = state
    v_buffer = buffers.v
    keys: gl.constexpr = kind.block_kv
    columns = gl.arange(0, keys, kind.column)
    for i in range(low, high):
        at = count + i
        slot = at % kind.stages
        key = (end - 1 - i) * keys + columns
        factor, bias, weight = _scales_of(end - 1 - i, log2_scale, scales, kind)
        mbarrier.wait(barriers.full.index(slot), (at // kind.stages) & 1)
        if not kind.tiles.overlap:
            total = _add_parts(total, _left(words, zero, v_buffer, kind), v_buffer, slot, decay, kind)
            scores = warpgroup_mma_wait(0, deps=[_scores(q_tile, buffers.k, slot, kind)])
            mbarrier.arrive(barriers.empty.index(slot), count=1)
        else:
            pending = _scores(q_tile, buffers.k, slot, kind)
            goes_on = True
            if kind.promote:
                goes_on = at % kind.promote != 0
                if at % kind.promote == 0:
                    total = (total[0] * _columns_of(since, kind) + partial,)
                since = gl.where(goes_on, since * decay, decay)
            partial = _decayed(partial, decay, kind)
            left = _left(words, zero, v_buffer, kind)
            product = warpgroup_mma(left, _value(v_buffer, slot, kind), partial, use_acc=goes_on, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[pending])
        scores, factor = _seen(scores, factor, cap, key, mask, masked, kind)
        if kind.fp8:
            words, sums, row_max, decay = _fp8_softmax(scores, factor, bias, row_max, False, kind)
            row_sum = row_sum * decay + sums * weight
        else:
            p, row_max, decay = _powers(scores, factor, row_max)
            row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None]
            row_sum += _sums(p, kind)
            words = _rounded(p, v_buffer, kind)
        if kind.tiles.overlap:
            # ptxas keeps the powers before this point, and the wait for the products behind it.
            _fence(end)
            partial = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(barriers.empty.index(slot), count=1)
    return State(total, partial, since, words, row_max, row_sum, decay)


@gluon.jit
def _consume(arguments, warpgroup: gl.constexpr, kind: gl.constexpr):
    """One of the consumer warpgroups: computes 64 of the queries of each tile."""
    scales = arguments.scales
    buffers = arguments.buffers
    v_buffer = buffers.v
    barriers = arguments.barriers
    full = barriers.full
    empty = barriers.empty
    tokens = arguments.tokens
    window = arguments.window
    keys: gl.constexpr = kind.block_kv
    columns = gl.arange(0, keys, kind.column)
    zero = gl.inline_asm_elementwise(_ZERO, "=r,r", [arguments.total], gl.int32, False, 1)
    count = 0
    queries = 0
    tickets = 0
    index = gl.program_id(0)
    while index < arguments.total:
        block, head, batch, start_q, _, seq_q, seq_kv, scale_q, scale_kv = _tile(index, arguments.sequences, kind)
        begin, whole_begin, whole_end, end = _bounds(block * kind.block_q, seq_q, seq_kv, window, kind)
        first_row = block * kind.block_q + warpgroup * 64
        first_token = (batch * tokens.heads + head).to(gl.int64) * tokens.q + start_q
        row_max = gl.full([64], -1e30, gl.float32, kind.row)
        row_total = gl.full([64], 0.0, gl.float32, kind.row)
        zeros = gl.zeros([64, kind.columns], gl.float32, kind.output)
        total = (zeros,) * kind.parts
        if end > begin:
            k_scale = scales.k
            v_scale = scales.v
            factor = arguments.log2_scale
            if kind.fp8:
                kv_head = head // tokens.ratio
                q_scale = scales.q + batch.to(gl.int64) * scales.q_batch + head * scales.q_head
                k_scale = scales.k + batch.to(gl.int64) * scales.k_batch + kv_head * scales.k_head
                k_scale += scale_kv * scales.k_block
                v_scale = scales.v + batch.to(gl.int64) * scales.v_batch + kv_head * scales.v_head
                v_scale += scale_kv * scales.v_block
                # A warpgroup may lie beyond the last query; it still needs a scale that exists.
                row_block = gl.minimum(first_row, seq_q - 1) // SCALE_ROWS
                factor = arguments.log2_scale * gl.load(q_scale + (scale_q + row_block) * scales.q_block)
            per_tile = KeyScales(k_scale, v_scale, scales.k_block, scales.v_block)
            diagonal = first_row + seq_kv - seq_q + gl.arange(0, 64, kind.row)
            last = gl.full([64], seq_kv - 1, gl.int32, kind.row)
            if kind.causal:
                last = gl.minimum(last, diagonal)
            elif kind.windowed:
                last = gl.minimum(last, diagonal + window - 1)
            mask = Mask(diagonal, last, window)

            tiles = end - begin
            # Tiles that only later warpgroups see are skipped: all warpgroups share the stages, and give them back.
            first = 0
            if kind.causal:
                first = gl.maximum(gl.minimum(end - 1 - (first_row + 63 + seq_kv - seq_q) // keys, tiles - 1), 0)
                whole_end = gl.minimum(gl.maximum(first_row + seq_kv - seq_q + 1, 0), seq_kv) // keys
                whole_end = gl.maximum(whole_end, whole_begin)
            if first_row >= seq_q:
                first = tiles - 1
            for i in range(0, first):
                mbarrier.wait(full.index((count + i) % kind.stages), ((count + i) // kind.stages) & 1)
                mbarrier.arrive(empty.index((count + i) % kind.stages), count=1)
            # The first step has no P V: only scores, their reference, and P.
            first_factor, bias, weight = _scales_of(end - 1 - first, factor, per_tile, kind)
            turn = queries % kind.queries
            q_tile = buffers.q.index(turn * kind.groups + warpgroup)
            at = count + first
            slot = at % kind.stages
            mbarrier.wait(barriers.q_full.index(turn), (queries // kind.queries) & 1)
            mbarrier.wait(full.index(slot), (at // kind.stages) & 1)
            scores = warpgroup_mma_wait(0, deps=[_scores(q_tile, buffers.k, slot, kind)])
            mbarrier.arrive(empty.index(slot), count=1)
            key = (end - 1 - first) * keys + columns
            scores, first_factor = _seen(scores, first_factor, arguments.cap, key, mask, True, kind)
            if kind.fp8:
                reference = gl.full([64, 4], -1e30, gl.float32, kind.quad)
                words, sums, reference, decay = _fp8_softmax(scores, first_factor, bias, reference, True, kind)
                state = State(total, zeros, decay, words, reference, sums * weight, decay)
            else:
                p, row_max, decay = _powers(scores, first_factor, row_max)
                state = State(total, zeros, decay, _rounded(p, v_buffer, kind), row_max, _sums(p, kind), decay)
            # Tiles in the order of steps: masked by the diagonal, seen whole, masked by the window's far end.
            masked_first = gl.maximum(end - whole_end, first + 1)
            masked_last = tiles
            if kind.windowed:
                masked_last = gl.maximum(end - whole_begin, masked_first)
            for part in gl.static_range(3):
                low = first + 1
                high = masked_first
                if part == 1:
                    low = masked_first
                    high = masked_last
                if part == 2:
                    low = masked_last
                    high = tiles
                if part < 2 or kind.windowed:
                    state = _steps(
                        low, high, end, count, state, q_tile, buffers, barriers, per_tile, factor, arguments.cap, mask,
                        zero, part != 1, kind,
                    )  # fmt: skip
            total, partial, since, words, reference, row_sum, decay = state
            if kind.fp8:
                row_max = gl.convert_layout(gl.max(reference, 1), kind.row)
            else:
                row_max = reference
            mbarrier.arrive(barriers.q_empty.index(turn), count=1)
            # P V of the last tile is left: its V came in a stage of its own.
            count += tiles + 1
            slot = (count - 1) % kind.stages
            row_total = gl.convert_layout(gl.sum(row_sum, 1), kind.row)
            mbarrier.wait(full.index(slot), ((count - 1) // kind.stages) & 1)
            left = _left(words, zero, v_buffer, kind)
            if not kind.tiles.overlap:
                total = _add_parts(total, left, v_buffer, slot, decay, kind)
            else:
                partial = _decayed(partial, decay, kind)
                product = warpgroup_mma(left, _value(v_buffer, slot, kind), partial, is_async=True)
                partial = warpgroup_mma_wait(0, deps=[product])
                total = (total[0] * _columns_of(since * decay, kind) + partial,) if kind.promote else (partial,)
            mbarrier.arrive(empty.index(slot), count=1)
            queries += 1
        _finish(arguments.out, arguments.lse, total, row_max, row_total, first_token, first_row, seq_q, kind)
        # The number of the next tile, which the producer has taken for all warps of the program.
        mbarrier.wait(barriers.ticket_full, tickets & 1)
        index = gl.max(arguments.ticket.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(barriers.ticket_empty, count=1)
        tickets += 1


@gluon.jit
def _finish(out, lse, total, row_max, row_sum, first_token, first_row, seq_q, kind: gl.constexpr):
    """Divides by the sum and writes; a row without a visible key has the sum 0."""
    # m is in units of log2, and P was 2^8 too large: ln Σ = (m − 8 + log2 total) · ln 2.
    seen = row_sum != 0
    row_sum = gl.where(seen, row_sum, 1.0)
    row = first_row + gl.arange(0, 64, kind.output_row)
    for i in gl.static_range(kind.parts):
        output = total[i] * gl.convert_layout(1.0 / row_sum, kind.output_row)[:, None]
        d = i * kind.columns + gl.arange(0, kind.columns, kind.output_column)
        inside = (row < seq_q)[:, None] & (d < kind.dim)[None, :]
        at = (first_token + row)[:, None] * kind.dim + d[None, :]
        gl.store(out + at, output.to(out.dtype.element_ty), mask=inside)
    if kind.with_lse:
        row_of_score = first_row + gl.arange(0, 64, kind.row)
        value = (row_max - 8.0 + gl.log2(row_sum)) * 0.6931471805599453
        gl.store(lse + first_token + row_of_score, gl.where(seen, value, float("-inf")), mask=row_of_score < seq_q)


_INTEGERS = (
    "tokens_q", "tokens_kv", "tokens_v", "heads", "ratio", "seq_q", "seq_kv", "blocks", "group", "total", "window",
    "q_batch", "q_head", "q_block", "k_batch", "k_head", "k_block", "v_batch", "v_head", "v_block",
)  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def sm90_dense_attention(
    q_map, k_map, v_map, out, lse, q_scale, k_scale, v_scale, cu_q, cu_kv, counter,
    tokens_q, tokens_kv, tokens_v, heads, ratio, seq_q, seq_kv, blocks, group, total, window,
    q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block, log2_scale, cap, kind: gl.constexpr,
):  # fmt: skip
    """Grid: as many programs as there are SMs. See the module docstring."""
    groups: gl.constexpr = kind.groups
    stages: gl.constexpr = kind.stages
    tiles_of_q: gl.constexpr = [groups * kind.queries] + q_map.block_type.shape  # noqa: RUF005
    q_buffer = gl.allocate_shared_memory(q_map.dtype, tiles_of_q, q_map.layout)
    k_buffer = gl.allocate_shared_memory(k_map.dtype, [stages] + k_map.block_type.shape, k_map.layout)  # noqa: RUF005
    v_buffer = gl.allocate_shared_memory(v_map.dtype, [stages] + v_map.block_type.shape, v_map.layout)  # noqa: RUF005
    q_full = gl.allocate_shared_memory(gl.int64, [kind.queries, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [kind.queries, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    ticket = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ticket_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # The producer arrives once on a full barrier (TMA's bytes do the rest), every consumer once on an empty one.
    mbarrier.init(ticket_full, count=1)
    mbarrier.init(ticket_empty, count=groups)
    for i in gl.static_range(kind.queries):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=groups)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=groups)
    buffers = Buffers(q_buffer, k_buffer, v_buffer)
    barriers = Barriers(q_full, q_empty, full, empty, ticket_full, ticket_empty)
    sequences = Sequences(cu_q, cu_kv, heads, seq_q, seq_kv, blocks, group)
    tokens = Tokens(tokens_q, tokens_kv, tokens_v, heads, ratio)
    scales = Scales(
        q_scale, k_scale, v_scale, q_batch, q_head, q_block, k_batch, k_head, k_block, v_batch, v_head, v_block
    )
    consumed = Consumed(out, lse, scales, ticket, buffers, barriers, sequences, tokens, window, total, log2_scale, cap)
    produced = Produced(q_map, k_map, v_map, buffers, barriers, sequences, tokens, window, total, counter, ticket)
    if groups == 2:
        gl.warp_specialize(
            [(_consume, (consumed, 0, kind)), (_consume, (consumed, 1, kind)), (_produce, (produced, kind))],
            [4, 1],
            [kind.tiles.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumed, 0, kind)),
                (_consume, (consumed, 1, kind)),
                (_consume, (consumed, 2, kind)),
                (_produce, (produced, kind)),
            ],
            [4, 4, 1],
            [kind.tiles.registers, kind.tiles.registers, 24],
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: AttentionOptions,
    tiles: HopperTiles | None = None,
) -> None:  # fmt: skip
    """Runs the kernel on dense operands, as `portable.attention.dense_attention.attend` does; V in FP8 is laid out."""
    if not out.numel():
        return
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, heads, tokens_q, dim = q.shape
    kv_heads, tokens_kv = k.shape[1:3]
    fp8 = options.scales is not None
    packed, windowed, capped = (x is not None for x in (options.cu_seqlens_q, options.window, options.softcap))
    width = triton.next_power_of_2(dim)
    tiles = tiles or TILES[width, q.dtype.itemsize]
    short = -tokens_kv % tiles.block_kv
    if short and batch * kv_heads > 1 and not (fp8 or packed):
        # The last tile of keys would take the next head's values, and 0 times one that is NaN is NaN.
        v = torch.nn.functional.pad(v, (0, 0, 0, short))
    blocks = triton.cdiv(options.max_seqlen_q, 64 * tiles.groups)
    items = heads * options.sequences(batch)
    total = items * blocks
    group = _heads_at_once(items, heads // kv_heads, 2 * tokens_kv * dim * q.dtype.itemsize)
    dtype = gl.float8e4nv if fp8 else gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16

    def tensor_map(x: Tensor, rows: int, columns: int) -> object:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns], layout)

    v_tile = (width, tiles.block_kv) if fp8 else (tiles.block_kv, width)
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    sm90_dense_attention[min(programs, total),](
        tensor_map(q, 64, width), tensor_map(k, tiles.block_kv, width), tensor_map(v, *v_tile), out, lse,
        *(options.scales or (out, out, out)), options.cu_seqlens_q, options.cu_seqlens_k,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        tokens_q, tokens_kv, v.shape[2], heads, heads // kv_heads, tokens_q, tokens_kv, blocks, group, total,
        options.reach, *options.strides,
        options.scale_of(dim) * math.log2(math.e), (options.softcap or 0.0) * math.log2(math.e),
        Kind(tiles, dim, fp8, options.causal, windowed, capped, packed, lse is not None),
        num_warps=4, maxnreg=tiles.at_launch, enable_fp_fusion=True,
    )  # fmt: skip


def _heads_at_once(items: int, ratio: int, nbytes: int) -> int:
    """Returns how many heads are processed together: whole groups that share a KV head and fit the L2 cache."""
    fits = max(1, _RESIDENT // nbytes) * ratio
    return max(n for n in range(1, items + 1) if items % n == 0 and (n <= fits or n == 1))
