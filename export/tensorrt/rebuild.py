"""`rebuilt_findings` builds an engine again from its checkpoint and compares the two kernel by kernel.

The audit proves that each layer's kernels read the layer's own numbers. It does not know what a kernel computes with
them: an MLP that multiplies by SiLU of the wrong projection, a block without its residual, or positions that are off by
one have all the right tensors. TensorRT-RTX measures no times, so the same graph always becomes the same kernels, and
without a KV cache the same file; an engine that was built from another graph differs in the nodes where the graph does.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.errors import UserError
from quant.export.tensorrt.audit import AuditRow
from quant.export.tensorrt.build import BuildOptions, build_engine
from quant.export.engine.contents.difference import differing_kernels
from quant.export.tensorrt.engine_file import read_engine
from quant.export.onnx.export_onnx import write_onnx
from quant.kernels.attention.kv_pages import kv_format
from quant.recipes.plan import Plan
from quant.generate.generate import cast_unquantized

AS_BUILT = "as the checkpoint builds it"


def rebuilt_findings(
    path: Path, model: nn.Module, plan: Plan | None, progress: Callable[[str, int, int], None] | None = None
) -> list[AuditRow]:
    """Returns a finding for each kernel that differs from an engine built anew, or one that says that none does.

    Args:
        path: the engine.
        model: the module of its checkpoint; it is cast to the engine's dtype.
        plan: the plan of the checkpoint.
        progress: a function that is called as `progress(stage, done, total)`.

    Raises:
        UserError: this machine cannot build the engine again, or its options are not all known.
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
        differences = differing_kernels(engine, read_engine(built.path))
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
