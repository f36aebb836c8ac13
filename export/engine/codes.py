"""Finds a checkpoint's codes inside a built engine, as proof that the engine runs the weights of the solver.

TensorRT stores the weights of a GEMM byte for byte, `[out, in]` or transposed, two 4-bit codes per byte with the even
index in the low nibble. Merged matrices (q, k and v) follow each other, whole or, if they are transposed, row by row:

    q[0] q[1] … k[0] k[1] … v[0] v[1] …         or transposed        q[0] k[0] v[0] q[1] k[1] v[1] …

So each layer's codes lie somewhere in the file, unless one was changed. One pass over the file finds the offsets at
which a rare word of any layer occurs; only there the codes are compared in full.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quant.export.engine.graph import load_graph, require

# The search compares aligned words: an engine stores constants at multiples of four bytes.
_WORD = np.dtype("<u4")
_CHUNK = 1 << 22  # words
_CODES = ".codes"
_CODE_BITS = {"FLOAT4E2M1": 4, "INT4": 4, "FLOAT8E4M3FN": 8, "INT8": 8}
_MERGED = 16  # how many matrices of a layer's width may be merged into one


def held_codes(engine: str | Path, codes: Mapping[str, np.ndarray], bits: Mapping[str, int]) -> dict[str, bool]:
    """Whether the engine holds each layer's codes.

    Args:
        engine: a serialized engine.
        codes: stored bytes by layer, uint8 `[out, in]`, or `[out, in / 2]` with two codes per byte; arrays that are
            mapped from a file are read one layer at a time.
        bits: bits of a code by layer, 4 or 8.
    """
    # By word: the layers that have it, in which layout (0 as stored, 1 transposed), and at which offset of the start.
    held = dict.fromkeys(codes, False)
    by_word: dict[int, list[tuple[str, int, int]]] = {}
    for name, array in codes.items():
        for index, head in enumerate(_heads(array, bits[name])):
            word, offset = _rare_word(head)
            by_word.setdefault(word, []).append((name, index, offset))
    with Path(engine).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        for position, word in _word_positions(blob, by_word.keys()):
            for name, index, offset in by_word[word]:
                start = position - offset
                begin = _heads(codes[name], bits[name])[index].tobytes()
                if not held[name] and start >= 0 and blob[start : start + len(begin)] == begin:
                    held[name] = _lies_at(blob, start, _layouts(codes[name], bits[name])[index])
    return held


def stored_codes(onnx_path: Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Stored bytes of each quantized linear of an exported file, as uint8 `[out, …]`, and bits of a code."""
    model = load_graph(onnx_path)
    names = require("onnx").TensorProto.DataType
    codes, bits = {}, {}
    for tensor in model.graph.initializer:
        width = _CODE_BITS.get(names.Name(tensor.data_type))
        if width and tensor.name.endswith(_CODES) and len(tensor.dims) == 2:
            layer = tensor.name.removesuffix(_CODES)
            codes[layer] = _bytes_of(tensor, onnx_path.parent).reshape(tensor.dims[0], -1)
            bits[layer] = width
    return codes, bits


def _bytes_of(tensor: Any, folder: Path) -> np.ndarray:
    """The data of an initializer; those in a file of their own are mapped, not read."""
    external = {entry.key: entry.value for entry in tensor.external_data}
    if not external:
        return np.frombuffer(tensor.raw_data, np.uint8)
    start, length = int(external.get("offset", 0)), int(external["length"])
    return np.memmap(folder / external["location"], np.uint8, "r", start, (length,))


def _lies_at(blob: mmap.mmap, start: int, layout: np.ndarray) -> bool:
    """Whether the rows of `layout`, whose first lies at `start`, follow one after the other or at equal distances."""
    # All rows are as far apart as the first two: by the width, or by the sum of the merged matrices' widths.
    rows, width = layout.shape
    second = blob.find(layout[1].tobytes(), start + width, start + _MERGED * width) if rows > 1 else start + width
    stride = second - start
    if second < 0 or start + (rows - 1) * stride + width > len(blob):
        return False
    stored = np.frombuffer(blob[start : start + (rows - 1) * stride + width] + bytes(stride - width), np.uint8)
    return bool((stored.reshape(rows, stride)[:, :width] == layout).all())


def _word_positions(blob: mmap.mmap, words: Collection[int]) -> Iterator[tuple[int, int]]:
    """Byte offset and value of every aligned word of the file that is one of `words`."""
    # Looking up half a word in a table of all halves is many times faster than a search among the words.
    table = np.zeros(1 << 16, bool)
    table[[word & 0xFFFF for word in words]] = True
    for start in range(0, len(blob) // 4, _CHUNK):
        stop = min(start + _CHUNK, len(blob) // 4)
        chunk = np.frombuffer(blob[4 * start : 4 * stop], _WORD)
        for hit in np.flatnonzero(table[chunk & 0xFFFF]):
            if int(chunk[hit]) in words:
                yield 4 * (start + int(hit)), int(chunk[hit])


def _layouts(array: np.ndarray, bits: int) -> list[np.ndarray]:
    """The codes as they are, and transposed."""
    array = np.ascontiguousarray(array)
    if bits == 8:
        return [array, np.ascontiguousarray(array.T)]
    # Transposing 4-bit codes unpacks them, transposes, and packs two of a row into a byte again.
    wide = np.empty((array.shape[0], 2 * array.shape[1]), np.uint8)
    wide[:, 0::2], wide[:, 1::2] = array & 15, array >> 4
    turned = np.ascontiguousarray(wide.T)
    if turned.shape[1] % 2:
        return [array]
    return [array, turned[:, 0::2] | (turned[:, 1::2] << 4)]


def _heads(array: np.ndarray, bits: int) -> list[np.ndarray]:
    """The start of each of `_layouts`: its first row, which lies in one piece even where matrices are merged.

    Rows shorter than a word, as of the transposed classifier of three classes, hold no word to search for: the start is
    then the whole matrix.
    """
    if array.shape[1] < 4 or array.shape[0] * bits // 8 < 4:
        return [layout.reshape(-1) for layout in _layouts(array, bits)]
    if bits == 8:
        return [array[0], array[:, 0]]
    column = array[:, 0] & 15
    return [array[0], column[0::2] | (column[1::2] << 4)] if len(column) % 2 == 0 else [array[0]]


def _rare_word(row: np.ndarray) -> tuple[int, int]:
    """An aligned word with as many different bytes as any near the start of `row`, and its offset."""
    data = row[: min(len(row), 4096) // 4 * 4]
    words = np.ascontiguousarray(data).reshape(-1, 4)
    # Words such as 00 00 00 00 occur everywhere in an engine; one of four different bytes hardly does.
    ordered = np.sort(words, axis=1)
    best = int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).argmax())
    return int(words[best].view(_WORD)[0]), 4 * best
