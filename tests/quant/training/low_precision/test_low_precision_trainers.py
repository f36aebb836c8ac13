"""transformers' Trainer and accelerate train a model in low precision, save plain checkpoints and go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch

import quant

ROWS = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))


def _converted(recipe: str) -> tuple[Any, Any]:
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).train()
    return model, quant.to_low_precision_training(model, recipe, attention="fp8")


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("fp8_delayed", marks=pytest.mark.slow)])
def test_a_trainer_in_mixed_precision_saves_what_a_plain_model_loads_and_resumes(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra training")
    from transformers import Trainer, TrainingArguments

    dataset = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ROWS]
    losses, histories = [], []
    for resumed in (False, True):
        model, report = _converted(recipe)
        arguments = TrainingArguments(
            str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3,
            bf16=True, use_cpu=True, gradient_checkpointing=True, logging_steps=1, report_to=[],
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[report.trainer_callback()])
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2") if resumed else None)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-2:])
        assert not model.config._attn_implementation.startswith("sdpa")
        histories.append(report.state_dict())
    assert losses[0] == losses[1]
    assert all(torch.equal(values, histories[0][key]) for key, values in histories[1].items())
    # The inputs of all four steps, of which two were before the checkpoint.
    assert int((histories[1]["model.layers.0.mlp.up_proj.amax.x"] > 0).sum()) == 4
    written = safetensors.torch.load_file(tmp_path / "run/checkpoint-4/model.safetensors")
    plain = type(model).from_pretrained(tmp_path / "run/checkpoint-4")
    assert plain.config._attn_implementation == "sdpa"
    assert "before_training" not in (tmp_path / "run/checkpoint-4/config.json").read_text()
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in written.items())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in written.items())
    # The trained model, in FP8 attention or plain, evaluates alike: the packed one attends in 16 bit.
    with torch.no_grad():
        logits = model.eval()(ROWS).logits
        with pytest.warns(UserWarning, match="accelerate runs this model under autocast.* computes in float32"):
            plan = quant.pack(model)
        assert torch.equal(model(ROWS).logits, logits)
        quant.save(model, plan, tmp_path / "packed")
        loaded = quant.load(tmp_path / "packed", device="cpu")(ROWS).logits
        assert not torch.equal(loaded, logits)
        # The way out that the warning names.
        from accelerate.utils import extract_model_from_parallel

        assert torch.equal(extract_model_from_parallel(model, keep_fp32_wrapper=False)(ROWS).logits, loaded)


def test_the_best_checkpoint_comes_back_with_the_histories_it_was_evaluated_with(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra training")
    from transformers import Trainer, TrainingArguments

    dataset = [{"input_ids": row, "labels": row} for row in ROWS]
    model, report = _converted("nvfp4")
    # A rate at which the first step is the best one, and inputs grow after it.
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, save_steps=1, eval_steps=1, eval_strategy="steps", load_best_model_at_end=True,
        per_device_train_batch_size=2, learning_rate=0.1, bf16=True, use_cpu=True, report_to=[],
    )  # fmt: skip
    callbacks = [report.trainer_callback()]
    trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset, callbacks=callbacks)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert int((report.state_dict()["model.layers.0.mlp.up_proj.amax.x"] > 0).sum()) == 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


def test_accelerate_trains_and_its_checkpoint_has_the_histories(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the extra training")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, report = _converted("nvfp4")
    plain, _ = _converted("nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    prepared, steps = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(report)

    def loss_of_step() -> float:
        torch.manual_seed(0)  # of stochastic rounding
        loss = prepared(input_ids=ROWS, labels=ROWS).loss
        accelerator.backward(loss)
        steps.step()
        steps.zero_grad()
        return float(loss.detach())

    first = loss_of_step()
    with torch.autocast("cpu", torch.bfloat16):
        assert float(plain(input_ids=ROWS, labels=ROWS).loss.detach()) == first
    accelerator.save_state(str(tmp_path))
    histories = report.state_dict()
    second = loss_of_step()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(value, histories[key]) for key, value in report.state_dict().items())
    assert loss_of_step() == second < first


def test_a_resumed_run_without_its_histories_is_told_how_to_load_them() -> None:
    model, report = _converted("nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved, state = optimizer.state_dict(), report.state_dict()
    for loads in (False, True):
        model, report = _converted("nvfp4")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        optimizer.load_state_dict(saved)
        if loads:
            report.load_state_dict(state)
            step()
        else:
            with pytest.warns(UserWarning, match=r"q_proj: its optimizer has made steps.*report\.load_state_dict, acc"):
                step()


def test_a_trainers_checkpoint_without_histories_is_refused_by_name() -> None:
    pytest.importorskip("accelerate", reason="the extra training")
    from transformers import TrainerState

    _, report = _converted("nvfp4")
    with pytest.raises(quant.UserError, match=r"step 2 has no histories .* saved without report.trainer_callback\(\)"):
        report.trainer_callback().on_train_begin(None, TrainerState(global_step=2), None)


def test_a_trainer_takes_a_callback_twice_and_those_of_two_reports_not() -> None:
    pytest.importorskip("accelerate", reason="the extra training")
    from transformers import TrainerState

    (model, report), (_, resumed) = _converted("nvfp4"), _converted("nvfp4")
    callbacks = [report.trainer_callback(), report.trainer_callback()]
    # As a Trainer writes them: a list where two callbacks have one name.
    others = TrainerState(global_step=2, stateful_callbacks=[callbacks[0], resumed.trainer_callback()])
    model(input_ids=ROWS, labels=ROWS)
    state = TrainerState(global_step=2, stateful_callbacks=callbacks)
    assert isinstance(state.stateful_callbacks["LowPrecisionHistories"], list)
    resumed.trainer_callback().on_train_begin(None, state, None)
    for key, values in report.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], values)
    resumed.trainer_callback().on_train_begin(None, others, None)  # equal ones are those of one report
    others.stateful_callbacks["LowPrecisionHistories"][1] = callbacks[0].state()
    with pytest.raises(quant.UserError, match="step 2 has low-precision histories of 2 reports"):
        resumed.trainer_callback().on_train_begin(None, others, None)


def test_lightning_trains_and_its_checkpoint_has_the_report(tmp_path: Path) -> None:
    """As docs/training.md says: converted in `configure_model`, the report's state in Lightning's checkpoint."""
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                torch.manual_seed(0)
                self.model = tiny_models.llama(gain=2.0, num_hidden_layers=1).train()
                self.report = quant.to_low_precision_training(self.model, "nvfp4")

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["report"] = self.report.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.report.load_state_dict(checkpoint["report"])

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
               "default_root_dir": tmp_path}  # fmt: skip
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    first = Module()
    trainer = lightning.Trainer(max_steps=2, enable_checkpointing=False, **options)
    trainer.fit(first, loader)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = Module()
    lightning.Trainer(max_steps=4, enable_checkpointing=False, **options).fit(
        resumed, loader, ckpt_path=tmp_path / "two.ckpt", weights_only=False
    )
    state = resumed.report.state_dict()
    assert int((state["model.layers.0.mlp.up_proj.amax.x"] > 0).sum()) == 4
    assert float(state["model.layers.0.mlp.up_proj.amax.x"][2:].max()) == float(
        first.report.state_dict()["model.layers.0.mlp.up_proj.amax.x"].max()
    )
    with torch.no_grad():
        logits = resumed.model.eval()(ROWS).logits
        quant.pack(resumed.model)
        assert torch.equal(resumed.model(ROWS).logits, logits)
