"""`to_low_precision_training` puts rounded products into a model's linear layers, and `from_…` takes them out again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.execution.encoder_layers import call_encoder_layers
from quant.kernels.training.grouped_fp8 import has_grouped_fp8
from quant.recipes.callers_model import inner_model, refuse_opaque_modules, unwrapped
from quant.recipes.plan_make import grouped_layers, make_plan
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import Plan, groups_of
from quant.training.low_precision.attention import attend_in_16bit, attend_in_fp8, check_attention
from quant.training.low_precision.all_gather import check_gather_in_fp8, gather_in_16bit, gather_in_fp8
from quant.training.low_precision.backends import Backend, choose_backend, is_too_small
from quant.training.low_precision.conversion.kept_layers import reasons_to_keep
from quant.training.low_precision.conversion.report import LowPrecisionTraining
from quant.training.low_precision.fused_experts_training import convert_experts, restore_experts, trained_layers
from quant.training.low_precision.gated_mlp import fuse_gated_mlps, restore_gated_mlps
from quant.training.low_precision.grouped_experts import has_rows, takes_experts
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.native import is_rowwise
from quant.training.low_precision.nonfinite import GradientWatch
from quant.training.low_precision.packed import stored_format
from quant.training.low_precision.training_recipe import TrainingRecipe, get_training_recipe
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.te_products import ForwardContext
from quant.training.rounding.rms_norm import restore_rms_norms, trace_rms_norms
from quant.training.rounding.rounded_weight import RoundedWeight


def to_low_precision_training(
    model: nn.Module,
    recipe: str | TrainingRecipe = "fp8_rowwise",
    *,
    backend: str = "auto",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    on_nonfinite: str = "stop",
    all_gather_fp8: bool = False,
    attention: str = "16bit",
) -> LowPrecisionTraining:
    """Has the linear layers and fused experts of a model train in low precision; changes the model in place.

    State-dict keys, parameters, hooks, tied weights and optimizers stay as they are. Call it before `torch.compile`,
    DDP or FSDP2 wrap the model.

    Args:
        model: any module with `nn.Linear` layers.
        recipe: a name of `RECIPES`, such as "fp8_rowwise", "mxfp8" or "nvfp4", or a recipe of your own.
        backend: "emulated" rounds the operands and multiplies in BF16, or in FP32 on a CPU: the numbers of hardware
            that has the format, on any device. The others multiply on tensor cores: "native" runs `fp8_block`
            and rowwise FP8 on Hopper, "torchao" tensorwise and rowwise FP8 on an H100 or newer, "te" the recipes of
            Transformer Engine, MXFP8 and NVFP4 on Blackwell. "auto" takes the fastest that is installed and runs the
            recipe.
        include: globs; if given, only layers that match one are converted.
        exclude: globs of layers that stay as they are.
        on_nonfinite: at an optimizer's step, gradients with NaN or infinity "stop" training with an error that names
            the layer, or "skip" the step with a warning. A GradScaler's steps are left to it: it skips them itself.
        all_gather_fp8: FSDP2, which shards the model afterwards, gathers weights of `fp8_block` as FP8 codes, with half
            the bytes of BF16 and the same values. Weights become new parameters: make the optimizer after FSDP2.
        attention: "fp8" rounds Q, K, V and P of a transformers model to E4M3 in the forward pass of training; gradients
            are computed in 16 bit, and so is attention in eval mode.

    Returns:
        Its text says which layers train in which format, and why others do not.

    Raises:
        UserError: an unknown recipe, backend, action or attention; attention that FP8 does not take; a model on the
            meta device, quantized, prepared for QAT or converted already; no layer that can be converted. The message
            names the way out.
    """
    try:
        recipe = get_training_recipe(recipe)
    except ValueError as error:
        raise UserError(str(error)) from None
    include, exclude = ([globs] if isinstance(globs, str) else globs for globs in (include, exclude))
    model = unwrapped(model, "to_low_precision_training")
    _check_model(model)
    chosen = choose_backend(backend, recipe, next(model.parameters(), torch.empty(0)))
    watch = GradientWatch(on_nonfinite)
    check_attention(model, attention)
    if all_gather_fp8:
        check_gather_in_fp8(model, recipe)
    layers, _ = grouped_layers(model, None)
    names_of_experts = [layer.name for layer in layers if layer.kind == LayerKind.EXPERTS]
    reasons = reasons_to_keep(model, layers, recipe, include, exclude)
    linears: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # Planned as it will be deployed: a layer that no runtime would take, or whose merged sibling stays in 16 bit, would
    # be trained in a format in vain.
    candidates = [name for name in (*linears, *names_of_experts) if name not in reasons]
    plan = _plan(model, recipe, candidates) if candidates else Plan(())
    planned = {layer.name: layer for layer in plan.layers}
    reasons |= {name: planned[name].reason for name in candidates if planned[name].weight is None}
    converted = tuple(name for name in candidates if name not in reasons)
    if not converted:
        first = next(iter(reasons.items()), None)
        reason = f"{first[0]}: {first[1]}" if first else f"{type(model).__name__} has no nn.Linear"
        raise UserError(f"no layer can train in {recipe.name}: {reason}")
    call_encoder_layers(model)
    of_attention = attend_in_fp8(model) if attention == "fp8" else None
    _convert_linears({name: linears[name] for name in converted if name in linears}, recipe, chosen, plan)
    # torchao and Transformer Engine have a module for each matrix, and no products of experts.
    of_experts = chosen.products() if chosen.products is not None and chosen.name == "native" else None
    in_fp8 = chosen.name != "emulated"
    experts = [name for name in names_of_experts if name in converted]
    convert_experts(model, experts, recipe, of_experts, in_fp8)
    watch.start(model)
    if all_gather_fp8:
        gather_in_fp8(model)
    if chosen.name == "te":
        ForwardContext(recipe).start(model)
    if chosen.name == "native" and not is_rowwise(recipe):
        fuse_gated_mlps(model)
        trace_rms_norms(model)
    small = {
        name: tuple(linears[name].weight.shape)
        for name in converted
        if name in linears and is_too_small(chosen.name, [each.weight for each in linears[name].low_precision.group])
    }
    note = chosen.note + _note_of_experts(model, recipe, in_fp8, experts)
    return LowPrecisionTraining(recipe, chosen.name, note, converted, reasons, model, of_attention, small)


def _note_of_experts(model: nn.Module, recipe: TrainingRecipe, in_fp8: bool, experts: Sequence[str]) -> str:
    """Returns how a GPU runs fused experts, for the log; nothing where there are none."""
    if not experts or not model.get_parameter(experts[0]).is_cuda:
        return ""
    if takes_experts(model.get_submodule(experts[0].rpartition(".")[0]), recipe):
        if in_fp8 and has_rows(recipe) and has_grouped_fp8(model.get_parameter(experts[0])):
            return "; fused experts by grouped FP8 products"
        return "; fused experts by grouped BF16 products of rounded operands"
    return "; fused experts one after another, which is slow where they are many"


def from_low_precision_training(model: nn.Module) -> None:
    """Gives the layers of a model in low-precision training their plain class again; weights stay as trained."""
    model = inner_model(model)
    GradientWatch.end(model)
    ForwardContext.end(model)
    restore_gated_mlps(model)
    restore_rms_norms(model)
    attend_in_16bit(model)
    gather_in_16bit(model)
    for layer in trained_layers(model).values():
        if isinstance(layer, LowPrecisionLinear):
            del layer.low_precision
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    restore_experts(model)


def _check_model(model: nn.Module) -> None:
    refuse_opaque_modules(model, "to_low_precision_training")
    for name, layer in trained_layers(model).items():
        raise UserError(
            f"{name}: the model trains in {layer.low_precision.recipe.name} already; call "
            "quant.from_low_precision_training(model) first"
        )
    for name, module in model.named_modules():
        if isinstance(module, RoundedWeight):
            raise UserError(
                f"{name}: the model is prepared for QAT, which rounds its weights itself; finish that with "
                "quant.convert_qat(model), or start from the original model"
            )
        if hasattr(module, "base_layer"):
            raise UserError(
                f"{name}: an adapter is on this layer; convert the model first and put adapters on it then; "
                "their products stay in 16 bit"
            )
        if hasattr(type(module), "quantized_weight"):
            raise UserError(
                f"{name}: the model is quantized already, and its codes do not train; start from the original model, "
                "or put adapters on this one with quant.lora"
            )
    # A DTensor of FSDP2 or tensor parallelism has `full_tensor`.
    sharded = next((name for name, parameter in model.named_parameters() if hasattr(parameter, "full_tensor")), None)
    if sharded is not None:
        raise UserError(
            f"{sharded} is sharded already, and layers are chosen and grouped by whole weights; convert the model "
            "first, then call fully_shard or parallelize_module"
        )
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise UserError(f"{meta} is on the meta device and has no values; load the weights first")


def _convert_linears(linears: Mapping[str, Any], recipe: TrainingRecipe, backend: Backend, plan: Plan) -> None:
    """Gives linear layers, by name, the class of low-precision training, and links layers that share a scale."""
    for name, linear in linears.items():
        # A new module would lose hooks and attributes, and break the ties of whoever holds the old one.
        linear.__class__ = LowPrecisionLinear
        products = None if backend.products is None else backend.products()
        linear.low_precision = LowPrecision(name, recipe, [linear], products=products)
    # Runtimes multiply merged weights under one second-level scale, so training scales them by their common amax.
    for group in groups_of(plan.quantized).values():
        members = [linears[layer.name] for layer in group if layer.name in linears]
        for member in members:
            member.low_precision.group = members
    for members in _sibling_experts(linears):
        for member in members:
            member.low_precision.siblings = members


def _sibling_experts(linears: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the same layer of all experts of a mixture that is a list of modules, such as `experts.#.up_proj`."""
    siblings: dict[str, list[Any]] = {}
    for name, linear in linears.items():
        pattern = re.sub(r"experts\.\d+\.", "experts.#.", name)
        if pattern != name:
            siblings.setdefault(pattern, []).append(linear)
    return list(siblings.values())


def _plan(model: nn.Module, recipe: TrainingRecipe, layers: Sequence[str]) -> Plan:
    """Returns the plan by which these layers will be deployed, with the layers grouped that a runtime merges."""
    try:
        plan = make_plan(model, stored_format(recipe).name, include=layers, solver="rtn")
    except ValueError as error:
        raise UserError(f"no layer can train in {recipe.name}: {error}") from None
    return plan
