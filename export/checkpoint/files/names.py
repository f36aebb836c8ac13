"""`StoredNames` translates the names of tensors in a model to their names on disk, and back.

transformers 5 builds a model from parts that need not be named, or split, as they are in its checkpoint:

    disk     model.layers.0.block_sparse_moe.experts.3.w1.weight     language_model.model.layers.0.…
    module   model.layers.0.mlp.experts.gate_up_proj                 model.language_model.layers.0.…

Servers read the names on disk, and so does transformers: with the modules' names in a checkpoint, transformers would
leave the experts at random values. This file applies its rules in both directions. Everywhere else
a tensor has its name in the model, and one expert's matrices are `….experts.3.gate_proj`, `.up_proj` and `.down_proj`
until they are written.

transformers has the rules by which it renames, splits and joins tensors as data, but documents none of it, so this file
alone reads them (seen in 5.17 to 5.24):

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
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor, nn

from quant.formats.format import Format
from quant.kernels.linear.experts import ExpertStack
from quant.recipes.layers import Stacking, stacking_of

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "weight": ("",)}
"""Matrices of an expert in a parameter, in the order of its rows; any other parameter is one matrix of its own name."""

_EXPERT = re.compile(r"(.+\.\d+)\.(\w+)\.(\w+)")
Rename = Callable[[str], str]
FormatsOf = Callable[[str, str], tuple[Format, Format | None] | None]
"""From a matrix's name in the model and its class to the formats of its weight and input; None for 16 bit."""


@dataclass(frozen=True)
class StoredNames:
    """Names of tensors, in both directions."""

    renamings: tuple[Rename, ...] = ()  # from a name in the model to the name on disk, one after the other
    back: tuple[Rename, ...] = ()  # from a name on disk to the name in the model
    experts: Mapping[str, str] = field(default_factory=dict)  # matrices of an expert on disk, by ours
    cut: frozenset[str] = frozenset()  # fused parameters that are stored expert by expert also in 16 bit
    apart: bool = False  # transformers takes the experts of a quantized checkpoint apart into linear layers
    # Parameters of experts that transformers cannot hold once they are quantized. It would run with random numbers, so
    # an empty tensor is stored under the names in `stopped`, at which it stops. Servers know those in `unread`, and
    # would fail at an empty tensor.
    stopped: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    # The model's parameters by their names on disk, as the rules of `back` need not invert `renamings`; and names on
    # disk that `renamings` do not lead to, by the model's names.
    parameters: Mapping[str, str] = field(default_factory=dict)
    in_source: Mapping[str, str] = field(default_factory=dict)
    # Tensors of the source that the model's class ignores, by their names on disk; the modules in 16 bit that have such
    # a matrix and may be linear layers elsewhere, and those whose tensors the model holds split or joined; and the
    # outermost modules that hold no other tensors, such as `mtp`.
    carried: tuple[str, ...] = ()
    carried_modules: tuple[str, ...] = ()
    carried_trees: tuple[str, ...] = ()

    def stored(self, name: str) -> str:
        """Returns the name on disk of the tensor `name`, whatever the suffix of a quantized weight's part."""
        weight, suffix = _weight_and_suffix(name)
        on_disk = self.in_source.get(weight) or _apply(self.renamings, _swap(weight, self.experts))
        return on_disk.removesuffix(".weight") + suffix if suffix else on_disk

    def of_model(self, name: str) -> str:
        """Undoes `stored`; a name of the model's own stays."""
        ours = {theirs: ours for ours, theirs in self.experts.items()}
        weight, suffix = _weight_and_suffix(name)
        in_model = self.parameters.get(weight) or _swap(_apply(self.back, weight), ours)
        return in_model.removesuffix(".weight") + suffix if suffix else in_model

    def as_in(self, source: Collection[str]) -> Self:
        """Returns the names, corrected by a source's own where `renamings` lead to names that the source lacks.

        Kimi-K2.5's rule for `blocks` of its vision tower, undone, renames the `layers` of its language model too.
        """
        ours = {self.of_model(name): name for name in source} if self.renamings else {}
        other = {name: stored for name, stored in ours.items() if self.stored(name) not in source}
        return replace(
            self, in_source=other, parameters={**self.parameters, **{stored: name for name, stored in other.items()}}
        )

    def with_carried(self, shapes: Mapping[str, Sequence[int]], uncarried: Iterable[str]) -> Self:
        """Returns the names with carried tensors, given their shapes by name on disk, and all other tensors on disk."""
        modules = [n.removesuffix(".weight") for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2]
        shared = {"", *(tree for name in uncarried for tree in _trees(name))}
        # Stacks of experts count too. A server builds their modules under names of its own, `….experts.0.gate_proj`,
        # or joins `q_proj`, `k_proj` and `v_proj`: the tree is the name that all of them begin with.
        matrices = [name for name, shape in shapes.items() if len(shape) in (2, 3)]
        outermost = [next((tree for tree in _trees(name) if tree not in shared), "") for name in matrices]
        trees = [tree for tree in dict.fromkeys(outermost) if tree and tree not in modules]
        return replace(self, carried=tuple(shapes), carried_modules=tuple(modules), carried_trees=tuple(trees))

    def with_joined(self, stored: Collection[str], state: Collection[str]) -> Self:
        """Returns the names with the modules in 16 bit of `stored`, names on disk, that the model's `state` lacks."""
        # Experts, which are stored one by one, have a pattern.
        weights = [name for name in stored if name.endswith(".weight") and ".experts." not in name]
        modules = [
            name.removesuffix(".weight")
            for name in weights
            if f"{name}_scale" not in stored and name not in self.carried and self.of_model(name) not in state
        ]
        return replace(self, carried_modules=tuple(dict.fromkeys((*self.carried_modules, *modules))))

    def both(self, layer: str) -> list[str]:
        """Returns a layer's name as transformers knows it, and, where that differs, as the files have it."""
        return list(dict.fromkeys((layer, self.stored(f"{layer}.weight").removesuffix(".weight"))))


def _trees(name: str) -> list[str]:
    """Returns the modules that hold the tensor `name`, outermost first: `a` and `a.b` of `a.b.weight`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def stored_names(model: nn.Module | None) -> StoredNames:
    """Returns the names for a model of transformers; for any other, nothing changes."""
    # A model of transformers cannot exist while its library is not loaded.
    if model is None or "transformers" not in sys.modules or not hasattr(model, "base_model_prefix"):
        return StoredNames()
    rules, used = class_rules(model), file_rules(model)
    groups = {tuple(rule.source_patterns) for rule in used if is_group(rule)}
    fused = _fused(rules)
    apart = takes_experts_apart(model)
    names = StoredNames(
        renamings=tuple(renaming(rule.reverse_transform()) for rule in reversed(used) if is_renaming(rule)),
        # Where the files did not need a group of renamings, names of its pattern mean other tensors.
        back=tuple(
            renaming(rule)
            for rule in rules
            if is_renaming(rule) and not (is_group(rule) and tuple(rule.source_patterns) not in groups)
        ),
        experts={
            ours: theirs
            for last, names in fused.items()
            for ours, theirs in zip(EXPERT_PARTS.get(last, (last,)), names, strict=True)
        },
        cut=frozenset((*EXPERT_PARTS, "down_proj") if apart else _fused(used)),
        apart=apart,
    )
    placeless = [] if apart else list(_without_rule(model, fused))
    # Servers read plain stacks of these names; an empty one would stop them, too.
    of_servers = (".experts.gate_up_proj", ".experts.down_proj")
    stopped = frozenset(
        name for name, stacking in placeless if not (stacking.is_plain and names.stored(name).endswith(of_servers))
    )
    names = replace(names, stopped=stopped, unread=frozenset(name for name, _ in placeless) - stopped)
    if not names.renamings:
        return names
    # Without fused experts: rules name their parts.
    state = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.dim() != 3]
    return replace(names, parameters={names.stored(name): name for name in state})


def _without_rule(model: nn.Module, fused: Collection[str]) -> Iterator[tuple[str, Stacking]]:
    """Yields the parameters of experts that no rule of transformers joins from the matrices of single experts."""
    for path, module in model.named_modules():
        held = [last for last, _ in module.named_parameters(recurse=False)]
        for last in (*held, *(last for last, child in module.named_children() if isinstance(child, ExpertStack))):
            if last not in fused and (stacking := stacking_of(module, last)) is not None:
                yield f"{path}.{last}", stacking


def matrix_names(name: str, expert: int) -> list[str]:
    """Returns the names of the matrices of one expert in a parameter, in the order of its rows."""
    stem, _, last = name.rpartition(".")
    return [f"{stem}.{expert}.{part}".rstrip(".") for part in EXPERT_PARTS.get(last, (last,))]


def expert_names(name: str, experts: int) -> list[str]:
    """Returns the names on disk of the matrices in a fused parameter that stays in 16 bit, expert by expert."""
    return [f"{matrix}.weight" for expert in range(experts) for matrix in matrix_names(name, expert)]


def cut_experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns the matrices `[experts, out, in]` of a parameter as one for each of `expert_names`: views."""
    # [experts, gate and up rows, in] is one run of rows: expert 0's gate, its up, expert 1's gate, …
    names = expert_names(name, len(weight))
    return dict(zip(names, weight.flatten(0, 1).chunk(len(names)), strict=True))


def _fused(rules: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Returns the names on disk of an expert's matrices, by the parameter that they are stacked in."""
    names_on_disk = {}
    for rule in rules:
        # Experts are stacked; gate and up of each are concatenated before.
        if operations(rule) not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            continue
        last = rule.target_patterns[0].rpartition(".")[2]
        names = tuple(pattern.split(".")[-2] for pattern in rule.source_patterns)  # w1 of ".experts.*.w1.weight"
        if len(names) == len(EXPERT_PARTS.get(last, (last,))):
            names_on_disk[last] = names
    return names_on_disk


def _weight_and_suffix(name: str) -> tuple[str, str]:
    """Returns the weight that a tensor belongs to, which transformers' rules name, and the suffix of its part."""
    # experts.3.gate_proj.weight_scale  ->  experts.3.gate_proj.weight  ->  experts.3.w1.weight  ->  … .weight_scale
    stem, _, suffix = name.rpartition(".")
    return (f"{stem}.weight", f".{suffix}") if suffix.startswith(("weight_", "input_")) else (name, "")


def _apply(renamings: Iterable[Rename], name: str) -> str:
    for rename in renamings:
        name = rename(name)
    return name


def _swap(name: str, others: Mapping[str, str]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None or match[2] not in others:
        return name
    return f"{match[1]}.{others[match[2]]}.{match[3]}"


# What is called of a rule; `operations`, `add_tensor` and `convert` of converters alone.
_OF_RULES = ("source_patterns", "target_patterns", "rename_source_key", "reverse_transform")
_OF_CONVERTERS = (*_OF_RULES, "operations", "add_tensor", "convert")


def class_rules(model: nn.Module) -> list[Any]:
    """Returns the invertible rules for checkpoints of a model's class; ValueError for another version's rules."""
    return _invertible(_private("conversion_mapping", "get_model_conversion_mapping")(model, add_legacy=False))


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
    model: Any, tensors: Mapping[str, Tensor], source: Container[str], stored: Callable[[str], str]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Returns tensors of the model in 16 bit in the form of the source's files, as far as the source has it.

    They come by their names on disk, with the names in the model of the tensors that each was made of.
    """
    as_in_source: dict[str, Tensor] = {}
    made_of: dict[str, list[str]] = {}
    # A rule without a way back, such as one that drops padding, is no error before it is asked for.
    for rule in _without_experts(file_rules(model)):
        with suppress(NotImplementedError):
            for inputs, converted in _converted(model, rule.reverse_transform(), tensors):
                on_disk = {stored(name): tensor for name, tensor in converted.items()}
                if all(name in source for name in on_disk) and not on_disk.keys() & as_in_source.keys():
                    as_in_source |= {name: tensor.contiguous() for name, tensor in on_disk.items()}
                    made_of |= dict.fromkeys(on_disk, inputs)
    return as_in_source, made_of


def in_model(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    return [r for r in rules if operations(r) and not {"MergeModulelist", "SplitModulelist"} & {*operations(r)}]


def _converted(model: Any, rule: Any, tensors: Mapping[str, Tensor]) -> Iterable[tuple[list[str], dict[str, Tensor]]]:
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
