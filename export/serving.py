"""A model repository for Triton Inference Server around an engine.

    REPOSITORY/
      NAME/config.pbtxt     the tensors with the engine's names, types and shapes, and which versions are served
      NAME/1/model.plan     an engine of TensorRT, for the server's own backend
      NAME/1/model.engine   or one of TensorRT-RTX, with `model.py`, which runs it (`triton_model`)
      NAME/1/receipt.json   what was found in this engine
      NAME/2/               the next export of the same model
      serve.md              how to start the server (`serving_guide`)

A second export into a repository becomes a further version, and the server's two newest are served side by side:
that is the canary. Requests choose with `/versions/2/`; without a version they get the newest. A version must take
and give the same tensors in the same shapes as those before, for all of them share `config.pbtxt`.

The server adds the batch to every shape where a model has `max_batch_size`, so the first dimension is left out there.
FP8 tensors, such as a KV cache, have no type in the server. The schema is that of `model_config.proto`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.export.onnx_graph.shapes import Input, graph_inputs, parse_profile

CONFIG_FILE, RECEIPT_FILE = "config.pbtxt", "receipt.json"
ENGINE_FILES = {"tensorrt": "model.plan", "tensorrt_rtx": "model.engine"}
_SERVED = 2  # versions at a time
_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "BFLOAT16": "TYPE_BF16",
    "INT64": "TYPE_INT64",
    "INT32": "TYPE_INT32",
    "INT8": "TYPE_INT8",
    "UINT8": "TYPE_UINT8",
    "BOOL": "TYPE_BOOL",
}


@dataclass(frozen=True)
class Word:
    """A value that is written without quotes: a name of an enumeration."""

    name: str


@dataclass(frozen=True)
class Bundle:
    """What was published: the repository, the model's name in it, its version, and whether a schema was there."""

    repository: Path
    name: str
    version: int
    checked: bool


def publish(
    engine: str | Path,
    receipt: Mapping[str, Any],
    onnx_path: str | Path,
    repository: str | Path,
    *,
    name: str,
    overwrite: bool = False,
) -> Bundle:
    """Puts an engine into a model repository, as its newest version.

    Args:
        engine: the engine file; it is moved.
        receipt: of `export_engine`.
        onnx_path: what it was built from; says names, types and shapes of the tensors.
        repository: made where it does not exist.
        name: of the model in it.
        overwrite: drops the versions that are there.

    Returns:
        Where it is.

    Raises:
        ValueError: a tensor that the server has no type for, or an earlier version takes other tensors. Nothing is
            written.
    """
    repository = Path(repository)
    config = to_pbtxt(model_config(name, onnx_path, receipt))
    checked = check_config(config)
    home = repository / name
    taken = [int(folder.name) for folder in home.glob("[0-9]*") if folder.is_dir()] if not overwrite else []
    if taken and (home / CONFIG_FILE).read_text(encoding="utf-8") != config:
        raise ValueError(
            f"{home}: version {max(taken)} there has other tensors, shapes or runtime than this engine, and all "
            "versions share one config.pbtxt; pass --overwrite to replace them, or choose another --out"
        )
    version = max(taken, default=0) + 1
    repository.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=repository))
    try:
        backend = built_by(receipt)
        shutil.move(engine, temporary / ENGINE_FILES[backend])
        if backend == "tensorrt_rtx":
            shutil.copyfile(Path(__file__).with_name("triton_model.py"), temporary / "model.py")
        (temporary / RECEIPT_FILE).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if overwrite and home.exists():
            shutil.rmtree(home)
        home.mkdir(exist_ok=True)
        (home / CONFIG_FILE).write_text(config, encoding="utf-8")
        os.replace(temporary, home / str(version))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle(repository, name, version, checked)


def model_config(name: str, onnx_path: str | Path, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """`config.pbtxt` as nested dicts and lists; the same for every version of a model.

    Raises:
        ValueError: see `publish`.
    """
    import onnx

    model = onnx.load(onnx_path, load_external_data=False)
    inputs = graph_inputs(model)
    profiles = [parse_profile(text, inputs, {}) for text in receipt["engine"]["profiles"]]
    outputs = [_output(value) for value in model.graph.output]
    batch = _batch(inputs, outputs)
    largest = max((profile[inputs[0].name][2][0] for profile in profiles), default=0) if batch else 0
    kinds = {value.name: _type(value, onnx) for value in (*model.graph.input, *model.graph.output)}

    def tensors(listed: Sequence[Input]) -> list[dict[str, Any]]:
        return [
            {"name": item.name, "data_type": Word(kinds[item.name]), "dims": _dims(item, from_axis=1 if batch else 0)}
            for item in listed
        ]

    backend = built_by(receipt)
    config: dict[str, Any] = {"name": name}
    config |= {"platform": "tensorrt_plan"} if backend == "tensorrt" else {"backend": "python"}
    config |= {
        "default_model_filename": ENGINE_FILES[backend] if backend == "tensorrt" else "model.py",
        "max_batch_size": largest,
        "input": tensors(inputs),
        "output": tensors(outputs),
        "version_policy": {"latest": {"num_versions": _SERVED}},
        "instance_group": [{"count": 1, "kind": Word("KIND_GPU")}],
    }
    if backend == "tensorrt":
        if len(profiles) > 1:
            config["instance_group"][0]["profile"] = [str(index) for index in range(len(profiles))]
        if largest > 1:
            config["dynamic_batching"] = {}
    ranges = {f"profile_{index}": text for index, text in enumerate(receipt["engine"]["profiles"])}
    stated = {"target": receipt["engine"]["target"], "runtime": receipt["engine"]["backend"], **ranges}
    config["parameters"] = [{"key": key, "value": {"string_value": value}} for key, value in stated.items()]
    return config


def to_pbtxt(message: Mapping[str, Any], indent: str = "") -> str:
    """A message in protobuf's text format: dicts are messages, lists repeat their field."""
    lines = []
    for key, value in message.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                inner = to_pbtxt(item, indent + "  ")
                lines.append(f"{indent}{key} {{\n{inner}{indent}}}\n" if inner else f"{indent}{key} {{ }}\n")
            elif isinstance(item, Word):
                lines.append(f"{indent}{key}: {item.name}\n")
            else:
                lines.append(f"{indent}{key}: {json.dumps(item)}\n")
    return "".join(lines)


def check_config(text: str) -> bool:
    """Reads a `config.pbtxt` with the server's own schema, where the package tritonclient is here to bring it.

    Returns:
        Whether it was.

    Raises:
        ValueError: the schema refuses it.
    """
    spec = importlib.util.find_spec("tritonclient")
    if spec is None or not spec.submodule_search_locations:
        return False
    # By its file, because importing tritonclient.grpc needs grpcio, which is no part of the schema.
    place = Path(next(iter(spec.submodule_search_locations)), "grpc", "model_config_pb2.py")
    schema_spec = importlib.util.spec_from_file_location("_triton_model_config", place)
    assert schema_spec is not None and schema_spec.loader is not None
    schema = importlib.util.module_from_spec(schema_spec)
    try:
        schema_spec.loader.exec_module(schema)
        from google.protobuf import text_format
    except (ImportError, FileNotFoundError, TypeError):
        return False
    try:
        text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"config.pbtxt does not follow the server's schema: {error}") from error
    return True


def built_by(receipt: Mapping[str, Any]) -> str:
    """What built the engine of a receipt: `tensorrt` or `tensorrt_rtx`."""
    return str(receipt["engine"]["backend"]).partition(" ")[0]


def _output(value: Any) -> Input:
    dims = value.type.tensor_type.shape.dim
    return Input(value.name, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims))


def _batch(inputs: Sequence[Input], outputs: Sequence[Input]) -> bool:
    """Whether the first dimension of everything is one dynamic dimension, which the server may then batch over."""
    first = {item.dims[0] if item.dims else None for item in (*inputs, *outputs)}
    return len(first) == 1 and all(isinstance(dim, str) and dim != "?" for dim in first)


def _dims(item: Input, from_axis: int) -> list[int]:
    # A shape of no dimension left is written [1] with a reshape; no exported model has one.
    return [dim if isinstance(dim, int) else -1 for dim in item.dims[from_axis:]]


def _type(value: Any, onnx: Any) -> str:
    kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    if kind not in _TYPES:
        raise ValueError(
            f"{value.name}: Triton Inference Server has no tensors of {kind}; it has "
            f"{', '.join(_TYPES)}. An FP8 KV cache stays inside engines: export without --decode, or serve with vLLM"
        )
    return _TYPES[kind]
