"""The Triton form of attention compiles, without the GPUs, to PTX with Blackwell's instructions.

Its values are those of `test_attention_options.py`, which interprets it with the same tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
from assembler import assemble

from quant.kernels.attention.attention_operands import tiles_for
from quant.kernels.base.ptx import CompiledKernel, compile_kernel

triton = pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")


def compiled(arch: int, dim: int, *, fp8: bool = True, **options: Any) -> CompiledKernel:
    from quant.kernels.attention.portable_dense_attention import _INTEGERS
    from quant.kernels.attention.portable_dense_attention import dense_attention_with_options as kernel

    tiles = tiles_for(dim, arch, 1 if fp8 else 2)
    packed = options.pop("packed", False)
    types = dict.fromkeys("qkv", "*fp8e4nv" if fp8 else "*bf16")
    constants: dict[str, Any] = {"causal": False, "windowed": False, "capped": False, **options}
    constants |= {"scale_block": 128, "dim": dim, "width": triton.next_power_of_2(dim)}
    constants |= {"block_q": tiles.block_q, "block_kv": tiles.block_kv}
    for names, there, pointer in (
        (("q_scale", "k_scale", "v_scale"), fp8, "*fp32"),
        (("cu_q", "cu_kv"), packed, "*i32"),
        (("lse",), True, "*fp32"),
    ):
        if there:
            types |= dict.fromkeys(names, pointer)
        else:
            constants |= dict.fromkeys(names)
    types |= dict.fromkeys(_INTEGERS, "i32") | {"softmax_scale": "fp32", "softcap": "fp32", "out": "*bf16"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    return compile_kernel(
        kernel, signature, constants, arch=arch, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )


@pytest.mark.parametrize(
    ("arch", "dim", "options", "instruction"),
    [
        (100, 128, {"causal": True}, "kind::f8f6f4"),
        (120, 128, {"causal": True}, "f32.e4m3.e4m3.f32"),
        pytest.param(100, 64, {"packed": True, "windowed": True}, "kind::f8f6f4", marks=pytest.mark.slow),
        pytest.param(100, 96, {"capped": True}, "kind::f8f6f4", marks=pytest.mark.slow),
        pytest.param(100, 256, {}, "kind::f8f6f4", marks=pytest.mark.slow),
        pytest.param(100, 128, {"fp8": False}, "kind::f16", marks=pytest.mark.slow),
        pytest.param(120, 64, {"packed": True, "causal": True}, "f32.e4m3.e4m3.f32", marks=pytest.mark.slow),
        pytest.param(120, 192, {"windowed": True}, "f32.e4m3.e4m3.f32", marks=pytest.mark.slow),
        pytest.param(120, 256, {}, "f32.e4m3.e4m3.f32", marks=pytest.mark.slow),
        pytest.param(120, 128, {"fp8": False}, "f32.bf16.bf16.f32", marks=pytest.mark.slow),
        pytest.param(89, 128, {"causal": True}, "f32.e4m3.e4m3.f32", marks=pytest.mark.slow),
    ],
)
def test_ptx_holds_the_tensor_cores_of_the_target(
    arch: int, dim: int, options: dict[str, Any], instruction: str
) -> None:
    kernel = compiled(arch, dim, **options)
    products = [line for line in kernel.ptx.splitlines() if "mma" in line and instruction in line]
    assert len(products) >= 2  # of Q and K, and of P and V
    assert all(("tcgen05.mma" if arch == 100 else "mma.sync") in line for line in products)
    assert kernel.shared <= {100: 227, 120: 99, 89: 99}[arch] << 10
    assert assemble(kernel).spilled <= 256
