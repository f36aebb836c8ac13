"""`solving_steps` lists the layers that solving goes through, so that a listener can show speed and remaining time."""

from __future__ import annotations

import torch
from torch import nn

from quant.recipes.blocks import block_names
from quant.calibration.inputs import Inputs
from quant.calibration.texts.data_needs import solver_needs_data
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import Plan, groups_by_input


def solving_steps(
    model: nn.Module, plan: Plan, data: torch.Tensor | Inputs | None
) -> tuple[list[str], list[float], str]:
    """Returns the layers that `solve_plan` goes through: the block of each, how much work it is, and the unit of that.

    With calibration text the work is its tokens, and each layer has the share of its weights; a model's worth of layers
    has taken all tokens. Without, it is the megabytes that are read.
    """
    blocks = block_names(model)
    layers = [layer for group in groups_by_input(plan.quantized) for layer in group]
    calibrated = plan.guard is not None or any(solver_needs_data(layer) for layer in layers)
    if calibrated and data is not None:
        layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
        tokens, weights = data.shape[:2].numel(), sum(layer.numel for layer in layers)
        amounts = [tokens * layer.numel / weights for layer in layers]
    else:
        # Bytes of the first parameter's dtype, which nearly all weights share.
        width = next(model.parameters()).element_size()
        amounts = [layer.numel * width / 1e6 for layer in layers]
    # Layers of one block are shown as its name, since the sequential walk finishes them together.
    names = [next((b for b in blocks if layer.name.startswith(f"{b}.")), layer.name) for layer in layers]
    return names, amounts, "tokens" if calibrated and data is not None else "MB"
