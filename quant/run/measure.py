"""The fifth stage measures the quantized model of a run on its evaluation texts, next to the original one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.base.listener import reporter
from quant.calibration.evaluating import prepared
from quant.calibration.inputs import Inputs
from quant.calibration.placement import is_visited, placed
from quant.calibration.texts.sources import digest_of, tokenizer_if_any
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import Evaluation
from quant.evaluation.evaluation import Continuation, Decode, Examples, WorstPredictions, continuations, output_errors
from quant.evaluation.fingerprint import Fingerprint, fingerprint
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.linear.oracle import kept_weights
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.models.files import SourceKind
from quant.models.open_model import open_model
from quant.recipes.solver_names import parse_solver
from quant.run.job import Decision, Job, SolvedModel

_PREDICTIONS = 8  # worst predictions that are shown
_PROMPT, _ADDED = 16, 24  # tokens of the text before and after
_COMPARED = 128  # tokens of the row on which outputs of layers are compared
# Parameters of the largest model that writes such a text in seconds, on a processor and on a GPU.
_QUICK = {"cpu": 300_000_000, "cuda": 3_000_000_000}


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures, fingerprint and examples of a quantized model; None where nothing was measured.

    Attributes:
        evaluation: figures on the evaluation texts.
        fingerprint: the fingerprint of the model's logits.
        examples: tokens and a text before and after.
        output_errors: relative error of each layer's output, by the layer's name.
    """

    evaluation: Evaluation | None = None
    fingerprint: Fingerprint | None = None
    examples: Examples | None = None
    output_errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Baseline:
    """Evaluation texts, and the original model to compare with.

    Attributes:
        texts: rows or inputs by the name of their source.
        model: the original, apart from the model that is quantized in place; None where there are no texts.
    """

    texts: Mapping[str, torch.Tensor | Inputs]
    model: nn.Module | None


def baseline_of(job: Job, decision: Decision, texts: Mapping[str, torch.Tensor | Inputs]) -> Baseline:
    """Returns the original model, to be taken before the model is quantized.

    An allocation that quantized a copy left the model as it was. Otherwise it is opened again, which maps its files
    once more, or copied.
    """
    if not texts:
        return Baseline({}, None)
    if decision.allocation is not None and decision.allocation.quantized is not None:
        return Baseline(texts, job.model)
    # Mapped files cost no memory twice; a deep copy of a module does.
    again = None
    if job.source.kind == SourceKind.HUGGINGFACE:
        again = open_model(str(job.request.model), model_factory=job.request.model_factory).model
    return Baseline(texts, copy.deepcopy(job.model) if again is None else again)


def measure(job: Job, solved: SolvedModel, baseline: Baseline) -> Measured:
    """Measures the quantized model. The store keeps the result, since weights move into the checkpoint afterwards.

    Raises:
        UserError: an earlier run was stopped while its weights moved, and it had measured on other texts.
    """
    if not baseline.texts:
        return Measured()
    assert solved.quantized is not None
    store, digests = job.session.store, {name: digest_of(rows) for name, rows in baseline.texts.items()}
    stored = store.get("evaluation")
    if stored is not None and stored.record["texts"] == digests:
        measured = _from_record(stored.record)
    # Moved tensors are in half-written files and read as zeros here, so a model of them cannot be run.
    elif store.is_moving:
        raise UserError(
            f"{store.directory}: the run was stopped while it wrote its files, and --eval was another; give the same, "
            "or pass --restart to begin anew"
        )
    else:
        measured = _measured(job, solved.quantized.model, solved, baseline)
        store.put("evaluation", {}, {"texts": digests, **_to_record(measured)})
    assert measured.evaluation is not None
    job.seconds["evaluate"] = sum(each.seconds for each in measured.evaluation.texts)
    return measured


def _measured(job: Job, model: nn.Module, solved: SolvedModel, baseline: Baseline) -> Measured:
    report, device = reporter(job.session.progress, "evaluate"), job.session.device
    assert baseline.model is not None
    tokenizer = tokenizer_if_any(job.source)
    # Ids stand for themselves where nobody knows their text.
    decode = (lambda ids: " ".join(map(str, ids))) if tokenizer is None else tokenizer.decode
    worst = WorstPredictions(_PREDICTIONS, decode)
    # The KV cache and attention are rounded as at serving time, or their loss would be missing from the figures.
    with quantized_attention(model, **solved.plan.run_time), kept_weights(_worth_keeping(job, model)):
        evaluation = evaluate_texts(model, baseline.texts, baseline.model, device=device, progress=report, worst=worst)
        if any(rows.is_floating_point() for rows in baseline.texts.values()):
            return Measured(evaluation)
        errors, continuation = _compare(job, solved, baseline, decode)
        # The fingerprint runs token ids of its own, which a model of images does not take.
        with placed(model, device):
            return Measured(evaluation, fingerprint(model), Examples(worst.of_all_ranks(), continuation), errors)


def _compare(
    job: Job, solved: SolvedModel, baseline: Baseline, decode: Decode
) -> tuple[dict[str, float], Continuation | None]:
    """Returns the errors of the layers' outputs on the first text, and its beginning continued by both models."""
    rows, device = next(iter(baseline.texts.values())), job.session.device
    assert solved.quantized is not None and baseline.model is not None
    models = (solved.quantized.model, baseline.model)
    if not isinstance(rows, torch.Tensor):
        return {}, None
    quick = _is_small(job, baseline.model) and not any(is_visited(each, device, torch.float32) for each in models)
    errors, continuation = {}, None
    with torch.no_grad(), prepared(models, torch.float32, job.session):
        # A merged scale or rotation changes the outputs of other layers too, which then say nothing of an error.
        if not any(parse_solver(layer.solver).merged for layer in solved.plan.quantized):
            errors = output_errors(*models, rows[0, :_COMPARED], [layer.name for layer in solved.plan.quantized])
        if job.source.is_causal_lm and quick:
            continuation = continuations(*models, rows[0, :_PROMPT].tolist(), decode, tokens=_ADDED)
    return errors, continuation


def _is_small(job: Job, model: nn.Module) -> bool:
    """Returns whether a model that is not quantized writes a short text in seconds."""
    device = job.session.device
    return sum(p.numel() for p in model.parameters()) <= _QUICK.get("cpu" if device is None else device.type, 0)


def _worth_keeping(job: Job, model: nn.Module) -> list[torch.Tensor]:
    """Returns the codes of a small model that runs on the CPU, if there is memory to keep them dequantized.

    Measuring runs it dozens of times on few tokens, where dequantizing takes three quarters of the time.
    """
    modules = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    weights = sum(math.prod(module.weight_shape) for module in modules)
    usable, on_cpu = job.session.usable_memory(), all(module.codes.device.type == "cpu" for module in modules)
    has_room = usable is not None and 4 * torch.float32.itemsize * weights <= usable
    return [module.codes for module in modules] if on_cpu and has_room and weights <= _QUICK["cpu"] else []


def _to_record(measured: Measured) -> dict[str, Any]:
    """Returns the figures, JSON-ready."""
    parts = {name: getattr(measured, name) for name in ("evaluation", "fingerprint", "examples")}
    fields = {name: None if part is None else part.to_dict() for name, part in parts.items()}
    return {**fields, "output_errors": dict(measured.output_errors)}


def _from_record(record: Mapping[str, Any]) -> Measured:
    """Returns what `_to_record` wrote as it was."""
    # A run that an earlier version began has no examples.
    parts = {name: record.get(name) for name in ("evaluation", "fingerprint", "examples")}
    return Measured(
        None if parts["evaluation"] is None else Evaluation.from_dict(parts["evaluation"]),
        None if parts["fingerprint"] is None else Fingerprint.from_dict(parts["fingerprint"]),
        None if parts["examples"] is None else Examples.from_dict(parts["examples"]),
        record.get("output_errors", {}),
    )
