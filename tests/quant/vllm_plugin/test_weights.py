"""The parameters that vLLM loads for a merged layer decode to the values of the checkpoint's matrices.

What vLLM does between the file and a kernel class is spelled out here (rows of siblings one below the other, global
scales inverted, FP8 matrices transposed), from its schemes for compressed-tensors; the file is written by `compress`.
"""

import pytest
import torch

from quant.export.checkpoint.files.compressed_tensors import compress
from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, fake_quantize, quantize
from quant.kernels.base.weight_layout import is_prepacked, restore
from quant.vllm_plugin import loaded_weights
from quant.vllm_plugin.switches import switches, unknown_switches

ROWS, COLUMNS = (128, 64, 64), 256


def siblings(format: str) -> list[BlockScaledTensor]:
    """Three matrices that a runtime merges: with one global scale, as a plan gives them."""
    torch.manual_seed(0)
    parts = [torch.randn(rows, COLUMNS) * 10.0**i for i, rows in enumerate(ROWS)]
    if not FORMATS[format].global_scale:
        return [quantize(part, FORMATS[format]) for part in parts]
    second = quantize(torch.cat(parts), FORMATS[format]).global_scale
    return [quantize(part, FORMATS[format], global_scale=second) for part in parts]


def loaded(parts: list[BlockScaledTensor]) -> dict[str, torch.Tensor]:
    """Parameters of the merged layer, as a kernel class of vLLM 0.26 finds them."""
    files = [compress(part, None, torch.bfloat16) for part in parts]
    merged = {name: torch.cat([file[name] for file in files]) for name in files[0] if name != "weight_shape"}
    if "weight_global_scale" in merged:
        merged["weight_global_scale"] = 1.0 / merged["weight_global_scale"].max().float()
    return merged


def of_vllm(format: str, parameters: dict[str, torch.Tensor]) -> BlockScaledTensor:
    codes, scale = parameters.get("weight_packed", parameters.get("weight")), parameters["weight_scale"]
    assert codes is not None
    if format == "nvfp4":
        return loaded_weights.nvfp4_weight(codes, scale, parameters["weight_global_scale"])
    if format == "int4":
        return loaded_weights.int4_weight(codes, scale)
    if format.startswith("fp8"):
        transposed = codes.t()  # vLLM's, and the scales in float32
        return loaded_weights.fp8_weight(transposed.t(), scale.float(), blocks=format == "fp8_block")
    return {"mxfp4": loaded_weights.mxfp4_weight, "mxfp8": loaded_weights.mxfp8_weight}[format](codes, scale)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "int4", "fp8_channel"])
def test_a_merged_layer_decodes_to_the_values_of_its_parts(format: str) -> None:
    parts = siblings(format)
    weight = of_vllm(format, loaded(parts))
    assert weight.shape == (sum(ROWS), COLUMNS)
    expected = torch.cat([part.dequantize(torch.float64) for part in parts])
    # The files hold a global scale as its reciprocal in float32.
    torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=2e-7, atol=0)


def test_blocks_of_128_rows_keep_their_scales() -> None:
    torch.manual_seed(0)
    parts = [quantize(torch.randn(rows, COLUMNS) * rows, FORMATS["fp8_block"]) for rows in (128, 256)]
    weight = of_vllm("fp8_block", loaded(parts))
    expected = torch.cat([part.dequantize(torch.float64) for part in parts])
    assert torch.equal(weight.dequantize(torch.float64), expected)


def test_experts_have_a_global_scale_each() -> None:
    torch.manual_seed(0)
    stack = quantize(torch.randn(3, 128, 64) * torch.tensor([1.0, 9.0, 81.0])[:, None, None], FORMATS["nvfp4"])
    assert stack.global_scale is not None
    weight = loaded_weights.nvfp4_weight(stack.codes, stack.scale, stack.global_scale.reshape(3, 1)[:, 0])
    assert torch.equal(weight.dequantize(torch.float64), stack.dequantize(torch.float64))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_layout_of_the_kernels_holds_the_same_values(format: str) -> None:
    weight = of_vllm(format, loaded(siblings(format)))
    arranged, reason = loaded_weights.arranged(weight)
    assert is_prepacked(arranged) and not reason
    assert torch.equal(restore(arranged).dequantize(torch.float64), weight.dequantize(torch.float64))


def test_a_layer_without_a_layout_says_which_limit_it_breaks() -> None:
    weight = quantize(torch.randn(96, 64), FORMATS["nvfp4"])
    arranged, reason = loaded_weights.arranged(weight)
    assert arranged is weight and "[96, 64] is not a multiple of [64, 64]" in reason


def test_other_formats_stay_in_the_order_of_the_checkpoint() -> None:
    weight = quantize(torch.randn(96, 128), FORMATS["int4"])
    assert loaded_weights.arranged(weight) == (weight, "")


def test_prompts_are_multiplied_in_fp8_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of many tokens are rounded to E4M3, a scale a token, against float64; those of few stay as they are."""
    torch.manual_seed(0)
    weight, layer = quantize(torch.randn(128, 256), FORMATS["nvfp4"]), torch.nn.Module()
    loaded_weights.hold(layer, loaded_weights.arranged(weight)[0])
    x = torch.randn(loaded_weights.FP8_FROM, 256).bfloat16()
    plain = loaded_weights.multiply(layer, x, None, layer.weight)
    monkeypatch.setenv("BLOCKSCALE_VLLM", "layers,fp8-prefill")
    assert torch.equal(
        loaded_weights.multiply(layer, x, None, layer.weight), plain
    )  # so small a layer would gain nothing
    monkeypatch.setattr(loaded_weights, "FP8_PRODUCTS", x.numel() * 128)
    rounded = fake_quantize(x.float(), FORMATS["fp8_token"]).double()
    expected = rounded @ weight.dequantize(torch.float64).T
    y = loaded_weights.multiply(layer, x, None, layer.weight)
    assert float((y.double() - expected).norm() / expected.norm()) < 2**-7
    assert float((y - plain).norm() / plain.norm()) > 2**-7
    assert torch.equal(loaded_weights.multiply(layer, x[1:], None, layer.weight), plain[1:])


def test_an_unknown_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_VLLM", "1,fp8")
    known = "known: 0, 1, layers, fp8-prefill; did you mean fp8-prefill?"
    assert unknown_switches() == f"BLOCKSCALE_VLLM: no switch 'fp8'; {known}"
    monkeypatch.setenv("BLOCKSCALE_VLLM", " layers, fp8-prefill,")
    assert switches() == {"layers", "fp8-prefill"} and not unknown_switches()
