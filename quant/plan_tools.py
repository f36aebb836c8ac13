"""Working on a plan by hand: edit it, compare two, and check one against a model and a runtime.

    edit       GLOB=FORMAT[:SOLVER][@INPUT], in order, the last one that matches wins, as in a recipe
    diff       layers whose format, input, solver or place changed, and the bytes of both
    validate   everything that is wrong with a plan, all at once, from shapes alone; `quantize --plan` asks it first

Members of a fusion group are merged into one matmul at run time, so they are given one format or none: an edit that
would split a group is refused with the members it left out.

The layers that a plan is validated against come from `quant.models.shapes`, which reads no weight.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from quant.errors import UserError, counted
from quant.formats.format import Format, get_format
from quant.recipes.layers import Layer
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight
from quant.recipes.recipe import KEEP, QUANTIZABLE, obstacle, presets
from quant.recipes.solver_names import parse_solver
from quant.recipes.targets import TARGETS, Target

_SIXTEEN = (KEEP, "16bit")


# Editing


@dataclass(frozen=True)
class Setting:
    """One `--set`.

    Attributes:
        text: as the user wrote it.
        glob: over layer names, case-sensitive; `*` crosses dots.
        weight: weight format; None for 16 bit.
        solver: None leaves the layer's.
        activation: input format; None for 16 bit.
        input_given: whether `activation` was said; otherwise it follows from the layer and the plan.
    """

    text: str
    glob: str
    weight: Format | None
    solver: str | None = None
    activation: Format | None = None
    input_given: bool = False


def parse_setting(text: str) -> Setting:
    """Reads `GLOB=FORMAT[:SOLVER][@INPUT]`; `keep` or `16bit` in place of a format is 16 bit.

    Raises:
        UserError: not of that form, or an unknown format or solver.
    """
    glob, equals, rest = text.rpartition("=")
    if not equals or not glob or not rest:
        raise UserError(f"--set {text!r}: expected GLOB=FORMAT[:SOLVER][@INPUT], such as '*.down_proj=fp8_channel'")
    rest, at, given = rest.partition("@")
    name, colon, solver = rest.partition(":")
    try:
        weight = _format(name)
        activation = _format(given) if at else None
        if colon:
            check_solver(solver)
    except ValueError as error:
        raise UserError(f"--set {text!r}: {error}") from None
    if weight is None and (activation is not None or solver):
        raise UserError(f"--set {text!r}: a layer in 16 bit has neither a solver nor an input format")
    return Setting(text, glob, weight, solver or None, activation, bool(at))


@cache
def check_solver(name: str) -> None:
    """Raises ValueError where there is no solver of that name."""
    try:
        parse_solver(name)
    except ValueError:
        # One that was added to the registry, perhaps; it takes torch to ask.
        from quant.calibration.solvers.solver import get_solver

        get_solver(name)


def _format(name: str) -> Format | None:
    if name in _SIXTEEN:
        return None
    try:
        return get_format(name)
    except ValueError as error:
        raise ValueError(f"{error}, {KEEP}") from None


def edit(plan: Plan, settings: Sequence[Setting], *, whole_groups: bool = False) -> Plan:
    """The plan with `settings` applied in order.

    Norms, embeddings and the like are passed over where a glob also matches linear layers. A layer that changes loses
    its score, which was another format's, and what its old solver would have put beside the weight.

    Args:
        plan: not modified.
        settings: last match wins.
        whole_groups: extends each setting to the fusion groups of the layers it matches.

    Raises:
        UserError: a glob that matches nothing to quantize, a format that does not divide a layer, or a fusion group
            that would be split; all layers concerned are named.
    """
    wanted: dict[str, Setting] = {}
    for setting in settings:
        matched = _matched(plan, setting)
        if whole_groups:
            names = {layer.name for layer in matched}
            groups = {layer.group for layer in matched if layer.group is not None}
            matched = [m for m in plan.layers if m.name in names or m.group in groups]
        wanted.update(dict.fromkeys((layer.name for layer in matched), setting))
    inputs_too = any(layer.activation is not None for layer in plan.quantized)
    edited = plan.replace_layers(_set(plan.by_name[name], setting, inputs_too) for name, setting in wanted.items())
    _refuse_obstacles(edited, wanted)
    _refuse_split_groups(edited, wanted)
    changed = [layer.name for layer in edited.layers if layer != plan.by_name[layer.name]]
    edits = [*plan.provenance.get("edits", []), *(setting.text for setting in settings)]
    return replace(edited, provenance={**plan.provenance, "edits": edits}) if changed else plan


def _matched(plan: Plan, setting: Setting) -> list[LayerPlan]:
    named = [layer for layer in plan.layers if fnmatchcase(layer.name, setting.glob)]
    if not named:
        names = ", ".join(layer.name for layer in plan.layers[:3])
        raise UserError(f"--set {setting.text!r}: the glob matches no layer; this plan's are called {names}, …")
    matched = [layer for layer in named if layer.kind in QUANTIZABLE]
    if not matched:
        # A head or an embedding is quantized only by its own name, never as one of many that a glob happens to match.
        matched = [layer for layer in named if layer.kind in ("head", "embedding") or setting.weight is None]
    if not matched:
        kinds = ", ".join(sorted({layer.kind for layer in named}))
        raise UserError(
            f"--set {setting.text!r}: matches only layers of kind {kinds} ({_some(layer.name for layer in named)}); "
            "formats are for linear layers, fused experts, output heads and embeddings"
        )
    return matched


def _set(layer: LayerPlan, setting: Setting, inputs_too: bool) -> LayerPlan:
    activation = setting.activation
    # The input of an embedding is the number of a row: it has no format unless one is asked for, and refused.
    if not setting.input_given and setting.weight is not None and layer.kind != "embedding":
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
        pre_scale=False,
        hadamard=0,
        rank=0,
    )
    return new if layer.cost is None else replace(new, cost=new.nbytes)


@cache
def input_of(weight: Format) -> Format | None:
    """The input format that belongs to a weight format: that of the preset with both; None where there is none."""
    for recipe in presets().values():
        if recipe.weight == weight.name and recipe.activation != KEEP:
            return get_format(recipe.activation)
    return None


def set_kv_cache(plan: Plan, name: str) -> Plan:
    """The plan with another format of the KV cache; `keep` or `16bit` for none.

    Raises:
        UserError: an unknown format.
    """
    try:
        return replace(plan, kv_cache=_format(name))
    except ValueError as error:
        raise UserError(f"--kv-cache {name}: {error}") from None


def _refuse_obstacles(plan: Plan, wanted: Mapping[str, Setting]) -> None:
    found: dict[str, list[str]] = {}
    sharers = _sharers(plan)
    for name in wanted:
        if problem := _layer_problem(plan.by_name[name], sharers.get(name)):
            found.setdefault(problem, []).append(name)
    if found:
        listed = "; ".join(f"{_some(names)}: {problem}" for problem, names in found.items())
        raise UserError(f"the edit does not fit {counted(sum(map(len, found.values())), 'layer')}: {listed}")


def _refuse_split_groups(plan: Plan, wanted: Mapping[str, Setting]) -> None:
    """Names what an edit that splits groups would have to take along."""
    split, left = [], []
    for name, members in plan.groups().items():
        decided = {(m.weight, m.activation, m.solver if m.weight else "") for m in members}
        if len(decided) > 1 and any(m.name in wanted for m in members):
            split.append(name)
            left += [m.name for m in members if m.name not in wanted] or [m.name for m in members]
    if not split:
        return
    # Blocks of a model repeat: of many names, one for each place in a block is enough.
    places = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in left))
    include = ", ".join(left if len(left) <= len(places) + 4 else places)
    groups = f"fusion group {split[0]}" if len(split) == 1 else f"{len(split)} fusion groups, {split[0]} first"
    raise UserError(
        f"the edit splits {groups}: a runtime merges its members into one matmul. Include {include} too, or pass "
        "--whole-groups"
    )


# Comparing


@dataclass(frozen=True)
class Change:
    """A layer that differs between two plans; one side is None where the other plan alone has it."""

    name: str
    before: LayerPlan | None
    after: LayerPlan | None

    @property
    def kind(self) -> str:
        """What happened, as one word or two formats: the summary counts by it."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "removed"
        old, new = _as_text(self.before), _as_text(self.after)
        if old != new:
            return f"{old} → {new}"
        if self.before.solver != self.after.solver:
            return f"{old}, solver {self.before.solver} → {self.after.solver}"
        return "shape, group or run-time parts"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
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
    """Layers whose decision differs, in the order of `after`; reasons, scores and costs do not count."""
    changes = [
        Change(layer.name, before.by_name.get(layer.name), layer)
        for layer in after.layers
        if layer.name not in before.by_name or _decision(before.by_name[layer.name]) != _decision(layer)
    ]
    gone = [Change(layer.name, layer, None) for layer in before.layers if layer.name not in after.by_name]
    return changes + gone


def totals(plan: Plan) -> dict[str, Any]:
    """The figures that `diff` sets side by side: those of a whole plan."""
    own = [layer for layer in plan.layers if layer.kind in QUANTIZABLE]
    return {
        "quantized": len(plan.quantized),
        "effective_bits": plan.effective_bits,
        "bits_linear": bits_per_weight(own),
        "bytes": plan.nbytes,
        **plan.run_time,
    }


def _decision(layer: LayerPlan) -> LayerPlan:
    # The solver of a layer that stays in 16 bit decides nothing.
    return replace(layer, reason="", score=None, cost=None, solver=layer.solver if layer.weight else "")


def _as_text(layer: LayerPlan) -> str:
    if layer.weight is None:
        return "16bit"
    return f"{layer.weight}@{layer.activation}" if layer.activation else f"{layer.weight}"


# Validating


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: a layer, a fusion group, or "plan".
        what: one sentence, with the limit.
        remedy: what to do about it.
    """

    where: str
    what: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON-ready form."""
        return {"where": self.where, "what": self.what, "remedy": self.remedy}


def read_plan(path: str | Path) -> tuple[Plan, list[Problem]]:
    """A plan file with everything in it that can be read, and what cannot.

    `Plan.load` stops at the first mistake; this goes on, so that all can be mended at once.

    Raises:
        UserError: no file, no JSON, or no plan at all.
    """
    path = Path(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        entries = list(fields["layers"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a plan: {error}") from None
    layers, problems = [], []
    for entry in entries:
        try:
            layers.append(LayerPlan.from_dict(entry))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            name = entry.get("name", "a layer without name") if isinstance(entry, dict) else repr(entry)
            what = str(error).removeprefix(f"plan layer {name!r}: ")
            problems.append(Problem(str(name), what, "mend the entry, or make the plan again"))
    try:
        rest = Plan.from_dict({**fields, "layers": []})
    except ValueError as error:
        problems.append(Problem("plan", str(error)))
        rest = Plan(())
    names = [layer.name for layer in layers]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        problems.append(Problem(name, f"has {names.count(name)} entries", "keep one"))
    return replace(rest, layers=tuple({layer.name: layer for layer in layers}.values())), problems


def validate(plan: Plan, layers: Sequence[Layer] | None = None, target: Target | None = None) -> list[Problem]:
    """Everything that would stop `plan`, or make its result wrong, found from shapes alone.

    Args:
        plan: as `read_plan` gives it.
        layers: of the model it is for, as `model_layers` gives them; None checks the plan by itself.
        target: runtime that the result is for.
    """
    found = _check_model(plan, layers) if layers is not None else []
    found += _check_layers(plan)
    found += _check_groups(plan)
    if target is not None:
        found += _check_target(plan, target)
    return found


def refuse(plan: Plan, problems: Sequence[Problem], layers: Sequence[Layer]) -> None:
    """Raises UserError where `plan` cannot be executed on a model: one line with every problem and every place.

    Args:
        plan, problems: as `read_plan` gives them.
        layers: of the model.
    """
    unread = {problem.where for problem in problems}
    found = validate(plan, layers, TARGETS.get(plan.target or ""))
    alike: dict[tuple[str, str], list[str]] = {}
    for problem in (*problems, *(problem for problem in found if problem.where not in unread)):
        alike.setdefault((problem.what, problem.remedy), []).append(problem.where)
    if alike:
        listed = "; ".join(
            f"{_places(where)}: {what}{f' ({remedy})' if remedy else ''}" for (what, remedy), where in alike.items()
        )
        count = counted(sum(map(len, alike.values())), "problem")
        raise UserError(f"the plan does not fit this model, {count}: {listed}")


def _check_model(plan: Plan, layers: Sequence[Layer]) -> list[Problem]:
    have = {layer.name: layer for layer in layers}
    sharers = {layer.tied_to: layer.name for layer in layers if layer.tied_to is not None}
    found = []
    for planned in plan.layers:
        layer = have.get(planned.name)
        if layer is None:
            found.append(Problem(planned.name, "is not in the model", "remove it, or name the model the plan is for"))
        elif layer.shape != planned.shape:
            what = f"is {list(layer.shape)} in the model and {list(planned.shape)} in the plan"
            found.append(Problem(planned.name, what, "name the model the plan is for"))
        elif planned.weight is not None and (other := layer.tied_to or sharers.get(layer.name)) and not planned.tied_to:
            what = f"its weight is also that of {other} in the model, and is stored once and in 16 bit"
            found.append(Problem(planned.name, what, "keep it in 16 bit"))
        elif planned.weight is not None and layer.obstacle is not None:
            found.append(Problem(planned.name, layer.obstacle, "keep it in 16 bit"))
    for name in have:
        if name not in plan.by_name:
            found.append(Problem(name, "is in the model and not in the plan", "add it, with weight null for 16 bit"))
    return found


def _check_layers(plan: Plan) -> list[Problem]:
    found = []
    sharers = _sharers(plan)
    for layer in plan.layers:
        if problem := _layer_problem(layer, sharers.get(layer.name)):
            found.append(Problem(layer.name, problem, "choose another format, or keep it in 16 bit"))
        if layer.weight is None and layer.activation is not None:
            what = f"inputs in {layer.activation} and weights in 16 bit: no kernel takes that"
            found.append(Problem(layer.name, what, "give the weight a format, or the input none"))
        if layer.weight is not None:
            try:
                check_solver(layer.solver)
            except ValueError as error:
                found.append(Problem(layer.name, str(error)))
    return found


def _sharers(plan: Plan) -> dict[str, str]:
    """Layers whose weight another layer has too, and which."""
    return {layer.tied_to: layer.name for layer in plan.layers if layer.tied_to is not None}


def _layer_problem(layer: LayerPlan, sharer: str | None) -> str | None:
    """Why the layer cannot be stored as planned, whatever the runtime; `sharer` has the same weight."""
    if layer.weight is None:
        return None
    if len(layer.shape) < 2:
        return f"{layer.weight} is for matrices; this is {list(layer.shape)}"
    if sharer is not None:
        return f"its weight is also that of {sharer}, and is stored once and in 16 bit"
    as_layer = Layer(layer.name, layer.kind, layer.shape, tied_to=layer.tied_to)
    return obstacle(as_layer, layer.weight, layer.activation)


def _check_groups(plan: Plan) -> list[Problem]:
    found = []
    for name, members in plan.groups().items():
        kinds: tuple[tuple[str, list[str]], ...] = (
            ("formats", [_as_text(m) for m in members]),
            ("solvers", [m.solver if m.weight else "" for m in members]),
            ("Hadamard blocks", [str(m.hadamard) for m in members]),
        )
        for what, values in kinds:
            if len(set(values)) > 1:
                listed = ", ".join(f"{m.name}={value}" for m, value in zip(members, values, strict=True))
                found.append(Problem(name, f"mixes {what}: {listed}", "give its members one: they are fused"))
                break
    return found


def _check_target(plan: Plan, target: Target) -> list[Problem]:
    found: list[Problem] = []
    followed = _check_fused(plan, target, found)
    for layer in plan.quantized:
        remedy = "plan edit --set 'LAYER=FORMAT@INPUT', or another target"
        found += [Problem(layer.name, what, remedy) for what in target.problems(layer, merged=layer.name in followed)]
    if problem := target.kv_cache_problem(plan.kv_cache):
        found.append(Problem("plan", problem, "plan edit --kv-cache keep"))
    return found


def _check_fused(plan: Plan, target: Target, found: list[Problem]) -> set[str]:
    """Adds siblings that `target` merges and the plan does not; gives the layers that another one follows there."""
    siblings: dict[tuple[str, tuple[str, ...]], list[LayerPlan]] = {}
    for layer in plan.layers:
        parent, _, last = layer.name.rpartition(".")
        for names in target.fused:
            if last in names and layer.kind == "linear":
                siblings.setdefault((parent, names), []).append(layer)
    followed: set[str] = set()
    for (parent, names), members in siblings.items():
        members.sort(key=lambda m: names.index(m.name.rpartition(".")[2]))
        followed.update(m.name for m in members[:-1])
        if len({m.group for m in members}) == 1 and members[0].group is not None:
            continue  # one fusion group, which has been checked
        where = f"{parent}.({'|'.join(m.name.rpartition('.')[2] for m in members)})"
        if len({_as_text(m) for m in members}) > 1:
            listed = ", ".join(f"{m.name}={_as_text(m)}" for m in members)
            found.append(Problem(where, f"{target.name} merges these, in one format: {listed}", "give them one"))
        elif len(members) > 1 and members[0].weight is not None and members[0].weight.global_scale:
            what = f"{target.name} merges these, and {members[0].weight} then needs one global scale for all"
            found.append(Problem(where, what, "give them the same `group` in the plan, so that they share it"))
    return followed


def _places(names: Sequence[str], limit: int = 8) -> str:
    """All of `names`; blocks of a model repeat, so of many names those that differ by numbers alone are one."""
    if len(names) <= limit:
        return ", ".join(names)
    alike = Counter(re.sub(r"\d+", "*", name) for name in names)
    return ", ".join(f"{name} ({counted(count, 'layer')})" for name, count in alike.items())


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
