"""The command `quant evaluate` measures a model, quantized or not, on texts or other inputs, or by tasks of lm-eval."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant.base.errors import UserError
from quant.cli import command as cli
from quant.cli.completion import MODELS
from quant.cli.console import bar, fitting, listener, page, print_table
from quant.models.files import WatchedFiles, packages_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quant.adapters.tasks import TaskScore
    from quant.base.listener import Listener
    from quant.calibration.inputs import Inputs
    from quant.calibration.session import Session
    from quant.calibration.texts.sources import Rows
    from quant.evaluation.evaluation import Evaluation
    from quant.evaluation.tasks import TaskResult
    from quant.models.open_model import Source


@click.command("evaluate", cls=cli.Command)
@click.argument("model", shell_complete=MODELS)
@click.option("--text", "texts", multiple=True, type=cli.PATH, help="Text, or token ids in safetensors. Repeatable: "
              "figures stand side by side.")  # fmt: skip
@click.option("--data", multiple=True, metavar="SOURCE", help="In place of a text: images/, sounds/, hf:NAME or named "
              "inputs, as for `quantize --calib`. Repeatable.")  # fmt: skip
@click.option("--baseline", shell_complete=MODELS, help="Model to compare with; gives KL, top-1 agreement, cosine "
              "and relative error.")  # fmt: skip
@click.option("--samples", default=16, help="Rows of each text; images or sounds.")
@click.option("--seqlen", default=512, type=click.IntRange(min=2), help="Tokens per row.")
@click.option("--batch-size", default=1, help="Rows per forward pass.")
@click.option("--task", "own_tasks", multiple=True, type=cli.PATH, metavar="FILE.jsonl", help="In place of a text: "
              "questions with right answers, one a line (docs/measuring.md). Repeatable.")  # fmt: skip
@click.option("--tasks", metavar="NAMES", help="In place of a text: tasks of lm-eval, such as arc_easy,hellaswag.")
@click.option("--task-path", type=cli.PATH, help="Folder with YAML files of tasks of your own.")
@click.option("--shots", type=click.IntRange(min=0), help="Solved examples before each question of --tasks.")
@click.option("--limit", type=cli.COUNT, help="Documents of each of --tasks.  [default: all]")
@cli.DEVICE
@cli.DEVICES
@cli.ATTENTION
@cli.KV_CACHE
@cli.model_options
@cli.QUIET
@cli.JSON
def evaluate_command(
    model: str, texts: tuple[Path, ...], data: tuple[str, ...], baseline: str | None, own_tasks: tuple[Path, ...],
    tasks: str | None, device: str, quiet: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure the perplexity of MODEL, quantized or not, and its KL and top-1 agreement with a baseline.

    With --task its right answers are counted, those of classifiers too, and compared with the baseline's.

    Models of images, sounds and two texts take --data; encoders are compared by cosine and relative error. The
    baseline always attends in 16 bit.
    """
    from quant.adapters.tasks import evaluate_tasks
    from quant.base.errors import check_installed
    from quant.calibration.session import Session
    from quant.calibration.texts.sources import (
        Rows,
        check_sources,
        check_tokenizers,
        packages_of_sources,
        tokenizer_if_any,
    )
    from quant.evaluation.evaluate import evaluate_texts
    from quant.evaluation.tasks import evaluate_task, read_task
    from quant.export.checkpoint.load import open_runnable
    from quant.generate.quantized_attention import quantized_attention
    from quant.run.job import announce_device, announce_source

    of_tasks = {name: options[name] for name in ("task_path", "shots", "limit")}
    if bool(texts) + bool(data) + bool(tasks) + bool(own_tasks) != 1:
        raise UserError(
            "give one of --text, --data, --task and --tasks: a text, inputs of a model that takes more than tokens, "
            "questions of your own, or tasks of lm-eval"
        )
    for task in own_tasks:
        read_task(task)  # before models are loaded
    if tasks is None and any(value is not None for value in of_tasks.values()):
        raise UserError("--task-path, --shots and --limit are for --tasks; leave them out")
    # lm-eval measures one model at a time.
    if tasks is not None and baseline:
        raise UserError("--baseline is for --text, --data and --task; run --tasks on each model")
    show = partial(_show, quiet=quiet, as_json=as_json)
    sources = tuple(map(str, texts or data))
    check_sources(sources, "--data" if data else "--text", measured=True)
    models = [] if options["model_factory"] else [name for name in (model, baseline) if name]
    packages = [package for name in models for package in packages_of(name)] + packages_of_sources(sources)
    check_installed([*packages, *(["lm_eval"] if tasks else [])], "this evaluation")
    terminal, session = listener(quiet or as_json), Session.on(device)
    announce_device(terminal, session)
    loading = {name: options[name] for name in ("model_factory", "unsafe_load")}
    source, module = open_runnable(model, **loading)
    announce_source(terminal, source)
    formats = cli.attention_options(source.path, options["attention"], options["kv_cache"])
    # Attention is patched only on the module of the model; the baseline keeps its own.
    attention, batch_size = quantized_attention(module, **formats), options["batch_size"]
    if tasks is not None:
        with attention:
            scores = evaluate_tasks(
                module.to(session.device), tasks, source.load_tokenizer(), batch_size=batch_size, **of_tasks
            )
        show(scores, [dataclasses.asdict(score) for score in scores], _print_scores)
        return
    # Both models are in memory together, since each row is run through both.
    other = None
    if baseline:
        original, other = open_runnable(baseline, **loading)
        if texts or own_tasks:
            check_tokenizers(baseline, model, tokenizer_if_any(original), tokenizer_if_any(source))
    if own_tasks:
        with attention, bar("evaluate", quiet or as_json) as advance:
            measure = partial(evaluate_task, module, source.load_tokenizer(), device=session.device, progress=advance)
            results = [measure(task, other) for task in own_tasks]
        show(results, [result.to_dict() for result in results], _print_tasks)
        return
    rows = _read_texts(source, Rows(sources, options["samples"], options["seqlen"]), other, session, terminal)
    with attention, bar("evaluate", quiet or as_json) as advance:
        result = evaluate_texts(module, rows, other, batch_size=batch_size, device=session.device, progress=advance)
    show(result, result.to_dict(), _print_evaluation)


def _show(result: Any, record: Any, print_result: Callable[[Any], None], *, quiet: bool, as_json: bool) -> None:
    if as_json:
        cli.print_json(record)
    elif not quiet:
        print_result(result)


def _read_texts(
    source: Source, rows: Rows, baseline: nn.Module | None, session: Session, terminal: Listener
) -> dict[str, torch.Tensor | Inputs]:
    """Returns the rows of each text by its name, the same ones on all ranks; a `baseline` may have to write them."""
    from quant.calibration.texts.sources import digest_of, read_evaluation
    from quant.run.job import check_same

    with terminal.stages() as progress:
        session = dataclasses.replace(session, progress=progress)
        texts = read_evaluation(source, rows, session, writer=baseline, listener=terminal)
    # Ranks measure different rows of the same text, so all must have read the same one.
    hashes = {f"the text {name}": digest_of(text) for name, text in texts.items()}
    check_same(hashes, session, WatchedFiles(source.path).files)
    return texts


def _print_scores(scores: Sequence[TaskScore]) -> None:
    columns = {
        "!task": [score.task for score in scores],
        "metric": [x.metric if x.filter == "none" else f"{x.metric} ({x.filter})" for x in scores],
        "!>value": [f"{score.value:.4f}" for score in scores],
        "!>± standard error": ["–" if score.stderr is None else f"{score.stderr:.4f}" for score in scores],
        "!>documents": [f"{score.samples:,}" for score in scores],
    }
    print_table(columns, drops=("documents",))


def _print_tasks(results: Sequence[TaskResult]) -> None:
    labels: dict[str, Callable[[Any], str]] = {
        "accuracy": lambda r: f"{r.accuracy:.1%}", "baseline accuracy": lambda r: f"{r.baseline_accuracy:.1%}",
        "ratio": lambda r: f"{r.ratio:.4f}",
        "… on three random halves": lambda r: ", ".join(f"{ratio:.3f}" for ratio in r.halves),
        "difference, interval of 95%": lambda r: f"{r.interval[0]:+z.1%} to {r.interval[1]:+z.1%}",
        "told apart": lambda r: "yes" if r.differs else "cannot be told apart",
        "answered alike": lambda r: f"{r.agreement:.1%}", "lost, gained": lambda r: f"{r.lost}, {r.gained}",
        "questions": lambda r: f"{r.questions:,}", "seconds": lambda r: f"{r.seconds:.1f}",
    }  # fmt: skip
    if results[0].baseline_accuracy is None:
        labels = {name: labels[name] for name in ("accuracy", "questions", "seconds")}
    columns = {f"!>{Path(r.task).name}": [cell(r) for cell in labels.values()] for r in results}
    print_table({"!": list(labels), **columns})


def _print_evaluation(result: Evaluation) -> None:
    figures = {f"{each.text}": _figures(each) for each in result.texts}
    labels = list(dict.fromkeys(label for cells in figures.values() for label in cells))
    if len(figures) == 1:
        (cells,) = figures.values()
        page().print(fitting({"!": labels, "!>": list(cells.values())}, page(), show_header=False)[0])
        return
    columns = {f"!>{label}": [cells.get(label, "–") for cells in figures.values()] for label in labels}
    print_table(
        {"!text": list(figures), **columns}, drops=("seconds", result.unit, "baseline perplexity", "top-1 agreement")
    )


def _figures(result: Evaluation) -> dict[str, str]:
    from quant.base.errors import loss_text

    # Labels are in the order of the table; a figure that one text lacks leaves its cell empty.
    figures: dict[str, str] = {}
    if result.kl is not None:
        figures["KL(baseline‖model), nats"] = f"{loss_text(result.kl)}{result.interval_text}"
    if result.perplexity is not None:
        figures["perplexity"] = f"{result.perplexity:.3f}"
    if result.cosine is not None and result.error is not None:
        figures["1 − cosine of the embeddings"] = f"{loss_text(result.cosine)}{result.interval_text}"
        figures["relative error"] = f"{result.error:.2%}"
    for each in result.outputs:
        figures[f"… of {each.name}"] = f"{loss_text(each.cosine)}, {each.error:.2%}"
    if result.baseline_perplexity is not None:
        figures["baseline perplexity"] = f"{result.baseline_perplexity:.3f}"
    if result.top1 is not None:
        figures["top-1 agreement"] = f"{result.top1:.1%}"
    if result.accuracy is not None:
        figures["accuracy"] = f"{result.accuracy:.1%}"
    if result.baseline_accuracy is not None:
        figures["baseline accuracy"] = f"{result.baseline_accuracy:.1%}"
    figures[result.unit] = f"{result.tokens:,}"
    return figures | {"seconds": f"{result.seconds:.1f}"}
