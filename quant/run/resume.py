"""A run keeps finished steps next to its destination, so that the same command continues after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from quant.calibration.session import Session
from quant.calibration.walk.step_store import DirectoryStore
from quant.base.extras import versions
from quant.recipes.plan import Plan
from quant.run.job import Job
from quant.run.same_on_ranks import check_same, kind_of


@contextmanager
def resumable(job: Job, plan: Plan) -> Iterator[Job]:
    """Gives the job a store of finished steps. A bare state dict is solved in seconds, and a module has no directory.

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
        "the kind of device": _device_type(job.session),
    }
    with DirectoryStore(request.out, depends, source.files, restart=request.restart) as store:
        if not store.is_complete:
            store.expect("device", kind_of(job.session))  # each kind of GPU rounds sums in its own way
        yield replace(job, session=replace(job.session, store=store))


def _device_type(session: Session) -> str:
    return "cpu" if session.device is None else session.device.type
