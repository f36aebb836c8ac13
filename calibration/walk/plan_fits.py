"""Checks of a model before it is quantized: the plan fits it, and its weights hold neither NaN nor infinity."""

from __future__ import annotations

import torch
from torch import nn

from quant.base.errors import UserError
from quant.base.mapped import in_memory
from quant.calibration.solvers.registry import check_solvers
from quant.export.checkpoint.files.tensor_checks import value_problem
from quant.recipes.layers import find_layers
from quant.recipes.plan import Plan
from quant.recipes.plan_check import check_plan_fits


def check_solvable(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError where a plan cannot be executed on a model, judging by names, shapes and devices."""
    check_plan_fits(plan, find_layers(model))
    check_solvers(plan)
    for layer in plan.quantized:
        weight = model.get_parameter(layer.tensor_name)
        # A parameter that is read from its file later is on the meta device too, and carries its reader as `stored`.
        if weight.is_meta and not hasattr(weight, "stored"):
            raise UserError(
                f"{layer.name}: its weight is on the meta device, without values; load the model first. "
                "quant.make_plan plans without"
            )


def check_in_memory(model: nn.Module) -> None:
    """Raises UserError for the first tensor of a model, planned or not, that has no values where the model is.

    accelerate leaves offloaded tensors on the meta device and has a hook fetch them in each forward. Norms, embeddings
    and heads are read and changed together with the layers, block by block, where no hook runs.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not hasattr(tensor, "stored"):
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            is_offloaded = any(hasattr(each, "_hf_hook") for each in (module, *module.children(), model))
            way_out = "load the model first. quant.make_plan plans without"
            if is_offloaded:
                way_out = (
                    "it is offloaded: load the model without offloading (no disk in its device_map), or give its "
                    "directory to the command `quantize`"
                )
            raise UserError(f"{owner}: its {last} is on the meta device, without values; {way_out}")


def check_unquantized(model: nn.Module, plan: Plan) -> None:
    """Raises UserError where a tensor that stays as it is holds NaN or infinity; solvers check the others."""
    read_later = {layer.tensor_name for layer in plan.quantized}
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            if name not in read_later:
                check_values(name, in_memory(tensor.detach()), is_buffer=is_buffer)


def check_values(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> None:
    """Raises UserError where a tensor holds NaN or infinity."""
    if problem := value_problem(tensor, is_buffer=is_buffer):
        raise UserError(f"{name} {list(tensor.shape)} {problem}; repair the model, or download it again")
