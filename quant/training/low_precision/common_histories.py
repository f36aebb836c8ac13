"""Ranks that train copies or shards of one model agree on its histories before each step of an optimizer.

Each rank records the largest magnitudes of its own data, but the deployed model has one static scale for all. So the
largest of all ranks becomes the record of the step, as in Transformer Engine (`reduce_amax`), and ranks evaluate, pack
and save the same model, alone or together. A step is where all ranks of DDP and FSDP2 meet anyway; evaluation and
saving need no communication, and one rank may do them alone.

Ranks are those of the DDP that holds a layer, and of the mesh over which FSDP2 or tensor parallelism has placed its
weight. Whoever averages gradients in another way calls `report.reduce_amax(group)` on all ranks.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quant.training.low_precision.state import AmaxHistory, LowPrecision, deployed_input, is_distributed
from quant.training.rounded_weight import RoundedWeight


def find_replicas(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the DDP wrappers of this process that hold a parameter of `model`."""
    if not is_distributed():
        return []
    own = {id(parameter) for parameter in model.parameters()}
    # Nothing leads from a module to its wrapper; `isinstance` would ask objects that only pretend to have a class.
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in wrappers if any(id(parameter) in own for parameter in each.parameters())]


def agree_on_histories(layers: Iterable[Any], replicas: Iterable[DistributedDataParallel]) -> None:
    """Gives all ranks the largest magnitudes of this step; each layer's own ranks take part."""
    for groups, own in _by_ranks([(layer.held, layer.low_precision) for layer in layers], replicas):
        _reduce([history for state in own for history in _needed(state)], groups)


@torch.no_grad()
def agree_on_input_scales(model: nn.Module, replicas: Iterable[DistributedDataParallel]) -> None:
    """Gives all ranks the largest of the static input scales that follow the inputs of QAT (`track_inputs`)."""
    layers = [module for module in model.modules() if isinstance(module, RoundedWeight)]
    followers = [(m.weight, m) for m in layers if m.inputs.follows and m.input_scale is not None]
    for groups, own in _by_ranks(followers, replicas):
        scales = torch.stack([layer.input_scale.to(own[0].input_scale.device) for layer in own])
        for group in groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)
        for layer, scale in zip(own, scales.unbind(), strict=True):
            layer.input_scale.copy_(scale)


def _by_ranks(
    owners: Iterable[tuple[torch.Tensor, Any]], replicas: Iterable[DistributedDataParallel]
) -> list[tuple[list[Any], list[Any]]]:
    """Returns the process groups over which the owners of parameters agree, with these owners."""
    if not is_distributed():
        return []
    groups_of_parameter: dict[int, Any] = {}
    for wrapper in replicas:
        # Ranks that have run out of inputs make no step, so the others cannot meet them here.
        if not wrapper._join_config.enable:
            groups_of_parameter |= {id(parameter): wrapper.process_group for parameter in wrapper.parameters()}
    by_ranks: dict[Any, list[Any]] = {}
    for parameter, owner in owners:
        ranks: Any = getattr(parameter, "device_mesh", None) or groups_of_parameter.get(id(parameter))
        if ranks is not None:
            by_ranks.setdefault(ranks, []).append(owner)
    return [
        ([ranks] if isinstance(ranks, dist.ProcessGroup) else ranks.get_all_groups(), own)
        for ranks, own in by_ranks.items()
    ]


def reduce_amax(layers: Iterable[Any], group: Any = None) -> None:
    """Takes the largest magnitudes of all ranks of `group`, None for all; every one of them has to call it."""
    _reduce([history for layer in layers for history in _needed(layer.low_precision)], [group])


def _needed(state: LowPrecision) -> list[AmaxHistory]:
    """Returns the histories that a layer's recipe or its deployed form reads; Transformer Engine keeps its own."""
    activation = deployed_input(state.recipe) if state.recipe.weight is not None and state.recipe.input else None
    needed = ["x"] if activation is not None and activation.is_static else []
    needed = ["x", "w", "dy"] if state.recipe.history else needed
    return [state.amax[name] for name in needed if type(state.amax[name]) is AmaxHistory]


@torch.no_grad()
def _reduce(histories: list[AmaxHistory], groups: list[Any]) -> None:
    # Without a forward pass since the last time there is none on the other ranks either.
    if all(history.values is history.agreed for history in histories):
        return
    device = next(history.values.device for history in histories if history.values is not history.agreed)
    latest = torch.stack([history.latest.to(device) for history in histories])
    for group in groups:
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    # One record a step, whatever the number of micro-batches; none where no rank has one, as of an idle expert.
    before = torch.stack([history.agreed.to(device) for history in histories])
    after = torch.where((latest >= 0)[:, None], torch.cat([latest[:, None], before[:, :-1]], 1), before)
    for history, values in zip(histories, after.unbind(), strict=True):
        history.start(values)
