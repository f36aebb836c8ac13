"""`read_inputs` reads calibration inputs of models that take more than tokens: named tensors, or images in a folder.

    inputs.safetensors   one tensor for each argument of the model (`pixel_values`, `decoder_input_ids`, …), a row each
    photos/              images, prepared by the model's own processor; `cat.txt` beside `cat.png` is the text with it

A file with token ids alone is none of these: its rows are cut by `token_rows`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quant.calibration.inputs import Inputs, inputs_of

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_CAPTION = "a photo"


def read_inputs(source: str | Path, model: nn.Module, directory: Path | None, samples: int) -> Inputs | None:
    """The first `samples` inputs of a file or folder; None where it is something else, such as a text.

    Args:
        source: as in the module docstring.
        model: is called with them.
        directory: of the model, with its processor; None where it has none.
        samples: calls that are wanted.

    Raises:
        ValueError: there are fewer, or they do not fit the model; the message names the file.
    """
    path = Path(source)
    if path.is_dir() and (images := sorted(f for f in path.iterdir() if f.suffix.lower() in IMAGES)):
        found = _from_images(images[:samples], model, directory)
    elif path.suffix == ".safetensors" and path.is_file() and (named := _named(path, model)):
        found = inputs_of({name: tensor[:samples] for name, tensor in named.items()}, model)
    else:
        return None
    if len(found) < samples:
        raise ValueError(f"{path}: holds {len(found)} inputs, and {samples} are wanted; give more, or lower samples")
    return found


def _named(path: Path, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """The tensors of a file that is made of a model's arguments; None where it holds token ids alone."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None
    taken = set(inspect.signature(model.forward).parameters)
    known = set(tensors) & taken
    if not known or (len(tensors) == 1 and not next(iter(tensors.values())).is_floating_point()):
        return None
    if known != set(tensors):
        unknown = ", ".join(sorted(set(tensors) - known))
        raise ValueError(f"{path}: {type(model).__name__} takes no {unknown}; name tensors by its arguments")
    return tensors


def _from_images(files: list[Path], model: nn.Module, directory: Path | None) -> Inputs:
    """A call for each image, as the model's processor prepares it."""
    try:
        from PIL import Image
        from transformers import AutoProcessor
    except ImportError as error:
        raise ValueError(f"{files[0]}: images take the packages transformers and pillow: {error}") from None
    if directory is None:
        raise ValueError(f"{files[0]}: no processor comes with this model; give prepared inputs as .safetensors")
    try:
        processor: Any = AutoProcessor.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{directory}: no usable processor ({reason}); put its preprocessor_config.json there"
        ) from None
    taken = set(inspect.signature(model.forward).parameters)
    calls = []
    for file in files:
        given: dict[str, Any] = {"images": Image.open(file).convert("RGB"), "return_tensors": "pt"}
        if hasattr(processor, "tokenizer"):
            caption = file.with_suffix(".txt")
            given["text"] = caption.read_text(encoding="utf-8").strip() if caption.is_file() else _CAPTION
        prepared = processor(**given)
        calls.append({name: value for name, value in prepared.items() if name in taken})
    return inputs_of(calls, model)
