"""This file runs index arithmetic of Gluon kernels in PyTorch, for every program at once.

Gluon has no interpreter. A function that says which part of the work a program takes needs none: its source is plain
arithmetic on integers, which means the same on int32 tensors that hold one element for each program.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch


def run_in_torch(function: Any, programs: int) -> Callable[..., Any]:
    """A `gluon.jit` function as a Python function over tensors `[programs]`, of its own source and nothing else."""
    language = SimpleNamespace(
        int32=torch.int32,
        where=torch.where,
        program_id=lambda axis: torch.arange(programs, dtype=torch.int32),
        num_programs=lambda axis: programs,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        cdiv=lambda a, b: (a + b - 1) // b,
    )
    source = function.fn
    return FunctionType(source.__code__, {**source.__globals__, "gl": language})
