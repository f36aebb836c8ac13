"""Sounds are read as the numbers that were written, at the sampling rate that is wanted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_processors import RATE, tone, write_wave

from quant.calibration.texts.media_inputs import SECONDS, is_sound, read_sound

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


def test_another_rate_is_refused_with_the_rate_to_give_where_torchaudio_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio.functional", None)
    file = tmp_path / "a.wav"
    write_wave(file, tone(400, 48_000)[:, None], 48_000)
    with pytest.raises(ValueError, match=f"a.wav: has 48000 Hz, and the model takes {RATE} Hz") as caught:
        read_sound(file.read_bytes(), "a.wav", RATE)
    assert f"ffmpeg -i IN.wav -ar {RATE} OUT.wav" in str(caught.value)


def test_torchaudio_resamples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with torchaudio's interface, which takes every second sample."""

    def resample(sound: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
        assert (rate, new_rate) == (2 * RATE, RATE)
        return sound[::2]

    monkeypatch.setitem(sys.modules, "torchaudio.functional", SimpleNamespace(resample=resample))
    file = tmp_path / "a.wav"
    write_wave(file, tone(400, 2 * RATE)[:, None], 2 * RATE)
    assert np.allclose(read_sound(file.read_bytes(), "a.wav", RATE), tone(400, 2 * RATE)[::2] / 2**15, atol=1e-7)


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
