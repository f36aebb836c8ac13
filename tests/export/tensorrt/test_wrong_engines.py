"""Engines of wrong models, and of right models that are wired wrongly: the audit names what differs in each of them.

Each case changes one thing in a copy of a quantized model or in its ONNX file, builds an engine from that, and audits
it against the right model, as `quant check --checkpoint` does. The right engine passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_samples import SHAPES, drawn, written_graph
from torch import nn

import quant
from quant.calibration.attention_scales import collect_attention_scales
from quant.export.onnx.export_onnx import export_onnx
from quant.export.onnx.translate import LAYER_KEY, MODULE_KEY
from quant.export.tensorrt.audit import audit, failures
from quant.export.tensorrt.build import BuildOptions, build_engine, export_engine
from quant.formats.format import FORMATS

pytestmark = pytest.mark.slow
pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
onnx = pytest.importorskip("onnx", reason="needs the extra [onnx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")

MLP, ATTENTION = "model.layers.0.mlp", "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def right() -> Any:
    model = drawn(tiny_models.llama(gain=4.0, attention_bias=True, dtype=torch.float16))
    return quant.quantize(model, "nvfp4", torch.randint(0, 64, (2, 16)))


@pytest.fixture(scope="module")
def resnet() -> Any:
    images = torch.randn(2, 3, 32, 32, dtype=torch.float16)
    model = drawn(tiny_models.resnet(gain=4.0)).half()
    return quant.quantize(model, "int8", images, run=lambda model: model(images))


def problems(folder: Path, wrong: nn.Module, right: Any, change: Callable[[Any], None] | None = None) -> list[str]:
    """What the audit says of an engine of `wrong`, whose ONNX file is changed before, against the right model."""
    path = written_graph(folder, wrong, right, change)
    shapes = SHAPES if "Llama" in type(wrong).__name__ else None
    built = build_engine(path, folder / "model.engine", BuildOptions("sm120", shapes))
    return failures(audit(built.path, right.plan, model=right.model))


def mirror_scales(model: Any) -> None:
    scale = model.get_submodule(f"{MLP}.up_proj").scale
    scale.copy_(scale.flip(0))


def exchange_axes_of_scales(model: Any) -> None:
    scale = model.get_submodule(f"{MLP}.down_proj").scale
    scale.copy_(scale.T.reshape(scale.shape).clone())


def scale_input(model: Any) -> None:
    model.get_submodule(f"{ATTENTION}.o_proj").input_scale *= 64


def scale_weight(model: Any) -> None:
    model.get_submodule(f"{MLP}.gate_proj").global_scale *= 2


def exchange_mlps(model: Any) -> None:
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def exchange_q_and_k(model: Any) -> None:
    # The first rows of q, whose matrix is the larger one, and those of k.
    q, k = (model.get_submodule(f"{ATTENTION}.{name}_proj").codes for name in "qk")
    rows = q[: len(k)].clone()
    q[: len(k)].copy_(k)
    k.copy_(rows)


def replace_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def replace_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data.normal_()


def mirror_norm(model: Any) -> None:
    weight = model.model.layers[1].input_layernorm.weight
    weight.data = weight.flip(0)


def exchange_norms(model: Any) -> None:
    block = model.model.layers[0]
    block.input_layernorm, block.post_attention_layernorm = block.post_attention_layernorm, block.input_layernorm


def shift_codes(model: Any) -> None:
    codes = model.get_submodule(f"{MLP}.down_proj").codes
    codes.copy_(codes.roll(1, 0))


def transpose_codes(model: Any) -> None:
    codes = model.get_submodule(f"{ATTENTION}.o_proj").codes
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(1).T.contiguous()
    codes.copy_(wide[:, 0::2] | wide[:, 1::2] << 4)


def drop_bias(model: Any) -> None:
    model.get_submodule(f"{ATTENTION}.v_proj").bias = None


def change_theta(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def change_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-3


def change_scaling(model: Any) -> None:
    model.get_submodule(ATTENTION).scaling *= 2


def add_bias(model: Any) -> None:
    model.get_submodule(f"{MLP}.up_proj").bias = nn.Parameter(torch.randn(96, dtype=torch.float16))


def change_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


CASES = {
    mirror_scales: f"{MLP}.up_proj: planned as in the checkpoint, found other scales",
    exchange_axes_of_scales: f"{MLP}.down_proj: planned as in the checkpoint, found other scales",
    scale_input: f"{ATTENTION}.o_proj: planned as in the checkpoint, found other scale, input scale",
    scale_weight: f"{MLP}.gate_proj: planned as in the checkpoint, found other scale",
    exchange_mlps: f"{MLP}.gate_proj: planned as in the checkpoint, found other codes",
    exchange_q_and_k: f"{ATTENTION}.q_proj: planned as in the checkpoint, found other codes",
    replace_head: "lm_head: planned as in the checkpoint, found other weight",
    replace_embedding: "model.embed_tokens: planned as in the checkpoint, found other weight",
    mirror_norm: "model.layers.1.input_layernorm: planned as in the checkpoint, found other weight",
    exchange_norms: "model.layers.0.input_layernorm: planned as in the checkpoint, found other weight",
    shift_codes: f"{MLP}.down_proj: planned as in the checkpoint, found other codes",
    transpose_codes: f"{ATTENTION}.o_proj: planned as in the checkpoint, found other codes",
    drop_bias: f"{ATTENTION}.v_proj: planned as in the checkpoint, found other bias",
    change_theta: "model.rotary_emb: planned as in the checkpoint, found other inv_freq",
    change_epsilon: "model.norm: planned as in the checkpoint, found other epsilon",
    add_bias: f"{MLP}.up_proj: planned as in the checkpoint, found other surplus constant",
    change_activation: f"{MLP}.act_fn: planned as in the checkpoint, found other function",
    change_scaling: f"{ATTENTION}: planned as in the checkpoint, found other scaling",
}


def test_the_right_engine_passes(tmp_path: Path, right: Any) -> None:
    assert problems(tmp_path, right.model, right) == []


def test_a_case_that_changes_nothing_is_no_case(tmp_path: Path, right: Any) -> None:
    with pytest.raises(AssertionError, match="the wrong model has the right model's ONNX file"):
        written_graph(tmp_path, copy.deepcopy(right.model), right)


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_a_wrong_model_is_found(tmp_path: Path, right: Any, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(right.model)
    with torch.no_grad():
        change(wrong)
    found = problems(tmp_path, wrong, right)
    assert any(text.startswith(CASES[change]) for text in found), found


def test_an_input_that_nobody_reads(tmp_path: Path, right: Any) -> None:
    def add_input(model: Any) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, ["batch"]))

    assert problems(tmp_path, right.model, right, add_input) == [
        "lengths: planned an input that is read, found read by no kernel"
    ]


def test_blocks_that_were_exchanged_with_their_names(tmp_path: Path, right: Any) -> None:
    """Every layer has its own weights: only the order tells."""
    wrong = copy.deepcopy(right.model)
    wrong.model.layers = nn.ModuleList(reversed(wrong.model.layers))
    other = {"0": "1", "1": "0"}

    def exchange(name: str) -> str:
        head, list_, tail = name.partition("model.layers.")
        return head + list_ + other[tail[0]] + tail[1:] if list_ else name

    def rename(model: Any) -> None:
        for node in model.graph.node:
            for entry in node.metadata_props:
                if entry.key in (LAYER_KEY, MODULE_KEY):
                    entry.value = exchange(entry.value)

    found = problems(tmp_path, wrong, right, rename)
    assert found == [
        "order of blocks: planned as in the model, found model.layers.1 does not read model.layers.0",
        "order of blocks: planned as in the model, found model.layers.0 runs after model.layers.1",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "recipe"), [("bert", "fp8"), ("vit", "fp8"), ("resnet", "int8_static"), ("resnet", "fp8"), ("vit", "int8")]
)
def test_right_engines_of_encoders_pass(tmp_path: Path, kind: str, recipe: str, dtype: torch.dtype) -> None:
    """Scales that the compiler multiplied into norms, BatchNorm that became part of a convolution, and padding."""
    model = drawn(getattr(tiny_models, kind)(gain=4.0)).to(dtype)
    x = torch.randint(0, 64, (2, 16)) if kind == "bert" else torch.randn(2, 3, 32, 32, dtype=dtype)
    layers = {"exclude": ["*embedder*", "*shortcut*"]} if kind == "resnet" else {}
    done = quant.quantize(model, recipe, x, run=lambda model: model(x), **layers)
    assert problems(tmp_path, done.model, done) == []


def test_fp8_attention_with_a_mask_passes(tmp_path: Path) -> None:
    """The mask is the third operand of the fused kernel, in half precision, and is none of q, k and v."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = drawn(tiny_models.bert(**sizes, gain=4.0)).half()
    x, fp8 = torch.randint(0, 64, (2, 40)), FORMATS["fp8"]
    done = quant.quantize(model, "fp8", x)
    scales = collect_attention_scales(done.model, x, kv_format=fp8, attention_format=fp8)
    receipt = export_engine(
        done.model,
        tmp_path / "model.engine",
        BuildOptions("sm120", "batch=1:1:2,sequence=32:64:128"),
        plan=replace(done.plan, attention=fp8),
        attention_scales=scales,
    )
    assert receipt["passed"] and {"encoder.layer.0.attention.self"} <= {row["name"] for row in receipt["audit"]}


def test_values_that_become_codes_of_attention(tmp_path: Path) -> None:
    """The scale of V's layer is divided by that of attention's codes; another scale of the layer is found."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    model = drawn(tiny_models.llama(**sizes, num_hidden_layers=1, gain=4.0, dtype=torch.float16))
    x, fp8 = torch.randint(0, 64, (2, 40)), FORMATS["fp8"]
    done = quant.quantize(model, "fp8", x)
    scales = collect_attention_scales(done.model, x, kv_format=fp8, attention_format=fp8)
    options = {"plan": replace(done.plan, attention=fp8), "attention_scales": scales}
    build = BuildOptions("sm89", "batch=1:1:2,sequence=32:64:128")
    assert export_engine(done.model, tmp_path / "model.engine", build, **options)["passed"]
    layer = done.model.model.layers[0].self_attn.v_proj
    layer.scale = layer.scale * 1.01
    found = failures(audit(tmp_path / "model.engine", done.plan, attention="fp8", model=done.model))
    assert found == ["model.layers.0.self_attn.v_proj: planned as in the checkpoint, found other scale"]


def test_attention_that_was_left_out_is_known_without_a_receipt(tmp_path: Path, right: Any) -> None:
    plan = replace(right.plan, attention=FORMATS["fp8"])
    path = export_onnx(right.model, tmp_path / "model.onnx", plan=plan, attention="none")
    built = build_engine(path, tmp_path / "model.engine", BuildOptions("sm120", SHAPES))
    assert failures(audit(built.path, plan)) == []
    assert any("planned fp8, found half" in text for text in failures(audit(built.path, plan, attention="fp8")))


def test_convolutions(tmp_path: Path, resnet: Any) -> None:
    assert problems(tmp_path, resnet.model, resnet) == []
    wrong = copy.deepcopy(resnet.model)
    encoder = wrong.resnet.encoder.stages
    first, second = (encoder[1].layers[0].layer[i].convolution for i in (0, 1))
    with torch.no_grad():
        first.codes.copy_(first.codes.flip(-1))
        second.scale.copy_(second.scale.flip(0))
        encoder[0].layers[0].layer[1].normalization.running_mean.neg_()
    stage = "resnet.encoder.stages"
    # The factors of another BatchNorm are a surplus after the convolution, too.
    assert set(problems(tmp_path, wrong, resnet)) >= {
        f"{stage}.0.layers.0.layer.1.normalization: planned as in the checkpoint, found other factors",
        f"{stage}.1.layers.0.layer.0.convolution: planned as in the checkpoint, found other codes",
        f"{stage}.1.layers.0.layer.1.convolution: planned as in the checkpoint, found other scales",
    }
