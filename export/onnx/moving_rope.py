"""RoPE whose frequencies depend on the longest position of a pass becomes operators of an exported graph.

transformers rewrites `inv_freq` at the start of such a pass, by a branch on values (dynamic NTK) or in place with
tensors that it makes meanwhile (longrope), and keeps the result in the module. A graph has neither branches nor
memory; it computes, with n the longest position + 1,

    longrope       n > original_max_position_embeddings ? long frequencies : short frequencies
    dynamic NTK    the frequencies for max(n, max_position_embeddings)

which are the frequencies of a model that has seen no longer text before. A KV cache holds keys after RoPE, so a graph
with one would need those of earlier steps anew: `serving.check_decoder` refuses it. Tried with transformers 5.17 to
5.24, whose decorator `dynamic_rope_update` is undone here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LONGROPE, DYNAMIC = "longrope", "dynamic"


def moving_type(rope_type: object) -> str | None:
    """Returns the kind of a RoPE whose frequencies depend on the longest position, as transformers names it."""
    name = str(rope_type)
    return DYNAMIC if DYNAMIC in name else LONGROPE if name == LONGROPE else None


@contextmanager
def stateless_rope(model: nn.Module) -> Iterator[None]:
    """Makes every such module of a transformers model compute its frequencies anew in each pass, while open."""
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            plain = getattr(type(module).forward, "__wrapped__", None)
            kinds: Any = getattr(module, "rope_type", None)
            names = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
            if plain is not None and any(map(moving_type, names)) and "forward" not in module.__dict__:
                module.forward = _forward(module, plain)
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def _forward(module: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    # Made here, before the trace, in which they would be tensors without values.
    long: dict[str | None, tuple[Tensor, int]] = {}
    for layer_type, kind in kinds.items():
        if moving_type(kind) == LONGROPE:
            parameters = module.config.rope_parameters
            end = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=end + 1, **_of(layer_type))
            long[layer_type] = frequencies, end

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        kind, prefix = kinds.get(layer_type), "" if layer_type is None else f"{layer_type}_"
        longest = position_ids.max() + 1
        if layer_type in long:
            frequencies, end = long[layer_type]
            short = getattr(module, f"{prefix}original_inv_freq").to(x.device)
            inv_freq = torch.where(longest > end, frequencies.to(x.device), short)
        elif moving_type(kind) == DYNAMIC:
            inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](module.config, x.device, seq_len=longest, **_of(layer_type))
        else:
            inv_freq = getattr(module, f"{prefix}inv_freq")
        return plain(_Overlay(module, {f"{prefix}inv_freq": inv_freq}), x, position_ids, **_of(layer_type))

    return forward


def _of(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


class _Overlay:
    """A module with other attributes for one pass: torch.export forbids that a pass changes a module's buffers."""

    def __init__(self, module: nn.Module, attributes: dict[str, Tensor]) -> None:
        self._module = module
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
