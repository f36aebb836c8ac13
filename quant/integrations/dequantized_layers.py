"""Quantized layers are dequantized here, to be changed in 16 bit and then quantized again."""

from __future__ import annotations

import torch
from torch import nn

from quant.formats.stacking import Stacking
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.module_hooks import take_over


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
