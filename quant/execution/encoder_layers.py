"""`call_encoder_layers` makes torch's encoder layers call their linear layers, which they otherwise multiply by.

In eval mode without gradients, `nn.TransformerEncoderLayer` hands the weights of its linear layers to one fused
operation. Quantized layers, and layers in training, would round neither their inputs there nor, in training, their
weights. A layer whose activation is not marked as ReLU or GELU calls its parts instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# By class, the attribute that only the condition of the fused operation reads: the activation, and whether padding is
# left out by nested tensors, which no other operation takes.
_ATTRIBUTES: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}


def call_encoder_layers(model: nn.Module) -> None:
    """Turns off the fused operation of every encoder layer in a model."""
    for module, attribute in _fused(model):
        setattr(module, attribute, 0)


@contextmanager
def calling_encoder_layers(model: nn.Module) -> Iterator[None]:
    """Turns off the fused operation of every encoder layer while open."""
    before = [(module, attribute, getattr(module, attribute)) for module, attribute in _fused(model)]
    call_encoder_layers(model)
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)


def _fused(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for kind, attribute in _ATTRIBUTES.items():
            if isinstance(module, kind) and hasattr(module, attribute):
                yield module, attribute
