"""Attention runs in FP8 or 16 bit through one function for every option, and the ops behind it.

    out = attention(q, k, v, q_scale=…, k_scale=…, v_scale=…, causal=True)        E4M3 operands, BF16 out
    out, lse = attention(q, k, v, window=4096, softcap=50.0, return_lse=True)     BF16 operands

A scale covers a tensor, a head, or a block of 128 tokens of a head. A CPU runs the oracle
(`quant.kernels.attention.reference`), Hopper a warp-specialised kernel (`kernels/attention/sm90_dense_attention.py`),
any other GPU with the tensor cores a Triton kernel (`kernels/attention/portable_dense_attention.py`), and a GPU without
them the oracle.

`fp8_attention` is the op with one scale per tensor that exporters know; its kernel is compiled ahead of time for
TensorRT (`quant.export.tensorrt.plugin`).

One pass quantizes Q, K and V for FP8 attention and lays them out as the attention kernel reads them.

    operands = quantize_attention(q, k, v, hadamard=True)
    out = operands.attend(causal=True)
    out = attend_in_fp8(q, k, v)                 both as one op, without a mask, for models that are compiled

Each block of 128 tokens of a head has its scale, amax / 448, unless scales are given. With `hadamard`, Q and K are
first multiplied by a random-sign Hadamard matrix: scores stay, outliers spread over the head. On Hopper V comes out
transposed, keys in the order of `attention_operands.lay_out_v`. On a CPU, PyTorch computes the same values, to the bit.
"""

from dataclasses import dataclass
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from quant.formats.format import E4M3
from quant.formats.scaling import finite_or_nan
from quant.kernels.attention.attention_operands import (
    DIMS,
    HEAD_DIMS,
    SCALE_BLOCK,
    AttentionKeywords,
    AttentionOptions,
    MaskKeywords,
    QuantizedParts,
    Scales,
    block_of_rows,
    check_devices,
    check_heads,
    check_sequences,
    lay_out_v,
    restore_v,
    scale_blocks,
    scale_of_rows,
)
from quant.kernels.attention.reference import fp8_attention_reference, reference
from quant.kernels.base import hardware
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import capability_of, has_fp8_tensor_cores, is_on_hopper
from quant.kernels.rounding.hadamard import random_sign_rotation


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **keywords: Unpack[AttentionKeywords]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[AttentionKeywords]
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **keywords: Unpack[AttentionKeywords]
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax(cap(q kᵀ · softmax_scale) + mask) v.

    Args:
        q: `[batch, heads, seq_q, dim]`, E4M3 with scales, or BF16 or FP16 without; any strides.
        k, v: `[batch, kv_heads, seq_kv, dim]`, of q's dtype; `kv_heads` divides `heads`. Between packed sequences in 16
            bit on Hopper, NaN in V also reaches the sequence before its own; from a head's first, another head's last.
        return_lse: whether to return the log-sum-exp of each query's scores, too, float32 `[batch, heads, seq_q]`.
            Attention over parts of the keys is merged by it. A query that sees no key has zeros, and −inf there.
        keywords: see `AttentionOptions`.

    Raises:
        ValueError: operands that do not fit each other, or that no kernel takes.
    """
    where = f"attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    options = _resolved(where, q, k, v, AttentionOptions(**keywords))
    out, lse = torch.ops.quant.attention(q, k, v, *options, return_lse)
    return (out, lse) if return_lse else out


def _resolved(where: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionOptions:
    """Returns the options, checked, with scales per block and no default left open."""
    cu_q, cu_k, longest = options.cu_seqlens_q, options.cu_seqlens_k, options.max_seqlen_q
    # A laid-out V is `[batch, kv_heads, dim, keys]`, keys padded to whole blocks of 128.
    if options.v_laid_out and k.dim() == 4:
        expected = (*k.shape[:2], k.shape[3], _blocks(k, cu_k) * SCALE_BLOCK)
        if tuple(v.shape) != expected or v.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{where}: a laid-out v of these keys is float8_e4m3fn {list(expected)}, not {v.dtype}")
    check_heads(where, q, k, k if options.v_laid_out else v, DIMS)
    options.check(where)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{where}: {dtypes}; expected one dtype of float8_e4m3fn, bfloat16 and float16")
    needed = q.dtype == torch.float8_e4m3fn
    scales = {"q_scale": options.q_scale, "k_scale": options.k_scale, "v_scale": options.v_scale}
    wrong = ", ".join(name for name, scale in scales.items() if (scale is not None) != needed)
    if wrong and needed:
        raise ValueError(f"{where}: E4M3 operands need {wrong}; torch.ones(1) where codes are values")
    if wrong:
        raise ValueError(f"{where}: {wrong} given, but operands in {q.dtype} have no scales")
    if cu_q is None and cu_k is None and longest not in (None, q.shape[2]):
        raise ValueError(f"{where}: max_seqlen_q {longest} without cu_seqlens_q")
    check_sequences(where, q, k, cu_q, cu_k)
    check_devices(where, q, k, v, options.q_scale, options.k_scale, options.v_scale, cu_q, cu_k)
    # The grid needs the longest sequence on the host, so this waits for the GPU; callers pass it to avoid that.
    if longest is None:
        longest = q.shape[2] if cu_q is None else int(cu_q.diff().max())
    return options._replace(
        q_scale=_expanded_scale(f"{where}: q_scale", options.q_scale, q, cu_q),
        k_scale=_expanded_scale(f"{where}: k_scale", options.k_scale, k, cu_k),
        v_scale=_expanded_scale(f"{where}: v_scale", options.v_scale, k, cu_k),
        softmax_scale=options.scale_of(q.shape[3]),
        max_seqlen_q=longest,
        dtype=options.dtype or (torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype),
    )


def _blocks(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return scale_blocks(x.shape[2], None if cu_seqlens is None else len(cu_seqlens) - 1)


def _expanded_scale(where: str, scale: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Returns a view `[batch, heads, blocks]`, of stride 0 where one scale serves many."""
    if scale is None:
        return None
    shape = (x.shape[0], x.shape[1], _blocks(x, cu_seqlens))
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), shape[:2], shape):
        raise ValueError(
            f"{where} is {scale.dtype} {list(scale.shape)}, expected float32 [] or [1] (one for all), "
            f"{list(shape[:2])} (per head) or {list(shape)} (per block of {SCALE_BLOCK} tokens)"
        )
    if scale.dim() < 2:
        # Stride 0: kernels index scales by batch, head and block, whatever the caller gave.
        return scale.reshape(1, 1, 1).expand(shape)
    return scale if scale.dim() == 3 else scale[:, :, None].expand(shape)


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """Returns softmax(q kᵀ · softmax_scale) v over E4M3 operands; zeros where a query sees no key.

    Args:
        q: E4M3 `[batch, heads, seq_q, dim]`.
        k, v: E4M3 `[batch, kv_heads, seq_kv, dim]`; `kv_heads` divides `heads`.
        scales: the scales of q, k and v, float32 `[3]`, positive: a value is its code times its scale.
        causal: query i sees the keys up to i + seq_kv − seq_q: the last query sees all of them.
    """
    where = f"FP8 attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    check_heads(where, q, k, v, HEAD_DIMS)
    options = AttentionOptions(softmax_scale=softmax_scale, dtype=dtype)
    options.check(where)
    wrong = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.dtype != torch.float8_e4m3fn]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} must be float8_e4m3fn; quantize them first")
    if scales.shape != (3,) or scales.dtype != torch.float32:
        raise ValueError(f"{where}: scales are {scales.dtype} {list(scales.shape)}, expected float32 [3] (q, k, v)")
    check_devices(where, q, k, v, scales)
    scale = options.scale_of(q.shape[3])
    return torch.ops.quant.fp8_attention(q, k, v, scales, causal, scale, dtype)


def has_attention_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether the device of `x` has a kernel for operands of `dtype`."""
    # Ada and later multiply in FP8, Ampere and later in BF16.
    return capability_of(x) >= ((8, 9) if dtype == torch.float8_e4m3fn else (8, 0))


def _attention(q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    """Implements `quant::attention`; the log-sum-exp is empty unless it is requested."""
    *fields, with_lse = arguments
    options = AttentionOptions(*fields)  # type: ignore[arg-type]
    hopper = is_on_hopper(q)
    if options.v_laid_out and not hopper:
        v = restore_v(v, k.shape[2], options.cu_seqlens_k)
    if not has_attention_kernel(q, q.dtype):
        out, lse = reference(q, k, v, **options._asdict())
        return out, lse if with_lse else lse.new_empty(0)
    out, lse = _fake_attention(q, k, v, *arguments)
    # Kernels take contiguous operands at multiples of 16 bytes; a view, such as from `transpose(1, 2)`, is copied here.
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q.contiguous(), k.contiguous(), v.contiguous()))
    if hopper:
        from quant.kernels.attention import portable_fp8_operands
        from quant.kernels.attention import sm90_dense_attention as kernel

        # wgmma reads FP8 operands K-major only, and the K of P · V is the keys: V must be transposed.
        if options.scales is not None and not options.v_laid_out:
            v = portable_fp8_operands.lay_out_v(v, options.cu_seqlens_k)
    else:
        from quant.kernels.attention import portable_dense_attention as kernel  # type: ignore[no-redef]
    kernel.attend(q, k, v, out, lse if with_lse else None, options)
    return out, lse


def _fake_attention(q: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    *_, dtype, _, with_lse = arguments
    assert isinstance(dtype, torch.dtype)
    lse_shape = q.shape[:3] if with_lse else [0]
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(lse_shape, dtype=torch.float32)


def run_fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, causal: bool, softmax_scale: float, dtype: torch.dtype, *,
    in_graph: bool = False,
) -> Tensor:  # fmt: skip
    """Computes `quant::fp8_attention`; with `in_graph`, in a way that a compiler can trace."""
    if not has_fp8_tensor_cores(q):
        return fp8_attention_reference(
            q, k, v, scales, causal=causal, softmax_scale=softmax_scale, dtype=dtype, whole=in_graph
        )
    from quant.kernels.attention.portable_dense_attention import attend_fp8

    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    attend_fp8(q, k, v, scales, out, causal, softmax_scale, in_graph=in_graph)
    return out


register(
    "quant::fp8_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor scales, bool causal, float softmax_scale, ScalarType dtype) -> Tensor",
    lambda q, *arguments: q.new_empty(q.shape, dtype=arguments[-1]),
    default=run_fp8_attention,
)
register(
    "quant::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, bool causal, int? window, "
    "float? softcap, float softmax_scale, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "
    "ScalarType dtype, bool v_laid_out, bool with_lse) -> (Tensor, Tensor)",
    _fake_attention,
    default=_attention,
)


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
    return torch.ops.quant.attend_in_fp8(q, k, v, softmax_scale)


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
