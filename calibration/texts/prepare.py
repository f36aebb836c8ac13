"""`Preparer` turns samples into calls of a model, as the model's own processor prepares them.

    image           pixel_values of the image processor
    sound           input_features or input_values of the feature extractor, at its sampling rate
    image + text    both; where the model writes on after images, through the chat template: the user shows the image
                    and requests a description, and the caption is the answer
    sound + text    the transcript is the decoder's text
    two texts       the first for the encoder, the second for the decoder

An encoder-decoder is called with the decoder's tokens too, from its start token on. A sample without a text for the
decoder gets only the start token, and `decoder_text` then lets the model write.
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
    """Prepares samples for one model."""

    def __init__(self, model: nn.Module, processor: Any, seqlen: int) -> None:
        self.model, self.processor = model, processor
        self.parameters = set(inspect.signature(model.forward).parameters)
        own = processor if hasattr(processor, "convert_tokens_to_ids") else None
        self.tokenizer: Any = getattr(processor, "tokenizer", own)
        self.extractor: Any = getattr(processor, "feature_extractor", processor)
        self.config: Any = getattr(model, "config", None)
        self.length = min(seqlen, _positions(self.config, seqlen))

    @property
    def is_chat(self) -> bool:
        """Whether images stand inside the text that the model continues, as in a chat."""
        return getattr(self.processor, "image_token", None) is not None or bool(self._template)

    @property
    def _template(self) -> Any:
        return getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)

    def inputs(self, samples: Sequence[Sample]) -> Inputs:
        """Returns a call for each sample; `about` describes their source in a few words."""
        inputs = inputs_of([self._call(sample) for sample in samples], self.model)
        first, with_text = samples[0], sum(bool(sample.texts) for sample in samples)
        kind = "texts"
        if first.has_sound:
            kind = "sounds"
        elif first.has_image:
            kind = "images"
        inputs.about = f"{len(samples)} {kind} through {type(self.processor).__name__}"
        if DECODER in self.parameters:
            with_text = sum(len(self._target(sample)) > 0 for sample in samples)
            inputs.about += f", {with_text} of them with a text for the decoder"
        elif kind != "texts" and self.tokenizer is not None and "input_ids" in self.parameters:
            default = _CAPTION if kind == "images" else _SOUND
            if self.is_chat:
                default = _QUESTION
            inputs.about += f", {with_text} of them with a text of their own"
            inputs.about += f", the others with {default!r}" if with_text < len(samples) else ""
        return inputs

    def _call(self, sample: Sample) -> dict[str, Any]:
        try:
            arguments = self._prepare(sample)
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
        call = {name: value for name, value in arguments.items() if name in self.parameters and name != "labels"}
        # A processor for another model may produce only masks that this model has arguments for.
        if all("mask" in name for name in call):
            raise ValueError(
                f"{sample.name}: {type(self.model).__name__} takes none of {', '.join(arguments)}, which "
                f"{type(self.processor).__name__} makes; give prepared inputs as .safetensors"
            )
        if DECODER in self.parameters:
            call[DECODER] = decoder_ids(self.model, self.tokenizer, self._target(sample), self.length)
        return call

    def _target(self, sample: Sample) -> str:
        """Returns the decoder's text; empty for a sample without one."""
        index = 0 if sample.has_sound or sample.has_image else 1
        return sample.texts[index] if len(sample.texts) > index else ""

    def _prepare(self, sample: Sample) -> Any:
        """Returns the processor's result for a sample, arguments by name."""
        if sample.has_sound:
            return self._prepare_sound(sample)
        if sample.has_image:
            return self._prepare_image(sample)
        if self.tokenizer is None:
            raise ValueError(f"{type(self.processor).__name__} prepares no texts: give data that this model reads")
        return self.tokenizer(sample.texts[0], truncation=True, max_length=self.length, return_tensors="pt")

    def _prepare_sound(self, sample: Sample) -> Any:
        rate = getattr(self.extractor, "sampling_rate", None)
        if rate is None:
            raise ValueError(f"{type(self.processor).__name__} prepares no sounds: give data that this model reads")
        options = {"sampling_rate": rate, "return_tensors": "pt"}
        if self.extractor is self.processor:  # a bare feature extractor takes the sound by position
            return self.processor(sample.sound(rate), **options)
        if DECODER not in self.parameters and "input_ids" in self.parameters:
            options["text"] = sample.texts[0] if sample.texts else _SOUND
        return self.processor(audio=sample.sound(rate), **options)

    def _prepare_image(self, sample: Sample) -> Any:
        if not hasattr(self.processor, "image_processor") and not hasattr(self.processor, "image_mean"):
            raise ValueError(f"{type(self.processor).__name__} prepares no images: give data that this model reads")
        image = {"images": sample.image(), "return_tensors": "pt"}
        if self.tokenizer is None or DECODER in self.parameters or "input_ids" not in self.parameters:
            return getattr(self.processor, "image_processor", self.processor)(**image)
        if self.is_chat:
            text = self._chat(sample.texts)
            # Many templates write the start token, which the tokenizer would write again.
            has_bos = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
            return self.processor(text=text, **image, **({"add_special_tokens": False} if has_bos else {}))
        text = sample.texts[0] if sample.texts else _CAPTION
        return self.processor(text=text, truncation=True, max_length=self.length, **image)

    def _chat(self, texts: Sequence[str]) -> str:
        """Returns a dialogue about an image through the chat template: a question, and the caption as its answer."""
        if not self._template:
            return f"{self.processor.image_token}\n{texts[0] if texts else _QUESTION}"
        question = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if texts:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": texts[0]}]})
        dialogue: str = self.processor.apply_chat_template(
            turns, chat_template=self._template, add_generation_prompt=not texts, tokenize=False
        )
        return dialogue


def decoder_ids(model: nn.Module, tokenizer: Any, target: str, length: int) -> torch.Tensor:
    """Returns the decoder's input while it writes a text: its start token, then the text, int64 `[1, tokens]`."""
    start = start_of(model)
    ids = list(tokenizer(text_target=target, truncation=True, max_length=length)["input_ids"]) if target else []
    # The decoder's input is its target shifted by one: the end token is predicted, not read.
    if ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
        ids = ids[:-1]
    return torch.tensor([ids if ids[:1] == [start] else [start, *ids]], device="cpu")[:, :length]


def start_of(model: nn.Module) -> int:
    """Returns the token with which a decoder begins."""
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
    """Returns the number of positions that a model's config names; `otherwise` if it names none."""
    parts = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    names = ("max_target_positions", "max_position_embeddings")
    values = [getattr(part, name, None) for part in parts for name in names]
    return next((value for value in values if isinstance(value, int) and value > 0), otherwise)
