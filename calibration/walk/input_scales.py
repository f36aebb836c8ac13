"""Static activation scales: the largest input that calibration data shows to each layer whose format needs one."""

from __future__ import annotations

import torch
from torch import nn

from quant.base.errors import UserError
from quant.base.listener import Progress
from quant.calibration.evaluating import evaluating
from quant.calibration.observers import get_observer
from quant.calibration.placement import Device
from quant.calibration.session import Session
from quant.calibration.statistics import static_input_scale
from quant.calibration.texts.data_needs import lacks_data
from quant.calibration.walk.collect import collect_input_amax
from quant.recipes.blocks import stored_dtype
from quant.recipes.plan import Plan, groups_by_input


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

    Args:
        model: the model that the plan was made for.
        plan: the plan, whose observer chooses the scales.
        data: calibration rows as the model takes them; None where the plan needs none.
        device: where the model runs; by default where it is.
        progress: a function that is called as `progress(stage, done, total)`.

    Raises:
        UserError: the plan needs data and there is none.
    """
    with evaluating(model):
        return _measured_scales(model, plan, data, Session.on(device, progress=progress))


def input_scales_of(
    model: nn.Module, plan: Plan, data: torch.Tensor | None, session: Session, step: str = "input scales"
) -> dict[str, torch.Tensor]:
    """Returns scales as `calibrate` does, measured in a session, whose store keeps them as the step `step`."""
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
    for members in groups_by_input(static):
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
