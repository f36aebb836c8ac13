"""`distill` trains a model, or a quantized checkpoint, towards its teacher.

For a checkpoint, as the command `quant distill` does:

    open teacher → read rows → open student → measure → train → measure → write

The teacher is opened first: where its likeliest tokens are cached in a file, it leaves memory before the student comes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, overload

import torch
from torch import Tensor, nn

from quant.base.atomic import claimed
from quant.base.errors import (
    UserError,
    check_installed,
    counted,
    known_names,
    loss_text,
    option,
    steps_in_words,
    versions,
)
from quant.base.listener import SILENT, Listener, StageProgress, reporter
from quant.base.torch_modes import in_own_modes
from quant.calibration.layer_result import unmeasured_result
from quant.calibration.outputs.logits import check_evaluable
from quant.calibration.session import Session, describe, device_of, find_device
from quant.calibration.texts import sources
from quant.calibration.texts.rows import check_ids
from quant.calibration.walk.expected_time import expected_time, time_of_training
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import Evaluation, fingerprint
from quant.export.checkpoint.files.directory import check_apart, check_destination, check_room
from quant.export.checkpoint.load import check_checkpoint, open_runnable
from quant.export.checkpoint.load import describe as describe_checkpoint
from quant.export.checkpoint.save import save
from quant.generate.quantized_attention import quantized_attention
from quant.models.files import find_checkpoint, packages_of
from quant.models.open_model import Source
from quant.recipes.plan import Plan
from quant.report.report import Distillation, Report, kv_cache_of
from quant.run.job import announce_device
from quant.training import train_loop
from quant.training.distillation_loss import (
    AnyTeacher,
    Batch,
    CachedTeacher,
    cache_teacher,
    distillation_loss,
    is_cached_teacher,
)
from quant.training.qat import pack, prepare_qat

_WORSE = 1.02  # times the KL before training; rounding by itself does not change it by as much
# A model is not written whose loss is that many times as large as before training, and not negligible in nats.
_RUINED, _NEGLIGIBLE = 10, 0.01
_TRIES = 4  # rates of training, each a quarter of the one before, until the loss of held-out rows does not rise


@dataclass(frozen=True)
class DistillOptions:
    """Data, loss and length of a training run, as `distill` takes them."""

    data: tuple[str, ...] = ()
    samples: int = 512
    seqlen: int = 512
    steps: int = 300
    batch_size: int = 8
    lr: float | None = None
    temperature: float = 1.0
    hidden: float = 0.0
    train: str = "weights"
    scales: str = "frozen"
    eval_texts: tuple[str | Path, ...] = ()
    eval_samples: int = 16
    cache_teacher: str | Path | None = None
    top: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in ("weights", "norms"):
            raise UserError(f"train is {self.train!r}; expected 'weights' or 'norms'")
        if self.train == "norms" and self.scales != "frozen":
            raise UserError(f"{option('scales', self.scales)}: norms are trained with frozen scales; leave it out")
        if self.top != 64 and self.cache_teacher is None:
            raise UserError(
                f"{option('top', self.top)}: only a file of the teacher's tokens keeps so many; give "
                f"{option('cache_teacher', 'FILE')} too, or leave it out"
            )
        if self.lr is not None and not 0 < self.lr <= 1:
            raise UserError(
                f"{option('lr', self.lr)}: AdamW moves each weight by about this much in a step; expected a number "
                "above 0 and at most 1, or leave it out"
            )


@overload
def distill(
    student: nn.Module, teacher: AnyTeacher, batch: Batch, *, temperature: float = ..., hidden: float = ...
) -> Tensor: ...


@overload
def distill(
    student: str | Path, teacher: str | Path, *, out: str | Path, data: str | Sequence[str] = ..., samples: int = ...,
    seqlen: int = ..., steps: int = ..., batch_size: int = ..., lr: float | None = ..., temperature: float = ...,
    hidden: float = ..., train: str = ..., scales: str = ..., eval_texts: Sequence[str | Path] = ...,
    eval_samples: int = ..., cache_teacher: str | Path | None = ..., top: int = ..., seed: int = ...,
    overwrite: bool = ..., device: str = ..., listener: Listener = ..., command: str = ...,
) -> Report: ...  # fmt: skip


def distill(
    student: nn.Module | str | Path, teacher: AnyTeacher, batch: Batch | None = None, *, out: str | Path | None = None,
    overwrite: bool = False, device: str = "auto", listener: Listener = SILENT, command: str = "quant.distill",
    **options: Any,
) -> Tensor | Report:  # fmt: skip
    """Gives the distillation loss of a batch, for a training loop of your own; or trains a quantized checkpoint.

        quant.prepare_qat(model, "nvfp4", rows, solver="gptq")
        for batch in batches:
            quant.distill(model, teacher, batch).backward()
            …

        report = quant.distill("small-nvfp4", "small", out="trained", steps=100)

    The loss is the forward KL of next tokens, times T², and a share of the distance of hidden states.

    A checkpoint is trained under exactly its own rounding, and one of the same layout and size is written. Training
    starts at the checkpoint's own loss. A teacher that the checkpoint was made from also shows which weights were
    rounded, and training gets further from there.

    Args:
        student: a causal language model, perhaps wrapped by DDP or compiled, in the mode that the caller chose; or the
            directory of a quantized checkpoint, or its name on the Hugging Face hub.
        teacher: a model with the same vocabulary, in 16 bit or quantized, or a file of `cache_teacher`; for a
            checkpoint, the name of either.
        batch: for a model: token ids, int64 `[rows, seqlen]`, or a model's inputs by name. Positions that
            `attention_mask` leaves out do not count, and where there are `labels`, only positions whose next label is
            not −100 do.
        temperature: divides the logits of both, and its square multiplies the KL; 1 by default.
        hidden: weight of the hidden states' distance, for transformers models of one width; 0 by default.

    The other arguments are for a checkpoint:

    Args:
        out: directory for the trained checkpoint; it appears when it is whole.
        data: training texts, as `--calib` of `quantize` takes them; none stands for "mix", half of it text that the
            teacher writes and half samples of this package. A cached teacher has its own rows.
        samples: rows of training text at most, 512 by default, used again as often as the steps need them.
        seqlen: tokens of a row, 512 by default.
        steps: optimizer steps, 300 by default.
        batch_size: rows of a step, 8 by default.
        lr: peak learning rate of AdamW; None is 1.5e-4 of the weights' root mean square, 1e-4 of it where only weights
            are rounded, and 1e-3 for norms.
        train: "weights", all that are quantized; or "norms", which stays near the start: the weights of norms alone,
            with all codes and scales as they are.
        scales: "frozen" or "learned" block scales; norms are trained with frozen ones.
        eval_texts: texts that both checkpoints are measured on, before and after training.
        eval_samples: rows of each of them, 16 by default.
        cache_teacher: file to which the teacher's likeliest tokens are written first. The student is trained on the
            file, so teacher and student are never in memory together.
        top: tokens that the file keeps at each position, 64 by default.
        seed: the seed of the text that is written and of the order of the rows.
        overwrite: whether the contents of `out` may be replaced.
        device: the device where both models run: "cpu", "cuda", "cuda:N", or "auto", a GPU if there is one. On a CPU
            the student is trained in float32, on a GPU in BF16 by autocast.
        listener: shows progress; `quant.Listener(print)` calls `print(stage, done, total)`.
        command: the command by which the report says how the checkpoint was made.

    Returns:
        The loss, a float32 scalar in nats a position, with gradients; for a checkpoint the report, which is in `out`
        too: losses, and figures on each evaluation text before and after.

    Raises:
        UserError: the vocabularies, or the widths of hidden states, differ; the student is not a causal language model,
            or its hidden states are rotated; a cached teacher has not read these rows, or they are padded on the left.
            For a checkpoint also: it is not quantized, the teacher has another tokenizer, the data is too short, `out`
            is in the way, or training raised the loss tenfold, or of held-out rows at four rates; nothing was written.
    """
    if isinstance(student, nn.Module):
        if out is not None or options.keys() - {"temperature", "hidden"}:
            raise UserError(
                "of a model distill gives the loss of a batch, with temperature= and hidden= alone; a checkpoint, by "
                "its directory, is trained and written to out="
            )
        return distillation_loss(student, teacher, batch, **options)
    names = [field.name for field in fields(DistillOptions)]
    if unknown := options.keys() - set(names):
        raise UserError(f"distill has no option {min(unknown)!r}; {known_names(min(unknown), names)}")
    if batch is not None or out is None or not isinstance(teacher, str | os.PathLike):
        raise UserError(
            f"{student}: a checkpoint is trained with a teacher by its name, on data=, and written to out=; a batch is "
            "for a model"
        )
    for name in ("data", "eval_texts"):
        value = options.get(name, ())
        options[name] = (value,) if isinstance(value, str | Path) else tuple(value)
    chosen = DistillOptions(**options)
    student, out = (Path(path).expanduser() for path in (student, out))
    return _distill_checkpoint(student, str(teacher), out, chosen, overwrite, device, listener, command)


@in_own_modes
def _distill_checkpoint(
    directory: Path, teacher: str, out: Path, options: DistillOptions, overwrite: bool, device: str, listener: Listener,
    command: str,
) -> Report:  # fmt: skip
    # Everything that can be refused without a model is checked first: loading and training take minutes to hours.
    check_apart(out, directory, teacher, *options.data, *options.eval_texts)
    check_destination(out, overwrite=overwrite)
    eval_texts = tuple(map(str, options.eval_texts))
    sources.check_sources(options.data, option("data"))
    sources.check_sources(eval_texts, option("eval"), measured=True)
    packages = [name for model in (str(directory), teacher) for name in packages_of(model)]
    check_installed([*packages, *sources.packages_of_sources((*options.data, *eval_texts))], "this training")
    if options.cache_teacher is not None:
        check_cache(Path(options.cache_teacher), teacher, out, options.hidden)
    with claimed(out):
        session = Session(find_device(device) or torch.device("cpu"), seed=options.seed)
        torch.manual_seed(session.seed)
        announce_device(listener, session)
        checkpoint = find_checkpoint(directory)
        check_checkpoint(checkpoint)
        plan, _ = describe_checkpoint(checkpoint)
        check_room(out, plan.nbytes)
        inputs = prepare_distill_inputs(teacher, plan, options, session, listener)
        if (count := len(inputs.rows)) < options.batch_size:
            more = (
                "" if is_cached_teacher(teacher) else f", raise {option('samples')}, or give a longer {option('data')}"
            )
            raise UserError(
                f"{option('batch_size', options.batch_size)}: there are {count} rows of {inputs.rows.shape[1]} tokens "
                f"to train on; lower it{more}"
            )
        with listener.step(f"loading {directory}"):
            source, student = open_runnable(str(directory))
            student.to(session.device)
        tokenizer = sources.tokenizer_if_any(source)
        sources.check_tokenizers(teacher, str(directory), inputs.tokenizer, tokenizer)
        texts = sources.read_texts(source, sources.Rows(eval_texts, options.eval_samples, options.seqlen))
        for text in texts.values():
            # Refused here, and not when the training is over.
            check_evaluable(student, text)
        with listener.stages() as progress:
            before = _measure(student, plan, texts, inputs.model, session)
            # Each measurement is of a packed model, once as it was opened and once as it will be written: training sees
            # rounded weights, and neither attention nor a KV cache in the plan's formats.
            plan, rate, trained = _train(student, plan, inputs, options, progress, listener)
            after = _measure(student, plan, texts, inputs.model, session)
        losses, size = trained.losses, -(-options.steps // 10)  # of a tenth of the steps, rounded up
        tenths = tuple(fmean(losses[i : i + size]) for i in range(0, len(losses), size))
        record = Distillation(
            start=str(directory), teacher=teacher, data=inputs.data, steps=options.steps, batch=options.batch_size,
            seqlen=inputs.rows.shape[1], rate=rate, scales=options.scales, losses=tenths,
            before=before, train=options.train,
        )  # fmt: skip
        source.model = student
        report = report_of(source, plan, record, after, checkpoint, session)
        if before is None and trained.after > _WORSE * trained.before:
            report.warnings.append(f"training {trained.outcome}; lower {option('lr')} (it was {rate:g})")
        report.command, report.seconds = command, {"train": sum(trained.seconds)}

        def finish(directory: Path, hashes: Mapping[str, str], messages: list[str]) -> None:
            # With the warnings of its writing; the report of the start may hold the same sentences, for the same plan.
            report.warnings += [message for message in messages if message not in report.warnings]
            report.complete(plan, directory, hashes)

        save(student, plan, out, tokenizer=tokenizer, overwrite=overwrite, finish=finish, source=directory)
    return report


@dataclass(frozen=True)
class DistillInputs:
    """A teacher and its training rows."""

    teacher: nn.Module | CachedTeacher  # the model needs no gradients
    rows: Tensor  # token ids, int64 `[rows, seqlen]`
    data: str  # the names of the training texts, for the report
    tokenizer: Any  # the teacher's; None where it has none or was cached before

    @property
    def model(self) -> nn.Module | None:
        """The teacher, where it is a model in memory."""
        return self.teacher if isinstance(self.teacher, nn.Module) else None


def prepare_distill_inputs(
    name: str, plan: Plan, options: DistillOptions, session: Session, listener: Listener
) -> DistillInputs:
    """Opens a teacher on the session's device, reads the training rows, and caches the teacher if `options` say so."""
    if is_cached_teacher(name):
        with listener.step(f"loading {name}"):
            cached = CachedTeacher.open(name)
        if options.data:
            raise UserError(f"{option('data')}: a cached teacher knows only its own rows; leave the option out")
        listener.message(
            f"training on the {counted(len(cached.rows), 'row')} of {cached.rows.shape[1]} tokens of {name}"
        )
        return DistillInputs(cached, cached.rows, "its cache", None)
    with listener.step(f"loading {name}"):
        source, model = open_runnable(name)
        # Frozen and in evaluation mode for good: dropout in a teacher would make another teacher of every step.
        model.requires_grad_(False).eval().to(session.device)
    _announce_time(source, model, plan, options, session, listener)
    # Data is read while the teacher is in memory: it writes the text of "mix" and "self".
    data, tokenizer = ", ".join(options.data) or "mix", sources.tokenizer_if_any(source)
    with listener.stages() as progress:
        rows = _training_rows(source, options, session, progress, listener)
        check_ids(rows, model)
        if options.cache_teacher is None:
            return DistillInputs(model, rows, data, tokenizer)
        cache_teacher(
            model, rows, options.cache_teacher, k=options.top, temperature=options.temperature,
            progress=reporter(progress, "cache"),
        )  # fmt: skip
    return DistillInputs(cached := CachedTeacher.open(options.cache_teacher), cached.rows, data, tokenizer)


def _announce_time(
    source: Source, model: nn.Module, plan: Plan, options: DistillOptions, session: Session, listener: Listener
) -> None:
    """Says before anything slow starts how long text and training will take."""
    samples = min(options.samples, options.steps * options.batch_size)
    share = sources.written_share(options.data, has_tokenizer=sources.tokenizer_if_any(source) is not None)
    rows = sources.Rows(options.data, samples, options.seqlen, session.seed, at_most=True)
    written = round(share * samples * options.seqlen) if share and sources.must_write(source, rows, session) else 0
    text = expected_time(model, plan, session, rows=samples, seqlen=options.seqlen, written=written).writing
    training = time_of_training(model, plan, session, options.steps, options.batch_size * options.seqlen)
    listener.message(
        f"{counted(options.steps, 'step')} of {options.batch_size} × {options.seqlen} tokens will take about "
        f"{steps_in_words({'write text': text, 'train': training})}; fewer {option('steps')} or a smaller "
        f"{option('seqlen')} take less"
    )


def check_cache(file: Path, teacher: str, out: Path, hidden: float) -> None:
    """Raises UserError where a teacher's file would replace something, or a cached teacher cannot teach this."""
    if is_cached_teacher(teacher):
        raise UserError(f"{option('cache_teacher')}: {teacher} is a cached teacher already; leave the option out")
    if file.exists():
        raise UserError(
            f"{option('cache_teacher', file)}: is there already; pass it as {option('teacher')}, or name another file"
        )
    if out.resolve() in (file.resolve(), *file.resolve().parents):
        raise UserError(
            f"{option('cache_teacher', file)}: lies in {option('out')}, whose files belong to the checkpoint; name "
            "another"
        )
    if hidden:
        raise UserError(
            f"{option('hidden')}: a cached teacher has no hidden states; leave out {option('cache_teacher')}, or "
            f"{option('hidden')}"
        )


def _training_rows(
    source: Source, options: DistillOptions, session: Session, progress: StageProgress, listener: Listener
) -> Tensor:
    samples = min(options.samples, options.steps * options.batch_size)
    source_rows = sources.Rows(options.data, samples, options.seqlen, session.seed, at_most=True)
    rows, _ = sources.read_calibration(source, source_rows, replace(session, progress=progress), listener=listener)
    if not isinstance(rows, Tensor):
        raise UserError(
            f"{option('data')}: distillation reads rows of token ids; give text, or token ids alone in safetensors"
        )
    return rows


def _measure(
    student: nn.Module, plan: Plan, texts: Mapping[str, Tensor], baseline: nn.Module | None, session: Session
) -> Evaluation | None:
    """Measures a model on each text, with attention and KV cache in the plan's formats; None without texts."""
    if not texts:
        return None
    with quantized_attention(student, **plan.run_time):
        return evaluate_texts(student, texts, baseline, device=session.device)


def _train(
    student: nn.Module, plan: Plan, inputs: DistillInputs, options: DistillOptions, progress: StageProgress,
    listener: Listener,
) -> tuple[Plan, float, train_loop.Trained]:  # fmt: skip
    """Trains the quantized weights of `student`, or its norms; it is quantized again afterwards.

    Returns the plan of the trained model, the peak learning rate and the run. UserError: training ruined the model.
    """
    dtypes = train_loop.StoredDtypes(student)  # before `prepare_qat` makes float32 of weights
    only_norms = options.train == "norms"
    # The original's weights that were rounded are a start for weights that are trained.
    plan = prepare_qat(student, plan, scales=options.scales, original=None if only_norms else inputs.model)
    if device_of(student).type == "cpu":
        student.float()  # processors multiply FP32 faster, and untrained parameters come back without loss
    (train_loop.train_only_norms if only_norms else train_loop.train_only_rounded)(student)
    rounds_inputs = any(layer.activation is not None for layer in plan.layers)
    # Rates that did well: for weights by benchmarks/training.py, for norms in docs/solvers.md.
    rate = options.lr or (1e-3 if only_norms else train_loop.usual_rate(student, rounds_inputs))
    rows, held_out = _held_out(inputs.rows, options.batch_size) if options.lr is None else (inputs.rows, None)
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    start = [] if held_out is None else [parameter.detach().to("cpu", copy=True) for parameter in learned]
    loss = partial(distillation_loss, student, inputs.teacher, temperature=options.temperature, hidden=options.hidden)
    for tries_left in reversed(range(_TRIES if held_out is not None else 1)):
        progress("train", 0, options.steps)
        trained = train_loop.train(
            student.train(), loss, rows,
            train_loop.Hyperparameters(options.steps, options.batch_size, rate, options.seed),
            progress=lambda done, total, _: progress("train", done, total), held_out=held_out,
        )  # fmt: skip
        ruined = max(_RUINED * trained.before, _NEGLIGIBLE)
        if trained.after <= (ruined if held_out is None else max(_WORSE * trained.before, train_loop.NOISE)):
            break
        if not tries_left:
            raise UserError(
                f"training {trained.outcome}, so nothing was written; lower {option('lr')} (it was {rate:g})"
            )
        listener.message(f"a rate of {rate:.2g} {trained.outcome}: training begins anew at {rate / 4:.2g}")
        rate /= 4
        for parameter, value in zip(learned, start, strict=True):
            parameter.detach().copy_(value)
    student.eval()
    plan = pack(student)
    dtypes.restore(student)
    return plan, rate, trained


def _held_out(rows: Tensor, batch: int) -> tuple[Tensor, Tensor | None]:
    """Divides rows into those to train on and a batch to judge the rate by, if that is an eighth of them at most."""
    if len(rows) < 8 * batch:
        return rows, None
    held = torch.arange(len(rows)) % (len(rows) // batch) == 0
    return rows[~held], rows[held][:batch]


def report_of(
    source: Source, plan: Plan, record: Distillation, evaluation: Evaluation | None, start: Path, session: Session
) -> Report:
    """Returns the report of a trained checkpoint; sizes before quantization and warnings come from its start's."""
    file = start / "report.json"
    before = Report.load(file) if file.is_file() else None
    # A checkpoint of `quant.save` has no report.
    bytes_in_16_bit = sum(2 * layer.numel for layer in plan.layers if layer.tied_to is None)
    report = Report(
        model=before.model if before else source.name,
        layers=[
            replace(unmeasured_result(layer), solver=f"{layer.solver}, distilled" if layer.weight else None)
            for layer in plan.layers
        ],
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
        # `quant check` runs the written checkpoint on the same tokens and compares with this fingerprint.
        assert isinstance(source.model, nn.Module)
        with quantized_attention(source.model, **plan.run_time):
            report = replace(report, fingerprint=fingerprint(source.model))
    return report


def worse_texts(record: Distillation, evaluation: Evaluation | None) -> list[str]:
    """Returns a warning for each text on which the trained model is further from its teacher than its start was."""
    if record.before is None or evaluation is None:
        return []
    return [
        f"training raised KL from {loss_text(before.kl)} to {loss_text(after.kl)} on {after.text}; more rows a step "
        f"({option('batch_size')} was {record.batch}), a lower {option('lr')} (it was {record.rate:g}), or "
        f"{option('data')} of that kind lose less there"
        for before, after in zip(record.before.texts, evaluation.texts, strict=True)
        if before.kl is not None and after.kl is not None and after.kl > _WORSE * before.kl
    ]
