"""The model that adapters of PEFT are compared on: the same weights, dequantized, in layers of PyTorch."""

from __future__ import annotations

import copy

from torch import nn

from quant.adapters.lora_layers import dense_linear
from quant.kernels.linear.quant_linear import QuantLinear


def dequantized(model: nn.Module) -> nn.Module:
    """A copy of `model` with an `nn.Linear` in the place of each quantized linear layer."""
    dense = copy.deepcopy(model)
    for name, module in list(dense.named_modules()):
        if isinstance(module, QuantLinear):
            parent, _, last = name.rpartition(".")
            setattr(dense.get_submodule(parent), last, dense_linear(module))
    return dense
