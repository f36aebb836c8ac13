"""`Quantized` is the result of quantizing a model: the model itself, its plan, and the error of every layer."""

from __future__ import annotations

import html
from dataclasses import dataclass

from torch import nn

from quant.execution.layer_result import LayerResult
from quant.formats.html_table import html_table
from quant.recipes.plan import Plan


@dataclass(frozen=True, eq=False)
class Quantized:
    """The result of `quantize`: the model, the plan it follows, the result of every layer, and seconds by stage."""

    model: nn.Module
    plan: Plan
    layers: list[LayerResult]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        """Returns one line: the class of the model, the plan, the worst layer and the time."""
        parts = [type(self.model).__name__, repr(self.plan)]
        measured = [layer for layer in self.layers if layer.relative_error is not None]
        if measured:
            worst = max(measured, key=lambda layer: layer.relative_error or 0.0)
            parts.append(f"largest relative error of a weight {worst.relative_error:.2%} in {worst.name}")
        return f"Quantized({'; '.join([*parts, f'{sum(self.seconds.values()):.1f} s'])})"

    def _repr_html_(self) -> str:
        """Returns a table of the layers with their errors, for notebooks."""
        rows = [
            (
                layer.name, "×".join(map(str, layer.shape)), layer.format or "16 bit", layer.activation or "16 bit",
                f"{layer.bits:.3f}", "–" if layer.relative_error is None else f"{layer.relative_error:.2%}",
                layer.solver or "", layer.reason,
            )
            for layer in self.layers
        ]  # fmt: skip
        head = ("layer", "shape", "weight", "input", "bits", "weight error", "solver", "why")
        return f"<p>{html.escape(repr(self))}</p>{html_table(head, rows)}"
