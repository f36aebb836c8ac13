"""`gated_linear` computes the first half of a gated MLP: the matmul for gate and up, and `silu(gate) · up`.

The rows of gate and up alternate in the weight, so that a tile of Hopper's matmul holds both and writes their product.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear import dispatch
from quant.kernels.tiles import GluonTiles


def rows_in_turns(weight: BlockScaledTensor) -> BlockScaledTensor:
    """`[2 · intermediate, in]`, gate first, in the order that `gated_linear` wants; in the layout of a checkpoint.

    Raises:
        ValueError: an odd number of rows, or rows that share a scale.
    """
    if weight.shape[0] % 2 or len(weight.scale) != weight.shape[0]:
        raise ValueError(f"rows_in_turns: {weight.format} of {list(weight.shape)} has no scales for each of two halves")
    codes, scale = (x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for x in (weight.codes, weight.scale))
    return replace(weight, codes=codes.contiguous(), scale=scale.contiguous())


def gated_linear(x: torch.Tensor, weight: BlockScaledTensor) -> torch.Tensor:
    """`silu(gate) · up`, `[tokens, intermediate]`, where the columns of gate and up alternate in `x @ weight.T`.

    Args:
        x: `[tokens, in]`, FP16 or BF16, contiguous, on a GPU.
        weight: `[2 · intermediate, in]`, of `rows_in_turns`, perhaps prepacked.

    Raises:
        ValueError: operands that do not fit each other.
    """
    from quant.kernels.portable.decoder_step import check_operands, swiglu

    check_operands("gated_linear", x, {"x": (x, x.shape)})
    if x.dim() != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] % 2:
        raise ValueError(f"gated_linear: x {list(x.shape)} by a weight of {list(weight.shape)}, gate and up in turns")
    dispatch.check(x, weight, None)
    choice = dispatch.choose(weight, x)
    if isinstance(choice, GluonTiles):
        from quant.kernels.hopper import sm90_nvfp4_gemm_few

        return sm90_nvfp4_gemm_few.gemm_few(x, weight, None, choice, gated=True)
    return swiglu(dispatch.run(x, weight, None, choice), in_turns=True)
