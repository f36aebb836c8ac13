"""Wrong ONNX files do not pass `quant check FILE --source DIR`, and right ones do.

A wrong file is a right one in which a single thing was changed. Many of the changes move logits by less than roundings
may, so that the run beside the checkpoint passes: the graph must be that of the checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import tiny_models
import torch
from engine_samples import drawn
from slow_cases import quick_cases

import quant
from quant.base.json_files import json_text
from quant.export.checkpoint.load import describe, load

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")

from quant.export.engines.check_engine import check_engine  # noqa: E402 -- needs onnx
from quant.export.onnx.engine_session import OnnxruntimeSession  # noqa: E402 -- as above
from quant.export.onnx.export_onnx import round_head, tracer_versions, write_onnx  # noqa: E402 -- as above
from quant.export.tensorrt import rebuild  # noqa: E402 -- as above
from quant.export.tensorrt.rebuild import AS_EXPORTED, audit_onnx  # noqa: E402 -- as above

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BLOCKS = "model.layers"


def model_of(kind: str, dtype: torch.dtype) -> Any:
    if kind in ("bert", "resnet"):
        return drawn(getattr(tiny_models, kind)(gain=4.0)).to(dtype)
    if kind == "experts":
        return tiny_models.qwen3_moe(gain=4.0, dtype=dtype, max_position_embeddings=256)
    if kind == "biases":
        return drawn(serving_samples.decoder("llama-64", attention_bias=True, dtype=dtype))
    if kind == "gpt_oss":
        return serving_samples.gpt_oss(gain=4.0, dtype=dtype, max_position_embeddings=256)
    return serving_samples.decoder(kind, dtype=dtype)


def exported(folder: Path, kind: str, format: str, source: str, **options: Any) -> tuple[Path, Path]:
    """A checkpoint, and the directory of its ONNX file."""
    model = model_of(kind, DTYPES[source])
    x = IMAGES.to(DTYPES[source]) if kind == "resnet" else IDS
    done = quant.quantize(model, format, x, run=lambda model: model(x), solver="rtn")
    quant.save(done.model, done.plan, folder / "checkpoint")
    if kind not in ("bert", "resnet"):
        options = {"capacity": 128, **options}
    return folder / "checkpoint", quant.export_model(folder / "checkpoint", "onnx", folder / "out", **options).path


class Graph:
    """A loaded file, with what the changes look for."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        self.nodes = self.model.graph.node
        self.tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}

    def of(self, op: str) -> list[Any]:
        nodes = [node for node in self.nodes if node.op_type == op]
        assert nodes, f"no {op} in {sorted({node.op_type for node in self.nodes})}"
        return nodes

    def attribute(self, node: Any, name: str, value: float) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    def number(self, name: str) -> np.ndarray:
        array: np.ndarray = onnx.numpy_helper.to_array(self.tensors[name])
        return array

    def put(self, name: str, array: np.ndarray) -> None:
        self.tensors[name].CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))

    def exchange(self, first: str, second: str) -> None:
        a, b = self.number(first), self.number(second)
        assert not np.array_equal(a, b)
        self.put(first, b)
        self.put(second, a)

    def reader(self, name: str) -> Any:
        return next(node for node in self.nodes if name in node.input)

    def redirect(self, old: str, new: str) -> None:
        """Has all readers of a value read another one."""
        for node in self.nodes:
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new

    def maker(self, name: str) -> Any:
        return next(node for node in self.nodes if name in node.output)


# Other numbers.


def exchange_scales_of_two_layers(graph: Graph) -> None:
    graph.exchange(*(f"{BLOCKS}.{index}.mlp.up_proj.scale" for index in (0, 1)))


def exchange_biases_of_two_layers(graph: Graph) -> None:
    graph.exchange(*(f"{BLOCKS}.{index}.self_attn.v_proj.bias" for index in (0, 1)))


def change_the_base_of_rope(graph: Graph) -> None:
    frequencies = graph.number("model.rotary_emb.inv_freq")
    dim = 2 * frequencies.size
    # Of a base of 10,000 and 10,050.
    graph.put("model.rotary_emb.inv_freq", (10_050.0 ** -(np.arange(0, dim, 2) / dim)).astype(np.float32))


def move_a_zero_point_by_one(graph: Graph) -> None:
    """Of the codes of one layer's weight."""
    product = graph.of("MatMulIntegerToFloat")[3]
    graph.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(127, np.uint8), "moved"))
    product.input[5] = "moved"


def move_a_zero_point_of_inputs(graph: Graph) -> None:
    graph.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(129, np.uint8), "moved"))
    graph.of("QuantizeLinear")[1].input[2] = "moved"


def transpose_a_square_matrix(graph: Graph) -> None:
    """Codes and groups along the other axis; the scales stay."""
    name = f"{BLOCKS}.1.self_attn.o_proj.codes"
    tensor = graph.tensors[name]
    flat = np.frombuffer(tensor.raw_data, np.uint8)
    codes = np.stack([flat & 15, flat >> 4], -1).reshape(tensor.dims)
    square = codes[: codes.shape[1]]  # inputs of o_proj are more than its outputs
    square[:] = square.T.copy()
    tensor.raw_data = (codes.reshape(-1)[0::2] | codes.reshape(-1)[1::2] << 4).tobytes()


def transpose_fp8_codes(graph: Graph) -> None:
    name = f"{BLOCKS}.0.mlp.down_proj.codes"
    graph.put(name, graph.number(name).T)


def permute_the_experts(graph: Graph) -> None:
    """Their first projection alone."""
    node = graph.of("QMoE")[1]
    codes = next(name for name in node.input if name.endswith("gate_up_proj.codes"))
    graph.put(codes, graph.number(codes)[[1, 0, 2, 3]])


def give_an_untied_head_old_weights(graph: Graph) -> None:
    """Those before a last step of training."""
    name = "lm_head.weight" if "lm_head.weight" in graph.tensors else graph.of("MatMul")[-1].input[1]
    weight = graph.number(name)
    noise = np.random.default_rng(0).normal(size=weight.shape) * 1e-3 * np.abs(weight).mean()
    graph.put(name, (weight + noise).astype(weight.dtype))


def change_a_static_scale(graph: Graph) -> None:
    """By a percent, in one layer."""
    name = f"{BLOCKS}.1.mlp.down_proj.input_scale"
    graph.put(name, (graph.number(name) * np.float32(1.01)).astype(np.float32))


def turn_a_bit_of_a_norm(graph: Graph) -> None:
    name = f"{BLOCKS}.0.input_layernorm.weight"
    weight = graph.number(name).copy()
    weight[5] = np.nextafter(weight[5], weight.dtype.type(9))
    graph.put(name, weight)


def hold_a_norm_twice(graph: Graph) -> None:
    """Under one name: onnxruntime reads the first of them."""
    name = "model.norm.weight"
    other = onnx.numpy_helper.from_array(graph.number(name) * np.float32(1.01), name)
    right = list(graph.model.graph.initializer)
    del graph.model.graph.initializer[:]
    graph.model.graph.initializer.extend([other, *right])


def hold_a_norm_as_sparse_too(graph: Graph) -> None:
    name = "model.norm.weight"
    numbers = onnx.numpy_helper.from_array(graph.number(name) * np.float32(1.01), name)
    indices = onnx.numpy_helper.from_array(np.arange(*numbers.dims), "indices")
    graph.model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(numbers, indices, numbers.dims))


def exchange_two_rows_of_the_embedding(graph: Graph) -> None:
    rows = graph.number("model.embed_tokens.weight").copy()
    rows[[3, 4]] = rows[[4, 3]]
    graph.put("model.embed_tokens.weight", rows)


# Other nodes, or the same ones connected in another way.


def change_the_opset(graph: Graph) -> None:
    next(opset for opset in graph.model.opset_import if not opset.domain).version -= 1


def take_blocks_of_64(graph: Graph) -> None:
    graph.attribute(graph.of("DequantizeLinear")[2], "block_size", 64)


def take_scales_along_the_other_axis(graph: Graph) -> None:
    graph.attribute(graph.of("DequantizeLinear")[2], "axis", 1)


def exchange_names(values: Any, ends: list[Any], first: str, second: str) -> None:
    """In the graph's own `values` and in the `ends` of nodes."""
    names = {first: second, second: first}
    for value in values:
        value.name = names.get(value.name, value.name)
    for end in ends:
        for index, name in enumerate(end):
            end[index] = names.get(name, name)


def exchange_the_caches_of_two_blocks(graph: Graph) -> None:
    """Their inputs alone; the outputs stay."""
    exchange_names(graph.model.graph.input, [node.input for node in graph.nodes], "past_key.0", "past_key.1")


def exchange_new_keys_and_values(graph: Graph) -> None:
    exchange_names(graph.model.graph.output, [node.output for node in graph.nodes], "new_key.0", "new_value.0")


def halve_the_cache(graph: Graph) -> None:
    cache = next(value for value in graph.model.graph.input if value.name == "past_value.1")
    cache.type.tensor_type.shape.dim[2].dim_value //= 2


def hand_a_norm_in(graph: Graph) -> None:
    """As an input with a default, which a caller may replace."""
    norm = graph.tensors["model.norm.weight"]
    graph.model.graph.input.append(onnx.helper.make_tensor_value_info(norm.name, norm.data_type, list(norm.dims)))


def change_an_epsilon(graph: Graph) -> None:
    graph.attribute(graph.of("SkipSimplifiedLayerNormalization")[-1], "epsilon", 2e-6)


def turn_half_of_a_head(graph: Graph) -> None:
    graph.attribute(graph.of("RotaryEmbedding")[2], "rotary_embedding_dim", 32)


def turn_neighbours(graph: Graph) -> None:
    graph.attribute(graph.of("RotaryEmbedding")[3], "interleaved", 1)


def forget_the_scale_of_attention(graph: Graph) -> None:
    graph.attribute(graph.of("GroupQueryAttention")[1], "scale", 1.0)


def cap_scores(graph: Graph) -> None:
    graph.attribute(graph.of("GroupQueryAttention")[0], "softcap", 200.0)


def widen_a_window_by_one(graph: Graph) -> None:
    window = graph.of("GroupQueryAttention")[0]
    size = next(attribute.i for attribute in window.attribute if attribute.name == "local_window_size")
    assert size > 0
    graph.attribute(window, "local_window_size", size + 1)


def keep_keys_before_rope(graph: Graph) -> None:
    node = graph.of("GroupQueryAttention")[1]
    node.input[1] = graph.maker(node.input[1]).input[0]


def take_a_residual_after_the_norm(graph: Graph) -> None:
    node = graph.of("SkipSimplifiedLayerNormalization")[0]
    graph.redirect(node.output[3], node.output[0])


def take_the_tanh_of_gelu(graph: Graph) -> None:
    gelu = graph.of("Gelu")[1]
    kept = next(attribute.s for attribute in gelu.attribute if attribute.name == "approximate")
    graph.attribute(gelu, "approximate", "none" if kept == b"tanh" else "tanh")


def read_values_of_another_block(graph: Graph) -> None:
    first, second = graph.of("GroupQueryAttention")
    first.input[4], second.input[4] = second.input[4], first.input[4]


def clip_an_activation(graph: Graph) -> None:
    """At a value that few tokens reach."""
    node = graph.reader(f"{BLOCKS}.0.mlp.up_proj.output")
    index = list(node.input).index(f"{BLOCKS}.0.mlp.up_proj.output")
    graph.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(60, np.float32), "most"))
    clip = onnx.helper.make_node("Min", [node.input[index], "most"], ["clipped"])
    node.input[index] = "clipped"
    graph.nodes.insert(list(graph.nodes).index(node), clip)


def define_an_operator_anew(graph: Graph) -> None:
    """A function of the file that stands in the place of an operator."""
    node = onnx.helper.make_node("Sigmoid", ["x"], ["y"])
    opsets = [onnx.helper.make_opsetid("", 23)]
    graph.model.functions.append(onnx.helper.make_function("more", "Nothing", ["x"], ["y"], [node], opsets))
    graph.model.opset_import.append(onnx.helper.make_opsetid("more", 1))


def leave_out_a_relu(graph: Graph) -> None:
    relu = graph.of("Relu")[1]
    graph.redirect(relu.output[0], relu.input[0])


def leave_out(graph: Graph, node: Any, index: int) -> None:
    """Has the readers of a node read one of its inputs."""
    graph.redirect(node.output[0], node.input[index])


def exchange_keys_and_values(graph: Graph) -> None:
    """Two projections of one shape."""
    for part in ("codes", "scale"):
        graph.exchange(f"{BLOCKS}.1.self_attn.k_proj.{part}", f"{BLOCKS}.1.self_attn.v_proj.{part}")


def exchange_gate_and_up(graph: Graph) -> None:
    for part in ("codes", "scale"):
        graph.exchange(f"{BLOCKS}.0.mlp.gate_proj.{part}", f"{BLOCKS}.0.mlp.up_proj.{part}")


def share_keys_with_other_heads(graph: Graph) -> None:
    """KV heads in another order serve other heads of queries."""
    node = graph.of("GroupQueryAttention")[0]
    for index in (1, 2):
        halves = [f"{node.input[index]}.{part}" for part in (0, 1)]
        split = onnx.helper.make_node("Split", [node.input[index]], halves, axis=2, num_outputs=2)
        turned = onnx.helper.make_node("Concat", halves[::-1], [f"{node.input[index]}.turned"], axis=2)
        place = list(graph.nodes).index(node)
        graph.nodes.insert(place, split)
        graph.nodes.insert(place + 1, turned)
        node.input[index] = turned.output[0]


def count_positions_from_one(graph: Graph) -> None:
    node = next(node for node in graph.of("Unsqueeze") if node.input[0] == "lengths")
    graph.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    graph.nodes.insert(0, onnx.helper.make_node("Add", ["lengths", "one"], ["later"]))
    node.input[0] = "later"


def leave_out_a_residual(graph: Graph) -> None:
    """The sum of what a block adds to itself in its place."""
    node = graph.of("SkipSimplifiedLayerNormalization")[1]
    node.input[0] = node.input[1]


def leave_out_a_bias(graph: Graph) -> None:
    add = graph.maker(f"{BLOCKS}.1.self_attn.k_proj.output")
    assert add.op_type == "Add" and add.input[1].endswith("bias")
    leave_out(graph, add, 0)


def leave_out_the_scale_of_the_embedding(graph: Graph) -> None:
    leave_out(graph, graph.reader("model.embed_tokens.embed_scale"), 0)


def leave_out_a_norm_of_queries(graph: Graph) -> None:
    leave_out(graph, graph.reader(f"{BLOCKS}.0.self_attn.q_norm.weight"), 0)


def take_the_likeliest_expert_alone(graph: Graph) -> None:
    graph.attribute(graph.of("QMoE")[1], "k", 1)


def leave_out_sinks(graph: Graph) -> None:
    graph.of("GroupQueryAttention")[1].input[11] = ""


def exchange_sinks_of_two_blocks(graph: Graph) -> None:
    graph.exchange(f"{BLOCKS}.0.self_attn.sinks", f"{BLOCKS}.1.self_attn.sinks")


def leave_out_a_bias_of_experts(graph: Graph) -> None:
    graph.of("QMoE")[1].input[7] = ""


def take_the_gate_of_silu(graph: Graph) -> None:
    graph.attribute(graph.of("QMoE")[0], "activation_alpha", 1.0)


def raise_the_limit_of_a_gate(graph: Graph) -> None:
    graph.attribute(graph.of("QMoE")[0], "swiglu_limit", 7.5)


def change_the_epsilon_of_layer_norm(graph: Graph) -> None:
    graph.attribute(graph.of("LayerNormalization")[2], "epsilon", 1e-5)


def shift_positions(graph: Graph) -> None:
    name = next(name for name in graph.tensors if "position_embeddings" in name)
    graph.put(name, np.roll(graph.number(name), 1, 0))


WRONG: list[tuple[str, str, str, Callable[[Graph], None]]] = [
    ("llama-64", "int4a16_g32", "fp32", exchange_scales_of_two_layers),
    ("llama-64", "int4a16_g32", "fp32", hold_a_norm_twice),
    ("llama-64", "int4a16_g32", "fp32", change_an_epsilon),
    ("llama-64", "int4a16_g32", "fp32", change_the_base_of_rope),
    ("llama-64", "int4a16_g32", "fp32", turn_half_of_a_head),
    ("llama-64", "int4a16_g32", "fp32", turn_neighbours),
    ("llama-64", "int4a16_g32", "fp32", forget_the_scale_of_attention),
    ("llama-64", "int4a16_g32", "fp32", cap_scores),
    ("llama-64", "int4a16_g32", "fp32", keep_keys_before_rope),
    ("llama-64", "int4a16_g32", "fp32", take_a_residual_after_the_norm),
    ("llama-64", "int4a16_g32", "fp32", read_values_of_another_block),
    ("llama-64", "int4a16_g32", "fp32", clip_an_activation),
    ("llama-64", "int4a16_g32", "fp32", define_an_operator_anew),
    ("llama-64", "int4a16_g32", "fp32", transpose_a_square_matrix),
    ("llama-64", "int4a16_g32", "fp32", turn_a_bit_of_a_norm),
    ("llama-64", "fp8", "fp16", transpose_fp8_codes),
    ("llama-64", "fp8", "fp16", turn_a_bit_of_a_norm),
    ("llama-64", "fp8", "fp16", give_an_untied_head_old_weights),
    ("biases", "int8_static", "fp16", exchange_biases_of_two_layers),
    ("biases", "int8_static", "fp16", change_a_static_scale),
    ("biases", "int8_static", "fp16", move_a_zero_point_by_one),
    ("biases", "int8_static", "fp16", move_a_zero_point_of_inputs),
    ("gemma3", "int8", "bf16", widen_a_window_by_one),
    ("gemma3", "int8", "bf16", take_the_tanh_of_gelu),
    ("experts", "int4a16_g32", "fp32", permute_the_experts),
    ("bert", "fp8_channel", "fp16", change_the_epsilon_of_layer_norm),
    ("bert", "fp8_channel", "fp16", shift_positions),
    ("resnet", "int8", "fp32", leave_out_a_relu),
    ("llama-64", "int4a16_g32", "fp32", exchange_keys_and_values),
    ("llama-64", "int4a16_g32", "fp32", exchange_gate_and_up),
    ("llama-64", "int4a16_g32", "fp32", share_keys_with_other_heads),
    ("llama-64", "int4a16_g32", "fp32", count_positions_from_one),
    ("llama-64", "int4a16_g32", "fp32", leave_out_a_residual),
    ("biases", "int8_static", "fp16", leave_out_a_bias),
    ("gemma3", "int8", "bf16", leave_out_the_scale_of_the_embedding),
    ("experts", "int4a16_g32", "fp32", leave_out_a_norm_of_queries),
    ("experts", "int4a16_g32", "fp32", take_the_likeliest_expert_alone),
    ("bert", "fp8_channel", "fp16", take_the_tanh_of_gelu),
    ("gpt_oss", "int4a16_g32", "fp32", leave_out_sinks),
    ("gpt_oss", "int4a16_g32", "fp32", exchange_sinks_of_two_blocks),
    ("gpt_oss", "int4a16_g32", "fp32", leave_out_a_bias_of_experts),
    ("gpt_oss", "int4a16_g32", "fp32", take_the_gate_of_silu),
    ("gpt_oss", "int4a16_g32", "fp32", raise_the_limit_of_a_gate),
    ("llama-64", "int4a16_g32", "fp32", hold_a_norm_as_sparse_too),
    ("llama-64", "int4a16_g32", "fp32", exchange_two_rows_of_the_embedding),
    ("llama-64", "int4a16_g32", "fp32", change_the_opset),
    ("llama-64", "int4a16_g32", "fp32", take_blocks_of_64),
    ("llama-64", "int4a16_g32", "fp32", take_scales_along_the_other_axis),
    ("llama-64", "int4a16_g32", "fp32", exchange_the_caches_of_two_blocks),
    ("llama-64", "int4a16_g32", "fp32", exchange_new_keys_and_values),
    ("llama-64", "int4a16_g32", "fp32", halve_the_cache),
    ("llama-64", "int4a16_g32", "fp32", hand_a_norm_in),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    @cache
    def right(*case: str) -> tuple[Path, Path]:
        return exported(tmp_path_factory.mktemp("onnx"), *case)

    return right


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Stands for `_exported_again`: exports a checkpoint once, and not for each wrong file of it."""
    again: dict[str, tuple[Any, Path]] = {}
    usual, keep = rebuild._exported_again, tmp_path_factory.mktemp("again")

    def export_once(where: str, model: Any, metadata: Any, plan: Any, folder: Path) -> tuple[Any, Path]:
        key = json_text([metadata, plan.digest()])
        if key not in again:
            (keep / str(len(again))).mkdir()
            again[key] = usual(where, model, metadata, plan, keep / str(len(again)))
        record, path = again[key]
        return record, Path(shutil.copy(path, folder))

    return export_once


def is_quick(kind: str, format: str, *_: Any) -> bool:
    return (kind, format) in (("llama-64", "int4a16_g32"), ("resnet", "int8"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "format", "source", "change"), quick_cases(WRONG, is_quick))
def test_a_wrong_file_fails(
    files: Any, exports: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, format: str, source: str,
    change: Callable[[Graph], None],
) -> None:  # fmt: skip
    checkpoint, out = files(kind, format, source)
    monkeypatch.setattr(rebuild, "_exported_again", exports)
    graph = Graph(out / "model.onnx")
    onnx.save(graph.model, tmp_path / "model.onnx")
    (row,) = audit_onnx(tmp_path / "model.onnx", load(checkpoint), describe(checkpoint)[0])
    assert row.passed  # before the change
    change(graph)
    onnx.save(graph.model, tmp_path / "model.onnx")
    checked = check_engine(tmp_path / "model.onnx", checkpoint)
    assert checked.passed is False
    assert {row.found for row in checked.audit} <= {"other numbers", "other nodes", "in the file's"}


RIGHT: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama-128", "int4a16_g64", "bf16", {}),
    ("biases", "int8_static", "fp32", {"dtype": "fp16", "lm_head": "int8"}),
    ("gemma3", "fp8", "fp16", {"shapes": "batch=1:2:4"}),
    ("qwen3", "nvfp4", "bf16", {}),
    ("mistral", "int8@16bit", "fp32", {"target": "tensorrt"}),
    ("experts", "int4a16_g32", "fp32", {}),
    ("gpt_oss", "fp8@16bit", "bf16", {"dtype": "fp16"}),
    ("gpt_oss", "int8@16bit", "fp32", {}),
    ("llama-64", "fp8_channel", "fp32", {"capacity": 0}),
    ("llama-64", "fp8", "fp32", {"capacity": None, "inputs": {"input_ids": "int64:batch,sequence"}}),
    ("bert", "fp8", "bf16", {"dtype": "fp16"}),
    ("resnet", "int8", "fp16", {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "format", "source", "options"), quick_cases(RIGHT, is_quick))
def test_a_right_file_does_not_fail(
    tmp_path: Path, kind: str, format: str, source: str, options: dict[str, Any]
) -> None:
    checkpoint, out = exported(tmp_path, kind, format, source, **options)
    checked = check_engine(out, checkpoint)
    assert [row.found for row in checked.audit] == ["as the checkpoint is exported"], checked.audit
    runs = kind not in ("bert", "resnet") and format != "nvfp4" and "inputs" not in options
    runs = runs and options.get("capacity") != 0
    assert checked.passed is (True if runs else None), checked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache": "fp8", "data": IDS}, "the KV cache is in fp8, by a node of our TensorRT plugin"),
        ({"dtype": "bf16"}, "the model is in BF16, for which it has no operators on a processor"),
    ],
)
def test_a_file_that_onnxruntime_does_not_load_is_compared(tmp_path: Path, options: Any, reason: str) -> None:
    checkpoint, out = exported(tmp_path, "llama-64", "fp8", "fp16", target="tensorrt", **options)
    checked = check_engine(out, checkpoint)
    assert [row.found for row in checked.audit] == ["as the checkpoint is exported"] and checked.passed is None
    assert checked.facts[-1][1].startswith(f"not run: onnxruntime 1.32 does not load this file: {reason}; ")


def test_numbers_are_those_that_a_runtime_reads(
    files: Any, exports: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tensor lies is said by `data_location`, whatever else names a file; a length may be left out there."""
    checkpoint, out = files("llama-64", "int4a16_g32", "fp32")
    monkeypatch.setattr(rebuild, "_exported_again", exports)
    path, inside = tmp_path / "model.onnx", Graph(out / "model.onnx").tensors
    onnx.save(onnx.load(out / "model.onnx"), path, save_as_external_data=True, location="numbers")
    model = onnx.load(path, load_external_data=False)
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    last = max(outside, key=lambda tensor: int(tensor.external_data[1].value))
    assert [entry.key for entry in last.external_data] == ["location", "offset", "length"]
    del last.external_data[2]
    onnx.save(model, path)
    assert check_engine(path, checkpoint).passed
    last.raw_data, last.data_location = inside[last.name].raw_data, onnx.TensorProto.DEFAULT
    onnx.save(model, path)
    assert check_engine(path, checkpoint).passed
    last.raw_data = bytes([last.raw_data[0] ^ 1]) + last.raw_data[1:]
    onnx.save(model, path)
    checked = check_engine(path, checkpoint)
    assert checked.passed is False and [row.found for row in checked.audit] == ["other numbers"]
    with (tmp_path / "numbers").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=r"numbers: ends before .*: it was cut off; copy or export it again"):
        check_engine(path, checkpoint)


def exchange(first: Any, second: Any, key: str) -> None:
    """Exchanges where two initializers lie: at another offset, or in another file."""
    a, b = (next(entry for entry in tensor.external_data if entry.key == key) for tensor in (first, second))
    a.value, b.value = b.value, a.value


def leave_lengths_out(*tensors: Any) -> None:
    for tensor in tensors:
        kept = [entry for entry in tensor.external_data if entry.key != "length"]
        del tensor.external_data[:]
        tensor.external_data.extend(kept)


def say(key: str, value: str | None) -> Callable[[Any, Any], None]:
    def change(first: Any, _: Any) -> None:
        entries = {entry.key: entry.value for entry in first.external_data} | {key: value}
        del first.external_data[:]
        for name, text in entries.items():
            if text is not None:
                first.external_data.add(key=name, value=text)

    return change


DAMAGED = r"k_proj\.codes of 8192 bytes is said to lie at .*; export the file again"


@pytest.mark.parametrize(
    ("together", "change", "found"),
    [
        (True, lambda k, v: exchange(k, v, "offset"), "other numbers"),
        (False, lambda k, v: exchange(k, v, "location"), "other numbers"),
        (True, lambda k, v: say("offset", str(int(k.external_data[1].value) + 64))(k, v), "other numbers"),
        (True, leave_lengths_out, AS_EXPORTED),
        (False, leave_lengths_out, AS_EXPORTED),
        (True, say("location", None), DAMAGED),
        (True, say("offset", "abc"), DAMAGED),
        (True, say("offset", "-64"), DAMAGED),
        (True, say("length", "4096"), DAMAGED),
        (True, say("offset", "999999999"), "numbers: ends before .*k_proj.codes: it was cut off"),
        (True, say("location", "other"), "its weights other are missing"),
    ],
)
def test_where_numbers_lie(
    files: Any, exports: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool,
    change: Callable[[Any, Any], None], found: str,
) -> None:  # fmt: skip
    """Codes of two projections of one shape, in one file or each in its own."""
    checkpoint, out = files("llama-64", "int4a16_g32", "fp32")
    monkeypatch.setattr(rebuild, "_exported_again", exports)
    path, options = tmp_path / "model.onnx", {"location": "numbers", "size_threshold": 4096}
    onnx.save(
        onnx.load(out / "model.onnx"), path, save_as_external_data=True, all_tensors_to_one_file=together, **options
    )
    model = onnx.load(path, load_external_data=False)
    codes = {tensor.name: tensor for tensor in model.graph.initializer}
    change(*(codes[f"{BLOCKS}.0.self_attn.{name}.codes"] for name in ("k_proj", "v_proj")))
    onnx.save(model, path)
    if found not in (AS_EXPORTED, "other numbers"):
        with pytest.raises(ValueError, match=found):
            check_engine(path, checkpoint)
        return
    checked = check_engine(path, checkpoint)
    assert {row.found for row in checked.audit} == {found} and checked.passed is (found == AS_EXPORTED)


@pytest.mark.filterwarnings("ignore")
def test_no_other_layer_than_the_head_is_rounded_by_an_export(tmp_path: Path) -> None:
    name = f"{BLOCKS}.0.mlp.down_proj"
    done = quant.quantize(model_of("llama-64", torch.float32), "int4a16_g32", IDS, solver="rtn", exclude=[name])
    quant.save(done.model, done.plan, tmp_path / "checkpoint")
    round_head(done.model, name)
    path = write_onnx(done.model, tmp_path / "m.onnx", capacity=128, runtime="onnxruntime", plan=done.plan)
    rows = audit_onnx(path, load(tmp_path / "checkpoint"), done.plan)
    assert name in [row.name for row in rows if not row.passed]


@pytest.mark.parametrize("capacity", ["64", "4096"])
def test_the_capacity_is_that_of_the_caches(files: Any, tmp_path: Path, capacity: str) -> None:
    graph = Graph(files("llama-64", "int4a16_g32", "fp32")[1] / "model.onnx")
    next(entry for entry in graph.model.metadata_props if entry.key == "blockscale.capacity").value = capacity
    onnx.save(graph.model, tmp_path / "model.onnx")
    assert OnnxruntimeSession(tmp_path / "model.onnx").capacity == 128


def test_a_file_of_another_processor_is_run_alone(
    files: Any, exports: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frequencies of RoPE have other last bits."""
    checkpoint, out = files("llama-64", "int4a16_g32", "fp32")
    monkeypatch.setattr(rebuild, "_exported_again", exports)
    path, here, graph = tmp_path / "model.onnx", tracer_versions(), Graph(out / "model.onnx")
    graph.put("model.rotary_emb.inv_freq", np.nextafter(graph.number("model.rotary_emb.inv_freq"), np.float32(0)))
    onnx.save(graph.model, path)
    assert check_engine(path, checkpoint).passed is False
    monkeypatch.setattr("quant.export.onnx.export_onnx.tracer_versions", lambda: {**here, "processor": "aarch64"})
    checked = check_engine(path, checkpoint)
    (row,) = checked.audit
    assert row.passed and checked.backend and checked.kl < 1e-3
    assert row.found == f"not compared: to compare it, use processor=={here['processor']}, which exported it"
