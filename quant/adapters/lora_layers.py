"""PEFT's adapters over quantized layers: LoRA over a linear, stacked experts and a layer in training, and the others.

IA3, VeRA, OFT and AdaLoRA change the input or the output of a layer, and need nothing of its weight. But PEFT accepts
only classes that it knows, and has no registry for others: `prepare` changes the class of a `QuantLinear` to one that
is an `nn.Linear` too. PEFT would also merge into the weight that it reads there, which is a dequantized copy: what it
reads refuses to be changed.

Private parts of PEFT are touched in this file alone (tried with 0.19 to 0.21): `LoraConfig._register_custom_module`,
`LoraLayer.update_layer`, `_get_in_out_features` and `_get_base_layer_device_and_dtype`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from quant.base.errors import UserError
from quant.kernels.base.custom_ops import autocast_dtype, without_autocast
from quant.kernels.linear.experts import ExpertStack, QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, input_gradient
from quant.recipes.blocks import take_over
from quant.recipes.layers import Stacking
from quant.training.qat_layers import QATLinear, RoundedWeight


class DenseExperts(nn.Module):
    """Holds dequantized experts `[experts, out, in]` while adapters are merged into them."""

    def __init__(self, weight: Tensor, stacking: Stacking) -> None:
        super().__init__()
        self.weight, self.stacking = weight, stacking


def dense_linear(module: QuantLinear) -> nn.Linear:
    """Returns a linear layer with the weight that a quantized one multiplies by, in the model's dtype."""
    # The constructor would fill a matrix with random numbers, only for the next lines to replace it.
    with torch.device("meta"):
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    linear.weight = nn.Parameter(module.weight.as_subclass(Tensor), requires_grad=False)
    if module.bias is not None:
        linear.bias = module.bias
    # Hooks and attributes of users and of accelerate live on the module object, which is exchanged here.
    take_over(linear, module)
    return linear.train(module.training)


class AdaptableQuantLinear(QuantLinear, nn.Linear):  # type: ignore[misc]
    """A quantized linear on which PEFT puts any adapter that an `nn.Linear` takes."""

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix `[out, in]`, which cannot be changed."""
        return super().weight.as_subclass(_Unchangeable)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        # PEFT takes an adapter off by giving the layer below it its own weight and bias again.
        if not isinstance(value, _Unchangeable):
            refuse_merge()


class _Unchangeable(Tensor):
    """A tensor that raises UserError where it would be changed in place; results computed from it are plain."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # `w.data = …` calls the setter of a property, `w += …` is `__iadd__`, and `w.copy_(…)` ends in an underscore.
        name, data = func.__name__, Tensor.data
        is_operator = name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
        if is_operator or func == data.__set__ or (name.endswith("_") and not name.endswith("__")):  # type: ignore[attr-defined]
            refuse_merge()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # PEFT merges into `weight.data`.
        return result.as_subclass(cls) if func == data.__get__ else result  # type: ignore[attr-defined]


def refuse_merge() -> None:
    """Raises UserError where PEFT would merge an adapter into a quantized layer by itself."""
    raise UserError(
        "an adapter on a quantized layer is merged by quant.merge_lora(model, data), which quantizes the layers again "
        "by the plan; merge() by itself would not know how"
    )


class LoraQATLinear(Linear):  # type: ignore[misc]
    """PEFT's `lora.Linear` over a `QATLinear`, which adds the adapter to its weight before rounding, in each forward.

        y = Q(x) Q(W + s·B A)ᵀ        gradients reach A and B straight through the rounding

    An adapter next to a quantized layer loses some of its training when it is merged and rounded. Here
    `merge_and_unload` computes the same sum, and packing gives the outputs of training. W is frozen.
    """

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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("adapter_names") is not None:
            raise UserError("adapter_names: rows of a batch cannot have different adapters inside of the rounding")
        if self.disable_adapters and self.merged:
            self.unmerge()
        return self.base_layer(x)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> QATLinear:
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
        matrices = (self._layer.lora_A, self._layer.lora_B)
        return tuple(part[name].weight._version for name in self._active() for part in matrices)

    def added(self) -> Tensor | None:
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
        return super()._get_base_layer_device_and_dtype(base_layer)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Computes PEFT's forward; where it can, an adapter's last product also adds its output to the layer's."""
        names, dtype = [name for name in self.active_adapters if name in self.lora_A], autocast_dtype(x)
        plain = not (args or kwargs or self.disable_adapters or self.merged)
        if not (plain and all(self._is_plain(x, name, dtype) for name in names)):
            return super().forward(x, *args, **kwargs)
        if len(names) == 1 and self._is_one_product(names[0]):
            down, up = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
            return _Adapted.apply(x, down, up, self.scaling[names[0]], self.base_layer, dtype or x.dtype)  # type: ignore[no-untyped-call]
        y: Tensor = self.base_layer(x)
        for name in names:
            low = self.lora_A[name](self.lora_dropout[name](x)).flatten(0, -2)
            up = self.lora_B[name].weight
            y = torch.addmm(y.flatten(0, -2), low, up.t(), alpha=self.scaling[name]).view(y.shape)
        return y

    def _is_plain(self, x: Tensor, name: str, autocast: torch.dtype | None) -> bool:
        """Returns whether an adapter is two products in one dtype, autocast's or the input's."""
        down, up = self.lora_A[name], self.lora_B[name]
        same = autocast is not None or down.weight.dtype == up.weight.dtype == x.dtype
        plain = same and up.bias is None and not _is_hooked(up)
        return plain and name not in self.lora_variant and x.dtype is not torch.float64

    def _is_one_product(self, name: str) -> bool:
        """Returns whether `_Adapted` computes the layer with this adapter; a compiler prefers separate products."""
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
        if isinstance(self.base_layer, QuantLinear | QuantExperts):
            refuse_merge()
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
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, s: float, base: Any, dtype: torch.dtype) -> Tensor:
        ctx.s, ctx.base, ctx.shape, ctx.dtypes = s, base, x.shape, (x.dtype, down.dtype, up.dtype)
        x, narrow_down, narrow_up = x.to(dtype), down.to(dtype), up.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ narrow_down.t()
        # Below autograd the quantized layer records no node of its own: this function is the node of both.
        with without_autocast(x), torch._C._AutoDispatchBelowAutograd():
            y: Tensor = base(x)
        y.view(-1, y.shape[-1]).addmm_(low, narrow_up.t(), alpha=s)
        ctx.save_for_backward(rows)
        # Held by `ctx` and not saved: autograd checks only saved tensors for in-place changes, so `backward` compares
        # the versions of these.
        ctx.held, ctx.parameters = (low, narrow_down, narrow_up, down._version, up._version), (down, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
        return self.base_layer.dtype

    def _factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns `[experts, r, in]` and `[experts, out, r]`, the scaling included."""
        down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        up = up.view(self.out_features, -1, self.num_experts).permute(2, 0, 1)
        return down.view(self.num_experts, -1, self.in_features), up * self.scaling[adapter]

    @property
    def _active(self) -> list[tuple[Tensor, Tensor]]:
        if self.disable_adapters:
            return []
        return [self._factors(name) for name in self.active_adapters if name in self.lora_A]

    def product(self, x: Tensor, index: int) -> Tensor:
        return _add(self.base_layer.product(x, index), x, index, self._active)

    def dense(self, index: int) -> Tensor:
        weight: Tensor = self.base_layer.dense(index)
        for down, up in self._active:
            weight = (weight + up[index] @ down[index]).to(weight.dtype)
        return weight

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Computes `QuantExperts.grouped` with adapters; they take experts one by one, and wait for the offsets."""
        y, active = self.base_layer.grouped(x, offsets), self._active
        if not active:
            return y
        bounds = offsets.tolist()
        rows = [_add(x.new_zeros(()), x[a:b], e, active) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
        branch = self.stacking.outputs(torch.cat(rows)) if rows else y[:0]
        return torch.cat(((y[: bounds[-1]] + branch).to(y.dtype), y[bounds[-1] :]))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if isinstance(self.base_layer, QuantLinear | QuantExperts):
            refuse_merge()
        weight = self.base_layer.weight
        for down, up in (self._factors(name) for name in adapter_names or self.active_adapters):
            weight += (up @ down).to(weight.dtype)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> Any:
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.base_layer


def _add(y: Tensor, x: Tensor, expert: int, active: list[tuple[Tensor, Tensor]]) -> Tensor:
    for down, up in active:
        y = y + functional.linear(functional.linear(x.to(down.dtype), down[expert]), up[expert])
    return y.to(x.dtype)


def make_dense(parent: Any, name: str) -> None:
    """Puts the dequantized weight in the place of a quantized layer of `parent`, into which PEFT then merges."""
    module = getattr(parent, name)
    if isinstance(module, QuantLinear):
        setattr(parent, name, dense_linear(module))
    elif isinstance(module, QuantExperts):
        setattr(parent, name, DenseExperts(module.dequantize(module.dtype), module.stacking))


CONFIGS = ("IA3Config", "VeraConfig", "OFTConfig", "AdaLoraConfig")
"""The configs of PEFT whose adapters work on an `AdaptableQuantLinear`."""
_INTO_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Beginnings of the initializations of PEFT that change the weights of the base."""


def prepare(config: Any, model: nn.Module) -> None:
    """Makes PEFT put the adapters of `config` on the quantized layers of a model, or inside the rounding of QAT."""
    if not hasattr(LoraConfig, "_register_custom_module"):
        raise UserError("this version of peft has no LoraConfig._register_custom_module; install one from 0.19 to 0.21")
    kind, modules = type(config).__name__, list(model.modules())
    if not isinstance(config, LoraConfig) and kind not in CONFIGS:
        raise UserError(f"quant.lora takes a LoraConfig, {', '.join(CONFIGS)} of PEFT, not a {kind}")
    if any(isinstance(module, RoundedWeight) for module in modules):
        if kind in CONFIGS:
            raise UserError(
                f"the model is prepared for QAT, and a {kind} cannot go inside of its rounding: take a LoraConfig, or "
                "use PEFT without quant.lora, which puts adapters beside the rounded layers"
            )
        check_inside(config)
        config._register_custom_module({QATLinear: LoraQATLinear})
    elif not any(isinstance(module, QuantLinear | QuantExperts) for module in modules):
        raise UserError("the model has no quantized linears or experts; quantize it first, or use PEFT as it is")
    elif kind in CONFIGS:
        for module in modules:
            if type(module) is QuantLinear:
                module.__class__ = AdaptableQuantLinear
    else:
        saved = tuple(config.modules_to_save or ())
        for name, module in model.named_modules():
            holders = accumulate(name.split("."), "{}.{}".format)  # PEFT copies a whole block, too
            if isinstance(module, QuantLinear | QuantExperts) and any(each.endswith(saved) for each in holders):
                raise UserError(f"modules_to_save holds {name}, whose codes do not train: take it in target_modules")
        initialization = config.init_lora_weights
        if isinstance(initialization, str) and initialization.lower().startswith(_INTO_THE_BASE):
            raise UserError(
                f"init_lora_weights={initialization!r} subtracts the adapter from the weights, and quantized ones stay "
                "as they are; leave it True, or take 'gaussian', 'orthogonal' or 'eva'"
            )
        # Without this experimental hook `get_peft_model` refuses a QuantLinear as an unsupported target.
        config._register_custom_module({QuantLinear: LoraQuantLinear, QuantExperts: LoraQuantExperts})
