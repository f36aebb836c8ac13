"""Decoders with fused experts run in onnxruntime, and write the tokens of `quant.load`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from onnx_samples import relative_error, round_head
from samples import write_short_base
from serving_samples import gpt_oss
from slow_cases import quick_cases

import quant
from quant.export.checkpoint.load import load
from quant.generate.generate import cast_unquantized
from quant.recipes.plan_check import first_problem

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

from quant.export.engines.check_engine import forced_run, reference_run  # noqa: E402
from quant.export.onnx import engine_session, expert_nodes  # noqa: E402

MODELS: dict[str, Callable[..., Any]] = {
    "mixtral": tiny_models.mixtral,
    "qwen3_moe": tiny_models.qwen3_moe,
    "gpt_oss": gpt_oss,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NODES = {"int4a16_g32": "QMoE", "int8@16bit": "QMoE", "fp8@16bit": "MoE", "fp8_channel@16bit": "MoE", "16bit": "MoE"}
QUICK = {("mixtral", "int4a16_g32", "fp16"), ("qwen3_moe", "fp8@16bit", "fp16"), ("gpt_oss", "int4a16_g32", "fp32")}
CELLS = [(kind, format, dtype) for kind in MODELS for format in NODES for dtype in DTYPES]
CELLS.append(("gpt_oss_of_narrow_heads", "fp8@16bit", "fp32"))  # GroupQueryAttention does not take them
MODELS["gpt_oss_of_narrow_heads"] = lambda **options: gpt_oss(head_dim=12, **options)
ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(3))
PROMPTS = [[3, 5, 7, 9, 11], [*range(10, 27)]]


def quantized(model: Any, format: str) -> Any:
    """`16bit` are experts that are left as they are, beside linears in FP8."""
    if format == "16bit":
        return quant.quantize(model, "fp8@16bit", ROWS, solver="rtn", exclude=["*experts*"])
    return quant.quantize(model, format, ROWS, solver="rtn")


def session(path: Path) -> Any:
    """A session whose linears in INT4 do not round their inputs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("kind", "format", "dtype"), quick_cases(CELLS, lambda *cell: cell in QUICK), ids=lambda value: str(value)
)
def test_tokens_are_those_of_the_checkpoint(
    kind: str, format: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = quantized(MODELS[kind](dtype=DTYPES[dtype]), format)
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    exported = quant.export_model(tmp_path / "checkpoint", "onnx", tmp_path / "onnx", capacity=64)
    path = tmp_path / "onnx" / "model.onnx"
    # Every planned projection is in the receipt, compared with the checkpoint's files.
    compared = {layer["name"]: layer for layer in exported.layers}
    experts = [layer.name for layer in done.plan.quantized if "experts" in layer.name]
    assert len(experts) == (0 if format == "16bit" else 4)
    assert all(compared[name]["passed"] and compared[name]["checkpoint"] == 0 for name in experts)
    graph = onnx.load(path).graph
    nodes = [node for node in graph.node if "MoE" in node.op_type]
    assert [node.op_type for node in nodes] == [NODES[format]] * 2
    if NODES[format] == "QMoE":  # CUDA's provider loads scales of the input's dtype alone
        kinds = {t.data_type for t in graph.initializer for node in nodes if t.name in (node.input[3], node.input[6])}
        assert kinds == {onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.FLOAT}
    reference = load(tmp_path / "checkpoint")
    cast_unquantized(reference, "float16" if dtype == "fp16" else "float32")
    if format.startswith("int"):
        round_head(reference)
    expected = reference_run(reference, PROMPTS, 24)
    monkeypatch.setattr(engine_session, "loaded", lambda path, threads, gpu: session(path))
    run = forced_run(engine_session.OnnxruntimeSession(path), PROMPTS, expected.tokens, chunk=7)
    # In FP16 two tokens may be as likely as each other.
    ours, theirs = (np.take_along_axis(expected.logits, x.logits.argmax(-1)[..., None], -1) for x in (run, expected))
    assert (theirs - ours).max() <= (1e-2 if dtype == "fp16" else 0)
    error = relative_error(torch.from_numpy(run.logits), torch.from_numpy(expected.logits))
    assert error < (5e-3 if dtype == "fp16" else 2e-6)


@pytest.mark.slow
def test_scales_of_one_node_have_one_dtype(tmp_path: Path) -> None:
    done = quantized(tiny_models.qwen3_moe(dtype=torch.float16), "int4a16_g32")
    for layer in done.model.model.layers:
        layer.mlp.experts.gate_up_proj.scale[0, 0, 0] = 2.0**-20 * (1 + 2.0**-7)  # between two numbers of FP16
    quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0, dtype="fp16")
    graph = onnx.load(tmp_path / "onnx" / "model.onnx").graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    scales = [kinds[node.input[i]] for node in graph.node if node.op_type == "QMoE" for i in (3, 6)]
    assert scales == [onnx.TensorProto.FLOAT] * 4
    session(tmp_path / "onnx" / "model.onnx")


@pytest.mark.slow
def test_one_pass_has_attention_sinks(tmp_path: Path) -> None:
    done = quantized(gpt_oss(), "fp8@16bit")
    with pytest.raises(ValueError, match=r"window slides over 8 tokens.* with shapes=\"sequence=1:8:8\"") as refused:
        quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0)
    shapes = str(refused.value).rpartition("shapes=")[2].strip('"')
    quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0, shapes=shapes)
    with torch.no_grad():
        expected = done.model(ROWS[:, :8]).logits
    (logits,) = session(tmp_path / "onnx" / "model.onnx").run(None, {"input_ids": ROWS[:, :8].numpy()})
    assert relative_error(torch.from_numpy(logits), expected) < 2e-6


@pytest.mark.slow
def test_rows_of_gate_and_up_in_another_order_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = quantized(tiny_models.qwen3_moe(), "int4a16_g32")
    arranged = expert_nodes._arranged
    monkeypatch.setattr(expert_nodes, "_arranged", lambda x, is_up, **options: arranged(x, False, **options))
    with pytest.raises(quant.UserError, match=r"4 of 12 exported layers differ .* model.layers.\d.mlp.experts"):
        quant.export_model(done, "onnx", tmp_path / "onnx", capacity=0)


def test_formats_that_no_node_takes_are_refused_with_formats_that_one_takes(tmp_path: Path) -> None:
    for format, words in {"fp8": "with inputs in fp8", "nvfp4a16": "in nvfp4", "int8": "with inputs in int8"}.items():
        done = quantized(tiny_models.qwen3_moe(), format)
        with pytest.raises(ValueError, match=rf"gate_up_proj \[4, 64, 64\]: fused experts {words}.*vLLM") as refused:
            quant.export_model(done, "onnx", tmp_path / "onnx")
        # `test_tokens_are_those_of_the_checkpoint` runs what is advised.
        advised = str(refused.value).partition("quantize them to ")[2].partition(", or serve")[0]
        assert {*advised.replace(" or ", ", ").split(", ")} <= NODES.keys()
    done = quantized(tiny_models.qwen3_moe(), "int4a16_g32")
    with pytest.raises(ValueError, match=r"a static graph cannot.*for onnxruntime \(to=\"onnx\"\)"):
        quant.export_model(done, "onnx", tmp_path / "onnx", target="tensorrt")
    assert not (tmp_path / "onnx").exists()


def test_plan_validate_agrees_with_the_export() -> None:
    for format, allowed in {"int4a16_g32": True, "int8@16bit": True, "fp8": False, "nvfp4a16": False}.items():
        plan = quantized(tiny_models.qwen3_moe(), format).plan
        for target in ("onnxruntime", "onnxruntime-genai"):
            problem = first_problem(plan, target)
            assert (problem is None) is allowed, (format, target, problem)


def test_experts_with_another_gate_are_refused_by_name() -> None:
    model = gpt_oss()
    expert_nodes.check_experts(model, "onnxruntime")
    model.model.layers[1].mlp.experts._apply_gate = lambda x: x[..., ::2] * x[..., 1::2].tanh()
    words = r"layers.1.mlp.experts.*: fused experts \(GptOssExperts\) have another gate than those of silu and gpt-oss"
    with pytest.raises(ValueError, match=f"{words}.*vLLM"):
        expert_nodes.check_experts(model, "onnxruntime")


def test_experts_of_a_transformers_without_norms_of_experts() -> None:
    """5.17 has no such attribute."""
    model = tiny_models.qwen3_moe()
    experts = [module for module in model.modules() if expert_nodes.is_fused(module)]
    for module in experts:
        del module.has_post_expert_norm
    assert experts
    expert_nodes.check_experts(model, "onnxruntime")
    with pytest.raises(ValueError, match="a static graph cannot"):
        expert_nodes.check_experts(model, "tensorrt")


@pytest.mark.parametrize(("kind", "format"), [("mixtral", "int8@16bit"), ("gpt_oss", "fp8@16bit")])
def test_experts_of_genai(kind: str, format: str, tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")
    done = quantized(MODELS[kind](), format)
    done.model.generation_config.pad_token_id = 63
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    base = write_short_base(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / file, tmp_path / "checkpoint" / file)
    quant.export_model(tmp_path / "checkpoint", "onnx", tmp_path / "onnx", genai=True)
    model = genai.Model(str(tmp_path / "onnx"))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPTS[0]) + 16)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([PROMPTS[0]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    ours = load(tmp_path / "checkpoint").generate(torch.tensor([PROMPTS[0]]), max_new_tokens=16, do_sample=False)
    assert list(generator.get_sequence(0)) == ours[0].tolist()
