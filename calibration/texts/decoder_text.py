"""`write_decoder_text` lets an encoder-decoder write its decoder's text, where a calibration input comes without one.

A decoder that is calibrated without tokens sees only its start token. The model's own answer to a sound, an image or a
text is close to the text that it will write in use, as with text that language models write (see `generate`). Decoding
is greedy; the encoder runs once for a call.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from quant.calibration.inputs import Inputs
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.calibration.texts.prepare import DECODER

TOKENS = 32
"""Tokens that are written for a call, unless the model ends before."""


def lacks_decoder_text(inputs: Inputs) -> bool:
    """Returns whether a call has a decoder that would read only its start token."""
    return any(_lacks_text(kwargs) for _, kwargs in inputs.calls)


def write_decoder_text(model: nn.Module, inputs: Inputs, session: Session) -> Inputs:
    """Returns calibration calls in which the model's own text follows every lone start token.

    Args:
        model: an encoder-decoder of transformers, on the device where it is to run.
        inputs: the calls of the model.
        session: the session, whose listener is called for the stage "generate" with calls.

    Raises:
        ValueError: the model gives NaN or infinity.
    """
    calls = []
    with torch.no_grad():
        for number, (args, kwargs) in enumerate(inputs.calls):
            calls.append(
                (args, {**kwargs, DECODER: _decode_greedily(model, kwargs)} if _lacks_text(kwargs) else kwargs)
            )
            session.report("generate", number + 1, len(inputs))
    completed = Inputs(calls)
    completed.own_text = True
    completed.about = f"{inputs.about}; the model wrote the others" if inputs.about else ""
    return completed


def _lacks_text(kwargs: dict[str, Any]) -> bool:
    return DECODER in kwargs and kwargs[DECODER].shape[1] == 1


def _decode_greedily(model: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns the decoder's start token and at most `TOKENS` tokens after it, int64 `[1, tokens]`."""
    device = device_of(model)
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != DECODER}
    encoder = model.get_encoder()
    encoder_parameters = set(inspect.signature(encoder.forward).parameters)
    encoded = encoder(**{name: value for name, value in arguments.items() if name in encoder_parameters})
    mask = {name: value for name, value in arguments.items() if name == "attention_mask"}
    ids: torch.Tensor = kwargs[DECODER].to(device)
    ends = _end_tokens(model)
    # Whisper has `max_target_positions`; other models write at most `TOKENS` tokens after the start token.
    limit = getattr(model.config, "max_target_positions", None) or TOKENS + 1
    for step in range(min(TOKENS, limit - 1)):
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False, **mask).logits[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise ValueError(f"{type(model).__name__} gives NaN or infinite logits at position {step} of its decoder")
        if step == 0:  # an empty text would leave the decoder with its start token again
            logits[:, ends] = -torch.inf
        token = logits.argmax(dim=-1, keepdim=True)
        if int(token) in ends:
            break
        ids = torch.cat([ids, token], dim=1)
    return ids.to(kwargs[DECODER].device)


def _end_tokens(model: Any) -> list[int]:
    """Returns the tokens that end a text."""
    tokens: set[int] = set()
    for part in (getattr(model, "generation_config", None), model.config):
        ids = getattr(part, "eos_token_id", None)
        if isinstance(ids, int):
            tokens.add(ids)
        elif isinstance(ids, list):
            tokens.update(ids)
    return sorted(tokens)
