"""A decoder's package reads prompts and decodes: its graph and its compiled code write the tokens of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import torch
from serving_samples import CAPACITY, NEW

import quant

pytest.importorskip("transformers", reason="needs the extra hf")

from quant.engines.aoti_session import AotiSession
from quant.engines.check import forced_run, reference_run
from quant.engines.loop import generate_tokens
from quant.export.packages.aoti_decoder import decoder_program

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))


class GraphSession:
    """A session over the graph that the package is compiled from, which PyTorch runs op by op."""

    backend, dtype, plan = "graph", "float32", ""

    def __init__(self, model: Any, capacity: int) -> None:
        program, self._shapes = decoder_program(model, capacity)
        self._run, self.capacity = program.module(), capacity

    def most_rows(self) -> int:
        return 8

    def begin(self, rows: int) -> None:
        """The cache holds large random numbers, which no token may see."""
        generator = torch.Generator().manual_seed(3)
        self.caches = [
            50 * torch.randn(rows, heads, self.capacity, dim, generator=generator).to(dtype)
            for heads, dim, dtype in self._shapes
        ]

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": ids, "lengths": lengths, "last": last}
        logits = self._run({name: torch.from_numpy(value) for name, value in inputs.items()}, self.caches)
        result: np.ndarray = logits.float().numpy()
        return result


def quantized(kind: str, format: str) -> Any:
    model = serving_samples.decoder(kind)
    quant.quantize(model, format, ROWS, solver="rtn")
    return model


@pytest.mark.parametrize(("kind", "format"), [("llama-64", "nvfp4a16"), ("gemma3", "int4a16"), ("mistral", "mxfp6a16")])
def test_the_graph_writes_the_models_tokens(kind: str, format: str) -> None:
    """Rows of three lengths, whole and in chunks, over a cache that held other numbers."""
    model = quantized(kind, format)
    rows = serving_samples.prompts()
    expected = serving_samples.greedy_tokens(model, rows, 8)
    session = GraphSession(model, CAPACITY)
    assert generate_tokens(session, rows, 8) == expected
    assert generate_tokens(session, rows, 8, chunk=64) == expected


def test_only_the_new_tokens_are_written() -> None:
    session = GraphSession(quantized("llama-64", "int4a16"), 64)
    session.begin(2)
    before = [cache.clone() for cache in session.caches]
    session.step(np.array([[1, 2, 3], [4, 5, 6]]), np.array([10, 20]), np.array([2, 2]))
    for cache, old in zip(session.caches, before, strict=True):
        changed = (cache != old).all(-1)  # [rows, kv_heads, tokens]
        expected = torch.zeros_like(changed)
        expected[0, :, 10:13] = expected[1, :, 20:23] = True
        assert torch.equal(changed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "format"), [("llama-64", "nvfp4"), ("qwen3", "fp8"), ("gemma3", "int4a16")])
def test_the_package_writes_the_models_tokens(
    decoder_package: Callable[..., Path], tmp_path: Path, kind: str, format: str
) -> None:
    """Equal tokens in 16-bit inputs; where inputs are rounded, another order of sums may round one the other way."""
    model = quantized(kind, format)
    session = AotiSession(decoder_package(model, tmp_path / "model.pt2", CAPACITY, device="cpu"), unsafe_load=True)
    assert (session.capacity, session.dtype) == (CAPACITY, "float32")
    rows = serving_samples.prompts()
    if format == "int4a16":
        expected = serving_samples.greedy_tokens(model, rows)
        assert generate_tokens(session, rows, NEW) == expected
        assert generate_tokens(session, rows, NEW, chunk=64) == expected
        return
    reference = reference_run(model, rows, NEW)
    for chunk in (None, 64):
        run = forced_run(session, rows, reference.tokens, chunk=chunk)
        assert (run.tokens == reference.tokens).mean() > 0.95
        assert np.linalg.norm(run.logits - reference.logits) < 0.05 * np.linalg.norm(reference.logits)
