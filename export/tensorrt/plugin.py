"""The plugin `QuantFp8Attention` is our FP8 attention kernel inside a TensorRT engine.

In an ONNX file the kernel is one node, which TensorRT's parser matches with a plugin by the last two attributes:

    domain "quant", op type "QuantFp8Attention"
    inputs     q       FLOAT8E4M3FN [batch, heads, seq_q, dim]        outputs of QuantizeLinear
               k, v    FLOAT8E4M3FN [batch, kv_heads, seq_kv, dim]    kv_heads divides heads (GQA)
               scales  FLOAT [3]                                      of q, k and v: value = code · scale
    output     out     BFLOAT16 or FLOAT16 [batch, heads, seq_q, dim]
    attributes causal            INT    0 or 1; the last query sees every key (right-aligned when seq_q < seq_kv)
               softmax_scale     FLOAT  multiplies q·k; 0 stands for 1/√dim
               output_type       INT    ONNX's number of the output's type: 16 (BFLOAT16) or 10 (FLOAT16)
               plugin_version    STRING "1"
               plugin_namespace  STRING "quant"

`dim` is 64, 128 or 256, known when the engine is built; other sizes may be dynamic. Tensors are dense and row-major.

Full TensorRT takes a *quick-deployable* plugin: its kernel is compiled to PTX when the engine is built, the PTX lies
inside the engine, and no Python runs later. TensorRT-RTX takes an `IPluginV3`; a process that loads its engine has the
C++ library of `cpp/`, which launches the same PTX. Shapes, types and fields are plain functions here, tested without
TensorRT.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Self

import numpy as np

from quant.base.errors import option
from quant.export.onnx.opsets import PLUGIN, PLUGIN_DOMAIN, PLUGIN_VERSION
from quant.kernels.attention.attention_operands import HEAD_DIMS, Tiles, tiles_for
from quant.kernels.base.ptx import CompiledKernel, compile_kernel

# A bundle is compiled kernels as one text, which a plugin carries in an engine and C++ reads without a library. A
# kernel has a header, with its role in the plugin, compute capability, entry, warps, bytes of shared memory, rows of
# its tile, parameters, and the length of its PTX, which follows with a newline:
#     attend 90 fp8_dense_attention 8 165888 128 q:*fp8e4nv,…,heads:i32,out:*bf16 41234
_FIRST = "blockscale-kernels 1\n"


@dataclass(frozen=True)
class BundledKernel:
    """A kernel for one role in a plugin; `rows` of its tile decide how many programs a launch has."""

    role: str
    rows: int
    compiled: CompiledKernel


def pack(kernels: Iterable[BundledKernel]) -> bytes:
    """Writes kernels as the text of a bundle."""
    parts = [_FIRST]
    for kernel in kernels:
        one = kernel.compiled
        arguments = ",".join(f"{name}:{kind}" for name, kind in one.arguments)
        facts = (kernel.role, one.arch, one.name, one.num_warps, one.shared, kernel.rows, arguments, len(one.ptx))
        parts.append(f"{' '.join(map(str, facts))}\n{one.ptx}\n")
    return "".join(parts).encode("ascii")


INPUTS = ("q", "k", "v", "scales")
KERNELS = "kernels"
"""The field of a plugin that holds its kernels."""
OUTPUT_TYPES = {16: "BF16", 10: "FP16"}
"""Names of the output types in TensorRT, by their number in ONNX."""
_TRITON_TYPES = {"FP8": "*fp8e4nv", "FP32": "*fp32", "BF16": "*bf16", "FP16": "*fp16"}  # of the kernel's pointers


@dataclass(frozen=True)
class Attributes:
    """Attributes of the node and fields of the plugin, see above."""

    causal: int = 0
    softmax_scale: float = 0.0
    output_type: int = 16

    @property
    def io_types(self) -> tuple[str, ...]:
        """Type of each input, then of the output, by its TensorRT name."""
        return "FP8", "FP8", "FP8", "FP32", OUTPUT_TYPES[self.output_type]

    def scale(self, dim: int) -> float:
        """Returns the factor of q·k."""
        return self.softmax_scale or 1 / math.sqrt(dim)

    def to_fields(self) -> dict[str, np.ndarray]:
        """Returns one array of one value for each attribute: int32 and float32, as ONNX's parser makes them."""
        return {
            field.name: np.array([getattr(self, field.name)], np.float32 if field.type is float else np.int32)
            for field in fields(self)
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """Makes attributes from the fields that `to_fields` returned; fields that are no attributes are ignored."""
        attributes: dict[str, Any] = {
            field.name: (float if field.type is float else int)(np.ravel(values[field.name])[0])
            for field in fields(cls)
            if field.name in values
        }
        return cls(**attributes)


def check_shapes(shapes: Sequence[Sequence[int | None]], name: str = PLUGIN) -> int:
    """Checks that the inputs fit each other and returns the head dimension."""
    sizes = [[None if size is None or size < 0 else size for size in shape] for shape in shapes]
    described = ", ".join(
        f"{n} {['?' if x is None else x for x in shape]}" for n, shape in zip(INPUTS, sizes, strict=True)
    )
    if [len(shape) for shape in sizes] != [4, 4, 4, 1] or sizes[3][0] not in (None, 3):
        raise ValueError(f"{name}: {described}; expected q, k, v [batch, heads, seq, dim] and scales [3]")
    q, k, v, _ = sizes
    alike = ((q[0], k[0], v[0]), (q[3], k[3], v[3]), (k[1], v[1]), (k[2], v[2]))
    if any(len({size for size in group if size is not None}) > 1 for group in alike):
        raise ValueError(f"{name}: {described}; batch and dim must agree, and k and v in everything")
    if q[1] and k[1] and q[1] % k[1]:
        raise ValueError(f"{name}: {described}; {k[1]} KV heads do not divide {q[1]} heads")
    # Known when the engine is built, for the kernel is compiled for one head dimension.
    dim = next((size for size in (q[3], k[3], v[3]) if size is not None), None)
    if dim not in HEAD_DIMS:
        takes = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"{name}: {described}; the head dimension must be known, one of {takes}. Use "
            f"{option('attention', 'native')}"
        )
    return dim


def compile_attention(dim: int, attributes: Attributes, arch: int) -> CompiledKernel:
    """Compiles the kernel for the engine: PTX for one compute capability, head dimension and mask."""
    from quant.kernels.attention.portable_dense_attention import fp8_dense_attention

    # The kernel's arguments in order: q, k, v, scales, four integers, out. `launch` passes them in this order.
    types = [_TRITON_TYPES[name] for name in attributes.io_types]
    tiles = tiles_for(dim, arch)
    signature = dict(zip(INPUTS, types[:-1], strict=True))
    signature |= dict.fromkeys(("heads", "kv_heads", "seq_q", "seq_kv"), "i32") | {"out": types[-1]}
    constants = {
        "softmax_scale": attributes.scale(dim), "causal": bool(attributes.causal), "dim": dim,
        "block_q": tiles.block_q, "block_kv": tiles.block_kv,
    }  # fmt: skip
    return compile_kernel(
        fp8_dense_attention, signature, constants, arch=arch, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )


def launch_grid(q: Sequence[Any], tiles: Tiles, ceil_div: Callable[[Any, int], Any]) -> tuple[Any, Any, Any]:
    """Returns the blocks in x, y and z for q `[batch, heads, seq_q, dim]`: numbers, or TensorRT's symbols."""
    return ceil_div(q[2], tiles.block_q), q[1], q[0]


def integer_arguments(q: Sequence[Any], k: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Returns the integers between the kernel's inputs and its output: heads, kv_heads, seq_q, seq_kv."""
    return q[1], k[1], q[2], k[2]


_DATA_TYPES = {"FP32": "FLOAT", "FP16": "HALF"}

retained: list[Any] = []
"""Plugins and creators: the Python bindings of TensorRT-RTX 1.7 hold no reference to their arguments."""


def register(trt: ModuleType, archs: Sequence[int]) -> None:
    """Makes the plugin known to TensorRT, before it parses a file with the plugin."""
    # Only TensorRT-RTX builds for several architectures, and only full TensorRT has quick-deployable plugins.
    if hasattr(trt, "ComputeCapability"):
        plugin_class = _plugin_class(trt, tuple(archs))
        fields = Attributes().to_fields()
        register_creator(trt, PLUGIN, fields, lambda values: plugin_class(Attributes.from_fields(values), pack(())))
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
        # Sizes are symbols, and numbers where they are known before run time.
        symbols = [x.shape_expr for x in (q, k, v, scales)]
        dim = check_shapes([[size.constant_value() if size.is_constant else None for size in x] for x in symbols])
        compiled, tiles = compile_attention(dim, attributes, arch), tiles_for(dim, arch)
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


def data_type(trt: Any, name: str) -> Any:
    """Returns TensorRT's type of a name such as FP8 or FP16."""
    return getattr(trt.DataType, _DATA_TYPES.get(name, name))


def _plugin_class(trt: Any, archs: tuple[int, ...]) -> type[Any]:
    """Returns the `IPluginV3` of TensorRT-RTX, which compiles its kernel for each of `archs`.

    Methods are TensorRT's; the builder calls `configure_plugin`, and `get_fields_to_serialize` puts the PTX into the
    engine. A process that loads the engine has the C++ library of `cpp/`, which launches the same PTX.
    """

    class Plugin(PluginMethods, *interfaces(trt)):  # type: ignore[misc]
        def __init__(self, attributes: Attributes, kernels: bytes) -> None:
            self.begin(PLUGIN, outputs=1)
            self.attributes, self.kernels = attributes, kernels

        def twin(self) -> Any:
            return Plugin(self.attributes, self.kernels)

        def get_output_data_types(self, input_types: Any) -> Any:
            return [data_type(trt, self.attributes.io_types[-1])]

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
            self.kernels = pack(
                BundledKernel("attend", tiles_for(dim, arch).block_q, compile_attention(dim, self.attributes, arch))
                for arch in archs
            )

        def get_fields_to_serialize(self) -> Any:
            values = {**self.attributes.to_fields(), KERNELS: np.frombuffer(self.kernels, np.int8)}
            self.alive.append(collection := field_collection(trt, values, self.alive))
            return collection

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

    def enqueue(self, *arguments: Any) -> None:
        # A launch at every step is no work for Python.
        raise RuntimeError(f"{self.plugin_name}: load the plugins' C++ library before the engine")

    def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
        return 0  # of the build; the C++ class of a cache asks for the splits' sums when the engine runs

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
    """Registers the creator of a plugin of TensorRT-RTX."""

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
    return {data_type(trt, name): name for name in ("FP8", "FP32", "BF16", "FP16")}.get(type_, str(type_))
