"""Tasks of lm-eval give the scores that counting log-probabilities by hand gives, here on a task of local data."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner

import quant
from quant.adapters.tasks import evaluate_tasks
from quant.base.errors import UserError
from quant.cli.main import main

pytestmark = pytest.mark.slow  # lm-eval reads thousands of files of tasks

pytest.importorskip("lm_eval", reason="the extra lm-eval")
transformers = pytest.importorskip("transformers", reason="the extra hf")

DOCUMENTS = [
    {"question": f"w{i} w{7 * i % 60 + 2}", "choices": ["w3 w4", "w50", "w9"], "answer": i % 3} for i in range(2, 26)
]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with its tokenizer, next to the folder `tasks`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = Tokenizer(
        models.WordLevel({**{f"w{i}": i for i in range(2, 64)}, "<end>": 0, "<unknown>": 1}, unk_token="<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")
    done = quant.quantize(tiny_models.llama(gain=3.0), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "out", tokenizer=tokenizer)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (tasks / "words.yaml").write_text(
        f"task: words_of_ours\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tasks / 'data.jsonl'}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n  - metric: mcc\n"
    )
    return tmp_path / "out"


def accuracy(model: Any, documents: Any) -> float:
    """How often the right choice has the largest sum of log-probabilities."""
    ids = lambda text: [int(word[1:]) for word in text.split()]  # noqa: E731
    right = 0
    for document in documents:
        scores = []
        for choice in document["choices"]:
            question, answer = ids(document["question"]), ids(choice)
            with torch.no_grad():
                logp = model(torch.tensor([question + answer])).logits[0].float().log_softmax(-1)
            scores.append(sum(float(logp[len(question) + i - 1, token]) for i, token in enumerate(answer)))
        right += scores.index(max(scores)) == document["answer"]
    return right / len(documents)


def test_the_command_scores_a_checkpoint(checkpoint: Path) -> None:
    command = ["evaluate", str(checkpoint), "--tasks", "words_of_ours", "--task-path", str(checkpoint.parent / "tasks")]
    done = CliRunner().invoke(main, [*command, "--json", "--limit", "20"], catch_exceptions=False)
    assert not done.exit_code, done.output
    score, correlation = json.loads(done.stdout)
    expected = accuracy(quant.load(checkpoint), DOCUMENTS[:20])
    assert 0 < expected < 1
    assert score == {
        "task": "words_of_ours", "metric": "acc", "filter": "none", "value": pytest.approx(expected),
        "stderr": pytest.approx((expected * (1 - expected) / 19) ** 0.5), "samples": 20,
    }  # fmt: skip
    assert correlation["metric"] == "mcc" and 0.05 < correlation["stderr"] < 0.5
    table = CliRunner().invoke(main, command, catch_exceptions=False).stdout
    assert "words_of_ours" in table and f"{accuracy(quant.load(checkpoint), DOCUMENTS):.4f}" in table


def test_lm_eval_finds_the_model_by_its_name(checkpoint: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import quant.adapters.lm_eval_model

    found = lm_eval.simple_evaluate(
        "blockscale", {"pretrained": str(checkpoint)}, ["words_of_ours"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(checkpoint.parent / "tasks")),
    )  # fmt: skip
    assert found is not None
    value = found["results"]["words_of_ours"]["acc,none"]
    assert value == pytest.approx(accuracy(quant.load(checkpoint), DOCUMENTS))
    score, _ = evaluate_tasks(checkpoint, "words_of_ours", task_path=checkpoint.parent / "tasks")
    assert score.value == value and score.samples == len(DOCUMENTS)


def test_an_unknown_task_is_named(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="lm-eval has no task 'no_such_task'"):
        evaluate_tasks(checkpoint, "no_such_task")


def test_models_are_scored_one_by_one(checkpoint: Path) -> None:
    command = ["evaluate", str(checkpoint), "--tasks", "words_of_ours", "--task-path", str(checkpoint.parent / "tasks")]
    refused = CliRunner().invoke(main, [*command, "--baseline", str(checkpoint)])
    assert refused.exit_code == 2
    assert "--baseline is for --text, --data and --task; run --tasks on each model" in refused.stderr
    done = CliRunner().invoke(main, [*command, "--limit", "4"])
    assert done.exit_code == 0 and "words_of_ours" in done.stdout
