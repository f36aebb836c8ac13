"""`open_runnable` opens a model that can run: a quantized checkpoint, or any original that `quantize` takes."""

from __future__ import annotations

import torch
from torch import nn

from quant.export.checkpoint.load import can_run, load
from quant.base.errors import UserError
from quant.models.files import SourceKind, find_model
from quant.models.open_model import Source, open_model
from quant.models.state_dict import call_factory


def open_runnable(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a quantized checkpoint as it is, or any other model.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    path = find_model(name)
    # A checkpoint in codes that no kernel here runs, such as GPTQ's or AWQ's, is dequantized by `open_original`.
    if can_run(path):
        model = load(path, call_factory(model_factory) if model_factory else None)
        # Codes are buffers. The first parameter, an embedding or a norm, has the dtype that the model runs in.
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return Source(
            name=name, kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=path, dtype=dtype
        ), model
    return open_original(name, model_factory=model_factory, unsafe_load=unsafe_load)


def open_original(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a model that can run; a quantized one is dequantized.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    source = open_model(name, model_factory=model_factory, unsafe_load=unsafe_load)
    if source.model is None:
        raise UserError(f"{name}: a bare state dict cannot be run; pass --model-factory to build its module")
    return source, source.model
