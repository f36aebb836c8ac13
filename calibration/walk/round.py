"""`observe` notes the inputs of each group, and `round_siblings` rounds groups on those that solved layers give them.

`observe` runs the original block on the original hidden states. The pass gives the largest magnitude and the sum of
magnitudes of every input channel, from which static scales and AWQ's importance follow; the inputs themselves, against
which GPTQ measures drift; the order in which groups are called; and the output of the original block.

Siblings are the same layers of the experts of a mixture, whose statistics one pass collects; every other group is
alone. The pass runs the block with the groups solved so far in place and sums up, over the tokens x that reach a group,

    second moment  H = mean of x xᵀ           drift  D = mean of (r - x) xᵀ,  r the original input of the same token

of inputs x rounded as the quantized layer will round them. The solver then minimises tr((Q - W) H (Q - W)ᵀ) over codes
Q, with W moved by the drift first. A layer that writes to the residual stream makes up for the stream's error as well:
W moves by the mean of s xᵀ too, with s a share of that error (see `stream`).

Where there is a guard, the last rows only judge: the weights before rounding on the inputs that they would ideally get
are compared with the quantized layers on the inputs that they do get, and a group that is too far off gets another
format.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibration.fast_matmul import PairedWeight, has_pairs
from quant.calibration.ranks import dealt, gathered, rank_and_world, sharing
from quant.calibration.solvers.lowrank import Branch, refit_branches, take_branches
from quant.calibration.solvers.registry import get_pipeline, with_supported_solver
from quant.calibration.solvers.solve_group import all_solved, solve_group
from quant.calibration.statistics import LayerStats, rows_of
from quant.calibration.walk import transform
from quant.calibration.walk.block import Block, Group, Solved, StandIn, weight_of
from quant.calibration.walk.collect import InputNotFiniteError
from quant.calibration.walk.shared_moments import Moments, pooled, slices_that_fit, stats_of
from quant.formats.format import Format, parse_format
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.blocks import Stop
from quant.recipes.plan import LayerPlan
from quant.recipes.recipe import presets

HeldOut = tuple[Tensor, Tensor]
"""Of a group on a held-out row: its input, and the input of the original model."""
_DATA_FREE = "mse"  # the solver of effort 1


@dataclass(frozen=True)
class _Rounded:
    """A group's codes and scales by name, its branches, and the weights that were rounded, `[out, in]`."""

    weights: Mapping[str, BlockScaledTensor]
    branches: Mapping[str, Branch]
    targets: Mapping[str, Tensor]


# ---- the original inputs


def observe(block: Block, meanwhile: Callable[[], None]) -> list[Tensor]:
    """Runs the reference pass, whose outputs are returned, and sorts groups into the order of their calls.

    `meanwhile` is called while a GPU runs it.
    """
    order: list[tuple[int, int]] = []  # numbers of batch and group, call by call
    finite: list[Tensor] = []

    def watch(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            order.append((block.batch.number, index))
            _note(block, block.groups[index], args[0], finite, keep=True)

        return hook

    def count(name: str) -> Callable[..., None]:
        return lambda module, args: block.module_calls.update([name])

    parents = {name[:end] for g in block.groups for name in g.names for end, at in enumerate(name) if at == "."}
    counting = block.hooked({name: count(name) for name in sorted(parents)})
    watching = block.hooked({g.names[0]: watch(i) for i, g in enumerate(block.groups)})
    with counting, watching, block.stream.recording(block.module):
        outputs = block.run(block.calls.original)
    meanwhile()
    _check_finite(block, finite)
    orders, counts, tokens = zip(*gathered((order, block.module_calls, [g.tokens for g in block.groups])), strict=True)
    block.module_calls = sum(counts, Counter())
    called = [index for _, index in sorted((call for part in orders for call in part), key=itemgetter(0))]
    for index, group in enumerate(block.groups):
        # 2 stands for any number except one: such a group can neither stop the pass nor be compared call by call.
        group.calls = called.count(index) // block.batches if called.count(index) % block.batches == 0 else 2
    _pool(block, tokens)
    # Reversed, so that the first call of a group overwrites its later ones.
    first = {index: position for position, index in reversed(list(enumerate(called)))}
    by_call = sorted(range(len(block.groups)), key=lambda index: first.get(index, len(called)))
    block.groups = [block.groups[index] for index in by_call]
    return outputs


def observe_and_sum(block: Block) -> tuple[list[Tensor], dict[str, Moments]]:
    """Runs the reference pass of solvers that need no other; it sums up second moments of the original inputs.

    Returns the hidden states behind the block, and the sums by the name of each group's first layer.
    """
    sums = {}
    finite: list[Tensor] = []

    def watch(group: Group, moments: Moments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        keeps = block.settings.observer != "absmax" or transform.searches_input_scale(block, group)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = _note(block, group, args[0], finite, keep=keeps)
            if len(x):
                moments.add(block.batch.index, x, rows=rows_of(args[0]))

        return hook

    hooks = {}
    for group in block.groups:
        sums[group.names[0]] = Moments(group.weight_format.block[1] or None)
        hooks[group.names[0]] = watch(group, sums[group.names[0]])
    with block.hooked(hooks):
        outputs = block.run(block.calls.original)
    _check_finite(block, finite)
    _pool(block, gathered([group.tokens for group in block.groups]))
    transform.fix_input_scales(block)
    for group in block.groups:
        group.inputs.clear()
    return outputs, sums


def _note(block: Block, group: Group, x: Tensor, finite: list[Tensor], *, keep: bool) -> Tensor:
    """Adds an original input to the statistics of a group, and returns it as `[tokens, in]`."""
    flat = x.reshape(-1, x.shape[-1])
    if len(flat):
        magnitude = flat.abs()
        amax, total = magnitude.amax(0).float(), magnitude.sum(0, dtype=torch.float32)
        # One number a call, which is looked at when the pass is over. It may overflow where all of `x` is finite.
        finite.append(torch.isfinite(amax.sum()))
        group.magnitudes.append((block.batch.number, [amax, total]))
        group.tokens += len(flat)
        if keep:
            group.inputs.append(flat)
            group.batch_numbers.append(block.batch.number)
    return flat


def _pool(block: Block, tokens: Sequence[Sequence[int]]) -> None:
    """Adds up the magnitudes of all ranks, batch by batch; `tokens` of each rank, by group, reached it."""
    most = 1 << 32  # index · 2³² + number sorts by group first
    own = [(index * most + n, seen) for index, group in enumerate(block.groups) for n, seen in group.magnitudes]
    for number, (amax, total) in block.exchange.in_order(own):
        group = block.groups[number // most]
        group.amax = amax if group.amax is None else torch.maximum(group.amax, amax)
        group.total = total if group.total is None else group.total + total
    for group, of_ranks in zip(block.groups, zip(*tokens, strict=True), strict=True):
        group.magnitudes.clear()
        group.tokens = sum(of_ranks)


def _check_finite(block: Block, finite: list[Tensor]) -> None:
    """Raises InputNotFiniteError where an input of a group held NaN or infinity: a second pass finds which."""
    if not finite or bool(torch.stack(finite).all()):
        return

    def watch(group: Group) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x, (first, stop) = args[0], block.settings.row_bounds[block.batch.number]
            if not bool(torch.isfinite(x).all()):
                where = f"row {first}" if stop == first + 1 else f"rows {first} to {stop - 1}"
                # Behind a router, or cut into windows, an input does not show its rows.
                if len(x) == stop - first and (x.dim() > 2 or block.calls.few.hidden.dim() == 2):
                    where = f"row {first + int((~torch.isfinite(x).flatten(1).all(1)).nonzero()[0])}"
                raise InputNotFiniteError(group.members[0].name, f"on calibration {where}")

        return hook

    with block.hooked({group.names[0]: watch(group) for group in block.groups}):
        block.run(block.calls.original)


# ---- the inputs that solved layers give


def sibling_groups(block: Block) -> list[list[Group]]:
    """Returns groups whose statistics one pass collects: sibling experts together, all others one by one."""
    routed = {group.pattern for group in block.groups if group.tokens < block.tokens}
    by_pattern: dict[str, list[Group]] = {}
    for index, group in enumerate(block.groups):
        by_pattern.setdefault(group.pattern if group.pattern in routed else str(index), []).append(group)
    return list(by_pattern.values())


def round_siblings(block: Block, siblings: list[Group]) -> None:
    """Solves sibling groups, or one group; the guard may have some of them solved again in another format."""
    moments, held_out = _collect(block, siblings)
    guarded = block.settings.guard is not None
    targets = {name: block.targets[name] for group in siblings for name in group.names} if guarded else {}
    owners: list[int] | None = None  # all ranks solve the only group together
    if len(siblings) > 1 and any(group.pipeline.reconstruction for group in siblings):
        owners = [0] * len(siblings)  # where blocks are refined
    elif len(siblings) > 1:
        owners = dealt([sum(member.numel for member in group.members) for group in siblings])
    solve_siblings(block, siblings, moments, owners)
    for group, pairs in zip(siblings, held_out, strict=True):
        while pairs and promote_group(block, group, targets, pairs):
            moments, (pairs,) = _collect(block, [group])
            solve_siblings(block, [group], moments)
    for group in siblings:
        group.inputs.clear()


def _collect(block: Block, siblings: list[Group]) -> tuple[list[Moments], list[list[HeldOut]]]:
    """Returns the sums over the inputs of each group; for the guard also its inputs on held-out rows."""
    # Tokens that a router has sent to many experts take less memory than the experts' moments.
    columns = siblings[0].members[0].shape[-1]
    later = len(siblings) > 1 and sum(group.tokens for group in siblings) < len(siblings) * columns
    # Inputs that are weighted token by token have more digits.
    units = [None if group.token_weights else group.input_scale for group in siblings]
    moments = [Moments(unit=unit, later=later) for unit in units]
    held_out: list[list[tuple[int, list[Tensor]]]] = [[] for _ in siblings]
    count = block.batches
    # The last eighth of the batches only judge, where there is a guard; at least one.
    judging = range(count - max(count // 8, 1), count) if block.settings.guard else range(0)

    def watch(group: Group, sums: Moments, held: list[tuple[int, list[Tensor]]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            if len(x) == 0:
                return
            drift, residual = _drift(block, group, x), _residual(block, group)
            number = block.batch.number
            if number in judging:
                held.append((number, [x, group.parts.input(x) if drift is None else group.parts.input(x) + drift]))
            if number not in judging or block.batches == 1:
                _add(block, group, sums, x, rows_of(args[0]), drift, residual)
            if len(siblings) == 1 and group.calls == 1:
                raise Stop

        return hook

    hooks = {g.names[0]: watch(g, m, h) for g, m, h in zip(siblings, moments, held_out, strict=True)}
    if judging or any(group.pipeline.needs_moment for group in siblings):
        with block.hooked(hooks), block.stream.following(block.module):
            block.run_until_stopped(block.calls.quantized)
    if not judging:
        return moments, [[] for _ in siblings]
    return moments, [[(x, r) for _, (x, r) in block.exchange.in_order(held)] for held in held_out]


def _drift(block: Block, group: Group, x: Tensor) -> Tensor | None:
    """Returns the part of the input error r - x that the solver corrects for; None if it corrects nothing.

    Where inputs are rounded, x is the input before that: against the noise of rounding, least squares would shrink the
    weights, layer after layer, and the model would lose more than it gains.
    """
    correction = group.pipeline.rounding.shares_where(group.activation is not None).drift
    if not correction or not _is_aligned(block, group):
        return None
    return (group.scaled(group.inputs[block.batch.index]) - group.parts.input(x)).mul_(correction)


def _residual(block: Block, group: Group) -> Tensor | None:
    """Returns the part of the residual stream's error that the group makes up for; None if it does not write there."""
    share = group.pipeline.rounding.shares_where(group.activation is not None).residual
    # The solver sees the members of a group as one weight, but each would write to the stream by itself.
    if not share or len(group.names) > 1 or not _is_aligned(block, group):
        return None
    error = block.stream.error(group.names[0], block.batch.index)
    return None if error is None else error.mul_(share)


def _is_aligned(block: Block, group: Group) -> bool:
    """Returns whether each token reaches the group once, so that its original input is known."""
    return group.calls == 1 and group.tokens == block.tokens


def _add(
    block: Block, group: Group, sums: Moments, x: Tensor, rows: int, drift: Tensor | None, residual: Tensor | None
) -> None:
    """Adds a batch of inputs to the group's statistics, each token by its weight."""
    if not group.pipeline.needs_moment:
        return
    rounded = group.round_input(x)
    errors = rounded - group.parts.input(x) if group.pipeline.spec.rank and group.activation is not None else None
    if drift is not None and group.parts.residual:
        drift = nn.functional.pad(drift, (0, group.parts.residual))  # errors of rounding are no drift
    own = group.token_weights[block.batch.index] if group.token_weights and _is_aligned(block, group) else None
    if own is not None and len(own) == len(x):
        weights = own[:, None].to(x)
        rounded = rounded * weights
        errors, drift, residual = (None if part is None else part * weights for part in (errors, drift, residual))
    noise = None if errors is None else errors.float().square().sum(0)
    sums.add(block.batch.index, rounded, drift, rows, noise, residual)


# ---- solving


def solve_siblings(
    block: Block, siblings: list[Group], moments: Sequence[Moments], owners: Sequence[int] | None = None
) -> None:
    """Solves sibling groups; one that no token reached gets the pooled statistics of the others.

    Each is solved by its owner among the ranks, or without owners by all ranks, which share its rows.
    """
    parts = slices_that_fit(len(siblings), siblings[0].members[0].shape[-1], moments[0].sum.width)
    ranks = [None if owners is None else owners[part] for part in parts]
    average = None
    alone = len(siblings) == 1 and _is_aligned(block, siblings[0])  # every token reaches it
    tokens = [each.tokens for each in moments]
    counts = tokens if alone else [sum(of_ranks) for of_ranks in zip(*gathered(tokens), strict=True)]
    lacks = any(g.pipeline.needs_moment and not count for g, count in zip(siblings, counts, strict=True))
    exchange, total = block.exchange, sum(counts)
    if lacks and not alone:
        for part, solvers in zip(parts, ranks, strict=True):
            # No name holds the statistics of a part: they are as large as its moments, and the next part needs room.
            average = pooled(stats_of(moments[part], exchange, solvers, again=True), exchange, solvers, total, average)
    for part, solvers in zip(parts, ranks, strict=True):
        _solve_part(block, siblings[part], stats_of(moments[part], exchange, solvers), average, solvers)


def _solve_part(
    block: Block,
    groups: list[Group],
    own_stats: Sequence[LayerStats | None],
    average: LayerStats | None,
    owners: Sequence[int] | None,
) -> None:
    """Solves some groups from their statistics, or from the pooled ones of all siblings, and puts them in place."""
    stats = [_statistics_for(block, group, own, average) for group, own in zip(groups, own_stats, strict=True)]
    # How many tokens each solution rests on; 0 for pooled statistics.
    tokens = [
        (0 if own is None else own.tokens) if group.pipeline.needs_moment else group.tokens
        for group, own in zip(groups, own_stats, strict=True)
    ]
    rank, world = rank_and_world()
    together = owners is None or world == 1
    own: dict[int, _Rounded] = {}
    for index, (group, used) in enumerate(zip(groups, stats, strict=True)):
        if owners is not None and world > 1 and owners[index] != rank:
            continue
        with sharing() if together else nullcontext():
            targets, branches, seen = _take_branches(block, group, used)
            shared, solver = dict.fromkeys(targets, seen), group.pipeline.rounding
            weights = solve_group(targets, shared, group.weight_format, solver, block.stored, stack=True)
        own[index] = _with_refitted_branches(_Rounded(weights, branches, targets), seen)
        if together:
            _put_in_place(block, group, used, own.pop(index), tokens[index])
    if not together:
        everywhere = _rounded_by_all(block, groups, own)
        for group, used, rounded, count in zip(groups, stats, everywhere, tokens, strict=True):
            _put_in_place(block, group, used, rounded, count)


def _statistics_for(
    block: Block, group: Group, stats: LayerStats | None, average: LayerStats | None
) -> LayerStats | None:
    """Returns the statistics that a group is solved on: its own, or its siblings'; a note for the plan says which."""
    if block.settings.guard is None:
        group.inputs.clear()
        group.batch_numbers.clear()
    if not group.pipeline.needs_moment:
        return None
    if stats is None and average is None:
        # Such as a group of a vision tower under text: it gets a solver that needs no data.
        group.members = [replace(member, solver=_DATA_FREE) for member in group.members]
        group.pipeline = get_pipeline(_DATA_FREE)
        group.notes.append(f"no calibration token reached it: solved with {_DATA_FREE}, which looks at none")
    elif stats is None:
        group.notes.append("no calibration token reached it: solved on the pooled statistics of its siblings")
    elif group.pipeline.rounding.feeds_back and stats.tokens < group.members[0].shape[-1]:
        seen = f"{stats.tokens} tokens for {group.members[0].shape[-1]} inputs"
        group.notes.append(f"{seen}: a singular second moment, damped; more text would do better")
    used = stats or average
    return used if used is None or group.outputs is None else replace(used, outputs=group.outputs)


def _take_branches(
    block: Block, group: Group, stats: LayerStats | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Branch], LayerStats | None]:
    """Returns the weights to be rounded, the low-rank branches taken off them, and the statistics for them."""
    targets = _targets_of(block, group)
    if not group.pipeline.spec.rank:
        return targets, {}, stats
    assert stats is not None
    # The residual and the branch together correct the inputs' drift.
    return take_branches(targets, stats, group.pipeline.spec.rank, block.stored)


def _with_refitted_branches(rounded: _Rounded, stats: LayerStats | None) -> _Rounded:
    """Returns the branches as they fit best next to the rounded weights, and the weights less these branches.

    Without the loss of the whole model they stay: they would take up errors that hardly matter.
    """
    if not rounded.branches or stats is None or stats.outputs is None:
        return rounded
    values = {name: weight.dequantize(torch.float32) for name, weight in rounded.weights.items()}
    targets, branches = refit_branches(rounded.targets, values, rounded.branches, stats)
    return _Rounded(rounded.weights, branches, targets)


def _rounded_by_all(block: Block, groups: Sequence[Group], own: Mapping[int, _Rounded]) -> Iterator[_Rounded]:
    """Yields the solutions of all ranks' groups.

    For groups that other ranks solved, the weights before rounding still contain the branch.
    """
    outlines = [({m.name: m.shape for m in group.members}, group.weight_format) for group in groups]
    solved = all_solved({index: rounded.weights for index, rounded in own.items()}, outlines, block.exchange)
    sent = [
        (index, [part for member in groups[index].members for part in rounded.branches[member.name]])
        for index, rounded in own.items()
        if rounded.branches
    ]
    branches = dict(block.exchange.in_order(sent))
    for index, group in enumerate(groups):
        pairs = zip(branches.get(index, ())[::2], branches.get(index, ())[1::2], strict=True)
        yield own.get(index) or _Rounded(
            solved[index],
            {member.name: pair for member, pair in zip(group.members, pairs, strict=False)},
            _targets_of(block, group),
        )


def _targets_of(block: Block, group: Group) -> dict[str, Tensor]:
    return {
        member.name: transform.widened_weight(block.targets[name], group.parts.channels)
        for member, name in zip(group.members, group.names, strict=True)
    }


# ---- in the block


def _put_in_place(block: Block, group: Group, stats: LayerStats | None, rounded: _Rounded, tokens: int) -> None:
    for member, name in zip(group.members, group.names, strict=True):
        original = block.module.get_submodule(name)
        weight = rounded.weights[member.name]
        dense = weight.dequantize(original.weight.dtype)  # type: ignore[arg-type]
        parts = replace(group.parts, lowrank=rounded.branches.get(member.name))
        stand_in = StandIn(original, dense, group, block.batch, parts)
        if weight.format.is_nvfp4 and has_pairs(dense):
            # Elements times scales of E4M3 have at most six digits, and BF16 has eight.
            exact = replace(weight, global_scale=None).dequantize(torch.bfloat16)
            stand_in.paired = PairedWeight(exact, weight.global_scale)
        if stats is not None:
            _correct_bias(block, group, name, stand_in, stats)
        block.stand_ins[name] = stand_in
        block.module.set_submodule(name, stand_in)
        del block.targets[name]
        if group.pipeline.reconstruction:
            block.learned[name] = rounded.targets[member.name]
        solved = Solved(weight, parts, group.input_scale, tokens, tuple(dict.fromkeys(group.notes)))
        block.solutions[name] = (member, solved)


def _correct_bias(block: Block, group: Group, name: str, stand_in: StandIn, stats: LayerStats) -> None:
    """Adds the mean output error to the bias, where there is one: it costs no time when the model runs.

    b' = b + W (mean of x + mean drift) - Q (mean of x) + mean of s
    """
    bias = stand_in.bias
    if bias is None or stats.mean is None or group.pipeline.spec.rank:
        return
    block.original_biases[name] = bias.detach().clone()
    original_mean = stats.mean if stats.mean_drift is None else stats.mean + stats.mean_drift
    target = transform.widened_weight(block.targets[name], group.parts.channels)
    correction = target @ original_mean - stand_in.dense.float() @ stats.mean
    if stats.mean_residual is not None:
        correction = correction + stats.mean_residual
    bias.data = bias + correction.to(bias)
    if "bias corrected" not in group.notes:
        group.notes.append("bias corrected")


# ---- the guard


def promote_group(block: Block, group: Group, targets: Mapping[str, Tensor], held_out: Sequence[HeldOut]) -> bool:
    """Gives a group that the guard refuses the next format of its list; returns whether it is to be solved again."""
    guard = block.settings.guard
    assert guard is not None
    references = [torch.cat([nn.functional.linear(r, targets[n].to(r)) for _, r in held_out]) for n in group.names]
    outputs = [torch.cat([block.stand_ins[n].product(x) for x, _ in held_out]) for n in group.names]
    # The members of a group share a format, so that the worst of them decides.
    name = group.members[0].name
    error = max(relative_error(r, output, name) for r, output in zip(references, outputs, strict=True))
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
        for member, name in zip(group.members, group.names, strict=True):
            block.solutions[name] = (member, None)
            block.learned.pop(name, None)
            if group.parts.pre_scale is not None:
                # In 16 bit nothing scales the input at run time, so the weight takes the scale back.
                weight = weight_of(block.module, name)
                weight.data = weight * group.parts.pre_scale.to(weight)
            del block.targets[name]
        return False
    group.pipeline = get_pipeline(group.members[0].solver)
    transform.fix_input_scale(block, group)
    transform.choose_channels(block, [group])
    return True


def relative_error(reference: Tensor, output: Tensor, name: str = "layer") -> float:
    """Returns ‖output - reference‖ / ‖reference‖, Frobenius norms in float64.

    Infinite where `output` has NaN or infinity, or differs from a reference that is all zeros.
    """
    reference = reference.double()
    norm = float(torch.linalg.vector_norm(reference))
    if not torch.isfinite(reference).all():
        raise ValueError(f"{name}: the reference output holds NaN or infinity; no error can be measured against it")
    error = float(torch.linalg.vector_norm(output.double() - reference))
    # Before the division: an output of zeros that is met exactly is not an error.
    if error == 0:
        return 0.0
    return error / norm if norm > 0 and math.isfinite(error) else math.inf


def promote(layer: LayerPlan, error: float, limit: float, ladder: Sequence[Format | None]) -> LayerPlan:
    """Returns `layer` with the next format of its list where `error` exceeds `limit`, else `layer` itself.

    An activation in the format that goes with the weight's moves with it; one in another format, or none, stays. The
    reason tells the error, the limit and the new format; at the end of the list the format stays. None is 16 bit.
    """
    if layer.weight is None or error <= limit:
        return layer
    finding = f"relative error {error:.3g} in {layer.weight} exceeds the limit {limit:.3g}"
    before = f"{layer.reason}; " if layer.reason else ""
    position = ladder.index(layer.weight) + 1
    if position == len(ladder):
        return replace(layer, reason=f"{before}{finding}, but it is the last format in its list")
    following, activation = ladder[position], layer.activation
    # W4A4 becomes W8A8, but an input that was chosen apart from the weight stays.
    if following is None or activation in (layer.weight, activation_of(layer.weight)):
        activation = None if following is None else activation_of(following)
    reason = f"{before}{finding}, so {'16 bit' if following is None else following.name} instead"
    # Score and cost belong to the previous format, so they are dropped with it.
    return replace(layer, weight=following, activation=activation, score=None, cost=None, reason=reason)


def activation_of(weight: Format) -> Format | None:
    """Returns the format of inputs that goes with a weight format: as its preset says, or the same one."""
    preset = presets().get(weight.name)
    return weight if preset is None else parse_format(preset.activation)
