"""The plugin `QuantCacheAttention` in the classes of TensorRT-RTX, as far as a build needs it.

The builder asks for types and shapes, and stores the node's attributes and its kernels in the engine. A process that
loads the engine registers the C++ library of `cpp/` (`plugins.cpp`), whose class has the same name, fields and layout:
it launches three kernels a step, which is no work for Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant.export.onnx.opsets import CACHE_PLUGIN
from quant.export.tensorrt.cache_plugin import CACHE_DTYPES, CacheSpec, compile_cache_attention
from quant.export.tensorrt.plugin import KERNELS, pack
from quant.export.tensorrt.plugin_tensorrt import (
    PluginMethods,
    data_type,
    field_collection,
    interfaces,
    register_creator,
    type_name,
)

_FIRST_CACHE = 3  # after q, k and v
_TYPES = {"fp8": ("FP8", "FP8"), "nvfp4": ("FP8", "FP8", "FP8", "FP8")}


def register(trt: Any, archs: Sequence[int]) -> None:
    """Makes the plugin known to TensorRT-RTX before it parses a file; `graph.check_backend` refuses full TensorRT."""
    plugin_class = _plugin_class(trt, tuple(archs))
    register_creator(trt, CACHE_PLUGIN, as_fields("fp8", 0.0), lambda values: plugin_class(*from_fields(values)))


def as_fields(format: str, softmax_scale: float, kernels: bytes = b"") -> dict[str, np.ndarray]:
    """Returns the node's attributes, and its kernels once they are compiled, as fields of the plugin."""
    fields: dict[str, np.ndarray] = {
        "softmax_scale": np.array([softmax_scale], np.float32),
        "format": np.frombuffer(format.encode("ascii"), np.int8),
    }
    return {**fields, KERNELS: np.frombuffer(kernels, np.int8)} if kernels else fields


def from_fields(fields: Mapping[str, Any]) -> tuple[str, float, bytes]:
    """Reads fields, as the inverse of `as_fields`."""
    text = np.asarray(fields["format"]).tobytes().rstrip(b"\0").decode("ascii")
    kernels = np.asarray(fields[KERNELS]).tobytes() if KERNELS in fields else b""
    return text, float(np.asarray(fields["softmax_scale"]).reshape(-1)[0]), kernels


def spec_of(shapes: Sequence[Sequence[int]], dtype: str, format: str, softmax_scale: float) -> CacheSpec:
    """Returns the constants of the kernels, from the shapes of the node's inputs."""
    q, k, cache = shapes[0], shapes[1], shapes[_FIRST_CACHE]
    return CacheSpec(int(q[3]), int(q[1]) // int(k[1]), int(cache[2]), format, dtype, softmax_scale)


def _plugin_class(trt: Any, archs: tuple[int, ...]) -> type[Any]:
    """Returns the `IPluginV3` that the builder asks, which compiles the kernels for each of `archs`."""

    class Plugin(PluginMethods, *interfaces(trt)):  # type: ignore[misc]
        def __init__(self, format: str, softmax_scale: float, kernels: bytes) -> None:
            self.cache_types = _TYPES[format]
            self.begin(CACHE_PLUGIN, outputs=1 + len(self.cache_types))
            self.format, self.softmax_scale, self.kernels = format, softmax_scale, kernels

        def twin(self) -> Any:
            return Plugin(self.format, self.softmax_scale, self.kernels)

        def get_output_data_types(self, input_types: Any) -> Any:
            return [input_types[0], *(data_type(trt, name) for name in self.cache_types)]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            last = _FIRST_CACHE + len(self.cache_types)
            return [trt.DimsExprs(inputs[index]) for index in (0, *range(_FIRST_CACHE, last))]

        def supports_format_combination(self, position: Any, in_out: Any, num_inputs: Any) -> Any:
            described, first = in_out[position].desc, in_out[0].desc.type
            # An output has the type of the input that it continues: `out` the type of q, caches their own.
            index = position if position < num_inputs else 0
            if position > num_inputs:
                index = position - num_inputs + _FIRST_CACHE - 1
            caches = range(_FIRST_CACHE, _FIRST_CACHE + len(self.cache_types))
            if index < _FIRST_CACHE:
                fits = described.type == first and type_name(trt, first) in CACHE_DTYPES
            elif index in caches:
                fits = described.type == data_type(trt, self.cache_types[index - _FIRST_CACHE])
            else:
                fits = described.type == (trt.DataType.FLOAT if index < caches.stop + 2 else trt.DataType.INT32)
            return fits and described.format == trt.TensorFormat.LINEAR

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            shapes = [tuple(x.desc.dims) for x in inputs]
            spec = spec_of(shapes, type_name(trt, inputs[0].desc.type), self.format, self.softmax_scale)
            self.kernels = pack(kernel for arch in archs for kernel in compile_cache_attention(spec, arch))

        def get_fields_to_serialize(self) -> Any:
            fields = as_fields(self.format, self.softmax_scale, self.kernels)
            self.alive.append(collection := field_collection(trt, fields, self.alive))
            return collection

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            return 0  # of the build; the C++ class asks for the splits' sums when the engine runs

        def enqueue(self, *arguments: Any) -> None:
            raise RuntimeError(f"{CACHE_PLUGIN}: load the plugins' C++ library before the engine")

    return Plugin
