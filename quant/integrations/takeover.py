"""A model that another toolkit has quantized gets a plan and our modules, with the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, listed
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.export.checkpoint.pretrained import attach
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.install import install_weight, mark_quantized, use_expert_modules
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.groups import group_name
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_check import check_plan_fits
from quant.recipes.plan_make import grouped_layers


@dataclass(frozen=True)
class LayerFormats:
    """The formats that another toolkit has quantized a layer in.

    Attributes:
        weight, activation: formats; the input stays in 16 bit where there is none.
        reason: the reason for the plan.
    """

    weight: Format
    activation: Format | None
    reason: str


Solved = tuple[BlockScaledTensor, torch.Tensor | None, RunTimeParts]
"""A quantized weight, its static input scale, and the layer's parts at run time."""


def stand_in(
    model: nn.Module,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    stack: ExitStack,
    plain: nn.Parameter | None = None,
) -> nn.Parameter:
    """Puts a plain parameter, which takes no memory, in the place of a toolkit's; `stack` puts that back.

    Args:
        model: the model that holds it.
        name: the name of the parameter.
        shape, dtype: the shape and dtype of the matrix that it stands for.
        stack: undoes the exchange.
        plain: the plain parameter; by default a new one.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    held: dict[str, Any] = module._parameters
    # A zero of stride 0 has the shape and dtype that planning reads, in the memory of one element.
    if plain is None:
        zero = torch.zeros((), dtype=dtype, device=held[last].device)
        plain = nn.Parameter(zero.expand(tuple(shape)), requires_grad=False)
    # A new dict: ModelOpt's own dict around a compressed weight packs every parameter that is put into it.
    stack.callback(setattr, module, "_parameters", held)
    module._parameters = {**held, last: plain}
    return plain


def plan_takeover(
    model: nn.Module,
    formats: Mapping[str, LayerFormats],
    *,
    toolkit: str,
    solver: str,
    run: Callable[[nn.Module], Any] | None,
) -> Plan:
    """Returns the plan of a model whose original modules are in their places, and the layers it quantizes.

    Args:
        model: its weights are not read, except for fusion groups where it does not run on the meta device.
        formats: the formats of the quantized layers, by name.
        toolkit: name and version, for reasons and provenance.
        solver: the solver with which layers would be solved again.
        run: as in `quant.make_plan`.

    Raises:
        UserError: a layer is none that can be quantized here, or not in its format.
    """
    layers, unknown = grouped_layers(model, run)
    if strange := formats.keys() - {layer.name for layer in layers}:
        raise UserError(f"{listed(sorted(strange), 3)}: quantized by {toolkit}, and no layer that is quantized here")
    planned = []
    for layer in layers:
        source = formats.get(layer.name)
        planned.append(
            LayerPlan(
                layer.name,
                layer.kind,
                layer.shape,
                None if source is None else source.weight,
                None if source is None else source.activation,
                solver=solver,
                reason=f"in 16 bit in the model of {toolkit}" if source is None else source.reason,
                group=layer.group,
                tied_to=layer.tied_to,
                transposed=layer.transposed,
            )
        )
    provenance = {"taken_from": toolkit, **({"fusion_groups": f"unknown: {unknown}"} if unknown else {})}
    plan = _without_kept(Plan(tuple(planned), provenance=provenance))
    check_plan_fits(plan, layers)
    return plan


def _without_kept(plan: Plan) -> Plan:
    """Returns `plan` with groups of only those members that are quantized, and in one format.

    Others are fused with nothing.
    """
    regrouped = []
    for members in plan.groups().values():
        quantized = [member for member in members if member.weight is not None]
        name = None
        if len(quantized) > 1 and len({member.formats for member in quantized}) == 1:
            # A group's name lists its members, so a group that has lost some of them gets another name.
            is_whole = len(quantized) == len(members) or members[0].kind == LayerKind.EXPERTS
            name = members[0].group if is_whole else group_name([member.name for member in quantized])
        regrouped += [replace(member, group=name if member.weight is not None else None) for member in members]
    return plan.replace_layers(regrouped)


def ungrouped(plan: Plan, differ: Callable[[list[LayerPlan]], bool]) -> Plan:
    """Returns `plan` without the groups of linear layers for whose members `differ` is true.

    Their scales are not shared.
    """
    groups = [members for members in plan.groups().values() if members[0].kind == LayerKind.LINEAR and differ(members)]
    return plan.replace_layers(replace(member, group=None) for members in groups for member in members)


def install_takeover(model: nn.Module, plan: Plan, solved: Callable[[LayerPlan], Solved]) -> Plan:
    """Replaces the originals by quantized modules, one layer at a time; returns the plan with their run-time parts."""
    with torch.no_grad():
        for layer in plan.quantized:
            weight, input_scale, parts = solved(layer)
            install_weight(model, layer, weight, input_scale, parts)
    config: Any = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and any(layer.kind == LayerKind.HEAD for layer in plan.quantized):
        config.tie_word_embeddings = False  # the toolkit gave the head a weight of its own
    # After all layers: transformers' code for experts looks at the modules that are there now.
    use_expert_modules(model, plan)
    mark_quantized(model)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan
