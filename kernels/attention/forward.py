"""Attention, in FP8 or in 16 bit: one function for every option, and the ops behind it.

    out = attention(q, k, v, q_scale=…, k_scale=…, v_scale=…, causal=True)        E4M3 operands, BF16 out
    out, lse = attention(q, k, v, window=4096, softcap=50.0, return_lse=True)     BF16 operands

Scales are one per tensor, per head, or per block of 128 tokens of a head. As for every op of ours, the CPU body is
the oracle (`attention_reference`) and the fake body gives shapes. On a GPU, Hopper runs a warp-specialised kernel
(`attention_gluon`), others a Triton kernel (`attention_triton`); where the GPU lacks the tensor cores, the oracle
runs. `attention_quantize` makes E4M3 operands, and lays V out as Hopper's tensor cores read it.

`fp8_attention` is the op with one scale per tensor that exporters know; its kernel is compiled ahead of time for
TensorRT (`quant.export.engine.plugin`). What a launch needs to know, tile sizes by head dimension and GPU, is here, so
that it can be read where Triton is not installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from quant.kernels.attention_reference import SCALE_BLOCK, attention_reference, reference, restore_v

DIMS = (64, 96, 128, 192, 256)
"""Head dimensions of `attention`."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions of `fp8_attention`, which engines hold."""

_ARGS = "(Tensor q, Tensor k, Tensor v, Tensor scales, bool causal, float softmax_scale, ScalarType dtype)"
_16_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut: queries and keys of a tile, warps of a program, and stages of its pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def tiles_for(dim: int, arch: int, itemsize: int = 1) -> Tiles:
    """Tiles of the Triton kernels.

    Args:
        dim: head dimension, one of `DIMS`.
        arch: compute capability as a number, 90 for Hopper.
        itemsize: bytes of an operand's element.

    Raises:
        ValueError: `dim` is none of them.
    """
    if dim not in DIMS:
        known = ", ".join(map(str, DIMS))
        raise ValueError(f"attention: head dimension {dim}; the kernel takes {known}")
    if arch // 10 in (9, 10):  # 227 KiB of shared memory
        if itemsize > 1:
            return Tiles(128, 64, 8, 2) if dim > 128 else Tiles(128, 128, 8, 2)
        return Tiles(128, 128, 8, 2) if dim > 128 else Tiles(128, 128, 8, 3)
    # 99 KiB of shared memory, and mma.sync, which holds its operands in registers.
    if itemsize > 1:
        return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 32, 8, 3)
    return Tiles(64, 32, 4, 2) if dim > 128 else Tiles(128, 64, 8, 3)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    v_laid_out: bool = False,
    return_lse: Literal[False] = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    v_laid_out: bool = False,
    return_lse: Literal[True],
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    v_laid_out: bool = False,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(cap(q kᵀ · softmax_scale) + mask) v.

    Args:
        q: `[batch, heads, seq_q, dim]`, E4M3 with scales, or BF16 or FP16 without; any strides.
        k, v: `[batch, kv_heads, seq_kv, dim]`, of q's dtype; `kv_heads` divides `heads`.
        q_scale, k_scale, v_scale: float32, positive: a value is its code times its scale. `[]` or `[1]` is one for
            all, `[batch, heads]` one per head, `[batch, heads, blocks]` one per 128 tokens of a head; of k and v,
            heads are KV heads.
        causal: query i sees the keys up to i + seq_kv − seq_q: the last query sees all of them.
        window: a query sees this many keys back, that at its own position included, and without `causal` as many
            ahead; None is no limit.
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
        softmax_scale: positive; None is 1/√dim.
        cu_seqlens_q, cu_seqlens_k: int32 `[sequences + 1]`, from 0 to the number of tokens: batch is then 1, and
            seq_q and seq_kv count the tokens of all sequences, one after the other. Block scales of sequence i start
            at index cu[i] // 128 + i, and there are tokens // 128 + sequences of them.
        max_seqlen_q: length of the longest packed sequence of queries; None reads it from `cu_seqlens_q`, for which
            the GPU has to be waited for.
        v_laid_out: whether v is E4M3 as Hopper's kernel reads it, `[batch, kv_heads, dim, keys]`: see
            `attention_reference.lay_out_v`. A v of rows is laid out on the way there.
        return_lse: whether to return the log-sum-exp of each query's scores, too. With it, attention over parts of
            the keys is put together.
        dtype: of the output, BF16, FP16 or FP32; None is BF16 for E4M3 operands and that of q for others.

    Returns:
        `[batch, heads, seq_q, dim]`, zeros where a query sees no key; with `return_lse` also float32
        `[batch, heads, seq_q]`, −inf there.

    Raises:
        ValueError: operands that do not fit each other, or that no kernel takes.
    """
    where = f"attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if dtype is None:
        dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    if v_laid_out:
        _check_laid_out(where, k, v, cu_seqlens_k)
    _check_operands(where, q, k, k if v_laid_out else v, DIMS, softmax_scale, dtype)
    _check_dtypes(where, q, k, v, (q_scale, k_scale, v_scale))
    _check_sequences(where, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    if window is not None and window < 1:
        raise ValueError(f"{where}: window {window} must be at least 1; None is no limit")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{where}: softcap {softcap} must be positive; None leaves the scores")
    tensors = (q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k)
    if len({x.device for x in tensors if x is not None}) > 1:
        raise ValueError(
            f"{where}: on different devices ({', '.join(str(x.device) for x in tensors if x is not None)})"
        )
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max())
    scales = [
        _expanded_scale(f"{where}: {name}", scale, x, cu)
        for name, scale, x, cu in (
            ("q_scale", q_scale, q, cu_seqlens_q),
            ("k_scale", k_scale, k, cu_seqlens_k),
            ("v_scale", v_scale, k, cu_seqlens_k),
        )
    ]
    out, lse = torch.ops.quant.attention(
        q, k, v, *scales, causal, window, softcap or 0.0,
        1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale),
        cu_seqlens_q, cu_seqlens_k, q.shape[2] if max_seqlen_q is None else max_seqlen_q, dtype, return_lse,
        v_laid_out,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def scale_blocks(tokens: int, sequences: int | None = None) -> int:
    """Scale blocks along the tokens of a head: of one sequence, or of packed ones."""
    return -(-tokens // SCALE_BLOCK) if sequences is None else tokens // SCALE_BLOCK + sequences


def _expanded_scale(
    where: str, scale: torch.Tensor | None, x: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor | None:
    """A view `[batch, heads, blocks]`, of stride 0 where one scale serves many."""
    if scale is None:
        return None
    blocks = scale_blocks(x.shape[2], None if cu_seqlens is None else len(cu_seqlens) - 1)
    shape = (x.shape[0], x.shape[1], blocks)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), shape[:2], shape):
        raise ValueError(
            f"{where} is {scale.dtype} {list(scale.shape)}, expected float32 [] or [1] (one for all), "
            f"{list(shape[:2])} (per head) or {list(shape)} (per block of {SCALE_BLOCK} tokens)"
        )
    if scale.dim() < 2:
        return scale.reshape(1, 1, 1).expand(shape)
    return scale if scale.dim() == 3 else scale[:, :, None].expand(shape)


def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """softmax(q kᵀ · softmax_scale) v over E4M3 operands.

    Args:
        q: E4M3 `[batch, heads, seq_q, dim]`.
        k, v: E4M3 `[batch, kv_heads, seq_kv, dim]`; `kv_heads` divides `heads`.
        scales: of q, k and v, float32 `[3]`, positive: a value is its code times its scale.
        causal: query i sees the keys up to i + seq_kv − seq_q: the last query sees all of them.
        softmax_scale: positive; None is 1/√dim.
        dtype: of the output, BF16, FP16 or FP32.

    Returns:
        `[batch, heads, seq_q, dim]`; zeros where a query sees no key.

    Raises:
        ValueError: operands that do not fit each other, or that the kernel does not take.
    """
    scale = _checked_scale(q, k, v, scales, softmax_scale, dtype)
    return torch.ops.quant.fp8_attention(q, k, v, scales, causal, scale, dtype)  # type: ignore[no-any-return]


def fp8_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fp8_attention`, and the log-sum-exp of each query's scores, float32 `[batch, heads, seq_q]`.

    With it, attention over parts of the keys is put together: ring attention and split-KV decoding do that.
    """
    scale = _checked_scale(q, k, v, scales, softmax_scale, dtype)
    return torch.ops.quant.fp8_attention_lse(q, k, v, scales, causal, scale, dtype)  # type: ignore[no-any-return]


def _checked_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    softmax_scale: float | None,
    dtype: torch.dtype,
) -> float:
    """The softmax scale, after everything was found to fit."""
    where = f"FP8 attention q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    _check_operands(where, q, k, v, HEAD_DIMS, softmax_scale, dtype)
    wrong = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.dtype != torch.float8_e4m3fn]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} must be float8_e4m3fn; quantize them first")
    if scales.shape != (3,) or scales.dtype != torch.float32:
        raise ValueError(f"{where}: scales are {scales.dtype} {list(scales.shape)}, expected float32 [3] (q, k, v)")
    if len({x.device for x in (q, k, v, scales)}) > 1:
        raise ValueError(f"{where}: on different devices ({q.device}, {k.device}, {v.device}, scales {scales.device})")
    return 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)


def _check_operands(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dims: tuple[int, ...],
    softmax_scale: float | None,
    dtype: torch.dtype,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"{where}: expected q [batch, heads, seq_q, dim] and k, v [batch, kv_heads, seq_kv, dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{where}: q and k differ in batch or head dimension")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if k.shape[2] == 0:
        raise ValueError(f"{where}: there are no keys to attend to")
    if q.shape[3] not in dims:
        raise ValueError(f"{where}: head dimension {q.shape[3]}; the kernel takes {', '.join(map(str, dims))}")
    if dtype not in (*_16_BIT, torch.float32):
        raise ValueError(f"{where}: output dtype {dtype}; expected bfloat16, float16 or float32")
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"{where}: softmax_scale {softmax_scale} must be positive")


def _check_laid_out(where: str, k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor | None) -> None:
    if k.dim() != 4:
        return  # another check says what is wrong
    blocks = scale_blocks(k.shape[2], None if cu_seqlens_k is None else len(cu_seqlens_k) - 1)
    expected = (k.shape[0], k.shape[1], k.shape[3], blocks * SCALE_BLOCK)
    if tuple(v.shape) != expected or v.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{where}: a laid-out v of these keys is float8_e4m3fn {list(expected)}, not {v.dtype}")


def _check_dtypes(
    where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: tuple[torch.Tensor | None, ...]
) -> None:
    """One dtype, and scales where it needs them."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float8_e4m3fn, *_16_BIT):
        given = ", ".join(f"{name} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{where}: {given}; expected one dtype of float8_e4m3fn, bfloat16 and float16")
    needed = q.dtype == torch.float8_e4m3fn
    wrong = [n for n, s in zip(("q_scale", "k_scale", "v_scale"), scales, strict=True) if (s is not None) != needed]
    if wrong and needed:
        raise ValueError(f"{where}: E4M3 operands need {', '.join(wrong)}; torch.ones(1) where codes are values")
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} given, but operands in {q.dtype} have no scales")


def _check_sequences(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
) -> None:
    """Packed sequences: shapes always, values where they are at hand, on the CPU."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if max_seqlen_q not in (None, q.shape[2]):
            raise ValueError(f"{where}: max_seqlen_q {max_seqlen_q} without cu_seqlens_q")
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"{where}: cu_seqlens_q and cu_seqlens_k belong together; one is missing")
    if q.shape[0] != 1:
        raise ValueError(f"{where}: packed sequences (cu_seqlens) lie in one batch entry, not in {q.shape[0]}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) < 2:
        shapes = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        raise ValueError(f"{where}: cu_seqlens_q and cu_seqlens_k are {shapes}, expected both [sequences + 1]")
    for name, cu, x in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if cu.dtype != torch.int32:
            raise ValueError(f"{where}: {name} is {cu.dtype}, expected int32")
        if cu.device.type != "cpu":
            continue
        bounds = cu.tolist()
        if bounds[0] != 0 or bounds[-1] != x.shape[2] or bounds != sorted(bounds):
            raise ValueError(f"{where}: {name} {bounds} must rise from 0 to the {x.shape[2]} tokens there are")


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
    softmax_scale: float,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    dtype: torch.dtype,
    with_lse: bool,
    v_laid_out: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Body of `quant::attention`; the log-sum-exp is empty where it is not wanted."""
    hopper = is_hopper(q.device)
    if v_laid_out and not hopper:
        v = restore_v(v, k.shape[2], cu_seqlens_k)
    if not _has_kernel(q):
        out, lse = reference(
            q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=causal, window=window, softcap=softcap,
            softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dtype=dtype,
        )  # fmt: skip
        return out, lse if with_lse else lse.new_empty(0)
    scales = None if q_scale is None or k_scale is None or v_scale is None else (q_scale, k_scale, v_scale)
    packed = None if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:3] if with_lse else 0, dtype=torch.float32)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "softmax_scale": softmax_scale,
        "cu_seqlens": packed,
        "max_seqlen_q": max_seqlen_q,
    }
    if hopper:
        from quant.kernels.hopper import attention as kernel
        from quant.kernels.portable import attention_quantize

        if scales is not None and not v_laid_out:
            v = attention_quantize.lay_out_v(v, cu_seqlens_k)
        kernel.attend(q, k, v, scales, out, lse if with_lse else None, **options)
    else:
        from quant.kernels.portable import attention as kernel

        kernel.attend(q, k, v, scales, out, lse if with_lse else None, **options)
    return out, lse


def _fake_attention(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    *_, dtype, with_lse, _ = rest
    assert isinstance(dtype, torch.dtype)
    lse_shape = q.shape[:3] if with_lse else [0]
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(lse_shape, dtype=torch.float32)


def is_hopper(device: torch.device) -> bool:
    """Whether `device` runs the kernel that is written for Hopper."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def _has_kernel(q: torch.Tensor) -> bool:
    if q.dtype == torch.float8_e4m3fn:
        return has_fp8_tensor_cores(q.device)
    nvidia = q.device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    if has_fp8_tensor_cores(q.device):
        from quant.kernels.portable.attention import launch

        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launch(q.contiguous(), k.contiguous(), v.contiguous(), scales, out, lse, causal, softmax_scale)
        return out, lse
    return attention_reference(q, k, v, scales, causal=causal, softmax_scale=softmax_scale, dtype=dtype)


def _without_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    if has_fp8_tensor_cores(q.device):
        from quant.kernels.portable.attention import launch

        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        launch(q.contiguous(), k.contiguous(), v.contiguous(), scales, out, None, causal, softmax_scale)
        return out
    return attention_reference(q, k, v, scales, causal=causal, softmax_scale=softmax_scale, dtype=dtype)[0]


def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Whether `device` multiplies in FP8: an NVIDIA GPU from Ada (8.9) on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _fake_without_lse(q: torch.Tensor, *rest: object) -> torch.Tensor:
    dtype = rest[-1]
    assert isinstance(dtype, torch.dtype)
    return q.new_empty(q.shape, dtype=dtype)


def _fake_with_lse(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_without_lse(q, *rest), q.new_empty(q.shape[:3], dtype=torch.float32)


torch.library.define("quant::fp8_attention", _ARGS + " -> Tensor")
torch.library.impl("quant::fp8_attention", "default", _without_lse)
torch.library.register_fake("quant::fp8_attention", _fake_without_lse)
torch.library.define("quant::fp8_attention_lse", _ARGS + " -> (Tensor, Tensor)")
torch.library.impl("quant::fp8_attention_lse", "default", _with_lse)
torch.library.register_fake("quant::fp8_attention_lse", _fake_with_lse)
torch.library.define(
    "quant::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, bool causal, int? window, "
    "float softcap, float softmax_scale, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "
    "ScalarType dtype, bool with_lse, bool v_laid_out) -> (Tensor, Tensor)",
)
torch.library.impl("quant::attention", "default", _attention)
torch.library.register_fake("quant::attention", _fake_attention)
