"""One pass quantizes Q, K and V for FP8 attention and lays them out as the attention kernel reads them.

    operands = quantize_attention(q, k, v, hadamard=True)
    out = operands.attend(causal=True)
    out = attend_in_fp8(q, k, v)                 both as one op, without a mask, for models that are compiled

Each block of 128 tokens of a head has its scale, amax / 448, unless scales are given. With `hadamard`, Q and K are
first multiplied by a random-sign Hadamard matrix: scores stay, outliers spread over the head. On Hopper V comes out
transposed, keys in the order of `attention_operands.lay_out_v`. On a CPU, PyTorch computes the same values, to the bit.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from quant.formats.format import E4M3
from quant.formats.scaling import finite_or_nan
from quant.kernels.attention.attention_operands import (
    DIMS,
    AttentionOptions,
    MaskKeywords,
    QuantizedParts,
    Scales,
    block_of_rows,
    check_devices,
    check_heads,
    lay_out_v,
    scale_blocks,
    scale_of_rows,
)
from quant.kernels.attention.forward import attention
from quant.kernels.base import hardware
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import is_on_hopper
from quant.kernels.rounding.hadamard import random_sign_rotation


@dataclass(frozen=True, eq=False)
class AttentionOperands:
    """The operands of FP8 attention."""

    q: Tensor  # E4M3 `[batch, heads, seq_q, dim]`
    k: Tensor  # E4M3 `[batch, kv_heads, seq_kv, dim]`
    v: Tensor  # V, shaped as k, or laid out `[batch, kv_heads, dim, keys]`
    options: AttentionOptions  # scales, and whether v is laid out

    def attend(self, **keywords: Unpack[MaskKeywords]) -> Tensor:
        """Returns `attention` over these operands."""
        return attention(self.q, self.k, self.v, **self.options._replace(**keywords)._asdict())


def quantize_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scales: Scales | None = None,
    hadamard: bool = False,
    laid_out: bool | None = None,
) -> AttentionOperands:
    """Returns E4M3 operands of attention.

    Args:
        q: `[batch, heads, seq_q, dim]`, BF16 or FP16; any strides whose last is 1.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        scales: the scales of q, k and v, from a calibration, float32 `[]`, `[1]` or `[batch, heads]`; None measures.
        laid_out: whether V is transposed for Hopper's kernel; None is yes on Hopper.
    """
    where = f"FP8 attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    check_heads(where, q, k, v, DIMS)
    check_devices(where, q, k, v)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{where}: {q.dtype}, {k.dtype}, {v.dtype}; expected all bfloat16 or all float16")
    laid_out = is_on_hopper(q) if laid_out is None else laid_out
    if q.is_cuda and not hardware.lacks_e4m3(q):
        from quant.kernels.attention.portable_fp8_operands import quantize_qkv
    else:
        quantize_qkv = _quantize
    (q, k, v), (q_scale, k_scale, v_scale) = quantize_qkv(q, k, v, scales, hadamard, laid_out)
    return AttentionOperands(q, k, v, AttentionOptions(q_scale, k_scale, v_scale, v_laid_out=laid_out))


def attend_in_fp8(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None) -> Tensor:
    """Returns softmax(q kᵀ · softmax_scale) v, `[batch, heads, seq_q, dim]`, with operands rounded to E4M3 by blocks.

    The arguments are those of `quantize_attention`.
    """
    return torch.ops.quant.attend_in_fp8(q, k, v, softmax_scale)  # type: ignore[no-any-return]


register(
    "quant::attend_in_fp8",
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale) -> Tensor",
    lambda q, *_: q.new_empty(q.shape),
    default=lambda q, k, v, scale: quantize_attention(q, k, v, hadamard=True).attend(
        softmax_scale=scale, dtype=q.dtype
    ),
)


def _quantize(q: Tensor, k: Tensor, v: Tensor, scales: Scales | None, hadamard: bool, laid_out: bool) -> QuantizedParts:
    codes, steps = [], []
    rows = [random_sign_rotation(x) if hadamard else x.float() for x in (q, k)]
    for index, x in enumerate((*rows, v.float())):
        if scales is None:
            amax = torch.zeros(*x.shape[:2], scale_blocks(x.shape[2]), device=x.device, dtype=torch.float32)
            block = block_of_rows(None, torch.arange(x.shape[2], device=x.device)).expand(x.shape[:3])
            # The smallest scale for zeros: V's would otherwise outweigh the others' in Hopper's kernel.
            step = finite_or_nan(amax.scatter_reduce_(2, block, x.abs().amax(-1), "amax") / E4M3.max).clamp_min(1e-30)
        else:
            x, step = finite_or_nan(x), scales[index]
        # The reciprocal first, as the kernel does: x / s may round to another code.
        scaled = x * (1 / scale_of_rows(step, x.shape, None))
        codes.append(scaled.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn))
        steps.append(step)
    if laid_out:
        codes[2] = lay_out_v(codes[2])
    return codes, steps
