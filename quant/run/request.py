"""A `Job` holds the options of `quantize` and says what they ask for: a recipe or plan, a destination, an allocation.

It refuses options that contradict each other or the model before anything slow starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quant.allocation.allocate import FORMATS
from quant.allocation.bench import Effort
from quant.allocation.goal import Constraint, Goal
from quant.calibration.inputs import on_first
from quant.calibration.placement import find_device
from quant.calibration.sensitivity.costs import parse_quantity
from quant.errors import UserError
from quant.execution.data import lacks_data, solver_needs_data
from quant.execution.sources import Rows, named_inputs, sources_of
from quant.execution.store import Partial, is_finished
from quant.export.checkpoint.directory import check_apart, check_destination
from quant.extras import versions
from quant.models.files import find_model
from quant.models.open import Source
from quant.plan.check import Problem, read_plan, refuse
from quant.plan.edit import set_guard_and_observer
from quant.plan.make import kv_cache_name, make_plan
from quant.recipes import effort
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe, get_recipe
from quant.recipes.solver_names import DEFAULT_OBSERVER
from quant.run.same_on_ranks import check_same

PlanFile = tuple[Plan, list[Problem]]
"""A plan as it was read, and the entries of it that could not be read."""


@dataclass(frozen=True)
class AllocationRequest:
    """Budgets with their units, limits, and what may be chosen; see `quant.Goal` for what they mean."""

    bits: float | None = None
    fit: str | None = None
    ctx: str = "4096"
    batch: int = 1
    latency: str | None = None
    target: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    formats: str | None = None
    method: str | None = None
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    sensitivity: Path | None = None
    search: int | None = None

    def goal(self) -> Goal | None:
        """What is asked for; None where nothing is.

        Raises:
            UserError: a quantity that cannot be read, or an option that means nothing without a budget.
        """
        for option, given, users in (
            ("--ctx", self.ctx != type(self).ctx, {"--fit": self.fit}),
            ("--batch", self.batch != type(self).batch, {"--fit": self.fit, "--latency": self.latency}),
        ):
            if given and all(value is None for value in users.values()):
                raise UserError(
                    f"{option} means something to {' and '.join(users)} only; leave it out, or give one too"
                )
        budgets = (self.bits, self.fit, self.latency, self.max_kl, self.max_ppl_increase)
        if all(budget is None for budget in budgets):
            extras = {
                "--formats": self.formats, "--method": self.method, "--target": self.target, "--pin": self.pin,
                "--forbid": self.forbid, "--at-least": self.at_least, "--sensitivity": self.sensitivity,
                "--search": self.search is not None,
            }  # fmt: skip
            alone = [option for option, value in extras.items() if value]
            if alone:
                raise UserError(
                    f"{alone[0]} needs something to allocate for: "
                    "--bits, --fit, --latency, --max-kl or --max-ppl-increase"
                )
            return None
        return Goal(
            bits=self.bits,
            fit=_read("--fit", self.fit, "size"),
            context=int(_read("--ctx", self.ctx, "count") or 0),
            batch=self.batch,
            latency=_read("--latency", self.latency, "time"),
            target=self.target,
            max_kl=self.max_kl,
            max_ppl_increase=_read("--max-ppl-increase", self.max_ppl_increase, "ratio"),
        )

    def options(self) -> dict[str, Any]:
        """What else `allocate` takes from here."""
        constraints = [
            Constraint.parse(kind, text)
            for kind, texts in (("pin", self.pin), ("forbid", self.forbid), ("at_least", self.at_least))
            for text in texts
        ]
        return {
            "formats": self.formats or FORMATS,
            "method": self.method or "fisher",
            "constraints": constraints,
            "path": self.sensitivity,
            "effort": Effort(measurements=self.search),
        }


@dataclass(frozen=True)
class Job:
    """The options of `quantize`, as its help describes them."""

    model: str
    format_name: str | None = None
    recipe_file: Path | None = None
    plan_file: Path | None = None
    solver: str | None = None
    effort: int | None = None
    guard: str | None = None
    observer: str | None = None
    kv_cache: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lm_head: str | None = None
    out: Path | None = None
    overwrite: bool = False
    allow_missing: bool = False
    restart: bool = False
    memory: str | None = None
    calib: tuple[str, ...] = ()
    calib_samples: int = 32
    eval_texts: tuple[str | Path, ...] = ()
    eval_samples: int = 16
    seqlen: int = 512
    seed: int = 0
    device: str = "auto"
    dry_run: bool = False
    model_factory: str | None = None
    unsafe_load: bool = False
    command: str = "quantize"
    request: AllocationRequest = field(default_factory=AllocationRequest)

    def check_destination(self) -> None:
        """Raises UserError, or the OSError of what is in the way, unless --out is a place to write to."""
        if self.out is None:
            raise UserError("name a directory for the checkpoint with --out DIR, or pass --dry-run for the plan alone")
        texts = (*sources_of(self.calib), *self.eval_texts, self.recipe_file)
        check_apart(self.out, find_model(self.model), *texts, self.request.sensitivity)
        if self.request.sensitivity is not None:
            check_apart(self.request.sensitivity, find_model(self.model), *texts)
        if not is_finished(self.out) or self.restart:
            check_destination(self.out, overwrite=self.overwrite)

    def check_allocation(self) -> None:
        """Raises UserError for options that fix what an allocation chooses."""
        fixed = {"--format": self.format_name, "--recipe": self.recipe_file, "--plan": self.plan_file}
        if named := _given(fixed):
            raise UserError(
                f"{named} fixes the formats that a budget would choose; name what it may use with --formats"
            )
        if self.lm_head is not None:
            raise UserError(
                f"--lm-head {self.lm_head}: a budget counts the layers inside the model; leave it out, then run `quant "
                f"plan edit DIR/plan.json --set lm_head={self.lm_head}` and quantize again with that plan"
            )
        if self.dry_run:
            raise UserError(
                "--dry-run reads no weights, and an allocation measures what they lose; leave one of them out"
            )
        if named := _given({"--guard": self.guard, "--observer": self.observer}):
            raise UserError(
                f"{named} would change what the allocation has measured; leave it out, and quantize again with "
                f"--plan DIR/plan.json {named} …"
            )

    def check_state_dict(self, plan: Plan) -> None:
        """Raises UserError where the job needs a model that runs; a bare state dict does not."""
        named = _given(
            {
                "--eval": self.eval_texts or None,
                "--calib": self.calib or None,
                "a KV cache's scales": plan.kv_cache,
                "a guard": plan.guard,
                "an observer": None if plan.observer == DEFAULT_OBSERVER else plan.observer,
                **{f"{m.name}'s solver {m.solver}": True for m in plan.quantized if solver_needs_data(m)},
                **{f"{m.name}'s static input scale": True for m in plan.quantized if m.has_static_scale},
            }
        )
        if named:
            raise UserError(
                f"{self.model}: {named} takes a model that runs, and this is a bare state dict; pass --model-factory "
                "to build its module, or leave it out"
            )

    def recipe(self) -> Recipe | PlanFile:
        """What --format, --recipe or --plan names."""
        if sum(given is not None for given in (self.format_name, self.recipe_file, self.plan_file)) != 1:
            raise UserError("give exactly one of --format, --recipe and --plan")
        if self.plan_file is not None:
            options = (self.solver, self.kv_cache, self.include, self.exclude, self.lm_head)
            if any(options) or self.effort is not None:
                raise UserError(
                    "--plan says everything already: edit it instead of using --solver, --effort, --kv-cache, "
                    "--include, --exclude, --lm-head"
                )
            return read_plan(self.plan_file)
        if self.recipe_file is not None:
            recipe = Recipe.load(self.recipe_file)
        else:
            assert self.format_name is not None
            recipe = get_recipe(self.format_name)
        kv_cache = self.kv_cache_name()
        return recipe if kv_cache is None else replace(recipe, kv_cache=kv_cache)

    def kv_cache_name(self) -> str | None:
        """--kv-cache as recipes spell it; None if it was not given."""
        return None if self.kv_cache is None else kv_cache_name(self.kv_cache, "--kv-cache")

    def plan(self, source: Source, recipe: Recipe | PlanFile) -> Plan:
        """The plan for a model: the recipe's, or the file's where it fits the model."""
        if not isinstance(recipe, Recipe):
            plan, problems = recipe
            refuse(plan, problems, source.layers)
            plan = replace(plan, provenance={**plan.provenance, **_origin(source)})
            return set_guard_and_observer(plan, self.guard, self.observer)
        inputs = named_inputs(source, Rows(self.calib, 1, self.seqlen))
        plan = make_plan(
            source.shapes if source.model is None else source.model,
            recipe,
            include=self.include,
            exclude=self.exclude,
            solver=self.solver,
            effort=effort.DEFAULT if self.effort is None else self.effort,
            lm_head=self.lm_head,
            run=None if inputs is None else on_first(inputs),
            provenance=self.provenance(source, recipe=recipe.name),
        )
        if source.model is None:
            # Nothing can run a bare state dict, so inputs cannot be measured and the plan says so.
            plan = plan.replace_layers(
                replace(layer, activation=None, reason=f"{layer.reason}; weight only: a bare state dict cannot be run")
                for layer in plan.quantized
                if layer.activation is not None
            )
        if lacks_data(plan):
            plan = replace(plan, provenance={**plan.provenance, "calibration": "+".join(sources_of(self.calib))})
        return set_guard_and_observer(plan, self.guard, self.observer)

    def memory_bytes(self) -> int | None:
        """--memory in bytes."""
        given = _read("--memory", self.memory, "size")
        return None if given is None else int(given)

    def partial(self, source: Source, plan: Plan) -> Partial:
        """The directory beside --out that keeps what the run finishes, or what an earlier one finished.

        Raises:
            UserError: an earlier run of something else left it.
        """
        assert self.out is not None
        device = find_device(self.device)
        check_same({"the plan": plan.digest()}, source.files.files, device)
        depends = {
            "the model's file": source.files.fingerprints(),
            "the plan": {"guard": plan.guard, "observer": plan.observer, "digest": plan.digest()},
            "the version of": versions(),
            "the seed": self.seed,
            "the kind of device": (device or torch.device("cpu")).type,
        }
        return Partial(self.out, depends, source.files, restart=self.restart)

    def provenance(self, source: Source, **more: str) -> dict[str, Any]:
        """Where a plan comes from, as it is written into it."""
        origin = {"model": source.name, **_origin(source)}
        return {**origin, **more, "command": self.command, "seed": self.seed, "versions": versions()}


def _origin(source: Source) -> dict[str, str]:
    """What else says which model a plan was made for: its commit, and the format of files that hold it quantized."""
    found = {"revision": source.revision, "source_format": source.quantization}
    return {key: value for key, value in found.items() if value is not None}


def _given(options: dict[str, Any]) -> str | None:
    """The first option that was given."""
    return next((option for option, value in options.items() if value is not None), None)


def _read(option: str, text: str | None, kind: str) -> float | None:
    try:
        return None if text is None else parse_quantity(text, kind)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None
