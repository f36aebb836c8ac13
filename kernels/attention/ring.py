"""Ring attention spreads a sequence over several GPUs and passes quantized keys and values around a ring.

    q, k, v = (shard(x, rank, world) for x in …)                   [batch, heads, tokens / world, dim]
    out = ring_attention(q, k, v, format=FORMATS["fp8"])           this rank's queries over all keys

Every rank keeps its queries. Its keys and values are quantized once and passed on, rank to rank, `world` − 1 times;
each rank attends to the part it holds while the next part is in transit, and merges the parts by their log-sum-exps.
Nothing is rounded again on the way: for any number of ranks the result is attention over the same quantized keys and
values.

Under a causal mask equal shares of the sequence are unequal work, so the sequence is cut into 2 · world pieces and
rank r has the pieces r and 2 · world − 1 − r, one early and one late:

    world 4    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    keys of rank j < r    all queries see the early piece           2 products of pieces
    keys of rank j > r    the late queries see both pieces          2
    its own               early sees early, late sees both          2, counting the causal halves

So every rank has the same work at every step. Bytes sent for a key or value of `dim` in one head:

    None     2 · dim                       16 bit
    fp8      dim, + 4 for 128 tokens       E4M3, a scale for 128 tokens of a head
    nvfp4    dim / 2 + dim / 16            E2M1, E4M3 block scales, and a power of two a head: exact in BF16
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import E4M3, Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.kernels.attention.attention_operands import SCALE_BLOCK, AttentionOptions, scale_blocks
from quant.kernels.attention.forward import attention
from quant.kernels.attention.kv_pages import KVPages, decode_kv, encode_kv
from quant.kernels.attention.reference import reference

RING_FORMATS = ("fp8", "nvfp4")  # formats in which keys and values are passed on; None is 16 bit

_EARLY, _LATE, _BOTH = 0, 1, 2

_Keys = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def shard(x: Tensor, rank: int, world: int, dim: int = 2) -> Tensor:
    """Returns the tokens of `rank`, an early and a late one of 2 · world equal pieces of all tokens along `dim`."""
    if not 0 <= rank < world:
        raise ValueError(f"ring attention: rank {rank} of {world}")
    if x.shape[dim] % (2 * world):
        raise ValueError(
            f"ring attention: {x.shape[dim]} tokens over {world} ranks; pad them to a multiple of {2 * world}"
        )
    pieces = x.chunk(2 * world, dim)
    return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]], dim)


def unshard(parts: Sequence[Tensor], dim: int = 2) -> Tensor:
    """Returns all tokens in order, from the shards of all ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E4M3 codes of `[batch, heads, tokens, dim]` and scales `[batch, heads, blocks]` of 128 tokens each."""
    tokens = x.shape[2]
    blocks = pad(x.float(), (0, 0, 0, -tokens % SCALE_BLOCK)).unflatten(2, (-1, SCALE_BLOCK))
    scale = scale_of(blocks.abs().amax((-2, -1)), E4M3.max)
    codes = (blocks / scale[..., None, None]).clamp_(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3)[:, :, :tokens], scale


@dataclass(frozen=True)
class _Message:
    """The layout of one rank's keys and values as bytes: dtype and shape of each part, in order."""

    format: Format | None
    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, k: Tensor, format: Format | None) -> _Message:
        batch, heads, tokens, dim = k.shape
        piece = (2, batch, heads, tokens // 2)
        parts: list[tuple[torch.dtype, tuple[int, ...]]] = [(torch.float8_e4m3fn, (*piece, dim))]
        if format is None:
            parts = [(k.dtype, (*piece, dim))]
        elif format.global_scale:
            parts = [(torch.uint8, (*piece, dim // 2)), (torch.float8_e4m3fn, (*piece, dim // 16))]
            parts.append((torch.float32, (2, batch, heads)))
        else:
            parts.append((torch.float32, (2, batch, heads, scale_blocks(tokens // 2))))
        return cls(format, tuple(parts * 2))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, each at a multiple of 16."""
        return sum(_rounded_up(math.prod(shape) * dtype.itemsize) for dtype, shape in self.parts)

    def views(self, buffer: Tensor) -> list[Tensor]:
        views, start = [], 0
        for dtype, shape in self.parts:
            nbytes = math.prod(shape) * dtype.itemsize
            views.append(buffer[start : start + nbytes].view(dtype).view(shape))
            start += _rounded_up(nbytes)
        return views

    def write(self, buffer: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantizes both pieces of k and v into `buffer`."""
        views = self.views(buffer)
        for piece, pair in enumerate(zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)):
            targets = [view[piece] for view in views]
            if k.is_cuda and self.format is not None and self.format.global_scale:
                _append(targets, pair, self.format)
                continue
            parts = [part for x in pair for part in _encoded(x, self.format)]
            for target, part in zip(targets, parts, strict=True):
                target.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))

    def read(self, buffer: Tensor, piece: int, dtype: torch.dtype) -> _Keys:
        """Returns piece 0 or 1 as attention takes it: k, v, and their block scales where they are E4M3."""
        views = [view[piece] for view in self.views(buffer)]
        if self.format is None:
            return views[0], views[1], None, None
        if not self.format.global_scale:
            return views[0], views[2], views[1], views[3]
        k_codes, k_blocks, k_scale, v_codes, v_blocks, v_scale = views
        k = self._values(k_codes, k_blocks, k_scale, dtype)
        return k, self._values(v_codes, v_blocks, v_scale, dtype), None, None

    def _values(self, codes: Tensor, blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if codes.is_cuda:
            from quant.kernels.attention.portable_paged_kv_cache import read_nvfp4_kv

            return read_nvfp4_kv(codes, blocks, scale, dtype)
        rows = zip(codes, blocks, scale, strict=True)
        return torch.stack([decode_kv(code, self.format, factors, block) for code, block, factors in rows]).to(dtype)


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _encoded(x: Tensor, format: Format | None) -> tuple[Tensor, ...]:
    if format is None:
        return (x,)
    if not format.global_scale:
        return quantize_blocks(x)
    scale = _power_of_two(x, format)
    codes, blocks = [], []
    for row, factors in zip(x, scale, strict=True):
        code, _, block = encode_kv(row, format, factors)
        assert block is not None
        codes.append(code)
        blocks.append(block)
    return torch.stack(codes), torch.stack(blocks), scale


def _append(targets: Sequence[Tensor], pair: tuple[Tensor, Tensor], format: Format) -> None:
    """Quantizes NVFP4's K and V on a GPU by the kernel that writes caches: one page for a piece and batch entry."""
    from quant.kernels.attention.portable_paged_kv_cache import write_kv

    k, v = pair
    k_codes, k_blocks, k_scale, v_codes, v_blocks, v_scale = targets
    k_scale.copy_(_power_of_two(k, format))
    v_scale.copy_(_power_of_two(v, format))
    zero = torch.zeros(1, 1, dtype=torch.int32, device=k.device)
    for row in range(len(k)):
        entry = slice(row, row + 1)
        page = KVPages(
            k_codes[entry], v_codes[entry], format, k.shape[3], k_scale[row], v_scale[row],
            k_blocks[entry], v_blocks[entry],
        )  # fmt: skip
        write_kv(page, zero, zero[0], k[entry], v[entry])


def _power_of_two(x: Tensor, format: Format) -> Tensor:
    """Returns NVFP4's scale of each head, a power of two, so that code · block scale · scale is exact in BF16."""
    # Rounded up, so that no block scale exceeds E4M3's largest number.
    return torch.exp2(torch.ceil(torch.log2(global_scale_of(x.abs().amax((2, 3)).float(), format))))


def message_bytes(k: Tensor, format: Format | None) -> int:
    """Returns the bytes that a rank sends at each of the `world` − 1 steps for its own `k`."""
    return _Message.of(k, format).nbytes


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    format: Format | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> Tensor:
    """Returns the attention of this rank's queries over the keys and values of all ranks, in the dtype of q.

    Args:
        q: `[batch, heads, tokens, dim]`, this rank's share from `shard`; BF16, FP16 or, on a CPU, FP32. Under `fp8` it
            is rounded to E4M3 with a scale for 128 tokens of a head, for the FP8 kernel.
        k, v: `[batch, kv_heads, tokens, dim]`.
        format: `fp8` or `nvfp4`; None passes 16 bit on.
        causal: whether a token sees only itself and the tokens before it, in the order of the whole sequence.
        check: whether to compare shapes between the ranks first; ranks with other shapes would wait forever.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    where = f"ring attention, rank {rank} of {world}, q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    _check(where, q, k, v, format)
    if check:
        _agree(where, q, k, format, group)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    message = _Message.of(k, format)
    # Two buffers, which swap roles at each step: one is read and sent while the other is filled.
    # step s: rank r holds the keys of rank r − s and sends them to r + 1
    held, incoming = torch.empty(2, message.nbytes, dtype=torch.uint8, device=k.device)
    message.write(held, k, v)
    ends = (rank + 1) % world, (rank - 1) % world
    after, before = ends if group is None else (dist.get_global_rank(group, end) for end in ends)
    queries = _Queries(q, fp8=format is not None and not format.global_scale, scale=scale)
    for step in range(world):
        waiting: list[dist.Work] = []
        if step < world - 1:
            send = dist.P2POp(dist.isend, held, after, group)
            waiting = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, before, group)])
        for rows, piece, masked in _work(rank, (rank - step) % world, causal):
            queries.attend(rows, message.read(held, piece, q.dtype), masked)
        # Attention above ran on the compute stream while the copies were under way.
        for request in waiting:
            request.wait()
        held, incoming = incoming, held
    return queries.out.to(q.dtype)


def _work(rank: int, owner: int, causal: bool) -> Iterator[tuple[int, int, bool]]:
    """Yields the queries, the piece of the keys of `owner` that they attend to, and whether a causal mask applies."""
    if not causal:
        yield from ((_BOTH, _EARLY, False), (_BOTH, _LATE, False))
    # Pieces in order: early of owner < early of rank < late of rank < late of owner.
    elif owner < rank:
        yield _BOTH, _EARLY, False
    # early of rank < early of owner < late of owner < late of rank
    elif owner > rank:
        yield from ((_LATE, _EARLY, False), (_LATE, _LATE, False))
    else:
        yield from ((_EARLY, _EARLY, True), (_LATE, _EARLY, False), (_LATE, _LATE, True))


class _Queries:
    """This rank's queries and their results so far: output and log-sum-exp in FP32."""

    def __init__(self, q: Tensor, *, fp8: bool, scale: float) -> None:
        self.half, self.scale = q.shape[2] // 2, scale
        self.parts = [quantize_blocks(x) if fp8 else (x, None) for x in q.chunk(2, 2)]
        self.out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        self.lse = torch.full(q.shape[:3], -math.inf, device=q.device, dtype=torch.float32)

    def attend(self, rows: int, keys: _Keys, causal: bool) -> None:
        """Adds attention of the early queries, of the late ones or of both to one piece of keys."""
        for part in (_EARLY, _LATE) if rows == _BOTH else (rows,):
            (q, q_scale), (k, v, k_scale, v_scale) = self.parts[part], keys
            options = AttentionOptions(q_scale, k_scale, v_scale, causal, softmax_scale=self.scale)
            if q.is_cuda:
                out, lse = attention(q, k, v, return_lse=True, **options._asdict())
            else:
                out, lse = reference(q, k, v, round_p=False, **options._replace(dtype=torch.float32)._asdict())
            tokens = slice(part * self.half, (part + 1) * self.half)
            # Two partial softmaxes merge exactly: out = Σ outᵢ · exp(lseᵢ − lse), lse = log Σ exp(lseᵢ).
            before, after = self.lse[:, :, tokens], torch.logaddexp(self.lse[:, :, tokens], lse)
            self.out[:, :, tokens] *= (before - after).exp()[..., None]
            self.out[:, :, tokens] += out.float() * (lse - after).exp()[..., None]
            self.lse[:, :, tokens] = after


def _check(where: str, q: Tensor, k: Tensor, v: Tensor, format: Format | None) -> None:
    if format is not None and format.name not in RING_FORMATS:
        raise ValueError(f"{where}: {format} is not passed on; known: {', '.join(RING_FORMATS)}, or None for 16 bit")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{where}: expected q [batch, heads, tokens, dim] and k, v [batch, kv_heads, tokens, dim]")
    if not q.numel() or q.shape[2] % 2:
        raise ValueError(f"{where}: {q.shape[2]} tokens; each rank has an early and a late piece of the same length")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if format is not None and format.global_scale and k.shape[3] % 16:
        raise ValueError(f"{where}: head dimension {k.shape[3]} is not a multiple of NVFP4's block of 16")
    if len({x.device for x in (q, k, v)}) > 1 or len({x.dtype for x in (q, k, v)}) > 1:
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{where}: {kinds}; expected one dtype on one device")


def _agree(where: str, q: Tensor, k: Tensor, format: Format | None, group: dist.ProcessGroup | None) -> None:
    # A rank with other shapes would wait for messages of another size forever; one small gather finds it first.
    index = -1 if format is None else RING_FORMATS.index(format.name)
    mine = (*q.shape, k.shape[1], q.dtype.itemsize, index)
    own = torch.tensor(mine, device=q.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, own):
            raise ValueError(
                f"{where}: rank {rank} has batch, heads, tokens, dim, KV heads {theirs[:5].tolist()}, bytes and format "
                f"{theirs[5:].tolist()}; all ranks need the same: pad the sequence to a multiple of 2 · world"
            )
