"""`trace` turns a module into a graph of torch.export over named dimensions.

A quantized linear is one `quant::` op in the graph, attention another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quant.export.onnx import limits
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx_graph.tracing.trace_errors import explained
from quant.kernels.linear.quantized_module import restore_layout

MODEL_PREFIX = "model."
"""Of the names of parameters in graphs that hold a transformers model as their attribute `model`."""


def trace(
    module: nn.Module,
    arguments: tuple[Any, ...] | dict[str, torch.Tensor],
    inputs: Mapping[str, GraphInput],
    ranges: Mapping[str, tuple[int, int]],
    split: int | None = None,
) -> torch.export.ExportedProgram:
    """Returns the module as a graph over named dimensions.

    Args:
        module: the module to be traced.
        arguments: examples of its positional arguments, or of its keyword arguments by name.
        inputs: the inputs of the graph, for the names of dimensions.
        ranges: smallest and largest size of the dimensions that are limited, as `dimension_ranges` gives them.
        split: how many inputs the module takes as a dict; the others, its KV cache, are a list.

    Raises ValueError for a module that does not export, and for a graph that no file can hold.
    """
    names = {dim for x in inputs.values() for dim in x.dims if isinstance(dim, str)}
    # torch.export takes sizes of 0 and 1 for constants, so examples have at least two of everything.
    sizes = {
        dim: size
        for x in inputs.values()
        for dim, size in zip(x.dims, x.example.shape, strict=True)
        if isinstance(dim, str)
    }
    # torch.export finds by itself that a dimension such as "past + sequence" is a sum of others.
    dims = {
        name: _dimension(name, sizes[name], *ranges.get(name, (0, None)))
        if name.isidentifier()
        else torch.export.Dim.AUTO
        for name in sorted(names)
    }
    axes = {
        name: {axis: dims[dim] for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in inputs.items()
    }
    dynamic: Any = axes if isinstance(arguments, dict) else tuple(axes.values())
    if split is not None:
        dynamic = (dict(list(axes.items())[:split]), list(axes.values())[split:])[: len(arguments)]
    restore_layout(module)
    # A KV cache has the sizes that the graph needs; all other inputs can be named by the user.
    is_choice = split is None or split == len(inputs)
    examples = {name: (x.example, x.dims) for name, x in inputs.items()} if is_choice else {}
    model, prefix = (module, "") if split is None else (module.get_submodule(MODEL_PREFIX.rstrip(".")), MODEL_PREFIX)
    positional, keywords = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with explained(model, examples, {dim: high for dim, (_, high) in ranges.items()}), torch.no_grad():
        exported = torch.export.export(module, positional, keywords, dynamic_shapes=dynamic, strict=False)
    _drop_unused(exported.graph_module)
    limits.check_graph(exported, model, prefix)
    return exported


def _dimension(name: str, example: int, low: int, high: int | None) -> Any:
    """Returns a named dimension; `low` and `high` are limits, which its example widens."""
    # torch.export gives no other program to sizes of 0 and 1, and refuses a limit of 1.
    return torch.export.Dim(
        name, min=min(low, example) if low > 2 else None, max=None if high is None else max(high, example)
    )


def _drop_unused(graph: torch.fx.GraphModule) -> None:
    """Removes nodes whose values nothing uses, such as the weight that T5 dequantizes to read its dtype."""
    # torch.export asserts the dtype of each tensor that is cast, which would keep its values in use.
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
