"""FP8 attention as a custom op: `quant::fp8_attention`, and `quant::fp8_attention_lse` with the log-sum-exp.

Q, K and V are E4M3 with one scale each; the output is BF16 or FP16. As for every op of ours, the CPU body is the
oracle (`attention_reference`), the fake body gives shapes, and the CUDA body is a Triton kernel
(`attention_triton`), where the GPU has FP8 tensor cores; an older GPU runs the oracle.

The same kernel is compiled ahead of time for TensorRT (`quant.export.plugin`). What a launch needs to know, tile
sizes by head dimension and GPU, is here, so that it can be read where Triton is not installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quant.kernels.attention_reference import attention_reference

HEAD_DIMS = (64, 128, 256)
"""Head dimensions that the kernel takes."""

_ARGS = "(Tensor q, Tensor k, Tensor v, Tensor scales, bool causal, float softmax_scale, ScalarType dtype)"
_OUTPUT_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut: queries and keys of a tile, warps of a program, and stages of its pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def tiles_for(dim: int, arch: int) -> Tiles:
    """Tiles of the kernel.

    Args:
        dim: head dimension, one of `HEAD_DIMS`.
        arch: compute capability as a number, 90 for Hopper.

    Raises:
        ValueError: `dim` is none of them.
    """
    if dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"FP8 attention: head dimension {dim}; the kernel takes {known}; keep this one in 16 bit")
    if arch // 10 in (9, 10):  # 227 KiB of shared memory
        return Tiles(128, 128, 8, 2) if dim == 256 else Tiles(128, 128, 8, 3)
    # 99 KiB of shared memory, and mma.sync, which holds its operands in registers.
    return Tiles(64, 32, 4, 2) if dim == 256 else Tiles(128, 64, 8, 3)


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
        dtype: of the output, BF16 or FP16.

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
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"{where}: expected q [batch, heads, seq_q, dim] and k, v [batch, kv_heads, seq_kv, dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{where}: q and k differ in batch or head dimension")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{where}: {k.shape[1]} KV heads do not divide {q.shape[1]} heads")
    if k.shape[2] == 0:
        raise ValueError(f"{where}: there are no keys to attend to")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"{where}: head dimension {q.shape[3]}; the kernel takes {', '.join(map(str, HEAD_DIMS))}")
    wrong = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.dtype != torch.float8_e4m3fn]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} must be float8_e4m3fn; quantize them first")
    if scales.shape != (3,) or scales.dtype != torch.float32:
        raise ValueError(f"{where}: scales are {scales.dtype} {list(scales.shape)}, expected float32 [3] (q, k, v)")
    if len({x.device for x in (q, k, v, scales)}) > 1:
        raise ValueError(f"{where}: on different devices ({q.device}, {k.device}, {v.device}, scales {scales.device})")
    if dtype not in _OUTPUT_DTYPES:
        raise ValueError(f"{where}: output dtype {dtype}; expected bfloat16 or float16")
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"{where}: softmax_scale {softmax_scale} must be positive")
    return 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)


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
        from quant.kernels.attention_triton import launch

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
        from quant.kernels.attention_triton import launch

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
