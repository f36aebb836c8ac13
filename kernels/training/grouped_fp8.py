"""The ops of experts in FP8 training, with one power of two for each row or block, which torch.compile leaves whole.

    quant::e4m3_blocks(x, height, width, dtype) -> element · scale of x [R, C] in blocks [height, width], scales
    quant::swiglu(both) -> silu(gate) · up of both = [gate, up]; quant::swiglu_backward(dy, both) -> [d gate, d up]
    quant::weigh_rows(rows, positions, weights, tokens, dtype) -> Σ weight · row of each token, [tokens, H]
    quant::weigh_rows_backward(dy, rows, positions, slots, weights) -> d rows, d weights
    quant::e4m3_rows(x) -> codes [R, C], scale [R]
    quant::e4m3_columns(x, offsets, is_stack, scale) -> codes [C, R] or [experts, C, R / experts], scale [experts, C]
    quant::e4m3_product(a, a_scale, b, b_scale, fast, dtype) -> a · bᵀ, rounded to BF16, by PyTorch's FP8 product
    quant::e4m3_grouped_product(a, a_scale, b, b_scale, offsets, exact, dtype) -> a · bᵀ of each expert

Kernels run them on a GPU (`kernels/training/portable_grouped_fp8.py`), PyTorch elsewhere; values in E4M3 take 4
significant bits, so BF16 holds them exactly. The sum of a token has the order of its slots at every call. Hopper
multiplies by CUTLASS's grouped product, which PyTorch has. Sums have fewer bits there, which is an error of 0.2 % where
the rounding of operands is one of 4 %; the same product with more bits is three times slower where experts are small,
and slower than BF16. With `exact`, and on other devices, BF16 (on a CPU, FP32) multiplies element · scale, which it
holds exactly, and sums in FP32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from quant.formats.format import E4M3
from quant.formats.rounding import decode_power_of_two, encode, encode_power_of_two, round_to
from quant.formats.scaling import divided
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import has_fp8_tensor_cores, has_triton


def has_grouped_fp8(x: Tensor) -> bool:
    """Returns whether PyTorch has a grouped FP8 product with a scale for each row on the device of `x`."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def _kernels() -> Any:
    from quant.kernels.training import portable_grouped_fp8

    return portable_grouped_fp8


def _reference_blocks(x: Tensor, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    filled = pad(x.float(), (0, -columns % width, 0, -rows % height))
    blocks = filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # Rounded up, so that no element saturates; the least is 2^-127.
    scale = decode_power_of_two(encode_power_of_two(divided(amax, E4M3.max)))
    values = round_to(blocks / scale, E4M3) * scale
    values = values.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype).contiguous()
    return values, scale[:, 0, :, 0].masked_fill(~amax.isfinite()[:, 0, :, 0], torch.nan)


register(
    "quant::e4m3_blocks",
    "(Tensor x, int height, int width, ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, height, width, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(-(-x.shape[0] // height), -(-x.shape[1] // width), dtype=torch.float32),
    ),
    default=_reference_blocks,
    cuda=lambda x, *arguments: _kernels().round_e4m3_blocks(x, *arguments, has_fp8_tensor_cores(x)),
    where=lambda x: has_triton(),
)


def _reference_swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, 1)
    return functional.silu(gate) * up


register(
    "quant::swiglu",
    "(Tensor both) -> Tensor",
    lambda both: both.new_empty(both.shape[0], both.shape[1] // 2),
    default=_reference_swiglu,
    cuda=lambda both: _kernels().swiglu(both),
    where=lambda both: has_triton(),
)


def _reference_swiglu_backward(dy: Tensor, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, 1)
    return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * functional.silu(gate)], 1)


register(
    "quant::swiglu_backward", "(Tensor dy, Tensor both) -> Tensor", lambda dy, both: both.new_empty(both.shape),
    default=_reference_swiglu_backward, cuda=lambda dy, both: _kernels().swiglu_backward(dy, both),
    where=lambda dy: has_triton(),
)  # fmt: skip


def _reference_weigh_rows(
    rows: Tensor, positions: Tensor, weights: Tensor | None, tokens: int, dtype: torch.dtype
) -> Tensor:
    slots: Tensor = rows.index_select(0, positions).unflatten(0, (tokens, -1)).float()
    slots = slots if weights is None else slots * weights.float()[..., None]
    return slots.sum(1).to(dtype)


register(
    "quant::weigh_rows",
    "(Tensor rows, Tensor positions, Tensor? weights, SymInt tokens, ScalarType dtype) -> Tensor",
    lambda rows, positions, weights, tokens, dtype: rows.new_empty(tokens, rows.shape[1], dtype=dtype),
    default=_reference_weigh_rows,
    cuda=lambda *arguments: _kernels().weigh_rows(*arguments),
    where=lambda rows: has_triton(),
)


def _reference_weigh_rows_backward(
    dy: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    has_token = (slots < weights.numel())[:, None]
    products = (dy.float()[:, None] * weights.float()[..., None]).flatten(0, 1)
    d_rows = torch.where(has_token, products[slots.clamp(max=len(products) - 1)], 0)
    # A slot of no expert has a row of zeros, whose product is zero.
    own = rows.index_select(0, positions).unflatten(0, weights.shape).float()
    return d_rows.to(rows.dtype), (own * dy.float()[:, None]).sum(2).to(weights.dtype)


register(
    "quant::weigh_rows_backward",
    "(Tensor dy, Tensor rows, Tensor positions, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
    lambda dy, rows, positions, slots, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    default=_reference_weigh_rows_backward,
    cuda=lambda dy, rows, positions, slots, weights: _kernels().weigh_rows_backward(dy, rows, slots, weights),
    where=lambda dy: has_triton(),
)


_Rounded = tuple[Tensor, Tensor]  # codes and their scales
_LEAST = 2.0**-126  # the least scale: its reciprocal is finite


def _reference_rows(x: Tensor, scale: Tensor | None = None) -> _Rounded:
    x = x.float()
    amax = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))  # an expert may have no rows
    if scale is None:
        scale = decode_power_of_two(encode_power_of_two(divided(amax, E4M3.max))).clamp(min=_LEAST)
        scale = torch.where(amax == 0, 1.0, scale)
    bad = ~(amax * scale).isfinite()
    codes = encode((x / scale[:, None]).masked_fill(bad[:, None], 0.0), E4M3).view(torch.uint8)
    codes = codes.masked_fill(bad[:, None], 0x7F).view(torch.float8_e4m3fn)
    return codes, scale.masked_fill(bad, torch.nan)


register(
    "quant::e4m3_rows",
    "(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)),
    default=_reference_rows,
    cuda=lambda x: _kernels().e4m3_rows(x),
    where=lambda x: has_triton() and has_fp8_tensor_cores(x),
)


def _empty_columns(x: Tensor, offsets: Tensor, is_stack: bool, scale: Tensor | None = None) -> _Rounded:
    (rows, columns), experts = x.shape, len(offsets)
    shape = (experts, columns, rows // experts) if is_stack else (columns, rows)
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty(experts, columns, dtype=torch.float32)


def _reference_columns(x: Tensor, offsets: Tensor, is_stack: bool, scale: Tensor | None) -> _Rounded:
    codes, scales = _empty_columns(x, offsets, is_stack)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        turned, scales[expert] = _reference_rows(x[begin:end].t(), None if scale is None else scale[expert])
        if is_stack:
            codes[expert] = turned
        else:
            codes[:, begin:end] = turned
        begin = end
    return codes, scales


register(
    "quant::e4m3_columns",
    "(Tensor x, Tensor offsets, bool is_stack, Tensor? scale) -> (Tensor, Tensor)",
    _empty_columns,
    default=_reference_columns,
    cuda=lambda *arguments: _kernels().e4m3_columns(*arguments),
    where=lambda x: has_triton() and has_fp8_tensor_cores(x),
)


register(
    "quant::e4m3_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool fast, ScalarType dtype) -> Tensor",
    lambda a, a_scale, b, b_scale, fast, dtype: a.new_empty(len(a), len(b), dtype=dtype),
    default=lambda a, a_scale, b, b_scale, fast, dtype: (
        ((a.float() * a_scale[:, None]) @ (b.float() * b_scale[:, None]).t()).to(torch.bfloat16).to(dtype)
    ),
    cuda=lambda a, a_scale, b, b_scale, fast, dtype: torch._scaled_mm(
        a, b.t(), a_scale[:, None], b_scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
    ).to(dtype),
)


def _decoded_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, exact: bool, dtype: torch.dtype
) -> Tensor:
    values = torch.bfloat16 if a.is_cuda else torch.float32
    if b.dim() == 3:
        matrices = (b.to(values) * b_scale[:, :, None].to(values)).transpose(1, 2)
        return functional.grouped_mm(a.to(values) * a_scale[:, None].to(values), matrices, offs=offsets).to(dtype)
    # Each expert has scales of its own here, and they are factors of its whole product: FP32 keeps a power of two.
    product = functional.grouped_mm(a.to(values), b.to(values).t(), offs=offsets)
    return (product * a_scale[:, :, None] * b_scale[:, None, :]).to(dtype)


def _product_on_gpu(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, exact: bool, dtype: torch.dtype
) -> Tensor:
    if exact or dtype is not torch.bfloat16 or not has_grouped_fp8(a):
        return _decoded_product(a, a_scale, b, b_scale, offsets, exact, dtype)
    if b.dim() == 2:
        a_scale, b_scale = a_scale.flatten(), b_scale.flatten()
    return torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), a_scale, b_scale, offs=offsets, out_dtype=dtype, use_fast_accum=True
    )


def _empty_products(a: Tensor, a_scale: Tensor, b: Tensor, *arguments: Any) -> Tensor:
    offsets, dtype = arguments[1], arguments[-1]
    return a.new_empty((len(a), b.shape[1]) if b.dim() == 3 else (len(offsets), len(a), len(b)), dtype=dtype)


register(
    "quant::e4m3_grouped_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, bool exact, ScalarType dtype) -> Tensor",
    _empty_products,
    default=_decoded_product,
    cuda=_product_on_gpu,
)
