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

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

# What is called of a rule; `operations`, `add_tensor` and `convert` of converters alone.
_OF_RULES = ("source_patterns", "target_patterns", "rename_source_key", "reverse_transform")
_OF_CONVERTERS = (*_OF_RULES, "operations", "add_tensor", "convert")


def class_rules(model: nn.Module) -> list[Any]:
    """Returns the rules for checkpoints of a model's class, from the files to the model, that have a way back.

    Raises:
        ValueError: this version of transformers keeps its rules in another way.
    """
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
    """Returns the rules that hold in both directions."""
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
