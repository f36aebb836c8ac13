"""The fifth stage measures the quantized model of a run on its evaluation texts, next to the original one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quant.calibration.inputs import Inputs
from quant.calibration.listener import reporter
from quant.calibration.placement import placed
from quant.errors import UserError
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.fingerprint import Fingerprint, fingerprint
from quant.evaluation.record import Evaluation
from quant.execution.sources import digest_of
from quant.models.files import SourceKind
from quant.models.open import open_model
from quant.run.job import Decision, Job, Solved
from quant.runtime.attention import quantized_attention


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures and fingerprint of a quantized model; None where nothing was measured."""

    evaluation: Evaluation | None = None
    fingerprint: Fingerprint | None = None


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


def measure(job: Job, solved: Solved, baseline: Baseline) -> Measured:
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
        logits = stored.record["fingerprint"]
        measured = Measured(
            Evaluation.from_dict(stored.record["evaluation"]), None if logits is None else Fingerprint.from_dict(logits)
        )
    # Moved tensors are in half-written files and read as zeros here, so a model of them cannot be run.
    elif store.is_moving:
        raise UserError(
            f"{store.directory}: the run was stopped while it wrote its files, and --eval was another; give the same, "
            "or pass --restart to begin anew"
        )
    else:
        measured = _measured(job, solved.quantized.model, solved, baseline)
        store.put("evaluation", {}, {"texts": digests, **_record(measured)})
    assert measured.evaluation is not None
    job.seconds["evaluate"] = sum(each.seconds for each in measured.evaluation.texts)
    return measured


def _measured(job: Job, model: nn.Module, solved: Solved, baseline: Baseline) -> Measured:
    report, device = reporter(job.session.progress, "evaluate"), job.session.device
    # The KV cache and attention are rounded as at serving time, or their loss would be missing from the figures.
    with quantized_attention(model, **solved.plan.run_time):
        evaluation = evaluate_texts(model, baseline.texts, baseline.model, device=device, progress=report)
        if any(rows.is_floating_point() for rows in baseline.texts.values()):
            return Measured(evaluation)
        # The fingerprint runs token ids of its own, which a model of images does not take.
        with placed(model, device):
            return Measured(evaluation, fingerprint(model))


def _record(measured: Measured) -> dict[str, object]:
    """Returns the figures, JSON-ready."""
    assert measured.evaluation is not None
    logits = None if measured.fingerprint is None else measured.fingerprint.to_dict()
    return {"evaluation": measured.evaluation.to_dict(), "fingerprint": logits}
