"""Adapters of PEFT other than LoRA go on quantized linears that are subclasses of `nn.Linear`.

IA3, VeRA, OFT and AdaLoRA change the input or the output of a layer, and need nothing of its weight. But PEFT accepts
only classes that it knows, and has no registry for others. `make_adaptable` changes the class of a `QuantLinear` to one
that is an `nn.Linear` too. PEFT would also merge into the weight that it reads there, which is a dequantized copy: what
it reads refuses to be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import Stacking
from quant.recipes.module_replacement import take_over

# Quantized layers are dequantized here, to be changed in 16 bit and then quantized again.


class DenseExperts(nn.Module):
    """Holds dequantized experts `[experts, out, in]` while adapters are merged into them."""

    def __init__(self, weight: torch.Tensor, stacking: Stacking) -> None:
        super().__init__()
        self.weight, self.stacking = weight, stacking


def dense_linear(module: QuantLinear) -> nn.Linear:
    """Returns a linear layer with the weight that a quantized one multiplies by, in the model's dtype."""
    # The constructor would fill a matrix with random numbers, only for the next lines to replace it.
    with torch.device("meta"):
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    linear.weight = nn.Parameter(module.weight.as_subclass(torch.Tensor), requires_grad=False)
    if module.bias is not None:
        linear.bias = module.bias
    # Hooks and attributes of users and of accelerate live on the module object, which is exchanged here.
    take_over(linear, module)
    return linear.train(module.training)


CONFIGS = ("IA3Config", "VeraConfig", "OFTConfig", "AdaLoraConfig")
"""The configs of PEFT whose adapters work on such layers."""


class AdaptableQuantLinear(QuantLinear, nn.Linear):  # type: ignore[misc]
    """A quantized linear on which PEFT puts any adapter that an `nn.Linear` takes."""

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized matrix `[out, in]`, which cannot be changed."""
        return super().weight.as_subclass(_Unchangeable)

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        # PEFT takes an adapter off by giving the layer below it its own weight and bias again.
        if not isinstance(value, _Unchangeable):
            refuse_merge()


class _Unchangeable(torch.Tensor):
    """A tensor that raises UserError where it would be changed in place; results computed from it are plain."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # `w.data = …` calls the setter of a property, `w += …` is `__iadd__`, and `w.copy_(…)` ends in an underscore.
        name, data = func.__name__, torch.Tensor.data
        is_operator = name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
        if is_operator or func == data.__set__ or (name.endswith("_") and not name.endswith("__")):  # type: ignore[attr-defined]
            refuse_merge()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # PEFT merges into `weight.data`.
        return result.as_subclass(cls) if func == data.__get__ else result  # type: ignore[attr-defined]


def make_adaptable(model: nn.Module) -> None:
    """Makes all quantized linears of a model subclasses of `nn.Linear`."""
    for module in model.modules():
        if type(module) is QuantLinear:
            module.__class__ = AdaptableQuantLinear


def refuse_merge() -> None:
    """Raises UserError where PEFT would merge an adapter into a quantized layer by itself."""
    raise UserError(
        "an adapter on a quantized layer is merged by quant.merge_lora(model, data), which quantizes the layers again "
        "by the plan; merge() by itself would not know how"
    )
