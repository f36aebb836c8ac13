"""Commands name models and texts on the command line; this file opens and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.api.load import can_run, load
from quant.calibration.inputs import Inputs
from quant.calibration.progress import Progress
from quant.calibration.texts.named_inputs import read_inputs
from quant.calibration.texts.rows import calibration_rows, token_rows
from quant.calibration_data import own_text
from quant.errors import UserError
from quant.evaluation import run_probe
from quant.models.files import find_model
from quant.models.open import Source, open_model
from quant.models.state_dict import call_factory
from quant.planning import make_plan
from quant.recipes.plan import Plan


def open_runnable(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a model that can run: a quantized checkpoint, or any model that `quantize` takes.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    path = find_model(name)
    if can_run(path):
        model = load(path, call_factory(model_factory) if model_factory else None)
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return Source(name=name, kind="huggingface", model=model, state_dict=None, path=path, dtype=dtype), model
    return open_original(name, model_factory=model_factory, unsafe_load=unsafe_load)


def open_original(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a model that can run, a quantized one dequantized.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    source = open_model(name, model_factory=model_factory, unsafe_load=unsafe_load)
    if source.model is None:
        raise UserError(f"{name}: a bare state dict cannot be run; pass --model-factory to build its module")
    return source, source.model


def tokenizer_if_any(source: Source) -> Any:
    """The model's tokenizer, or None."""
    try:
        return source.load_tokenizer()
    except UserError:
        return None


def read_texts(source: Source, texts: Iterable[Path], samples: int, seqlen: int) -> dict[str, torch.Tensor]:
    """Token rows `[samples, seqlen]` for a model by the name of each text; files of token ids need no tokenizer."""
    return {
        str(text): token_rows(text, _tokenizer_for(source, str(text)), samples=samples, seqlen=seqlen) for text in texts
    }


def named_inputs(source: Source, calib: str | None, samples: int) -> Inputs | None:
    """Inputs of --calib by name, or images; None where it names a text, or nothing."""
    if calib is None or calib == "self" or source.model is None:
        return None
    return read_inputs(calib, source.model, source.path if source.path and source.path.is_dir() else None, samples)


def read_calibration(
    source: Source,
    calib: str | None,
    *,
    samples: int,
    seqlen: int,
    seed: int,
    device: torch.device | None,
    progress: Progress,
    plan: Plan | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> torch.Tensor:
    """Token rows of --calib, or text that the model writes itself for `plan`; None stands for one yet to be found."""
    if calib is None or calib == "self":
        assert source.model is not None
        plan = plan or make_plan(source.model, "fp8", include=include, exclude=exclude)
        return own_text(source.model, plan, tokenizer_if_any(source), seed=seed, device=device, progress=progress)
    rows = calibration_rows(calib, _tokenizer_for(source, calib), samples=samples, seqlen=seqlen, seed=seed)
    if source.model is not None:
        try:
            run_probe(source.model, rows[:1, :2])
        except ValueError as error:
            raise UserError(
                f"--calib {calib}: {type(source.model).__name__} cannot be calibrated on text: {error}; give a "
                ".safetensors file of its inputs by name, a folder of images, or in Python data=, or choose a format "
                "that needs none, such as fp8_channel or mxfp8"
            ) from error
    return rows


def _tokenizer_for(source: Source, text: str) -> Any:
    is_ids = text.endswith(".safetensors") or ".safetensors:" in text
    return None if is_ids else source.load_tokenizer()
