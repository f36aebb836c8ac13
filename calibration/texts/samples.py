"""`read_samples` reads the media that calls of a model are prepared from: images, sounds, or texts.

    photos/             images; the caption of `cat.png` is `cat.txt` in the same folder
    sounds/             sounds; the transcript of `talk.wav` is `talk.txt`
    hf:org/name         records with a column of images or sounds, and perhaps one of text
    pairs.jsonl         records with two columns of text, for an encoder-decoder: its input, and its output

Columns are recognised by their contents; `#COLUMN` or `#COLUMN,COLUMN` names the columns of text. From a folder, files
are taken at even distances in the order of their names, so that every class of a folder of classes is among them.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from quant.base.extras import install_command
from quant.calibration.texts.records import Corpus, parse_corpus, read_records

# `read_sound` reads a sound as the numbers that feature extractors take: one channel, float32 in [-1, 1].
#
# PCM in a WAV file is read by the standard library. Everything else (FLAC, Ogg, MP3, WAV with floating-point samples)
# takes the package soundfile.
#
# A sound of another sampling rate is resampled through its spectrum: frequencies that both rates can represent are kept
# exactly, and higher ones are cut off, so that there is no aliasing.


SECONDS = 30
"""A sound is cut to this length, the window of Whisper."""

_MAGIC = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff\xfb": "MP3"}


def is_sound(content: bytes) -> bool:
    """Returns whether a file begins with the magic number of a sound format. A WebP image begins with RIFF, too."""
    return content.startswith(tuple(_MAGIC)) and content[8:12] != b"WEBP"


def read_sound(content: bytes, name: str, rate: int) -> np.ndarray:
    """Returns the first `SECONDS` of a sound at a sampling rate.

    Returns:
        float32 `[samples]`, the mean of the channels.
    """
    channels, file_rate = _read_pcm(content)
    if file_rate is None:
        channels, file_rate = _read_any(content, name)
    if not len(channels) or not np.isfinite(channels).all():
        raise ValueError(
            f"{name}: holds {'NaN or infinity' if len(channels) else 'no sound'}; replace it, or remove it"
        )
    return resampled(channels.mean(axis=1), file_rate, rate).astype(np.float32)


def resampled(sound: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Returns a sound `[samples]` at another sampling rate; rates are samples per second."""
    if rate == new_rate:
        return sound
    length = max(round(len(sound) * new_rate / rate), 1)
    spectrum = np.fft.rfft(sound)
    # irfft divides by the new length, rfft did not divide: the ratio of lengths restores the amplitude.
    return np.fft.irfft(spectrum[: length // 2 + 1], length) * (length / len(sound))


def _read_pcm(content: bytes) -> tuple[np.ndarray, int | None]:
    """Returns the samples `[samples, channels]` and sampling rate of a WAV file with PCM.

    The rate is None for any other file.
    """
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
            return resampled(*self.array, rate).astype(np.float32)
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
    """Returns the first `count` samples of a folder or data set, or fewer.

    None where it holds neither images nor sounds.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in (*IMAGES, *SOUNDS) and f.is_file())
        # A folder of classes or captions as `datasets` writes it also holds a table, metadata.csv or .jsonl.
        if files and not any(path.glob("metadata.*")):
            spread = [files[i * len(files) // count] for i in range(count)] if len(files) > count else files
            return [Sample(str(file), file.read_bytes(), texts=_text_of(file)) for file in spread]
    corpus = parse_corpus(str(source))
    if corpus is None:
        return None
    records = read_records(replace(corpus, column=None))
    # The first record decides for all; it is put back before the others.
    first = next(records, None)
    if first is None or not (_media(first) or (pairs and _texts_of(first, corpus, str(source)))):
        return None
    return list(islice(_samples(chain([first], records), corpus, str(source)), count))


def _text_of(file: Path) -> tuple[str, ...]:
    """Returns the caption or transcript of a file, from the .txt file of the same name."""
    text = file.with_suffix(".txt")
    if not text.is_file():
        return ()
    try:
        return (text.read_text(encoding="utf-8").strip(),)
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: not UTF-8 text ({error.reason} at byte {error.start})") from None


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
        else:
            yield Sample(record_name, _content(value, record_name), texts=texts[:1])


def _media(record: Mapping[str, Any]) -> str | None:
    """Returns the first column that holds an image or a sound, as `datasets` gives one that it has not decoded."""
    held = ({"bytes", "path"}, {"array", "sampling_rate"})
    return next(
        (
            key
            for key, value in record.items()
            if isinstance(value, bytes) or (isinstance(value, Mapping) and any(names <= set(value) for names in held))
        ),
        None,
    )


def _content(value: Any, record_name: str) -> bytes:
    content = value if isinstance(value, bytes) else value["bytes"]
    if content is not None:
        return bytes(content)
    path = Path(value["path"] or "")
    if not path.is_file():
        raise ValueError(f"{record_name}: {path} is not a file; download the data set, with its images and sounds")
    return path.read_bytes()


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
