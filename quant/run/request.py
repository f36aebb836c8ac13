"""A `Request` holds all options of a run, from the command `quantize` or by `quant.quantize`.

`check` refuses options that contradict each other before anything slow starts. A message spells an option as the user
wrote it: `--lm-head` or `lm_head=`. Refusals that depend on the model are in `check_state_dict` and
`quant.recipes.plan_check`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, check_installed, option, quoted
from quant.calibration.allocation.goal import DEFAULT_FORMATS, Constraint, ConstraintKind, Goal
from quant.calibration.allocation.measure_choices import Counts
from quant.calibration.inputs import Inputs
from quant.calibration.sensitivity.costs import parse_quantity
from quant.calibration.sensitivity.table import parse_candidates
from quant.calibration.session import device_of, find_device
from quant.calibration.texts.mixture import solver_needs_data
from quant.calibration.texts.sources import Rows, check_sources, packages_of_sources, sources_of
from quant.calibration.walk.step_store import is_finished
from quant.evaluation.tasks import read_task
from quant.export.checkpoint.files.directory import check_apart, check_destination, check_parents
from quant.formats.format import is_16bit
from quant.models.files import find_model, packages_of
from quant.models.pipelines import is_pipeline
from quant.recipes import solver_names
from quant.recipes.plan import Plan, kv_cache_name
from quant.recipes.plan_check import Problem, read_plan
from quant.recipes.recipe import KEEP, Recipe, get_recipe
from quant.recipes.solver_names import DEFAULT_OBSERVER

KV_AUTO = "auto"
"""In place of the bits of the KV cache: it shares the budget with the weights."""
_BUDGETS = ("bits", "fit", "latency", "max_kl", "max_ppl_increase", "min_task")
# Fields whose option does not repeat their name.
_OPTIONS = {"recipe": "format", "plan_file": "plan", "eval_texts": "eval"}


def spelled(field: str, value: object = None) -> str:
    """Returns a field, and its value, as the user wrote it: `--lm-head fp8` in a command, `lm_head="fp8"` in Python."""
    return option(_OPTIONS.get(field, field), value)


@dataclass(frozen=True)
class AllocationRequest:
    """Budgets with their units, limits, and the formats to choose from; see `quant.Goal` for their meaning."""

    bits: float | None = None
    fit: str | None = None
    ctx: str = "4096"
    batch: int = 1
    latency: str | None = None
    target: tuple[str, ...] = ()
    power: str | None = None
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    min_task: str | None = None
    max_error: float | None = None  # of a denoiser's prediction, relative
    formats: str | Sequence[str] | None = None
    method: str | None = None
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    sensitivity: Path | None = None
    search: int | None = None

    def goal(self) -> Goal | None:
        """Returns the goal of the allocation; None where no budget and no limit is given."""
        for size, users in (("ctx", ("fit",)), ("batch", ("fit", "latency"))):
            # The class attribute of a dataclass field is its default; a default that is given explicitly does no harm.
            is_given = getattr(self, size) != getattr(type(self), size)
            if is_given and all(getattr(self, user) is None for user in users):
                named = " and ".join(map(spelled, users))
                raise UserError(f"{spelled(size)} means something to {named} only; leave it out, or give one too")
        if self.max_error is not None and not 0 < self.max_error < math.inf:
            raise UserError(f"{spelled('max_error', f'{self.max_error:g}')}: give a finite number above zero")
        if all(getattr(self, budget) is None for budget in (*_BUDGETS, "max_error")):
            needless = ("formats", "method", "target", "power", "pin", "forbid", "at_least", "sensitivity", "search")
            for name in needless:
                if getattr(self, name) not in (None, (), "", []):
                    raise UserError(f"{spelled(name)} needs a budget to choose formats for, such as {spelled('bits')}")
            return None
        return Goal(
            bits=self.bits,
            fit=read_quantity(spelled("fit"), self.fit, "size"),
            context=int(read_quantity(spelled("ctx"), self.ctx, "count") or 0),
            batch=self.batch,
            latency=read_quantity(spelled("latency"), self.latency, "time"),
            target=self.target,
            power=read_quantity(spelled("power"), self.power, "power"),
            max_kl=self.max_error if self.max_kl is None else self.max_kl,
            max_ppl_increase=read_quantity(spelled("max_ppl_increase"), self.max_ppl_increase, "ratio"),
            min_task=None if self.task is None else self.task[1],
        )

    @property
    def task(self) -> tuple[Path, float] | None:
        """The file of questions, and the least share of the original's right answers, of `FILE>=0.97`."""
        if self.min_task is None:
            return None
        path, sign, share = self.min_task.partition(">=")
        try:
            if path and sign:
                return Path(path.strip()).expanduser(), parse_quantity(share, "ratio")
        except ValueError:
            pass
        raise UserError(f"--min-task {self.min_task!r}: write it as 'FILE.jsonl>=0.97'")

    @property
    def counts(self) -> Counts:
        """The numbers of rows and measurements of the allocation."""
        return Counts(measurements=self.search)

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `allocate` that are given here."""
        constraints = [Constraint.parse(kind, text) for kind in ConstraintKind for text in getattr(self, kind)]
        return {
            "formats": self.formats or DEFAULT_FORMATS,
            "method": self.method or "fisher",
            "constraints": constraints,
            "path": self.sensitivity,
            "counts": self.counts,
        }


def read_quantity(option: str, text: str | None, kind: str) -> float | None:
    """Returns a quantity with its unit, such as 24GB; UserError, which names the option, if it cannot be read."""
    try:
        return None if text is None else parse_quantity(text, kind)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None


PlanFile = tuple[Plan, list[Problem]]
"""A plan as it was read, and the entries of it that could not be read."""


@dataclass(frozen=True, eq=False)
class Request:
    """The options of `quantize` and `quant plan make`, as their help describes them, and those of `quant.quantize`."""

    model: str | Path | nn.Module  # a name or path, or a module in memory, which is quantized in place
    recipe: str | Recipe | Plan | None = None  # a preset's name or a recipe file (`--format`), a recipe, or a plan
    plan_file: Path | None = None
    solver: str | None = None
    effort: int | None = None
    guard: str | None = None
    observer: str | None = None
    kv_cache: str | None = None
    kv_bits: float | str | None = None  # bits a cached value, or `KV_AUTO`
    attention: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    lm_head: str | None = None
    out: Path | None = None  # the directory that is written; None writes nothing
    overwrite: bool = False
    allow_missing: bool = False
    restart: bool = False
    memory: str | None = None
    calib: tuple[str, ...] = ()
    calib_samples: int | None = None
    eval_texts: tuple[str | Path, ...] = ()
    eval_samples: int = 16
    seqlen: int = 512
    seed: int = 0
    device: torch.device | str | None = "auto"
    dry_run: bool = False
    model_factory: str | None = None
    unsafe_load: bool = False
    data: Tensor | Inputs | None = None  # calibration data in memory; `calib` names sources of it instead
    tokenizer: Any = None  # of a module in memory
    run: Callable[[nn.Module], Any] | None = None  # calls it on a valid input, to find fusion groups
    command: str = "quantize"  # recorded in plan and report
    budget: AllocationRequest = field(default_factory=AllocationRequest)
    plan_out: Path | None = None  # the file for a plan, which is then the result
    components: str | None = None  # of a pipeline of diffusers, separated by commas; None for its denoisers
    call: Sequence[str] = ()  # arguments of a pipeline, `NAME=VALUE`
    noise: Callable[[nn.Module], list[str]] | None = None  # measures a component of a pipeline, in lines for its report

    @property
    def only_decides(self) -> bool:
        """Whether the plan is the result: nothing is solved, and no checkpoint is written."""
        return self.dry_run or self.plan_out is not None

    @property
    def reads_no_weights(self) -> bool:
        """Whether headers and configs are enough: an allocation measures, and needs weights."""
        return self.only_decides and self.goal is None

    @property
    def is_in_memory(self) -> bool:
        """Whether the model is a module of the caller, as in Python."""
        return isinstance(self.model, nn.Module)

    @cached_property
    def is_pipeline(self) -> bool:
        """Whether the model is a directory of a diffusers pipeline."""
        return not self.is_in_memory and is_pipeline(Path(str(self.model)).expanduser())

    @property
    def calibration_rows(self) -> Rows:
        """The calibration data to read."""
        return Rows(self.calib, self.calibration_samples, self.seqlen, self.seed)

    @cached_property
    def calibration_samples(self) -> int:
        """The number of rows of calibration data; before the model is open, that of a large one."""
        return self._rows_for(None) if self.calib_samples is None else self.calib_samples

    def for_model(self, model: nn.Module) -> Self:
        """Returns the request for a model that is open, with as many calibration rows as suit it."""
        if self.calib_samples is not None:
            return self
        return replace(self, calib_samples=self._rows_for(sum(parameter.numel() for parameter in model.parameters())))

    def _rows_for(self, parameters: int | None) -> int:
        """Returns the rows of calibration data; a text that the user names may not hold more than the least."""
        device = find_device(self.device)
        if device is None and isinstance(self.model, nn.Module):
            device = device_of(self.model)
        on_gpu = device is not None and device.type == "cuda"
        solvers = ("", *self._solvers())
        return max(solver_names.rows_of(solver, on_gpu=on_gpu, parameters=parameters) for solver in solvers)

    def _solvers(self) -> set[str]:
        """Returns the solvers whose text this package chooses: those of the plan or recipe, or that of the options.

        Formats of inputs, which are not known yet, change a solver's transforms and not the rows that it needs.
        """
        if self.calib:
            return set()
        of_options = self.solver or solver_names.solver_of(
            solver_names.DEFAULT_EFFORT if self.effort is None else self.effort, KEEP
        )
        if self.goal is not None:
            return {of_options}
        recipe = self.chosen_recipe
        if not isinstance(recipe, Recipe):
            plan, _ = recipe
            return {layer.solver for layer in plan.quantized}
        # `--solver` goes before every solver that the recipe names.
        if self.solver is not None:
            return {self.solver}
        return {recipe.solver or of_options, *(rule.solver for rule in recipe.rules if rule.solver is not None)}

    @cached_property
    def goal(self) -> Goal | None:
        """The budgets and limits for which formats are chosen; None where a recipe or plan says them."""
        return self.budget.goal()

    @cached_property
    def memory_bytes(self) -> int | None:
        """--memory in bytes."""
        size = read_quantity(spelled("memory"), self.memory, "size")
        return None if size is None else int(size)

    @cached_property
    def kv_cache_format(self) -> str | None:
        """The format of the KV cache as recipes spell it; None leaves it to the recipe."""
        return None if self.kv_cache is None else kv_cache_name(self.kv_cache)

    @cached_property
    def attention_format(self) -> str | None:
        """The format of attention's operands as recipes spell it; None leaves it to the recipe."""
        if self.attention is None:
            return None
        if is_16bit(self.attention):
            return KEEP
        if self.attention != "fp8":
            raise UserError(f"{spelled('attention', self.attention)}: attention runs in fp8, or in 16bit")
        return self.attention

    @cached_property
    def chosen_recipe(self) -> Recipe | PlanFile:
        """The recipe or plan that is named, with the formats of attention and KV cache that replace the recipe's."""
        if self.plan_file is not None:
            return read_plan(self.plan_file)
        if isinstance(self.recipe, Plan):
            return self.recipe, []
        assert self.recipe is not None
        if self.recipe_file is not None:
            recipe = Recipe.load(self.recipe_file)
        elif isinstance(self.recipe, str) and "," in self.recipe:
            named, limit = spelled("recipe", self.recipe), spelled("bits", 4.8)
            raise UserError(f"{named}: several formats are to choose from within a limit, such as {limit}")
        else:
            recipe = get_recipe(self.recipe) if isinstance(self.recipe, str) else self.recipe
            if not isinstance(recipe, Recipe | Plan):
                given = type(recipe).__name__
                raise UserError(f"recipe is a {given}; give a name such as 'nvfp4', a recipe or a plan")
        kv_cache, attention = self.kv_cache_format or recipe.kv_cache, self.attention_format or recipe.attention
        return replace(recipe, kv_cache=kv_cache, attention=attention)

    @property
    def recipe_file(self) -> Path | None:
        """The recipe file that is named in the place of a preset."""
        return Path(self.recipe) if isinstance(self.recipe, str) and self.recipe.endswith(".toml") else None

    def check(self) -> None:
        """Refuses options that cannot be read or contradict each other; the model is not opened for that."""
        if self.is_in_memory:
            data = self.data if isinstance(self.data, Tensor) else None
            are_ids = data is not None and data.dim() == 2 and data.dtype in (torch.int32, torch.int64)
            if data is not None and not (data.numel() and (data.is_floating_point() or are_ids)):
                named = f"{list(data.shape)} in {data.dtype}"
                raise UserError(f"data is {named}; expected int64 ids [rows, seqlen], or inputs of the model [rows, …]")
        if self.kv_bits is not None and (self.goal is None or self.kv_cache is not None):
            raise UserError(
                f"{spelled('kv_bits')} goes with a budget or a limit, such as {spelled('bits')}, and without "
                f"{spelled('kv_cache')}"
            )
        if self.kv_bits is not None:
            self._check_kv_bits(self.kv_bits)
        if self.goal is not None:
            self._check_budget()
        else:
            self._check_recipe()
            self.chosen_recipe  # noqa: B018 -- it is read here
        self._check_pipeline()
        # The rest would otherwise fail only after the model is opened, or not in a dry run.
        self._check_names()
        find_device(self.device)
        for name in ("calib_samples", "eval_samples", "seqlen"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{spelled(name, value)}: give a whole number from 1")
        check_sources(self.calib, spelled("calib"))
        check_sources(tuple(map(str, self.eval_texts)), spelled("eval_texts"), measured=True)
        self.kv_cache_format, self.attention_format, self.memory_bytes  # noqa: B018 -- cached, so read once, here
        # Last, so that nobody installs a package for a run that is refused anyway.
        of_model = [] if self.is_in_memory or self.model_factory else packages_of(str(self.model))
        of_budget = [] if self.goal is None else ["scipy"]
        of_sources = packages_of_sources((*self.calib, *map(str, self.eval_texts)))
        check_installed([*of_model, *of_budget, *of_sources], "this run")

    def _check_kv_bits(self, bits: float | str) -> None:
        goal = self.goal
        if bits == KV_AUTO and goal is not None and (goal.has_limit or (goal.fit is None and goal.latency is None)):
            raise UserError(
                f"{spelled('kv_bits', KV_AUTO)} divides {spelled('fit')} or {spelled('latency')} between "
                f"weights and cache; with another budget or limit give bits, such as {spelled('kv_bits', 6)}"
            )
        try:
            number = bits == KV_AUTO or 0 < float(bits) < math.inf
        except ValueError:
            number = False
        if not number:
            raise UserError(f"{spelled('kv_bits', bits)}: give bits per cached value, such as 6, or {KV_AUTO}")

    def _check_pipeline(self) -> None:
        if not self.is_pipeline:
            error = [] if self.budget.max_error is None else ["--max-error"]
            if given := [*self._given("components", "call"), *error]:
                raise UserError(
                    f"{given[0]}: is for a pipeline of diffusers, a directory with model_index.json; leave it out"
                )
            return
        if self.plan_out is not None:
            raise UserError(
                f"{self.model}: a pipeline has a plan for each component: `quantize {quoted(self.model)} "
                "--format nvfp4 --dry-run` shows them, and with --out, --bits 6 or --max-error 0.05 chooses their "
                "formats"
            )
        text = ("eval_texts", "eval_samples", "seqlen", "kv_cache", "lm_head")
        if given := self._given(*text, "plan_file", "model_factory", "restart"):
            raise UserError(f"{given[0]}: means nothing to a pipeline of diffusers; leave it out")
        if self.is_gguf:
            raise UserError(f"--out {self.out}: a pipeline is written to a directory; name one")

    def _check_names(self) -> None:
        """Refuses names of files that are not UTF-8: plans and reports, which are, record them."""
        for field_name in ("model", "out", "plan_out", "recipe", "plan_file", "calib", "eval_texts"):
            value = getattr(self, field_name)
            for name in value if isinstance(value, tuple) else (value,):
                try:
                    str(name if isinstance(name, str | Path) else "").encode()
                except UnicodeEncodeError:
                    named = str(name).encode(errors="backslashreplace").decode()
                    raise UserError(
                        f"{named}: not UTF-8, in which plans and reports are written; rename it, or unset LC_ALL and "
                        "PYTHONUTF8 if it is"
                    ) from None

    def _check_recipe(self) -> None:
        if len(self._given("recipe", "plan_file")) != 1:
            if self.is_in_memory:
                raise UserError("name a recipe, such as 'nvfp4', or pass a plan, or a budget: bits= or max_kl=")
            raise UserError("give exactly one of --format and --plan, or a limit such as --bits 4.8")
        if self.plan_file is None and not isinstance(self.recipe, Plan):
            return
        needless = self._given("solver", "effort", "kv_cache", "attention", "include", "exclude", "lm_head")
        if needless:
            plan = "a plan" if self.is_in_memory else "--plan"
            raise UserError(f"{plan} says everything already: edit it instead of using {', '.join(needless)}")

    def _check_budget(self) -> None:
        if named := self._given("recipe", "plan_file"):
            recipe = f"recipe {self.recipe!r}" if self.is_in_memory else named[0]
            raise UserError(
                f"{recipe} fixes the formats that a budget would choose; name those that it may use with "
                f"{spelled('formats')}"
            )
        if self.attention is not None:
            raise UserError(
                f'{spelled("attention")}: a budget leaves attention in 16 bit; set "attention": "fp8" in the file of '
                "its plan, and quantize with that"
            )
        if self.lm_head is not None:
            edit = f"run `quant plan edit DIR/plan.json --set lm_head={self.lm_head}`"
            edit = f"call plan.set('lm_head', {self.lm_head!r})" if self.is_in_memory else edit
            raise UserError(
                f"{spelled('lm_head', self.lm_head)}: a budget counts the layers inside the model; leave it out, then "
                f"{edit} and quantize again with that plan"
            )
        if self.dry_run:
            raise UserError(
                "--dry-run reads no weights, and an allocation measures what they lose; `quant plan make` makes the "
                "plan of a budget without quantizing"
            )
        # An unknown name would be missed only when the model is scored, which may take an hour.
        parse_candidates(self.budget.formats or DEFAULT_FORMATS)
        if self.budget.task is not None:
            read_task(self.budget.task[0])
        if named := self._given("guard", "observer"):
            later = f"add it to the plan with `quant plan edit plan.json {named[0]} …`"
            if self.is_in_memory:
                later = f"quantize again with the plan and {named[0]} …"
            raise UserError(f"{named[0]} would change what the allocation has measured; leave it out, and {later}")

    def _given(self, *names: str) -> list[str]:
        """Returns those of some options that are given, as the user wrote them."""
        defaults = {each.name: each.default for each in fields(self)}
        return [spelled(name) for name in names if getattr(self, name) not in (None, (), [], defaults[name])]

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file is written in place of a checkpoint."""
        return self.out is not None and self.out.suffix == ".gguf"

    def check_destination(self) -> None:
        """Raises UserError, or the OSError of a file that is in the way, unless `out` can be written."""
        if self.is_in_memory or self.dry_run:
            return
        out = self.plan_out or self.out
        if out is None:
            raise UserError("name a directory or a .gguf file with --out, or pass --dry-run for only the plan")
        model, texts = find_model(str(self.model)), (*sources_of(self.calib), *self.eval_texts, self.recipe_file)
        check_apart(out, model, *texts, self.budget.sensitivity)
        if self.budget.sensitivity is not None:
            check_apart(self.budget.sensitivity, model, *texts, named="sensitivity")
        if self.plan_out is not None or self.is_gguf:
            check_parents(out)
            if out.exists() and not self.overwrite:
                raise UserError(f"{out}: exists already; pass --overwrite to replace it")
            return
        # A finished run only has to rename its directory, and finds its own files in the way otherwise.
        if not is_finished(out) or self.restart:
            check_destination(out, overwrite=self.overwrite)

    def check_state_dict(self, plan: Plan) -> None:
        """Raises UserError where the request needs a model that runs; a bare state dict does not."""
        # In the order of the command line, then of the plan: the message names the first.
        needs: Mapping[str, Any] = {
            "--eval": self.eval_texts or None,
            "--calib": self.calib or None,
            "a KV cache in 8 bit (--kv-cache)": plan.kv_cache,
            "a guard": plan.guard,
            "an observer": None if plan.observer == DEFAULT_OBSERVER else plan.observer,
            **{f"{m.name}'s solver {m.solver}": True for m in plan.quantized if solver_needs_data(m)},
            **{f"{m.name}'s static input scale": True for m in plan.quantized if m.has_static_scale},
        }
        named = next((need for need, value in needs.items() if value is not None), None)
        if named:
            raise UserError(
                f"{self.model}: {named} takes a model that runs, and this is a bare state dict; pass --model-factory "
                "to build its module, or leave it out"
            )
