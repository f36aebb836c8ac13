"""`reasons_to_keep` says which layers stay in 16 bit when a model is converted to low-precision training, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from quant.recipes.blocks import block_names
from quant.base.errors import UserError
from quant.recipes.layer_kind import LayerKind
from quant.recipes.layers import Layer
from quant.recipes.recipe import matched, no_match
from quant.training.low_precision.fused_experts_training import experts_refusal
from quant.training.low_precision.training_recipe import TrainingRecipe


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
