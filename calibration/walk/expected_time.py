"""`expected_time` says how long a plan will take before it begins, from the model's shapes and small measurements.

A plan that works from data has two stages that take long. *Writing text* runs the model once a token, for up to 64 rows
at a time: each step multiplies by every weight, and spends some extra time on each layer. *Solving* runs the
calibration tokens through each block a few times, adds up second moments of its inputs, and rounds: passes and moments
are products, rounding takes a number of elementwise operations a weight and a time a layer; both speeds are measured on
demand.

The constants were fitted on a core of an AMD EPYC to SmolLM2-135M (8 rows by GPTQ: 69 s expected, 67 s taken; 32 rows
of the mixture: 49 s and 54 s to write) and to models of two blocks; those of GPUs to one run of 8B on an H100 that was
measured before. Expect a factor of 2, and more on a busy machine: only its load during the measurements is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.calibration.solvers.solver import Pipeline, get_pipeline
from quant.calibration.texts.generate import ROWS_AT_ONCE
from quant.calibration.texts.mixture import PIECE
from quant.calibration.walk.group import Settings
from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import Plan, groups_of

_TOKENS, _WIDTH = 512, 1024  # of the measured product
_MEASURED = 0.1  # seconds
_PASSES = 4  # of all tokens through each block
# Elementwise operations a weight; other solvers search scales.
_ROUNDING = {"rtn": 120, "gptq": 5000, "gptq_plain": 5000, "kfac": 8000, "local_hessian": 600}
_SEARCH = 550
_SCALING, _LEARNING = 1400, 700  # the same for a transform's trials, and for a step of reconstruction
_ON_GPU = 0.4  # of these, where our kernels do several at a time
# Passes that measure the gradients of outputs: one forward, then for each label drawn one forward and one backward.
_GRADIENT_PASSES = {False: 3, True: 9}
_A_LAYER = {False: 0.002, True: 0.01}  # seconds, whatever its size; more for one that needs data
# Writing: seconds that a linear layer adds to a step, and how much longer than its products the rest of a step takes.
_A_STEP, _BESIDE = 0.0001, 8


@dataclass(frozen=True)
class ExpectedTime:
    """Seconds that a plan will take, without opening the model and writing the checkpoint.

    Attributes:
        writing: the seconds for calibration text that the model writes.
        solving: the seconds for solving the layers.
    """

    writing: float
    solving: float


def expected_time(
    model: nn.Module, plan: Plan, session: Session | None = None, *, rows: int, seqlen: int, written: int = 0
) -> ExpectedTime:
    """Returns how long `solve_plan` and the writing of its calibration text will take.

    Args:
        model: the model, whose shapes are read.
        plan: the plan for it.
        session: the session; everything is computed on its device.
        rows, seqlen: the number of calibration rows, and tokens in each.
        written: tokens of these that the model writes.
    """
    device = (session and session.device) or device_of(model)
    speed = _Speed(device)
    layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    product, element = speed.of_product(_TOKENS, torch.float32), speed.of_elements()
    writing = 0.0
    if written:
        length = min(PIECE, seqlen)
        pieces = math.ceil(written / length)
        batches = math.ceil(pieces / ROWS_AT_ONCE)
        weights = sum(layer.numel for layer in plan.layers if layer.kind != LayerKind.EMBEDDING)
        step = speed.of_product(math.ceil(pieces / batches), next(model.parameters()).dtype)
        writing = 2 * written * weights * _BESIDE / step + batches * length * len(layers) * _A_STEP
    products = elements = seconds = 0.0
    for members in groups_of(layers).values():
        pipeline, size, width = get_pipeline(members[0].solver), sum(m.numel for m in members), members[0].shape[-1]
        matrices = members[0].shape[0] if len(members[0].shape) == 3 else 1
        elements += size * operations(pipeline)
        seconds += len(members) * _A_LAYER[pipeline.needs_data]
        if not pipeline.needs_data:
            continue
        tokens = rows * seqlen / matrices  # each of a number of experts has its share
        products += (
            2 * tokens * (passes(pipeline, device.type == "cuda") * size + 2 * matrices * width**2) + 2 * size * width
        )
        if pipeline.reconstruction is not None:
            batch = min(rows, Settings.batch) * seqlen / matrices
            products += 6 * pipeline.reconstruction.steps * size * batch
    elements *= _ON_GPU if device.type == "cuda" else 1
    return ExpectedTime(writing, seconds + products / product + elements / element)


def time_of_rows(model: nn.Module, plan: Plan, session: Session, rows: int, seqlen: int) -> float:
    """Returns the seconds in which `rows` rows of `seqlen` tokens run through a model, its output head included."""
    device = session.device or device_of(model)
    weights = sum(layer.numel for layer in plan.layers if layer.kind != LayerKind.EMBEDDING)
    layers = sum(layer.kind == LayerKind.LINEAR for layer in plan.layers)
    products = 2 * rows * seqlen * weights / _Speed(device).of_product(_TOKENS, torch.float32)
    return products + rows * layers * _A_STEP


def operations(pipeline: Pipeline) -> int:
    """Estimates the elementwise operations that a solver takes for each weight."""
    steps = 0 if pipeline.reconstruction is None else pipeline.reconstruction.steps
    rounding = _ROUNDING.get(pipeline.spec.rounding, _SEARCH)
    return rounding + _SCALING * len(pipeline.transforms) + _LEARNING * steps


def passes(pipeline: Pipeline, on_gpu: bool) -> int:
    """Returns how often all calibration tokens go through each block, reconstruction not counted; 0 without data."""
    if not pipeline.needs_data:
        return 0
    return _PASSES + (_GRADIENT_PASSES[on_gpu] if pipeline.two_sided else 0)


@dataclass(frozen=True)
class _Speed:
    """Measures the speed of a device."""

    device: torch.device

    def of_product(self, tokens: int, dtype: torch.dtype) -> float:
        """Returns the operations a second of a product of `tokens` rows in `dtype`."""
        x = torch.ones(tokens, _WIDTH, dtype=dtype, device=self.device)
        weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=self.device)
        with fast_matmul():
            return 2 * tokens * _WIDTH**2 / self._seconds(lambda: x @ weight.T)

    def of_elements(self) -> float:
        """Returns the elements a second of an elementwise operation."""
        x = torch.ones(16 if self.device.type == "cuda" else 1, _WIDTH, _WIDTH, device=self.device)
        return x.numel() / self._seconds(lambda: x * x)

    def _seconds(self, call: Callable[[], torch.Tensor]) -> float:
        """Returns the seconds of a call, a mean over `_MEASURED` seconds which includes other processes' share."""
        call()
        started, calls, passed = time.perf_counter(), 0, 0.0
        while passed < _MEASURED:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            calls, passed = calls + 1, time.perf_counter() - started
        return passed / calls


def in_words(seconds: float) -> str:
    """Returns a rough time as a person would say it: 20 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds, -1 if seconds >= 20 else None)):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
