"""The oracle defines the right result of a quantized linear: input rounded, weight dequantized exactly, plain matmul.

It runs on any device. On a CPU, dequantizing takes longer than a one-token matmul, so the oracle keeps dequantized
weights up to 2 GiB in all (`set_weight_cache`, or the environment variable `BLOCKSCALE_CPU_CACHE` in bytes). A weight
that does not fit is dequantized in slices of rows at each call. The first weights stay: a decoder uses its layers in
turn, and a cache that dropped the oldest would then miss every time.

New values may be written into codes and scales at any time: by `tensor.data.copy_`, a broadcast of torch.distributed, a
NumPy or DLPack view, or another process that shares the memory. Version counters see none of these, so each call sums
up the memory of codes and scales, and dequantizes again where a sum has changed. That reads an eighth to a quarter of
the bytes that the product reads in float32.
"""

import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.base.weight_layout import TILE, as_computed, is_prepacked, restore

# Dequantized weights held at a time where they are not kept: 32 MiB of float32 on a CPU, 256 MiB on a GPU.
_SLICE_ELEMENTS, _GPU_SLICE_ELEMENTS = 1 << 23, 1 << 26


def reference_linear(
    x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None, activation: Format | None
) -> Tensor:
    """Returns `x @ weight.T + bias` on any device, `[..., in]` to `[..., out]`; the weight is in either layout."""
    if not x.is_floating_point():
        raise ValueError(f"linear by a weight of {list(weight.shape)}: x is {x.dtype}, expected a floating-point dtype")
    weight = as_stored(weight)
    if activation is not None:
        x = round_activation(x, activation, input_scale)
    bias = None if bias is None else bias.to(x.dtype)
    dense = _cache.get(weight, x.dtype)
    if dense is not None:
        return functional.linear(x, dense, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for rows, piece in row_slices(weight):
        part = None if bias is None else bias[rows]
        out[..., rows] = functional.linear(x, piece.dequantize(x.dtype), part)
    return out


@dataclass(frozen=True, slots=True)
class ReferenceProduct:
    """`reference_linear` as a `Product` of `kernels/linear/dispatch.py`; it takes x in any shape `[..., in]`."""

    activation: Format | None

    def __call__(self, x: Tensor, weight: BlockScaledTensor, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
        return reference_linear(x, weight, bias, input_scale, self.activation)


def dense_view(weight: BlockScaledTensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a dequantized weight for `codes`, a view or copy of a layer's codes; kept as for the layer's own."""
    dense = _cache.get(weight, dtype, codes)
    return weight.dequantize(dtype) if dense is None else dense


def as_stored(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Returns `weight` in a layout that `BlockScaledTensor.dequantize` reads."""
    weight = as_computed(weight)
    return restore(weight) if is_prepacked(weight) else weight


def row_slices(weight: BlockScaledTensor) -> Iterator[tuple[slice, BlockScaledTensor]]:
    """Yields a weight `[out, in]` in either layout, by slices of whole blocks of rows, some dozen MB each."""
    elements = _GPU_SLICE_ELEMENTS if weight.codes.is_cuda else _SLICE_ELEMENTS
    rows, columns = weight.shape
    # Prepacked words are stored by tiles of 64 rows; a slice must not cut one.
    block_rows = TILE if weight.codes.dtype is torch.int32 else weight.format.block_shape(weight.shape)[0]
    whole = weight.format.block[0] == 0
    step = max(elements // columns // block_rows, 1) * block_rows
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        scale = weight.scale
        if weight.codes.dtype is torch.int32:
            scale = scale[start:stop]
        elif not whole:
            scale = scale[start // block_rows : -(-stop // block_rows)]
        yield (
            slice(start, stop),
            replace(weight, codes=weight.codes[start:stop], scale=scale, shape=(stop - start, columns)),
        )


def set_weight_cache(nbytes: int) -> None:
    """Lets linears on a CPU keep at most `nbytes` of dequantized weights between calls, and drops the present ones.

    The default is the environment variable `BLOCKSCALE_CPU_CACHE`, else 2 GiB. 0 keeps none: only
    the codes then take memory, and each call dequantizes again.

    Raises:
        ValueError: `nbytes` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"weight cache of {nbytes} bytes; expected 0, which keeps none, or more")
    _cache.clear()
    _cache.budget = nbytes


def note_lasting(codes: Tensor) -> None:
    """Notes that codes stay with their module, so that their dequantized weight is worth keeping if they are a view."""
    if codes._base is not None:
        _cache.lasting[codes] = True


@contextmanager
def kept_weights(codes: Iterable[Tensor]) -> Iterator[None]:
    """Keeps the dequantized weights of `codes`, views or not, while open, and lets go of them at the end."""
    held = list(codes)
    for each in held:
        note_lasting(each)
    try:
        yield
    finally:
        for each in held:
            _cache.lasting.pop(each, None)
            _cache.entries.pop(each, None)


@contextmanager
def weights_stay() -> Iterator[None]:
    """Says that this thread runs models in a loop and nobody writes weights meanwhile: each is compared only once."""
    before, _thread.loop = getattr(_thread, "loop", None), object()
    try:
        yield
    finally:
        _thread.loop = before


_thread = threading.local()  # its `loop` stands for the `weights_stay` that a thread is in

_EXACT = 4096  # words of 8 bytes up to which a tensor is compared with a copy, and not by sums
_SUMMED = 251  # words that are summed up together; in shorter runs a sum takes twice as long
_STRIDE = 61  # every so many words are compared with a copy, too


def memory_summary(tensor: Tensor) -> list[Tensor]:
    """Returns sums of a tensor's words and copies of some: equal as long as the tensor has its values.

    Sums tell of new values, and of values that changed places between sums; the copied words, of which each row has
    one at another column, tell of rows and columns that changed places within a sum.
    """
    compared, summed = _views(tensor.detach().contiguous())
    return [part.clone() for part in compared] + ([] if summed is None else [summed.sum(1)])


def _views(tensor: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Returns views of a contiguous tensor as integers: those to be compared, and `[sums, words]` to be summed up."""
    flat = tensor.view(-1).view(torch.uint8)
    # Tensors of a mapped file may begin at any byte, and words begin at multiples of 8.
    begin = min(-flat.storage_offset() % 8, len(flat))
    words = flat[begin : begin + (len(flat) - begin) // 8 * 8].view(torch.int64)
    compared, summed = [flat[:begin], flat[begin + 8 * len(words) :]], None
    if len(words) <= _EXACT:
        compared.append(words)
    else:
        whole = len(words) // _SUMMED * _SUMMED
        summed = words[:whole].view(-1, _SUMMED)
        in_row = len(flat) // len(tensor) // 8
        compared += [words[whole:], words[:: max(min(_STRIDE, (in_row - 1) | 1), 3)]]
    return [part for part in compared if part.numel()], summed


class _Memory:
    """The memory of a contiguous tensor and what it held; it lives as long as this object."""

    def __init__(self, tensor: Tensor) -> None:
        self._address = tensor.data_ptr()
        self._compared, self._summed = _views(tensor.detach())  # each call of a product would take longer to make them
        self._copies = [part.clone() for part in self._compared]
        self._sums = None if self._summed is None else self._summed.sum(1)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` still has this memory, and the memory its values."""
        if tensor.data_ptr() != self._address or not all(map(torch.equal, self._compared, self._copies)):
            return False
        return self._summed is None or self._sums is None or torch.equal(self._summed.sum(1), self._sums)


@dataclass(eq=False, slots=True)
class _Entry:
    """A dequantized weight, and the memory of the codes and scales that it was made from."""

    dense: Tensor
    memory: list[_Memory]
    compared_in: object  # the `weights_stay` in which the memory was compared last; None outside of one


class _Cache:
    """Dequantized weights by identity of their codes, freed with them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries = WeakIdKeyDictionary()
        self.lasting = WeakIdKeyDictionary()
        """Codes that are a view, such as one of a mapped file, and stay as long as their module."""

    def clear(self) -> None:
        self.entries = WeakIdKeyDictionary()

    def get(self, weight: BlockScaledTensor, dtype: torch.dtype, codes: Tensor | None = None) -> Tensor | None:
        """Returns the weight in `dtype`, or None where it does not fit; the codes of `weight` are a view of `codes`."""
        # A view for one call dies with it, and so would its entry: caching it would dequantize at every call.
        is_passing = codes is None and weight.codes._base is not None and weight.codes not in self.lasting
        codes = weight.codes if codes is None else codes
        tensors = [codes, weight.scale] if weight.global_scale is None else [codes, weight.scale, weight.global_scale]
        if codes.device.type != "cpu" or is_passing or not all(tensor.is_contiguous() for tensor in tensors):
            return None
        entry: _Entry | None = self.entries.get(codes)
        loop = getattr(_thread, "loop", None)
        if entry is not None and entry.dense.dtype is dtype and entry.dense.shape == weight.shape:
            if loop is not None and entry.compared_in is loop:
                return entry.dense
            if all(memory.is_unchanged(tensor) for memory, tensor in zip(entry.memory, tensors, strict=True)):
                entry.compared_in = loop
                return entry.dense
        self.entries.pop(codes, None)
        # Entries leave only with their codes, never for space: see the module docstring. A list: threads add some.
        held = sum(each.dense.nbytes for each in list(self.entries.data.values()))
        if held + math.prod(weight.shape) * dtype.itemsize > self.budget:
            return None
        # Summed up first, so that values which are written meanwhile are seen at the next call.
        memory = [_Memory(tensor) for tensor in tensors]
        self.entries[codes] = entry = _Entry(weight.dequantize(dtype), memory, loop)
        return entry.dense


def _budget(text: str | None) -> int:
    if text is None:
        return 2 << 30
    if not text.isdecimal():
        raise ValueError(f"BLOCKSCALE_CPU_CACHE={text!r}: expected a number of bytes; 0 keeps no dequantized weights")
    return int(text)


_cache = _Cache(_budget(os.environ.get("BLOCKSCALE_CPU_CACHE")))
