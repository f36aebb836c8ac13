"""The flag `tie_word_embeddings` of a checkpoint: false where an output head is stored that is not the embedding.

The flag promises readers that the head *is* the embedding, and vLLM then skips the head in the files. transformers 5
compares the two and keeps both where they differ, with a line in its log: so a model can be in memory with a head of
its own and a config that denies it. A fine-tune that left the flag in config.json is such a model, and so is one of
which only the head is quantized.

`_tied_weights_keys` of each transformers class lists the tensors that the flag ties, {"lm_head.weight":
"model.embed_tokens.weight"}. The flag stands in the config of that class; servers read the one of the language model
inside a model of images, so it is cleared in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

FLAG = "tie_word_embeddings"


def untied_pairs(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Returns the tensors that a tied model would share with another and that differ from it here.

    Args:
        model: a model of transformers, perhaps with quantized modules in place.
        state: the tensors that are not quantized, by name; None takes the model's own.

    Returns:
        By name of the tensor that would be tied, such as "lm_head.weight": the config whose flag ties it.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) if state is None else state
    quantized = {f"{name}." for name, module in model.named_modules() if hasattr(type(module), "quantized_weight")}
    return {
        target: config for target, source, config in _pairs(model) if _differ(target, source, tensors, tuple(quantized))
    }


def _pairs(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yields both names of the tensors that may be tied, and the config whose flag says whether they are."""
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        # Names may be patterns; those are of heads for boxes (D-FINE), which no flag of words concerns.
        for target, source in keys.items() if isinstance(keys, Mapping) else ():
            yield f"{prefix}.{target}".lstrip("."), f"{prefix}.{source}".lstrip("."), getattr(module, "config", None)


def _differ(target: str, source: str, tensors: Mapping[str, torch.Tensor], quantized: tuple[str, ...]) -> bool:
    """Returns whether two tensors are stored apart; codes of a quantized layer are nobody else's."""
    owned = [name.startswith(quantized) for name in (target, source)]
    if any(owned):
        return all(own or name in tensors for own, name in zip(owned, (target, source), strict=True))
    if target not in tensors or source not in tensors:
        return False
    return not hold_same_values(tensors[target], tensors[source])


def hold_same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors hold the same values; without data (on the meta device), whether they are one."""
    if a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and not a.is_meta):
        return True
    if a.is_meta or b.is_meta:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))


def clear_flag(fields: dict[str, Any], model: Any, untied: Collection[Any]) -> bool:
    """Writes into a config.json that the head of `model` is not its embedding, if it is not.

    Args:
        fields: the contents of config.json, changed in place: at the top and in the configs inside it.
        model: a model of transformers.
        untied: the configs of `untied_pairs`.

    Returns:
        Whether anything was changed.
    """
    if not untied:
        return False
    changed = False
    configs = {id(config) for config in untied}
    text = model.config.get_text_config()
    # The language model inside a larger one, and the larger one around it, speak of the same head.
    if configs & {id(model.config), id(text)}:
        configs |= {id(model.config), id(text)}
    for config, table in _tables(model.config, fields):
        # T5's flag says whether its outputs are scaled; its readers compare the two tensors.
        # A solver has cleared it in memory where it gave the head a weight of its own; the file is the source's.
        stated = getattr(config, FLAG, False) or table.get(FLAG, getattr(type(config), FLAG, False))
        if id(config) in configs and stated and not hasattr(config, "scale_decoder_outputs"):
            changed, table[FLAG] = True, False
    return changed


def _tables(config: Any, fields: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each config of transformers with its table of config.json, the outermost first."""
    yield config, fields
    for name in getattr(config, "sub_configs", ()):
        if isinstance(fields.get(name), dict):
            yield from _tables(getattr(config, name, None), fields[name])
