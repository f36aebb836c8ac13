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

from quant.base.listener import SILENT, Listener
from quant.calibration.ranks import leave, rank_and_world, wait_for_all
from quant.calibration.solvers.gptq import Gptq, compile_ahead
from quant.calibration.solvers.registry import get_pipeline
from quant.run.announcements import announce_untied_head
from quant.report.report import Report
from quant.run.data import announce_time, read_data, verification_data
from quant.run.decide import decide
from quant.run.job import Decision, Job, Outcome, SolvedModel
from quant.run.open_source import destination, load
from quant.run.measure import Measured, baseline_of, measure
from quant.run.request import Request
from quant.run.resume import resumable
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
        if request.dry_run or _is_idle_rank(job):
            return Outcome(decision.plan)
        with resumable(job, decision.plan) as job:
            if job.session.store.is_complete:
                return _finished(job, decision)
            decision, solved, measured = _compute(job, decision)
            outcome = write(job, decision, solved, measured)
            job.session.store.finish()
            return outcome


def _compute(job: Job, decision: Decision) -> tuple[Decision, SolvedModel, Measured]:
    """Runs every stage but writing. The original model, which measuring needs, is freed at the end."""
    _compile_ahead(job, decision)
    texts = verification_data(job, decision)
    baseline = baseline_of(job, decision, texts)
    announce_time(job, decision)
    announce_untied_head(job.listener, decision.plan)
    with job.stages() as (staged, progress):
        decision = read_data(staged, decision)
        solved = solve(staged, decision, progress)
        return decision, solved, measure(staged, solved, baseline)


def _compile_ahead(job: Job, decision: Decision) -> None:
    """Begins to compile kernels of the plan's solvers, while texts are read and the model is copied to the GPU."""
    layers = [layer for layer in decision.plan.quantized if isinstance(get_pipeline(layer.solver).rounding, Gptq)]
    compile_ahead({layer.weight_format for layer in layers}, job.session.device)


def _is_idle_rank(job: Job) -> bool:
    """Returns whether this rank has nothing to do, since only one rank solves a bare state dict."""
    if job.source.model is not None:
        return False
    is_first = rank_and_world()[0] == 0
    leave()  # before the work, because the others end now and a collective call would wait for them forever
    return not is_first


def _finished(job: Job, decision: Decision) -> Outcome:
    """Gives its name to a checkpoint that an earlier run wrote whole."""
    job.session.store.finish()
    wait_for_all()
    assert job.request.out is not None
    return Outcome(decision.plan, Report.load(job.request.out / "report.json"))
