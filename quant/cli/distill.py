"""The command `quant distill` trains a quantized checkpoint on what its original says, and writes it anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.calibration.listener import reporter
from quant.cli.base import DEVICE, JSON, QUIET, SEED, TRUST, Command, command_line, print_json
from quant.cli.console import CONSOLE, listener, stages, status
from quant.errors import UserError
from quant.export.checkpoint.directory import check_apart, check_destination
from quant.extras import versions
from quant.formats.atomic import claimed
from quant.models.files import find_checkpoint

if TYPE_CHECKING:
    import torch

    from quant.evaluation.record import Evaluation
    from quant.models.open import Source
    from quant.report.report import Distillation
    from quant.training.distill import AnyTeacher
    from quant.training.loop import Trained

_SHARED = 0.99  # of the smaller vocabulary; what a fine-tuned model adds is a token or two
_WORSE = 1.02  # times the loss before, which rounding alone does not make


@click.command("distill", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--teacher", required=True, help="The original, in 16 bit or quantized; or a file of cache_teacher.")
@click.option("--cache-teacher", "cache", type=click.Path(path_type=Path),
              help="Write what the teacher says to this file first, and train on the file: the teacher and the student "
              "are never in memory together. Later runs take the file as their --teacher.")  # fmt: skip
@click.option("--top", default=64, show_default=True, type=click.IntRange(1),
              help="Likeliest tokens that --cache-teacher keeps at each position.")  # fmt: skip
@click.option("--data", multiple=True, help="Training text, as --calib of `quantize` takes it; repeatable.  "
              "[default: mix, or the rows of a cached teacher]")  # fmt: skip
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(1), help="Rows a step.")
@click.option("--seqlen", default=512, show_default=True, help="Tokens per row.")
@click.option("--samples", default=512, show_default=True, type=click.IntRange(1),
              help="Rows of training text at most; used again as often as the steps need them.")  # fmt: skip
@click.option("--lr", "rate", type=click.FloatRange(0, min_open=True), help="Peak learning rate.  [default: 1e-4, or "
              "6e-5 where weights alone are rounded]")  # fmt: skip
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True),
              help="Divides the logits of teacher and student.")  # fmt: skip
@click.option("--hidden", default=0.0, show_default=True, type=click.FloatRange(0),
              help="Weight of the distance of hidden states.")  # fmt: skip
@click.option("--scales", type=click.Choice(["frozen", "learned"]), default="frozen", show_default=True,
              help="What becomes of the block scales.")  # fmt: skip
@click.option("--eval", "eval_texts", multiple=True, type=click.Path(path_type=Path),
              help="Evaluation text, before and after. Repeatable.")  # fmt: skip
@click.option("--eval-samples", default=16, show_default=True, help="Rows of each evaluation text.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for the trained checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@SEED
@DEVICE
@TRUST
@QUIET
@JSON
def distill_command(directory: Path, teacher: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Train the quantized checkpoint DIRECTORY on what its teacher says, under exactly its own rounding.

    Training starts at the checkpoint's own loss. A teacher that the checkpoint was made from tells what its weights
    were before they were rounded, and training gets further from there. The new checkpoint has the same layout, formats
    and size, and a report with the figures of both.
    """
    out = options["out"]
    check_apart(out, directory, teacher, *options["data"], *options["eval_texts"])
    check_destination(out, overwrite=options["overwrite"])
    if options["cache"] is not None:
        _check_cache(teacher, **options)
    command = command_line(click.get_current_context())
    with claimed(out):
        report = _distill(directory, teacher, command, quiet or as_json, **options)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        from quant.report.summary import print_summary

        print_summary(report, CONSOLE)
        CONSOLE.print(f"written to {out}")


def _distill(directory: Path, teacher: str, command: str, quiet: bool, **options: Any) -> Any:
    from functools import partial

    import torch

    from quant.calibration.placement import find_device
    from quant.checkpoints.companion_files import add_companions
    from quant.checkpoints.load import describe, is_checkpoint, no_checkpoint
    from quant.checkpoints.runnable import open_runnable
    from quant.checkpoints.save import save
    from quant.evaluation.checks import check_evaluable
    from quant.evaluation.evaluate import evaluate_texts
    from quant.execution.announcements import announce_device
    from quant.execution.sources import Rows, read_texts, tokenizer_if_any
    from quant.report.report import Distillation
    from quant.runtime.attention import quantized_attention
    from quant.training.distill import distill
    from quant.training.loop import default_rate, train, train_rounded_alone
    from quant.training.qat import convert_qat, prepare_qat
    from quant.training.teacher_cache import CachedTeacher, cache_teacher

    torch.manual_seed(options["seed"])
    there = find_device(options["device"]) or torch.device("cpu")
    announce_device(listener(quiet), there)
    if not is_checkpoint(path := find_checkpoint(directory)):
        raise no_checkpoint(path)
    plan, _ = describe(path)
    with status(f"loading {teacher}", quiet):
        taught, origin = _open_teacher(teacher, there)
    named, tokenizers = origin is not None, [None if origin is None else tokenizer_if_any(origin)]
    with stages(quiet) as progress:
        rows = _rows(taught, origin, there, progress, quiet, **options)
        if options["cache"] is not None:
            assert isinstance(taught, torch.nn.Module)
            cache_teacher(
                taught, rows, options["cache"], k=options["top"], temperature=options["temperature"],
                progress=reporter(progress, "cache"),
            )  # fmt: skip
            taught, origin = CachedTeacher.open(options["cache"]), None
    with status(f"loading {directory}", quiet):
        source, student = open_runnable(str(directory))
        student.to(there)
    tokenizers.append(tokenizer_if_any(source))
    _check_tokenizers(teacher, directory, *tokenizers)
    texts = read_texts(source, Rows(tuple(map(str, options["eval_texts"])), options["eval_samples"], options["seqlen"]))
    for evaluated in texts.values():
        check_evaluable(student, evaluated)
    baseline = taught if isinstance(taught, torch.nn.Module) else None

    def measured(plan: Any) -> Any:
        with quantized_attention(student, **plan.run_time):
            return evaluate_texts(student, texts, baseline, device=there) if texts else None

    with stages(quiet) as progress:
        before = measured(plan)
        dtypes = {name: tensor.dtype for name, tensor in _tensors(student)}
        narrow = next((p.dtype for p in student.parameters()), torch.float32)
        plan = prepare_qat(student, plan, scales=options["scales"], original=baseline)
        if there.type == "cpu":
            student.float()  # processors multiply FP32 faster, and what is not trained comes back without loss
        train_rounded_alone(student)
        rate = options["rate"] or default_rate(plan)
        loss = partial(distill, student, taught, temperature=options["temperature"], hidden=options["hidden"])
        trained = train(
            student.train(), loss, rows, steps=options["steps"], batch=options["batch_size"], rate=rate,
            seed=options["seed"], progress=lambda done, total, _: progress("train", done, total),
        )  # fmt: skip
        student.eval()
        plan = convert_qat(student)
        _narrow(student, narrow, dtypes)
        after = measured(plan)
    record = Distillation(
        start=str(directory), teacher=teacher, data=", ".join(options["data"]) or ("mix" if named else "its cache"),
        steps=options["steps"], batch=options["batch_size"], seqlen=rows.shape[1], rate=rate,
        scales=options["scales"], losses=_tenths(trained), before=before,
    )  # fmt: skip
    report = _report(path, source, plan, record, after, command, sum(trained.seconds), there)
    report.warnings += _losses_of_training(record, after)
    source.model = student

    def finish(made: Path, hashes: dict[str, str], messages: list[str]) -> None:
        report.warnings += messages
        add_companions(source, report, plan, made, hashes)

    save(
        student, plan, options["out"], tokenizer=tokenizer_if_any(source), overwrite=options["overwrite"], finish=finish
    )
    return report


def _open_teacher(name: str, there: torch.device) -> tuple[AnyTeacher, Source | None]:
    """The teacher, and where it came from; a cached one came from no model."""
    from quant.checkpoints.runnable import open_runnable
    from quant.training.teacher_cache import CachedTeacher, is_cached_teacher

    if is_cached_teacher(name):
        return CachedTeacher.open(name), None
    origin, model = open_runnable(name)
    return model.requires_grad_(False).eval().to(there), origin


def _check_tokenizers(teacher: str, directory: Path, theirs: Any, ours: Any) -> None:
    """Raises UserError where the same token ids mean other words to the student than to its teacher."""
    if not hasattr(theirs, "get_vocab") or not hasattr(ours, "get_vocab"):
        return
    smaller, larger = sorted((theirs.get_vocab(), ours.get_vocab()), key=len)
    if sum(larger.get(token) == place for token, place in smaller.items()) < _SHARED * len(smaller):
        raise UserError(
            f"{teacher}: its tokenizer is another than that of {directory}, so token ids mean other words to it; "
            "take a teacher of the same family"
        )


def _check_cache(teacher: str, *, cache: Path, out: Path, hidden: float, **options: Any) -> None:
    """Raises UserError where a file of the teacher would replace something, or could not do."""
    from quant.training.teacher_cache import is_cached_teacher

    if is_cached_teacher(teacher):
        raise UserError(f"--cache-teacher: {teacher} is a cached teacher already; leave the option out")
    if cache.exists():
        raise UserError(f"--cache-teacher {cache}: is there already; pass it as --teacher, or name another file")
    if out.resolve() in (cache.resolve(), *cache.resolve().parents):
        raise UserError(f"--cache-teacher {cache}: lies in --out, whose files belong to the checkpoint; name another")
    if hidden:
        raise UserError("--hidden: a cached teacher has no hidden states; leave out --cache-teacher, or --hidden")


def _rows(
    teacher: AnyTeacher, source: Source | None, there: torch.device, progress: Any, quiet: bool, **options: Any
) -> torch.Tensor:
    """Rows of training text; a cached teacher has its own."""
    import torch

    from quant.execution.sources import Rows, read_calibration
    from quant.training.teacher_cache import CachedTeacher

    if isinstance(teacher, CachedTeacher):
        if options["data"]:
            raise UserError("--data: a cached teacher knows its own rows alone; leave the option out")
        return teacher.rows
    assert source is not None  # which a model came from
    read = options["steps"] * options["batch_size"]
    asked = Rows(
        options["data"], min(options["samples"], read), options["seqlen"], options["seed"], at_most=True
    )  # fmt: skip
    rows, _ = read_calibration(source, asked, device=there, progress=progress, listener=listener(quiet))
    if not isinstance(rows, torch.Tensor):
        raise UserError("--data: distillation reads rows of token ids; give text, or token ids in safetensors")
    if len(rows) < options["batch_size"]:
        raise UserError(
            f"--batch-size {options['batch_size']}: there are {len(rows)} rows of {rows.shape[1]} tokens to train on; "
            "lower it, raise --samples, or give a longer --data"
        )
    return rows


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _narrow(model: torch.nn.Module, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype]) -> None:
    """Has quantized layers compute in `dtype`, and every tensor be of the dtype that `dtypes` has under its name."""
    from quant.training.qat import Packed

    wide = {name: tensor.detach() for name, tensor in _tensors(model)}
    for module in model.modules():
        if isinstance(module, Packed):
            module.to(dtype)
    for name, tensor in _tensors(model):
        if tensor.dtype != dtypes.get(name, tensor.dtype):
            tensor.data = wide[name].to(dtypes[name])


def _tenths(trained: Trained) -> tuple[float, ...]:
    """The mean loss of each tenth of the steps."""
    from statistics import fmean

    size = -(-len(trained.losses) // 10)
    return tuple(fmean(trained.losses[i : i + size]) for i in range(0, len(trained.losses), size))


def _losses_of_training(trained: Distillation, now: Evaluation | None) -> list[str]:
    """A warning for each text on which the trained model is further from its teacher than its start was."""
    texts = zip(trained.before.texts, now.texts, strict=True) if trained.before is not None and now is not None else ()
    return [
        f"training raised KL from {old.kl:.4f} to {new.kl:.4f} on {new.text}; more rows a step (--batch-size was "
        f"{trained.batch}), a lower --lr (it was {trained.rate:g}), or --data of that kind lose less there"
        for old, new in texts
        if old.kl is not None and new.kl is not None and new.kl > _WORSE * old.kl
    ]


def _report(
    path: Path, source: Source, plan: Any, record: Any, after: Any, command: str, seconds: float, there: torch.device
) -> Any:
    """The report of the trained checkpoint, which has the sizes of its start."""
    from dataclasses import replace

    from quant.calibration.placement import describe
    from quant.evaluation.fingerprint import fingerprint
    from quant.execution.layer_result import LayerResult
    from quant.report.report import Report, kv_cache_of
    from quant.runtime.attention import quantized_attention

    file = path / "report.json"
    start = Report.load(file) if file.is_file() else None
    layers = [
        LayerResult(
            name=layer.name, format=layer.weight.name if layer.weight else None,
            activation=layer.activation.name if layer.activation else None, shape=layer.shape,
            bits=layer.bits_per_weight, nbytes=layer.nbytes, snr_db=None, relative_error=None,
            solver=f"{layer.solver}, distilled" if layer.weight else None, reason=layer.reason,
        )
        for layer in plan.layers
    ]  # fmt: skip
    plain = sum(2 * layer.numel for layer in plan.layers if layer.tied_to is None)
    report = Report(
        model=start.model if start else source.name, layers=layers, bytes_before=start.bytes_before if start else plain,
        bytes_after=plan.nbytes, effective_bits=plan.effective_bits, evaluation=after, plan_digest=plan.digest(),
        command=command, versions=versions(), seconds={"train": seconds}, device=describe(there),
        warnings=list(start.warnings) if start else [], kv_cache=kv_cache_of(source.config, plan), distillation=record,
    )  # fmt: skip
    if after is not None and source.model is not None:
        with quantized_attention(source.model, **plan.run_time):
            report = replace(report, fingerprint=fingerprint(source.model))
    return report
