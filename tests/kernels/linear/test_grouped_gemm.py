"""The grouped matmul equals float64 expert by expert, interpreted and on a GPU, and compiles without spills."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from assembler import assemble
from interpreter import interpreted
from slow_cases import quick_cases

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.ptx import CompiledKernel
from quant.kernels.linear import portable_grouped_gemm
from quant.kernels.linear import portable_grouped_gemm as kernels

COUNTS = ((3, 0, 17, 1), (0, 0, 0, 40), (1, 1, 1, 1), (0, 0, 0, 0), (130, 2, 0, 33))


def offsets_of(counts: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def stacked(format: str, experts: int, rows: int, columns: int, device: str) -> BlockScaledTensor:
    """Experts of very different sizes: one taken for another cannot go unseen."""
    sizes = torch.tensor([4.0**e for e in range(experts)], device=device)[:, None, None]
    return quantize(torch.randn(experts, rows, columns, device=device) * sizes, FORMATS[format])


def close(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: BlockScaledTensor,
    counts: tuple[int, ...],
    unit: float,
    bias: torch.Tensor | None = None,
) -> None:
    dense, start = weight.dequantize(torch.float64), 0
    for expert, count in enumerate(counts):
        rows = x[start : start + count].double()
        exact, magnitude = rows @ dense[expert].T, rows.abs() @ dense[expert].abs().T
        if bias is not None:
            exact, magnitude = exact + bias[expert].double(), magnitude + bias[expert].double().abs()
        wrong = (y[start : start + count].double() - exact).abs() > magnitude * unit + 1e-30
        assert not bool(wrong.any()), f"expert {expert} of {counts}"
        start += count


def check_weight_only(device: str, format: str, run: Callable[..., torch.Tensor], counts: tuple[int, ...]) -> None:
    for rows, columns in ((77, 203), (128, 256)):
        weight = stacked(format, len(counts), rows, columns, device)
        x = torch.randn(sum(counts), columns, device=device, dtype=torch.bfloat16)
        # In the second shape each expert has a bias, of the size of its products.
        bias = torch.randn(len(counts), rows, device=device).bfloat16() if rows == 128 else None
        y = run(x, weight, offsets_of(counts, device), bias)
        assert y.shape == (sum(counts), rows) and y.dtype is torch.bfloat16
        close(y, x, weight, counts, 2**-7, bias)


def check_fp8(device: str, weights: str, rows: str, run: Callable[..., torch.Tensor], counts: tuple[int, ...]) -> None:
    weight = stacked(weights, len(counts), 200, 384, device)
    x = quantize(torch.randn(max(sum(counts), 1), 384, device=device), FORMATS[rows])
    if not sum(counts):
        return
    y = run(x, weight, offsets_of(counts, device), torch.float32)
    # Hopper's tensor cores add FP8 products with 14 bits.
    close(y, x.dequantize(), weight, counts, 2**-11 if device == "cuda" else 1e-6)


def check_poison(device: str, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """A group's last row that is no number, and rows of no group, change no other row, and are in no other sum."""
    for counts in ((3, 0, 17, 1), (0, 0, 0, 21), (16, 0, 0, 5)):
        assert len(x) == sum(counts) + 3
        offsets = offsets_of(counts, device)
        lasts = (offsets[1:][offsets[1:] > offsets[:-1]] - 1).long()
        clean = torch.ones(len(x), dtype=torch.bool, device=device)
        clean[lasts] = clean[sum(counts) :] = False
        before = run(x, offsets)
        for value in (torch.nan, torch.inf):
            poisoned = x.clone()
            poisoned[~clean] = value
            y = run(poisoned, offsets)
            assert torch.equal(y[clean], before[clean]) and bool(before[clean].isfinite().all())
            assert not bool(y[lasts].isfinite().any())


def check_poisoned_rows(device: str) -> None:
    columns = 256 if device == "cuda" else 128  # an interpreter takes a second for a few products
    for format in ("nvfp4", "fp8_block", "int8"):
        weight = stacked(format, 4, 77, columns, device)
        x = torch.randn(24, columns, device=device, dtype=torch.bfloat16)
        check_poison(device, lambda x, offsets, w=weight: kernels.grouped_codes_gemm(x, w, offsets), x)
    for rows in ("fp8_token", "fp8_group"):
        weight = stacked("fp8_block", 4, 77, columns, device)
        codes = quantize(torch.randn(24, columns), FORMATS[rows])
        codes = BlockScaledTensor(codes.codes.to(device), codes.scale.to(device), codes.format, codes.shape)

        def scaled(scale: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            x = BlockScaledTensor(codes.codes, scale, codes.format, codes.shape)  # noqa: B023
            return kernels.grouped_fp8_gemm(x, weight, offsets, torch.float32)  # noqa: B023

        check_poison(device, scaled, codes.scale)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_stay_alone_interpreted() -> None:
    with interpreted():
        check_poisoned_rows("cpu")


@pytest.mark.gpu
def test_rows_that_are_no_numbers_stay_alone_on_a_gpu() -> None:
    check_poisoned_rows("cuda")


# One format of each layout of codes and scales; `test_codes_gemm.py` has the codes of all.
DISTINCT = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "fp8_group", "int8", "int4_g32")


@pytest.mark.parametrize("format", quick_cases(FORMATS, lambda format: format in DISTINCT))
def test_every_format_interpreted(format: str) -> None:
    # Every layout is run on all shapes by `test_every_format_on_a_gpu`; here one layout is.
    with interpreted():
        for counts in COUNTS[:4] if format == "nvfp4" else COUNTS[:1]:
            check_weight_only("cpu", format, kernels.grouped_codes_gemm, counts)


@pytest.mark.parametrize("weights", kernels.FP8_WEIGHTS)
@pytest.mark.parametrize("rows", kernels.FP8_ROWS)
def test_fp8_by_fp8_interpreted(weights: str, rows: str) -> None:
    with interpreted():
        for counts in (COUNTS[0], COUNTS[3]):
            check_fp8("cpu", weights, rows, kernels.grouped_fp8_gemm, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_on_a_gpu(format: str) -> None:
    for counts in COUNTS:
        check_weight_only("cuda", format, kernels.grouped_codes_gemm, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", kernels.FP8_WEIGHTS)
@pytest.mark.parametrize("rows", kernels.FP8_ROWS)
def test_fp8_by_fp8_on_a_gpu(weights: str, rows: str) -> None:
    for counts in COUNTS:
        check_fp8("cuda", weights, rows, kernels.grouped_fp8_gemm, counts)


def test_there_are_always_enough_tiles() -> None:
    """By brute force over how rows may fall to experts."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        experts, tokens = (int(torch.randint(1, high, (), generator=generator)) for high in (12, 400))
        counts = torch.bincount(torch.randint(0, experts, (tokens,), generator=generator), minlength=experts)
        for block_m in (16, 32, 64, 128):
            assert int((-(-counts // block_m)).sum()) <= kernels.most_tiles(tokens, experts, block_m)
    assert kernels.most_tiles(0, 8, 16) == 0


def test_mistakes_name_the_argument() -> None:
    weight = quantize(torch.randn(3, 32, 64), FORMATS["nvfp4"])
    x, offsets = torch.zeros(4, 64, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"grouped matmul with \[3, 32, 64\] in nvfp4: x is \[4, 32\], expected"):
        kernels.grouped_codes_gemm(x[:, :32], weight, offsets)
    with pytest.raises(ValueError, match=r"offsets is torch\.int64, expected torch\.int32"):
        kernels.grouped_codes_gemm(x, weight, offsets.long())
    with pytest.raises(ValueError, match=r"x is torch\.float32, expected float16 or bfloat16"):
        kernels.grouped_codes_gemm(x.float(), weight, offsets)
    bare = BlockScaledTensor(weight.codes, weight.scale, weight.format, weight.shape)
    with pytest.raises(ValueError, match="global_scale is missing; nvfp4 has one per expert"):
        kernels.grouped_codes_gemm(x, bare, offsets)
    with pytest.raises(ValueError, match=r"rows in fp8_token; FP8 rows are .*, weights fp8, fp8_channel"):
        kernels.grouped_fp8_gemm(quantize(torch.zeros(4, 64), FORMATS["fp8_token"]), weight, offsets, torch.bfloat16)


@pytest.mark.parametrize(
    ("arch", "block_m", "instruction"),
    [
        (90, 64, r"wgmma\S*f32\.e4m3\.e4m3"),
        (90, 128, r"wgmma\S*f32\.e4m3\.e4m3"),
        (100, 128, r"tcgen05\.mma\S*f8f6f4"),
        (120, 64, r"mma\.sync\S*e4m3\.e4m3\.f32"),
    ],
)
def test_fp8_compiles_to_fp8_instructions(arch: int, block_m: int, instruction: str) -> None:
    kernel = kernels.grouped_fp8_gemm_kernel
    given = {"x": "*fp8e4nv", "x_scale": "*fp32", "codes": "*fp8e4nv", "scale": "*fp32", "offsets": "*i32"}
    given |= {"y": "*bf16", "experts": "i32", "N": "i32", "K": "i32"}
    constants = {"x_rows": 1, "x_columns": 128, "rows": 128, "columns": 128, "width": 64}
    constants |= {"block_m": block_m, "block_n": 128}
    compiled = compile_aligned(kernel, given, constants, arch, 4 if block_m <= 64 else 8)
    assert re.search(instruction, compiled.ptx)
    assert assemble(compiled).spilled == 0


def compile_aligned(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, warps: int
) -> CompiledKernel:
    """As a launch compiles it: pointers and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    runtime = [i for i, name in enumerate(names) if name not in constants and name != "experts"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in runtime}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, kinds, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    return CompiledKernel(kernel.__name__, result.asm["ptx"], arch, (), warps, result.metadata.shared)


@pytest.mark.parametrize(
    ("arch", "format", "block_m"),
    quick_cases(
        product([90, 100, 120], ["nvfp4", "mxfp8", "fp8_block", "int8"], [16, 64, 128]),
        lambda arch, format, block_m: (
            (format == "nvfp4" or block_m == 64) if arch == 90 else (format, block_m) == ("nvfp4", 64)
        ),
    ),
)
def test_weight_only_compiles_without_spills(arch: int, format: str, block_m: int) -> None:
    form, kernel = FORMATS[format], kernels.grouped_codes_gemm_kernel
    block_n, block_k, warps = kernels.weight_tile(block_m)
    constants = {
        **kernels.format_constants(form),
        "has_global": form.global_scale,
        "has_bias": form.global_scale,
        "width": 64,
    }
    constants |= {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    code = {"nvfp4": "*u8", "int8": "*i8"}.get(format, "*fp8e4nv")
    scale = {"nvfp4": "*fp8e4nv", "mxfp8": "*u8"}.get(format, "*fp32")
    types = {"x": "*bf16", "codes": code, "scale": scale, "global_scale": "*fp32", "bias": "*bf16", "offsets": "*i32"}
    types["y"] = "*bf16"
    assert assemble(compile_aligned(kernel, types, constants, arch, warps)).spilled == 0


def check_routing(
    device: str, run: Callable[..., Any], tokens: int, per_token: int, experts: int, spread: bool = False
) -> None:
    """Rows lie with their experts, offsets count them, and weighing gives every token its own rows back.

    Where experts are `spread` over two GPUs, `chosen` has numbers among all of them.
    """
    x = torch.randn(tokens, 96, device=device).bfloat16()
    # Every expert is possible, and so are -1 and `experts`, which are none.
    index = torch.stack([torch.randperm(experts + 2)[:per_token] - 1 for _ in range(tokens)]).int().to(device)
    chosen, local = index, None
    if spread:
        # This GPU has every second expert, and beside them come -1 and the others, which are not here.
        numbers = torch.randperm(experts, device=device).int() * 2
        local = torch.full((2 * experts,), -1, dtype=torch.int32, device=device)
        local[numbers.long()] = torch.arange(experts, dtype=torch.int32, device=device)
        chosen = torch.where(index < experts, numbers[index.clamp(0, experts - 1).long()], 2 * experts - 1)
        chosen = torch.where(index < 0, index, chosen)
    weights = torch.rand(tokens, per_token, device=device)
    out = torch.full_like(x, float("nan"))

    def both() -> tuple[torch.Tensor, ...]:
        rows, offsets, places = portable_grouped_gemm.route(x, chosen, experts, local)
        portable_grouped_gemm.weigh(rows, places, weights, out)
        return rows, offsets, places

    rows, offsets, places = run(both)
    known = (index >= 0) & (index < experts)
    counts = torch.bincount(index[known].long(), minlength=experts)
    assert torch.equal(offsets.long().diff(), counts) and int(offsets[0]) == 0
    assert torch.equal(places >= 0, known)
    taken = places[known].long()
    assert len(taken.unique()) == len(taken)
    assert torch.equal(torch.searchsorted(offsets.long(), taken, right=True) - 1, index[known].long())
    assert torch.equal(rows[taken], x[known.nonzero()[:, 0]])
    exact = x.double() * (weights.double() * known).sum(1, keepdim=True)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(1, 8, 128), (5, 2, 3), (40, 3, 16)])
def test_rows_are_routed_to_experts_and_back(tokens: int, per_token: int, experts: int, spread: bool) -> None:
    def run(both: Callable[[], Any]) -> Any:
        with interpreted():
            return both()

    check_routing("cpu", run, tokens, per_token, experts, spread)


@pytest.mark.parametrize("spread", [False, True])
def test_many_rows_are_routed_by_two_kernels(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_grouped_gemm, "FEW_SLOTS", 0)
    test_rows_are_routed_to_experts_and_back(5, 2, 3, spread)


def test_few_rows_lie_in_the_order_of_a_stable_sort() -> None:
    index = torch.randint(6, (11, 2), dtype=torch.int32)
    with interpreted():
        _, offsets, places = portable_grouped_gemm.route(torch.randn(11, 32).bfloat16(), index, 6)
    order = index.flatten().argsort(stable=True)
    assert torch.equal(places.flatten()[order].long(), torch.arange(22))
    assert int(offsets[-1]) == 22


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(1, 8, 128), (64, 8, 128), (4096, 8, 128), (333, 2, 8)])
def test_rows_are_routed_on_a_gpu(tokens: int, per_token: int, experts: int, spread: bool) -> None:
    check_routing("cuda", lambda both: both(), tokens, per_token, experts, spread)


def test_routing_refuses_what_does_not_fit() -> None:
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(ValueError, match=r"route: x \[3, 64\] and index \[2, 2\] of 4 experts"):
        portable_grouped_gemm.route(x, torch.zeros(2, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"weigh: y \[3, 64\], places \[2, 2\] and out \[2, 64\]"):
        portable_grouped_gemm.weigh(x, torch.zeros(2, 2, dtype=torch.int32), None, x[:2])
