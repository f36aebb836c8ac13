"""Hopper's attention kernel compiles to overlapping wgmma, and V's keys lie in the order that it wants.

Gluon has no interpreter; the values are those of `test_attention_options.py`, on a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from assembler import messages, sums_of_values
from interpreter import interpreted

from quant.kernels.attention.attention_operands import lay_out_v, restore_v

triton = pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")


def compiled(dim: int, fp8: bool = True, out: str = "bf16", **options: bool) -> Any:
    """The kernel for sm_90, with the tiles that a launch takes."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from quant.kernels.attention import sm90_dense_attention as module

    width = triton.next_power_of_2(dim)
    tiles = module.TILES[width, 1 if fp8 else 2]
    dtype, name = (gl.float8e4nv, "fp8e4nv") if fp8 else (gl.bfloat16, "bf16")

    def tensor_map(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return f"tensordesc<{name}[{rows}, {columns}],{layout!r}>"

    flags = dict.fromkeys(("causal", "windowed", "capped", "packed", "with_lse"), False) | options
    kernel = module.sm90_dense_attention
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("log2_scale", "cap"), "fp32")
    types |= {"q_map": tensor_map(64, width), "k_map": tensor_map(tiles.block_kv, width), "out": f"*{out}"}
    types["v_map"] = tensor_map(width, tiles.block_kv) if fp8 else tensor_map(tiles.block_kv, width)
    types |= dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32" if fp8 else "*bf16") | {"counter": "*i32"}
    constants: dict[str, Any] = {"kind": module.Kind(tiles, dim, fp8, **flags)}
    for names, flag, pointer in ((("lse",), "with_lse", "*fp32"), (("cu_q", "cu_kv"), "packed", "*i32")):
        if flags[flag]:
            types |= dict.fromkeys(names, pointer)
        else:
            constants |= dict.fromkeys(names)
    types |= dict.fromkeys(constants, "constexpr")
    order = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(order) if types[name].startswith("*")}
    values = {(order.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, constexprs=values, attrs=aligned)
    options_of_compiler = {"num_warps": 4, "maxnreg": tiles.at_launch}
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options_of_compiler}
    ), tiles


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (128, {"causal": True, "with_lse": True}),
        pytest.param(64, {}, marks=pytest.mark.slow),
        pytest.param(64, {"causal": True}, marks=pytest.mark.slow),
        pytest.param(64, {"packed": True, "windowed": True, "capped": True}, marks=pytest.mark.slow),
        pytest.param(96, {"packed": True, "windowed": True, "causal": True}, marks=pytest.mark.slow),
        pytest.param(192, {"packed": True, "causal": True, "with_lse": True}, marks=pytest.mark.slow),
        pytest.param(128, {"out": "fp32", "causal": True}, marks=pytest.mark.slow),
        pytest.param(256, {}, marks=pytest.mark.slow),
        pytest.param(256, {"causal": True}, marks=pytest.mark.slow),
        pytest.param(64, {"fp8": False, "windowed": True}, marks=pytest.mark.slow),
        pytest.param(128, {"fp8": False, "causal": True}, marks=pytest.mark.slow),
        pytest.param(256, {"fp8": False, "packed": True, "causal": True}, marks=pytest.mark.slow),
    ],
)
def test_compiles_to_concurrent_wgmma_with_room_in_registers(dim: int, options: dict[str, Any]) -> None:
    kernel, tiles = compiled(dim, **options)
    ptx = kernel.asm["ptx"]
    width = triton.next_power_of_2(dim)
    kind = "f32.bf16.bf16" if options.get("fp8") is False else "f32.e4m3.e4m3"
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tiles.block_kv}k\d+\.{kind}", ptx)
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n{width // tiles.parts}k\d+\.{kind}", ptx)
    assert "cp.async.bulk.tensor.2d" in ptx and "setmaxnreg" in ptx
    # A tile's P V begins a sum in the tensor cores, or does so every `promote` tiles, or adds to the sum so far.
    begins = "adds" if options.get("fp8") is False else "both" if tiles.overlap else "begins"
    assert begins in sums_of_values(ptx) and (begins != "begins" or len(sums_of_values(ptx)) == 1)
    said = messages(ptx, 90)
    # C7510 and its like: ptxas found that products may not overlap, and waits after each.
    assert "serialized" not in said
    # The loop over keys that need no mask has none, or some ten registers of FP8 with heads of 128 and 256. The
    # assembler of Triton 3.9 keeps columns of the causal mask in memory, too.
    assert sum(map(int, re.findall(r"(\d+) bytes spill stores", said))) <= 2560


def test_keys_of_v_stand_in_the_order_of_p() -> None:
    """An accumulator gives thread t columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16; an operand gives it 4t to 4t + 3."""
    order = [column for t in range(4) for column in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
    v = torch.arange(150.0).view(1, 1, 150, 1).expand(2, 3, 150, 64)
    laid_out = lay_out_v(v)
    assert laid_out.shape == (2, 3, 64, 256)
    expected = torch.tensor([16 * i + j for i in range(16) for j in order])
    expected = torch.where(expected < 150, expected, 0)
    assert torch.equal(laid_out[1, 2, 63], expected.float())
    assert torch.equal(restore_v(laid_out, 150), v)


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 140, 300]])
def test_kernel_lays_out_as_the_oracle(bounds: list[int] | None) -> None:
    from quant.kernels.attention.portable_fp8_operands import lay_out_v as lay_out_v_on_gpu

    v = torch.randn(1 if bounds else 2, 2, 300, 96).to(torch.float8_e4m3fn)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    with interpreted():
        got = lay_out_v_on_gpu(v, cu)
    expected = lay_out_v(v.view(torch.uint8), cu)
    assert torch.equal(got.view(torch.uint8), expected)
    assert torch.equal(restore_v(got.view(torch.uint8), 300, cu), v.view(torch.uint8))


def test_heads_that_share_the_cache() -> None:
    from quant.kernels.attention.sm90_dense_attention import _RESIDENT, _heads_at_once

    assert _heads_at_once(32, 4, _RESIDENT // 3) == 8  # three KV heads fit; 8 is the largest divisor up to 12
    assert _heads_at_once(30, 1, 2 * _RESIDENT) == 1
    assert _heads_at_once(6, 1, 1) == 6


@pytest.mark.parametrize(("dim", "keys"), [(64, 100), (96, 257), (256, 100), (128, 256)])
def test_values_of_a_head_end_in_zeros(dim: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of keys meets no values of the next head, which may be NaN."""
    from types import SimpleNamespace

    from quant.kernels.attention import sm90_dense_attention as module
    from quant.kernels.attention.attention_operands import AttentionOptions

    launches: list[Any] = []

    class Kernel:
        arg_names = module.sm90_dense_attention.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: launches.append(dict(zip(self.arg_names, arguments, strict=True)))

    monkeypatch.setattr(module, "sm90_dense_attention", Kernel())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    q, k, v = (torch.randn(2, 3, keys, dim).bfloat16() for _ in range(3))
    module.attend(q, k, v, torch.empty_like(q), None, AttentionOptions(max_seqlen_q=keys))
    (launch,) = launches
    block = module.TILES[triton.next_power_of_2(dim), 2].block_kv
    rows = launch["v_map"].base.view(2, 3, -1, dim)
    assert launch["tokens_v"] == rows.shape[2] == -(-keys // block) * block and launch["tokens_kv"] == keys
    assert torch.equal(rows[:, :, :keys], v) and not rows[:, :, keys:].any() and launch["seq_kv"] == keys


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("keys", [100, 130, 257])
def test_nan_stays_in_its_sample(dim: int, keys: int) -> None:
    from quant.kernels.attention.forward import attention

    clean = [torch.randn(3, 2, keys, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[1] = torch.nan
    y, z = attention(*clean), attention(*dirty)
    assert torch.equal(z[[0, 2]], y[[0, 2]]) and z[1].isnan().all()
