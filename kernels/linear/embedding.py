"""`QuantEmbedding` looks rows up in a quantized table and dequantizes only the requested rows.

    quant::embedding(ids, codes, scale, global_scale?, weight_format, columns, dtype) -> [..., dim]

An embedding of 128256 × 4096 is 1 GiB in BF16, of which a step reads a few rows. Quantizing it saves memory, not time,
and all errors pass through the whole model. So recipes keep embeddings in 16 bit, and a rule must name one to quantize
it. The op has no gradient: ids have none, and codes and scales need none. Other runtimes may not read such a
checkpoint; this toolkit does. The output head is a linear and has the kernels of one.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from quant.formats.format import WEIGHT_FORMATS
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.quantized_module import QuantizedModule

EMBEDDING = "quant::embedding"


def quantized_embedding(ids: Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows `ids` of `weight` `[rows, dim]`, dequantized to `dtype`, `[..., dim]`."""
    # An id beyond the last row is an IndexError; on a GPU, its row is NaN.
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"embedding of {list(weight.shape)}: ids are {ids.dtype}, expected int32 or int64")
    if ids.device != weight.codes.device:
        raise ValueError(f"embedding of {list(weight.shape)}: ids are on {ids.device}, codes on {weight.codes.device}")
    return torch.ops.quant.embedding(
        ids, weight.codes, weight.scale, weight.global_scale, weight.format.name, weight.shape[1], dtype
    )


class QuantEmbedding(QuantizedModule):
    """An embedding over a quantized table `[rows, dim]`."""

    # Rows are in `dtype`, until `.to(dtype)` says otherwise; training leaves the row `padding_idx` as it is.

    has_kernel_layout = False  # a look-up reads rows, which a checkpoint stores one after the other

    def __init__(
        self, weight: BlockScaledTensor, dtype: torch.dtype = torch.float32, padding_idx: int | None = None
    ) -> None:
        super().__init__(weight, dtype=dtype)
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[...]` to `[..., dim]`."""
        return quantized_embedding(input, self.stored_weight, self.dtype)


def embedding_refusal(module: nn.Module) -> str:
    """Returns the reason why `QuantEmbedding` cannot replace `module`, empty if it can."""
    if type(module) is not nn.Embedding:
        return f"it is a {type(module).__name__}, which does more than look up"
    return "it renormalizes rows as they are read" if module.max_norm is not None else ""


def _rows(ids: Tensor, weight: BlockScaledTensor, dtype: torch.dtype) -> Tensor:
    """Returns the oracle: the rows as a tensor of their own, each with its scales."""
    format, (rows, columns) = weight.format, weight.shape
    flat = torch.where(ids < 0, rows, ids).flatten().long()  # indexing would count negative ones from the end
    height = format.block_shape(weight.shape)[0]
    # `scale[row // height]`: the scales of whole rows are gathered, so the blocks that remain are one row high.
    # A row of its own has the scales of the block that it is in.
    each = replace(format, block=(1, format.block[1]))
    shape, second = (len(flat), columns), weight.global_scale
    part = BlockScaledTensor(weight.codes[flat], weight.scale[flat // height], each, shape, second)
    return part.dequantize(dtype).view(*ids.shape, columns)


def _embedding(
    ids: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, weight_format: str, columns: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = BlockScaledTensor(codes, scale, WEIGHT_FORMATS[weight_format], (codes.shape[0], columns), global_scale)
    if not ids.numel():
        return torch.empty(*ids.shape, columns, dtype=dtype, device=ids.device)
    # The kernel knows no scales in two levels, and no minima.
    if ids.is_cuda and dtype in (torch.float16, torch.bfloat16) and has_triton() and not weight.format.gguf:
        from quant.kernels.linear.portable_codes_gemm import look_up

        return look_up(ids, weight, dtype)
    return _rows(ids, weight, dtype)


register(
    EMBEDDING,
    "(Tensor ids, Tensor codes, Tensor scale, Tensor? global_scale, str weight_format, int columns, "
    "ScalarType dtype) -> Tensor",
    lambda ids, *arguments: torch.empty(*ids.shape, arguments[-2], dtype=arguments[-1], device=ids.device),
    default=_embedding,
)
