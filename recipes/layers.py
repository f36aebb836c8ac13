"""`find_layers` finds the weights of a model, their kinds, and which are fused at run time.

A layer is a module that owns a weight, or a fused-expert parameter `[experts, out, in]` as Mixture-of-Experts
models in transformers 5 have them. Nothing here reads the data of a weight, so a model on the meta device will do.

Layers that read the *same input tensor* (q/k/v, gate/up) are merged into one matmul by every serving runtime, and
must then share their format and their second-level scales. They are found by watching one forward pass, not by
their names: whatever receives the very same tensor object belongs together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class Layer:
    """A weight and what is known about it before any data is read.

    Attributes:
        name: module path, or parameter path for fused experts.
        kind: one of `quant.recipes.plan.KINDS`.
        shape: of the weight, `[..., out, in]`.
        group: name of its fusion group, if it has one.
        tied_to: name of the layer whose parameter it shares, if it does.
        obstacle: why it cannot be quantized at all, if so.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    group: str | None = None
    tied_to: str | None = None
    obstacle: str | None = None


def find_layers(model: nn.Module) -> list[Layer]:
    """Every layer of `model` that owns a weight, in model order. Fusion groups are left to `find_groups`."""
    head = output_head(model)
    owner: dict[int, str] = {}
    layers = []
    for name, module in model.named_modules():
        for parameter_name, parameter in _weights(module):
            fused = parameter_name != "weight"
            path = f"{name}.{parameter_name}".lstrip(".") if fused else name
            kind = "experts" if fused else _kind(module, parameter, module is head)
            obstacle = None
            if fused and getattr(module, "is_transposed", False):
                obstacle = "experts are stored [experts, in, out]: blocks would cross the reduction axis"
            tied_to = owner.setdefault(id(parameter), path)
            layers.append(
                Layer(
                    path, kind, tuple(parameter.shape), tied_to=None if tied_to == path else tied_to, obstacle=obstacle
                )
            )
    return layers


def layers_of_state_dict(shapes: Mapping[str, Sequence[int]]) -> list[Layer]:
    """Layers guessed from the tensor names and shapes of a bare state dict, when there is no module to look at.

    A 2-D `*.weight` counts as a linear unless its name says embedding, norm or head; 3-D parameters with an expert
    name are fused experts.
    """
    layers = []
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if last == "weight":
            layers.append(Layer(stem, _kind_by_name(stem, shape), tuple(shape)))
        elif len(shape) == 3 and last in _EXPERT_NAMES:
            layers.append(Layer(name, "experts", tuple(shape)))
    return layers


def find_groups(model: nn.Module, layers: Sequence[Layer], run: Callable[[nn.Module], Any]) -> list[Layer]:
    """`layers` with fusion groups filled in, found by one forward pass.

    Args:
        model: the model that `layers` came from.
        layers: as `find_layers` gives them.
        run: calls the model on any valid input, for example one token on the meta device.
    """
    import torch

    linears = {layer.name for layer in layers if layer.kind == "linear"}
    readers: dict[int, list[str]] = {}
    held = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                held.append(args[0])  # kept alive, so that no other tensor gets its id
                readers.setdefault(id(args[0]), []).append(name)

        return hook

    handles = [m.register_forward_pre_hook(watch(n)) for n, m in model.named_modules() if n in linears]
    try:
        with torch.no_grad():
            run(model)
    finally:
        for handle in handles:
            handle.remove()
    group_of = {}
    for names in readers.values():
        names = list(dict.fromkeys(names))
        if len(names) > 1:
            group_of.update(dict.fromkeys(names, _group_name(names)))
    return [replace(layer, group=group_of.get(layer.name, layer.group)) for layer in layers]


def group_experts(layers: Sequence[Layer]) -> list[Layer]:
    """`layers` with the experts of one module put into one group each, for they run in one grouped matmul."""
    return [
        replace(layer, group=layer.name.rpartition(".")[0]) if layer.kind == "experts" else layer for layer in layers
    ]


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" or (parameter.dim() == 3 and name in _EXPERT_NAMES):
            yield name, parameter


def _kind(module: nn.Module, weight: torch.Tensor, is_head: bool) -> str:
    from torch import nn

    if is_head:
        return "head"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if weight.dim() == 1:
        return "norm"
    return "conv" if isinstance(module, nn.modules.conv._ConvNd) else "other"


def _kind_by_name(stem: str, shape: Sequence[int]) -> str:
    if len(shape) == 1:
        return "norm"
    last = stem.rpartition(".")[2]
    if "embed" in last or last in ("wte", "wpe"):
        return "embedding"
    if last in ("lm_head", "output", "score", "classifier"):
        return "head"
    return {2: "linear", 3: "conv", 4: "conv", 5: "conv"}.get(len(shape), "other")


def output_head(model: nn.Module) -> nn.Module | None:
    """What turns a model's hidden states into logits, as transformers knows it; None where there is none."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def _group_name(names: Sequence[str]) -> str:
    """`a.q_proj`, `a.k_proj` -> `a.(k_proj|q_proj)`."""
    prefixes = [name.rpartition(".")[0] for name in names]
    if len(set(prefixes)) > 1:
        return "|".join(names)
    tails = "|".join(name.rpartition(".")[2] for name in names)
    return f"{prefixes[0]}.({tails})".lstrip(".")
