"""`make_plan` finds a model's layers and its fusion groups, and gives each layer the format that the recipe names.

No weight is read: a model on the meta device suffices, or the shapes in the header of a state dict.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted
from quant.calibration.placement import without_experts
from quant.calibration.solvers.registry import get_solver
from quant.formats.format import cache_format, parse_format
from quant.recipes.blocks import block_names
from quant.recipes.callers_model import check_original, unwrapped
from quant.recipes.groups import Watched, group_experts, group_unseen, patterns, watching, without_group
from quant.recipes.layers import Layer, LayerKind, find_layers, layers_of_state_dict
from quant.recipes.module_replacement import other_tensors, run_with
from quant.recipes.plan import ODD_INPUTS, LayerPlan, Plan
from quant.recipes.plan_check import BY_NAME, NOT_RUN, NOT_SEEN
from quant.recipes.recipe import KEEP, Recipe, Rule, get_recipe, matched
from quant.recipes.resolve import resolve
from quant.recipes.solver_names import solver_of


def make_plan(
    model: nn.Module | Mapping[str, Sequence[int]],
    recipe: str | Recipe = "nvfp4",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    solver: str | None = None,
    effort: int = 0,
    lm_head: str | None = None,
    run: Callable[[nn.Module], Any] | None = None,
) -> Plan:
    """Decides a format for every layer; reads no weight, so `model` may be on the meta device.

    Args:
        model: a module, or the shapes of a bare state dict by tensor name.
        recipe: a recipe or its name, as in `quantize`.
        include, exclude, solver, run: as in `quantize`.
        effort: chooses the solver where neither `solver` nor the recipe names one; at most 1 for a bare state dict. The
            default rounds to nearest, unlike in `quantize`, because a plan by itself has no calibration data.
        lm_head: format of the output head, whose inputs stay in 16 bit; None leaves it to the recipe.

    Raises:
        ValueError: unknown format or solver, a glob that matches no layer, or a head that cannot take its format; a
            model that is a path.
    """
    if not isinstance(model, Mapping):
        model = unwrapped(model, "make_plan")
        check_original(model, "make_plan")
    # A string is a sequence of strings too, each a letter.
    include, exclude = ([globs] if isinstance(globs, str) else globs for globs in (include, exclude))
    recipe = _edited_recipe(recipe, solver, exclude)
    if isinstance(model, nn.Module):
        layers, unknown = grouped_layers(model, run)
    else:
        layers, unknown = group_unseen(layers_of_state_dict(model)), NOT_RUN
    record: dict[str, Any] = {}
    if recipe.solver is None:
        recipe, record = _with_solver_of(effort, recipe, layers, can_run=isinstance(model, nn.Module))
    # The name of a layer becomes a tensor name in a checkpoint, and the path at which it is replaced.
    if any(layer.name == "" for layer in layers):
        raise UserError(f"the model is a single {type(model).__name__}: put it in a module, such as nn.Sequential")
    if lm_head is not None:
        recipe = recipe.with_rules(*_head_rules(layers, lm_head))
        # An explicit head format is wanted even where --include names other layers.
        include = [*include, *(layer.name for layer in layers if include and layer.kind == LayerKind.HEAD)]
    plan = resolve(layers, recipe, only=include)
    for layer in plan.layers:
        if lm_head is not None and layer.kind == LayerKind.HEAD and layer.weight is None:
            raise UserError(f"lm_head {lm_head}: {layer.name} stays in 16 bit: {layer.reason}; leave lm_head out")
    if odd := _unusual_inputs(layers, plan):
        record[ODD_INPUTS] = odd
    plan = replace(plan, provenance={**record, **_fusion_record(layers, plan, unknown)})
    if not plan.quantized:
        raise UserError(
            f"recipe {recipe.name!r} quantizes none of this model's {len(layers)} layers: {_why_none(plan, include)}"
        )
    return plan


def _edited_recipe(recipe: str | Recipe, solver: str | None, exclude: Sequence[str]) -> Recipe:
    """Returns the recipe with an explicit solver, whose name is checked, and with a rule for each excluded glob."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    if solver is not None:
        # An explicit solver is for every layer: rules of the recipe may not name another one.
        recipe = replace(recipe, solver=solver, rules=tuple(replace(rule, solver=None) for rule in recipe.rules))
    # Rules may name solvers of their own. An unknown one is refused before the model runs, which may take long.
    for name in {recipe.solver, *(rule.solver for rule in recipe.rules)} - {None}:
        get_solver(str(name))
    return recipe.with_rules(*(Rule(glob, KEEP, reason=f"excluded by {glob}") for glob in exclude))


def _with_solver_of(
    effort: int, recipe: Recipe, layers: Sequence[Layer], can_run: bool
) -> tuple[Recipe, dict[str, Any]]:
    """Returns `recipe` with the solver of an effort, and the record of that choice for the provenance.

    Args:
        effort: the requested effort; a model that does not run has no data for more than effort 1.
        recipe: a recipe without a solver.
        layers: the layers of the model.
        can_run: whether the model is a module, and not a bare state dict.
    """
    level = effort if can_run else min(effort, 1)
    # Fused experts as in transformers 5, or one module for each expert as before: `solver_of` treats both alike.
    experts = any(layer.kind == LayerKind.EXPERTS or ".experts." in layer.name for layer in layers)
    solver = solver_of(level, recipe.activation, experts=experts)
    record = {"level": level, "solver": solver, **({"asked": effort, "why": NOT_RUN} if level < effort else {})}
    return replace(recipe, solver=solver), {"effort": record} if effort else {}


def _head_rules(layers: Sequence[Layer], lm_head: str) -> list[Rule]:
    """Returns the rules that give output heads a format."""
    try:
        parse_format(lm_head)
    except ValueError as error:
        raise UserError(f"lm_head: {error}") from None
    heads = [layer.name for layer in layers if layer.kind == LayerKind.HEAD]
    if not heads:
        raise UserError(f"lm_head {lm_head}: this model has no output head; leave lm_head out")
    return [Rule(name, lm_head, KEEP, reason=f"lm_head {lm_head}") for name in heads]


def without_data(plan: Plan, reason: str) -> Plan | None:
    """Returns `plan` with the solver of effort 1 where its effort chose one that needs data; None where it chose none.

    Args:
        plan: the plan as `make_plan` gives it.
        reason: the reason why there is no data.
    """
    chosen = plan.provenance.get("effort")
    if not isinstance(chosen, dict) or chosen["level"] < 2:
        return None
    record = {"level": 1, "solver": solver_of(1, KEEP), "asked": chosen["level"], "why": reason}
    plan = replace(plan, provenance={**plan.provenance, "effort": record})
    return plan.replace_layers(
        replace(layer, solver=record["solver"]) for layer in plan.layers if layer.solver == chosen["solver"]
    )


def _unusual_inputs(layers: Sequence[Layer], plan: Plan) -> list[str]:
    """Returns layers whose inputs get a scale for each token and are not `[batch, tokens, in]`."""
    seen = {layer.name: layer.input_dims for layer in layers if layer.input_dims not in (None, 3)}
    return [
        layer.name
        for layer in plan.quantized
        if layer.name in seen and layer.activation is not None and layer.activation.block == (1, 0)
    ]


def _why_none(plan: Plan, include: Sequence[str]) -> str:
    """Returns why a recipe kept layers that it may quantize: for layers of --include first, then the most frequent.

    Args:
        plan: the plan that quantizes nothing.
        include: globs of the requested layers.
    """
    names = matched(include, plan.by_name)
    included = [plan.by_name[name] for name in names]
    never = (LayerKind.NORM, LayerKind.EMBEDDING)
    other_layers = [layer for layer in plan.layers if layer.name not in names and layer.kind not in never]
    reasons = [(reason, count, part) for part in (included, other_layers) for reason, count in _reasons(part)]
    listed = "; ".join(
        f"{counted(count, 'layer')}, {next(layer.name for layer in part if layer.reason == reason)} first: {reason}"
        for reason, count, part in reasons[:4]
    )
    if not any("is not a multiple of" in reason for reason, _, _ in reasons):
        return listed or "it has neither linear layers nor fused experts"
    return f"{listed}. fp8_channel and int8 take any width, int4_g64 and int4_g32 multiples of 64 and 32"


def _reasons(layers: Sequence[LayerPlan]) -> list[tuple[str, int]]:
    return Counter(layer.reason for layer in layers).most_common()


def grouped_layers(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> tuple[list[Layer], str | None]:
    """Returns the layers of a model with their fusion groups, and why those are not known if so.

    `run` as in `make_plan`.

    Layers that no run calls get the groups of their siblings, or the groups that their names suggest.
    """
    layers = group_experts(find_layers(model))
    seen, obstacle = Watched(), None
    # Without values, some models cannot read what decides how they go on: a plan without weights tries all ways.
    is_outline = any(parameter.is_meta for parameter in model.parameters())
    # From the cheapest to the most expensive: shapes, then two tokens, then images or sounds of zeros.
    stand_ins = [] if run and not is_outline else [run_on_meta, _run_on_meta_in_bf16, _run_one_row, _run_stand_in]
    for attempt in [run, *stand_ins] if run else stand_ins:
        try:
            with watching(model, layers) as watched:
                attempt(model)
            # Attempts that failed half-way have seen layers that this one may have skipped.
            watched.add(seen)
            seen, obstacle = watched, None
            break
        except Exception as error:  # the model's own code, which may fail in any way on a stand-in input
            if attempt is run and not is_outline:
                raise UserError(f"the model failed on the given example input: {error}") from error
            obstacle = f"{type(model).__name__} does not run on token ids; in Python, pass run="
            seen.add(watched)
    # Experts that the router did not choose were never called, though their siblings were.
    layers = group_unseen(seen.of(layers, complete=obstacle is None), model)
    return layers, obstacle if without_group(layers) else None


def _fusion_record(layers: Sequence[Layer], plan: Plan, unknown: str | None) -> dict[str, Any]:
    """Returns the record in a plan's provenance about fusion groups of quantized layers that no run has called.

    Args:
        layers: the layers of the model.
        plan: the plan for it.
        unknown: why nothing has run them to the end, if so.
    """
    quantized = {layer.name: layer.group for layer in plan.quantized}
    named = [quantized[layer.name] for layer in layers if layer.is_named and layer.name in quantized]
    alone = [layer.name for layer in without_group(layers) if layer.name in quantized]
    return {
        **({BY_NAME: patterns(group for group in named if group is not None)} if named else {}),
        **({NOT_SEEN: patterns(alone)} if alone else {}),
        **({"fusion_groups": f"unknown: {unknown}"} if alone and unknown else {}),
    }


def run_on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Runs a forward pass over shapes alone: no weight is read and no arithmetic done.

    Experts that are in their files are left out: which of them run depends on values.

    Args:
        model: stays as it is.
        dtype: the dtype of the parameters; None leaves them their own.
    """

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        casts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to("meta", dtype if casts else None)

    with without_experts(model, block_names(model)):
        run_with(model, other_tensors(model, on_meta), torch.zeros(1, 2, dtype=torch.long, device="meta"))


def _run_on_meta_in_bf16(model: nn.Module) -> None:
    """Runs the same pass in BF16, the only dtype that torch's grouped matmul for experts takes on meta."""
    run_on_meta(model, torch.bfloat16)


def _run_stand_in(model: nn.Module) -> None:
    """Runs a forward pass over zeros in the shape of images, sounds or two texts, as the model's config has them."""
    config: Any = model.config
    seeing = getattr(config, "vision_config", None) or config
    # 32 pixels are two patches of ViT's 16, enough to see which layers share an input.
    size = getattr(seeing, "image_size", None) or 32
    sizes = {
        "pixel_values": (1, getattr(seeing, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size)),
        "input_values": (1, 1600),
        "input_features": (1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 50)),
    }
    name: str = model.main_input_name  # type: ignore[assignment]
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    names = {name, *({"pixel_values"} & set(inspect.signature(model.forward).parameters))}  # both sides of CLIP
    inputs = {n: ids if n == "input_ids" else torch.zeros(sizes[n], dtype=dtype, device=device) for n in names}
    model(**inputs, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {}))


def _run_one_row(model: nn.Module) -> None:
    """Runs a forward pass over two tokens, for models that branch on their data (routers) or need real input."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    # No expert decides which layers share an input, and reading a few of each block takes seconds.
    with without_experts(model, block_names(model)):
        model(ids)


def kv_cache_name(name: str, option: str) -> str:
    """Returns a format of the KV cache as recipes spell it.

    Args:
        name: the name as the user writes it, who may call 16 bit `16bit`.
        option: the name of the option, for the error message.

    Raises:
        UserError: an unknown format.
    """
    try:
        format = cache_format(name)
    except ValueError:
        raise UserError(
            f"{option} {name}: unknown format of a KV cache; checkpoints hold it in fp8, fp8_head, or in 16bit"
        ) from None
    return format.name if format else KEEP
