"""Each step between the matmuls of a decoder layer is one launch here: few launches keep decoding fast.

    add_rmsnorm        h = x + residual, and h / rms(h) · weight
    swiglu             silu(gate) · up, of one matmul's output [tokens, 2 · intermediate]
    rotate_and_store   q, k, v of one matmul's output: q and k normed and rotated, k and v written to their page
    greedy             the column of the largest logit of each row, -1 where a logit is NaN
    rotate             q, k of a server's batch: each head turned by the angles of its token's position
    store_rows         k, v of a server's batch to the slots of a paged cache in 16 bit

vLLM hides the cache from its graph, so rotating and storing are two steps there; both read the matmul's output where it
lies.

Decoding one token reads every weight once and takes a millisecond or two, in which some hundreds of kernels start,
each before the previous one has ended (`kernels/base/portable_dependent_launch.py`). Every intermediate is rounded to
16 bit where the modules of transformers round it, so the values are equal to theirs up to the last bit of a reciprocal
root or an exponential.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.base.launch import check_tensors, on_its_gpu
from quant.kernels.base.portable_dependent_launch import overlap_options, start_next, wait_for_previous

_HEADS = 8  # heads of one program: enough for a coalesced access, few enough that one token occupies several SMs


@triton.jit
def _rotate_heads(source, target, c, s, first, heads, half: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Rotates `block` heads from `first` on, but none beyond `heads`, by angles of the cosines c and sines s."""
    dtype: tl.constexpr = target.dtype.element_ty
    column = tl.arange(0, width)
    head = first + tl.arange(0, block)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    offset = head[:, None] * (2 * half) + column[None, :]
    low = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + offset + half, mask=inside, other=0.0).to(tl.float32)
    # One rounding at the end, as torch.compile makes of vLLM's own lines.
    tl.store(target + offset, (low * c - high * s).to(dtype), mask=inside)
    tl.store(target + offset + half, (high * c + low * s).to(dtype), mask=inside)


@triton.jit
def rotate_kernel(
    q, k, positions, cache, q_out, k_out, q_stride, k_stride, heads, kv_heads,
    half: tl.constexpr, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Rotates `block` heads of one token: programs of q come first, then programs of k."""
    start_next(overlap)
    token = tl.program_id(0).to(tl.int64)
    of_queries = tl.cdiv(heads, block)
    index = tl.program_id(1)
    # No kernel of a step writes positions or angles, so they are read while the matmul of q, k, v still runs. The sines
    # follow the cosines.
    column = tl.arange(0, width)
    cosines = cache + tl.load(positions + token).to(tl.int64) * (2 * half) + column
    c = tl.load(cosines, mask=column < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(cosines + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(overlap)
    if index < of_queries:
        target = q_out + token * heads * (2 * half)
        _rotate_heads(q + token * q_stride, target, c, s, index * block, heads, half, width, block)
    else:
        target = k_out + token * kv_heads * (2 * half)
        first = (index - of_queries) * block
        _rotate_heads(k + token * k_stride, target, c, s, first, kv_heads, half, width, block)


@triton.jit
def store_rows_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, page_stride, slot_stride, head_stride, page_size, heads,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """All heads of one token, unless its slot is negative."""
    start_next(overlap)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    wait_for_previous(overlap)
    column = tl.arange(0, width)[None, :]
    head = tl.arange(0, block)[:, None]
    inside = (head < heads) & (column < dim) & (slot >= 0)
    source = head * dim + column
    target = slot // page_size * page_stride + slot % page_size * slot_stride + head * head_stride + column
    tl.store(k_cache + target, tl.load(k + token * k_stride + source, mask=inside), mask=inside)
    tl.store(v_cache + target, tl.load(v + token * v_stride + source, mask=inside), mask=inside)


def rotate(positions: Tensor, q: Tensor, k: Tensor, cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns q and k `[tokens, heads · dim]` rotated, contiguous: column i of a head pairs with column i + dim / 2."""
    # `cache` is `[most positions, dim]`, cosines and then sines, in the dtype of q.
    heads, kv_heads, half = q.shape[1] // dim, k.shape[1] // dim, dim // 2
    turned = q.new_empty(q.shape), k.new_empty(k.shape)
    if len(q):
        rotate_kernel[len(q), triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)](
            q, k, positions, cache, *turned, q.stride(0), k.stride(0), heads, kv_heads, half=half,
            width=triton.next_power_of_2(half), block=_HEADS, num_warps=4, **overlap_options(q), enable_fp_fusion=True,
        )  # fmt: skip
    return turned


def store_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes k and v `[tokens, heads, dim]` to their slots of a paged cache; further tokens are not written."""
    # Caches are `[pages, page size, heads, dim]`, with equal strides, 1 along `dim`. A slot is page · page size +
    # offset in the page; a negative one writes nothing.
    heads, dim = k.shape[1:]
    if len(slots):
        page_stride, slot_stride, head_stride, _ = k_cache.stride()
        store_rows_kernel[(len(slots),)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), page_stride, slot_stride, head_stride,
            k_cache.shape[1], heads, dim=dim, width=triton.next_power_of_2(dim), block=triton.next_power_of_2(heads),
            num_warps=4, **overlap_options(k), enable_fp_fusion=True,
        )  # fmt: skip


MAX_HIDDEN = 32768


@triton.jit
def _scaled(normed, weight, dtype: tl.constexpr, offset: tl.constexpr):
    """Returns `normed · weight` as Llama rounds it; with `offset`, `normed · (1 + weight)` as Gemma does."""
    if offset:
        return (normed * (1.0 + weight)).to(dtype)
    return (normed.to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def add_rmsnorm_kernel(
    x, residual, weight, hidden, out, K, eps,
    add: tl.constexpr, offset: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One row."""
    start_next(overlap)
    row = tl.program_id(0).to(tl.int64) * K
    column = tl.arange(0, width)
    inside = column < K
    dtype: tl.constexpr = x.dtype.element_ty
    # No kernel of a step writes the norm's weight: it is read before the wait.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if add:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        # The module rounds h to 16 bit, and its norm reads the rounded values.
        rounded = value.to(dtype)
        tl.store(hidden + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normed = _scaled(value * tl.rsqrt(tl.sum(value * value, axis=0) / K + eps), scale, dtype, offset)
    tl.store(out + row + column, normed, mask=inside)


@triton.jit
def swiglu_kernel(both, out, K, gelu: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr):
    """A program computes `width` columns of one row of `out`, from as many of gate and of up, which follows gate."""
    start_next(overlap)
    wait_for_previous(overlap)
    pieces = tl.cdiv(K, width)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * width + tl.arange(0, width)
    inside = column < K
    dtype: tl.constexpr = both.dtype.element_ty
    start = both + row * 2 * K
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + K + column, mask=inside, other=0.0).to(tl.float32)
    # gelu's approximation by tanh is gate · sigmoid(2z).
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if gelu else gate
    gate = (gate / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32)
    tl.store(out + row * K + column, (gate * up).to(dtype), mask=inside)


@triton.jit
def rotate_and_store_kernel(
    qkv, cos, sin, q_norm, k_norm, q, k, v, table, lengths, table_stride, heads, kv_heads, eps,
    norm: tl.constexpr, offset: tl.constexpr, page: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. cos, sin: [batch, dim], the two halves alike; q_norm, k_norm: [dim]."""
    start_next(overlap)
    wait_for_previous(overlap)
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    half: tl.constexpr = dim // 2
    column = tl.arange(0, width)
    inside = column < half
    dtype: tl.constexpr = qkv.dtype.element_ty
    source = qkv + (batch * (heads + 2 * kv_heads) + head) * dim + column
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if norm and head < heads + kv_heads:
        weight = q_norm if head < heads else k_norm
        factor = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / dim + eps)
        first = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(weight + half + column, mask=inside, other=0.0).to(tl.float32)
        low = _scaled(low * factor, first, dtype, offset).to(tl.float32)
        high = _scaled(high * factor, second, dtype, offset).to(tl.float32)
    if head < heads + kv_heads:
        c = tl.load(cos + batch * dim + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + batch * dim + column, mask=inside, other=0.0).to(tl.float32)
        # Each product is rounded before the sum, as the modules do.
        turned = (low * c).to(dtype).to(tl.float32) - (high * s).to(dtype).to(tl.float32)
        high = (high * c).to(dtype).to(tl.float32) + (low * s).to(dtype).to(tl.float32)
        low = turned
    if head < heads:
        turned_query = q + (batch * heads + head) * dim
        tl.store(turned_query + column, low.to(dtype), mask=inside)
        tl.store(turned_query + half + column, high.to(dtype), mask=inside)
    else:
        # The new token is the last of its sequence.
        last = tl.load(lengths + batch) - 1
        of = tl.load(table + batch * table_stride + last // page).to(tl.int64)
        kv_head = (head - heads) % kv_heads
        line = ((of * kv_heads + kv_head) * page + last % page) * dim
        if head < heads + kv_heads:
            tl.store(k + line + column, low.to(dtype), mask=inside)
            tl.store(k + line + half + column, high.to(dtype), mask=inside)
        else:
            tl.store(v + line + column, low.to(dtype), mask=inside)
            tl.store(v + line + half + column, high.to(dtype), mask=inside)


@triton.jit
def _first_largest(value, column):
    """Returns the largest value and its first column; NaN and -1 where one value is NaN."""
    is_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(value == value, value, float("-inf")), axis=0)
    first = tl.min(tl.where(value == top, column, 2147483647), axis=0)
    return tl.where(is_nan, float("nan"), top), tl.where(is_nan, -1, first)


@triton.jit
def largest_of_pieces_kernel(logits, tops, columns, K, pieces, width: tl.constexpr, overlap: tl.constexpr):
    """The largest of one piece of a row."""
    start_next(overlap)
    wait_for_previous(overlap)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * width + tl.arange(0, width)
    value = tl.load(logits + row * K + column, mask=column < K, other=float("-inf")).to(tl.float32)
    top, first = _first_largest(value, column)
    tl.store(tops + row * pieces + tl.program_id(0), top)
    tl.store(columns + row * pieces + tl.program_id(0), first)


@triton.jit
def largest_of_row_kernel(tops, columns, out, pieces, width: tl.constexpr, overlap: tl.constexpr):
    """The largest of one row's pieces."""
    start_next(overlap)
    wait_for_previous(overlap)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, width)
    value = tl.load(tops + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    column = tl.load(columns + row * pieces + piece, mask=piece < pieces, other=2147483647)
    _, first = _first_largest(value, column)
    tl.store(out + row, first.to(out.dtype.element_ty))


@on_its_gpu
def add_rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns `h / rms(h) · weight` and h, where `h = x + residual` `[tokens, hidden]`, or x without a residual."""
    # `eps` is added to the mean square. With `offset` the weight is 1 + `weight`, and only the product is rounded, as
    # in Gemma. ValueError names an argument of another shape, dtype or device, or that is not contiguous, here and
    # below.
    check_operands(
        "add_rmsnorm", x, {"x": (x, x.shape), "residual": (residual, x.shape), "weight": (weight, x.shape[-1:])}
    )
    columns = x.shape[-1]
    if x.dim() != 2 or not 0 < columns <= MAX_HIDDEN:
        raise ValueError(f"add_rmsnorm: x is {list(x.shape)}, expected [tokens, hidden], at most {MAX_HIDDEN} wide")
    out, hidden = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if len(x):
        width = triton.next_power_of_2(columns)
        add_rmsnorm_kernel[len(x),](
            x, x if residual is None else residual, weight, hidden, out, columns, eps,
            add=residual is not None, offset=offset, width=width, num_warps=min(max(width // 256, 1), 16),
            **overlap_options(x), enable_fp_fusion=True,
        )  # fmt: skip
    return out, hidden


@on_its_gpu
def swiglu(both: Tensor, *, gelu: bool = False) -> Tensor:
    """Returns `silu(gate) · up`, `[tokens, intermediate]`, of both `[tokens, 2 · intermediate]`, gate first."""
    # With `gelu`, the gate passes gelu, approximated by tanh, instead of silu.
    check_operands("swiglu", both, {"both": (both, both.shape)})
    if both.dim() != 2 or both.shape[1] % 2:
        raise ValueError(f"swiglu: both is {list(both.shape)}, expected [tokens, 2 · intermediate]")
    tokens, columns = both.shape[0], both.shape[1] // 2
    out = both.new_empty(tokens, columns)
    if out.numel():
        options = {"width": 1024, "num_warps": 4, **overlap_options(both)}
        swiglu_kernel[tokens * triton.cdiv(columns, 1024),](
            both, out, columns, gelu=gelu, **options, enable_fp_fusion=True
        )
    return out


@on_its_gpu
def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, pages: KVPages, block_table: Tensor, lengths: Tensor, *,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, offset: bool = False,
) -> Tensor:  # fmt: skip
    """Returns rotated q, `[batch, heads, 1, dim]`; k, rotated, and v go to the last position of each sequence.

    Args:
        qkv: `[batch, (heads + 2 · kv_heads) · dim]`, contiguous, in the dtype of the pages, which are in 16 bit.
        cos, sin: `[batch, dim]`, in the dtype of `qkv`, the two halves alike.
        block_table, lengths: int32 `[batch, most pages]` and `[batch]`: tokens of each sequence, the new one included.
        norms: weights `[dim]` of the RMS norms that each head of q and of k passes before it is rotated.
        offset: of these norms, as in `add_rmsnorm`.
    """
    batch, dim, kv_heads = qkv.shape[0], pages.dim, pages.kv_heads
    heads, remainder = divmod(qkv.shape[-1] - 2 * kv_heads * dim, dim)
    if pages.format is not None or pages.k.dtype != qkv.dtype:
        held = pages.format or pages.k.dtype
        raise ValueError(f"rotate_and_store: the pages are in {held}, expected {qkv.dtype}, the dtype of qkv")
    if qkv.dim() != 2 or remainder or heads < 1:
        raise ValueError(f"rotate_and_store: qkv is {list(qkv.shape)}, expected [batch, (heads + 2·{kv_heads})·{dim}]")
    shape = (batch, dim)
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]]
    expected = {"qkv": (qkv, qkv.shape), "cos": (cos, shape), "sin": (sin, shape), "pages": (pages.k, pages.k.shape)}
    q_norm, k_norm = norms or (None, None)
    expected |= {"the norm of q": (q_norm, (dim,)), "the norm of k": (k_norm, (dim,))}
    check_operands("rotate_and_store", qkv, expected)
    for name, tensor in (("block_table", block_table), ("lengths", lengths)):
        if tensor.dtype != torch.int32 or len(tensor) != batch or tensor.device != qkv.device:
            raise ValueError(f"rotate_and_store: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
    q = qkv.new_empty(batch, heads, 1, dim)
    if batch:
        # Unfused: an FMA would not round a product that the modules round before adding it.
        rotate_and_store_kernel[heads + 2 * kv_heads, batch](
            qkv, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, q, pages.k, pages.v,
            block_table, lengths, block_table.stride(0), heads, kv_heads, eps, norm=norms is not None,
            offset=offset, page=pages.page_size, dim=dim, width=triton.next_power_of_2(dim // 2), num_warps=1,
            enable_fp_fusion=False,
            **overlap_options(qkv),
        )  # fmt: skip
    return q


@on_its_gpu
def greedy(logits: Tensor) -> Tensor:
    """Returns the first column of the largest logit of each row, int64 `[tokens]`; -1 where a logit is NaN."""
    check_operands("greedy", logits, {"logits": (logits, logits.shape)})
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"greedy: logits is {list(logits.shape)}, expected [tokens, vocabulary]")
    tokens, columns = logits.shape
    out = torch.empty(tokens, dtype=torch.int64, device=logits.device)
    if tokens:
        # At most 1024 pieces, which the second kernel reads at once.
        width = max(1024, triton.next_power_of_2(triton.cdiv(columns, 1024)))
        pieces = triton.cdiv(columns, width)
        tops = torch.empty(tokens, pieces, dtype=torch.float32, device=logits.device)
        firsts = torch.empty(tokens, pieces, dtype=torch.int32, device=logits.device)
        overlap = overlap_options(logits)
        largest_of_pieces_kernel[pieces, tokens](
            logits, tops, firsts, columns, pieces, width=width, **overlap, enable_fp_fusion=True
        )
        wide = triton.next_power_of_2(pieces)
        largest_of_row_kernel[(tokens,)](
            tops, firsts, out, pieces, width=wide, num_warps=1, **overlap, enable_fp_fusion=True
        )
    return out


def check_operands(name: str, x: Tensor, arguments: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raises ValueError unless every argument has its shape, and the 16-bit dtype and the device of x."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: {next(iter(arguments))} is {x.dtype}, expected float16 or bfloat16")
    check_tensors(name, x, {argument: (tensor, shape, x.dtype) for argument, (tensor, shape) in arguments.items()})
