"""The layouts of checkpoints, listed without importing torch, for help texts and checks of options."""

from __future__ import annotations

LAYOUTS = ("modelopt", "compressed-tensors")
"""Layouts of checkpoints that are read, and that `quant.convert` writes."""
