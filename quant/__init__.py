"""Blockscale: from a trained PyTorch model to a deployed low-precision one.

The public names are resolved when first used, so that `import quant` costs nothing and pulls in neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "quant.allocation": ("Allocation", "allocate"),
    "quant.allocation_space": ("Goal",),
    "quant.api": ("Quantized", "apply_plan", "calibrate", "quantize"),
    "quant.attention_interface": ("quantized_attention",),
    "quant.calibration.data": ("calibration_rows", "token_rows"),
    "quant.checkpoint": ("convert", "load", "save"),
    "quant.errors": ("UserError",),
    "quant.evaluation": ("Evaluation", "evaluate"),
    "quant.formats.format": ("FORMATS", "Format"),
    "quant.formats.tensor": ("BlockScaledTensor",),
    "quant.kernels.linear": ("QuantExperts", "QuantLinear"),
    "quant.kv_generation": ("QuantizedKVCache",),
    "quant.loading": ("Source", "open_model"),
    "quant.planning": ("make_plan",),
    "quant.recipes.plan": ("LayerPlan", "Plan"),
    "quant.recipes.recipe": ("Recipe", "Rule"),
    "quant.report": ("Report", "render_html"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
