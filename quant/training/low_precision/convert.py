"""`to_low_precision_training` puts rounded products into a model's linear layers, and `from_…` takes them out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from quant.calibration.blocks import block_names
from quant.errors import UserError, counted
from quant.training.low_precision.linear import LowPrecision, LowPrecisionLinear
from quant.training.low_precision.recipe import TrainingRecipe, get_training_recipe


@dataclass(frozen=True, eq=False)
class LowPrecisionTraining:
    """What `to_low_precision_training` did.

    Attributes:
        recipe: that the layers follow.
        backend: that computes the products: "emulated".
        note: how this machine runs the recipe, for the log.
        converted: names of the layers whose products are rounded.
        kept: layers that stay as they were, with the reason, by name.
    """

    recipe: TrainingRecipe
    backend: str
    note: str
    converted: tuple[str, ...]
    kept: dict[str, str]
    model: nn.Module

    def at(self, share: float) -> None:
        """Says how far training is, as a share of all steps; the recipe's schedule may end the forward's rounding."""
        for name in self.converted:
            layer = self.model.get_submodule(name)
            assert isinstance(layer, LowPrecisionLinear)
            layer.low_precision.rounds_forward = share < self.recipe.schedule.bf16_forward_from

    def __str__(self) -> str:
        """A line for the log, and one for each reason."""
        lines = [f"{counted(len(self.converted), 'linear layer')} in {self.recipe.name} ({self.backend}): {self.note}"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"in 16 bit: {counted(len(n), 'layer')}, {n[0]} first: {why}" for why, n in reasons.items()]
        return "\n".join(lines)


def to_low_precision_training(
    model: nn.Module,
    recipe: str | TrainingRecipe = "fp8_rowwise",
    *,
    backend: str = "auto",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> LowPrecisionTraining:
    """Has the linear layers of a model train in low precision; changes their class in place.

    State-dict keys, parameters, hooks, tied weights and optimizers stay as they are. Call it before `torch.compile`,
    DDP or FSDP2 wrap the model.

    Args:
        model: any module with `nn.Linear` layers.
        recipe: a name of `RECIPES`, such as "fp8_rowwise", "mxfp8" or "nvfp4", or a recipe of your own.
        backend: "emulated" rounds the operands and multiplies in BF16, or in FP32 on a CPU: the numbers of hardware
            that has the format, on any device. "auto" takes the fastest that this machine has.
        include: globs; if given, only layers that match one are converted.
        exclude: globs of layers that stay as they are.

    Raises:
        UserError: an unknown recipe or backend, a model on the meta device or converted already, or no layer that can
            be converted; the message names the way out.
    """
    try:
        recipe = get_training_recipe(recipe)
    except ValueError as error:
        raise UserError(str(error)) from None
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    _check_model(model)
    kept: dict[str, str] = {}
    converted = []
    ends = _blocks_at_the_ends(model, recipe)
    head = _output_head(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = _reason_to_keep(name, module, recipe, include, exclude, ends, head)
        if reason is not None:
            kept[name] = reason
            continue
        module.__class__ = LowPrecisionLinear
        module.low_precision = LowPrecision(recipe)  # type: ignore[assignment]
        converted.append(name)
    if not converted:
        first = next(iter(kept.items()), None)
        why = f"{first[0]}: {first[1]}" if first else f"{type(model).__name__} has no nn.Linear"
        raise UserError(f"no layer can train in {recipe.name}: {why}")
    return LowPrecisionTraining(recipe, "emulated", _note(model), tuple(converted), kept, model)


def from_low_precision_training(model: nn.Module) -> None:
    """Gives the layers of a model in low-precision training their plain class again; weights stay as trained."""
    for module in model.modules():
        if type(module) is LowPrecisionLinear:
            del module.low_precision
            module.__class__ = nn.Linear


BACKENDS = ("auto", "emulated")


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            raise UserError(
                f"{name}: the model trains in {module.low_precision.recipe.name} already; call "
                "quant.from_low_precision_training(model) first"
            )
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise UserError(f"{meta} is on the meta device and has no values; load the weights first")


def _reason_to_keep(
    name: str,
    module: nn.Linear,
    recipe: TrainingRecipe,
    include: Sequence[str],
    exclude: Sequence[str],
    ends: Sequence[str],
    head: nn.Module | None,
) -> str | None:
    """Why a layer stays in 16 bit; None where it is converted."""
    matches: Callable[[Sequence[str]], bool] = lambda globs: any(fnmatchcase(name, glob) for glob in globs)  # noqa: E731
    size = next((size for size in module.weight.shape if size % recipe.multiple), None)
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__} computes in a way of its own"
    if matches(exclude) or (include and not matches(include)):
        return "excluded" if matches(exclude) else "not included"
    if module is head and not include:
        return "the output head, whose gradients are the most sensitive; name it in include to convert it"
    if any(name.startswith(f"{block}.") for block in ends):
        return f"{recipe.name} keeps the first {recipe.first_layers} and last {recipe.last_layers} blocks"
    if size is not None:
        return f"{list(module.weight.shape)}: {recipe.name} needs sizes that are multiples of {recipe.multiple}"
    return None


def _output_head(model: nn.Module) -> nn.Module | None:
    embeddings = getattr(model, "get_output_embeddings", None)
    return embeddings() if callable(embeddings) else None


def _blocks_at_the_ends(model: nn.Module, recipe: TrainingRecipe) -> list[str]:
    """Names of the repeated blocks that the recipe leaves in 16 bit."""
    if not recipe.first_layers and not recipe.last_layers:
        return []
    blocks = block_names(model)
    return [*blocks[: recipe.first_layers], *blocks[len(blocks) - recipe.last_layers :]]


def _note(model: nn.Module) -> str:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    multiplies = "BF16 products" if device.type == "cuda" else "FP32 products"
    return f"emulated by {multiplies} of rounded operands, which is slower than 16 bit"
