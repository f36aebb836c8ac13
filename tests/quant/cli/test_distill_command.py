"""`quant distill` trains a checkpoint, and reports it beside the one that it started from."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.base.errors import loss_text
from quant.calibration.texts.sources import check_tokenizers
from quant.cli.distill_command import distill_command
from quant.cli.quantize import quantize_command
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.base.weight_layout import prepack, prepack_refusal
from quant.kernels.linear.quant_linear import QuantLinear
from quant.training import distill
from quant.training import distill as training_run
from quant.training.distill import DistillOptions
from quant.training.distillation_loss import cache_teacher, distillation_loss
from quant.training.train_loop import Hyperparameters, StoredDtypes, train

pytest.importorskip("transformers")


def run(command: Any, *arguments: object) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its rows of tokens, and its checkpoint in NVFP4."""
    folder = tmp_path_factory.mktemp("distill")
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0).save_pretrained(folder / "model")
    rows = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))
    save_file({"rows": rows}, folder / "rows.safetensors")
    result = run(quantize_command, folder / "model", "--format", "nvfp4a16", "--solver", "rtn", "--out", folder / "ptq")
    assert result.exit_code == 0, result.output
    return folder


OPTIONS = ("--steps", 12, "--batch-size", 4, "--seqlen", 24, "--samples", 8, "--lr", 3e-4, "--device", "cpu")


def test_a_checkpoint_comes_nearer_to_its_original(made: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", made / "rows.safetensors"
    result = run(
        distill_command, made / "ptq", "--teacher", made / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--scales", "learned", "--out", out, *OPTIONS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = quant.Report.load(out / "report.json")
    trained = report.distillation
    assert trained is not None and trained.before is not None and report.evaluation is not None
    rows = quant.token_rows(text, None, samples=8, seqlen=24)
    original = quant.open_model(made / "model").model
    for folder, figures in ((made / "ptq", trained.before), (out, report.evaluation)):
        assert quant.evaluate(quant.load(folder), rows, original).kl == pytest.approx(figures.kl, rel=1e-3)
    assert report.evaluation.kl < 0.8 * trained.before.kl
    assert trained.losses[-1] < trained.losses[0] and len(trained.losses) == 6
    assert "12 steps of 4 × 24 tokens" in result.output
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert quant.verify(out).findings == ()


def test_python_writes_the_files_of_the_command(made: Path, tmp_path: Path) -> None:
    """The reports differ in the command, the time and the memory; every other byte is the same."""
    text = made / "rows.safetensors"
    result = run(
        distill_command, made / "ptq", "--teacher", made / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--scales", "learned", "--hidden", 0.5, "--out", tmp_path / "command", *OPTIONS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    counts: list[tuple[str, int, int]] = []
    report = quant.distill(
        made / "ptq", made / "model", out=tmp_path / "python", device="cpu",
        data=str(text), samples=8,
        seqlen=24, steps=12, batch_size=4, lr=3e-4, hidden=0.5, scales="learned", eval_texts=(text,), eval_samples=8,
        listener=quant.Listener(lambda *count: counts.append(count)),
    )  # fmt: skip
    assert counts == [("train", step, 12) for step in range(13)]
    folders = tmp_path / "command", tmp_path / "python"
    names = [sorted(file.name for file in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] and "model.safetensors" in names[0]
    for name in set(names[0]) - {"report.json", "report.html"}:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    by_command, by_python = (quant.Report.load(folder / "report.json").to_dict() for folder in folders)
    assert by_python == report.to_dict() and by_python["command"] == "quant.distill"
    for fields in (by_command, by_python):
        evaluations = [fields["evaluation"], fields["distillation"]["before"]]
        for record, key in ((fields, "command"), (fields, "seconds"), (fields, "peak_rss_bytes"),
                            *((each, "seconds") for each in evaluations)):  # fmt: skip
            del record[key]
    assert by_command == by_python


def test_norms_are_trained_with_all_codes_as_they_are(made: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", made / "rows.safetensors"
    result = run(
        distill_command, made / "ptq", "--teacher", made / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--train", "norms", "--out", out, *OPTIONS[:-4], "--lr", 1e-2, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    start, trained = (load_file(folder / "model.safetensors") for folder in (made / "ptq", out))
    changed = {name for name in trained if not torch.equal(start[name], trained[name])}
    assert changed == {name for name in start if "norm" in name} and start.keys() == trained.keys()
    assert {trained[name].dtype for name in changed} == {torch.bfloat16}
    record = quant.Report.load(out / "report.json").distillation
    assert record is not None and record.train == "norms" and record.before is not None and record.before.kl is not None
    rows = quant.token_rows(text, None, samples=8, seqlen=24)
    kl = quant.evaluate(quant.load(out), rows, quant.open_model(made / "model").model).kl
    assert kl is not None and kl < 0.95 * record.before.kl
    assert "12 steps of 4 × 24 tokens, of norms alone" in result.output


def test_codes_in_a_layout_of_a_gpu_are_not_cast() -> None:
    """On a Hopper GPU a model is loaded with codes in int32, and holds them in uint8 after training."""
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))
    model = quant.quantize(model, "nvfp4a16", solver="rtn").model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    stored = {name: layer.quantized_weight for name, layer in layers.items()}
    assert not any(prepack_refusal(weight) for weight in stored.values())
    for name, layer in layers.items():
        layer.take(prepack(stored[name]))
    dtypes = StoredDtypes(model)
    for name, layer in layers.items():
        layer.take(stored[name])
    dtypes.restore(model.double())
    for name, layer in layers.items():
        assert layer.codes.dtype is torch.uint8 and torch.equal(layer.codes, stored[name].codes)
        assert torch.equal(layer.scale.view(torch.uint8), stored[name].scale.view(torch.uint8))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("train", ["weights", "norms"])
@pytest.mark.parametrize("format", ["nvfp4a16", "nvfp4", "mxfp6a16"])
def test_training_on_a_gpu(format: str, train: str, tmp_path: Path) -> None:
    """Where a GPU holds codes in a layout of its own, the written checkpoint has them as any other."""
    tiny_models.llama(dtype=torch.bfloat16, hidden_size=64, intermediate_size=128, gain=2.0).save_pretrained(
        tmp_path / "model"
    )
    rows = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    text = tmp_path / "rows.safetensors"
    result = run(
        quantize_command, tmp_path / "model", "--format", format, "--solver", "rtn", "--calib", text,
        "--calib-samples", 8, "--seqlen", 24, "--out", tmp_path / "ptq",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    result = run(
        distill_command, tmp_path / "ptq", "--teacher", tmp_path / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--train", train, "--out", tmp_path / "out", *OPTIONS[:-4], "--lr", 1e-3,
        "--device", "cuda",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = quant.Report.load(tmp_path / "out" / "report.json").evaluation
    assert figures is not None
    original = quant.open_model(tmp_path / "model").model
    kl = quant.evaluate(quant.load(tmp_path / "out"), rows, original).kl  # on the CPU
    assert kl == pytest.approx(figures.kl, rel=0.05)
    # A random model of this width amplifies the rounding of its inputs beyond what `verify` allows.
    assert format == "nvfp4" or quant.verify(tmp_path / "out").findings == ()


def test_norms_are_trained_with_frozen_scales() -> None:
    with pytest.raises(quant.UserError, match="norms are trained with frozen scales; leave it out"):
        DistillOptions(train="norms", scales="learned")
    with pytest.raises(quant.UserError, match="train is 'biases'; expected 'weights' or 'norms'"):
        DistillOptions(train="biases")


@pytest.mark.parametrize("scales", ["frozen", "learned"])
def test_a_ruined_model_is_not_written(made: Path, tmp_path: Path, scales: str) -> None:
    args = (distill_command, made / "ptq", "--teacher", made / "model", "--data", made / "rows.safetensors")
    args = (*args, "--scales", scales, "--out", tmp_path / "out", "--steps", 1, "--seqlen", 24, "--device", "cpu")
    result = run(*args, "--lr", 1)
    assert result.exit_code == 2 and "so nothing was written; lower --lr (it was 1)" in result.output
    assert not list(tmp_path.iterdir())
    result = run(*args, "--lr", 1e-3)  # worse, and not ruined
    (warning,) = [w for w in quant.Report.load(tmp_path / "out" / "report.json").warnings if "first rows" in w]
    assert result.exit_code == 0 and "lower --lr (it was 0.001)" in warning, result.output
    result = run(*args, "--lr", 1e-5, "--overwrite")
    assert result.exit_code == 0 and "raised the loss" not in result.output
    for rate in ("nan", "1e30", "1e38", "0"):  # AdamW stops at 1e38 with an error of its own
        result = run(*args, "--lr", rate, "--overwrite")
        assert result.exit_code == 2 and "a number above 0 and at most 1" in result.output, result.output


def test_a_rate_that_raises_the_loss_is_lowered(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the rows is held out; training begins anew from the start, as if the lower rate were the first."""
    rows = torch.randint(0, 64, (32, 24), generator=torch.Generator().manual_seed(9))
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    args = (distill_command, made / "ptq", "--teacher", made / "model", "--data", tmp_path / "rows.safetensors")
    args, rate = (*args, *OPTIONS[:6], "--samples", 32, "--device", "cpu", "--out"), 2e-5
    for name, tried in (("high", 64 * rate), ("low", rate)):
        monkeypatch.setattr(training_run.train_loop, "usual_rate", lambda *_, tried=tried: tried)
        result = run(*args, tmp_path / name)
        assert result.exit_code == 0, result.output
        assert ("training begins anew at 2e-05" in " ".join(result.output.split())) == (name == "high")
        trained = quant.Report.load(tmp_path / name / "report.json").distillation
        assert trained is not None and trained.rate == rate
    high, low = (load_file(tmp_path / name / "model.safetensors") for name in ("high", "low"))
    assert all(torch.equal(high[name], tensor) for name, tensor in low.items())
    monkeypatch.setattr(training_run.train_loop, "usual_rate", lambda *_: 500.0)
    result = run(*args, tmp_path / "none")
    assert result.exit_code == 2 and not (tmp_path / "none").exists()
    assert "so nothing was written; lower --lr (it was 7.8125)" in result.output


def broken_at(step: int, make: Any) -> Any:
    """A distillation loss that `make` changes in the first run's backward pass number `step`."""
    loss, passes = distillation_loss, [0]

    def changed(*args: Any, **options: Any) -> torch.Tensor:
        value = loss(*args, **options)
        passes[0] += value.requires_grad
        return make(value) if passes[0] == step and value.requires_grad else value

    return changed


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda loss: loss * float("nan"), "a loss of nan with a gradient of norm nan at step 3"),
        (lambda loss: (loss - loss.detach()).sqrt(), "a loss of 0 with a gradient of norm nan at step 3"),
    ],
    ids=["loss", "gradient"],
)
def test_a_rate_that_gives_nan_is_lowered_too(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, line: str
) -> None:
    save_file({"rows": torch.randint(0, 64, (32, 24))}, tmp_path / "rows.safetensors")
    args = (distill_command, made / "ptq", "--teacher", made / "model", "--data", tmp_path / "rows.safetensors")
    args = (*args, *OPTIONS[:6], "--samples", 32, "--device", "cpu", "--out")
    monkeypatch.setattr(training_run.train_loop, "usual_rate", lambda *_: 4e-5)
    monkeypatch.setattr(training_run, "distillation_loss", broken_at(3, make))
    result = run(*args, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert line in (text := " ".join(result.output.split())) and "training begins anew at 1e-05" in text
    result = run(*args[:-1], "--lr", 1e-5, "--out", tmp_path / "low")
    both = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "low")]
    assert result.exit_code == 0 and both[0].keys() == both[1].keys()
    # A rate that is asked for is not lowered, and a first step that is not finite is no rate's fault.
    for step, line in ((3, "so nothing was written; lower --lr (it was 1e-05)"), (1, "leave such rows out")):
        monkeypatch.setattr(training_run, "distillation_loss", broken_at(step, make))
        result = run(*args[:-1], "--lr", 1e-5, "--out", tmp_path / "none")
        assert result.exit_code == 2 and line in result.output and not (tmp_path / "none").exists()


def test_the_warning_names_the_rows_whose_loss_rose(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with tiny losses, which no rate is judged by."""
    save_file({"rows": torch.randint(0, 64, (32, 24))}, tmp_path / "rows.safetensors")
    args = (distill_command, made / "ptq", "--teacher", made / "model", "--data", tmp_path / "rows.safetensors")
    args = (*args, *OPTIONS[:6], "--samples", 32, "--device", "cpu", "--out", tmp_path / "out")
    monkeypatch.setattr(training_run.train_loop, "usual_rate", lambda *_: 5e-3)
    monkeypatch.setattr(training_run, "distillation_loss", lambda *a, **o: 1e-6 * distillation_loss(*a, **o))
    assert run(*args).exit_code == 0
    (warning,) = [w for w in quant.Report.load(tmp_path / "out" / "report.json").warnings if "raised the loss" in w]
    assert "raised the loss of held-out rows from" in warning


def test_the_last_step_is_checked_too() -> None:
    model = nn.Linear(2, 1, bias=False)
    trained = train(model, lambda ids: model.weight.square().sum(), torch.zeros(1, 2), Hyperparameters(1, 1, rate=1e30))
    assert trained.after == torch.inf and trained.outcome.endswith("to inf")


def test_what_training_made_worse_is_told(made: Path, tmp_path: Path) -> None:
    text = made / "rows.safetensors"
    result = run(
        distill_command, made / "ptq", "--teacher", made / "model", "--data", text, "--eval", text,
        "--eval-samples", 8, "--out", tmp_path / "out", *OPTIONS[:-4], "--lr", 3e-3, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = quant.Report.load(tmp_path / "out" / "report.json")
    before = report.distillation.before  # type: ignore[union-attr]
    assert report.evaluation.kl > before.kl  # type: ignore[operator, union-attr]
    (warning,) = [warning for warning in report.warnings if "training raised KL" in warning]
    after = report.evaluation
    assert after is not None
    assert f"from {loss_text(before.kl)} to {loss_text(after.kl)} on" in warning
    assert "--batch-size was 4" in warning and "--lr (it was 0.003)" in warning


@pytest.mark.parametrize(("preset", "share"), [("nvfp4a16", 1e-4), ("nvfp4", 1.5e-4)])
def test_the_rate_is_a_share_of_the_weights(made: Path, tmp_path: Path, preset: str, share: float) -> None:
    """Weights of models differ tenfold in size: 0.193 in SmolLM2-135M, 0.018 in a Qwen2.5 of 0.5B parameters."""
    rows, ptq = made / "rows.safetensors", tmp_path / "ptq"
    made_so = run(quantize_command, made / "model", "--format", preset, "--solver", "rtn", "--calib", rows,
                  "--seqlen", 24, "--calib-samples", 8, "--out", ptq)  # fmt: skip
    assert made_so.exit_code == 0, made_so.output
    teacher = ("--teacher", made / "model", "--data", rows)
    result = run(distill_command, ptq, *teacher, "--out", tmp_path / "out", *OPTIONS[:-4], "--device", "cpu")
    assert result.exit_code == 0, result.output
    trained = [p for name, p in load_file(made / "model" / "model.safetensors").items() if name.endswith("proj.weight")]
    size = torch.cat([weight.double().flatten() for weight in trained]).square().mean().sqrt().item()
    rate = quant.Report.load(tmp_path / "out" / "report.json").distillation.rate  # type: ignore[union-attr]
    assert rate == pytest.approx(share * size, rel=0.01)


@pytest.mark.parametrize("is_cached", [False, True], ids=["model", "cache"])
def test_what_is_evaluated_is_not_trained_on(made: Path, tmp_path: Path, is_cached: bool) -> None:
    """Evaluation texts, of other rows and longer ones, change no weight of the result."""
    teacher = ("--teacher", made / "model", "--data", made / "rows.safetensors")
    other = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(8))
    save_file({"rows": other}, tmp_path / "other.safetensors")
    for name, more in (("alone", ()), ("measured", ("--eval", tmp_path / "other.safetensors", "--eval-samples", 4))):
        cache = ("--cache-teacher", tmp_path / f"{name}.teacher", "--top", 16) if is_cached else ()
        result = run(distill_command, made / "ptq", *teacher, *cache, *more, "--out", tmp_path / name, *OPTIONS)
        assert result.exit_code == 0, result.output
    reports = [quant.Report.load(tmp_path / name / "report.json") for name in ("alone", "measured")]
    trained = [report.distillation for report in reports]
    assert trained[0] is not None and trained[1] is not None and reports[1].evaluation is not None
    assert trained[0].losses == trained[1].losses and trained[0].seqlen == trained[1].seqlen == 24
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "measured")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8,
            "max_position_embeddings": 1024}  # fmt: skip


def test_what_is_wider_than_the_checkpoint_stays_so(tmp_path: Path) -> None:
    """DeepSeek's routers have a bias in float32 in models of BF16, and rotary frequencies are never narrow."""
    sizes = {**tiny_models.DECODER, **DEEPSEEK}
    model = tiny_models.build("DeepseekV3", "ForCausalLM", sizes, dtype=torch.bfloat16, gain=2.0)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.randn(4, generator=torch.Generator().manual_seed(3)))
    assert bias.dtype is torch.float32
    model.save_pretrained(tmp_path / "model")
    rows = torch.randint(0, 64, (2, 512), generator=torch.Generator().manual_seed(7))
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    ptq, out = tmp_path / "ptq", tmp_path / "out"
    result = run(quantize_command, tmp_path / "model", "--format", "nvfp4a16", "--solver", "rtn", "--out", ptq)
    assert result.exit_code == 0, result.output
    text = tmp_path / "rows.safetensors"
    result = run(
        distill_command, ptq, "--teacher", tmp_path / "model", "--data", text, "--eval", text, "--eval-samples", 2,
        "--steps", 1, "--batch-size", 1, "--samples", 2, "--seqlen", 512, "--lr", 1e-12, "--device", "cpu",
        "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    start, trained = load_file(ptq / "model.safetensors"), load_file(out / "model.safetensors")
    assert start.keys() == trained.keys()
    for name, tensor in start.items():
        assert trained[name].dtype == tensor.dtype and torch.equal(trained[name], tensor), name
    report = quant.Report.load(out / "report.json")
    assert report.evaluation.kl == report.distillation.before.kl  # type: ignore[union-attr]


def test_a_short_text_gives_the_rows_that_it_has(made: Path, tmp_path: Path) -> None:
    teacher = ("--teacher", made / "model", "--data", made / "rows.safetensors")
    few = ("--steps", 2, "--seqlen", 24, "--device", "cpu", "--out", tmp_path / "out")
    result = run(distill_command, made / "ptq", *teacher, *few, "--batch-size", 8)  # --samples is 512
    assert result.exit_code == 0, result.output
    result = run(distill_command, made / "ptq", *teacher, *few, "--overwrite", "--batch-size", 16)
    assert result.exit_code == 2 and "--batch-size 16: there are 8 rows of 24 tokens to train on" in result.output


def test_figures_are_those_under_the_plans_kv_cache(made: Path, tmp_path: Path) -> None:
    text, ptq, out = made / "rows.safetensors", tmp_path / "ptq", tmp_path / "out"
    result = run(quantize_command, made / "model", "--format", "nvfp4a16", "--kv-cache", "fp8", "--solver", "rtn",
                 "--calib", text, "--seqlen", 24, "--calib-samples", 8, "--out", ptq)  # fmt: skip
    assert result.exit_code == 0, result.output
    result = run(
        distill_command, ptq, "--teacher", made / "model", "--data", text, "--eval", text, "--eval-samples", 8,
        "--out", out, *OPTIONS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert quant.verify(out).findings == ()
    rows = quant.token_rows(text, None, samples=8, seqlen=24)
    original, trained = quant.open_model(made / "model").model, quant.load(out)
    with quantized_attention(trained, kv_cache="fp8"):
        expected = quant.evaluate(trained, rows, original).kl
    found = quant.Report.load(out / "report.json").evaluation.kl  # type: ignore[union-attr]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found != pytest.approx(quant.evaluate(trained, rows, original).kl, rel=1e-3)  # whose cache is in 16 bit


def test_a_teacher_of_another_tokenizer_is_refused() -> None:
    """Its vocabulary may have the same size."""

    class Words:
        def __init__(self, words: str) -> None:
            self.words = words.split()

        def get_vocab(self) -> dict[str, int]:
            return {word: place for place, word in enumerate(self.words)}

    text = " ".join(str(number) for number in range(300))
    check_tokenizers("teacher", "student", Words(text), Words(f"{text} <pad>"))
    check_tokenizers("teacher", "student", None, Words(text))
    with pytest.raises(
        quant.UserError, match="teacher: its tokenizer is another than that of student, so token ids mean"
    ):
        check_tokenizers("teacher", "student", Words(text), Words(" ".join(reversed(text.split()))))


def test_from_a_cached_teacher(made: Path, tmp_path: Path) -> None:
    rows = quant.token_rows(made / "rows.safetensors", None, samples=8, seqlen=24)
    cache_teacher(quant.open_model(made / "model").model, rows, tmp_path / "teacher", k=16)
    result = run(distill_command, made / "ptq", "--teacher", tmp_path / "teacher", "--out", tmp_path / "out", *OPTIONS)
    assert result.exit_code == 0, result.output
    losses = quant.Report.load(tmp_path / "out" / "report.json").distillation.losses
    assert losses[-1] < losses[0]


def test_a_teacher_is_cached_first_and_serves_again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone before the student is there, and its file is the one that Python writes."""
    alive: list[weakref.ref[torch.nn.Module]] = []
    opened = distill.open_runnable

    def open_runnable(name: str) -> Any:
        gc.collect()
        assert not any(model() is not None for model in alive), f"another model is in memory when {name} is opened"
        source, model = opened(name)
        alive.append(weakref.ref(model))
        return source, model

    monkeypatch.setattr(distill, "open_runnable", open_runnable)
    monkeypatch.setattr(training_run, "open_runnable", open_runnable)
    cache, rows = tmp_path / "new" / "teacher.safetensors", made / "rows.safetensors"
    first = (made / "ptq", "--teacher", made / "model", "--data", rows, "--cache-teacher", cache, "--top", 16, *OPTIONS)
    result = run(distill_command, *first, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(alive) == 2
    ids = quant.token_rows(rows, None, samples=8, seqlen=24)
    cache_teacher(quant.open_model(made / "model").model, ids, tmp_path / "by_python", k=16)
    written, by_python = load_file(cache), load_file(tmp_path / "by_python")
    assert written.keys() == by_python.keys() and all(torch.equal(written[name], by_python[name]) for name in written)
    monkeypatch.undo()
    result = run(distill_command, made / "ptq", "--teacher", cache, "--out", tmp_path / "again", *OPTIONS)
    assert result.exit_code == 0, result.output
    assert f"training on the 8 rows of 24 tokens of {cache}\n" in result.stderr  # whatever --seqlen says
    losses = [quant.Report.load(tmp_path / name / "report.json").distillation.losses for name in ("out", "again")]
    assert losses[0] == losses[1]

    model, out = made / "model", tmp_path / "o"
    for teacher, file, more, message in (
        (model, cache, (), "is there already; pass it as --teacher"),
        (model, out / "t", (), "lies in --out"),
        (model, tmp_path / "t", ("--hidden", 1), "has no hidden states"),
        (cache, tmp_path / "t", (), "a cached teacher already"),
    ):
        options = ("--teacher", teacher, "--data", rows, "--cache-teacher", file, "--top", 16, "--out", out, *OPTIONS)
        result = run(distill_command, made / "ptq", *options, *more)
        assert result.exit_code == 2 and message in result.output, result.output
    torn = {"rows": torch.zeros(2, 8, dtype=torch.int32), "tokens": torch.zeros(2, 7, 4, dtype=torch.int32)}
    metadata = {"kind": "blockscale teacher", "temperature": "1", "vocabulary": "64"}
    save_file({**torn, "logp": torch.zeros(2, 7, 4)}, tmp_path / "torn", metadata)
    result = run(distill_command, made / "ptq", "--teacher", tmp_path / "torn", "--out", tmp_path / "o", *OPTIONS)
    assert result.exit_code == 2 and "its tensors are not as cache_teacher wrote them" in result.output
    with safe_open(cache, framework="pt") as file:
        metadata = file.metadata()
    for name, value in (("logp", torch.nan), ("tokens", int(metadata["vocabulary"]))):
        changed = {**written, name: written[name].clone()}
        changed[name][0, 0, 0] = value
        save_file(changed, tmp_path / "torn", metadata)
        result = run(distill_command, made / "ptq", "--teacher", tmp_path / "torn", "--out", tmp_path / "o", *OPTIONS)
        assert result.exit_code == 2 and "torn: holds tokens or probabilities that no teacher gives" in result.output


def test_refusals(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(distill_command, made / "model", "--teacher", made / "model", "--out", out)
    assert (
        result.exit_code == 2 and f"make one with `quantize {made / 'model'} --format nvfp4 --out DIR`" in result.output
    )
    result = run(distill_command, made / "ptq", "--teacher", made / "model", "--out", made / "ptq")
    assert result.exit_code == 2 and "ptq" in result.output
    tiny_models.llama(vocab_size=80).save_pretrained(tmp_path / "other")
    data = made / "rows.safetensors"
    result = run(distill_command, made / "ptq", "--teacher", tmp_path / "other", "--data", data, "--out", out, *OPTIONS)
    assert result.exit_code == 2 and "the teacher's vocabulary has 80 tokens and the student's 64" in result.output
    assert not out.exists()
