"""`run_units` divides work among ranks, keeps results on disk and adds them up in one order.

A unit has a name and a small dict of numbers as its result, which depends only on the name. Rank r of n does the units
r, r + n, r + 2n, …; then every rank gets all results and adds them up in the order of the names, so that sums of
floating-point numbers are the same, to the bit, on any number of ranks. After each unit a rank writes its results to a
file of its own; a run that is started again, on any number of ranks, reads all files and does the remaining units.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quant.base.atomic import write_atomically
from quant.base.json_files import read_json, typed
from quant.calibration.ranks import gathered, rank_and_world, wait_for_all
from quant.calibration.session import Session

Result = dict[str, dict[str, float]]


def run_units(
    names: Sequence[str],
    work: Callable[[str], Result],
    session: Session,
    *,
    key: str = "",
    path: Path | None = None,
) -> dict[str, Result]:
    """Returns the results of all units by name.

    Args:
        path: partial results are written to files of this name with a suffix; None writes none.
    """
    rank, world = session.rank, session.world
    # All ranks must start from the same results, or they would divide the other units differently: one rank may have
    # read the files before another wrote its first result.
    done = _from_all(_read(path, key) if path else {})
    names_of_rank = [name for name in names if name not in done][rank::world]
    own: dict[str, Result] = {}
    for count, name in enumerate(names_of_rank, 1):
        own[name] = work(name)
        # After each unit, with the results of earlier runs: a file of a rank is only ever written by that rank.
        if path is not None:
            held = {"key": key, "units": {**_units_in(_part(path, rank), key), **own}}
            write_atomically(_part(path, rank), json.dumps(held, allow_nan=False))
        session.report("score", len(names) - len(names_of_rank) + count, len(names))
    done = _from_all({**done, **own})
    return {name: done[name] for name in names}


def _from_all(own: dict[str, Result]) -> dict[str, Result]:
    """Returns the results of all ranks together."""
    return {name: result for part in gathered(own) for name, result in part.items()}


def total(results: dict[str, Result]) -> Result:
    """Returns the sum over units, in their order."""
    sums: Result = {}
    for result in results.values():
        for group, scores in result.items():
            group_sums = sums.setdefault(group, {})
            for name, value in scores.items():
                group_sums[name] = group_sums.get(name, 0.0) + value
    return sums


def remove_parts(path: Path) -> None:
    """Deletes, on the first rank, the files of partial results of `path`, once the whole table is written."""
    wait_for_all()
    if rank_and_world()[0] == 0:
        for part in _parts(path):
            part.unlink(missing_ok=True)


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.part{rank}")


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.part*")) if path.parent.is_dir() else []


def _read(path: Path, key: str) -> dict[str, Result]:
    units: dict[str, Result] = {}
    for part in _parts(path):
        units |= _units_in(part, key)
    return units


def _units_in(part: Path, key: str) -> dict[str, Result]:
    try:
        held = read_json(part, "partial scores", lambda fields: typed(dict[str, Any], fields, "scores"))
        own: dict[str, Result] = typed(dict[str, Result], held.get("units"), "units")
    except (OSError, ValueError):  # a damaged file costs its units, not the run
        return {}
    return own if held.get("key") == key else {}
