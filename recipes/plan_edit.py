"""Plans are edited by settings `GLOB=FORMAT[:SOLVER][@INPUT]`; the last one that matches wins, as in a recipe.

Members of a fusion group are merged into one matmul at run time, so they are given one format or none: an edit that
would split a group is refused with the members it left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quant.base.errors import UserError, counted, listed, option
from quant.formats.format import INPUT_FORMATS, Format, cache_format, parse_format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan, bits_per_weight
from quant.recipes.plan_check import check_guard_and_observer, check_solver, layer_problem, sharers_of
from quant.recipes.recipe import find_preset, matched, presets
from quant.recipes.resolve import QUANTIZABLE

# `diff` compares two plans: layers whose format, input, solver or place changed, and the bytes of both.


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


@dataclass(frozen=True)
class Setting:
    """One `--set`.

    Attributes:
        text: the text as the user wrote it.
        glob: over layer names, as in `quant.recipes.recipe.matched`.
        weight: weight format; None for 16 bit.
        solver: None leaves the layer's.
        activation: input format; None for 16 bit.
        input_given: whether the user named `activation`; otherwise it follows from the layer and the plan.
    """

    text: str
    glob: str
    weight: Format | None
    solver: str | None = None
    activation: Format | None = None
    input_given: bool = False


def parse_setting(text: str) -> Setting:
    """Reads `GLOB=FORMAT[:SOLVER][@INPUT]`; `keep` or `16bit` in place of a format is 16 bit.

    A preset that is no format, such as nvfp4a16 or fp8a16, stands for its weights and inputs.

    Raises:
        UserError: not of that form, or an unknown format or solver.
    """
    # From the right: a glob may hold "=", a format and a solver may not.
    glob, equals, value = text.rpartition("=")
    if not equals or not glob or not value:
        raise UserError(
            f"{option('set', repr(text))}: expected GLOB=FORMAT[:SOLVER][@INPUT], such as '*.down_proj=fp8_channel'"
        )
    value, at, input_name = value.partition("@")
    name, colon, solver = value.partition(":")
    try:
        if name not in INPUT_FORMATS and (preset := find_preset(name)):
            if at:
                raise ValueError(f"{name} has an input format already; write {preset.weight}@{input_name}")
            name, at, input_name = preset.weight, "@", preset.activation
        weight = parse_format(name)
        activation = parse_format(input_name) if at else None
        if colon:
            check_solver(solver)
    except ValueError as error:
        raise UserError(f"{option('set', repr(text))}: {error}") from None
    if weight is None and (activation is not None or solver):
        raise UserError(f"{option('set', repr(text))}: a layer in 16 bit has neither a solver nor an input format")
    return Setting(text, glob, weight, solver or None, activation, bool(at))


def edit(plan: Plan, settings: Sequence[Setting], *, whole_groups: bool = False) -> Plan:
    """Returns the plan with `settings` applied in order.

    Norms, embeddings and the like, and convolutions in 16 bit, are passed over where a glob also matches linear layers.
    A layer that changes loses its score, which was another format's, and the run-time parts of its old solver.

    Args:
        plan: the plan, which is not modified.
        settings: last match wins.
        whole_groups: extends each setting to the fusion groups of the layers it matches.

    Raises:
        UserError: a glob that matches nothing to quantize, a format that does not divide a layer, or a fusion group
            that would be split; all layers concerned are named.
    """
    changes: dict[str, Setting] = {}
    for setting in settings:
        chosen = _chosen(plan, setting)
        if whole_groups:
            names = {layer.name for layer in chosen}
            groups = {layer.group for layer in chosen if layer.group is not None}
            chosen = [m for m in plan.layers if m.name in names or m.group in groups]
        # A later setting replaces an earlier one for the same layer, as rules of a recipe do.
        changes.update(dict.fromkeys((layer.name for layer in chosen), setting))
    # A plan that quantizes no inputs is weight-only by intent, and an edit does not change that.
    inputs_too = any(layer.activation is not None for layer in plan.quantized)
    edited = plan.replace_layers(_set(plan.by_name[name], setting, inputs_too) for name, setting in changes.items())
    _refuse_obstacles(edited, changes)
    _refuse_split_groups(edited, changes)
    changed = [layer.name for layer in edited.layers if layer != plan.by_name[layer.name]]
    edits = [*plan.provenance.get("edits", []), *(setting.text for setting in settings)]
    return replace(edited, provenance={**plan.provenance, "edits": edits}) if changed else plan


def edit_plan(plan: Plan, *settings: str, whole_groups: bool = False) -> Plan:
    """Returns the plan with other formats for some layers.

    For example, `quant.edit_plan(plan, "*.down_proj=fp8_channel@fp8_token")`.

    Args:
        plan: the plan, which is not modified.
        settings: `GLOB=FORMAT[:SOLVER][@INPUT]`, as `quant plan edit --set` takes them; the last match wins.
        whole_groups: extends each setting to the fusion groups of the layers it matches.

    Raises:
        UserError: a setting of another form, an unknown format or solver, and what `edit` refuses.
    """
    return edit(plan, [parse_setting(text) for text in settings], whole_groups=whole_groups)


def set_in_python(plan: Plan, setting: str, whole_groups: bool) -> Plan:
    """Carries out `Plan.set`, whose errors name the method where errors of the command name options."""
    try:
        return edit_plan(plan, setting, whole_groups=whole_groups)
    except UserError as error:
        message = str(error).replace("--set ", "Plan.set: ", 1).replace("--whole-groups", "whole_groups=True")
        raise UserError(message) from None


def set_guard_and_observer(plan: Plan, guard: str | None = None, observer: str | None = None) -> Plan:
    """Returns `plan` with another guard and observer.

    Args:
        plan: the plan, which is not modified.
        guard: as in `Plan`; an empty text takes the plan's away, and None leaves it.
        observer: as in `Plan`; None leaves the plan's.

    Raises:
        ValueError: a guard that cannot be read, or an unknown observer, even if it is the plan's own.
    """
    guard = plan.guard if guard is None else guard or None
    plan = replace(plan, guard=guard, observer=plan.observer if observer is None else observer)
    check_guard_and_observer(plan)
    return plan


def _chosen(plan: Plan, setting: Setting) -> list[LayerPlan]:
    """Returns the layers that a setting changes; UserError if there is none."""
    named = [plan.by_name[name] for name in matched(setting.glob, plan.by_name)]
    if not named:
        names = ", ".join(layer.name for layer in plan.layers[:3])
        names += ", …" if len(plan.layers) > 3 else ""
        layers = f"this plan's are called {names}" if names else "this plan has none"
        raise UserError(f"{option('set', repr(setting.text))}: the glob matches no layer; {layers}")
    chosen = [layer for layer in named if layer.kind in QUANTIZABLE]
    # `*` over a model with both is meant for its linear layers, unless convolutions are quantized already.
    if any(layer.kind != LayerKind.CONV for layer in chosen):
        chosen = [layer for layer in chosen if layer.kind != LayerKind.CONV or layer.weight is not None]
    if not chosen:
        # A head or an embedding is quantized only by its own name, never as one of many that a glob happens to match.
        by_name = (LayerKind.HEAD, LayerKind.EMBEDDING)
        chosen = [layer for layer in named if layer.kind in by_name or setting.weight is None]
    if not chosen:
        kinds = ", ".join(sorted({layer.kind for layer in named}))
        raise UserError(
            f"{option('set', repr(setting.text))}: matches only layers of kind {kinds} "
            f"({listed(layer.name for layer in named)}); "
            "formats are for linear layers, fused experts, convolutions, output heads and embeddings"
        )
    return chosen


def _set(layer: LayerPlan, setting: Setting, inputs_too: bool) -> LayerPlan:
    activation = setting.activation
    # The input of an embedding is the number of a row: it has no format, and one that is requested is refused.
    if not setting.input_given and setting.weight is not None and layer.kind != LayerKind.EMBEDDING:
        # The same weight format again, for another solver: the input stays, even one that the user has set.
        if setting.weight == layer.weight:
            activation = layer.activation
        elif layer.activation is not None or (layer.weight is None and inputs_too):
            activation = input_of(setting.weight)
    solver = setting.solver or layer.solver
    if (layer.weight, layer.activation, layer.solver) == (setting.weight, activation, solver):
        return layer
    new = replace(
        layer,
        weight=setting.weight,
        activation=activation,
        solver=solver,
        reason=f"set by hand: {setting.text}",
        score=None,
        cost=None,
        parts=Parts(),
    )
    # An allocator's plan counts bytes; the count follows the format, the score cannot.
    return new if layer.cost is None else replace(new, cost=new.nbytes)


@cache
def input_of(weight: Format) -> Format | None:
    """Returns the input format that belongs to a weight format, as a preset combines them.

    None where no preset does.
    """
    for recipe in presets().values():
        if recipe.weight == weight.name and (activation := parse_format(recipe.activation)):
            return activation
    return None


def set_kv_cache(plan: Plan, name: str) -> Plan:
    """Returns the plan with another format of the KV cache; `keep` or `16bit` for none.

    Raises:
        UserError: an unknown format.
    """
    try:
        return replace(plan, kv_cache=cache_format(name))
    except ValueError as error:
        raise UserError(f"{option('kv_cache', name)}: {error}") from None


def _refuse_obstacles(plan: Plan, changes: Mapping[str, Setting]) -> None:
    blocked: dict[str, list[str]] = {}
    sharers = sharers_of(plan)
    for name in changes:
        if problem := layer_problem(plan.by_name[name], sharers.get(name)):
            blocked.setdefault(problem, []).append(name)
    if blocked:
        problems = "; ".join(f"{listed(names)}: {problem}" for problem, names in blocked.items())
        raise UserError(f"the edit does not fit {counted(sum(map(len, blocked.values())), 'layer')}: {problems}")


def _refuse_split_groups(plan: Plan, changes: Mapping[str, Setting]) -> None:
    """Raises UserError for an edit that splits fusion groups, and names the layers that it left out."""
    split, left_out = [], []
    for name, members in plan.groups().items():
        decided = {(m.weight, m.activation, m.solver if m.weight else "") for m in members}
        # A group that was split before, in a plan that was read, is reported by `check`, not by this edit.
        if len(decided) > 1 and any(m.name in changes for m in members):
            split.append(name)
            left_out += [m.name for m in members if m.name not in changes] or [m.name for m in members]
    if not split:
        return
    # Blocks of a model repeat: of many names, one for each place in a block is enough.
    places = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in left_out))
    include = ", ".join(left_out if len(left_out) <= len(places) + 4 else places)
    groups = f"fusion group {split[0]}" if len(split) == 1 else f"{len(split)} fusion groups, {split[0]} first"
    raise UserError(
        f"the edit splits {groups}: a runtime merges its members into one matmul. Include {include} too, or pass "
        f"{option('whole_groups', True)}"
    )
