"""What names and options are called since; each goes two releases later, 0.3's with 0.5."""

import importlib
import warnings
from typing import Any

ATTRIBUTES = {
    "Exported": "quant.export.export_model.Exported",
    "Verification": "quant.export.checkpoint.verify.Verification",
    "cache_teacher": "quant.training.distillation_loss.cache_teacher",
}
"""Attributes of `quant` that still work, with a warning."""
OPTIONS = {
    **dict.fromkeys(
        ("--fit", "--ctx", "--batch", "--latency", "--max-kl", "--max-ppl-increase", "--target", "--method", "--pin",
         "--forbid", "--at-least", "--search", "--sensitivity", "--attention", "--guard", "--observer"),
        "an option of `quant plan make MODEL … --out plan.json`; run its plan with `quantize MODEL --plan plan.json`",
    ),
    "--revision": "part of MODEL: org/name@REV",
    "--resume": "no option: the same command by itself continues after what an unfinished run has kept",
}  # fmt: skip
"""Options that users look for, with where they are found."""
RENAMED = {"--recipe": "--format", "--formats": "--format", "--unsafe-load": "--trust-remote-code"}
"""Options that still work under their old names, with a warning."""


def attribute(name: str) -> Any:
    """Returns `quant.name` under the name that it has since 0.4; AttributeError if there never was one."""
    if name not in ATTRIBUTES:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    new = ATTRIBUTES[name]
    warnings.warn(f"quant.{name} is {new} since 0.4", FutureWarning, stacklevel=3)
    module, _, last = new.rpartition(".")
    return getattr(importlib.import_module(module), last)
