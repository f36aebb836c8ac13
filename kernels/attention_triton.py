"""The FP8 attention kernel in Triton: FlashAttention's forward pass over E4M3 operands, with plain pointer loads.

One program computes `block_q` rows of one head. Its Q tile stays on chip; K and V pass in tiles of `block_kv` keys,
and the softmax is kept up to date as they pass (m: largest score so far, l: sum so far):

            keys  0 ─────────────── full ───── end          q : [batch, heads,    seq_q,  dim]
         ┌───────────────────────────┬──────────┐           k, v: [batch, kv_heads, seq_kv, dim]
    rows │  loop without a mask      │ masked   │ block_q
         └───────────────────────────┴──────────┘
    S = Q Kᵀ · log2(e) · scales         FP8 dot, FP32
    m' = max(m, rowmax S);  P = 2^(S − m' + 8)
    l = l · 2^(m − m') + Σ P;  O = O · 2^(m − m') + e4m3(P) V

Only tiles that the causal diagonal or the end of the keys crosses are masked. A causal launch starts the blocks of
most work first, so that the short ones fill the GPU's tail. Head h reads KV head h // (heads / kv_heads).

Arguments come in the order that TensorRT fixes for kernels inside an engine: inputs, integers, outputs. Nothing is
known of the integers, so that one compiled kernel serves every shape; floats are compile-time constants, for an
engine cannot pass them.
"""

import torch
import triton
import triton.language as tl

from quant.kernels.attention import tiles_for


@triton.jit
def _attend(
    output,
    row_max,
    row_sum,
    q,
    k_head,
    v_head,
    start,
    last,
    seq_kv,
    log2_scale,
    masked: tl.constexpr,
    causal: tl.constexpr,
    dim: tl.constexpr,
    block_kv: tl.constexpr,
):
    """Takes one tile of keys in. `last`: the last key that each row sees."""
    key = start + tl.arange(0, block_kv)
    d = tl.arange(0, dim)
    k_tile = k_head + key[None, :] * dim + d[:, None]
    v_tile = v_head + key[:, None] * dim + d[None, :]
    if masked:
        k = tl.load(k_tile, mask=key[None, :] < seq_kv, other=0.0)
        v = tl.load(v_tile, mask=key[:, None] < seq_kv, other=0.0)
    else:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    scores = tl.dot(q, k) * log2_scale
    if masked:
        visible = key[None, :] < seq_kv
        if causal:
            visible = visible & (key[None, :] <= last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum: without this, −inf − (−inf) would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if masked else new_max
    p = tl.math.exp2(scores - (shift - 8.0)[:, None])
    decay = tl.math.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(p, 1)
    output = tl.dot(p.to(v.dtype), v, output * decay[:, None])
    return output, new_max, row_sum


@triton.jit
def attention_forward(
    q,
    k,
    v,
    scales,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    out,
    lse,
    softmax_scale: tl.constexpr,
    causal: tl.constexpr,
    dim: tl.constexpr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
):
    """Grid: (blocks of queries, heads, batch). `lse` may be None."""
    block = tl.program_id(0)
    if causal:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = block * block_q + tl.arange(0, block_q)
    d = tl.arange(0, dim)
    first_row = (batch * heads + head).to(tl.int64) * seq_q
    first_key = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64) * seq_kv
    k_head = k + first_key * dim
    v_head = v + first_key * dim
    tile = first_row * dim + row[:, None] * dim + d[None, :]
    inside = row < seq_q
    q_tile = tl.load(q + tile, mask=inside[:, None], other=0.0)
    log2_scale = tl.load(scales) * tl.load(scales + 1) * (softmax_scale * 1.4426950408889634)

    last = row + (seq_kv - seq_q)
    end = seq_kv
    full = seq_kv
    if causal:
        end = tl.minimum(seq_kv, (block + 1) * block_q + (seq_kv - seq_q))
        full = tl.maximum(tl.minimum(seq_kv, block * block_q + (seq_kv - seq_q) + 1), 0)
    full = full // block_kv * block_kv

    output = tl.zeros([block_q, dim], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)
    for start in tl.range(0, full, block_kv):
        output, row_max, row_sum = _attend(
            output, row_max, row_sum, q_tile, k_head, v_head, start, last, seq_kv, log2_scale,
            False, causal, dim, block_kv,
        )  # fmt: skip
    for start in tl.range(full, end, block_kv):
        output, row_max, row_sum = _attend(
            output, row_max, row_sum, q_tile, k_head, v_head, start, last, seq_kv, log2_scale,
            True, causal, dim, block_kv,
        )  # fmt: skip

    seen = row_sum > 0
    output = output * (tl.load(scales + 2) / tl.where(seen, row_sum, 1.0))[:, None]
    tl.store(out + tile, output.to(out.dtype.element_ty), mask=inside[:, None])
    if lse is not None:
        value = (row_max - 8.0 + tl.math.log2(tl.where(seen, row_sum, 1.0))) * 0.6931471805599453
        tl.store(lse + first_row + row, tl.where(seen, value, float("-inf")), mask=inside)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    arch: int | None = None,
) -> None:
    """Runs the kernel on dense operands; `arch` chooses the tiles, by default those of the operands' GPU."""
    if out.numel():
        grid, arguments, constants = _launch_of(q, k, v, scales, out, lse, causal, softmax_scale, arch)
        attention_forward[grid](*arguments, **constants)


def launch_in_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The launch as a node that `torch.compile` and AOTInductor see: they compile the kernel into what they make."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    grid, arguments, constants = _launch_of(q, k, v, scales, out, None, causal, softmax_scale, None)
    torch.library.wrap_triton(attention_forward)[grid](*arguments, **constants)
    return out


def _launch_of(q, k, v, scales, out, lse, causal, softmax_scale, arch):
    """Grid, run-time arguments and compile-time ones."""
    batch, heads, seq_q, dim = q.shape
    if arch is None:
        major, minor = torch.cuda.get_device_capability(q.device)
        arch = 10 * major + minor
    tiles = tiles_for(dim, arch)
    constants = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "dim": dim,
        "block_q": tiles.block_q,
        "block_kv": tiles.block_kv,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    arguments = (q, k, v, scales, heads, k.shape[1], seq_q, k.shape[2], out, lse)
    return (triton.cdiv(seq_q, tiles.block_q), heads, batch), arguments, constants
