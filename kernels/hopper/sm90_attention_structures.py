"""The constants and arguments of Hopper's attention kernel: its tiles, its register layouts, and its named structures.

`Kind` is a compile-time constant of every function of `sm90_dense_attention.py`; the named tuples hold the functions'
arguments at run time. A wgmma leaves thread (warp, g, q) of a warpgroup

    rows 16·warp + g and 16·warp + g + 8, columns 8·i + 2·q and 8·i + 2·q + 1      g = 0..7, q = 0..3, i: octets

of its 64 rows. The linear layouts below name these coordinates, so that P and the scales of rows can be taken apart and
joined without moving between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class HopperTiles:
    """The tiles and the pipeline of a launch.

    Attributes:
        groups: warpgroups of 64 queries.
        block_kv: keys of a tile.
        stages: pairs of tiles of K and V in flight.
        registers: the number of registers of a thread of a consumer.
        queries: tiles of queries in flight.
        optimistic: whether FP8's powers are computed before the largest score is known: see the module docstring.
        overlap: whether the powers of a step are computed while the tensor cores work on its products.
    """

    groups: int
    block_kv: int
    stages: int
    registers: int = 240
    queries: int = 2
    optimistic: bool = False
    overlap: bool = True

    @property
    def at_launch(self) -> int:
        """Registers of a thread before the producer gives its registers away."""
        return 65536 // (128 * (self.groups + 1)) // 8 * 8


# Registers of a thread bound `groups`: 3 of 160 or 2 of 240, next to a producer of 24. Shared memory bounds `stages`.
TILES = {
    (64, 1): HopperTiles(3, 128, 8, 160, optimistic=True, overlap=False),
    (128, 1): HopperTiles(2, 128, 4, optimistic=True),
    (256, 1): HopperTiles(2, 128, 3, queries=1),
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
    optimistic = _constant(lambda self: self.tiles.optimistic)
    width = _constant(lambda self: 1 << (self.dim - 1).bit_length())
    scores = _constant(lambda self: self.product(self.tiles.block_kv))
    output = _constant(lambda self: self.product(1 << (self.dim - 1).bit_length()))
    left = _constant(lambda self: gl.DotOperandLayout(0, self.output.value, 4 if self.fp8 else 2))
    words = _constant(lambda self: _words(self.tiles.block_kv, self.fp8))
    octets = _constant(lambda self: _octets(self.tiles.block_kv))
    output_octets = _constant(lambda self: _octets(1 << (self.dim - 1).bit_length()))
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
    """Who waits for whom.

    Attributes:
        q_full, q_empty: a buffer of queries was filled by TMA; all consumers are done with it.
        full, empty: the same for a stage of K and V.
        ticket_full, ticket_empty: the producer wrote the number of the next tile; all consumers read it.
    """

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ticket_full: gl.shared_memory_descriptor
    ticket_empty: gl.shared_memory_descriptor


class Sequences(NamedTuple):
    """How the tiles of queries are numbered.

    Attributes:
        cu_q, cu_kv: first query and key of each packed sequence, or None.
        heads: the number of heads of Q.
        seq_q, seq_kv: lengths, where sequences are not packed.
        blocks: tiles of queries of the longest sequence.
        group: heads that are processed together, so that their K and V stay in L2.
    """

    cu_q: gl.tensor
    cu_kv: gl.tensor
    heads: gl.tensor
    seq_q: gl.tensor
    seq_kv: gl.tensor
    blocks: gl.tensor
    group: gl.tensor


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
    """A consumer's softmax between two tiles of keys.

    Attributes:
        output: O so far, float32 [64, width], not yet multiplied by `decay`.
        words: P of the last tile, in the dtype of V.
        reference: m of each row.
        row_sum: the sum of each thread's columns, [64, 4].
        decay: 2^(old reference − new reference).
    """

    output: gl.tensor
    words: gl.tensor
    reference: gl.tensor
    row_sum: gl.tensor
    decay: gl.tensor
