"""What a solver may be called: parts joined by "+", in one order.

    scaling + rotation + lowrank + rounding + autoround        awq+gptq, rotation:64+gptq, awq+lowrank:16+gptq

A name says which parts there are, and a number where a part takes one; `calibration.solver` says what they do. Plans
hold names, and a plan can be checked without any of what they stand for.
"""

from __future__ import annotations

from collections.abc import Collection

ROUNDINGS = (
    "rtn", "mse", "four_over_six", "ocp", "even", "modelopt", "compressed_tensors", "local_hessian", "gptq",
)  # fmt: skip
TRANSFORMS = ("awq", "smoothquant")
# Steps that take a number, and what it is if none is given: largest block, rank, optimizer steps.
STEPS = {"rotation": 128, "lowrank": 32, "autoround": 200}
MERGE = "rotation:merge"


def parse_solver(
    name: str, roundings: Collection[str] = ROUNDINGS, transforms: Collection[str] = TRANSFORMS
) -> dict[str, int]:
    """The parts of a solver's name in order, each with its number: 0 where it takes none, or for `rotation:merge`.

    Args:
        name: as recipes and `--solver` spell it.
        roundings, transforms: the parts of these kinds that there are.

    Raises:
        ValueError: an unknown part, a part out of order, or a number that a part does not take; the message lists the
            known ones.
    """
    order = {**dict.fromkeys(transforms, 0), "rotation": 1, "lowrank": 2, **dict.fromkeys(roundings, 3), "autoround": 4}
    found: dict[str, int] = {}
    last = 0
    for part in name.split("+"):
        key, _, number = part.partition(":")
        if key not in order:
            raise ValueError(
                f"unknown solver {key!r}; known solvers: {', '.join(roundings)}; joined to them by '+', before: "
                f"{', '.join(transforms)}, rotation[:block] or {MERGE}, lowrank[:rank]; after: autoround[:steps]"
            )
        if order[key] < last or key in found or (order[key] == last == 3):
            raise ValueError(
                f"solver {name!r}: {key!r} comes too late; the order is scaling+rotation+lowrank+rounding+autoround"
            )
        last = order[key]
        if part == MERGE:
            found[key] = 0
            continue
        if number and (key not in STEPS or not number.isdecimal() or int(number) < 1):
            raise ValueError(f"solver {name!r}: {part!r}; only {', '.join(STEPS)} take a number, a whole one from 1")
        found[key] = int(number or STEPS.get(key, 0))
    return found
