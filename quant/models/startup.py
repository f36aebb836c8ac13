"""What a command does without torch and transformers, or while Python still imports them.

`read_ahead` brings the weight files of models into the page cache: a thread reads them and drops the bytes, the kernel
keeps them, and the loader then finds them in memory. POSIX_FADV_WILLNEED would not do: since 4.10 Linux reads no more
than one window of readahead for a call, about 1 MB.

`skip_image_packages` keeps transformers from importing packages of images and sounds for a model of text. transformers
imports whatever optional package is installed as soon as a model class is accessed: torchvision, which brings
torch._dynamo, takes 3.7 s on a machine with an H100, and scikit-learn with scipy 1.6 s. It remembers for the life of
the process that they are missing, so only a command that opens no other models does this. A user's own program may need
an image processor later, whose pixels differ between torchvision and PIL.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quant.base.errors import UserError, require
from quant.base.processor import memory_left
from quant.models.files import read_fields

_PACKAGES = ("torchvision", "sklearn", "scipy")
# Functions of transformers.utils.import_utils that look for them and remember the answer (5.17 to 5.24).
_PROBES = ("is_torchvision_available", "is_torchvision_v2_available", "is_sklearn_available", "is_scipy_available")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MEDIA = ("image", "vision", "visual", "video", "audio", "speech", "pixel", "mel_bins")


def skip_image_packages(*models: str | Path) -> bool:
    """Makes transformers treat these packages as not installed, if all `models` are text models; returns whether."""
    # A rank has imported torch to meet the others.
    imported = {"transformers"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {"torch", "transformers"}
    if imported & sys.modules.keys() or find_spec("transformers") is None:
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
    """Returns whether a directory holds a causal language model of only text, whose code is transformers' own."""
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


def _field_names(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        yield str(name)
        if isinstance(value, dict):
            yield from _field_names(value)


_CHUNK = 16 << 20  # bytes; so few calls that the thread seldom waits for the interpreter, which imports are using
_SHARE = 0.5  # of the memory that is left: a cache that is full drops what was read first


def read_ahead(*models: str | Path) -> threading.Thread | None:
    """Starts a thread that reads the weight files of models on the disk, in the order in which they are opened."""
    files = [file for model in models for file in files_to_read(Path(model).expanduser())]
    memory = memory_left()
    if not files or memory is None:
        return None
    thread = threading.Thread(target=_read, args=(files, int(_SHARE * memory)), name="read ahead", daemon=True)
    thread.start()
    return thread


def files_to_read(path: Path) -> list[Path]:
    """Returns the weight files that loading `path` will read, in that order."""
    if path.is_file():
        return [path]
    for pattern in ("model*.safetensors", "pytorch_model*.bin", "*/*.safetensors"):  # the last of a pipeline
        if files := sorted(file for file in path.glob(pattern) if file.is_file()):
            return files
    return []


def _read(files: Sequence[Path], limit: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                size = min(os.fstat(file.fileno()).st_size, limit)
                for offset in range(0, size, _CHUNK):
                    if not _is_cached(file.fileno(), offset, size):
                        file.seek(offset)
                        file.readinto(buffer[: min(_CHUNK, size - offset)])
        except OSError:  # the code that opens the file reports the error
            return
        limit -= size


def _is_cached(file: int, offset: int, size: int) -> bool:
    """Returns whether a chunk seems to be in the page cache: its first and its middle byte are."""
    nowait = getattr(os, "RWF_NOWAIT", None)  # Linux has it
    if nowait is None:
        return False
    try:
        middle = min(offset + _CHUNK // 2, size - 1)
        return all(os.preadv(file, [bytearray(1)], at, nowait) == 1 for at in (offset, middle))
    except OSError:  # it would have to wait, or the file system cannot say
        return False
