"""Experts in MXFP4, of gpt-oss and of checkpoints in the layout of compressed-tensors, are offered our kernels here.

vLLM has a method for each layout, which names the class that runs the experts. Ours derive from them, and name our
class instead where it takes the layer; everything else, the creation and the loading of parameters, stays vLLM's.

    gpt-oss               gate and up alternate row by row, and both projections have a bias
    compressed-tensors    gate, then up; parameters are called `w13_weight_packed` until they are loaded
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, make_mxfp4_moe_kernel
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as compressed_tensors_mxfp4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from quant.formats.tensor import BlockScaledTensor
from quant.vllm_plugin import loaded_weights, releases
from quant.vllm_plugin.fused_moe import BlockscaleExperts, refusal

logger = init_logger("vllm.blockscale")
Layer = Any
"""A layer of vLLM: a module with parameters and facts as attributes, which its class does not declare."""


class BlockscaleMxFp4Experts(BlockscaleExperts):
    """MXFP4 experts, with a bias or without."""

    format = "mxfp4"
    weight_keys = (kMxfp4Static,)
    takes_bias = True

    def weight_of(self, layer: torch.nn.Module, name: str) -> BlockScaledTensor:
        return loaded_weights.mxfp4_weight(
            getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        )


def takes(config: FusedMoEConfig) -> bool:
    """Returns whether our class runs the experts of a layer; the log says why not."""
    reason = refusal(BlockscaleMxFp4Experts, config, kMxfp4Static, None)
    if reason:
        logger.warning_once("Blockscale: fused experts in mxfp4 stay with vLLM: %s", reason)
    return not reason


class BlockscaleGptOssMoEMethod(mxfp4.GptOssMxfp4MoEMethod):
    """The experts of gpt-oss as its own checkpoints have them."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        if takes(moe):
            # The emulation backend passes parameters on as they were loaded; nothing is emulated.
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


def make_kernel(method: Any, layer: Layer, make: Callable[..., Any]) -> None:
    """Makes the kernel of a method whose `experts_cls` is ours, by vLLM's function, for the loaded parameters."""
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),
    )
    arrange_once(method, layer)


def arrange_once(method: Any, layer: Layer) -> None:
    """Arranges the weights of a layer for our kernels, unless vLLM has asked for it, as later releases do."""
    experts = method.moe_kernel.fused_experts
    if not hasattr(experts, "layer"):
        experts.process_weights_after_loading(layer)


def install() -> str:
    """Puts our methods in the places of vLLM's, and returns what they take; repeated calls change nothing.

    Raises:
        AttributeError, TypeError: this vLLM lacks a name or calls a method with other arguments; nothing was changed.
    """
    ours = BlockscaleMxFp4Experts, BlockscaleGptOssMoEMethod, BlockscaleMxFp4MoEMethod
    if problems := [problem for cls in ours for problem in releases.signature_problems(cls)]:
        raise TypeError(problems[0])
    # vLLM looks these names up when it meets a layer.
    mxfp4.GptOssMxfp4MoEMethod = BlockscaleGptOssMoEMethod
    compressed_tensors_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod = BlockscaleMxFp4MoEMethod
    return "experts in MXFP4"
