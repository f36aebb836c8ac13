"""A `Goal` holds the budgets and limits of an allocation, a `Constraint` restricts the formats of single layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from quant.base.errors import UserError, did_you_mean
from quant.calibration.allocation.record import Budget, BudgetKind
from quant.calibration.sensitivity.costs import Timing, get_timing
from quant.calibration.sensitivity.table import KEPT
from quant.formats.format import is_16bit
from quant.kernels.base.hardware import GPUS
from quant.recipes.targets import TARGETS


@dataclass(frozen=True)
class Goal:
    """The budgets of an allocation, which hold together, and at most one limit on the loss.

    Attributes:
        bits: per weight, over all weights that formats are chosen for, every scale and pad counted.
        fit: bytes for all weights and the KV cache of `context` × `batch` tokens.
        context: tokens a sequence.
        batch: sequences.
        latency: seconds of one decoding step with that cache, on the GPU or table that `target` names.
        target: runtimes (only their formats are offered) and at most one GPU or table of kernel times.
        max_kl: largest measured KL(base‖model); of classes for a classifier, 1 − cosine for an encoder.
        max_ppl_increase: largest relative increase of perplexity.
    """

    bits: float | None = None
    fit: float | None = None
    context: int = 4096
    batch: int = 1
    latency: float | None = None
    target: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: float | None = None

    def __post_init__(self) -> None:
        # Two limits would need two searches: the smallest model for one may break the other.
        if self.max_kl is not None and self.max_ppl_increase is not None:
            raise UserError("give one limit on the loss: --max-kl or --max-ppl-increase")
        if not self.has_limit and self.bits is None and self.fit is None and self.latency is None:
            raise UserError("nothing to allocate for: give --bits, --fit, --latency, --max-kl or --max-ppl-increase")
        for name in ("bits", "fit", "latency", "max_kl", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')} {value:g}: give a finite number above zero")
        timing = self.timing  # also without --latency: an unknown target is refused here
        if self.latency is not None and timing is None:
            raise UserError("--latency needs the GPU or a table of kernel times: --target h100, or --target FILE.json")

    @property
    def has_limit(self) -> bool:
        """Whether the loss is limited and the size minimized; otherwise the size is limited and the loss minimized."""
        return self.max_kl is not None or self.max_ppl_increase is not None

    @property
    def by_perplexity(self) -> bool:
        """Whether the limit is on the increase of perplexity."""
        return self.max_ppl_increase is not None

    @property
    def limit(self) -> float | None:
        """The limit on the loss, in its own unit."""
        return self.max_ppl_increase if self.max_kl is None else self.max_kl

    @property
    def timing(self) -> Timing | None:
        """Kernel times of the target."""
        # `--target` takes runtimes, GPUs and tables of kernel times alike; runtimes have no times.
        names = [name for name in self.target if name not in TARGETS]
        unknown = [name for name in names if name not in GPUS and not name.endswith(".json")]
        if unknown:
            raise UserError(
                f"unknown target {unknown[0]!r}; known runtimes: {', '.join(TARGETS)}; known GPUs: {', '.join(GPUS)}; "
                f"or a table of kernel times, FILE.json{did_you_mean(unknown[0], [*TARGETS, *GPUS])}"
            )
        if len(names) > 1:
            raise UserError(f"more than one GPU among the targets: {', '.join(names)}")
        return get_timing(names[0]) if names else None

    @property
    def budget(self) -> Budget:
        """The limit on the loss if there is one, else the first budget, for the record."""
        # A limit on the loss comes first: with one, budgets are side conditions.
        named = (
            (BudgetKind.KL, self.max_kl), (BudgetKind.PERPLEXITY, self.max_ppl_increase), (BudgetKind.BITS, self.bits),
            (BudgetKind.BYTES, self.fit), (BudgetKind.SECONDS, self.latency),
        )  # fmt: skip
        return next(Budget(kind, value) for kind, value in named if value is not None)


class ConstraintKind(StrEnum):
    """How a constraint relates a group's format to the format that it names."""

    PIN = "pin"  # this one and no other
    FORBID = "forbid"  # any but this one
    AT_LEAST = "at_least"  # no fewer bits than this one

    @property
    def option(self) -> str:
        """The option of `quantize` that makes such constraints."""
        return f"--{self.replace('_', '-')}"


@dataclass(frozen=True)
class Constraint:
    """A restriction on the formats of the groups that a glob matches."""

    kind: ConstraintKind
    match: str
    format: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ConstraintKind(self.kind))

    @classmethod
    def parse(cls, kind: ConstraintKind, text: str) -> Constraint:
        """Parses `GLOB=FORMAT`."""
        # From the right: a glob may hold "=", a format may not.
        match, separator, format_ = text.rpartition("=")
        if not separator or not match or not format_:
            raise UserError(f"{kind.option} {text!r}: write it as GLOB=FORMAT, such as '*.down_proj=fp8'")
        return cls(kind, match, KEPT.name if is_16bit(format_) else format_)


# `Options` are the settings of an allocation: formats on offer, solver and scoring. The goal is apart.


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
    """The settings of an allocation."""

    formats: str | Sequence[str] = DEFAULT_FORMATS
    solver: str = "rtn"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()
    kv_cache: str | None = None  # format of the KV cache, or None for 16 bit
    run: RunModel | None = None
    provenance: Mapping[str, Any] | None = None
    method: str = "fisher"
    # dtype to which 16-bit tensors are widened while measuring; None leaves them
    dtype: torch.dtype | None = torch.float32
    seed: int = 0
    path: Path | None = None  # file of the sensitivity table; None writes none
