"""LoRA inside of the rounding: a layer in training rounds W + s·BA, the weight that will be served.

An adapter next to a quantized layer is served next to it, or loses some of its training when it is merged and rounded.
Here the layer that `prepare_qat` made rounds the sum, in each forward pass:

    y = Q(x) Q(W + s·B A)ᵀ        gradients reach A and B straight through the rounding

`merge_and_unload` computes the same sum, and `convert_qat` packs it: the packed model gives the outputs of training. W
is frozen, so the optimizer holds only the adapters' states.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear

from quant.base.errors import UserError
from quant.training.modules import QATLinear


class LoraQATLinear(Linear):  # type: ignore[misc]
    """PEFT's `lora.Linear` over a `QATLinear`, which adds the adapter to its weight before rounding."""

    base_layer: QATLinear

    def __init__(self, base_layer: QATLinear, adapter_name: str, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, config, *args, **kwargs)
        self.get_base_layer().adapter = _Added(self)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        check_inside(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        if adapter_name in self.lora_variant:
            variant = type(self.lora_variant[adapter_name]).__name__
            raise UserError(f"{variant} of PEFT cannot be inside of the rounding; use plain LoRA, or rsLoRA")

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("adapter_names") is not None:
            raise UserError("adapter_names: rows of a batch cannot have different adapters inside of the rounding")
        if self.disable_adapters and self.merged:
            self.unmerge()
        return self.base_layer(x)  # type: ignore[no-any-return]

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> QATLinear:
        """Returns the layer in training without the adapter, or with it in its weight."""
        if merge:
            self.merge(safe_merge, adapter_names)
        base: QATLinear = self.get_base_layer()
        base.adapter = None
        return base


class _Added:
    """The adapters of a layer as its base layer sees them; no module, which would contain itself."""

    def __init__(self, layer: LoraQATLinear) -> None:
        self._layer = layer

    @property
    def version(self) -> tuple[int, ...]:
        layer = self._layer
        return tuple(
            part[name].weight._version for name in self._active() for part in (layer.lora_A, layer.lora_B)
        )  # fmt: skip

    def added(self) -> torch.Tensor | None:
        deltas = [self._layer.get_delta_weight(name) for name in self._active()]
        return sum(deltas[1:], deltas[0]) if deltas else None

    def _active(self) -> list[str]:
        layer = self._layer
        if layer.disable_adapters:
            return []
        return [name for name in layer.active_adapters if name in layer.lora_A and name not in layer.merged_adapters]


def check_inside(config: Any) -> None:
    """Raises UserError for options of a `LoraConfig` that an adapter inside of the rounding cannot have."""
    for name, reason in (
        ("lora_dropout", "the adapter has no input of its own"),
        ("lora_bias", "it adds only to the weight"),
        ("use_dora", "it divides by the norm of a weight"),
        ("target_parameters", "experts round without adapters"),
    ):
        if value := getattr(config, name, None):
            raise UserError(
                f"{name}={value!r}: not for LoRA inside of the rounding of a model that prepare_qat prepared, where "
                f"{reason}; leave it out, or use PEFT without quant.lora, which puts adapters beside the rounded layers"
            )
