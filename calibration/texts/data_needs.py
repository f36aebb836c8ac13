"""A plan may need calibration data: which layers do and why, and the plan of a lower effort where none is to be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts.mixture import Record
from quant.base.errors import UserError
from quant.recipes.plan_make import without_data
from quant.recipes.plan import LayerPlan, Plan

T = TypeVar("T")

_DYNAMIC = "a format whose inputs are scaled as they come, such as fp8_channel or mxfp8"


class NoTextError(UserError):
    """A plan needs calibration text, and there is none.

    Args:
        plan: the plan whose layer the message names.
        reason: the reason why no text could be found.
    """

    def __init__(self, plan: Plan, reason: str) -> None:
        super().__init__(f"{lacks_data(plan)} ({reason})")
        self.reason = reason


def solver_needs_data(layer: LayerPlan) -> bool:
    """Returns whether the layer's solver looks at its inputs."""
    return get_pipeline(layer.solver).needs_data


def lacks_data(plan: Plan) -> str | None:
    """Returns the error message for a plan that needs calibration text and has none.

    None where the plan needs no text.
    """
    # The most specific reason comes first: a solver or a static scale names a layer, guard and KV cache the whole plan.
    way_out = "pass calibration data: --calib SOURCE, or data= in Python"
    for layer in plan.quantized:
        if solver_needs_data(layer):
            return f"{layer.name}: solver {layer.solver} looks at inputs; {way_out}"
        if layer.has_static_scale:
            return f"{layer.name}: {layer.activation} inputs have a static scale; {way_out}, or choose {_DYNAMIC}"
    if plan.guard is not None:
        return f"a guard compares layers on held-out text; {way_out}"
    return f"a KV cache in {plan.kv_cache} has static scales; {way_out}" if plan.kv_cache else None


def with_data(plan: Plan, find: Callable[[], tuple[T, list[Record]]]) -> tuple[Plan, T | None]:
    """Returns the data that `find` gives for a plan, and the plan with their records.

    Where it finds none, and an effort chose the solver that needs some, the plan of effort 1 and no data.

    Raises:
        UserError: the plan needs data, and there is none; at effort 1 too, if its effort chose a solver: the message
            then names the data that the solver needs.
    """
    try:
        data, records = find()
    except UserError as error:
        lower = without_data(plan, str(error))
        # Static scales need text at effort 1 too: the message then names a layer that the user cannot choose away by
        # effort.
        if lower is not None and lacks_data(lower) and isinstance(error, NoTextError):
            raise NoTextError(lower, error.reason) from error
        if lower is None or lacks_data(lower):
            raise
        return lower, None
    return with_calibration(plan, records), data


def with_calibration(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Plan:
    """Returns `plan` with a record of the calibration text in its provenance, one for each source."""
    return replace(plan, provenance={**plan.provenance, "calibration": list(records)})
