"""`reporting_bad_tensor` says where an input that is not finite comes from: a weight before the layer, or the data.

NaN spreads: one in a projection reaches every later input. The layer that is first seen to get it is therefore not the
cause, and neither is the calibration row, unless every weight of the model is finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quant.calibration.prefetch import value_of
from quant.formats.finite import is_finite, is_finite_or_mask


class InputNotFiniteError(ValueError):
    """The input of a layer holds NaN or infinity.

    Args:
        name: the name of the layer.
        where: the calibration row, or the expert, in words.
    """

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"{name}: the input holds NaN or infinity {where}")
        self.name = name


@contextmanager
def reporting_bad_tensor(model: nn.Module) -> Iterator[None]:
    """Makes an `InputNotFiniteError` name the tensor that holds NaN or infinity, or say that none does.

    Args:
        model: searched whole, except parameters of other blocks that are still in their files.
    """
    try:
        yield
    except InputNotFiniteError as error:
        inside = re.match(r".*\.\d+\.", error.name)
        bad_tensor = _first_bad_tensor(model, inside.group() if inside else "")
        if bad_tensor is not None:
            seen = f"first seen in the input of {error.name}"
            raise ValueError(f"{bad_tensor}; repair the model, or download it again ({seen})") from None
        raise ValueError(
            f"{error}, and no weight does: leave out the data that cause it, or load the model in a wider dtype if it "
            "overflows"
        ) from None


def _first_bad_tensor(model: nn.Module, block: str) -> str | None:
    """Returns the first tensor of a model that holds NaN or infinity, with its shape and how many values do."""
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            # Reading every other block from its files would take minutes; their layers were seen before this one.
            if hasattr(tensor, "stored") and not name.startswith(block):
                continue
            value = value_of(tensor)
            if not (is_finite_or_mask(value) if is_buffer else is_finite(value)):
                bad = int((~value.float().isfinite()).sum())
                return f"{name} {list(value.shape)} holds {bad:,} value(s) that are NaN or infinite"
    return None
