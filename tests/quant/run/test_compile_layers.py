"""Kernels of quantized layers, compiled in another process for the inputs that the original layers get."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import quant
from quant.run.compile_layers import LayerCalls, compiling, recorded_layers, run_on_zeros

_CUDA = torch.device("cuda", 0)


def _calls(columns: int = 64) -> LayerCalls:
    """A block that is called with 7, again 7 and 3 tokens, of which all calls of one kind are recorded once."""
    block = nn.Sequential(nn.Linear(columns, 2 * columns), nn.Linear(2 * columns, columns, bias=False))
    model = nn.Sequential(nn.ModuleList([block, block])).bfloat16()
    with recorded_layers(model, quant.make_plan(model, "nvfp4", solver="rtn")) as calls:
        for tokens in (7, 7, 3):
            block(torch.zeros(1, tokens, columns, dtype=torch.bfloat16))
    assert not any(module._forward_pre_hooks for module in model.modules())
    return calls


def test_each_kind_of_call_is_run_once_as_the_original_was() -> None:
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is torch.ops.quant.linear.default:
                x, codes, _, _, bias, *_ = args
                seen.append((x.dtype, *x.shape, codes.shape[0], bias is not None, *args[-2:]))
            return op(*args, **(kwargs or {}))

    with Products():
        run_on_zeros(pickle.dumps((_calls(), torch.device("cpu"))))
    layers = [(columns, rows, bias) for columns, rows, bias in ((64, 128, True), (128, 64, False))]
    expected = {(torch.bfloat16, 1, n, columns, *rest, "nvfp4", "nvfp4") for n in (7, 3) for columns, *rest in layers}
    assert len(seen) == 4 and set(seen) == expected


def _process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the processes that are started, as they are started."""
    begun: list[Any] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return begun


def test_the_process_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _process(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("beside")])  # as notebooks do; imports pass over it
    with compiling(_calls(), torch.device("cpu")), compiling({}, _CUDA):
        assert not begun
    with compiling(_calls(), _CUDA):
        assert begun[0].poll() is None
    assert begun[0].returncode == -9
    with pytest.raises(KeyError):
        _run_into_an_error()
    assert begun[1].returncode == -9


def _run_into_an_error() -> None:
    with compiling(_calls(), _CUDA):
        raise KeyError


def test_a_run_goes_on_where_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    reached = False
    with compiling(_calls(), _CUDA):
        reached = True
    assert reached


@pytest.mark.slow
def test_the_process_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _process(monkeypatch)
    with compiling(_calls(), _CUDA):  # without a GPU, too: each error is left to the layer that comes upon it again
        assert begun[0].wait(timeout=120) == 0


@pytest.mark.gpu
def test_the_process_leaves_no_kernel_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    begun = _process(monkeypatch)
    with compiling(_calls(512), _CUDA):
        assert begun[0].wait(timeout=120) == 0
    kernels = set(tmp_path.glob("*/*.cubin"))
    # Quantized on the CPU, so that Triton is called for what the layers run alone.
    model = (
        "block = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)).bfloat16();"
        "model, data = nn.Sequential(block), [torch.randn(1, n, 512).bfloat16() for n in (7, 3)];"
        "quant.quantize(model, 'nvfp4', data, solver='rtn', device='cpu');"
        "assert all(model.cuda()(x.cuda()).isfinite().all() for x in data)"
    )
    subprocess.run([sys.executable, "-c", f"import quant, torch; from torch import nn; {model}"], check=True)
    assert kernels and set(tmp_path.glob("*/*.cubin")) == kernels
