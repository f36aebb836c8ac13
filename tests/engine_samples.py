"""Tests of engines share the shapes of tiny decoders, and models whose every tensor says something."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = "batch=1:1:2,sequence=1:8:16"


def drawn(model: nn.Module) -> nn.Module:
    """The model with other numbers in every norm and bias: an initialization has ones and zeros there."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                for parameter in module.parameters():
                    parameter.uniform_(0.5, 2)
            elif isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.normal_()
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return model
