"""A bundle for Triton Inference Server answers requests with the text that `quant.load` writes, in a batch or alone.

`triton_python_backend_utils` exists inside the server; `Server` imitates the part of its documented interface that a
decoupled model uses, and refuses what the server refuses.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from samples import write_short_base
from serving_samples import greedy_tokens

import quant

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.cli.main import main
from quant.cli.quantize_command import quantize_command
from quant.export.packages.triton_decoder import batch_rows, decoder_config
from quant.export.packages.triton_server import check_config
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
    module.using_decoupled_model_transaction_policy = lambda config: config["model_transaction_policy"]["decoupled"]
    module.get_input_tensor_by_name = lambda request, name: (
        Tensor(name, request.tensors[name]) if name in request.tensors else None
    )
    return module


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and the repository that the command makes of it."""
    folder = tmp_path_factory.mktemp("triton")
    checkpoint = folder / "tiny"
    base = write_short_base(folder / "base")
    arguments = [str(base), "--format", "int4a16", "--effort", "0", "--out", str(checkpoint), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    result = run(
        "export", checkpoint, "--to", "triton-server", "--capacity", 96, "--dtype", "fp32", "--shapes",
        "batch=1:1:4", "--out", folder / "repository", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tiny/1/model.onnx" in json.loads(result.stdout)["files"]
    return checkpoint, folder / "repository"


@pytest.fixture(scope="module")
def model(bundle: tuple[Path, Path]) -> Any:
    """The class of `model.py`, as the backend makes and initializes it."""
    repository = bundle[1] / "tiny"
    file = repository / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("model_of_the_bundle", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.TritonPythonModel()
    config = {"model_transaction_policy": {"decoupled": True}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", server())
        loaded.initialize(
            {
                "model_config": json.dumps(config),
                "model_repository": str(repository),
                "model_version": "1",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
    return loaded


def test_the_repository(bundle: tuple[Path, Path]) -> None:
    repository = bundle[1]
    files = {str(file.relative_to(repository)) for file in repository.rglob("*") if file.is_file()}
    assert {"tiny/config.pbtxt", "tiny/1/model.py", "tiny/1/model.onnx", "tiny/1/receipt.json", "serve.md"} <= files
    assert {"tiny/1/tokenizer/tokenizer.json", "tiny/1/tokenizer/config.json"} <= files
    text = (repository / "tiny" / "config.pbtxt").read_text()
    assert "max_batch_size: 4\n" in text and "decoupled: true" in text and "kind: KIND_CPU" in text
    assert 'input { name: "text_input" data_type: TYPE_STRING dims: [1] }\n' in text
    page = (repository / "serve.md").read_text()
    assert "never inside the server" in page and "/v2/models/tiny/generate_stream" in page and "--gpus" not in page


def expected(checkpoint: Path, prompt: str, new: int) -> str:
    """The text that the checkpoint itself writes."""
    reference, tokenizer = quant.load(checkpoint).to(torch.float32), load_tokenizer(checkpoint)
    (tokens,) = greedy_tokens(reference, [tokenizer(prompt)["input_ids"]], new)
    stop = reference.generation_config.eos_token_id
    return str(
        tokenizer.decode(tokens[: tokens.index(stop) + 1] if stop in tokens else tokens, skip_special_tokens=True)
    )


def test_requests_of_a_batch(bundle: tuple[Path, Path], model: Any) -> None:
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
        text = expected(bundle[0], asked[index]["text_input"], asked[index]["max_tokens"])
        assert "".join(requests[index].sender.texts) == text and text
    assert len(requests[0].sender.texts) == 1 and len(requests[2].sender.texts) > 2
    assert "96 more are wanted, but the cache holds 96" in requests[3].sender.error
    assert requests[5].sender.error == "text_input is missing"
    alone = [Request(**asked[4]), Request(**{**asked[4], "seed": 2})]
    for request in alone:
        model.execute([request])
    assert alone[0].sender.texts == requests[4].sender.texts != alone[1].sender.texts


def test_a_request_that_nobody_awaits_any_more(bundle: tuple[Path, Path], model: Any) -> None:
    cancelled, other = (Request(text_input="The", max_tokens=12, stream=True) for _ in range(2))
    cancelled.sender.cancel_after = 3
    model.execute([cancelled, other])
    assert not cancelled.sender.is_open and not other.sender.is_open
    assert "".join(other.sender.texts) == expected(bundle[0], "The", 12)
    assert len("".join(cancelled.sender.texts)) < len("".join(other.sender.texts))


def test_refusals(bundle: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = bundle[0]
    again = run("export", checkpoint, "--to", "triton-server", "--capacity", 0, "--out", tmp_path / "out")
    assert again.exit_code == 2 and "without a KV cache is served as an engine: name its GPU" in again.stderr
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    result = run(
        "export", copy, "--to", "triton-server", "--capacity", 64, "--dtype", "fp32", "--out", tmp_path / "out"
    )
    assert result.exit_code == 2 and "no tokenizer, which a server of text needs" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_config_of_an_engine() -> None:
    """The batch that both profiles take, decoding and reading prompts; the schema where it is installed."""
    profiles = ["input_ids=1x1:8x1:32x1,lengths=1:8:32", "input_ids=1x1:1x128:8x512,lengths=1:1:8"]
    rows = batch_rows({"engine": {"profiles": profiles}}, ())
    assert rows == 8 and batch_rows({}, ()) == 16
    assert batch_rows({}, ("batch=1,sequence=8",)) == 1 and batch_rows({}, ("sequence=8,batch=1:2:4",)) == 4
    assert batch_rows({"engine": {"profiles": ["input_ids=2x8,lengths=2"]}}, ()) == 2
    text = decoder_config("smol", rows, gpu=True)
    assert "max_batch_size: 8\n" in text and "KIND_GPU" in text
    if importlib.util.find_spec("tritonclient") is not None:
        assert check_config(text)
