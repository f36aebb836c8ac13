"""Quantization-aware training: `prepare_qat` makes a model train as it will be deployed, `pack` packs it.

    plan = quant.prepare_qat(model, "nvfp4", rows, solver="gptq")     the best quantized model is the start
    …                                                                 any training loop
    plan = quant.pack(model)                                          QuantLinear, the trained model bit for bit
    quant.save(model, plan, "out")

The start is exact: before the first step, the model's outputs are the quantized model's. So is the end.

A code stands for an interval of weights, its cell. The values in the middle, which the codes decode to, are one
start. Where the original weight is known, the nearest point of the cell is another start. It keeps the difference
that rounding to nearest would have made anyway:

    gptq chose 3.0 for a weight of 2.4 (in steps of its block)     cell [2.5, 3.5]    start 2.55
    gptq chose 3.0 for a weight of 2.9                              cell [2.5, 3.5]    start 2.9

`pack` makes quantized modules with the codes and scales of training: no data is read and nothing is measured again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, known_names, warn
from quant.base.listener import Progress
from quant.base.torch_modes import in_own_modes
from quant.calibration.inputs import Inputs, call_on_first_row, inputs_of
from quant.calibration.session import Device, Session
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.calibration.walk.solve import solve_plan
from quant.calibration.walk.undo import restored_on_error
from quant.export.checkpoint.files.tensors import plan_of_model
from quant.export.checkpoint.save import attach, detach
from quant.formats.rounding import decode, round_to
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv, conv_matrix, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.install import install_weight, mark_quantized, use_expert_modules
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts, refuse_residual
from quant.kernels.training.fake_rounding import weight_steps
from quant.recipes import callers_model
from quant.recipes.blocks import stored_dtype
from quant.recipes.callers_model import unwrapped
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Plan, groups_by_input
from quant.recipes.plan_check import check_plan_fits
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Recipe
from quant.training import qat_layers
from quant.training.low_precision.conversion import plan_of_recipes, to_plain_layers
from quant.training.low_precision.fused_experts_training import LowPrecisionStack, trained_layers
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.nonfinite import GradientWatch
from quant.training.low_precision.state import deployed_input, input_scale, packed_weight, unagreed

_WITHIN = 0.95  # of half a cell: starts keep from its ends, so that rounding errors cannot carry them over
_UNRELATED = 0.35  # relative distance of weights that are not of one another; 4-bit rounding makes 0.08 to 0.2
_TURNS = 4


@in_own_modes
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
    on_nonfinite: str = "stop",
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
            default, they stay as calibrated. At each optimizer's step the ranks of DDP and FSDP2 take the largest of
            all.
        dtype: the dtype of the rounded weights in training; None keeps the model's, as biases, norms and all others do.
            In BF16 most updates are smaller than half a unit in the last place, and lost.
        original: the model in 16 bit that a quantized `model` was made from, which is left as it is. Layers that it
            does not have, or that came from other weights, start at the values of their codes.
        on_nonfinite: gradients with NaN or infinity "stop" training at an optimizer's step, or "skip" the step, as in
            `to_low_precision_training`.

    Returns:
        The plan that was applied; `pack` needs no other.

    Raises:
        UserError: the model is prepared already, or holds meta tensors or frozen weights where the plan quantizes; a
            quantized model with another plan; scales that cannot start where the quantized model is; attention in a
            format, which has no gradient. Last of all, when the model is prepared: an optimizer of its parameters that
            holds some that it no longer has, lacks learned scales, or has state in the dtype that weights had.
    """
    model = callers_model.unwrapped(model, "prepare_qat")
    if scales is not None and scales not in qat_layers.SCALES:
        raise UserError(f"scales={scales!r}: unknown; {known_names(scales, qat_layers.SCALES)}")
    if isinstance(track_inputs, bool) or not isinstance(track_inputs, int) or track_inputs < 0:
        raise UserError(f"track_inputs={track_inputs!r}: give a number of forward passes, such as 100, or 0 for none")
    watch = GradientWatch(on_nonfinite)
    if any(isinstance(module, qat_layers.RoundedWeight) for module in model.modules()):
        raise UserError("the model is prepared for QAT already; train it, or pack it with quant.pack(model)")
    # Before weights become float32: `pack` packs for a checkpoint in this dtype, to which float scales are rounded.
    stored = stored_dtype(model)
    # For `_check_optimizers`. Each value holds its parameter, because the id of a freed object may be given out again.
    before = {id(parameter): (parameter, parameter.dtype) for parameter in model.parameters()}
    was_quantized = any(isinstance(module, qat_layers.Packed) for module in model.modules())
    if was_quantized:
        callers_model.refuse_adapters(model, "prepare_qat", callers_model.adapters_after(model))
        plan = _plan_of_quantized(model, plan)
    else:
        callers_model.check_original(model, "prepare_qat")
        if original is not None:
            raise UserError("original= is for a model that is quantized already; this one is in 16 bit: leave it out")
        if plan is None:
            raise UserError("the model is not quantized: name a recipe, such as 'nvfp4', or pass a plan")
        if data is not None and not isinstance(data, Tensor | Inputs):
            data = inputs_of(data, model)
    if isinstance(plan, Plan) and (solver or include or exclude):
        raise UserError("a plan says everything already: give solver, include and exclude to quant.make_plan instead")
    if isinstance(plan, Plan) and was_quantized:
        plan = plan_of_model(model, plan)
        start = Start({}, {}, {} if original is None else weights_before_rounding(model, plan, original))
    else:
        if not isinstance(plan, Plan):
            run = call_on_first_row(data) if data is not None and data.is_floating_point() else None
            plan = make_plan(model, plan, include=include, exclude=exclude, solver=solver, run=run)
        check_plan_fits(plan, find_layers(model))
        _check_plan(plan)
        _check_trainable(plan, model)
        callers_model.warn_of_shared_weights(model)
        start = Start.of_original(model, plan)
        session = Session.on(device, progress=progress)
        with restored_on_error(model), callers_model.uncompiled(model):
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
    setattr(model, qat_layers.PLAN, plan)
    for module in model.modules():
        if isinstance(module, qat_layers.RoundedWeight):
            module.inputs.follows = track_inputs
    watch.start(model)
    _check_optimizers(model, before, was_quantized=was_quantized)
    return plan


def _plan_of_quantized(model: nn.Module, plan: Plan | Recipe | str | None) -> Plan:
    plan = plan or getattr(model, "quantization_plan", None)
    if plan is None:
        raise UserError("the model is quantized already: pass its plan, which quant.quantize returned with it")
    if not isinstance(plan, Plan):
        raise UserError(
            "the model is quantized already, and a recipe is given: leave it out, or start from the original model"
        )
    packed = {name: module for name, module in model.named_modules() if isinstance(module, qat_layers.Packed)}
    if away := next((n for n, module in packed.items() if any(t.is_meta for t in module.buffers(recurse=False))), None):
        raise UserError(
            f"{away}: its weight is offloaded, and training needs it in memory; load the model without offloading"
        )
    if other := packed.keys() ^ {layer.name for layer in plan.quantized}:
        raise UserError(
            f"{min(other)}: the plan and the model disagree on whether it is quantized ({len(other)} layers); pass the "
            "plan that this model was quantized by"
        )
    return plan


def _check_plan(plan: Plan) -> None:
    if plan.attention is not None:
        raise UserError(
            f"the plan has attention in {plan.attention}, which has no gradient; train with a plan without "
            "(attention=None), and choose attention's format when the trained model runs"
        )


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


def _check_optimizers(
    model: nn.Module, before: Mapping[int, tuple[nn.Parameter, torch.dtype]], was_quantized: bool
) -> None:
    """Raises UserError where an optimizer of the parameters that the model had before would not train it right."""
    own = {id(parameter) for parameter in model.parameters()}
    learned = {
        id(module.weight): id(module.range_shift)
        for module in model.modules()
        if isinstance(module, qat_layers.RoundedWeight) and module.range_shift is not None
    }
    for each in callers_model.optimizers_of(before.keys()):
        parameters = {id(parameter): parameter for group in each.param_groups for parameter in group["params"]}
        # Of a model that was quantized before, an optimizer may still hold the weights from before that.
        lost = sum(key not in own and (was_quantized or key in before) for key in parameters)
        lacks = sum(step not in parameters for w, step in learned.items() if w in before and w in parameters)
        narrow = 0
        for key, parameter in parameters.items():
            if key in before and parameter.dtype != before[key][1]:
                states = [s for s in each.state.get(parameter, {}).values() if isinstance(s, Tensor) and s.dim()]
                narrow += any(state.dtype == before[key][1] for state in states)
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


@dataclass(frozen=True)
class Start:
    """The tensors of a model, by layer, from before it was quantized; a model that came quantized has none of its own.

    `rounded` has the values that were rounded to the layers' codes, float32 `[..., out, in]`, where they are known.
    """

    weights: dict[str, nn.Parameter]
    biases: dict[str, nn.Parameter | None]
    rounded: dict[str, Tensor]

    @classmethod
    def of_original(cls, model: nn.Module, plan: Plan) -> Self:
        """Returns the weights and biases of a model in 16 bit, whose solvers will report the values that they round."""
        weights = {layer.name: model.get_parameter(layer.tensor_name) for layer in plan.quantized}
        owners = {layer.name: model.get_submodule(layer.tensor_name.rpartition(".")[0]) for layer in plan.quantized}
        return cls(weights, {name: getattr(owner, "bias", None) for name, owner in owners.items()}, {})


def weights_before_rounding(model: nn.Module, plan: Plan, original: nn.Module) -> dict[str, Tensor]:
    """Returns the values that were rounded to a quantized model's codes, by layer, where the original has them."""
    parameters = dict(original.named_parameters())
    rounded = {}
    with torch.no_grad():
        for layer in plan.quantized:
            packed: Any = model.get_submodule(layer.name)
            parameter = parameters.get(layer.tensor_name)
            if parameter is None or parameter.is_meta or not parameter.is_floating_point():
                continue
            weight = _matrix(layer, packed, parameter.detach())
            if weight.shape != packed.quantized_weight.shape:
                continue
            parts = packed.parts if isinstance(packed, QuantLinear) else RunTimeParts()
            values = before_rounding(packed.quantized_weight, parts, weight)
            if values is not None:
                rounded[layer.name] = values
    return rounded


def before_rounding(packed: BlockScaledTensor, parts: RunTimeParts, original: Tensor) -> Tensor | None:
    """Returns the float32 values that were rounded to `packed`, recovered from the original model's weight.

    They are its values, rotated, with rows and columns scaled as solvers fold scales into them, less the branch. These
    scales are in no file; least squares finds them. None where they came from another weight, as of models whose
    rotations were merged.
    """
    stored = packed.dequantize()
    target = stored if parts.lowrank is None else residual_weight(stored, (parts.lowrank[0], -parts.lowrank[1]))
    weight = rotate_weight(original.to(stored.device, torch.float32), parts.hadamard)
    tiny = torch.finfo(torch.float32).tiny

    def factor(matrix: Tensor, dim: int) -> Tensor:
        return (matrix * target).sum(dim, keepdim=True) / matrix.square().sum(dim, keepdim=True).clamp(min=tiny)

    # Alternating least squares on |target − rows · weight · columns|²: with one side fixed, the best factor of each row
    # or column is ⟨w, t⟩ / ⟨w, w⟩.
    rows, columns = torch.ones_like(weight[..., :1]), torch.ones_like(weight[..., :1, :])
    for _ in range(_TURNS):
        columns = factor(weight * rows, -2)
        rows = factor(weight * columns, -1)
    scaled = weight * rows * columns
    size = target.norm().clamp(min=tiny)
    before, after = (float((each - target).norm() / size) for each in (weight, scaled))
    if not after <= _UNRELATED:  # NaN too
        return None
    # One factor a row and one a column fit about 1/in + 1/out of the squares of pure rounding noise; a gain below four
    # times that is not a scaling by a solver.
    chance = 4 * (1 / weight.shape[-1] + 1 / weight.shape[-2])
    values = weight if before**2 <= after**2 * (1 + chance) else scaled
    return values if parts.lowrank is None else residual_weight(values, parts.lowrank)


def starting_weight(packed: BlockScaledTensor, original: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the weight to train: it rounds to the codes of `packed` under its scales.

    `original` has the values that were rounded; None starts in the middle of each cell.
    """
    middle = packed.dequantize(torch.float32)
    if original is None:
        return middle.to(dtype)
    scale, element = decode(packed.scale, packed.format.scale), packed.format.element
    second = None if packed.global_scale is None else packed.global_scale.float()
    step = weight_steps(scale, second, packed.format, torch.Size(packed.shape))
    codes, grid = packed.element_values(), element.grid().to(step.device)
    if -element.min > element.max:  # INT4, whose lowest value has no positive counterpart
        grid = torch.cat([grid, grid.new_tensor([-element.min])])
    # A code beyond the grid, which other toolkits write in INT8, has the cell of the last; its value is not changed.
    index = torch.searchsorted(grid, codes.abs().contiguous()).clamp(max=len(grid) - 1)
    gaps = (grid[1:] - grid[:-1]) * (_WITHIN / 2)
    # From zero a cell reaches as far down as up, and from the last value nowhere: values beyond it have no gradient.
    below = torch.cat([gaps[:1], gaps])[index]
    above = torch.cat([gaps, gaps.new_zeros(1)])[index] * (codes < element.max)
    sign = torch.where(codes < 0, -1.0, 1.0)
    steps = (original.float() / step * sign).clamp(codes.abs() - below, codes.abs() + above) * sign
    weight = (steps * step).to(dtype)
    # In a narrow dtype the start may have been rounded across the end of its cell.
    return torch.where(round_to(weight.float() / step, element) == codes, weight, middle.to(dtype))


def install_training_layers(
    model: nn.Module, plan: Plan, start: Start, scales: str | None, stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    """Puts layers in training in the place of the quantized ones; takes the values out of `start.rounded`.

    Where the model was in 16 bit before, the layer in training has the original's parameter, so that an optimizer made
    before trains it. `stored` is the dtype of the checkpoint, `dtype` that of weights in training. UserError, before
    any layer is replaced: one would not start as the quantized one.
    """
    refuse_residual(model, "training")
    parameters = {id(parameter) for parameter in model.parameters()}
    installed: dict[str, qat_layers.RoundedWeight] = {}
    for layer in plan.quantized:
        packed: Any = model.get_submodule(layer.name)
        original = start.weights.get(layer.name)
        scale_mode = scales or ("recomputed" if layer.solver == "rtn" and original is not None else "frozen")
        weight_dtype = dtype or (stored if original is None else original.dtype)
        values = _initial_values(layer, packed, start, scale_mode, weight_dtype)
        weight = nn.Parameter(values.contiguous())
        # Another layer has a parameter that is in the model still, and keeps it as it is.
        if original is not None and id(original) not in parameters:
            matrix = _matrix(layer, packed, original.detach())
            # Trained is the original's own shape, which a transposed matrix has not.
            is_whole = matrix.shape == original.shape and matrix.stride() == original.stride()
            if is_whole or isinstance(packed, QuantConv):
                # The Parameter stays the same object: an optimizer that was made before holds it, and goes on.
                if original.dtype != values.dtype:
                    original.grad = None  # of the dtype that it had
                original.data, weight = values, original
        installed[layer.name] = _in_training(packed, weight, start.biases.get(layer.name), scale_mode, stored)
    for group in groups_by_input(plan.quantized):
        # Fused layers share one global scale, or their only scale.
        members = [installed[member.name] for member in group]
        fusion = qat_layers.Fusion(members)
        for member in members:
            member.fusion = fusion
            if member is not members[0] and member.weight_format.per_tensor:
                # One parameter in one place: safetensors write no tensor under two names.
                member.range_shift = member.start_step = None
    for layer in plan.quantized:
        _check_start(layer, model.get_submodule(layer.name), installed[layer.name])
    # All checks come first: where a layer is refused, none has been replaced.
    for name, module in installed.items():
        qat_layers.put_layer(model, name, module)


def _initial_values(layer: LayerPlan, packed: Any, start: Start, scales: str, dtype: torch.dtype) -> Tensor:
    original = start.weights.get(layer.name)
    values = None if original is None else _matrix(layer, packed, original.detach())
    if scales != "recomputed" or original is not None:  # from a guess other scales might be measured
        # `pop`, because these are float32 copies: a whole model of them need not last until the last layer is made.
        values = start.rounded.pop(layer.name, values)
    with torch.no_grad():
        if scales == "recomputed" and values is not None:
            matrix = values.to(dtype)
        else:
            matrix = starting_weight(packed.quantized_weight, values, dtype)
    if isinstance(packed, QuantConv):
        return conv_parameter(matrix, packed.codes.shape, packed.groups, packed.transposed)
    return matrix


def _matrix(layer: LayerPlan, packed: Any, parameter: Tensor) -> Tensor:
    if isinstance(packed, QuantExperts):
        return packed.stacking.matrices(parameter)
    if isinstance(packed, QuantConv):
        return conv_matrix(parameter, packed.groups, packed.transposed)
    return parameter.t() if layer.transposed else parameter


def _in_training(
    packed: Any, weight: nn.Parameter, bias: nn.Parameter | None, scales: str, stored: torch.dtype
) -> qat_layers.RoundedWeight:
    if isinstance(packed, QuantExperts):
        return qat_layers.QATExperts(weight, packed, scales, stored)
    if isinstance(packed, QuantEmbedding):
        return qat_layers.QATEmbedding(weight, packed, scales, stored)
    if packed.bias is not None and bias is not None:
        bias.data = packed.bias.data
    elif packed.bias is not None:
        bias = nn.Parameter(packed.bias.detach())
    return (qat_layers.QATConv if isinstance(packed, QuantConv) else qat_layers.QATLinear)(
        weight, packed, bias, scales, stored
    )


def _check_start(layer: LayerPlan, packed: Any, module: qat_layers.RoundedWeight) -> None:
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


_MANY = 1e-3  # the share of clipped inputs from which `pack` warns


@in_own_modes
def pack(model: nn.Module) -> Plan:
    """Packs a model that was trained by `prepare_qat` or `to_low_precision_training`; changes it in place.

    Its layers become quantized ones, such as `QuantLinear`. The packed model's outputs equal those of the trained model
    in eval mode, bit for bit where both run the reference arithmetic, so this changes no loss that was evaluated. It
    saves, exports and runs as any quantized model does.

    Static input scales of low-precision training come from the inputs of all ranks, as of the last optimizer's step.

    Args:
        model: the model after training. Wrappers (DDP, torch.compile) are looked through.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: the model is not in training, a weight is sharded or no longer
            finite, adapters are on layers, or no step has recorded the inputs of a layer that needs a static scale.
    """
    model = unwrapped(model, "pack")
    rounded = {name: module for name, module in model.named_modules() if isinstance(module, qat_layers.RoundedWeight)}
    layers = trained_layers(model)
    if rounded and hasattr(model, qat_layers.PLAN):
        plan = _pack_rounded(model, rounded)
    elif layers:
        plan = _pack_low_precision(model, layers)
    else:
        raise UserError(
            "the model is not in training: call quant.prepare_qat or quant.to_low_precision_training, and train it "
            "first; quant.quantize packs a model without training"
        )
    plan = plan_of_model(model, plan)
    attach(model, plan)
    # What is measured under accelerate's autocast is not the saved model.
    if "_original_forward" in vars(model) and "forward" in vars(model):
        dtype = next(model.parameters()).dtype
        warn(
            "accelerate runs this model under autocast, as Trainer(bf16=True) asks for, and its eval_loss was measured "
            f"so; the saved model computes in {str(dtype).removeprefix('torch.')}, the dtype of its parameters. To "
            "measure that one, take autocast off: accelerate.utils.extract_model_from_parallel(model, "
            "keep_fp32_wrapper=False)"
        )
    return plan


def _pack_rounded(model: nn.Module, layers: Mapping[str, qat_layers.RoundedWeight]) -> Plan:
    for name, module in layers.items():
        _refuse_partial(name, module, "it into a model prepared in the same way, and pack that")
        for key, parameter in module.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise UserError(f"{name}: training made NaN or infinity of its {key}; lower the learning rate")
    _warn_of_clipped_inputs(layers)
    # All of them before any is installed: scales that are shared depend on the others' weights.
    packed = {name: module.packed() for name, module in layers.items()}  # type: ignore[operator]
    for name, new in packed.items():
        qat_layers.put_layer(model, name, new)
    plan: Plan = getattr(model, qat_layers.PLAN)
    delattr(model, qat_layers.PLAN)
    GradientWatch.end(model)
    return plan


def _warn_of_clipped_inputs(layers: Mapping[str, qat_layers.RoundedWeight]) -> None:
    """Warns of layers whose inputs left the range of their static input scale while they trained."""
    clipped = sorted(((module.inputs.share, name) for name, module in layers.items()), reverse=True)
    many = [name for share, name in clipped if share > _MANY]
    if many:
        share, name = clipped[0]
        also = f" ({counted(len(many) - 1, 'other layer')} above {_MANY:.1%} too)" if len(many) > 1 else ""
        warn(
            f"{name}: {share:.1%} of its inputs in training were beyond the range of its static input scale, and were "
            f"clipped{also}; prepare_qat(track_inputs=100) has the scales follow the first 100 passes"
        )
    followers = [m.inputs for m in layers.values() if m.inputs.follows and m.input_scale is not None]
    if followers and not any(inputs.passes for inputs in followers):
        warn(
            f"track_inputs={followers[0].follows}: no static input scale has followed an input, because the model was "
            "not trained in this process, or compiled; compile it after the first passes"
        )


def _pack_low_precision(model: nn.Module, layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> Plan:
    recipes = {name: layer.low_precision.recipe for name, layer in layers.items()}
    # Everything that can fail comes before the first change.
    weights, scales = {}, {}
    for name, layer in layers.items():
        reload = "it and the state_dict of the report into a model converted in the same way, and pack that"
        _refuse_partial(name, layer, reload)
        if layer.weight.is_meta:
            raise UserError(f"{name}: its weight is on the meta device and has no values; load them first")
    for name, layer in layers.items():
        state = layer.low_precision
        weights[name] = layer.packed() if isinstance(layer, LowPrecisionStack) else packed_weight(layer.weight, state)
        scale = input_scale(state, layer.weight.dtype)
        scales[name] = None if scale is None else scale.to(layer.weight.device)
    _warn_of_unreached_experts(layers)
    if (first := unagreed(layers)) is not None:
        warn(
            f"{first}: this rank has recorded inputs since ranks last agreed on the largest; if other ranks train this "
            "layer too, call quant.training_report(model).reduce_amax() on all of them before they pack"
        )
    # Planning runs the model on a stand-in input, for which plain layers will do. It gives the same plan as at
    # conversion, when the layers were chosen and grouped by it.
    to_plain_layers(model)
    plan = plan_of_recipes(model, recipes)
    for lost in (layer for layer in plan.layers if layer.name in layers and layer.weight is None):
        warn(f"{lost.name}: trained in {recipes[lost.name].name}, and the packed model has it in 16 bit: {lost.reason}")
    reasons = {name: f"codes and scales of training in {recipe.name}" for name, recipe in recipes.items()}
    plan = plan.replace_layers(replace(layer, reason=reasons[layer.name]) for layer in plan.quantized)
    for planned in plan.quantized:
        install_weight(model, planned, weights[planned.name], scales[planned.name])
    use_expert_modules(model, plan)
    mark_quantized(model)
    return plan


def _warn_of_unreached_experts(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    names = []
    for name, layer in layers.items():
        state, activation = layer.low_precision, deployed_input(layer.low_precision.recipe)
        is_static = activation is not None and activation.is_static
        names += [name] * (is_static and all(each.low_precision.amax["x"].is_empty for each in state.group))
    if names:
        warn(
            f"{names[0]}: the router sent this expert no token in training; its static input scale is that of the "
            f"largest input of its siblings ({counted(len(names), 'such layer')})"
        )


def _refuse_partial(name: str, module: nn.Module, reload: str) -> None:
    """Raises UserError where packing a trained layer would lose its adapter or mask, or pack one process's shard of it.

    The message ends with the user's next step with the gathered state: to load what `reload` says.
    """
    # PEFT keeps the module that it wraps under this name. Packing a layer in it would lose the adapter.
    if "base_layer" in name.split("."):
        raise UserError(
            f"{name}: an adapter is on this layer; merge it first, and pack what that returns: "
            "quant.pack(model.merge_and_unload())"
        )
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and "weight" not in module._parameters:
        raise UserError(
            f"{name}: its weight is computed from other parameters (pruning, a parametrization); make it a parameter "
            "first, with torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
        )
    # Only a DTensor has this method; FSDP2 shards parameters as DTensors, and FSDP's first version as vectors.
    if hasattr(module.weight, "full_tensor") or module.weight.dim() == 1:
        raise UserError(
            f"{name}: its weight is sharded (FSDP); gather the state with torch.distributed.checkpoint.state_dict."
            f"get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load {reload}"
        )
