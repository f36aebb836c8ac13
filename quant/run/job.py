"""A `Job` is a run in progress, which its stages hand on; an `Outcome` is the result of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import megabytes
from quant.base.listener import Listener, StageProgress
from quant.calibration.allocation.allocate import Allocation
from quant.calibration.inputs import Inputs
from quant.calibration.layer_result import LayerResult, Quantized
from quant.calibration.placement import describe
from quant.calibration.session import Session
from quant.formats.tensor import BlockScaledTensor
from quant.models.files import SourceKind
from quant.models.open_model import Source
from quant.recipes.plan import Plan
from quant.recipes.solver_names import parse_solver
from quant.report.report import Report
from quant.run.request import Request


@dataclass(frozen=True, eq=False)
class Job:
    """A run in progress."""

    request: Request
    source: Source
    session: Session  # device, memory, store and seed of all steps
    listener: Listener
    seconds: dict[str, float]  # of finished stages, by name

    @property
    def model(self) -> nn.Module:
        """The model, unless the source is a bare state dict."""
        return self.source.module

    @property
    def tries_loading(self) -> bool:
        """Whether transformers is to load the checkpoint on trial."""
        is_directory = self.request.out is not None and not self.request.is_gguf
        return is_directory and self.source.kind == SourceKind.HUGGINGFACE

    @contextmanager
    def stages(self) -> Iterator[tuple[Job, StageProgress]]:
        """Gives the same job with a listener that counts stages, and the counter of these stages."""
        with self.listener.stages() as progress:
            yield replace(self, session=replace(self.session, progress=progress)), progress


@dataclass(frozen=True, eq=False)
class Decision:
    """The plan of a run, and the data that its weights are solved with."""

    plan: Plan  # as it was decided, before a guard changed it
    data: torch.Tensor | Inputs | None = None  # None where none was read yet, or none is needed
    # Whether an effort of this run chose the solvers, so that one without data may replace them. A plan that the user
    # names says everything, whatever its provenance says of its origin.
    may_lower_effort: bool = False
    # Whether solvers are those of an effort alone, so that their transform may be chosen on the model.
    tries_transforms: bool = False
    # The choice of formats for a budget, and the quantized copy of the model that it measured, if any.
    allocation: Allocation | None = None


@dataclass(frozen=True, eq=False)
class SolvedModel:
    """The solved weights of a run."""

    plan: Plan  # that was executed
    layers: list[LayerResult]  # one for each layer of the plan
    bytes_before: int  # of all weights of the original
    quantized: Quantized | None = None  # None for a bare state dict
    tensors: Mapping[str, BlockScaledTensor] | None = None  # of a bare state dict, by layer name


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a run."""

    plan: Plan  # that was executed, or that a dry run would execute
    report: Report | None = None  # of a checkpoint that was written
    quantized: Quantized | None = None  # of a module in memory


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
