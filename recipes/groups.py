"""Layers that read the *same input tensor* (q/k/v, gate/up) are found by watching a forward pass.

Every serving runtime merges them into one matmul, so they must share their format and their global scales.
Layers that receive the very same tensor object form a group, within one numbered block. Layers that the pass does not
call (experts without tokens, towers without images) are left to `quant.recipes.fusion_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quant.recipes.layer_kind import LayerKind
from quant.recipes.layers import Layer

if TYPE_CHECKING:
    from torch import nn

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")


@dataclass
class Watched:
    """Facts about linear layers that forward passes have shown.

    Attributes:
        groups: name of the fusion group of each layer that shares its input.
        input_dims: dimensions of the input of each layer that was called.
    """

    groups: dict[str, str] = field(default_factory=dict)
    input_dims: dict[str, int] = field(default_factory=dict)

    def add(self, other: Watched) -> None:
        """Adds the results of another pass for modules whose layers no earlier pass has called."""
        # By module and not by layer: a stand-in input may take another branch of a module that real tokens went
        # through.
        seen_modules = {parent_of(name) for name in self.input_dims}
        new = {name for name in other.input_dims if parent_of(name) not in seen_modules}
        old = {group for name, group in other.groups.items() if name not in new}
        self.groups |= {name: group for name, group in other.groups.items() if name in new and group not in old}
        self.input_dims |= {name: other.input_dims[name] for name in new}

    def of(self, layers: Sequence[Layer], *, complete: bool = False) -> list[Layer]:
        """Returns `layers` with fusion groups and the dimensions of inputs filled in.

        Args:
            layers: the layers of the model.
            complete: whether a pass came to its end, so that a layer whose siblings it called is never called.
        """
        called = {parent_of(name) for name in self.input_dims} if complete else ()
        return [
            replace(
                layer,
                group=self.groups.get(layer.name, layer.group),
                input_dims=self.input_dims.get(layer.name),
                is_bypassed=layer.kind == LayerKind.LINEAR
                and layer.name not in self.input_dims
                and parent_of(layer.name) in called,
            )
            for layer in layers
        ]


@contextmanager
def watching(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Watched]:
    """Watches the forward pass that runs inside, without gradients and in evaluation mode.

    The result is filled in at the end. If the pass raises, it holds the layers that were called before, without layers
    of the module that was called last, which may have called only some of them, and without layers that share an input
    with these.

    Args:
        model: the model, called inside on any valid input, for example one token on the meta device.
        layers: the layers of the model, as `find_layers` gives them.
    """
    import torch

    linears = {layer.name for layer in layers if layer.kind == LayerKind.LINEAR}
    readers: dict[tuple[int, str], list[str]] = {}
    called: dict[str, int] = {}
    inputs = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())), None)  # also of `layer(input=x)`
            if isinstance(x, torch.Tensor):
                inputs.append(x)  # kept alive, so that no other tensor gets its id
                # Every decoder block reads the encoder's output, but no runtime merges layers of different blocks.
                readers.setdefault((id(x), _block_of(name)), []).append(name)
                called.pop(name, None)  # the layer that was called last stands last
                called[name] = x.dim()

        return hook

    modules = {name: module for name, module in model.named_modules() if name in linears}
    handles = [m.register_forward_pre_hook(watch(n), with_kwargs=True) for n, m in modules.items()]
    # `eval()` sets every submodule, so the mode of each is put back one by one at the end.
    modes = {module: module.training for module in model.modules()}
    watched, unfinished = Watched(), set[str]()
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
    return [
        replace(layer, group=layer.name.rpartition(".")[0]) if layer.kind == LayerKind.EXPERTS else layer
        for layer in layers
    ]


def parent_of(name: str) -> str:
    """Returns the path of the module that holds a layer."""
    return name.rpartition(".")[0]


def _block_of(name: str) -> str:
    """Returns the first numbered module that a layer is in: `model.layers.0`; empty where it is in none."""
    match = _NUMBERED.match(name)
    return match[0] if match else ""


def group_name(names: Sequence[str]) -> str:
    """Joins the names of a group: `a.q_proj`, `a.k_proj` -> `a.(k_proj|q_proj)`."""
    prefixes = [name.rpartition(".")[0] for name in names]
    if len(set(prefixes)) > 1:
        return "|".join(names)
    tails = "|".join(name.rpartition(".")[2] for name in names)
    return f"{prefixes[0]}.({tails})".lstrip(".")
