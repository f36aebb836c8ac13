"""A speech model: Whisper in NVFP4, calibrated on sounds and the words that the original hears in them.

    python examples/speech.py sounds/ --model openai/whisper-tiny

The sounds are WAV files of 16-bit samples, one channel, at 16 kHz; the command `quantize --calib sounds/` takes others.
"""

import argparse
import wave
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("sounds", type=Path, help="a folder of WAV files")
options.add_argument("--model", default="openai/whisper-tiny")
options.add_argument("--out", default="out/speech")
parsed = options.parse_args()


def samples(file: Path) -> np.ndarray:
    """Samples between -1 and 1."""
    with wave.open(str(file), "rb") as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / np.float32(32768)


processor = WhisperProcessor.from_pretrained(parsed.model)
original = WhisperForConditionalGeneration.from_pretrained(parsed.model)
sounds = [samples(file) for file in sorted(parsed.sounds.glob("*.wav"))]
features = processor(sounds, sampling_rate=16_000, return_tensors="pt")["input_features"]  # [sounds, mels, frames]
words = original.generate(features, max_new_tokens=24)

# Encoder and decoder are calibrated together: one row of each tensor is one call of the model.
inputs = {"input_features": features, "decoder_input_ids": words}
model = WhisperForConditionalGeneration.from_pretrained(parsed.model)
result = quant.quantize(model, "nvfp4a16", inputs, solver="gptq")
with torch.inference_mode():
    agreement = (result.model(**inputs).logits.argmax(-1) == original(**inputs).logits.argmax(-1)).float().mean()
print(f"the likeliest token is the original's at {agreement:.1%} of the positions")
heard = result.model.generate(features, max_new_tokens=24)
print(*processor.batch_decode(heard, skip_special_tokens=True), sep="\n")
quant.save(result.model, result.plan, parsed.out, overwrite=True)
processor.save_pretrained(parsed.out)
print(f"written to {parsed.out}")
