"""`observe` runs the original block on the original hidden states, and notes the inputs of each group.

The pass gives the largest magnitude and the sum of magnitudes of every input channel, from which static scales and
AWQ's importance follow; the inputs themselves, against which GPTQ measures drift; the order in which groups are called;
and the output of the original block.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from quant.calibration.ranks import gathered
from quant.calibration.statistics import rows_of
from quant.calibration.walk.block import Block
from quant.calibration.walk.collect import InputNotFiniteError
from quant.calibration.walk.group import Group
from quant.calibration.walk.shared_moments import Moments
from quant.calibration.walk.transform import fix_input_scale, searches_input_scale


def observe(block: Block, meanwhile: Callable[[], None]) -> list[torch.Tensor]:
    """Runs the reference pass, whose outputs are returned, and sorts groups into the order of their calls.

    `meanwhile` is called while a GPU runs it.
    """
    order: list[tuple[int, int]] = []  # numbers of batch and group, call by call
    finite: list[torch.Tensor] = []

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


def observe_and_sum(block: Block) -> tuple[list[torch.Tensor], dict[str, Moments]]:
    """Runs the reference pass of solvers that need no other; it sums up second moments of the original inputs.

    Returns the hidden states behind the block, and the sums by the name of each group's first layer.
    """
    sums = {}
    finite: list[torch.Tensor] = []

    def watch(group: Group, moments: Moments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        keeps = block.settings.observer != "absmax" or searches_input_scale(block, group)

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
    for group in block.groups:
        fix_input_scale(block, group)
        group.inputs.clear()
    return outputs, sums


def _note(block: Block, group: Group, x: torch.Tensor, finite: list[torch.Tensor], *, keep: bool) -> torch.Tensor:
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


def _check_finite(block: Block, finite: list[torch.Tensor]) -> None:
    """Raises InputNotFiniteError where an input of a group held NaN or infinity: a second pass finds which."""
    if not finite or bool(torch.stack(finite).all()):
        return

    def watch(group: Group) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if not bool(torch.isfinite(x).all()):
                row = block.batch.number * block.settings.batch
                if x.dim() > 2:
                    row += int((~torch.isfinite(x).flatten(1).all(1)).nonzero()[0])
                raise InputNotFiniteError(group.members[0].name, f"on calibration row {row}")

        return hook

    with block.hooked({group.names[0]: watch(group) for group in block.groups}):
        block.run(block.calls.original)
