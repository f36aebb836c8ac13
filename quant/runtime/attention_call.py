"""`AttentionCall` holds the keyword arguments with which transformers calls an attention function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class AttentionCall(NamedTuple):
    """Options of one call, None where transformers gave none.

    Attributes:
        is_causal: whether queries see only earlier keys; from the call, or else from the module.
        scaling: factor of the scores; None is 1/√dim.
        sliding_window: keys that a query sees, itself included.
        softcap: bound of the scores, by tanh.
        s_aux: attention sinks, a score of each head `[heads]`.
    """

    is_causal: bool
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Module, keywords: Mapping[str, Any]) -> AttentionCall:
        """Returns the options among all keywords of a call, which differ from model to model."""
        # The fields bear transformers' keywords as names. Models pass more keywords, such as `position_ids`, that
        # change no result here.
        options = [keywords.get(name) for name in cls._fields[1:]]
        is_causal = keywords.get("is_causal")
        return cls(bool(getattr(module, "is_causal", True) if is_causal is None else is_causal), *options)
