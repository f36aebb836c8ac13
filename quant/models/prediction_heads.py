"""Layers of multi-token-prediction heads get modules in a model whose class ignores them, so that they are quantized.

Qwen3-Next stores its head as `mtp.*`, DeepSeek-V3 and GLM-4.5 as one block more than the config counts. Servers run
these tensors, and transformers does not even load them. A matrix of a head becomes a linear layer at the place that its
name says; nothing ever calls it, and everything that lists a model's layers (plans, solvers, checkpoints) finds it:

    mtp.layers.0.self_attn.q_proj.weight      model.mtp.layers.0.self_attn.q_proj       next to the model's parts
    model.layers.61.self_attn.q_proj.weight   model.model.layers.61.self_attn.q_proj    in a list that hides it

A list of blocks that gets such a child becomes a `BlocksBeforeHeads`, so that a forward pass over the list, its length
and its slices hold the model's own blocks.

Each layer of a head gets the formats of its counterpart in the last block: `mtp.layers.0.self_attn.q_proj` those of
`model.layers.47.self_attn.q_proj`, and the matrix `mtp.layers.0.mlp.experts.3.up_proj` those of the stack
`model.layers.47.mlp.experts.gate_up_proj`. The projection that joins hidden states and embeddings (`mtp.fc`,
`eh_proj`), norms and output heads have no counterpart and stay in 16 bit, as servers expect them. A head's weights are
rounded by a solver that looks only at weights, and a static scale of inputs is measured on the counterpart's inputs.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quant.base.errors import UserError
from quant.export.checkpoint.files.names import EXPERT_PARTS, StoredNames
from quant.recipes.groups import group_name
from quant.recipes.layers import Layer, LayerKind, obstacle
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.solver_names import parse_solver

_IN_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")  # model.layers.3 . mlp.up_proj
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)")
_DATA_FREE = "mse"  # the solver of effort 1


def counterpart(name: str, plan: Plan, names: StoredNames, shape: Sequence[int] | None = None) -> LayerPlan | None:
    """Returns the layer, of the `shape`, that plays the part of a head's layer, named as on disk, in the last block."""
    match = _IN_BLOCK.fullmatch(names.of_model(f"{name}.weight").removesuffix(".weight"))
    if match is None:
        return None
    roles = [match[2]]
    if (expert := _EXPERT.fullmatch(match[2])) is not None:
        # experts.3.up_proj is in the stack experts.gate_up_proj, experts.3.down_proj in experts.down_proj.
        stacks = [last for last, parts in EXPERT_PARTS.items() if expert[3] in parts]
        roles += [f"{expert[1]}.{last}" for last in (*stacks, expert[3])]
    for layer in reversed(plan.layers):
        block = _IN_BLOCK.fullmatch(layer.name)
        if block is None or block[1] == match[1] or block[2] not in roles:
            continue
        matrix = layer.shape
        if layer.kind == LayerKind.EXPERTS:  # checkpoints store gate and up of an expert apart
            parts = len(EXPERT_PARTS.get(layer.name.rpartition(".")[2], ("",)))
            matrix = (layer.shape[1] // parts, layer.shape[2])
        if shape is None or tuple(shape) == matrix:
            return layer
    return None


def plan_heads(plan: Plan, weights: Mapping[str, Tensor], names: StoredNames) -> list[LayerPlan]:
    """Plans for the matrices of heads, by the names of their layers, with a quantized counterpart in `plan`."""
    layers: list[LayerPlan] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        twin = counterpart(name, plan, names, shape)
        if twin is None or twin.weight is None:
            continue
        if obstacle(Layer(name, LayerKind.LINEAR, shape), twin.weight, twin.activation) is not None:
            continue
        solver = _DATA_FREE if parse_solver(twin.solver).needs_data else twin.solver
        reason = f"prediction head, as {twin.name}: transformers does not run it; solved with {solver}, without data"
        if twin.has_static_scale:
            reason += ", and has the input scale of that layer"
        layers.append(LayerPlan(name, LayerKind.LINEAR, shape, twin.weight, twin.activation, solver, reason))
        # Runtimes merge in a head what they merge in a block: q, k and v, or gate and up of one expert.
        stem = name.rpartition(".")[0]
        merged = twin.group if twin.kind != LayerKind.EXPERTS else twin.name
        if merged is not None and not (twin.kind == LayerKind.EXPERTS and twin.name.endswith("down_proj")):
            groups.setdefault((stem, merged), []).append(name)
    group_of = {name: group_name(members) for members in groups.values() if len(members) > 1 for name in members}
    return [replace(layer, group=group_of.get(layer.name)) for layer in layers]


def split_heads(plan: Plan, heads: Collection[str]) -> tuple[Plan, Plan]:
    """Returns the plan of the model's own layers, and the plan of its heads."""
    own = tuple(layer for layer in plan.layers if layer.name not in heads)
    return replace(plan, layers=own), replace(plan, layers=tuple(layer for layer in plan.layers if layer.name in heads))


def scale_donors(plan: Plan, heads: Plan, names: StoredNames) -> tuple[Plan, dict[str, LayerPlan]]:
    """Returns the plan of the heads, and by the names of those with a static input scale the layers that give it.

    A layer without one stays in 16 bit in that plan; a counterpart is planned in the format of its head.
    """
    layers, donors = [], {}
    for layer in heads.layers:
        if layer.has_static_scale:
            twin = counterpart(layer.name, plan, names, layer.shape)
            if twin is None:
                reason = f"prediction head: {layer.activation} inputs need a scale, and no block has such a layer"
                layer = replace(layer, weight=None, activation=None, reason=reason)
            else:
                donors[layer.name] = replace(twin, weight=layer.weight, activation=layer.activation)
        layers.append(layer)
    return replace(heads, layers=tuple(layers)), donors


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


def attach_head_layer(model: nn.Module, name: str, weight: Tensor) -> None:
    """Puts a linear layer that holds the very tensor `weight`, `[out, in]`, at the path `name`, which is free yet."""
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
