"""`export_aoti_decoder` compiles a decoder's serving graph into one package, which reads prompts and decodes.

    input_ids      [batch, sequence]    the graph is that of `onnx.serving`: prefill, whole or in chunks, and
    lengths, last  [batch]              decoding are steps of different lengths
    past_key.0, past_value.0, past_key.1, …    the KV cache, [batch, kv_heads, capacity, dim]
    -> logits      [batch, vocabulary]  of each row's last token

The package writes new keys and values into the cache's tensors themselves, from position `lengths` on, so a caller
passes the same tensors at every step. C++ passes all inputs as a list, in this order.

The metadata of a package describes it as JSON, so that a runner can refuse one that does not fit before it loads any of
its compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.json_files import json_text
from quant.export.aoti.op_bodies import BODIES, EXPORTED_ATTENTION
from quant.export.aoti.package import (
    METADATA,
    collecting_rarely,
    compile_package,
    find_device,
    scales_as_matrices,
    share_input_scales,
)
from quant.export.onnx.decoder_graph import attending
from quant.export.onnx.serving import CachedAttention, ServingGraph, cache_shapes, check_decoder, trace_serving
from quant.kernels.linear.quantized_module import restore_layout

_SCATTER = "quant::onnx_scatter"


class InPlaceGraph(ServingGraph):
    """A serving graph that writes into the cache that it is called with, and returns logits alone."""

    def forward(self, inputs: dict[str, torch.Tensor], past: list[torch.Tensor]) -> Any:
        """Returns logits `[batch, vocabulary]`."""
        logits, *written = super().forward(inputs, past)
        # Inductor sees that each cache was made from the input of its name, and writes the new rows alone.
        for cache, new in zip(past, written, strict=True):
            cache.copy_(new)
        return logits


@collecting_rarely()
def export_aoti_decoder(
    model: nn.Module,
    path: str | Path,
    capacity: int,
    *,
    shapes: str | list[str] | None = None,
    plan: str = "",
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Compiles a causal language model, quantized or not, into a `.pt2` package with a KV cache; returns its path."""
    path = Path(path)
    device = find_device(path, next(model.parameters()).device)
    program, caches = decoder_program(model, capacity, shapes=shapes)
    description = {
        "capacity": capacity,
        "caches": [[heads, dim] for heads, dim, _ in caches],
        "dtype": str(caches[0][2]).removeprefix("torch."),
        "plan": plan,
        "torch": torch.__version__.partition("+")[0],
    }
    return compile_package(program, DECODER_BODIES, path, device, options or {}, {METADATA: json_text(description)})


def decoder_program(
    model: nn.Module, capacity: int, *, shapes: str | list[str] | None = None
) -> tuple[torch.export.ExportedProgram, list[tuple[int, int, torch.dtype]]]:
    """Returns the graph that is compiled, and KV heads, dimension and dtype of each part of its cache."""
    check_decoder(model, capacity)
    restore_layout(model)  # a model that ran on a GPU may hold its weights as that GPU's kernels read them
    function = CachedAttention({module: name for name, module in model.named_modules()})
    with attending(model, function, masked=False), scales_as_matrices(model):
        caches = cache_shapes(model, function)
        with next(model.parameters()).device:
            past = function.cache_inputs(caches, capacity)
        program, _ = trace_serving(InPlaceGraph(model, function), past, shapes, capacity)
    share_input_scales(program)
    return program, caches


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, *_: Any
) -> torch.Tensor:
    """Attends over the whole cache, where a mask `[batch, 1, sequence, capacity]` says who sees which.

    The query heads that share keys become further queries, so that no key of the cache is copied:
    [batch, kv_heads · group, sequence, dim] -> [batch, kv_heads, group · sequence, dim].
    """
    kv_heads, sequence = k.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    queries = q.unflatten(1, (kv_heads, group)).flatten(2, 3)
    seen = mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    grouped = nn.functional.scaled_dot_product_attention(queries, k, v, seen, scale=scale)
    out: torch.Tensor = grouped.unflatten(2, (group, sequence)).flatten(1, 2)
    return out


def _scatter(cache: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the cache `[batch, kv_heads, capacity, dim]` with `x` in each row from position `index` `[batch]` on."""
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    positions = index[:, None] + torch.arange(x.shape[2], device=cache.device)
    # Indices with a slice between them come first in the result: [batch, sequence, kv_heads, dim].
    written: torch.Tensor = torch.ops.aten.index_put(cache, [rows, None, positions], x.transpose(1, 2))
    return written


DECODER_BODIES: dict[str, Callable[..., torch.Tensor]] = {**BODIES, EXPORTED_ATTENTION: _attention, _SCATTER: _scatter}
"""The bodies of quantized layers, of attention over a cache, and of writing into it, by the names of their ops."""
