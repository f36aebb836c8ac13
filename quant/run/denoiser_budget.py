"""Formats of a denoiser's layers within `--bits`: each group of layers is rounded alone, and the prediction compared.

    error²[group, format, timestep]    of the predicted noise, relative, on a call at each of a few timesteps
    Σ error² over groups               predicts that of the whole model: errors of groups are nearly independent
    knapsack                           the formats with the least sum within the budget (`calibration.allocation`)

Weights are rounded to nearest here, and solved afterwards. By block and by timestep, errors in the smallest format are
the picture of the report.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.allocation.allocate import make_space
from quant.calibration.allocation.goal import Options
from quant.calibration.evaluating import evaluating
from quant.calibration.inputs import Arguments, Inputs, call_on_first_row, taking_inputs
from quant.calibration.placement import placed
from quant.calibration.sensitivity.costs import group_bytes
from quant.calibration.sensitivity.knapsack import solve
from quant.calibration.sensitivity.table import Candidate, GroupScores, Sensitivity, parse_candidates
from quant.formats.tensor import fake_quantize, moved, round_activation
from quant.recipes.blocks import block_names
from quant.recipes.plan import LayerPlan, Plan
from quant.run.request import Request

_FORMATS = ("nvfp4", "fp8_channel")  # where the user names none
_TIMESTEPS = 3


@dataclass(frozen=True)
class ChosenFormats:
    """The plan within a budget, and the measurements that it follows."""

    plan: Plan
    by_block: dict[str, dict[str, float]]  # relative error in the smallest format, by block and timestep


def choose_formats(
    model: nn.Module, data: Inputs, request: Request, device: torch.device | None, name: str
) -> ChosenFormats:
    """Returns formats of a denoiser, within the budget of a request, by its calls `data`.

    Raises:
        Infeasible: no choice keeps the budget; the message names the smallest that can be kept.
        UserError: a component that is no denoiser, for its loss is not measured.
    """
    calls = _spread(model, data.calls)
    if not calls:
        raise UserError(f"--bits: {name} predicts no noise by which formats are chosen; leave it out of --components")
    formats = request.budget.options()["formats"] if request.budget.formats else _FORMATS
    options = Options(
        formats=formats, solver=request.solver or "gptq", include=request.include, exclude=request.exclude,
        run=call_on_first_row(data),
    )  # fmt: skip
    goal = request.goal
    assert goal is not None
    space = make_space(model, goal, options)
    space.explain(goal, space.problem())
    scores: dict[str, dict[str, list[float]]] = {}  # by group and format, at each of `calls`
    with evaluating(model), torch.no_grad(), placed(model, device) as place, taking_inputs(model):
        inputs = [Inputs([moved(call, place)], alone=True) for call in calls]
        exact = [prediction_of(model(each)) for each in inputs]
        for group, members in space.groups.items():
            scores[group] = {candidate.name: [0.0] * len(calls) for candidate in space.allowed[group]}
            for candidate in (each for each in space.allowed[group] if each.weight is not None):
                with _rounded(model, members, candidate):
                    errors = [prediction_of(model(each)) - y for each, y in zip(inputs, exact, strict=True)]
                whole = zip(errors, exact, strict=True)
                scores[group][candidate.name] = [float(e.square().sum() / y.square().sum()) for e, y in whole]
    table = Sensitivity(
        "prediction", tuple(c.name for c in parse_candidates(formats)), "relative squared error of the prediction",
        len(calls), 0, tuple(_group_scores(group, members, space.allowed[group], scores[group])
                             for group, members in space.groups.items()),
    )  # fmt: skip
    problem = space.problem(table)
    plan = space.plan(solve(problem, space.limits(goal)), problem, table, goal, {})
    times = [timestep_of(model, call) for call in calls]
    return ChosenFormats(plan, _by_block(block_names(model), space.groups, scores, times))


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


def prediction_of(result: Any) -> torch.Tensor:
    """Returns what a denoiser predicts, flat and in float32; Z-Image gives a list of images."""
    first = result[0] if isinstance(result, tuple | list | Mapping) else result
    parts = first if isinstance(first, list) else [first]
    return torch.cat([part.float().flatten() for part in parts])


@contextmanager
def _rounded(model: nn.Module, layers: Sequence[LayerPlan], candidate: Candidate) -> Iterator[None]:
    """Rounds weights and inputs of linear layers while open; a branch takes the largest singular values of a weight."""
    changed = []
    for layer in layers:
        module: Any = model.get_submodule(layer.name)
        weight = module.weight.float()
        branch = None
        if candidate.rank:
            u, s, v = torch.svd_lowrank(weight, min(candidate.rank, *weight.shape), niter=4)
            branch = (u * s) @ v.T
            weight = weight - branch
        values = fake_quantize(weight, candidate.weight_format).to(module.weight.dtype)
        changed.append((module, module.__dict__.get("forward")))
        module.forward = _forward(module, values, branch, candidate)
    try:
        yield
    finally:
        for module, forward in changed:
            del module.forward
            if forward is not None:
                module.forward = forward


def _forward(module: Any, weight: torch.Tensor, branch: torch.Tensor | None, candidate: Candidate) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rounded = x if candidate.activation is None else round_activation(x, candidate.activation, None)
        y = nn.functional.linear(rounded, weight.to(x.dtype), module.bias)
        return y if branch is None else y + nn.functional.linear(x, branch.to(x.dtype))

    return forward


def _group_scores(
    group: str, members: Sequence[LayerPlan], allowed: Sequence[Candidate], scores: Mapping[str, list[float]]
) -> GroupScores:
    numel = sum(layer.numel for layer in members)
    sizes = {candidate.name: group_bytes(members, candidate) for candidate in allowed}
    means = {name: sum(each) / len(each) for name, each in scores.items()}
    bits = {name: 8 * size / numel for name, size in sizes.items()}
    return GroupScores(group, tuple(layer.name for layer in members), numel, means, bits, sizes)


def _by_block(
    blocks: Sequence[str], groups: Mapping[str, Sequence[LayerPlan]], scores: Mapping[str, Mapping[str, list[float]]],
    times: Sequence[str],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Returns the errors of blocks at timesteps, of all their groups together in the format that loses most."""
    sums: dict[str, list[float]] = {}
    for group, members in groups.items():
        name = members[0].name
        block = next((block for block in blocks if name.startswith(f"{block}.")), name)
        worst = max(scores[group].values(), key=sum)
        sums[block] = [a + b for a, b in zip(sums.get(block, [0.0] * len(times)), worst, strict=True)]
    return {block: {time: e**0.5 for time, e in zip(times, errors, strict=True)} for block, errors in sums.items()}
