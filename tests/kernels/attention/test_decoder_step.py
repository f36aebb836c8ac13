"""The kernels between a decoder's matmuls agree with the modules of transformers, interpreted and on a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted

from quant.kernels.attention import portable_decoder_step as kernels
from quant.kernels.attention.kv_pages import KVPages
from quant.kernels.base.ptx import compile_kernel

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = (GemmaRMSNorm if offset else LlamaRMSNorm)(x.shape[-1], eps).to(x.device, x.dtype)
    module.weight.data = weight
    return module(x).detach()


def nearly(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for a last bit here and there."""
    differs = y != expected
    assert float(differs.float().mean()) < 0.01
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=0)


def check_norm(device: str, dtype: torch.dtype) -> None:
    for tokens, columns in ((1, 4096), (5, 203), (3, 576)):
        x, residual = (torch.randn(tokens, columns, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(columns, device=device).to(dtype)
        for other in (residual, None):
            y, hidden = kernels.add_rmsnorm(x, other, weight, 1e-5)
            h = x if other is None else x + other
            assert torch.equal(hidden, h)
            nearly(y, rmsnorm(h, weight, 1e-5))
            nearly(kernels.add_rmsnorm(x, other, weight, 1e-5, offset=True)[0], rmsnorm(h, weight, 1e-5, offset=True))


def check_swiglu(device: str, dtype: torch.dtype) -> None:
    for tokens, columns in ((1, 14336), (7, 77)):
        both = (3 * torch.randn(tokens, 2 * columns, device=device)).to(dtype)
        gate, up = both.chunk(2, -1)
        nearly(kernels.swiglu(both), torch.nn.functional.silu(gate) * up)
        # Far below zero, where torch's 1 + tanh cancels to 0, the product is below 1e-4 and matters to nobody.
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(kernels.swiglu(both, gelu=True), expected, rtol=2**-6, atol=1e-3)


def check_greedy(device: str, dtype: torch.dtype) -> None:
    for tokens, columns in ((1, 128256), (3, 1000), (2, 5)):
        logits = torch.randn(tokens, columns, device=device).to(dtype)  # rounded, so that the largest is there twice
        logits[0, columns // 2] = logits[0].max()
        assert torch.equal(kernels.greedy(logits), logits.argmax(-1))
    logits = torch.zeros(7, 2500, device=device, dtype=dtype)
    logits[1, 7:] = float("-inf")
    logits[2] = float("-inf")
    logits[3, 2100] = float("inf")
    logits[4, 2000:] = float("nan")
    logits[5] = float("nan")
    logits[6, 3], logits[6, 2400] = float("inf"), float("nan")
    assert kernels.greedy(logits).tolist() == [0, 0, 0, 2100, -1, -1, -1]


def check_rotation(device: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    shapes = ((8, 2, 128, False, False), (3, 3, 48, False, False), (3, 1, 128, True, False), (2, 2, 64, True, True))
    for heads, kv_heads, dim, normed, offset in shapes:
        lengths = torch.tensor([1, 16, 17, 40], dtype=torch.int32, device=device)
        batch = len(lengths)
        table = torch.randperm(batch * 3, device=device).view(batch, 3).int()
        k = torch.full((batch * 3, kv_heads, 16, dim), 7.0, device=device, dtype=dtype)
        pages = KVPages(k, k.clone(), None, dim)
        qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
        angle = (lengths - 1)[:, None] * 1e4 ** (-torch.arange(0, dim, 2, device=device) / dim)
        cos, sin = (f(torch.cat([angle, angle], -1)).to(dtype) for f in (torch.cos, torch.sin))
        norms = tuple(torch.randn(dim, device=device).to(dtype) for _ in range(2)) if normed else None
        q = kernels.rotate_and_store(qkv, cos, sin, pages, table, lengths, norms=norms, eps=1e-6, offset=offset)
        split = qkv.view(batch, -1, 1, dim).split([heads, kv_heads, kv_heads], 1)
        parts = [
            x if norms is None else rmsnorm(x, w, 1e-6, offset)
            for x, w in zip(split[:2], norms or (None, None), strict=True)
        ]
        expected_q, expected_k = apply_rotary_pos_emb(*parts, cos[:, None], sin[:, None])
        torch.testing.assert_close(q, expected_q, rtol=2**-6 * normed, atol=2**-6 * normed)
        written = torch.zeros(pages.k.shape[:3], dtype=torch.bool, device=device)
        for row, length in enumerate(lengths.tolist()):
            page, slot = int(table[row, (length - 1) // 16]), (length - 1) % 16
            torch.testing.assert_close(
                pages.k[page, :, slot], expected_k[row, :, 0], rtol=2**-6 * normed, atol=2**-6 * normed
            )
            assert torch.equal(pages.v[page, :, slot], split[2][row, :, 0])
            written[page, :, slot] = True
        assert bool((pages.k[~written] == 7).all()) and bool((pages.v[~written] == 7).all())


CHECKS = pytest.mark.parametrize("check", [check_norm, check_swiglu, check_greedy, check_rotation])


@CHECKS
@DTYPES
def test_interpreted(check, dtype: torch.dtype) -> None:
    with interpreted():
        check("cpu", dtype)


@pytest.mark.gpu
@CHECKS
@DTYPES
def test_on_a_gpu(check, dtype: torch.dtype) -> None:
    check("cuda", dtype)


def test_mistakes_name_the_argument() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"add_rmsnorm: residual has shape \[2, 32\], expected \[2, 64\]"):
        kernels.add_rmsnorm(x, x[:, :32], x[0], 1e-5)
    with pytest.raises(ValueError, match=r"x is torch\.float32, expected float16 or bfloat16"):
        kernels.add_rmsnorm(x.float(), None, x[0], 1e-5)
    with pytest.raises(ValueError, match=r"both is not contiguous \(strides \(1, 2\)\)"):
        kernels.swiglu(torch.zeros(64, 2, dtype=torch.bfloat16).T)
    with pytest.raises(ValueError, match=r"both is \[2, 63\], expected"):
        kernels.swiglu(torch.zeros(2, 63, dtype=torch.bfloat16))
    pages = KVPages(torch.zeros(4, 2, 16, 16), torch.zeros(4, 2, 16, 16), None, 16)
    with pytest.raises(ValueError, match=r"in torch\.float32, expected torch\.bfloat16"):
        kernels.rotate_and_store(x, x, x, pages, x, x)


POINTERS = (
    "x",
    "residual",
    "weight",
    "hidden",
    "out",
    "both",
    "logits",
    "qkv",
    "cos",
    "sin",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
)
OTHERS = {"eps": "fp32", "table": "*i32", "lengths": "*i32", "tops": "*fp32", "columns": "*i32"}


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        (kernels.add_rmsnorm_kernel, {"add": True, "offset": True, "width": 4096}, 16),
        (kernels.swiglu_kernel, {"gelu": False, "width": 1024}, 4),
        (kernels.swiglu_kernel, {"gelu": True, "width": 1024}, 4),
        (kernels.largest_of_pieces_kernel, {"width": 1024}, 4),
        (kernels.largest_of_row_kernel, {"width": 128}, 1),
        (kernels.rotate_and_store_kernel, {"norm": False, "offset": False, "page": 64, "dim": 128, "width": 64}, 1),
        (kernels.rotate_and_store_kernel, {"norm": True, "offset": True, "page": 64, "dim": 128, "width": 64}, 1),
    ],
)
def test_compiles_without_spills(arch: int, kernel: Any, constants: dict[str, Any], warps: int) -> None:
    types = {**OTHERS, **dict.fromkeys(POINTERS, "*bf16")}
    constants = {**constants, "overlap": True}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    compiled = compile_kernel(kernel, signature, constants, arch=arch, num_warps=warps, num_stages=1)
    assert assemble(compiled).spilled == 0
    # Nothing that another kernel of the step writes is read, and nothing written, before it has ended.
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before and "st.global" not in before and "st.global" in after
    assert ("ld.global" in before) is (kernel is kernels.add_rmsnorm_kernel)


def test_older_gpus_get_no_instruction_that_they_lack() -> None:
    signature = {"both": "*bf16", "out": "*bf16", "K": "i32"}
    constants = {"gelu": False, "width": 1024, "overlap": False}
    compiled = compile_kernel(kernels.swiglu_kernel, signature, constants, arch=89, num_warps=4, num_stages=1)
    assert "griddepcontrol" not in compiled.ptx and assemble(compiled).spilled == 0


def test_the_rotation_has_no_fused_products() -> None:
    """Compiled as it is launched; with fusion, the rounding of a product before the sum is lost."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = (
        kernels.rotate_and_store_kernel,
        {"norm": False, "offset": False, "page": 64, "dim": 128, "width": 64, "overlap": True},
    )
    kinds = {**OTHERS, **dict.fromkeys(POINTERS, "*bf16")}
    types = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source, target = ASTSource(kernel, types, constexprs=values), GPUTarget("cuda", 90, 32)
    for fused in (True, False):
        options = {"num_warps": 1, "enable_fp_fusion": fused}
        assert ("fma.rn" in triton.compile(source, target=target, options=options).asm["ptx"]) is fused
