"""`write_decoder_text` lets an encoder-decoder write what its decoder reads, where no text is known for it.

A decoder that is calibrated without tokens sees only its start token. What the model itself says of a sound, an image
or a text is close to what it will write in use, as with text that language models write (see `generate`). The likeliest
token is taken each time; the encoder runs once for a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quant.calibration.inputs import Inputs
from quant.calibration.placement import device_of
from quant.calibration.texts.prepare import DECODER

TOKENS = 32
"""Tokens that are written for a call, unless the model ends before."""


def lacks_decoder_text(inputs: Inputs) -> bool:
    """Whether a call has a decoder that would read its start token alone."""
    return any(_is_open(kwargs) for _, kwargs in inputs.calls)


def write_decoder_text(model: nn.Module, inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> Inputs:
    """The calls with what the model writes in the place of a lone start token.

    Args:
        model: an encoder-decoder of transformers, where its inputs are to be.
        inputs: its calls.
        progress: called as `progress(calls done, calls in all)`.

    Raises:
        ValueError: the model gives NaN or infinity.
    """
    calls = []
    with torch.no_grad():
        for number, (args, kwargs) in enumerate(inputs.calls):
            calls.append((args, {**kwargs, DECODER: _written(model, kwargs)} if _is_open(kwargs) else kwargs))
            if progress is not None:
                progress(number + 1, len(inputs))
    found = Inputs(calls)
    found.own_text = True
    found.about = f"{inputs.about}; the model wrote the others" if inputs.about else ""
    return found


def _is_open(kwargs: dict[str, Any]) -> bool:
    return DECODER in kwargs and kwargs[DECODER].shape[1] == 1


def _written(model: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    there = device_of(model)
    given = {k: v.to(there) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != DECODER}
    encoder = model.get_encoder()
    heard = set(inspect.signature(encoder.forward).parameters)
    encoded = encoder(**{name: value for name, value in given.items() if name in heard})
    rest = {name: value for name, value in given.items() if name == "attention_mask"}
    ids: torch.Tensor = kwargs[DECODER].to(there)
    ends = _ends(model)
    limit = getattr(model.config, "max_target_positions", None) or TOKENS + 1
    for step in range(min(TOKENS, limit - 1)):
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False, **rest).logits[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise ValueError(f"{type(model).__name__} gives NaN or infinite logits at position {step} of its decoder")
        if step == 0:
            logits[:, ends] = -torch.inf
        token = logits.argmax(dim=-1, keepdim=True)
        if int(token) in ends:
            break
        ids = torch.cat([ids, token], dim=1)
    return ids.to(kwargs[DECODER].device)


def _ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    found: set[int] = set()
    for part in (getattr(model, "generation_config", None), model.config):
        ids = getattr(part, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else [])
    return sorted(found)
