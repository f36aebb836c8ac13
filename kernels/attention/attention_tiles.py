"""Tables say how attention kernels are cut into tiles; they can be read where Triton is not installed."""

from __future__ import annotations

from dataclasses import dataclass

from quant.kernels.attention.kv_pages import KVPages

DIMS = (64, 96, 128, 192, 256)
"""Head dimensions of `attention`."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions of `fp8_attention`, the op inside engines."""


@dataclass(frozen=True)
class Tiles:
    """A launch over dense keys: queries and keys of a tile, warps of a program, and stages of its pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def tiles_for(dim: int, arch: int, itemsize: int = 1) -> Tiles:
    """Returns the tiles of the Triton kernels.

    Args:
        dim: head dimension, one of `DIMS`.
        arch: compute capability as a number, 90 for Hopper.
        itemsize: bytes of an operand's element.

    Raises:
        ValueError: `dim` is none of them.
    """
    if dim not in DIMS:
        dims = ", ".join(map(str, DIMS))
        raise ValueError(f"attention: head dimension {dim}; the kernel takes {dims}")
    # Keys and values of all stages, and the queries, must fit in shared memory together.
    if arch // 10 in (9, 10):  # 227 KiB of shared memory
        if itemsize > 1:
            return Tiles(128, 64, 8, 2) if dim > 128 else Tiles(128, 128, 8, 2)
        return Tiles(128, 128, 8, 2) if dim > 128 else Tiles(128, 128, 8, 3)
    # 99 KiB of shared memory, and mma.sync, which holds its operands in registers.
    if itemsize > 1:
        return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 32, 8, 3)
    return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 64, 8, 3)


_ROWS = (8, 16)
"""Query rows of a decoding tile: the columns of one or of two tensor-core products."""
_MANY_ROWS = 64
"""Query rows of a tile where a KV head has more."""


@dataclass(frozen=True)
class DecodeTiles:
    """A launch over a paged cache: query rows and keys of a tile, warps and stages of a program, splits of the keys.

    `overlap` lets the kernel start before the previous one has ended, and the next one before this one has.
    """

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
    # Decoding E2M1 needs more programs on an SM than FP8 does to keep memory busy. All of them are resident at once,
    # each with four tiles or more: splits that start when others end would leave the GPU half empty at the end. With
    # fewer programs than SMs, the tiles that a program reads in sequence take the time: then two programs an SM.
    on_an_sm = 8 if pages.format is not None and pages.format.global_scale else 4
    parts = max(max_length // (4 * 32), min(2 * sms // programs, max_length // 64))
    splits = max(1, min(on_an_sm * sms // programs, parts, 128))
    # Overlapping saves a microsecond or two. Programs that start early displace programs of long reads, which are then
    # not all resident at once: 32k tokens of NVFP4 took a third longer.
    return DecodeTiles(block_m, 32, warps, 3, splits, overlap=max_length <= 1024 * splits)
