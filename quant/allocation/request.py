"""An `AllocationRequest` holds the options of `quantize` that ask for an allocation, as they are typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.allocation.allocate import FORMATS
from quant.allocation.bench import Effort
from quant.allocation.goal import Constraint, Goal
from quant.calibration.sensitivity.costs import parse_quantity
from quant.errors import UserError


@dataclass(frozen=True)
class AllocationRequest:
    """Budgets with their units, limits, and what may be chosen; see `quant.Goal` for what they mean."""

    bits: float | None = None
    fit: str | None = None
    ctx: str = "4096"
    batch: int = 1
    latency: str | None = None
    target: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    formats: str | None = None
    method: str | None = None
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    sensitivity: Path | None = None
    search: int | None = None

    def goal(self) -> Goal | None:
        """What is asked for; None where nothing is.

        Raises:
            UserError: a quantity that cannot be read, or an option that means nothing without a budget.
        """
        for option, given, users in (
            ("--ctx", self.ctx != type(self).ctx, {"--fit": self.fit}),
            ("--batch", self.batch != type(self).batch, {"--fit": self.fit, "--latency": self.latency}),
        ):
            if given and all(value is None for value in users.values()):
                raise UserError(
                    f"{option} means something to {' and '.join(users)} only; leave it out, or give one too"
                )
        budgets = (self.bits, self.fit, self.latency, self.max_kl, self.max_ppl_increase)
        if all(budget is None for budget in budgets):
            extras = {
                "--formats": self.formats, "--method": self.method, "--target": self.target, "--pin": self.pin,
                "--forbid": self.forbid, "--at-least": self.at_least, "--sensitivity": self.sensitivity,
                "--search": self.search is not None,
            }  # fmt: skip
            alone = [option for option, value in extras.items() if value]
            if alone:
                raise UserError(
                    f"{alone[0]} needs something to allocate for: "
                    "--bits, --fit, --latency, --max-kl or --max-ppl-increase"
                )
            return None
        return Goal(
            bits=self.bits,
            fit=_read("--fit", self.fit, "size"),
            context=int(_read("--ctx", self.ctx, "count") or 0),
            batch=self.batch,
            latency=_read("--latency", self.latency, "time"),
            target=self.target,
            max_kl=self.max_kl,
            max_ppl_increase=_read("--max-ppl-increase", self.max_ppl_increase, "ratio"),
        )

    def options(self) -> dict[str, Any]:
        """What else `allocate` takes from here."""
        constraints = [
            Constraint.parse(kind, text)
            for kind, texts in (("pin", self.pin), ("forbid", self.forbid), ("at_least", self.at_least))
            for text in texts
        ]
        return {
            "formats": self.formats or FORMATS,
            "method": self.method or "fisher",
            "constraints": constraints,
            "path": self.sensitivity,
            "effort": Effort(measurements=self.search),
        }


def _read(option: str, text: str | None, kind: str) -> float | None:
    try:
        return None if text is None else parse_quantity(text, kind)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None
