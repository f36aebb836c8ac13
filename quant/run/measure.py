"""The fifth stage measures the quantized model of a run on its evaluation texts, next to the original one."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quant.base.errors import UserError
from quant.base.json_files import JsonData
from quant.base.listener import reporter
from quant.calibration.evaluating import prepared
from quant.calibration.inputs import Inputs
from quant.calibration.placement import is_visited, placed
from quant.calibration.texts.sources import digest_of, tokenizer_if_any
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import (
    Continuation,
    Decode,
    Evaluation,
    Examples,
    WorstPredictions,
    continuations,
    output_errors,
)
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


@dataclass(frozen=True)
class Measured(JsonData):
    """Figures, fingerprint and examples of a quantized model; None where nothing was measured."""

    evaluation: Evaluation | None = None
    fingerprint: Fingerprint | None = None
    examples: Examples | None = None
    output_errors: dict[str, float] = field(default_factory=dict)  # relative error of each layer's output
    notes: list[str] = field(default_factory=list)  # what a denoiser loses


Texts = Mapping[str, torch.Tensor | Inputs]
"""Evaluation rows or inputs by the name of their source."""


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
    """Measures the quantized model. The store keeps the result, since weights move into the checkpoint afterwards.

    Raises:
        UserError: an earlier run was stopped while its weights moved, and it had measured on other texts.
    """
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
    job: Job, solved: SolvedModel, rows: torch.Tensor | Inputs, models: tuple[nn.Module, nn.Module], decode: Decode
) -> tuple[dict[str, float], Continuation | None]:
    """Returns the errors of the layers' outputs on the first text, and its beginning continued by both models."""
    device = job.session.device
    if not isinstance(rows, torch.Tensor):
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


def _worth_keeping(job: Job, model: nn.Module) -> list[torch.Tensor]:
    """Returns the codes of a small model that runs on the CPU, if there is memory to keep them dequantized.

    Measuring runs it dozens of times on few tokens, where dequantizing takes three quarters of the time.
    """
    modules = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    weights = sum(math.prod(module.weight_shape) for module in modules)
    usable, on_cpu = job.session.usable_memory(), all(module.codes.device.type == "cpu" for module in modules)
    has_room = usable is not None and 4 * torch.float32.itemsize * weights <= usable
    return [module.codes for module in modules] if on_cpu and has_room and weights <= _QUICK["cpu"] else []
