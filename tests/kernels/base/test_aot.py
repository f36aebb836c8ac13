"""PTX made without a GPU holds the right instructions, passes `ptxas`, and computes attention on a GPU."""

from __future__ import annotations

import math
import re

import pytest
import torch
from assembler import assemble
from loaded_kernel import LoadedKernel
from slow_cases import quick_cases

from quant.export.tensorrt.plugin import Attributes, compile_attention, integer_arguments, launch_grid
from quant.kernels.attention.attention_operands import HEAD_DIMS, tiles_for
from quant.kernels.base.ptx import ARCHITECTURES, CompiledKernel, compile_kernel, without_scratch

pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")

# The instruction that multiplies E4M3 by E4M3 on each architecture, from NVIDIA's PTX manual.
FP8_DOT = {
    89: r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    120: r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32",
}
# Any instruction of a tensor core that takes 16-bit operands: a silent fallback.
HALF_DOT = r"(wgmma|mma\.sync)\S*\.(f16|bf16)\.(f16|bf16)|kind::f16"
SHARED_LIMIT = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@pytest.fixture(
    params=quick_cases(
        [((arch, dim),) for arch in ARCHITECTURES for dim in HEAD_DIMS],
        lambda case: case[1] == 128 or case == (120, 64),
    ),
    ids=str,
)
def compiled(request: pytest.FixtureRequest) -> CompiledKernel:
    arch, dim = request.param
    return compile_attention(dim, Attributes(causal=1), arch)


def test_ptx_of_the_attention_kernel(compiled: CompiledKernel, request: pytest.FixtureRequest) -> None:
    """FP8 dots, no half-precision ones, 16-byte loads, hardly a spill, and it fits the GPU's shared memory."""
    arch = compiled.arch
    assert re.search(rf"^\.target {ARCHITECTURES[arch]}\b", compiled.ptx, re.MULTILINE)
    assert re.search(r"^\.version 8\.7$", compiled.ptx, re.MULTILINE)  # drivers of CUDA 12.8 and later read it
    assert re.search(FP8_DOT[arch], compiled.ptx)
    assert not re.search(HALF_DOT, compiled.ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10,", compiled.ptx)
    assert 0 < compiled.shared <= SHARED_LIMIT[arch]
    resources = assemble(compiled)
    # On Hopper the sum of a tile needs registers beside that of all, 128 each a thread with heads of 256.
    assert resources.spilled <= (768 if request.node.callspec.params["compiled"] == (90, 256) else 0)
    assert 0 < resources.registers <= 255


def test_parameters_are_those_declared(compiled: CompiledKernel) -> None:
    """A launch passes one value per declared argument; the entry must take as many, of these sizes."""
    entry = re.search(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", compiled.ptx, re.DOTALL)
    assert entry is not None and entry[1] == compiled.name
    sizes = [re.search(r"\.param \.(u\d+|b\d+)", line) for line in entry[2].splitlines()]
    bits = [int(size[1][1:]) for size in sizes if size]
    assert bits == [64 if kind.startswith("*") else 32 for _, kind in compiled.arguments]
    names = [name for name, _ in compiled.arguments]
    assert names == ["q", "k", "v", "scales", "heads", "kv_heads", "seq_q", "seq_kv", "out"]


PTX = """.version 8.7
.target sm_90a
.visible .entry f(
	.param .u64 .ptr .global .align 16 f_param_0,
	.param .u32 f_param_1,
	.param .u64 .ptr .global .align 1 f_param_2,
	.param .u64 .ptr .global .align 1 f_param_3
)
.reqntid 128
{
	ld.param.b64 %rd1, [f_param_0];
	ld.param.b32 %r1, [f_param_1];
	ret;
}
"""


def test_scratch_is_cut_from_the_parameters() -> None:
    name, ptx = without_scratch(PTX, 2)
    assert name == "f"
    assert ptx == PTX.replace(
        ",\n\t.param .u64 .ptr .global .align 1 f_param_2,\n\t.param .u64 .ptr .global .align 1 f_param_3", ""
    )


@pytest.mark.parametrize(
    ("ptx", "keep", "message"),
    [
        (PTX.replace("\tret;", "\tld.param.b64 %rd2, [f_param_2];\n\tret;"), 2, "f: uses its scratch memory"),
        (PTX, 5, "f: 4 parameters in PTX, expected at least 5"),
        (PTX + PTX, 2, "2 entries"),
    ],
)
def test_ptx_that_cannot_be_embedded(ptx: str, keep: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        without_scratch(ptx, keep)


def test_a_parameter_of_ten_is_not_parameter_one() -> None:
    """`f_param_1` is part of `f_param_10`, and reading the latter is no use of the former."""
    ptx = PTX.replace("f_param_3", "f_param_10").replace("[f_param_1]", "[f_param_0]")
    assert "f_param_1\n" in without_scratch(ptx, 2)[1]


def test_bad_requests() -> None:
    from quant.kernels.attention.portable_dense_attention import fp8_dense_attention

    with pytest.raises(ValueError, match="cannot compile for 75; known: 89, 90, 100, 120"):
        compile_kernel(fp8_dense_attention, {}, {}, arch=75, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"fp8_dense_attention: parameters .*, but given are"):
        compile_kernel(fp8_dense_attention, {"q": "*fp8e4nv"}, {}, arch=90, num_warps=4, num_stages=2)


def test_ptxas_refuses_what_is_broken() -> None:
    good = compile_attention(64, Attributes(), 90)
    broken = CompiledKernel(good.name, good.ptx.replace("ret;", "return;"), 90, good.arguments, 8, 0)
    with pytest.raises(ValueError, match="ptxas refuses the PTX for sm_90a"):
        assemble(broken)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("output_type", "dtype"), [(16, torch.bfloat16), (10, torch.float16)])
def test_gpu_runs_the_very_ptx(dim: int, causal: int, output_type: int, dtype: torch.dtype) -> None:
    """The PTX that an engine embeds, launched as an engine launches it, against float64."""
    major, minor = torch.cuda.get_device_capability()
    attributes = Attributes(causal, 0.0, output_type)
    loaded = LoadedKernel(compile_attention(dim, attributes, 10 * major + minor))
    for batch, heads, kv_heads, seq_q, seq_kv in ((2, 4, 2, 333, 333), (1, 8, 1, 129, 1000), (3, 2, 2, 64, 31)):
        shapes = [(batch, heads, seq_q, dim), (batch, kv_heads, seq_kv, dim), (batch, kv_heads, seq_kv, dim)]
        q, k, v = ((torch.randn(shape, device="cuda") * 1.5).to(torch.float8_e4m3fn) for shape in shapes)
        scales = torch.tensor([0.9, 1.2, 0.3], device="cuda")
        out = torch.full(shapes[0], math.nan, dtype=dtype, device="cuda")
        addresses = [x.data_ptr() for x in (q, k, v, scales, out)]
        grid = launch_grid(shapes[0], tiles_for(dim, loaded.compiled.arch), lambda a, b: -(-a // b))
        arguments = [*addresses[:4], *integer_arguments(*shapes[:2]), *addresses[4:]]
        loaded.launch(grid, arguments, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        scores = (q.double() * 0.9) @ (k.double() * 1.2).repeat_interleave(heads // kv_heads, 1).mT / math.sqrt(dim)
        if causal:
            hidden = ~torch.ones(seq_q, seq_kv, dtype=torch.bool, device="cuda").tril(seq_kv - seq_q)
            scores = scores.masked_fill(hidden, -math.inf)
        p = scores.softmax(-1).nan_to_num(0.0)
        expected = p @ (v.double() * 0.3).repeat_interleave(heads // kv_heads, 1)
        assert bool(out.isfinite().all())
        assert float((out.double() - expected).norm() / expected.norm()) < 0.04
