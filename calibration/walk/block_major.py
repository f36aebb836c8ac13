"""`blocks_first` runs a model that a device cannot hold block by block over all rows, not row by row over all blocks.

Row by row, every block is copied to the device for every row, or read from the disk where memory does not hold the
model either. Here each block is copied once: it runs on the hidden states that the one before it gave, of all batches.
The norm and the head behind the last block then run batch by batch in the model itself, whose blocks return the hidden
states that they gave before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.recipes.blocks import block_names, calls_of_chain, find_chains, output_of, without_hidden
from quant.calibration.placement import DeviceCopies, device_of, home_of_states, tensors_of
from quant.calibration.prefetch import Prefetcher
from quant.calibration.texts.rows import trial_rows
from quant.calibration.walk.handed_on import handed_on
from quant.formats.tensor import moved
from quant.recipes.module_hooks import forwarding


@contextmanager
def blocks_first(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
) -> Iterator[None]:
    """Requires that `model` is called with `batches`, each once and in this order, and no other input, while open.

    A model whose blocks do not form a single chain is not changed, and neither is one with few batches.

    Args:
        model: a model without a cache, `placed` on `device` block by block.
        batches: token ids, int64 `[rows, seqlen]`.
        dtype: the dtype, as for `placed`.
    """
    names, device = block_names(model), device_of(model)
    run = [partial(model, batch.to(device)) for batch in batches]
    # Finding the chain and its arguments takes two passes of their own.
    if len(batches) < 3 or find_chains(model, names, partial(model, trial_rows(batches[0]).to(device))) != [names]:
        yield
        return
    blocks = {name: model.get_submodule(name) for name in names}
    # The first block is on the device while all batches run up to it, and again for its own turn.
    prefetcher = Prefetcher(device, whole=False)
    steps = prefetcher.steps([names[0], *names], lambda name: tensors_of(blocks[name].modules()))
    borrowed = DeviceCopies(list(blocks[names[0]].modules()), next(steps)[1], device, dtype)
    calls = calls_of_chain(model, names, run)
    borrowed.restore()
    first = [by_block[names[0]].hidden for by_block in calls]
    home = home_of_states(sum(hidden.nbytes for hidden in first), device)
    states = [hidden.to(home) for hidden in first]
    slots = {name: call.slot for name, call in calls[0].items()}
    own = [moved(handed_on(by_block), device) for by_block in calls]
    calls = [without_hidden(by_block) for by_block in calls]
    del first
    results: dict[str, Any] = {}
    for name, copies in steps:
        borrowed = DeviceCopies(list(blocks[name].modules()), copies, device, dtype)
        for index, by_block in enumerate(calls):
            call = moved(by_block[name].with_arguments(own[index]).with_hidden(states[index]), device)
            results[name] = blocks[name](*call.args, **call.kwargs)
            states[index] = output_of(results[name]).to(home)
        # Only the other results of a block are kept, such as attention weights.
        results[name] = _replaced(results[name], torch.empty(0))
        borrowed.restore()
    last_states = iter(states)

    def pass_on(name: str, *args: Any, **kwargs: Any) -> Any:
        slot = slots[name]
        hidden = args[slot] if isinstance(slot, int) else kwargs[slot]
        return _replaced(results[name], next(last_states).to(device) if name == names[-1] else hidden)

    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(forwarding(block, partial(pass_on, name)))
        yield


def _replaced(result: Any, hidden: torch.Tensor) -> Any:
    """Returns the result of a block with another hidden state in it."""
    if isinstance(result, torch.Tensor):
        return hidden
    if isinstance(result, tuple | list):
        return type(result)((hidden, *result[1:]))
    key = next(iter(result))
    return type(result)({**result, key: hidden})
