"""A model on the Hugging Face hub is named `org/name`, or `org/name@revision`, and read as the snapshot of one commit.

huggingface_hub downloads files that are not in its cache yet, and honours its own switches (HF_HUB_OFFLINE,
HF_HUB_CACHE, HF_ENDPOINT, tokens). Fetched are the weights as safetensors, configs, tokenizer and processor files of
the top folder; pickles only where there are no safetensors, and Python files only where they may run. A name is looked
up once a process, so that a branch that moves meanwhile cannot mix two commits.
"""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from quant.errors import UserError
from quant.extras import require

TRUSTED = ContextVar("TRUSTED", default=False)
"""Whether Python files of a model may run, which `huggingface.remote_code` sets."""

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_PICKLES = ["*.bin"]
# Folders hold other forms of the same weights, and `consolidated` files do so in the top folder.
_IGNORED = ["consolidated*", *(f"*/*{kind}" for kind in (".safetensors", ".bin", ".json", ".model", ".txt", ".py"))]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def split_revision(name: str) -> tuple[str, str | None] | None:
    """Name and revision that `org/name@revision` stands for; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def snapshot(name: str, revision: str | None = None) -> Path:
    """The directory of a model of the hub, downloaded as far as it is not in the cache.

    Raises:
        UserError: it is not there; the message names the way out.
    """
    return _snapshot(name, revision, TRUSTED.get())


def commit_of(path: Path | None) -> str | None:
    """The commit that a directory of the hub's cache holds; None for any other directory."""
    # The hub's cache has models--org--name/snapshots/COMMIT/, with links to ../../blobs.
    is_commit = path is not None and path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if path is not None and is_commit else None


def cached_snapshot(name: str, commit: str | None) -> Path | None:
    """The directory of a model that is in the hub's cache, at a commit; None where it is not there."""
    if split_revision(name) is None:
        return None
    hub = require("huggingface_hub", "hf")
    file = hub.try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(file).parent if isinstance(file, str) else None


@cache
def _snapshot(name: str, revision: str | None, trusted: bool) -> Path:
    patterns = [*_FILES, *(["*.py"] if trusted else [])]
    # `trusted` is part of the cache's key: a later call that may run Python files downloads them.
    path = _download(name, revision, patterns)
    if any(path.glob("*.safetensors")):
        return path
    # The folder is named after the commit, so that the pickles are of the same one even if the branch has moved.
    return _download(name, path.name, [*patterns, *_PICKLES])


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    asked = "" if revision is None or _COMMIT.fullmatch(revision) else f" --revision {revision}"
    folder = name.rpartition("/")[2]
    try:
        hub = require("huggingface_hub", "hf")
        tqdm = require("huggingface_hub.utils", "hf")
        shown = not tqdm.are_progress_bars_disabled()
        # Progress bars redraw their line, which fills a log file with thousands of them.
        if not sys.stderr.isatty():
            tqdm.disable_progress_bars()
        try:
            return Path(
                hub.snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
            )
        finally:
            if shown:
                tqdm.enable_progress_bars()
    except Exception as error:  # the network, the hub, the disk, a missing package: all have one way out
        raise UserError(
            f"{name}: no such file or directory, and nothing is downloaded: {_why(error, name, revision)}; if it is a "
            f"model on the Hugging Face hub: hf download {name}{asked} --local-dir {folder}, then pass {folder}"
        ) from error


def _why(error: Exception, name: str, revision: str | None) -> str:
    """Why there is no snapshot, in words."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
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
