"""Compiles the kernels of quantized layers in a process of its own, while the weights of the layers are solved.

    original model    recorded_layers: which inputs does each layer get?
    solving           compiling: the process runs such layers on zeros, and Triton keeps their kernels on the disk
    measuring         the quantized model finds them there

Triton takes 10 s for a Flux transformer. A thread would not do: solving captures CUDA graphs, and a capture fails where
another thread loads a kernel.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.calibration.statistics import static_input_scale
from quant.formats.tensor import quantize
from quant.kernels.linear.install import install_weight
from quant.recipes.blocks import removing
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

LayerCalls = dict[tuple[Any, ...], LayerPlan]
"""A layer for each kind of call: whether it has a bias, shape and dtype of the input, formats, shape of the weight."""


@contextmanager
def recorded_layers(model: nn.Module, plan: Plan) -> Iterator[LayerCalls]:
    """Notes the calls of planned linear layers while open."""
    calls: LayerCalls = {}

    def note(layer: LayerPlan, module: nn.Module, args: tuple[Any, ...]) -> None:
        for x in args[:1]:
            key = (module.bias is not None, x.shape, x.dtype, layer.weight, layer.activation, layer.shape)
            calls.setdefault(key, layer)

    linears = [(layer, model.get_submodule(layer.name)) for layer in plan.quantized if layer.kind == LayerKind.LINEAR]
    with removing(module.register_forward_pre_hook(partial(note, layer)) for layer, module in linears):
        yield calls


@contextmanager
def compiling(calls: LayerCalls, device: torch.device) -> Iterator[None]:
    """Compiles what `calls` need on a GPU, in another process, while open; elsewhere it does nothing."""
    if device.type != "cuda" or not calls:
        yield
        return
    # It reads its input before it imports PyTorch, so that nobody waits for it. What it has not compiled, after an
    # error too, or where no process can start, is compiled when it is needed. Imports pass over a Path in `sys.path`.
    read = "import sys; calls = sys.stdin.buffer.read(); from quant.run import compile_layers"
    command, quiet = [sys.executable, "-P", "-c", f"{read}; compile_layers.run_on_zeros(calls)"], subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if isinstance(x, str))}
    with ExitStack() as stack:
        with suppress(OSError):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            with process.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(pickle.dumps((calls, device)))
        yield


def run_on_zeros(pickled: bytes) -> None:
    """Runs a quantized layer for each of the pickled calls, on their device, and reads its weight back."""
    calls, device = pickle.loads(pickled)
    for (has_bias, shape, dtype, *_), layer in calls.items():
        with suppress(Exception), torch.no_grad(), torch.cuda.device_of(torch.empty(1, device=device)):
            linear = nn.Linear(layer.shape[1], layer.shape[0], has_bias, device, dtype)
            model, weight = nn.Sequential(linear).eval(), linear.weight.float()
            scale = None if layer.activation is None else static_input_scale(weight.amax(), layer.activation, dtype)
            install_weight(model, replace(layer, name="0"), quantize(weight, layer.weight_format), scale)
            model(torch.zeros(shape, device=device, dtype=dtype))
            assert model[0].quantized_weight is not None
