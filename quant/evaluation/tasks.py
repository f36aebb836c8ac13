"""A task is a file of questions with right answers; `evaluate_task` says how many a model still answers as before.

    {"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}    the likelier of some texts
    {"prompt": "2 + 2 =", "answer": "4"}                                                 the text that is written
    {"prompt": "A dull film.", "answer": "NEGATIVE"}                                     the class, of a classifier

"question" may stand for "prompt". The chosen text is the one whose tokens have the largest sum of log-probabilities
behind the prompt, as lm-eval's `acc`; written text is greedy, and ends before the first line break.

Two models answer the same questions, so that their accuracies differ by the questions that one of them alone answers:
of n questions, b are lost and c gained. Where the interval of 95 % around (c − b) / n holds zero, the models cannot be
told apart by these questions.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, near_file
from quant.base.json_files import JsonData
from quant.base.torch_modes import in_own_modes
from quant.calibration.allocation.measure_choices import Answers
from quant.calibration.attention_names import text_config
from quant.calibration.evaluating import paired_interval, prepared
from quant.calibration.outputs.logits import Logits, logits_of, run_probe
from quant.calibration.session import Device, Session, device_of
from quant.recipes.callers_model import unwrapped
from quant.recipes.layers import output_head

_SEEDS = (0, 1, 2)  # of the halves that show how much the ratio depends on the questions
_SPARE = 8  # tokens that a written answer may have beyond those of the right one

Prediction = int | str
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Question:
    """A prompt, and the number of the right choice, the right text, or the right class."""

    prompt: str
    answer: Prediction
    choices: tuple[str, ...] = ()


def read_task(path: str | Path) -> list[Question]:
    """Returns the questions of a JSONL file; UserError names the line that cannot be read."""
    if (name := str(path)).startswith("lm_eval:"):
        raise UserError(f"task {name}: no file of questions; `quant evaluate --tasks {name[8:]}` runs tasks of lm-eval")
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other line breaks, as U+2028
    except (OSError, UnicodeDecodeError) as error:
        near = near_file(path) if isinstance(error, FileNotFoundError) else ""
        if not (near or path.suffix):
            near = f"; `quant evaluate --tasks {path}` runs tasks of lm-eval"
        raise UserError(f"task {path}: cannot be read: {getattr(error, 'strerror', error)}{near}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise UserError(f"task {path}, line {number}: {error}") from None
    if len({str(question.answer) for question in questions}) < 2:
        same = f", and every answer is {questions[0].answer!r}" if questions else ""
        raise UserError(
            f"task {path}: {counted(len(questions), 'question')}{same}; a model that always says the same would pass: "
            "give questions with different answers"
        )
    return questions


def _question(fields: Any) -> Question:
    if not isinstance(fields, dict):
        raise ValueError('not an object, such as {"prompt": "…", "choices": ["…", "…"], "answer": 0}')
    prompt, choices = fields.get("prompt", fields.get("question")), fields.get("choices", [])
    answer = fields.get("answer")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError('"prompt" is missing, or no text')
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ValueError('"choices" is no list of texts')
    if len({*choices}) < len(choices):
        raise ValueError('"choices" has a text twice')
    if choices and (not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices)):
        raise ValueError(f'"answer" is {answer!r}, and no number from 0 to {len(choices) - 1}, of a choice')
    answer = answer.strip() if isinstance(answer, str) else answer
    if len(choices) == 1 or isinstance(answer, bool) or not isinstance(answer, int | str) or answer == "":
        raise ValueError('"answer" is missing, or there is one choice alone')
    return Question(prompt, answer, tuple(choices))


def predict(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question], report: Report = lambda done, total: None
) -> list[Prediction]:
    """Returns a model's answers: the number of a choice or a class, or a text."""
    ids = torch.tensor([_ids(tokenizer, questions[0].prompt)[:2]], device=device_of(model))
    shape, logits, answers = run_probe(model, ids).shape, Logits(model, output_head(model)), list[Prediction]()
    if len(shape) != 2 and shape[:2] != ids.shape:
        raise UserError(f"{type(model).__name__} has neither next tokens nor classes; a task cannot be put to it")
    limit = getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None) or math.inf
    longest = max((question.prompt for question in questions), key=lambda prompt: len(_ids(tokenizer, prompt)))
    if len(shape) != 2 and (tokens := len(_ids(tokenizer, longest))) >= limit:
        raise UserError(f"{longest[:40]!r} …: {tokens:,} tokens and an answer, and {limit:,} positions; shorten it")
    with torch.no_grad():
        for question in questions:
            if len(shape) == 2:
                answers.append(_class(model, tokenizer, question))
            elif question.choices:
                answers.append(int(choice_scores(logits, tokenizer, question).argmax()))
            else:
                answers.append(_written(logits, tokenizer, question))
            report(len(answers), len(questions))
    return answers


def choice_scores(logits: Logits, tokenizer: Any, question: Question) -> Tensor:
    """Returns ln p(choice | prompt) in nats, float64 `[choices]`."""
    # Trailing blanks go to the choice, whose first token usually begins with one.
    prompt = question.prompt.rstrip()
    blank = question.prompt[len(prompt) :]
    start = len(_ids(tokenizer, prompt))
    texts = [choice if blank or choice[0].isspace() else f" {choice}" for choice in question.choices]
    rows = [_ids(tokenizer, prompt + blank + text) for text in texts]
    width = max(map(len, rows))
    # Pads stand behind the text, where no position of a causal model sees them.
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device_of(logits.model))
    hidden = logits.hidden(ids).unflatten(0, (len(rows), width - 1))
    scores = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
    for index, row in enumerate(rows):
        # The position before a token predicts it.
        logp = logits.logp(hidden[index, start - 1 : len(row) - 1])
        scores[index] = logp.gather(1, ids[index, start : len(row), None].to(logp.device)).double().sum()
    if bool(scores.isnan().any()):
        raise ValueError(f"{question.prompt!r}: NaN in the model's logits")
    return scores


def _written(logits: Logits, tokenizer: Any, question: Question) -> str:
    """Returns the line that the model writes by its likeliest tokens, as far as it may still be the answer."""
    answer, ids = str(question.answer), _ids(tokenizer, question.prompt)
    start, device, text = len(ids), device_of(logits.model), ""
    for _ in range(len(_ids(tokenizer, answer)) + _SPARE):
        # The last position predicts nothing here, so any token may stand there.
        hidden = logits.hidden(torch.tensor([[*ids, 0]], device=device))[-1:]
        ids.append(int(logits.logits(hidden).argmax()))
        text = tokenizer.decode(ids[start:], skip_special_tokens=False)
        if ids[-1] == tokenizer.eos_token_id:
            return tokenizer.decode(ids[start:-1]).strip()
        if "\n" in text.lstrip() or not answer.startswith(text.strip().rstrip("\ufffd")):
            break
    return text.lstrip().partition("\n")[0].strip()


def _class(model: nn.Module, tokenizer: Any, question: Question) -> Prediction:
    """Returns the class of a text: its name where the answer is a name, else its number."""
    encoded = tokenizer(question.prompt, truncation=True, return_tensors="pt")
    takes = {name: tensor.to(device_of(model)) for name, tensor in encoded.items()}
    logits = model(**takes).logits if hasattr(model, "config") else logits_of(model, takes["input_ids"])
    number = int(logits.argmax())
    names = {str(name): int(index) for name, index in (getattr(model.config, "label2id", None) or {}).items()}
    is_number = isinstance(question.answer, int)
    if question.answer not in (range(logits.shape[-1]) if is_number else names):
        classes = f"0 to {logits.shape[-1] - 1}" if is_number else ", ".join(names)
        raise UserError(f"{question.prompt!r}: {question.answer!r} is none of the classes {classes}")
    return number if is_number else next(name for name, index in names.items() if index == number)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    # Some tokenizers close every text, and what follows a prompt would stand behind its end.
    return ids[:-1] if len(ids) > 1 and ids[-1] == getattr(tokenizer, "eos_token_id", None) else ids


@dataclass(frozen=True)
class TaskResult(JsonData):
    """The right answers of a model, and of the original where one was given."""

    task: str
    questions: int
    accuracy: float  # share of the questions that are answered rightly
    seconds: float
    baseline_accuracy: float | None = None
    ratio: float | None = None  # accuracy over the original's
    interval: tuple[float, ...] | None = None  # ends of 95 % around accuracy − original accuracy
    agreement: float | None = None  # share of the questions that both answer alike, rightly or not
    lost: int = 0  # questions that the original alone answers rightly
    gained: int = 0  # those that the model alone does
    halves: tuple[float, ...] = ()  # the ratio on three random halves of the questions

    @property
    def differs(self) -> bool:
        """Whether the questions tell the model from the original."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@in_own_modes
def evaluate_task(
    model: nn.Module, tokenizer: Any, task: str | Path, baseline: nn.Module | None = None, *,
    dtype: torch.dtype | None = torch.float32, device: Device = None, progress: Report = lambda done, total: None,
) -> TaskResult:  # fmt: skip
    """Puts the questions of `read_task` to a model, and to the original where given; arguments as in `evaluate`."""
    questions, started = read_task(task), time.perf_counter()
    models = [unwrapped(each, "evaluate_task") for each in (model, baseline) if each is not None]
    with prepared(models, dtype, Session.on(device)):
        found = [predict(each, tokenizer, questions, progress) for each in models]
    right, count, name = [is_right(each, questions) for each in found], len(questions), str(task)
    if baseline is None:
        return TaskResult(name, count, sum(right[0]) / count, time.perf_counter() - started)
    agreement = sum(a == b for a, b in zip(*found, strict=True)) / count
    return replace(compare_answers(name, *right), agreement=agreement, seconds=time.perf_counter() - started)


def is_right(answers: Sequence[Prediction], questions: Sequence[Question]) -> list[bool]:
    """Returns whether each answer is the right one; a number that was written counts as the number."""
    return [str(answer) == str(question.answer) for answer, question in zip(answers, questions, strict=True)]


def held_out_task(path: str | Path, tokenizer: Any) -> tuple[Answers, Answers]:
    """Returns the questions on which a limit is kept, and those that verify it: every other one, by their answers."""
    # In the order of a file whose answers alternate, each half would have one answer.
    questions = sorted(read_task(path), key=lambda question: str(question.answer))
    check, verify = (
        Answers(Path(path).name, lambda model, own=own: is_right(predict(model, tokenizer, own), own))  # type: ignore[misc]
        for own in (questions[::2], questions[1::2])
    )
    return check, verify


def compare_answers(task: str, right: Sequence[bool], before: Sequence[bool]) -> TaskResult:
    """Returns the figures of a model and its original from which of the same questions each answers rightly."""
    n = len(right)
    pairs = list(zip(before, right, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    halves = []
    for seed in _SEEDS:
        some = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")[: max(n // 2, 1)].tolist()
        halves.append(_ratio(sum(right[i] for i in some), sum(before[i] for i in some)))
    return TaskResult(
        task, n, sum(right) / n, 0.0, sum(before) / n, _ratio(sum(right), sum(before)),
        paired_interval(lost, gained, n), None, lost, gained, tuple(halves),
    )  # fmt: skip


def _ratio(right: int, before: int) -> float:
    return right / before if before else math.inf if right else 1.0
