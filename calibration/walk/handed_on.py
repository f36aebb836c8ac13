"""Blocks may hand on more than the hidden state, in a mapping among their arguments: one fills it, others read it.

The last blocks of Gemma 3n and Gemma 4 attend to keys and values of an earlier one (`shared_kv_states`):

    block 0 ──hidden──▶ block 1 ──hidden──▶ block 2 ──hidden──▶ …
                          └──── keys, values ────▶┘

A walk that calls block after block, each on all batches, must therefore give each batch a mapping of its own. Original
and quantized hidden states need two: a quantized block attends to the keys of the quantized block before it.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from quant.recipes.blocks import Call

Slot = int | str
HandedOn = Mapping[Slot, "UserDict[Any, Any]"]
"""The mappings among the arguments of a block, by their index or keyword."""


def handed_on(calls: Mapping[str, Call]) -> HandedOn:
    """Returns the mappings that the blocks of one pass hand on, as they are before the first block.

    Args:
        calls: the calls of the blocks, in order of execution.
    """
    first, *later = calls.values()
    mappings: dict[Slot, UserDict[Any, Any]] = {i: value for i, value in enumerate(first.args) if _is_mapping(value)}
    for name, value in first.kwargs.items():
        # A plain dict holds arguments as a rule; one that was empty at first and is not any more was filled by a block.
        if _is_mapping(value):
            mappings[name] = value
        elif type(value) is dict and not value and any(call.kwargs.get(name) for call in later):
            mappings[name] = UserDict()
    return copied(mappings)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, UserDict)


def copied(mappings: HandedOn) -> HandedOn:
    """Returns the same tensors in new mappings."""
    return {slot: copy.copy(mapping) for slot, mapping in mappings.items()}


def is_filled(call: Call) -> bool:
    """Returns whether a mapping among the arguments of a block holds something."""
    return any(_is_mapping(value) and value for value in (*call.args, *call.kwargs.values()))
