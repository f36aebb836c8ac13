"""Quantization-aware training: `prepare_qat` makes a model train as it will be deployed, `convert_qat` packs it.

    plan = quant.prepare_qat(model, "nvfp4", rows, solver="gptq")     the best quantized model is the start
    …                                                                 any training loop
    plan = quant.convert_qat(model)                                   QuantLinear, the trained model bit for bit
    quant.save(model, plan, "out")

The start is exact: before the first step, the model's outputs are the quantized model's. So is the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted, known_names
from quant.base.listener import Progress
from quant.calibration.inputs import Inputs, call_on_first_row, inputs_of
from quant.calibration.placement import Device
from quant.calibration.session import Session
from quant.calibration.walk.solve import solve_plan
from quant.calibration.walk.undo import restored_on_error
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.export.checkpoint.pretrained import attach, detach
from quant.kernels.linear.install import mark_quantized
from quant.recipes.blocks import stored_dtype
from quant.recipes.callers_model import (
    ADAPTERS_AFTER,
    check_original,
    inner_model,
    optimizers_of,
    refuse_adapters,
    refuse_partial_layer,
    uncompiled,
    unwrapped,
)
from quant.recipes.layers import find_layers
from quant.recipes.plan import Plan
from quant.recipes.plan_check import check_plan_fits
from quant.recipes.plan_make import grouped_layers, make_plan
from quant.recipes.recipe import Recipe
from quant.training.qat_layers import Packed, Start, install_training_layers, put_layer, weights_before_rounding
from quant.training.rounding.input_range import MANY
from quant.training.rounding.rounded_weight import PLAN, SCALES, RoundedWeight


def prepare_qat(
    model: nn.Module,
    plan: Plan | Recipe | str | None = None,
    data: Any = None,
    *,
    solver: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scales: str | None = None,
    track_inputs: int = 0,
    dtype: torch.dtype | None = torch.float32,
    device: Device = None,
    progress: Progress | None = None,
    original: nn.Module | None = None,
) -> Plan:
    """Makes a model train its weights under exactly the rounding that it will be deployed with; changes it in place.

    A model in 16 bit is quantized first, by the plan's solvers, and training starts at that model's loss. A model that
    is quantized already, by `quantize` or from a checkpoint, is the start as it is. Parameters of a 16-bit model stay
    the same objects, so an optimizer made before trains them.

    Training starts at the weights nearest to the original weights that still round to the same codes. For a model that
    is quantized already, `original` shows these; without it, training starts at the values of the codes, from where it
    takes more steps to get as far.

    Args:
        model: a model in 16 bit or FP32, or a quantized one.
        plan: a plan, a recipe or a preset's name. A quantized model of transformers has its plan; for another one, pass
            the plan that `quant.quantize` returned.
        data, device, progress: options of the calibration, as in `quant.quantize`.
        solver: replaces the recipe's, which rounds to nearest (`rtn`) where it names none.
        include, exclude: as in `quant.quantize`, with a recipe.
        scales: "recomputed" measures block scales from the weights at each forward, "frozen" keeps the start's,
            "learned" trains them (LSQ). None recomputes scales that `rtn` chose for a 16-bit model, and freezes others.
        track_inputs: forward passes of training in which static input scales grow with the inputs; afterwards, and by
            default, they stay as calibrated. Each process follows its own inputs; DDP sends rank 0's scales to all, and
            a state gathered from FSDP2 has rank 0's.
        dtype: the dtype of the rounded weights in training; None keeps the model's, as biases, norms and all others do.
            In BF16 most updates are smaller than half a unit in the last place, and lost.
        original: the model in 16 bit that a quantized `model` was made from, which is left as it is. Layers that it
            does not have, or that came from other weights, start at the values of their codes.

    Returns:
        The plan that was applied; `convert_qat` needs no other.

    Raises:
        UserError: the model is prepared already, or holds meta tensors or frozen weights where the plan quantizes; a
            quantized model with another plan; scales that cannot start where the quantized model is; attention in a
            format, which has no gradient. Last of all, when the model is prepared: an optimizer of its parameters that
            holds some that it no longer has, lacks learned scales, or has state in the dtype that weights had.
    """
    model = unwrapped(model, "prepare_qat")
    _check_arguments(model, scales, track_inputs)
    # Before weights become float32: `convert_qat` packs for a checkpoint in this dtype, to which float scales are
    # rounded.
    stored = stored_dtype(model)
    # For `_check_optimizers`. Each value holds its parameter, because the id of a freed object may be given out again.
    before = {id(parameter): (parameter, parameter.dtype) for parameter in model.parameters()}
    was_quantized = any(isinstance(module, Packed) for module in model.modules())
    if was_quantized:
        refuse_adapters(model, "prepare_qat", ADAPTERS_AFTER)
        plan = _plan_of_quantized(model, plan, solver, include, exclude)
        start = Start({}, {}, {} if original is None else weights_before_rounding(model, plan, original))
    else:
        check_original(model, "prepare_qat")
        if original is not None:
            raise UserError("original= is for a model that is quantized already; this one is in 16 bit: leave it out")
        if data is not None and not isinstance(data, torch.Tensor | Inputs):
            data = inputs_of(data, model)
        plan = _plan_of_original(model, plan, data, solver, include, exclude)
        start = Start.of_original(model, plan)
        session = Session.on(device, progress=progress)
        with restored_on_error(model), uncompiled(model):
            _warn_of_bypassed_layers(model, plan)
            plan = solve_plan(model, plan, data, session, rounded=start.rounded.__setitem__).plan
    _check_plan(plan)
    try:
        install_training_layers(model, plan, start, scales, stored, dtype)
    except UserError as error:
        if was_quantized:
            raise
        attach(model, plan)
        model.quantization_plan = plan  # type: ignore[assignment]
        raise UserError(f"{error}. The model is quantized by now: call prepare_qat(model, scales=…) again") from None
    # A model in training saves float32 weights, and not codes; a Trainer refuses models that are marked as quantized.
    detach(model)
    setattr(model, PLAN, plan)
    for module in model.modules():
        if isinstance(module, RoundedWeight):
            module.inputs.follows = track_inputs
    _check_optimizers(model, before, was_quantized=was_quantized)
    return plan


def _check_arguments(model: nn.Module, scales: str | None, track_inputs: int) -> None:
    """Raises UserError for a model that is prepared already, or an option without such a value."""
    if scales is not None and scales not in SCALES:
        raise UserError(f"scales={scales!r}: unknown; {known_names(scales, SCALES)}")
    if isinstance(track_inputs, bool) or not isinstance(track_inputs, int) or track_inputs < 0:
        raise UserError(f"track_inputs={track_inputs!r}: give a number of forward passes, such as 100, or 0 for none")
    if any(isinstance(module, RoundedWeight) for module in model.modules()):
        raise UserError("the model is prepared for QAT already; train it, or pack it with quant.convert_qat(model)")


def convert_qat(model: nn.Module) -> Plan:
    """Packs a model that `prepare_qat` prepared; changes it in place.

    The packed model's outputs equal the trained model's, bit for bit where both run the reference arithmetic. It saves,
    exports and runs as any quantized model does.

    Args:
        model: the model as `prepare_qat` left it, after training. Wrappers (DDP, torch.compile) are looked through.

    Returns:
        The plan, for `quant.save`.

    Raises:
        UserError: the model was not prepared, its weights are sharded, or one of them is no longer finite.
    """
    model = inner_model(model)
    plan = getattr(model, PLAN, None)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, RoundedWeight)]
    if plan is None or not layers:
        raise UserError("the model is not prepared for QAT: call quant.prepare_qat(model, plan) and train it first")
    for name, module in layers:
        reload = "load it into a model prepared in the same way, and convert that"
        refuse_partial_layer(name, module.weight, "quant.convert_qat", reload)
        for key, parameter in module.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise UserError(f"{name}: training made NaN or infinity of its {key}; lower the learning rate")
    _warn_of_clipped_inputs(layers)
    # All of them before any is installed: scales that are shared depend on the others' weights.
    packed = {name: module.packed() for name, module in layers}  # type: ignore[operator]
    for name, new in packed.items():
        put_layer(model, name, new)
    delattr(model, PLAN)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan


def _plan_of_original(
    model: nn.Module,
    plan: Plan | Recipe | str | None,
    data: Any,
    solver: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> Plan:
    """Returns the plan of a model in 16 bit, which it is quantized by first."""
    if plan is None:
        raise UserError("the model is not quantized: name a recipe, such as 'nvfp4', or pass a plan")
    if not isinstance(plan, Plan):
        run = call_on_first_row(data) if data is not None and data.is_floating_point() else None
        plan = make_plan(model, plan, include=include, exclude=exclude, solver=solver, run=run)
    elif solver or include or exclude:
        raise UserError("a plan says everything already: edit it instead of passing solver, include or exclude")
    check_plan_fits(plan, find_layers(model))
    _check_plan(plan)
    _check_trainable(plan, model)
    return plan


def _plan_of_quantized(
    model: nn.Module,
    plan: Plan | Recipe | str | None,
    solver: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> Plan:
    """Returns the plan of a model that is quantized already."""
    own = plan or getattr(model, "quantization_plan", None)
    if own is None:
        raise UserError("the model is quantized already: pass its plan, which quant.quantize returned with it")
    if not isinstance(own, Plan):
        raise UserError(
            "the model is quantized already, and a recipe is given: leave it out, or start from the original model"
        )
    plan = own
    if solver or include or exclude:
        raise UserError("a plan says everything already: edit it instead of passing solver, include or exclude")
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    if away := next((n for n, module in packed.items() if any(t.is_meta for t in module.buffers(recurse=False))), None):
        raise UserError(
            f"{away}: its weight is offloaded, and training needs it in memory; load the model without offloading"
        )
    held = packed.keys()
    if other := held ^ {layer.name for layer in plan.quantized}:
        raise UserError(
            f"{min(other)}: the plan and the model disagree on whether it is quantized ({len(other)} layers); pass the "
            "plan that this model was quantized by"
        )
    return plan_of_model(model, plan)


def _check_trainable(plan: Plan, model: nn.Module) -> None:
    for layer in plan.quantized:
        weight = model.get_parameter(layer.tensor_name)
        if weight.is_meta:
            raise UserError(f"{layer.name}: its weight is on the meta device; load the model before preparing it")
        if not weight.requires_grad:
            raise UserError(
                f"{layer.name}: its weight is frozen (requires_grad is False), and QAT trains weights; freeze layers "
                "after prepare_qat, from model.requires_grad_(True), or leave this one out with exclude="
            )


def _warn_of_bypassed_layers(model: nn.Module, plan: Plan) -> None:
    """Warns of layers that a model multiplies by without calling them, which is found where it runs on tokens."""
    config = getattr(model, "config", None)
    fields = dict(vars(config)) if hasattr(config, "__dict__") else None
    mark_quantized(model)  # some models call their layers then
    layers, _ = grouped_layers(model, None)
    if fields is not None:
        vars(config).clear()
        vars(config).update(fields)
    bypassed = [layer.name for layer in layers if layer.is_bypassed and layer.name in {m.name for m in plan.quantized}]
    if bypassed:
        warnings.warn(
            f"{bypassed[0]}: the model does not call this layer ({counted(len(bypassed), 'such layer')}); if its code "
            "multiplies by the weight itself, training does not round it, and the packed model differs from the "
            "trained one: start again with this layer in exclude=",
            stacklevel=3,
        )


def _warn_of_clipped_inputs(layers: Sequence[tuple[str, RoundedWeight]]) -> None:
    """Warns of layers whose inputs left the range of their static input scale while they trained."""
    clipped = sorted(((module.inputs.share, name) for name, module in layers), reverse=True)
    many = [name for share, name in clipped if share > MANY]
    if many:
        share, name = clipped[0]
        also = f" ({counted(len(many) - 1, 'other layer')} above {MANY:.1%} too)" if len(many) > 1 else ""
        warnings.warn(
            f"{name}: {share:.1%} of its inputs in training were beyond the range of its static input scale, and were "
            f"clipped{also}; prepare_qat(track_inputs=100) has the scales follow the first 100 passes",
            stacklevel=3,
        )
    followers = [module.inputs for _, module in layers if module.inputs.follows and module.input_scale is not None]
    if followers and not any(inputs.passes for inputs in followers):
        warnings.warn(
            f"track_inputs={followers[0].follows}: no static input scale has followed an input, because the model was "
            "not trained in this process, or compiled; compile it after the first passes",
            stacklevel=3,
        )


def _check_plan(plan: Plan) -> None:
    if plan.attention is not None:
        raise UserError(
            f"the plan has attention in {plan.attention}, which has no gradient; train with a plan without "
            "(attention=None), and choose attention's format when the trained model runs"
        )
    tied = [layer for layer in plan.quantized if layer.tied_to is not None]
    for layer in tied:
        if any(other.name == layer.tied_to for other in plan.quantized):
            raise UserError(
                f"{layer.name}: it shares its weight with {layer.tied_to}, and both are quantized, as two weights; "
                f"leave one of them in 16 bit with exclude="
            )


def _check_optimizers(
    model: nn.Module, before: Mapping[int, tuple[nn.Parameter, torch.dtype]], was_quantized: bool
) -> None:
    """Raises UserError where an optimizer of the parameters that the model had before would not train it right."""
    own = {id(parameter) for parameter in model.parameters()}
    learned = {id(m.weight): id(m.range_shift) for m in model.modules()
               if isinstance(m, RoundedWeight) and m.range_shift is not None}  # fmt: skip
    for each in optimizers_of(before.keys()):
        parameters = {id(parameter): parameter for group in each.param_groups for parameter in group["params"]}
        # Of a model that was quantized before, an optimizer may still hold the weights from before that.
        lost = sum(key not in own and (was_quantized or key in before) for key in parameters)
        lacks = sum(
            step not in parameters for weight, step in learned.items() if weight in before and weight in parameters
        )
        narrow = sum(_is_kept_in(before[key][1], each.state.get(parameter, {}), parameter)
                     for key, parameter in parameters.items() if key in before)  # fmt: skip
        if lost:
            mismatch = f"holds {counted(lost, 'parameter')} that the model no longer has, from before it was quantized"
        elif lacks:
            mismatch = f"lacks {counted(lacks, 'parameter')} that the model has since, its learned scales"
        elif narrow:
            mismatch = f"has made steps, and keeps what it knows of {counted(narrow, 'parameter')} in another dtype"
        else:
            continue
        raise UserError(
            f"an optimizer ({type(each).__name__}) {mismatch}, and would not train it; the model is prepared: make the "
            "optimizer anew, after prepare_qat"
        )


def _is_kept_in(dtype: torch.dtype, state: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Returns whether an optimizer has tensors of a parameter in the dtype that this one no longer has."""
    states = [each for each in state.values() if isinstance(each, torch.Tensor) and each.dim()]
    return parameter.dtype != dtype and any(each.dtype == dtype for each in states)
