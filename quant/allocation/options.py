"""`Options` are the settings of an allocation: formats on offer, solver and scoring. The goal is apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from quant.calibration.allocation.goal import Constraint

DEFAULT_FORMATS = ("nvfp4", "fp8")
RunModel = Callable[[nn.Module], Any]


class OptionArguments(TypedDict, total=False):
    """The attributes of `Options` as keyword arguments of `allocate` and `score`."""

    formats: str | Sequence[str]
    solver: str
    include: Sequence[str]
    exclude: Sequence[str]
    constraints: Sequence[Constraint]
    kv_cache: str | None
    run: RunModel | None
    provenance: Mapping[str, Any] | None
    method: str
    dtype: torch.dtype | None
    seed: int
    path: Path | None


@dataclass(frozen=True, eq=False)
class Options:
    """The settings of an allocation.

    Attributes:
        formats: formats to choose from, in addition to 16 bit; see `calibration.sensitivity.candidates`.
        solver: the solver that the plan will name.
        include, exclude, run: as in `quantize`.
        constraints: the constraints on groups, by glob.
        kv_cache: format of the KV cache, or None for 16 bit.
        provenance: recorded in the plan.
        method: the method of the scores, see `calibration.sensitivity.scores`.
        dtype: dtype to which 16-bit tensors are widened while measuring; None leaves them.
        seed: the seed of the tokens and directions that the method `fisher` draws.
        path: file of the sensitivity table; None writes none.
    """

    formats: str | Sequence[str] = DEFAULT_FORMATS
    solver: str = "rtn"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()
    kv_cache: str | None = None
    run: RunModel | None = None
    provenance: Mapping[str, Any] | None = None
    method: str = "fisher"
    dtype: torch.dtype | None = torch.float32
    seed: int = 0
    path: Path | None = None
