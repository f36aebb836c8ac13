"""The rules by which transformers renames, splits and joins tensors between the files of a checkpoint and a model.

transformers 5 has them as data, but documents none of it, so this file alone reads them (seen in 5.17 to 5.24):

    conversion_mapping.get_model_conversion_mapping(model)    rules for checkpoints of the model's class
    model._weight_conversions                                 those that the model's own files needed, as it was loaded
    quantizers.base.MODULES_TO_PATCH_FOR_QUANTIZATION         experts that become linear layers in quantized models

A rule turns names that match its `source_patterns` into names of its `target_patterns`. Those of Mixtral:

    WeightRenaming(".block_sparse_moe.", ".mlp.")
    WeightConverter([".experts.*.w1.weight", ".experts.*.w3.weight"], ".experts.gate_up_proj",
                    [MergeModulelist(dim=0), Concatenate(dim=1)])
"""

import copy
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

# What is called of a rule; `operations`, `add_tensor` and `convert` of converters alone.
_OF_RULES = ("source_patterns", "target_patterns", "rename_source_key", "reverse_transform")
_OF_CONVERTERS = (*_OF_RULES, "operations", "add_tensor", "convert")


def class_rules(model: nn.Module) -> list[Any]:
    """Returns the invertible rules for checkpoints of a model's class; ValueError for another version's rules."""
    rules = _private("conversion_mapping", "get_model_conversion_mapping")(model, add_legacy=False)
    return _invertible(rules)


def file_rules(model: nn.Module) -> list[Any]:
    """Returns the rules that the files of a loaded model needed; of a model that was built in memory, `class_rules`."""
    used = getattr(model, "_weight_conversions", None)
    return class_rules(model) if used is None else _invertible(used)


def takes_experts_apart(model: nn.Module) -> bool:
    """Returns whether transformers makes linear layers of a model's experts where its checkpoint is quantized."""
    classes = _private("quantizers.base", "MODULES_TO_PATCH_FOR_QUANTIZATION")
    return any(type(module).__name__ in classes for module in model.modules())


def is_renaming(rule: Any) -> bool:
    """Returns whether a rule changes names alone, in both directions."""
    # A file need not have the prefix of a `PrefixChange`, and a `LayerPairCollapse` cannot be undone.
    classes = [cls.__name__ for cls in type(rule).__mro__]
    return "WeightRenaming" in classes and classes[0] not in ("PrefixChange", "LayerPairCollapse")


def is_group(rule: Any) -> bool:
    """Returns whether a renaming is several at once, such as `fc0` to `fc1` and `fc1` to `fc2`."""
    return type(rule).__name__ == "GroupWeightRename"


def renaming(rule: Any) -> Callable[[str], str]:
    """Returns the function from name to name that a renaming is."""
    if is_group(rule):
        # It renames nothing until it has met its first pattern, and is asked for names in any order here.
        rule = copy.copy(rule)
        rule._active = True
    return lambda name: str(rule.rename_source_key(name)[0])


def operations(rule: Any) -> list[str]:
    """Returns the names of the operations by which a rule changes tensors, in their order; none of a renaming's."""
    return [type(operation).__name__ for operation in getattr(rule, "operations", ())]


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        raise _unknown_version(f"transformers.{module}.{name}") from None


def _invertible(rules: list[Any]) -> list[Any]:
    usable = [rule for rule in rules if is_renaming(rule) or type(rule).__name__ == "WeightConverter"]
    for rule in usable:
        for name in _OF_RULES if is_renaming(rule) else _OF_CONVERTERS:
            if not hasattr(rule, name):
                raise _unknown_version(f"{type(rule).__name__}.{name}")
    return usable


def _unknown_version(missing: str) -> ValueError:
    import transformers

    return ValueError(
        f"transformers {transformers.__version__} has no {missing}, by which the tensors of a model have their names "
        "in its files; install an earlier one, such as 5.24"
    )


# Tensors in 16 bit that transformers splits or joins as it loads a model, in the form that the files have:
#
#     files                                          model                                        rule of transformers
#     vision_tower.encoder.blocks.0.wqkv.weight      …vision_tower.layers.0.attn.q_proj.weight    Chunk, PermuteForRope
#                                                    … k_proj.weight, … v_proj.weight
#     model.layers.0.self_attn.q_conv1d.weight       model.layers.0.self_attn.conv1d.weight       Concatenate
#       … k_conv1d.weight, … v_conv1d.weight
#
# Servers read the files' form. Experts have rules of the same kind, and are written one by one (`StoredNames`). A
# quantized layer keeps the form of the model, since its codes and scales cannot be joined.


def in_files(
    model: Any, tensors: Mapping[str, torch.Tensor], source: Collection[str], stored: Callable[[str], str]
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Returns tensors of the model in 16 bit in the form of the source's files, as far as the source has it.

    They come by their names on disk, with the names in the model of the tensors that each was made of.
    """
    as_in_source: dict[str, torch.Tensor] = {}
    made_of: dict[str, list[str]] = {}
    # A rule without a way back, such as one that drops padding, is no error before it is asked for.
    for rule in _without_experts(file_rules(model)):
        with suppress(NotImplementedError):
            for inputs, converted in _converted(model, rule.reverse_transform(), tensors):
                on_disk = {stored(name): tensor for name, tensor in converted.items()}
                if on_disk.keys() <= set(source) and not on_disk.keys() & as_in_source.keys():
                    as_in_source |= {name: tensor.contiguous() for name, tensor in on_disk.items()}
                    made_of |= dict.fromkeys(on_disk, inputs)
    return as_in_source, made_of


def in_model(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of files, by the names that these have in the model, in the form of the model."""
    state = model.state_dict(keep_vars=True)
    unknown = {name: tensor for name, tensor in tensors.items() if name not in state}
    result = dict(tensors)
    for rule in _without_experts(class_rules(model)) if unknown and hasattr(model, "base_model_prefix") else ():
        for inputs, converted in _converted(model, rule, unknown):
            if converted.keys() <= state.keys():
                result = {name: tensor for name, tensor in result.items() if name not in inputs} | converted
    return result


def _without_experts(rules: Iterable[Any]) -> list[Any]:
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
    for target, inputs in groups.items():
        if len({pattern for _, pattern in inputs}) < len(rule.source_patterns) or len(inputs) > len(
            rule.source_patterns
        ):
            continue
        work = copy.deepcopy(rule)
        for name, pattern in inputs:
            work.add_tensor(target, name, pattern, tensors[name])
        converted = work.convert(target, model=model, config=model.config)
        yield (
            [name for name, _ in inputs],
            {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()},
        )
