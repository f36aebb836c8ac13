"""A serving graph writes the tokens that its model writes, for rows of different lengths, whole and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import torch
from serving_samples import CAPACITY, NEW, EvaluatorSession

import quant

pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.base.errors import UserError  # noqa: E402 -- as above
from quant.export.engines.check_engine import (  # noqa: E402 -- needs onnx  # noqa: E402 -- as above
    Sampling,
    compare,
    forced_run,
    generate_tokens,
    open_session,
    probabilities,
    reference_run,
)
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402 -- as above

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
KINDS = [kind for kind in serving_samples.DECODERS if kind != "llama-64"]


def exported(kind: str, format: str, folder: Path, **options: Any) -> tuple[Any, Path]:
    """A tiny quantized model, and its serving graph."""
    model = serving_samples.decoder(kind, **options)
    plan = quant.quantize(model, format, ROWS, solver="rtn").plan
    return model, write_onnx(model, folder / "model.onnx", capacity=CAPACITY, plan=plan)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return exported("llama-64", "int4a16", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def with_garbage(session: Any) -> Any:
    """The session, whose empty cache holds large random numbers."""
    begin = session.begin

    def begin_dirty(rows: int) -> None:
        begin(rows)
        random = np.random.default_rng(3)
        for name, cache in session._caches.items():
            values = 50 * random.normal(size=cache.shape()).astype(session.dtype)
            session._caches[name] = onnxruntime.OrtValue.ortvalue_from_numpy(values)

    session.begin = begin_dirty
    return session


def check_tokens(model: Any, session: Any) -> None:
    """Exactly the model's tokens, for models whose inputs are not rounded."""
    rows = serving_samples.prompts()
    expected = serving_samples.greedy_tokens(model, rows)
    assert len({token for row in expected for token in row}) > 10  # a model that repeats itself proves nothing
    for chunk in (None, 64):
        assert generate_tokens(session, rows, NEW, chunk=chunk) == expected, chunk


def check_steps(model: Any, session: Any) -> None:
    """The model's tokens at every step, but for ties: another order of sums rounds an input the other way at times."""
    rows = serving_samples.prompts()
    expected = reference_run(model, rows, NEW)
    assert len(set(expected.tokens.flatten().tolist())) > 10
    for chunk in (None, 64):
        computed = forced_run(session, rows, expected.tokens, chunk=chunk)
        differing = np.argwhere(computed.tokens != expected.tokens)
        assert len(differing) <= 2, chunk
        for row, step in differing:
            logits = expected.logits[row, step]
            assert logits.max() - logits[computed.tokens[row, step]] < 0.05 * logits.std(), (chunk, row, step)


def test_rows_of_different_lengths(llama: tuple[Any, Path]) -> None:
    model, path = llama
    session = with_garbage(open_session(path))
    assert session.capacity == CAPACITY
    check_tokens(model, session)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder(kind: str, tmp_path: Path) -> None:
    model, path = exported(kind, "int4a16", tmp_path)
    check_tokens(model, with_garbage(open_session(path)))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4a16_g64", "int4a16_g32"])
def test_groups_of_int4(format: str, tmp_path: Path) -> None:
    model, path = exported("llama-64", format, tmp_path)
    check_tokens(model, open_session(path))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8", "fp8_channel", "int8", "int8_static"])
def test_every_format(format: str, tmp_path: Path) -> None:
    model, path = exported("llama-64", format, tmp_path)
    check_steps(model, with_garbage(open_session(path)))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8", "fp8_channel", "int8", "int4a16"])
def test_fp16(format: str, tmp_path: Path) -> None:
    model, path = exported("llama-64", format, tmp_path, dtype=torch.float16)
    session = with_garbage(open_session(path))
    assert session.dtype == "float16"
    # Sums that are rounded to FP16 round more inputs the other way.
    assert compare(model, session, serving_samples.prompts(), NEW).passed


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4a16", "mxfp8"])
def test_formats_of_tensorrt_in_the_reference_evaluator(format: str, tmp_path: Path) -> None:
    model, path = exported("llama-64", format, tmp_path)
    with pytest.raises(ValueError, match=r"model\.onnx: onnxruntime .* does not load it: .* are for TensorRT"):
        open_session(path)
    check_steps(model, EvaluatorSession(path))


def test_a_row_that_fills_the_cache_in_steps_that_do_not_divide_it(llama: tuple[Any, Path]) -> None:
    """The last steps begin before the first token that is missing, because a step must end within the cache."""
    model, path = llama
    rows = [ROWS.flatten()[:11].tolist(), ROWS.flatten()[: CAPACITY - 2].tolist()]
    expected = serving_samples.greedy_tokens(model, rows, 2)
    session = with_garbage(open_session(path))
    assert generate_tokens(session, rows, 2, chunk=48) == expected
    with pytest.raises(UserError, match=r"a prompt has 254 tokens and 3 more are wanted, but the cache holds 256"):
        generate_tokens(session, rows, 3)


def test_a_row_ends_at_a_stop_and_the_others_go_on(llama: tuple[Any, Path]) -> None:
    model, path = llama
    rows = serving_samples.prompts()
    expected = serving_samples.greedy_tokens(model, rows)
    stop = expected[1][2]
    heard: list[tuple[int, int]] = []
    session = open_session(path)
    written = generate_tokens(session, rows, NEW, stops={stop}, on_token=lambda *both: heard.append(both))
    for row, tokens in enumerate(expected):
        ends = tokens.index(stop) + 1 if stop in tokens else NEW
        assert written[row] == tokens[:ends]
        assert [token for index, token in heard if index == row] == written[row]


def test_sampling_draws_from_the_likeliest_tokens() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    assert np.allclose(probabilities(logits, Sampling(1.0)), [0.5, 0.2, 0.2, 0.1])
    assert np.allclose(probabilities(logits, Sampling(1.0, top_k=2)), [5 / 7, 2 / 7, 0, 0])
    assert np.allclose(probabilities(logits, Sampling(1.0, top_p=0.6)), [5 / 7, 2 / 7, 0, 0])
    assert np.allclose(probabilities(logits, Sampling(0.5)), np.array([25, 4, 4, 1]) / 34)
    with pytest.raises(UserError, match=r"top_p= is 0; expected above 0"):
        Sampling(1.0, top_p=0)


def test_sampling_is_repeatable(llama: tuple[Any, Path]) -> None:
    session, rows = open_session(llama[1]), serving_samples.prompts()[:1]
    first, again, other = (generate_tokens(session, rows, 16, sampling=Sampling(2.0, seed=n)) for n in (1, 1, 2))
    assert first == again != other


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.onnx: no such file"):
        open_session(tmp_path / "none.onnx")
    model = serving_samples.decoder("llama-64", num_hidden_layers=1)
    path = write_onnx(model, tmp_path / "once.onnx")
    with pytest.raises(UserError, match=r"no serving graph of a decoder \(its inputs are input_ids\)"):
        open_session(path)
