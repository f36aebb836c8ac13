"""The summary of a report for the terminal: its headline figures as a table of label and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quant.base.errors import counted, megabytes
from quant.calibration.allocation.record import AllocationRecord, BudgetKind, Verified
from quant.calibration.layer_result import LayerResult
from quant.evaluation.evaluation import Evaluation, loss_text
from quant.report.report import Distillation, Report

if TYPE_CHECKING:
    from rich.console import Console


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


def summary(report: Report) -> list[tuple[str, str]]:
    """Returns the headline figures as pairs of label and text."""
    quantized = any(layer.format is not None for layer in report.layers)
    bits = f"{report.effective_bits:.3f} per quantized weight, scales counted" if quantized else "nothing is quantized"
    rows = [
        ("size", f"{megabytes(report.bytes_before)} → {megabytes(report.bytes_after)} ({_shrinking(report.ratio)})"),
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
        rows.append(
            (name, f"{counted(len(members), 'layer')}, {megabytes(sum(layer.nbytes for layer in members))}{error}")
        )
    if report.evaluation is not None:
        rows += _figures(report.evaluation.texts)
    if (trained := report.distillation) is not None:
        rows.append(("distilled", _distillation(trained, report.evaluation)))
    if (record := report.allocation) is not None:
        chosen, count = record.chosen, counted(len(record.rounds), "round")
        # Nothing is quantized then, so there is no loss to print.
        if chosen.bits == 16:
            text = "everything stays in 16 bit: the budget has room for it"
        else:
            text = (
                f"{chosen.bits:.3f} bits over all weights to choose for; loss {chosen.kl_predicted:.4g} predicted, "
                f"{chosen.kl_measured:.4g} measured after {count}"
            )
        rows.append(("allocation", text + _kept_budget(record)))
        rows += (
            [("verified", "\n".join(verified_text(record, each) for each in record.verified))]
            if record.verified
            else []
        )
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
    """Returns the figures, with a line for each text."""
    figures = [("evaluated on", [str(each.text) for each in texts])] if len(texts) > 1 else []
    if texts[0].perplexity is not None:
        figures.append(("perplexity", [_perplexity(each) for each in texts]))
    if texts[0].cosine is not None:
        lost = [f"{each.cosine:.5f}{interval_text(each, 5)}, 1 − cosine to those before" for each in texts]
        errors = ["" if each.error is None else f"; relative error {each.error:.2%}" for each in texts]
        figures.append(("embeddings", [text + error for text, error in zip(lost, errors, strict=True)]))
    if texts[0].kl is not None:
        figures.append(
            (
                "KL",
                [f"{loss_text(each.kl or 0)} nats{interval_text(each)}, {each.tokens:,} {each.unit}" for each in texts],
            )
        )
    if texts[0].top1 is not None:
        figures.append(("top-1 agreement", [f"{100 * (each.top1 or 0):.1f}%" for each in texts]))
    return [(label, "\n".join(values)) for label, values in figures]


def _distillation(trained: Distillation, now: Evaluation | None) -> str:
    """Returns how the model was trained, and KL before and after on each text."""
    steps = f"{trained.steps} steps of {trained.batch} × {trained.seqlen} tokens"
    lines = [f"{steps}{', of norms alone' if trained.train == 'norms' else ''}, from {trained.start}"]
    # Both evaluations are on the same texts in the same order.
    for old, new in zip(trained.before.texts if trained.before else (), now.texts if now else (), strict=True):
        if old.kl is not None and new.kl is not None:
            ratio = f" ({new.kl / old.kl:.2f}×)" if old.kl else ""
            lines.append(f"KL {loss_text(old.kl)} → {loss_text(new.kl)}{ratio} on {new.text}")
    return "\n".join(lines)


def _perplexity(each: Evaluation) -> str:
    base, now = each.baseline_perplexity, each.perplexity
    if now is None:
        return "infinite"
    return f"{now:.2f}" + ("" if base is None else f", {base:.2f} before ({100 * (now / base - 1):+.1f}%)")


def interval_text(evaluation: Evaluation, digits: int | None = None) -> str:
    """Returns the interval over rows (Student's t) in parentheses, after a blank; empty without one.

    Args:
        evaluation: the figures.
        digits: decimals of the ends; None for as many as `loss_text` takes.
    """
    if evaluation.interval is None:
        return ""
    low, high = (loss_text(end) if digits is None else f"{end:.{digits}f}" for end in evaluation.interval)
    return f" (95% over {counted(evaluation.rows or 0, 'row')}: {low}–{high})"


def _kept_budget(record: AllocationRecord) -> str:
    """Returns the part of a budget of memory or time that the choice uses."""
    chosen, budget = record.chosen, record.budget
    if budget.kind == BudgetKind.SECONDS and chosen.seconds is not None:
        return f"; {1e3 * chosen.seconds:.4g} of {1e3 * budget.value:g} ms a decode step ({chosen.timing})"
    if budget.kind == BudgetKind.BYTES and chosen.memory is not None:
        return f"; {megabytes(chosen.memory)} of {megabytes(budget.value)}, KV cache included"
    return ""


def verified_text(record: AllocationRecord, verified: Verified) -> str:
    """Returns the loss of the chosen allocation on the rows of a text that verify it, in the unit of its limit."""
    percent = record.budget.kind == BudgetKind.PERPLEXITY

    def text(value: float) -> str:
        return f"{100 * value:+.2f}%" if percent else loss_text(value)

    interval = (
        "" if verified.interval is None else f", 95%: {text(verified.interval[0])} to {text(verified.interval[1])}"
    )
    quantity = "perplexity" if percent else "loss"
    where = f"{counted(verified.rows, 'row')} of {verified.text} that took no part in the choice"
    return f"{quantity} {text(verified.loss)} (limit {text(record.budget.value)}{interval}) on {where}"


def _shrinking(ratio: float) -> str:
    if 0.995 <= ratio < 1.005:
        return "as large as before"
    return f"{ratio:.2f}× smaller" if ratio > 1 else f"{1 / ratio:.2f}× larger"
