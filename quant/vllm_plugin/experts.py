"""This class runs fused experts in NVFP4 for vLLM, over our grouped matmuls.

    route rows to experts ─▶ gate and up ─▶ activation (vLLM's) ─▶ down ─▶ weigh and add

vLLM's methods for NVFP4 experts ask one function for a backend and a class. A wrapper answers with our class where the
user left `--moe-backend` at "auto" and the class takes the layer, and asks vLLM's function otherwise. The backend that
the wrapper names is vLLM's "emulation", which hands the loaded parameters on unchanged; nothing is emulated.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle import nvfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from quant.kernels.linear.experts import grouped_linear
from quant.vllm_plugin import releases, weights
from quant.vllm_plugin.self_test import SelfTest

logger = init_logger("vllm.blockscale")


class BlockscaleNvFp4Experts(mk.FusedMoEExpertsModular):
    """NVFP4 experts with inputs in 16 bit, all of them on this GPU."""

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
        # precision.
        return weight_key == kNvfp4Static

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (
            MoEActivation.SILU,
            MoEActivation.GELU,
            MoEActivation.GELU_TANH,
            MoEActivation.SILU_NO_MUL,
            MoEActivation.GELU_NO_MUL,
            MoEActivation.GELU_TANH_NO_MUL,
            MoEActivation.RELU2_NO_MUL,
        )

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        # Under expert parallelism tokens are routed to experts whose weights another GPU holds.
        return not moe_parallel_config.use_ep

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        # The sizes of this GPU's share; vLLM rounds neither up for its emulation backend.
        sizes = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        if moe_config.in_dtype is not torch.bfloat16:
            return False, f"inputs in {moe_config.in_dtype}"
        if moe_config.has_bias:
            return False, "experts with a bias"
        if moe_config.swiglu_limit is not None and not releases.limits_activations():
            return False, "experts with a limit of their activation"
        if any(size % 64 for size in sizes):
            return False, f"hidden and intermediate sizes of {sizes}, which are not multiples of 64"
        return mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name, second in (("w13", self.g1_alphas), ("w2", self.g2_alphas)):
            codes, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            weight, reason = weights.arranged(weights.nvfp4_weight(codes, scale, second))
            if reason:
                logger.warning_once("Blockscale: experts in nvfp4 take our portable kernel: %s", reason)
            replace_parameter(layer, f"{name}_weight", weight.codes)
            replace_parameter(layer, f"{name}_weight_scale", weight.scale)
            setattr(self, name, weight)
        logger.info_once("Blockscale: fused experts in nvfp4 take our kernels")

    def workspace_shapes(self, *sizes: Any, **named: Any) -> tuple[tuple[int, ...], ...]:
        # Our ops allocate what they return, and the sum goes to vLLM's own output.
        return (1,), (1,), (1, 1)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return _Sum(self)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *ignored: Any,
        **named: Any,
    ) -> None:
        """Leaves the unweighted output of every slot's expert for `finalize_weight_and_reduce_impl`."""
        from quant.kernels.portable.expert_rows import route

        # rows: hidden states sorted by expert; places: where each token's slots went, [tokens, k].
        rows, offsets, places = route(hidden_states, topk_ids.contiguous(), len(w1))
        both = grouped_linear(rows, self.w13, offsets)
        middle = both.new_empty(len(both), self.adjust_N_for_activation(both.shape[1], activation))
        self.activation(activation, middle, both)
        # vLLM calls `apply` and then the reduction, in the same thread; the reduction takes and deletes this.
        self.slots = grouped_linear(middle, self.w2, offsets), places


class _Sum(mk.TopKWeightAndReduce):
    """The weighted sum over a token's experts, written where vLLM expects it: no copy follows."""

    def __init__(self, experts: BlockscaleNvFp4Experts) -> None:
        self.experts = experts

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        from quant.kernels.portable.expert_rows import weigh

        down, places = self.experts.slots
        del self.experts.slots
        if output is None:
            output = down.new_empty(len(places), down.shape[1])
        weigh(down, places, None if apply_router_weight_on_input else topk_weights, output)
        return output


def self_test_failure() -> str:
    """Returns why experts cannot take our kernels on this GPU, empty if they can."""
    if not torch.cuda.is_available():
        return ""
    return SelfTest.on_current_gpu().experts_failure("nvfp4")


def install() -> str:
    """Wraps the function that chooses a backend, wherever vLLM has bound it, once however often it is called.

    Raises:
        AttributeError, TypeError: this vLLM lacks a name or calls a method with other arguments; nothing was changed.
    """
    chosen_by_vllm = nvfp4.select_nvfp4_moe_backend
    if getattr(chosen_by_vllm, "is_blockscale", False):
        return "experts in NVFP4"
    if problems := releases.signature_problems(BlockscaleNvFp4Experts):
        raise TypeError(problems[0])
    emulation = nvfp4.NvFp4MoeBackend.EMULATION

    @wraps(chosen_by_vllm)
    def select(
        config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> tuple[nvfp4.NvFp4MoeBackend, type[mk.FusedMoEExperts]]:
        batched = config.moe_parallel_config.use_batched_activation_format
        formats = mk.FusedMoEActivationFormat
        able, reason = BlockscaleNvFp4Experts.is_supported_config(
            BlockscaleNvFp4Experts,
            config,
            weight_key,
            activation_key,
            formats.BatchedExperts if batched else formats.Standard,
        )
        if config.moe_backend != "auto":
            able, reason = False, "--moe-backend is given"
        elif envs.VLLM_BATCH_INVARIANT:
            able, reason = False, "VLLM_BATCH_INVARIANT is set, and our launches depend on the number of tokens"
        if able and (reason := self_test_failure()):
            able = False
        # The emulation backend passes parameters on as they were loaded; the others reorder them for their own kernels.
        if able:
            return emulation, BlockscaleNvFp4Experts
        logger.warning_once("Blockscale: fused experts in nvfp4 stay with vLLM: %s", reason)
        return chosen_by_vllm(config, weight_key, activation_key)

    select.is_blockscale = True  # type: ignore[attr-defined]
    releases.rebind("select_nvfp4_moe_backend", select, nvfp4)
    return "experts in NVFP4"
