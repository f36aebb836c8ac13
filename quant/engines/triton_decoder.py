"""Generates text with an exported decoder in Triton Inference Server's Python backend.

`quant export --to triton-server` writes a `model.py` that imports this class; next to it lie the file that
`quant.export.engines.open_engine` loads, its receipt and the tokenizer. The server puts requests together that wait at
the same time (dynamic batching): they are read and continued as rows of one batch, each with its own length, limit and sampling, and
each is answered when its row ends. Requests that arrive meanwhile wait for the next batch.

    text_input   STRING [1]        the prompt
    max_tokens   INT32 [1]         optional, as all that follow: tokens to add, 64 by default
    temperature, top_p   FP32 [1]  and top_k INT32 [1], seed INT64 [1], as for `quant generate`
    stream       BOOL [1]          an answer for each piece of text, and an empty last one; otherwise one answer
    -> text_output   STRING [1]    the text that was added

The model is decoupled: `execute` returns nothing, and answers go through each request's own sender, so that a row's
answer waits for no other row. `triton_python_backend_utils` exists inside the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quant.base.errors import UserError
from quant.base.json_files import parse_json, read_json
from quant.export.engines.decode_loop import GREEDY, Sampling, check_lengths, generate_tokens
from quant.export.engines.open_engine import open_session
from quant.export.packages.triton_decoder import END_TOKENS, FILE, MAX_TOKENS, OUTPUT, STREAM, TEXT, TOKENIZER
from quant.export.packages.triton_server import RECEIPT_FILE
from quant.generate.generate import TextStream
from quant.models.huggingface import load_tokenizer

_SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "seed": int}  # inputs that are fields of `Sampling`
DEFAULT_NEW = 64


@dataclass
class Row:
    """A request at work, until its last answer is sent."""

    sender: Any
    ids: list[int]
    new: int
    sampling: Sampling
    stream: bool
    text: TextStream
    is_open: bool = True


class TritonPythonModel:
    """The class that the backend looks for: it calls `initialize` once, then `execute` with requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model, or raises UserError, which the server prints as the reason why it is not ready.

        `args` come from the backend: `model_repository`, `model_version`, `model_instance_kind` and `_device_id`.
        """
        import triton_python_backend_utils as server

        self.server = server
        if not server.using_decoupled_model_transaction_policy(parse_json(args["model_config"])):
            raise UserError("config.pbtxt must have `model_transaction_policy { decoupled: true }`; export it again")
        folder = Path(args["model_repository"], args["model_version"])
        receipt = read_json(folder / RECEIPT_FILE, "a receipt", dict)
        self.stops = frozenset(receipt[END_TOKENS])
        self.tokenizer = load_tokenizer(folder / TOKENIZER)
        if args["model_instance_kind"] == "GPU":
            torch.cuda.set_device(int(args["model_instance_device_id"]))
        self.session = open_session(folder / receipt[FILE])

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers all requests; one that cannot be run gets an error, and the others their texts."""
        rows = [row for request in requests if (row := self._row(request)) is not None]
        if not rows:
            return
        try:
            generate_tokens(
                self.session,
                [row.ids for row in rows],
                [row.new for row in rows],
                sampling=[row.sampling for row in rows],
                stops=self.stops,
                on_token=lambda index, token: self._add(rows[index], token),
            )
        except (UserError, RuntimeError) as error:
            for row in rows:
                if row.is_open:
                    self._fail(row.sender, error)

    def _row(self, request: Any) -> Row | None:
        """Returns a request as a row; None, and an error sent to it, if it is not valid."""
        sender = request.get_response_sender()
        try:
            text = self._value(request, TEXT, None)
            if text is None:
                raise UserError(f"{TEXT} is missing")
            new = int(self._value(request, MAX_TOKENS, DEFAULT_NEW))
            options = {
                name: kind(self._value(request, name, getattr(GREEDY, name))) for name, kind in _SAMPLING.items()
            }
            stream = bool(self._value(request, STREAM, False))
            ids = list(self.tokenizer(text.decode("utf-8"))["input_ids"])
            check_lengths(self.session, [ids], [new])
            row = Row(sender, ids, new, Sampling(**options), stream, TextStream(self.tokenizer, None))
        except (UserError, ValueError) as error:
            self._fail(sender, error)
            return None
        if stream:
            row.text = TextStream(self.tokenizer, lambda piece: self._send(sender, piece))
        return row

    def _value(self, request: Any, name: str, default: Any) -> Any:
        """Returns the value of an input, or a default for one that the request does not have."""
        tensor = self.server.get_input_tensor_by_name(request, name)
        if tensor is None:
            return default
        values = list(tensor.as_numpy().reshape(-1))
        if len(values) != 1:
            raise UserError(f"{name} holds {len(values)} values; send one text in a request")
        return values[0]

    def _add(self, row: Row, token: int) -> bool:
        """Takes a row's next token, and answers the request after its last one; False ends a row that nobody awaits."""
        if row.sender.is_cancelled():
            row.sender.send(flags=self.server.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            row.is_open = False
            return False
        row.text.add([token])
        if token in self.stops or len(row.text.tokens) == row.new:
            text = row.text.finish()
            # The pieces of a stream have been sent, and an empty text closes it.
            self._send(row.sender, "" if row.stream else text, self.server.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            row.is_open = False
        return True

    def _send(self, sender: Any, text: str, flags: int = 0) -> None:
        output = self.server.Tensor(OUTPUT, np.array([[text.encode()]], dtype=np.object_))
        sender.send(self.server.InferenceResponse(output_tensors=[output]), flags=flags)

    def _fail(self, sender: Any, error: Exception) -> None:
        response = self.server.InferenceResponse(output_tensors=[], error=self.server.TritonError(str(error)))
        sender.send(response, flags=self.server.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
