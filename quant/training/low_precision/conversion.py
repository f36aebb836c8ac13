"""`to_low_precision_training` puts rounded products into a model's layers, and says which layers stay in 16 bit.

The `LowPrecisionTraining` that it returns keeps the histories of the largest magnitudes for checkpoints. A Trainer of
transformers keeps them in `trainer_state.json`, as it does with the states of its callbacks: a compressed safetensors
file in base64, which it reads from whichever folder it resumes.
"""

import base64
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, require
from quant.base.torch_modes import in_own_modes
from quant.kernels.linear.install import call_encoder_layers
from quant.kernels.training.grouped_fp8 import has_grouped_fp8
from quant.recipes.blocks import block_names
from quant.recipes.callers_model import check_original, inner_model, unwrapped, warn_of_shared_weights
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import Plan, groups_of
from quant.recipes.plan_make import grouped_layers, make_plan
from quant.recipes.recipe import Recipe, Rule, get_recipe, matched, no_match
from quant.training.low_precision.all_gather import check_gather_in_fp8, set_gather
from quant.training.low_precision.attention import attend_in_16bit, attend_in_fp8, check_attention
from quant.training.low_precision.backends import (
    Backend,
    ForwardContext,
    choose_backend,
    has_rows,
    is_rowwise,
    is_too_small,
)
from quant.training.low_precision.fused_experts_training import (
    convert_experts,
    experts_refusal,
    restore_experts,
    takes_experts,
    trained_layers,
)
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.native_fusions import fuse_gated_mlps, restore_forwards, trace_rms_norms
from quant.training.low_precision.nonfinite import GradientWatch, nonfinite_line
from quant.training.low_precision.state import LowPrecision, reduce_amax, stored_format
from quant.training.low_precision.training_recipe import TrainingRecipe, get_training_recipe

_RECIPE = "recipe"  # key of the name in a report's state
_ATTRIBUTE = "_low_precision_report"  # of a model, the report without the model
_DTYPES = "weight_dtypes"  # key of the dtypes that weights trained in, bytes `[layers, 8]`; earlier states lack it


@dataclass(frozen=True, eq=False)
class LowPrecisionTraining:
    """The changes that `to_low_precision_training` made."""

    recipe: TrainingRecipe  # of the first converted layer, and of all unless the call gave recipes by layer
    backend: str  # that computes its products: "emulated", "native", "torchao" or "te"
    notes: Mapping[str, str]  # how this machine runs each recipe, by its name, for the log
    converted: tuple[str, ...]  # names of the layers whose products are rounded
    in_16bit: Mapping[str, str]  # layers that stay as they were, with the reason, by name
    model: nn.Module
    attention: str | None = None  # how it is computed; None where it was left as it was
    # Converted layers that are too small to gain time, with the sizes of their weights.
    too_small: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """How this machine runs the recipes."""
        return "; ".join(self.notes.values())

    def at(self, share: float) -> None:
        """Says what share of all steps is done, from 0 to 1; the recipe's schedule may end the forward's rounding."""
        if not 0 <= share <= 1:
            raise UserError(f"report.at({share!r}): the share of training that is done is from 0 to 1: step / steps")
        for state in self._states().values():
            begin = state.recipe.schedule.bf16_forward_from
            state.rounds_forward = share < begin or begin == 1

    def undo(self) -> None:
        """Gives the model's layers their plain class again, in 16 bit; weights stay as trained."""
        to_plain_layers(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the histories of largest magnitudes for a checkpoint; the model's own keys stay as in plain layers.

        And, in bytes, which plain weights do not show: the recipe's name, and the dtype in which each weight trained,
        which is narrower than the weight under FSDP2 with `param_dtype`. Sizes stay the same, and after a step of an
        optimizer all ranks of DDP or FSDP2 have the same state.
        """
        states = self._states()
        name_of_recipe = torch.tensor(list(self._names_of_recipes().encode()), dtype=torch.uint8)
        # An expert that no token has reached on this rank trained in the dtype of the others.
        common = next((state.weight_dtype for state in states.values() if state.weight_dtype is not None), "")
        dtypes = [str(s.weight_dtype or common).removeprefix("torch.").ljust(8) for s in states.values()]
        return {
            _RECIPE: name_of_recipe,
            _DTYPES: torch.tensor([list(dtype.encode()) for dtype in dtypes], dtype=torch.uint8),
        } | {
            f"{name}.amax.{operand}": history.values.clone()
            for name, state in states.items()
            for operand, history in state.amax.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with the histories of a checkpoint; UserError for those of other layers or of another recipe."""
        saved = state.get(_RECIPE)
        own_names = self._names_of_recipes()
        names = own_names if saved is None else bytes(saved.tolist()).decode(errors="replace")
        if names != own_names:
            facts = f"in {names}, and this model trains in {own_names}: convert it with"
            facts += f' quant.to_low_precision_training(model, "{names}")'
            if "," in names + own_names:
                facts = "in other recipes by layer than this model: convert it with the recipes of that run"
            raise UserError(
                f"the checkpoint was trained {facts}, or leave out the state of the report to go on in others"
            )
        dtypes = state.get(_DTYPES)
        state, own = (
            {name: values for name, values in each.items() if name not in (_RECIPE, _DTYPES)}
            for each in (state, self.state_dict())
        )
        if differing := sorted(own.keys() ^ state.keys()):
            raise UserError(
                f"{differing[0]}: the histories and the model disagree on the layers that train in low precision "
                f"({counted(len(differing), 'difference')}); convert the model as it was when they were saved"
            )
        for name, values in state.items():
            if values.shape != own[name].shape:
                recipe = self._states()[name.rpartition(".amax.")[0]].recipe.name
                raise UserError(
                    f"{name}: the histories remember {len(values)} steps, and {recipe} {len(own[name])}: "
                    "convert the model with a recipe of that history"
                )
        for name, layer in self._states().items():
            for operand, history in layer.amax.items():
                history.start(state[f"{name}.amax.{operand}"].clone())
        for layer, dtype in zip(self._states().values(), () if dtypes is None else dtypes.tolist(), strict=False):
            trained_in = bytes(dtype).decode().strip()
            layer.weight_dtype = getattr(torch, trained_in) if trained_in else None
        GradientWatch.resumed(self.model)

    def trainer_callback(self) -> Any:
        """Returns a callback for transformers' Trainer, whose checkpoints then have the histories, too.

        `Trainer(model, arguments, callbacks=[report.trainer_callback()])` saves them. It loads them when it resumes,
        and at the end with the best checkpoint, if it loads that (`load_best_model_at_end`).
        """
        return _trainer_callback(self)

    def reduce_amax(self, group: Any = None) -> None:
        """Gives all ranks of `group`, None for all, the largest magnitudes of them all; each of them has to call it.

        Steps of optimizers under DDP, FSDP2 and tensor parallelism do that already. Call it before you evaluate, save
        or pack a model whose gradients are averaged in another way.
        """
        reduce_amax(trained_layers(self.model).values(), group)

    def nonfinite(self) -> str | None:
        """Says where NaN or infinity came into the present gradients; None where all are finite.

        For training with a loss scaler, which leaves such steps out without a word.
        """
        return nonfinite_line(self.model, trained_layers(self.model))

    def _names_of_recipes(self) -> str:
        names = [state.recipe.name for state in self._states().values()]
        return names[0] if len(set(names)) == 1 else ",".join(names)

    def _states(self) -> dict[str, LowPrecision]:
        layers = trained_layers(self.model)
        return {name: layers[name].low_precision for name in self.converted if name in layers}

    def __str__(self) -> str:
        """Returns a line for the log, and one for each reason."""
        states = self._states()
        lines = [
            f"{counted(sum(s.recipe.name == name for s in states.values()), 'layer')} in {name}: {note}"
            for name, note in self.notes.items()
        ]
        trained = sum(layer.held.numel() for layer in trained_layers(self.model).values())
        every = sum(parameter.numel() for parameter in self.model.parameters())
        lines.append(f"{trained / every:.1%} of {every:,} parameters are in these layers")
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
        if others := unconsidered(self.model, self.in_16bit):
            kinds = ", ".join(f"{counted(len(names), kind)} ({names[0]})" for kind, names in others.items())
            lines.append(f"not looked at, and in 16 bit: {kinds}")
        return "\n".join(lines)


def training_report(model: nn.Module) -> LowPrecisionTraining:
    """Returns the report of a model in low-precision training again, for whoever has lost it.

    Its histories are those of the model's layers. A model that was copied or read from a pickle has its own.

    Raises:
        UserError: the model does not train in low precision.
    """
    model = unwrapped(model, "training_report")
    report: LowPrecisionTraining | None = vars(model).get(_ATTRIBUTE)
    if report is None or not trained_layers(model):
        raise UserError(
            "the model does not train in low precision: quant.to_low_precision_training(model, recipe) returns the "
            "report"
        )
    return replace(report, model=model)


def unconsidered(model: nn.Module, reasons: Collection[str]) -> dict[str, list[str]]:
    """Returns the modules with matrices that no recipe takes, by class: convolutions, `nn.MultiheadAttention`, others.

    Linear layers and fused experts are converted or have a reason; embeddings, norms and vectors are no products.
    """
    seen = {id(layer.held) for layer in trained_layers(model).values()}
    seen |= {id(parameter) for name, parameter in model.named_parameters() if name in reasons}
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag) or type(module).__name__ == "Conv1D":
            continue
        if any(p.dim() > 1 and id(p) not in seen for p in module.parameters(recurse=False)):
            others.setdefault(type(module).__name__, []).append(name)
    return others


@in_own_modes
def to_low_precision_training(
    model: nn.Module, recipe: str | TrainingRecipe | Mapping[str, str | TrainingRecipe] = "fp8_rowwise", *,
    backend: str = "auto", include: Sequence[str] = (), exclude: Sequence[str] = (), on_nonfinite: str = "stop",
    all_gather_fp8: bool = False, attention: str = "16bit",
) -> LowPrecisionTraining:  # fmt: skip
    """Has the linear layers and fused experts of a model train in low precision; changes the model in place.

    State-dict keys, parameters, hooks, tied weights and optimizers stay as they are. Call it before `torch.compile`,
    DDP or FSDP2 wrap the model. `pack` makes quantized layers of the trained ones.

    Args:
        model: any module with `nn.Linear` layers.
        recipe: a name of `RECIPES`, such as "fp8_rowwise", "mxfp8" or "nvfp4", or a recipe of your own; or recipes by
            globs of layers, of which the last that matches counts: `{"*": "nvfp4", "*.layers.0.*": "mxfp8"}`. "16bit"
            leaves layers as they are. Layers that runtimes merge, such as q, k and v, need one recipe.
        backend: "emulated" rounds the operands and multiplies in BF16, or in FP32 on a CPU: the numbers of hardware
            that has the format, on any device. The others multiply on tensor cores: "native" runs `fp8_block`
            and rowwise FP8 on Hopper, "torchao" tensorwise and rowwise FP8 on an H100 or newer, "te" the recipes of
            Transformer Engine, MXFP8 and NVFP4 on Blackwell. "auto" takes the fastest that is installed and runs the
            recipe.
        include: globs; if given, only layers that match one are converted. It also converts what stays in 16 bit
            otherwise: an output head, and on a GPU fused experts that are too small to gain time.
        exclude: globs of layers that stay as they are.
        on_nonfinite: at an optimizer's step, gradients with NaN or infinity "stop" training with an error that names
            the layer, or "skip" the step with a warning. A GradScaler's steps are left to it: it skips them itself.
        all_gather_fp8: FSDP2, which shards the model afterwards, gathers weights of `fp8_block` as FP8 codes, with half
            the bytes of BF16 and the same values. Weights become new parameters: make the optimizer after FSDP2.
        attention: "fp8" rounds Q, K, V and P of a transformers model to E4M3 in the forward pass of training; gradients
            are computed in 16 bit, and so is attention in eval mode.

    Returns:
        Its text says which layers train in which format, and why others do not; `undo()` takes it all back.

    Raises:
        UserError: an unknown recipe, backend, action or attention; attention that FP8 does not take; a model on the
            meta device, quantized, prepared for QAT or converted already; no layer that can be converted. The message
            names the way out.
    """
    include, exclude = ([globs] if isinstance(globs, str) else globs for globs in (include, exclude))
    model = unwrapped(model, "to_low_precision_training")
    _check_model(model)
    warn_of_shared_weights(model)
    layers, _ = grouped_layers(model, None)
    names_of_experts = [layer.name for layer in layers if layer.kind == LayerKind.EXPERTS]
    linears: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    recipes = _recipes_by_layer(recipe, [*linears, *names_of_experts])
    distinct = list(dict.fromkeys(each for each in recipes.values() if each is not None))
    parameter = next(model.parameters(), torch.empty(0))
    backends = {each: choose_backend(backend, each, parameter) for each in distinct}
    if sum(each.name == "te" for each in backends.values()) > 1:
        raise UserError(
            "Transformer Engine runs a model in one recipe, and several are given; "
            'backend="emulated" computes the same numbers'
        )
    watch = GradientWatch(on_nonfinite)
    check_attention(model, attention)
    if all_gather_fp8:
        for each in distinct:
            check_gather_in_fp8(model, each)
    reasons = {name: "16 bit by its recipe" for name, each in recipes.items() if each is None}
    for each in distinct:
        kept = reasons_to_keep(model, layers, each, include, exclude, small=bool(include) or backend == "emulated")
        reasons |= {name: reason for name, reason in kept.items() if recipes.get(name, each) == each}
    # Planned as it will be deployed: a layer that no runtime would take, or whose merged sibling stays in 16 bit, would
    # be trained in a format in vain.
    candidates = [name for name in (*linears, *names_of_experts) if name not in reasons]
    title = distinct[0].name if len(distinct) == 1 else "low precision" if not distinct else "these recipes"
    plan = Plan(())
    if candidates:
        try:
            plan = plan_of_recipes(model, {name: recipes[name] for name in candidates})
        except ValueError as error:
            raise UserError(f"no layer can train in {title}: {error}") from None
    planned = {layer.name: layer for layer in plan.layers}
    reasons |= {name: planned[name].reason for name in candidates if planned[name].weight is None}
    converted = tuple(name for name in candidates if name not in reasons)
    if not converted:
        first = next(iter(reasons.items()), None)
        reason = f"{first[0]}: {first[1]}" if first else f"{type(model).__name__} has no nn.Linear"
        raise UserError(f"no layer can train in {title}: {reason}")
    call_encoder_layers(model)
    attention_note = attend_in_fp8(model) if attention == "fp8" else None
    of_layers = {name: recipes[name] for name in converted}
    _convert_linears({name: linears[name] for name in converted if name in linears}, of_layers, backends, plan)
    watch.start(model)
    notes = {}
    for each in distinct:
        chosen = backends[each]
        experts = [name for name in names_of_experts if of_layers.get(name) == each]
        # torchao and Transformer Engine have a module for each matrix, and no products of experts.
        products = chosen.products() if chosen.products is not None and chosen.name == "native" else None
        convert_experts(model, experts, each, products, chosen.name != "emulated")
        if chosen.name == "te":
            ForwardContext(each).start(model)
        if each in of_layers.values():
            notes[each.name] = chosen.note + _note_on_experts(model, experts, each, chosen)
    if all_gather_fp8:
        set_gather(model, in_fp8=True)
    # Layers that run as one function have one recipe.
    if len(distinct) == 1 and backends[distinct[0]].name == "native" and not is_rowwise(distinct[0]):
        fuse_gated_mlps(model)
        trace_rms_norms(model)
    small = {
        name: tuple(linears[name].weight.shape)
        for name in converted
        if name in linears
        and is_too_small(backends[recipes[name]].name, [each.weight for each in linears[name].low_precision.group])
    }
    first = recipes[converted[0]]
    report = LowPrecisionTraining(first, backends[first].name, notes, converted, reasons, model, attention_note, small)
    vars(model)[_ATTRIBUTE] = replace(report, model=None)  # type: ignore[arg-type]
    return report


def _recipes_by_layer(
    recipe: str | TrainingRecipe | Mapping[str, str | TrainingRecipe], names: Sequence[str]
) -> dict[str, Any]:
    """Returns the `TrainingRecipe` of each layer, None for 16 bit; UserError for an unknown one or a glob in vain."""
    by_glob = recipe if isinstance(recipe, Mapping) else {"*": recipe}
    recipes: dict[str, TrainingRecipe | None] = dict.fromkeys(names)
    for glob, value in by_glob.items():
        if not (found := matched(glob, names)) and isinstance(recipe, Mapping):
            raise UserError(f"recipe: {no_match(glob, names)}")
        try:
            recipes |= dict.fromkeys(found, None if value == "16bit" else get_training_recipe(value))
        except ValueError as error:
            raise UserError(str(error)) from None
    if not isinstance(recipe, Mapping) and not names:
        get_training_recipe(recipe)
    return recipes


def plan_of_recipes(model: nn.Module, recipes: Mapping[str, TrainingRecipe]) -> Plan:
    """Returns the plan by which layers, by name, are deployed that train in these recipes; ValueError without one."""
    formats = {name: stored_format(recipe).name for name, recipe in recipes.items()}
    if len(set(formats.values())) == 1:
        return make_plan(model, next(iter(formats.values())), include=list(recipes), solver="rtn")
    presets = {name: get_recipe(name) for name in set(formats.values())}
    rules = [Rule(n, weight=presets[f].weight, activation=presets[f].activation) for n, f in formats.items()]
    return make_plan(model, Recipe("training", solver="rtn", rules=tuple(rules)), include=list(recipes))


def _note_on_experts(model: nn.Module, experts: Sequence[str], recipe: TrainingRecipe, backend: Backend) -> str:
    if not experts or not (parameter := model.get_parameter(experts[0])).is_cuda:
        return ""
    if not takes_experts(model.get_submodule(experts[0].rpartition(".")[0]), recipe):
        return "; fused experts one after another, which is slow where they are many"
    if backend.name != "emulated" and has_rows(recipe) and has_grouped_fp8(parameter):
        return "; fused experts by grouped FP8 products"
    return "; fused experts by grouped BF16 products of rounded operands"


def to_plain_layers(model: nn.Module) -> None:
    """Gives the layers of a model in low-precision training their plain class again; weights stay as trained."""
    model = inner_model(model)
    vars(model).pop(_ATTRIBUTE, None)
    GradientWatch.end(model)
    ForwardContext.end(model)
    restore_forwards(model)
    attend_in_16bit(model)
    set_gather(model, in_fp8=False)
    for layer in trained_layers(model).values():
        if isinstance(layer, LowPrecisionLinear):
            del layer.low_precision
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    restore_experts(model)


def _check_model(model: nn.Module) -> None:
    for name, layer in trained_layers(model).items():
        raise UserError(
            f"{name}: the model trains in {layer.low_precision.recipe.name} already; call undo() of what "
            "to_low_precision_training returned first"
        )
    check_original(model, "to_low_precision_training")
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise UserError(f"{meta} is on the meta device and has no values; load the weights first")


def reasons_to_keep(
    model: nn.Module, layers: Sequence[Layer], recipe: TrainingRecipe, include: Sequence[str], exclude: Sequence[str],
    *, small: bool,
) -> dict[str, str]:  # fmt: skip
    """Returns why linear layers and parameters of fused experts stay in 16 bit, by name; a plan has further reasons.

    `layers` are the model's, as a run has seen them; the globs are the caller's, each of which has to match a module.
    `small` converts small experts too.
    """
    names_of_experts = [layer.name for layer in layers if layer.kind == LayerKind.EXPERTS]
    # With GPT-2's transposed linear.
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    names = [*linears, *names_of_experts]
    all_names = {*names, *(name for name, _ in model.named_modules())}
    for argument, globs in (("include", include), ("exclude", exclude)):
        unknown = next((glob for glob in globs if not matched(glob, all_names)), None)
        if unknown is not None:
            raise UserError(f"{argument}: {no_match(unknown, names)}")
    excluded, included = matched(exclude, names), matched(include or "*", names)
    blocks = block_names(model) if recipe.first_layers or recipe.last_layers else []
    ends = [*blocks[: recipe.first_layers], *blocks[len(blocks) - recipe.last_layers :]]

    def common_reason(name: str) -> str | None:
        if name in excluded or name not in included:
            return "excluded" if name in excluded else "not included"
        if any(name.startswith(f"{block}.") for block in ends):
            return f"{recipe.name} keeps the first {recipe.first_layers} and last {recipe.last_layers} blocks"
        return None

    # transformers knows the head by its purpose, whatever the name. `include` lifts the rule for the head: whoever
    # names layers means them.
    embeddings = getattr(model, "get_output_embeddings", None)
    head = embeddings() if callable(embeddings) and not include else None
    bypassed = {layer.name for layer in layers if layer.is_bypassed}
    reasons: dict[str, str | None] = {}
    for name, module in linears.items():
        reason = common_reason(name)
        if "weight" not in module._parameters:  # of a norm of weights, a parametrization, pruning
            reason = reason or "its weight is computed from other parameters"
        elif type(module) is not nn.Linear:
            reason = f"a {type(module).__name__} computes in a way of its own"
        elif reason is None and module is head:
            reason = "the output head, whose gradients are the most sensitive; name it in include to convert it"
        elif reason is None:
            # Tensor cores load 16 bytes at a time along either axis, and blocks must not be cut in any of the products.
            shape = list(module.weight.shape)
            width = max(recipe.multiple, recipe.input.block[1] if recipe.input is not None else 0)  # when deployed
            if shape[0] % recipe.multiple or shape[1] % width:
                inputs = f", its inputs of {width}" * (width > recipe.multiple)
                inputs += "; fp8_rowwise takes multiples of 16" * (width > 16)
                reason = f"{shape}: {recipe.name} needs sizes that are multiples of {recipe.multiple}{inputs}"
        if reason is not None:
            reasons[name] = reason
    for layer in layers:
        if layer.name in bypassed and layer.name not in reasons:
            reasons[layer.name] = "its module multiplies by the weight itself, and would not round that product"
    reasons |= {n: common_reason(n) or experts_refusal(model, n, recipe, small=small) for n in names_of_experts}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _convert_linears(
    linears: Mapping[str, Any],
    recipes: Mapping[str, TrainingRecipe],
    backends: Mapping[TrainingRecipe, Backend],
    plan: Plan,
) -> None:
    """Gives linear layers, by name, the class of low-precision training, and links layers that share a scale."""
    # The same layer of all experts of a mixture that is a list of modules, such as `experts.#.up_proj`.
    siblings: dict[str, list[Any]] = {}
    for name, linear in linears.items():
        # A new module would lose hooks and attributes, and break the ties of whoever holds the old one.
        linear.__class__ = LowPrecisionLinear
        make = backends[recipes[name]].products
        linear.low_precision = LowPrecision(name, recipes[name], [linear], products=None if make is None else make())
        pattern = re.sub(r"experts\.\d+\.", "experts.#.", name)
        if pattern != name:
            siblings.setdefault(pattern, []).append(linear)
            linear.low_precision.siblings = siblings[pattern]
    # Runtimes multiply merged weights under one second-level scale, so training scales them by their common amax.
    for group in groups_of(plan.quantized).values():
        members = [linears[layer.name] for layer in group if layer.name in linears]
        for member in members:
            member.low_precision.group = members


def _trainer_callback(report: LowPrecisionTraining) -> Any:
    """Returns a callback by which a Trainer saves a report's state, and loads it when it resumes or takes the best."""
    callbacks = require("transformers.trainer_callback", "hf")
    from safetensors.torch import load, save

    class LowPrecisionHistories(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc, name-defined]
        def state(self) -> dict[str, Any]:
            compressed = zlib.compress(save(report.state_dict()), level=1)
            return {"args": {}, "attributes": {"histories": base64.b64encode(compressed).decode()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not state.global_step:
                return
            if saved is None:
                raise UserError(
                    f"the checkpoint of step {state.global_step} has no histories of low-precision training: it was "
                    "saved without report.trainer_callback(); leave the callback out, and histories begin anew"
                )
            self.load(state.global_step, saved)

        def on_train_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            # By now the Trainer has loaded the best weights, which were evaluated with the histories of their step.
            if not args.load_best_model_at_end or state.best_model_checkpoint is None:
                return
            file = Path(state.best_model_checkpoint) / "trainer_state.json"
            best = type(state).load_from_json(str(file)) if file.is_file() else None
            if best is not None and type(self).__name__ in best.stateful_callbacks:
                self.load(best.global_step, best.stateful_callbacks[type(self).__name__])

        def load(self, step: int, saved: Any) -> None:
            # A callback that a Trainer was given twice has a list, of one state twice.
            states = saved if isinstance(saved, list) else [saved]
            histories = {state["attributes"]["histories"] for state in states}
            if len(histories) > 1:
                raise UserError(
                    f"the checkpoint of step {step} has low-precision histories of {len(histories)} "
                    "reports: a Trainer trains one model, and takes report.trainer_callback() of that model's report"
                )
            report.load_state_dict(load(zlib.decompress(base64.b64decode(histories.pop()))))

    return LowPrecisionHistories()
