"""The plugin `QuantFp8Attention` in the classes of TensorRT and TensorRT-RTX.

`plugin` has its shapes, types and launch as plain functions. Full TensorRT gets a quick-deployable plugin: three
functions, and PTX inside the engine. TensorRT-RTX gets an `IPluginV3`, which launches the same PTX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from quant.export.onnx.opsets import PLUGIN, PLUGIN_DOMAIN, PLUGIN_VERSION
from quant.kernels.base.cuda_driver import LoadedKernel
from quant.export.tensorrt.plugin import (
    INPUTS,
    Attributes,
    BundledKernel,
    bundle_attention,
    check_shapes,
    compile_attention,
    infer_types,
    integer_arguments,
    kernel_fields,
    kernels_from_fields,
    launch,
    launch_grid,
)
from quant.kernels.attention.attention_operands import tiles_for

_DATA_TYPES = {"FP32": "FLOAT", "FP16": "HALF"}

retained: list[Any] = []
"""Plugins and creators: the Python bindings of TensorRT-RTX 1.7 hold no reference to their arguments."""


def register(trt: ModuleType, archs: Sequence[int]) -> None:
    """Makes the plugin known to TensorRT, before it parses a file or loads an engine with the plugin.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        archs: compute capabilities that engines are built for, such as 90; full TensorRT builds for one.

    Raises:
        ValueError: several architectures for full TensorRT.
    """
    # Only TensorRT-RTX builds for several architectures, and only full TensorRT has quick-deployable plugins.
    if hasattr(trt, "ComputeCapability"):
        plugin_class = _plugin_class(trt, tuple(archs))
        # The PTX for each of `archs` is stored in the engine, so a process that loads one needs only this creator, or
        # one in C++ that launches the same PTX, and neither Triton nor a compiler.
        register_creator(
            trt,
            PLUGIN,
            Attributes().to_fields(),
            lambda values: plugin_class(Attributes.from_fields(values), kernels_from_fields(values)),
        )
        return
    if len(archs) != 1:
        raise ValueError(f"{PLUGIN}: full TensorRT builds for the GPU it runs on, not for {list(archs)}")
    import importlib

    register_quick(trt, importlib.import_module(f"{trt.__name__}.plugin"), archs[0])


def register_quick(trt: Any, trtp: Any, arch: int) -> None:
    """Registers the plugin of full TensorRT; `trtp` is `tensorrt.plugin`, `arch` the GPU's capability."""
    plugin = f"{PLUGIN_DOMAIN}::{PLUGIN}"
    tensor = trtp.TensorDesc
    inputs = dict.fromkeys(INPUTS, tensor)
    attribute_types = {"causal": int, "softmax_scale": float, "output_type": int}

    def describe(q: Any, k: Any, v: Any, scales: Any, causal: Any, softmax_scale: Any, output_type: Any) -> Any:
        attributes = Attributes(causal, softmax_scale, output_type)
        output = q.like()
        output.dtype = data_type(trt, attributes.io_types[-1])
        return output

    def autotune(
        q: Any, k: Any, v: Any, scales: Any, causal: Any, softmax_scale: Any, output_type: Any, outputs: Any
    ) -> Any:
        types = Attributes(causal, softmax_scale, output_type).io_types
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR")]

    # TensorRT binds arguments by name, so one object cannot hold the attributes.
    def implement(
        q: Any, k: Any, v: Any, scales: Any, causal: Any, softmax_scale: Any, output_type: Any,
        outputs: Any, tactic: Any,
    ) -> Any:  # fmt: skip
        attributes = Attributes(causal, softmax_scale, output_type)
        shapes = [[_constant(size) for size in x.shape_expr] for x in (q, k, v, scales)]
        compiled = compile_attention(check_shapes(shapes), attributes, arch)
        tiles = tiles_for(check_shapes(shapes), arch)
        params = trtp.KernelLaunchParams()
        params.grid_x, params.grid_y, params.grid_z = launch_grid(q.shape_expr, tiles, trtp.cdiv)
        params.block_x = compiled.threads
        params.shared_mem = compiled.shared
        integers = integer_arguments(q.shape_expr, k.shape_expr)
        extra = trtp.SymIntExprs.from_tuple([trtp.SymInt32(size) for size in integers])
        return compiled.name, compiled.ptx, params, extra

    # TensorRT reads the types as objects, and `from __future__ import annotations` would leave it strings.
    outputs = {"outputs": tuple[tensor]}  # type: ignore[valid-type]
    describe.__annotations__ = inputs | attribute_types | {"return": tensor}
    autotune.__annotations__ = inputs | attribute_types | outputs | {"return": list[trtp.AutoTuneCombination]}
    returned = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    implement.__annotations__ = inputs | attribute_types | outputs | {"tactic": int, "return": returned}
    trtp.register(plugin)(describe)
    trtp.autotune(plugin)(autotune)
    trtp.aot_impl(plugin)(implement)


def _constant(size: Any) -> int | None:
    """Returns a symbolic size as a number, None where it is only known at run time."""
    return size.constant_value() if size.is_constant else None


def data_type(trt: Any, name: str) -> Any:
    """Returns TensorRT's type of a name such as FP8 or FP16."""
    return getattr(trt.DataType, _DATA_TYPES.get(name, name))


def _plugin_class(trt: Any, archs: tuple[int, ...]) -> type[Any]:
    """Returns the `IPluginV3` of TensorRT-RTX, which compiles its kernel for each of `archs`.

    Methods are TensorRT's; the builder calls `configure_plugin`, and `get_fields_to_serialize` puts the PTX into the
    engine. A process that loads the engine calls `enqueue`.
    """

    class Plugin(PluginMethods, *interfaces(trt)):  # type: ignore[misc]
        def __init__(self, attributes: Attributes, kernels: dict[int, BundledKernel]) -> None:
            self.begin(PLUGIN, outputs=1)
            self.attributes, self.kernels = attributes, kernels
            self.loaded: dict[int, LoadedKernel] = {}

        def twin(self) -> Any:
            return Plugin(self.attributes, self.kernels)

        def get_output_data_types(self, input_types: Any) -> Any:
            names = [type_name(trt, type_) for type_ in input_types]
            return [data_type(trt, infer_types(names, self.attributes))]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            output = trt.DimsExprs(4)
            for axis in range(4):
                output[axis] = inputs[0][axis]
            return [output]

        def supports_format_combination(self, position: Any, in_out: Any, num_inputs: Any) -> Any:
            described = in_out[position].desc
            expected = data_type(trt, self.attributes.io_types[position])
            return described.type == expected and described.format == trt.TensorFormat.LINEAR

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            dim = check_shapes([tuple(x.desc.dims) for x in inputs])
            self.kernels = bundle_attention(dim, self.attributes, archs)

        def get_fields_to_serialize(self) -> Any:
            values = {**self.attributes.to_fields(), **kernel_fields(self.kernels)}
            self.alive.append(collection := field_collection(trt, values, self.alive))
            return collection

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            check_shapes([tuple(x.dims) for x in inputs])

        def enqueue(
            self, inputs: Any, outputs: Any, input_addresses: Any, output_addresses: Any, workspace: Any, stream: Any
        ) -> None:
            # PTX is loaded on the first call, for the CUDA context of the engine exists then.
            arch = _local_arch()
            if arch not in self.loaded:
                if arch not in self.kernels:
                    raise ValueError(f"{PLUGIN}: the engine has kernels for {sorted(self.kernels)}, this GPU is {arch}")
                self.loaded[arch] = LoadedKernel(self.kernels[arch].compiled)
            shapes = [tuple(x.dims) for x in inputs[:2]]
            launch(self.loaded[arch], shapes, [*input_addresses, *output_addresses], stream)

    return Plugin


class PluginMethods:
    """The methods of TensorRT's interfaces that are alike in all our plugins; it stands before pybind11's classes."""

    def begin(self, name: str, outputs: int) -> None:
        """Constructs the bases and sets the properties that TensorRT reads."""
        # pybind11 requires that the constructor of each base runs; super() reaches only the first.
        for base in type(self).__bases__:
            base.__init__(self)  # type: ignore[misc]
        self.plugin_name, self.plugin_namespace, self.plugin_version = name, PLUGIN_DOMAIN, PLUGIN_VERSION
        self.num_outputs = outputs
        self.alive: list[Any] = []

    def twin(self) -> Any:
        """Returns a new plugin with the same state."""
        raise NotImplementedError

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    def clone(self) -> Any:
        retained.append(twin := self.twin())
        return twin

    def on_shape_change(self, inputs: Any, outputs: Any) -> None:
        pass

    def get_valid_tactics(self) -> Any:
        return []

    def set_tactic(self, tactic: Any) -> None:
        pass


def interfaces(trt: Any) -> tuple[type[Any], ...]:
    """Returns the interfaces that a plugin of TensorRT-RTX has: of any time, of the build, and of the engine."""
    return trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime


def register_creator(
    trt: Any, name: str, fields: Mapping[str, np.ndarray], create: Callable[[dict[str, Any]], Any]
) -> None:
    """Registers the creator of a plugin of TensorRT-RTX.

    Args:
        trt: the module `tensorrt_rtx`.
        name: the plugin's.
        fields: its attributes, with any values.
        create: makes the plugin from the values of a node's attributes, or of those in an engine.

    Raises:
        ValueError: TensorRT-RTX knows a plugin of this name.
    """

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = name, PLUGIN_DOMAIN, PLUGIN_VERSION
            self.alive: list[Any] = []
            self.field_names = field_collection(trt, fields, self.alive)

        def create_plugin(self, name: Any, collection: Any, phase: Any) -> Any:
            retained.append(plugin := create({field.name: field.data for field in collection}))
            return plugin

    creator = Creator()
    if not trt.get_plugin_registry().register_creator(creator, PLUGIN_DOMAIN):
        raise ValueError(f"{name}: TensorRT-RTX did not take the plugin; is it registered already?")
    retained.append(creator)


def field_collection(trt: Any, values: Mapping[str, np.ndarray], alive: list[Any]) -> Any:
    """Returns plugin fields with these values; `alive` gets the objects that must live as long as the collection."""
    types = trt.PluginFieldType
    kinds = {"int32": types.INT32, "float32": types.FLOAT32, "int8": types.CHAR}
    alive.extend(values.values())
    plugin_fields = [trt.PluginField(name, value, kinds[value.dtype.name]) for name, value in values.items()]
    alive.extend(plugin_fields)
    return trt.PluginFieldCollection(plugin_fields)


def type_name(trt: Any, type_: Any) -> str:
    """Returns the name of a TensorRT type, the inverse of `data_type`."""
    names = {data_type(trt, name): name for name in ("FP8", "FP32", "BF16", "FP16")}
    return names.get(type_, str(type_))


def _local_arch() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
