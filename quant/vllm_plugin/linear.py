"""These are the classes that vLLM chooses linear kernels from, over our custom op `quant::linear`.

vLLM asks a class whether it can run a layer, lets it change the loaded parameters once
(`process_weights_after_loading`), and then calls `apply_weights` with each input. The classes of NVFP4, MXFP4 and
MXFP8 extend vLLM's Marlin class of the same format: a layer that our kernels do not take (inputs in float16, a matrix
that is no multiple of 64 × 64, scales that have no place in the layout) stays with Marlin, and the log says which
limit it broke. Layers in INT4 and FP8 are refused by `can_implement` instead, and vLLM asks the next class.

The weight is put into the layout of Hopper's kernels once and keeps vLLM's names. Inputs stay in 16 bit. A call is one
node for torch.compile, and a CUDA graph can capture it: the op neither waits for the GPU nor keeps state.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MarlinMxFp4LinearKernel,
    MarlinMxfp8LinearKernel,
    MarlinNvFp4LinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.parameter import permute_param_layout_
from vllm.scalar_type import scalar_types

from quant.formats.tensor import BlockScaledTensor
from quant.vllm_plugin import weights

logger = init_logger("vllm.blockscale")
Layer = Any
"""A layer of vLLM: a module with parameters and facts as attributes, which its class does not declare."""
_formats_installed: set[str] = set()


def has_our_layers() -> bool:
    """Whether a linear layer of this process uses our kernels, on one GPU.

    With tensor parallelism vLLM joins the norm after a layer to the reduction over GPUs, and keeps its norms.
    """
    return bool(_formats_installed)


def install_weight(layer: Layer, weight: BlockScaledTensor, codes: str = "weight") -> None:
    """Makes `weight` the parameters of `layer`, its codes under the name `codes`."""
    weights.hold(layer, weight, codes)
    # With tensor parallelism vLLM fuses the norm into the all-reduce; our norm would undo that.
    if getattr(layer, "tp_size", 1) == 1:
        _formats_installed.add(weight.format.name)
    logger.info_once("Blockscale: linear layers in %s take our kernels", weight.format.name)


class _OverMarlin:
    """The part that the classes with Marlin as the next base share."""

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        """The weight in the parameters that vLLM has loaded."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Layer) -> None:
        weight = self.weight_of(layer)
        reason = weights.dtype_refusal(layer.params_dtype)
        if not reason:
            # Scales and shape decide, so this is known only once vLLM has loaded the weight.
            weight, reason = weights.arranged(weight)
        if not reason:
            install_weight(layer, weight)
            return
        shape = "x".join(map(str, weight.shape))
        logger.warning_once("Blockscale: a linear layer in %s stays with Marlin: %s", weight.format.name, reason)
        logger.debug("Blockscale: %s [%s]: %s", getattr(layer, "prefix", ""), shape, reason)
        # `apply_weights` reads it: empty is Marlin's layer.
        layer.blockscale_format = ""
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply_weights(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not layer.blockscale_format:
            return super().apply_weights(layer, x, bias)  # type: ignore[misc]
        return weights.multiply(layer, x, bias, layer.weight)


class BlockscaleNvFp4LinearKernel(_OverMarlin, MarlinNvFp4LinearKernel):
    """NVFP4 weights with inputs in 16 bit."""

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return weights.nvfp4_weight(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)


def weight_only_nvfp4(config: NvFp4LinearLayerConfig) -> MarlinNvFp4LinearKernel:
    """The kernel for ModelOpt's NVFP4 without activation scales: Marlin where the user asked for another backend."""
    vllm_config = get_current_vllm_config_or_none()
    # modelopt.py constructs MarlinNvFp4LinearKernel without asking a list, so the user's choice is looked up here.
    is_auto = vllm_config is None or vllm_config.kernel_config.linear_backend == "auto"
    return (BlockscaleNvFp4LinearKernel if is_auto else MarlinNvFp4LinearKernel)(config)


class BlockscaleMxFp4LinearKernel(_OverMarlin, MarlinMxFp4LinearKernel):
    """MXFP4 weights with inputs in 16 bit."""

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return weights.mxfp4_weight(layer.weight.data, layer.weight_scale.data)


class BlockscaleMxfp8LinearKernel(_OverMarlin, MarlinMxfp8LinearKernel):
    """MXFP8 weights with inputs in 16 bit."""

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return weights.mxfp8_weight(layer.weight.data, layer.weight_scale.data)


class BlockscaleInt4LinearKernel(MPLinearKernel):
    """INT4 weights in groups of 128 with inputs in 16 bit."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        columns = c.partition_weight_shape[0]
        if reason := weights.dtype_refusal(c.act_type):
            return False, reason
        if c.weight_type != scalar_types.uint4b8 or c.group_size != 128 or c.zero_points or c.has_g_idx:
            return False, "our kernel takes symmetric INT4 in groups of 128, with no order of its own"
        if columns % 128:
            return False, f"in_features = {columns} is no multiple of 128"
        return True, None

    def process_weights_after_loading(self, layer: Layer) -> None:
        # vLLM may hold the weight transposed; ours is [out, in / 8], eight codes of `in` in a word.
        words = permute_param_layout_(getattr(layer, self.w_q_name), input_dim=1, output_dim=0, packed_dim=1)
        scale = permute_param_layout_(getattr(layer, self.w_s_name), input_dim=1, output_dim=0)
        delattr(layer, self.w_s_name)
        install_weight(layer, weights.arranged(weights.int4_weight(words.data, scale.data))[0], self.w_q_name)

    def apply_weights(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weights.multiply(layer, x, bias, getattr(layer, self.w_q_name))


class BlockscaleFp8LinearKernel(FP8ScaledMMLinearKernel):
    """FP8 weights with a scale a row or a 128 × 128 block, with inputs in 16 bit."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if compute_capability in (None, 90) else (False, "requires a Hopper GPU")

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        reason = weights.dtype_refusal(c.input_dtype)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Layer) -> None:
        # vLLM gives a weight with block scales as it was loaded, and another one transposed, with a scale a row.
        blocks = layer.weight_block_size is not None
        codes = layer.weight.data if blocks else layer.weight.data.t()
        scale = layer.weight_scale_inv.data if blocks else layer.weight_scale.data
        # `del` frees the name for `hold`, which stores scales as `weight_scale` in every format.
        if blocks:
            del layer.weight_scale_inv
        install_weight(layer, weights.arranged(weights.fp8_weight(codes, scale, blocks=blocks))[0])

    def apply_weights(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weights.multiply(layer, x, bias, layer.weight)

    def apply_scaled_mm(self, **operands: Any) -> torch.Tensor:
        raise NotImplementedError("inputs stay in 16 bit, so vLLM has no product in FP8 to ask for")
