"""`rebuilt_findings` builds an engine again from its checkpoint and compares the two kernel by kernel.

The audit proves that each layer's kernels read the layer's own numbers. It does not know what a kernel computes with
them: an MLP that multiplies by SiLU of the wrong projection, a block without its residual, or positions that are off by
one have all the right tensors. TensorRT-RTX measures no times, so the same graph always becomes the same kernels, and
without a KV cache the same file; an engine that was built from another graph differs in the nodes where the graph does.

The names of tensors in an engine are counted, and one kernel more shifts all that follow. So a kernel is known by the
ONNX nodes that were fused into it, and a tensor by the kernel that writes it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.errors import UserError
from quant.export.onnx.export_onnx import write_onnx
from quant.export.tensorrt.audit import AuditRow
from quant.export.tensorrt.build import BuildOptions, build_engine
from quant.export.tensorrt.engine_file import Engine, read_engine
from quant.generate.generate import cast_unquantized
from quant.kernels.attention.kv_pages import kv_format
from quant.recipes.plan import Plan

_COUNTED = re.compile(r"\d+")
_Key = tuple[bool, int, tuple[str, ...], str]


def _differing_kernels(engine: Engine, other: Engine) -> dict[str, str]:
    """Returns the kernels in which two engines differ, by the nodes that they compute."""
    first, second = _described(engine), _described(other)
    differences = {} if engine.updated == other.updated else {"inputs": "updated in place as other outputs"}
    for key in {**second, **first}:
        mine, theirs = first.get(key, []), second.get(key, [])
        if mine == theirs:
            continue
        differing = [a != b for pair in zip(mine, theirs, strict=False) for a, b in zip(*pair, strict=True)]
        if len(mine) != len(theirs):
            difference = "another kernel" if mine else "no such kernel"
        elif any(differing[0::3]):
            difference = "another kernel"
        else:
            difference = "other inputs" if any(differing[1::3]) else "other constants"
        differences[", ".join(key[2][:3]) + (", …" if len(key[2]) > 3 else "")] = difference
    return differences


def _described(engine: Engine) -> dict[_Key, list[tuple[Any, Any, Any]]]:
    """Describes each kernel by its function (whose name ends with a hash), its inputs and its constants' bytes."""
    writers: dict[tuple[int, str], _Key] = {}
    kernels: dict[_Key, list[tuple[Any, Any, Any]]] = defaultdict(list)
    for kernel in engine.kernels:
        # Parts of a runtime fusion may have no nodes of their own.
        nodes = tuple(sorted(kernel.nodes)) or (_COUNTED.sub("#", kernel.name),)
        key = kernel.is_body, kernel.profile, nodes, kernel.kind
        inputs: list[tuple[Any, ...]] = []
        constants = []
        for operand in kernel.inputs:
            # A KV cache has a number in its name, `new_key.0.1`: only the compiler's own names are counted.
            is_of_graph = operand.name.startswith(("past_", "new_"))
            name = operand.name if is_of_graph else _COUNTED.sub("#", operand.name)
            writer = "constant" if operand.constant else writers.get((kernel.program, operand.name), name)
            inputs.append((operand.stored, operand.dims, writer))
            # Without the table's position constants cannot be read; the file is of another TensorRT then.
            if operand.index is not None and engine.starts:
                constants.append(hashlib.sha256(engine.constant(operand).tobytes()).digest())
        kernels[key].append(((kernel.kind, kernel.source, kernel.alpha, kernel.backbone), inputs, constants))
        writers.update({(kernel.program, name): key for name in kernel.outputs})
    return kernels


AS_BUILT = "as the checkpoint builds it"


def rebuilt_findings(
    path: Path, model: nn.Module, plan: Plan | None, progress: Callable[[str, int, int], None] | None = None
) -> list[AuditRow]:
    """Returns a finding for each kernel that differs from an engine built anew, or one that says that none does.

    `model` is the module of its checkpoint, which is cast to the engine's dtype. Raises UserError if this machine
    cannot build the engine again, or its options are not all known.
    """
    engine = read_engine(path)
    options = _options(path, engine.record)
    cast_unquantized(model, options["dtype"])
    with tempfile.TemporaryDirectory() as folder:
        graph = write_onnx(
            model,
            Path(folder) / "model.onnx",
            shapes=options["shapes"],
            attention=options["attention"],
            capacity=options["capacity"],
            kv_cache=kv_format(options.get("kv_cache")),
            plan=plan,
        )
        build = BuildOptions(options["target"], options["shapes"], "tensorrt_rtx", progress, options["features"])
        built = build_engine(graph, Path(folder) / "engine", build)
        if built.path.read_bytes() == path.read_bytes():
            return [AuditRow("all kernels", AS_BUILT, f"{AS_BUILT}, byte for byte", True)]
        differences = _differing_kernels(engine, read_engine(built.path))
    if not differences:
        return [AuditRow("all kernels", AS_BUILT, AS_BUILT, True)]
    return [AuditRow(name, AS_BUILT, difference, False) for name, difference in differences.items()]


def _options(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Returns how an engine was exported and built, as the record in it says."""
    exported = record.get("export")
    if not isinstance(exported, dict) or "target" not in record:
        raise UserError(f"{path}: it does not say how it was exported, so it cannot be built again; export it anew")
    module, _, version = str(record.get("builder", "")).partition(" ")
    if module != "tensorrt_rtx":
        raise UserError(
            f"{path}: {module or 'its builder'} times kernels, so no build is like another; leave --rebuild out"
        )
    try:
        installed = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != version:
        raise UserError(f"{path} was built by {module} {version}, and {installed} is installed; install {version}")
    if exported.get("measured"):
        raise UserError(
            f"{path}: scales of its attention or KV cache were measured when it was exported, and are not in the "
            "checkpoint; leave --rebuild out"
        )
    return {**exported, "attention": record["attention"], "target": record["target"], "features": record["features"]}
