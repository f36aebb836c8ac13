"""A model on the Hugging Face hub is named `org/name`, or `org/name@revision`, and read as the snapshot of one commit.

huggingface_hub downloads files that are not in its cache yet, and honours its own switches (HF_HUB_OFFLINE,
HF_HUB_CACHE, HF_ENDPOINT, tokens). A name is looked up once a process, so that a branch that moves during the run
cannot mix two commits. Of the repository's files a model has:

    *.safetensors, or else *.bin, of the top folder     its weights; `consolidated*` are the same weights again
    files without weights (`companion_names`)           config, tokenizer, templates, licence, code, which is not run
    1_Pooling/, adapters                                parts of the model, with their weights
    onnx/, original/, checkpoint-500/                   other models, or this one in another form; left out
"""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from quant.base.errors import UserError
from quant.base.extras import require

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth", ".bin", ".pt2")
"""Suffixes of files that hold a model, which commands open."""
# Suffixes of files with weights: of other libraries and of trainers too.
_WEIGHTS = {
    *SUFFIXES, ".ckpt", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".safetensors", ".tflite",
}  # fmt: skip
# Files that say how weights are stored or quantized; a checkpoint has its own.
_OF_WEIGHTS = {
    "config.json", "hf_quant_config.json", "plan.json", "quant_config.json", "quantize_config.json", "receipt.json",
    "recipe.yaml", "report.html", "report.json", "SHA256SUMS",
}  # fmt: skip
_ANSWERS = {"GatedRepoError", "RevisionNotFoundError", "RepositoryNotFoundError"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def split_revision(name: str) -> tuple[str, str | None] | None:
    """Returns the name and revision that `org/name@revision` stands for; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def snapshot(name: str, revision: str | None = None) -> Path:
    """Returns the directory of a model of the hub, downloaded as far as it is not in the cache.

    Raises:
        UserError: it is not there; the message names the way out.
    """
    return _snapshot(name, revision)


def commit_of(path: Path | None) -> str | None:
    """Returns the commit that a directory of the hub's cache holds; None for any other directory."""
    # The hub's cache has models--org--name/snapshots/COMMIT/, with links to ../../blobs.
    is_commit = path is not None and path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if path is not None and is_commit else None


def hub_name(path: Path) -> str | None:
    """Returns the name `org/name` of the model that a directory of the hub's cache holds.

    None for any other directory.
    """
    if commit_of(path) is None:
        return None
    kind, _, name = path.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if kind == "models" and "--" in name else None


def cached_snapshot(name: str, commit: str | None) -> Path | None:
    """Returns the directory of a model that is in the hub's cache, at a commit; None where it is not there."""
    if split_revision(name) is None:
        return None
    hub = require("huggingface_hub", "hf")
    file = hub.try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(file).parent if isinstance(file, str) else None


@cache
def _snapshot(name: str, revision: str | None) -> Path:
    option = "" if revision is None or _COMMIT.fullmatch(revision) else f" --revision {revision}"
    folder = name.rpartition("/")[2]
    try:
        hub = require("huggingface_hub", "hf")
        tqdm = require("huggingface_hub.utils", "hf")
        shown = not tqdm.are_progress_bars_disabled()
        # Progress bars redraw their line, which fills a log file with thousands of them.
        if not sys.stderr.isatty():
            tqdm.disable_progress_bars()
        try:
            return Path(_download(hub, name, revision))
        finally:
            if shown:
                tqdm.enable_progress_bars()
    except Exception as error:  # the network, the hub, the disk, a missing package: all have one way out
        raise UserError(
            f"{name}: no such file or directory, and nothing is downloaded: {_why(error, name, revision)}; if it is a "
            f"model on the Hugging Face hub: hf download {name}{option} --local-dir {folder}, then pass {folder}"
        ) from error


def _download(hub: Any, name: str, revision: str | None) -> str:
    """Returns the folder of a repository's files that are the model."""
    try:
        about = hub.HfApi().model_info(name, revision=revision)
    except Exception as error:
        if _kinds(error) & _ANSWERS:
            raise
        # Without a network the cache may have the model; `snapshot_download` says if not.
        return str(hub.snapshot_download(name, revision=revision, local_files_only=True))
    # From here on by the commit, because a branch may move.
    revision, names = about.sha, [file.rfilename for file in about.siblings]
    parts = set()
    if "modules.json" in names:
        parts = listed_modules(Path(hub.hf_hub_download(name, "modules.json", revision=revision)))
    patterns = [glob.escape(each) for each in _files_of_model(names, parts)]
    return str(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))


def _files_of_model(names: Collection[str], parts: Collection[str]) -> list[str]:
    """Returns the files of a repository that are the model: its weights in one form, and everything else."""
    top = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    suffix = ".safetensors" if any(name.endswith(".safetensors") for name in top) else ".bin"
    weights = [name for name in top if name.endswith((suffix, f"{suffix}.index.json"))]
    return [*weights, *(name for name in top if name in _OF_WEIGHTS), *companion_names(names, parts)]


def companion_names(names: Iterable[str], parts: Collection[str]) -> list[str]:
    """Returns the names of a model's files besides weights and config, as `companion_files` describes them.

    Args:
        names: the names of all files of the model's directory, relative to it, with `/` between folders.
        parts: folders that modules.json lists.
    """
    visible = {name: _folders(name) for name in names if not any(map(_is_hidden, name.split("/")))}
    folders = {folder for above in visible.values() for folder in above}
    whole = {folder for folder in folders if folder in parts or f"{folder}/adapter_config.json" in visible}
    with_weights = {folder for name, above in visible.items() if has_weights(name) for folder in above}
    companions = []
    for name, above in visible.items():
        # From the top down, the first folder that is a part, or another model, decides for everything in it.
        deciding = next((folder for folder in above if folder in whole or folder in with_weights), None)
        if deciding in whole or (deciding is None and not has_weights(name) and name not in _OF_WEIGHTS):
            companions.append(name)
    return sorted(companions)


def _folders(name: str) -> list[str]:
    """Returns `a`, `a/b` for `a/b/c.txt`."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _is_hidden(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


def has_weights(name: str) -> bool:
    """Returns whether a file holds weights, or lists the files that do."""
    return PurePosixPath(name).suffix.lower() in _WEIGHTS or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def listed_modules(file: Path) -> set[str]:
    """Returns the folders of the layers that sentence-transformers puts behind a model: `1_Pooling`, `2_Dense`.

    Args:
        file: modules.json, which may be missing or another program's.
    """
    try:
        return {str(module["path"]) for module in json.loads(file.read_bytes()) if module.get("path")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()


def _kinds(error: Exception) -> set[str]:
    """Returns the names of an exception's classes: huggingface_hub's are recognized without importing it."""
    return {kind.__name__ for kind in type(error).__mro__}


def _why(error: Exception, name: str, revision: str | None) -> str:
    """Returns why there is no snapshot, in words."""
    kinds = _kinds(error)
    if "GatedRepoError" in kinds:
        return f"accept its terms on https://huggingface.co/{name}, and log in with hf auth login"
    if "RevisionNotFoundError" in kinds:
        return f"the Hugging Face hub has no revision {revision} of it"
    if "RepositoryNotFoundError" in kinds:
        return "the Hugging Face hub has no such model, or a private one (hf auth login)"
    if "LocalEntryNotFoundError" in kinds:
        constants = require("huggingface_hub.constants", "hf")
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
        return f"{offline}, and the model{f' at {revision}' if revision else ''} is not whole in the cache"
    return " ".join(str(error).split()) or type(error).__name__
