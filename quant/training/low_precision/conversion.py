"""`to_low_precision_training` puts rounded products into a model's linear layers, and `from_…` takes them out again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted
from quant.export.checkpoint.files.write_tensors import plan_of_model
from quant.export.checkpoint.pretrained import attach
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.install import call_encoder_layers, install_weight, mark_quantized, use_expert_modules
from quant.kernels.training.grouped_fp8 import has_grouped_fp8
from quant.recipes.blocks import block_names
from quant.recipes.callers_model import inner_model, refuse_opaque_modules, refuse_partial_layer, unwrapped
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import Plan, groups_of
from quant.recipes.plan_make import grouped_layers, make_plan
from quant.recipes.recipe import matched, no_match
from quant.training.low_precision.all_gather import check_gather_in_fp8, gather_in_16bit, gather_in_fp8
from quant.training.low_precision.attention import attend_in_16bit, attend_in_fp8, check_attention
from quant.training.low_precision.backends import Backend, choose_backend, is_too_small
from quant.training.low_precision.fused_experts_training import (
    LowPrecisionStack,
    convert_experts,
    experts_refusal,
    restore_experts,
    trained_layers,
)
from quant.training.low_precision.gated_mlp import fuse_gated_mlps, restore_gated_mlps
from quant.training.low_precision.grouped_experts import has_rows, takes_experts
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.native import is_rowwise
from quant.training.low_precision.nonfinite import GradientWatch, nonfinite_line
from quant.training.low_precision.packed import deployed_input, input_scale, packed_weight, stored_format
from quant.training.low_precision.state import LowPrecision, trainer_callback
from quant.training.low_precision.te_products import ForwardContext
from quant.training.low_precision.training_recipe import TrainingRecipe, get_training_recipe
from quant.training.rounding.rms_norm import restore_rms_norms, trace_rms_norms
from quant.training.rounding.rounded_weight import RoundedWeight

# `reasons_to_keep` says which layers stay in 16 bit when a model is converted to low-precision training, and why.


def reasons_to_keep(
    model: nn.Module, layers: Sequence[Layer], recipe: TrainingRecipe, include: Sequence[str], exclude: Sequence[str]
) -> dict[str, str]:
    """Returns why linear layers and parameters of fused experts stay in 16 bit, by name; a plan has further reasons.

    Args:
        model: the model.
        layers: its layers, as a run has seen them.
        recipe: names the blocks at the ends that stay in 16 bit, and the sizes that a layer may have.
        include, exclude: globs of the caller.

    Raises:
        UserError: a glob that matches no module.
    """
    names_of_experts = [layer.name for layer in layers if layer.kind == LayerKind.EXPERTS]
    by_globs = _reasons_of_globs(model, names_of_experts, include, exclude)
    reasons = _reasons_of_linears(model, recipe, by_globs, takes_head=bool(include))
    bypassed = [layer.name for layer in layers if layer.is_bypassed and layer.name not in reasons]
    reasons |= dict.fromkeys(bypassed, "its module multiplies by the weight itself, and would not round that product")
    return reasons | _reasons_of_experts(model, recipe, by_globs, names_of_experts)


def _reasons_of_globs(
    model: nn.Module, names_of_experts: Sequence[str], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, str]:
    """Returns which layers the caller leaves in 16 bit, and by which argument, by name.

    Raises:
        UserError: a glob that matches no module.
    """
    names = [*(name for name, module in model.named_modules() if _is_linear(module)), *names_of_experts]
    all_names = {*names, *(name for name, _ in model.named_modules())}
    for argument, globs in (("include", include), ("exclude", exclude)):
        unknown = next((glob for glob in globs if not matched(glob, all_names)), None)
        if unknown is not None:
            raise UserError(f"{argument}: {no_match(unknown, names)}")
    excluded, included = matched(exclude, names), matched(include or "*", names)
    return {name: "not included" for name in names if name not in included} | dict.fromkeys(excluded, "excluded")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's transposed linear


def _reasons_of_linears(
    model: nn.Module, recipe: TrainingRecipe, by_globs: Mapping[str, str], *, takes_head: bool
) -> dict[str, str]:
    """Returns why linear layers stay in 16 bit, by name; the plan has reasons for others.

    Args:
        model: the model.
        recipe: names the blocks at the ends that stay in 16 bit, and the sizes that a layer may have.
        by_globs: the caller's reasons by the names of layers.
        takes_head: whether the output head is converted as any other layer.
    """
    # transformers knows the head by its purpose, whatever the name.
    embeddings = getattr(model, "get_output_embeddings", None)
    head = embeddings() if callable(embeddings) else None
    ends = _blocks_at_the_ends(model, recipe)
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_linear(module):
            continue
        reason = by_globs.get(name) or _reason_at_the_ends(name, recipe, ends)
        if "weight" not in module._parameters:  # of a norm of weights, a parametrization, pruning
            reasons[name] = reason or "its weight is computed from other parameters"
            continue
        # Tensor cores load 16 bytes at a time along either axis, and blocks must not be cut in any of the products.
        size = next((size for size in module.weight.shape if size % recipe.multiple), None)
        if type(module) is not nn.Linear:
            reason = f"a {type(module).__name__} computes in a way of its own"
        # `include` lifts the rule for the head: whoever names layers means them.
        elif reason is None and module is head and not takes_head:
            reason = "the output head, whose gradients are the most sensitive; name it in include to convert it"
        elif reason is None and size is not None:
            reason = f"{list(module.weight.shape)}: {recipe.name} needs sizes that are multiples of {recipe.multiple}"
        if reason is not None:
            reasons[name] = reason
    return reasons


def _reason_at_the_ends(name: str, recipe: TrainingRecipe, ends: Sequence[str]) -> str | None:
    """Returns why a layer in one of the blocks `ends` stays in 16 bit; None if it is in another block."""
    if not any(name.startswith(f"{block}.") for block in ends):
        return None
    return f"{recipe.name} keeps the first {recipe.first_layers} and last {recipe.last_layers} blocks"


def _reasons_of_experts(
    model: nn.Module, recipe: TrainingRecipe, by_globs: Mapping[str, str], names: Sequence[str]
) -> dict[str, str]:
    """Returns why parameters of fused experts stay in 16 bit, by name."""
    ends = _blocks_at_the_ends(model, recipe)
    reasons = {
        name: by_globs.get(name) or _reason_at_the_ends(name, recipe, ends) or experts_refusal(model, name, recipe)
        for name in names
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _blocks_at_the_ends(model: nn.Module, recipe: TrainingRecipe) -> list[str]:
    """Returns the names of the repeated blocks that the recipe leaves in 16 bit."""
    if not recipe.first_layers and not recipe.last_layers:
        return []
    blocks = block_names(model)
    return [*blocks[: recipe.first_layers], *blocks[len(blocks) - recipe.last_layers :]]


# `LowPrecisionTraining` reports what low-precision training changed, and keeps its state for checkpoints.


_RECIPE = "recipe"  # key of the name in a report's state


@dataclass(frozen=True, eq=False)
class LowPrecisionTraining:
    """The changes that `to_low_precision_training` made.

    Attributes:
        recipe: that the layers follow.
        backend: that computes the products: "emulated", "native", "torchao" or "te".
        note: how this machine runs the recipe, for the log.
        converted: names of the layers whose products are rounded.
        in_16bit: layers that stay as they were, with the reason, by name.
        model: that was converted.
        attention: how attention is computed; None where it was left as it was.
        too_small: converted layers that are too small to gain time, with the sizes of their weights.
    """

    recipe: TrainingRecipe
    backend: str
    note: str
    converted: tuple[str, ...]
    in_16bit: Mapping[str, str]
    model: nn.Module
    attention: str | None = None
    too_small: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def at(self, share: float) -> None:
        """Says how far training is, as a share of all steps; the recipe's schedule may end the forward's rounding.

        Raises:
            UserError: the share is not between 0 and 1, as the number of a step is not.
        """
        if not 0 <= share <= 1:
            raise UserError(f"report.at({share!r}): the share of training that is done is from 0 to 1: step / steps")
        begin = self.recipe.schedule.bf16_forward_from
        for state in self._states().values():
            state.rounds_forward = share < begin or begin == 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the histories of largest magnitudes for a checkpoint; the model's own keys stay as in plain layers.

        And the recipe's name in bytes, for plain weights show none.
        """
        name_of_recipe = torch.tensor(list(self.recipe.name.encode()), dtype=torch.uint8)
        return {_RECIPE: name_of_recipe} | {
            f"{name}.amax.{operand}": history.values.clone()
            for name, state in self._states().items()
            for operand, history in state.amax.items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on with the histories of a checkpoint.

        Raises:
            UserError: they are of other layers or of another recipe.
        """
        saved = state.get(_RECIPE)
        name_of_recipe = self.recipe.name if saved is None else bytes(saved.tolist()).decode(errors="replace")
        if name_of_recipe != self.recipe.name:
            raise UserError(
                f"the checkpoint was trained in {name_of_recipe}, and this model trains in {self.recipe.name}: convert "
                f'it with quant.to_low_precision_training(model, "{name_of_recipe}"), or leave out the state of the '
                "report to go on in another recipe"
            )
        state = {name: values for name, values in state.items() if name != _RECIPE}
        own = {name: values for name, values in self.state_dict().items() if name != _RECIPE}
        if differing := sorted(own.keys() ^ state.keys()):
            raise UserError(
                f"{differing[0]}: the histories and the model disagree on the layers that train in low precision "
                f"({counted(len(differing), 'difference')}); convert the model as it was when they were saved"
            )
        for name, values in state.items():
            if values.shape != own[name].shape:
                raise UserError(
                    f"{name}: the histories remember {len(values)} steps, and {self.recipe.name} {len(own[name])}: "
                    "convert the model with a recipe of that history"
                )
        for name, layer in self._states().items():
            for operand, history in layer.amax.items():
                history.values = state[f"{name}.amax.{operand}"].clone()
        GradientWatch.resumed(self.model)

    def trainer_callback(self) -> Any:
        """Returns a callback for transformers' Trainer, whose checkpoints then have the histories, too.

        `Trainer(model, arguments, callbacks=[report.trainer_callback()])` saves them. It loads them when it resumes,
        and at the end with the best checkpoint, if it loads that (`load_best_model_at_end`).
        """
        return trainer_callback(self)

    def nonfinite(self) -> str | None:
        """Says where NaN or infinity came into the present gradients; None where all are finite.

        For training with a loss scaler, which leaves such steps out without a word.
        """
        return nonfinite_line(self.model, trained_layers(self.model))

    def _states(self) -> dict[str, LowPrecision]:
        layers = trained_layers(self.model)
        return {name: layers[name].low_precision for name in self.converted if name in layers}

    def __str__(self) -> str:
        """Returns a line for the log, and one for each reason."""
        lines = [f"{counted(len(self.converted), 'layer')} in {self.recipe.name}: {self.note}"]
        lines += [] if self.attention is None else [f"attention: {self.attention}"]
        if self.too_small:
            name, size = next(iter(self.too_small.items()))
            lines.append(
                f"no faster than in 16 bit: {counted(len(self.too_small), 'layer')}, {name} first: {list(size)} is too "
                "small to gain from FP8; exclude= leaves such layers in 16 bit, in the deployed model, too"
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.in_16bit.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"in 16 bit: {counted(len(n), 'layer')}, {n[0]} first: {reason}" for reason, n in reasons.items()]
        return "\n".join(lines)


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


# `convert_trained` packs a model that was trained in low precision, with the codes and scales of its training.
#
# No data is read: see `packed.py`. The packed model computes what the model in eval mode computed, bit for bit.


def convert_trained(model: nn.Module) -> Plan:
    """Packs the layers of a model in low-precision training; changes the model in place.

    A model in eval mode has the packed model's outputs, bit for bit, so this changes no loss that was evaluated. After
    DDP, a static input scale comes from the inputs of the rank that converts.

    Args:
        model: as `to_low_precision_training` left it, after training. Wrappers (DDP, torch.compile) are looked through.

    Returns:
        The plan, for `quant.save` and every exporter.

    Raises:
        UserError: no layer trains in low precision, layers follow several recipes, a weight is sharded or not finite,
            adapters are on layers, or no step has recorded the inputs of a layer that needs a static scale.
    """
    model = unwrapped(model, "convert_trained")
    layers = trained_layers(model)
    _check(layers)
    recipe = next(iter(layers.values())).low_precision.recipe
    preset = stored_format(recipe).name
    # Everything that can fail comes before the first change.
    weights = {name: _packed(layer) for name, layer in layers.items()}
    scales = {name: _input_scale(layer) for name, layer in layers.items()}
    _warn_of_unreached_experts(layers)
    # Planning runs the model on a stand-in input, for which plain layers will do.
    from_low_precision_training(model)
    # The same plan as at conversion, when the layers were chosen and grouped by it.
    plan = make_plan(model, preset, include=list(layers), solver="rtn")
    reason = f"codes and scales of training in {recipe.name}"
    plan = plan.replace_layers(replace(layer, reason=reason) for layer in plan.quantized)
    for layer in plan.quantized:
        install_weight(model, layer, weights[layer.name], scales[layer.name])
    use_expert_modules(model, plan)
    mark_quantized(model)
    plan = plan_of_model(model, plan)
    attach(model, plan)
    return plan


def _check(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    if not layers:
        raise UserError("no layer of the model trains in low precision: call quant.to_low_precision_training first")
    recipes = {layer.low_precision.recipe for layer in layers.values()}
    if len(recipes) > 1:
        names = ", ".join(sorted(recipe.name for recipe in recipes))
        raise UserError(f"the layers of the model train in several recipes ({names}), and a model is packed from one")
    for name, layer in layers.items():
        reload = "load it and the state_dict of the report into a model converted in the same way, and pack that"
        refuse_partial_layer(name, layer.weight, "quant.convert_trained", reload)
        if layer.weight.is_meta:
            raise UserError(f"{name}: its weight is on the meta device and has no values; load them first")
        if isinstance(layer, LowPrecisionLinear) and "weight" not in layer._parameters:
            raise UserError(
                f"{name}: its weight is computed from other parameters (pruning, a parametrization); make it a "
                "parameter first, with torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
            )


def _warn_of_unreached_experts(layers: Mapping[str, LowPrecisionLinear | LowPrecisionStack]) -> None:
    states = {name: layer.low_precision for name, layer in layers.items()}
    activation = deployed_input(next(iter(states.values())).recipe)
    if activation is None or not activation.is_static:
        return
    names = [name for name, s in states.items() if all(each.low_precision.amax["x"].is_empty for each in s.group)]
    if names:
        warnings.warn(
            f"{names[0]}: the router sent this expert no token in training; its static input scale is that of the "
            f"largest input of its siblings ({counted(len(names), 'such layer')})",
            stacklevel=3,
        )


def _packed(layer: LowPrecisionLinear | LowPrecisionStack) -> BlockScaledTensor:
    return layer.packed() if isinstance(layer, LowPrecisionStack) else packed_weight(layer.weight, layer.low_precision)


def _input_scale(layer: LowPrecisionLinear | LowPrecisionStack) -> torch.Tensor | None:
    scale = input_scale(layer.low_precision, layer.weight.dtype)
    return None if scale is None else scale.to(layer.weight.device)
