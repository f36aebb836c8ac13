"""The fixture compiles Hopper's matmuls for sm_90 without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quant.kernels.base.ptx import CompiledKernel


def _compiled(
    kernel: Any, block_m: int, depth: int, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    x_layout = gl.NVMMASharedLayout.get_default_for([block_m, 64], gl.bfloat16)
    types = {
        "x_map": f"tensordesc<bf16[{block_m}, 64],{x_layout!r}>",
        "w_map": f"tensordesc<i32[{2 * depth}, 256],{flat!r}>",
        "s_map": f"tensordesc<i32[{depth}, 64],{flat!r}>",
        "global_scale": "*fp32",
        "block_scale": "*i32",
        "bias": "*bf16",
        "y": "*bf16",
        "sums": "*fp32",
        "counters": "*i32",
        **types,
    }
    names = kernel.arg_names
    types = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name == "N"]
    source = GluonASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})
    warps = options["num_warps"]
    return CompiledKernel(kernel.fn.__name__, result.asm["ptx"], 90, (), warps, result.metadata.shared)


@pytest.fixture
def compile_matmul() -> Callable[..., CompiledKernel]:
    """Compiles a kernel from its tile of x, types beside those that all have, constants and compiler's options."""
    return _compiled
