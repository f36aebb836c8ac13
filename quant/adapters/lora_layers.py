"""PEFT's LoRA layers over quantized ones: over a linear, and over the stacked experts of one projection."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from quant.adapters.dense_layers import DenseExperts, dense_linear, refuse_merge
from quant.base.errors import UserError
from quant.kernels.base.custom_ops import autocast_dtype, without_autocast
from quant.kernels.linear.experts import ExpertStack, QuantExperts
from quant.kernels.linear.quant_linear import input_gradient
from quant.kernels.linear.quant_linear import QuantLinear
from quant.training.qat_layers import QATLinear

# LoRA inside of the rounding: a layer in training rounds W + s·BA, the weight that will be served.
#
# An adapter next to a quantized layer is served next to it, or loses some of its training when it is merged and
# rounded. Here the layer that `prepare_qat` made rounds the sum, in each forward pass:
#
#     y = Q(x) Q(W + s·B A)ᵀ        gradients reach A and B straight through the rounding
#
# `merge_and_unload` computes the same sum, and `convert_qat` packs it: the packed model gives the outputs of training.
# W is frozen, so the optimizer holds only the adapters' states.


class LoraQATLinear(Linear):  # type: ignore[misc]
    """PEFT's `lora.Linear` over a `QATLinear`, which adds the adapter to its weight before rounding."""

    base_layer: QATLinear

    def __init__(self, base_layer: QATLinear, adapter_name: str, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, config, *args, **kwargs)
        self.get_base_layer().adapter = _Added(self)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        check_inside(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        if adapter_name in self.lora_variant:
            variant = type(self.lora_variant[adapter_name]).__name__
            raise UserError(f"{variant} of PEFT cannot be inside of the rounding; use plain LoRA, or rsLoRA")

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("adapter_names") is not None:
            raise UserError("adapter_names: rows of a batch cannot have different adapters inside of the rounding")
        if self.disable_adapters and self.merged:
            self.unmerge()
        return self.base_layer(x)  # type: ignore[no-any-return]

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> QATLinear:
        """Returns the layer in training without the adapter, or with it in its weight."""
        if merge:
            self.merge(safe_merge, adapter_names)
        base: QATLinear = self.get_base_layer()
        base.adapter = None
        return base


class _Added:
    """The adapters of a layer as its base layer sees them; no module, which would contain itself."""

    def __init__(self, layer: LoraQATLinear) -> None:
        self._layer = layer

    @property
    def version(self) -> tuple[int, ...]:
        layer = self._layer
        return tuple(
            part[name].weight._version for name in self._active() for part in (layer.lora_A, layer.lora_B)
        )  # fmt: skip

    def added(self) -> torch.Tensor | None:
        deltas = [self._layer.get_delta_weight(name) for name in self._active()]
        return sum(deltas[1:], deltas[0]) if deltas else None

    def _active(self) -> list[str]:
        layer = self._layer
        if layer.disable_adapters:
            return []
        return [name for name in layer.active_adapters if name in layer.lora_A and name not in layer.merged_adapters]


def check_inside(config: Any) -> None:
    """Raises UserError for options of a `LoraConfig` that an adapter inside of the rounding cannot have."""
    for name, reason in (
        ("lora_dropout", "the adapter has no input of its own"),
        ("lora_bias", "it adds only to the weight"),
        ("use_dora", "it divides by the norm of a weight"),
        ("target_parameters", "experts round without adapters"),
    ):
        if value := getattr(config, name, None):
            raise UserError(
                f"{name}={value!r}: not for LoRA inside of the rounding of a model that prepare_qat prepared, where "
                f"{reason}; leave it out, or use PEFT without quant.lora, which puts adapters beside the rounded layers"
            )


class LoraQuantLinear(Linear):  # type: ignore[misc]
    """PEFT's `lora.Linear`, its variants included, over a `QuantLinear`."""

    base_layer: Any

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        if isinstance(base_layer, QuantLinear):  # whose weight is dequantized on access
            return base_layer.codes.device, base_layer.dtype
        return super()._get_base_layer_device_and_dtype(base_layer)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes PEFT's forward; where it can, an adapter's last product also adds its output to the layer's."""
        names, dtype = [name for name in self.active_adapters if name in self.lora_A], autocast_dtype(x)
        plain = not (args or kwargs or self.disable_adapters or self.merged)
        if not (plain and all(self._is_plain(x, name, dtype) for name in names)):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        if len(names) == 1 and self._is_one_product(names[0]):
            down, up = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
            return _Adapted.apply(x, down, up, self.scaling[names[0]], self.base_layer, dtype or x.dtype)  # type: ignore[no-any-return, no-untyped-call]
        y: torch.Tensor = self.base_layer(x)
        for name in names:
            low = self.lora_A[name](self.lora_dropout[name](x)).flatten(0, -2)
            up = self.lora_B[name].weight
            y = torch.addmm(y.flatten(0, -2), low, up.t(), alpha=self.scaling[name]).view(y.shape)
        return y

    def _is_plain(self, x: torch.Tensor, name: str, autocast: torch.dtype | None) -> bool:
        """Returns whether an adapter is two products in one dtype, autocast's or the input's."""
        down, up = self.lora_A[name], self.lora_B[name]
        same = autocast is not None or down.weight.dtype == up.weight.dtype == x.dtype
        plain = same and up.bias is None and not _is_hooked(up)
        return plain and name not in self.lora_variant and x.dtype is not torch.float64

    def _is_one_product(self, name: str) -> bool:
        """Returns whether `_Adapted` computes the layer with this adapter.

        A compiler does better with separate products.
        """
        base, dropout = self.base_layer, self.lora_dropout[name]
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and isinstance(base, QuantLinear)
            and not base.parts
            and (base.bias is None or not base.bias.requires_grad)
            and (isinstance(dropout, nn.Identity) or not dropout.training)
            and not (_is_hooked(base) or _is_hooked(self.lora_A[name]))
        )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        _refuse_quantized(self.base_layer)
        super().merge(safe_merge, adapter_names)


def _is_hooked(module: nn.Module) -> bool:
    """Returns whether a call does more than the class's forward, by a hook or by accelerate."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


class _Adapted(torch.autograd.Function):
    """`x Wᵀ + bias + s·(x Aᵀ) Bᵀ`: a quantized linear and its adapter as one node of the graph.

    Adapters are small, and their arithmetic is not their cost: that is nodes of the graph, tensors as large as the
    output that are only scaled or added, and launches. Here both sums are made by the products themselves, and only the
    input is saved by way of the graph: gradient checkpointing calls Python four times for each tensor that is.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, s: float, base: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.s, ctx.base, ctx.shape, ctx.dtypes = s, base, x.shape, (x.dtype, down.dtype, up.dtype)
        x, narrow_down, narrow_up = x.to(dtype), down.to(dtype), up.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ narrow_down.t()
        # Below autograd the quantized layer records no node of its own: this function is the node of both.
        with without_autocast(x), torch._C._AutoDispatchBelowAutograd():
            y: torch.Tensor = base(x)
        y.view(-1, y.shape[-1]).addmm_(low, narrow_up.t(), alpha=s)
        ctx.save_for_backward(rows)
        # Held by `ctx` and not saved: autograd checks only saved tensors for in-place changes, so `backward` compares
        # the versions of these.
        ctx.held, ctx.parameters = (low, narrow_down, narrow_up, down._version, up._version), (down, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,), (low, down, up, *versions) = ctx.saved_tensors, ctx.held
        if versions != [parameter._version for parameter in ctx.parameters]:
            raise RuntimeError("the weights of an adapter were modified in place between its forward and backward pass")
        for_x, for_down, for_up, *_ = ctx.needs_input_grad
        # With y = x Wᵀ + s · (x Aᵀ) Bᵀ:  dx = dy W + s · dy B A,  dA = (s · dy B)ᵀ x,  dB = s · dyᵀ (x Aᵀ).
        dy = gradient.reshape(-1, gradient.shape[-1])
        dlow = (dy @ up).mul_(ctx.s)
        dx = ddown = dup = None
        if for_x:
            dx = input_gradient(dy, ctx.base.stored_weight).addmm_(dlow, down).view(ctx.shape).to(ctx.dtypes[0])
        if for_down:
            ddown = (dlow.t() @ rows).to(ctx.dtypes[1])
        if for_up:
            dup = (dy.t() @ low).mul_(ctx.s).to(ctx.dtypes[2])
        return dx, ddown, dup, None, None, None


class LoraQuantExperts(ExpertStack, LoraLayer):  # type: ignore[misc]
    """LoRA for each expert of a `QuantExperts`, in whose place it stands.

    `lora_A` is `[experts · r, in]` and `lora_B` `[out, r · experts]`, the experts of `lora_B` fastest: PEFT's own form
    of adapters on stacked experts in 16 bit.
    """

    runs_grouped = True
    # Of `LoraLayer`, which has no types.
    base_layer: Any
    get_base_layer: Any
    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    r: Any
    scaling: Any
    active_adapters: Any
    disable_adapters: Any

    def __init__(
        self, base_layer: QuantExperts, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **kwargs: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        for name in ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora"):
            if getattr(config, name):
                raise UserError(f"{name}={getattr(config, name)!r} is not for adapters on experts; leave it out")
        self.stacking = self.get_base_layer().stacking
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        self.num_experts, out, columns = module.weight_shape
        return columns, out

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return base_layer.codes.device, base_layer.dtype

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        # PEFT makes one adapter of all experts' ranks; scaling is by the rank of a single expert.
        super().update_layer(adapter_name, r * self.num_experts, lora_alpha, config, **kwargs)
        self.r[adapter_name] = r
        self.scaling[adapter_name] = lora_alpha / (r**0.5 if config.use_rslora else r)

    @property
    def dtype(self) -> torch.dtype:
        """As of the quantized experts."""
        return self.base_layer.dtype  # type: ignore[no-any-return]

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[experts, r, in]` and `[experts, out, r]`, the scaling included."""
        down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        up = up.view(self.out_features, -1, self.num_experts).permute(2, 0, 1)
        return down.view(self.num_experts, -1, self.in_features), up * self.scaling[adapter]

    @property
    def _active(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.disable_adapters:
            return []
        return [self._factors(name) for name in self.active_adapters if name in self.lora_A]

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`, the adapters included."""
        return _add(self.base_layer.product(x, index), x, index, self._active)

    def dense(self, index: int) -> torch.Tensor:
        """Returns the values `[out, in]` of one expert, the adapters included."""
        weight: torch.Tensor = self.base_layer.dense(index)
        for down, up in self._active:
            weight = (weight + up[index] @ down[index]).to(weight.dtype)
        return weight

    def grouped(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Computes `QuantExperts.grouped` with adapters; they take experts one by one, and wait for the offsets."""
        y, active = self.base_layer.grouped(x, offsets), self._active
        if not active:
            return y  # type: ignore[no-any-return]
        bounds = offsets.tolist()
        rows = [_add(x.new_zeros(()), x[a:b], e, active) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
        branch = self.stacking.outputs(torch.cat(rows)) if rows else y[:0]
        return torch.cat(((y[: bounds[-1]] + branch).to(y.dtype), y[bounds[-1] :]))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        _refuse_quantized(self.base_layer)
        weight = self.base_layer.weight
        for down, up in (self._factors(name) for name in adapter_names or self.active_adapters):
            weight += (up @ down).to(weight.dtype)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> Any:
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.base_layer


def _add(
    y: torch.Tensor, x: torch.Tensor, expert: int, active: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Returns the outputs of an expert and of its adapters for `x`, in the dtype of `x`."""
    for down, up in active:
        y = y + functional.linear(functional.linear(x.to(down.dtype), down[expert]), up[expert])
    return y.to(x.dtype)


def _refuse_quantized(base: nn.Module) -> None:
    if isinstance(base, QuantLinear | QuantExperts):
        refuse_merge()


def make_dense(module: Any) -> None:
    """Puts a layer in 16 bit below an adapter, into which PEFT then merges."""
    base = module.base_layer
    is_linear = isinstance(base, QuantLinear)
    module.base_layer = dense_linear(base) if is_linear else DenseExperts(base.dequantize(base.dtype), base.stacking)


LAYERS = {QuantLinear: LoraQuantLinear, QuantExperts: LoraQuantExperts}
"""The adapters of quantized layers, as PEFT registers them."""
