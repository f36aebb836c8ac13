"""Attention's operands are defined here: tiles, options and checks, blocks that share a scale, Hopper's layout of V."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import E4M3
from quant.formats.scaling import scale_of
from quant.kernels.attention.kv_pages import KVPages

DIMS = (64, 96, 128, 192, 256)  # head dimensions of `attention`
HEAD_DIMS = (64, 128, 256)  # head dimensions of `fp8_attention`, the op inside engines


@dataclass(frozen=True)
class Tiles:
    """A launch over dense keys: queries and keys of a tile, warps of a program, and stages of its pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def tiles_for(dim: int, arch: int, itemsize: int = 1) -> Tiles:
    """Returns the tiles of the Triton kernels for a head dimension of `DIMS` and a compute capability such as 90."""
    if dim not in DIMS:
        raise ValueError(f"attention: head dimension {dim}; the kernel takes {', '.join(map(str, DIMS))}")
    # Keys and values of all stages, and the queries, must fit in shared memory together.
    if arch // 10 in (9, 10):  # 227 KiB of shared memory
        if itemsize > 1:
            return Tiles(128, 64, 8, 2) if dim > 128 else Tiles(128, 128, 8, 2)
        return Tiles(128, 128, 8, 2) if dim > 128 else Tiles(128, 128, 8, 3)
    # 99 KiB of shared memory, and mma.sync, which holds its operands in registers.
    if itemsize > 1:
        return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 32, 8, 3)
    return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 64, 8, 3)


_ROWS = (8, 16)  # query rows of a decoding tile: the columns of one or of two tensor-core products
_MANY_ROWS = 64  # query rows of a tile where a KV head has more


@dataclass(frozen=True)
class DecodeTiles:
    """A launch over a paged cache: query rows and keys of a tile, warps and stages of a program, splits of the keys."""

    # `overlap` lets the kernel start before the previous one has ended, and the next one before this one has.

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int
    overlap: bool = True


def decode_tiles_for(pages: KVPages, rows: int, programs: int, max_length: int, sms: int) -> DecodeTiles:
    """Returns the launch for `rows` query rows a KV head, with `programs` sequences × KV heads on `sms` SMs."""
    if rows > _ROWS[-1]:
        # A chunk of a prompt fills the GPU with tiles of queries: it is limited by products, and splits would only add
        # work. A few tokens, as speculative decoding checks them, leave most SMs idle, and so their keys are split.
        parts = min(2 * sms // (programs * -(-rows // _MANY_ROWS)), max_length // (4 * 64), 128)
        return DecodeTiles(_MANY_ROWS, 32 if pages.dim > 128 else 64, 4, 2, max(1, parts))
    block_m = next(size for size in _ROWS if size >= rows)
    # Programs of one warp need no synchronization; larger tiles need the registers of two.
    warps = 1 if block_m * pages.dim <= _ROWS[0] * 128 else 2
    # Decoding E2M1 needs more programs on an SM than FP8 does to keep memory busy: of one warp, three for each of its
    # four schedulers (on an H200 10 or 14 were slower than 8, and 12 faster). All of them are resident at once,
    # each with four tiles or more: splits that start when others end would leave the GPU half empty at the end. With
    # fewer programs than SMs, the tiles that a program reads in sequence take the time: then two programs an SM.
    on_an_sm = 4
    if pages.format is not None and pages.format.global_scale:
        on_an_sm = 12 if warps == 1 else 8
    parts = max(max_length // (4 * 32), min(2 * sms // programs, max_length // 64))
    splits = max(1, min(on_an_sm * sms // programs, parts, 128))
    # Overlapping saves a microsecond or two. Programs that start early displace programs of long reads, which are then
    # not all resident at once: 32k tokens of NVFP4 took a third longer.
    return DecodeTiles(block_m, 32, warps, 3, splits, overlap=max_length <= 1024 * splits)


SCALE_BLOCK = 128  # rows (tokens of one head) that share a block scale

Scales = tuple[Tensor, Tensor, Tensor]  # of Q, K and V
QuantizedParts = tuple[Sequence[Tensor], Sequence[Tensor]]  # codes and scales of Q, K and V


class ScoreKeywords(TypedDict, total=False):
    """Options on scores; `AttentionOptions` explains each."""

    window: int | None
    softcap: float | None
    softmax_scale: float | None


class MaskKeywords(ScoreKeywords, total=False):
    """Options that do not depend on how operands are stored."""

    causal: bool
    dtype: torch.dtype | None


class AttentionKeywords(MaskKeywords, total=False):
    """The keyword arguments of `attention`, which are the fields of `AttentionOptions`."""

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    v_laid_out: bool


class AttentionOptions(NamedTuple):
    """How q, k and v are attended; travels from `attention` to the op, the oracle and the launches."""

    # q_scale, k_scale, v_scale: float32, positive: a value is its code times its scale. `[]` or `[1]` is one for all,
    # `[batch, heads]` one per head, `[batch, heads, blocks]` one per 128 tokens of a head; of k and v, heads are KV
    # heads. None for operands in 16 bit.
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    causal: bool = False  # query i sees the keys up to i + seq_kv − seq_q: the last query sees all of them
    # A query sees this many keys back, its own position included, and without `causal` as many ahead; None is no limit.
    window: int | None = None
    softcap: float | None = None  # scores s become softcap · tanh(s / softcap); None leaves them
    softmax_scale: float | None = None  # positive; None is 1/√dim
    # cu_seqlens_q, cu_seqlens_k: int32 `[sequences + 1]`, from 0 to the number of tokens: batch is then 1, and seq_q
    # and seq_kv count the tokens of all sequences, one after the other. Block scales of sequence i start at index cu[i]
    # // 128 + i, and there are tokens // 128 + sequences of them.
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    # Length of the longest packed sequence of queries; None reads it from `cu_seqlens_q`, which waits for the GPU.
    max_seqlen_q: int | None = None
    # The dtype of the output, BF16, FP16 or FP32; None is BF16 for E4M3 operands and the dtype of q for others.
    dtype: torch.dtype | None = None
    v_laid_out: bool = False  # whether v is `lay_out_v` of the values, E4M3 `[batch, kv_heads, dim, keys]`

    @property
    def scales(self) -> Scales | None:
        """The scales of q, k and v, or None for operands in 16 bit."""
        if self.q_scale is None or self.k_scale is None or self.v_scale is None:
            return None
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def reach(self) -> int:
        """The window for kernels, which add it to positions in 32 bits; 0 for none."""
        return min(self.window or 0, 1 << 30)

    @property
    def strides(self) -> list[int]:
        """Strides of the three scales along batch, head and block; 0 where there are none."""
        return [n for scale in self.scales for n in scale.stride()] if self.scales else [0] * 9

    def sequences(self, batch: int) -> int:
        """Returns the number of sequences: packed ones, or entries of the batch."""
        return batch if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    def scale_of(self, dim: int) -> float:
        """Returns the factor on q·k."""
        return 1 / math.sqrt(dim) if self.softmax_scale is None else float(self.softmax_scale)

    def check(self, where: str) -> None:
        """Raises ValueError for a number that is out of range."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"{where}: window {self.window} must be at least 1; None is no limit")
        for name, value in (("softcap", self.softcap), ("softmax_scale", self.softmax_scale)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{where}: {name} {value} must be positive; None is the default")
        if self.dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{where}: output dtype {self.dtype}; expected bfloat16, float16 or float32")


def check_heads(where: str, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> None:
    """Raises ValueError where q, k and v do not fit each other, or the head dimension is none of `dims`."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"{where}: expected q [batch, heads, seq_q, dim] and k, v [batch, kv_heads, seq_kv, dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{where}: q and k differ in batch or head dimension")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if k.shape[2] == 0:
        raise ValueError(f"{where}: there are no keys to attend to")
    if q.shape[3] not in dims:
        raise ValueError(f"{where}: head dimension {q.shape[3]}; the kernel takes {', '.join(map(str, dims))}")


def check_sequences(where: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """Raises ValueError for packed sequences of a wrong shape, or, on the CPU, of wrong bounds."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"{where}: cu_seqlens_q and cu_seqlens_k belong together; one is missing")
    if q.shape[0] != 1:
        raise ValueError(f"{where}: packed sequences (cu_seqlens) lie in one batch entry, not in {q.shape[0]}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) < 2:
        shapes = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        raise ValueError(f"{where}: cu_seqlens_q and cu_seqlens_k are {shapes}, expected both [sequences + 1]")
    for name, cu, x in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if cu.dtype != torch.int32:
            raise ValueError(f"{where}: {name} is {cu.dtype}, expected int32")
        if cu.device.type != "cpu":
            continue
        bounds = cu.tolist()
        if bounds[0] != 0 or bounds[-1] != x.shape[2] or bounds != sorted(bounds):
            raise ValueError(f"{where}: {name} {bounds} must rise from 0 to the {x.shape[2]} tokens there are")


def check_devices(where: str, *tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors are on one device."""
    devices = {str(x.device) for x in tensors if x is not None}
    if len(devices) > 1:
        raise ValueError(f"{where}: on different devices ({', '.join(sorted(devices))})")


def scale_blocks(tokens: int, sequences: int | None = None) -> int:
    """Returns the number of scale blocks along the tokens of a head, of one sequence or of packed ones."""
    return -(-tokens // SCALE_BLOCK) if sequences is None else tokens // SCALE_BLOCK + sequences


def block_starts(cu_seqlens: Tensor) -> Tensor:
    """Returns the index of the first scale block of each packed sequence."""
    # Counting from cu // 128 plus the number of the sequence leaves room for every sequence's blocks, whatever the
    # lengths, and depends on only the sequence's own entry: tokens // 128 + sequences blocks in all.
    return cu_seqlens[:-1] // SCALE_BLOCK + torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)


def sequence_of_rows(cu_seqlens: Tensor, row: Tensor) -> Tensor:
    """Returns the packed sequence of each row."""
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)


def block_of_rows(cu_seqlens: Tensor | None, row: Tensor) -> Tensor:
    """Returns the scale block of each row."""
    if cu_seqlens is None:
        return row // SCALE_BLOCK
    sequence = sequence_of_rows(cu_seqlens, row)
    return block_starts(cu_seqlens)[sequence] + (row - cu_seqlens[sequence]) // SCALE_BLOCK


def scale_of_rows(scale: Tensor, shape: torch.Size, cu_seqlens: Tensor | None) -> Tensor:
    """Returns scales per tensor, per head or per block, so that they broadcast to `[batch, heads, rows, 1]`."""
    if scale.dim() < 2:
        return scale.reshape(1, -1, 1, 1)
    if scale.dim() == 2:
        return scale[:, :, None, None]
    return scale[:, :, block_of_rows(cu_seqlens, torch.arange(shape[2], device=scale.device)), None]


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E4M3 codes of `[batch, heads, tokens, dim]` and scales `[batch, heads, blocks]` of 128 tokens each."""
    tokens = x.shape[2]
    blocks = pad(x.float(), (0, 0, 0, -tokens % SCALE_BLOCK)).unflatten(2, (-1, SCALE_BLOCK))
    scale = scale_of(blocks.abs().amax((-2, -1)), E4M3.max)
    codes = (blocks / scale[..., None, None]).clamp_(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3)[:, :, :tokens], scale


def lay_out_v(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns V `[batch, kv_heads, tokens, dim]` as Hopper's FP8 kernel reads it: K-major, keys in the order of P."""
    # An accumulator's thread holds 2 neighbours of every 8 columns, and a left operand's wants 4 of every 16. So the
    # order of 16 keys is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. The result is `[batch, kv_heads, dim, keys]`, padded
    # with zeros to whole blocks of 128; each packed sequence starts where its scale blocks start.
    blocks = scale_blocks(v.shape[2], None if cu_seqlens is None else len(cu_seqlens) - 1)
    padded = torch.zeros(*v.shape[:2], blocks * SCALE_BLOCK, v.shape[3], dtype=v.dtype, device=v.device)
    padded[:, :, _padded_rows(v, v.shape[2], cu_seqlens)] = v
    return padded.unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5).mT.contiguous()


def restore_v(v: Tensor, tokens: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Undoes `lay_out_v`."""
    rows: Tensor = v.mT.unflatten(2, (-1, 4, 2, 2)).transpose(3, 4).flatten(2, 5)
    return rows[:, :, _padded_rows(v, tokens, cu_seqlens)]


def _padded_rows(v: Tensor, tokens: int, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the place of each of the tokens of `v` among whole blocks."""
    # Blocks of 128 keys never hold two sequences, so each packed sequence starts at a block of its own.
    row = torch.arange(tokens, device=v.device)
    if cu_seqlens is None:
        return row
    sequence = sequence_of_rows(cu_seqlens, row)
    return block_starts(cu_seqlens)[sequence] * SCALE_BLOCK + row - cu_seqlens[sequence]
