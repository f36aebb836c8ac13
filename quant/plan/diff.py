"""`diff` compares two plans: layers whose format, input, solver or place changed, and the bytes of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quant.recipes.plan import LayerPlan, Plan, bits_per_weight
from quant.recipes.resolve import QUANTIZABLE


@dataclass(frozen=True)
class Change:
    """A layer that differs between two plans; one side is None where only the other plan has it."""

    name: str
    before: LayerPlan | None
    after: LayerPlan | None

    @property
    def kind(self) -> str:
        """The change in one word or as two formats; the summary counts changes by it."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "removed"
        old, new = self.before.formats, self.after.formats
        if old != new:
            return f"{old} → {new}"
        if self.before.solver != self.after.solver:
            return f"{old}, solver {self.before.solver} → {self.after.solver}"
        return "shape, group or run-time parts"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready form."""
        sides = {"before": self.before, "after": self.after}
        return {
            "name": self.name,
            "change": self.kind,
            **{
                side: {**layer.to_dict(), "bits": layer.bits_per_weight, "bytes": layer.nbytes} if layer else None
                for side, layer in sides.items()
            },
        }


def diff(before: Plan, after: Plan) -> list[Change]:
    """Returns layers whose decision differs, in the order of `after`; reasons, scores and costs do not count."""
    changes = [
        Change(layer.name, before.by_name.get(layer.name), layer)
        for layer in after.layers
        if layer.name not in before.by_name or _decision(before.by_name[layer.name]) != _decision(layer)
    ]
    gone = [Change(layer.name, layer, None) for layer in before.layers if layer.name not in after.by_name]
    return changes + gone


def totals(plan: Plan) -> dict[str, Any]:
    """Returns the figures of a whole plan, which `diff` compares."""
    # Embeddings and heads of small models would hide the difference of two plans for the linear layers.
    own = [layer for layer in plan.layers if layer.kind in QUANTIZABLE]
    return {
        "quantized": len(plan.quantized),
        "effective_bits": plan.effective_bits,
        "bits_linear": bits_per_weight(own),
        "bytes": plan.nbytes,
        **plan.run_time,
        "guard": plan.guard,
        "observer": plan.observer,
    }


def _decision(layer: LayerPlan) -> LayerPlan:
    # The solver of a layer that stays in 16 bit decides nothing.
    return replace(layer, reason="", score=None, cost=None, solver=layer.solver if layer.weight else "")
