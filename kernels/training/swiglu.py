"""silu(gate) · up of one matrix and its gradients, as custom ops: on a GPU one kernel each, elsewhere PyTorch.

quant::swiglu(both) -> silu(gate) · up of both = [gate, up]
quant::swiglu_backward(dy, both) -> [d gate, d up]
"""

from __future__ import annotations

import torch
from torch.nn import functional

from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.ops import register


def _reference(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    return functional.silu(gate) * up


def _reference_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * functional.silu(gate)], 1)


def _on_gpu(both: torch.Tensor) -> torch.Tensor:
    if not has_triton():
        return _reference(both)
    from quant.kernels.portable.training.swiglu import swiglu

    with torch.cuda.device_of(both):
        return swiglu(both)


def _on_gpu_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    if not has_triton():
        return _reference_backward(dy, both)
    from quant.kernels.portable.training.swiglu import swiglu_backward

    with torch.cuda.device_of(both):
        return swiglu_backward(dy, both)


def _fake(both: torch.Tensor) -> torch.Tensor:
    return both.new_empty(both.shape[0], both.shape[1] // 2)


def _fake_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    return both.new_empty(both.shape)


register("quant::swiglu", "(Tensor both) -> Tensor", _fake, default=_reference, cuda=_on_gpu)
register(
    "quant::swiglu_backward",
    "(Tensor dy, Tensor both) -> Tensor",
    _fake_backward,
    default=_reference_backward,
    cuda=_on_gpu_backward,
)
