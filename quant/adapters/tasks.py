"""Tasks of lm-eval (EleutherAI's evaluation harness) measure a model, quantized or not.

The command is `quant evaluate DIR --tasks arc_easy,hellaswag`. In Python:

    evaluate_tasks(model, ["arc_easy"], tokenizer)

    import quant.adapters.lm_eval_model    # registers the model "blockscale"
    lm_eval.simple_evaluate("blockscale", {"pretrained": DIR}, ["arc_easy"])
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.errors import UserError, option, require

# Of metrics without a formula for the standard error, such as F1. Zero would make lm-eval leave out every error.
_RESAMPLES = 1000


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task."""

    task: str  # this and `metric` as lm-eval calls them
    metric: str
    filter: str  # applied to the answers before scoring; "none" if there is none
    value: float
    stderr: float | None  # standard error of the value, if lm-eval knows it
    samples: int  # how many documents were asked


def evaluate_tasks(
    model: str | Path | nn.Module, tasks: str | Sequence[str], tokenizer: Any = None, *,
    task_path: str | Path | None = None, shots: int | None = None, limit: int | None = None, batch_size: int = 1,
    device: str | None = None,
) -> list[TaskScore]:  # fmt: skip
    """Runs tasks or groups of lm-eval on a causal language model of transformers, or on the path or name of one.

    Names of `tasks` may be joined by commas; `task_path` is a folder with YAML files of tasks of your own. `shots` are
    solved examples before each question, by default the task's own number, and `limit` documents of each task, by
    default all. UserError: lm-eval is not installed, or knows no such task.
    """
    lm_eval = require("lm_eval", "lm-eval")
    managers = require("lm_eval.tasks", "lm-eval")
    # Imported late: this module subclasses lm-eval's HFLM, and can be read only where lm-eval is installed.
    from quant.adapters.lm_eval_model import BlockscaleLM

    names = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = managers.TaskManager(include_path=None if task_path is None else str(task_path))
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise UserError(
            f"lm-eval has no task {unknown[0]!r}; `lm-eval ls tasks` lists them; {option('task_path')} takes a folder "
            "of yours"
        )
    # lm-eval prints while it resamples; standard output is for the caller's results, such as the JSON of a command.
    with redirect_stdout(sys.stderr):
        results = lm_eval.simple_evaluate(
            BlockscaleLM(model, tokenizer=tokenizer, batch_size=batch_size, device=device), tasks=names,
            num_fewshot=shots, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=_RESAMPLES,
        )  # fmt: skip
    return list(_scores(results))


def _scores(results: dict[str, Any]) -> Any:
    for task, values in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in values.items():
            # Keys are "metric,filter", such as "acc,none" or "exact_match,strict-match"; "alias" has no comma and is no
            # metric.
            metric, _, which = key.partition(",")
            if not which or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{which}")
            # lm-eval writes "N/A" where it has no standard error; NaN, for a single sample, does not equal itself.
            has_error = isinstance(error, int | float) and error == error
            yield TaskScore(task, metric, which, float(value), float(error) if has_error else None, samples)
