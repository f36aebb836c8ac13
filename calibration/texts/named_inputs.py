"""`read_inputs` reads calibration inputs of models that take more than tokens, from files, folders and data sets.

    inputs.safetensors     one tensor for each argument of the model (`pixel_values`, `decoder_input_ids`, …)
    photos/ sounds/ hf:…   images, sounds and texts (see `samples`), prepared by the model's own processor (`prepare`)
    text.txt               for an encoder-decoder: rows of tokens for the encoder

A file with only token ids, and a text for any other model, are not read as such inputs: `calibration_rows` takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quant.calibration.inputs import Inputs, inputs_of
from quant.calibration.placement import device_of
from quant.calibration.session import Session
from quant.calibration.texts.prepare import DECODER, Preparer, decoder_ids
from quant.calibration.texts.rows import calibration_rows
from quant.calibration.texts.samples import Sample, read_samples

# `write_decoder_text` lets an encoder-decoder write its decoder's text, where a calibration input comes without one.
#
# A decoder that is calibrated without tokens sees only its start token. The model's own answer to a sound, an image or
# a text is close to the text that it will write in use, as with text that language models write (see `generate`).
# Decoding is greedy; the encoder runs once for a call.


TOKENS = 32
"""Tokens that are written for a call, unless the model ends before."""


def lacks_decoder_text(inputs: Inputs) -> bool:
    """Returns whether a call has a decoder that would read only its start token."""
    return any(_lacks_text(kwargs) for _, kwargs in inputs.calls)


def write_decoder_text(model: nn.Module, inputs: Inputs, session: Session) -> Inputs:
    """Returns calibration calls in which the model's own text follows every lone start token."""
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


_MEDIA = {"pixel_values", "input_features", "input_values"}


def read_inputs(
    source: str | Path, model: nn.Module, processor: Callable[[], Any], *, samples: int, seqlen: int
) -> Inputs | None:
    """Returns the first `samples` inputs of a source.

    None where it holds rows of tokens, or a text for a model of tokens.
    """
    path, parameters = Path(source), set(inspect.signature(model.forward).parameters)
    is_seq2seq = DECODER in parameters
    inputs: Inputs | None = None
    if path.suffix == ".safetensors":
        if path.is_file() and (named := _named_tensors(path, model)):
            if is_seq2seq and DECODER not in named:
                # A start token for each row; `write_decoder_text` lets the model go on from it.
                count = len(next(iter(named.values())))
                named = {**named, DECODER: decoder_ids(model, None, "", 1).repeat(count, 1)}
            inputs = inputs_of({name: tensor[:samples] for name, tensor in named.items()}, model)
    elif path.is_dir() or is_seq2seq or parameters & _MEDIA:
        # The processor is loaded only if there is something for it: it may take seconds.
        media = read_samples(source, samples, pairs=is_seq2seq)
        if media is None and is_seq2seq and "input_ids" in parameters:
            media = _texts(source, processor(), samples, seqlen)
        if media is not None:
            inputs = Preparer(model, processor(), seqlen).inputs(media)
    if inputs is not None and len(inputs) < samples:
        raise ValueError(
            f"{path}: holds {len(inputs)} inputs, and {samples} are needed; give more, or ask for {len(inputs)} by "
            "--calib-samples or --eval-samples (quant evaluate: --samples)"
        )
    return inputs


def _texts(source: str | Path, tokenizer: Any, samples: int, seqlen: int) -> list[Sample]:
    """Returns pieces of a text, `seqlen` tokens each, including the tokenizer's special tokens."""
    length = max(seqlen - len(tokenizer("")["input_ids"]), 1)
    rows = calibration_rows(str(source), tokenizer, samples=samples, seqlen=length)
    return [
        Sample(f"{source}, row {number}", texts=(tokenizer.decode(row, skip_special_tokens=True),))
        for number, row in enumerate(rows)
    ]


def _named_tensors(path: Path, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """Returns the tensors of a file that is made of a model's arguments; None where it holds only token ids."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None
    parameters = set(inspect.signature(model.forward).parameters)
    arguments = set(tensors) & parameters
    # One tensor of integers is a file of token rows, for `calibration_rows`, unless an encoder-decoder reads them.
    is_ids = len(tensors) == 1 and not next(iter(tensors.values())).is_floating_point()
    if not arguments or (is_ids and DECODER not in parameters):
        return None
    if arguments != set(tensors):
        unknown = ", ".join(sorted(set(tensors) - arguments))
        raise ValueError(f"{path}: {type(model).__name__} takes no {unknown}; name tensors by its arguments")
    return tensors
