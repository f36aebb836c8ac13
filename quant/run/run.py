"""`run` takes a job of `quantize` from the model to the checkpoint: load, plan, calibrate, solve, evaluate, write.

The destination, the plan and the texts are checked before the slow steps, and nothing is written before everything is
computed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.allocation.allocate import Allocation, allocate, check_feasible
from quant.allocation.goal import Goal
from quant.allocation.held_out import HeldOut
from quant.calibration.inputs import Inputs, on_first
from quant.calibration.listener import SILENT, Listener
from quant.calibration.placement import describe, find_device, placed
from quant.calibration.progress import Progress, reporter
from quant.calibration.ranks import leave, rank_and_world, wait_for_all
from quant.calibration.texts.mixture import Record
from quant.calibration.walk.expected_time import expected_time, in_words
from quant.checkpoints.companion_files import add_companions
from quant.checkpoints.save import save_state_dict, write_model
from quant.checkpoints.trial_load import check_experts
from quant.errors import UserError, counted
from quant.evaluation.checks import check_evaluable
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.fingerprint import Fingerprint, fingerprint
from quant.evaluation.record import Evaluation
from quant.execution.announcements import announce_device, announce_effort, announce_source
from quant.execution.data import lacks_data, solver_needs_data
from quant.execution.layer_result import LayerResult, loss_warnings
from quant.execution.solve import solve_plan, solve_state_dict, with_calibration, with_data
from quant.execution.sources import (
    WRITTEN,
    Rows,
    as_rows,
    digest_of,
    named_inputs,
    read_calibration,
    read_evaluation,
    share_written,
    sources_of,
    tokenizer_if_any,
    within_context,
)
from quant.execution.store import Partial
from quant.export.checkpoint.compressed_tensors import check_plan, runtime_warnings
from quant.export.checkpoint.names import StoredNames, stored_names
from quant.extras import versions
from quant.formats.atomic import claimed
from quant.models.open import Source, open_model
from quant.models.stored_weights import read_stored, stored_in
from quant.plan.make import coverage_warnings, fusion_warnings
from quant.recipes.effort import solver_of
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP
from quant.report.report import Report, kv_cache_of, peak_rss
from quant.run.request import Job
from quant.run.same_on_ranks import check_same, kind_of
from quant.run.solving_steps import solving_steps
from quant.runtime.attention import quantized_attention


def run(job: Job, listener: Listener = SILENT) -> Report | Plan | None:
    """Does the job; no other run can write to --out meanwhile.

    Returns:
        The report; for a dry run, the plan; None on other ranks than the first where they have nothing to do.

    Raises:
        ValueError, OSError: the user's mistakes; nothing has been written.
    """
    with nullcontext() if job.dry_run or job.out is None or rank_and_world()[0] else claimed(job.out):
        return _run(job, listener)


def _run(job: Job, listener: Listener) -> Report | Plan | None:
    goal = job.request.goal()
    recipe = None
    if goal is None:
        recipe = job.recipe()
    else:
        job.check_allocation()
    job.memory_bytes()
    device = None
    if not job.dry_run:
        job.check_destination()
        device = find_device(job.device)
        announce_device(listener, device)
    torch.manual_seed(job.seed)
    started = time.perf_counter()
    with listener.step(f"loading {job.model}"):
        how: dict[str, Any] = {
            "model_factory": job.model_factory, "unsafe_load": job.unsafe_load, "meta": job.dry_run
        }  # fmt: skip
        stream = not job.dry_run and goal is None and not job.eval_texts
        source = open_model(job.model, **how, stream=stream)
    announce_source(listener, source)
    seconds = {"load": time.perf_counter() - started}
    if goal is not None:
        report = _run_allocated(job, source, goal, device, listener, seconds)
    else:
        assert recipe is not None
        plan = job.plan(source, recipe)
        check_plan(plan)
        if job.dry_run:
            return plan
        if source.model is None:
            is_first = rank_and_world()[0] == 0
            leave()  # one rank alone does this
            if not is_first:
                return None
            announce_effort(listener, plan)
            report = _run_state_dict(job, source, plan, device, listener, seconds)
        else:
            report = _run_model(job, source, source.model, plan, device, listener, seconds)
    return report


def _run_allocated(
    job: Job, source: Source, goal: Goal, device: torch.device | None, listener: Listener, seconds: dict[str, float]
) -> Report:
    """Chooses the formats for a budget or a limit on the loss, then goes on as with any plan."""
    if source.model is None:
        raise UserError(
            f"{job.model}: a bare state dict cannot be run, and an allocation measures; pass --model-factory"
        )
    inputs = named_inputs(source, Rows(job.calib, 1, job.seqlen))
    options = job.request.options()
    choices: dict[str, Any] = {"include": job.include, "exclude": job.exclude, "kv_cache": job.kv_cache_name()}
    check_feasible(
        source.model, goal, formats=options["formats"], constraints=options["constraints"],
        run=None if inputs is None else on_first(inputs), **choices,
    )  # fmt: skip
    held_out = None
    if goal.has_limit and job.eval_texts:
        texts = _eval_rows(job, source, source.model, device, listener=SILENT)
        held_out = HeldOut.halves({name: as_rows(source.model, rows, "a limit") for name, rows in texts.items()})
    with listener.stages() as progress:
        given, records = _calibration(job, source, device, progress, listener=listener)
        data = as_rows(source.model, given, "a budget")
        if goal.has_limit and held_out is None:
            data, held_out = HeldOut.from_calibration(data)
        found = allocate(
            source.model,
            data,
            goal,
            solver=job.solver or solver_of(job.effort or 0, KEEP),
            run=on_first(data) if data.is_floating_point() else None,
            held_out=held_out,
            seed=job.seed,
            provenance={**job.provenance(source), "calibration": "+".join(sources_of(job.calib))},
            device=device,
            progress=progress,
            **choices,
            **options,
        )
    check_same({"the plan that the budget chose": found.plan.digest()}, device=device)
    check_plan(found.plan)
    plan = with_calibration(found.plan, records)
    seconds |= {"score": found.sensitivity.seconds, "allocate": found.record.seconds}
    return _run_model(job, source, source.model, plan, device, listener, seconds, data, found)


def _run_model(
    job: Job,
    source: Source,
    model: nn.Module,
    asked: Plan,
    device: torch.device | None,
    listener: Listener,
    seconds: dict[str, float],
    data: torch.Tensor | Inputs | None = None,
    allocation: Allocation | None = None,
) -> Report:
    assert job.out is not None
    if not job.allow_missing:
        check_experts(asked, stored_names(model))
    with job.partial(source, asked) as partial:
        if partial.is_complete:
            partial.finish()
            wait_for_all()
            return Report.load(job.out / "report.json")
        partial.expect("device", kind_of(device))  # each rounds sums in its own way
        report = _solve_and_write(job, source, model, asked, device, listener, seconds, data, allocation, partial)
        partial.finish()
    return report


def _solve_and_write(
    job: Job,
    source: Source,
    model: nn.Module,
    asked: Plan,
    device: torch.device | None,
    listener: Listener,
    seconds: dict[str, float],
    data: torch.Tensor | Inputs | None,
    allocation: Allocation | None,
    partial: Partial,
) -> Report:
    assert job.out is not None
    ready = allocation.quantized if allocation is not None else None  # a copy; the model itself is as it was
    texts = _eval_rows(job, source, model, device, listener)
    if allocation is not None and allocation.record.verified and texts:
        tensors = {name: as_rows(model, rows, "a limit") for name, rows in texts.items()}
        texts = dict(HeldOut.halves(tensors).verify)  # the other half chose the formats
    bytes_before = sum(p.nbytes for p in model.parameters())
    baseline = _another(job, source, model) if texts and ready is None else model
    evaluation, print_of_logits = None, None
    if ready is None:
        _tell_time(job, source, model, asked, device, listener)
    with listener.stages() as progress:
        if data is None and lacks_data(asked):

            def find() -> tuple[torch.Tensor | Inputs, list[Record]]:
                return _rows(job, source, asked, partial, device, progress, listener)

            if job.calib:
                data, records = find()
                asked = with_calibration(asked, records)
            else:
                asked, data = with_data(asked, find)
                announce_effort(listener, asked)
        if ready is None:
            progress.expect("solve", *solving_steps(model, asked, data))
        with partial.solving():
            quantized = ready or solve_plan(
                model, asked, data, device=device, progress=progress, partial=partial, memory=job.memory_bytes()
            )
        model, plan = quantized.model, quantized.plan
        layers = _as_stored(quantized.layers, plan, dict(model.named_parameters(remove_duplicate=False)))
        if plan.guard is not None:
            check_plan(plan)  # a guard may have given layers other formats
        if texts:
            evaluation, print_of_logits = _evaluated(model, plan, texts, baseline, device, progress, partial)
    del baseline
    seconds |= quantized.seconds | ({"evaluate": sum(each.seconds for each in evaluation.texts)} if evaluation else {})
    names = stored_names(source.model)
    report = _report(job, source, plan, names, layers, bytes_before, seconds, evaluation, device)
    report.fingerprint = print_of_logits
    report.warnings += _guard_warnings(asked, plan)
    if allocation is not None:
        report.sensitivity, report.allocation = allocation.sensitivity, allocation.record
        report.warnings += allocation.record.warnings()

    partial.flush()
    is_first = rank_and_world()[0] == 0
    leave()
    if not is_first:
        return report
    started = time.perf_counter()

    def finish(directory: Path, hashes: Mapping[str, str], messages: list[str]) -> None:
        report.seconds["write"] = time.perf_counter() - started
        report.warnings += messages
        add_companions(source, report, plan, directory, hashes)
        source.files.check()

    write_model(
        model,
        plan,
        job.out,
        names,
        tokenizer=tokenizer_if_any(source),
        overwrite=job.overwrite,
        allow_missing=job.allow_missing,
        finish=finish,
        store=partial,
    )
    return report


def _evaluated(
    model: nn.Module,
    plan: Plan,
    texts: Mapping[str, torch.Tensor | Inputs],
    baseline: nn.Module | None,
    device: torch.device | None,
    progress: Progress,
    partial: Partial,
) -> tuple[Evaluation, Fingerprint | None]:
    """Figures and fingerprint of the quantized model, which are kept: its weights move to the checkpoint afterwards.

    Raises:
        UserError: an earlier run was stopped while they moved, and has measured on other texts.
    """
    digests = {name: digest_of(rows) for name, rows in texts.items()}
    kept = partial.get("evaluation")
    if kept is not None and kept.record["texts"] == digests:
        found = kept.record["fingerprint"]
        fields = kept.record["evaluation"]
        return Evaluation.from_dict(fields), None if found is None else Fingerprint.from_dict(found)
    if partial.is_moving:
        raise UserError(
            f"{partial.path}: the run was stopped while it wrote its files, and --eval was another; give the same, or "
            "pass --restart to begin anew"
        )
    with quantized_attention(model, **plan.run_time):
        evaluation = evaluate_texts(model, texts, baseline, device=device, progress=reporter(progress, "evaluate"))
        print_of_logits = None
        if not any(rows.is_floating_point() for rows in texts.values()):
            with placed(model, device):
                print_of_logits = fingerprint(model)
    record = {
        "texts": digests,
        "evaluation": evaluation.to_dict(),
        "fingerprint": None if print_of_logits is None else print_of_logits.to_dict(),
    }
    partial.put("evaluation", {}, record)
    return evaluation, print_of_logits


def _tell_time(
    job: Job, source: Source, model: nn.Module, plan: Plan, device: torch.device | None, listener: Listener
) -> None:
    """Says before anything slow starts how long a plan that works from text will take."""
    if not source.is_causal_lm or not any(solver_needs_data(layer) for layer in plan.quantized):
        return
    share = share_written(job.calib, has_tokenizer=tokenizer_if_any(source) is not None)
    seqlen = within_context(source, job.seqlen)
    written = round(share * job.calib_samples * seqlen)
    time = expected_time(model, plan, rows=job.calib_samples, seqlen=seqlen, written=written, device=device)
    solvers = " and ".join(dict.fromkeys(layer.solver for layer in plan.quantized))
    writing = f"{in_words(time.writing)} to write text, " if written else ""
    listener.message(
        f"{solvers} on {job.calib_samples} rows of {seqlen} tokens will take about "
        f"{in_words(time.writing + time.solving)}: {writing}{in_words(time.solving)} to solve; --effort 0 takes seconds"
    )


def _another(job: Job, source: Source, model: nn.Module) -> nn.Module:
    """The original model once more: mapped from its files again where it came from a directory, or else copied."""
    again = open_model(job.model).model if source.kind == "huggingface" else None
    return copy.deepcopy(model) if again is None else again


def _rows(
    job: Job,
    source: Source,
    plan: Plan,
    partial: Partial,
    device: torch.device | None,
    progress: Progress,
    listener: Listener,
) -> tuple[torch.Tensor | Inputs, list[Record]]:
    """Calibration rows and where they come from; those that the model wrote are kept, for writing takes long."""
    names = sources_of(job.calib)
    own = any(name in WRITTEN for name in names)
    step = f"calibration rows of {'+'.join(names)}"
    found = partial.get(step) if own else None
    if found is not None:
        return found.tensors["rows"].clone(), found.record
    if own and source.model is not None and (device is None or device.type == "cpu"):
        # Each token would read every weight again.
        read_stored(source.model, stored_in(source.model))
    rows, records = _calibration(job, source, device, progress, plan, listener)
    digest = digest_of(rows)
    check_same({f"the calibration text {'+'.join(names)}": digest}, device=device)
    if own:
        assert isinstance(rows, torch.Tensor)
        partial.put(step, {"rows": rows}, records)
    else:
        partial.expect("calibration text", digest)
    return rows, records


def _run_state_dict(
    job: Job, source: Source, plan: Plan, device: torch.device | None, listener: Listener, seconds: dict[str, float]
) -> Report:
    assert source.state_dict is not None and job.out is not None
    job.check_state_dict(plan)
    started = time.perf_counter()
    with listener.stages() as progress:
        amounts = [layer.numel * source.dtype.itemsize / 1e6 for layer in plan.layers]
        progress.expect("solve", [layer.name for layer in plan.layers], amounts, "MB")
        solved, results = solve_state_dict(source.state_dict, plan, device=device, progress=progress)
    results = _as_stored(results, plan, source.state_dict)
    bytes_before = sum(tensor.nbytes for tensor in source.state_dict.values())
    seconds["solve"] = time.perf_counter() - started
    report = _report(job, source, plan, StoredNames(), results, bytes_before, seconds, None, device)

    def finish(directory: Path, hashes: Mapping[str, str], _: list[str]) -> None:
        add_companions(source, report, plan, directory, hashes)
        source.files.check()

    save_state_dict(
        source.state_dict,
        solved,
        plan,
        job.out,
        overwrite=job.overwrite,
        finish=finish,
    )
    return report


def _calibration(
    job: Job,
    source: Source,
    device: torch.device | None,
    progress: Progress,
    plan: Plan | None = None,
    listener: Listener = SILENT,
) -> tuple[torch.Tensor | Inputs, list[Record]]:
    """Rows of --calib and where they come from; `plan` is None while an allocation has yet to find it."""
    return read_calibration(
        source, Rows(job.calib, job.calib_samples, job.seqlen, job.seed), device=device, progress=progress,
        plan=plan, listener=listener,
    )  # fmt: skip


def _eval_rows(
    job: Job, source: Source, model: nn.Module, device: torch.device | None, listener: Listener
) -> dict[str, torch.Tensor | Inputs]:
    """Rows or inputs of each --eval by its name, on which the model has been seen to run."""
    found = read_evaluation(
        source, Rows(tuple(map(str, job.eval_texts)), job.eval_samples, job.seqlen), device=device, listener=listener
    )
    for rows in found.values():
        check_evaluable(model, rows)
    return found


def _report(
    job: Job,
    source: Source,
    plan: Plan,
    names: StoredNames,
    results: list[LayerResult],
    bytes_before: int,
    seconds: dict[str, float],
    evaluation: Evaluation | None,
    device: torch.device | None,
) -> Report:
    saved = sum(2 * layer.numel - layer.nbytes for layer in plan.quantized)
    # transformers loads what has a config; its troubles with other dtypes are nobody else's.
    dtype = source.dtype if source.config is not None else torch.bfloat16
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
        seconds=seconds,
        peak_rss_bytes=peak_rss(),
        device=describe(device),
        files={},
        warnings=[
            *runtime_warnings(plan, dtype, names),
            *fusion_warnings(plan),
            *coverage_warnings(plan),
            *loss_warnings(results),
        ],
        kv_cache=kv_cache_of(source.config, plan),
    )


def _as_stored(results: Sequence[LayerResult], plan: Plan, tensors: Mapping[str, torch.Tensor]) -> list[LayerResult]:
    """The results, with the size that layers have in the checkpoint where they stay in a dtype other than 16 bit.

    Args:
        results: of the plan's layers.
        plan: that was executed.
        tensors: by name, of the quantized model or the original state dict.
    """

    def stored(result: LayerResult) -> LayerResult:
        layer = plan.by_name[result.name]
        tensor = tensors.get(plan.by_name.get(layer.tied_to or "", layer).tensor_name)
        if result.format is not None or tensor is None:
            return result
        size = tensor.dtype.itemsize
        return replace(result, bits=8.0 * size, nbytes=0 if layer.tied_to else size * layer.numel)

    return [stored(result) for result in results]


def _guard_warnings(asked: Plan, made: Plan) -> list[str]:
    """One sentence on what a guard changed, if it changed anything."""
    changed = [layer for layer in made.layers if layer.weight != asked.by_name[layer.name].weight]
    if not changed:
        return []
    kept = sum(layer.weight is None for layer in changed)
    return [
        f"the guard {made.guard!r} gave {len(changed)} of {counted(len(asked.quantized), 'layer')} "
        f"another format, {kept} of them 16 bit, {changed[0].name} first: {changed[0].reason}"
    ]
