"""Questions with right answers, of a file, put to a model and to its original."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from click.testing import CliRunner, Result
from scipy.stats import norm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from quant.base.errors import UserError
from quant.calibration.outputs.logits import Logits
from quant.cli.main import main
from quant.evaluation.tasks import (
    Question,
    choice_scores,
    compare_answers,
    evaluate_task,
    held_out_task,
    predict,
    read_task,
)
from quant.recipes.layers import output_head

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word is a token, with the blank before it."""
    words = {**{f"▁{word}": i for i, word in enumerate(WORDS)}, "▁?": 60, "\n": 61, "</s>": 62}
    plain = Tokenizer(models.WordLevel(words, unk_token="▁?"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    plain.decoder = decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="▁?")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_models.llama(gain=3.0).eval()


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: object) -> Path:
        path = tmp_path / "task.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def prompts(count: int) -> list[str]:
    """Prompts of four words each."""
    return [" ".join(WORDS[(7 * i + 3 * k) % 60] for k in range(4)) for i in range(count)]


def test_a_choice_has_the_likelihood_of_its_tokens(model: nn.Module, tokenizer: Any) -> None:
    choices = ("w3", "w4 w5 w6", "w7 w8")
    question = Question("w1 w2 w9", 0, choices)
    scores = choice_scores(Logits(model, output_head(model)), tokenizer, question)
    for choice, score in zip(choices, scores.tolist(), strict=True):
        # Plain transformers, one choice by itself.
        ids = tokenizer(f"w1 w2 w9 {choice}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logp = model(ids).logits.double().log_softmax(-1)[0]
        expected = sum(float(logp[i - 1, ids[0, i]]) for i in range(3, ids.shape[1]))
        assert score == pytest.approx(expected, rel=1e-5)
    assert predict(model, tokenizer, [question]) == [int(scores.argmax())]


class Counting(nn.Module):
    """Says w1 after w0, w2 after w1 and so on, a line break after w5, and the end after w9."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        following = torch.where(ids == 5, 61, torch.where(ids == 9, 62, ids + 1)).clamp(max=63)
        return nn.functional.one_hot(following, 64).float()


@pytest.mark.parametrize(
    ("prompt", "answer", "says"),
    [
        ("w2", "w3 w4 w5", "w3 w4 w5"),
        ("w2", "w3 w4", "w3 w4 w5"),  # goes on
        ("w2", "w3 w7", "w3 w4"),  # no longer the answer: not written to its end
        ("w7", "w8 w9", "w8 w9"),
        ("w20", "w21", "w21 w22"),
    ],
)
def test_a_text_ends_with_its_line(tokenizer: Any, prompt: str, answer: str, says: str) -> None:
    assert predict(Counting(), tokenizer, [Question(prompt, answer)]) == [says]


def test_a_tokenizer_that_closes_texts_asks_the_same(tokenizer: Any, model: nn.Module) -> None:
    closing = copy.deepcopy(tokenizer)
    closing._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 62)])
    assert closing("w2")["input_ids"] == [2, 62]
    question = Question("w1 w2 w9", 0, ("w4 w5", "w30", "w7 w8 w9"))
    scores = [choice_scores(Logits(model, output_head(model)), each, question) for each in (tokenizer, closing)]
    assert torch.equal(*scores)
    assert predict(Counting(), closing, [Question("w7", "w8 w9")]) == ["w8 w9"]


def test_both_halves_of_a_task_have_the_same_answers(tokenizer: Any, file: Callable[..., Path]) -> None:
    """Of a file whose answers alternate; a model that always says the first choice is right in half of each."""
    rows = [{"prompt": "w0", "choices": ["w1", "w2"], "answer": i % 2} for i in range(8)]
    assert [sum(half.right(Counting())) for half in held_out_task(file(*rows), tokenizer)] == [2, 2]


def test_autocast_of_a_caller_changes_no_answer(model: nn.Module, tokenizer: Any, file: Callable[..., Path]) -> None:
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        evaluate_task(model, tokenizer, file(*({"prompt": p, "answer": f"w{i}"} for i, p in enumerate(prompts(2)))))
    handle.remove()
    assert set(seen) == {torch.float32}


def test_the_interval_is_agresti_and_mins() -> None:
    """By hand from the paper: n = 100, 9 lost and 3 gained."""
    right = [True] * 60 + [False] * 9 + [True] * 3 + [False] * 28
    before = [True] * 69 + [False] * 31
    result = compare_answers("t", right, before)
    difference, se = (3.5 - 9.5) / 102, ((13.0 - 36.0 / 102) ** 0.5) / 102
    z = norm.ppf(0.975)
    assert result.interval == pytest.approx((difference - z * se, difference + z * se))
    assert (result.lost, result.gained, result.accuracy, result.baseline_accuracy) == (9, 3, 0.63, 0.69)
    assert result.ratio == pytest.approx(63 / 69) and not result.differs and len(result.halves) == 3
    assert compare_answers("t", [False] * 20 + [True] * 80, [True] * 100).differs
    same = compare_answers("t", before, before)
    assert same.interval == pytest.approx((-z / 102, z / 102)) and same.halves == (1.0, 1.0, 1.0)


def test_a_model_and_its_original(model: nn.Module, tokenizer: Any, file: Callable[..., Path]) -> None:
    rows = [{"question": p, "choices": ["w1", "w2", "w3"], "answer": i % 3} for i, p in enumerate(prompts(24))]
    other = tiny_models.llama(gain=3.0, seed=1).eval()
    result = evaluate_task(other, tokenizer, file(*rows), model)
    answers = [predict(each, tokenizer, read_task(file(*rows))) for each in (other, model)]
    assert result.accuracy == sum(a == i % 3 for i, a in enumerate(answers[0])) / 24
    assert result.agreement == sum(a == b for a, b in zip(*answers, strict=True)) / 24 < 1
    assert result.lost - result.gained == round(24 * ((result.baseline_accuracy or 0) - result.accuracy))
    alone = evaluate_task(model, tokenizer, file(*rows))
    assert alone.accuracy == result.baseline_accuracy and alone.interval is None


def test_a_prompt_beyond_the_positions_is_refused(model: nn.Module, tokenizer: Any) -> None:
    positions = model.config.max_position_embeddings
    asked = [Question("w1", 0, ("w2", "w3")), Question(" ".join(["w4"] * positions), 1, ("w2", "w3"))]
    with pytest.raises(UserError, match=rf"^'w4 w4 .* …: {positions} tokens and an answer, and {positions} "):
        predict(model, tokenizer, asked)


def test_classifiers_have_accuracy(tokenizer: Any, file: Callable[..., Path]) -> None:
    classifier = tiny_models.bert_classifier().eval()
    names = classifier.config.id2label
    found = []
    for prompt in prompts(8):
        encoded = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            found.append(int(classifier(**encoded).logits.argmax()))
    # Every other one is named wrongly.
    answers = [(c + i) % len(names) for i, c in enumerate(found)]
    rows = [{"prompt": p, "answer": names[a]} for p, a in zip(prompts(8), answers, strict=True)]
    right = sum(a == b for a, b in zip(found, answers, strict=True))
    result = evaluate_task(classifier, tokenizer, file(*rows), classifier)
    assert (result.accuracy, result.agreement) == (right / 8, 1.0) and 0 < right < 8
    numbers = [{"prompt": p, "answer": a} for p, a in zip(prompts(8), answers, strict=True)]
    assert evaluate_task(classifier, tokenizer, file(*numbers)).accuracy == right / 8
    with pytest.raises(UserError, match="'joy' is none of the classes LABEL_0"):
        evaluate_task(classifier, tokenizer, file({"prompt": "w1", "answer": "joy"}, rows[0]))
    with pytest.raises(UserError, match="5 is none of the classes 0 to 1"):
        evaluate_task(classifier, tokenizer, file({"prompt": "w1", "answer": 5}, numbers[0]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: not an object"),
        ("[" * 100000, "line 2: maximum recursion depth exceeded"),
        ({"choices": ["a", "b"], "answer": 0}, 'line 2: "prompt" is missing'),
        ({"prompt": "q", "choices": ["a", "b"], "answer": 2}, 'line 2: "answer" is 2, and no number from 0 to 1'),
        ({"prompt": "q", "choices": ["a", "b"], "answer": "a"}, "line 2: \"answer\" is 'a', and no number"),
        ({"prompt": "q", "choices": ["a"], "answer": 0}, 'line 2: "answer" is missing, or there is one choice'),
        ({"prompt": "q", "choices": "ab", "answer": 0}, 'line 2: "choices" is no list of texts'),
        ({"prompt": "q"}, 'line 2: "answer" is missing'),
        ({"prompt": "q", "choices": ["a", "a"], "answer": 1}, 'line 2: "choices" has a text twice'),
        ({"prompt": "q", "answer": " "}, 'line 2: "answer" is missing'),
        ({"prompt": " ", "choices": ["a", "b"], "answer": 0}, 'line 2: "prompt" is missing'),
        ({"prompt": "q", "answer": "x"}, "2 questions, and every answer is 'x'"),
    ],
)
def test_bad_lines_are_named(line: object, message: str, file: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"^task .*task\.jsonl") as refused:
        read_task(file({"prompt": "q", "answer": "x"}, line))
    assert message in str(refused.value)


def test_a_number_and_its_text_are_one_answer(file: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="2 questions, and every answer is '1'"):
        read_task(file({"prompt": "w0", "answer": "1"}, {"prompt": "w1", "answer": 1}))


def test_a_line_ends_at_its_line_feed(tmp_path: Path) -> None:
    """Not at the other line breaks of Unicode, which JSON leaves as they are; a mark of bytes and CR are no part."""
    prompts = ["w1\u2028w2", "w1\x85w2"]
    rows = [{"prompt": prompt, "choices": ["a", "b"], "answer": i} for i, prompt in enumerate(prompts)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "task.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert [question.prompt for question in read_task(tmp_path / "task.jsonl")] == prompts


def test_a_task_of_lm_eval_is_no_file() -> None:
    with pytest.raises(UserError, match=r"task lm_eval:arc_easy: no file of questions; `quant evaluate --tasks arc_e"):
        read_task("lm_eval:arc_easy")


def test_the_command(model: Any, tokenizer: Any, file: Callable[..., Path], tmp_path: Path) -> None:
    def evaluate(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])

    directory = tmp_path / "model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    task = file(*({"prompt": p, "choices": ["w1", "w2"], "answer": i % 2} for i, p in enumerate(prompts(8))))
    (result,) = json.loads(evaluate(directory, "--task", task, "--baseline", directory, "--json").stdout)
    assert result["ratio"] == 1 and result["agreement"] == 1 and result["interval"][0] < 0 < result["interval"][1]
    shown = evaluate(directory, "--task", task, "--baseline", directory)
    assert "cannot be told apart" in shown.stdout and shown.exit_code == 0
    assert "task.jsonl" in evaluate(directory, "--task", task).stdout
    both = evaluate(directory, "--task", task, "--text", task)
    assert both.exit_code == 2 and "give one of --text, --data, --task and --tasks" in both.stderr
    missing = evaluate("nowhere", "--task", tmp_path / "none.jsonl")
    assert missing.exit_code == 2 and "none.jsonl: cannot be read" in missing.stderr
