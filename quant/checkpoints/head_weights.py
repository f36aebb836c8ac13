"""`head_weights` finds matrices of multi-token-prediction heads that a model's files hold and its class ignores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quant.recipes.blocks import stored_dtype
from quant.export.checkpoint.carry_over import source_tensors, unused_tensors
from quant.export.checkpoint.files.names import EXPERT_PARTS, cut_experts, stored_names
from quant.formats.finite import is_wide_float

_STACKS = {*EXPERT_PARTS, "down_proj"}


def head_weights(model: nn.Module, source: Path, is_asked: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Returns the source's matrices that the model's class has no use for, by the names that their layers would have.

    Experts that are stored as one stack `[experts, out, in]` come matrix by matrix, as servers read quantized ones.

    Args:
        model: a model of transformers, not quantized.
        source: directory of the model.
        is_asked: whether a layer of this name is requested.
    """
    original, names = source_tensors(source, stored_dtype(model)), stored_names(model)
    # transformers is asked about all experts of a block or about none, because it joins their matrices.
    stems = {_stem(name) for name in original if is_asked(name.removesuffix(".weight"))}
    candidates = [name for name in original if _stem(name) in stems]
    weights: dict[str, torch.Tensor] = {}
    for name in unused_tensors(model, original, (), names, candidates):
        tensor = original[name]
        if not is_wide_float(tensor):
            continue
        if tensor.dim() == 2 and name.endswith(".weight"):
            weights[name.removesuffix(".weight")] = tensor
        elif tensor.dim() == 3 and name.rpartition(".")[2] in _STACKS and ".experts." in name:
            weights |= {each.removesuffix(".weight"): part for each, part in cut_experts(name, tensor).items()}
    # Names that transformers would change on the way to the disk could not be read back.
    return {
        name: weight
        for name, weight in weights.items()
        if is_asked(name) and names.stored(f"{name}.weight") == f"{name}.weight"
    }


def _stem(name: str) -> str:
    """Returns the name of a tensor; of the matrices of all experts of a block, their common part."""
    return name.partition(".experts.")[0] if ".experts." in name else name
