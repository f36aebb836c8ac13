"""The example for Triton Inference Server answers requests with the text that `quant.load` writes.

`triton_python_backend_utils` exists inside the server; the classes here imitate the part of its documented interface
that a decoupled model uses, and refuse what the server refuses.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from samples import ROOT, write_short_base
from serving_samples import greedy_tokens

import quant

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.cli.quantize import quantize_command
from quant.models.huggingface import load_tokenizer

FINAL = 1


class Tensor:
    """A tensor of the server: a name and numpy values, strings as objects."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        assert isinstance(name, str) and isinstance(values, np.ndarray)
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class TritonError:
    def __init__(self, message: str, code: int = 0) -> None:
        assert isinstance(message, str)
        self._message = message

    def message(self) -> str:
        return self._message


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in output_tensors)
        self.tensors, self.error = output_tensors, error


class Sender:
    """Takes answers until the final flag; the server raises afterwards."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error, self.is_open, self.cancel_after = "", True, 10**9

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if not self.is_open:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if response is None and flags != FINAL:
            raise RuntimeError("Inference Response object must be provided when the response flags is not final.")
        self.is_open = flags != FINAL
        if response is not None and response.error is not None:
            self.error = response.error.message()
        elif response is not None:
            (tensor,) = response.tensors
            assert tensor.name() == "text_output" and tensor.as_numpy().shape == (1, 1)
            self.texts.append(tensor.as_numpy()[0, 0].decode())

    def is_cancelled(self) -> bool:
        self.cancel_after -= 1
        return self.cancel_after < 0


class Request:
    """Inputs with the batch dimension that the server adds where `max_batch_size` is set."""

    def __init__(self, **values: Any) -> None:
        types = {"max_tokens": np.int32, "temperature": np.float32, "top_k": np.int32, "seed": np.int64, "stream": bool}
        self.sender, self.tensors = Sender(), {}
        for name, value in values.items():
            is_text = isinstance(value, str)
            self.tensors[name] = np.array([[value.encode() if is_text else value]], types.get(name, np.object_))

    def get_response_sender(self) -> Sender:
        return self.sender


def server() -> ModuleType:
    """The module that the Python backend puts into its process."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, InferenceResponse, TritonError
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.get_input_tensor_by_name = lambda request, name: (
        Tensor(name, request.tensors[name]) if name in request.tensors else None
    )
    return module


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a version: the example, an ONNX file of a decoder, and its checkpoint."""
    folder = tmp_path_factory.mktemp("triton")
    home, base = folder / "models" / "tiny" / "1", write_short_base(folder / "base")
    home.mkdir(parents=True)
    arguments = [str(base), "--format", "int4a16", "--effort", "0", "--out", str(home / "checkpoint"), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    quant.export_model(home / "checkpoint", "onnx", home / "export", capacity=96, dtype="fp32")
    (home / "model.py").write_text((ROOT / "examples" / "triton_server" / "model.py").read_text())
    return home


@pytest.fixture
def checkpoint(version: Path) -> Path:
    return version / "checkpoint"


@pytest.fixture(scope="module")
def model(version: Path) -> Any:
    """The class of `model.py`, as the backend makes and initializes it."""
    spec = importlib.util.spec_from_file_location("triton_example", version / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.TritonPythonModel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", server())
        loaded.initialize({"model_repository": str(version.parent), "model_version": "1"})
    return loaded


def expected(checkpoint: Path, prompt: str, new: int) -> str:
    """The text that the checkpoint itself writes."""
    reference, tokenizer = quant.load(checkpoint).to(torch.float32), load_tokenizer(checkpoint)
    (tokens,) = greedy_tokens(reference, [tokenizer(prompt)["input_ids"]], new)
    stop = reference.generation_config.eos_token_id
    return str(
        tokenizer.decode(tokens[: tokens.index(stop) + 1] if stop in tokens else tokens, skip_special_tokens=True)
    )


def test_requests_of_a_batch(checkpoint: Path, model: Any) -> None:
    """Prompts and limits of different lengths, one streamed, one drawn; two that cannot run."""
    asked = [
        {"text_input": "The", "max_tokens": 12},
        {"text_input": "a b c d e f g", "max_tokens": 5},
        {"text_input": "The sky", "max_tokens": 9, "stream": True},
        {"text_input": "The", "max_tokens": 96},
        {"text_input": "The", "max_tokens": 8, "temperature": 3.0, "seed": 1},
        {"max_tokens": 8},
    ]
    requests = [Request(**values) for values in asked]
    assert model.execute(requests) is None
    assert not any(request.sender.is_open for request in requests)
    for index in (0, 1, 2):
        text = expected(checkpoint, asked[index]["text_input"], asked[index]["max_tokens"])
        assert "".join(requests[index].sender.texts) == text and text
    assert len(requests[0].sender.texts) == 1 and len(requests[2].sender.texts) > 2
    assert "96 more are wanted, but the cache holds 96" in requests[3].sender.error
    assert requests[5].sender.error == "text_input is missing"
    alone = [Request(**asked[4]), Request(**{**asked[4], "seed": 2})]
    for request in alone:
        model.execute([request])
    assert alone[0].sender.texts == requests[4].sender.texts != alone[1].sender.texts


def test_a_request_that_nobody_awaits_any_more(checkpoint: Path, model: Any) -> None:
    cancelled, other = (Request(text_input="The", max_tokens=12, stream=True) for _ in range(2))
    cancelled.sender.cancel_after = 3
    model.execute([cancelled, other])
    assert not cancelled.sender.is_open and not other.sender.is_open
    assert "".join(other.sender.texts) == expected(checkpoint, "The", 12)
    assert len("".join(cancelled.sender.texts)) < len("".join(other.sender.texts))
