"""`BlockscaleLM` is a model of lm-eval over any model that can run here; lm-eval knows it by the name "blockscale"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import nn

from quant.base.errors import UserError
from quant.export.checkpoint.load import open_runnable


@register_model("blockscale")
class BlockscaleLM(HFLM):  # type: ignore[misc]
    """lm-eval's model of transformers for a model, or its path or name; `options` are other arguments of `HFLM`."""

    def __init__(
        self, pretrained: str | Path | nn.Module, tokenizer: Any = None, device: str | None = None, **options: Any
    ) -> None:
        if isinstance(pretrained, nn.Module):
            model: Any = pretrained
        else:
            source, model = open_runnable(str(pretrained), has_factory=False)
            tokenizer = source.load_tokenizer() if tokenizer is None else tokenizer
        if not hasattr(model, "config"):
            raise UserError(f"{pretrained}: lm-eval asks a model of transformers, which this is not")
        if tokenizer is None:
            raise UserError("lm-eval needs the model's tokenizer; pass it with the model")
        # HFLM takes a module as it is, on the device where it is: its own `device` option is for models that it loads
        # by name.
        super().__init__(pretrained=model if device is None else model.to(device), tokenizer=tokenizer, **options)
