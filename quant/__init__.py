"""Blockscale: from a trained PyTorch model to a deployed low-precision one."""

from __future__ import annotations

__version__ = "0.1.0"
