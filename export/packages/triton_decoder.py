"""`publish_decoder` puts a decoder into a model repository for Triton Inference Server: text in, text out.

    REPOSITORY/
      NAME/config.pbtxt       the inputs and outputs below; decoupled, with dynamic batching
      NAME/1/model.py         two lines: the class of `quant.engines.triton_decoder`, which the Python backend runs
      NAME/1/model.onnx       a serving graph for onnxruntime, with `model.onnx.data` where it is large
      NAME/1/model.engine     or an engine of TensorRT or TensorRT-RTX, with its receipt `model.engine.json`
      NAME/1/receipt.json     of the export, with the ids that end a text and the name of the model's file
      NAME/1/tokenizer/       the tokenizer's files
      serve.md                how to start the server (`triton_server_guide`)

Versions, and the repository that appears whole, are as in `triton_server`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quant.base.atomic import write_atomically
from quant.base.json_files import json_text, write_json
from quant.export.onnx.genai import TOKENIZER_FILES
from quant.export.packages.triton_server import RECEIPT_FILE, SERVED, Bundle, publish_version

TEXT, MAX_TOKENS, STREAM, OUTPUT = "text_input", "max_tokens", "stream", "text_output"
INPUTS = {
    TEXT: "TYPE_STRING", MAX_TOKENS: "TYPE_INT32", "temperature": "TYPE_FP32", "top_k": "TYPE_INT32",
    "top_p": "TYPE_FP32", "seed": "TYPE_INT64", STREAM: "TYPE_BOOL",
}  # fmt: skip
"""Inputs of one value each, and their types in config.pbtxt; all but the first are optional."""
TOKENIZER, END_TOKENS, FILE = "tokenizer", "end_tokens", "file"
"""The tokenizer's folder, and two entries of the receipt: ids that end a text, and the name of the model's file."""
_DELAY = 2000  # microseconds that the server waits for further requests of a batch
_ROWS = 16  # of a batch in onnxruntime
_MODEL = """# Written by `quant export --to triton-server`; the server's Python backend looks for this class here.
from quant.engines.triton_decoder import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""


def publish_decoder(
    files: Iterable[Path],
    receipt: Mapping[str, Any],
    checkpoint: Path,
    repository: str | Path,
    *,
    name: str,
    config: str,
    guide: Callable[[Bundle], str],
    overwrite: bool = False,
) -> Bundle:
    """Puts a decoder into a model repository, as its newest version.

    Args:
        files: the model's files, first the file that a session opens; they are moved.
        receipt: of the export, with `END_TOKENS`.
        checkpoint: whose tokenizer is copied.
        repository: is created if it does not exist.
        name: of the model in it.
        config: text of its `config.pbtxt`, from `decoder_config`.
        guide: returns the text of `serve.md`.
        overwrite: drops earlier versions.

    Raises:
        ValueError: the checkpoint has no tokenizer, or an earlier version another config. Nothing is written.
    """
    paths = list(files)
    tokenizer = [checkpoint / file for file in (*TOKENIZER_FILES, "config.json") if (checkpoint / file).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & {file.name for file in tokenizer}:
        raise ValueError(
            f"{checkpoint}: no tokenizer, which a server of text needs; put the model's tokenizer.json there"
        )

    def fill(folder: Path) -> None:
        for path in paths:
            shutil.move(path, folder / path.name)
        (folder / TOKENIZER).mkdir()
        for file in tokenizer:
            shutil.copyfile(file, folder / TOKENIZER / file.name)
        write_atomically(folder / "model.py", _MODEL)
        write_json(folder / RECEIPT_FILE, {**receipt, FILE: paths[0].name})

    return publish_version(Path(repository), name, config, fill, guide, overwrite=overwrite)


def batch_rows(receipt: Mapping[str, Any], shapes: Sequence[str]) -> int:
    """Returns the most rows of a batch: as all profiles of an engine take, or as --shapes says, or `_ROWS`."""
    profiles = receipt["engine"]["profiles"] if "engine" in receipt else ()
    # input_ids=1x1:8x1:32x1,… or batch=1:8:32,…: the smallest, best and largest shape; or one, if it is fixed.
    largest = [re.search(r"input_ids=(?:[^,:]*:[^,:]*:)?(\d+)x", text) for text in profiles]
    largest += [re.search(r"batch=(?:[^,:]*:[^,:]*:)?(\d+)", text) for text in ([] if profiles else shapes)]
    return min((int(match[1]) for match in largest if match), default=_ROWS)


def decoder_config(name: str, rows: int, *, gpu: bool) -> str:
    """Returns the text of `config.pbtxt`, the same for every version."""
    inputs = [
        f"input {{ name: {json_text(field)} data_type: {kind} dims: [1]{'' if field == TEXT else ' optional: true'} }}"
        for field, kind in INPUTS.items()
    ]
    lines = [
        f"name: {json_text(name)}",
        'backend: "python"',
        'default_model_filename: "model.py"',
        f"max_batch_size: {rows}",
        # Answers go through each request's sender: none or many, and not when `execute` returns.
        "model_transaction_policy { decoupled: true }",
        f"dynamic_batching {{ max_queue_delay_microseconds: {_DELAY} }}",
        *inputs,
        f"output {{ name: {json_text(OUTPUT)} data_type: TYPE_STRING dims: [1] }}",
        f"version_policy {{ latest {{ num_versions: {SERVED} }} }}",
        f"instance_group {{ count: 1 kind: {'KIND_GPU' if gpu else 'KIND_CPU'} }}",
    ]
    return "\n".join(lines) + "\n"
