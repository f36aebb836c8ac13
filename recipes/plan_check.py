"""Checks a plan against a model, a runtime or another plan, by shapes alone, and reports all problems at once."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quant.base.errors import UserError, counted, option
from quant.base.json_files import JsonData, read_json, typed
from quant.recipes.groups import patterns
from quant.recipes.layers import QUANTIZABLE, Layer, LayerKind
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight, check_settings, layer_problem, sharers_of
from quant.recipes.solver_names import parse_solver
from quant.recipes.targets import TARGETS, Target

_KEEP_IT = "keep it in 16 bit"
_READ_AS = {"conv": "a convolution", "embedding": "a table of rows", "experts": "matrices of experts"}
NOT_RUN = "a bare state dict cannot be run"
BY_NAME = "fusion_groups_by_name"
"""Key of the provenance: fusion groups that come from names, because no run called their layers; `*` is a number."""
NOT_SEEN = "layers_not_called"
"""Key of the provenance: layers that no run has called, and that are in no group though they might be merged."""


def fusion_warnings(plan: Plan) -> list[str]:
    """Returns a warning, in one sentence, where it is unknown whether a runtime fuses layers with static scales."""
    # Only formats with a tensor scale (NVFP4, FP8) suffer: block scales do not change when rows are concatenated.
    static = [layer for layer in plan.quantized if layer.weight is not None and layer.weight.is_static]
    unknown, unseen = plan.provenance.get("fusion_groups"), plan.provenance.get(NOT_SEEN)
    if unseen is not None:
        static = [layer for layer in static if layer.group is None and patterns([layer.name])[0] in unseen]
    if not static or (unknown is None and unseen is None):
        return []
    reason = f"fusion groups {unknown}" if unknown else "no run has called them, so their fusion groups are unknown"
    return [
        f"{counted(len(static), 'layer')}, {static[0].name} first: {reason}. Each has a tensor scale of its own, and a "
        "runtime that merges layers with one input (q/k/v, gate/up) expects them to share one"
    ]


def coverage_warnings(plan: Plan) -> list[str]:
    """Returns warnings where over half of all weights are not quantized, or inputs do because no run measured them."""
    warnings = []
    # A tied weight counts once, as it is stored.
    own = [layer for layer in plan.layers if layer.tied_to is None]
    by_reason: dict[str, list[LayerPlan]] = {}
    for layer in own:
        if layer.weight is None:
            by_reason.setdefault(layer.reason, []).append(layer)
    counts = {reason: sum(layer.numel for layer in layers) for reason, layers in by_reason.items()}
    total, in_16bit = sum(layer.numel for layer in own), sum(counts.values())
    # Less than half in 16 bit is normal: embeddings and heads of small models.
    if 2 * in_16bit > total:
        most = sorted(by_reason.items(), key=lambda item: -counts[item[0]])[:3]
        reasons = "; ".join(
            f"{counted(len(layers), 'layer')}, {layers[0].name} first, {counts[reason] / total:.0%}: {reason}"
            for reason, layers in most
        )
        warnings.append(f"{in_16bit / total:.0%} of the weights are not quantized ({reasons})")
    weight_only = [layer for layer in plan.quantized if layer.activation is None and layer.reason.endswith(NOT_RUN)]
    if weight_only:
        warnings.append(
            f"the inputs of {counted(len(weight_only), 'layer')}, {weight_only[0].name} first, stay in 16 bit, and "
            f"only weights are quantized: {NOT_RUN}; pass a model's directory or {option('model_factory')} to "
            "quantize inputs too"
        )
    return warnings


@dataclass(frozen=True)
class Problem(JsonData):
    """One thing that is wrong."""

    where: str  # a layer, a fusion group, or "plan"
    what: str  # one sentence on the problem, with the limit
    remedy: str = ""  # the way out


def read_plan(path: str | Path) -> tuple[Plan, list[Problem]]:
    """Returns a plan file with everything in it that can be read, and a problem for every part that cannot.

    `Plan.load` stops at the first mistake; this goes on, so that all can be corrected at once.
    """

    def with_layers(document: Any) -> dict[str, Any]:
        fields: dict[str, Any] = typed(dict[str, Any], document, "plan")
        typed(list[Any], fields.get("layers"), "layers")
        return fields

    try:
        fields = read_json(Plan.file(path), "a plan", with_layers)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    layers, problems = [], []
    for entry in fields["layers"]:
        try:
            layers.append(LayerPlan.from_dict(entry))
        except ValueError as error:
            name = entry.get("name", "a layer without name") if isinstance(entry, dict) else repr(entry)
            what = str(error).removeprefix(f"plan layer {name!r}: ")
            problems.append(Problem(str(name), what, "mend the entry, or make the plan again"))
    try:
        # The fields of the plan apart from its layers, so that one bad layer does not hide a bad field.
        plan = Plan.from_dict({**fields, "layers": []})
    except ValueError as error:
        problems.append(Problem("plan", str(error)))
        plan = Plan(())
    names = [layer.name for layer in layers]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        problems.append(Problem(name, f"has {names.count(name)} entries", "keep one"))
    # Duplicates would make lookups by name ambiguous; the last entry stays, and the problem names the others.
    return replace(plan, layers=tuple({layer.name: layer for layer in layers}.values())), problems


def validate(plan: Plan, layers: Sequence[Layer] | None = None, target: Target | None = None) -> list[Problem]:
    """Finds every problem that would stop `plan`, on a model of `layers` if given, or make its result wrong."""
    problems = _check_model(plan, layers) if layers is not None else []
    problems += _check_layers(plan)
    for layer in plan.quantized:
        try:
            parse_solver(layer.solver)
        except ValueError as error:
            problems.append(Problem(layer.name, str(error)))
    problems += _check_groups(plan)
    if target is not None:
        problems += _check_target(plan, target)
    return problems


def count_problems(plan: Plan, config: Any) -> list[Problem]:
    """Returns the problem of a plan whose `kv_layers` are not as many as the layers of a model of transformers."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    blocks = getattr(config, "num_hidden_layers", 0)
    what = f"{len(plan.kv_layers)} formats in kv_layers, and the model has {blocks} layers"
    return [Problem("plan", what, "give one for each")] if len(plan.kv_layers) not in (0, blocks) else []


def first_problem(plan: Plan, target: str) -> str | None:
    """Returns the first reason why a runtime, a key of `TARGETS`, would not take a plan; None if it takes it."""
    return next((f"{each.where}: {each.what}" for each in validate(plan, target=TARGETS[target])), None)


def refuse(plan: Plan, problems: Sequence[Problem], layers: Sequence[Layer]) -> None:
    """Raises UserError where a plan of `read_plan` cannot be executed on a model: every problem and every place."""
    # A layer whose entry was unreadable is missing from the plan, which is not a second problem.
    unread = {problem.where for problem in problems}
    all_problems = validate(plan, layers, TARGETS.get(plan.target or ""))
    _raise([*problems, *(problem for problem in all_problems if problem.where not in unread)])


def check_plan_fits(plan: Plan, layers: Sequence[Layer]) -> None:
    """Raises UserError where `plan` was made for another model, or cannot be stored; whatever solved it or runs it."""
    _raise([*_check_model(plan, layers), *_check_layers(plan), *_check_groups(plan)])


def places_of(problems: Sequence[Problem]) -> dict[tuple[str, str], list[str]]:
    """Returns all places of each problem, by its sentence and its way out: blocks repeat, and so do their problems."""
    places: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        places.setdefault((problem.what, problem.remedy), []).append(problem.where)
    return places


def _raise(problems: Sequence[Problem]) -> None:
    if alike := places_of(problems):
        listed = "; ".join(
            f"{_places(where)}: {what}{f' ({remedy})' if remedy else ''}" for (what, remedy), where in alike.items()
        )
        raise UserError(f"the plan does not fit this model, {counted(len(problems), 'problem')}: {listed}")


def _check_model(plan: Plan, layers: Sequence[Layer]) -> list[Problem]:
    have, quantized = {layer.name: layer for layer in layers}, {layer.name for layer in plan.quantized}
    sharers = sharers_of(layer for layer in layers if layer.name not in quantized)
    problems, what = [], ""
    for planned in plan.layers:
        layer, remedy = have.get(planned.name), "name the model the plan is for"
        # The tests go from the coarsest mistake to the finest, and a layer gets one problem.
        if layer is None:
            what, remedy = "is not in the model", f"remove it, or {remedy}"
        elif layer.shape != planned.shape:
            what = f"is {list(layer.shape)} in the model and {list(planned.shape)} in the plan"
        elif planned.weight is None:
            continue
        elif _as_multiplied(layer) != _as_multiplied(planned):
            what = f"is {_as_multiplied(layer)} in the model and {_as_multiplied(planned)} in the plan"
        elif (other := sharers.get(layer.name, layer.kind != LayerKind.HEAD and layer.tied_to)) and not planned.tied_to:
            what = f"its weight is also that of {other} in the model, and is stored once and in 16 bit"
            remedy = _KEEP_IT
        elif layer.obstacle is not None:
            what, remedy = layer.obstacle, _KEEP_IT
        else:
            continue
        problems.append(Problem(planned.name, what, remedy))
    for name, layer in have.items():
        # A plan may leave out parameters that no plan can quantize.
        if name not in plan.by_name and layer.kind != LayerKind.PARAMETER:
            problems.append(Problem(name, "is in the model and not in the plan", "add it, with weight null for 16 bit"))
    return problems


def _as_multiplied(layer: Layer | LayerPlan) -> str:
    """Returns how a weight is read, in which plan and model must agree; shapes do not always show it."""
    what = _READ_AS.get(layer.kind, "a matrix")
    return f"{what} stored with its inputs first" if layer.transposed else what


def _check_layers(plan: Plan) -> list[Problem]:
    problems, sharers = [], sharers_of(plan.layers)
    try:
        check_settings(plan)
    except ValueError as error:
        problems.append(Problem("plan", str(error)))
    for layer in plan.layers:
        if problem := layer_problem(layer, sharers.get(layer.name)):
            problems.append(Problem(layer.name, problem, "choose another format, or keep it in 16 bit"))
        if layer.weight is None and layer.activation is not None:
            what = f"inputs in {layer.activation} and weights in 16 bit: no kernel takes that"
            problems.append(Problem(layer.name, what, "give the weight a format, or the input none"))
    return problems


def _check_groups(plan: Plan) -> list[Problem]:
    return [Problem(name, what, "give its members one: they are fused") for name, what in plan.mixed_groups()]


def _check_target(plan: Plan, target: Target) -> list[Problem]:
    problems, followed = _check_fused(plan, target)
    # Some runtimes accept a pair of formats only where the whole checkpoint has it (`Pair.mixes`).
    mixed = len({layer.formats for layer in plan.quantized}) > 1
    for layer in plan.quantized:
        remedy = "plan edit --set 'LAYER=FORMAT@INPUT', or another target"
        whats = target.problems(layer, merged=layer.name in followed, mixed=mixed)
        problems += [Problem(layer.name, what, remedy) for what in whats]
    if plan.has_kv_mix:
        what = f"{target.name} keeps the KV cache of all layers in one format; the plan has {plan.kv_text}"
        problems.append(Problem("plan", what, "plan edit --kv-cache keep"))
    cache = plan.kv_of_all
    if cache is not None and cache.name not in target.kv_cache:
        known = ", ".join((*target.kv_cache, "16bit"))
        what = f"{target.name} cannot keep the KV cache in {cache}; it has {known}"
        problems.append(Problem("plan", what, "plan edit --kv-cache keep"))
    return problems


def _check_fused(plan: Plan, target: Target) -> tuple[list[Problem], set[str]]:
    """Returns problems of siblings that `target` merges, and the layers that another one follows in such a matrix."""
    siblings: dict[tuple[str, tuple[str, ...]], list[LayerPlan]] = {}
    for layer in plan.layers:
        parent, _, last = layer.name.rpartition(".")
        for names in target.fused:
            if last in names and layer.kind == LayerKind.LINEAR:
                siblings.setdefault((parent, names), []).append(layer)
    problems: list[Problem] = []
    followed: set[str] = set()
    for (parent, names), members in siblings.items():
        members.sort(key=lambda m: names.index(m.name.rpartition(".")[2]))
        # In the merged matrix the rows of the next member follow, so only the last may end within a tile.
        followed.update(m.name for m in members[:-1])
        # A runtime merges by name, whether or not the plan has a fusion group for these layers.
        if len({m.group for m in members}) == 1 and members[0].group is not None:
            continue  # one fusion group, which has been checked
        # The spelling of fusion groups: PARENT.(q_proj|k_proj|v_proj).
        where = f"{parent}.({'|'.join(m.name.rpartition('.')[2] for m in members)})"
        if len({m.formats for m in members}) > 1:
            listed = ", ".join(f"{m.name}={m.formats}" for m in members)
            problems.append(Problem(where, f"{target.name} merges these, in one format: {listed}", "give them one"))
        # E.g. NVFP4: two-level scales, whose tensor scale is one float32 for the whole merged matrix.
        elif len(members) > 1 and members[0].weight is not None and members[0].weight.is_static:
            what = f"{target.name} merges these, and {members[0].weight} then needs one tensor scale for all"
            problems.append(Problem(where, what, "give them the same `group` in the plan, so that they share it"))
    return problems, followed


def _places(names: Sequence[str]) -> str:
    """Returns `names` as a text; in a long list, names that differ only in numbers become one."""
    if len(names) <= 8:
        return ", ".join(names)
    alike = Counter(re.sub(r"\d+", "*", name) for name in names)
    return ", ".join(f"{name} ({counted(count, 'layer')})" for name, count in alike.items())


class Change(NamedTuple):
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
