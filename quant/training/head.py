"""Distillation applies a model's output head, and the operations that follow it, to a slice of positions at a time.

Models change the products of their head on the way to logits. Gemma caps them softly, Granite divides them, Cohere
multiplies them:

    logits = cap · tanh(y · times / over / cap),    y = head(hidden)

`run_to_head` runs the whole model, wrappers and hooks included, with a head that remembers its input. At a model's
first run that head multiplies a few positions, and the model's logits of them are compared with the operations that its
config names. A model that does something else (Chameleon rules the tokens of images out) is run whole, with its own
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quant.calibration.attention_names import text_config
from quant.recipes.blocks import output_of
from quant.base.errors import UserError
from quant.recipes.callers_model import inner_model
from quant.recipes.layers import output_head
from quant.training.kl import Head

# Fields of configs in transformers 5.24, by what they do to the products of the head.
_TIMES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_OVER = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_COMPARED = 8  # positions


@dataclass(frozen=True)
class Tail:
    """The operations that a model applies to the products of its head.

    Attributes:
        times, over: factor and divisor of the products.
        cap: limit of the soft cap after them; None for a model without one.
    """

    times: float = 1.0
    over: float = 1.0
    cap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Returns the logits, in the model's own operations."""
        logits = products if self.times == 1 else products * self.times
        logits = logits if self.over == 1 else logits / self.over
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class LogitHead:
    """An output head and the operations after it: `[positions, hidden]` to the model's logits."""

    head: nn.Module
    tail: Tail

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x))

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Returns the parameters of the head."""
        return tuple(self.head.parameters())


_TAILS: WeakKeyDictionary[nn.Module, Tail | None] = WeakKeyDictionary()
"""The tails of models seen before; a model with None is run whole, with its own logits."""


def run_to_head(
    model: nn.Module, inputs: Mapping[str, Any], wants_hidden: bool
) -> tuple[torch.Tensor, list[torch.Tensor], Head]:
    """Returns the head's inputs `[rows, seqlen, hidden]`, the hidden states, and the map from inputs to logits.

    For a model that is run whole, the inputs are its logits `[rows, seqlen, vocabulary]`, and the map is the identity.
    """
    inner = inner_model(model)
    # Replicas on other GPUs would share the state of a replaced head, and its weight.
    is_spread = isinstance(model, nn.DataParallel) and len(model.device_ids) > 1
    head = None if is_spread else output_head(inner)
    arguments = {name: value for name, value in inputs.items() if name not in ("labels", "num_items_in_batch")}
    named = hasattr(inner, "config")
    if named:
        arguments |= {"use_cache": False, **({"output_hidden_states": True} if wants_hidden else {})}
    elif wants_hidden:
        raise UserError(f"{type(inner).__name__}: hidden states are those of a transformers model; pass hidden=0")

    def call() -> Any:
        return model(**arguments) if named else model(arguments["input_ids"])

    def states(result: Any) -> list[torch.Tensor]:
        return list(result.hidden_states[1:]) if wants_hidden else []

    if head is not None and _TAILS.get(inner, Tail()) is not None:
        is_new = inner not in _TAILS
        seen, result = _without_head(call, head, compares=is_new)
        if is_new:
            products = seen[0][1] if len(seen) == 1 else None
            config = text_config(getattr(inner, "config", None))
            _TAILS[inner] = None if products is None else _find_tail(products, _logits(result), config)
        tail = _TAILS[inner]
        if tail is not None and len(seen) == 1:
            return seen[0][0], states(result), LogitHead(head, tail)
    result = call()
    return _logits(result, named), states(result), _identity


def _without_head(
    call: Callable[[], Any], head: nn.Module, compares: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], Any]:
    """Runs a model with a head that remembers its inputs; with `compares`, also the products of a few positions."""
    original_forward = head.forward
    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    used = [p for p in head.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]

    def remember(x: torch.Tensor) -> torch.Tensor:
        if compares:
            products: torch.Tensor = original_forward(x[:1, :_COMPARED] if x.dim() > 2 else x[:_COMPARED])
            seen.append((x, products.detach()))
            return products
        seen.append((x, None))
        # DDP may trace which parameters the outputs depend on, and takes all others for unused: the head is used.
        return x[..., :1] + sum(0 * p.flatten()[:1].sum() for p in used)

    with _replaced_forward(head, remember):
        result = call()
    return seen, result


@torch.no_grad()
def _find_tail(products: torch.Tensor, logits: torch.Tensor, config: Any) -> Tail | None:
    """Returns the tail that turns `products` into `logits`, among the tails that a config names; None if none does."""
    if products.shape != logits.shape:
        return None
    logits = logits.to(products.device)
    tails = [Tail(*each) for each in product(_named(config, _TIMES, 1.0), _named(config, _OVER, 1.0),
                                             _named(config, _CAPS, None))]  # fmt: skip
    distances = [float((tail(products).double() - logits.double()).abs().max()) for tail in tails]
    nearest = min(range(len(tails)), key=lambda index: distances[index])
    # A model that computes in other dtypes on the way rounds differently; a missed factor differs by more.
    rounding = 2 * max(torch.finfo(each.dtype).eps for each in (products, logits))
    return tails[nearest] if distances[nearest] <= rounding * float(logits.abs().max()) else None


def _named(config: Any, names: tuple[str, ...], none: float | None) -> list[Any]:
    """Returns the numbers that a config has under `names`, and `none` as the last one."""
    values = [getattr(config, name, None) for name in names]
    return [*(float(value) for value in values if isinstance(value, int | float) and value), none]


def _logits(result: Any, named: bool = False) -> torch.Tensor:
    """Returns the logits in a model's output; a transformers model without a head has none."""
    if hasattr(result, "logits"):
        return result.logits  # type: ignore[no-any-return]
    if named and isinstance(result, Mapping):
        raise UserError(f"{type(result).__name__}: the model gives no logits; distillation is for language models")
    return output_of(result)


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


@contextmanager
def _replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    own = vars(module).get("forward")  # such as accelerate puts there
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
