"""ONNX files from quantized models."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.export.onnx_ops import OPSET, translations
from quant.recipes.plan import Plan

Dims = Sequence[str | None]


class _Prefill(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    shapes: Mapping[str, tuple[int, int, int]] | None = None,
    inputs: Mapping[str, tuple[torch.Tensor, Dims]] | None = None,
    attention: str = "native",
    decode: bool = False,
    plan: Plan | None = None,
) -> Path:
    path = Path(path)
    names = list(inputs) if inputs else ["input_ids"]
    if inputs is None:
        inputs = {"input_ids": (torch.zeros(2, 64, dtype=torch.long), ("batch", "sequence"))}
        model = _Prefill(model)
    program = _export(model, inputs)
    return _save(program, path, plan)


def _export(model: nn.Module, inputs: Mapping[str, tuple[torch.Tensor, Dims]]) -> Any:
    dims = {name: torch.export.Dim.DYNAMIC for _, axes in inputs.values() for name in axes if name}
    dynamic = {
        name: {axis: dims[dim] for axis, dim in enumerate(axes) if dim is not None}
        for name, (_, axes) in inputs.items()
    }
    args = tuple(tensor for tensor, _ in inputs.values())
    with torch.no_grad():
        exported = torch.export.export(model, args, dynamic_shapes=tuple(dynamic.values()), strict=False)
    packed: dict[Any, int] = {}
    program = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        custom_translation_table=translations(packed),
        input_names=list(inputs),
        verbose=False,
    )
    _type_packed(packed)
    program.optimize()
    _name_dims(program.model, inputs)
    return program


def _type_packed(packed: Mapping[Any, int]) -> None:
    import onnx_ir as ir

    for value, kind in packed.items():
        codes = value.const_value.raw.detach().contiguous()
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        value.const_value = ir.PackedTensor(codes.numpy(), ir.DataType(kind), shape=shape, name=value.name)
        value.dtype = ir.DataType(kind)
        value.shape = ir.Shape(shape)


def _name_dims(model: Any, inputs: Mapping[str, tuple[torch.Tensor, Dims]]) -> None:
    import onnx_ir as ir

    names = {}
    for value in model.graph.inputs:
        for dim, name in zip(value.shape, inputs[value.name][1], strict=True):
            if name is not None and isinstance(dim, ir.SymbolicDim):
                names[str(dim.value)] = name
    pattern = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in names)) if names else None
    if pattern is None:
        return
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    pattern.sub(lambda m: names[m[0]], str(d.value)) if isinstance(d, ir.SymbolicDim) and d.value else d
                    for d in value.shape
                ]
            )


def _save(program: Any, path: Path, plan: Plan | None) -> Path:
    if plan is not None:
        program.model.metadata_props["blockscale.plan"] = plan.digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        program.save(temporary / path.name, external_data=True)
        for file in temporary.iterdir():
            os.replace(file, path.parent / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
