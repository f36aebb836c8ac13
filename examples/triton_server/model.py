"""A decoder of `quant export --to onnx` or `tensorrt` in Triton Inference Server's Python backend: text in, text out.

    models/smol/config.pbtxt        the text of CONFIG below, with the batch that the file takes
    models/smol/1/model.py          this file
    models/smol/1/export/           the directory of `--to onnx`; or `export`, an engine with its receipt `export.json`
    models/smol/1/checkpoint/       the checkpoint: its tokenizer and its end tokens are read

    docker run --rm --gpus all -p 8000:8000 -v $PWD/models:/models -v $CHECKOUT:/blockscale $IMAGE \
        bash -c 'pip install "/blockscale[hf,onnx]" && tritonserver --model-repository=/models'
    curl -s localhost:8000/v2/models/smol/generate -d '{"text_input": "The sky is", "max_tokens": 32}'

Requests that wait at the same time run as rows of one batch, each with its own limit and sampling; later ones wait for
the next batch. The model is decoupled: a row is answered when it ends, or piece by piece with `"stream": true`. A test
runs this file with a stand-in for `triton_python_backend_utils`, which exists inside the server alone; it was never run
in the server. For continuous batching serve the checkpoint with vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quant.export.checkpoint.open_checkpoint import outline
from quant.export.engines.check_engine import GREEDY, Sampling, check_lengths, check_plan, generate_tokens, open_session
from quant.generate.generate import TextStream, end_tokens
from quant.models.huggingface import load_tokenizer

CONFIG = """
name: "smol"
backend: "python"
default_model_filename: "model.py"
max_batch_size: 8
model_transaction_policy { decoupled: true }
dynamic_batching { max_queue_delay_microseconds: 2000 }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] optional: true }
input { name: "temperature" data_type: TYPE_FP32 dims: [1] optional: true }
input { name: "top_k" data_type: TYPE_INT32 dims: [1] optional: true }
input { name: "top_p" data_type: TYPE_FP32 dims: [1] optional: true }
input { name: "seed" data_type: TYPE_INT64 dims: [1] optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
instance_group { count: 1 kind: KIND_GPU }
"""
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "seed": int}  # inputs that are fields of `Sampling`


class TritonPythonModel:
    """The class that the backend looks for: it calls `initialize` once, then `execute` with requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model; the server prints an exception as the reason why it is not ready."""
        import triton_python_backend_utils as server

        self.server = server
        folder = Path(args["model_repository"], args["model_version"])
        checkpoint = folder / "checkpoint"
        self.session = open_session(folder / "export")
        check_plan(self.session.plan, checkpoint)
        self.tokenizer, self.stops = load_tokenizer(checkpoint), end_tokens(outline(checkpoint))

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers all requests; one that cannot be run gets an error, and the others their texts."""
        rows = [row for request in requests if (row := self.row(request)) is not None]
        if not rows:
            return
        try:
            generate_tokens(
                self.session,
                [row["ids"] for row in rows],
                [row["new"] for row in rows],
                sampling=[row["sampling"] for row in rows],
                stops=self.stops,
                on_token=lambda index, token: self.add(rows[index], token),
            )
        except (ValueError, RuntimeError) as error:
            for row in rows:
                if row["is_open"]:
                    self.fail(row["sender"], error)

    def row(self, request: Any) -> dict[str, Any] | None:
        """Returns a request as a row of the batch; None, and an error sent to it, if it is not valid."""
        sender = request.get_response_sender()
        try:
            text = self.value(request, "text_input", None)
            if text is None:
                raise ValueError("text_input is missing")
            new = int(self.value(request, "max_tokens", 64))
            sampling = Sampling(
                **{name: kind(self.value(request, name, getattr(GREEDY, name))) for name, kind in SAMPLING.items()}
            )
            ids = list(self.tokenizer(text.decode("utf-8"))["input_ids"])
            check_lengths(self.session, [ids], [new])
            stream = bool(self.value(request, "stream", False))
        except ValueError as error:
            self.fail(sender, error)
            return None
        pieces = TextStream(self.tokenizer, (lambda piece: self.send(sender, piece)) if stream else None)
        return {
            "sender": sender, "ids": ids, "new": new, "sampling": sampling, "stream": stream, "text": pieces,
            "is_open": True,
        }  # fmt: skip

    def value(self, request: Any, name: str, default: Any) -> Any:
        """Returns the single value of an input, or a default for one that the request does not have."""
        tensor = self.server.get_input_tensor_by_name(request, name)
        if tensor is None:
            return default
        values = list(tensor.as_numpy().reshape(-1))
        if len(values) != 1:
            raise ValueError(f"{name} holds {len(values)} values; send one text in a request")
        return values[0]

    def add(self, row: dict[str, Any], token: int) -> bool:
        """Takes a row's next token, and answers its request after the last one; False ends a row nobody awaits."""
        final = self.server.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if row["sender"].is_cancelled():
            row["sender"].send(flags=final)
            row["is_open"] = False
            return False
        row["text"].add([token])
        if token in self.stops or len(row["text"].tokens) == row["new"]:
            text = row["text"].finish()
            # The pieces of a stream have been sent, and an empty text closes it.
            self.send(row["sender"], "" if row["stream"] else text, final)
            row["is_open"] = False
        return True

    def send(self, sender: Any, text: str, flags: int = 0) -> None:
        """Sends a piece of text, or the whole one."""
        output = self.server.Tensor("text_output", np.array([[text.encode()]], dtype=np.object_))
        sender.send(self.server.InferenceResponse(output_tensors=[output]), flags=flags)

    def fail(self, sender: Any, error: Exception) -> None:
        """Ends a request with an error."""
        response = self.server.InferenceResponse(output_tensors=[], error=self.server.TritonError(str(error)))
        sender.send(response, flags=self.server.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
