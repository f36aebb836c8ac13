"""Sounds are read as the numbers that were written, at the sampling rate that is wanted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_processors import RATE, tone, write_wave

from quant.calibration.texts.media_inputs import SECONDS, is_sound, read_sound, resampled

VALUES = np.array([-1, -0.5, 0, 0.25, 0.5])  # exact in 8 bits


def pcm(width: int) -> np.ndarray:
    """The values as PCM of so many bytes, uint8 `[samples, channels, width]`."""
    if width == 1:
        return (VALUES * 128 + 128).astype(np.uint8).reshape(-1, 1, 1)
    whole = (VALUES * 2.0 ** (8 * width - 1)).astype("<i8")
    return whole.view(np.uint8).reshape(-1, 8)[:, None, :width].copy()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_of_pcm_gives_its_values(width: int, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    write_wave(file, pcm(width))
    found = read_sound(file.read_bytes(), str(file), RATE)
    assert found.dtype == np.float32 and found.tolist() == VALUES.tolist()


def test_channels_are_averaged(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    write_wave(file, np.stack([tone(300), np.zeros_like(tone(300))], axis=1))
    assert np.allclose(read_sound(file.read_bytes(), str(file), RATE), tone(300) / 2**16, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 12_000, 22_050, 48_000])
def test_a_tone_at_another_rate_is_the_same_tone(rate: int, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    write_wave(file, tone(400, rate)[:, None], rate)
    found = read_sound(file.read_bytes(), str(file), RATE)
    wanted = tone(400) / 2**15
    middle = slice(400, -400)  # half a second is a whole number of periods but for rounding of the length
    assert len(found) == len(wanted) and np.abs(found - wanted)[middle].max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_cut_off() -> None:
    time = np.arange(RATE) / RATE
    low, high = (np.sin(2 * np.pi * pitch * time) for pitch in (1000, 5000))
    wanted = np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000)
    assert np.abs(resampled(low + high, RATE, 8000) - wanted).max() < 1e-9  # 5,000 Hz would appear as 3,000


def test_a_long_sound_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    write_wave(file, np.zeros((1000 * SECONDS + 500, 1), "<i2"), 1000)
    assert len(read_sound(file.read_bytes(), str(file), 1000)) == 1000 * SECONDS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no sound at all", "a.bin: no sound that can be read; give WAV files with PCM samples"),
        (b"", "a.bin: no sound that can be read"),
        (b"fLaC and more", "a.bin: FLAC is read with the package soundfile: pip install soundfile"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "a.bin: WAV is read with the package soundfile"),
    ],
)
def test_what_is_no_pcm_is_named(content: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=message) as caught:
        read_sound(content, "a.bin", RATE)
    assert "\n" not in str(caught.value)


def test_an_empty_sound_is_named(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", np.zeros((0, 1), "<i2"))
    with pytest.raises(ValueError, match=r"a\.wav: holds no sound"):
        read_sound((tmp_path / "a.wav").read_bytes(), "a.wav", RATE)


def test_other_formats_go_through_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with soundfile's interface: reading needs its package, which no test installs."""

    class SoundFile:
        samplerate = 8000

        def __init__(self, file: Any) -> None:
            self.content = file.read()

        def __enter__(self) -> SoundFile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, frames: int, always_2d: bool) -> np.ndarray:
            assert frames == SECONDS * 8000 and always_2d and self.content == b"fLaC1"
            return np.array([[0.5, 0.25], [0.0, 1.0]])

    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=SoundFile))
    assert read_sound(b"fLaC1", "a.flac", 8000).tolist() == [0.375, 0.5]


def test_sounds_are_told_from_images() -> None:
    assert is_sound(b"RIFF1234WAVEfmt ") and is_sound(b"OggS") and is_sound(b"ID3\x04")
    assert not is_sound(b"RIFF1234WEBPVP8 ") and not is_sound(b"\x89PNG\r\n")
