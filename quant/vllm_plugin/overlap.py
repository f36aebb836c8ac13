"""Norms and SwiGLU between our linear layers let the next matmul start before they have ended, as in our own decoder.

Our matmuls begin with the weight, which no other kernel writes: a matmul that is launched while the kernel before it
still runs has its first tiles of weight in shared memory when its input is ready ("programmatic dependent launch",
`kernels/base/portable_dependent_launch.py`). vLLM's kernels give no sign that the next one may start, and with one
token a matmul of 7 to 30 µs then begins some 3 µs late, about its gain over Marlin. So vLLM's classes `RMSNorm` and
`SiluAndMul` are replaced by these subclasses, through vLLM's own registry of replacements.

They round where vLLM's kernels round. Until a linear layer has taken our kernels, and for inputs other than contiguous
rows in bfloat16, they call their base classes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from quant.kernels.base.custom_ops import register
from quant.vllm_plugin import linear_kernels, releases

MOST_COLUMNS = 32768


def _add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from quant.kernels.attention.portable_decoder_step import add_rmsnorm

    return add_rmsnorm(x, residual, weight, eps)


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from quant.kernels.attention.portable_decoder_step import add_rmsnorm

    return add_rmsnorm(x, None, weight, eps)[0]


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    from quant.kernels.attention.portable_decoder_step import swiglu

    return swiglu(both)


def _two_like(x: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _one_like(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    return torch.empty_like(x)


def _half(both: torch.Tensor) -> torch.Tensor:
    return both.new_empty(both.shape[0], both.shape[1] // 2)


# As custom ops, so that torch.compile takes each for one node of known shapes and does not trace into Triton.
register(
    "quant::add_rmsnorm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _two_like,
    default=_add_rmsnorm,
)
register("quant::rmsnorm", "(Tensor x, Tensor weight, float eps) -> Tensor", _one_like, default=_rmsnorm)
register("quant::swiglu", "(Tensor both) -> Tensor", _half, default=_swiglu)


def takes_rows(x: torch.Tensor) -> bool:
    """Returns whether our kernels take these rows, in a model that has our linear layers."""
    return linear_kernels.has_our_layers() and x.dim() == 2 and x.dtype is torch.bfloat16 and x.is_contiguous()


class BlockscaleRMSNorm(RMSNorm):
    """`h / rms(h) · weight` and h, where `h = x + residual`; without a residual only the first."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        # `variance_size_override` norms by a part of the columns only, which our kernel does not.
        able = self.has_weight and self.variance_size_override is None and x.shape[-1] <= MOST_COLUMNS
        weight = self.weight
        if not (able and takes_rows(x) and weight.dtype is x.dtype and (residual is None or takes_rows(residual))):
            return super().forward(x, residual) if residual is not None else super().forward(x)
        if residual is None:
            return torch.ops.quant.rmsnorm(x, weight, self.variance_epsilon)
        return torch.ops.quant.add_rmsnorm(x, residual, weight, self.variance_epsilon)


class BlockscaleSiluAndMul(SiluAndMul):
    """`silu(gate) · up`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quant.swiglu(x) if takes_rows(x) else super().forward(x)


def install() -> str:
    """Replaces the two classes wherever vLLM makes one, unless another plug-in has replaced them.

    Raises:
        TypeError: this vLLM calls them with other arguments; nothing was changed.
    """
    if problems := [
        *releases.signature_problems(BlockscaleRMSNorm),
        *releases.signature_problems(BlockscaleSiluAndMul),
    ]:
        raise TypeError(problems[0])
    # `setdefault`: another plug-in that came first keeps its class.
    op_registry_oot.setdefault("RMSNorm", BlockscaleRMSNorm)
    op_registry_oot.setdefault("SiluAndMul", BlockscaleSiluAndMul)
    return "norms and SwiGLU between them"
