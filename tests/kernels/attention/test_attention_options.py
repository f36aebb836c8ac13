"""`attention` agrees with a float64 twin under every option, as oracle and as Triton kernel on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from interpreter import interpreted
from slow_cases import quick_cases

from quant.kernels.attention.attention_operands import DIMS, HEAD_DIMS, quantize_blocks, scale_blocks
from quant.kernels.attention.forward import attention, fp8_attention
from quant.kernels.attention.reference import reference

triton = pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")

P_ERROR = 0.045  # P keeps four significant bits: 2.6e-2 in the mean square, and some for few keys
BF16 = 2.0**-8


def operand(
    shape: tuple[int, ...], dtype: torch.dtype, scales: str, cu: torch.Tensor | None = None, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random codes, with random scales of the granularity that is named."""
    x = (torch.randn(shape) * 1.5).to(dtype).to(device)
    if dtype != torch.float8_e4m3fn:
        return x, None
    blocks = scale_blocks(shape[2], None if cu is None else len(cu) - 1)
    size = {"tensor": (1,), "head": shape[:2], "block": (*shape[:2], blocks)}[scales]
    return x, (torch.rand(size) + 0.5).to(device)


def spread(scale: torch.Tensor | None, x: torch.Tensor, cu: list[int] | None) -> torch.Tensor:
    """The value of each code, row by row: a twin of what the kernels do by index."""
    x = x.double().cpu()
    if scale is None:
        return x
    scale = scale.double().cpu()
    if scale.dim() < 3:
        return x * scale.reshape(scale.shape + (1,) * (4 - scale.dim()) if scale.dim() == 2 else (1, 1, 1, 1))
    out = torch.empty_like(x)
    bounds = cu or [0, x.shape[2]]
    for i, (a, b) in enumerate(pairwise(bounds)):
        for row in range(a, b):
            out[:, :, row] = x[:, :, row] * scale[:, :, a // 128 + i + (row - a) // 128, None]
    return out


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 by the definition, every sequence and option spelled out."""
    cu = [options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    cu_q, cu_k = (None if c is None else c.tolist() for c in cu)
    bounds_q, bounds_k = cu_q or [0, q.shape[2]], cu_k or [0, k.shape[2]]
    dense = (spread(options.get(f"{n}_scale"), x, c) for n, x, c in (("q", q, cu_q), ("k", k, cu_k), ("v", v, cu_k)))
    q, k, v = dense
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = torch.zeros(*q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for i in range(len(bounds_q) - 1):
        rows, keys = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        scores = torch.einsum("bhqd,bhkd->bhqk", q[:, :, rows], k[:, :, keys]) * options["softmax_scale"]
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        n_q, n_k = scores.shape[-2:]
        if not n_q or not n_k:
            continue
        place = torch.arange(n_q)[:, None] + n_k - n_q
        key = torch.arange(n_k)[None, :]
        hidden = torch.zeros(n_q, n_k, dtype=torch.bool)
        if options.get("causal"):
            hidden |= key > place
        if options.get("window"):
            hidden |= (key <= place - options["window"]) | (key >= place + options["window"])
        scores = scores.masked_fill(hidden, -math.inf)
        out[:, :, rows] = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1).nan_to_num(0.0), v[:, :, keys])
        lse[:, :, rows] = scores.logsumexp(-1)
    return out, lse


def case(
    dim: int = 64,
    heads: tuple[int, int] = (4, 2),
    length: tuple[int, int] = (150, 200),
    dtype: torch.dtype = torch.float8_e4m3fn,
    scales: str = "block",
    batch: int = 2,
    cu: tuple[list[int], list[int]] | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Operands and options of one call."""
    options.setdefault("softmax_scale", 0.8 / math.sqrt(dim))
    if cu is not None:
        batch, length = 1, (cu[0][-1], cu[1][-1])
        bounds = [torch.tensor(c, dtype=torch.int32, device=device) for c in cu]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))
    made = []
    for name, n, count in (("q", heads[0], length[0]), ("k", heads[1], length[1]), ("v", heads[1], length[1])):
        bound = options.get("cu_seqlens_q" if name == "q" else "cu_seqlens_k")
        x, scale = operand((batch, n, count, dim), dtype, scales, bound, device)
        made.append(x)
        if scale is not None:
            options[f"{name}_scale"] = scale
    return *made, options


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], arch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernel on the CPU: `attention` with the oracle taken out."""
    from unittest.mock import patch

    from quant.kernels.attention import forward as module
    from quant.kernels.attention import portable_dense_attention as kernel

    def attend(*args: Any) -> None:
        launch(*args, arch=arch)

    launch = kernel.attend
    with (
        interpreted(),
        patch.object(module, "has_attention_kernel", lambda *_: True),
        patch.object(kernel, "attend", attend),
    ):
        return attention(q, k, v, return_lse=True, **options)


PACKED = ([0, 70, 70, 71, 250], [0, 100, 103, 240, 370])
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, more queries than keys": {"causal": True, "length": (200, 90)},
    "window": {"window": 37, "length": (170, 300)},
    "causal window": {"window": 50, "causal": True, "length": (300, 300)},
    "window of one": {"window": 1, "causal": True},
    "wide window": {"window": 1000, "causal": True},
    "a window of as many keys as 31 bits count": {"window": 2**31 - 1, "length": (90, 70)},
    "softcap": {"softcap": 2.0, "causal": True},
    "scale per tensor": {"scales": "tensor"},
    "scale per head": {"scales": "head", "causal": True},
    "packed": {"cu": PACKED},
    "packed, causal": {"cu": PACKED, "causal": True},
    "packed, window, per head": {"cu": PACKED, "causal": True, "window": 33, "scales": "head"},
    "dim 96": {"dim": 96, "causal": True},
    "dim 128": {"dim": 128, "window": 60, "causal": True},
    "dim 192": {"dim": 192, "batch": 1, "causal": True},
    "dim 256": {"dim": 256, "batch": 1, "heads": (2, 1)},
    "bf16": {"dtype": torch.bfloat16, "causal": True},
    "bf16, window, softcap": {"dtype": torch.bfloat16, "window": 40, "softcap": 3.0, "dim": 96},
    "bf16, packed": {"dtype": torch.bfloat16, "cu": PACKED, "causal": True},
    "fp16": {"dtype": torch.float16},
}


def check(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], fp8: bool) -> None:
    """Outputs to the rounding of P, the log-sum-exp to that of float32."""
    out, lse = (x.double().cpu() for x in got)
    assert bool(out.isfinite().all())
    assert float((out - expected[0]).norm() / expected[0].norm()) < (P_ERROR if fp8 else BF16)
    hidden = expected[1] == -math.inf
    assert bool((out[hidden] == 0).all()) and bool((lse[hidden] == -math.inf).all())
    torch.testing.assert_close(lse[~hidden], expected[1][~hidden], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "arch"),
    quick_cases(product(CASES, (90, 120)), lambda name, arch: list(CASES).index(name) % 2 == (arch == 120)),
)
def test_kernel_against_float64(name: str, arch: int) -> None:
    q, k, v, options = case(**CASES[name])
    check(kernel(q, k, v, options, arch), exact(q, k, v, options), q.dtype.itemsize == 1)


@pytest.mark.parametrize("name", CASES)
def test_oracle_against_float64(name: str) -> None:
    q, k, v, options = case(**CASES[name])
    expected = exact(q, k, v, options)
    check(attention(q, k, v, return_lse=True, **options), expected, q.dtype.itemsize == 1)
    unrounded = reference(q, k, v, **options, dtype=torch.float64, compute=torch.float64, round_p=False)
    torch.testing.assert_close(unrounded, expected)


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("name", ["causal", "bf16"])
def test_output_in_fp32_is_what_narrower_ones_are_rounded_from(name: str, arch: int) -> None:
    q, k, v, options = case(**CASES[name])
    wide = kernel(q, k, v, {**options, "dtype": torch.float32}, arch)[0]
    narrow = kernel(q, k, v, {**options, "dtype": torch.bfloat16}, arch)[0]
    assert wide.dtype is torch.float32 and not torch.equal(wide, narrow.float())
    assert torch.equal(wide.bfloat16(), narrow)


def test_nan_reaches_the_queries_that_see_it_and_no_others() -> None:
    q, k, v, options = case(dtype=torch.bfloat16, causal=True, length=(90, 90))
    k[0, 0, 40, 3] = torch.nan
    group = q.shape[1] // k.shape[1]
    for out, lse in (attention(q, k, v, return_lse=True, **options), kernel(q, k, v, options, 90)):
        wrong = torch.zeros(q.shape[:3], dtype=torch.bool)
        wrong[0, :group, 40:] = True
        assert torch.equal(lse.isnan(), wrong) and torch.equal(out.isnan(), wrong[..., None].expand(q.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_operands_at_any_address(dtype: torch.dtype) -> None:
    """Contiguous views that begin behind the first element of their memory."""
    aligned, odd = [], []
    for _ in range(3):
        memory = torch.randn(2 * 4 * 70 * 64 + 1, device="cuda").to(dtype)
        odd.append(memory[1:].view(2, 4, 70, 64))
        aligned.append(odd[-1].clone())
    ones = {} if dtype is torch.bfloat16 else {f"{x}_scale": torch.ones(1, device="cuda") for x in "qkv"}
    assert torch.equal(attention(*odd, causal=True, **ones), attention(*aligned, causal=True, **ones))


def test_log_sum_exp_only_on_request() -> None:
    q, k, v, options = case()
    whole, _ = attention(q, k, v, return_lse=True, **options)
    assert torch.equal(attention(q, k, v, **options), whole)


def test_op_for_compilers() -> None:
    q, k, v, options = case(length=(20, 30))
    scales = [torch.ones(2, x.shape[1], 1) for x in (q, k, v)]
    args = (q, k, v, *scales, True, 5, None, 0.125, None, None, 20, torch.bfloat16, False, True)
    torch.library.opcheck(torch.ops.quant.attention.default, args, test_utils="test_faketensor")
    compiled = torch.compile(lambda *x: attention(*x, causal=True, **options) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, causal=True, **options) + 1)


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 4, 80)}, "head dimension 80; the kernel takes 64, 96, 128, 192, 256|differ in"),
        ({"q": torch.zeros(1, 3, 4, 64)}, "2 KV heads do not divide 3 heads"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"softcap": -1.0}, "softcap -1.0 must be positive"),
        ({"q_scale": None}, "E4M3 operands need q_scale"),
        ({"q_scale": torch.ones(2)}, r"q_scale is torch.float32 \[2\], expected .* \[1, 4\] .per head. or \[1, 4, 1\]"),
        ({"v_scale": torch.ones(1, dtype=torch.float64)}, "v_scale is torch.float64"),
        ({"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)}, "belong together; one is missing"),
        ({"max_seqlen_q": 3}, "max_seqlen_q 3 without cu_seqlens_q"),
        ({"cu": ([0, 5], [0, 4])}, r"cu_seqlens_q \[0, 5\] must rise from 0 to the 4 tokens"),
        ({"cu": ([0, 3, 2, 4], [0, 1, 2, 4])}, "must rise"),
        ({"cu": ([0, 2, 4], [0, 4])}, r"are \[3\] and \[2\], expected both"),
        ({"dtype": torch.float64}, "output dtype torch.float64; expected bfloat16, float16 or float32"),
        ({"k_scale": torch.ones(1, device="meta")}, "on different devices"),
        ({"k": torch.zeros(1, 2, 0, 64), "v": torch.zeros(1, 2, 0, 64)}, "no keys to attend to"),
    ],
)
def test_bad_input_is_named_before_any_launch(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"q": torch.zeros(1, 4, 4, 64)}
    given |= {"k": torch.zeros(1, 2, 4, 64), "v": torch.zeros(1, 2, 4, 64)}
    given |= {f"{n}_scale": torch.ones(1) for n in "qkv"} | change
    for name in "qkv":
        given[name] = given[name].to(torch.float8_e4m3fn)
    if "cu" in given:
        for name, bounds in zip(("cu_seqlens_q", "cu_seqlens_k"), given.pop("cu"), strict=True):
            given[name] = torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attention(**given)


def test_16_bit_operands_have_no_scales() -> None:
    x = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q_scale given, but operands in torch.bfloat16 have no scales"):
        attention(x, x, x, q_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"v torch.float16; expected one dtype"):
        attention(x, x, x.half())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_gpu_against_float64(name: str, dim: int) -> None:
    given = {**CASES[name], "dim": dim}
    q, k, v, options = case(**given, device="cuda")
    out, lse = attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = exact(q, k, v, options)
    fp8 = q.dtype.itemsize == 1
    assert bool(out.isfinite().all())
    assert float((out.double().cpu() - expected).norm() / expected.norm()) < (P_ERROR if fp8 else BF16)
    seen = expected_lse > -math.inf
    assert bool((lse.cpu()[~seen] == -math.inf).all())
    # Hopper's FP8 dots keep about 13 bits of a sum.
    torch.testing.assert_close(lse.double().cpu()[seen], expected_lse[seen], rtol=0, atol=1e-2 if fp8 else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [(1, 1), (333, 500), (1000, 1000), (700, 300)], ids=str)
def test_gpu_without_log_sum_exp(length: tuple[int, int], causal: bool) -> None:
    """What a forward pass without gradients launches: odd lengths, no log-sum-exp."""
    q, k, v, options = case(length=length, causal=causal, device="cuda")
    out = attention(q, k, v, **options).double().cpu()
    expected, _ = exact(q, k, v, options)
    assert bool(out.isfinite().all())
    assert float((out - expected).norm() / expected.norm()) < P_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["causal", "packed", "bf16"])
def test_gpu_output_in_fp32_is_what_narrower_ones_are_rounded_from(name: str, dim: int) -> None:
    q, k, v, options = case(**{**CASES[name], "dim": dim}, device="cuda")
    wide = attention(q, k, v, **options, dtype=torch.float32)
    assert not torch.equal(wide, wide.bfloat16().float())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(wide.to(dtype), attention(q, k, v, **options, dtype=dtype))


GROWTH = ("sharp", "rising", "falling", "sink", "scales of v", "block of zeros", "alike")


def growing(kind: str, dim: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A case in which the largest score, or V's unit, moves from tile to tile of 128 keys."""
    length = (500, 900)
    q, k, v, options = case(dim=dim, heads=(2, 1), length=length, batch=1, **options)
    key = torch.linspace(0, 1, length[1])[:, None]
    shared = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    q, k, v = (x.float() for x in (q, k, v))
    if kind == "sharp":
        options["softmax_scale"] *= 8
    elif kind in ("rising", "falling"):
        q = q + 8 * shared
        k = k + 30 * shared * (key if kind == "rising" else 1 - key)
    elif kind == "sink":
        q = q + 4 * shared
        k[:, :, 0] += 40 * shared
        v[:, :, 0] *= 0.05
    elif kind == "scales of v":
        options["v_scale"] = torch.exp2(torch.randint(-8, 9, options["v_scale"].shape).float())
    elif kind == "block of zeros":
        v[:, :, 256:384] = 0
        options["v_scale"][:, :, 2] = 1e-30
    elif kind == "alike":
        q = q * 0
    return *(x.to(torch.float8_e4m3fn) for x in (q, k, v)), options


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", GROWTH)
def test_gpu_scores_that_outgrow_those_before(kind: str, dim: int, causal: bool) -> None:
    """Keys pass from the last to the first, and powers are taken against a reference that may have been outgrown."""
    q, k, v, options = growing(kind, dim, causal=causal)
    expected, expected_lse = exact(q, k, v, options)
    device = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse = (x.double().cpu() for x in attention(q.cuda(), k.cuda(), v.cuda(), return_lse=True, **device))
    assert bool(out.isfinite().all())
    assert float((out - expected).norm() / expected.norm()) < P_ERROR
    # Hopper's FP8 dots keep about 13 bits of a sum.
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("op", ["attention", "fp8_attention"])
def test_gpu_sums_over_many_keys_keep_the_mean_of_v(op: str, dim: int, causal: bool) -> None:
    """One sum in Hopper's tensor cores over 32,760 keys would lose 30% of it."""
    if op == "fp8_attention" and dim not in HEAD_DIMS:
        pytest.skip(f"fp8_attention takes {HEAD_DIMS}")
    q, k, v = (torch.randn(1, 1, n, dim, device="cuda") for n in (130, 32760, 32760))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v + 1))
    ones = torch.ones(3, device="cuda")
    options = dict.fromkeys(("q_scale", "k_scale", "v_scale"), ones[:1]) | {"causal": causal}
    out = attention(q, k, v, **options) if op == "attention" else fp8_attention(q, k, v, ones, causal=causal)
    expected = exact(q.cpu(), k.cpu(), v.cpu(), {"softmax_scale": 1 / math.sqrt(dim), "causal": causal})[0]
    out = out.double().cpu()
    # P is rounded to E4M3, which takes up to a thousandth from all rows alike.
    assert abs(float((out * expected).sum() / expected.square().sum()) - 1) < 4e-3
    assert float((out - expected).norm() / expected.norm()) < 6e-3


def test_blocks_of_128_tokens_share_a_scale_by_their_largest_magnitude() -> None:
    x = torch.randn(2, 3, 150, 16, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize_blocks(x)
    assert codes.shape == x.shape and scale.shape == (2, 3, 2)
    for block, rows in enumerate((slice(0, 128), slice(128, 150))):
        part = x[:, :, rows].numpy()
        step = (np.abs(part).max((2, 3)) / np.float32(448)).astype(np.float32)
        assert np.array_equal(scale[:, :, block].numpy(), step)
        expected = (part / step[..., None, None]).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(codes[:, :, rows].view(torch.uint8).numpy(), expected.view(np.uint8))
