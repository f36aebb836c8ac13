"""`QATCallback` trains a model of Lightning under its deployed rounding, and saves the quantized result.

    callback = quant.QATCallback("nvfp4", rows, solver="gptq", out="trained")
    lightning.Trainer(callbacks=[callback], …).fit(module)

The model is prepared in `setup`: before the optimizers are made, and before weights of a checkpoint are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from quant.checkpoints.save import save
from quant.errors import UserError
from quant.extras import require
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.training.modules import RoundedWeight
from quant.training.qat import convert_qat, prepare_qat

Callback = require("lightning.pytorch", "lightning").Callback


class QATCallback(Callback):  # type: ignore[misc, valid-type]
    """Calls `prepare_qat` when a fit begins and `convert_qat` when it has ended.

    Lightning's own checkpoints hold the weights in training; `fit(ckpt_path=…)` goes on from them.

    Args:
        plan, data, options: as `prepare_qat` takes them.
        module: name of the attribute of the LightningModule that is the model.
        out: directory for the quantized checkpoint, replaced if it is there; None saves nothing.
        tokenizer: is saved with it.

    Attributes:
        plan: of the quantized model, once a fit has ended; for `quant.save`.
    """

    def __init__(
        self,
        plan: Plan | Recipe | str | None = None,
        data: Any = None,
        *,
        module: str = "model",
        out: str | Path | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.plan: Plan | None = None
        self._start, self._data, self._options = plan, data, options
        self._module, self._out, self._tokenizer = module, out, tokenizer

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        model = self._model(pl_module)
        # A fit that was interrupted left its model prepared.
        if stage == "fit" and not any(isinstance(each, RoundedWeight) for each in model.modules()):
            prepare_qat(model, self._start, self._data, **self._options)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        model = self._model(pl_module)
        self.plan = convert_qat(model)
        if self._out is not None and trainer.is_global_zero:
            save(model, self.plan, self._out, tokenizer=self._tokenizer, overwrite=True)

    def _model(self, pl_module: nn.Module) -> nn.Module:
        model = getattr(pl_module, self._module, None)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{type(pl_module).__name__} has no module called {self._module!r}; name the attribute that holds the "
                "model with QATCallback(module=…)"
            )
        return model
