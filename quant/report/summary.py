"""What the terminal shows after a run: the headline figures of its report, and what to do next with the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from quant.base.errors import UserError, counted, loss_text, megabytes, quoted
from quant.calibration.allocation.goal import AllocationRecord, BudgetKind, Verified
from quant.calibration.layer_result import LayerResult
from quant.calibration.texts.mixture import solver_needs_data
from quant.evaluation.evaluation import Evaluation
from quant.formats.format import get_format
from quant.kernels.attention.kv_pages import HEAD_DIMS
from quant.models.files import read_fields
from quant.recipes.plan import Plan
from quant.recipes.solver_names import parse_solver

if TYPE_CHECKING:
    from rich.console import Console

    from quant.report.report import Distillation, Report


def print_summary(report: Report, console: Console) -> None:
    """Prints a short table on the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(report.model), show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for label, value in summary(report):
        table.add_row(Text(label), Text(value))
    console.print(table)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def print_denoising(denoising: Mapping[str, Any], console: Console) -> None:
    """Prints what the denoisers of a pipeline lose, by timestep, and how far its images are from the original's."""
    from rich.table import Table

    for name, errors in denoising["components"].items():
        console.print(f"relative error of the noise that {name} predicts on held-out prompts")
        table = Table(box=None)
        table.add_column("timestep")
        table.add_column("error", justify="right")
        for time, error in errors.items():
            table.add_row(time, f"{error:.2%}")
        console.print(table)
    psnr = ", ".join(f"{each:.1f}" for each in denoising["psnr"])
    ssim = denoising["ssim"]
    more = "; pip install scikit-image adds SSIM" if ssim is None else f", SSIM {', '.join(f'{x:.3f}' for x in ssim)}"
    console.print(f"images of held-out prompts, same seeds: PSNR {psnr} dB{more}")


def summary(report: Report) -> list[tuple[str, str]]:
    """Returns the headline figures as pairs of label and text."""
    quantized = any(layer.format is not None for layer in report.layers)
    bits = f"{report.effective_bits:.3f} per quantized weight, scales counted" if quantized else "nothing is quantized"
    ratio, shrinking = report.ratio, "as large as before"
    if not 0.995 <= ratio < 1.005:
        shrinking = f"{ratio:.2f}× smaller" if ratio > 1 else f"{1 / ratio:.2f}× larger"
    rows = [
        ("size", f"{megabytes(report.bytes_before)} → {megabytes(report.bytes_after)} ({shrinking})"),
        ("effective bits", bits),
    ]
    # One line for each format, and for each width of layers that are not quantized.
    formats: dict[str, list[LayerResult]] = {}
    for layer in report.layers:
        formats.setdefault(layer.format or f"{layer.bits:g} bit", []).append(layer)
    for name, members in formats.items():
        snr = [layer.snr_db for layer in members if layer.snr_db is not None]
        # The range and not the mean: one bad layer can spoil a model whose mean looks fine.
        lowest, highest = (f"{end(snr, default=0):.1f}" for end in (min, max))
        error = f", SNR {lowest if lowest == highest else f'{lowest} to {highest}'} dB" if snr else ""
        size = megabytes(sum(layer.nbytes for layer in members))
        rows.append((name, f"{counted(len(members), 'layer')}, {size}{error}"))
    if report.evaluation is not None:
        rows += _figures(report.evaluation.texts)
    if (trained := report.distillation) is not None:
        rows.append(("distilled", _distillation(trained, report.evaluation)))
    if (record := report.allocation) is not None:
        # Nothing is quantized then, so there is no loss to print.
        if record.chosen.bits == 16:
            text = "everything stays in 16 bit: the budget has room for it"
        else:
            rounds = counted(len(record.rounds), "round")
            text = (
                f"{record.chosen.bits:.3f} bits over all weights to choose for, after {rounds}; {choice_loss(record)}"
            )
        rows.append(("allocation", text + _kept_budget(record)))
        if record.verified:
            rows.append(("verified", "\n".join(verified_text(record, each) for each in record.verified)))
    if (receipt := report.receipt) is not None:
        failed = sum(not layer.passed for layer in receipt.layers) + sum(not entry.passed for entry in receipt.audit)
        verdict = "passed" if receipt.passed else "FAILED"
        checks = counted(len(receipt.layers) + len(receipt.audit), "check")
        rows.append(("export receipt", f"{verdict}, {failed} of {checks} failed" if failed else f"{verdict}, {checks}"))
    if report.seconds:
        rows.append(("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.seconds.items())))
    if report.peak_rss_bytes is not None:
        rows.append(("peak memory", megabytes(report.peak_rss_bytes)))
    return rows


def _figures(texts: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """Returns a row for each quantity of one text, or a row for each of several texts."""
    if len(texts) > 1:
        short = [PurePath(str(each.text)).name for each in texts]
        names = short if len(set(short)) == len(texts) else [str(each.text) for each in texts]
        rows = [", ".join(f"{label} {value}" for label, value in each.figures.items()) for each in texts]
        return [(f"on {name}", row) for name, row in zip(names, rows, strict=True)]
    return [*(("evaluated on", str(each.text)) for each in texts if each.text is not None), *texts[0].figures.items()]


def choice_loss(record: AllocationRecord) -> str:
    """Returns the loss that the choice of formats was judged by, which figures on evaluation texts do not repeat."""
    quantity = "KL" if record.unit.startswith("nats") else "loss"
    solver = f" by {record.measured_with}, and the plan's solver loses less" if record.measured_with else ""
    return (
        f"{quantity} {loss_text(record.chosen.kl_measured)} on the text of the choice{solver and ', rounded'}{solver}"
    )


def _distillation(trained: Distillation, now: Evaluation | None) -> str:
    steps = f"{counted(trained.steps, 'step')} of {trained.batch} × {trained.seqlen} tokens"
    lines = [f"{steps}{', of norms alone' if trained.train == 'norms' else ''}, from {trained.start}"]
    # Both evaluations are on the same texts in the same order.
    for old, new in zip(trained.before.texts if trained.before else (), now.texts if now else (), strict=True):
        if old.kl is not None and new.kl is not None:
            ratio = f" ({new.kl / old.kl:.2f}×)" if old.kl else ""
            lines.append(f"KL {loss_text(old.kl)} → {loss_text(new.kl)}{ratio} on {new.text}")
    return "\n".join(lines)


def _kept_budget(record: AllocationRecord) -> str:
    chosen, budget = record.chosen, record.budget
    if budget.kind == BudgetKind.SECONDS and chosen.seconds is not None:
        return f"; {1e3 * chosen.seconds:.4g} of {1e3 * budget.value:g} ms a decode step ({chosen.timing})"
    if budget.kind == BudgetKind.BYTES and chosen.memory is not None:
        return f"; {megabytes(chosen.memory)} of {megabytes(budget.value)}, KV cache included"
    return ""


def verified_text(record: AllocationRecord, verified: Verified) -> str:
    """Returns the loss of the chosen allocation on the rows of a text that verify it, in the unit of its limit."""
    percent = record.budget.kind in (BudgetKind.PERPLEXITY, BudgetKind.TASK)

    def text(value: float) -> str:
        return f"{100 * value:+z.2f}%" if percent else loss_text(value)

    ends = verified.interval
    interval = "" if ends is None else f", 95%: {text(ends[0])} to {text(ends[1])}"
    is_task = record.budget.kind == BudgetKind.TASK
    quantity = "answers lost" if is_task else "perplexity" if percent else "loss"
    where = (
        f"{counted(verified.rows, 'question' if is_task else 'row')} of {verified.text} that took no part in the choice"
    )
    return f"{quantity} {text(verified.loss)} (limit {text(record.budget.limit)}{interval}) on {where}"


# KL in nats of the default solver on SmolLM2-135M, from docs/benchmarks.md: by the weight format where inputs are in
# 16 bit, else by the bits of both. Larger models lose less, so that a loss far above these is worth a second run for a
# model of any size.
_USUAL_KL_OF_WEIGHTS = {"nvfp4": 0.06}
_USUAL_KL = {(4, 4): 0.19, (4, 16): 0.11, (8, 8): 0.03, (8, 16): 0.03}
_LARGE = 2.0  # times the usual loss: texts of another kind lose up to that
_MORE_BITS = 0.5
WITHOUT_VOCABULARY = (
    "the model has no tokenizer, so the file has no vocabulary, and llama.cpp takes it for token ids alone; for text, "
    "put the model's tokenizer.json and tokenizer_config.json beside its weights and quantize it again"
)
"""A warning on a GGUF file, which no command then generates text with."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")


def cache_flag(report: Report, plan: Plan) -> str:
    """Returns what `quant generate` needs where our cache is not the planned one: of latent vectors, or by width."""
    is_latent = any(layer.name.endswith(".kv_a_proj_with_mqa") for layer in plan.layers)
    is_held = report.kv_cache is None or not report.kv_cache.width
    return "" if plan.kv_cache is None or (is_held and not is_latent) else " --kv-cache 16bit"


def next_steps(report: Report, plan: Plan, directory: Path) -> list[str]:
    """Returns at most six lines: how the loss compares with the usual one, and commands that use the checkpoint."""
    lines = [] if (verdict := _verdict(report, plan)) is None else [verdict]
    if directory.suffix == ".gguf":
        if WITHOUT_VOCABULARY in report.warnings:
            return lines
        path, name = quoted(directory), re.sub(r"[^a-z0-9_.-]+", "-", directory.stem.lower())
        lines.append(f'try it:   llama-cli -m {path} -p "The capital of France is"')
        from_path = quoted(f"FROM {directory.resolve()}")
        lines.append(f"ollama:   echo {from_path} > Modelfile && ollama create {name} -f Modelfile")
        return lines
    opened = f"report:   {quoted(directory / 'report.html')} in a browser"
    config = directory / "config.json"
    fields = read_fields(config) if config.is_file() else {}
    names = fields.get("architectures") or [""]
    flag = " --trust-remote-code" if "auto_map" in fields else ""  # a class with Python files of its own
    # The commands need text, and so a tokenizer: none for vision models, state dicts, or a model without its tokenizer.
    if not names[0].endswith("ForCausalLM") or not any((directory / name).is_file() for name in _TOKENIZERS):
        return [*lines, opened]
    try:
        _ = read_fields(words) if (words := directory / "tokenizer.json").is_file() else None
    except UserError as error:  # a file that was damaged in the source too
        return [*lines, f"warning: {error}", opened]
    if report.evaluation is None:
        lines.append("the loss was not measured: give --eval FILE to a run, or use the line `measure` below")
    path, original = quoted(directory), quoted(report.model)
    lines.append(f'try it:   quant generate {path} --prompt "The capital of France is"{cache_flag(report, plan)}{flag}')
    cache = "" if report.kv_cache is None or report.kv_cache.width <= HEAD_DIMS[-1] else cache_flag(report, plan)
    lines.append(f"measure:  quant evaluate {path} --text FILE --baseline {original}{cache}{flag}")
    # As the model card has it, which knows the model's class too.
    card = directory / "README.md"
    if card.is_file() and "$ vllm serve" in card.read_text(encoding="utf-8"):
        lines.append(f"serve:    vllm serve {path}{flag}")
    return [*lines, opened]


def _verdict(report: Report, plan: Plan) -> str | None:
    """Returns how the KL compares with the usual one of the formats; None where either is unknown."""
    worst = None if report.evaluation is None else report.evaluation.worst
    usual = [_usual_kl(layer.format, layer.activation) for layer in report.layers if layer.format is not None]
    if worst is None or worst.kl is None or worst.perplexity is None or not usual or None in usual:  # KL of classes
        return None
    limit = max(kl for kl in usual if kl is not None)
    measured = f"KL {loss_text(worst.kl)}"
    if worst.interval is not None:
        measured += f" (95%: {loss_text(worst.interval[0])} to {loss_text(worst.interval[1])})"
    if worst.kl <= _LARGE * limit:
        size = "no more than" if worst.kl <= limit else "within twice"
        return f"{measured} is {size} the usual loss of these formats (about {limit:g} on a model of 135M)"
    advice = ", or ".join(_advice(plan))
    return f"{measured} is large for these formats (about {limit:g} is usual on a model of 135M): try {advice}"


def _usual_kl(weight: str, activation: str | None) -> float | None:
    inputs = 16 if activation is None else get_format(activation).element.bits
    usual = _USUAL_KL.get((get_format(weight).element.bits, inputs))
    return _USUAL_KL_OF_WEIGHTS.get(weight, usual) if inputs == 16 else usual


def _advice(plan: Plan) -> list[str]:
    """Returns options of `quantize` that lower the loss, the cheapest first."""
    options = []
    if not all(map(solver_needs_data, plan.quantized)):
        options.append("--effort 2, which rounds on calibration text")
    elif any(parse_solver(layer.solver).rounding != "kfac" for layer in plan.quantized):
        options.append("--effort 3, which rounds for the loss of the whole model")
    weights = {layer.weight for layer in plan.quantized if layer.activation and layer.activation.element.bits == 4}
    if weights:
        options.append(f"inputs in 16 bit ({' and '.join(sorted(f'{weight}a16' for weight in weights))})")
    else:
        options.append(f"--bits {plan.effective_bits + _MORE_BITS:.1f}, which gives sensitive layers a wider format")
    return options
