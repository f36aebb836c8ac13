"""`publish` puts an engine of one forward pass into a model repository for Triton Inference Server.

Decoders, which generate text, are published by `triton_decoder`.

    REPOSITORY/
      NAME/config.pbtxt     the tensors with the engine's names, types and shapes, and which versions are served
      NAME/1/model.plan     an engine of TensorRT, for the server's own backend
      NAME/1/model.engine   or one of TensorRT-RTX, with `model.py`, which runs it (`triton_model`)
      NAME/1/receipt.json   the engine's receipt
      NAME/2/               the next export of the same model
      serve.md              how to start the server (`triton_server_guide`)

A second export into a repository becomes the next version. The server serves the two newest versions side by side, for
a canary: requests choose with `/versions/2/`, and get the newest without a version. All versions share `config.pbtxt`,
so they must have the same tensors in the same shapes.

If a model has `max_batch_size`, the server adds the batch to every shape, so the first dimension is left out there. The
server has no type for FP8 tensors such as a KV cache. The schema is `model_config.proto`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.base.atomic import put_file, replace_directory, temporary_directory, write_atomically
from quant.base.json_files import json_text, write_json
from quant.export.onnx.dynamic_shapes import Input, graph_inputs, parse_profile

CONFIG_FILE, RECEIPT_FILE, SERVE_FILE = "config.pbtxt", "receipt.json", "serve.md"
ENGINE_FILES = {"tensorrt": "model.plan", "tensorrt_rtx": "model.engine"}
SERVED = 2
"""Versions of a model that the server serves at a time."""
# Types of tensors in config.pbtxt, by their names in ONNX.
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
class Bundle:
    """A published version; `checked` says whether its config was compared with the server's schema."""

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
    guide: Callable[[Bundle], str],
    overwrite: bool = False,
) -> Bundle:
    """Puts an engine into a model repository, as its newest version.

    A new repository appears whole. In an existing one the version comes first, whole, and then `serve.md`.

    Args:
        engine: the engine file; it is moved.
        receipt: of `export_engine`.
        onnx_path: the file that the engine was built from, for names, types and shapes of the tensors.
        repository: is created if it does not exist.
        name: of the model in it.
        guide: returns the text of `serve.md`.
        overwrite: drops earlier versions.

    Raises:
        ValueError: a tensor that the server has no type for, or an earlier version has other tensors. Nothing is
            written.
    """
    backend = built_by(receipt)

    def fill(folder: Path) -> None:
        shutil.move(engine, folder / ENGINE_FILES[backend])
        if backend == "tensorrt_rtx":
            shutil.copyfile(Path(__file__).with_name("triton_model.py"), folder / "model.py")
        write_json(folder / RECEIPT_FILE, receipt)

    config = model_config(name, onnx_path, receipt)
    return publish_version(Path(repository), name, config, fill, guide, overwrite=overwrite)


def publish_version(
    repository: Path,
    name: str,
    config: str,
    fill: Callable[[Path], None],
    guide: Callable[[Bundle], str],
    *,
    overwrite: bool,
) -> Bundle:
    """Adds a version to a model repository; `fill` writes its files into a folder. Otherwise as `publish`."""
    checked = check_config(config)
    home = repository / name
    versions = [int(folder.name) for folder in home.glob("[0-9]*") if folder.is_dir()] if not overwrite else []
    if versions and (home / CONFIG_FILE).read_text(encoding="utf-8") != config:
        raise ValueError(
            f"{home}: version {max(versions)} there has other tensors, shapes or runtime than this engine, and all "
            "versions share one config.pbtxt; pass --overwrite to replace them, or choose another --out"
        )
    bundle = Bundle(repository, name, max(versions, default=0) + 1, checked)
    with temporary_directory(repository) as temporary:
        folder = temporary / name / str(bundle.version)
        folder.mkdir(parents=True)
        fill(folder)
        write_atomically(temporary / name / CONFIG_FILE, config)
        write_atomically(temporary / SERVE_FILE, guide(bundle))
        # The repository, or the model in it, or the version appears by one rename.
        if not repository.exists():
            temporary.chmod(0o755)
            replace_directory(temporary, repository)
            return bundle
        if overwrite or not home.exists():
            replace_directory(temporary / name, home)
        else:
            write_atomically(home / CONFIG_FILE, config)
            replace_directory(folder, home / str(bundle.version))
        put_file(temporary / SERVE_FILE, repository / SERVE_FILE)
    return bundle


def model_config(name: str, onnx_path: str | Path, receipt: Mapping[str, Any]) -> str:
    """Returns the text of `config.pbtxt`, the same for every version of a model; ValueError as in `publish`."""
    import onnx

    model = onnx.load(onnx_path, load_external_data=False)
    inputs, outputs = graph_inputs(model), [_output(value) for value in model.graph.output]
    texts = receipt["engine"]["profiles"]
    profiles = [parse_profile(text, inputs, {}) for text in texts]
    batch = _batch(inputs, outputs)
    largest = max((profile[inputs[0].name][2][0] for profile in profiles), default=0) if batch else 0
    kinds = {value.name: _type(value, onnx) for value in (*model.graph.input, *model.graph.output)}

    def tensors(field: str, listed: Sequence[Input]) -> list[str]:
        # A tensor of the batch dimension alone would need [1] and a reshape here; no exported model has one.
        shapes = [[dim if isinstance(dim, int) else -1 for dim in item.dims[1 if batch else 0 :]] for item in listed]
        return [
            f"{field} {{ name: {json_text(item.name)} data_type: {kinds[item.name]} dims: {shape} }}"
            for item, shape in zip(listed, shapes, strict=True)
        ]

    # name: "model"  platform: "tensorrt_plan"  max_batch_size: 4
    # input { name: "input_ids" data_type: TYPE_INT64 dims: [-1] }      without the batch where the server batches
    # output { … }  version_policy { … }  instance_group { … }  parameters { … }
    backend = built_by(receipt)
    if backend == "tensorrt":
        server = ['platform: "tensorrt_plan"', f'default_model_filename: "{ENGINE_FILES[backend]}"']
        which = f" profile: {json_text([str(index) for index in range(len(profiles))])}" if len(profiles) > 1 else ""
        batching = ["dynamic_batching { }"] if largest > 1 else []
    else:
        server, which, batching = ['backend: "python"', 'default_model_filename: "model.py"'], "", []
    stated = {"target": receipt["engine"]["target"], "runtime": receipt["engine"]["backend"]}
    stated |= {f"profile_{index}": text for index, text in enumerate(texts)}
    lines = [
        f"name: {json_text(name)}",
        *server,
        f"max_batch_size: {largest}",
        *tensors("input", inputs),
        *tensors("output", outputs),
        f"version_policy {{ latest {{ num_versions: {SERVED} }} }}",
        f"instance_group {{ count: 1 kind: KIND_GPU{which} }}",
        *batching,
        *(
            f"parameters {{ key: {json_text(key)} value {{ string_value: {json_text(value)} }} }}"
            for key, value in stated.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def check_config(text: str) -> bool:
    """Reads a `config.pbtxt` with the server's own schema; returns False without tritonclient, which has it.

    Raises ValueError if the schema refuses the text.
    """
    spec = importlib.util.find_spec("tritonclient")
    if spec is None or not spec.submodule_search_locations:
        return False
    # By its file, because importing tritonclient.grpc needs grpcio, which is no part of the schema.
    file = Path(next(iter(spec.submodule_search_locations)), "grpc", "model_config_pb2.py")
    schema_spec = importlib.util.spec_from_file_location("_triton_model_config", file)
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
    """Returns the library that built the engine of a receipt: `tensorrt` or `tensorrt_rtx`."""
    return str(receipt["engine"]["backend"]).partition(" ")[0]


def _output(value: Any) -> Input:
    dims = value.type.tensor_type.shape.dim
    return Input(value.name, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims))


def _batch(inputs: Sequence[Input], outputs: Sequence[Input]) -> bool:
    """Returns whether the first dimension of all tensors is one dynamic dimension, which the server can batch over."""
    first = {item.dims[0] if item.dims else None for item in (*inputs, *outputs)}
    return len(first) == 1 and all(isinstance(dim, str) and dim != "?" for dim in first)


def _type(value: Any, onnx: Any) -> str:
    kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    if kind not in _TYPES:
        raise ValueError(
            f"{value.name}: Triton Inference Server has no tensors of {kind}; it has "
            f"{', '.join(_TYPES)}. Serve with vLLM"
        )
    return _TYPES[kind]
