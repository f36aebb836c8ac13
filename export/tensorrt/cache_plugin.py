"""The plugin `QuantCacheAttention` attends to a KV cache in FP8 or NVFP4 inside a TensorRT engine.

    domain "quant", op type "QuantCacheAttention"
    inputs     q                   BF16 or FP16 [batch, heads, new, dim]
               k, v                likewise [batch, kv_heads, new, dim], after RoPE: they are rounded and appended
               k_cache, v_cache    FP8 [batch, kv_heads, capacity, dim], or [..., dim / 2], two E2M1 codes a byte, which
                                   is called FP8 as well: TensorRT-RTX 1.7 builds no graph of INT8 and FP8
               k_blocks, v_blocks  FP8 [batch, kv_heads, capacity, dim / 16], block scales, for NVFP4 alone
               k_scale, v_scale    FLOAT [kv_heads]
               past, lengths       INT32 [batch]: tokens in the cache before, and with the new ones
    outputs    out                 like q
               the caches (and block scales) again: bind them to the addresses of the inputs, since the new tokens are
               written in place and nothing is copied
    attributes softmax_scale  FLOAT, 0 for 1/√dim
               format         STRING "fp8" or "nvfp4"

It launches the kernels of our paged cache, with one page of `capacity` tokens for each sequence. A step launches the
rounding of the new tokens, attention over splits of the keys, and the sum of the splits; a chunk of a prompt, whose
tile of queries is large, has one split. The launch is in C++ (`cpp/launch.cpp`), for engines that are served without
Python, and decides how many splits fill the GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant.export.onnx.opsets import CACHE_PLUGIN
from quant.export.tensorrt import plugin
from quant.kernels.base.ptx import compile_kernel

CACHE_DTYPES = {"BF16": "*bf16", "FP16": "*fp16"}
# Rows of the tiles of queries: heads of a group times new tokens. Only the largest is used without splits, too.
FEW, MANY = (8, 16), 64
BLOCK_N = 32
MOST_SPLITS = 128
_WRITE_TILE = 2048
PAGE_STRIDE = "i64"
"""Triton's type of the elements between two pages, which are whole sequences here."""
_PAGES = ("code_page", "block_page")


@dataclass(frozen=True)
class CacheSpec:
    """The constants that the kernels are compiled for; `serving.check_cache` has refused others."""

    dim: int  # head dimension
    group: int  # query heads of a KV head
    capacity: int  # tokens of a sequence that the cache holds
    format: str  # of the cache, "fp8" or "nvfp4"
    dtype: str  # of q and the output, a key of `CACHE_DTYPES`
    softmax_scale: float = 0.0  # multiplies q·k; 0 stands for 1/√dim


def compile_cache_attention(spec: CacheSpec, arch: int) -> list[plugin.BundledKernel]:
    """Compiles the kernels of the plugin for one compute capability, by role: write, attend, reduce."""
    import triton

    kernels = [_write(spec, arch, 1, 1)]
    # The search for NVFP4's block scales is unrolled, and a tile of many tokens would not fit the registers.
    if spec.format == "fp8":
        kernels.append(_write(spec, arch, _WRITE_TILE // triton.next_power_of_2(spec.dim), 4))
    for rows in FEW:
        warps = 1 if rows * spec.dim <= FEW[0] * 128 else 2
        kernels.append(_attend(spec, arch, "split", (rows, BLOCK_N, warps, 3)))
    many = (MANY, BLOCK_N if spec.dim > 128 else 2 * BLOCK_N, 4, 2)
    kernels += [_attend(spec, arch, "split", many), _attend(spec, arch, "whole", many)]
    kernels += [_reduce(spec, arch, most) for most in (32, MOST_SPLITS)]
    return kernels


def _write(spec: CacheSpec, arch: int, tokens: int, warps: int) -> plugin.BundledKernel:
    import triton

    from quant.kernels.attention.portable_paged_kv_cache import kv_pages_write_kernel

    codes = "*fp8e4nv" if spec.format == "fp8" else "*u8"
    signature = dict.fromkeys(("k", "v"), CACHE_DTYPES[spec.dtype]) | dict.fromkeys(("k_codes", "v_codes"), codes)
    signature |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") | dict.fromkeys(("k_blocks", "v_blocks"), "*fp8e4nv")
    signature |= dict.fromkeys(("table", "first"), "*i32")
    signature |= dict.fromkeys(_PAGES, PAGE_STRIDE)
    strides = ("k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token", "table_stride", "kv_heads", "new")
    signature |= dict.fromkeys(strides, "i32")
    constants = {
        "kind": spec.format, "per_token": False, "dim": spec.dim, "width": triton.next_power_of_2(spec.dim),
        "page": spec.capacity, "tokens": tokens,
    }  # fmt: skip
    compiled = compile_kernel(
        kv_pages_write_kernel, signature, constants, arch=arch, num_warps=warps, num_stages=2, multiples=_PAGES
    )
    return plugin.BundledKernel("write", tokens, compiled)


def _attend(spec: CacheSpec, arch: int, role: str, tile: tuple[int, int, int, int]) -> plugin.BundledKernel:
    import triton

    from quant.kernels.attention.portable_paged_attention import paged_attention_kernel

    block_m, block_n, warps, stages = tile
    pieces = 2 if spec.format == "fp8" else 4
    signature = {"q": CACHE_DTYPES[spec.dtype], "k": "*i16", "v": "*i16", "k_scale": "*fp32", "v_scale": "*fp32"}
    signature |= dict.fromkeys(("k_blocks", "v_blocks"), "*fp8e4nv") | dict.fromkeys(("table", "lengths"), "*i32")
    # Splits are summed in float32, and a single one is written at once in the dtype of q.
    signature |= {"out": "*fp32", "lse": "*fp32"} if role == "split" else {"out": CACHE_DTYPES[spec.dtype]}
    signature |= dict.fromkeys(_PAGES, PAGE_STRIDE)
    signature |= dict.fromkeys(("q_batch", "q_head", "q_new", "table_stride", "kv_heads", "new", "splits"), "i32")
    constants = {
        "softmax_scale": spec.softmax_scale or 1 / math.sqrt(spec.dim), "softcap": 0.0, "window": 0,
        "kind": spec.format, "per_token": False, "capped": False, "windowed": False, "asm": True,
        "dim": spec.dim, "width": max(16, triton.next_power_of_2(spec.dim // pieces)), "group": spec.group,
        "page": spec.capacity, "head_units": spec.capacity * (spec.dim // pieces), "token_units": spec.dim // pieces,
        "block_m": block_m, "block_n": block_n, "stages": stages, "overlap": False,
    }  # fmt: skip
    if role != "split":
        constants["lse"] = None
    compiled = compile_kernel(
        paged_attention_kernel, signature, constants, arch=arch, num_warps=warps, num_stages=stages, multiples=_PAGES
    )
    return plugin.BundledKernel(role, block_m, compiled)


def _reduce(spec: CacheSpec, arch: int, most: int) -> plugin.BundledKernel:
    import triton

    from quant.kernels.attention.portable_paged_attention import paged_attention_reduce_kernel

    width = triton.next_power_of_2(spec.dim)
    signature = {"parts": "*fp32", "lses": "*fp32", "out": CACHE_DTYPES[spec.dtype], "rows": "i32", "splits": "i32"}
    constants = {"dim": spec.dim, "width": width, "most": most, "overlap": False}
    warps = min(max(min(most, 32) * width // 1024, 1), 4)
    compiled = compile_kernel(
        paged_attention_reduce_kernel, signature, constants, arch=arch, num_warps=warps, num_stages=2
    )
    return plugin.BundledKernel("reduce", most, compiled)


# The class of TensorRT-RTX is for builds: the builder asks it for types and shapes, and stores the node's attributes
# and its kernels in the engine. A process that loads the engine registers the C++ library of `cpp/`, whose class has
# the same name, fields and layout: it launches three kernels a step, which is no work for Python.
_FIRST_CACHE = 3  # after q, k and v
_TYPES = {"fp8": ("FP8", "FP8"), "nvfp4": ("FP8", "FP8", "FP8", "FP8")}


def register(trt: Any, archs: Sequence[int]) -> None:
    """Makes the plugin known to TensorRT-RTX before it parses a file; `build.check_backend` refuses full TensorRT."""
    plugin_class = _plugin_class(trt, tuple(archs))
    plugin.register_creator(trt, CACHE_PLUGIN, as_fields("fp8", 0.0), lambda values: plugin_class(*from_fields(values)))


def as_fields(format: str, softmax_scale: float, kernels: bytes = b"") -> dict[str, np.ndarray]:
    """Returns the node's attributes, and its kernels once they are compiled, as fields of the plugin."""
    fields: dict[str, np.ndarray] = {
        "softmax_scale": np.array([softmax_scale], np.float32),
        "format": np.frombuffer(format.encode("ascii"), np.int8),
    }
    return {**fields, plugin.KERNELS: np.frombuffer(kernels, np.int8)} if kernels else fields


def from_fields(fields: Mapping[str, Any]) -> tuple[str, float, bytes]:
    """Reads fields, as the inverse of `as_fields`."""
    text = np.asarray(fields["format"]).tobytes().rstrip(b"\0").decode("ascii")
    kernels = np.asarray(fields[plugin.KERNELS]).tobytes() if plugin.KERNELS in fields else b""
    return text, float(np.asarray(fields["softmax_scale"]).reshape(-1)[0]), kernels


def _plugin_class(trt: Any, archs: tuple[int, ...]) -> type[Any]:
    class Plugin(plugin.PluginMethods, *plugin.interfaces(trt)):  # type: ignore[misc]
        def __init__(self, format: str, softmax_scale: float, kernels: bytes) -> None:
            self.cache_types = _TYPES[format]
            self.begin(CACHE_PLUGIN, outputs=1 + len(self.cache_types))
            self.format, self.softmax_scale, self.kernels = format, softmax_scale, kernels

        def twin(self) -> Any:
            return Plugin(self.format, self.softmax_scale, self.kernels)

        def get_output_data_types(self, input_types: Any) -> Any:
            return [input_types[0], *(plugin.data_type(trt, name) for name in self.cache_types)]

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
                fits = described.type == first and plugin.type_name(trt, first) in CACHE_DTYPES
            elif index in caches:
                fits = described.type == plugin.data_type(trt, self.cache_types[index - _FIRST_CACHE])
            else:
                fits = described.type == (trt.DataType.FLOAT if index < caches.stop + 2 else trt.DataType.INT32)
            return fits and described.format == trt.TensorFormat.LINEAR

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            q, k, cache = (tuple(map(int, inputs[index].desc.dims)) for index in (0, 1, _FIRST_CACHE))
            dtype = plugin.type_name(trt, inputs[0].desc.type)
            spec = CacheSpec(q[3], q[1] // k[1], cache[2], self.format, dtype, self.softmax_scale)
            self.kernels = plugin.pack(kernel for arch in archs for kernel in compile_cache_attention(spec, arch))

        def get_fields_to_serialize(self) -> Any:
            fields = as_fields(self.format, self.softmax_scale, self.kernels)
            self.alive.append(collection := plugin.field_collection(trt, fields, self.alive))
            return collection

    return Plugin
