"""Experts with FP8 weights run by our grouped matmuls: see `fused_experts.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, fp8_w8a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_kernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import CompressedTensorsMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_tensors_fp8,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from quant.formats.tensor import BlockScaledTensor
from quant.vllm_plugin import loaded_weights
from quant.vllm_plugin.fused_experts import BlockscaleExperts, Layer, make_kernel, refusal
from quant.vllm_plugin.releases import check_classes, replace_function

QuantizationStrategy = compressed_tensors_fp8.QuantizationStrategy
KEYS: dict[str, QuantKey] = {
    QuantizationStrategy.TENSOR: kFp8StaticTensorSym,
    QuantizationStrategy.CHANNEL: kFp8StaticChannelSym,
    QuantizationStrategy.BLOCK: kFp8Static128BlockSym,
}
"""vLLM's name for FP8 weights, by the strategy of their scales."""


class BlockscaleFp8Experts(BlockscaleExperts):
    """FP8 experts with a scale a row."""

    format = "fp8_channel"
    weight_keys: ClassVar[tuple[QuantKey, ...]] = (kFp8StaticTensorSym, kFp8StaticChannelSym)

    def weight_of(self, name: str, codes: Tensor, scale: Tensor) -> BlockScaledTensor:
        return loaded_weights.fp8_experts_weight(codes, scale)


class BlockscaleFp8BlockExperts(BlockscaleFp8Experts):
    """FP8 experts with a scale a 128 × 128 block."""

    format = "fp8_block"
    weight_keys = (kFp8Static128BlockSym,)

    def weight_of(self, name: str, codes: Tensor, scale: Tensor) -> BlockScaledTensor:
        return loaded_weights.fp8_weight(codes, scale, blocks=True)


class BlockscaleFp8MoEMethod(compressed_tensors_fp8.CompressedTensorsW8A8Fp8MoEMethod):
    """FP8 experts of compressed-tensors without a quantization of inputs."""

    def __init__(self, weight_quant: Any, moe: FusedMoEConfig) -> None:
        """Raises ValueError for a layer that our kernels do not take, because vLLM has none for it."""
        # vLLM's own constructor would look for a kernel that rounds inputs.
        CompressedTensorsMoEMethod.__init__(self, moe)
        blocks = weight_quant.strategy == QuantizationStrategy.BLOCK
        self.weight_quant, self.input_quant, self.static_input_scales = weight_quant, None, False
        self.weight_block_size = list(weight_quant.block_structure or ()) if blocks else None
        self.block_quant = blocks
        self.experts_cls = BlockscaleFp8BlockExperts if blocks else BlockscaleFp8Experts
        reason = refusal(self.experts_cls, moe, KEYS[weight_quant.strategy], None)
        if blocks and self.weight_block_size != [128, 128]:
            reason = f"blocks of {self.weight_block_size}, where it takes 128 × 128"
        if reason:
            raise ValueError(
                f"vLLM has no kernel for experts with FP8 weights and inputs in 16 bit, and Blockscale's takes no "
                f"{reason}; quantize with --format fp8_channel, which rounds inputs too"
            )

    def process_weights_after_loading(self, layer: Layer) -> None:
        # The backend is one that keeps inputs in 16 bit.
        make_kernel(self, layer, partial(make_fp8_moe_kernel, fp8_backend=Fp8MoeBackend.MARLIN))

    def get_fused_moe_quant_config(self, layer: Layer) -> FusedMoEQuantConfig:
        return fp8_w8a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, block_shape=self.weight_block_size
        )


def weight_only(quant_config: Any, layer: Layer, layer_name: str) -> Any:
    """Returns the scheme of weights of a layer's experts where they are in FP8 and inputs in 16 bit; None elsewhere."""
    quant_config._add_fused_moe_to_target_scheme_map()
    projections = [getattr(layer, f"ckpt_{name}_proj_name", f"{name}_proj") for name in ("gate", "up", "down")]
    schemes = [quant_config.get_scheme_dict(layer, f"{layer_name}.0.{projection}") for projection in projections]
    # vLLM says what is wrong with projections that differ.
    if schemes[0] is None or any(scheme != schemes[0] for scheme in schemes):
        return None
    quantized, inputs = schemes[0].get("weights"), schemes[0].get("input_activations")
    if quantized is None or inputs is not None or quantized.type != "float" or quantized.num_bits != 8:
        return None
    return quantized if quantized.strategy in KEYS and not quantized.dynamic else None


def install_fp8_experts() -> str:
    """Wraps the function that finds the method of a layer's experts."""
    check_classes(BlockscaleFp8Experts, BlockscaleFp8BlockExperts, BlockscaleFp8MoEMethod)

    def wrap(theirs: Any) -> Any:
        def get_moe_method(quant_config: Any, layer: Layer, layer_name: str) -> Any:
            quantized = weight_only(quant_config, layer, layer_name)
            if quantized is None:
                return theirs(quant_config, layer, layer_name)
            return BlockscaleFp8MoEMethod(quantized, layer.moe_config)

        return get_moe_method

    replace_function(CompressedTensorsMoEMethod, "get_moe_method", wrap)
    return "experts with FP8 weights"
