"""Layers of multi-token-prediction heads get modules in a model whose class ignores them, so that they are quantized.

Qwen3-Next stores its head as `mtp.*`, DeepSeek-V3 and GLM-4.5 as one block more than the config counts. Servers run
these tensors, and transformers does not even load them. A matrix of a head becomes a linear layer at the place that its
name says; nothing ever calls it, and everything that lists a model's layers (plans, solvers, checkpoints) finds it:

    mtp.layers.0.self_attn.q_proj.weight      model.mtp.layers.0.self_attn.q_proj       next to the model's parts
    model.layers.61.self_attn.q_proj.weight   model.model.layers.61.self_attn.q_proj    in a list that hides it

A list of blocks that gets such a child becomes a `BlocksBeforeHeads`, so that a forward pass over the list, its length
and its slices hold the model's own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError


class HeadPart(nn.Module):
    """A part of a prediction head that holds others, and is never called."""


class BlocksBeforeHeads(nn.ModuleList):
    """A list of blocks that also holds parts of prediction heads, which are reached only by name."""

    def _blocks(self) -> list[nn.Module]:
        return [module for module in self._modules.values() if module is not None and not isinstance(module, HeadPart)]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._blocks())

    def __len__(self) -> int:
        return len(self._blocks())

    def __getitem__(self, index: int | slice) -> Any:
        blocks = self._blocks()[index]
        return nn.ModuleList(blocks) if isinstance(blocks, list) else blocks

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in super().named_children() if not isinstance(module, HeadPart))


def attach_head_layer(model: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Puts a linear layer without a bias into a model, at a place where it has no module yet.

    Args:
        model: the model whose class has no use for the layer.
        name: path of the layer.
        weight: `[out, in]`, perhaps on the meta device; the layer holds this very tensor.

    Raises:
        UserError: the path leads through something that holds no modules.
    """
    *path, last = name.split(".")
    parent = model
    for part in path:
        child = getattr(parent, part, None)
        if child is None:
            child = HeadPart()
            _add(parent, part, child)
        if not isinstance(child, nn.Module):
            raise UserError(f"{name}: {part} is not a module of {type(model).__name__}; leave the layer out")
        parent = child
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    _add(parent, last, linear.train(model.training))


def _add(parent: nn.Module, name: str, child: nn.Module) -> None:
    if type(parent) is nn.ModuleList:
        parent.__class__ = BlocksBeforeHeads
    parent.add_module(name, child)


def head_layers(model: nn.Module) -> set[str]:
    """Returns the names of the layers of prediction heads that `attach_head_layer` gave a model."""
    parts = [f"{name}." for name, module in model.named_modules() if isinstance(module, HeadPart)]
    return {
        name
        for name, module in model.named_modules()
        if name.startswith(tuple(parts)) and not isinstance(module, HeadPart) and not list(module.children())
    }
