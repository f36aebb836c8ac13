"""A forward enters few Python functions before it launches a kernel: they take most of a small matmul's time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from triton.runtime.jit import JITFunction

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base import hardware, launch
from quant.kernels.linear import dispatch, quantized_module
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.gpus import GPUS

MOST = 8


@pytest.fixture
def _h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This CPU is taken for an H100, whose launches do nothing."""
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    monkeypatch.setattr("quant.kernels.linear.sm90_codes_gemm_many.current", lambda index=0: GPUS["h100"])
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: True)
    monkeypatch.setattr(dispatch, "_products", {})
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    with torch.library._scoped_library("quant", "IMPL") as library:
        library.impl("linear", dispatch.linear_on_gpu, "CPU")
        yield


def entered(module: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """The functions of Python from `forward` to the launch, which is Triton's or `CachedLaunch`'s, by name.

    The garbage collector is off: it may start at any allocation and calls the weak references of what it frees, such
    as those of `numbers_only` to the weights of earlier tests, and a profiler counts these calls as ours.
    """
    names: list[str] = []
    launched = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal launched
        if event == "call" and not launched:
            file = frame.f_code.co_filename
            launched = ("/triton/" in file or file == launch.__file__) and bool(names)
            if not launched and (names or frame.f_code.co_name == "forward"):
                names.append(frame.f_code.co_name)

    gc.disable()
    sys.setprofile(profile)
    try:
        module(x)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert launched
    return names


PAIRS = {"nvfp4": "fp8_token", "mxfp8": "mxfp8", "fp8": "fp8", "fp8_channel": "fp8_token", "int8": "int8_token"}


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize(
    ("format", "activation"),
    [*((f, "") for f in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_block", "int8", "int4")), *PAIRS.items()],
)
def test_few_functions_before_the_launch(format: str, activation: str, tokens: int) -> None:
    form = FORMATS[activation] if activation else None
    static = torch.tensor(0.01) if form is not None and form.is_static else None
    weight = quantize(torch.randn(512, 1024), FORMATS[format])
    module = QuantLinear(weight, torch.randn(512).bfloat16(), form, static)
    x = torch.randn(tokens, 1024).bfloat16()
    with torch.no_grad():
        module(x)
        names = entered(module, x)
    assert names[0] == "forward" and len(names) <= MOST, names
    with torch.inference_mode():
        assert len(entered(module, x)) <= MOST - 1
