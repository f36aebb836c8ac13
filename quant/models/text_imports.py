"""`skip_image_packages` keeps transformers from importing packages of images and sounds for a model of text.

transformers imports whatever optional package is installed as soon as a model class is accessed: torchvision, which
brings torch._dynamo, takes 3.7 s on a machine with an H100, and scikit-learn with scipy 1.6 s. They are for images, for
the losses of object detection, and for assisted generation, none that a command needs for a model of text.

transformers remembers for the life of the process that they are missing, so only a command that opens no other models
does this. A user's own program may need an image processor later, whose pixels differ between torchvision and PIL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quant.base.errors import UserError
from quant.base.extras import require
from quant.models.configs import read_fields

_PACKAGES = ("torchvision", "sklearn", "scipy")
# Functions of transformers.utils.import_utils that look for them and remember the answer (5.10 to 5.24).
_PROBES = ("is_torchvision_available", "is_torchvision_v2_available", "is_sklearn_available", "is_scipy_available")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MEDIA = ("image", "vision", "visual", "video", "audio", "speech", "pixel", "mel_bins")


def skip_image_packages(*models: str | Path) -> bool:
    """Makes transformers treat these packages as not installed, if all `models` are text models.

    A process that has loaded torch or transformers already is left as it is: it is not a command's own.

    Returns:
        Whether it has done so.
    """
    if {"torch", "transformers"} & sys.modules.keys() or find_spec("transformers") is None:
        return False
    if not all(is_text_model(Path(model).expanduser()) for model in models):
        return False
    hidden = [name for name in _PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # find_spec answers None for a None in there
    try:
        import_utils = require("transformers.utils.import_utils", "hf")
        for probe in _PROBES:
            getattr(import_utils, probe, bool)()
    finally:
        for name in hidden:
            del sys.modules[name]
    return True


def is_text_model(directory: Path) -> bool:
    """Returns whether a directory holds a causal language model of only text, whose code is transformers' own.

    False for a config that cannot be read: the loader's message names the reason.
    """
    if not (directory / "config.json").is_file() or any((directory / name).exists() for name in _PROCESSOR_FILES):
        return False
    try:
        config = read_fields(directory / "config.json")
    except UserError:
        return False
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or "auto_map" in config:
        return False
    if not all(isinstance(name, str) and name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return False
    return not any(word in name for name in _field_names(config) for word in _MEDIA)


def _field_names(fields: Any) -> Iterator[str]:
    """Yields the names of the fields of a config, and of the configs in it."""
    remaining = [fields]  # no recursion, which a file of nested brackets could exhaust
    while remaining:
        current = remaining.pop()
        if isinstance(current, dict):
            yield from map(str, current)
            remaining += current.values()
