"""`solve_plan` executes a plan: it calibrates, solves every planned weight and installs the quantized modules.

Plans whose solvers look only at weights are executed by `solve_weights`, all others by `solve_blocks`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.attention_scales import collect_attention_scales, kv_scale_tensors, latent_norms
from quant.calibration.evaluating import evaluating
from quant.calibration.inputs import Inputs, inputs_of, taking_inputs
from quant.calibration.layer_result import Quantized
from quant.calibration.ranks import Exchange
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts.data_needs import lacks_data, mixed_text, solver_needs_data, with_calibration
from quant.calibration.walk.group import Settings
from quant.calibration.walk.input_scales import input_scales_of, observer_of
from quant.calibration.walk.plan_fits import check_solvable, check_unquantized
from quant.calibration.walk.solve_blocks import Rounded, solve_blocks
from quant.calibration.walk.solve_weights import solve_weights
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.formats.format import FP8_HEAD
from quant.kernels.linear.install import call_encoder_layers, install_kv_scales, mark_quantized
from quant.models.prediction_heads import head_layers, scale_donors, split_heads
from quant.models.stored_weights import read_stored, stored_in
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import LayerKind
from quant.recipes.plain_layers import as_linears
from quant.recipes.plan import Guard, Plan


def solve_plan(
    model: nn.Module,
    plan: Plan,
    data: Any = None,
    session: Session | None = None,
    *,
    rounded: Rounded | None = None,
) -> Quantized:
    """Quantizes `model` in place, as `plan` says.

    Args:
        model: any module.
        plan: the plan, which was made for this model.
        data: as in `quant.quantize`; None where the plan needs none, or the model writes text.
        session: the session. Its store has the steps that an earlier run finished, and keeps the steps of this one;
            finished layers become maps of its files. Hidden states that would take much of its memory go to a file
            there.
        rounded: a function that is called with the matrix that was rounded where a solver changes a weight before:
            scaled, rotated, less its branch.

    Raises:
        ValueError: the plan does not fit the model, or it needs data and there is none, or a tensor holds NaN or
            infinity; the message names it.
    """
    session = session or Session()
    check_solvable(model, plan)
    by_block = _looks_at_data(plan)
    if by_block:
        # Solvers with data sum their moments over ranks; solvers without data share groups through the store's files.
        Exchange(session.device).begin_connecting()
    # Before checks and statistics: a parameter on the meta device has a reader, but no values to compute with.
    read_stored(model, _needed_throughout(model, plan))
    if session.rank == 0:  # an error there ends the other ranks; each of them would read all of the model
        check_unquantized(model, plan)
    settings = _settings(plan)
    plan, data = _with_inputs(model, plan, data, session)
    session = session.for_model(model)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    # Dropout would be noise in the statistics, and BatchNorm would move with every calibration row.
    plan, heads = split_heads(plan, head_layers(model))
    with evaluating(model), taking_inputs(model), as_linears(model):
        call_encoder_layers(model)
        # Before the walk, so that heads see the hidden states of the original blocks.
        heads, scales_of_heads = _with_scales(model, plan, heads, data, session)
        if by_block:
            assert data is not None
            plan, layers = solve_blocks(model, plan, data, settings, session, rounded)
        else:
            input_scales = input_scales_of(model, plan, data, session)
            seconds["calibrate"] = time.perf_counter() - started
            layers = solve_weights(model, plan, input_scales, session)
        if heads.layers:
            layers += solve_weights(model, heads, scales_of_heads, replace(session, progress=None))
            plan = replace(plan, layers=(*plan.layers, *heads.layers))
        # Stages are disjoint: calibration that was timed by itself does not count twice.
        seconds["solve"] = time.perf_counter() - started - sum(seconds.values())
        # Solvers have added run-time parts (input scale, rotation, branch), which count in the size of the plan.
        plan = plan_of_model(model, plan)
        # Hidden states between blocks: no later step reads them.
        session.store.drop("states")
        if plan.kv_cache is not None:
            install_kv_scales(model, _kv_scales(model, plan, data, session))
        mark_quantized(model)
    return Quantized(model, plan, layers, seconds)


def _with_inputs(model: nn.Module, plan: Plan, data: Any, session: Session) -> tuple[Plan, Any]:
    """Returns calibration data as the walk takes it, and the plan with a record of text that was written for it."""
    if data is None and lacks_data(plan):
        data, record = mixed_text(model, plan, session=session)
        return with_calibration(plan, [{"source": "mix", **record}]), data
    # Positional and keyword arguments become one list of calls, each bound to the forward signature.
    if data is not None and not isinstance(data, torch.Tensor | Inputs):
        data = inputs_of(data, model)
    return plan, data


def _with_scales(
    model: nn.Module, plan: Plan, heads: Plan, data: Any, session: Session
) -> tuple[Plan, dict[str, torch.Tensor]]:
    """Returns the plan of the prediction heads and their static input scales, measured on layers of the model."""
    heads, donors = scale_donors(plan, heads, stored_names(model))
    if not donors:
        return heads, {}
    measured = replace(plan, layers=tuple({donor.name: donor for donor in donors.values()}.values()))
    scales = input_scales_of(model, measured, data, session, "input scales of prediction heads")
    return heads, {name: scales[donor.name] for name, donor in donors.items()}


def _looks_at_data(plan: Plan) -> bool:
    """Returns whether weights are solved on the inputs that they get, block by block."""
    return plan.guard is not None or any(solver_needs_data(layer) for layer in plan.quantized)


def _kv_scales(model: nn.Module, plan: Plan, data: Any, session: Session) -> dict[str, torch.Tensor]:
    """Returns the scales of the KV cache of the quantized model, measured once."""
    step = "scales of the KV cache"
    finished = session.store.get(step)
    if finished is not None:
        return {name: scale.clone() for name, scale in finished.tensors.items()}
    assert data is not None and plan.kv_cache is not None
    by_head = plan.kv_cache is FP8_HEAD
    if by_head and (latent := next(iter(latent_norms(model)), None)):
        raise UserError(
            f"{latent}: latent attention caches one vector for all heads, so it has no scale for each (fp8_head); use "
            "--kv-cache fp8"
        )
    # The listener has seen all layers by now; a second count of the same rows would look like a restart.
    silent = replace(session, progress=None)
    scales = collect_attention_scales(
        model, data, kv_format=plan.kv_cache, attention_format=None,
        granularity="head" if by_head else "tensor", session=silent,
    )  # fmt: skip
    tensors = kv_scale_tensors(scales, stored_dtype(model))
    session.store.put(step, tensors, None)
    return tensors


def _needed_throughout(model: nn.Module, plan: Plan) -> list[str]:
    """Returns the parameters in files that other steps than solving their own layer read or change."""
    unread = stored_in(model)
    rotates = any(get_pipeline(layer.solver).spec.merges_rotations for layer in plan.quantized)
    # Merged rotations change other layers too; a weight that a guard keeps in 16 bit must be in memory.
    if rotates or plan.guard is not None:
        return list(unread)
    quantized = {layer.tensor_name for layer in plan.quantized if layer.kind != LayerKind.CONV}
    return [name for name in unread if name not in quantized]


def _settings(plan: Plan) -> Settings:
    """Returns the settings of the walk that the plan fixes."""
    return Settings(observer=observer_of(plan), guard=Guard.parse(plan.guard) if plan.guard is not None else None)
