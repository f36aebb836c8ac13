"""An `AllocationRequest` holds budgets and limits as the user writes them, and makes the goal of an allocation of them.

bits, fit, latency           budgets: bits per weight, memory, time of a decoding step
max_kl, max_ppl_increase     limits on the measured loss
the other fields             formats to choose from, and how they are scored
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.calibration.allocation.measure_choices import Effort
from quant.calibration.allocation.goal import Constraint, ConstraintKind, Goal
from quant.allocation.options import DEFAULT_FORMATS
from quant.calibration.sensitivity.costs import parse_quantity
from quant.base.errors import Spelling, UserError, as_option

_BUDGETS = ("bits", "fit", "latency", "max_kl", "max_ppl_increase")


@dataclass(frozen=True)
class AllocationRequest:
    """Budgets with their units, limits, and the formats to choose from; see `quant.Goal` for their meaning."""

    bits: float | None = None
    fit: str | None = None
    ctx: str = "4096"
    batch: int = 1
    latency: str | None = None
    target: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    formats: str | Sequence[str] | None = None
    method: str | None = None
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    sensitivity: Path | None = None
    search: int | None = None

    def goal(self, spell: Spelling = as_option) -> Goal | None:
        """Returns the goal of the allocation; None where no budget and no limit is given.

        Raises:
            UserError: a quantity that cannot be read, or an option that has no meaning without a budget.
        """
        self._check_sizes(spell)
        if all(getattr(self, budget) is None for budget in _BUDGETS):
            self._check_without_budget(spell)
            return None
        return Goal(
            bits=self.bits,
            fit=read_quantity(spell("fit"), self.fit, "size"),
            context=int(read_quantity(spell("ctx"), self.ctx, "count") or 0),
            batch=self.batch,
            latency=read_quantity(spell("latency"), self.latency, "time"),
            target=self.target,
            max_kl=self.max_kl,
            max_ppl_increase=read_quantity(spell("max_ppl_increase"), self.max_ppl_increase, "ratio"),
        )

    @property
    def effort(self) -> Effort:
        """The numbers of rows and measurements of the allocation."""
        return Effort(measurements=self.search)

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `allocate` that are given here."""
        constraints = [Constraint.parse(kind, text) for kind in ConstraintKind for text in getattr(self, kind)]
        return {
            "formats": self.formats or DEFAULT_FORMATS,
            "method": self.method or "fisher",
            "constraints": constraints,
            "path": self.sensitivity,
            "effort": self.effort,
        }

    def _check_sizes(self, spell: Spelling) -> None:
        """Refuses a context or batch that no budget uses."""
        for size, users in (("ctx", ("fit",)), ("batch", ("fit", "latency"))):
            # The class attribute of a dataclass field is its default; a default that is given explicitly does no harm.
            is_given = getattr(self, size) != getattr(type(self), size)
            if is_given and all(getattr(self, user) is None for user in users):
                named = " and ".join(map(spell, users))
                raise UserError(f"{spell(size)} means something to {named} only; leave it out, or give one too")

    def _check_without_budget(self, spell: Spelling) -> None:
        """Refuses options of an allocation without a budget."""
        for name in ("formats", "method", "target", "pin", "forbid", "at_least", "sensitivity"):
            if getattr(self, name):
                raise self._needs_budget(name, spell)
        if self.search is not None:
            raise self._needs_budget("search", spell)

    def _needs_budget(self, name: str, spell: Spelling) -> UserError:
        first, *middle, last = map(spell, _BUDGETS if spell is as_option else ("bits", "max_kl"))
        # The parameters of `quant.quantize` are fewer than the options: a message names only those the user has.
        budgets = " or ".join((", ".join((first, *middle)), last))
        return UserError(f"{spell(name)} needs something to allocate for: {budgets}")


def read_quantity(option: str, text: str | None, kind: str) -> float | None:
    """Returns a quantity with its unit, such as 24GB.

    Raises:
        UserError: it cannot be read; the message names the option.
    """
    try:
        return None if text is None else parse_quantity(text, kind)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None
