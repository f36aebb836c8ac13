"""`find_fold` finds the module that can take up a layer's input scale, and proves it by running the block.

Dividing a layer's input by s, channel by channel, costs nothing if the module before it can scale its own output: a
norm has a weight for every channel, a linear layer a row. That module is found by a test, in float64 on a few tokens.
The channels of each candidate are divided by distinct factors t. If every channel of the layer's input changes by
exactly one of these factors, at every token, the path between is linear in that channel, and the factor says which
row feeds it. The same test finds a norm, a value projection that feeds the output projection through attention (with
three query heads to one key-value head, for example), and an up projection that feeds the down projection through the
product with the gate.

Then all readers of the scaled input are compensated, and the block must give its old output. It does not if something
else reads that input too (a router, a residual); then the scale stays with the layer as `pre_scale`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.recipes.blocks import Call, all_arguments, output_of, removing

# Modeling code computes norms and rotary embeddings in float32 whatever it is given.
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Fold:
    """Where an input scale can go."""

    producer: str  # name, within the block, of the module that scales its output
    owner: Tensor  # output channel of the producer behind each input channel, int64 [in]
    offset: int = 0  # 1 for norms that multiply by 1 + weight


def find_fold(block: nn.Module, call: Call, readers: Sequence[str], producers: Sequence[str]) -> Fold | None:
    """Returns the nearest module into which an input scale of `readers` can go, or None."""
    before_input, before_output = _run(block, call, readers[0])
    if before_input is None or before_output is None:
        return None
    for name in producers:
        module = block.get_submodule(name)
        weight = module.weight
        assert isinstance(weight, Tensor)
        if before_input.shape[-1] % len(weight):
            continue
        for offset in (0, 1) if weight.dim() == 1 else (0,):
            owner = _trace_channels(block, call, readers[0], before_input, module, offset)
            if owner is not None and _is_neutral(block, call, readers, before_output, module, owner, offset):
                return Fold(name, owner, offset)
    return None


def apply_fold(module: nn.Module, scale: Tensor, offset: int, stored: torch.dtype | None = None) -> Tensor:
    """Divides the output channels of `module` by `scale` `[channels]`, and returns the division after rounding.

    A norm's weight is stored in 16 bit (`stored`) and rounded to it; the layers behind are scaled by the rounded value,
    so nothing is lost. A channel whose weight is zero is not changed.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        old = weight.double() + offset
        by = scale.double().to(weight.device)
        if weight.dim() == 1:
            new = (old / by - offset).to(stored or weight.dtype).to(weight.dtype)
            became = new.double() + offset
            by = torch.where((old != 0) & (became != 0), old / became, torch.ones_like(old))
            weight.copy_(torch.where(by == 1, weight, new))
        else:
            # A new tensor: whoever holds the old one, to restore it after an error, still has the original values.
            weight.data = torch.empty_like(weight).copy_(old / by[:, None])
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            bias.copy_((bias.double() / by).to(bias.dtype))
    return by.to(scale)


def _trace_channels(
    block: nn.Module, call: Call, reader: str, before: Tensor, module: nn.Module, offset: int
) -> Tensor | None:
    """Returns which output channel of `module` feeds each channel of the reader; None if the path is not linear."""
    channels = len(module.weight)  # type: ignore[arg-type]
    factors = torch.linspace(1, 2, channels, dtype=torch.float64, device=before.device)
    with _scaled(module, factors, offset):
        after, _ = _run(block, call, reader)
    if after is None or after.shape != before.shape:
        return None
    # [tokens, channels]
    before, after = before.flatten(0, -2), after.flatten(0, -2)
    # The ratio of a channel, from the token where it is largest; then every token must agree.
    token = before.abs().argmax(0, keepdim=True)
    top = before.gather(0, token)[0]
    ratio = torch.where(top == 0, 1, top / after.gather(0, token)[0])
    if not bool(torch.isfinite(ratio).all()):
        return None
    # Factors are 1 + k / (channels - 1), so the ratio gives k.
    owner = ((ratio - 1) * (channels - 1)).round().long().clamp(0, channels - 1)
    if bool((top == 0).any()):
        # A channel that is zero at every token shows no factor; it is taken to keep its place.
        if len(owner) != channels:
            return None
        owner = torch.where(top == 0, torch.arange(channels, device=owner.device), owner)
    expected = before / factors[owner]
    return owner if _close(after, expected) else None


def _is_neutral(
    block: nn.Module, call: Call, readers: Sequence[str], before: Tensor, module: nn.Module, owner: Tensor, offset: int
) -> bool:
    """Returns whether dividing the producer and multiplying the readers leaves the block's output as it was."""
    channels = len(module.weight)  # type: ignore[arg-type]
    factors = torch.linspace(1, 2, channels, dtype=torch.float64, device=before.device)
    weights = [block.get_submodule(name).weight for name in readers]
    originals = [weight.detach().clone() for weight in weights]  # type: ignore[operator]
    try:
        with _scaled(module, factors, offset), torch.no_grad():
            for weight in weights:
                weight.mul_(factors[owner])  # type: ignore[operator]
            _, after = _run(block, call, None)
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, originals, strict=True):
                weight.copy_(old)  # type: ignore[operator]
    return after is not None and _close(after, before)


@contextmanager
def _scaled(module: nn.Module, factors: Tensor, offset: int) -> Iterator[None]:
    originals = [(p, p.detach().clone()) for p in module.parameters(recurse=False)]
    try:
        apply_fold(module, factors, offset)
        yield
    finally:
        with torch.no_grad():
            for parameter, old in originals:
                parameter.copy_(old)


def _run(block: nn.Module, call: Call, reader: str | None) -> tuple[Tensor | None, Tensor | None]:
    seen: list[Tensor] = []
    watched = [] if reader is None else [block.get_submodule(reader)]

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(all_arguments(args, kwargs)[0])

    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in watched]
    with torch.no_grad(), removing(hooks):
        out = output_of(block(*call.args, **call.kwargs))
    return (seen[0] if len(seen) == 1 else None), out


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _TOLERANCE * b.norm())


def modules_in_order(block: nn.Module, call: Call) -> list[str]:
    """Returns the names of the modules that have a weight for every output channel, in order of execution."""
    order: list[str] = []
    hooks = [
        module.register_forward_hook(lambda m, args, result, name=name: order.append(name))
        for name, module in block.named_modules()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and (weight.dim() == 1 or isinstance(module, nn.Linear))
    ]
    with torch.no_grad(), removing(hooks):
        block(*call.args, **call.kwargs)
    return list(dict.fromkeys(order))
