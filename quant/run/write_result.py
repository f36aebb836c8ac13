"""The last stage writes the checkpoint with its report; a module in memory gets its plan instead."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quant.base.errors import UserError, counted, listed, warn
from quant.base.extras import versions
from quant.base.processor import peak_rss
from quant.calibration.layer_result import LayerResult, loss_warnings
from quant.calibration.placement import describe
from quant.calibration.ranks import leave, rank_and_world
from quant.calibration.texts.sources import tokenizer_if_any
from quant.export.checkpoint.compare_source import compare_with_source
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.pretrained import attach
from quant.export.checkpoint.save import Destination, save_state_dict, write_model
from quant.export.gguf.export_gguf import gguf_notes, write_gguf
from quant.models.configs import described_by
from quant.models.files import SourceKind
from quant.models.prediction_heads import head_layers
from quant.recipes.plan import Plan
from quant.report.report import Report, kv_cache_of
from quant.run.decide import gguf_words
from quant.run.job import Decision, Job, Outcome, SolvedModel
from quant.run.measure import Measured


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
        write_gguf(solved.quantized.model, out, solved.plan, words=gguf_words(source))
        report.notes += gguf_notes(solved.quantized.model, solved.plan)
        report.seconds["write"], report.bytes_after = time.perf_counter() - started, out.stat().st_size
        return
    if solved.quantized is None:
        assert source.state_dict is not None and solved.tensors is not None
        save_state_dict(source.state_dict, solved.tensors, solved.plan, out, overwrite=request.overwrite, finish=finish)
        return
    # For a model in a directory, the files of its tokenizer are copied.
    directory = described_by(solved.quantized.model, source.directory)
    write_model(
        solved.quantized.model,
        solved.plan,
        Destination(out, request.overwrite, job.session.store, source=directory),
        stored_names(job.model),
        tokenizer=tokenizer_if_any(source) if directory is None else None,
        allow_missing=request.allow_missing,
        finish=finish,
    )


def _differences(job: Job, directory: Path) -> list[str]:
    """Returns how a checkpoint deviates from the directory that it was made from, outside the quantized weights.

    A step of the run explains each deviation. There is one line for each such step, and not for each tensor.

    Raises:
        UserError: there is a deviation that no step of the run explains; the message names it.
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
        bytes_before=solved.bytes_before,
        bytes_after=solved.bytes_before - saved,
        effective_bits=plan.effective_bits,
        evaluation=measured.evaluation,
        plan_digest=plan.digest(),
        command=job.request.command,
        versions=versions(),
        seconds=job.seconds,
        peak_rss_bytes=peak_rss(),
        device=describe(job.session.device),
        files={},
        warnings=_warnings(decision, solved),
        notes=list(measured.notes),
        sensitivity=None if allocation is None else allocation.sensitivity,
        allocation=None if allocation is None else allocation.record,
        kv_cache=kv_cache_of(source.config, plan),
        fingerprint=measured.fingerprint,
        examples=measured.examples,
    )


def _as_stored(result: LayerResult, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> LayerResult:
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
            f"the guard {executed.guard!r} gave {len(changed)} of "
            f"{counted(len(decided.quantized), 'layer')} another format, {unquantized} of them 16 bit, "
            f"{changed[0].name} first: {changed[0].reason}"
        )
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
