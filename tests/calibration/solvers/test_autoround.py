"""Block reconstruction on the golden Llama starts at the given solution and ends better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import BASE
from torch import nn

from quant.calibration.solvers.autoround import BlockLayer, Reconstruction, reconstruct_block, reconstruction_error
from quant.formats.format import Format, get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.recipes.blocks import Call, capture, output_of

BLOCK = "model.layers.0"
FEW = Reconstruction(steps=30, rate=0.03, checks=3)


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


@pytest.fixture
def block(llama: Any) -> nn.Module:
    return llama.get_submodule(BLOCK)


@pytest.fixture
def calls(llama: Any) -> list[Call]:
    rows = torch.randint(0, llama.config.vocab_size, (6, 2, 24), generator=torch.Generator().manual_seed(1))
    return [capture(llama, [BLOCK], lambda row=row: llama(row, use_cache=False))[BLOCK] for row in rows]


def _outputs(block: nn.Module, calls: list[Call]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [output_of(block(*call.args, **call.kwargs)) for call in calls]


def _layers(block: nn.Module, format: Format, activation: Format | None = None) -> dict[str, BlockLayer]:
    linears = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    weights = {n: m.weight.detach().clone() for n, m in linears.items()}
    return {n: BlockLayer(w, quantize(w, format), activation) for n, w in weights.items()}


def _run_quantized(block: nn.Module, layers: dict[str, BlockLayer], calls: list[Call], **weights: Any) -> list[Any]:
    """The block's outputs with real `QuantLinear` modules in it."""
    originals = {name: block.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            weight = weights.get(name, layer.quantized)
            block.set_submodule(
                name, QuantLinear(weight, None, layer.activation, layer.input_scale, **vars(layer.parts))
            )
        return _outputs(block, calls)
    finally:
        for name, module in originals.items():
            block.set_submodule(name, module)


def _error(outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    return float(torch.stack([reconstruction_error(o, t) for o, t in zip(outputs, targets, strict=True)]).mean())


@pytest.mark.parametrize("formats", ["nvfp4", "nvfp4 nvfp4", "mxfp4", "int8"])
def test_the_error_falls(block: nn.Module, calls: list[Call], formats: str) -> None:
    targets = _outputs(block, calls)
    layers = _layers(block, *(get_format(name) for name in formats.split()))
    found = reconstruct_block(block, calls, targets, layers, FEW)
    started = _error(_run_quantized(block, layers, calls[-1:]), targets[-1:])
    ended = _error(_run_quantized(block, layers, calls[-1:], **found.weights), targets[-1:])
    # What is reported is what the real modules give, before and after.
    assert found.before == pytest.approx(started, rel=1e-4)
    assert found.after == pytest.approx(ended, rel=1e-4)
    assert found.after < (1.0 if formats == "int8" else 0.95) * found.before
    for name, layer in layers.items():
        old, new = layer.quantized, found.weights[name]
        assert new.format is old.format and new.shape == old.shape
        if old.global_scale is not None:
            assert torch.equal(new.global_scale, old.global_scale)


def test_the_block_is_left_as_it_was(block: nn.Module, calls: list[Call]) -> None:
    targets = _outputs(block, calls)
    modules = dict(block.named_modules())
    wanted = {name: p.requires_grad for name, p in block.named_parameters()}
    reconstruct_block(block, calls, targets, _layers(block, get_format("nvfp4")), FEW)
    assert dict(block.named_modules()) == modules
    assert {name: p.requires_grad for name, p in block.named_parameters()} == wanted
    assert all(p.grad is None for p in block.parameters())
    assert all(torch.equal(a, b) for a, b in zip(_outputs(block, calls), targets, strict=True))


def test_never_worse_than_the_start(block: nn.Module, calls: list[Call]) -> None:
    layers = _layers(block, get_format("nvfp4"))
    reckless = Reconstruction(steps=4, rate=100.0, scale_rate=5.0, checks=4)
    found = reconstruct_block(block, calls, _outputs(block, calls), layers, reckless)
    assert found.after == found.before
    for name, layer in layers.items():
        assert found.weights[name] is layer.quantized


def test_with_run_time_parts(block: nn.Module, calls: list[Call]) -> None:
    targets = _outputs(block, calls)
    layers = _layers(block, get_format("nvfp4"), get_format("nvfp4"))
    for name, layer in layers.items():
        rows, columns = layer.weight.shape
        scale = torch.rand(columns) + 0.5
        branch = (torch.randn(2, columns) / 50, torch.randn(rows, 2) / 50)
        parts = RunTimeParts(1 / scale, 0, branch)
        weight = layer.weight * scale - branch[1] @ branch[0]
        layers[name] = BlockLayer(weight, quantize(weight, get_format("nvfp4")), layer.activation, None, parts)
    found = reconstruct_block(block, calls, targets, layers, FEW)
    ended = _error(_run_quantized(block, layers, calls[-1:], **found.weights), targets[-1:])
    assert found.after == pytest.approx(ended, rel=1e-4) and found.after < 0.95 * found.before


def test_error_is_relative_to_each_token() -> None:
    target = torch.randn(3, 5, 8, dtype=torch.float64)
    output = target + torch.randn(3, 5, 8, dtype=torch.float64)
    expected = ((output - target).norm(dim=-1) / target.norm(dim=-1)).square().mean()
    assert float(reconstruction_error(output, target)) == pytest.approx(float(expected), rel=1e-5)


def test_a_call_without_a_target_is_refused(block: nn.Module, calls: list[Call]) -> None:
    with pytest.raises(ValueError, match="shorter than"):
        reconstruct_block(block, calls, [], {})
