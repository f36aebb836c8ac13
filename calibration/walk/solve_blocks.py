"""Solvers that need data see each layer's inputs as the quantized layers before it give them, block by block.

The peak of memory is one decoder block and its inputs. `quant.calibration.walk.walk` solves; here each solution
is measured, installed and, where the run has a store, kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from quant.base.errors import UserError, megabytes
from quant.calibration.layer_result import LayerResult, layer_result
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.calibration.texts.data_needs import solver_needs_data
from quant.calibration.walk.block_memory import Scratch, block_bytes
from quant.calibration.walk.chain import BlockStore
from quant.calibration.walk.finished_layers import BlockKeeper
from quant.calibration.walk.group import Settings, Solved
from quant.calibration.walk.input_scales import input_scales_of
from quant.calibration.walk.solve_weights import solve_weights
from quant.calibration.walk.walk import solve_sequentially
from quant.formats.tensor import moved
from quant.kernels.linear.expert_modules import run_experts_one_by_one
from quant.kernels.linear.install import install_weight, use_expert_modules
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.blocks import block_names, stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan

Rounded = Callable[[str, torch.Tensor], None]
"""Takes a layer's name and the weight that was rounded, `[..., out, in]`."""


def solve_blocks(
    model: nn.Module, plan: Plan, data: torch.Tensor, settings: Settings, session: Session, rounded: Rounded | None
) -> tuple[Plan, list[LayerResult]]:
    """Solves linear layers and fused experts by the sequential walk, and then the layers outside of decoder blocks.

    Args:
        model: changed in place.
        plan: the plan.
        data: calibration rows as the walk takes them.
        settings: the settings of the walk that the plan fixes.
        session: the session; blocks that its store has are installed from there.
        rounded: called with the matrix that was rounded of each layer, where the model is; or None.

    Returns:
        The plan with the formats and notes of the walk, and the results in its order.
    """
    walked = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    names = {layer.name for layer in walked}
    plan = plan.replace_layers(_without_data(layer) for layer in plan.quantized if layer.name not in names)
    # Heads, embeddings and convolutions stand outside of decoder blocks, where the walk holds no inputs of them.
    outside = replace(plan, layers=tuple(layer for layer in plan.layers if layer.name not in names))
    measured = replace(plan, layers=tuple(layer for layer in plan.layers if layer.kind != LayerKind.LINEAR))
    # Before the walk, while every layer still gets its original inputs.
    input_scales = input_scales_of(model, measured, data, session)
    results: dict[str, LayerResult] = {}
    solved_layers: list[LayerPlan] = []
    # Where the model lives when it is not being solved: a GPU holds one block, and solutions go back.
    home = device_of(model)

    def apply(layer: LayerPlan, solved: Solved | None, weight: torch.Tensor) -> None:
        notes = solved.notes if solved else ()
        layer = replace(layer, reason="; ".join((layer.reason, *notes)))
        solved_layers.append(layer)
        if solved is None:
            results[layer.name] = layer_result(layer, weight, None)
            return
        # The codes approximate the rotated matrix without its low-rank branch, so the error refers to that matrix.
        before = _before_rounding(layer, weight, solved.parts)
        results[layer.name] = _result(layer, weight, before, solved)
        if rounded is not None:
            rounded(layer.name, before.to(home))
        # A store takes solutions from the device where they are.
        solved = solved if session.store.keeps else moved(solved, home)
        install_weight(model, layer, solved.weight, solved.input_scale, solved.parts)

    if session.device is None or session.device.type == "cpu":
        # A GPU reports its own lack of memory and the walk reacts; a CPU process would be killed without a message.
        _check_memory(model, walked, data, settings, session)
    keeper = BlockKeeper(session, model, results, solved_layers) if session.store.keeps else BlockStore()
    settings = replace(settings, run_experts=run_experts_one_by_one)
    solve_sequentially(
        model, plan, data, apply=apply, session=session, settings=settings, input_scales=input_scales, store=keeper
    )
    outside_results = solve_weights(model, outside, input_scales, replace(session, progress=None))
    results |= {result.name: result for result in outside_results}
    plan = plan.replace_layers(solved_layers)
    use_expert_modules(model, plan)
    return plan, [results[layer.name] for layer in plan.layers]


def _check_memory(
    model: nn.Module, layers: Sequence[LayerPlan], data: torch.Tensor, settings: Settings, session: Session
) -> None:
    """Raises UserError where a block would take more memory than may be used, before anything is solved."""
    usable = session.usable_memory()
    blocks = block_names(model)
    if usable is None or not blocks:
        return
    dtype, scratch = settings.dtype_for(stored_dtype(model)), Scratch.of(session)
    for name in blocks:
        # With the dot: "layers.1" is a prefix of "layers.10" too.
        inside = [layer for layer in layers if layer.name.startswith(f"{name}.")]
        block = model.get_submodule(name)
        needed = block_bytes(block, inside, data.shape[:2].numel(), dtype, scratch) if inside else 0
        if needed > usable:
            # The tighter limit decides the advice: --memory of the user, or the container's cgroup.
            allowed = session.memory is None or usable == session.memory
            more = "more with --memory" if allowed else "more to this container"
            raise UserError(
                f"{name}: solving this block takes about {megabytes(needed)} of memory, and {megabytes(usable)} may be "
                f"used: give fewer or shorter calibration rows, a solver that looks at no data, such as rtn, or {more}"
            )


def _before_rounding(layer: LayerPlan, weight: torch.Tensor, parts: RunTimeParts) -> torch.Tensor:
    """Returns the matrix that was rounded, for a weight that may be rotated and have a branch."""
    if layer.kind == LayerKind.EXPERTS or (not parts.hadamard and parts.lowrank is None):
        return weight
    rotated = rotate_weight(weight.float(), parts.hadamard)
    return rotated if parts.lowrank is None else residual_weight(rotated, parts.lowrank)


def _result(layer: LayerPlan, weight: torch.Tensor, before: torch.Tensor, solved: Solved) -> LayerResult:
    """Returns the result of a layer that may be rotated and have a branch: its error counts both together."""
    if layer.kind == LayerKind.EXPERTS:
        return layer_result(layer, weight, solved.weight)
    result = layer_result(replace(layer, parts=Parts.of(solved.parts)), before, solved.weight)
    if solved.parts.lowrank is None or not result.relative_error:
        return result
    # ‖residual − its rounding‖ / ‖weight‖: the branch is exact, so the error is the residual's.
    share = float(before.norm() / weight.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not share:
        return result
    error = result.relative_error * share
    # SNR of an amplitude ratio: −20 · log10(error), equal to 10 · log10 of the ratio of energies.
    return replace(result, relative_error=error, snr_db=-20 * math.log10(error))


def _without_data(layer: LayerPlan) -> LayerPlan:
    if not solver_needs_data(layer):
        return layer
    reason = f"{layer.reason}; solved with mse: {layer.solver} takes what stands in blocks, not a {layer.kind}"
    return replace(layer, solver="mse", reason=reason)
