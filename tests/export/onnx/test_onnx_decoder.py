"""Transformers models become graphs; the reference evaluator runs the files, and the model itself is the peer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
import tiny_models
import torch
from onnx_samples import attention_operators, relative_error
from torch import nn

from quant.calibration.attention_scales import collect_attention_scales
from quant.formats.format import FORMATS
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.onnx.compare_with_torch import (  # noqa: E402
    check_file,
    evaluator,
    to_numpy,
)
from quant.export.onnx.decoder_graph import Attention, Graph, GraphInput, attending, model_inputs, operand_scales  # noqa: E402
from quant.export.onnx.export_onnx import write_onnx  # noqa: E402

FP8 = FORMATS["fp8"]
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "layer_types": ["linear_attention"] * 2}
BLOOM = {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}
BART = {"vocab_size": 64, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}


def llama(dtype: torch.dtype, layers: int = 1) -> Any:
    sizes = {"vocab_size": 96, "head_dim": 64, "max_position_embeddings": 128}
    return tiny_models.llama(**sizes, num_hidden_layers=layers, dtype=dtype)


@pytest.fixture(scope="module")
def decoder() -> tuple[Any, Plan]:
    """FP8 weights and 16-bit inputs, in FP32: no rounding at run time that could go two ways."""
    model = llama(torch.float32, layers=2)
    plan = quantize(model, Plan(_weight_only(model))).plan
    return model, plan


def _weight_only(model: nn.Module) -> tuple[Any, ...]:
    return tuple(replace(layer, activation=None) for layer in make_plan(model, "fp8").layers)


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))


def run(path: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = onnx.load(path)
    names = [value.name for value in model.graph.output]
    found = evaluator(model, attention_operators()).run(None, {name: to_numpy(x) for name, x in inputs.items()})
    return {name: torch.from_numpy(np.asarray(y, dtype=np.float32)) for name, y in zip(names, found, strict=True)}


def test_one_pass_without_a_cache(decoder: tuple[Any, Plan], tmp_path: Path) -> None:
    model, plan = decoder
    tokens = ids(3, 12)
    with torch.no_grad():
        expected = model(tokens).logits
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    assert relative_error(run(path, {"input_ids": tokens})["logits"], expected) < 1e-5
    with torch.no_grad():  # exporting has left the model as it was, its own attention included
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize(("head_dim", "reader", "index"), [(16, "GroupQueryAttention", 6), (12, "Slice", 2)])
def test_the_number_of_keys_is_made_of_shapes(head_dim: int, reader: str, index: int, tmp_path: Path) -> None:
    """Of a number that the CUDA provider has made on the GPU, nodes that read it on the processor find what was there.

    It leaves nodes on the processor of which an input was made of a shape (onnxruntime-gpu 1.31 on an H200: every token
    was wrong, and with such numbers all are those of the processor).
    """
    model = tiny_models.llama(head_dim=head_dim)
    nodes = onnx.load(write_onnx(model, tmp_path / "m.onnx", capacity=16, runtime="onnxruntime")).graph.node
    maker = {name: node for node in nodes for name in node.output}

    def stays(name: str) -> bool:
        node = maker.get(name)
        return node is not None and (node.op_type == "Shape" or any(map(stays, node.input)))

    waiting = [node.input[index] for node in nodes if node.op_type == reader]
    assert any(map(stays, waiting))
    while waiting:
        name = waiting.pop()
        if name in maker and maker[name].op_type != "Shape":
            assert stays(name), maker[name].op_type
            waiting += maker[name].input


def test_a_step_over_a_cache(decoder: tuple[Any, Plan], tmp_path: Path) -> None:
    """The rows have 9 and 4 tokens, of which 6 and 3 are cached; the second is padded."""
    model, plan = decoder
    path = write_onnx(model, tmp_path / "m.onnx", capacity=16, plan=plan)
    check_file(path)
    tokens = ids(2, 9)
    empty = {f"past_{part}.{layer}": 9 * torch.randn(2, 2, 16, 64) for layer in range(2) for part in ("key", "value")}
    first = run(path, {"input_ids": tokens[:, :6], "lengths": _ints(0, 0), "last": _ints(5, 2), **empty})
    cache = {name.replace("new_", "past_"): x for name, x in first.items() if name != "logits"}
    step = torch.stack([tokens[0, 6:9], tokens[1, 3:6]])
    second = run(path, {"input_ids": step, "lengths": _ints(6, 3), "last": _ints(2, 0), **cache})
    with torch.no_grad():
        rows = [model(tokens[:1]).logits[0], model(tokens[1:]).logits[0]]
    for found, (one, other) in ((first, (5, 2)), (second, (8, 3))):
        assert relative_error(found["logits"], torch.stack([rows[0][one], rows[1][other]])) < 1e-5
    # Behind the tokens of this step the cache is as it was.
    assert torch.equal(second["new_key.0"][1, :, 6:], cache["past_key.0"][1, :, 6:])
    with torch.no_grad():
        assert torch.equal(model(tokens[:1]).logits[0], rows[0])


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("build", "capacity", "words"),
    [
        (lambda: tiny_models.llama(), 65, r"capacity=65: LlamaForCausalLM has positions for 64 tokens; lower it"),
        (lambda: tiny_models.llama(), 4, r"a cache holds 8 tokens or more; 0 exports without one"),
        (lambda: tiny_models.gemma2(), 32, r"its attention has softcap"),
        (lambda: tiny_models.bert(), 32, r"BertModel does not generate text, so it has no KV cache"),
        (lambda: tiny_models.t5(), 32, r"T5\w+ is an encoder with a decoder, whose KV cache no .* exports as one pass"),
        (
            lambda: tiny_models.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            32,
            r"its RoPE \(dynamic\) depends on the longest position",
        ),
        (
            lambda: tiny_models.build(
                "Qwen3Next", "ForCausalLM", {**tiny_models.EXPERTS, **LINEAR_ATTENTION, "mlp_only_layers": [0, 1]}
            ),
            32,
            r"its layers of type linear_attention keep another state; serve its checkpoint \(vLLM\)",
        ),
        (
            lambda: tiny_models.build("Bloom", "ForCausalLM", BLOOM),
            32,
            r"BloomForCausalLM computes attention in code of its own",
        ),
        (
            lambda: tiny_models.build("Bart", "ForCausalLM", BART),
            32,
            r"its positions are not an input of its forward",
        ),
    ],
)
def test_decoders_that_one_graph_cannot_serve(build: Any, capacity: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        write_onnx(build(), tmp_path / "m.onnx", capacity=capacity)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("native", "TRT_QuantizedAttention"),
        ("plugin", "QuantFp8Attention"),
        pytest.param("none", "Attention", marks=pytest.mark.slow),
    ],
)
def test_fp8_attention(tmp_path: Path, kind: str, operator: str) -> None:
    model = llama(torch.float16)
    scales = collect_attention_scales(model, ids(2, 32), kv_format=FP8, attention_format=FP8)
    path = tmp_path / "m.onnx"
    write_onnx(model, path, plan=Plan((), attention=FP8), attention=kind, attention_scales=scales)
    check_file(path)
    (node,) = (node for node in onnx.load(path).graph.node if node.op_type == operator)
    assert {entry.value for entry in node.metadata_props} == {"model.layers.0.self_attn"}
    tokens = ids(2, 32)
    found = run(path, {"input_ids": tokens})["logits"]
    attention = Attention(
        {m: n for n, m in model.named_modules()}, kind=kind, scales={} if kind == "none" else operand_scales(scales)
    )
    with attending(model, attention, masked=False), torch.no_grad():
        (expected,) = Graph(model, attention)({"input_ids": tokens})
        plain = model(tokens, use_cache=False).logits
    assert torch.equal(plain, expected)  # the model itself, while its attention is ours
    with torch.no_grad():
        original = model(tokens).logits
    assert relative_error(found, expected) < 5e-3
    assert relative_error(found, original) < (5e-3 if kind == "none" else 0.05)


def test_fp8_attention_needs_scales(decoder: tuple[Any, Plan], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attention in fp8, and no scales were given; pass .*--calib"):
        write_onnx(decoder[0], tmp_path / "m.onnx", plan=Plan((), attention=FP8))
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_ignores_padding(tmp_path: Path) -> None:
    model = tiny_models.bert(vocab_size=96)
    plan = quantize(model, Plan(_weight_only(model))).plan
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).last_hidden_state
    kinds = torch.zeros_like(tokens)
    found = run(path, {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds})["last_hidden_state"]
    assert relative_error(found[0], expected[0]) < 1e-5
    assert relative_error(found[1, :5], expected[1, :5]) < 1e-5


def bart(**options: Any) -> Any:
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    return tiny_models.build("Bart", "ForConditionalGeneration", {**sizes, **heads}, **options)


@pytest.mark.parametrize(("make", "dtype"), [(tiny_models.t5, "fp32"), (tiny_models.t5, "fp16"), (bart, "fp32")])
def test_an_encoder_with_a_decoder(make: Any, dtype: str, tmp_path: Path) -> None:
    """T5's first layer has a bias for the distance of tokens, and its decoder reads the weight of a layer."""
    model = make(vocab_size=96, gain=3, dtype=torch.float16 if dtype == "fp16" else torch.float32)
    plan = quantize(model, Plan(_weight_only(model))).plan
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    tokens, mask = ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": ids(3, 6)}
    with torch.no_grad():
        expected, unpadded = model(**inputs).logits, model(**{**inputs, "attention_mask": None}).logits
    found = run(path, inputs)["logits"]
    limit = 1e-5 if dtype == "fp32" else 1e-2
    assert relative_error(found, expected) < limit < relative_error(expected, unpadded)


def test_t5_by_names_of_its_inputs(tmp_path: Path) -> None:
    """torch.onnx fails on attention with learned biases in PyTorch's one function."""
    model = tiny_models.t5(vocab_size=96, gain=3)
    plan, before = quantize(model, Plan(_weight_only(model))).plan, model.config._attn_implementation
    graph_inputs = {
        "input_ids": GraphInput(ids(2, 5), ("batch", "source")),
        "decoder_input_ids": GraphInput(ids(2, 4), ("batch", "target")),
    }
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan, inputs=graph_inputs)
    assert model.config._attn_implementation == before
    inputs = {"input_ids": ids(3, 9), "decoder_input_ids": ids(3, 6)}
    with torch.no_grad():
        expected = model(**inputs)
    logits, encoded = run(path, inputs).values()
    assert relative_error(logits, expected.logits) < 1e-5
    assert relative_error(encoded, expected.encoder_last_hidden_state) < 1e-5


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Splinter"])
def test_causality_beside_a_mask_for_padding(family: str, tmp_path: Path) -> None:
    """The mask took the place of causality; Splinter's encoder does not say that its attention is not causal."""
    sizes = {**tiny_models.DECODER, "num_labels": 3, "pad_token_id": 0, "sliding_window": 9}
    head = "Model" if family == "Splinter" else "ForSequenceClassification"
    model = tiny_models.build(family, head, sizes, gain=3)
    plan = quantize(model, Plan(_weight_only(model))).plan
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan, shapes="sequence=1:9:9")
    tokens = ids(2, 9).clamp(1, 63)
    tokens[1, 6:] = 0
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    with torch.no_grad():
        expected = model(**inputs)[0]
    kinds = {"token_type_ids": torch.zeros_like(tokens)} if family == "Splinter" else {}
    (found,) = run(path, {**inputs, **kinds}).values()
    if family == "Splinter":  # embeddings of padding mean nothing
        expected, found = expected[tokens != 0], found[tokens != 0]
    assert relative_error(found, expected) < 1e-5


def test_a_mask_of_the_models_own_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "num_experts": 2}
    model = tiny_models.build("SwitchTransformers", "ForConditionalGeneration", sizes)
    with pytest.raises(
        ValueError, match=r"^encoder.block.0.*: its attention has a mask .*\(quant\.load\), or .*\(vLLM\)$"
    ):
        write_onnx(model, tmp_path / "m.onnx")


def test_an_image_model(tmp_path: Path) -> None:
    model = tiny_models.vit()
    plan = quantize(model, Plan(_weight_only(model)), run=lambda m: m(torch.zeros(1, 3, 32, 32))).plan
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan)
    check_file(path)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(images).logits
    assert relative_error(run(path, {"pixel_values": images})["logits"], expected) < 1e-5


def test_an_encoder_has_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not generate text, so it has no KV cache"):
        write_onnx(tiny_models.bert(), tmp_path / "m.onnx", capacity=32)


def test_a_sliding_window_limits_the_sequence(tmp_path: Path) -> None:
    model = tiny_models.mistral(vocab_size=96, num_hidden_layers=1, sliding_window=64)
    with pytest.raises(ValueError, match=r"window slides over 64 tokens.*shapes=\"sequence=1:64:64"):
        write_onnx(model, tmp_path / "m.onnx")
    path = write_onnx(model, tmp_path / "m.onnx", shapes="sequence=1:64:64")
    tokens = ids(2, 64)
    with torch.no_grad():
        expected = model(tokens).logits
    assert relative_error(run(path, {"input_ids": tokens})["logits"], expected) < 1e-5


def test_a_module_needs_examples_of_its_inputs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear is not a transformers model: name each of its inputs"):
        write_onnx(nn.Linear(4, 4), tmp_path / "m.onnx")


def test_a_classifier_over_clips_encoder_takes_its_images() -> None:
    """Its config has no channels and no size of images: its `vision_config` has them."""
    ((name, image),) = model_inputs(architectures.build("CLIPForImageClassification", torch.float32)).items()
    assert name == "pixel_values" and image.example.shape == (2, 3, 32, 32)


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_models_of_images_and_texts_need_inputs_by_name(name: str) -> None:
    """The export ended in "'NoneType' object has no attribute 'shape'"."""
    with pytest.raises(ValueError, match=f"{name} takes input_ids and pixel_values: name each of its inputs"):
        model_inputs(architectures.build(name, torch.float32))


def test_attention_of_few_heads_over_a_cache_is_spelled(tmp_path: Path) -> None:
    """TensorRT has no fused kernel for fewer than four heads with a mask, and stopped with Myelin's raw error."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model, tokens = tiny_models.llama(**sizes, dtype=torch.float16), ids(2, 6) % 64
    plan = quantize(model, Plan(_weight_only(model))).plan
    path = write_onnx(model, tmp_path / "m.onnx", plan=plan, capacity=16)
    assert "Attention" not in {node.op_type for node in onnx.load(path).graph.node}
    cache = {name: torch.zeros(2, 1, 16, 32, dtype=torch.float16) for name in ("past_key.0", "past_value.0")}
    step = {"input_ids": tokens, "lengths": torch.zeros(2, dtype=torch.long), "last": torch.tensor([5, 3])}
    found = run(path, {**step, **cache})["logits"]
    with torch.no_grad():
        expected = model(tokens).logits.float()
    assert relative_error(found, torch.stack([expected[0, 5], expected[1, 3]])) < 2e-3
