"""Formats of a denoiser's layers within `--bits`, or for `--max-error`, by the relative error of what it predicts.

Formats are chosen as for every other model (`calibration.allocation`), on calls of the denoiser at a few timesteps. The
squared error with one group rounded alone is its score, and the joint error of a choice is measured. Weights are
rounded to nearest here, and solved afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.allocation.allocate import make_loop, make_space
from quant.calibration.allocation.goal import Options
from quant.calibration.allocation.measure_choices import Counts, HeldOut
from quant.calibration.evaluating import evaluating
from quant.calibration.inputs import Arguments, Inputs, call_on_first_row, taking_inputs
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.recipes.plan import Plan
from quant.run.request import Request

_FORMATS = ("nvfp4", "fp8_channel")  # where the user names none
_TIMESTEPS = 3


def choose_formats(
    model: nn.Module, data: Inputs, request: Request, device: torch.device | None, name: str
) -> tuple[Plan, dict[str, dict[str, float]]]:
    """Returns the plan of a denoiser for the goal of a request, by its calls `data`, and errors for the report.

    Errors are those of the prediction where a block alone is in the format that loses most, by block and timestep.

    Raises:
        Infeasible: no choice keeps the goal; the message names the smallest that can be kept.
        UserError: a component that is no denoiser, for its loss is not measured.
    """
    calls, goal, session = _spread(model, data.calls), request.goal, Session.on(device)
    assert goal is not None
    if not calls:
        raise UserError(f"{name} predicts no noise by which formats are chosen; leave it out of --components")
    options = Options(
        formats=request.budget.formats or _FORMATS, solver=request.solver or "gptq", include=request.include,
        exclude=request.exclude, constraints=request.budget.options()["constraints"], run=call_on_first_row(data),
        method="kl", dtype=None,
    )  # fmt: skip
    space = make_space(model, goal, options)
    space.explain(goal, space.problem())
    rows: Any = Inputs(calls, alone=True).to(session.device or device_of(model))
    held_out, rounded = HeldOut.without_verification(rows), replace(options, solver="rtn")
    with evaluating(model), taking_inputs(model):
        loop, _, _ = make_loop(model, space, rows, held_out, goal, Counts(), rounded, session)
        with loop.bench.switchable.ready():
            plan = loop.plan(loop.run(searches=False).choice)
            run, blocks = next(iter(loop.bench.checked.values())), dict[str, dict[str, str]]()
            for group, members in space.groups.items():
                block = next((b for b in loop.bench.switchable.blocks if group.startswith(f"{b}.")), members[0].name)
                scores = loop.scores.by_name[group].scores
                blocks.setdefault(block, {})[group] = max(scores, key=scores.__getitem__)
            errors = {block: [loss**0.5 for loss in run.losses(choice)] for block, choice in blocks.items()}
    times = [timestep_of(model, call) for call in calls]
    return plan, {block: dict(zip(times, each, strict=True)) for block, each in errors.items()}


def _spread(model: nn.Module, calls: Sequence[Arguments]) -> list[Arguments]:
    """Returns a call at each of a few timesteps, over the whole trajectory; none of a model without timesteps."""
    by_time = {time: call for call in calls if (time := timestep_of(model, call))}
    times = sorted(by_time, key=float)
    picked = {times[round(i * (len(times) - 1) / (_TIMESTEPS - 1))] for i in range(_TIMESTEPS)} if times else set()
    return [by_time[time] for time in sorted(picked, key=float, reverse=True)]


def timestep_of(model: nn.Module, call: Arguments) -> str:
    """Returns the timestep of a call of a denoiser; empty where it has none."""
    args, kwargs = call
    named = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    time = named.get("timestep", named.get("t"))
    if isinstance(time, torch.Tensor):
        time = float(time.flatten()[0])
    return "" if time is None else f"{float(time):.4g}"
