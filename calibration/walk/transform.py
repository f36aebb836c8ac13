"""`scale_inputs` and `rotate` change weights and inputs of a block together, so that the weights round better.

Scaling: with W diag(s) for the weights W and x / s for their inputs x, the output W x stays (AWQ, SmoothQuant). The
module before takes the division up where one can (see `solvers.fold`). A scale that no module can absorb stays with the
group as `pre_scale`, for run time, or is left out (`awq:merge`).

Rotation: with W H for the weights and Hᵀ x for the inputs, H a block-diagonal Hadamard matrix, the output stays too,
and outliers of x are spread over a block of channels.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quant.calibration.observers import get_observer
from quant.calibration.solvers.fold import Fold, apply_fold, find_fold, modules_in_order
from quant.calibration.solvers.interfaces import SAMPLED_TOKENS, GroupInputs
from quant.calibration.solvers.lowrank import LossMetric
from quant.calibration.solvers.rotation import rotate_weight, rotation_block
from quant.calibration.statistics import round_activation, static_input_scale
from quant.calibration.walk.block import Block, Group, weight_of
from quant.calibration.walk.collect import NeverCalledError
from quant.formats.format import E4M3
from quant.formats.tensor import moved
from quant.recipes.blocks import in_float64

# Static scales of FP8 inputs that are tried, and outputs that judge them.
_SCALES_AN_OCTAVE, _SAMPLED_OUTPUTS = 16, 512
_ADDED = 0.3 / 4.5  # weights that residual channels add to a block, as a share of its own: 0.3 bits in NVFP4


def scale_inputs(block: Block) -> None:
    """Scales the inputs of groups whose solvers need it.

    The last group comes first: a scale may go into a linear layer solved before.
    """
    if not any(group.pipeline.transforms for group in block.groups):
        return
    folds = _find_folds(block)
    for group, fold in zip(reversed(block.groups), reversed(folds), strict=True):
        if group.tokens and group.pipeline.transforms:
            _scale_group(block, group, fold)


def _scale_group(block: Block, group: Group, fold: Fold | None) -> None:
    assert group.total is not None and group.amax is not None
    sample, _ = _sample(block, group)
    spec = group.pipeline.spec
    for key, transform in zip(spec.transforms, group.pipeline.transforms, strict=True):
        if fold is None and key in spec.merged:
            group.notes.append(f"no module around can absorb an input scale: without {key}")
            continue
        weight = torch.cat([block.targets[name] for name in group.names])
        divisor = torch.ones_like(group.total) if group.divisor is None else group.divisor
        blocks = () if group.outputs is None else group.outputs.blocks_of(len(weight))
        inputs = GroupInputs(sample, group.total / group.tokens, group.amax, blocks).divided(divisor)
        owner = None if fold is None else fold.owner
        scale = transform(weight, inputs, group.weight_format, group.activation, owner)
        if fold is not None:
            scale = _fold(block, fold, scale)
        else:
            before = group.parts.pre_scale
            group.parts = replace(group.parts, pre_scale=1 / scale if before is None else before / scale)
        group.divisor = divisor * scale
        for name in group.names:
            target = block.targets[name] * scale
            block.targets[name] = target
            parameter = weight_of(block.module, name)
            parameter.data = target.to(parameter.dtype)


def fix_input_scales(block: Block) -> None:
    """Sets all static scales; an expert that no token reached takes the largest of its siblings.

    ValueError for a layer that was never called and has no sibling that was.
    """
    scales: dict[str, list[Tensor]] = {}
    for group in block.groups:
        fix_input_scale(block, group)
        if group.input_scale is not None:
            scales.setdefault(group.pattern, []).append(group.input_scale)
    for group in block.groups:
        if group.amax is None and group.activation is not None and group.activation.is_static:
            if group.pattern not in scales:
                raise NeverCalledError([group.members[0].name])
            group.input_scale = torch.stack(scales[group.pattern]).amax()


def fix_input_scale(block: Block, group: Group) -> None:
    """Sets the static scale of a group's inputs, where their format has one and a token reached it.

    A solver that looks at outputs takes the scale within an octave above the observer's scale at which rounded inputs
    err least behind the weights. FP8's steps double from one power of two to the next, so that a larger scale is as
    fine, but other values fall on its grid: values of loud channels that hardly change from token to token, whose error
    would be the same at every token.
    """
    observer, activation = block.settings.observer, group.activation
    group.input_scale = None
    if activation is None or group.amax is None or not activation.is_static:
        return
    # A rotation mixes channels, so the maxima of the unrotated ones say nothing about it.
    if observer == "absmax" and not group.parts.hadamard:
        # Channel maxima scale with their channel, so no second pass over the inputs is needed.
        amax = (group.amax if group.divisor is None else group.amax / group.divisor).amax()
    else:
        range_observer = get_observer(observer)(activation, name=group.members[0].name)
        for x in group.inputs_of_all_ranks():
            range_observer.update(group.scaled(x))
        amax = range_observer.amax()
    first = group.input_scale = static_input_scale(amax, activation, block.stored, group.members[0].name)
    if first is None or not searches_input_scale(block, group):
        return
    x, weight = _sample(block, group)
    # Every n-th output is enough: neighbouring ones belong to one head.
    weight = weight[:: -(-len(weight) // _SAMPLED_OUTPUTS)]
    scales = [(first * 2 ** (n / _SCALES_AN_OCTAVE)).to(block.stored).float() for n in range(_SCALES_AN_OCTAVE)]
    losses = [float(((round_activation(x, activation, s) - x) @ weight.t()).square().mean()) for s in scales]
    group.input_scale = scales[losses.index(min(losses))]


def _sample(block: Block, group: Group) -> tuple[Tensor, Tensor]:
    """Returns some tokens of a group's scaled inputs `[tokens, in]`, and its weight `[out, in]`, both float32."""
    # All ranks take the same tokens, from every batch.
    every = max(group.tokens // SAMPLED_TOKENS, 1)
    x = torch.cat([group.scaled(x).float() for x in group.inputs_of_all_ranks(every)])
    return x, torch.cat([block.targets[name] for name in group.names]).float()


def choose_channels(block: Block, groups: Sequence[Group]) -> None:
    """Chooses the residual channels of the inputs of groups whose solvers have some.

    A channel weighs as much as its rounding costs behind the weights: mean (q(x) - x)² times wᵀ A w of its columns,
    with A = 1 where gradients were not measured. Without a number, 16 channels at a time are added where they take off
    most for the weights that they add, until these are `_ADDED` of all. What rounded residuals leave is counted.
    Without A the errors of layers cannot be compared; each then costs its size to the power of ¾.
    """
    additions: list[tuple[float, int, int]] = []  # what 16 more channels take off for each weight, group, weights
    order, counts = dict[int, Tensor](), Counter[int]()
    budget, comparable = 0.0, all(group.outputs is not None for group in groups)
    for index, group in enumerate(groups):
        group.parts = replace(group.parts, channels=None)
        count, activation = group.pipeline.spec.residual, group.activation
        if not count or activation is None:
            continue
        if group.tokens < block.tokens:  # siblings with channels of their own could not share statistics
            group.notes.append("without residual channels: a router sends some of the tokens here")
            continue
        x, weight = _sample(block, group)
        error = x - round_activation(x, activation, group.input_scale)
        blocks = () if group.outputs is None else group.outputs.blocks_of(len(weight))
        sizes = LossMetric(blocks).enter(weight).square().sum(0)
        costs = error.square().mean(0) * sizes
        order[index] = costs.argsort(descending=True)[: len(costs) - len(costs) % 16]
        if count > 0:
            counts[index] = min(count, len(order[index]))
            continue
        # The residuals of all channels in the order in which they would be added, rounded as they would be.
        ordered = error[:, order[index]]
        left = ordered - round_activation(ordered, activation, group.input_scale)
        gains = ((ordered.square() - left.square()).mean(0) * sizes[order[index]]).unflatten(0, (-1, 16)).sum(1)
        if not comparable:
            gains *= weight.numel() ** 0.75 / costs.sum().clamp(min=1e-30)
        # Channels come in their order: those that gain more after those that gain less wait for them.
        added = 16 * len(weight)
        additions += [(gain / added, index, added) for gain in gains.cummin(0)[0].tolist() if gain > 0]
        budget += _ADDED * weight.numel()
    for _, index, added in sorted(additions, key=lambda addition: -addition[0]):
        if added <= budget:
            budget -= added
            counts[index] += 16
    for index, count in counts.items():
        # Channels in their order, so that gathering them reads memory in one direction.
        groups[index].parts = replace(groups[index].parts, channels=order[index][:count].sort()[0].int())
        groups[index].notes.append(f"{count} of {groups[index].members[0].shape[-1]} inputs with residual")


def widened_weight(weight: Tensor, channels: Tensor | None) -> Tensor:
    """Returns `[out, in + k]`: a weight, or a vector of inputs, with the columns of residual channels behind it."""
    return weight if channels is None else torch.cat((weight, weight.index_select(-1, channels)), dim=-1)


def searches_input_scale(block: Block, group: Group) -> bool:
    """Returns whether the static scale of a group's inputs is searched, which takes the inputs themselves."""
    activation = group.activation
    if activation is None or not activation.is_static or activation.element is not E4M3 or activation.global_scale:
        return False
    return block.settings.observer == "absmax" and group.pipeline.needs_moment


def _find_folds(block: Block) -> list[Fold | None]:
    """Finds the modules that each group's input scale can go into, tried in float64 on a few tokens."""
    if any(parameter.is_meta for parameter in block.module.parameters()):
        # Experts that are still in their files: a copy without them computes unwritten memory, which proves nothing.
        return [None] * len(block.groups)
    module = in_float64(block.module)
    call = moved(block.calls.few, dtype=torch.float64)
    try:
        order = modules_in_order(module, call)
    except Exception:  # the model's own code: XGLM fills a mask with a number of float64 that torch.full does not take
        for group in (group for group in block.groups if group.pipeline.transforms):
            group.notes.append("its block does not run in float64, where modules that could take its scales are tried")
        return [None] * len(block.groups)
    folds = []
    for group in block.groups:
        first = min((order.index(name) for name in group.names if name in order), default=0)
        before = reversed(order[:first])
        # A linear layer that is not to be quantized has no target, and its weight must stay.
        producers = [name for name in before if name in block.targets or weight_of(module, name).dim() == 1]
        folds.append(find_fold(module, call, group.names, producers) if group.pipeline.transforms else None)
    return folds


def _fold(block: Block, fold: Fold, scale: Tensor) -> Tensor:
    """Puts `scale` into the producer; gives the scale `[in]` that the group's inputs were really divided by."""
    module = block.module.get_submodule(fold.producer)
    rows = len(module.weight)  # type: ignore[arg-type]
    divisor = torch.ones(rows, device=scale.device, dtype=torch.float32).index_copy_(0, fold.owner, scale)
    if fold.producer in block.targets:
        block.targets[fold.producer] = block.targets[fold.producer] / divisor[:, None]
        _scale_gradients(block, fold.producer, divisor)
        apply_fold(module, divisor, fold.offset)
        return scale
    # A norm keeps the dtype of the checkpoint, to which its weight is rounded: the inputs are divided by the rounded
    # quotient.
    return apply_fold(module, divisor, fold.offset, block.stored)[fold.owner]


def _scale_gradients(block: Block, name: str, divisor: Tensor) -> None:
    """Scales the gradients at a layer's outputs, which are divided from then on: A becomes D A D."""
    group = next(group for group in block.groups if name in group.names)
    outputs = group.outputs
    if outputs is None:
        return
    sizes = [len(block.targets[member]) for member in group.names]
    before = sum(sizes[: group.names.index(name)])
    factor = torch.ones(sum(sizes), device=divisor.device, dtype=torch.float32)
    factor[before : before + len(divisor)] = divisor
    if outputs.block_moments is None:
        group.outputs = replace(outputs, second_moment=outputs.matrix * factor * factor[:, None])
        return
    count, width, _ = outputs.block_moments.shape
    factors = nn.functional.pad(factor, (0, count * width - len(factor))).view(count, width)
    scaled = outputs.block_moments * factors[:, None] * factors[:, :, None]
    group.outputs = replace(outputs, block_moments=scaled)


def rotate(block: Block, group: Group) -> None:
    """Rotates the weights to be rounded. The block's own weights stay, because they still get unrotated inputs."""
    if group.pipeline.spec.rotation:
        size = rotation_block(group.members[0].shape[-1], group.pipeline.spec.rotation)
        group.parts = replace(group.parts, hadamard=size)
        for name in group.names:
            block.targets[name] = rotate_weight(block.targets[name], size)
