"""Fused experts in NVFP4, MXFP4 and FP8 run by our grouped matmuls, with inputs in 16 bit.

    route rows to experts ─▶ gate and up ─▶ activation ─▶ down ─▶ weigh and add

Under expert parallelism a GPU has some of the experts. Tokens come to it with numbers among all experts, those of other
GPUs are left out, and vLLM adds up the GPUs' sums.

    NVFP4    vLLM asks one function for a backend and a class: ours answers with our class where the user left
             `--moe-backend` at "auto" and the class takes the layer, and asks vLLM's function otherwise
    MXFP4    vLLM has a method for gpt-oss (gate and up alternate row by row, with biases) and one for
             compressed-tensors (`w13_weight_packed` until loaded); ours derive from them and name our class
    FP8      vLLM has no kernel for checkpoints of compressed-tensors with inputs in 16 bit, and stops: our method
             derives from the one for inputs in FP8. Scales are one a matrix, a row or a 128 × 128 block; where gate and
             up have a single scale each, the rows of both get theirs

Where a backend has to be named, it is vLLM's "emulation", which hands the loaded parameters on unchanged (the others
reorder them); nothing is emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle import nvfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.experts import grouped_linear
from quant.vllm_plugin import loaded_weights, releases, warm_up
from quant.vllm_plugin.releases import check_classes, replace_function
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")
Layer = Any
"""A layer of vLLM: a module with parameters and facts as attributes, which its class does not declare."""

_GLOBAL_SCALE = "blockscale_global_scale"
"""Of a layer's parameters with the global scales of its experts, behind `w13_` and `w2_`."""


class BlockscaleExperts(mk.FusedMoEExpertsModular):
    """Experts with inputs in 16 bit, all of them or those of this GPU."""

    format: ClassVar[str]
    """The name of the format in the log and in the self-test."""
    weight_keys: ClassVar[tuple[QuantKey, ...]]
    """vLLM's names for the weights that the class takes."""
    takes_bias: ClassVar[bool] = False

    def weight_of(self, name: str, codes: Tensor, scale: Tensor) -> BlockScaledTensor:
        """Returns the stack of experts "w13" (gate and up) or "w2" (down), from the parameters that vLLM has loaded."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        # Any key of the inputs: a checkpoint with NVFP4 inputs also runs with inputs in 16 bit, which only adds
        # precision. `is_supported_config` has looked at the weights, because this method does not know its class.
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        # By name: releases lack some. SWIGLUOAI is gpt-oss's, where gate and up alternate, in the weights as in the
        # checkpoint; SWIGLUOAI_UNINTERLEAVE is MiniMax-M3's.
        return activation.name in (
            "SILU", "GELU", "GELU_TANH", "SILU_NO_MUL", "GELU_NO_MUL", "GELU_TANH_NO_MUL", "RELU2_NO_MUL", "SWIGLUOAI",
            "SWIGLUOAI_UNINTERLEAVE",
        )  # fmt: skip

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not parallel_refusal(moe_parallel_config)

    @staticmethod
    def is_supported_config(
        cls: type[BlockscaleExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        # The sizes of this GPU's share; vLLM rounds neither up for its emulation backend.
        sizes = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        if moe_config.in_dtype is not torch.bfloat16:
            return False, f"inputs in {moe_config.in_dtype}"
        if weight_key not in cls.weight_keys:
            return False, f"weights in {weight_key}"
        if moe_config.has_bias and not cls.takes_bias:
            return False, "experts with a bias"
        if moe_config.swiglu_limit is not None and not releases.limits_activations():
            return False, "experts with a limit of their activation"
        if reason := parallel_refusal(moe_config.moe_parallel_config):
            return False, reason
        if any(size % 64 for size in sizes):
            return False, f"hidden and intermediate sizes of {sizes}, which are not multiples of 64"
        return mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.layer, self.sizes = layer, {}
        # By stack, whether the first weights of the layer fitted the layout of our kernels.
        fitted = vars(layer).setdefault("blockscale_fitted", {})
        for name in ("w13", "w2"):
            parameters = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            weight = self.weight_of(name, *(parameter.data for parameter in parameters))
            if name not in fitted and releases.loads_placeholders():
                weight = loaded_weights.placeholder(weight)
            label = f"{getattr(layer, 'layer_name', type(layer).__name__)}.{name}"
            weight, reason = loaded_weights.arranged_as_before(weight, fitted.get(name), label)
            fitted[name] = not reason
            replace_parameter(layer, f"{name}_weight", weight.codes)
            replace_parameter(layer, f"{name}_weight_scale", weight.scale)
            if weight.global_scale is not None:
                # Some releases keep theirs outside of the layer's parameters, which a reload would not fill.
                second = torch.nn.Parameter(weight.global_scale.clone(), requires_grad=False)
                layer.register_parameter(f"{name}_{_GLOBAL_SCALE}", second)
            self.sizes[name] = weight.format, weight.shape
            if reason := reason or loaded_weights.portable_experts_reason(self.stack(name)):
                logger.warning_once("Blockscale: experts in %s take our portable kernel: %s", self.format, reason)
            else:
                # Every data-parallel GPU's tokens come to this one.
                slots = self.moe_config.experts_per_token * self.moe_config.moe_parallel_config.dp_size
                warm_up.note_experts(self.stack(name), self.w1_bias if name == "w13" else self.w2_bias, slots)
        logger.info_once("Blockscale: fused experts in %s take our kernels", self.format)

    def stack(self, name: str) -> BlockScaledTensor:
        """Returns the experts "w13" or "w2" as the parameters of the layer hold them.

        CUDA graphs know the memory of these parameters. When vLLM loads other weights, it makes an instance of this
        class for them, copies what that has arranged into the same memory, and drops the rest.
        """
        format, shape = self.sizes[name]
        held = self.layer._parameters
        codes, scale = held[f"{name}_weight"], held[f"{name}_weight_scale"]
        assert codes is not None and scale is not None
        return BlockScaledTensor(codes, scale, format, shape, held.get(f"{name}_{_GLOBAL_SCALE}"))

    def workspace_shapes(self, *sizes: Any, **named: Any) -> tuple[tuple[int, ...], ...]:
        # Our ops allocate what they return, and the sum goes to vLLM's own output.
        return (1,), (1,), (1, 1)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return _Sum(self)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: MoEActivation, global_num_experts: int, expert_map: Tensor | None, *ignored: Any, **named: Any,
    ) -> None:  # fmt: skip
        """Leaves the unweighted output of every slot's expert for `finalize_weight_and_reduce_impl`."""
        from quant.kernels.attention.portable_decoder_step import swiglu
        from quant.kernels.linear.portable_grouped_gemm import route

        # rows: hidden states sorted by expert; places: where each token's slots went, [tokens, k].
        rows, offsets, places = route(hidden_states, topk_ids.contiguous(), len(w1), expert_map)
        both = grouped_linear(rows, self.stack("w13"), offsets, bias=self.w1_bias)
        if activation is MoEActivation.SILU and releases.activation_limit(self) is None:
            # Rounded as vLLM's kernel rounds it, and the next matmul may begin before it has ended.
            middle = swiglu(both)
        else:
            middle = both.new_empty(len(both), self.adjust_N_for_activation(both.shape[1], activation))
            self.activation(activation, middle, both)
        # vLLM calls `apply` and then the reduction, in the same thread; the reduction takes and deletes this.
        self.slots = grouped_linear(middle, self.stack("w2"), offsets, bias=self.w2_bias), places


class _Sum(mk.TopKWeightAndReduce):
    """The weighted sum over a token's experts, written where vLLM expects it: no copy follows."""

    def __init__(self, experts: BlockscaleExperts) -> None:
        self.experts = experts

    def apply(
        self, output: Tensor | None, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:  # fmt: skip
        from quant.kernels.linear.portable_grouped_gemm import weigh

        if not len(topk_ids):
            # No token came to this GPU, and `apply` was not called.
            return fused_expert_output if output is None else output
        down, places = self.experts.slots
        del self.experts.slots
        if output is None:
            output = down.new_empty(len(places), down.shape[1])
        weigh(down, places, None if apply_router_weight_on_input else topk_weights, output)
        return output


class BlockscaleNvFp4Experts(BlockscaleExperts):
    """NVFP4 experts, with scales for inputs or without."""

    format = "nvfp4"
    weight_keys = (kNvfp4Static,)

    def weight_of(self, name: str, codes: Tensor, scale: Tensor) -> BlockScaledTensor:
        second = self.g1_alphas if name == "w13" else self.g2_alphas
        return loaded_weights.nvfp4_weight(codes, scale, second)


def parallel_refusal(parallel: FusedMoEParallelConfig) -> str:
    """Returns why our classes do not take experts that are spread over GPUs like this, empty if they do."""
    if parallel.use_ep and parallel.enable_eplb:
        return "experts that move between GPUs (--enable-eplb)"
    if parallel.use_all2all_kernels and parallel.all2all_backend != "allgather_reducescatter":
        return f"experts that get their tokens by --all2all-backend {parallel.all2all_backend}"
    return ""


def refusal(
    cls: type[BlockscaleExperts], config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
) -> str:
    """Returns why one of our classes does not take the experts of a layer, empty if it does; keys are vLLM's names."""
    if config.moe_backend != "auto":
        return "--moe-backend is given"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and our launches depend on the number of tokens"
    batched = config.moe_parallel_config.use_batched_activation_format
    formats = mk.FusedMoEActivationFormat
    layout = formats.BatchedExperts if batched else formats.Standard
    able, reason = cls.is_supported_config(cls, config, weight_key, activation_key, layout)
    if not able:
        return reason or "vLLM says no reason"
    if not torch.cuda.is_available():
        return ""
    return SelfTest.on_current_gpu().experts_failure(cls.format)


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


def install_nvfp4_experts() -> str:
    """Wraps the function that chooses a backend, wherever vLLM has bound it."""
    check_classes(BlockscaleNvFp4Experts)
    emulation = nvfp4.NvFp4MoeBackend.EMULATION

    def wrap(chosen_by_vllm: Any) -> Any:
        def select(
            config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
        ) -> tuple[nvfp4.NvFp4MoeBackend, type[mk.FusedMoEExperts]]:
            reason = refusal(BlockscaleNvFp4Experts, config, weight_key, activation_key)
            if not reason:
                return emulation, BlockscaleNvFp4Experts
            logger.warning_once("Blockscale: fused experts in nvfp4 stay with vLLM: %s", reason)
            return chosen_by_vllm(config, weight_key, activation_key)

        return select

    replace_function(nvfp4, "select_nvfp4_moe_backend", wrap, in_importers=True)
    return "experts in NVFP4"
