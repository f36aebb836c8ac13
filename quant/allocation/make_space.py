"""`make_space` finds the formats that each fusion group of a model may take.

Everything that can be refused is refused here, before anything is measured: a format that no layer can take, a
runtime that has none of them, a constraint that leaves a group without a choice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quant.calibration.allocation.goal import Constraint, ConstraintKind, Goal
from quant.allocation.options import Options
from quant.calibration.allocation.space import Space
from quant.calibration.sensitivity.candidates import Candidate, parse_candidates
from quant.calibration.sensitivity.costs import group_bytes, kv_cache_bytes
from quant.base.errors import UserError
from quant.recipes.plan_make import make_plan
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of
from quant.recipes.recipe import KEEP, Recipe, matched
from quant.recipes.targets import TARGETS, Target, get_target


def make_space(model: nn.Module, goal: Goal, options: Options) -> Space:
    """Returns the choices that an allocation has for `model`.

    Raises:
        UserError: no layer can take any of the formats, a runtime has none of them, or a constraint leaves a group
            without a choice.
    """
    candidates = parse_candidates(options.formats)
    runtimes = [get_target(name) for name in goal.target if name in TARGETS]
    plans = _plan_each(model, candidates, options)
    # Layers, kinds and groups are the same in all plans; only formats differ.
    base = next(iter(plans.values()))
    # A layer is open to choice if at least one format can quantize it; others keep 16 bit and count as fixed.
    quantized = {layer.name for plan in plans.values() for layer in plan.quantized}
    groups = groups_of([layer for layer in base.layers if layer.name in quantized])
    by_name = {c.name: c for c in candidates}
    # Some runtimes take each format by itself but not several in one checkpoint.
    mixed = len(plans) > 1
    allowed = {
        group: [c for c in candidates if all(_fits(c, m, plans.get(c.name), runtimes, mixed) for m in members)]
        for group, members in groups.items()
    }
    for runtime in runtimes:
        _check_runtime(runtime, allowed, candidates)
    for constraint in options.constraints:
        _constrain(constraint, matched(constraint.match, base.by_name), groups, allowed, by_name)
    fixed_layers = [layer for layer in base.layers if layer.name not in quantized]
    # By identity, since tied weights are one tensor under several names.
    planned = {id(p) for layer in base.layers for p in _parameters_of(model, layer)}
    unplanned_bytes = sum(t.nbytes for t in _tensors(model) if id(t) not in planned)
    cache_bytes = kv_cache_bytes(getattr(model, "config", None), goal.context, goal.batch, base.kv_cache)
    timing = goal.timing
    return Space(
        base=base,
        groups=groups,
        candidates=by_name,
        allowed=allowed,
        unplanned_bytes=unplanned_bytes,
        cache_bytes=cache_bytes,
        fixed_bytes=sum(layer.nbytes for layer in fixed_layers) + unplanned_bytes + cache_bytes,
        fixed_seconds=timing.read(_bytes_read(fixed_layers) + cache_bytes) if timing is not None else 0.0,
        timing=timing,
        batch=goal.batch,
    )


def _plan_each(model: nn.Module, candidates: Sequence[Candidate], options: Options) -> dict[str, Plan]:
    """Returns the plan of each candidate for all layers, by its name; candidates that no layer can take are left out.

    Raises:
        UserError: no layer can take any of them.
    """
    plans: dict[str, Plan] = {}
    refusal: UserError | None = None
    for candidate in (c for c in candidates if c.weight is not None):
        recipe = _recipe_of(candidate, options.solver, options.kv_cache)
        try:
            plan = make_plan(model, recipe, include=options.include, exclude=options.exclude, run=options.run)
            plan = replace(plan, provenance={**(options.provenance or {}), **plan.provenance})
            plans[candidate.name] = _without_convs(plan)
        except UserError as error:
            refusal = error
    if not plans:
        raise refusal or UserError("no formats to choose from")
    return plans


def _without_convs(plan: Plan) -> Plan:
    """Returns the plan with its convolutions in 16 bit; UserError if nothing else is quantized."""
    reason = (
        "convolution: scores and searches are for linear layers; without a budget, it is quantized as its format says"
    )
    convs = [layer for layer in plan.quantized if layer.kind == LayerKind.CONV]
    plan = plan.replace_layers(replace(layer, weight=None, activation=None, reason=reason) for layer in convs)
    if convs and not plan.quantized:
        raise UserError(
            "formats are chosen for linear layers, and this model has only convolutions: quantize it in one format, "
            "such as --format int8, without a budget"
        )
    return plan


def _recipe_of(candidate: Candidate, solver: str, kv_cache: str | None) -> Recipe:
    activation = candidate.activation.name if candidate.activation else KEEP
    return Recipe(candidate.name, candidate.weight_format.name, activation, solver, kv_cache=kv_cache or KEEP)


def _fits(candidate: Candidate, layer: LayerPlan, plan: Plan | None, runtimes: Sequence[Target], mixed: bool) -> bool:
    """Returns whether a layer can take a candidate: its plan quantizes the layer, and every runtime runs it."""
    planned = candidate.weight is None or (plan is not None and plan.by_name[layer.name].weight is not None)
    # Branches are made for plain linear layers only.
    planned = planned and (layer.kind == LayerKind.LINEAR or not candidate.rank)
    return planned and not any(runtime.problems(candidate.applied(layer), mixed=mixed) for runtime in runtimes)


def _bytes_read(fixed: Sequence[LayerPlan]) -> int:
    """Returns the bytes of layers with a fixed format that a decoding step reads.

    Of an embedding, only a row a token.
    """
    # A head that is tied to an embedding has no bytes of its own in the plan, but each step reads it in 16 bit.
    heads = (2 * layer.numel for layer in fixed if layer.kind == LayerKind.HEAD and layer.tied_to is not None)
    return sum(layer.nbytes for layer in fixed if layer.kind != LayerKind.EMBEDDING) + sum(heads)


def _check_runtime(
    runtime: Target, allowed: Mapping[str, Sequence[Candidate]], candidates: Sequence[Candidate]
) -> None:
    if any(c.weight is not None for choices in allowed.values() for c in choices):
        return
    requested = ", ".join(c.name for c in candidates if c.weight is not None)
    has = ", ".join(dict.fromkeys(map(str, runtime.pairs)))
    raise UserError(f"{runtime.name} runs none of {requested} for this model's layers; it has {has}")


def _constrain(
    constraint: Constraint,
    names: Collection[str],
    groups: Mapping[str, Sequence[LayerPlan]],
    allowed: dict[str, list[Candidate]],
    candidates: Mapping[str, Candidate],
) -> None:
    """Removes the formats from `allowed` that a constraint rules out for the layers of these names."""
    option = f"{constraint.kind.option} {constraint.match}={constraint.format}"
    if constraint.format not in candidates:
        raise UserError(f"{option}: {constraint.format!r} is none of the formats {', '.join(candidates)}")
    meant = [group for group, members in groups.items() if any(layer.name in names for layer in members)]
    if not meant:
        raise UserError(f"{option}: no layer that a format is chosen for matches {constraint.match!r}")
    named = candidates[constraint.format]
    for group in meant:
        # "At least" compares bytes, which count scales: 4-bit formats differ by the size of their blocks.
        least = group_bytes(groups[group], named)
        remaining = [
            candidate
            for candidate in allowed[group]
            if {
                ConstraintKind.PIN: candidate.name == named.name,
                ConstraintKind.FORBID: candidate.name != named.name,
                ConstraintKind.AT_LEAST: group_bytes(groups[group], candidate) >= least,
            }[constraint.kind]
        ]
        if not remaining:
            has = ", ".join(c.name for c in allowed[group]) or "none"
            raise UserError(f"{option}: {group} cannot take any such format; it can take {has}")
        allowed[group] = remaining


def _parameters_of(model: nn.Module, layer: LayerPlan) -> list[torch.Tensor]:
    if layer.kind.is_named_by_parameter:
        return [model.get_parameter(layer.name)]
    weight = getattr(model.get_submodule(layer.name), "weight", None)
    return [weight] if isinstance(weight, torch.Tensor) else []


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
