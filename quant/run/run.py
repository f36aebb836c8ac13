"""`run` takes a request from the model to the result, for both the command `quantize` and `quant.quantize`.

    load       open the model                                    a module in memory is there already
    decide     make the plan, or choose formats for a budget
    data       read calibration and evaluation rows              only where the plan or the user asks for them
               try the transforms of 4-bit inputs                only where an effort chose the solver
    solve      round the weights, block by block or at once
    measure    compare with the original model                   only on evaluation texts
    write      the checkpoint and its report                     a module in memory gets its plan

The destination, the plan and the texts are checked before the slow steps, and no file of the checkpoint is written
before everything is computed.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.atomic import claimed
from quant.base.errors import UserError, counted, importing, listed, megabytes, versions, warn
from quant.base.json_files import JsonData
from quant.base.listener import SILENT, Listener, StageProgress, reporter
from quant.base.processor import memory_taken, peak_rss
from quant.calibration.evaluating import prepared
from quant.calibration.inputs import Inputs
from quant.calibration.layer_result import LayerResult, loss_warnings
from quant.calibration.ranks import leave, rank_and_world, wait_for_all
from quant.calibration.session import Session, describe, is_visited, placed
from quant.calibration.solvers.gptq import compile_ahead
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts.mixture import lacks_data, solver_needs_data
from quant.calibration.texts.sources import check_lengths, digest_of, short_files, tokenizer_if_any
from quant.calibration.walk.solve import check_in_memory, solve_plan, solve_state_dict
from quant.calibration.walk.step_store import DirectoryStore
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import (
    Continuation,
    Decode,
    Evaluation,
    Examples,
    Fingerprint,
    WorstPredictions,
    continuations,
    fingerprint,
    output_errors,
)
from quant.export.checkpoint.files.directory import check_room
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.save import Destination, attach, save_state_dict, write_model
from quant.export.checkpoint.verify import compare_with_source
from quant.export.gguf.export_gguf import gguf_notes, write_gguf
from quant.formats.format import FORMATS
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.linear.oracle import kept_weights
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.models.files import SourceKind, described_by
from quant.models.open_model import Source, open_model
from quant.models.prediction_heads import head_layers
from quant.recipes.blocks import block_names
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan, groups_by_input
from quant.recipes.recipe import Recipe
from quant.recipes.solver_names import parse_solver
from quant.report.report import Report, kv_cache_of
from quant.report.summary import WITHOUT_VOCABULARY
from quant.run.decide import check_layout, decide, gguf_words, plan_for, save_plan
from quant.run.job import (
    Decision,
    Job,
    Outcome,
    SolvedModel,
    announce_device,
    announce_source,
    announce_time,
    announce_untied_head,
    check_same,
    choose_transforms,
    kind_of,
    read_data,
    verification_data,
)
from quant.run.request import Request

# The first stage opens the model of a request and makes the session in which the run's steps work.


@dataclass(frozen=True)
class Measured(JsonData):
    """Figures, fingerprint and examples of a quantized model; None where nothing was measured."""

    evaluation: Evaluation | None = None
    fingerprint: Fingerprint | None = None
    examples: Examples | None = None
    output_errors: dict[str, float] = field(default_factory=dict)  # relative error of each layer's output
    notes: list[str] = field(default_factory=list)  # what a denoiser loses


Texts = Mapping[str, Tensor | Inputs]
"""Evaluation rows or inputs by the name of their source."""


@dataclass(eq=False, kw_only=True)
class _InMemory(Source):
    """A module of the caller, with the caller's tokenizer; no other is looked for."""

    tokenizer: Any = None

    def load_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{self.name}: no tokenizer was given; pass tokenizer=")
        return self.tokenizer


@contextmanager
def destination(request: Request) -> Iterator[None]:
    """Claims the destination of a request, which must be writable: no other run can write to it while open."""
    # One rank claims the path for all: the same claim by another rank would be refused as a second run.
    out = request.plan_out or (None if request.dry_run else request.out)
    if out is None or rank_and_world()[0]:
        request.check_destination()
        yield
        return
    with claimed(out):
        request.check_destination()
        yield


def load(request: Request, listener: Listener) -> Job:
    """Opens the model; of one whose shapes are enough, only configs and headers are read."""
    if request.is_in_memory:
        session = Session.on(request.device, seed=request.seed, memory=request.memory_bytes)
        opened = open_model(request.model)
        assert opened.model is not None
        if not request.only_decides:
            check_in_memory(opened.model)
        in_memory = _InMemory(
            name=opened.name, kind=opened.kind, model=opened.model, state_dict=None, path=opened.path,
            dtype=opened.dtype, tokenizer=request.tokenizer,
        )  # fmt: skip
        return Job(request.for_model(opened.model), in_memory, session, listener, {})
    # A dry run touches no GPU: a CUDA context takes about a second, and some hundred MB of GPU memory.
    session = Session(memory=request.memory_bytes, seed=request.seed)
    if not request.reads_no_weights:
        session = Session.on(request.device, seed=request.seed, memory=request.memory_bytes)
        announce_device(listener, session)
        _create_context(session)
    torch.manual_seed(request.seed)  # a caller's module does not change the caller's random numbers
    started = time.perf_counter()
    with listener.step(f"loading {request.model}"), importing():  # transformers, most of the time
        if not request.reads_no_weights and short_files(request.calibration_rows):
            # Text that is too short is refused before the weights are read: headers and tokenizer suffice.
            shapes = _open(request, meta=True)
            if request.goal is not None or lacks_data(plan_for(request, shapes)):
                check_lengths(shapes, request.calibration_rows)
        compile_solver(request, session.device)
        source = _open(
            request,
            meta=request.reads_no_weights,
            # An allocation and an evaluation run the whole model, which reads every expert at every row.
            stream=not request.reads_no_weights and request.goal is None and not request.eval_texts,
        )
    announce_source(listener, source)
    taken = None if session.memory is None or request.reads_no_weights else memory_taken()
    if session.memory is not None and taken is not None and taken > session.memory:
        raise UserError(
            f"--memory {request.memory}: Python, PyTorch and the open model take {megabytes(taken)} before anything is "
            "solved; give more than that, or leave it out"
        )
    sized = request if source.model is None else request.for_model(source.model)
    return Job(sized, source, session, listener, {"load": time.perf_counter() - started})


def _open(request: Request, *, meta: bool, stream: bool = False) -> Source:
    assert not isinstance(request.model, nn.Module)
    factory, unsafe = request.model_factory, request.unsafe_load
    return open_model(request.model, model_factory=factory, unsafe_load=unsafe, meta=meta, stream=stream)


def compile_solver(request: Request, device: torch.device | None) -> None:
    """Begins to compile the kernels of a request's solver, which takes 8 s, while transformers is imported."""
    if request.reads_no_weights or not (request.solver is None or get_pipeline(request.solver).rounding.feeds_back):
        return
    recipe = None if request.goal is not None else request.chosen_recipe
    # Of a budget and of a plan, any format may be among the chosen ones.
    names = {recipe.weight, *(rule.weight for rule in recipe.rules)} if isinstance(recipe, Recipe) else set(FORMATS)
    compile_ahead((format for name, format in FORMATS.items() if name in names), device)


def _create_context(session: Session) -> None:
    """Makes the driver create a GPU's context, which takes about a second, while transformers is imported.

    PyTorch releases the interpreter's lock while it runs. The process waits for the thread when it ends: a daemon that
    comes back from C++ after the interpreter has gone aborts the process ("terminate called without an active
    exception"), which would follow the error message of a run that is refused within the second.
    """
    if session.device is not None and session.device.type == "cuda":
        Thread(target=torch.empty, args=(1,), kwargs={"device": session.device}, name="context").start()


# The fourth stage solves the weights of a run, by the plan that was decided.


def solve(job: Job, decision: Decision, progress: StageProgress) -> SolvedModel:
    """Quantizes the model in place; a quantized copy that an allocation has measured is taken as it is."""
    if job.source.model is None:
        tensors, plan = job.source.state_dict, decision.plan
        assert tensors is not None
        started = time.perf_counter()
        amounts = [layer.numel * job.source.dtype.itemsize / 1e6 for layer in plan.layers]
        progress.expect("solve", [layer.name for layer in plan.layers], amounts, "MB")
        solved, layers = solve_state_dict(tensors, plan, job.session)
        job.seconds["solve"] = time.perf_counter() - started
        return SolvedModel(plan, layers, sum(tensor.nbytes for tensor in tensors.values()), tensors=solved)
    session = job.session
    # Before solving, which replaces parameters one by one.
    bytes_before = sum(parameter.nbytes for parameter in job.model.parameters())
    quantized = None if decision.allocation is None else decision.allocation.quantized
    if quantized is None:
        progress.expect("solve", *solving_steps(job.model, decision.plan, decision.data))
        # A ValueError here is the user's or a NaN: finished steps of this plan would fail again and are deleted.
        with session.store.solving():
            quantized = solve_plan(job.model, decision.plan, decision.data, session)
    job.seconds.update(quantized.seconds)
    if quantized.plan.guard is not None and not job.request.is_in_memory:
        check_layout(job.request, quantized.plan, job.source.model)  # a guard may have given layers other formats
    return SolvedModel(quantized.plan, quantized.layers, bytes_before, quantized)


def solving_steps(model: nn.Module, plan: Plan, data: Tensor | Inputs | None) -> tuple[list[str], list[float], str]:
    """Returns the layers that `solve_plan` goes through: the block of each, how much work it is, and the unit of that.

    With calibration text the work is its tokens, and each layer has the share of its weights; a model's worth of layers
    has taken all tokens. Without, it is the megabytes that are read.
    """
    blocks = block_names(model)
    layers = [layer for group in groups_by_input(plan.quantized) for layer in group]
    calibrated = plan.guard is not None or any(solver_needs_data(layer) for layer in layers)
    if calibrated and data is not None:
        layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
        tokens, weights = data.shape[:2].numel(), sum(layer.numel for layer in layers)
        amounts = [tokens * layer.numel / weights for layer in layers]
    else:
        # Bytes of the first parameter's dtype, which nearly all weights share.
        width = next(model.parameters()).element_size()
        amounts = [layer.numel * width / 1e6 for layer in layers]
    # Layers of one block are shown as its name, since the sequential walk finishes them together.
    names = [next((b for b in blocks if layer.name.startswith(f"{b}.")), layer.name) for layer in layers]
    return names, amounts, "tokens" if calibrated and data is not None else "MB"


def run(request: Request, listener: Listener = SILENT) -> Outcome:
    """Executes a request, alone at its destination; after the user's ValueError or OSError nothing is written."""
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
        with resumable(job, decision.plan) as (job, found):
            if job.session.store.is_complete:  # an earlier run wrote the checkpoint whole, but for its name
                assert request.out is not None
                job.session.store.finish()
                wait_for_all()
                return Outcome(decision.plan, Report.load(request.out / "report.json"))
            decision, solved, measured = _compute(job, decision, found)
            outcome = write(job, decision, solved, measured)
            job.session.store.finish()
            return outcome


def _compute(job: Job, decision: Decision, found: str | None) -> tuple[Decision, SolvedModel, Measured]:
    """Runs every stage but writing. The original model, which measuring needs, is freed at the end."""
    texts = verification_data(job, decision)
    original = original_of(job, decision, texts)
    announce_time(job, decision)
    announce_untied_head(job.listener, decision.plan)
    with job.stages() as (staged, progress):
        decision = read_data(staged, decision)
        if found is not None:
            job.listener.message(found)
        decision = choose_transforms(staged, decision)
        solved = solve(staged, decision, progress)
        return decision, solved, measure(staged, solved, texts, original)


@contextmanager
def resumable(job: Job, plan: Plan) -> Iterator[tuple[Job, str | None]]:
    """Gives the job a store of finished steps next to its destination, after which the same command continues.

    The sentence on the steps that were found there is for when the calibration text, too, is known to be the same.

    A bare state dict is solved in seconds, a module has no directory, and a GGUF file is begun anew. ValueError: a run
    with other options, another model or another version left steps there.
    """
    request, source = job.request, job.source
    if request.out is None or request.is_gguf or source.model is None or request.is_in_memory:
        yield job, None
        return
    check_same({"the plan": plan.digest()}, job.session, source.files.files)
    depends = {
        "the model's file": source.files.fingerprints(),
        "the plan": {"guard": plan.guard, "observer": plan.observer, "digest": plan.digest()},
        "the version of": versions(),
        "the seed": request.seed,
        # Sums on a CPU and on a GPU round differently; a finished layer of the other would not fit its neighbours.
        "command": request.command.replace(" --restart", ""),  # for messages: another command may be the same run
        "the kind of device": "cpu" if job.session.device is None else job.session.device.type,
    }
    found = None
    with DirectoryStore(request.out, depends, source.files, restart=request.restart) as store:
        if not store.is_complete:
            store.expect("device", kind_of(job.session))  # each kind of GPU rounds sums in its own way
            solved, kept = store.progress()
            layers = f"{solved} of {counted(len(plan.quantized), 'layer')} are solved" if solved else "no layer yet"
            found = f"continuing the run that was stopped: {layers}, in {store.path}" if kept else None
            check_room(request.out, plan.nbytes - kept)
        yield replace(job, session=replace(job.session, store=store)), found


def write(job: Job, decision: Decision, solved: SolvedModel, measured: Measured) -> Outcome:
    """Writes a checkpoint with its report, on the first rank; the others have nothing left to do."""
    out = job.request.out
    if out is None:
        assert solved.quantized is not None
        attach(solved.quantized.model, solved.plan)
        for message in _warnings(decision, solved):
            warn(message)  # the caller of `quant.quantize`
        return Outcome(solved.plan, quantized=solved.quantized)
    report = _report(job, decision, solved, measured)
    # Other ranks' steps must be on disk before this process leaves the group: afterwards it can receive none.
    job.session.store.flush()
    is_first = rank_and_world()[0] == 0
    leave()  # compressed-tensors, which the trial load imports, waits for all ranks of a process group
    if is_first:
        _write_checkpoint(job, out, solved, report)
    return Outcome(solved.plan, report)


def _write_checkpoint(job: Job, out: Path, solved: SolvedModel, report: Report) -> None:
    request, source = job.request, job.source
    started = time.perf_counter()

    def finish(directory: Path, hashes: Mapping[str, str], messages: list[str]) -> None:
        """Completes the directory of the checkpoint before it appears under its name."""
        report.notes += _differences(job, directory)
        report.seconds["write"] = time.perf_counter() - started
        # Warnings on the checkpoint come first: they may stop a server from loading it.
        report.warnings[:0] = messages
        report.complete(solved.plan, directory, hashes)
        # Last of all: if a file of the model changed while it was read, the directory never gets its name.
        source.files.check()

    if request.is_gguf:
        assert solved.quantized is not None
        source.files.check()  # before the file gets its name
        words = gguf_words(source)
        types = write_gguf(solved.quantized.model, out, solved.plan, words=words, device=job.session.device)["types"]
        report.notes += gguf_notes(solved.quantized.model, solved.plan)
        report.notes.append(f"tensors in the file: {', '.join(f'{count} in {kind}' for kind, count in types.items())}")
        report.warnings += [WITHOUT_VOCABULARY] if words is None else []
        report.seconds["write"], report.bytes_after = time.perf_counter() - started, out.stat().st_size
        return
    if solved.quantized is None:
        assert source.state_dict is not None and solved.tensors is not None
        save_state_dict(source.state_dict, solved.tensors, solved.plan, Destination(out, request.overwrite), finish)
        return
    # For a model in a directory, the files of its tokenizer are copied.
    directory = described_by(solved.quantized.model, source.directory)
    write_model(
        solved.quantized.model, solved.plan, Destination(out, request.overwrite, job.session.store, source=directory),
        stored_names(job.model), tokenizer=tokenizer_if_any(source) if directory is None else None,
        allow_missing=request.allow_missing, finish=finish,
    )  # fmt: skip


def _differences(job: Job, directory: Path) -> list[str]:
    """Returns how a checkpoint deviates from the directory that it was made from, outside the quantized weights.

    There is one line for each step of the run that explains deviations, and a UserError for one that no step explains.
    """
    source = job.source
    # A module in memory may have been trained since it was loaded.
    is_comparable = source.kind == SourceKind.HUGGINGFACE and source.directory is not None
    if not is_comparable or described_by(job.model, source.directory) is None:
        return []
    assert source.directory is not None
    differences = compare_with_source(directory, source.directory, job.model)
    faults = [str(each) for each in differences if each.reason is None]
    if faults:
        raise UserError(
            f"{source.directory}: the checkpoint would not be this model outside its quantized weights: "
            f"{listed(faults, 3)}; nothing was written: this is our bug, so please report it"
        )
    by_reason: dict[str, list[str]] = {}
    for each in differences:
        by_reason.setdefault(each.reason or "", []).append(each.name)
    return [f"not as in the source: {listed(names, 2)}: {reason}" for reason, names in by_reason.items()]


def _report(job: Job, decision: Decision, solved: SolvedModel, measured: Measured) -> Report:
    source, plan = job.source, solved.plan
    tensors = source.state_dict or {}
    if solved.quantized is not None:
        tensors = dict(solved.quantized.model.named_parameters(remove_duplicate=False))
    layers = [_as_stored(layer, plan, tensors) for layer in solved.layers]
    # Formats replace 16-bit weights: two bytes each. The files of the checkpoint correct this estimate in the end.
    saved = sum(2 * layer.numel - layer.nbytes for layer in plan.quantized)
    allocation = decision.allocation
    return Report(
        model=source.name,
        layers=[replace(layer, output_error=measured.output_errors.get(layer.name)) for layer in layers],
        bytes_before=solved.bytes_before, bytes_after=solved.bytes_before - saved, effective_bits=plan.effective_bits,
        evaluation=measured.evaluation, plan_digest=plan.digest(), command=job.request.command, versions=versions(),
        seconds=job.seconds, peak_rss_bytes=peak_rss(), device=describe(job.session.device), files={},
        warnings=_warnings(decision, solved), notes=list(measured.notes),
        sensitivity=None if allocation is None else allocation.sensitivity,
        allocation=None if allocation is None else allocation.record, kv_cache=kv_cache_of(source.config, plan),
        fingerprint=measured.fingerprint, examples=measured.examples,
    )  # fmt: skip


def _as_stored(result: LayerResult, plan: Plan, tensors: Mapping[str, Tensor]) -> LayerResult:
    """Returns the result with the size of a layer that stays in a dtype other than 16 bit in the checkpoint."""
    layer = plan.by_name[result.name]
    # A tied layer has the dtype of the tensor that it shares.
    tensor = tensors.get(plan.by_name.get(layer.tied_to or "", layer).tensor_name)
    if result.format is not None or tensor is None:
        return result
    size = tensor.dtype.itemsize
    return replace(result, bits=8.0 * size, nbytes=0 if layer.tied_to else size * layer.numel)


def _warnings(decision: Decision, solved: SolvedModel) -> list[str]:
    """Returns warnings about the run; `write_model` adds those about the checkpoint itself."""
    warned = loss_warnings(solved.layers)
    decided, executed = decision.plan, solved.plan
    changed = [layer for layer in executed.layers if layer.weight != decided.by_name[layer.name].weight]
    if changed:
        unquantized = sum(layer.weight is None for layer in changed)
        warned.append(
            f"the guard {executed.guard!r} gave {len(changed)} of {counted(len(decided.quantized), 'layer')} another "
            f"format, {unquantized} of them 16 bit, {changed[0].name} first: {changed[0].reason}"
        )
    if others := [layer for layer in executed.quantized if executed.guard and layer.kind != LayerKind.LINEAR]:
        kept = f"{counted(len(others), 'layer')} of another kind, {others[0].name} first, may be further off"
        warned.append(f"the guard {executed.guard!r} compares the outputs of linear layers alone: {kept}")
    names = set() if solved.quantized is None else head_layers(solved.quantized.model)
    if heads := [layer for layer in executed.quantized if layer.name in names]:
        has_static_scales = any(layer.has_static_scale for layer in heads)
        scales = " and have input scales measured on the model's last block" if has_static_scales else ""
        warned.append(
            f"{counted(len(heads), 'layer')} of prediction heads, {heads[0].name} first, were solved with "
            f"{listed(sorted({layer.solver for layer in heads}))}, without data{scales}, because transformers does not "
            "run them: compare how many of a server's draft tokens are accepted"
        )
    return [*warned, *([] if decision.allocation is None else decision.allocation.record.warnings())]


_PREDICTIONS = 8  # worst predictions that are shown
_PROMPT, _ADDED = 16, 24  # tokens of the text before and after
_COMPARED = 128  # tokens of the row on which outputs of layers are compared
# Parameters of the largest model that writes such a text in seconds, on a processor and on a GPU.
_QUICK = {"cpu": 300_000_000, "cuda": 3_000_000_000}


def original_of(job: Job, decision: Decision, texts: Texts) -> nn.Module | None:
    """Returns the original model, to be taken before the model is quantized in place; None where no text needs it.

    An allocation that quantized a copy left the model as it was. Otherwise it is opened again, which maps its files
    once more, or copied.
    """
    if not texts:
        return None
    if decision.allocation is not None and decision.allocation.quantized is not None:
        return job.model
    # Mapped files cost no memory twice; a deep copy of a module does.
    again = None
    if job.source.kind == SourceKind.HUGGINGFACE:
        again = open_model(str(job.request.model), model_factory=job.request.model_factory).model
    return copy.deepcopy(job.model) if again is None else again


def measure(job: Job, solved: SolvedModel, texts: Texts, original: nn.Module | None) -> Measured:
    """Measures the quantized model. The store keeps the result, since weights move into the checkpoint afterwards."""
    if job.request.noise is not None and solved.quantized is not None:
        return Measured(notes=job.request.noise(solved.quantized.model))
    if original is None:
        return Measured()
    store, digests = job.session.store, {name: digest_of(rows) for name, rows in texts.items()}
    stored = store.get("evaluation")
    if stored is not None and stored.record["texts"] == digests:
        measured = Measured.from_dict(stored.record["measured"])
    # Moved tensors are in half-written files and read as zeros here, so a model of them cannot be run.
    elif store.is_moving:
        raise UserError(
            f"{store.directory}: the run was stopped while it wrote its files, and --eval was another; give the same, "
            "or pass --restart to begin anew"
        )
    else:
        measured = _measured(job, solved, texts, original)
        store.put("evaluation", {}, {"texts": digests, "measured": measured.to_dict()})
    assert measured.evaluation is not None
    job.seconds["evaluate"] = sum(each.seconds for each in measured.evaluation.texts)
    return measured


def _measured(job: Job, solved: SolvedModel, texts: Texts, original: nn.Module) -> Measured:
    assert solved.quantized is not None
    model, device = solved.quantized.model, job.session.device
    report = reporter(job.session.progress, "evaluate")
    tokenizer = tokenizer_if_any(job.source)
    # Ids stand for themselves where nobody knows their text.
    decode = (lambda ids: " ".join(map(str, ids))) if tokenizer is None else tokenizer.decode
    worst = WorstPredictions(_PREDICTIONS, decode)
    # The KV cache and attention are rounded as at serving time, or their loss would be missing from the figures.
    with quantized_attention(model, **solved.plan.run_time), kept_weights(_worth_keeping(job, model)):
        evaluation = evaluate_texts(model, texts, original, device=device, progress=report, worst=worst)
        if any(rows.is_floating_point() for rows in texts.values()):
            return Measured(evaluation)
        errors, continuation = _compare(job, solved, next(iter(texts.values())), (model, original), decode)
        # The fingerprint runs token ids of its own, which a model of images does not take.
        with placed(model, device):
            return Measured(evaluation, fingerprint(model), Examples(worst.of_all_ranks(), continuation), errors)


def _compare(
    job: Job, solved: SolvedModel, rows: Tensor | Inputs, models: tuple[nn.Module, nn.Module], decode: Decode
) -> tuple[dict[str, float], Continuation | None]:
    """Returns the errors of the layers' outputs on the first text, and its beginning continued by both models."""
    device = job.session.device
    if not isinstance(rows, Tensor):
        return {}, None
    weights = sum(parameter.numel() for parameter in models[1].parameters())
    is_small = weights <= _QUICK.get("cpu" if device is None else device.type, 0)
    quick = is_small and not any(is_visited(each, device, torch.float32) for each in models)
    errors, continuation = {}, None
    with torch.no_grad(), prepared(models, torch.float32, job.session):
        # A merged scale or rotation changes the outputs of other layers too, which then say nothing of an error.
        if not any(parse_solver(layer.solver).merged for layer in solved.plan.quantized):
            errors = output_errors(*models, rows[0, :_COMPARED], [layer.name for layer in solved.plan.quantized])
        if job.source.is_causal_lm and quick:
            continuation = continuations(*models, rows[0, :_PROMPT].tolist(), decode, tokens=_ADDED)
    return errors, continuation


def _worth_keeping(job: Job, model: nn.Module) -> list[Tensor]:
    """Returns the codes of a small model that runs on the CPU, if there is memory to keep them dequantized.

    Measuring runs it dozens of times on few tokens, where dequantizing takes three quarters of the time.
    """
    modules = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    weights = sum(math.prod(module.weight_shape) for module in modules)
    usable, on_cpu = job.session.usable_memory(), all(module.codes.device.type == "cpu" for module in modules)
    has_room = usable is not None and 4 * torch.float32.itemsize * weights <= usable
    return [module.codes for module in modules] if on_cpu and has_room and weights <= _QUICK["cpu"] else []
