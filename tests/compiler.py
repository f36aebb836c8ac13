"""Launches on CPU tensors are compiled for a GPU that need not be there, with the arguments as they are, and not run.

    with compiled_for(90) as kernels:
        kernel[grid](x, y, …)

What is compiled is what the launch would run: its types, its alignments, its constants, its warps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

_NO_DEVICE = -1  # the kernels that Triton keeps for a real device stay as they are


@contextmanager
def fusion_is_said() -> Iterator[None]:
    """Refuses launches that leave `enable_fp_fusion` to Triton, whose default changes in 3.10."""
    from triton import knobs

    if not hasattr(type(knobs.language), "fp_fusion_enabled"):
        yield
        return
    enabled = type(knobs.language).fp_fusion_enabled

    def asked(self: Any, requested: bool | None) -> bool:
        # torch.compile looks at a kernel's IR without its options.
        by_torch = sys._getframe(2).f_globals["__name__"].startswith("torch.")
        assert requested is not None or by_torch, (
            "this launch does not say enable_fp_fusion (see quant/kernels/base/launch.py)"
        )
        return bool(enabled(self, requested))

    with patch.object(type(knobs.language), "fp_fusion_enabled", asked):
        yield


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Any]]:
    """Gives the list of compiled kernels, which grows with each launch inside."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    active = SimpleNamespace(
        get_current_device=lambda: _NO_DEVICE,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    compiled: list[Any] = []
    run, used = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **rest: Any) -> None:
        if self not in used:
            # What was compiled for another GPU without a device, by whatever test, is not taken for this one.
            self.device_caches.pop(_NO_DEVICE, None)
            used.append(self)
        compiled.append(run(self, *args, grid=grid, warmup=True, **rest))

    with patch.object(driver, "_active", active), patch.object(JITFunction, "run", compile_only), fusion_is_said():
        yield compiled
    for kernel in used:
        kernel.device_caches.pop(_NO_DEVICE, None)
