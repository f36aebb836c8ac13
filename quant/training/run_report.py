"""The report of a training run: the layers and sizes of the trained checkpoint, its losses, and its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from torch import nn

from quant.calibration.placement import describe
from quant.calibration.session import Session
from quant.evaluation.fingerprint import fingerprint
from quant.evaluation.loss_text import loss_text
from quant.evaluation.evaluation import Evaluation
from quant.calibration.layer_result import LayerResult, unmeasured_result
from quant.base.extras import versions
from quant.models.open_model import Source
from quant.recipes.plan import LayerPlan, Plan
from quant.report.report import Distillation, Report, kv_cache_of
from quant.generate.quantized_attention import quantized_attention

_WORSE = 1.02  # times the KL before training; rounding by itself does not change it by as much


def report_of(
    source: Source, plan: Plan, record: Distillation, evaluation: Evaluation | None, start: Path, session: Session
) -> Report:
    """Returns the report of a trained checkpoint.

    Sizes before quantization and warnings come from its start's report.

    Args:
        source: the trained model.
        plan: the plan of the checkpoint.
        record: how it was trained.
        evaluation: the figures of the checkpoint, where there are evaluation texts.
        start: directory of the checkpoint that training began with.
        session: the session, with the device that it was trained on.
    """
    file = start / "report.json"
    before = Report.load(file) if file.is_file() else None
    # A checkpoint of `quant.save` has no report.
    bytes_in_16_bit = sum(2 * layer.numel for layer in plan.layers if layer.tied_to is None)
    report = Report(
        model=before.model if before else source.name,
        layers=[_trained_layer(layer) for layer in plan.layers],
        bytes_before=before.bytes_before if before else bytes_in_16_bit,
        bytes_after=plan.nbytes,
        effective_bits=plan.effective_bits,
        evaluation=evaluation,
        plan_digest=plan.digest(),
        command="",
        versions=versions(),
        seconds={},
        device=describe(session.device),
        warnings=[*(before.warnings if before else ()), *worse_texts(record, evaluation)],
        notes=list(before.notes) if before else [],
        kv_cache=kv_cache_of(source.config, plan),
        distillation=record,
    )
    if evaluation is not None:
        # `quant verify` runs the written checkpoint on the same tokens and compares with this fingerprint.
        assert isinstance(source.model, nn.Module)
        with quantized_attention(source.model, **plan.run_time):
            report = replace(report, fingerprint=fingerprint(source.model))
    return report


def losses_by_tenth(losses: list[float]) -> tuple[float, ...]:
    """Returns the mean loss of each tenth of the steps."""
    # Rounded up, so that there are at most ten parts; runs of fewer than ten steps have one for each step.
    size = -(-len(losses) // 10)
    return tuple(fmean(losses[i : i + size]) for i in range(0, len(losses), size))


def worse_texts(record: Distillation, evaluation: Evaluation | None) -> list[str]:
    """Returns a warning for each text on which the trained model is further from its teacher than its start was."""
    if record.before is None or evaluation is None:
        return []
    return [
        f"training raised KL from {loss_text(before.kl)} to {loss_text(after.kl)} on {after.text}; more rows a step "
        f"(--batch-size was {record.batch}), a lower --lr (it was {record.rate:g}), or "
        "--data of that kind lose less there"
        for before, after in zip(record.before.texts, evaluation.texts, strict=True)
        if before.kl is not None and after.kl is not None and after.kl > _WORSE * before.kl
    ]


def _trained_layer(layer: LayerPlan) -> LayerResult:
    return replace(unmeasured_result(layer), solver=f"{layer.solver}, distilled" if layer.weight else None)
