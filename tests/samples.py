"""This file names what tests read: golden checkpoints, and the texts that the repository ships."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "data" / "goldens"
BASE = GOLDENS / "base"
TEXTS = ROOT / "benchmarks" / "data"
