"""A model of transformers takes and gives its KV cache as `cache` since 5.24, and as `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` as an argument of `model` or of its `generate`, by name."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


def cache_of(output: Any) -> Any:
    """The cache that a model returned; None where it keeps none."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)
