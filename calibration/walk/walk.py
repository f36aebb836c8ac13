"""`solve_sequentially` solves every layer on the inputs that it will really get.

Rotations that can be merged into the model are merged first. Then come the blocks in order of execution, each with all
calibration rows at once; `solve_block` takes one through these steps (`walk/steps`):

1. *Observe.* The original block runs on the original hidden states. The inputs of its layers are kept.
2. *Transform.* An input scale is chosen for each fusion group, folded into its producer and into the weights.
   Rotations turn weights, branches are taken off them just before they are rounded.
3. *Round.* Group by group, in the order in which the block runs them: the block runs on the hidden states that
   the quantized blocks before it gave, with the groups solved so far in place, up to this group. Its inputs, rounded
   where activations are quantized, go into a second moment; where they are not, their distance from the original
   inputs goes into the drift.
4. *Guard.* If there is one, the last rows only judge: a group whose output on them is too far off gets another format.
5. *Fused experts*, each on the tokens that reach it; see `experts`.
6. *Reconstruct*, where requested: the whole block is refined against the output of the original.
7. The quantized block gives the hidden states for the next one.

Ranks share the calibration rows: each keeps the hidden states of its own batches. Sums over rows, and solutions that
one rank finds for all, are put together in the order of one rank (`quant.calibration.ranks`).

So memory holds one block, two sets of hidden states, one block's reference inputs and one second moment. A solved
layer remembers its outputs while its block is worked on, because the passes of step 3 repeat each other's
beginnings; a block costs three forward passes in all, one of them the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from quant.recipes.blocks import output_of
from quant.calibration.evaluating import without_cache
from quant.calibration.outputs.stream import find_writers
from quant.calibration.prefetch import Prefetcher
from quant.calibration.session import Session
from quant.calibration.solvers.registry import check_solvers, get_pipeline
from quant.calibration.texts.rows import check_ids
from quant.calibration.walk.block import Block
from quant.calibration.walk.chain import BlockStore, States
from quant.calibration.walk.group import Group, Settings
from quant.calibration.walk.block_memory import reporting_block
from quant.calibration.walk.model_walk import Apply, ModelWalk
from quant.calibration.walk.not_finite import reporting_bad_tensor
from quant.calibration.walk.observe import observe, observe_and_sum
from quant.calibration.walk.reconstruct import reconstruct
from quant.calibration.walk.round import round_stage, solve_siblings, stages_of
from quant.calibration.walk.transform import fix_input_scale, rotate, scale_inputs
from quant.recipes.plan import Plan


def solve_sequentially(
    model: nn.Module,
    plan: Plan,
    rows: torch.Tensor,
    *,
    apply: Apply,
    session: Session | None = None,
    settings: Settings | None = None,
    input_scales: Mapping[str, torch.Tensor] | None = None,
    store: BlockStore | None = None,
) -> None:
    """Solves every planned linear layer and every fused-expert projection of `model`, block by block.

    Args:
        model: called as `model(rows)`; norms and biases that scales are folded into change in place.
        plan: the plan that names the layers, their formats, groups and solvers.
        rows: calibration token ids, int64 `[rows, seqlen]`.
        apply: puts a solved layer in place of the original; called when its block is finished, with the original
            still in the model. Gets None for a layer that the guard keeps in 16 bit. Both the solution and the weight
            that was solved, the third argument, are where blocks are worked on.
        session: the session. Blocks are worked on at its device, one at a time, and its listener is called for every
            layer.
        settings: how the walk is done.
        input_scales: static scales of the inputs of fused experts, by name.
        store: the store that receives every finished block, and may have blocks of an earlier run.

    Raises:
        ValueError: a token id outside the vocabulary; an input that holds NaN or infinity (the weight that does is
            named, or else the layer and the row); a layer that no token reached, with no sibling to borrow statistics
            from; a solver that does not support a format; a device without room for a block (`BlockTooLargeError`).
    """
    check_solvers(plan)
    check_ids(rows, model)
    session = session or Session()
    scales = {name: scale.to(session.device) for name, scale in (input_scales or {}).items()}
    walk = ModelWalk(model, plan, rows, apply, session, settings or Settings(), scales, store or BlockStore())
    with torch.no_grad(), without_cache([getattr(model, "config", None)]), reporting_bad_tensor(model), walk.experts:
        walk.merge_rotations()
        walk.measure_outputs()
        chains, captured = walk.find_chains()
        for names in filter(None, map(walk.up_to_last_planned, chains)):
            chain = captured.pop() if captured else walk.capture(names)
            states, unfinished = walk.begin(chain)
            with reporting_block(lambda: walk.block_name, session):
                for name, copies in Prefetcher(session.device, whole=False).steps(unfinished, walk.tensors_of):
                    block = walk.open_block(chain, name, copies, states)
                    outputs = solve_block(block, needs_output=name != names[-1])
                    states = walk.close_block(name, block, outputs) or states
                    del block, outputs  # before the next block is opened
            del chain, states
        outside = walk.open_outside(chains)
        if outside is not None:
            with reporting_block(lambda: "", replace(session, device=outside.device)):
                solve_block(outside, needs_output=False)
            walk.close_block("", outside, None)


def solve_block(block: Block, *, needs_output: bool) -> States | None:
    """Takes a block through all steps.

    Args:
        block: the block whose layers are solved, and replaced by stand-ins.
        needs_output: whether another block follows.

    Returns:
        The hidden states behind the block, if another one follows.
    """
    settings, calls = block.settings, block.calls
    # Before anything changes the block: `few` follows the original model throughout.
    few_output = _run_few(block) if needs_output or _corrects_stream(block) else calls.few.hidden
    if settings.guard is None and all(group.pipeline.at_once for group in block.groups):
        outputs = _solve_at_once(block)
        return States(outputs, outputs, few_output) if needs_output else None
    # The steps 1 to 7 of the module docstring.
    reference = observe(block)
    scale_inputs(block)
    for group in block.groups:
        rotate(block, group)
        fix_input_scale(block, group)
    for stage in stages_of(block):
        round_stage(block, stage)
        block.remember_finished()
    for experts in block.experts:
        with block.stream.following(block.module):
            experts.solve(
                partial(block.run_until_stopped, calls.quantized), partial(_stream_error, block, experts.path)
            )
    reconstruct(block, reference)
    return States(block.run(calls.quantized), reference, few_output) if needs_output else None


def _corrects_stream(block: Block) -> bool:
    """Returns whether a layer of the block is to make up for the error of the residual stream."""
    # The model itself as the block of layers outside of blocks takes token ids, and has no stream.
    in_stream = block.calls.few.hidden.is_floating_point()
    members = [*(g.members[0] for g in block.groups), *(m for e in block.experts for m in e.members)]
    return in_stream and any(get_pipeline(m.solver).shares(m.activation is not None).residual for m in members)


def _stream_error(block: Block, name: str) -> torch.Tensor | None:
    return block.stream.error(name, block.batch.index)


def _run_few(block: Block) -> torch.Tensor:
    """Returns the output of the original block on a few tokens.

    The same pass finds the layers that write to the stream.
    """
    few = block.calls.few
    run = partial(block.module, *few.args, **few.kwargs)
    if not _corrects_stream(block):
        return output_of(run())
    names = [name for group in block.groups for name in group.names]
    experts = [each.path for each in block.experts]
    block.stream.writers, result = find_writers(block.module, run, names, experts)
    if not block.stream.writers and block.groups:
        block.groups[-1].notes.append(
            "no layer of its block was seen to add to the residual stream, whose error is left as it is"
        )
    block.stream.begin([call.hidden for call in block.calls.original])
    return output_of(result)


def _solve_at_once(block: Block) -> list[torch.Tensor]:
    """Solves all groups from one pass over the original inputs, whose outputs are returned."""
    outputs, sums = observe_and_sum(block)
    siblings: dict[str, list[Group]] = {}
    for group in block.groups:
        siblings.setdefault(group.pattern, []).append(group)
    for stage in siblings.values():
        solve_siblings(block, stage, [sums[group.names[0]] for group in stage])
    for experts in block.experts:
        experts.solve(partial(block.run_until_stopped, block.calls.original))
    return outputs
