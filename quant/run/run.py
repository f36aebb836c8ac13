"""`run` takes a request from the model to the result, for both the command `quantize` and `quant.quantize`.

    load       open the model                                    a module in memory is there already
    decide     make the plan, or choose formats for a budget
    data       read calibration and evaluation rows              only where the plan or the user asks for them
    solve      round the weights, block by block or at once
    measure    compare with the original model                   only on evaluation texts
    write      the checkpoint and its report                     a module in memory gets its plan

The destination, the plan and the texts are checked before the slow steps, and no file of the checkpoint is written
before everything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from quant.base.extras import versions
from quant.base.listener import SILENT, Listener
from quant.calibration.ranks import leave, rank_and_world, wait_for_all
from quant.calibration.solvers.gptq import compile_ahead
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.step_store import DirectoryStore
from quant.recipes.plan import Plan
from quant.report.report import Report
from quant.run.announcements import announce_untied_head
from quant.run.data import announce_time, read_data, verification_data
from quant.run.decide import decide, save_plan
from quant.run.job import Decision, Job, Outcome, SolvedModel
from quant.run.measure import Measured, measure, original_of
from quant.run.open_source import destination, load
from quant.run.request import Request
from quant.run.same_on_ranks import check_same, kind_of
from quant.run.solve import solve
from quant.run.write_result import write


def run(request: Request, listener: Listener = SILENT) -> Outcome:
    """Executes a request; no other run can write to its destination at the same time.

    Raises:
        ValueError, OSError: the user's mistakes; nothing has been written.
    """
    request.check()
    with destination(request):
        job = load(request, listener)
        decision = decide(job)
        if request.plan_out is not None and rank_and_world()[0] == 0:
            save_plan(decision, request.plan_out)
        if request.only_decides:
            return Outcome(decision.plan)
        if job.source.model is None:
            is_first = rank_and_world()[0] == 0
            # Only one rank solves a bare state dict: the others end now, and a collective call would wait for them.
            leave()
            if not is_first:
                return Outcome(decision.plan)
        with resumable(job, decision.plan) as job:
            if job.session.store.is_complete:  # an earlier run wrote the checkpoint whole, but for its name
                assert request.out is not None
                job.session.store.finish()
                wait_for_all()
                return Outcome(decision.plan, Report.load(request.out / "report.json"))
            decision, solved, measured = _compute(job, decision)
            outcome = write(job, decision, solved, measured)
            job.session.store.finish()
            return outcome


def _compute(job: Job, decision: Decision) -> tuple[Decision, SolvedModel, Measured]:
    """Runs every stage but writing. The original model, which measuring needs, is freed at the end."""
    # Kernels of the plan's solvers are compiled while texts are read and the model is copied to the GPU.
    layers = [layer for layer in decision.plan.quantized if get_pipeline(layer.solver).rounding.feeds_back]
    compile_ahead({layer.weight_format for layer in layers}, job.session.device)
    texts = verification_data(job, decision)
    original = original_of(job, decision, texts)
    announce_time(job, decision)
    announce_untied_head(job.listener, decision.plan)
    with job.stages() as (staged, progress):
        decision = read_data(staged, decision)
        solved = solve(staged, decision, progress)
        return decision, solved, measure(staged, solved, texts, original)


@contextmanager
def resumable(job: Job, plan: Plan) -> Iterator[Job]:
    """Gives the job a store of finished steps next to its destination, after which the same command continues.

    A bare state dict is solved in seconds, and a module has no directory.

    Raises:
        ValueError: a run with other options, another model or another version left steps there.
    """
    request, source = job.request, job.source
    if request.out is None or source.model is None:
        yield job
        return
    check_same({"the plan": plan.digest()}, job.session, source.files.files)
    depends = {
        "the model's file": source.files.fingerprints(),
        "the plan": {"guard": plan.guard, "observer": plan.observer, "digest": plan.digest()},
        "the version of": versions(),
        "the seed": request.seed,
        # Sums on a CPU and on a GPU round differently; a finished layer of the other would not fit its neighbours.
        "the kind of device": "cpu" if job.session.device is None else job.session.device.type,
    }
    with DirectoryStore(request.out, depends, source.files, restart=request.restart) as store:
        if not store.is_complete:
            store.expect("device", kind_of(job.session))  # each kind of GPU rounds sums in its own way
        yield replace(job, session=replace(job.session, store=store))
