"""A serving graph over a KV cache in FP8 or NVFP4, run in numpy, has the codes and logits of the model over it."""

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

from quant.calibration.attention_scales import collect_attention_scales, kv_scale_tensors
from quant.formats.format import FORMATS
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.attention.kv_pages import decode_kv, encode_kv
from quant.run.api import quantize

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.engines.check_engine import forced_run, open_session  # noqa: E402 -- needs onnx
from quant.export.onnx.compare_with_torch import check_file  # noqa: E402 -- as above
from quant.export.onnx.decoder_graph import Attention, Keys, attending  # noqa: E402 -- as above
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402 -- as above
from quant.export.tensorrt.build import check_backend  # noqa: E402 -- as above

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
PROMPTS, NEW = [ROWS[0, :5].tolist(), ROWS[1, :40].tolist(), ROWS[2, :33].tolist()], 2
WRITTEN = ROWS[3, : len(PROMPTS) * NEW].reshape(len(PROMPTS), NEW).numpy()


class OverCache(Attention):
    """Attention over the keys and values `stored` in each layer's cache; `own` gets those that the model computed."""

    stored: Any = ()
    own: Any = ()

    def computed(self, module: nn.Module, name: str, query: torch.Tensor, keys: Keys, scale: float) -> torch.Tensor:
        key, value = (part[:, :, : keys.key.shape[2]].to(query.dtype) for part in self.stored[len(self.own)])
        self.own.append((keys.key, keys.value))
        return super().computed(module, name, query, keys._replace(key=key, value=value), scale)


def logits_of(model: Any, row: int) -> np.ndarray:
    """The logits of each token after the prompt, `[NEW, vocabulary]`, from one pass over the whole text."""
    text = [*PROMPTS[row], *WRITTEN[row, :-1]]
    with torch.no_grad():
        logits = model(torch.tensor([text]), use_cache=False).logits[0, len(PROMPTS[row]) - 1 :]
    return logits.float().numpy()


def difference(computed: np.ndarray, expected: np.ndarray) -> float:
    """The relative error of logits."""
    return float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_codes_and_logits(tmp_path: Path, name: str) -> None:
    """The model over the graph's own cache has the graph's logits, and its keys and values round to the graph's codes.

    Half precision sums in another order here and there, which rounds some values to a neighbouring code; an own cache
    of the model would therefore differ by more than the graph's arithmetic does. Layers with inputs in FP8 would, too.
    """
    model = serving_samples.decoder("llama-64", num_hidden_layers=1, dtype=torch.float16)
    format = FORMATS[name]
    plan = quantize(model, "int4a16", ROWS, solver="rtn").plan
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
    with pytest.raises(ValueError, match=r"QuantCacheAttention.*kv_cache= files are for TensorRT"):
        open_session(path)
    with pytest.raises(ValueError, match=r"from its C\+\+ library alone; pass backend=\"tensorrt_rtx\", or .*16bit"):
        check_backend(onnx.load(path), "tensorrt")
    for chunk in (None, 16):
        session = EvaluatorSession(path, attention_operators())
        logits = forced_run(session, PROMPTS, WRITTEN, chunk=chunk).logits
        for row in range(len(PROMPTS)):
            over = OverCache({module: module_name for module_name, module in model.named_modules()})
            over.own, over.stored, codes = [], [], []
            for layer, pair in enumerate(scales.values()):
                heads = [scale.float().flatten().expand(2) for scale in (pair.k, pair.v)]
                stored = [_cached(session, part, layer, row, name) for part in ("key", "value")]
                codes += [(*x, scale) for x, scale in zip(stored, heads, strict=True)]
                over.stored.append(
                    [decode_kv(x[0], format, scale, x[1]) for x, scale in zip(stored, heads, strict=True)]
                )
            with attending(model, over, masked=False):
                expected = logits_of(model, row)
            assert difference(logits[row], expected) < 0.003, (chunk, row)
            for computed, (stored_codes, blocks, scale) in zip(sum(over.own, ()), codes, strict=True):
                rounded, _, rounded_blocks = encode_kv(computed, format, scale)
                assert _differing(rounded, stored_codes) < 0.06, (chunk, row)
                assert blocks is None or _differing(rounded_blocks, blocks) < 0.06, (chunk, row)
            if name == "fp8":
                with quantized_attention(model, attention="16bit", kv_cache="fp8"):
                    assert difference(logits[row], logits_of(model, row)) < 0.01, (chunk, row)


def _cached(session: EvaluatorSession, part: str, layer: int, row: int, name: str) -> list[torch.Tensor | None]:
    """Codes `[1, kv_heads, capacity, ·]` of a row of a cache, and their block scales."""

    def tensor(input_name: str) -> torch.Tensor:
        return torch.from_numpy(session.caches[input_name][row : row + 1].view(np.uint8).copy())

    codes = tensor(f"past_{part}.{layer}")
    if name == "fp8":
        return [codes.view(torch.float8_e4m3fn), None]
    return [codes, tensor(f"past_{part}_blocks.{layer}").view(torch.float8_e4m3fn)]


def _differing(expected: Any, stored: Any) -> float:
    """The share of bytes that differ, of the tokens that were computed."""
    expected, stored = expected.view(torch.uint8), stored.view(torch.uint8)
    return float((expected != stored[:, :, : expected.shape[2]]).float().mean())


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "capacity", "words"),
    [
        ("mistral", torch.float16, "fp8", 64, r"self_attn: its window slides over 64 tokens.*no windows; .*16bit"),
        ("llama-64", torch.float32, "fp8", 64, r"is for FP16 and BF16 models; pass dtype=.bf16"),
        ("llama-64", torch.float16, "fp8", 40, r"capacity=40: a cache in fp8 holds a multiple of 32.*capacity=32"),
        ("qwen3", torch.float16, "nvfp4", 64, r"takes heads of 64, 96, 128, 192, 256, these are of 32"),
        ("llama-64", torch.float16, "nvfp4", 64, r"no scales of a KV cache in nvfp4; pass attention_scales"),
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


def test_a_cache_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = serving_samples.decoder("llama-64", dtype=torch.float16)
    scales = collect_attention_scales(model, ROWS[:1], kv_format=FORMATS["nvfp4"], attention_format=None)
    # Two rows, K and V, of codes and block scales: 9 bytes for 16 values.
    values = 64 * sum(layer.self_attn.k_proj.out_features for layer in model.model.layers)
    nbytes = 2 * 2 * values * 9 // 16
    monkeypatch.setattr("quant.export.onnx.serving.memory_left", lambda: nbytes - 1)
    with pytest.raises(ValueError, match=r"capacity=64: two rows of the KV cache, .*; lower it"):
        write_onnx(model, tmp_path / "m.onnx", capacity=64, kv_cache=FORMATS["nvfp4"], attention_scales=scales)
    assert list(tmp_path.iterdir()) == []
