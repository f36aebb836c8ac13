"""Layers that read the *same input tensor* (q/k/v, gate/up) are found by watching a forward pass.

Every serving runtime merges them into one matmul, so they must share their format and their global scales.
Layers that receive the very same tensor object form a group, within the innermost numbered block around them.

A pass over two tokens does not call experts that get no token, nor the tower for images, and nothing runs a bare state
dict. Serving runtimes merge these layers nevertheless, so `group_unseen` gives them groups from two sources:

1. A sibling that was called, and whose name differs in numbers only (`experts.3` for `experts.5`), shows the group.
2. Otherwise the names by which runtimes merge layers of one module: q, k and v, or gate and up, of one input size.

Solvers that need data take the statistics of a group from its first member, so a group by name must not hold layers
with different inputs. In attention across two inputs q is not in the group, and where q, k and v are separate
arguments there is no group. Names cannot tell that DETR adds positions to the inputs of q and k, or that SegFormer
shortens the inputs of k and v: both run on a stand-in image, which reveals it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quant.recipes.layers import Layer, LayerKind

if TYPE_CHECKING:
    from torch import nn


_NUMBERED = re.compile(r".*\.\d+(?=\.)")


@dataclass
class Watched:
    """Facts about linear layers that forward passes have shown."""

    groups: dict[str, str] = field(default_factory=dict)  # name of the fusion group of each layer that shares its input
    input_dims: dict[str, int] = field(default_factory=dict)  # dimensions of the input of each layer that was called
    convolutions: set[str] = field(default_factory=set)  # those that were called

    def add(self, other: Watched) -> None:
        """Adds the results of another pass for modules whose layers no earlier pass has called."""
        # By module and not by layer: a stand-in input may take another branch of a module that real tokens went
        # through.
        seen_modules = {parent_of(name) for name in self.input_dims}
        new_layers = {name for name in other.input_dims if parent_of(name) not in seen_modules}
        seen_groups = {group for name, group in other.groups.items() if name not in new_layers}
        self.groups |= {
            name: group for name, group in other.groups.items() if name in new_layers and group not in seen_groups
        }
        self.input_dims |= {name: other.input_dims[name] for name in new_layers}
        self.convolutions |= other.convolutions

    def of(self, layers: Sequence[Layer], *, complete: bool = False) -> list[Layer]:
        """Returns `layers` with the facts; after a `complete` pass, uncalled layers beside called ones are bypassed."""
        called = {parent_of(name) for name in self.input_dims} if complete else ()
        return [
            replace(
                layer,
                group=self.groups.get(layer.name, layer.group),
                input_dims=self.input_dims.get(layer.name),
                is_bypassed=layer.kind in (LayerKind.LINEAR, LayerKind.CONV)
                and layer.name not in self.input_dims.keys() | self.convolutions
                and parent_of(layer.name) in called,
            )
            for layer in layers
        ]


@contextmanager
def watching(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Watched]:
    """Watches the forward pass that runs inside, without gradients and in evaluation mode.

    The result is filled in at the end. If the pass raises, it holds the layers that were called before, without those
    of the module that was called last, which may be incomplete, and without layers that share an input with these.
    """
    import torch

    linears, convolutions = (
        {layer.name for layer in layers if layer.kind == kind} for kind in (LayerKind.LINEAR, LayerKind.CONV)
    )
    readers: dict[tuple[int, str], list[str]] = {}
    called: dict[str, int] = {}
    inputs = []

    def watch(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())), None)  # also of `layer(input=x)`
        if isinstance(x, torch.Tensor):
            inputs.append(x)  # kept alive, so that no other tensor gets its id
            # Every decoder block reads the encoder's output, but no runtime merges layers of different blocks.
            block = _NUMBERED.match(name)
            readers.setdefault((id(x), block[0] if block else ""), []).append(name)
            called.pop(name, None)  # the layer that was called last stands last
            called[name] = x.dim()

    watched, unfinished = Watched(), set[str]()
    named = dict(model.named_modules())
    handles = [
        module.register_forward_pre_hook(partial(watch, name), with_kwargs=True)
        for name, module in named.items()
        if name in linears
    ]
    handles += [
        named[name].register_forward_pre_hook(lambda *_, name=name: watched.convolutions.add(name))
        for name in convolutions & named.keys()
    ]
    # `eval()` sets every submodule, so the mode of each is put back one by one at the end.
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()  # in training, this row would move the statistics of batch norms
        with torch.no_grad():
            yield watched
    except BaseException:
        unfinished = {name for name in called if parent_of(name) == parent_of(next(reversed(called)))}
        unfinished.update(*(names for names in readers.values() if not unfinished.isdisjoint(names)))
        raise
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
        watched.input_dims |= {name: dims for name, dims in called.items() if name not in unfinished}
        for names in readers.values():
            names = [name for name in dict.fromkeys(names) if name in watched.input_dims]
            if len(names) > 1:
                watched.groups |= dict.fromkeys(names, group_name(names))


def group_experts(layers: Sequence[Layer]) -> list[Layer]:
    """Returns `layers` with the experts of each module in one group, because they run in one grouped matmul."""
    return [replace(each, group=parent_of(each.name)) if each.kind == LayerKind.EXPERTS else each for each in layers]


def parent_of(name: str) -> str:
    """Returns the path of the module that holds a layer."""
    return name.rpartition(".")[0]


def group_name(names: Sequence[str]) -> str:
    """Joins the names of a group: `a.q_proj`, `a.k_proj` -> `a.(k_proj|q_proj)`."""
    parents = {parent_of(name) for name in names}
    if len(parents) > 1:
        return "|".join(names)
    tails = "|".join(name.rpartition(".")[2] for name in names)
    return f"{parents.pop()}.({tails})".lstrip(".")


_ATTENTION = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))
_OUTPUTS = {"o_proj", "out_proj", "down_proj", "c_proj", "proj", "o", "w2", "fc2"} | {
    "linear_2",
    "linear_fc2",
    "linear_out",
}
"""Names of layers that read what the others of their module give."""

_ACROSS = re.compile(r"cross|encoder_attn|encdec|perceiver|resampler", re.IGNORECASE)
_SECOND_INPUTS = {"context", "memory", "key_value_states", "encoder_hidden_states"}
_NUMBER = re.compile(r"\d+")


def group_unseen(layers: Sequence[Layer], model: nn.Module | None = None) -> list[Layer]:
    """Returns `layers` with groups for linear ones that no pass has called; `model` shows attention across inputs."""
    unseen = {layer.name: layer for layer in layers if _is_unseen(layer) and layer.group is None}
    siblings = {_numberless(layer.name) for layer in layers if layer.input_dims is not None}
    # A sibling that was called and has no group is evidence too: its name is not merged here.
    named = _by_name([layer for name, layer in unseen.items() if _numberless(name) not in siblings], model)
    groups = _by_sibling(layers, unseen) | named
    return [
        replace(layer, group=groups[layer.name], is_named=layer.name in named) if layer.name in groups else layer
        for layer in layers
    ]


def without_group(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers of one module and input size that a runtime may merge: not called, numbered or in a group."""
    layers = list(layers)
    siblings = {_numberless(layer.name) for layer in layers if layer.input_dims is not None}
    beside: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        last = layer.name.rpartition(".")[2]
        open_to_merge = _is_unseen(layer) and layer.group is None and not last.isdecimal() and last not in _OUTPUTS
        if open_to_merge and _numberless(layer.name) not in siblings:
            beside.setdefault((parent_of(layer.name), layer.shape[-1]), []).append(layer)
    return [layer for members in beside.values() if len(members) > 1 for layer in members]


def patterns(names: Iterable[str]) -> list[str]:
    """Returns names with `*` for their numbers, each once: blocks and experts of a model repeat."""
    return list(dict.fromkeys(map(_numberless, names)))


def _is_unseen(layer: Layer) -> bool:
    return layer.kind == LayerKind.LINEAR and layer.input_dims is None and layer.obstacle is None


def _numberless(name: str) -> str:
    return _NUMBER.sub("*", name)


def _by_sibling(layers: Sequence[Layer], unseen: dict[str, Layer]) -> dict[str, str]:
    """Returns the groups by name of an unseen layer, as a layer that differs in numbers has them."""
    members: dict[str, list[str]] = {}
    for layer in layers:
        if layer.group is not None and layer.input_dims is not None:
            members.setdefault(layer.group, []).append(layer.name)
    twins = {key: (name, names) for names in members.values() for name in names for key in _twin_keys(name)}
    groups: dict[str, str] = {}
    for name in unseen:
        twin_group = next((twins[key] for key in _twin_keys(name) if key in twins), None)
        # Siblings of an earlier name have been given their group together.
        if name in groups or twin_group is None:
            continue
        twin, names = twin_group
        own = [_moved(each, twin, name) for each in names]
        new_members = [each for each in dict.fromkeys(own) if each in unseen and each not in groups]
        # One input has one width: members of different `in` cannot read the same tensor.
        if len(new_members) > 1 and name in new_members and len({unseen[each].shape[-1] for each in new_members}) == 1:
            groups |= dict.fromkeys(new_members, group_name(new_members))
    return groups


def _twin_keys(name: str) -> list[tuple[str, ...]]:
    """Returns two keys of a name: without the number of its block, and without any number."""
    pattern = _numberless(name)
    return [(pattern, *_NUMBER.findall(name)[1:]), (pattern, "any")]


def _moved(member: str, twin: str, name: str) -> str:
    """Returns a name of `twin`'s group, with the numbers of `twin` replaced by the numbers of `name`."""
    numbers = iter(zip(_NUMBER.findall(twin), _NUMBER.findall(name), strict=True))

    def new(number: re.Match[str]) -> str:
        old, own = next(numbers, (None, ""))
        return own if number[0] == old else number[0]

    return _NUMBER.sub(new, member)


def _by_name(layers: Iterable[Layer], model: nn.Module | None) -> dict[str, str]:
    """Returns the groups by layer name, of layers in one module whose names runtimes merge."""
    modules: dict[str, dict[str, Layer]] = {}
    for layer in layers:
        parent, _, last = layer.name.rpartition(".")
        modules.setdefault(parent, {})[last] = layer
    groups: dict[str, str] = {}
    for parent, children in modules.items():
        module = None if model is None else model.get_submodule(parent)
        attention = [names for names in _ATTENTION if children.keys() >= set(names)]
        for lasts in (*(_one_input(names, parent, module) for names in attention), *_GATED):
            merged = [layer for last, layer in children.items() if last in lasts]
            if len(merged) > 1 and len({layer.shape[-1] for layer in merged}) == 1:
                names = [layer.name for layer in merged]
                groups |= dict.fromkeys(names, group_name(names))
    return groups


def _one_input(names: tuple[str, str, str], parent: str, module: nn.Module | None) -> tuple[str, ...]:
    """Returns the names among q, k and v that read one input, by their module's name, class and forward."""
    kind, required = "", set[str]()
    if module is not None:
        kind = type(module).__name__
        parameters = inspect.signature(module.forward).parameters.values()
        required = {p.name for p in parameters if p.default is p.empty}
    # forward(query, key, value): three inputs, which may be three tensors.
    if {"key", "value"} <= required:
        return ()
    across = _ACROSS.search(f"{parent}.{kind}") is not None or not required.isdisjoint(_SECOND_INPUTS)
    # Across two inputs, k and v read the second one, so they may be merged without q.
    return names[1:] if across else names
