"""`code_findings` looks for a checkpoint's codes in an engine: formats alone do not tell one model from another."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from quant.checkpoints.load import is_checkpoint, no_checkpoint
from quant.checkpoints.open import Checkpoint, outline
from quant.export.checkpoint.read import read_layer
from quant.export.engine.audit import Finding
from quant.export.engine.codes import held_codes
from quant.recipes.layer_kind import LayerKind

# Words of the audit's table: planned, found if it passed, found if it failed.
WANTED, HELD, MISSING = "its codes", "its codes", "other weights"


def code_findings(
    engine: str | Path,
    directory: str | Path,
    *,
    exported: Collection[str] | None = None,
    not_found: Collection[str] = (),
) -> list[Finding]:
    """Whether an engine holds the codes of each quantized layer of a checkpoint.

    Args:
        engine: a serialized engine.
        directory: the checkpoint that it was built from.
        exported: the layers in its graph; None is all.
        not_found: layers whose codes were not found when it was built, because TensorRT stores them in another layout.

    Raises:
        UserError: `directory` holds no quantized checkpoint.
    """
    directory = Path(directory)
    if not is_checkpoint(directory):
        raise no_checkpoint(directory)
    opened = Checkpoint(directory, outline(directory))
    codes, bits = {}, {}
    for layer in opened.plan.quantized:
        is_exported = exported is None or layer.name in exported
        if layer.kind in (LayerKind.LINEAR, LayerKind.HEAD) and is_exported and layer.name not in not_found:
            weight, _ = read_layer(opened.tensors, layer)
            # Bytes: numpy knows neither FP8 nor packed FP4.
            codes[layer.name] = weight.codes.view(torch.uint8).numpy()
            bits[layer.name] = weight.format.element.bits
    held = held_codes(engine, codes, bits)
    return [Finding(name, WANTED, HELD if is_held else MISSING, is_held) for name, is_held in held.items()]
