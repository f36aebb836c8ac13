"""These functions stand around two methods of SGLang's scheme for NVFP4 weights with inputs in 16 bit.

The scheme serves `nvfp4a16`, and on Hopper `nvfp4` too, whose inputs it leaves in 16 bit. A layer that our kernels do
not take (a model in float16, a matrix that is no multiple of 64 × 64, another GPU) stays with SGLang, and the log says
which limit it broke. No function here imports SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from quant.kernels import hardware
from quant.vllm_plugin import weights

_log = logging.getLogger("sglang.blockscale")
Layer = Any
"""A layer of SGLang: a module with parameters and facts as attributes, which its class does not declare."""


def process_weights(original: Callable[..., None], scheme: Any, layer: Layer) -> None:
    """Puts the loaded weight into the layout of our kernels, or has SGLang do what it does.

    Args:
        original: SGLang's method.
        scheme: its scheme, which may have registered a scale of inputs.
        layer: with weight_packed u8 `[out, in / 2]`, weight_scale e4m3 `[out, in / 16]` and weight_global_scale f32
            `[members]`, reciprocals.
    """
    reciprocals = layer.weight_global_scale.data
    layer.blockscale_format = ""
    if torch.unique(reciprocals).numel() != 1:
        return original(scheme, layer)  # an error of SGLang's, which says it well
    weight = weights.nvfp4_weight(layer.weight_packed.data, layer.weight_scale.data, 1 / reciprocals[0].float())
    reason = refuses(layer)
    if not reason:
        weight, reason = weights.arranged(weight)
    if reason:
        _say(logging.WARNING, f"Blockscale: a linear layer in NVFP4 stays with SGLang: {reason}")
        return original(scheme, layer)
    for name in ("weight_packed", "input_global_scale"):
        if hasattr(layer, name):
            delattr(layer, name)
    weights.hold(layer, weight)
    _say(logging.INFO, "Blockscale: linear layers in NVFP4 take our kernels")
    return None


def apply_weights(
    original: Callable[..., torch.Tensor],
    scheme: Any,
    layer: Layer,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., out]`, by our kernels where the layer has taken them."""
    if not layer.blockscale_format:
        return original(scheme, layer, x, bias)
    return weights.multiply(layer, x, bias, layer.weight)


def refuses(layer: Layer) -> str:
    """Why a layer cannot have our kernels where it is, empty if it can."""
    device = layer.weight_packed.device
    if reason := weights.refuses(layer.params_dtype):
        return reason
    if not (device.type == "cuda" and hardware.current(device.index or 0).has_wgmma):
        return f"our kernels are for Hopper GPUs, and it is on {device}"
    return ""


@cache
def _say(level: int, message: str) -> None:
    """Says each message once in a process."""
    _log.log(level, message)
