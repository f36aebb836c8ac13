"""`LAYOUTS` lists the layouts of checkpoints; a layout is found by its config or by the tensors of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quant.export.checkpoint.files import compressed_tensors, modelopt
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, MODELOPT, Layout

# mypy checks each module against the protocol here.
LAYOUTS: dict[str, Layout] = {MODELOPT: modelopt, COMPRESSED_TENSORS: compressed_tensors}


def layout_of_config(config: Mapping[str, Any]) -> Layout:
    """Returns the layout that a config describes; the table in ModelOpt's own file does not name its method."""
    return LAYOUTS.get(str(config.get("quant_method")), LAYOUTS[MODELOPT])


def layout_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Returns the layout of one layer's tensors, given by their names below the layer's."""
    return next((layout for layout in LAYOUTS.values() if layout.holds(tensors)), LAYOUTS[COMPRESSED_TENSORS])
