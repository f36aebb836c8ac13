"""The Hopper kernel, compiled without a GPU: W goes from registers into wgmma, and nothing spills.

Its decoding is repeated in PyTorch by test_prepack.py; its values are tested on a GPU by test_matmul_gpu.py.
"""

import re

import pytest

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from quant.kernels import matmul_gluon
from quant.kernels.aot import CompiledKernel, assemble
from quant.kernels.hardware import TARGETS
from quant.kernels.tiles import GluonTiles, bucket, guess


def compiled(block_m: int, steps: int, split: bool, warps: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = matmul_gluon.linear_kernel
    pointers = {"x": "*bf16", "words": "*i32", "scales": "*i32", "global_scale": "*fp32", "bias": "*bf16"}
    pointers |= {"y": "*bf16", "partial": "*fp32", "counter": "*i32"}
    constants = {"has_bias": False, "block_m": block_m, "steps": steps, "split": split}
    names = kernel.arg_names
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = ("N", "K", "x_stride", *pointers)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, constexprs=values, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return CompiledKernel("linear_kernel", result.asm["ptx"], 90, (), warps, result.metadata.shared)


@pytest.mark.parametrize(
    ("block_m", "steps", "split", "warps"),
    [(8, 16, True, 4), (16, 16, True, 8), (64, 8, True, 4), (64, 16, True, 16), (128, 8, True, 8), (16, 64, False, 16)],
)
def test_weights_go_from_registers_into_wgmma(block_m: int, steps: int, split: bool, warps: int) -> None:
    kernel = compiled(block_m, steps, split, warps)
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16\s+\{[^}]*\},\s*(\S)", kernel.ptx
    )
    assert products and all(width == str(block_m) and left == "{" for width, left in products)
    assert "cp.async.cg.shared.global" in kernel.ptx and "ld.global.v4" in kernel.ptx
    assert kernel.shared == 2 * block_m * steps * 64
    assert assemble(kernel).spilled == 0


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336), (4096, 4096), (64, 128), (11008, 4096), (576, 1536)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 33, 64])
def test_a_guess_is_always_a_launch_that_the_kernel_takes(shape: tuple[int, int], tokens: int) -> None:
    from quant.formats.format import FORMATS

    choice = guess(FORMATS["nvfp4"], tokens, shape, TARGETS["h100"], prepacked=True)
    assert isinstance(choice, GluonTiles)
    steps, rest = divmod(shape[1] // 64, choice.splits)
    assert rest == 0 and steps >= 2 and steps & (steps - 1) == 0
    assert choice.block_m >= min(bucket(tokens), 8) and 2 * choice.block_m * steps * 64 <= 227 << 10
