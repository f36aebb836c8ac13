"""The attention kernel, interpreted on the CPU, and its oracle agree with attention in float64.

E4M3 keeps four significant bits, so a rounded probability is off by up to 1/16 and by 2.6e-2 in the mean square;
outputs of independent values have that same relative error. What must be exact is tested where it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from interpreter import interpreted

from quant.kernels.attention import reference
from quant.kernels.attention.attention_operands import HEAD_DIMS, tiles_for
from quant.kernels.attention.forward import attention, fp8_attention
from quant.kernels.attention.reference import fp8_attention_reference

triton = pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")

P_ERROR = 0.04  # 2.6e-2 in the mean square, and some for few keys
BF16 = 2.0**-8

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def operands(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int, dim: int, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    shapes = ((batch, heads, seq_q, dim), (batch, kv_heads, seq_kv, dim), (batch, kv_heads, seq_kv, dim))
    scales = torch.tensor([0.9, 1.2, 0.3])
    return *((torch.randn(s) * 1.5).to(torch.float8_e4m3fn).to(device) for s in shapes), scales.to(device)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, row by row of the definition: an independent twin of the oracle."""
    q, k, v = (x.double() * float(s) for x, s in zip((q, k, v), scales, strict=True))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * softmax_scale
    if causal:
        seq_q, seq_kv = scores.shape[-2:]
        visible = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=q.device).tril(seq_kv - seq_q)
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    arch: int = 90,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The Triton kernel on the CPU, into an output that holds NaN before."""
    from quant.kernels.attention.portable_dense_attention import attend_fp8

    out = torch.full(q.shape, math.nan, dtype=dtype)
    with interpreted():
        attend_fp8(q, k, v, scales, out, causal, softmax_scale, arch=arch)
    return out


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "seq_q", "seq_kv"),
    [(64, 4, 2, 77, 77), (64, 2, 2, 1, 200), (128, 3, 1, 130, 150), (128, 2, 2, 150, 70), (256, 2, 1, 129, 131)],
)
def test_kernel_against_float64(
    dim: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int, causal: bool, arch: int
) -> None:
    given = (*operands(2, heads, kv_heads, seq_q, seq_kv, dim), causal, 0.7 / math.sqrt(dim))
    out = kernel(*given, arch=arch)
    expected, expected_lse = exact(*given)
    assert error(out, expected) < P_ERROR
    assert bool((out[expected_lse == -math.inf] == 0).all())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_oracle_against_float64(causal: bool) -> None:
    given = (*operands(2, 4, 2, 60, 90, 128), causal, 1 / math.sqrt(128))
    assert error(fp8_attention(*given[:4], causal=causal), exact(*given)[0]) < P_ERROR


@pytest.mark.parametrize("rows", [1, 7])
def test_oracle_in_pieces_is_the_oracle(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(1, 2, 1, 20, 25, 64)
    whole = fp8_attention_reference(*given, causal=True, whole=True)
    monkeypatch.setattr(reference, "_SCORES", rows * 2 * 25)
    torch.testing.assert_close(fp8_attention_reference(*given, causal=True), whole, rtol=1e-2, atol=1e-5)


def rounded_as_it_passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, softmax_scale: float, block: int
) -> torch.Tensor:
    """Full attention of one head with P rounded against the running maximum, as the kernel's loop does it."""
    scores = (q.float() @ k.float().mT) * (scales[0] * scales[1] * softmax_scale / math.log(2))
    top = torch.full((q.shape[-2], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(q.shape[-2], v.shape[-1])
    for start in range(0, k.shape[-2], block):
        part = scores[:, start : start + block]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        p, decay = torch.exp2(part - new + 8), torch.exp2(top - new)
        out = out * decay + p.to(torch.float8_e4m3fn).float() @ v[start : start + block].float()
        total, top = total * decay + p.sum(-1, keepdim=True), new
    return out / total * scales[2]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_kernel_rounds_where_its_docstring_says(dim: int) -> None:
    """To the rounding of the output, and not to that of P: the error of P is the same on both sides."""
    q, k, v, scales = operands(1, 1, 1, 70, 300, dim)
    out = kernel(q, k, v, scales, False, 1 / math.sqrt(dim))
    block = tiles_for(dim, 90).block_kv
    expected = rounded_as_it_passes(q[0, 0], k[0, 0], v[0, 0], scales, 1 / math.sqrt(dim), block)
    # A probability on a tie of E4M3 may fall to either side.
    assert error(out[0, 0], expected.double()) < BF16 / 2
    assert float((out[0, 0] - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_equal_scores_give_the_mean_exactly() -> None:
    """P is then 2⁸ everywhere, which E4M3 holds: only the output is rounded."""
    q, k, v, scales = operands(1, 2, 1, 5, 200, 64)
    q = torch.zeros_like(q)
    for out in (kernel(q, k, v, scales, False, 1.0), fp8_attention(q, k, v, scales, softmax_scale=1.0)):
        mean = (v.double() * float(scales[2])).mean(2, keepdim=True).expand(1, 2, 5, 64)
        torch.testing.assert_close(out.double(), mean, rtol=BF16, atol=1e-6)


def test_output_in_fp16() -> None:
    given = (*operands(1, 2, 2, 40, 40, 64), True, 0.125)
    fine, coarse = kernel(*given, dtype=torch.float16), kernel(*given)
    torch.testing.assert_close(fine.float(), coarse.float(), rtol=2 * BF16, atol=1e-6)
    assert not torch.equal(fine.float(), coarse.float())
    oracle = fp8_attention(*given[:4], causal=True, dtype=torch.float16)
    assert oracle.dtype is torch.float16 and error(oracle, exact(*given)[0]) < P_ERROR


def test_parts_join_by_their_log_sum_exp() -> None:
    """What split-KV decoding does with the log-sum-exp."""
    q, k, v, scales = operands(1, 2, 1, 30, 160, 128)
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    halves = (slice(0, 64), slice(64, 160))
    parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True, **options) for s in halves]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
    joined = sum(w * out.float() for w, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(joined, torch.Tensor)
    assert error(joined, exact(q, k, v, scales, False, 1 / math.sqrt(128))[0]) < P_ERROR


def test_interpreting_leaves_compilation_as_it_was() -> None:
    """Inside the context kernels are interpreted; after it, the same kernel compiles for a GPU."""
    from quant.export.tensorrt.plugin import Attributes, compile_attention

    kernel(*operands(1, 1, 1, 4, 4, 64), True, 1.0)
    assert "wgmma" in compile_attention(64, Attributes(causal=1, softmax_scale=0.3), 90).ptx
    with pytest.raises(RuntimeError):
        triton.language.cdiv(3, 2)


def test_op_under_compile_and_export() -> None:
    q, k, v, scales = operands(2, 4, 2, 10, 12, 64)

    class Attends(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return fp8_attention(q, k, v, scales, causal=True) * 2

    program = torch.export.export(Attends(), (q, k, v), strict=False)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.quant.fp8_attention.default in targets
    torch.testing.assert_close(program.module()(q, k, v), Attends()(q, k, v), rtol=0, atol=0)
    args = (q, k, v, scales, True, 0.125, torch.bfloat16)
    torch.library.opcheck(torch.ops.quant.fp8_attention.default, args, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 4, 96)}, "head dimension 96; the kernel takes 64, 128, 256"),
        ({"k": torch.zeros(1, 3, 4, 64), "v": torch.zeros(1, 3, 4, 64)}, "3 KV heads do not divide 4 heads"),
        ({"v": torch.zeros(1, 2, 5, 64)}, "expected q .batch, heads, seq_q, dim"),
        ({"k": torch.zeros(2, 2, 4, 64), "v": torch.zeros(2, 2, 4, 64)}, "differ in batch or head dimension"),
        ({"k": torch.zeros(1, 2, 0, 64), "v": torch.zeros(1, 2, 0, 64)}, "no keys to attend to"),
        ({"scales": torch.ones(2)}, r"scales are torch.float32 \[2\]"),
        ({"softmax_scale": 0.0}, "softmax_scale 0.0 must be positive"),
        ({"dtype": torch.float64}, "output dtype torch.float64"),
        ({"raw": torch.zeros(1, 2, 4, 64)}, "k must be float8_e4m3fn"),
    ],
)
def test_bad_input_is_named_before_any_launch(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"q": torch.zeros(1, 4, 4, 64), "k": torch.zeros(1, 2, 4, 64)}
    given |= {"v": torch.zeros(1, 2, 4, 64), "scales": torch.ones(3)}
    if "raw" not in change:
        given |= change
    if given["q"].shape[-1] == 96:
        given["k"] = given["v"] = torch.zeros(1, 2, 4, 96)
    for name in "qkv":
        given[name] = given[name].to(torch.float8_e4m3fn)
    if "raw" in change:
        given["k"] = change["raw"]
    with pytest.raises(ValueError, match=message):
        fp8_attention(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 1), (333, 333), (129, 1000), (300, 77), (1024, 1024)])
def test_gpu_kernel_against_float64(dim: int, causal: bool, seq_q: int, seq_kv: int) -> None:
    given = (*operands(2, 4, 2, seq_q, seq_kv, dim, "cuda"), causal, 1 / math.sqrt(dim))
    out = fp8_attention(*given[:4], causal=causal)
    assert bool(out.isfinite().all())
    assert error(out, exact(*given)[0]) < P_ERROR
