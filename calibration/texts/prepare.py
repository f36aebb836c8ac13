"""`Preparer` turns samples into calls of a model, as the model's own processor prepares them.

    image           pixel_values of the image processor
    sound           input_features or input_values of the feature extractor, at its sampling rate
    image + text    both; where the model writes on after images, through the chat template: the user shows the image
                    and asks for a description, and the caption is the answer
    sound + text    the transcript is what the decoder writes
    two texts       what the encoder reads, and what the decoder writes

An encoder-decoder is called with the tokens of the second side, from its start token on. Where no text is known for
it, the call holds the start token alone, and `decoder_text` lets the model write.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quant.calibration.inputs import Inputs, inputs_of
from quant.calibration.texts.samples import Sample

DECODER = "decoder_input_ids"
_QUESTION = "Describe the image."
_CAPTION = "a photo"
_SOUND = "a sound"


class Preparer:
    """Prepares samples for one model.

    Args:
        model: is called with the result.
        processor: of transformers: a processor, image processor, feature extractor or tokenizer.
        seqlen: tokens of a text at most.
    """

    def __init__(self, model: nn.Module, processor: Any, seqlen: int) -> None:
        self.model, self.processor = model, processor
        self.takes = set(inspect.signature(model.forward).parameters)
        own = processor if hasattr(processor, "convert_tokens_to_ids") else None
        self.tokenizer: Any = getattr(processor, "tokenizer", own)
        self.extractor: Any = getattr(processor, "feature_extractor", processor)
        self.config: Any = getattr(model, "config", None)
        self.length = min(seqlen, _positions(self.config, seqlen))

    @property
    def is_chat(self) -> bool:
        """Whether the model reads images in the middle of a text that it goes on with."""
        return getattr(self.processor, "image_token", None) is not None or bool(self._template)

    @property
    def _template(self) -> Any:
        return getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)

    def inputs(self, samples: Sequence[Sample]) -> Inputs:
        """The calls, and what they were made from in a few words."""
        found = inputs_of([self._call(sample) for sample in samples], self.model)
        first, known = samples[0], sum(bool(sample.texts) for sample in samples)
        kind = "sounds" if first.has_sound else "images" if first.has_image else "texts"
        found.about = f"{len(samples)} {kind} through {type(self.processor).__name__}"
        if DECODER in self.takes:
            known = sum(len(self._target(sample)) > 0 for sample in samples)
            found.about += f", {known} of them with a text for the decoder"
        elif kind != "texts" and self.tokenizer is not None and "input_ids" in self.takes:
            other = _QUESTION if self.is_chat else _CAPTION if kind == "images" else _SOUND
            found.about += f", {known} of them with a text of their own"
            found.about += f", the others with {other!r}" if known < len(samples) else ""
        return found

    def _call(self, sample: Sample) -> dict[str, Any]:
        try:
            given = self._prepared(sample)
        except ValueError as error:
            raise ValueError(
                f"{sample.name}: {' '.join(str(error).removeprefix(f'{sample.name}: ').split())}"
            ) from error
        except Exception as error:  # processors are programs of the models' authors, and fail as they like
            why = " ".join(str(error).split())
            raise ValueError(
                f"{sample.name}: {type(self.processor).__name__} cannot prepare it ({type(error).__name__}: {why}); "
                "prepare inputs yourself and give them as .safetensors"
            ) from error
        call = {name: value for name, value in given.items() if name in self.takes and name != "labels"}
        if all("mask" in name for name in call):
            raise ValueError(
                f"{sample.name}: {type(self.model).__name__} takes none of {', '.join(given)}, which "
                f"{type(self.processor).__name__} makes; give prepared inputs as .safetensors"
            )
        if DECODER in self.takes:
            call[DECODER] = decoder_ids(self.model, self.tokenizer, self._target(sample), self.length)
        return call

    def _target(self, sample: Sample) -> str:
        """The text that the decoder writes; empty where none is known."""
        place = 0 if sample.has_sound or sample.has_image else 1
        return sample.texts[place] if len(sample.texts) > place else ""

    def _prepared(self, sample: Sample) -> Any:
        if sample.has_sound:
            rate = getattr(self.extractor, "sampling_rate", None)
            if rate is None:
                raise ValueError(f"{type(self.processor).__name__} prepares no sounds")
            sound = {"sampling_rate": rate, "return_tensors": "pt"}
            if self.extractor is self.processor:
                return self.processor(sample.sound(rate), **sound)
            if DECODER not in self.takes and "input_ids" in self.takes:
                sound["text"] = sample.texts[0] if sample.texts else _SOUND
            return self.processor(audio=sample.sound(rate), **sound)
        if sample.has_image:
            if not hasattr(self.processor, "image_processor") and not hasattr(self.processor, "image_mean"):
                raise ValueError(f"{type(self.processor).__name__} prepares no images")
            image = {"images": sample.image(), "return_tensors": "pt"}
            if self.tokenizer is None or DECODER in self.takes or "input_ids" not in self.takes:
                return getattr(self.processor, "image_processor", self.processor)(**image)
            if self.is_chat:
                text = self._chat(sample.texts)
                # Many templates write the start token, which the tokenizer would write again.
                begun = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
                return self.processor(text=text, **image, **({"add_special_tokens": False} if begun else {}))
            text = sample.texts[0] if sample.texts else _CAPTION
            return self.processor(text=text, truncation=True, max_length=self.length, **image)
        if self.tokenizer is None:
            raise ValueError(f"{type(self.processor).__name__} prepares no texts")
        return self.tokenizer(sample.texts[0], truncation=True, max_length=self.length, return_tensors="pt")

    def _chat(self, texts: Sequence[str]) -> str:
        """A dialogue about an image."""
        if not self._template:
            return f"{self.processor.image_token}\n{texts[0] if texts else _QUESTION}"
        asked = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        if texts:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": texts[0]}]})
        found: str = self.processor.apply_chat_template(
            turns, chat_template=self._template, add_generation_prompt=not texts, tokenize=False
        )
        return found


def decoder_ids(model: nn.Module, tokenizer: Any, target: str, length: int) -> torch.Tensor:
    """What a decoder reads while it writes a text: its start token, then the text, int64 `[1, tokens]`.

    Raises:
        ValueError: the config names no start token.
    """
    start = start_of(model)
    ids = list(tokenizer(text_target=target, truncation=True, max_length=length)["input_ids"]) if target else []
    if ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
        ids = ids[:-1]
    return torch.tensor([ids if ids[:1] == [start] else [start, *ids]])[:, :length]


def start_of(model: nn.Module) -> int:
    """The token with which a decoder begins.

    Raises:
        ValueError: the config names none.
    """
    config: Any = getattr(model, "config", None)
    parts = (getattr(model, "generation_config", None), config, getattr(config, "decoder", None))
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):  # T5 begins with its padding
        for part in parts:
            token = getattr(part, name, None)
            if isinstance(token, int):
                return token
    raise ValueError(
        f"{type(model).__name__}: its config names no decoder_start_token_id; give named inputs with {DECODER} as "
        ".safetensors"
    )


def _positions(config: Any, otherwise: int) -> int:
    """Tokens of a text that a model takes."""
    parts = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    names = ("max_target_positions", "max_position_embeddings")
    found = [getattr(part, name, None) for part in parts for name in names]
    return next((value for value in found if isinstance(value, int) and value > 0), otherwise)
