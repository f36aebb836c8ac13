"""A `Choice` says how a matmul is cut into tiles; this file lists choices to measure and guesses one without measuring.

There are four ways to multiply by a quantized weight:

    Tiles         the portable kernel (kernels/linear/portable_codes_gemm.py): any format, any shape
    GluonTiles    Hopper's kernel (kernels/linear/sm90_nvfp4_gemm_few.py): a prepacked NVFP4 or MXFP4 weight, few tokens
    PrefillTiles  many tokens (kernels/linear/sm90_codes_gemm_many.py): a prepacked weight, or one of `STORED_FORMATS`
    DENSE         write W in 16 bit, then the library's matmul: where that is cheap compared with the products

Tables hold the best measured launch for each shape: shipped ones, and those that `quant tune` writes. A table is a JSON
file for one GPU: key "format|layout|tokens|out|in", value a `Choice` with its time. The name of the file that
`quant tune` writes holds the versions of Triton and of this package, so an update of either starts a new file. Tokens
are powers of two up to 64, then multiples of 64; each entry serves the token counts up to its own.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from quant.base.atomic import write_atomically
from quant.base.json_files import read_json
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.gpus import Hardware

Launch = Callable[[Tensor, BlockScaledTensor, Tensor | None], Tensor]
"""`x @ weight.T + bias` for arguments of the shapes, dtypes and strides that it was prepared for."""
Product = Callable[[Tensor, BlockScaledTensor, Tensor | None, Tensor | None], Tensor]
"""The same of (x `[tokens, in]`, weight, bias, input scale), rounding x to its activation format first."""


@dataclass(frozen=True)
class Tiles:
    """A launch of the portable kernel."""

    block_m: int  # block_m, block_n, block_k: tile of tokens, of output features, and the step along K
    block_n: int
    block_k: int
    splits: int = 1  # programs that share the K of one tile
    swap: bool = False  # whether W is the left operand
    warps: int = 4  # warps, stages: per program, and the depth of its software pipeline
    stages: int = 3


@dataclass(frozen=True)
class GluonTiles:
    """A launch of Hopper's kernel."""

    block_m: int  # tokens of a tile: 8, 16, … 256
    programs: int  # how many share the work evenly; the kernel keeps them on their SMs
    warps: int = 8  # the number of warps that multiply: 4, 8 or 16; a program has 16 rows of W a warp
    resident: int = 1  # programs on one SM at a time, which share its registers and its shared memory
    depth: int = 2  # tiles of 64 columns of K that are fetched at once
    stages: int = 4  # fetches in flight and in use
    overlap: bool = True  # whether it may start, and fetch of the weight, before the kernel before it has ended


@dataclass(frozen=True)
class PrefillTiles:
    """A launch of Hopper's kernel for many tokens."""

    block_m: int  # tokens of a tile: a power of two of at least 32, or one plus a smaller power of two of at least 16
    halves: int  # the number of runs of 128 rows of W in a tile: 1 or 2
    programs: int  # one for each SM
    depth: int = 2  # tiles of 64 columns of K that are fetched at once
    stages: int = 3  # fetches in flight and in use
    overlap: bool = True  # as in `GluonTiles`
    groups: int = 1  # the number of groups of warps that multiply: 1, or 2 that share no barrier
    resident: int = 1  # programs on an SM at once; more than one where sums are small

    @property
    def ahead(self) -> int:
        """Products under way while the next operand is decoded: sums of 256 tokens leave no registers for that."""
        return 0 if self.groups == 2 and self.block_m > 192 else 1

    @property
    def early(self) -> bool:
        """Whether the next words are read before a product starts: with few tokens the MMA finishes early."""
        return self.groups == 2 and self.halves == 1 and self.block_m <= 96

    @property
    def unroll(self) -> int:
        """Fetches that a turn of the loop takes: two products must be written out in it, or none be under way."""
        return 2 if self.depth * self.halves == 1 and self.ahead else 1

    @property
    def step(self) -> int:
        """Columns of K in a turn of the loop."""
        return 64 * self.depth * self.unroll


@dataclass(frozen=True)
class Dense:
    """Dequantize, then the library's matmul."""


DENSE = Dense()
Choice = Tiles | GluonTiles | PrefillTiles | Dense
_Choice = TypeVar("_Choice", bound=Choice)
_KINDS: dict[str, type[Tiles] | type[GluonTiles] | type[PrefillTiles] | type[Dense]] = {
    "triton": Tiles,
    "gluon": GluonTiles,
    "prefill": PrefillTiles,
    "dense": Dense,
}

FEW = 64  # up to this many tokens reading W takes most of the time of a matmul; beyond, the products do
PREPACKED_FEW = 32  # up to this many tokens Hopper's kernel for few is the faster one for a prepacked weight
PREFILL_UNITS = {
    (256, 1): 1.25,
    (128, 2): 1.34,
    (192, 1): 0.97,
    (160, 1): 0.86,
    (144, 1): 0.83,
    (128, 1): 0.71,
    (96, 1): 0.64,
    (80, 1): 0.60,
    (64, 2): 0.94,
    (64, 1): 0.50,
    (32, 1): 0.46,
}
"""Kernel for many tokens: microseconds for 128 columns of a tile on an H100, by (block_m, halves)."""
E4M3_UNITS = {(256, 1): 0.87, (192, 1): 0.73, (128, 2): 1.20, (128, 1): 0.64, (64, 1): 0.54}
"""The same where x is in E4M3 and words are decoded to E4M3."""
_START, _END, _CUT = 0.5, 1.3, 7.0
"""Further microseconds: a launch, the end of a 128 × 128 tile, and the reduction of a tile that is split."""
_MOST_PARTS = 8
_CUT_UNITS = {64: (10.0, 0.54), 128: (12.0, 0.83)}
"""Kernel for few tokens, which splits tiles: microseconds once, and for 128 columns, by block_m."""
GLUON_LAUNCHES = {
    8: ((8, 2, 4), (4, 4, 4), (4, 4, 2), (4, 3, 2), (8, 3, 2), (8, 2, 2), (8, 1, 4)),
    16: ((4, 4, 4), (4, 3, 4), (4, 4, 2), (4, 3, 2), (8, 1, 4), (8, 2, 4), (8, 2, 2)),
    64: ((8, 1, 4), (4, 2, 2), (4, 2, 4), (8, 1, 2)),
    128: ((8, 1, 2), (4, 2, 2)),
    256: ((8, 1, 2),),
}
"""(warps, resident, depth) by block_m, verified against float64 on an H100; a search tries only these."""
STORED_FORMATS = ("fp8", "fp8_channel", "fp8_block", "mxfp8", "mxfp8_e5m2", "int8", "int4")
"""Formats that the kernel for many tokens also reads in the order of a checkpoint."""
STORED_FEW, STORED_MOST = 32, 2048
"""Range of tokens in which it is the fastest for them. The upper bound holds only for formats with block scales: beyond
it, writing W in 16 bit may be faster."""
STORED_UNITS = {(256, 1): (1.29, 1.43), (128, 1): (0.82, 0.96), (64, 1): (0.57, 0.85)}
"""Microseconds for 128 columns of a tile on an H100, by (block_m, halves): scales applied to the finished sum, and to
decoded values."""
PREFILL = 512  # beyond this many tokens NVFP4 is rewritten as FP8 for the product, where 8-bit activations are allowed
_SHARED_BYTES = 227 << 10


def to_dict(choice: Choice) -> dict[str, Any]:
    """Returns the fields, JSON-ready."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(choice, cls))
    return {"kernel": kind, **asdict(choice)}


def from_dict(data: dict[str, Any]) -> Choice:
    """Undoes `to_dict`."""
    return _KINDS[data["kernel"]](**{key: value for key, value in data.items() if key != "kernel"})


def bucket(tokens: int) -> int:
    """Returns the number of tokens that stands for `tokens` in tables: the next power of two, or multiple of 64."""
    # At most 4096.
    # With few tokens the time hardly depends on their number; with many, on how evenly their tiles fill the SMs.
    return min(-(-tokens // FEW) * FEW, 4096) if tokens > FEW else 1 << max(tokens - 1, 0).bit_length()


def guess(
    format: Format, tokens: int, shape: tuple[int, int], hardware: Hardware, prepacked: bool, *, stored: bool = True
) -> Choice:
    """Returns a launch for a shape without a measurement; the same for every call, and found at once."""
    # With few tokens reading W takes all the time, and needs a few programs on every SM: K is split until there are.
    # With many, Hopper's kernel decodes the weight while it multiplies; a weight that it does not take is written in 16
    # bit and multiplied by the library. `stored` says whether Hopper's kernel may read codes of a checkpoint.
    # Hopper's kernel for many tokens (words, then stored codes), its kernel for few, the library, the portable one.
    rows, columns = shape
    if prepacked and tokens > FEW:
        return _quickest(tokens, shape, hardware)
    # Whether that kernel is the fastest for stored codes at this number of tokens.
    is_many = tokens > STORED_FEW and (tokens <= STORED_MOST or not format.block[1])
    if not prepacked and stored and is_many and takes_stored(format, shape, hardware):
        return _quickest(tokens, shape, hardware, format)
    if prepacked and tokens > PREPACKED_FEW:
        return prefill_tiles(64, 1, hardware)
    if prepacked:
        block_m = next(size for size in (8, 16, 64) if tokens <= size)
        warps, resident, depth = GLUON_LAUNCHES[block_m][0]
        if block_m == 64 and rows < 8192:
            # Few rows are cut into more parts, whose sums take time: smaller tiles have fewer parts each.
            warps, resident, depth = 4, 2, 2
        return gluon_tiles(block_m, warps, resident, hardware, depth)
    if tokens > FEW:
        return DENSE
    block_m = max(16, bucket(tokens))
    return Tiles(block_m, 64, 128, _splits(-(-rows // 64), columns, 128, hardware.sms * 4))


def takes_stored(format: Format, shape: tuple[int, int], hardware: Hardware) -> bool:
    """Returns whether the kernel for many tokens takes a weight in checkpoint order, with rows that TMA can address."""
    rows, columns = shape
    # 16 bytes of codes; of E8M0, two scales.
    least = 64 if format.scale.bits == 8 else 128 // format.element.bits
    whole = rows % 8 == 0 and columns % least == 0 and columns % (format.block[1] or 1) == 0
    return hardware.has_wgmma and format.name in STORED_FORMATS and whole


def _quickest(tokens: int, shape: tuple[int, int], hardware: Hardware, format: Format | None = None) -> Choice:
    """Returns the launch for many tokens with the least predicted time, from times measured on an H100."""
    # `format` is the format of codes in the checkpoint's order; it is None for a prepacked weight.
    # Tiles go out in rounds, one to each SM, and the last round may leave some of them idle. Where tiles are cut,
    # always so by the kernel for few tokens, their sums cost time once.
    rows, columns = shape
    units = PREFILL_UNITS
    if format is not None:
        units = {size: pair[format.block[1] > 0] for size, pair in STORED_UNITS.items()}
    prefill = _prefill_times(tokens, shape, units, hardware, format)
    if format is not None:
        return _least(prefill)
    times: list[tuple[float, Choice]] = [*prefill]
    steps = -(-columns // 128)
    for block_m, (once, unit) in _CUT_UNITS.items():
        count = -(-rows // 128) * -(-tokens // block_m)
        times.append((once + count * steps / hardware.sms * unit, gluon_tiles(block_m, 8, 1, hardware)))
    return _least(times)


def quickest_in_e4m3(tokens: int, shape: tuple[int, int], hardware: Hardware) -> PrefillTiles:
    """Returns the launch of `sm90_e4m3_rows.multiply_in_e4m3` with the least predicted time."""
    return _least(_prefill_times(tokens, shape, E4M3_UNITS, hardware, x_bytes=1))


def _least(times: list[tuple[float, _Choice]]) -> _Choice:
    return min(times, key=lambda pair: pair[0])[1]


def _prefill_times(
    tokens: int, shape: tuple[int, int], units: Mapping[tuple[int, int], float], hardware: Hardware,
    format: Format | None = None, x_bytes: int = 2,
) -> list[tuple[float, PrefillTiles]]:  # fmt: skip
    """Returns launches of the kernel for many tokens behind their predicted microseconds; `units` has its sizes."""
    rows, columns = shape
    times = []
    for (block_m, halves), unit in units.items():
        choice = prefill_tiles(block_m, halves, hardware, format, x_bytes=x_bytes)
        steps = -(-columns // choice.step)
        count = -(-rows // (128 * halves)) * -(-tokens // block_m)
        # Microseconds of a launch = start + rounds of whole tiles + the cut tiles of the last round + the ends.
        programs, full, cut, parts = deal(count, hardware.sms, steps)
        rounds, part = -(-full // programs), -(-steps // parts) if cut else 0
        ends = (rounds * _END + (_CUT if cut else 0)) * block_m * halves / 128
        times.append((_START + (rounds * steps + part) * choice.step / 128 * unit + ends, choice))
    return times


def candidates(
    format: Format, tokens: int, shape: tuple[int, int], hardware: Hardware, prepacked: bool
) -> list[Choice]:
    """Returns the launches worth timing for a shape, the guess first."""
    rows, columns = shape
    choices: list[Choice] = [guess(format, tokens, shape, hardware, prepacked)]
    if prepacked:
        least = next(size for size in GLUON_LAUNCHES if tokens <= size or size == 256)
        for block_m, launches in GLUON_LAUNCHES.items():
            # Tiles smaller than the number of tokens read W more than once, and may still be faster.
            if min(64, least) <= block_m <= least:
                choices += [gluon_tiles(block_m, *launch[:2], hardware, launch[2]) for launch in launches]
        if tokens > FEW:
            choices += [prefill_tiles(*size, hardware) for size in PREFILL_UNITS]
        elif tokens > PREPACKED_FEW:
            choices += [prefill_tiles(*size, hardware) for size in PREFILL_UNITS if size[0] == FEW]
    elif tokens <= FEW:
        block_m = max(16, bucket(tokens))
        for block_n, block_k, warps, stages in ((64, 128, 4, 4), (32, 256, 4, 4), (128, 128, 4, 3), (64, 256, 4, 3)):
            for swap in (False, True):
                if swap and block_n < 64:
                    continue
                splits = _splits(-(-rows // block_n), columns, block_k, hardware.sms * 3)
                choices.append(Tiles(block_m, block_n, block_k, splits, swap, warps, stages))
    else:
        for block_m, block_n, block_k, warps, stages in (
            (64, 128, 64, 4, 4),
            (128, 128, 64, 8, 3),
            (128, 256, 64, 8, 3),
        ):
            for swap in (False, True):
                splits = _splits(-(-rows // block_n) * -(-tokens // block_m), columns, block_k, hardware.sms)
                choices.append(Tiles(block_m, block_n, block_k, splits, swap, warps, stages))
    if not prepacked and tokens > STORED_FEW and takes_stored(format, shape, hardware):
        choices += [prefill_tiles(*size, hardware, format) for size in STORED_UNITS]
    if tokens > FEW:
        choices.append(DENSE)
    return list(dict.fromkeys(choices))


def _splits(tiles: int, columns: int, block_k: int, programs: int) -> int:
    """Returns the number of parts of K that give about `programs` programs, each with two steps or more."""
    # Powers of two, so that few variants are compiled.
    ideal = programs / max(tiles, 1)
    most = max(columns // (2 * block_k), 1)
    splits = 1
    while splits * 2 <= min(ideal, most, 32):
        splits *= 2
    return splits


def deal(tiles: int, programs: int, steps: int) -> tuple[int, int, int, int]:
    """Returns how `tiles` of `steps` units each go to `programs`, one on each SM."""
    # That is: programs that have work, tiles that are dealt out whole, tiles of the last round that are cut, and parts
    # of each cut tile. Tiles are cut where each program of that round would have less than half a tile. Equal shares of
    # all tiles would be slower, because programs at different columns share nothing in L2.
    rounds, left = divmod(tiles, programs)
    parts = min(programs // left, _MOST_PARTS, max(steps // 4, 1)) if left else 1
    if parts < 2:
        return min(tiles, programs), tiles, 0, 1
    return programs if rounds else left * parts, rounds * programs, left, parts


def gluon_tiles(block_m: int, warps: int, resident: int, hardware: Hardware, depth: int = 2) -> GluonTiles:
    """Returns a launch that fills every SM: as many stages as its shared memory has room for."""
    slot = depth * (block_m * 128 + warps // 4 * 2304) + 16
    # Each program has a kilobyte of the system's own.
    stages = min(((_SHARED_BYTES // resident) - 2048) // slot, 16)
    return GluonTiles(block_m, hardware.sms * resident, warps, resident, depth, stages)


def prefill_tiles(
    block_m: int, halves: int, hardware: Hardware, format: Format | None = None, *, groups: int | None = None,
    x_bytes: int = 2, resident: int = 1,
) -> PrefillTiles:  # fmt: skip
    """Returns a launch for many tokens, with as many stages as fit in shared memory next to a tile of y in 16 bit."""
    # `format` is the format of codes in the checkpoint's order; None is a prepacked weight, whose scales are fetched
    # with it. An element of x takes `x_bytes`, and an SM has `resident` programs. By default, tiles of prepacked words
    # have the number of groups that was fastest: two from 64 tokens on.
    if groups is None:
        groups = 2 if block_m >= 64 and halves == 1 and format is None else 1
    room = _SHARED_BYTES // resident - 2048 - block_m * halves * 256
    # Bytes of a stage: 64 columns of x; W as words with their scales, or as stored codes.
    slot = block_m * 64 * x_bytes + halves * (4608 if format is None else 1024 * format.element.bits)
    depth = 2 if room // (2 * slot + 16) > 2 else 1
    if groups == 2 and block_m <= 96:
        depth = 4
    stages = min(room // (depth * slot + 16), 8)
    programs = hardware.sms * resident
    return PrefillTiles(block_m, halves, programs, depth, stages, groups=groups, resident=resident)


# With at most this many tokens, reading the weight takes all the time, and a launch for more tokens serves fewer. From
# there to `FEW`, each power of two has its own tile.
_SAME = 16
edition = 0  # counts the changes of this machine's tables in this process: a choice from an earlier one is out of date
_SHIPPED = Path(__file__).with_name("tuned")


@dataclass(frozen=True)
class MeasuredChoice:
    """A measured candidate: microseconds a call, and its largest error relative to the largest output."""

    choice: Choice
    microseconds: float
    error: float


def look_up(gpu: Hardware, format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> Choice | None:
    """Returns the launch measured for a shape and this number of tokens, or for the next larger one, or None."""
    table, count = _table(gpu.name), bucket(tokens)
    if count <= FEW:
        most = max(_SAME, count)
    elif prepacked:
        # Tiles that go evenly into the SMs for one number of tokens do not for another; the guess knows.
        most = count
    else:
        most = 8 * count
    while count <= most:
        choice = table.get(key(format, count, shape, prepacked))
        if choice is not None:
            return choice
        count = 1 << count.bit_length()
    return None


def key(format: Format, tokens: int, shape: tuple[int, int], prepacked: bool) -> str:
    """Returns the name of an entry; to the kernel for prepacked weights, MXFP4 is NVFP4."""
    layout = "nvfp4|prepacked" if prepacked else f"{format}|checkpoint"
    return f"{layout}|{bucket(tokens)}|{shape[0]}|{shape[1]}"


@lru_cache(maxsize=8)
def _table(gpu: str) -> dict[str, Choice]:
    """Returns shipped entries, and entries measured here on top."""
    entries: dict[str, Choice] = {}
    for path in (_SHIPPED / f"{gpu}.json", cache_file(gpu)):
        if path.exists():
            entries |= read_json(path, "a table of launches; delete it", _choices)
    return entries


def _choices(document: Any) -> dict[str, Choice]:
    try:
        return {name: from_dict(entry["choice"]) for name, entry in document["entries"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def count_entries(gpu: Hardware) -> int:
    """Returns how many shapes have a measured launch."""
    return len(_table(gpu.name))


def cache_file(gpu: str) -> Path:
    """Returns the file with the launches measured here: `$BLOCKSCALE_CACHE`, else `~/.cache/blockscale`."""
    folder = Path(os.environ.get("BLOCKSCALE_CACHE") or Path.home() / ".cache" / "blockscale")
    safe = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    return folder / f"tuned-{safe}-triton{_version('triton')}-blockscale{_version('blockscale')}.json"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def store(gpu: Hardware, entries: dict[str, MeasuredChoice]) -> Path:
    """Adds measured entries to this machine's table, whose file is replaced as a whole and returned."""
    path = cache_file(gpu.name)
    table = {
        "gpu": gpu.name,
        "entries": json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else {},
    }
    table["entries"].update({name: to_entry(timing) for name, timing in entries.items()})
    write_atomically(path, json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n")
    _table.cache_clear()
    global edition
    edition += 1
    return path


def to_entry(timing: MeasuredChoice) -> dict[str, Any]:
    """Returns the entry of a table, JSON-ready."""
    return {"choice": to_dict(timing.choice), "microseconds": round(timing.microseconds, 2)}
