"""`layer_result` measures one layer: its format, its size and the relative error of its quantized weight.

With w the weight and w_q its dequantized form,

    relative error = ‖w − w_q‖ / ‖w‖        SNR = 10 · log10(‖w‖² / ‖w − w_q‖²) dB

so 20 dB is an error of a tenth; uniform rounding gains about 6 dB a bit. `Quantized` is the result for a whole model.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quant.base.errors import counted, html_table, option
from quant.base.json_files import JsonData
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.solver_names import parse_solver

_CHUNK_ELEMENTS = 1 << 18
_LOST = 0.5  # relative error; the coarsest format has about 0.15


@dataclass(frozen=True)
class LayerResult(JsonData):
    """Format, size and error of one weight after quantization.

    Attributes:
        name: the layer's name in the plan.
        format: weight format by name; None where it stays in 16 bit.
        activation: activation format by name, or None.
        shape: the shape of the weight.
        bits: bits per weight, scales and pads counted.
        nbytes: bytes it takes now; 0 where it is tied to another layer's.
        snr_db: signal to quantization noise in dB; None in 16 bit, and where the error is exactly zero.
        relative_error: ‖w − w_q‖ / ‖w‖; None in 16 bit.
        solver: the method that chose the codes; None in 16 bit.
        reason: the plan's sentence.
        output_error: ‖y − y_q‖ / ‖y‖ of its output on evaluation text; None where that was not measured.
    """

    name: str
    format: str | None
    activation: str | None
    shape: tuple[int, ...]
    bits: float
    nbytes: int
    snr_db: float | None
    relative_error: float | None
    solver: str | None
    reason: str
    output_error: float | None = None


def layer_result(plan_layer: LayerPlan, weight: Tensor, quantized: BlockScaledTensor | None) -> LayerResult:
    """Returns the result for one layer, its error measured in chunks of rows.

    Args:
        weight: the original weight, `[..., out, in]`; not read where the layer stays in 16 bit.

    Raises:
        ValueError: `weight` and `quantized` have different shapes, or hold NaN or infinity.
    """
    result = unmeasured_result(plan_layer)
    if quantized is None:
        return result
    if tuple(weight.shape) != quantized.shape:
        raise ValueError(
            f"{plan_layer.name}: weight {list(weight.shape)} and its quantized form {list(quantized.shape)} differ"
        )
    signal, noise = _energies(weight, quantized)
    if not math.isfinite(signal):
        raise ValueError(f"{plan_layer.name}: NaN or infinity in the weight; no error can be measured against it")
    if not math.isfinite(noise):
        raise ValueError(
            f"{plan_layer.name}: weights of up to {float(weight.abs().max()):.2g} are infinite in "
            f"{quantized.format}; keep the layer in 16 bit with {option('exclude')}"
        )
    # A weight of zeros is exact in every format.
    error = math.sqrt(noise / signal) if signal else 0.0
    snr = 10 * math.log10(signal / noise) if noise and signal else None
    return replace(result, format=quantized.format.name, snr_db=snr, relative_error=error)


def unmeasured_result(plan_layer: LayerPlan) -> LayerResult:
    """Returns the result for one layer as it was planned, without its error."""
    return LayerResult(
        name=plan_layer.name,
        format=plan_layer.weight.name if plan_layer.weight else None,
        activation=plan_layer.activation.name if plan_layer.activation else None,
        shape=plan_layer.shape,
        bits=plan_layer.bits_per_weight,
        nbytes=plan_layer.nbytes,
        snr_db=None,
        relative_error=None,
        solver=plan_layer.solver if plan_layer.weight else None,
        reason=plan_layer.reason,
    )


def loss_warnings(results: Sequence[LayerResult]) -> list[str]:
    """Returns a sentence on the layers that lost most of their weight's values, if there are any."""
    lost = [result for result in results if (result.relative_error or 0) > _LOST]
    moved = [result for result in lost if result.solver and parse_solver(result.solver).needs_data]
    lost = [result for result in lost if result not in moved]
    sentences = []
    if lost:
        sentences.append(
            f"{counted(len(lost), 'layer')} lost most of the values, by relative error: {_errors(lost)}. Where fused "
            "layers share a scale, much smaller values next to larger ones become zero: keep such layers in 16 bit "
            f"with {option('exclude')}"
        )
    if moved:
        sentences.append(
            f"{counted(len(moved), 'layer')} moved far from the weight, by relative error: {_errors(moved)}. Either "
            f"{moved[0].solver} moved them for their outputs on calibration text, or much smaller values next to "
            "larger ones, with which fused layers share a scale, became zero: look at the loss on text of another kind "
            f"({option('eval')}), and keep them in 16 bit with {option('exclude')} if it is large"
        )
    return sentences


def _errors(results: Sequence[LayerResult]) -> str:
    return ", ".join(f"{result.name} ({result.relative_error:.0%})" for result in results[:3])


def _energies(weight: Tensor, quantized: BlockScaledTensor) -> tuple[float, float]:
    """Returns ‖w‖² and ‖w − w_q‖², summed in float64."""
    elements = 128 * _CHUNK_ELEMENTS if quantized.codes.is_cuda else _CHUNK_ELEMENTS  # a GPU is slow in small bites
    signal = noise = torch.zeros((), dtype=torch.float64, device=quantized.codes.device)  # no part is waited for
    for index in range(len(weight)) if weight.dim() > 2 else [...]:
        matrix = quantized if index is ... else quantized.matrix(index)
        for rows, part in matrix.row_chunks(elements):
            w = weight[index][rows].to(part.codes.device).double().flatten()
            signal = signal + w.dot(w)
            # sub_ changes w before dot reads it again, so both factors are the difference w − w_q.
            error = w - part.dequantize().flatten()  # not in place: w is the caller's own weight in a float64 model
            noise = noise + error.dot(error)
    both: list[float] = torch.stack([signal, noise]).tolist()  # waited for once
    return both[0], both[1]


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
