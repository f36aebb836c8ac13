"""`quantize` from the command line to a directory: load, plan, calibrate, solve, verify, write.

Everything that can be refused is refused before the slow steps: the destination, the plan, the texts. Nothing is
written before everything is computed.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.allocation.allocate import Allocation, allocate
from quant.allocation.request import AllocationRequest
from quant.allocation.space import Goal
from quant.api.load import is_checkpoint, load
from quant.api.save import save, save_state_dict
from quant.calibration.progress import Progress
from quant.calibration.texts.rows import calibration_rows, token_rows
from quant.calibration_data import lacks_data, own_text, solver_needs_data
from quant.cli import console
from quant.errors import UserError, counted
from quant.evaluation import Evaluation, check_evaluable, evaluate, run_probe
from quant.export.checkpoint import check_destination
from quant.export.compressed_tensors import check_plan, runtime_warnings
from quant.export.names import stored_names
from quant.extras import versions
from quant.layer_result import LayerResult
from quant.models.huggingface import load_tokenizer
from quant.models.open import Source, open_model
from quant.models.state_dict import call_factory
from quant.plan_check import Problem, read_plan, refuse
from quant.plan_edit import set_kv_cache
from quant.planning import fusion_warnings, make_plan
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP, Recipe, get_recipe
from quant.report import Report, kv_cache_of, peak_rss, print_summary, render_html
from quant.runtime.attention import quantized_attention
from quant.solve import solve_plan, solve_state_dict, with_options

# What servers prepare images and sounds by; quantizing changes nothing of it.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
# A plan as it was read, and what could not be read of it.
PlanFile = tuple[Plan, list[Problem]]


@dataclass(frozen=True)
class Job:
    """The options of `quantize`, as its help describes them."""

    model: str
    format_name: str | None = None
    recipe_file: Path | None = None
    plan_file: Path | None = None
    solver: str | None = None
    guard: str | None = None
    observer: str | None = None
    kv_cache: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    out: Path | None = None
    overwrite: bool = False
    calib: str | None = None
    calib_samples: int = 32
    eval_text: Path | None = None
    eval_samples: int = 16
    seqlen: int = 512
    seed: int = 0
    dry_run: bool = False
    model_factory: str | None = None
    unsafe_load: bool = False
    command: str = "quantize"
    request: AllocationRequest = field(default_factory=AllocationRequest)


def run(job: Job, *, quiet: bool = False) -> dict[str, Any]:
    """Does the job and prints what happened.

    Returns:
        The report as a dict; for a dry run, the plan.

    Raises:
        ValueError, OSError: the user's mistakes; nothing has been written.
    """
    goal = job.request.goal()
    recipe = _recipe(job) if goal is None else None
    if goal is not None:
        _check_allocation(job)
    if not job.dry_run:
        if job.out is None:
            raise UserError("name a directory for the checkpoint with --out DIR, or pass --dry-run for the plan alone")
        model = Path(job.model).expanduser().resolve()
        if job.out.resolve() in (model, *model.parents) and model.exists():
            raise UserError(
                f"--out {job.out} holds the model {job.model}, which it would replace; name another directory"
            )
        check_destination(job.out, overwrite=job.overwrite)
    torch.manual_seed(job.seed)
    started = time.perf_counter()
    with console.status(f"loading {job.model}", quiet):
        source = open_model(job.model, model_factory=job.model_factory, unsafe_load=job.unsafe_load, meta=job.dry_run)
    loaded = time.perf_counter()
    if goal is not None:
        return _run_allocated(job, source, goal, quiet, loaded - started)
    assert recipe is not None
    plan = with_options(_plan(job, source, recipe), job.guard, job.observer)
    check_plan(plan)
    if job.dry_run:
        if not quiet:
            console.print_layers(plan, None)
        return plan.to_dict()
    if source.model is None:
        return _run_state_dict(job, source, plan, quiet, loaded - started)
    return _run_model(job, source, plan, quiet, loaded - started)


def _recipe(job: Job) -> Recipe | PlanFile:
    given = [job.format_name, job.recipe_file, job.plan_file]
    if sum(g is not None for g in given) != 1:
        raise UserError("give exactly one of --format, --recipe and --plan")
    if job.plan_file is not None:
        if job.solver or job.kv_cache or job.include or job.exclude:
            raise UserError(
                "--plan says everything already: edit it instead of using --solver, --kv-cache, --include, --exclude"
            )
        return read_plan(job.plan_file)
    if job.recipe_file is not None:
        recipe = Recipe.load(job.recipe_file)
    else:
        assert job.format_name is not None
        recipe = get_recipe(job.format_name)
    return replace(recipe, kv_cache=_kv_cache(job)) if job.kv_cache else recipe


def _kv_cache(job: Job) -> str:
    """`--kv-cache` as recipes spell it."""
    assert job.kv_cache is not None
    chosen = set_kv_cache(Plan(()), job.kv_cache).kv_cache
    return chosen.name if chosen else KEEP


def _plan(job: Job, source: Source, recipe: Recipe | PlanFile) -> Plan:
    if not isinstance(recipe, Recipe):
        plan, problems = recipe
        refuse(plan, problems, source.layers)
        return plan
    model = source.model if source.model is not None else source.shapes
    provenance = {
        "model": source.name,
        "recipe": recipe.name,
        "command": job.command,
        "seed": job.seed,
        "versions": versions(),
    }
    plan = make_plan(model, recipe, include=job.include, exclude=job.exclude, solver=job.solver, provenance=provenance)
    if source.model is None:
        # Nothing can run a bare state dict, so inputs cannot be measured and the plan says so.
        plan = plan.replace_layers(
            replace(layer, activation=None, reason=f"{layer.reason}; weight only: a bare state dict cannot be run")
            for layer in plan.quantized
            if layer.activation is not None
        )
    if lacks_data(plan):
        plan = replace(plan, provenance={**plan.provenance, "calibration": job.calib or "self"})
    return plan


def _check_allocation(job: Job) -> None:
    """Refuses options that say what an allocation finds out."""
    given = {"--format": job.format_name, "--recipe": job.recipe_file, "--plan": job.plan_file}
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise UserError(f"{named[0]} fixes the formats that a budget would choose; name what it may use with --formats")
    if job.dry_run:
        raise UserError("--dry-run reads no weights, and an allocation measures what they lose; leave one of them out")
    later = {"--guard": job.guard, "--observer": job.observer}
    named = [option for option, value in later.items() if value is not None]
    if named:
        raise UserError(
            f"{named[0]} would change what the allocation has measured; leave it out, and quantize again with "
            f"--plan DIR/plan.json {named[0]} …"
        )


def _run_allocated(job: Job, source: Source, goal: Goal, quiet: bool, load_seconds: float) -> dict[str, Any]:
    """Chooses the formats for a budget or a limit on the loss, then goes on as with any plan."""
    if source.model is None:
        raise UserError(
            f"{job.model}: a bare state dict cannot be run, and an allocation measures; pass --model-factory"
        )
    eval_rows = read_rows(source, job.eval_text, job.eval_samples, job.seqlen) if job.eval_text else None
    if eval_rows is not None:
        check_evaluable(source.model, eval_rows)
    with console.stages(quiet) as progress:
        data = read_calibration(job, source, progress)
        found = allocate(
            source.model,
            data,
            goal,
            solver=job.solver or "rtn",
            include=job.include,
            exclude=job.exclude,
            kv_cache=_kv_cache(job) if job.kv_cache else None,
            check=eval_rows if goal.has_limit else None,
            seed=job.seed,
            provenance={**_provenance(job, source), "calibration": job.calib or "self"},
            progress=progress,
            **job.request.options(),
        )
    check_plan(found.plan)
    return _run_model(job, source, found.plan, quiet, load_seconds, data, found)


def _provenance(job: Job, source: Source) -> dict[str, Any]:
    return {"model": source.name, "command": job.command, "seed": job.seed, "versions": versions()}


def _run_model(
    job: Job,
    source: Source,
    plan: Plan,
    quiet: bool,
    load_seconds: float,
    data: torch.Tensor | None = None,
    allocation: Allocation | None = None,
) -> dict[str, Any]:
    assert source.model is not None and job.out is not None
    model, asked = source.model, plan
    ready = allocation.quantized if allocation is not None else None  # a copy; the model itself is as it was
    eval_rows = read_rows(source, job.eval_text, job.eval_samples, job.seqlen) if job.eval_text else None
    baseline = None
    if eval_rows is not None:
        check_evaluable(model, eval_rows)
        baseline = copy.deepcopy(model) if ready is None else model
    bytes_before = _parameter_bytes(model)
    with console.stages(quiet) as progress:
        if data is None and lacks_data(plan):
            data = read_calibration(job, source, progress, plan)
        quantized = ready or solve_plan(model, plan, data, progress=progress)
        model, plan = quantized.model, quantized.plan
        evaluation = None
        if eval_rows is not None:
            with quantized_attention(model, **plan.run_time):
                evaluation = evaluate(
                    model, eval_rows, baseline, progress=lambda done, total: progress("evaluate", done, total)
                )
    del baseline
    tokenizer = _tokenizer_if_any(source)
    report = _report(job, source, plan, quantized.layers, bytes_before, evaluation)
    report.seconds = {"load": load_seconds, **quantized.seconds}
    report.warnings += _guard_warnings(asked, plan)
    if allocation is not None:
        report.sensitivity, report.allocation = allocation.sensitivity, allocation.record
        report.seconds |= {"score": allocation.sensitivity.seconds, "allocate": allocation.record.seconds}
    if evaluation:
        report.seconds["evaluate"] = evaluation.seconds
    save(
        model,
        plan,
        job.out,
        tokenizer=tokenizer,
        overwrite=job.overwrite,
        finish=lambda directory, hashes: _finish_directory(source, report, plan, directory, hashes),
    )
    return _finish(job, report, quiet)


def _finish_directory(source: Source, report: Report, plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
    for name in _PROCESSOR_FILES:
        if source.path is not None and (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)
    _write_report(report, plan, directory, hashes)


def _guard_warnings(asked: Plan, made: Plan) -> list[str]:
    """What a guard changed: one sentence, or nothing."""
    changed = [layer for layer in made.layers if layer.weight != asked.by_name[layer.name].weight]
    if not changed:
        return []
    kept = sum(layer.weight is None for layer in changed)
    return [
        f"the guard {made.provenance.get('guard')!r} gave {len(changed)} of {counted(len(asked.quantized), 'layer')} "
        f"another format, {kept} of them 16 bit, {changed[0].name} first: {changed[0].reason}"
    ]


def read_calibration(job: Job, source: Source, progress: Progress, plan: Plan | None = None) -> torch.Tensor:
    """Token rows of --calib, or what the model writes itself for `plan`; None stands for one that is being found."""
    if job.calib is None or job.calib == "self":
        assert source.model is not None
        plan = plan or make_plan(source.model, "fp8", include=job.include, exclude=job.exclude)
        return own_text(source.model, plan, _tokenizer_if_any(source), seed=job.seed, progress=progress)
    tokenizer = None if _is_token_file(job.calib) else source.load_tokenizer()
    rows = calibration_rows(job.calib, tokenizer, samples=job.calib_samples, seqlen=job.seqlen, seed=job.seed)
    if source.model is not None:
        try:
            run_probe(source.model, rows[:1, :2])
        except ValueError as error:
            raise UserError(
                f"--calib {job.calib}: {type(source.model).__name__} cannot be calibrated on text: {error}; calibrate "
                "in Python with inputs of its own, quant.quantize(model, …, data), or choose a format that needs none, "
                "such as fp8_channel or mxfp8"
            ) from error
    return rows


def _run_state_dict(job: Job, source: Source, plan: Plan, quiet: bool, load_seconds: float) -> dict[str, Any]:
    assert source.state_dict is not None and job.out is not None
    _check_state_dict(job, plan)
    started = time.perf_counter()
    with console.stages(quiet) as progress:
        solved, results = solve_state_dict(source.state_dict, plan, progress=progress)
    before = sum(tensor.nbytes for tensor in source.state_dict.values())
    report = _report(job, source, plan, results, before, None)
    report.seconds = {"load": load_seconds, "solve": time.perf_counter() - started}
    save_state_dict(
        source.state_dict,
        solved,
        plan,
        job.out,
        overwrite=job.overwrite,
        finish=lambda directory, hashes: _write_report(report, plan, directory, hashes),
    )
    return _finish(job, report, quiet)


def _check_state_dict(job: Job, plan: Plan) -> None:
    """Refuses what takes a model that runs."""
    needs = {
        "--eval": job.eval_text,
        "--calib": job.calib,
        "a KV cache's scales": plan.kv_cache,
        "a guard": plan.provenance.get("guard"),
        "an observer": plan.provenance.get("observer"),
    }
    named = [what for what, value in needs.items() if value is not None]
    named += [f"{layer.name}'s solver {layer.solver}" for layer in plan.quantized if solver_needs_data(layer)]
    named += [f"{layer.name}'s static input scale" for layer in plan.quantized if layer.has_static_scale]
    if named:
        raise UserError(
            f"{job.model}: {named[0]} takes a model that runs, and this is a bare state dict; pass --model-factory to "
            "build its module, or leave it out"
        )


def _report(
    job: Job,
    source: Source,
    plan: Plan,
    results: list[LayerResult],
    bytes_before: int,
    evaluation: Evaluation | None,
) -> Report:
    saved = sum(2 * layer.numel - layer.nbytes for layer in plan.quantized)
    # transformers loads what has a config; its troubles with other dtypes are nobody else's.
    dtype = source.dtype if source.config is not None else torch.bfloat16
    names = stored_names(source.model)
    return Report(
        model=source.name,
        layers=results,
        bytes_before=bytes_before,
        bytes_after=bytes_before - saved,
        effective_bits=plan.effective_bits,
        evaluation=evaluation,
        plan_digest=plan.digest(),
        command=job.command,
        versions=versions(),
        seconds={},
        peak_rss_bytes=peak_rss(),
        files={},
        warnings=[*runtime_warnings(plan, dtype, names), *fusion_warnings(plan)],
        kv_cache=kv_cache_of(source.config, plan),
    )


def _write_report(report: Report, plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
    report.files = dict(hashes)
    report.bytes_after = sum((directory / name).stat().st_size for name in hashes)
    report.peak_rss_bytes = peak_rss()
    report.save(directory / "report.json")
    (directory / "report.html").write_text(render_html(report, plan), encoding="utf-8")


def _finish(job: Job, report: Report, quiet: bool) -> dict[str, Any]:
    if not quiet:
        print_summary(report, console.CONSOLE)
        console.CONSOLE.print(f"written to {job.out}")
    return report.to_dict()


def read_rows(source: Source, text: Path, samples: int, seqlen: int) -> torch.Tensor:
    """Token rows of a text for a model; a file of token ids needs no tokenizer."""
    tokenizer = None if _is_token_file(str(text)) else source.load_tokenizer()
    return token_rows(text, tokenizer, samples=samples, seqlen=seqlen)


def _is_token_file(name: str) -> bool:
    return name.endswith(".safetensors") or ".safetensors:" in name


def open_any(name: str, *, model_factory: str | None = None, unsafe_load: bool = False) -> Source:
    """Opens a model, quantized by us or not, for evaluation.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    if is_checkpoint(name):
        path = Path(name)
        model = load(path, call_factory(model_factory) if model_factory else None)
        return Source(
            name=name,
            kind="huggingface",
            model=model,
            state_dict=None,
            config=getattr(model, "config", None),
            path=path,
            load_tokenizer=lambda: load_tokenizer(path),
            dtype=next((p.dtype for p in model.parameters()), torch.float32),
        )
    source = open_model(name, model_factory=model_factory, unsafe_load=unsafe_load)
    if source.model is None:
        raise UserError(f"{name}: a bare state dict cannot be run; pass --model-factory to build its module")
    return source


def _tokenizer_if_any(source: Source) -> Any:
    try:
        return source.load_tokenizer()
    except UserError:
        return None


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())
