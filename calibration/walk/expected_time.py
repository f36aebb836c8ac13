"""`expected_time` says how long a plan will take before it begins, from the model's shapes and small measurements.

A plan that works from data has two stages that take long. *Writing text* runs the model once a token, for up to 64 rows
at a time: each step multiplies by every weight, and spends some extra time on each layer. *Solving* runs the
calibration tokens through each block a few times, adds up second moments of its inputs, and rounds. The device's speed
at products and at rounding is measured (`Speed`); the time that any layer takes, whatever its size, is a constant.

Seconds that were told and taken, with 8 rows of 256 tokens of SmolLM2-135M, processor time of one core of an AMD EPYC,
two to eight blocks: `gptq` 8.1 and 8.5, `kfac` 18.4 and 18.6, `awq:merge+gptq` 7.1 and 7.4, `gptq` to FP8 7.2 and 9.6,
`local_hessian` 7.2 and 4.9. An H100 took 6.0 for `gptq` with 32 rows of 512 tokens, 10.2 for `kfac`, and 5.8 for `gptq`
of six blocks of Llama-3-8B's shape; from the speeds measured there this file computes 5.9, 11.6 and 8.4. Expect a
factor of 1.5, and more on a busy machine: only its load during the measurements is seen. Kernels that Triton compiles
for the first time take some 3 s more; the measurement compiles most of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.calibration.fast_matmul import PairedWeight, fast_matmul, has_pairs
from quant.calibration.outputs.gradients import labels_drawn
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.calibration.solvers.interfaces import Solver
from quant.calibration.solvers.registry import Pipeline, get_pipeline
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats
from quant.calibration.texts.mixture import PIECE
from quant.calibration.texts.self_written import ROWS_AT_ONCE
from quant.calibration.walk.group import Settings
from quant.calibration.walk.learned_rotation import LEARNING_ROWS, STEPS
from quant.formats.format import Format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan, groups_of

_PASSES = 4  # of all tokens through each block
# Elementwise operations a weight, for the table of solvers; other solvers search scales.
_ROUNDING = {"rtn": 120, "gptq": 5000, "gptq_plain": 5000, "kfac": 8000, "local_hessian": 600}
_SEARCH = 550
_SCALING, _LEARNING = 1400, 700  # the same for a transform's trials, and for a step of reconstruction
_ON_GPU = 0.4  # of these, where our kernels do several at a time
_A_LAYER = {False: 0.002, True: 0.01}  # seconds, whatever its size; more for one that needs data
_A_LAYER_ON_GPU = 0.01  # seconds more for one that needs data, in which a GPU waits for the processor
# Writing: seconds that a linear layer adds to a step, and how much longer than its products the rest of a step takes.
_A_STEP, _BESIDE = 0.0001, 8
_MEASURED = 0.1  # seconds
# The product that is measured: tokens, and the width of a square weight; a GPU is not busy with a small one.
_TOKENS = {False: 512, True: 2048}
_WIDTH = {False: 1024, True: 4096}
# The weight that is rounded has the real number of rows, up to a limit from which on time is in proportion to it. Each
# of GPTQ's windows of 128 inputs takes as long as the others.
_INPUTS, _ROWS = 128, {False: 2048, True: 32768}
_OUTPUT_BLOCK = 256  # of the second moment of gradients


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
    speed = Speed(device)
    layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    writing = 0.0
    if written:
        length = min(PIECE, seqlen)
        pieces = math.ceil(written / length)
        batches = math.ceil(pieces / ROWS_AT_ONCE)
        weights = sum(layer.numel for layer in plan.layers if layer.kind != LayerKind.EMBEDDING)
        step = speed.of_linear(math.ceil(pieces / batches), next(model.parameters()).dtype)
        writing = 2 * written * weights * _BESIDE / step + batches * length * len(layers) * _A_STEP
    groups = [
        _GroupWork(model, members, (rows, seqlen), device.type == "cuda") for members in groups_of(layers).values()
    ]
    solving = sum(len(group.members) * group.of_each + group.rounding(speed) for group in groups)
    learning = _learning_operations(plan, min(rows, LEARNING_ROWS) * seqlen)
    # Speeds are measured where they are needed: a measurement takes a tenth of a second.
    for work, operations_a_second in (
        (sum(group.of_passes for group in groups) + learning[0], speed.of_linear),
        (sum(group.of_solver for group in groups) + learning[1], speed.of_product),
        (sum(group.elements for group in groups), speed.of_elements),
    ):
        solving += work / operations_a_second() if work else 0.0
    return ExpectedTime(writing, solving)


def _learning_operations(plan: Plan, tokens: int) -> tuple[float, float]:
    """Returns the operations in which a rotation of the residual stream is learned: of passes, and of products."""
    learned = [layer for layer in plan.quantized if get_pipeline(layer.solver).spec.learns_rotation]
    width = next((layer.shape[-1] for layer in plan.layers if layer.kind == LayerKind.EMBEDDING), 0)
    if not learned:
        return 0.0, 0.0
    # Most groups as wide as the stream read it; of attention's output projection that is an overestimate.
    inputs = sum(members[0].shape[-1] == width for members in groups_of(learned).values())
    # Two passes forward and one backward, and a second moment; each step multiplies two matrices by R.
    passes = 2 * tokens * (4 * sum(layer.numel for layer in learned) + 3 * inputs * width**2)
    return passes, float(STEPS * inputs * 2 * 2 * width**3)


class _GroupWork:
    """The work of solving a fusion group.

    Args:
        model: the model.
        members: the layers of the group.
        text: the calibration rows, and tokens in each.
        on_gpu: whether a GPU does the work.

    Attributes:
        of_passes: operations of the products with calibration tokens: forward passes, second moments, drift.
        of_solver: operations of the solver's products that are as wide as the layer.
        elements: elementwise operations of transforms and of reconstruction.
        of_each: seconds of each layer, whatever its size.
    """

    def __init__(self, model: nn.Module, members: Sequence[LayerPlan], text: tuple[int, int], on_gpu: bool) -> None:
        self.members, self.pipeline = members, get_pipeline(members[0].solver)
        size, width = sum(member.numel for member in members), members[0].shape[-1]
        self.matrices = members[0].shape[0] if len(members[0].shape) == 3 else 1
        self.rows = size // width // self.matrices
        steps = self.pipeline.reconstruction.steps if self.pipeline.reconstruction else 0
        trials = _SCALING * len(self.pipeline.transforms) + _LEARNING * steps
        self.elements = size * trials * (_ON_GPU if on_gpu else 1.0)
        self.of_passes = self.of_solver = 0.0
        self.of_each = _A_LAYER[self.pipeline.needs_data]
        if not self.pipeline.needs_data:
            return
        self.of_each += _A_LAYER_ON_GPU if on_gpu else 0
        rows, seqlen = text
        # Each of a number of experts has its share of the tokens, which visit several of them.
        visits = getattr(getattr(model, "config", None), "num_experts_per_tok", None) or 1
        share = visits / self.matrices if self.matrices > 1 else 1.0
        # The second moment is symmetric, and with the drift twice that: xᵀ x and (r - x)ᵀ x.
        moments = 2 * self.matrices * width**2
        self.of_passes = 2 * rows * seqlen * share * (passes(self.pipeline, rows, on_gpu=on_gpu) * size + moments)
        self.of_passes += 6 * steps * size * min(rows, Settings.batch) * seqlen * share
        if self.pipeline.needs_moment and not self.pipeline.at_once:
            # A correction by the drift takes two products of the weight with [in, in], GPTQ's pass and its descent one
            # and a half; Cholesky factor and inverse a third of in³ each, at a fraction of the speed.
            self.of_solver = 7 * size * width + 4 * self.matrices * width**3

    def rounding(self, speed: Speed) -> float:
        """Returns the seconds for rounding, without the products that grow with the square of the width."""
        layer = self.members[0]
        if not self.pipeline.rounding.supports(layer.weight_format):
            return 0.0  # the plan is refused in a moment
        column = speed.of_rounding(
            self.pipeline.rounding, layer.weight_format, self.rows, two_sided=self.pipeline.rounding.two_sided
        )
        return column * layer.shape[-1] * self.matrices


def time_of_rows(model: nn.Module, plan: Plan, session: Session, rows: int, seqlen: int) -> float:
    """Returns the seconds in which `rows` rows of `seqlen` tokens run through a model, its output head included."""
    device = session.device or device_of(model)
    weights = sum(layer.numel for layer in plan.layers if layer.kind != LayerKind.EMBEDDING)
    layers = sum(layer.kind == LayerKind.LINEAR for layer in plan.layers)
    products = 2 * rows * seqlen * weights / Speed(device).of_linear()
    return products + rows * layers * _A_STEP


def operations(pipeline: Pipeline) -> int:
    """Estimates the elementwise operations that a solver takes for each weight."""
    steps = 0 if pipeline.reconstruction is None else pipeline.reconstruction.steps
    rounding = _ROUNDING.get(pipeline.spec.rounding, _SEARCH)
    return rounding + _SCALING * len(pipeline.transforms) + _LEARNING * steps


def passes(pipeline: Pipeline, rows: int, *, on_gpu: bool) -> int:
    """Returns how often all tokens of `rows` rows go through each block, reconstruction not counted; 0 without data."""
    if not pipeline.needs_data:
        return 0
    # Gradients of outputs take one pass forward, then for each label drawn one forward and one backward.
    return _PASSES + (1 + 2 * labels_drawn(rows, on_gpu=on_gpu) if pipeline.rounding.two_sided else 0)


@dataclass(frozen=True)
class Speed:
    """Measures the speed of a device; each solver and format once.

    Rounding is timed by rounding: each solver of the plan gets a small weight of random numbers in the format that it
    will round to. An estimate from counted operations was off by a factor of 2.5, because solvers run through caches,
    kernels and Python's own part at speeds that no elementwise product has.

    Attributes:
        device: the device, on which no other work of this process runs.
    """

    device: torch.device
    _roundings: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def of_linear(self, tokens: int | None = None, dtype: torch.dtype = torch.float32) -> float:
        """Returns the operations a second of a linear layer as forward passes of `tokens` tokens compute it."""
        x, weight = self._operands(tokens, dtype)
        if has_pairs(x):
            paired = PairedWeight(weight.bfloat16().float())  # a checkpoint's weights have no low part
            return 2 * x.numel() * len(weight) / self._seconds(lambda: paired.linear(x))
        with fast_matmul():
            return 2 * x.numel() * len(weight) / self._seconds(lambda: x @ weight.T)

    def of_product(self) -> float:
        """Returns the operations a second of float32 products as solvers compute them."""
        x, weight = self._operands(None, torch.float32)
        return 2 * x.numel() * len(weight) / self._seconds(lambda: x @ weight.T)

    def of_elements(self) -> float:
        """Returns the elements a second of an elementwise operation."""
        x = torch.ones(16 if self._on_gpu else 1, 1024, 1024, device=self.device, dtype=torch.float32)
        return x.numel() / self._seconds(lambda: x * x)

    def of_rounding(self, solver: Solver, format: Format, rows: int, *, two_sided: bool = False) -> float:
        """Returns the seconds in which a solver rounds a column of `rows` weights, at the width of the measured weight.

        Args:
            solver: the solver; it gets a second moment of independent inputs.
            format: the format of the weights.
            rows: the number of outputs that are solved together.
            two_sided: whether it also gets a second moment of output gradients.
        """
        measured = min(rows, _ROWS[self._on_gpu])
        key = (repr(solver), format.name, measured, two_sided)
        if key not in self._roundings:
            random = torch.Generator(self.device).manual_seed(0)
            weight = torch.randn(measured, _INPUTS, generator=random, device=self.device, dtype=torch.float32) / 8
            outputs = _independent(measured, _OUTPUT_BLOCK, self.device) if two_sided else None
            stats = LayerStats(_INPUTS, _independent(_INPUTS, _INPUTS, self.device).matrix, outputs=outputs)
            self._roundings[key] = self._seconds(
                lambda: solve_group({"a weight": weight}, {"a weight": stats}, format, solver)
            )
        return self._roundings[key] / _INPUTS * rows / measured

    def _operands(self, tokens: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns an input `[tokens, width]` and a weight `[width, width]`."""
        width = _WIDTH[self._on_gpu]
        x = torch.ones(tokens or _TOKENS[self._on_gpu], width, dtype=dtype, device=self.device)
        return x, torch.ones(width, width, dtype=dtype, device=self.device)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Returns the seconds of a call, a mean over `_MEASURED` seconds which includes other processes' share."""
        call()
        self._wait()
        started, calls, passed = time.perf_counter(), 0, 0.0
        while passed < _MEASURED:
            call()
            self._wait()
            calls, passed = calls + 1, time.perf_counter() - started
        return passed / calls

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)


def _independent(size: int, width: int, device: torch.device) -> LayerStats:
    """Returns second moments of `size` independent channels, in diagonal blocks of `width`."""
    return LayerStats(
        size, block_moments=torch.eye(width, device=device, dtype=torch.float32).repeat(math.ceil(size / width), 1, 1)
    )


def in_words(seconds: float) -> str:
    """Returns a rough time as a person would say it: 20 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds, -1 if seconds >= 20 else None)):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
