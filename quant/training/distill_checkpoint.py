"""`distill_checkpoint` trains a quantized checkpoint towards its teacher, as `quant distill` does.

    open teacher → read rows → open student → measure → train → measure → write

The teacher is opened first: where its likeliest tokens are cached in a file, it leaves memory before the student comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quant.base.listener import SILENT, Listener, StageProgress
from quant.calibration.placement import device_of, find_device
from quant.calibration.session import Session
from quant.export.checkpoint.load import describe, is_checkpoint, no_checkpoint
from quant.checkpoints.runnable import open_runnable
from quant.export.checkpoint.save import save
from quant.checkpoints.write_report import write_report
from quant.calibration.texts.row_checks import check_evaluable
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import Evaluation
from quant.run.announcements import announce_device
from quant.calibration.texts.sources import Rows, read_texts, tokenizer_if_any
from quant.export.checkpoint.files.directory import check_apart, check_destination
from quant.base.atomic import claimed
from quant.models.files import find_checkpoint
from quant.models.open_model import Source
from quant.recipes.plan import Plan
from quant.report.report import Distillation, Report
from quant.generate.quantized_attention import quantized_attention
from quant.training.distill import distill
from quant.training.distill_inputs import DistillInputs, check_cache, check_tokenizers, prepare_distill_inputs
from quant.training.train_loop import (
    Hyperparameters,
    StoredDtypes,
    Trained,
    default_rate,
    train,
    train_only_norms,
    train_only_rounded,
)
from quant.training.distill_options import DistillOptions
from quant.training.qat import convert_qat, prepare_qat
from quant.training.run_report import losses_by_tenth, report_of

_DEFAULTS = DistillOptions()


def distill_checkpoint(
    directory: str | Path,
    teacher: str | Path,
    out: str | Path,
    options: DistillOptions = _DEFAULTS,
    *,
    overwrite: bool = False,
    device: str = "auto",
    listener: Listener = SILENT,
    command: str = "quant.distill_checkpoint",
) -> Report:
    """Trains a quantized checkpoint under exactly its own rounding, and writes one of the same layout and size.

        report = quant.distill_checkpoint("small-nvfp4", "small", "trained", quant.DistillOptions(steps=100))

    Training starts at the checkpoint's own loss. A teacher that the checkpoint was made from also shows which weights
    were rounded, and training gets further from there.

    Args:
        directory: the quantized checkpoint, or its name on the Hugging Face hub.
        teacher: the original, in 16 bit or quantized; or a file of `quant.cache_teacher`.
        out: directory for the trained checkpoint; it appears when it is whole.
        options: data, steps, learning rate and loss.
        overwrite: whether the contents of `out` may be replaced.
        device: the device where both models run: "cpu", "cuda", "cuda:N", or "auto", a GPU if there is one. On a CPU
            the student is trained in float32, on a GPU in BF16 by autocast.
        listener: shows progress; `quant.Listener(print)` calls `print(stage, done, total)`.
        command: the command by which the report says how the checkpoint was made.

    Returns:
        The report, which is in `out` too: losses, and figures on each evaluation text before and after.

    Raises:
        UserError: `directory` is not a quantized checkpoint, the teacher has another tokenizer or vocabulary, the data
            is too short, or `out` is in the way; nothing has been written.
    """
    directory, teacher, out = Path(directory), str(teacher), Path(out)
    # Everything that can be refused without a model is checked first: loading and training take minutes to hours.
    check_apart(out, directory, teacher, *options.data, *options.eval_texts)
    check_destination(out, overwrite=overwrite)
    if options.cache_teacher is not None:
        check_cache(Path(options.cache_teacher), teacher, out, options.hidden)
    with claimed(out):
        session = Session(find_device(device) or torch.device("cpu"), seed=options.seed)
        torch.manual_seed(session.seed)
        announce_device(listener, session)
        checkpoint = find_checkpoint(directory)
        if not is_checkpoint(checkpoint):
            raise no_checkpoint(checkpoint)
        plan, _ = describe(checkpoint)
        inputs = prepare_distill_inputs(teacher, options, session, listener)
        with listener.step(f"loading {directory}"):
            source, student = open_runnable(str(directory))
            student.to(session.device)
        tokenizer = tokenizer_if_any(source)
        check_tokenizers(teacher, directory, inputs.tokenizer, tokenizer)
        texts = _read_texts(source, student, options)
        with listener.stages() as progress:
            before = _measure(student, plan, texts, inputs.model, session)
            # Each measurement is of a packed model, once as it was opened and once as it will be written: training sees
            # rounded weights, and neither attention nor a KV cache in the plan's formats.
            plan, rate, trained = _train(student, plan, inputs, options, progress)
            after = _measure(student, plan, texts, inputs.model, session)
        record = Distillation(
            start=str(directory), teacher=teacher, data=inputs.data, steps=options.steps, batch=options.batch_size,
            seqlen=inputs.rows.shape[1], rate=rate, scales=options.scales, losses=losses_by_tenth(trained.losses),
            before=before, train=options.train,
        )  # fmt: skip
        source.model = student
        report = report_of(source, plan, record, after, checkpoint, session)
        report.command, report.seconds = command, {"train": sum(trained.seconds)}
        finish = partial(_write_report, report, plan)
        save(student, plan, out, tokenizer=tokenizer, overwrite=overwrite, finish=finish, source=directory)
    return report


def _read_texts(source: Source, student: nn.Module, options: DistillOptions) -> Mapping[str, torch.Tensor]:
    """Returns the evaluation texts as token ids, by name.

    Raises:
        UserError: a text that the model cannot be measured on; it is refused here, and not when the training is over.
    """
    texts = read_texts(source, Rows(tuple(map(str, options.eval_texts)), options.eval_samples, options.seqlen))
    for text in texts.values():
        check_evaluable(student, text)
    return texts


def _write_report(report: Report, plan: Plan, directory: Path, hashes: Mapping[str, str], messages: list[str]) -> None:
    """Writes the report into a checkpoint that is about to appear, with the warnings of its writing."""
    # The report of the start may hold the same sentences, for the same plan.
    report.warnings += [message for message in messages if message not in report.warnings]
    write_report(report, plan, directory, hashes)


def _measure(
    student: nn.Module,
    plan: Plan,
    texts: Mapping[str, torch.Tensor],
    baseline: nn.Module | None,
    session: Session,
) -> Evaluation | None:
    """Measures a model on each text, with attention and KV cache in the plan's formats; None without texts."""
    if not texts:
        return None
    with quantized_attention(student, **plan.run_time):
        return evaluate_texts(student, texts, baseline, device=session.device)


def _train(
    student: nn.Module, plan: Plan, inputs: DistillInputs, options: DistillOptions, progress: StageProgress
) -> tuple[Plan, float, Trained]:
    """Trains the quantized weights of `student`, or its norms; it is quantized again afterwards.

    Returns:
        The plan of the trained model, the peak learning rate, and the losses and seconds of the steps.
    """
    # Noted before `prepare_qat` makes float32 of weights: the written checkpoint has the dtypes of the one it started
    # from.
    dtypes = StoredDtypes(student)
    only_norms = options.train == "norms"
    # The original's weights that were rounded are a start for weights that are trained.
    plan = prepare_qat(student, plan, scales=options.scales, original=None if only_norms else inputs.model)
    if device_of(student).type == "cpu":
        student.float()  # processors multiply FP32 faster, and untrained parameters come back without loss
    (train_only_norms if only_norms else train_only_rounded)(student)
    rate = default_rate(plan, options.train) if options.lr is None else options.lr
    trained = train(
        student.train(),
        partial(distill, student, inputs.teacher, temperature=options.temperature, hidden=options.hidden),
        inputs.rows,
        Hyperparameters(options.steps, options.batch_size, rate, options.seed),
        progress=lambda done, total, _: progress("train", done, total),
    )
    student.eval()
    plan = convert_qat(student)
    dtypes.restore(student)
    return plan, rate, trained
