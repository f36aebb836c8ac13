"""Experts in MXFP4 run by our grouped matmuls: see `fused_experts.py`.

Each kind has a file, so that a vLLM which lacks a name that one file imports keeps its own kernels for this kind alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, make_mxfp4_moe_kernel
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as compressed_tensors_mxfp4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from quant.formats.tensor import BlockScaledTensor
from quant.vllm_plugin import loaded_weights
from quant.vllm_plugin.fused_experts import BlockscaleExperts, Layer, arrange_once, logger, make_kernel, refusal
from quant.vllm_plugin.releases import check_classes


class BlockscaleMxFp4Experts(BlockscaleExperts):
    """MXFP4 experts, with a bias or without."""

    format = "mxfp4"
    weight_keys = (kMxfp4Static,)
    takes_bias = True

    def weight_of(self, name: str, codes: Tensor, scale: Tensor) -> BlockScaledTensor:
        return loaded_weights.mxfp4_weight(codes, scale)


def takes(config: FusedMoEConfig) -> bool:
    """Returns whether our class runs the experts of a layer in MXFP4; the log says why not."""
    if reason := refusal(BlockscaleMxFp4Experts, config, kMxfp4Static, None):
        logger.warning_once("Blockscale: fused experts in mxfp4 stay with vLLM: %s", reason)
    return not reason


class BlockscaleGptOssMoEMethod(mxfp4.GptOssMxfp4MoEMethod):
    """The experts of gpt-oss as its own checkpoints have them."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        if takes(moe):
            self.mxfp4_backend, self.experts_cls = Mxfp4MoeBackend.EMULATION, BlockscaleMxFp4Experts

    def process_weights_after_loading(self, layer: Layer) -> None:
        super().process_weights_after_loading(layer)
        if self.experts_cls is BlockscaleMxFp4Experts:
            arrange_once(self, layer)


class BlockscaleMxFp4MoEMethod(compressed_tensors_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod):
    """Experts in MXFP4 as compressed-tensors writes them; vLLM gives them to Marlin."""

    experts_cls: type[Any]

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        if self.experts_cls is compressed_tensors_mxfp4.MarlinExperts and takes(moe):
            self.experts_cls = BlockscaleMxFp4Experts

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.experts_cls is not BlockscaleMxFp4Experts:
            super().process_weights_after_loading(layer)
            return
        for name in ("w13_weight", "w2_weight"):
            codes = getattr(layer, f"{name}_packed").data
            delattr(layer, f"{name}_packed")
            layer.register_parameter(name, torch.nn.Parameter(codes, requires_grad=False))
        # The backend is one that keeps inputs in 16 bit.
        make_kernel(self, layer, partial(make_mxfp4_moe_kernel, mxfp4_backend=Mxfp4MoeBackend.MARLIN))


def install_mxfp4_experts() -> str:
    """Puts our methods in the places of vLLM's, which looks these names up when it meets a layer."""
    check_classes(BlockscaleMxFp4Experts, BlockscaleGptOssMoEMethod, BlockscaleMxFp4MoEMethod)
    mxfp4.GptOssMxfp4MoEMethod = BlockscaleGptOssMoEMethod
    compressed_tensors_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod = BlockscaleMxFp4MoEMethod
    return "experts in MXFP4"
