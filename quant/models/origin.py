"""`origin_of` finds the directory that a model in memory was loaded from, whose files go along with a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from quant.base.errors import UserError
from quant.models.configs import read_fields
from quant.models.files import find_model
from quant.models.hub import cached_snapshot


def origin_of(model: Any) -> Path | None:
    """Returns the directory with the config.json from which transformers loaded a model.

    None where there is none any more.
    """
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    # transformers notes the name or path here. Configs of other libraries may use the attribute for anything, and a
    # model of transformers cannot exist while the library is not loaded.
    if not isinstance(name, str) or not name or "transformers" not in sys.modules:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name)
    # At the commit that was loaded: the branch may have moved since, and have other files.
    return cached_snapshot(name, getattr(config, "_commit_hash", None))


def source_directory(model: Any, source: str | Path | None = None) -> Path | None:
    """Returns the directory of the model that a checkpoint is made from.

    Args:
        model: a model of transformers; for any other module the answer is None.
        source: the directory, or its name on the Hugging Face hub; None takes the one that the model came from, if it
            is there and describes this very class.

    Raises:
        UserError: `source` is not a directory of this model.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return None
    if source is None:
        return described_by(model, origin_of(model))
    directory = find_model(str(source))
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: no config.json; give the directory of the original model as source")
    if (difference := difference_of_class(model, directory)) is not None:
        raise UserError(f"{directory}: {difference}; give the directory that the model was loaded from as source")
    return directory


def described_by(model: Any, directory: Path | None) -> Path | None:
    """Returns `directory`, if its config.json describes the model."""
    return directory if directory is not None and difference_of_class(model, directory) is None else None


def difference_of_class(model: Any, directory: Path) -> str | None:
    """Returns why config.json of a directory does not describe a model: another architecture or class.

    None where it does.

    A text model that was taken out of one with images has other names of tensors and another config.
    """
    fields = read_fields(directory / "config.json")
    names, own = fields.get("architectures") or [type(model).__name__], type(model).__name__
    if fields.get("model_type") != getattr(model.config, "model_type", None):
        return f"its config.json is of a {fields.get('model_type')}, and the model a {model.config.model_type}"
    return None if own in names else f"its config.json is of a {names[0]}, and the model a {own}"
