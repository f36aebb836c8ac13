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
inside the engine, and no Python runs later. TensorRT-RTX takes an `IPluginV3`, whose `enqueue` launches the same PTX
through the CUDA driver. Shapes, types, fields and the launch are plain functions here, tested without TensorRT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quant.base.errors import option
from quant.export.onnx.opsets import PLUGIN
from quant.kernels.base.cuda_driver import LoadedKernel
from quant.kernels.attention.attention_operands import HEAD_DIMS, Tiles, tiles_for
from quant.kernels.base.ptx import CompiledKernel, compile_kernel

# Compiled kernels as one text, which a plugin carries in an engine and C++ reads without a library.
#
#     blockscale-kernels 1
#     attend 90 fp8_dense_attention 8 165888 128 q:*fp8e4nv,…,heads:i32,out:*bf16 41234
#     .version 8.7 …                                                    41,234 bytes of PTX, then a newline
#     …
#
# The header of a kernel gives its role in the plugin, the compute capability, the entry's name, warps, bytes of shared
# memory, rows of its tile, its parameters in order, and the length of its PTX.


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


def unpack(text: bytes) -> list[BundledKernel]:
    """Reads the kernels of a bundle; ValueError if it is none, or is cut off."""
    if not text.startswith(_FIRST.encode()):
        raise ValueError("not a bundle of kernels: it does not begin with " + _FIRST.strip())
    kernels: list[BundledKernel] = []
    position = len(_FIRST)
    while position < len(text):
        end = text.find(b"\n", position)
        words = text[position:end].decode().split(" ")
        if end < 0 or len(words) != 8 or len(text) < end + 2 + int(words[7]):
            raise ValueError(f"a bundle of kernels is cut off after {len(kernels)} of them")
        role, arch, name, warps, shared, rows, arguments, length = words
        pairs = (pair.partition(":") for pair in arguments.split(","))
        ptx = text[end + 1 : end + 1 + int(length)].decode()
        listed = tuple((parameter, kind) for parameter, _, kind in pairs)
        compiled = CompiledKernel(name, ptx, int(arch), listed, int(warps), int(shared))
        kernels.append(BundledKernel(role, int(rows), compiled))
        position = end + 2 + int(length)
    return kernels


INPUTS = ("q", "k", "v", "scales")

KERNELS = "kernels"
"""The field of a plugin that holds its kernels."""

OUTPUT_TYPES = {16: "BF16", 10: "FP16"}
"""Names of the output types in TensorRT, by their number in ONNX."""

# Triton's types of the kernel's pointers.
_TRITON_TYPES = {"FP8": "*fp8e4nv", "FP32": "*fp32", "BF16": "*bf16", "FP16": "*fp16"}


@dataclass(frozen=True)
class Attributes:
    """Attributes of the node and fields of the plugin, see above; ValueError for unknown values."""

    causal: int = 0
    softmax_scale: float = 0.0
    output_type: int = 16

    def __post_init__(self) -> None:
        if self.causal not in (0, 1):
            raise ValueError(f"{PLUGIN}: causal is {self.causal}; expected 0 or 1")
        if not 0 <= self.softmax_scale < math.inf:
            raise ValueError(f"{PLUGIN}: softmax_scale is {self.softmax_scale}; it must be positive, or 0 for 1/√dim")
        if self.output_type not in OUTPUT_TYPES:
            types = ", ".join(f"{number} ({name})" for number, name in OUTPUT_TYPES.items())
            raise ValueError(f"{PLUGIN}: output_type is {self.output_type}; known: {types}")

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
            field.name: np.array([getattr(self, field.name)], np.float32 if field.type == "float" else np.int32)
            for field in fields(self)
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Attributes:
        """Makes attributes from the fields that `to_fields` returned; fields that are no attributes are ignored."""
        attributes: dict[str, Any] = {
            field.name: (float if field.type == "float" else int)(np.ravel(values[field.name])[0])
            for field in fields(cls)
            if field.name in values
        }
        return cls(**attributes)


def check_shapes(shapes: Sequence[Sequence[int | None]], name: str = PLUGIN) -> int:
    """Checks that the inputs fit each other and returns the head dimension.

    Args:
        shapes: of q, k, v and scales; None (or −1) is a size that is not known yet.
        name: of the node, for the message.

    Raises:
        ValueError: they do not fit, or the kernel does not take the head dimension.
    """
    sizes = [[None if size is None or size < 0 else size for size in shape] for shape in shapes]
    described = ", ".join(
        f"{n} {['?' if x is None else x for x in shape]}" for n, shape in zip(INPUTS, sizes, strict=True)
    )
    if [len(shape) for shape in sizes] != [4, 4, 4, 1] or sizes[3][0] not in (None, 3):
        raise ValueError(f"{name}: {described}; expected q, k, v [batch, heads, seq, dim] and scales [3]")
    q, k, v, _ = sizes
    if _differ(q[0], k[0], v[0]) or _differ(q[3], k[3], v[3]) or _differ(k[1], v[1]) or _differ(k[2], v[2]):
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


def _differ(*sizes: int | None) -> bool:
    return len({size for size in sizes if size is not None}) > 1


def infer_types(types: Sequence[str], attributes: Attributes, name: str = PLUGIN) -> str:
    """Returns the output's type from the inputs', by their TensorRT names.

    Raises ValueError, with the node's `name`, if an input has another type than the kernel reads.
    """
    *expected, output = attributes.io_types
    wrong = [f"{n} is {got}, not {t}" for n, got, t in zip(INPUTS, types, expected, strict=True) if got != t]
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
    return output


def compile_attention(dim: int, attributes: Attributes, arch: int) -> CompiledKernel:
    """Compiles the kernel for the engine: PTX for one compute capability, head dimension and mask."""
    from quant.kernels.attention.portable_dense_attention import fp8_dense_attention

    # The kernel's arguments in order: q, k, v, scales, four integers, out. `launch` passes them in this order.
    types = [_TRITON_TYPES[name] for name in attributes.io_types]
    tiles = tiles_for(dim, arch)
    signature = dict(zip(INPUTS, types[:-1], strict=True))
    signature |= dict.fromkeys(("heads", "kv_heads", "seq_q", "seq_kv"), "i32") | {"out": types[-1]}
    constants = {
        "softmax_scale": attributes.scale(dim),
        "causal": bool(attributes.causal),
        "dim": dim,
        "block_q": tiles.block_q,
        "block_kv": tiles.block_kv,
    }
    return compile_kernel(
        fp8_dense_attention, signature, constants, arch=arch, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )


def launch_grid(q: Sequence[Any], tiles: Tiles, ceil_div: Callable[[Any, int], Any]) -> tuple[Any, Any, Any]:
    """Returns the blocks in x, y and z for q `[batch, heads, seq_q, dim]`: numbers, or TensorRT's symbols."""
    return ceil_div(q[2], tiles.block_q), q[1], q[0]


def integer_arguments(q: Sequence[Any], k: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Returns the integers between the kernel's inputs and its output: heads, kv_heads, seq_q, seq_kv."""
    return q[1], k[1], q[2], k[2]


def launch(kernel: LoadedKernel, shapes: Sequence[Sequence[int]], addresses: Sequence[int], stream: int = 0) -> None:
    """Launches the PTX as an engine does.

    Args:
        kernel: of `compile_attention`, loaded.
        shapes: of q and k.
        addresses: of q, k, v, scales and out.
        stream: handle of a CUDA stream.
    """
    q, k = shapes
    grid = launch_grid(q, tiles_for(q[3], kernel.compiled.arch), lambda a, b: -(-a // b))
    kernel.launch(grid, [*addresses[:4], *integer_arguments(q, k), *addresses[4:]], stream)


def bundle_attention(dim: int, attributes: Attributes, archs: Iterable[int]) -> dict[int, BundledKernel]:
    """Compiles the kernel for each of these compute capabilities, with its tile's queries, which decide the grid."""
    return {
        arch: BundledKernel("attend", tiles_for(dim, arch).block_q, compile_attention(dim, attributes, arch))
        for arch in archs
    }


def kernel_fields(kernels: Mapping[int, BundledKernel]) -> dict[str, np.ndarray]:
    """Returns compiled kernels as a field of the plugin: a bundle, which C++ reads too."""
    return {KERNELS: np.frombuffer(pack(kernels.values()), np.int8)}


def kernels_from_fields(values: Mapping[str, Any]) -> dict[int, BundledKernel]:
    """Reads the kernels that `kernel_fields` packed, by compute capability; none where a node is only being built."""
    if KERNELS not in values:
        return {}
    return {kernel.compiled.arch: kernel for kernel in unpack(np.asarray(values[KERNELS]).tobytes())}
