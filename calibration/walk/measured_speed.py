"""`Speed` measures how fast a device multiplies and rounds, in a few tenths of a second, before a plan is executed.

Rounding is timed by rounding: each solver of the plan gets a small weight of random numbers in the format that it will
round to. An estimate from counted operations was off by a factor of 2.5, because solvers run through caches, kernels
and Python's own part at speeds that no elementwise product has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quant.calibration.fast_matmul import PairedWeight, fast_matmul, has_pairs
from quant.calibration.solvers.base import Solver
from quant.calibration.solvers.group import solve_group
from quant.calibration.statistics import LayerStats
from quant.formats.format import Format

_MEASURED = 0.1  # seconds
# The product that is measured: tokens, and the width of a square weight; a GPU is not busy with a small one.
_TOKENS = {False: 512, True: 2048}
_WIDTH = {False: 1024, True: 4096}
# The weight that is rounded has the real number of rows, up to a limit from which on time is in proportion to it. Each
# of GPTQ's windows of 128 inputs takes as long as the others.
_INPUTS, _ROWS = 128, {False: 2048, True: 32768}
_OUTPUT_BLOCK = 256  # of the second moment of gradients


@dataclass(frozen=True)
class Speed:
    """Measures the speed of a device; each solver and format once.

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
        x = torch.ones(16 if self._on_gpu else 1, 1024, 1024, device=self.device)
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
            weight = torch.randn(measured, _INPUTS, generator=random, device=self.device) / 8
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
    return LayerStats(size, block_moments=torch.eye(width, device=device).repeat(math.ceil(size / width), 1, 1))
