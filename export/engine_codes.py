"""Finding a checkpoint's codes inside a built engine: proof that what the solver chose is what will run.

TensorRT stores the weights of a GEMM byte for byte, `[out, in]` or transposed, two 4-bit codes a byte with the even
index in the low nibble. Merged matrices (q, k and v) follow each other, whole or, where they are transposed, row by
row. So each layer's codes lie somewhere in the file as they are, and if a single one was changed on the way they do
not. One pass over the file finds the places where a word of any layer occurs; only those are compared in full.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_WORD = np.dtype("<u4")
_CHUNK = 1 << 24  # words
_MERGED = 16  # how many matrices of a layer's width may be merged into one


def held_codes(engine: str | Path, codes: Mapping[str, np.ndarray], bits: Mapping[str, int]) -> dict[str, bool]:
    """Whether the engine holds each layer's codes.

    Args:
        engine: a serialized engine.
        codes: stored bytes by layer, uint8 `[out, in]`, or `[out, in / 2]` where two codes share a byte. Arrays that
            are mapped from a file stay there: one layer at a time is read.
        bits: bits of a code by layer, 4 or 8.
    """
    held = dict.fromkeys(codes, False)
    by_word: dict[int, list[tuple[str, int, int]]] = {}
    for name, array in codes.items():
        for index, layout in enumerate(_layouts(array, bits[name])):
            word, offset = _rare_word(layout)
            by_word.setdefault(word, []).append((name, index, offset))
    words = np.array(sorted(by_word), dtype=_WORD)
    with Path(engine).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        for place, word in _places(blob, words):
            for name, index, offset in by_word[word]:
                start = place - offset
                if not held[name] and start >= 0:
                    held[name] = _lies_at(blob, start, _layouts(codes[name], bits[name])[index])
    return held


def _lies_at(blob: mmap.mmap, start: int, layout: np.ndarray) -> bool:
    """Whether the rows of `layout` lie at `start`, one after the other or at equal distances."""
    rows, width = layout.shape
    if blob[start : start + width] != layout[0].tobytes():
        return False
    second = blob.find(layout[1].tobytes(), start + width, start + _MERGED * width) if rows > 1 else start + width
    stride = second - start
    if second < 0 or start + (rows - 1) * stride + width > len(blob):
        return False
    found = np.frombuffer(blob[start : start + (rows - 1) * stride + width] + bytes(stride - width), np.uint8)
    return bool((found.reshape(rows, stride)[:, :width] == layout).all())


def _places(blob: mmap.mmap, words: np.ndarray) -> list[tuple[int, int]]:
    """Byte offset and value of every aligned word of the file that is one of `words`."""
    found = []
    for start in range(0, len(blob) // 4, _CHUNK):
        stop = min(start + _CHUNK, len(blob) // 4)
        chunk = np.frombuffer(blob[4 * start : 4 * stop], _WORD)
        for hit in np.flatnonzero(np.isin(chunk, words)):
            found.append((4 * (start + int(hit)), int(chunk[hit])))
    return found


def _layouts(array: np.ndarray, bits: int) -> list[np.ndarray]:
    """The codes as they are, and transposed."""
    array = np.ascontiguousarray(array)
    if bits == 8:
        return [array, np.ascontiguousarray(array.T)]
    wide = np.empty((array.shape[0], 2 * array.shape[1]), np.uint8)
    wide[:, 0::2], wide[:, 1::2] = array & 15, array >> 4
    turned = np.ascontiguousarray(wide.T)
    if turned.shape[1] % 2:
        return [array]
    return [array, turned[:, 0::2] | (turned[:, 1::2] << 4)]


def _rare_word(layout: np.ndarray) -> tuple[int, int]:
    """An aligned word of the first row with as many different bytes as any there, and its offset."""
    data = layout[0, :4096]
    words = data[: data.size // 4 * 4].reshape(-1, 4)
    ordered = np.sort(words, axis=1)
    best = int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).argmax())
    return int(np.ascontiguousarray(words[best]).view(_WORD)[0]), 4 * best
