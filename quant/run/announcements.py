"""Sentences about a run that a listener hears before the slow steps: device, source, effort, transform."""

from collections.abc import Mapping
from typing import Any

from quant.base.errors import megabytes
from quant.base.listener import Listener
from quant.calibration.placement import describe
from quant.calibration.session import Session
from quant.models.open_model import Source
from quant.recipes.plan import Plan
from quant.recipes.solver_names import parse_solver


def announce_device(listener: Listener, session: Session) -> None:
    """Says that a run computes on a GPU, if it does."""
    if session.device is not None and session.device.type != "cpu":
        listener.message(f"on {describe(session.device)}")


def announce_source(listener: Listener, source: Source) -> None:
    """Says that the files of a model hold it quantized, if they do."""
    if source.quantization is not None:
        dtype = str(source.dtype).removeprefix("torch.")
        listener.message(f"the source is quantized ({source.quantization}); its weights are dequantized to {dtype}")


def announce_untied_head(listener: Listener, plan: Plan) -> None:
    """Says what the weight takes that a learned rotation gives to a head which has shared the embedding's."""
    heads = [layer for layer in plan.layers if layer.weight is None and layer.tied_to is not None]
    if heads and any(parse_solver(layer.solver).learns_rotation for layer in plan.quantized):
        listener.message(
            f"{heads[0].name} shares the weight of {heads[0].tied_to}; a learned rotation gives it one of its own, "
            f"which takes {megabytes(sum(2 * head.numel for head in heads))} more in 16 bit"
        )


def announce_effort(listener: Listener, plan: Plan) -> None:
    """Says why a plan has a lower effort than the requested one, if so."""
    chosen = plan.provenance.get("effort")
    if isinstance(chosen, dict) and "why" in chosen:
        listener.message(f"effort {chosen['level']} ({chosen['solver']}) instead of {chosen['asked']}: {chosen['why']}")


def announce_transform(listener: Listener, choice: Mapping[str, Any]) -> None:
    """Says which transform of 4-bit inputs a run takes, and what each lost that was tried."""
    if "why" in choice:
        listener.message(f"{choice['solver']}, without a comparison of transforms: {choice['why']}")
        return
    losses = ", ".join(f"{solver} lost {loss:g}" for solver, loss in choice["lost"].items())
    listener.message(f"takes {choice['solver']}: {losses} on {choice['on']}")
