"""`resolve` applies a recipe to the layers of a model, which gives a plan.

The last of these that applies to a layer decides:

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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from quant.formats.format import Format, cache_format, is_16bit
from quant.recipes.groups import group_name
from quant.recipes.layers import ROUTER, Layer, LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of
from quant.recipes.recipe import KEEP, Recipe, Rule, matched, named_format, no_match

QUANTIZABLE = (LayerKind.LINEAR, LayerKind.EXPERTS, LayerKind.CONV)
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
_TEXT_ENCODER = "text_model.encoder."  # of CLIP, SigLIP and CLAP; a language model's blocks are not an encoder
_KEPT_NAMES = {
    ROUTER: ("*router*", "*.gate", "*.shared_expert_gate"),
    "vision tower: small compared with the language model and sensitive": ("*vision*", "*visual.*", "*image_encoder*"),
    "audio tower: small compared with the language model and sensitive": ("*audio_tower*", "*audio_encoder*"),
    "projector into the language model: small, and text never reaches it": (
        "*multi_modal_projector*",
        "*mm_projector*",
        "*modality_projection*",
        "*.connector.*",
        "*.aligner.*",
        "*.merger.*",
        "*image_to_text_projection*",
        "*.embed_audio.*",
        "*audio_projection*",
    ),
}


def resolve(
    layers: Sequence[Layer],
    recipe: Recipe,
    *,
    only: Sequence[str] = (),
) -> Plan:
    """Applies `recipe` to the layers of a model.

    Args:
        layers: every layer that owns a weight, as `find_layers` gives them.
        recipe: the rules.
        only: globs; if given, a layer that matches none of them stays in 16 bit.

    Raises:
        ValueError: a glob matches no layer, or rules give members of one fusion group different formats.
    """
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
    planned = _keep_whole_groups(_without_routers(planned))
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

    A tower is small compared with the language model, or it is the model: CLIP pairs it with an encoder of texts.
    `--include` with a glob that matches only the tower's layers includes them.

    Args:
        layers: all layers of the model.
        included: the names that each glob of `--include` matches.
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

    Args:
        layers: all layers of the model.
        recipe: the recipe, whose own formats count here.
        included: the names that each glob of `--include` matches.
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
    return {name: _NO_FP8_CONV for name, conv in convs.items() if name not in requested and not _has_fp8_kernel(conv)}


def _has_fp8_kernel(conv: Layer) -> bool:
    out, inputs, *kernel = conv.shape
    return min(out, inputs) >= 16 and out % 16 == inputs % 16 and math.prod(kernel) <= 32


def _choice(
    layer: Layer,
    recipe: Recipe,
    globs: Mapping[str, Set[str]],
    included: Mapping[str, Set[str]],
    broad: Set[str],
    house: Mapping[str, str],
) -> Rule:
    """Returns the formats, the solver and the reason that the recipe has for a layer.

    Args:
        layer: the layer, whose shape does not count yet.
        recipe: the rules.
        globs: the names that each glob matches.
        included: the same of the globs of `--include` only; empty if it is not given.
        broad: globs that match quantizable layers.
        house: reasons for layers that the house rules keep in 16 bit, by layer name.
    """
    choice = Rule("*", recipe.weight, recipe.activation, recipe.solver, f"recipe {recipe.name}")
    by = [glob for glob, names in included.items() if layer.name in names]
    included_by = next((glob for glob in by if glob not in broad), None)
    if layer.kind in (LayerKind.EMBEDDING, LayerKind.HEAD) and included_by is not None:
        choice = dataclasses.replace(choice, reason=f"included by {included_by}")
    elif layer.kind not in QUANTIZABLE:
        choice = Rule("*", KEEP, KEEP, recipe.solver, _KEPT_KINDS[layer.kind])
    if (kept_reason := layer.kept or house.get(layer.name)) is not None:
        choice = Rule("*", KEEP, KEEP, recipe.solver, kept_reason)
    for rule in recipe.rules:
        # An embedding is quantized only by a rule of its own, never as one of many that a glob happens to match.
        meant = layer.kind != LayerKind.EMBEDDING or rule.match not in broad or is_16bit(rule.weight)
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
    reason = choice.reason or ""
    if weight is not None and (refusal := obstacle(layer, weight, activation)):
        weight, reason = None, refusal
    return LayerPlan(
        name=layer.name,
        kind=layer.kind,
        shape=layer.shape,
        weight=weight,
        activation=activation if weight is not None else None,
        solver=choice.solver or recipe.solver or "rtn",
        reason=reason,
        group=layer.group,
        tied_to=layer.tied_to,
        transposed=layer.transposed,
    )


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


def obstacle(layer: Layer, weight: Format, activation: Format | None) -> str | None:
    """Returns why `layer` cannot take `weight` with inputs in `activation`, one clause; None if it can."""
    if layer.kind not in (*QUANTIZABLE, LayerKind.HEAD, LayerKind.EMBEDDING):
        return f"{weight} is for linear layers; this is a layer of kind '{layer.kind}'"
    if layer.kind == LayerKind.CONV and (refusal := _conv_obstacle(weight, activation)):
        return refusal
    if layer.kind == LayerKind.EMBEDDING and activation is not None:
        return f"the input of an embedding is a number of a row, which {activation} cannot round"
    if layer.tied_to is not None:
        return f"tied to {layer.tied_to}, which is stored once and in 16 bit"
    if layer.obstacle is not None:
        return layer.obstacle
    if layer.is_bypassed and activation is not None and activation.is_static:
        # Mamba and Jamba: `self.dt_proj.weight @ time_step`.
        return f"its module multiplies by the weight itself, so that no scale of inputs in {activation} can be measured"
    # Checkpoints store gate and up of an expert as two matrices, each half of the fused rows.
    half = layer.shape[-2] // 2
    gates = layer.kind == LayerKind.EXPERTS and layer.name.endswith("gate_up_proj")
    if gates and weight.block[0] and half % weight.block[0]:
        return f"gate and up are stored apart, and {half} rows each are not a multiple of {weight}'s {weight.block[0]}"
    for format in (weight, activation):
        if format is None or format.divides(layer.matrix) or format.takes_short_blocks:
            continue
        return f"in = {layer.matrix[-1]} is not a multiple of {format}'s block of {format.block[1]}"
    return None


def _conv_obstacle(weight: Format, activation: Format | None) -> str | None:
    """Returns why no convolution is in these formats: kernels take one scale a channel, and one a tensor or image."""
    for format, takes in (
        (weight, "fp8, fp8_channel or int8"),
        (activation, "fp8, fp8_token, int8_token or int8_tensor"),
    ):
        if format is not None and not ((format.per_row or format.per_tensor) and format.scale.is_wide):
            return f"convolution: no runtime convolves in blocks, as {format} has them; it takes {takes}"
    return None


def _keep_shared(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Leaves weights that another layer shares in 16 bit: the two could not be stored once and read twice."""
    # `tied_to` names the owner; here the owner looks up a sharer.
    sharers = {layer.tied_to: layer.name for layer in layers if layer.tied_to is not None}
    return [
        dataclasses.replace(layer, weight=None, activation=None, reason=f"its weight is also that of {sharer}")
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
        dataclasses.replace(layer, group=renamed[layer.group].get(layer.name)) if layer.group in renamed else layer
        for layer in layers
    ]


def _keep_whole_groups(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Gives the members of a fusion group one format: where one was kept for its shape, all are."""
    groups = groups_of(layers)

    def whole(layer: LayerPlan) -> LayerPlan:
        kept_member = next((m for m in groups[layer.group or layer.name] if m.weight is None), None)
        if layer.weight is None or kept_member is None:
            return layer
        reason = f"fused with {kept_member.name}, which stays in 16 bit ({kept_member.reason})"
        return dataclasses.replace(layer, weight=None, activation=None, reason=reason)

    return [whole(layer) for layer in layers]
