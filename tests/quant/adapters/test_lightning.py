"""Under Lightning a model trains, goes on from a checkpoint, and is saved as in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import quant

lightning = pytest.importorskip("lightning", reason="the extra lightning")
# What Lightning says of its own workers and versions.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
RATE = 1e-2


def llama() -> Any:
    return tiny_models.llama(num_hidden_layers=1, gain=2.0).requires_grad_(True)


def module(model: Any) -> Any:
    class Tuned(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch, labels=batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), RATE)

    return Tuned()


def fit(tuned: Any, callback: Any, folder: Path, epochs: int = 2, ckpt: Path | None = None) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(tuned, data, ckpt_path=ckpt, **({} if ckpt is None else {"weights_only": False}))


def test_a_fit_is_a_loop_between_preparing_and_converting(tmp_path: Path) -> None:
    reference = llama()
    quant.prepare_qat(reference, "nvfp4", ROWS, solver="mse")
    optimizer = torch.optim.Adam(reference.parameters(), RATE)
    for batch in (*ROWS.split(2), *ROWS.split(2)):
        optimizer.zero_grad()
        reference(batch, labels=batch).loss.backward()
        optimizer.step()
    plan = quant.pack(reference)
    with torch.no_grad():
        expected = reference(ROWS).logits

    callback = quant.QATCallback("nvfp4", ROWS, solver="mse", out=tmp_path / "out")
    tuned = module(llama())
    fit(tuned, callback, tmp_path)
    assert callback.plan == plan
    again = module(llama())
    fit(again, quant.QATCallback("nvfp4", ROWS, solver="mse"), tmp_path / "more", ckpt=tmp_path / "epoch=0.ckpt")
    with torch.no_grad():
        for model in (tuned.model, again.model, quant.load(tmp_path / "out")):
            assert torch.equal(model(ROWS).logits, expected)


def monitored(folder: Path) -> tuple[Any, Any]:
    """A trainer whose first epoch is the best: the rate rises until the model diverges. Its callback of checkpoints."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(folder, monitor="val", filename="{epoch}", save_top_k=1)
    return best, {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 3, "default_root_dir": folder,
    }  # fmt: skip


def diverging(model: Any) -> Any:
    class Diverging(type(module(model))):  # type: ignore[misc]
        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val", self.model(batch, labels=batch).loss)

        def test_step(self, batch: torch.Tensor) -> None:
            self.log("test", self.model(batch, labels=batch).loss)

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam(self.parameters(), 1e-3)
            return [adam], [torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 1.0 if epoch < 1 else 500.0)]

    return Diverging()


def test_the_best_weights_are_saved_and_the_best_checkpoint_is_tested(tmp_path: Path) -> None:
    def data() -> Any:
        return torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]

    best, options = monitored(tmp_path / "ckpt")
    callback = quant.QATCallback("nvfp4", ROWS, solver="rtn", out=tmp_path / "out")
    tuned = diverging(llama())
    trainer = lightning.Trainer(callbacks=[callback, best], **options)
    trainer.fit(tuned, data(), data())
    score = float(best.best_model_score)
    saved = quant.load(tmp_path / "out")
    with torch.no_grad():
        losses = [saved(rows, labels=rows).loss for rows in ROWS.split(2)]
        logits = saved(ROWS).logits
    assert float(sum(losses)) / 2 == pytest.approx(score, rel=1e-5)
    assert trainer.callback_metrics["val"] > score + 0.1  # of the last epoch
    assert torch.equal(tuned.model(ROWS).logits, logits)

    best_of = trainer.test(tuned, data(), ckpt_path="best", verbose=False, weights_only=False)
    assert best_of[0]["test"] == pytest.approx(score, rel=1e-5)
    as_packed = trainer.test(tuned, data(), verbose=False)  # without a checkpoint, the packed model itself
    assert as_packed[0]["test"] == pytest.approx(score, rel=1e-5)
    assert type(tuned.model.lm_head).__name__ == "Linear" and "codes" in str(tuned.model.state_dict().keys())

    # A process of its own has the original model, and prepares it when it loads the checkpoint.
    fresh = diverging(llama())
    again = lightning.Trainer(callbacks=[quant.QATCallback("nvfp4", ROWS, solver="rtn")], **options)
    alone = again.test(fresh, data(), ckpt_path=best.best_model_path, verbose=False, weights_only=False)
    assert alone[0]["test"] == pytest.approx(score, rel=1e-5)
    assert torch.equal(fresh.model(ROWS).logits, logits)

    # Another fit goes on from the weights that were packed.
    more = lightning.Trainer(callbacks=[callback], **{**options, "max_epochs": 1})
    more.fit(tuned, data())
    assert not torch.equal(tuned.model(ROWS).logits, logits)


def test_another_name_of_the_model_is_asked_for() -> None:
    with pytest.raises(quant.UserError, match=r"Tuned has no module called 'net'; name the attribute"):
        quant.QATCallback("nvfp4", module="net").setup(None, module(llama()), "fit")


def test_averages_of_the_model_as_it_was_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import WeightAveraging

    data = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    for order in (1, -1):
        callbacks = [quant.QATCallback("nvfp4", ROWS, solver="rtn"), WeightAveraging()][::order]
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks, default_root_dir=tmp_path,
        )  # fmt: skip
        if order == 1:
            trainer.fit(module(llama()), data)
            continue
        with pytest.raises(quant.UserError, match="a callback before QATCallback averages the model as it was; put"):
            trainer.fit(module(llama()), data)


def test_weights_in_sixteen_bits_are_told(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[quant.QATCallback("nvfp4", ROWS, solver="rtn")], precision="bf16-true",
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(
        UserWarning, match=r'precision="bf16-true" rounds weights in training, and most updates are lost'
    ):
        trainer.fit(module(llama()), data)
