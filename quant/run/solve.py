"""The fourth stage solves the weights of a run, by the plan that was decided."""

from __future__ import annotations

import time

import torch
from torch import nn

from quant.base.listener import StageProgress
from quant.calibration.inputs import Inputs
from quant.calibration.texts.mixture import solver_needs_data
from quant.calibration.walk.solve import solve_plan
from quant.calibration.walk.solve_weights import solve_state_dict
from quant.export.checkpoint.files.compressed_tensors import check_plan
from quant.recipes.blocks import block_names
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan, groups_by_input
from quant.run.job import Decision, Job, SolvedModel


def solve(job: Job, decision: Decision, progress: StageProgress) -> SolvedModel:
    """Quantizes the model in place; a quantized copy that an allocation has measured is taken as it is."""
    if job.source.model is None:
        return _solve_state_dict(job, decision, progress)
    session = job.session
    # Before solving, which replaces parameters one by one.
    bytes_before = sum(parameter.nbytes for parameter in job.model.parameters())
    quantized = None if decision.allocation is None else decision.allocation.quantized
    if quantized is None:
        progress.expect("solve", *solving_steps(job.model, decision.plan, decision.data))
        # A ValueError here is the user's or a NaN: finished steps of this plan would fail again and are deleted.
        with session.store.solving():
            quantized = solve_plan(job.model, decision.plan, decision.data, session)
    job.seconds.update(quantized.seconds)
    if quantized.plan.guard is not None and not job.request.is_in_memory:
        check_plan(quantized.plan)  # a guard may have given layers other formats
    return SolvedModel(quantized.plan, quantized.layers, bytes_before, quantized)


def _solve_state_dict(job: Job, decision: Decision, progress: StageProgress) -> SolvedModel:
    """Solves the weights of a bare state dict, whose plan needs no data."""
    tensors, plan = job.source.state_dict, decision.plan
    assert tensors is not None
    started = time.perf_counter()
    amounts = [layer.numel * job.source.dtype.itemsize / 1e6 for layer in plan.layers]
    progress.expect("solve", [layer.name for layer in plan.layers], amounts, "MB")
    solved, layers = solve_state_dict(tensors, plan, job.session)
    job.seconds["solve"] = time.perf_counter() - started
    return SolvedModel(plan, layers, sum(tensor.nbytes for tensor in tensors.values()), tensors=solved)


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
