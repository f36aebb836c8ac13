"""Tests of engines share the shapes of tiny decoders, models whose every tensor says something, and wrong graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHAPES = "batch=1:1:2,sequence=1:8:16"
_right_graphs: dict[tuple[int, str], tuple[Any, str]] = {}
"""SHA-256 of a right model's graph by the model and the options; the model itself, so that its id stays its own."""


def drawn(model: nn.Module) -> nn.Module:
    """The model with other numbers in every norm and bias: an initialization has ones and zeros there."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                for parameter in module.parameters():
                    parameter.uniform_(0.5, 2)
            elif isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.normal_()
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return model


def written_graph(
    folder: Path,
    model: nn.Module,
    right: Any,
    change: Callable[[Any], None] | None = None,
    *,
    wrong: bool | None = None,
    **options: Any,
) -> Path:
    """The ONNX file of `model`, exported by the plan of the right one and changed by `change`.

    The file of a wrong model is another one than that of the right model. Otherwise its case changes what no code
    reads, and a test that the audit finds it would say nothing.

    Args:
        folder: gets the files.
        model: the right model, or a wrong one.
        right: the result of `quant.quantize`.
        change: edits the loaded ONNX model in place.
        wrong: whether the file must differ; None for any other model than the right one and for any `change`.
        options: of `write_onnx`.
    """
    import onnx

    from quant.export.onnx.export_onnx import write_onnx

    def digest(path: Path) -> str:
        return hashlib.sha256(onnx.load(path).SerializeToString(deterministic=True)).hexdigest()

    if wrong is None:
        wrong = model is not right.model or change is not None
    key = id(right.model), repr(sorted(options.items()))
    if wrong and key not in _right_graphs:
        (folder / "right").mkdir()
        of_right = write_onnx(right.model, folder / "right" / "model.onnx", plan=right.plan, **options)
        _right_graphs[key] = right.model, digest(of_right)
    path = write_onnx(model, folder / "model.onnx", plan=right.plan, **options)
    if change is not None:
        graph = onnx.load(path)
        change(graph)
        onnx.save(graph, path)
    if wrong:
        assert digest(path) != _right_graphs[key][1], "the wrong model has the right model's ONNX file"
    return path
