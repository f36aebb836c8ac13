"""Runs an engine of TensorRT-RTX in Triton Inference Server's Python backend.

`quant export --to triton-server` copies it into a model repository as `model.py`, next to `model.engine`. The server
needs torch and tensorrt-rtx for it, and nothing of this library. Tensors stay on the GPU; an engine of several
profiles runs in the first one that takes a request's shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

ENGINE_FILE = "model.engine"
DEVICE = "cuda"


class TritonPythonModel:
    """The class that the backend looks for: it calls `initialize` once, then `execute` with requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the engine onto the instance's GPU, or raises RuntimeError.

        `args` come from the backend: `model_repository`, `model_version`, `model_instance_device_id`, `model_config`.
        """
        import tensorrt_rtx as trt
        import triton_python_backend_utils as server

        self.server = server
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.device = torch.device(DEVICE, int(args["model_instance_device_id"]))
        self.stream = torch.cuda.Stream(self.device)
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.runtime = trt.Runtime(self.logger)
        path = Path(args["model_repository"], args["model_version"], ENGINE_FILE)
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise RuntimeError(f"{path} does not load: it was built for another GPU, or by another TensorRT-RTX")
        self.context = self.engine.create_execution_context()
        self.types = {
            getattr(trt.DataType, name): dtype
            for name, dtype in {
                "FLOAT": torch.float32,
                "HALF": torch.float16,
                "BF16": torch.bfloat16,
                "INT64": torch.int64,
                "INT32": torch.int32,
                "INT8": torch.int8,
                "UINT8": torch.uint8,
                "BOOL": torch.bool,
            }.items()
        }

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request; one that cannot be run gets an error, and the others their outputs."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        server = self.server
        try:
            received = {name: server.get_input_tensor_by_name(request, name) for name in self.inputs}
            inputs = {name: from_dlpack(x.to_dlpack()).to(self.device) for name, x in received.items()}
            outputs = self.run(inputs)
        except (RuntimeError, ValueError) as error:
            return server.InferenceResponse(output_tensors=[], error=server.TritonError(str(error)))
        tensors = [server.Tensor.from_dlpack(name, x.__dlpack__()) for name, x in outputs.items()]
        return server.InferenceResponse(output_tensors=tensors)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the engine on inputs by name, on the GPU.

        Raises ValueError if no profile takes these shapes, RuntimeError if the engine failed.
        """
        # Shapes and addresses belong to the context, and Triton calls one instance from one thread at a time.
        shapes = {name: tuple(x.shape) for name, x in inputs.items()}
        self.context.set_optimization_profile_async(self._profile(shapes), self.stream.cuda_stream)
        held = {name: x.contiguous() for name, x in inputs.items()}
        for name, x in held.items():
            self.context.set_input_shape(name, shapes[name])
            self.context.set_tensor_address(name, x.data_ptr())
        outputs = {}
        for name in self.outputs:
            dtype = self.types[self.engine.get_tensor_dtype(name)]
            outputs[name] = torch.empty(tuple(self.context.get_tensor_shape(name)), dtype=dtype, device=self.device)
            self.context.set_tensor_address(name, outputs[name].data_ptr())
        # torch may still be writing the inputs on its own stream.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise RuntimeError("TensorRT-RTX did not run the engine; the server's log has its message")
        # The server reads the outputs as soon as this returns.
        self.stream.synchronize()
        return outputs

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        accepted = []
        for index in range(self.engine.num_optimization_profiles):
            ranges = {name: self.engine.get_tensor_profile_shape(name, index) for name in shapes}
            if all(_within(shapes[name], low, high) for name, (low, _, high) in ranges.items()):
                return index
            accepted += [f"{name} from {tuple(low)} to {tuple(high)}" for name, (low, _, high) in ranges.items()]
        requested = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the engine does not take {requested}; it takes {'; '.join(accepted)}")


def _within(shape: tuple[int, ...], low: Any, high: Any) -> bool:
    return len(shape) == len(low) and all(a <= x <= b for a, x, b in zip(low, shape, high, strict=True))
