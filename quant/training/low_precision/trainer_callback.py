"""A Trainer of transformers keeps the histories of low-precision training in its checkpoints.

They are in `trainer_state.json`, where a Trainer keeps the states of its callbacks, as a compressed safetensors file in
base64: a Trainer reads that file from whichever folder it resumes.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, Protocol

import torch

from quant.errors import UserError
from quant.extras import require


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, torch.Tensor]: ...
    def load_state_dict(self, state: dict[str, torch.Tensor], /) -> None: ...


def trainer_callback(report: _Stateful) -> Any:
    """Returns a callback by which a Trainer saves a report's state and, when it resumes, loads it."""
    callbacks = require("transformers.trainer_callback", "hf")
    from safetensors.torch import load, save

    class LowPrecisionHistories(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc, name-defined]
        def state(self) -> dict[str, Any]:
            compressed = zlib.compress(save(report.state_dict()), level=1)
            return {"args": {}, "attributes": {"histories": base64.b64encode(compressed).decode()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not state.global_step:
                return
            if saved is None:
                raise UserError(
                    f"the checkpoint of step {state.global_step} has no histories of low-precision training: it was "
                    "saved without report.trainer_callback(); leave the callback out, and histories begin anew"
                )
            report.load_state_dict(load(zlib.decompress(base64.b64decode(saved["attributes"]["histories"]))))

    return LowPrecisionHistories()
