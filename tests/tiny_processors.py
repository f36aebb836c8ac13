"""This file writes tiny models that take more than tokens, each with its processor, and the files that they read.

The models are those of `tiny_models` with weights that make their outputs depend on what is rounded. Vocabularies hold
the bytes and a few special tokens, so nothing is downloaded.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

TEXTS = ["noise without a form", "the second image", "3", "something else"]
RATE = 16_000
_SPECIAL = ["<s>", "</s>", "<pad>", "<image>"]


def write_vit(directory: Path) -> Any:
    """A classifier of images."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    model = tiny_models.vit(gain=3)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(directory)
    return _saved(model, directory)


def write_resnet(directory: Path) -> Any:
    """A classifier of images by convolutions."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 10}
    model = tiny_models.build("ResNet", "ForImageClassification", sizes)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875).save_pretrained(directory)
    return _saved(model, directory)


def write_clip(directory: Path) -> Any:
    """An encoder of images beside one of texts."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    letters = _bytes()
    vocabulary = _numbered([*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"])
    end = vocabulary["<|endoftext|>"]
    sizes = {**tiny_models.WIDTHS, **tiny_models.BLOCKS, "vocab_size": len(vocabulary)}
    text = transformers.CLIPTextConfig(**sizes, eos_token_id=end, pad_token_id=end, max_position_embeddings=24)
    vision = transformers.CLIPVisionConfig(**tiny_models.IMAGES)
    towers = {"text_config": text, "vision_config": vision, "projection_dim": 64}
    model = tiny_models.build("CLIP", "Model", towers, gain=3)
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    transformers.CLIPProcessor(_clip_images(), tokenizer).save_pretrained(directory)
    return _saved(model, directory)


def write_llava(directory: Path, chat_template: str | None = None) -> Any:
    """A llama that sees images through a CLIP encoder."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    tokens = _byte_tokenizer(_SPECIAL, "<s> $A", bos_token="<s>", extra_special_tokens={"image_token": "<image>"})
    image = tokens.convert_tokens_to_ids("<image>")
    text = transformers.LlamaConfig(
        **{**tiny_models.DECODER, "vocab_size": len(tokens), "max_position_embeddings": 256}
    )
    vision = transformers.CLIPVisionConfig(**tiny_models.IMAGES)
    sizes = {"text_config": text, "vision_config": vision, "image_token_index": image}
    model = tiny_models.build("Llava", "ForConditionalGeneration", sizes, gain=3)
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(_clip_images(), tokens, **how, chat_template=chat_template)
    processor.save_pretrained(directory)
    return _saved(model, directory)


def write_whisper(directory: Path) -> Any:
    """An encoder of sounds with a decoder of their transcripts; it hears one second."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    vocabulary = _numbered([*_bytes(), "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"])
    end = vocabulary["<|endoftext|>"]
    both = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()}
    special = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": end + 1}
    lengths = {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 32}
    given = {"vocab_size": len(vocabulary), "d_model": 64, **sizes, **special, **lengths}
    model = tiny_models.build("Whisper", "ForConditionalGeneration", given, gain=3)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[], language=None)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(directory)
    return _saved(model, directory)


def write_t5(directory: Path) -> Any:
    """An encoder of texts with a decoder of others."""
    tokenizer = _byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(directory)
    pad, end = tokenizer.convert_tokens_to_ids(["<pad>", "</s>"])
    special = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad}
    return _saved(tiny_models.t5(vocab_size=len(tokenizer), gain=2, **special), directory)


def write_images(folder: Path, captions: bool = False) -> list[Path]:
    """Four images, with captions beside them where wanted."""
    image = pytest.importorskip("PIL.Image", reason="pillow, for images")
    folder.mkdir()
    files = [folder / f"{number}.png" for number in range(4)]
    for number, file in enumerate(files):
        image.fromarray(pixels(number)).save(file)
        if captions:
            file.with_suffix(".txt").write_text(TEXTS[number] + "\n")
    return files


def pixels(number: int) -> np.ndarray:
    """Random pixels, uint8 `[40, 48, 3]`."""
    return np.random.default_rng(number).integers(0, 256, (40, 48, 3), np.uint8)


def write_sounds(folder: Path, transcripts: bool = False) -> list[Path]:
    """Four tones of half a second, with transcripts beside them where wanted."""
    folder.mkdir()
    files = [folder / f"{number}.wav" for number in range(4)]
    for number, file in enumerate(files):
        write_wave(file, tone(200 + 150 * number)[:, None])
        if transcripts:
            file.with_suffix(".txt").write_text(TEXTS[number] + "\n")
    return files


def tone(pitch: float, rate: int = RATE) -> np.ndarray:
    """Half a second of a sine, int16 `[samples]`."""
    return np.round(np.sin(2 * np.pi * pitch * np.arange(rate // 2) / rate) * 20_000).astype("<i2")


def write_wave(file: Path, samples: np.ndarray, rate: int = RATE) -> None:
    """A WAV file of samples `[samples, channels]`; of uint8 `[samples, channels, width]`, with bytes as they are."""
    with wave.open(str(file), "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(samples.shape[2] if samples.ndim == 3 else samples.itemsize)
        out.setframerate(rate)
        out.writeframes(samples.tobytes())


def write_pairs(file: Path) -> list[tuple[str, str]]:
    """Four records of a document and its summary."""
    pairs = [(f"a document of some length, number {number}", text) for number, text in enumerate(TEXTS)]
    file.write_text("".join(json.dumps({"document": one, "summary": other}) + "\n" for one, other in pairs))
    return pairs


def write_parquet(files: list[Path], kind: str, target: Path, column: str = "said") -> None:
    """A data set with a column `image` or `audio` of files, and one of their texts, as `datasets` writes one.

    `Dataset.from_dict` would take torchcodec to encode sounds.
    """
    datasets = pytest.importorskip("datasets", reason="the extra data")
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra data")
    held = datasets.Image() if kind == "image" else datasets.Audio()
    features = datasets.Features({"number": datasets.Value("int64"), kind: held, column: datasets.Value("string")})
    contents = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    rows = {"number": list(range(len(files))), kind: contents, column: TEXTS[: len(files)]}
    parquet.write_table(pyarrow.Table.from_pydict(rows, schema=features.arrow_schema), target)


def _saved(model: Any, directory: Path) -> Any:
    model.save_pretrained(directory)
    return model


def _clip_images() -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _bytes() -> list[str]:
    """The letters that stand for bytes in vocabularies of GPT-2's kind."""
    return sorted(pytest.importorskip("tokenizers", reason="the extra hf").pre_tokenizers.ByteLevel.alphabet())


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _byte_tokenizer(special: list[str], form: str, **options: Any) -> Any:
    """A tokenizer with a token for each byte, which writes texts as `form` says: `<s> $A`."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf")
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    vocabulary = _numbered([*_bytes(), *special])
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    added = [(token, vocabulary[token]) for token in form.split() if token != "$A"]
    found.post_processor = tokenizers.processors.TemplateProcessing(single=form, special_tokens=added)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>", pad_token="<pad>", **options)
