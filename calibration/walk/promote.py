"""`promote_group` asks the guard whether a group's quantized output is close enough to the original.

Both are computed on held-out rows: the weights before rounding on the inputs that they would ideally get, and the
quantized layers on the inputs that they do get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quant.calibration.solvers.registry import get_pipeline, with_supported_solver
from quant.calibration.walk.block import Block
from quant.calibration.walk.group import Group
from quant.calibration.walk.stand_in import weight_of
from quant.calibration.walk.transform import fix_input_scale
from quant.formats.format import Format, parse_format
from quant.recipes.plan import LayerPlan
from quant.recipes.recipe import presets

# `promote` gives a layer the next format of a guard's list, and `relative_error` is the error that the guard limits.
#
# The walk measures; the functions here only decide, and write down why.


def relative_error(reference: torch.Tensor, output: torch.Tensor) -> float:
    """Returns ‖output - reference‖ / ‖reference‖, Frobenius norms in float64.

    Infinite where `output` has NaN or infinity, or differs from a reference that is all zeros.

    Raises:
        ValueError: the shapes differ, or `reference` is not finite.
    """
    if reference.shape != output.shape:
        raise ValueError(f"reference {list(reference.shape)} and output {list(output.shape)} differ in shape")
    reference = reference.double()
    norm = float(torch.linalg.vector_norm(reference))
    if not torch.isfinite(reference).all():
        raise ValueError("the reference output holds NaN or infinity; no error can be measured against it")
    error = float(torch.linalg.vector_norm(output.double() - reference))
    # Before the division: an output of zeros that is met exactly is not an error.
    if error == 0:
        return 0.0
    return error / norm if norm > 0 and math.isfinite(error) else math.inf


def promote(layer: LayerPlan, error: float, limit: float, ladder: Sequence[Format | None]) -> LayerPlan:
    """Returns `layer` with the next format of its list where `error` exceeds `limit`, else `layer` itself.

    An activation in the format that goes with the weight's moves with it; one in another format, or none, stays.

    Args:
        layer: the plan's entry; one that is kept in 16 bit comes back unchanged.
        error: measured, as by `relative_error`; NaN counts as exceeding.
        limit: largest error that is accepted.
        ladder: formats in the order in which they are tried; None stands for 16 bit.

    Returns:
        The entry, its reason extended by the error, the limit and the new format. At the end of the list the format
        stays and the reason says so.

    Raises:
        ValueError: the layer's format is not in its list.
    """
    if layer.weight is None or error <= limit:
        return layer
    if layer.weight not in ladder:
        listed = ", ".join(_name(format) for format in ladder)
        raise ValueError(f"{layer.name}: its format {layer.weight} is not in its list of formats to try ({listed})")
    finding = f"relative error {error:.3g} in {layer.weight} exceeds the limit {limit:.3g}"
    position = ladder.index(layer.weight) + 1
    if position == len(ladder):
        return _explain(layer, f"{finding}, but it is the last format in its list")
    # Score and cost belong to the previous format, so they are dropped with it.
    following = ladder[position]
    activation = layer.activation
    if following is None:
        activation = None
    # W4A4 becomes W8A8, but an input that was chosen apart from the weight stays.
    elif activation in (layer.weight, activation_of(layer.weight)):
        activation = activation_of(following)
    promoted = replace(layer, weight=following, activation=activation, score=None, cost=None)
    return _explain(promoted, f"{finding}, so {_name(following)} instead")


def activation_of(weight: Format) -> Format | None:
    """Returns the format of inputs that goes with a weight format: as its preset says, or the same one."""
    preset = presets().get(weight.name)
    if preset is None:
        return weight
    return parse_format(preset.activation)


def _name(format: Format | None) -> str:
    return "16 bit" if format is None else format.name


def _explain(layer: LayerPlan, sentence: str) -> LayerPlan:
    return replace(layer, reason=f"{layer.reason}; {sentence}" if layer.reason else sentence)


HeldOut = tuple[torch.Tensor, torch.Tensor]
"""Of a group on a held-out row: its input, and the input of the original model."""


def promote_group(block: Block, group: Group, targets: Mapping[str, torch.Tensor], held_out: Sequence[HeldOut]) -> bool:
    """Gives a group that the guard refuses the next format of its list.

    Args:
        block: the block that holds the solved group.
        group: changed where the guard refuses it.
        targets: weights before rounding, by name within the block.
        held_out: the inputs that judge.

    Returns:
        Whether the group is to be solved again.
    """
    guard = block.settings.guard
    assert guard is not None
    error = _output_error(block, group, targets, held_out)
    promoted = [promote(member, error, guard.limit, guard.formats_for(member)) for member in group.members]
    changed = promoted[0].weight != group.members[0].weight
    group.members = [with_supported_solver(member) for member in promoted]
    for member, name in zip(group.members, group.names, strict=True):
        block.solutions[name] = (member, block.solutions[name][1])
    if not changed:
        return False
    # Back to the state before this group was solved.
    for name in group.names:
        original = block.stand_ins.pop(name).original
        if name in block.original_biases:
            original.bias.data = block.original_biases.pop(name)
        block.module.set_submodule(name, original)
        block.targets[name] = targets[name]
    if group.members[0].weight is None:
        _keep_in_16_bit(block, group)
        return False
    group.pipeline = get_pipeline(group.members[0].solver)
    fix_input_scale(block, group)
    return True


def _output_error(
    block: Block, group: Group, targets: Mapping[str, torch.Tensor], held_out: Sequence[HeldOut]
) -> float:
    """Returns the largest relative error of the members' outputs.

    The members of a group share a format, so that the worst of them decides.
    """
    references = [torch.cat([nn.functional.linear(r, targets[n].to(r)) for _, r in held_out]) for n in group.names]
    outputs = [torch.cat([block.stand_ins[n].product(x) for x, _ in held_out]) for n in group.names]
    try:
        return max(relative_error(r, output) for r, output in zip(references, outputs, strict=True))
    except ValueError as error:
        raise ValueError(f"{group.members[0].name}: {error}") from None


def _keep_in_16_bit(block: Block, group: Group) -> None:
    for member, name in zip(group.members, group.names, strict=True):
        block.solutions[name] = (member, None)
        block.learned.pop(name, None)
        if group.parts.pre_scale is not None:
            # In 16 bit nothing scales the input at run time, so the weight takes the scale back.
            weight = weight_of(block.module, name)
            weight.data = weight * group.parts.pre_scale.to(weight)
        del block.targets[name]
