"""The random Hadamard transform of 16 consecutive tokens that precedes the rounding of dw's operands.

    H = diag(signs) H₁₆ / 4        orthogonal, so (H dyᵀᵀ)ᵀ (H x) = dyᵀ x

An outlier of one token is spread over 16, which an E2M1 grid with a largest value of 6 rounds far better. Both operands
need the same signs. Transformer Engine has one vector of signs for all layers and ranks, never drawn again; the same
vector serves here, so nothing has to be saved or kept equal among ranks.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from quant.kernels.rounding.hadamard import on_each_device
from quant.kernels.linear.ops import register, without_autocast
from quant.training.low_precision.operands import float32_product

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine 2.20's `get_wgrad_sign_vector`."""


@on_each_device
def hadamard_matrix(size: int) -> torch.Tensor:
    """Returns `diag(signs) H / sqrt(size)`, float32 `[size, size]`."""
    matrix = torch.ones(1, 1, device="cpu", dtype=torch.float32)
    while len(matrix) < size:  # Sylvester's construction
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor(SIGNS[:size], dtype=torch.float32, device="cpu")
    turned: torch.Tensor = signs[:, None] * matrix / size**0.5
    return turned


def transform_tokens(x: torch.Tensor, size: int) -> torch.Tensor:
    """Transforms each `size` consecutive tokens of `x` `[rows, tokens]`; a short last block counts zeros.

    The result is BF16, as in Transformer Engine's kernels: the transform happens in registers between the load of a
    BF16 tensor and the rounding to E2M1. Its width is a multiple of `size`, which changes no sum over tokens.
    """
    return torch.ops.quant.transform_tokens(x, size) if size else x


def _transformed(x: torch.Tensor, size: int) -> torch.Tensor:
    # Both operands get the same zeros, which add nothing to a sum over tokens.
    blocks = pad(x, (0, -x.shape[1] % size)).bfloat16().unflatten(1, (-1, size))
    matrix = hadamard_matrix(x, size)
    if x.is_cuda:  # tensor cores sum in FP32, and BF16 holds the matrix
        with without_autocast(x):
            turned = blocks @ matrix.bfloat16()
    else:
        turned = float32_product(blocks.float(), matrix).bfloat16()
    transformed: torch.Tensor = turned.flatten(1)
    return transformed


def _fake(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], -(-x.shape[1] // size) * size), dtype=torch.bfloat16)


# An op, because compilers would make the matrix anew in each graph, on the host.
register("quant::transform_tokens", "(Tensor x, int size) -> Tensor", _fake, default=_transformed)
