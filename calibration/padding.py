"""`unpadded` takes padding out of calibration inputs, where statistics would count it.

A batch of texts of different lengths is padded, and a mask says where. Attention hides the padding, but the layers
around it compute on it like on any token, and it would count in second moments and scales, although no output depends
on it. So a padded batch is taken apart into its rows, and each row is cut down to the tokens that its mask shows, as
`texts.documents` cuts texts. The values of each token (positions, types, labels) are cut with it:

    input_ids [2, 5]    attention_mask [2, 5]        input_ids [1, 3]    input_ids [1, 5]
    7 4 9 0 0           1 1 1 0 0                    7 4 9               8 3 5 1 2
    8 3 5 1 2           1 1 1 1 1
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

# Prefixes of the names of the ids and of their mask: an encoder-decoder has both of each side.
_SIDES = ("", "decoder_")
_IDS, _MASK = "input_ids", "attention_mask"


def unpadded(call: Mapping[str, Any], takes: Collection[str]) -> list[dict[str, Any]] | None:
    """Returns a padded call without its padding: one call for each row that shows a token.

    A batch whose tensors do not all have a part for each row (images, of which a text may have several) cannot be taken
    apart. It stays as it is, with a warning.

    Args:
        call: arguments of a model by name.
        takes: the names of all arguments of the model.

    Returns:
        None where the call stays as it is.
    """
    masks = {side: mask for side in _SIDES if (mask := _shown_tokens(call, side)) is not None}
    if all(bool(mask.all()) for mask in masks.values()):
        return None
    rows = len(next(iter(masks.values())))
    tensors = [value for value in tree_flatten(dict(call))[0] if isinstance(value, torch.Tensor)]
    if rows > 1 and any(not tensor.dim() or len(tensor) != rows for tensor in tensors):
        warnings.warn(
            "calibration data: a batch of padded texts has tensors without a part for each text "
            f"({', '.join(call)}), so its padding counts as tokens; give one text a call",
            stacklevel=2,
        )
        return None
    shown_calls = []
    for row in range(rows):
        shown = {side: mask[row] for side, mask in masks.items()}
        if all(bool(tokens.any()) for tokens in shown.values()):
            shown_calls.append(_cut(call if rows == 1 else _row(call, row), shown, takes))
    return shown_calls


def _shown_tokens(call: Mapping[str, Any], side: str) -> torch.Tensor | None:
    """Returns which token ids of a call are not padding.

    Args:
        call: arguments of a model by name.
        side: the prefix of the names of ids and mask, "" or "decoder_".

    Returns:
        bool `[rows, tokens]`; None where the call has no ids, or no mask `[rows, tokens]` for them.

    Raises:
        ValueError: the mask holds values that no mask has, such as labels.
    """
    ids, mask = call.get(f"{side}{_IDS}"), call.get(f"{side}{_MASK}")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return None
    if ids.dim() != 2 or mask.shape != ids.shape:
        return None
    # A mask of packed texts numbers them from 1: no number is above the number of tokens.
    low, high = (float(value) for value in mask.float().aminmax()) if mask.numel() else (0.0, 0.0)
    if not 0 <= low <= high <= mask.shape[1]:
        raise ValueError(
            f"{side}{_MASK} holds values from {low:g} to {high:g} and not 0 or 1; of pairs (x, y) of a loader pass "
            "only x, as in data=(x for x, y in loader)"
        )
    return mask.bool()


def _row(call: Mapping[str, Any], row: int) -> dict[str, Any]:
    return tree_map(  # type: ignore[no-any-return]
        lambda value: value[row : row + 1] if isinstance(value, torch.Tensor) else value, dict(call)
    )


def _cut(call: Mapping[str, Any], shown: Mapping[str, torch.Tensor], takes: Collection[str]) -> dict[str, Any]:
    """Returns a call of one row, without the values of tokens that are not in `shown`, bool `[tokens]` of each side."""
    shortened = dict(call)
    for name, value in call.items():
        # The labels of an encoder-decoder are the text of its decoder.
        is_decoder = name.startswith(_SIDES[1]) or (name == "labels" and f"{_SIDES[1]}{_IDS}" in takes)
        side = _SIDES[is_decoder]
        if side not in shown or not isinstance(value, torch.Tensor) or value.shape[:2] != (1, len(shown[side])):
            continue
        # Images and sounds may have as many channels as the text has tokens.
        if name == f"{side}{_MASK}" or not value.is_floating_point():
            shortened[name] = value[:, shown[side].to(value.device)]
    return shortened
