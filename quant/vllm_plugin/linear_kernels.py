"""Kernel classes that vLLM may choose for linear layers; each calls our custom op `quant::linear`.

vLLM asks a class whether it can run a layer, lets it change the loaded parameters once
(`process_weights_after_loading`), and then calls `apply_weights` with each input. Every class refuses where the user
named a backend and where its kernel fails its self-test (`self_test.py`), and vLLM asks the next class.

The classes of NVFP4, MXFP4 and MXFP8 extend vLLM's Marlin class of the same format: a layer that our kernels do not
take (inputs in float16, a matrix that is not a multiple of 64 × 64, scales that the layout cannot hold) stays with
Marlin, and the log says which limit it broke. Layers in INT4 and FP8 are refused by `can_implement` instead.

The weight is put into the layout of Hopper's kernels once and keeps vLLM's names. Inputs stay in 16 bit. A call is one
node for torch.compile, and a CUDA graph can capture it: the op neither waits for the GPU nor keeps state.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
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
from quant.vllm_plugin import loaded_weights, releases, switches, warm_up
from quant.vllm_plugin.releases import check_classes, check_has_arguments, replace_function
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")
Layer = Any
"""A layer of vLLM: a module with parameters and facts as attributes, which its class does not declare."""
_formats_installed: set[str] = set()
_attention_of_user: set[str] = set()


def refusal(format: str, quantization: str, class_name: str) -> str:
    """Returns the reason why our classes take no layer in `format`; empty if they take them.

    A failed self-test is logged once; the user's own choices are not logged. `quantization` is vLLM's name for
    layers of this kind.
    """
    if not releases.is_free_to_choose(quantization, class_name):
        return "gives way to the backend that was chosen"
    if not torch.cuda.is_available():
        return ""
    reason = SelfTest.on_current_gpu().product_failure(format)
    if reason:
        logger.warning_once("Blockscale: linear layers in %s stay with vLLM: %s", format, reason)
    return reason


def has_our_layers() -> bool:
    """Returns whether a linear layer of this process uses our kernels, on one GPU.

    With tensor parallelism vLLM joins the norm after a layer to the reduction over GPUs, and keeps its norms.
    """
    return bool(_formats_installed)


def has_free_attention() -> bool:
    """Returns whether such a layer exists, and the user left attention to vLLM."""
    return has_our_layers() and not _attention_of_user


def install_weight(layer: Layer, weight: BlockScaledTensor, codes: str = "weight") -> None:
    """Makes `weight` the parameters of `layer`, its codes under the name `codes`."""
    loaded_weights.hold(layer, weight, codes)
    warm_up.note_linear(weight, getattr(layer, "bias", None))
    # With tensor parallelism vLLM fuses the norm into the all-reduce; our norm would undo that. Layers that are whole
    # on every GPU, as the first ones of latent attention, say 1 even then.
    one_gpu = getattr(layer, "tp_size", 1) == releases.tensor_parallel_size() == 1
    failure = SelfTest(weight.codes.device).norm_failure() if one_gpu and weight.codes.is_cuda else ""
    if failure:
        logger.warning_once("Blockscale: norms stay with vLLM: %s", failure)
    elif one_gpu:
        _formats_installed.add(weight.format.name)
    switches.record(name_of(layer), f"{weight.format.name}, norms {has_our_layers()}")
    _attention_of_user.update(releases.user_attention_backends())
    logger.info_once("Blockscale: linear layers in %s take our kernels", weight.format.name)


def name_of(layer: Layer) -> str:
    """Returns the layer's name in the model, or its class where it has none."""
    return getattr(layer, "prefix", "") or type(layer).__name__


class _OverMarlin:
    """The shared part of the classes that fall back on one of vLLM's Marlin classes, their next base."""

    format: ClassVar[str]
    quantization: ClassVar[str]
    """vLLM's name for the layers that its list of this format serves."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        supported, reason = super().is_supported(compute_capability)  # type: ignore[misc]
        if supported:
            reason = refusal(cls.format, cls.quantization, cls.__name__) or None
        return reason is None, reason

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        """Returns the weight in the parameters that vLLM has loaded."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Layer) -> None:
        weight = self.weight_of(layer)
        # Set below, and by `hold`: an empty name means that Marlin runs the layer, as `apply_weights` reads it too.
        kept = getattr(layer, "blockscale_format", None)
        if kept is None and releases.loads_placeholders():
            weight = loaded_weights.placeholder(weight)
        reason = loaded_weights.dtype_refusal(layer.params_dtype)
        if not reason:
            # Scales and shape decide, so this is known only once vLLM has loaded the weight.
            weight, reason = loaded_weights.arranged_as_before(
                weight, None if kept is None else bool(kept), name_of(layer)
            )
        if not reason:
            install_weight(layer, weight)
            return
        shape = "x".join(map(str, weight.shape))
        logger.warning_once("Blockscale: a linear layer in %s stays with Marlin: %s", weight.format.name, reason)
        logger.debug("Blockscale: %s [%s]: %s", name_of(layer), shape, reason)
        layer.blockscale_format = ""
        switches.record(name_of(layer), "marlin")
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply_weights(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not layer.blockscale_format:
            return super().apply_weights(layer, x, bias)  # type: ignore[misc]
        return loaded_weights.multiply(layer, x, bias, layer.weight)


class BlockscaleNvFp4LinearKernel(_OverMarlin, MarlinNvFp4LinearKernel):
    """NVFP4 weights with inputs in 16 bit."""

    format, quantization = "nvfp4", "nvfp4_w4a4"

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return loaded_weights.nvfp4_weight(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)


def takes_weight_only_nvfp4() -> bool:
    """Returns whether NVFP4 layers without scales for inputs take our kernel: vLLM asks no list for them."""
    cls = BlockscaleNvFp4LinearKernel
    return MarlinNvFp4LinearKernel.is_supported()[0] and not refusal("nvfp4", "nvfp4_w4a16", cls.__name__)


def weight_only_nvfp4(config: NvFp4LinearLayerConfig) -> MarlinNvFp4LinearKernel:
    """Returns the kernel of an NVFP4 layer without input scales; vLLM calls it in place of Marlin's class."""
    return (BlockscaleNvFp4LinearKernel if takes_weight_only_nvfp4() else MarlinNvFp4LinearKernel)(config)


class BlockscaleMxFp4LinearKernel(_OverMarlin, MarlinMxFp4LinearKernel):
    """MXFP4 weights with inputs in 16 bit."""

    format, quantization = "mxfp4", "mxfp4"

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return loaded_weights.mxfp4_weight(layer.weight.data, layer.weight_scale.data)


class BlockscaleMxfp8LinearKernel(_OverMarlin, MarlinMxfp8LinearKernel):
    """MXFP8 weights with inputs in 16 bit."""

    format, quantization = "mxfp8", "mxfp8"

    def weight_of(self, layer: Layer) -> BlockScaledTensor:
        return loaded_weights.mxfp8_weight(layer.weight.data, layer.weight_scale.data)


class BlockscaleInt4LinearKernel(MPLinearKernel):
    """INT4 weights in groups of 128 with inputs in 16 bit."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        columns = c.partition_weight_shape[0]
        if reason := loaded_weights.dtype_refusal(c.act_type):
            return False, reason
        has_order = getattr(c, "has_g_idx", False)  # later releases have dropped layers with one
        if c.weight_type != scalar_types.uint4b8 or c.group_size != 128 or c.zero_points or has_order:
            return False, "our kernel takes symmetric INT4 in groups of 128, with no order of its own"
        if columns % 128:
            return False, f"in_features = {columns} is not a multiple of 128"
        reason = refusal("int4", "mixed_precision", cls.__name__)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Layer) -> None:
        # vLLM may hold the weight transposed; ours is [out, in / 8], eight codes of `in` in a word.
        words = permute_param_layout_(getattr(layer, self.w_q_name), input_dim=1, output_dim=0, packed_dim=1)
        scale = permute_param_layout_(getattr(layer, self.w_s_name), input_dim=1, output_dim=0)
        delattr(layer, self.w_s_name)
        install_weight(
            layer, loaded_weights.arranged(loaded_weights.int4_weight(words.data, scale.data))[0], self.w_q_name
        )

    def apply_weights(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return loaded_weights.multiply(layer, x, bias, getattr(layer, self.w_q_name))


class BlockscaleFp8LinearKernel(FP8ScaledMMLinearKernel):
    """FP8 weights with a scale a row or a 128 × 128 block, with inputs in 16 bit."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if compute_capability in (None, 90) else (False, "requires a Hopper GPU")

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        blocks = c.weight_quant_key.scale.group_shape.row > 1
        reason = loaded_weights.dtype_refusal(c.input_dtype)
        reason = reason or refusal("fp8_block" if blocks else "fp8_channel", "w8a16_fp8", cls.__name__)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Layer) -> None:
        # vLLM gives a weight with block scales as it was loaded, and another one transposed, with a scale a row.
        blocks = layer.weight_block_size is not None
        codes = layer.weight.data if blocks else layer.weight.data.t()
        scale = layer.weight_scale_inv.data if blocks else layer.weight_scale.data
        # `del` frees the name for `hold`, which stores scales as `weight_scale` in every format.
        if blocks:
            del layer.weight_scale_inv
        install_weight(layer, loaded_weights.arranged(loaded_weights.fp8_weight(codes, scale, blocks=blocks))[0])

    def apply_weights(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return loaded_weights.multiply(layer, x, bias, layer.weight)

    def apply_scaled_mm(self, **operands: Any) -> Tensor:
        raise NotImplementedError("inputs stay in 16 bit, so vLLM does not look for a product in FP8")


def install_linear_kernels() -> str:
    """Puts our classes into vLLM's lists, and returns the formats that they take.

    Raises:
        AttributeError, ImportError, KeyError, TypeError: this vLLM lacks a list or a name; nothing was changed.
    """
    from vllm.model_executor.kernels import linear as lists
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.platforms import PlatformEnum

    # Each class goes to the head of its list, but INT4 after Machete, which vLLM prefers to Marlin on Hopper: our INT4
    # kernel was never measured against it.
    offers = (
        (lists._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA], BlockscaleNvFp4LinearKernel, None),
        (lists._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CUDA], BlockscaleMxFp4LinearKernel, None),
        (lists._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CUDA], BlockscaleMxfp8LinearKernel, None),
        (lists._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CUDA], BlockscaleFp8LinearKernel, None),
        (lists._POSSIBLE_KERNELS[PlatformEnum.CUDA], BlockscaleInt4LinearKernel, lists.MarlinLinearKernel),
    )
    check_classes(*(ours for _, ours, _ in offers))
    check_has_arguments(lists.init_nvfp4_linear_kernel, "use_a16")
    signature = inspect.signature(lists.init_nvfp4_linear_kernel)
    for classes, ours, before in offers:
        if ours not in classes:
            # vLLM asks the classes in the order of the list, and takes the first that can run a layer.
            classes.insert(0 if before is None else classes.index(before), ours)

    def wrap(theirs: Any) -> Any:
        def init_nvfp4_linear_kernel(*arguments: Any, **named: Any) -> Any:
            if signature.bind(*arguments, **named).arguments.get("use_a16") and takes_weight_only_nvfp4():
                return BlockscaleNvFp4LinearKernel(NvFp4LinearLayerConfig())
            return theirs(*arguments, **named)

        return init_nvfp4_linear_kernel

    replace_function(lists, "init_nvfp4_linear_kernel", wrap, in_importers=True)
    if hasattr(modelopt, "MarlinNvFp4LinearKernel"):
        modelopt.MarlinNvFp4LinearKernel = weight_only_nvfp4
    return "linear layers in NVFP4, MXFP4, MXFP8, INT4 and weight-only FP8"
