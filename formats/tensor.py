"""A `BlockScaledTensor` holds codes and scales; `quantize` and `dequantize` are the way in and out.

Quantizing walks the rows in chunks that fit in the cache, so a 4096×14336 weight needs a few megabytes beyond
its codes, not a float32 copy of itself. Each chunk is viewed as blocks `[R, rows, C, columns]`, gets a scale a
block, is divided by the *stored* scale and rounded. A short last block is padded with zeros for scaling only.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten

from quant.base.errors import known_names
from quant.base.parallel import in_parts
from quant.formats.format import Format, Number
from quant.formats.rounding import decode, encode, pack, round_to, unpack
from quant.formats.scaling import SCALE_RULES, ScaleRule, finite_or_nan, global_scale_of
from quant.formats.superblocks import choose_scales, decode_scales, grid, levels

Record = TypeVar("Record")

# Elements worked on at a time: few enough for a CPU's cache, and enough to keep a GPU busy.
_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 1 << 18, 1 << 24
# Elements that are worth a thread of their own.
_PART_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """A quantized tensor: plain data, deliberately not a `torch.Tensor` subclass.

    Attributes:
        codes: `format.codes_shape(shape)`; uint8 where packed, else the element's own dtype.
        scale: `format.scale_shape(shape)`; float8_e4m3fn, uint8 (E8M0) or float32. A float32 scale holds a value
            that the checkpoint's scale dtype represents exactly (see `quantize`).
        format: defines codes and scales.
        shape: logical shape `[..., out, in]`.
        global_scale: float32 of shape `shape[:-2]`, or None where the format has none. float64 where a checkpoint
            stores the reciprocal and float32 cannot hold the inverse of that without loss.
    """

    codes: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, ...]
    global_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, as `Format.nbytes` counts them."""
        return self.format.nbytes(self.shape)

    def element_values(self) -> Tensor:
        """Returns decoded elements before any scale, float32 of the logical shape."""
        element, columns = self.format.element, self.shape[-1]
        if element.bits == 4:
            # One table look-up a byte gives both of its values, as the 64 bits that they are together.
            codes = self.codes.flatten().int()
            # A table that stays on a GPU: to copy it would wait for the GPU. Traced tensors get one of their own.
            on_gpu = codes.is_cuda and type(codes) is Tensor
            table = _table_on(element, codes.device) if on_gpu else _pair_table(element).to(codes.device)
            pairs = table.index_select(0, codes).view(torch.float32)
            return pairs.view(*self.codes.shape[:-1], -1)[..., :columns]
        is_packed = element.bits == 6 and element.torch_dtype is None
        return decode(unpack(self.codes, 6, columns) if is_packed else self.codes, element)

    def scale_values(self) -> Tensor:
        """Returns block scale times global scale, rounded once to float32, of the shape of `scale`."""
        if self.format.has_packed_scales:
            return decode_scales(self.scale, self.format)[0]
        return _step(decode(self.scale, self.format.scale), self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values, `[..., out, in]`, in `dtype`.

        In float64 they are exact, since element · block scale · global scale has at most 32 bits of mantissa where the
        scales are float32. In any other dtype they are the values that kernels compute: float32 products, first of
        the two scales, then with the element, rounded to `dtype` at the end.
        """
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        rows, columns = self.shape[-2:]
        for index in np.ndindex(*self.shape[:-2]):
            second = None if self.global_scale is None else self.global_scale[index]
            matrix = BlockScaledTensor(self.codes[index], self.scale[index], self.format, (rows, columns), second)
            in_parts(partial(_decode_rows, matrix, out[index]), out, rows, rows * columns / _PART_ELEMENTS)
        return out

    def matrix(self, index: int) -> BlockScaledTensor:
        """Returns one matrix of a stack `[n, out, in]`."""
        global_scale = None if self.global_scale is None else self.global_scale[index]
        return BlockScaledTensor(self.codes[index], self.scale[index], self.format, self.shape[1:], global_scale)

    def rows(self, start: int, stop: int) -> BlockScaledTensor:
        """Returns the rows of a matrix `[out, in]`, sharing its memory; `start` is the first row of a block."""
        height = self.format.block_shape(self.shape)[0]
        scale = self.scale[start // height : -(-stop // height)]
        return replace(self, codes=self.codes[start:stop], scale=scale, shape=(stop - start, self.shape[1]))

    def row_chunks(self, elements: int) -> Iterator[tuple[slice, BlockScaledTensor]]:
        """Yields runs of rows of a matrix and their positions, of whole blocks and about `elements` weights each."""
        rows, columns = self.shape
        height = self.format.block_shape(self.shape)[0]
        step = height if height < rows else 1
        step *= max(elements // columns // step, 1)
        for start in range(0, rows, step):
            chunk = slice(start, min(start + step, rows))
            yield chunk, self.rows(chunk.start, chunk.stop)

    def to(self, device: torch.device | str) -> BlockScaledTensor:
        """Returns the same data on `device`."""
        return moved(self, device)


def moved(record: Record, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Record:
    """Returns the same record with its tensors on another device, or floating-point ones in another dtype.

    It is a tensor, a dataclass, or a nest of containers; whatever is no tensor in it stays as it is. A `UserDict` has
    other holders that add to it or read from it, so it gets its moved values itself. With a `dtype`, which these
    holders do not ask for, it is copied.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, dtype if leaf.is_floating_point() else None)
        if isinstance(leaf, UserDict):
            mapping = leaf if dtype is None else copy.copy(leaf)
            mapping.update({name: moved(value, device, dtype) for name, value in leaf.items()})
            return mapping
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        values = {f.name: getattr(leaf, f.name) for f in fields(leaf) if f.init}
        changes = {name: new for name, old in values.items() if (new := moved(old, device, dtype)) is not old}
        return replace(leaf, **changes) if changes else leaf

    leaves, tree = tree_flatten(record)
    after = [move(leaf) for leaf in leaves]
    # Formats and other records without a tensor keep their identity.
    is_same = all(new is old for new, old in zip(after, leaves, strict=True))
    return record if is_same else tree_unflatten(after, tree)


def quantize(
    weight: Tensor, format: Format, *, rule: str = "max", global_scale: Tensor | None = None, name: str = "tensor"
) -> BlockScaledTensor:
    """Quantizes `weight` to `format`: block scales by `rule`, elements rounded to nearest even.

    A float scale (FP8 per tensor, channel or block; INT8; INT4) is rounded to the dtype of `weight` first when
    that is 16 bit, because that is the dtype in which compressed-tensors checkpoints store it: the elements are
    then rounded against exactly the scale that is written.

    Args:
        weight: `[..., out, in]`, FP16, BF16, FP32 or FP64; the maths is in FP32.
        format: the target.
        rule: a key of `SCALE_RULES`.
        global_scale: the global scale to use instead of the weight's own (layers that a runtime fuses share
            one), for formats that have one. float32 `weight.shape[:-2]`; nowhere below the weight's own.
        name: how errors call the tensor.

    Raises:
        ValueError: `weight` holds NaN or infinity, is empty or not floating point; the rule is unknown or not
            defined for the format.
    """
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {rule!r}; {known_names(rule, SCALE_RULES, 'rules')}")
    amax = checked_amax(weight, name)
    if format.global_scale and global_scale is None:
        global_scale = global_scale_of(amax, format, rule)
    scale = choose_scale(weight, format, rule, amax, global_scale)
    return quantize_with_scale(weight, format, scale, global_scale)


def choose_scale(weight: Tensor, format: Format, rule: str, amax: Tensor, global_scale: Tensor | None) -> Tensor:
    """Returns the block scale values of `weight` by `rule`: float32 of shape `format.scale_shape(weight.shape)`.

    `weight` `[..., out, in]` is finite; `amax`, its largest magnitudes, and `global_scale` are of `weight.shape[:-2]`.
    """
    if format.has_packed_scales:
        matrices = weight.reshape(-1, *weight.shape[-2:])
        # Several float32 copies are made of what is searched together.
        search = partial(choose_scales, format=format, search=rule == "mse")
        stored = [torch.cat([search(m[chunk]) for chunk in _row_chunks(m, 0, len(m))]) for m in matrices]
        return torch.stack(stored).reshape(format.scale_shape(weight.shape))
    scale = torch.empty(format.scale_shape(weight.shape), device=weight.device, dtype=torch.float32)
    rows, columns = weight.shape[-2:]
    # torch.compile cannot record numpy's ndindex, and QAT chooses scales within a forward pass.
    for index in product(*map(range, weight.shape[:-2])):
        second = weight.new_ones((), dtype=torch.float32) if global_scale is None else global_scale[index]
        if format.per_tensor and rule == "max":
            # One block: its amax is known, and the matrix need not be held as one float32 block.
            scale[index] = SCALE_RULES[rule](amax[index].view(1, 1, 1, 1), format, second)[:, 0, :, 0]
            continue
        choose = partial(_choose_rows, weight[index], format, SCALE_RULES[rule], second, scale[index])
        in_parts(choose, weight, scale.shape[-2], rows * columns / _PART_ELEMENTS)
    if format.scale.is_wide and not format.gguf and weight.dtype in (torch.float16, torch.bfloat16):
        # FP16 ends at 2^-24: without the floor, the scale of a very small weight would be stored as zero.
        info = torch.finfo(weight.dtype)
        scale = scale.clamp_(min=info.tiny * info.eps).to(weight.dtype).float()
    return scale


def _choose_rows(weight: Tensor, format: Format, rule: ScaleRule, second: Tensor, scale: Tensor, *part: int) -> None:
    height, width = format.block_shape(weight.shape)
    first, last = part
    for chunk in _row_chunks(weight, first * height, min(last * height, len(weight)), height):
        blocks = _to_blocks(weight[chunk].float(), (height, width))
        block_scales = rule(blocks, format, second)
        scale[chunk.start // height : -(-chunk.stop // height)] = block_scales[:, 0, :, 0]


def quantize_with_scale(
    weight: Tensor, format: Format, scale: Tensor, global_scale: Tensor | None = None
) -> BlockScaledTensor:
    """Rounds `weight` against block scales that are already chosen.

    `weight` `[..., out, in]` is finite; `scale` is float32 of shape `format.scale_shape(weight.shape)`, positive and
    representable in `format.scale`; `global_scale` is float32 `weight.shape[:-2]`, for formats that have one.
    """
    if format.has_packed_scales:
        step, shift = grid(scale, format)
        codes = encode((weight.float() + shift) / step, format.element)
        packed = pack(codes, 4) if codes.dtype is torch.uint8 else codes
        return BlockScaledTensor(packed, scale, format, tuple(weight.shape))
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = format.block_shape(weight.shape)
    step = _step(scale, global_scale).repeat_interleave(block_rows, dim=-2)[..., :rows, :]
    dtype = format.element.torch_dtype or torch.uint8
    codes = torch.empty(format.codes_shape(weight.shape), dtype=dtype, device=weight.device)
    for index in np.ndindex(*weight.shape[:-2]):
        encode_part = partial(_encode_rows, weight[index], format, block_columns, step[index], codes[index])
        in_parts(encode_part, weight, rows, rows * columns / _PART_ELEMENTS)
    # Scales are stored in float8 (E4M3) or uint8 (E8M0); floats in float32.
    stored = scale if format.scale.is_wide else encode(scale, format.scale)
    return BlockScaledTensor(codes, stored, format, tuple(weight.shape), global_scale)


def _decode_rows(matrix: BlockScaledTensor, out: Tensor, *part: int) -> None:
    height, width = matrix.format.block_shape(matrix.shape)
    computed = torch.promote_types(out.dtype, torch.float32)
    for chunk in _row_chunks(out, *part):
        codes = replace(matrix, codes=matrix.codes[chunk], shape=out[chunk].shape)
        if matrix.format.has_packed_scales:
            step, minimum = decode_scales(matrix.scale[chunk], matrix.format)
            blocks = (codes.element_values().to(computed) + levels(matrix.format)).unflatten(-1, (-1, width))
            blocks.mul_(step[..., None])
            out[chunk] = (blocks if minimum is None else blocks.sub_(minimum[..., None])).flatten(-2)
            continue
        # A chunk may begin and end within blocks that are several rows high.
        scale = matrix.scale[chunk.start // height : -(-chunk.stop // height)]
        step = _step(decode(scale, matrix.format.scale), matrix.global_scale, computed)
        if height > 1:
            rows = torch.arange(chunk.start, chunk.stop, device=step.device)
            step = step[rows // height - chunk.start // height]
        blocks = _to_blocks(codes.element_values().to(computed), (1, width))
        blocks.mul_(step[:, None, :, None])
        out[chunk] = _from_blocks(blocks, *codes.shape)


def _encode_rows(weight: Tensor, format: Format, width: int, step: Tensor, codes: Tensor, *part: int) -> None:
    """Fills the rows `part` of the codes of a matrix, whose blocks are `width` columns wide."""
    for chunk in _row_chunks(weight, *part):
        # A row at a time even where blocks are squares: scales are already repeated for each row.
        blocks = _to_blocks(weight[chunk].float(), (1, width))
        elements = encode(blocks / step[chunk, None, :, None], format.element)
        elements = _from_blocks(elements, chunk.stop - chunk.start, weight.shape[1])
        codes[chunk] = pack(elements, format.element.bits) if codes.dtype is torch.uint8 else elements


def round_with_scale(
    weight: Tensor, format: Format, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns `quantize_with_scale(…).dequantize(dtype)` without making codes: the weight of a deployed model."""
    if format.has_packed_scales:
        return quantize_with_scale(weight, format, scale).dequantize(dtype)
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = format.block_shape(weight.shape)
    step = _step(scale, global_scale, torch.promote_types(dtype, torch.float32))
    step = step.repeat_interleave(block_rows, dim=-2)[..., :rows, :]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for index in np.ndindex(*weight.shape[:-2]):
        round_part = partial(_round_rows, weight[index], format, block_columns, step[index], out[index])
        in_parts(round_part, weight, rows, rows * columns / _PART_ELEMENTS)
    return out


def _round_rows(weight: Tensor, format: Format, width: int, step: Tensor, out: Tensor, *part: int) -> None:
    """Fills the rows `part` of a rounded matrix, whose blocks are `width` columns wide."""
    for chunk in _row_chunks(weight, *part):
        each = step[chunk, None, :, None]
        blocks = _to_blocks(weight[chunk].float(), (1, width))
        # Elements are chosen against the float32 step, as `_encode_rows` does; only their values may be float64.
        rounded = round_to(blocks / each.float(), format.element).to(each.dtype).mul_(each)
        out[chunk] = _from_blocks(rounded, chunk.stop - chunk.start, weight.shape[1])


def _step(scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns block scale times global scale, rounded once to `dtype`."""
    if global_scale is None:
        return scale.to(dtype)
    # Float64 holds the product of two float32 exactly, so this is one rounding, on every device alike.
    return (scale.double() * global_scale.double()[..., None, None]).to(dtype)


def fake_quantize(
    x: Tensor, format: Format, *, scale: Tensor | None = None, global_scale: Tensor | None = None
) -> Tensor:
    """Returns `x` rounded to the values that `format` can hold, in its own dtype: the activation a matmul really sees.

    NaN and infinity make everything NaN that shares their scale, or, under a static `scale`, themselves.

    `x` is `[..., tokens, in]`; `scale` of a per-tensor format and `global_scale` (NVFP4) are static float32 scalars,
    where None measures. Block scales are found here, by the format's rule for inputs, `max` for nearly all.
    """
    if x.numel() == 0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    if format.global_scale and global_scale is None:
        global_scale = global_scale_of(rows.abs().amax(), format)
    second = torch.ones((), device=x.device, dtype=torch.float32) if global_scale is None else global_scale.reshape(())
    blocks = _to_blocks(rows.float() if scale is None else finite_or_nan(rows.float()), format.block_shape(rows.shape))
    step = (SCALE_RULES[format.input_rule](blocks, format, second) if scale is None else scale.reshape(())) * second
    values = round_to(blocks / step, format.element).mul_(step)
    return _from_blocks(values, *rows.shape).reshape(x.shape).to(x.dtype)


def round_activation(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """Returns `fake_quantize` with a layer's input scale: the global one where the format has it, else the scale."""
    if format.global_scale:
        return fake_quantize(x, format, global_scale=input_scale)
    return fake_quantize(x, format, scale=input_scale)


def checked_amax(weight: Tensor, name: str) -> Tensor:
    """Returns the largest magnitude of each matrix, float32 `weight.shape[:-2]`; ValueError if it is not finite."""
    shape = list(weight.shape)
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise ValueError(f"{name} {shape}: dtype {weight.dtype} cannot be quantized; expected FP16, BF16, FP32 or FP64")
    if weight.numel() == 0 or weight.dim() < 2:
        raise ValueError(f"{name} {shape}: expected a non-empty [..., out, in] weight")
    # Of a matrix at a time: along an axis, a CPU's code for 16 bit is sixty times as slow.
    ends = [torch.stack(torch.aminmax(matrix)) for matrix in weight.reshape(-1, *shape[-2:])]
    low, high = torch.stack(ends, dim=-1).view(2, *shape[:-2])
    amax = torch.maximum(-low, high).float()
    if not bool(torch.isfinite(amax).all()):
        bad = int((~torch.isfinite(weight.float())).sum())
        raise ValueError(f"{name} {shape}: {bad} NaN or infinite value(s); repair the model, or download it again")
    return amax


def _row_chunks(x: Tensor, start: int, stop: int, multiple: int = 1) -> Iterator[slice]:
    """Yields slices of rows, a multiple of `multiple` long, of about as many elements as suit the device."""
    elements = _GPU_CHUNK_ELEMENTS if x.is_cuda else _CHUNK_ELEMENTS
    step = max(elements // max(x.shape[1], 1) // multiple, 1) * multiple
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns `[rows, columns]` as blocks `[R, block rows, C, block columns]`, short last blocks padded with zeros."""
    rows, columns = x.shape
    if rows % block[0] or columns % block[1]:
        x = pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    return x.view(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def _from_blocks(blocks: Tensor, rows: int, columns: int) -> Tensor:
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns]


@cache
def _table_on(number: Number, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _pair_table(number).to(device)


@cache
def _pair_table(number: Number) -> Tensor:
    """Returns both values of each byte of packed 4-bit codes, low nibble first, as bits of float32: int64 `[256]`."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = number.values()
    return torch.stack([values[(byte & 0x0F).int()], values[(byte >> 4).int()]], dim=-1).view(torch.int64)[:, 0]
