"""Quantization-aware training: `prepare_qat` makes a model train as it will be deployed, `convert_qat` packs it.

    plan = quant.prepare_qat(model, "nvfp4", rows, solver="gptq")     the best quantized model is the start
    …                                                                 any training loop
    plan = quant.convert_qat(model)                                   QuantLinear, bit for bit what was trained
    quant.save(model, plan, "out")

The start is exact: before the first step, the model computes what the quantized model computes. So is the end.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.inputs import Inputs, inputs_of, on_first
from quant.calibration.listener import Progress
from quant.calibration.placement import Device
from quant.calibration.session import Session
from quant.checkpoints.pretrained import attach, detach
from quant.errors import UserError, counted
from quant.execution.data import by_input
from quant.execution.solve import solve_plan
from quant.export.checkpoint.write import plan_of_model
from quant.kernels.linear.conv import QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.expert_modules import QuantExperts
from quant.kernels.linear.modules import QuantLinear, RunTimeParts
from quant.plan.check import check_plan_fits
from quant.plan.make import check_module, make_plan
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import Recipe
from quant.training.fusion import Fusion
from quant.training.head import inner_model
from quant.training.initial_weights import before_rounding, starting_weight
from quant.training.modules import PLAN, SCALES, QATConv, QATEmbedding, QATExperts, QATLinear, RoundedWeight

Packed = QuantLinear | QuantConv | QuantExperts | QuantEmbedding


def prepare_qat(
    model: nn.Module,
    plan: Plan | Recipe | str | None = None,
    data: Any = None,
    *,
    solver: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scales: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    device: Device = None,
    progress: Progress | None = None,
    original: nn.Module | None = None,
) -> Plan:
    """Makes a model train its weights under exactly the rounding that it will be deployed with; changes it in place.

    A model in 16 bit is quantized first, by the plan's solvers, and training starts at that model's loss. A model that
    is quantized already, by `quantize` or from a checkpoint, is the start as it is. Parameters of a 16-bit model stay
    the same objects, so an optimizer made before trains them.

    Training starts at the weights nearest to what was rounded that still round to the same codes. For a model that is
    quantized already, `original` tells what that was; without it, training starts at the values of the codes, from
    where it takes more steps to get as far.

    Args:
        model: in 16 bit or FP32, or quantized.
        plan: a plan, a recipe or a preset's name. A quantized model of transformers has its plan; of another one, what
            `quant.quantize` returned.
        data, device, progress: of the calibration, as in `quant.quantize`.
        solver: replaces the recipe's, which rounds to nearest (`rtn`) where it names none.
        include, exclude: as in `quant.quantize`, with a recipe.
        scales: "recomputed" measures block scales from the weights at each forward, "frozen" keeps those of the start,
            "learned" trains them (LSQ). None recomputes those that `rtn` chose for a 16-bit model, and freezes others.
        dtype: of the rounded weights in training; None keeps the model's, as biases, norms and all others do. In BF16
            most updates are smaller than half a unit in the last place, and lost.
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
    check_module(model, "prepare_qat")
    if scales is not None and scales not in SCALES:
        raise UserError(f"scales={scales!r}: unknown; known: {', '.join(SCALES)}")
    if any(isinstance(module, RoundedWeight) for module in model.modules()):
        raise UserError("the model is prepared for QAT already; train it, or pack it with quant.convert_qat(model)")
    stored = stored_dtype(model)
    before = {id(parameter): (parameter, parameter.dtype) for parameter in model.parameters()}
    originals: dict[str, nn.Parameter] = {}
    rounded: dict[str, torch.Tensor] = {}
    biases: dict[str, nn.Parameter | None] = {}
    if any(isinstance(module, Packed) for module in model.modules()):
        applied = _plan_of_quantized(model, plan, solver, include, exclude)
        rounded |= {} if original is None else _before_rounding(model, applied, original)
    else:
        if original is not None:
            raise UserError("original= is for a model that is quantized already; this one is in 16 bit: leave it out")
        if data is not None and not isinstance(data, torch.Tensor | Inputs):
            data = inputs_of(data, model)
        if plan is None:
            raise UserError("the model is not quantized: name a recipe, such as 'nvfp4', or pass a plan")
        if not isinstance(plan, Plan):
            run = on_first(data) if data is not None and data.is_floating_point() else None
            plan = make_plan(model, plan, include=include, exclude=exclude, solver=solver, run=run)
        elif solver or include or exclude:
            raise UserError("a plan says everything already: edit it instead of passing solver, include or exclude")
        check_plan_fits(plan, find_layers(model))
        _check_plan(plan)
        originals = {layer.name: model.get_parameter(layer.tensor_name) for layer in plan.quantized}
        _check_trainable(plan, originals)
        owners = {layer.name: _owner(model, layer) for layer in plan.quantized}
        biases = {name: getattr(owner, "bias", None) for name, owner in owners.items()}
        done = solve_plan(model, plan, data, Session.on(device, progress=progress), rounded=rounded.__setitem__)
        applied = done.plan
    _check_plan(applied)
    try:
        _install(model, applied, originals, rounded, biases, scales, stored, dtype)
    except UserError as error:
        if not originals:
            raise
        attach(model, applied)
        model.quantization_plan = applied  # type: ignore[assignment]
        raise UserError(f"{error}. The model is quantized by now: call prepare_qat(model, scales=…) again") from None
    detach(model)
    setattr(model, PLAN, applied)
    _check_optimizers(model, before, was_quantized=not originals)
    return applied


def convert_qat(model: nn.Module) -> Plan:
    """Packs a model that `prepare_qat` prepared; changes it in place.

    Its outputs are those of the trained model, bit for bit where both run the reference arithmetic. It saves, exports
    and runs as any quantized model does.

    Args:
        model: as `prepare_qat` left it, after training. What wraps it (DDP, torch.compile) is looked through.

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
        if name.rpartition(".")[2] == "base_layer":
            raise UserError(
                f"{name}: an adapter is on this layer; merge it first, and convert what that returns: "
                "quant.convert_qat(model.merge_and_unload())"
            )
        if hasattr(module.weight, "full_tensor"):
            raise UserError(
                f"{name}: its weight is sharded (FSDP); gather the state with torch.distributed.checkpoint.state_dict."
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load it into a model "
                "prepared in the same way, and convert that"
            )
        for key, parameter in module.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise UserError(f"{name}: training made NaN or infinity of its {key}; lower the learning rate")
    # All of them before any is installed: scales that are shared depend on the others' weights.
    packed = {name: module.packed() for name, module in layers}  # type: ignore[operator]
    for name, new in packed.items():
        _put(model, name, new)
    delattr(model, PLAN)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan


def _plan_of_quantized(
    model: nn.Module,
    plan: Plan | Recipe | str | None,
    solver: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> Plan:
    """The plan of a model that is quantized already."""
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


def _before_rounding(model: nn.Module, plan: Plan, original: nn.Module) -> dict[str, torch.Tensor]:
    """What was rounded, by layer, where the original model tells."""
    there = dict(original.named_parameters())
    found = {}
    with torch.no_grad():
        for layer in plan.quantized:
            packed: Any = model.get_submodule(layer.name)
            parameter = there.get(layer.tensor_name)
            if parameter is None or parameter.is_meta or not parameter.is_floating_point():
                continue
            weight = _matrix(layer, packed, parameter.detach())
            if weight.shape != packed.quantized_weight.shape:
                continue
            parts = packed.parts if isinstance(packed, QuantLinear) else RunTimeParts()
            values = before_rounding(packed.quantized_weight, parts, weight)
            if values is not None:
                found[layer.name] = values
    return found


def _check_trainable(plan: Plan, originals: Mapping[str, nn.Parameter]) -> None:
    for layer in plan.quantized:
        weight = originals[layer.name]
        if weight.is_meta:
            raise UserError(f"{layer.name}: its weight is on the meta device; load the model before preparing it")
        if not weight.requires_grad:
            raise UserError(
                f"{layer.name}: its weight is frozen (requires_grad is False), and QAT trains weights; unfreeze it "
                "with model.requires_grad_(True), or leave the layer out with exclude="
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


def _install(
    model: nn.Module,
    plan: Plan,
    originals: Mapping[str, nn.Parameter],
    rounded: dict[str, torch.Tensor],
    biases: Mapping[str, nn.Parameter | None],
    scales: str | None,
    stored: torch.dtype,
    dtype: torch.dtype | None,
) -> None:
    """Puts layers in training in the place of the quantized ones; empties `rounded`, the weights before rounding."""
    kept = {id(parameter) for parameter in model.parameters()}
    made: dict[str, RoundedWeight] = {}
    for layer in plan.quantized:
        packed: Any = model.get_submodule(layer.name)
        original = originals.get(layer.name)
        how = scales or ("recomputed" if layer.solver == "rtn" and original is not None else "frozen")
        values = None if original is None else _matrix(layer, packed, original.detach())
        is_conv = isinstance(packed, QuantConv)  # whose parameter is trained in its own shape
        is_same = original is not None and values is not None and (is_conv or _is_whole(values, original))
        if how != "recomputed" or original is not None:  # from a guess other scales might be measured
            values = rounded.pop(layer.name, values)
        wide = dtype or (stored if original is None else original.dtype)
        with torch.no_grad():
            if how == "recomputed" and values is not None:
                start = values.to(wide)
            else:
                start = starting_weight(packed.quantized_weight, values, wide)
        if is_conv:
            start = conv_parameter(start, packed.codes.shape, packed.groups, packed.transposed)
        if original is None or id(original) in kept or not is_same:
            # Another layer has this parameter and keeps it as it is, or it holds the matrix transposed.
            weight = nn.Parameter(start.contiguous())
        else:
            weight = original
            if weight.dtype != start.dtype:
                weight.grad = None  # of the dtype that it had
            weight.data = start
        made[layer.name] = _in_training(packed, weight, biases.get(layer.name), how, stored)
        made[layer.name].train(packed.training)
    for members in by_input(plan.quantized):
        _share([made[member.name] for member in members])
    for layer in plan.quantized:
        _check_start(layer, model.get_submodule(layer.name), made[layer.name])
    for name, module in made.items():
        _put(model, name, module)


def _matrix(layer: LayerPlan, packed: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The matrices `[..., out, in]` of a parameter of the 16-bit model."""
    if isinstance(packed, QuantExperts):
        return packed.stacking.matrices(parameter)
    if isinstance(packed, QuantConv):
        return conv_matrix(parameter, packed.groups, packed.transposed)
    return parameter.t() if layer.transposed else parameter


def _is_whole(matrix: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a parameter holds its matrices as they are trained."""
    return matrix.shape == parameter.shape and matrix.stride() == parameter.stride()


def _in_training(
    packed: Any, weight: nn.Parameter, bias: nn.Parameter | None, scales: str, stored: torch.dtype
) -> RoundedWeight:
    """The layer in training that stands for a quantized one."""
    if isinstance(packed, QuantExperts):
        return QATExperts(weight, packed, scales, stored)
    if isinstance(packed, QuantEmbedding):
        return QATEmbedding(weight, packed, scales, stored)
    assert isinstance(packed, QuantLinear | QuantConv)
    if packed.bias is not None and bias is not None:
        bias.data = packed.bias.data
    elif packed.bias is not None:
        bias = nn.Parameter(packed.bias.detach())
    if isinstance(packed, QuantConv):
        return QATConv(weight, packed, bias, scales, stored)
    return QATLinear(weight, packed, bias, scales, stored)


def _share(members: Sequence[RoundedWeight]) -> None:
    """Lets fused layers have one second-level scale, or one scale at all."""
    fusion = Fusion(members)
    for member in members:
        member.fusion = fusion
        if member is not members[0] and member.weight_format.per_tensor:
            # One parameter in one place: safetensors write no tensor under two names.
            member.block_step = None


def _check_start(layer: LayerPlan, packed: Any, module: RoundedWeight) -> None:
    """Raises UserError where the layer would not start as the quantized one."""
    if torch.equal(module.packed_weight().dequantize(), packed.quantized_weight.dequantize()):
        return
    element = packed.weight_format.element
    if element.is_integer and bool((packed.quantized_weight.element_values() < element.min).any()):
        raise UserError(
            f"{layer.name}: holds the code {int(element.min) - 1}, as other toolkits write it, and training rounds to "
            f"±{int(element.max)}; start from the original model instead, or keep the layer in 16 bit"
        )
    way_out = "'frozen' or 'learned'" if module.scales == "recomputed" else "'frozen'"
    raise UserError(
        f"{layer.name}: scales={module.scales!r} does not give the scales that {layer.solver} chose, so training would "
        f"not start from this model; use scales={way_out}"
    )


def _check_optimizers(
    model: nn.Module, before: Mapping[int, tuple[nn.Parameter, torch.dtype]], was_quantized: bool
) -> None:
    """Raises UserError where an optimizer of the parameters that the model had before would not train it right."""
    own = {id(parameter) for parameter in model.parameters()}
    learned = {id(m.weight): id(m.block_step) for m in model.modules()
               if isinstance(m, RoundedWeight) and m.block_step is not None}  # fmt: skip
    for each in gc.get_objects():
        if not issubclass(type(each), torch.optim.Optimizer):  # isinstance would ask objects that only pretend a class
            continue
        held = {id(parameter): parameter for group in each.param_groups for parameter in group["params"]}
        if not before.keys() & held.keys():
            continue
        # Of a model that was quantized before, an optimizer may still hold the weights from before that.
        lost = sum(key not in own and (was_quantized or key in before) for key in held)
        lacks = sum(step not in held for weight, step in learned.items() if weight in before and weight in held)
        narrow = sum(_is_kept_in(before[key][1], each.state.get(parameter, {}), parameter)
                     for key, parameter in held.items() if key in before)  # fmt: skip
        if lost:
            why = f"holds {counted(lost, 'parameter')} that the model no longer has, from before it was quantized"
        elif lacks:
            why = f"lacks {counted(lacks, 'parameter')} that the model has since, its learned scales"
        elif narrow:
            why = f"has made steps, and keeps what it knows of {counted(narrow, 'parameter')} in another dtype"
        else:
            continue
        raise UserError(
            f"an optimizer ({type(each).__name__}) {why}, and would not train it; the model is prepared: make the "
            "optimizer anew, after prepare_qat"
        )


def _is_kept_in(dtype: torch.dtype, state: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Whether an optimizer has tensors of a parameter in the dtype that this one no longer has."""
    kept = [each for each in state.values() if isinstance(each, torch.Tensor) and each.dim()]
    return parameter.dtype != dtype and any(each.dtype == dtype for each in kept)


def _owner(model: nn.Module, layer: LayerPlan) -> nn.Module:
    return model.get_submodule(layer.tensor_name.rpartition(".")[0])


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
