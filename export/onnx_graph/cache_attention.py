"""Attention over a KV cache in FP8 or NVFP4 as a PyTorch op, and its translation to a node of our plugin.

    quant::onnx_fp8_cache, quant::onnx_nvfp4_cache    the node `QuantCacheAttention`

`quantized_cache` puts the op into a serving graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quant.export.onnx.attention_nodes import attend
from quant.export.onnx.opsets import INT32, PLUGIN_DOMAIN, PLUGIN_VERSION, opset, plugin_opset
from quant.formats.format import FORMATS, Format
from quant.kernels.attention.kv_pages import KVPages, decode_kv, write_reference


def cache_translations() -> dict[Any, Callable[..., Any]]:
    """Returns ONNX translations by PyTorch op."""
    return {
        torch.ops.quant.onnx_fp8_cache.default: _translation("fp8"),
        torch.ops.quant.onnx_nvfp4_cache.default: _translation("nvfp4"),
    }


def _translation(format: str) -> Callable[..., Any]:
    def translate(
        q: Any,
        k: Any,
        v: Any,
        caches: Sequence[Any],
        k_scale: Sequence[float],
        v_scale: Sequence[float],
        lengths: Any,
        scale: float,
    ) -> Any:
        op = opset()
        past = op.Cast(lengths, to=INT32)
        after = op.Add(past, op.Cast(op.Shape(q, start=2, end=3), to=INT32))
        scales = [op.Constant(value_floats=list(values)) for values in (k_scale, v_scale)]
        outputs = plugin_opset().QuantCacheAttention(
            *(q, k, v, *caches, *scales, past, after),
            softmax_scale=scale,
            format=format,
            plugin_version=PLUGIN_VERSION,
            plugin_namespace=PLUGIN_DOMAIN,
        )
        # The exporter gives a node every output that its schema lists, and TensorRT takes those of the format alone.
        node = outputs[0].producer()
        node.resize_outputs(1 + len(caches))
        return node.outputs

    return translate


def _body(format: Format) -> Callable[..., tuple[torch.Tensor, ...]]:
    def attend_to_cache(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        caches: list[torch.Tensor],
        k_scale: list[float],
        v_scale: list[float],
        lengths: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        """Computes the node in PyTorch, by the oracle of our paged cache: each sequence is one page."""
        new = [cache.clone() for cache in caches]
        scales = [torch.tensor(values, dtype=torch.float32) for values in (k_scale, v_scale)]
        # The graph calls bytes of two E2M1 codes FP8.
        codes = [part.view(torch.uint8) for part in new[:2]] + new[2:] if format.global_scale else new
        blocks: list[torch.Tensor | None] = [*codes[2:]] or [None, None]
        pages = KVPages(codes[0], codes[1], format, q.shape[3], *scales, *blocks)
        write_reference(pages, torch.arange(len(q))[:, None], lengths, k, v)
        position = lengths[:, None] + torch.arange(q.shape[2])
        column = torch.arange(codes[0].shape[2])
        # Codes behind the last key may be of anything, NaN too.
        unwritten = (column > position[:, -1:])[:, None, :, None]
        keys, values = (
            decode_kv(part, format, one, block).masked_fill(unwritten, 0.0).to(q.dtype)
            for part, one, block in zip(codes[:2], scales, blocks, strict=True)
        )
        seen = column <= position[:, :, None]
        return (attend(q, keys, values, seen[:, None], scale, False, [], "native"), *new)

    return attend_to_cache


def _register_ops() -> None:
    arguments = "Tensor q, Tensor k, Tensor v, Tensor[] caches, float[] k_scale, float[] v_scale"
    for format, outputs in (("fp8", 3), ("nvfp4", 5)):
        name, returned = f"quant::onnx_{format}_cache", ", ".join(["Tensor"] * outputs)
        torch.library.define(name, f"({arguments}, Tensor lengths, float scale) -> ({returned})")
        torch.library.impl(name, "default", _body(FORMATS[format]))
        torch.library.register_fake(
            name, lambda q, k, v, caches, *_: (torch.empty_like(q), *map(torch.empty_like, caches))
        )


_register_ops()
