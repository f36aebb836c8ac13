"""`merge_rows` makes one linear of several with the same input, such as q, k and v: one launch instead of three.

The merged weight holds the rows of all members one after the other. The members still work: their buffers become views
of its rows, so nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear.quant_linear import QuantLinear


def merge_rows(members: Sequence[nn.Module], dtype: torch.dtype) -> nn.Module | None:
    """Returns one linear with the outputs of all members side by side; they share its memory from then on.

    Args:
        members: `nn.Linear` or `QuantLinear` with the same number of inputs, on one device.
        dtype: the dtype of the inputs, which decides the layout of a quantized weight.

    Returns:
        None where the members differ in more than their rows: in formats, in scales of a whole matrix, in their work on
        the input.
    """
    if all(type(member) is nn.Linear for member in members):
        return _merged_plain([member for member in members if isinstance(member, nn.Linear)])
    if all(type(member) is QuantLinear for member in members):
        return _merged_quantized([member for member in members if isinstance(member, QuantLinear)], dtype)
    return None


def _merged_plain(members: Sequence[nn.Linear]) -> nn.Linear | None:
    if len({(member.weight.dtype, member.in_features) for member in members}) > 1:
        return None
    rows = [member.out_features for member in members]
    merged = nn.Linear(members[0].in_features, sum(rows), bias=False, device="meta")
    weight = torch.cat([member.weight.detach() for member in members])
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.register_parameter("bias", _bias_of(members))
    for member, part in zip(members, weight.split(rows), strict=True):
        member.weight.data = part
    return merged


def _merged_quantized(members: Sequence[QuantLinear], dtype: torch.dtype) -> QuantLinear | None:
    first = members[0]
    weights = [member.stored_weight for member in members]
    # Words of prepacked weights can be joined as they are if they share a global scale; MXFP4 may differ in it there.
    if not all(map(is_prepacked, weights)) or not _share_scale(weights):
        weights = [member.quantized_weight for member in members]
    alike = all(
        member.weight_format == first.weight_format
        and member.activation_format == first.activation_format
        and member.in_features == first.in_features
        and _are_equal(member.input_scale, first.input_scale)
        and weight.scale.dim() > 0
        and len(weight.scale) == len(weight.codes)
        and not member.parts
        for member, weight in zip(members, weights, strict=True)
    )
    if not (alike and _share_scale(weights)):
        return None
    rows = [member.out_features for member in members]
    codes, scale = (torch.cat(parts) for parts in zip(*((w.codes, w.scale) for w in weights), strict=True))
    whole = BlockScaledTensor(
        codes, scale, first.weight_format, (sum(rows), first.in_features), weights[0].global_scale
    )
    merged = QuantLinear(whole, _bias_of(members), first.activation_format, first.input_scale, dtype=first.dtype)
    merged.arrange(dtype)
    stored = merged.stored_weight
    start = 0
    for member, count in zip(members, rows, strict=True):
        part = slice(start, start + count)
        # Views: the rows of a member lie in the merged tensors, so nothing is stored twice.
        member.take(replace(stored, codes=stored.codes[part], scale=stored.scale[part], shape=(count, stored.shape[1])))
        start += count
    return merged


def _bias_of(members: Sequence[nn.Linear | QuantLinear]) -> nn.Parameter | None:
    """Returns the biases one after the other; zero where a member has none."""
    present = [member.bias for member in members if member.bias is not None]
    if not present:
        return None
    parts = [
        present[0].new_zeros(member.out_features) if member.bias is None else member.bias.detach() for member in members
    ]
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def _share_scale(weights: Sequence[BlockScaledTensor]) -> bool:
    """Returns whether the global scale is the same; MXFP4 has one only in the layout of kernels."""
    return all(_are_equal(weight.global_scale, weights[0].global_scale) for weight in weights)


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
