"""`read_inputs` reads calibration inputs of models that take more than tokens, from files, folders and data sets.

    inputs.safetensors  one tensor for each argument of the model (`pixel_values`, `decoder_input_ids`, …), and perhaps
                        `labels`, the classes of the rows
    inputs.pt           the same, as torch.save writes a dict of tensors; or the tensor of a model's only argument
    photos/             images; the caption of `cat.png` is `cat.txt` in the same folder
    sounds/             sounds; the transcript of `talk.wav` is `talk.txt`
    hf:org/name         records with a column of images or sounds, and perhaps one of text
    pairs.jsonl         records with two columns of text, for an encoder-decoder: its input, and its output
    text.txt            for an encoder-decoder: rows of tokens for the encoder

A file with only token ids, and a text for any other model, are not read as such inputs: `calibration_rows` takes them.
Columns are recognised by their contents; `#COLUMN` or `#COLUMN,COLUMN` names the columns of text. From a folder, files
are taken at even distances in the order of their names, so that every class of a folder of classes is among them.

`Preparer` turns these samples into calls of the model, as the model's own processor prepares them:

    image           pixel_values of the image processor
    sound           input_features or input_values of the feature extractor, at its sampling rate
    image + text    both; where the model writes on after images, through the chat template: the user shows the image
                    and requests a description, and the caption is the answer
    sound + text    the transcript is the decoder's text
    two texts       the first for the encoder, the second for the decoder

An encoder-decoder is called with the decoder's tokens too, from its start token on. A sample without a text for the
decoder gets only the start token, and `write_decoder_text` lets the model write: its own answer is close to the text
that it will write in use, and a decoder that is calibrated without tokens sees only its start token.
"""

import inspect
import io
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quant.base.errors import install_command, option, read_utf8
from quant.calibration.inputs import Inputs, inputs_of
from quant.calibration.session import Session, device_of
from quant.calibration.texts.rows import Corpus, calibration_rows, parse_corpus, read_records

SECONDS = 30
"""A sound is cut to this length, the window of Whisper."""

_MAGIC = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff\xfb": "MP3"}


def is_sound(content: bytes) -> bool:
    """Returns whether a file begins with the magic number of a sound format. A WebP image begins with RIFF, too."""
    return content.startswith(tuple(_MAGIC)) and content[8:12] != b"WEBP"


def read_sound(content: bytes, name: str, rate: int) -> np.ndarray:
    """Returns the first `SECONDS` of a sound at a sampling rate, the mean of its channels, float32 `[samples]`.

    PCM in a WAV file is read by the standard library, everything else (FLAC, Ogg, MP3) by the package soundfile.
    """
    channels, file_rate = _read_pcm(content)
    if file_rate is None:
        channels, file_rate = _read_any(content, name)
    if not len(channels) or not np.isfinite(channels).all():
        raise ValueError(
            f"{name}: holds {'NaN or infinity' if len(channels) else 'no sound'}; replace it, or remove it"
        )
    return _at_rate(channels.mean(axis=1), file_rate, rate, name)


def _at_rate(sound: np.ndarray, rate: int, new_rate: int, name: str) -> np.ndarray:
    """Returns a sound at a sampling rate, float32 `[samples]`; another rate than its own takes torchaudio."""
    if rate != new_rate:
        try:
            from torchaudio.functional import resample
        except ImportError:
            raise ValueError(
                f"{name}: has {rate} Hz, and the model takes {new_rate} Hz: give files at that rate, such as by "
                f"ffmpeg -i IN.wav -ar {new_rate} OUT.wav, or pip install torchaudio, which resamples"
            ) from None
        sound = resample(torch.from_numpy(sound), rate, new_rate).numpy()
    return sound.astype(np.float32)


def _read_pcm(content: bytes) -> tuple[np.ndarray, int | None]:
    """Returns samples `[samples, channels]` and rate of a WAV file with PCM; the rate None for any other file."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, count, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = np.frombuffer(file.readframes(SECONDS * rate), np.uint8)
    except (wave.Error, EOFError):
        return np.empty(0), None
    raw = raw[: len(raw) // (width * count) * width * count].reshape(-1, width)
    if width == 1:
        values = (raw[:, 0].astype(np.float64) - 128) / 128  # 8-bit samples are the only unsigned ones
    else:
        # Little-endian bytes go to the upper end of 32 bits, so that one scale fits 16, 24 and 32 bits.
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 4 - width :] = raw
        values = wide.view("<i4")[:, 0] / 2.0**31
    return values.reshape(-1, count), rate


def _read_any(content: bytes, name: str) -> tuple[np.ndarray, int]:
    """Returns the samples `[samples, channels]` and sampling rate of another format, by the package soundfile."""
    kind = next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"{name}: no sound that can be read; give WAV files with PCM samples")
    try:
        import soundfile
    except ImportError:
        raise ValueError(
            f"{name}: {kind} is read with the package soundfile: pip install soundfile; a WAV file with PCM samples "
            "needs nothing"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            return file.read(SECONDS * file.samplerate, always_2d=True), int(file.samplerate)
    except Exception as error:  # the library's own errors, of no common class
        raise ValueError(f"{name}: no {kind} that can be read ({' '.join(str(error).split())})") from None


IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
# Usual names of columns, the better known first.
_CAPTIONS = ("text", "caption", "captions", "sentence", "transcription", "transcript", "normalized_text", "answer")
_PAIRS = (("source", "target"), ("input", "target"), ("article", "highlights"), ("document", "summary"),
          ("dialogue", "summary"), ("text", "summary"), ("question", "answer"), ("prompt", "completion"))  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """An image, a sound, or texts: the material of one call."""

    name: str
    content: bytes | None = None  # bytes of an image or a sound; None for only texts
    array: tuple[np.ndarray, int] | None = None
    texts: tuple[str, ...] = ()  # a caption or transcript, or the text to read and the text to write; may be empty

    @property
    def has_sound(self) -> bool:
        """Whether it is a sound and no image."""
        return self.array is not None or (self.content is not None and is_sound(self.content))

    @property
    def has_image(self) -> bool:
        """Whether it is an image."""
        return self.content is not None and not self.has_sound

    def sound(self, rate: int) -> np.ndarray:
        """Returns the sound at a sampling rate, float32 `[samples]`."""
        if self.array is not None:
            return _at_rate(*self.array, rate, self.name)
        assert self.content is not None
        return read_sound(self.content, self.name, rate)

    def image(self) -> Any:
        """Returns the image in RGB, as pillow has it."""
        try:
            from PIL import Image
        except ImportError:
            raise ValueError(
                f"{self.name}: images take the package pillow: {install_command('vision')}; prepared inputs as "
                ".safetensors need nothing"
            ) from None
        assert self.content is not None
        try:
            return Image.open(io.BytesIO(self.content)).convert("RGB")
        except Exception as error:  # decoders of many formats, with no common class of errors
            raise ValueError(f"{self.name}: no image that can be read ({' '.join(str(error).split())})") from None


def read_samples(source: str | Path, count: int, *, pairs: bool) -> list[Sample] | None:
    """Returns the first `count` samples of a folder or data set; None where it holds neither images nor sounds."""
    path = Path(source)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in (*IMAGES, *SOUNDS) and f.is_file())
        # A folder of classes or captions as `datasets` writes it also holds a table, metadata.csv or .jsonl.
        if files and not any(path.glob("metadata.*")):
            spread = [files[i * len(files) // count] for i in range(count)] if len(files) > count else files
            # A caption or transcript is in the .txt file of the same name.
            texts = [(read_utf8(t).strip(),) if (t := f.with_suffix(".txt")).is_file() else () for f in spread]
            return [Sample(str(f), f.read_bytes(), texts=of) for f, of in zip(spread, texts, strict=True)]
    corpus = parse_corpus(str(source))
    if corpus is None:
        return None
    records = read_records(replace(corpus, column=None))
    # The first record decides for all; it is put back before the others.
    first = next(records, None)
    if first is None or not (_media(first) or (pairs and _texts_of(first, corpus, str(source)))):
        return None
    return list(islice(_samples(chain([first], records), corpus, str(source)), count))


def _samples(records: Iterator[Mapping[str, Any]], corpus: Corpus, name: str) -> Iterator[Sample]:
    for number, record in enumerate(records):
        record_name, column = f"{name}, record {number}", _media(record)
        texts = _texts_of(record, corpus, name)
        if column is None:
            yield Sample(record_name, texts=texts)
            continue
        value = record[column]
        if isinstance(value, Mapping) and value.get("array") is not None:
            sound = np.asarray(value["array"], np.float64)
            yield Sample(record_name, array=(sound, int(value["sampling_rate"])), texts=texts[:1])
            continue
        content = value if isinstance(value, bytes) else value["bytes"]
        if content is None:
            path = Path(value["path"] or "")
            if not path.is_file():
                raise ValueError(
                    f"{record_name}: {path} is not a file; download the data set, with its images and sounds"
                )
            content = path.read_bytes()
        yield Sample(record_name, bytes(content), texts=texts[:1])


def _media(record: Mapping[str, Any]) -> str | None:
    """Returns the first column that holds an image or a sound, as `datasets` gives one that it has not decoded."""
    held = ({"bytes", "path"}, {"array", "sampling_rate"})
    for key, value in record.items():
        if isinstance(value, bytes) or (isinstance(value, Mapping) and any(names <= set(value) for names in held)):
            return key
    return None


def _texts_of(record: Mapping[str, Any], corpus: Corpus, name: str) -> tuple[str, ...]:
    """Returns the texts of a record: of the columns that were named, or else of columns with usual names."""
    named = corpus.column.split(",") if corpus.column else None
    if named is None:
        # {"translation": {"en": …, "de": …}}
        inside = next((v for v in record.values() if isinstance(v, Mapping) and _are_texts(list(v.values()))), None)
        record = record if inside is None else inside
        named = next(
            (list(pair) for pair in (*_PAIRS, *((key,) for key in _CAPTIONS)) if set(pair) <= set(record)),
            [] if inside is None else list(inside)[:2],
        )
    missing = [key for key in named if key not in record]
    if missing:
        raise ValueError(f"{name}: no column {missing[0]!r}; its columns are {', '.join(record)}")
    values = [record[key] for key in named]
    # Several captions of one image: the first.
    values = [value[0] if isinstance(value, list) and value else value for value in values]
    return tuple(values) if values and _are_texts(values) else ()


def _are_texts(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)


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
        self.template: Any = getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        # Images stand inside the text that the model continues.
        self.is_chat = getattr(processor, "image_token", None) is not None or bool(self.template)
        config: Any = getattr(model, "config", None)
        parts = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
        names = ("max_target_positions", "max_position_embeddings")
        positions = [getattr(part, name, None) for part in parts for name in names]
        self.length = min(seqlen, next((n for n in positions if isinstance(n, int) and n > 0), seqlen))

    def inputs(self, samples: Sequence[Sample]) -> Inputs:
        """Returns a call for each sample; `about` describes their source in a few words."""
        inputs = inputs_of([self._call(sample) for sample in samples], self.model)
        first, with_text = samples[0], sum(bool(sample.texts) for sample in samples)
        kind = "sounds" if first.has_sound else "images" if first.has_image else "texts"
        inputs.about = f"{len(samples)} {kind} through {type(self.processor).__name__}"
        if DECODER in self.parameters:
            with_text = sum(len(self._target(sample)) > 0 for sample in samples)
            inputs.about += f", {with_text} of them with a text for the decoder"
        elif kind != "texts" and self.tokenizer is not None and "input_ids" in self.parameters:
            default = _QUESTION if self.is_chat else _CAPTION if kind == "images" else _SOUND
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
        index = 0 if sample.has_sound or sample.has_image else 1
        return sample.texts[index] if len(sample.texts) > index else ""

    def _prepare(self, sample: Sample) -> Any:
        if sample.has_sound:
            rate = getattr(self.extractor, "sampling_rate", None)
            if rate is None:
                raise ValueError(f"{type(self.processor).__name__} prepares no sounds: give data that this model reads")
            options = {"sampling_rate": rate, "return_tensors": "pt"}
            if self.extractor is self.processor:  # a bare feature extractor takes the sound by position
                return self.processor(sample.sound(rate), **options)
            if DECODER not in self.parameters and "input_ids" in self.parameters:
                options["text"] = sample.texts[0] if sample.texts else _SOUND
            return self.processor(audio=sample.sound(rate), **options)
        if sample.has_image:
            return self._prepare_image(sample)
        if self.tokenizer is None:
            raise ValueError(f"{type(self.processor).__name__} prepares no texts: give data that this model reads")
        arguments = self.tokenizer(sample.texts[0], truncation=True, max_length=self.length, return_tensors="pt")
        if not arguments["input_ids"].numel():
            raise ValueError("has no token that the tokenizer knows; give text in its words, or input_ids as a file")
        return arguments

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
        if not self.template:
            return f"{self.processor.image_token}\n{texts[0] if texts else _QUESTION}"
        question = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if texts:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": texts[0]}]})
        return self.processor.apply_chat_template(
            turns, chat_template=self.template, add_generation_prompt=not texts, tokenize=False
        )


def decoder_ids(model: nn.Module, tokenizer: Any, target: str, length: int) -> Tensor:
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
    about = f"{inputs.about}; the model wrote the others" if inputs.about else ""
    return Inputs(calls, about=about, own_text=True)


def _lacks_text(kwargs: dict[str, Any]) -> bool:
    return DECODER in kwargs and kwargs[DECODER].shape[1] == 1


def _decode_greedily(model: Any, kwargs: dict[str, Any]) -> Tensor:
    """Returns the decoder's start token and at most `TOKENS` tokens after it, int64 `[1, tokens]`; one encoder pass."""
    device = device_of(model)
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items() if k != DECODER}
    encoder = model.get_encoder()
    encoder_parameters = set(inspect.signature(encoder.forward).parameters)
    encoded = encoder(**{name: value for name, value in arguments.items() if name in encoder_parameters})
    mask = {name: value for name, value in arguments.items() if name == "attention_mask"}
    ids: Tensor = kwargs[DECODER].to(device)
    ends: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config):
        end = getattr(config, "eos_token_id", None)
        ends.update(end if isinstance(end, list) else [end] if isinstance(end, int) else [])
    # Whisper has `max_target_positions`; other models write at most `TOKENS` tokens after the start token.
    limit = getattr(model.config, "max_target_positions", None) or TOKENS + 1
    for step in range(min(TOKENS, limit - 1)):
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False, **mask).logits[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise ValueError(f"{type(model).__name__} gives NaN or infinite logits at position {step} of its decoder")
        if step == 0:  # an empty text would leave the decoder with its start token again
            logits[:, sorted(ends)] = -torch.inf
        token = logits.argmax(dim=-1, keepdim=True)
        if int(token) in ends:
            break
        ids = torch.cat([ids, token], dim=1)
    return ids.to(kwargs[DECODER].device)


PICKLES = (".pt", ".pth")
"""Suffixes of files that torch.save writes."""
_MEDIA = {"pixel_values", "input_features", "input_values"}


def read_inputs(
    source: str | Path, model: nn.Module, processor: Callable[[], Any], *, samples: int, seqlen: int
) -> Inputs | None:
    """Returns the first `samples` inputs of a source; None where it holds rows of tokens, or text for such models."""
    path, parameters = Path(source), set(inspect.signature(model.forward).parameters)
    is_seq2seq = DECODER in parameters
    inputs: Inputs | None = None
    if path.suffix in (".safetensors", *PICKLES):
        if path.is_file() and (named := _named_tensors(path, model)):
            if is_seq2seq and DECODER not in named:
                # A start token for each row; `write_decoder_text` lets the model go on from it.
                count = len(next(iter(named.values())))
                named = {**named, DECODER: decoder_ids(model, None, "", 1).repeat(count, 1)}
            # A model outside transformers takes no labels: they are for its accuracy alone.
            labels = None if "labels" in parameters else named.get("labels")
            given = {name: tensor[:samples] for name, tensor in named.items() if tensor is not labels}
            inputs = inputs_of(given, model)
            inputs.labels = None if labels is None else labels[:samples]
    elif path.is_dir() or is_seq2seq or parameters & _MEDIA:
        # The processor is loaded only if there is something for it: it may take seconds.
        media = read_samples(source, samples, pairs=is_seq2seq)
        if media is None and is_seq2seq and "input_ids" in parameters:
            # Pieces of a text, `seqlen` tokens each, including the tokenizer's special tokens.
            tokenizer = processor()
            length = max(seqlen - len(tokenizer("")["input_ids"]), 1)
            rows = calibration_rows(str(source), tokenizer, samples=samples, seqlen=length)
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
            media = [Sample(f"{source}, row {number}", texts=(text,)) for number, text in enumerate(texts)]
        if media is not None:
            inputs = Preparer(model, processor(), seqlen).inputs(media)
    if inputs is not None and len(inputs) < samples:
        raise ValueError(
            f"{path}: holds {len(inputs)} inputs, and {samples} are needed; give more, or ask for {len(inputs)} by "
            f"{option('calib_samples')} or {option('eval_samples')} (quant evaluate: {option('samples')})"
        )
    return inputs


def _named_tensors(path: Path, model: nn.Module) -> Mapping[str, Tensor] | None:
    """Returns the tensors of a file that is made of a model's arguments; None where it holds only token ids."""
    parameters = inspect.signature(model.forward).parameters
    takes = [name for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    tensors = _tensors_of(path, takes)
    for name in {"input_ids", DECODER} & tensors.keys():
        if tensors[name].is_floating_point():
            raise ValueError(f"{path}: {name} is {tensors[name].dtype}; token ids are integers: save them as int64")
    # One tensor of integers is a file of token rows, for `calibration_rows`, unless an encoder-decoder reads them.
    is_ids = len(tensors) == 1 and not next(iter(tensors.values())).is_floating_point()
    if is_ids and DECODER not in parameters and path.suffix == ".safetensors":
        return None
    unknown = sorted(set(tensors) - set(takes) - {"labels"})
    if not unknown and set(tensors) != {"labels"}:
        return tensors
    is_integers = all(not tensor.is_floating_point() for tensor in tensors.values())
    if is_integers and not set(tensors) & set(takes) and path.suffix == ".safetensors":
        return None  # several texts of token ids, of which FILE.safetensors:NAME names one
    wrong = ", ".join(unknown) or "labels alone"
    raise ValueError(
        f"{path}: {type(model).__name__} takes no {wrong}; name tensors by the arguments of its forward: "
        f"{', '.join(takes)}"
    )


def _tensors_of(path: Path, takes: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of a file by name; a single tensor of torch.save has the name of the first argument."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from None
    try:
        # Without running code that the file may hold.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip have no common class of errors
        first_line = str(error).strip().split("\n")[0]
        why = first_line if len(first_line) > 9 else "no file of torch.save"  # a KeyError names a byte
        raise ValueError(f"{path}: torch.load cannot read it as tensors ({why}); write it by torch.save") from None
    if isinstance(content, Tensor) and takes:
        return {takes[0]: content}
    if isinstance(content, dict) and content and all(isinstance(each, Tensor) for each in content.values()):
        return {str(name): tensor for name, tensor in content.items()}
    raise ValueError(
        f"{path}: holds {type(content).__name__}; save a tensor, or a dict of tensors by the names of the model's "
        f"arguments: {', '.join(takes)}"
    )
