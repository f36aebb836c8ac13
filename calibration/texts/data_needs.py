"""A plan may need calibration data: which layers do and why, and the plan of a lower effort where none is to be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from quant.base.errors import UserError, megabytes
from quant.calibration.attention_names import text_config
from quant.calibration.placement import is_visited, placed
from quant.calibration.ranks import from_first
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts.mixture import Record, TextWriter, mixture_rows
from quant.calibration.texts.row_checks import run_probe
from quant.kernels.base.processor import memory_left
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_make import without_data

T = TypeVar("T")

_DYNAMIC = "a format whose inputs are scaled as they come, such as fp8_channel or mxfp8"


class NoTextError(UserError):
    """A plan needs calibration text, and there is none."""

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


# `mixed_text` has a model write calibration text for itself, for a plan that needs data where the user named none.


def mixed_text(
    model: nn.Module,
    plan: Plan,
    tokenizer: Any = None,
    session: Session | None = None,
    *,
    samples: int = 32,
    seqlen: int = 512,
    own_only: bool = False,
) -> tuple[torch.Tensor, Record]:
    """Returns calibration rows for a plan that needs data and has none: see `quant.calibration.texts.mixture`.

    Returns:
        int64 `[samples, seqlen]`, and the record of their sources.
    """
    context = getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None)
    seqlen = min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen
    session = session or Session()

    def write() -> tuple[torch.Tensor, Record]:
        why_not = _too_large(model, session)
        shape: dict[str, Any] = {"samples": samples, "seqlen": seqlen, "own_only": own_only}
        # Only samples, without the half that the model would write.
        if why_not is not None and tokenizer is not None and not own_only:
            return mixture_rows(TextWriter(model, why_not=why_not), tokenizer, session, **shape)
        with placed(model, session.device):
            rows, record = mixture_rows(TextWriter(model), tokenizer, session, **shape)
            # The model has not run yet in this case, and samples that it cannot read would fail later inside a solver.
            if "no_own_text" in record:
                run_probe(model, rows[:1, :2])
        return rows, record

    try:
        # Sampling differs between GPUs in the last bits of the logits, so ranks that each wrote would calibrate on
        # different text.
        return from_first(write)
    # An OutOfMemoryError is a RuntimeError, and no lack of text.
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise NoTextError(plan, str(error)) from error


def _too_large(model: nn.Module, session: Session) -> str | None:
    """Returns why `model` should not write text on a device where each token would read its weights again."""
    device = session.device
    if is_visited(model, device):
        return f"the model does not fit on {device}"
    size, free = sum(parameter.nbytes for parameter in model.parameters()), memory_left()
    # Mapped files that do not stay in the page cache are read from disk again for every token, which takes hours.
    if (device is None or device.type == "cpu") and free is not None and 2 * size > free:
        return f"the model takes {megabytes(size)} of memory, and {megabytes(free)} are free"
    return None
