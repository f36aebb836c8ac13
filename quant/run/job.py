"""A `Job` is a run in progress, which its stages hand on; an `Outcome` is the result of a run.

The third stage reads calibration rows, where the plan needs some, and evaluation rows; it says what that takes. Ranks
must work on the same files: `check_same` compares them before anything is computed. Of a large file, pieces that are
spread evenly over it are compared: enough to notice another model or revision, not a flipped bit.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, in_words, megabytes, option, steps_in_words, versions
from quant.base.listener import Listener, StageProgress
from quant.calibration.allocation.allocate import Allocation, rows_where_solved
from quant.calibration.allocation.goal import Goal
from quant.calibration.allocation.measure_choices import HeldOut, rows_of_choice
from quant.calibration.inputs import Inputs
from quant.calibration.layer_result import LayerResult, Quantized
from quant.calibration.outputs.logits import check_evaluable
from quant.calibration.ranks import gathered, rank_and_world, wait_for_all
from quant.calibration.sensitivity.table import Candidate
from quant.calibration.session import Session, describe, device_of
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts import sources
from quant.calibration.texts.mixture import Record, lacks_data, solver_needs_data, with_calibration, with_data
from quant.calibration.walk.choose_transform import CHOICE, choose_transform, expected_choice
from quant.calibration.walk.expected_time import expected_time, time_of_rows
from quant.calibration.walk.solve import check_solvable
from quant.formats.tensor import BlockScaledTensor
from quant.models.files import spot_hash
from quant.models.open_model import Source
from quant.models.stored_weights import read_stored, stored_in
from quant.recipes.plan import Plan, groups_of
from quant.recipes.solver_names import parse_solver
from quant.report.report import Report
from quant.run.request import Request


@dataclass(frozen=True, eq=False)
class Job:
    """A run in progress."""

    request: Request
    source: Source
    session: Session  # device, memory, store and seed of all steps
    listener: Listener
    seconds: dict[str, float]  # of finished stages, by name

    @property
    def model(self) -> nn.Module:
        """The model, unless the source is a bare state dict."""
        return self.source.module

    @contextmanager
    def stages(self) -> "Iterator[tuple[Job, StageProgress]]":
        """Gives the same job with a listener that counts stages, and the counter of these stages."""
        with self.listener.stages() as progress:
            yield replace(self, session=replace(self.session, progress=progress)), progress


@dataclass(frozen=True, eq=False)
class Decision:
    """The plan of a run, and the data that its weights are solved with."""

    plan: Plan  # as it was decided, before a guard changed it
    data: Tensor | Inputs | None = None  # None where none was read yet, or none is needed
    # Whether an effort of this run chose the solvers, so that one without data may replace them. A plan that the user
    # names says everything, whatever its provenance says of its origin.
    may_lower_effort: bool = False
    # Whether solvers are those of an effort alone, so that their transform may be chosen on the model.
    tries_transforms: bool = False
    # The choice of formats for a budget, and the quantized copy of the model that it measured, if any.
    allocation: Allocation | None = None


@dataclass(frozen=True, eq=False)
class SolvedModel:
    """The solved weights of a run."""

    plan: Plan  # that was executed
    layers: list[LayerResult]  # one for each layer of the plan
    bytes_before: int  # of all weights of the original
    quantized: Quantized | None = None  # None for a bare state dict
    tensors: Mapping[str, BlockScaledTensor] | None = None  # of a bare state dict, by layer name


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a run."""

    plan: Plan  # that was executed, or that a dry run would execute
    report: Report | None = None  # of a checkpoint that was written
    quantized: Quantized | None = None  # of a module in memory


def announce_device(listener: Listener, session: Session) -> None:
    """Says that a run computes on a GPU, if it does."""
    if session.device is not None and session.device.type != "cpu":
        listener.message(f"on {describe(session.device)}")


def announce_source(listener: Listener, source: Source) -> None:
    """Says that the files of a model hold it quantized, if they do."""
    if source.quantization is not None:
        dtype = str(source.dtype).removeprefix("torch.")
        listener.message(
            f"the source is quantized ({source.quantization}); its weights are dequantized to {dtype}, which undoes no "
            "rounding: losses are measured against these weights"
        )


def announce_untied_head(listener: Listener, plan: Plan) -> None:
    """Says what the weight takes that a learned rotation gives to a head which has shared the embedding's."""
    heads = [layer for layer in plan.layers if layer.weight is None and layer.tied_to is not None]
    if heads and any(parse_solver(layer.solver).learns_rotation for layer in plan.quantized):
        listener.message(
            f"{heads[0].name} shares the weight of {heads[0].tied_to}; a learned rotation gives it one of its own, "
            f"which takes {megabytes(sum(2 * head.numel for head in heads))} more in 16 bit"
        )


def announce_effort(listener: Listener, plan: Plan) -> None:
    """Says why a plan has a lower effort than the requested one, if so."""
    chosen = plan.provenance.get("effort")
    if isinstance(chosen, dict) and "why" in chosen:
        listener.message(f"effort {chosen['level']} ({chosen['solver']}) instead of {chosen['asked']}: {chosen['why']}")


Data = Tensor | Inputs


def read_data(job: Job, decision: Decision) -> Decision:
    """Returns the decision with calibration data, where its plan needs some and has none.

    Without a source that the user names, a plan whose effort chose the solver falls back to effort 1 where the model
    can write no text; any other plan is refused then.
    """
    if decision.data is not None or job.source.model is None:
        return decision
    # Before text is written, which takes minutes: a plan that cannot be solved is refused now.
    check_solvable(job.model, decision.plan)
    if not lacks_data(decision.plan):
        return decision
    if job.request.calib or not decision.may_lower_effort:
        data, records = _kept_data(job, decision.plan)
        return replace(decision, plan=with_calibration(decision.plan, records), data=data)
    plan, written = with_data(decision.plan, lambda: _kept_data(job, decision.plan))
    announce_effort(job.listener, plan)
    return replace(decision, plan=plan, data=written)


def choose_transforms(job: Job, decision: Decision) -> Decision:
    """Returns the decision with the transform of 4-bit inputs that loses least on the model, where an effort chose."""
    if not decision.tries_transforms or decision.data is None:
        return decision
    started = time.perf_counter()
    plan = choose_transform(job.model, decision.plan, decision.data, job.session)
    job.seconds["transform"] = time.perf_counter() - started
    if (choice := plan.provenance.get(CHOICE)) is not None:
        if "why" in choice:
            text = f"{choice['solver']}, without a comparison of transforms: {choice['why']}"
        else:
            losses = ", ".join(f"{solver} lost {loss:g}" for solver, loss in choice["lost"].items())
            text = f"takes {choice['solver']}: {losses} on {choice['on']}"
        job.listener.message(text)
    return replace(decision, plan=plan)


def _kept_data(job: Job, plan: Plan) -> tuple[Data, list[Record]]:
    """Returns calibration data and its records.

    Text that the model wrote is kept in the store, because writing takes long.
    """
    rows, store = job.request.calibration_rows, job.session.store
    step = f"calibration rows of {rows.label}"
    stored = store.get(step) if rows.is_written else None
    if stored is not None:
        return stored.tensors["rows"].clone(), stored.record
    on_processor = job.session.device is None or job.session.device.type == "cpu"
    if rows.is_written and on_processor:
        read_stored(job.model, stored_in(job.model))  # or each token would read every weight again
    data, records = calibration_data(job, lambda: plan)
    # Ranks read their own files, and a resumed run may find the text changed: either would mix two calibrations.
    digest = sources.digest_of(data)
    check_same({f"the calibration text {rows.label}": digest}, job.session)
    if rows.is_written:
        assert isinstance(data, Tensor)
        store.put(step, {"rows": data}, records)
    else:
        store.expect("calibration text", digest)
    return data, records


def calibration_data(job: Job, plan: Callable[[], Plan]) -> tuple[Data, list[Record]]:
    """Returns the calibration data of a request and a record of each source; `plan` needs it, which messages say."""
    rows, started = job.request.calibration_rows, time.perf_counter()
    read = sources.read_calibration(
        job.source, rows, job.session, listener=job.listener, plan=plan() if rows.is_written else None
    )
    if rows.is_written:
        job.seconds["text"] = time.perf_counter() - started
    return read


def evaluation_data(job: Job) -> dict[str, Data]:
    """Returns the rows or inputs of each evaluation source by its name; the model runs on all of them."""
    texts = sources.Rows(tuple(map(str, job.request.eval_texts)), job.request.eval_samples, job.request.seqlen)
    data = sources.read_evaluation(job.source, texts, job.session, listener=job.listener)
    for rows in data.values():
        check_evaluable(job.model, rows)
    return data


def verification_data(job: Job, decision: Decision) -> Mapping[str, Data]:
    """Returns the evaluation data that the choice of formats did not use: the other half of each text."""
    data = evaluation_data(job)
    if decision.allocation is None or not decision.allocation.record.verified or not data:
        return data
    return dict(HeldOut.halves({n: sources.as_rows(job.model, rows, "a limit") for n, rows in data.items()}).verify)


def announce_time(job: Job, decision: Decision) -> None:
    """Says before anything slow starts how long a plan that needs text will take."""
    source, plan = job.source, decision.plan
    store = job.session.store
    unsolved = 1 - store.progress()[0] / max(len(plan.quantized), 1)  # of a run that is continued
    is_solved = not unsolved or (decision.allocation is not None and decision.allocation.quantized is not None)
    if is_solved or job.listener.is_silent or not source.is_causal_lm or not lacks_data(plan):
        return
    # A budget has its text by now.
    samples, seqlen, written = _text_size(job, will_write=decision.data is None)
    time = expected_time(job.model, plan, job.session, rows=samples, seqlen=seqlen, written=written)
    is_tried = decision.tries_transforms and CHOICE not in store
    trying = expected_choice(job.model, plan, job.session, samples, seqlen) if is_tried else 0.0
    solving = unsolved * time.solving
    if not any(solver_needs_data(layer) for layer in plan.quantized):
        # Static scales of inputs and of the KV cache need text too.
        if written:
            job.listener.message(
                f"the model writes {written:,} tokens of calibration text, which will take about "
                f"{in_words(time.writing)}; {option('calib', 'FILE')} spares that"
            )
        return
    solvers = " and ".join(dict.fromkeys(layer.solver for layer in plan.quantized))
    steps = {"write text": time.writing, "choose a transform": trying, "solve": solving}
    job.listener.message(
        f"{solvers} on {samples} rows of {seqlen} tokens will take about {steps_in_words(steps)}; "
        f"{option('effort', 0)} is much faster"
    )


def announce_budget(job: Job, plan: Plan, goal: Goal, candidates: Sequence[Candidate], solver: str) -> None:
    """Says before anything slow starts how long a budget will take: its text, the choice of formats, and solving.

    `plan` has one of the formats and the solver of the run. `solver` compares formats; it may be rounding to nearest.
    """
    if job.listener.is_silent or not job.source.is_causal_lm:
        return
    samples, seqlen, written = _text_size(job, will_write=job.request.data is None)
    time = expected_time(job.model, plan, job.session, rows=samples, seqlen=seqlen, written=written)
    device = job.session.device or device_of(job.model)
    formats, counts = len(candidates) - 1, job.request.budget.counts
    rows_solved = rows_where_solved(plan.quantized, candidates, goal, solver, samples, counts, device)
    changes = formats * len(groups_of(plan.quantized))
    passes = rows_of_choice(samples, formats, counts, device, changes=changes, rows_solved=rows_solved)
    choosing = time_of_rows(job.model, plan, job.session, passes, seqlen)
    if get_pipeline(solver).needs_data:
        # Each format group by group, and the whole model once if changes are measured in it; without gradients.
        alone = plan.replace_layers(
            replace(layer, solver=layer.solver.replace("kfac", "gptq_plain")) for layer in plan.quantized
        )
        each = expected_time(job.model, alone, job.session, rows=samples, seqlen=seqlen).solving
        choosing += (formats + bool(rows_solved)) * each
    steps = {"write text": time.writing, f"choose among {formats} formats": choosing, "solve": time.solving}
    job.listener.message(f"this budget will take about {steps_in_words(steps)}")


def _text_size(job: Job, *, will_write: bool) -> tuple[int, int, int]:
    """Returns the rows and tokens a row of the calibration text, and the tokens that the model will write."""
    samples, seqlen = job.request.calibration_samples, sources.within_context(job.source, job.request.seqlen)
    share = sources.written_share(job.request.calib, has_tokenizer=sources.tokenizer_if_any(job.source) is not None)
    writes = will_write and share > 0 and sources.must_write(job.source, job.request.calibration_rows, job.session)
    return samples, seqlen, round(share * samples * seqlen) if writes else 0


def check_same(values: Mapping[str, str], session: Session, files: Sequence[Path] = ()) -> None:
    """Raises UserError, which names the first rank, where ranks differ in values, files, versions or kind of device.

    `values` are hashes or names that the result depends on, by their names in the error message.
    """
    if rank_and_world()[1] == 1:
        return
    own = {f"the file {file.name}": spot_hash(file) for file in files}
    # cuBLAS chooses kernels, and so the order of sums, by the GPU: equal inputs give other last bits on another one.
    own["the kind of device"] = kind_of(session)
    own |= {f"the version of {name}": version for name, version in versions().items()} | dict(values)
    everywhere = gathered((platform.node(), own))
    first = everywhere[0][1]
    for rank, (machine, theirs) in enumerate(everywhere):
        for name in dict.fromkeys((*first, *theirs)):
            if theirs.get(name) != first.get(name):
                own_value, first_value = (each.get(name, "none") for each in (theirs, first))
                if rank_and_world()[0]:
                    wait_for_all()  # the first rank reports the error, and this process is ended
                detail = "" if len(own_value + first_value) > 80 else f" ({own_value}; rank 0 has {first_value})"
                raise UserError(
                    f"rank {rank} on {machine} differs from rank 0 in {name}{detail}; all ranks need the same files, "
                    "options, versions and GPUs"
                )


def kind_of(session: Session) -> str:
    """Returns the kind of device that a session computes on."""
    device = session.device
    return torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else "cpu"
