"""`QuantEmbedding`: a look-up in a quantized table. Only the rows that are asked for are dequantized.

    quant::embedding_fp8_channel(ids, codes, scale, global_scale?, dtype) -> [..., dim]

An embedding of 128256 × 4096 is 1 GiB in BF16, of which a step reads a few rows: quantizing it saves memory, not
time, and every error goes through the whole model. So recipes keep it in 16 bit, and a rule that names it opts in.
Other runtimes may not read such a checkpoint; ours does. The output head is a linear, and has the kernels of one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.modules import _QuantModule

SCHEMA = "(Tensor ids, Tensor codes, Tensor scale, Tensor? global_scale, int columns, ScalarType dtype) -> Tensor"


def quantized_embedding(ids: torch.Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` of `weight`, dequantized.

    Args:
        ids: integers of any shape, each from 0 to rows − 1.
        weight: `[rows, dim]`.
        dtype: of the result.

    Returns:
        `[..., dim]`.

    Raises:
        ValueError: `ids` are no integers, or on another device than the weight.
        IndexError: an id is beyond the last row; on a GPU, that row is NaN.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"embedding of {list(weight.shape)}: ids are {ids.dtype}, expected int32 or int64")
    if ids.device != weight.codes.device:
        raise ValueError(f"embedding of {list(weight.shape)}: ids are on {ids.device}, codes on {weight.codes.device}")
    op = getattr(torch.ops.quant, f"embedding_{weight.format.name}")
    return op(ids, weight.codes, weight.scale, weight.global_scale, weight.shape[1], dtype)  # type: ignore[no-any-return]


class QuantEmbedding(_QuantModule):
    """An embedding over a quantized table.

    Args:
        weight: `[rows, dim]`.
        dtype: of the rows it gives, until `.to(dtype)` says otherwise.
    """

    _dtype: torch.Tensor

    def __init__(self, weight: BlockScaledTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., dim]`."""
        return quantized_embedding(ids, self.stored_weight, self._dtype.dtype)


def takes(module: nn.Module) -> str:
    """Why `QuantEmbedding` cannot stand in the place of `module`, or nothing."""
    if type(module) is not nn.Embedding:
        return f"it is a {type(module).__name__}, which does more than look up"
    return "it renormalizes rows as they are read" if module.max_norm is not None else ""


def _rows(format: Format, ids: torch.Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """The oracle: the rows as a tensor of their own, each with its scales."""
    flat = ids.flatten().long()
    columns = weight.shape[1]
    block = format.block_shape(weight.shape)
    # A row of its own has the scales of the block that it is in.
    each = replace(format, block=(1, format.block[1]))
    part = BlockScaledTensor(
        weight.codes[flat], weight.scale[flat // block[0]], each, (len(flat), columns), weight.global_scale
    )
    return part.dequantize(dtype).view(*ids.shape, columns) if len(flat) else part.codes.new_empty(0, dtype=dtype)


def _register(format: Format) -> None:
    def body(
        ids: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        columns: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        weight = BlockScaledTensor(codes, scale, format, (codes.shape[0], columns), global_scale)
        if not ids.numel():
            return torch.empty(*ids.shape, columns, dtype=dtype, device=ids.device)
        if ids.is_cuda and dtype in (torch.float16, torch.bfloat16):
            from quant.kernels.linear.tuning import has_triton

            if has_triton():
                from quant.kernels.portable.embedding import look_up

                return look_up(ids, weight, dtype)
        return _rows(format, ids, weight, dtype)

    def fake(
        ids: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        columns: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return torch.empty(*ids.shape, columns, dtype=dtype, device=ids.device)

    name = f"quant::embedding_{format.name}"
    torch.library.define(name, SCHEMA)
    torch.library.impl(name, "default", body)
    torch.library.register_fake(name, fake)


for _format in FORMATS.values():
    _register(_format)
