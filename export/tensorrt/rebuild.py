"""`audit_with_checkpoint` proves that an engine is its checkpoint's: it exports and builds the checkpoint once more.

    checkpoint ──export──▶ graph ──build──▶ engine
                             │                └─ programs, kernels' sources, constants, inputs and outputs, byte by byte
                             └─ each module's nodes and numbers, by digests that the builder put into the engine

The options of the export are in the record that the engine holds, or where that is too long, in its receipt. The graph
says which layers the engine must have, so none is missed because the engine does not name it. It is compared on any
machine; a difference names the module.

The second comparison does not trust the record. TensorRT-RTX measures no times, so the same graph always becomes the
same programs and constants, and without a KV cache the same file (with one, tables of its inputs come in any order). It
takes the version that built the engine, and as long as the build. Full TensorRT times kernels, and no build is like
another.
"""

import dataclasses
import filecmp
import hashlib
import importlib.metadata
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.atomic import not_written
from quant.base.errors import UserError
from quant.export.kinds import CHOICES
from quant.export.onnx import export_onnx
from quant.export.onnx.limits import load_graph
from quant.export.tensorrt.audit import UNPLANNED, AuditRow, audit
from quant.export.tensorrt.build import BuildOptions, Progress, build_engine, describe_graph
from quant.export.tensorrt.engine_file import Engine, read_engine, receipt_path
from quant.export.tensorrt.gpu_targets import local_capability
from quant.generate.generate import cast_unquantized
from quant.recipes.layers import output_head
from quant.recipes.plan import Plan

AS_EXPORTED, AS_BUILT = "as the checkpoint is exported", "as the checkpoint is built"
_GRAPH, _ENGINE = "the graph", "the engine"
_COUNTED = re.compile(r"\d+")
_NAMED = 4  # nodes of a kernel that stand in a finding


def audit_with_checkpoint(
    path: Path, model: nn.Module, plan: Plan | None, *, attention: str | None = None, rebuild: bool | None = None,
    progress: Progress | None = None,
) -> list[AuditRow]:  # fmt: skip
    """Audits an engine (`audit`), and compares it with its checkpoint; the last rows say how, and what was not done.

    `model` is the module of the checkpoint, which is cast to the engine's dtype, and `plan` its plan. With `rebuild`
    None the engine is built again where that can be; True raises UserError where it cannot, and False builds nothing.
    Raises UserError for an engine that does not say how it was exported.
    """
    engine = read_engine(path)
    record = engine.record
    contents = record.get("contents", {})
    if isinstance(contents, str):
        raise UserError(
            f"{path}: its receipt {receipt_path(path).name}, which says how it was exported, is missing or another "
            "engine's; keep both files of `quant export` together"
        )
    if not contents.get("export"):
        raise UserError(
            f"{path}: it does not say how it was exported, so it cannot be compared with a checkpoint; export it anew "
            "(`quant export --to tensorrt`)"
        )
    with tempfile.TemporaryDirectory() as folder:
        found = {export_onnx.ATTENTION_KEY: record.get("attention"), export_onnx.EXPORT_KEY: contents["export"]}
        exported, graph = _exported_again(f"{path}: its record", model, found, plan, Path(folder))
        again = load_graph(graph)
        metadata, expected = export_onnx.own_metadata(again), describe_graph(again, Path(folder))
        nodes, layers = expected["attention_nodes"], expected["layers"]
        dtypes = exported.dtypes
        findings = audit(path, plan, attention=attention, attention_nodes=nodes, exported=layers, dtypes=dtypes)
        others = list(_other_metadata({**metadata, **found}, metadata))
        others += _other_modules(contents["graph"], expected["graph"], exported.versions)
        findings += others or [AuditRow(_GRAPH, AS_EXPORTED, AS_EXPORTED, True)]
        obstacle = "as was asked" if rebuild is False else _obstacle(record)
        if obstacle and rebuild:
            raise UserError(f"{path} cannot be built again: {obstacle}; leave --rebuild out")
        if others:
            return findings
        if obstacle:
            return [*findings, AuditRow(_ENGINE, UNPLANNED, f"not built again and not compared: {obstacle}", True)]
        build = BuildOptions(record["target"], exported.shapes, "tensorrt_rtx", progress, record["features"])
        built = build_engine(graph, Path(folder) / "engine", build).path
        if filecmp.cmp(built, path, shallow=False):
            return [*findings, AuditRow(_ENGINE, AS_BUILT, f"{AS_BUILT}, byte for byte", True)]
        rows = [AuditRow(name, AS_BUILT, text, False) for name, text in differences(engine, read_engine(built)).items()]
    return [*findings, *(rows or [AuditRow(_ENGINE, AS_BUILT, AS_BUILT, True)])]


def audit_onnx(path: Path, model: nn.Module, plan: Plan | None) -> list[AuditRow]:
    """Compares an ONNX file with what its checkpoint is exported as; one finding, or one for each other module.

    Another version of torch, transformers or onnxscript may export another graph; the finding then says so and passes.
    """
    file = load_graph(path)
    if not (metadata := export_onnx.own_metadata(file)):
        return [AuditRow(_GRAPH, UNPLANNED, "not compared: the file does not say how it was exported", True)]
    with tempfile.TemporaryDirectory() as folder:
        exported, graph = _exported_again(f"{path}: its metadata", model, metadata, plan, Path(folder))
        again = load_graph(graph)
        others = list(_other_metadata(metadata, export_onnx.own_metadata(again)))
        expected = describe_graph(again, Path(folder))["graph"]
    found = describe_graph(file, path.parent)["graph"]
    needed = _other_versions(exported.versions)
    if needed and found != expected and not others:
        return [AuditRow(_GRAPH, UNPLANNED, f"not compared: to compare it, use {needed}, which exported it", True)]
    return [*others, *_other_modules(found, expected, exported.versions)] or [
        AuditRow(_GRAPH, AS_EXPORTED, AS_EXPORTED, True)
    ]


def _exported_again(
    where: str, model: nn.Module, metadata: Mapping[str, Any], plan: Plan | None, folder: Path
) -> tuple[export_onnx.ExportRecord, Path]:
    """Exports a checkpoint's model as a file's metadata say, in whose dtype it is put; returns record and ONNX file."""
    if missing := {export_onnx.ATTENTION_KEY, export_onnx.EXPORT_KEY} - {*metadata}:
        raise UserError(f"{where} lacks {' and '.join(sorted(missing))}; export it again")
    if (attention := metadata[export_onnx.ATTENTION_KEY]) not in CHOICES["attention"]:
        words = ", ".join(CHOICES["attention"])
        raise UserError(f"{where} {export_onnx.ATTENTION_KEY} is {attention!r}, none of {words}; export it again")
    exported, options = export_onnx.read_record(where, metadata[export_onnx.EXPORT_KEY])
    if export_onnx.parameter_dtypes(model) != exported.dtypes:
        narrow = [dtype for dtype in ("bfloat16", "float16") if dtype in exported.dtypes]
        cast_unquantized(model, (*narrow, "float32")[0])
    head = output_head(model)
    if (own := exported.head) and any(name == own and module is head for name, module in model.named_modules()):
        export_onnx.round_head(model, own)  # and no other layer
    try:
        return exported, export_onnx.write_onnx(model, folder / "model.onnx", **options, attention=attention, plan=plan)
    except ValueError as error:
        raise UserError(f"{where} {export_onnx.EXPORT_KEY} does not fit the checkpoint: {error}") from error
    except OSError as error:  # the disk of temporary files is full
        raise not_written(folder / "model.onnx", error) from None


def _other_metadata(found: Mapping[str, Any], expected: Mapping[str, str]) -> Iterator[AuditRow]:
    """Yields a finding for each key of the metadata whose value the export does not write."""

    def value(metadata: Mapping[str, Any], key: str) -> Any:
        if key != export_onnx.EXPORT_KEY:
            return metadata.get(key)
        return dataclasses.replace(export_onnx.read_record("", metadata[key])[0], versions={})  # of any version

    for key in sorted({*found, *expected}):
        if value(found, key) != value(expected, key):
            yield AuditRow(key, AS_EXPORTED, "another value" if key in found else "not in the file's metadata", False)


def _other_versions(versions: Mapping[str, str]) -> str:
    """Returns what exported a graph and is here in another version: packages, as pip takes them, and the processor."""
    installed = export_onnx.tracer_versions()
    return ", ".join(f"{name}=={version}" for name, version in versions.items() if installed.get(name) != version)


def _other_modules(
    found: Mapping[str, str], expected: Mapping[str, str], versions: Mapping[str, str]
) -> Iterator[AuditRow]:
    """Yields a finding for each module whose nodes in the file's graph are not those of the checkpoint's."""
    if found == expected:
        return
    if needed := _other_versions(versions):
        yield AuditRow(_GRAPH, AS_EXPORTED, f"another one; to compare it, use {needed}, which exported it", False)
        return
    for name in {**expected, **found}:
        mine, theirs = found.get(name), expected.get(name)
        if mine is None:
            yield AuditRow(name, AS_EXPORTED, "not in the file's graph", False)
        elif theirs is None:
            yield AuditRow(name, "not in the checkpoint's graph", "in the file's", False)
        elif mine != theirs:
            half = len(mine) // 2
            words = "other numbers" if mine[:half] == theirs[:half] else "other nodes"
            yield AuditRow(name, AS_EXPORTED, words, False)


def _obstacle(record: Mapping[str, Any]) -> str | None:
    """Returns why this machine cannot build an engine as it was built; None if it can."""
    builder, _, version = str(record.get("builder", "")).partition(" ")
    if builder != "tensorrt_rtx":
        return f"{builder} times kernels, so no build is like another"
    try:
        installed = importlib.metadata.version(builder)
    except importlib.metadata.PackageNotFoundError:
        return f"{builder} {version} built it, and is not installed here"
    if installed != version:
        return f"{builder} {version} built it, and {installed} is installed here"
    if "refit" in record["features"] and local_capability() is None:
        return "an engine for refit is built on a machine with a GPU alone"
    return None


def differences(engine: Engine, other: Engine) -> dict[str, str]:
    """Returns what differs in two engines of one graph, by the nodes of their kernels; nothing if they are the same.

    A kernel is known by the ONNX nodes that were fused into it, and a tensor by the kernel that writes it: the names
    that the compiler gives are counted, and one kernel more shifts all that follow.
    """
    result = {}
    if (engine.bindings, engine.updated) != (other.bindings, other.updated):
        result["inputs and outputs"] = "other names or places"
    first, second = _kernels(engine), _kernels(other)
    for nodes in {**second, **first}:
        mine, theirs = first.get(nodes, []), second.get(nodes, [])
        if mine != theirs:
            parts = [a == b for pair in zip(mine, theirs, strict=False) for a, b in zip(*pair, strict=True)]
            is_same = len(mine) == len(theirs) and all(parts[0::3])
            name = ", ".join(nodes[:_NAMED]) + ", …" * (len(nodes) > _NAMED)
            result[name] = "other kernels" if not is_same else "other constants" if all(parts[1::3]) else "other inputs"
    if engine.sources != other.sources or engine.table is None:
        result[_ENGINE] = "other sources of kernels" if engine.table is not None else "no table of constants was found"
    return result


def _kernels(engine: Engine) -> dict[tuple[str, ...], list[tuple[Any, Any, Any]]]:
    """Returns the kernels that compute the same nodes, each as its function, its inputs and its constants."""
    kernels: dict[tuple[str, ...], list[tuple[Any, Any, Any]]] = {}
    writers: dict[tuple[int, str], Any] = {}

    def known(name: str) -> str:
        """Returns the name of an input or output of the engine, which has a counter at its end, or else a word."""
        return name if name.rpartition(".")[0] in engine.bindings else _COUNTED.sub("#", name)

    for kernel in engine.kernels:
        # Parts of a runtime fusion may have no nodes of their own.
        nodes = tuple(sorted(kernel.nodes)) or (_COUNTED.sub("#", kernel.name),)
        sources = (writers.get((kernel.program, operand.name), known(operand.name)) for operand in kernel.inputs)
        inputs = [(o.stored, o.dims, o.layout, source) for o, source in zip(kernel.inputs, sources, strict=True)]
        alike = kernels.setdefault(nodes, [])
        constants = [hashlib.sha256(engine.constant(operand)).digest() for operand in kernel.inputs]
        writers |= {(kernel.program, name): (nodes, len(alike), index) for index, name in enumerate(kernel.outputs)}
        alike.append(((kernel.text, [known(name) for name in kernel.outputs]), inputs, constants))
    return kernels
