"""The kernels that weigh rows of experts, interpreted, compute the sums and gradients of PyTorch's operations."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.kernels.training.portable_grouped_fp8 import weigh_rows, weigh_rows_backward
from quant.training.low_precision.fused_experts_training import group_by_expert


def inputs(tokens: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, positions and slots of a router whose last choice is an expert elsewhere, and weights in FP32."""
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(0, 3, (tokens, 2), generator=generator)
    index[-1, 1] = 3
    groups = group_by_expert(index, 3, 16)
    rows = torch.randn(len(groups.slots), columns, generator=generator).masked_fill(groups.is_empty, 0).to(dtype)
    return rows, groups.positions, groups.slots, torch.rand(tokens, 2, generator=generator)


def gradients(
    dy: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The sum and both gradients, in float64 by autograd."""
    rows, weights = rows.double().requires_grad_(), weights.double().requires_grad_()
    y = (rows[positions].unflatten(0, weights.shape) * weights[..., None]).sum(1)
    y.backward(dy.double())
    return y.detach(), rows.grad, weights.grad  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_and_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    rows, positions, slots, weights = inputs(9, 1100, dtype)
    dy = torch.randn(9, 1100).to(dtype)
    is_empty = slots == weights.numel()
    y64, d_rows, d_weights = gradients(dy, rows, positions, weights)
    # The choice of an expert elsewhere has its position in a row of zeros, which gets no gradient.
    exact = y64, d_rows.masked_fill(is_empty[:, None], 0), d_weights
    with interpreted():
        y = weigh_rows(rows, positions, weights, 9, torch.float32)
        plain = weigh_rows(rows, positions, None, 9, torch.float32)
        results = [y, *weigh_rows_backward(dy, rows, slots, weights)]
    ops = torch.ops.quant
    reference = [
        ops.weigh_rows(rows, positions, weights, 9, torch.float32),
        *ops.weigh_rows_backward(dy, rows, positions, slots, weights),
    ]
    assert torch.allclose(plain, rows.float()[positions].unflatten(0, (9, 2)).sum(1), atol=1e-6)
    assert torch.equal(plain, ops.weigh_rows(rows, positions, None, 9, torch.float32))
    for way in (results, reference):
        for name, tensor, expected in zip(("y", "rows", "weights"), way, exact, strict=True):
            error = 2.0**-8 if tensor.dtype is torch.bfloat16 else 1e-5
            assert torch.allclose(tensor.double(), expected, rtol=error, atol=1e-5), name
    assert d_rows[is_empty].any()


def test_the_ops_are_what_compilers_are_told() -> None:
    rows, positions, slots, weights = inputs(5, 16, torch.float32)
    ops = torch.ops.quant
    torch.library.opcheck(ops.weigh_rows.default, (rows, positions, weights, 5, torch.bfloat16))
    torch.library.opcheck(ops.weigh_rows_backward.default, (torch.randn(5, 16), rows, positions, slots, weights))


@pytest.mark.gpu
def test_on_a_gpu_sums_and_gradients_are_those_of_the_reference() -> None:
    ops = torch.ops.quant
    for dtype in (torch.float32, torch.bfloat16):
        rows, positions, slots, weights = inputs(300, 3000, dtype)
        dy = torch.randn(300, 3000).to(dtype)
        calls = (
            (ops.weigh_rows, (rows, positions, weights, 300, dtype)),
            (ops.weigh_rows, (rows, positions, None, 300, dtype)),
            (ops.weigh_rows_backward, (dy, rows, positions, slots, weights)),
        )
        for op, arguments in calls:
            on_gpu = op(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
            pairs = zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (on_gpu, op(*arguments))), strict=True)
            for got, reference in pairs:
                assert torch.allclose(got.cpu().float(), reference.float(), rtol=1e-2, atol=1e-3)
