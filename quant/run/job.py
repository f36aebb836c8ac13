"""A `Job` is a run in progress, which its stages hand on; an `Outcome` is the result of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from quant.base.listener import Listener, StageProgress
from quant.calibration.allocation.allocate import Allocation
from quant.calibration.inputs import Inputs
from quant.calibration.layer_result import LayerResult, Quantized
from quant.calibration.session import Session
from quant.formats.tensor import BlockScaledTensor
from quant.models.files import SourceKind
from quant.models.open_model import Source
from quant.recipes.plan import Plan
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
