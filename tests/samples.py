"""This file names what tests read: golden checkpoints, and the texts that the repository ships."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "data" / "goldens"
BASE = GOLDENS / "base"
TEXTS = ROOT / "benchmarks" / "data"


def write_short_base(folder: Path) -> Path:
    """Writes the base model without its second block, whose graph is exported in half the time."""
    shutil.copytree(BASE, folder)
    config = json.loads((BASE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(BASE / "model.safetensors")
    shorter = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.")}
    save_file(shorter, folder / "model.safetensors", {"format": "pt"})
    return folder
