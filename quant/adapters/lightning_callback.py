"""`QATCallback` trains a model of Lightning under its deployed rounding, and saves the quantized result.

    callback = quant.QATCallback("nvfp4", rows, solver="gptq", out="trained")
    lightning.Trainer(callbacks=[callback], …).fit(module)

The model is prepared in `setup`: before the optimizers are made, and before weights of a checkpoint are read. When the
fit has ended, it is packed with the weights of the best checkpoint, if a `ModelCheckpoint` monitors something, or with
the last ones. Lightning's checkpoints hold weights in training. So when Lightning loads one into the packed model, as
`test(ckpt_path="best")` does, the layers of training come back for that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.errors import UserError, require, warn
from quant.export.checkpoint.save import detach, save
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.training.low_precision.nonfinite import GradientWatch
from quant.training.qat import pack, prepare_qat
from quant.training.qat_layers import PLAN, RoundedWeight, put_layer

Callback = require("lightning.pytorch", "lightning").Callback


class QATCallback(Callback):  # type: ignore[misc, valid-type]
    """Calls `prepare_qat` when a fit begins and `pack` when it has ended.

    Lightning's own checkpoints hold the weights in training; `fit(ckpt_path=…)` goes on from them. The callback
    keeps the layers of training, in the memory that they had, until it is deleted.

    Args:
        plan, data, options: as `prepare_qat` takes them.
        module: name of the attribute of the LightningModule that is the model.
        out: directory for the quantized checkpoint, replaced if it is there; None saves nothing.
        tokenizer: a tokenizer that is saved with the checkpoint.

    Attributes:
        plan: the plan of the quantized model, once a fit has ended; for `quant.save`.
    """

    def __init__(
        self, plan: Plan | Recipe | str | None = None, data: Any = None, *, module: str = "model",
        out: str | Path | None = None, tokenizer: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.plan: Plan | None = None
        self._start, self._data, self._options = plan, data, options
        self._module, self._out, self._tokenizer = module, out, tokenizer
        self._layers: dict[str, RoundedWeight] = {}
        self._training_plan: Plan | None = None
        self._hooked: nn.Module | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        model = self._model(pl_module)
        if stage == "fit":
            earlier = trainer.callbacks[: trainer.callbacks.index(self)]
            if not _in_training(model) and any(getattr(each, "_average_model", None) for each in earlier):
                raise UserError("a callback before QATCallback averages the model as it was; put QATCallback first")
            self._enter_training(model)
        elif self._hooked is not model:
            # Whether a checkpoint will be loaded is not known yet.
            model.register_load_state_dict_pre_hook(self._before_loading)
            self._hooked = model

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if (narrow := str(trainer.precision)).endswith("16-true") and "dtype" not in self._options:
            warn(f'precision="{narrow}" rounds weights in training, and most updates are lost: take "bf16-mixed"')

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        checkpoints = trainer.checkpoint_callback
        best = getattr(checkpoints, "best_model_path", "") if getattr(checkpoints, "monitor", None) else ""
        if best:  # written by this process, with the user's hyperparameters, which may be of any class
            state = trainer.strategy.load_checkpoint(best, weights_only=False)["state_dict"]
            pl_module.load_state_dict(state)
        model = self._model(pl_module)
        self._pack(model)
        if self._out is not None and trainer.is_global_zero:
            save(model, self.plan, self._out, tokenizer=self._tokenizer, overwrite=True)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        model = self._model(pl_module)
        # A fit that was interrupted stays in training: another one goes on from there.
        if stage != "fit" and _in_training(model):
            self._pack(model)

    def _enter_training(self, model: nn.Module) -> None:
        if _in_training(model):
            return
        if not self._layers:
            prepare_qat(model, self._start, self._data, **self._options)
            return
        for name, layer in self._layers.items():
            layer.train(model.get_submodule(name).training)
            put_layer(model, name, layer)
        detach(model)
        setattr(model, PLAN, self._training_plan)
        GradientWatch(self._options.get("on_nonfinite", "stop")).start(model)

    def _pack(self, model: nn.Module) -> None:
        self._layers = {name: each for name, each in model.named_modules() if isinstance(each, RoundedWeight)}
        self._training_plan = getattr(model, PLAN)
        self.plan = pack(model)

    def _before_loading(self, model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Prepares the layers of a training state before it is loaded, as a hook of `load_state_dict`."""
        if any(name.startswith(prefix) and name.endswith("._extra_state") for name in state):
            self._enter_training(model)

    def _model(self, pl_module: nn.Module) -> nn.Module:
        model = getattr(pl_module, self._module, None)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{type(pl_module).__name__} has no module called {self._module!r}; name the attribute that holds the "
                "model with QATCallback(module=…), and set it in __init__: configure_model is too late"
            )
        return model


def _in_training(model: nn.Module) -> bool:
    return any(isinstance(each, RoundedWeight) for each in model.modules())
