"""A solver's name is parts joined by "+", in one order.

    scaling + rotation + lowrank + residual + rounding + autoround

    awq+gptq, rotation:64+gptq, awq+lowrank:16+gptq, awq:merge+residual:32+gptq

A name lists the parts, each with a number if it takes one; `calibration.solvers` implements them. `:merge` after a
scaling or a rotation leaves it out where no neighbouring module can absorb it; `rotation:learned` is a merged rotation
of the residual stream that is learned from calibration data. Plans hold names, so a plan can be checked without
importing a solver.

An effort is a number from 0 to 3 that selects a solver, for users who do not want to choose one. A solver that a
recipe, a plan or the user names goes before it.

    0   rounds to nearest: seconds
    1   searches the scales of blocks by their squared error: no data
    2   solves each layer on calibration text by second-order rounding, and scales 4-bit inputs before
    3   rounds for the loss of the whole model instead, by the gradients at the outputs of layers, and scales inputs
        wherever they are rounded
"""

from functools import cache
from typing import NamedTuple

from quant.base.errors import did_you_mean, known_names
from quant.formats.format import get_format, is_16bit

METHODS = {
    "rtn": "rounds to nearest, scales from the largest magnitude of each block",
    "mse": "searches the scale of each block by its squared error",
    "four_over_six": "scales a block's largest magnitude to 4 or to 6, whichever has the smaller error",
    "ocp": "exponents as in the MX specification, rounded down",
    "even": "exponents of the largest magnitude rounded to an element, as torchao and llm-compressor have them",
    "modelopt": "the bytes of ModelOpt",
    "compressed_tensors": "the bytes of llm-compressor",
    "local_hessian": "block scales by the output error of their own block",
    "gptq": "second-order rounding for the layer's output; makes up for errors of the layers before",
    "kfac": "second-order rounding for the loss of the whole model",
    "gptq_plain": "gptq without the error of the residual stream",
    "awq": "scales input channels by the power of their magnitudes that leaves the smallest output error",
    "smoothquant": "moves half of each channel's range from inputs to weights",
    "rotation": "turns inputs by a block Hadamard, at run time or merged, or the residual stream as learned for FP8",
    "lowrank": "a low-rank branch in 16 bit in parallel to the weight, as in SVDQuant",
    "residual": "gives the rounding errors of the input channels that matter most as further inputs, as in ARCQuant",
    "autoround": "learns rounding and scales of a finished block, for the block's output",
}
"""The method of each part in one line, which `quant solvers` shows; `calibration.solvers` has a solver of each name."""
TRANSFORMS = ("awq", "smoothquant")
# Steps that take a number, with its default: largest block, rank, channels, optimizer steps.
STEPS = {"rotation": 128, "lowrank": 32, "residual": -1, "autoround": 200}
ROUNDINGS = tuple(name for name in METHODS if name not in (*TRANSFORMS, *STEPS))
_DATA_FREE = {"rtn", "mse", "four_over_six", "ocp", "even", "modelopt", "compressed_tensors"}
MERGE, LEARNED = "merge", "learned"
OBSERVERS = ("absmax", "percentile", "mse", "entropy")
DEFAULT_OBSERVER = "absmax"
"""Static activation scales from the largest magnitude that calibration has seen."""


class SolverSpec(NamedTuple):
    """A solver's name, taken apart."""

    name: str  # as recipes and commands spell it
    transforms: tuple[str, ...]  # keys of the input scalings, in order
    rotation: int  # largest block of a rotation at run time; 0 for none
    merged: frozenset[str]  # the scalings, or "rotation", that are left out where no module around can absorb them
    rank: int  # of the 16-bit branch; 0 for none
    residual: int  # residual channels of an input; 0 for none, -1 for as many in each layer as are worth their bits
    rounding: str  # key of the solver that gives codes and scales
    autoround: int  # optimizer steps of the block-wise reconstruction; 0 for none
    learns_rotation: bool  # whether the rotation of the residual stream is learned; else it is of Hadamard blocks

    @property
    def merges_rotations(self) -> bool:
        """Whether rotations are merged into the modules around, before anything else."""
        return "rotation" in self.merged

    @property
    def needs_data(self) -> bool:
        """Whether it works from calibration inputs."""
        parts = self.transforms or self.rotation or self.merged or self.rank or self.residual or self.autoround
        return bool(parts) or self.rounding not in _DATA_FREE


@cache
def parse_solver(name: str) -> SolverSpec:
    """Returns the parts of a solver's name; ValueError for an unknown part, or one out of order."""
    # The order of parts in a name. Parts of the same order may follow each other, except two roundings.
    order = {**dict.fromkeys(TRANSFORMS, 0), "rotation": 1, "lowrank": 2, "residual": 3}
    order |= {**dict.fromkeys(ROUNDINGS, 4), "autoround": 5}
    numbers, merged, last = dict[str, int](), set[str](), 0
    for part in name.split("+"):
        key, _, number = part.partition(":")
        if key not in order:
            raise ValueError(
                f"unknown solver {key!r}; known solvers: {', '.join(ROUNDINGS)}; joined to them by '+', before: "
                f"{', '.join(f'{transform}[:{MERGE}]' for transform in TRANSFORMS)}, rotation[:block], "
                f"rotation:{MERGE} or rotation:{LEARNED}, lowrank[:rank], residual[:channels]; after: autoround[:steps]"
                f"{did_you_mean(key, order)}"
            )
        if order[key] < last or key in numbers or (order[key] == last == 4):
            raise ValueError(
                f"solver {name!r}: {key!r} comes too late; the order is "
                "scaling+rotation+lowrank+residual+rounding+autoround"
            )
        last = order[key]
        if (number == MERGE and key in (*TRANSFORMS, "rotation")) or part == f"rotation:{LEARNED}":
            merged.add(key)
        elif number and (key not in STEPS or not number.isdecimal() or int(number) < 1):
            raise ValueError(
                f"solver {name!r}: {part!r}; only {', '.join(STEPS)} take a number, a whole one from 1, and only "
                f"{', '.join(TRANSFORMS)} and rotation :{MERGE}{did_you_mean(number, (MERGE, LEARNED))}"
            )
        numbers[key] = 0 if key in merged else int(number or STEPS.get(key, 0))
    channels = numbers.get("residual", 0)
    if channels and ((channels != STEPS["residual"] and channels % 16) or numbers.keys() & {"lowrank", "autoround"}):
        raise ValueError(
            f"solver {name!r}: residual channels are a multiple of 16, and stand without lowrank and autoround; take "
            "residual, which chooses their number for each layer, or residual:32"
        )
    # The parts with numbers work from data already; scalings without them (awq) keep the cheap search of scales.
    implied = "gptq" if numbers.keys() & STEPS.keys() else "mse"
    return SolverSpec(
        name,
        transforms=tuple(key for key in numbers if key in TRANSFORMS),
        rotation=numbers.get("rotation", 0),
        merged=frozenset(merged),
        rank=numbers.get("lowrank", 0),
        residual=channels,
        rounding=next((key for key in numbers if key in ROUNDINGS), implied),
        autoround=numbers.get("autoround", 0),
        learns_rotation=f"rotation:{LEARNED}" in name.split("+"),
    )


def check_observer(name: str) -> None:
    """Raises ValueError for an unknown observer; the message lists the known ones."""
    if name not in OBSERVERS:
        raise ValueError(f"unknown observer {name!r}; {known_names(name, OBSERVERS, 'observers')}")


def with_branch(name: str, rank: int) -> str:
    """Returns the solver `name` with a low-rank branch before its rounding, in place of one that it may name."""
    rounding, parts = parse_solver(name).rounding, name.split("+")
    before = [part for part in parts if part.partition(":")[0] not in ("lowrank", rounding, "autoround")]
    after = [part for part in parts if part.partition(":")[0] == "autoround"]
    return "+".join([*before, f"lowrank:{rank}", rounding, *after])


def without_residual(name: str) -> str:
    """Returns the solver `name` without its residual channels, with the rounding that they imply."""
    rounding = parse_solver(name).rounding
    parts = [part for part in name.split("+") if part.partition(":")[0] not in ("residual", rounding)]
    return "+".join([*parts, rounding]) if parse_solver(name).residual else name  # beside which no autoround stands


EFFORTS = (0, 1, 2, 3)
DEFAULT_EFFORT = 2
"""The effort of `quantize` where nothing names a solver or an effort, and no budget chooses formats."""

_ROWS = 32
# Parameters of a model below which rows cost so little time and memory that it gets four times as many.
_SMALL = 1_000_000_000


def rows_of(solver: str, *, on_gpu: bool, parameters: int | None = None) -> int:
    """Returns how many rows of the default text a solver gets: 32; on a GPU up to 128 for `gptq`, 512 for `kfac`.

    In NVFP4, SmolLM2's weights lose 10 % less by `gptq` on 128 rows than on 32. By `kfac` they lose 8 % less on 128
    rows than on 32, and 6 % less on 512 than on 128. On a CPU, where each row takes seconds, that is not worth the
    time. Inputs of a block are kept for all rows, which takes gigabytes with large models. A model of an unknown number
    of `parameters` counts as large.
    """
    parts = solver.split("+")
    if not on_gpu or not {"gptq", "kfac"} & set(parts):
        return _ROWS
    rows = 4 * _ROWS if "kfac" in parts else _ROWS
    return 4 * rows if parameters is not None and parameters < _SMALL else rows


def solver_of(effort: int, activation: str, *, experts: bool = False, denoiser: bool = False) -> str:
    """Returns the solver that an effort, from 0 to 3, stands for; `activation` is the format of inputs.

    A model with `experts` gets no scaling: to find where scales can go, a block is copied in float64, which is too
    large with hundreds of them. A `denoiser` gets a low-rank branch where inputs have 4 bits, and from effort 3 on
    where they are rounded at all: it loses a third of what scaling does (docs/diffusion.md) and costs little at the
    many tokens of an image.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort {effort!r}: expected a whole number from 0 to 3")
    if effort < 2:
        return ("rtn", "mse")[effort]
    scaling = "" if experts else "awq:merge+"
    four_bits = not is_16bit(activation) and get_format(activation).element.bits == 4
    # Beside inputs of 8 bits a branch leaves a sixth of the loss by kfac alone; at effort 2 they need none.
    if denoiser and (four_bits or (effort == 3 and not is_16bit(activation))):
        return f"lowrank:{STEPS['lowrank']}+{'gptq' if effort == 2 else 'kfac'}"
    if effort == 2:
        # Scaling moves magnitude from inputs to weights, which pays where inputs have the coarser grid; 8-bit inputs
        # lose little.
        return f"{scaling if four_bits else ''}gptq"
    # Neither merged rotations nor learned rounding of finished blocks (AutoRound) gained as much, at minutes on a GPU.
    return f"{'' if is_16bit(activation) else scaling}kfac"
