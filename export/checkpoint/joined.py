"""Tensors in 16 bit that transformers splits or joins as it loads a model, in the form that the files have.

    files                                          model                                        rule of transformers
    vision_tower.encoder.blocks.0.wqkv.weight      …vision_tower.layers.0.attn.q_proj.weight    Chunk, PermuteForRope
                                                   … k_proj.weight, … v_proj.weight
    model.layers.0.self_attn.q_conv1d.weight       model.layers.0.self_attn.conv1d.weight       Concatenate
      … k_conv1d.weight, … v_conv1d.weight

Servers read the files' form. Experts have rules of the same kind, and are written one by one (`StoredNames`). A
quantized layer keeps the form of the model, since its codes and scales cannot be joined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from quant.export.checkpoint.files.conversion_rules import class_rules, file_rules, operations

Names = Collection[str]


def in_files(
    model: Any, tensors: Mapping[str, torch.Tensor], source: Names, stored: Callable[[str], str]
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Returns tensors of the model in the form of the source's files, as far as the source has it.

    Args:
        model: a model of transformers.
        tensors: its tensors in 16 bit, by name.
        source: the names of the tensors in the source's files.
        stored: a function from a name to the name on disk.

    Returns:
        Tensors by their names on disk, and the names in the model of the tensors that each was made of.
    """
    as_in_source: dict[str, torch.Tensor] = {}
    made_of: dict[str, list[str]] = {}
    # A rule without a way back, such as one that drops padding, is no error before it is asked for.
    for rule in _without_experts(file_rules(model)):
        with suppress(NotImplementedError):
            for parts, converted in _converted(model, rule.reverse_transform(), tensors):
                on_disk = {stored(name): tensor for name, tensor in converted.items()}
                if on_disk.keys() <= set(source) and not on_disk.keys() & as_in_source.keys():
                    as_in_source |= {name: tensor.contiguous() for name, tensor in on_disk.items()}
                    made_of |= dict.fromkeys(on_disk, parts)
    return as_in_source, made_of


def in_model(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of files in the form of the model, which has no others of their names.

    Args:
        model: the model that is loaded; other models than transformers' have no rules.
        tensors: tensors by the names that the files' names have in the model.
    """
    state = model.state_dict(keep_vars=True)
    unknown = {name: tensor for name, tensor in tensors.items() if name not in state}
    result = dict(tensors)
    for rule in _without_experts(class_rules(model)) if unknown and hasattr(model, "base_model_prefix") else ():
        for parts, converted in _converted(model, rule, unknown):
            if converted.keys() <= state.keys():
                result = {name: tensor for name, tensor in result.items() if name not in parts} | converted
    return result


def _without_experts(rules: Iterable[Any]) -> list[Any]:
    """Returns the rules that change tensors, except those of experts."""
    return [
        rule for rule in rules if operations(rule) and not {"MergeModulelist", "SplitModulelist"} & {*operations(rule)}
    ]


def _converted(
    model: Any, rule: Any, tensors: Mapping[str, torch.Tensor]
) -> Iterable[tuple[list[str], dict[str, torch.Tensor]]]:
    """Yields the tensors that a rule makes, with the names of its inputs; only where all its inputs are present."""
    # Several tensors that become one have its name after the renaming, and so are one group.
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in tensors:
        target, pattern = rule.rename_source_key(name)
        if pattern is not None:
            groups.setdefault(target, []).append((name, pattern))
    for target, parts in groups.items():
        if len({pattern for _, pattern in parts}) < len(rule.source_patterns) or len(parts) > len(rule.source_patterns):
            continue
        work = copy.deepcopy(rule)
        for name, pattern in parts:
            work.add_tensor(target, name, pattern, tensors[name])
        converted = work.convert(target, model=model, config=model.config)
        yield (
            [name for name, _ in parts],
            {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()},
        )
