"""The ops on a CPU give the product of the dequantized weight in float64, to within the dtype's rounding."""

import copy
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from slow_cases import quick_cases
from torch import nn

from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.linear import oracle
from quant.kernels.linear.oracle import set_weight_cache
from quant.kernels.linear.quant_linear import QuantLinear, quantized_linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OUT, IN = 160, 256  # not a multiple of the 128 rows of a square block
# Weight format, and an input format that a preset pairs it with.
PAIRS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8", "fp8_channel": "fp8_token"} | {
    "fp8_block": "fp8_group",
    "int8": "int8_token",
}


@pytest.fixture(autouse=True)
def _default_budget() -> Iterator[None]:
    budget = oracle._cache.budget
    set_weight_cache(budget)
    yield
    set_weight_cache(budget)


def weight_in(format: Format, rows: int = OUT, columns: int = IN, seed: int = 0) -> BlockScaledTensor:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(rows, columns, generator=generator), format)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close_to_exact(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> None:
    """|y − x·wᵀ| within the error bound of a dot product whose weights and result are rounded to the dtype.

    Each of `in` products carries the weight's rounding, the sum is accumulated in float32 at worst, and the result
    is rounded once more.
    """
    unit = torch.finfo(y.dtype).eps / 2
    x, dense = x.double(), dense.double()
    exact, magnitude = x @ dense.T, x.abs() @ dense.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = magnitude * (unit + x.shape[-1] * 2.0**-24) + exact.abs() * 2 * unit + 1e-30
    assert y.shape == exact.shape
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(("format", "dtype"), list(product(FORMATS, DTYPES)))
def test_every_op_multiplies_by_the_dequantized_weight(format: str, dtype: str) -> None:
    weight = weight_in(FORMATS[format])
    x, bias = inputs(3, 5, IN, dtype=DTYPES[dtype]), inputs(OUT, dtype=DTYPES[dtype])
    dense = weight.dequantize(torch.float64)
    y = quantized_linear(x, weight, bias)
    assert y.dtype is DTYPES[dtype]
    assert_close_to_exact(y, x, dense, bias)
    assert_close_to_exact(quantized_linear(x[0], weight), x[0], dense, None)


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (7, IN), (0, IN), (2, 0, IN), (2, 3, 1, IN)])
@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_any_batch_shape_even_an_empty_one(shape: tuple[int, ...], budget: int) -> None:
    set_weight_cache(budget)
    weight, x, bias = weight_in(FORMATS["nvfp4"]), inputs(*shape), inputs(OUT)
    y = quantized_linear(x, weight, bias)
    assert y.shape == (*shape[:-1], OUT)
    assert_close_to_exact(y, x, weight.dequantize(torch.float64), bias)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_slices_of_rows_give_what_the_cached_weight_gives(
    format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of one square block, or of 32 rows: both end in a short one. Only the order of sums may differ."""
    weight, x, bias = weight_in(FORMATS[format], rows=150), inputs(4, IN, dtype=dtype), inputs(150, dtype=dtype)
    cached = quantized_linear(x, weight, bias)
    assert len(oracle._cache.entries) == 1
    set_weight_cache(0)
    monkeypatch.setattr(oracle, "_SLICE_ELEMENTS", 32 * IN)
    sliced = quantized_linear(x, weight, bias)
    assert len(oracle._cache.entries) == 0
    scale = float(cached.abs().max())
    torch.testing.assert_close(sliced, cached, rtol=0, atol=4 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize(("format", "activation"), PAIRS.items())
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_input_is_rounded_as_fake_quantize_rounds_it(format: str, activation: str, dtype: str) -> None:
    weight, form = weight_in(FORMATS[format]), FORMATS[activation]
    x = inputs(6, IN, dtype=DTYPES[dtype]) * 3
    rounded = fake_quantize(x, form)
    assert not torch.equal(rounded, x)
    assert torch.equal(quantized_linear(x, weight, activation=form), quantized_linear(rounded, weight))
    assert_close_to_exact(quantized_linear(x, weight, activation=form), rounded, weight.dequantize(torch.float64), None)


def test_a_static_scale_is_used_and_saturates() -> None:
    weight, x = weight_in(FORMATS["fp8"]), inputs(6, IN)
    scale = torch.tensor(1 / 448)  # everything beyond ±1 saturates
    by_hand = (x * 448).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 448
    y = quantized_linear(x, weight, activation=FORMATS["fp8"], input_scale=scale)
    torch.testing.assert_close(y, quantized_linear(by_hand, weight), rtol=0, atol=1e-4)
    assert float((y - quantized_linear(x, weight)).abs().max()) > 1


def test_a_static_nvfp4_scale_is_the_second_level_one() -> None:
    weight, x, form = weight_in(FORMATS["nvfp4"]), inputs(6, IN), FORMATS["nvfp4"]
    scale = x.abs().max() / 1000
    blocks = x.view(6, -1, 16).double()
    block_scale = (blocks.abs().amax(-1, keepdim=True) / (6 * scale.double())).float()
    step = block_scale.clamp(2**-9, 448).to(torch.float8_e4m3fn).double() * scale.double()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = grid[(blocks.abs() / step).unsqueeze(-1).sub(grid).abs().argmin(-1)] * blocks.sign() * step
    y = quantized_linear(x, weight, activation=form, input_scale=scale)
    exact = nearest.view(6, -1) @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input \[2, 100\] does not fit a weight of shape \[160, 256\]"):
        quantized_linear(inputs(2, 100), weight_in(FORMATS["fp8"]))


@pytest.mark.parametrize("format", quick_cases(FORMATS, lambda format: format in PAIRS or format in ("mxfp6", "int4")))
def test_schema_fake_and_dispatch(format: str) -> None:
    weight = weight_in(FORMATS[format], 32, 128)
    op = torch.ops.quant.linear.default
    assert not op._schema.is_mutable and len(op._schema.arguments) == 8
    activation = PAIRS.get(format, "")
    # torch's own test of schemas multiplies copies of the arguments, which it cannot do with FP8 tensors.
    has_fp8 = any(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in (weight.codes, weight.scale))
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", *(() if has_fp8 else ("test_schema",)))
    for x in (inputs(3, 128), inputs(2, 3, 128, dtype=torch.bfloat16)):
        args = (x, weight.codes, weight.scale, weight.global_scale, None, None, format, activation)
        torch.library.opcheck(op, args, test_utils=tests)


class Two(nn.Module):
    """Two quantized layers with something between them."""

    def __init__(self, format: str, activation: str | None) -> None:
        super().__init__()
        form = FORMATS[activation] if activation else None
        static = torch.tensor(0.01) if activation in ("fp8", "nvfp4") else None
        self.first = QuantLinear(weight_in(FORMATS[format], 128, 128), inputs(128), form, static)
        self.second = QuantLinear(weight_in(FORMATS[format], 64, 128, seed=2), None, form, static)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(("format", "activation"), [*PAIRS.items(), ("int4", None), ("mxfp6", None)])
def test_export_gives_one_node_a_layer_and_the_same_values(format: str, activation: str | None) -> None:
    model, x = Two(format, activation).eval(), inputs(4, 128)
    program = torch.export.export(
        model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("tokens", min=2, max=64)}}, strict=True
    )
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls == ["quant.linear.default", "aten.relu.default", "quant.linear.default"]
    assert torch.equal(program.module()(x), model(x))
    wider = inputs(9, 128)
    assert torch.equal(program.module()(wider), model(wider))


@pytest.mark.parametrize(("format", "activation"), [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8_block", None)])
def test_compile_without_a_graph_break(format: str, activation: str | None) -> None:
    torch._dynamo.reset()
    model = Two(format, activation).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 5):
            x = inputs(tokens, 128)
            assert torch.equal(compiled(x), model(x))


# The cache


def test_a_second_call_dequantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_in(FORMATS["nvfp4"]), inputs(2, IN)
    first = quantized_linear(x, weight)
    monkeypatch.setattr(BlockScaledTensor, "dequantize", None)
    assert torch.equal(quantized_linear(x, weight), first)


def test_codes_changed_in_place_are_seen() -> None:
    weight, x = weight_in(FORMATS["nvfp4"]), inputs(2, IN)
    quantized_linear(x, weight)
    weight.codes.copy_(weight.codes ^ 0x88)  # the sign of every element
    assert_close_to_exact(quantized_linear(x, weight), x, weight.dequantize(torch.float64), None)


def test_scales_changed_in_place_are_seen() -> None:
    weight, x = weight_in(FORMATS["nvfp4"]), inputs(2, IN)
    quantized_linear(x, weight)
    weight.global_scale.mul_(2)
    assert_close_to_exact(quantized_linear(x, weight), x, weight.dequantize(torch.float64), None)
    weight.scale.copy_(weight.scale.float().mul(0.5).to(weight.scale.dtype))
    assert_close_to_exact(quantized_linear(x, weight), x, weight.dequantize(torch.float64), None)


def test_other_scales_with_the_same_codes_are_seen() -> None:
    """As after load_state_dict(assign=True) of the scales, or a second tensor that shares the codes."""
    weight, x = weight_in(FORMATS["fp8"]), inputs(2, IN)
    quantized_linear(x, weight)
    doubled = BlockScaledTensor(weight.codes, weight.scale * 2, weight.format, weight.shape)
    assert_close_to_exact(quantized_linear(x, doubled), x, doubled.dequantize(torch.float64), None)


def test_each_dtype_gets_its_own_values() -> None:
    weight = weight_in(FORMATS["fp8_channel"])
    dense = weight.dequantize(torch.float64)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float32):
        x = inputs(2, IN, dtype=dtype)
        assert_close_to_exact(quantized_linear(x, weight), x, dense, None)


def test_a_copy_of_a_module_is_not_taken_for_the_original() -> None:
    module, x = QuantLinear(weight_in(FORMATS["mxfp8"])), inputs(2, IN)
    module(x)
    other = copy.deepcopy(module)
    other.codes.zero_()
    assert float(other(x).abs().max()) == 0
    assert float(module(x).abs().max()) > 1


def test_the_cache_lets_go_of_freed_weights() -> None:
    weights = [weight_in(FORMATS["nvfp4"], seed=seed) for seed in range(3)]
    for weight in weights:
        quantized_linear(inputs(1, IN), weight)
    assert len(oracle._cache.entries) == 3
    del weights, weight
    gc.collect()
    assert len(oracle._cache.entries) == 0


def test_the_cache_stays_within_its_budget() -> None:
    """Room for two of three weights: first come, first kept, and the third is right all the same."""
    weights, x = [weight_in(FORMATS["nvfp4"], seed=seed) for seed in range(3)], inputs(1, IN)
    set_weight_cache(2 * OUT * IN * 4)
    for _ in range(2):
        for weight in weights:
            assert_close_to_exact(quantized_linear(x, weight), x, weight.dequantize(torch.float64), None)
        assert sum(entry.dense.nbytes for entry in oracle._cache.entries.values()) == 2 * OUT * IN * 4
        assert weights[2].codes not in oracle._cache.entries


def test_views_are_not_cached() -> None:
    stack, x = quantize(torch.randn(2, 32, 64), FORMATS["nvfp4"]), inputs(2, 64)
    for index in range(2):
        quantized_linear(x, stack.matrix(index))
    assert len(oracle._cache.entries) == 0


def swap_rows(to: torch.Tensor, new: torch.Tensor) -> None:
    to.data[:2] = to.data[:2].flip(0)


def swap_columns(to: torch.Tensor, new: torch.Tensor) -> None:
    to.data.copy_(to.data.view(torch.uint8).unflatten(1, (2, -1)).flip(1).flatten(1).view(to.dtype))


def change_one(to: torch.Tensor, new: torch.Tensor) -> None:
    flat = to.data.view(torch.uint8).flatten()
    flat[len(flat) // 3] ^= 1


def replace_storage(to: torch.Tensor, new: torch.Tensor) -> None:
    to.data = new.clone()


def write_by_numpy(to: torch.Tensor, new: torch.Tensor) -> None:
    to.view(torch.uint8).numpy()[:] = new.view(torch.uint8).numpy()


def write_by_dlpack(to: torch.Tensor, new: torch.Tensor) -> None:
    torch.from_dlpack(to.view(torch.uint8).numpy()).copy_(new.view(torch.uint8))


def write_in_inference_mode(to: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode():
        to.data.copy_(new)


WRITERS = {
    "data": lambda to, new: to.data.copy_(new),
    "no_grad": lambda to, new: to.copy_(new),
    "set": lambda to, new: to.set_(new.clone()),
    "foreach": lambda to, new: torch._foreach_copy_([to.data], [new]),
    "replaced": replace_storage,
    "numpy": write_by_numpy,
    "dlpack": write_by_dlpack,
    "inference": write_in_inference_mode,
    "rows": swap_rows,
    "columns": swap_columns,
    "one code": change_one,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("shape", [(OUT, IN), (600, 1024), (601, 520)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "int8", "fp8_channel"])
def test_values_written_in_any_way_are_multiplied(writer: str, shape: tuple[int, int], format: str) -> None:
    """As weights are synchronized for rollouts and averaged: version counters see none of most of these."""
    form, x = FORMATS[format], inputs(2, shape[1])
    module = QuantLinear(weight_in(form, *shape))
    new = weight_in(form, *shape, seed=5)
    before = module(x)
    WRITERS[writer](module.codes, new.codes)
    expected = QuantLinear(BlockScaledTensor(*(t.clone() for t in (module.codes, module.scale)), form, shape,
                                             module.global_scale))(x)  # fmt: skip
    assert torch.equal(module(x), expected) and not torch.equal(expected, before)
    WRITERS["data"](module.scale, new.scale)
    if module.global_scale is not None:
        module.global_scale.data.mul_(3)
    assert torch.equal(module(x), QuantLinear(module.quantized_weight)(x)) and not torch.equal(module(x), expected)


def test_weights_are_compared_once_in_a_loop_that_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = QuantLinear(weight_in(FORMATS["int8"])), inputs(2, IN)
    module(x)
    with oracle.weights_stay():
        module.codes.data.zero_()  # before the first pass of the loop
        assert not module(x).any()
        with monkeypatch.context() as patch:
            patch.setattr(oracle._Memory, "is_unchanged", lambda *_: pytest.fail("compared twice"))
            assert not module(x).any()
    module.codes.data.fill_(1)
    assert module(x).any()


def test_a_loaded_weight_is_dequantized_once(tmp_path: Path) -> None:
    """Codes of a mapped file are views that stay, and follow changes of the tensor that they are views of."""
    save_file({"codes": weight_in(FORMATS["nvfp4"]).codes}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        codes = file.get_tensor("codes")
    module, x = QuantLinear(replace(weight_in(FORMATS["nvfp4"]), codes=codes[:])), inputs(2, IN)
    first = module(x)
    assert len(oracle._cache.entries) == 1
    assert torch.equal(module(x), first) and len(oracle._cache.entries) == 1
    codes.zero_()
    assert float(module(x).abs().max()) == 0


def test_weights_are_kept_for_a_while() -> None:
    stack, x = quantize(torch.randn(2, 32, 64), FORMATS["nvfp4"]), inputs(2, 64)
    view = stack.matrix(1)
    with oracle.kept_weights([view.codes]):
        kept = quantized_linear(x, view)
        assert len(oracle._cache.entries) == 1
    assert len(oracle._cache.entries) == 0
    assert torch.equal(quantized_linear(x, view), kept) and len(oracle._cache.entries) == 0


def test_the_cache_is_set_by_bytes_or_by_the_environment() -> None:
    assert oracle._budget(None) == 2 << 30 and oracle._budget("0") == 0 and oracle._budget("1048576") == 1 << 20
    for text in ("2GiB", "-1", ""):
        with pytest.raises(ValueError, match=r"BLOCKSCALE_CPU_CACHE=.*: expected a number of bytes"):
            oracle._budget(text)
    with pytest.raises(ValueError, match="weight cache of -1 bytes"):
        set_weight_cache(-1)


def test_threads_that_meet_new_weights_at_once() -> None:
    """Each sums up the cache's sizes while others add to it, which ended one in "dictionary changed size"."""
    weights = [quantize(torch.randn(8, 32), FORMATS["mxfp4"]) for _ in range(1600)]
    x, interval = torch.randn(2, 32), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda weight: oracle.reference_linear(x, weight, None, None, None), weights))
    finally:
        sys.setswitchinterval(interval)
    for weight, y in zip(weights, results, strict=True):
        torch.testing.assert_close(y, x @ weight.dequantize().T)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_inputs_that_are_no_floats_are_refused(dtype: torch.dtype) -> None:
    """Integers would round the weight to integers."""
    with pytest.raises(ValueError, match=r"linear by a weight of \[\d+, \d+\]: x is .*, expected a floating"):
        quantized_linear(torch.ones(3, IN, dtype=dtype), weight_in(FORMATS["nvfp4"]))
