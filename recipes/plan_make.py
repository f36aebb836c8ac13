"""`make_plan` finds the layers of a model and their fusion groups, and gives each layer the format of the recipe.

No weight is read: a model on the meta device suffices, or the shapes in the header of a state dict. The last of these
that applies to a layer decides:

    1. the recipe's own weight, activation and solver, for every linear and every fused-expert weight;
    2. the house rules: embeddings, heads, routers, norms, vision and audio towers and their projectors stay in 16 bit;
       a tower that holds most of the weights, or has an encoder of texts for a neighbour, is the model and not a tower;
       so do convolutions, unless they hold most of the weights, and any that no FP8 kernel runs; a router is in no
       fusion group, because no runtime merges it with the layers that read the same input;
    3. the recipe's rules, in the order of the file; one with a format for an embedding matches no linear layer;
    4. `--exclude`, which is a rule too. `--include` is none: it leaves a layer as the rules say, or in 16 bit. But its
        glob includes layers of a tower, embeddings or heads if it matches only such layers.

A layer whose shape the format does not divide stays in 16 bit whatever the rules say. So does every member of a
fusion group (layers that read the same input, which runtimes merge into one matmul) when one member must.

The mixes that llama.cpp calls Q4_K_M and so on give more bits to layers whose errors cost more: values, the down
projections, and the output head, in the first and last eighth of the blocks and in every third between (`_M`), or in
the first few (`_S`), by llama.cpp's own rules. K-quants need rows of whole superblocks of 256 weights; other widths get
the format of about the same bits in groups of 32, as in llama.cpp.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, listed, option
from quant.base.torch_modes import in_own_modes
from quant.formats.format import GGUF_FORMATS, Format, cache_format, fitting, is_16bit, parse_format
from quant.recipes.blocks import block_names, is_denoiser, other_tensors, run_with, without_experts
from quant.recipes.callers_model import check_original, unwrapped
from quant.recipes.groups import Watched, group_experts, group_name, group_unseen, patterns, watching, without_group
from quant.recipes.layers import QUANTIZABLE, ROUTER, Layer, LayerKind, find_layers, layers_of_state_dict, obstacle
from quant.recipes.plan import ODD_INPUTS, LayerPlan, Plan, groups_of, sharers_of
from quant.recipes.plan_check import BY_NAME, NOT_RUN, NOT_SEEN
from quant.recipes.recipe import KEEP, MIXES, Recipe, Rule, get_recipe, matched, named_format, no_match
from quant.recipes.solver_names import parse_solver, solver_of

_KEPT_KINDS = {
    LayerKind.EMBEDDING: "embedding: a look-up moves few bytes and every token's error would start here",
    LayerKind.HEAD: "output head: its error goes straight into the logits",
    LayerKind.NORM: "norm: a vector of negligible size that scales whole channels",
    LayerKind.OTHER: "not a linear layer",
    LayerKind.PARAMETER: "no linear layer: its module multiplies by it, or adds it, by itself",
}
_FEW_CONVS = "convolution, and linear layers hold most of the weights: transformers and vLLM read it in 16 bit only"
_NO_FP8_CONV = (
    "convolution: kept out of FP8 as ModelOpt does, for TensorRT's kernels take 16 channels or more and up to 32 taps; "
    "int8 takes it"
)
# Of diffusers: AdaLN in its many names, and the embedding of the time in blocks of a UNet.
_MODULATION = ("*norm*.linear", "*norm*.linear_*", "*time_emb_proj", "*modulation*", "*_mod.*", "*adaln_single*")
_MODULATES = "modulation: one vector scales and shifts every token of its block by it, and its matmul has a single row"
_OUTSIDE = "embedding or final projection: it is run once a step, and every block reads its error, or none mends it"
_TEXT_ENCODER = "text_model.encoder."  # of CLIP, SigLIP and CLAP; a language model's blocks are not an encoder
_KEPT_NAMES = {
    ROUTER: ("*router*", "*.gate", "*.shared_expert_gate"),
    "vision tower: small compared with the language model and sensitive": ("*vision*", "*visual.*", "*image_encoder*"),
    "audio tower: small compared with the language model and sensitive": ("*audio_tower*", "*audio_encoder*"),
    "projector into the language model: small, and text never reaches it": (
        "*multi_modal_projector*", "*mm_projector*", "*modality_projection*", "*.connector.*", "*.aligner.*",
        "*.merger.*", "*image_to_text_projection*", "*.embed_audio.*", "*audio_projection*",
    ),
}  # fmt: skip


@in_own_modes
def make_plan(
    model: nn.Module | Mapping[str, Sequence[int]], recipe: str | Recipe = "nvfp4", *, include: Sequence[str] = (),
    exclude: Sequence[str] = (), solver: str | None = None, effort: int = 0, lm_head: str | None = None,
    run: Callable[[nn.Module], Any] | None = None,
) -> Plan:  # fmt: skip
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
        if is_denoiser(model):
            layers = _kept_in_denoiser(layers, block_names(model), include)
    else:
        layers, unknown = group_unseen(layers_of_state_dict(model)), NOT_RUN
    record: dict[str, Any] = {}
    recipe = replace(recipe, rules=(*mix_rules(recipe, layers), *recipe.rules))
    if recipe.solver is None:
        recipe, record = _with_solver_of(effort, recipe, layers, model)
    # The name of a layer becomes a tensor name in a checkpoint, and the path at which it is replaced.
    if any(layer.name == "" for layer in layers):
        raise UserError(f"the model is a single {type(model).__name__}: put it in a module, such as nn.Sequential")
    if lm_head is not None:
        recipe = recipe.with_rules(*_head_rules(layers, lm_head))
        # An explicit head format is wanted even where --include names other layers.
        include = [*include, *(layer.name for layer in layers if include and layer.kind == LayerKind.HEAD)]
    plan = resolve(layers, recipe, only=include)
    for layer in plan.layers:
        if not is_16bit(lm_head) and layer.kind == LayerKind.HEAD and layer.weight is None:
            named = option("lm_head", lm_head)
            raise UserError(f"{named}: {layer.name} stays in 16 bit: {layer.reason}; leave that out")
    # Layers whose inputs get a scale for each token and are not [batch, tokens, in].
    seen = {layer.name for layer in layers if layer.input_dims not in (None, 3)}
    by_token = [layer for layer in plan.quantized if layer.activation is not None and layer.activation.block == (1, 0)]
    if odd := [layer.name for layer in by_token if layer.name in seen]:
        record[ODD_INPUTS] = odd
    plan = replace(plan, provenance={**record, **_fusion_record(layers, plan, unknown)})
    if not plan.quantized:
        raise UserError(
            f"recipe {recipe.name!r} quantizes none of this model's {len(layers)} layers: {_why_none(plan, include)}"
        )
    return plan


def _kept_in_denoiser(layers: Sequence[Layer], blocks: Sequence[str], include: Sequence[str]) -> list[Layer]:
    """Returns the layers of a transformer or UNet of diffusers, with the reason of those that stay in 16 bit.

    A glob of `include` that matches only such layers includes them.
    """
    inside = tuple(f"{block}." for block in blocks)
    reasons = {layer.name: _OUTSIDE for layer in layers if blocks and not layer.name.startswith(inside)}
    reasons |= dict.fromkeys(matched(_MODULATION, [layer.name for layer in layers]), _MODULATES)
    may_be = (LayerKind.LINEAR, LayerKind.CONV, LayerKind.HEAD)
    for glob in include:
        names = matched([glob], [layer.name for layer in layers if layer.kind in may_be])
        if names.keys() <= reasons.keys():
            reasons = {name: reason for name, reason in reasons.items() if name not in names}
    return [
        replace(layer, kept=layer.kept or reasons.get(layer.name)) if layer.kind in may_be else layer
        for layer in layers
    ]


def _edited_recipe(recipe: str | Recipe, solver: str | None, exclude: Sequence[str]) -> Recipe:
    """Returns the recipe with an explicit solver, whose name is checked, and with a rule for each excluded glob."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    if solver is not None:
        # An explicit solver is for every layer: rules of the recipe may not name another one.
        recipe = replace(recipe, solver=solver, rules=tuple(replace(rule, solver=None) for rule in recipe.rules))
    # Rules may name solvers of their own. An unknown one is refused before the model runs, which may take long.
    for name in {recipe.solver, *(rule.solver for rule in recipe.rules)} - {None}:
        parse_solver(str(name))
    return recipe.with_rules(*(Rule(glob, KEEP, reason=f"excluded by {glob}") for glob in exclude))


def _with_solver_of(
    effort: int, recipe: Recipe, layers: Sequence[Layer], model: nn.Module | Mapping[str, Sequence[int]]
) -> tuple[Recipe, dict[str, Any]]:
    denoiser = isinstance(model, nn.Module) and is_denoiser(model)
    level = effort if isinstance(model, nn.Module) else min(effort, 1)  # a bare state dict has no data for more
    # Fused experts as in transformers 5, or one module for each expert as before: `solver_of` treats both alike.
    experts = any(layer.kind == LayerKind.EXPERTS or ".experts." in layer.name for layer in layers)
    solver = solver_of(level, recipe.activation, experts=experts, denoiser=denoiser)
    record = {"level": level, "solver": solver, **({"asked": effort, "why": NOT_RUN} if level < effort else {})}
    return replace(recipe, solver=solver), {"effort": record} if effort else {}


def _head_rules(layers: Sequence[Layer], lm_head: str) -> list[Rule]:
    try:
        parse_format(lm_head)
    except ValueError as error:
        raise UserError(f"{option('lm_head', lm_head)}: {error}") from None
    heads = [layer.name for layer in layers if layer.kind == LayerKind.HEAD]
    if not heads:
        raise UserError(f"{option('lm_head', lm_head)}: this model has no output head; leave that out")
    return [Rule(name, lm_head, KEEP, reason=f"lm_head {lm_head}") for name in heads]


def without_data(plan: Plan, reason: str) -> Plan | None:
    """Returns `plan` with effort 1 where its effort chose a solver that needs data; None where it chose none."""
    chosen = plan.provenance.get("effort")
    if not isinstance(chosen, dict) or chosen["level"] < 2:
        return None
    record = {"level": 1, "solver": solver_of(1, KEEP), "asked": chosen["level"], "why": reason}
    plan = replace(plan, provenance={**plan.provenance, "effort": record})
    return plan.replace_layers(
        replace(layer, solver=record["solver"]) for layer in plan.layers if layer.solver == chosen["solver"]
    )


def _why_none(plan: Plan, include: Sequence[str]) -> str:
    """Returns why a recipe kept layers that it may quantize: for layers of `include` first, then the most frequent."""
    names = matched(include, plan.by_name)
    included = [plan.by_name[name] for name in names]
    never = (LayerKind.NORM, LayerKind.EMBEDDING)
    other_layers = [layer for layer in plan.layers if layer.name not in names and layer.kind not in never]
    clauses = [
        f"{counted(count, 'layer')}, {next(layer.name for layer in layers if layer.reason == reason)} first: {reason}"
        for layers in (included, other_layers)
        for reason, count in Counter(layer.reason for layer in layers).most_common()
    ]
    listed = "; ".join(clauses[:4])
    if not any("is not a multiple of" in clause for clause in clauses):
        return listed or "it has neither linear layers nor fused experts"
    return f"{listed}. fp8_channel and int8 take any width, int4a16_g64 and int4a16_g32 multiples of 64 and 32"


def grouped_layers(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> tuple[list[Layer], str | None]:
    """Returns the layers of a model with their fusion groups, and why those are not known if so.

    Layers that no run calls get the groups of their siblings, or the groups that their names suggest.
    """
    layers = group_experts(find_layers(model))
    seen, failure = Watched(), None
    # Without values, some models cannot read what decides how they go on: a plan without weights tries all ways.
    is_outline = any(parameter.is_meta for parameter in model.parameters())
    # From the cheapest to the most expensive: shapes, then two tokens, then images or sounds of zeros. BF16 is the only
    # dtype that torch's grouped matmul for experts takes on meta.
    in_bf16 = partial(run_on_meta, dtype=torch.bfloat16)
    attempts: list[Callable[[nn.Module], Any]] = [run] if run else []
    if is_outline or not run:
        attempts += [run_on_meta, in_bf16, _run_one_row, _run_stand_in]
    for attempt in attempts:
        try:
            with watching(model, layers) as watched:
                attempt(model)
            # Attempts that failed half-way have seen layers that this one may have skipped.
            watched.add(seen)
            seen, failure = watched, None
            break
        except Exception as error:  # the model's own code, which may fail in any way on a stand-in input
            if attempt is run and not is_outline:
                names = listed(inspect.signature(model.forward).parameters)
                raise UserError(
                    f"the model failed on the given example input: {' '.join(str(error).split()).rstrip('.')}; its "
                    f"forward takes {names}"
                ) from error
            failure = f"{type(model).__name__} does not run on token ids; in Python, pass run="
            seen.add(watched)
    # Experts that the router did not choose were never called, though their siblings were.
    layers = group_unseen(seen.of(layers, complete=failure is None), model)
    return layers, failure if without_group(layers) else None


def _fusion_record(layers: Sequence[Layer], plan: Plan, unknown: str | None) -> dict[str, Any]:
    """Returns the record about fusion groups of quantized layers that no run has called; `unknown` says why, if so."""
    quantized = {layer.name: layer.group for layer in plan.quantized}
    named = [quantized[layer.name] for layer in layers if layer.is_named and layer.name in quantized]
    alone = [layer.name for layer in without_group(layers) if layer.name in quantized]
    return {
        **({BY_NAME: patterns(group for group in named if group is not None)} if named else {}),
        **({NOT_SEEN: patterns(alone)} if alone else {}),
        **({"fusion_groups": f"unknown: {unknown}"} if alone and unknown else {}),
    }


def run_on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Runs a forward pass over shapes alone, parameters in `dtype`: no weight is read and no arithmetic done.

    Experts that are in their files are left out: which of them run depends on values.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        casts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to("meta", dtype if casts else None)

    attributes = [(module, {**vars(module)}) for module in model.modules()]
    try:
        with without_experts(model, block_names(model)):
            run_with(model, other_tensors(model, on_meta), torch.zeros(1, 2, dtype=torch.long, device="meta"))
    finally:  # a RoPE of transformers keeps the tensors that it makes in a pass (longrope)
        for module, before in attributes:
            module.__dict__ = before


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


def resolve(layers: Sequence[Layer], recipe: Recipe, *, only: Sequence[str] = ()) -> Plan:
    """Applies `recipe` to the layers of a model; with globs in `only`, a layer that matches none stays in 16 bit."""
    names = [layer.name for layer in layers]
    globs = {glob: matched(glob, names).keys() for glob in (*(rule.match for rule in recipe.rules), *only)}
    for glob, its_names in globs.items():
        if not its_names:
            raise ValueError(no_match(glob, names))
    included = {glob: globs[glob] for glob in only}
    house = {**_kept_convs(layers, recipe, included.values()), **_house_rules(layers, included.values())}
    quantizable = {layer.name for layer in layers if layer.kind in QUANTIZABLE}
    # A rule whose glob matches a quantizable layer is broad: it does not mean the embeddings that it also matches.
    broad = {glob for glob, its_names in globs.items() if its_names & quantizable}
    choices = [_choice(layer, recipe, globs, included, broad, house) for layer in layers]
    # Order matters: a shared weight that stays in 16 bit, and a router that leaves its group, decide which groups are
    # still whole.
    planned = _keep_shared([_plan_layer(layer, choice, recipe) for layer, choice in zip(layers, choices, strict=True)])
    planned = without_mixed_groups(_keep_whole_groups(_without_routers(planned)))
    plan = Plan(
        layers=tuple(planned),
        kv_cache=named_format(recipe.kv_cache, recipe.name, cache_format),
        attention=named_format(recipe.attention, recipe.name),
        guard=recipe.guard or None,
        observer=recipe.observer,
    )
    plan.check_groups()
    return plan


def _house_rules(layers: Sequence[Layer], included: Iterable[Set[str]]) -> dict[str, str]:
    """Returns the reasons for layers that their names keep in 16 bit, by layer name.

    A tower is small compared with the language model, or it is the model: CLIP pairs it with an encoder of texts. A
    glob of `--include` that matches only the tower's layers includes them; `included` has the names that each matches.
    """
    is_pair = any(_TEXT_ENCODER in layer.name for layer in layers)
    reasons: dict[str, str] = {}
    sizes = {layer.name: math.prod(layer.shape) for layer in layers if layer.kind in QUANTIZABLE}
    for reason, globs in _KEPT_NAMES.items():
        inside = set(matched(globs, [layer.name for layer in layers]))
        # A router stays in 16 bit whatever its share of the weights; towers, only where they are the smaller part.
        if reason != ROUTER:
            if is_pair or 2 * sum(size for name, size in sizes.items() if name in inside) > sum(sizes.values()):
                continue
            requested = [names & sizes.keys() for names in included]
            inside = inside.difference(*(names for names in requested if names <= inside))
        reasons |= dict.fromkeys(inside, reason)
    return reasons


def _kept_convs(layers: Sequence[Layer], recipe: Recipe, included: Iterable[Set[str]]) -> dict[str, str]:
    """Returns the reasons for convolutions that stay in 16 bit, by layer name.

    `--include` with a glob that matches only convolutions quantizes them nevertheless. ModelOpt quantizes every
    convolution to INT8, the first one too. To FP8 it quantizes convolutions that TensorRT has a kernel for (its
    `onnx/quantization/fp8.py`), and so leaves out first convolutions and depthwise ones.
    """
    # Shares of the weights decide what a model is: a network of convolutions, or one with a convolution in front.
    sizes = {layer.name: math.prod(layer.shape) for layer in layers if layer.kind in QUANTIZABLE}
    convs = {layer.name: layer for layer in layers if layer.kind == LayerKind.CONV}
    its_names = [names & sizes.keys() for names in included]
    requested = set[str]().union(*(names for names in its_names if names <= convs.keys()))
    if 2 * sum(sizes[name] for name in convs) < sum(sizes.values()):
        return {name: _FEW_CONVS for name in convs if name not in requested}
    weight, activation = named_format(recipe.weight, recipe.name), named_format(recipe.activation, recipe.name)
    if weight is None or activation is None or weight.element.bits != 8 or weight.element.is_integer:
        return {}

    def has_fp8_kernel(conv: Layer) -> bool:
        out, inputs, *kernel = conv.shape
        return min(out, inputs) >= 16 and out % 16 == inputs % 16 and math.prod(kernel) <= 32

    return {name: _NO_FP8_CONV for name, conv in convs.items() if name not in requested and not has_fp8_kernel(conv)}


def _choice(
    layer: Layer, recipe: Recipe, globs: Mapping[str, Set[str]], included: Mapping[str, Set[str]], broad: Set[str],
    house: Mapping[str, str],
) -> Rule:  # fmt: skip
    """Returns the formats, the solver and the reason that the recipe has for a layer, whose shape does not count yet.

    `globs` and `included` have the names that each glob matches; `broad` are globs that match quantizable layers.
    """
    choice = Rule("*", recipe.weight, recipe.activation, recipe.solver, f"recipe {recipe.name}")
    by = [glob for glob, names in included.items() if layer.name in names]
    included_by = next((glob for glob in by if glob not in broad), None)
    if layer.kind in (LayerKind.EMBEDDING, LayerKind.HEAD) and included_by is not None:
        choice = replace(choice, reason=f"included by {included_by}")
    elif layer.kind not in QUANTIZABLE:
        choice = Rule("*", KEEP, KEEP, recipe.solver, _KEPT_KINDS[layer.kind])
    if (kept_reason := layer.kept or house.get(layer.name)) is not None:
        choice = Rule("*", KEEP, KEEP, recipe.solver, kept_reason)
    for rule in recipe.rules:
        # An embedding, and a head that is one, need a rule of their own, and are none of many that a glob matches.
        one_of_many = layer.kind == LayerKind.EMBEDDING or layer.tied_to is not None
        meant = not one_of_many or rule.match not in broad or is_16bit(rule.weight)
        if meant and layer.name in globs[rule.match]:
            choice = _override(choice, rule, recipe)
    if included and not by and not is_16bit(choice.weight):
        choice = Rule("*", KEEP, KEEP, choice.solver, "matches no glob of include")
    return choice


def _plan_layer(layer: Layer, choice: Rule, recipe: Recipe) -> LayerPlan:
    """Returns the plan of a layer, in 16 bit where the chosen format does not fit it."""
    weight, activation = named_format(choice.weight, recipe.name), named_format(choice.activation, recipe.name)
    if layer.kind == LayerKind.EMBEDDING:
        activation = None  # its input is a number of a row
    solver, reason = choice.solver or recipe.solver or "rtn", choice.reason or ""
    if weight is not None and weight.gguf and (fits := fitting(weight, layer.matrix[-1])) is not weight:
        clause = f"{fits}, because in = {layer.matrix[-1]} is no multiple of {weight.superblock}"
        reason, weight = f"{reason}; {clause}" if reason else clause, fits
    if weight is not None and (refusal := obstacle(layer, weight, activation)):
        weight, reason = None, refusal
    if weight is not None and activation is not None and layer.is_bypassed and layer.kind == LayerKind.CONV:
        activation, reason = None, f"{reason}; inputs in 16 bit, because its module multiplies by the weight itself"
    if weight is None:
        activation = None
    elif layer.tied_to is not None:
        reason = f"{reason}; no longer shares the weight of {layer.tied_to}"
    return LayerPlan(
        layer.name, layer.kind, layer.shape, weight, activation, solver, reason, layer.group, layer.tied_to,
        transposed=layer.transposed,
    )  # fmt: skip


def _override(choice: Rule, rule: Rule, recipe: Recipe) -> Rule:
    weight = rule.weight or choice.weight
    if rule.weight is not None and is_16bit(rule.weight):
        activation = KEEP
    elif rule.activation is None and is_16bit(choice.weight):
        # A layer brought back from 16 bit takes the recipe's activation format again.
        activation = recipe.activation
    else:
        activation = rule.activation or choice.activation or KEEP
    return Rule(rule.match, weight, activation, rule.solver or choice.solver, rule.reason or f"rule {rule.match!r}")


def _keep_shared(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Leaves weights that another layer shares in 16 bit: the two could not be stored once and read twice."""
    sharers = sharers_of(layers)
    return [
        replace(layer, weight=None, activation=None, reason=f"its weight is also that of {sharer}")
        if layer.weight is not None and (sharer := sharers.get(layer.name))
        else layer
        for layer in layers
    ]


def _without_routers(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Takes routers out of their fusion groups: they share the input of experts, but no runtime merges them."""
    renamed = {}
    for name, members in groups_of(layers).items():
        # Routers are known by their reason: their kind is the same as any linear layer's.
        left = [member.name for member in members if member.weight is not None or member.reason != ROUTER]
        if len(left) < len(members):
            renamed[name] = {member: group_name(left) if len(left) > 1 else None for member in left}
    return [
        replace(layer, group=renamed[layer.group].get(layer.name)) if layer.group in renamed else layer
        for layer in layers
    ]


def _keep_whole_groups(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Gives the members of a fusion group one format: where one was kept for its shape, all are."""
    kept = {name: m for name, members in groups_of(layers).items() for m in reversed(members) if m.weight is None}
    whole = []
    for layer in layers:
        if layer.weight is not None and (member := kept.get(layer.group or layer.name)) is not None:
            reason = f"fused with {member.name}, which stays in 16 bit ({member.reason})"
            layer = replace(layer, weight=None, activation=None, reason=reason)
        whole.append(layer)
    return whole


_BLOCK = re.compile(r"\.(\d+)\.")
BY_CHOICE = " by choice"  # ends the names of an allocation's recipes; those of llama.cpp's formats include the head


def mix_rules(recipe: Recipe, layers: Sequence[Layer]) -> Iterator[Rule]:
    """Yields the exceptions of a mix of llama.cpp for the layers of a model; none for another recipe."""
    name, heads = recipe.name, [m.name for m in layers if m.kind == LayerKind.HEAD and m.tied_to is None]
    if name in MIXES or (name.endswith(BY_CHOICE) and recipe.weight in GGUF_FORMATS):
        own = "q8_0" if recipe.weight == "q8_0" else "q6_k"
        yield from (Rule(head, own, KEEP, reason=f"output head: {own} as in llama.cpp's mixes") for head in heads)
    if name not in MIXES:
        return
    base, count = MIXES[name], 1 + max((_block(layer.name) for layer in layers), default=0)
    for layer in layers:
        index, last = _block(layer.name), layer.name.rpartition(".")[2]
        more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
        chosen = None
        if name.endswith("_m") and last in ("down_proj", "v_proj") and more:
            chosen = "q6_k"
        elif last == "qkv_proj" and name.endswith("_m"):
            chosen = "q5_k" if base == "q4_k" else "q6_k"
        elif name == "q4_k_s" and ((last == "v_proj" and index < 4) or (last == "down_proj" and index < count // 8)):
            chosen = "q5_k"
        if chosen is not None and chosen != base:
            yield Rule(layer.name, chosen, KEEP, reason=f"{name} has {chosen} there")


def embedding_format(plan_formats: Sequence[Format | None], *, is_tied: bool, width: int) -> Format | None:
    """Returns the format of the embedding in a file whose layers have these; None for 16 bit.

    llama.cpp gives an embedding that is the output head too the head's format.
    """
    names = [format.name for format in plan_formats if format is not None and format.gguf]
    if not names:
        return None
    base = max(set(names), key=names.count)
    chosen = fitting(GGUF_FORMATS["q6_k" if is_tied and base != "q8_0" else base], width)
    return None if width % chosen.block[1] else chosen


def without_mixed_groups(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Takes layers out of fusion groups whose members have other formats; llama.cpp merges none of them."""
    renamed = dict[str, str | None]()
    for members in groups_of(layers).values():
        if len({m.weight for m in members}) > 1 and any(m.weight is not None and m.weight.gguf for m in members):
            for weight in {m.weight for m in members}:
                alike = [m.name for m in members if m.weight is weight]
                renamed |= dict.fromkeys(alike, group_name(alike) if len(alike) > 1 else None)
    return [replace(layer, group=renamed[layer.name]) if layer.name in renamed else layer for layer in layers]


def _block(name: str) -> int:
    match = _BLOCK.search(name)
    return int(match[1]) if match else 0
