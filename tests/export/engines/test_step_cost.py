"""What `quant export` says of the cost of a step, next to the cache that transformers fills."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from quant.base.errors import megabytes
from quant.export import export_model
from quant.export.export_model import ExportJob


def _job(model: Any, **options: Any) -> ExportJob:
    names = "directory plan out overwrite shapes inputs attention attention_scales dtype genai kv_cache lm_head target"
    given = dict.fromkeys([*names.split(), "backend", "allow_fallback", "features", "progress"])
    return ExportJob(**{**given, "model": model, "directory": Path(), "out": Path(), **options})


@pytest.mark.parametrize(("kv_cache", "of_16_bit"), [(None, 1.0), ("fp8", 0.5), ("nvfp4", 9 / 32)])
@pytest.mark.parametrize("make", [tiny_models.qwen3, tiny_models.mistral])
def test_an_engine_reads_the_whole_cache(make: Any, kv_cache: str | None, of_16_bit: float) -> None:
    """The bytes are those of transformers' cache, had it as many tokens; sliding windows do not shorten it."""
    model = make(dtype=torch.bfloat16)
    ids = torch.zeros(1, 4, dtype=torch.long)
    layers = model(ids, use_cache=True).past_key_values.layers
    of_a_token = sum(x.numel() * x.element_size() // 4 for layer in layers for x in (layer.keys, layer.values))
    (note,) = export_model._cost_notes(_job(model, kind="tensorrt", capacity=64, kv_cache=kv_cache))
    size = megabytes(64 * of_a_token * of_16_bit)
    assert note == (
        f"each step reads all 64 tokens of a row's cache, filled or not, {size}: a smaller capacity= is faster"
    )


def test_onnxruntime_reads_what_is_filled() -> None:
    """GroupQueryAttention stops at a row's last key, so a file for onnxruntime has no such cost."""
    assert export_model._cost_notes(_job(tiny_models.qwen3(), kind="onnx", capacity=64)) == []
