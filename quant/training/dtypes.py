"""A student trains in wider dtypes than its checkpoint stores; `StoredDtypes` notes them before and restores them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quant.training.qat import Packed


class StoredDtypes:
    """The dtypes of a model's tensors.

    Args:
        model: before `prepare_qat`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compute = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        self._by_name = {name: tensor.dtype for name, tensor in _tensors(model)}

    def restore(self, model: nn.Module) -> None:
        """Casts the model's tensors back; its quantized layers compute in the dtype that the first parameter had."""
        # `.to` casts every tensor of a layer; those that were wider, such as routers' biases, are put back from here.
        wide = {name: tensor.detach() for name, tensor in _tensors(model)}
        for module in model.modules():
            if isinstance(module, Packed):
                module.to(self._compute)
        for name, tensor in _tensors(model):
            if tensor.dtype != self._by_name.get(name, tensor.dtype):
                tensor.data = wide[name].to(self._by_name[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
