"""`read_sound` reads a sound as the numbers that feature extractors take: one channel, float32 in [-1, 1].

PCM in a WAV file is read by the standard library. Everything else (FLAC, Ogg, MP3, WAV with floating-point samples)
takes the package soundfile.

A sound of another sampling rate is resampled through its spectrum: frequencies that both rates can represent are kept
exactly, and higher ones are cut off, so that there is no aliasing.
"""

from __future__ import annotations

import io
import wave

import numpy as np

SECONDS = 30
"""A sound is cut to this length, the window of Whisper."""

_MAGIC = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff\xfb": "MP3"}


def is_sound(content: bytes) -> bool:
    """Returns whether a file begins with the magic number of a sound format. A WebP image begins with RIFF, too."""
    return content.startswith(tuple(_MAGIC)) and content[8:12] != b"WEBP"


def read_sound(content: bytes, name: str, rate: int) -> np.ndarray:
    """Returns the first `SECONDS` of a sound at a sampling rate.

    Args:
        content: the content of the file.
        name: the name of the file, for errors.
        rate: samples per second of the result.

    Returns:
        float32 `[samples]`, the mean of the channels.

    Raises:
        ValueError: no sound, or one in a format that takes the package soundfile.
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
