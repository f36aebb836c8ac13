"""Text that a model wrote is cached for later runs, whatever their `--out`.

Writing takes minutes on a CPU, and is deterministic: the same model, tokenizer, shape, seed, versions and kind of
device give the same rows. They are the cache's key, a SHA-256, so that a run reads exactly the rows that it would have
written. Of the weights, pieces that are spread over each file are hashed, together with its size and the time of its
last change.

Only models that transformers builds from files are cached: a module in memory may have been trained, and the code of a
`--model-factory` may have changed. Files lie in `$BLOCKSCALE_CACHE`, by default `$XDG_CACHE_HOME/blockscale` or
`~/.cache/blockscale`; `BLOCKSCALE_CACHE=off` turns the cache off.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quant.calibration.session import Session
from quant.calibration.texts.mixture import Record, rows_hash
from quant.base.extras import versions
from quant.base.atomic import write_atomically
from quant.models.files import SourceKind
from quant.models.open_model import Source
from quant.models.watched_files import spot_hash
from quant.recipes.json_text import json_text

VARIABLE = "BLOCKSCALE_CACHE"
_MOST_FILES = 64  # of about 130 kB each; the oldest go first
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class TextCache:
    """The place of one text in the cache.

    Attributes:
        path: its file, which may not exist yet.
    """

    path: Path

    @classmethod
    def of(cls, source: Source, session: Session, shape: dict[str, Any]) -> TextCache | None:
        """Returns the place of the text that a model writes; None where such a text is not cached.

        Args:
            source: the model.
            session: its seed and its device decide the text too.
            shape: everything else that decides it: rows, tokens, and whether samples are mixed in.
        """
        directory, files = _directory(), source.files.files
        is_built_from_files = source.kind in (SourceKind.HUGGINGFACE, SourceKind.GGUF) and bool(files)
        # Other classes come from a factory or from the model's own Python files.
        is_known_class = type(source.model).__module__.startswith("transformers.")
        if directory is None or not (is_built_from_files and is_known_class):
            return None
        depends = {
            "files": source.files.fingerprints(),
            "weights": {file.name: spot_hash(file) for file in files},
            "tokenizer": _hashes_of_tokenizer(source.path),
            "dtype": str(source.dtype),
            "shape": shape,
            "seed": session.seed,
            "versions": versions(),
            "device": _kind_of(session.device),
        }
        return cls(directory / "texts" / f"{hashlib.sha256(json_text(depends).encode()).hexdigest()}.safetensors")

    def read(self) -> tuple[torch.Tensor, Record] | None:
        """Returns the rows, int64 `[samples, seqlen]`, and their record; None where there are none, or damaged ones."""
        try:
            with safe_open(self.path, "pt") as file:
                rows, record = file.get_tensor("rows"), json.loads(file.metadata()["record"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        is_whole = isinstance(record, dict) and record.get("sha256") == rows_hash(rows)
        return (rows, record) if is_whole else None

    def write(self, rows: torch.Tensor, record: Record) -> None:
        """Keeps rows and their record. A directory that cannot be written to costs later runs time, and no result."""
        try:
            write_atomically(self.path, save({"rows": rows.contiguous()}, metadata={"record": json_text(record)}))
            by_age = sorted(self.path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for file in by_age[:-_MOST_FILES]:
                file.unlink(missing_ok=True)
        except OSError:
            return


def _directory() -> Path | None:
    """Returns the directory of the cache; None where it is turned off, or where the user has no home."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return None if chosen.lower() in ("", "0", "off") else Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"
    except RuntimeError:
        return None


def _kind_of(device: torch.device | None) -> str:
    """Returns the kind of a device. On another kind sums round differently, and then another token is drawn."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Several machines may share a home: the vector instructions decide in which order a CPU adds.
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _hashes_of_tokenizer(path: Path | None) -> dict[str, str]:
    """Returns the hash of each small file beside the weights: tokenizer, chat template, generation config."""
    if path is None or not path.is_dir():
        return {}  # the tokenizer of a GGUF is in its header
    names = sorted(file for file in path.iterdir() if file.suffix in _TOKENIZER_FILES and file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in names}
