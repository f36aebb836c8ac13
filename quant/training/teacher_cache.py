"""A teacher's likeliest tokens are kept in a file, so that a student trains without the teacher in memory.

    cache_teacher(teacher, rows, "teacher.safetensors", k=64)

    rows       int32 [rows, seqlen]       the token ids that the teacher read
    tokens     int32 [rows, seqlen, k]    its k likeliest next tokens at each position
    logp       float32, of that shape     their log-probabilities at the temperature that the file's metadata names

A row of 512 tokens takes 262 kB at k = 64.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quant.base.atomic import claimed
from quant.base.errors import UserError
from quant.calibration.evaluating import evaluating
from quant.calibration.outputs.logits import logits_of
from quant.calibration.placement import device_of
from quant.training.kl import TopTeacher

# In the metadata of the file, by which `is_cached_teacher` recognises it among safetensors files.
_KIND = "blockscale teacher"


def cache_teacher(
    teacher: nn.Module,
    rows: torch.Tensor,
    path: str | Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the teacher's `k` likeliest next tokens at each position of `rows`.

    Args:
        teacher: a causal language model in any precision.
        rows: token ids, int64 `[rows, seqlen]`; where they are padded, on the right.
        path: file to write; it appears when it is whole.
        k: tokens a position.
        temperature: the temperature that the student will be trained with.
        progress: a function that is called with (rows done, rows in all).

    Raises:
        UserError: `k` is below 1 or beyond the vocabulary, or the temperature is not above 0.
    """
    if temperature <= 0:
        raise UserError(f"temperature is {temperature}; expected a number above 0")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens, logps, vocabulary = [], [], 0
    with evaluating(teacher):
        for index, row in enumerate(rows, 1):
            with torch.no_grad():
                logits = logits_of(teacher, row[None].to(device_of(teacher)))[0].float()
            if not 0 < k <= logits.shape[-1]:
                raise UserError(f"k is {k}; expected 1 to {logits.shape[-1]:,}, the teacher's vocabulary")
            vocabulary = logits.shape[-1]
            # At the temperature of training: probabilities of the tokens that are dropped cannot be recomputed later.
            top, which = (logits / temperature).log_softmax(dim=-1).topk(k)
            tokens.append(which.int().cpu())
            logps.append(top.cpu())
            if progress is not None:
                progress(index, len(rows))
    tensors = {"rows": rows.int().contiguous(), "tokens": torch.stack(tokens), "logp": torch.stack(logps)}
    metadata = {
        "kind": _KIND, "temperature": repr(float(temperature)), "rows": _digest(rows), "vocabulary": str(vocabulary)
    }  # fmt: skip
    with claimed(path):
        temporary = path.with_name(f".{path.name}.partial")
        save_file(tensors, temporary, metadata)
        # A rename on one file system is atomic: every reader of `path` sees the old file or the whole new one.
        temporary.replace(path)


@dataclass(frozen=True, eq=False)
class CachedTeacher:
    """The teacher of a file that `cache_teacher` wrote; its tensors are mapped, and read row by row."""

    path: Path
    rows: torch.Tensor  # token ids, int64 `[rows, seqlen]`
    temperature: float  # of its log-probabilities
    vocabulary: int  # tokens that the teacher knows
    _tokens: torch.Tensor
    _logp: torch.Tensor
    _index: dict[str, int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CachedTeacher:
        """Opens a file; UserError if it is not one of `cache_teacher`."""
        path = Path(path)
        if path.is_dir():
            raise UserError(
                f"{path}: a directory, and no file of cache_teacher; pass its model: open_model({str(path)!r}).model"
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != _KIND:
                    raise UserError(
                        f"{path}: holds no cached teacher; write one with cache_teacher of quant.training.teacher_cache"
                    )
                tensors = {name: file.get_tensor(name) for name in ("rows", "tokens", "logp")}
                temperature, vocabulary = float(metadata["temperature"]), int(metadata["vocabulary"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a cached teacher: {error}") from None
        rows, tokens, logp = tensors.values()
        if (
            (rows.dim(), tokens.dim()) != (2, 3) or not tokens.shape == logp.shape == (*rows.shape, tokens.shape[-1])
            or {rows.dtype, tokens.dtype} != {torch.int32} or logp.dtype is not torch.float32
            or metadata.get("rows") != _digest(rows)
        ):  # fmt: skip
            raise UserError(f"{path}: its tensors are not as cache_teacher wrote them; write it again")
        rows = rows.long()
        # Batches are looked up by the rows' contents, so a Trainer may shuffle them.
        index = {_digest(row): index for index, row in enumerate(rows)}
        return cls(path, rows, temperature, vocabulary, tokens, logp, index)

    def of(self, batch: torch.Tensor, temperature: float) -> TopTeacher:
        """Returns the teacher's next tokens for a batch of its rows, int64 `[n, seqlen]`, in any order.

        Raises:
            UserError: another temperature, a row that the teacher has not read, or a damaged file.
        """
        if temperature != self.temperature:
            raise UserError(
                f"{self.path}: cached at temperature {self.temperature:g}, and {temperature:g} is requested; train at "
                "that, or cache again"
            )
        indices = [self._index.get(_digest(row)) for row in batch.cpu()]
        if None in indices:
            raise UserError(
                f"{self.path}: row {indices.index(None)} of the batch is not among the {len(self.rows)} rows that the "
                "teacher has read; train on the rows of the cache, cut and padded as they are"
            )
        index = torch.tensor(indices, device="cpu")
        tokens, logp = self._tokens[index].flatten(0, 1), self._logp[index].flatten(0, 1)
        if bool((tokens < 0).any()) or not bool((logp <= 0).all()):
            raise UserError(f"{self.path}: holds tokens or probabilities that no teacher gives; write it again")
        return TopTeacher(tokens, logp, f"{self.path}: the cached teacher", self.vocabulary)


def is_cached_teacher(path: str | Path) -> bool:
    """Returns whether `path` is a file that `cache_teacher` wrote."""
    if not Path(path).is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("kind") == _KIND
    except (OSError, SafetensorError):
        return False


def _digest(rows: torch.Tensor) -> str:
    # int32 in any case: rows come as int64 from the caller and as int32 from the file, and must have one digest.
    return hashlib.sha256(rows.cpu().int().contiguous().numpy().tobytes()).hexdigest()
