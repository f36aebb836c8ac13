"""Rounding to nearest needs no data: its variants differ in the rule that chooses block scales."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, quantize


@dataclass(frozen=True)
class RoundToNearest:
    """Round to nearest, with block scales by one rule."""

    rule: str

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        return quantize(weight, format, rule=self.rule, global_scale=global_scale, name=name)
