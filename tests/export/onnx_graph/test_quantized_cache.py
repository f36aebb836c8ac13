"""A serving graph over a KV cache in FP8 or NVFP4, run in numpy, writes the tokens of the model with such a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import torch
from onnx_samples import attention_operators
from serving_samples import CAPACITY, EvaluatorSession
from torch import nn

from quant.api.quantize import quantize
from quant.calibration.kv_cache import collect_attention_scales, kv_scale_tensors
from quant.formats.format import FORMATS
from quant.kernels.kv_pages import round_kv
from quant.recipes.plan import Plan
from quant.runtime.attention import quantized_attention

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.engines.check import forced_run  # noqa: E402 -- needs onnx
from quant.engines.open import open_session  # noqa: E402 -- as above
from quant.export.onnx_graph.decoder import Attention, Keys, attending  # noqa: E402 -- as above
from quant.export.onnx_graph.export import write_onnx  # noqa: E402 -- as above
from quant.export.onnx_graph.verify import check_file  # noqa: E402 -- as above

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
PROMPTS, NEW = [ROWS[0, :5].tolist(), ROWS[1, :40].tolist(), ROWS[2, :33].tolist()], 8


class Rounded(Attention):
    """Attention over keys and values that were rounded to a cache's format, without a cache."""

    rounding: Any = None

    def computed(self, module: nn.Module, name: str, query: torch.Tensor, keys: Keys, scale: float) -> torch.Tensor:
        k_scale, v_scale = (s.float().flatten().expand(keys.key.shape[1]) for s in self.rounding[1][name])
        k, v = round_kv(keys.key, self.rounding[0], k_scale), round_kv(keys.value, self.rounding[0], v_scale)
        return super().computed(module, name, query, keys._replace(key=k, value=v), scale)


def logits_of(model: Any) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens after each prompt, and their logits, each from a pass over the whole text."""
    written, logits = [], []
    for row in PROMPTS:
        tokens = list(row)
        for _ in range(NEW):
            with torch.no_grad():
                logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().numpy())
            tokens.append(int(logits[-1].argmax()))
        written.append(tokens[len(row) :])
    return written, np.stack(logits).reshape(len(PROMPTS), NEW, -1)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_tokens_and_logits(tmp_path: Path, name: str) -> None:
    model, format = serving_samples.decoder("llama-64", dtype=torch.float16), FORMATS[name]
    plan = quantize(model, "fp8", ROWS, solver="rtn").plan
    scales = collect_attention_scales(model, ROWS, kv_format=format, attention_format=None)
    options: dict[str, Any] = {"attention_scales": scales}
    if name == "fp8":
        # As `quant.load` leaves them in the modules of a checkpoint.
        for key, scale in kv_scale_tensors(scales, torch.float16).items():
            module, _, part = key.rpartition(".")
            model.get_submodule(module).register_buffer(part, scale)
        options = {}
    path = write_onnx(model, tmp_path / "m.onnx", capacity=CAPACITY, plan=plan, kv_cache=format, **options)
    check_file(path)
    if name == "fp8":
        with quantized_attention(model, attention="16bit", kv_cache="fp8"):
            tokens, expected = logits_of(model)
    else:
        rounded = Rounded({module: n for n, module in model.named_modules()})
        rounded.rounding = format, {n: (scale.k, scale.v) for n, scale in scales.items()}
        with attending(model, rounded, masked=False):
            tokens, expected = logits_of(model)
    assert len({token for row in tokens for token in row}) > 8
    session = EvaluatorSession(path, attention_operators())
    for chunk in (None, 16):
        computed = forced_run(session, PROMPTS, np.array(tokens), chunk=chunk)
        # Half precision rounds sums in another order, and a few inputs to another code of FP8.
        error = np.linalg.norm(computed.logits - expected) / np.linalg.norm(expected)
        assert error < 0.02, (chunk, error)
        assert (computed.tokens == np.array(tokens)).mean() > 0.9, chunk


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "capacity", "words"),
    [
        ("mistral", torch.float16, "fp8", 64, r"self_attn: its window slides over 64 tokens.*no windows; .*16bit"),
        ("llama-64", torch.float32, "fp8", 64, r"is for FP16 and BF16 models; pass --dtype bf16"),
        ("llama-64", torch.float16, "fp8", 40, r"--capacity 40: a cache in fp8 holds a multiple of 32.*--capacity 32"),
        ("qwen3", torch.float16, "nvfp4", 64, r"takes heads of 64, 96, 128, 192, 256, these are of 32"),
        ("llama-64", torch.float16, "nvfp4", 64, r"no scales of a KV cache in nvfp4; pass attention_scales"),
        ("llama-64", torch.float16, "fp8_token", 64, r"the plugin has caches in fp8 and nvfp4"),
        ("llama-64", torch.float16, "fp8", 0, r"is for a decoder's serving graph; leave --capacity 0"),
    ],
)
def test_caches_that_the_plugin_does_not_have(
    tmp_path: Path, kind: str, dtype: torch.dtype, name: str, capacity: int, words: str
) -> None:
    options = {"head_dim": 32} if kind == "qwen3" else {}
    model = serving_samples.decoder(kind, dtype=dtype, **options)
    with pytest.raises(ValueError, match=words):
        write_onnx(model, tmp_path / "m.onnx", capacity=capacity, kv_cache=FORMATS[name])
    assert list(tmp_path.iterdir()) == []


def test_fp8_attention_and_a_cache_of_the_plugin_do_not_go_together(tmp_path: Path) -> None:
    model = serving_samples.decoder("llama-64", dtype=torch.float16)
    fp8 = FORMATS["fp8"]
    scales = collect_attention_scales(model, ROWS[:1], kv_format=fp8, attention_format=fp8)
    options = {"plan": Plan((), attention=fp8), "attention_scales": scales}
    with pytest.raises(ValueError, match="attends in 16 bit over its cache; pass --attention none"):
        write_onnx(model, tmp_path / "m.onnx", capacity=64, kv_cache=fp8, **options)
    path = write_onnx(model, tmp_path / "m.onnx", capacity=64, kv_cache=fp8, attention="none", **options)
    with pytest.raises(ValueError, match=r"QuantCacheAttention.*--kv-cache files are for TensorRT"):
        open_session(path)
