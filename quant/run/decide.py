"""The second stage decides the plan of a run: it follows from a recipe, or an allocation chooses it for a budget.

Candidates of a budget are measured rounded to nearest, and the chosen formats are solved like any other plan
(docs/budgets.md).

Some models have heads for multi-token prediction, which transformers does not run. Their weights lie in the files of
the model and in none of its modules, so no calibration data reaches them. A glob of `--include` that matches nothing
else adds them to the plan (docs/sources.md); runs of all other models pass by here.

The KV cache of each layer gets a format by its measured loss (`choose_kv_layers`): its keys and values are rounded to
each format while all others stay in 16 bit, and KL(base‖model) is measured on calibration rows. A knapsack finds the
formats with the least sum of these losses within the bytes. Losses add up only roughly: the mix is measured as a whole,
and so is every single format that fits, and the best of them is taken. Where weights and cache share one budget
(`auto`), knapsacks of several sizes give mixes, and those that lose less than every smaller one are kept: the
allocation measures the weights beside each.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import UserError, listed, option, quoted, versions
from quant.base.json_files import read_json, typed, write_json
from quant.base.listener import SILENT
from quant.calibration.allocation.allocate import Allocation, allocate, check_feasible
from quant.calibration.allocation.goal import AllocationRecord, Goal
from quant.calibration.allocation.measure_choices import HeldOut
from quant.calibration.attention_names import text_config
from quant.calibration.attention_scales import check_attention
from quant.calibration.evaluating import prepared
from quant.calibration.inputs import call_on_first_row
from quant.calibration.sensitivity.costs import kv_layer_bytes
from quant.calibration.sensitivity.divergence import NextToken, divergence_of
from quant.calibration.sensitivity.knapsack import KnapsackProblem, solve
from quant.calibration.sensitivity.table import Sensitivity, parse_candidates
from quant.calibration.session import Session, device_of
from quant.calibration.solvers.registry import with_supported_solver
from quant.calibration.texts.mixture import NoTextError, Record, lacks_data, with_calibration, with_data
from quant.calibration.texts.sources import as_rows, named_inputs
from quant.evaluation.tasks import held_out_task
from quant.export.checkpoint.carry_over import head_weights
from quant.export.checkpoint.files.compressed_tensors import check_plan
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.other_runtimes import check_experts
from quant.export.gguf.export_gguf import check_gguf, stored_vocabulary, vocabulary
from quant.formats.format import FORMATS
from quant.generate.quantized_attention import quantized_attention
from quant.models.files import SourceKind
from quant.models.huggingface import has_tokenizer
from quant.models.open_model import Source
from quant.models.prediction_heads import attach_head_layer, plan_heads
from quant.recipes import solver_names
from quant.recipes.blocks import is_denoiser, stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.plan import KV_LAYERS, LayerPlan, Plan, set_guard_and_observer, set_kv_cache
from quant.recipes.plan_check import count_problems, refuse
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import KEEP, Recipe, matched
from quant.recipes.solver_names import solver_of
from quant.run.job import Decision, Job, announce_budget, announce_effort, calibration_data, check_same, evaluation_data
from quant.run.request import KV_AUTO, Request


def decide(job: Job) -> Decision:
    """Returns the plan of a run; ValueError for one that does not fit the model, or the layout to be written."""
    request, source = job.request, job.source
    if request.is_gguf and source.model is not None:
        check_gguf(source.model, None)  # before hours of work: llama.cpp may have no such model, or no such tokenizer
        gguf_words(source)
    if request.goal is not None:
        decision = for_budget(job, request.goal)
    else:
        recipe, named = request.chosen_recipe, [request.solver]
        if is_made_here := isinstance(recipe, Recipe):
            named += [recipe.solver, *(rule.solver for rule in recipe.rules)]
        plan = plan_for(request, source)
        choice = None if request.plan_file is None else _read_choice(request.plan_file, plan)
        decision = Decision(
            plan,
            request.data,
            may_lower_effort=is_made_here,
            allocation=choice,
            tries_transforms=is_made_here and not any(named),  # an effort chooses every solver
        )
    if source.model is not None:
        planned = decision.plan
        attends = planned.attention is not None
        check_attention(source.model, kv_cache=bool(planned.kv_text), attention=attends, plan=request.plan_file)
        for problem in count_problems(planned, source.config):
            raise UserError(f"{request.plan_file or 'the plan'}: {problem.what}; {problem.remedy}")
    if request.is_in_memory and request.out is None:
        return decision
    # Before data is read: a format that the layout cannot hold would only fail when files are written.
    check_layout(request, decision.plan, source.model)
    if request.only_decides:
        return decision if request.goal is not None or request.is_in_memory else _for_dry_run(job, decision)
    if source.model is None:
        announce_effort(job.listener, decision.plan)
        request.check_state_dict(decision.plan)
    elif not request.allow_missing:
        check_experts(decision.plan, stored_names(source.model))
    return decision


def gguf_words(source: Source) -> dict[str, Any] | None:
    """Returns the metadata of a model's tokenizer for its GGUF file; None where no file of one is there."""
    if source.kind == SourceKind.GGUF and source.path is not None:
        return stored_vocabulary(source.path)
    if source.path is None or not has_tokenizer(source.path):
        return None
    return vocabulary(source.load_tokenizer(), source.config.vocab_size)


def check_layout(request: Request, plan: Plan, model: nn.Module | None) -> None:
    """Raises ValueError where what is to be written cannot hold a plan."""
    gguf = next((layer for layer in plan.quantized if layer.weight is not None and layer.weight.gguf), None)
    if request.is_gguf or (gguf is not None and request.out is None):
        if model is None:
            raise UserError(f"{request.model}: a bare state dict; a GGUF file takes the directory of a model")
        check_gguf(model, plan)
    elif gguf is not None:
        named = "name one, " + option("out", quoted(f"{str(request.out).removesuffix('.GGUF')}.gguf"))
        named = "take another format, such as fp8_channel" if request.is_in_memory else named
        raise UserError(f"{gguf.name}: only GGUF files hold {gguf.weight}: {named}")
    else:
        check_plan(plan)


def plan_for(request: Request, source: Source) -> Plan:
    """Returns the plan that a request's recipe makes for a model, or the plan that the request names."""
    recipe = request.chosen_recipe
    if isinstance(recipe, Recipe):
        plan = _recipe_plan(request, source, recipe)
    else:
        plan, problems = recipe
        attach_planned_heads(source, plan)
        if not request.is_in_memory:  # else solving checks that it fits
            refuse(plan, problems, source.layers)
            plan = replace(plan, provenance={**plan.provenance, **_origin(source)})
    plan = set_guard_and_observer(plan, request.guard, request.observer)
    chooses = request.observer not in (None, solver_names.DEFAULT_OBSERVER) and source.model is not None
    if chooses and plan.guard is None and not any(layer.has_static_scale for layer in plan.quantized):
        raise UserError(f"{option('observer', request.observer)}: no input has a static scale to choose; leave it out")
    return plan


def _recipe_plan(request: Request, source: Source, recipe: Recipe) -> Plan:
    """Returns the plan that a recipe makes for the model, with the origin of both in its provenance."""
    globs = split_globs(request, source)
    plan = make_plan(
        source.shapes if source.model is None else source.model, recipe, include=globs.include, exclude=globs.exclude,
        solver=request.solver, effort=solver_names.DEFAULT_EFFORT if request.effort is None else request.effort,
        lm_head=request.lm_head, run=example_run(request, source),
    )  # fmt: skip
    plan = with_heads(plan, source, globs.heads)
    origin = provenance(request, source, recipe=recipe.name) or {}
    # Records of the plan itself win over the request's.
    plan = replace(plan, provenance={**origin, **plan.provenance})
    if source.model is None:
        # Nothing can run a bare state dict, so inputs cannot be measured and the plan says so.
        plan = plan.replace_layers(
            replace(layer, activation=None, reason=f"{layer.reason}; weight only: a bare state dict cannot be run")
            for layer in plan.quantized
            if layer.activation is not None
        )
    if not request.is_in_memory and lacks_data(plan):
        plan = replace(plan, provenance={**plan.provenance, "calibration": request.calibration_rows.label})
    return plan


def example_run(request: Request, source: Source) -> Callable[[nn.Module], Any] | None:
    """Calls the model on one input, to find its fusion groups; None where token ids do."""
    if request.run is not None:
        return request.run
    if request.is_in_memory:
        data, model = request.data, source.module
        # Token ids need no example where a model reads them alone: `make_plan` runs it on two ids by itself.
        is_decoder_only = not getattr(text_config(getattr(model, "config", None)), "is_encoder_decoder", False)
        reads_ids = getattr(model, "main_input_name", "") == "input_ids" and is_decoder_only
        return None if data is None or (reads_ids and not data.is_floating_point()) else call_on_first_row(data)
    inputs = named_inputs(source, replace(request.calibration_rows, samples=1))
    return None if inputs is None else call_on_first_row(inputs)


def provenance(request: Request, source: Source, **more: str) -> dict[str, Any] | None:
    """Returns the origin of a plan, as it is written into it; a module in memory has none."""
    if request.is_in_memory:
        return None
    command = {"command": request.command, "seed": request.seed, "versions": versions()}
    return {"model": source.name, **_origin(source), **more, **command}


def _origin(source: Source) -> dict[str, str]:
    """Returns the commit of the model that a plan was made for, and the format of files that hold it quantized."""
    origin = {"revision": source.revision, "source_format": source.quantization}
    return {key: value for key, value in origin.items() if value is not None}


def for_budget(job: Job, goal: Goal) -> Decision:
    """Chooses formats for a budget or a limit on the loss; Infeasible, from shapes alone, where no choice keeps it."""
    request, source = job.request, job.source
    if source.model is None:
        raise UserError(
            f"{request.model}: a bare state dict cannot be run, and an allocation measures; pass "
            f"{option('model_factory')}"
        )
    if heads := split_globs(request, source).heads:
        raise UserError(
            f"{option('include', next(iter(heads)))}: transformers does not run this prediction head, so no "
            "allocation can measure it; choose a format for the model instead of a budget, or leave the glob out"
        )
    choices: dict[str, Any] = {
        "include": request.include,
        "exclude": request.exclude,
        "kv_cache": request.kv_cache_format,
    }
    options = request.budget.options()
    if (origin := provenance(request, source)) is not None:
        origin["calibration"] = request.calibration_rows.label
    # From shapes alone, before text is written and scores are measured, which takes minutes. All that needs text comes
    # afterwards.
    layers = getattr(text_config(getattr(job.model, "config", None)), "num_hidden_layers", 1)
    smallest_cache = {("nvfp4",) * layers: 0.0} if request.kv_bits is not None else {}
    asked = {name: options[name] for name in ("formats", "constraints")}
    check_feasible(job.model, goal, run=example_run(request, source), kv_mixes=smallest_cache, **asked, **choices)
    # An allocation measures hundreds of choices, so it rounds to nearest unless an effort is requested. A better solver
    # lowers the loss of all choices alike, and the chosen formats are solved by it afterwards.
    solver = request.solver or solver_of(request.effort or 0, KEEP)
    takes_default = request.solver is None and request.effort is None and not goal.has_limit
    example = _example_plan(job, options["formats"], None if takes_default else solver)
    announce_budget(job, example, goal, parse_candidates(options["formats"]), solver)
    better = next((layer.solver for layer in example.quantized if layer.solver != "rtn"), None)
    if takes_default and better is not None:
        job.listener.message(
            f"formats are chosen for weights rounded to nearest, and then solved by {better}; "
            f"{option('solver', better)} chooses them for solved weights, which takes longer (docs/budgets.md)"
        )
    with job.stages() as (staged, _):
        rows, records, held_out = _rows(staged, goal)
        caches = {}
        if request.kv_bits is not None:
            bits = None if request.kv_bits == KV_AUTO else float(request.kv_bits)
            caches = {one.layers: one for one in choose_kv_layers(job.model, rows, bits, staged.session)}
            choices["kv_mixes"] = {layers: one.loss for layers, one in caches.items()}
        allocation = allocate(
            job.model, rows, goal, solver=solver,
            run=request.run or (call_on_first_row(rows) if rows.is_floating_point() else None), held_out=held_out,
            seed=request.seed, provenance=origin, device=staged.session.device, progress=staged.session.progress,
            **choices, **options,
        )  # fmt: skip
    if caches:
        plan = allocation.plan
        plan = replace(plan, provenance={**plan.provenance, "kv_layers": caches[plan.kv_layers].record})
        if not plan.has_kv_mix and plan.kv_layers[0] != "nvfp4":  # what checkpoints have a word for
            plan = set_kv_cache(plan, plan.kv_layers[0])
        allocation = replace(allocation, plan=plan)
    job.seconds.update(score=allocation.sensitivity.seconds, allocate=allocation.record.seconds)
    # A limit is verified on the weights that were measured, so these are the weights of the plan.
    if takes_default and (plan := _by_default_solvers(allocation.plan, job.model)) != allocation.plan:
        record = replace(allocation.record, measured_with=allocation.plan.quantized[0].solver)
        allocation = replace(allocation, plan=plan, record=record, quantized=None)
    # Ranks sum floating-point losses in the same order, so that this never differs but through a defect.
    check_same({"the plan that the budget chose": allocation.plan.digest()}, job.session)
    plan = allocation.plan if records is None else with_calibration(allocation.plan, records)
    if request.is_in_memory:
        allocation = replace(allocation, quantized=None)  # the module itself is to be quantized, and no copy of it
    return Decision(plan, rows, allocation=allocation, tries_transforms=takes_default)


def _rows(job: Job, goal: Goal) -> tuple[Tensor, list[Record] | None, HeldOut | None]:
    """Returns the rows that score and solve, records of rows that were read here, and held-out rows for a limit."""
    request = job.request
    held_out = None
    # Read here too where nothing is limited: a text that is missing or too short is refused before the choice.
    texts = evaluation_data(replace(job, listener=SILENT))
    if goal.has_limit and texts:
        held_out = HeldOut.halves({name: as_rows(job.model, rows, "a limit") for name, rows in texts.items()})
    data, records = request.data, None
    if data is None:
        globs: dict[str, Any] = {"include": request.include, "exclude": request.exclude}
        data, records = calibration_data(job, lambda: make_plan(job.model, "fp8", run=request.run, **globs))
    rows = as_rows(job.model, data, "a budget")
    if goal.has_limit and held_out is None:
        # A limit that is kept and verified on the solver's own rows would be kept by overfitting.
        rows, held_out = HeldOut.from_calibration(rows)
    if request.budget.task is not None:
        questions = held_out_task(request.budget.task[0], job.source.load_tokenizer())
        held_out = replace(held_out or HeldOut({}, {}), task=questions)
    return rows, records, held_out


def _example_plan(job: Job, formats: str | Sequence[str], solver: str | None) -> Plan:
    """Returns a plan of the first of `formats` for every layer, to tell the time; None for the default's solvers."""
    request, candidate = job.request, parse_candidates(formats)[0]
    plan = make_plan(job.model, "fp8", run=request.run, include=request.include, exclude=request.exclude)
    plan = plan.replace_layers(candidate.applied(layer) for layer in plan.quantized)
    if solver is None:
        return _by_default_solvers(plan, job.model)
    return plan.replace_layers(with_supported_solver(replace(layer, solver=solver)) for layer in plan.quantized)


def _by_default_solvers(plan: Plan, model: nn.Module) -> Plan:
    denoiser = is_denoiser(model)
    experts = any(layer.kind == LayerKind.EXPERTS or ".experts." in layer.name for layer in plan.quantized)

    def solved(layer: LayerPlan) -> LayerPlan:
        activation = KEEP if layer.activation is None else layer.activation.name
        solver = solver_of(solver_names.DEFAULT_EFFORT, activation, experts=experts, denoiser=denoiser)
        return with_supported_solver(replace(layer, solver=solver))

    return plan.replace_layers(map(solved, plan.quantized))


class Globs(NamedTuple):
    """The globs of a request for the model's own layers, and the prediction heads that other globs include."""

    include: list[str]
    exclude: list[str]
    heads: dict[str, Tensor]


def split_globs(request: Request, source: Source) -> Globs:
    """Tells globs for prediction heads from those for the model's layers.

    A glob of --include that matches only heads adds them, and leaves the choice among the model's own layers as it is.
    One of --exclude keeps heads in 16 bit too.
    """
    globs = (request.include, request.exclude)
    include, exclude = ([each] if isinstance(each, str) else list(each) for each in globs)
    if source.model is None or source.directory is None or not include:
        return Globs(include, exclude, {})
    names = [layer.name for layer in source.layers]
    for_heads = [glob for glob in include if not matched(glob, names)]
    if not for_heads:
        return Globs(include, exclude, {})
    # Name by name, an exact name is still a glob, which may match other heads too: only all names tell them apart.
    weights = head_weights(source.model, source.directory, lambda name: bool(matched(for_heads, (name,))))
    heads = matched(for_heads, weights)
    # A glob that matches nothing at all goes on to `make_plan`, which refuses it.
    include = [glob for glob in include if glob not in for_heads or not matched(glob, heads)]
    excluded = matched(exclude, heads)
    exclude = [glob for glob in exclude if matched(glob, names) or not matched(glob, heads)]
    return Globs(include, exclude, {name: weights[name] for name in heads if name not in excluded})


def with_heads(plan: Plan, source: Source, weights: Mapping[str, Tensor]) -> Plan:
    """Returns `plan` with the layers of prediction heads, which get modules in the model."""
    if not weights:
        return plan
    layers = plan_heads(plan, weights, stored_names(source.module))
    if not layers:
        raise UserError(
            f"{listed(weights, 3)}: the last block of {type(source.module).__name__} has no quantized layer in the "
            "same place and of the same shape, so a prediction head's layers stay in 16 bit; leave that "
            f"{option('include')} out"
        )
    for layer in layers:
        attach_head_layer(source.module, layer.name, _as_model(source.module, weights[layer.name]))
    return replace(plan, layers=(*plan.layers, *layers))


def attach_planned_heads(source: Source, plan: Plan) -> None:
    """Attaches modules for the layers of prediction heads that a plan quantizes."""
    if source.model is None or source.directory is None:
        return
    names = {layer.name for layer in source.layers}
    planned = {layer.name for layer in plan.quantized if layer.kind == LayerKind.LINEAR} - names
    if planned:
        for name, weight in head_weights(source.model, source.directory, planned.__contains__).items():
            attach_head_layer(source.model, name, _as_model(source.model, weight))


def _as_model(model: nn.Module, weight: Tensor) -> Tensor:
    """Returns a weight on the device of the model: a dry run's is on meta."""
    return weight.to(next(model.parameters()).device, stored_dtype(model))


def _for_dry_run(job: Job, decision: Decision) -> Decision:
    """Returns the decision as a run would end with it where no text can be had; UserError for one that needs data."""
    model, plan = job.source.model, decision.plan
    reads_tokens = model is None or any(isinstance(module, nn.Embedding) for module in model.modules())
    if reads_tokens or job.request.calib or not lacks_data(plan):
        return decision

    def refuse() -> NoReturn:
        raise NoTextError(plan, f"{type(model).__name__} has no embedding of token ids, so it writes no text")

    if not decision.may_lower_effort:
        refuse()
    return replace(decision, plan=with_data(plan, refuse)[0])


def save_plan(decision: Decision, file: Path) -> None:
    """Writes a plan; the measurements by which its formats were chosen go next to it, for the report of its run."""
    decision.plan.save(file)
    if (choice := decision.allocation) is not None:
        parts = {"record": choice.record.to_dict(), "sensitivity": choice.sensitivity.to_dict()}
        write_json(_choice_file(file), {"plan": decision.plan.digest(), **parts}, ensure_ascii=False)


def _read_choice(file: Path, plan: Plan) -> Allocation | None:
    """Returns the choice that made a plan; None without one, or if the plan was edited since."""

    def parse(document: Any) -> Allocation | None:
        fields = typed(dict[str, Any], document, "choice")
        if fields.get("plan") != plan.digest():
            return None
        record = AllocationRecord.from_dict(typed(dict[str, Any], fields.get("record"), "record"))
        return Allocation(
            plan, record, Sensitivity.from_dict(typed(dict[str, Any], fields.get("sensitivity"), "table"))
        )

    path = _choice_file(file)
    return read_json(path, "the measurements of a plan", parse) if path.is_file() else None


def _choice_file(plan_file: Path) -> Path:
    return plan_file.with_suffix(".choice.json")


_ROWS = 2
_SIZES = (4.5, 5, 5.5, 6.25, 7, 8, 10, 12, 16)  # bits a value of the mixes beside which weights are measured


@dataclass(frozen=True)
class KVChoice:
    """The format of each layer's cache, its loss, and the measurements that led to it."""

    layers: tuple[str, ...]
    loss: float
    record: dict[str, Any]  # for the plan's provenance


def choose_kv_layers(model: nn.Module, rows: Tensor, bits: float | None, session: Session) -> list[KVChoice]:
    """Returns the cache's formats within `bits` a value on average, scales counted, by losses on token ids `rows`.

    Without `bits`, choices of rising bytes and falling loss. UserError: a model without next tokens or without a cache
    that can be quantized, or too few bits.
    """
    config, rows = getattr(model, "config", None), rows[:_ROWS].to(device_of(model))
    sizes = np.array([kv_layer_bytes(config, 4096, 1, FORMATS.get(name)) for name in KV_LAYERS], dtype=float).T
    if not len(sizes) or not sizes.all():
        raise UserError(
            f"{type(model).__name__}: {option('kv_bits')} needs attention with a KV cache in every layer; leave it out"
        )
    layers, total = [f"layer {index}" for index in range(len(sizes))], sizes.sum(axis=0)

    def limit(bits: float) -> float:
        return float(total[2] * bits / 16 * (1 + 1e-4))

    if bits is not None and limit(bits) < total[0]:
        least = math.ceil(1600 * total[0] / total[2]) / 100
        raise UserError(f"{option('kv_bits', f'{bits:g}')}: the smallest feasible value is {least:g}")
    divergence = divergence_of(model, rows)
    if not isinstance(divergence, NextToken):
        raise UserError(f"{type(model).__name__}: {option('kv_bits')} needs a causal language model")
    with prepared(model, torch.float32, session):
        references = [divergence.reference(row) for row in rows.split(1)]

        def loss(names: Sequence[str]) -> float:
            with quantized_attention(model, kv_cache=",".join(names)):
                sums = [divergence.measure(row, base)() for row, base in zip(rows.split(1), references, strict=True)]
            return sum(sums) / divergence.count(rows)

        scores, plain = np.zeros(sizes.shape), ["16bit"] * len(layers)
        for index in range(len(layers)):
            for j, name in enumerate(KV_LAYERS[:-1]):
                scores[index, j] = loss([*plain[:index], name, *plain[index + 1 :]])
            session.report("cache", index + 1, len(layers))
        problem = KnapsackProblem(tuple(layers), KV_LAYERS, scores, {"bytes": sizes})
        limits = [limit(size) for size in (_SIZES if bits is None else (bits,)) if limit(size) >= total[0]]
        mixes = [tuple(KV_LAYERS[j] for j in solve(problem, {"bytes": most})) for most in limits]
        single_mixes = {
            name: (name,) * len(layers) for j, name in enumerate(KV_LAYERS) if bits is None or total[j] <= limit(bits)
        }
        # Each once, and in one order in every process: the first of equal losses is taken.
        measured = {mix: loss(mix) for mix in dict.fromkeys((*mixes, *single_mixes.values()))}
        single = {name: measured[mix] for name, mix in single_mixes.items()}
    order = {name: j for j, name in enumerate(KV_LAYERS)}
    used = {mix: sizes[range(len(mix)), [order[name] for name in mix]].sum() for mix in measured}
    best = [min(measured, key=measured.__getitem__)] if bits is not None else [
        mix for mix in sorted(measured, key=used.__getitem__)
        if all(measured[mix] < measured[other] for other in measured if used[other] < used[mix])
    ]  # fmt: skip
    choices = []
    for mix in best:
        counts = ", ".join(f"{name} in {count} layers" for name, count in Counter(mix).most_common())
        within = "beside the weights of this budget" if bits is None else f"within {bits:g} bits a value"
        record = {
            "bits": 16 * used[mix] / total[2] if bits is None else bits,
            "loss": measured[mix],
            "single_formats": single,
            "losses": scores.tolist(),
            "reason": f"{counts}: KL {measured[mix]:.3g} {within}; "
            + ", ".join(f"{name} for all {each:.3g}" for name, each in sorted(single.items(), key=lambda one: one[1])),
        }
        choices.append(KVChoice(mix, measured[mix], record))
    return choices
