"""Mixture-of-Experts layers run without waiting for the GPU: tokens are sorted by expert, a projection is one op.

    quant::grouped_linear(x, codes, scale, global_scale?, input_scale?, offsets, weight_format, activation, bias?) -> y

    order    slots (token, choice) sorted by expert            x = hidden[order // k]
    offsets  where each expert's rows begin                    y = grouped(act(grouped(x, up)), down)
    out[token] = Σ over its k slots of weight · y              always summed in the same order

The offsets stay on the GPU, so the host does not wait for the router, and a decoding step can be captured in a graph.
On a GPU the kernels of `grouped_gemm.py` run the op; on a CPU each expert runs through the oracle. Gradients are
computed as in `quant::linear`, expert by expert; the backward pass does wait for the offsets.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current, has_triton
from quant.kernels.base.weight_layout import is_prepacked, restore
from quant.kernels.linear.ops import below_autograd, input_gradient, quantized_linear, register
from quant.kernels.rounding.round_inputs import aligned_rows, round_rows

GROUPED_LINEAR = "quant::grouped_linear"
STORED_ROWS = 8
"""Rows an expert, on average, from which Hopper's kernel is the faster one for codes in the order of a checkpoint.

On an H100 it takes 0.95 to 1.05 of the portable kernel's time for 8 rows an expert in FP8, and 0.71 to 0.87 for 32 or
more; with 4 rows it takes up to 1.17."""


def grouped_linear(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    offsets: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    activation: Format | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `y[i] = x[i] · W[expert of i]ᵀ + bias[expert of i]`; rows beyond the last offset are undefined.

    Args:
        x: `[T, in]`, sorted by expert.
        weight: `[experts, out, in]`, in the layout of a checkpoint.
        offsets: int32 `[experts + 1]`: the first row of each expert, and the row after the last.
        input_scale: static scale of the activation format, float32 scalar; None measures each expert's rows.
        activation: format that `x` is rounded to first; None leaves it.
        bias: `[experts, out]`, which gets no gradient, or None.

    Returns:
        `[T, out]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if x.dim() != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped linear: x {list(x.shape)} does not fit experts of {list(weight.shape)}")
    if offsets.shape != (weight.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"grouped linear: offsets is {list(offsets.shape)} {offsets.dtype}, expected [{weight.shape[0] + 1}] int32"
        )
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"grouped linear: bias is {list(bias.shape)}, expected {list(weight.shape[:2])}, contiguous")
    return torch.ops.quant.grouped_linear(  # type: ignore[no-any-return]
        x,
        weight.codes,
        weight.scale,
        weight.global_scale,
        input_scale,
        offsets,
        weight.format.name,
        activation.name if activation else "",
        bias,
    )


def sort_by_expert(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order of the flattened slots of `index` by expert, and int32 offsets `[experts + 1]`.

    The host does not wait.

    Args:
        index: expert of each token and slot, `[tokens, k]`; numbers from `experts` on come last, beyond all offsets.
        experts: the number of experts.
    """
    # Stable: the slots of an expert stay in the order of tokens, so sums have the same order at every call.
    sorted_index, order = index.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, device=index.device, dtype=sorted_index.dtype)
    return order, torch.searchsorted(sorted_index, bounds).int()


def grouped_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Returns `experts_forward` of `kernels/linear/expert_modules.py`, with one grouped matmul for each projection."""
    tokens, slots = top_k_index.shape
    order, offsets = sort_by_expert(top_k_index, self.num_experts)
    expert = top_k_index.flatten()[order].clamp(max=self.num_experts - 1)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, name).grouped(x, offsets)
        return y + getattr(self, f"{name}_bias")[expert].to(x.dtype) if getattr(self, "has_bias", False) else y

    up = project("gate_up_proj" if self.has_gate else "up_proj", hidden_states[order // slots])
    down = project("down_proj", self._apply_gate(up) if self.has_gate else self.act_fn(up))
    if getattr(self, "has_post_expert_norm", False):
        down = self.post_expert_norm(down)
    # Slots of no expert are beyond the last offset, where a row holds whatever was in memory.
    is_routed = (torch.arange(len(order), device=offsets.device) < offsets[-1])[:, None]
    weighted = torch.where(is_routed, down * top_k_weights.flatten()[order, None], 0).to(hidden_states.dtype)
    # A scatter by a permutation writes every row once, unlike `index_add_`, whose order of sums is not fixed on a GPU.
    out = torch.empty_like(weighted)
    out[order] = weighted
    return out.view(tokens, slots, -1).sum(1)


def _grouped(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    offsets: torch.Tensor,
    weight_format: str,
    activation: str,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    weight = BlockScaledTensor(codes, scale, FORMATS[weight_format], (*codes.shape[:2], x.shape[1]), global_scale)
    rounding = INPUT_FORMATS[activation] if activation else None
    in_16_bit = x.dtype in (torch.float16, torch.bfloat16)
    if x.is_cuda and in_16_bit and has_triton() and _rows_stand_alone(rounding, input_scale):
        with torch.cuda.device_of(x):
            return _on_gpu(x, weight, offsets, input_scale, rounding, bias)
    y = x.new_zeros(len(x), codes.shape[1])
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            own_bias = None if bias is None else bias[expert].to(x.dtype)
            y[start:stop] = quantized_linear(x[start:stop], weight.matrix(expert), own_bias, input_scale, rounding)
    return y


def _rows_stand_alone(format: Format | None, input_scale: torch.Tensor | None) -> bool:
    """Returns whether no scale is measured over several rows, which belong to several experts."""
    return format is None or input_scale is not None or (format.block[0] == 1 and not format.global_scale)


def _on_gpu(
    x: torch.Tensor,
    weight: BlockScaledTensor,
    offsets: torch.Tensor,
    input_scale: torch.Tensor | None,
    activation: Format | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    from quant.kernels.linear import portable_block_scaled_gemm, portable_grouped_gemm, sm90_codes_gemm_many
    from quant.kernels.rounding import portable_casts

    portable_grouped_gemm.check(x, weight, offsets)
    gpu, columns = current(x.device.index or 0), x.shape[1]
    if x.dtype is torch.bfloat16 and (is_prepacked(weight) or activation is None):
        rounded = x if activation is None else round_rows(x, activation, input_scale)
        is_many = is_prepacked(weight) or len(x) >= STORED_ROWS * weight.shape[0]
        if is_many and sm90_codes_gemm_many.takes_experts(weight, gpu):
            return sm90_codes_gemm_many.grouped_gemm_many(aligned_rows(rounded), weight, offsets, bias)
    if is_prepacked(weight):
        weight = restore(weight)
    if activation is None:
        return portable_grouped_gemm.grouped_codes_gemm(x, weight, offsets, bias)
    if bias is not None:
        # Kernels that multiply codes by codes have no bias of experts.
        row = torch.arange(len(x), device=offsets.device)
        expert = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=len(bias) - 1)
        return _on_gpu(x, weight, offsets, input_scale, activation, None) + bias[expert].to(x.dtype)
    whole = columns % max(activation.block[1], 2) == 0 and columns <= portable_casts.MAX_COLUMNS
    scale = None if activation.global_scale else input_scale
    second = input_scale if activation.global_scale else None
    # Codes by codes where tensor cores can; otherwise x is rounded and W decoded to 16 bit.
    if whole and gpu.has_fp8 and portable_grouped_gemm.takes_fp8(weight.format, activation):
        rows = portable_casts.quantize(x, activation, scale=scale)
        return portable_grouped_gemm.grouped_fp8_gemm(rows, weight, offsets, x.dtype)
    if whole and gpu.has_block_scales and portable_block_scaled_gemm.takes(weight.format, activation):
        rows = portable_casts.quantize(x, activation, global_scale=second)
        return portable_block_scaled_gemm.block_scaled_gemm(rows, weight, None, x.dtype, offsets=offsets)
    return portable_grouped_gemm.grouped_codes_gemm(round_rows(x, activation, input_scale), weight, offsets)


def _gradient(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    offsets: torch.Tensor,
    weight_format: str,
    columns: int,
) -> torch.Tensor:
    weight = BlockScaledTensor(codes, scale, FORMATS[weight_format], (*codes.shape[:2], columns), global_scale)
    x = gradient.new_zeros(len(gradient), columns)
    with torch.cuda.device_of(gradient):
        for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
            if stop > start:
                x[start:stop] = input_gradient(gradient[start:stop], weight.matrix(expert))
    return x


class _Grouped(torch.autograd.Function):
    """`quant::grouped_linear` where the input needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> torch.Tensor:
        x, codes, scale, global_scale, _, offsets, ctx.weight_format, *_ = args
        ctx.columns = x.shape[1]
        ctx.save_for_backward(codes, scale, global_scale, offsets)
        return below_autograd(torch.ops.quant.grouped_linear.default, keyset, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x = torch.ops.quant.grouped_linear_input_gradient(gradient, *ctx.saved_tensors, ctx.weight_format, ctx.columns)
        return None, x, *(None,) * 8


def _with_gradients(keyset: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Grouped.apply(keyset, x, *arguments)  # type: ignore[no-any-return, no-untyped-call]
    return below_autograd(torch.ops.quant.grouped_linear.default, keyset, x, *arguments)


def _fake(x: torch.Tensor, codes: torch.Tensor, *arguments: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


def _fake_gradient(gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return gradient.new_empty(gradient.shape[0], arguments[-1])


register(
    GROUPED_LINEAR,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? input_scale, Tensor offsets, "
    "str weight_format, str activation, Tensor? bias) -> Tensor",
    _fake,
    autograd=_with_gradients,
    default=_grouped,
)
register(
    f"{GROUPED_LINEAR}_input_gradient",
    "(Tensor gradient, Tensor codes, Tensor scale, Tensor? global_scale, Tensor offsets, str weight_format, "
    "int columns) -> Tensor",
    _fake_gradient,
    default=_gradient,
)
