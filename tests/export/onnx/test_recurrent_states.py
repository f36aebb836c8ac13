"""Hybrids in onnxruntime: convolutions, Mamba-2 and gated delta rules keep their states in caches of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from onnx_samples import relative_error

import quant
from quant.calibration.texts.self_written import _step
from quant.export.checkpoint.load import load

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.engines.check_engine import (  # noqa: E402
    generate_tokens,
    open_session,
    read,
    reference_run,
)
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402
from quant.export.onnx.recurrent_states import HybridCache  # noqa: E402
from quant.export.onnx.serving import ServingGraph, cache_shapes  # noqa: E402

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2": {**tiny_models.DECODER, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Bamba": {**tiny_models.DECODER, **MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**tiny_models.DECODER, **MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "NemotronH": {
        **tiny_models.DECODER, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
    },
    "Qwen3Next": {**tiny_models.DECODER, **DELTA, **LINEAR, "mlp_only_layers": [0, 1]},
    "Qwen3_5": {**tiny_models.DECODER, **DELTA, **LINEAR},
}  # fmt: skip
PROMPTS = [[7, 3, 50, 21, 9], [*range(60, 40, -1)], [1, 2]]
NEW = 32


def hybrid(family: str) -> Any:
    config = "Qwen3_5Text" if family == "Qwen3_5" else family
    return tiny_models.build(family, "ForCausalLM", HYBRIDS[family], gain=4, config_family=config)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Tokens of transformers' own loop over its own cache."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", HYBRIDS)
def test_two_steps_over_the_states_are_one_pass(family: str) -> None:
    """In PyTorch: two rows of which one ends earlier, and a third step that resets one of them."""
    model = hybrid(family)
    cache = HybridCache({module: name for name, module in model.named_modules()})
    with cache.replacing(model):
        inputs = cache.cache_inputs(cache_shapes(model, cache), 16)
    cache.check(model, inputs)
    first, other = torch.tensor([PROMPTS[0]]), torch.tensor([[8, 9, 4]])
    with torch.no_grad():
        expected = [model(x, use_cache=False).logits[0, -1] for x in (first, other)]
        with cache.replacing(model):
            graph = ServingGraph(model, cache)

            def step(ids: list[list[int]], lengths: list[int], last: list[int], past: Any) -> tuple[Any, list[Any]]:
                options = {"input_ids": ids, "lengths": lengths, "last": last}
                logits, *new = graph({name: torch.tensor(x) for name, x in options.items()}, past)
                return logits, new

            caches = [torch.full_like(x.example, 5.0) for x in inputs.values()]
            _, caches = step([[7, 3, 50], [60, 59, 58]], [0, 0], [2, 1], caches)
            logits, _ = step([[21, 9, 0], [8, 9, 4]], [3, 0], [1, 2], caches)
    for found, right in zip(logits, expected, strict=True):
        assert relative_error(found, right) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Rows of three lengths, read in one step and in several, over caches that held other numbers before."""
    done = quant.quantize(hybrid(family), "fp8@16bit", torch.tensor([PROMPTS[1]]), solver="rtn")
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    assert {"in_proj", "out_proj"} <= {x.name.rpartition(".")[2].removesuffix("_qkvz").removesuffix("_qkv")
                                       for x in done.plan.quantized}  # fmt: skip
    exported = quant.export_model(tmp_path / "checkpoint", "onnx", tmp_path / "onnx", capacity=64)
    assert len(exported.layers) == len(done.plan.quantized)
    assert all(layer["passed"] and layer["checkpoint"] == 0 for layer in exported.layers)
    reference = load(tmp_path / "checkpoint")
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 6
    session: Any = open_session(tmp_path / "onnx")
    assert generate_tokens(session, PROMPTS, NEW) == expected
    assert generate_tokens(Spoilt(session), PROMPTS, NEW, chunk=4) == expected
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.load(tmp_path / "onnx" / "model.onnx").graph.input
    }
    states = [name for name in types if name.startswith(("past_state", "past_conv"))]
    assert states
    assert {types[name] for name in states} == {onnx.TensorProto.FLOAT}


class Spoilt:
    """A session whose new caches hold large numbers: a row's first token must reset its states."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def begin(self, rows: int) -> None:
        self.session.begin(rows)
        random = np.random.default_rng(0)
        for cache in self.session._caches.values():
            cache.update_inplace(100 * random.standard_normal(cache.shape(), np.float32))


def test_steps_over_a_cache_know_their_positions() -> None:
    """Both loops of ours over transformers' cache give the logits of one pass without it."""
    model, prompt = hybrid("Bamba"), PROMPTS[0]
    run = reference_run(model, [prompt], 6)
    ids = torch.tensor([[*prompt, *run.tokens[0].tolist()]])
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0]
        assert relative_error(torch.from_numpy(run.logits[0]), whole[len(prompt) - 1 : -1]) < 1e-5
        _, cache = _step(model, ids[:, : len(prompt)], None)
        assert relative_error(_step(model, ids[:, : len(prompt) + 1], cache)[0][0, -1], whole[len(prompt)]) < 1e-5


def test_a_state_in_half_precision_stays_in_fp32(tmp_path: Path) -> None:
    model = hybrid("Qwen3Next").half()
    path = write_onnx(model, tmp_path / "model.onnx", capacity=64, attention="none", runtime="onnxruntime")
    session = open_session(path)
    assert session.dtype == "float16"
    caches = session._dtypes  # type: ignore[attr-defined]
    assert caches["past_state.0"] == "float32"
    assert caches["past_conv.0"] == caches["past_key.0"] == "float16"
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1].float().numpy()
    session.begin(1)
    logits = read(session, [PROMPTS[1]], chunk=7)[0]
    assert np.linalg.norm(logits - expected) < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: hybrid("Bamba"), {"runtime": "tensorrt"}, r"linear_attention|mamba.*keep another state; serve its"),
        (lambda: jamba(), {"runtime": "onnxruntime"}, "keeps 4 tensors from token to token, and a graph 3"),
    ],
)
def test_models_whose_states_no_graph_holds(build: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_onnx(build(), tmp_path / "model.onnx", capacity=64, attention="none", **options)
    assert not list(tmp_path.iterdir())


def test_a_quantized_convolution_of_a_recurrent_layer_is_refused(tmp_path: Path) -> None:
    data = torch.tensor([PROMPTS[1]])
    done = quant.quantize(hybrid("Bamba"), "fp8@16bit", data, solver="rtn", include=["*conv1d"])
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"mamba\.conv1d: .* quantize again with exclude="):
        quant.export_model(tmp_path / "checkpoint", "onnx", tmp_path / "onnx", capacity=64)


def jamba() -> Any:
    """Mamba-1 and attention."""
    sizes = {
        **tiny_models.DECODER, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "num_experts": 1, "use_mamba_kernels": False,
    }  # fmt: skip
    return tiny_models.build("Jamba", "ForCausalLM", sizes)
