"""A plan may need data: this file says which layers do and why, finds text where none is given, and measures scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.evaluating import evaluating
from quant.calibration.listener import Progress
from quant.calibration.observers import get_observer
from quant.calibration.placement import Device, is_visited, placed
from quant.calibration.ranks import from_first
from quant.calibration.session import Session
from quant.calibration.solvers.solver import get_pipeline
from quant.calibration.statistics import static_input_scale
from quant.calibration.texts.mixture import Record, Writer, mixture_rows
from quant.calibration.walk.collect import collect_input_amax
from quant.errors import UserError, megabytes
from quant.evaluation.checks import run_probe
from quant.kernels.processor import memory_left
from quant.plan.make import without_data
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of

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
    # The order is that of specificity: a solver or a static scale names a layer, guard and KV cache the whole plan.
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

    Args:
        model: a causal language model, which writes half of it; for other models of text, only the samples.
        plan: the plan that the error message names.
        tokenizer: a tokenizer; without one, all text is the model's own.
        session: the session. A model that does not fit its device writes nothing, because every token would read every
            weight from elsewhere. Its seed chooses and draws the text, and its listener is called for "generate" with
            tokens.
        samples: rows.
        seqlen: tokens a row; cut to the model's context.
        own_only: leaves out the samples.

    Returns:
        int64 `[samples, seqlen]`, and the record of their sources.

    Raises:
        NoTextError: no text suits this model; the message names the layer that needs some.
    """
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    seqlen = min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen
    session = session or Session()

    def write() -> tuple[torch.Tensor, Record]:
        why_not = _too_large(model, session)
        shape: dict[str, Any] = {"samples": samples, "seqlen": seqlen, "own_only": own_only}
        # Only samples, without the half that the model would write.
        if why_not is not None and tokenizer is not None and not own_only:
            return mixture_rows(Writer(model, why_not=why_not), tokenizer, session, **shape)
        with placed(model, session.device):
            rows, record = mixture_rows(Writer(model), tokenizer, session, **shape)
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


def calibrate(
    model: nn.Module,
    plan: Plan,
    data: torch.Tensor | None,
    *,
    device: Device = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Returns static activation scales by layer name, float32 scalars; one for all members of a fusion group.

    The model runs in evaluation mode on `device`, one block at a time if it does not fit there; by default where it is.

    Raises:
        UserError: the plan needs data and there is none.
    """
    with evaluating(model):
        return _measured_scales(model, plan, data, Session.on(device, progress=progress))


def input_scales_of(
    model: nn.Module, plan: Plan, data: torch.Tensor | None, session: Session, step: str = "input scales"
) -> dict[str, torch.Tensor]:
    """Returns the scales of `calibrate`; the session's store keeps them as `step`, so they are measured once."""
    finished = session.store.get(step)
    if finished is not None:
        return {name: scale.clone() for name, scale in finished.tensors.items()}
    scales = _measured_scales(model, plan, data, session)
    if scales:
        session.store.put(step, scales, None)
    return scales


def _measured_scales(
    model: nn.Module, plan: Plan, data: torch.Tensor | None, session: Session
) -> dict[str, torch.Tensor]:
    static = [layer for layer in plan.quantized if layer.has_static_scale]
    if not static:
        return {}
    if data is None:
        raise UserError(lacks_data(plan) or "no calibration data")
    observers = None
    if (observer := observer_of(plan)) != "absmax":
        watch = get_observer(observer)
        observers = {layer.name: watch(layer.activation, name=layer.name) for layer in static if layer.activation}
    amax = collect_input_amax(model, [layer.name for layer in static], data, session, observers)
    scales = {}
    # A runtime quantizes the shared input of a fusion group once, so its members need one scale: the largest amax.
    for members in by_input(static):
        shared = torch.stack([amax[member.name] for member in members]).amax()
        for member in members:
            assert member.activation is not None
            # One warning for the group, not one for each member.
            warned = member.name if member is members[0] else None
            scale = static_input_scale(shared, member.activation, stored_dtype(model), warned)
            assert scale is not None
            scales[member.name] = scale
    return scales


def observer_of(plan: Plan) -> str:
    """Returns the key of `OBSERVERS` that the plan names: how its static activation scales are chosen.

    Raises:
        ValueError: the observer is unknown.
    """
    get_observer(plan.observer)
    return plan.observer


def by_input(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Returns layers gathered by the input they read: fusion groups, but each fused-expert projection apart."""
    return [
        part
        for members in groups_of(list(layers)).values()
        for part in ([[m] for m in members] if members[0].kind == LayerKind.EXPERTS else [members])
    ]
