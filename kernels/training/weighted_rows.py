"""The sum of the rows of each token's experts, as custom ops that torch.compile leaves whole.

    quant::weigh_rows(rows, positions, weights, tokens, dtype) -> Σ weight · row of each token, [tokens, H]
    quant::weigh_rows_backward(dy, rows, positions, slots, weights) -> d rows, d weights

On a GPU kernels compute them (`kernels/portable/training/weighted_rows.py`), elsewhere PyTorch. The sum of a token has
the order of its slots at every call.
"""

from __future__ import annotations

import torch

from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.ops import register


def _reference(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    slots: torch.Tensor = rows.index_select(0, positions).unflatten(0, (tokens, -1)).float()
    slots = slots if weights is None else slots * weights.float()[..., None]
    return slots.sum(1).to(dtype)


def _reference_backward(
    dy: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    has_token = (slots < weights.numel())[:, None]
    products = (dy.float()[:, None] * weights.float()[..., None]).flatten(0, 1)
    d_rows = torch.where(has_token, products[slots.clamp(max=len(products) - 1)], 0)
    # A slot of no expert has a row of zeros, whose product is zero.
    own = rows.index_select(0, positions).unflatten(0, weights.shape).float()
    return d_rows.to(rows.dtype), (own * dy.float()[:, None]).sum(2).to(weights.dtype)


def _on_gpu(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    if not has_triton():
        return _reference(rows, positions, weights, tokens, dtype)
    from quant.kernels.portable.training.weighted_rows import weigh_rows

    with torch.cuda.device_of(rows):
        return weigh_rows(rows, positions, weights, tokens, dtype)


def _on_gpu_backward(
    dy: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not has_triton():
        return _reference_backward(dy, rows, positions, slots, weights)
    from quant.kernels.portable.training.weighted_rows import weigh_rows_backward

    with torch.cuda.device_of(rows):
        return weigh_rows_backward(dy, rows, slots, weights)


def _fake(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    return rows.new_empty(tokens, rows.shape[1], dtype=dtype)


def _fake_backward(
    dy: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


register(
    "quant::weigh_rows",
    "(Tensor rows, Tensor positions, Tensor? weights, SymInt tokens, ScalarType dtype) -> Tensor",
    _fake,
    default=_reference,
    cuda=_on_gpu,
)
register(
    "quant::weigh_rows_backward",
    "(Tensor dy, Tensor rows, Tensor positions, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
    _fake_backward,
    default=_reference_backward,
    cuda=_on_gpu_backward,
)
