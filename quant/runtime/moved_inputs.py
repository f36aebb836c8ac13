"""`inputs_moved` measures how far a model's output depends on the last bit of its layers' inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quant.recipes.blocks import removing
from quant.kernels.linear.quantized_module import QuantizedModule


@contextmanager
def inputs_moved(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Moves the inputs of linear layers by at most one rounding of the dtype, at random, while the block runs.

    The sums of other kernels end in such differences: each result is as right as the other. Where inputs are rounded to
    few bits, the last bit of a sum can turn one code into another.
    """
    epsilon, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)

    def move(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *further = args
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
        return ((x * (1 + epsilon * (2 * uniform - 1))).to(x.dtype), *further)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | QuantizedModule)]
    with removing([layer.register_forward_pre_hook(move) for layer in layers]):
        yield
