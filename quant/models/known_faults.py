"""Faults of transformers' own models that stop every forward pass; each is mended where a model is opened."""

from __future__ import annotations

from typing import Any

from torch import nn


def mend_forward(model: nn.Module) -> nn.Module:
    """Lets the forward pass of a model end that transformers cannot run; gives the model.

    Llama 4 with images (`Llama4ForConditionalGeneration`, transformers 5.24): its forward reads `image_outputs` from
    the output of its language model, which has no such field, and ends in an AttributeError.
    """
    language_model: Any = getattr(model, "language_model", None)
    if type(model).__name__ == "Llama4ForConditionalGeneration" and language_model is not None:
        hooks = language_model._forward_hooks
        if _without_image_outputs not in hooks.values():
            language_model.register_forward_hook(_without_image_outputs)
    return model


def _without_image_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    # A model output, unless a tuple was asked for.
    if hasattr(output, "keys") and not hasattr(output, "image_outputs"):
        output.image_outputs = None
