"""`promote_group` asks the guard whether a group's quantized output is close enough to the original.

Both are computed on held-out rows: the weights before rounding on the inputs that they would ideally get, and the
quantized layers on the inputs that they do get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from quant.calibration.solvers.registry import get_pipeline, with_supported_solver
from quant.calibration.walk.block import Block
from quant.calibration.walk.group import Group
from quant.calibration.walk.guard import promote, relative_error
from quant.calibration.walk.stand_in import weight_of
from quant.calibration.walk.transform import fix_input_scale

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
